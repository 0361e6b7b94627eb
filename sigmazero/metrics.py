"""Metrics of a run: one JSON line a logged cycle always, TensorBoard beside it by default."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

Reduction = Callable[[Sequence[float]], float]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _latest(values: Sequence[float]) -> float:
    return values[-1]


def _most_frequent(values: Sequence[float]) -> float:
    return max(values, key=values.count)


# How the values of several cycles become one, by name: the first that matches, else their mean.
_REDUCTIONS: tuple[tuple[str, Reduction], ...] = (
    (r"(train|memory)/.*_max", max),
    (r"count/.*_total", _latest),
    (r"time/.*_slowest_rank", _most_frequent),
    (r"time/.*_(latency|samples_per_s|share|imbalance)", _mean),
    (r"(time|count)/.*|memory/.*_bytes", sum),
    (r"train/nonfinite_.*|train/.*_(skipped|empty)|reward/failed|reward_failed/.*|group/refilled", sum),
)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.jsonl``, oldest first. A line that is no row, as a kill may leave one, is left out."""
    if not path.is_file():
        return []
    rows = (_row(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [row for row in rows if row is not None]


def _row(line: str) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("cycle"), int) else None


@functools.cache
def _reduction(name: str) -> Reduction:
    whole = re.split("/(?:sigma|repeat)_", name)[0]
    return next((reduce for pattern, reduce in _REDUCTIONS if re.fullmatch(pattern, whole, re.DOTALL)), _mean)


def combined(name: str, values: Sequence[float]) -> float:
    """Several values of a metric as one, as its name says: durations and counts add up, what ends in ``_max`` gives its
    maximum, everything else its mean."""
    return _reduction(name)(values)


def adds_up(name: str) -> bool:
    """Whether a row has the sum of a metric over its cycles, ``count/cycles`` many."""
    return _reduction(name) is sum


class MetricsLog:
    """Appends rows whose ``cycle`` only grows.

    Args:
        folder: of the run; ``metrics.jsonl`` and ``tensorboard/`` lie in it.
        cycle: where the run goes on. Rows of later cycles, logged before a kill and about to be logged again, are
            dropped first (B72).
    """

    def __init__(self, folder: Path, cycle: int, tensorboard: bool) -> None:
        self._path = folder / "metrics.jsonl"
        rows = [row for row in read_metrics(self._path) if row["cycle"] <= cycle]
        aside = self._path.with_suffix(".writing")
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(aside, self._path)
        self._file = self._path.open("a")
        self._pending: dict[str, list[float]] = {}
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=cycle + 1)

    def add(self, values: Mapping[str, float]) -> None:
        """Takes the metrics of one cycle. A cycle need not have all of them: the student updates only in some."""
        for name, value in values.items():
            self._pending.setdefault(name, []).append(value)

    def write(self, cycle: int) -> None:
        """Logs what was added since the last row, at the count of cycles done, combined by ``combined``.

        Raises:
            OSError: names the file, for example on a full disk.
        """
        row = {name: combined(name, values) for name, values in self._pending.items()}
        self._pending = {}
        try:
            self._file.write(json.dumps({"cycle": cycle, **row}) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"{self._path} cannot be written: {error}") from None
        self._track(cycle, row)

    def _track(self, cycle: int, row: Mapping[str, float]) -> None:
        """Passes a row to TensorBoard. A tracker that fails is left out from then on and never stops a run (B72)."""
        if self._board is None:
            return
        try:
            for name, value in row.items():
                self._board.add_scalar(name, value, cycle)
        except Exception as error:
            print(f"warning: TensorBoard failed ({error}) and is left out; metrics.jsonl goes on", file=sys.stderr)
            self._board = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
