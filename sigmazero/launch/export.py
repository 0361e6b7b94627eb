"""Exports a role of a run, loads what was written in a fresh process, and compares its picture with the run's own."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sigmazero import export, seeds
from sigmazero.algorithms.base import Arm
from sigmazero.config import LoraConfig, RunConfig
from sigmazero.data import PromptStream
from sigmazero.engines.local import LocalEngine
from sigmazero.launch import reload
from sigmazero.launch.local import Built, build, load_model, texts_of, use_threads
from sigmazero.launch.reopen import request_of, restore
from sigmazero.launch.sources import DEFAULT_PROMPTS, GLYPH_FILE, choose_arm, read_contract
from sigmazero.models.conditions import ConditionsFolder, KnownPrompts
from sigmazero.models.folder import has_encoders
from sigmazero.models.roles import Roles
from sigmazero.records import Prompt, RolloutRequest
from sigmazero.tensors import read_tensors, sync, write_tensors
from sigmazero.training.folder import RunFolder, read_config, write_json

Form = Literal["pipeline", "lora", "weights"]
FORMS: tuple[Form, ...] = ("pipeline", "lora", "weights")
TOLERANCE = 1e-3  # of a picture in [0, 1]


@dataclass(frozen=True)
class Exported:
    """What was written, and how far the reloaded picture is from the run's own."""

    folder: Path
    arm: Arm
    cycle: int
    difference: float
    bound: int  # LoRA tensors that diffusers' loader put into the network; 0 of the other forms


def export_run(path: Path, out: Path, role: str | None = None, form: str = "pipeline") -> Exported:
    """Writes a role of a run's newest checkpoint to a new folder, whole or not at all, and checks it.

    Args:
        role: a trained or averaged role that is sampled; None is the averaged student or policy.
        form: ``pipeline`` (a diffusers folder), ``lora`` (an adapter's file) or ``weights`` (the network alone).
    Raises:
        ValueError: the run cannot be exported so, the base is not what it was trained on, or ``out`` holds something;
            then nothing is written. Or what was written does not give the run's picture; it stays, to be looked at.
    """
    config = read_config(path)
    _check(config, out, form)
    aside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)  # of an export that was killed
    aside.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        try:
            arm, cycle = _write(path, config, aside, Path(work), role, form)  # frees the networks as it returns
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync(aside)
        aside.rename(out)
        sync(out.parent)
        difference, bound = _compare(config, out, Path(work))
    return Exported(out, arm, cycle, difference, bound)


def _check(config: RunConfig, out: Path, form: str) -> None:
    if form not in FORMS:
        raise ValueError(f"--as is {form!r}; it is one of {', '.join(FORMS)}")
    if config.model.family == "glyph" and form != "weights":
        raise ValueError(f"--as {form}: glyph has no diffusers pipeline; use --as weights, a file for model.path")
    if form == "lora" and config.roles.storage != "lora":
        raise ValueError("--as lora: this run trained full copies; use --as pipeline or --as weights")
    if config.model.family != "glyph" and not has_encoders(config.model.path):
        raise ValueError(
            f"model.path of this run, {config.model.path}, has no text encoder, and diffusers needs it to sample the "
            "export, which is checked so; put the encoder's and tokenizer's folders back there"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--to: {out} holds something already; name a new folder")


def _write(path: Path, config: RunConfig, folder: Path, work: Path, role: str | None, form: str) -> tuple[Arm, int]:
    """The export in ``folder``, and in ``work`` what the comparison needs: start, noise and the run's picture."""
    with build(config, encode=_encode_first) as built:
        cycle = restore(built, RunFolder(path))
        arm = _arm(built, role)
        model, own = built.roles.model, built.roles.parameters(arm.role)
        adapter = (config.roles.lora or LoraConfig()) if config.roles.storage == "lora" else None
        scale = adapter.alpha / adapter.rank if adapter else 1.0
        merged = export.merged_weights(model.net.state_dict(), own, scale)
        about = {
            "form": form, "run": path.name, "cycle": cycle, "base_dtype": config.model.dtype,
            "base_fingerprint": built.roles.base_fingerprint,
        }  # fmt: skip
        if form in ("lora", "weights") and config.model.family != "glyph":
            about["base"] = _whereabouts(config.model.path)
        if "embedded_guidance" in model.metadata():
            about["embedded_guidance"] = float(model.metadata()["embedded_guidance"])
        write_json(folder / export.CONTRACT, export.contract(arm, model.metadata(), **about))
        if config.model.family == "glyph":
            write_tensors(folder / GLYPH_FILE, merged, model.metadata())
        else:
            _write_diffusers(config, folder, built, arm, form, merged)
        request = request_of(arm, (built.evaluation_prompts or [Prompt(0, DEFAULT_PROMPTS[0])])[0], seed=0)
        _write_start(work / "start.safetensors", model.latent_shape, request)
        exact = _exact(config, built, request, merged)
        write_tensors(work / "ours.safetensors", {"picture": _picture(exact, request)})
    return arm, cycle


def _encode_first(model: KnownPrompts, prompts: PromptStream, cache: ConditionsFolder | None) -> None:
    """The prompt that the export is checked with; the others are not needed."""
    model.prepare(texts_of(prompts)[:1], cache=cache)


def _whereabouts(base: str) -> str:
    """A folder by its whole path, so that it is found from anywhere; a hub id as it is."""
    return str(Path(base).resolve()) if Path(base).is_dir() else base


def _arm(built: Built, role: str | None) -> Arm:
    """How the role is sampled; a ValueError where the family's pipeline cannot."""
    arm = choose_arm(built.algorithm, role)
    if built.roles.kinds[arm.role] == "frozen":
        raise ValueError(f"--role: {arm.role} is the base that the run started from, and was not trained")
    config = built.config.model
    if config.family != "glyph":
        export.check_guidance(arm, config.guidance_norm, built.roles.model.guidance_norm)
        export.scheduler(config.family, arm)
    return arm


def _write_diffusers(
    config: RunConfig, folder: Path, built: Built, arm: Arm, form: str, merged: dict[str, Tensor]
) -> None:
    export.scheduler(config.model.family, arm).save_pretrained(folder / "scheduler")
    if form == "lora":
        settings = config.roles.lora or LoraConfig()
        export.write_lora(folder, built.roles.parameters(arm.role), settings, config.model.path)
        return
    export.write_transformer(folder, built.roles.model.net, merged)
    if form == "pipeline":
        export.copy_parts(export.base_folder(config.model.path), folder, is_distilled=arm.guidance == 1)


def _write_start(path: Path, shape: tuple[int, ...], request: RolloutRequest) -> None:
    """The noise that the run's own sampler draws for a request, so that another process can sample the same picture."""
    steps = range(len(request.sigmas) - 1)
    noise = {f"noise_{i}": seeds.normal(request.seed, "step_noise", [request.sample], shape, 0, i) for i in steps}
    start = seeds.normal(request.seed, "initial_noise", [request.sample], shape)
    write_tensors(path, {"start": start, **noise}, {"prompt": request.prompt.text})


def _exact(config: RunConfig, built: Built, request: RolloutRequest, merged: dict[str, Tensor]) -> Roles:
    """The roles to sample the run's picture from: the run's own, or in half precision its merged weights in fp32.

    Half precision, of text encoders above all, moves a picture by more than an error in the export would.
    """
    if config.model.dtype == "float32" or not isinstance(built.roles.model, KnownPrompts):
        return built.roles
    exact = load_model(config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})}))
    assert isinstance(exact, KnownPrompts)
    exact.prepare([request.prompt.text])
    exact.net.load_state_dict(merged)
    exact.net.to(next(built.roles.model.net.parameters()).device)
    return Roles(exact, {request.policy: "frozen"}, {}, guidance_norm=config.model.guidance_norm)  # pyright: ignore[reportArgumentType]


