"""One self-contained HTML page a run: verdict, pictures, scores, curves, settings.

The page is made from the run folder alone, so that it can be written again at any moment, by any process, also of a run
that was killed: whatever is not there yet is left out. It fetches nothing and runs no script; captions and settings
are untrusted text, which the template escapes.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from sigmazero.metrics import read_metrics
from sigmazero.training.folder import read_description

# What a run must reach. Means are compared, not intervals; a value at its bound passes.
READ_LOSS = 0.03  # the student may read this much less than the teacher
DISTANCE_TO_TEACHER = 1.6  # fd_feat of the student over that of the teacher, at most
DISTANCE_TO_FEW_STEPS = 0.25  # the same over that of the teacher with the student's step count, at most
DIVERSITY_KEPT = 0.8  # diversity of the student over that of the teacher, at least
READ_TAUGHT = 0.9  # flow matching: share of captions that are read, at least
DISTANCE_TO_REAL = 2.5  # flow matching: fd_feat over that of fresh real pictures, at most

METRICS = {
    "read_accuracy": "share of pictures in which a reader finds everything that the caption names; higher is better",
    "fd_feat": "Fréchet distance of reader features to those of fresh real pictures; lower is better, and the value of "
    "the real pictures (mean, lowest and highest of several draws) is the floor",
    "diversity": "mean distance in reader features between pictures of one caption; higher is more varied, and the "
    "value of the real pictures is the one to keep",
    "drift": "mean difference from real pictures in channel means, contrast and saturation; lower is better",
}
MAX_HISTORY = 8  # rows of pictures over training
_ROUNDING = 1e-9
_ORDER = ("real", "teacher", "student", "student_raw")
_COLOURS = {
    "student": "#2563c9",
    "student_raw": "#7aa7ea",
    "fake_score": "#d9690f",
    "score": "#8250b5",
    "teacher": "#3f7d4e",
    "real": "#6b7280",
}
_OTHER_COLOUR = "#475569"

Values = Mapping[str, Any]
Rows = Sequence[Mapping[str, float]]
Check = tuple[bool | None, str]  # None: does not apply


def write_report(folder: Path) -> Path:
    """Writes ``report.html`` of a run folder, whole or not at all, from whatever the folder holds by now.

    Raises:
        ValueError: the folder holds no run.
    """
    described = read_description(folder)
    if described is None:
        raise ValueError(f"{folder} is not a run folder: it has no run.json")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((Path(__file__).parent / "assets" / "report.html.j2").read_text("utf-8"))
    path = folder / "report.html"
    aside = path.with_name(path.name + ".writing")
    aside.write_text(template.render(_page(folder, described)), "utf-8")
    os.replace(aside, path)
    return path


# Arms


@dataclass(frozen=True)
class Arm:
    """What an arm's name says, and the network calls of a picture: ``teacher@25``, guided, costs 50."""

    name: str
    role: str
    num_steps: int  # 0: not sampled (real pictures)
    guided: bool

    @property
    def calls(self) -> int:
        return self.num_steps * (2 if self.guided else 1)

    @property
    def cost(self) -> str:
        """``50 (25 guided steps)`` or ``2``."""
        return f"{self.calls} ({_count(self.num_steps, 'guided step')})" if self.guided else str(self.calls)

    @property
    def label(self) -> str:
        if self.num_steps == 0:
            return "Real pictures" if self.role == "real" else self.name
        who = "Student, not averaged" if self.role == "student_raw" else self.role.replace("_", " ").capitalize()
        calls = _count(self.calls, "call")
        return f"{who}, {_count(self.num_steps, 'guided step')} ({calls})" if self.guided else f"{who}, {calls}"


def arm_of(name: str, algorithm: Values) -> Arm:
    """The arm of a name under the ``algorithm`` settings of its run, which alone say who is guided."""
    role, _, steps = name.partition("@")
    if not steps.isdecimal():
        return Arm(name, role, 0, False)
    may_be_guided = role == "teacher" or algorithm.get("name") == "flow_matching"
    return Arm(name, role, int(steps), may_be_guided and algorithm.get("guidance", 2.0) != 1)


