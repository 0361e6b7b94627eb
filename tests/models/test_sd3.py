"""Stable Diffusion 3 and 3.5: the checklist, and what only this family has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from sigmazero.models import sd3
from sigmazero.schedule import diffusers_sd3_grid, exponential_shift
from tests.models.checklist import FamilyChecklist


class TestSD3(FamilyChecklist):
    module = sd3
    fixed_length = True
    idle_adapters = ("transformer_blocks.2.attn.add_q_proj",)  # the last block drops its text queries

    def sample(self, pipeline: Any, prompts: list[str], start: Tensor, num_steps: int, guidance: float) -> Tensor:
        height, width = self.size
        return pipeline(
            prompts,
            height=height,
            width=width,
            latents=start,
            num_inference_steps=num_steps,
            guidance_scale=guidance,
            output_type="pt",
        ).images

    def vae_latents(self, pipeline: Any, pictures: Tensor) -> Tensor:
        mean = pipeline.vae.encode(2 * pictures - 1).latent_dist.mean
        return (mean - 0.0609) * 1.5305

    def vae_pictures(self, pipeline: Any, latents: Tensor) -> Tensor:
        return ((pipeline.vae.decode(latents / 1.5305 + 0.0609).sample + 1) / 2).clamp(0, 1)

    def encoders(self, model: Any) -> list[nn.Module]:
        assert model._encoders is not None
        return [encoder for _, encoder in (*model._encoders.clip, model._encoders.t5)]

    def time_embedder(self, net: nn.Module) -> nn.Module:
        return net.get_submodule("time_text_embed.time_proj")

    def pipeline_grid(self, model: Any, num_steps: int) -> Tensor:
        """diffusers shifts its static table twice (B07)."""
        return diffusers_sd3_grid(num_steps, model.default_shift(num_steps))

    @pytest.mark.parametrize("prompt", ["", "a red cat", "two old dogs, " * 8, "a very long story; " * 20])
    def test_text_is_encoded_as_by_the_pipeline(self, model: Any, pipeline: Any, prompt: str) -> None:
        """CLIP's part is cut at 77 tokens and T5's at 256."""
        with torch.no_grad():
            text, _, pooled, _ = pipeline.encode_prompt([prompt], None, None, do_classifier_free_guidance=False)
        mine = model.encode([prompt])
        assert mine["text"].shape == (1, 77 + 256, 32)
        torch.testing.assert_close(mine["text"], text, rtol=0, atol=1e-5)
        torch.testing.assert_close(mine["pooled"], pooled, rtol=0, atol=1e-5)

    def test_b09_a_texts_condition_has_the_same_bits_beside_others(self, model: Any) -> None:
        alone, beside = model.encode([self.prompts[0]]), model.encode([*self.prompts, ""])
        assert all(torch.equal(field[0], beside[name][0]) for name, field in alone.fields.items())

    def test_a_pipeline_without_t5_is_read_and_gives_the_same_picture(self, folder: Path, tmp_path: Path) -> None:
        without = DiffusionPipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
        without.set_progress_bar_config(disable=True)
        without.save_pretrained(tmp_path)
        model = self.load(tmp_path)
        prompts, start = list(self.prompts), self.noise(model, 2)
        theirs = self.sample(without, prompts, start, 2, 3.5)
        ours = self.picture(model, prompts, without.scheduler.sigmas, 3.5)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=self.picture_tolerance)
        assert model.encode([""])["text"][:, 77:].abs().max() == 0

    def test_b42_a_dynamic_shift_is_the_pipelines(self, folder: Path, pipeline: Any, tmp_path: Path) -> None:
        """Where the config asks for it: ``e^mu`` of 2 * 4 patches, of a grid down to a thousandth."""

        def dynamic(changed: Path) -> None:
            file = changed / "scheduler" / "scheduler_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "use_dynamic_shifting": True}))

        changed = self.copied(folder, tmp_path, dynamic)
        model = self.load(changed)
        assert model.default_shift(4) == pytest.approx(math.exp(0.5 + 0.65 / 3840 * (8 - 256)))
        scheduler = pipeline.scheduler.from_pretrained(changed / "scheduler")
        theirs = type(pipeline)(**{**pipeline.components, "scheduler": scheduler})
        theirs.set_progress_bar_config(disable=True)
        self.sample(theirs, [self.prompts[0]], self.noise(model, 1), 4, 1.0)
        mine = exponential_shift(torch.linspace(1, 1e-3, 4), math.log(model.default_shift(4)))
        torch.testing.assert_close(mine, scheduler.sigmas[:-1], rtol=0, atol=1e-6)

    def test_the_default_size_is_the_pipelines(self, folder: Path) -> None:
        model = sd3.load(str(folder))
        assert model.latent_shape == (16, 8, 8)
        assert dict(model.metadata()) == {"family": "sd3", "height": "64", "width": "64"}
        assert self.velocity(model, model.encode([""])).shape == (1, 16, 8, 8)

    def test_a_size_beyond_the_position_table_is_named(self, folder: Path) -> None:
        self.refused(folder, r"data\.width is 208; .* multiples of 16 up to 192", width=208)

    def test_a_config_that_lacks_an_entry_is_named(self, folder: Path, tmp_path: Path) -> None:
        def drop(changed: Path) -> None:
            file = changed / "vae" / "config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "shift_factor": None}))

        self.refused(self.copied(folder, tmp_path, drop), r"model\.path: the config of vae .* shift_factor")
