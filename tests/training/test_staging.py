"""What is on the device when, what moves how often, and that no result depends on it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sigmazero.algorithms.base import Phase
from sigmazero.config import OptimizerConfig
from sigmazero.launch.local import build
from sigmazero.records import Batch, Conditioning, Prompt
from sigmazero.training.phase import PhaseResult, run_phase
from sigmazero.training.staging import Mode, Staging, Tile, tiles
from sigmazero.training.state import RoleOptimizer

CPU, DIM = torch.device("cpu"), 6
MODES = pytest.mark.parametrize("mode", get_args(Mode))
SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 20, 100])
STEP_FIELDS, CHAINS = ("sigma", "step", "noise", "old_mean", "missing"), {"latents": ("x", "y")}


def batch(rows: int = 5, steps: int = 4) -> Batch:
    """Rows with a field of every sort, each filled with numbers of its own, and two conditions."""
    draw = torch.Generator().manual_seed(0)
    fields = {
        "sample": torch.arange(rows), "cycle": torch.full((rows,), 3), "weight": torch.rand(rows, generator=draw) + 0.5,
        "static": torch.randn(rows, DIM, generator=draw),
        "sigma": torch.rand(rows, steps, generator=draw), "step": torch.arange(rows * steps).view(rows, steps),
        "noise": torch.randn(rows, steps, DIM, generator=draw),
        "latents": torch.randn(rows, steps + 1, DIM, generator=draw),
    }  # fmt: skip
    told = Conditioning(
        {"tokens": torch.arange(rows * 2.0).view(rows, 2), "mask": torch.rand(rows, 2, generator=draw) > 0.5}
    )
    return Batch(fields, tuple(Prompt(i, f"prompt {i}") for i in range(rows)), told)


def staging(given: Batch, size: int, mode: Mode = "prefetch") -> Staging:
    return Staging(given, STEP_FIELDS, CHAINS, size, CPU, mode)


def float_bytes(given: Batch) -> int:
    """Of all that has to be on the device once."""
    assert given.condition is not None
    fields = [value for value in given.fields.values() if value.is_floating_point()]
    told = [value for value in given.condition.fields.values() if value.is_floating_point()]
    return sum(value.nbytes for value in (*fields, *told))


def pairs(tile: Tile) -> list[tuple[int, int]]:
    """Step and row of a tile's items, in order."""
    return [(s, r) for s in range(tile.steps.start, tile.steps.stop) for r in range(tile.rows.start, tile.rows.stop)]


