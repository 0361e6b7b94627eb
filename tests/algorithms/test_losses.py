"""Losses against golden numbers, their x0 forms, closed forms and autograd (math §4, §5, §6)."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmazero import seeds, transition
from sigmazero.algorithms.losses import (
    clipped_loss,
    distribution_gradient,
    dpo_loss,
    guard_log_ratio,
    nft_loss,
    surrogate_loss,
    velocity_loss,
)
from sigmazero.schedule import add_noise, column

ORACLE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "flow_rl.json").read_text())
SHAPE = (3, 4, 5)
D = 60
SIGMA = torch.tensor([0.02, 0.3, 0.75, 1.0])
X, EPS, V_TEACHER, V_FAKE = (seeds.normal(0, "score_noise", range(4), SHAPE, cycles=c) for c in range(4))


def x0_form(v_teacher: Tensor, v_fake: Tensor, x: Tensor, eps: Tensor, sigma: Tensor, normalizer: bool) -> Tensor:
    """``(x0_fake - x0_T) / max(mean |x - x0_T|, 1e-6)`` in float64, a row at a time."""
    rows = []
    for vt, vf, clean, noise, s in zip(*(t.double() for t in (v_teacher, v_fake, x, eps, sigma)), strict=True):
        noised = (1 - s) * clean + s * noise
        teacher, fake = noised - s * vt, noised - s * vf
        scale = (clean - teacher).abs().mean().clamp_min(1e-6) if normalizer else 1.0
        rows.append((fake - teacher) / scale)
    return torch.stack(rows).float()


@pytest.mark.parametrize("normalizer", [True, False])
def test_velocity_form_equals_x0_form(normalizer: bool) -> None:
    inputs = (V_TEACHER, V_FAKE, X, EPS, SIGMA, normalizer)
    torch.testing.assert_close(distribution_gradient(*inputs), x0_form(*inputs), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("error", [0.0, 1e-8, 1e-5, 1e-4])
def test_the_floor_of_the_normalizer_is_that_of_the_x0_form(error: float) -> None:
    zero = torch.zeros_like(X)
    inputs = (torch.full_like(X, error), V_FAKE, zero, zero, SIGMA, True)
    torch.testing.assert_close(distribution_gradient(*inputs), x0_form(*inputs), rtol=1e-5, atol=0)


def test_b40_a_row_at_the_teachers_prediction_leaves_the_others_alone() -> None:
    teacher = V_TEACHER.clone()
    teacher[0] = EPS[0] - X[0]
    both = distribution_gradient(teacher[:2], V_FAKE[:2], X[:2], EPS[:2], SIGMA[:2])
    alone = distribution_gradient(teacher[1:2], V_FAKE[1:2], X[1:2], EPS[1:2], SIGMA[1:2])
    assert both.isfinite().all()
    torch.testing.assert_close(both[0], SIGMA[0] * (teacher[0] - V_FAKE[0]) / 1e-6)
    assert torch.equal(both[1:], alone)


def test_b40_a_nan_of_one_row_stays_there_and_is_not_hidden() -> None:
    fake = V_FAKE.clone()
    fake[2, 0, 0, 0] = torch.nan
    gradient = distribution_gradient(V_TEACHER, fake, X, EPS, SIGMA)
    assert gradient.isnan().nonzero().tolist() == [[2, 0, 0, 0]]


@pytest.mark.parametrize("normalizer", [True, False])
def test_a_fake_score_that_equals_the_teacher_gives_no_gradient(normalizer: bool) -> None:
    gradient = distribution_gradient(V_TEACHER, V_TEACHER, X, EPS, SIGMA, normalizer)
    assert torch.equal(gradient, torch.zeros_like(X))


def test_descent_moves_the_sample_from_the_fakes_prediction_to_the_teachers() -> None:
    gradient = distribution_gradient(V_TEACHER, V_FAKE, X, EPS, SIGMA, normalizer=False)
    noised = (1 - column(SIGMA, X)) * X + column(SIGMA, X) * EPS
    teacher, fake = (noised - column(SIGMA, X) * v for v in (V_TEACHER, V_FAKE))
    torch.testing.assert_close(fake - gradient, teacher, rtol=1e-5, atol=1e-5)


def test_the_direction_survives_bf16_networks_at_low_sigma() -> None:
    x, eps, teacher = (seeds.normal(1, "score_noise", [0], (20_000,), cycles=c) for c in range(3))
    fake = teacher + 0.2 * seeds.normal(1, "fake_noise", [0], (20_000,))
    sigma = torch.tensor([0.001])
    gradient = distribution_gradient(teacher.bfloat16(), fake.bfloat16(), x, eps, sigma)
    truth = distribution_gradient(teacher, fake, x, eps, sigma)
    rounded = [(x - sigma * v).bfloat16() for v in (teacher, fake)]
    assert torch.cosine_similarity(gradient, truth).item() > 0.999
    assert torch.cosine_similarity(rounded[1].float() - rounded[0].float(), truth).item() < 0.5


def slope(loss: Callable[[Tensor], Tensor]) -> Tensor:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x).sum(), x)
    return gradient


def test_gradient_of_the_surrogate_is_that_of_the_published_loss() -> None:
    g = distribution_gradient(V_TEACHER, V_FAKE, X, EPS, SIGMA)
    published = slope(lambda x: 0.5 * ((x - (x - g).detach()) ** 2).mean((1, 2, 3)))
    torch.testing.assert_close(slope(lambda x: surrogate_loss(x, g)), g / D, rtol=1e-6, atol=0)
    torch.testing.assert_close(slope(lambda x: surrogate_loss(x, g)), published, rtol=1e-4, atol=1e-7)


def test_the_surrogate_sends_nothing_through_its_gradient() -> None:
    factor = torch.tensor(2.0, requires_grad=True)
    loss = surrogate_loss(X.clone().requires_grad_(), factor * V_FAKE).sum()
    (through,) = torch.autograd.grad(loss, factor, allow_unused=True)
    assert through is None


def test_velocity_loss_is_a_rows_mean_square_against_noise_minus_sample() -> None:
    expected = [sum(e**2 for e in row.flatten().tolist()) / D for row in V_FAKE.double() - (EPS - X).double()]
    torch.testing.assert_close(velocity_loss(V_FAKE, X, EPS), torch.tensor(expected), rtol=1e-6, atol=0)
    assert velocity_loss(EPS - X, X, EPS).tolist() == [0] * 4


def test_velocity_loss_has_a_gradient_on_the_network_alone() -> None:
    v, x0, eps = (t.clone().requires_grad_() for t in (V_FAKE, X, EPS))
    on_v, on_x0, on_eps = torch.autograd.grad(velocity_loss(v, x0, eps).sum(), (v, x0, eps), allow_unused=True)
    torch.testing.assert_close(on_v, 2 * (V_FAKE - (EPS - X)) / D, rtol=1e-5, atol=1e-8)
    assert on_x0 is None
    assert on_eps is None


def test_golden_clipped_loss() -> None:
    """The reference clamps its advantages to +-5 first, as ``advantages`` does here."""
    golden = ORACLE["grpo_loss"]
    loss, clipped = clipped_loss(torch.tensor(golden["adv"]).clamp(-5, 5), torch.tensor(golden["logp"]), golden["eps"])
    torch.testing.assert_close(loss.mean().item(), golden["loss"], rtol=1e-5, atol=0)
    assert clipped.mean().item() == golden["clipfrac"]


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "slope_of_ratio"),
    [(2.0, 0.2, 0), (2.0, -0.2, -2), (-2.0, 0.2, 2), (-2.0, -0.2, 0), (2.0, 0.05, -2), (-2.0, -0.05, 2), (0.0, 0.0, 0)],
)
def test_clipping_stops_the_gradient_on_the_far_side_alone(
    advantage: float, log_ratio: float, slope_of_ratio: float
) -> None:
    given = torch.tensor([log_ratio], requires_grad=True)
    loss, clipped = clipped_loss(torch.tensor([advantage]), given, 0.1)
    (gradient,) = torch.autograd.grad(loss.sum(), given)
    assert gradient.item() == pytest.approx(slope_of_ratio * math.exp(log_ratio))
    assert clipped.item() == (abs(log_ratio) > 0.1)


def test_b14_on_policy_the_gradient_is_the_advantage_and_nothing_is_clipped() -> None:
    advantage, new = torch.tensor([1.5, -0.5, 0.0]), torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
    loss, clipped = clipped_loss(advantage, new - new.detach(), 1e-5)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert gradient.tolist() == (-advantage).tolist()
    assert clipped.tolist() == [0, 0, 0]


STD = torch.tensor([0.1, 0.4, 0.7, 2.0])


def test_guard_log_ratio_is_the_mean_of_noise_times_the_shift_of_the_mean() -> None:
    """Of each row: its noise is rebuilt from the latent that was stored."""
    noise, old, new = X, EPS, EPS + 0.01 * V_FAKE
    found = guard_log_ratio(old + column(STD, old) * noise, new, old, STD)
    by_hand = [sum(a * b for a, b in zip(z.tolist(), d.tolist(), strict=True)) / D for z, d in zip(
        noise.double().flatten(1), (new - old).double().flatten(1), strict=True
    )]  # fmt: skip
    torch.testing.assert_close(found, torch.tensor(by_hand), rtol=1e-4, atol=1e-7)


def test_guard_log_ratio_of_a_row_does_not_depend_on_the_others() -> None:
    """The reference takes its mean over the whole batch."""
    y, old, new = EPS + X, EPS, EPS + V_FAKE
    whole = guard_log_ratio(y, new, old, STD)
    assert len({round(value, 3) for value in whole.tolist()}) == 4
    for rows in ([0], [3, 1], [2, 2, 0]):
        assert torch.equal(guard_log_ratio(y[rows], new[rows], old[rows], STD[rows]), whole[rows])


def test_guards_gradient_on_policy_is_that_of_the_log_prob_times_the_std() -> None:
    mean = EPS.clone().requires_grad_()
    (guard,) = torch.autograd.grad(guard_log_ratio(EPS + X, mean, mean.detach(), STD).sum(), mean)
    (plain,) = torch.autograd.grad(transition.log_prob(EPS + X, mean, STD).sum(), mean)
    torch.testing.assert_close(guard, plain * column(STD, mean), rtol=1e-5, atol=1e-8)


def test_golden_nft() -> None:
    golden = ORACLE["nft/beta1.0"]
    k = torch.arange(128, dtype=torch.float64).reshape(2, 4, 4, 4)
    x0, eps, old = (wave.float() for wave in ((0.37 * k).sin(), (0.91 * k + 1).sin(), (0.53 * k).cos()))
    v = (old + 0.05 * (1.7 * k).sin().float()).requires_grad_()
    sigma, advantage = torch.tensor([0.9, 0.3]), torch.tensor([2.0, -1.0])
    out = nft_loss(v, old, add_noise(x0, eps, sigma), x0, sigma, advantage, beta=1.0, c=5.0)
    loss = out["loss"].mean()
    (gradient,) = torch.autograd.grad(loss, v)
    found = {
        "r": out["reward_weight"].tolist(), "pos": out["positive"].tolist(), "neg": out["negative"].tolist(),
        "loss": loss.item(), "grad_norm": gradient.norm().item(), "grad0": gradient[0, 0, 0, 0].item(),
    }  # fmt: skip
    assert found.keys() == golden.keys()
    for name, value in golden.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def nft_gradient(v: Tensor, advantage: Tensor, beta: float, c: float = 5.0, old: Tensor | None = None) -> Tensor:
    """On the velocity; at the old policy unless another is given."""
    policy, noised = v.clone().requires_grad_(), add_noise(X, EPS, SIGMA)
    out = nft_loss(policy, v if old is None else old, noised, X, SIGMA, advantage, beta, c)
    return torch.autograd.grad(out["loss"].sum(), policy)[0]


def weighted_matching(v: Tensor, advantage: Tensor) -> Tensor:
    """``A * d/dv of mean_D (x0_hat - x0)^2 / w``, w the row's own mean error: in float64, by hand."""
    error = column(SIGMA, X).double() * (v.double() - (EPS - X).double())  # = x0 - x0_hat
    w = error.abs().mean((1, 2, 3)).clamp_min(1e-5)
    return (column(advantage.double() / w, X) * 2 * error * column(SIGMA, X).double() / D).float()


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
def test_at_the_old_policy_nft_is_flow_matching_times_the_advantage_for_every_beta(beta: float) -> None:
    advantage = torch.tensor([2.0, -1.0, 0.3, 4.9])
    found = nft_gradient(V_FAKE, advantage, beta)
    torch.testing.assert_close(found, weighted_matching(V_FAKE, advantage), rtol=1e-4, atol=1e-6)


