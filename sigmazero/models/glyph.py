"""The glyph family: a small SD3 transformer in pixel space that reads captions of two-digit numbers.

Convention: the network is fed ``t = 1000 * sigma`` and answers ``v = eps - x0``, as SD3 does.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor, nn

from sigmazero import seeds
from sigmazero.config import ModelConfig
from sigmazero.glyphs import SIZE, SLOTS, parse_caption
from sigmazero.records import Conditioning
from sigmazero.schedule import timestep
from sigmazero.tensors import read_tensors, write_tensors

ASSETS = Path(__file__).parents[1] / "assets"
SHIPPED = {"shipped": ASSETS / "glyph_teacher.safetensors", "half_trained": ASSETS / "glyph_half_trained.safetensors"}
PATCH, HEAD_WIDTH = 4, 32
OFFSETS = [sum(len(slot) for slot in SLOTS[:i]) for i in range(len(SLOTS))]
NO_CAPTION = sum(len(slot) for slot in SLOTS)  # the token of the empty prompt, in every slot


class GlyphNet(nn.Module):
    """Caption tokens and a noisy picture to velocity. The text encoder is a table: one vector a named attribute."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.text = nn.Embedding(NO_CAPTION + 1, width)
        self.transformer = SD3Transformer2DModel(
            sample_size=SIZE, patch_size=PATCH, in_channels=3, out_channels=3, num_layers=num_layers,
            attention_head_dim=HEAD_WIDTH, num_attention_heads=width // HEAD_WIDTH, joint_attention_dim=width,
            caption_projection_dim=width, pooled_projection_dim=width * len(SLOTS), pos_embed_max_size=SIZE // PATCH,
        )  # fmt: skip

    def forward(self, x: Tensor, t: Tensor, tokens: Tensor) -> Tensor:
        """x ``[b, 3, 16, 16]``, t fp32 ``[b]`` in 0..1000, tokens int64 ``[b, 5]`` -> velocity ``[b, 3, 16, 16]``."""
        words = self.text(tokens)
        return self.transformer(
            x, encoder_hidden_states=words, pooled_projections=words.flatten(1), timestep=t, return_dict=False
        )[0]

    def start_as_identity(self) -> None:
        """Zeroes the modulations and the output, so that every block starts as the identity (DiT, arXiv 2212.09748)."""
        for name, module in self.transformer.named_modules():
            if isinstance(module, nn.Linear) and (name == "proj_out" or (".norm" in name and name.endswith("linear"))):
                nn.init.zeros_(module.weight)
                nn.init.zeros_(module.bias)


class GlyphModel:
    """The family's FlowModel. Latents are pixels, moved to zero mean and about unit variance."""

    family = "glyph"
    latent_shape = (3, SIZE, SIZE)
    guidance_norm = "none"
    lora_targets = (
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "net.0.proj", "net.2",
    )  # fmt: skip
    shift, scale = 0.75, 0.25

    def __init__(self, net: GlyphNet, width: int, num_layers: int) -> None:
        self.net, self._width, self._num_layers = net.eval(), width, num_layers

    def default_shift(self, num_steps: int) -> float:
        return 1.0  # a few pixels: the grid stays uniform

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Tokens int64 ``[b, 5]``: both digits, ink, paper, style; a slot that is left open has a token of its own.

        Raises:
            ValueError: a caption is not of the grammar.
        """
        return Conditioning({"tokens": torch.tensor([_tokens(p) for p in prompts], dtype=torch.long).reshape(-1, 5)})

    def velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        weight = next(net.parameters())
        return net(x.to(weight.dtype), timestep(sigma), condition["tokens"].to(x.device))

    def decode(self, latents: Tensor) -> Tensor:
        return (latents.float() * self.scale + self.shift).clamp(0, 1)

    def encode_pictures(self, pictures: Tensor) -> Tensor:
        return (pictures.float() - self.shift) / self.scale

    def enable_activation_checkpointing(self, net: nn.Module, function: Any) -> None:
        for module in net.modules():
            if isinstance(module, SD3Transformer2DModel):
                module.enable_gradient_checkpointing(function)

    def metadata(self) -> Mapping[str, str]:
        return {"family": self.family, "config": json.dumps({"width": self._width, "num_layers": self._num_layers})}


@functools.lru_cache(maxsize=4096)  # a cycle asks for each caption several times
def _tokens(prompt: str) -> tuple[int, ...]:
    if not prompt:
        return (NO_CAPTION,) * len(SLOTS)
    caption = parse_caption(prompt)
    named = (*f"{caption.number:02d}", caption.ink, caption.paper, caption.style)
    return tuple(at + (slot.index(word) if word else 0) for at, slot, word in zip(OFFSETS, SLOTS, named, strict=True))


def create(width: int | None, num_layers: int | None, seed: int) -> GlyphModel:
    """An untrained model whose weights are a function of the seed; None is the size of the shipped teacher."""
    width, num_layers = width or 128, num_layers or 4
    with seeds.weight_init(seed):
        net = GlyphNet(width, num_layers)
    net.start_as_identity()
    return GlyphModel(net, width, num_layers)


def save(
    path: str | Path, model: GlyphModel, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Writes weights named as in ``model.net`` to a file that ``load`` reads."""
    write_tensors(Path(path), {name: value.to(dtype) for name, value in tensors.items()}, model.metadata())


def load(path: str | Path) -> GlyphModel:
    """Reads a weight file of this family, in fp32 whatever the file's precision.

    Raises:
        ValueError: there is no such file, it is not safetensors, of another family, or its tensors do not fit.
    """
    path = Path(path)
    if not path.is_file():
        known = ", ".join((*SHIPPED, "random"))
        raise ValueError(f"model.path: there is no weight file {path}; it is a file, or one of {known}")
    try:
        stored, metadata = read_tensors(path)
    except ValueError as error:
        raise ValueError(f"model.path: {error}") from None
    if metadata.get("family") != GlyphModel.family:
        raise ValueError(f"model.path: {path} says family {metadata.get('family')!r}, wanted 'glyph'")
    try:
        config = ModelConfig.model_validate_json(metadata.get("config", ""))
    except ValueError as error:
        raise ValueError(f"model.path: {path} has no usable config in its metadata: {_first_line(error)}") from None
    if config.width is None or config.num_layers is None:
        raise ValueError(f"model.path: {path} does not say its width and num_layers in its metadata")
    width, num_layers = config.width, config.num_layers
    net = GlyphNet(width, num_layers)
    tensors = {name: value.float() for name, value in stored.items()}
    wanted = net.state_dict()
    wrong = sorted(set(wanted) ^ set(tensors)) or [n for n in wanted if wanted[n].shape != tensors[n].shape]
    if wrong:
        raise ValueError(f"model.path: the tensors of {path} do not fit its config: {', '.join(wrong[:4])}")
    broken = [name for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise ValueError(f"model.path: {path} holds non-finite weights: {', '.join(broken[:4])}")
    net.load_state_dict(tensors)
    return GlyphModel(net, width, num_layers)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
