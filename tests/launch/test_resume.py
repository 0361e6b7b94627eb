"""A run that is stopped anywhere and goes on ends as one that never stopped: weights, metrics and scores."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sigmazero.config import RunConfig
from sigmazero.launch import judge, local
from sigmazero.launch.local import build, restore_newest, train
from sigmazero.metrics import MetricsLog, read_metrics
from sigmazero.training import checkpoint
from sigmazero.training.folder import RunFolder, read_config, read_description
from sigmazero.training.rollout import Collector
from sigmazero.training.trainer import Trainer
from tests.conftest import MakeRun

pytestmark = pytest.mark.usefixtures("no_page")

CYCLES = 7
SETTINGS = {
    "num_cycles": CYCLES,
    "training.checkpoint_every": 2,
    "training.log_every": 3,
    "evaluate.every": 2,
    "optimizers.student.decay": "linear",
}
LORA = {"roles.storage": "lora", "roles.lora": {"rank": 4, "alpha": 8.0}}


class Stop(Exception):
    """What stands for a kill."""


@dataclass
class Outcome:
    """What is left of a finished run."""

    tensors: Mapping[str, torch.Tensor]
    numbers: Mapping[str, Any]
    rows: list[dict[str, float]]
    scores: str


def outcome(folder: Path) -> Outcome:
    found, refused = checkpoint.load_newest(folder / "checkpoints")
    assert found is not None
    assert refused == []
    rows = read_metrics(folder / "metrics.jsonl")
    timeless = [{n: value for n, value in row.items() if not n.startswith(("time/", "memory/"))} for row in rows]
    return Outcome(found.tensors.whole(found.tensors), found.numbers, timeless, (folder / "scores.json").read_text())


def assert_same(found: Outcome, wanted: Outcome) -> None:
    assert found.tensors.keys() == wanted.tensors.keys()
    assert [n for n, value in wanted.tensors.items() if not torch.equal(value, found.tensors[n])] == []
    assert found.numbers == wanted.numbers
    assert found.rows == wanted.rows
    assert found.scores == wanted.scores


@pytest.fixture(scope="module")
def straight() -> dict[str, Outcome]:
    """Uninterrupted runs, by kind, each made once."""
    return {}


@pytest.fixture
def make(dmd2: MakeRun, flow_matching: MakeRun) -> Callable[[str, Path], RunConfig]:
    """``make("lora", folder)``: the settings of a kind of run."""

    def config(kind: str, folder: Path) -> RunConfig:
        changes = {**SETTINGS, "output": str(folder), **(LORA if kind.endswith("lora") else {})}
        return (flow_matching if kind.startswith("flow") else dmd2)(changes)

    return config


def reference(kind: str, make: Callable[[str, Path], RunConfig], made: dict[str, Outcome], tmp_path: Path) -> Outcome:
    if kind not in made:
        folder = train(make(kind, tmp_path / "straight"))
        made[kind] = outcome(folder)
        assert [row["cycle"] for row in made[kind].rows] == [2, 3, 4, 6, 7]
        assert [row["cycle"] for row in made[kind].rows if any(n.startswith("evaluate/") for n in row)] == [2, 4, 6, 7]
    return made[kind]


def stop_at(patch: pytest.MonkeyPatch, owner: object, name: str, call: int, *, after: bool) -> None:
    """The ``call``-th call of a function raises, before it does anything or when it has done it."""
    inner, calls = getattr(owner, name), iter(range(1, 10_000))

    def stopped(*args: Any, **keywords: Any) -> Any:
        last = next(calls) == call
        if last and not after:
            raise Stop
        result = inner(*args, **keywords)
        if last:
            raise Stop
        return result

    patch.setattr(owner, name, stopped)


def interrupt(config: RunConfig, owner: object, name: str, call: int, after: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, owner, name, call, after=after)
        with pytest.raises(Stop):
            train(config)


KINDS = pytest.mark.parametrize("kind", ["copy", "lora", "flow"])
STOPS = [
    pytest.param(MetricsLog, "write", 3, False, id="before a row"),
    pytest.param(MetricsLog, "write", 3, True, id="between a row and its checkpoint"),
    pytest.param(checkpoint.Saver, "save", 2, True, id="after a checkpoint"),
    pytest.param(checkpoint, "sync", 3, False, id="half way through a checkpoint"),
    pytest.param(judge.Judge, "refresh", 2, False, id="before pictures"),
    pytest.param(judge.Judge, "refresh", 3, True, id="after pictures"),
    pytest.param(Collector, "collect", 6, True, id="after a rollout"),
    pytest.param(judge.Judge, "score_moving", 1, False, id="before the last scores"),
    pytest.param(judge.Judge, "score_moving", 1, True, id="after the last scores"),
    pytest.param(Trainer, "run_cycle", 1, False, id="before the first cycle"),
]


@KINDS
@pytest.mark.parametrize(("owner", "name", "call", "after"), STOPS[1:3])
def test_b11_b12_a_stopped_run_ends_like_one_that_never_stopped(
    kind: str, owner: object, name: str, call: int, after: bool, make: Any, straight: Any, tmp_path: Path
) -> None:
    wanted = reference(kind, make, straight, tmp_path)
    config = make(kind, tmp_path / "stopped")
    interrupt(config, owner, name, call, after)
    assert_same(outcome(train(config)), wanted)


@pytest.mark.parametrize(("owner", "name", "call", "after"), [STOPS[0], *STOPS[3:]])
def test_b11_b12_wherever_it_was_stopped(
    owner: object, name: str, call: int, after: bool, make: Any, straight: Any, tmp_path: Path
) -> None:
    wanted = reference("copy", make, straight, tmp_path)
    config = make("copy", tmp_path / "stopped")
    interrupt(config, owner, name, call, after)
    assert_same(outcome(train(config)), wanted)


@pytest.mark.parametrize("call", [1, 2, 3, 5, 7])
def test_b11_inside_a_cycle_between_its_phases(call: int, make: Any, straight: Any, tmp_path: Path) -> None:
    """Phases of cycles 1, 2, 3: score, student, fake; fake; score, student, fake. Stopped after each kind."""
    wanted = reference("copy", make, straight, tmp_path)
    config = make("copy", tmp_path / "stopped")
    interrupt(config, Trainer, "_run", call, True)
    assert_same(outcome(train(config)), wanted)


@pytest.mark.parametrize("kind", ["lora", "flow lora"])
def test_b12_two_stops_and_one_during_the_way_back(kind: str, make: Any, straight: Any, tmp_path: Path) -> None:
    wanted = reference(kind, make, straight, tmp_path)
    config = make(kind, tmp_path / "stopped")
    interrupt(config, Trainer, "run_cycle", 4, True)
    interrupt(config, Trainer, "restore", 1, True)
    interrupt(config, MetricsLog, "write", 2, True)
    assert_same(outcome(train(config)), wanted)


def test_b12_a_resumed_run_repeats_no_sample(make: Any, tmp_path: Path) -> None:
    """Stopped in cycle 4 with a checkpoint at 2: cycles 0..3, then 2..6."""
    config, size, seen = make("copy", tmp_path / "stopped"), 6, list[list[int]]()
    inner = Collector.collect

    def spy(self: Collector, first: int, cycle: int) -> Any:
        rollout = inner(self, first, cycle)
        seen.append(list(rollout.samples))
        return rollout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "collect", spy)
        interrupt(config, Collector, "collect", 4, True)
        train(config)
    assert seen == [list(range(c * size, (c + 1) * size)) for c in (0, 1, 2, 3, 2, 3, 4, 5, 6)]


def test_b24_a_damaged_newest_checkpoint_costs_cycles_and_nothing_else(
    make: Any, straight: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = reference("copy", make, straight, tmp_path)
    config = make("copy", tmp_path / "stopped")
    interrupt(config, checkpoint.Saver, "save", 2, True)
    tensors = next((tmp_path / "stopped" / "checkpoints" / "cycle-00000004").glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-9])
    assert_same(outcome(train(config)), wanted)
    assert "warning: checkpoint" in (err := capsys.readouterr().err)
    assert "cycle-00000004" in err


def test_b24_where_no_checkpoint_can_be_read_nothing_starts_over_and_none_is_lost(make: Any, tmp_path: Path) -> None:
    """For example those of another version."""
    config = make("flow", tmp_path / "stopped")
    interrupt(config, checkpoint.Saver, "save", 1, True)
    state = tmp_path / "stopped" / "checkpoints" / "cycle-00000002" / "state.json"
    state.write_text(state.read_text().replace('"schema": 2', '"schema": 1'))
    with pytest.raises(ValueError, match=r"cycle-00000002 has schema 1, this version reads 2; .*set overwrite=true"):
        train(config)
    assert state.is_file()


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Changes the tensors of the newest checkpoint and hashes them again."""
    found, _ = checkpoint.load_newest(folder / "checkpoints")
    assert found is not None
    cycle = int(found.path.name.removeprefix("cycle-"))
    checkpoint.save(folder / "checkpoints", cycle, change(found.tensors.whole(found.tensors)), found.numbers, 2)


