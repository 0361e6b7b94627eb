"""The report of a run: its verdict, and a page that stands alone at every moment of a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sigmazero.curves import MAX_SIGMAS, Panel, curves_of, extremes, panels, rl_panels, smoothed, still
from sigmazero.health import health
from sigmazero.report import MAX_HISTORY, write_report
from sigmazero.verdict import arm_of, terms_of, verdict

DMD2 = {"name": "dmd2", "num_steps": 2, "teacher_steps": 25, "guidance": 2.0, "score_sigma": {"low": 0.02}}
FLOW = {"name": "flow_matching", "num_steps": 25, "guidance": 2.0}
STEP = 1e-6  # just past a bound
GRPO = {
    "name": "flow_grpo",
    "num_steps": 10,
    "guidance": 1.0,
    "clip": 1e-4,
    "updates": 1,
    "epochs": 1,
    "kl_weight": 0.0,
}
NFT = {"name": "nft", "num_steps": 8, "evaluation_steps": 12, "updates": 1, "kl_weight": 0.0}
REWARDS = {"ocr": {"kind": "ocr", "weight": 1.0, "score": "edit"}, "colour": {"kind": "colour", "weight": 0.0}}
SIGMAS = ("0.429", "0.667", "0.964", "1.000")


def metrics(read: float, distance: float, diversity: float = 5.0, drift: float = 0.01) -> dict[str, dict[str, float]]:
    values = {"read_accuracy": read, "fd_feat": distance, "diversity": diversity, "drift": drift}
    return {name: {"mean": value, "low": 0.9 * value, "high": 1.1 * value} for name, value in values.items()}


def distilled(read: float = 0.9, distance: float = 0.5, diversity: float = 5.0) -> dict[str, Any]:
    """Scores of a distillation whose teacher reads 0.92 at a distance of 0.5 (4.0 with 2 steps) and varies by 5."""
    arms = {
        "real": metrics(0.99, 0.0625),
        "teacher@25": metrics(0.92, 0.5),
        "teacher@2": metrics(0.3, 4.0),
        "student@2": metrics(read, distance, diversity),
        "student_raw@2": metrics(0.5, 9.0, 1.0),  # never judged
    }
    return {"arms": arms, "settings": {"algorithm": DMD2}, "cycle": 1200}


def taught(read: float = 0.95, distance: float = 0.125) -> dict[str, Any]:
    arms = {"real": metrics(0.99, 0.0625), "student@25": metrics(read, distance)}
    return {"arms": arms, "settings": {"algorithm": FLOW}, "cycle": 40}


def interval(mean: float, half: float = 0.05) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half}


def rewarded(
    algorithm: dict[str, Any] = GRPO, read: float = 0.8, diversity: float = 40.0, **final: Any
) -> dict[str, Any]:
    """Scores of online RL from a start that has ocr 0.6 and colour 0.85, reads 0.5 and varies by 64 (real ones: 42).

    ``final``: rewards of the policy, by default 0.9 and 0.84.
    """
    rewards = {
        f"reward/{name}": value for name, value in ({"ocr": interval(0.9), "colour": interval(0.84)} | final).items()
    }
    arms = {
        "real": metrics(1.0, 100, 42) | {"reward/ocr": interval(1.0, 0), "reward/colour": interval(0.93)},
        "start": metrics(0.5, 180, 64) | {"reward/ocr": interval(0.6), "reward/colour": interval(0.85)},
        "final": metrics(read, 200, diversity) | rewards,
        "final_raw": metrics(0.1, 900, 1) | {name: interval(0.01) for name in rewards},  # never judged
    }
    return {"arms": arms, "settings": {"algorithm": algorithm}, "cycle": 80}


def start_run(folder: Path, algorithm: dict[str, Any], finished: bool = False, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"num_cycles": 1200, "seed": 0, "algorithm": algorithm, "training": {"device": "cpu"}, **config}
    described = {"finished": finished, "config": config, "python": "3.11.7", "versions": {"torch": "2.13.0+cpu"}}
    (folder / "run.json").write_text(json.dumps(described))
    return folder


def save_strip(path: Path, num: int = 16) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(path.name)).integers(0, 256, (16, 16 * num, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def save_rows(folder: Path, rows: Sequence[dict[str, float]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def dmd2_rows(num: int, every: int = 10) -> list[dict[str, float]]:
    """As a run logs them: the student in every second row, a refresh in every fifth."""
    rows = []
    for i in range(1, num + 1):
        row = {"cycle": every * i, "train/fake_score_loss": 1 / i, "train/fake_score_grad_norm": 0.5, "time/cycle": 0.3}
        if i % 2 == 0:
            row |= {"train/student_loss": -0.1, "train/student_grad_norm": 2.0, "train/student_lr": 1e-4}
            row["train/score_gradient_rms"] = 0.2
        if i % 5 == 0:
            row |= {"evaluate/student@2/read_accuracy": 0.5, "evaluate/student@2/fd_feat": 2.0}
        rows.append(row)
    return rows


def grpo_rows(num: int, far: float = 0.0) -> list[dict[str, float]]:
    """As a run of flow_grpo logs them: the KL in every tenth row, an evaluation in every 20th."""
    rows = []
    for i in range(1, num + 1):
        row = {
            "cycle": i,
            "reward/ocr": 0.5 + i / 300,
            "reward_std/ocr": 0.3,
            "reward/colour": 0.9,
            "reward/failed": 0.0,
        }
        row |= {"reward_std/colour": 0.1, "group/dead": i / 400, "group/std": 0.3, "train/policy_ratio": 1.0}
        row |= {"train/policy_ratio_deviation_max": far, "train/policy_loss": 1e-8, "train/policy_grad_norm": 0.01}
        row |= {"train/policy_lr": 5e-4, "train/policy_ema_decay": 0.9, "train/log_prob_abs_diff_max": 0.0}
        for name in ("policy_ratio_deviation", "policy_clip_fraction", "log_prob_mean_abs_diff"):
            row |= {f"train/{name}": far, **{f"train/{name}/sigma_{s}": far * float(s) for s in SIGMAS}}
        row |= {"time/rollout": 1.0, "time/policy": 1.5, "time/cycle": 2.5}
        if i % 10 == 1:
            row |= {"train/kl_nats": i / 4, "train/kl_mean": i / 3072, "time/kl": 1.2}
        if i % 20 == 0:
            row |= {"evaluate/final/reward/ocr": 0.6 + i / 400, "evaluate/final/reward/colour": 0.85}
            row |= {f"evaluate/final/{name}": value["mean"] for name, value in metrics(0.6, 300, 55).items()}
        rows.append(row)
    return rows


def nft_rows(num: int) -> list[dict[str, float]]:
    """As a run of nft logs them; the last has nothing to learn from."""
    rows = []
    for i in range(1, num + 1):
        row = {"cycle": i, "reward/ocr": 0.5 + i / 200, "reward_std/ocr": 0.3, "group/dead": i / num, "group/std": 0.1}
        row |= {"reward/failed": 0.0, "time/rollout": 1.0, "time/policy": 1.0, "time/cycle": 2.0}
        row |= {"train/policy_loss": 3.0, "train/policy_positive": 0.6, "train/policy_negative": 0.61}
        row |= {"train/policy_reward_weight": 0.5, "train/policy_old_distance": i / 1e5, "train/policy_grad_norm": 0.2}
        rows.append(row | {"train/policy_lr": 5e-4, "train/old_decay": i / 1000})
    rows[-1] = {"cycle": num, "group/dead": 1.0, "group/std": 0.0, "reward/ocr": 1.0, "train/policy_empty": 1.0}
    return rows


def rl_run(
    folder: Path, algorithm: dict[str, Any], rows: Sequence[dict[str, float]], scores: Any, **config: Any
) -> Path:
    start_run(
        folder,
        algorithm,
        **{"finished": True, "num_cycles": 80, "rewards": REWARDS, "data": {"batch_size": 64}, **config},
    )
    save_rows(folder, rows)
    (folder / "scores.json").write_text(json.dumps(scores))
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "captions.json").write_text(json.dumps([f"the number {i:02d}" for i in range(16)]))
    for arm in ("real", "start", "final", "final_raw"):
        save_strip(folder / "evaluation" / f"{arm}.png")
    return folder


def full_run(folder: Path) -> Path:
    start_run(folder, DMD2, finished=True)
    save_rows(folder, dmd2_rows(120))
    (folder / "scores.json").write_text(json.dumps(distilled()))
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "captions.json").write_text(json.dumps([f"the number {i:02d}" for i in range(16)]))
    for arm in distilled()["arms"]:
        save_strip(folder / "evaluation" / f"{arm}.png")
    for cycle in range(100, 1300, 100):
        save_strip(folder / "evaluation" / "history" / f"{cycle:08d}.png")
    return folder


class Page(HTMLParser):
    """Tags with their attributes, and the visible text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self.html = path.read_text("utf-8")
        self.feed(self.html)
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def refreshes(self) -> bool:
        return any(tag == "meta" and attrs.get("http-equiv") == "refresh" for tag, attrs in self.tags)

    def stands_alone(self) -> bool:
        """Nothing is fetched and nothing runs."""
        fetching = {"src", "href", "srcset", "data", "poster", "action"}
        sources = [str(value) for _, attrs in self.tags for name, value in attrs.items() if name in fetching]
        allowed = all(source.startswith("data:image/png;base64,") for source in sources)
        outside = re.search(r"https?://|url\(|@import|<script|<link|<iframe|\son\w+=", self.html)
        return allowed and outside is None


