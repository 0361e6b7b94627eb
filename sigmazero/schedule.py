"""Sigma grids and conversions (math §1, §2).

``x_sigma = (1 - sigma) * x0 + sigma * eps``; a network's velocity is ``v = eps - x0``; ``t = 1000 * sigma``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def static_shift(u: Tensor, shift: float) -> Tensor:
    """``f(u) = s*u / (1 + (s-1)*u)`` for u in [0, 1] (math §2; SD3, arXiv 2403.03206, eq. 23).

    Raises:
        ValueError: the shift is not a positive number.
    """
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"shift is {shift}; it must be a number above 0 (1 leaves the grid uniform)")
    return shift * u / (1 + (shift - 1) * u)


def exponential_shift(u: Tensor, mu: float) -> Tensor:
    """``f(u) = e^mu / (e^mu + 1/u - 1)``: the resolution-dependent shift, equal to a static one of ``e^mu``."""
    return math.exp(mu) / (math.exp(mu) + (1 / u - 1))


def sigma_grid(num_steps: int, shift: float = 1.0) -> Tensor:
    """The schedule of N steps: ``linspace(1, 1/N, N)`` shifted exactly once, then 0.

    Args:
        num_steps: N, the number of network calls; at least 1.
        shift: static shift; 1 is uniform.
    Returns: fp32 ``[N+1]``, strictly descending from 1 to exactly 0. N=4, shift 3: 1, .9, .75, .5, 0.
    Raises:
        ValueError: N is not an integer of at least 1, or the shift is not positive.
    """
    _check_num_steps(num_steps)
    u = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64)
    return torch.cat([static_shift(u, shift), torch.zeros(1, dtype=torch.float64)]).float()


def diffusers_sd3_grid(num_steps: int, shift: float = 3.0) -> Tensor:
    """The grid "as diffusers" samples SD3: its static table is shifted twice (math §2; B07).

    The table of 1000 train steps is shifted when it is built, and its shifted last entry is the start of the linear
    spacing that is shifted again. Returns fp32 ``[N+1]``.

    Raises:
        ValueError: as ``sigma_grid``.
    """
    _check_num_steps(num_steps)
    last = static_shift(torch.tensor(1 / 1000, dtype=torch.float64), shift).item()
    u = torch.linspace(1, last, num_steps, dtype=torch.float64)
    return torch.cat([static_shift(u, shift), torch.zeros(1, dtype=torch.float64)]).float()


def _numbers(values: Tensor) -> list[float]:
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _check_num_steps(num_steps: object) -> None:
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"num_steps is {num_steps!r}; it must be an integer of at least 1")


def check_sigmas(sigmas: Tensor) -> None:
    """Refuses what is not a schedule: fp32, one dimension, strictly descending within [0, 1], ending in exactly 0.

    Raises:
        ValueError: says which of these fails, with the values (B06, B63).
    """
    values = _numbers(sigmas)
    if sigmas.ndim != 1 or len(values) < 2:
        raise ValueError(f"a schedule is N+1 sigmas in one dimension with N at least 1; got shape {list(sigmas.shape)}")
    if sigmas.dtype != torch.float32:
        raise ValueError(
            f"a schedule is kept in float32, got {sigmas.dtype}: lower precision moves the timesteps (B03)"
        )
    if values[-1] != 0 or not all(math.isfinite(s) for s in values) or values[0] > 1:
        raise ValueError(f"a schedule lies within [0, 1] and ends in exactly 0, got {values}")
    if any(a <= b for a, b in itertools.pairwise(values)):
        raise ValueError(f"a schedule is strictly descending, got {values}")


def truncate(sigmas: Tensor, stop: int) -> Tensor:
    """The schedule of a rollout whose last step is ``stop``: ``sigmas[:stop+1] + [0]`` (math §2).

    Raises:
        ValueError: ``stop`` is outside 0..N-1.
    """
    if not 0 <= stop < len(sigmas) - 1:
        raise ValueError(f"stop is {stop}; a schedule of {len(sigmas) - 1} steps has steps 0..{len(sigmas) - 2}")
    return torch.cat([sigmas[: stop + 1], torch.zeros_like(sigmas[:1])])


def timestep(sigma: Tensor) -> Tensor:
    """``t = 1000 * sigma`` in fp32, whatever the network's dtype (B03)."""
    return 1000 * sigma.float()


def column(values: Tensor, like: Tensor) -> Tensor:
    """``[b]`` as ``[b, 1, ...]``, to be multiplied with rows of ``like``."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def add_noise(x0: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
    """``x_sigma = (1 - sigma) * x0 + sigma * eps``, sigma a row."""
    s = column(sigma, x0)
    return (1 - s) * x0 + s * eps


def x0_from_velocity(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """``x0 = x - sigma * v``, sigma a row, in fp32."""
    return x.float() - column(sigma, x) * v.float()


def eps_from_velocity(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """``eps = x + (1 - sigma) * v``, sigma a row, in fp32. Never divides by ``1 - sigma``."""
    return x.float() + (1 - column(sigma, x)) * v.float()


def score_sigma(u: Tensor, distribution: str, shift: float, low: float, high: float) -> Tensor:
    """Sigmas at which scores are compared or regressed (math §6), from uniform draws in [0, 1).

    ``discrete``: ``k = floor(1000 u)``, the shift applied once to ``k/1000``; ``uniform``: u itself, shifted.
    Both are clamped to ``[low, high]``. Returns fp32 of the shape of ``u``.
    """
    if distribution not in ("discrete", "uniform"):
        raise ValueError(f"score sigma distribution {distribution!r} is unknown; use 'discrete' or 'uniform'")
    u = u.double()
    u = torch.floor(u * 1000) / 1000 if distribution == "discrete" else u
    return static_shift(u, shift).clamp(low, high).float()


def logit_normal_sigma(z: Tensor, mean: float, std: float) -> Tensor:
    """``sigmoid(mean + std * z)`` of standard normal draws (SD3, arXiv 2403.03206, eq. 19): fp32."""
    return torch.sigmoid(mean + std * z.double()).float()


def stack_sigmas(schedules: Sequence[Tensor]) -> Tensor:
    """Schedules of equal length as fp32 ``[rows, N+1]``.

    Raises:
        ValueError: the lengths differ.
    """
    if len({len(s) for s in schedules}) > 1:
        raise ValueError(f"schedules of one batch differ in length: {sorted({len(s) for s in schedules})}")
    return torch.stack(list(schedules))
