"""Time of training cycles of the glyph network against plain loops, which are here, and how it grows.

run: taskset -c 0 python benchmarks/cycle.py [--parts dmd2 rl share growth] [--repeats 7] [--threads 1] [--json FILE]

The plain loops use the same networks, and the rest as one writes it first: torch's random numbers, a bare AdamW, an
average in a loop. Both arms are checked to have the same losses and gradients from the same rows and noise; then they
take turns, and a ratio is the median of pairs, plain to ours. Seconds are of the process where there is one thread.
  dmd2    a period of the recipe with N = 4: one update of the student and K = 2 of the fake score, with as many rows
          each in every arm: 32 and 128, and 32 with a network of 50 M parameters.
            plain   the student's update, then K of the fake score, each on a simulation of its own (at N = 4 each exit
                    in turn, one a batch). The student's exit step runs once, with a graph; the teacher is called twice
            reuse   plain, but the first fake update takes the student's sample, as the official code does
            ours    the recipe: both updates of a cycle share its rollout, and where the student is updated that ends
                    before the exit; every sample has an exit of its own, each exit as often
            shared  the same with exit_step shared, one exit a batch as in plain
            all     exit_step all: a quarter of the samples, whose four exits are the rows
  rl      one update on a rollout that is there. plain Flow-GRPO: batch after batch, step after step, a network call for
          each branch of the guidance, log-prob, ratio to the recorded one, backward. plain NFT: the same with calls of
          policy, old policy and reference. A case says how many samples a call of the plain loop has; ours fills
          micro-batches of 32 with steps of samples, both branches in one call.
  share   time of a cycle outside network calls, backward and the optimizer's step, for 50 M parameters.
  growth  seconds against the number of steps T (updates), of rows and of K (DMD2).

Exits with 1 if the arms disagree or a ratio of LIMITS is missed.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from sigmazero import seeds
from sigmazero.config import RunConfig, SigmaConfig, load_recipe
from sigmazero.launch.local import Built, build, load_model
from sigmazero.records import Batch, Conditioning
from sigmazero.schedule import score_sigma, sigma_grid
from sigmazero.training.state import RoleOptimizer

ROOT = Path(__file__).parents[1]
PARTS = ("dmd2", "rl", "share", "growth")
LIMITS = {  # least ratio of plain to ours; most of a share
    "dmd2 recipe ours": 1.1,
    "dmd2 recipe all": 1.3,
    "dmd2 large ours": 1.1,
    "dmd2 large all": 1.3,
    "flow_grpo group": 1.3,
    "share dmd2": 0.03,
    "share flow_grpo": 0.03,
}
NUM_STEPS, ROWS, SHAPE, EMA = 4, 32, (3, 16, 16), 0.98
LARGE = ["model.path=random", "model.width=448", "model.num_layers=7"]  # 50.2 M parameters
SIZES = {  # rows of an update, other settings, and how much of the repeats it gets
    "recipe": (ROWS, [], 1),
    "128 rows": (4 * ROWS, [], 0.3),
    "large": (ROWS, LARGE, 0.15),
}
JPEG = "rewards={jpeg: {kind: jpeg}}"


@dataclass
class Draws:
    """Random numbers for a batch: torch's, or the trainer's for those samples."""

    rows: int
    samples: Sequence[int] | None = None
    cycle: int = 0

    def normal(self, stream: str, step: int = 0) -> Tensor:
        if self.samples is None:
            return torch.randn(self.rows, *SHAPE)
        return seeds.normal(0, stream, self.samples, SHAPE, self.cycle, step)

    def sigma(self, stream: str, s: SigmaConfig) -> Tensor:
        u = torch.rand(self.rows) if self.samples is None else seeds.uniform(0, stream, self.samples, self.cycle)
        return score_sigma(u, s.distribution, s.shift, s.low, s.high)


def per_row(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


@dataclass
class Plain:
    """What every plain loop has: networks, an optimizer each, an average."""

    config: RunConfig
    model: Any
    nets: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.AdamW] = field(default_factory=dict)
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the last update, where they are noted
    noting: bool = False

    def __post_init__(self) -> None:
        for role, own in self.config.optimizers.items():
            parameters = self.nets[role].requires_grad_(True).parameters()
            self.optimizers[role] = torch.optim.AdamW(
                parameters, lr=own.lr, betas=own.betas, eps=own.eps, weight_decay=own.weight_decay
            )

    def v(self, role: str, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        return self.model.velocity(self.nets[role], x, sigma, condition)

    def step(self, role: str, average: str | None = None) -> None:
        net, optimizer = self.nets[role], self.optimizers[role]
        if self.noting:
            self.gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        nn.utils.clip_grad_norm_(net.parameters(), self.config.optimizers[role].clip)
        optimizer.step()
        optimizer.zero_grad()
        if average:
            with torch.no_grad():
                for mine, theirs in zip(self.nets[average].parameters(), net.parameters(), strict=True):
                    mine.mul_(EMA).add_(theirs, alpha=1 - EMA)


class PlainDMD2(Plain):
    """See the top of the file. ``prompts`` is the trainer's stream."""

    def __init__(self, config: RunConfig, built: Built) -> None:
        model, roles = load_model(config), ("student", "teacher", "fake_score", "student_ema")
        super().__init__(config, model, {role: copy.deepcopy(model.net) for role in roles})
        self.prompts, self.periods, self.samples = built.prompts, 0, 0
        self.settings: Any = config.algorithm
        self.sigmas, self.rows = sigma_grid(NUM_STEPS, self.settings.shift), config.data.batch_size
        self.negative = model.encode([""] * self.rows)

    def told(self) -> Conditioning:
        prompts = self.prompts.prompts(range(self.samples, self.samples + self.rows))
        self.samples += self.rows
        return self.model.encode([prompt.text for prompt in prompts])

    def predicted(self, x: Tensor, i: int, condition: Conditioning) -> Tensor:
        return x - self.sigmas[i] * self.v("student", x, self.sigmas[i].repeat(self.rows), condition)

    @torch.no_grad()
    def simulated(self, exit_step: int, condition: Conditioning, draws: Draws) -> Tensor:
        """The input of the exit step."""
        x = draws.normal("initial_noise")
        for i in range(exit_step):
            x0 = self.predicted(x, i, condition)
            x = (1 - self.sigmas[i + 1]) * x0 + self.sigmas[i + 1] * draws.normal("step_noise", i)
        return x

    def update_student(self, exit_step: int, draws: Draws) -> tuple[Tensor, Conditioning]:
        condition = self.told()
        x0 = self.predicted(self.simulated(exit_step, condition, draws), exit_step, condition)
        with torch.no_grad():
            sigma, eps = draws.sigma("score_sigma", self.settings.score_sigma), draws.normal("score_noise")
            noised = (1 - per_row(sigma)) * x0 + per_row(sigma) * eps
            positive = self.v("teacher", noised, sigma, condition)
            negative = self.v("teacher", noised, sigma, self.negative)
            teacher = negative + self.settings.guidance * (positive - negative)
            fake = self.v("fake_score", noised, sigma, condition)
            g = (teacher - fake) / (teacher - (eps - x0)).abs().mean((1, 2, 3), keepdim=True)
        loss = 0.5 * nn.functional.mse_loss(x0, (x0 - g).detach())
        loss.backward()
        self.step("student", "student_ema")
        return x0.detach(), condition

    def update_fake(self, exit_step: int, draws: Draws, sample: tuple[Tensor, Conditioning] | None = None) -> None:
        x0, condition = sample or (None, self.told())
        if x0 is None:
            with torch.no_grad():
                x0 = self.predicted(self.simulated(exit_step, condition, draws), exit_step, condition)
        sigma, eps = draws.sigma("fake_sigma", self.settings.fake_sigma), draws.normal("fake_noise")
        noised = (1 - per_row(sigma)) * x0 + per_row(sigma) * eps
        loss = nn.functional.mse_loss(self.v("fake_score", noised, sigma, condition), eps - x0)
        loss.backward()
        self.loss = loss.item()
        self.step("fake_score")

    def period(self, *, reuse: bool = False) -> None:
        """Over N periods each of its simulations has had every exit."""
        draws = Draws(self.rows)
        sample = self.update_student(self.periods % NUM_STEPS, draws)
        for k in range(self.settings.fake_updates):
            self.update_fake((self.periods + 1 + k) % NUM_STEPS, draws, sample if reuse and k == 0 else None)
        self.periods += 1


