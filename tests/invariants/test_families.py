"""Every algorithm trains every family: on tiny random pipelines, pictures of 32 by 32, prompts of unlike lengths.

A run of two cycles is made once for each pair and every test looks at it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmazero.config import RunConfig, parse
from sigmazero.launch.local import Built, build
from sigmazero.launch.tiny import write_tiny
from sigmazero.records import Batch
from sigmazero.training import checkpoint
from sigmazero.training.phase import run_phase

FAMILIES = ("sd3", "flux2", "qwen_image")
PROMPTS = ('a sign that says "OPEN"', "a red cat", "a lake", "two old dogs look at the number 42 on a blue wall")
LORA = {"storage": "lora", "lora": {"rank": 4, "alpha": 8.0}}
REWARDED = {"rollout": {"group_size": 2}, "rewards": {"jpeg": {"kind": "jpeg"}}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dmd2": {
        "algorithm": {"name": "dmd2", "num_steps": 2, "teacher_steps": 2, "fake_updates": 2},
        "optimizers": {"student": {"lr": 1e-3}, "fake_score": {"lr": 1e-3}},
    },
    "flow_grpo": {
        "algorithm": {"name": "flow_grpo", "num_steps": 3, "guidance": 2.0, "kl_every": 0},
        "optimizers": {"policy": {"lr": 1e-3}},
        **REWARDED,
    },
    "nft": {
        "algorithm": {"name": "nft", "num_steps": 2, "num_timesteps": 2},
        "optimizers": {"policy": {"lr": 1e-3}},
        **REWARDED,
    },
}
PAIRS = [(family, name) for family in FAMILIES for name in ALGORITHMS]
MATRIX = [*((*pair, "lora") for pair in PAIRS), ("sd3", "flow_grpo", "copy")]
ONE_EACH = [("sd3", "flow_grpo", "lora"), ("flux2", "dmd2", "lora"), ("qwen_image", "nft", "lora")]


@dataclass
class Ran:
    """A run of two cycles: what it began with, what it logged, its checkpoint after the first, what it ended with."""

    built: Built
    base: dict[str, Tensor]
    begun: dict[str, Tensor]
    log: list[dict[str, float]]
    checkpoints: Path
    ended: dict[str, Tensor]


Run = Callable[[str, str, str], Ran]


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny pipeline of each family."""
    folder = tmp_path_factory.mktemp("pipelines")
    for family in FAMILIES:
        write_tiny(family, folder / family)
    return {family: folder / family for family in FAMILIES}


