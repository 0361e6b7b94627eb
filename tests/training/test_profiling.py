"""Where a cycle's time goes, in numbers and in traces."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from sigmazero.config import ProfileConfig
from sigmazero.launch import judge, local
from sigmazero.launch.local import build, train
from sigmazero.metrics import read_metrics
from sigmazero.training import profiling
from sigmazero.training.parallel import ALONE
from sigmazero.training.profiling import Stopwatch, check_ranks, trace_paths, tracing
from sigmazero.training.trainer import Trainer
from tests.conftest import MakeRun
from tests.launch.test_resume import interrupt
from tests.test_metrics import scalars

BATCH, PERIOD = 6, 2  # of the recipe in conftest.py
CPU = torch.device("cpu")


class Clock:
    """Stands still but for what is said to take time."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    """A network whose forward takes 2 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += 2
        return x


def test_seconds_are_those_of_the_parts_and_of_the_network_work_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollout: 1 s, two forwards. Phase: forward, 3 s of backward, 1 s of optimizer, 2 s of other work. 5 s besides."""
    clock = Clock()
    monkeypatch.setattr(profiling, "time", clock)
    network = Slow(clock)
    watch, x = Stopwatch(CPU, [network, network]), torch.zeros(1)
    for _ in range(2):  # nothing of the first cycle is in the second one's
        with watch.cycle(0):
            with watch.part("rollout") as part:
                part.samples = 10
                clock.now += 1
                network(network(x))
            network(x)  # in no part: it counts as time outside
            with watch.part("student") as part:
                part.samples, part.moved_bytes = 20, 64
                network(x)
                for name, seconds in (("backward", 3), ("optimizer", 1)):
                    with watch.work(name):
                        clock.now += seconds
                clock.now += 2
            clock.now += 3
        found = watch.metrics(ALONE)
    resident = found.pop("memory/resident_bytes_max")
    assert found == pytest.approx(
        {
            "time/rollout": 5, "time/rollout_samples_per_s": 10 / 5,
            "time/student": 8, "time/student_samples_per_s": 20 / 8, "memory/student_moved_bytes": 64,
            "time/cycle": 18, "time/cycle_latency": 18, "time/cycle_outside_share": 1 - (4 + 6) / 18,
        }
    )  # fmt: skip
    assert resident > 50 * 2**20  # torch alone is more


def test_on_cuda_events_time_the_networks_and_are_read_once_the_part_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library's calls by stand-ins: the device is 100 s behind the host until somebody waits for it."""
    host, device, waited = Clock(), Clock(), list[str]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = device.now

        def elapsed_time(self, end: Any) -> float:
            assert waited, "an event is read before the device has come to it"
            return 1000 * (end.at - self.at)

    def synchronize(_: torch.device) -> None:
        waited.append("synchronize")
        host.now += 100

    monkeypatch.setattr(profiling, "time", host)
    for name, stand_in in (
        ("Event", Event), ("synchronize", synchronize), ("max_memory_allocated", lambda _: 7),
        ("reset_peak_memory_stats", lambda _: waited.clear()),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    network = Slow(device)
    watch = Stopwatch("cuda", [network])
    with watch.cycle(0), watch.part("rollout") as part:
        part.samples = 50
        for _ in range(10):
            network(torch.zeros(1))
    found = watch.metrics(ALONE)
    assert waited == ["synchronize"]
    assert (found["time/rollout"], found["time/cycle_outside_share"]) == (100, 1 - 20 / 100)
    assert found["memory/rollout_bytes_max"] == 7


def test_a_cycle_of_dmd2_has_its_counts_and_each_fake_phase_of_its_own(dmd2: MakeRun) -> None:
    with build(dmd2()) as built:
        cycles = [built.trainer.run_cycle() for _ in range(3)]
    for index, metrics in enumerate(cycles):
        assert metrics["count/cycles"] == 1
        assert (metrics["count/samples"], metrics["count/samples_total"]) == (BATCH, BATCH * (index + 1))
        repeat, other = index % PERIOD, 1 - index % PERIOD
        for name in ("train/fake_score_loss", "train/fake_score_grad_norm", "time/fake_score"):
            assert metrics[f"{name}/repeat_{repeat}"] == metrics[name]
        repeated = [name for name in metrics if "/repeat_" in name]
        assert not [name for name in repeated if "fake_score" not in name or name.endswith(str(other))]
        parts = ["rollout", "fake_score"] + ["student"] * (repeat == 0)
        assert {n for n in metrics if n.startswith("time/") and f"{n}_samples_per_s" in metrics} == {
            f"time/{part}" for part in parts
        }
        assert sum(metrics[f"time/{part}"] for part in parts) <= metrics["time/cycle"]
        assert 0 < metrics["time/cycle_outside_share"] < 1
        for part in parts:
            assert metrics[f"time/{part}_samples_per_s"] * metrics[f"time/{part}"] == pytest.approx(BATCH)


def test_phases_that_are_due_alike_have_no_repeats(flow_grpo: MakeRun) -> None:
    """The KL's, which is due less often, trains nothing: it makes no period."""
    with build(flow_grpo()) as built:
        assert not [name for name in built.trainer.run_cycle() if "/repeat_" in name]


@pytest.fixture
def quick(no_page: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No report and no evaluation, which are tested elsewhere."""
    for name in ("score_fixed", "score_moving"):
        monkeypatch.setattr(judge.Judge, name, lambda self: None)


@pytest.mark.usefixtures("quick")
def test_b72_tensorboard_shows_the_rows_of_a_run_that_was_resumed_and_no_count_is_stale(
    dmd2: MakeRun, tmp_path: Path
) -> None:
    """Stopped in its fourth cycle, saved after the second: the counts go on, and the times are those of each row."""
    changes = {"num_cycles": 5, "training.tensorboard": True, "training.log_every": 3, "training.checkpoint_every": 2}
    config = dmd2({**changes, "output": str(tmp_path / "run")})
    interrupt(config, Trainer, "run_cycle", 4, True)
    rows = read_metrics(train(config) / "metrics.jsonl")
    assert [row["cycle"] for row in rows] == [2, 3, 4, 5]
    assert [row["count/cycles"] for row in rows] == [2, 1, 1, 1]
    assert [row["count/samples"] for row in rows] == [2 * BATCH, BATCH, BATCH, BATCH]
    assert [row["count/samples_total"] for row in rows] == [BATCH * row["cycle"] for row in rows]
    for row in rows:
        assert row["time/cycle_latency"] * row["count/cycles"] == pytest.approx(row["time/cycle"])
    shown = scalars(tmp_path / "run")
    assert set(shown) == {name for row in rows for name in row} - {"cycle"}
    for name, points in shown.items():
        wanted = [(row["cycle"], row[name]) for row in rows if name in row]
        assert [step for step, _ in points] == [step for step, _ in wanted]
        assert [value for _, value in points] == pytest.approx([value for _, value in wanted], rel=1e-6)


def ranges(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of each named range of a trace."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "user_annotation":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def inside(found: dict[str, list[tuple[float, float]]], outer: tuple[float, float]) -> dict[str, int]:
    """How many ranges of each name lie in another one."""
    counts = {name: sum(outer[0] <= a and b <= outer[1] for a, b in spans) for name, spans in found.items()}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.usefixtures("quick")
def test_a_trace_has_the_named_ranges_of_the_chosen_cycles_alone(
    dmd2: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dmd2(
        {"num_cycles": 5, "profile": {"start": 2, "cycles": 2, "memory": True}, "optimizers.student.micro_batch": 3}
    )
    folder = train(config)
    (path,) = (folder / "profile").iterdir()
    assert f"traces: {path}; open them in " in capsys.readouterr().out
    found = ranges(path)
    assert sorted(name for name in found if name.startswith("cycle ")) == ["cycle 2", "cycle 3"]
    wanted = {"cycle 2": ["rollout", "student", "fake_score"], "cycle 3": ["rollout", "fake_score"]}
    for cycle, parts in wanted.items():
        (whole,) = found[cycle]
        counts = inside(found, whole)
        assert [counts.get(name, 0) for name in ("rollout", "student", "fake_score")] == [
            int(name in parts) for name in ("rollout", "student", "fake_score")
        ]
    (student,) = found["student"]
    assert inside(found, student)["forward"] == 2 * 3  # two micro-batches; student, teacher and fake score
    assert inside(found, student)["backward"] == 2
    assert inside(found, student)["optimizer"] == 2  # its gradients' norm, and the step
    assert '"[memory]"' in path.read_text()
    assert not list(folder.glob("profile/*.writing"))


def test_the_wait_for_rewards_is_named_inside_the_rollout(flow_grpo: MakeRun, tmp_path: Path) -> None:
    with build(flow_grpo({"profile": {}})) as built:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
            built.trainer.run_cycle()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = ranges(tmp_path / "trace.json")
    (rollout,) = found["rollout"]
    assert inside(found, rollout)["reward"] == len(found["reward"]) == 1
    assert "policy" in found


def test_a_run_without_the_setting_traces_nothing_and_names_nothing(tmp_path: Path) -> None:
    with tracing(None, tmp_path, ALONE, 0, CPU) as after_cycle:
        assert after_cycle() is None
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler, Stopwatch().cycle(0):
            torch.zeros(1).add(1)
    names = {event.name for event in profiler.events() or ()}
    assert "aten::add" in names
    assert not [name for name in names if name.startswith("cycle")]
    assert list(tmp_path.iterdir()) == []


TRACE = ProfileConfig(start=2, cycles=2, warmup=1)


@pytest.mark.parametrize(
    ("first", "last", "traced", "warned"),
    [
        (0, 6, ["cycle 2", "cycle 3"], False),
        (2, 4, ["cycle 2", "cycle 3"], False),  # resumed there: no warm-up
        (0, 3, [], False),  # the run ends before the trace does
        (3, 6, [], True),  # resumed inside
    ],
)
def test_a_trace_is_whole_or_not_at_all(
    tmp_path: Path, first: int, last: int, traced: list[str], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Stopwatch(names=True)
    with tracing(TRACE, tmp_path, ALONE, first, CPU) as after_cycle:
        for index in range(first, last):
            with watch.cycle(index):
                torch.zeros(2).add(1)
            after_cycle()
    (path,) = trace_paths(TRACE, tmp_path)
    assert path.is_file() == bool(traced)
    if traced:
        assert sorted(name for name in ranges(path) if name.startswith("cycle")) == traced
    assert ("profile.start is 2, and the run goes on at cycle 3" in capsys.readouterr().err) == warned


def test_another_rank_than_the_chosen_traces_nothing(tmp_path: Path) -> None:
    second: Any = types.SimpleNamespace(index=1)
    with tracing(TRACE, tmp_path, second, 0, CPU) as after_cycle:
        for _ in range(5):
            after_cycle()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"start": 4}, r"profile\.start is 4 and profile\.cycles 1, but num_cycles is 4: .* lower profile\.start"),
        ({"start": 2, "cycles": 3}, r"profile\.start is 2 and profile\.cycles 3, but num_cycles is 4"),
        ({"start": 1, "warmup": 2}, r"profile: warmup is 2, but only 1 cycles come before start"),
        ({"ranks": [0, 0]}, r"profile: ranks is \[0, 0\], which names one twice"),
        ({"ranks": []}, r"profile\.ranks is \[\]"),
        ({"ranks": [-1]}, r"profile\.ranks\.0 is -1"),
        ({"cycles": 0}, r"profile\.cycles is 0"),
        ({"stack": True}, r"unknown key 'profile\.stack'"),
    ],
)
def test_a_profile_that_would_do_nothing_is_refused(dmd2: MakeRun, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dmd2({"profile": settings})


def test_a_rank_that_is_not_there_is_refused_before_anything_is_built(
    dmd2: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "build", lambda *_: pytest.fail("something was built"))
    with pytest.raises(ValueError, match=r"profile\.ranks names rank 1, but this run has 1 rank, .* up to 0"):
        train(dmd2({"profile": {"ranks": [0, 1]}}))
    check_ranks(ProfileConfig(ranks=(0, 1)), 2)
    check_ranks(None, 1)


def test_profiling_may_be_set_on_the_way(dmd2: MakeRun) -> None:
    """It watches the run and is no part of what makes it the same one."""
    assert dmd2({"profile": {}}).identity() == dmd2().identity()
