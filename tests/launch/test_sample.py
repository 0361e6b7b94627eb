"""Sampling runs, exports and bases of tiny random pipelines: the right pictures, whatever else is sampled with them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import save_file

from sigmazero import cli, export, seeds
from sigmazero.algorithms.base import Arm
from sigmazero.launch.tiny import write_tiny
from sigmazero.models import PIPELINES, flux2, qwen_image, sd3
from sigmazero.schedule import sigma_grid
from tests.launch.conftest import FAMILIES, PROMPTS, MakeExport, Trained

SMALL = ("--height", "32", "--width", "32")
BASE = ("--steps", "2", "--guidance", "2", *SMALL)
LONG = "a sign that says OPEN, under two old lamps"

Sample = Callable[..., Path]


@pytest.fixture
def err() -> list[str]:
    """What the last call of ``sample`` wrote on stderr."""
    return [""]


@pytest.fixture
def sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], err: list[str]
) -> Sample:
    """``sample(folder, "--steps", 4)`` by the command: the folder of the pictures."""
    monkeypatch.chdir(tmp_path)
    number = iter(range(100))

    def run(source: object, *options: object) -> Path:
        folder = tmp_path / f"out-{next(number)}"
        arguments = ["sigmazero", "sample", str(source), *map(str, options), "--output", str(folder)]
        monkeypatch.setattr(sys, "argv", arguments)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        err[0] = capsys.readouterr().err
        assert not stop.value.code, err[0]
        return folder

    return run


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """The one line that a call ends with; nothing is written."""
    monkeypatch.chdir(tmp_path)

    def run(source: object, *options: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["sigmazero", "sample", str(source), *map(str, options)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        shown = capsys.readouterr()
        assert stop.value.code == 2
        lines = [line for line in shown.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, shown.err
        assert "Traceback" not in shown.err
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return run


def prompts_of(texts: Iterable[str]) -> list[str]:
    return [word for text in texts for word in ("--prompt", text)]


def info(png: Path) -> dict[str, Any]:
    with Image.open(png) as image:
        return json.loads(str(image.info["sigmazero"]))


def pixels(png: Path) -> np.ndarray:
    with Image.open(png) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def drawn(folder: Path) -> dict[tuple[str, int], bytes]:
    """The pictures of a folder by prompt and seed."""
    found = {(info(p)["prompt"], info(p)["seed"]): pixels(p).tobytes() for p in sorted(folder.glob("0*.png"))}
    assert len(found) == len(list(folder.glob("0*.png")))
    return found


def same(one: Path, other: Path, levels: int = 0) -> bool:
    """Whether two folders hold pictures of the same prompts and seeds, up to some of 255 levels."""
    names = [[p.name for p in sorted(folder.glob("0*.png"))] for folder in (one, other)]
    assert names[0] == names[1] != []
    return all(abs(pixels(one / name) - pixels(other / name)).max() <= levels for name in names[0])


def base_of(trained: Trained, family: str) -> Path:
    return trained(family).parent / "base"


def test_a_base_is_sampled_as_its_own_pipeline_samples_it(trained: Trained, sample: Sample) -> None:
    """SD3 at its static shift, applied once: diffusers' pipeline on the same grid, from the noise of the seed."""
    base = base_of(trained, "sd3")
    out = sample(base, "--prompt", PROMPTS[0], "--steps", 4, "--guidance", 4, "--seed", 7, *SMALL)
    pipeline: Any = DiffusionPipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = export.scheduler("sd3", Arm("base", "base", 4, 3.0))
    picture = pipeline(
        PROMPTS[0], num_inference_steps=4, guidance_scale=4.0, height=32, width=32, output_type="pt",
        latents=seeds.normal(7, "initial_noise", [0], (16, 4, 4)),
    ).images[0]  # fmt: skip
    expected = (picture.clamp(0, 1) * 255).permute(1, 2, 0).numpy()
    assert abs(pixels(out / "00000.png") - expected).max() < 1


