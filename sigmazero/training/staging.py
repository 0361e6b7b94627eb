"""Hands an update's items to its term while its rows stay on the host, so that memory does not grow with the steps.

What the steps of a row share (condition, sample, static noise, every number) moves once; a large per-step field moves
one tile ahead of its use into one of two buffers, on CUDA by way of pinned memory and on a stream of its own. Which
field is which follows from the declaration of the phase and the shapes alone. Rollouts do not come through here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sigmazero.records import Batch, Conditioning, to_device

Mode = Literal["prefetch", "sync", "whole"]


@dataclass(frozen=True)
class Tile:
    """Items of one forward and backward, ``steps`` of ``rows``: all rows of its first step, then all of the next."""

    rows: slice
    steps: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Steps, rows."""
        return self.steps.stop - self.steps.start, self.rows.stop - self.rows.start


def tiles(num_rows: int, num_steps: int, size: int) -> list[Tile]:
    """Items in tiles of at most ``size``: as many rows as fit, with as many of their steps as still fit.

    All steps of some rows come before the next rows, so that what they share is on the device once.
    """
    found: list[Tile] = []
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        depth = size // (rows.stop - rows.start)
        found += [Tile(rows, slice(s, min(s + depth, num_steps))) for s in range(0, num_steps, depth)]
    return found


class Staging:
    """Iterates over the tiles of a host batch, each with its items on the device.

    Fields that are not of floats stay on the host, where seeds read them. A large per-step field is a view of a buffer
    that is written again two tiles later: nothing of it may be kept.

    Args:
        batch: this rank's rows, with their conditions.
        step_fields: fields ``[b, T, ...]``; one that the batch does not have is left out.
        chains: of fields ``[b, T + 1, ...]`` the two names that a step sees its own item and the next one by. What two
            steps of a row see moves once.
        size: items of a tile at most.
        mode: ``prefetch``; ``sync``: a tile moves right before its use and is waited for; ``whole``: all rows move at
            once, and stay.
    Raises:
        ValueError: a field requires grad, is not on the host, or is of another length; nothing has moved then.
    """

    def __init__(
        self,
        batch: Batch,
        step_fields: Sequence[str],
        chains: Mapping[str, tuple[str, str]],
        size: int,
        device: torch.device,
        mode: Mode = "prefetch",
    ) -> None:
        self._chains = {name: ends for name, ends in chains.items() if name in batch.fields}
        own = [name for name in step_fields if name in batch.fields]
        self.num_steps = _checked(batch, own, list(self._chains))
        self.tiles = tiles(len(batch), self.num_steps, size)
        self.moved_bytes = self.input_bytes = 0  # in all, and on the device at once
        self._numbers = {name for name in own if batch[name].ndim == 2}
        self._large = {name: batch[name] for name in (*self._chains, *own) if name not in self._numbers}
        rest = {name: value for name, value in batch.fields.items() if name not in self._large}
        self._ids = {name: value for name, value in rest.items() if not value.is_floating_point()}
        self._shared = {name: value for name, value in rest.items() if name not in self._ids}
        self._told = dict(batch.condition.fields) if batch.condition else {}
        self._prompts = batch.prompts
        self._device, self._whole, self._ahead = device, mode == "whole", int(mode == "prefetch")

    def __iter__(self) -> Iterator[tuple[Tile, Batch]]:
        """Each tile with its items. On CUDA the host waits for no tile but, two ahead of it, for the one before."""
        if self._whole:
            self._large, self._shared, self._told = map(self._moved, (self._large, self._shared, self._told))
        slots = self._new_slots()
        fixed = self.moved_bytes + sum(slot.num_bytes for slot in slots)
        loaded, rows, shared, told = 0, None, {}, {}
        with _Beside(self._device, self._ahead) as beside:
            for index, tile in enumerate(self.tiles):
                while loaded <= min(index + self._ahead, len(self.tiles) - 1):
                    with beside.copying(loaded):
                        self._load(loaded, slots)
                    loaded += 1
                if tile.rows != rows:
                    shared, told, before = {}, {}, self.moved_bytes  # those of other rows are released first
                    rows, (shared, told) = tile.rows, self._of_rows(tile.rows)
                    self.input_bytes = max(self.input_bytes, fixed + self.moved_bytes - before)
                with beside.computing(index):
                    yield tile, self._items(tile, shared, told, slots[index % len(slots)].blocks)

    def _new_slots(self) -> list[_Slot]:
        """One, or two to alternate between, each with room for any tile; a chain has one step more."""
        room = max((steps + 1) * rows for steps, rows in (tile.shape for tile in self.tiles))
        pinned = bool(self._ahead) and self._device.type == "cuda"
        return [_Slot(self._large, room, self._device, pinned) for _ in range(1 + self._ahead)]

    def _load(self, index: int, slots: Sequence[_Slot]) -> None:
        """Moves a tile's large per-step fields; what the tile before has of a chain is copied from there."""
        tile, slot = self.tiles[index], slots[index % len(slots)]
        before = slots[(index - 1) % len(slots)].blocks
        follows = index > 0 and self.tiles[index - 1].rows == tile.rows
        for name, value in self._large.items():
            chained = name in self._chains
            known = before[name][-1:] if follows and chained else None
            first = tile.steps.start + (known is not None)
            steps = value[tile.rows, first : tile.steps.stop + chained].transpose(0, 1)
            slot.fill(name, steps, known)
            self.moved_bytes += 0 if self._whole else steps.nbytes

    def _of_rows(self, rows: slice) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What the steps of some rows share, on the device: fields, and conditions."""
        shared, told = ({name: value[rows] for name, value in part.items()} for part in (self._shared, self._told))
        return (shared, told) if self._whole else (self._moved(shared), self._moved(told))

    def _moved(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the device, real ones also where that is the host. Masks and the like, which a network's host side
        looks at, stay there: looking at them on the device would wait for it."""
        floats = {name: value for name, value in values.items() if value.is_floating_point()}
        self.moved_bytes += sum(value.nbytes for value in floats.values())
        if self._ahead and self._device.type == "cuda":
            return {**values, **{name: to_device(value, self._device) for name, value in floats.items()}}
        return {**values, **{name: value.to(self._device, copy=True) for name, value in floats.items()}}

    def _items(
        self, tile: Tile, shared: Mapping[str, Tensor], told: Mapping[str, Tensor], blocks: Mapping[str, Tensor]
    ) -> Batch:
        depth, _ = tile.shape
        of_rows = {name: value[tile.rows] for name, value in self._ids.items()} | {**shared}
        fields = {
            name: value[:, tile.steps].T.flatten() if name in self._numbers else _repeated(value, depth)
            for name, value in of_rows.items()
        }
        for name, block in blocks.items():
            if name in self._chains:
                here, after = self._chains[name]
                fields |= {here: block[:-1].flatten(0, 1), after: block[1:].flatten(0, 1)}
            else:
                fields[name] = block.flatten(0, 1)
        condition = Conditioning({name: _repeated(value, depth) for name, value in told.items()}) if told else None
        return Batch(fields, self._prompts[tile.rows] * depth, condition)


