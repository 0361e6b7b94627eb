"""FLUX.2: klein, base and distilled (a diffusers ``Flux2KleinPipeline`` folder), and dev (``Flux2Pipeline``).

Convention: the network is fed ``sigma`` (``t / 1000``; it multiplies by 1000 itself) and answers ``v = eps - x0``.

Guidance: klein base is guided by two passes, klein distilled not at all. dev was distilled from a guided model: it
reads the strength as a number beside the time, one for all roles of a run, and is not guided by two passes.

Padding: every prompt fills 512 tokens on purpose. The language model masks the padding, the transformer attends to all
512, as it was trained to (black-forest-labs/flux2#59). So there is no mask field and nothing for a neighbour to change.
A longer prompt is cut at 512 tokens, as the pipeline cuts it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline, format_input
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sigmazero import seeds
from sigmazero.models.attention import use_backend
from sigmazero.models.base import compute_dtype
from sigmazero.models.folder import PipelineFolder, open_pipeline
from sigmazero.records import Conditioning

TEXT_LENGTH = 512
PATCH = 2
DEFAULT_LATENT_SIZE = 128  # of a side, before patching: 1024 pixels
DEFAULT_EMBEDDED_GUIDANCE = 4.0  # of the pipeline's call


class _Variant(NamedTuple):
    """What klein and dev do not share. ``states`` are hidden states of the language model, put side by side."""

    name: str
    text_encoder: Any
    tokenizer: Any
    states: tuple[int, int, int]
    embeds_guidance: bool

    def chat(self, prompt: str) -> tuple[list[Any], dict[str, bool]]:
        """The messages that a prompt is put in, and the settings of the chat template."""
        if self.embeds_guidance:
            return format_input([prompt])[0], {"add_generation_prompt": False}
        return [{"role": "user", "content": prompt}], {"add_generation_prompt": True, "enable_thinking": False}


VARIANTS = {
    "Flux2KleinPipeline": _Variant("FLUX.2-klein", Qwen3ForCausalLM, Qwen2Tokenizer, (9, 18, 27), False),
    "Flux2Pipeline": _Variant("FLUX.2-dev", Mistral3ForConditionalGeneration, AutoTokenizer, (10, 20, 30), True),
}


def empirical_mu(num_tokens: int, num_steps: int) -> float:
    """Exponential shift mu of FLUX.2 (math §2): 1,024 tokens give 2.0307 at N=4 and 1.7020 at N=50.

    Linear in the tokens at N=10 and at N=200 and linear in N between and beyond them; above 4,300 tokens the line of
    N=200 holds for every N. The constants are those of diffusers' ``compute_empirical_mu``.
    """
    at_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * num_tokens + 1.89833333
    return at_200 + (at_10 - at_200) * (200 - num_steps) / 190


class Flux2Model:
    """The family's FlowModel. Latents are tokens ``[h * w, 4 * VAE channels]``: 2x2 patches, normalised, row by row.

    The text encoder and the VAE follow the network and the latents to their device. ``is_distilled`` says that the
    weights are few-step ones, which are sampled without guidance. ``embedded_guidance`` is what dev's network reads;
    None of klein.
    """

    family = "flux2"
    guidance_norm = "none"

    def __init__(
        self,
        net: Flux2Transformer2DModel,
        vae: AutoencoderKLFlux2,
        text: tuple[Any, nn.Module | None],
        scheduler: Mapping[str, Any],
        *,
        variant: _Variant,
        size: tuple[int, int],
        is_distilled: bool,
        embedded_guidance: float | None,
    ) -> None:
        self.net, self._scheduler, self._variant = net.eval(), scheduler, variant
        self.is_distilled, self.embedded_guidance = is_distilled, embedded_guidance
        self._tokenizer, encoder = text
        self._encoder: nn.Module | None = None if encoder is None else encoder.eval().requires_grad_(False)
        self._vae: Any = vae.eval().requires_grad_(False)
        vae.enable_slicing()  # a picture at a time: memory and bits do not depend on the batch
        self._size = size
        self._grid = (size[0] // _multiple(vae), size[1] // _multiple(vae))
        self._image_ids, self._text_ids = _image_ids(*self._grid), _text_ids()
        _keep_time_exact(net)

    @property
    def latent_shape(self) -> tuple[int, int]:
        return (math.prod(self._grid), self._vae.config["latent_channels"] * PATCH**2)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Attention projections of image and text, and of the single stream, where they are fused with the MLP's.

        The single stream's output goes by full names: ``to_out`` alone would also match a list in the double blocks.
        """
        single = [f"single_transformer_blocks.{i}.attn.to_out" for i in range(self.net.config["num_single_layers"])]
        return (
            "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
            "to_qkv_mlp_proj", *single,
        )  # fmt: skip

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Field ``text`` ``[b, 512, 3 * hidden]`` in the network's dtype; the empty prompt is the negative one.

        A text goes through the encoder once and by itself, so its bits do not depend on its neighbours.

        Raises:
            RuntimeError: the encoder was freed.
        """
        encoder, weight = self._encoder, next(self.net.parameters())
        if encoder is None:
            raise RuntimeError("the text encoder was dropped by free_encoders(); encode every prompt before that")
        encoder.to(weight.device)
        texts = list(dict.fromkeys(prompts)) or [""]  # of no prompts: no rows of the right shape
        rows = torch.stack([self._embed(encoder, text) for text in texts]).to(weight.device, weight.dtype)
        return Conditioning({"text": rows}).take([texts.index(prompt) for prompt in prompts])

    @torch.no_grad()
    def _embed(self, encoder: nn.Module, prompt: str) -> Tensor:
        """``[512, 3 * hidden]`` of one prompt, which is put in the chat template as the user's turn."""
        messages, settings = self._variant.chat(prompt)
        tokens = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt",
            padding="max_length", truncation=True, max_length=TEXT_LENGTH, **settings,
        ).to(next(encoder.parameters()).device)  # fmt: skip
        states = encoder(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"],
            output_hidden_states=True, use_cache=False,
        ).hidden_states  # fmt: skip
        return torch.cat([states[k][0] for k in self._variant.states], dim=-1)

    def velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        strength = self.embedded_guidance
        return net(
            hidden_states=x.float(),  # cast to the weights' dtype by the hook of _keep_time_exact
            guidance=None if strength is None else torch.full((len(x),), strength, device=x.device),
            encoder_hidden_states=condition["text"].to(x.device, compute_dtype(net)),
            timestep=sigma.float(),
            img_ids=self._image_ids.to(x.device),
            txt_ids=self._text_ids.to(x.device),
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics(latents.device)
        patches = (latents.float() * std + mean).transpose(1, 2).unflatten(2, self._grid)
        pictures = self._vae.decode(functional.pixel_shuffle(patches, PATCH), return_dict=False)[0]
        return (pictures / 2 + 0.5).clamp(0, 1)

    def encode_pictures(self, pictures: Tensor) -> Tensor:
        mean, std = self._statistics(pictures.device)
        posterior = self._vae.encode(pictures.float() * 2 - 1, return_dict=False)[0]
        patches = functional.pixel_unshuffle(posterior.mode(), PATCH)
        return (patches.flatten(2).transpose(1, 2) - mean) / std

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each patched channel, fp32, from the VAE's batch norm; the VAE moves along."""
        norm = self._vae.to(device).bn
        return norm.running_mean, torch.sqrt(norm.running_var + self._vae.config["batch_norm_eps"])

    def enable_activation_checkpointing(self, net: nn.Module, function: Any) -> None:
        for module in net.modules():
            if isinstance(module, Flux2Transformer2DModel):
                module.enable_gradient_checkpointing(function)

    def use_attention(self, backend: str, dtypes: Sequence[torch.dtype]) -> None:
        """As ``attention.use_backend``: no mask."""
        use_backend(self.net, backend, dtypes, masked=False)

    def check_guidance(self, setting: str, scale: float) -> None:
        """Refuses guidance of two passes where the pipeline has none.

        Args:
            setting: where the scale was given, for the message.
        Raises:
            ValueError: the scale is not 1, and the weights are distilled or embed their guidance.
        """
        if scale == 1:
            return
        if self.embedded_guidance is not None:
            raise ValueError(
                f"{setting} is {scale:g}, but FLUX.2-dev is guided by a number that its network reads; set {setting} "
                f"to 1, and the strength as model.embedded_guidance, now {self.embedded_guidance:g}"
            )
        if self.is_distilled:
            raise ValueError(
                f"{setting} is {scale:g}, but the index of model.path says is_distilled, and a distilled FLUX.2-klein "
                f"is sampled without guidance; set {setting} to 1, or model.path to a klein base"
            )

    def metadata(self) -> Mapping[str, str]:
        """Family and size, and dev's embedded guidance, as strings."""
        height, width = self._size
        said = {"family": self.family, "height": str(height), "width": str(width)}
        return said if self.embedded_guidance is None else {**said, "embedded_guidance": str(self.embedded_guidance)}

    def default_shift(self, num_steps: int) -> float:
        """The static shift ``e^mu`` of this size and number of steps, or the scheduler's own where it is static."""
        if not self._scheduler["use_dynamic_shifting"]:
            return float(self._scheduler["shift"])
        return math.exp(empirical_mu(self.latent_shape[0], num_steps))

    def free_encoders(self) -> None:
        """Drops the language model; ``encode`` raises RuntimeError afterwards."""
        self._encoder = None


def _image_ids(height: int, width: int) -> Tensor:
    """Rotary positions int64 ``[height * width, 4]``: (time, row, column, word), row by row."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    zero = torch.zeros_like(rows)
    return torch.stack([zero, rows, columns, zero], dim=-1).flatten(0, 1)


def _text_ids() -> Tensor:
    """Rotary positions int64 ``[512, 4]``: the last axis counts the words."""
    return functional.pad(torch.arange(TEXT_LENGTH)[:, None], (3, 0))


def _keep_time_exact(net: Flux2Transformer2DModel) -> None:
    """Lets a half-precision network be fed fp32 latents, because it rounds the time to the latents' dtype (B03).

    The layers that read a fp32 input cast it themselves: patches, and the sinusoids of the exact time and guidance.
    """
    time = net.time_guidance_embed
    for module in (net.x_embedder, time.timestep_embedder, time.guidance_embedder):
        if module is not None:
            module.register_forward_pre_hook(_to_weight_dtype)


def _to_weight_dtype(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(value.to(dtype) for value in inputs)


def _multiple(vae: AutoencoderKLFlux2) -> int:
    """Pixels that one token spans in each direction."""
    return PATCH * 2 ** (len(vae.config["block_out_channels"]) - 1)


def load(
    path: str,
    *,
    height: int | None = None,
    width: int | None = None,
    dtype: torch.dtype = torch.float32,
    embedded_guidance: float | None = None,
    encoders: bool = True,
) -> Flux2Model:
    """Reads a pipeline folder, or a hub id where there is no such folder: safetensors only, no remote code.

    Args:
        height, width: of the pictures in pixels; None is the pipeline's default of 1024.
        dtype: of the transformer and the text encoder. The VAE is kept in fp32.
        embedded_guidance: of dev alone, None is its pipeline's default of 4.
        encoders: False leaves the text encoder out, as after ``free_encoders``.
    Raises:
        ValueError: no such folder, another family, a part is missing or does not fit, a size that no token grid has, an
            embedded guidance for a network that reads none.
    """
    pipeline = open_pipeline(path, Flux2Model.family, list(VARIANTS), _PARTS, encoders=encoders)
    variant = VARIANTS[pipeline.index["_class_name"]]
    if embedded_guidance is not None and not variant.embeds_guidance:
        raise ValueError(
            f"model.embedded_guidance is {embedded_guidance:g}, but {path} is a {variant.name}, whose network reads no "
            "guidance; leave it out"
        )
    scheduler = pipeline.read("scheduler", FlowMatchEulerDiscreteScheduler.from_pretrained)
    tokenizer, decoder = _read_text(pipeline, variant, dtype) if encoders else (None, None)
    vae = pipeline.weights("vae", AutoencoderKLFlux2, torch_dtype=torch.float32)
    size = (_pixels("height", height, vae), _pixels("width", width, vae))
    net = pipeline.weights("transformer", Flux2Transformer2DModel, torch_dtype=dtype)
    _check_fit(path, variant, net, vae, decoder, tokenizer)
    return Flux2Model(
        net,
        vae,
        (tokenizer, decoder),
        scheduler.config,
        variant=variant,
        size=size,
        is_distilled=bool(pipeline.index.get("is_distilled")),
        embedded_guidance=DEFAULT_EMBEDDED_GUIDANCE
        if variant.embeds_guidance and embedded_guidance is None
        else embedded_guidance,
    )


_PARTS = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")


def _read_text(pipeline: PipelineFolder, variant: _Variant, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    """Tokenizer and decoder, without the head, which would make logits of 512 tokens by 150,000 words."""
    tokenizer = pipeline.read("tokenizer", variant.tokenizer.from_pretrained)
    return tokenizer, pipeline.weights("text_encoder", variant.text_encoder, dtype=dtype).get_decoder()


def _check_fit(
    path: str, variant: _Variant, net: Flux2Transformer2DModel, vae: AutoencoderKLFlux2, text: Any, tokenizer: Any
) -> None:
    """Raises ValueError where parts, each sound, are not those of one FLUX.2."""
    channels = PATCH**2 * vae.config["latent_channels"]
    other = "embeds no guidance" if variant.embeds_guidance else "embeds its guidance, as FLUX.2-dev does"
    problems = {
        f"the transformer {other}": bool(net.config["guidance_embeds"]) != variant.embeds_guidance,
        f"the transformer reads {net.config['in_channels']} channels, the patched VAE has {channels}": (
            net.config["in_channels"] != channels
        ),
    }
    if text is not None:
        problems |= _text_problems(variant, net, text, tokenizer)
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"model.path: {path} is no {variant.name}: {problem}")


def _text_problems(variant: _Variant, net: Flux2Transformer2DModel, text: Any, tokenizer: Any) -> dict[str, bool]:
    words = len(variant.states) * text.config.hidden_size
    return {
        f"the transformer reads text of width {net.config['joint_attention_dim']}, the text encoder gives {words}": (
            net.config["joint_attention_dim"] != words
        ),
        f"the text encoder has {text.config.num_hidden_layers} layers, wanted {variant.states[-1]}": (
            text.config.num_hidden_layers < variant.states[-1]
        ),
        "the tokenizer has no chat template": not tokenizer.chat_template,
    }


def _pixels(name: str, value: int | None, vae: AutoencoderKLFlux2) -> int:
    multiple = _multiple(vae)
    if value is None:
        return DEFAULT_LATENT_SIZE * multiple // PATCH
    if value <= 0 or value % multiple:
        near = max(1, round(value / multiple)) * multiple
        raise ValueError(f"data.{name} is {value}; a token of FLUX.2 spans {multiple} pixels, so set {near}, say")
    return value


def tiny(folder: Path, seed: int = 0) -> None:
    """Writes a random klein pipeline of about 2e5 weights, of the real structure, as a function of the seed."""
    tokenizer = _tiny_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], _KLEIN_TEMPLATE)
    with seeds.weight_init(seed):
        networks = _tiny_networks(guidance_embeds=False)
        text = Qwen3ForCausalLM(Qwen3Config(**_tiny_text(tokenizer, 27), tie_word_embeddings=True))
    Flux2KleinPipeline(**networks, text_encoder=text, tokenizer=tokenizer).save_pretrained(folder)


def tiny_dev(folder: Path, seed: int = 0) -> None:
    """The same of dev. In the place of its processor, which needs torchvision to read pictures, is a tokenizer."""
    tokenizer: Any = _tiny_tokenizer(["<pad>", "<s>", "</s>", *_DEV_MARKS], _DEV_TEMPLATE)
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8
    }  # fmt: skip
    with seeds.weight_init(seed):
        networks = _tiny_networks(guidance_embeds=True)
        text = Mistral3ForConditionalGeneration(
            Mistral3Config(text_config=_tiny_text(tokenizer, 30), vision_config=vision, image_token_index=0)
        )
    Flux2Pipeline(**networks, text_encoder=text, tokenizer=tokenizer).save_pretrained(folder)


def _tiny_networks(*, guidance_embeds: bool) -> dict[str, Any]:
    net = Flux2Transformer2DModel(
        in_channels=128, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=48, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=guidance_embeds,
    )  # fmt: skip
    for weight in net.parameters():  # so far that a word changes the picture: the 1-D ones sharpen attention
        weight.detach().mul_(2 if weight.ndim == 1 else 1.5)
    vae = AutoencoderKLFlux2(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4)
    vae.bn.get_buffer("running_mean").normal_(0, 0.5)
    vae.bn.get_buffer("running_var").uniform_(0.5, 2)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return {"transformer": net, "vae": vae, "scheduler": scheduler}


def _tiny_text(tokenizer: Qwen2Tokenizer, last: int) -> dict[str, Any]:
    """Deep enough for the states that are read; the spread of the weights lets a word reach all of them."""
    return {
        "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": last + 1,
        "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024,
        "initializer_range": 0.25,
    }  # fmt: skip


_KLEIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_DEV_MARKS = ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"]
_DEV_TEMPLATE = (
    "<s>{% for m in messages %}{% set mark = 'SYSTEM_PROMPT' if m.role == 'system' else 'INST' %}"
    "[{{ mark }}]{{ m.content[0].text }}[/{{ mark }}]{% endfor %}"
)


def _tiny_tokenizer(special: list[str], template: str) -> Qwen2Tokenizer:
    """Bytes and the special tokens of a chat format, the first of which pads."""
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate([*sorted(ByteLevel.alphabet()), *special])},
        merges=[],
        unk_token=special[0],
        eos_token=special[0],
        pad_token=special[0],
        extra_special_tokens=special[1:],
    )
    tokenizer.chat_template = template
    return tokenizer
