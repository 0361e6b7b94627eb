"""Checkpoints survive kills, refuse damage, and execute nothing."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from sigmazero.training import checkpoint
from tests.training import kills

TENSORS = {
    "roles/a.b/w.weight": torch.arange(6.0).reshape(2, 3),
    "double": torch.tensor([1.5], dtype=torch.float64),
    "optimizers/a/w/step": torch.tensor(3.0),
    "optimizers/a/v/idle": torch.zeros(0),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "long": torch.tensor([[-(2**60)], [7]]),
    "half": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "turned": torch.arange(6.0).reshape(2, 3).T,
}


def write(folder: Path, cycle: int, keep: int = 2, **numbers: Any) -> Path:
    return checkpoint.save(folder, cycle, TENSORS, {"cycle": cycle, **numbers}, keep)


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("limit", [2**30, 20])
def test_what_was_saved_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Of every dtype, without dimensions, without elements, with a slash or a dot in its name; in several files."""
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", limit)
    write(tmp_path, 3)
    found, refused = checkpoint.load_newest(tmp_path)
    assert found is not None
    assert refused == []
    assert found.numbers == {"cycle": 3}
    assert found.tensors.keys() == TENSORS.keys()
    assert all(is_same(found.tensors[name], value) for name, value in TENSORS.items())
    assert (len(files(found.path)) > 3) == (limit == 20)
    by_hand = {name: value for file in files(found.path) for name, value in load_file(file).items()}
    assert all(is_same(by_hand[name], value) for name, value in TENSORS.items())


def test_what_was_saved_is_what_was_there_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while the file is written, and the next save waits."""
    go, inner = threading.Event(), checkpoint._write_part

    def slow(*arguments: Any) -> dict[str, str]:
        assert go.wait(10)
        return inner(*arguments)

    monkeypatch.setattr(checkpoint, "_write_part", slow)
    weight, numbers = torch.zeros(3), {"count": 1}
    with checkpoint.Saver(tmp_path, 5) as saver:
        saver.save(1, {"w": weight}, numbers)
        weight += 1
        numbers["count"] = 2
        saver.check()
        assert names(tmp_path) == []
        threading.Timer(0.1, go.set).start()
        saver.save(2, {"w": weight}, numbers)
        assert "cycle-00000001" in names(tmp_path)
    assert names(tmp_path) == ["cycle-00000001", "cycle-00000002"]  # leaving waits
    found = [checkpoint.load(tmp_path / f"cycle-{cycle:08d}") for cycle in (1, 2)]
    assert [f.tensors["w"].tolist() for f in found] == [[0.0] * 3, [1.0] * 3]
    assert [f.numbers for f in found] == [{"count": 1}, {"count": 2}]


def test_only_the_newest_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "cycle-notes").mkdir()
    for cycle in (1, 2, 10):
        write(tmp_path, cycle)
    assert names(tmp_path) == ["cycle-00000002", "cycle-00000010", "cycle-notes"]


def test_another_runs_checkpoints_are_not_removed(tmp_path: Path) -> None:
    """Neither older nor later ones, however few of its own a run keeps."""
    write(tmp_path, 1, config={"seed": 1})
    write(tmp_path, 5, config={"seed": 1})
    for cycle in (2, 3, 4):
        write(tmp_path, cycle, keep=1, config={"seed": 2})
    assert names(tmp_path) == ["cycle-00000001", "cycle-00000004", "cycle-00000005"]


HARMS = ["truncate", "flip", "number", "no state", "no tensors", "one more", "half json", "schema"]


@pytest.mark.parametrize("harm", HARMS)
def test_b24_a_damaged_newest_one_is_passed_over_by_name(tmp_path: Path, harm: str) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    (data_file,), state = files(newest), newest / "state.json"
    if harm == "truncate":
        data_file.write_bytes(data_file.read_bytes()[:-4])
    elif harm == "flip":
        data = bytearray(data_file.read_bytes())
        data[-1] ^= 1
        data_file.write_bytes(bytes(data))
    elif harm == "half json":
        state.write_text(state.read_text()[:20])
    elif harm == "number":
        state.write_text(state.read_text().replace('"cycle": 2', '"cycle": 3'))
    elif harm == "schema":
        state.write_text(state.read_text().replace('"schema": 2', '"schema": 99'))
    elif harm == "one more":
        (newest / "shard-00002-model-00001-of-00001.safetensors").write_bytes(data_file.read_bytes())
    else:
        (state if harm == "no state" else data_file).unlink()
    found, refused = checkpoint.load_newest(tmp_path)
    assert found is not None
    assert found.numbers == {"cycle": 1}
    assert len(refused) == 1
    assert "cycle-00000002" in refused[0]


def test_b11_a_tensor_that_is_missing_or_another_is_named(tmp_path: Path) -> None:
    stored = checkpoint.load(write(tmp_path, 1)).tensors
    with pytest.raises(ValueError, match="has no tensor roles/new"):
        stored.fill({"roles/new": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"has roles/a\.b/w\.weight as .*shape \(2, 3\), but here .*shape \(3, 3\)"):
        stored.fill({"roles/a.b/w.weight": torch.zeros(3, 3)})
    with pytest.raises(ValueError, match=r"has half as torch\.bfloat16 .*, but here it is torch\.float32"):
        stored.fill({"half": torch.zeros(2)})


def full(*_: object, **__: object) -> Any:
    raise OSError(28, "No space left on device")


FULL: dict[str, tuple[object, str]] = {
    "a write": (safetensors.torch, "save"),
    "an fsync": (os, "fsync"),
    "the description": (Path, "write_text"),
    "the rename": (Path, "rename"),
}


@pytest.mark.parametrize("where", FULL)
def test_b24_a_full_disk_leaves_the_old_one_and_is_one_line_at_the_next_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """keep=1: the only good checkpoint stays, nothing is left behind, and the next save works."""
    write(tmp_path, 1, keep=1)
    with monkeypatch.context() as patch, checkpoint.Saver(tmp_path, 1) as saver:
        patch.setattr(*FULL[where], full)
        saver.save(2, TENSORS, {"cycle": 2})
        assert saver._thread is not None
        saver._thread.join()
        with pytest.raises(OSError, match=r"cycle-00000002 cannot be written.*before it stay.*No space") as failure:
            saver.check()
        assert "\n" not in str(failure.value)
    assert names(tmp_path) == ["cycle-00000001"]
    found, refused = checkpoint.load_newest(tmp_path)
    assert found is not None
    assert found.numbers == {"cycle": 1}
    assert refused == []
    write(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["cycle-00000003"]


def test_b24_a_full_disk_is_told_when_the_run_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in place of the next save; but not in place of the error that ends the run."""
    monkeypatch.setattr(os, "fsync", full)

    def run(*cycles: int, end: type[BaseException] | None = None) -> None:
        with checkpoint.Saver(tmp_path, 1) as saver:
            for cycle in cycles:
                saver.save(cycle, TENSORS, {})
            if end is not None:
                raise end

    with pytest.raises(OSError, match="No space"):
        run(1)
    with pytest.raises(OSError, match="cycle-00000001 cannot be written"):
        run(1, 2)
    with pytest.raises(KeyboardInterrupt):
        run(1, end=KeyboardInterrupt)


