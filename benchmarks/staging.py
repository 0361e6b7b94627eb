"""Memory and time of one update against its number of steps T, with the trajectory on the host or on the device.

run: taskset -c 0 python benchmarks/staging.py [--steps 1 8 32] [--repeats 3] [--json FILE]

The real Qwen-Image transformer: two layers, two heads of 32, 1024 x 64 latent tokens, 16 text tokens of width 32, bf16
base, LoRA of rank 8; batch 4, micro-batches of 2. Three arms make the same update from the same state:
  retained  the whole batch on the device; what the terms return is kept until the update ends
  released  the whole batch on the device; what the terms return goes with the graph, right after each backward
  staged    the batch on the host, the next step under way while one computes (the default of a run)
Bytes are above the resting state at the start of the update: on CUDA the allocator's own; on a CPU the profiler's, and
the device's copy of an input is a real one there too. The CPU's padding of calls to 8 rows, which is there for equal
bits and absent on CUDA, is switched off. Seconds are of the process on a CPU, which others may share.

Exits with 1 if the arms disagree, or a ratio of LIMITS is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor

from sigmazero import sampler, seeds
from sigmazero.algorithms import flow_grpo, nft
from sigmazero.algorithms.base import Algorithm, Phase
from sigmazero.config import LoraConfig, OptimizerConfig, parse
from sigmazero.models.qwen_image import QwenImageModel
from sigmazero.models.roles import Roles
from sigmazero.records import Batch, Conditioning, Prompt, Scores, Trajectory
from sigmazero.training.phase import PhaseResult, run_phase
from sigmazero.training.staging import Mode
from sigmazero.training.state import RoleOptimizer

ROWS, MICRO_BATCH, GRID, TOKENS, WIDTH = 4, 2, 32, 16, 32
ARMS: dict[str, tuple[Mode, bool]] = {
    "retained": ("whole", True),
    "released": ("whole", False),
    "staged": ("prefetch", False),
}
LIMITS = {
    "flat_peak": 1.05,  # staged, most steps to fewest
    "flat_input": 1.05,
    "flow_grpo": 0.35,  # staged to retained, at the most steps
    "nft": 0.20,
    "seconds": 1.03,  # staged to released, median of pairs
}
SETTINGS: dict[str, dict[str, Any]] = {
    "flow_grpo": {"eta": 0.8, "clip": 0.2, "guidance": 2.0, "kl_every": 0},
    "nft": {"kl_weight": 1e-4, "kl_every": 0},
}


class BareTransformer(QwenImageModel):
    """The family's transformer, told by random embeddings: no VAE and no text encoder."""

    def __init__(self, net: QwenImageTransformer2DModel) -> None:
        self.net, self._grid, self.latent_shape = net.eval(), (GRID, GRID), (GRID * GRID, 64)

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        embeddings = seeds.normal(0, "captions", [len(text) for text in prompts], (TOKENS, WIDTH)).bfloat16()
        return Conditioning({"embeddings": embeddings, "mask": torch.ones(len(prompts), TOKENS, dtype=torch.bool)})


