"""Processes of one gloo group that run functions of the tests, started once: importing a model takes seconds."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sigmazero.training.parallel import Ranks

TIME_LIMIT = 240.0  # seconds for one call, the first one's imports included, and for all to end


class Pair:
    """``count`` processes with a thread each. ``pair("tests.x:f", shard, *args)`` gives what ``f(ranks, *args)``
    returned on every rank, the networks spread over ``shard`` ranks."""

    def __init__(self, count: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._asked = [context.Queue() for _ in range(count)]
        self._answered: Any = context.Queue()
        self._processes = [
            context.Process(target=_serve, args=(i, count, str(folder / "meet"), asked, self._answered), daemon=True)
            for i, asked in enumerate(self._asked)
        ]
        for process in self._processes:
            process.start()

    def __call__(self, function: str, shard: int, *args: Any) -> list[Any]:
        for asked in self._asked:
            asked.put((function, shard, args))
        answers: dict[int, Any] = {}
        end = time.monotonic() + TIME_LIMIT
        while len(answers) < len(self._asked):
            try:
                index, failure, answer = self._answered.get(timeout=1)
            except queue.Empty:
                assert time.monotonic() < end, f"{function} has not ended in {TIME_LIMIT:.0f} s"
                assert all(p.is_alive() for p in self._processes), f"a rank died in {function}"
                continue
            assert not failure, f"rank {index} failed in {function}:\n{failure}"
            answers[index] = torch.load(io.BytesIO(answer), weights_only=True)
        return [answers[i] for i in range(len(self._asked))]

    def close(self) -> None:
        for asked in self._asked:
            asked.put(None)
        end = time.monotonic() + TIME_LIMIT
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()

    @property
    def exit_codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]


def _serve(index: int, count: int, meet: str, asked: Any, answered: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=index, world_size=count)
    while (job := asked.get()) is not None:
        name, shard, args = job
        try:
            mesh = init_device_mesh("cpu", (count // shard, shard), mesh_dim_names=("replicate", "shard"))
            module, function = name.split(":")
            call: Callable[..., Any] = getattr(importlib.import_module(module), function)
            file = io.BytesIO()
            torch.save(call(Ranks(mesh), *args), file)
            answered.put((index, "", file.getvalue()))
        except BaseException:
            answered.put((index, traceback.format_exc(), b""))
    dist.destroy_process_group()
