"""The kernel that a network's attention runs on: one of diffusers' backends, tried here before it is used."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from torch import Tensor, nn

from sigmazero.models.folder import one_line

BACKENDS = tuple(name.value for name in AttentionBackendName)


def use_backend(net: nn.Module, backend: str, dtypes: Sequence[torch.dtype], *, masked: bool) -> None:
    """Computes the attention of a diffusers network, and of copies made of it afterwards, with ``backend``.

    A backend that cannot train, or that leaves a mask out without a word, is found by comparing its results and
    gradients with those of ``native`` on a few numbers (B09). Other networks of the process keep theirs: diffusers'
    own ``set_attention_backend`` would also change every network that has chosen none.

    Args:
        net: on its device; its attention processors must go through diffusers' dispatcher.
        dtypes: the precisions that it, or copies of it, will compute in.
        masked: whether its attention is given masks.
    Raises:
        ValueError: the backend is unknown, or does not work here. It names those that do.
    """
    config: Any = net.config
    device, width = next(net.parameters()).device, config["attention_head_dim"]
    problem = _problem(backend, device, width, dtypes, masked)
    if problem:
        usable = [name for name in BACKENDS if not _problem(name, device, width, dtypes, masked)]
        raise ValueError(f"model.attention is {backend!r}, which {problem}; usable here are {', '.join(usable)}")
    processors: list[Any] = [module.processor for module in net.modules() if hasattr(module, "processor")]
    assert processors, "the network has no attention processor"
    for processor in processors:
        assert hasattr(processor, "_attention_backend"), f"{type(processor).__name__} chooses no backend"
        processor._attention_backend = AttentionBackendName(backend)


def _problem(backend: str, device: torch.device, width: int, dtypes: Sequence[torch.dtype], masked: bool) -> str | None:
    """Why a backend cannot be used, or None."""
    if backend not in BACKENDS:
        return "diffusers does not know"
    if "hub" in backend:
        return "is code that would be fetched from the hub and run"
    for dtype in dtypes:
        for hidden in (0, 5) if masked else (0,):
            where = f"cannot be used in {str(dtype).removeprefix('torch.')} on {device.type}"
            try:
                mine = _trial(backend, device, width, dtype, hidden)
            except Exception as error:  # a kernel raises whatever it does not find
                return f"{where}: {one_line(error).rstrip('.')}"
            theirs = _trial("native", device, width, dtype, hidden)
            far = max((a - b).norm().item() / b.norm().item() for a, b in zip(mine, theirs, strict=True))
            if not far < (1e-3 if dtype == torch.float32 else 0.05):
                what = "with a mask, " if hidden else ""
                return f"{where}: {what}its results are {far:.2g} of their size away from native's"
    return None


def _trial(backend: str, device: torch.device, width: int, dtype: torch.dtype, hidden: int) -> list[Tensor]:
    """A small attention and its three gradients, fp32. In the second row ``hidden`` tokens amid the others are masked,
    as the padding between a text and its picture is: kernels of unlike lengths may take it to be at the end."""
    length, heads = 37, 2
    numbers = torch.arange(2 * length * heads * width, device=device).float().view(2, length, heads, width)
    inputs = [(step * numbers).sin().to(dtype).requires_grad_() for step in (0.37, 0.71, 1.3)]
    mask = None
    if hidden:
        mask = torch.ones((2, 1, 1, length), dtype=torch.bool, device=device)
        mask[1, ..., 10 : 10 + hidden] = False
    # diffusers' context names the package that is missing; native needs none.
    chosen = nullcontext() if backend == "native" else attention_backend(backend)
    with warnings.catch_warnings(), torch.enable_grad(), chosen:
        warnings.simplefilter("ignore")  # torch says of each kernel that was not chosen why
        out = dispatch_attention_fn(*inputs, attn_mask=mask, backend=AttentionBackendName(backend))
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    return [value.detach().float() for value in (out, *gradients)]
