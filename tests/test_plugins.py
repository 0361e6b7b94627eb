"""A user's own code enters by one door, and nothing else does (B50)."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from sigmazero.plugins import load_plugin

GOOD = """\
\"\"\"A strategy of one's own.\"\"\"
import math
STOP = int(math.sqrt(1))
def plan(sample, num_steps, seed):
    return None, (STOP, STOP + 1), STOP
class Plan:
    pass
number = 3
"""


def plugin(folder: Path, text: str = GOOD) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def refusal(name: str, *allowed: str) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (each test checks the message)
        load_plugin(name, allowed)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


def test_a_listed_function_of_a_file_works(tmp_path: Path) -> None:
    name = f"{plugin(tmp_path)}:plan"
    assert load_plugin(name, ["other.py:f", name])(7, 4, 0) == (None, (1, 2), 1)


def test_a_listed_function_of_a_package_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_package").mkdir()
    (tmp_path / "my_own_package" / "strategies.py").write_text(GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    name = "my_own_package.strategies:plan"
    assert load_plugin(name, [name])(7, 4, 0) == (None, (1, 2), 1)


def test_b50_a_file_that_is_not_listed_is_refused_and_not_run(tmp_path: Path) -> None:
    """Nor is one whose other function is listed."""
    path = plugin(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\n{GOOD}")
    for allowed in ([], [f"{path}:other"], [str(path)], ["mine.py:plan"]):
        message = refusal(f"{path}:plan", *allowed)
        assert f"plugins: [{path}:plan]" in message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:Popen", "builtins:eval", "posix:system", "os.path:join", "shutil:rmtree"]
)
def test_b50_what_is_part_of_python_is_refused_even_if_it_is_listed(name: str) -> None:
    assert "listed under plugins" in refusal(name)
    message = refusal(name, name)
    assert name.split(":")[0] in message
    assert "part of Python itself" in message


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import no_such_module_at_all\n", "No module named 'no_such_module_at_all'"),
        ("def plan(:\n", "SyntaxError"),
        ("raise RuntimeError('broken')\n", "RuntimeError: broken"),
    ],
)
def test_b50_a_file_that_raises_is_one_line_that_names_it(tmp_path: Path, text: str, complaint: str) -> None:
    path = plugin(tmp_path, text)
    message = refusal(f"{path}:plan", f"{path}:plan")
    assert str(path) in message
    assert complaint in message


@pytest.mark.parametrize("member", ["Plan", "number", "missing", "math"])
def test_b50_what_is_no_function_is_refused(tmp_path: Path, member: str) -> None:
    name = f"{plugin(tmp_path)}:{member}"
    assert f"has no function {member!r}" in refusal(name, name)


@pytest.mark.parametrize("name", ["mine.py", "mine", "", ":", "mine.py:", "mine.py:a b", "mine.py:plan()", "m:a.b"])
def test_b50_another_form_is_refused(name: str) -> None:
    assert re.search(r"form file\.py:function or package\.module:function", refusal(name, name))


def test_b50_a_missing_file_or_package_is_named(tmp_path: Path) -> None:
    missing = f"{tmp_path / 'nowhere.py'}:plan"
    assert f"{tmp_path / 'nowhere.py'} does not exist" in refusal(missing, missing)
    assert "'no_such_package_at_all.x'" in refusal("no_such_package_at_all.x:f", "no_such_package_at_all.x:f")
    assert "no_such_package_at_all" not in sys.modules


def test_b50_a_plugin_may_define_a_dataclass(tmp_path: Path) -> None:
    file = tmp_path / "with_dataclass.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass S:\n    a: int\ndef plan(s, n, seed):\n    return None, (0, 1), S(0).a\n"
    )
    assert load_plugin(f"{file}:plan", [f"{file}:plan"])(0, 2, 0) == (None, (0, 1), 0)


@pytest.mark.parametrize("body", ["1 / 0", "raise SystemExit(0)", "raise ValueError('two\\nlines')"])
def test_b50_whatever_a_plugin_raises_is_one_line(tmp_path: Path, body: str) -> None:
    file = tmp_path / "raises.py"
    file.write_text(body + "\n")
    with pytest.raises(ValueError, match=r"raises\.py failed to load") as caught:
        load_plugin(f"{file}:plan", [f"{file}:plan"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [".x:plan", ":plan", f"{os.__file__}:popen"])
def test_b50_relative_empty_and_standard_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="plugin"):
        load_plugin(name, [name])


def test_a_dotted_name_without_a_colon_is_the_same_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_strategies.py").write_text(GOOD)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["my_own_strategies:plan", "my_own_strategies.plan"]
    assert load_plugin(names[0], names) is load_plugin(names[1], names)
    with pytest.raises(ValueError, match="not of the form"):
        load_plugin("my_own_strategies.py", ["my_own_strategies.py"])
