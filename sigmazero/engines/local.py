"""The engine inside this process: it samples the trainer's own weights, so publishing has nothing to move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sigmazero.models.roles import Roles
from sigmazero.records import RolloutRequest, Trajectory
from sigmazero.sampler import batch_key, rollout


class LocalEngine:
    """Samples requests that share a key in batches of at most ``max_batch`` rows, without gradient."""

    def __init__(self, roles: Roles, *, max_batch: int = 128, device: torch.device | str = "cpu") -> None:
        self._roles, self.max_batch, self._device = roles, max_batch, device

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        done: dict[int, Trajectory] = {}
        for part in batches(requests, self.max_batch):
            done.update(zip(part, self.sample([requests[i] for i in part]), strict=True))
        return [done[i] for i in range(len(requests))]

    def publish(self, policy: str, version: int) -> None:
        assert self._roles.versions[policy] == version

    @torch.no_grad()
    def sample(self, requests: Sequence[RolloutRequest], calls: int = 0) -> list[Trajectory]:
        """One batch of requests that share a key, in at least ``calls`` network calls."""
        role, model = requests[0].policy, self._roles.model
        return rollout(
            self._roles.velocity(role, requests[0].guidance),
            requests,
            model.encode([r.prompt.text for r in requests]),
            model.latent_shape,
            device=self._device,
            version=self._roles.versions[role],
            calls=calls,
        )


def batches(requests: Sequence[RolloutRequest], max_batch: int) -> Iterator[list[int]]:
    """Positions of requests that share a key, at most ``max_batch`` at a time."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(batch_key(request), []).append(i)
    for rows in groups.values():
        for start in range(0, len(rows), max_batch):
            yield rows[start : start + max_batch]
