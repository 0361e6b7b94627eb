"""The attention backends: each agrees with native, acts where it is chosen, and is refused where it cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sigmazero import seeds
from sigmazero.config import LoraConfig, parse
from sigmazero.models import attention, flux2, qwen_image, sd3
from sigmazero.models.roles import Roles
from sigmazero.records import Conditioning

MODULES: dict[str, Any] = {"sd3": sd3, "flux2": flux2, "qwen_image": qwen_image}
PROMPTS = ("a cat", "two old dogs look at the number 42 on a blue wall")  # unlike lengths: a batch of them is masked
FLASH = "_scaled_dot_product_flash_attention_for_cpu"  # what torch itself chooses here; math is none of its kernels
# On a CPU. Flash takes no mask.
USABLE = {
    "sd3": ["native", "_native_flash", "_native_math"],
    "flux2": ["native", "_native_flash", "_native_math"],
    "qwen_image": ["native", "_native_math"],
}
OTHERS = [(family, backend) for family, names in USABLE.items() for backend in names[1:]]
FP32 = [torch.float32]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    for family, module in MODULES.items():
        module.tiny(folder / family)
    return {family: folder / family for family in MODULES}


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Callable[..., Any]:
    """``load("sd3", dtype=torch.bfloat16)``: the tiny model of a family, at 32 by 32 pixels."""

    def load(family: str, **options: Any) -> Any:
        return MODULES[family].load(str(folders[family]), height=32, width=32, **options)

    return load


class Seen(NamedTuple):
    """Of one forward and backward: velocity, gradients of latents and text, how often torch's flash kernel ran."""

    values: list[Tensor]
    flash: int


class _Kernels(TorchDispatchMode):
    """Counts the calls of torch's flash attention."""

    def __init__(self) -> None:
        super().__init__()
        self.flash = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.flash += func.overloadpacket.__name__ == FLASH
        return func(*args, **(kwargs or {}))


def look(model: Any, net: nn.Module, condition: Conditioning) -> Seen:
    x = seeds.normal(3, "initial_noise", range(len(condition)), model.latent_shape).requires_grad_()
    fields = {name: value.clone().requires_grad_(value.is_floating_point()) for name, value in condition.fields.items()}
    wanted = [x, *(value for value in fields.values() if value.is_floating_point())]
    with _Kernels() as kernels:
        v = model.velocity(net, x, torch.linspace(0.9, 0.4, len(condition)), Conditioning(fields))
    gradients = torch.autograd.grad(v.float().square().sum(), wanted)
    return Seen([v.detach(), *gradients], kernels.flash)


def assert_agree(mine: Seen, theirs: Seen) -> None:
    for a, b in zip(mine.values, theirs.values, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize(("family", "backend"), OTHERS)
@pytest.mark.parametrize("prompts", [PROMPTS[:1] * 2, PROMPTS], ids=["even", "ragged"])
def test_b09_every_backend_agrees_with_native_with_and_without_a_mask(
    load: Callable[..., Any], family: str, backend: str, prompts: Sequence[str]
) -> None:
    """Forward and backward. SD3's native is diffusers' own processor."""
    model, native = load(family), load(family)
    condition = native.encode(list(prompts))
    if "mask" in condition.fields:
        assert bool(condition["mask"].all()) == (prompts[0] == prompts[1])
    model.use_attention(backend, FP32)
    assert_agree(look(model, model.net, condition), look(native, native.net, condition))


@pytest.mark.parametrize("family", MODULES)
def test_a_backend_is_what_really_runs_and_is_its_networks_own(load: Callable[..., Any], family: str) -> None:
    """In one process, in turn; copies keep it. diffusers' own switch would reach the other network too."""
    untouched, native, mathematical = load(family), load(family), load(family)
    condition = native.encode([PROMPTS[1]])
    before = look(untouched, untouched.net, condition)
    mathematical.use_attention("_native_math", FP32)
    native.use_attention("native", FP32)
    copied = copy.deepcopy(mathematical.net)
    assert before.flash > 0
    for _ in range(2):
        assert look(mathematical, mathematical.net, condition).flash == 0
        assert look(mathematical, copied, condition).flash == 0
        for model in (native, untouched):
            again = look(model, model.net, condition)
            assert again.flash == before.flash
            assert all(torch.equal(a, b) for a, b in zip(again.values, before.values, strict=True))


@pytest.mark.parametrize("family", MODULES)
def test_what_a_process_has_chosen_for_diffusers_changes_no_network_with_a_backend(
    load: Callable[..., Any], family: str
) -> None:
    """As the variable DIFFUSERS_ATTN_BACKEND would."""
    model = load(family)
    condition = model.encode([PROMPTS[0]])
    model.use_attention("native", FP32)
    with attention_dispatch.attention_backend("_native_math"):
        assert look(model, model.net, condition).flash > 0


@pytest.mark.parametrize("storage", ["copy", "lora"])
def test_roles_of_a_half_precision_base_keep_it_also_when_recomputed(load: Callable[..., Any], storage: str) -> None:
    model, seen = load("sd3", dtype=torch.bfloat16), []
    model.use_attention("_native_math", [torch.bfloat16, torch.float32])
    roles = Roles(
        model,
        {"student": "train", "teacher": "frozen"},
        {},
        lora=LoraConfig(rank=2) if storage == "lora" else None,
        activation_checkpointing=True,
    )
    condition, x = model.encode([PROMPTS[0]]), seeds.normal(3, "initial_noise", [0], model.latent_shape)
    for role in ("student", "teacher"):
        with _Kernels() as kernels:
            v = roles.velocity(role)(x, torch.tensor([0.5]), condition)
            if role == "student":
                v.float().square().sum().backward()
        seen.append(kernels.flash)
    assert seen == [0, 0]


@pytest.mark.parametrize("qk_norm", ["rms_norm", None])
def test_sd3s_layers_are_diffusers_own_to_the_bit(qk_norm: str | None) -> None:
    """Native through the dispatcher against ``JointAttnProcessor2_0``: dual attention, normed queries or not, a last
    block that drops its text."""
    with seeds.weight_init(0):
        theirs = sd3.SD3Transformer2DModel(
            sample_size=8, num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
            caption_projection_dim=32, pooled_projection_dim=8, pos_embed_max_size=12,
            dual_attention_layers=(0,) if qk_norm else (), qk_norm=qk_norm,
        )  # fmt: skip
    mine = copy.deepcopy(theirs)
    mine.set_attn_processor(sd3._JointAttention())  # pyright: ignore[reportArgumentType]
    shapes = ((2, 16, 8, 8), (2, 5, 32), (2, 8))
    x, text, pooled = (seeds.normal(i, "weight_init", [0], shape)[0] for i, shape in enumerate(shapes))
    results = []
    for net in (theirs, mine):
        inputs = [value.clone().requires_grad_() for value in (x, text, pooled)]
        out = net(inputs[0], inputs[1], inputs[2], torch.tensor([900.0, 30.0]), return_dict=False)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*results, strict=True))


