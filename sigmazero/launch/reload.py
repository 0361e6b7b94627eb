"""Samples an export as its user would: run as a script in a process of its own, with diffusers and without sigmazero.

``python reload.py EXPORT BASE START RESULT``: START holds the first latent and each step's noise, RESULT the picture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.schedulers import scheduling_flow_match_euler_discrete as euler
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def main(export: Path, base: Path, start: Path, result: Path) -> None:
    said = json.loads((export / "sampler.json").read_text())
    pipeline: Any = _open(export, base, said["form"])
    with safe_open(start, "pt") as file:
        prompt = file.metadata()["prompt"]
    given = load_file(start)
    counts: dict[str, int] = {}
    found: dict[str, torch.Tensor] = {}
    if said["form"] == "lora":
        found["base"] = _sample(pipeline, prompt, said, given)
        pipeline.transformer.to(getattr(torch, said["base_dtype"])).float()  # the base that it was trained over
        counts = _load_lora(pipeline, export)
    found["picture"] = _sample(pipeline, prompt, said, given)
    found["sigmas"] = pipeline.scheduler.sigmas
    save_file(found, result, {"counts": json.dumps(counts)})


def _open(export: Path, base: Path, form: str) -> Any:
    parts: dict[str, Any] = {}
    if form != "pipeline":
        parts["scheduler"] = euler.FlowMatchEulerDiscreteScheduler.from_pretrained(export, subfolder="scheduler")
    if form == "weights":
        kind = getattr(diffusers, json.loads((base / "model_index.json").read_text())["transformer"][1])
        parts["transformer"] = kind.from_pretrained(export, subfolder="transformer")
    pipeline: Any = DiffusionPipeline.from_pretrained(
        export if form == "pipeline" else base, torch_dtype=torch.float32, use_safetensors=True, **parts
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to("cuda" if torch.cuda.is_available() else "cpu")


def _load_lora(pipeline: Any, export: Path) -> dict[str, int]:
    """The loader only warns of keys that match nothing, so what is in the network is counted (B27)."""
    pipeline.load_lora_weights(export, adapter_name="export")
    file = load_file(export / "pytorch_lora_weights.safetensors")
    inside = {f"transformer.{n.replace('.export.', '.')}": p for n, p in pipeline.transformer.named_parameters()}
    bound = [name for name, value in file.items() if name in inside and torch.equal(inside[name].cpu(), value)]
    return {"exported": len(file), "bound": len(bound)}


def _sample(pipeline: Any, prompt: str, said: dict[str, Any], given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The picture fp32 ``[1, 3, H, W]`` of the contract's call; a step's noise is the given one."""
    latents, call = given["start"], said["call"]
    if said["family"] == "flux2":  # its pipeline packs what it is given
        cell = 2 * pipeline.vae_scale_factor
        latents = latents.transpose(1, 2).unflatten(2, (call["height"] // cell, call["width"] // cell))
    noise = iter([given[f"noise_{i}"] for i in range(said["num_steps"])])
    euler.randn_tensor = lambda shape, device, **_: next(noise).reshape(shape).to(device)
    return pipeline(prompt=prompt, latents=latents, output_type="pt", **call).images.float().cpu().contiguous()


if __name__ == "__main__":
    sys.modules["sigmazero"] = None  # pyright: ignore[reportArgumentType]  # importing it fails, wherever it is installed
    main(*map(Path, sys.argv[1:]))
