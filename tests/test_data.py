"""Prompts and pictures are functions of the sample index; a bad prompt file is found before training."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from sigmazero import glyphs, seeds
from sigmazero.config import DataConfig, parse
from sigmazero.data import GlyphCaptions, PromptFile, glyph_prompt, open_prompts
from sigmazero.launch.local import build
from sigmazero.models import glyph
from sigmazero.reader import agrees, load_reader
from sigmazero.records import Prompt
from tests.conftest import MakeRun

LINES = [f"the number {n:02d}" for n in range(10)]


def prompt_file(folder: Path, lines: list[str], seed: int = 0) -> PromptFile:
    path = folder / "prompts.txt"
    path.write_text("\n".join(lines) + "\n")
    return PromptFile(path, seed)


def opened(folder: Path, name: str, content: bytes, seed: int = 0) -> PromptFile:
    path = folder / name
    path.write_bytes(content)
    return PromptFile(path, seed)


def json_lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def parquet_file(path: Path, columns: dict[str, Any]) -> PromptFile:
    parquet.write_table(pyarrow.table(columns), path)
    return PromptFile(path, 0)


def by_id(stream: PromptFile, count: int) -> list[Prompt]:
    """One pass over a file of ``count`` prompts of equal weight."""
    return sorted(stream.prompts(range(count)), key=lambda prompt: prompt.id)


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


def test_b12_the_order_of_a_file_stays_what_it_was(tmp_path: Path) -> None:
    """The values are part of the format of a run; equal weights, whatever they are, change nothing."""
    plain = prompt_file(tmp_path, LINES)
    assert [p.id for p in plain.prompts(range(20))] == [1, 7, 6, 5, 8, 3, 9, 2, 0, 4, 8, 2, 9, 4, 0, 6, 1, 3, 5, 7]
    for name, weight in (("none", {}), ("three", {"weight": 3})):
        stream = opened(tmp_path, f"{name}.jsonl", json_lines([{"prompt": line, **weight} for line in LINES]))
        assert stream.prompts(range(20)) == plain.prompts(range(20))


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
    assert [t.request.prompt.text for t in built.trainer.collector.collect(0, 0).trajectories] == ["the number 33"] * 6


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


def test_every_distinct_prompt_is_checked_once_with_its_metadata(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "id": 5},
        {"prompt": "a", "id": 6},
        {"prompt": "a", "id": 7, "text": "1"},
        {"prompt": "b", "id": 8},
    ]
    stream = opened(tmp_path, "p.jsonl", b"\n" + json_lines(rows))
    seen: list[Prompt] = []
    stream.check(seen.append)
    assert seen == [Prompt(5, "a"), Prompt(7, "a", {"text": "1"}), Prompt(8, "b")]

    def wants_no_text(prompt: Prompt) -> None:
        if "text" in prompt.metadata:
            raise ValueError(f"text is {prompt.metadata['text']}")

    with pytest.raises(ValueError, match="text is 1") as error:
        stream.check(wants_no_text)
    assert str(error.value) == f"data.prompts: {stream.path}, line 4: text is 1"


def test_a_folder_is_no_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no prompt file"):
        PromptFile(tmp_path, 0)


def test_recipes_open_the_stream_that_they_name(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, LINES).path
    assert isinstance(open_prompts(DataConfig(prompts=str(path)), 0), PromptFile)
    assert open_prompts(DataConfig(), 3).prompts([5]) == GlyphCaptions("train", 3).prompts([5])


def resolved(family: str = "sd3", **data: Any) -> DataConfig:
    """The data of a run that names a family and little else."""
    model = {"family": family, "path": "shipped" if family == "glyph" else "folder"}
    run = {"algorithm": {"name": "dmd2"}, "optimizers": {"student": {}, "fake_score": {}}}
    return parse({**run, "model": model, **({"data": data} if data else {})}).data


def test_shipped_prompts_are_the_default_where_a_family_has_no_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any working folder; one's own file, and the captions of glyph, stay what they were."""
    monkeypatch.chdir(tmp_path)
    assert [resolved(family).prompts for family in ("sd3", "flux2", "qwen_image")] == ["shipped"] * 3
    assert resolved(batch_size=4).prompts == "shipped"
    assert resolved(prompts="mine.txt").prompts == "mine.txt"
    assert resolved("glyph").prompts == "glyphs"
    stream, quoted = open_prompts(resolved(), 0), open_prompts(DataConfig(prompts="shipped_text"), 0)
    assert isinstance(stream, PromptFile)
    assert isinstance(quoted, PromptFile)
    assert len({prompt.text for prompt in stream.all()}) == 30
    assert quoted.all() == [prompt for prompt in stream.all() if prompt.text.count('"') == 2]
    assert {prompt.text for prompt in quoted.prompts(range(10))} == {prompt.text for prompt in quoted.all()}
    assert stream.fingerprint != quoted.fingerprint


