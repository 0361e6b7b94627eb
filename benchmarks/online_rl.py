"""Online RL over seeds: how far each recipe raises its reward, what it costs, and reward against network forwards.

run: python benchmarks/online_rl.py [--recipes glyph_flow_grpo glyph_nft] [--seeds 3] [--json PATH] [--figure PATH]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from grid import ROOT, Job, arguments, run_all, summary
from matplotlib.figure import Figure
from torch import Tensor

from sigmazero.config import load_recipe
from sigmazero.launch.local import build
from sigmazero.metrics import read_metrics

ARMS, COLOURS = ("start", "final"), ("#2563c9", "#d9690f", "#3f7d4e", "#8250b5", "#475569", "#b5405f")


def main() -> None:
    parser = arguments(__doc__ or "", "online_rl")
    parser.add_argument("--recipes", nargs="+", default=["glyph_flow_grpo", "glyph_flow_grpo_fast", "glyph_nft"])
    parser.add_argument("--overrides", nargs="*", default=[], help="of every recipe")
    parser.add_argument("--figure", type=Path, help="where to draw reward against network forwards")
    args = parser.parse_args()
    rows, curves = {}, {}
    for name in args.recipes:
        recipe, overrides = ROOT / "recipes" / f"{name}.yaml", ("evaluate.every=0", *args.overrides)
        jobs = [Job(name, seed, overrides) for seed in range(args.seeds)]
        run_all(jobs, args.output, recipe, args.at_once)
        rows[name] = {
            "forwards": forwards(recipe, args.overrides),
            **outcome([job.folder(args.output) for job in jobs]),
        }
        curves[name] = curve([job.folder(args.output) for job in jobs], rows[name]["forwards"])
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.figure is not None:
        draw(curves, args.figure)


def forwards(recipe: Path, overrides: Sequence[str]) -> float:
    """Network forwards an image of one cycle, rollout and training together; one with its backward counts as three.

    Counted, not computed: the velocity of the family is watched over one cycle. The KL's measurement is left out.
    """
    config = load_recipe(recipe, [*overrides, "data.batch_size=16", "rollout.max_refills=0"])
    with build(config) as built:
        inner, rows = built.roles.model.velocity, 0

        def counted(net: torch.nn.Module, x: Tensor, sigma: Tensor, condition: Any) -> Tensor:
            nonlocal rows
            rows += len(x) * (3 if torch.is_grad_enabled() else 1)
            return inner(net, x, sigma, condition)

        built.roles.model.velocity = counted  # pyright: ignore[reportAttributeAccessIssue]
        built.trainer.counters.cycle = 1  # the KL is due in cycle 0
        built.trainer.run_cycle()
    return rows / 16


def outcome(folders: Sequence[Path]) -> dict[str, Any]:
    """Scores of both arms over seeds, the smallest rise of a seed, and the minutes of training."""
    scores = [json.loads((folder / "scores.json").read_text())["arms"] for folder in folders]
    names = [
        name for name in scores[0]["final"] if name in ("read_accuracy", "diversity") or name.startswith("reward/")
    ]
    arms = {arm: {n: summary([s[arm][n]["mean"] for s in scores]) for n in names} for arm in ARMS}
    rises = [s["final"]["reward/ocr"]["mean"] - s["start"]["reward/ocr"]["mean"] for s in scores]
    apart = all(s["final"]["reward/ocr"]["low"] > s["start"]["reward/ocr"]["high"] for s in scores)
    minutes = [sum_of(folder, "time/cycle") / 60 for folder in folders]
    return {"arms": arms, "least_rise": min(rises), "beyond_intervals": apart, "minutes": summary(minutes)}


def sum_of(folder: Path, name: str) -> float:
    """Of a metric that a row sums over its cycles, over all of them."""
    return sum(row[name] for row in read_metrics(folder / "metrics.jsonl"))


def curve(folders: Sequence[Path], per_image: float) -> dict[str, list[float]]:
    """Mean reward of the rollouts over seeds, against forwards so far in thousands."""
    logs = [read_metrics(folder / "metrics.jsonl") for folder in folders]
    config = json.loads((folders[0] / "run.json").read_text())["config"]
    cost = per_image * config["data"]["batch_size"] / 1000
    points = [(row["cycle"] * cost, [log[i]["reward/ocr"] for log in logs]) for i, row in enumerate(logs[0])]
    return {"forwards": [x for x, _ in points], "reward": [statistics.fmean(values) for _, values in points]}


def draw(curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    figure = Figure(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
        width = max(1, len(points["reward"]) // 20)
        smooth = [statistics.fmean(points["reward"][max(0, i - width) : i + 1]) for i in range(len(points["reward"]))]
        axes.plot(points["forwards"], smooth, label=name, color=colour)
    axes.set_xlabel("network forwards, in thousands (one with its backward counts as three)")
    axes.set_ylabel("OCR reward of the rollouts")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: mean over seeds and, in brackets, the lowest and highest seed."""
    names = list(next(iter(rows.values()))["arms"]["final"])
    lines = [
        "| recipe | forwards an image | minutes | "
        + " | ".join(f"{n}, start to final" for n in names)
        + " | least rise |",
        "|---" * (len(names) + 4) + "|",
    ]
    for name, row in rows.items():
        cells = [f"{row['arms']['start'][n]['mean']:.3f} to {cell(row['arms']['final'][n])}" for n in names]
        apart = "" if row["beyond_intervals"] else " (intervals overlap)"
        lines.append(
            f"| {name} | {row['forwards']:.0f} | {row['minutes']['mean']:.1f} | {' | '.join(cells)} "
            f"| {row['least_rise']:.3f}{apart} |"
        )
    return "\n".join(lines)


def cell(m: dict[str, float]) -> str:
    return f"{m['mean']:.3f} ({m['low']:.3f} to {m['high']:.3f})"


if __name__ == "__main__":
    main()
