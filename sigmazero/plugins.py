"""The one door for a user's own code: files and dotted names listed under ``plugins:``, named in the log.

``plugins: [my_strategy.py:plan, mypackage.strategies:plan]``; a setting then names the function by the same text.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any


def load_plugin(name: str, allowed: Sequence[str]) -> Callable[..., Any]:
    """The function that ``file.py:function``, ``package.module:function`` or ``package.module.function`` names.

    Raises:
        ValueError: it is not listed under ``plugins``, there is no such file, module or function, or it names
            something of the standard library (B50).
    """
    if name not in allowed:
        raise ValueError(f"{name!r} is neither a known name nor listed under plugins; add it to plugins: [{name}]")
    where, _, function = name.rpartition(":" if ":" in name else ".")
    if not where or where.endswith(":") or not function.isidentifier() or (":" not in name and function == "py"):
        raise ValueError(f"plugin {name!r} is not of the form file.py:function or package.module:function")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    found = getattr(module, function, None)
    if not inspect.isfunction(found):
        raise ValueError(f"plugin {name!r}: {where} has no function {function!r}")
    print(f"plugin: {name} from {inspect.getfile(found)}", file=sys.stderr)
    return found


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"plugin file {path} does not exist")
    if (
        path.resolve().is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())
        and "site-packages" not in path.parts
    ):
        raise ValueError(f"plugin file {path} is part of Python itself; a plugin is a function of yours")
    spec = importlib.util.spec_from_file_location(f"sigmazero_plugin_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _one_line(f"plugin file {path}"):
        spec.loader.exec_module(module)
    return module


def _from_package(name: str) -> Any:
    root = name.split(".")[0]
    if not root:
        raise ValueError(f"plugin module {name!r} is relative; name it from its package on")
    if root in sys.stdlib_module_names or root == "builtins":
        raise ValueError(f"plugin {name!r} is part of Python itself; a plugin is a function of yours")
    with _one_line(f"plugin module {name!r}"):
        return importlib.import_module(name)


@contextlib.contextmanager
def _one_line(what: str) -> Generator[None]:
    """Whatever a user's code raises when it is loaded, an exit included, is one line that names it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{what} failed to load: {type(error).__name__}: {text}") from error
