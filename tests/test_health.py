"""What the page of an online-RL run says of its health: each sentence on rows made by hand, and none on sound ones."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sigmazero.curves import curves_of
from sigmazero.health import Finding, rl_health, summary, worst

NAN, INF = float("nan"), float("inf")
GRPO = {"name": "flow_grpo", "num_steps": 10, "clip": 1e-4, "updates": 1, "epochs": 1, "kl_weight": 0.0}
NFT = {"name": "nft", "num_steps": 10, "updates": 1, "kl_weight": 0.0}
DPO = {"name": "dpo", "num_steps": 10, "updates": 1}
REWARDS = {"ocr": {"kind": "ocr", "weight": 1.0}, "colour": {"kind": "colour", "weight": 0.0}}
BAD_FIRST = {"bad": 0, "look": 1, "ok": 2}


def described(algorithm: Mapping[str, Any] = GRPO, torch: str = "2.13.0+cpu", **config: Any) -> dict[str, Any]:
    settings = {"num_cycles": 100, "algorithm": algorithm, "rewards": REWARDS, "data": {"batch_size": 64}}
    settings |= {"rollout": {"group_size": 8, "max_refills": 0, "max_failed": 0.2, "replay": ""}, **config}
    return {"config": settings, "versions": {"torch": torch}}


def row(cycle: int, **values: float) -> dict[str, float]:
    """A sound row of flow_grpo; ``values`` by the last part of the metric's name replace some."""
    sound = {
        "reward/ocr": 0.5 + cycle / 400, "reward_std/ocr": 0.4, "reward/colour": 0.9, "reward_std/colour": 0.1,
        "reward/failed": 0.0, "group/dead": 0.125, "group/std": 0.3,
        "train/kl_nats": cycle / 10, "train/kl_mean": cycle / 7680,
        "train/policy_loss": 1e-8, "train/policy_grad_norm": 0.01, "train/policy_clip_fraction": 0.0,
        "train/policy_ratio_deviation": 0.0, "train/policy_ratio_deviation_max": 0.0,
        "train/log_prob_mean_abs_diff": 0.0, "train/log_prob_abs_diff_max": 0.0,
    }  # fmt: skip
    for name, value in values.items():
        key = name.replace("__", "/")
        found = [k for k in sound if k == key or k.endswith((f"/{key}", f"/policy_{key}"))]
        sound[found[0] if found else f"train/{key}"] = value
    return {"cycle": cycle, **sound}


def rows(num: int = 100, **values: Any) -> list[dict[str, float]]:
    """Sound rows; a value may be a function of the cycle, 1 to ``num``."""
    made: list[dict[str, Any]] = [{n: v(c) if callable(v) else v for n, v in values.items()} for c in range(1, num + 1)]
    return [row(c, **own) for c, own in enumerate(made, 1)]


def without(log: Sequence[Mapping[str, float]], *parts: str) -> list[dict[str, float]]:
    return [{name: value for name, value in r.items() if not any(part in name for part in parts)} for r in log]


def findings(log: Sequence[Mapping[str, float]], run: Any = None, scores: Any = None) -> list[Finding]:
    return rl_health(curves_of(log), len(log), run or described(), scores or {})


def finding(name: str, *args: Any) -> Finding:
    (found,) = [f for f in findings(*args) if f.name == name]
    return found


def names(*args: Any) -> set[str]:
    return {f.name for f in findings(*args)}


def interval(mean: float, half: float = 0.05) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half}


def scores(**final: dict[str, float]) -> dict[str, Any]:
    """A start and a policy that reads more and is otherwise alike; ``final`` replaces scores of the policy."""
    start = {
        "read_accuracy": interval(0.5), "diversity": interval(60, 3), "fd_feat": interval(180, 40),
        "drift": interval(0.01, 0.002), "reward/ocr": interval(0.6), "reward/colour": interval(0.85),
    }  # fmt: skip
    given = {name.replace("__", "/"): value for name, value in final.items()}
    policy = start | {"read_accuracy": interval(0.9), "reward/ocr": interval(0.9)} | given
    return {"arms": {"real": start | {"diversity": interval(40, 3)}, "start": start, "final": policy}}


