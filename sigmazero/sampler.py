"""Noise to latents over any velocity, following each row's step plan (math §2, §3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sigmazero import seeds, transition
from sigmazero.records import Conditioning, RolloutRequest, StepPlan, Trajectory
from sigmazero.schedule import check_sigmas, column, stack_sigmas, truncate
from sigmazero.strategies import checked_plan

Velocity = Callable[[Tensor, Tensor, Conditioning], Tensor]  # (x [b, ...], sigma fp32 [b], condition) -> v [b, ...]

CPU_ROW_MULTIPLE = 8


def padded(velocity: Velocity) -> Velocity:
    """A velocity whose calls pad their rows to a multiple, so that a row's result does not depend on the batch.

    Matrix kernels choose another summation order for a few rows; on a CPU every multiple of 8 gave equal bits
    (docs/architecture.md, rule 11). The padding repeats the first row and is cut off.
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
    velocities: list[Tensor] = field(default_factory=list)


def rollout(
    velocity: Velocity,
    requests: Sequence[RolloutRequest],
    condition: Conditioning,
    latent_shape: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    version: int = 0,
    calls: int = 0,
) -> list[Trajectory]:
    """Samples a batch of requests; a row leaves with its last latent that comes back: at most N network calls.

    Each step is stored in ``dtype`` and the next one starts from what was stored; the log-prob is that of the stored
    latent. Gradients flow where autograd is on.

    Args:
        requests: rows that share ``batch_key``; each with its own schedule, plan and seed.
        condition: one row a request.
        calls: network calls to make at least, with a row that counts for nothing where no other is left: ranks that
            share a network make them together.
    Returns: one trajectory a request, in order.
    Raises:
        ValueError: the requests do not share a key, a schedule or a plan is invalid.
    """
    plans = _checked(requests)
    last = [_last_step(request) for request in requests]
    own_sigmas = schedules(requests)
    sigmas = stack_sigmas(own_sigmas)
    velocity = padded(velocity)
    noise = _noise("initial_noise", requests, latent_shape, 0)
    x = (noise * column(sigmas[:, 0], noise)).to(device, dtype)
    rows = [_Row({0: latent}) for latent in x.unbind()]
    live = list(range(len(requests)))
    for i in range(max(num_calls(requests), calls)):
        stay = [j for j, b in enumerate(live) if last[b] >= i]
        if not stay:
            velocity(noise[:1].to(device, dtype), sigmas[:1, 0].to(device), condition.take([0]))
            continue
        if len(stay) < len(live):
            x, live = x[stay], [live[j] for j in stay]
        v = velocity(x, sigmas[live, i].to(device), condition.take(live))
        x, scores = _advance(i, x, v, sigmas[live], [requests[b] for b in live], [plans[b] for b in live])
        for b, latent, score, own_v in zip(live, x.unbind(), scores.unbind(), v.unbind(), strict=True):
            rows[b].latents[i + 1] = latent
            rows[b].log_prob.append(score)
            if requests[b].debug:
                rows[b].velocities.append(own_v)
    return [
        recorded(
            r, own, torch.stack([row.latents[k] for k in plan.ret]), _joined(row.log_prob), row.velocities, version
        )
        for r, own, plan, row in zip(requests, own_sigmas, plans, rows, strict=True)
    ]


def recorded(
    request: RolloutRequest,
    sigmas: Tensor,
    latents: Tensor,
    log_prob: Tensor,
    velocities: Sequence[Tensor],
    version: int,
) -> Trajectory:
    """The trajectory of a request: what was sampled, with the indices and sigmas that its plan says.

    Args:
        sigmas: its own of ``schedules``.
    """
    return Trajectory(
        request=request,
        latents=latents,
        latent_indices=tuple(sorted(request.plan.ret)),
        sigmas=sigmas[: _last_step(request) + 2],
        log_prob=log_prob,
        version=version,
        velocities=torch.stack(list(velocities)) if len(velocities) else None,
    )


