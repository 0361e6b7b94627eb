"""Conditions of known prompts, encoded once: the text encoders, often the largest single cost, are freed before
training, and what they said stays on the host, and on disk where a folder is given."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigmazero.models.base import FlowModel
from sigmazero.records import Conditioning
from sigmazero.tensors import read_tensors, write_tensors


class ConditionsFolder:
    """Conditions on disk, a file a text: ``PATH/FINGERPRINT/SHA256 OF THE TEXT.safetensors``.

    A file has the fields of one row, in their dtypes, and says in its metadata what it is and the hash of its content.
    Names are hashes, so no text leads out of the folder. Files are written aside and renamed: neither a kill nor two
    processes at once leave a part of one.

    Args:
        fingerprint: of what encodes, as ``encoder_fingerprint``.
    Raises:
        ValueError: the path is a file.
    """

    def __init__(self, path: str | Path, fingerprint: str) -> None:
        if Path(path).is_file():
            raise ValueError(
                f"data.conditions_cache: {path} is a file; name a folder, which holds safetensors that a run wrote"
            )
        self._folder, self._fingerprint = Path(path) / fingerprint, fingerprint
        self._read: dict[str, Conditioning | None] = {}

    @classmethod
    def supplied(cls, path: str | Path, family: str, dtype: str) -> ConditionsFolder:
        """What was encoded elsewhere, where there is no encoder whose fingerprint could be compared.

        Raises:
            ValueError: it is of no encoder of this family and precision, or of several.
        """
        found = sorted(folder.name for folder in Path(path).glob(f"{family}-{dtype}-*") if folder.is_dir())
        if len(found) != 1:
            raise ValueError(
                f"data.conditions_cache: {path} has conditions of {len(found)} text encoders of {family} in {dtype}, "
                "and model.path has none to tell which; leave exactly one folder in it"
            )
        return cls(path, found[0])

    def lacking(self, texts: Sequence[str]) -> list[str]:
        """Those of some texts, and of the negative one, that have no condition here."""
        return [text for text in dict.fromkeys(["", *texts]) if self.read(text) is None]

    def read(self, text: str) -> Conditioning | None:
        """The condition of a text, on the host, one row; None where there is none.

        A file that was cut off, changed, or written for something else is named on stderr, and counts as none. Each is
        read once.
        """
        if text not in self._read:
            self._read[text] = self._read_file(text)
        return self._read[text]

    def _read_file(self, text: str) -> Conditioning | None:
        path = self._file(text)
        if not path.is_file():
            return None
        try:
            fields, said = read_tensors(path)
        except ValueError as error:
            return _warned(str(error))
        if said != self._said(text, fields):
            return _warned(f"{path} does not hold what this text encoder says of {text[:60]!r}")
        return Conditioning({name: value.clone() for name, value in fields.items()})  # they were views of the file

    def write(self, text: str, condition: Conditioning) -> None:
        """Keeps the condition of a text, one row.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder) as aside:  # of this process alone
            written = Path(aside) / "condition"
            write_tensors(written, condition.fields, self._said(text, condition.fields))
            os.replace(written, self._file(text))
        self._read[text] = condition

    def _file(self, text: str) -> Path:
        return self._folder / f"{_text_hash(text)}.safetensors"

    def _said(self, text: str, fields: Mapping[str, Tensor]) -> dict[str, str]:
        return {"encoder": self._fingerprint, "text": json.dumps(text), "content": _content_hash(fields)}


class KnownPrompts:
    """A family whose ``encode`` looks up what was encoded before; everything else is the family's own.

    Args:
        model: a family with text encoders, which ``free_encoders`` drops.
    """

    def __init__(self, model: FlowModel) -> None:
        self._model: Any = model
        self._known: dict[str, Conditioning] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prepare(
        self,
        texts: Sequence[str],
        after: Callable[[int], None] = lambda done: None,
        cache: ConditionsFolder | None = None,
    ) -> None:
        """Encodes each text and the negative prompt once, and frees the encoders.

        Args:
            after: gets the count so far.
            cache: conditions on disk; what it holds is not encoded again, and what is new is added.
        """
        for done, text in enumerate(dict.fromkeys(["", *texts]), 1):
            kept = None if cache is None else cache.read(text)
            self._known[text] = self._encoded(text) if kept is None else kept
            if cache is not None and kept is None:
                cache.write(text, self._known[text])
            after(done)
        self._model.free_encoders()

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Conditions of prompts, a row each, on the host.

        Raises:
            ValueError: a prompt was not prepared.
        """
        unknown = next((text for text in prompts if text not in self._known), None)
        if unknown is not None:
            raise ValueError(f"prompt {unknown!r} was not encoded before the text encoders were freed")
        return Conditioning.cat([self._known[text] for text in prompts] or [self._known[""].take([])])

    def _encoded(self, text: str) -> Conditioning:
        encoded = self._model.encode([text])
        return Conditioning({name: value.cpu() for name, value in encoded.fields.items()})


def _warned(problem: str) -> None:
    print(f"warning: data.conditions_cache: {problem}; it is left out", file=sys.stderr)


def encoder_fingerprint(pipeline: Path, family: Path, dtype: str) -> str:
    """Family, precision, and a hash of all that a text's condition follows from: ``sd3-bfloat16-2f9c...``.

    Args:
        pipeline: the folder whose text encoders and tokenizers count, with every file.
        family: the source of the family, which has the templates, lengths and layers that are read; some of them are
            the libraries', whose versions count too.
        dtype: in which the encoders run.
    """
    libraries = [f"{name} {version(name)}\n" for name in ("diffusers", "transformers")]
    digest = hashlib.sha256("".join([f"{dtype}\n", *libraries]).encode())
    digest.update(_file_hash(family))
    for path in sorted(_encoder_files(pipeline)):
        digest.update(os.fsencode(path.relative_to(pipeline)) + b"\0" + _file_hash(path))
    return f"{family.stem}-{dtype}-{digest.hexdigest()[:32]}"


def _encoder_files(pipeline: Path) -> Iterator[Path]:
    for part in pipeline.iterdir():
        if part.name.startswith(("text_encoder", "tokenizer")):
            yield from (path for path in part.rglob("*") if path.is_file())


def _file_hash(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.digest()


def _content_hash(fields: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(fields):
        value = fields[name].contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()  # a shell may pass on other than UTF-8
