"""What in a run is sound and what is not, in sentences with numbers that say what to do.

A run of online RL gets a line for each check that it has numbers for (``rl_health``). Thresholds stand at the top, each
with its reason; they say where to look, and judge no run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sigmazero.curves import Curves, Rows, reward_names
from sigmazero.verdict import (
    Interval,
    Term,
    Values,
    count,
    interval,
    movement,
    number,
    percent,
    scored_terms,
    terms_of,
)

GROWN, EXPLODED = 10.0, 100.0  # gradient norm at the end over that at the start: Adam forgives a factor of a few
DEAD = 0.5  # share of groups beyond which most of the sampling is spent on nothing
DEAD_THROUGHOUT = 0.9  # the same over a whole run: the reward cannot tell samples of one prompt apart
FAILED = 0.05  # share of samples without a score beyond which what is left may no longer be like the whole
EMPTY = 0.2  # share of logged rows with an update that had nothing to learn from
CLIPPED = 0.9  # share of transitions outside the clip range: what is outside teaches nothing more (B14)
KL_FAR, KL_LOST = 0.125, 0.5  # nats an element: a step's mean lies a half, a whole deviation of its noise off
DISTANCE_GROWN = 2.0  # fd_feat or drift over the start's: more than a change of style costs
DISTANCE_LOST = 4.0  # the same where it is bad: a glyph run whose drift grew sixfold had lost the paper's colours
MOVED = 0.1  # of one sample's deviation: less is no rise of the rollout's reward, which is a mean of new prompts
FALLEN = 0.25  # likewise, of a fall
WEIGHT_OFF = 0.1  # nft's reward weight from one half, which it is on average while advantages average to 0
FEW = 10  # logged values below which start and end of a run are not compared

State = Literal["bad", "look", "ok"]
STATES: tuple[State, ...] = ("bad", "look", "ok")


@dataclass(frozen=True)
class Finding:
    """What one check says: ``ok``, worth a ``look``, or ``bad``."""

    state: State
    name: str
    sentence: str


@dataclass(frozen=True)
class _Run:
    """What the checks read."""

    curves: Curves
    num_rows: int
    config: Values
    scored: Values
    on_cpu: bool

    @property
    def algorithm(self) -> Values:
        return self.config.get("algorithm") or {}

    @property
    def rollout(self) -> Values:
        return self.config.get("rollout") or {}

    @property
    def last_cycle(self) -> float:
        return max((points[-1][0] for points in self.curves.values()), default=0)

    def values(self, metric: str) -> np.ndarray:
        return np.array([value for _, value in self.curves.get(metric, ())])


def rl_health(curves: Curves, num_rows: int, described: Values, scores: Values) -> list[Finding]:
    """The checks of a run of online RL, the worst first.

    Args:
        curves: finite values by metric.
        num_rows: of ``metrics.jsonl``.
        described: the content of ``run.json``.
        scores: the content of ``scores.json``; empty where there is none yet.
    """
    run = _Run(curves, num_rows, described["config"], scores.get("arms") or {}, on_cpu(described))
    found = [finding for check in _CHECKS for finding in check(run)] if num_rows else []
    return sorted(found, key=lambda finding: STATES.index(finding.state))


def worst(findings: Sequence[Finding]) -> str:
    """The worst state, and nothing where nothing is measured yet."""
    return next((state for state in STATES for finding in findings if finding.state == state), "")


def summary(findings: Sequence[Finding]) -> str:
    """``1 bad, 2 to look at, 8 ok``."""
    words = {"bad": "bad", "look": "to look at", "ok": "ok"}
    counts = {state: sum(finding.state == state for finding in findings) for state in STATES}
    return ", ".join(f"{n} {words[state]}" for state, n in counts.items() if n) or "nothing measured yet"


# Rewards


def _reward_trend(run: _Run) -> Iterator[Finding]:
    """Whether what is optimised rises in the rollout."""
    effects = [(term, effect) for term, effect in _effects(run) if term.optimised]
    if not effects:
        return
    best = max(effect for _, effect in effects)
    state: State = "ok" if best >= MOVED else "bad" if best <= -FALLEN else "look"
    said = "; ".join(_trend(run, term) for term, _ in effects)
    todo = {
        "ok": "",
        "look": " It does not rise: unless it is solved already, give it time, raise optimizers.policy.lr or "
        "rollout.group_size, or start from a model that earns the reward now and then.",
        "bad": " It falls: lower optimizers.policy.lr, and look at the pictures.",
    }
    yield Finding(state, "Reward of the rollout", f"Start to end: {said}.{todo[state]}")


def _effects(run: _Run) -> list[tuple[Term, float]]:
    """How much better each reward got from the start of the run to its end, in deviations of one sample."""
    found = []
    for term in terms_of(run.config.get("rewards") or {}, reward_names(run.curves)):
        values, deviations = run.values(f"reward/{term.name}"), run.values(f"reward_std/{term.name}")
        if len(values) >= FEW:
            first, last = _ends(values)
            deviation = _ends(deviations)[0] if len(deviations) >= FEW else 0.0
            gain = (last - first) * term.sign
            found.append((term, gain / deviation if deviation > 0 else math.copysign(math.inf, gain) if gain else 0.0))
    return found


def _trend(run: _Run, term: Term) -> str:
    first, last = _ends(run.values(f"reward/{term.name}"))
    return f"reward/{term.name} {number(first)} → {number(last)}"


def _hacking(run: _Run) -> Iterator[Finding]:
    """Whether something that is not optimised pays for the reward."""
    if "final" in run.scored and "start" in run.scored:
        yield from _hacking_scored(run)
        return
    effects = _effects(run)
    watched = [term for term, effect in effects if not term.optimised and effect <= -FALLEN]
    if watched and any(term.optimised and effect >= MOVED for term, effect in effects):
        said = "; ".join(_trend(run, term) for term in watched)
        sentence = (
            f"In the rollout the optimised reward rises while a watched one falls: {said}. {_restrain(run, True)}"
        )
        yield Finding("look", _HACKING, sentence)


_HACKING = "Signs of reward hacking"


def _hacking_scored(run: _Run) -> Iterator[Finding]:
    """The same from the scores of start and policy, by their intervals."""
    terms = scored_terms(run.scored, run.config.get("rewards") or {})
    risen = any(movement(t, *_pair(run, f"reward/{t.name}")) > 0 for t in terms if t.optimised)
    fallen, grown, lost = list(_fallen(run, terms)), list(_grown(run)), list(_grown(run, DISTANCE_LOST))
    if not fallen and not grown:
        tip = "" if any(not t.optimised for t in terms) else " A reward of weight 0 would watch more."
        text = (
            "Neither read_accuracy, diversity nor a watched reward fell beyond its interval, and neither fd_feat nor "
        )
        yield Finding("ok", _HACKING, f"{text}drift grew {DISTANCE_GROWN:g}-fold.{tip}")
        return
    gain = "While the optimised reward rose, " if risen else "Without a gain in the optimised reward, "
    watched = any(text.startswith("reward/") for text in fallen)
    sentence = f"{gain}{'; '.join([*fallen, *grown])}. {_restrain(run, watched)}"
    yield Finding("bad" if fallen or lost else "look", _HACKING, sentence)


def _fallen(run: _Run, terms: Sequence[Term]) -> Iterator[str]:
    """What fell beyond its interval. Diversity may fall to the real pictures': a half-trained start has more."""
    for name in ("read_accuracy", "diversity", *(f"reward/{term.name}" for term in terms if not term.optimised)):
        before, after = _pair(run, name)
        floor = before.low
        if name == "diversity" and not math.isnan(real := interval(run.scored, "real", name).low):
            floor = min(floor, real)
        if after.high < floor:
            yield f"{name} fell from {before} to {after}"


