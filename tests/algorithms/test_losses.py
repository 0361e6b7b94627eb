"""Losses against their x0 forms, closed forms and autograd (math §6)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sigmazero import seeds
from sigmazero.algorithms.losses import distribution_gradient, surrogate_loss, velocity_loss
from sigmazero.schedule import column

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