@pytest.mark.parametrize(
    ("family", "prompts", "complaint"),
    [
        ("qwen_image", "glyphs", "data.prompts is 'glyphs', captions of the family glyph; for qwen_image name"),
        ("glyph", "shipped_text", "data.prompts is 'shipped_text', but glyph reads captions of its own only"),
        ("sd3", None, "data.prompts is None: input should be a valid string"),
    ],
)
def test_prompts_of_another_family_are_refused(family: str, prompts: str | None, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        resolved(family, prompts=prompts)


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


def test_weights_are_relative_frequencies(tmp_path: Path) -> None:
    """4,000 draws, within four deviations of the weights; the smallest and largest floats are weights too."""
    weights = [1, 2.5, 0.5, 6]
    stream = opened(tmp_path, "w.jsonl", json_lines([{"prompt": f"p{w}", "weight": w} for w in weights]))
    counts = Counter(prompt.id for prompt in stream.prompts(range(4000)))
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(counts[index] - 4000 * share) < 4 * (4000 * share * (1 - share)) ** 0.5
    extreme = opened(
        tmp_path, "e.jsonl", json_lines([{"prompt": f"p{w}", "weight": w} for w in (1.7e308, 5e-324, 1.7e308)])
    )
    assert 70 < Counter(prompt.id for prompt in extreme.prompts(range(200)))[0] < 130
    assert {prompt.id for prompt in extreme.prompts(range(200))} == {0, 2}


def test_b12_a_weighted_draw_is_a_function_of_the_sample_index(tmp_path: Path) -> None:
    """Each draw has its own uniform number, apart from those that order the passes of an unweighted file."""
    weights = [1.0, 3.0, 0.5, 2.0]
    content = json_lines([{"prompt": f"p{w}", "weight": w} for w in weights])
    stream = opened(tmp_path, "w.jsonl", content, 5)
    straight = stream.prompts(range(60))
    draws = seeds.uniform(5, "data_order", range(60), steps=1).numpy()
    assert [p.id for p in straight] == [int(np.argmax(np.cumsum(weights) > u * 6.5)) for u in draws]
    for samples in (list(range(59, -1, -1)), [25, 3, 25, 14], [7], []):
        assert stream.prompts(samples) == [straight[s] for s in samples]
        assert PromptFile(stream.path, 5).prompts(samples) == [straight[s] for s in samples]
    assert PromptFile(stream.path, 6).prompts(range(60)) != straight


FULL = [
    Prompt(9, "the number 42", {"text": "42", "level": {"deep": [1, None]}, "source": "x, y"}),
    Prompt(4, "the number 07\nin red", {"text": "07", "source": 'a "b"'}),
]


def test_b53_ids_and_metadata_of_json_lines(tmp_path: Path) -> None:
    """Keys without a meaning here are metadata too; spaces around a prompt and blank lines are nothing."""
    content = (
        '\n{"prompt": " the number 42 ", "id": 9, "metadata": {"level": {"deep": [1, null]}, "text": "42"}, '
        '"source": "x, y"}\r\n   \r\n{"source": "a \\"b\\"", "id": 4, "text": "07", "metadata": null, '
        '"prompt": "the number 07\\nin red", "weight": null}'
    )
    stream = opened(tmp_path, "p.jsonl", b"\xef\xbb\xbf" + content.encode())
    assert by_id(stream, 2) == FULL[::-1]


def test_b53_ids_and_metadata_of_csv(tmp_path: Path) -> None:
    """As a spreadsheet writes it: a byte-order mark, Windows line ends, quotes, blank cells."""
    content = (
        b"\xef\xbb\xbfsource,prompt, id,metadata,weight\r\n"
        b'"x, y",the number 42,9,"{""text"": ""42"", ""level"": {""deep"": [1, null]}}",\r\n\r\n'
        b'"a ""b""","the number 07\nin red", 4 ,"{""text"": ""07""}",1e0\r\n'
    )
    assert by_id(opened(tmp_path, "p.CSV", content), 2) == FULL[::-1]
    plain = by_id(opened(tmp_path, "q.csv", b"id,prompt,note\n,a,\n,b,7\n"), 2)
    assert plain == [Prompt(0, "a", {"note": ""}), Prompt(1, "b", {"note": "7"})]


def test_b53_ids_and_metadata_of_parquet(tmp_path: Path) -> None:
    """Metadata as JSON text, as a struct and as a map; a folder called a=b is no column."""
    columns = {"prompt": [p.text for p in FULL], "id": [9, 4], "source": ["x, y", 'a "b"'], "weight": [0.5, 0.5]}
    as_text = {**columns, "metadata": ['{"text": "42", "level": {"deep": [1, null]}}', '{"text": "07"}']}
    (tmp_path / "a=b").mkdir()
    assert by_id(parquet_file(tmp_path / "a=b" / "text.parquet", as_text), 2) == FULL[::-1]
    pairs = pyarrow.array([[("text", "42")], None], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    for name, metadata in (("map", pairs), ("struct", [{"text": "42"}, None])):
        prompts = by_id(parquet_file(tmp_path / f"{name}.parquet", {**columns, "metadata": metadata}), 2)
        assert [prompt.metadata for prompt in prompts] == [{"source": 'a "b"'}, {"source": "x, y", "text": "42"}]
    assert by_id(parquet_file(tmp_path / "p.parquet", {"prompt": ["a", "b"]}), 2) == [Prompt(0, "a"), Prompt(1, "b")]


def test_a_separator_inside_a_json_string_ends_no_line(tmp_path: Path) -> None:
    content = '{"prompt": "a\u2028b"}\n{"prompt": "c"}\n[]\n'.encode()
    with pytest.raises(ValueError, match=r"p\.jsonl, line 3: \[\] is no JSON object"):
        opened(tmp_path, "p.jsonl", content)


def test_b12_a_reward_that_changes_metadata_changes_no_later_draw(tmp_path: Path) -> None:
    stream = opened(tmp_path, "p.jsonl", json_lines([{"prompt": "a", "text": "42"}]))
    first = stream.prompts([0])[0].metadata
    assert isinstance(first, dict)
    first.clear()
    assert stream.prompts([0]) == [Prompt(0, "a", {"text": "42"})]


def test_the_fingerprint_is_of_prompts_ids_weights_and_metadata(tmp_path: Path) -> None:
    """Not of the format, the order of keys or blank lines."""
    rows: list[dict[str, Any]] = [{"prompt": "a", "text": "1", "note": 2}, {"prompt": "b"}]

    def fingerprint(name: str, content: bytes) -> str:
        return opened(tmp_path, name, content).fingerprint

    base = fingerprint("a.jsonl", json_lines(rows))
    shuffled = b'\n{"note": 2, "metadata": {"text": "1"}, "prompt": "a", "id": 0, "weight": 1.0}\n\n{"prompt": "b"}'
    assert fingerprint("b.jsonl", shuffled) == base
    for change in ({"prompt": "c"}, {"id": 7}, {"weight": 2}, {"text": "2"}, {"more": None}):
        assert fingerprint("c.jsonl", json_lines([{**rows[0], **change}, rows[1]])) != base
    assert fingerprint("d.jsonl", json_lines(rows[::-1])) != base
    assert fingerprint("e.txt", b"a\nb\n") == fingerprint("e.csv", b"prompt\na\nb\n")


OWN = "an id names a prompt, so give each its own (a prompt without one gets its index in the file, from 0)"
ID = "it must be an integer from 0 to 2**63 - 1"
WEIGHT = "it must be a finite number above 0"
PLAIN = "which is no plain JSON value"
OBJECT = "it must be an object, for example {'text': '42'}"
QUOTES = "close every quote, and double one inside quotes"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "b",}', "the line is not JSON: Expecting property name enclosed in double quotes at column 16"),
        ("the number 12", "the line is not JSON: Expecting value at column 1"),
        ('["b"]', """['b'] is no JSON object; write {"prompt": "..."}"""),
        ('"b"', """'b' is no JSON object; write {"prompt": "..."}"""),
        ('{"text": "12"}', "there is no 'prompt'; give its text"),
        ('{"prompt": null}', "there is no 'prompt'; give its text"),
        ('{"prompt": 12}', "prompt is 12; it must be text that is not blank"),
        ('{"prompt": " \\n"}', "prompt is ' \\n'; it must be text that is not blank"),
        ('{"prompt": "b", "prompt": "c"}', "the key 'prompt' is given twice in one object; give it once"),
        ('{"prompt": "b", "id": 3}', f"id 3 is already that of line 1; {OWN}"),
        ('{"prompt": "b", "id": 1.0}', f"id is 1.0; {ID}"),
        ('{"prompt": "b", "id": "1"}', f"id is '1'; {ID}"),
        ('{"prompt": "b", "id": true}', f"id is True; {ID}"),
        ('{"prompt": "b", "id": -1}', f"id is -1; {ID}"),
        ('{"prompt": "b", "id": NaN}', f"id is nan; {ID}"),
        ('{"prompt": "b", "id": 9223372036854775808}', f"id is 9223372036854775808; {ID}"),
        ('{"prompt": "b", "weight": 0}', f"weight is 0; {WEIGHT}"),
        ('{"prompt": "b", "weight": -0.5}', f"weight is -0.5; {WEIGHT}"),
        ('{"prompt": "b", "weight": NaN}', f"weight is nan; {WEIGHT}"),
        ('{"prompt": "b", "weight": Infinity}', f"weight is inf; {WEIGHT}"),
        ('{"prompt": "b", "weight": 1e400}', f"weight is inf; {WEIGHT}"),
        (f'{{"prompt": "b", "weight": 1{"0" * 400}}}', f"weight is 1{'0' * 56}...; {WEIGHT}"),
        ('{"prompt": "b", "weight": true}', f"weight is True; {WEIGHT}"),
        ('{"prompt": "b", "weight": "2"}', f"weight is '2'; {WEIGHT}"),
        ('{"prompt": "b", "metadata": ["x"]}', f"metadata is ['x']; {OBJECT}"),
        ('{"prompt": "b", "metadata": "{}"}', f"metadata is '{{}}'; {OBJECT}"),
        (
            '{"prompt": "b", "text": "1", "metadata": {"text": "1"}}',
            "'text' is given both by itself and in metadata; give it once",
        ),
        (
            '{"prompt": "b", "metadata": {"size": [NaN]}}',
            f"size is [nan], {PLAIN}: Out of range float values are not JSON compliant*",
        ),
        ('{"prompt": "\\ud800"}', f"prompt is '\\ud800', {PLAIN}: 'utf-8' codec can't encode*"),
    ],
)
def test_b53_a_wrong_line_of_json_is_refused_by_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    """Line 3, after a blank one and a good one."""
    content = f'{{"prompt": "a", "id": 3, "weight": 2}}\n\n{line}\n{{"prompt": "z"}}\n'
    assert_refused(tmp_path, "p.jsonl", content.encode(), f", line 3: {complaint}")


