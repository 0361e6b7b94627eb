"""Rewards to advantages, within groups (math §4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sigmazero.config import AdvantageConfig
from sigmazero.records import Trajectory

EPSILON = 1e-4  # added to the deviation, as in Flow-GRPO: rewards that differ by rounding alone get almost none (B10)


def advantages(
    rewards: Tensor, groups: Tensor, std: Literal["group", "batch", "none"] = "group", clamp: float = 5.0
) -> tuple[Tensor, Tensor]:
    """``(r - mean of the group) / (std + 1e-4)``, clamped (Flow-GRPO, arXiv 2505.05470, eq. 4; B10, B21).

    Args:
        rewards: ``[b]``; what is not finite is unscorable.
        groups: int64 ``[b]``, one number a group, in any order.
        std: population deviation (ddof 0) of the ``group`` or of the whole ``batch``; ``none`` only centres (Dr.GRPO,
            arXiv 2503.20783).
    Returns: advantages fp32 ``[b]``, exactly 0 in a group whose scorable rewards are all equal and for an unscorable
        sample; weights fp32 ``[b]``, 0 for an unscorable sample, which no mean, deviation or denominator sees, else 1.
    """
    r = rewards.double()
    scorable = torch.isfinite(r)
    out = torch.zeros_like(r)
    batch_std = r[scorable].std(correction=0) if bool(scorable.any()) else r.new_zeros(())
    for group in groups[scorable].unique():
        members = scorable & (groups == group)
        own = r[members]
        if bool((own == own[0]).all()):
            continue
        scale = {"group": own.std(correction=0) + EPSILON, "batch": batch_std + EPSILON, "none": 1.0}[std]
        out[members] = (own - own.mean()) / scale
    return out.clamp(-clamp, clamp).float(), scorable.float()


def dead_groups(rewards: Tensor, groups: Tensor) -> list[int]:
    """Groups that teach nothing: their scorable rewards are all equal, or there are none."""
    dead: list[int] = []
    for group in groups.unique().tolist():
        own = rewards[groups == group]
        own = own[torch.isfinite(own)]
        if len(own) == 0 or bool((own == own[0]).all()):
            dead.append(int(group))
    return dead


def group_advantages(
    trajectories: Sequence[Trajectory], rewards: Tensor, config: AdvantageConfig, group_size: int
) -> tuple[Tensor, Tensor]:
    """Advantages and weights of a rollout, fp32 ``[b]`` each. A rollout that teaches nothing has no weight at all.

    Raises:
        ValueError: a group does not have ``group_size`` samples (B21).
    """
    groups = torch.tensor([t.request.group for t in trajectories])
    for group, count in zip(*groups.unique(return_counts=True), strict=True):
        if count != group_size:
            raise ValueError(
                f"group {int(group)} has {int(count)} samples, and rollout.group_size is {group_size}; groups are whole"
            )
    advantage, weight = advantages(rewards, groups, config.std, config.clamp)
    return advantage, weight if bool(advantage.any()) else torch.zeros_like(weight)
