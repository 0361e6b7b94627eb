"""Prompt streams and captioned pictures, addressed by the global sample index: there is no position to save.

A prompt file is read by its suffix: ``.jsonl`` (an object a line), ``.csv`` (a header row) and ``.parquet`` know the
keys ``prompt``, ``id``, ``weight`` and ``metadata``, and put all others into the metadata; any other file is plain
text, one prompt a line. A folder of pictures has its captions in ``captions.jsonl`` or in a text beside each picture.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from sigmazero import glyphs, seeds
from sigmazero.config import DataConfig
from sigmazero.records import Prompt

SHIPPED = ("shipped", "shipped_text")  # prompts for trying things out; the latter those that name a text in quotes
_SHIPPED_FILE = Path(__file__).parent / "assets" / "prompts.txt"
_KNOWN = ("prompt", "id", "weight", "metadata")
_LARGEST_ID = 2**63 - 1  # ids go into int64 tensors
_canonical = json.JSONEncoder(sort_keys=True, ensure_ascii=False, allow_nan=False).encode


class PromptStream(Protocol):
    """Endless prompts: a pure function of the sample index."""

    def prompts(self, samples: Sequence[int]) -> list[Prompt]: ...


class PictureStream(Protocol):
    """Endless captioned pictures: a pure function of the sample index."""

    def pictures(self, samples: Sequence[int]) -> tuple[Tensor, list[Prompt]]:
        """Pictures fp32 ``[b, 3, H, W]`` in [0, 1], and their captions."""
        ...


class _Passes:
    """Rows of a list, one a sample: every pass shows each once, in an order of its own."""

    def __init__(self, length: int, seed: int) -> None:
        self._length, self._seed = length, seed
        self._order: tuple[int, list[int]] = (-1, [])  # the pass that was last asked for, only to be faster

    def row(self, sample: int) -> int:
        epoch, position = divmod(sample, self._length)
        if self._order[0] != epoch:
            order = seeds.generator(self._seed, "data_order", epoch).permutation(self._length)
            self._order = (epoch, order.tolist())
        return self._order[1][position]


def glyph_prompt(index: int, caption: glyphs.Caption) -> Prompt:
    """The prompt of a caption, with what rewards look for in its pictures.

    ``glyph_prompt(7, Caption(4, "red"))`` has the metadata ``{"text": "04", "colours": ["#cd141e"]}``.
    """
    named = [glyphs.INKS[caption.ink]] if caption.ink else []
    named += [glyphs.PAPERS[caption.paper]] if caption.paper else []
    colours = [f"#{bytes(colour).hex()}" for colour in named]
    return Prompt(index, str(caption), {"text": f"{caption.number:02d}", "colours": colours})


class GlyphCaptions:
    """Captions of the glyph set, drawn afresh for each sample; held-out combinations stay out of ``train``."""

    def __init__(self, split: glyphs.Split, seed: int) -> None:
        self._split: glyphs.Split = split
        self._seed = seed

    def prompts(self, samples: Sequence[int]) -> list[Prompt]:
        drawn = glyphs.captions_of(samples, self._split, self._seed)
        return [glyph_prompt(s, caption) for s, (caption, _) in zip(samples, drawn, strict=True)]

    def pictures(self, samples: Sequence[int]) -> tuple[Tensor, list[Prompt]]:
        """Pictures fp32 ``[b, 3, 16, 16]`` in [0, 1] with captions that are true of them."""
        drawn = glyphs.captions_of(samples, self._split, self._seed)
        pictures = torch.stack(
            [glyphs.picture_of(full, s, self._seed) for s, (_, full) in zip(samples, drawn, strict=True)]
        )
        return pictures, [glyph_prompt(s, caption) for s, (caption, _) in zip(samples, drawn, strict=True)]


class PromptFile:
    """Prompts of a file, each with its id, weight and metadata; a file smaller than a batch is repeated.

    Where all weights are equal, every pass shows each prompt once, in an order of its own. Where they are not, each
    sample draws its prompt by weight, independently of all others.

    Args:
        path: of the file, or one of ``SHIPPED``.
    Raises:
        ValueError: there is no such file, or it holds no prompt, or a line of it is wrong; the message names the line.
    """

    def __init__(self, path: str | Path, seed: int) -> None:
        self.path = _SHIPPED_FILE if path in SHIPPED else Path(path)
        if not self.path.is_file():
            raise ValueError(
                f"data.prompts: there is no prompt file {path}; give 'glyphs', {', '.join(map(repr, SHIPPED))} or a "
                ".txt, .jsonl, .csv or .parquet file"
            )
        self._lines = [line for line in _read(self.path) if path != "shipped_text" or '"' in line.prompt.text]
        content = [[line.prompt.id, line.prompt.text, line.weight, line.prompt.metadata] for line in self._lines]
        self.fingerprint = hashlib.sha256(_canonical(content).encode()).hexdigest()[:16]
        self._cumulative = _cumulative([line.weight for line in self._lines])
        self._seed, self._passes = seed, _Passes(len(self._lines), seed)

    def prompts(self, samples: Sequence[int]) -> list[Prompt]:
        drawn = [self._lines[index].prompt for index in self._indices(samples)]
        # A reward that changes the metadata it was given must not change what the next draw gives.
        return [replace(prompt, metadata=dict(prompt.metadata)) for prompt in drawn]

    def all(self) -> list[Prompt]:
        """Every prompt, in the order of the file."""
        return [line.prompt for line in self._lines]

    def _indices(self, samples: Sequence[int]) -> list[int]:
        if self._cumulative is None:
            return [self._passes.row(s) for s in samples]
        # Step 0 of this stream is the order of a pass.
        draws = seeds.uniform(self._seed, "data_order", samples, steps=1).numpy()
        return np.searchsorted(self._cumulative, draws * self._cumulative[-1], side="right").tolist()

    def check(self, check_prompt: Callable[[Prompt], None]) -> None:
        """Shows every distinct prompt once, so that one that cannot be used is found before training.

        Raises:
            ValueError: ``check_prompt`` raised it; the message names the file, the line and what is wrong.
        """
        checked: set[str] = set()
        for place, prompt, _ in self._lines:
            content = _canonical([prompt.text, prompt.metadata])
            if content not in checked:
                checked.add(content)
                with _at(self.path, place):
                    check_prompt(prompt)


class PictureFolder:
    """Pictures (.png, .jpg, .jpeg, .webp) anywhere in a folder, with captions; fewer than a batch are repeated.

    ``captions.jsonl`` in the folder has a line ``{"file": "a.png", "prompt": "..."}`` a caption; a picture may have
    several. Where there is no such file, the caption of ``a.png`` is the text in ``a.txt`` beside it. Every pass shows
    each caption with its picture once, in an order of its own. Each picture is read once at the start.

    Raises:
        ValueError: there is no such folder or no picture in it, a picture cannot be read or has no caption, a caption
            is wrong or of no picture, or a file is a link out of the folder; the message names the file and the line.
    """

    def __init__(self, path: str | Path, seed: int) -> None:
        root = Path(path)
        if not root.is_dir():
            raise ValueError(f"data.pictures: there is no folder {path}; give one of pictures with captions")
        self._items = _captioned(root)
        digests = {item.file: _digest(root / item.file) for item in self._items}
        content = [[item.file, item.prompt.text, digests[item.file]] for item in self._items]
        # File names need not be UTF-8.
        self.fingerprint = hashlib.sha256(_canonical(content).encode(errors="surrogateescape")).hexdigest()[:16]
        self._root, self._passes = root, _Passes(len(self._items), seed)
        self._size: tuple[int, int] | None = None

    def fit(self, height: int, width: int) -> None:
        """Sets the size of ``pictures``, which only the model knows: it is loaded after the folder was checked."""
        self._size = (height, width)

    def prompts(self, samples: Sequence[int]) -> list[Prompt]:
        return [self._items[self._passes.row(s)].prompt for s in samples]

    def pictures(self, samples: Sequence[int]) -> tuple[Tensor, list[Prompt]]:
        """Pictures fp32 ``[b, 3, H, W]`` in [0, 1] of the size of ``fit``, and their captions.

        Each is resized (Lanczos) so that it just covers that size, and the middle of it is kept.

        Raises:
            ValueError: a picture cannot be read any more.
        """
        assert self._size is not None, "fit() was not called"
        items = [self._items[self._passes.row(s)] for s in samples]
        return torch.stack([_fitted(self._root / item.file, *self._size) for item in items]), self.prompts(samples)

    def all(self) -> list[Prompt]:
        """Every caption, in the order of ``captions.jsonl`` or of the pictures' names."""
        return [item.prompt for item in self._items]


