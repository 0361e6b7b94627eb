"""Checkpoints of several ranks: each writes its part once, any number of them reads it, and none waits for a dead one.

Ranks are three processes over gloo, started once for all tests of this file (`many_savers.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sigmazero.training import checkpoint
from tests.training import many_savers
from tests.training.many_savers import differences, expected

Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """What each rank of each work found; a rank that was killed has found nothing."""
    checkpoint.save(folder / "plain 1", 1, expected(), {}, 5)
    command = [sys.executable, "-m", many_savers.__name__]
    processes = [
        subprocess.Popen([*command, str(index), str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for index in range(3)
    ]
    try:
        errors = [process.communicate(timeout=120)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, -9, 0], "\n".join(errors)
    return {
        work.__name__: [json.loads(file.read_text()) for file in sorted(folder.glob(f"{work.__name__} ?.json"))]
        for work, _ in many_savers.WORKS
    }


def test_b11_any_number_of_ranks_reads_what_any_number_wrote(found: Found, folder: Path) -> None:
    """Sharded over 2 or 3, whole on 1 or 2 -> sharded over 2 or 3, whole on 1, 2 or 3: bit for bit."""
    results = {**found["two"][0], **found["three_again"][0]}
    pairs = {name: wrong for name, wrong in results.items() if " on " in name}
    assert len(pairs) == 4 * 2 + 3 * 2
    assert {name: wrong for name, wrong in pairs.items() if wrong} == {}
    for ranks in (*found["two"], *found["three_again"]):
        assert all(not wrong for name, wrong in ranks.items() if " on " in name)
    assert [ranks["same"] for ranks in found["three"]] == [[]] * 3
    for name in ("sharded 3", "sharded 2", "plain 2"):
        assert differences(checkpoint.load(folder / name / "cycle-00000001").tensors, expected()) == []


@pytest.mark.parametrize("name", ["sharded 3", "sharded 2", "plain 2", "replicas"])
def test_every_number_is_written_once(found: Found, folder: Path, name: str) -> None:
    """Counted in the files, without the reader: sharded or not, and where ranks have copies of one shard."""
    files = sorted((folder / name / "cycle-00000001").glob("*.safetensors"))
    assert len(files) == int(name[-1]) if name[-1].isdigit() else 2
    stored: dict[str, int] = {}
    for file in files:
        for tensor, value in load_file(file).items():
            stored[tensor] = stored.get(tensor, 0) + value.numel()
    assert [ranks["both"]["same"] for ranks in found["two"]] == [[], []]
    wanted = {f"w{i}": torch.zeros(6) for i in range(4)} if name == "replicas" else expected()
    assert stored == {tensor: value.numel() for tensor, value in wanted.items()}


def test_a_rank_copies_its_own_part_alone(found: Found) -> None:
    total = sum(value.nbytes for value in expected().values())
    copied = [ranks["copied"] for ranks in found["two"]]
    assert sum(copied) == total
    assert max(copied) < 0.7 * total  # five rows are three and two


def test_b24_a_part_that_is_damaged_is_refused_by_every_rank(found: Found) -> None:
    first, second = (ranks["damaged"] for ranks in found["two"])
    assert first == second
    assert first["found"] == {"cycle": 1}
    assert len(first["refused"]) == 1
    assert "cycle-00000002 is damaged" in first["refused"][0]


@pytest.mark.parametrize(("where", "rank"), [("full 0", 0), ("full 1", 1), ("renaming", 0)])
def test_b24_a_full_disk_on_one_rank_ends_all_and_leaves_the_last_good_one(found: Found, where: str, rank: int) -> None:
    first, second = (ranks[where] for ranks in found["two"])
    assert first == second
    assert f"cycle-00000002 cannot be written, those before it stay: rank {rank}: [Errno 28] No space" in first["told"]
    assert "\n" not in first["told"]
    assert first["left"] == ["cycle-00000001"]
    assert (first["found"], first["refused"]) == ({"cycle": 1}, [])
    assert first["after"] == ["cycle-00000001", "cycle-00000003"]


def test_b24_a_rank_that_dies_while_it_writes_is_not_waited_for(found: Found, folder: Path) -> None:
    (first,) = found["killed"]
    assert first["told"].startswith("ConnectionError: a checkpoint is not finished, because another rank ended")
    assert first["seconds"] < 20
    left, refused = checkpoint.load_newest(folder / "killed")
    assert left is not None
    assert (left.numbers, refused) == ({"cycle": 1}, [])
    with checkpoint.Saver(folder / "killed", 1):
        assert [path.name for path in (folder / "killed").iterdir()] == ["cycle-00000001"]
