"""Whether a run did what it is for: its arms and rewards, the bounds that they must reach, and sentences with both.

Made from ``scores.json`` and ``run.json`` alone; what is not scored is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sigmazero.config import REWARDED

# What a run must reach. Means are compared, not intervals, unless it says so; a value at its bound passes.
READ_LOSS = 0.03  # the student may read this much less than the teacher
DISTANCE_TO_TEACHER = 1.6  # fd_feat of the student over that of the teacher, at most
DISTANCE_TO_FEW_STEPS = 0.25  # the same over that of the teacher with the student's step count, at most
DIVERSITY_KEPT = 0.8  # diversity of the student over that of the teacher, at least
READ_TAUGHT = 0.9  # flow matching: share of captions that are read, at least
DISTANCE_TO_REAL = 2.5  # flow matching: fd_feat over that of fresh real pictures, at most
OCR_RISE = 0.10  # online RL: rise of an ocr reward, at least; or half of what the start lacks to 1, if that is less
READ_LOST = 0.01  # online RL: the policy may read this much less than the start; the reader is not what it optimises
DIVERSITY_LEFT = 0.5  # online RL: diversity over the lesser of the start's and the real pictures', at least: a start
# that is half trained is more varied than real pictures, and may lose that

_ROUNDING = 1e-9
_ORDER = ("real", "teacher", "student", "student_raw", "start", "final", "final_raw")
_WHO = {
    "student_raw": "Student, not averaged",
    "start": "Start",
    "final": "Policy, averaged",
    "final_raw": "Policy, not averaged",
}
_REWARD_MEANINGS = {
    "ocr": "the wanted text as PP-OCR reads it",
    "jpeg": "size of the picture as JPEG in kB, negative where small ones are wanted",
    "colour": "whether the colours that the prompt names are in the picture",
    "clip": "CLIP score of picture and prompt",
    "pickscore": "PickScore of picture and prompt",
    "aesthetic": "aesthetic score of the picture",
    "remote": "score of a server",
    "function": "score of a function of yours",
}

Values = Mapping[str, Any]
Check = tuple[bool | None, str]  # None: does not apply


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
        return f"{self.calls} ({count(self.num_steps, 'guided step')})" if self.guided else str(self.calls)

    @property
    def label(self) -> str:
        if self.num_steps == 0:
            return "Real pictures" if self.role == "real" else self.name
        who = _WHO.get(self.role, self.role.replace("_", " ").capitalize())
        calls = count(self.calls, "call")
        return f"{who}, {count(self.num_steps, 'guided step')} ({calls})" if self.guided else f"{who}, {calls}"


def is_rl(algorithm: Values) -> bool:
    """Whether the ``algorithm`` settings of a run are of online RL."""
    return algorithm.get("name") in REWARDED


def arm_of(name: str, algorithm: Values) -> Arm:
    """The arm of a name under the ``algorithm`` settings of its run, which alone say who is guided."""
    if is_rl(algorithm):
        steps = (algorithm.get("evaluation_steps") or algorithm.get("num_steps") or 0) if name in _WHO else 0
        return Arm(name, name, steps, algorithm.get("guidance", 1.0) != 1)
    role, _, steps = name.partition("@")
    if not steps.isdecimal():
        return Arm(name, role, 0, False)
    may_be_guided = role == "teacher" or algorithm.get("name") == "flow_matching"
    return Arm(name, role, int(steps), may_be_guided and algorithm.get("guidance", 2.0) != 1)


def arms_of(names: Iterable[str], algorithm: Values) -> list[Arm]:
    """Real pictures first, then the teacher, most steps first, then the student; or the start, then the policy."""

    def rank(arm: Arm) -> tuple[int, int, str]:
        return _ORDER.index(arm.role) if arm.role in _ORDER else len(_ORDER), -arm.num_steps, arm.name

    return sorted((arm_of(name, algorithm) for name in names), key=rank)


# Rewards


@dataclass(frozen=True)
class Term:
    """One reward as metrics name it (``ocr``, ``mine/part``). ``weight`` 0: only watched; below 0: to be lowered."""

    name: str
    weight: float
    settings: Values = field(default_factory=dict)

    @property
    def optimised(self) -> bool:
        return self.weight != 0

    @property
    def sign(self) -> int:
        return -1 if self.weight < 0 else 1

    @property
    def standing(self) -> str:
        return f"optimised, weight {self.weight:g}" if self.optimised else "only watched"

    @property
    def meaning(self) -> str:
        what = _REWARD_MEANINGS.get(str(self.settings.get("kind")), "a reward")
        if not self.optimised:
            return f"{what}; only watched (weight 0), so a fall of it says that the optimised ones are gamed"
        return f"{what}; optimised with weight {self.weight:g}" + (", so lower is better" if self.weight < 0 else "")


def terms_of(rewards: Values, found: Iterable[str]) -> list[Term]:
    """The rewards of a run, optimised ones first.

    Args:
        rewards: settings by name, as in ``run.json``. A reward of several parts has a weight for each.
        found: names that have values; one without is listed where it is optimised.
    """
    weights: dict[str, float] = {}
    for name, settings in rewards.items():
        given = settings.get("weight", 1.0)
        weights |= {f"{name}/{part}": w for part, w in given.items()} if isinstance(given, Mapping) else {name: given}
    found = dict.fromkeys(found)
    names = [name for name in dict.fromkeys([*weights, *found]) if name in found or weights.get(name)]
    terms = [Term(name, weights.get(name, 0.0), rewards.get(name.partition("/")[0]) or {}) for name in names]
    return sorted(terms, key=lambda term: not term.optimised)


def scored_terms(scored: Values, rewards: Values) -> list[Term]:
    """The rewards of a run by the names that arms have scores of."""
    names = dict.fromkeys(name for arm in scored.values() for name in arm if name.startswith("reward/"))
    return terms_of(rewards, [name.removeprefix("reward/") for name in names])


@dataclass(frozen=True)
class Interval:
    """A score with its 95 % interval; nan where it was not measured."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        d = _digits(self.mean)
        return f"{self.mean:.{d}f} [{self.low:.{d}f}, {self.high:.{d}f}]"

    def signed(self, sign: int) -> Interval:
        """Such that higher is better."""
        return self if sign > 0 else Interval(-self.mean, -self.high, -self.low)


