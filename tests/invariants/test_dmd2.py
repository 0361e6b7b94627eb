"""Distillation runs that must agree do agree, and each loss moves only its own role."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmazero import data, seeds
from sigmazero.algorithms.dmd import DMD2
from sigmazero.config import RunConfig
from sigmazero.data import GlyphCaptions
from sigmazero.launch.local import Built, build, restore_newest
from sigmazero.records import Batch, Conditioning, StepPlan
from sigmazero.training.checkpoint import Saver
from sigmazero.training.folder import RunFolder
from sigmazero.training.phase import run_phase
from tests.conftest import MakeRun

LORA = {"roles.storage": "lora", "roles.lora": {"rank": 4, "alpha": 8.0}}
ALL = {"algorithm.exit_step": "all"}
STORAGES = pytest.mark.parametrize("storage", [{}, LORA], ids=["copy", "lora"])


def feeds_of(built: Built, cycle: int = 0) -> dict[str, Batch]:
    """The rollout of a cycle that updates the student, as the loop prepares it, with what the student predicts."""
    trainer, size = built.trainer, built.config.data.batch_size
    feeds = trainer._prepare(trainer.collector.collect(cycle * size, cycle), cycle)
    computing = dataclasses.replace(built.algorithm.phases[0], updates=())
    return trainer._run(computing, feeds, {}, set())


def gradients(built: Built, feeds: Mapping[str, Batch], phase: int, micro_batch: int) -> dict[str, Tensor]:
    """The gradient of a phase's role, caught where the optimizer would step."""
    wanted = built.algorithm.phases[phase]
    optimizer = built.trainer.optimizers[wanted.updates[0]]
    caught: dict[str, Tensor] = {}

    def catch(norm: Tensor) -> float:
        caught.update({n: p.grad.clone() for n, p in optimizer.parameters.items() if p.grad is not None})
        return 0.0

    optimizer.step = catch  # pyright: ignore[reportAttributeAccessIssue]
    run_phase(wanted, built.roles, built.trainer.optimizers, feeds, micro_batch)
    return caught


def plan_of(built: Built, sample: int) -> StepPlan:
    assert isinstance(built.algorithm, DMD2)
    return built.algorithm.plan(sample)


def weights_of(built: Built) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in built.trainer.tensors().items()}


def run(config: RunConfig, cycles: int | None = None) -> tuple[Built, list[dict[str, float]]]:
    built = build(config)
    log = [built.trainer.run_cycle() for _ in range(cycles or config.num_cycles)]
    return built, log


def assert_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@STORAGES
def test_fake_equal_to_teacher_without_guidance_gives_zero_gradient(dmd2: MakeRun, storage: dict[str, Any]) -> None:
    built = build(dmd2({"algorithm.guidance": 1.0, **storage}))
    found = gradients(built, feeds_of(built), 0, 6)
    assert found
    assert all(not g.any() for g in found.values())
    assert built.trainer.run_cycle()["train/score_gradient_rms"] == 0


@STORAGES
@pytest.mark.parametrize("phase", [0, 1], ids=["student", "fake_score"])
def test_b46_b53_micro_batches_and_row_order_change_nothing(dmd2: MakeRun, storage: dict[str, Any], phase: int) -> None:
    """Also ragged ones (B53): 7 rows as 7, 3+3+1, 4+3, 1 each, reversed."""
    built = build(dmd2({"data.batch_size": 7, **storage}))
    built.trainer.run_cycle()  # the fake score differs from the teacher now
    feeds = feeds_of(built, cycle=2)
    reference = gradients(built, feeds, phase, 7)
    assert max(g.abs().max() for g in reference.values()) > 1e-4
    reverse = {feed: batch.take(range(len(batch) - 1, -1, -1)) for feed, batch in feeds.items()}
    for given, micro_batch in ((feeds, 3), (feeds, 4), (feeds, 1), (reverse, 7), (reverse, 3)):
        found = gradients(built, given, phase, micro_batch)
        for name, value in reference.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_b46_weight_0_leaves_a_row_out_of_value_and_denominator(dmd2: MakeRun) -> None:
    built = build(dmd2())
    built.trainer.run_cycle()
    feeds = feeds_of(built, cycle=2)
    batch = feeds["rollout"]
    kept = gradients(built, {"rollout": batch.take([0, 1, 2, 3])}, 0, 6)
    x = batch["x"].clone()
    x[4:] = 1e6
    masked = batch.with_fields(weight=torch.tensor([1.0, 1, 1, 1, 0, 0]), x=x)
    for name, value in gradients(built, {"rollout": masked}, 0, 4).items():
        torch.testing.assert_close(value, kept[name], rtol=1e-5, atol=1e-6)


