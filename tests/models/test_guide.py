"""Classifier-free guidance and its norms against plain loops (math §6; B41)."""

import math

import pytest
import torch
from torch import Tensor

from sigmazero.models.base import GUIDANCE_NORMS, guide

WAVE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float64)
POSITIVE, NEGATIVE = (torch.sin(f * WAVE).float().reshape(2, 3, 4, 5) for f in (0.7, 1.3))


def size(values: list[float]) -> float:
    return math.sqrt(sum(v * v for v in values))


def layer_norm_by_loops(positive: Tensor, guided: Tensor) -> Tensor:
    """Of tokens ``[b, t, c]``: each token gets the length of its positive one."""
    result = guided.clone()
    for b in range(len(guided)):
        for t in range(guided.shape[1]):
            factor = size(positive[b, t].tolist()) / max(size(guided[b, t].tolist()), 1e-12)
            result[b, t] = guided[b, t] * factor
    return result


def scalar_by_loops(positive: Tensor, guided: Tensor) -> Tensor:
    rows = zip(positive, guided, strict=True)
    return torch.stack([g * min(1, size(p.flatten().tolist()) / size(g.flatten().tolist())) for p, g in rows])


def test_b41_numbers_of_the_standard_form() -> None:
    assert guide(torch.ones(1, 1), torch.full((1, 1), 0.2), 4.0, "none").item() == pytest.approx(3.4)


@pytest.mark.parametrize("norm", GUIDANCE_NORMS)
def test_b41_scale_one_is_the_positive_velocity(norm: str) -> None:
    torch.testing.assert_close(guide(POSITIVE, NEGATIVE, 1.0, norm), POSITIVE, rtol=1e-5, atol=1e-6)


def test_scale_zero_is_the_negative_velocity() -> None:
    assert torch.equal(guide(POSITIVE, NEGATIVE, 0.0, "none"), NEGATIVE)


@pytest.mark.parametrize("scale", [0.5, 2.0, 4.0])
def test_layer_norm_is_over_the_channels_of_a_picture(scale: float) -> None:
    guided = NEGATIVE + scale * (POSITIVE - NEGATIVE)
    tokens = [v.flatten(2).transpose(1, 2) for v in (POSITIVE, guided)]
    expected = layer_norm_by_loops(*tokens).transpose(1, 2).reshape(POSITIVE.shape)
    torch.testing.assert_close(guide(POSITIVE, NEGATIVE, scale, "layer_norm"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.5, 2.0, 4.0])
def test_layer_norm_is_over_the_channels_of_packed_tokens(scale: float) -> None:
    positive, negative = POSITIVE.reshape(2, 12, 5), NEGATIVE.reshape(2, 12, 5)
    expected = layer_norm_by_loops(positive, negative + scale * (positive - negative))
    torch.testing.assert_close(guide(positive, negative, scale, "layer_norm"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 12, 5)])
@pytest.mark.parametrize("scale", [0.5, 2.0, 4.0])
def test_scalar_norm_is_a_samples_own(shape: tuple[int, ...], scale: float) -> None:
    positive, negative = POSITIVE.reshape(shape), NEGATIVE.reshape(shape)
    expected = scalar_by_loops(positive, negative + scale * (positive - negative))
    torch.testing.assert_close(guide(positive, negative, scale, "scalar"), expected, rtol=1e-5, atol=1e-6)


def test_scalar_norm_only_shrinks() -> None:
    short = guide(2 * NEGATIVE, NEGATIVE, 0.5, "scalar")  # 1.5 times the negative, shorter than the positive
    torch.testing.assert_close(short, 1.5 * NEGATIVE)
    long = guide(2 * NEGATIVE, NEGATIVE, 3.0, "scalar")
    torch.testing.assert_close(long, 2 * NEGATIVE)


@pytest.mark.parametrize("norm", ["layer_norm", "scalar"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 16, 3)])
def test_zero_vectors_stay_zero(norm: str, shape: tuple[int, ...]) -> None:
    zero, one = torch.zeros(shape), torch.ones(shape)
    assert torch.equal(guide(zero, zero, 4.0, norm), zero)
    assert torch.equal(guide(zero, one, 4.0, norm), zero)
    assert torch.equal(guide(one, 2 * one, 2.0, norm), zero)  # 2 + 2 * (1 - 2) is 0


@pytest.mark.parametrize("norm", GUIDANCE_NORMS)
def test_half_precision_velocities_are_guided_in_fp32(norm: str) -> None:
    positive, negative = POSITIVE.bfloat16(), NEGATIVE.bfloat16()
    guided = guide(positive, negative, 4.0, norm)
    assert guided.dtype == torch.float32
    assert torch.equal(guided, guide(positive.float(), negative.float(), 4.0, norm))


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="'batch' is unknown; known are none, layer_norm, scalar"):
        guide(POSITIVE, NEGATIVE, 2.0, "batch")
