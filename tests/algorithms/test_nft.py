"""NFT and its siblings without a network: what is drawn, which rows are kept, what each loss is (math §5)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmazero import seeds
from sigmazero.algorithms import nft as algorithm
from sigmazero.algorithms.nft import HIGH, LOW, Decoupled, old_decay
from sigmazero.config import OldDecayConfig
from sigmazero.records import Batch, Conditioning, Prompt, Scores, Trajectory
from sigmazero.schedule import sigma_grid
from tests.conftest import MakeRun

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "flow_rl.json").read_text())["nft_decay"]
SHAPE = (2, 4, 4)
NAN = math.nan


def built(make: MakeRun, **changes: Any) -> Decoupled:
    found = algorithm.build(make({f"algorithm.{name}": value for name, value in changes.items()}))
    assert isinstance(found, Decoupled)
    return found


def rollout(made: Decoupled, count: int, cycle: int = 0) -> list[Trajectory]:
    """Trajectories whose sample is filled with its own number."""
    prompts = [Prompt(s // made.group_size, "the number 42") for s in range(count)]
    requests = made.requests(prompts, range(count), cycle)
    nothing = torch.full((made.config.num_steps,), NAN)
    return [Trajectory(r, torch.full((1, *SHAPE), float(r.sample)), r.plan.ret, r.sigmas, nothing, 0) for r in requests]


def fed(made: Decoupled, rewards: Sequence[float], cycle: int = 0) -> Batch:
    total = torch.tensor(rewards, dtype=torch.float64)
    feeds = made.feeds(rollout(made, len(rewards), cycle), Scores({"mine": total}, total), None, cycle)
    assert list(feeds) == ["rollout"]
    return feeds["rollout"]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("0", {"slope": 0.0}), ("1", {}), ("2", {"start": 75, "slope": 0.0075, "cap": 0.999})],
)
def test_b32_decay_of_the_old_policy_against_the_oracle(kind: str, settings: dict[str, Any]) -> None:
    """Of the reference's three presets the second is the default."""
    decay = old_decay(OldDecayConfig(**settings))
    assert {n: decay(int(n)) for n in ORACLE[kind]} == pytest.approx(ORACLE[kind], rel=1e-5)


def test_b38_the_engine_is_asked_for_the_old_policy_and_its_siblings_for_the_policy(nft: MakeRun) -> None:
    roles = {name: {t.request.policy for t in rollout(built(nft, name=name), 6)} for name in ("nft", "awm")}
    assert roles == {"nft": {"old"}, "awm": {"policy"}}
    (request,) = {(t.request.kind, t.request.plan, t.request.guidance) for t in rollout(built(nft), 6)}
    assert request == ("ode", ((), (3,), None), 1.0)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_stratified_sigmas_lie_one_in_each_stratum(nft: MakeRun, shift: float) -> None:
    made = built(nft, num_timesteps=8, shift=shift)
    sigma = made._sigmas(range(200), 3)
    assert sigma.shape == (200, 8)
    assert sigma.dtype == torch.float32
    edges = torch.tensor([shift * u / (1 + (shift - 1) * u) for u in (k / 8 for k in range(9))]).clamp(LOW, HIGH)
    assert (sigma >= edges[:-1] - 1e-6).all()
    assert (sigma <= edges[1:] + 1e-6).all()
    u = sigma.double() / (shift - (shift - 1) * sigma.double())
    inner = u[:, 1:-2] * 8 % 1  # where in its stratum, of those that no clamp touches
    assert inner.mean().item() == pytest.approx(0.5, abs=0.03)
    assert inner.std().item() == pytest.approx(12**-0.5, abs=0.02)


def test_b38_stratified_sigmas_differ_by_cycle_sample_and_stratum_and_depend_on_no_batch(nft: MakeRun) -> None:
    made = built(nft, num_timesteps=4)
    first = made._sigmas(range(6), 0)
    drawn = torch.cat([made._sigmas(range(6), cycle) for cycle in range(5)])
    assert len(drawn.unique(dim=0)) == 30
    assert torch.equal(made._sigmas([4, 1], 0), first[[4, 1]])
    offsets = (first.double() / (3 - 2 * first.double())) * 4 % 1
    assert (offsets.std(1) > 0.01).all()


def test_num_timesteps_is_num_steps_unless_it_is_set(nft: MakeRun) -> None:
    assert built(nft, num_timesteps=None)._sigmas([0], 0).shape == (1, 3)
    assert fed(built(nft), [1, 2, 3])["sigma"].shape == (3, 2)


def test_full_timesteps_are_those_of_the_rollout(nft: MakeRun) -> None:
    made = built(nft, timesteps="full", num_timesteps=None)
    batch = fed(made, [1, 2, 3])
    assert torch.equal(batch["sigma"], rollout(made, 1)[0].sigmas[:-1].repeat(3, 1))
    assert torch.equal(batch["sigma"][0], sigma_grid(3, 3.0)[:-1])
    assert batch["step"].tolist() == [[0, 1, 2]] * 3


