"""One line a logged cycle, whatever was killed before; TensorBoard shows the same numbers (B72)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sigmazero.metrics import MetricsLog, adds_up, read_metrics

Row = dict[str, float]


def log(folder: Path, rows: list[Row], cycle: int = 0, tensorboard: bool = False) -> list[Row]:
    with MetricsLog(folder, cycle, tensorboard) as metrics:
        for row in rows:
            metrics.add({name: value for name, value in row.items() if name != "cycle"})
            metrics.write(int(row["cycle"]))
    return read_metrics(folder / "metrics.jsonl")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_a_row_is_the_mean_of_what_was_added_since_the_last(tmp_path: Path) -> None:
    """Each metric over the cycles that have it: the student's loss is there in one of three."""
    with MetricsLog(tmp_path, 0, False) as metrics:
        metrics.add({"fake": 1.0, "student": 8.0})
        metrics.add({"fake": 2.0})
        metrics.add({"fake": 6.0})
        metrics.write(3)
        metrics.add({"fake": 5.0})
        metrics.write(4)
        metrics.write(5)
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"cycle": 3, "fake": 3.0, "student": 8.0},
        {"cycle": 4, "fake": 5.0},
        {"cycle": 5},
    ]


@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [
        ("time/student", [1.0, 2.0, 4.0], 7.0),
        ("time/fake_score/repeat_1", [1.0, 2.0], 3.0),
        ("time/cycle_latency", [1.0, 2.0, 6.0], 3.0),
        ("time/student_samples_per_s", [10.0, 20.0], 15.0),
        ("time/cycle_outside_share", [0.1, 0.3], 0.2),
        ("time/student_imbalance", [1.0, 1.5], 1.25),
        ("time/student_slowest_rank", [3.0, 0.0, 3.0], 3.0),
        ("count/cycles", [1.0, 1.0], 2.0),
        ("count/samples", [6.0, 8.0], 14.0),
        ("count/samples_total", [6.0, 14.0], 14.0),
        ("memory/student_moved_bytes", [6.0, 8.0], 14.0),
        ("memory/student_bytes_max", [9.0, 8.0], 9.0),
        ("train/policy_skipped", [1.0, 2.0], 3.0),
        ("train/policy_empty", [1.0, 1.0], 2.0),
        ("train/nonfinite_policy_loss", [4.0, 1.0], 5.0),
        ("reward/failed", [0.0, 2.0, 1.0], 3.0),
        ("reward_failed/ocr", [2.0, 1.0], 3.0),
        ("group/refilled", [1.0, 2.0], 3.0),
        ("train/policy_ratio_deviation_max/sigma_0.500", [0.1, 0.4, 0.1], 0.4),
        ("train/fake_score_loss/repeat_0", [1.0, 2.0], 1.5),
        ("train/policy_grad_norm", [1.0, 2.0], 1.5),
        ("reward/climax_max", [1.0, 3.0], 2.0),  # a reward's name says nothing
        ("evaluate/student@2/read_accuracy", [0.5], 0.5),
    ],
)
def test_durations_and_counts_add_up_and_losses_and_ratios_are_averaged(
    tmp_path: Path, name: str, values: list[float], wanted: float
) -> None:
    with MetricsLog(tmp_path, 0, False) as metrics:
        for value in values:
            metrics.add({name: value})
        metrics.write(len(values))
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row[name] == pytest.approx(wanted)
    assert adds_up(name) == (sum(values) == row[name] and len(values) > 1)


def test_b72_rows_are_on_disk_when_they_are_written(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, 0, False) as metrics:
        metrics.add({"a": 0.1})
        metrics.write(1)
        assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
            {"cycle": 1, "a": 0.1}
        ]


@pytest.mark.parametrize(("cycle", "kept"), [(0, []), (3, [2]), (4, [2, 4]), (9, [2, 4, 6])])
def test_b72_rows_after_the_resumed_cycle_are_dropped(tmp_path: Path, cycle: int, kept: list[int]) -> None:
    """Logged up to 6, resumed at 4: 5 and 6 stand there once, with the new values."""
    log(tmp_path, [{"cycle": c, "a": 1.0} for c in (2, 4, 6)])
    rows = log(tmp_path, [{"cycle": 10, "a": 2.0}], cycle)
    assert rows == [*({"cycle": c, "a": 1.0} for c in kept), {"cycle": 10, "a": 2.0}]


@pytest.mark.parametrize("length", [1, 8, 20, -1])
def test_b72_a_line_that_a_kill_cut_off_is_left_out_and_written_again(tmp_path: Path, length: int) -> None:
    log(tmp_path, [{"cycle": 1, "a": 0.25}])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + json.dumps({"cycle": 2, "some/metric": 0.125})[:length])
    assert read_metrics(path) == [{"cycle": 1, "a": 0.25}]
    assert log(tmp_path, [{"cycle": 2, "a": 0.5}], 5) == [{"cycle": 1, "a": 0.25}, {"cycle": 2, "a": 0.5}]


def test_values_come_back_exactly_and_no_file_is_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    value = 0.1 + 0.2
    assert log(tmp_path, [{"cycle": 1, "a": value, "b": 1e-300}])[0] == {"cycle": 1, "a": value, "b": 1e-300}


def test_b72_tensorboard_shows_the_numbers_of_the_rows_also_after_a_resume(tmp_path: Path) -> None:
    """fp32 there; the rows that were logged before the kill and again are there once."""
    log(tmp_path, [{"cycle": c, "train/loss": 1.1 * c, "other": -0.3} for c in (1, 2, 3, 4)], tensorboard=True)
    rows = log(tmp_path, [{"cycle": c, "train/loss": 7.7 * c} for c in (3, 4, 5)], 2, tensorboard=True)
    shown = scalars(tmp_path)
    for name in ("train/loss", "other"):
        wanted = [(row["cycle"], row[name]) for row in rows if name in row]
        assert [step for step, _ in shown[name]] == [step for step, _ in wanted]
        assert [value for _, value in shown[name]] == pytest.approx([value for _, value in wanted], rel=1e-6)
    assert set(shown) == {"train/loss", "other"}


def test_tensorboard_false_writes_none(tmp_path: Path) -> None:
    log(tmp_path, [{"cycle": 1, "a": 1.0}])
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_b72_a_failing_tracker_is_left_out_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.utils.tensorboard.writer import SummaryWriter

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    with MetricsLog(tmp_path, 0, tensorboard=True) as log:
        for cycle in (1, 2):
            log.add({"a": float(cycle)})
            log.write(cycle)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"cycle": 1, "a": 1.0}, {"cycle": 2, "a": 2.0}]
    assert capsys.readouterr().err.count("TensorBoard failed") == 1


def test_b72_lines_that_are_no_rows_are_left_out_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        b'{"cycle": 1, "a": 1}',
        b'{"a": 1}',
        b"3",
        b'{"cycle": null}',
        b"\xff\xfe",
        b'{"cyc',
        b'{"cycle": 2, "a": 2}',
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert read_metrics(path) == [{"cycle": 1, "a": 1}, {"cycle": 2, "a": 2}]


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    with MetricsLog(tmp_path, 0, tensorboard=False) as log:
        log._file.close()
        monkeypatch.setattr(log, "_file", Full())
        with pytest.raises(OSError, match=r"metrics\.jsonl cannot be written: .*No space left"):
            log.write(1)
