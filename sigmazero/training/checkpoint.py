"""Checkpoints: copied at a cycle's end, written aside by a thread, fsynced, hashed, renamed; verified on load.

Tensors are in torch's distributed checkpoint format over safetensors: every rank writes what it holds, and any number
of ranks reads what it needs of that. Numbers are JSON. Nothing in a checkpoint is executable: of the library only its
safetensors storage is used, whose files say themselves where in the whole tensor a part belongs.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from sigmazero.tensors import local, sync
from sigmazero.training.parallel import ALONE, Ranks

SCHEMA = 2
_STATE = "state.json"
_NAME = re.compile(r"cycle-(\d{8})")
_ASIDE = ".writing-"
_FILE_BYTES = 2**30  # of one file, about: the storage holds a file in memory twice while it writes it


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint by name, read from the files when they are asked for; many at once are read faster.

    Names come in one order on all ranks: what is rebuilt of them must be, or collectives would pair unlike tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._reader = path, HuggingFaceStorageReader(str(path))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._metadata.state_dict_metadata))

    def __len__(self) -> int:
        return len(self._metadata.state_dict_metadata)

    def __getitem__(self, name: str) -> Tensor:
        return self.whole([name])[name]

    def whole(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those tensors on the host.

        Raises:
            KeyError: there is none of that name.
            ValueError: the files are gone.
        """
        made: dict[str, Tensor] = {}
        for name in names:
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            made[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.fill(made)
        return made

    @torch.no_grad()
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Reads into tensors, of a sharded one this rank's part alone.

        Raises:
            ValueError: one is missing, or of another shape or dtype; or the files are gone.
        """
        for name, value in targets.items():
            stored = self._metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"checkpoint {self.path} has no tensor {name}")
            given, wanted = (stored.size, stored.properties.dtype), (value.shape, value.dtype)
            if given != wanted:
                raise ValueError(
                    f"checkpoint {self.path} has {name} as {given[1]} of shape {tuple(given[0])}, but here it is "
                    f"{wanted[1]} of shape {tuple(wanted[0])}"
                )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self._metadata)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"checkpoint {self.path} cannot be read: {error}") from None


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: tensors by name, and numbers. ``path`` is where it was read from."""

    tensors: StoredTensors
    numbers: Mapping[str, Any]
    path: Path


class Saver:
    """Saves the checkpoints of a run, in a thread, one at a time. Used as a context: leaving it waits for the last.

    All ranks make the same calls. The thread speaks to the other ranks over a process group of its own, so that it
    never comes between what the training sends; if a rank dies, the others' threads fail instead of waiting for it.

    Args:
        keep: how many checkpoints stay: the newest, and ``keep - 1`` before it.
        ranks: who holds the tensors; all see the same ``folder``.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks = ALONE) -> None:
        self._folder, self._keep, self._ranks = folder, keep, ranks
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._group = dist.new_group(backend="gloo") if ranks.count > 1 else None
        if ranks.is_first:
            for left in folder.glob(f"{_ASIDE}*"):
                shutil.rmtree(left, ignore_errors=True)
        self._gather(None)  # nobody writes before that is done

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()  # the error that ends the run is the first one

    def save(self, cycle: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Copies what this rank will write to the host, and writes it to ``folder/cycle-N`` beside what comes next.

        Waits for the save before it. Killed at any instant, the folder holds the checkpoints that were there before or
        the new one as well (B24).

        Args:
            tensors: the same names on every rank. What is not sharded is equal on all, and one of them writes it.
        Raises:
            OSError: as ``wait``, of the save before.
        """
        self.wait()
        plan, copies = _snapshot(tensors, self._ranks)
        arguments = (f"cycle-{cycle:08d}", plan, copies, json.dumps(numbers))
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Ends the run on every rank if the writing has failed; waits for nothing else.

        Raises:
            OSError: as ``wait``.
        """
        if self._ranks.any(self._error is not None):
            self.wait()

    def wait(self) -> None:
        """Waits until all is written.

        Raises:
            OSError: the checkpoint could not be written on some rank, for example on a full disk: on all ranks alike.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except BaseException as error:  # raised in the main thread
            self._error = error

    def _write(self, name: str, plan: SavePlan, copies: dict[str, Tensor], numbers: str) -> None:
        """Writes aside; the first rank puts it in place when all ranks have written, and they learn how that went."""
        aside, own = self._folder / f"{_ASIDE}{name}", None
        files: dict[str, str] = {}
        try:
            files = _write_part(aside, plan, copies, self._ranks)
        except Exception as error:
            own = error
        reports = self._gather((files, _described(own, self._ranks)))
        failed = [problem for _, problem in reports if problem]
        if not failed:
            try:
                if self._ranks.is_first:
                    _publish(aside, {n: h for part, _ in reports for n, h in part.items()}, json.loads(numbers))
                    _prune(self._folder, self._folder / name, self._keep)
            except Exception as error:
                own = error
            failed = [problem for problem in self._gather(_described(own, self._ranks)) if problem]
        if failed:
            if self._ranks.is_first:
                shutil.rmtree(aside, ignore_errors=True)  # leaves the room on a full disk to the user
            if own is not None and not isinstance(own, OSError):
                raise own
            raise OSError(f"checkpoint {self._folder / name} cannot be written, those before it stay: {failed[0]}")

    def _gather(self, own: Any) -> list[Any]:
        """What each rank has to say."""
        if self._group is None:
            return [own]
        parts = [None] * self._ranks.count
        try:
            dist.all_gather_object(parts, own, group=self._group)
        except RuntimeError as error:
            line = " ".join(str(error).split())
            raise ConnectionError(f"a checkpoint is not finished, because another rank ended: {line}") from None
        return parts


def save(folder: Path, cycle: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], keep: int) -> Path:
    """Saves one checkpoint of a process that is alone, and waits for it. Returns its folder."""
    with Saver(folder, keep) as saver:
        saver.save(cycle, tensors, numbers)
    return folder / f"cycle-{cycle:08d}"