def test_a_picture_says_how_it_was_made(trained: Trained, sample: Sample) -> None:
    base = base_of(trained, "sd3")
    out = sample(base, "--prompt", LONG, "--sigmas", "1,.9,.75,.5", "--guidance", "1", "--seed", 3, *SMALL)
    assert info(out / "00000.png") == {
        "source": "base", "kind": "base", "version": metadata.version("sigmazero"), "prompt": LONG, "seed": 3,
        "role": "base", "steps": 4, "sigmas": pytest.approx([1, 0.9, 0.75, 0.5, 0]), "shift": None, "guidance": 1.0,
        "transition": "ode", "eta": 0.0,
    }  # fmt: skip
    run = info(sample(trained("sd3"), "--prompt", LONG) / "00000.png")
    assert (run["source"], run["kind"], run["cycle"], run["role"]) == ("run", "run", 2, "student_ema")
    assert (run["steps"], run["shift"], run["transition"], run["eta"]) == (4, 3.0, "cps", 1.0)


def test_the_grid_is_the_given_one(trained: Trained, sample: Sample) -> None:
    """Steps and a shift are the sigmas that they stand for; without a shift it is the pipeline's own, here 3."""
    base, rest = base_of(trained, "sd3"), ("--prompt", PROMPTS[0], "--guidance", 1, *SMALL)
    by_shift, by_default = sample(base, "--steps", 4, "--shift", 3, *rest), sample(base, "--steps", 4, *rest)
    by_hand = sample(base, "--sigmas", "1,.9,.75,.5", *rest)
    assert same(by_shift, by_default)
    assert same(by_shift, by_hand)
    assert info(by_hand / "00000.png")["sigmas"] == sigma_grid(4, 3.0).tolist()
    assert not same(by_shift, sample(base, "--steps", 4, "--shift", 1, *rest), 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_b09_a_picture_has_the_same_bits_whatever_is_sampled_with_it(
    family: str, trained: Trained, sample: Sample
) -> None:
    """Prompts of unlike lengths, guided: other prompts, their order, the count and the batch size change nothing."""
    base, texts = base_of(trained, family), ["a", LONG]
    whole = drawn(sample(base, *prompts_of(texts), "--count", 2, "--seed", 5, *BASE))
    assert len(set(whole.values())) == 4
    again = drawn(sample(base, *prompts_of(reversed(texts)), "--seed", 5, "--batch-size", 1, *BASE))
    assert again == {key: picture for key, picture in whole.items() if key[1] == 5}
    assert len(again) == 2
    alone = drawn(sample(base, "--prompt", LONG, "--seed", 6, *BASE))
    assert alone == {(LONG, 6): whole[LONG, 6]}


def test_the_sheet_has_a_row_for_each_prompt(trained: Trained, sample: Sample) -> None:
    out = sample(base_of(trained, "sd3"), *prompts_of(["a", LONG]), "--count", 3, *BASE)
    sheet = pixels(out / "sheet.png")
    assert sheet.shape == (2 * 256 + 4, 3 * 256 + 2 * 4, 3)
    for i in range(6):
        top, left = (i // 3) * 260, (i % 3) * 260
        tile = sheet[top : top + 256, left : left + 256]
        assert (tile[::8, ::8] == pixels(out / f"{i:05d}.png")).all()


def test_prompts_of_a_file(trained: Trained, sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    base = base_of(trained, "sd3")
    assert same(sample(base, "--prompts", "prompts.jsonl", *BASE), sample(base, *prompts_of(PROMPTS), *BASE))


@pytest.mark.parametrize("family", FAMILIES)
def test_b08_an_export_is_sampled_by_its_contract(
    family: str, trained: Trained, written: MakeExport, sample: Sample, err: list[str]
) -> None:
    """Nothing but the folder is given. Adapters give the run's bits; merged ones differ by rounding, and where the base
    is in half precision by that of its other layers, which the pipeline's fp32 does not have."""
    options = (*prompts_of(PROMPTS), "--count", 2)
    run = sample(trained(family), *options)
    ours = {name: value for name, value in info(run / "00000.png").items() if name not in ("source", "kind")}
    for form, levels in (("lora", 0), ("pipeline", 1 if family != "qwen_image" else 24)):
        out = sample(written(family, form).folder, *options)
        assert "warning" not in err[0]
        assert same(run, out, levels)
        its = info(out / "00000.png")
        assert (its.pop("source"), its.pop("kind"), its.pop("run")) == (form, "export", "run")
        assert its == ours
    assert not same(sample(base_of(trained, family), *options, "--steps", 4, "--guidance", 1, *SMALL), run, 24)


def test_b08_a_merged_export_over_half_precision_is_that_of_its_weights(written: MakeExport, sample: Sample) -> None:
    """Qwen-Image's: as diffusers samples it from the same noise, in fp32."""
    folder = written("qwen_image", "pipeline").folder
    out = sample(folder, "--prompt", PROMPTS[0], "--seed", 2)
    pipeline: Any = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    call = json.loads((folder / "sampler.json").read_text())["call"]
    noise = seeds.normal(2, "initial_noise", [0], (4, 64))
    expected = pipeline(PROMPTS[0], latents=noise, output_type="pt", **call).images[0].clamp(0, 1) * 255
    assert abs(pixels(out / "00000.png") - expected.float().permute(1, 2, 0).numpy()).max() < 1


def test_exported_weights_go_into_their_base_wherever_it_is(
    trained: Trained, written: MakeExport, sample: Sample, refused: Callable[..., str], tmp_path: Path
) -> None:
    run = sample(trained("flux2"), "--prompt", PROMPTS[0])
    out = written("flux2", "weights").folder
    assert same(run, sample(out, "--prompt", PROMPTS[0]), 1)
    moved = Path(shutil.copytree(out, tmp_path / "moved"))
    said = json.loads((moved / "sampler.json").read_text())
    said["base"] = "/nowhere/base"
    (moved / "sampler.json").write_text(json.dumps(said))
    assert "there is no folder /nowhere/base" in (line := refused(moved, "--prompt", "a"))
    assert "--base" in line
    assert same(run, sample(moved, "--prompt", PROMPTS[0], "--base", base_of(trained, "flux2")), 1)
    del said["base"]
    (moved / "sampler.json").write_text(json.dumps(said))
    assert "does not say which base it belongs to; name" in refused(moved, "--prompt", "a")


def test_adapters_over_another_base_are_refused(
    written: MakeExport, refused: Callable[..., str], tmp_path: Path
) -> None:
    write_tiny("sd3", tmp_path / "other", seed=1)
    line = refused(written("sd3", "lora").folder, "--prompt", "a", "--base", tmp_path / "other")
    assert "was trained over another base than this one" in line


def test_b08_what_the_contract_does_not_say_is_warned_of(
    written: MakeExport, trained: Trained, sample: Sample, err: list[str]
) -> None:
    """Other steps, shift, guidance or size are sampled, each asked for by name; the contract's own are silent."""
    folder, prompt = written("sd3", "pipeline").folder, ("--prompt", PROMPTS[0])
    plain = sample(folder, *prompt)
    assert same(plain, sample(folder, *prompt, "--steps", 4, "--shift", 3, "--guidance", 1, *SMALL))
    assert "warning" not in err[0]
    out = sample(folder, *prompt, "--steps", 2, "--guidance", 2.5, "--width", 64)
    assert [line for line in err[0].splitlines() if "warning" in line] == [
        f"warning: {folder} was made for the sigmas 1, 0.9, 0.75, 0.5, 0, and is asked for 1, 0.75, 0",
        f"warning: {folder} was made for guidance 1.0, and is asked for 2.5",
        f"warning: {folder} was made for width 32, and is asked for 64",
    ]
    assert pixels(out / "00000.png").shape == (32, 64, 3)
    assert info(out / "00000.png")["sigmas"] == [1, 0.75, 0]
    sample(trained("sd3"), *prompt, "--shift", 1)
    assert "was made for the sigmas 1, 0.9, 0.75, 0.5, 0, and is asked for 1, 0.75, 0.5, 0.25, 0" in err[0]
    sample(trained("sd3"), *prompt, "--role", "teacher", "--shift", 1)  # the base is bound to no grid
    assert "warning" not in err[0]


def test_flux2_dev_is_guided_by_what_its_network_reads(sample: Sample, tmp_path: Path) -> None:
    flux2.tiny_dev(tmp_path / "dev")
    rest = ("--prompt", PROMPTS[0], "--steps", 2, *SMALL)
    two, four = (sample("dev", "--guidance", scale, *rest) for scale in (2, 4))
    assert not same(two, four)
    assert [info(f / "00000.png")["embedded_guidance"] for f in (two, four)] == [2, 4]
    assert info(four / "00000.png")["guidance"] == 1  # one call of the network a step


def test_half_precision_is_asked_for(written: MakeExport, sample: Sample) -> None:
    folder, prompt = written("sd3", "pipeline").folder, ("--prompt", PROMPTS[0])
    exact, half = sample(folder, *prompt), sample(folder, *prompt, "--dtype", "bfloat16")
    assert not same(exact, half)
    assert same(exact, half, 32)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "there is no prompt: say what the picture should show with --prompt"),
        (("--prompt", "a", "--role", "student"), "--role does nothing here: an export is one role"),
        (("--prompt", "a", "--base", "x"), "--base does nothing here: this export is a whole pipeline"),
        (("--prompt", "a", "--sigmas", "1,.5", "--steps", 2), "so --steps and --shift would do nothing"),
        (("--prompt", "a", "--sigmas", "1,.5,.7"), "--sigmas: a schedule is strictly descending"),
        (("--prompt", "a", "--sigmas", "1,,2"), "--sigmas is '1,,2'; write numbers with commas"),
        (("--prompt", "a", "--height", 40), "--height is 40"),
        (("--prompt", "a", "--dtype", "float8"), "--dtype is 'float8'; it is float32 or bfloat16"),
        (("--prompt", "a", "--prompts", "b"), "--prompt and --prompts are both given"),
        (("--prompts", "nowhere.txt"), "--prompts: there is no prompt file nowhere.txt; give 'shipped'"),
    ],
)
def test_b15_options_that_cannot_be_are_refused(
    options: tuple[str, ...], complaint: str, written: MakeExport, refused: Callable[..., str]
) -> None:
    assert complaint in refused(written("sd3", "pipeline").folder, *options)


