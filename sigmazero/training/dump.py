"""Rollouts on disk: saved with their scores, and trained on again without sampling."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sigmazero.records import Prompt, RolloutRequest, StepPlan, Trajectory
from sigmazero.tensors import read_tensors, write_tensors

FOLDER = "rollouts"  # in a run folder
_SUFFIX = ".safetensors"


def save(folder: Path, cycle: int, trajectories: list[Trajectory], values: Mapping[str, torch.Tensor]) -> Path:
    """Writes the rollout of a cycle and its values by reward, ``folder/CYCLE.safetensors``, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"values/{name}": value for name, value in values.items()}
    for i, t in enumerate(trajectories):
        own = {"latents": t.latents, "sigmas": t.sigmas, "log_prob": t.log_prob, "grid": t.request.sigmas}
        tensors |= {f"{i}/{name}": value.clone() for name, value in own.items()}  # rows of a batch share their storage
    path = folder / f"{cycle:08d}{_SUFFIX}"
    write_tensors(path, tensors, {"rows": json.dumps([_described(t) for t in trajectories])})
    return path


def _described(t: Trajectory) -> dict[str, Any]:
    """A trajectory without its tensors, as plain values."""
    fields = {f.name: getattr(t.request, f.name) for f in dataclasses.fields(t.request)}
    del fields["sigmas"]
    prompt = {"id": t.request.prompt.id, "text": t.request.prompt.text, "metadata": dict(t.request.prompt.metadata)}
    return {**fields, "prompt": prompt, "latent_indices": t.latent_indices}


def find(folder: str) -> list[Path]:
    """The rollouts of a folder, in the order of their cycles: of a run folder, or one with such files.

    Raises:
        ValueError: there is none.
    """
    given = Path(folder)
    for where in (given / FOLDER, given):
        paths = [p for p in where.glob(f"*{_SUFFIX}") if p.stem.isdecimal()]
        if paths:
            return sorted(paths, key=lambda path: int(path.stem))
    raise ValueError(f"rollout.replay: {folder} holds no rollout; make some with rollout.dump_every=1")


def fingerprint(paths: list[Path]) -> str:
    """A hash of what rollouts hold, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def load(path: Path) -> tuple[list[Trajectory], dict[str, torch.Tensor]]:
    """The rollout of a file, with its values by reward.

    Its policy is gone, so every version is -1 and training uses the log-probs as recorded.

    Raises:
        ValueError: the file is damaged or of another kind.
    """
    try:
        tensors, metadata = read_tensors(path)
        rows = json.loads(metadata["rows"])
        trajectories = [_trajectory(i, row, tensors) for i, row in enumerate(rows)]
        prefix = "values/"
        values = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
        if not trajectories or not values or any(len(v) != len(trajectories) for v in values.values()):
            raise ValueError("it does not hold a score for each of its samples")
        return trajectories, values
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"rollout.replay: {path} is no rollout that can be read ({error})") from None


def _trajectory(i: int, row: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Trajectory:
    row = dict(row)
    indices, plan = row.pop("latent_indices"), row.pop("plan")
    sde, ret, stop = plan
    request = RolloutRequest(
        **{
            **row,
            "prompt": Prompt(**row["prompt"]),
            "plan": StepPlan(None if sde is None else tuple(sde), tuple(ret), stop),
            "sigmas": tensors[f"{i}/grid"],
        }
    )
    sigmas, log_prob = tensors[f"{i}/sigmas"], tensors[f"{i}/log_prob"]
    return Trajectory(request, tensors[f"{i}/latents"], tuple(indices), sigmas, log_prob, version=-1)
