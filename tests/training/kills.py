"""Saves that are killed: forked before each step of a save, the child takes that step's place and dies. A program."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sigmazero.training import checkpoint

STEPS: list[tuple[Any, str]] = [
    *((os, name) for name in ("fsync", "rmdir", "unlink")),
    *((Path, name) for name in ("open", "mkdir", "rename", "write_text")),
]


def tensors(cycle: int) -> dict[str, torch.Tensor]:
    """What the checkpoint of a cycle holds."""
    return {"a": torch.full((3, 2), float(cycle)), "b": torch.tensor(cycle)}


def main(folder: Path) -> int:
    """Leaves ``folder/WHICH-STEP`` as each kill leaves it; returns how many there were."""
    steps = 0

    def killed_first(inner: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **keywords: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*arguments, **keywords)

        return step

    count = 0
    for which, before, cycle in (("first", 0, 1), ("second", 1, 2)):
        for dies_at in range(1, 1000):
            place = folder / f"{which}-{dies_at:03d}"
            if before:
                checkpoint.save(place, before, tensors(before), {"cycle": before}, 1)
            child = os.fork()
            if child == 0:
                for owner, name in STEPS:
                    setattr(owner, name, killed_first(getattr(owner, name)))
                checkpoint.save(place, cycle, tensors(cycle), {"cycle": cycle}, 1)
                os._exit(0)
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
                shutil.rmtree(place)
                break
            place.mkdir(exist_ok=True)
            count += 1
    return count


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