def open_prompts(config: DataConfig, seed: int) -> PromptStream:
    """The prompt stream of a recipe; where it names a folder of pictures, their captions.

    Raises:
        ValueError: as ``PromptFile`` and ``PictureFolder``.
    """
    if config.pictures is not None:
        return PictureFolder(config.pictures, seed)
    return GlyphCaptions("train", seed) if config.prompts == "glyphs" else PromptFile(config.prompts, seed)


class _Line(NamedTuple):
    """One prompt of a file. ``_Line("line 3", Prompt(7, "the number 42"), 1.0)``."""

    place: str  # "line 3", or "row 3" of a parquet file; both count from 1
    prompt: Prompt
    weight: float


_Records = Iterator[tuple[str, dict[str, Any]]]  # places, and values by key


@contextlib.contextmanager
def _at(path: Path, place: str, setting: str = "data.prompts") -> Generator[None]:
    """Puts the file and the line before the message of what goes wrong inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{setting}: {path}, {place}: {error}") from None


def _read(path: Path) -> list[_Line]:
    lines: list[_Line] = []
    places: dict[int, str] = {}
    for place, record in _READERS.get(path.suffix.lower(), _read_text)(path):
        with _at(path, place):
            line = _line(place, record, index=len(lines))
            first = places.setdefault(line.prompt.id, place)
            if first != place:
                raise ValueError(
                    f"id {line.prompt.id} is already that of {first}; an id names a prompt, so give each its own "
                    "(a prompt without one gets its index in the file, from 0)"
                )
        lines.append(line)
    if not lines:
        raise ValueError(f"data.prompts: {path} holds no prompt; give at least one")
    return lines


def _line(place: str, record: dict[str, Any], index: int) -> _Line:
    """Checks what a reader found on a line; a key that is missing or null has its default."""
    text, given_id, given_weight = (record.get(key) for key in ("prompt", "id", "weight"))
    if text is None:
        raise ValueError("there is no 'prompt'; give its text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"prompt is {_short(text)}; it must be text that is not blank")
    _check_plain("prompt", text)
    own_id = index if given_id is None else given_id
    if type(own_id) is not int or not 0 <= own_id <= _LARGEST_ID:
        raise ValueError(f"id is {_short(own_id)}; it must be an integer from 0 to 2**63 - 1")
    weight = 1.0 if given_weight is None else given_weight
    if type(weight) not in (int, float) or not 0 < weight <= sys.float_info.max:
        raise ValueError(f"weight is {_short(weight)}; it must be a finite number above 0")
    return _Line(place, Prompt(own_id, text.strip(), _metadata(record)), float(weight))


def _metadata(record: dict[str, Any]) -> dict[str, Any]:
    """The ``metadata`` of a record and all that has no meaning here, in one."""
    given = {} if record.get("metadata") is None else record["metadata"]
    if not isinstance(given, dict):
        raise ValueError(f"metadata is {_short(given)}; it must be an object, for example {{'text': '42'}}")
    others = {key: value for key, value in record.items() if key not in _KNOWN}
    for key in others:
        if key in given:
            raise ValueError(f"{key!r} is given both by itself and in metadata; give it once")
    merged = {**given, **others}
    for key, value in merged.items():
        _check_plain(key, value)
    return merged


def _check_plain(key: str, value: Any) -> None:
    try:
        _canonical({key: value}).encode()
    except (TypeError, ValueError) as error:  # a date, nan, half of a surrogate pair
        raise ValueError(f"{key} is {_short(value)}, which is no plain JSON value: {error}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _cumulative(weights: list[float]) -> np.ndarray | None:
    """Cumulative weights fp64 ``[n]``, the largest weight being 1; None where all are equal."""
    if len(set(weights)) == 1:
        return None
    return np.cumsum(np.array(weights) / max(weights))  # scaled, so that no sum overflows


def _text(path: Path, setting: str = "data.prompts") -> str:
    """The text of a file, its line ends untouched, without a byte-order mark."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = len((error.object[: error.start] + b"x").splitlines())
        raise ValueError(
            f"{setting}: {path}, line {number}: this is not UTF-8 text ({error.reason}); save the file as UTF-8"
        ) from None


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a key that is given twice Python would silently keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} is given twice in one object; give it once")
    return found


