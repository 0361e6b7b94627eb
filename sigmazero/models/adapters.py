"""LoRA files that adapters go on from, and what share of a network adapters cover.

An adapter changes a layer by ``alpha / rank * B A``, with ``A`` ``[rank, in]`` and ``B`` ``[out, rank]``. What a file
says is taken as it is or refused: its change of the network is never scaled, cut or left out in part (B13, B27).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigmazero.config import LoraConfig
from sigmazero.tensors import read_tensors

FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")  # as diffusers and as peft write them
_SETTINGS_FILE = "adapter_config.json"  # of peft, beside its file
_SETTINGS = "lora_adapter_metadata"  # of diffusers, in the file's metadata
_PREFIX = re.compile(r"^(transformer|base_model\.model)\.")
# Settings of peft that make something else of A and B than alpha / rank times their product.
_OTHER_MATHS = (
    *("use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication"),
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"),
)
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # the others change the base as well


@dataclass(frozen=True)
class Adapter:
    """An adapter as its file has it.

    ``weights`` are named as a role names its own, ``LAYER.lora_A.weight`` and ``LAYER.lora_B.weight``; ``alphas`` are
    all that the file says of alpha, by where it says so; ``fingerprint`` hashes the file and its settings.
    """

    path: Path
    weights: Mapping[str, Tensor]
    alphas: Mapping[str, float]
    fingerprint: str


def read_adapter(path: str | Path) -> Adapter:
    """Reads a LoRA of diffusers or peft, from its folder or file: safetensors only.

    Raises:
        ValueError: there is none, or it is not of the plain kind.
    """
    file = _find(Path(path))
    try:
        tensors, metadata = read_tensors(file)
    except ValueError as error:
        raise ValueError(f"roles.lora.init: {error}") from None
    said = _settings(file, metadata)
    _check_plain(file, said)
    named = {_PREFIX.sub("", name): value for name, value in tensors.items()}
    weights = {name: value for name, value in named.items() if not name.endswith(".alpha")}
    try:
        alphas = {name: float(value) for name, value in named.items() if name not in weights}
        alphas |= {name: float(said[name]) for name in ("lora_alpha",) if name in said}
        alphas |= {f"alpha of {name}": float(value) for name, value in dict(said.get("alpha_pattern") or {}).items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"roles.lora.init: {file} has an alpha that is no number: {error}") from None
    content = file.read_bytes() + json.dumps(said, sort_keys=True).encode()
    return Adapter(file, weights, alphas, hashlib.sha256(content).hexdigest()[:16])


def check_start(adapter: Adapter, settings: LoraConfig, net: nn.Module, targets: Sequence[str]) -> None:
    """Whether adapters of a network, which need not be there yet, can go on from a file.

    Args:
        targets: of the adapters, each the end of the name of a linear layer.
    Raises:
        ValueError: as ``start_adapters``.
    """
    own: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear) and any(f".{name}".endswith(f".{target}") for target in targets):
            own[f"{name}.lora_A.weight"] = torch.empty(settings.rank, module.in_features, device="meta")
            own[f"{name}.lora_B.weight"] = torch.empty(module.out_features, settings.rank, device="meta")
    _check_fits(adapter, settings, own)


@torch.no_grad()
def start_adapters(settings: LoraConfig, roles: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Puts the adapter of ``settings.init`` into what each role owns: exactly its change of the network.

    Args:
        roles: role -> its adapter's parameters, by name.
    Raises:
        ValueError: the file has other layers, sizes, rank or alpha than the settings make; it is said what to set.
    """
    adapter = read_adapter(settings.init)
    for own in roles.values():
        _check_fits(adapter, settings, own)
        for name, value in own.items():
            value.copy_(adapter.weights[name])


def _find(path: Path) -> Path:
    found = [path] if path.is_file() else [path / name for name in FILES if (path / name).is_file()]
    if len(found) != 1:
        what = "holds both" if found else "holds none" if path.exists() else "is not there"
        raise ValueError(
            f"roles.lora.init: {path} {what}; name a folder with {' or '.join(FILES)}, or such a file itself"
        )
    return found[0]


