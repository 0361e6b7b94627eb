"""The contract between an algorithm and the one loop: roles, phases, averages, requests, feeds.

A term is a pure function of roles and a micro-batch that returns values a row. Only the loop reduces, with the global
sum of ``weight`` as denominator. An algorithm knows no model, no engine and no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from sigmazero.models.roles import RoleKind, Roles
from sigmazero.records import Batch, Prompt, RolloutRequest, Trajectory

Term = Callable[[Roles, Batch], Mapping[str, Tensor]]
"""Outputs ``[b, ...]``, a row each. ``loss`` [b] is back-propagated; names in ``Phase.writes`` become fields for later
phases; every other ``[b]`` output is logged as its weighted mean."""


@dataclass(frozen=True)
class Phase:
    """Terms (one a feed) that share an optimizer step."""

    name: str
    terms: Mapping[str, Term]
    calls: tuple[str, ...]  # roles that its terms run
    updates: tuple[str, ...] = ()  # roles it steps, each with its own optimizer; () computes only
    writes: tuple[str, ...] = ()  # fields that its terms hand to later phases
    every: int = 1  # it is due in cycles divisible by this


@dataclass(frozen=True)
class Average:
    """``target <- decay(n) * target + (1 - decay(n)) * source``, n the source's optimizer steps, after each of them."""

    target: str
    source: str
    decay: Callable[[int], float]


@dataclass(frozen=True)
class Arm:
    """One way to sample that evaluation compares: ``student@2``."""

    name: str
    role: str
    num_steps: int
    shift: float
    kind: Literal["ode", "sde", "dance", "cps"] = "ode"
    eta: float = 0.0
    guidance: float = 1.0


class Algorithm(Protocol):
    """What the loop needs to know."""

    @property
    def roles(self) -> Mapping[str, RoleKind]: ...

    @property
    def policy(self) -> str:
        """The role that samples the rollouts."""
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

    def feeds(self, trajectories: Sequence[Trajectory], pictures: Batch | None, cycle: int) -> dict[str, Batch]:
        """Named batches for the phases. The loop encodes their prompts afterwards."""
        ...


def warmed_up_decay(decay: float) -> Callable[[int], float]:
    """``min((1 + n) / (10 + n), decay)`` for n optimizer steps before the one being averaged in (B58)."""
    return lambda n: min((1 + n) / (10 + n), decay)
