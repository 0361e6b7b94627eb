"""The glyph family: captions, conventions, weight files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sigmazero import seeds
from sigmazero.models import glyph
from sigmazero.schedule import add_noise, x0_from_velocity
from sigmazero.tensors import write_tensors


def test_b03_the_embedding_is_fed_the_exact_timestep_in_half_precision(weights: Path) -> None:
    """998.3897 stays 998.3897; bfloat16 would make it 1000."""
    model = glyph.load(weights)
    model.net.to(torch.bfloat16)
    seen: list[Tensor] = []
    model.net.transformer.time_text_embed.time_proj.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    sigma = torch.tensor([0.9983897, 0.9782609, 0.6818182, 0.9375, 0.75])
    with torch.no_grad():
        model.velocity(model.net, torch.zeros(5, 3, 16, 16), sigma, model.encode([""] * 5))
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0], torch.tensor([998.3897, 978.2609, 681.8182, 937.5, 750.0]), rtol=0, atol=1e-4)


def test_the_familys_convention_rebuilds_a_known_x0(weights: Path) -> None:
    """A network that answers eps - x0 gives x0 back through the family, so sign and time run as everywhere."""
    model = glyph.load(weights)
    x0, eps = (seeds.normal(i, "train_noise", range(4), (3, 16, 16)) for i in range(2))
    sigma = torch.tensor([0.1, 0.4, 0.7, 1.0])

    class Answer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor, t: Tensor, tokens: Tensor) -> Tensor:
            torch.testing.assert_close(t, 1000 * sigma)
            return eps - x0

    x = add_noise(x0, eps, sigma)
    v = model.velocity(Answer(), x, sigma, model.encode([""] * 4))
    torch.testing.assert_close(x0_from_velocity(x, v, sigma), x0, rtol=1e-5, atol=1e-5)


def test_b09_a_caption_is_encoded_alike_alone_and_beside_longer_ones(weights: Path) -> None:
    model = glyph.load(weights)
    short, long = "the number 42", "the number 07 in red on yellow, serif font"
    alone, pair = model.encode([short]), model.encode([short, long])
    assert torch.equal(alone["tokens"][0], pair["tokens"][0])


def test_every_named_attribute_has_a_token_of_its_own_and_open_ones_do_too(weights: Path) -> None:
    model = glyph.load(weights)
    named = ["42", "24", "42 in red", "42 on pink", "42, mono font"]
    captions = [*(f"the number {rest}" for rest in named), ""]
    tokens = [tuple(row) for row in model.encode(captions)["tokens"].tolist()]
    assert len(set(tokens)) == len(captions)
    assert all(0 <= t <= glyph.NO_CAPTION for row in tokens for t in row)


def test_an_unknown_word_is_named(weights: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown ink 'mauve'; known are black, red"):
        glyph.load(weights).encode(["the number 42 in mauve"])


def test_b75_decode_inverts_encode_to_a_255th(weights: Path) -> None:
    model = glyph.load(weights)
    pictures = torch.arange(256).div(255).repeat(3)[: 3 * 256].reshape(1, 3, 16, 16)
    assert (model.decode(model.encode_pictures(pictures)) - pictures).abs().max() < 0.5 / 255


def test_a_saved_file_gives_the_same_network(weights: Path, tmp_path: Path) -> None:
    first = glyph.load(weights)
    glyph.save(tmp_path / "again.safetensors", first, first.net.state_dict())
    second = glyph.load(tmp_path / "again.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(first.net.parameters(), second.net.parameters(), strict=True))


class _Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "missing.safetensors"])
def test_b49_what_is_no_weight_file_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    path, marker = tmp_path / name, tmp_path / "ran"
    if "missing" not in name:
        path.write_bytes(pickle.dumps(_Attack(marker)))
    with pytest.raises(ValueError, match=r"model\.path"):
        glyph.load(path)
    assert not marker.exists()


def test_a_file_whose_tensors_do_not_fit_its_config_is_refused(weights: Path, tmp_path: Path) -> None:
    model = glyph.load(weights)
    tensors = dict(model.net.state_dict())
    tensors["unknown"] = torch.zeros(1)
    glyph.save(tmp_path / "more.safetensors", model, tensors)
    with pytest.raises(ValueError, match=r"do not fit.*unknown"):
        glyph.load(tmp_path / "more.safetensors")


def test_an_untrained_network_is_a_function_of_its_seed_and_answers_zero() -> None:
    first, second, other = glyph.create(32, 1, 5), glyph.create(32, 1, 5), glyph.create(32, 1, 6)
    assert torch.equal(first.net.text.weight, second.net.text.weight)
    assert not torch.equal(first.net.text.weight, other.net.text.weight)
    with torch.no_grad():
        v = first.velocity(first.net, torch.ones(2, 3, 16, 16), torch.tensor([0.5, 0.9]), first.encode(["", ""]))
    assert torch.equal(v, torch.zeros_like(v))


def test_the_shipped_teacher_loads_and_is_at_most_10_megabytes() -> None:
    assert glyph.SHIPPED["shipped"].stat().st_size <= 10_000_000
    model = glyph.load(glyph.SHIPPED["shipped"])
    assert 2e6 < sum(p.numel() for p in model.net.parameters()) < 5e6
    assert {p.dtype for p in model.net.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (None, "no usable config"),
        ("{", "no usable config"),
        ("[1]", "no usable config"),
        ('{"w": 1}', "no usable config"),
        ('{"width": "a", "num_layers": 2}', "no usable config"),
        ('{"width": 0, "num_layers": 2}', "no usable config"),
        ('{"width": 32}', "does not say its width and num_layers"),
        ('{"width": 64, "num_layers": 2}', "do not fit its config"),
    ],
)
def test_a_file_with_odd_metadata_is_refused_by_name(
    weights: Path, tmp_path: Path, config: str | None, complaint: str
) -> None:
    metadata = {"family": "glyph"} | ({"config": config} if config is not None else {})
    path = tmp_path / "odd.safetensors"
    write_tensors(path, dict(glyph.load(weights).net.state_dict()), metadata)
    with pytest.raises(ValueError, match=complaint) as caught:
        glyph.load(path)
    assert "odd.safetensors" in str(caught.value)


def test_a_file_with_non_finite_weights_is_refused(weights: Path, tmp_path: Path) -> None:
    model = glyph.load(weights)
    tensors = {
        name: value * float("nan") if name == "text.weight" else value for name, value in model.net.state_dict().items()
    }
    glyph.save(tmp_path / "nan.safetensors", model, tensors)
    with pytest.raises(ValueError, match=r"non-finite weights: text\.weight"):
        glyph.load(tmp_path / "nan.safetensors")