def _arms_of(names: Iterable[str], algorithm: Values) -> list[Arm]:
    """Real pictures first, then the teacher, most steps first, then the student."""

    def rank(arm: Arm) -> tuple[int, int, str]:
        return _ORDER.index(arm.role) if arm.role in _ORDER else len(_ORDER), -arm.num_steps, arm.name

    return sorted((arm_of(name, algorithm) for name in names), key=rank)


# Verdict


def verdict(scores: Values) -> tuple[bool | None, list[str]]:
    """Whether a run did what it is for, and a sentence with the numbers for each check.

    Args:
        scores: the content of ``scores.json``; empty where there is none yet.
    Returns: None while something that is compared has no scores, else whether every check passes.
    """
    scored: Values = scores.get("arms") or {}
    if not scored:
        return None, ["No scores yet."]
    arms = _arms_of(scored, (scores.get("settings") or {}).get("algorithm") or {})
    student = next((arm for arm in arms if arm.role == "student"), None)
    if student is None:
        return None, ["No scores of the student yet."]
    teachers = [arm for arm in arms if arm.role == "teacher"]
    floor = f"teacher@{student.num_steps}" if teachers else "real"
    if floor not in scored:
        return None, [f"Not judged: {floor} has no scores."]
    checks = list(_distilled(scored, student, teachers[0]) if teachers else _taught(scored, student))
    outcomes = {True: "pass", False: "fail", None: "not applicable"}
    return not any(passed is False for passed, _ in checks), [f"{text}: {outcomes[passed]}." for passed, text in checks]


def _distilled(scored: Values, student: Arm, teacher: Arm) -> Iterator[Check]:
    """The student against the teacher, and against the teacher with as few steps."""
    few = f"teacher@{student.num_steps}"
    own, its = _mean(scored, student.name, "read_accuracy"), _mean(scored, teacher.name, "read_accuracy")
    yield (
        own >= its - READ_LOSS - _ROUNDING,
        f"The student reads {_percent(own)} of captions with {_count(student.calls, 'network call')}; "
        f"the teacher reads {_percent(its)} with {teacher.cost}",
    )
    own, its = _mean(scored, student.name, "fd_feat"), _mean(scored, teacher.name, "fd_feat")
    yield (
        own <= its * DISTANCE_TO_TEACHER + _ROUNDING,
        f"Its distance to real pictures (fd_feat) is {_number(own)}, {_ratio(own, its)} times the teacher's "
        f"{_number(its)}",
    )
    few_steps = _count(student.num_steps, "step")
    if few == teacher.name:
        yield None, f"Comparison with the teacher at the student's {few_steps}, which is the teacher's own step count"
    else:
        its = _mean(scored, few, "fd_feat")
        yield (
            own <= its * DISTANCE_TO_FEW_STEPS + _ROUNDING,
            f"That is {_ratio(own, its)} times the {_number(its)} that the teacher has with {few_steps}",
        )
    own, its = _mean(scored, student.name, "diversity"), _mean(scored, teacher.name, "diversity")
    yield (
        own >= its * DIVERSITY_KEPT - _ROUNDING,
        f"Its pictures of one caption vary by {_number(own)} (diversity), {_ratio(own, its)} times the teacher's "
        f"{_number(its)}",
    )


def _taught(scored: Values, student: Arm) -> Iterator[Check]:
    """A flow-matching student against the captions and against real pictures."""
    read = _mean(scored, student.name, "read_accuracy")
    calls = f"{_count(student.calls, 'network call')}"
    steps = f" ({_count(student.num_steps, 'guided step')})" if student.guided else ""
    yield read >= READ_TAUGHT - _ROUNDING, f"The student reads {_percent(read)} of captions with {calls}{steps}"
    own, its = _mean(scored, student.name, "fd_feat"), _mean(scored, "real", "fd_feat")
    yield (
        own <= its * DISTANCE_TO_REAL + _ROUNDING,
        f"Its distance to real pictures (fd_feat) is {_number(own)}, {_ratio(own, its)} times that of other real "
        f"pictures, {_number(its)}",
    )