def test_away_from_the_old_policy_beta_matters() -> None:
    advantage = torch.tensor([2.0, -1.0, 0.3, 4.9])
    found = [nft_gradient(V_FAKE, advantage, beta, old=V_TEACHER) for beta in (0.1, 1.0)]
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_b38_reward_weight_one_half_teaches_nothing_and_one_is_plain_flow_matching() -> None:
    half, one = torch.zeros(4), torch.full((4,), 5.0)
    assert not nft_gradient(V_FAKE, half, 1.0).any()
    assert nft_gradient(V_FAKE, half, 0.3).abs().max() < 1e-6
    torch.testing.assert_close(
        nft_gradient(V_FAKE, one, 1.0) / 5, weighted_matching(V_FAKE, torch.ones(4)), rtol=1e-4, atol=1e-6
    )


def test_b38_the_branches_coincide_at_the_old_policy_and_r_is_clipped() -> None:
    advantage = torch.tensor([-9.0, 0.0, 2.5, 9.0])
    out = nft_loss(V_FAKE, V_FAKE, add_noise(X, EPS, SIGMA), X, SIGMA, advantage, 1.0, 5.0)
    assert torch.equal(out["positive"], out["negative"])
    assert out["reward_weight"].tolist() == [0, 0.5, 0.75, 1]


