"""Rewards of a CLIP model: agreement with the prompt, PickScore, and an aesthetic head over picture features.

Features are fp32 rows of length 1, so a dot product is a cosine. Weights are safetensors; nothing of a folder is run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sigmazero.config import AestheticRewardConfig, ClipRewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards.base import Layout, Reward, Values
from sigmazero.tensors import read_tensors

# What a hub id is asked for: one format of the weights, and no pickle.
_FILES = ("*.json", "*.txt", "model*.safetensors")


@dataclass
class ClipReward:
    """``scale * cosine`` of each picture with its own prompt.

    ``clip``: scale 1. ``pickscore`` (Kirstain et al. 2023): the raw PickScore is ``exp(logit_scale) * cosine``; here
    it is that over 26, near 1 for real samples, as Flow-GRPO takes it (Liu et al. 2025).
    """

    model: Any
    processor: Any
    tokenizer: Any
    scale: float
    layout: Layout = "pil"
    size: tuple[int, int] | None = None

    def check(self, prompt: Prompt) -> None:
        if not prompt.text.strip():
            raise ValueError(f"prompt {prompt.id} is empty, so a picture cannot be compared with it; give it a text")

    def __call__(self, pictures: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Values:
        seen = picture_features(self.model, self.processor, pictures)
        asked = text_features(self.model, self.tokenizer, prompts)
        return (self.scale * (seen * asked).sum(-1)).tolist()


@dataclass
class AestheticReward:
    """The LAION aesthetic predictor's score, about 1 to 10, over 10."""

    model: Any
    processor: Any
    head: Sequence[tuple[Tensor, Tensor]]
    layout: Layout = "pil"
    size: tuple[int, int] | None = None

    def check(self, prompt: Prompt) -> None:
        """The prompt is not looked at."""

    def __call__(self, pictures: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Values:
        rows = picture_features(self.model, self.processor, pictures)
        for weight, bias in self.head:
            rows = functional.linear(rows, weight, bias)
        return (rows[:, 0] / 10).tolist()


@torch.inference_mode()
def picture_features(model: Any, processor: Any, pictures: Sequence[Any]) -> Tensor:
    """fp32 ``[b, d]`` of PIL pictures, each row of length 1."""
    pixels = processor(images=list(pictures), return_tensors="pt")["pixel_values"]
    return functional.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)


