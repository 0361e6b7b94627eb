"""Pictures on disk: 8-bit, lossless, with their settings in the file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor


def quantized(pictures: Tensor) -> Tensor:
    """Pictures in [0, 1] as uint8 of the same shape: what is saved is what is scored."""
    return (pictures.float().clamp(0, 1) * 255).round().to(torch.uint8)


def grid(pictures: Tensor, columns: int, scale: int = 1, gap: int = 0) -> Image.Image:
    """uint8 ``[n, 3, H, W]`` as one picture, row by row, each enlarged ``scale`` times without smoothing."""
    n, _, height, width = pictures.shape
    rows = math.ceil(n / columns)
    sheet = Image.new("RGB", (columns * (width * scale + gap) - gap, rows * (height * scale + gap) - gap), "white")
    for i, picture in enumerate(pictures):
        tile = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
        tile = tile.resize((width * scale, height * scale), Image.Resampling.NEAREST)
        sheet.paste(tile, ((i % columns) * (width * scale + gap), (i // columns) * (height * scale + gap)))
    return sheet


def save_png(image: Image.Image, path: Path, settings: Mapping[str, Any] | None = None) -> None:
    """Writes a PNG whole or not at all; ``settings`` go into its ``sigmazero`` text field as JSON."""
    info = PngInfo()
    if settings is not None:
        info.add_itxt("sigmazero", json.dumps(settings))
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".writing")
    image.save(aside, format="PNG", pnginfo=info)
    os.replace(aside, path)
