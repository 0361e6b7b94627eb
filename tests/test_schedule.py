"""Sigma grids and conversions against closed forms and diffusers' table (math §1, §2)."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sigmazero import schedule, seeds

ORACLE: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "flow_rl.json").read_text())


def close(actual: Tensor, expected: list[float] | Tensor, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=rtol, atol=atol)


def test_grid_of_four_steps_at_shift_three() -> None:
    close(schedule.sigma_grid(4, 3.0), [1, 0.9, 0.75, 0.5, 0])


def test_grid_of_one_step() -> None:
    assert schedule.sigma_grid(1, 3.0).tolist() == [1, 0]


@given(st.integers(1, 200), st.floats(0.1, 20))
@settings(deadline=None)
def test_grid_is_the_shift_of_equal_steps(num_steps: int, shift: float) -> None:
    u = [(num_steps - i) / num_steps for i in range(num_steps)]
    grid = schedule.sigma_grid(num_steps, shift)
    close(grid, [*(shift * a / (1 + (shift - 1) * a) for a in u), 0])
    schedule.check_sigmas(grid)


@pytest.mark.parametrize("num_steps", [0, -1, True, 4.0, "4", None])
def test_a_number_of_steps_that_is_none_is_refused(num_steps: Any) -> None:
    with pytest.raises(ValueError, match=f"num_steps is {num_steps!r}"):
        schedule.sigma_grid(num_steps)


@pytest.mark.parametrize("shift", [0.0, -1.0, math.nan, math.inf])
def test_a_shift_that_is_not_positive_is_refused(shift: float) -> None:
    with pytest.raises(ValueError, match="shift is"):
        schedule.sigma_grid(4, shift)


def test_b07_as_diffusers_is_its_table_and_not_ours() -> None:
    as_diffusers = schedule.diffusers_sd3_grid(10)
    close(as_diffusers, ORACLE["sigmas"], rtol=1e-5)
    assert (as_diffusers - schedule.sigma_grid(10, 3.0)).abs().max() > 0.1


def test_b07_once_and_twice_shifted_values() -> None:
    close(schedule.static_shift(torch.tensor([0.003, 0.002, 0.001]), 3.0), [0.0089463, 0.0059761, 0.0029940], atol=5e-8)
    close(schedule.static_shift(torch.linspace(1, 0.001, 4), 3.0), [1, 0.857326, 0.600719, 0.002994], atol=5e-7)
    close(schedule.diffusers_sd3_grid(1000)[-4:-1], [0.0148221, 0.0118812, 0.0089286], atol=5e-8)
    close(schedule.diffusers_sd3_grid(4), [1, 0.857692, 0.602151, 0.008929, 0], atol=5e-7)


@given(st.floats(0.01, 1), st.floats(-2, 4))
@settings(deadline=None)
def test_exponential_shift_is_a_static_one(u: float, mu: float) -> None:
    value = torch.tensor([u], dtype=torch.float64)
    close(schedule.exponential_shift(value, mu), schedule.static_shift(value, math.exp(mu)), rtol=1e-12)


def test_exponential_shift_values() -> None:
    u = torch.tensor([1, 0.75, 0.5, 0.25])
    close(schedule.exponential_shift(u, math.log(3)), [1, 0.9, 0.75, 0.5])
    close(schedule.exponential_shift(u, 2.0307), [1, 0.9581, 0.884, 0.7175], atol=5e-5)  # FLUX.2-klein, 512x512


@pytest.mark.parametrize(
    ("stop", "expected"), [(0, [1, 0]), (1, [1, 0.9, 0]), (2, [1, 0.9, 0.75, 0]), (3, [1, 0.9, 0.75, 0.5, 0])]
)
def test_truncated_schedule(stop: int, expected: list[float]) -> None:
    close(schedule.truncate(torch.tensor([1, 0.9, 0.75, 0.5, 0]), stop), expected, rtol=0, atol=0)


@pytest.mark.parametrize("stop", [-1, 4])
def test_a_stop_outside_the_schedule_is_refused(stop: int) -> None:
    with pytest.raises(ValueError, match=rf"stop is {stop}; .*0\.\.3"):
        schedule.truncate(torch.tensor([1, 0.9, 0.75, 0.5, 0]), stop)


@pytest.mark.parametrize(
    ("sigmas", "complaint"),
    [
        ([1, 0.5, 0.5, 0], "strictly descending"),
        ([0.5, 0.9, 0], "strictly descending"),
        ([1, 0.5, 0, 0], "strictly descending"),
        ([1, 0.5, 0.1], "ends in exactly 0"),
        ([1, 0.5, -0.1], "ends in exactly 0"),
        ([1.01, 0.5, 0], r"within \[0, 1\]"),
        ([1, math.nan, 0], r"within \[0, 1\]"),
        ([0.0], "N at least 1"),
        ([[1, 0.5, 0]], "one dimension"),
    ],
)
def test_b63_what_is_no_schedule_is_refused(sigmas: list[Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        schedule.check_sigmas(torch.tensor(sigmas, dtype=torch.float32))


def test_b63_timesteps_cast_to_integers_are_refused() -> None:
    exact = torch.tensor([0.9989, 0.9988, 0.9987, 0.5, 0])
    schedule.check_sigmas(exact)
    with pytest.raises(ValueError, match="strictly descending"):
        schedule.check_sigmas((exact * 1000).int() / 1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_b06_a_schedule_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="float32"):
        schedule.check_sigmas(torch.tensor([1, 0.5, 0], dtype=dtype))


def test_b06_schedules_of_other_lengths_do_not_stack() -> None:
    with pytest.raises(ValueError, match=r"differ in length: \[3, 5\]"):
        schedule.stack_sigmas([schedule.sigma_grid(4), schedule.sigma_grid(2)])


def test_b03_timesteps_keep_fp32() -> None:
    t = schedule.timestep(torch.tensor([0.9983897, 0.9782609, 0.6818182, 0.9375, 0.75]))
    close(t, [998.3897, 978.2609, 681.8182, 937.5, 750], rtol=1e-7, atol=0)
    assert t.bfloat16().tolist() == [1000, 980, 680, 936, 752]


def test_b03_a_timestep_of_a_bf16_sigma_is_not_rounded_again() -> None:
    sigma = torch.tensor([0.9782609]).bfloat16()
    assert schedule.timestep(sigma).tolist() == [1000 * sigma.double().item()]


numbers = st.floats(-10, 10, width=32)


@given(st.lists(st.tuples(numbers, numbers, st.floats(0, 1, width=32)), min_size=1, max_size=8))
@settings(deadline=None)
def test_conversions_invert_the_noising(rows: list[tuple[float, float, float]]) -> None:
    x0, eps, sigma = torch.tensor(rows).unbind(1)
    x0, eps = x0[:, None].expand(-1, 2), eps[:, None].expand(-1, 2)
    x = schedule.add_noise(x0, eps, sigma)
    close(schedule.x0_from_velocity(x, eps - x0, sigma), x0, atol=1e-5)
    close(schedule.eps_from_velocity(x, eps - x0, sigma), eps, atol=1e-5)


def test_noising_uses_each_rows_own_sigma() -> None:
    x0, eps = torch.full((2, 1, 1), 8.0), torch.full((2, 1, 1), 4.0)
    assert schedule.add_noise(x0, eps, torch.tensor([0.25, 0.75])).flatten().tolist() == [7, 5]


def test_eps_is_finite_at_sigma_one() -> None:
    x, v = torch.tensor([[2.0]]), torch.tensor([[5.0]])
    assert schedule.eps_from_velocity(x, v, torch.ones(1)).item() == 2


@pytest.mark.parametrize(
    ("distribution", "u", "sigma"),
    [
        ("discrete", 0.5, 0.75),  # shifted twice it would be 0.9
        ("discrete", 0.1239, 3 * 0.123 / 1.246),
        ("uniform", 0.1239, 3 * 0.1239 / 1.2478),
        ("discrete", 0.0, 0.02),
        ("uniform", 0.006, 0.02),
        ("discrete", 0.9999, 0.98),
        ("uniform", 0.9999, 0.98),
    ],
)
def test_score_sigma_is_shifted_once_and_clamped(distribution: str, u: float, sigma: float) -> None:
    close(schedule.score_sigma(torch.tensor([u], dtype=torch.float64), distribution, 3.0, 0.02, 0.98), [sigma])


def test_discrete_score_sigma_spans_the_full_range_unless_clamped() -> None:
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    close(schedule.score_sigma(u, "discrete", 1.0, 0.0, 1.0), torch.arange(1000) / 1000)


def test_an_unknown_score_sigma_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match="'normal' is unknown"):
        schedule.score_sigma(torch.zeros(1), "normal", 1.0, 0.0, 1.0)


def test_logit_normal_sigma() -> None:
    z = seeds.normal(0, "train_timestep", range(4), (2000,)).flatten()
    sigma = schedule.logit_normal_sigma(z, -0.5, 1.5)
    assert schedule.logit_normal_sigma(torch.zeros(1), 1.0, 2.0).item() == pytest.approx(1 / (1 + math.exp(-1)))
    logit = torch.logit(sigma.double())
    close(logit, -0.5 + 1.5 * z.double(), rtol=1e-4, atol=1e-4)
    assert sigma.median().item() == pytest.approx(1 / (1 + math.exp(0.5)), abs=0.02)


@pytest.mark.parametrize("num_steps", [0, -1, True, 4.0])
def test_a_number_of_steps_that_is_none_is_refused_as_diffusers_too(num_steps: Any) -> None:
    with pytest.raises(ValueError, match=f"num_steps is {num_steps!r}"):
        schedule.diffusers_sd3_grid(num_steps)
