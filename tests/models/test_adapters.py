"""Adapters that go on from a LoRA file change the network exactly as that file does, or are refused."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sigmazero import seeds
from sigmazero.config import LoraConfig, parse
from sigmazero.export import LORA_FILE, write_lora
from sigmazero.launch.local import build, restore_newest
from sigmazero.models import FAMILIES, glyph
from sigmazero.models.adapters import check_start, coverage, read_adapter
from sigmazero.models.roles import RoleKind, Roles
from sigmazero.training import checkpoint
from sigmazero.training.folder import RunFolder, check_inputs
from tests.conftest import MakeRun

KINDS: dict[str, RoleKind] = {"student": "train", "teacher": "frozen", "fake_score": "train", "student_ema": "average"}
SOURCES = {"student_ema": "student"}
SETTINGS = LoraConfig(rank=4, alpha=8)
PEFT_FILE = "adapter_model.safetensors"


def make(model: Any, **settings: Any) -> Roles:
    return Roles(model, KINDS, SOURCES, lora=LoraConfig(**{"rank": 4, "alpha": 8, **settings}))


def fill(values: dict[str, Tensor]) -> None:
    """Large weights, so that every layer matters."""
    with torch.no_grad():
        for number, value in enumerate(values.values()):
            value.copy_(0.3 * seeds.normal(0, "weight_init", [number], value.shape)[0])


def answer(roles: Roles, role: str) -> Tensor:
    """The velocity of a role at two latents."""
    model = roles.model
    x = seeds.normal(3, "train_noise", range(2), model.latent_shape)
    with torch.no_grad():
        return roles.velocity(role)(x, torch.tensor([0.3, 0.8]), model.encode([TEXT[model.family]] * 2))


TEXT = {"glyph": "the number 42", "sd3": "a red cat", "flux2": "a red cat", "qwen_image": "a red cat"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def filled(weights: Path) -> Roles:
    """A tiny glyph network with a student's adapter that changes it much."""
    roles = make(glyph.load(weights))
    fill(roles.parameters("student"))
    return roles


@pytest.fixture
def exported(filled: Roles, tmp_path: Path) -> Path:
    """Its adapter as an export writes it."""
    (tmp_path / "lora").mkdir()
    write_lora(tmp_path / "lora", filled.parameters("student"), SETTINGS, "base")
    return tmp_path / "lora"


@pytest.mark.parametrize("family", ["sd3", "flux2", "qwen_image"])
def test_b13_b27_every_role_goes_on_from_an_export_and_the_base_stays_bare(family: str, shelf: Path) -> None:
    module = importlib.import_module(FAMILIES[family])
    module.tiny(shelf / family)

    def load() -> Any:
        return module.load(str(shelf / family), height=32, width=32)

    before = make(load())
    fill(before.parameters("student"))
    (shelf / f"{family}_lora").mkdir()
    write_lora(shelf / f"{family}_lora", before.parameters("student"), SETTINGS, "base")
    after = make(load(), init=str(shelf / f"{family}_lora"))
    for role in ("student", "fake_score", "student_ema"):
        assert torch.equal(answer(after, role), answer(before, "student"))
    assert torch.equal(answer(after, "teacher"), answer(before, "teacher"))
    assert (answer(after, "student") - answer(after, "teacher")).abs().max() > 0.01


@pytest.mark.parametrize("where", ["", LORA_FILE, "peft", f"peft/{PEFT_FILE}"])
def test_b27_a_folder_and_its_file_are_the_same_in_both_conventions(
    exported: Path, filled: Roles, weights: Path, where: str
) -> None:
    after = make(glyph.load(weights), init=str(exported / where))
    for name, value in filled.parameters("student").items():
        assert torch.equal(after.parameters("student")[name], value), name


def test_b13_what_peft_saved_changes_the_network_as_peft_does(weights: Path, tmp_path: Path) -> None:
    """Alpha is twice the rank; the reference is peft's own merge."""
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["to_q", "to_out.0"], init_lora_weights=False)
    saved: Any = peft.get_peft_model(glyph.load(weights).net, settings)  # pyright: ignore[reportArgumentType]
    saved.save_pretrained(tmp_path / "saved")
    reference: Any = glyph.load(weights)
    loaded: Any = peft.PeftModel.from_pretrained(reference.net, tmp_path / "saved")
    loaded.merge_and_unload()
    expected = answer(Roles(reference, {"merged": "frozen"}, {}), "merged")
    ours = make(glyph.load(weights), rank=3, alpha=6, targets=("to_q", "to_out.0"), init=str(tmp_path / "saved"))
    torch.testing.assert_close(answer(ours, "student"), expected, rtol=1e-4, atol=1e-4)
    assert (answer(ours, "teacher") - expected).abs().max() > 0.05


