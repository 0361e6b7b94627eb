"""CLIP rewards on tiny random weights, against the models' own features and hand-made linear algebra."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sigmazero.config import AestheticRewardConfig, ClipRewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards.clip import build
from sigmazero.tensors import read_tensors, write_tensors

WIDTH = 8  # of the features
LONGEST = 12  # tokens of a text, its two ends among them
PROMPTS = ["a red cat", "abc", "many more letters than twelve"]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(f"a test reached for the network: {args}")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def tokenizer() -> Any:
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=LONGEST)


def tower(**more: int) -> dict[str, int]:
    return {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **more}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny CLIP model whose weights are fp16, as published ones often are."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    folder, words = tmp_path_factory.mktemp("clip"), tokenizer()
    text = tower(vocab_size=len(words), max_position_embeddings=LONGEST, bos_token_id=52, eos_token_id=53)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CLIPModel(
            CLIPConfig(
                text_config={**text, "pad_token_id": 53},
                vision_config=tower(image_size=30, patch_size=10),
                projection_dim=WIDTH,
            )
        )
    # An untrained tower hardly looks at its input: larger weights let pictures and texts tell.
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.mul_(8)
    model.half().save_pretrained(folder)
    words.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30}).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may break."""
    return Path(shutil.copytree(made, tmp_path / "model"))


def pictures() -> list[Image.Image]:
    values = np.random.default_rng(0).integers(0, 256, (3, 30, 30, 3), dtype=np.uint8)
    return [Image.fromarray(value) for value in values]


