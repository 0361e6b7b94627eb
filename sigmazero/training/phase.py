"""Runs one phase: micro-batches, accumulation, the non-finite guard, clipping, the optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sigmazero.algorithms.base import Phase, Term
from sigmazero.models.roles import Roles
from sigmazero.records import Batch
from sigmazero.training.state import RoleOptimizer


@dataclass
class PhaseResult:
    """What a phase leaves: fields for later phases a feed, metrics, whether it stepped."""

    written: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    finite: bool = True


def run_phase(
    phase: Phase, roles: Roles, optimizers: Mapping[str, RoleOptimizer], feeds: Mapping[str, Batch], micro_batch: int
) -> PhaseResult:
    """Back-propagates every term over its feed in micro-batches, then steps the roles that the phase updates.

    The loss of a feed is ``sum(weight * loss) / sum(weight)`` over all its rows, however they are split. An update
    with a non-finite loss or gradient is skipped whole: no optimizer, schedule or average of its roles ticks (B40).
    """
    result = PhaseResult()
    updated = [optimizers[role] for role in phase.updates]
    for optimizer in optimizers.values():
        optimizer.clear()  # a phase starts without anybody's stale gradients
    for feed, term in phase.terms.items():
        _accumulate(result, phase, roles, feed, term, feeds[feed], micro_batch)
    norms = [optimizer.gradient_norm() for optimizer in updated]
    if updated:
        result.finite = result.finite and all(bool(torch.isfinite(norm)) for norm in norms)
    if result.finite:
        for optimizer, norm in zip(updated, norms, strict=True):
            rate = optimizer.step(norm)
            roles.versions[optimizer.role] = optimizer.steps
            result.metrics[f"train/{optimizer.role}_grad_norm"] = float(norm)
            result.metrics[f"train/{optimizer.role}_lr"] = rate
    for optimizer in updated:
        optimizer.clear()
    return result


def _accumulate(
    result: PhaseResult, phase: Phase, roles: Roles, feed: str, term: Term, batch: Batch, micro_batch: int
) -> None:
    total = batch["weight"].sum()
    parts: list[Mapping[str, Tensor]] = []
    for start in range(0, len(batch), micro_batch):
        micro = batch.take(range(start, min(start + micro_batch, len(batch))))
        with torch.set_grad_enabled(bool(phase.updates)):
            out = term(roles, micro)
            if phase.updates:
                weighted_sum(out["loss"], micro["weight"]).div(total).backward()
        parts.append({name: value.detach() for name, value in out.items()})
    outputs = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    for name, value in outputs.items():
        if not bool(torch.isfinite(value).all()):
            result.finite = False
            result.metrics[f"train/nonfinite_{phase.name}_{name}"] = float((~torch.isfinite(value)).sum())
        if name not in phase.writes:
            suffix = "loss" if name == "loss" else name
            result.metrics[f"train/{phase.name}_{suffix}"] = float(weighted_sum(value, batch["weight"]) / total)
    if phase.writes:
        result.written[feed] = {name: outputs[name] for name in phase.writes}


def weighted_sum(values: Tensor, weight: Tensor) -> Tensor:
    """``sum(weight * values)``; a row of weight 0 contributes nothing, whatever its value."""
    return torch.where(weight > 0, values * weight, torch.zeros_like(values)).sum()