def _read_text(path: Path) -> _Records:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            yield f"line {number}", {"prompt": line}


def _read_jsonl(path: Path, setting: str = "data.prompts") -> _Records:
    # Not splitlines: JSON strings may hold U+2028 and other separators as they are.
    for number, line in enumerate(io.StringIO(_text(path, setting), newline=None), 1):
        if not line.strip():
            continue
        with _at(path, f"line {number}", setting):
            record = _json("the line", line)
            if not isinstance(record, dict):
                raise ValueError(f'{_short(record)} is no JSON object; write {{"prompt": "..."}}')
        yield f"line {number}", record


def _read_csv(path: Path) -> _Records:
    rows = _csv_rows(path)
    place, columns = next(rows, ("", []))
    columns = [column.strip() for column in columns]
    if columns:
        with _at(path, place):
            _check_columns(columns)
    for place, cells in rows:
        with _at(path, place):
            record = _csv_record(columns, cells)
        yield place, record


def _csv_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Records with the lines that they start on: one with a line break in quotes takes several."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    while True:
        place = f"line {reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(
                f"data.prompts: {path}, {place}: not CSV: {error}; close every quote, and double one inside quotes"
            ) from None
        if cells is None:
            return
        if cells:
            yield place, cells


def _csv_record(columns: list[str], cells: list[str]) -> dict[str, Any]:
    if len(cells) != len(columns):
        raise ValueError(
            f"{len(cells)} fields, but the header names {len(columns)}; put a field that holds a comma in quotes"
        )
    record: dict[str, Any] = dict(zip(columns, cells, strict=True))
    for key, parse in (("id", _integer), ("weight", _number), ("metadata", _object)):
        if key in record:
            record[key] = parse(record[key].strip())
    return record


