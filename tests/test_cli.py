"""The commands as a user types them: what they print, leave, refuse, and with which exit code."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file

from sigmazero import cli
from sigmazero.config import RunConfig, load_recipe
from sigmazero.launch import local
from sigmazero.launch.judge import Judge
from sigmazero.metrics import read_metrics
from sigmazero.models import glyph
from sigmazero.training.folder import RunFolder
from tests.conftest import MakeRun

ROOT = Path(__file__).parents[1]
COMMANDS: dict[str, set[str]] = {
    "train": set(),
    "show": set(),
    "probe": {"--json"},
    "tiny": {"--seed"},
    "export": {"--to", "--role", "--as"},
    "evaluate": set(),
    "compare": {"--sheet"},
    "sample": {
        *("--prompt", "--prompts", "--count", "--seed", "--steps", "--num-steps", "--shift", "--sigmas", "--guidance"),
        *("--role", "--height", "--width", "--dtype", "--base", "--batch-size", "--output"),
    },
}


@dataclass
class Done:
    """What a command left on the screen."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.out.strip().splitlines()[-1]


Call = Callable[..., Done]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """``call("train", recipe, "seed=1")`` in this process."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["sigmazero", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code or 0
        shown = capsys.readouterr()
        return Done(int(code), shown.out, shown.err)

    return run


def write_recipe(path: Path, config: RunConfig) -> Path:
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


@pytest.fixture
def recipe(dmd2: MakeRun, tmp_path: Path) -> Path:
    """The tiny distillation of ``dmd2`` as a file; its output is ``tmp_path / "run"``."""
    return write_recipe(tmp_path / "tiny.yaml", dmd2())


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture
def finished(shelf: Path, call: Call, dmd2: MakeRun) -> Path:
    """A finished run, trained once by the command; tests that change it take a copy."""
    folder = shelf / "run"
    if not folder.exists():
        done = call("train", write_recipe(shelf / "tiny.yaml", dmd2({"output": str(folder)})))
        assert done.code == 0, done.err
        (shelf / "out.txt").write_text(done.out)
        (shelf / "err.txt").write_text(done.err)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def assert_refused(done: Done, *parts: str) -> None:
    """Exit code 2 and one line on stderr, which says all of ``parts``."""
    assert done.code == 2
    assert "Traceback" not in done.err + done.out
    assert len(done.err.strip().splitlines()) == 1, done.err
    assert done.err.startswith("error: ")
    for part in parts:
        assert part in done.err
    assert "finished" not in done.out


def settings_of(png: Path) -> dict[str, Any]:
    with Image.open(png) as image:
        return json.loads(str(image.info["sigmazero"]))


def pixels(png: Path) -> np.ndarray:
    with Image.open(png) as image:
        return np.asarray(image.convert("RGB"))


def test_train_ends_with_one_line_that_names_the_report(finished: Path, shelf: Path) -> None:
    out = (shelf / "out.txt").read_text().strip().splitlines()
    assert out[-1] == f"finished: report in {finished / 'report.html'}, scores in {finished / 'scores.json'}"
    assert "<html" in (finished / "report.html").read_text().lower()
    assert [line.split()[0] for line in out[-6:-1]] == ["real", "teacher@4", "teacher@3", "student@3", "student_raw@3"]
    assert "training 4/4" in (shelf / "err.txt").read_text()
    assert [row["cycle"] for row in read_metrics(finished / "metrics.jsonl")] == [1, 2, 3, 4]
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == ["cycle-00000002", "cycle-00000004"]
    assert json.loads((finished / "run.json").read_text())["finished"] is True


def test_a_finished_run_is_refused_and_run_again_with_overwrite(copied: Path, recipe: Path, call: Call) -> None:
    before = {p: p.read_bytes() for p in copied.rglob("*") if p.is_file()}
    assert_refused(call("train", recipe), str(copied), "finished", "overwrite=true")
    assert {p: p.read_bytes() for p in copied.rglob("*") if p.is_file()} == before
    scores = (copied / "scores.json").read_text()
    (copied / "scores.json").write_text("{}")
    (copied / "mine.txt").write_text("notes")
    (copied / "evaluation" / "history").mkdir(exist_ok=True)
    (copied / "evaluation" / "history" / "99.png").write_text("of the run before")
    done = call("train", recipe, "overwrite=true")
    assert (done.code, done.last.split(":")[0]) == (0, "finished"), done.err
    assert (copied / "scores.json").read_text() == scores
    assert (copied / "mine.txt").read_text() == "notes"
    assert not (copied / "evaluation" / "history" / "99.png").exists()


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("algorithm.guidance=3.5", "algorithm.guidance was 2.0, is 3.5"),
        ("optimizers.student.clip=0.5", "optimizers.student.clip was 1.0, is 0.5"),
        ("seed=1", "seed was 0, is 1"),
        ("roles.storage=lora", "roles.storage was 'copy', is 'lora'"),
        ("training.device=cpu", "training.device was 'auto', is 'cpu'"),
    ],
)
def test_b52_other_settings_on_an_unfinished_run_are_refused_by_key(
    override: str, difference: str, recipe: Path, call: Call, tmp_path: Path
) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.open(load_recipe(recipe))
    assert_refused(call("train", recipe, override), difference, "overwrite=true")


def test_the_same_settings_go_on_with_an_unfinished_run(
    recipe: Path, call: Call, tmp_path: Path, finished: Path
) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.open(load_recipe(recipe))
    assert call("train", recipe, "training.log_every=2").code == 0
    assert (tmp_path / "run" / "scores.json").read_text() == (finished / "scores.json").read_text()


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("algorithm.num_stepz=4", ("'algorithm.num_stepz'", "did you mean 'algorithm.num_steps'")),
        ("num-cycles=4", ("'num-cycles'", "did you mean 'num_cycles'")),
        ("learning_rate=1e-4", ("'learning_rate'",)),
        ("data.batch_size=0", ("data.batch_size is 0",)),
        ("seed", ("key=value",)),
        ("model.path=nowhere.safetensors", ("model.path", "nowhere.safetensors")),
        ("model.path=pyproject.toml", ("model.path", "pyproject.toml")),
        ("data.prompts=nowhere.txt", ("data.prompts", "nowhere.txt")),
        ("algorithm.step_strategy=os:system", ("os:system", "plugins")),
        ("roles={storage: lora, lora: {targets: [to_x]}}", ("roles.lora.targets", "'to_x'")),
    ],
)
@pytest.mark.parametrize("command", ["train", "show"])
def test_b15_a_setting_that_cannot_be_is_one_line(
    command: str, override: str, parts: tuple[str, ...], recipe: Path, call: Call
) -> None:
    assert_refused(call(command, recipe, override), *parts)


@pytest.mark.parametrize("strategy", ["os:system", "subprocess:Popen", "builtins:eval"])
def test_b50_a_callable_of_python_is_refused_even_if_the_recipe_lists_it(
    strategy: str, recipe: Path, call: Call
) -> None:
    done = call("train", recipe, f"plugins=['{strategy}']", f"algorithm.step_strategy='{strategy}'")
    assert_refused(done, strategy.split(":")[0], "part of Python itself")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("num_cycles: [1\n", ("not plain YAML",)),
        ("a: 1\n\tb: 2\n", ("not plain YAML",)),
        ("x: !!python/object/apply:os.system ['touch marker']\n", ("not plain YAML",)),
        ("seed: 1\nseed: 2\n", ("not plain YAML",)),
        ("- 1\n", ("must be a mapping",)),
        ("", ("must be a mapping",)),
        ("algorithm: {name: dmd3}\n", ("algorithm.name is 'dmd3'", "dmd2, dpo, flow_grpo, flow_matching, nft")),
    ],
)
def test_b15_b50_a_bad_recipe_is_one_line(
    text: str, parts: tuple[str, ...], tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    assert_refused(call("train", "bad.yaml"), *parts)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.yaml"]


def test_a_recipe_that_is_missing_or_a_folder_is_one_line(tmp_path: Path, call: Call) -> None:
    assert_refused(call("train", tmp_path / "no.yaml"), "no.yaml")
    assert_refused(call("show", tmp_path), str(tmp_path))


@pytest.mark.parametrize("harm", ["file", "below a file", "foreign files"])
def test_an_output_that_is_taken_is_one_line_and_stays_as_it_is(
    harm: str, recipe: Path, call: Call, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    if harm == "foreign files":
        taken.mkdir()
        (taken / "thesis.txt").write_text("mine")
    else:
        taken.write_text("mine")
    output = taken / "run" if harm == "below a file" else taken
    for overwrite in ("false", "true"):
        assert_refused(call("train", recipe, f"output={output}", f"overwrite={overwrite}"), str(taken))
    mine = taken / "thesis.txt" if harm == "foreign files" else taken
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("command", ["evaluate", "sample"])
def test_a_folder_without_a_run_or_a_checkpoint_is_one_line(
    command: str, recipe: Path, call: Call, tmp_path: Path
) -> None:
    assert_refused(call(command, tmp_path / "nowhere"), "is not a run folder")
    assert not (tmp_path / "nowhere").exists()
    with RunFolder(tmp_path / "run") as folder:
        folder.open(load_recipe(recipe))
    assert_refused(call(command, tmp_path / "run"), "has no checkpoint")


def shown_roles(out: str) -> dict[str, list[str]]:
    """The rows of ``show``'s table by role."""
    lines = out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("role "))
    return {row.split()[0]: row.split()[1:] for row in lines[header + 1 : lines.index("", header)]}


