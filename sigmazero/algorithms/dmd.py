"""Distribution matching distillation, DMD2 (arXiv 2405.14867; math §6).

Loss -> roles updated -> data needed:
  distribution matching (gradient on the student's sample) -> student     -> prompts
  velocity regression on the student's samples             -> fake_score  -> prompts

The student rolls out from noise to a drawn exit step; that rollout is the sampler's, like any other. In a cycle that
updates the student it ends before the exit step, which then runs once, with a graph: teacher and fake score, without
one, turn its prediction into a gradient, which goes back through it. The fake score learns from the same predictions.

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
        """In the first cycle of a period both are due, on one rollout; in the others the fake score alone."""
        return (
            Phase(
                "student", {"rollout": self._distil}, ("student", "teacher", "fake_score"), ("student",),
                writes=("x0",), every=self.config.fake_updates, shared=("score_gradient_rms",),
            ),
            Phase("fake_score", {"rollout": self._regress}, ("fake_score",), ("fake_score",)),
        )  # fmt: skip

    def _updates_student(self, cycle: int) -> bool:
        return self.phases[0].is_due(cycle)

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
        trains = self._updates_student(cycle)
        plans = [self.plan(sample) for sample in samples]
        plans = [_up_to_exit(plan) for plan in plans] if trains else plans
        return [
            RolloutRequest(
                sample, cycle, prompt, self.policy, sigmas, kind, eta, 1.0, self.seed, plan,
                debug=self.config.exit_step == "all" and not trains,
            )
            for sample, prompt, plan in zip(samples, prompts, plans, strict=True)
        ]  # fmt: skip

    def plan(self, sample: int) -> StepPlan:
        """The step plan of a sample.

        Raises:
            ValueError: the strategy fails, or its plan does not stop at a step whose two latents come back.
        """
        try:
            plan = checked_plan(self.strategy(sample, self.config.num_steps, self.seed), self.config.num_steps)
            if plan.stop is None or plan.stop not in plan.ret:
                raise ValueError(f"it gave {tuple(plan)}; dmd2 needs a stop i, latents i and i+1")
        except Exception as error:
            name = f"algorithm.step_strategy {self.config.step_strategy!r}, sample {sample}"
            raise ValueError(f"{name}: {' '.join(str(error).split())}") from error
        return plan

    def feeds(
        self, trajectories: Sequence[Trajectory], scores: Scores | None, pictures: Batch | None, cycle: int
    ) -> dict[str, Batch]:
        """Of each exit step, one a sample or N: its input with the sigma there where the student is updated, and what
        it predicted where it is not. ``step`` keeps the draws of a sample's rows apart.
        """
        fields_of = self._inputs if self._updates_student(cycle) else self._predictions
        exits = [fields_of(t) for t in trajectories]
        counts = [len(next(iter(own.values()))) for own in exits]
        rows = [t.request for t, count in zip(trajectories, counts, strict=True) for _ in range(count)]
        fields = rows_of([request.sample for request in rows], cycle)
        fields |= {name: torch.cat([own[name] for own in exits]) for name in exits[0]}
        fields["step"] = torch.tensor([step for count in counts for step in range(count)])
        return {"rollout": Batch(fields, tuple(request.prompt for request in rows))}

    def _inputs(self, t: Trajectory) -> dict[str, Tensor]:
        """The input of the exit step, where the rollout ended, or of every step."""
        if self.config.exit_step == "all":
            return {"x": t.latents, "sigma": t.sigmas[list(t.latent_indices)]}
        last = t.latent_indices[-1]
        return {"x": t.latents[-1:], "sigma": t.sigmas[last : last + 1]}

    def _predictions(self, t: Trajectory) -> dict[str, Tensor]:
        """The sample of a stopped rollout, or what the student predicted at every step of a whole one."""
        if t.velocities is None:
            return {"x0": t.latents[-1:]}
        x = t.latents[:-1]
        return {"x0": x0_from_velocity(x, t.velocities, to_device(t.sigmas[:-1], x.device))}

    def _noised(self, batch: Batch, settings: SigmaConfig, stream: str) -> tuple[Tensor, Tensor, Tensor]:
        """The student's samples at a drawn sigma: ``(x_s, eps, sigma)``."""
        x, (samples, cycles, steps) = batch["x0"], (batch[name].tolist() for name in ("sample", "cycle", "step"))
        u = seeds.uniform(self.seed, f"{stream}_sigma", samples, cycles, steps)
        sigma = score_sigma(u, settings.distribution, settings.shift, settings.low, settings.high)
        eps = seeds.normal(self.seed, f"{stream}_noise", samples, x.shape[1:], cycles, steps)
        sigma, eps = to_device(sigma, x.device), to_device(eps, x.device)
        return add_noise(x, eps, sigma), eps, sigma

    def _distil(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        """The exit step, the one student forward there is, and the gradient on its prediction that goes back."""
        assert batch.condition is not None
        v = roles.velocity("student")(batch["x"], batch["sigma"], batch.condition)
        x0 = x0_from_velocity(batch["x"], v, batch["sigma"])
        g = self._gradient(roles, batch.with_fields(x0=x0.detach()))
        rms = g.double().pow(2).flatten(1).mean(1).sqrt().float()
        return {"loss": surrogate_loss(x0, g), "x0": x0, "score_gradient_rms": rms}

    @torch.no_grad()
    def _gradient(self, roles: Roles, batch: Batch) -> Tensor:
        """On each of the student's samples, of teacher and fake score."""
        assert batch.condition is not None
        noised, eps, sigma = self._noised(batch, self.config.score_sigma, "score")
        teacher = roles.velocity("teacher", self.config.guidance)(noised, sigma, batch.condition)
        fake = roles.velocity("fake_score")(noised, sigma, batch.condition)
        return distribution_gradient(teacher, fake, batch["x0"], eps, sigma, self.config.normalizer)

    def _regress(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        assert batch.condition is not None
        noised, eps, sigma = self._noised(batch, self.config.fake_sigma, "fake")
        v = roles.velocity("fake_score")(noised, sigma, batch.condition)
        return {"loss": velocity_loss(v, batch["x0"], eps)}


def _up_to_exit(plan: StepPlan) -> StepPlan:
    """A plan without its last step, whose input is the last latent that comes back."""
    assert plan.stop is not None
    return StepPlan(plan.sde, tuple(i for i in plan.ret if i <= plan.stop), None)


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