@dataclass
class Case:
    """An algorithm at a number of steps, with its network and its feed."""

    algorithm: Algorithm
    roles: Roles
    optimizer: RoleOptimizer
    feed: Batch
    device: torch.device

    @property
    def phase(self) -> Phase:
        return next(phase for phase in self.algorithm.phases if phase.updates)

    def __post_init__(self) -> None:
        self._start = {role: self._weights(role) for role, kind in self.roles.kinds.items() if kind != "frozen"}

    def _weights(self, role: str) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.roles.parameters(role).items()}

    @torch.no_grad()
    def reset(self) -> None:
        """Weights, moments and counts as at the start; the moments' memory stays, as from the second update on."""
        for role, start in self._start.items():
            for name, value in self.roles.parameters(role).items():
                value.copy_(start[name])
        for moment in self.optimizer.state().values():
            moment.zero_()
        self.optimizer.steps = 0
        self.roles.versions.update(dict.fromkeys(self.roles.versions, 0))

    def update(self, arm: str, before_each: Callable[[], None] = lambda: None) -> tuple[PhaseResult, dict[str, Tensor]]:
        """One update; its result, and what it leads to: losses, the gradient and the new weights."""
        (staging, keep), ((name, term),) = ARMS[arm], self.phase.terms.items()

        def announced(roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
            before_each()
            return term(roles, batch)

        phase = dataclasses.replace(self.phase, terms={name: announced})
        gradient: dict[str, Tensor] = {}
        step = self.optimizer.step

        def noting(norm: float) -> float:
            gradient.update(
                {f"gradient/{n}": p.grad.clone() for n, p in self.optimizer.parameters.items() if p.grad is not None}
            )
            return step(norm)

        self.optimizer.step = noting  # pyright: ignore[reportAttributeAccessIssue]
        try:
            result = run_phase(
                phase, self.roles, {"policy": self.optimizer}, {"rollout": self.feed}, MICRO_BATCH,
                device=self.device, staging=staging, keep_outputs=keep,
            )  # fmt: skip
        finally:
            self.optimizer.step = step
        assert result.stepped == 1
        metrics = {name: torch.tensor(value) for name, value in result.metrics.items()}
        return result, metrics | gradient | self._weights("policy")


def made(name: Literal["flow_grpo", "nft"], steps: int, device: torch.device) -> Case:
    """A case whose adapters are away from their start, so that each of them counts."""
    own = {"num_steps": steps + 1} if name == "flow_grpo" else {"num_steps": 10, "num_timesteps": steps}
    config = parse(
        {
            "algorithm": {"name": name, **SETTINGS[name], **own},
            "data": {"batch_size": ROWS},
            "rollout": {"group_size": ROWS},
            "rewards": {"jpeg": {"kind": "jpeg"}},
            "optimizers": {"policy": {"lr": 1e-4, "clip": 1.0}},
        }
    )
    algorithm = {"flow_grpo": flow_grpo, "nft": nft}[name].build(config)
    with seeds.weight_init(0):
        net = QwenImageTransformer2DModel(
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=32,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(8, 12, 12),
        )
    net.to(device=device, dtype=torch.bfloat16)  # pyright: ignore[reportCallIssue]
    sources = {average.target: average.source for average in algorithm.averages}
    roles = Roles(BareTransformer(net), algorithm.roles, sources, lora=LoraConfig(rank=8, alpha=16))
    for index, role in enumerate(role for role, kind in algorithm.roles.items() if kind != "frozen"):
        for number, value in enumerate(roles.parameters(role).values()):
            value.data += 0.02 * seeds.normal(index, "weight_init", [number], value.shape)[0].to(device)
    optimizer = RoleOptimizer("policy", roles.parameters("policy"), OptimizerConfig(lr=1e-4, clip=1.0), 1000)
    return Case(algorithm, roles, optimizer, feed(algorithm), device)


def feed(algorithm: Algorithm) -> Batch:
    """Of a rollout of random latents, which are as large as others."""
    requests = algorithm.requests([Prompt(0, "a prompt")] * ROWS, range(ROWS), 0)
    trajectories = []
    for request in requests:
        ret = request.plan.ret
        latents = seeds.normal(0, "initial_noise", [request.sample], (len(ret), GRID * GRID, 64))[0]
        scored = torch.tensor(
            [0.0 if i in (request.plan.sde or ()) else torch.nan for i in range(len(request.sigmas) - 1)]
        )
        trajectories.append(Trajectory(request, latents, ret, request.sigmas, scored, 0))
    total = torch.arange(ROWS, dtype=torch.float64)
    return algorithm.feeds(trajectories, Scores({"made_up": total}, total), None, 0)["rollout"]


def peak_bytes(case: Case, arm: str) -> int:
    """The most that an update has allocated at once, beyond what there was when it began."""
    if case.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.update(arm)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with Watch() as watch:
        case.update(arm, watch.next)
    return watch.peak


class Watch:
    """Adds up what a CPU's allocator gives and takes, by the profiler's events.

    It goes on in pieces, one a micro-batch, because the events of a long update fill the memory themselves.
    """

    level, peak = 0, 0

    def __enter__(self) -> Watch:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def next(self) -> None:
        self._stop()
        self._start()

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile: Any = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profile.__enter__()

    def _stop(self) -> None:
        self._profile.__exit__(None, None, None)
        events = self._profile.profiler.kineto_results.events()
        found = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        for _, change in sorted(found, key=lambda pair: pair[0]):
            self.level += change
            self.peak = max(self.peak, self.level)


def seconds(case: Case, arm: str) -> float:
    clock = time.process_time if case.device.type == "cpu" else time.perf_counter
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    began = clock()
    case.update(arm)
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def measured(case: Case, repeats: int) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What each arm takes, and where they disagree. Arms take turns, and each has the first turn as often."""
    table: dict[str, dict[str, Any]] = {arm: {"times": []} for arm in ARMS}
    outcomes: dict[str, dict[str, Tensor]] = {}
    for arm in ARMS:  # the warm-up
        case.reset()
        result, outcomes[arm] = case.update(arm)
        table[arm]["input_bytes"] = result.input_bytes
        table[arm]["moved_bytes"] = result.moved_bytes
        del result
    for arm in ARMS:
        case.reset()
        table[arm]["peak_bytes"] = peak_bytes(case, arm)
    for turn in range(repeats):
        order = list(ARMS)[turn % 3 :] + list(ARMS)[: turn % 3]
        for arm in order:
            case.reset()
            table[arm]["times"].append(seconds(case, arm))
    for row in table.values():
        row["seconds"] = statistics.median(row["times"])
    return table, disagreeing(outcomes)


def disagreeing(outcomes: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Losses, gradients and weights in which an arm differs from the first one."""
    first, *others = outcomes.items()
    return [
        f"{arm} differs from {first[0]} in {name}"
        for arm, outcome in others
        for name, value in first[1].items()
        if not torch.allclose(outcome[name].double(), value.double(), rtol=1e-5, atol=1e-6)
    ]


def missed(name: str, tables: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Ratios that are above their limit, each printed."""
    few, many = min(tables), max(tables)
    staged = {steps: table["staged"] for steps, table in tables.items()}
    pairs = [
        one / other
        for table in tables.values()
        for one, other in zip(table["staged"]["times"], table["released"]["times"], strict=True)
    ]
    ratios = {
        "flat_peak": staged[many]["peak_bytes"] / staged[few]["peak_bytes"],
        "flat_input": staged[many]["input_bytes"] / staged[few]["input_bytes"],
        name: staged[many]["peak_bytes"] / tables[many]["retained"]["peak_bytes"],
        "seconds": statistics.median(pairs),
    }
    for ratio, value in ratios.items():
        print(f"{name}: {ratio} {value:.3f}, at most {LIMITS[ratio]}")
    return [
        f"{name}: {ratio} is {value:.3f}, above {LIMITS[ratio]}"
        for ratio, value in ratios.items()
        if value > LIMITS[ratio]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sampler.CPU_ROW_MULTIPLE = 1
    failures, found = [], {}
    for name in args.algorithms:
        tables = {}
        for steps in args.steps:
            tables[steps], differing = measured(made(name, steps, torch.device(args.device)), args.repeats)
            failures += [f"{name}, T = {steps}: {line}" for line in differing]
            for arm, row in tables[steps].items():
                peak, inputs = (f"{row[key] / 2**20:6.1f} MiB" for key in ("peak_bytes", "input_bytes"))
                print(f"{name} T={steps:<3} {arm:<9} peak {peak}  input {inputs}  {row['seconds']:7.2f} s", flush=True)
        failures += missed(name, tables)
        found[name] = {str(steps): table for steps, table in tables.items()}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    for line in failures:
        print(line, file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
