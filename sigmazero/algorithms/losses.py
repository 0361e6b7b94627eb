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


def clipped_loss(advantage: Tensor, log_ratio: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """``max(-A rho, -A clip(rho, 1 - e, 1 + e))`` with ``rho = exp(log_ratio)`` (PPO; math §4).

    Args: fp32 ``[b]`` both. Returns: loss fp32 ``[b]``, and whether rho lies outside the clip range, as 0 or 1.
    """
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
    return loss, ((ratio.detach() - 1).abs() > clip).float()


def guard_log_ratio(y: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """``mean_D (z (mu - mu_old))`` with ``z = (y - mu_old) / std`` the noise that was drawn, a row its own.

    Source: GRPO-Guard (arXiv 2510.22319); its code takes the mean over the batch. Returns: fp32 ``[b]``.
    """
    noise = (y.float() - old_mean) / column(std, mean)
    return row_mean(noise * (mean - old_mean))


def nft_loss(
    v: Tensor, v_old: Tensor, x: Tensor, x0: Tensor, sigma: Tensor, advantage: Tensor, beta: float, c: float
) -> dict[str, Tensor]:
    """The two-sided loss of DiffusionNFT (arXiv 2509.16117; math §5).

    Args:
        v: velocity of the policy at x, with gradient; v_old: of the old policy. ``[b, ...]``.
        x: ``(1 - sigma) x0 + sigma eps``; x0: the sample. sigma, advantage: fp32 ``[b]``.
        beta: how far the implicit policies lie from the old one; c: the advantage that counts as certain.
    Returns: fp32 ``[b]`` each: ``loss``, ``positive`` and ``negative`` (l+ and l-) and the ``reward_weight`` r.
    """
    v, v_old = v.float(), v_old.detach().float()
    r = (advantage / (2 * c) + 0.5).clamp(0, 1)
    positive = _adaptive(x, x0, sigma, beta * v + (1 - beta) * v_old)
    negative = _adaptive(x, x0, sigma, (1 + beta) * v_old - beta * v)
    loss = c * (r * positive + (1 - r) * negative) / beta
    return {"loss": loss, "positive": positive, "negative": negative, "reward_weight": r}


def _adaptive(x: Tensor, x0: Tensor, sigma: Tensor, v: Tensor) -> Tensor:
    """``mean_D d^2 / max(mean_D |d|, 1e-5)``, the divisor without gradient, of the error d of the prediction of x0."""
    error = x.float() - column(sigma, x) * v - x0.float()
    return row_mean(error**2) / row_mean(error.detach().abs()).clamp_min(1e-5)


def dpo_loss(gain_best: Tensor, gain_worst: Tensor, beta: float) -> Tensor:
    """``-log sigmoid(-beta (gain_best - gain_worst))``, a gain being how much more the policy errs than the reference.

    Source: Diffusion-DPO (arXiv 2311.12908, eq. 14). Args: fp32 ``[b]`` both. Returns: fp32 ``[b]``.
    """
    return torch.nn.functional.softplus(beta * (gain_best - gain_worst))
