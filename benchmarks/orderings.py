"""Orderings of distribution matching that a small model can show, at equal student updates, over seeds.

Fake-score updates K = 1, 2, 5; re-noise against Euler; the trained grid against another one; normalizer on and off.

run: python benchmarks/orderings.py [--updates 200] [--json PATH]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from grid import METRICS, Job, arguments, finish, means, run_all, summary

OTHER_SHIFT = 3.0  # the two-step grid 1, .75, 0 instead of 1, .5, 0


def main() -> None:
    parser = arguments(__doc__ or "", "orderings")
    parser.add_argument("--updates", type=int, default=200, help="student updates of every arm")
    args = parser.parse_args()
    common = ("algorithm.num_steps=2", "algorithm.teacher_steps=2", "evaluate.every=0")
    arms = {
        "K=1": (1, ()),
        "K=2 (renoise, normalizer)": (2, ()),
        "K=5": (5, ()),
        "K=2, euler": (2, ("algorithm.transition=euler",)),
        "K=2, no normalizer": (2, ("algorithm.normalizer=false",)),
    }
    jobs = {
        name: [
            Job(_slug(name), seed, (*common, f"algorithm.fake_updates={k}", f"num_cycles={k * args.updates}", *more))
            for seed in range(args.seeds)
        ]
        for name, (k, more) in arms.items()
    }
    run_all([job for group in jobs.values() for job in group], args.output, args.recipe, args.at_once)
    rows = {name: means(group, args.output, "student@2") for name, group in jobs.items()}
    base = jobs["K=2 (renoise, normalizer)"]
    rows[f"K=2, sampled on shift {OTHER_SHIFT:g}"] = _on_another_grid(base, args.output)
    finish(rows, args.json)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _on_another_grid(jobs: Sequence[Job], output: Path) -> dict[str, dict[str, float]]:
    """The trained students of a group, scored on a grid that they were not trained on."""
    from sigmazero.evaluate import Evaluator
    from sigmazero.launch.local import build, restore_newest
    from sigmazero.pictures import quantized
    from sigmazero.reader import load_reader
    from sigmazero.training.folder import RunFolder, read_config

    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for job in jobs:
        config = read_config(job.folder(output))
        built = build(config)
        restore_newest(built, RunFolder(job.folder(output)))
        arm = next(arm for arm in built.algorithm.arms if arm.role == "student_ema")
        evaluator = Evaluator(config.evaluate, load_reader())
        other = dataclasses.replace(arm, shift=OTHER_SHIFT)
        pictures = quantized(evaluator.sample(other, built.engine, built.roles.model.decode))
        for name, metric in evaluator.score(pictures.float() / 255).items():
            found[name].append(metric.mean)
    return {name: summary(values) for name, values in found.items()}


if __name__ == "__main__":
    main()