def rewritten(folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> Path:
    """A peft folder after a change of its tensors and settings."""
    tensors = load_file(folder / "peft" / PEFT_FILE)
    settings = json.loads((folder / "peft" / "adapter_config.json").read_text())
    change(tensors, settings)
    save_file(tensors, folder / "peft" / PEFT_FILE)
    (folder / "peft" / "adapter_config.json").write_text(json.dumps(settings))
    return folder / "peft"


def alphas(*values: float) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    """Puts alphas into the file, a layer each in turn, and leaves none in the settings."""

    def change(tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
        del settings["lora_alpha"]
        layers = sorted({name.rsplit(".lora_", 1)[0] for name in tensors})
        tensors |= {f"{layer}.alpha": torch.tensor(values[i % len(values)]) for i, layer in enumerate(layers)}

    return change


def test_b13_alphas_in_the_file_are_honoured(exported: Path, filled: Roles, weights: Path) -> None:
    """Alpha 1 at rank 4: a quarter of the product, which is an eighth of what alpha 8 makes of it."""
    after = make(glyph.load(weights), alpha=1, init=str(rewritten(exported, alphas(1.0))))
    smaller = make(glyph.load(weights))
    with torch.no_grad():
        for name, value in filled.parameters("student").items():
            smaller.parameters("student")[name].copy_(value / 8 if ".lora_B." in name else value)
    assert torch.equal(answer(after, "student"), answer(smaller, "student"))


LAYER = "base_model.model.transformer.transformer_blocks.0.attn.to_q"


@pytest.mark.parametrize(
    ("settings", "change", "says"),
    [
        ({"rank": 2}, None, r"roles\.lora\.rank is 2, but that of .* is 4; set it"),
        ({"alpha": 4}, None, r"roles\.lora\.alpha is 4, but that of .* is 8; set it"),
        ({}, alphas(8.0, 4.0), r"several values of alpha \(.*\.alpha: 4\)"),
        ({"alpha": 32}, alphas(8.0), r"roles\.lora\.alpha is 32, but that of .* is 8"),
        ({}, lambda t, s: s.update(alpha_pattern={"to_q": 2}), r"several values of alpha \(alpha of to_q: 2\)"),
        ({}, lambda t, s: s.pop("lora_alpha"), r"does not say its alpha"),
        ({}, lambda t, s: s.update(lora_alpha="much"), r"alpha that is no number"),
        ({}, lambda t, s: s.update(use_rslora=True), r"has use_rslora True, which plain LoRA"),
        ({}, lambda t, s: s.update(init_lora_weights="pissa_niter_4"), r"init_lora_weights 'pissa_niter_4'"),
        ({}, lambda t, s: s.update(peft_type="LOKR"), r"peft_type 'LOKR'"),
        ({}, lambda t, s: t.update({f"{LAYER}.lora_A.weight": torch.ones(2, 32)}), r"several values of rank .*: 2\)"),
        ({}, lambda t, s: t.update({f"{LAYER}.lora_A.weight": torch.ones(4, 9)}), r"is \[4, 9\], .* needs \[4, 32\]"),
        (
            {},
            lambda t, s: t.pop(f"{LAYER}.lora_B.weight"),
            r"lacks transformer\.transformer_blocks\.0\.attn\.to_q; set",
        ),
        (
            {"targets": ("to_q",)},
            None,
            r"has transformer\.transformer_blocks\.0\.attn\.add_k_proj, .* and \d+ more, where this",
        ),
        ({}, lambda t, s: t.update({"lora_unet_x.lora_up.weight": torch.ones(1)}), r"has lora_unet_x\.lora_up\.weight"),
    ],
)
def test_b13_b27_what_would_change_its_strength_or_miss_a_layer_is_refused(
    exported: Path, weights: Path, settings: dict[str, Any], change: Any, says: str
) -> None:
    folder = rewritten(exported, change or (lambda tensors, settings: None))
    with pytest.raises(ValueError, match=says) as caught:
        make(glyph.load(weights), init=str(folder), **settings)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("roles.lora.")
    model, lora = glyph.load(weights), LoraConfig(**{"rank": 4, "alpha": 8, "init": str(folder), **settings})
    with pytest.raises(ValueError, match=says) as early:
        check_start(read_adapter(folder), lora, model.net, lora.targets or model.lora_targets)
    assert str(early.value) == str(caught.value)


def test_an_adapter_of_another_rank_is_refused_before_anything_is_encoded(shelf: Path, tmp_path: Path) -> None:
    """Encoding takes minutes with real text encoders."""
    folder, adapter = shelf / "sd3-early", tmp_path / "adapter"
    module = importlib.import_module(FAMILIES["sd3"])
    module.tiny(folder)
    adapter.mkdir()
    write_lora(adapter, make(module.load(str(folder), height=32, width=32)).parameters("student"), SETTINGS, "base")
    (tmp_path / "prompts.txt").write_text("a red cat\n")
    own = {"storage": "lora", "lora": {"rank": 2, "alpha": 8, "init": str(adapter)}}
    config = parse(
        {
            "output": str(tmp_path / "run"), "num_cycles": 1, "model": {"family": "sd3", "path": str(folder)},
            "data": {"prompts": str(tmp_path / "prompts.txt"), "batch_size": 2, "height": 32, "width": 32},
            "algorithm": {"name": "dmd2", "num_steps": 2}, "roles": own,
            "optimizers": {"student": {"lr": 1e-4}, "fake_score": {"lr": 1e-4}},
        }
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"roles\.lora\.rank is 2, but that of .* is 4"):
        build(config, encode=lambda *_: pytest.fail("it was encoded"))


def test_b49_a_pickle_and_a_folder_without_an_adapter_are_refused(exported: Path, tmp_path: Path) -> None:
    torch.save(load_file(exported / LORA_FILE), tmp_path / LORA_FILE)
    for path, says in (
        (tmp_path, "cannot be read"),
        (exported / "gone", "is not there"),
        (tmp_path / "e", "holds none"),
    ):
        (tmp_path / "e").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=rf"roles\.lora\.init: .*{says}"):
            read_adapter(path)
    shutil.copy(exported / "peft" / PEFT_FILE, exported)
    with pytest.raises(ValueError, match="holds both"):
        read_adapter(exported)


def test_b52_a_run_that_goes_on_keeps_its_own_adapters_and_refuses_another_file(exported: Path, dmd2: MakeRun) -> None:
    config = dmd2({"roles.storage": "lora", "roles.lora": {"rank": 4, "alpha": 8.0, "init": str(exported)}})
    start = read_adapter(exported).weights
    with RunFolder(config.output) as folder, build(config) as built:
        folder.open(config, built.inputs)
        for role in ("student", "fake_score", "student_ema"):
            assert all(torch.equal(value, start[name]) for name, value in built.roles.parameters(role).items())
        built.trainer.run_cycle()
        checkpoint.save(folder.checkpoints, 1, built.trainer.tensors(), built.trainer.numbers(), 1)
        ended = built.roles.parameters("student")
    with build(config) as again:
        restore_newest(again, folder)
        assert all(torch.equal(value, ended[name]) for name, value in again.roles.parameters("student").items())
        assert not all(torch.equal(value, start[name]) for name, value in ended.items())
        check_inputs(folder.path, again.inputs)
    said = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8, "transformer.r": 4})}
    save_file({name: -value for name, value in load_file(exported / LORA_FILE).items()}, exported / LORA_FILE, said)
    with build(config) as other, pytest.raises(ValueError, match=r"other content of roles\.lora\.init"):
        check_inputs(folder.path, other.inputs)


