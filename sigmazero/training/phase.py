"""Runs one phase: row sets, micro-batches, accumulation, the non-finite guard, clipping, the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sigmazero.algorithms.base import Phase, Term
from sigmazero.metrics import combined
from sigmazero.models.roles import Roles
from sigmazero.records import Batch
from sigmazero.training.state import RoleOptimizer


@dataclass
class PhaseResult:
    """What a phase leaves: fields for later phases a feed, metrics, and how its updates ended."""

    written: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    stepped: int = 0  # updates that were made
    skipped: int = 0  # updates that met something non-finite
    empty: int = 0  # updates without a row of weight


def run_phase(
    phase: Phase,
    roles: Roles,
    optimizers: Mapping[str, RoleOptimizer],
    feeds: Mapping[str, Batch],
    micro_batch: int,
    cycle: int = 0,
    after_step: Callable[[], None] = lambda: None,
) -> PhaseResult:
    """Runs every update of a phase: back-propagates its terms in micro-batches, then steps the roles it updates.

    The loss of a feed is ``sum(weight * loss) / sum(weight)`` over all items of the update, however they are split. An
    update with a non-finite loss or gradient is skipped whole: no optimizer, schedule or average of its roles ticks
    (B40). One without a row of weight, as when no group of a rollout teaches anything, is left out.

    Args:
        micro_batch: items of one forward and backward.
        after_step: called after each update that was made.
    """
    result, rows = PhaseResult(), {feed: phase.rows(len(feeds[feed]), cycle) for feed in phase.terms}
    assert not phase.writes or all(len(sets) == 1 for sets in rows.values()), (
        "a phase that writes sees all rows at once"
    )
    all_metrics: list[dict[str, float]] = []
    for sets in zip(*rows.values(), strict=True):
        batches = {feed: feeds[feed].take(own) for feed, own in zip(rows, sets, strict=True)}
        if any(float(batch["weight"].sum()) == 0 for batch in batches.values()):
            result.empty += 1
            continue
        all_metrics.append(_update(result, phase, roles, optimizers, batches, micro_batch, after_step))
    result.metrics = _combined(all_metrics)
    return result


def _update(
    result: PhaseResult,
    phase: Phase,
    roles: Roles,
    optimizers: Mapping[str, RoleOptimizer],
    batches: Mapping[str, Batch],
    micro_batch: int,
    after_step: Callable[[], None],
) -> dict[str, float]:
    """One update: every feed's term, then the optimizers. Returns its metrics."""
    metrics: dict[str, float] = {}
    updated = [optimizers[role] for role in phase.updates]
    for optimizer in optimizers.values():
        optimizer.clear()  # an update starts without anybody's stale gradients
    finite = True
    for feed, term in phase.terms.items():
        outputs = _accumulate(phase, roles, term, batches[feed], micro_batch)
        finite &= _report(metrics, phase, batches[feed], outputs)
        if phase.writes:
            result.written[feed] = {n: _by_row(outputs[n], len(batches[feed]), phase) for n in phase.writes}
    norms = [optimizer.gradient_norm() for optimizer in updated]
    finite = finite and all(bool(torch.isfinite(norm)) for norm in norms)
    if finite:
        for optimizer, norm in zip(updated, norms, strict=True):
            rate = optimizer.step(norm)
            roles.versions[optimizer.role] = optimizer.steps
            metrics[f"train/{optimizer.role}_grad_norm"] = float(norm)
            metrics[f"train/{optimizer.role}_lr"] = rate
        result.stepped += 1
        after_step()
    else:
        result.skipped += 1
    for optimizer in updated:
        optimizer.clear()
    return metrics


def _accumulate(phase: Phase, roles: Roles, term: Term, batch: Batch, micro_batch: int) -> dict[str, Tensor]:
    """Back-propagates a term over a batch in micro-batches; returns its outputs over all items."""
    count = len(batch) * _num_steps(phase, batch)
    total = batch["weight"].sum() * _num_steps(phase, batch)
    parts: list[Mapping[str, Tensor]] = []
    for start in range(0, count, micro_batch):
        micro = _items(batch, phase.step_fields, start, min(start + micro_batch, count))
        with torch.set_grad_enabled(bool(phase.updates)):
            out = term(roles, micro)
            if phase.updates:
                weighted_sum(out["loss"], micro["weight"]).div(total).backward()
        parts.append({name: value.detach() for name, value in out.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _num_steps(phase: Phase, batch: Batch) -> int:
    return batch[phase.step_fields[0]].shape[1] if phase.step_fields else 1


def _items(batch: Batch, step_fields: tuple[str, ...], start: int, stop: int) -> Batch:
    """Items ``start`` to ``stop`` of a batch: all rows of step 0, then all of step 1, ..."""
    if not step_fields:
        return batch.take(range(start, stop))
    rows, steps = [k % len(batch) for k in range(start, stop)], [k // len(batch) for k in range(start, stop)]
    shared = {name: value for name, value in batch.fields.items() if name not in step_fields}
    taken = Batch(shared, batch.prompts, batch.condition).take(rows)
    return taken.with_fields(**{name: batch[name][rows, steps] for name in step_fields})


def _by_row(output: Tensor, num_rows: int, phase: Phase) -> Tensor:
    """An output over items as a field: ``[b, ...]``, or ``[b, T, ...]`` of a phase with steps."""
    return output.unflatten(0, (-1, num_rows)).transpose(0, 1) if phase.step_fields else output


def _report(metrics: dict[str, float], phase: Phase, batch: Batch, outputs: Mapping[str, Tensor]) -> bool:
    """Metrics of a term's outputs; whether all of them, in rows of weight, are finite."""
    steps, finite = _num_steps(phase, batch), True
    weight = batch["weight"].repeat(steps)
    for name, value in outputs.items():
        bad = ~torch.isfinite(value[weight > 0])
        if bool(bad.any()):
            finite = False
            metrics[f"train/nonfinite_{phase.name}_{name}"] = float(bad.sum())
        if name in phase.writes:
            continue
        key = f"train/{name}" if name in phase.shared else f"train/{phase.name}_{name}"
        metrics[key] = _reduced(name, value, weight)
        if name in phase.by_sigma:
            sigma = batch["sigma"].T.flatten()
            for level in sigma.unique().tolist():
                at = sigma == level
                metrics[f"{key}/sigma_{level:.3f}"] = _reduced(name, value[at], weight[at])
    return finite


def _reduced(name: str, value: Tensor, weight: Tensor) -> float:
    if name.endswith("_max"):
        return float(value[weight > 0].max()) if bool((weight > 0).any()) else 0.0
    return float(weighted_sum(value, weight) / weight.sum().clamp_min(1e-12))


def _combined(rows: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a phase from those of its updates: means, and maxima where the name says so."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: combined(name, own) for name, own in values.items()}


def weighted_sum(values: Tensor, weight: Tensor) -> Tensor:
    """``sum(weight * values)``; a row of weight 0 contributes nothing, whatever its value."""
    return torch.where(weight > 0, values * weight, torch.zeros_like(values)).sum()
