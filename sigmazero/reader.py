"""The reader: a small frozen classifier of number, ink and paper, for evaluation only, never a training signal.

Its features give FD-feat, a Frechet distance between sets of glyph pictures. It is not FID, and its values compare
only with values of the same reader.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sigmazero.glyphs import INKS, PAPERS, SIZE, Caption

SHIPPED = Path(__file__).parent / "assets" / "glyph_reader.safetensors"
NUM_FEATURES = 64
_CLASSES = (10, 10, len(INKS), len(PAPERS))  # tens, ones, ink, paper


class Reader(nn.Module):
    """Pictures fp32 ``[b, 3, 16, 16]`` in [0, 1] to 64 features and four sets of class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.SiLU(),
            nn.Conv2d(64, 96, 3, padding=1), nn.GroupNorm(8, 96), nn.SiLU(),
            nn.Conv2d(96, 128, 3, stride=2, padding=1), nn.GroupNorm(8, 128), nn.SiLU(),
            nn.Flatten(), nn.Linear(128 * (SIZE // 4) ** 2, 256), nn.SiLU(),
            nn.Linear(256, NUM_FEATURES),
        )  # fmt: skip
        self.heads = nn.ModuleList(nn.Linear(NUM_FEATURES, n) for n in _CLASSES)

    def features(self, pictures: Tensor) -> Tensor:
        """fp32 ``[b, 64]``."""
        return self.trunk((pictures - 0.75) / 0.25)

    def scores(self, features: Tensor) -> list[Tensor]:
        """Class scores of tens, ones, ink and paper: ``[b, 10], [b, 10], [b, 6], [b, 4]``."""
        return [head(torch.nn.functional.silu(features)) for head in self.heads]

    def read(self, features: Tensor) -> list[Caption]:
        """The most likely number, ink and paper of each picture. Style is not read."""
        best = torch.stack([s.argmax(1) for s in self.scores(features)], 1).tolist()
        inks, papers = list(INKS), list(PAPERS)
        return [Caption(10 * tens + ones, inks[ink], papers[paper]) for tens, ones, ink, paper in best]


def targets(captions: list[Caption]) -> Tensor:
    """Class indices int64 ``[b, 4]`` of captions that name everything."""
    inks, papers = list(INKS), list(PAPERS)
    rows = [(c.number // 10, c.number % 10, inks.index(c.ink or ""), papers.index(c.paper or "")) for c in captions]
    return torch.tensor(rows, dtype=torch.long)


def agrees(read: Caption, wanted: Caption) -> bool:
    """Whether everything that the caption names (number, ink, paper) was read."""
    return (
        read.number == wanted.number
        and (wanted.ink is None or read.ink == wanted.ink)
        and (wanted.paper is None or read.paper == wanted.paper)
    )


def load_reader(path: Path = SHIPPED) -> Reader:
    """The shipped reader, frozen, in fp32."""
    reader = Reader()
    reader.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return reader.eval().requires_grad_(False)
