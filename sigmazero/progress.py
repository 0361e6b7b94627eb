"""What a person sees of a run: a bar on a terminal, a line every ten seconds elsewhere, one line of what ended it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 10.0  # seconds


class CycleProgress:
    """Counts cycles: rate, remaining time, the losses of all roles, or the rewards where there are any.

    Args:
        what: the word in front. start, total: cycles done and to do.
    """

    def __init__(self, what: str, start: int, total: int, stream: TextIO | None = None) -> None:
        self._what, self._start, self._total = what, start, total
        self._began = self._printed = time.perf_counter()
        self._shown: dict[str, float] = {}
        console = Console(file=stream or sys.stderr)
        self._stream = console.file
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(), TextColumn("{task.fields[values]}"), console=console,
            )  # fmt: skip
            self._task = self._bar.add_task(what, total=total, completed=start, rate="", values="")

    def update(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        self._shown |= _worth_watching(metrics or {})
        now = time.perf_counter()
        rate = (done - self._start) / max(now - self._began, 1e-9)
        values = " ".join(f"{name} {value:.4f}" for name, value in self._shown.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rate=f"{rate:.1f}/s", values=values)
        elif now - self._printed >= LINE_EVERY or done == self._total:
            self._printed = now
            left = (self._total - done) / max(rate, 1e-9)
            text = f"{self._what} {done}/{self._total}  {rate:.1f}/s  {left:.0f} s left  {values}"
            print(text.rstrip(), file=self._stream, flush=True)

    def __enter__(self) -> CycleProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _worth_watching(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rewards by name, or else the losses: those of online RL say nothing."""
    rewards = {
        n.removeprefix("reward/"): v for n, v in metrics.items() if n.startswith("reward/") and n != "reward/failed"
    }
    losses = {
        n[len("train/") : -len("_loss")]: v
        for n, v in metrics.items()
        if n.startswith("train/") and n.endswith("_loss")
    }
    return rewards or losses


def in_a_line(error: BaseException) -> str | None:
    """What a user is told of a mistake, or of a machine that is too small; None of anything else."""
    if isinstance(error, (ValueError, OSError)):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        return f"out of memory; lower optimizers.ROLE.micro_batch or data.batch_size ({error})"
    return None
