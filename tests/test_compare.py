"""Runs side by side: numbers against closed forms and simulation, and what must not be compared."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sigmazero import cli
from sigmazero.compare import difference, read_scores, table, write_sheet
from sigmazero.pictures import contact_sheet, grid, thumbnail
from sigmazero.verdict import Interval

EVALUATE = {"seed": 0, "num_captions": 8, "samples_per_caption": 2, "num_reference": 256, "bootstrap": 20}
REWARD = {"jpeg": {"kind": "jpeg", "quality": 95}}

Write = Callable[..., Path]


def metric(mean: float, half: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write("a", {"student@4": {"jpeg": (1.0, .1)}})``: a run folder with scores and pictures of 2 by 2 pixels."""

    def one(name: str, arms: dict[str, dict[str, tuple[float, float]]], **settings: Any) -> Path:
        folder = tmp_path / name
        (folder / "evaluation").mkdir(parents=True)
        scored = {arm: {m: metric(*value) for m, value in metrics.items()} for arm, metrics in arms.items()}
        said = {
            "algorithm": {"name": "dmd2", "guidance": 2.0},
            "evaluate": EVALUATE,
            "prompts": "ab",
            "rewards": REWARD,
        }
        (folder / "scores.json").write_text(json.dumps({"arms": scored, "settings": {**said, **settings}}))
        for shade, arm in enumerate(arms):
            Image.new("RGB", (8, 2), (40 * shade, 0, 0)).save(folder / "evaluation" / f"{arm}.png")
        return folder

    return one


def test_the_interval_of_a_difference_is_that_of_independent_means() -> None:
    """Of normal intervals it is ``sqrt(h^2 + k^2)`` on both sides; of skewed ones each end takes its own halves."""
    found = difference(Interval(1.0, 0.7, 1.3), Interval(2.0, 1.6, 2.4))
    assert (found.mean, found.low, found.high) == pytest.approx((1.0, 0.5, 1.5))
    found = difference(Interval(0.0, -3.0, 1.0), Interval(10.0, 8.0, 14.0))
    assert (found.low, found.high) == pytest.approx((10 - np.hypot(2, 1), 10 + np.hypot(4, 3)))


def test_the_interval_of_a_difference_covers_it_as_often_as_it_says() -> None:
    """Two means of 50 normal numbers each, 2,000 times: 95 % of the intervals hold the true difference."""
    draw = np.random.default_rng(0)
    a, b = draw.normal(0.0, 1.0, (2000, 50)), draw.normal(0.3, 2.0, (2000, 50))

    def interval(x: np.ndarray) -> Interval:
        half = 1.96 * x.std(ddof=1) / 50**0.5
        return Interval(x.mean(), x.mean() - half, x.mean() + half)

    found = [difference(interval(x), interval(y)) for x, y in zip(a, b, strict=True)]
    assert np.mean([d.low <= 0.3 <= d.high for d in found]) == pytest.approx(0.95, abs=0.015)


def cells(text: str, first: str) -> list[str]:
    """The filled cells of the row that begins with ``first``."""
    (row,) = (line for line in text.splitlines() if line.startswith(f"{first}  "))
    return re.split(" {2,}", row.strip())[1:]


def test_of_two_runs_shared_arms_and_results_are_compared(write: Write) -> None:
    a = write("a", {"teacher@8": {"diversity": (0.5, 0.3)}, "student@4": {"diversity": (0.4, 0.03)}})
    b = write("b", {"teacher@8": {"diversity": (0.75, 0.4)}, "student@2": {"diversity": (0.2, 0.04)}})
    text = table(read_scores([a, b]))
    assert cells(text, "b teacher@8") == ["0.750 [0.350, 1.150]"]
    assert cells(text, "b teacher@8 - a teacher@8") == ["0.250 [-0.250, 0.750]"]
    assert cells(text, "b student@2 - a student@4") == ["-0.200 [-0.250, -0.150] *"]


def test_of_one_run_the_result_is_compared_with_every_other_arm(write: Write) -> None:
    values = {"real": 9.0, "teacher@8": 1.6, "teacher@4": 1.0}
    arms = {name: {"reward/jpeg": (value, 0.3)} for name, value in values.items()}
    a = write("a", {**arms, "student@4": {"reward/jpeg": (2.0, 0.4)}, "student_raw@4": {"reward/jpeg": (1.0, 0.3)}})
    text = table(read_scores([a / "scores.json"]))
    assert cells(text, "a student@4 - a teacher@4") == ["1.000 [0.500, 1.500] *"]
    assert cells(text, "a student@4 - a teacher@8") == ["0.400 [-0.100, 0.900]"]
    assert cells(text, "a student@4 - a student_raw@4") == ["1.000 [0.500, 1.500] *"]
    assert "- a real" not in text