def shown_phases(out: str) -> dict[str, list[float]]:
    """What stays, what is its own and the peak of each phase in ``show``'s table, in MiB."""
    lines = out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("phase "))
    rows = lines[header + 1 : lines.index("", header)]
    return {row[:20].strip(): [float(size.replace(",", "")) for size in row.split()[-3:]] for row in rows}


def test_show_prints_settings_roles_and_memory_of_copies(
    recipe: Path, call: Call, weights: Path, tmp_path: Path
) -> None:
    """Sizes against the weight file: student and fake score train all of it, each with a gradient and two moments."""
    done = call("show", recipe, "algorithm.guidance=1.25")
    assert done.code == 0
    settings = json.loads(done.out[: done.out.index("\n}\n") + 3])
    assert settings == json.loads(load_recipe(recipe, ["algorithm.guidance=1.25"]).model_dump_json())
    net = glyph.load(weights).net
    size = sum(p.numel() for p in net.parameters())
    rows = shown_roles(done.out)
    count, nothing = f"{size:,}", "0"
    assert {role: row[:4] for role, row in rows.items()} == {
        "student": ["train", "copy", count, count],
        "teacher": ["frozen", "base", nothing, nothing],
        "fake_score": ["train", "copy", count, count],
        "student_ema": ["average", "copy", count, nothing],
    }
    mib = 4 * size / 2**20
    sizes = {role: [float(size) for size in row[4:]] for role, row in rows.items()}  # weights, gradients, moments
    assert sizes["student"] == sizes["fake_score"] == pytest.approx([mib, mib, 2 * mib], abs=0.051)
    assert sizes["student_ema"] == pytest.approx([mib, 0, 0], abs=0.051)
    assert sizes["teacher"] == [0, 0, 0]
    phases = shown_phases(done.out)
    assert {"evaluation", "rollout", "student", "student step", "fake_score"} <= phases.keys()
    assert f"measuring phases {len(phases)}/{len(phases)}" in done.err
    for stays, own, peak in phases.values():
        assert stays == pytest.approx(8 * mib, abs=0.11)  # base, three copies, two pairs of moments
        assert peak == pytest.approx(stays + own, abs=0.11)
    assert phases["student step"][1] >= mib - 0.051  # its gradients
    largest = max(phases, key=lambda name: phases[name][2])
    need = f"needs about {phases[largest][2]} MiB at its peak (phase {largest}), this machine has "
    assert done.out.splitlines()[-1].startswith(need)
    assert not (tmp_path / "run").exists()


