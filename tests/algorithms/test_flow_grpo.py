"""Flow-GRPO's plans, feeds and terms, and what is refused before a model is loaded (math §4)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmazero import seeds, transition
from sigmazero.algorithms import flow_grpo as algorithm
from sigmazero.algorithms.flow_grpo import STEP_FIELDS, FlowGRPO
from sigmazero.config import RunConfig
from sigmazero.launch import local
from sigmazero.records import Batch, Conditioning, Prompt, Scores, Trajectory
from sigmazero.schedule import column, sigma_grid
from tests.conftest import MakeRun

SHAPE = (3, 4, 4)
D = 48
NAN = math.nan
LORA = {"roles.storage": "lora", "roles.lora": {"rank": 4, "alpha": 8.0}}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that a test registers are gone afterwards."""
    monkeypatch.setattr(transition, "_KERNELS", {})


def built(config: RunConfig) -> FlowGRPO:
    found = algorithm.build(config)
    assert isinstance(found, FlowGRPO)
    return found


def stepping(make: MakeRun, **steps: Any) -> FlowGRPO:
    """Ten steps of shift 3, six samples a cycle in groups of three, some of the steps stochastic."""
    return built(make({"algorithm.num_steps": 10, "algorithm.steps": steps}))


def plugin(folder: Path, body: str, arguments: str = "sample, num_steps, seed") -> str:
    path = folder / "mine.py"
    path.write_text(f"def mine({arguments}):\n    {body}\n")
    return f"{path}:mine"


def plans(made: FlowGRPO, count: int) -> list[tuple[int, ...]]:
    """Stochastic steps of samples 0 on; what comes back is the latents around them and the sample."""
    found: list[tuple[int, ...]] = []
    for sample in range(count):
        sde, ret, stop = made.plan(sample)
        assert stop is None
        assert sde
        assert ret == tuple(sorted({*sde, *(i + 1 for i in sde), made.config.num_steps}))
        found.append(sde)
    return found


def test_by_default_every_step_but_the_last_is_stochastic(flow_grpo: MakeRun) -> None:
    assert set(plans(stepping(flow_grpo), 20)) == {tuple(range(9))}


@pytest.mark.parametrize("inside", [(2, 7), None])
def test_windows_lie_inside_their_range_and_reach_both_ends(flow_grpo: MakeRun, inside: tuple[int, int] | None) -> None:
    """Without one the last step is left out."""
    made = stepping(flow_grpo, strategy="window", count=2, shared="sample", **({"range": inside} if inside else {}))
    low, high = inside or (0, 9)
    assert set(plans(made, 200)) == {(i, i + 1) for i in range(low, high - 1)}


def test_b35_a_window_in_sigma_starts_its_steps_there(flow_grpo: MakeRun) -> None:
    made = stepping(flow_grpo, strategy="window", count=2, sigmas=[0.5, 0.9], shared="sample")
    grid = sigma_grid(10, 3.0)
    steps = sorted({i for sde in plans(made, 200) for i in sde})
    assert steps == [i for i in range(10) if 0.5 <= grid[i] <= 0.9]
    assert len(steps) > 3


@pytest.mark.parametrize(("shared", "size"), [("sample", 1), ("group", 3), ("cycle", 6), (None, 6)])
@pytest.mark.parametrize("how", [{"strategy": "window"}, {"strategy": "choice", "candidates": [0, 2, 4, 5, 7]}])
def test_draws_are_shared_by_sample_group_or_cycle(
    flow_grpo: MakeRun, shared: str | None, size: int, how: dict[str, Any]
) -> None:
    made = stepping(flow_grpo, count=2, **how, **({"shared": shared} if shared else {}))
    found = plans(made, 120)
    parts = [set(found[k : k + size]) for k in range(0, 120, size)]
    assert {len(part) for part in parts} == {1}
    assert len(set.union(*parts)) >= 5
    assert any(a != b for a, b in itertools.pairwise(parts))


