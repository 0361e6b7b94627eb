"""What a run will train and the memory it needs, before it is started."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from sigmazero.config import RunConfig
from sigmazero.launch.local import Built, build
from sigmazero.models.roles import Roles

MIB = 2**20


def describe(config: RunConfig) -> str:
    """The resolved settings, a table of roles, and the memory of weights, training state and activations.

    Raises:
        ValueError: as ``build``.
    """
    built = build(config)
    lines = [json.dumps(config.model_dump(mode="json"), indent=2), "", _header()]
    lines += [_row(built, role) for role in built.roles.kinds]
    own = sum(_bytes(built, role) for role in built.roles.kinds)
    base = 4 * built.roles.num_base_parameters
    activations = max(_activation_bytes(built, role) for role in built.trainer.optimizers)
    steps = config.algorithm.num_steps
    lines += [
        "",
        f"grid: {steps} steps, shift {config.algorithm.shift:g}; the family's own sampler has a shift of "
        f"{built.roles.model.default_shift(steps):.4g} at this size",
        f"memory: base weights {base / MIB:.1f} MiB + roles {own / MIB:.1f} MiB + activations of one micro-batch "
        f"{activations / MIB:.1f} MiB (measured) = {(base + own + activations) / MIB:.1f} MiB, libraries not counted",
    ]
    return "\n".join(lines)


def _header() -> str:
    return f"{'role':14}{'kind':10}{'stored as':12}{'own parameters':>16}{'trained':>12}{'weights+state MiB':>20}"


def _row(built: Built, role: str) -> str:
    roles, kind = built.roles, built.roles.kinds[role]
    stored = "base" if kind == "frozen" else roles.storage_name
    own = sum(p.numel() for p in roles.parameters(role).values())
    trained = sum(p.numel() for p in roles.parameters(role).values() if p.requires_grad)
    return f"{role:14}{kind:10}{stored:12}{own:>16,}{trained:>12,}{_bytes(built, role) / MIB:>20.1f}"


def _bytes(built: Built, role: str) -> int:
    """fp32 weights; a trained role also has gradients and two moments."""
    copies = 4 if role in built.trainer.optimizers else 1
    return copies * 4 * sum(p.numel() for p in built.roles.parameters(role).values())


def _activation_bytes(built: Built, role: str) -> int:
    """What one forward of a role's micro-batch keeps for its backward, counted by running it."""
    rows = min(built.config.optimizers[role].micro_batch, built.config.data.batch_size)
    model, kept = built.roles.model, _Kept(built.roles)
    x = torch.zeros((rows, *model.latent_shape), device=built.trainer.device)
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        built.roles.velocity(role)(x, torch.full((rows,), 0.5, device=x.device), model.encode([""] * rows))
    return kept.bytes


class _Kept:
    """Counts each saved storage once, weights left out."""

    def __init__(self, roles: Roles) -> None:
        weights = [p for role in roles.kinds for p in roles.parameters(role).values()] + list(
            roles.model.net.parameters()
        )
        self._seen = {p.untyped_storage().data_ptr() for p in weights}
        self.bytes = 0

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor
