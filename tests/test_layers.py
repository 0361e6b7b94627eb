"""Who may import whom, who owns a heavy library, and that importing does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sigmazero"

# A module imports only what stands before it. `report` stands after `training`, because it reads a run's folder.
ORDER = (
    "",
    "config",
    "records",
    "seeds",
    "tensors",
    "schedule",
    "transition",
    "glyphs",
    "strategies",
    "sampler",
    *("models", "models.base", "models.adapters", "models.roles", "models.conditions", "models.folder"),
    *("models.attention",),
    *("models.glyph", "models.sd3", "models.flux2", "models.qwen_image"),
    "plugins",
    "data",
    *("engines", "engines.base", "engines.local"),
    *("algorithms", "algorithms.advantages", "algorithms.base", "algorithms.losses"),
    *("algorithms.flow_matching", "algorithms.dmd", "algorithms.flow_grpo", "algorithms.nft"),
    *("rewards", "rewards.base", "rewards.scorer", "rewards.function"),
    *("rewards.ocr", "rewards.jpeg", "rewards.colour", "rewards.clip", "rewards.remote"),
    "metrics",
    "pictures",
    "progress",
    "reader",
    "evaluate",
    *("training", "training.state", "training.parallel", "training.profiling", "training.staging", "training.phase"),
    *("training.dump", "training.rollout"),
    *("training.checkpoint", "training.folder", "training.trainer"),
    *("verdict", "compare", "curves", "health", "report"),
    "export",
    *("launch", "launch.ranks", "launch.judge", "launch.local", "launch.sources"),
    *("launch.memory", "launch.plan", "launch.probe", "launch.reopen", "launch.tiny"),
    *("launch.reload", "launch.export"),
    "cli",
    "__main__",
)
# Concrete families, algorithms, rewards: none imports another of its kind.
SIBLINGS = (
    ("models.glyph", "models.sd3", "models.flux2", "models.qwen_image"),
    ("algorithms.flow_matching", "algorithms.dmd", "algorithms.flow_grpo", "algorithms.nft"),
    ("rewards.function", "rewards.ocr", "rewards.jpeg", "rewards.colour", "rewards.clip", "rewards.remote"),
)
OWNERS = {
    "peft": {"models.roles"},
    "torch.utils.tensorboard": {"metrics"},
    "tensorboard": {"metrics"},
    "matplotlib": {"report", "glyphs"},
    "diffusers": {
        *("models.folder", "models.attention", "models.glyph", "models.sd3", "models.flux2", "models.qwen_image"),
        *("export", "launch.reload"),
    },
    "typer": {"cli"},
    "ray": set(),
    "fastapi": set(),
    "uvicorn": set(),
    "httpx": {"rewards.remote"},
    "onnxruntime": {"rewards.ocr"},
    "transformers": {"models.folder", "models.sd3", "models.flux2", "models.qwen_image", "rewards.clip", "launch.tiny"},
    "pyarrow": {"data"},
}
DYNAMIC = {"plugins", "launch.local", "launch.tiny"}  # what `importlib` loads escapes the parser


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything that is imported anywhere in the tree; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text("utf-8"))


def own_imports(tree: ast.AST) -> set[str]:
    """The modules of this package among the imports, without the package's name."""
    found = set()
    for name in imports(tree):
        root, _, rest = name.partition(".")
        if root == "sigmazero":
            found.add(rest if rest in MODULES else rest.rpartition(".")[0])
    return found


def imports_library(tree: ast.AST, library: str) -> bool:
    return any(name == library or name.startswith(f"{library}.") for name in imports(tree))


def test_every_module_has_a_place() -> None:
    assert sorted(ORDER) == sorted(MODULES)


def test_the_parser_sees_imports_of_every_kind() -> None:
    text = "import sigmazero.seeds as s\ndef f():\n    from sigmazero import glyphs\n    from sigmazero.data import X\n"
    assert own_imports(ast.parse(text)) == {"seeds", "glyphs", "data"}
    assert imports_library(ast.parse("def f():\n    from torch.utils import tensorboard"), "torch.utils.tensorboard")
    assert not imports_library(ast.parse("import rayon"), "ray")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_stands_before_it(module: str) -> None:
    late = {name for name in own_imports(parse(module)) if ORDER.index(name) >= ORDER.index(module)}
    assert late == set()


@pytest.mark.parametrize("siblings", SIBLINGS)
def test_concrete_families_and_algorithms_do_not_know_each_other(siblings: tuple[str, ...]) -> None:
    for module in siblings:
        assert not own_imports(parse(module)) & set(siblings)


@pytest.mark.parametrize("layer", ["models", "algorithms", "rewards"])
def test_a_registry_names_modules_that_exist_and_imports_none(layer: str) -> None:
    values = [node.value for node in ast.walk(parse(layer)) if isinstance(node, ast.Constant)]
    named = {str(value).removeprefix("sigmazero.") for value in values if str(value).startswith("sigmazero.")}
    assert named == {name for group in SIBLINGS for name in group if name.startswith(f"{layer}.")}
    assert own_imports(parse(layer)) == set()


@pytest.mark.parametrize("library", OWNERS)
def test_a_heavy_library_has_one_owner(library: str) -> None:
    assert {module for module in MODULES if imports_library(parse(module), library)} <= OWNERS[library]


def test_modules_are_loaded_by_name_in_three_places_only() -> None:
    loads = {m for m in MODULES if {"importlib", "importlib.util", "importlib.import_module"} & set(imports(parse(m)))}
    assert loads == DYNAMIC


@pytest.mark.parametrize("module", ["config", "cli"])
def test_settings_and_command_line_import_nothing_heavy_at_the_top(module: str) -> None:
    """Whatever they import at module level, of this package too, imports no torch at module level."""
    pending, seen = [module], set()
    while pending:
        name = pending.pop()
        seen.add(name)
        top = ast.Module(
            body=[node for node in parse(name).body if isinstance(node, (ast.Import, ast.ImportFrom))], type_ignores=[]
        )
        for library in ("torch", "diffusers", "transformers", "peft", "matplotlib", "safetensors", "PIL", "pyarrow"):
            assert not imports_library(top, library), f"{name} imports {library}"
        pending += own_imports(top) - seen
    assert seen == {module}


def python(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_command_line_and_its_settings_load_no_torch(tmp_path: Path) -> None:
    heavy = "('torch', 'diffusers', 'transformers', 'peft', 'matplotlib', 'numpy')"
    code = f"import sys, sigmazero.cli, sigmazero.config; print([m for m in {heavy} if m in sys.modules])"
    assert python(code, tmp_path) == "[]\n"


IMPORT_ALL = """
import importlib, os, sys, threading
events = []
def watch(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.fork", "os.exec"):
        events.append((event, args))
import torch
environment, threads, state = dict(os.environ), threading.active_count(), torch.random.get_rng_state()
kernels, dtype = torch.get_num_threads(), torch.get_default_dtype()
sys.addaudithook(watch)
for name in {names!r}:
    importlib.import_module(name)
assert torch.equal(state, torch.random.get_rng_state())
assert (kernels, dtype) == (torch.get_num_threads(), torch.get_default_dtype())
assert not torch.cuda.is_initialized()
print(events, threading.active_count() - threads, os.listdir("."), "ray" in sys.modules)
"""


def test_importing_every_module_starts_nothing(tmp_path: Path) -> None:
    """No connection, process, thread or file; torch's seed, threads and devices stay as they are."""
    names = [f"sigmazero.{name}".rstrip(".") for name in ORDER]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL.format(names=names)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[] 0 [] False\n"), done.stderr
