"""The JPEG reward: the bytes of a real file, and the sign of its goal."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sigmazero.config import JpegRewardConfig
from sigmazero.rewards import jpeg
from sigmazero.rewards.base import Reward


def reward(**settings: Any) -> Reward:
    return jpeg.build(JpegRewardConfig.model_validate({"kind": "jpeg", **settings}), [])


@pytest.fixture
def pictures() -> list[Image.Image]:
    """A flat one and a noisy one."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return [Image.new("RGB", (64, 64), "red"), Image.fromarray(noise)]


@pytest.mark.parametrize("quality", [20, 95])
def test_the_size_is_that_of_the_file(pictures: list[Image.Image], quality: int) -> None:
    expected = []
    for picture in pictures:
        file = io.BytesIO()
        picture.save(file, format="jpeg", quality=quality)
        expected.append(len(file.getvalue()) / 1000)
    scores = reward(goal="incompressible", quality=quality)(pictures, ["", ""], [{}, {}])
    assert scores == expected
    assert expected[0] < expected[1]


def test_the_goals_are_opposite(pictures: list[Image.Image]) -> None:
    large = reward(goal="incompressible")(pictures, ["", ""], [{}, {}])
    small = reward(goal="compressible")(pictures, ["", ""], [{}, {}])
    assert isinstance(large, list)
    assert small == [-size for size in large]
    assert min(large) > 0
