"""Runs a grid of recipes, two at a time with one thread each, and tabulates their scores over seeds.

A run that is finished is read, not run again, so a benchmark that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
METRICS = ("read_accuracy", "fd_feat", "diversity", "drift")


@dataclass(frozen=True)
class Job:
    """One run: ``overrides`` of the distillation recipe."""

    name: str
    seed: int
    overrides: tuple[str, ...]

    def folder(self, output: Path) -> Path:
        return output / f"{self.name}-seed{self.seed}"


def run_all(jobs: Sequence[Job], output: Path, recipe: Path, at_once: int) -> None:
    """Runs what is not finished yet; stops with the message of the first run that fails."""
    waiting, running = [job for job in jobs if not _finished(job.folder(output))], {}
    output.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            log = (output / f"{job.name}-seed{job.seed}.log").open("w")
            running[job] = (_start(job, output, recipe, log), time.perf_counter())
        for job, (process, began) in list(running.items()):
            if process.poll() is None:
                continue
            if process.returncode:
                sys.exit(f"{job.name}, seed {job.seed} failed; see {job.folder(output)}.log")
            print(f"{job.name}, seed {job.seed}: {time.perf_counter() - began:.0f} s; {len(waiting)} wait", flush=True)
            del running[job]
        time.sleep(0.2)


def _start(job: Job, output: Path, recipe: Path, log: Any) -> subprocess.Popen[bytes]:
    settings = (f"output={job.folder(output)}", f"seed={job.seed}", "training.threads=1", "training.tensorboard=false")
    command = [sys.executable, "-m", "sigmazero", "train", str(recipe), *settings, *job.overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _finished(folder: Path) -> bool:
    path = folder / "run.json"
    return path.is_file() and json.loads(path.read_text())["finished"]


def means(jobs: Sequence[Job], output: Path, arm: str) -> dict[str, dict[str, float]]:
    """Mean, lowest and highest of each metric of an arm over the seeds of one name."""
    scores = [json.loads((job.folder(output) / "scores.json").read_text())["arms"][arm] for job in jobs]
    return {name: summary([score[name]["mean"] for score in scores]) for name in METRICS}


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "low": min(values), "high": max(values), "seeds": len(values)}


def table(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Markdown: mean over seeds and, in brackets, the lowest and highest seed."""
    lines = ["| arm | seeds | " + " | ".join(METRICS) + " |", "|---" * (len(METRICS) + 2) + "|"]
    for name, metrics in rows.items():
        cells = [_cell(metrics[m], 1 if m in ("fd_feat", "diversity") else 3) for m in METRICS]
        lines.append(f"| {name} | {metrics['fd_feat']['seeds']:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(m: Mapping[str, float], digits: int) -> str:
    return f"{m['mean']:.{digits}f} ({m['low']:.{digits}f} to {m['high']:.{digits}f})"


def arguments(description: str, output: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / output, help="folder of the runs")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "glyph_dmd2.yaml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    return parser


def finish(rows: Mapping[str, Any], path: Path | None) -> None:
    print(table(rows))
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n")
