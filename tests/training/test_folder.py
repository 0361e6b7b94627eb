"""A run folder is never lost to a kill, never overwritten by accident."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

import pytest

from sigmazero.launch.local import build
from sigmazero.models import glyph
from sigmazero.training.folder import RunFolder, check_inputs, read_config, read_description
from tests.conftest import MakeRun


def test_b24_killed_while_the_first_description_is_written(dmd2: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dmd2()

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, RunFolder(config.output) as folder:
        patch.setattr(os, "replace", kill)
        with pytest.raises(KeyboardInterrupt):
            folder.open(config)
    with RunFolder(config.output) as folder:
        folder.open(config)
    assert read_config(config.output) == config


def test_b24_killed_while_an_old_run_is_cleared_leaves_a_run(dmd2: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dmd2({"overwrite": True})
    with RunFolder(config.output) as folder:
        folder.open(config)
        (folder.path / "samples").mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "describe", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                folder.open(config)
        folder.open(config)
        assert (folder.path / "samples").is_dir()


@pytest.mark.parametrize("text", ['{"fin', "{}", "[]", '{"config": 3, "finished": true}'])
def test_a_damaged_description_is_one_line_and_overwrite_starts_over(dmd2: MakeRun, text: str) -> None:
    config = dmd2()
    path = Path(config.output) / "run.json"
    path.parent.mkdir()
    path.write_text(text)
    with RunFolder(config.output) as folder:
        with pytest.raises(ValueError, match="set overwrite=true to start over"):
            folder.open(config)
        folder.open(dmd2({"overwrite": True}))
    assert (read_description(path.parent) or {})["finished"] is False


def test_b12_a_file_that_changed_since_the_start_is_named(dmd2: MakeRun, tmp_path: Path) -> None:
    """The same path with other prompts or other weights is another run; so is it for evaluation and samples."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the number 42\nthe number 07 in red\n")
    config = dmd2({"data.prompts": str(prompts)})
    with RunFolder(config.output) as folder:
        folder.open(config, build(config).inputs)
        folder.open(config, build(config).inputs)
        prompts.write_text("the number 42\nthe number 08 in red\n")
        with pytest.raises(ValueError, match=r"other content of data\.prompts"):
            folder.open(config, build(config).inputs)
        prompts.write_text("the number 42\n\nthe number 07 in red\n")
        folder.open(config, build(config).inputs)
        model = glyph.load(config.model.path)
        path = Path(config.model.path)
        kept = path.read_bytes()
        try:
            glyph.save(path, model, {name: value * 1.01 for name, value in model.net.state_dict().items()})
            with pytest.raises(ValueError, match=r"other content of model\.path"):
                check_inputs(folder.path, build(config).inputs)
        finally:
            path.write_bytes(kept)


def test_a_start_that_fails_leaves_no_folder_of_its_own(tmp_path: Path) -> None:
    """What was there stays, and nothing is added to it; the failure is what is told, also if the folder has gone."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for name in ("new", "new/and/deep", "old", "old/deep"):
        with pytest.raises(ValueError, match="no such model"), RunFolder(tmp_path / name):
            raise ValueError("no such model")
        assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(ValueError, match="no such model"), RunFolder(tmp_path / "new"):  # noqa: PT012
        shutil.rmtree(tmp_path / "new")
        raise ValueError("no such model")


def test_a_lock_that_its_holder_removed_locks_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder goes, with its folder, between our opening of the lock and our hold on it."""
    path = tmp_path / "run"
    holder = RunFolder(path)
    holder.__enter__()
    flock = fcntl.flock

    def late(lock: IO[str], how: int) -> None:
        holder.__exit__()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ValueError, match=r"in use|run folder"), RunFolder(path):
        pass
    monkeypatch.undo()
    with RunFolder(path) as folder:
        assert (folder.path / ".lock").is_file()
