"""Counter-based randomness: the only place that seeds anything (math §7).

Every draw is a pure function of ``(seed, stream, sample, cycle, step)``. No rank, micro-batch, world size or
request split can change it, and there is no generator state to save. Draws are made on the host in fp32 or fp64,
so every device sees the same bits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence

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


def generator(seed: int, stream: str, sample: int = 0, cycle: int = 0, step: int = 0) -> np.random.Generator:
    """The generator of one draw: Philox with the ids in its counter, so that distinct ids never collide.

    The lowest counter word is left to the generator itself: 2**64 blocks a draw.

    Raises:
        ValueError: an id is negative, or the seed is outside [0, 2**63).
        KeyError: the stream is not in ``STREAMS``.
    """
    return next(_generators(seed, stream, [(sample, cycle, step)]))


def _generators(
    seed: int, stream: str, ids: Sequence[tuple[int, int, int]]
) -> Generator[np.random.Generator, None, None]:
    """One generator, put to each draw in turn: a new one takes ten times as long. ``ids``: sample, cycle, step."""
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"seed is {seed}; it must lie in [0, 2**63)")
    key, unused = np.array([seed, STREAMS[stream]], dtype=np.uint64), np.zeros(4, dtype=np.uint64)
    philox = np.random.Philox(key=key)
    made = np.random.Generator(philox)
    for sample, cycle, step in ids:
        if min(sample, cycle, step) < 0:
            raise ValueError(f"ids of a draw must not be negative: sample={sample}, cycle={cycle}, step={step}")
        counter = np.array([0, step, cycle, sample], dtype=np.uint64)
        philox.state = {
            "bit_generator": "Philox", "state": {"counter": counter, "key": key}, "buffer": unused, "buffer_pos": 4,
            "has_uint32": 0, "uinteger": 0,
        }  # fmt: skip
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
    for row, draw in zip(rows, _generators(seed, stream, _ids(samples, cycles, steps)), strict=True):
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
    rows = [draw.random() for draw in _generators(seed, stream, _ids(samples, cycles, steps))]
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
    return [int(draw.integers(high)) for draw in _generators(seed, stream, _ids(samples, cycles, steps))]


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