# Together


def test_a_sound_run_has_nothing_to_look_at() -> None:
    found = findings(rows(), described(), scores())
    assert {f.state for f in found} == {"ok"}
    assert [f.name for f in found] == [
        "Reward of the rollout", "Signs of reward hacking", "Dead groups", "Failed scores", "Empty updates",
        "Non-finite values", "Gradient norm", "KL to the start", "Ratio and clipping", "Log-prob gap",
    ]  # fmt: skip
    assert summary(found) == "10 ok"
    assert worst(found) == "ok"


def test_no_rows_say_nothing() -> None:
    assert findings([]) == []
    assert summary([]) == "nothing measured yet"
    assert worst([]) == ""


def test_the_worst_comes_first() -> None:
    log = rows(dead=0.6, grad_norm=lambda c: 10.0 ** (c / 20), failed=64.0)
    found = findings(log)
    assert [f.state for f in found] == sorted((f.state for f in found), key=BAD_FIRST.__getitem__)
    assert [f.name for f in found if f.state == "bad"] == ["Failed scores", "Gradient norm"]
    assert [f.name for f in found if f.state == "look"] == ["Dead groups"]
    assert summary(found) == "2 bad, 1 to look at, 6 ok"
    assert worst(found) == "bad"


@pytest.mark.parametrize("value", [NAN, INF, None, "text", [1.0]])
def test_values_that_are_no_numbers_are_left_out(value: Any) -> None:
    log: list[Any] = [{name: value if name != "cycle" else v for name, v in r.items()} for r in rows(30)]
    assert {f.state for f in findings([*rows(30), *log])} == {"ok"}
    assert names(log) == {"Empty updates", "Non-finite values"}


def test_a_run_without_rewards_or_settings_of_its_own_still_has_a_page() -> None:
    run = {"config": {"algorithm": GRPO, "rollout": None}, "versions": {"torch": "2.13.0"}}
    assert {f.state for f in findings(rows(30), run)} == {"ok"}


# Rewards


@pytest.mark.parametrize(
    ("last", "state"), [(0.5, "look"), (0.539, "look"), (0.541, "ok"), (0.9, "ok"), (0.41, "look"), (0.39, "bad")]
)
def test_rollout_reward_is_measured_in_deviations_of_a_sample(last: float, state: str) -> None:
    """The deviation is 0.4: a tenth of it is a rise, a quarter a fall."""
    log = rows(ocr=lambda c: 0.5 if c <= 50 else last)
    found = finding("Reward of the rollout", log)
    assert found.state == state
    assert f"reward/ocr 0.500 → {last:.3f}" in found.sentence
    assert ("optimizers.policy.lr" in found.sentence) == (state != "ok")


def test_rollout_reward_of_negative_weight_is_to_fall() -> None:
    run = described(rewards={"ocr": {"kind": "function", "weight": -2.0}})
    assert finding("Reward of the rollout", rows(ocr=lambda c: 1 - c / 200), run).state == "ok"
    assert finding("Reward of the rollout", rows(), run).state == "bad"


def test_few_rows_have_no_trend() -> None:
    assert "Reward of the rollout" not in names(rows(9))
    assert "Reward of the rollout" in names(rows(10))


def test_hacking_in_the_rollout_while_there_are_no_scores() -> None:
    falling = rows(colour=lambda c: 0.9 if c <= 50 else 0.87)  # three tenths of its deviation
    found = finding("Signs of reward hacking", falling)
    assert found.state == "look"
    assert "reward/colour 0.900 → 0.870" in found.sentence
    assert "raise algorithm.kl_weight" in found.sentence
    assert "weight" in found.sentence.split("stop earlier")[1]
    name = "Signs of reward hacking"
    assert name not in names(rows(colour=lambda c: 0.9 if c <= 50 else 0.88))
    assert name not in names(rows(colour=lambda c: 0.9 if c <= 50 else 0.87, ocr=0.5))  # no gain to pay for


