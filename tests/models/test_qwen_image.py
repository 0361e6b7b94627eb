"""The Qwen-Image family against its own diffusers pipeline."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from transformers import Qwen2Tokenizer

from sigmazero.models import qwen_image
from sigmazero.schedule import sigma_grid
from tests.models.checklist import FamilyChecklist


class TestQwenImage(FamilyChecklist):
    module = qwen_image

    def sample(self, pipeline: Any, prompts: list[str], start: Tensor, num_steps: int, guidance: float) -> Tensor:
        negative = [""] * len(prompts) if guidance > 1 else None
        height, width = self.size
        return pipeline(
            prompts, negative, guidance, height, width, num_steps, latents=start, output_type="pt"
        ).images  # fmt: skip

    def vae_latents(self, pipeline: Any, pictures: Tensor) -> Tensor:
        mean, std = self.statistics(pipeline)
        z = (pipeline.vae.encode(2 * pictures[:, :, None] - 1).latent_dist.mode() - mean) / std
        return pipeline._pack_latents(z, len(z), 16, *z.shape[-2:])

    def vae_pictures(self, pipeline: Any, latents: Tensor) -> Tensor:
        mean, std = self.statistics(pipeline)
        z = pipeline._unpack_latents(latents, *self.size, pipeline.vae_scale_factor) * std + mean
        return (pipeline.vae.decode(z).sample[:, :, 0] + 1) / 2

    def statistics(self, pipeline: Any) -> tuple[Tensor, Tensor]:
        config = pipeline.vae.config
        mean, std = (torch.tensor(config[name]).reshape(1, 16, 1, 1, 1) for name in ("latents_mean", "latents_std"))
        return mean, std

    def encoders(self, model: Any) -> list[nn.Module]:
        return [model.text_encoder]

    def time_embedder(self, net: Any) -> nn.Module:
        return net.time_text_embed.time_proj

    def passed_time(self, sigma: Tensor) -> Tensor:
        return sigma

    embedded_time = passed_time

    @pytest.fixture(scope="class")
    @classmethod
    def pipeline(cls, folder: Path) -> Any:
        """Without the terminal stretch, which is 0/0 at one step."""
        pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        scheduler = pipeline.scheduler
        pipeline.scheduler = type(scheduler).from_config(scheduler.config, shift_terminal=None)
        return pipeline

    def test_b08_the_stretched_grid_is_another_one(self, model: Any, folder: Path) -> None:
        """As saved, the scheduler ends at .02; the pictures agree when its sigmas are handed over as they are."""
        pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        start, prompts = self.noise(model, 1), list(self.prompts[:1])
        theirs = self.sample(pipeline, prompts, start, 4, 1.0)
        stretched, grid = pipeline.scheduler.sigmas, sigma_grid(4, model.default_shift(4))
        assert stretched[-2] == pytest.approx(0.02, abs=1e-6)
        assert (stretched - grid).abs().max() > 0.1
        ours = self.picture(model, prompts, stretched, 1.0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=self.picture_tolerance)

    def test_b42_the_shift_follows_the_number_of_tokens(self, folder: Path, tmp_path: Path) -> None:
        """Qwen-Image: 4,096 tokens give mu .6935; the default size is 1024x1024."""
        default = qwen_image.load(str(folder))
        assert default.latent_shape == (4096, 64)
        assert [math.log(default.default_shift(n)) for n in (1, 50)] == pytest.approx([0.6935, 0.6935], abs=5e-5)

        def fix(changed: Path) -> None:
            file = changed / "scheduler" / "scheduler_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "use_dynamic_shifting": False, "shift": 3.0}))

        assert self.load(self.copied(folder, tmp_path, fix)).default_shift(4) == 3

    def test_prompts_are_encoded_as_the_pipelines_and_cut_at_512_tokens(self, model: Any, pipeline: Any) -> None:
        prompts = ["", self.prompts[1], "1 " * 600, "{} <|im_end|> {0}"]
        theirs, mask = pipeline.encode_prompt(prompts, max_sequence_length=512)
        condition = model.encode(prompts)
        assert torch.equal(condition["mask"], mask.bool())
        assert condition["mask"].sum(1).tolist()[:3:2] == [5, 512]
        torch.testing.assert_close(condition["embeddings"], theirs, rtol=0, atol=1e-5)

    def test_a_mask_that_hides_nothing_is_left_out(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        arrived: list[Tensor | None] = []
        true_forward = model.net.forward

        def forward(*inputs: Any, encoder_hidden_states_mask: Tensor | None, **others: Any) -> Any:
            arrived.append(encoder_hidden_states_mask)
            return true_forward(*inputs, encoder_hidden_states_mask=encoder_hidden_states_mask, **others)

        def always(*inputs: Any, encoder_hidden_states_mask: None, encoder_hidden_states: Tensor, **others: Any) -> Any:
            mask = torch.ones(encoder_hidden_states.shape[:2], dtype=torch.bool)
            return true_forward(
                *inputs, encoder_hidden_states_mask=mask, encoder_hidden_states=encoder_hidden_states, **others
            )

        even, ragged = model.encode([self.prompts[0]] * 2), model.encode(self.prompts)
        monkeypatch.setattr(model.net, "forward", forward)
        left_out = self.velocity(model, even)
        self.velocity(model, ragged)
        assert arrived[0] is None
        assert arrived[1] is not None
        monkeypatch.setattr(model.net, "forward", always)
        torch.testing.assert_close(self.velocity(model, even), left_out, rtol=0, atol=1e-5)

    def test_the_hook_that_keeps_the_time_exact_is_gone_after_an_error(self, model: Any) -> None:
        with pytest.raises(RuntimeError, match="shape"):
            model.velocity(model.net, torch.zeros(1, 8, 63), torch.ones(1), model.encode([""]))
        assert not model.net.time_text_embed._forward_pre_hooks

    @pytest.mark.parametrize("setting", ["guidance_embeds", "zero_cond_t"])
    def test_a_relatives_transformer_is_refused(self, folder: Path, tmp_path: Path, setting: str) -> None:
        def switch_on(changed: Path) -> None:
            file = changed / "transformer" / "config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), setting: True}))

        self.refused(self.copied(folder, tmp_path, switch_on), rf"model\.path: .*{setting}")

    def test_a_tokenizer_whose_prefix_is_not_34_tokens_is_refused(self, folder: Path, tmp_path: Path) -> None:
        def replace(changed: Path) -> None:
            Qwen2Tokenizer().save_pretrained(changed / "tokenizer")

        self.refused(self.copied(folder, tmp_path, replace), r"model\.path: the tokenizer .*dropped as 34")

    def test_pictures_of_another_size_are_refused(self, model: Any) -> None:
        with pytest.raises(ValueError, match=r"data\.height and data\.width are 32 and 64.* 64 by 32"):
            model.encode_pictures(torch.zeros(1, 3, 64, 32))
