"""Step strategies: pure in their arguments, uniform where they draw, and every impossible plan refused."""

import numpy as np
import pytest

from sigmazero.records import StepPlan
from sigmazero.strategies import (
    StepStrategy,
    all_but_last,
    checked_plan,
    epoch_global_random_choice,
    every_exit,
    moving_window,
    ode_and_return_last,
    sde_window,
    shared_draw,
    stop_at_random_step,
)

DRAWS = 4000
STRATEGIES = {
    "sde_window": sde_window(2, 1, 8),
    "epoch_global_random_choice": epoch_global_random_choice((1, 3, 4, 6), 2, 3),
    "ode_and_return_last": ode_and_return_last,
    "stop_at_random_step": stop_at_random_step(),
    "all_but_last": all_but_last,
    "every_exit": every_exit,
    "moving_window": moving_window(2, 1, 8, 5),
    "shared_draw": shared_draw(sde_window(2, 1, 8), 4),
}


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plan_is_a_pure_function_of_its_arguments(name: str) -> None:
    strategy = STRATEGIES[name]
    forwards = [strategy(s, 10, 5) for s in range(40)]
    backwards = [strategy(s, 10, 5) for s in reversed(range(40))]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize("name", ["sde_window", "epoch_global_random_choice", "stop_at_random_step", "shared_draw"])
