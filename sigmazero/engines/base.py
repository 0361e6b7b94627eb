"""What turns rollout requests into trajectories. The caller never learns whether a function or a server answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sigmazero.records import RolloutRequest, Trajectory

EVALUATION_ROWS = 96  # that are asked of an engine at a time


class Engine(Protocol):
    def generate(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        """One trajectory a request, in order."""
        ...

    def publish(self, policy: str, version: int) -> None:
        """Makes the trainer's weights of a policy the ones that are sampled from now on."""
        ...


def generate_in_parts(
    engine: Engine, requests: Sequence[RolloutRequest], after: Callable[[int], None], rows: int = EVALUATION_ROWS
) -> list[Trajectory]:
    """``engine.generate`` in parts, with ``after(trajectories so far)`` between them for a progress bar."""
    done: list[Trajectory] = []
    for start in range(0, len(requests), rows):
        done += engine.generate(requests[start : start + rows])
        after(len(done))
    return done