def test_a_choice_takes_any_of_its_candidates_and_nothing_else(flow_grpo: MakeRun) -> None:
    made = stepping(flow_grpo, strategy="choice", candidates=[1, 4, 6], count=2, shared="sample")
    assert set(plans(made, 100)) == {(1, 4), (1, 6), (4, 6)}


def test_a_moving_window_moves_every_so_many_cycles(flow_grpo: MakeRun) -> None:
    made = stepping(flow_grpo, strategy="moving_window", count=2, range=[1, 5], move_every=2)
    assert plans(made, 48) == [(1, 2)] * 12 + [(2, 3)] * 12 + [(3, 4)] * 24


def test_requests_carry_the_settings_and_groups_go_by_sample(flow_grpo: MakeRun) -> None:
    made = built(flow_grpo({"algorithm.kind": "cps", "algorithm.eta": 0.4, "algorithm.guidance": 1.5, "seed": 9}))
    prompts = [Prompt(i // 3, "the number 42") for i in range(4, 10)]
    requests = made.requests(prompts, range(4, 10), 7)
    assert [(r.sample, r.cycle, r.group, r.seed) for r in requests] == [(s, 7, s // 3, 9) for s in range(4, 10)]
    assert {(r.kind, r.eta, r.guidance, r.policy) for r in requests} == {("cps", 0.4, 1.5, "policy")}
    assert torch.equal(requests[0].sigmas, sigma_grid(4, 3.0))


BROKEN_STRATEGIES = {
    "return 1 / 0": "division by zero",
    "return (1,), (1, 2), None, 5": r"a step strategy returns \(sde, ret, stop\)",
    "return (1,), (1,), None": r"latents \[2\], which are not in ret",
    "return None, (4,), None": "needs named stochastic steps and no stop",
    "return (0,), (0, 1, 2), 1": "needs named stochastic steps and no stop",
    "return (), (4,), None": r"none of its steps \(\) of 4 has a log-probability",
    "return (-1,), (0, 4), None": "sde is",
}


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(local, "load_model", load)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kind": "ode"}, "kind is 'ode'.*set kind to sde, cps or dance"),
        ({"eta": 0.0}, "eta 0.0: a rollout without noise"),
        ({"kind": "cps", "eta": 1.5}, r"eta is 1.5; with cps it lies in \(0, 1\]"),
        ({"kind": "heun"}, "algorithm.kind is 'heun'; known are sde, cps, dance"),
        ({"num_steps": 1}, r"none of its steps \(\) of 1 has a log-probability"),
        (
            {"kind": "cps", "steps": {"strategy": "window", "count": 2, "range": [1, 4]}},
            "may draw step 3 of 4, which has",
        ),
        ({"kind": "cps", "steps": {"strategy": "choice", "count": 1, "candidates": [0, 3]}}, "may draw step 3 of 4"),
        (
            {"kind": "cps", "steps": {"strategy": "moving_window", "count": 1, "range": [2, 4], "move_every": 1}},
            "may draw step 3 of 4",
        ),
        ({"steps": {"strategy": "fancy"}}, "algorithm.steps: strategy is 'fancy'; known are all, window"),
        ({"steps": {"strategy": "window", "count": 4}}, r"algorithm.steps: .*4 steps do not fit the range \[0, 3\)"),
        ({"steps": {"strategy": "window", "count": 1, "range": [2, 2]}}, "algorithm.steps: .*do not fit"),
        ({"steps": {"strategy": "window", "count": 1, "range": [0, 5]}}, r"range \[0, 5\) exceeds a schedule of 4"),
        ({"steps": {"strategy": "window", "count": 1, "sigmas": [0.1, 0.4]}}, "no step of 4 starts there"),
        ({"steps": {"strategy": "window"}}, "strategy 'window' needs count"),
        ({"steps": {"strategy": "all", "count": 2}}, "count does nothing with strategy 'all'"),
        (
            {"steps": {"strategy": "moving_window", "count": 1, "move_every": 1, "range": [0, 5]}},
            r"algorithm.steps: the range \[0, 5\) exceeds a schedule of 4 steps",
        ),
        ({"steps": {"strategy": "choice", "count": 3, "candidates": [0, 1]}}, "algorithm.steps: .*cannot choose 3"),
        ({"steps": {"strategy": "choice", "count": 1, "candidates": [0, 4]}}, "exceeds a schedule of 4 steps"),
        ({"score": "no_constants", "ratio": "guard"}, "score does nothing with ratio guard"),
        ({"old_log_prob": "rollout"}, "old_log_prob does nothing with one optimizer step"),
        ({"old_log_prob": "rollout", "ratio": "guard", "epochs": 2}, "rollouts record the normal density"),
        ({"old_log_prob": "rollout", "score": "no_constants", "epochs": 2}, "rollouts record the normal density"),
    ],
)
def test_b34_what_cannot_be_scored_is_refused_before_a_model_is_loaded(
    flow_grpo: MakeRun, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        local.build(flow_grpo({f"algorithm.{name}": value for name, value in changes.items()}))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("body", BROKEN_STRATEGIES)
def test_b50_a_strategy_that_cannot_work_is_named_before_a_model_is_loaded(
    flow_grpo: MakeRun, tmp_path: Path, body: str
) -> None:
    name = plugin(tmp_path, body)
    with pytest.raises(ValueError, match=BROKEN_STRATEGIES[body]) as caught:
        local.build(flow_grpo({"plugins": [name], "algorithm.steps.strategy": name}))
    assert "algorithm.steps.strategy" in str(caught.value)


KERNEL = "eta, x, v, sigma, sigma_next, sigma_guard"


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return x, None", "fails"),
        ("return x, -sigma", r"must return a finite mean \[b, ...\] like x and a finite std"),
        ("return x[:1], sigma", "must return"),
        ("return x, (sigma / (1 - sigma)) ** .5", "must return"),
        ("raise RuntimeError('not today')", "fails: not today"),
        ("return x, 0 * sigma", "has a log-probability"),
    ],
)
def test_b34_a_kernel_that_cannot_work_is_refused_before_a_model_is_loaded(
    flow_grpo: MakeRun, tmp_path: Path, body: str, complaint: str
) -> None:
    name = plugin(tmp_path, body, KERNEL)
    with pytest.raises(ValueError, match=complaint):
        local.build(flow_grpo({"plugins": [name], "algorithm.kind": name}))


PICTURE_KERNEL = """b, channels, height, width = x.shape
    step = (sigma - sigma_next).view(b, 1, 1, 1)
    return x - 1.1 * step * v, eta * (sigma - sigma_next) ** .5"""


def test_b14_a_kernel_of_ones_own_moves_the_rollout_and_scores_it(flow_grpo: MakeRun, tmp_path: Path) -> None:
    """One that takes latents apart, as pictures."""
    name = plugin(tmp_path, PICTURE_KERNEL, KERNEL)
    with local.build(flow_grpo({"plugins": [name], "algorithm.kind": name, "algorithm.eta": 0.3})) as run:
        trajectories = run.trainer.collector.collect(0, 0).trajectories
        for _ in range(2):
            metrics = run.trainer.run_cycle()
            assert metrics["train/log_prob_abs_diff_max"] == 0
            assert metrics["train/policy_ratio"] == 1
            assert metrics["train/policy_grad_norm"] > 0
    t = trajectories[0]
    for i in range(3):
        noise = seeds.normal(0, "step_noise", [0], (3, 16, 16), 0, i)[0]
        step = t.sigmas[i] - t.sigmas[i + 1]
        drift = t.latent(i) + 0.3 * step.sqrt() * noise - t.latent(i + 1)  # = 1.1 * step * v
        z = 0.3 * step.sqrt() * noise
        by_hand = -0.5 * (z / (0.3 * step.sqrt())) ** 2 - (0.3 * step.sqrt()).log() - math.log(2 * math.pi) / 2
        assert drift.abs().mean() > 0.01
        assert t.log_prob[i].item() == pytest.approx(by_hand.mean().item(), rel=1e-5)


def recorded(made: FlowGRPO, count: int = 6, version: int = 0, **changed: Any) -> list[Trajectory]:
    """Trajectories whose latent i of sample s is ``100 s + i`` and whose log-prob of step i is ``-i - s / 10``."""
    prompts = [Prompt(s // made.group_size, "the number 42") for s in range(count)]
    found = []
    for r in made.requests(prompts, range(count), 2):
        num_steps = len(r.sigmas) - 1
        latents = torch.stack([torch.full(SHAPE, 100.0 * r.sample + i) for i in r.plan.ret])
        scored = [-i - r.sample / 10 if i in (r.plan.sde or ()) else NAN for i in range(num_steps)]
        request = dataclasses.replace(r, **changed)
        found.append(Trajectory(request, latents, r.plan.ret, r.sigmas, torch.tensor(scored), version))
    return found


def scores(count: int = 6) -> Scores:
    total = torch.arange(count, dtype=torch.float64) ** 2
    return Scores({"mine": total}, total)


def fed(made: FlowGRPO, trajectories: list[Trajectory] | None = None) -> Batch:
    given = recorded(made) if trajectories is None else trajectories
    return made.feeds(given, scores(len(given)), None, 2)["rollout"]


NUMBERS = ("sigma", "sigma_next", "log_prob")
OWN_WINDOWS = "w = ((1, 2), (7, 8))[sample % 2]; return w, (10, w[0], w[1], w[1] + 1), None"


def test_b35_windows_of_each_sample_are_fed_by_their_true_indices(flow_grpo: MakeRun, tmp_path: Path) -> None:
    name = plugin(tmp_path, OWN_WINDOWS)
    made = built(flow_grpo({"plugins": [name], "algorithm.num_steps": 10, "algorithm.steps.strategy": name}))
    batch, grid = fed(made), sigma_grid(10, 3.0)
    for sample in range(6):
        first = (1, 7)[sample % 2]
        assert batch["latents"][sample, :, 0, 0, 0].tolist() == [100 * sample + first + i for i in range(3)]
        assert torch.equal(batch["sigma"][sample], grid[first : first + 2])
        assert torch.equal(batch["sigma_next"][sample], grid[first + 1 : first + 3])
        assert torch.equal(batch["log_prob"][sample], torch.tensor([-first, -first - 1]) - sample / 10)
    assert torch.equal(batch["guard"], grid[1].expand(6))
    assert {name: batch[name].shape[1] for name in STEP_FIELDS if name in batch.fields} == dict.fromkeys(NUMBERS, 2)
    assert batch["sample"].tolist() == list(range(6))
    assert batch["cycle"].tolist() == [2] * 6


def test_b35_steps_without_noise_are_not_fed(flow_grpo: MakeRun) -> None:
    """Steps 2 and 5 of a choice; also where the plan of a rollout names one that had none."""
    made = stepping(flow_grpo, strategy="choice", candidates=[5, 2], count=2)
    batch = fed(made)
    assert (batch["x"][:, :, 0, 0, 0] - 100 * torch.arange(6.0)[:, None]).tolist() == [[2, 5]] * 6
    assert (batch["y"][:, :, 0, 0, 0] - 100 * torch.arange(6.0)[:, None]).tolist() == [[3, 6]] * 6
    silent = [dataclasses.replace(t, log_prob=t.log_prob.index_fill(0, torch.tensor([2]), NAN)) for t in recorded(made)]
    left = fed(made, silent)["latents"][:, :, 0, 0, 0]
    assert (left - 100 * torch.arange(6.0)[:, None]).tolist() == [[5, 6]] * 6


def test_b35_samples_with_different_numbers_of_scored_steps_are_refused(flow_grpo: MakeRun, tmp_path: Path) -> None:
    name = plugin(tmp_path, "w = (1, 2)[: 1 + sample % 2]; return w, (1, 2, 3, 4), None")
    made = built(flow_grpo({"plugins": [name], "algorithm.steps.strategy": name}))
    prompts = [Prompt(0, "")] * 3
    assert [r.plan.sde for r in made.requests(prompts, range(3), 0)] == [(1,), (1, 2), (1,)]
    mixed = [dataclasses.replace(t, latent_indices=t.request.plan.ret) for t in recorded(made)]
    with pytest.raises(ValueError, match=r"gives \[1, 2\] scored steps in one cycle"):
        fed(made, mixed)


@pytest.mark.parametrize(("name", "other"), [("kind", "cps"), ("eta", 0.3), ("guidance", 1.5)])
def test_b41_a_rollout_of_other_settings_is_refused(flow_grpo: MakeRun, name: str, other: Any) -> None:
    made = built(flow_grpo())
    one = [*recorded(made)[:5], recorded(made, version=-1, **{name: other})[5]]
    with pytest.raises(ValueError, match=f"the rollout was made with {name} {other!r}, and algorithm.{name} is"):
        fed(made, one)
    assert len(fed(made)) == 6


def test_b41_a_replayed_run_refuses_a_dumped_rollout_of_another_guidance(flow_grpo: MakeRun, tmp_path: Path) -> None:
    with local.build(flow_grpo({"rollout.dump_every": 1, "output": str(tmp_path / "first")})) as run:
        run.trainer.run_cycle()
    again = {"rollout.replay": str(tmp_path / "first")}
    with local.build(flow_grpo(again)) as run:
        assert run.trainer.run_cycle()["train/policy_grad_norm"] > 0
    with pytest.raises(ValueError, match=r"made with guidance 1.0, and algorithm.guidance is 2.0"):
        local.build(flow_grpo({**again, "algorithm.guidance": 2.0}))


Velocity = Callable[[Tensor, Tensor], Tensor]


def roles(**velocities: Velocity) -> Any:
    """Roles with plain functions as velocities; ``calls`` lists who was asked, at what guidance."""
    calls: list[tuple[str, float]] = []

    def velocity(role: str, guidance: float = 1.0) -> Any:
        calls.append((role, guidance))
        return lambda x, sigma, condition: velocities[role](x, sigma)

    return SimpleNamespace(velocity=velocity, versions={"policy": 0}, calls=calls)


def times(factor: float, plus: float = 0.0) -> Velocity:
    return lambda x, sigma: factor * x + plus


def items(made: FlowGRPO, kind: str = "sde", version: int = 0) -> Batch:
    """Four transitions of one step each, drawn by a policy of velocity ``.5 x``, with their true log-probs."""
    grid = sigma_grid(4, 3.0)
    at = torch.tensor([0, 1, 2, 1])
    x = seeds.normal(0, "initial_noise", range(4), SHAPE)
    mean, std = transition.moments(kind, 0.7, x, 0.5 * x, grid[at], grid[at + 1], grid[1].expand(4))
    y = transition.step(mean, std, seeds.normal(0, "step_noise", range(4), SHAPE), torch.float32)
    fields = {
        "x": x, "y": y, "sigma": grid[at], "sigma_next": grid[at + 1], "guard": grid[1].expand(4),
        "log_prob": transition.log_prob(y, mean, std), "version": torch.full((4,), version),
        "advantage": torch.tensor([1.0, -2.0, 0.5, 0.0]), "sample": torch.arange(4), "weight": torch.ones(4),
    }  # fmt: skip
    return Batch(fields, (Prompt(0, ""),) * 4, Conditioning({"tokens": torch.zeros(4, 1)}))


def term(made: FlowGRPO, phase: str, who: Any, batch: Batch) -> Mapping[str, Tensor]:
    return next(p for p in made.phases if p.name == phase).terms["rollout"](who, batch)


def phases(made: FlowGRPO) -> list[tuple[str, tuple[str, ...], int]]:
    return [(p.name, p.calls, p.every) for p in made.phases]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"kl_every": 0}, [("policy", ("policy",), 1)]),
        ({"kl_every": 3}, [("kl", ("policy", "reference"), 3), ("policy", ("policy",), 1)]),
        ({"kl_every": 0, "kl_weight": 0.1}, [("policy", ("policy", "reference"), 1)]),
        ({"kl_every": 0, "epochs": 2}, [("old", ("policy",), 1), ("policy", ("policy",), 1)]),
        ({"kl_every": 0, "updates": 2}, [("old", ("policy",), 1), ("policy", ("policy",), 1)]),
        ({"kl_every": 0, "epochs": 2, "old_log_prob": "rollout"}, [("policy", ("policy",), 1)]),
    ],
)
def test_b37_phases_and_the_roles_they_run(flow_grpo: MakeRun, changes: dict[str, Any], wanted: object) -> None:
    assert phases(built(flow_grpo({f"algorithm.{name}": value for name, value in changes.items()}))) == wanted