# Verdict


def test_no_verdict_before_the_student_is_scored() -> None:
    assert verdict({}) == (None, ["No scores yet."])
    assert verdict({"arms": {}, "settings": {}, "cycle": 0}) == (None, ["No scores yet."])
    scores = distilled()
    for name in ("student@2", "student_raw@2"):
        del scores["arms"][name]
    assert verdict(scores) == (None, ["No scores of the student yet."])
    scores = distilled()
    del scores["arms"]["teacher@2"]
    assert verdict(scores) == (None, ["Not judged: teacher@2 has no scores."])


def test_sentences_give_the_numbers() -> None:
    scores = distilled(read=0.912, distance=0.6, diversity=4.5)
    scores["arms"]["teacher@25"]["read_accuracy"]["mean"] = 0.92
    passed, sentences = verdict(scores)
    assert passed is True
    assert sentences == [
        "The student reads 91.2 % of captions with 2 network calls; the teacher reads 92.0 % with 50 (25 guided "
        "steps): pass.",
        "Its distance to real pictures (fd_feat) is 0.600, 1.20 times the teacher's 0.500: pass.",
        "That is 0.15 times the 4.000 that the teacher has with 2 steps: pass.",
        "Its pictures of one caption vary by 4.500 (diversity), 0.90 times the teacher's 5.000: pass.",
    ]


@pytest.mark.parametrize(
    ("at_bound", "past_bound", "check"),
    [
        ({"read": 0.92 - 0.03}, {"read": 0.92 - 0.03 - STEP}, 0),
        ({"distance": 0.5 * 1.6}, {"distance": 0.5 * 1.6 + STEP}, 1),
        ({"diversity": 5 * 0.8}, {"diversity": 5 * 0.8 - STEP}, 3),
    ],
)
def test_distillation_flips_at_each_bound(at_bound: Any, past_bound: Any, check: int) -> None:
    assert verdict(distilled(**at_bound))[0] is True
    passed, sentences = verdict(distilled(**past_bound))
    assert passed is False
    assert [sentence.endswith(": fail.") for sentence in sentences] == [i == check for i in range(4)]


