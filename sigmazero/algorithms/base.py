"""The contract between an algorithm and the one loop: roles, phases, averages, requests, feeds.

A term is a pure function of roles and a micro-batch that returns values a row. Only the loop reduces, with the global
sum of ``weight`` as denominator. An algorithm knows no model, no engine and no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from sigmazero import seeds
from sigmazero.models.roles import RoleKind, Roles
from sigmazero.records import Batch, Prompt, RolloutRequest, Scores, Trajectory

Term = Callable[[Roles, Batch], Mapping[str, Tensor]]
"""Outputs ``[b, ...]``, a row each. ``loss`` [b] is back-propagated; names in ``Phase.writes`` become fields for later
phases; every other ``[b]`` output is logged as its weighted mean, or as its maximum if its name ends in ``_max``. Any
other output is released with the graph, right after the term's backward.

A term sees floats on the device, and whatever is not of floats (ids, versions, numbers of steps) on the host, where
seeds read it. It does not wait for the device: no ``item()``, ``float()`` or ``tolist()`` of what is there."""


RowSets = Callable[[int, int], Sequence[Sequence[int]]]  # (rows, cycle) -> the rows of each optimizer step


def all_rows(num_rows: int, cycle: int) -> Sequence[Sequence[int]]:
    """One optimizer step over everything."""
    return [range(num_rows)]


def dealt_rows(seed: int, updates: int, epochs: int = 1) -> RowSets:
    """``updates`` nearly equal parts of the rows, dealt anew each epoch; a single update takes all as they are."""
    if updates * epochs == 1:
        return all_rows

    def deal(num_rows: int, cycle: int) -> Sequence[Sequence[int]]:
        orders = [seeds.generator(seed, "row_order", epoch, cycle).permutation(num_rows) for epoch in range(epochs)]
        return [part.tolist() for order in orders for part in np.array_split(order, updates) if len(part)]

    return deal


@dataclass(frozen=True)
class Phase:
    """Terms (one a feed) that share an optimizer step.

    With ``step_fields`` a row stands for T items, one a step: these fields are ``[b, T, ...]``, and terms see them as
    ``[items, ...]`` beside the row's other fields, as many steps of as many rows in one call as the micro-batch holds.
    A feed need not have all of them. In ``chains`` are fields ``[b, T + 1, ...]``, with the two names that step t sees
    its items t and t + 1 by: ``{"latents": ("x", "y")}``.
    """

    name: str
    terms: Mapping[str, Term]
    calls: tuple[str, ...]  # roles that its terms run
    updates: tuple[str, ...] = ()  # roles it steps, each with its own optimizer; () computes only
    writes: tuple[str, ...] = ()  # fields that its terms hand to later phases
    every: int = 1  # it is due in cycles divisible by this
    rows: RowSets = all_rows
    step_fields: tuple[str, ...] = ()
    chains: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    by_sigma: tuple[str, ...] = ()  # outputs that are also logged for each value of the feed's field "sigma"
    shared: tuple[str, ...] = ()  # outputs that are logged under their own name, without the phase's

    def is_due(self, cycle: int) -> bool:
        return cycle % self.every == 0


@dataclass(frozen=True)
class Average:
    """``target <- decay(n) * target + (1 - decay(n)) * source``.

    ``every`` update: after each of the source's optimizer steps, n those before it. ``every`` cycle: once after the
    phases of a cycle that updated the source, n its optimizer steps.
    """

    target: str
    source: str
    decay: Callable[[int], float]
    every: Literal["update", "cycle"] = "update"


@dataclass(frozen=True)
class Arm:
    """One way to sample that evaluation compares: ``student@2``."""

    name: str
    role: str
    num_steps: int
    shift: float
    kind: str = "ode"
    eta: float = 0.0
    guidance: float = 1.0


def before_and_after(num_steps: int, shift: float, guidance: float = 1.0) -> Sequence[Arm]:
    """What online RL compares: the averaged policy, the policy itself, and the start, each without noise."""
    roles = (("final", "policy_ema"), ("final_raw", "policy"), ("start", "reference"))
    return [Arm(name, role, num_steps, shift, guidance=guidance) for name, role in roles]


class Algorithm(Protocol):
    """What the loop needs to know."""

    @property
    def roles(self) -> Mapping[str, RoleKind]: ...

    @property
    def policy(self) -> str:
        """The role that samples the rollouts."""
        ...

    @property
    def group_size(self) -> int:
        """Samples a prompt that are scored and compared; 0 for algorithms without rewards."""
        ...

    @property
    def uses_pictures(self) -> bool:
        """Whether a cycle draws captioned pictures."""
        ...

    @property
    def phases(self) -> Sequence[Phase]: ...

    @property
    def averages(self) -> Sequence[Average]: ...

    @property
    def arms(self) -> Sequence[Arm]:
        """What evaluation compares; the averaged student first of the trained ones."""
        ...

    def requests(self, prompts: Sequence[Prompt], samples: range, cycle: int) -> list[RolloutRequest]:
        """The cycle's rollout, one request a prompt; none for algorithms that learn from pictures alone."""
        ...

    def feeds(
        self, trajectories: Sequence[Trajectory], scores: Scores | None, pictures: Batch | None, cycle: int
    ) -> dict[str, Batch]:
        """Named batches for the phases. The loop encodes their prompts afterwards.

        ``scores`` are there for algorithms whose ``group_size`` is above 0; a batch without rows of weight makes no
        update.
        """
        ...


def warmed_up_decay(decay: float) -> Callable[[int], float]:
    """``min((1 + n) / (10 + n), decay)`` for n optimizer steps before the one being averaged in (B58)."""
    return lambda n: min((1 + n) / (10 + n), decay)
