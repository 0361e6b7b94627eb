"""Prompt streams and captioned pictures, addressed by the global sample index: there is no position to save."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sigmazero import glyphs, seeds
from sigmazero.config import DataConfig
from sigmazero.records import Prompt


class PromptStream(Protocol):
    """Endless prompts: a pure function of the sample index."""

    def prompts(self, samples: Sequence[int]) -> list[Prompt]: ...


class GlyphCaptions:
    """Captions of the glyph set, drawn afresh for each sample; held-out combinations stay out of ``train``."""

    def __init__(self, split: glyphs.Split, seed: int) -> None:
        self._split: glyphs.Split = split
        self._seed = seed

    def prompts(self, samples: Sequence[int]) -> list[Prompt]:
        return [Prompt(s, str(glyphs.caption_of(s, self._split, self._seed)[0])) for s in samples]

    def pictures(self, samples: Sequence[int]) -> tuple[Tensor, list[Prompt]]:
        """Pictures fp32 ``[b, 3, 16, 16]`` in [0, 1] with captions that are true of them."""
        drawn = [glyphs.caption_of(s, self._split, self._seed) for s in samples]
        pictures = torch.stack(
            [glyphs.picture_of(full, s, self._seed) for s, (_, full) in zip(samples, drawn, strict=True)]
        )
        return pictures, [Prompt(s, str(caption)) for s, (caption, _) in zip(samples, drawn, strict=True)]


class PromptFile:
    """Prompts of a text file, one a line, in a new order each pass; a file smaller than a batch is repeated.

    Raises:
        ValueError: there is no such file, it is not UTF-8 text, or it holds no prompt.
    """

    def __init__(self, path: str | Path, seed: int) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"data.prompts: there is no prompt file {path}; give 'glyphs' or a text file")
        try:
            lines = self.path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"data.prompts: {path} is not UTF-8 text ({error})") from None
        self.lines = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
        if not self.lines:
            raise ValueError(f"data.prompts: {path} holds no prompt; write one a line")
        self.fingerprint = hashlib.sha256("\n".join(line for _, line in self.lines).encode()).hexdigest()[:16]
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])

    def prompts(self, samples: Sequence[int]) -> list[Prompt]:
        return [self._prompt(s) for s in samples]

    def _prompt(self, sample: int) -> Prompt:
        epoch, position = divmod(sample, len(self.lines))
        if self._order[0] != epoch:
            order = seeds.generator(self._seed, "data_order", epoch).permutation(len(self.lines))
            self._order = (epoch, order.tolist())
        index = self._order[1][position]
        return Prompt(index, self.lines[index][1])

    def check(self, encode: object) -> None:
        """Encodes every line once, so that a prompt that the family cannot read is found before training.

        Raises:
            ValueError: names the file, the line and what is wrong.
        """
        assert callable(encode)
        for number, line in self.lines:
            try:
                encode([line])
            except ValueError as error:
                raise ValueError(f"data.prompts: {self.path}, line {number}: {error}") from None


def open_prompts(config: DataConfig, seed: int) -> PromptStream:
    """The prompt stream of a recipe.

    Raises:
        ValueError: as ``PromptFile``.
    """
    return GlyphCaptions("train", seed) if config.prompts == "glyphs" else PromptFile(config.prompts, seed)
