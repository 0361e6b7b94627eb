"""A diffusers pipeline folder, or a repository of the hub: its parts read so that a mistake is one clear line.

Only safetensors are read and no code of a folder runs. What families share of tiny random pipelines is here too.
"""

from __future__ import annotations

import contextlib
import math
import re
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from sigmazero import seeds

ENCODERS = ("text_encoder", "tokenizer")  # how the names of the parts begin that make conditions of texts


@dataclass(frozen=True)
class PipelineFolder:
    """An opened pipeline. ``index`` is its ``model_index.json``, ``parts`` the names of what it holds.

    ``open_pipeline("/data/sd3", "sd3", ["StableDiffusion3Pipeline"], SD3_PARTS).weights("vae", AutoencoderKL)``.
    """

    path: str
    index: Mapping[str, Any]
    parts: frozenset[str]

    @property
    def is_local(self) -> bool:
        """A folder: nothing is asked of the hub."""
        return Path(self.path).is_dir()

    def read(self, part: str, read: Callable[..., Any], **options: Any) -> Any:
        """What ``read``, a ``from_pretrained`` or ``load_config``, makes of a part.

        Raises:
            ValueError: it cannot be read.
        """
        try:
            return read(self.path, subfolder=part, local_files_only=self.is_local, **options)
        except Exception as error:  # the libraries raise whatever a broken file made them trip over
            raise ValueError(f"model.path: {part} of {self.path} cannot be read: {one_line(error)}") from None

    def config(self, part: str, kind: Any, needed: Sequence[str]) -> Mapping[str, Any]:
        """The configuration of a network, without its weights.

        Raises:
            ValueError: it cannot be read, or an entry of ``needed`` is not in it.
        """
        config = self.read(part, kind.load_config)
        missing = [name for name in needed if config.get(name) is None]
        if missing:
            raise ValueError(f"model.path: the config of {part} of {self.path} does not say {', '.join(missing)}")
        return config

    def weights(self, part: str, kind: Any, **options: Any) -> Any:
        """A network whose every weight came from safetensors: the libraries start others at random and only warn.

        Raises:
            ValueError: it cannot be read, or weights of its config are missing or of another shape.
        """
        make = _make.get()
        if make is not None:
            return make(self, part, kind, **options)
        module, found = self.read(part, kind.from_pretrained, use_safetensors=True, output_loading_info=True, **options)
        lost = sorted(str(key) for key in (*found["missing_keys"], *found["mismatched_keys"]))
        if lost:
            raise ValueError(f"model.path: the weights of {part} of {self.path} lack {', '.join(lost[:4])}")
        return module


_make: ContextVar[Callable[..., Any] | None] = ContextVar("make", default=None)


@contextlib.contextmanager
def networks_from(make: Callable[..., nn.Module]) -> Generator[None]:
    """Inside, ``make(folder, part, kind, **options)`` is the network that ``PipelineFolder.weights`` would read."""
    before = _make.set(make)
    try:
        yield
    finally:
        _make.reset(before)


def read_index(path: str) -> Mapping[str, Any]:
    """``model_index.json`` of a folder, or of a hub id where there is no such folder.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    local = Path(path).is_dir()
    if not local and not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise ValueError(f"model.path: there is no folder {path}; set a diffusers pipeline folder or a hub id")
    try:
        index: Any = DiffusionPipeline.load_config(path, local_files_only=local)
    except Exception as error:  # as in PipelineFolder.read; of the hub's client too
        raise ValueError(f"model.path: {path} has no readable model_index.json: {one_line(error)}") from None
    return index if isinstance(index, dict) else {}


def has_encoders(path: str) -> bool:
    """Whether a folder has a part that makes conditions of texts; of a hub id True."""
    return not Path(path).is_dir() or any(p.is_dir() and p.name.startswith(ENCODERS) for p in Path(path).iterdir())


def open_pipeline(
    path: str, family: str, pipelines: Sequence[str], needed: Sequence[str], *, encoders: bool = True
) -> PipelineFolder:
    """Opens a folder, or a hub id where there is no such folder, of a pipeline class that a family reads.

    Args:
        needed: parts that the family cannot do without.
        encoders: False does without those that make conditions of texts; they count as absent.
    Raises:
        ValueError: there is none, it is of another class, or a part is missing.
    """
    index = read_index(path)
    name, local = index.get("_class_name"), Path(path).is_dir()
    if name not in pipelines:
        raise ValueError(
            f"model.path: {path} is {name or 'no pipeline'}, and model.family {family} reads a "
            f"{' or '.join(pipelines)}; set the other family or another folder"
        )
    skipped = () if encoders else ENCODERS
    named = (part for part, kind in index.items() if isinstance(kind, list) and kind[0] is not None)
    parts = frozenset(part for part in named if not part.startswith(skipped))
    wanted = {part for part in needed if not part.startswith(skipped)}
    missing = sorted(wanted - parts) or [p for p in sorted(parts) if local and not (Path(path) / p).is_dir()]
    if missing:
        raise ValueError(f"model.path: {path} lacks {', '.join(missing)}; set the folder of the whole pipeline")
    return PipelineFolder(path, index, parts)


def one_line(error: Exception) -> str:
    """An error of a library as part of a message of one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def scheduler_shift(config: Mapping[str, Any], num_tokens: int) -> float:
    """The static shift of a flow-matching Euler scheduler's config, or ``e^mu`` where it asks for a dynamic one: mu is
    linear in the number of tokens (math §2)."""
    if not config["use_dynamic_shifting"]:
        return float(config["shift"])
    few, many = config["base_image_seq_len"], config["max_image_seq_len"]
    share = (num_tokens - few) / (many - few)
    return math.exp(config["base_shift"] + share * (config["max_shift"] - config["base_shift"]))


_TABLES = ("embedding.weight", "shared.weight", "attention_bias.weight")


@torch.no_grad()
def fill(module: nn.Module, seed: int, number: int) -> None:
    """Weights of a tiny network, so large that every input matters: unit gain, gains about 1, small biases, nothing
    zero. A function of ``seed`` and ``number``, the network's own."""
    for index, (name, value) in enumerate(module.named_parameters()):
        noise = seeds.normal(seed, "weight_init", [number], value.shape, 0, index)[0]
        if value.ndim > 1:
            value.copy_(noise * (1.0 if name.endswith(_TABLES) else value[0].numel() ** -0.5))
        else:
            value.copy_(0.2 * noise + (1.0 if name.endswith("weight") else 0.0))


def printable() -> list[str]:
    """Characters that are tokens of a tiny tokenizer: all of ASCII that can be seen."""
    return sorted(set(string.printable) - set(string.whitespace))


def tiny_clip_tokenizer(padding: str) -> Any:
    """Every printable character is a token, with and without the end of a word; the special ones last, as in CLIP."""
    from transformers import CLIPTokenizer

    letters = printable()
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return CLIPTokenizer(vocabulary, [], pad_token=padding, model_max_length=77)
