"""Learning-rate schedules in closed form; optimizer state that comes back exactly."""

from __future__ import annotations

import math

import pytest
import torch

from sigmazero.config import OptimizerConfig
from sigmazero.training.state import RoleOptimizer, learning_rate


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, *((1 + math.cos(math.pi * i / 4)) / 2 for i in range(4))]),
    ],
)
def test_learning_rates(decay: str, expected: list[float]) -> None:
    config = OptimizerConfig.model_validate({"lr": 1.0, "warmup_steps": 2, "decay": decay})
    assert [learning_rate(config, i, 6) for i in range(6)] == pytest.approx(expected)


def optimizer(weight: torch.Tensor, **settings: object) -> RoleOptimizer:
    config = OptimizerConfig.model_validate({"lr": 0.1, **settings})
    return RoleOptimizer("student", {"w": weight}, config, 10)


@pytest.mark.parametrize("clip", [2.5, 5.0, 7.0])
def test_step_is_adamw_on_the_clipped_gradient(clip: float) -> None:
    """Against torch's own optimizer fed gradients scaled by hand: of norms 5, 50 and .5, for Adam does not see one
    scale that stays."""
    weight, other = (torch.tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
    ours = optimizer(weight, clip=clip, weight_decay=0.1)
    theirs = torch.optim.AdamW([other], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    for size in (1, 10, 0.1):
        weight.grad = size * torch.tensor([3.0, 4.0])
        other.grad = weight.grad * min(1, clip / (5 * size))
        assert ours.gradient_norm().item() == pytest.approx(5 * size)
        ours.step(float(ours.gradient_norm()))
        theirs.step()
    torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)


def test_b12_resumed_optimizer_goes_on_bit_for_bit() -> None:
    def steps(count: int, stop_at: int | None) -> torch.Tensor:
        weight = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
        ours = optimizer(weight, decay="linear")
        for i in range(count):
            if i == stop_at:
                state, done, value = ours.state(), ours.steps, weight.detach().clone()
                weight = value.requires_grad_()
                ours = optimizer(weight, decay="linear")
                room = ours.room(state, done)
                assert room.keys() == state.keys()
                for key, moment in room.items():
                    moment.copy_(state[key])
                ours.load(room, done)
            weight.grad = torch.sin(weight.detach() + i)
            ours.step(float(ours.gradient_norm()))
        return weight.detach()

    assert torch.equal(steps(6, None), steps(6, 3))


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        ([], 3),
        (["w/step", "w/exp_avg", "w/exp_avg_sq", "x/idle"], 3),
        (["w/step", "w/exp_avg"], 3),
        (["w/step", "w/exp_avg", "w/exp_avg_sq", "w/idle"], 3),
        (["w/idle"], 0),
    ],
)
def test_b11_missing_or_unknown_moments_are_refused(names: list[str], steps: int) -> None:
    ours = optimizer(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="optimizer of student: moments do not match"):
        ours.room(names, steps)


def test_b29_a_role_without_trainable_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        optimizer(torch.ones(2))


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizers\.student\.warmup_steps is 10, but the run has only 10 steps"):
        optimizer(torch.ones(2, requires_grad=True), warmup_steps=10)