def test_updates_share_the_rows_and_each_rollout_draws_them_anew(nft: MakeRun) -> None:
    made = built(nft, updates=3)
    sets = [made.phases[0].rows(7, cycle) for cycle in range(4)]
    assert all(sorted(row for rows in parts for row in rows) == list(range(7)) for parts in sets)
    assert [sorted(map(len, parts)) for parts in sets] == [[2, 2, 3]] * 4
    assert len({tuple(map(tuple, parts)) for parts in sets}) > 1


@pytest.mark.parametrize("name", ["best_of_group", "dpo"])
def test_the_best_and_the_worst_of_each_group_are_taken(nft: MakeRun, name: str) -> None:
    made = built(nft, name=name)
    batch = fed(made, [2, 9, -1, 4, 3, 3.5, 1, 0.7, 0.5])
    assert batch["sample"].tolist() == [1, 3, 6]
    assert batch["x0"][:, 0, 0, 0].tolist() == [1, 3, 6]
    assert batch["worst"][:, 0, 0, 0].tolist() == [2, 4, 8]
    assert [p.id for p in batch.prompts] == [0, 1, 2]
    assert batch["weight"].tolist() == batch["advantage"].tolist() == [1, 1, 1]
    assert torch.equal(batch["sigma"], made._sigmas([1, 3, 6], 0))


@pytest.mark.parametrize("name", ["best_of_group", "dpo"])
def test_b10_what_cannot_be_scored_is_neither_best_nor_worst(nft: MakeRun, name: str) -> None:
    """The second group has one score, the third none, the fourth three equal ones."""
    made = built(nft, name=name)
    batch = fed(made, [NAN, 2, 1, NAN, 7, math.inf, NAN, NAN, -math.inf, 0.3, 0.3, 0.3])
    assert batch["sample"].tolist() == [1]
    assert batch["worst"][0, 0, 0, 0].item() == 2
    assert batch["weight"].tolist() == [1]


@pytest.mark.parametrize("name", ["best_of_group", "dpo"])
@pytest.mark.parametrize("rewards", [[0.3] * 6, [NAN] * 6, [1, NAN, NAN, 2, 2, NAN]])
def test_b10_without_a_difference_in_any_group_nothing_has_weight(
    nft: MakeRun, name: str, rewards: list[float]
) -> None:
    batch = fed(built(nft, name=name), rewards)
    assert batch["weight"].tolist() == [0]
    assert batch["worst"].shape == batch["x0"].shape


@pytest.mark.parametrize("name", ["nft", "awm"])
def test_the_others_keep_every_row_with_its_advantage(nft: MakeRun, name: str) -> None:
    batch = fed(built(nft, name=name), [0, 2, NAN, 1, 1, 1])
    assert batch["sample"].tolist() == list(range(6))
    assert batch["advantage"].tolist() == pytest.approx([-1, 1, 0, 0, 0, 0], abs=2e-4)
    assert batch["weight"].tolist() == [1, 1, 0, 1, 1, 1]
    assert batch["x0"][:, 0, 0, 0].tolist() == list(range(6))


def roles(**factors: float) -> Any:
    """Roles whose velocity is a number times the latent; ``calls`` lists who was asked."""
    calls: list[str] = []

    def velocity(role: str, guidance: float = 1.0) -> Any:
        calls.append(role)
        return lambda x, sigma, condition: factors[role] * x

    return SimpleNamespace(velocity=velocity, calls=calls)


def item(batch: Batch, step: int) -> Batch:
    """A step of every row, as the loop hands it to a term."""
    fields = {n: v[:, step] if n in ("sigma", "step") else v for n, v in batch.fields.items()}
    return Batch(fields, batch.prompts, Conditioning({"tokens": torch.zeros(len(batch), 1)}))


def errors(made: Decoupled, batch: Batch, x0: Tensor, factor: float, cycle: int) -> list[float]:
    """``mean_D (v - (eps - x0))^2`` of each row, by hand in float64 with noise of its own ids."""
    found: list[float] = []
    for row in range(len(batch)):
        ids = [int(batch["sample"][row])], SHAPE, cycle, int(batch["step"][row])
        eps, clean = seeds.normal(made.seed, "train_noise", *ids)[0].double(), x0[row].double()
        s = batch["sigma"][row].double()
        found.append(float(((factor * ((1 - s) * clean + s * eps) - (eps - clean)) ** 2).mean()))
    return found


def test_awm_is_flow_matching_times_the_advantage(nft: MakeRun) -> None:
    made = built(nft, name="awm")
    batch = item(fed(made, [0, 2, 1, 1, 5, 1], cycle=4), 1)
    out = made.phases[0].terms["rollout"](roles(policy=0.7), batch)
    by_hand = errors(made, batch, batch["x0"], 0.7, 4)
    assert out["loss"].tolist() == pytest.approx(
        [a * e for a, e in zip(batch["advantage"].tolist(), by_hand, strict=True)], rel=1e-4, abs=1e-5
    )
    assert out["velocity_error"].tolist() == pytest.approx(by_hand, rel=1e-5)


