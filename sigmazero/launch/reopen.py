"""Works on a run that is already there: scores it again, samples from it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from sigmazero.algorithms.base import Arm
from sigmazero.engines.base import generate_in_parts
from sigmazero.evaluate import finite_samples, scores_table
from sigmazero.launch.judge import Judge
from sigmazero.launch.local import Built, build
from sigmazero.pictures import grid, quantized, save_png
from sigmazero.progress import CycleProgress
from sigmazero.records import Prompt, RolloutRequest
from sigmazero.schedule import sigma_grid
from sigmazero.strategies import ode_and_return_last
from sigmazero.training import checkpoint
from sigmazero.training.folder import RunFolder, check_inputs, read_config

TILE = 96  # pixels a side of a picture on the contact sheet, about
DEFAULT_PROMPTS = ("the number 42 in red on yellow, serif font", "the number 07 in blue", "the number 93")


def evaluate_run(path: Path) -> str:
    """Samples and scores every arm of a run from its newest checkpoint. Returns the table of scores.

    Raises:
        ValueError: it is no run folder, it is in use, or it has no checkpoint yet.
    """
    config = read_config(path)
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
        return scores_table(judge.scores)


def sample_run(
    path: Path,
    prompts: Sequence[str],
    count: int,
    role: str | None,
    num_steps: int | None,
    guidance: float | None,
    seed: int,
    output: Path | None,
) -> Path:
    """Samples from a run's newest checkpoint; picture i of a prompt has seed ``seed + i``. Returns the contact sheet.

    Raises:
        ValueError: it is no run folder, has no checkpoint, the role is unknown, or the family cannot read a prompt.
    """
    if not all(text.strip() for text in prompts):
        raise ValueError("--prompt is empty; write what the picture should show, or leave the option out")
    built = build(read_config(path))
    cycle = restore(built, RunFolder(path))
    arm = choose_arm(built, role, num_steps, guidance)
    texts = list(prompts) or list(DEFAULT_PROMPTS)
    requests = [request_of(arm, Prompt(i, text), seed + j) for i, text in enumerate(texts) for j in range(count)]
    with CycleProgress(f"sampling {arm.role}", 0, len(requests)) as progress:
        trajectories = generate_in_parts(built.engine, requests, progress.update)
    pictures = quantized(built.roles.model.decode(finite_samples(trajectories)))
    folder = output or _next_folder(path / "samples")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--output: {folder} holds files already; name a new folder")
    for i, (request, picture) in enumerate(zip(requests, pictures, strict=True)):
        settings = {
            "prompt": request.prompt.text, "seed": request.seed, "run": path.name, "cycle": cycle,
            "arm": dataclasses.asdict(arm), "sigmas": request.sigmas.tolist(),
        }  # fmt: skip
        save_png(grid(picture[None], 1), folder / f"{i:05d}.png", settings)
    columns = min(count if count > 1 else 8, 16, len(pictures))
    save_png(grid(pictures, columns, max(1, TILE // pictures.shape[-1]), 4), folder / "sheet.png")
    return folder / "sheet.png"


def _next_folder(parent: Path) -> Path:
    """``0000``, ``0001``, ...: the first that is not there yet."""
    return next(p for p in (parent / f"{i:04d}" for i in itertools.count()) if not p.exists())


def restore(built: Built, folder: RunFolder) -> int:
    """Loads the newest checkpoint; returns its cycle.

    Raises:
        ValueError: there is none that can be read.
    """
    check_inputs(folder.path, built.inputs)
    found, refused = checkpoint.load_newest(folder.checkpoints)
    if found is None:
        raise ValueError(f"{folder.path} has no checkpoint that can be read yet" + "".join(f"; {r}" for r in refused))
    built.trainer.restore(found.tensors, found.numbers)
    return built.trainer.counters.cycle


def choose_arm(built: Built, role: str | None, num_steps: int | None, guidance: float | None) -> Arm:
    """The averaged student or policy as evaluation samples it, or the same of another role; some settings changed."""
    arms = {arm.role: arm for arm in reversed(built.algorithm.arms)}
    trained = [arm.role for arm in built.algorithm.arms if built.roles.kinds[arm.role] != "frozen"]
    chosen = role or trained[0]
    if chosen not in arms:
        raise ValueError(f"role {chosen!r} cannot be sampled; this run has {', '.join(sorted(arms))}")
    arm = arms[chosen]
    changes = {"num_steps": num_steps, "guidance": guidance}
    return dataclasses.replace(arm, **{name: value for name, value in changes.items() if value is not None})


def request_of(arm: Arm, prompt: Prompt, seed: int) -> RolloutRequest:
    sigmas, plan = sigma_grid(arm.num_steps, arm.shift), ode_and_return_last(0, arm.num_steps, seed)._replace(sde=None)
    return RolloutRequest(0, 0, prompt, arm.role, sigmas, arm.kind, arm.eta, arm.guidance, seed, plan)
