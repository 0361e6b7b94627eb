"""Roles: selection, averages, adapters, checkpointed recompute."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sigmazero import seeds
from sigmazero.config import LoraConfig
from sigmazero.models import glyph
from sigmazero.models.base import guide
from sigmazero.models.roles import RoleKind, Roles
from sigmazero.records import Conditioning

KINDS: dict[str, RoleKind] = {"student": "train", "teacher": "frozen", "fake_score": "train", "student_ema": "average"}
SOURCES = {"student_ema": "student"}
STORAGES = pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8)], ids=["copy", "lora"])


def make(weights: Path, lora: LoraConfig | None, **options: object) -> Roles:
    roles = Roles(glyph.load(weights), KINDS, SOURCES, lora=lora, **options)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():  # adapters start at zero; give every trained role weights of its own
        for index, role in enumerate(("student", "fake_score")):
            for number, value in enumerate(roles.parameters(role).values()):
                value.add_(0.1 * seeds.normal(index, "weight_init", [number], value.shape)[0])
    roles.average("student_ema", "student", 0.0)
    return roles


def inputs(rows: int = 5) -> tuple[Tensor, Tensor, Conditioning]:
    x = seeds.normal(3, "train_noise", range(rows), (3, 16, 16))
    sigma = torch.linspace(0.1, 0.9, rows)
    condition = Conditioning({"tokens": torch.tensor([[1 + i, 12, 23, 30, 35] for i in range(rows)])})
    return x, sigma, condition


def gradients(roles: Roles, role: str, between: str | None = None) -> list[Tensor]:
    v = roles.velocity(role)(*inputs())
    if between is not None:
        with torch.no_grad():
            roles.velocity(between)(*inputs())
    v.pow(2).sum().backward()
    found = [p.grad for p in roles.parameters(role).values()]
    assert all(g is not None for g in found)
    return [g for g in found if g is not None]


@STORAGES
def test_roles_differ_and_the_frozen_one_is_the_loaded_network(weights: Path, lora: LoraConfig | None) -> None:
    roles, plain = make(weights, lora), glyph.load(weights)
    x, sigma, condition = inputs()
    with torch.no_grad():
        out = {role: roles.velocity(role)(x, sigma, condition) for role in KINDS}
        reference = plain.velocity(plain.net, x, sigma, condition)
    torch.testing.assert_close(out["teacher"], reference, rtol=1e-5, atol=1e-5)
    assert torch.equal(out["student"], out["student_ema"])
    assert (out["student"] - out["teacher"]).abs().max() > 0.01
    assert (out["student"] - out["fake_score"]).abs().max() > 0.01


@STORAGES
def test_requires_grad_is_that_of_the_kind_and_stays(weights: Path, lora: LoraConfig | None) -> None:
    roles = make(weights, lora)
    for _ in range(2):
        for role, kind in KINDS.items():
            assert {p.requires_grad for p in roles.parameters(role).values()} <= {kind == "train"}
        gradients(roles, "student", between="fake_score")
    frozen = [p for n, p in roles.model.net.named_parameters() if ".lora_" not in n]
    assert not any(p.requires_grad for p in frozen)


def test_a_copy_is_spread_before_the_next_is_made(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its masters and what they require final, the base last: never is more than one copy there whole."""
    events: list[str] = []
    copied = copy.deepcopy

    def noted_copy(what: object, *memo: Any) -> object:
        if isinstance(what, glyph.GlyphNet):
            events.append("copied")
        return copied(what, *memo)

    def spread(net: nn.Module, compute_dtype: torch.dtype | None) -> None:
        dtypes = {p.dtype for p in net.parameters()}
        assert len(dtypes) == 1
        trains = {p.requires_grad for p in net.parameters()} == {True}
        events.append(f"spread {dtypes.pop()} for {compute_dtype}" + ", trained" * trains)

    model = glyph.load(weights)
    model.net.to(torch.bfloat16)
    monkeypatch.setattr(copy, "deepcopy", noted_copy)
    Roles(model, KINDS, SOURCES, shard=spread)
    half, trained = "torch.bfloat16", "spread torch.float32 for torch.bfloat16, trained"
    kept = "spread torch.float32 for torch.bfloat16"
    assert events == ["copied", trained, "copied", trained, "copied", kept, f"spread {half} for None"]


@STORAGES
def test_b65_masters_are_fp32_over_a_half_precision_base(weights: Path, lora: LoraConfig | None) -> None:
    """Weight 1, a hundred updates of 1e-4: .99; in bfloat16 it would stay 1."""
    model = glyph.load(weights)
    model.net.to(torch.bfloat16)
    roles = Roles(model, KINDS, SOURCES, lora=lora)
    assert {p.dtype for role in KINDS for p in roles.parameters(role).values()} == {torch.float32}
    weight = next(iter(roles.parameters("student").values()))
    with torch.no_grad():
        weight.fill_(1.0)
        for _ in range(100):
            weight.sub_(1e-4)
    torch.testing.assert_close(weight, torch.full_like(weight, 0.99))
    assert all(g.dtype == torch.float32 for g in gradients(roles, "student"))


@STORAGES
def test_b32_average_by_hand_and_exact_copy(weights: Path, lora: LoraConfig | None) -> None:
    """B32: decay .5, weights 0 -> 1 -> 2 gives 0 -> .5 -> 1.25; the raw weights stay what they are."""
    roles = make(weights, lora)
    with torch.no_grad():
        for value, expected in ((0.0, 0.0), (1.0, 0.5), (2.0, 1.25)):
            for p in roles.parameters("student").values():
                p.fill_(value)
            roles.average("student_ema", "student", 0.0 if value == 0 else 0.5)
            for p in roles.parameters("student_ema").values():
                assert torch.equal(p, torch.full_like(p, expected))
            for p in roles.parameters("student").values():
                assert torch.equal(p, torch.full_like(p, value))