def _picture(roles: Roles, request: RolloutRequest) -> Tensor:
    device = next(roles.model.net.parameters()).device
    (trajectory,) = LocalEngine(roles, device=device).generate([request])
    with torch.no_grad():
        return roles.model.decode(trajectory.latents[-1:])


def _compare(config: RunConfig, out: Path, work: Path) -> tuple[float, int]:
    """The greatest difference of the two pictures, and the number of LoRA tensors that were bound.

    Raises:
        ValueError: what was written does not load, loads in part, or gives another picture.
    """
    ours = read_tensors(work / "ours.safetensors")[0]["picture"]
    theirs, counts = _reload_glyph(config, out, work) if config.model.family == "glyph" else _reload(config, out, work)
    if counts.get("bound") != counts.get("exported"):
        raise ValueError(
            f"{out} was written, but diffusers binds {counts['bound']} of its {counts['exported']} tensors"
        )
    difference = (theirs["picture"] - ours).abs().max().item()
    if not difference <= TOLERANCE:
        raise ValueError(
            f"{out} was written, but do not use it: its picture differs from the run's own by {difference:.3g}, more "
            f"than {TOLERANCE}"
        )
    if "base" in theirs and torch.equal(theirs["base"], theirs["picture"]):
        raise ValueError(f"{out} was written, but its LoRA does not change the picture of the base at all")
    return difference, counts.get("bound", 0)


def _reload(config: RunConfig, out: Path, work: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """What a process with diffusers and without sigmazero makes of the export."""
    base, result = export.base_folder(config.model.path), work / "theirs.safetensors"
    command = [sys.executable, reload.__file__, out, base, work / "start.safetensors", result]
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ValueError(f"{out} was written, but diffusers cannot sample it: {last}")
    tensors, metadata = read_tensors(result)
    return tensors, json.loads(metadata["counts"])


def _reload_glyph(config: RunConfig, out: Path, work: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        picture = pool.submit(sample_weights, config, out, work / "start.safetensors").result()
    return {"picture": picture}, {}


def sample_weights(config: RunConfig, out: Path, start: Path) -> Any:
    """The picture of an exported weight file as ``model.path``; runs in a process of its own."""
    use_threads(config.training.threads)
    arm = read_contract(out).arm
    model = load_model(
        config.model_copy(update={"model": config.model.model_copy(update={"path": str(out / GLYPH_FILE)})})
    )
    roles = Roles(model, {arm.role: "frozen"}, {}, guidance_norm=config.model.guidance_norm)
    return _picture(roles, request_of(arm, Prompt(0, read_tensors(start)[1]["prompt"]), seed=0))
