"""A trained role as files that others load: a diffusers pipeline, a LoRA file, or weights, with the sampler's contract.

What is written is fp32: a merged adapter is often smaller than bfloat16's rounding of the weight it is added to. The
reader picks its precision as it loads (``torch_dtype``).
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from sigmazero.algorithms.base import Arm
from sigmazero.config import LoraConfig
from sigmazero.schedule import sigma_grid
from sigmazero.tensors import write_tensors
from sigmazero.training.folder import write_json

CONTRACT = "sampler.json"
LORA_FILE = "pytorch_lora_weights.safetensors"
GUIDANCE = {"sd3": "guidance_scale", "flux2": "guidance_scale", "qwen_image": "true_cfg_scale"}  # of pipeline calls
_TOLERANCE = 1e-6  # of a sigma
_WRAPPERS = re.compile(r"^module\.|(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def scheduler(family: str, arm: Arm) -> FlowMatchEulerDiscreteScheduler:
    """A scheduler whose sigmas, as the family's pipeline sets them at the arm's number of steps, are the arm's grid.

    Pipelines that hand over ``linspace(1, 1/N, N)`` get the static shift alone. SD3's hands over nothing, and its
    scheduler spaces N sigmas linearly from 1 to 1/1000, ``u_i = 1 - c i``, ``c = .999 / (N - 1)``. With a dynamic shift
    ``k = e^mu`` and a stretch to the last sigma ``1 - sigma_i`` is proportional to ``i / (1 - c i (k - 1) / k)``; ours
    is to ``i / (1 - i (s - 1) / (s N))``. They are equal where ``(k - 1) / k = (s - 1) / (s N c)`` (B08).

    Raises:
        ValueError: diffusers has no scheduler for this transition or this grid.
    """
    steps, shift = arm.num_steps, arm.shift
    settings: dict[str, Any] = {"shift": shift}
    if family == "sd3":
        share = (shift - 1) / shift * (steps - 1) / (0.999 * steps)  # (k - 1) / k
        if share >= 1:
            raise ValueError(
                f"{steps} steps of shift {shift} have no scheduler in diffusers, whose table has 1000 sigmas"
            )
        mu, last = -math.log1p(-share), float(sigma_grid(steps, shift)[-2])
        settings = {"use_dynamic_shifting": True, "base_shift": mu, "max_shift": mu}
        settings["shift_terminal"] = last if steps > 1 else None  # one sigma is 1, with nothing to stretch
    made = FlowMatchEulerDiscreteScheduler(stochastic_sampling=_renoises(arm), **settings)
    gap = (pipeline_sigmas(family, made, steps) - sigma_grid(steps, shift)).abs().max().item()
    if not gap <= _TOLERANCE:
        raise ValueError(f"{steps} steps of shift {shift}: diffusers' sigmas would be off by {gap:.3g}")
    return made


def pipeline_sigmas(family: str, made: FlowMatchEulerDiscreteScheduler, num_steps: int) -> Tensor:
    """The sigmas fp32 ``[N+1]`` that the family's pipeline samples with: its own call of ``set_timesteps``."""
    if family == "sd3":
        made.set_timesteps(num_steps, mu=made.config["base_shift"])
    else:
        made.set_timesteps(
            sigmas=np.linspace(1.0, 1 / num_steps, num_steps).tolist(), mu=0.0
        )  # a static shift has no mu
    return torch.as_tensor(made.sigmas)


def _renoises(arm: Arm) -> bool:
    """Whether each step draws its noise afresh, as ``stochastic_sampling`` does; False is Euler."""
    if arm.kind == "ode" or arm.eta == 0:
        return False
    if (arm.kind, arm.eta) == ("cps", 1.0):
        return True
    raise ValueError(f"{arm.kind} with eta {arm.eta} has no scheduler in diffusers, which knows Euler and re-noising")


def check_guidance(arm: Arm, norm: str, family_norm: str) -> None:
    """Refuses guidance that the family's pipeline does not have.

    Raises:
        ValueError: the scale is below 1, or the norm is not the family's.
    """
    if arm.guidance < 1:
        raise ValueError(f"guidance is {arm.guidance}; diffusers' pipelines switch guidance off below 1")
    if arm.guidance != 1 and norm not in ("family", family_norm):
        raise ValueError(
            f"model.guidance_norm is {norm!r}, but the pipeline of this family guides with {family_norm!r}"
        )