def num_calls(requests: Sequence[RolloutRequest]) -> int:
    """Network calls of a batch of requests."""
    return max(map(_last_step, requests)) + 1


def _last_step(request: RolloutRequest) -> int:
    """The step that makes the last latent that comes back; -1 where that is the first noise."""
    return max(request.plan.ret) - 1


def _checked(requests: Sequence[RolloutRequest]) -> list[StepPlan]:
    """The plans of requests that can share a batch."""
    if len({batch_key(r) for r in requests}) > 1:
        raise ValueError(f"these requests cannot share a batch: {sorted({str(batch_key(r)) for r in requests})}")
    for sigmas in {id(r.sigmas): r.sigmas for r in requests}.values():
        check_sigmas(sigmas)
    return [checked_plan(r.plan, len(r.sigmas) - 1) for r in requests]


def _advance(
    i: int, x: Tensor, v: Tensor, sigmas: Tensor, requests: Sequence[RolloutRequest], plans: Sequence[StepPlan]
) -> tuple[Tensor, Tensor]:
    """Step ``i`` of every row, stochastic where its plan says so: the stored latents and their log-probs ``[b]``."""
    device, kind, eta = x.device, requests[0].kind, requests[0].eta
    guard = torch.stack([r.sigmas[1] for r in requests]).to(device)
    now, after = sigmas[:, i].to(device), sigmas[:, i + 1].to(device)
    stochastic, stepped = [_is_stochastic(plan, i) for plan in plans], list[tuple[Tensor, Tensor]]()
    parts = [part for which in (True, False) if (part := [j for j, own in enumerate(stochastic) if own == which])]
    for part in parts:
        rows = part if len(parts) > 1 else slice(None)
        step_kind = kind if stochastic[part[0]] else "ode"
        mean, std = transition.moments(step_kind, eta, x[rows], v[rows], now[rows], after[rows], guard[rows])
        noise = None
        if step_kind != "ode" and eta > 0:
            noise = _noise("step_noise", [requests[j] for j in part], x.shape[1:], i).to(device)
        y = transition.step(mean, std, noise, x.dtype)
        stepped.append((y, transition.log_prob(y, mean, std)))
    if len(parts) == 1:
        return stepped[0]
    order = torch.tensor([j for part in parts for j in part], device=device).argsort()
    return torch.cat([y for y, _ in stepped])[order], torch.cat([score for _, score in stepped])[order]


def schedules(requests: Sequence[RolloutRequest]) -> list[Tensor]:
    """Each request's schedule as sampled, fp32 ``[N+1]``: zeros from where a stopped rollout's last step jumps to."""
    made: dict[tuple[int, int | None], Tensor] = {}
    for r in requests:
        key = (id(r.sigmas), r.plan.stop)
        if key not in made:
            made[key] = r.sigmas if r.plan.stop is None else _stopped(r.sigmas, r.plan.stop)
    return [made[id(r.sigmas), r.plan.stop] for r in requests]


def _stopped(sigmas: Tensor, stop: int) -> Tensor:
    short = truncate(sigmas, stop)
    return torch.cat([short, torch.zeros(len(sigmas) - len(short))])


def _joined(scores: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(scores)) if len(scores) else torch.empty(0)


def _is_stochastic(plan: StepPlan, i: int) -> bool:
    return i != plan.stop and (plan.sde is None or i in plan.sde)


def _noise(stream: str, requests: Sequence[RolloutRequest], shape: Sequence[int], i: int) -> Tensor:
    """Each row's own noise of step ``i``: nothing but its seed, sample, cycle and the step decides it (B01)."""
    noise = torch.empty((len(requests), *shape))
    for seed in {r.seed for r in requests}:
        rows = [row for row, r in enumerate(requests) if r.seed == seed]
        own = [requests[row] for row in rows]
        noise[rows] = seeds.normal(seed, stream, [r.sample for r in own], shape, [r.cycle for r in own], i)
    return noise