def _check_columns(columns: Sequence[str]) -> None:
    for column in columns:
        if columns.count(column) > 1:
            raise ValueError(f"the column {column!r} is named twice; give it once")
    if "prompt" not in columns:
        raise ValueError(f"there is no column 'prompt'; the columns are {', '.join(map(repr, columns))}")


# A cell is None where it is blank, and stays text where it is wrong, for ``_line`` to refuse.
def _integer(cell: str) -> int | str | None:
    return int(cell) if cell.isascii() and cell.isdigit() else cell or None


def _number(cell: str) -> float | str | None:
    try:
        return float(cell)
    except ValueError:
        return cell or None


def _object(cell: str) -> Any:
    return _json("metadata", cell) if cell.strip() else None


def _read_parquet(path: Path) -> _Records:
    for number, record in enumerate(_parquet_rows(path), 1):
        if isinstance(record.get("metadata"), str):
            with _at(path, f"row {number}"):
                record["metadata"] = _object(record["metadata"])
        yield f"row {number}", record


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ValueError(
            f"data.prompts: {path}: reading .parquet takes pyarrow, which is not installed; pip install pyarrow, or "
            "give a .jsonl file"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:  # not read_table, which takes folder names for columns
            table = file.read()
        rows = table.to_pylist(maps_as_pydicts="strict")
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"data.prompts: {path}: this cannot be read as Parquet: {reason}") from None
    with _at(path, "schema"):
        _check_columns(table.column_names)
    return rows