@pytest.mark.parametrize(
    ("changed", "state", "said"),
    [
        ({"reward__colour": interval(0.74)}, "bad", "reward/colour fell from 0.850 [0.800, 0.900] to 0.740"),
        ({"read_accuracy": interval(0.39)}, "bad", "read_accuracy fell from 0.500 [0.450, 0.550] to 0.390"),
        ({"diversity": interval(30, 3)}, "bad", "diversity fell from 60.000 [57.000, 63.000] to 30.000"),
        ({"fd_feat": interval(500, 40)}, "look", "fd_feat grew from 180.0 [140.0, 220.0] to 500.0"),
        ({"fd_feat": interval(730, 40)}, "bad", "fd_feat grew from 180.0"),
        ({"drift": interval(0.021, 0.002)}, "look", "drift grew from 0.0100 [0.0080, 0.0120] to 0.0210"),
        ({"drift": interval(0.041, 0.002)}, "bad", "drift grew"),
    ],
)
def test_signs_of_hacking_in_the_scores(changed: Any, state: str, said: str) -> None:
    found = finding("Signs of reward hacking", rows(), described(), scores(**changed))
    assert found.state == state
    assert found.sentence.startswith("While the optimised reward rose, ")
    assert said in found.sentence
    assert ("give the reward that falls a weight" in found.sentence) == ("reward__colour" in changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"reward__colour": interval(0.76)},  # intervals touch
        {"diversity": interval(43, 3)},  # beyond its interval, but not below real pictures
        {"diversity": interval(36, 3)},
        {"fd_feat": interval(350, 40)},
        {"drift": interval(0.025, 0.014)},  # not sure to have grown
        {"drift": interval(0.0199, 0.002)},
        {"fd_feat": {"mean": NAN, "low": NAN, "high": NAN}},
    ],
)
def test_no_sign_of_hacking(changed: Any) -> None:
    found = finding("Signs of reward hacking", rows(), described(), scores(**changed))
    assert found.state == "ok"


def test_damage_without_gain_is_said_so() -> None:
    changed = scores(reward__ocr=interval(0.6), reward__colour=interval(0.7))
    assert finding("Signs of reward hacking", rows(), described(), changed).sentence.startswith("Without a gain")


def test_advice_fits_the_algorithm() -> None:
    changed = scores(drift=interval(0.03, 0.002))
    assert "lower optimizers.policy.lr" in finding("Signs of reward hacking", rows(), described(DPO), changed).sentence
    unwatched = scores()
    for arm in unwatched["arms"].values():
        del arm["reward/colour"]
    run = described(rewards={"ocr": REWARDS["ocr"]})
    assert (
        "A reward of weight 0 would watch more." in finding("Signs of reward hacking", rows(), run, unwatched).sentence
    )


@pytest.mark.parametrize(("raw", "state"), [(0.99, "ok"), (1.01, "look"), (0.5, "ok")])
def test_the_average_may_lag_behind(raw: float, state: str) -> None:
    scored = scores()
    assert "Averaged policy" not in names(rows(), described(), scored)
    scored["arms"]["final_raw"] = scored["arms"]["final"] | {"reward/ocr": interval(raw)}
    found = finding("Averaged policy", rows(), described(), scored)
    assert found.state == state
    assert f"reward/ocr 0.900 [0.850, 0.950], not averaged {raw:.3f}" in found.sentence
    assert ("algorithm.ema_decay" in found.sentence) == (state == "look")


# What there is to learn from