def assert_refused(folder: Path, name: str, content: bytes, complaint: str) -> None:
    """The message after the file's name; a star at its end stands for words of a library."""
    with pytest.raises(ValueError, match=r"^data\.prompts: ") as error:
        opened(folder, name, content)
    expected = f"data.prompts: {folder / name}{complaint}"
    found = str(error.value)
    assert found == expected or (expected.endswith("*") and found.startswith(expected[:-1]))
    assert "\n" not in found


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("b,2", ", line 5: 2 fields, but the header names 4; put a field that holds a comma in quotes"),
        ("b,2,,,x", ", line 5: 5 fields, but the header names 4; put a field that holds a comma in quotes"),
        ("b,3,,", f", line 5: id 3 is already that of line 2; {OWN}"),
        ("b,1.0,,", f", line 5: id is '1.0'; {ID}"),
        ("b,-1,,", f", line 5: id is '-1'; {ID}"),
        ("b,two,,", f", line 5: id is 'two'; {ID}"),
        ("b,²,,", f", line 5: id is '²'; {ID}"),
        ("b,,0,", f", line 5: weight is 0.0; {WEIGHT}"),
        ("b,,nan,", f", line 5: weight is nan; {WEIGHT}"),
        ("b,,heavy,", f", line 5: weight is 'heavy'; {WEIGHT}"),
        (" ,2,1,", ", line 5: prompt is ' '; it must be text that is not blank"),
        ("b,,,[1]", f", line 5: metadata is [1]; {OBJECT}"),
        ("b,,,text", ", line 5: metadata is not JSON: Expecting value at column 1"),
        ('b,,,"{""x"": NaN}"', f", line 5: x is nan, {PLAIN}: Out of range*"),
        ('"b"c,2,,', f""", line 5: not CSV: ',' expected after '"'; {QUOTES}"""),
        ('"b,2,,\nc,3,,\nd,4,,', f", line 5: not CSV: unexpected end of data; {QUOTES}"),
        ('"b\n\nc",2,,\n"d\ne",-2,,', f", line 8: id is '-2'; {ID}"),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_b53_a_wrong_record_of_csv_is_refused_by_the_line_that_it_starts_on(
    tmp_path: Path, rows: str, complaint: str, end: str
) -> None:
    """After a record of three lines, whatever the line ends."""
    content = f'prompt,id,weight,metadata\n"a\n\na",3,2,\n{rows}\n'.replace("\n", end)
    assert_refused(tmp_path, "p.csv", content.encode(), complaint)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", " holds no prompt; give at least one"),
        (b"prompt,id\n\n", " holds no prompt; give at least one"),
        (b"text,id\na,1\n", ", line 1: there is no column 'prompt'; the columns are 'text', 'id'"),
        (b"\nid,prompt,id\n1,a,1\n", ", line 2: the column 'id' is named twice; give it once"),
        (b"prompt\r\na\r\n\xe9\r\n", ", line 3: this is not UTF-8 text*"),
        ("prompt\na\n".encode("utf-16"), ", line 1: this is not UTF-8 text*"),
    ],
)
def test_a_csv_file_without_prompts_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    assert_refused(tmp_path, "p.csv", content, complaint)