class PlainRL(Plain):
    """An update on a feed of the trainer, ``size`` samples a call."""

    def __init__(self, config: RunConfig, built: Built, feed: Batch, size: int) -> None:
        model, roles = load_model(config), ("policy", "policy_ema", "old", "reference")
        super().__init__(config, model, {role: copy.deepcopy(model.net) for role in roles})
        self.feed, self.size = feed, size
        self.settings: Any = config.algorithm
        self.negative = model.encode([""] * size)

    def update(self, *, keyed: bool = False) -> None:
        term = self.flow_grpo if self.settings.name == "flow_grpo" else self.nft
        self.loss = 0.0
        num_rows, num_steps = self.feed["sigma"].shape
        for start in range(0, num_rows, self.size):
            batch = self.feed.take(range(start, start + self.size))
            condition = self.model.encode([prompt.text for prompt in batch.prompts])
            draws = Draws(self.size, batch["sample"].tolist() if keyed else None)
            for t in range(num_steps):
                loss = term(batch, t, condition, draws) * self.size / (num_rows * num_steps)
                loss.backward()
                self.loss += loss.item()
        self.step("policy", "policy_ema")

    def flow_grpo(self, batch: Batch, t: int, condition: Conditioning, draws: Draws) -> Tensor:
        c, x, y = self.settings, batch["latents"][:, t], batch["latents"][:, t + 1]
        now, after = batch["sigma"][:, t], batch["sigma_next"][:, t]
        v = self.v("policy", x, now, condition)
        if c.guidance != 1:
            negative = self.v("policy", x, now, self.negative)
            v = negative + c.guidance * (v - negative)
        level = c.eta * (now / (1 - torch.where(now == 1, batch["guard"], now))).sqrt()
        s, sigma, dt = per_row(level), per_row(now), per_row(after - now)
        mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        std = s * (-dt).sqrt()
        density = -((y - mean) ** 2) / (2 * std**2) - std.log() - math.log(math.sqrt(2 * math.pi))
        ratio = (density.mean((1, 2, 3)) - batch["log_prob"][:, t]).exp()
        gain = batch["advantage"]
        return torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - c.clip, 1 + c.clip)).mean()

    def nft(self, batch: Batch, t: int, condition: Conditioning, draws: Draws) -> Tensor:
        c, x0, now = self.settings, batch["x0"], batch["sigma"][:, t]
        sigma = per_row(now)
        x = (1 - sigma) * x0 + sigma * draws.normal("train_noise", t)
        v = self.v("policy", x, now, condition)
        with torch.no_grad():
            old, reference = (self.v(role, x, now, condition) for role in ("old", "reference"))
        r = (batch["advantage"] / (2 * c.advantage_range) + 0.5).clamp(0, 1)
        sides = []
        for mixed in (c.beta * v + (1 - c.beta) * old, (1 + c.beta) * old - c.beta * v):
            error = x - sigma * mixed - x0
            scale = error.detach().abs().mean((1, 2, 3)).clamp_min(1e-5)
            sides.append((error**2).mean((1, 2, 3)) / scale)
        loss = c.advantage_range * (r * sides[0] + (1 - r) * sides[1]) / c.beta
        return (loss + c.kl_weight * ((v - reference) ** 2).mean((1, 2, 3))).mean()