def test_the_fingerprint_is_of_the_content(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported / "peft", tmp_path / "moved")
    first = read_adapter(tmp_path / "moved").fingerprint
    assert read_adapter(exported / "peft").fingerprint == first
    other = rewritten(exported, lambda tensors, settings: settings.update(lora_alpha=4))
    assert read_adapter(other).fingerprint != first


def test_b29_the_share_that_an_adapter_covers_by_hand() -> None:
    """30 of 42 weights are in the layer that it is over; the adapter itself has 20."""
    net = nn.ModuleDict({"a": nn.Linear(4, 6, device="meta"), "b": nn.Linear(6, 2, bias=False, device="meta")})
    own = {"a.lora_A.weight": torch.empty(2, 4), "a.lora_B.weight": torch.empty(6, 2)}
    assert str(coverage(net, own)) == (
        "LoRA: rank 2 over 1 layers: 20 weights trained a role, 47.62 % of the network's 42; "
        "those layers hold 71 % of it"
    )


def test_b29_the_share_does_not_count_adapters_as_network(filled: Roles, weights: Path) -> None:
    bare = glyph.load(weights).net
    layers = {name.rsplit(".lora_", 1)[0] for name in filled.parameters("student")}
    found = coverage(filled.model.net, filled.parameters("student"))
    assert found.total == sum(p.numel() for p in bare.parameters())
    assert found.covered == sum(p.numel() for layer in layers for p in bare.get_submodule(layer).parameters())
    assert (found.rank, found.layers) == (4, len(layers))
