"""A reward of one's own: by the plugin door only; one picture that it cannot take costs one score."""

from __future__ import annotations

import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sigmazero.config import FunctionRewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards import function
from sigmazero.rewards.base import Layout, Reward, as_layout
from sigmazero.rewards.scorer import Scorer

NAN = math.nan

# Every function scores a picture by its grey value; metadata["fails"] names what goes wrong with a sample.
SOURCE = '''
import numpy as np
import torch

def score(pictures, prompts, metadata):
    for entry in metadata:
        if entry.get("fails"):
            raise ValueError(f"cannot take {entry['index']}")
    return [float(np.asarray(picture).max()) for picture in pictures]

def spoils(pictures, prompts, metadata):
    """Writes on what it is given before it fails."""
    found = [float(np.asarray(picture).max()) for picture in pictures]
    for picture, entry in zip(pictures, metadata):
        assert "seen" not in entry
        entry["seen"] = True
        if hasattr(picture, "paste"):
            picture.paste((255, 0, 0), (0, 0, 5, 4))
        else:
            picture[:] = 255
    score([], prompts, metadata)
    return found

def odd(pictures, prompts, metadata):
    """Takes single pictures only, and answers some of them wrongly."""
    (entry,) = metadata
    values = {"none": None, "bare": 0.5, "zero": torch.tensor(0.5), "two": [1.0, 2.0], "array": np.array([7.0]),
              "dict": {}, "text": "x", "tensor": torch.tensor([8.0])}
    return values.get(entry["fails"], [1.0])

def parts(pictures, prompts, metadata):
    own = score(pictures, prompts, metadata)
    out = {"a": own, "b": [-v for v in own]}
    for entry in metadata:
        if entry.get("no_b"):
            out["b"] = {"missing": None, "bare": 0.5, "two": [1.0, 2.0], "nan": [float("nan")] * len(own)}[entry["no_b"]]
            if entry["no_b"] == "missing":
                del out["b"]
    return out
'''  # noqa: E501


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def load(file: Path, name: str, **settings: Any) -> Reward:
    config = FunctionRewardConfig.model_validate({"kind": "function", "function": f"{file}:{name}", **settings})
    return function.build(config, [config.function])


@pytest.fixture
def score(file: Path) -> Generator[Any]:
    """``score("parts", {"no_b": "nan"}, {}, ...)``: values and failures of samples 0, 1, ... with this metadata."""
    made: list[Scorer] = []

    def run(name: str, *metadata: dict[str, Any], **settings: Any) -> tuple[dict[str, list[float]], list[str]]:
        config = FunctionRewardConfig.model_validate({"kind": "function", "function": "f", **settings})
        made.append(Scorer({"mine": load(file, name, **settings)}, {"mine": config}))
        grey = torch.arange(len(metadata), dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 5)
        made[-1].submit(grey, [Prompt(i, f"p{i}", {"index": i, **own}) for i, own in enumerate(metadata)])
        values, failures = made[-1].gather()
        return {part: value.tolist() for part, value in values.items()}, failures

    yield run
    for scorer in made:
        scorer.close()


def same(found: Any, wanted: list[float]) -> bool:
    return np.array_equal(np.array(found), np.array(wanted), equal_nan=True)


@pytest.mark.parametrize("allowed", [[], ["other.py:score"], ["mine.py:score"]])
def test_b50_a_function_must_be_listed(file: Path, allowed: list[str]) -> None:
    config = FunctionRewardConfig(kind="function", function=f"{file}:score")
    with pytest.raises(ValueError, match=r"neither a known name nor listed under plugins; add it to plugins: \["):
        function.build(config, allowed)


def test_it_has_the_form_of_its_recipe(file: Path) -> None:
    reward = load(file, "score", layout="hwc_uint8", size=(8, 6))
    assert (reward.layout, reward.size) == ("hwc_uint8", (8, 6))
    reward.check(Prompt(0, ""))
    assert (load(file, "score").layout, load(file, "score").size) == ("chw_float", None)


