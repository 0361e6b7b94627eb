"""The scorer: values in order, failures that cost no more than they must, threads that end, one form of a picture."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sigmazero import seeds
from sigmazero.config import FunctionRewardConfig
from sigmazero.launch import local
from sigmazero.launch.judge import Judge
from sigmazero.records import Prompt, RolloutRequest, Trajectory
from sigmazero.rewards.base import Layout, as_layout
from sigmazero.rewards.scorer import EPSILON, Scorer
from sigmazero.training.folder import RunFolder
from tests.conftest import MakeRun

Score = Callable[[Any, Sequence[str], Sequence[Mapping[str, Any]]], Any]
NAN = math.nan


class Mine:
    """A reward of a plain function."""

    def __init__(self, score: Score, layout: Layout = "hwc_uint8", size: tuple[int, int] | None = None) -> None:
        self.score, self.size = score, size
        self.layout: Layout = layout

    def check(self, prompt: Prompt) -> None:
        if not prompt.text:
            raise ValueError("it has no text")

    def __call__(self, pictures: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Any:
        return self.score(pictures, prompts, metadata)


def index(pictures: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(entry["index"]) for entry in metadata]


def answers(*values: Any) -> Score:
    """Sample i gets value i."""
    return lambda pictures, prompts, metadata: [values[entry["index"]] for entry in metadata]


def samples(count: int) -> tuple[Tensor, list[Prompt]]:
    """Pictures of the grey value of their index."""
    grey = torch.arange(count, dtype=torch.uint8)[:, None, None, None]
    return grey.expand(count, 3, 4, 5).clone(), [Prompt(i, f"prompt {i}", {"index": i}) for i in range(count)]


def reward_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reward"]


def none_left(threads: int = 0, within: float = 10.0) -> bool:
    limit = time.monotonic() + within
    while len(reward_threads()) > threads and time.monotonic() < limit:
        time.sleep(0.005)
    return len(reward_threads()) == threads


Make = Callable[..., Scorer]


@pytest.fixture
def make() -> Generator[Make]:
    """``make(mine=(score, {"weight": 2.0}), other=score)``; every thread ends when the test does."""
    made: list[Scorer] = []

    def scorer(**rewards: Any) -> Scorer:
        pairs = {name: given if isinstance(given, tuple) else (given, {}) for name, given in rewards.items()}
        built = {name: score if isinstance(score, Mine) else Mine(score) for name, (score, _) in pairs.items()}
        settings = {
            name: FunctionRewardConfig.model_validate({"kind": "function", "function": "f", **own})
            for name, (_, own) in pairs.items()
        }
        made.append(Scorer(built, settings))
        return made[-1]

    assert reward_threads() == []
    yield scorer
    for one in made:
        one.close()
    assert none_left()


def scored(scorer: Scorer, count: int = 4) -> tuple[dict[str, list[float]], list[str]]:
    scorer.submit(*samples(count))
    values, failures = scorer.gather()
    assert all(value.dtype == torch.float64 for value in values.values())
    return {name: value.tolist() for name, value in values.items()}, failures


def same(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(found) == len(wanted) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 32])
def test_values_arrive_by_name_and_in_order(make: Make, batch_size: int, workers: int) -> None:
    """Calls of several workers end in another order than they began; two parts are submitted before they are asked."""
    sizes: list[int] = []

    def slow_first(pictures: Any, prompts: Any, metadata: Any) -> list[float]:
        sizes.append(len(prompts))
        time.sleep(0.001 * (13 - metadata[0]["index"]))
        assert [f"prompt {entry['index']}" for entry in metadata] == list(prompts)
        return [10.0 * grey for grey in pictures[:, 0, 0, 0].tolist()]

    own = {"batch_size": batch_size, "workers": workers}
    scorer = make(first=(slow_first, own), second=(index, {"batch_size": 5}))
    pictures, prompts = samples(13)
    for _ in range(2):
        scorer.submit(pictures[:8], prompts[:8])
        scorer.submit(pictures[8:], prompts[8:])
        values, failures = scorer.gather()
        assert failures == []
        assert {name: value.tolist() for name, value in values.items()} == {
            "first": [10.0 * i for i in range(13)],
            "second": [1.0 * i for i in range(13)],
        }
    assert max(sizes) == min(batch_size, 8)
    assert len(reward_threads()) == workers + 1


def test_parts_arrive_by_their_names(make: Make) -> None:
    def two(pictures: Any, prompts: Any, metadata: Any) -> dict[str, Any]:
        return {"up": index(pictures, prompts, metadata), "down": torch.tensor([-e["index"] for e in metadata])}

    values, failures = scored(make(mine=(two, {"weight": {"up": 1.0}, "batch_size": 3}), other=index))
    assert failures == []
    assert values == {
        "mine/up": [0.0, 1.0, 2.0, 3.0],
        "mine/down": [0.0, -1.0, -2.0, -3.0],
        "other": [0.0, 1.0, 2.0, 3.0],
    }


def test_the_total_weighs_rewards_and_parts(make: Make) -> None:
    def two(pictures: Any, prompts: Any, metadata: Any) -> dict[str, Any]:
        return {"a": [1.0, 2.0, NAN], "b": [5.0, 6.0, 7.0], "c": [NAN] * 3}

    scorer = make(
        mine=(two, {"weight": {"a": 2.0, "b": -1.0, "c": 0.0}}),
        plain=(answers(1.0, 4.0, 9.0), {"weight": 0.5}),
        watched=(answers(None, 100.0, 100.0), {"weight": 0.0}),
    )
    scorer.submit(*samples(3))
    assert same(scorer.total(scorer.gather()[0]).tolist(), [2 - 5 + 0.5, 4 - 6 + 2.0, NAN])


def test_a_normalised_reward_has_zero_mean_and_unit_deviation(make: Make) -> None:
    """Over the samples that have a value; a second reward stays as it is."""
    given = [3.0, NAN, -1.0, 4.0, 4.0, NAN, 9.5, 0.25]
    own = [v for v in given if not math.isnan(v)]
    mean, deviation = statistics.fmean(own), statistics.pstdev(own)
    scorer = make(
        mine=(answers(*given), {"normalize": "batch", "weight": 3.0, "batch_size": 3}),
        constant=(answers(*[7.0] * 8), {"normalize": "batch"}),
        plain=(answers(*range(8)), {"weight": 0.5}),
    )
    scorer.submit(*samples(8))
    total = scorer.total(scorer.gather()[0]).tolist()
    wanted = [3 * (v - mean) / (deviation + EPSILON) + 0.5 * i for i, v in enumerate(given)]
    assert total == pytest.approx(wanted, rel=1e-12, nan_ok=True)
    assert EPSILON == 1e-4


def test_a_normalised_reward_without_any_value_has_none(make: Make) -> None:
    scorer = make(mine=(answers(None, None), {"normalize": "batch"}))
    scorer.submit(*samples(2))
    assert scorer.total(scorer.gather()[0]).isnan().all()


@pytest.mark.parametrize(
    ("weight", "answer", "said"),
    [
        (2.0, {"sharp": [1.0], "bright": [2.0]}, r"rewards.mine.weight is 2.0, but it returns sharp, bright: set "
                                                 r"rewards.mine.weight=\{sharp: 1.0\}"),
        ({"sharp": 1.0, "bleak": 1.0}, {"sharp": [1.0], "bright": [2.0]},
         r"rewards.mine.weight names 'bleak', but it returns sharp, bright"),
        ({"sharp": 1.0}, [1.0], r"rewards.mine.weight names 'sharp', but it returns one number a sample"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_one_line(make: Make, weight: Any, answer: Any, said: str) -> None:
    scorer = make(mine=(lambda *_: answer, {"weight": weight}))
    scorer.submit(*samples(1))
    values, failures = scorer.gather()
    assert failures == []
    with pytest.raises(ValueError, match=f"^{said}$"):
        scorer.total(values)


def test_a_number_0_watches_every_part(make: Make) -> None:
    scorer = make(mine=(lambda *_: {"a": [1.0], "b": [None]}, {"weight": 0.0}), plain=index)
    scorer.submit(*samples(1))
    assert scorer.total(scorer.gather()[0]).tolist() == [0.0]


def test_a_part_that_fails_throughout_is_no_unknown_part(make: Make) -> None:
    """Whether it is returned without a number, or missing in one cycle; the total has none there and nothing stops."""
    given = [{"a": [1.0], "b": [None]}, {"a": [1.0]}, {"a": [1.0], "b": [2.0]}, RuntimeError]

    def score(*_: Any) -> Any:
        answer = given.pop(0)
        if answer is RuntimeError:
            raise answer
        return answer

    scorer = make(mine=(score, {"weight": {"a": 1.0, "b": 1.0}}))
    for wanted, said in [
        (NAN, "None is no finite number"), (NAN, "it returned no 'b'"), (3.0, None), (NAN, "RuntimeError"),
    ]:  # fmt: skip
        scorer.submit(*samples(1))
        values, failures = scorer.gather()
        assert list(values) == ["mine/a", "mine/b"]
        assert same(scorer.total(values).tolist(), [wanted])
        assert failures == ([] if said is None else [f"rewards.mine: {said}"])


def test_a_watched_part_that_was_never_returned_stops_nothing(make: Make) -> None:
    scorer = make(mine=(lambda *_: {"a": [1.0]}, {"weight": {"a": 1.0, "b": 0.0}}))
    scorer.submit(*samples(1))
    assert scorer.total(scorer.gather()[0]).tolist() == [1.0]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (None, NAN), (NAN, NAN), (math.inf, NAN), (-math.inf, NAN), ("0.5", NAN), ([0.5], NAN), (1j, NAN),
        (10**400, NAN), (torch.tensor([1.0, 2.0]), NAN), (torch.tensor(NAN), NAN), (np.float32("inf"), NAN),
        (ValueError("no face"), NAN), (3, 3.0), (True, 1.0), (np.float64(0.5), 0.5), (np.float32(0.5), 0.5),
        (np.int64(7), 7.0), (np.bool_(True), 1.0), (torch.tensor(0.5), 0.5), (torch.tensor([2]), 2.0),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
    ],
)  # fmt: skip
def test_what_is_no_number_costs_its_own_sample(make: Make, value: Any, number: float) -> None:
    values, failures = scored(make(mine=answers(1.0, value, 3.0, 4.0), other=index))
    assert same(values["mine"], [1.0, number, 3.0, 4.0])
    assert values["other"] == [0.0, 1.0, 2.0, 3.0]
    assert len(failures) == math.isnan(number)
    assert all(f.startswith("rewards.mine: ") and len(f) < 250 and "\n" not in f for f in failures)


@pytest.mark.parametrize(
    "answer", [torch.arange(2.0, requires_grad=True), torch.arange(2), np.arange(2.0), np.arange(2), (0, 1.0)]
)
def test_a_whole_answer_may_be_an_array(make: Make, answer: Any) -> None:
    assert scored(make(mine=lambda *_: answer), 2) == ({"mine": [0.0, 1.0]}, [])


class Broken(Exception):
    """Cannot even say what is wrong."""

    def __str__(self) -> str:
        raise RuntimeError


def raises(error: BaseException) -> Score:
    def score(*_: Any) -> Any:
        raise error

    return score


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (raises(RuntimeError("out of\nmemory")), "RuntimeError: out of memory"),
        (raises(SystemExit(3)), "SystemExit: 3"),
        (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
        (raises(Broken()), "Broken: <"),
        (lambda *_: [1.0], "it must return 2 numbers, one a picture, and returned [1.0]"),
        (lambda *_: [1.0, 2.0, 3.0], "it must return 2 numbers, one a picture, and returned [1.0, 2.0, 3.0]"),
        (lambda *_: torch.ones(3), "it must return 2 numbers, one a picture, and returned tensor([1., 1., 1.])"),
        (lambda *_: torch.tensor(1.0), "it must return 2 numbers, one a picture, and returned tensor(1.)"),
        (lambda *_: None, "it must return 2 numbers, one a picture, and returned None"),
        (lambda *_: 0.5, "it must return 2 numbers, one a picture, and returned 0.5"),
        (lambda *_: "12", "it must return 2 numbers, one a picture, and returned '12'"),
        (lambda *_: {}, "it returned no scores"),
    ],
)
def test_a_failed_call_costs_its_samples_and_no_others(make: Make, fails: Score, said: str) -> None:
    """The second call of three, with the very thread that makes the third."""

    def score(pictures: Any, prompts: Any, metadata: Any) -> Any:
        return (fails if metadata[0]["index"] == 2 else index)(pictures, prompts, metadata)

    scorer = make(mine=(score, {"batch_size": 2}))
    for _ in range(2):
        values, failures = scored(scorer, 6)
        assert same(values["mine"], [0.0, 1.0, NAN, NAN, 4.0, 5.0])
        (failure,) = failures
        assert failure.startswith("rewards.mine: ")
        assert said in failure


def test_a_reward_that_always_fails_has_no_value(make: Make) -> None:
    values, failures = scored(make(mine=raises(OSError("no model")), parts=(raises(OSError()), {"weight": {"a": 1}})))
    assert list(values) == ["mine", "parts/a"]
    assert all(same(value, [NAN] * 4) for value in values.values())
    assert failures == ["rewards.mine: OSError: no model", "rewards.parts: OSError"]


def test_a_part_that_fails_costs_the_others_nothing(make: Make) -> None:
    """Missing in one call, of a wrong length in another."""

    def score(pictures: Any, prompts: Any, metadata: Any) -> Any:
        own = index(pictures, prompts, metadata)
        return {0.0: {"a": own}, 2.0: {"a": own, "b": [1.0]}, 4.0: {"a": own, "b": own}}[own[0]]

    values, failures = scored(make(mine=(score, {"batch_size": 2, "weight": {"a": 1.0, "b": 1.0}})), 6)
    assert values["mine/a"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert same(values["mine/b"], [NAN, NAN, NAN, NAN, 4.0, 5.0])
    assert "rewards.mine: it returned no 'b'" in failures
    assert "rewards.mine: it must return 2 numbers, one a picture, and returned {'b': [1.0]}" in failures


def test_failures_of_watched_rewards_come_last(make: Make) -> None:
    watched = (raises(OSError("w")), {"weight": 0.0})
    _, failures = scored(make(a=watched, b=raises(OSError("m")), c=(raises(OSError("p")), {"weight": {"q": 1.0}})), 1)
    assert failures == ["rewards.b: OSError: m", "rewards.c: OSError: p", "rewards.a: OSError: w"]


@pytest.mark.parametrize("workers", [1, 2])
def test_b47_a_call_that_hangs_is_left_behind(make: Make, workers: int) -> None:
    """Its samples have no value, the calls after it and those of later cycles do, and what it says at last is not
    heard. The thread of it ends with it."""
    release, hung = threading.Event(), threading.Event()

    def score(pictures: Any, prompts: Any, metadata: Any) -> list[float]:
        if metadata[0]["index"] == 2 and not hung.is_set():
            hung.set()
            release.wait(60)
            return [99.0, 99.0]
        return index(pictures, prompts, metadata)

    scorer = make(mine=(score, {"batch_size": 2, "time_limit": 0.3, "workers": workers}), other=index)
    try:
        started = time.monotonic()
        values, failures = scored(scorer, 6)
        assert 0.3 <= time.monotonic() - started < 10  # the call would take 60 s
        assert same(values["mine"], [0.0, 1.0, NAN, NAN, 4.0, 5.0])
        assert values["other"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert failures == ["rewards.mine: no answer within 0.3 s"]
        assert len(reward_threads()) == workers + 2  # the hung one, those that go on, and the other reward's
        assert scored(scorer, 4)[0]["mine"] == [0.0, 1.0, 2.0, 3.0]
    finally:
        release.set()
    assert none_left(workers + 1)
    assert scored(scorer, 4) == ({"mine": [0.0, 1.0, 2.0, 3.0], "other": [0.0, 1.0, 2.0, 3.0]}, [])


def test_a_call_waits_for_its_turn_without_losing_time(make: Make) -> None:
    """Six calls of one worker take longer together than the limit of one."""

    def score(pictures: Any, prompts: Any, metadata: Any) -> list[float]:
        time.sleep(0.1)
        return index(pictures, prompts, metadata)

    assert scored(make(mine=(score, {"batch_size": 1, "time_limit": 0.5})), 6) == ({"mine": [0.0, 1, 2, 3, 4, 5]}, [])


def test_a_reward_that_hangs_does_not_hold_up_another(make: Make) -> None:
    """The other one has answered before the hung one is given up."""
    release, answered = threading.Event(), threading.Event()

    def other(*_: Any) -> list[float]:
        answered.set()
        return [1.0]

    scorer = make(mine=(lambda *_: release.wait(60), {"time_limit": 30.0}), other=other)
    scorer.submit(*samples(1))
    assert answered.wait(20)
    release.set()
    assert scorer.gather()[0]["other"].tolist() == [1.0]


def test_threads_end_on_close(make: Make) -> None:
    for _ in range(20):
        scorer = make(a=(index, {"workers": 3}), b=index)
        assert len(reward_threads()) == 0  # none before there is work
        scored(scorer)
        assert len(reward_threads()) == 4
        scorer.close()
        assert none_left()


def test_close_makes_no_call_that_still_waits(make: Make) -> None:
    """A run that stops in the middle of a rollout does not go on asking a paid scorer."""
    begun, release, calls = threading.Event(), threading.Event(), list[int]()

    def score(pictures: Any, prompts: Any, metadata: Any) -> list[float]:
        calls.append(metadata[0]["index"])
        begun.set()
        release.wait(60)
        return [0.0]

    scorer = make(mine=(score, {"batch_size": 1}))
    scorer.submit(*samples(5))
    assert begun.wait(20)
    scorer.close()
    release.set()
    assert none_left()
    assert calls == [0]


def test_check_names_the_reward(make: Make) -> None:
    scorer = make(mine=index)
    scorer.check(Prompt(0, "text"))
    with pytest.raises(ValueError, match=r"^rewards\.mine: it has no text$"):
        scorer.check(Prompt(0, ""))


def _blacken(pictures: Any) -> None:
    if isinstance(pictures, list):
        for picture in pictures:
            picture.paste((0, 0, 0), (0, 0, *picture.size))
    else:
        pictures[:] = 0


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("layout", ["chw_float", "hwc_uint8", "pil"])
def test_what_a_reward_does_to_its_samples_no_other_sees(make: Make, layout: Layout, form: torch.memory_format) -> None:
    """Nor the rollout that keeps them, nor the next draw of the prompt."""
    spoilt = threading.Event()

    def spoil(pictures: Any, prompts: Any, metadata: Any) -> list[float]:
        _blacken(pictures)
        metadata[0]["boxes"].append(1)
        metadata[0]["index"] = -1
        spoilt.set()
        return [0.0]

    def look(pictures: Any, prompts: Any, metadata: Any) -> list[float]:
        assert spoilt.wait(20)
        assert metadata == [{"index": 0, "boxes": []}]
        return [float(np.asarray(pictures[0]).max())]

    pictures = torch.full((1, 3, 4, 5), 255, dtype=torch.uint8).to(memory_format=form)
    prompt = Prompt(0, "text", {"index": 0, "boxes": []})
    scorer = make(spoil=Mine(spoil, layout), look=Mine(look, layout))
    scorer.submit(pictures, [prompt])
    values, failures = scorer.gather()
    assert failures == []
    assert values["look"].item() == (1.0 if layout == "chw_float" else 255.0)
    assert pictures.min() == 255
    assert prompt.metadata == {"index": 0, "boxes": []}


def noise(count: int, height: int, width: int) -> Tensor:
    """In the middle of the range: Pillow rounds and clamps between its two passes."""
    return torch.from_numpy(np.random.default_rng(0).integers(80, 176, (count, 3, height, width), dtype=np.uint8))


@pytest.mark.parametrize("size", [None, (5, 7)])
def test_a_reward_gets_the_layout_that_it_declares(size: tuple[int, int] | None) -> None:
    pictures = noise(2, 5, 7)
    floats, rows, images = (as_layout(pictures, layout, size) for layout in ("chw_float", "hwc_uint8", "pil"))
    assert floats.dtype == torch.float32
    assert torch.equal(floats, pictures / 255)
    assert rows.dtype == np.uint8
    assert np.array_equal(rows, pictures.numpy().transpose(0, 2, 3, 1))
    assert [image.mode for image in images] == ["RGB", "RGB"]
    assert all(np.array_equal(np.asarray(image), row) for image, row in zip(images, rows, strict=True))


@pytest.mark.parametrize("size", [(9, 4), (31, 40), (5, 20)])
def test_a_reward_gets_the_size_that_it_declares(size: tuple[int, int]) -> None:
    """Bicubic with antialiasing, as Pillow does it, to one level of 8 bits."""
    pictures = noise(2, 18, 12)
    rows = as_layout(pictures, "hwc_uint8", size)
    assert rows.shape == (2, *size, 3)
    for row, picture in zip(rows, pictures.numpy().transpose(0, 2, 3, 1), strict=True):
        wanted = Image.fromarray(picture).resize((size[1], size[0]), Image.Resampling.BICUBIC)
        assert np.abs(row.astype(int) - np.asarray(wanted).astype(int)).max() <= 1
    assert np.array_equal(np.asarray(as_layout(pictures, "pil", size)[1]), rows[1])
    assert torch.equal(as_layout(pictures, "chw_float", size) * 255, torch.from_numpy(rows).permute(0, 3, 1, 2).float())


class Fixed:
    """An engine whose samples are one and the same latents for each pair of sample indices."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        pairs = [r.sample // 2 for r in requests]
        grey = seeds.normal(1, "train_noise", pairs, (3, 1, 1))
        latents = grey + 3 * seeds.normal(0, "train_noise", pairs, (3, 16, 16))  # many of them out of range
        return [
            Trajectory(r, x[None], (len(r.sigmas) - 1,), r.sigmas, torch.full((len(r.sigmas) - 1,), NAN), 0)
            for r, x in zip(requests, latents, strict=True)
        ]

    def publish(self, policy: str, version: int) -> None:
        """Its samples do not change."""


