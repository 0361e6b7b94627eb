"""Tiny random pipelines of the families, made of their real classes: what a recipe can be dry-run on anywhere."""

from __future__ import annotations

import importlib
from pathlib import Path

from sigmazero.models import FAMILIES


def write_tiny(family: str, folder: Path, seed: int = 0) -> None:
    """Writes a pipeline folder that the family's diffusers pipeline and ``model.path`` both load.

    Raises:
        ValueError: the family has no tiny pipeline, or the folder holds something.
    """
    known = [name for name in FAMILIES if name != "glyph"]  # its shipped weights are tiny already
    if family not in known:
        raise ValueError(f"family is {family!r}; tiny pipelines are made of {', '.join(known)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something already; name a new folder")
    importlib.import_module(FAMILIES[family]).tiny(folder, seed)
