"""What every family of pictures from text must keep, against its own diffusers pipeline on tiny random weights.

A family's test file says what its pipeline is and inherits the rest::

    class TestSD3(FamilyChecklist):
        module = sd3

        def sample(self, pipeline, prompts, start, num_steps, guidance): ...
        def vae_latents(self, pipeline, pictures): ...
        def vae_pictures(self, pipeline, latents): ...
        def encoders(self, model): ...
        def time_embedder(self, net): ...

The other hooks have defaults. What only one family has (packing, ids, templates) it tests in its own file.
"""

from __future__ import annotations

import abc
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sigmazero import seeds
from sigmazero.config import LoraConfig
from sigmazero.models.roles import Roles
from sigmazero.records import Conditioning, Prompt, RolloutRequest, StepPlan
from sigmazero.sampler import rollout
from sigmazero.schedule import add_noise, sigma_grid

SEED = 7


class FamilyChecklist(abc.ABC):
    module: ClassVar[Any]
    size: ClassVar[tuple[int, int]] = (32, 64)  # height and width in pixels; not square, so that a swap shows
    prompts: ClassVar[tuple[str, str]] = ("a red cat", "the number 42 on a blue wall, two old dogs look at it")
    guidances: ClassVar[tuple[float, ...]] = (1.0, 3.5)  # 1 first
    pipeline_batches: ClassVar[bool] = True  # False: the pipeline itself is wrong in batches, so each prompt goes alone
    fixed_length: ClassVar[bool] = False  # True: prompts are padded to one length on purpose and there is no mask
    picture_tolerance: ClassVar[float] = 1e-4
    idle_adapters: ClassVar[tuple[str, ...]] = ()  # parts of names of layers whose result the network drops
    weightless: ClassVar[tuple[str, ...]] = ("scheduler", "tokenizer", "tokenizer_2", "tokenizer_3", "processor")

    # What a family says of its pipeline.

    @abc.abstractmethod
    def sample(self, pipeline: Any, prompts: list[str], start: Tensor, num_steps: int, guidance: float) -> Tensor:
        """The pipeline's pictures fp32 ``[b, 3, H, W]`` in [0, 1] from ``start [b, *latent_shape]``, with its own
        scheduler. Guidance 1 is none; above 1 the negative prompt is the empty one."""

    @abc.abstractmethod
    def vae_latents(self, pipeline: Any, pictures: Tensor) -> Tensor:
        """Latents ``[b, *latent_shape]`` of pictures in [0, 1] with the pipeline's VAE, by hand."""

    @abc.abstractmethod
    def vae_pictures(self, pipeline: Any, latents: Tensor) -> Tensor:
        """Pictures in [0, 1] of latents ``[b, *latent_shape]`` with the pipeline's VAE, by hand."""

    @abc.abstractmethod
    def encoders(self, model: Any) -> list[nn.Module]:
        """The text encoders, each called with ``input_ids`` (first or by name)."""

    @abc.abstractmethod
    def time_embedder(self, net: nn.Module) -> nn.Module:
        """The module whose first input is the timestep on its way into the sinusoid."""

    def output(self, model: Any, velocity: Tensor) -> Any:
        """What the network's forward returns when it answers exactly ``velocity [b, *latent_shape]``."""
        return (velocity,)

    def passed_time(self, sigma: Tensor) -> Tensor:
        """What the network's forward takes as ``timestep``."""
        return 1000 * sigma

    def embedded_time(self, sigma: Tensor) -> Tensor:
        """What arrives at ``time_embedder``."""
        return 1000 * sigma

    def pipeline_grid(self, model: Any, num_steps: int) -> Tensor:
        """The pipeline's own sigmas, built by ``sigmazero.schedule``."""
        return sigma_grid(num_steps, model.default_shift(num_steps))

    # Fixtures and short hands.

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("tiny") / "pipeline"
        cls.module.tiny(folder)
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def pipeline(cls, folder: Path) -> Any:
        pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, folder: Path) -> Any:
        """In fp32, shared: a test that changes it loads its own."""
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path, **options: Any) -> Any:
        height, width = cls.size
        return cls.module.load(str(folder), **{"height": height, "width": width, **options})

    def noise(self, model: Any, rows: int) -> Tensor:
        return seeds.normal(SEED, "initial_noise", range(rows), model.latent_shape)

    def velocity(self, model: Any, condition: Conditioning, rows: int | None = None) -> Tensor:
        """At other latents and another sigma a row."""
        rows = rows or len(condition)
        sigma = torch.linspace(0.9, 0.2, 5)[:rows]
        with torch.no_grad():
            return model.velocity(model.net, self.noise(model, 5)[:rows], sigma, condition)

    def picture(self, model: Any, prompts: Sequence[str], sigmas: Tensor, guidance: float) -> Tensor:
        """The family's pictures through sampler, roles and decode."""
        roles = Roles(model, {"policy": "frozen"}, {})
        plan = StepPlan((), (len(sigmas) - 1,), None)
        requests = [
            RolloutRequest(i, 0, Prompt(i, text), "policy", sigmas, "ode", 0.0, guidance, SEED, plan)
            for i, text in enumerate(prompts)
        ]
        with torch.no_grad():
            done = rollout(
                roles.velocity("policy", guidance), requests, model.encode(list(prompts)), model.latent_shape
            )
            return model.decode(torch.cat([trajectory.latents for trajectory in done]))

    # 1. Convention.

    def test_a_perfect_network_gives_eps_minus_x0_at_the_families_timestep(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        eps, x0 = self.noise(model, 8).split(4)
        sigma = torch.tensor([0.1, 0.4, 0.7, 1.0])
        arrived: list[Tensor] = []

        def forward(*_: Any, timestep: Tensor, **__: Any) -> Any:
            arrived.append(timestep)
            return self.output(model, eps - x0)

        monkeypatch.setattr(model.net, "forward", forward)
        v = model.velocity(model.net, add_noise(x0, eps, sigma), sigma, model.encode([""] * 4))
        torch.testing.assert_close(v, eps - x0, rtol=0, atol=0)
        torch.testing.assert_close(arrived, [self.passed_time(sigma)], rtol=1e-6, atol=0)

    def test_b03_a_half_precision_net_embeds_the_exact_timestep(self, folder: Path) -> None:
        """998.3897 stays 998.3897; bfloat16 would make it 1000. Latents and embeddings are in the net's precision."""
        model = self.load(folder, dtype=torch.bfloat16)
        assert {p.dtype for p in model.net.parameters()} == {torch.bfloat16}
        seen: list[Tensor] = []
        self.time_embedder(model.net).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        sigma = torch.tensor([0.9983897, 0.9782609, 0.6818182, 0.9375, 0.75])
        condition = model.encode([""] * 5)
        with torch.no_grad():
            v = model.velocity(model.net, self.noise(model, 5), sigma, condition)
        torch.testing.assert_close(seen[0], self.embedded_time(sigma), rtol=1e-6, atol=0)
        assert v.shape == (5, *model.latent_shape)
        assert bool(torch.isfinite(v).all())
        assert {f.dtype for f in condition.fields.values() if f.is_floating_point()} == {torch.bfloat16}

    # 2. The pipeline's pictures.

    @pytest.mark.parametrize("guided", [False, True], ids=["plain", "guided"])
    @pytest.mark.parametrize("rows", [1, 2])
    def test_b09_the_picture_is_the_pipelines(self, model: Any, pipeline: Any, rows: int, guided: bool) -> None:
        """Same noise, same sigmas, same guidance; two prompts differ in length."""
        guidance, prompts, start = self.guidances[guided], list(self.prompts[:rows]), self.noise(model, rows)
        if self.pipeline_batches:
            theirs = self.sample(pipeline, prompts, start, 3, guidance)
        else:
            each = [self.sample(pipeline, [p], start[i : i + 1], 3, guidance) for i, p in enumerate(prompts)]
            theirs = torch.cat(each)
        ours = self.picture(model, prompts, pipeline.scheduler.sigmas, guidance)
        assert ours.shape == (rows, 3, *self.size)
        assert ours.std() > 0.01
        torch.testing.assert_close(ours, theirs, rtol=0, atol=self.picture_tolerance)

    def test_text_and_guidance_change_the_picture(self, model: Any) -> None:
        """Without this, parity would hold of a network that ignores its text."""
        sigmas = sigma_grid(2)
        first = self.picture(model, self.prompts[:1], sigmas, 1.0)
        for other in (
            self.picture(model, self.prompts[1:], sigmas, 1.0),
            self.picture(model, self.prompts[:1], sigmas, self.guidances[-1]),
        ):
            assert (first - other).abs().max() > 100 * self.picture_tolerance

    # 3. Padding.

    def test_b09_a_prompts_velocity_does_not_depend_on_its_neighbours(self, model: Any) -> None:
        short, long = self.prompts
        alone, pair = model.encode([short]), model.encode([short, long])
        put_together = Conditioning.cat([alone, model.encode([long])])
        v = self.velocity(model, alone)
        for condition in (pair, put_together):
            torch.testing.assert_close(self.velocity(model, condition)[:1], v, rtol=0, atol=1e-5)
        assert ("mask" in pair.fields) != self.fixed_length
        if self.fixed_length:
            assert {n: f.shape[1:] for n, f in alone.fields.items()} == {n: f.shape[1:] for n, f in pair.fields.items()}
        else:
            lengths = pair["mask"].sum(1).tolist()
            assert pair["mask"].dtype == torch.bool
            assert lengths[0] < lengths[1], "the prompts should differ in length"

    @pytest.mark.parametrize("garbage", [1e4, float("nan")])
    def test_b09_garbage_in_padded_rows_changes_nothing(self, model: Any, garbage: float) -> None:
        if self.fixed_length:
            return  # nothing is masked, and the test before showed that no row is padded
        condition = model.encode(self.prompts)
        mask = condition["mask"]
        spoilt = {
            name: field.masked_fill(~mask.reshape(*mask.shape, *(1,) * (field.ndim - 2)), garbage)
            for name, field in condition.fields.items()
            if field.is_floating_point() and field.shape[:2] == mask.shape
        }
        assert spoilt, "no field has a row a token"
        v = self.velocity(model, Conditioning({**condition.fields, **spoilt}))
        torch.testing.assert_close(v, self.velocity(model, condition), rtol=0, atol=1e-5)

    # 4. Latents.

    def test_latents_are_those_of_the_vae_by_hand(self, model: Any, pipeline: Any) -> None:
        pictures = torch.rand(2, 3, *self.size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            latents = model.encode_pictures(pictures)
            theirs = self.vae_latents(pipeline, pictures)
            assert latents.shape == (2, *model.latent_shape)
            torch.testing.assert_close(latents, theirs, rtol=0, atol=1e-5)
            back, again = model.decode(latents), self.vae_pictures(pipeline, theirs)
        torch.testing.assert_close(back, again, rtol=0, atol=1e-5)
        assert back.dtype == torch.float32
        assert 0 <= back.min() < back.max() <= 1

    def test_the_vae_stays_in_fp32(self, model: Any, folder: Path) -> None:
        half, latents = self.load(folder, dtype=torch.bfloat16), self.noise(model, 1)
        with torch.no_grad():
            torch.testing.assert_close(half.decode(latents), model.decode(latents), rtol=0, atol=1e-6)

    # 5. Schedule.

    @pytest.mark.parametrize("num_steps", [1, 4])
    def test_b07_the_familys_grid_is_the_schedulers(self, model: Any, pipeline: Any, num_steps: int) -> None:
        self.sample(pipeline, [self.prompts[0]], self.noise(model, 1), num_steps, 1.0)
        mine = self.pipeline_grid(model, num_steps)
        torch.testing.assert_close(mine, pipeline.scheduler.sigmas, rtol=0, atol=1e-6)

    # 7. Adapters and checkpointing.

    def gradients(self, model: Any, activation_checkpointing: bool) -> tuple[dict[str, Tensor], int]:
        """By role and name, of two roles that run alternately; how many elements were kept for backward."""
        lora = LoraConfig(rank=2, alpha=2)
        kinds: Any = {"student": "train", "fake_score": "train"}
        roles = Roles(model, kinds, {}, lora=lora, activation_checkpointing=activation_checkpointing, seed=1)
        inputs = self.noise(model, 2), torch.tensor([0.3, 0.8]), model.encode(self.prompts)
        named = {(role, name): p for role in kinds for name, p in roles.parameters(role).items()}
        kept = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.no_grad():
            for number, value in enumerate(named.values()):
                value.copy_(0.3 * seeds.normal(0, "weight_init", [number], value.shape)[0])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = [roles.velocity(role)(*inputs).float().pow(2).mean() for role in kinds]
        for loss in losses:
            loss.backward()
        gradients = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in named.items()}
        return {f"{role}.{name}": gradient for (role, name), gradient in gradients.items()}, kept

    def test_b29_b30_every_adapter_gets_its_gradient_also_when_recomputed(self, folder: Path) -> None:
        """Default targets match; each role has gradients of its own; recompute runs under the forward's role."""
        model, other = self.load(folder), self.load(folder)
        names = [n for n, m in model.net.named_modules() if isinstance(m, nn.Linear)]
        for target in model.lora_targets:
            assert any(n == target or n.endswith(f".{target}") for n in names), target
        plain, kept = self.gradients(model, False)
        recomputed, kept_less = self.gradients(other, True)
        idle = {n for n, g in plain.items() if g.abs().max() == 0}
        assert all(any(part in n for part in self.idle_adapters) for n in idle), sorted(idle)
        assert kept_less < 0.8 * kept
        for name, gradient in plain.items():
            torch.testing.assert_close(recomputed[name], gradient, rtol=1e-5, atol=1e-6, msg=name)

    # 8. Errors of loading.

    def refused(self, folder: Path, match: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=match) as caught:
            self.load(folder, **options)
        assert "\n" not in str(caught.value), "one line"

    def copied(self, folder: Path, tmp_path: Path, change: Callable[[Path], object]) -> Path:
        target = tmp_path / "changed"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        change(target)
        return target

    def parts(self, folder: Path) -> list[str]:
        index = json.loads((folder / "model_index.json").read_text())
        return [n for n, kind in index.items() if isinstance(kind, list) and kind[0] is not None]

    def test_a_folder_that_is_none_is_named(self, folder: Path, tmp_path: Path) -> None:
        self.refused(tmp_path / "nowhere", r"model\.path: .*nowhere")
        self.refused(tmp_path, r"model\.path: .*model_index\.json")
        broken = self.copied(folder, tmp_path, lambda f: (f / "model_index.json").write_text("{"))
        self.refused(broken, r"model\.path: .*model_index\.json")

    def test_another_familys_folder_is_named(self, folder: Path, tmp_path: Path) -> None:
        def rename(changed: Path) -> None:
            index = json.loads((changed / "model_index.json").read_text())
            (changed / "model_index.json").write_text(json.dumps({**index, "_class_name": "OtherPipeline"}))

        self.refused(self.copied(folder, tmp_path, rename), r"model\.path: .*OtherPipeline")

    def test_a_missing_sub_folder_is_named(self, folder: Path, tmp_path: Path) -> None:
        for part in self.parts(folder):

            def remove(changed: Path, part: str = part) -> None:
                shutil.rmtree(changed / part)

            self.refused(self.copied(folder, tmp_path, remove), rf"model\.path: .*\b{part}\b")

    def test_b49_missing_weights_are_named_and_a_pickle_is_none(self, folder: Path, tmp_path: Path) -> None:
        for part in set(self.parts(folder)) - set(self.weightless):

            def pickled(changed: Path, part: str = part) -> None:
                for file in (changed / part).glob("*.safetensors"):
                    name = "pytorch_model.bin" if file.stem == "model" else f"{file.stem}.bin"
                    torch.save(load_file(file), file.with_name(name))
                    file.unlink()

            self.refused(self.copied(folder, tmp_path, pickled), rf"model\.path: .*\b{part}\b")

    def test_weights_that_lack_a_tensor_are_refused(self, folder: Path, tmp_path: Path) -> None:
        """The libraries would start it at random and only warn."""
        for part in set(self.parts(folder)) - set(self.weightless):
            missing: list[str] = []

            def drop(changed: Path, part: str = part, missing: list[str] = missing) -> None:
                file = next((changed / part).glob("*.safetensors"))
                tensors = load_file(file)
                missing.append(
                    max(n for n in tensors if "mlp" in n or "DenseReluDense" in n or "proj" in n or "conv" in n)
                )
                del tensors[missing[0]]
                save_file(tensors, file, {"format": "pt"})

            self.refused(self.copied(folder, tmp_path, drop), rf"model\.path: .*\b{part}\b")

    def test_a_tokenizer_without_its_vocabulary_is_refused(self, folder: Path, tmp_path: Path) -> None:
        """transformers would make one that knows next to nothing, without a word."""
        for part in [p for p in self.parts(folder) if p.startswith("tokenizer")]:

            def empty(changed: Path, part: str = part) -> None:
                for file in (changed / part).iterdir():
                    if file.name != "tokenizer_config.json":
                        file.unlink()

            self.refused(self.copied(folder, tmp_path, empty), rf"model\.path: .*\b{part}\b")

    @pytest.mark.parametrize("setting", ["height", "width"])
    def test_a_size_that_is_no_multiple_is_named(self, folder: Path, setting: str) -> None:
        for value in (self.size[0] + 1, 0, -64):
            self.refused(folder, rf"data\.{setting} is {value}", **{setting: value})

    # 9. Batches and what the protocol asks besides.

    def test_b53_rows_do_not_depend_on_the_batch_and_texts_are_encoded_once(self, model: Any) -> None:
        rows: dict[int, int] = {}

        def count(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            ids = options["input_ids"] if "input_ids" in options else args[0]
            rows[id(module)] = rows.get(id(module), 0) + len(ids)

        hooks = [e.register_forward_pre_hook(count, with_kwargs=True) for e in self.encoders(model)]
        first, second = self.prompts
        condition = model.encode([first, second, first])
        for hook in hooks:
            hook.remove()
        assert list(rows.values()) == [2] * len(hooks)
        assert all(torch.equal(f[0], f[2]) and not f.requires_grad for f in condition.fields.values())
        whole = self.velocity(model, condition)
        for b in (1, 2):
            part = self.velocity(model, condition.take(range(b)))
            torch.testing.assert_close(part, whole[:b], rtol=0, atol=1e-5)
        again = self.velocity(model, model.encode([first, second, first]))
        assert torch.equal(again, whole)

    def test_no_prompts_are_no_rows(self, model: Any) -> None:
        some, none = model.encode([self.prompts[0]]), model.encode([])
        assert len(none) == 0
        assert {n: (f.dtype, f.ndim) for n, f in none.fields.items()} == {
            n: (f.dtype, f.ndim) for n, f in some.fields.items()
        }

    def test_without_encoders_encode_says_so(self, folder: Path) -> None:
        model = self.load(folder)
        condition = model.encode([self.prompts[0]])
        model.free_encoders()
        with pytest.raises(RuntimeError, match="free_encoders"):
            model.encode([self.prompts[0]])
        assert self.velocity(model, condition).shape == (1, *model.latent_shape)

    def test_metadata_names_family_and_size(self, model: Any) -> None:
        metadata = dict(model.metadata())
        assert all(isinstance(value, str) for value in metadata.values())
        height, width = self.size
        assert (metadata["family"], metadata["height"], metadata["width"]) == (model.family, str(height), str(width))

    def test_the_tiny_pipeline_is_a_function_of_its_seed(self, folder: Path, tmp_path: Path) -> None:
        self.module.tiny(tmp_path / "same", seed=0)
        self.module.tiny(tmp_path / "other", seed=1)
        files = sorted(f.relative_to(folder) for f in folder.rglob("*.safetensors"))
        assert files
        for file in files:
            assert (tmp_path / "same" / file).read_bytes() == (folder / file).read_bytes(), file
            assert (tmp_path / "other" / file).read_bytes() != (folder / file).read_bytes(), file
