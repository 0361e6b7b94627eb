"""Online RL runs that must agree do agree: engine and trainer, any split of the rows, ratios over several updates."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sigmazero import seeds
from sigmazero.algorithms.flow_grpo import STEP_FIELDS, FlowGRPO
from sigmazero.algorithms.nft import Decoupled
from sigmazero.config import RunConfig
from sigmazero.launch.local import Built, build, use_threads
from sigmazero.models.roles import Roles
from sigmazero.records import Batch, Conditioning, Prompt, RolloutRequest, StepPlan, Trajectory
from sigmazero.sampler import rollout
from sigmazero.schedule import column, diffusers_sd3_grid
from sigmazero.training.phase import PhaseResult, run_phase
from tests.conftest import MakeRun

LORA = {"roles.storage": "lora", "roles.lora": {"rank": 4, "alpha": 8.0}}
STORAGES = pytest.mark.parametrize("storage", [{}, LORA], ids=["copy", "lora"])
MICRO_BATCHES = (1, 2, 3, 5, 8, 16, 32)

Make = Callable[[RunConfig], Built]


@pytest.fixture
def made() -> Generator[Make]:
    """Builds runs whose rewards end with the test, and whose threads become one again."""
    with contextlib.ExitStack() as stack:
        stack.callback(use_threads, 1)
        yield lambda config: stack.enter_context(build(config))


@torch.no_grad()
def move(built: Built, role: str, seed: int = 0, scale: float = 0.05) -> None:
    """A role away from the start, so that every adapter counts."""
    for i, value in enumerate(built.roles.parameters(role).values()):
        value += scale * seeds.normal(seed, "weight_init", [i], value.shape)[0]


def collected(built: Built, cycle: int = 0) -> tuple[list[Trajectory], dict[str, Batch]]:
    """The rollout of a cycle, and its feeds as the loop prepares them."""
    size = built.config.data.batch_size
    found = built.trainer.collector.collect(cycle * size, cycle)
    return found.trajectories, built.trainer._prepare(found, cycle)


def phase_of(built: Built, name: str) -> Any:
    return next(phase for phase in built.algorithm.phases if phase.name == name)


def passed(
    built: Built, name: str, feeds: Mapping[str, Batch], micro_batch: int
) -> tuple[dict[str, Tensor], PhaseResult]:
    """A phase of one update, and the gradient of the policy, caught where the optimizer would step."""
    optimizer, caught = built.trainer.optimizers["policy"], dict[str, Tensor]()

    def catch(norm: Tensor) -> float:
        caught.update({n: p.grad.clone() for n, p in optimizer.parameters.items() if p.grad is not None})
        return 0.0

    optimizer.step = catch  # pyright: ignore[reportAttributeAccessIssue]
    return caught, run_phase(phase_of(built, name), built.roles, built.trainer.optimizers, feeds, micro_batch)


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.fixture
def log_probs(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the trainer makes of transitions, a micro-batch after another."""
    seen: list[Tensor] = []
    inner = FlowGRPO._log_prob

    def spy(self: FlowGRPO, y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        value = inner(self, y, mean, std)
        seen.append(value.detach())
        return value

    monkeypatch.setattr(FlowGRPO, "_log_prob", spy)
    return seen


def as_recorded(trajectories: Sequence[Trajectory]) -> Tensor:
    """The engine's log-probs of stochastic steps, sorted: the metric compares each with its own."""
    return torch.stack([t.log_prob[t.log_prob.isfinite()] for t in trajectories]).flatten().sort().values


def assert_no_gap(
    built: Built, seen: list[Tensor], trajectories: Sequence[Trajectory], feeds: Mapping[str, Batch], micro: int
) -> None:
    """By the metric, and bit for bit between what was scored now and what the engine recorded."""
    seen.clear()
    metrics = run_phase(phase_of(built, "old"), built.roles, built.trainer.optimizers, feeds, micro).metrics
    assert metrics["train/log_prob_abs_diff_max"] == metrics["train/log_prob_mean_abs_diff"] == 0
    assert torch.equal(torch.cat(seen).sort().values, as_recorded(trajectories))


@STORAGES
@pytest.mark.parametrize("guidance", [1.0, 1.5])
@pytest.mark.parametrize("kind", ["sde", "cps", "dance"])
def test_b14_b33_the_trainer_scores_a_rollout_as_the_engine_did(
    flow_grpo: MakeRun, made: Make, log_probs: list[Tensor], kind: str, guidance: float, storage: dict[str, Any]
) -> None:
    changes = {"algorithm.kind": kind, "algorithm.guidance": guidance, "algorithm.updates": 2, **storage}
    built = made(flow_grpo(changes))
    move(built, "policy")
    trajectories, feeds = collected(built)
    assert as_recorded(trajectories).unique().numel() == 18
    for micro_batch in (5, 18):
        assert_no_gap(built, log_probs, trajectories, feeds, micro_batch)


@STORAGES
@pytest.mark.parametrize("threads", [1, 2])
def test_b14_b33_for_micro_batches_of_any_size_and_any_number_of_threads(
    flow_grpo: MakeRun, made: Make, log_probs: list[Tensor], threads: int, storage: dict[str, Any]
) -> None:
    """Of 36 transitions, so 32 and a remainder of 4 among them; the small ones on 6 of these."""
    built = made(flow_grpo({"data.batch_size": 12, "training.threads": threads, "algorithm.epochs": 2, **storage}))
    assert torch.get_num_threads() == threads
    move(built, "policy")
    trajectories, feeds = collected(built)
    few = {"rollout": feeds["rollout"].take([7, 2])}
    for micro_batch in MICRO_BATCHES:
        rows, given = (trajectories, feeds) if micro_batch > 8 else ([trajectories[7], trajectories[2]], few)
        assert_no_gap(built, log_probs, rows, given, micro_batch)


def test_b14_the_gap_is_seen_where_there_is_one(flow_grpo: MakeRun, made: Make) -> None:
    """The policy has moved behind the back of its version."""
    built = made(flow_grpo())
    _, feeds = collected(built)
    move(built, "policy", scale=1e-3)
    metrics = passed(built, "policy", feeds, 6)[1].metrics
    assert metrics["train/log_prob_abs_diff_max"] > metrics["train/log_prob_mean_abs_diff"] > 1e-5
    assert metrics["train/policy_ratio"] == 1


@STORAGES
def test_b33_b46_micro_batches_and_row_order_change_no_gradient(
    flow_grpo: MakeRun, made: Make, log_probs: list[Tensor], storage: dict[str, Any]
) -> None:
    """Of 36 transitions; and the backward pass scores them as the engine did."""
    built = made(flow_grpo({"data.batch_size": 12, **storage}))
    move(built, "policy")
    trajectories, feeds = collected(built)
    reference, whole = passed(built, "policy", feeds, 36)
    assert max(g.abs().max() for g in reference.values()) > 1e-3
    order = np.random.default_rng(0).permutation(12).tolist()
    permuted = {"rollout": feeds["rollout"].take(order)}
    sizes = (3, 8, 32) if storage else MICRO_BATCHES
    for given, micro_batch in (*((feeds, size) for size in sizes), (permuted, 5)):
        log_probs.clear()
        gradient, result = passed(built, "policy", given, micro_batch)
        assert_close(gradient, reference)
        assert result.metrics["train/log_prob_abs_diff_max"] == 0
        rows = trajectories if given is feeds else [trajectories[i] for i in order]
        assert torch.equal(torch.cat(log_probs).sort().values, as_recorded(rows))
        assert result.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-6)


