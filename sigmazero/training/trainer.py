"""The only loop. It knows no algorithm, no model, no engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from sigmazero.training.checkpoint import StoredTensors
from sigmazero.training.parallel import ALONE, Ranks
from sigmazero.training.phase import PhaseResult, run_phase
from sigmazero.training.profiling import Stopwatch
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
        ranks: Ranks = ALONE,
    ) -> None:
        self.config, self.algorithm, self.roles, self.engine = config, algorithm, roles, engine
        self.collector, self.pictures, self.device, self.ranks = collector, pictures, device, ranks
        self.counters = Counters()
        self.watch = Stopwatch(device, map(roles.net, roles.kinds), names=config.profile is not None)
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
        cycle, phases = self.counters.cycle, self.algorithm.phases
        with self.watch.cycle(cycle):
            with self.watch.part("rollout") as part:
                rollout = self.collector.collect(self.counters.samples, cycle)
                feeds = self._prepare(rollout, cycle)
                part.samples = len(rollout.samples)
            metrics, updated = dict(rollout.metrics), set[str]()
            for phase in phases:
                if phase.is_due(cycle):
                    feeds = self._run(phase, feeds, metrics, updated)
            self._average("cycle", updated, metrics)
            self.engine.publish(self.algorithm.policy, self.roles.versions[self.algorithm.policy])
        self.counters.cycle += 1
        self.counters.samples = rollout.samples.stop
        counts = {"cycles": 1, "samples": len(rollout.samples), "samples_total": self.counters.samples}
        metrics |= {f"count/{name}": float(count) for name, count in counts.items()}
        metrics |= self.watch.metrics(self.ranks)
        return metrics | _by_repeat(phases, cycle, metrics)

    def _prepare(self, rollout: Rollout, cycle: int) -> dict[str, Batch]:
        pictures = self._draw_pictures(rollout, cycle) if self.algorithm.uses_pictures else None
        return self.algorithm.feeds(rollout.trajectories, rollout.scores, pictures, cycle)

    def _draw_pictures(self, rollout: Rollout, cycle: int) -> Batch:
        pictures, prompts = self.pictures.pictures(rollout.samples)
        x0 = self.roles.model.encode_pictures(pictures.to(self.device))
        return Batch(rows_of(rollout.samples, cycle) | {"x0": x0.cpu()}, tuple(prompts))

    def _run(
        self, phase: Phase, feeds: dict[str, Batch], metrics: dict[str, float], updated: set[str]
    ) -> dict[str, Batch]:
        """Runs a phase, ticks its averages, hands on what it wrote, counts what it skipped."""

        def after_step() -> None:
            updated.update(phase.updates)
            self._average("update", phase.updates, metrics)
            self.counters.skipped_in_a_row[phase.name] = 0

        size = self._micro_batch(phase)
        with self.watch.part(phase.name) as part:
            result = run_phase(
                phase, self.roles, self.optimizers, feeds, size, self.counters.cycle, after_step, self.ranks,
                self.device, self.config.training.staging, watch=self.watch,
            )  # fmt: skip
            part.samples, part.moved_bytes = max(len(feeds[feed]) for feed in phase.terms), result.moved_bytes
        metrics.update(result.metrics)
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
        moments = {role: optimizer.state() for role, optimizer in self.optimizers.items()}
        return self._weights() | _named("optimizers", moments)

    def numbers(self) -> dict[str, Any]:
        """Counters, and the settings that make the run what it is, for a checkpoint."""
        return {
            "config": self.config.identity(),
            "counters": asdict(self.counters),
            "versions": dict(self.roles.versions),
            "optimizer_steps": {role: optimizer.steps for role, optimizer in self.optimizers.items()},
        }

    def restore(self, tensors: StoredTensors, numbers: Mapping[str, Any]) -> None:
        """Puts back what ``tensors`` and ``numbers`` gave, on any number of ranks.

        Raises:
            ValueError: a tensor is missing, of another shape or dtype, or left over (B11).
        """
        moments: dict[str, dict[str, Tensor]] = {}
        for role, optimizer in self.optimizers.items():
            prefix = f"optimizers/{role}/"
            names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
            moments[role] = optimizer.room(names, numbers["optimizer_steps"][role])
        targets = self._weights() | _named("optimizers", moments)
        if targets.keys() != tensors.keys():
            raise ValueError(
                f"the checkpoint does not fit this run: {sorted(targets.keys() ^ tensors.keys())[:4]} are only in one "
                "of them"
            )
        tensors.fill(targets)
        for role, optimizer in self.optimizers.items():
            optimizer.load(moments[role], numbers["optimizer_steps"][role])
        self.roles.versions.update(numbers["versions"])
        self.counters = Counters(**numbers["counters"])

    def _weights(self) -> dict[str, Tensor]:
        moving = [role for role, kind in self.roles.kinds.items() if kind != "frozen"]
        return _named("roles", {role: self.roles.parameters(role) for role in moving})


def _by_repeat(phases: Sequence[Phase], cycle: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a phase that is due several times for one of the slowest that trains, by which of these times it is:
    those of its first time say how far it had fallen behind."""
    trains = [phase for phase in phases if phase.updates]
    period, found = max((phase.every for phase in trains), default=1), dict[str, float]()
    for phase in trains:
        if phase.every < period and phase.is_due(cycle):
            own = [n for n in metrics if n.startswith(f"train/{phase.name}_") or n == f"time/{phase.name}"]
            found |= {f"{name}/repeat_{cycle % period // phase.every}": metrics[name] for name in own}
    return found


def _named(group: str, by_role: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """``group/role/name`` -> tensor."""
    return {f"{group}/{role}/{name}": value for role, own in by_role.items() for name, value in own.items()}
