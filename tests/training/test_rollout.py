"""Whole groups, dead ones replaced one for one, failures that cost their samples, rewards beside the sampling."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmazero.config import FunctionRewardConfig, RunConfig
from sigmazero.engines.base import Engine
from sigmazero.launch.local import Built, build
from sigmazero.records import Batch, Prompt, RolloutRequest, Trajectory
from sigmazero.rewards.base import Layout
from sigmazero.rewards.scorer import Scorer
from sigmazero.training import checkpoint, rollout
from sigmazero.training.phase import run_phase
from sigmazero.training.rollout import Collector, Rollout
from sigmazero.training.state import RoleOptimizer
from tests.conftest import MakeRun

SIZE = 3  # samples of a group; a cycle has two
NAN = math.nan
LIVE, DEAD = [0.0, 1.0, 5.0], [2.0, 2.0, 2.0]


class Captions:
    """A prompt a group, whose metadata name the group."""

    def prompts(self, samples: Sequence[int]) -> list[Prompt]:
        return [Prompt(g, f"the number {g % 100:02d}", {"group": g}) for g in samples]


class Twins:
    """One and the same prompt for every group."""

    def prompts(self, samples: Sequence[int]) -> list[Prompt]:
        return [Prompt(0, "the number 42", {"group": g}) for g in samples]


class Counting:
    """An engine that notes the samples of each request."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.asked = engine, list[list[int]]()

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        self.asked.append([request.sample for request in requests])
        return self.engine.generate(requests)

    def publish(self, policy: str, version: int) -> None:
        self.engine.publish(policy, version)

    @property
    def groups(self) -> list[list[int]]:
        """The groups of each request; every group is asked for whole and in order."""
        for samples in self.asked:
            assert samples == list(range(samples[0], samples[-1] + 1))
            assert (samples[0] % SIZE, len(samples) % SIZE) == (0, 0)
        return [[sample // SIZE for sample in samples[::SIZE]] for samples in self.asked]


class ByGroup:
    """A reward that gives the samples of a group what a function says of the group; a call is a group."""

    layout: Layout = "pil"
    size: tuple[int, int] | None = None

    def __init__(self, values: Callable[[int], Any]) -> None:
        self.values = values

    def check(self, prompt: Prompt) -> None:
        """Anything."""

    def __call__(self, pictures: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Any:
        groups = {entry["group"] for entry in metadata}
        assert len(groups) == 1
        assert len(prompts) == SIZE
        return self.values(groups.pop())


class Darkest(ByGroup):
    """The grey of the darkest pixel, and 256 times the group."""

    def __call__(self, pictures: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Any:
        grey = [picture.convert("L").getextrema()[0] for picture in pictures]
        return [value + 256 * entry["group"] for value, entry in zip(grey, metadata, strict=True)]


class Run:
    """A run whose groups get the rewards that a test wants."""

    def __init__(
        self, config: RunConfig, rewards: Mapping[str, tuple[Callable[[int], Any], Any]], prompts: Any
    ) -> None:
        self.built: Built = build(config)
        self.engine = Counting(self.built.engine)
        settings = {
            name: FunctionRewardConfig.model_validate(
                {"kind": "function", "function": "f", "batch_size": SIZE, **({} if own is None else own)}
            )
            for name, (_, own) in rewards.items()
        }
        made = {n: v if isinstance(v, ByGroup) else ByGroup(v) for n, (v, _) in rewards.items()}
        self.scorer = Scorer(made, settings)
        self.trainer = self.built.trainer
        self.trainer.collector = Collector(
            config, self.built.algorithm, self.built.roles.model, self.engine, prompts, self.scorer
        )

    def collect(self, first: int = 0, cycle: int = 0) -> Rollout:
        return self.trainer.collector.collect(first, cycle)

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.trainer.tensors().items()}


Start = Callable[..., Run]


@pytest.fixture
def start() -> Generator[Start]:
    """``start(config, mine=lambda group: LIVE, other=(values, {"weight": 0.0}))``"""
    runs: list[Run] = []

    def make(config: RunConfig, prompts: Any = None, **rewards: Any) -> Run:
        pairs = {name: given if isinstance(given, tuple) else (given, None) for name, given in rewards.items()}
        runs.append(Run(config, pairs, prompts or Captions()))
        return runs[-1]

    yield make
    for run in runs:
        run.scorer.close()


def dead(*groups: int) -> Callable[[int], list[float]]:
    return lambda group: DEAD if group in groups else LIVE


def kept(found: Rollout) -> list[int]:
    """The groups of a rollout, each of which must be whole and have one prompt."""
    requests = [t.request for t in found.trajectories]
    for i in range(0, len(requests), SIZE):
        group = requests[i : i + SIZE]
        assert [r.sample for r in group] == list(range(group[0].sample, group[0].sample + SIZE))
        assert {r.group for r in group} == {group[0].sample // SIZE} == {r.prompt.id for r in group}
        assert len({r.prompt.text for r in group}) == 1
    assert found.scores is not None
    assert len(found.scores.total) == len(requests)
    assert all(len(value) == len(requests) for value in found.scores.values.values())
    return [r.group for r in requests[::SIZE]]


@pytest.mark.parametrize("part", [1, 2, 3, 4, 64])
def test_groups_are_whole_and_share_a_prompt(
    flow_grpo: MakeRun, start: Start, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """However the samples are cut into parts; and every sample has the value of its own picture."""
    monkeypatch.setattr(rollout, "PART", part)
    run = start(flow_grpo(), mine=Darkest(lambda group: LIVE))
    found = run.collect(first=6, cycle=2)
    assert kept(found) == [2, 3]
    assert [len(asked) for asked in run.engine.asked] == [part] * (6 // part) + [6 % part] * (6 % part > 0)
    assert found.scores is not None
    latents = torch.stack([t.latents[-1] for t in found.trajectories])
    pictures = (run.built.roles.model.decode(latents).clamp(0, 1) * 255).round()
    grey = (pictures * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1).flatten(1).amin(1)
    wanted = grey + 256 * torch.tensor([2, 2, 2, 3, 3, 3])
    assert (found.scores.total - wanted).abs().max() <= 1


@pytest.mark.parametrize(
    ("max_refills", "killed", "asked", "left"),
    [
        (2, (), [[0, 1]], [0, 1]),
        (0, (1,), [[0, 1]], [0, 1]),
        (2, (1,), [[0, 1], [2]], [0, 2]),
        (2, (0,), [[0, 1], [2]], [1, 2]),
        (2, (0, 1), [[0, 1], [2, 3]], [2, 3]),
        (2, (1, 2), [[0, 1], [2], [3]], [0, 3]),
        (2, (0, 1, 3), [[0, 1], [2, 3], [4]], [2, 4]),
        (1, (1, 2), [[0, 1], [2]], [0]),
        (3, (1, 2, 3, 4), [[0, 1], [2], [3], [4]], [0]),
        (3, range(99), [[0, 1], [2, 3], [4, 5], [6, 7]], [0, 1]),
        (3, range(5), [[0, 1], [2, 3], [4, 5], [6]], [5, 6]),
    ],
)
def test_dead_groups_are_replaced_by_as_many(
    flow_grpo: MakeRun, start: Start, max_refills: int, killed: Any, asked: Any, left: Any
) -> None:
    """Round by round exactly the missing ones, so many rounds at most; where none is live, the first ones stay."""
    run = start(flow_grpo({"rollout.max_refills": max_refills}), mine=dead(*killed))
    found = run.collect()
    assert run.engine.groups == asked
    assert kept(found) == left
    assert found.scores is not None
    assert found.scores.total.tolist() == [v for g in left for v in (DEAD if g in killed else LIVE)]
    assert found.samples == range(SIZE * (asked[-1][-1] + 1))
    assert found.metrics["group/dead"] == sum(g in killed for g in (0, 1)) / 2
    assert found.metrics.get("group/refilled") == (sum(map(len, asked[1:])) if max_refills else None)


def test_metrics_are_of_everything_that_was_drawn(flow_grpo: MakeRun, start: Start) -> None:
    """The mean of a reward would rise by the filter alone if the replaced groups were left out."""
    found = start(flow_grpo({"rollout.max_refills": 1}), mine=dead(1)).collect()
    drawn = [*LIVE, *DEAD, *LIVE]
    assert found.metrics == {
        "reward/mine": pytest.approx(statistics.fmean(drawn)),
        "reward_std/mine": pytest.approx(statistics.pstdev(drawn)),
        "reward/failed": 0.0,
        "group/dead": 0.5,
        "group/std": pytest.approx(statistics.pstdev(LIVE) / 2),
        "group/refilled": 1.0,
    }


def test_b12_no_sample_index_is_used_twice(flow_grpo: MakeRun, start: Start, tmp_path: Path) -> None:
    """Over cycles with refills, and after a resume."""
    config = flow_grpo({"rollout.max_refills": 3, "num_cycles": 4})
    values = dead(1, 3, 6, 7, 8, 10)
    straight = start(config, mine=values)
    for _ in range(4):
        straight.trainer.run_cycle()
    asked = [sample for samples in straight.engine.asked for sample in samples]
    assert asked == list(range(straight.trainer.counters.samples)) == list(range(42))

    first, second = start(config, mine=values), start(config, mine=values)
    for _ in range(2):
        first.trainer.run_cycle()
    saved = checkpoint.load(checkpoint.save(tmp_path, 2, first.trainer.tensors(), first.trainer.numbers(), 1))
    second.trainer.restore(saved.tensors, saved.numbers)
    for _ in range(2):
        second.trainer.run_cycle()
    assert first.engine.asked + second.engine.asked == straight.engine.asked
    assert second.trainer.counters == straight.trainer.counters
    assert [n for n, value in straight.state().items() if not torch.equal(value, second.trainer.tensors()[n])] == []


@pytest.mark.parametrize(
    ("kind", "changes", "nothing"),
    [
        ("flow_grpo", {}, DEAD),
        ("flow_grpo", {"algorithm.updates": 2}, [NAN] * 3),
        ("nft", {"algorithm.old_decay": {"slope": 0.25}}, DEAD),
        ("nft", {}, [NAN, NAN, 1.0]),
    ],
    ids=["flow_grpo", "flow_grpo two updates no reward", "nft", "nft one reward"],
)
def test_b10_a_rollout_that_teaches_nothing_changes_nothing(
    request: pytest.FixtureRequest, start: Start, kind: str, changes: dict[str, Any], nothing: list[float]
) -> None:
    """The second of three cycles, every group of it dead: no weight, moment or average moves, and the run goes on."""
    config = request.getfixturevalue(kind)({**changes, "rollout.max_refills": 1, "rollout.max_failed": 1.0})
    run = start(config, mine=lambda group: nothing if 2 <= group < 6 else LIVE)
    run.trainer.run_cycle()
    before, numbers = run.state(), run.trainer.numbers()
    assert len(before) > 100
    metrics = run.trainer.run_cycle()
    after = run.trainer.tensors()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    assert run.engine.groups == [[0, 1], [2, 3], [4, 5]]
    assert metrics["train/policy_empty"] == config.algorithm.model_dump()["updates"]
    assert all(math.isfinite(value) for value in metrics.values())
    counters = numbers["counters"] | {"cycle": 2, "samples": 18}
    assert run.trainer.numbers() == {**numbers, "counters": counters}
    metrics = run.trainer.run_cycle()
    moved = [name for name, value in before.items() if not torch.equal(value, run.trainer.tensors()[name])]
    assert {name.split("/")[1] for name in moved} == {n.split("/")[1] for n in before}
    assert all(bool(torch.isfinite(value).all()) for value in run.trainer.tensors().values())
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_dead_group_that_stays_counts_in_the_denominator(flow_grpo: MakeRun, start: Start) -> None:
    """Beside a dead group a live one has half the weight that it has alone."""
    norms = {}
    for max_refills in (0, 1):
        run = start(flow_grpo({"rollout.max_refills": max_refills}), mine=lambda group: DEAD if group else LIVE)
        norms[max_refills] = run.trainer.run_cycle()["train/policy_grad_norm"]
    assert norms[0] == pytest.approx(norms[1] / 2, rel=1e-5)
    assert norms[0] > 0


def gradients(run: Run, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Of a policy phase over a batch, whose optimizer then stays where it is."""
    found: dict[str, Tensor] = {}

    def step(self: RoleOptimizer, norm: Tensor) -> float:
        found.update({name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None})
        return 0.0

    (phase,) = (p for p in run.built.algorithm.phases if p.updates)
    batch = batch.with_condition(run.built.roles.model.encode([p.text for p in batch.prompts]))
    with monkeypatch.context() as patch:
        patch.setattr(RoleOptimizer, "step", step)
        result = run_phase(phase, run.built.roles, run.trainer.optimizers, {"rollout": batch}, 4)
    assert result.stepped == 1
    return found


@pytest.mark.parametrize("kind", ["flow_grpo", "nft"])
def test_a_sample_without_a_reward_is_as_if_it_were_not_there(
    request: pytest.FixtureRequest, start: Start, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run = start(request.getfixturevalue(kind)(), mine=lambda group: [3.0, None, 1.0] if group else LIVE)
    found = run.collect()
    assert found.metrics["reward/failed"] == 1.0
    batch = run.built.algorithm.feeds(found.trajectories, found.scores, None, 0)["rollout"]
    assert batch["weight"].tolist() == [1, 1, 1, 1, 0, 1]
    deviation = 1.0 + 1e-4  # of 3 and 1, and epsilon
    assert batch["advantage"][3:].tolist() == pytest.approx([1 / deviation, 0.0, -1 / deviation])
    without = batch.take([0, 1, 2, 3, 5])
    mine, theirs = gradients(run, batch, monkeypatch), gradients(run, without, monkeypatch)
    assert mine.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    assert largest > 1e-4
    assert all(torch.allclose(mine[n], theirs[n], rtol=1e-4, atol=1e-5 * largest) for n in theirs)


def test_b21_groups_of_one_and_the_same_prompt_stay_apart(flow_grpo: MakeRun, start: Start) -> None:
    run = start(flow_grpo(), prompts=Twins(), mine=lambda group: [10.0 + v for v in LIVE] if group else LIVE)
    found = run.collect()
    advantage = run.built.algorithm.feeds(found.trajectories, found.scores, None, 0)["rollout"]["advantage"]
    wanted = [(v - 2) / (statistics.pstdev(LIVE) + 1e-4) for v in LIVE]
    assert advantage.tolist() == pytest.approx(wanted * 2, rel=1e-5)


def test_a_reward_is_normalised_over_the_cycle(
    flow_grpo: MakeRun, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not over a part of it or a call."""
    monkeypatch.setattr(rollout, "PART", SIZE)
    run = start(flow_grpo(), mine=(lambda group: [v + 9 * group for v in LIVE], {"normalize": "batch"}))
    found = run.collect()
    given = [v + 9 * group for group in (0, 1) for v in LIVE]
    wanted = [(v - statistics.fmean(given)) / (statistics.pstdev(given) + 1e-4) for v in given]
    assert found.scores is not None
    assert found.scores.total.tolist() == pytest.approx(wanted)
    assert found.scores.values["mine"].tolist() == given
    assert found.metrics["reward/mine"] == statistics.fmean(given)


def one_line(run: Run) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (each test checks the message)
        run.trainer.run_cycle()
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize(("max_failed", "stops"), [(0.0, True), (0.3, True), (1 / 3, False), (1.0, False)])
def test_b47_too_many_failures_stop_the_run(flow_grpo: MakeRun, start: Start, max_failed: float, stops: bool) -> None:
    """Two samples of six."""
    run = start(
        flow_grpo({"rollout.max_failed": max_failed}),
        watched=(lambda group: [None, "w", NAN], {"weight": 0.0}),
        mine=lambda group: [1.0, None, "x"] if group else LIVE,
    )
    if not stops:
        assert run.trainer.run_cycle()["reward/failed"] == 2.0
        return
    line = one_line(run)
    assert line.startswith(
        f"2 of 6 samples have no reward, more than rollout.max_failed allows ({max_failed:g} of them)"
    )
    assert "rewards.mine: None is no finite number; rewards.mine: 'x' is no finite number; " in line
    assert run.trainer.counters.cycle == 0


def test_failures_are_counted_over_the_cycle(flow_grpo: MakeRun, start: Start) -> None:
    """One of the three samples of a refill is one of nine; three more of twelve are too many."""
    config = flow_grpo({"rollout.max_refills": 2, "rollout.max_failed": 0.2})
    run = start(config, mine=lambda group: {1: DEAD, 2: [1.0, NAN, 2.0]}.get(group, LIVE))
    found = run.collect()
    assert kept(found) == [0, 2]
    assert found.metrics["reward/failed"] == 1.0
    run = start(config, mine=lambda group: {1: DEAD, 2: [1.0, NAN, 1.0], 3: [NAN, NAN, 1.0]}.get(group, LIVE))
    assert one_line(run).startswith("3 of 12 samples have no reward")


def test_a_group_without_any_reward_is_replaced(flow_grpo: MakeRun, start: Start) -> None:
    def values(group: int) -> list[float]:
        if group == 1:
            raise RuntimeError("out of memory")
        return LIVE

    found = start(flow_grpo({"rollout.max_refills": 2, "rollout.max_failed": 0.5}), mine=values).collect()
    assert kept(found) == [0, 2]
    assert found.metrics["reward/failed"] == 3.0


@pytest.mark.parametrize("weight", [0.0, {"a": 0.0, "b": 0.0}])
def test_a_watched_reward_never_stops_a_run(flow_grpo: MakeRun, start: Start, weight: Any) -> None:
    """Whatever it does; not a single failure is allowed, and the refill does without it too."""

    def fails(group: int) -> Any:
        if group == 0:
            raise SystemExit
        return [None, "text"] if group == 1 else {"a": [None] * 3}

    run = start(
        flow_grpo({"rollout.max_failed": 0.0, "rollout.max_refills": 1}),
        mine=dead(1),
        watched=(fails, {"weight": weight}),
    )
    metrics = run.trainer.run_cycle()
    assert metrics["reward/failed"] == 0.0
    assert not any(name.startswith("reward/watched") for name in metrics)
    assert metrics["train/policy_grad_norm"] > 0


def test_what_a_watched_reward_says_is_logged_and_no_more(flow_grpo: MakeRun, start: Start) -> None:
    found = start(flow_grpo(), mine=dead(), watched=(lambda group: [7.0, None, 9.0], {"weight": 0.0})).collect()
    assert found.scores is not None
    assert found.scores.total.tolist() == LIVE * 2
    assert (found.metrics["reward/watched"], found.metrics["reward_std/watched"]) == (8.0, 1.0)
    assert found.metrics["reward/failed"] == 0.0


def test_a_weight_that_does_not_fit_stops_the_first_rollout(flow_grpo: MakeRun, start: Start) -> None:
    run = start(flow_grpo(), mine=lambda group: {"a": LIVE, "b": LIVE})
    assert "set rewards.mine.weight={a: 1.0}" in one_line(run)


def test_rewards_run_while_the_next_part_is_sampled(
    flow_grpo: MakeRun, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score of part 1 comes only when part 2 is being sampled, whose sampling ends only when part 1 is scored."""
    monkeypatch.setattr(rollout, "PART", SIZE)
    sampling, scored = threading.Event(), threading.Event()

    def values(group: int) -> list[float]:
        if group == 0:
            assert sampling.wait(20)
            scored.set()
        return LIVE

    run = start(flow_grpo(), mine=values)
    inner = run.engine.generate

    def generate(requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        if requests[0].group == 1:
            sampling.set()
            assert scored.wait(20)
        return inner(requests)

    run.engine.generate = generate
    assert run.collect().metrics["reward/failed"] == 0.0
    assert run.engine.groups == [[0], [1]]
