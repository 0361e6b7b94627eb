"""One self-contained HTML page a run: verdict, pictures, scores, curves, settings.

The page is made from the run folder alone, so that it can be written again at any moment, by any process, also of a run
that was killed: whatever is not there yet is left out. It fetches nothing and runs no script; captions and settings
are untrusted text, which the template escapes.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
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

from sigmazero.curves import COLOURS, Panel, Rows, curves_of, extremes, panels, rl_panels, smoothed, still
from sigmazero.health import health, rl_health, summary, worst
from sigmazero.metrics import read_metrics
from sigmazero.training.folder import read_description
from sigmazero.verdict import Values, arm_of, arms_of, count, criteria, interval, is_rl, scored_terms, terms_of, verdict

METRICS = {
    "read_accuracy": "share of pictures in which a reader finds everything that the caption names; higher is better",
    "fd_feat": "Fréchet distance of reader features to those of fresh real pictures; lower is better, and the value of "
    "the real pictures (mean, lowest and highest of several draws) is the floor",
    "diversity": "mean distance in reader features between pictures of one caption; higher is more varied, and the "
    "value of the real pictures is the one to keep",
    "drift": "mean difference from real pictures, or where there are none from the base's, in channel means, contrast "
    "and saturation; lower is better",
}
MAX_HISTORY = 8  # rows of pictures over training
MAX_LABEL = 28  # characters of a curve's name in its plot
_RL_NAMES = {
    "flow_grpo": "Flow-GRPO",
    "nft": "DiffusionNFT",
    "awm": "advantage-weighted matching",
    "best_of_group": "best of group",
    "dpo": "Diffusion-DPO",
}


def write_report(folder: Path, *, finished: bool = False) -> Path:
    """Writes ``report.html`` of a run folder, whole or not at all, from whatever the folder holds by now.

    Args:
        finished: nothing is to come, though the folder does not say so yet.
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
    aside.write_text(
        template.render(_page(folder, {**described, "finished": finished or described["finished"]})), "utf-8"
    )
    os.replace(aside, path)
    return path


# Drawing


def _draw(panel: Panel) -> str:
    """A panel as a picture. No global state of matplotlib: training may plot too, in another thread."""
    figure = Figure(figsize=(4.1, 2.4), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.125, 0.185, 0.705 if panel.ordered else 0.835, 0.785))
    for series in panel.series:
        smooth, label = panel.smooth and len(series.values) >= 50, _plain(series.label)
        style: dict[str, Any] = {"color": series.colour, "solid_capstyle": "round"}
        marker = "o" if len(series.values) <= 30 else ""
        kept = extremes(series.values)
        if smooth and not panel.ordered:
            axes.plot(series.cycles[kept], series.values[kept], linewidth=0.7, alpha=0.28, **style)
        y = smoothed(series.values) if smooth else series.values
        axes.plot(series.cycles[kept], y[kept], linewidth=1.5, marker=marker, markersize=3, label=label, **style)
    for (name, value), dashes in zip(panel.levels, ((5, 2), (1.5, 2)), strict=False):
        colour = COLOURS[name.partition("@")[0]]
        axes.axhline(value, color=colour, linewidth=1.2, linestyle=(0, dashes), label=name)
    _style(axes, panel)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return _data_uri(data.getvalue())


def _plain(label: str) -> str:
    """A name, which may hold anything, as text that matplotlib draws as it stands and keeps in a legend."""
    text = "".join(c if c.isascii() and c.isprintable() else "?" for c in label).replace("$", r"\$")
    text = text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 3]}..."
    return f" {text}" if text.startswith("_") else text


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
    if panel.ordered:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.03), "labelspacing": 0.25}
        axes.legend(fontsize=7, title="sigma", title_fontsize=7, frameon=False, handlelength=1.2, **place)
    elif len(panel.series) + len(panel.levels) > 1:
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
    arms = arms_of((path.stem for path in evaluation.glob("*.png")), algorithm)
    rows = [(arm.label, _pictures(evaluation / f"{arm.name}.png")) for arm in arms]
    return [row for row in rows if row[1]]


def _history_rows(history: Path) -> list[tuple[str, list[str]]]:
    """The same for the student while it was trained: at most ``MAX_HISTORY``, the first and the last among them."""
    paths = sorted((path for path in history.glob("*.png") if path.stem.isdecimal()), key=lambda path: int(path.stem))
    if len(paths) > MAX_HISTORY:
        paths = [paths[round(i * (len(paths) - 1) / (MAX_HISTORY - 1))] for i in range(MAX_HISTORY)]
    rows = [(f"After {count(int(path.stem), 'cycle')}", _pictures(path)) for path in paths]
    return [row for row in rows if row[1]]


# The page