def test_show_counts_the_trained_parameters_of_adapters(recipe: Path, call: Call, weights: Path) -> None:
    """rank * (in + out) of every linear layer that is covered, from the shapes in the weight file."""
    rank = 3
    rows = shown_roles(call("show", recipe, "roles={storage: lora, lora: {rank: 3}}").out)
    layers = tuple(f".{target}.weight" for target in glyph.GlyphModel.lora_targets)
    covered = [v.shape for name, v in load_file(weights).items() if v.ndim == 2 and name.endswith(layers)]
    own = sum(rank * (rows + columns) for rows, columns in covered)
    trained = {role: int(row[3].replace(",", "")) for role, row in rows.items()}
    assert trained == {"student": own, "teacher": 0, "fake_score": own, "student_ema": 0}
    assert sum(trained.values()) == 2 * own > 1000
    assert rows["student_ema"][:3] == ["average", "lora", f"{own:,}"]


def test_sample_writes_pictures_with_their_settings(finished: Path, call: Call, tmp_path: Path) -> None:
    """Two prompts, three seeds each; a picture is the same alone and among others."""
    prompts = ["the number 42 in red", "the number 07"]
    many = [f"--prompt={p}" for p in prompts]
    done = call("sample", finished, *many, "--count=3", "--seed=5", f"--output={tmp_path / 'six'}")
    assert (done.code, done.last) == (
        0,
        f"finished: 6 pictures in {tmp_path / 'six'}, all of them on {tmp_path / 'six' / 'sheet.png'}",
    )
    names = [f"{i:05d}.png" for i in range(6)]
    assert sorted(p.name for p in (tmp_path / "six").iterdir()) == [*names, "sheet.png"]
    found = [settings_of(tmp_path / "six" / name) for name in names]
    assert [(s["prompt"], s["seed"]) for s in found] == [(p, seed) for p in prompts for seed in (5, 6, 7)]
    assert all((s["cycle"], s["role"], s["steps"], s["source"]) == (4, "student_ema", 3, "run") for s in found)
    assert all(s["sigmas"][0] == 1 and s["sigmas"][-1] == 0 and len(s["sigmas"]) == 4 for s in found)
    pictures = [pixels(tmp_path / "six" / name) for name in names]
    assert {p.shape for p in pictures} == {(16, 16, 3)}
    assert len({p.tobytes() for p in pictures}) == 6
    for i, settings in enumerate(found):
        alone = tmp_path / f"one-{i}"
        assert (
            call("sample", finished, "--prompt", settings["prompt"], "--seed", settings["seed"], "--output", alone).code
            == 0
        )
        assert (pixels(alone / "00000.png") == pictures[i]).all()
        assert settings_of(alone / "00000.png") == settings


