"""Counter-based randomness: the only place that seeds anything (math §7).

Every draw is a pure function of ``(seed, stream, sample, cycle, step)``. No rank, micro-batch, world size or
request split can change it, and there is no generator state to save. Draws are made on the host in fp32 or fp64,
so every device sees the same bits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The numbers are part of the format of a run: append, never reorder.
STREAMS: dict[str, int] = {
    "initial_noise": 0,
    "step_noise": 1,
    "exit_step": 2,
    "score_sigma": 3,
    "score_noise": 4,
    "fake_sigma": 5,
    "fake_noise": 6,
    "train_timestep": 7,
    "train_noise": 8,
    "caption_dropout": 9,
    "data_order": 10,
    "pictures": 11,
    "weight_init": 12,
    "step_window": 13,
    "bootstrap": 14,
    "row_order": 15,
    "held_out": 16,
    "captions": 17,
}

SEED_LIMIT = 2**63
# Of a Philox that has drawn nothing, as its ``state`` has it.
_FRESH: dict[str, Any] = {
    "bit_generator": "Philox", "buffer": (0,) * 4, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0,
}  # fmt: skip


def generator(seed: int, stream: str, sample: int = 0, cycle: int = 0, step: int = 0) -> np.random.Generator:
    """The generator of one draw: Philox with the ids in its counter, so that distinct ids never collide.

    The lowest counter word is left to the generator itself: 2**64 blocks a draw.

    Raises:
        ValueError: an id is negative, or the seed is outside [0, 2**63).
        KeyError: the stream is not in ``STREAMS``.
    """
    return next(generators(seed, stream, [(sample, cycle, step)]))


def generators(
    seed: int, stream: str, ids: Iterable[tuple[int, int, int]]
) -> Generator[np.random.Generator, None, None]:
    """One generator, put to each draw in turn: a new one takes ten times as long. Draw before the next is asked for.

    Args:
        ids: sample, cycle and step of each draw.
    Raises: as ``generator``.
    """
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"seed is {seed}; it must lie in [0, 2**63)")
    key, state = (seed, STREAMS[stream]), dict[str, Any]()
    start: Any = {**_FRESH, "state": state}
    philox = np.random.Philox(key=np.array(key, dtype=np.uint64))
    made = np.random.Generator(philox)
    for sample, cycle, step in ids:
        if min(sample, cycle, step) < 0:
            raise ValueError(f"ids of a draw must not be negative: sample={sample}, cycle={cycle}, step={step}")
        state |= {"counter": (0, step, cycle, sample), "key": key}
        philox.state = start
        yield made


def normal(
    seed: int,
    stream: str,
    samples: Sequence[int],
    shape: Sequence[int],
    cycles: Sequence[int] | int = 0,
    steps: Sequence[int] | int = 0,
) -> Tensor:
    """Standard normal noise, one independent draw a row: fp32 ``[len(samples), *shape]`` on the host."""
    rows = np.empty((len(samples), math.prod(shape)), dtype=np.float32)
    for row, draw in zip(rows, generators(seed, stream, _ids(samples, cycles, steps)), strict=True):
        draw.standard_normal(dtype=np.float32, out=row)
    return torch.from_numpy(rows).view(len(samples), *shape)  # pyright: ignore[reportUnknownMemberType]


def uniform(
    seed: int,
    stream: str,
    samples: Sequence[int],
    cycles: Sequence[int] | int = 0,
    steps: Sequence[int] | int = 0,
) -> Tensor:
    """Uniform numbers in [0, 1), one a row: fp64 ``[len(samples)]`` on the host."""
    rows = [draw.random() for draw in generators(seed, stream, _ids(samples, cycles, steps))]
    return torch.tensor(rows, dtype=torch.float64)


def integers(
    seed: int,
    stream: str,
    high: int,
    samples: Sequence[int],
    cycles: Sequence[int] | int = 0,
    steps: Sequence[int] | int = 0,
) -> list[int]:
    """Integers in ``[0, high)``, one a row."""
    return [int(draw.integers(high)) for draw in generators(seed, stream, _ids(samples, cycles, steps))]


@contextlib.contextmanager
def weight_init(seed: int, index: int = 0) -> Generator[None]:
    """Makes torch's own initializers a function of ``(seed, index)``; the global generator is put back afterwards."""
    state = torch.random.get_rng_state()
    torch.random.manual_seed(int(generator(seed, "weight_init", index).integers(2**31)))  # pyright: ignore[reportUnknownMemberType]
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def _ids(samples: Sequence[int], cycles: Sequence[int] | int, steps: Sequence[int] | int) -> list[tuple[int, int, int]]:
    count = len(samples)
    cycles = [cycles] * count if isinstance(cycles, int) else list(cycles)
    steps = [steps] * count if isinstance(steps, int) else list(steps)
    return [(int(a), int(b), int(c)) for a, b, c in zip(samples, cycles, steps, strict=True)]