def interval(scored: Values, arm: str, metric: str) -> Interval:
    values = (scored.get(arm) or {}).get(metric) or {}
    return Interval(*(float(values.get(name, math.nan)) for name in ("mean", "low", "high")))


def movement(term: Term, before: Interval, after: Interval) -> int:
    """1: a reward got better beyond both intervals, and as much as it must; -1: worse beyond them; 0: neither."""
    a, b = before.signed(term.sign), after.signed(term.sign)
    if b.low > a.high and b.mean - a.mean >= _needed(term, a) - _ROUNDING:
        return 1
    return -1 if b.high < a.low else 0


def _needed(term: Term, before: Interval) -> float:
    """The least rise that counts. Only the scale of reading is known: it ends at 1."""
    settings = term.settings
    if settings.get("kind") != "ocr" or settings.get("score") == "log_likelihood" or term.sign < 0:
        return 0.0
    return min(OCR_RISE, (1 - before.mean) / 2)


# Verdict


def verdict(scores: Values, rewards: Values | None = None) -> tuple[bool | None, list[str]]:
    """Whether a run did what it is for, and a sentence with the numbers for each check.

    Args:
        scores: the content of ``scores.json``; empty where there is none yet.
        rewards: settings by name, of a run of online RL.
    Returns: None while something that is compared has no scores, else whether every check passes.
    """
    scored: Values = scores.get("arms") or {}
    if not scored:
        return None, ["No scores yet."]
    if "real" not in scored and not any("read_accuracy" in metrics for metrics in scored.values()):
        return None, ["Not judged: no reader knows the pictures of this family. Compare the pictures and the scores."]
    algorithm = (scores.get("settings") or {}).get("algorithm") or {}
    if is_rl(algorithm):
        terms = [term for term in scored_terms(scored, rewards or {}) if term.optimised]
        reason = _unjudged(scored, terms)
        return (None, [reason]) if reason else _judged(_rewarded(scored, terms))
    arms = arms_of(scored, algorithm)
    student = next((arm for arm in arms if arm.role == "student"), None)
    if student is None:
        return None, ["No scores of the student yet."]
    teachers = [arm for arm in arms if arm.role == "teacher"]
    floor = f"teacher@{student.num_steps}" if teachers else "real"
    if floor not in scored:
        return None, [f"Not judged: {floor} has no scores."]
    return _judged(_distilled(scored, student, teachers[0]) if teachers else _taught(scored, student))