def _grown(run: _Run, times: float = DISTANCE_GROWN) -> Iterator[str]:
    for name in ("fd_feat", "drift"):
        before, after = _pair(run, name)
        if after.low > before.high and after.mean > times * before.mean:
            yield f"{name} grew from {before} to {after}"


def _pair(run: _Run, metric: str) -> tuple[Interval, Interval]:
    return interval(run.scored, "start", metric), interval(run.scored, "final", metric)


def _restrain(run: _Run, watched: bool) -> str:
    """What to do, also where a watched reward falls."""
    rein = "raise algorithm.kl_weight" if "kl_weight" in run.algorithm else "lower optimizers.policy.lr"
    weigh = ", or give the reward that falls a weight" if watched else ""
    return f"Compare the pictures of start and policy; {rein}, or stop earlier{weigh}."


def _lag(run: _Run) -> Iterator[Finding]:
    """Whether the averaged policy, which is judged, is behind the one that is trained."""
    terms = [t for t in scored_terms(run.scored, run.config.get("rewards") or {}) if t.optimised]
    behind, pairs = [], []
    for term in terms:
        metric = f"reward/{term.name}"
        averaged, raw = interval(run.scored, "final", metric), interval(run.scored, "final_raw", metric)
        if not math.isnan(averaged.mean + raw.mean):
            pairs.append(f"{metric} {averaged}, not averaged {raw}")
            if raw.signed(term.sign).low > averaged.signed(term.sign).high:
                behind.append(term)
    if pairs:
        lags = " The average lags behind: lower algorithm.ema_decay, or train for longer." if behind else ""
        yield Finding("look" if behind else "ok", "Averaged policy", f"{'; '.join(pairs)}.{lags}")


