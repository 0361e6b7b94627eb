"""What a log file shows of a run."""

from __future__ import annotations

import io

import pytest

from sigmazero import progress
from sigmazero.progress import CycleProgress


class Clock:
    """A second passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def run(clock: Clock, start: int, total: int, seconds: float) -> list[str]:
    """The lines of a run whose cycles take ``seconds`` each and whose student is updated in even ones."""
    stream = io.StringIO()
    with CycleProgress("training", start, total, stream) as shown:
        for done in range(start + 1, total + 1):
            clock.now += seconds
            losses = {"train/fake_score_loss": done / 8} | ({"train/student_loss": -done / 8} if done % 2 == 0 else {})
            shown.update(done, {**losses, "train/fake_score_lr": 9.0, "time/cycle": seconds})
    return stream.getvalue().splitlines()


def test_a_line_every_ten_seconds_with_rate_remaining_time_and_losses(clock: Clock) -> None:
    """Two a second, 50 cycles: lines at 10, 20 and 25 s; the student's loss is that of its last update."""
    assert run(clock, 0, 50, 0.5) == [
        "training 20/50  2.0/s  15 s left  fake_score 2.5000 student -2.5000",
        "training 40/50  2.0/s  5 s left  fake_score 5.0000 student -5.0000",
        "training 50/50  2.0/s  0 s left  fake_score 6.2500 student -6.2500",
    ]


def test_the_rate_of_a_resumed_run_counts_its_own_cycles_only(clock: Clock) -> None:
    lines = run(clock, 90, 120, 1.0)
    assert [line.split("  ")[:3] for line in lines] == [
        ["training 100/120", "1.0/s", "20 s left"],
        ["training 110/120", "1.0/s", "10 s left"],
        ["training 120/120", "1.0/s", "0 s left"],
    ]
    assert "student -13.7500" not in lines[0]
    assert lines[0].endswith("fake_score 12.5000 student -12.5000")


def test_a_fast_run_prints_its_last_cycle_only(clock: Clock) -> None:
    lines = run(clock, 0, 4, 0.0)
    assert len(lines) == 1
    assert lines[0].startswith("training 4/4  ")
    assert lines[0].endswith("fake_score 0.5000 student -0.5000")


def test_no_metrics_no_losses_and_no_escape_codes(clock: Clock) -> None:
    stream = io.StringIO()
    with CycleProgress("evaluating", 0, 2, stream) as shown:
        clock.now += 11
        shown.update(1)
        clock.now += 1
        shown.update(2)
    assert stream.getvalue() == "evaluating 1/2  0.1/s  11 s left\nevaluating 2/2  0.2/s  0 s left\n"