def test_b46_two_groups_in_one_or_two_micro_batches(flow_grpo: MakeRun, made: Make) -> None:
    """Groups of unlike rewards: three live rows in one, and two of weight in the other."""
    built = made(flow_grpo({"algorithm.steps": {"strategy": "window", "count": 1, "range": [1, 2]}}))
    _, feeds = collected(built)
    uneven = torch.tensor([1.0, 1, 1, 1, 0, 1])
    feeds = {"rollout": feeds["rollout"].with_fields(weight=uneven, advantage=torch.tensor([2.0, -1, -1, 0.5, 9, -3]))}
    (one, whole), (two, split) = (passed(built, "policy", feeds, size) for size in (6, 3))
    assert_close(two, one)
    assert split.metrics["train/policy_loss"] == pytest.approx(whole.metrics["train/policy_loss"], rel=1e-6)
    assert whole.metrics["train/policy_loss"] == pytest.approx(-(2 - 1 - 1 + 0.5 - 3) / 5, rel=1e-6)


@STORAGES
def test_b35_steps_in_one_forward_equal_the_same_steps_one_by_one(
    flow_grpo: MakeRun, made: Make, log_probs: list[Tensor], storage: dict[str, Any]
) -> None:
    """Windows of two steps, another for each sample: the gradient is the mean of those of the two."""
    steps = {"strategy": "window", "count": 2, "range": [0, 5], "shared": "sample"}
    built = made(flow_grpo({"algorithm.num_steps": 6, "algorithm.steps": steps, **storage}))
    move(built, "policy")
    trajectories, feeds = collected(built)
    assert len({t.request.plan.sde for t in trajectories}) > 2
    together, _ = passed(built, "policy", feeds, 12)
    assert torch.equal(torch.cat(log_probs).sort().values, as_recorded(trajectories))
    log_probs.clear()
    batch = feeds["rollout"]
    numbers = [name for name in STEP_FIELDS if name in batch.fields]
    alone = []
    for i in range(2):
        own = {n: batch[n][:, [i]] for n in numbers} | {"latents": batch["latents"][:, i : i + 2]}
        alone.append(passed(built, "policy", {"rollout": batch.with_fields(**own)}, 6)[0])
    assert torch.equal(torch.cat(log_probs).sort().values, as_recorded(trajectories))
    assert_close(together, {name: (alone[0][name] + alone[1][name]) / 2 for name in together})