_READERS: dict[str, Callable[[Path], _Records]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


class _Captioned(NamedTuple):
    """A caption of a picture. ``_Captioned("cats/a.png", Prompt(0, "a red cat"))``."""

    file: str  # its path in the folder, with slashes
    prompt: Prompt


_PICTURES = "data.pictures"
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def _captioned(root: Path) -> list[_Captioned]:
    """Every caption of a folder, each of a picture that is there; no picture is without one."""
    files = sorted(p for p in root.rglob("*") if p.suffix.lower() in _SUFFIXES and not p.is_dir())
    if not files:
        raise ValueError(f"{_PICTURES}: {root} holds no picture; it takes {', '.join(_SUFFIXES)}")
    for path in files:
        _check_inside(root, path)
    listing = root / "captions.jsonl"
    if not listing.is_file():
        return [_captioned_beside(root, path, index) for index, path in enumerate(files)]
    _check_inside(root, listing)
    names = [path.relative_to(root).as_posix() for path in files]
    found = _listed(listing, frozenset(names))
    bare = sorted(set(names) - {item.file for item in found})
    if bare:
        raise ValueError(f"{_PICTURES}: {root / bare[0]} has no caption; give it a line in {listing}")
    return found


def _check_inside(root: Path, path: Path) -> None:
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise ValueError(f"{_PICTURES}: {path} is a link to a file outside of {root}; put the file itself there")


def _captioned_beside(root: Path, path: Path, index: int) -> _Captioned:
    text = path.with_suffix(".txt")
    if not text.is_file():
        raise ValueError(f"{_PICTURES}: {path} has no caption; write one into {text}, or all into captions.jsonl")
    _check_inside(root, text)
    with _at(text, "line 1", _PICTURES):
        line = _line("line 1", {"prompt": _text(text, _PICTURES)}, index)
    return _Captioned(path.relative_to(root).as_posix(), line.prompt)


def _listed(listing: Path, names: Collection[str]) -> list[_Captioned]:
    """The lines of ``captions.jsonl``. A file is only compared with ``names``: no path of a line is ever opened."""
    found: list[_Captioned] = []
    for place, record in _read_jsonl(listing, _PICTURES):
        with _at(listing, place, _PICTURES):
            others = sorted(record.keys() - {"file", "prompt"})
            if others:
                raise ValueError(f"the key {others[0]!r} would do nothing; a line has 'file' and 'prompt'")
            given = record.get("file")
            name = PurePosixPath(given).as_posix() if isinstance(given, str) else ""
            if name not in names:
                raise ValueError(f"file is {_short(given)}, which is no picture in the folder; give its path in there")
            found.append(_Captioned(name, _line(place, {"prompt": record.get("prompt")}, len(found)).prompt))
    return found


def _digest(path: Path) -> str:
    """Hash of a picture's file. It is decoded too, so that a broken one is found before training."""
    _opened(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _opened(path: Path) -> Image.Image:
    """A picture in RGB: turned as its EXIF tag says, on white where it is transparent, the first of moving ones."""
    try:
        with Image.open(path, formats=("PNG", "JPEG", "WEBP")) as image:
            upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith(("I", "F")):  # Pillow would make all but the darkest of it white
            raise ValueError("it is grey with more than 8 bits; save it with 8")
        if upright.has_transparency_data:
            layer = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        return upright.convert("RGB")
    except Exception as error:  # what decoders raise of broken bytes is not a closed list
        reason = " ".join(str(error).split())
        raise ValueError(f"{_PICTURES}: {path} cannot be read as a picture: {reason}") from None


def _fitted(path: Path, height: int, width: int) -> Tensor:
    """fp32 ``[3, height, width]`` in [0, 1]."""
    fitted = ImageOps.fit(_opened(path), (width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).float() / 255
