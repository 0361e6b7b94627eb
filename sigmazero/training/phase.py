"""Runs one phase: row sets, micro-batches, accumulation, the non-finite guard, clipping, the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sigmazero.algorithms.base import Phase, Term
from sigmazero.metrics import combined
from sigmazero.models.roles import Roles
from sigmazero.records import Batch
from sigmazero.training.parallel import ALONE, Ranks
from sigmazero.training.profiling import UNTIMED, Stopwatch
from sigmazero.training.staging import Mode, Staging, Tile
from sigmazero.training.state import RoleOptimizer


@dataclass
class PhaseResult:
    """What a phase leaves: fields for later phases a feed, metrics, and how its updates ended."""

    written: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    stepped: int = 0  # updates that were made
    skipped: int = 0  # updates that met something non-finite
    empty: int = 0  # updates without a row of weight
    moved_bytes: int = 0  # that this rank moved from the host to the device
    input_bytes: int = 0  # of these on the device at once, at most
    outputs: list[Mapping[str, Tensor]] = field(default_factory=list)  # of each micro-batch, where they are kept


@dataclass(frozen=True)
class _How:
    """How the rows of an update get through the networks; nothing of it changes a result."""

    micro_batch: int
    ranks: Ranks
    device: torch.device
    staging: Mode
    keep_outputs: bool
    watch: Stopwatch


def run_phase(
    phase: Phase,
    roles: Roles,
    optimizers: Mapping[str, RoleOptimizer],
    feeds: Mapping[str, Batch],
    micro_batch: int,
    cycle: int = 0,
    after_step: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
    device: torch.device | str = "cpu",
    staging: Mode = "prefetch",
    *,
    keep_outputs: bool = False,
    watch: Stopwatch = UNTIMED,
) -> PhaseResult:
    """Runs every update of a phase: back-propagates its terms in micro-batches, then steps the roles it updates.

    The loss of a feed is ``sum(weight * loss) / sum(weight)`` over all items of the update, however they are split. An
    update with a non-finite loss or gradient is skipped whole, on every rank: no optimizer, schedule or average of its
    roles ticks (B40). One without a row of weight, as when no group of a rollout teaches anything, is left out.

    Args:
        feeds: all rows, on every rank alike and on the host; each rank computes its share.
        micro_batch: items of one forward and backward of a rank.
        after_step: called after each update that was made.
        staging: how rows get to the device (docs/memory.md).
        watch: times the network work.
        keep_outputs: keeps all that the terms return, with what it refers to, to look at; memory grows with the items.
    Raises:
        ValueError: a field requires grad, is not on the host, or is of another length.
    """
    result, rows = PhaseResult(), {feed: phase.rows(len(feeds[feed]), cycle) for feed in phase.terms}
    assert not phase.writes or all(len(sets) == 1 for sets in rows.values()), (
        "a phase that writes sees all rows at once"
    )
    how = _How(micro_batch, ranks, torch.device(device), staging, keep_outputs, watch)
    all_metrics: list[dict[str, float]] = []
    for sets in zip(*rows.values(), strict=True):
        batches = {feed: feeds[feed].take(own) for feed, own in zip(rows, sets, strict=True)}
        if any(float(batch["weight"].sum()) == 0 for batch in batches.values()):
            result.empty += 1
            continue
        all_metrics.append(_update(result, phase, roles, optimizers, batches, how, after_step))
    result.metrics = _combined(all_metrics)
    return result


def _update(
    result: PhaseResult,
    phase: Phase,
    roles: Roles,
    optimizers: Mapping[str, RoleOptimizer],
    batches: Mapping[str, Batch],
    how: _How,
    after_step: Callable[[], None],
) -> dict[str, float]:
    """One update: every feed's term, then the optimizers. Returns its metrics."""
    metrics: dict[str, float] = {}
    updated = [optimizers[role] for role in phase.updates]
    for optimizer in optimizers.values():
        optimizer.clear()  # an update starts without anybody's stale gradients
    finite = True
    for feed, term in phase.terms.items():
        is_last = feed == list(phase.terms)[-1]
        outputs = _accumulate(result, phase, roles, term, batches[feed], how, is_last=is_last)
        finite &= _report(metrics, phase, batches[feed], outputs)
        if phase.writes:
            result.written[feed] = {n: _by_row(outputs[n], len(batches[feed]), phase) for n in phase.writes}
    for optimizer in updated:
        how.ranks.sum_gradients(optimizer.parameters.values())
    with how.watch.work("optimizer"):
        norms = [float(optimizer.gradient_norm()) for optimizer in updated]
    finite = finite and all(map(math.isfinite, norms))
    if finite:
        for optimizer, norm in zip(updated, norms, strict=True):
            with how.watch.work("optimizer"):
                rate = optimizer.step(norm)
            roles.versions[optimizer.role] = optimizer.steps
            metrics[f"train/{optimizer.role}_grad_norm"] = norm
            metrics[f"train/{optimizer.role}_lr"] = rate
        result.stepped += 1
        after_step()
    else:
        result.skipped += 1
    for optimizer in updated:
        optimizer.clear()
    return metrics


