"""Tiny random pipelines of the families, made of their real classes: what a recipe can be dry-run on anywhere."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

from sigmazero.models import FAMILIES

SCORER = "scorer"  # the sub-folder of a tiny pipeline that rewards of kind clip and pickscore load


def write_tiny(family: str, folder: Path, seed: int = 0) -> None:
    """Writes a pipeline folder that the family's diffusers pipeline and ``model.path`` both load, and in it a scorer.

    Raises:
        ValueError: the family has no tiny pipeline, or the folder holds something.
    """
    known = [name for name in FAMILIES if name != "glyph"]  # its shipped weights are tiny already
    if family not in known:
        raise ValueError(f"family is {family!r}; tiny pipelines are made of {', '.join(known)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something already; name a new folder")
    importlib.import_module(FAMILIES[family]).tiny(folder, seed)
    write_tiny_scorer(folder / SCORER, seed)


def write_tiny_scorer(folder: Path, seed: int = 0) -> None:
    """Writes a random CLIP model of about 2e4 weights that reads printable characters and pictures of 32 by 32."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    from sigmazero.models.folder import fill, tiny_clip_tokenizer

    tokenizer = tiny_clip_tokenizer("<|endoftext|>")
    end = len(tokenizer) - 1
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(tokenizer), "bos_token_id": end - 1, "eos_token_id": end, "pad_token_id": end}
    model = CLIPModel(
        CLIPConfig(
            text_config={**tower, **text}, vision_config={**tower, "image_size": 32, "patch_size": 8}, projection_dim=8
        )
    )
    fill(model, seed, 99)  # a number that no network of a pipeline has
    model.logit_scale.data.fill_(math.log(100))  # as published ones
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"height": 32, "width": 32}
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size).save_pretrained(folder)
