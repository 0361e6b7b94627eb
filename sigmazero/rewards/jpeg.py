"""Size of the picture as JPEG: a reward without any model, from DDPO (arXiv 2305.13301)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from sigmazero.config import JpegRewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards.base import Layout, Reward, Values


@dataclass
class JpegReward:
    """``sign`` times the size in kB; -1 rewards pictures that compress well."""

    sign: int
    quality: int
    layout: Layout = "pil"
    size: tuple[int, int] | None = None

    def check(self, prompt: Prompt) -> None:
        """Every picture has a size."""

    def __call__(
        self, pictures: Sequence[Image.Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Values:
        return [self.sign * kilobytes(picture, self.quality) for picture in pictures]


def kilobytes(picture: Image.Image, quality: int) -> float:
    """Thousands of bytes of a picture as JPEG."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return file.tell() / 1000


def build(config: JpegRewardConfig, plugins: Sequence[str]) -> Reward:
    """The reward of a recipe."""
    return JpegReward(-1 if config.goal == "compressible" else 1, config.quality)
