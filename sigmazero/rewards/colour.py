"""Whether the colours that a prompt names are in the picture: a reward without any model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import ImageColor
from torch import Tensor

from sigmazero.config import ColourRewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards.base import Layout, Reward, Values

SHARE, FEWEST = 0.05, 4  # of the pixels, and how many at least, that must show a colour
FARTHEST = 0.5  # RGB distance in the unit cube at which a colour counts as missing


@dataclass
class ColourReward:
    """Colour adherence in [0, 1]: the mean over the wanted colours; 1 where none is wanted."""

    layout: Layout = "chw_float"
    size: tuple[int, int] | None = None

    def check(self, prompt: Prompt) -> None:
        try:
            wanted_colours(prompt.text, prompt.metadata)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id} {prompt.text!r}: {error}") from None

    def __call__(self, pictures: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Values:
        wanted = [wanted_colours(prompt, more) for prompt, more in zip(prompts, metadata, strict=True)]
        return [adherence(picture, colours) for picture, colours in zip(pictures, wanted, strict=True)]


def wanted_colours(prompt: str, metadata: Mapping[str, Any]) -> Tensor:
    """The colours in ``metadata["colours"]``, else those of the CSS colour words in the prompt: fp32 ``[k, 3]`` in
    [0, 1], each once.

    Raises:
        ValueError: ``metadata.colours`` is no list of colours.
    """
    words = [word for word in re.findall(r"\w+", prompt.lower()) if word in ImageColor.colormap]
    colours = metadata.get("colours", words)
    if not isinstance(colours, (list, tuple)):
        raise ValueError(f'metadata.colours is {colours!r}, which is no list: write for example ["red", "#ffe850"]')
    return torch.tensor(list(dict.fromkeys(map(_rgb, colours)))).reshape(-1, 3) / 255


def _rgb(colour: Any) -> tuple[int, ...]:
    try:
        return ImageColor.getrgb(colour)[:3]  # without the opacity that "#ff000080" has
    except (ValueError, TypeError, AttributeError):  # the latter two: it is no text
        raise ValueError(
            f'metadata.colours holds {colour!r}, which is no colour: write a CSS name, "#rrggbb" or "rgb(r, g, b)"'
        ) from None


def adherence(picture: Tensor, colours: Tensor) -> float:
    """How much of each colour ``[k, 3]`` the picture ``[3, H, W]`` shows, fp32 in [0, 1]: the mean over colours of
    ``1 - distance / 0.5``, at least 0, where distance is the mean over the 5 % of pixels that are nearest to it."""
    if not len(colours):
        return 1.0
    distances = torch.linalg.vector_norm(picture.flatten(1).T - colours[:, None], dim=-1)  # [k, H * W]
    count = min(max(math.ceil(SHARE * distances.shape[1]), FEWEST), distances.shape[1])
    nearest = distances.topk(count, largest=False).values.mean(-1)
    return float((1 - nearest / FARTHEST).clamp(min=0).mean())


def build(config: ColourRewardConfig, plugins: Sequence[str]) -> Reward:
    """The reward of a recipe."""
    return ColourReward()
