"""Which curves a run's page shows, from the rows of ``metrics.jsonl``. Drawing them is the report's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sigmazero.metrics import adds_up
from sigmazero.verdict import Term, Values, arms_of, interval, mean_of, terms_of

MAX_SIGMAS = 12  # curves of one panel by timestep; of more, evenly spaced ones are drawn
COLOURS = {
    "student": "#2563c9",
    "student_raw": "#7aa7ea",
    "fake_score": "#d9690f",
    "score": "#8250b5",
    "teacher": "#3f7d4e",
    "real": "#6b7280",
    "start": "#b45309",
}
_OTHER_COLOUR = "#475569"
_SHADES = ("#2563c9", "#d9690f", "#3f7d4e", "#8250b5", "#c2337b", "#0f8a8a")  # of curves without a colour of their own
_LOW_SIGMA, _MIDDLE_SIGMA, _HIGH_SIGMA = (240, 160, 40), (205, 55, 90), (55, 25, 115)  # amber, red, dark violet

Rows = Sequence[Mapping[str, float]]
Curves = Mapping[str, Sequence[tuple[float, float]]]
"""Cycles and values by metric: finite ones only."""


@dataclass(frozen=True)
class Series:
    """One curve: finite values only. ``shade``: a colour of its own."""

    label: str
    cycles: np.ndarray  # [n]
    values: np.ndarray  # [n]
    shade: str = ""

    @property
    def colour(self) -> str:
        return self.shade or COLOURS.get(self.label.partition("@")[0], _OTHER_COLOUR)


@dataclass(frozen=True)
class Panel:
    """One small plot. ``smooth`` draws the values faint under their running mean, or the mean alone where ``ordered``:
    curves of one quantity by timestep."""

    title: str
    series: Sequence[Series]
    smooth: bool = True
    may_be_log: bool = True
    limits: tuple[float, float] | None = None
    levels: Sequence[tuple[str, float]] = ()  # horizontal lines for comparison: arm, value
    ordered: bool = False


def panels(rows: Rows, scores: Values) -> list[Panel]:
    """The plots that a run has values for."""
    curves = curves_of(rows)
    distilled = "train/fake_score_loss" in curves
    losses = [
        Panel(f"Loss, {s.label.replace('_', ' ')}" + (" (carries a gradient; not a quality)" if carries else ""), [s])
        for s in _series(curves, "train/", "_loss")
        for carries in (distilled and s.label == "student",)
    ]
    scored: Values = scores.get("arms") or {}
    levels = [(a.name, mean_of(scored, a.name, "read_accuracy")) for a in arms_of(scored, {}) if a.role == "teacher"]
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


def curves_of(rows: Rows) -> dict[str, list[tuple[float, float]]]:
    """The finite values of each metric with their cycles, in one pass: a long run has many rows. Durations and counts
    are those of one cycle."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        cycles = row.get("count/cycles") or 1
        for name, value in row.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                curves.setdefault(name, []).append((row["cycle"], value / cycles if adds_up(name) else value))
    return curves


def _series(curves: Curves, prefix: str, suffix: str) -> list[Series]:
    """A curve for each metric between prefix and suffix, labelled with what stands there."""
    names = [name for name in curves if name.startswith(prefix) and name.endswith(suffix)]
    points = {name[len(prefix) : len(name) - len(suffix)]: np.array(curves[name]) for name in names}
    return [Series(label, xy[:, 0], xy[:, 1]) for label, xy in points.items()]


# Online RL


