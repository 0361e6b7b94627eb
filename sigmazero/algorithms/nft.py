"""Decoupled online RL: deterministic rollouts, of which only the sample comes back, and training at drawn sigmas.

Loss -> roles updated -> data needed, for each of the names that a recipe gives:
  nft: two-sided velocity regression around the old policy (arXiv 2509.16117; math §5) -> policy -> prompts, rewards
  awm: velocity regression times the advantage (arXiv 2509.25050)                      -> policy -> prompts, rewards
  best_of_group: velocity regression on the best of each group                         -> policy -> prompts, rewards
  dpo: preference of the best over the worst of each group (arXiv 2311.12908)           -> policy -> prompts, rewards

``policy_ema`` follows each optimizer step. ``old``, which nft samples from, follows once a rollout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sigmazero import seeds, transition
from sigmazero.algorithms.advantages import group_advantages
from sigmazero.algorithms.base import (
    Algorithm,
    Arm,
    Average,
    Phase,
    Term,
    before_and_after,
    dealt_rows,
    warmed_up_decay,
)
from sigmazero.algorithms.losses import dpo_loss, nft_loss, velocity_loss
from sigmazero.config import (
    AdvantageConfig,
    AWMConfig,
    BestOfGroupConfig,
    DPOConfig,
    NFTConfig,
    OldDecayConfig,
    RolloutConfig,
    RunConfig,
)
from sigmazero.models.roles import RoleKind, Roles
from sigmazero.records import Batch, Prompt, RolloutRequest, Scores, Trajectory, rows_of, to_device
from sigmazero.schedule import add_noise, sigma_grid, static_shift
from sigmazero.strategies import ode_and_return_last

LOW, HIGH = 0.02, 0.98  # of stratified sigmas
STEP_FIELDS = ("sigma", "step")
KL_STEP = ("sde", 0.7)  # kind and eta, Flow-GRPO's
KL_FIELDS = ("kl_sigma", "kl_sigma_next", "kl_step")


@dataclasses.dataclass(frozen=True)
class Decoupled:
    """Roles: policy (trained), policy_ema, reference (frozen: the start), and with nft the old policy."""

    config: NFTConfig | AWMConfig | BestOfGroupConfig | DPOConfig
    seed: int
    group_size: int
    uses_pictures: bool = False

    @property
    def roles(self) -> Mapping[str, RoleKind]:
        kinds: dict[str, RoleKind] = {"policy": "train", "reference": "frozen", "policy_ema": "average"}
        if self.config.name == "nft":
            kinds["old"] = "average"
        return kinds

    @property
    def policy(self) -> str:
        return "old" if self.config.name == "nft" else "policy"

    @property
    def phases(self) -> Sequence[Phase]:
        """The policy's updates, then the KL where it is due."""
        term, calls = self._term()
        policy = Phase(
            "policy",
            {"rollout": term},
            calls,
            ("policy",),
            rows=dealt_rows(self.seed, self.config.updates),
            step_fields=STEP_FIELDS,
        )
        if not self.config.kl_every or self.config.num_steps == 1:
            return (policy,)
        calls, every = ("policy", "reference"), self.config.kl_every
        return policy, Phase("kl", {"rollout": self._measure_kl}, calls, every=every, step_fields=KL_FIELDS)

    def _term(self) -> tuple[Term, tuple[str, ...]]:
        """The loss of the recipe's name, and the roles that it runs."""
        if isinstance(self.config, NFTConfig):
            return self._nft, ("policy", "old", "reference")[: 3 if self.config.kl_weight else 2]
        if isinstance(self.config, AWMConfig):
            return self._matching, ("policy",)
        if isinstance(self.config, BestOfGroupConfig):
            return self._matching, ("policy",)
        return self._preference, ("policy", "reference")

    @property
    def averages(self) -> Sequence[Average]:
        ema = Average("policy_ema", "policy", warmed_up_decay(self.config.ema_decay))
        if not isinstance(self.config, NFTConfig):
            return (ema,)
        return (ema, Average("old", "policy", old_decay(self.config.old_decay), every="cycle"))

    @property
    def arms(self) -> Sequence[Arm]:
        c = self.config
        return before_and_after(c.evaluation_steps or c.num_steps, c.shift)

    def requests(self, prompts: Sequence[Prompt], samples: range, cycle: int) -> list[RolloutRequest]:
        """No stochastic step, no guidance; the sample alone comes back."""
        c = self.config
        sigmas = sigma_grid(c.num_steps, c.shift)
        return [
            RolloutRequest(
                sample, cycle, prompt, self.policy, sigmas, "ode", 0.0, 1.0, self.seed,
                ode_and_return_last(sample, c.num_steps, self.seed), group=sample // self.group_size,
            )
            for sample, prompt in zip(samples, prompts, strict=True)
        ]  # fmt: skip

    def feeds(
        self, trajectories: Sequence[Trajectory], scores: Scores | None, pictures: Batch | None, cycle: int
    ) -> dict[str, Batch]:
        assert scores is not None
        c = self.config
        how = c.advantage if isinstance(c, (NFTConfig, AWMConfig)) else AdvantageConfig()
        advantage, weight = group_advantages(trajectories, scores.total, how, self.group_size)
        samples = [t.request.sample for t in trajectories]
        x0 = torch.stack([t.latents[-1] for t in trajectories])
        fields = rows_of(samples, cycle) | {"weight": weight, "advantage": advantage, "x0": x0}
        fields |= {"sigma": self._sigmas(samples, cycle), "step": torch.arange(self._num_timesteps).repeat(len(x0), 1)}
        fields |= self._kl_fields(len(x0))
        batch = Batch(fields, tuple(t.request.prompt for t in trajectories))
        if isinstance(c, (BestOfGroupConfig, DPOConfig)):
            batch = self._extremes(batch, scores.total, torch.tensor([t.request.group for t in trajectories]))
        return {"rollout": batch}

    @property
    def _num_timesteps(self) -> int:
        """Of training; with ``full`` the config has no number of its own."""
        return self.config.num_timesteps or self.config.num_steps

    def _sigmas(self, samples: Sequence[int], cycle: int) -> Tensor:
        """Training sigmas fp32 ``[b, T]``: the rollout's grid, or one draw in each of T equal strata, shifted once.

        Drawn by sample and step, so they differ at every rollout and depend on no batch.
        """
        c, count = self.config, self._num_timesteps
        if c.timesteps == "full":
            return sigma_grid(c.num_steps, c.shift)[:-1].repeat(len(samples), 1)
        u = [seeds.uniform(self.seed, "train_timestep", samples, cycle, step) for step in range(count)]
        drawn = torch.stack([(row + step) / count for step, row in enumerate(u)], 1)
        return static_shift(drawn, c.shift).clamp(LOW, HIGH).float()

    def _kl_fields(self, num_rows: int) -> dict[str, Tensor]:
        """The rollout's steps but the last, where the KL is measured, and ids of noise that training does not use."""
        grid = sigma_grid(self.config.num_steps, self.config.shift)
        steps = torch.arange(self.config.num_steps - 1) + self._num_timesteps
        values = (grid[:-2], grid[1:-1], steps)
        return {name: value.repeat(num_rows, 1) for name, value in zip(KL_FIELDS, values, strict=True)}

    def _extremes(self, batch: Batch, rewards: Tensor, groups: Tensor) -> Batch:
        """The best of each group whose rewards differ, each row with its group's worst; weight 0 on one row where no
        group has any."""
        pairs: list[tuple[int, int]] = []
        for group in groups.unique().tolist():
            own = [i for i in torch.nonzero(groups == group).flatten().tolist() if bool(torch.isfinite(rewards[i]))]
            own.sort(key=lambda i: float(rewards[i]))
            if own and bool(rewards[own[0]] < rewards[own[-1]]):
                pairs.append((own[-1], own[0]))
        if not pairs:
            return batch.take([0]).with_fields(weight=torch.zeros(1), worst=batch["x0"][:1])
        best, worst = zip(*pairs, strict=True)
        return batch.take(best).with_fields(advantage=torch.ones(len(best)), worst=batch["x0"][list(worst)])

    def _noised(self, batch: Batch, x0: Tensor, sigma: str = "sigma", step: str = "step") -> tuple[Tensor, Tensor]:
        """A sample at each item's sigma, and the noise, which is the same for every sample of the row."""
        samples, cycles, steps = (batch[name].tolist() for name in ("sample", "cycle", step))
        eps = to_device(seeds.normal(self.seed, "train_noise", samples, x0.shape[1:], cycles, steps), x0.device)
        return add_noise(x0, eps, batch[sigma]), eps

    def _measure_kl(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        """KL to the start, a transition, if the steps were Flow-GRPO's with eta .7: a number to compare with its runs.

        A deterministic rollout has none of its own.
        """
        assert batch.condition is not None
        x, _ = self._noised(batch, batch["x0"], "kl_sigma", "kl_step")
        now, after = batch["kl_sigma"], batch["kl_sigma_next"]
        guard = torch.full_like(now, float(sigma_grid(self.config.num_steps, self.config.shift)[1]))
        policy, reference = (roles.velocity(role)(x, now, batch.condition) for role in ("policy", "reference"))
        mean, std = transition.moments(*KL_STEP, x, policy, now, after, guard)
        kl = transition.gaussian_kl(mean, transition.moments(*KL_STEP, x, reference, now, after, guard)[0], std)
        return {"mean": kl, "nats": kl * x[0].numel()}

    def _nft(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        c = self.config
        assert isinstance(c, NFTConfig)
        assert batch.condition is not None
        x, _ = self._noised(batch, batch["x0"])
        v = roles.velocity("policy")(x, batch["sigma"], batch.condition)
        with torch.no_grad():
            old = roles.velocity("old")(x, batch["sigma"], batch.condition)
        out = nft_loss(v, old, x, batch["x0"], batch["sigma"], batch["advantage"], c.beta, c.advantage_range)
        out |= {
            "old_distance": transition.row_mean((v.detach() - old).abs()),
            "x": x,
            "velocity": v,
            "old_velocity": old,
        }
        if c.kl_weight:
            with torch.no_grad():
                reference = roles.velocity("reference")(x, batch["sigma"], batch.condition)
            distance = transition.row_mean((v - reference) ** 2)
            out |= {"loss": out["loss"] + c.kl_weight * distance, "reference_distance": distance.detach()}
            out["reference_velocity"] = reference
        return {name: value if name == "loss" else value.detach() for name, value in out.items()}

    def _matching(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        """Flow matching on own samples, times the advantage (1 for the best of a group)."""
        assert batch.condition is not None
        x, eps = self._noised(batch, batch["x0"])
        error = velocity_loss(roles.velocity("policy")(x, batch["sigma"], batch.condition), batch["x0"], eps)
        return {"loss": batch["advantage"] * error, "velocity_error": error.detach()}

    def _preference(self, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        """Diffusion-DPO: both samples of a pair at one sigma and one noise."""
        assert isinstance(self.config, DPOConfig)
        best, worst = (self._gain(roles, batch, x0) for x0 in (batch["x0"], batch["worst"]))
        margin = (worst - best).detach()
        return {"loss": dpo_loss(best, worst, self.config.beta), "margin": margin, "preferred": (margin > 0).float()}

    def _gain(self, roles: Roles, batch: Batch, x0: Tensor) -> Tensor:
        """How much more the policy errs on samples than the reference does."""
        assert batch.condition is not None
        x, eps = self._noised(batch, x0)
        with torch.no_grad():
            reference = velocity_loss(roles.velocity("reference")(x, batch["sigma"], batch.condition), x0, eps)
        return velocity_loss(roles.velocity("policy")(x, batch["sigma"], batch.condition), x0, eps) - reference


def old_decay(config: OldDecayConfig) -> Callable[[int], float]:
    """``min(slope * max(n - start, 0), cap)`` for n optimizer steps."""
    return lambda n: min(config.slope * max(n - config.start, 0), config.cap)


def build(config: RunConfig) -> Algorithm:
    assert isinstance(config.algorithm, (NFTConfig, AWMConfig, BestOfGroupConfig, DPOConfig))
    return Decoupled(config.algorithm, config.seed, (config.rollout or RolloutConfig()).group_size)
