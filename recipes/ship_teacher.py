"""Makes the shipped teacher, or the half-trained model, of a finished run: its averaged weights in half precision.

run: python recipes/ship_teacher.py runs/glyph_teacher sigmazero/assets/glyph_teacher.safetensors
     python recipes/ship_teacher.py runs/glyph_half_trained sigmazero/assets/glyph_half_trained.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from sigmazero.launch.local import build
from sigmazero.launch.reopen import restore
from sigmazero.models import glyph
from sigmazero.training.folder import RunFolder, read_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    built = build(read_config(args.run))
    done = restore(built, RunFolder(args.run))
    model = built.roles.model
    assert isinstance(model, glyph.GlyphModel)
    weights = {**model.net.state_dict(), **built.roles.parameters("student_ema")}
    glyph.save(args.output, model, weights, torch.float16)
    print(f"{args.output}: averaged weights after {done} cycles, {args.output.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