def _accumulate(
    result: PhaseResult,
    phase: Phase,
    roles: Roles,
    term: Term,
    batch: Batch,
    how: _How,
    *,
    is_last: bool,
) -> dict[str, Tensor]:
    """Back-propagates a term over this rank's rows in micro-batches; returns its outputs over all items of all ranks.

    Every rank makes the same network calls. Their gradients are added up in the ``is_last`` term's last backward.
    """
    own = _own_rows(batch, how.ranks)
    own = own.with_condition(roles.model.encode([prompt.text for prompt in own.prompts]))
    staged = Staging(own, phase.step_fields, phase.chains, how.micro_batch, how.device, how.staging)
    total, tables = float(batch["weight"].double().sum()) * staged.num_steps, dict[str, Tensor]()
    for tile, micro in staged:
        how.ranks.reduce_at_end(map(roles.net, phase.updates), last=is_last and tile is staged.tiles[-1])
        out = _back_propagated(phase, roles, term, micro, total, how.watch)
        _note(tables, out, tile, phase, (staged.num_steps, len(own)))
        if how.keep_outputs:
            result.outputs.append(out)
        del out, micro  # before the next tile is made ready
    result.moved_bytes += staged.moved_bytes
    result.input_bytes = max(result.input_bytes, staged.input_bytes)
    if how.device.type == "cuda":
        torch.cuda.synchronize(how.device)  # what goes to the host has come there
    items = {name: table.flatten(0, 1) for name, table in tables.items()}
    return {name: _of_all_ranks(value, len(batch), staged.num_steps, how.ranks).cpu() for name, value in items.items()}


def _back_propagated(
    phase: Phase, roles: Roles, term: Term, micro: Batch, total: float, watch: Stopwatch
) -> Mapping[str, Tensor]:
    """A term's outputs for a micro-batch, its loss back-propagated as a part of the update's."""
    with torch.set_grad_enabled(bool(phase.updates)):
        out = term(roles, micro)
        if phase.updates:
            loss = weighted_sum(out["loss"], micro["weight"]).div(total)
            with watch.work("backward"):
                loss.backward()
    return out


def _note(
    tables: dict[str, Tensor], out: Mapping[str, Tensor], tile: Tile, phase: Phase, shape: tuple[int, int]
) -> None:
    """Copies what somebody asked for into tables ``[steps, rows, ...]``: numbers on the device, larger fields on the
    host. Nothing else of a micro-batch outlives it."""
    for name, value in out.items():
        if value.ndim > 1 and name not in phase.writes:
            continue
        if name not in tables:
            large = value.ndim > 1
            tables[name] = torch.empty(
                (*shape, *value.shape[1:]), dtype=value.dtype, device="cpu" if large else value.device,
                pin_memory=large and value.is_cuda,
            )  # fmt: skip
        value = value.detach().unflatten(0, tile.shape)
        tables[name][tile.steps, tile.rows].copy_(value, non_blocking=True)


def _own_rows(batch: Batch, ranks: Ranks) -> Batch:
    """This rank's rows, filled up with rows of weight 0 to as many as the others have."""
    share = ranks.share(len(batch))
    missing = ranks.most(len(batch)) - len(share)
    if not missing:
        return batch.take(share)
    own = batch.take([*share, *[0] * missing])
    weight = own["weight"].clone()
    weight[len(share) :] = 0
    return own.with_fields(weight=weight)


def _of_all_ranks(output: Tensor, num_rows: int, steps: int, ranks: Ranks) -> Tensor:
    """An output over this rank's items as one over all items: all rows of step 0, then all of step 1, ..."""
    if ranks.count == 1:
        return output
    by_row = output.unflatten(0, (steps, -1)).transpose(0, 1)[: len(ranks.share(num_rows))]
    return ranks.gather_rows(by_row.contiguous(), num_rows).transpose(0, 1).flatten(0, 1)


def _by_row(output: Tensor, num_rows: int, phase: Phase) -> Tensor:
    """An output over items as a field: ``[b, ...]``, or ``[b, T, ...]`` of a phase with steps."""
    return output.unflatten(0, (-1, num_rows)).transpose(0, 1) if phase.step_fields or phase.chains else output


def _report(metrics: dict[str, float], phase: Phase, batch: Batch, outputs: Mapping[str, Tensor]) -> bool:
    """Metrics of a term's outputs; whether all of them, in rows of weight, are finite."""
    steps, finite = len(next(iter(outputs.values()))) // len(batch), True
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