def test_b75_training_evaluation_and_files_score_the_same_picture(
    nft: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward that returns the mean pixel, of the same latents everywhere."""
    plugin = tmp_path / "mine.py"
    plugin.write_text("def mean(pictures, prompts, metadata):\n    return pictures.mean((1, 2, 3))\n")
    name = f"{plugin}:mean"
    config = nft(
        {"rewards": {"mean": {"kind": "function", "function": name}}, "plugins": [name], "rollout": {"group_size": 6}}
    )
    monkeypatch.setattr(local, "LocalEngine", lambda *_, **__: Fixed())
    with RunFolder(config.output) as folder, local.build(config) as built:
        scores = built.trainer.collector.collect(0, 0).scores
        judged = Judge(config, built.algorithm, built.roles, built.engine, folder, built.scorer)
        refreshed = judged.refresh(3)
        judged.score_fixed()
    assert scores is not None
    trained = scores.total[::2]  # samples 0, 2, 4: of the captions 0, 1, 2
    files = [folder.evaluation / "history" / "00000003.png", folder.evaluation / "start.png"]
    for file in files:
        pixels = np.asarray(Image.open(file)).astype(np.float64) / 255
        means = pixels.reshape(16, 8, 16, 3).mean((0, 2, 3))  # eight captions side by side
        assert trained.tolist() == pytest.approx(means[:3].tolist(), abs=1e-6)
        assert len(set(means.round(3))) > 4
    for evaluated in (refreshed["evaluate/final/reward/mean"], judged.scores["start"]["reward/mean"].mean):
        assert evaluated == pytest.approx(means.mean(), abs=1e-6)


@pytest.mark.parametrize("value", [1.1e30, -1e308, 10**40])
def test_a_score_that_would_overflow_means_is_a_failure(make: Make, value: float) -> None:
    scorer = make(mine=lambda *_: [1.0, value])
    scorer.submit(*samples(2))
    values, failures = scorer.gather()
    assert same(values["mine"].tolist(), [1.0, NAN])
    assert [f.endswith("is no finite number") for f in failures] == [True]
    assert same(scorer.total(values).tolist(), [1.0, NAN])


def test_each_failure_is_shown_once(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    scorer = make(mine=lambda *_: [None])
    for _ in range(3):
        scorer.submit(*samples(1))
        scorer.gather()
    assert capsys.readouterr().err.splitlines() == [
        "warning: rewards.mine: None is no finite number; its samples have no score"
    ]
