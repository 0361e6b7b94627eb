"""Online RL that is stopped anywhere and goes on ends as one that never stopped: the twin of test_resume.py.

The reward is a plugin: it kills the groups of some captions, fails on some pictures, and watches a part.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from sigmazero.config import RunConfig
from sigmazero.engines.local import LocalEngine
from sigmazero.evaluate import Evaluator
from sigmazero.launch.local import build, restore_newest, train
from sigmazero.rewards.scorer import Scorer
from sigmazero.training import checkpoint, phase
from sigmazero.training.folder import RunFolder
from sigmazero.training.rollout import Collector
from sigmazero.training.trainer import Trainer
from tests.conftest import MakeRun
from tests.launch.test_resume import LORA, Outcome, Stop, assert_same, cycles_logged, interrupt, outcome, rewrite

CYCLES = 7
REWARD = '''
def score(pictures, prompts, metadata):
    """The mean pixel; the same for all samples of a caption whose number ends in 0 to 3; now and then none."""
    dead = [entry["text"][1] in "0123" for entry in metadata]
    bright = [0.5 if d else float(p.mean()) for d, p in zip(dead, pictures, strict=True)]
    for i, picture in enumerate(pictures):
        if round(255 * float(picture[0, 8, 8])) % 9 == 3:
            bright[i] = None
    return {"bright": bright, "red": pictures[:, 0].mean((1, 2))}
'''
SETTINGS = {
    "num_cycles": CYCLES,
    "data.batch_size": 6,
    "algorithm.num_steps": 3,
    "algorithm.evaluation_steps": 1,
    "training.checkpoint_every": 2,
    "training.log_every": 3,
    "evaluate.every": 3,
    "optimizers.policy.lr": 3e-3,
    "optimizers.policy.decay": "linear",
    "rollout.max_failed": 1.0,
    "algorithm.updates": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "flow": {"rollout.max_refills": 2, "algorithm.ema_decay": 0.5},
    "nft": {"algorithm.old_decay": {"start": 1, "slope": 0.1, "cap": 0.6}, "algorithm.kl_weight": 0.01},
}


_kept: dict[Any, Any] = {}  # parts of evaluation by its settings


@pytest.fixture(autouse=True)
def _fast_evaluation(no_page: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No report, and the real pictures are made and scored once: all that is tested elsewhere."""
    start, score_real = Evaluator.__init__, Evaluator.score_real

    def kept(name: str, config: Any, make: Callable[[], Any]) -> Any:
        if (name, config) not in _kept:
            _kept[name, config] = make()
        return _kept[name, config]

    def init(self: Evaluator, config: Any, reader: Any) -> None:
        vars(self).update(vars(kept("evaluator", config, lambda: (start(self, config, reader), self)[1])))

    monkeypatch.setattr(Evaluator, "__init__", init)
    monkeypatch.setattr(
        Evaluator, "score_real", lambda self, real: kept("real", self.config, lambda: score_real(self, real))
    )


Make = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plugin") / "mine.py"
    file.write_text(REWARD)
    return f"{file}:score"


@pytest.fixture
def make(flow_grpo: MakeRun, nft: MakeRun, plugin: str) -> Make:
    """``make("nft lora", folder)``: the settings of a kind of run."""
    rewards = {"mine": {"kind": "function", "function": plugin, "batch_size": 4, "weight": {"bright": 1.0, "red": 0.0}}}

    def config(kind: str, folder: Path, **changes: Any) -> RunConfig:
        own = KINDS[kind.split()[0]] | (LORA if kind.endswith("lora") else {})
        values = {**SETTINGS, **own, **changes, "rewards": rewards, "plugins": [plugin], "output": str(folder)}
        return (flow_grpo if kind == "flow" else nft)(values)

    return config


def reference(kind: str, make: Make, tmp_path: Path) -> Outcome:
    """What a run leaves that is not stopped; it must have met what makes its resumption hard."""
    found = outcome(train(make(kind, tmp_path / "straight")))
    assert [row["cycle"] for row in found.rows] == [2, 3, 4, 6, 7]
    assert sum("evaluate/final/reward/mine/bright" in row for row in found.rows) == 3
    assert any(row["reward/failed"] > 0 for row in found.rows)
    assert any(row["group/dead"] > 0 for row in found.rows)
    samples = found.numbers["counters"]["samples"]
    if kind == "flow":
        assert sum(row["group/refilled"] > 0 for row in found.rows) > 1
        assert samples > 6 * CYCLES
    else:
        assert samples == 6 * CYCLES
        assert {name.split("/")[1] for name in found.tensors} == {"policy", "policy_ema", "old"}
        decays = [row["train/old_decay"] for row in found.rows if "train/old_decay" in row]
        assert decays == sorted(decays)
        assert 0 < decays[0] < decays[-1] <= 0.6
    assert 2 < found.numbers["optimizer_steps"]["policy"] <= 2 * CYCLES
    return found


class Halt(NamedTuple):
    """A run ends when the ``call``-th call of a function in a cycle has done its work."""

    cycle: int  # from 0; or the first after it with so many calls
    owner: object
    name: str
    call: int


