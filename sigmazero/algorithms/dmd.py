"""Distribution matching distillation, DMD2 (arXiv 2405.14867; math §6).

Loss -> roles updated -> data needed:
  distribution matching (gradient on the student's sample) -> student     -> prompts
  velocity regression on the student's samples             -> fake_score  -> prompts

The student rolls out from noise to a drawn exit step; that rollout is the sampler's, like any other. Only the exit step
is computed again, with a gradient: a compute-only phase turns teacher and fake score into a gradient on the sample, the
student phase sends it back. One graph of one role exists at a time.

With ``exit_step: all`` a rollout takes every step, and each of them is a row: its input, and what it predicts there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from sigmazero import seeds
from sigmazero.algorithms.base import Algorithm, Arm, Average, Phase, warmed_up_decay
from sigmazero.algorithms.losses import distribution_gradient, surrogate_loss, velocity_loss
from sigmazero.config import DMD2Config, RunConfig, SigmaConfig
from sigmazero.models.roles import RoleKind, Roles
from sigmazero.plugins import load_plugin
from sigmazero.records import Batch, Prompt, RolloutRequest, Scores, StepPlan, Trajectory, rows_of, to_device
from sigmazero.schedule import add_noise, score_sigma, sigma_grid, x0_from_velocity
from sigmazero.strategies import StepStrategy, checked_plan, every_exit, stop_at_random_step

TRANSITIONS: dict[str, tuple[Literal["cps", "ode"], float]] = {"renoise": ("cps", 1.0), "euler": ("ode", 0.0)}


@dataclasses.dataclass(frozen=True)
class DMD2:
    """Roles: student, fake_score (trained), teacher (frozen), student_ema."""

    config: DMD2Config
    seed: int
    strategy: StepStrategy
    evaluation_shift: float
    roles: Mapping[str, RoleKind] = dataclasses.field(
        default_factory=lambda: {
            "student": "train", "teacher": "frozen", "fake_score": "train", "student_ema": "average",
        }
    )  # fmt: skip
    policy: str = "student"
    group_size: int = 0
    uses_pictures: bool = False

    @property
    def phases(self) -> Sequence[Phase]:
        """In the first cycle of a period all three are due, on one rollout; in the others the fake score alone."""
        period = self.config.fake_updates
        return (
            Phase("score", {"rollout": self._score}, ("fake_score", "teacher"), writes=("g",), every=period),
            Phase("student", {"rollout": self._pull_back}, ("student",), ("student",), every=period),
            Phase("fake_score", {"rollout": self._regress}, ("fake_score",), ("fake_score",)),
        )

    @property
    def averages(self) -> Sequence[Average]:
        return (Average("student_ema", "student", warmed_up_decay(self.config.ema_decay)),)

    @property
    def arms(self) -> Sequence[Arm]:
        c = self.config
        kind, eta = TRANSITIONS[c.transition]
        shifts = {c.num_steps: c.shift, c.teacher_steps: c.teacher_shift or c.shift}
        teacher = [
            Arm(f"teacher@{n}", "teacher", n, shifts[n], guidance=c.guidance) for n in sorted(shifts, reverse=True)
        ]
        students = [
            Arm(f"{name}@{c.num_steps}", role, c.num_steps, self.evaluation_shift, kind, eta)
            for name, role in (("student", "student_ema"), ("student_raw", "student"))
        ]
        return (*teacher, *students)

    def requests(self, prompts: Sequence[Prompt], samples: range, cycle: int) -> list[RolloutRequest]:
        c = self.config
        sigmas, (kind, eta) = sigma_grid(c.num_steps, c.shift), TRANSITIONS[c.transition]
        plans = [self.plan(sample) for sample in samples]
        return [
            RolloutRequest(
                sample, cycle, prompt, self.policy, sigmas, kind, eta, 1.0, self.seed, plan,
                debug=self.config.exit_step == "all",
            )
            for sample, prompt, plan in zip(samples, prompts, plans, strict=True)
        ]  # fmt: skip

    def plan(self, sample: int) -> StepPlan:
        """The step plan of a sample.

        Raises:
            ValueError: the strategy fails, or its plan does not stop at a step whose two latents come back.
        """
        name = f"algorithm.step_strategy {self.config.step_strategy!r}"
        try:
            plan = checked_plan(self.strategy(sample, self.config.num_steps, self.seed), self.config.num_steps)
        except Exception as error:
            raise ValueError(f"{name}, sample {sample}: {' '.join(str(error).split())}") from error
        if plan.stop is None or plan.stop not in plan.ret:
            raise ValueError(f"{name}, sample {sample}: it gave {tuple(plan)}; dmd2 needs a stop i, latents i and i+1")
        return plan

    def feeds(
        self, trajectories: Sequence[Trajectory], scores: Scores | None, pictures: Batch | None, cycle: int
    ) -> dict[str, Batch]:
        """Input and prediction of each exit step, with the sigma it was sampled at: one row a sample, or N.

        ``step`` keeps the draws of a sample's rows apart.
        """
        exits = [self._exits(t) for t in trajectories]
        rows = [t.request for t, own in zip(trajectories, exits, strict=True) for _ in range(len(own["step"]))]
        fields = rows_of([request.sample for request in rows], cycle)
        fields |= {name: torch.cat([own[name] for own in exits]) for name in ("x", "x0", "sigma", "step")}
        return {"rollout": Batch(fields, tuple(request.prompt for request in rows))}

    def _exits(self, t: Trajectory) -> dict[str, Tensor]:
        """A sample's rows: its one exit, or every step with what the student predicted there."""
        if self.config.exit_step == "all":
            assert t.velocities is not None
            x, sigmas = t.latents[:-1], t.sigmas[:-1]
            x0 = x0_from_velocity(x, t.velocities, to_device(sigmas, x.device))
            return {"x": x, "x0": x0, "sigma": sigmas, "step": torch.arange(len(x))}
        i = t.latent_indices[-1] - 1
        x, x0, sigma = t.latent(i)[None], t.latent(i + 1)[None], t.sigmas[i : i + 1]
        return {"x": x, "x0": x0, "sigma": sigma, "step": torch.zeros(1, dtype=torch.long)}

    def _noised(self, batch: Batch, settings: SigmaConfig, stream: str) -> tuple[Tensor, Tensor, Tensor]:
        """The student's samples at a drawn sigma: ``(x_s, eps, sigma)``."""
        x, (samples, cycles, steps) = batch["x0"], (batch[name].tolist() for name in ("sample", "cycle", "step"))
        u = seeds.uniform(self.seed, f"{stream}_sigma", samples, cycles, steps)
        sigma = score_sigma(u, settings.distribution, settings.shift, settings.low, settings.high)
        eps = seeds.normal(self.seed, f"{stream}_noise", samples, x.shape[1:], cycles, steps)
        sigma, eps = to_device(sigma, x.device), to_device(eps, x.device)
        return add_noise(x, eps, sigma), eps, sigma

    def _score(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        """The gradient on each sample; no network keeps a graph."""
        assert batch.condition is not None
        noised, eps, sigma = self._noised(batch, self.config.score_sigma, "score")
        teacher = roles.velocity("teacher", self.config.guidance)(noised, sigma, batch.condition)
        fake = roles.velocity("fake_score")(noised, sigma, batch.condition)
        g = distribution_gradient(teacher, fake, batch["x0"], eps, sigma, self.config.normalizer)
        return {"g": g, "gradient_rms": g.double().pow(2).flatten(1).mean(1).sqrt().float()}

    def _pull_back(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        """The one student forward that holds a graph: the exit step again, with the gradient sent through it."""
        assert batch.condition is not None
        v = roles.velocity("student")(batch["x"], batch["sigma"], batch.condition)
        x0 = x0_from_velocity(batch["x"], v, batch["sigma"])
        gap = (x0.detach() - batch["x0"].float()).abs().flatten(1).amax(1)
        return {"loss": surrogate_loss(x0, batch["g"]), "x0_recompute_gap": gap}

    def _regress(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        assert batch.condition is not None
        noised, eps, sigma = self._noised(batch, self.config.fake_sigma, "fake")
        v = roles.velocity("fake_score")(noised, sigma, batch.condition)
        return {"loss": velocity_loss(v, batch["x0"], eps)}


def build(config: RunConfig) -> Algorithm:
    """DMD2 of a recipe.

    Raises:
        ValueError: the step strategy is unknown.
    """
    assert isinstance(config.algorithm, DMD2Config)
    settings = config.algorithm
    if settings.exit_step == "all":
        strategy = every_exit
    elif settings.step_strategy == "stop_at_random_step":
        strategy = stop_at_random_step(config.data.batch_size if settings.exit_step == "shared" else 1)
    else:
        strategy = _user_strategy(settings.step_strategy, config.plugins)
    algorithm = DMD2(settings, config.seed, strategy, config.evaluate.shift or settings.shift)
    algorithm.plan(0)  # a strategy that cannot work is found before anything is loaded
    return algorithm


def _user_strategy(name: str, plugins: Sequence[str]) -> StepStrategy:
    if name not in plugins:
        raise ValueError(
            f"algorithm.step_strategy is {name!r}; dmd2 takes 'stop_at_random_step', or a function of yours that is "
            "also listed under plugins"
        )
    return load_plugin(name, plugins)
