"""Where a cycle's time and memory go: numbers of every cycle, and torch's traces of chosen ones (docs/profiling.md)."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from sigmazero.config import ProfileConfig
from sigmazero.training.parallel import Ranks

FOLDER = "profile"


@dataclass
class Part:
    """What one part of a cycle, the rollout or a phase, took on this rank."""

    samples: int = 0  # that it worked on, on all ranks
    seconds: float = 0.0
    network_seconds: float = 0.0  # of these in forward and backward passes and in optimizer steps
    peak_bytes: int = 0  # that tensors held on the CUDA device at most
    moved_bytes: int = 0  # from the host to the device


class Stopwatch:
    """Times the parts of a cycle and the network work inside them.

    On a CPU network work is timed exactly. On CUDA events on the stream time it, so that the host waits for the device
    at the end of a part alone.

    Args:
        networks: whose forward passes are timed; those of other networks count as time outside.
        names: whether torch's profiler, which may run, is told what runs; it costs more than the timing.
    """

    def __init__(
        self, device: torch.device | str = "cpu", networks: Iterable[nn.Module] = (), *, names: bool = False
    ) -> None:
        self._device, self._names = torch.device(device), names
        self._on_cuda = self._device.type == "cuda"
        self._parts: dict[str, Part] = {}
        self._seconds = 0.0  # of the whole cycle
        self._spans: list[tuple[Any, Any]] | None = None  # of network work in the part that runs now
        self._forward: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        for network in {id(network): network for network in networks}.values():
            network.register_forward_pre_hook(self._begin_forward, prepend=True)  # before sharded weights are gathered
            network.register_forward_hook(self._end_forward)

    @contextlib.contextmanager
    def cycle(self, index: int) -> Generator[None]:
        """Times a cycle; what was known of the one before is forgotten."""
        self._parts, started = {}, time.perf_counter()
        with self._named(f"cycle {index}"):
            yield
        self._seconds = time.perf_counter() - started

    @contextlib.contextmanager
    def part(self, name: str) -> Generator[Part]:
        """Times a part of a cycle, up to the end of what it asked of the device. The caller fills in the counts."""
        part = self._parts[name] = Part()
        self._spans = []
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        started = time.perf_counter()
        with self._named(name):
            yield part
            if self._on_cuda:
                torch.cuda.synchronize(self._device)
        part.seconds = time.perf_counter() - started
        part.network_seconds = sum(self._between(*span) for span in self._spans)
        part.peak_bytes = torch.cuda.max_memory_allocated(self._device) if self._on_cuda else 0
        self._spans = None

    @contextlib.contextmanager
    def work(self, name: str) -> Generator[None]:
        """Times network work inside a part."""
        begin = self._mark()
        with self._named(name):
            yield
        if self._spans is not None:
            self._spans.append((begin, self._mark()))

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """The last cycle's, over all ranks and the same on each: a part takes as long as on its slowest rank."""
        parts = self._parts
        own = [[p.seconds, p.network_seconds, p.peak_bytes, p.moved_bytes] for p in parts.values()]
        own.append([self._seconds, sum(p.network_seconds for p in parts.values()), _peak_resident_bytes(), 0])
        table = ranks.gather_rows(torch.tensor([own], dtype=torch.float64), ranks.count)  # [ranks, parts + 1, 4]
        *by_part, whole = table.permute(1, 2, 0).tolist()
        metrics: dict[str, float] = {}
        for (name, part), numbers in zip(parts.items(), by_part, strict=True):
            metrics |= _of_part(name, part.samples, *numbers)
        seconds, network, resident, _ = whole
        metrics["time/cycle"] = metrics["time/cycle_latency"] = max(seconds)
        metrics["time/cycle_outside_share"] = 1 - fmean(n / s for n, s in zip(network, seconds, strict=True))
        metrics["memory/resident_bytes_max"] = max(resident)
        return metrics

    def _named(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return record_function(name) if self._names else _NOTHING

    def _mark(self) -> Any:
        """Now, on the clock that network work is timed by."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin

    def _begin_forward(self, *_: object) -> None:
        self._forward = self.work("forward")
        self._forward.__enter__()

    def _end_forward(self, *_: object) -> None:
        self._forward.__exit__(None, None, None)


_NOTHING = contextlib.nullcontext()
UNTIMED = Stopwatch()


def _of_part(
    name: str, samples: int, seconds: list[float], network: list[float], peak: list[float], moved: list[float]
) -> dict[str, float]:
    """Metrics of a part from what each rank says of it.

    Ranks wait for each other, so the slowest is the one with most network work of its own.
    """
    slowest = max(seconds)
    metrics = {f"time/{name}": slowest, f"time/{name}_samples_per_s": samples / slowest}
    if len(network) > 1 and max(network) > 0:
        metrics[f"time/{name}_slowest_rank"] = float(network.index(max(network)))
        metrics[f"time/{name}_imbalance"] = max(network) / fmean(network)
    if any(moved):
        metrics[f"memory/{name}_moved_bytes"] = sum(moved)
    if any(peak):
        metrics[f"memory/{name}_bytes_max"] = max(peak)
    return metrics


def _peak_resident_bytes() -> int:
    """Memory of this process at most since it started, weights, pictures, libraries and all."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# Traces


def check_ranks(settings: ProfileConfig | None, count: int) -> None:
    """Whether there are all the ranks that are to be traced.

    Raises:
        ValueError: names one that is not there.
    """
    for rank in settings.ranks if settings is not None else ():
        if rank >= count:
            raise ValueError(
                f"profile.ranks names rank {rank}, but this run has {count} {'rank' if count == 1 else 'ranks'}, "
                f"counted from 0; name ranks up to {count - 1}"
            )


def trace_paths(settings: ProfileConfig | None, folder: Path) -> list[Path]:
    """Where the traces of a run lie, rank by rank."""
    if settings is None:
        return []
    return [folder / FOLDER / f"cycle-{settings.start:08d}-rank-{rank}.json" for rank in settings.ranks]


@contextlib.contextmanager
def tracing(
    settings: ProfileConfig | None, folder: Path, ranks: Ranks, cycle: int, device: torch.device
) -> Generator[Callable[[], object]]:
    """Traces the chosen cycles, where this rank is a chosen one. Yields what to call after each cycle.

    A trace is written whole or not at all: none of cycles that were not all run by this process.

    Args:
        folder: of the run.
        cycle: where this process goes on.
    """
    paths = dict(zip(settings.ranks, trace_paths(settings, folder), strict=True)) if settings is not None else {}
    if settings is not None and cycle > settings.start and not all(path.exists() for path in paths.values()):
        print(
            f"warning: profile.start is {settings.start}, and the run goes on at cycle {cycle}: nothing is traced; set "
            "a later one, or leave profile out",
            file=sys.stderr,
        )
    if settings is None or ranks.index not in paths or cycle > settings.start:
        yield lambda: None
        return
    end = settings.start + settings.cycles
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")

    def action(step: int) -> ProfilerAction:
        now = cycle + step
        if settings.start <= now < end:
            return ProfilerAction.RECORD_AND_SAVE if now == end - 1 else ProfilerAction.RECORD
        warm = settings.start - settings.warmup <= now < settings.start
        return ProfilerAction.WARMUP if warm else ProfilerAction.NONE

    def write(profiler: Any) -> None:
        if cycle + profiler.step_num == end:  # else the run ends before its time
            _export(profiler, paths[ranks.index])

    with profile(
        activities=activities, schedule=action, on_trace_ready=write, profile_memory=settings.memory
    ) as profiler:
        yield profiler.step


def _export(profiler: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".writing")
    profiler.export_chrome_trace(str(aside))
    os.replace(aside, path)
