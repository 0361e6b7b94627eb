"""A tiny glyph network with weights everywhere, and recipes that train it in a second."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sigmazero.config import RunConfig, parse
from sigmazero.launch import local, reopen
from sigmazero.models import glyph

MakeRun = Callable[..., RunConfig]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weight file of a two-block network; nothing in it is zero, so every parameter gets a gradient."""
    model = glyph.create(32, 2, seed=0)
    draw = torch.Generator().manual_seed(1)
    tensors = {
        name: value + 0.2 * torch.randn(value.shape, generator=draw) if value.is_floating_point() else value
        for name, value in model.net.state_dict().items()
    }
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    glyph.save(path, model, tensors)
    return path


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write no report, which takes longer than they do; it is tested elsewhere."""
    for module in (local, reopen):
        monkeypatch.setattr(module, "write_report", lambda folder, **_: folder)


def _merge(into: dict[str, Any], dotted: dict[str, Any]) -> dict[str, Any]:
    for key, value in dotted.items():
        *parents, last = key.split(".")
        at = into
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return into


def _make(weights: Path, folder: Path, own: dict[str, Any]) -> MakeRun:
    base = {
        "output": str(folder / "run"),
        "num_cycles": 4,
        "model": {"path": str(weights)},
        "data": {"batch_size": 6},
        "training": {"threads": 1, "log_every": 1, "checkpoint_every": 2, "tensorboard": False},
        "evaluate": {"num_captions": 8, "samples_per_caption": 2, "num_reference": 256, "bootstrap": 20},
        **own,
    }
    return lambda changes=None: parse(_merge(copy.deepcopy(base), changes or {}))


@pytest.fixture
def dmd2(weights: Path, tmp_path: Path) -> MakeRun:
    """``dmd2({"algorithm.num_steps": 4})``: settings of a tiny distillation, some changed."""
    own = {
        "algorithm": {"name": "dmd2", "num_steps": 3, "teacher_steps": 4, "fake_updates": 2},
        "optimizers": {"student": {"lr": 1e-2, "betas": [0.0, 0.99]}, "fake_score": {"lr": 1e-2}},
    }
    return _make(weights, tmp_path, own)


@pytest.fixture
def flow_matching(weights: Path, tmp_path: Path) -> MakeRun:
    """The same for velocity regression."""
    own = {"algorithm": {"name": "flow_matching", "num_steps": 2}, "optimizers": {"student": {"lr": 1e-2}}}
    return _make(weights, tmp_path, own)


@pytest.fixture
def flow_grpo(weights: Path, tmp_path: Path) -> MakeRun:
    """The same for coupled online RL: two groups of three samples, four steps, JPEG size as the reward."""
    return _make(weights, tmp_path, _rewarded({"name": "flow_grpo", "num_steps": 4, "kl_every": 2}))


@pytest.fixture
def nft(weights: Path, tmp_path: Path) -> MakeRun:
    """The same for decoupled online RL, two training sigmas a sample. ``algorithm.name`` changes to its siblings."""
    return _make(weights, tmp_path, _rewarded({"name": "nft", "num_steps": 3, "num_timesteps": 2, "kl_every": 0}))


def _rewarded(algorithm: dict[str, Any]) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "rollout": {"group_size": 3},
        "rewards": {"jpeg": {"kind": "jpeg"}},
        "optimizers": {"policy": {"lr": 1e-2}},
    }