# What there is to learn from


def _dead(run: _Run) -> Iterator[Finding]:
    """Groups whose samples all have the same reward (B10)."""
    dead, spread = run.values("group/dead"), run.values("group/std")
    if not len(dead):
        return
    (first, last), refills = _ends(dead), run.rollout.get("max_refills", 0)
    said = f"{percent(first)} of groups taught nothing at the start, {percent(last)} at the end"
    if len(dead) < FEW:
        said = f"{percent(float(dead.mean()))} of groups taught nothing; {_TOO_FEW}"
    elif len(spread):
        said += "; spread inside groups {} → {}".format(*map(number, _ends(spread)))
    if len(dead) >= FEW and dead.mean() > DEAD_THROUGHOUT:
        todo = " The reward does not tell samples of one prompt apart: choose a finer one, a larger rollout.group_size "
        yield Finding("bad", "Dead groups", f"{said}.{todo}or prompts that are neither always nor never solved.")
    elif last > DEAD:
        todo = "They are replaced, which costs sampling" if refills else "Set rollout.max_refills to replace them"
        text = f"{said}. Little is learned from them. {todo}; where the reward is nearly solved, stop or take harder "
        yield Finding("look", "Dead groups", f"{text}prompts.")
    else:
        yield Finding("ok", "Dead groups", f"{said}.")


def _failed(run: _Run) -> Iterator[Finding]:
    """Samples without a score, of those that a cycle asks for."""
    failed, size = run.values("reward/failed"), (run.config.get("data") or {}).get("batch_size", 0)
    if not len(failed) or not size:
        return
    refilled = run.values("group/refilled")
    drawn = size + (float(refilled.mean()) * run.rollout.get("group_size", 1) if len(refilled) else 0)
    share = float(failed.mean()) / drawn
    if share == 0:
        yield _other_failures(run)
        return
    said = f"{number(float(failed.mean()))} of {count(round(drawn), 'sample')} a cycle had no score ({percent(share)})"
    limit = run.rollout.get("max_failed", 0.2)
    text = (
        f"{said}. They are left out of everything, and beyond rollout.max_failed ({limit:g}) the run stops: see what "
    )
    todo = "the scorer says, and raise its time_limit or workers where it is slow."
    yield Finding("bad" if share > FAILED else "look", "Failed scores", text + todo)


