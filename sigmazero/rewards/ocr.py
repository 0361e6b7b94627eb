"""Whether the wanted text stands in the picture: the PP-OCR recogniser that ships in the rapidocr wheel.

It is called without rapidocr's own detector, which misses pictures of a few letters and takes 100 times as long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from sigmazero.config import OcrRewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards.base import Layout, Reward, Values

HEIGHT = 48  # pixels, what the network was trained on
STRIDE = 8  # pixels of width that one output position stands for
WIDEST = 320
BATCH, ROWS = 32, 8  # rows a run, and what their number is padded to: single rows take kernels that round differently
WORST = -20.0  # floor of a log-likelihood: text that cannot be there must not outweigh every other sample
BLANK = 0  # the CTC class that stands for no character


class Recogniser:
    """Reads one line of text a picture. ``load_recogniser().read(pictures)`` gives ``["42", "07"]``."""

    def __init__(self, session: Any, characters: Sequence[str]) -> None:
        self._session = session
        self._characters = ["", *characters, " "]  # by class; the blank reads as nothing
        self._classes = {character: i for i, character in enumerate(self._characters) if i != BLANK}

    def read(self, pictures: Tensor) -> list[str]:
        """The texts of pictures, fp32 ``[b, 3, H, W]`` in [0, 1]."""
        return [self.decode(probabilities) for probabilities in self.probabilities(pictures)]

    def probabilities(self, pictures: Tensor) -> Iterator[Tensor]:
        """fp32 ``[T, C]`` of each of the pictures ``[b, 3, H, W]``: T positions from left to right, C classes.

        A picture's values do not depend on what else is in the batch.
        """
        name = self._session.get_inputs()[0].name
        for chunk in pictures.split(BATCH):
            padded = torch.arange(-(-len(chunk) // ROWS) * ROWS).clamp(max=len(chunk) - 1)
            (rows,) = self._session.run(None, {name: _fit(chunk)[padded].numpy()})
            yield from torch.from_numpy(rows[: len(chunk)])

    def decode(self, probabilities: Tensor) -> str:
        """Greedy CTC over ``[T, C]``: the best class of each position, repeats once, blanks left out."""
        return "".join(self._characters[best] for best, _ in groupby(probabilities.argmax(-1).tolist()))

    def classes(self, text: str) -> list[int] | None:
        """The class of each character, or None where the network does not know one."""
        found = [self._classes.get(character) for character in text]
        known = [i for i in found if i is not None]
        return known if len(known) == len(found) else None


def _fit(pictures: Tensor) -> Tensor:
    """Pictures in [0, 1] as the network takes them: 48 high, as wide as their shape asks, in [-1, 1]."""
    height, width = pictures.shape[-2:]
    wide = min(max(STRIDE * round(HEIGHT * width / height / STRIDE), HEIGHT), WIDEST)
    resized = interpolate(pictures, size=(HEIGHT, wide), mode="bilinear", align_corners=False, antialias=True)
    return (resized - 0.5) / 0.5


def load_recogniser() -> Recogniser:
    """The recogniser of the installed rapidocr wheel, on one CPU thread.

    Raises:
        ValueError: onnxruntime, rapidocr or its recogniser is not installed.
    """
    try:
        import onnxruntime

        package = distribution("rapidocr")
    except (ImportError, PackageNotFoundError):
        raise ValueError("rewards: kind ocr needs the extra: pip install 'sigmazero[ocr]'") from None
    files = sorted(Path(str(package.locate_file("rapidocr/models"))).glob("*rec*.onnx"))
    if not files:
        raise ValueError(
            f"rewards: kind ocr finds no recogniser (models/*rec*.onnx) in rapidocr {package.version}; "
            "pip install 'sigmazero[ocr]' brings a version that ships one"
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(files[0]), options, providers=["CPUExecutionProvider"])
    return Recogniser(session, session.get_modelmeta().custom_metadata_map["character"].split("\n"))


def wanted_text(prompt: str, metadata: Mapping[str, Any]) -> str | None:
    """``metadata["text"]``, else what stands in the prompt's first pair of double quotes; None: there is no text."""
    quoted = re.search('"([^"]*)"', prompt)
    text = metadata.get("text", quoted[1] if quoted else None)
    return text if isinstance(text, str) and text.strip() else None


