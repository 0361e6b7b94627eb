"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206), from a diffusers pipeline folder.

Convention: the network is fed ``t = 1000 * sigma`` and answers ``v = eps - x0``, with latents ``[b, 16, H/8, W/8]``.

Text is two CLIP encoders and T5, each padded to its own fixed length; the network takes no mask, so what is padded is
part of the condition on purpose and a prompt's row never depends on its neighbours (B09).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from sigmazero.models.attention import use_backend
from sigmazero.models.base import compute_dtype
from sigmazero.models.folder import (
    PipelineFolder,
    fill,
    open_pipeline,
    printable,
    scheduler_shift,
    tiny_clip_tokenizer,
)
from sigmazero.records import Conditioning
from sigmazero.schedule import timestep

PIPELINE = "StableDiffusion3Pipeline"
T5_LENGTH = 256  # the pipeline's default; T5 rows are padded or cut to it


class _Encoders(NamedTuple):
    """Tokenizers and encoders in the pipeline's order. T5 may be absent."""

    clip: Sequence[tuple[Any, nn.Module]]
    t5: tuple[Any, nn.Module] | None


class SD3Model:
    """The family's FlowModel."""

    family = "sd3"
    guidance_norm = "none"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    def __init__(
        self,
        net: SD3Transformer2DModel,
        vae: AutoencoderKL,
        encoders: _Encoders | None,
        schedule: Mapping[str, Any],
        height: int,
        width: int,
    ) -> None:
        self.net = net.eval()
        self._vae: Any = vae.eval().requires_grad_(False)
        self._encoders = encoders
        self._schedule, self._height, self._width = schedule, height, width
        down = _downscale(vae.config)
        self.latent_shape = (net.config["in_channels"], height // down, width // down)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """``text`` ``[b, 77 + 256, d]`` and ``pooled`` ``[b, p]`` in the network's precision, on its device.

        Each distinct text is encoded once and by itself, so its bits do not depend on the others. CLIP reads the first
        77 tokens of a text and T5 the first 256.

        Raises:
            RuntimeError: the encoders were freed.
        """
        if self._encoders is None:
            raise RuntimeError("the text encoders are gone since free_encoders(); encode the prompts before it")
        texts = list(dict.fromkeys(prompts)) or [""]  # of no prompts: no rows of the right shape
        rows = Conditioning.cat([self._encode(text, self._encoders) for text in texts])
        return rows.take([texts.index(prompt) for prompt in prompts])

    def _encode(self, text: str, encoders: _Encoders) -> Conditioning:
        weight = next(self.net.parameters())
        hidden, pooled = zip(*(_clip(text, *clip, weight.device) for clip in encoders.clip), strict=True)
        clips = torch.cat(hidden, -1)
        t5 = _t5(text, encoders.t5, self.net.config["joint_attention_dim"], weight.device)
        both = torch.cat([pad(clips, (0, t5.shape[-1] - clips.shape[-1])), t5], 1)
        return Conditioning({"text": both.to(weight.dtype), "pooled": torch.cat(pooled, -1).to(weight.dtype)})

    def free_encoders(self) -> None:
        """Drops the text encoders and their memory; ``encode`` raises RuntimeError from then on."""
        self._encoders = None

    def velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        """x ``[b, 16, h, w]``, sigma fp32 ``[b]`` -> ``eps - x0`` in the network's precision.

        Time stays fp32 into the sinusoid; the network itself casts the embedding, not the time (B03).
        """
        dtype = compute_dtype(net)
        return net(
            x.to(dtype),
            timestep=timestep(sigma),
            encoder_hidden_states=condition["text"].to(x.device, dtype),
            pooled_projections=condition["pooled"].to(x.device, dtype),
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor) -> Tensor:
        """Latents ``[b, 16, h, w]`` -> fp32 ``[b, 3, H, W]`` in [0, 1], one picture at a time to bound memory."""
        vae, config = self._vae.to(latents.device), self._vae.config
        z = latents.float() / config["scaling_factor"] + config["shift_factor"]
        pictures = torch.cat([vae.decode(row, return_dict=False)[0] for row in z.split(1)])
        return (pictures / 2 + 0.5).clamp(0, 1)

    def encode_pictures(self, pictures: Tensor) -> Tensor:
        """Pictures ``[b, 3, H, W]`` in [0, 1] -> latents fp32: the posterior's mode, nothing is drawn."""
        vae, config = self._vae.to(pictures.device), self._vae.config
        rows = (pictures.float() * 2 - 1).split(1)
        z = torch.cat([vae.encode(row, return_dict=False)[0].mode() for row in rows])
        return (z - config["shift_factor"]) * config["scaling_factor"]

    def enable_activation_checkpointing(self, net: nn.Module, function: Any) -> None:
        """Runs each transformer block of ``net`` through ``function(block, *inputs)``."""
        for module in net.modules():
            if isinstance(module, SD3Transformer2DModel):
                module.enable_gradient_checkpointing(function)

    def use_attention(self, backend: str, dtypes: Sequence[torch.dtype]) -> None:
        """As ``attention.use_backend``: no mask."""
        self.net.set_attn_processor(_JointAttention())  # pyright: ignore[reportArgumentType]
        use_backend(self.net, backend, dtypes, masked=False)

    def check_guidance(self, setting: str, scale: float) -> None:
        """Any: its pipeline guides by two passes."""

    def metadata(self) -> Mapping[str, str]:
        """Family and size of the pictures, as strings."""
        return {"family": self.family, "height": str(self._height), "width": str(self._width)}

    def default_shift(self, num_steps: int) -> float:
        """The scheduler's shift at this size: its static one, or ``e^mu`` where its config asks for a dynamic one.

        diffusers applies the static shift twice (B07): its own default grid is ``schedule.diffusers_sd3_grid``.
        """
        _, height, width = self.latent_shape
        return scheduler_shift(self._schedule, height * width // self.net.config["patch_size"] ** 2)


class _JointAttention:
    """diffusers' ``JointAttnProcessor2_0``, over its dispatcher instead of torch's attention alone."""

    _attention_backend = AttentionBackendName.NATIVE  # named as in the processors of diffusers that dispatch

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Pictures ``[b, n, d]`` and, where it is given, text ``[b, m, d]``: each attends to both."""
        streams = [_heads(attn, hidden_states, "to_{}", "norm_{}")]
        if encoder_hidden_states is not None:
            streams.append(_heads(attn, encoder_hidden_states, "add_{}_proj", "norm_added_{}"))
        query, key, value = (torch.cat(parts, 1) for parts in zip(*streams, strict=True))
        out = dispatch_attention_fn(query, key, value, backend=self._attention_backend).flatten(2)
        length = hidden_states.shape[1]
        pictures = attn.to_out[1](attn.to_out[0](out[:, :length]))
        if encoder_hidden_states is None:
            return pictures
        return pictures, out[:, length:] if attn.context_pre_only else attn.to_add_out(out[:, length:])


def _heads(attn: Any, x: Tensor, layer: str, norm: str) -> list[Tensor]:
    """Query, key and value ``[b, n, heads, width]`` of ``x [b, n, d]``."""
    found = []
    for name in "qkv":
        heads = getattr(attn, layer.format(name))(x).unflatten(-1, (attn.heads, -1))
        normed = getattr(attn, norm.format(name)) if name != "v" else None
        found.append(heads if normed is None else normed(heads))
    return found


def _clip(text: str, tokenizer: Any, encoder: nn.Module, device: torch.device) -> tuple[Tensor, Tensor]:
    """The last hidden states but one ``[1, 77, d]``, and the projected pooled text ``[1, d]``."""
    ids = _tokens(text, tokenizer, tokenizer.model_max_length)
    out = encoder.to(device)(ids.to(device), output_hidden_states=True)
    return out.hidden_states[-2], out.text_embeds


def _t5(text: str, t5: tuple[Any, nn.Module] | None, width: int, device: torch.device) -> Tensor:
    """``[1, 256, width]``; zeros without a T5. No mask: T5 itself sees its padding, as in the pipeline."""
    if t5 is None:
        return torch.zeros((1, T5_LENGTH, width), device=device)
    tokenizer, encoder = t5
    return encoder.to(device)(_tokens(text, tokenizer, T5_LENGTH).to(device)).last_hidden_state


def _tokens(text: str, tokenizer: Any, length: int) -> Tensor:
    return tokenizer([text], padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids


def load(
    path: str,
    *,
    height: int | None = None,
    width: int | None = None,
    dtype: torch.dtype = torch.float32,
    encoders: bool = True,
) -> SD3Model:
    """Reads a pipeline folder, or a repository of the hub where ``path`` is no folder; safetensors, no remote code.

    Args:
        height, width: of the pictures in pixels; None is the pipeline's own size.
        dtype: of the transformer and the text encoders; the VAE is fp32.
        encoders: False leaves the text encoders out, as after ``free_encoders``.
    Raises:
        ValueError: there is no such folder, it is another pipeline's, a part or a weight is missing, or the size is not
            one that VAE and patches can make.
    """
    pipeline = open_pipeline(path, SD3Model.family, [PIPELINE], _PARTS, encoders=encoders)
    transformer, vae = (pipeline.config(part, *needed) for part, needed in _NEEDED.items())
    size = _checked_size(transformer, vae, height, width)
    return SD3Model(
        pipeline.weights("transformer", SD3Transformer2DModel, torch_dtype=dtype),
        pipeline.weights("vae", AutoencoderKL, torch_dtype=torch.float32),
        _read_encoders(pipeline, dtype) if encoders else None,
        pipeline.read("scheduler", FlowMatchEulerDiscreteScheduler.from_pretrained).config,
        *size,
    )


_PARTS = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
_NEEDED = {
    "transformer": (SD3Transformer2DModel, ("sample_size", "patch_size", "pos_embed_max_size")),
    "vae": (AutoencoderKL, ("block_out_channels", "scaling_factor", "shift_factor")),
}


def _read_encoders(pipeline: PipelineFolder, dtype: torch.dtype) -> _Encoders:
    clip = [_encoder(pipeline, number, CLIPTokenizer, CLIPTextModelWithProjection, dtype) for number in ("", "_2")]
    has_t5 = "text_encoder_3" in pipeline.parts
    return _Encoders(clip, _encoder(pipeline, "_3", T5Tokenizer, T5EncoderModel, dtype) if has_t5 else None)


def _encoder(
    pipeline: PipelineFolder, number: str, tokenizer_kind: Any, kind: Any, dtype: torch.dtype
) -> tuple[Any, nn.Module]:
    """A tokenizer and its encoder. Where its files are missing, the library makes a tokenizer that knows nothing."""
    tokenizer = pipeline.read(f"tokenizer{number}", tokenizer_kind.from_pretrained)
    encoder = pipeline.weights(f"text_encoder{number}", kind, dtype=dtype)
    known, wanted = len(tokenizer), encoder.config.vocab_size
    if known < wanted / 2:
        raise ValueError(
            f"model.path: tokenizer{number} of {pipeline.path} knows {known} of the {wanted} tokens of its encoder; "
            "its files are missing, set the folder of the whole pipeline"
        )
    return tokenizer, encoder.eval().requires_grad_(False)


def _checked_size(
    transformer: Mapping[str, Any], vae: Mapping[str, Any], height: int | None, width: int | None
) -> tuple[int, int]:
    down = _downscale(vae)
    multiple = down * transformer["patch_size"]
    largest = multiple * transformer["pos_embed_max_size"]
    for name, value in (("height", height), ("width", width)):
        if value is not None and (value % multiple or not 0 < value <= largest):
            raise ValueError(
                f"data.{name} is {value}; this model makes multiples of {multiple} up to {largest}, set one of those"
            )
    default = transformer["sample_size"] * down
    return height or default, width or default


def _downscale(vae: Mapping[str, Any]) -> int:
    return 2 ** (len(vae["block_out_channels"]) - 1)


def tiny(folder: Path, seed: int = 0) -> None:
    """Writes a random pipeline of the real classes and structure (3.5's, with T5), 64 by 64 pixels, for tests."""
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline

    clip, clip_2, t5 = tiny_clip_tokenizer("<|endoftext|>"), tiny_clip_tokenizer("!"), _tiny_t5()
    modules: dict[str, Any] = {
        **_tiny_networks(),
        "text_encoder": CLIPTextModelWithProjection(_tiny_clip_config(len(clip), 8)),
        "text_encoder_2": CLIPTextModelWithProjection(_tiny_clip_config(len(clip_2), 16)),
        "text_encoder_3": T5EncoderModel(_tiny_t5_config(len(t5))),
    }
    for number, module in enumerate(modules.values()):
        fill(module, seed, number)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    StableDiffusion3Pipeline(
        **modules, tokenizer=clip, tokenizer_2=clip_2, tokenizer_3=t5, scheduler=scheduler
    ).save_pretrained(folder, safe_serialization=True)


def _tiny_networks() -> dict[str, nn.Module]:
    """A transformer with 3.5's dual attention and normed queries, and a VAE of 16 channels that shrinks by 8."""
    vae: dict[str, Any] = {"block_out_channels": (4, 4, 8, 8), "norm_num_groups": 2}
    for side, kind in (("down", "DownEncoderBlock2D"), ("up", "UpDecoderBlock2D")):
        vae[f"{side}_block_types"] = (kind,) * 4
    return {
        "transformer": SD3Transformer2DModel(
            sample_size=8, num_layers=3, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
            caption_projection_dim=32, pooled_projection_dim=8 + 16, pos_embed_max_size=12,
            dual_attention_layers=(0,), qk_norm="rms_norm",
        ),
        "vae": AutoencoderKL(
            **vae, latent_channels=16, scaling_factor=1.5305, shift_factor=0.0609,
            use_quant_conv=False, use_post_quant_conv=False,
        ),
    }  # fmt: skip


def _tiny_clip_config(vocabulary: int, width: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, projection_dim=width,
        num_hidden_layers=3, num_attention_heads=2,
        eos_token_id=vocabulary - 1, bos_token_id=vocabulary - 2, pad_token_id=0,
    )  # fmt: skip


def _tiny_t5() -> T5Tokenizer:
    """The special tokens of T5, the start of a word, and every printable character."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -2.0) for piece in ["▁", *printable()])]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


def _tiny_t5_config(vocabulary: int) -> T5Config:
    return T5Config(
        vocab_size=vocabulary, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
