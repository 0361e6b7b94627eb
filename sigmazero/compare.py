"""Scores of several runs side by side, from their ``scores.json`` alone: arms, intervals, differences, pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from sigmazero.evaluate import METRICS
from sigmazero.pictures import save_png
from sigmazero.verdict import Arm, Interval, arms_of, interval

SAME = ("seed", "num_captions", "samples_per_caption", "num_reference")  # settings of evaluation that must agree
MAIN = ("student", "final")  # roles that are the result of a run
WIDEST = 4096  # pixels of a row of pictures


@dataclass(frozen=True)
class Scores:
    """The content of a ``scores.json``, under the name that the tables call it."""

    name: str
    folder: Path
    arms: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]

    @property
    def ordered(self) -> list[Arm]:
        return arms_of(self.arms, self.settings["algorithm"])

    @property
    def main(self) -> str | None:
        """The averaged student or policy, where it is scored."""
        return next((arm.name for arm in self.ordered if arm.role in MAIN), None)


def read_scores(paths: Sequence[Path]) -> list[Scores]:
    """Scores of run folders, or of ``scores.json`` files.

    Raises:
        ValueError: there are none in one of them, or two were evaluated on other prompts, seeds or counts.
    """
    names = [path.resolve().name if path.is_dir() else path.resolve().parent.name for path in paths]
    unique = len(set(names)) == len(names)
    found = [_read(path, name if unique else str(path)) for path, name in zip(paths, names, strict=True)]
    for other in found[1:]:
        _check_same(found[0], other)
    return found


def _read(path: Path, name: str) -> Scores:
    file = path / "scores.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text("utf-8"))
        scores = Scores(name, file.parent, values["arms"], values["settings"])
        known = [isinstance(scores.settings[key], Mapping) for key in ("algorithm", "evaluate")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{path} has no scores that can be read ({reason}); sigmazero evaluate {path} makes them"
        ) from None
    if not all(known) or not isinstance(scores.arms, Mapping) or not scores.arms:
        raise ValueError(f"{file} holds no scores; sigmazero evaluate makes them")
    return scores


def _check_same(one: Scores, other: Scores) -> None:
    a, b = (
        {**{key: s.settings["evaluate"].get(key) for key in SAME}, "prompts": s.settings.get("prompts")}
        for s in (one, other)
    )
    differences = [f"{key} {a[key]} and {b[key]}" for key in a if a[key] != b[key]]
    if differences:
        raise ValueError(
            f"{one.name} and {other.name} cannot be compared: they were evaluated with {'; '.join(differences)}; "
            "sigmazero evaluate RUN evaluate.KEY=VALUE scores one of them again"
        )


def table(runs: Sequence[Scores]) -> str:
    """Every arm of every run with its scores, then the differences, as text."""
    metrics = _metrics(runs)
    rows = [
        (
            f"{run.name} {arm.name}",
            [str(interval(run.arms, arm.name, m)) if m in run.arms[arm.name] else "" for m in metrics],
        )
        for run in runs
        for arm in run.ordered
    ]
    lines = _lines("", metrics, rows)
    differences = [
        (f"{b.name} {arm} - {a.name} {before}", [_cell(a, before, b, arm, m) for m in metrics])
        for a, before, b, arm in _pairs(runs)
    ]
    if differences:
        lines += ["", *_lines("difference", metrics, differences)]
        lines += [
            "",
            "*: its interval excludes 0. Intervals take the arms to be independent, so shared noise makes them wide.",
        ]
    return "\n".join(lines)


def _metrics(runs: Sequence[Scores]) -> list[str]:
    found = dict.fromkeys(name for run in runs for arm in run.arms.values() for name in arm)
    return [*(name for name in METRICS if name in found), *(name for name in found if name not in METRICS)]


def _pairs(runs: Sequence[Scores]) -> Iterator[tuple[Scores, str, Scores, str]]:
    """Arms to be compared: those that a later run shares with the first, and the result of both; of a single run, its
    result with each other arm."""
    first = runs[0]
    if len(runs) == 1 and first.main:
        yield from ((first, a.name, first, first.main) for a in first.ordered if a.name not in ("real", first.main))
    for run in runs[1:]:
        if first.main and run.main and first.main != run.main:
            yield first, first.main, run, run.main
        yield from ((first, a.name, run, a.name) for a in first.ordered if a.name in run.arms and a.name != "real")


def difference(a: Interval, b: Interval) -> Interval:
    """``b - a`` with its 95 % interval, from those of both as if they were independent (MOVER; Zou and Donner 2008)."""
    mean = b.mean - a.mean
    low, high = math.hypot(b.mean - b.low, a.high - a.mean), math.hypot(b.high - b.mean, a.mean - a.low)
    return Interval(mean, mean - low, mean + high)


def _cell(a: Scores, before: str, b: Scores, arm: str, metric: str) -> str:
    if metric not in a.arms[before] or metric not in b.arms[arm]:
        return ""
    name = metric.removeprefix("reward/").partition("/")[0]
    if metric.startswith("reward/") and _reward(a, name) != _reward(b, name):
        return "another reward"
    found = difference(interval(a.arms, before, metric), interval(b.arms, arm, metric))
    return f"{found}{' *' if found.low > 0 or found.high < 0 else ''}"


def _reward(run: Scores, name: str) -> Any:
    return (run.settings.get("rewards") or {}).get(name)


def _lines(title: str, metrics: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> list[str]:
    first = max(len(name) for name, _ in rows)
    widths = [max(len(m), *(len(cells[i]) for _, cells in rows)) + 2 for i, m in enumerate(metrics)]
    table = [(title, list(metrics)), *rows]
    return [
        f"{name:{first}}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)) for name, cells in table
    ]


def write_sheet(runs: Sequence[Scores], out: Path) -> None:
    """The pictures that evaluation keeps of each arm, the same prompts and seeds below one another.

    Raises:
        ValueError: a folder has none, or ``out`` is there already.
    """
    if out.exists():
        raise ValueError(f"--sheet: {out} is there already; name a new file")
    strips: list[tuple[str, Image.Image]] = []
    for run in runs:
        for arm in run.ordered:
            path = run.folder / "evaluation" / f"{arm.name}.png"
            try:
                with Image.open(path, formats=("PNG",)) as image:
                    strips.append((f"{run.name} {arm.name}", image.convert("RGB")))
            except OSError as error:
                raise ValueError(f"--sheet: the pictures of {run.name} {arm.name} cannot be read: {error}") from None
    width, label = min(WIDEST, max(image.width for _, image in strips)), 16
    scaled = [(name, image.resize((width, max(1, image.height * width // image.width)))) for name, image in strips]
    sheet = Image.new("RGB", (width, sum(image.height + label for _, image in scaled)), "white")
    top = 0
    for name, image in scaled:
        ImageDraw.Draw(sheet).text((2, top + 2), name, fill="black")
        sheet.paste(image, (0, top + label))
        top += label + image.height
    save_png(sheet, out, {"rows": [name for name, _ in scaled]})