def contract(arm: Arm, metadata: Mapping[str, str], **about: Any) -> dict[str, Any]:
    """What ``sampler.json`` says: the grid, the transition, the guidance, and the call of the pipeline (B08)."""
    family = metadata["family"]
    values = {
        **about, "family": family, "role": arm.role, "num_steps": arm.num_steps, "shift": arm.shift,
        "sigmas": sigma_grid(arm.num_steps, arm.shift).tolist(), "kind": arm.kind, "eta": arm.eta,
        "guidance": arm.guidance, "prediction": "velocity: eps - x0",
    }  # fmt: skip
    if family in GUIDANCE:
        size = {side: int(metadata[side]) for side in ("height", "width")}
        scale = float(metadata.get("embedded_guidance", arm.guidance))  # FLUX.2-dev's call is told what it embeds
        values["call"] = {"num_inference_steps": arm.num_steps, GUIDANCE[family]: scale, **size}
        if family == "qwen_image" and arm.guidance != 1:
            values["call"]["negative_prompt"] = ""  # without one its pipeline does not guide
    return values


def plain_name(name: str) -> str:
    """A weight's name without what compile, DDP, FSDP, checkpointing and peft put into it."""
    return _WRAPPERS.sub("", name).replace(".base_layer.", ".")


def merged_weights(base: Mapping[str, Tensor], own: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """A network's weights with a role's put in: fp32 on the host, named as in the bare network.

    Args:
        base: the state of the network that holds the role, adapters of all roles included.
        own: what the role owns: ``LAYER.lora_A.weight`` and ``lora_B``, or weights that replace the base's.
        scale: of the adapters, alpha / rank.
    Raises:
        ValueError: the role owns something that the network does not have.
    """
    merged = {plain_name(name): _exact(value) for name, value in base.items() if ".lora_" not in name}
    own = {plain_name(name): _exact(value) for name, value in own.items()}
    for name, value in own.items():
        target = re.sub(r"\.lora_[AB]\.weight$", ".weight", name)
        if target not in merged:
            raise ValueError(f"the role's {name} belongs to no weight of the network")
        if name == target:
            merged[name] = value
        elif ".lora_A." in name:
            merged[target] = merged[target] + scale * (own[name.replace(".lora_A.", ".lora_B.")] @ value)
    return merged


def _exact(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return value.float() if value.is_floating_point() else value


def write_transformer(folder: Path, net: Any, weights: Mapping[str, Tensor]) -> None:
    """Writes ``folder/transformer`` as diffusers does. The names must be those of the class."""
    with torch.device("meta"):
        bare: nn.Module = type(net).from_config(net.config)
    bare.load_state_dict(dict(weights), strict=True, assign=True)
    bare.save_pretrained(folder / "transformer")  # pyright: ignore[reportCallIssue]


def write_lora(folder: Path, own: Mapping[str, Tensor], settings: LoraConfig, base: str) -> None:
    """Writes an adapter with its alpha for diffusers' ``load_lora_weights``, and in ``peft`` for peft (B13, B27)."""
    own = {plain_name(name): value for name, value in own.items()}
    layers = sorted({name.rsplit(".lora_", 1)[0] for name in own})
    config = {"r": settings.rank, "lora_alpha": settings.alpha, "target_modules": layers}
    said = {"format": "pt", "lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in config.items()})}
    write_tensors(folder / LORA_FILE, {f"transformer.{name}": value for name, value in own.items()}, said)
    (folder / "peft").mkdir()
    named = {f"base_model.model.{name}": value for name, value in own.items()}
    write_tensors(folder / "peft" / "adapter_model.safetensors", named, {"format": "pt"})
    adapter = {"peft_type": "LORA", **config, "base_model_name_or_path": base, "inference_mode": True}
    write_json(folder / "peft" / "adapter_config.json", adapter)


def base_folder(path: str) -> Path:
    """The folder of a pipeline, which a hub id is downloaded to: safetensors, no remote code."""
    return Path(path) if Path(path).is_dir() else Path(DiffusionPipeline.download(path, use_safetensors=True))


def copy_parts(base: Path, folder: Path, *, is_distilled: bool) -> None:
    """Copies a pipeline but its transformer and scheduler: the parts that its index names, and its licence.

    Args:
        is_distilled: what a klein pipeline is told, which then ignores the guidance of its default call.
    """
    index = json.loads((base / "model_index.json").read_text())
    for part in _parts(index):
        shutil.copytree(base / part, folder / part)
    for path in base.glob("LICENSE*"):
        shutil.copy(path, folder)
    index["scheduler"] = ["diffusers", FlowMatchEulerDiscreteScheduler.__name__]
    if index["_class_name"] == "Flux2KleinPipeline":
        index["is_distilled"] = is_distilled
    write_json(folder / "model_index.json", index)


def _parts(index: Mapping[str, Any]) -> Sequence[str]:
    named = [name for name, kind in index.items() if isinstance(kind, list) and kind[0] is not None]
    return [name for name in named if name not in ("transformer", "scheduler")]
