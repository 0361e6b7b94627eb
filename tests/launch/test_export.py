"""Exports: what diffusers and peft make of them is the run's own student. All pipelines are tiny and random."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file
from torch import Tensor

from sigmazero import cli, export
from sigmazero.algorithms.base import Arm
from sigmazero.config import LoraConfig
from sigmazero.launch import export as launch
from sigmazero.launch import reload
from sigmazero.launch.export import export_run
from sigmazero.launch.local import load_model, train
from sigmazero.launch.tiny import write_tiny
from sigmazero.schedule import sigma_grid
from tests.conftest import MakeRun
from tests.launch.conftest import CLEAN, DTYPES, FAMILIES, PROMPTS, MakeExport, Trained

PROMPT = PROMPTS[0]


def arm(num_steps: int = 4, shift: float = 3.0, kind: str = "ode", eta: float = 0.0, guidance: float = 1.0) -> Arm:
    return Arm("student", "student_ema", num_steps, shift, kind, eta, guidance)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def opened(folder: Path) -> Any:
    pipeline: Any = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".writing")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 5.0])
def test_b08_the_scheduler_makes_the_grid_as_the_pipeline_calls_it(family: str, shift: float) -> None:
    for num_steps in (*range(1, 9), 28, 1000):
        made = export.scheduler(family, arm(num_steps, shift))
        again: Any = type(made).from_config(json.loads(made.to_json_string()))
        sigmas = export.pipeline_sigmas(family, again, num_steps)
        torch.testing.assert_close(sigmas, sigma_grid(num_steps, shift), rtol=0, atol=3e-7)


def test_b08_the_rule_gives_the_published_numbers() -> None:
    config = export.scheduler("sd3", arm()).config
    assert math.exp(config["base_shift"]) == pytest.approx(2.002004, abs=1e-6)
    assert (config["max_shift"], config["shift_terminal"]) == (config["base_shift"], 0.5)
    assert export.scheduler("qwen_image", arm()).config["shift_terminal"] is None


def test_transitions_and_guidance_that_diffusers_lacks_are_refused() -> None:
    assert export.scheduler("sd3", arm(kind="cps", eta=1.0)).config["stochastic_sampling"]
    assert not export.scheduler("sd3", arm(kind="sde", eta=0.0)).config["stochastic_sampling"]
    with pytest.raises(ValueError, match=r"sde with eta 0\.7 has no scheduler"):
        export.scheduler("sd3", arm(kind="sde", eta=0.7))
    with pytest.raises(ValueError, match=r"3000 steps of shift 100000\.0 have no scheduler"):
        export.scheduler("sd3", arm(3000, 1e5))
    export.check_guidance(arm(guidance=4.5), "family", "layer_norm")
    with pytest.raises(ValueError, match=r"guidance is 0\.5"):
        export.check_guidance(arm(guidance=0.5), "family", "none")
    with pytest.raises(ValueError, match="'scalar', but the pipeline of this family guides with 'none'"):
        export.check_guidance(arm(guidance=2.0), "scalar", "none")


def test_b13_alpha_scales_what_is_merged_and_wrappers_change_no_name() -> None:
    w, a, b = torch.randn(6, 10), torch.randn(8, 10), torch.randn(6, 8)
    base = {"l.base_layer.weight": w, "l.lora_A.student.weight": a, "n.weight": w, "steps": torch.ones(1).long()}
    own = {"l.lora_A.weight": a, "l.lora_B.weight": b}
    merged = export.merged_weights(base, own, 16 / 8)
    assert list(merged) == ["l.weight", "n.weight", "steps"]
    torch.testing.assert_close(merged["l.weight"], w + 2 * b @ a)
    assert torch.equal(merged["n.weight"], w)
    for before, inside in (("module.", ""), ("_orig_mod.", ""), ("", "_orig_mod."), ("", "_fsdp_wrapped_module.")):
        wrapped = [{f"{before}{inside}{name}": value for name, value in part.items()} for part in (base, own)]
        again = export.merged_weights(wrapped[0], wrapped[1], 2.0)
        assert all(torch.equal(again[name], value) for name, value in merged.items())
    with pytest.raises(ValueError, match=r"m\.lora_A\.weight belongs to no weight"):
        export.merged_weights(base, {"m.lora_A.weight": a, "m.lora_B.weight": b}, 2.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_b08_an_exported_pipeline_samples_the_students_pictures(family: str, exported: MakeExport) -> None:
    """``export_run`` itself compares a picture in a process that has no sigmazero; here the defaults of a call."""
    done = exported(family, "pipeline")
    assert done.arm.role == "student_ema"
    assert done.difference < 1e-4
    said = json.loads((done.folder / "sampler.json").read_text())
    assert (said["num_steps"], said["guidance"], said["form"]) == (4, 1.0, "pipeline")
    pipeline = opened(done.folder)

    def sample(**options: Any) -> Tensor:
        call = {"num_inference_steps": 4, "height": 32, "width": 32, "output_type": "pt", **options}
        torch.manual_seed(0)
        return pipeline(prompt=PROMPT, generator=torch.Generator().manual_seed(0), **call).images

    plain = {"guidance_scale": 1.0} if family == "sd3" else {}  # the only one whose call guides by itself
    picture = sample(**plain)
    torch.testing.assert_close(pipeline.scheduler.sigmas, torch.tensor([1, 0.9, 0.75, 0.5, 0]), rtol=0, atol=3e-7)
    assert torch.equal(picture, sample(**said["call"]))
    assert pipeline.scheduler.config.stochastic_sampling == (family == "sd3")
    pipeline.transformer.load_state_dict(weights_of(done.folder.parent / "base"))
    assert (sample(**plain) - picture).abs().max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_b08_a_four_step_student_loads_where_sigmazero_cannot_be_imported(
    family: str, exported: MakeExport, shelf: Path
) -> None:
    """The process had diffusers alone (``conftest.CLEAN_PYTHON``), and drew the in-memory student's picture."""
    done = exported(family, "pipeline")
    assert done.arm.num_steps == 4
    assert str(done.folder) in (shelf / CLEAN).read_text().splitlines()
    assert done.difference < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_b13_b27_diffusers_and_peft_bind_the_whole_lora(family: str, exported: MakeExport) -> None:
    """And it is, with alpha twice its rank, what was merged into the pipeline."""
    lora, pipeline = exported(family, "lora"), exported(family, "pipeline")
    assert lora.difference < 1e-4
    assert lora.bound == len(load_file(lora.folder / export.LORA_FILE)) > 0
    base = opened(lora.folder.parent / "base").transformer.to(getattr(torch, DTYPES.get(family, "float32"))).float()
    adapted: Any = peft.PeftModel.from_pretrained(base, str(lora.folder / "peft"))
    assert adapted.peft_config["default"].lora_alpha == 8.0
    merged, expected = adapted.merge_and_unload().state_dict(), weights_of(pipeline.folder)
    assert set(merged) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-5)


