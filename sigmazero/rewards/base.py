"""What a reward is, and the form of the pictures that it gets.

A reward is called with a batch of pictures, their prompts and their metadata, and returns one number a sample, or
several named ones. It declares layout and size of its pictures; they are the 8-bit pictures that are saved and
exported, so that training, evaluation and a reader of the files score the same thing (B75).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Union

import torch
from PIL import Image
from torch import Tensor

from sigmazero.records import Prompt

Layout = Literal["chw_float", "hwc_uint8", "pil"]
"""``chw_float``: fp32 ``[b, 3, H, W]`` in [0, 1]. ``hwc_uint8``: numpy uint8 ``[b, H, W, 3]``. ``pil``: a list."""

Values = Union[Sequence[Any], Mapping[str, Sequence[Any]]]
"""One number a sample, or lists of them by name. What is no finite number (None, nan, text) is a sample's failure."""


class Reward(Protocol):
    """One reward. It may be called from another thread than the one that made it; from one at a time, unless its
    recipe says ``workers`` or a call has hung. Pictures and metadata are its own to change."""

    layout: Layout
    size: tuple[int, int] | None  # height, width that pictures are resized to; None: as they are

    def check(self, prompt: Prompt) -> None:
        """Whether samples of a prompt can be scored at all.

        Raises:
            ValueError: says what the prompt lacks.
        """
        ...

    def __call__(self, pictures: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Values: ...


def as_layout(pictures: Tensor, layout: Layout, size: tuple[int, int] | None) -> Any:
    """uint8 pictures ``[b, 3, H, W]`` in the form that a reward declares, always a copy; resizing is bicubic with
    antialiasing."""
    if size is not None and tuple(pictures.shape[-2:]) != size:
        resized = torch.nn.functional.interpolate(
            pictures.float(), size=size, mode="bicubic", align_corners=False, antialias=True
        )
        pictures = resized.clamp(0, 255).round().to(torch.uint8)
    if layout == "chw_float":
        return pictures.float() / 255
    rows = pictures.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).numpy()
    return rows if layout == "hwc_uint8" else [Image.fromarray(row) for row in rows]