def normalised(text: str) -> str:
    """Text as it is compared: no spaces, lower case, and o as 0, which fonts and readers confuse."""
    return "".join(text.split()).lower().replace("o", "0")


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: the fewest insertions, deletions and replacements that make ``b`` of ``a``."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def edit_score(read: str, wanted: str) -> float:
    """The OCR reward of Flow-GRPO (arXiv 2505.05470), in [0, 1]: 1 where ``wanted`` stands anywhere in ``read``, else
    the share of ``wanted`` that edits leave alone. Both are normalised first."""
    read, wanted = normalised(read), normalised(wanted)
    if wanted in read:
        return 1.0
    return 1 - min(edit_distance(read, wanted), len(wanted)) / len(wanted)


def ctc_log_likelihood(log_probs: Tensor, labels: Sequence[int]) -> float:
    """The log-probability that CTC gives a text, summed over its alignments (Graves et al. 2006, section 4.1).

    Args:
        log_probs: ``[T, C]``, class 0 the blank; computed in fp64.
        labels: classes of the text's characters.

    Returns:
        -inf where T positions are too few for the text.
    """
    states = torch.tensor([BLANK, *(state for label in labels for state in (label, BLANK))])
    new_label = states[2:] != states[:-2]  # a path may leave out the blank between two labels that differ
    at = torch.full((len(states),), -torch.inf, dtype=torch.float64)  # log-probability of all paths that end in a state
    at[0] = 0
    for emission in log_probs.double()[:, states]:
        step = pad(at[:-1], (1, 0), value=-torch.inf)
        jump = pad(at[:-2].where(new_label, -torch.inf), (2, 0), value=-torch.inf)[: len(states)]
        at = torch.stack([at, step, jump]).logsumexp(0) + emission
    return float(at[-2:].logsumexp(0))


@dataclass
class OcrReward:
    """Scores of what the recogniser reads: ``edit`` and ``exact`` in [0, 1], ``log_likelihood`` from -20 up to 0."""

    recogniser: Recogniser
    score: Literal["edit", "exact", "log_likelihood"]
    layout: Layout = "chw_float"
    size: tuple[int, int] | None = None  # resized to what the network takes, which keeps the picture's shape

    def check(self, prompt: Prompt) -> None:
        wanted = wanted_text(prompt.text, prompt.metadata)
        if wanted is None:
            raise ValueError(
                f"prompt {prompt.id} {prompt.text!r} names no text: put it in double quotes or as a string in "
                "metadata.text"
            )
        if self.score == "log_likelihood" and self.recogniser.classes(wanted) is None:
            raise ValueError(
                f"prompt {prompt.id} wants {wanted!r}, with characters that the recogniser does not know, so there is "
                "no log_likelihood: change the text, or set score to edit or exact"
            )

    def __call__(self, pictures: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Values:
        wanted = [wanted_text(prompt, more) for prompt, more in zip(prompts, metadata, strict=True)]
        rows = self.recogniser.probabilities(pictures)
        return [None if text is None else self._one(row, text) for row, text in zip(rows, wanted, strict=True)]

    def _one(self, probabilities: Tensor, wanted: str) -> float | None:
        if self.score == "log_likelihood":
            labels = self.recogniser.classes(wanted)
            return None if labels is None else max(ctc_log_likelihood(probabilities.log(), labels), WORST)
        read = self.recogniser.decode(probabilities)
        return edit_score(read, wanted) if self.score == "edit" else float(normalised(read) == normalised(wanted))


def build(config: OcrRewardConfig, plugins: Sequence[str]) -> Reward:
    """The reward of a recipe.

    Raises:
        ValueError: as ``load_recogniser``.
    """
    return OcrReward(load_recogniser(), config.score)
