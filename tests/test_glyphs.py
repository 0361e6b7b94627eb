"""The glyph pictures: a grammar that round-trips, a held-out set that holds, pictures that show their caption."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmazero import glyphs
from sigmazero.glyphs import Caption, Split

CAPTIONS = st.builds(
    Caption,
    st.integers(0, 99),
    st.none() | st.sampled_from(list(glyphs.INKS)),
    st.none() | st.sampled_from(list(glyphs.PAPERS)),
    st.none() | st.sampled_from(list(glyphs.FACES)),
)
DRAWS = 3000


def colour(name: str) -> np.ndarray:
    return np.array({**glyphs.INKS, **glyphs.PAPERS}[name]) / 255


@functools.lru_cache
def drawn(split: Split) -> list[tuple[Caption, Caption]]:
    return glyphs.captions_of(range(DRAWS), split, 0)


@given(CAPTIONS)
@settings(deadline=None)
def test_a_caption_is_read_back_from_its_text(caption: Caption) -> None:
    assert glyphs.parse_caption(str(caption)) == caption
    assert glyphs.parse_caption(f"  {str(caption).replace(' ', '   ')} ") == caption


@pytest.mark.parametrize(
    ("caption", "text"),
    [
        (Caption(7), "the number 07"),
        (Caption(42, "red"), "the number 42 in red"),
        (Caption(42, None, "pink"), "the number 42 on pink"),
        (Caption(0, "blue", "cyan", "mono"), "the number 00 in blue on cyan, mono font"),
    ],
)
def test_caption_text(caption: Caption, text: str) -> None:
    assert str(caption) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("the number 42 in mauve", "unknown ink 'mauve'; known are black, red, green, blue, purple, brown"),
        ("the number 42 in pink", "unknown ink 'pink'"),
        ("the number 42 on red", "unknown paper 'red'; known are white, yellow, pink, cyan"),
        ("the number 42, gothic font", "unknown style 'gothic'; known are sans, serif, mono"),
        ("the number 7", "'7' is not a number from 00 to 99"),
        ("the number 123", "'123' is not a number"),
        ("the number ٤٢", "'٤٢' is not a number"),
        ("the number forty", "'forty' is not a number"),
        ("the number 42 on white in red", "is not of the form"),
        ("the number 42 sans font", "is not of the form"),
        ("42", "is not of the form"),
        ("", "is not of the form"),
    ],
)
def test_what_is_no_caption_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        glyphs.parse_caption(text)
    assert repr(text) in str(error.value)


def test_train_pictures_never_show_what_is_held_out_and_test_ones_always_do() -> None:
    held = glyphs.held_out()
    shown = {split: {(f.number, f.ink, f.paper) for _, f in drawn(split)} for split in ("train", "test")}
    assert len(held) == glyphs.HELD_OUT
    assert not shown["train"] & held
    assert shown["test"] == held


def test_a_caption_is_true_of_its_picture() -> None:
    for caption, full in [*drawn("train"), *drawn("test")]:
        assert caption.number == full.number
        for said, shown in ((caption.ink, full.ink), (caption.paper, full.paper), (caption.style, full.style)):
            assert shown is not None
            assert said in (None, shown)


@pytest.mark.parametrize("split", glyphs.SPLITS)
def test_captions_name_each_attribute_about_half_the_time(split: Split) -> None:
    named = np.array([[c.ink is not None, c.paper is not None, c.style is not None] for c, _ in drawn(split)])
    combinations = np.bincount(named @ [1, 2, 4], minlength=8) / DRAWS
    assert np.abs(combinations - 1 / 8).max() < 4 * (1 / 8 * 7 / 8 / DRAWS) ** 0.5


def test_train_captions_cover_every_value_evenly() -> None:
    shown = [(f"{f.number:02d}", f.ink, f.paper, f.style) for _, f in drawn("train")]
    numbers = [f"{n:02d}" for n in range(100)]
    for values, known in zip(
        zip(*shown, strict=True), (numbers, glyphs.INKS, glyphs.PAPERS, glyphs.FACES), strict=True
    ):
        share = np.array([values.count(value) for value in known]) / DRAWS
        p = 1 / len(known)
        assert np.abs(share - p).max() < 5 * (p / DRAWS) ** 0.5


def test_captions_are_a_function_of_index_split_and_seed() -> None:
    for split in glyphs.SPLITS:
        assert glyphs.captions_of([17, 250, 3], split, 0) == [drawn(split)[i] for i in (17, 250, 3)]
    assert glyphs.captions_of(range(20), "train", 1) != drawn("train")[:20]
    assert glyphs.captions_of(range(20), "test", 0) != drawn("train")[:20]


def test_a_picture_does_not_depend_on_its_neighbours() -> None:
    captions = [Caption(7), Caption(42, "red"), Caption(99, "blue", "white", "mono"), Caption(7)]
    together = glyphs.pictures_of(captions, [3, 4, 5, 6], 0)
    backwards = glyphs.pictures_of(captions[::-1], [6, 5, 4, 3], 0).flip(0)
    alone = torch.stack([glyphs.picture_of(c, i, 0) for c, i in zip(captions, [3, 4, 5, 6], strict=True)])
    assert torch.equal(together, alone)
    assert torch.equal(together, backwards)


@pytest.mark.parametrize(
    "other", [(Caption(42, "red", "white", "sans"), 4, 0), (Caption(42, "red", "white", "sans"), 3, 1)]
)
def test_index_and_seed_change_the_geometry(other: tuple[Any, ...]) -> None:
    assert not torch.equal(glyphs.picture_of(Caption(42, "red", "white", "sans"), 3, 0), glyphs.picture_of(*other))


def test_every_number_is_drawn_differently() -> None:
    pictures = [glyphs.picture_of(Caption(n, "black", "white", "sans"), 3, 0) for n in range(100)]
    assert len(np.unique(torch.stack(pictures).flatten(1).numpy(), axis=0)) == 100


def test_a_picture_shows_its_paper_and_its_ink() -> None:
    for i, (_, full) in enumerate(drawn("train")[:200] + drawn("test")[:100]):
        assert full.ink is not None
        assert full.paper is not None
        pixels = glyphs.picture_of(full, i, 0).flatten(1).T.double().numpy()
        paper, way = colour(full.paper), colour(full.ink) - colour(full.paper)
        share = (pixels - paper) @ way / (way @ way)
        np.testing.assert_allclose(pixels, paper + share[:, None] * way, atol=1e-6)
        np.testing.assert_allclose(pixels[[0, 15, 240, 255]], np.tile(paper, (4, 1)), atol=1e-6)
        assert share.max() > 0.7
        assert 0.02 < share.mean() < 0.6


def test_what_a_caption_leaves_open_varies() -> None:
    pictures = glyphs.pictures_of([Caption(7)] * 200, range(200), 0)
    corners = {tuple((255 * p[:, 0, 0]).round().int().tolist()) for p in pictures}
    assert corners == set(glyphs.PAPERS.values())
    pinned = glyphs.pictures_of([Caption(7, None, "cyan")] * 50, range(50), 0)
    assert {tuple((255 * p[:, 0, 0]).round().int().tolist()) for p in pinned} == {glyphs.PAPERS["cyan"]}
    darkest = {tuple((10 * p.flatten(1)[:, p.sum(0).argmin()]).round().int().tolist()) for p in pinned}
    assert len(darkest) >= len(glyphs.INKS)