def test_nft_sends_nothing_through_the_old_policy_nor_its_divisors() -> None:
    v, old = V_FAKE.clone().requires_grad_(), V_TEACHER.clone().requires_grad_()
    out = nft_loss(v, old, add_noise(X, EPS, SIGMA), X, SIGMA, torch.ones(4), 1.0, 5.0)
    on_v, on_old = torch.autograd.grad(out["positive"].sum(), (v, old), allow_unused=True)
    assert on_old is None
    torch.testing.assert_close(on_v, weighted_matching(V_FAKE, torch.ones(4)), rtol=1e-4, atol=1e-6)


def test_nft_of_a_row_does_not_depend_on_the_others_and_a_perfect_one_is_finite() -> None:
    v, advantage = V_FAKE.clone(), torch.tensor([2.0, -1.0, 0.3, 4.9])
    v[1] = EPS[1] - X[1]
    whole = nft_gradient(v, advantage, 1.0)
    assert whole.isfinite().all()
    policy = v[2:3].clone().requires_grad_()
    noised = add_noise(X, EPS, SIGMA)[2:3]
    alone = nft_loss(policy, v[2:3], noised, X[2:3], SIGMA[2:3], advantage[2:3], 1.0, 5.0)
    assert torch.equal(torch.autograd.grad(alone["loss"].sum(), policy)[0], whole[2:3])


def test_dpo_loss_by_hand() -> None:
    best, worst = torch.tensor([0.01, -0.02, 0.0]), torch.tensor([-0.02, 0.01, 0.0])
    expected = [math.log(1 + math.exp(3.0)), math.log(1 + math.exp(-3.0)), math.log(2)]
    assert dpo_loss(best, worst, 100.0).tolist() == pytest.approx(expected, rel=1e-5)


def test_descent_on_dpo_lowers_the_error_on_the_best_and_raises_that_on_the_worst() -> None:
    best, worst = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    on_best, on_worst = torch.autograd.grad(dpo_loss(best, worst, 100.0).sum(), (best, worst))
    assert (on_best.item(), on_worst.item()) == (50, -50)
