"""What turns rollout requests into trajectories. The caller never learns whether a function or a server answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sigmazero.records import RolloutRequest, Trajectory


class Engine(Protocol):
    def generate(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        """One trajectory a request, in order."""
        ...

    def publish(self, policy: str, version: int) -> None:
        """Makes the trainer's weights of a policy the ones that are sampled from now on."""
        ...
