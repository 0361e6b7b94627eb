"""Noise to latents over any velocity, following each row's step plan (math §2, §3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sigmazero import seeds, transition
from sigmazero.records import Conditioning, RolloutRequest, Trajectory
from sigmazero.schedule import check_sigmas, column, stack_sigmas, truncate
from sigmazero.strategies import checked_plan

Velocity = Callable[[Tensor, Tensor, Conditioning], Tensor]  # (x [b, ...], sigma fp32 [b], condition) -> v [b, ...]

CPU_ROW_MULTIPLE = 8


def padded(velocity: Velocity) -> Velocity:
    """A velocity whose calls pad their rows to a multiple, so that a row's result does not depend on the batch.

    Matrix kernels choose another summation order for a few rows; on a CPU every multiple of 8 gave equal bits
    (architecture, rule 15). The padding repeats the first row and is cut off.
    """

    def call(x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        rows = len(x)
        missing = -rows % CPU_ROW_MULTIPLE if x.device.type == "cpu" else 0
        if not missing:
            return velocity(x, sigma, condition)
        index = [*range(rows), *[0] * missing]
        return velocity(x[index], sigma[index], condition.take(index))[:rows]

    return call


def batch_key(request: RolloutRequest) -> tuple[object, ...]:
    """What rows must share to be sampled in one batch. Plans are not in it: a row leaves the batch when it stops."""
    return (request.policy, len(request.sigmas), request.kind, request.eta, request.guidance)


@dataclass
class _Row:
    """What one sample's rollout has recorded so far."""

    latents: dict[int, Tensor] = field(default_factory=dict)
    log_prob: list[Tensor] = field(default_factory=list)


def rollout(
    velocity: Velocity,
    requests: Sequence[RolloutRequest],
    condition: Conditioning,
    latent_shape: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    version: int = 0,
) -> list[Trajectory]:
    """Samples a batch of requests; a row leaves when it stops, so the batch costs at most N network calls.

    Each step is stored in ``dtype`` and the next one starts from what was stored; the log-prob is that of the stored
    latent. Gradients flow where autograd is on.

    Args:
        requests: rows that share ``batch_key``; each with its own schedule, plan and seed.
        condition: one row a request.
    Returns: one trajectory a request, in order.
    Raises:
        ValueError: the requests do not share a key, a schedule or a plan is invalid.
    """
    if len({batch_key(r) for r in requests}) > 1:
        raise ValueError(f"these requests cannot share a batch: {sorted({str(batch_key(r)) for r in requests})}")
    for r in requests:
        check_sigmas(r.sigmas)
    num_steps = len(requests[0].sigmas) - 1
    plans = [checked_plan(r.plan, num_steps) for r in requests]
    last = [num_steps - 1 if p.stop is None else p.stop for p in plans]
    sigmas = stack_sigmas(
        [r.sigmas if p.stop is None else _stopped(r.sigmas, p.stop) for r, p in zip(requests, plans, strict=True)]
    )
    guard = torch.stack([r.sigmas[1] for r in requests])
    kind, eta, velocity = requests[0].kind, requests[0].eta, padded(velocity)

    noise = torch.cat([_noise("initial_noise", [r], latent_shape, 0) for r in requests])
    x = (noise * column(sigmas[:, 0], noise)).to(device, dtype)
    rows = [_Row({0: x[b]}) for b in range(len(requests))]
    live = list(range(len(requests)))
    for i in range(max(last) + 1):
        stay = [j for j, b in enumerate(live) if last[b] >= i]
        if len(stay) < len(live):
            x, live = x[stay], [live[j] for j in stay]
        sigma, sigma_next = sigmas[live, i].to(device), sigmas[live, i + 1].to(device)
        v = velocity(x, sigma, condition.take(live))
        x_next = torch.empty_like(x)
        for stochastic in (True, False):
            part = [j for j, b in enumerate(live) if _is_stochastic(plans[b].sde, plans[b].stop, i) == stochastic]
            if not part:
                continue
            mean, std = transition.moments(
                kind if stochastic else "ode", eta, x[part], v[part], sigma[part], sigma_next[part],
                guard[live][part].to(device),
            )  # fmt: skip
            drawn = None
            if stochastic and eta > 0 and kind != "ode":
                drawn = _noise("step_noise", [requests[live[j]] for j in part], latent_shape, i).to(device)
            y = transition.step(mean, std, drawn, dtype)
            x_next = x_next.index_copy(0, torch.tensor(part, device=x.device), y)
            for j, score in zip(part, transition.log_prob(y, mean, std), strict=True):
                rows[live[j]].log_prob.append(score)
        x = x_next
        for j, b in enumerate(live):
            rows[b].latents[i + 1] = x[j]
    return [
        Trajectory(
            request=r,
            latents=torch.stack([row.latents[k] for k in plan.ret]),
            latent_indices=plan.ret,
            sigmas=s[: end + 2],
            log_prob=torch.stack(row.log_prob),
            version=version,
        )
        for r, plan, row, s, end in zip(requests, plans, rows, sigmas, last, strict=True)
    ]


def _stopped(sigmas: Tensor, stop: int) -> Tensor:
    """The truncated schedule, filled with zeros to the length of the full one."""
    short = truncate(sigmas, stop)
    return torch.cat([short, torch.zeros(len(sigmas) - len(short))])


def _is_stochastic(sde: tuple[int, ...] | None, stop: int | None, i: int) -> bool:
    return i != stop and (sde is None or i in sde)


def _noise(stream: str, requests: Sequence[RolloutRequest], shape: Sequence[int], i: int) -> Tensor:
    """Each row's own noise of step ``i``: nothing but its seed, sample, cycle and the step decides it (B01)."""
    return torch.cat([seeds.normal(r.seed, stream, [r.sample], shape, r.cycle, i) for r in requests])