def rl_panels(curves: Curves, scores: Values, config: Values) -> list[Panel]:
    """The plots that a run of online RL has values for."""
    scored: Values = scores.get("arms") or {}
    terms = terms_of(config.get("rewards") or {}, reward_names(curves))
    carries = (config.get("algorithm") or {}).get("name") in ("flow_grpo", "nft", "awm")
    loss = "Loss, policy" + (" (carries a gradient; not a quality)" if carries else "")
    found = [
        *_reward_panels("Reward of the rollout", "reward/", curves, terms, {}),
        *_reward_panels("Reward on held-out captions", "evaluate/final/reward/", curves, terms, scored),
        _held_out("Captions read (read_accuracy)", curves, scored, "read_accuracy", _SHARE),
        _held_out("Diversity", curves, scored, "diversity"),
        _held_out("Distance to real pictures (fd_feat)", curves, {}, "fd_feat"),
        _held_out("Drift", curves, {}, "drift"),
        _panel("KL to the start, in nats a transition", curves, {"train/kl_nats": "KL"}),
        *(_by_sigma(curves, metric, title) for metric, title, _ in _BY_SIGMA),
        _panel(loss, curves, {"train/policy_loss": "loss"}, may_be_log=True),
        _panel("Gradient norm, before clipping", curves, {"train/policy_grad_norm": "norm"}, may_be_log=True),
        *(_panel(title, curves, names, limits) for title, names, limits in _RL_PANELS if _any_moves(curves, names)),
        Panel("Learning rate", _series(curves, "train/", "_lr"), smooth=False, may_be_log=False),
        _seconds(curves),
    ]
    return [panel for panel in found if panel.series]


_SHARE = (-0.02, 1.02)  # limits of a plot
_BY_SIGMA = (
    (
        "train/policy_ratio_deviation", "Importance ratio: mean |ratio - 1|, by sigma",
        "The importance ratio is exactly 1 at every update.",
    ),
    (
        "train/policy_clip_fraction", "Share of transitions outside the clip range, by sigma",
        "No transition ever left the clip range.",
    ),
    (
        "train/log_prob_mean_abs_diff", "Log-prob gap of rollout and trainer, by sigma",
        "The trainer gives every fresh transition exactly the log-probability that the rollout gave it.",
    ),
)  # fmt: skip
_RL_PANELS: tuple[tuple[str, dict[str, str], tuple[float, float] | None], ...] = (
    ("Groups that teach nothing, as sampled", {"group/dead": "share"}, _SHARE),
    ("Spread of the reward inside groups", {"group/std": "deviation"}, None),
    ("Samples without a score, a cycle", {"reward/failed": "samples"}, None),
    ("Groups sampled to replace dead ones, a cycle", {"group/refilled": "groups"}, None),
    ("Reward weight r (mean; one half by construction)", {"train/policy_reward_weight": "r"}, _SHARE),
    ("Two-sided loss", {"train/policy_positive": "positive", "train/policy_negative": "negative"}, None),
    ("Distance of policy and old policy", {"train/policy_old_distance": "distance"}, None),
    ("Share that the old policy keeps of itself", {"train/old_decay": "decay"}, None),
    ("Pairs in which the policy prefers the better one", {"train/policy_preferred": "share"}, _SHARE),
    ("Margin by which it prefers it", {"train/policy_margin": "margin"}, None),
    ("Velocity error on own samples", {"train/policy_velocity_error": "error"}, None),
    ("KL to the start in the loss", {"train/policy_kl_penalty": "penalty"}, None),
    ("Distance to the start in the loss", {"train/policy_reference_distance": "distance"}, None),
)  # those that are exactly 0 throughout are left out


def still(curves: Curves) -> list[str]:
    """What is exactly 0 throughout, in words: a flat line says less."""
    return [words for metric, _, words in _BY_SIGMA if curves.get(metric) and not _moves(curves, metric)]


def _moves(curves: Curves, metric: str) -> bool:
    """Whether a metric, or one by sigma of it, is ever other than 0."""
    names = [name for name in curves if name == metric or name.startswith(f"{metric}/sigma_")]
    return any(value for name in names for _, value in curves[name])


def reward_names(curves: Curves) -> list[str]:
    """Rewards of the rollout and of evaluation. ``reward/failed`` counts samples."""
    prefixes = ("reward/", "evaluate/final/reward/")
    names = dict.fromkeys(name.removeprefix(p) for p in prefixes for name in curves if name.startswith(p))
    return [name for name in names if name != "failed"]


def _any_moves(curves: Curves, names: Iterable[str]) -> bool:
    return any(_moves(curves, name) for name in names)