@pytest.mark.parametrize("kind", ["sde", "dance", "cps"])
def test_b37_kl_of_a_known_shift_by_hand_and_as_flow_grpo_without_dt(flow_grpo: MakeRun, kind: str) -> None:
    """The policy's velocity is the reference's plus .2."""
    who = {"policy": times(0.5, 0.2), "reference": times(0.5)}
    found = {}
    for form in ("gaussian", "flow_grpo")[: 1 if kind == "cps" else 2]:
        made = built(flow_grpo({"algorithm.kind": kind, "algorithm.kl_weight": 0.5, "algorithm.kl_form": form}))
        found[form] = term(made, "policy", roles(**who), items(made, kind))["kl_penalty"]
    batch = items(made, kind)
    by_hand = []
    for s, t in zip(batch["sigma"].tolist(), batch["sigma_next"].tolist(), strict=True):
        if kind == "cps":
            std, slope = t * math.sin(0.35 * math.pi), t * math.cos(0.35 * math.pi) * (1 - s) - (1 - t) * s
        else:
            level = 0.7 if kind == "dance" else 0.7 * math.sqrt(s / (1 - (s if s < 1 else 0.9)))
            std, slope = level * math.sqrt(s - t), (1 + level**2 * (1 - s) / (2 * s)) * (t - s)
        by_hand.append((0.2 * slope) ** 2 / (2 * std**2))
    assert found["gaussian"].tolist() == pytest.approx(by_hand, rel=1e-4)
    if kind == "cps":
        with pytest.raises(ValueError, match="kl_form 'flow_grpo' does nothing"):
            flow_grpo({"algorithm.kind": kind, "algorithm.kl_weight": 0.5, "algorithm.kl_form": "flow_grpo"})
        return
    step = batch["sigma"] - batch["sigma_next"]
    torch.testing.assert_close(found["flow_grpo"], found["gaussian"] * step, rtol=1e-6, atol=0)


