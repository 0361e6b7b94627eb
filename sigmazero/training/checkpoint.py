"""Checkpoints: written aside, fsynced, renamed; verified on load. safetensors and JSON only, nothing executable."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sigmazero.tensors import read_tensors, sync, write_tensors

SCHEMA = 1
_TENSORS, _STATE = "tensors.safetensors", "state.json"
_NAME = re.compile(r"cycle-(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: tensors by name, and numbers. ``path`` is where it was read from."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    path: Path


def save(folder: Path, cycle: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], keep: int) -> Path:
    """Writes ``folder/cycle-N``, whole or not at all, then removes all but this one and the ``keep - 1`` before it.

    Killed at any instant, the folder holds the checkpoints that were there before or the new one as well (B24).
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, aside = folder / f"cycle-{cycle:08d}", folder / f".writing-{os.getpid()}"
    for left in folder.glob(".writing-*"):
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir()
    try:
        write_tensors(aside / _TENSORS, tensors)
        description = {"schema": SCHEMA, "sha256": _digest(aside / _TENSORS, numbers), "numbers": numbers}
        (aside / _STATE).write_text(json.dumps(description, indent=1))
        sync(aside / _STATE)
        sync(aside)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)  # leaves the room on a full disk to the user
        raise
    sync(folder)
    _prune(folder, target, keep)
    return target


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Removes all but ``keep``. One of a later cycle is of a future that this run did not come from: it was damaged."""
    found = _folders(folder)
    at = found.index(newest) + 1
    for old in (*found[: max(0, at - keep)], *found[at:]):
        shutil.rmtree(old)


def load_newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and a line for every newer one that does not."""
    refused: list[str] = []
    for path in reversed(_folders(folder)):
        try:
            return load(path), refused
        except ValueError as error:
            refused.append(str(error))
    return None, refused


def load(path: Path) -> Checkpoint:
    """Reads one checkpoint.

    Raises:
        ValueError: a file is missing, damaged, of another schema, or its hash differs from the one written.
    """
    try:
        description = json.loads((path / _STATE).read_text())
        if description["schema"] != SCHEMA:
            raise ValueError(f"checkpoint {path} has schema {description['schema']}, this version reads {SCHEMA}")
        if _digest(path / _TENSORS, description["numbers"]) != description["sha256"]:
            raise ValueError(f"checkpoint {path} is damaged: its tensors or numbers are not what was written")
        return Checkpoint(read_tensors(path / _TENSORS)[0], description["numbers"], path)
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error}") from None


def _folders(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted(p for p in folder.glob("cycle-*") if _NAME.fullmatch(p.name)) if folder.is_dir() else []


def _digest(path: Path, numbers: Mapping[str, Any]) -> str:
    """Of the tensors' file and the numbers."""
    digest = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode())
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
