"""Trains the glyph reader that evaluation uses, on the real train split, and scores it on held-out pictures.

run: python recipes/glyph_reader.py --output sigmazero/assets/glyph_reader.safetensors
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import save_file

from sigmazero import glyphs, seeds
from sigmazero.reader import Reader, agrees, load_reader, targets

SEED = 7


def draw(split: glyphs.Split, start: int, count: int) -> tuple[torch.Tensor, list[glyphs.Caption]]:
    full = [named for _, named in glyphs.captions_of(range(start, start + count), split, SEED)]
    return glyphs.pictures_of(full, range(start, start + count), SEED), full


def train(steps: int, batch: int, lr: float) -> Reader:
    with seeds.weight_init(SEED):
        reader = Reader()
    optimizer = torch.optim.AdamW(reader.parameters(), lr=lr, weight_decay=0.05)
    for step in track(range(steps), "training the reader"):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * step / steps)) / 2
        pictures, captions = draw("train", step * batch, batch)
        noisy = pictures + 0.02 * seeds.normal(
            SEED, "train_noise", range(step * batch, (step + 1) * batch), (3, 16, 16)
        )
        wanted = targets(captions)
        scores = reader.scores(reader.features(noisy))
        loss = sum(torch.nn.functional.cross_entropy(s, wanted[:, i]) for i, s in enumerate(scores))
        assert isinstance(loss, torch.Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return reader


@torch.no_grad()
def accuracy(reader: Reader, count: int) -> float:
    """Share of held-out real pictures whose number, ink and paper are all read."""
    pictures, captions = draw("test", 0, count)
    read = reader.read(reader.features(pictures))
    return sum(agrees(r, c) for r, c in zip(read, captions, strict=True)) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reader = train(args.steps, args.batch, args.lr)
    save_file({name: value.half() for name, value in reader.state_dict().items()}, args.output)
    print(f"{args.output}: {100 * accuracy(load_reader(args.output), 8192):.2f} % of 8192 held-out pictures read right")


if __name__ == "__main__":
    main()