@torch.inference_mode()
def text_features(model: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """fp32 ``[b, d]`` of texts, each row of length 1; what is longer than tokenizer or model allow is cut off."""
    limit = min(tokenizer.model_max_length, model.config.text_config.max_position_embeddings)
    tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=limit, return_tensors="pt")
    found = model.get_text_features(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    return functional.normalize(found.pooler_output, dim=-1)


def read_head(path: Path, width: int) -> list[tuple[Tensor, Tensor]]:
    """fp32 ``(weight [out, in], bias [out])`` of a stack of linear layers from ``width`` features to one score.

    The file's names are ``layers.N.weight`` and ``layers.N.bias``, applied in order of N: the numbers that lack were
    dropouts (github.com/christophschuhmann/improved-aesthetic-predictor).

    Raises:
        ValueError: no safetensors file, other names, or shapes that do not lead from ``width`` to 1.
    """
    parts: dict[int, dict[str, Tensor]] = {}
    for name, value in read_tensors(path)[0].items():
        match = re.fullmatch(r"layers\.(\d+)\.(weight|bias)", name)
        if match is None:
            raise ValueError(f"it holds {name!r}; a head's tensors are layers.N.weight and layers.N.bias")
        parts.setdefault(int(match[1]), {})[match[2]] = value.float()
    layers = []
    for number in sorted(parts):
        layers.append(_linear(f"layers.{number}", parts[number], width))
        width = len(layers[-1][1])
    if not layers or width != 1:
        raise ValueError(f"its {len(layers)} layers end in {width} values; a head ends in one score")
    return layers


def _linear(name: str, part: Mapping[str, Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of one layer, if they take ``width`` values."""
    if len(part) != 2:
        raise ValueError(f"{name} lacks its {'bias' if 'weight' in part else 'weight'}")
    weight, bias = part["weight"], part["bias"]
    if weight.ndim != 2 or weight.shape[1] != width or bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{name} has weight {list(weight.shape)} and bias {list(bias.shape)}; expected [out, {width}] and [out] "
            f"after {width} values: take the head that belongs to this CLIP model"
        )
    return weight, bias


def find_folder(path: str) -> Path:
    """The local folder of a model: ``path`` itself, or the cached download of that hub id.

    Raises:
        ValueError: it is neither, or the hub does not answer.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=list(_FILES)))
    except Exception as error:
        raise ValueError(f"there is no such folder, and as a hub id it fails: {error}") from error


def load_model(folder: Path) -> Any:
    """The fp32 CLIPModel of a folder, in eval mode.

    Raises:
        ValueError: its config is of another model, or its weights do not fill it. Files that are absent or broken
            raise other errors, of many kinds.
    """
    from transformers import CLIPConfig, CLIPModel

    # Without a config, transformers would take the one of ViT-B/32.
    kind = CLIPConfig.get_config_dict(folder, local_files_only=True)[0].get("model_type")
    if kind != "clip":
        raise ValueError(f"it needs a config.json of model_type 'clip', found {kind!r}")
    loaded: Any = CLIPModel.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True,
        output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    model, report = loaded
    # transformers would leave these at random values and only warn.
    unfilled = sorted(report["missing_keys"]) + [name for name, *_ in report["mismatched_keys"]]
    if unfilled:
        raise ValueError(f"its weights leave {len(unfilled)} tensors of its config unset, {unfilled[0]} among them")
    return model.eval()


def load_tokenizer(folder: Path, vocabulary: int) -> Any:
    """The CLIPTokenizer of a folder.

    Raises:
        ValueError: it knows another number of tokens than the model: without files, transformers makes an empty one.
    """
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    if len(tokenizer) != vocabulary:
        raise ValueError(f"its tokenizer files give {len(tokenizer)} tokens, but the model knows {vocabulary}")
    return tokenizer


def load_processor(folder: Path) -> Any:
    """The picture preprocessing of a folder, by PIL whether or not torchvision is there: scores must not hang on it."""
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil.from_pretrained(folder, local_files_only=True)


@contextlib.contextmanager
def _one_line(config: ClipRewardConfig | AestheticRewardConfig) -> Generator[None]:
    """Whatever a folder makes transformers raise is one line that names the setting."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())[:400].rstrip(".")
        raise ValueError(
            f"rewards: kind {config.kind} cannot use path {config.path!r}: {text}; give the folder or hub id of a CLIP "
            "model with config.json, safetensors weights, preprocessor_config.json and tokenizer files"
        ) from error


def build(config: ClipRewardConfig | AestheticRewardConfig, plugins: Sequence[str]) -> Reward:
    """The reward of a recipe, its model loaded; a hub id is downloaded unless it is cached.

    Raises:
        ValueError: ``path`` is no CLIP model with safetensors weights, or the head does not fit it.
    """
    with _one_line(config):
        folder = find_folder(config.path)
        model, processor = load_model(folder), load_processor(folder)
        if isinstance(config, ClipRewardConfig):
            tokenizer = load_tokenizer(folder, model.config.text_config.vocab_size)
            scale = 1.0 if config.kind == "clip" else model.logit_scale.exp().item() / 26
            return ClipReward(model, processor, tokenizer, scale)
    try:
        return AestheticReward(model, processor, read_head(Path(config.head), model.config.projection_dim))
    except ValueError as error:
        raise ValueError(f"rewards: kind aesthetic cannot use head {config.head!r}: {error}") from error