def _judged(checks: Iterable[Check]) -> tuple[bool, list[str]]:
    checks, outcomes = list(checks), {True: "pass", False: "fail", None: "not applicable"}
    return not any(passed is False for passed, _ in checks), [f"{text}: {outcomes[passed]}." for passed, text in checks]


def _distilled(scored: Values, student: Arm, teacher: Arm) -> Iterator[Check]:
    """The student against the teacher, and against the teacher with as few steps."""
    few = f"teacher@{student.num_steps}"
    own, its = mean_of(scored, student.name, "read_accuracy"), mean_of(scored, teacher.name, "read_accuracy")
    yield (
        own >= its - READ_LOSS - _ROUNDING,
        f"The student reads {percent(own)} of captions with {count(student.calls, 'network call')}; "
        f"the teacher reads {percent(its)} with {teacher.cost}",
    )
    own, its = mean_of(scored, student.name, "fd_feat"), mean_of(scored, teacher.name, "fd_feat")
    yield (
        own <= its * DISTANCE_TO_TEACHER + _ROUNDING,
        f"Its distance to real pictures (fd_feat) is {number(own)}, {ratio(own, its)} times the teacher's "
        f"{number(its)}",
    )
    few_steps = count(student.num_steps, "step")
    if few == teacher.name:
        yield None, f"Comparison with the teacher at the student's {few_steps}, which is the teacher's own step count"
    else:
        its = mean_of(scored, few, "fd_feat")
        yield (
            own <= its * DISTANCE_TO_FEW_STEPS + _ROUNDING,
            f"That is {ratio(own, its)} times the {number(its)} that the teacher has with {few_steps}",
        )
    own, its = mean_of(scored, student.name, "diversity"), mean_of(scored, teacher.name, "diversity")
    yield (
        own >= its * DIVERSITY_KEPT - _ROUNDING,
        f"Its pictures of one caption vary by {number(own)} (diversity), {ratio(own, its)} times the teacher's "
        f"{number(its)}",
    )


def _taught(scored: Values, student: Arm) -> Iterator[Check]:
    """A flow-matching student against the captions and against real pictures."""
    read = mean_of(scored, student.name, "read_accuracy")
    calls = f"{count(student.calls, 'network call')}"
    steps = f" ({count(student.num_steps, 'guided step')})" if student.guided else ""
    yield read >= READ_TAUGHT - _ROUNDING, f"The student reads {percent(read)} of captions with {calls}{steps}"
    own, its = mean_of(scored, student.name, "fd_feat"), mean_of(scored, "real", "fd_feat")
    yield (
        own <= its * DISTANCE_TO_REAL + _ROUNDING,
        f"Its distance to real pictures (fd_feat) is {number(own)}, {ratio(own, its)} times that of other real "
        f"pictures, {number(its)}",
    )