class _Slot:
    """Where a tile's large per-step fields lie: a buffer a field, on CUDA with a pinned one that copies start from."""

    def __init__(self, like: Mapping[str, Tensor], room: int, device: torch.device, pinned: bool) -> None:
        shapes = {name: ((room, *value.shape[2:]), value.dtype) for name, value in like.items()}
        self._buffers = {n: torch.empty(shape, dtype=dtype, device=device) for n, (shape, dtype) in shapes.items()}
        self._sources = {n: torch.empty(s, dtype=d, pin_memory=True) for n, (s, d) in shapes.items() if pinned}
        self.blocks: dict[str, Tensor] = {}  # [steps, rows, ...] each
        self.num_bytes = sum(buffer.nbytes for buffer in self._buffers.values())

    def fill(self, name: str, steps: Tensor, known: Tensor | None) -> None:
        """Takes host steps ``[steps, rows, ...]``, after the one that is ``known`` on the device already."""
        count, rows = len(steps) + (known is not None), steps.shape[1]
        block = self._buffers[name][: count * rows].unflatten(0, (count, rows))
        if known is not None:
            block[:1].copy_(known)
        if name in self._sources:
            steps = self._sources[name][: len(steps) * rows].unflatten(0, (-1, rows)).copy_(steps)
        block[-len(steps) :].copy_(steps, non_blocking=name in self._sources)
        self.blocks[name] = block


class _Beside(contextlib.AbstractContextManager["_Beside"]):
    """The order between computation and copies on a stream of their own; without CUDA, or not ahead, nothing to do."""

    def __init__(self, device: torch.device, ahead: int) -> None:
        self._copies: Any = _copy_stream(device) if ahead and device.type == "cuda" else None
        if self._copies is not None:
            self._compute = torch.cuda.current_stream(device)
            self._copied, self._used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
            self._copies.wait_stream(self._compute)  # what was in the buffers' memory before is done with

    def __exit__(self, *error: object) -> None:
        if self._copies is not None:
            self._compute.wait_stream(self._copies)  # no copy under way ends in memory that has become another's

    @contextlib.contextmanager
    def copying(self, index: int) -> Iterator[None]:
        if self._copies is None:
            yield
            return
        self._copied[index % 2].synchronize()  # two tiles ago: its pinned memory is free again
        self._copies.wait_event(self._used[index % 2])
        with torch.cuda.stream(self._copies):
            yield
        self._copied[index % 2].record(self._copies)

    @contextlib.contextmanager
    def computing(self, index: int) -> Iterator[None]:
        if self._copies is None:
            yield
            return
        self._compute.wait_event(self._copied[index % 2])
        yield
        self._used[index % 2].record(self._compute)


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _checked(batch: Batch, step_fields: Sequence[str], chains: Sequence[str]) -> int:
    """The number of steps T, 1 of a batch without per-step fields.

    Raises:
        ValueError: as ``Staging``.
    """
    for name, value in batch.fields.items():
        if value.requires_grad:
            raise ValueError(f"field {name!r} requires grad; what an update is fed is detached: detach it in feeds()")
        if value.device.type != "cpu":
            raise ValueError(f"field {name!r} is on {value.device}; feeds() gives host tensors that the loop moves")
        if len(value) != len(batch):
            raise ValueError(f"field {name!r} has {len(value)} rows, and the batch {len(batch)}; give one a sample")
    told = batch.condition
    if told is not None and len(told) != len(batch):
        raise ValueError(f"there are {len(told)} conditions for {len(batch)} rows; encode one a row")
    flat = [name for name in (*step_fields, *chains) if batch[name].ndim < 2]
    if flat:
        raise ValueError(f"field {flat[0]!r} is [rows], and a field of steps [rows, steps, ...]; declare it shared")
    steps = {name: batch[name].shape[1] for name in step_fields} | {n: batch[n].shape[1] - 1 for n in chains}
    if len(set(steps.values())) > 1:
        raise ValueError(f"fields of one phase have different numbers of steps: {steps}; give each as many")
    return next(iter(steps.values()), 1)


def _repeated(value: Tensor, times: int) -> Tensor:
    return value.repeat(times, *[1] * (value.ndim - 1)) if times > 1 else value