def test_sample_takes_role_steps_and_guidance(finished: Path, call: Call, tmp_path: Path) -> None:
    prompt = ("--prompt", "the number 42")
    pictures: list[bytes] = []
    for i, (options, wanted) in enumerate(
        (
            ((), ("student_ema", 3, 1.0)),
            (("--role", "student"), ("student", 3, 1.0)),
            (("--role", "teacher"), ("teacher", 4, 2.0)),
            (("--role", "teacher", "--num-steps", "2", "--guidance", "1.5"), ("teacher", 2, 1.5)),
        )
    ):
        out = tmp_path / str(i)
        assert call("sample", finished, *prompt, *options, "--output", out).code == 0
        said = settings_of(out / "00000.png")
        assert (said["role"], said["steps"], said["guidance"]) == wanted
        pictures.append(pixels(out / "00000.png").tobytes())
    assert len(set(pictures)) == 4


def test_sample_without_options_writes_into_the_run(copied: Path, call: Call) -> None:
    """Each call into a folder of its own; a named folder that holds files is left alone."""
    for number in ("0000", "0001"):
        done = call("sample", copied)
        folder = copied / "samples" / number
        files = sorted(p.name for p in folder.iterdir())
        assert files[-1] == "sheet.png"
        assert all(glyph.parse_caption(settings_of(folder / name)["prompt"]) for name in files[:-1])
        assert done.code == 0
    done = call("sample", copied, "--output", copied / "samples" / "0000")
    assert done.code == 2
    assert "holds files already" in done.err


def test_evaluate_keeps_the_former_scores_until_it_has_new_ones(
    copied: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (copied / "scores.json").read_text()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "score_moving", full)
        assert call("evaluate", copied).code == 2
    assert (copied / "scores.json").read_text() == before


def test_a_damaged_copy_of_frozen_pictures_is_sampled_again(copied: Path, call: Call, recipe: Path) -> None:
    """It is a cache: an unfinished run with a broken one goes on to the same scores."""
    before = json.loads((copied / "scores.json").read_text())["arms"]
    (copied / "evaluation" / "teacher@4.safetensors").write_bytes(b"broken")
    description = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps({**description, "finished": False}))
    done = call("train", recipe, f"output={copied}")
    assert done.code == 0, done.err
    assert json.loads((copied / "scores.json").read_text())["arms"] == before