@pytest.mark.parametrize("name", ["flow_grpo", "nft"])
def test_b46_weight_0_leaves_a_row_out_of_value_and_denominator(
    flow_grpo: MakeRun, nft: MakeRun, made: Make, name: str
) -> None:
    built = made({"flow_grpo": flow_grpo, "nft": nft}[name]())
    if name == "nft":
        move(built, "policy")
    _, feeds = collected(built)
    batch = feeds["rollout"].with_fields(advantage=torch.tensor([1.0, -2, 0.5, 3, -1, 1]))
    kept = [0, 1, 3, 5]
    weight = torch.zeros(6).index_fill(0, torch.tensor(kept), 1)
    field = "latents" if name == "flow_grpo" else "x0"
    spoilt = batch[field].clone()
    spoilt[[2, 4]] = 1e4
    wanted, few = passed(built, "policy", {"rollout": batch.take(kept)}, 12)
    found, all_rows = passed(built, "policy", {"rollout": batch.with_fields(weight=weight, **{field: spoilt})}, 4)
    assert_close(found, wanted)
    assert all_rows.metrics == pytest.approx(few.metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "storage"), [("log_prob", {}), ("log_prob", LORA), ("guard", {})], ids=["copy", "lora", "guard"]
)
def test_b14_b33_a_learning_rate_of_0_leaves_every_ratio_at_exactly_1(
    flow_grpo: MakeRun, made: Make, ratio: str, storage: dict[str, Any]
) -> None:
    """Four updates over two epochs, each with other rows in its micro-batches than the pass that made the old ones."""
    changes = {"algorithm.updates": 2, "algorithm.epochs": 2, "algorithm.clip": 1e-9, "algorithm.ratio": ratio}
    built = made(flow_grpo({"optimizers.policy": {"lr": 0.0, "micro_batch": 4}, **changes, **storage}))
    move(built, "policy")
    metrics = built.trainer.run_cycle()
    assert metrics["train/policy_ratio"] == 1
    assert metrics["train/policy_ratio_deviation_max"] == metrics["train/policy_clip_fraction"] == 0
    assert metrics["train/log_prob_abs_diff_max"] == 0
    assert built.trainer.optimizers["policy"].steps == 4


def plain_log_probs(built: Built, steps: Sequence[tuple[Trajectory, int]]) -> list[float]:
    """Of recorded ``sde`` steps under the policy as it is now: math §3 in float64, from the trajectories alone."""
    x, y = (np.stack([t.latent(i + k).double().numpy() for t, i in steps]) for k in (0, 1))
    with torch.no_grad():
        condition = built.roles.model.encode([t.request.prompt.text for t, _ in steps])
        sigma = torch.stack([t.sigmas[i] for t, i in steps])
        v = built.roles.velocity("policy")(torch.from_numpy(x).float(), sigma, condition).double().numpy()
    found = []
    for row, (t, i) in enumerate(steps):
        now, after, second = (float(t.request.sigmas[k]) for k in (i, i + 1, 1))
        level = t.request.eta * math.sqrt(now / (1 - (second if now == 1 else now)))
        drift = level**2 / (2 * now) * (x[row] + (1 - now) * v[row]) + v[row]
        std = level * math.sqrt(now - after)
        z = (y[row] - x[row] - drift * (after - now)) / std
        found.append(float((-(z**2) / 2 - math.log(std) - math.log(2 * math.pi) / 2).mean()))
    return found