def test_weights_alone_are_the_pipelines_transformer(exported: MakeExport) -> None:
    weights, pipeline = exported("flux2", "weights"), exported("flux2", "pipeline")
    assert weights.difference < 1e-4
    assert {path.name for path in weights.folder.iterdir()} == {"transformer", "scheduler", "sampler.json"}
    whole = weights_of(pipeline.folder)
    assert all(torch.equal(whole[name], value) for name, value in weights_of(weights.folder).items())


def test_the_average_is_exported_unless_another_role_is_named(
    trained: Trained, exported: MakeExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_compare", lambda *_: (0.0, 0))
    done = export_run(trained("sd3"), tmp_path / "raw", role="student", form="lora")
    assert done.arm.role == "student"
    raw, average = (load_file(f / export.LORA_FILE) for f in (done.folder, exported("sd3", "lora").folder))
    assert set(raw) == set(average)
    assert any(not torch.equal(raw[name], average[name]) for name in raw)


def test_b13_a_file_that_lost_its_alpha_is_an_error(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = export.write_lora
    monkeypatch.setattr(export, "write_lora", lambda f, own, settings, b: write(f, own, LoraConfig(rank=4, alpha=4), b))
    with pytest.raises(ValueError, match=r"out was written, but do not use it: its picture differs"):
        export_run(trained("sd3"), tmp_path / "out", form="lora")
    assert (tmp_path / "out" / export.LORA_FILE).is_file()


def test_b27_tensors_that_do_not_bind_are_counted(exported: MakeExport, tmp_path: Path) -> None:
    good = exported("qwen_image", "lora")
    tensors = load_file(good.folder / export.LORA_FILE)
    own = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    first = next(iter(own))
    own[first.replace("transformer_blocks.0.", "transformer_blocks.9.")] = own.pop(first)
    export.write_lora(tmp_path, own, LoraConfig(rank=4, alpha=8), "base")
    counts = reload._load_lora(opened(good.folder.parent / "base"), tmp_path)
    assert counts == {"exported": len(tensors), "bound": len(tensors) - 1}


def test_another_base_than_the_one_trained_on_is_refused(trained: Trained, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained("sd3"), tmp_path / "run"))
    write_tiny("sd3", tmp_path / "other", seed=1)
    described = json.loads((run / "run.json").read_text())
    described["config"]["model"]["path"] = str(tmp_path / "other")
    (run / "run.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"other content of model\.path"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert left_behind(tmp_path) == []


def test_mistakes_are_refused_and_write_nothing(trained: Trained, tmp_path: Path) -> None:
    run, out = trained("sd3"), tmp_path / "out"
    with pytest.raises(ValueError, match="--as is 'zip'; it is one of pipeline, lora, weights"):
        export_run(run, out, form="zip")
    with pytest.raises(ValueError, match="teacher is the base that the run started from"):
        export_run(run, out, role="teacher")
    with pytest.raises(ValueError, match="role 'fake_score' cannot be sampled"):
        export_run(run, out, role="fake_score")
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    (out / "mine.txt").write_text("notes")
    with pytest.raises(ValueError, match=r"--to: .*out holds something already"):
        export_run(run, out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_glyph_weights_are_a_model_path(
    dmd2: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, on full copies; what a killed export left aside is replaced."""
    run, out = train(dmd2()), tmp_path / "out"
    for form in ("pipeline", "lora"):
        with pytest.raises(ValueError, match=f"--as {form}: glyph has no diffusers pipeline; use --as weights"):
            export_run(run, out, form=form)
    (tmp_path / ".out.writing").mkdir()
    (tmp_path / ".out.writing" / "half").write_text("")
    monkeypatch.setattr(sys, "argv", ["sigmazero", "export", str(run), "--to", str(out), "--as", "weights"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(f"finished: weights in {out}, for 3 steps")
    assert sorted(path.name for path in out.iterdir()) == ["glyph.safetensors", "sampler.json"]
    assert left_behind(tmp_path) == []
    model = load_model(dmd2({"model.path": str(out / "glyph.safetensors")}))
    checkpoint = load_file(next((run / "checkpoints" / "cycle-00000004").glob("*.safetensors")))
    average = {
        name.removeprefix("roles/student_ema/"): value for name, value in checkpoint.items() if "student_ema" in name
    }
    assert average
    assert all(torch.equal(model.net.state_dict()[name], value) for name, value in average.items())