@pytest.mark.parametrize("size", [1, 2, 5, 6, 7, 13, 100])
@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (6, 1), (6, 4), (5, 7), (1, 9)])
def test_tiles_cover_each_item_once_and_rows_end_before_others_begin(rows: int, steps: int, size: int) -> None:
    found = tiles(rows, steps, size)
    covered = [pair for tile in found for pair in pairs(tile)]
    assert sorted(covered) == [(s, r) for s in range(steps) for r in range(rows)]
    assert max(len(pairs(tile)) for tile in found) <= size
    assert sorted(tile.rows.start for tile in found) == [tile.rows.start for tile in found]
    if size >= rows * steps:
        assert len(found) == 1
    if size >= rows:
        assert len(found) == -(-steps // (size // rows))


@SIZES
@MODES
def test_every_item_is_its_own_step_of_its_own_row(mode: Mode, size: int) -> None:
    given = batch()
    assert given.condition is not None
    for tile, items in staging(given, size, mode):
        assert items.condition is not None
        steps, rows = (torch.tensor(own) for own in zip(*pairs(tile), strict=True))
        for name in ("sigma", "step", "noise"):
            assert torch.equal(items[name], given[name][rows, steps])
        for name in ("sample", "cycle", "weight", "static"):
            assert torch.equal(items[name], given[name][rows])
        assert torch.equal(items["x"], given["latents"][rows, steps])
        assert torch.equal(items["y"], given["latents"][rows, steps + 1])
        for name in ("tokens", "mask"):
            assert torch.equal(items.condition[name], given.condition[name][rows])
        assert [prompt.id for prompt in items.prompts] == rows.tolist()
        assert items.fields.keys() == {*given.fields, "x", "y"} - {"latents"}


@SIZES
@MODES
def test_each_number_moves_once_and_is_copied_also_where_the_device_is_the_host(mode: Mode, size: int) -> None:
    """T + 1 latents, not 2 T; the fields of seeds do not move."""
    given = batch()
    before = {name: value.clone() for name, value in given.fields.items()}
    staged = staging(given, size, mode)
    for _, items in staged:
        for name, value in items.fields.items():
            if value.is_floating_point():
                value += 1  # of a copy
                assert value.data_ptr() != given.fields.get(name, given["latents"]).data_ptr()
    assert staged.moved_bytes == float_bytes(given)
    assert all(torch.equal(value, before[name]) for name, value in given.fields.items())


def test_steps_that_are_no_neighbours_move_both_of_their_latents() -> None:
    latents = batch(3, 8)["latents"]
    apart = {"x": latents[:, [1, 5]].clone(), "y": latents[:, [2, 6]].clone()}
    given = Batch({"sample": torch.arange(3), "weight": torch.ones(3), **apart}, (Prompt(0, ""),) * 3)
    staged = Staging(given, ("x", "y"), CHAINS, 3, CPU)
    for step, (_, items) in zip((1, 5), staged, strict=True):
        assert torch.equal(items["x"], latents[:, step])
        assert torch.equal(items["y"], latents[:, step + 1])
    assert staged.moved_bytes == 3 * 4 + 4 * 3 * DIM * 4


@pytest.mark.parametrize(("mode", "buffers", "ahead"), [("prefetch", 2, 1), ("sync", 1, 0)])
def test_a_step_moves_before_the_one_ahead_of_it_computes_into_one_of_two_buffers(
    mode: Mode, buffers: int, ahead: int
) -> None:
    steps, size = 6, 3
    given, places, moved = batch(size, steps), {"noise": set[int](), "x": set[int]()}, []
    staged = staging(given, size, mode)
    for _, items in staged:
        for name, seen in places.items():
            seen.add(items[name].data_ptr())
        moved.append(staged.moved_bytes)
    assert {name: len(seen) for name, seen in places.items()} == {"noise": buffers, "x": buffers}
    a_step = 2 * size * DIM * 4  # noise and the latent after it
    shared = float_bytes(given) - steps * a_step
    assert moved == [shared + min(i + 1 + ahead, steps) * a_step for i in range(steps)]


@pytest.mark.parametrize("mode", ["prefetch", "sync"])
def test_b76_input_bytes_do_not_grow_with_the_steps(mode: Mode) -> None:
    held = {}
    for steps in (2, 40):
        staged = staging(batch(4, steps), 2, mode)
        held[steps] = [staged.input_bytes for _ in staged][-1]
    numbers = 38 * 2 * 4  # sigma of two rows
    assert held[40] == held[2] + numbers
    whole = staging(batch(4, 40), 2, "whole")
    assert [whole.input_bytes for _ in whole][-1] > float_bytes(batch(4, 40))


REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "requires grad": ({"static": torch.zeros(5, DIM, requires_grad=True)}, "field 'static' requires grad"),
    "elsewhere": ({"noise": torch.zeros(5, 4, DIM, device="meta")}, "field 'noise' is on meta"),
    "rows": ({"static": torch.zeros(6, DIM)}, "field 'static' has 6 rows, and the batch 5"),
    "steps": ({"noise": torch.zeros(5, 3, DIM)}, r"different numbers of steps: \{'sigma': 4, 'step': 4, 'noise': 3"),
    "chain": ({"latents": torch.zeros(5, 4, DIM)}, "different numbers of steps: .*'latents': 3"),
    "no steps": ({"sigma": torch.zeros(5)}, r"field 'sigma' is \[rows\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_staged_is_refused_before_anything_moves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = REFUSED[name]
    monkeypatch.setattr(Staging, "_moved", lambda self, values: pytest.fail("it moved"))
    with pytest.raises(ValueError, match=message):
        list(staging(batch().with_fields(**changes), 2))


def test_conditions_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="there are 4 conditions for 5 rows"):
        staging(batch().with_condition(Conditioning({"tokens": torch.zeros(4, 2)})), 2)


class Toy:
    """A role of one factor an element, whose term sees whatever noise its feed has, and remembers what it made."""

    def __init__(self, noise: str = "noise", fail_at: int | None = None, width: int = DIM) -> None:
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, width))
        self.optimizer = RoleOptimizer("toy", {"weight": self.weight}, OptimizerConfig(lr=1e-2), 10)
        model = SimpleNamespace(encode=lambda texts: Conditioning({"tokens": torch.ones(len(texts), 1)}))
        self.roles: Any = SimpleNamespace(model=model, net=lambda role: None, versions={"toy": 0})
        self.noise, self.fail_at, self.calls = noise, fail_at, 0
        self.made: list[list[weakref.ref[Tensor]]] = []
        self.alive: list[int] = []  # of all that earlier calls made, at each call

    def term(self, roles: Any, items: Batch) -> Mapping[str, Tensor]:
        self.alive.append(sum(ref() is not None for refs in self.made for ref in refs))
        if self.calls == self.fail_at:
            raise RuntimeError("the device is on fire")
        self.calls += 1
        x = items["x"] + items["sigma"][:, None] * (items[self.noise] if self.noise else 0)
        hidden = (x * self.weight).tanh()
        v = hidden * self.weight
        loss = ((v - items["y"]) ** 2).mean(1) * items["static"].mean(1)
        if "old_mean" in items.fields:
            loss = loss + (v - items["old_mean"]).abs().mean(1)
        self.made.append([weakref.ref(value) for value in (x, hidden, v, loss)])
        return {"loss": loss, "velocity": v, "size": v.detach().norm(dim=1)}

    def run(self, given: Batch, size: int, mode: Mode = "prefetch", **how: Any) -> tuple[PhaseResult, Tensor]:
        """An update, and its gradient."""
        found: list[Tensor] = []
        step = self.optimizer.step

        def noting(norm: float) -> float:
            assert self.weight.grad is not None
            found.append(self.weight.grad.clone())
            return step(norm)

        self.optimizer.step = noting  # pyright: ignore[reportAttributeAccessIssue]
        phase = Phase("toy", {"rollout": self.term}, ("toy",), ("toy",), step_fields=STEP_FIELDS, chains=CHAINS)
        try:
            result = run_phase(
                phase, self.roles, {"toy": self.optimizer}, {"rollout": given}, size, staging=mode, **how
            )
        finally:
            self.optimizer.step = step
        return result, found[0]