def test_distillation_flips_at_a_quarter_of_the_few_step_teacher() -> None:
    def scores(few_steps: float) -> dict[str, Any]:
        values = distilled(distance=0.5)
        values["arms"]["teacher@2"]["fd_feat"]["mean"] = few_steps
        return values

    assert verdict(scores(2.0))[0] is True
    passed, sentences = verdict(scores(2.0 - STEP))
    assert passed is False
    assert [sentence.endswith(": fail.") for sentence in sentences] == [False, False, True, False]


@pytest.mark.parametrize(
    ("at_bound", "past_bound", "check"),
    [
        ({"read": 0.9}, {"read": 0.9 - STEP}, 0),
        ({"distance": 0.0625 * 2.5}, {"distance": 0.0625 * 2.5 + STEP}, 1),
    ],
)
def test_flow_matching_flips_at_each_bound(at_bound: Any, past_bound: Any, check: int) -> None:
    assert verdict(taught(**at_bound))[0] is True
    passed, sentences = verdict(taught(**past_bound))
    assert passed is False
    assert [sentence.endswith(": fail.") for sentence in sentences] == [i == check for i in range(2)]


def test_flow_matching_counts_guided_calls() -> None:
    _, sentences = verdict(taught(read=0.951))
    assert sentences[0] == "The student reads 95.1 % of captions with 50 network calls (25 guided steps): pass."
    unguided = taught(read=0.951)
    unguided["settings"] = {"algorithm": {**FLOW, "guidance": 1.0}}
    assert verdict(unguided)[1][0] == "The student reads 95.1 % of captions with 25 network calls: pass."


def test_same_step_count_has_no_few_step_comparison() -> None:
    arms = {"teacher@4": metrics(0.9, 0.5), "student@4": metrics(0.9, 0.5), "real": metrics(0.99, 0.06)}
    passed, sentences = verdict({"arms": arms, "settings": {"algorithm": {**DMD2, "num_steps": 4}}})
    assert passed is True
    assert len(sentences) == 4
    assert sentences[2].endswith(": not applicable.")


@pytest.mark.parametrize("metric", ["read_accuracy", "fd_feat", "diversity"])
def test_a_score_that_is_no_number_fails(metric: str) -> None:
    scores = distilled()
    scores["arms"]["student@2"][metric]["mean"] = float("nan")
    assert verdict(scores)[0] is False
    del scores["arms"]["student@2"][metric]
    assert verdict(scores)[0] is False


# Verdict of online RL


def test_rl_sentences_give_the_numbers() -> None:
    passed, sentences = verdict(rewarded(), REWARDS)
    assert passed is True
    assert sentences == [
        "reward/ocr (optimised, weight 1) rose from 0.600 [0.550, 0.650] to 0.900 [0.850, 0.950], beyond its interval: "
        "pass.",
        "The policy reads 80.0 % of captions; the start reads 50.0 %: pass.",
        "Its pictures of one caption vary by 40.000 (diversity), 0.95 times the lesser of the start's 64.000 and the "
        "real pictures' 42.000: pass.",
    ]


def test_rl_is_not_judged_before_everything_is_scored() -> None:
    assert verdict({"arms": {}, "settings": {"algorithm": GRPO}}, REWARDS) == (None, ["No scores yet."])
    for arms, reason in (
        (("final", "final_raw"), "No scores of the policy yet."),
        (("start",), "Not judged: start has no scores."),
        (("real",), "Not judged: real has no scores."),
    ):
        scores = rewarded()
        for arm in arms:
            del scores["arms"][arm]
        assert verdict(scores, REWARDS) == (None, [reason])
    only_watched = {"colour": REWARDS["colour"]}
    reason = "Not judged: the settings of the run name no optimised reward."
    assert verdict(rewarded(), only_watched) == verdict(rewarded(), {}) == verdict(rewarded()) == (None, [reason])


@pytest.mark.parametrize(
    ("at_bound", "past_bound", "check"),
    [
        ({"ocr": interval(0.7, 0.049)}, {"ocr": interval(0.7, 0.051)}, 0),  # the intervals must not touch
        ({"ocr": interval(0.7, 0.01)}, {"ocr": interval(0.7 - STEP, 0.01)}, 0),  # a rise of a tenth
        ({"read": 0.49}, {"read": 0.49 - STEP}, 1),
        ({"diversity": 21.0}, {"diversity": 21.0 - STEP}, 2),
    ],
)
def test_rl_flips_at_each_bound(at_bound: Any, past_bound: Any, check: int) -> None:
    assert verdict(rewarded(**at_bound), REWARDS)[0] is True
    passed, sentences = verdict(rewarded(**past_bound), REWARDS)
    assert passed is False
    assert [sentence.endswith(": fail.") for sentence in sentences] == [i == check for i in range(3)]


def test_rl_diversity_is_that_of_a_start_that_varies_less_than_real_pictures() -> None:
    scores = rewarded(diversity=15.0)
    scores["arms"]["start"]["diversity"]["mean"] = 30.0
    assert verdict(scores, REWARDS)[0] is True
    scores["arms"]["final"]["diversity"]["mean"] = 15.0 - STEP
    assert verdict(scores, REWARDS)[0] is False