def _panel(
    title: str,
    curves: Curves,
    names: Mapping[str, str],
    limits: tuple[float, float] | None = None,
    may_be_log: bool = False,
) -> Panel:
    """A plot of named metrics."""
    found = [(label, np.array(curves[name])) for name, label in names.items() if curves.get(name)]
    shades = _SHADES * (len(found) // len(_SHADES) + 1)
    series = [Series(label, xy[:, 0], xy[:, 1], shade) for (label, xy), shade in zip(found, shades, strict=False)]
    return Panel(title, series, may_be_log=may_be_log, limits=limits)


def _reward_panels(title: str, prefix: str, curves: Curves, terms: Iterable[Term], scored: Values) -> Iterator[Panel]:
    """Optimised and watched rewards apart. Those on the scale from 0 to 1 share a plot; each other has its own."""
    for optimised, which in ((True, "optimised"), (False, "only watched")):
        own = [t for t in terms if t.optimised == optimised and curves.get(prefix + t.name)]
        shared = [t for t in own if all(0 <= value <= 1 for _, value in curves[prefix + t.name])]
        for group in ([shared] if shared else []) + [[t] for t in own if t not in shared]:
            named = f"{title}, {which}" + (f": {group[0].name}" if len(group) == 1 else "")
            panel = _panel(named, curves, {prefix + t.name: t.name for t in group})
            levels = _levels(scored, f"reward/{group[0].name}", ("start",)) if len(group) == 1 else []
            yield Panel(named, panel.series, smooth=prefix == "reward/", may_be_log=False, levels=levels)


def _held_out(
    title: str, curves: Curves, scored: Values, metric: str, limits: tuple[float, float] | None = None
) -> Panel:
    """A score of the averaged policy over training, with those of the start and of real pictures."""
    series = _panel(title, curves, {f"evaluate/final/{metric}": "policy"}).series
    return Panel(title, series, False, False, limits, _levels(scored, metric, ("start", "real")))


def _levels(scored: Values, metric: str, arms: Iterable[str]) -> list[tuple[str, float]]:
    values = [(arm, interval(scored, arm, metric).mean) for arm in arms]
    return [(arm, value) for arm, value in values if math.isfinite(value)]


def _by_sigma(curves: Curves, metric: str, title: str) -> Panel:
    """A curve for each sigma of a metric, amber to violet; none where all of them are 0 (``still`` says it)."""
    prefix = f"{metric}/sigma_"
    names = sorted((n for n in curves if n.startswith(prefix)), key=lambda n: _sigma_of(n, prefix))
    if not _moves(curves, metric):
        return Panel(title, [])
    picked = sorted({round(i) for i in np.linspace(0, len(names) - 1, min(len(names), MAX_SIGMAS))}, reverse=True)
    series = []
    for i in picked:
        xy = np.array(curves[names[i]])
        shade = _shade(i / max(1, len(names) - 1))
        series.append(Series(names[i].removeprefix(prefix), xy[:, 0], xy[:, 1], shade))
    some = f" ({len(picked)} of {len(names)})" if len(picked) < len(names) else ""
    return Panel(title + some, series, ordered=True)


def _sigma_of(name: str, prefix: str) -> float:
    try:
        return float(name.removeprefix(prefix))
    except ValueError:
        return math.inf


def _shade(share: float) -> str:
    """A colour on the way from the lowest sigma's to the highest's."""
    low, high = (_LOW_SIGMA, _MIDDLE_SIGMA) if share < 0.5 else (_MIDDLE_SIGMA, _HIGH_SIGMA)
    at = 2 * share - (share >= 0.5)
    return "#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in zip(low, high, strict=True))


def _seconds(curves: Curves) -> Panel:
    """The seconds of a cycle, and of the rollout and each phase in it."""
    parts = sorted(n for n in curves if n.startswith("time/") and adds_up(n) and "/repeat_" not in n)
    names = {"time/cycle": "whole cycle", "time/rollout": "rollout"}
    names |= {n: n.removeprefix("time/") for n in parts if n not in names}
    return _panel("Seconds a cycle, whole and in parts", curves, names)


# Values


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