@pytest.mark.parametrize("old_log_prob", ["trainer", "rollout"])
@pytest.mark.parametrize(("updates", "epochs"), [(1, 2), (2, 2)])
def test_b14_later_ratios_are_those_of_now_to_the_stored_log_probs(
    flow_grpo: MakeRun, made: Make, monkeypatch: pytest.MonkeyPatch, old_log_prob: str, updates: int, epochs: int
) -> None:
    """And the first update's are exactly 1. The second implementation speaks at each update, of the same weights."""
    changes = {"algorithm.updates": updates, "algorithm.epochs": epochs, "algorithm.old_log_prob": old_log_prob}
    built = made(flow_grpo(changes))
    assert isinstance(built.algorithm, FlowGRPO)
    rows: dict[int, Trajectory] = {}
    ratios: list[tuple[int, Tensor, list[float]]] = []
    inner, collect = FlowGRPO._improve, built.trainer.collector.collect

    def collecting(first: int, cycle: int) -> Any:
        found = collect(first, cycle)
        rows.update({t.request.sample: t for t in found.trajectories})
        return found

    def spy(self: FlowGRPO, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        out, own = inner(self, roles, batch), [rows[sample] for sample in batch["sample"].tolist()]
        steps = [(t, int((t.sigmas == sigma).nonzero())) for t, sigma in zip(own, batch["sigma"], strict=True)]
        new = zip(plain_log_probs(built, steps), steps, strict=True)
        ratios.append(
            (roles.versions["policy"], out["ratio"], [math.exp(p - float(t.log_prob[i])) for p, (t, i) in new])
        )
        return out

    monkeypatch.setattr(built.trainer.collector, "collect", collecting)
    monkeypatch.setattr(FlowGRPO, "_improve", spy)
    for _ in range(2):
        built.trainer.run_cycle()
    count = updates * epochs
    assert [version for version, _, _ in ratios] == list(range(2 * count))
    for version, ratio, wanted in ratios:
        assert ratio.tolist() == pytest.approx(wanted, rel=1e-5)
        if version % count == 0:
            assert ratio.tolist() == [1] * len(ratio)
        else:
            assert (ratio - 1).abs().max() > 1e-3


def test_b38_the_engine_samples_the_old_policy_and_not_the_trained_one(nft: MakeRun, made: Make) -> None:
    for storage in ({}, LORA):
        built = made(nft(storage))
        move(built, "policy", seed=1)
        move(built, "old", seed=2)
        trajectories, _ = collected(built)
        requests = [t.request for t in trajectories]
        assert {r.policy for r in requests} == {"old"}
        condition = built.roles.model.encode([r.prompt.text for r in requests])
        by_role = {}
        for role in ("old", "policy", "reference"):
            with torch.no_grad():
                found = rollout(built.roles.velocity(role), requests, condition, (3, 16, 16))
            by_role[role] = torch.stack([t.latents[-1] for t in found])
        sampled = torch.stack([t.latents[-1] for t in trajectories])
        assert torch.equal(sampled, by_role["old"])
        assert (sampled - by_role["policy"]).abs().mean() > 1e-3
        assert (sampled - by_role["reference"]).abs().mean() > 1e-3


@STORAGES
def test_b32_b38_the_old_policy_follows_once_a_rollout_and_the_average_at_every_update(
    nft: MakeRun, made: Make, monkeypatch: pytest.MonkeyPatch, storage: dict[str, Any]
) -> None:
    """Two updates a rollout. During them the old policy stands still; then it takes what the last one left."""
    built = made(nft({"algorithm.updates": 2, "algorithm.old_decay": {"slope": 0.1}, **storage}))
    assert isinstance(built.algorithm, Decoupled)
    ticks: list[tuple[str, str, float]] = []
    average = built.roles.average
    seen: list[str] = []
    inner = Decoupled._nft

    def spy(self: Decoupled, roles: Roles, batch: Batch) -> Mapping[str, Tensor]:
        seen.append(roles.fingerprint("old"))
        return inner(self, roles, batch)

    monkeypatch.setattr(built.roles, "average", lambda *given: (ticks.append(given), average(*given)))
    monkeypatch.setattr(Decoupled, "_nft", spy)
    old = {n: v.clone() for n, v in built.roles.parameters("old").items()}
    for cycle in range(3):
        before = built.roles.fingerprint("old")
        built.trainer.run_cycle()
        decay = min(0.1 * 2 * (cycle + 1), 0.5)
        policy = built.roles.parameters("policy")
        old = {n: decay * old[n] + (1 - decay) * policy[n].detach() for n in old}
        assert_close(built.roles.parameters("old"), old)
        assert set(seen) == {before}
        seen.clear()
    ema = [("policy_ema", "policy", min((1 + n) / (10 + n), 0.9)) for n in range(6)]
    wanted = [*ema[:2], ("old", "policy", 0.2), *ema[2:4], ("old", "policy", 0.4), *ema[4:], ("old", "policy", 0.5)]
    assert [tick[:2] for tick in ticks] == [tick[:2] for tick in wanted]
    assert [tick[2] for tick in ticks] == pytest.approx([tick[2] for tick in wanted])


@pytest.mark.parametrize(("kl_weight", "wanted"), [(0.0, 0), (0.5, 2)])
def test_b37_nft_calls_the_reference_only_where_it_weighs(
    nft: MakeRun, made: Make, kl_weight: float, wanted: int
) -> None:
    """Two training sigmas of six rows, in micro-batches of six."""
    built = made(nft({"algorithm.kl_weight": kl_weight, "optimizers.policy.micro_batch": 6}))
    asked: list[str | None] = []
    inner = built.roles.model.velocity

    def spy(net: torch.nn.Module, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        asked.append(built.roles._current)
        return inner(net, x, sigma, condition)

    built.roles.model.velocity = spy  # pyright: ignore[reportAttributeAccessIssue]
    metrics = built.trainer.run_cycle()
    assert asked.count("reference") == wanted
    assert asked.count("policy") == 2
    assert ("train/policy_reference_distance" in metrics) == bool(wanted)


@pytest.mark.parametrize(
    ("name", "storage"),
    [("nft", {}), ("nft", LORA), ("awm", {}), ("best_of_group", {}), ("dpo", {})],
    ids=["nft", "nft-lora", "awm", "best_of_group", "dpo"],
)
def test_b33_b46_micro_batches_and_row_order_change_no_gradient_of_nft_and_its_siblings(
    nft: MakeRun, made: Make, name: str, storage: dict[str, Any]
) -> None:
    own = {"nft": {"algorithm.kl_weight": 0.1}, "dpo": {"algorithm.beta": 0.5}}.get(name, {})
    built = made(nft({"algorithm.name": name, **own, **storage}))
    move(built, "policy")
    _, feeds = collected(built)
    reference, whole = passed(built, "policy", feeds, 12)
    assert max(g.abs().max() for g in reference.values()) > 1e-3
    batch = feeds["rollout"]
    backwards = {"rollout": batch.take(range(len(batch) - 1, -1, -1))}
    for given, micro_batch in ((feeds, 1), (feeds, 5), (feeds, 8), (backwards, 5)):
        gradient, result = passed(built, "policy", given, micro_batch)
        assert_close(gradient, reference)
        assert result.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-6)


def test_b38_a_rollout_without_a_difference_makes_no_update(nft: MakeRun, made: Make) -> None:
    for name in ("nft", "awm", "best_of_group", "dpo"):
        built = made(nft({"algorithm.name": name}))
        found = built.trainer.collector.collect(0, 0)
        assert found.scores is not None
        flat = dataclasses.replace(found.scores, total=torch.full((6,), 0.3, dtype=torch.float64))
        feeds = built.trainer._prepare(dataclasses.replace(found, scores=flat), 0)
        gradient, result = passed(built, "policy", feeds, 6)
        assert (result.empty, result.stepped, result.skipped) == (1, 0, 0)
        assert gradient == {}


def final(kind: str, velocity: Callable[[Tensor, Tensor, Conditioning], Tensor], size: int) -> Tensor:
    """Eight samples of ``size x size`` elements after ten steps as diffusers spaces them, all of them stochastic."""
    plan, prompt = StepPlan(None, (10,), None), Prompt(0, "")
    requests = [
        RolloutRequest(i, 0, prompt, "policy", diffusers_sd3_grid(10), kind, 0.7, 1.0, 0, plan) for i in range(8)
    ]
    found = rollout(velocity, requests, Conditioning({"tokens": torch.zeros(8, 1)}), (1, size, size))
    return torch.stack([t.latents[0] for t in found])


@pytest.mark.parametrize(("kind", "residual"), [("sde", 0.0618), ("cps", 0.0), ("ode", 0.0)])
def test_b34_what_ten_steps_leave_of_the_noise_on_a_point_mass(kind: str, residual: float) -> None:
    """The velocity to the point .6 is known exactly: ``(x - .6) / sigma``."""
    error = final(kind, lambda x, sigma, condition: (x - 0.6) / column(sigma, x), 360 if residual else 50) - 0.6
    if residual:
        assert error.std().item() == pytest.approx(residual, abs=5e-5)
        assert error.mean().item() == pytest.approx(0, abs=2e-4)
    else:
        assert error.abs().max() < 1e-5


def test_normal_data_ends_at_variance_one_half_under_cps() -> None:
    def velocity(x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        return column((2 * sigma - 1) / ((1 - sigma) ** 2 + sigma**2), x) * x

    assert final("cps", velocity, 200).var().item() == pytest.approx(0.50, abs=0.005)
