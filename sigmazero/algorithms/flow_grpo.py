"""Flow-GRPO: coupled online RL on the recorded transitions of a stochastic rollout (arXiv 2505.05470; math §4).

Loss -> roles updated -> data needed:
  clipped policy gradient on the stochastic steps -> policy (policy_ema follows) -> prompts, rewards

MixGRPO's windows, Flow-GRPO-Fast, DanceGRPO's kind and GRPO-Guard are settings of it. The coupling to the rollout is by
``transition.py`` alone: whatever moved the sample scores it again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sigmazero import transition
from sigmazero.algorithms.advantages import group_advantages
from sigmazero.algorithms.base import (
    Algorithm,
    Arm,
    Average,
    Phase,
    before_and_after,
    dealt_rows,
    warmed_up_decay,
)
from sigmazero.algorithms.losses import clipped_loss, guard_log_ratio
from sigmazero.config import FlowGRPOConfig, RolloutConfig, RunConfig
from sigmazero.models.roles import RoleKind, Roles
from sigmazero.plugins import load_plugin
from sigmazero.records import Batch, Prompt, RolloutRequest, Scores, StepPlan, Trajectory, rows_of, to_device
from sigmazero.schedule import sigma_grid
from sigmazero.strategies import (
    StepStrategy,
    all_but_last,
    checked_plan,
    epoch_global_random_choice,
    moving_window,
    sde_window,
    shared_draw,
)

STEP_FIELDS = ("x", "y", "sigma", "sigma_next", "log_prob")
CHAINS = {"latents": ("x", "y")}  # of windows whose steps are neighbours, instead of x and y
GAPS = ("log_prob_mean_abs_diff", "log_prob_abs_diff_max")


@dataclasses.dataclass(frozen=True)
class FlowGRPO:
    """Roles: policy (trained, sampled), reference (frozen: the start), policy_ema."""

    config: FlowGRPOConfig
    seed: int
    group_size: int
    strategy: StepStrategy
    roles: Mapping[str, RoleKind] = dataclasses.field(
        default_factory=lambda: {"policy": "train", "reference": "frozen", "policy_ema": "average"}
    )
    policy: str = "policy"
    uses_pictures: bool = False

    @property
    def phases(self) -> Sequence[Phase]:
        """The KL where it is due, old log-probs where several updates share a rollout, then the policy's updates."""
        c, found = self.config, list[Phase]()
        if c.kl_every:
            calls = ("policy", "reference")
            found.append(
                Phase(
                    "kl", {"rollout": self._measure_kl}, calls, every=c.kl_every, step_fields=STEP_FIELDS, chains=CHAINS
                )
            )
        if self._recomputes_old:
            found.append(
                Phase(
                    "old", {"rollout": self._score_again}, ("policy",), writes=self._old_fields,
                    step_fields=STEP_FIELDS, chains=CHAINS, by_sigma=GAPS[:1], shared=GAPS,
                )
            )  # fmt: skip
        found.append(
            Phase(
                "policy", {"rollout": self._improve}, ("policy", "reference")[: 2 if c.kl_weight else 1], ("policy",),
                rows=dealt_rows(self.seed, c.updates, c.epochs), step_fields=(*STEP_FIELDS, *self._old_fields),
                chains=CHAINS, by_sigma=("ratio_deviation", "clip_fraction", GAPS[0]), shared=GAPS,
            )
        )  # fmt: skip
        return found

    @property
    def _recomputes_old(self) -> bool:
        """Whether the trainer scores the rollout once more before several updates move the policy."""
        c = self.config
        return c.updates * c.epochs > 1 and c.old_log_prob == "trainer"

    @property
    def _old_fields(self) -> tuple[str, ...]:
        """What it keeps of that."""
        if not self._recomputes_old:
            return ()
        return ("old_log_prob", "old_mean") if self.config.ratio == "guard" else ("old_log_prob",)

    @property
    def averages(self) -> Sequence[Average]:
        return (Average("policy_ema", "policy", warmed_up_decay(self.config.ema_decay)),)

    @property
    def arms(self) -> Sequence[Arm]:
        c = self.config
        return before_and_after(c.evaluation_steps or c.num_steps, c.shift, c.guidance)

    def requests(self, prompts: Sequence[Prompt], samples: range, cycle: int) -> list[RolloutRequest]:
        c = self.config
        sigmas = sigma_grid(c.num_steps, c.shift)
        return [
            RolloutRequest(
                sample, cycle, prompt, self.policy, sigmas, c.kind, c.eta, c.guidance, self.seed, self.plan(sample),
                group=sample // self.group_size,
            )
            for sample, prompt in zip(samples, prompts, strict=True)
        ]  # fmt: skip

    def plan(self, sample: int) -> StepPlan:
        """The step plan of a sample.

        Raises:
            ValueError: the strategy fails, or its plan has no step with a log-probability.
        """
        c = self.config
        name = f"algorithm.steps.strategy {c.steps.strategy!r}, sample {sample}"
        try:
            plan = checked_plan(self.strategy(sample, c.num_steps, self.seed), c.num_steps)
        except Exception as error:
            raise ValueError(f"{name}: {' '.join(str(error).split())}") from error
        if plan.sde is None or plan.stop is not None:
            raise ValueError(f"{name}: it gave {tuple(plan)}; flow_grpo needs named stochastic steps and no stop")
        if not self._scored(plan.sde):
            raise ValueError(
                f"{name}: none of its steps {plan.sde} of {c.num_steps} has a log-probability with kind {c.kind!r}; "
                "name an earlier step, or set more steps"
            )
        return plan

    def check_drawn(self, steps: Sequence[int]) -> None:
        """Whether every step that a strategy may ever draw can be scored.

        Raises:
            ValueError: names those that cannot.
        """
        inside = [i for i in steps if 0 <= i < self.config.num_steps]  # a plan with another says so itself
        without = sorted(set(inside) - set(self._scored(inside)))
        if without:
            raise ValueError(
                f"algorithm.steps.strategy {self.config.steps.strategy!r} may draw step {without[0]} of "
                f"{self.config.num_steps}, which has no log-probability with kind {self.config.kind!r}; leave it out"
            )

    def _scored(self, steps: Sequence[int]) -> list[int]:
        """The steps whose transition has a std: the last one has none with cps."""
        sigmas, c = sigma_grid(self.config.num_steps, self.config.shift), self.config
        at = list(steps)
        x, guard = torch.zeros(len(at), 1, 1, 1), sigmas[1].expand(len(at))  # as pictures: a kernel may be the user's
        _, std = transition.moments(c.kind, c.eta, x, x, sigmas[at], sigmas[[i + 1 for i in at]], guard)
        return [i for i, deviation in zip(at, std.tolist(), strict=True) if deviation > 0]

    def feeds(
        self, trajectories: Sequence[Trajectory], scores: Scores | None, pictures: Batch | None, cycle: int
    ) -> dict[str, Batch]:
        """A row a sample; its stochastic steps by their true indices, with the sigmas that they were sampled at (B35).

        Raises:
            ValueError: the samples do not all have the same number of scored steps.
        """
        assert scores is not None
        steps = [[i for i, p in enumerate(t.log_prob.tolist()) if not math.isnan(p)] for t in trajectories]
        counts = {len(own) for own in steps}
        if len(counts) > 1:
            raise ValueError(
                f"algorithm.steps.strategy {self.config.steps.strategy!r} gives {sorted(counts)} scored steps in one "
                "cycle; every sample must have as many"
            )
        pairs = list(zip(trajectories, steps, strict=True))
        self._check_sampled(trajectories)
        advantage, weight = group_advantages(trajectories, scores.total, self.config.advantage, self.group_size)
        fields = rows_of([t.request.sample for t in trajectories], cycle) | {
            "weight": weight,
            "advantage": advantage,
            "version": torch.tensor([t.version for t in trajectories]),
            "guard": torch.stack([t.request.sigmas[1] for t in trajectories]),
            **_latents(pairs),
            "sigma": torch.stack([t.sigmas[own] for t, own in pairs]),
            "sigma_next": torch.stack([t.sigmas[[i + 1 for i in own]] for t, own in pairs]),
            "log_prob": torch.stack([t.log_prob[own] for t, own in pairs]),
        }
        return {"rollout": Batch(fields, tuple(t.request.prompt for t in trajectories))}

    def _check_sampled(self, trajectories: Sequence[Trajectory]) -> None:
        """Training scores what was sampled, or not at all (B41): a dumped rollout may be of other settings."""
        for name in ("kind", "eta", "guidance"):
            own = getattr(self.config, name)
            other = next((getattr(t.request, name) for t in trajectories if getattr(t.request, name) != own), None)
            if other is not None:
                raise ValueError(
                    f"the rollout was made with {name} {other!r}, and algorithm.{name} is {own!r}; set it to {other!r} "
                    "or make another rollout"
                )
        grid = sigma_grid(self.config.num_steps, self.config.shift)
        for t in trajectories:
            if not torch.equal(t.request.sigmas, grid):
                raise ValueError(
                    f"the rollout was made on the sigmas {[round(s, 4) for s in t.request.sigmas.tolist()]}; set "
                    "algorithm.num_steps and algorithm.shift to those, or make another rollout"
                )
            if t.version == -1 and t.request.plan.sde != self.plan(t.request.sample).sde:
                raise ValueError(
                    f"the rollout was made with the stochastic steps {t.request.plan.sde} (sample {t.request.sample}), "
                    "and algorithm.steps gives others; set it to what it was, or make another rollout"
                )

    def _velocity(self, roles: Roles, role: str, batch: Batch) -> Tensor:
        assert batch.condition is not None
        return roles.velocity(role, self.config.guidance)(batch["x"], batch["sigma"], batch.condition)

    def _moments(self, batch: Batch, v: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        return transition.moments(c.kind, c.eta, batch["x"], v, batch["sigma"], batch["sigma_next"], batch["guard"])

    def _log_prob(self, y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        score = transition.log_prob if self.config.score == "gaussian" else transition.log_prob_no_constants
        return score(y, mean, std)

    def _gaps(self, roles: Roles, batch: Batch, mean: Tensor, std: Tensor) -> dict[str, Tensor]:
        """How far the trainer's log-probs are from the engine's; nothing once the policy is another than sampled."""
        if set(batch["version"].tolist()) != {roles.versions["policy"]}:
            return {}
        gap = (transition.log_prob(batch["y"], mean.detach(), std) - batch["log_prob"]).abs()
        return dict.fromkeys(GAPS, gap)

    def _score_again(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        """What the policy says of the transitions before this rollout moves it: what later ratios compare with.

        A replayed rollout is of another policy, whose recorded log-probs stay.
        """
        mean, std = self._moments(batch, self._velocity(roles, "policy", batch))
        fresh = to_device(batch["version"] == roles.versions["policy"], mean.device)
        old = torch.where(fresh, self._log_prob(batch["y"], mean, std), batch["log_prob"])
        kept = {"old_log_prob": old, "old_mean": mean}
        return {name: kept[name] for name in self._old_fields} | self._gaps(roles, batch, mean, std)

    def _measure_kl(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        """KL to the start, a transition: over all elements in nats, and their mean."""
        mean, std = self._moments(batch, self._velocity(roles, "policy", batch))
        reference, _ = self._moments(batch, self._velocity(roles, "reference", batch))
        kl = transition.gaussian_kl(mean, reference, std)
        return {"mean": kl, "nats": kl * batch["x"][0].numel()}

    def _improve(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        """The clipped policy gradient of a transition."""
        c = self.config
        v = self._velocity(roles, "policy", batch)
        mean, std = self._moments(batch, v)
        log_ratio = self._log_ratio(roles, batch, mean, std)
        loss, clipped = clipped_loss(batch["advantage"], log_ratio, c.clip)
        if c.ratio == "guard":
            loss = loss / (batch["sigma"] - batch["sigma_next"])
        ratio = log_ratio.detach().exp()
        out = {"clip_fraction": clipped, "ratio": ratio}
        out |= dict.fromkeys(("ratio_deviation", "ratio_deviation_max"), (ratio - 1).abs())
        if c.kl_weight:
            penalty = self._penalty(roles, batch, mean, std)
            loss, out["kl_penalty"] = loss + c.kl_weight * penalty, penalty.detach()
        if not self._recomputes_old:
            out |= self._gaps(roles, batch, mean, std)
        return out | {"loss": loss, "velocity": v.detach(), "mean": mean.detach()}

    def _log_ratio(self, roles: Roles, batch: Batch, mean: Tensor, std: Tensor) -> Tensor:
        """Of new to old. A rollout's only update is exactly on-policy: its old value is the new one, held fixed."""
        c = self.config
        if c.ratio == "guard":
            old_mean = batch["old_mean"] if self._recomputes_old else mean.detach()
            return guard_log_ratio(batch["y"], mean, old_mean, std)
        new = self._log_prob(batch["y"], mean, std)
        if self._recomputes_old:
            return new - batch["old_log_prob"]
        on_policy = (batch["version"] == roles.versions["policy"]) & (c.updates * c.epochs == 1)
        return new - torch.where(to_device(on_policy, new.device), new.detach(), batch["log_prob"])

    def _penalty(self, roles: Roles, batch: Batch, mean: Tensor, std: Tensor) -> Tensor:
        """KL to the start. "As flow_grpo" leaves ``|dt|`` out of the variance of sde and dance, as its code does."""
        with torch.no_grad():
            reference, _ = self._moments(batch, self._velocity(roles, "reference", batch))
        kl = transition.gaussian_kl(mean, reference, std)
        if self.config.kl_form == "flow_grpo" and self.config.kind in ("sde", "dance"):
            return kl * (batch["sigma"] - batch["sigma_next"])
        return kl


def _latents(pairs: Sequence[tuple[Trajectory, list[int]]]) -> dict[str, Tensor]:
    """Latents on both sides of each sample's steps: ``latents [b, T + 1, ...]`` where the steps of every sample are
    neighbours, so that each is there once; ``x`` and ``y`` ``[b, T, ...]`` where some are not."""

    def stacked(steps: Callable[[list[int]], Iterable[int]]) -> Tensor:
        return torch.stack([torch.stack([t.latent(i) for i in steps(own)]) for t, own in pairs])

    if all(own == list(range(own[0], own[0] + len(own))) for _, own in pairs):
        return {"latents": stacked(lambda own: [*own, own[-1] + 1])}
    return {"x": stacked(lambda own: own), "y": stacked(lambda own: [i + 1 for i in own])}


def build(config: RunConfig) -> Algorithm:
    """Flow-GRPO of a recipe. A kernel or strategy of the user is loaded and tried here, before any model.

    Raises:
        ValueError: the kind or the strategy is unknown or fails, or no step can be scored.
    """
    assert isinstance(config.algorithm, FlowGRPOConfig)
    kind = config.algorithm.kind
    if kind not in transition.KINDS:
        if kind not in config.plugins:
            raise ValueError(
                f"algorithm.kind is {kind!r}; known are sde, cps, dance, or a kernel of yours that is also listed "
                "under plugins"
            )
        transition.register_kernel(kind, load_plugin(kind, config.plugins))
    size = (config.rollout or RolloutConfig()).group_size
    try:
        strategy = _strategy(config, config.algorithm, size)
    except ValueError as error:
        raise ValueError(f"algorithm.steps: {error}") from None
    algorithm = FlowGRPO(config.algorithm, config.seed, size, strategy)
    algorithm.check_drawn(_drawn(config.algorithm))
    algorithm.plan(0)
    return algorithm


def _strategy(config: RunConfig, algorithm: FlowGRPOConfig, group_size: int) -> StepStrategy:
    s, batch_size = algorithm.steps, config.data.batch_size
    shared = {"sample": 1, "group": group_size, "cycle": batch_size}[s.shared or "cycle"]
    low, high = _range(algorithm)
    if s.strategy == "all":
        return all_but_last
    if s.strategy == "window":
        return shared_draw(sde_window(s.count or 0, low, high), shared)
    if s.strategy == "moving_window":
        return moving_window(s.count or 0, low, high, (s.move_every or 0) * batch_size)
    if s.strategy == "choice":
        return epoch_global_random_choice(s.candidates or (), s.count or 0, shared)
    if s.strategy not in config.plugins:
        raise ValueError(
            f"strategy is {s.strategy!r}; known are all, window, moving_window, choice, or a function of yours that is "
            "also listed under plugins"
        )
    return load_plugin(s.strategy, config.plugins)


def _drawn(algorithm: FlowGRPOConfig) -> Sequence[int]:
    """The steps that a built-in strategy draws from; a user's own is known by what it gives."""
    if algorithm.steps.strategy in ("window", "moving_window"):
        return range(*_range(algorithm))
    return (algorithm.steps.candidates or ()) if algorithm.steps.strategy == "choice" else ()


def _range(algorithm: FlowGRPOConfig) -> tuple[int, int]:
    """First step and end of the range that windows lie in; by default every step but the last.

    Raises:
        ValueError: the range exceeds the schedule, or no step starts at a sigma of it.
    """
    s, num_steps = algorithm.steps, algorithm.num_steps
    if s.sigmas is None:
        low, high = s.range or (0, num_steps - 1)
        if high > num_steps:
            raise ValueError(f"the range [{low}, {high}) exceeds a schedule of {num_steps} steps")
        return low, high
    grid = sigma_grid(num_steps, algorithm.shift)[:-1].tolist()
    inside = [i for i, sigma in enumerate(grid) if s.sigmas[0] <= sigma <= s.sigmas[1]]
    if not inside:
        raise ValueError(
            f"sigmas is {s.sigmas}, and no step of {num_steps} starts there: {[round(x, 3) for x in grid]}"
        )
    return inside[0], inside[-1] + 1
