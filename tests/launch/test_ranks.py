"""Ranks that torchrun started: they share one run, and none hangs when another ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sigmazero.launch.local import train
from sigmazero.metrics import read_metrics
from sigmazero.training import checkpoint
from tests.conftest import MakeRun

PATIENCE = 180.0  # seconds from the start of two processes on two busy cores to their end

REWARD = """
import os, signal, time
from pathlib import Path

calls = 0

def score(pictures, prompts, metadata):
    global calls
    calls += 1
    if os.environ.get("RANK") == "1" and calls == 4:
        {fault}
    return [float(picture.mean()) for picture in pictures]
"""


@pytest.fixture
def recipe(flow_grpo: MakeRun, tmp_path: Path) -> Callable[..., Path]:
    """``recipe("os._exit(3)")``: online RL whose reward does that in the second rank's fourth call."""

    def write(fault: str, **changes: Any) -> Path:
        plugin = tmp_path / "reward.py"
        plugin.write_text(REWARD.format(fault=fault))
        function = f"{plugin}:score"
        values = flow_grpo({"num_cycles": 6, "training.checkpoint_every": 1, **changes}).model_dump(mode="json")
        values |= {"plugins": [function], "rewards": {"own": {"kind": "function", "function": function}}}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


TWICE = """
import sys
from sigmazero.config import load_recipe
from sigmazero.launch.local import train

for name in ("two", "again"):
    train(load_recipe(sys.argv[1], [f"output={sys.argv[2]}/{name}"]))
"""


def start(recipe: Path, *program: str) -> subprocess.Popen[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = program or ("-m", "sigmazero", "train", str(recipe))
    return subprocess.Popen([*run, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed; a rank that hangs is a failure."""
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"the ranks hang:\n{process.communicate()[0]}") from None
    return said


def test_two_ranks_make_one_run_like_that_of_one_process_b72(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """Also the second run of the same processes."""
    slow = {"num_cycles": 3, "optimizers.policy.lr": 1e-4}  # rounding must not grow
    path, twice = recipe("pass", **slow, profile={"ranks": [1], "start": 1}), tmp_path / "twice.py"
    twice.write_text(TWICE)
    process = start(path, str(twice), str(path), str(tmp_path))
    said = ended(process)
    assert process.returncode == 0, said
    assert said.count("finished:") == 2, said
    trace = tmp_path / "two" / "profile" / "cycle-00000001-rank-1.json"
    assert f"traces: {trace}; open them" in said, said
    assert '"cycle 1"' in trace.read_text(), "the second rank's trace is not in the run's folder"
    from sigmazero.config import load_recipe

    train(load_recipe(recipe("pass", **slow, output=str(tmp_path / "one"))))
    two, again, one = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "again", "one"))
    assert [row["cycle"] for row in two] == [1, 2, 3]
    for mine, mine_again, theirs in zip(two, again, one, strict=True):
        numbers = [n for n in theirs if not n.startswith(("time/", "memory/"))]
        assert {n: mine[n] for n in numbers} == {n: mine_again[n] for n in numbers}
        assert {n: mine[n] for n in numbers} == pytest.approx({n: theirs[n] for n in numbers}, rel=1e-4, abs=1e-5)
    arms = [json.loads((tmp_path / name / "scores.json").read_text())["arms"] for name in ("two", "one")]
    assert arms[0].keys() == arms[1].keys()
    assert arms[0]["start"] == arms[1]["start"], "the same weights gave other pictures"


def test_a_rank_that_raises_ends_the_others_with_its_cause(recipe: Callable[..., Path], tmp_path: Path) -> None:
    process = start(recipe("raise SystemExit('the scorer is gone')", **{"rollout.max_failed": 0.0}))
    said = ended(process)
    assert process.returncode != 0
    assert "the scorer is gone" in said, said
    assert "Traceback" not in said.partition("ChildFailedError")[0].partition("torch/distributed")[0], said
    found, refused = checkpoint.load_newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert not refused


def test_a_rank_that_is_killed_ends_the_others_and_the_run_goes_on_with_one(
    recipe: Callable[..., Path], tmp_path: Path
) -> None:
    path = recipe("os.kill(os.getpid(), signal.SIGKILL)")
    process = start(path)
    said = ended(process)
    assert process.returncode != 0, said
    found, _ = checkpoint.load_newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert 1 <= found.numbers["counters"]["cycle"] < 6
    from sigmazero.config import load_recipe

    train(load_recipe(path))
    assert [row["cycle"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_sigterm_saves_the_cycle_and_ends(recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = recipe("pass", **{"num_cycles": 100_000, "training.checkpoint_every": 100_000})
    process = start(path)
    log, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + PATIENCE
    while not log.is_file() or log.stat().st_size == 0:
        assert time.monotonic() < end, "training has not begun"
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    said = ended(process)
    assert "stopped by SIGTERM after cycle" in said, said
    found, _ = checkpoint.load_newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found.numbers["counters"]["cycle"] == read_metrics(log)[-1]["cycle"]
