"""Tensor files: safetensors only, written whole or not at all, with errors that name the file. And sharded tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors aside, fsyncs and renames.

    Raises:
        OSError: the file cannot be written, for example on a full disk.
    """
    aside = path.with_name(path.name + ".writing")
    stored = {name: whole(value.detach()).cpu().contiguous() for name, value in tensors.items()}
    try:
        save_file(stored, aside, metadata=dict(metadata) if metadata else None)
    except SafetensorError as error:
        aside.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error}") from None
    sync(aside)
    os.replace(aside, path)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a file and its metadata.

    Raises:
        ValueError: the file is missing or no safetensors file.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a safetensors file: {error}") from None


def local(value: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, in place of it; any other tensor itself."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: Tensor) -> Tensor:
    """A sharded tensor put together, on every rank, which all must call; any other tensor itself."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