@STORAGES
def test_exactly_one_student_forward_holds_a_graph(dmd2: MakeRun, storage: dict[str, Any]) -> None:
    """And teacher and fake score hold none in the student's part of the cycle. No step of the student is made twice."""
    built = build(dmd2({"data.batch_size": 8, **storage}))
    calls: list[tuple[str | None, bool]] = []
    inner = built.roles.model.velocity

    def spy(net: torch.nn.Module, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        v = inner(net, x, sigma, condition)
        calls.append((built.roles._current, v.requires_grad))
        return v

    built.roles.model.velocity = spy  # pyright: ignore[reportAttributeAccessIssue]
    built.trainer.run_cycle()
    assert calls.count(("student", True)) == 1
    assert [role for role, graph in calls if graph] == ["student", "fake_score"]
    assert calls.count(("teacher", False)) == 1
    assert calls.count(("student", False)) == max(plan_of(built, sample).stop or 0 for sample in range(8)) > 0


@STORAGES
def test_b74_each_loss_moves_its_own_role_only(dmd2: MakeRun, storage: dict[str, Any]) -> None:
    built = build(dmd2(storage))
    built.trainer.run_cycle()
    feeds = feeds_of(built, cycle=2)
    for phase, role in ((0, "student"), (1, "fake_score")):
        before = weights_of(built)
        run_phase(built.algorithm.phases[phase], built.roles, built.trainer.optimizers, feeds, 6)
        after = weights_of(built)
        moved = {
            name.split("/")[1] for name in after if name not in before or not torch.equal(after[name], before[name])
        }
        assert moved == {role}
        assert all(p.grad is None for r in built.roles.kinds for p in built.roles.parameters(r).values())


@STORAGES
def test_the_teacher_never_changes_and_averages_tick_once_a_student_update(
    dmd2: MakeRun, storage: dict[str, Any]
) -> None:
    """K = 2: of 5 cycles 3 update the student; the fake score updates in each."""
    built = build(dmd2({"num_cycles": 5, **storage}))
    teacher, ticks = built.roles.fingerprint("teacher"), 0
    expected = {n: v.clone() for n, v in built.roles.parameters("student").items()}
    for cycle in range(5):
        before = built.roles.fingerprint("student_ema")
        built.trainer.run_cycle()
        ticks += built.roles.fingerprint("student_ema") != before
        if cycle % 2 == 0:
            n = cycle // 2
            decay = min((1 + n) / (10 + n), 0.98)
            expected = {
                name: decay * expected[name] + (1 - decay) * value.detach()
                for name, value in built.roles.parameters("student").items()
            }
    assert ticks == 3
    assert built.trainer.optimizers["student"].steps == 3
    assert built.trainer.optimizers["fake_score"].steps == 5
    assert built.roles.fingerprint("teacher") == teacher
    for name, value in built.roles.parameters("student_ema").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_b22_backward_simulation_uses_no_real_data(dmd2: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real pictures replaced by nan change no weight: nothing but their shape could be used."""
    plain = weights_of(run(dmd2(), 3)[0])
    inner = data.GlyphCaptions.pictures
    monkeypatch.setattr(
        data.GlyphCaptions, "pictures", lambda self, s: (inner(self, s)[0] * math.nan, inner(self, s)[1])
    )
    assert_equal(plain, weights_of(run(dmd2(), 3)[0]))


def test_b22_b76_an_exit_at_step_2_costs_three_calls_of_which_the_last_may_have_a_graph(
    dmd2: MakeRun, tmp_path: Path
) -> None:
    """A strategy of one's own, from a file, fixes the exit; the grid is 1, .75, .5, .25 (shift 1). K = 2."""
    plugin = tmp_path / "exit_two.py"
    plugin.write_text("def plan(sample, num_steps, seed):\n    return None, (2, 3), 2\n")
    name = f"{plugin}:plan"
    config = dmd2(
        {"plugins": [name], "algorithm.step_strategy": name, "algorithm.num_steps": 4, "algorithm.shift": 1.0}
    )
    built = build(config)
    seen: list[tuple[float, bool]] = []
    inner = built.roles.model.velocity

    def spy(net: torch.nn.Module, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        if built.roles._current == "student":
            seen.append((sigma[0].item(), torch.is_grad_enabled()))
        return inner(net, x, sigma, condition)

    built.roles.model.velocity = spy  # pyright: ignore[reportAttributeAccessIssue]
    built.trainer.run_cycle()
    assert seen == [(1.0, False), (0.75, False), (0.5, True)]
    seen.clear()
    built.trainer.run_cycle()
    assert seen == [(1.0, False), (0.75, False), (0.5, False)]
    for cycle, end in ((0, []), (1, [0.0])):
        trajectories = built.trainer.collector.collect(0, cycle).trajectories
        assert all(t.sigmas.tolist() == [1.0, 0.75, 0.5, *end] for t in trajectories)


def test_b23_shared_exit_step_is_one_a_cycle_and_per_sample_ones_differ(dmd2: MakeRun) -> None:
    def exits(mode: str) -> list[set[int | None]]:
        built = build(dmd2({"algorithm.exit_step": mode, "algorithm.num_steps": 4}))
        return [{plan_of(built, sample).stop for sample in range(c * 6, c * 6 + 6)} for c in range(12)]

    shared, own = exits("shared"), exits("per_sample")
    assert all(len(stops) == 1 for stops in shared)
    assert set().union(*shared) == {0, 1, 2, 3}
    assert max(len(stops) for stops in own) >= 3


@pytest.mark.parametrize("transition", ["renoise", "euler"])
@STORAGES
def test_the_students_exit_step_is_that_of_a_rollout_that_goes_through(
    dmd2: MakeRun, storage: dict[str, Any], transition: str
) -> None:
    """Bit by bit in fp32 on the CPU, for micro-batches of any size, also after updates."""
    for micro_batch in (6, 4, 1):
        built = build(
            dmd2({"algorithm.transition": transition, "optimizers.student.micro_batch": micro_batch, **storage})
        )
        for cycle in (0, 2):
            rollout = feeds_of(built, cycle)["rollout"]
            samples = rollout["sample"].tolist()
            requests = built.algorithm.requests(rollout.prompts, range(samples[0], samples[-1] + 1), cycle)
            whole = [dataclasses.replace(r, plan=plan_of(built, r.sample)) for r in requests]
            for row, t in enumerate(built.engine.generate(whole)):
                assert torch.equal(rollout["x"][row], t.latents[-2])
                assert torch.equal(rollout["x0"][row], t.latents[-1])
                assert rollout["sigma"][row] == t.sigmas[-2]
            built.trainer.run_cycle()
            built.trainer.run_cycle()


@pytest.mark.parametrize("transition", ["renoise", "euler"])
def test_rows_of_all_exits_are_those_of_the_runs_that_stop_there(
    dmd2: MakeRun, tmp_path: Path, transition: str
) -> None:
    """Row by row and bit by bit, of three runs with one fixed exit each; draws of a sample's rows differ."""
    built = build(dmd2({"algorithm.transition": transition, **ALL}))
    every, algorithm = feeds_of(built)["rollout"], built.algorithm
    assert isinstance(algorithm, DMD2)
    assert every["sample"].tolist() == [sample for sample in range(6) for _ in range(3)]
    assert every["step"].tolist() == [0, 1, 2] * 6
    for exit_step in range(3):
        plugin = tmp_path / f"exit_{exit_step}.py"
        plugin.write_text(
            f"def plan(sample, num_steps, seed):\n    return None, ({exit_step}, {exit_step + 1}), {exit_step}\n"
        )
        own = {"plugins": [f"{plugin}:plan"], "algorithm.step_strategy": f"{plugin}:plan"}
        single = feeds_of(build(dmd2({"algorithm.transition": transition, **own})))["rollout"]
        rows = every.take(range(exit_step, 18, 3))
        assert rows.prompts == single.prompts
        for name in ("sample", "sigma", "x", "x0"):
            assert torch.equal(rows[name], single[name]), name
    for stream in ("score", "fake"):
        _, eps, _ = algorithm._noised(every, algorithm.config.score_sigma, stream)
        assert len({tuple(row.flatten().tolist()) for row in eps}) == 18


@STORAGES
def test_gradients_of_all_exits_are_those_of_a_plain_loop(dmd2: MakeRun, storage: dict[str, Any]) -> None:
    """One sample at a time, every step of it with a graph; the mean is over all rows of all samples."""
    built = build(dmd2({**ALL, **storage}))
    built.trainer.run_cycle()  # the roles differ now
    feeds = feeds_of(built, cycle=2)
    roles, model, guidance = built.roles, built.roles.model, 2.0
    loss: dict[str, Tensor] = dict.fromkeys(("student", "fake_score"), torch.zeros(()))
    for sample, prompt in zip(range(12, 18), GlyphCaptions("train", 0).prompts(range(12, 18)), strict=True):
        condition = model.encode([prompt.text])

        def velocity(role: str, x: Tensor, sigma: float, told: Conditioning = condition) -> Tensor:
            with roles.selected(role):
                return model.velocity(roles.net(role), x, torch.tensor([sigma]), told)

        def noise(stream: str, step: int, sample: int = sample) -> Tensor:
            return seeds.normal(0, stream, [sample], model.latent_shape, 2, step)

        def drawn(name: str, step: int, x0: Tensor, sample: int = sample) -> tuple[float, Tensor, Tensor]:
            """Sigma, noise and the noised sample of a score."""
            low, high = (0.02, 0.98) if name == "score" else (0.0, 1.0)
            u = math.floor(1000 * float(seeds.uniform(0, f"{name}_sigma", [sample], 2, step))) / 1000
            sigma, eps = min(max(3 * u / (1 + 2 * u), low), high), noise(f"{name}_noise", step)
            return sigma, eps, (1 - sigma) * x0 + sigma * eps

        x = noise("initial_noise", 0)
        grid = [1.0, 6 / 7, 0.6, 0.0]  # three steps, shift 3
        for step, (now, after) in enumerate(itertools.pairwise(grid)):
            x0 = x - now * velocity("student", x, now)
            with torch.no_grad():
                sigma, eps, noised = drawn("score", step, x0)
                positive = velocity("teacher", noised, sigma)
                negative = velocity("teacher", noised, sigma, model.encode([""]))
                teacher = negative + guidance * (positive - negative)
                g = (teacher - velocity("fake_score", noised, sigma)) / (teacher - (eps - x0)).abs().mean()
            loss["student"] = loss["student"] + 0.5 * ((x0 - (x0 - g).detach()) ** 2).mean() / 18
            sigma, eps, noised = drawn("fake", step, x0.detach())
            error = velocity("fake_score", noised, sigma) - (eps - x0.detach())
            loss["fake_score"] = loss["fake_score"] + (error**2).mean() / 18
            x = ((1 - after) * x0 + after * noise("step_noise", step)).detach() if after else x0.detach()
    for phase, role in ((0, "student"), (1, "fake_score")):
        trained = {n: p for n, p in roles.parameters(role).items() if p.requires_grad}
        wanted = dict(zip(trained, torch.autograd.grad(loss[role], list(trained.values())), strict=True))
        assert max(g.abs().max() for g in wanted.values()) > 0.01
        for micro_batch in (18, 5):
            found = gradients(built, feeds, phase, micro_batch)
            for name, value in wanted.items():
                assert (found[name] - value).norm() <= 1e-4 * value.norm() + 1e-6, name


@STORAGES
def test_all_exits_go_on_from_a_checkpoint(dmd2: MakeRun, tmp_path: Path, storage: dict[str, Any]) -> None:
    """Four cycles at once and two with two more from their checkpoint are one run, bit for bit."""
    config = dmd2({"optimizers.student.micro_batch": 4, **ALL, **storage})
    straight, log = run(config, 4)
    first, _ = run(config, 2)
    folder = RunFolder(tmp_path / "halves")
    with Saver(folder.checkpoints, 1) as saver:
        saver.save(2, first.trainer.tensors(), first.trainer.numbers())
    second = build(config)
    restore_newest(second, folder)
    more = [second.trainer.run_cycle() for _ in range(2)]
    assert_equal(weights_of(straight), weights_of(second))
    assert [row["train/fake_score_loss"] for row in log[2:]] == [row["train/fake_score_loss"] for row in more]


def test_samples_do_not_depend_on_their_batch(dmd2: MakeRun) -> None:
    built = build(dmd2())
    prompts = GlyphCaptions("train", 0).prompts(range(11))
    requests = built.algorithm.requests(prompts, range(11), 0)
    whole = built.engine.generate(requests)
    for rows in ([4], [10, 2, 7], list(range(9))):
        for i, t in zip(rows, built.engine.generate([requests[i] for i in rows]), strict=True):
            assert torch.equal(t.latents, whole[i].latents)
            assert t.latent_indices == whole[i].latent_indices


def test_b40_nan_in_the_fake_score_is_counted_and_changes_no_student_weight(dmd2: MakeRun) -> None:
    built = build(dmd2({"training.max_nonfinite": 2, "num_cycles": 40}))
    with torch.no_grad():
        next(iter(built.roles.parameters("fake_score").values())).view(-1)[:] = math.nan
    before = weights_of(built)
    metrics = built.trainer.run_cycle()
    assert metrics["train/nonfinite_student_loss"] > 0
    assert built.trainer.counters.skipped == {"student": 1, "fake_score": 1}
    assert built.trainer.optimizers["student"].steps == 0
    after = weights_of(built)
    for name in before:
        assert torch.equal(before[name].nan_to_num(1.5), after[name].nan_to_num(1.5))
    with pytest.raises(ValueError, match=r"non-finite values 2 times in a row.*max_nonfinite"):
        built.trainer.run(lambda cycle, metrics: None)


def test_b76_live_tensors_do_not_grow(dmd2: MakeRun) -> None:
    import gc

    built = build(dmd2({"num_cycles": 100}))

    def count() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    for _ in range(4):
        built.trainer.run_cycle()
    before = count()
    for _ in range(20):
        built.trainer.run_cycle()
    assert count() == before


def test_a_seed_is_a_run(dmd2: MakeRun) -> None:
    """The same seed gives the same weights bit for bit; another one does not."""
    first = weights_of(run(dmd2(), 2)[0])
    assert_equal(first, weights_of(run(dmd2(), 2)[0]))
    other = weights_of(run(dmd2({"seed": 1}), 2)[0])
    assert any(not torch.equal(first[n], other[n]) for n in first)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return (), (1,)", r"a step strategy returns \(sde, ret, stop\)"),
        ("return (), (num_steps,), None", "dmd2 needs a stop"),
        ("return None, (1,), 0", "dmd2 needs a stop"),
        ("return None, (0, 1), -1", "stop is"),
        ("return 1 / 0", "division by zero"),
    ],
)
def test_b50_a_strategy_that_cannot_work_is_named_before_anything_is_loaded(
    dmd2: MakeRun, tmp_path: Path, body: str, complaint: str
) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text(f"def plan(sample, num_steps, seed):\n    {body}\n")
    name = f"{plugin}:plan"
    config = dmd2({"plugins": [name], "algorithm.step_strategy": name, "model.path": "nowhere.safetensors"})
    with pytest.raises(ValueError, match=complaint) as caught:
        build(config)
    assert "algorithm.step_strategy" in str(caught.value)


def test_b15_a_strategy_of_another_kind_is_refused_with_what_dmd2_takes(dmd2: MakeRun) -> None:
    with pytest.raises(ValueError, match=r"'sde_window'; dmd2 takes 'stop_at_random_step', or a function of yours"):
        build(dmd2({"algorithm.step_strategy": "sde_window"}))


def test_the_teacher_is_evaluated_on_its_own_grid_beside_the_students(dmd2: MakeRun) -> None:
    arms = {
        arm.name: arm for arm in build(dmd2({"algorithm.shift": 7.5, "algorithm.teacher_shift": 5.5})).algorithm.arms
    }
    assert {name: arm.shift for name, arm in arms.items()} == {
        "teacher@4": 5.5, "teacher@3": 7.5, "student@3": 7.5, "student_raw@3": 7.5,
    }  # fmt: skip
    arms = {arm.name: arm for arm in build(dmd2({"algorithm.shift": 7.5})).algorithm.arms}
    assert {arm.shift for arm in arms.values()} == {7.5}
