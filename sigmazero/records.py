"""What crosses a layer: frozen, shaped, documented. Rows come first in every tensor.

Time: ``sigma`` runs from 1 (noise) to 0 (data). A schedule of N steps has N+1 sigmas; step ``i`` goes from index
``i`` to ``i + 1``; latent index ``i`` is the latent at ``sigmas[i]`` and index N is the sample itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StepPlan(NamedTuple):
    """Which steps are stochastic, which latents come back, where the rollout stops.

    ``StepPlan(sde=(), ret=(1, 2), stop=1)``: no stochastic step; latents 1 and 2 come back; step 1 is the last and
    jumps to sigma 0, so latent 2 is the prediction of the sample. A rollout ends with the last latent that comes back.
    """

    sde: tuple[int, ...] | None  # None: no filter, every step is of the request's kind; (): none is stochastic
    ret: tuple[int, ...]  # latent indices, ascending; 0 is the first noise
    stop: int | None  # the step that jumps to sigma 0; None: the schedule's last


@dataclass(frozen=True)
class Prompt:
    """One line of the prompt stream. ``Prompt(7, "the number 42 in red")``."""

    id: int  # of its line in a prompt file, or of the caption
    text: str
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # plain JSON values


@dataclass(frozen=True)
class Conditioning:
    """What the network is told of each row's prompt, as the family encoded it: named tensors ``[rows, ...]``.

    ``Conditioning({"tokens": int64 [2, 5]})``. Fields of another length in dimension 1 are padded with zeros when rows
    are put together; a family whose prompts differ in length has a mask among its fields, and really applies it (B09).
    """

    fields: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def take(self, rows: Sequence[int]) -> Conditioning:
        index = torch.as_tensor(rows, dtype=torch.long)
        return Conditioning({name: value[index.to(value.device)] for name, value in self.fields.items()})

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        return Conditioning({name: _padded_cat([part[name] for part in parts]) for name in parts[0].fields})


def _padded_cat(parts: Sequence[Tensor]) -> Tensor:
    if parts[0].ndim < 2 or len({part.shape[1] for part in parts}) == 1:
        return torch.cat(list(parts))
    longest = max(part.shape[1] for part in parts)
    beyond = [[0, 0] * (part.ndim - 2) + [0, longest - part.shape[1]] for part in parts]
    return torch.cat([torch.nn.functional.pad(part, pad) for part, pad in zip(parts, beyond, strict=True)])


@dataclass(frozen=True)
class RolloutRequest:
    """One sample to be made.

    ``RolloutRequest(sample=12, cycle=3, prompt=Prompt(7, "..."), policy="student", sigmas=[1, .75, 0], kind="cps",
    eta=1.0, guidance=1.0, seed=0, plan=StepPlan(None, (0, 1), 0))``.
    """

    sample: int  # global index: the only identity that randomness knows
    cycle: int
    prompt: Prompt
    policy: str  # the role that samples
    sigmas: Tensor  # fp32 [N+1], descending, ending in 0
    kind: str  # transition of the stochastic steps: ode, sde, dance, cps
    eta: float
    guidance: float  # 1: no guidance and no negative call
    seed: int
    plan: StepPlan
    feed: str = "rollout"  # the batch that its row belongs to
    group: int = 0  # made when prompts are drawn: samples that are compared with one another share it
    debug: bool = False  # the velocities come back too


@dataclass(frozen=True)
class Trajectory:
    """What one sample's rollout recorded. R latents came back, K steps were taken."""

    request: RolloutRequest
    latents: Tensor  # [R, *latent shape], in the storage dtype
    latent_indices: tuple[int, ...]  # R true indices, ascending
    sigmas: Tensor  # fp32 [K+1], exactly those sampled with; a stopped rollout ends in 0 after step ``stop``
    log_prob: Tensor  # fp32 [K], element means; nan where the step was deterministic
    version: int  # optimizer steps of the policy when it sampled; -1: replayed, of a policy that is gone
    velocities: Tensor | None = None  # [K, *latent shape], as guided, where the request asked for them

    def latent(self, index: int) -> Tensor:
        """The latent at a true step index, never at a position.

        Raises:
            ValueError: that index did not come back.
        """
        if index not in self.latent_indices:
            raise ValueError(f"latent {index} of sample {self.request.sample} did not come back: {self.latent_indices}")
        return self.latents[self.latent_indices.index(index)]

    def on_host(self) -> Trajectory:
        if self.latents.device.type == "cpu":
            return self
        velocities = None if self.velocities is None else self.velocities.cpu()
        return replace(self, latents=self.latents.cpu(), log_prob=self.log_prob.cpu(), velocities=velocities)


@dataclass(frozen=True)
class Scores:
    """What rewards say of samples: values by reward (``ocr``, or ``mine/part``), nan where there is none.

    ``Scores({"ocr": [1., nan]}, total=[1., nan])``.
    """

    values: Mapping[str, Tensor]  # fp64 [b] each
    total: Tensor  # fp64 [b], the weighted sum that is optimised; nan: leave the sample out of everything


@dataclass(frozen=True)
class Batch:
    """Rows of one feed. ``sample`` int64 [b], ``cycle`` int64 [b] and ``weight`` fp32 [b] are always there.

    ``Batch({"sample": [4, 5], "cycle": [0, 0], "weight": [1., 1.], "x0": fp32 [2, 3, 16, 16]}, prompts, condition)``.
    """

    fields: Mapping[str, Tensor]
    prompts: tuple[Prompt, ...]
    condition: Conditioning | None = None  # None until a phase needs it

    def __len__(self) -> int:
        return len(self.fields["sample"])

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def take(self, rows: Sequence[int]) -> Batch:
        """Some rows, copied; all of them as they are is the batch itself."""
        if rows == range(len(self)):
            return self
        index = torch.as_tensor(rows, dtype=torch.long)
        return Batch(
            {name: value[index] for name, value in self.fields.items()},
            tuple(self.prompts[i] for i in rows),
            self.condition.take(rows) if self.condition is not None else None,
        )

    def with_fields(self, **new: Tensor) -> Batch:
        return Batch({**self.fields, **new}, self.prompts, self.condition)

    def with_condition(self, condition: Conditioning) -> Batch:
        return Batch(self.fields, self.prompts, condition)


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device; one of the host gets to CUDA by way of pinned memory, and nobody waits for it."""
    if value.device.type == "cpu" and device.type == "cuda":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def rows_of(samples: Sequence[int], cycle: int) -> dict[str, Tensor]:
    """The fields that every batch has, for samples of one cycle, each of weight 1."""
    return {
        "sample": torch.as_tensor(list(samples), dtype=torch.long),
        "cycle": torch.full((len(samples),), cycle, dtype=torch.long),
        "weight": torch.ones(len(samples)),
    }
