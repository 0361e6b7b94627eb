"""Rollouts on disk: what was written comes back, a replay trains as the run did, a file that is none is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmazero.config import RunConfig
from sigmazero.engines.local import LocalEngine
from sigmazero.launch.local import build
from sigmazero.records import Prompt, RolloutRequest, StepPlan, Trajectory
from sigmazero.tensors import read_tensors, write_tensors
from sigmazero.training import dump
from tests.conftest import MakeRun

NAN = float("nan")


def trajectory(sample: int, plan: StepPlan, metadata: dict[str, Any]) -> Trajectory:
    sigmas = torch.tensor([1.0, 0.7, 0.0])
    request = RolloutRequest(
        sample, 3, Prompt(7, "größer ☃", metadata), "policy", sigmas, "sde", 0.7, 1.5, 11, plan, "rollout", sample // 2
    )
    latents = torch.arange(12.0).reshape(2, 3, 1, 2).to(torch.bfloat16) + sample
    return Trajectory(request, latents, (1, 2), sigmas.clone(), torch.tensor([-0.5, NAN]), 5)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    """But for the version: the policy that sampled it is gone."""
    plans = [StepPlan((1,), (1, 2), None), StepPlan(None, (1, 2), 1)]
    metadata = [{"text": "04", "boxes": [1, {"x": 2.5}]}, {}]
    given = [trajectory(4 + i, plan, own) for i, (plan, own) in enumerate(zip(plans, metadata, strict=True))]
    values = {"ocr": torch.tensor([0.25, NAN]).double(), "mine/part": torch.tensor([1e-300, -3.0]).double()}
    path = dump.save(tmp_path / "rollouts", 12, given, values)
    assert path == tmp_path / "rollouts" / "00000012.safetensors"
    assert os.listdir(path.parent) == [path.name]
    found, read = dump.load(path)
    for mine, theirs in zip(found, given, strict=True):
        a, b = vars(mine.request).copy(), vars(theirs.request).copy()
        assert torch.equal(a.pop("sigmas"), b.pop("sigmas"))
        assert a == b
        assert isinstance(mine.request.plan, StepPlan)
        assert mine.latent_indices == theirs.latent_indices
        assert mine.latents.dtype == torch.bfloat16
        for name in ("latents", "sigmas", "log_prob"):
            assert same(getattr(mine, name), getattr(theirs, name))
        assert mine.version == -1
    assert read.keys() == values.keys()
    assert all(same(read[name], value) for name, value in values.items())


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9))


def trained(config: RunConfig) -> dict[str, Tensor]:
    """Everything that evolved in a run, without evaluation."""
    with build(config) as built:
        built.trainer.run(lambda cycle, metrics: None)
        assert built.trainer.counters.skipped == {}
        return {name: value.clone() for name, value in built.trainer.tensors().items()}


def never(*_: Any) -> list[Trajectory]:
    raise AssertionError("a replay samples nothing")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("flow_grpo", {}),
        ("flow_grpo", {"algorithm.updates": 2}),
        ("flow_grpo", {"algorithm.epochs": 2, "algorithm.old_log_prob": "rollout", "algorithm.kl_weight": 0.1}),
        ("nft", {"algorithm.old_decay": {"slope": 0.25}}),
        ("nft", {"algorithm.updates": 2, "roles.storage": "lora", "roles.lora": {"rank": 4, "alpha": 8.0}}),
        ("nft", {"algorithm.name": "dpo"}),
    ],
    ids=["flow_grpo", "two updates", "recorded log-probs", "nft", "nft lora two updates", "dpo"],
)
def test_a_replay_trains_to_the_same_weights(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, changes: Any
) -> None:
    """Bit for bit: weights, moments and averages, without one sample."""
    make = request.getfixturevalue(kind)
    run = make({**changes, "rollout.dump_every": 1, "num_cycles": 2})
    wanted = trained(run)
    moved = [float(value.abs().max()) > 0 for name, value in wanted.items() if name.endswith("/exp_avg")]
    assert sum(moved) > len(moved) / 2 > 10
    monkeypatch.setattr(LocalEngine, "generate", never)
    found = trained(
        make({**changes, "num_cycles": 2, "rollout.replay": run.output, "output": str(tmp_path / "replay")})
    )
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(value, found[name])] == []
    assert not (tmp_path / "replay").exists()  # nothing is dumped again


def test_a_run_with_refills_is_replayed_too(
    flow_grpo: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept is what was trained on: here one group of two, one of the refill and none."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "def score(pictures, prompts, metadata):\n"
        "    dead = [entry['text'] < '60' for entry in metadata]\n"
        "    return [1.0 if d else float(p.mean()) for d, p in zip(dead, pictures)]\n"
    )
    name = f"{plugin}:score"
    own = {"plugins": [name], "rewards": {"mine": {"kind": "function", "function": name}}, "num_cycles": 6}
    run = flow_grpo({**own, "rollout.dump_every": 1, "rollout.max_refills": 1})
    wanted = trained(run)
    groups = [len(dump.load(path)[0]) // 3 for path in dump.find(run.output)]
    assert len(groups) == 6
    assert {1, 2} <= set(groups)
    monkeypatch.setattr(LocalEngine, "generate", never)
    found = trained(flow_grpo({**own, "rollout.replay": str(Path(run.output) / "rollouts")}))
    assert [name for name, value in wanted.items() if not torch.equal(value, found[name])] == []


def test_more_cycles_than_files_go_round(nft: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their cycles, of which every second one was kept."""
    run = nft({"rollout.dump_every": 2})
    trained(run)
    with build(nft({"num_cycles": 1})) as built:
        sampled = built.trainer.run_cycle()["reward/jpeg"]
    kept = dump.find(run.output)
    assert [path.name for path in kept] == ["00000000.safetensors", "00000002.safetensors"]
    seen, inner = list[Path](), dump.load

    def load(path: Path) -> Any:
        seen.append(path)
        return inner(path)

    monkeypatch.setattr(dump, "load", load)
    monkeypatch.setattr(LocalEngine, "generate", never)
    with build(nft({"rollout.replay": run.output, "num_cycles": 5})) as built:
        assert seen == kept[:1]  # tried when the run is built
        seen.clear()
        metrics = [built.trainer.run_cycle() for _ in range(5)]
        assert (built.trainer.counters.cycle, built.trainer.counters.samples) == (5, 30)
    assert seen == [kept[i] for i in (0, 1, 0, 1, 0)]
    assert all(own["train/policy_grad_norm"] > 0 for own in metrics)
    assert metrics[2]["reward/jpeg"] == metrics[0]["reward/jpeg"] == sampled != metrics[1]["reward/jpeg"]