def stop_at(config: RunConfig, halt: Halt) -> int:
    """Runs as far as that; returns the cycle it began with."""
    inner, begin, calls = getattr(halt.owner, halt.name), Trainer.run_cycle, list[int]()

    def run_cycle(self: Trainer) -> Any:
        now.append(self.counters.cycle)
        calls.clear()
        return begin(self)

    def stopped(*args: Any, **keywords: Any) -> Any:
        result = inner(*args, **keywords)
        if now[-1] >= halt.cycle:
            calls.append(0)
        if len(calls) == halt.call:
            raise Stop
        return result

    now = [-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run_cycle", run_cycle)
        patch.setattr(halt.owner, halt.name, stopped)
        with pytest.raises(Stop):
            train(config)
    return now[1]


# A checkpoint follows cycles 1, 3, 5 and 6.
STOPS: dict[str, list[Halt]] = {
    "flow": [
        Halt(0, LocalEngine, "generate", 2),  # of a refill
        Halt(3, checkpoint, "sync", 2),  # the files of a checkpoint are written, its folder has no name yet
        Halt(4, Trainer, "_run", 2),  # the KL is measured, the old log-probs are made, the policy has not moved
        Halt(5, phase, "_update", 2),  # the first of two updates is made
        Halt(6, Scorer, "gather", 1),
    ],
    "nft": [
        Halt(2, Collector, "collect", 1),
        Halt(3, checkpoint, "sync", 3),  # the checkpoint is there, the one before it too
        Halt(4, Scorer, "gather", 1),
        Halt(4, phase, "_update", 1),
        Halt(6, Trainer, "_run", 1),  # the policy is updated, the old one does not follow yet
    ],
    "nft lora": [
        Halt(2, Scorer, "gather", 1),
        Halt(2, phase, "_update", 1),
        Halt(6, Trainer, "_average", 3),  # the old policy has followed
    ],
}


@pytest.mark.parametrize("kind", STOPS)
def test_b11_b12_a_run_that_is_stopped_again_and_again_ends_like_one_that_never_was(
    kind: str, make: Make, tmp_path: Path
) -> None:
    """In its rollout, in scoring, between its phases and updates, and while it saves."""
    wanted = reference(kind, make, tmp_path)
    config = make(kind, tmp_path / "stopped")
    starts: list[int] = []
    for halt in STOPS[kind]:
        kept = sorted((tmp_path / "stopped").glob("checkpoints/cycle-*"))
        newest = int(kept[-1].name.removeprefix("cycle-")) if kept else 0
        starts.append(stop_at(config, halt))
        assert starts[-1] == newest
    assert len(set(starts)) > 1
    assert_same(outcome(train(config)), wanted)


@pytest.mark.parametrize(("kind", "lost"), [("nft", "old"), ("nft lora", "old"), ("nft", "policy_ema")])
def test_b11_a_checkpoint_without_an_average_is_refused_by_name(
    kind: str, lost: str, make: Make, tmp_path: Path
) -> None:
    config = make(kind, tmp_path / "stopped")
    interrupt(config, checkpoint.Saver, "save", 1, True)
    prefix = f"roles/{lost}/"
    rewrite(tmp_path / "stopped", lambda tensors: {n: v for n, v in tensors.items() if not n.startswith(prefix)})
    with pytest.raises(ValueError, match=rf"does not fit this run: \['{prefix}"):
        train(config)


def test_b11_the_old_policy_of_a_checkpoint_is_the_one_that_samples(make: Make, tmp_path: Path) -> None:
    """Not one that is copied anew from the policy."""
    config = make("nft", tmp_path / "stopped")
    interrupt(config, checkpoint.Saver, "save", 1, True)
    rewrite(
        tmp_path / "stopped",
        lambda tensors: {n: torch.full_like(v, 0.25) if n.startswith("roles/old/") else v for n, v in tensors.items()},
    )
    with build(config) as built:
        restore_newest(built, RunFolder(tmp_path / "stopped"))
        assert all(bool((p == 0.25).all()) for p in built.roles.parameters("old").values())
        assert not any(bool((p == 0.25).all()) for p in built.roles.parameters("policy").values())
        assert (built.roles.versions["old"], built.algorithm.policy) == (built.roles.versions["policy"], "old")
        latents = built.trainer.collector.collect(0, 0).trajectories[0].latents
        for p in built.roles.parameters("policy").values():
            p.data.zero_()
        assert torch.equal(built.trainer.collector.collect(0, 0).trajectories[0].latents, latents)


def test_b11_b12_b24_b47_killed_for_real(make: Make, tmp_path: Path) -> None:
    """``kill -9`` after some cycles with refills, and the rest in this process, against an uninterrupted run."""
    changes = {
        "num_cycles": 18, "algorithm.num_steps": 2, "optimizers.policy.lr": 1e-3,
        "training.checkpoint_every": 3, "training.log_every": 2, "evaluate.every": 0,
    }  # fmt: skip
    recipe, killed = tmp_path / "long.yaml", tmp_path / "killed"
    config = make("flow", killed, **changes)
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "sigmazero", "train", str(recipe)]
    started, log = time.monotonic(), (tmp_path / "log").open("w")
    with log, subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[2]) as process:
        while cycles_logged(killed) < 6 and process.poll() is None and time.monotonic() - started < 120:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert 6 <= cycles_logged(killed) < 18, (tmp_path / "log").read_text()
    wanted = outcome(train(make("flow", tmp_path / "straight", **changes)))
    assert wanted.rows[-1]["cycle"] == 18
    assert_same(outcome(train(config)), wanted)