def _other_failures(run: _Run) -> Finding:
    """Rewards of which some samples have no value though all have a total: watched ones, and those of evaluation."""
    lost = sorted(name.removeprefix("reward_failed/") for name in run.curves if name.startswith("reward_failed/"))
    final = run.scored.get("final") or {}
    scored = {key.removeprefix("reward/").partition("/")[0] for key in final}
    lost += [f"{name} (in evaluation)" for name in run.config.get("rewards") or {} if final and name not in scored]
    if not lost:
        return Finding("ok", "Failed scores", "Every sample got a score.")
    todo = "nothing here says how they did. See what the scorer says."
    return Finding("bad", "Failed scores", f"Some samples have no score of {', '.join(lost)}: {todo}")


def _empty(run: _Run) -> Iterator[Finding]:
    """Updates without a row of weight, which are left out."""
    empty = len(run.values("train/policy_empty"))
    if not empty:
        yield Finding("ok", "Empty updates", "Every update had something to learn from.")
        return
    said = f"{empty:,} of {count(run.num_rows, 'logged row')} had an update in which no group taught anything"
    if not len(run.values("train/policy_grad_norm")):
        yield Finding("bad", "Empty updates", f"{said}, and no update was ever made: the reward is the same for all.")
    elif empty / run.num_rows > EMPTY:
        todo = "raise data.batch_size or rollout.max_refills, or lower algorithm.updates."
        yield Finding("look", "Empty updates", f"{said}: {todo}")
    else:
        yield Finding("ok", "Empty updates", f"{said}; those are left out.")


# Numbers


def _nonfinite(run: _Run) -> Iterator[Finding]:
    """Updates that were skipped. In the last tenth of the run they are still going on.

    Outputs that are not finite are counted in the log, and updates that were skipped, also for a gradient that is not.
    """
    counted = [(n, points) for n, points in run.curves.items() if n.startswith("train/nonfinite_")]
    bad = [(cycle, n.removeprefix("train/nonfinite_")) for n, points in counted for cycle, value in points if value]
    if not bad:
        bad = [(cycle, "policy_gradient") for cycle, value in run.curves.get("train/policy_skipped", ()) if value]
    if not bad:
        yield Finding("ok", "Non-finite values", "No loss or gradient was nan or infinite.")
        return
    names = ", ".join(sorted({name for _, name in bad}))
    last, cycles = max(bad)[0], len({cycle for cycle, _ in bad})
    text = f"Met in {cycles:,} of {count(run.num_rows, 'logged row')}, last around cycle {last:,} ({names}); those "
    todo = "updates were skipped. Lower optimizers.policy.lr if it goes on."
    yield Finding("bad" if last > 0.9 * run.last_cycle else "look", "Non-finite values", text + todo)


def _gradient(run: _Run) -> Iterator[Finding]:
    norms = run.values("train/policy_grad_norm")
    if not len(norms):
        return
    first, last = _ends(norms, np.median)
    said = f"{number(first)} at the start, {number(last)} at the end (medians, before clipping)"
    if len(norms) < FEW:
        said = f"{number(float(np.median(norms)))} (median, before clipping); {_TOO_FEW}"
    growth = last / first if len(norms) >= FEW and first > 0 else 1.0
    todo = "lower optimizers.policy.lr, or raise its warmup_steps."
    if growth > EXPLODED:
        yield Finding("bad", "Gradient norm", f"{said}: it explodes; {todo}")
    elif growth > GROWN:
        yield Finding("look", "Gradient norm", f"{said}: it grows; watch the reward, and if that falls {todo}")
    elif last == 0:
        yield Finding("look", "Gradient norm", f"{said}: nothing is learned any more; see dead groups and clipping.")
    else:
        yield Finding("ok", "Gradient norm", f"{said}.")