# Ours


@contextmanager
def noted(optimizer: RoleOptimizer) -> Iterator[dict[str, Tensor]]:
    """The gradient that the optimizer steps on."""
    found: dict[str, Tensor] = {}
    step = optimizer.step

    def noting(norm: float) -> float:
        found.update({n: p.grad.clone() for n, p in optimizer.parameters.items() if p.grad is not None})
        return step(norm)

    optimizer.step = noting  # pyright: ignore[reportAttributeAccessIssue]
    yield found
    optimizer.step = step  # pyright: ignore[reportAttributeAccessIssue]


def recipe(name: str, *overrides: str) -> RunConfig:
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", [f"training.threads={THREADS}", *overrides])


def periods(*overrides: str) -> Callable[[], None]:
    """Our trainer, a period a call."""
    config = recipe("glyph_dmd2", *overrides)
    trainer, settings = build(config).trainer, cast(Any, config.algorithm)

    def period() -> None:
        for _ in range(settings.fake_updates):
            trainer.run_cycle()

    return period


def rollout_of(built: Built) -> dict[str, Batch]:
    trainer = built.trainer
    return trainer._prepare(trainer.collector.collect(0, 0), 0)


def updates(built: Built, feeds: dict[str, Batch]) -> Callable[[], dict[str, float]]:
    """One update of our trainer on a rollout a call, always as on a fresh one."""
    phase = next(phase for phase in built.algorithm.phases if phase.updates)

    def update() -> dict[str, float]:
        metrics: dict[str, float] = {}
        built.roles.versions["policy"] = 0
        built.trainer._run(phase, feeds, metrics, set())
        return metrics

    return update


