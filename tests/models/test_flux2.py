"""FLUX.2, klein and dev: the families' checklist, and what only this family has."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor, nn

from sigmazero.models import flux2
from sigmazero.records import Conditioning
from sigmazero.schedule import exponential_shift, sigma_grid
from tests.models.checklist import FamilyChecklist


def _as_map(tokens: Tensor, height: int, width: int) -> Tensor:
    """Tokens ``[b, h * w, C]`` as the pipeline takes noise: ``[b, C, h, w]``."""
    return tokens.permute(0, 2, 1).reshape(len(tokens), tokens.shape[2], height // 16, width // 16)


class Flux2Checklist(FamilyChecklist):
    fixed_length = True

    def sample(self, pipeline: Any, prompts: list[str], start: Tensor, num_steps: int, guidance: float) -> Tensor:
        height, width = self.size
        return pipeline(
            prompt=prompts, height=height, width=width, num_inference_steps=num_steps, guidance_scale=guidance,
            latents=_as_map(start, height, width), output_type="pt",
        ).images  # fmt: skip

    def vae_latents(self, pipeline: Any, pictures: Tensor) -> Tensor:
        return pipeline._pack_latents(pipeline._encode_vae_image(2 * pictures - 1, None))

    def vae_pictures(self, pipeline: Any, latents: Tensor) -> Tensor:
        norm = pipeline.vae.bn
        std = (norm.running_var + pipeline.vae.config.batch_norm_eps).sqrt()
        patches = _as_map(latents, *self.size) * std[:, None, None] + norm.running_mean[:, None, None]
        decoded = pipeline.vae.decode(pipeline._unpatchify_latents(patches)).sample
        return pipeline.image_processor.postprocess(decoded, output_type="pt")

    def encoders(self, model: Any) -> list[nn.Module]:
        return [model._encoder]

    def time_embedder(self, net: Any) -> nn.Module:
        return net.time_guidance_embed.time_proj

    def passed_time(self, sigma: Tensor) -> Tensor:
        return sigma


class TestFlux2(Flux2Checklist):
    module = flux2

    # Text.

    def test_b09_prompts_are_embedded_as_the_pipelines_and_cut_at_512(self, model: Any, pipeline: Any) -> None:
        prompts = ["", "a red cat", "a very long story " * 40]
        embedded = model.encode(prompts)["text"]
        theirs, _ = pipeline.encode_prompt(prompts)
        assert embedded.shape == (3, 512, model.net.config.joint_attention_dim)
        torch.testing.assert_close(embedded, theirs, rtol=0, atol=1e-4)  # of values up to 20
        assert torch.equal(model.encode(prompts[1:2])["text"][0], embedded[1])

    def test_b09_the_padding_is_attended_on_purpose(self, model: Any) -> None:
        condition = model.encode(["a red cat"])
        moved = condition["text"].clone()
        moved[:, -1] += 1
        assert not torch.equal(self.velocity(model, Conditioning({"text": moved})), self.velocity(model, condition))

    # Time in half precision.

    def test_b03_a_copy_of_a_half_precision_net_is_as_exact(self, folder: Path, model: Any) -> None:
        """Roles copy the network. Every row is the fp32 one to a few bfloat16 steps."""
        half = self.load(folder, dtype=torch.bfloat16)
        net, seen = copy.deepcopy(half.net), []
        net.time_guidance_embed.time_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].item()))
        sigma, x = torch.tensor([0.9983897]), self.noise(model, 1)
        with torch.no_grad():
            v = half.velocity(net, x, sigma, half.encode(["a red cat"]))
            exact = model.velocity(model.net, x, sigma, model.encode(["a red cat"]))
        assert seen == pytest.approx([998.3897], abs=1e-4)
        assert v.dtype == torch.bfloat16
        assert (v.float() - exact).norm() < 0.05 * exact.norm()

    # Size and schedule.

    def test_the_default_size_is_the_pipelines_and_mu_follows_tokens_and_steps(self, folder: Path) -> None:
        default, half = flux2.load(str(folder)), flux2.load(str(folder), height=512, width=512)
        assert default.latent_shape == (4096, 128)
        assert math.log(default.default_shift(4)) == pytest.approx(2.2912, abs=1e-4)
        expected = torch.tensor([1, 0.9581, 0.8840, 0.7175, 0])
        torch.testing.assert_close(sigma_grid(4, half.default_shift(4)), expected, rtol=0, atol=5e-5)

    def test_a_static_scheduler_gives_its_own_shift(self, folder: Path, tmp_path: Path) -> None:
        changed = _edited(self, folder, tmp_path, "scheduler/scheduler_config.json", use_dynamic_shifting=False)
        assert self.load(changed).default_shift(4) == 3.0

    # Guidance.

    def test_a_distilled_pipeline_says_so_and_ignores_guidance(self, folder: Path, tmp_path: Path, model: Any) -> None:
        changed = _edited(self, folder, tmp_path, "model_index.json", is_distilled=True)
        distilled, pipeline = self.load(changed), flux2.Flux2KleinPipeline.from_pretrained(changed)
        assert (distilled.is_distilled, model.is_distilled) == (True, False)
        pipeline.set_progress_bar_config(disable=True)
        theirs = self.sample(pipeline, ["a red cat"], self.noise(distilled, 1), 1, 4.0)
        ours = self.picture(distilled, ["a red cat"], pipeline.scheduler.sigmas, 1.0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)

    def test_guidance_of_a_distilled_base_is_refused_and_of_a_base_is_not(
        self, folder: Path, tmp_path: Path, model: Any
    ) -> None:
        distilled = self.load(_edited(self, folder, tmp_path, "model_index.json", is_distilled=True))
        with pytest.raises(
            ValueError, match=r"^algorithm\.guidance is 3\.5, .*is_distilled.* set algorithm\.guidance to 1"
        ):
            distilled.check_guidance("algorithm.guidance", 3.5)
        distilled.check_guidance("algorithm.guidance", 1.0)
        model.check_guidance("algorithm.guidance", 3.5)

    def test_an_embedded_guidance_does_nothing_for_klein_and_is_refused(self, folder: Path) -> None:
        self.refused(folder, r"model\.embedded_guidance is 4, .* FLUX\.2-klein.* leave it out", embedded_guidance=4.0)

    def test_a_decoded_picture_has_a_gradient(self, model: Any) -> None:
        latents = self.noise(model, 2).requires_grad_()
        model.decode(latents).sum().backward()
        assert latents.grad is not None
        assert latents.grad.abs().amax((1, 2)).min() > 0

    # What is no FLUX.2-klein.

    def test_a_tokenizer_without_its_template_is_refused(self, folder: Path, tmp_path: Path) -> None:
        """It is a file of its own, easily left behind."""
        changed = self.copied(folder, tmp_path, lambda f: (f / "tokenizer" / "chat_template.jinja").unlink())
        self.refused(changed, r"model\.path: .* the tokenizer has no chat template")

    @pytest.mark.parametrize(
        ("part", "change", "match"),
        [
            ("net", {"guidance_embeds": True}, "embeds its guidance"),
            ("net", {"in_channels": 64}, "reads 64 channels, the patched VAE has 128"),
            ("net", {"joint_attention_dim": 32}, "text of width 32, the text encoder gives 48"),
            ("text", {"num_hidden_layers": 20}, "has 20 layers, wanted 27"),
        ],
    )
    def test_parts_of_different_models_are_refused(
        self, model: Any, part: str, change: dict[str, Any], match: str
    ) -> None:
        """Each part is sound by itself, so only their configurations tell."""
        net, text = dict(model.net.config), copy.copy(model._encoder.config)
        if part == "net":
            net.update(change)
        else:
            text.update(change)
        parts: list[Any] = [SimpleNamespace(config=net), model._vae, SimpleNamespace(config=text), model._tokenizer]
        with pytest.raises(ValueError, match=rf"model\.path: folder is no FLUX\.2-klein: .*{match}"):
            flux2._check_fit("folder", model._variant, *parts)

    def test_neither_a_folder_nor_a_hub_id_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"model\.path: there is no folder runs/a/pipeline"):
            flux2.load("runs/a/pipeline")


class TestFlux2Dev(Flux2Checklist):
    """Guided by a number that the network reads: where the checklist guides, that number is what changes."""

    module = SimpleNamespace(load=flux2.load, tiny=flux2.tiny_dev)

    def picture(self, model: Any, prompts: Sequence[str], sigmas: Tensor, guidance: float) -> Tensor:
        before, model.embedded_guidance = model.embedded_guidance, guidance
        try:
            return super().picture(model, prompts, sigmas, 1.0)
        finally:
            model.embedded_guidance = before

    def test_prompts_are_embedded_as_the_pipelines_and_cut_at_512(self, model: Any, pipeline: Any) -> None:
        """A mark of a picture is taken out of a prompt, because the encoder would look for the picture."""
        prompts = ["", "a red [IMG]cat", "a very long story " * 40]
        embedded = model.encode(prompts)["text"]
        theirs, _ = pipeline.encode_prompt(prompts)
        torch.testing.assert_close(embedded, theirs, rtol=0, atol=1e-4)  # of values up to 20
        assert torch.equal(embedded[1], model.encode(["a red cat"])["text"][0])
        assert not torch.equal(embedded[0], embedded[1])

    def test_the_strength_is_the_pipelines_default_or_the_given_one(self, folder: Path, pipeline: Any) -> None:
        default, given = self.load(folder), self.load(folder, embedded_guidance=2.5)
        assert default.embedded_guidance == inspect.signature(pipeline.__call__).parameters["guidance_scale"].default
        assert (default.metadata()["embedded_guidance"], given.metadata()["embedded_guidance"]) == ("4.0", "2.5")
        assert self.load(folder, embedded_guidance=0.0).embedded_guidance == 0, "not the default"

    def test_b03_a_half_precision_net_embeds_the_exact_strength(self, folder: Path) -> None:
        model, seen = self.load(folder, dtype=torch.bfloat16, embedded_guidance=3.14159), []
        model.net.time_guidance_embed.time_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        self.velocity(model, model.encode(["a red cat"]), rows=1)
        torch.testing.assert_close(seen[1], torch.tensor([3141.59]))

    def test_guidance_of_two_passes_is_refused(self, model: Any) -> None:
        model.check_guidance("algorithm.guidance", 1.0)
        with pytest.raises(
            ValueError, match=r"^algorithm\.guidance is 2, .* to 1, .* model\.embedded_guidance, now 4$"
        ):
            model.check_guidance("algorithm.guidance", 2.0)

    def test_a_network_that_embeds_no_guidance_is_refused(self, model: Any) -> None:
        net = SimpleNamespace(config={**model.net.config, "guidance_embeds": False})
        parts: list[Any] = [net, model._vae, model._encoder, model._tokenizer]
        with pytest.raises(ValueError, match=r"folder is no FLUX\.2-dev: the transformer embeds no guidance"):
            flux2._check_fit("folder", model._variant, *parts)


def _edited(checks: FamilyChecklist, folder: Path, tmp_path: Path, file: str, **change: Any) -> Path:
    """A copy of the pipeline with other values in one of its configurations."""

    def edit(changed: Path) -> None:
        (changed / file).write_text(json.dumps({**json.loads((changed / file).read_text()), **change}))

    return checks.copied(folder, tmp_path, edit)


@pytest.mark.parametrize("num_tokens", [4, 1024, 4096, 4300, 4301, 16384])
def test_b42_mu_is_the_installed_pipelines(num_tokens: int) -> None:
    for num_steps in (1, 4, 10, 28, 50, 200, 300):
        assert flux2.empirical_mu(num_tokens, num_steps) == pytest.approx(compute_empirical_mu(num_tokens, num_steps))


def test_b42_mu_of_known_sizes() -> None:
    assert flux2.empirical_mu(1024, 4) == pytest.approx(2.0307, abs=5e-5)
    assert flux2.empirical_mu(1024, 50) == pytest.approx(1.7020, abs=5e-5)
    shifted = exponential_shift(torch.tensor([1, 0.75, 0.5, 0.25]), flux2.empirical_mu(1024, 4))
    torch.testing.assert_close(shifted, torch.tensor([1, 0.9581, 0.8840, 0.7175]), rtol=0, atol=5e-5)