@pytest.fixture(scope="session")
def config(
    pipelines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, str], RunConfig]:
    """``config("sd3", "nft", "lora")``: settings of a run; four samples a cycle, all in one micro-batch."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))

    def settings(family: str, algorithm: str, storage: str) -> RunConfig:
        return parse(
            {
                "output": "unused",
                "num_cycles": 2,
                "model": {"family": family, "path": str(pipelines[family])},
                "roles": LORA if storage == "lora" else {},
                "data": {"prompts": str(prompts), "batch_size": 4, "height": 32, "width": 32},
                "training": {"threads": 1, "device": "cpu"},
                **ALGORITHMS[algorithm],
            }
        )

    return settings


@pytest.fixture(scope="module")
def run(config: Any, tmp_path_factory: pytest.TempPathFactory) -> Generator[Run]:
    """``run("sd3", "nft", "lora")``, each made when it is first asked for."""
    done: dict[tuple[str, ...], Ran] = {}
    with contextlib.ExitStack() as stack:

        def once(*which: str) -> Ran:
            if which not in done:
                done[which] = _ran(stack.enter_context(build(config(*which))), tmp_path_factory.mktemp("run"))
            return done[which]

        yield once


def _ran(built: Built, checkpoints: Path) -> Ran:
    trainer, base, begun = built.trainer, _base(built), _copied(built.trainer.tensors())
    log = [trainer.run_cycle()]
    checkpoint.save(checkpoints, 1, trainer.tensors(), trainer.numbers(), 1)
    log.append(trainer.run_cycle())
    return Ran(built, base, begun, log, checkpoints, _copied(trainer.tensors()))


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def _base(built: Built) -> dict[str, Tensor]:
    """The base network without adapters, by the names that it had before it got any."""
    state = built.roles.model.net.state_dict()
    return _copied({n.replace(".base_layer.", "."): v for n, v in state.items() if ".lora_" not in n})


def _differ(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    return [name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])]


@pytest.mark.parametrize(("family", "algorithm", "storage"), MATRIX)
def test_b05_b74_what_is_trained_moves_and_nothing_else(run: Run, family: str, algorithm: str, storage: str) -> None:
    """The trained roles and their averages, in weights of their own; the base, which frozen roles are, to the bit."""
    ran = run(family, algorithm, storage)
    kinds = ran.built.roles.kinds
    moved = {name.split("/")[1] for name in _differ(ran.begun, ran.ended) if name.startswith("roles/")}
    assert moved == {role for role, kind in kinds.items() if kind != "frozen"}
    assert _differ(ran.base, _base(ran.built)) == []
    assert all(not ran.built.roles.parameters(role) for role, kind in kinds.items() if kind == "frozen")
    assert all(value.dtype == torch.float32 and bool(value.isfinite().all()) for value in ran.ended.values())


@pytest.mark.parametrize(("family", "algorithm", "storage"), [row for row in MATRIX if row[1] == "flow_grpo"])
def test_b14_b33_rollout_and_training_agree_to_the_bit(run: Run, family: str, algorithm: str, storage: str) -> None:
    """The others compute no step of a rollout again."""
    assert [row["train/log_prob_abs_diff_max"] for row in run(family, algorithm, storage).log] == [0, 0]


@pytest.mark.parametrize(("family", "algorithm", "storage"), ONE_EACH)
def test_b09_b46_micro_batches_of_1_and_4_give_the_same_gradient(
    run: Run, family: str, algorithm: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of unlike lengths; the score of dmd2 is taken once, so that both pull back the same gradient."""
    built, size = run(family, algorithm, storage).built, 4
    feeds = built.trainer._prepare(built.trainer.collector.collect(2 * size, 2), 2)
    for phase in built.algorithm.phases:
        if not phase.updates:
            feeds = built.trainer._run(phase, feeds, {}, set())
    whole, single = (_gradients(built, feeds, micro_batch, monkeypatch) for micro_batch in (4, 1))
    assert whole.keys() == single.keys()
    for name, value in whole.items():
        largest = float(value.abs().max())
        torch.testing.assert_close(single[name], value, rtol=1e-5, atol=1e-5 * largest + 1e-9, msg=name)
    assert max(float(value.abs().max()) for value in whole.values()) > 1e-4


def _gradients(
    built: Built, feeds: Mapping[str, Batch], micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """Of the first trained role, caught where its optimizer would step."""
    phase = next(phase for phase in built.algorithm.phases if phase.updates)
    optimizer, caught = built.trainer.optimizers[phase.updates[0]], dict[str, Tensor]()

    def catch(norm: Tensor) -> float:
        caught.update({n: p.grad.clone() for n, p in optimizer.parameters.items() if p.grad is not None})
        return 0.0

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", catch)
        run_phase(phase, built.roles, built.trainer.optimizers, feeds, micro_batch)
    return caught


@pytest.mark.parametrize(("family", "algorithm", "storage"), ONE_EACH)
def test_b11_b12_a_run_stopped_after_a_cycle_ends_with_the_same_bits(
    run: Run, config: Any, family: str, algorithm: str, storage: str
) -> None:
    straight = run(family, algorithm, storage)
    found, refused = checkpoint.load_newest(straight.checkpoints)
    assert found is not None
    assert refused == []
    with build(config(family, algorithm, storage)) as resumed:
        resumed.trainer.restore(found.tensors, found.numbers)
        log = resumed.trainer.run_cycle()
        assert _differ(resumed.trainer.tensors(), straight.ended) == []
    timeless = {n: value for n, value in straight.log[1].items() if not n.startswith(("time/", "memory/"))}
    assert {n: value for n, value in log.items() if not n.startswith(("time/", "memory/"))} == timeless
