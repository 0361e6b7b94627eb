"""Prompts and pictures are functions of the sample index; a bad prompt file is found before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sigmazero import glyphs
from sigmazero.config import DataConfig
from sigmazero.data import GlyphCaptions, PromptFile, open_prompts
from sigmazero.launch.local import build
from sigmazero.models import glyph
from sigmazero.reader import agrees, load_reader
from tests.conftest import MakeRun

LINES = [f"the number {n:02d}" for n in range(10)]


def prompt_file(folder: Path, lines: list[str], seed: int = 0) -> PromptFile:
    path = folder / "prompts.txt"
    path.write_text("\n".join(lines) + "\n")
    return PromptFile(path, seed)


def texts(stream: PromptFile, samples: range) -> list[str]:
    return [prompt.text for prompt in stream.prompts(samples)]


def test_b12_every_pass_shows_each_line_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    stream = prompt_file(tmp_path, LINES)
    passes = [texts(stream, range(10 * i, 10 * i + 10)) for i in range(5)]
    assert all(sorted(order) == LINES for order in passes)
    assert len({tuple(order) for order in passes}) == 5
    assert LINES not in passes


def test_b12_a_prompt_is_a_function_of_the_sample_index(tmp_path: Path) -> None:
    """Asked in batches of 4, backwards, one alone, by a second reader of the file: always the same."""
    stream = prompt_file(tmp_path, LINES)
    straight = stream.prompts(range(30))
    for samples in (list(range(29, -1, -1)), [25, 3, 25, 14], [7], [*range(20, 24), *range(4)]):
        assert stream.prompts(samples) == [straight[s] for s in samples]
        assert PromptFile(stream.path, 0).prompts(samples) == [straight[s] for s in samples]
    batches = [prompt for start in range(0, 28, 4) for prompt in stream.prompts(range(start, start + 4))]
    assert batches == straight[:28]


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    assert texts(prompt_file(tmp_path, LINES, 0), range(10)) != texts(prompt_file(tmp_path, LINES, 1), range(10))


def test_b53_a_file_smaller_than_a_batch_is_repeated_and_ids_are_those_of_its_lines(tmp_path: Path) -> None:
    """Blank lines and surrounding spaces are no prompt; the same line has the same id in every pass."""
    stream = prompt_file(tmp_path, ["", "  the number 11 ", "", "the number 22", "   "])
    prompts = stream.prompts(range(8))
    assert [prompts[i].text for i in (0, 1)] in (["the number 11", "the number 22"], ["the number 22", "the number 11"])
    for first in range(0, 8, 2):
        assert {(p.id, p.text) for p in prompts[first : first + 2]} == {(0, "the number 11"), (1, "the number 22")}
    assert texts(prompt_file(tmp_path, ["the number 33"]), range(3)) == ["the number 33"] * 3


def test_b53_a_run_on_one_prompt_fills_its_batch(dmd2: MakeRun, tmp_path: Path) -> None:
    path = prompt_file(tmp_path, ["the number 33"]).path
    built = build(dmd2({"data.prompts": str(path)}))
    assert [t.request.prompt.text for t in built.trainer._roll_out(range(6), 0)] == ["the number 33"] * 6


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "holds no prompt"),
        (b"\n  \n\n", "holds no prompt"),
        (b"the number 12\nthe number \xff\n", "is not UTF-8 text"),
        (None, "there is no prompt file"),
    ],
)
def test_a_file_without_prompts_is_refused_by_name(
    dmd2: MakeRun, tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as error:
        build(dmd2({"data.prompts": str(path)}))
    assert str(path) in str(error.value)
    assert "data.prompts" in str(error.value)


def test_a_caption_that_cannot_be_read_is_refused_before_training_with_its_line(dmd2: MakeRun, tmp_path: Path) -> None:
    """Line 3 of the file, though it is the second prompt."""
    path = prompt_file(tmp_path, ["the number 12", "", "the number 12 in mauve", "the number 13"]).path
    with pytest.raises(ValueError, match=r"prompts\.txt, line 3: .*'mauve'.* known are black, red") as error:
        build(dmd2({"data.prompts": str(path)}))
    assert "line 1" not in str(error.value)


def test_a_folder_is_no_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no prompt file"):
        PromptFile(tmp_path, 0)


def test_recipes_open_the_stream_that_they_name(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, LINES).path
    assert isinstance(open_prompts(DataConfig(prompts=str(path)), 0), PromptFile)
    assert open_prompts(DataConfig(), 3).prompts([5]) == GlyphCaptions("train", 3).prompts([5])


@pytest.mark.parametrize("split", glyphs.SPLITS)
def test_captions_are_true_of_their_pictures(split: glyphs.Split) -> None:
    """The reader finds what is named; of another picture's caption it does not."""
    pictures, prompts = GlyphCaptions(split, 5).pictures(range(200))
    captions = [glyphs.parse_caption(prompt.text) for prompt in prompts]
    reader = load_reader()
    read = reader.read(reader.features(pictures))
    right = sum(agrees(r, c) for r, c in zip(read, captions, strict=True))
    wrong = sum(agrees(r, c) for r, c in zip(read, captions[1:] + captions[:1], strict=True))
    assert right >= 196
    assert wrong <= 10
    named = [(c.ink is not None, c.paper is not None, c.style is not None) for c in captions]
    assert len(set(named)) == 8  # each slot is sometimes open, on its own
    combinations = {(r.number, r.ink, r.paper) for r in read}
    assert len(combinations & glyphs.held_out()) <= 4 if split == "train" else combinations <= glyphs.held_out()


def test_b12_pictures_and_captions_are_functions_of_the_sample_index() -> None:
    data = GlyphCaptions("train", 0)
    pictures, prompts = data.pictures(range(40, 52))
    assert prompts == data.prompts(range(40, 52))
    for samples in ([51, 40], [45], list(range(51, 39, -1))):
        again, same = GlyphCaptions("train", 0).pictures(samples)
        assert torch.equal(again, pictures[[s - 40 for s in samples]])
        assert same == [prompts[s - 40] for s in samples]
    assert len({p.text for p in data.prompts(range(200))}) > 150
    assert data.prompts(range(12)) != GlyphCaptions("train", 1).prompts(range(12))


def test_every_caption_of_the_stream_can_be_encoded() -> None:
    model = glyph.create(32, 1, 0)
    prompts = GlyphCaptions("train", 2).prompts(range(300))
    tokens = model.encode([prompt.text for prompt in prompts])["tokens"]
    assert len({tuple(row) for row in tokens.tolist()}) == len({prompt.text for prompt in prompts})


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    path = tmp_path / "bom.txt"
    path.write_bytes(b"\xef\xbb\xbfthe number 42\r\nthe number 07\r\n")
    assert {p.text for p in PromptFile(path, 0).prompts(range(2))} == {"the number 42", "the number 07"}