def test_b24_killed_at_any_step_of_a_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """``kill -9`` before each step that the system is asked for, over a first and a second save."""
    done = subprocess.run(
        [sys.executable, "-m", kills.__name__, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    count = int(done.stdout)
    assert count > 15
    seen = set[tuple[str, int]]()
    for folder in sorted(tmp_path.iterdir()):
        which = folder.name.split("-")[0]
        found, refused = checkpoint.load_newest(folder)
        cycle = 0 if found is None else found.numbers["cycle"]
        seen.add((which, cycle))
        assert refused == [], folder.name
        if found is not None:
            assert all(is_same(found.tensors[n], v) for n, v in kills.tensors(cycle).items()), folder.name
        write(folder, 9, keep=1)
        assert names(folder) == ["cycle-00000009"]  # nothing that a kill leaves stays for good
    assert seen == {("first", 0), ("first", 1), ("second", 1), ("second", 2)}


class _Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


def hashed_again(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a description as somebody would who knows the format."""
    state = json.loads((path / "state.json").read_text())
    change(state)
    body = json.dumps([state["files"], state["numbers"]], sort_keys=True).encode()
    state["sha256"] = hashlib.sha256(body).hexdigest()
    (path / "state.json").write_text(json.dumps(state))


def test_b49_a_pickle_in_place_of_tensors_is_refused_and_not_run(tmp_path: Path) -> None:
    newest, marker = write(tmp_path / "c", 1), tmp_path / "ran"
    (file,) = files(newest)
    file.write_bytes(pickle.dumps(_Attack(marker)))
    assert checkpoint.load_newest(tmp_path / "c")[0] is None
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    hashed_again(newest, lambda state: state["files"].update({file.name: digest}))
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint.load(newest)
    assert not marker.exists()


def test_b49_a_checkpoint_is_safetensors_and_json(tmp_path: Path) -> None:
    """The library's default storage would leave a pickle beside the tensors."""
    saved = write(tmp_path, 1)
    assert all(re.fullmatch(r"shard-[\w-]+\.safetensors|state\.json", name) for name in names(saved))
    assert json.loads((saved / "state.json").read_text())["numbers"] == {"cycle": 1}


def test_b24_going_on_from_before_damaged_ones_keeps_what_is_saved_then(tmp_path: Path) -> None:
    """Newest two damaged, resumed from an older one: the next save stays, also with keep=1."""
    for cycle in (2, 4, 6):
        write(tmp_path, cycle, keep=3)
    for cycle in (4, 6):
        files(tmp_path / f"cycle-{cycle:08d}")[0].write_bytes(b"no")
    (tmp_path / "cycle-00000006" / "state.json").write_text("no")
    assert write(tmp_path, 3, keep=1).is_dir()
    assert names(tmp_path) == ["cycle-00000003"]