def test_rl_small_rises_are_named() -> None:
    _, sentences = verdict(rewarded(ocr=interval(0.68, 0.01)), REWARDS)
    assert sentences[0].endswith("to 0.680 [0.670, 0.690], by less than 0.100: fail.")
    _, sentences = verdict(rewarded(ocr=interval(0.64)), REWARDS)
    assert sentences[0].endswith("to 0.640 [0.590, 0.690], within its interval: fail.")
    _, sentences = verdict(rewarded(ocr=interval(0.4)), REWARDS)
    assert "fell from 0.600 [0.550, 0.650] to 0.400 [0.350, 0.450], beyond its interval: fail." in sentences[0]


def test_rl_a_start_that_reads_nearly_everything_needs_half_of_the_rest() -> None:
    scores = rewarded(ocr=interval(0.95, 0.005))
    scores["arms"]["start"]["reward/ocr"] = interval(0.9, 0.005)
    assert verdict(scores, REWARDS)[0] is True
    scores["arms"]["final"]["reward/ocr"] = interval(0.95 - STEP, 0.005)
    assert verdict(scores, REWARDS)[0] is False


@pytest.mark.parametrize(
    "reward", [{"kind": "colour"}, {"kind": "ocr", "score": "log_likelihood"}, {"kind": "function", "weight": 3.0}]
)
def test_rl_the_rise_of_a_tenth_is_of_reading_alone(reward: Any) -> None:
    assert verdict(rewarded(ocr=interval(0.66, 0.001)), {"ocr": reward})[0] is True
    assert verdict(rewarded(ocr=interval(0.65, 0.001)), {"ocr": reward})[0] is False


def test_rl_several_optimised_rewards() -> None:
    both = {name: {**reward, "weight": 0.5} for name, reward in REWARDS.items()}
    passed, sentences = verdict(rewarded(), both)
    assert passed is True  # one rises, the other stays
    assert "reward/colour (optimised, weight 0.5) went from 0.850" in sentences[1]
    assert sentences[1].endswith("within its interval: pass.")
    passed, sentences = verdict(rewarded(colour=interval(0.74)), both)
    assert passed is False  # a rise does not pay for a fall
    assert [s.endswith(": fail.") for s in sentences] == [False, True, False, False]
    passed, sentences = verdict(rewarded(ocr=interval(0.6)), both)
    assert passed is False
    assert [s.endswith(": fail.") for s in sentences] == [True, True, False, False]


def test_rl_a_watched_reward_is_not_judged() -> None:
    assert verdict(rewarded(colour=interval(0.1)), REWARDS)[0] is True


def test_rl_a_reward_of_negative_weight_is_to_fall() -> None:
    down = {"size": {"kind": "function", "weight": -1.0}}
    scores = rewarded(size=interval(2.0, 0.1))
    scores["arms"]["start"]["reward/size"] = interval(3.0, 0.1)
    passed, sentences = verdict(scores, down)
    assert passed is True
    assert sentences[0].startswith("reward/size (optimised, weight -1) fell from 3.000")
    scores["arms"]["final"]["reward/size"] = interval(4.0, 0.1)
    passed, sentences = verdict(scores, down)
    assert passed is False
    assert "rose from 3.000 [2.900, 3.100] to 4.000" in sentences[0]


def test_rl_parts_have_weights_of_their_own() -> None:
    parts = {"mine": {"kind": "function", "weight": {"a/b": 1.0, "c": 0.0}}}
    policy: dict[str, Any] = {"mine/a/b": interval(5.0), "mine/c": interval(0.1)}
    scores = rewarded(**policy)
    scores["arms"]["start"] |= {"reward/mine/a/b": interval(4.0), "reward/mine/c": interval(0.9)}
    passed, sentences = verdict(scores, parts)
    assert passed is True
    assert len(sentences) == 3
    assert sentences[0].startswith("reward/mine/a/b (optimised, weight 1) rose")
    terms = terms_of(parts, ["mine/c", "mine/a/b", "mine/late"])
    assert [(t.name, t.weight) for t in terms] == [("mine/a/b", 1.0), ("mine/c", 0.0), ("mine/late", 0.0)]
    assert [t.name for t in terms_of(parts, [])] == ["mine/a/b"]  # what is optimised is missed where it is missing


@pytest.mark.parametrize("metric", ["reward/ocr", "read_accuracy", "diversity"])
@pytest.mark.parametrize("arm", ["final", "start"])
def test_rl_a_score_that_is_no_number_fails(metric: str, arm: str) -> None:
    scores = rewarded()
    scores["arms"][arm][metric] = dict.fromkeys(("mean", "low", "high"), float("nan"))
    assert verdict(scores, REWARDS)[0] is False
    del scores["arms"][arm][metric]
    passed, sentences = verdict(scores, REWARDS)
    assert passed is False
    who = {"final": "the policy", "start": "the start"}[arm]
    assert (f"reward/ocr (optimised, weight 1) has no score of {who}: fail." in sentences) == (metric == "reward/ocr")


def test_rl_another_reward_that_rises_does_not_hide_a_missing_one() -> None:
    both = {name: {**reward, "weight": 0.5} for name, reward in REWARDS.items()}
    scores = rewarded()
    del scores["arms"]["final"]["reward/colour"]
    assert verdict(scores, both)[0] is False


def test_health_names_what_went_wrong() -> None:
    assert health([]) == []
    assert health(dmd2_rows(10)) == []
    assert health([{"cycle": 1450, "train/nonfinite_student_loss": 2.0}]) == [
        "Non-finite values were met, last around cycle 1,450 (student_loss); those updates were skipped."
    ]


# Arms and curves


