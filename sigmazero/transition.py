"""One step of a rollout and its log-probability (math §3). Sampling and scoring both call this file.

From ``(x, v)`` at ``sigma`` to ``sigma_next < sigma``, with ``dt = sigma_next - sigma < 0``: a Gaussian with mean
``mu`` and standard deviation ``std``. All arithmetic is fp32. ``std`` is always that of the actual step, with its
``sqrt(-dt)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sigmazero.schedule import column, eps_from_velocity, x0_from_velocity

KINDS = ("ode", "sde", "dance", "cps")

Kernel = Callable[[float, Tensor, Tensor, Tensor, Tensor, Tensor], "tuple[Tensor, Tensor]"]
"""``(eta, x, v, sigma, sigma_next, sigma_guard) -> (mean, std)``, as ``moments``."""

_KERNELS: dict[str, Kernel] = {}


def register_kernel(kind: str, kernel: Kernel) -> None:
    """Makes a function of yours a transition kind that sampling and scoring both use, tried out on two rows first.

    Raises:
        ValueError: the kind is one of ``KINDS``; the kernel fails, writes into what it is given, or what it returns is
            no mean like x with a finite std of at least 0 a row.
    """
    if kind in KINDS:
        raise ValueError(f"transition kind {kind!r} is built in; give the kernel another name")
    x, sigma = torch.zeros(2, 3, 4, 4), torch.tensor([1.0, 0.5])
    given = (x, torch.ones_like(x), sigma, sigma - 0.25, torch.tensor([0.75, 0.75]))
    before = [value.clone() for value in given]
    try:
        mean, std = kernel(0.5, *given)
        finite = bool(torch.isfinite(mean).all() and torch.isfinite(std).all() and (std >= 0).all())
        fits = finite and mean.shape == x.shape and std.shape == sigma.shape
    except Exception as error:
        raise ValueError(f"transition kernel {kind!r} fails: {' '.join(str(error).split())}") from error
    if not all(map(torch.equal, given, before)):
        raise ValueError(f"transition kernel {kind!r} writes into what it is given, which the run keeps; compute anew")
    if not fits:
        raise ValueError(
            f"transition kernel {kind!r} must return a finite mean [b, ...] like x and a finite std [b] of at least 0"
        )
    _KERNELS[kind] = kernel


def check_kind(kind: str, eta: float) -> None:
    """Refuses an unknown kind and an eta outside its range.

    Raises:
        ValueError: the kind is neither in ``KINDS`` nor registered; eta is negative, not finite, or above 1 with
            ``cps``.
    """
    if kind not in KINDS and kind not in _KERNELS:
        raise ValueError(f"transition kind {kind!r} is unknown; known are {', '.join((*KINDS, *_KERNELS))}")
    if not (math.isfinite(eta) and eta >= 0):
        raise ValueError(f"eta is {eta}; it must be a number of at least 0")
    if kind == "cps" and eta > 1:
        raise ValueError(f"eta is {eta}; with 'cps' it lies in [0, 1], where 1 draws the noise afresh")


def moments(
    kind: str, eta: float, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_guard: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of one transition.

    Args:
        kind: ``ode``; ``sde`` (Flow-GRPO, arXiv 2505.05470, eq. 9); ``dance`` (DanceGRPO, arXiv 2505.07818);
            ``cps`` (FlowCPS, arXiv 2509.05952). With eta 1 ``cps`` is DMD2's re-noising. Or a registered kernel.
        eta: noise level; 0 is Euler for every kind.
        x: ``[b, ...]`` latent. v: ``[b, ...]`` velocity.
        sigma, sigma_next: fp32 ``[b]``.
        sigma_guard: fp32 ``[b]``, the schedule's second sigma: stands in for sigma where that is 1 in ``1 - sigma``
            (``sde`` only).
    Returns: mean fp32 ``[b, ...]`` and std fp32 ``[b]``.
    """
    check_kind(kind, eta)
    x, v = x.float(), v.float()
    dt = sigma_next - sigma
    euler = x + column(dt, x) * v
    if kind == "ode" or eta == 0:
        return euler, torch.zeros_like(sigma)
    if kind in _KERNELS:
        return _KERNELS[kind](eta, x, v, sigma, sigma_next, sigma_guard)
    if kind == "cps":
        std = sigma_next * math.sin(eta * math.pi / 2)
        keep = (sigma_next**2 - std**2).clamp_min(0).sqrt()
        x0, eps = x0_from_velocity(x, v, sigma), eps_from_velocity(x, v, sigma)
        return (1 - column(sigma_next, x)) * x0 + column(keep, x) * eps, std
    if kind == "dance":
        level = torch.full_like(sigma, eta)
    else:
        guarded = torch.where(sigma == 1, sigma_guard, sigma)
        level = eta * (sigma / (1 - guarded)).sqrt()
    drift = level**2 * dt / (2 * sigma)
    mean = x * (1 + column(drift, x)) + v * column((1 + level**2 * (1 - sigma) / (2 * sigma)) * dt, x)
    return mean, level * (-dt).sqrt()


def step(mean: Tensor, std: Tensor, noise: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The next latent ``mean + std * noise``, rounded to the storage dtype; no noise where the step has none."""
    return (mean if noise is None else mean + column(std, mean) * noise).to(dtype)


def log_prob(y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of the stored ``y`` under the transition, as the mean over a sample's elements (B16).

    Returns: fp32 ``[b]``; the mean accumulates in fp64. nan where std is 0: a deterministic step has none (B34), and
    leaves the gradients of the other rows alone.
    """
    s = column(torch.where(std > 0, std, 1), y)
    density = -((y.float() - mean) ** 2) / (2 * s**2) - s.log() - math.log(2 * math.pi) / 2
    return torch.where(std > 0, row_mean(density), torch.nan)


def log_prob_no_constants(y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """``-mean (y - mu)^2``: the score that FlowCPS's reference code uses, without the variance. fp32 ``[b]``."""
    return torch.where(std > 0, row_mean(-((y.float() - mean) ** 2)), torch.nan)


def gaussian_kl(mean: Tensor, reference: Tensor, std: Tensor) -> Tensor:
    """KL of two transitions of equal std: ``mean_D (mu - mu_ref)^2 / (2 std^2)``, fp32 ``[b]``; nan where std is 0.

    Times D it is in nats.
    """
    s = column(torch.where(std > 0, std, 1), mean)
    return torch.where(std > 0, row_mean((mean - reference) ** 2 / (2 * s**2)), torch.nan)


def row_mean(values: Tensor) -> Tensor:
    """Mean over all but the first dimension, accumulated in fp64, returned in fp32 (docs/architecture.md, rule 11)."""
    return values.double().flatten(1).mean(1).float()
