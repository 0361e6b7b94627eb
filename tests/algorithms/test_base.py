"""The decay of averages is a pure function of the step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sigmazero.algorithms.base import warmed_up_decay

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "flow_rl.json").read_text())["ema_decay"]


def test_b58_decay_against_the_oracle() -> None:
    decay = warmed_up_decay(0.9)
    assert {n: decay(int(n)) for n in ORACLE} == pytest.approx(ORACLE, rel=1e-5)


def test_b58_a_long_decay_is_reached_and_not_before() -> None:
    """.1, .3077, .5263, .91, .9991: the configured decay does not stick at a small one, nor start at itself."""
    decay = warmed_up_decay(0.9999)
    assert [decay(n) for n in (0, 3, 9, 90, 9999)] == pytest.approx([0.1, 4 / 13, 10 / 19, 0.91, 10000 / 10009])
    assert decay(10**7) == 0.9999