def _log_prob_gap(run: _Run) -> Iterator[Finding]:
    """What the trainer says of fresh transitions against what the rollout said (B14)."""
    gaps, most = run.values("train/log_prob_mean_abs_diff"), run.values("train/log_prob_abs_diff_max")
    if not len(gaps) or run.rollout.get("replay"):
        return
    gap, clip = float(max(gaps.max(), 0.0)), float(run.algorithm.get("clip", math.inf))
    largest = max(gap, float(most.max()) if len(most) else 0.0)
    if largest == 0:
        yield Finding("ok", "Log-prob gap", "Exactly 0: the trainer scores each transition as the rollout did.")
        return
    said = (
        f"Trainer and rollout differ in log-probability by {gap:.2g} on average in the worst row, {largest:.2g} at most"
    )
    beyond = f"; that is more than the clip range ({clip:g}), so rounding alone would clip" if gap > clip else ""
    if run.on_cpu:
        state: State = "bad" if gap > clip else "look"
        todo = "On CPU it must be exactly 0: rollout and trainer compute different things; suspect a kernel of yours."
        yield Finding(state, "Log-prob gap", f"{said}{beyond}. {todo}")
    elif beyond:
        used = run.algorithm.get("old_log_prob") == "rollout"
        todo = (
            "Set algorithm.old_log_prob to trainer" if used else "The ratio does not use it; still, raise the precision"
        )
        yield Finding("bad" if used else "look", "Log-prob gap", f"{said}{beyond}. {todo}, or raise algorithm.clip.")
    else:
        yield Finding("ok", "Log-prob gap", f"{said}, below the clip range ({clip:g}): rounding.")


def _clipping(run: _Run) -> Iterator[Finding]:
    """The importance ratio. A rollout's only update is on-policy: its ratio is 1 by construction."""
    clipped, far = run.values("train/policy_clip_fraction"), run.values("train/policy_ratio_deviation_max")
    if not len(clipped):
        return
    steps = run.algorithm.get("updates", 1) * run.algorithm.get("epochs", 1)
    largest = float(far.max()) if len(far) else 0.0
    said = f"The ratio is at most {largest:.2g} from 1"
    if steps == 1 and not run.rollout.get("replay"):
        if clipped.any() or largest:
            todo = "With one optimizer step a rollout it must be exactly 1: a fault of the program."
            yield Finding("bad", _CLIP, f"{said}. {todo}")
        else:
            text = "Ratio exactly 1 and clip fraction 0, by construction: a rollout gives one optimizer step."
            yield Finding("ok", _CLIP, text)
        return
    yield _clipped_updates(run, clipped, said, steps)


_CLIP = "Ratio and clipping"


def _clipped_updates(run: _Run, clipped: np.ndarray, said: str, steps: int) -> Finding:
    """Several updates a rollout. The first of them is on-policy, so the share is over the others."""
    others = steps / (steps - 1) if steps > 1 and not run.rollout.get("replay") else 1.0
    share, clip = min(1.0, _ends(clipped)[1] * others), run.algorithm.get("clip")
    text = f"{said}; {percent(share)} of transitions lie outside the clip range ({clip}) at the end"
    text += ", the first update of a rollout aside" if others > 1 else ""
    if not clipped.any():
        todo = "The clip never acts: raise optimizers.policy.lr or lower algorithm.clip, unless the reward rises well."
        return Finding("look", _CLIP, f"{text}. {todo}")
    if share > CLIPPED:
        todo = "Nearly all of them teach nothing more: lower optimizers.policy.lr or algorithm.updates, or raise "
        return Finding("look", _CLIP, f"{text}. {todo}algorithm.clip.")
    return Finding("ok", _CLIP, f"{text}.")


