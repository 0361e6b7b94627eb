"""One process of several that save and load one folder: what `test_checkpoint_ranks.py` starts. A program.

Weights and moments are set to numbers that follow from their names, the same in every layout, so that what is read can
be compared bit for bit with what was never stored. (Those that an optimizer computes differ by a rounding at times.)
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sigmazero.config import OptimizerConfig
from sigmazero.tensors import local, whole
from sigmazero.training import checkpoint
from sigmazero.training.parallel import Ranks
from sigmazero.training.state import RoleOptimizer

STEPS = 3


class Net(nn.Module):
    """Weights whose first axis two ranks cannot share evenly, one of a single row, one that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 1)])
        self.idle = nn.Parameter(torch.zeros(3, 2))


def trained(net: nn.Module) -> RoleOptimizer:
    """An optimizer after some steps, its weights and moments set to what is known of them."""
    config = OptimizerConfig.model_validate({"lr": 0.01})
    optimizer = RoleOptimizer("student", dict(net.named_parameters()), config, 10)
    for _ in range(STEPS):
        for name, value in net.named_parameters():
            value.grad = None if name == "idle" else torch.ones_like(value)
        optimizer.step(0.5)  # below the clip
    moving = dict(net.named_parameters()) | {n: v for n, v in optimizer.state().items() if v.dim()}
    for i, (_, value) in enumerate(sorted(moving.items())):
        known = torch.sqrt(torch.arange(value.numel()) + 100.0 * i).view(value.shape)
        part = distribute_tensor(known, value.device_mesh, value.placements) if isinstance(value, DTensor) else known
        local(value.detach()).copy_(local(part))
    return optimizer


def state(net: nn.Module, optimizer: RoleOptimizer) -> dict[str, Tensor]:
    """What a trainer hands over, and a few tensors that are not sharded."""
    weights = {f"roles/student/{name}": value for name, value in net.named_parameters()}
    moments = {f"optimizers/student/{name}": value for name, value in optimizer.state().items()}
    plain = {"a/bytes": torch.arange(7, dtype=torch.uint8), "a/long": torch.tensor(2**60), "a/none": torch.zeros(0, 3)}
    return weights | moments | plain


def expected() -> dict[str, Tensor]:
    net = Net()
    return {name: value.detach() for name, value in state(net, trained(net)).items()}


