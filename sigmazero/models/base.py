"""What a model family is: latents, conditions and one velocity. It knows nothing of roles, algorithms or engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sigmazero.records import Conditioning


class FlowModel(Protocol):
    """One family. Its network is seen through velocity alone (math §1)."""

    @property
    def family(self) -> str: ...

    @property
    def net(self) -> nn.Module:
        """The base network, as loaded."""
        ...

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        ...

    @property
    def guidance_norm(self) -> str:
        """``none``, ``layer_norm`` or ``scalar``."""
        ...

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the linear layers that an adapter covers by default."""
        ...

    def default_shift(self, num_steps: int) -> float:
        """The static shift that the family's own sampler has at its size and this number of steps."""
        ...

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Conditions of prompts, a row each; the empty prompt is the negative one of guidance."""
        ...

    def velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        """``v = eps - x0`` of rows ``x [b, *latent_shape]`` at ``sigma`` fp32 ``[b]``."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures fp32 ``[b, 3, H, W]`` in [0, 1], made where the latents lie."""
        ...

    def encode_pictures(self, pictures: Tensor) -> Tensor:
        """Latents of pictures in [0, 1]; the inverse of ``decode``."""
        ...

    def enable_activation_checkpointing(self, net: nn.Module, function: Any) -> None:
        """Runs each block of ``net`` through ``function(block, *inputs)``."""
        ...

    def metadata(self) -> Mapping[str, str]:
        """What a weight file must say to be loaded again, as strings."""
        ...


COMPUTE_DTYPE = "compute_dtype"  # attribute of a network whose sharding casts its masters


def compute_dtype(net: nn.Module) -> torch.dtype:
    """The precision that a network computes in: that of its weights, unless sharding casts fp32 masters to another."""
    return getattr(net, COMPUTE_DTYPE, next(net.parameters()).dtype)


GUIDANCE_NORMS = ("none", "layer_norm", "scalar")


def guide(positive: Tensor, negative: Tensor, scale: float, norm: str) -> Tensor:
    """Classifier-free guidance ``v_neg + w (v_pos - v_neg)`` and the family's norm (math §6; B41).

    Args:
        positive, negative: velocities ``[b, ...]``.
        scale: w; 1 is no guidance.
        norm: ``none``; ``layer_norm`` rescales to ``|v_pos|`` over a token's channels (the last dimension, or dim 1 of
            ``[b, C, H, W]``); ``scalar`` shrinks to at most ``|v_pos|``, a sample at a time.
    Returns: fp32 ``[b, ...]``.
    """
    positive, negative = positive.float(), negative.float()
    guided = negative + scale * (positive - negative)
    if norm == "none":
        return guided
    if norm == "layer_norm":
        over = 1 if positive.ndim == 4 else -1
        ratio = positive.norm(dim=over, keepdim=True) / guided.norm(dim=over, keepdim=True).clamp_min(1e-12)
        return guided * ratio
    if norm == "scalar":
        over = tuple(range(1, positive.ndim))
        size, guided_size = (torch.linalg.vector_norm(v, dim=over, keepdim=True) for v in (positive, guided))
        return guided * (size / guided_size.clamp_min(1e-12)).clamp_max(1)
    raise ValueError(f"guidance norm {norm!r} is unknown; known are {', '.join(GUIDANCE_NORMS)}")