def test_b37_the_penalty_is_weighed_into_the_loss_and_measured_in_nats(flow_grpo: MakeRun) -> None:
    who = {"policy": times(0.5, 0.2), "reference": times(0.5)}
    plain, weighed = (built(flow_grpo({"algorithm.kl_weight": w, "algorithm.kl_every": 1})) for w in (0.0, 0.5))
    batch, spy = items(plain), roles(**who)
    first, second = term(plain, "policy", spy, batch), term(weighed, "policy", roles(**who), batch)
    assert "reference" not in dict(spy.calls)
    torch.testing.assert_close(second["loss"] - first["loss"], 0.5 * second["kl_penalty"], rtol=1e-4, atol=1e-6)
    measured = term(plain, "kl", roles(**who), batch)
    torch.testing.assert_close(measured["mean"], second["kl_penalty"])
    torch.testing.assert_close(measured["nats"], D * second["kl_penalty"])


def test_b37_the_reference_gets_no_gradient_and_the_policys_guidance(flow_grpo: MakeRun) -> None:
    made = built(flow_grpo({"algorithm.kl_weight": 0.5, "algorithm.guidance": 1.5}))
    factors = [torch.tensor(f, requires_grad=True) for f in (0.6, 0.5)]
    policy, reference = (lambda x, sigma, f=f: f * x for f in factors)
    who = roles(policy=policy, reference=reference)
    loss = term(made, "policy", who, items(made))["loss"].sum()
    on_policy, on_reference = torch.autograd.grad(loss, factors, allow_unused=True)
    assert on_policy.abs() > 0
    assert on_reference is None
    assert who.calls == [("policy", 1.5), ("reference", 1.5)]