def differences(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Names whose tensors are not the same bits."""
    wrong = sorted(found.keys() ^ wanted.keys())
    for name in sorted(found.keys() & wanted.keys()):
        own = whole(found[name].detach())  # on all ranks, or none
        if own.dtype != wanted[name].dtype or own.shape != wanted[name].shape or not torch.equal(own, wanted[name]):
            wrong.append(name)
    return wrong


def restored(path: Path, ranks: Ranks) -> dict[str, Tensor]:
    """A new network and its optimizer, with other weights, as a checkpoint fills them."""
    net = Net()
    with torch.no_grad():
        for value in net.parameters():
            value.fill_(-1)
    ranks.shard(net)
    found = checkpoint.load(path, ranks)
    config = OptimizerConfig.model_validate({"lr": 0.01})
    optimizer = RoleOptimizer("student", dict(net.named_parameters()), config, 10)
    prefix = "optimizers/student/"
    moments = optimizer.room([n.removeprefix(prefix) for n in found.tensors if n.startswith(prefix)], STEPS)
    rest = {name: torch.full_like(value, 3) for name, value in expected().items() if name.startswith("a/")}
    weights = {f"roles/student/{name}": value for name, value in net.named_parameters()}
    found.tensors.fill(weights | {prefix + name: value for name, value in moments.items()} | rest)
    optimizer.load(moments, STEPS)
    return state(net, optimizer) | rest


def ranks_of(replicate: int, shard: int) -> Ranks:
    return Ranks(init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard")))


def save(folder: Path, cycle: int, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    with checkpoint.Saver(folder, 5, ranks) as saver:
        saver.save(cycle, tensors, {"cycle": cycle})


def of_layout(ranks: Ranks) -> dict[str, Tensor]:
    net = Net()
    ranks.shard(net)
    return state(net, trained(net))


def failure(act: Callable[[], object]) -> str:
    try:
        act()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def three(folder: Path) -> dict[str, Any]:
    ranks = ranks_of(1, 3)
    save(folder / "sharded 3", 1, of_layout(ranks), ranks)
    return {"same": differences(restored(folder / "sharded 3" / "cycle-00000001", ranks), expected())}


def three_again(folder: Path) -> dict[str, Any]:
    ranks, plain = ranks_of(1, 3), ranks_of(3, 1)
    places = {name: folder / name / "cycle-00000001" for name in ("sharded 2", "plain 2", "plain 1")}
    return {
        f"{name} on {kind}": differences(restored(path, layout), expected())
        for name, path in places.items()
        for kind, layout in (("sharded 3", ranks), ("plain 3", plain))
    }


def two(folder: Path) -> dict[str, Any]:
    sharded, plain = ranks_of(1, 2), ranks_of(2, 1)
    found: dict[str, Any] = {}
    for name, ranks in (("sharded 2", sharded), ("plain 2", plain)):
        save(folder / name, 1, of_layout(ranks), ranks)
    for name in ("sharded 3", "sharded 2", "plain 2", "plain 1"):
        for kind, ranks in (("sharded", sharded), ("plain", plain)):
            wrong = differences(restored(folder / name / "cycle-00000001", ranks), expected())
            found[f"{name} on {kind} 2"] = wrong
    found["copied"] = _copied(sharded)
    found["both"] = _replicas(folder / "replicas", plain)
    found["damaged"] = _damaged(folder / "damaged", sharded)
    for where in (0, 1):
        found[f"full {where}"] = _full(folder / f"full {where}", sharded, where)
    found["renaming"] = _full(folder / "renaming", sharded, 0, (Path, "rename"))
    return found


def _copied(ranks: Ranks) -> int:
    """Bytes of what this rank copies to the host."""
    _, copies = checkpoint._snapshot(of_layout(ranks), ranks)
    return sum(value.untyped_storage().nbytes() for value in copies.values())


def _replicas(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Tensors of which each of two ranks has a whole copy, as a hybrid mesh has of its shards."""
    assert ranks.mesh is not None
    made = {f"w{i}": torch.arange(6.0).view(3, 2) + i for i in range(4)}
    save(folder, 1, {n: distribute_tensor(v, ranks.mesh, [Replicate(), Shard(0)]) for n, v in made.items()}, ranks)
    return {"same": differences(checkpoint.load(folder / "cycle-00000001", ranks).tensors, made)}


def _damaged(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """The last byte of a file that the second rank wrote is another."""
    for cycle in (1, 2):
        save(folder, cycle, of_layout(ranks), ranks)
    if ranks.index == 1:
        (file,) = (folder / "cycle-00000002").glob("shard-00002-*")
        file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    dist.barrier()
    found, refused = checkpoint.load_newest(folder, ranks)
    return {"found": found and found.numbers, "refused": refused}


def _full(folder: Path, ranks: Ranks, where: int, what: tuple[Any, str] = (os, "fsync")) -> dict[str, Any]:
    """The disk is full on one rank: told on both, at the next cycle."""

    def full(*_: object, **__: object) -> Any:
        raise OSError(28, "No space left on device")

    save(folder, 1, of_layout(ranks), ranks)
    inner = getattr(*what)
    with checkpoint.Saver(folder, 1, ranks) as saver:
        if ranks.index == where:
            setattr(*what, full)
        saver.save(2, of_layout(ranks), {"cycle": 2})
        told, cycles = "", 0
        while not told:
            told, cycles = failure(saver.check), cycles + 1
            time.sleep(0.01)
        setattr(*what, inner)
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    found, refused = checkpoint.load_newest(folder, ranks)
    dist.barrier()
    save(folder, 3, of_layout(ranks), ranks)
    after = sorted(path.name for path in folder.iterdir())
    return {"told": told, "left": left, "found": found and found.numbers, "refused": refused, "after": after}


def killed(folder: Path) -> dict[str, Any]:
    """The second rank dies while it writes; the first has nobody to wait for."""
    ranks = ranks_of(1, 2)
    save(folder / "killed", 1, of_layout(ranks), ranks)
    saver = checkpoint.Saver(folder / "killed", 1, ranks)
    if ranks.index == 1:
        checkpoint._write_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
    tensors, started = of_layout(ranks), time.monotonic()
    saver.save(2, tensors, {"cycle": 2})
    return {"told": failure(saver.wait), "seconds": time.monotonic() - started}


WORKS: list[tuple[Callable[[Path], dict[str, Any]], int]] = [(three, 3), (two, 2), (three_again, 3), (killed, 2)]


def main(index: int, folder: Path) -> None:
    """Does every work that has so many ranks, in a process group of its own, and leaves what was found as JSON."""
    torch.set_num_threads(1)
    for work, count in WORKS:
        if index < count:
            store = f"file://{folder}/store {work.__name__}"
            dist.init_process_group("gloo", init_method=store, rank=index, world_size=count)
            (folder / f"{work.__name__} {index}.json").write_text(json.dumps(work(folder)))
            if work is killed:
                os._exit(0)
            gc.collect()  # sharded networks go before their group
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
