"""The processes of one run, started by torchrun: they find each other, and none outlives the failure of another."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sigmazero.config import RunConfig
from sigmazero.progress import in_a_line
from sigmazero.training.parallel import ALONE, Ranks

_CAUSE = "sigmazero/first_cause"  # key of the shared store: the failure that ended the run
_RUNS = itertools.count()  # of this process
_LOOK_EVERY = 0.5  # seconds between looks at it
_WORD_WITHIN = 3.0  # seconds in which a rank that failed says why, once others notice
_PATIENCE = timedelta(hours=2)  # of a collective: one rank may score or encode for long while others wait


@contextlib.contextmanager
def together(config: RunConfig) -> Generator[Ranks]:
    """The ranks of a run: those that torchrun started, or this process alone.

    Whatever one of them raises, or its death, ends all of them within seconds, with the first cause printed once. Only
    the first rank prints otherwise.

    Raises:
        ValueError: the recipe asks for another number of ranks than there are.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    shard = _shard_ranks(config, count)
    if count == 1:
        yield ALONE
        return
    device = "cuda" if config.training.device != "cpu" and torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    _join("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (count // shard, shard), mesh_dim_names=("replicate", "shard"))
    ranks = Ranks(mesh, reshard=config.training.reshard)
    store = _store()
    over = threading.Event()
    threading.Thread(target=_watch, args=(store.clone(), ranks.index, over), daemon=True).start()
    try:
        with _only_first_speaks(ranks):
            yield ranks
    except BaseException as error:
        _end(store, ranks.index, error)
    over.set()
    gc.collect()  # sharded networks go before the group that they talk through: gloo aborts at exit otherwise
    dist.destroy_process_group()


def _join(backend: str) -> None:
    """Meets the other ranks. What an earlier run of this process left where they meet is not seen."""
    store, index, count = next(dist.rendezvous("env://", timeout=_PATIENCE))
    own = dist.PrefixStore(f"run_{next(_RUNS)}", store)
    dist.init_process_group(backend, store=own, rank=index, world_size=count, timeout=_PATIENCE)


def _shard_ranks(config: RunConfig, count: int) -> int:
    wanted = config.training.shard_ranks
    if wanted is None:
        return 1 if config.model.family == "glyph" else count
    if count % wanted:
        raise ValueError(
            f"training.shard_ranks is {wanted}, but this run has {count} "
            f"{'rank' if count == 1 else 'ranks'}; set a divisor of that, or start as many with torchrun"
        )
    return wanted


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


@contextlib.contextmanager
def _only_first_speaks(ranks: Ranks) -> Generator[None]:
    if ranks.is_first:
        yield
        return
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers' bars heed it alone
    with (
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        yield


def _end(store: Any, index: int, error: BaseException) -> NoReturn:
    """Ends this process, and through the store the others. A failure that another one's caused is not printed."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once another has ended: this one still has to speak
    if isinstance(error, KeyboardInterrupt):
        if index == 0:
            print("stopped; the same command goes on from the newest checkpoint, if there is one", file=sys.__stderr__)
        _leave(130)
    if isinstance(error, SystemExit):  # of all ranks alike
        dist.barrier()
        _leave(error.code if isinstance(error.code, int) else 1)
    if not _is_own(error):
        time.sleep(_WORD_WITHIN)  # the watcher ends this process if the cause has been told
        said = " ".join(str(error).split())
        text = f"rank {index}: another rank ended without a word; it was killed, or ran out of memory ({said})"
    else:
        line = in_a_line(error)
        text = f"rank {index}: {line or ''.join(traceback.format_exception(error)).rstrip()}"
    if store.compare_set(_CAUSE, "", text).decode() == text:
        print(f"error: {text}", file=sys.__stderr__, flush=True)
    _leave(2 if isinstance(error, ValueError) else 1)


def _is_own(error: BaseException) -> bool:
    """Whether it is this rank's own failure: those of others reach it as a broken connection."""
    words = ("Connection closed by peer", "Connection reset", "gloo", "NCCL", "Broken")
    broken = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return not broken and not isinstance(error, ConnectionError)


def _watch(store: Any, index: int, over: threading.Event) -> None:
    """Ends this process soon after another has told why it ended, or when the store is gone."""
    while not over.wait(_LOOK_EVERY):
        try:
            told = store.check([_CAUSE])
        except Exception:
            if index == 0:
                print("error: torchrun is gone; the same command goes on", file=sys.__stderr__, flush=True)
            told = True
        if told:
            _leave(1)


def _leave(code: int) -> NoReturn:
    """Without the interpreter's tidying up, which waits for peers that are gone."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]
    os._exit(code)
