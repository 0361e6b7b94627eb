"""Named views of one network: full copies, or LoRA adapters over one frozen base.

``requires_grad`` is set once, here, and never toggled (docs/architecture.md, rule 10). A role is selected by one
switch, and the recompute of a checkpointed forward selects the role of that forward again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from sigmazero import seeds
from sigmazero.config import LoraConfig
from sigmazero.models.adapters import start_adapters
from sigmazero.models.base import FlowModel, guide
from sigmazero.records import Conditioning
from sigmazero.sampler import Velocity, padded
from sigmazero.tensors import local, whole

RoleKind = Literal["train", "frozen", "average"]


class _Storage(Protocol):
    def net(self, role: str) -> nn.Module: ...
    def own(self, role: str) -> dict[str, Tensor]: ...
    def selected(self, role: str) -> contextlib.AbstractContextManager[None]: ...


class Roles:
    """The roles of a run.

    Args:
        model: the family, with the base network.
        kinds: role -> ``train``, ``frozen`` or ``average``.
        sources: averaged role -> the role that it averages; it starts as its copy.
        lora: None for full copies.
        guidance_norm: overrides the family's, or ``family``.
        shard: spreads a network over ranks, once all of its weights and what they require is final; told the precision
            that a full copy with fp32 masters computes in. Copies are made and spread one after another, so that one of
            them is there whole at a time.
    Raises:
        ValueError: a LoRA target matches no linear layer of the network, or ``lora.init`` does not fit.
    """

    def __init__(
        self,
        model: FlowModel,
        kinds: Mapping[str, RoleKind],
        sources: Mapping[str, str],
        *,
        lora: LoraConfig | None = None,
        guidance_norm: str = "family",
        activation_checkpointing: bool = False,
        shard: Callable[[nn.Module, torch.dtype | None], None] = lambda net, compute_dtype: None,
        seed: int = 0,
    ) -> None:
        self.model, self.kinds, self.storage_name = model, dict(kinds), "lora" if lora else "copy"
        self.versions = dict.fromkeys(kinds, 0)  # optimizer steps
        self._guidance_norm = model.guidance_norm if guidance_norm == "family" else guidance_norm
        self._negative = model.encode([""])
        model.net.eval().requires_grad_(False)
        base_dtype = next(model.net.parameters()).dtype
        self.base_fingerprint = _hash({"": model.net.state_dict()})

        def spread(net: nn.Module, compute_dtype: torch.dtype | None) -> None:
            if activation_checkpointing:
                model.enable_activation_checkpointing(net, self._checkpointed)
            shard(net, compute_dtype)

        self._storage: _Storage = (
            _Adapters(model, kinds, lora, seed)
            if lora
            else _Copies(model.net, kinds, lambda net: spread(net, base_dtype))
        )
        self._sharded: dict[str, list[FSDPModule]] = {role: [] for role in kinds}  # nothing has run: none holds weights
        if lora is not None and lora.init:
            start_adapters(lora, {role: self.parameters(role) for role, kind in kinds.items() if kind != "frozen"})
        for target, source in sources.items():
            self.average(target, source, 0.0)
        spread(model.net, None)
        self._sharded = {r: [m for m in self.net(r).modules() if isinstance(m, FSDPModule)] for r in kinds}
        self._current: str | None = None

    def velocity(self, role: str, guidance: float = 1.0) -> Velocity:
        """The velocity of a role, guided if ``guidance`` is not 1; both branches share one padded network call."""
        if role not in self.kinds:
            raise KeyError(f"there is no role {role!r}; the algorithm has {', '.join(self.kinds)}")
        net = self._storage.net(role)

        def plain(x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
            with self.selected(role):
                return self.model.velocity(net, x, sigma, condition)

        def guided(x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
            both = Conditioning.cat([condition, self._negative.take([0] * len(x))])
            positive, negative = padded(plain)(x.repeat(2, *[1] * (x.ndim - 1)), sigma.repeat(2), both).chunk(2)
            return guide(positive, negative, guidance, self._guidance_norm)

        return padded(plain) if guidance == 1 else guided

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures of latents, decoded on the network's device wherever the latents lie."""
        return self.model.decode(latents.to(next(self.model.net.parameters()).device))

    def net(self, role: str) -> nn.Module:
        """The network that computes a role; adapters share one."""
        return self._storage.net(role)

    def parameters(self, role: str) -> dict[str, Tensor]:
        """What a role owns, by name: its copy's parameters or its adapter's. Frozen roles own nothing of their own.

        Of a sharded network these are the shards. Whole weights that were kept from a forward are dropped first: they
        stand in the shards' place, and would not follow what is written into these (B44).
        """
        for module in self._sharded[role]:
            module.reshard()
        return self._storage.own(role)

    @contextlib.contextmanager
    def selected(self, role: str) -> Generator[None]:
        """Makes a role the one that the network computes; the former one is back afterwards, also after an error."""
        before, self._current = self._current, role
        with self._storage.selected(role):
            try:
                yield
            finally:
                self._current = before

    @torch.no_grad()
    def average(self, target: str, source: str, decay: float) -> None:
        """``target <- decay * target + (1 - decay) * source``; decay 0 copies exactly."""
        mine, theirs = self.parameters(target), self.parameters(source)
        if decay == 0:
            for name, value in mine.items():
                local(value).copy_(local(theirs[name]))
        else:
            torch._foreach_lerp_([local(v) for v in mine.values()], [local(theirs[n]) for n in mine], 1 - decay)
        self.versions[target] = self.versions[source]

    def fingerprint(self, role: str) -> str:
        """A hash of every weight that the role computes with, in hexadecimal."""
        own = self.parameters(role)
        shares_base = self._storage.net(role) is self.model.net
        base = {n: v for n, v in self.model.net.state_dict().items() if ".lora_" not in n} if shares_base else {}
        return _hash({"base": base, "own": own})

    def _checkpointed(self, block: nn.Module, *inputs: Any) -> Any:
        role = self._current
        assert role is not None

        def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
            return contextlib.nullcontext(), self.selected(role)

        return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts, preserve_rng_state=False)


