"""A run's folder: self-contained, locked against a second process, never overwritten by accident."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sigmazero.config import RunConfig, parse

_LOCK = ".lock"
_DESCRIPTION = "run.json"
_WRITTEN = (
    *("checkpoints", "evaluation", "rollouts", "tensorboard", "profile"),
    *("metrics.jsonl", "scores.json", "report.html"),
)
_PACKAGES = ("sigmazero", "torch", "diffusers", "transformers", "peft", "numpy", "safetensors")


class RunFolder:
    """``run.json`` (settings, versions, whether it is finished), metrics, checkpoints, pictures, report.

    Used as a context: entering locks the folder, leaving (or dying) unlocks it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: Any = None
        self._made: list[Path] = []
        self._made_lock = False

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation"

    def __enter__(self) -> RunFolder:
        try:
            self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self._made_lock = not (self.path / _LOCK).exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / _LOCK).open("a")
        except (OSError, ValueError) as error:  # ValueError: a NUL character
            raise ValueError(f"output: {str(self.path)!r} cannot be a run folder ({error}); name another") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / _LOCK)):
                raise OSError  # its last holder has just removed it
        except OSError:
            self._lock.close()
            raise ValueError(
                f"output: {self.path} is in use by another process; wait for it or set another output"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        """Where no run was started all is as it was before."""
        with contextlib.suppress(OSError):
            if self._made_lock and not (self.path / _DESCRIPTION).exists():
                (self.path / _LOCK).unlink()
                for path in self._made:
                    path.rmdir()
        self._lock.close()

    def check(self, config: RunConfig) -> bool:
        """Whether the same unfinished run is here, to go on with; else there is nothing, or it may be cleared.

        Raises:
            ValueError: the folder holds a finished or different run (the differences are named) and ``overwrite`` is
                false, or it holds something that is no run.
        """
        others = [p for p in self.path.iterdir() if p.name != _LOCK and p.suffix != ".writing"]
        if others and not (self.path / _DESCRIPTION).is_file():
            raise ValueError(f"output: {self.path} holds files but no run ({others[0].name}); set another output")
        if not others or config.overwrite:
            return False
        _check_same(self.path, read_description(self.path), config)
        return True

    def open(self, config: RunConfig, inputs: Mapping[str, str] | None = None) -> None:
        """Starts the run here, or goes on with the same unfinished one.

        Args:
            inputs: hashes of the files that the settings name, by setting: the same path may hold something else later.
        Raises:
            ValueError: as ``check``, or one of those files has changed.
        """
        if self.check(config):
            check_inputs(self.path, inputs or {})
        else:
            self._clear()
        self.describe(config, inputs or {}, finished=False)

    def describe(self, config: RunConfig, inputs: Mapping[str, str], *, finished: bool) -> None:
        values = {
            "finished": finished,
            "config": config.model_dump(mode="json"),
            "inputs": dict(inputs),
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        }
        write_json(self.path / _DESCRIPTION, values)

    def _clear(self) -> None:
        """Removes what a run writes and nothing else; the description stays until it is replaced."""
        for name in _WRITTEN:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def read_description(folder: Path) -> dict[str, Any] | None:
    """``run.json`` of a folder, or None where there is no run.

    Raises:
        ValueError: the file is there but cannot be read.
    """
    path = folder / _DESCRIPTION
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); set overwrite=true to start over") from None
    if not isinstance(values, dict) or not isinstance(values.get("config"), dict) or "finished" not in values:
        raise ValueError(f"{path} describes no run; set overwrite=true to start over")
    return values


def read_config(folder: str | Path) -> RunConfig:
    """The resolved settings of a run folder.

    Raises:
        ValueError: it is no run folder.
    """
    described = read_description(Path(folder))
    if described is None:
        raise ValueError(f"{folder} is not a run folder: it has no run.json")
    return parse(described["config"])


def check_inputs(folder: Path, inputs: Mapping[str, str]) -> None:
    """Refuses files that are not what they were when the run started.

    Raises:
        ValueError: names the setting whose file has changed.
    """
    before = (read_description(folder) or {}).get("inputs", {})
    changed = [name for name in before if before[name] != inputs.get(name)]
    if changed:
        raise ValueError(
            f"{folder} was started with other content of {', '.join(changed)} than what is there now; put the old file "
            "back, or set overwrite=true or another output"
        )


def check_config(path: Path, before: Mapping[str, Any], config: RunConfig) -> None:
    """Refuses to go on with a run under settings that make it another one.

    Raises:
        ValueError: names what differs between the settings ``before``, of what is at ``path``, and these.
    """
    differences = list(_differences(parse(before).identity(), config.identity()))
    if differences:
        raise ValueError(
            f"output: {path} holds another run ({'; '.join(differences[:5])}); set overwrite=true or another output"
        )


def write_json(path: Path, values: Any) -> None:
    """Writes JSON whole or not at all."""
    aside = path.with_name(path.name + ".writing")
    aside.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(aside, path)


def _check_same(path: Path, described: Mapping[str, Any] | None, config: RunConfig) -> None:
    assert described is not None
    check_config(path, described["config"], config)
    if described["finished"]:
        raise ValueError(
            f"output: {path} holds this run, finished; set overwrite=true to run it again, or another output"
        )


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield f"{key} was {old!r}, is {new!r}"
