"""DMD2 on eight gloo ranks, physical batches of 1 and 2: as on one rank."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from sigmazero.launch.tiny import write_tiny
from sigmazero.training.parallel import ALONE
from tests.invariants.test_families import PROMPTS
from tests.invariants.test_ranks import assert_close, run_cycles, settings
from tests.pair import Pair

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Generator[Pair]:
    made = Pair(8, tmp_path_factory.mktemp("eight"))
    yield made
    made.close()
    assert made.exit_codes == [0] * 8


@pytest.mark.parametrize(("shard", "micro_batch", "batch"), [(8, 1, 16), (8, 2, 16), (4, 2, 16), (8, 1, 11)])
def test_eight_ranks_train_as_one(eight: Pair, tmp_path: Path, shard: int, micro_batch: int, batch: int) -> None:
    write_tiny("sd3", tmp_path / "sd3")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    values = settings(tmp_path, "sd3", "dmd2", "lora", micro_batch)
    values["data"]["batch_size"] = batch
    alone = run_cycles(ALONE, values)
    answers = eight("tests.invariants.test_ranks:run_cycles", shard, values)
    assert_close(answers[0], alone)
    assert all(answer["logs"] == answers[0]["logs"] for answer in answers)