def test_b37_adapters_that_start_at_zero_give_a_kl_of_exactly_zero(flow_grpo: MakeRun) -> None:
    config = flow_grpo({**LORA, "algorithm.kl_every": 1, "algorithm.kl_weight": 0.1, "optimizers.policy.lr": 0.0})
    with local.build(config) as run:
        for _ in range(2):
            metrics = run.trainer.run_cycle()
            assert metrics["train/kl_mean"] == metrics["train/kl_nats"] == metrics["train/policy_kl_penalty"] == 0
    with local.build(config.model_copy(update={"optimizers": flow_grpo().optimizers})) as run:
        assert run.trainer.run_cycle()["train/kl_nats"] == 0
        assert run.trainer.run_cycle()["train/kl_nats"] > 0


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"algorithm.kl_every": 0}, [0, 0]),
        ({"algorithm.kl_every": 0, **LORA}, [0, 0]),
        ({"algorithm.kl_every": 2, **LORA}, [1, 0]),
        ({"algorithm.kl_every": 0, "algorithm.kl_weight": 0.1, "algorithm.updates": 2}, [2, 2]),
    ],
)
def test_b37_calls_of_the_reference_in_two_cycles(
    flow_grpo: MakeRun, changes: dict[str, Any], wanted: list[int]
) -> None:
    config = flow_grpo(changes)
    with local.build(config) as run:
        asked: list[str | None] = []
        inner = run.roles.model.velocity

        def spy(net: torch.nn.Module, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
            asked.append(run.roles._current)
            return inner(net, x, sigma, condition)

        run.roles.model.velocity = spy  # pyright: ignore[reportAttributeAccessIssue]
        found = []
        for _ in range(2):
            asked.clear()
            run.trainer.run_cycle()
            assert "policy" in asked
            found.append(asked.count("reference"))
    assert found == wanted


def test_b14_a_rollouts_only_update_is_on_policy_whatever_was_recorded(flow_grpo: MakeRun) -> None:
    """The gap is a metric, not something to train on: the ratio is 1 though the log-probs are .001 apart."""
    made = built(flow_grpo())
    batch = items(made)
    out = term(made, "policy", roles(policy=times(0.5)), batch.with_fields(log_prob=batch["log_prob"] - 1e-3))
    assert out["ratio"].tolist() == [1] * 4
    assert out["clip_fraction"].tolist() == [0] * 4
    assert out["log_prob_abs_diff_max"].tolist() == pytest.approx([1e-3] * 4, rel=1e-2)


def test_a_replayed_rollout_is_compared_with_what_was_recorded(flow_grpo: MakeRun) -> None:
    """Of version -1, by a policy that has moved since; the gap says nothing of it."""
    for changes in ({}, {"algorithm.epochs": 2}):
        made = built(flow_grpo(changes))
        batch = items(made, version=-1)
        who = roles(policy=times(0.52))
        if changes:
            old = term(made, "old", who, batch)
            assert torch.equal(old["old_log_prob"], batch["log_prob"])
            assert old.keys() == {"old_log_prob"}
            batch = batch.with_fields(old_log_prob=old["old_log_prob"])
        out = term(made, "policy", who, batch)
        assert not {"log_prob_mean_abs_diff", "log_prob_abs_diff_max"} & out.keys()
        x, guard = batch["x"], batch["guard"]
        mean, std = transition.moments("sde", 0.7, x, 0.52 * x, batch["sigma"], batch["sigma_next"], guard)
        wanted = (transition.log_prob(batch["y"], mean, std) - batch["log_prob"]).exp()
        torch.testing.assert_close(out["ratio"], wanted)
        assert (wanted - 1).abs().max() > 1e-4


def test_guard_divides_its_loss_by_the_step_and_compares_means(flow_grpo: MakeRun) -> None:
    made = built(flow_grpo({"algorithm.ratio": "guard", "algorithm.updates": 2, "algorithm.clip": 0.5}))
    batch = items(made)
    old = term(made, "old", roles(policy=times(0.5)), batch)
    out = term(made, "policy", roles(policy=times(0.53)), batch.with_fields(**{n: old[n] for n in made._old_fields}))
    noise = seeds.normal(0, "step_noise", range(4), SHAPE)
    x, s, t, guard = (batch[name] for name in ("x", "sigma", "sigma_next", "guard"))
    (new, std), (before, _) = (transition.moments("sde", 0.7, x, f * x, s, t, guard) for f in (0.53, 0.5))
    wanted = (noise * (new - before)).mean((1, 2, 3)).exp()
    torch.testing.assert_close(out["ratio"], wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(out["loss"], -batch["advantage"] * wanted / (s - t), rtol=1e-5, atol=1e-7)
    assert (column(std, x) > 0).all()


@pytest.mark.parametrize("score", ["gaussian", "no_constants"])
def test_b16_both_scores_are_element_means_and_the_gap_stays_that_of_the_density(
    flow_grpo: MakeRun, score: str
) -> None:
    made = built(flow_grpo({"algorithm.score": score, "algorithm.epochs": 2, "algorithm.kind": "cps"}))
    batch = items(made, "cps")
    old = term(made, "old", roles(policy=times(0.5)), batch)
    assert old["log_prob_abs_diff_max"].tolist() == [0] * 4
    x, y, t = batch["x"], batch["y"], batch["sigma_next"]
    mean, std = transition.moments("cps", 0.7, x, 0.5 * x, batch["sigma"], t, batch["guard"])
    error = ((y - mean) ** 2).mean((1, 2, 3))
    plain = -error if score == "no_constants" else -error / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2
    torch.testing.assert_close(old["old_log_prob"], plain, rtol=1e-5, atol=1e-6)


def test_updates_and_epochs_share_the_rows(flow_grpo: MakeRun) -> None:
    made = built(flow_grpo({"algorithm.updates": 2, "algorithm.epochs": 3}))
    sets = made.phases[-1].rows(7, 0)
    assert [len(rows) for rows in sets] == [4, 3] * 3
    epochs = [(*sets[k], *sets[k + 1]) for k in (0, 2, 4)]
    assert [sorted(rows) for rows in epochs] == [list(range(7))] * 3
    assert len({*epochs, tuple(row for rows in made.phases[-1].rows(7, 1)[:2] for row in rows)}) == 4


def test_b14_gaps_and_ratios_are_also_logged_by_sigma(flow_grpo: MakeRun) -> None:
    with local.build(flow_grpo()) as run:
        metrics = run.trainer.run_cycle()
    for name in ("train/log_prob_mean_abs_diff", "train/policy_clip_fraction", "train/policy_ratio_deviation"):
        levels = [float(key.rpartition("_")[2]) for key in metrics if key.startswith(f"{name}/sigma_")]
        assert sorted(levels) == [0.75, 0.9, 1.0]