def test_files_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("10.safetensors", "9.safetensors", "011.safetensors", "notes.safetensors", "8.safetensors.writing"):
        (tmp_path / name).touch()
    assert [path.name for path in dump.find(str(tmp_path))] == ["9.safetensors", "10.safetensors", "011.safetensors"]


@pytest.mark.parametrize("where", ["nowhere", "empty", "run", "file"])
def test_a_folder_without_rollouts_is_refused_before_training(nft: MakeRun, tmp_path: Path, where: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "rollouts" / "notes.safetensors").touch()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"^rollout.replay: {tmp_path / where} holds no rollout; make some with \S+$"):
        build(nft({"rollout.replay": str(tmp_path / where)}))


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def harm(path: Path, what: str, marker: Path) -> None:
    """Replaces a rollout by something else."""
    tensors, metadata = read_tensors(path)
    if what == "pickle":
        path.write_bytes(pickle.dumps(Marker(marker)))
    elif what == "torch":
        torch.save({"total": Marker(marker)}, path)
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif what == "nothing":
        path.write_bytes(b"")
    elif what in tensors:
        write_tensors(path, {name: value for name, value in tensors.items() if name != what}, metadata)
    elif what == "other":
        write_tensors(path, tensors)
    else:
        write_tensors(path, tensors, {"rows": what})