def test_dead_groups() -> None:
    rising = finding("Dead groups", rows(dead=lambda c: c / 100, std=lambda c: 0.4 - c / 400))
    assert rising.state == "look"
    assert "5.5 % of groups taught nothing at the start, 95.5 % at the end" in rising.sentence
    assert "spread inside groups 0.386 → 0.161" in rising.sentence
    assert "Set rollout.max_refills" in rising.sentence
    assert finding("Dead groups", rows(dead=0.5)).state == "ok"
    assert finding("Dead groups", rows(dead=lambda c: 1 - c / 100)).state == "ok"
    throughout = finding("Dead groups", rows(dead=0.95))
    assert throughout.state == "bad"
    assert "rollout.group_size" in throughout.sentence
    assert finding("Dead groups", rows(5, dead=1.0)).state == "look"  # too early for more
    refilled = finding("Dead groups", rows(dead=0.6), described(rollout={"max_refills": 3}))
    assert "They are replaced" in refilled.sentence
    assert "Dead groups" not in names(without(rows(), "group/"))  # as in a replayed run


def test_failed_scores() -> None:
    assert finding("Failed scores", rows()).sentence == "Every sample got a score."
    few = finding("Failed scores", rows(failed=lambda c: 64.0 if c == 7 else 0.0))
    assert few.state == "look"
    assert "0.640 of 64 samples a cycle had no score (1.0 %)" in few.sentence
    assert "rollout.max_failed (0.2)" in few.sentence
    assert finding("Failed scores", rows(failed=3.2)).state == "look"
    assert finding("Failed scores", rows(failed=3.3)).state == "bad"
    refilled = [r | {"group/refilled": 4.0} for r in rows(failed=4.8)]  # 4 groups of 8 more: 96 samples
    assert "of 96 samples a cycle had no score (5.0 %)" in finding("Failed scores", refilled).sentence


def test_empty_updates() -> None:
    assert finding("Empty updates", rows()).sentence == "Every update had something to learn from."
    some = [*rows(80), *({"cycle": 80 + i, "train/policy_empty": 1.0} for i in range(1, 21))]
    assert finding("Empty updates", some).state == "ok"
    assert "20 of 100 logged rows" in finding("Empty updates", some).sentence
    more = [*rows(79), *({"cycle": 79 + i, "train/policy_empty": 1.0} for i in range(1, 22))]
    assert finding("Empty updates", more).state == "look"
    assert "rollout.max_refills" in finding("Empty updates", more).sentence
    never = [{"cycle": c, "train/policy_empty": 1.0, "group/dead": 1.0} for c in range(1, 13)]
    assert finding("Empty updates", never).state == "bad"
    assert "no update was ever made" in finding("Empty updates", never).sentence


# Numbers


def test_nonfinite_values() -> None:
    early = rows()
    early[39] |= {"train/nonfinite_policy_loss": 3.0, "train/policy_loss": NAN}
    found = finding("Non-finite values", early)
    assert found.state == "look"
    assert "Met in 1 of 100 logged rows, last around cycle 40 (policy_loss)" in found.sentence
    late = rows()
    late[95] |= {"train/nonfinite_policy_loss": 1.0, "train/nonfinite_kl_nats": 1.0}
    assert finding("Non-finite values", late).state == "bad"
    assert "cycle 96 (kl_nats, policy_loss)" in finding("Non-finite values", late).sentence
    zero = [r | {"train/nonfinite_policy_loss": 0.0} for r in rows()]
    assert finding("Non-finite values", zero).state == "ok"


def test_a_gradient_that_is_not_finite_is_known_from_the_skipped_update() -> None:
    log = rows()
    log[19]["train/policy_skipped"] = 1.0
    found = finding("Non-finite values", log)
    assert found.state == "look"
    assert "last around cycle 20 (policy_gradient)" in found.sentence


@pytest.mark.parametrize(
    ("growth", "state"), [(1.0, "ok"), (9.9, "ok"), (10.1, "look"), (99.0, "look"), (101.0, "bad")]
)
def test_gradient_norm(growth: float, state: str) -> None:
    found = finding("Gradient norm", rows(grad_norm=lambda c: 0.2 if c <= 50 else 0.2 * growth))
    assert found.state == state
    assert found.sentence.startswith("0.200 at the start, ")
    assert ("optimizers.policy.lr" in found.sentence) == (state != "ok")


