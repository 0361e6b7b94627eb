"""Pure functions of tensors, one value a row (math §6)."""

from __future__ import annotations

import torch
from torch import Tensor

from sigmazero.schedule import column
from sigmazero.transition import row_mean


def velocity_loss(v: Tensor, x0: Tensor, eps: Tensor) -> Tensor:
    """``mean_D (v - (eps - x0))^2``, the target without gradient: flow matching and the fake score.

    Args: three ``[b, ...]``. Returns: fp32 ``[b]``.
    """
    return row_mean((v.float() - (eps - x0).detach().float()) ** 2)


def distribution_gradient(
    v_teacher: Tensor, v_fake: Tensor, x: Tensor, eps: Tensor, sigma: Tensor, normalizer: bool = True
) -> Tensor:
    """The gradient on the student's sample, in velocity form (DMD, arXiv 2311.18828, eq. 7-8; math §6).

    ``g = (v_T - v_fake) / max(mean_D |v_T - (eps - x)|, 1e-6 / sigma)``: the x0 form with sigma cancelled, which keeps
    its direction where the x0 form loses it to rounding. The normalizer is a row's own, never the batch's (B40).

    Args:
        v_teacher, v_fake: velocities at ``x_s = (1 - sigma) x + sigma eps``; x: the sample; eps: fresh noise.
        sigma: fp32 ``[b]``.
        normalizer: False gives ``sigma * (v_T - v_fake)``, the bare difference of the two predictions of x0.
    Returns: fp32 ``[b, ...]``.
    """
    difference = v_teacher.float() - v_fake.float()
    if not normalizer:
        return column(sigma, x) * difference
    scale = row_mean((v_teacher.float() - (eps - x).float()).abs())
    return difference / column(torch.maximum(scale, 1e-6 / sigma), x)


def surrogate_loss(x: Tensor, gradient: Tensor) -> Tensor:
    """A loss whose gradient on x is ``gradient / D``: that of ``0.5 mean_D (x - stopgrad(x - g))^2``.

    Args: ``[b, ...]`` both. Returns: fp32 ``[b]``; its value is ``mean_D x g``, not a quality.
    """
    return row_mean(x.float() * gradient.detach().float())
