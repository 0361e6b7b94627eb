"""The memory plan against what torch's profiler sees a tiny run allocate, and what it says of settings."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sigmazero.config import RunConfig, parse
from sigmazero.launch.local import build
from sigmazero.launch.memory import Meter, plan_memory
from sigmazero.launch.plan import advice, verdict
from sigmazero.launch.tiny import write_tiny
from tests.conftest import MakeRun

CASES = [("sd3", "lora", False), ("sd3", "copy", True), ("flux2", "lora", True), ("qwen_image", "copy", False)]
Settings = Callable[[str, str, bool], RunConfig]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """``settings("sd3", "lora", True)``: online RL at 96 by 96, where activations matter, and weights of copies too."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "prompts.txt").write_text("a red cat\na lake\ntwo old dogs look at the number 42 on a blue wall\n")

    def make(family: str, storage: str, checkpointing: bool) -> RunConfig:
        if not (folder / family).exists():
            write_tiny(family, folder / family)
        values: dict[str, Any] = {
            "output": "unused",
            "num_cycles": 2,
            "model": {"family": family, "path": str(folder / family), "activation_checkpointing": checkpointing},
            "roles": {"storage": "lora", "lora": {"rank": 4}} if storage == "lora" else {},
            "data": {"prompts": str(folder / "prompts.txt"), "batch_size": 8, "height": 96, "width": 96},
            "algorithm": {"name": "nft", "num_steps": 2, "kl_every": 0},
            "optimizers": {"policy": {"micro_batch": 8}},
            "rollout": {"group_size": 2},
            "rewards": {"jpeg": {"kind": "jpeg"}},
            "evaluate": {"num_captions": 8},
            "training": {"threads": 1, "device": "cpu"},
        }
        return parse(values)

    return make


def allocated(work: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator had given out at once, beyond those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live, peak = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, live)
    return peak


def test_the_meter_counts_what_lives_at_once() -> None:
    """Views and what was there before are free; a tensor is given back with its last reference."""
    before = torch.zeros(1000)
    with Meter(torch.device("cpu")) as meter:
        before.add_(1)
        kept = before[:10] * 2  # 40 bytes, with a view that costs nothing
        for _ in range(3):
            (before + 1).view(10, 100).t()  # 4000 bytes, gone before the next
    assert (meter.live, meter.peak) == (40, 4040)
    assert float(kept.sum()) == 20


@pytest.mark.parametrize(("family", "storage", "checkpointing"), CASES)
def test_the_plan_is_within_15_percent_of_a_run(
    family: str, storage: str, checkpointing: bool, settings: Settings, tmp_path: Path
) -> None:
    """From a folder without weight files: weights, gradients and moments of a role exactly; what the policy's phase
    allocates at its peak, to 15 %."""
    config = settings(family, storage, checkpointing)
    bare = tmp_path / "bare"
    shutil.copytree(config.model.path, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    plan = plan_memory(config.model_copy(update={"model": config.model.model_copy(update={"path": str(bare)})}))
    with build(config) as built:
        trainer, roles = built.trainer, built.roles
        trainer.run_cycle()  # the optimizer has its moments
        own, state = roles.parameters("policy").values(), trainer.optimizers["policy"].state().values()
        policy = next(role for role in plan.roles if role.role == "policy")
        assert policy.weights == policy.gradients == sum(p.nbytes for p in own)
        assert policy.moments == sum(value.nbytes for value in state)
        nets = {id(t): t for role in roles.kinds for t in roles.net(role).parameters()}
        assert plan.base + sum(role.weights for role in plan.roles) == pytest.approx(
            sum(t.nbytes for t in nets.values()), rel=0.05
        )  # the base's buffers count too
        feeds = trainer._prepare(trainer.collector.collect(trainer.counters.samples, 1), 1)
        (phase,) = built.algorithm.phases
        real = allocated(lambda: trainer._run(phase, feeds, {}, set()))
    planned = {phase.name: phase.own for phase in plan.phases}
    assert max(planned["policy"], planned["policy step"]) == pytest.approx(real, rel=0.15)


def test_what_does_not_fit_is_told_settings_that_really_help(flow_matching: MakeRun) -> None:
    """Each of them, followed, makes the peak smaller."""
    plan = plan_memory(flow_matching({"data.batch_size": 64}))
    peak = plan.worst.peak
    assert verdict(plan, peak, "this GPU").endswith(": fits")
    assert "(phase student), this GPU has" in verdict(plan, peak - 1, "this GPU")
    assert verdict(plan, peak - 1, "this GPU").endswith("does not fit; " + ", ".join(advice(plan)))
    followed = {
        "set model.activation_checkpointing=true": {"model.activation_checkpointing": True},
        "lower optimizers.student.micro_batch (below 32)": {"optimizers.student.micro_batch": 8},
        "set roles.storage=lora": {"roles.storage": "lora"},
    }
    assert advice(plan) == list(followed)
    for changed in followed.values():
        assert plan_memory(flow_matching({"data.batch_size": 64, **changed})).worst.peak < peak
