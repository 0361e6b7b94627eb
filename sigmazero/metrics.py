"""Metrics of a run: one JSON line a logged cycle always, TensorBoard beside it by default."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any


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


def combined(name: str, values: Sequence[float]) -> float:
    """Several values of a metric as one: their maximum where the name, without its sigma, says so, else their mean."""
    return max(values) if name.partition("/sigma_")[0].endswith("_max") else sum(values) / len(values)


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
        """Logs what was added since the last row, at the count of cycles done: the mean, or the maximum of maxima."""
        row = {name: combined(name, values) for name, values in self._pending.items()}
        self._pending = {}
        self._file.write(json.dumps({"cycle": cycle, **row}) + "\n")
        self._file.flush()
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