def test_one_spike_is_no_explosion_and_no_gradient_is_worth_a_look() -> None:
    assert finding("Gradient norm", rows(grad_norm=lambda c: 1e6 if c == 98 else 0.1)).state == "ok"
    assert finding("Gradient norm", rows(grad_norm=lambda c: 0.0 if c > 60 else 0.1)).state == "look"
    assert finding("Gradient norm", rows(3, grad_norm=lambda c: 1000.0**c)).state == "ok"  # too early


@pytest.mark.parametrize(("nats", "state", "deviations"), [(95.0, "ok", "0.497"), (97.0, "look", "0.503")])
def test_kl_to_the_start(nats: float, state: str, deviations: str) -> None:
    """Of 768 elements: half a deviation each is 768 / 8 = 96 nats, a whole one 384."""
    found = finding("KL to the start", rows(kl_nats=nats, kl_mean=nats / 768))
    assert found.state == state
    assert f"{nats:.3f} nats a transition around cycle 100" in found.sentence
    assert f"lies {deviations} deviations of its own noise" in found.sentence
    assert ("algorithm.kl_weight (now 0)" in found.sentence) == (state != "ok")


def test_kl_at_its_ends() -> None:
    assert finding("KL to the start", rows(kl_nats=383.0, kl_mean=383 / 768)).state == "look"
    assert finding("KL to the start", rows(kl_nats=385.0, kl_mean=385 / 768)).state == "bad"
    stuck = finding("KL to the start", rows(kl_nats=0.0, kl_mean=0.0))
    assert stuck.state == "look"
    assert "has not moved" in stuck.sentence
    assert finding("KL to the start", rows(1, kl_nats=0.0, kl_mean=0.0)).state == "ok"  # before any update
    assert "KL to the start" not in names(without(rows(), "kl_"))


# The ratio


def test_log_prob_gap_on_the_cpu_must_be_exactly_0() -> None:
    assert finding("Log-prob gap", rows()).sentence.startswith("Exactly 0")
    small = rows(log_prob_mean_abs_diff=1e-7, log_prob_abs_diff_max=lambda c: 3e-6 if c == 50 else 0.0)
    found = finding("Log-prob gap", small)
    assert found.state == "look"
    assert "1e-07 on average in the worst row, 3e-06 at most" in found.sentence
    assert "must be exactly 0" in found.sentence
    large = finding("Log-prob gap", rows(log_prob_mean_abs_diff=2e-4))
    assert large.state == "bad"
    assert "more than the clip range (0.0001)" in large.sentence
    replayed = described(rollout={"replay": "runs/other"})
    assert "Log-prob gap" not in names(rows(), replayed)


def test_log_prob_gap_elsewhere_is_compared_with_the_clip_range() -> None:
    gpu = described(torch="2.13.0")
    assert finding("Log-prob gap", rows(log_prob_mean_abs_diff=9e-5, log_prob_abs_diff_max=1e-3), gpu).state == "ok"
    above = rows(log_prob_mean_abs_diff=lambda c: 1.1e-4 if c == 9 else 1e-6)
    assert finding("Log-prob gap", above, gpu).state == "look"
    used = described({**GRPO, "updates": 2, "old_log_prob": "rollout"}, torch="2.13.0")
    found = finding("Log-prob gap", above, used)
    assert found.state == "bad"
    assert "Set algorithm.old_log_prob to trainer" in found.sentence


def test_one_update_a_rollout_is_on_policy_by_construction() -> None:
    found = finding("Ratio and clipping", rows())
    assert found.state == "ok"
    assert "by construction" in found.sentence
    assert finding("Ratio and clipping", rows(clip_fraction=0.01)).state == "bad"
    assert finding("Ratio and clipping", rows(ratio_deviation_max=1e-7)).state == "bad"
    replayed = described(rollout={"replay": "runs/other"})
    assert finding("Ratio and clipping", rows(clip_fraction=0.3, ratio_deviation_max=0.1), replayed).state == "ok"
    assert finding("Ratio and clipping", rows(clip_fraction=0.91), replayed).state == "look"