def _kl(run: _Run) -> Iterator[Finding]:
    """How far a step of the policy is from the same step of the start."""
    nats, means = run.curves.get("train/kl_nats", ()), run.values("train/kl_mean")
    if not nats:
        return
    (cycle, last), weight = nats[-1], run.algorithm.get("kl_weight", 0)
    said = f"{number(last)} nats a transition around cycle {cycle:,}"
    if last == 0 and len(nats) == 1:
        said += ", measured once, before the policy moved: set algorithm.kl_every lower to see more"
    if last == 0 and len(nats) > 1:
        yield Finding("look", _KL, f"{said}: the policy has not moved; see the learning rate and dead groups.")
        return
    mean = float(means[-1]) if len(means) else 0.0
    if mean > 0:
        said += f": a step's mean lies {number(math.sqrt(2 * mean))} deviations of its own noise from the start's"
    todo = f" Compare the pictures; raise algorithm.kl_weight (now {weight:g}), or stop earlier."
    state: State = "bad" if mean > KL_LOST else "look" if mean > KL_FAR else "ok"
    yield Finding(state, _KL, f"{said}.{'' if state == 'ok' else todo}")


_KL = "KL to the start"
_TOO_FEW = "too few logged rows for a trend"


# Of single algorithms


def _two_sides(run: _Run) -> Iterator[Finding]:
    """NFT: the reward weight, and how far the policy is from the old one (B38)."""
    weights, distances = run.values("train/policy_reward_weight"), run.values("train/policy_old_distance")
    if not len(weights):
        return
    off = float(np.abs(weights - 0.5).max())
    said = f"Reward weight {number(float(weights.mean()))} on average (one half by construction)"
    if len(distances):
        said += f"; the policy's velocity is {float(distances[-1]):.2g} from the old policy's"
    if off > WEIGHT_OFF:
        todo = "Advantages are one-sided: compare algorithm.advantage_range with algorithm.advantage.clamp."
        yield Finding("look", _SIDES, f"{said}. In some row it is {number(off)} off. {todo}")
    elif run.algorithm.get("updates", 1) > 1 and len(distances) and not distances.any():
        yield Finding("look", _SIDES, f"{said}, exactly and throughout: the policy does not move within a rollout.")
    else:
        yield Finding("ok", _SIDES, f"{said}; both branches are nearly equal while that is small, which is normal.")


_SIDES = "Two-sided loss"


def _preference(run: _Run) -> Iterator[Finding]:
    """DPO: whether the policy has come to prefer the better picture of a pair. At the start it prefers neither."""
    preferred = run.values("train/policy_preferred")
    if len(preferred) < FEW:
        return
    last = _ends(preferred)[1]
    said = f"The policy prefers the better picture in {percent(last)} of new pairs at the end"
    todo = ". Below one half it learns nothing from pairs: raise optimizers.policy.lr, or lower algorithm.beta"
    yield Finding("ok" if last >= 0.5 else "look", "Preference", f"{said}{'' if last >= 0.5 else todo}.")


_CHECKS = (
    _reward_trend, _hacking, _lag, _dead, _failed, _empty, _nonfinite, _gradient, _kl, _clipping, _log_prob_gap,
    _two_sides, _preference,
)  # fmt: skip


def _ends(values: np.ndarray, centre: Any = np.mean) -> tuple[float, float]:
    """The centre of the first tenth of the values and of the last, of five values each where there are as many."""
    tenth = max(len(values) // 10, min(len(values), 5))
    return float(centre(values[:tenth])), float(centre(values[-tenth:]))


# Any run


def health(rows: Rows) -> list[str]:
    """Sentences on what should not have happened in a run, whatever its scores. ``rows``: of ``metrics.jsonl``."""
    bad = [(row["cycle"], name) for row in rows for name in row if name.startswith("train/nonfinite_") and row[name]]
    if not bad:
        return []
    names = sorted({name.removeprefix("train/nonfinite_") for _, name in bad})
    met = f"Non-finite values were met, last around cycle {bad[-1][0]:,} ({', '.join(names)})"
    return [f"{met}; those updates were skipped."]


def on_cpu(described: Values) -> bool:
    """Whether a run surely was on CPU. With device ``auto`` only a CPU build of torch tells."""
    device = described["config"].get("training", {}).get("device", "auto")
    return device == "cpu" or (device == "auto" and str(described["versions"].get("torch")).endswith("+cpu"))
