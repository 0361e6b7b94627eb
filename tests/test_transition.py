"""One transition and its log-probability against golden numbers and closed forms (math §3)."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from sigmazero import seeds, transition
from sigmazero.schedule import column, sigma_grid

ORACLE: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "flow_rl.json").read_text())
TABLE = torch.tensor(ORACLE["sigmas"])
K = torch.arange(128, dtype=torch.float64).reshape(2, 4, 4, 4)
X, V, Y = (wave.float() for wave in ((0.37 * K).sin(), (0.53 * K).cos(), (0.91 * K + 1).sin()))
LOG_2PI = math.log(2 * math.pi)
STOCHASTIC = ("sde", "dance", "cps")


def table_step(kind: str, eta: float, i: int, v: Tensor = V, grid: Tensor = TABLE) -> tuple[Tensor, Tensor]:
    """Moments of step ``i`` of a grid, for the waves."""
    now, after, guard = (grid[k].expand(len(X)) for k in (i, i + 1, 1))
    return transition.moments(kind, eta, X, v, now, after, guard)


def close(actual: Tensor, expected: Any, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=rtol, atol=atol)


@pytest.mark.parametrize(("kind", "i"), [("sde", 0), ("sde", 4), ("sde", 9), ("cps", 0), ("cps", 4)])
def test_golden_moments_and_log_probs(kind: str, i: int) -> None:
    expected = ORACLE[f"{kind}/step{i}/eta.7"]
    mean, std = table_step(kind, 0.7, i)
    score = transition.log_prob_no_constants if kind == "cps" else transition.log_prob
    close(mean.double().sum(), expected["mean_sum"])
    close(mean[0, 0, 0, 0], expected["mean0"])
    close(std, [expected["std"]] * 2)
    close(score(Y, mean, std), expected["logp"])


def test_golden_dance_log_prob() -> None:
    mean, std = table_step("dance", 0.3, 4)
    close(
        transition.log_prob(Y, mean, std) + std.log() + LOG_2PI / 2,
        ORACLE["dance/step4/eta.3"]["logp_without_constants"],
    )
    close((X - TABLE[4] * V).double().sum(), ORACLE["dance/step4/eta.3"]["x0_sum"])


@pytest.mark.parametrize("kind", transition.KINDS)
@pytest.mark.parametrize("i", range(10))
def test_b34_eta_zero_is_euler_bit_for_bit(kind: str, i: int) -> None:
    mean, std = table_step(kind, 0.0, i)
    assert torch.equal(mean, X + (TABLE[i + 1] - TABLE[i]) * V)
    assert torch.equal(std, torch.zeros(2))


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize("i", range(9))
def test_b34_a_tiny_eta_is_euler_to_rounding(kind: str, i: int) -> None:
    mean, std = table_step(kind, 1e-5, i)
    close(mean, X + (TABLE[i + 1] - TABLE[i]) * V, atol=1e-6)
    assert 0 < std.max() < 1e-4


@pytest.mark.parametrize("i", range(10))
def test_cps_with_eta_one_draws_the_noise_afresh(i: int) -> None:
    mean, std = table_step("cps", 1.0, i)
    close(mean, (1 - TABLE[i + 1]) * (X - TABLE[i] * V), atol=1e-6)
    assert std.tolist() == [TABLE[i + 1].item()] * 2


@pytest.mark.parametrize(("kind", "eta"), [("ode", 0.7), ("cps", 0.7), ("cps", 1.0)])
def test_the_last_step_returns_the_predicted_sample_exactly(kind: str, eta: float) -> None:
    mean, std = table_step(kind, eta, 9)
    assert torch.equal(mean, X - TABLE[9] * V)
    assert torch.equal(std, torch.zeros(2))


@pytest.mark.parametrize("eta", [0.3, 0.7, 1.2])
@pytest.mark.parametrize("grid", [TABLE, sigma_grid(4, 3.0), sigma_grid(2), sigma_grid(1)])
def test_first_sde_step_has_std_eta(eta: float, grid: Tensor) -> None:
    close(table_step("sde", eta, 0, grid=grid)[1], [eta] * 2)


def test_b34_sde_levels_with_the_guard_at_sigma_one() -> None:
    grid = torch.tensor([1, 0.9, 0.75, 0.5, 0])
    levels = [(table_step("sde", 0.7, i, grid=grid)[1] / (grid[i] - grid[i + 1]).sqrt())[0] for i in range(4)]
    close(torch.stack(levels), [2.2136, 2.1, 1.2124, 0.7], atol=5e-5)


def test_dance_std_is_eta_times_the_root_of_the_step() -> None:
    close(torch.stack([table_step("dance", 0.3, i)[1][0] for i in range(10)]), 0.3 * (TABLE[:-1] - TABLE[1:]).sqrt())


def test_each_row_follows_its_own_sigmas() -> None:
    now, after = torch.tensor([1.0, 0.5]), torch.tensor([0.75, 0.25])
    both = transition.moments("sde", 0.7, X, V, now, after, torch.tensor([0.75, 0.9]))
    for row, guard in enumerate((0.75, 0.9)):
        part = slice(row, row + 1)
        alone = transition.moments("sde", 0.7, X[part], V[part], now[part], after[part], torch.tensor([guard]))
        assert torch.equal(both[0][part], alone[0])
        assert torch.equal(both[1][part], alone[1])


def test_half_precision_inputs_are_computed_in_fp32() -> None:
    half = transition.moments("sde", 0.7, X.bfloat16(), V.bfloat16(), TABLE[[4, 4]], TABLE[[5, 5]], TABLE[[1, 1]])
    full = transition.moments(
        "sde", 0.7, X.bfloat16().float(), V.bfloat16().float(), TABLE[[4, 4]], TABLE[[5, 5]], TABLE[[1, 1]]
    )
    assert torch.equal(half[0], full[0])


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_log_prob_is_the_mean_of_a_normal_density(kind: str) -> None:
    mean, std = table_step(kind, 0.7, 5)
    close(transition.log_prob(Y, mean, std), Normal(mean, column(std, mean)).log_prob(Y).mean((1, 2, 3)))


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 64, 64)])
def test_b16_the_ratio_does_not_grow_with_resolution(shape: tuple[int, ...]) -> None:
    y, std = torch.zeros(1, *shape), torch.ones(1)
    moved = torch.full_like(y, math.sqrt(2e-4))
    difference = transition.log_prob(y, y, std) - transition.log_prob(y, moved, std)
    assert difference.exp().item() == pytest.approx(1.0001, abs=5e-7)


def test_b34_a_step_without_noise_has_no_log_prob() -> None:
    mean, std = torch.stack([X[0], Y[1]]), torch.tensor([0.0, 0.5])
    for score in (transition.log_prob, transition.log_prob_no_constants):
        both = score(torch.stack([X[0], X[1]]), mean, std)
        assert math.isnan(both[0])
        assert both[1] == score(X[1:], mean[1:], std[1:])[0]
        assert math.isfinite(both[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_rounded_once_to_the_storage_dtype(dtype: torch.dtype) -> None:
    mean, std = table_step("sde", 0.7, 4)
    y = transition.step(mean, std, Y, dtype)
    assert torch.equal(y, (mean + std.view(2, 1, 1, 1) * Y).to(dtype))
    assert torch.equal(transition.step(mean, std, None, dtype), mean.to(dtype))
    density = Normal(mean.double(), column(std.double(), mean)).log_prob(y.double())
    close(transition.log_prob(y, mean, std), density.mean((1, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_expected_log_prob_of_a_sampled_step(kind: str) -> None:
    noise = seeds.normal(0, "step_noise", [0, 1], (300_000,))
    x, v = (torch.sin(f * torch.arange(600_000.0)).reshape(2, -1) for f in (0.37, 0.53))
    mean, std = transition.moments(kind, 0.7, x, v, TABLE[[2, 6]], TABLE[[3, 7]], TABLE[[1, 1]])
    score = transition.log_prob(transition.step(mean, std, noise, torch.float32), mean, std)
    close(score, -0.5 - std.log() - LOG_2PI / 2, rtol=0, atol=4 / math.sqrt(2 * 300_000))


def mean_per_velocity(kind: str, eta: float, now: float, after: float) -> float:
    """d mu / d v, by hand from the table of math §3; ``now`` is below 1."""
    dt = after - now
    if kind == "cps":
        return -(1 - after) * now + after * math.cos(eta * math.pi / 2) * (1 - now)
    level = eta if kind == "dance" else eta * math.sqrt(now / (1 - now))
    return (1 + level**2 * (1 - now) / (2 * now)) * dt


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_gradient_of_the_log_prob_is_its_closed_form(kind: str) -> None:
    v = V.clone().requires_grad_()
    mean, std = table_step(kind, 0.7, 4, v)
    (gradient,) = torch.autograd.grad(transition.log_prob(Y, mean, std).sum(), v)
    slope = mean_per_velocity(kind, 0.7, TABLE[4].item(), TABLE[5].item())
    close(gradient, (Y - mean.detach()) * slope / (64 * std.detach().view(2, 1, 1, 1) ** 2), atol=1e-8)


def final_variance(kind: str, data_variance: float) -> float:
    """Variance of an element after the table's ten steps, for N(0, data_variance) as data.

    The exact velocity is linear in x, and so is a step's mean: the variance has an exact recursion.
    """
    variance = 1.0
    for i in range(10):
        now, after = TABLE[i : i + 1], TABLE[i + 1 : i + 2]
        noised = (1 - now) ** 2 * data_variance + now**2
        v = (now - (1 - now) * data_variance) / noised
        factor, std = transition.moments(kind, 0.7, torch.ones(1, 1), v[:, None], now, after, TABLE[1:2])
        variance = factor.item() ** 2 * variance + std.item() ** 2
    return variance


@pytest.mark.parametrize(("kind", "residual"), [("sde", 0.0618), ("cps", 0.0), ("ode", 0.0)])
def test_residual_noise_on_a_point_mass(kind: str, residual: float) -> None:
    assert math.sqrt(final_variance(kind, 0.0)) == pytest.approx(residual, abs=5e-5)


def test_variance_of_normal_data_under_cps() -> None:
    assert final_variance("cps", 1.0) == pytest.approx(0.50, abs=0.005)


@pytest.mark.parametrize(
    ("kind", "eta", "complaint"),
    [
        ("heun", 0.5, "'heun' is unknown; known are ode, sde, dance, cps"),
        ("sde", -0.1, "eta is -0.1"),
        ("ode", -0.1, "eta is -0.1"),
        ("dance", math.nan, "eta is nan"),
        ("sde", math.inf, "eta is inf"),
        ("cps", 1.01, r"eta is 1.01; with 'cps' it lies in \[0, 1\]"),
    ],
)
def test_an_unknown_kind_or_an_eta_out_of_range_is_refused(kind: str, eta: float, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        table_step(kind, eta, 1)


def test_b34_a_step_without_noise_leaves_the_gradient_of_its_neighbour_finite() -> None:
    factor = torch.tensor(1.0, requires_grad=True)
    x = torch.ones(2, 3)
    now, after, guard = torch.tensor([0.5, 0.5]), torch.tensor([0.0, 0.2]), torch.full((2,), 0.9)
    mean, std = transition.moments("cps", 0.7, x, factor * x, now, after, guard)
    (gradient,) = torch.autograd.grad(transition.log_prob(2 * x, mean, std)[1], factor)
    assert gradient.isfinite()


def test_b37_kl_is_that_of_two_normals_as_a_mean_over_elements() -> None:
    mean, std = table_step("sde", 0.7, 4)
    wanted = kl_divergence(Normal(mean, column(std, mean)), Normal(Y, column(std, mean))).mean((1, 2, 3))
    close(transition.gaussian_kl(mean, Y, std), wanted)


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 64, 64)])
def test_b37_kl_of_a_known_shift_by_hand_at_any_resolution(shape: tuple[int, ...]) -> None:
    std = torch.tensor([0.2, 0.5])
    mean = torch.zeros(2, *shape)
    close(transition.gaussian_kl(mean + 0.3, mean, std), [0.3**2 / (2 * 0.2**2), 0.3**2 / (2 * 0.5**2)])
    assert transition.gaussian_kl(mean, mean, std).tolist() == [0, 0]


def test_b34_a_step_without_noise_has_no_kl_and_leaves_its_neighbours_gradient_alone() -> None:
    mean = X.clone().requires_grad_()
    kl = transition.gaussian_kl(mean, Y, torch.tensor([0.0, 0.5]))
    assert kl.isnan().tolist() == [True, False]
    (gradient,) = torch.autograd.grad(kl[1], mean)
    close(gradient[1], (X - Y)[1] / (64 * 0.25))
    assert gradient.isfinite().all()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(transition, "_KERNELS", {})


def halfway(
    eta: float, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_guard: Tensor
) -> tuple[Tensor, Tensor]:
    return x / 2 + column(sigma_guard, x) * v, eta * (sigma - sigma_next)


@pytest.mark.usefixtures("kernels")
def test_a_registered_kernel_is_a_kind_with_its_arguments_in_fp32() -> None:
    with pytest.raises(ValueError, match=r"'halfway' is unknown; known are ode, sde, dance, cps$"):
        table_step("halfway", 0.5, 4)
    transition.register_kernel("halfway", halfway)
    mean, std = table_step("halfway", 0.5, 4, V.bfloat16())
    assert torch.equal(mean, X / 2 + TABLE[1] * V.bfloat16().float())
    assert torch.equal(std, (0.5 * (TABLE[4] - TABLE[5])).expand(2))
    assert table_step("halfway", 0.0, 4)[1].tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"'other' is unknown; known are ode, sde, dance, cps, halfway$"):
        table_step("other", 0.5, 4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", transition.KINDS)
def test_a_built_in_kind_cannot_be_replaced(kind: str) -> None:
    with pytest.raises(ValueError, match=f"'{kind}' is built in; give the kernel another name"):
        transition.register_kernel(kind, halfway)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (lambda *a: 1 / 0, "'mine' fails: division by zero"),
        (lambda a: a, "'mine' fails: .*positional argument"),
        (lambda *a: a[1], "'mine' must return a finite mean|'mine' fails"),
        (lambda *a: None, "'mine' fails"),
        (lambda *a: (a[1][:1], a[3]), "'mine' must return a finite mean"),
        (lambda *a: (a[1], a[1]), r"'mine' must return .* a finite std \[b\] of at least 0"),
        (lambda *a: (a[1], 0.5), "'mine' fails"),
        (lambda *a: (a[1], -a[3]), "'mine' must return"),
        (lambda *a: (a[1], a[3] / 0), "'mine' must return"),
        (lambda *a: (a[1] * math.nan, a[3]), "'mine' must return a finite mean"),
        (lambda *a: (a[1], a[3] * math.nan), "'mine' must return"),
        (lambda *a: (a[1], (a[3] / (1 - a[3])).sqrt()), "'mine' must return"),
        (lambda *a: (a[1].add_(a[2]), a[3] / 2), "'mine' writes into what it is given"),
        (lambda *a: (a[1], a[3].mul_(0.5)), "'mine' writes into what it is given"),
    ],
)
def test_b34_a_kernel_that_cannot_work_is_refused_and_not_kept(kernel: Any, complaint: str) -> None:
    """The last but two is inf at sigma 1; the last two would change what the run keeps."""
    with pytest.raises(ValueError, match=complaint):
        transition.register_kernel("mine", kernel)
    with pytest.raises(ValueError, match="'mine' is unknown"):
        transition.check_kind("mine", 0.5)