SORTS: dict[str, Callable[[], tuple[str, Batch]]] = {
    "none": lambda: ("", batch()),
    "a sample": lambda: ("static", batch()),
    "a step": lambda: ("noise", batch()),
    "a step, and old means": lambda: (
        "noise",
        batch().with_fields(old_mean=torch.linspace(0, 1, 20 * DIM).view(5, 4, DIM)),
    ),
}


@SIZES
@MODES
@pytest.mark.parametrize("sort", SORTS)
def test_losses_gradients_and_weights_are_those_of_one_call_with_everything(sort: str, mode: Mode, size: int) -> None:
    """Noise that is absent, one a sample or one a step; sigmas differ by row; an optional field is there or not."""
    noise, given = SORTS[sort]()
    plain = Toy(noise)
    rows, steps = (torch.tensor(own) for own in zip(*((r, s) for s in range(4) for r in range(5)), strict=True))
    own = {n: given[n][rows, steps] for n in STEP_FIELDS if n in given.fields}
    own |= {"x": given["latents"][rows, steps], "y": given["latents"][rows, steps + 1]}
    loss = plain.term(plain.roles, Batch({**given.take(rows.tolist()).fields, **own}, ()))["loss"]
    weight = given["weight"].repeat(4)
    mean = (weight * loss).sum() / weight.sum()
    mean.backward()
    assert plain.weight.grad is not None

    toy = Toy(noise)
    result, gradient = toy.run(given, size, mode)
    torch.testing.assert_close(gradient, plain.weight.grad, rtol=1e-5, atol=1e-6)
    assert result.metrics["train/toy_loss"] == pytest.approx(mean.item(), rel=1e-5)
    plain.optimizer.step(float(plain.optimizer.gradient_norm()))
    torch.testing.assert_close(toy.weight, plain.weight, rtol=1e-5, atol=1e-6)


