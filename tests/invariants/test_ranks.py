"""Two ranks give what one gives: losses, gradients, weights, pictures, whatever the layout (B23, B44).

One rank works on batches of eight as they are; two ranks work on four rows each, the weights on both or spread over
them, in micro-batches of 1, 2 or 4.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmazero.config import parse
from sigmazero.launch.local import Built, build
from sigmazero.launch.tiny import write_tiny
from sigmazero.records import Prompt, RolloutRequest, StepPlan
from sigmazero.schedule import sigma_grid
from sigmazero.strategies import stop_at_random_step
from sigmazero.tensors import whole
from sigmazero.training import checkpoint
from sigmazero.training.parallel import ALONE, Ranks
from tests.invariants.test_families import ALGORITHMS, LORA, PROMPTS
from tests.pair import Pair

HERE = "tests.invariants.test_ranks"
COARSE, STEPS = f"{HERE}:coarse_scores", 1000
CLIP = 5e-4  # below the norm of some gradients, which are clipped by the norm over all ranks
LAYOUTS = [(2, 4), (2, 1), (1, 2)]  # (ranks that share one copy of the weights, micro-batch)
MATRIX = [
    (family, algorithm, storage, LAYOUTS[i % len(LAYOUTS)])
    for i, (family, storage, algorithm) in enumerate(
        (f, s, a) for f in ("sd3", "qwen_image") for s in ("lora", "copy") for a in ("dmd2", "flow_grpo", "nft")
    )
]


def settings(folder: Path, family: str, algorithm: str, storage: str, micro_batch: int) -> dict[str, Any]:
    own = copy.deepcopy(ALGORITHMS[algorithm])
    for optimizer in own["optimizers"].values():
        # Adam divides by the gradient's size: with an epsilon below the rounding of one it would show nothing else.
        optimizer |= {"micro_batch": micro_batch, "clip": CLIP, "eps": 1e-6}
    return {
        "output": "unused",
        "num_cycles": 4,
        "model": {"family": family, "path": str(folder / family)},
        "roles": LORA if storage == "lora" else {},
        "data": {"prompts": str(folder / "prompts.txt"), "batch_size": 8, "height": 32, "width": 32},
        "training": {"threads": 1, "device": "cpu", "rollout_rows": 4},
        **own,
        **({"plugins": [COARSE], "rewards": {"own": _reward(COARSE)}} if "rewards" in own else {}),
    }


def _reward(function: str) -> dict[str, Any]:
    return {"kind": "function", "function": function, "batch_size": 1}


def coarse_scores(pictures: list[Tensor], *_: Any) -> list[float]:
    """The mean of a picture in steps, so that the last bit of a weight does not change it: pictures have 8 bits."""
    return [round(float(torch.as_tensor(picture).double().mean()) * STEPS) / STEPS for picture in pictures]


def run_cycles(ranks: Ranks, values: dict[str, Any], cycles: int = 2) -> dict[str, Any]:
    """Everything that evolves after some cycles, put together, and what was logged."""
    with build(parse(values), ranks) as built:
        logs = [built.trainer.run_cycle() for _ in range(cycles)]
        tensors = {name: whole(value).clone() for name, value in built.trainer.tensors().items()}
        return {"tensors": tensors, "logs": [without_times(log) for log in logs]}


def without_times(log: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in log.items() if not name.startswith(("time/", "memory/"))}


def assert_close(found: dict[str, Any], wanted: dict[str, Any], moments: float = 1e-4) -> None:
    """Weights and logs at rtol 1e-5, atol 1e-6; moments of gradients to a share of a tensor's largest."""
    assert found["tensors"].keys() == wanted["tensors"].keys()
    for name, value in wanted["tensors"].items():
        # Gradients can be far below 1e-6: they are held to their own size.
        atol = moments * float(value.abs().max()) if name.startswith("optimizers/") and value.numel() else 1e-6
        torch.testing.assert_close(
            found["tensors"][name], value, rtol=1e-5, atol=atol, msg=lambda said, name=name: f"{name}: {said}"
        )
    for mine, theirs in zip(found["logs"], wanted["logs"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Generator[Pair]:
    made = Pair(2, tmp_path_factory.mktemp("pair"))
    yield made
    made.close()
    assert made.exit_codes == [0, 0], "the ranks did not leave in order"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pipelines and prompts."""
    folder = tmp_path_factory.mktemp("families")
    for family in ("sd3", "flux2", "qwen_image"):
        write_tiny(family, folder / family)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    return folder


@pytest.mark.parametrize(("family", "algorithm", "storage", "layout"), MATRIX)
def test_two_ranks_train_as_one_b45_b46(
    pair: Pair, folder: Path, family: str, algorithm: str, storage: str, layout: tuple[int, int]
) -> None:
    shard, micro_batch = layout
    alone = run_cycles(ALONE, settings(folder, family, algorithm, storage, 8))
    first, second = pair(f"{HERE}:run_cycles", shard, settings(folder, family, algorithm, storage, micro_batch))
    assert_close(first, alone)
    assert first["logs"] == second["logs"], "the ranks do not log the same global numbers"
    norms = [log[name] for log in alone["logs"] for name in log if name.endswith("_grad_norm")]
    assert norms
    assert max(norms) > CLIP
    assert all(log.get("group/dead", 0) < 1 for log in alone["logs"]), "no group teaches anything"


@pytest.mark.parametrize(("algorithm", "shard"), [("dmd2", 2), ("flow_grpo", 2), ("nft", 1)])
def test_uneven_shares_and_rows_without_a_score_count_as_on_one_rank(
    pair: Pair, folder: Path, algorithm: str, shard: int
) -> None:
    """Seven samples (of online RL six: three on a rank) in micro-batches of two; some rewards are missing."""
    values = settings(folder, "sd3", algorithm, "lora", 2)
    values["data"]["batch_size"] = 7 if algorithm == "dmd2" else 6
    if algorithm != "dmd2":
        values["plugins"] = [f"{HERE}:some_scores"]
        values["rewards"] = {"own": _reward(f"{HERE}:some_scores")}
        values["rollout"] = {"group_size": 3, "max_failed": 0.9}
    alone = run_cycles(ALONE, values)
    first, _ = pair(f"{HERE}:run_cycles", shard, values)
    assert_close(first, alone)
    if algorithm != "dmd2":
        assert alone["logs"][0]["reward/failed"] > 0, "every sample has a score: nothing is masked"


def test_all_exits_of_an_uneven_batch_count_as_on_one_rank(pair: Pair, folder: Path) -> None:
    """Three samples, two of them on one rank: four rows there and two on the other."""
    values = settings(folder, "sd3", "dmd2", "lora", 2)
    values["algorithm"]["exit_step"] = "all"
    values["data"]["batch_size"] = 3
    alone = run_cycles(ALONE, values)
    assert_close(pair(f"{HERE}:run_cycles", 2, values)[0], alone)


def some_scores(pictures: list[Tensor], *_: Any) -> list[float | None]:
    """The same; none for every other step."""
    return [None if round(score * STEPS) % 2 else score for score in coarse_scores(pictures)]


def two_cycles_with_nan_on_one_rank(ranks: Ranks, values: dict[str, Any]) -> dict[str, Any]:
    """The second rank's first forward with a gradient gives nan."""
    with build(parse(values), ranks) as built:
        before = whole_weights(built)
        broken = _break_once(built) if ranks.index == 1 else contextlib.nullcontext()
        with broken:
            log = built.trainer.run_cycle()
        kept = all(torch.equal(value, before[name]) for name, value in whole_weights(built).items())
        after = built.trainer.run_cycle()
        moved = not all(torch.equal(value, before[name]) for name, value in whole_weights(built).items())
        again = "train/policy_skipped" in after
        return {"skipped": log["train/policy_skipped"], "kept": kept, "again": again, "moved": moved}


@contextlib.contextmanager
def _break_once(built: Built) -> Generator[None]:
    honest, calls = built.roles.model.velocity, []

    def broken(*args: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return honest(*args) * (torch.nan if sum(calls) == 1 and calls[-1] else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(built.roles.model, "velocity", broken)
        yield
    assert any(calls)


def whole_weights(built: Built) -> dict[str, Tensor]:
    return {n: whole(v).clone() for n, v in built.trainer.tensors().items() if n.startswith("roles/policy/")}


@pytest.mark.parametrize("shard", [1, 2])
def test_an_update_with_nan_on_one_rank_is_skipped_on_all(pair: Pair, folder: Path, shard: int) -> None:
    values = settings(folder, "sd3", "nft", "lora", 2)
    for answer in pair(f"{HERE}:two_cycles_with_nan_on_one_rank", shard, values):
        assert answer == {"skipped": 1, "kept": True, "again": False, "moved": True}


def sampled(ranks: Ranks, values: dict[str, Any], steps: int) -> dict[str, Any]:
    """Five rollouts of unlike lengths, and how often this rank called the network."""
    with build(parse(values), ranks) as built:
        calls: list[int] = []
        built.roles.net("student").register_forward_pre_hook(lambda *_: calls.append(1))
        trajectories = built.engine.generate(requests(steps))
        tensors = {f"{i}": trajectory.latents for i, trajectory in enumerate(trajectories)}
        sigmas = {f"{i}": trajectory.sigmas for i, trajectory in enumerate(trajectories)}
        return {"latents": tensors, "sigmas": sigmas, "calls": len(calls)}


def requests(steps: int) -> list[RolloutRequest]:
    strategy = stop_at_random_step(1)
    return [
        RolloutRequest(
            sample, 0, Prompt(sample, PROMPTS[sample % len(PROMPTS)]), "student", sigma_grid(steps, 3.0), "cps", 1.0,
            1.0, 5, strategy(sample, steps, 5),
        )
        for sample in range(5)
    ]  # fmt: skip


@pytest.mark.parametrize("shard", [1, 2])
def test_samples_have_the_same_bits_and_sharded_ranks_call_the_network_equally_often_b01_b23(
    pair: Pair, folder: Path, shard: int
) -> None:
    values = settings(folder, "sd3", "dmd2", "lora", 8)
    steps = 6
    stops = [request.plan.stop for request in requests(steps)]
    assert len(set(stops)) > 2, "the rollouts are alike"
    alone = sampled(ALONE, values, steps)
    both = pair(f"{HERE}:sampled", shard, values, steps)
    for one in both:
        for kind in ("latents", "sigmas"):
            for name, value in alone[kind].items():
                assert torch.equal(one[kind][name], value)
    assert both[0]["calls"] == both[1]["calls"] == max(stop for stop in stops if stop is not None) + 1


def times_seen(ranks: Ranks, values: dict[str, Any], sigmas: list[float]) -> dict[str, Any]:
    """What the sinusoids of a sharded copy with fp32 masters that computes in bfloat16 are given."""
    from diffusers.models.embeddings import Timesteps

    with build(parse(values), ranks) as built:
        seen: list[Tensor] = []
        (sinusoids,) = [m for m in built.roles.net("policy").modules() if isinstance(m, Timesteps)]
        sinusoids.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0] * module.scale))
        model = built.roles.model
        x = torch.zeros((len(sigmas), *model.latent_shape))
        with torch.no_grad():
            v = built.roles.velocity("policy")(x, torch.tensor(sigmas), model.encode([PROMPTS[0]] * len(sigmas)))
        return {"times": seen[0][: len(sigmas)], "dtype": str(seen[0].dtype), "computes": str(v.dtype)}


@pytest.mark.parametrize("family", ["sd3", "flux2", "qwen_image"])
def test_time_reaches_the_sinusoids_of_a_sharded_bf16_copy_in_fp32_b03(pair: Pair, folder: Path, family: str) -> None:
    values = settings(folder, family, "nft", "copy", 8)
    values["model"]["dtype"] = "bfloat16"
    times = torch.tensor([998.3897, 978.2609, 681.8182, 937.5, 750.0])
    for answer in pair(f"{HERE}:times_seen", 2, values, (times / 1000).tolist()):
        assert answer["dtype"] == "torch.float32"
        assert answer["computes"] == "torch.bfloat16", "the copy does not compute in the precision of the recipe"
        torch.testing.assert_close(answer["times"].float(), times, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", ["sd3", "qwen_image"])
def test_a_sharded_bf16_critic_that_waits_for_the_student_trains_in_fp32_b44_b65(
    pair: Pair, folder: Path, family: str
) -> None:
    """The student's phases come first, so the critic runs frozen before it is trained. Its gradients, their first
    moments, are those of the same run in fp32 on one rank, to the precision of bfloat16."""
    values = settings(folder, family, "dmd2", "copy", 2)
    alone = run_cycles(ALONE, values, cycles=1)["tensors"]
    values["model"]["dtype"] = "bfloat16"
    first, _ = pair(f"{HERE}:run_cycles", 2, values, 1)
    for role in ("student", "fake_score"):
        names = [n for n in alone if n.startswith(f"optimizers/{role}/") and n.endswith("exp_avg")]
        assert {first["tensors"][name].dtype for name in names} == {torch.float32}
        mine, theirs = (torch.cat([t[name].flatten() for name in names]) for t in (first["tensors"], alone))
        assert torch.nn.functional.cosine_similarity(mine, theirs, dim=0) > 0.99
        assert float(mine.norm()) == pytest.approx(float(theirs.norm()), rel=0.05)


def fingerprints_of_averages(ranks: Ranks, values: dict[str, Any], reshard: bool = True) -> dict[str, Any]:
    ranks.reshard = reshard
    with build(parse(values), ranks) as built:
        seen = [built.roles.fingerprint("student_ema")]
        sample = [built.engine.generate(_ema_request())[0].latents[-1]]
        for _ in range(2):
            built.trainer.run_cycle()
            seen.append(built.roles.fingerprint("student_ema"))
            sample.append(built.engine.generate(_ema_request())[0].latents[-1])
        return {"seen": seen, "samples": torch.stack(sample), "version": built.roles.versions["student_ema"]}


def _ema_request() -> list[RolloutRequest]:
    return [dataclasses.replace(requests(3)[0], policy="student_ema", plan=StepPlan(None, (3,), None))]


@pytest.mark.parametrize(("storage", "reshard"), [("lora", True), ("copy", True), ("copy", False)])
def test_an_average_over_shards_is_sampled_as_it_is_now(pair: Pair, folder: Path, storage: str, reshard: bool) -> None:
    """What a sharded network gathered for an earlier forward is not what it computes with after the average moved."""
    values = settings(folder, "sd3", "dmd2", storage, 4)
    values["algorithm"]["fake_updates"] = 1
    alone = fingerprints_of_averages(ALONE, values)
    assert len(set(alone["seen"])) == 3
    first, second = pair(f"{HERE}:fingerprints_of_averages", 2, values, reshard)
    assert first["seen"] == second["seen"]
    assert first["seen"][0] == alone["seen"][0]
    assert len(set(first["seen"])) == 3
    assert first["version"] == alone["version"] == 2
    torch.testing.assert_close(first["samples"], alone["samples"], rtol=1e-4, atol=1e-5)
    assert (alone["samples"][2] - alone["samples"][0]).abs().max() > 1e-3, "the average has not moved"


def timed(ranks: Ranks, values: dict[str, Any]) -> dict[str, float]:
    """Metrics of a cycle in which each forward of the second rank's student takes a tenth of a second longer."""
    with build(parse(values), ranks) as built:
        net = built.roles.net("student")
        if ranks.index == 1:
            net.register_forward_pre_hook(lambda *_: time.sleep(0.1))
        return {n: v for n, v in built.trainer.run_cycle().items() if n.startswith(("time/", "memory/", "count/"))}


def test_the_slowest_rank_is_named_and_every_rank_logs_the_same_times(pair: Pair, folder: Path) -> None:
    """Ranks wait for each other, so that all of them take as long; the slowest has most network work."""
    first, second = pair(f"{HERE}:timed", 1, settings(folder, "sd3", "dmd2", "copy", 4))
    assert first == second
    for part in ("rollout", "student"):
        assert first[f"time/{part}_slowest_rank"] == 1
        assert 1 < first[f"time/{part}_imbalance"] <= 2
        assert first[f"time/{part}"] >= 0.1
    assert first["count/samples"] == 8
    alone = timed(ALONE, settings(folder, "sd3", "dmd2", "copy", 4))
    assert first["memory/student_moved_bytes"] == alone["memory/student_moved_bytes"]  # of both ranks together
    assert not [name for name in alone if name.endswith(("_slowest_rank", "_imbalance"))]


def two_cycles_and_a_checkpoint(ranks: Ranks, values: dict[str, Any], folder: str) -> dict[str, Any]:
    with build(parse(values), ranks) as built, checkpoint.Saver(Path(folder), 1, ranks) as saver:
        for _ in range(2):
            built.trainer.run_cycle()
        saver.save(2, built.trainer.tensors(), built.trainer.numbers())
    return {}


def two_more_cycles(ranks: Ranks, values: dict[str, Any], folder: str) -> dict[str, Any]:
    """The checkpoint's run goes on; everything that evolves after that, and what was logged."""
    with build(parse(values), ranks) as built:
        found, refused = checkpoint.load_newest(Path(folder), ranks)
        assert found is not None
        assert not refused
        built.trainer.restore(found.tensors, found.numbers)
        logs = [built.trainer.run_cycle() for _ in range(2)]
        tensors = {name: whole(value).clone() for name, value in built.trainer.tensors().items()}
        return {"tensors": tensors, "logs": [without_times(log) for log in logs]}


@pytest.mark.parametrize(
    ("algorithm", "storage", "saved", "resumed"),
    [("dmd2", "lora", 2, 1), ("nft", "copy", 2, 0), ("flow_grpo", "lora", 0, 2), ("dmd2", "copy", 1, 2)],
)
def test_a_run_goes_on_with_another_number_of_ranks_or_another_layout_b26(
    pair: Pair, folder: Path, tmp_path: Path, algorithm: str, storage: str, saved: int, resumed: int
) -> None:
    """``saved``, ``resumed``: ranks that a copy of the weights is spread over, of two; 0 is one rank alone."""
    values = settings(folder, "sd3", algorithm, storage, 4)
    straight = run_cycles(ALONE, values, cycles=4)
    name, where = "two_cycles_and_a_checkpoint", str(tmp_path / "checkpoints")
    pair(f"{HERE}:{name}", saved, values, where) if saved else two_cycles_and_a_checkpoint(ALONE, values, where)
    arguments = (values, where)
    ended = pair(f"{HERE}:two_more_cycles", resumed, *arguments)[0] if resumed else two_more_cycles(ALONE, *arguments)
    assert_close(ended, {"tensors": straight["tensors"], "logs": straight["logs"][2:]})
