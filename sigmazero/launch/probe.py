"""A dry probe: rollouts and the training forward with no update, and how far the two are apart at each step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigmazero import transition
from sigmazero.config import RunConfig
from sigmazero.launch.local import Built, build
from sigmazero.records import RolloutRequest, Trajectory

MAX_SAMPLES = 64


@dataclass(frozen=True)
class StepGap:
    """Of all samples that took a step: absolute differences between engine and trainer, mean and greatest.

    ``log_prob`` is None where the step has none.
    """

    step: int
    sigma: float  # of the first sample
    velocity_mean: float
    velocity_max: float
    log_prob_mean: float | None
    log_prob_max: float | None


def probe(config: RunConfig) -> list[StepGap]:
    """Samples one cycle of a recipe, at most ``MAX_SAMPLES``, and computes every step again as training does.

    Raises:
        ValueError: as ``build``; the algorithm has no rollout.
    """
    with build(config) as built:
        trajectories = built.engine.generate(_requests(built))
        with torch.no_grad():
            return [_gap(built, trajectories, i) for i in range(max(len(t.sigmas) for t in trajectories) - 1)]


def _requests(built: Built) -> list[RolloutRequest]:
    """The cycle's own requests, but with every latent and every velocity coming back."""
    config, algorithm = built.config, built.algorithm
    if config.rollout is not None and config.rollout.replay:
        raise ValueError("rollout.replay: a probe samples afresh; leave it out")
    group = algorithm.group_size or 1
    samples = range(min(config.data.batch_size, MAX_SAMPLES))
    requests = algorithm.requests(built.prompts.prompts([s // group for s in samples]), samples, 0)
    if not requests:
        raise ValueError(
            f"algorithm.name is {config.algorithm.name!r}, which samples nothing: there is no gap to probe"
        )
    return [_recorded(request) for request in requests]


def _recorded(request: RolloutRequest) -> RolloutRequest:
    stop = request.plan.stop
    last = len(request.sigmas) - 1 if stop is None else stop + 1
    return dataclasses.replace(request, plan=request.plan._replace(ret=tuple(range(last + 1))), debug=True)


def _gap(built: Built, trajectories: Sequence[Trajectory], i: int) -> StepGap:
    """Step i of every sample that took it, again, in the micro-batches of training."""
    rows = [t for t in trajectories if i < len(t.sigmas) - 1]
    size = min(optimizer.micro_batch for optimizer in built.config.optimizers.values())
    parts = [_again(built, rows[start : start + size], i) for start in range(0, len(rows), size)]
    v, log_prob = (torch.cat([part[k] for part in parts]) for k in (0, 1))
    recorded = torch.stack([t.velocities[i] for t in rows if t.velocities is not None])
    velocity = (v.float() - recorded.float()).abs()
    gap = (log_prob - torch.stack([t.log_prob[i] for t in rows])).abs()
    gap = gap[torch.isfinite(gap)]
    scored = len(gap) > 0
    return StepGap(
        i,
        float(rows[0].sigmas[i]),
        float(velocity.mean()),
        float(velocity.max()),
        float(gap.mean()) if scored else None,
        float(gap.max()) if scored else None,
    )


def _again(built: Built, rows: Sequence[Trajectory], i: int) -> tuple[Tensor, Tensor]:
    """Velocities and log-probs of step i of some samples; nan where their rollout scored none."""
    request = rows[0].request
    x, y = (torch.stack([t.latent(k) for t in rows]) for k in (i, i + 1))
    sigma, sigma_next = (torch.stack([t.sigmas[k] for t in rows]).to(x.device) for k in (i, i + 1))
    guard = torch.stack([t.request.sigmas[1] for t in rows]).to(x.device)
    condition = built.roles.model.encode([t.request.prompt.text for t in rows])
    v = built.roles.velocity(request.policy, request.guidance)(x, sigma, condition)
    mean, std = transition.moments(request.kind, request.eta, x, v, sigma, sigma_next, guard)
    recorded = torch.stack([t.log_prob[i] for t in rows])
    return v, torch.where(torch.isnan(recorded), torch.nan, transition.log_prob(y, mean, std))


def table(gaps: Sequence[StepGap]) -> str:
    """The gaps of each step as text."""
    lines = [f"{'step':>4}{'sigma':>9}{'velocity mean':>16}{'max':>12}{'log-prob mean':>16}{'max':>12}"]
    for gap in gaps:
        log_prob = [f"{g:.3g}" if g is not None else "none" for g in (gap.log_prob_mean, gap.log_prob_max)]
        lines.append(
            f"{gap.step:>4}{gap.sigma:>9.4f}{gap.velocity_mean:>16.3g}{gap.velocity_max:>12.3g}"
            f"{log_prob[0]:>16}{log_prob[1]:>12}"
        )
    return "\n".join(lines)


def as_json(gaps: Sequence[StepGap]) -> str:
    rows: list[dict[str, Any]] = [dataclasses.asdict(gap) for gap in gaps]
    return json.dumps({"steps": rows})
