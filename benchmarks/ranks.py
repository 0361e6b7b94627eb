"""How much faster two processes of one thread train than one: a DMD2 period of the glyph model, weights on each rank.

    python benchmarks/ranks.py                 # about 3 minutes on two idle cores; exits 1 if a ratio is missed
    python benchmarks/ranks.py --json out.json

Arms alternate in one run; a figure is the median of paired ratios (time of two ranks / time of one).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cycle import keep_memory
from torch.distributed.device_mesh import init_device_mesh

RECIPE = Path(__file__).parents[1] / "recipes" / "glyph_dmd2.yaml"
TARGETS = {128: 0.6}  # global batch -> greatest time of two ranks over that of one
BATCHES = (32, 128)


def worker(index: int, count: int, meet: str, batch: int, cycles: int, answer: str) -> None:
    from sigmazero.config import load_recipe
    from sigmazero.launch.local import build
    from sigmazero.training.parallel import ALONE, Ranks

    torch.set_num_threads(1)
    keep_memory()
    ranks = ALONE
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=index, world_size=count)
        ranks = Ranks(init_device_mesh("cpu", (count, 1), mesh_dim_names=("replicate", "shard")))
    rows = batch // count
    overrides = [
        f"data.batch_size={batch}", "training.threads=1", f"training.rollout_rows={rows}",
        *(f"optimizers.{role}.micro_batch={min(rows, 64)}" for role in ("student", "fake_score")),
    ]  # fmt: skip
    with build(load_recipe(RECIPE, overrides), ranks) as built:
        period = built.config.algorithm.fake_updates  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(period):
            built.trainer.run_cycle()  # warm-up
        ranks.any(False)
        started = time.perf_counter()
        for _ in range(cycles * period):
            built.trainer.run_cycle()
        ranks.any(False)
        if ranks.is_first:
            Path(answer).write_text(str((time.perf_counter() - started) / cycles))
    if count > 1:
        dist.destroy_process_group()


def period_seconds(count: int, batch: int, cycles: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (count, f"{folder}/meet", batch, cycles, f"{folder}/answer")
        mp.spawn(worker, arguments, nprocs=count)
        return float(Path(f"{folder}/answer").read_text())


def measure(batch: int, repeats: int) -> dict[str, Any]:
    cycles = max(2, 512 // batch)
    pairs = [(period_seconds(1, batch, cycles), period_seconds(2, batch, cycles)) for _ in range(repeats)]
    return {
        "one": statistics.median(one for one, _ in pairs),
        "two": statistics.median(two for _, two in pairs),
        "ratio": statistics.median(two / one for one, two in pairs),
        "ratios": [two / one for one, two in pairs],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results, missed = {}, []
    for batch in BATCHES:
        result = results[str(batch)] = measure(batch, arguments.repeats)
        target = TARGETS.get(batch)
        print(
            f"global batch {batch:4}: one rank {result['one']:.3f} s a period, two {result['two']:.3f} s: "
            f"{result['ratio']:.3f}" + (f" (at most {target})" if target else "")
        )
        if target and result["ratio"] > target:
            missed.append(batch)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