@pytest.mark.parametrize(
    ("name", "algorithm", "label"),
    [
        ("real", DMD2, "Real pictures"),
        ("teacher@25", DMD2, "Teacher, 25 guided steps (50 calls)"),
        ("teacher@1", {**DMD2, "guidance": 1.0}, "Teacher, 1 call"),
        ("student@2", DMD2, "Student, 2 calls"),
        ("student_raw@2", DMD2, "Student, not averaged, 2 calls"),
        ("student@25", FLOW, "Student, 25 guided steps (50 calls)"),
        ("other", DMD2, "other"),
        ("real", GRPO, "Real pictures"),
        ("start", GRPO, "Start, 10 calls"),
        ("final", {**GRPO, "guidance": 2.0}, "Policy, averaged, 10 guided steps (20 calls)"),
        ("final_raw", NFT, "Policy, not averaged, 12 calls"),
        ("final", {**NFT, "evaluation_steps": None}, "Policy, averaged, 8 calls"),
        ("final", {"name": "awm", "num_steps": 1}, "Policy, averaged, 1 call"),
        ("other", GRPO, "other"),
        ("final", {"name": "dpo"}, "final"),
        ("final", DMD2, "final"),
    ],
)
def test_labels(name: str, algorithm: dict[str, Any], label: str) -> None:
    assert arm_of(name, algorithm).label == label


def test_panels_leave_out_what_is_missing_and_what_is_not_finite() -> None:
    assert panels([], {}) == []
    rows = [
        {"cycle": 1, "train/student_loss": 2.0, "time/cycle": 1.0, "time/rollout": 0.5},
        {"cycle": 2, "train/student_loss": float("nan"), "time/cycle": 2.0},
        {"cycle": 3, "train/student_loss": 4.0},
    ]
    loss, seconds = panels(rows, {})
    assert loss.series[0].cycles.tolist() == [1, 3]
    assert loss.series[0].values.tolist() == [2, 4]
    assert [series.label for series in seconds.series] == [""]
    assert seconds.series[0].values.tolist() == [1, 2]


def test_rows_of_unlike_length_are_compared_a_cycle_and_repeats_have_no_panel_of_their_own() -> None:
    rows = [
        {"cycle": 4, "count/cycles": 4, "time/cycle": 8.0, "train/fake_score_loss": 3.0, "reward/failed": 2},
        {"cycle": 5, "count/cycles": 1, "time/cycle": 3.0, "train/fake_score_loss": 5.0, "reward/failed": 0},
    ]
    for row in rows:
        row |= {"time/fake_score": 1.0, "time/fake_score/repeat_0": 1.0, "train/fake_score_loss/repeat_0": 7.0}
        row |= {"time/fake_score_samples_per_s": 9.0, "time/cycle_latency": 2.0}
    curves = curves_of(rows)
    assert curves["time/cycle"] == [(4, 2.0), (5, 3.0)]
    assert curves["reward/failed"] == [(4, 0.5), (5, 0.0)]
    assert curves["train/fake_score_loss"] == [(4, 3.0), (5, 5.0)]
    assert [panel.title for panel in panels(rows, {})] == ["Loss, fake score", "Seconds a cycle"]
    (seconds,) = [panel for title, panel in rl_titles(rows).items() if title.startswith("Seconds")]
    assert [series.label for series in seconds.series] == ["whole cycle", "fake_score"]


def test_panels_compare_the_student_with_the_teacher() -> None:
    found = {panel.title: panel for panel in panels(dmd2_rows(20), distilled())}
    read = found["Captions read (read_accuracy)"]
    assert read.series[0].cycles.tolist() == [50, 100, 150, 200]
    assert list(read.levels) == [("teacher@25", 0.92), ("teacher@2", 0.3)]
    norms = found["Gradient norm, before clipping"].series
    assert {series.label for series in norms} == {"student", "fake_score"}
    assert len({series.colour for series in norms}) == 2


def rl_titles(rows: Sequence[dict[str, float]], scores: Any = None, **config: Any) -> dict[str, Panel]:
    config = {"algorithm": GRPO, "rewards": REWARDS, **config}
    found = rl_panels(curves_of(rows), scores or {}, config)
    assert len({panel.title for panel in found}) == len(found)
    return {panel.title: panel for panel in found}


def test_rl_panels_of_flow_grpo() -> None:
    found = rl_titles(grpo_rows(80, far=0.5), rewarded())
    assert list(found) == [
        "Reward of the rollout, optimised: ocr", "Reward of the rollout, only watched: colour",
        "Reward on held-out captions, optimised: ocr", "Reward on held-out captions, only watched: colour",
        "Captions read (read_accuracy)", "Diversity", "Distance to real pictures (fd_feat)", "Drift",
        "KL to the start, in nats a transition", "Importance ratio: mean |ratio - 1|, by sigma",
        "Share of transitions outside the clip range, by sigma", "Log-prob gap of rollout and trainer, by sigma",
        "Loss, policy (carries a gradient; not a quality)", "Gradient norm, before clipping",
        "Groups that teach nothing, as sampled", "Spread of the reward inside groups", "Learning rate",
        "Seconds a cycle, whole and in parts",
    ]  # fmt: skip
    assert found["KL to the start, in nats a transition"].series[0].values.tolist()[:2] == [0.25, 2.75]
    assert found["Diversity"].series[0].values.tolist() == [55, 55, 55, 55]
    assert list(found["Diversity"].levels) == [("start", 64.0), ("real", 42.0)]
    assert list(found["Reward on held-out captions, optimised: ocr"].levels) == [("start", 0.6)]
    assert list(found["Distance to real pictures (fd_feat)"].levels) == []  # quick ones come out higher
    seconds = found["Seconds a cycle, whole and in parts"].series
    assert [s.label for s in seconds] == ["whole cycle", "rollout", "kl", "policy"]
    assert seconds[2].cycles.tolist()[:3] == [1, 11, 21]
    assert len({s.colour for s in seconds}) == 4