def test_files_that_are_not_utf8_name_the_line(tmp_path: Path) -> None:
    reason = "this is not UTF-8 text (invalid start byte); save the file as UTF-8"
    assert_refused(tmp_path, "p.txt", b"\xef\xbb\xbfa\n\nb\n\xff\n", f", line 4: {reason}")
    assert_refused(tmp_path, "p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', f", line 2: {reason}")


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"prompt": ["a", None]}, ", row 2: there is no 'prompt'; give its text"),
        ({"prompt": ["a", " "]}, ", row 2: prompt is ' '; it must be text that is not blank"),
        ({"prompt": [b"a"]}, ", row 1: prompt is b'a'; it must be text that is not blank"),
        ({"prompt": ["a", "b"], "id": [7, 7]}, f", row 2: id 7 is already that of row 1; {OWN}"),
        ({"prompt": ["a", "b"], "id": [7.0, None]}, f", row 1: id is 7.0; {ID}"),
        ({"prompt": ["a", "b"], "id": ["7", None]}, f", row 1: id is '7'; {ID}"),
        ({"prompt": ["a", "b"], "weight": [1.0, float("nan")]}, f", row 2: weight is nan; {WEIGHT}"),
        ({"prompt": ["a", "b"], "metadata": ["", "{"]}, ", row 2: metadata is not JSON: Expecting property name*"),
        (
            {"prompt": ["a"], "day": [date(2026, 1, 2)]},
            f", row 1: day is datetime.date(2026, 1, 2), {PLAIN}: Object of type date is not JSON serializable*",
        ),
        ({"text": ["a"], "id": [1]}, ", schema: there is no column 'prompt'; the columns are 'text', 'id'"),
        ({"prompt": pyarrow.array([], pyarrow.string())}, " holds no prompt; give at least one"),
    ],
)
def test_b53_a_wrong_row_of_parquet_is_refused_by_its_number(
    tmp_path: Path, columns: dict[str, Any], complaint: str
) -> None:
    parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    assert_refused(tmp_path, "p.parquet", (tmp_path / "p.parquet").read_bytes(), complaint)