def _criteria(algorithm: Values) -> str:
    """The bounds of the verdict, in words."""
    if algorithm.get("name") == "flow_matching":
        return (
            f"To pass, the student must read at least {_percent(READ_TAUGHT)} of captions, with an fd_feat of at most "
            f"{DISTANCE_TO_REAL:g} times that of real pictures."
        )
    return (
        f"To pass, the student must read at most {100 * READ_LOSS:g} points less than the teacher, with an fd_feat of "
        f"at most {DISTANCE_TO_TEACHER:g} times the teacher's and {DISTANCE_TO_FEW_STEPS:g} times that of the teacher "
        f"with as few steps, and a diversity of at least {DIVERSITY_KEPT:g} times the teacher's."
    )


def health(rows: Rows, described: Values) -> list[str]:
    """Sentences on what should not have happened in a run, whatever its scores.

    Args:
        rows: of ``metrics.jsonl``.
        described: the content of ``run.json``.
    """
    sentences = []
    bad = [(row["cycle"], name) for row in rows for name in row if name.startswith("train/nonfinite_") and row[name]]
    if bad:
        names = sorted({name.removeprefix("train/nonfinite_") for _, name in bad})
        sentences.append(
            f"Non-finite values were met, last around cycle {bad[-1][0]:,} ({', '.join(names)}); "
            "those updates were skipped."
        )
    gaps = [row.get("train/student_x0_recompute_gap", 0.0) for row in rows]
    gap = max((gap for gap in gaps if math.isfinite(gap)), default=0.0)
    if gap > 0 and _on_cpu(described):
        sentences.append(
            f"The student's step, computed again, differs from its rollout (student_x0_recompute_gap up to {gap:.2g}); "
            "on CPU it must be exactly 0."
        )
    return sentences


def _on_cpu(described: Values) -> bool:
    """Whether a run surely was on CPU. With device ``auto`` only a CPU build of torch tells."""
    device = described["config"].get("training", {}).get("device", "auto")
    return device == "cpu" or (device == "auto" and str(described["versions"].get("torch")).endswith("+cpu"))


# Curves


@dataclass(frozen=True)
class Series:
    """One curve: finite values only."""

    label: str
    cycles: np.ndarray  # [n]
    values: np.ndarray  # [n]

    @property
    def colour(self) -> str:
        return _COLOURS.get(self.label.partition("@")[0], _OTHER_COLOUR)


@dataclass(frozen=True)
class Panel:
    """One small plot. ``smooth`` draws the values faint under their running mean."""

    title: str
    series: Sequence[Series]
    smooth: bool = True
    may_be_log: bool = True
    limits: tuple[float, float] | None = None
    levels: Sequence[tuple[str, float]] = ()  # horizontal lines for comparison: arm, value


def panels(rows: Rows, scores: Values) -> list[Panel]:
    """The plots that a run has values for."""
    curves = _curves(rows)
    distilled = "train/fake_score_loss" in curves
    losses = [
        Panel(f"Loss, {s.label.replace('_', ' ')}" + (" (carries a gradient; not a quality)" if carries else ""), [s])
        for s in _series(curves, "train/", "_loss")
        for carries in (distilled and s.label == "student",)
    ]
    scored: Values = scores.get("arms") or {}
    levels = [(a.name, _mean(scored, a.name, "read_accuracy")) for a in _arms_of(scored, {}) if a.role == "teacher"]
    read, distance = (_series(curves, "evaluate/", f"/{name}") for name in ("read_accuracy", "fd_feat"))
    found = [
        *losses,
        Panel("Gradient norm, before clipping", _series(curves, "train/", "_grad_norm")),
        Panel("Learning rate", _series(curves, "train/", "_lr"), smooth=False, may_be_log=False),
        Panel("Gradient on the student's samples, rms", _series(curves, "train/", "_gradient_rms")),
        Panel("Captions read (read_accuracy)", read, False, False, (-0.02, 1.02), levels),
        Panel("Distance to real pictures (fd_feat)", distance, smooth=False),
        Panel("Seconds a cycle", _series(curves, "time/", "cycle")),
    ]
    return [panel for panel in found if panel.series]


