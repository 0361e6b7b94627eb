"""Advantages against golden numbers, and every way in which a group teaches nothing (math §4)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sigmazero.algorithms.advantages import advantages, dead_groups, group_advantages
from sigmazero.config import AdvantageConfig
from sigmazero.records import Prompt, RolloutRequest, StepPlan, Trajectory

ORACLE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "flow_rl.json").read_text())
NAN, INF = math.nan, math.inf


def of(rewards: Sequence[float], groups: Sequence[int] | None = None, **how: Any) -> tuple[list[float], list[float]]:
    """Advantages and weights, of one group unless it says otherwise."""
    group = torch.zeros(len(rewards), dtype=torch.long) if groups is None else torch.tensor(groups)
    advantage, weight = advantages(torch.tensor(rewards, dtype=torch.float64), group, **how)
    assert advantage.dtype == weight.dtype == torch.float32
    return advantage.tolist(), weight.tolist()


@pytest.mark.parametrize(("key", "std"), [("adv/per_prompt", "group"), ("adv/global", "batch")])
def test_golden_advantages(key: str, std: str) -> None:
    advantage, weight = of([1, 2, 3, 4, 5, 6], [0, 1, 0, 2, 1, 0], std=std)
    assert advantage == pytest.approx(ORACLE[key], rel=1e-5)
    assert weight == [1] * 6


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "rewards", [[1.0] * 4, [0.3] * 10, [0.1] * 7, [1e6 / 3] * 11, [0.0] * 3, [2.5], [0.3, NAN, 0.3], [NAN, 0.3]]
)
def test_b10_a_group_without_a_difference_has_exactly_none(rewards: list[float], std: str) -> None:
    """Beside one that has, and among them floats whose mean is rounded, so that their deviation is not 0."""
    both = [*rewards, 1.0, 5.0]
    advantage, _ = of(both, [*[3] * len(rewards), 4, 4], std=std)
    assert advantage[: len(rewards)] == [0] * len(rewards)
    assert advantage[-1] == -advantage[-2] > 0


def test_b10_some_of_these_deviations_are_not_0() -> None:
    """What a test of a tiny deviation would have to catch."""
    stds = [torch.full((n,), r, dtype=torch.float64).std(correction=0).item() for r, n in ((0.1, 7), (1e6 / 3, 11))]
    assert all(0 < std < 1e-9 for std in stds)


def test_b10_two_and_two() -> None:
    assert of([0, 0, 1, 1])[0] == pytest.approx([-0.9998, -0.9998, 0.9998, 0.9998], abs=5e-6)


def test_b10_rounding_noise_gets_next_to_nothing() -> None:
    noise = torch.tensor([0.300001, 0.3, 0.3, 0.3])
    advantage, _ = advantages(noise, torch.zeros(4, dtype=torch.long))
    assert advantage[0].item() == pytest.approx(0.0075, abs=2e-4)
    assert advantage[1:].tolist() == pytest.approx([-0.0025] * 3, abs=1e-4)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_b10_an_unscorable_sample_is_as_if_it_were_not_there(bad: float, std: str) -> None:
    with_it, weight = of([1, 2, bad, 4, 0, bad, 3], [0, 0, 0, 0, 1, 1, 1], std=std)
    without, _ = of([1, 2, 4, 0, 3], [0, 0, 0, 1, 1], std=std)
    assert [with_it[i] for i in (0, 1, 3, 4, 6)] == without
    assert (with_it[2], with_it[5]) == (0, 0)
    assert weight == [1, 1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_b10_a_group_that_nobody_could_score(bad: float, std: str) -> None:
    assert of([bad, bad], std=std) == ([0, 0], [0, 0])
    advantage, weight = of([bad, 1, bad, 2], [0, 1, 0, 1], std=std)
    assert (advantage[0], advantage[2]) == (0, 0)
    assert -advantage[1] == advantage[3] > 0
    assert weight == [0, 1, 0, 1]


def test_advantages_are_clamped() -> None:
    rewards = [0.0] * 99 + [1.0]
    assert of(rewards)[0][-1] == 5
    assert of(rewards, clamp=7.5)[0][-1] == 7.5
    assert of(rewards, clamp=50.0)[0][-1] == pytest.approx(0.99 / (math.sqrt(0.0099) + 1e-4))
    assert of([-r for r in rewards])[0][-1] == -5


def test_dr_grpo_only_centres() -> None:
    assert of([1, 2, 6, 10, 14], [0, 0, 0, 1, 1], std="none")[0] == [-2, -1, 3, -2, 2]
    assert of([0, 20], std="none")[0] == [-5, 5]


def test_the_batchs_deviation_is_that_of_scorable_rewards_dead_groups_included() -> None:
    rewards = [1, 3, 7, 7, NAN, INF]
    advantage, _ = of(rewards, [0, 0, 1, 1, 0, 2], std="batch")
    own = torch.tensor([1.0, 3, 7, 7]).double().std(correction=0).item() + 1e-4
    assert advantage == pytest.approx([-1 / own, 1 / own, 0, 0, 0, 0])


REWARDS = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([NAN, INF, 0.3, 1.0]))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_b21_the_order_of_rows_does_not_matter(data: st.DataObject) -> None:
    rewards = data.draw(st.lists(REWARDS, min_size=1, max_size=12))
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    std = data.draw(st.sampled_from(["group", "batch", "none"]))
    advantage, weight = of(rewards, groups, std=std)
    moved, moved_weight = of([rewards[i] for i in order], [groups[i] for i in order], std=std)
    assert moved == pytest.approx([advantage[i] for i in order], rel=1e-5, abs=1e-6)
    assert moved_weight == [weight[i] for i in order]


def test_groups_that_teach_nothing_are_named() -> None:
    rewards = torch.tensor([1, 1, 1, 2, NAN, NAN, 5, NAN, INF, 5, 3.0])
    groups = torch.tensor([8, 8, 2, 2, 7, 7, 4, 4, 7, 4, 0])
    assert dead_groups(rewards, groups) == [0, 4, 7, 8]
    assert dead_groups(rewards[2:4], groups[2:4]) == []


def made(groups: Sequence[int], text: str = "the number 42") -> list[Trajectory]:
    """A sample a row, all of one text, with nothing in it but its group."""
    plan, sigmas, latents = StepPlan((), (1,), None), torch.tensor([1.0, 0.0]), torch.zeros(1, 1, 1, 1)
    requests = [
        RolloutRequest(i, 0, Prompt(g, text), "policy", sigmas, "sde", 0.7, 1.0, 0, plan, group=g)
        for i, g in enumerate(groups)
    ]
    return [Trajectory(r, latents, (1,), sigmas, torch.full((1,), NAN), 0) for r in requests]


def group_of(groups: Sequence[int], rewards: Sequence[float], size: int) -> tuple[Tensor, Tensor]:
    return group_advantages(made(groups), torch.tensor(rewards, dtype=torch.float64), AdvantageConfig(), size)


def test_b21_rows_of_one_text_go_by_their_group_in_any_order() -> None:
    advantage, weight = group_of([5, 2, 2, 5], [10, 1, 2, 20], 2)
    assert advantage.tolist() == pytest.approx([-1, -1, 1, 1], abs=3e-4)
    assert weight.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("groups", "complaint"),
    [
        ([0, 0, 1, 1, 1], "group 0 has 2 samples, and rollout.group_size is 3"),
        ([0, 0, 0, 1, 1, 1, 1], "group 1 has 4 samples, and rollout.group_size is 3"),
    ],
)
def test_b21_a_group_of_the_wrong_size_is_refused(groups: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        group_of(groups, list(range(len(groups))), 3)


def test_b10_a_rollout_that_teaches_nothing_has_no_weight() -> None:
    advantage, weight = group_of([0, 0, 1, 1], [0.3, 0.3, 1, NAN], 2)
    assert advantage.tolist() == weight.tolist() == [0] * 4


def test_b10_a_dead_group_beside_a_live_one_keeps_its_weight() -> None:
    """It is part of the mean: fewer live groups must not make larger steps."""
    advantage, weight = group_of([0, 0, 1, 1], [0.3, 0.3, 1, 2], 2)
    assert advantage.tolist()[:2] == [0, 0]
    assert weight.tolist() == [1, 1, 1, 1]


def test_the_settings_of_a_recipe_are_used() -> None:
    rewards = torch.tensor([0.0, 10, 4, 4])
    config = AdvantageConfig(std="none", clamp=3.0)
    assert group_advantages(made([0, 0, 1, 1]), rewards, config, 2)[0].tolist() == [-3, 3, 0, 0]