def test_rewards_of_other_settings_are_not_compared(write: Write) -> None:
    one = {"student@4": {"diversity": (1.0, 0.3), "reward/jpeg": (1.0, 0.1)}}
    two = {"student@4": {"diversity": (2.0, 0.4), "reward/jpeg": (1.0, 0.1)}}
    a, b = write("a", one), write("b", two, rewards={"jpeg": {"kind": "jpeg", "quality": 50}})
    text = table(read_scores([a, b]))
    assert cells(text, "b student@4 - a student@4") == ["1.000 [0.500, 1.500] *", "another reward"]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"evaluate": {**EVALUATE, "seed": 7}}, "they were evaluated with seed 0 and 7"),
        ({"evaluate": {**EVALUATE, "num_captions": 16}}, "num_captions 8 and 16"),
        ({"prompts": "cd"}, "prompts ab and cd"),
    ],
)
def test_other_prompts_seeds_and_counts_are_refused_by_name(
    settings: dict[str, Any], complaint: str, write: Write
) -> None:
    arms = {"student@4": {"diversity": (1.0, 0.1)}}
    a, b, c = write("a", arms), write("b", arms, evaluate={**EVALUATE, "bootstrap": 99}), write("c", arms, **settings)
    assert len(read_scores([a, b])) == 2
    with pytest.raises(ValueError, match=r"^a and c cannot be compared") as caught:
        read_scores([a, b, c])
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "content", [None, "{", "[]", "{}", '{"arms": {}, "settings": {"algorithm": {}, "evaluate": {}}}']
)
def test_a_folder_without_scores_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "scores.json").write_text(content)
    with pytest.raises(ValueError, match="sigmazero evaluate"):
        read_scores([tmp_path])


def test_the_command_and_its_sheet(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row an arm, below its name; a file that is there is left alone."""
    folder = write("a", {"teacher@8": {"diversity": (0.5, 0.1)}, "student@4": {"diversity": (0.4, 0.03)}})
    out = tmp_path / "sheet.png"
    monkeypatch.setattr(sys, "argv", ["sigmazero", "compare", str(folder), "--sheet", str(out)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    shown = capsys.readouterr().out
    assert "a student@4 - a teacher@8" in shown
    assert shown.strip().splitlines()[-1] == f"finished: pictures in {out}"
    with Image.open(out) as image:
        pixels = np.asarray(image)
        assert json.loads(str(image.info["sigmazero"])) == {"rows": ["a teacher@8", "a student@4"]}
    assert pixels.shape == (36, 8, 3)
    assert (pixels[16:18] == 0).all()
    assert (pixels[34:36] == [40, 0, 0]).all()
    with pytest.raises(ValueError, match="is there already"):
        write_sheet(read_scores([folder]), out)
    (folder / "evaluation" / "student@4.png").unlink()
    with pytest.raises(ValueError, match="the pictures of a student@4 cannot be read"):
        write_sheet(read_scores([folder]), tmp_path / "other.png")


def test_tiles_keep_small_pictures_sharp_and_make_large_ones_small() -> None:
    picture = torch.arange(2 * 3 * 3, dtype=torch.uint8).reshape(1, 3, 2, 3) * 10
    whole = grid(picture, 1)
    assert (np.asarray(whole) == picture[0].permute(1, 2, 0).numpy()).all()
    tile = np.asarray(thumbnail(whole, 8))
    assert (tile == np.asarray(whole).repeat(2, 0).repeat(2, 1)).all()
    large = Image.new("RGB", (1000, 500), (9, 8, 7))
    small = thumbnail(large, 256)
    assert small.size == (256, 128)
    assert (np.asarray(small) == [9, 8, 7]).all()
    sheet = np.asarray(contact_sheet([small] * 3, 2))
    assert sheet.shape == (2 * 128 + 4, 2 * 256 + 4, 3)
    assert (sheet[:128, 256:260] == 255).all()
    assert (sheet[132:, 260:] == 255).all()