# Writing


class _Copies(DefaultSavePlanner):
    """Hands the storage copies on the host in place of tensors, which go on changing."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._copies[write_item.index.fqn]


def _snapshot(tensors: Mapping[str, Tensor], ranks: Ranks) -> tuple[SavePlan, dict[str, Tensor]]:
    """What this rank writes, and copies of it on the host: its own parts, of nothing that another rank writes."""
    own = {name: value for i, (name, value) in enumerate(sorted(tensors.items())) if _is_writer(value, i, ranks)}
    copies = {
        name: local(value.detach()).to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in own.items()
    }
    return create_default_local_save_plan(own, True), copies


def _is_writer(value: Tensor, index: int, ranks: Ranks) -> bool:
    """Whether this rank writes its part of the tensor: equal parts are written by one rank, they take turns."""
    if not isinstance(value, DTensor):
        return index % ranks.count == ranks.index
    mesh, at = value.device_mesh, value.device_mesh.get_coordinate()
    assert at is not None
    copies = [axis for axis, placement in enumerate(value.placements) if placement.is_replicate()]
    return all(at[axis] == index % mesh.size(axis) for axis in copies)


def _write_part(aside: Path, plan: SavePlan, copies: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Writes and fsyncs this rank's files; returns their hashes by name."""
    aside.mkdir(parents=True, exist_ok=True)
    storage = HuggingFaceStorageWriter(str(aside), _file_of_each(copies), save_distributed=True)
    plan = storage.prepare_global_plan([plan] * ranks.count)[ranks.index]  # it only numbers the plans
    written = storage.write_data(plan, _Copies(copies)).value()
    return {name: _file_digest(aside / name) for name in {result.storage_data.relative_path for result in written}}