def test_several_updates_are_clipped_after_the_first() -> None:
    """Of 4 updates the first cannot be clipped: a mean of 0.6 is 0.8 of the others, one of 0.69 is 0.92."""
    run = described({**GRPO, "updates": 2, "epochs": 2})
    sound = finding("Ratio and clipping", rows(clip_fraction=0.6, ratio_deviation_max=2e-3), run)
    assert sound.state == "ok"
    assert "at most 0.002 from 1; 80.0 % of transitions lie outside the clip range (0.0001)" in sound.sentence
    clipped = finding("Ratio and clipping", rows(clip_fraction=0.69), run)
    assert clipped.state == "look"
    assert "92.0 %" in clipped.sentence
    assert "algorithm.clip" in clipped.sentence
    never = finding("Ratio and clipping", rows(ratio_deviation_max=1e-6), run)
    assert never.state == "look"
    assert "never acts" in never.sentence


# Of single algorithms


def nft_rows(**values: float) -> list[dict[str, float]]:
    own = {"train/policy_reward_weight": 0.5, "train/policy_old_distance": 1e-3}
    own |= {f"train/policy_{name}": value for name, value in values.items()}
    return [r | own for r in without(rows(), "ratio", "clip", "log_prob", "kl_")]


def test_nft_has_a_two_sided_loss() -> None:
    sound = finding("Two-sided loss", nft_rows(), described(NFT))
    assert sound.state == "ok"
    assert "Reward weight 0.500 on average" in sound.sentence
    assert "0.001 from the old policy's" in sound.sentence
    assert {"Ratio and clipping", "Log-prob gap", "KL to the start"}.isdisjoint(names(nft_rows(), described(NFT)))
    one_sided = finding("Two-sided loss", nft_rows(reward_weight=0.39), described(NFT))
    assert one_sided.state == "look"
    assert "0.110 off" in one_sided.sentence
    several = described({**NFT, "updates": 4})
    assert finding("Two-sided loss", nft_rows(old_distance=0.0), several).state == "look"
    assert finding("Two-sided loss", nft_rows(old_distance=0.0), described(NFT)).state == "ok"


def test_dpo_comes_to_prefer_the_better_picture() -> None:
    def log(last: float) -> list[dict[str, float]]:
        return [r | {"train/policy_preferred": 0.0 if r["cycle"] < 50 else last} for r in nft_rows()]

    assert finding("Preference", log(0.5), described(DPO)).state == "ok"
    found = finding("Preference", log(0.4), described(DPO))
    assert found.state == "look"
    assert "40.0 % of new pairs" in found.sentence
    assert "Preference" not in names(log(0.4)[:9], described(DPO))


def test_sentences_end_and_hold_no_nan() -> None:
    odd = {"arms": {"start": {}, "final": {"reward/ocr": interval(NAN)}, "final_raw": {}}}
    found = findings(rows(clip_fraction=math.nan), described(), odd)
    assert all(f.sentence.endswith(".") for f in found)
    assert not any(re.search(r"\bnan\b", f.sentence) for f in found if f.name != "Non-finite values")


def test_a_watched_reward_that_fails_is_bad_though_every_sample_has_a_total() -> None:
    """In the rollout, or in the evaluation alone, where its score is missing."""
    log = rows()
    log[3]["reward_failed/colour"] = 2.0
    found = finding("Failed scores", log, described(), scores())
    assert found.state == "bad"
    assert "no score of colour:" in found.sentence
    without = scores()
    del without["arms"]["final"]["reward/colour"]
    found = finding("Failed scores", rows(), described(), without)
    assert found.state == "bad"
    assert "no score of colour (in evaluation):" in found.sentence


def test_short_runs_state_no_trend() -> None:
    log = rows()[:3]
    assert "too few logged rows for a trend" in finding("Dead groups", log).sentence
    assert "too few logged rows for a trend" in finding("Gradient norm", log).sentence
    assert "→" not in finding("Dead groups", log).sentence
