"""One cycle's rollout: sampled in parts that are scored beside the sampling, dead groups replaced, kept or replayed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import record_function

from sigmazero.algorithms.advantages import dead_groups
from sigmazero.algorithms.base import Algorithm
from sigmazero.config import RolloutConfig, RunConfig
from sigmazero.data import PromptStream
from sigmazero.engines.base import Engine
from sigmazero.models.base import FlowModel
from sigmazero.pictures import quantized
from sigmazero.records import Scores, Trajectory
from sigmazero.rewards.scorer import Scorer
from sigmazero.training import dump
from sigmazero.training.parallel import ALONE, Ranks

PART = 64  # samples that are made, decoded and handed to the rewards at a time


@dataclass
class Rollout:
    """What a cycle trains on."""

    trajectories: list[Trajectory]
    scores: Scores | None
    samples: range  # that were drawn, those of replaced groups included
    metrics: dict[str, float] = field(default_factory=dict)


class Collector:
    """Makes rollouts. It holds nothing that evolves: a rollout is a function of weights, sample index and cycle.

    Args:
        scorer: None for algorithms without rewards.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        model: FlowModel,
        engine: Engine,
        prompts: PromptStream,
        scorer: Scorer | None,
        ranks: Ranks = ALONE,
        device: torch.device | str = "cpu",
    ) -> None:
        self._config, self._algorithm, self._model, self._engine = config, algorithm, model, engine
        self._prompts, self._scorer, self._ranks, self._device = prompts, scorer, ranks, device
        self._settings = config.rollout or RolloutConfig()
        self._replayed = dump.find(self._settings.replay) if self._settings.replay else []

    def collect(self, first: int, cycle: int) -> Rollout:
        """The rollout of a cycle, samples ``first`` on.

        Raises:
            ValueError: more samples than ``rollout.max_failed`` allows have no score.
        """
        size = self._config.data.batch_size
        if self._replayed:
            return self._replay(self._replayed[cycle % len(self._replayed)], first)
        trajectories, values, failures = self._sample(range(first, first + size), cycle)
        if self._scorer is None or not trajectories:
            return Rollout(trajectories, None, range(first, first + size))
        rollout = self._filtered(trajectories, values, failures, first, cycle)
        if self._ranks.is_first and self._settings.dump_every and cycle % self._settings.dump_every == 0:
            assert rollout.scores is not None
            dump.save(Path(self._config.output) / dump.FOLDER, cycle, rollout.trajectories, rollout.scores.values)
        return rollout

    def check_replay(self) -> None:
        """Whether the rollouts to be replayed fit the recipe, by the first of them; tells what they are.

        Raises:
            ValueError: it cannot be read, or was made with other settings than training would assume.
        """
        if not self._replayed:
            return
        path, many = self._replayed[0], len(self._replayed)
        rollout = self._replay(path, 0)
        try:
            self._algorithm.feeds(rollout.trajectories, rollout.scores, None, 0)
        except ValueError as error:
            raise ValueError(f"rollout.replay: {path}: {error}") from None
        print(f"replaying {many} rollouts, the first of {len(rollout.trajectories)} samples", file=sys.stderr)

    def _replay(self, path: Path, first: int) -> Rollout:
        """A dumped rollout, with the total that this recipe makes of its rewards."""
        assert self._scorer is not None
        trajectories, values = dump.load(path)
        try:
            total = self._scorer.total(values)
        except KeyError as error:
            raise ValueError(f"rollout.replay: {path} has no reward {error}; it has {', '.join(values)}") from None
        samples = range(first, first + len(trajectories))
        return Rollout(trajectories, Scores(values, total), samples, _reward_metrics(values))

    def _sample(self, samples: range, cycle: int) -> tuple[list[Trajectory], dict[str, Tensor], list[str]]:
        """Trajectories, their values by reward, and what failed. The rewards work on one part while the next is
        sampled; each rank scores its share of a part."""
        group = self._algorithm.group_size or 1
        prompts = self._prompts.prompts([sample // group for sample in samples])
        requests = self._algorithm.requests(prompts, samples, cycle)
        if self._scorer is None or not requests:
            return [t.on_host() for t in self._engine.generate(requests)] if requests else [], {}, []
        done: list[Trajectory] = []
        scored: list[int] = []
        for start in range(0, len(requests), PART):
            part = self._engine.generate(requests[start : start + PART])
            own = self._ranks.share(len(part))
            if own:
                latents = torch.stack([part[i].latents[-1] for i in own]).to(self._device)
                pictures = quantized(self._model.decode(latents)).cpu()
                self._scorer.submit(pictures, [part[i].request.prompt for i in own])
            scored += [start + i for i in own]
            done += [trajectory.on_host() for trajectory in part]
        with record_function("reward"):  # what is left of it once all is sampled
            values, failures = self._scorer.gather()
        return done, *_of_all_ranks(values, failures, scored, len(requests), self._ranks)

    def _filtered(
        self, drawn: list[Trajectory], values: dict[str, Tensor], failures: list[str], first: int, cycle: int
    ) -> Rollout:
        """Replaces groups that teach nothing, by as many new ones as are missing, up to ``max_refills`` times."""
        assert self._scorer is not None
        size, wanted, end, seen = self._algorithm.group_size, len(drawn), first + len(drawn), values
        metrics = _group_metrics(self._checked_total(seen, failures), _groups(drawn), size)
        for _ in range(self._settings.max_refills):
            missing = wanted - len(_live(drawn, self._scorer.total(values)))
            if not missing:
                break
            more, new, failed = self._sample(range(end, end + missing), cycle)
            end, seen, failures = end + missing, _joined(seen, new), failures + failed
            self._checked_total(seen, failures)
            drawn, values = drawn + more, _joined(values, new)
            rows = _live(drawn, self._scorer.total(values)) or list(range(wanted))
            drawn, values = [drawn[i] for i in rows], {name: value[rows] for name, value in values.items()}
        metrics |= _reward_metrics(seen) | {"reward/failed": _num_failed(self._scorer.total(seen))}
        if self._settings.max_refills:
            metrics["group/refilled"] = (end - first - wanted) / size
        return Rollout(drawn, Scores(values, self._scorer.total(values)), range(first, end), metrics)

    def _checked_total(self, values: Mapping[str, Tensor], failures: Sequence[str]) -> Tensor:
        """The rewards' total of all that a cycle has drawn so far.

        Raises:
            ValueError: too much of it has none.
        """
        assert self._scorer is not None
        total = self._scorer.total(values)
        failed = _num_failed(total)
        if failed > self._settings.max_failed * len(total):
            raise ValueError(
                f"{failed:.0f} of {len(total)} samples have no reward, more than rollout.max_failed allows "
                f"({self._settings.max_failed:g} of them): {'; '.join(list(dict.fromkeys(failures))[:3])}"
            )
        return total


def _of_all_ranks(
    values: dict[str, Tensor], failures: list[str], scored: Sequence[int], num_rows: int, ranks: Ranks
) -> tuple[dict[str, Tensor], list[str]]:
    """Values of the rows that each rank scored as values of all rows; nan where a reward failed throughout a rank."""
    if ranks.count == 1:
        return values, failures
    joined: dict[str, Tensor] = {}
    parts = ranks.gather_json([{name: value.tolist() for name, value in values.items()}, failures, list(scored)])
    for own, _, rows in parts:
        for name, value in own.items():
            joined.setdefault(name, torch.full((num_rows,), torch.nan, dtype=torch.float64))[rows] = torch.tensor(
                value, dtype=torch.float64
            )
    return joined, [line for _, lines, _ in parts for line in lines]


def _num_failed(total: Tensor) -> float:
    return float((~torch.isfinite(total)).sum())


def _groups(trajectories: Sequence[Trajectory]) -> Tensor:
    return torch.tensor([t.request.group for t in trajectories])


def _joined(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of two sets of samples; nan where a set lacks a reward, as one that failed throughout does."""
    counts = [len(next(iter(values.values()))) for values in (a, b)]
    nothing = [torch.full((n,), torch.nan, dtype=torch.float64) for n in counts]
    return {name: torch.cat([a.get(name, nothing[0]), b.get(name, nothing[1])]) for name in {**a, **b}}


def _live(trajectories: Sequence[Trajectory], total: Tensor) -> list[int]:
    """Rows of the groups that teach something."""
    groups = _groups(trajectories)
    dead = dead_groups(total, groups)
    return [i for i, group in enumerate(groups.tolist()) if group not in dead]


def _reward_metrics(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Mean and deviation of each reward over the samples that have one, and how many have none, where any has not."""
    metrics: dict[str, float] = {}
    for name, value in values.items():
        own = value[torch.isfinite(value)]
        if len(own) < len(value):
            metrics[f"reward_failed/{name}"] = float(len(value) - len(own))
        if len(own):
            metrics |= {f"reward/{name}": float(own.mean()), f"reward_std/{name}": float(own.std(correction=0))}
    return metrics


def _group_metrics(total: Tensor, groups: Tensor, size: int) -> dict[str, float]:
    """Share of groups that teach nothing, and the mean deviation inside a group, as sampled."""
    dead = len(dead_groups(total, groups)) / max(1, len(groups) // size)
    inside = [total[groups == g] for g in groups.unique()]
    stds = [float(own[torch.isfinite(own)].std(correction=0)) for own in inside if bool(torch.isfinite(own).any())]
    return {"group/dead": dead, "group/std": sum(stds) / len(stds) if stds else 0.0}
