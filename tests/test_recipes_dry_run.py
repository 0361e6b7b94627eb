"""Every recipe of a real family does what its header says, with the exact command on its line ``# dry run:``.

On tiny random pipelines: that it runs, not that it learns.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sigmazero import cli
from sigmazero.config import RunConfig, load_recipe
from sigmazero.data import SHIPPED, PromptFile
from sigmazero.launch import local
from sigmazero.launch.tiny import write_tiny
from sigmazero.schedule import sigma_grid
from sigmazero.training import checkpoint

ROOT = Path(__file__).parents[1]
RECIPES = sorted(p for p in (ROOT / "recipes").glob("*.yaml") if p.name.startswith(("sd35_", "flux2_", "qwen_")))
RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)


def commands(recipe: Path, kind: str) -> list[list[str]]:
    """The commands of a header's lines ``# KIND: sigmazero ...``, as a shell would split them."""
    return [shlex.split(line) for line in re.findall(rf"^# {kind}: sigmazero (.*)$", recipe.read_text(), re.MULTILINE)]


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny pipelines by family."""
    folder = tmp_path_factory.mktemp("tiny")
    for family in ("sd3", "flux2", "qwen_image"):
        write_tiny(family, folder / family)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two captioned pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    for colour in ("red", "blue"):
        Image.new("RGB", (48, 40), colour).save(folder / f"{colour}.png")
        (folder / f"{colour}.txt").write_text(f"a {colour} wall")
    return folder


@pytest.fixture(autouse=True)
def _fast(no_page: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, the repository as the working folder."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(local, "use_threads", lambda threads: None)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sigmazero", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code


def test_there_are_seven() -> None:
    assert len(RECIPES) == 7


@RECIPE
def test_the_dry_run_runs_as_it_stands(
    recipe: Path, pipelines: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dry,) = commands(recipe, "dry run")
    pipeline = pipelines[load_recipe(recipe).model.family]
    words = [word.replace("TINY", str(pipeline)).replace("PICTURES", str(pictures)) for word in dry]
    call(monkeypatch, *words, f"output={tmp_path / 'run'}")
    found, _ = checkpoint.load_newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found.numbers["counters"]["cycle"] == 2
    assert found.numbers["counters"]["skipped"] == {}
    assert {value.dtype for value in found.tensors.values()} == {torch.float32}  # over a base in bfloat16
    arms: dict[str, Any] = json.loads((tmp_path / "run" / "scores.json").read_text())["arms"]
    config = load_recipe(recipe)
    assert all(f"reward/{name}" in metrics for metrics in arms.values() for name in config.rewards)
    assert len(arms) >= (1 if config.data.pictures else 3)  # velocity regression has the student alone


@RECIPE
def test_the_header_says_what_a_user_must_know(recipe: Path) -> None:
    header = "".join(line for line in recipe.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert "not run on real weights" in header
    assert "# hardware: meant for one GPU" in header
    for command, *arguments in (*commands(recipe, "run"), *commands(recipe, "dry run")):
        assert (command, arguments[0]) == ("train", f"recipes/{recipe.name}")
        assert arguments[1].startswith("model.path=")
        assert isinstance(load_recipe(recipe, arguments[1:]), RunConfig)
    config = load_recipe(recipe)
    assert (config.model.dtype, config.roles.storage) == ("bfloat16", "lora")
    assert config.data.pictures or config.data.prompts in SHIPPED  # pictures are the user's own


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sd35_dmd2_lora", [1, 0.9, 0.75, 0.5, 0]),
        ("qwen_image_dmd2_lora", [1, 0.9, 0.75, 0.5, 0]),
        ("flux2_klein_dmd2_lora", [1, 0.9581, 0.8840, 0.7175, 0]),
    ],
)
def test_b42_students_have_the_grid_that_the_recipe_names(name: str, expected: list[float]) -> None:
    algorithm: Any = load_recipe(ROOT / "recipes" / f"{name}.yaml").algorithm
    grid = sigma_grid(algorithm.num_steps, algorithm.shift)
    torch.testing.assert_close(grid, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=5e-5)


def test_prompts_for_ocr_are_those_with_a_text() -> None:
    """Thirty plain ones are the default; ten of them ask for a text."""
    every, text = ([prompt.text for prompt in PromptFile(name, 0).all()] for name in SHIPPED)
    assert len(set(every)) == len(every) == 30
    assert text == [line for line in every if re.search('"[^"]+"', line)]
    assert len(text) == 10
