"""How much faster two processes of one thread train than one: a DMD2 period of the glyph model, weights on each rank.

    python benchmarks/ranks.py                 # about 4 minutes on two idle cores; exits 1 if a ratio is missed
    python benchmarks/ranks.py --json out.json

  one    one process with the whole batch
  two    two ranks with half of it each
  apart  two processes at once that know nothing of each other, each with half of the batch: what two ranks would take
         if they had nothing to tell each other. Where it is above a target, ranks that hold all weights cannot meet it

The arms take turns in the same two processes; a ratio is the median of turns, to ``one``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cycle import keep_memory
from torch.distributed.device_mesh import init_device_mesh

RECIPE = Path(__file__).parents[1] / "recipes" / "glyph_dmd2.yaml"
TARGETS = {128: 0.6}  # global batch -> greatest time of two ranks over that of one
BATCHES = (32, 128)
ARMS = ("one", "two", "apart")


def worker(index: int, barrier: Any, folder: str, turns: int) -> None:
    """One of the two processes; the first one writes each batch's seconds a period, by arm."""
    from sigmazero.config import load_recipe
    from sigmazero.launch.local import Built, build
    from sigmazero.training.parallel import ALONE, Ranks

    def trains(batch: int, ranks: Ranks) -> Built:
        rows = batch // ranks.count
        micro = [f"optimizers.{role}.micro_batch={min(rows, 64)}" for role in ("student", "fake_score")]
        own = [f"data.batch_size={batch}", "training.threads=1", f"training.rollout_rows={rows}", *micro]
        return build(load_recipe(RECIPE, own), ranks)

    torch.set_num_threads(1)
    keep_memory()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=index, world_size=2)
    ranks = Ranks(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    for batch in BATCHES:
        built = {"two": trains(batch, ranks), "apart": trains(batch // 2, ALONE)}
        built |= {"one": trains(batch, ALONE)} if index == 0 else {}
        period = cast(Any, built["two"].config.algorithm).fake_updates  # cycles
        cycles = period * max(2, 128 // batch)
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for turn in range(turns + 1):
            for arm in ARMS[turn % 3 :] + ARMS[: turn % 3]:
                barrier.wait()
                started = time.perf_counter()
                for _ in range(cycles if arm in built else 0):
                    built[arm].trainer.run_cycle()
                barrier.wait()
                if turn:  # the first one warms up
                    seconds[arm].append((time.perf_counter() - started) / cycles * period)
        if index == 0:
            Path(folder, str(batch)).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def ratio(seconds: dict[str, list[float]], arm: str) -> float:
    return statistics.median(mine / one for mine, one in zip(seconds[arm], seconds["one"], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (mp.get_context("spawn").Barrier(2), folder, arguments.repeats), nprocs=2)
        for batch in BATCHES:
            seconds = json.loads(Path(folder, str(batch)).read_text())
            results[str(batch)] = {"seconds": seconds, **{arm: ratio(seconds, arm) for arm in ("two", "apart")}}
    missed = []
    for batch in BATCHES:
        found, target = results[str(batch)], TARGETS.get(batch)
        print(
            f"global batch {batch:4}: one process {statistics.median(found['seconds']['one']):.3f} s a period; "
            f"two ranks {found['two']:.3f} of it" + (f" (at most {target})" if target else "")
            + f"; two apart {found['apart']:.3f}"
        )  # fmt: skip
        if target and found["two"] > target:
            missed.append(batch)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
