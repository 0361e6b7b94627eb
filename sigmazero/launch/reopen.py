"""Works on what is already there: scores a run again, samples from a run, an export or a base model."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from sigmazero.algorithms.base import Arm
from sigmazero.config import changed
from sigmazero.engines.local import LocalEngine
from sigmazero.evaluate import finite_samples, scores_table
from sigmazero.launch.judge import Judge
from sigmazero.launch.local import Built, build
from sigmazero.launch.sources import Source, Wish, newest, open_source
from sigmazero.pictures import contact_sheet, grid, quantized, save_png, thumbnail
from sigmazero.progress import CycleProgress
from sigmazero.records import Prompt, RolloutRequest
from sigmazero.report import write_report
from sigmazero.schedule import sigma_grid
from sigmazero.strategies import ode_and_return_last
from sigmazero.training.folder import RunFolder, check_inputs, read_config

LARGE, SMALL, MANY = 256, 96, 256  # pixels of the longer side of a tile on the contact sheet; small ones beyond MANY


def evaluate_run(path: Path, overrides: Sequence[str] = ()) -> str:
    """Samples and scores every arm of a run from its newest checkpoint. Returns the table of scores.

    Args:
        overrides: settings under ``evaluate``, ``rewards`` and ``plugins`` that differ from the run's own.
    Raises:
        ValueError: it is no run folder, it is in use, it has no checkpoint yet, or a setting is not one of these.
    """
    config = changed(read_config(path), overrides, ("evaluate", "rewards", "plugins"))
    with RunFolder(path) as folder, build(config) as built:
        cycle = restore(built, folder)
        judge = Judge(
            config,
            built.algorithm,
            built.roles,
            built.engine,
            folder,
            built.scorer,
            built.evaluation_prompts,
            fresh=True,
        )
        judge.score_fixed()
        judge.score_moving()
        judge.write(cycle)  # once, at the end: the former scores stay until there are new ones
        write_report(folder.path)
        return scores_table(judge.scores)


def restore(built: Built, folder: RunFolder) -> int:
    """Loads the newest checkpoint; returns its cycle.

    Raises:
        ValueError: there is none that can be read.
    """
    check_inputs(folder.path, built.inputs)
    found = newest(folder)
    built.trainer.restore(found.tensors, found.numbers)
    return built.trainer.counters.cycle


def sample(
    path: str, prompts: Sequence[str], count: int, seed: int, wish: Wish, batch_size: int, output: Path | None
) -> tuple[Path, int]:
    """Samples what ``path`` holds. Returns the contact sheet and the number of pictures.

    Picture i of every prompt has the seed ``seed + i`` and depends on nothing but its prompt and its seed: neither on
    the other prompts nor on ``count`` or ``batch_size``.

    Args:
        prompts: none is the family's own, which only glyph has.
        output: None is a new folder in ``samples`` of the run, or of the working folder where it is no run.
    Raises:
        ValueError: it cannot be sampled, an option does not fit it, or ``output`` holds files.
    """
    if not all(text.strip() for text in prompts):
        raise ValueError("--prompt is empty; write what the picture should show, or leave the option out")
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output: {output} holds files already; name a new folder")
    source = open_source(path, prompts, wish)
    for departure in source.departures:
        print(f"warning: {path} was made for {departure}", file=sys.stderr)
    folder = output or _next_folder(Path(path) / "samples" if source.about["kind"] == "run" else Path("samples"))
    device = next(source.roles.model.net.parameters()).device
    engine = LocalEngine(source.roles, max_batch=batch_size, device=device)
    requests = [
        request_of(source.arm, Prompt(i, text), seed + j, source.sigmas)
        for i, text in enumerate(source.prompts)
        for j in range(count)
    ]
    tiles, tile = dict[int, Image.Image](), LARGE if len(requests) <= MANY else SMALL
    with CycleProgress(f"sampling {source.arm.role}", 0, len(requests)) as progress:
        for part in _batches(source, requests, batch_size):
            latents = finite_samples(engine.generate([requests[i] for i in part]))
            with torch.no_grad():
                pictures = [quantized(source.roles.decode(row))[0].cpu() for row in latents.split(1)]
            for i, picture in zip(part, pictures, strict=True):
                tiles[i] = _save(source, requests[i], picture, folder / f"{i:05d}.png", tile)
            progress.update(len(tiles))
    columns = min(count if count > 1 else 8, 16, len(requests))
    save_png(contact_sheet([tiles[i] for i in range(len(tiles))], columns), folder / "sheet.png")
    return folder / "sheet.png", len(requests)


def _batches(source: Source, requests: Sequence[RolloutRequest], size: int) -> Iterator[list[int]]:
    """Positions of requests that go through the network together: conditions of one length, so that none is padded for
    the sake of another and a picture has the same bits whatever the others are."""
    lengths: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
        condition = source.roles.model.encode([request.prompt.text])
        lengths.setdefault(str([value.shape for value in condition.fields.values()]), []).append(i)
    for rows in lengths.values():
        yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _save(source: Source, request: RolloutRequest, picture: Tensor, path: Path, tile: int) -> Image.Image:
    """Writes a picture with all that it was made with, and returns its tile of the contact sheet."""
    arm = source.arm
    settings = {
        **source.about, "version": importlib.metadata.version("sigmazero"), "prompt": request.prompt.text,
        "seed": request.seed, "role": arm.role, "steps": arm.num_steps, "sigmas": request.sigmas.tolist(),
        "shift": None if math.isnan(arm.shift) else arm.shift, "guidance": arm.guidance, "transition": arm.kind,
        "eta": arm.eta,
    }  # fmt: skip
    whole = grid(picture[None], 1)
    save_png(whole, path, settings)
    return thumbnail(whole, tile)


def _next_folder(parent: Path) -> Path:
    """``0000``, ``0001``, ...: the first that is not there yet."""
    return next(p for p in (parent / f"{i:04d}" for i in itertools.count()) if not p.exists())


def request_of(arm: Arm, prompt: Prompt, seed: int, sigmas: Tensor | None = None) -> RolloutRequest:
    """One picture of an arm, on its own grid unless another is given."""
    grid = sigma_grid(arm.num_steps, arm.shift) if sigmas is None else sigmas
    plan = ode_and_return_last(0, arm.num_steps, seed)._replace(sde=None)
    return RolloutRequest(0, 0, prompt, arm.role, grid, arm.kind, arm.eta, arm.guidance, seed, plan)
