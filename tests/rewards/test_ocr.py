"""The OCR reward: scores by hand, likelihoods by counting every path, and real pictures that are read right."""

import itertools
import math
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmazero import glyphs
from sigmazero.config import OcrRewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards import ocr
from sigmazero.rewards.base import Reward, as_layout
from sigmazero.rewards.ocr import ctc_log_likelihood, edit_distance, edit_score

MakeReward = Callable[[Any], Reward]


@pytest.fixture(scope="module")
def recogniser() -> ocr.Recogniser:
    return ocr.load_recogniser()


@pytest.fixture(scope="module")
def numbers() -> tuple[list[str], Tensor]:
    """128 numbers and their pictures, as 8-bit files would hold them."""
    captions = [full for _, full in glyphs.captions_of(range(128), "train", seed=3)]
    pictures = (glyphs.pictures_of(captions, range(128), seed=3) * 255).round().to(torch.uint8)
    return [f"{caption.number:02d}" for caption in captions], as_layout(pictures, "chw_float", None)


@pytest.fixture(scope="module")
def reward(recogniser: ocr.Recogniser) -> MakeReward:
    return lambda score: ocr.OcrReward(recogniser, score)


def values(reward: Reward, pictures: Tensor, texts: list[str]) -> Any:
    return reward(pictures, [f'a sign that says "{text}"' for text in texts], [{}] * len(texts))


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("kitten", "sitting", 3), ("flaw", "lawn", 2), ("", "abc", 3), ("abc", "", 3), ("ab", "ba", 2), ("abc", "abc", 0)],
)
def test_edit_distances_are_those_of_the_textbook(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == distance


@pytest.mark.parametrize(
    ("read", "wanted", "score"),
    [
        ("42", "42", 1.0),
        ("x42y", "42", 1.0),  # it stands in what was read
        ("4", "42", 0.5),
        ("24", "42", 0.0),  # two edits of two
        ("", "42", 0.0),
        ("something else", "42", 0.0),  # 14 edits count as 2
        ("oO", "00", 1.0),
        ("H0t d", "hot dog", 4 / 6),  # h0td of h0td0g
        ("he llo", "Hello", 1.0),
        ("hallo", "hello", 0.8),
    ],
)
def test_the_edit_score_is_flow_grpos(read: str, wanted: str, score: float) -> None:
    assert edit_score(read, wanted) == pytest.approx(score)


@pytest.mark.parametrize("labels", [(), (1,), (1, 2), (1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 1)])
def test_the_ctc_likelihood_is_the_sum_over_every_path(labels: tuple[int, ...]) -> None:
    probs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    total = 0.0
    for path in itertools.product(range(3), repeat=4):
        if tuple(label for label, _ in itertools.groupby(path) if label) == labels:
            total += math.prod(float(probs[t, label]) for t, label in enumerate(path))
    expected = math.log(total) if total else -math.inf  # 1, 1, 1 needs two blanks: five positions
    assert ctc_log_likelihood(probs.log(), labels) == pytest.approx(expected, rel=1e-12)


def test_a_long_ctc_likelihood_is_torchs() -> None:
    log_probs = torch.randn(40, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    labels = torch.tensor([3, 3, 7, 29, 1, 1, 1, 12])
    expected = -torch.nn.functional.ctc_loss(log_probs, labels, torch.tensor(40), torch.tensor(8), reduction="sum")
    assert ctc_log_likelihood(log_probs, labels.tolist()) == pytest.approx(float(expected), rel=1e-12)


def test_real_numbers_are_read_right(recogniser: ocr.Recogniser, numbers: tuple[list[str], Tensor]) -> None:
    texts, pictures = numbers
    right = sum(read == text for read, text in zip(recogniser.read(pictures), texts, strict=True))
    assert right >= 0.99 * len(texts)


@pytest.mark.parametrize(("score", "gap"), [("edit", 0.5), ("exact", 1.0), ("log_likelihood", 3.0)])
def test_a_wrong_number_scores_lower(numbers: tuple[list[str], Tensor], score: str, gap: float) -> None:
    reward = ocr.build(OcrRewardConfig.model_validate({"kind": "ocr", "score": score}), [])
    texts, pictures = numbers[0][:16], numbers[1][:16]
    wrong = [f"{(int(text) + 37) % 100:02d}" for text in texts]
    right_scores, wrong_scores = values(reward, pictures, texts), values(reward, pictures, wrong)
    assert all(a >= b + gap for a, b in zip(right_scores, wrong_scores, strict=True))


def test_a_picture_scores_the_same_in_every_batch(reward: MakeReward, numbers: tuple[list[str], Tensor]) -> None:
    texts, pictures = numbers[0][:45], numbers[1][:45]
    scorer = reward("log_likelihood")
    together = values(scorer, pictures, texts)
    alone = [values(scorer, pictures[i : i + 1], [texts[i]])[0] for i in range(8)]
    backwards = values(scorer, pictures.flip(0), texts[::-1])
    assert together[:8] == alone
    assert together == backwards[::-1]
    assert len(set(together)) == 45


def test_a_line_of_text_is_read_in_its_own_shape(recogniser: ocr.Recogniser) -> None:
    """Two numbers side by side in a picture twice as wide as high, four times as large as the network's input."""
    captions = [glyphs.Caption(42, "black", "white", "sans"), glyphs.Caption(17, "black", "white", "sans")]
    line = torch.cat(list(glyphs.pictures_of(captions, [0, 1], seed=0)), dim=-1)
    large = torch.nn.functional.interpolate(line[None], size=(192, 384), mode="bicubic").clamp(0, 1)
    for pictures in (line[None], large):
        (read,) = recogniser.read(pictures)
        assert read.replace(" ", "") == "4217"


def test_a_likelihood_has_a_floor(reward: MakeReward, numbers: tuple[list[str], Tensor]) -> None:
    """Seven characters do not fit the six positions of a square picture."""
    assert values(reward("log_likelihood"), numbers[1][:1], ["1234567"]) == [-20.0]


def test_the_wanted_text_is_the_metadatas_before_the_quoted_one(
    reward: MakeReward, numbers: tuple[list[str], Tensor]
) -> None:
    texts, pictures = numbers[0][:3], numbers[1][:3]
    prompts = [f'"{texts[0]}" beside "no"', 'a sign "no"', "no text at all"]
    metadata = [{}, {"text": texts[1]}, {}]
    assert reward("edit")(pictures, prompts, metadata) == [1.0, 1.0, None]


def test_text_that_the_network_cannot_write_has_no_likelihood(
    reward: MakeReward, numbers: tuple[list[str], Tensor]
) -> None:
    assert values(reward("log_likelihood"), numbers[1][:1], ["\u16a0"]) == [None]
    assert values(reward("edit"), numbers[1][:1], ["\u16a0"]) == [0.0]


@pytest.mark.parametrize(
    ("text", "metadata"),
    [("a sign", {}), ('a "" sign', {}), ('a 12" ruler', {}), ("a", {"text": " "}), ('"a"', {"text": 7})],
)
def test_a_prompt_without_text_is_refused(reward: MakeReward, text: str, metadata: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"^prompt 5 .* names no text: put it in double quotes or as a string in metadata\.text$"
    ):
        reward("edit").check(Prompt(5, text, metadata))


def test_prompts_that_can_be_scored_pass(reward: MakeReward) -> None:
    for score in ("edit", "exact", "log_likelihood"):
        reward(score).check(Prompt(0, 'a sign "Hello World"'))
        reward(score).check(Prompt(0, "the number 42", {"text": "42"}))
    reward("edit").check(Prompt(0, '"\u16a0"'))


def test_a_likelihood_of_unknown_characters_is_refused(reward: MakeReward) -> None:
    with pytest.raises(ValueError, match=r"^prompt 5 wants '\u16a0', with characters .* set score to edit or exact$"):
        reward("log_likelihood").check(Prompt(5, '"\u16a0"'))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(ocr, "distribution", absent)
    with pytest.raises(ValueError, match=r"needs the extra: pip install 'sigmazero\[ocr\]'$"):
        ocr.load_recogniser()


def test_a_wheel_without_a_recogniser_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Empty:
        version = "3.1.0"

        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(ocr, "distribution", lambda name: Empty())
    with pytest.raises(ValueError, match=r"finds no recogniser .* in rapidocr 3\.1\.0"):
        ocr.load_recogniser()
