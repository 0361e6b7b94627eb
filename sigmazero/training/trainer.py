"""The only loop. It knows no algorithm, no model, no engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from sigmazero.algorithms.base import Algorithm, Phase
from sigmazero.config import RunConfig
from sigmazero.data import PictureStream
from sigmazero.engines.base import Engine
from sigmazero.models.roles import Roles
from sigmazero.records import Batch, rows_of
from sigmazero.training.phase import PhaseResult, run_phase
from sigmazero.training.rollout import Collector, Rollout
from sigmazero.training.state import Counters, RoleOptimizer


class Trainer:
    """Runs cycles: roll out and score, prepare, run the phases that are due, update averages, publish."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        roles: Roles,
        engine: Engine,
        collector: Collector,
        pictures: PictureStream,
        device: torch.device,
    ) -> None:
        self.config, self.algorithm, self.roles, self.engine = config, algorithm, roles, engine
        self.collector, self.pictures, self.device = collector, pictures, device
        self.counters = Counters()
        self.optimizers = {
            role: RoleOptimizer(role, roles.parameters(role), settings, self._num_steps(role))
            for role, settings in config.optimizers.items()
        }

    def run(self, after_cycle: Callable[[int, dict[str, float]], None]) -> None:
        """Runs every cycle that is left. ``after_cycle`` gets the count of cycles done and the cycle's metrics."""
        while self.counters.cycle < self.config.num_cycles:
            metrics = self.run_cycle()
            after_cycle(self.counters.cycle, metrics)

    def run_cycle(self) -> dict[str, float]:
        """One rollout (or none) and the phases that are due: the unit of checkpoints and logging."""
        started, cycle = time.perf_counter(), self.counters.cycle
        rollout = self.collector.collect(self.counters.samples, cycle)
        feeds = self._prepare(rollout, cycle)
        metrics = {"time/rollout": time.perf_counter() - started, **rollout.metrics}
        updated: set[str] = set()
        for phase in self.algorithm.phases:
            if cycle % phase.every == 0:
                feeds = self._run(phase, feeds, metrics, updated)
        self._average("cycle", updated, metrics)
        self.engine.publish(self.algorithm.policy, self.roles.versions[self.algorithm.policy])
        self.counters.cycle += 1
        self.counters.samples = rollout.samples.stop
        metrics["time/cycle"] = time.perf_counter() - started
        return metrics

    def _prepare(self, rollout: Rollout, cycle: int) -> dict[str, Batch]:
        pictures = self._draw_pictures(rollout, cycle) if self.algorithm.uses_pictures else None
        feeds = self.algorithm.feeds(rollout.trajectories, rollout.scores, pictures, cycle)
        return {feed: self._on_device(batch) for feed, batch in feeds.items()}

    def _draw_pictures(self, rollout: Rollout, cycle: int) -> Batch:
        pictures, prompts = self.pictures.pictures(rollout.samples)
        x0 = self.roles.model.encode_pictures(pictures.to(self.device))
        return Batch(rows_of(rollout.samples, cycle) | {"x0": x0}, tuple(prompts))

    def _on_device(self, batch: Batch) -> Batch:
        moved = Batch({name: value.to(self.device) for name, value in batch.fields.items()}, batch.prompts)
        return moved.with_condition(self.roles.model.encode([prompt.text for prompt in batch.prompts]))

    def _run(
        self, phase: Phase, feeds: dict[str, Batch], metrics: dict[str, float], updated: set[str]
    ) -> dict[str, Batch]:
        """Runs a phase, ticks its averages, hands on what it wrote, counts what it skipped."""
        started = time.perf_counter()

        def after_step() -> None:
            updated.update(phase.updates)
            self._average("update", phase.updates, metrics)
            self.counters.skipped_in_a_row[phase.name] = 0

        size = self._micro_batch(phase)
        result = run_phase(phase, self.roles, self.optimizers, feeds, size, self.counters.cycle, after_step)
        metrics.update(result.metrics)
        metrics[f"time/{phase.name}"] = time.perf_counter() - started
        counts = {"empty": result.empty, "skipped": result.skipped}
        metrics.update({f"train/{phase.name}_{name}": float(count) for name, count in counts.items() if count})
        self._count_skips(phase, result)
        return {f: b.with_fields(**result.written[f]) if f in result.written else b for f, b in feeds.items()}

    def _average(self, every: str, sources: Collection[str], metrics: dict[str, float]) -> None:
        """Ticks the averages of roles that were just updated."""
        for average in self.algorithm.averages:
            if average.every == every and average.source in sources:
                steps = self.roles.versions[average.source]
                decay = average.decay(steps - 1 if every == "update" else steps)
                self.roles.average(average.target, average.source, decay)
                metrics[f"train/{average.target}_decay"] = decay

    def _count_skips(self, phase: Phase, result: PhaseResult) -> None:
        """Counts updates that were skipped; ``skipped_in_a_row`` since the last one that was made."""
        counters, limit = self.counters, self.config.training.max_nonfinite
        if not result.skipped:
            return
        for counts in (counters.skipped, counters.skipped_in_a_row):
            counts[phase.name] = counts.get(phase.name, 0) + result.skipped
        if counters.skipped_in_a_row[phase.name] >= limit:
            raise ValueError(
                f"phase {phase.name!r} met non-finite values {limit} times in a row, last in cycle {counters.cycle}; "
                "its updates were skipped. Lower the learning rate of its roles, or raise training.max_nonfinite"
            )

    def _micro_batch(self, phase: Phase) -> int:
        """Rows of one forward and backward: the smallest that the roles of the phase ask for."""
        involved = phase.updates or phase.calls
        sizes = [self.config.optimizers[role].micro_batch for role in involved if role in self.config.optimizers]
        return min(sizes, default=self.config.data.batch_size)

    def _num_steps(self, role: str) -> int:
        """Optimizer steps of a role in the whole run, the length of its learning-rate schedule."""
        size = self.config.data.batch_size
        phases = [phase for phase in self.algorithm.phases if role in phase.updates]
        return sum(-(-self.config.num_cycles // phase.every) * len(phase.rows(size, 0)) for phase in phases)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that evolves, for a checkpoint: weights of trained and averaged roles, moments."""
        weights = {
            f"roles/{role}/{name}": value
            for role, kind in self.roles.kinds.items() if kind != "frozen"
            for name, value in self.roles.parameters(role).items()
        }  # fmt: skip
        moments = {f"optimizers/{r}/{name}": v for r, o in self.optimizers.items() for name, v in o.state().items()}
        return weights | moments

    def numbers(self) -> dict[str, Any]:
        steps = {role: optimizer.steps for role, optimizer in self.optimizers.items()}
        return {"counters": asdict(self.counters), "versions": dict(self.roles.versions), "optimizer_steps": steps}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Puts back what ``tensors`` and ``numbers`` gave.

        Raises:
            ValueError: a tensor is missing, of another shape, or left over (B11).
        """
        names = {name for name in self.tensors() if name.startswith("roles/")}
        given = {name for name in tensors if name.startswith("roles/")}
        if names != given:
            raise ValueError(
                f"the checkpoint does not fit this run: {sorted(names ^ given)[:4]} are only in one of them"
            )
        for role, kind in self.roles.kinds.items():
            for name, value in self.roles.parameters(role).items() if kind != "frozen" else ():
                value.copy_(tensors[f"roles/{role}/{name}"])
        for role, optimizer in self.optimizers.items():
            prefix = f"optimizers/{role}/"
            state = {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
            optimizer.load(state, numbers["optimizer_steps"][role])
        self.roles.versions.update(numbers["versions"])
        self.counters = Counters(**numbers["counters"])
