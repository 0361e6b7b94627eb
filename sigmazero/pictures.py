"""Pictures on disk: 8-bit, lossless, with their settings in the file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor


def quantized(pictures: Tensor) -> Tensor:
    """Pictures in [0, 1] as uint8 of the same shape: what is saved is what is scored."""
    return (pictures.float().clamp(0, 1) * 255).round().to(torch.uint8)


def grid(pictures: Tensor, columns: int) -> Image.Image:
    """uint8 ``[n, 3, H, W]`` as one picture, row by row."""
    tiles = [Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()) for picture in pictures]
    return contact_sheet(tiles, columns, gap=0)


def thumbnail(image: Image.Image, side: int) -> Image.Image:
    """A picture whose longer side is about ``side`` pixels: smaller ones are enlarged without smoothing."""
    longest = max(image.size)
    if longest <= side:
        scale = side // longest
        return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    width, height = (max(1, round(length * side / longest)) for length in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def contact_sheet(tiles: Sequence[Image.Image], columns: int, gap: int = 4) -> Image.Image:
    """Tiles of one size as one picture, row by row."""
    width, height = tiles[0].size
    rows = math.ceil(len(tiles) / columns)
    sheet = Image.new("RGB", (columns * (width + gap) - gap, rows * (height + gap) - gap), "white")
    for i, tile in enumerate(tiles):
        sheet.paste(tile, ((i % columns) * (width + gap), (i // columns) * (height + gap)))
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