def _unjudged(scored: Values, terms: Sequence[Term]) -> str | None:
    """Why a run of online RL cannot be judged."""
    if "final" not in scored:
        return "No scores of the policy yet."
    if missing := [arm for arm in ("start", "real") if arm not in scored]:
        return f"Not judged: {missing[0]} has no scores."
    return None if terms else "Not judged: the settings of the run name no optimised reward."


def _rewarded(scored: Values, terms: Sequence[Term]) -> Iterator[Check]:
    """The averaged policy against the start."""
    pairs = [tuple(interval(scored, arm, f"reward/{term.name}") for arm in ("start", "final")) for term in terms]
    moved = [movement(term, before, after) for term, (before, after) in zip(terms, pairs, strict=True)]
    for term, (before, after), move in zip(terms, pairs, moved, strict=True):
        yield _reward_check(term, before, after, move, risen=max(moved) > 0)
    own, its = mean_of(scored, "final", "read_accuracy"), mean_of(scored, "start", "read_accuracy")
    yield (
        own >= its - READ_LOST - _ROUNDING,
        f"The policy reads {percent(own)} of captions; the start reads {percent(its)}",
    )
    own, its, real = (mean_of(scored, arm, "diversity") for arm in ("final", "start", "real"))
    yield (
        own >= min(its, real) * DIVERSITY_LEFT - _ROUNDING and not math.isnan(real),
        f"Its pictures of one caption vary by {number(own)} (diversity), {ratio(own, min(its, real))} times the lesser "
        f"of the start's {number(its)} and the real pictures' {number(real)}",
    )


def _reward_check(term: Term, before: Interval, after: Interval, move: int, risen: bool) -> Check:
    """``risen``: some optimised reward rose, so that this one need not."""
    name = f"reward/{term.name} ({term.standing})"
    if math.isnan(before.mean) or math.isnan(after.mean):
        return False, f"{name} has no score of {'the start' if math.isnan(before.mean) else 'the policy'}"
    went = f"from {before} to {after}"
    if move:
        return move > 0, f"{name} {'rose' if move == term.sign else 'fell'} {went}, beyond its interval"
    few = f", by less than {number(needed)}" if (needed := _needed(term, before)) and after.low > before.high else ""
    return risen, f"{name} went {went}" + (few or ", within its interval")


def criteria(algorithm: Values) -> str:
    """The bounds of the verdict, in words."""
    if algorithm.get("name") == "flow_matching":
        return (
            f"To pass, the student must read at least {percent(READ_TAUGHT)} of captions, with an fd_feat of at most "
            f"{DISTANCE_TO_REAL:g} times that of real pictures. Means are compared."
        )
    if is_rl(algorithm):
        return (
            "To pass, an optimised reward must get better from the start to the averaged policy by more than both "
            f"intervals (ocr by at least {OCR_RISE:.2f}, or half of what the start lacks to 1), and none worse by as "
            f"much; it may read at most {100 * READ_LOST:g} point less, with a diversity of at least "
            f"{DIVERSITY_LEFT:g} times the lesser of the start's and the real pictures'."
        )
    return (
        f"To pass, the student must read at most {100 * READ_LOSS:g} points less than the teacher, with an fd_feat of "
        f"at most {DISTANCE_TO_TEACHER:g} times the teacher's and {DISTANCE_TO_FEW_STEPS:g} times that of the teacher "
        f"with as few steps, and a diversity of at least {DIVERSITY_KEPT:g} times the teacher's. Means are compared."
    )


# Words


def mean_of(scored: Values, arm: str, metric: str) -> float:
    """NaN where it was not measured: no check passes with it."""
    return float(scored[arm].get(metric, {}).get("mean", math.nan))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _digits(value: float) -> int:
    return 4 if abs(value) < 0.1 else 3 if abs(value) < 100 else 1


def number(value: float) -> str:
    return f"{value:.{_digits(value)}f}"


def ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base else "∞"


def count(num: int, what: str) -> str:
    return f"{num:,} {what}" + ("" if num == 1 else "s")