def test_rl_panels_of_nft_and_dpo() -> None:
    found = rl_titles(nft_rows(40), algorithm=NFT)
    assert {"Reward weight r (mean; one half by construction)", "Two-sided loss"} <= set(found)
    assert {"Distance of policy and old policy", "Share that the old policy keeps of itself"} <= set(found)
    assert [s.label for s in found["Two-sided loss"].series] == ["positive", "negative"]
    assert not any("sigma" in title or "ratio" in title for title in found)
    rows = [
        {"cycle": i, "train/policy_preferred": 0.6, "train/policy_margin": 0.1, "train/policy_loss": 0.7}
        for i in (1, 2)
    ]
    found = rl_titles(rows, algorithm={"name": "dpo"})
    assert list(found) == [
        "Loss, policy", "Pairs in which the policy prefers the better one", "Margin by which it prefers it"
    ]  # fmt: skip


def test_rl_curves_by_sigma_are_ordered_and_never_flood_other_plots() -> None:
    found = rl_titles(grpo_rows(80, far=0.5))
    ratio = found["Importance ratio: mean |ratio - 1|, by sigma"]
    assert [s.label for s in ratio.series] == ["1.000", "0.964", "0.667", "0.429"]
    assert ratio.series[0].values[0] == 0.5
    assert ratio.ordered
    brightness = [sum(int(s.colour[i : i + 2], 16) for i in (1, 3, 5)) for s in ratio.series]
    assert brightness == sorted(brightness)
    assert len(set(brightness)) == 4
    by_sigma = [title for title, panel in found.items() if any(s.label in SIGMAS for s in panel.series)]
    assert by_sigma == [title for title in found if title.endswith("by sigma")]
    assert len(by_sigma) == 3


def test_rl_many_sigmas_are_thinned_out() -> None:
    row = {"cycle": 1.0, **{f"train/policy_clip_fraction/sigma_{i / 50:.3f}": 0.5 for i in range(1, 51)}}
    ((title, panel),) = rl_titles([row, row | {"cycle": 2.0}]).items()
    assert title == f"Share of transitions outside the clip range, by sigma ({MAX_SIGMAS} of 50)"
    assert [panel.series[0].label, panel.series[-1].label] == ["1.000", "0.020"]
    assert len(panel.series) == MAX_SIGMAS


def test_rl_what_is_exactly_0_is_said_in_words() -> None:
    rows = grpo_rows(80)
    assert not any(title.endswith("by sigma") for title in rl_titles(rows))
    assert "Samples without a score, a cycle" not in rl_titles(rows)
    assert len(still(curves_of(rows))) == 3
    assert "The importance ratio is exactly 1 at every update." in still(curves_of(rows))
    rows[40]["train/policy_ratio_deviation/sigma_0.964"] = 1e-9
    assert "Importance ratio: mean |ratio - 1|, by sigma" in rl_titles(rows)
    assert len(still(curves_of(rows))) == 2
    assert still(curves_of(nft_rows(9))) == []
    rows[3]["reward/failed"] = 2.0
    assert rl_titles(rows)["Samples without a score, a cycle"].series[0].values[3] == 2


def test_rl_rewards_share_a_plot_on_the_scale_from_0_to_1_only() -> None:
    rewards = {
        "ocr": {"weight": 1.0}, "clip": {"weight": 0.5}, "size": {"weight": 0.1},
        "colour": {"weight": 0.0}, "mine": {"weight": {"a": 0.0, "b": 2.0}},
    }  # fmt: skip
    values = {"ocr": 0.5, "clip": 0.3, "size": -12.0, "colour": 0.9, "mine/a": 0.1, "mine/b": 1.5, "failed": 0.0}
    rows = [{"cycle": c, **{f"reward/{name}": value for name, value in values.items()}} for c in (1, 2)]
    found = {title: [s.label for s in panel.series] for title, panel in rl_titles(rows, rewards=rewards).items()}
    assert found == {
        "Reward of the rollout, optimised": ["ocr", "clip"],
        "Reward of the rollout, optimised: size": ["size"],
        "Reward of the rollout, optimised: mine/b": ["mine/b"],
        "Reward of the rollout, only watched": ["colour", "mine/a"],
    }


def test_rl_parts_that_are_called_like_metrics_stay_rewards() -> None:
    names = ("mine/read_accuracy", "mine/fd_feat", "mine/_grad_norm", "mine/x_lr", "mine/sigma_0.5", "mine/cycle")
    rows = [{"cycle": 1, **{f"{at}reward/{name}": 0.5 for name in names for at in ("", "evaluate/final/")}}]
    found = rl_titles(rows, rewards={"mine": {"weight": {"read_accuracy": 1.0}}})
    assert list(found) == [
        f"Reward {where}, {which}" for where in ("of the rollout", "on held-out captions")
        for which in ("optimised: mine/read_accuracy", "only watched")
    ]  # fmt: skip


def test_rl_panels_of_nothing() -> None:
    assert rl_panels({}, {}, {}) == []
    assert rl_panels(curves_of([{"cycle": 1, "reward/ocr": float("nan")}]), {}, {"algorithm": GRPO}) == []


def test_smoothing_keeps_lines_and_means() -> None:
    line = np.arange(200.0)
    assert np.allclose(smoothed(line)[10:-10], line[10:-10])
    assert np.array_equal(smoothed(np.full(7, 3.0)), np.full(7, 3.0))
    spike = np.zeros(200)
    spike[100] = 9
    assert smoothed(spike).sum() == pytest.approx(9)
    assert smoothed(spike).max() == pytest.approx(1)


def test_long_curves_keep_their_spikes() -> None:
    values = np.random.default_rng(0).normal(size=40_123)
    values[[17, 30_000]] = 99, -99
    kept = extremes(values)
    assert len(kept) <= 2 * 500 + 500
    assert {17, 30_000} <= set(kept.tolist())
    assert np.all(np.diff(kept) > 0)
    assert extremes(values[:1000]).tolist() == list(range(1000))