def _page(folder: Path, described: Values) -> dict[str, Any]:
    """What the template shows."""
    config, rows = described["config"], read_metrics(folder / "metrics.jsonl")
    algorithm, scores = config.get("algorithm", {}), _read_json(folder / "scores.json") or {}
    passed, sentences = verdict(scores, config.get("rewards"))
    scored, columns = scores.get("arms") or {}, _columns(scores.get("arms") or {}, config)
    cycle = config["num_cycles"] if described["finished"] else int(rows[-1]["cycle"]) if rows else 0
    return {
        "name": folder.resolve().name,
        "subtitle": _subtitle(config),
        "finished": described["finished"],
        "cycle": cycle,
        "num_cycles": config["num_cycles"],
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "passed": passed,
        "sentences": sentences,
        "scored_cycle": scores.get("cycle"),
        "criteria": criteria(algorithm),
        **(_rl_log if is_rl(algorithm) else _log)(rows, described, scores),
        "captions": _read_json(folder / "evaluation" / "captions.json") or [],
        "arms": _picture_rows(folder / "evaluation", algorithm),
        "history": _history_rows(folder / "evaluation" / "history"),
        "history_title": f"The {'averaged policy' if is_rl(algorithm) else 'student'} over training",
        "columns": columns,
        "scores": _score_rows(scored, algorithm, [name for name, _, _ in columns]),
        "refreshed": any(name.startswith("evaluate/") for row in rows for name in row),
        "settings": _setting_groups(config),
        "versions": {"python": described["python"], **described["versions"]},
        "commands": [f"sigmazero {verb} {shlex.quote(str(folder))}" for verb in ("evaluate", "sample")],
    }


def _log(rows: Rows, described: Values, scores: Values) -> dict[str, Any]:
    """What the template shows of the metrics log."""
    curves = [(panel.title, _draw(panel)) for panel in panels(rows, scores)]
    return {"health": health(rows), "findings": None, "curves": curves, "still": []}


def _rl_log(rows: Rows, described: Values, scores: Values) -> dict[str, Any]:
    """The same of online RL, whose health is always shown."""
    curves = curves_of(rows)
    findings = rl_health(curves, len(rows), described, scores)
    return {
        "health": [],
        "findings": findings,
        "worst": worst(findings),
        "summary": summary(findings),
        "curves": [(panel.title, _draw(panel)) for panel in rl_panels(curves, scores, described["config"])],
        "still": still(curves),
    }


def _subtitle(config: Values) -> str:
    algorithm = config.get("algorithm", {})
    if is_rl(algorithm):
        return _rl_subtitle(algorithm, config.get("rewards") or {})
    if algorithm.get("name") == "flow_matching":
        student = arm_of(f"student@{algorithm.get('num_steps')}", algorithm)
        return f"Flow matching on captioned pictures; sampled with {count(student.calls, 'network call')} a picture"
    if "teacher_steps" not in algorithm:
        return str(algorithm.get("name", ""))
    teacher = arm_of(f"teacher@{algorithm['teacher_steps']}", algorithm)
    student = arm_of(f"student@{algorithm['num_steps']}", algorithm)
    return (
        f"Distillation ({str(algorithm['name']).upper()}) of a teacher with {count(teacher.calls, 'network call')} a "
        f"picture into a student with {student.calls}"
    )


def _rl_subtitle(algorithm: Values, rewards: Values) -> str:
    whole = [name for name, settings in rewards.items() if not isinstance(settings.get("weight"), Mapping)]
    terms, calls = terms_of(rewards, whole), arm_of("final", algorithm).calls
    named = {flag: ", ".join(term.name for term in terms if term.optimised == flag) for flag in (True, False)}
    watched = f", watching {named[False]}" if named[False] else ""
    return (
        f"Online RL ({_RL_NAMES[algorithm['name']]}) on the reward {named[True]}{watched}; sampled with "
        f"{count(calls, 'network call')} a picture"
    )


def _columns(scored: Values, config: Values) -> list[tuple[str, str, str]]:
    """Of the table of scores: metric, what a reward is to the run, meaning."""
    terms = scored_terms(scored, config.get("rewards") or {})
    columns = [(f"reward/{term.name}", term.standing, term.meaning) for term in terms]
    return columns + [(name, "", meaning) for name, meaning in METRICS.items()]


def _score_rows(scored: Values, algorithm: Values, metrics: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """Label, arm, and a cell for each metric: ``0.912 [0.895, 0.930]``."""
    return [
        (arm.label, arm.name, [_cell(scored, arm.name, metric) for metric in metrics])
        for arm in arms_of(scored, algorithm)
    ]


def _cell(scored: Values, arm: str, metric: str) -> str:
    return str(interval(scored, arm, metric)) if metric in scored[arm] else "–"


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