def test_out_of_memory_is_one_line(recipe: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3072 bytes")

    monkeypatch.setattr(local, "train", allocate)
    done = call("train", recipe)
    assert done.code == 2
    assert "out of memory; lower optimizers.ROLE.micro_batch" in done.err


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--prompt", " "), ("--prompt is empty",)),
        (("--role", "fake_score"), ("'fake_score'", "student, student_ema, teacher")),
        (("--role", "nobody"), ("'nobody'", "student, student_ema, teacher")),
        (("--prompt", "a cat"), ("'a cat'", "the number NN")),
        (("--prompt", "the number 42 in mauve"), ("'mauve'", "black, red")),
        (("--seed", str(2**63)), (str(2**63),)),
    ],
)
def test_sample_refuses_what_it_cannot_draw(
    options: tuple[str, ...], parts: tuple[str, ...], finished: Path, call: Call, tmp_path: Path
) -> None:
    assert_refused(call("sample", finished, *options, "--output", tmp_path / "out"), *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--count=0", "--num-steps=0", "--guidance=-1", "--seed=-1", "--cuont=2"])
def test_b15_an_option_out_of_range_or_misspelt_is_named(option: str, finished: Path, call: Call) -> None:
    done = call("sample", finished, option)
    assert done.code == 2
    assert option.split("=")[0] in done.err
    assert "Traceback" not in done.err
    assert not (finished / "samples").exists()


def test_evaluate_reproduces_the_scores_of_the_run(copied: Path, call: Call) -> None:
    """From the checkpoint alone: pictures that were kept are drawn again, and spoilt ones do not matter."""
    scores = (copied / "scores.json").read_text()
    pictures = (copied / "evaluation" / "student@3.png").read_bytes()
    (copied / "scores.json").unlink()
    (copied / "report.html").unlink()
    for path in (copied / "evaluation").iterdir():
        if path.is_file():
            path.write_bytes(b"spoilt")
    done = call("evaluate", copied)
    assert done.code == 0
    assert done.last == f"finished: report in {copied / 'report.html'}, scores in {copied / 'scores.json'}"
    assert (copied / "scores.json").read_text() == scores
    assert (copied / "evaluation" / "student@3.png").read_bytes() == pictures
    assert (copied / "report.html").exists()


def test_a_run_in_use_is_not_evaluated(copied: Path, call: Call) -> None:
    with RunFolder(copied):
        assert_refused(call("evaluate", copied), "in use by another process")


def test_b40_a_run_that_stops_itself_is_one_line(recipe: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: RunConfig) -> Path:
        raise ValueError("phase 'student' met non-finite values")

    monkeypatch.setattr(local, "train", broken)
    assert_refused(call("train", recipe), "non-finite")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_b54_help_names_the_options(command: str, flag: str, call: Call) -> None:
    done = call(command, flag)
    assert done.code == 0
    assert done.err == ""
    shown = set(re.findall(r"--[a-z][a-z-]*", done.out))
    assert shown - {"--help"} == COMMANDS[command]


def test_b54_help_names_the_commands(call: Call) -> None:
    done = call("--help")
    assert done.code == 0
    assert all(re.search(rf"\b{command}\b", done.out) for command in COMMANDS)
    assert call("trian").code == 2


def documented() -> list[str]:
    """Commands in code of the documents and in the headers of recipes: ``sigmazero ...``."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines: list[str] = []
    for page in pages:
        text = page.read_text("utf-8").replace("\\\n", " ")
        for block in re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL):
            lines += block.splitlines()
        lines += re.findall(r"`([^`\n]+)`", text)
    for recipe in sorted((ROOT / "recipes").glob("*.yaml")):
        lines += [line.lstrip("# ").removeprefix("run: ") for line in recipe.read_text("utf-8").splitlines()]
    found = [re.search(r"^\$?\s*(?:.*\bpython -m )?sigmazero ([a-z-].*)", line.strip()) for line in lines]
    return sorted({match[1].split(" #")[0].strip() for match in found if match})


def test_b54_every_documented_command_is_understood() -> None:
    """Commands, options, recipes and their overrides; ``RECIPE`` and ``<...>`` stand for anything."""
    commands = documented()
    assert any(c.startswith("train ") for c in commands)
    for text in commands:
        command, *arguments = shlex.split(text)
        if command in ("--help", "-h"):
            continue
        assert command in COMMANDS, text
        options = {a.split("=")[0] for a in arguments if a.startswith("--")}
        assert options <= COMMANDS[command] | {"--help"}, text
        of_recipe = command in ("train", "show", "probe") and arguments and "/" in arguments[0]
        if of_recipe and arguments[0].endswith(".yaml"):
            overrides = [a for a in arguments[1:] if "=" in a and "..." not in a]
            if (ROOT / arguments[0]).is_file():
                load_recipe(ROOT / arguments[0], overrides)
            else:
                assert not arguments[0].startswith("recipes/"), text


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sigmazero", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: " in done.stdout
    assert "sigmazero" in done.stdout
