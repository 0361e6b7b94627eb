"""The engine inside this process: it samples the trainer's own weights, so publishing has nothing to move."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sigmazero.models.roles import Roles
from sigmazero.records import RolloutRequest, Trajectory
from sigmazero.sampler import batch_key, rollout


class LocalEngine:
    """Samples requests that share a key in batches of at most ``max_batch`` rows, without gradient."""

    def __init__(self, roles: Roles, *, max_batch: int = 128, device: torch.device | str = "cpu") -> None:
        self._roles, self._max_batch, self._device = roles, max_batch, device

    @torch.no_grad()
    def generate(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(batch_key(request), []).append(i)
        done: dict[int, Trajectory] = {}
        for rows in groups.values():
            for start in range(0, len(rows), self._max_batch):
                part = rows[start : start + self._max_batch]
                done.update(zip(part, self._sample([requests[i] for i in part]), strict=True))
        return [done[i] for i in range(len(requests))]

    def publish(self, policy: str, version: int) -> None:
        assert self._roles.versions[policy] == version

    def _sample(self, requests: list[RolloutRequest]) -> list[Trajectory]:
        role, model = requests[0].policy, self._roles.model
        return rollout(
            self._roles.velocity(role, requests[0].guidance),
            requests,
            model.encode([r.prompt.text for r in requests]),
            model.latent_shape,
            device=self._device,
            version=self._roles.versions[role],
        )