def _curves(rows: Rows) -> dict[str, list[tuple[float, float]]]:
    """The finite values of each metric with their cycles, in one pass: a long run has many rows."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if math.isfinite(value):
                curves.setdefault(name, []).append((row["cycle"], value))
    return curves


def _series(curves: Mapping[str, list[tuple[float, float]]], prefix: str, suffix: str) -> list[Series]:
    """A curve for each metric between prefix and suffix, labelled with what stands there."""
    names = [name for name in curves if name.startswith(prefix) and name.endswith(suffix)]
    points = {name[len(prefix) : len(name) - len(suffix)]: np.array(curves[name]) for name in names}
    return [Series(label, xy[:, 0], xy[:, 1]) for label, xy in points.items()]


def smoothed(values: np.ndarray) -> np.ndarray:
    """A centred running mean over a 25th of the values, over what there is of it at both ends."""
    n, half = len(values), len(values) // 50
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low, high = np.maximum(np.arange(n) - half, 0), np.minimum(np.arange(n) + half + 1, n)
    return (sums[high] - sums[low]) / (high - low)


def extremes(values: np.ndarray, num_bins: int = 500) -> np.ndarray:
    """Indices of the least and the greatest value of each bin: a curve of many points is drawn fast, spikes and all."""
    if len(values) <= 2 * num_bins:
        return np.arange(len(values))
    size = len(values) // num_bins
    bins, starts = values[: size * num_bins].reshape(num_bins, size), np.arange(num_bins) * size
    rest = np.arange(size * num_bins, len(values))
    return np.unique(np.concatenate([starts + bins.argmin(1), starts + bins.argmax(1), rest]))


def _draw(panel: Panel) -> str:
    """A panel as a picture. No global state of matplotlib: training may plot too, in another thread."""
    figure = Figure(figsize=(4.1, 2.4), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.125, 0.185, 0.835, 0.785))
    for series in panel.series:
        smooth = panel.smooth and len(series.values) >= 50
        style: dict[str, Any] = {"color": series.colour, "solid_capstyle": "round"}
        marker = "o" if len(series.values) <= 30 else ""
        kept = extremes(series.values)
        if smooth:
            axes.plot(series.cycles[kept], series.values[kept], linewidth=0.7, alpha=0.28, **style)
        y = smoothed(series.values) if smooth else series.values
        axes.plot(series.cycles[kept], y[kept], linewidth=1.5, marker=marker, markersize=3, label=series.label, **style)
    for (name, value), dashes in zip(panel.levels, ((5, 2), (1.5, 2)), strict=False):
        axes.axhline(value, color=_COLOURS["teacher"], linewidth=1.2, linestyle=(0, dashes), label=name)
    _style(axes, panel)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return _data_uri(data.getvalue())


def _style(axes: Axes, panel: Panel) -> None:
    values = np.concatenate([series.values for series in panel.series])
    if panel.may_be_log and values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=7))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    if panel.limits is not None:
        axes.set_ylim(panel.limits)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("cycle", fontsize=8, color="#57606a", labelpad=2)
    axes.tick_params(labelsize=8, colors="#57606a", length=0, which="both")
    axes.grid(color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#c4c9cf")
    if len(panel.series) + len(panel.levels) > 1:
        axes.legend(fontsize=7.5, frameon=True, framealpha=0.8, edgecolor="none", borderpad=0.2, labelcolor="#24292f")


# Pictures


def _pictures(path: Path) -> list[str]:
    """The square pictures of a strip, each as a data URI; none where the file is missing or cut off."""
    try:
        with Image.open(path) as opened:
            strip = opened.convert("RGB")
    except (OSError, SyntaxError):
        return []
    size, parts = strip.height, []
    for left in range(0, strip.width - size + 1, size):
        data = io.BytesIO()
        strip.crop((left, 0, left + size, size)).save(data, format="PNG")
        parts.append(_data_uri(data.getvalue()))
    return parts


def _picture_rows(evaluation: Path, algorithm: Values) -> list[tuple[str, list[str]]]:
    """A label and pictures for each arm that has been sampled."""
    arms = _arms_of((path.stem for path in evaluation.glob("*.png")), algorithm)
    rows = [(arm.label, _pictures(evaluation / f"{arm.name}.png")) for arm in arms]
    return [row for row in rows if row[1]]


def _history_rows(history: Path) -> list[tuple[str, list[str]]]:
    """The same for the student while it was trained: at most ``MAX_HISTORY``, the first and the last among them."""
    paths = sorted((path for path in history.glob("*.png") if path.stem.isdecimal()), key=lambda path: int(path.stem))
    if len(paths) > MAX_HISTORY:
        paths = [paths[round(i * (len(paths) - 1) / (MAX_HISTORY - 1))] for i in range(MAX_HISTORY)]
    rows = [(f"After {_count(int(path.stem), 'cycle')}", _pictures(path)) for path in paths]
    return [row for row in rows if row[1]]


# The page


def _page(folder: Path, described: Values) -> dict[str, Any]:
    """What the template shows."""
    config, rows = described["config"], read_metrics(folder / "metrics.jsonl")
    algorithm, scores = config.get("algorithm", {}), _read_json(folder / "scores.json") or {}
    passed, sentences = verdict(scores)
    cycle = config["num_cycles"] if described["finished"] else int(rows[-1]["cycle"]) if rows else 0
    return {
        "name": folder.resolve().name,
        "subtitle": _subtitle(algorithm),
        "finished": described["finished"],
        "cycle": cycle,
        "num_cycles": config["num_cycles"],
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "passed": passed,
        "sentences": sentences,
        "scored_cycle": scores.get("cycle"),
        "criteria": _criteria(algorithm),
        "health": health(rows, described),
        "captions": _read_json(folder / "evaluation" / "captions.json") or [],
        "arms": _picture_rows(folder / "evaluation", algorithm),
        "history": _history_rows(folder / "evaluation" / "history"),
        "metrics": METRICS,
        "scores": _score_rows(scores.get("arms") or {}, algorithm),
        "curves": [(panel.title, _draw(panel)) for panel in panels(rows, scores)],
        "refreshed": any(name.startswith("evaluate/") for row in rows for name in row),
        "settings": _setting_groups(config),
        "versions": {"python": described["python"], **described["versions"]},
        "commands": [f"sigmazero {verb} {shlex.quote(str(folder))}" for verb in ("evaluate", "sample")],
    }


def _subtitle(algorithm: Values) -> str:
    if algorithm.get("name") == "flow_matching":
        student = arm_of(f"student@{algorithm.get('num_steps')}", algorithm)
        return f"Flow matching on captioned pictures; sampled with {_count(student.calls, 'network call')} a picture"
    if "teacher_steps" not in algorithm:
        return str(algorithm.get("name", ""))
    teacher = arm_of(f"teacher@{algorithm['teacher_steps']}", algorithm)
    student = arm_of(f"student@{algorithm['num_steps']}", algorithm)
    return (
        f"Distillation ({str(algorithm['name']).upper()}) of a teacher with {_count(teacher.calls, 'network call')} a "
        f"picture into a student with {student.calls}"
    )


def _score_rows(scored: Values, algorithm: Values) -> list[tuple[str, str, list[str]]]:
    """Label, arm, and a cell for each metric: ``0.912 [0.895, 0.930]``."""
    return [
        (arm.label, arm.name, [_interval(scored[arm.name].get(metric)) for metric in METRICS])
        for arm in _arms_of(scored, algorithm)
    ]


def _interval(metric: Mapping[str, float] | None) -> str:
    if metric is None:
        return "–"
    digits = _digits(metric["mean"])
    return f"{metric['mean']:.{digits}f} [{metric['low']:.{digits}f}, {metric['high']:.{digits}f}]"


def _setting_groups(config: Values) -> list[list[tuple[str, str]]]:
    """Dotted keys and values, those of one section (or one optimizer) together."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, value in _flat(config):
        section = key.rpartition(".")[0]
        groups.setdefault(section, []).append((key, value if isinstance(value, str) else json.dumps(value)))
    return list(groups.values())


def _flat(values: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _read_json(path: Path) -> Any:
    """The content of a file, None where it is missing or cut off."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _mean(scored: Values, arm: str, metric: str) -> float:
    """NaN where it was not measured: no check passes with it."""
    return float(scored[arm].get(metric, {}).get("mean", math.nan))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _digits(value: float) -> int:
    return 4 if abs(value) < 0.1 else 3 if abs(value) < 100 else 1


def _number(value: float) -> str:
    return f"{value:.{_digits(value)}f}"


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base else "∞"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
