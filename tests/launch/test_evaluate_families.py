"""Evaluation of the families that no reader knows: teacher and student by rewards, diversity and drift."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sigmazero.config import changed
from sigmazero.launch import judge
from sigmazero.launch.local import train
from sigmazero.launch.reopen import evaluate_run
from sigmazero.tensors import read_tensors
from sigmazero.training.folder import read_config
from tests.launch.conftest import FAMILIES, Trained

WATCHED = ("rewards.size.kind=jpeg", "rewards.size.goal=incompressible", "rewards.size.weight=0")


pytestmark = pytest.mark.usefixtures("no_page")


def arms_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "scores.json").read_text())["arms"]


def kilobytes(picture: np.ndarray) -> float:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, format="JPEG", quality=95)
    return len(out.getvalue()) / 1000


@pytest.mark.parametrize("family", FAMILIES)
def test_a_distilled_run_is_scored_by_rewards_that_it_did_not_learn_from(
    family: str, trained: Trained, tmp_path: Path
) -> None:
    """Given with the command, after the run: each arm has what Pillow makes of its pictures, the teacher's by hand."""
    run = Path(shutil.copytree(trained(family), tmp_path / "run"))
    before = arms_of(run)
    text = evaluate_run(run, WATCHED)
    assert "reward/size" in text
    arms = arms_of(run)
    assert list(arms) == list(before) == ["teacher@4", "student@4", "student_raw@4"]
    assert all("reward/size" in metrics for metrics in arms.values())
    pictures = read_tensors(run / "evaluation" / "teacher@4.safetensors")[0]["pictures"].permute(0, 2, 3, 1).numpy()
    sizes = [kilobytes(picture) for picture in pictures]
    assert arms["teacher@4"]["reward/size"]["mean"] == pytest.approx(np.mean(sizes), rel=1e-6)
    assert len(set(sizes)) == 4  # two prompts, two samples each
    for arm, metrics in before.items():
        assert {name: arms[arm][name] for name in metrics} == metrics


def test_drift_is_the_difference_of_looks_from_the_bases_pictures(trained: Trained) -> None:
    """By numpy, from the strips that evaluation keeps of all prompts' first samples, and of the teacher by all."""
    config = read_config(trained("sd3")).evaluate.model_copy(update={"num_captions": 2})
    judged = judge.PromptEvaluator(config, [])
    draw = torch.rand(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    base, moved = draw[:4], draw[4:] * 0.5 + torch.tensor([0.4, 0.0, 0.0])[:, None, None]

    def look(pictures: torch.Tensor) -> np.ndarray:
        flat = pictures.double().numpy().reshape(4, 3, 16)
        saturation = (flat.max(1) - flat.min(1)).mean(1)
        return np.concatenate([flat.mean(2).mean(0), flat.std(2, ddof=1).mean(0), [saturation.mean()]])

    found = judged.score(moved, base)["drift"]
    assert found.mean == pytest.approx(np.abs(look(moved) - look(base)).mean(), rel=1e-6)
    assert found.low <= found.mean <= found.high
    assert judged.score(base, base)["drift"].mean == 0
    assert "drift" not in judged.score(base)
    arms = arms_of(trained("sd3"))
    assert "drift" not in arms["teacher@4"]
    assert arms["student@4"]["drift"]["mean"] > 0.001


def test_rewards_of_weight_0_score_the_run_and_change_nothing_of_it(trained: Trained, tmp_path: Path) -> None:
    """In the recipe: the same student, scored at its end; a reward that cannot score a prompt is named before."""
    config = read_config(trained("sd3"))
    watched = changed(config, WATCHED, ("rewards",)).model_copy(update={"output": str(tmp_path / "run")})
    run = train(watched)
    arms, before = arms_of(run), arms_of(trained("sd3"))
    assert all("reward/size" in metrics for metrics in arms.values())
    assert {arm: {n: m for n, m in metrics.items() if n != "reward/size"} for arm, metrics in arms.items()} == before
    asked = changed(watched, ["rewards.read.kind=ocr", "rewards.read.weight=0"], ("rewards",))
    with pytest.raises(ValueError, match=r"rewards\.read: prompt 0 'a red fox in the snow' names no text"):
        train(asked.model_copy(update={"output": str(tmp_path / "other")}))
    assert not (tmp_path / "other" / "scores.json").exists()


def test_only_what_is_of_evaluation_can_be_changed(trained: Trained) -> None:
    run = trained("sd3")
    before = (run / "scores.json").read_bytes()
    for override, complaint in (
        ("algorithm.num_steps=2", r"only settings of evaluate, rewards, plugins can be changed here"),
        ("rewards.size.kind=jpeg", r"rewards\.size\.weight is 1\.0, but dmd2 learns from no reward: set it to 0"),
        ("evaluate.num_captoins=9", r"did you mean 'evaluate\.num_captions'"),
    ):
        with pytest.raises(ValueError, match=complaint):
            evaluate_run(run, [override])
    assert (run / "scores.json").read_bytes() == before


def test_pictures_of_another_evaluation_are_not_taken_for_this_ones(trained: Trained, tmp_path: Path) -> None:
    """Frozen arms are kept in the folder: an evaluation of another seed leaves its own there, and a run goes on with
    its own scores."""
    run = Path(shutil.copytree(trained("sd3"), tmp_path / "run"))
    before = arms_of(run)
    evaluate_run(run, ["evaluate.seed=5"])
    assert arms_of(run)["teacher@4"] != before["teacher@4"]
    described = json.loads((run / "run.json").read_text())
    described["config"]["output"] = str(run)
    (run / "run.json").write_text(json.dumps({**described, "finished": False}))
    train(read_config(run))
    assert arms_of(run) == before