@pytest.mark.parametrize("lost", ["roles/student_ema/", "roles/fake_score/", "optimizers/fake_score/"])
@pytest.mark.parametrize("kind", ["copy", "lora"])
def test_b11_a_checkpoint_without_what_evolves_is_refused_by_name(
    kind: str, lost: str, make: Any, tmp_path: Path
) -> None:
    config = make(kind, tmp_path / "stopped")
    interrupt(config, checkpoint.Saver, "save", 1, True)
    rewrite(tmp_path / "stopped", lambda tensors: {n: v for n, v in tensors.items() if not n.startswith(lost)})
    with pytest.raises(ValueError, match=lost.split("/")[1]):
        train(config)


def test_b52_a_resumed_lora_run_has_the_saved_adapters(make: Any, tmp_path: Path) -> None:
    """Every B of student, fake score and average constant: so they are before the next step, and they count."""
    config, folder = make("lora", tmp_path / "stopped"), tmp_path / "stopped"
    interrupt(config, checkpoint.Saver, "save", 1, True)
    constants = {"student": 0.3, "fake_score": 0.2, "student_ema": 0.1}

    def constant(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            n: torch.full_like(v, constants[n.split("/")[1]]) if n.startswith("roles/") and ".lora_B." in n else v
            for n, v in tensors.items()
        }

    rewrite(folder, constant)
    saved = checkpoint.load_newest(folder / "checkpoints")[0]
    assert saved is not None
    built = build(config)
    fresh = {role: built.roles.fingerprint(role) for role in built.roles.kinds}
    restore_newest(built, RunFolder(folder))
    for role, value in constants.items():
        own = built.roles.parameters(role)
        b = {name: p for name, p in own.items() if ".lora_B." in name}
        assert len(b) == len(own) / 2 > 10  # an A and a B a layer: one adapter
        assert all(bool((p == value).all()) for p in b.values())
        assert all(torch.equal(own[name], saved.tensors[f"roles/{role}/{name}"]) for name in own)
    changed = {role for role in fresh if built.roles.fingerprint(role) != fresh[role]}
    assert changed == set(constants)  # not the teacher
    x, sigma = torch.zeros(1, 3, 16, 16), torch.full((1,), 0.5)
    condition = built.roles.model.encode(["the number 42"])
    with torch.no_grad():
        answers = {role: built.roles.velocity(role)(x, sigma, condition) for role in built.roles.kinds}
    values = list(answers.values())
    assert all(not torch.equal(values[i], values[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize("kinds", [("lora", "copy"), ("copy", "lora")])
def test_b52_adapters_do_not_become_copies_nor_the_reverse(kinds: tuple[str, str], make: Any, tmp_path: Path) -> None:
    interrupt(make(kinds[0], tmp_path / "run"), checkpoint.Saver, "save", 1, True)
    with pytest.raises(ValueError, match=f"roles.storage was '{kinds[0]}', is '{kinds[1]}'"):
        train(make(kinds[1], tmp_path / "run"))


def test_a_second_process_is_kept_out_and_touches_nothing(make: Any, tmp_path: Path) -> None:
    config, folder = make("copy", tmp_path / "run"), tmp_path / "run"
    interrupt(config, checkpoint.Saver, "save", 1, True)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    with RunFolder(folder):
        with pytest.raises(ValueError, match="in use by another process"), RunFolder(folder):
            pass
        for changes in ({}, {"overwrite": True}):
            with pytest.raises(ValueError, match="in use by another process"):
                train(config.model_copy(update=changes))
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    with pytest.raises(Stop), RunFolder(folder):
        raise Stop
    with RunFolder(folder):  # left by an error, free again
        pass


def test_what_is_only_watched_may_change_on_the_way(make: Any, straight: Any, tmp_path: Path) -> None:
    """Another logging interval and another number of kept checkpoints: the same weights and scores."""
    wanted = reference("copy", make, straight, tmp_path)
    config = make("copy", tmp_path / "stopped")
    interrupt(config, Trainer, "run_cycle", 4, True)
    training = config.training.model_copy(update={"log_every": 1, "keep_checkpoints": 1})
    found = outcome(train(config.model_copy(update={"training": training})))
    assert found.rows != wanted.rows
    found.rows = wanted.rows
    assert_same(found, wanted)
    assert len(list((tmp_path / "stopped" / "checkpoints").iterdir())) == 1


def test_a_learning_rate_may_change_on_the_way(make: Any, tmp_path: Path) -> None:
    """Rates of the rows before and after, decayed linearly to 0; and the run says what it went on with."""
    config = make("flow", tmp_path / "stopped")
    interrupt(config, Trainer, "run_cycle", 4, True)  # saved after cycle 2
    rate = config.optimizers["student"].lr
    faster = config.optimizers["student"].model_copy(update={"lr": 3 * rate})
    changed = config.model_copy(update={"optimizers": {"student": faster}})
    interrupt(changed, judge.Judge, "score_moving", 1, False)
    rates = {row["cycle"]: row["train/student_lr"] for row in read_metrics(tmp_path / "stopped" / "metrics.jsonl")}
    steps = [rate * (1 - step / CYCLES) for step in range(CYCLES)]
    assert rates[2] == pytest.approx((steps[0] + steps[1]) / 2)
    assert [rates[3], rates[4], rates[7]] == pytest.approx([3 * steps[2], 3 * steps[3], 3 * steps[6]])
    assert read_config(tmp_path / "stopped").optimizers["student"].lr == 3 * rate


def test_b11_a_checkpoint_of_another_run_is_refused_with_the_difference(make: Any, tmp_path: Path) -> None:
    """It was put into the folder of a run that has not saved yet."""
    for name, clip in (("one", 1.0), ("two", 0.5)):
        config = make("flow", tmp_path / name)
        settings = config.optimizers["student"].model_copy(update={"clip": clip})
        config = config.model_copy(update={"optimizers": {"student": settings}})
        interrupt(config, checkpoint.Saver, "save", 1, True)
    shutil.rmtree(tmp_path / "two" / "checkpoints")
    shutil.copytree(tmp_path / "one" / "checkpoints", tmp_path / "two" / "checkpoints")
    with pytest.raises(ValueError, match=r"cycle-00000002 holds another run \(optimizers\.student\.clip was 1\.0, is"):
        train(config)


def test_pages_are_written_from_the_start_on_and_a_run_goes_on_until_its_last_one_is(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, pages, full = make("flow", tmp_path / "run"), list[tuple[bool, int, bool]](), True

    def page(folder: Path, *, finished: bool = False) -> None:
        arms = json.loads((folder / "scores.json").read_text())["arms"]
        history = len(list((folder / "evaluation" / "history").glob("*.png")))
        pages.append((any(arm.startswith("student@") for arm in arms), history, finished))
        assert not (read_description(folder) or {})["finished"]
        if finished and full:
            raise OSError("the disk is full")

    monkeypatch.setattr(local, "write_report", page)
    with pytest.raises(OSError, match="the disk is full"):
        train(config)
    refreshed = [(False, 2, False), (False, 3, False), (False, 4, False), (False, 5, False)]
    assert pages == [(False, 0, False), *refreshed, (True, 5, True)]
    full = False
    train(config)
    assert pages[6:] == [(False, 5, False), (True, 5, True)]
    assert (read_description(Path(config.output)) or {})["finished"]


def cycles_logged(folder: Path) -> int:
    rows = read_metrics(folder / "metrics.jsonl")
    return int(rows[-1]["cycle"]) if rows else 0


def test_b11_b12_b24_killed_for_real(dmd2: MakeRun, tmp_path: Path) -> None:
    """``kill -9`` after some cycles, the same command again, against an uninterrupted run of this process."""
    changes = {
        "num_cycles": 60, "data.batch_size": 2, "algorithm.num_steps": 2, "algorithm.teacher_steps": 2,
        "optimizers.student.lr": 1e-3, "optimizers.fake_score.lr": 1e-3,
        "training.checkpoint_every": 7, "training.log_every": 5,
    }  # fmt: skip
    recipe, killed = tmp_path / "long.yaml", tmp_path / "killed"
    recipe.write_text(yaml.safe_dump(dmd2({**changes, "output": str(killed)}).model_dump(mode="json")))
    command = [sys.executable, "-m", "sigmazero", "train", str(recipe)]
    started, log = time.monotonic(), (tmp_path / "log").open("w")
    with log, subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[2]) as process:
        while cycles_logged(killed) < 20 and process.poll() is None and time.monotonic() - started < 120:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert 20 <= cycles_logged(killed) < 60, (tmp_path / "log").read_text()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    wanted = outcome(train(dmd2({**changes, "output": str(tmp_path / "straight")})))
    assert wanted.rows[-1]["cycle"] == 60
    assert_same(outcome(killed), wanted)
