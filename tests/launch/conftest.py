"""Runs of tiny random pipelines, and exports of them, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sigmazero.config import parse
from sigmazero.launch import export as launch
from sigmazero.launch import reload
from sigmazero.launch.export import Exported, export_run
from sigmazero.launch.local import train
from sigmazero.launch.tiny import write_tiny

FAMILIES = ("sd3", "flux2", "qwen_image")
DTYPES = {"qwen_image": "bfloat16"}
PROMPTS = ("a red fox in the snow", "two old dogs")

Trained = Callable[[str], Path]
MakeExport = Callable[[str, str], Exported]

# Runs reload.py as where there is diffusers and no sigmazero: site-packages without its .pth files, which an editable
# installation is found by, and neither the working folder nor PYTHONPATH. It says so in the file ``CLEAN``.
CLEAN = "clean.txt"
CLEAN_PYTHON = """
import subprocess, sys
code = '''
import runpy, sys
sys.path.append({site!r})
try:
    import sigmazero
except ModuleNotFoundError:
    import diffusers
    with open({said!r}, "a") as file:
        print(sys.argv[1], file=file)
    runpy.run_path({script!r}, run_name="__main__")
else:
    sys.exit("sigmazero can be imported")
'''
sys.exit(subprocess.run([sys.executable, "-I", "-S", "-c", code, *sys.argv[1:]]).returncode)
"""


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="session")
def trained(shelf: Path) -> Trained:
    """A family's run folder: two cycles of DMD2 on a tiny pipeline, adapters of rank 4 and alpha 8, weights moved far.

    SD3's student re-noises, the others are Euler's; Qwen-Image's base is in half precision.
    """

    def run(family: str) -> Path:
        folder, base = shelf / family / "run", shelf / family / "base"
        if folder.exists():
            return folder
        write_tiny(family, base)
        (shelf / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
        transition = "renoise" if family == "sd3" else "euler"
        settings = {
            "num_cycles": 2,
            "output": str(folder),
            "model": {"family": family, "path": str(base), "dtype": DTYPES.get(family, "float32")},
            "roles": {"storage": "lora", "lora": {"rank": 4, "alpha": 8.0}},
            "data": {"prompts": str(shelf / "prompts.txt"), "batch_size": 2, "height": 32, "width": 32},
            "algorithm": {
                "name": "dmd2", "num_steps": 4, "teacher_steps": 4, "shift": 3.0, "fake_updates": 1,
                "transition": transition,
            },
            "optimizers": {"student": {"lr": 3e-2}, "fake_score": {"lr": 3e-2}},
            "training": {"threads": 1, "tensorboard": False},
            "evaluate": {"num_captions": 8, "samples_per_caption": 2, "bootstrap": 20},
        }  # fmt: skip
        return train(parse(settings))

    return run


@pytest.fixture(scope="session")
def written(shelf: Path, trained: Trained) -> MakeExport:
    """An export of a family in a form, made once, without the check in another process: tests/launch/test_export.py
    has that done."""
    made: dict[tuple[str, str], Exported] = {}

    def make(family: str, form: str) -> Exported:
        if (family, form) not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launch, "_compare", lambda config, out, work: (0.0, 0))
                made[family, form] = export_run(trained(family), shelf / "written" / family / form, form=form)
        return made[family, form]

    return make


@pytest.fixture(scope="session")
def exported(shelf: Path, trained: Trained) -> MakeExport:
    """An export of a family in a form, made once, and checked in a process that cannot import sigmazero."""
    made: dict[tuple[str, str], Exported] = {}
    clean = shelf / "clean.py"
    names = {"site": str(Path(torch.__file__).parents[1]), "said": str(shelf / CLEAN), "script": reload.__file__}
    clean.write_text(CLEAN_PYTHON.format(**names))

    def make(family: str, form: str) -> Exported:
        if (family, form) not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launch, "reload", SimpleNamespace(__file__=str(clean)))
                made[family, form] = export_run(trained(family), shelf / family / form, form=form)
        return made[family, form]

    return make