@SIZES
@MODES
def test_what_a_phase_writes_is_a_field_of_every_step_of_every_row(mode: Mode, size: int) -> None:
    """Also where it is a view of an input, whose buffer is written again."""
    given, toy = batch(), Toy()

    def term(roles: Any, items: Batch) -> Mapping[str, Tensor]:
        return {"after": items["y"], "number": items["sigma"], "unasked": items["x"]}

    written = ("after", "number")
    phase = Phase("toy", {"rollout": term}, ("toy",), writes=written, step_fields=STEP_FIELDS, chains=CHAINS)
    result = run_phase(phase, toy.roles, {}, {"rollout": given}, size, staging=mode)
    assert result.written["rollout"].keys() == set(written)
    assert torch.equal(result.written["rollout"]["after"], given["latents"][:, 1:])
    assert torch.equal(result.written["rollout"]["number"], given["sigma"])


def test_b76_nothing_that_a_call_made_outlives_it() -> None:
    toy = Toy()
    result, _ = toy.run(batch(), 2)
    assert toy.calls == len(toy.alive) == 10
    assert toy.alive == [0] * 10
    assert [ref() for refs in toy.made for ref in refs] == [None] * 40
    assert result.outputs == []


def test_outputs_are_kept_where_they_are_asked_for_and_change_nothing() -> None:
    toy, other = Toy(), Toy()
    (result, gradient), (_, wanted) = toy.run(batch(), 2, keep_outputs=True), other.run(batch(), 2)
    assert torch.equal(gradient, wanted)
    assert toy.alive == [2 * call for call in range(10)]  # velocity and loss, but not what the graph held
    given, weight = batch(), Toy().weight
    x = given["latents"][:2, 0] + given["sigma"][:2, :1] * given["noise"][:2, 0]
    assert torch.equal(result.outputs[0]["velocity"], (x * weight).tanh() * weight)
    assert result.outputs[0]["velocity"].requires_grad


@MODES
def test_after_an_exception_the_next_update_is_right_and_nothing_is_left_behind(mode: Mode) -> None:
    toy, fresh = Toy(fail_at=3), Toy()
    with pytest.raises(RuntimeError, match="on fire"):
        toy.run(batch(), 2, mode)
    gc.collect()
    assert [ref() for refs in toy.made for ref in refs] == [None] * 12
    toy.fail_at = None
    (result, gradient), (wanted, right) = toy.run(batch(), 2, mode), fresh.run(batch(), 2, mode)
    assert torch.equal(gradient, right)
    assert torch.equal(toy.weight, fresh.weight)
    assert (result.metrics, result.moved_bytes) == (wanted.metrics, wanted.moved_bytes)


