"""The probe measures what it says: 0 on the engine of this process, and exactly what another engine gets wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sigmazero.engines.local import LocalEngine
from sigmazero.launch.local import build
from sigmazero.launch.probe import as_json, probe, table
from sigmazero.models.roles import Roles
from sigmazero.records import Conditioning, RolloutRequest, Trajectory
from sigmazero.sampler import Velocity
from tests.conftest import MakeRun


@pytest.mark.parametrize("micro_batch", [1, 4, 32])
def test_b14_the_engine_of_this_process_has_no_gap(flow_grpo: MakeRun, micro_batch: int) -> None:
    gaps = probe(flow_grpo({"optimizers.policy.micro_batch": micro_batch}))
    assert [gap.step for gap in gaps] == [0, 1, 2, 3]
    assert [gap.sigma for gap in gaps] == pytest.approx([1, 0.9, 0.75, 0.5])
    assert all(gap.velocity_max == 0 for gap in gaps)
    assert [gap.log_prob_max for gap in gaps] == [0, 0, 0, None]  # the last step is deterministic


def test_decoupled_and_stopped_rollouts_are_probed_too(nft: MakeRun, dmd2: MakeRun) -> None:
    for config, steps in ((nft(), 3), (dmd2({"data.batch_size": 24}), 3)):
        gaps = probe(config)
        assert len(gaps) == steps
        assert all(gap.velocity_max == 0 for gap in gaps)
    assert all(gap.log_prob_max is None for gap in probe(nft()))


def test_b14_an_engine_with_other_velocities_shows_by_how_much(
    flow_grpo: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its velocities are .01 too large where sigma is .75, so that step alone is off, by that much."""
    inner = LocalEngine.generate

    def off(self: LocalEngine, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        roles, plain = self._roles, Roles.velocity

        def velocity(_: Roles, role: str, guidance: float = 1.0) -> Velocity:
            own = plain(roles, role, guidance)

            def call(x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
                return own(x, sigma, condition) + torch.where(sigma == 0.75, 0.01, 0.0)[:, None, None, None]

            return call

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Roles, "velocity", velocity)
            return inner(self, requests)

    monkeypatch.setattr(LocalEngine, "generate", off)
    gaps = probe(flow_grpo())
    assert [gap.velocity_mean for gap in gaps] == pytest.approx([0, 0, 0.01, 0], abs=1e-6)
    assert [gap.log_prob_max == 0 for gap in gaps] == [True, True, False, False]


def test_the_table_and_the_json_hold_the_same_numbers(flow_grpo: MakeRun) -> None:
    gaps = probe(flow_grpo())
    assert json.loads(as_json(gaps))["steps"] == [dataclasses.asdict(gap) for gap in gaps]
    last = table(gaps).splitlines()[-1].split()
    assert last == ["3", "0.5000", "0", "0", "none", "none"]


def test_an_algorithm_that_samples_nothing_is_refused(flow_matching: MakeRun) -> None:
    with pytest.raises(ValueError, match="'flow_matching', which samples nothing"):
        probe(flow_matching())


def test_a_probe_of_a_replay_is_refused(flow_grpo: MakeRun) -> None:
    made = flow_grpo({"rollout.dump_every": 1, "num_cycles": 1})
    with build(made) as built:
        built.trainer.run_cycle()
    with pytest.raises(ValueError, match=r"rollout.replay: a probe samples afresh; leave it out"):
        probe(flow_grpo({"rollout.replay": made.output}))