def _settings(file: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """What is said of the transformer's adapter, by peft's names; empty where nothing is said."""
    beside = file.with_name(_SETTINGS_FILE)
    text = metadata.get(_SETTINGS) or (beside.read_text() if beside.is_file() else "{}")
    try:
        return {_PREFIX.sub("", name): value for name, value in dict(json.loads(text)).items()}
    except (ValueError, TypeError) as error:
        raise ValueError(f"roles.lora.init: the settings of {file} are no JSON object: {error}") from None


def _check_plain(file: Path, said: Mapping[str, Any]) -> None:
    odd = [name for name in _OTHER_MATHS if said.get(name)]
    odd += ["init_lora_weights"] if said.get("init_lora_weights") not in _PLAIN_STARTS else []
    odd += ["peft_type"] if said.get("peft_type", "LORA") != "LORA" else []
    if odd:
        raise ValueError(
            f"roles.lora.init: {file} has {odd[0]} {said[odd[0]]!r}, which plain LoRA cannot go on from; merge it into "
            "the base and set that as model.path"
        )


def _check_fits(adapter: Adapter, settings: LoraConfig, own: Mapping[str, Tensor]) -> None:
    _check_layers(adapter, own)
    _check_scale(adapter, settings, own)


def _check_layers(adapter: Adapter, own: Mapping[str, Tensor]) -> None:
    unknown, missing = adapter.weights.keys() - own.keys(), own.keys() - adapter.weights.keys()
    if unknown:
        raise ValueError(
            f"roles.lora.init: {adapter.path} has {_some(unknown)}, where this run has no adapter; set "
            "roles.lora.targets to the layers of the file, and model.path to the network that it was made for"
        )
    if missing:
        raise ValueError(
            f"roles.lora.init: {adapter.path} lacks {_some(missing)}; set roles.lora.targets to the layers of the "
            "file, if it was made for this network at all"
        )


def _check_scale(adapter: Adapter, settings: LoraConfig, own: Mapping[str, Tensor]) -> None:
    """Same rank in every layer, same alpha wherever it is said; then the sizes."""
    ranks = {name: value.shape[0] for name, value in adapter.weights.items() if ".lora_A." in name and value.ndim}
    if not adapter.alphas:
        raise ValueError(
            f"roles.lora.init: {adapter.path} does not say its alpha, without which its strength is unknown; write "
            f'{{"lora_alpha": ...}} into {_SETTINGS_FILE} beside it'
        )
    for name, values, wanted in (("rank", ranks, settings.rank), ("alpha", adapter.alphas, settings.alpha)):
        other = next((where for where, value in values.items() if value != wanted), None)
        if other is not None and len(set(values.values())) > 1:
            raise ValueError(
                f"roles.lora.init: {adapter.path} has several values of {name} ({other}: {values[other]:g}), and "
                "adapters of a run have one; merge it into the base and set that as model.path"
            )
        if other is not None:
            raise ValueError(
                f"roles.lora.{name} is {wanted:g}, but that of {adapter.path} is {values[other]:g}; set it to that"
            )
    for name, value in adapter.weights.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"roles.lora.init: {name} of {adapter.path} is {list(value.shape)}, and this network needs "
                f"{list(own[name].shape)}; it is of another network"
            )


def _some(names: Collection[str]) -> str:
    """The first layers of some weights."""
    layers = sorted({re.sub(r"\.lora_[AB]\.weight$", "", name) for name in names})
    return ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")


@dataclass(frozen=True)
class Coverage:
    """How much of a network one role's adapter trains and touches; all but ``rank`` are counts."""

    rank: int
    layers: int
    trained: int  # weights of the adapter
    covered: int  # weights of the layers that it changes
    total: int  # weights of the network, adapters left out

    def __str__(self) -> str:
        """``LoRA: rank 4 over 24 layers: 9,216 weights trained a role, 12.3 % of the network's 75,000; ...``"""
        return (
            f"LoRA: rank {self.rank} over {self.layers} layers: {self.trained:,} weights trained a role, "
            f"{self.trained / self.total:.2%} of the network's {self.total:,}; "
            f"those layers hold {self.covered / self.total:.0%} of it"
        ).replace("%", " %")


def coverage(net: nn.Module, own: Mapping[str, Tensor]) -> Coverage:
    """Counts what an adapter covers.

    Args:
        net: the network that holds the adapters; on the meta device too.
        own: what one role owns, ``LAYER.lora_A.weight`` and ``LAYER.lora_B.weight``.
    """
    layers = {name.rsplit(".lora_", 1)[0] for name in own}
    base = {n.replace(".base_layer.", "."): p.numel() for n, p in net.named_parameters() if ".lora_" not in n}
    return Coverage(
        rank=max(value.shape[0] for name, value in own.items() if ".lora_A." in name),
        layers=len(layers),
        trained=sum(value.numel() for value in own.values()),
        covered=sum(count for name, count in base.items() if name.rsplit(".", 1)[0] in layers),
        total=sum(base.values()),
    )