@pytest.mark.parametrize("layout", ["chw_float", "hwc_uint8", "pil"])
@pytest.mark.parametrize("name", ["score", "spoils"])
def test_one_picture_that_it_cannot_take_costs_one_score(score: Any, layout: Layout, name: str) -> None:
    """Each of the others is scored as it was, even where the function had already written on it."""
    values, failures = score(name, {}, {}, {"fails": True}, {}, {"fails": True}, layout=layout)
    one = 255.0 if layout == "chw_float" else 1.0
    assert values["mine"] == pytest.approx([0.0, 1 / one, NAN, 3 / one, NAN], rel=1e-6, nan_ok=True)
    assert failures == ["rewards.mine: ValueError: cannot take 2", "rewards.mine: ValueError: cannot take 4"]


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_the_batch_size_changes_no_score(score: Any, batch_size: int) -> None:
    values, failures = score("score", {}, {"fails": True}, {}, {}, {}, layout="pil", batch_size=batch_size)
    assert same(values["mine"], [0.0, NAN, 2.0, 3.0, 4.0])
    assert failures == ["rewards.mine: ValueError: cannot take 1"]


def test_a_batch_that_works_is_asked_for_once(file: Path) -> None:
    reward: Any = load(file, "score", layout="hwc_uint8")
    calls, inner = list[int](), reward.function
    reward.function = lambda *batch: (calls.append(len(batch[0])), inner(*batch))[1]
    pictures = as_layout(torch.zeros(3, 3, 2, 2, dtype=torch.uint8), "hwc_uint8", None)
    assert reward(pictures, ["", "", ""], [{}, {}, {}]) == [0.0, 0.0, 0.0]
    assert calls == [3]
    reward.function = lambda *_: exit()
    with pytest.raises(SystemExit):  # the scorer's affair: a function that exits is not asked again
        reward(pictures, ["", "", ""], [{}, {}, {}])


@pytest.mark.parametrize("batch_size", [1, 32])
def test_an_answer_for_one_picture_is_a_list_of_one(score: Any, batch_size: int) -> None:
    """However large the batch that failed was."""
    fails = ("none", "bare", "zero", "two", "text", "dict", "array", "tensor", "")
    values, failures = score("odd", *({"fails": fail} for fail in fails), batch_size=batch_size)
    assert same(values["mine"], [NAN] * 6 + [7.0, 8.0, 1.0])
    assert len(failures) == 6
    assert all("and returned" in f or "no scores" in f for f in failures)


def test_named_parts_fail_one_by_one(score: Any) -> None:
    """Sample 1 fails, so that all are tried alone: what is wrong with a part of one costs that part of that one."""
    weight = {"weight": {"a": 1.0, "b": 1.0}}
    rows = [{}, {"fails": True}, {"no_b": "missing"}, {"no_b": "bare"}, {"no_b": "two"}, {"no_b": "nan"}, {}]
    values, failures = score("parts", *rows, layout="pil", **weight)
    assert list(values) == ["mine/a", "mine/b"]
    assert same(values["mine/a"], [0.0, NAN, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert same(values["mine/b"], [0.0, NAN, NAN, NAN, NAN, NAN, -6.0])
    assert failures[:2] == ["rewards.mine: ValueError: cannot take 1"] * 2
    assert failures[2:] == [
        "rewards.mine: ValueError: it must return one number a picture, and returned []",
        "rewards.mine: ValueError: it must return one number a picture, and returned 0.5",
        "rewards.mine: ValueError: it must return one number a picture, and returned [1.0, 2.0]",
        "rewards.mine: nan is no finite number",
    ]


def test_named_parts_of_a_batch_that_works(score: Any) -> None:
    weight = {"weight": {"a": 1.0}}
    values, failures = score("parts", {}, {}, {"no_b": "nan"}, layout="pil", **weight)
    assert same(values["mine/a"], [0.0, 1.0, 2.0])
    assert same(values["mine/b"], [NAN] * 3)
    assert len(failures) == 3


def test_every_picture_fails(score: Any) -> None:
    values, failures = score("parts", {"fails": True}, {"fails": True}, weight={"a": 1.0, "b": 0.5})
    assert same(values["mine/a"], [NAN, NAN])
    assert same(values["mine/b"], [NAN, NAN])
    assert len(failures) == 2
