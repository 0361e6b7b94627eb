"""Many ranks: who works on which rows, how the network is sharded, and how parts become whole again.

Every rank draws the same prompts, seeds, plans and row sets, for all of them are functions of counters; a rank then
works on its share of the rows. What it made is gathered, so that every rank decides, counts and logs from the same
global numbers. No result depends on the number of ranks beyond the rounding of one sum (docs/architecture.md, rule 3).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from sigmazero.engines.local import LocalEngine, batches
from sigmazero.models.base import COMPUTE_DTYPE
from sigmazero.records import RolloutRequest, Trajectory
from sigmazero.sampler import num_calls, recorded, schedules


class Ranks:
    """The processes of one run, each with a share of every batch. Without arguments: this process alone.

    Args:
        mesh: ``replicate`` by ``shard`` ranks: a copy of the weights is spread over ``shard`` of them, and there are
            ``replicate`` copies.
        reshard: whether a block's weights are dropped again after its forward, and gathered once more for its backward.
    """

    def __init__(self, mesh: DeviceMesh | None = None, *, reshard: bool = True) -> None:
        self.mesh, self.reshard = mesh, reshard
        self.index, self.count = (dist.get_rank(), dist.get_world_size()) if mesh is not None else (0, 1)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and speaks."""
        return self.index == 0

    @property
    def sharded(self) -> bool:
        return self.mesh is not None and self.mesh["shard"].size() > 1

    def share(self, num_rows: int) -> range:
        """This rank's rows: neighbours, as many as the other ranks have or one fewer."""
        return range(num_rows * self.index // self.count, num_rows * (self.index + 1) // self.count)

    def most(self, num_rows: int) -> int:
        """Rows of the rank with the largest share, at least one: what every rank computes, with dummies if need be."""
        return max(1, -(-num_rows // self.count))

    def gather_rows(self, own: Tensor, num_rows: int) -> Tensor:
        """Rows ``[share, ...]`` of each rank as ``[num_rows, ...]``, in order, on every rank."""
        if self.count == 1:
            return own
        padded = own.new_zeros((self.most(num_rows), *own.shape[1:]))
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(parts, padded.contiguous())
        cut = [num_rows * (r + 1) // self.count - num_rows * r // self.count for r in range(self.count)]
        return torch.cat([part[:length] for part, length in zip(parts, cut, strict=True)])

    def gather_json(self, own: Any) -> list[Any]:
        """Plain values of each rank, on every rank."""
        text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        lengths = self.gather_rows(torch.tensor([len(text)]), self.count).tolist()
        padded = torch.zeros((1, max(lengths)), dtype=torch.uint8)
        padded[0, : len(text)] = text
        rows = self.gather_rows(padded, self.count)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        if self.count == 1:
            return flag
        value = torch.tensor(float(flag))
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return bool(value)

    def shard(self, net: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        """Spreads a network over the ranks, a block at a time; without a shard axis it stays as it is.

        Args:
            compute_dtype: of a full copy with fp32 masters; its gradients are reduced in fp32. The library does not
                cast what the network is given, because it would cast the time too (B03). None: every weight is used in
                the precision that it is kept in, as a frozen base and its adapters are.
        """
        if not self.sharded:
            return
        policy = MixedPrecisionPolicy()
        if compute_dtype is not None:
            policy = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
        # Nothing here writes into a velocity.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        # The root, too, drops its weights after a forward: what an average or a step then writes is seen (B44).
        for module in (*blocks(net), net):
            fully_shard(module, mesh=self.mesh, reshard_after_forward=self.reshard, mp_policy=policy)
        if compute_dtype is not None:
            setattr(net, COMPUTE_DTYPE, compute_dtype)
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)  # a sum: the denominators are global already

    def reduce_at_end(self, nets: Iterable[nn.Module], *, last: bool) -> None:
        """Has the next backward keep its gradients to itself, or reduce all that were kept if it is the ``last``."""
        if self.sharded:
            for net in nets:
                assert isinstance(net, FSDPModule)
                net.set_requires_gradient_sync(last)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Adds up the gradients of all ranks; sharded ones were, in the last backward."""
        own = [(p, p.grad) for p in parameters if p.grad is not None]
        if self.count == 1 or self.sharded or not own:
            return
        flat = torch.cat([gradient.flatten() for _, gradient in own])
        dist.all_reduce(flat)
        for (parameter, gradient), total in zip(own, flat.split([p.numel() for p, _ in own]), strict=True):
            # The optimizer wants a gradient laid out as its parameter is.
            is_plain = parameter.is_contiguous()
            parameter.grad = total.view_as(parameter) if is_plain else gradient.copy_(total.view_as(parameter))


ALONE = Ranks()


def blocks(net: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer: what its lists of modules hold."""
    return [block for child in net.children() if isinstance(child, nn.ModuleList) for block in child]


class SharedEngine:
    """Samples each batch on all ranks, a share on each, and gives every rank all of it, on the host."""

    def __init__(self, engine: LocalEngine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        done: dict[int, Trajectory] = {}
        for part in batches(requests, self._engine.max_batch * self._ranks.count):
            done.update(zip(part, self._sample([requests[i] for i in part]), strict=True))
        return [done[i] for i in range(len(requests))]

    def publish(self, policy: str, version: int) -> None:
        self._engine.publish(policy, version)

    def _sample(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        own = [requests[i] for i in self._ranks.share(len(requests))]
        made = self._engine.sample(own or requests[:1], num_calls(requests))
        shape, version = made[0].latents.shape[1:], made[0].version
        lengths = [_lengths(request, shape) for request in requests]
        rows = torch.zeros((len(own), max(map(sum, lengths))))
        for row, trajectory in zip(rows, made, strict=False):  # what a rank without a share made is left out
            values = _flat(trajectory)
            row[: len(values)] = values
        gathered = self._ranks.gather_rows(rows, len(requests))
        return [
            _unflat(request, sigmas, row[: sum(parts)].split(parts), shape, version)
            for request, sigmas, row, parts in zip(
                requests, schedules(requests), gathered.unbind(), lengths, strict=True
            )
        ]


def _lengths(request: RolloutRequest, shape: torch.Size) -> list[int]:
    """Numbers in a trajectory's latents, log-probs and velocities."""
    steps = num_calls([request])
    return [len(request.plan.ret) * shape.numel(), steps, steps * shape.numel() * request.debug]


def _flat(trajectory: Trajectory) -> Tensor:
    parts = [trajectory.latents, trajectory.log_prob, trajectory.velocities]
    return torch.cat([part.cpu().float().flatten() for part in parts if part is not None])


def _unflat(
    request: RolloutRequest, sigmas: Tensor, parts: Sequence[Tensor], shape: torch.Size, version: int
) -> Trajectory:
    latents, log_prob, velocities = parts
    return recorded(request, sigmas, latents.view(-1, *shape), log_prob, velocities.view(-1, *shape).unbind(), version)