@pytest.mark.parametrize(
    "what",
    [
        "pickle", "torch", "cut", "nothing", "other", "values/ocr", "0/latents", "1/grid", "no json", "{}", "3", "[3]",
        "[null]", "[{}]", '[{"latent_indices": [1]}]', '{"rows": []}',
    ],
)  # fmt: skip
def test_b49_a_file_that_is_no_rollout_is_refused(tmp_path: Path, what: str) -> None:
    """In one line that names it, and nothing in it is executed."""
    given = [trajectory(i, StepPlan((1,), (1, 2), None), {}) for i in range(2)]
    path = dump.save(tmp_path, 0, given, {"ocr": torch.zeros(2).double()})
    harm(path, what, tmp_path / "marker")
    with pytest.raises(ValueError, match=r"^rollout\.replay: ") as error:
        dump.load(path)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("what", ["pickle", "cut"])
def test_b49_a_run_stops_at_a_file_that_is_no_rollout(nft: MakeRun, tmp_path: Path, what: str) -> None:
    run = nft({"rollout.dump_every": 1, "num_cycles": 2})
    trained(run)
    harm(dump.find(run.output)[1], what, tmp_path / "marker")
    with build(nft({"rollout.replay": run.output})) as built:
        built.trainer.run_cycle()
        before = built.roles.fingerprint("policy")
        with pytest.raises(ValueError, match=r"00000001.safetensors is no rollout that can be read"):
            built.trainer.run_cycle()
        assert built.roles.fingerprint("policy") == before
    assert not (tmp_path / "marker").exists()


def test_b41_a_rollout_of_other_settings_is_refused(flow_grpo: MakeRun) -> None:
    """Its transitions would be scored by another kernel than the one that made them."""
    run = flow_grpo({"rollout.dump_every": 1, "num_cycles": 1})
    trained(run)
    for changes, said in (
        (
            {"algorithm.kind": "cps"},
            "the rollout was made with kind 'sde', and algorithm.kind is 'cps'; set it to 'sde'",
        ),
        ({"algorithm.eta": 0.5}, "the rollout was made with eta 0.7, and algorithm.eta is 0.5; set it to 0.7"),
        ({"algorithm.guidance": 2.0}, "the rollout was made with guidance 1.0, and algorithm.guidance is 2.0"),
        ({"rollout.group_size": 2}, "group 0 has 3 samples, and rollout.group_size is 2"),
        (
            {"algorithm.num_steps": 5},
            r"the rollout was made on the sigmas \[1.0, 0.9, 0.75, 0.5, 0.0\]; set",
        ),
        (
            {"algorithm.shift": 2.0},
            r"the rollout was made on the sigmas \[1.0, 0.9, 0.75, 0.5, 0.0\]; set",
        ),
        (
            {"algorithm.steps": {"strategy": "window", "count": 1}},
            r"the rollout was made with the stochastic steps \(0, 1, 2\)",
        ),
    ):
        with pytest.raises(ValueError, match=f"^rollout.replay: .*00000000.safetensors: {said}"):
            build(flow_grpo({"rollout.replay": run.output, **changes}))


def test_a_replay_takes_the_weights_of_its_own_recipe(flow_grpo: MakeRun) -> None:
    """With the reward turned round every advantage is, and so is the first gradient; another reward is refused."""
    with build(flow_grpo({"rollout.dump_every": 1, "num_cycles": 1})) as built:
        made = built.trainer.collector.collect(0, 0)
    source = str(Path(built.config.output))
    changes: dict[str, Any] = {"rollout.replay": source, "rewards.jpeg.weight": -2.0, "output": f"{source}-2"}
    with build(flow_grpo(changes)) as built:
        replayed = built.trainer.collector.collect(0, 0)
    assert made.scores is not None
    assert replayed.scores is not None
    assert torch.equal(replayed.scores.total, -2 * made.scores.total)
    other = {"rollout.replay": source, "rewards": {"look": {"kind": "colour"}}, "output": f"{source}-3"}
    with pytest.raises(ValueError, match="has no reward 'look'; it has jpeg"):
        build(flow_grpo(other))