# Refusals.


def refused(model: Any, backend: str, why: str) -> None:
    names = ", ".join(USABLE[model.family])
    match = rf"^model\.attention is '{backend}', which {why}.*; usable here are {names}$"
    with pytest.raises(ValueError, match=match) as caught:
        model.use_attention(backend, FP32)
    assert "\n" not in str(caught.value)


def test_a_backend_that_is_unknown_absent_or_of_another_device_is_named(load: Callable[..., Any]) -> None:
    model = load("sd3")
    refused(model, "flash_attention_9", "diffusers does not know")
    refused(model, "flash", r"cannot be used in float32 on cpu: .*install `flash-attn")
    refused(model, "xformers", r"cannot be used in float32 on cpu: .*install `xformers")
    refused(model, "_native_cudnn", r"cannot be used in float32 on cpu")
    refused(model, "flex", r"cannot be used in float32 on cpu: .*backward")
    refused(model, "flash_hub", "is code that would be fetched from the hub and run")


def test_b09_a_backend_that_takes_no_mask_is_refused_by_the_family_that_has_one(load: Callable[..., Any]) -> None:
    refused(load("qwen_image"), "_native_flash", r"cannot be used in float32 on cpu: .*mask")


def _deaf(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """Leaves the mask out."""
    return dispatch_attention_fn(query, key, value, backend=AttentionBackendName.NATIVE)


def _padded_last(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Counts what the mask lets through and takes it to stand first, as diffusers' varlen backends do."""
    if attn_mask is not None:
        attn_mask = torch.arange(key.shape[1]) < attn_mask.sum(-1, keepdim=True)
    return dispatch_attention_fn(query, key, value, attn_mask=attn_mask, backend=AttentionBackendName.NATIVE)


def _numb(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """Passes no gradient on to the keys."""
    return dispatch_attention_fn(query, key.detach() + 0 * key, value, backend=AttentionBackendName.NATIVE)


@pytest.mark.parametrize(
    ("family", "kernel", "why"),
    [("qwen_image", _deaf, "with a mask, "), ("qwen_image", _padded_last, "with a mask, "), ("sd3", _numb, "")],
)
def test_b09_a_backend_that_is_silently_wrong_is_refused(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, family: str, kernel: Any, why: str
) -> None:
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setitem(registry._backends, AttentionBackendName.FLEX, kernel)
    arguments = {"query", "key", "value", "attn_mask"}
    monkeypatch.setitem(registry._supported_arg_names, AttentionBackendName.FLEX, arguments)
    refused(load(family), "flex", rf"cannot be used in float32 on cpu: {why}its results are .* away from native's")


def test_each_precision_is_tried(load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for half precision would fail in the fp32 copies of a bfloat16 base."""
    true_trial = attention._trial

    def halves_only(backend: str, device: Any, width: int, dtype: torch.dtype, hidden: int) -> list[Tensor]:
        if backend == "_native_math" and dtype == torch.float32:
            raise RuntimeError("half precision only")
        return true_trial(backend, device, width, dtype, hidden)

    monkeypatch.setattr(attention, "_trial", halves_only)
    model = load("flux2")
    model.use_attention("_native_math", [torch.bfloat16])
    with pytest.raises(ValueError, match=r"_native_math.* in float32 on cpu: half precision only"):
        model.use_attention("_native_math", [torch.bfloat16, torch.float32])


def test_glyph_takes_no_backend() -> None:
    values = {
        "model": {"attention": "_native_math"},
        "algorithm": {"name": "flow_matching"},
        "optimizers": {"student": {}},
    }
    with pytest.raises(ValueError, match=r"model\.attention is '_native_math'.* glyph"):
        parse(values)