@pytest.mark.parametrize("role", ["student", "fake_score"])
def test_b30_checkpointed_recompute_is_that_of_the_forwards_role(weights: Path, role: str) -> None:
    """Two adapters, activation checkpointing on, another role called between forward and backward."""
    lora = LoraConfig(rank=4, alpha=8)
    other = "student" if role == "fake_score" else "fake_score"
    plain = gradients(make(weights, lora), role)
    for between in (None, other, "teacher"):
        checkpointed = gradients(make(weights, lora, activation_checkpointing=True), role, between)
        for a, b in zip(plain, checkpointed, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)
    unmoved = {n for n, g in zip(make(weights, lora).parameters(role), plain, strict=True) if g.abs().max() == 0}
    assert all("transformer_blocks.1.attn.add_q_proj" in n for n in unmoved), "the last block drops its text queries"


def test_checkpointing_really_recomputes(weights: Path) -> None:
    """Fewer bytes are kept for backward with it than without."""
    kept = {}
    for on in (False, True):
        sizes: list[int] = []
        roles = make(weights, None, activation_checkpointing=on)

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            roles.velocity("student")(*inputs())
        kept[on] = sum(sizes)
    assert kept[True] < 0.5 * kept[False]


def test_former_role_is_back_after_an_error(weights: Path) -> None:
    roles = make(weights, LoraConfig(rank=4, alpha=8))
    x, sigma, condition = inputs()
    with torch.no_grad():
        before = roles.velocity("student")(x, sigma, condition)
    with pytest.raises(RuntimeError, match="size"), roles.selected("student"):
        roles.velocity("fake_score")(x[:, :2], sigma, condition)
    with torch.no_grad():
        assert torch.equal(roles.velocity("student")(x, sigma, condition), before)


@STORAGES
def test_b41_guided_velocity_is_the_formula_of_two_separate_calls(weights: Path, lora: LoraConfig | None) -> None:
    roles = make(weights, lora)
    x, sigma, condition = inputs()
    negative = roles.model.encode([""] * len(x))
    with torch.no_grad():
        guided = roles.velocity("teacher", 3.0)(x, sigma, condition)
        positive, other = (roles.velocity("teacher")(x, sigma, c) for c in (condition, negative))
    assert torch.equal(guided, guide(positive, other, 3.0, "none"))


def test_b41_guidance_1_makes_no_negative_call(weights: Path) -> None:
    roles = make(weights, None)
    rows: list[int] = []
    inner = roles.model.velocity

    def spy(net: torch.nn.Module, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        rows.append(len(x))
        return inner(net, x, sigma, condition)

    roles.model.velocity = spy  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        roles.velocity("teacher", 1.0)(*inputs(8))
        roles.velocity("teacher", 2.0)(*inputs(8))
    assert rows == [8, 16]


@STORAGES
def test_a_rows_velocity_does_not_depend_on_its_batch(weights: Path, lora: LoraConfig | None) -> None:
    roles = make(weights, lora)
    x, sigma, condition = inputs(13)
    with torch.no_grad():
        whole = roles.velocity("student", 2.0)(x, sigma, condition)
        for rows in ([0], [3, 1], [12, 4, 7, 2, 9], list(range(9))):
            part = roles.velocity("student", 2.0)(x[rows], sigma[rows], condition.take(rows))
            assert torch.equal(part, whole[rows])


def test_b29_lora_target_without_a_match_is_named(weights: Path) -> None:
    with pytest.raises(ValueError, match=r"'to_kk' matches no linear layer.*to_k"):
        Roles(glyph.load(weights), KINDS, SOURCES, lora=LoraConfig(rank=4, alpha=4, targets=("to_q", "to_kk")))


@STORAGES
def test_b05_fingerprints_follow_the_weights(weights: Path, lora: LoraConfig | None) -> None:
    roles = make(weights, lora)
    teacher = roles.fingerprint("teacher")
    seen = {roles.fingerprint("student")}
    for _ in range(2):
        with torch.no_grad():
            next(iter(roles.parameters("student").values())).add_(0.1)
        seen.add(roles.fingerprint("student"))
    assert len(seen) == 3
    assert roles.fingerprint("teacher") == teacher


def test_b13_lora_delta_has_the_scale_alpha_over_rank(weights: Path) -> None:
    """B13: doubling alpha doubles the change of the output to first order; here in one linear layer, exactly."""
    from peft.tuners.lora.layer import Linear

    for alpha in (4.0, 8.0):
        roles = make(weights, LoraConfig(rank=4, alpha=alpha))
        layer = next(m for m in roles.model.net.modules() if isinstance(m, Linear))
        a, b = (next(factor["student"].parameters()) for factor in (layer.lora_A, layer.lora_B))
        x = seeds.normal(0, "train_noise", range(3), (a.shape[1],))
        with torch.no_grad(), roles.selected("student"):
            delta = layer(x) - layer.base_layer(x)
        torch.testing.assert_close(delta, x @ a.T @ b.T * (alpha / 4), rtol=1e-4, atol=1e-4)


def test_b29_a_rank_above_the_layers_is_refused(weights: Path) -> None:
    with pytest.raises(ValueError, match=r"roles\.lora\.rank is 33, but 'to_q' has full rank at 32"):
        Roles(glyph.load(weights), KINDS, SOURCES, lora=LoraConfig(rank=33, alpha=4, targets=("to_q",)))
