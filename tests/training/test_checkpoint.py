"""Checkpoints survive kills, refuse damage, and execute nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from sigmazero import tensors
from sigmazero.training import checkpoint

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5], dtype=torch.float64)}


def write(folder: Path, cycle: int, keep: int = 2, **changed: torch.Tensor) -> Path:
    return checkpoint.save(folder, cycle, {**TENSORS, **changed}, {"cycle": cycle}, keep)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    write(tmp_path, 3)
    found, refused = checkpoint.load_newest(tmp_path)
    assert found is not None
    assert refused == []
    assert found.numbers == {"cycle": 3}
    assert all(torch.equal(found.tensors[n], t) and found.tensors[n].dtype == t.dtype for n, t in TENSORS.items())


def test_only_the_newest_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "cycle-notes").mkdir()
    for cycle in (1, 2, 10):
        write(tmp_path, cycle)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cycle-00000002", "cycle-00000010", "cycle-notes"]


@pytest.mark.parametrize("harm", ["truncate", "flip", "number", "no state", "no tensors", "half json", "schema"])
def test_b24_a_damaged_newest_one_is_passed_over_by_name(tmp_path: Path, harm: str) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    data_file, state = newest / "tensors.safetensors", newest / "state.json"
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
        state.write_text(state.read_text().replace('"schema": 1', '"schema": 99'))
    else:
        (state if harm == "no state" else data_file).unlink()
    found, refused = checkpoint.load_newest(tmp_path)
    assert found is not None
    assert found.numbers == {"cycle": 1}
    assert len(refused) == 1
    assert "cycle-00000002" in refused[0]


@pytest.mark.parametrize("where", ["write_tensors", "sync", "rename"])
def test_b24_a_save_that_fails_half_way_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """keep=1, full disk: the only good checkpoint stays, and the next save works."""
    write(tmp_path, 1, keep=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path if where == "rename" else checkpoint, where, full)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path, 2, keep=1)
    found, refused = checkpoint.load_newest(tmp_path)
    assert found is not None
    assert found.numbers == {"cycle": 1}
    assert refused == []
    write(tmp_path, 3, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cycle-00000003"]


def test_b24_the_marker_comes_last_and_pruning_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step of a save, the folder holds a checkpoint that verifies."""
    write(tmp_path, 1, keep=1)
    seen: list[bool] = []
    inner = checkpoint.sync

    def look(path: Path) -> None:
        seen.append(any((p / "state.json").is_file() for p in checkpoint._folders(tmp_path)))
        inner(path)

    monkeypatch.setattr(checkpoint, "sync", look)
    write(tmp_path, 2, keep=1)
    assert len(seen) >= 3
    assert all(seen)


class _Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


def test_b49_a_pickle_in_place_of_tensors_is_refused_and_not_run(tmp_path: Path) -> None:
    newest, marker = write(tmp_path / "c", 1), tmp_path / "ran"
    (newest / "tensors.safetensors").write_bytes(pickle.dumps(_Attack(marker)))
    text = (newest / "state.json").read_text()
    old = checkpoint.load_newest(tmp_path / "c")
    assert old[0] is None
    (newest / "state.json").write_text(
        text.replace(
            text.split('"sha256": "')[1][:64], checkpoint._digest(newest / "tensors.safetensors", {"cycle": 1})
        )
    )
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint.load(newest)
    assert not marker.exists()


def test_b24_going_on_from_before_damaged_ones_keeps_what_is_saved_then(tmp_path: Path) -> None:
    """Newest two damaged, resumed from an older one: the next save stays, also with keep=1."""
    for cycle in (2, 4, 6):
        write(tmp_path, cycle, keep=3)
    for cycle in (4, 6):
        (tmp_path / f"cycle-{cycle:08d}" / "tensors.safetensors").write_bytes(b"no")
    assert write(tmp_path, 3, keep=1).is_dir()
    assert [p.name for p in tmp_path.iterdir()] == ["cycle-00000003"]


def test_b24_a_full_disk_is_an_error_of_the_system_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors has an error of its own for it; a user gets the path in one line."""
    write(tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(OSError, match=r"tensors\.safetensors cannot be written.*No space left"):
        write(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["cycle-00000001"]
