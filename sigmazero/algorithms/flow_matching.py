"""Velocity regression on captioned pictures (flow matching, arXiv 2210.02747): it makes teachers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from sigmazero import seeds
from sigmazero.algorithms.base import Algorithm, Arm, Average, Phase, warmed_up_decay
from sigmazero.algorithms.losses import velocity_loss
from sigmazero.config import FlowMatchingConfig, RunConfig
from sigmazero.models.roles import RoleKind, Roles
from sigmazero.records import Batch, Prompt, RolloutRequest, Scores, Trajectory, to_device
from sigmazero.schedule import add_noise, logit_normal_sigma


@dataclasses.dataclass(frozen=True)
class FlowMatching:
    """Roles: student (trained), student_ema. Data: captioned pictures."""

    config: FlowMatchingConfig
    seed: int
    roles: Mapping[str, RoleKind] = dataclasses.field(
        default_factory=lambda: {"student": "train", "student_ema": "average"}
    )
    policy: str = "student"
    group_size: int = 0
    uses_pictures: bool = True

    @property
    def phases(self) -> Sequence[Phase]:
        return (Phase("student", {"pictures": self._term}, ("student",), ("student",)),)

    @property
    def averages(self) -> Sequence[Average]:
        return (Average("student_ema", "student", warmed_up_decay(self.config.ema_decay)),)

    @property
    def arms(self) -> Sequence[Arm]:
        c = self.config
        return (Arm(f"student@{c.num_steps}", "student_ema", c.num_steps, c.shift, guidance=c.guidance),)

    def requests(self, prompts: Sequence[Prompt], samples: range, cycle: int) -> list[RolloutRequest]:
        return []

    def feeds(
        self, trajectories: Sequence[Trajectory], scores: Scores | None, pictures: Batch | None, cycle: int
    ) -> dict[str, Batch]:
        """The pictures, a share of their captions dropped so that the network also learns the negative branch."""
        assert pictures is not None
        dropped = seeds.uniform(self.seed, "caption_dropout", pictures["sample"].tolist()) < self.config.caption_dropout
        prompts = tuple(
            dataclasses.replace(prompt, text="") if drop else prompt
            for prompt, drop in zip(pictures.prompts, dropped.tolist(), strict=True)
        )
        return {"pictures": dataclasses.replace(pictures, prompts=prompts)}

    def _term(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        assert batch.condition is not None
        x0, samples, cycles = batch["x0"], batch["sample"].tolist(), batch["cycle"].tolist()
        z = seeds.normal(self.seed, "train_timestep", samples, (), cycles)
        sigma = to_device(logit_normal_sigma(z, self.config.logit_mean, self.config.logit_std), x0.device)
        eps = to_device(seeds.normal(self.seed, "train_noise", samples, x0.shape[1:], cycles), x0.device)
        v = roles.velocity("student")(add_noise(x0, eps, sigma), sigma, batch.condition)
        return {"loss": velocity_loss(v, x0, eps)}


def build(config: RunConfig) -> Algorithm:
    assert isinstance(config.algorithm, FlowMatchingConfig)
    return FlowMatching(config.algorithm, config.seed)