# Measuring


def seconds(call: Callable[[], Any]) -> float:
    clock = time.process_time if THREADS == 1 else time.perf_counter
    began = clock()
    call()
    return clock() - began


def in_turns(arms: Mapping[str, Callable[[], Any]], turns: int, together: int = 1) -> dict[str, list[float]]:
    """Seconds of every arm; they take turns, and each is first as often. ``together`` calls make one figure."""
    for call in arms.values():
        call()
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(turns):
        sums = dict.fromkeys(arms, 0.0)
        for k in range(together):
            names = list(arms)
            first = (turn * together + k) % len(names)
            for arm in names[first:] + names[:first]:
                sums[arm] += seconds(arms[arm])
        for arm, value in sums.items():
            found[arm].append(value / together)
    return found


def ratio(times: Mapping[str, Sequence[float]], plain: str, ours: str) -> float:
    return statistics.median(a / b for a, b in zip(times[plain], times[ours], strict=True))


def keep_memory() -> None:
    """Has glibc keep what is freed. By luck it gives much of it back after each backward, in one arm or another."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        ctypes.CDLL(None).mallopt(-3, 2**30)  # M_MMAP_THRESHOLD


class Report:
    """What was found, printed as it comes."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.failures: list[str] = []

    def times(self, name: str, times: Mapping[str, Sequence[float]]) -> None:
        for arm, own in times.items():
            self.found[f"{name} {arm} seconds"] = list(own)
            print(f"{name:<24} {arm:<6} {statistics.median(own):8.3f} s", flush=True)

    def number(self, name: str, value: float, *, most: bool = False) -> None:
        self.found[name] = value
        limit = LIMITS.get(name)
        wanted = "" if limit is None else f"  ({'at most' if most else 'at least'} {limit})"
        print(f"{name:<40} {value:6.3f}{wanted}", flush=True)
        if limit is not None and (value > limit if most else value < limit):
            self.failures.append(f"{name} is {value:.3f}, wanted {'at most' if most else 'at least'} {limit}")

    def same(self, name: str, ours: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> None:
        """Each tensor to 1e-4 of its norm; the smallest ones to that of all."""
        whole = math.sqrt(sum(float(value.norm()) ** 2 for value in plain.values()))
        for key, value in plain.items():
            gap = float((ours[key] - value).norm())
            if gap > 1e-4 * float(value.norm()) + 1e-6 * whole:
                self.failures.append(f"{name}: the arms differ in {key} by {gap:.2e}, of {float(value.norm()):.2e}")


def check_dmd2(report: Report) -> None:
    """Gradients of both updates and the loss of the fake score, from the rollout of cycle 0."""
    config = recipe("glyph_dmd2", f"algorithm.num_steps={NUM_STEPS}", "algorithm.exit_step=shared")
    built = build(config)
    algorithm: Any = built.algorithm
    exit_step, optimizers = algorithm.plan(0).stop, built.trainer.optimizers
    plain = {role: PlainDMD2(config, built) for role in optimizers}
    with noted(optimizers["student"]) as student, noted(optimizers["fake_score"]) as fake:
        metrics = built.trainer.run_cycle()
    for loop in plain.values():
        loop.noting = True
    plain["student"].update_student(exit_step, Draws(ROWS, range(ROWS)))
    plain["fake_score"].update_fake(exit_step, Draws(ROWS, range(ROWS)))
    report.same("dmd2 student", student, plain["student"].gradients)
    report.same("dmd2 fake score", fake, plain["fake_score"].gradients)
    loss = {"loss": torch.tensor(metrics["train/fake_score_loss"])}
    report.same("dmd2 fake score", loss, {"loss": torch.tensor(plain["fake_score"].loss)})


def dmd2(report: Report, repeats: int, sizes: Sequence[str]) -> None:
    check_dmd2(report)
    for name in sizes:
        rows, own, share_of_repeats = SIZES[name]
        micro = [f"optimizers.{role}.micro_batch={rows}" for role in ("student", "fake_score")]
        size = [f"data.batch_size={rows}", f"algorithm.num_steps={NUM_STEPS}", *micro, *own]
        config = recipe("glyph_dmd2", *size)
        plain, reuse = (PlainDMD2(config, build(config)) for _ in range(2))
        arms = {
            "plain": plain.period,
            "reuse": lambda reuse=reuse: reuse.period(reuse=True),
            "ours": periods(*size),
            "shared": periods(*size, "algorithm.exit_step=shared"),
            "all": periods(*size, "algorithm.exit_step=all", f"data.batch_size={rows // NUM_STEPS}"),
        }
        times = in_turns(arms, math.ceil(repeats * share_of_repeats), together=NUM_STEPS)
        report.times(f"dmd2 {name}", times)
        for arm in ("ours", "shared", "all"):
            report.number(f"dmd2 {name} {arm}", ratio(times, "plain", arm))
            report.number(f"dmd2 {name} {arm} to reuse", ratio(times, "reuse", arm))


CASES = {  # recipe, samples of an update, samples a call of the plain loop, guidance
    "flow_grpo group": ("glyph_flow_grpo_fast", 8, 8, 2.0),
    "flow_grpo recipe": ("glyph_flow_grpo_fast", 64, 32, 1.0),
    "flow_grpo guided": ("glyph_flow_grpo_fast", 64, 32, 2.0),
    "flow_grpo guided, 8 a call": ("glyph_flow_grpo_fast", 64, 8, 2.0),
    "nft group": ("glyph_nft", 8, 8, 1.0),
    "nft recipe": ("glyph_nft", 64, 32, 1.0),
    "nft 8 a call": ("glyph_nft", 64, 8, 1.0),
}


def case(name: str) -> tuple[PlainRL, Built, Callable[[], dict[str, float]]]:
    which, samples, size, guidance = CASES[name]
    own = ["algorithm.kl_weight=1e-4"] if which == "glyph_nft" else [f"algorithm.guidance={guidance}"]
    config = recipe(which, f"data.batch_size={samples}", JPEG, *own)
    built = build(config)
    feeds = rollout_of(built)
    return PlainRL(config, built, feeds["rollout"], size), built, updates(built, feeds)


def rl(report: Report, repeats: int) -> None:
    for name in CASES:
        plain, built, ours = case(name)
        with built:
            plain.noting = True
            plain.update(keyed=True)
            with noted(built.trainer.optimizers["policy"]) as gradients:
                metrics = ours()
            report.same(name, gradients, plain.gradients)
            loss = torch.tensor(metrics["train/policy_loss"])
            gap = float((loss - plain.loss).abs())
            if gap > 1e-4 * float(loss.abs()) + 1e-6:
                report.failures.append(f"{name}: the losses are {float(loss)} and {plain.loss}")
            plain.noting = False
            times = in_turns({"plain": plain.update, "ours": ours}, repeats, together=2)
        report.times(name, times)
        report.number(name, ratio(times, "plain", "ours"))


@contextmanager
def counted(built: Built) -> Iterator[dict[str, float]]:
    """Seconds in network calls, backward and the optimizers' steps."""
    spent: dict[str, float] = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)

    def timed(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            began = time.process_time() if THREADS == 1 else time.perf_counter()
            result = inner(*args, **keywords)
            spent[name] += (time.process_time() if THREADS == 1 else time.perf_counter()) - began
            return result

        return call

    backward: Any = Tensor.backward
    Tensor.backward = timed("backward", backward)
    model: Any = built.roles.model
    model.velocity = timed("forward", model.velocity)
    for optimizer in built.trainer.optimizers.values():
        optimizer.step = timed("optimizer", optimizer.step)
    yield spent
    Tensor.backward = backward


def share(report: Report, repeats: int) -> None:
    configs = {
        "dmd2": recipe("glyph_dmd2", f"algorithm.num_steps={NUM_STEPS}", *LARGE),
        "flow_grpo": recipe("glyph_flow_grpo_fast", "data.batch_size=16", "algorithm.kl_every=0", JPEG, *LARGE),
    }
    for name, config in configs.items():
        with build(config) as built, counted(built) as spent:
            length = max(phase.every for phase in built.algorithm.phases)
            shares = []
            for turn in range(1 + max(1, repeats // 3)):
                spent.update(dict.fromkeys(spent, 0.0))
                whole = seconds(lambda built=built, length=length: [built.trainer.run_cycle() for _ in range(length)])
                if turn:
                    shares.append(1 - sum(spent.values()) / whole)
            parts = {part: value / whole for part, value in spent.items()}
            millions = sum(p.numel() for p in built.roles.model.net.parameters()) / 1e6
            print(f"{name}: {millions:.1f} M parameters, {whole:.1f} s a period;", parts)
            report.found[f"share {name} parts"] = parts
        report.number(f"share {name}", statistics.median(shares), most=True)


def growth(report: Report, repeats: int) -> None:
    """Absolute seconds; no limit."""
    steps = f"algorithm.num_steps={NUM_STEPS}"
    for rows in (8, 16, 32, 64):
        times = in_turns({f"rows {rows}": periods(steps, f"data.batch_size={rows}")}, repeats)
        report.times("dmd2 period", times)
    for k in (1, 2, 5):
        report.times("dmd2 period", in_turns({f"K {k}": periods(steps, f"algorithm.fake_updates={k}")}, repeats))
    for steps in (1, 2, 4, 8):
        strategy = f"algorithm.steps={{strategy: window, count: {steps}, range: [0, 9]}}"
        settings = {"glyph_flow_grpo": strategy, "glyph_nft": f"algorithm.num_timesteps={steps}"}
        for name, own in settings.items():
            with build(recipe(name, "data.batch_size=16", JPEG, own)) as built:
                times = in_turns({f"T {steps}": updates(built, rollout_of(built))}, repeats)
            report.times(f"{name} update", times)


def main() -> None:
    global THREADS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="of the part dmd2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    THREADS = args.threads
    keep_memory()
    torch.set_num_threads(THREADS)
    report = Report()
    parts = {"dmd2": functools.partial(dmd2, sizes=args.sizes), "rl": rl, "share": share, "growth": growth}
    for part in args.parts:
        parts[part](report, args.repeats)
    if args.json:
        args.json.write_text(json.dumps(report.found, indent=1) + "\n")
    for line in report.failures:
        print(line, file=sys.stderr)
    sys.exit(1 if report.failures else 0)


THREADS = 1

if __name__ == "__main__":
    main()