def test_best_of_group_is_plain_flow_matching_on_the_best(nft: MakeRun) -> None:
    made = built(nft, name="best_of_group")
    batch = item(fed(made, [0, 2, 1, 1, 5, 1]), 0)
    out = made.phases[0].terms["rollout"](roles(policy=0.7), batch)
    assert out["loss"].tolist() == pytest.approx(errors(made, batch, batch["x0"], 0.7, 0), rel=1e-5)


def test_dpo_compares_both_samples_of_a_pair_at_one_sigma_and_one_noise(nft: MakeRun) -> None:
    made = built(nft, name="dpo", beta=0.05)
    batch = item(fed(made, [0, 2, 1, 1, 5, 1]), 1)
    spy = roles(policy=0.7, reference=0.4)
    out = made.phases[0].terms["rollout"](spy, batch)
    gains = []
    for x0 in (batch["x0"], batch["worst"]):
        policy, reference = (errors(made, batch, x0, factor, 0) for factor in (0.7, 0.4))
        gains.append([a - b for a, b in zip(policy, reference, strict=True)])
    margin = [worst - best for best, worst in zip(*gains, strict=True)]
    assert out["margin"].tolist() == pytest.approx(margin, rel=1e-3, abs=1e-4)
    assert out["loss"].tolist() == pytest.approx([math.log(1 + math.exp(-0.05 * m)) for m in margin], rel=1e-4)
    assert out["preferred"].tolist() == [float(m > 0) for m in margin]
    assert sorted(spy.calls) == ["policy", "policy", "reference", "reference"]


def test_nft_term_is_its_loss_and_the_distance_to_the_start(nft: MakeRun) -> None:
    """With the reference at ``.1 x`` the distance is ``mean ((.7 - .1) x)^2``."""
    batch = item(fed(built(nft), [0, 2, 1, 1, 5, 1]), 0)
    outs = []
    for weight in (0.0, 0.5):
        made, spy = built(nft, kl_weight=weight), roles(policy=0.7, old=0.6, reference=0.1)
        outs.append(made.phases[0].terms["rollout"](spy, batch))
        assert spy.calls == ["policy", "old", "reference"][: 3 if weight else 2]
        assert made.phases[0].calls == ("policy", "old", "reference")[: 3 if weight else 2]
    x, _ = made._noised(batch, batch["x0"])
    distance = 0.36 * (x**2).mean((1, 2, 3))
    torch.testing.assert_close(outs[1]["loss"] - outs[0]["loss"], 0.5 * distance, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outs[1]["reference_distance"], distance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outs[0]["old_distance"], 0.1 * x.abs().mean((1, 2, 3)), rtol=1e-4, atol=1e-5)
    assert "reference_distance" not in outs[0]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"beta": 0.0}, "algorithm.beta is 0"),
        ({"advantage_range": 0.0}, "algorithm.advantage_range is 0"),
        ({"num_timesteps": 0}, "algorithm.num_timesteps is 0"),
        ({"updates": 0}, "algorithm.updates is 0"),
        ({"updates": 7}, "algorithm.updates is 7, and a rollout has 6 rows"),
        ({"timesteps": "full"}, "num_timesteps does nothing with timesteps full"),
        ({"old_decay": {"cap": 1.0}}, "algorithm.old_decay.cap is 1"),
        ({"kl_weight": -1.0}, "algorithm.kl_weight is -1"),
    ],
)
def test_b38_settings_that_cannot_work_are_refused(nft: MakeRun, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        built(nft, **changes)


def test_b37_the_kl_of_a_known_shift_in_velocity(nft: MakeRun) -> None:
    """Velocities that differ by .1: ``(d mu)^2 / (2 std^2)`` of the sde step, by hand in fp64, times the elements."""
    made = built(nft, kl_every=1, num_steps=3, shift=1.0)
    trajectories = rollout(made, 3)
    scores = Scores({}, torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))
    batch = made.feeds(trajectories, scores, None, 0)["rollout"].with_condition(
        Conditioning({"none": torch.zeros(3, 1)})
    )
    assert [name for name in batch.fields if name.startswith("kl_")] == list(algorithm.KL_FIELDS)
    phase = made.phases[-1]
    assert (phase.name, phase.every, phase.updates) == ("kl", 1, ())
    velocities = {"policy": 0.1, "reference": 0.0}
    roles: Any = SimpleNamespace(velocity=lambda role: lambda x, *_: torch.full_like(x, velocities[role]))
    for i, (now, after) in enumerate(((1.0, 2 / 3), (2 / 3, 1 / 3))):
        item = batch.with_fields(**{name: batch[name][:, i] for name in algorithm.KL_FIELDS})
        out = phase.terms["rollout"](roles, item)
        level = 0.7 * math.sqrt(now / (1 - (2 / 3 if now == 1 else now)))
        shift = (1 + level**2 * (1 - now) / (2 * now)) * (after - now) * 0.1
        wanted = shift**2 / (2 * level**2 * (now - after))
        assert out["mean"].tolist() == pytest.approx([wanted] * 3, rel=1e-4)
        assert out["nats"].tolist() == pytest.approx([wanted * math.prod(SHAPE)] * 3, rel=1e-4)
    assert not set(batch["kl_step"].flatten().tolist()) & set(batch["step"].flatten().tolist())