def test_b15_options_of_another_source_are_refused(
    trained: Trained, written: MakeExport, refused: Callable[..., str]
) -> None:
    prompt = ("--prompt", "a")
    assert "--dtype does nothing here: a run" in refused(trained("sd3"), *prompt, "--dtype", "float32")
    assert "--dtype does nothing here: adapters" in refused(
        written("sd3", "lora").folder, *prompt, "--dtype", "bfloat16"
    )
    base = base_of(trained, "sd3")
    assert "--role does nothing here: a base" in refused(base, *prompt, "--role", "teacher")
    assert "is a base model, which does not say how it is sampled: give --steps" in refused(base, *prompt)
    assert "runs/none is not here, so it is taken for the hub id" in refused("runs/none", *prompt)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sigmas": [1.0, 0.5]}, "sampler.json: sigmas: a schedule lies within [0, 1] and ends in exactly 0"),
        ({"guidance": "two"}, "sampler.json: guidance: Input should be a valid number"),
        ({"family": "sd4"}, "sampler.json: family: Input should be 'glyph', 'sd3', 'flux2' or 'qwen_image'"),
    ],
)
def test_a_broken_contract_is_refused(
    change: dict[str, Any], complaint: str, written: MakeExport, refused: Callable[..., str], tmp_path: Path
) -> None:
    said = json.loads((written("sd3", "pipeline").folder / "sampler.json").read_text())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sampler.json").write_text(json.dumps({**said, **change}))
    assert complaint in refused(tmp_path / "out", "--prompt", "a")


def test_what_is_nothing_is_told_what_was_looked_for(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    line = refused(tmp_path / "empty", "--prompt", "a")
    for name in ("run.json", "sampler.json", "model_index.json", "hub id"):
        assert name in line
    assert "is a FluxPipeline, and what is sampled here is a StableDiffusion3Pipeline" in refused(
        tmp_path / "other", "--prompt", "a", *BASE
    )
    assert "wanted 'glyph'" in refused(tmp_path / "x.safetensors", "--steps", 2, "--guidance", 1)


def test_the_pipelines_are_those_that_the_families_read() -> None:
    read = {sd3.PIPELINE: "sd3", **dict.fromkeys(flux2.VARIANTS, "flux2"), qwen_image.PIPELINE: "qwen_image"}
    assert read == PIPELINES
