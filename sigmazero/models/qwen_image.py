"""The Qwen-Image family (arXiv 2508.02324): a double-stream transformer told by Qwen2.5-VL's language model.

Convention: the network is fed ``t / 1000 = sigma`` and answers ``v = eps - x0``. A latent is packed: one token of 64
channels a 2x2 patch of the VAE's 16 channels, so that the norm of true guidance acts on a token's channels.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from sigmazero import seeds
from sigmazero.models.attention import use_backend
from sigmazero.models.base import compute_dtype
from sigmazero.models.folder import PipelineFolder, open_pipeline, scheduler_shift
from sigmazero.records import Conditioning

PIPELINE = "QwenImagePipeline"
PATCH = 2  # of the VAE's latents, each side
DEFAULT_SIZE = 128  # of the VAE's latents, each side: 1024 pixels
PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS = 34  # the hidden states of the prefix are dropped
MAX_TOKENS = 512  # what is left of a prompt and the suffix, as the pipeline cuts it


class QwenImageModel:
    """The family's FlowModel.

    Args:
        net: the transformer, in the precision that latents and embeddings are cast to.
        vae: in fp32; one picture at a time, so that a large batch fits and a row does not depend on the others.
        text: tokenizer, and the language model alone, without the vision tower and the output layer; or neither.
        shift: the static shift of this size.
        height, width: in pixels.
    """

    family = "qwen_image"
    guidance_norm = "layer_norm"

    def __init__(
        self,
        net: QwenImageTransformer2DModel,
        vae: AutoencoderKLQwenImage,
        text: tuple[Qwen2Tokenizer, nn.Module] | None,
        shift: float,
        height: int,
        width: int,
    ) -> None:
        self.net, self._shift = net.eval(), shift
        self._tokenizer, encoder = text or (None, None)
        self._vae: Any = vae.eval().requires_grad_(False)
        self._vae.enable_slicing()
        self.text_encoder: nn.Module | None = None if encoder is None else encoder.eval().requires_grad_(False)
        self._height, self._width = height, width
        cell = PATCH * vae.spatial_compression_ratio
        self._grid = height // cell, width // cell
        self.latent_shape = (self._grid[0] * self._grid[1], vae.config["z_dim"] * PATCH**2)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Attention projections of pictures and text.

        The network drops the last block's text: an adapter on its query or output would never get a gradient.
        """
        blocks = range(self.net.config["num_layers"] - 1)
        text = [f"transformer_blocks.{i}.attn.{name}" for i in blocks for name in ("add_q_proj", "to_add_out")]
        return ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj", *text)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """The language model's last hidden states of each prompt in its template, without the template's start.

        Returns: ``embeddings [b, L, D]`` in the net's dtype, zero beyond a prompt's length; ``mask`` bool ``[b, L]``.
        Raises:
            RuntimeError: the text encoder is gone.
        """
        if self.text_encoder is None or self._tokenizer is None:
            raise RuntimeError("the text encoder was dropped by free_encoders(); encode all prompts before that")
        device, dtype = _place(self.net)
        texts = list(dict.fromkeys(prompts)) or [""]  # of no prompts: no rows of the right shape
        tokens = self._tokenizer(
            [PREFIX + text + SUFFIX for text in texts],
            max_length=PREFIX_TOKENS + MAX_TOKENS,
            truncation=True,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        ).to(device)
        encoder = self.text_encoder.to(device)
        hidden = encoder(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], use_cache=False)
        mask = tokens["attention_mask"][:, PREFIX_TOKENS:].bool()
        embeddings = _blank(hidden.last_hidden_state[:, PREFIX_TOKENS:].to(dtype), mask)
        return Conditioning({"embeddings": embeddings, "mask": mask}).take([texts.index(p) for p in prompts])

    def velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        _, dtype = _place(net)
        is_whole = bool(condition["mask"].all())  # asked where it lies, the host: on the device it would wait
        mask = condition["mask"].to(x.device)
        embeddings = _blank(condition["embeddings"].to(x.device, dtype), mask)
        sigma = sigma.to(x.device, torch.float32)
        with _exact_time(net, sigma):
            return net(
                hidden_states=x.to(dtype),
                timestep=sigma,
                encoder_hidden_states=embeddings,
                encoder_hidden_states_mask=None if is_whole else mask,  # without a mask attention is faster
                img_shapes=[[(1, *self._grid)]] * len(x),
                return_dict=False,
            )[0]

    def decode(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics(latents.device)
        z = self._unpack(latents.float()) * std + mean
        pictures = self._vae.to(latents.device).decode(z, return_dict=False)[0][:, :, 0]
        return (pictures / 2 + 0.5).clamp(0, 1)

    def encode_pictures(self, pictures: Tensor) -> Tensor:
        """Packed latents fp32 ``[b, tokens, 64]`` of pictures ``[b, 3, H, W]``, the mean of the VAE's posterior.

        Raises:
            ValueError: the pictures are of another size than the model.
        """
        size = tuple(pictures.shape[-2:])
        if size != (self._height, self._width):
            raise ValueError(
                f"data.height and data.width are {self._height} and {self._width}, but the pictures are "
                f"{size[0]} by {size[1]}; set them to that or resize the pictures"
            )
        mean, std = self._statistics(pictures.device)
        frames = (pictures.float() * 2 - 1).unsqueeze(2)
        z = self._vae.to(pictures.device).encode(frames, return_dict=False)[0].mode()
        return self._pack((z - mean) / std)

    def enable_activation_checkpointing(self, net: nn.Module, function: Any) -> None:
        for module in net.modules():
            if isinstance(module, QwenImageTransformer2DModel):
                module.enable_gradient_checkpointing(function)

    def use_attention(self, backend: str, dtypes: Sequence[torch.dtype]) -> None:
        """As ``attention.use_backend``, with the mask over the text."""
        use_backend(self.net, backend, dtypes, masked=True)

    def check_guidance(self, setting: str, scale: float) -> None:
        """Any: its pipeline guides by two passes."""

    def metadata(self) -> Mapping[str, str]:
        return {"family": self.family, "height": str(self._height), "width": str(self._width)}

    def default_shift(self, num_steps: int) -> float:
        """``e^mu`` of the family's own scheduler at this size, whatever the number of steps.

        The pipeline stretches its grid afterwards so that it ends at ``shift_terminal``. A distilled grid switches that
        off (B08), so this shift is without it.
        """
        return self._shift

    def free_encoders(self) -> None:
        """Drops the text encoder; ``encode`` raises a RuntimeError from then on."""
        self.text_encoder = None

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The latents' mean and std a channel, ``[1, 16, 1, 1, 1]``."""
        config = self._vae.config
        both = torch.tensor([config["latents_mean"], config["latents_std"]], device=device)
        mean, std = both.reshape(2, 1, -1, 1, 1, 1)
        return mean, std

    def _pack(self, z: Tensor) -> Tensor:
        """``[b, 16, 1, 2h, 2w]`` to ``[b, h * w, 64]``; a token's channels run channel first, then row, then column."""
        h, w = self._grid
        patches = z.reshape(len(z), -1, h, PATCH, w, PATCH).permute(0, 2, 4, 1, 3, 5)
        return patches.reshape(len(z), *self.latent_shape)

    def _unpack(self, tokens: Tensor) -> Tensor:
        h, w = self._grid
        patches = tokens.reshape(len(tokens), h, w, -1, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
        return patches.reshape(len(tokens), -1, 1, h * PATCH, w * PATCH)


def _place(net: nn.Module) -> tuple[torch.device, torch.dtype]:
    weight = next(net.parameters())
    return weight.device, compute_dtype(net)


def _blank(embeddings: Tensor, mask: Tensor) -> Tensor:
    """Zeroes the rows beyond a prompt's length: attention gives them no weight, but 0 times nan would be nan."""
    return embeddings.masked_fill(~mask.unsqueeze(-1), 0)


@contextlib.contextmanager
def _exact_time(net: Any, sigma: Tensor) -> Generator[None]:
    """Hands the sinusoid the fp32 time: the network rounds it to its own precision on the way there (B03)."""
    hook = net.time_text_embed.register_forward_pre_hook(lambda module, inputs: (sigma, *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def load(
    path: str,
    *,
    height: int | None = None,
    width: int | None = None,
    dtype: torch.dtype = torch.float32,
    encoders: bool = True,
) -> QwenImageModel:
    """Reads a diffusers folder of a ``QwenImagePipeline``, or a hub id where there is no such folder.

    Only safetensors are read and no remote code runs. The transformer and the language model are in ``dtype``, the VAE
    in fp32.

    Args:
        height, width: in pixels, multiples of 16; None is the pipeline's default, 1024.
        encoders: False leaves the text encoder out, as after ``free_encoders``.
    Raises:
        ValueError: the folder is of another family or a part of it is missing or does not fit; the size is none.
    """
    pipeline = open_pipeline(path, QwenImageModel.family, [PIPELINE], _PARTS, encoders=encoders)
    net = pipeline.weights("transformer", QwenImageTransformer2DModel, torch_dtype=dtype)
    _check_transformer(path, net)
    vae = pipeline.weights("vae", AutoencoderKLQwenImage, torch_dtype=torch.float32)
    size = [_size(vae, name, value) for name, value in (("height", height), ("width", width))]
    text = _read_text(pipeline, dtype) if encoders else None
    scheduler = pipeline.read("scheduler", FlowMatchEulerDiscreteScheduler.from_pretrained)
    shift = scheduler_shift(scheduler.config, size[0] * size[1] // (PATCH * vae.spatial_compression_ratio) ** 2)
    return QwenImageModel(net, vae, text, shift, size[0], size[1])


_PARTS = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")


def _check_transformer(path: str, net: QwenImageTransformer2DModel) -> None:
    for setting in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond"):
        if net.config.get(setting):
            raise ValueError(
                f"model.path: the transformer of {path} has {setting} on, which Qwen-Image's editing and layered "
                "relatives use; model.family qwen_image is text to image"
            )


def _read_text(pipeline: PipelineFolder, dtype: torch.dtype) -> tuple[Qwen2Tokenizer, nn.Module]:
    tokenizer = pipeline.read("tokenizer", Qwen2Tokenizer.from_pretrained)
    _check_prefix(pipeline.path, tokenizer)
    text_encoder = pipeline.weights("text_encoder", Qwen2_5_VLForConditionalGeneration, dtype=dtype)
    return tokenizer, text_encoder.model.language_model


def _check_prefix(path: str, tokenizer: Qwen2Tokenizer) -> None:
    found = len(tokenizer(PREFIX)["input_ids"])
    if found != PREFIX_TOKENS:
        raise ValueError(
            f"model.path: the tokenizer of {path} makes {found} tokens of the start of the prompt template, which is "
            f"dropped as {PREFIX_TOKENS}; it is not Qwen-Image's"
        )


def _size(vae: AutoencoderKLQwenImage, name: str, value: int | None) -> int:
    cell = PATCH * vae.spatial_compression_ratio
    if value is None:
        return DEFAULT_SIZE * vae.spatial_compression_ratio
    if value < cell or value % cell:
        raise ValueError(f"data.{name} is {value}; the VAE and 2x2 patches need a multiple of {cell}")
    return value


def tiny(folder: Path, seed: int = 0) -> None:
    """Writes a random pipeline of the family's own classes with about 1e5 weights a network; for tests.

    Two heads, two double-stream blocks; patches, latent channels, their statistics and the scheduler are the real ones.
    The tokenizer knows bytes and the words of the prompt template, whose start is 34 tokens as with the real one.
    """
    from diffusers import QwenImagePipeline

    tokenizer = _tiny_tokenizer()
    with seeds.weight_init(seed):
        transformer = QwenImageTransformer2DModel(
            num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 6, 6)
        )
        vae = AutoencoderKLQwenImage(base_dim=4, num_res_blocks=1)
        text_encoder = Qwen2_5_VLForConditionalGeneration(_tiny_language(len(tokenizer)))
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    QwenImagePipeline(scheduler, vae, text_encoder, tokenizer, transformer).save_pretrained(folder)


def _tiny_language(vocabulary: int) -> Qwen2_5_VLConfig:
    text = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision)


def _tiny_tokenizer() -> Qwen2Tokenizer:
    """Bytes, and byte pairs that join each word of the template from its start, a letter at a time."""
    pre_tokenizer: Any = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    parts = re.split(r"<\|im_\w+\|>", PREFIX + SUFFIX)
    words = [word for part in parts for word, _ in pre_tokenizer.pre_tokenize_str(part)]
    merges: list[Any] = list(dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word))))
    entries = dict.fromkeys([*sorted(ByteLevel.alphabet()), *(a + b for a, b in merges)])
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, extra_special_tokens=["<|im_start|>", "<|im_end|>"])