def _hash(parts: Mapping[str, Mapping[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    if any(isinstance(value, FakeTensor) for tensors in parts.values() for value in tensors.values()):
        return ""  # a plan's weights have no values
    for part, tensors in parts.items():
        for name in sorted(tensors):
            digest.update(f"{part}/{name}".encode())
            digest.update(whole(tensors[name].detach()).float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


class _Places:
    """Where parameters of a network are kept, found once: to walk through a network takes longer than to average it.

    Args:
        names: what a role calls a parameter -> its name in the network.
    """

    def __init__(self, net: nn.Module, names: Mapping[str, str]) -> None:
        self._places: dict[str, tuple[nn.Module, str]] = {}
        for name, inside in names.items():
            module, _, own = inside.rpartition(".")
            self._places[name] = (net.get_submodule(module), own)

    def parameters(self) -> dict[str, Tensor]:
        """Those that are there now: sharding puts others in their place."""
        return {name: getattr(module, own) for name, (module, own) in self._places.items()}


def _make_masters(parameters: Mapping[str, Tensor], kind: RoleKind) -> None:
    """What a role owns is fp32, whatever the base is kept in (B65)."""
    for parameter in parameters.values():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(kind == "train")


class _Copies:
    """Each trained or averaged role is a full copy of the base; the frozen ones are the base.

    Args:
        spread: called with each copy before the next one is made.
    """

    def __init__(self, base: nn.Module, kinds: Mapping[str, RoleKind], spread: Callable[[nn.Module], None]) -> None:
        self._nets, self._own = dict.fromkeys(kinds, base), dict[str, _Places]()
        for role, kind in kinds.items():
            if kind != "frozen":
                net = self._nets[role] = copy.deepcopy(base)
                self._own[role] = _Places(net, {name: name for name, _ in net.named_parameters()})
                _make_masters(self._own[role].parameters(), kind)
                spread(net)

    def net(self, role: str) -> nn.Module:
        return self._nets[role]

    def own(self, role: str) -> dict[str, Tensor]:
        return self._own[role].parameters() if role in self._own else {}

    def selected(self, role: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _Adapters:
    """Each trained or averaged role is one peft adapter over the frozen base; the frozen ones are the bare base."""

    def __init__(self, model: FlowModel, kinds: Mapping[str, RoleKind], config: LoraConfig, seed: int) -> None:
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer

        targets = list(config.targets or model.lora_targets)
        check_targets(model.net, targets, config.rank)
        own_adapter = [role for role, kind in kinds.items() if kind != "frozen"]
        wrapper: peft.PeftModel | None = None  # it replaces the layers inside model.net, which stays the network
        for index, role in enumerate(own_adapter):
            settings = peft.LoraConfig(
                r=config.rank,
                lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
                target_modules=targets,
            )
            with seeds.weight_init(seed, index):
                if wrapper is None:
                    wrapper = peft.PeftModel(model.net, settings, adapter_name=role)  # pyright: ignore[reportArgumentType]
                else:
                    wrapper.add_adapter(role, settings)
        self._net = model.net.eval()
        self._layers = [m for m in model.net.modules() if isinstance(m, BaseTunerLayer)]
        self._select(())
        named = [name for name, _ in model.net.named_parameters()]
        self._own = {
            role: _Places(model.net, {n.replace(f".{role}.", "."): n for n in named if f".{role}." in n})
            for role in own_adapter
        }
        for role, places in self._own.items():
            _make_masters(places.parameters(), kinds[role])

    def net(self, role: str) -> nn.Module:
        return self._net

    def own(self, role: str) -> dict[str, Tensor]:
        return self._own[role].parameters() if role in self._own else {}

    @contextlib.contextmanager
    def selected(self, role: str) -> Generator[None]:
        before = self._layers[0]._active_adapter
        self._select([role] if role in self._own else [])
        try:
            yield
        finally:
            self._select(before)

    def _select(self, names: Sequence[str]) -> None:
        """The one switch. peft's own set_adapter also toggles requires_grad, which loses gradients under sharding."""
        for layer in self._layers:
            layer._active_adapter = list(names)


def check_targets(net: nn.Module, targets: Sequence[str], rank: int) -> None:
    """Whether every target names a linear layer that an adapter of this rank fits.

    Raises:
        ValueError: names the target, and what there is.
    """
    linear = {name: module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    for target in targets:
        covered = [module for name, module in linear.items() if name == target or name.endswith(f".{target}")]
        full = max((min(module.in_features, module.out_features) for module in covered), default=rank)
        if rank > full:
            raise ValueError(f"roles.lora.rank is {rank}, but {target!r} has full rank at {full}; set at most that")
        if not covered:
            known = sorted(
                {n.rsplit(".", 1)[-1] if not n[-1].isdigit() else ".".join(n.split(".")[-2:]) for n in linear}
            )
            raise ValueError(
                f"roles.lora.targets: {target!r} matches no linear layer of this network; it has {', '.join(known)}"
            )
