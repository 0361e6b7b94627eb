"""The glyph picture set: captioned two-digit numbers, drawn from the real fonts that ship with matplotlib.

A caption always names the number, and ink, paper and style each only sometimes. What it leaves open varies freely;
size, position and tilt always do. So a caption stands for many pictures, as captions of photographs do, and a model
with few network calls has something to lose.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sigmazero import seeds

SIZE = 16  # pixels a side
OVERSAMPLING = 4  # pictures are drawn this many times larger, then box-averaged
INKS: dict[str, tuple[int, int, int]] = {
    "black": (20, 20, 20),
    "red": (205, 20, 30),
    "green": (0, 125, 45),
    "blue": (25, 60, 215),
    "purple": (135, 35, 165),
    "brown": (125, 70, 25),
}
PAPERS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "yellow": (255, 232, 80),
    "pink": (255, 175, 200),
    "cyan": (140, 228, 240),
}
FACES: dict[str, tuple[str, ...]] = {
    "sans": ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf"),
    "serif": ("DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf", "STIXGeneralBol.ttf"),
    "mono": ("DejaVuSansMono-Bold.ttf", "cmtt10.ttf"),
}
_NAMES = tuple(INKS), tuple(PAPERS), tuple(FACES)
SPLITS = ("train", "test")
Split = Literal["train", "test"]
HELD_OUT = 240  # of the 2,400 (number, ink, paper) combinations

# Slots of a caption: the vocabulary of each, "open" first.
SLOTS: tuple[tuple[str, ...], ...] = (
    ("open", *"0123456789"),
    ("open", *"0123456789"),
    ("open", *INKS),
    ("open", *PAPERS),
    ("open", *FACES),
)
GRAMMAR = "the number NN [in INK] [on PAPER][, STYLE font]"
_CAPTION = re.compile(
    r"the number (?P<number>\w+)(?: in (?P<ink>\w+))?(?: on (?P<paper>\w+))?(?:, (?P<style>\w+) font)?"
)


@dataclass(frozen=True)
class Caption:
    """What a caption names; None is open. ``Caption(42, "red")`` reads "the number 42 in red"."""

    number: int
    ink: str | None = None
    paper: str | None = None
    style: str | None = None

    def __str__(self) -> str:
        text = f"the number {self.number:02d}"
        text += f" in {self.ink}" if self.ink else ""
        text += f" on {self.paper}" if self.paper else ""
        return text + (f", {self.style} font" if self.style else "")


def parse_caption(text: str) -> Caption:
    """Reads a caption of the grammar ``the number NN [in INK] [on PAPER][, STYLE font]``.

    Raises:
        ValueError: the text is not of the grammar, or a word is unknown; the message names the words that are known.
    """
    match = _CAPTION.fullmatch(" ".join(text.split()))
    if match is None:
        raise ValueError(f"caption {text!r} is not of the form '{GRAMMAR}', for example 'the number 42 in red on pink'")
    number = match["number"]
    if not re.fullmatch(r"[0-9]{2}", number):
        raise ValueError(f"caption {text!r}: {number!r} is not a number from 00 to 99 in two digits")
    for slot, known in (("ink", INKS), ("paper", PAPERS), ("style", FACES)):
        if match[slot] is not None and match[slot] not in known:
            raise ValueError(f"caption {text!r}: unknown {slot} {match[slot]!r}; known are {', '.join(known)}")
    return Caption(int(number), match["ink"], match["paper"], match["style"])


@functools.lru_cache(maxsize=1)
def held_out() -> frozenset[tuple[int, str, str]]:
    """The (number, ink, paper) combinations that no train picture shows; the same in every run."""
    combinations = [(number, ink, paper) for number in range(100) for ink in INKS for paper in PAPERS]
    order = seeds.generator(0, "held_out").permutation(len(combinations))[:HELD_OUT]
    return frozenset(combinations[i] for i in order)


def captions_of(indices: Sequence[int], split: Split, seed: int) -> list[tuple[Caption, Caption]]:
    """Captions of a split by index, each with the fully named caption of the picture it was made for.

    Train captions are drawn freely outside the held-out combinations. Test captions go through the held-out ones, each
    once in every ``HELD_OUT`` captions, so that two sets of test captions differ little by chance.
    """
    draws = seeds.generators(seed, "captions", ((index, SPLITS.index(split), 0) for index in indices))
    return [_caption(index, split, seed, draw) for index, draw in zip(indices, draws, strict=True)]


def _caption(index: int, split: Split, seed: int, draw: np.random.Generator) -> tuple[Caption, Caption]:
    number, ink, paper, style = _draw_all(draw)
    while split == "train" and (number, ink, paper) in held_out():
        number, ink, paper, style = _draw_all(draw)
    if split == "test":
        each_pass, position = divmod(index, HELD_OUT)
        order = seeds.generator(seed, "captions", each_pass, SPLITS.index(split), 1).permutation(HELD_OUT)
        number, ink, paper = sorted(held_out())[order[position]]
    named = draw.random(3) < 0.5
    full = Caption(number, ink, paper, style)
    return Caption(number, ink if named[0] else None, paper if named[1] else None, style if named[2] else None), full


def _draw_all(draw: np.random.Generator) -> tuple[int, str, str, str]:
    number = int(draw.integers(100))
    ink, paper, style = (names[int(draw.integers(len(names)))] for names in _NAMES)
    return number, ink, paper, style


def picture_of(caption: Caption, index: int, seed: int) -> Tensor:
    """The ``index``-th picture of a caption: what it leaves open, and the geometry, is drawn freely.

    Returns: fp32 ``[3, 16, 16]`` in [0, 1].
    """
    draw = seeds.generator(seed, "pictures", index)
    ink, paper, style = (
        wanted or list(known)[int(draw.integers(len(known)))]
        for wanted, known in ((caption.ink, INKS), (caption.paper, PAPERS), (caption.style, FACES))
    )
    face = FACES[style][int(draw.integers(len(FACES[style])))]
    tilt, size = math.radians(draw.uniform(-12, 12)), draw.uniform(0.76, 0.96)
    mask = _place(face, caption.number, tilt, size, draw.uniform(-1, 1), draw.uniform(-1, 1))
    colours = np.array([INKS[ink], PAPERS[paper]], dtype=np.float32) / 255
    return torch.from_numpy(colours[0, :, None, None] * mask + colours[1, :, None, None] * (1 - mask))


def pictures_of(captions: Sequence[Caption], indices: Sequence[int], seed: int) -> Tensor:
    """Pictures of many captions: fp32 ``[len(captions), 3, 16, 16]`` in [0, 1]."""
    return torch.stack([picture_of(c, i, seed) for c, i in zip(captions, indices, strict=True)])


@functools.lru_cache(maxsize=1024)
def _drawing(face: str, number: int) -> tuple[Image.Image, float, float]:
    """A number drawn large and centred, with its half width and half height in pixels."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / face
    font = ImageFont.truetype(str(path), 72)
    text = f"{number:02d}"
    left, top, right, bottom = font.getbbox(text)
    image = Image.new("L", (160, 160))
    origin = ((160 - (right - left)) / 2 - left, (160 - (bottom - top)) / 2 - top)
    ImageDraw.Draw(image).text(origin, text, font=font, fill=255)
    return image, (right - left) / 2, (bottom - top) / 2


def _place(face: str, number: int, tilt: float, size: float, across: float, down: float) -> np.ndarray:
    """Turns, scales and shifts a drawing into the frame: fp32 ``[16, 16]`` in [0, 1], the share of ink.

    The tilted bounding box fills ``size`` of the frame in its longer direction; ``across`` and ``down`` in [-1, 1]
    move it through the room that is left.
    """
    image, half_width, half_height = _drawing(face, number)
    cos, sin = math.cos(tilt), math.sin(tilt)
    box_width = half_width * cos + half_height * abs(sin)
    box_height = half_height * cos + half_width * abs(sin)
    side = SIZE * OVERSAMPLING
    scale = size * side / 2 / max(box_width, box_height)  # frame pixels a drawing pixel
    centre_x = side / 2 + across * (side / 2 - box_width * scale)
    centre_y = side / 2 + down * 0.6 * (side / 2 - box_height * scale)
    a, b, d, e = cos / scale, sin / scale, -sin / scale, cos / scale
    affine = (a, b, 80 - a * centre_x - b * centre_y, d, e, 80 - d * centre_x - e * centre_y)
    frame = image.transform((side, side), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)
    return np.asarray(frame.reduce(OVERSAMPLING), dtype=np.float32) / 255
