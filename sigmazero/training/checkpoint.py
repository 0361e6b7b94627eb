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

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

SCHEMA = 1
_NAME = re.compile(r"cycle-(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: tensors by name, and numbers. ``path`` is where it was read from."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    path: Path


def save(folder: Path, cycle: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], keep: int) -> Path:
    """Writes ``folder/cycle-N``, whole or not at all, then removes all but the newest ``keep``.

    Killed at any instant, the folder holds the checkpoints that were there before or the new one as well (B24).
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, aside = folder / f"cycle-{cycle:08d}", folder / f".writing-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in tensors.items()}, aside / "tensors.safetensors"
    )
    description = {"schema": SCHEMA, "sha256": _digest(aside / "tensors.safetensors", numbers), "numbers": numbers}
    (aside / "state.json").write_text(json.dumps(description, indent=1))
    for path in (*aside.iterdir(), aside):
        _sync(path)
    if target.exists():
        shutil.rmtree(target)
    aside.rename(target)
    _sync(folder)
    for old in _folders(folder)[:-keep]:
        shutil.rmtree(old)
    for left in folder.glob(".writing-*"):
        shutil.rmtree(left, ignore_errors=True)
    return target


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
        description = json.loads((path / "state.json").read_text())
        if description["schema"] != SCHEMA:
            raise ValueError(f"checkpoint {path} has schema {description['schema']}, this version reads {SCHEMA}")
        if _digest(path / "tensors.safetensors", description["numbers"]) != description["sha256"]:
            raise ValueError(f"checkpoint {path} is damaged: its tensors or numbers are not what was written")
        return Checkpoint(load_file(path / "tensors.safetensors"), description["numbers"], path)
    except (OSError, KeyError, TypeError, json.JSONDecodeError, SafetensorError) as error:
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