def test_b76_the_peak_of_an_update_does_not_grow_with_its_steps() -> None:
    """By the allocator's own events; latents of 16 KiB."""
    peaks, width = {}, 4096
    for steps in (2, 40):
        given = batch(4, steps)
        wide = {name: given[name].repeat_interleave(-(-width // DIM), -1)[..., :width] for name in LARGE}
        peaks[steps] = peak(Toy(width=width), given.with_fields(**wide))
    assert 8 * 2 * 4 * width < peaks[40] < 1.02 * peaks[2]


LARGE = ("noise", "latents", "static")


def peak(toy: Toy, given: Batch) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        toy.run(given, 2)
    found: Any = profile.profiler
    events = [(e.start_ns(), e.nbytes()) for e in found.kineto_results.events() if e.name() == "[memory]"]
    level = most = 0
    for _, change in sorted(events, key=lambda pair: pair[0]):
        level += change
        most = max(most, level)
    return most


class NoWaiting(TorchDispatchMode):
    """Fails where a number is read from a tensor: on a device, the host would wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["flow_grpo", "nft", "dmd2"])
def test_no_step_waits_for_the_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From the first micro-batch of an update to its last: terms, backward passes, what is noted of them."""
    inner, watched = Staging.__iter__, []

    def watching(self: Staging) -> Iterator[tuple[Tile, Batch]]:
        with NoWaiting():
            for tile, items in inner(self):
                watched.append(tile)
                yield tile, items

    with NoWaiting(), pytest.raises(AssertionError, match="the host waits"):
        torch.ones(1).item()
    roles = ("student", "fake_score") if name == "dmd2" else ("policy",)
    micro = {f"optimizers.{role}": {"lr": 1e-2, "micro_batch": 4} for role in roles}
    with build(request.getfixturevalue(name)(micro)) as run:
        monkeypatch.setattr(Staging, "__iter__", watching)
        metrics = run.trainer.run_cycle()
    assert len(watched) >= 2
    assert any(metric.endswith("_grad_norm") for metric in metrics)


@pytest.mark.parametrize("name", ["flow_grpo", "nft", "dmd2"])
def test_a_run_ends_with_the_same_bits_however_its_rows_are_staged(request: pytest.FixtureRequest, name: str) -> None:
    ended, logs = [], []
    for mode in get_args(Mode):
        roles = ("student", "fake_score") if name == "dmd2" else ("policy",)
        micro = {f"optimizers.{role}": {"lr": 1e-2, "micro_batch": 4} for role in roles}
        with build(request.getfixturevalue(name)({"training.staging": mode, **micro})) as run:
            logs.append([run.trainer.run_cycle() for _ in range(2)])
            ended.append(run.trainer.tensors())
    for log, weights in zip(logs, ended, strict=True):
        assert all(torch.equal(value, ended[0][key]) for key, value in weights.items())
        for row, first in zip(log, logs[0], strict=True):
            same = {key for key in row if key.startswith("train/") or key.endswith("_moved_bytes")}
            assert {key: row[key] for key in same} == {key: first[key] for key in same}
            assert {key: row[key] > 0 for key in same if "moved" in key} == dict.fromkeys(
                MOVED[name] & row.keys(), True
            )


MOVED = {
    "flow_grpo": {"memory/kl_moved_bytes", "memory/policy_moved_bytes"},
    "nft": {"memory/policy_moved_bytes"},
    "dmd2": {f"memory/{phase}_moved_bytes" for phase in ("student", "fake_score")},
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies beside the computation need CUDA")
@MODES
def test_on_cuda_every_item_is_its_own_step_of_its_own_row(mode: Mode) -> None:
    given = batch(6, 50)
    for size in (1, 4, 6, 14):
        for tile, items in Staging(given, STEP_FIELDS, CHAINS, size, torch.device("cuda"), mode):
            torch.cuda._sleep(1_000_000)
            steps, rows = (torch.tensor(own) for own in zip(*pairs(tile), strict=True))
            assert torch.equal(items["y"].cpu(), given["latents"][rows, steps + 1])
            assert torch.equal(items["noise"].cpu(), given["noise"][rows, steps])