@pytest.mark.parametrize("cut", [0, 10, 100])
def test_a_parquet_file_that_cannot_be_read_is_refused(tmp_path: Path, cut: int) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), tmp_path / "p.parquet")
    content = (tmp_path / "p.parquet").read_bytes()[:cut]
    assert_refused(tmp_path, "p.parquet", content, ": this cannot be read as Parquet: Parquet *")


def test_a_broken_page_and_missing_pyarrow_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), tmp_path / "p.parquet")
    content = bytearray((tmp_path / "p.parquet").read_bytes())
    content[4:30] = b"\xff" * 26
    assert_refused(tmp_path, "p.parquet", bytes(content), ": this cannot be read as Parquet: *")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert_refused(
        tmp_path, "p.parquet", bytes(content),
        ": reading .parquet takes pyarrow, which is not installed; pip install pyarrow, or give a .jsonl file",
    )  # fmt: skip


def test_a_file_of_5000_prompts_opens_at_once(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {i}", "id": i + 7, "weight": 1 + i % 3, "text": str(i)} for i in range(5000)]
    (tmp_path / "p.txt").write_text("\n".join(row["prompt"] for row in rows))
    (tmp_path / "p.jsonl").write_bytes(json_lines(rows))
    lines = [",".join(map(str, row.values())) for row in rows]
    (tmp_path / "p.csv").write_text("\n".join(["prompt,id,weight,text", *lines]))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    fingerprints = []
    for suffix in ("txt", "jsonl", "csv", "parquet"):
        start = time.process_time()
        fingerprints.append(PromptFile(tmp_path / f"p.{suffix}", 0).fingerprint)
        assert time.process_time() - start < 1
    assert len(set(fingerprints)) == 2  # all but the plain text hold the same


def test_a_glyph_prompt_says_what_its_pictures_show() -> None:
    full = glyph_prompt(3, glyphs.Caption(7, "red", "white", "sans"))
    assert full == Prompt(
        3, "the number 07 in red on white, sans font", {"text": "07", "colours": ["#cd141e", "#ffffff"]}
    )
    assert glyph_prompt(4, glyphs.Caption(42)).metadata == {"text": "42", "colours": []}
    assert glyph_prompt(5, glyphs.Caption(42, paper="pink")).metadata["colours"] == ["#ffafc8"]
    for prompt in GlyphCaptions("train", 0).prompts(range(40, 60)):
        assert prompt == glyph_prompt(prompt.id, glyphs.parse_caption(prompt.text))