def tensor(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found.pooler_output


def expected_features(folder: Path) -> tuple[Tensor, Tensor, float]:
    """Unit rows of the pictures and of the prompts, and the scale, from the model itself: no processor, no padding."""
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(folder, dtype=torch.float32)
    mean, deviation = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = np.stack([(np.asarray(picture) / 255 - mean) / deviation for picture in pictures()])
    words, texts = tokenizer(), []
    for prompt in PROMPTS:
        inside = words(prompt, add_special_tokens=False)["input_ids"][: LONGEST - 2]
        texts.append(torch.tensor([[52, *inside, 53]]))
    with torch.no_grad():
        seen = tensor(model.get_image_features(pixel_values=torch.from_numpy(pixels).float().permute(0, 3, 1, 2)))
        asked = torch.cat([tensor(model.get_text_features(input_ids=text)) for text in texts])
    scale = model.logit_scale.item()
    return seen / seen.norm(dim=-1, keepdim=True), asked / asked.norm(dim=-1, keepdim=True), scale


def clip(path: Path | str, kind: Any = "clip") -> Any:
    return build(ClipRewardConfig(kind=kind, path=str(path)), [])


def aesthetic(path: Path, head: Path) -> Any:
    return build(AestheticRewardConfig(kind="aesthetic", path=str(path), head=str(head)), [])


def refusal(make: Any, *args: Any) -> str:
    with pytest.raises(ValueError, match=r"^rewards: kind ") as caught:
        make(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_clip_is_the_cosine_of_each_picture_with_its_own_prompt(made: Path) -> None:
    seen, asked, _ = expected_features(made)
    reward = clip(made)
    assert (reward.layout, reward.size) == ("pil", None)
    found = torch.tensor(reward(pictures(), PROMPTS, [{}] * 3))
    torch.testing.assert_close(found, (seen * asked).sum(-1), atol=1e-5, rtol=0)
    assert found.std() > 0.01  # else any pairing would pass


def test_pickscore_is_scaled_as_flow_grpo_scales_it(made: Path) -> None:
    seen, asked, scale = expected_features(made)
    found = torch.tensor(clip(made, "pickscore")(pictures(), PROMPTS, [{}] * 3))
    torch.testing.assert_close(found, float(np.exp(scale)) / 26 * (seen * asked).sum(-1), atol=1e-5, rtol=0)


def test_the_processor_resizes_and_crops(made: Path) -> None:
    """A picture of twice the size and of one colour looks like the small one."""
    small, large = Image.new("RGB", (30, 30), (200, 30, 90)), Image.new("RGB", (70, 60), (200, 30, 90))
    first, second = clip(made)([small, large], ["abc", "abc"], [{}] * 2)
    assert first == pytest.approx(second, abs=1e-5)


def test_a_text_is_cut_at_the_models_limit_where_the_tokenizer_has_none(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace(f'"model_max_length": {LONGEST}', '"model_max_length": 100000'))
    reward = clip(folder)
    assert reward.tokenizer.model_max_length == 100000
    assert reward(pictures(), PROMPTS, [{}] * 3) == pytest.approx(clip(folder)(pictures(), PROMPTS, [{}] * 3))


def test_weights_are_fp32_and_keep_no_graph(made: Path) -> None:
    model = clip(made).model
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert not model.training


def head_tensors(sizes: list[int], numbers: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for number, before, after in zip(numbers, sizes, sizes[1:], strict=False):
        tensors[f"layers.{number}.weight"] = torch.randn(after, before, generator=generator)
        tensors[f"layers.{number}.bias"] = torch.randn(after, generator=generator)
    return tensors


def write_head(path: Path, tensors: dict[str, Tensor]) -> Path:
    write_tensors(path / "head.safetensors", tensors)
    return path / "head.safetensors"


def test_aesthetic_applies_its_layers_by_number_and_divides_by_ten(made: Path, tmp_path: Path) -> None:
    """Ten stands after two, unlike in the order of names."""
    tensors = head_tensors([WIDTH, 5, 4, 1], [0, 2, 10])
    head = write_head(tmp_path, tensors)
    rows = expected_features(made)[0].numpy()
    for number in (0, 2, 10):
        rows = rows @ tensors[f"layers.{number}.weight"].numpy().T + tensors[f"layers.{number}.bias"].numpy()
    reward = aesthetic(made, head)
    assert reward.layout == "pil"
    assert reward(pictures(), PROMPTS, [{}] * 3) == pytest.approx((rows[:, 0] / 10).tolist(), abs=1e-5)


def test_aesthetic_needs_no_tokenizer_and_no_prompt(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    reward = aesthetic(folder, write_head(tmp_path, head_tensors([WIDTH, 1], [0])))
    reward.check(Prompt(0, ""))
    assert len(reward(pictures(), ["", "", ""], [{}] * 3)) == 3


@pytest.mark.parametrize("kind", ["clip", "pickscore"])
def test_an_empty_prompt_is_refused(made: Path, kind: str) -> None:
    reward = clip(made, kind)
    reward.check(Prompt(1, "a cat"))
    for text in ("", " \n"):
        with pytest.raises(ValueError, match="prompt 7 is empty"):
            reward.check(Prompt(7, text))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (head_tensors([WIDTH + 1, 1], [0]), "layers.0 has weight [1, 9] and bias [1]; expected [out, 8]"),
        (head_tensors([WIDTH, 4], [0]), "its 1 layers end in 4 values"),
        ({**head_tensors([WIDTH, 5], [0]), **head_tensors([4, 1], [1])}, "layers.1 has weight [1, 4]"),
        ({"layers.0.weight": torch.zeros(1, WIDTH), "layers.0.bias": torch.zeros(2)}, "bias [2]"),
        ({"layers.0.weight": torch.zeros(1, WIDTH)}, "layers.0 lacks its bias"),
        ({"mlp.0.weight": torch.zeros(1, WIDTH)}, "it holds 'mlp.0.weight'"),
        ({}, "its 0 layers"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused(made: Path, tmp_path: Path, tensors: dict[str, Tensor], said: str) -> None:
    text = refusal(aesthetic, made, write_head(tmp_path, tensors))
    assert text.startswith("rewards: kind aesthetic cannot use head ")
    assert said in text


def test_a_head_that_is_pickled_or_missing_is_refused(made: Path, tmp_path: Path) -> None:
    torch.save(head_tensors([WIDTH, 1], [0]), tmp_path / "head.pth")
    assert "safetensors" in refusal(aesthetic, made, tmp_path / "head.pth")
    assert "safetensors" in refusal(aesthetic, made, tmp_path / "none.safetensors")


@pytest.mark.parametrize("path", ["/no/such/folder", "no_such_folder/clip", "./there/is/none"])
def test_a_missing_folder_is_refused(path: str) -> None:
    text = refusal(clip, path)
    assert text.startswith(f"rewards: kind clip cannot use path {path!r}: there is no such folder, and as a hub id")
    assert "give the folder or hub id of a CLIP model" in text


def test_pickled_weights_are_refused_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(read_tensors(folder / "model.safetensors")[0], folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    loads: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *args, **more: loads.append(args))
    text = refusal(clip, folder)
    assert "model.safetensors" in text
    assert loads == []


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_one_of_its_files_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert refusal(clip, folder).startswith(f"rewards: kind clip cannot use path {str(folder)!r}: ")


def test_weights_that_lack_a_tensor_are_not_made_up(folder: Path) -> None:
    tensors, metadata = read_tensors(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    write_tensors(folder / "model.safetensors", tensors, metadata)
    assert "1 tensors of its config unset, visual_projection.weight among them" in refusal(clip, folder)


def test_weights_of_another_size_are_refused(folder: Path) -> None:
    tensors, metadata = read_tensors(folder / "model.safetensors")
    tensors["visual_projection.weight"] = torch.zeros(WIDTH + 1, 16)
    write_tensors(folder / "model.safetensors", tensors, metadata)
    assert "1 tensors of its config unset, visual_projection.weight among them" in refusal(clip, folder)


def test_another_kind_of_model_is_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "clip"', '"model_type": "siglip"'))
    assert "a config.json of model_type 'clip', found 'siglip'" in refusal(clip, folder)


def test_a_hub_id_is_taken_from_the_cache(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "0" * 40
    shutil.copytree(made, tmp_path / "models--some--clip" / "snapshots" / revision)
    (tmp_path / "models--some--clip" / "refs").mkdir()
    (tmp_path / "models--some--clip" / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert clip("some/clip")(pictures(), PROMPTS, [{}] * 3) == clip(made)(pictures(), PROMPTS, [{}] * 3)