def _file_of_each(copies: Mapping[str, Tensor]) -> dict[str, int]:
    """Tensor -> number of its file, from 1: a new one whenever a file is full."""
    files, number, filled = dict[str, int](), 1, 0
    for name, value in copies.items():
        if filled and filled + value.nbytes > _FILE_BYTES:
            number, filled = number + 1, 0
        files[name], filled = number, filled + value.nbytes
    return files


def _described(error: Exception | None, ranks: Ranks) -> str:
    """One line for all ranks; empty where nothing failed."""
    if error is None:
        return ""
    what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return what if ranks.count == 1 else f"rank {ranks.index}: {what}"


def _publish(aside: Path, files: Mapping[str, str], numbers: Mapping[str, Any]) -> None:
    """Describes what all ranks have written, and gives it its name."""
    unseen = [name for name in files if not (aside / name).is_file()]
    if unseen:
        raise OSError(f"{aside / unseen[0]} is of another rank and not seen here; output must be on a shared disk")
    description = {"schema": SCHEMA, "files": files, "numbers": numbers, "sha256": _digest(files, numbers)}
    (aside / _STATE).write_text(json.dumps(description, indent=1))
    sync(aside / _STATE)
    sync(aside)
    target = aside.with_name(aside.name.removeprefix(_ASIDE))
    if target.exists():  # damaged: the run would have gone on from it
        shutil.rmtree(target)
    aside.rename(target)
    sync(target.parent)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Removes all of this run but ``keep``. One of a later cycle is of a future that it did not come from: it was
    damaged."""
    found = [path for path in _folders(folder) if _run_of(path) in (None, _run_of(newest))]
    at = found.index(newest) + 1
    for old in (*found[: max(0, at - keep)], *found[at:]):
        shutil.rmtree(old)


def _run_of(path: Path) -> Any:
    """The settings of the run that a checkpoint is of; None where it does not say."""
    try:
        return json.loads((path / _STATE).read_text())["numbers"].get("config")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


# Reading


def load_newest(folder: Path, ranks: Ranks = ALONE) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and a line for every newer one that does not: the same on every rank."""
    refused: list[str] = []
    for name in reversed(ranks.gather_json([path.name for path in _folders(folder)])[0]):
        try:
            return load(folder / name, ranks), refused
        except ValueError as error:
            refused.append(str(error))
    return None, refused


def load(path: Path, ranks: Ranks = ALONE) -> Checkpoint:
    """Verifies one checkpoint, each rank a share of the files. Tensors are read when they are asked for.

    Raises:
        ValueError: a file is missing or damaged, the schema is another one, or a hash differs from the one written: on
            all ranks, if on one.
    """
    found, problem = None, ""
    try:
        found = _verified(path, ranks)
    except ValueError as error:
        problem = str(error)
    problems = [line for line in ranks.gather_json(problem) if line]
    if problems or found is None:
        raise ValueError(problems[0])
    return found


def _verified(path: Path, ranks: Ranks) -> Checkpoint:
    try:
        description = json.loads((path / _STATE).read_text())
        if description["schema"] != SCHEMA:
            raise ValueError(f"checkpoint {path} has schema {description['schema']}, this version reads {SCHEMA}")
        files, numbers = description["files"], description["numbers"]
        names = sorted(files)
        if (
            _digest(files, numbers) != description["sha256"]
            or names != sorted(file.name for file in path.glob("*.safetensors"))
            or any(_file_digest(path / name) != files[name] for name in names[ranks.index :: ranks.count])
        ):
            raise ValueError(f"checkpoint {path} is damaged: its tensors or numbers are not what was written")
        return Checkpoint(StoredTensors(path), numbers, path)
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error}") from None


def _folders(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted(p for p in folder.glob("cycle-*") if _NAME.fullmatch(p.name)) if folder.is_dir() else []


def _digest(files: Mapping[str, str], numbers: Mapping[str, Any]) -> str:
    """Of the numbers and of the files' own hashes."""
    return hashlib.sha256(json.dumps([files, numbers], sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
