"""The colour reward: flat pictures by hand, and pictures of real ink on real paper."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmazero import glyphs
from sigmazero.config import ColourRewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards import colour

REWARD = colour.build(ColourRewardConfig(kind="colour"), [])


def flat(red: float, green: float, blue: float, side: int = 20) -> Tensor:
    return torch.tensor([red, green, blue])[:, None, None].expand(3, side, side).clone()


def score(picture: Tensor, prompt: str = "", **metadata: Any) -> float:
    (value,) = REWARD(picture[None], [prompt], [metadata])
    return float(value)


@pytest.mark.parametrize(
    ("picture", "prompt", "expected"),
    [
        (flat(1, 0, 0), "a red square", 1.0),
        (flat(0.75, 0, 0), "a red square", 0.5),  # a quarter away, of a half
        (flat(0.8, 0.2, 0.1), "a red square", 1 - 2 * 0.3),  # sqrt(.04 + .04 + .01) = .3
        (flat(0, 0, 1), "a red square", 0.0),
        (flat(1, 0, 0), "Red and blue", 0.5),
        (flat(0.75, 0, 0), "red, red and blue", 0.25),  # red counts once
        (flat(0, 0, 1), "a Navy dress", 1 - 2 * (1 - 128 / 255)),
        (flat(0, 0, 1), "a square that is reddish, covered in red_ink", 1.0),  # no whole word: nothing to miss
    ],
)
def test_flat_pictures_score_by_their_distance(picture: Tensor, prompt: str, expected: float) -> None:
    assert score(picture, prompt) == pytest.approx(max(expected, 0), abs=1e-6)


@pytest.mark.parametrize(
    ("painted", "expected"),
    [(20, 1.0), (30, 1.0), (10, 0.5), (0, 0.0)],  # of 400 pixels, of which 20 must show the colour
)
def test_five_in_a_hundred_pixels_are_enough(painted: int, expected: float) -> None:
    picture = flat(0.5, 0, 0)  # half a unit from red
    picture.view(3, -1)[0, :painted] = 1
    assert score(picture, "red") == pytest.approx(expected, abs=1e-6)


def test_a_small_picture_needs_four_pixels() -> None:
    picture = flat(0.5, 0, 0, side=3)
    picture[0, 0, 0] = 1
    assert score(picture, "red") == pytest.approx(0.25)
    assert score(flat(1, 0, 0, side=1), "red") == 1.0


def test_metadata_goes_before_the_prompt() -> None:
    picture = flat(0, 0, 1)
    assert score(picture, "a red square", colours=["#0000ff"]) == 1.0
    assert score(picture, "a blue square", colours=["rgb(255, 0, 0)", "#0000ff80"]) == 0.5
    assert score(picture, "a red square", colours=[]) == 1.0


def test_real_ink_and_paper_are_found_and_others_missed() -> None:
    captions = [full for _, full in glyphs.captions_of(range(24), "train", 0)]
    pictures = glyphs.pictures_of(captions, range(24), seed=0)
    named = {**glyphs.INKS, **glyphs.PAPERS}
    far = {"red": "blue", "blue": "green", "green": "red", "black": "red", "purple": "green", "brown": "blue"}
    for caption, picture in zip(captions, pictures, strict=True):
        assert caption.ink
        assert caption.paper
        right, wrong = ("#{:02x}{:02x}{:02x}".format(*named[ink]) for ink in (caption.ink, far[caption.ink]))
        paper = "#{:02x}{:02x}{:02x}".format(*named[caption.paper])
        assert score(picture, colours=[paper]) == pytest.approx(1, abs=1e-5)
        assert score(picture, colours=[right, paper]) > score(picture, colours=[wrong, paper]) + 0.2


def test_a_batch_scores_each_picture_by_its_own_prompt() -> None:
    pictures = torch.stack([flat(1, 0, 0), flat(0, 0, 1), flat(0.8, 0.2, 0.1)])
    values = REWARD(pictures, ["red", "red", "a cat"], [{}, {}, {"colours": ["black", "red"]}])
    assert values == pytest.approx([1, 0, (1 - 0.3 / 0.5) / 2], abs=1e-6)
    assert math.dist((0.8, 0.2, 0.1), (0, 0, 0)) > 0.5  # black is missing


@pytest.mark.parametrize("bad", ["rot", "", "#12345", 7, None, [255, 0, 0]])
def test_a_colour_that_cannot_be_read_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompt 5 'a cat': metadata\.colours holds .*, which is no colour: write"):
        REWARD.check(Prompt(5, "a cat", {"colours": ["red", bad]}))


def test_colours_that_are_no_list_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^prompt 5 'a cat': metadata\.colours is 'red', which is no list"):
        REWARD.check(Prompt(5, "a cat", {"colours": "red"}))


def test_prompts_with_and_without_colours_pass() -> None:
    REWARD.check(Prompt(0, "a cat"))
    REWARD.check(Prompt(0, "a red cat", {"colours": ["pink", "#ffe850"]}))