# The page


def test_no_run_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run folder: it has no run\.json") as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("algorithm", [DMD2, FLOW], ids=["dmd2", "flow_matching"])
def test_page_of_a_run_that_has_just_started(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    path = write_report(start_run(tmp_path / "fresh", algorithm))
    page = Page(path)
    assert path == tmp_path / "fresh" / "report.html"
    assert page.stands_alone()
    assert page.refreshes
    for text in ("cycle 0 of 1,200", "Not judged yet", "No scores yet.", "No pictures yet.", "No metrics yet."):
        assert text in page.text
    assert page.count("img") == 0


def test_page_of_a_run_that_was_killed_while_writing(tmp_path: Path) -> None:
    folder = start_run(tmp_path / "cut", DMD2)
    rows = "".join(json.dumps(row) + "\n" for row in dmd2_rows(7))
    (folder / "metrics.jsonl").write_text(rows + '{"cycle": 80, "train/stu')
    (folder / "scores.json").write_text('{"arms": {"real": ')
    save_strip(folder / "evaluation" / "real.png")
    whole = (folder / "evaluation" / "real.png").read_bytes()
    (folder / "evaluation" / "teacher@25.png").write_bytes(whole[: len(whole) // 2])
    (folder / "evaluation" / "teacher@2.png").write_bytes(b"")
    page = Page(write_report(folder))
    assert page.stands_alone()
    assert "cycle 70 of 1,200" in page.text
    assert "No scores yet." in page.text
    assert "Real pictures" in page.text
    assert "Teacher, 25" not in page.text


def test_page_of_a_distillation(tmp_path: Path) -> None:
    folder = full_run(tmp_path / "run")
    page = Page(write_report(folder))
    assert page.stands_alone()
    assert not page.refreshes
    assert "Passes" in page.text
    for sentence in verdict(distilled())[1]:
        assert sentence in page.text
    labels = [
        "Real pictures", "Teacher, 25 guided steps (50 calls)", "Teacher, 2 guided steps (4 calls)",
        "Student, 2 calls", "Student, not averaged, 2 calls", "After 100 cycles", "After 1,200 cycles",
    ]  # fmt: skip
    places = [page.text.index(label) for label in labels]
    assert places == sorted(places)
    assert len(re.findall(r"After [\d,]+ cycles", page.text)) == MAX_HISTORY
    pictures = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) == 16 * (5 + MAX_HISTORY) + 8
    assert pictures[3]["alt"] == "Real pictures: the number 03"
    assert "algorithm.score_sigma.low 0.02" in page.text
    assert f"sigmazero evaluate {folder}" in page.text


def test_table_shows_the_scores_as_they_are(tmp_path: Path) -> None:
    page = Page(write_report(full_run(tmp_path / "run")))
    for arm, values in distilled()["arms"].items():
        for value in values.values():
            digits = 4 if value["mean"] < 0.1 else 3
            shown = "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(value["mean"], value["low"], value["high"], d=digits)
            assert shown in page.text, arm
    assert "0.920 [0.828, 1.012]" in page.text


def test_page_of_flow_matching(tmp_path: Path) -> None:
    folder = start_run(tmp_path / "run", FLOW, finished=True)
    save_rows(folder, [{"cycle": 50 * i, "train/student_loss": 1 / i, "time/cycle": 0.1} for i in range(1, 80)])
    (folder / "scores.json").write_text(json.dumps(taught(read=0.8)))
    for name in ("real", "student@25", "history/00000600"):
        save_strip(folder / "evaluation" / f"{name}.png", num=8)
    page = Page(write_report(folder))
    assert page.stands_alone()
    assert "Does not pass" in page.text
    assert "reads 80.0 % of captions with 50 network calls (25 guided steps): fail." in page.text
    assert "at least 90.0 % of captions" in page.text
    assert page.count("img") == 3 * 8 + 2


def test_page_of_flow_grpo(tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "g1", GRPO, grpo_rows(80), rewarded())
    for cycle in range(0, 81, 20):
        save_strip(folder / "evaluation" / "history" / f"{cycle:08d}.png")
    page = Page(write_report(folder))
    assert page.stands_alone()
    assert not page.refreshes
    assert (
        "Online RL (Flow-GRPO) on the reward ocr, watching colour; sampled with 10 network calls a picture" in page.text
    )
    for text in ("Passes", "Health: 11 ok", "Averaged policy", *verdict(rewarded(), REWARDS)[1]):
        assert text in page.text
    labels = [
        "Real pictures", "Start, 10 calls", "Policy, averaged, 10 calls", "Policy, not averaged, 10 calls",
        "The averaged policy over training", "After 0 cycles", "After 80 cycles",
    ]  # fmt: skip
    places = [page.text.index(label) for label in labels]
    assert places == sorted(places)
    assert "reward/ocr optimised, weight 1 reward/colour only watched read_accuracy fd_feat" in page.text
    assert "0.900 [0.850, 0.950] 0.840 [0.790, 0.890] 0.800 [0.720, 0.880]" in page.text
    assert "the wanted text as PP-OCR reads it; optimised with weight 1" in page.text
    assert "The importance ratio is exactly 1 at every update." in page.text
    assert page.count("img") == 16 * (4 + 5) + len(rl_titles(grpo_rows(80), rewarded()))


def test_page_of_nft(tmp_path: Path) -> None:
    scores = rewarded(NFT, ocr=interval(0.98, 0.01), read=0.3)
    page = Page(write_report(rl_run(tmp_path / "n1", NFT, nft_rows(80), scores)))
    assert page.stands_alone()
    assert "Online RL (DiffusionNFT) on the reward ocr, watching colour; sampled with 12 network calls" in page.text
    assert "Does not pass" in page.text
    assert "The policy reads 30.0 % of captions; the start reads 50.0 %: fail." in page.text
    assert "1 of 80 logged rows had an update in which no group taught anything" in page.text
    assert "Set rollout.max_refills" in page.text
    states = [str(attrs["class"]) for tag, attrs in page.tags if tag == "span" and "badge" in str(attrs.get("class"))]
    assert states == sorted(states)  # badge bad, badge look, badge ok: the worst first
    assert {"badge bad", "badge look", "badge ok"} == set(states)


@pytest.mark.parametrize("name", ["flow_grpo", "nft", "awm", "best_of_group", "dpo"])
def test_page_of_an_rl_run_that_has_just_started(tmp_path: Path, name: str) -> None:
    page = Page(write_report(start_run(tmp_path / "fresh", {"name": name, "num_steps": 10}, rewards=REWARDS)))
    assert page.stands_alone()
    assert page.refreshes
    for text in (
        "Not judged yet",
        "No scores yet.",
        "Health: nothing measured yet",
        "No pictures yet.",
        "No metrics yet.",
    ):
        assert text in page.text
    assert page.count("img") == 0


def test_page_of_an_rl_run_that_was_killed_while_writing(tmp_path: Path) -> None:
    rows = [*grpo_rows(12), {"cycle": 13, "reward/ocr": float("nan"), "train/policy_loss": float("inf")}]
    scores = {"arms": {arm: rewarded()["arms"][arm] for arm in ("real", "start")}, "settings": {"algorithm": GRPO}}
    folder = rl_run(tmp_path / "cut", GRPO, rows, scores, finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"cycle": 14, "reward/o')
    for arm in ("final", "final_raw"):
        (folder / "evaluation" / f"{arm}.png").write_bytes(b"")
    page = Page(write_report(folder))
    assert "cycle 13 of 80" in page.text
    assert "No scores of the policy yet." in page.text
    assert "Policy, averaged" not in page.text
    assert "Health: " in page.text
    (folder / "scores.json").write_text('{"arms": ')
    (folder / "metrics.jsonl").unlink()
    page = Page(write_report(folder))
    assert "No scores yet." in page.text
    assert "Health: nothing measured yet" in page.text


def test_a_reward_of_any_name_is_escaped_and_drawn(tmp_path: Path) -> None:
    """A name is an identifier, a part anything: markup, mathematics, a leading underscore, no Latin letter."""
    parts = ("<script>alert(1)</script>", "$\\frac$", "_hidden", "数字", "\n\x00", "x" * 300, "a/b", "'\"&")
    rewards = {"mine": {"kind": "function", "weight": dict.fromkeys(parts, 1.0)}, "_x": {"kind": "ocr", "weight": 0.0}}
    names = [*(f"mine/{part}" for part in parts), "_x"]
    rows = [row | {f"{at}reward/{n}": 0.1 for n in names for at in ("", "evaluate/final/")} for row in grpo_rows(60)]
    policy: dict[str, Any] = {name: interval(0.5) for name in names}
    scores = rewarded(**policy)
    for arm in ("real", "start"):
        scores["arms"][arm] |= {f"reward/{name}": interval(0.2) for name in names}
    page = Page(write_report(rl_run(tmp_path / "odd", GRPO, rows, scores, rewards=rewards)))
    assert page.stands_alone()
    assert "<script" not in page.html
    assert "reward/mine/<script>alert(1)</script> (optimised, weight 1) rose" in page.text
    assert "Passes" in page.text
    assert all(set(attrs) <= {"src", "alt", "title"} for tag, attrs in page.tags if tag == "img")


def test_pages_of_other_runs_have_no_health_of_rl(tmp_path: Path) -> None:
    page = Page(write_report(full_run(tmp_path / "run")))
    assert "Health" not in page.text
    assert "The student over training" in page.text


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
    folder = start_run(tmp_path / "<i>run", DMD2, output=evil, plugins=[evil])
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "captions.json").write_text(json.dumps([evil] * 16))
    save_strip(folder / "evaluation" / "real.png")
    save_strip(folder / "evaluation" / f"{evil.replace('/', '')}.png")
    page = Page(write_report(folder))
    assert "<script" not in page.html
    assert page.count("i") == 0
    assert page.count("img") == 2 * 16
    assert all(set(attrs) == {"src", "alt", "title"} for tag, attrs in page.tags if tag == "img")
    assert page.text.count("alert(1)") == 16 + 1 + 2  # captions, label, two settings


def test_page_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = start_run(tmp_path / "run", DMD2)
    write_report(folder)
    before = (folder / "report.html").read_text("utf-8")
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "run.json"]

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    save_rows(folder, dmd2_rows(3))
    with monkeypatch.context() as patch:
        patch.setattr("sigmazero.report.os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_report(folder)
    assert (folder / "report.html").read_text("utf-8") == before
    assert "cycle 30 of" in Page(write_report(folder)).text
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "report.html", "run.json"]


def test_report_imports_no_torch() -> None:
    code = "import sys, sigmazero.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_family_without_a_reader_is_not_judged() -> None:
    """Its distillation has diversity alone, which says neither pass nor fail."""
    arms = {
        name: {"diversity": {"mean": 0.2, "low": 0.1, "high": 0.3}} for name in ("teacher@8", "teacher@4", "student@4")
    }
    passed, sentences = verdict({"arms": arms, "settings": {"algorithm": {"name": "dmd2", "num_steps": 4}}})
    assert passed is None
    assert sentences[0].startswith("Not judged: no reader knows the pictures of this family")