def test_another_seed_gives_other_plans(name: str) -> None:
    strategy = STRATEGIES[name]
    assert [strategy(s, 10, 5) for s in range(40)] != [strategy(s, 10, 6) for s in range(40)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategys_plans_can_be_followed_as_they_are(name: str) -> None:
    for sample in range(300):
        plan = STRATEGIES[name](sample, 10, 0)
        assert checked_plan(plan, 10) == plan


def test_a_plan_unpacks_as_a_tuple() -> None:
    sde, ret, stop = StepPlan((), (1, 2), 1)
    assert (sde, ret, stop) == ((), (1, 2), 1)


def test_windows_are_contiguous_and_uniform_over_their_range() -> None:
    counts = dict.fromkeys(range(1, 7), 0)
    for sample in range(DRAWS):
        sde, ret, stop = sde_window(2, 1, 8)(sample, 10, 0)
        assert sde is not None
        first = sde[0]
        assert sde == (first, first + 1)
        assert ret == (first, first + 1, first + 2, 10)
        assert stop is None
        counts[first] += 1
    assert chi_square(list(counts.values())) < 20.5  # 5 degrees of freedom, at 0.1 %


def test_a_window_at_the_end_returns_the_sample_once() -> None:
    assert sde_window(2, 2, 4)(0, 4, 0) == StepPlan((2, 3), (2, 3, 4), None)


def test_an_epoch_shares_its_choice_and_epochs_are_uniform_over_subsets() -> None:
    strategy = epoch_global_random_choice((1, 3, 4, 6), 2, 4)
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(600):
        plans = {strategy(4 * epoch + offset, 10, 0) for offset in range(4)}
        assert len(plans) == 1
        sde, ret, stop = plans.pop()
        assert sde is not None
        assert ret == tuple(sorted({sde[0], sde[0] + 1, sde[1], sde[1] + 1, 10}))
        assert stop is None
        counts[sde] = counts.get(sde, 0) + 1
    assert set(counts) == {(1, 3), (1, 4), (1, 6), (3, 4), (3, 6), (4, 6)}
    assert chi_square(list(counts.values())) < 20.5


def test_ode_returns_the_sample_alone_and_filters_every_step() -> None:
    assert [ode_and_return_last(s, n, 0) for s, n in ((0, 4), (9, 1))] == [
        StepPlan((), (4,), None),
        StepPlan((), (1,), None),
    ]


@pytest.mark.parametrize("num_steps", [1, 2, 4, 10])
def test_stops_are_uniform_at_every_place_of_a_batch_and_balanced_in_it(num_steps: int) -> None:
    """N consecutive samples stop at each step once; the sample at any one place of them stops anywhere, alike often."""
    counts = [[0] * num_steps for _ in range(num_steps)]
    for sample in range(DRAWS):
        sde, ret, stop = stop_at_random_step()(sample, num_steps, 0)
        assert stop is not None
        assert sde is None
        assert ret == (stop, stop + 1)
        counts[sample % num_steps][stop] += 1
    assert all(sum(column) == DRAWS // num_steps for column in zip(*counts, strict=True))
    assert all(chi_square(own) < 31 for own in counts)  # 9 degrees of freedom, ten times, at .3 % in all


@pytest.mark.parametrize("num_steps", [2, 4])
def test_neighbouring_deals_of_stops_are_independent(num_steps: int) -> None:
    """The first exits of two deals, as a student that learns from every second batch meets them: all pairs alike."""
    firsts = [stop_at_random_step()(num_steps * deal, num_steps, 0).stop or 0 for deal in range(DRAWS)]
    pairs = [0] * num_steps**2
    for one, other in zip(firsts[::2], firsts[1::2], strict=True):
        pairs[one * num_steps + other] += 1
    assert chi_square(pairs) < 37.7  # 15 degrees of freedom, at 0.1 %


def test_stops_equal_numpy_philox_by_hand() -> None:
    key = np.array([5, 2], dtype=np.uint64)
    draws = [np.random.Philox(key=key, counter=np.array([0, 0, 0, s], dtype=np.uint64)) for s in range(5)]
    expected = [int(i) for draw in draws for i in np.random.Generator(draw).permutation(4)]
    assert [stop_at_random_step()(s, 4, 5).stop for s in range(20)] == expected


def test_consecutive_samples_share_a_stop() -> None:
    each, shared = stop_at_random_step(), stop_at_random_step(8)
    assert [shared(s, 4, 0) for s in range(64)] == [each(s // 8, 4, 0) for s in range(64)]


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (StepPlan((4,), (4,), None), r"sde is \(4,\); with 4 steps it must lie in 0\.\.3"),
        (StepPlan((-1,), (0, 4), None), r"sde is \(-1,\)"),
        (StepPlan((1, 1), (1, 2, 4), None), r"sde is \(1, 1\); an index stands there twice"),
        (StepPlan((1.0,), (1, 2, 4), None), r"sde is \(1.0,\); every index must be an integer"),  # pyright: ignore
        (StepPlan((True,), (1, 2, 4), None), r"sde is \(True,\); every index must be an integer"),
        (StepPlan(1, (1, 2, 4), None), "sde is 1; it must be a tuple"),  # pyright: ignore[reportArgumentType]
        (StepPlan((1,), (1, 4), None), r"latents \[2\], which are not in ret"),
        (StepPlan((1, 2), (4,), None), r"latents \[1, 2, 3\], which are not in ret"),
        (StepPlan((1,), (1, 2), 1), "step 1 is the stop and jumps to sigma 0"),
        (StepPlan((2,), (1, 2), 1), r"sde is \(2,\); with 4 steps it must lie in 0\.\.1"),
        (StepPlan(None, (5,), None), r"ret is \(5,\); with 4 steps it must lie in 0\.\.4"),
        (StepPlan(None, (-1, 4), None), r"ret is \(-1, 4\)"),
        (StepPlan(None, (4, 4), None), r"ret is \(4, 4\); an index stands there twice"),
        (StepPlan(None, ("4",), None), r"ret is \('4',\); every index must be an integer"),  # pyright: ignore
        (StepPlan(None, (True, 4), None), r"ret is \(True, 4\); every index must be an integer"),
        (StepPlan(None, 4, None), "ret is 4; it must be a tuple"),  # pyright: ignore[reportArgumentType]
        (StepPlan(None, (), None), "ret must name at least one"),
        (StepPlan(None, (2, 3), 1), r"ret is \(2, 3\); with 4 steps it must lie in 0\.\.2"),
        (StepPlan(None, (0, 1), 1), "must return latent 2, its sample"),
        (StepPlan(None, (4,), 4), r"stop is \(4,\); with 4 steps it must lie in 0\.\.3"),
        (StepPlan(None, (4,), -1), r"stop is \(-1,\)"),
        (StepPlan(None, (2,), 1.0), r"stop is \(1.0,\); every index must be an integer"),  # pyright: ignore
        (StepPlan(None, (2,), True), r"stop is \(True,\); every index must be an integer"),
        (((), (4,)), r"returns \(sde, ret, stop\), got \(\(\), \(4,\)\)"),
        ([None, (4,), None], r"returns \(sde, ret, stop\)"),
        (None, r"returns \(sde, ret, stop\), got None"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(plan: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        checked_plan(plan, 4)


def test_a_plain_tuple_is_accepted_and_its_latents_put_in_order() -> None:
    assert checked_plan(([1], [4, 2, 0, 1], None), 4) == StepPlan((1,), (0, 1, 2, 4), None)


def test_no_filter_and_no_stochastic_step_stay_two_values() -> None:
    assert checked_plan((None, (4,), None), 4).sde is None
    assert checked_plan(((), (4,), None), 4).sde == ()


@pytest.mark.parametrize(("num_sde_steps", "low", "high"), [(0, 0, 4), (5, 0, 4), (1, -1, 3), (1, 4, 4)])
def test_a_window_that_does_not_fit_its_range_is_refused(num_sde_steps: int, low: int, high: int) -> None:
    with pytest.raises(ValueError, match=rf"sde_window: {num_sde_steps} steps do not fit the range \[{low}, {high}\)"):
        sde_window(num_sde_steps, low, high)


@pytest.mark.parametrize(
    ("candidates", "count", "per_epoch"), [((1, 2), 3, 4), ((1, 1), 1, 4), ((1,), 0, 4), ((1,), 1, 0)]
)
def test_a_choice_that_cannot_be_made_is_refused(candidates: tuple[int, ...], count: int, per_epoch: int) -> None:
    with pytest.raises(ValueError, match="epoch_global_random_choice: cannot choose"):
        epoch_global_random_choice(candidates, count, per_epoch)


@pytest.mark.parametrize("strategy", [sde_window(1, 0, 5), epoch_global_random_choice((0, 4), 1, 1)])
def test_steps_outside_the_schedule_are_refused_at_the_call(strategy: StepStrategy) -> None:
    with pytest.raises(ValueError, match="exceeds a schedule of 4 steps"):
        strategy(0, 4, 0)


@pytest.mark.parametrize("samples_per_draw", [0, -1])
def test_a_draw_for_no_sample_is_refused(samples_per_draw: int) -> None:
    with pytest.raises(ValueError, match="samples_per_draw"):
        stop_at_random_step(samples_per_draw)


@pytest.mark.parametrize(
    ("num_steps", "sde"), [(4, (0, 1, 2)), (2, (0,)), (1, ())], ids=["four", "two", "none is left of one"]
)
def test_all_but_last_returns_every_latent_of_its_steps_and_the_sample(num_steps: int, sde: tuple[int, ...]) -> None:
    ret = tuple(range(num_steps + 1)) if sde else (1,)
    assert {all_but_last(s, num_steps, seed) for s in range(3) for seed in range(3)} == {StepPlan(sde, ret, None)}


def test_a_moving_window_goes_through_its_range_and_stays_at_the_end() -> None:
    strategy = moving_window(2, 1, 5, 3)
    firsts = []
    for sample in range(20):
        sde, ret, stop = strategy(sample, 10, 0)
        assert sde is not None
        assert sde == (sde[0], sde[0] + 1)
        assert ret == (sde[0], sde[0] + 1, sde[0] + 2, 10)
        assert stop is None
        firsts.append(sde[0])
    assert firsts == [1] * 3 + [2] * 3 + [3] * 14


def test_a_window_as_wide_as_its_range_does_not_move() -> None:
    assert {moving_window(3, 1, 4, 1)(s, 4, 0).sde for s in range(9)} == {(1, 2, 3)}


@pytest.mark.parametrize(
    ("count", "low", "high", "per_move"), [(0, 0, 4, 1), (5, 0, 4, 1), (1, -1, 3, 1), (1, 4, 4, 1), (1, 0, 4, 0)]
)
def test_a_moving_window_that_cannot_move_is_refused(count: int, low: int, high: int, per_move: int) -> None:
    with pytest.raises(ValueError, match=rf"moving_window: {count} steps do not fit .*, moved every {per_move}"):
        moving_window(count, low, high, per_move)


@pytest.mark.parametrize("samples_per_draw", [1, 4, 6])
def test_b35_samples_that_share_a_draw_follow_the_first_of_them(samples_per_draw: int) -> None:
    each = sde_window(2, 1, 8)
    plans = [shared_draw(each, samples_per_draw)(s, 10, 5) for s in range(48)]
    assert plans == [each(s - s % samples_per_draw, 10, 5) for s in range(48)]
    assert len(set(plans)) > 2
