"""What a recipe may not say, and what it means where it may (B15, B50)."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sigmazero.config import RunConfig, load_recipe, parse

RECIPE = """\
num_cycles: 3
data:
  batch_size: 8
algorithm:
  name: dmd2
  num_steps: 4
  score_sigma:
    shift: 2.0
optimizers:
  student: {lr: 1e-4}
  fake_score: {lr: 2e-4}
"""
FOLDER = Path(__file__).parents[1] / "recipes"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.yaml"


def load(path: Path, text: str = RECIPE, *overrides: str) -> RunConfig:
    path.write_text(text)
    return load_recipe(path, overrides)


def refusal(path: Path, text: str = RECIPE, *overrides: str) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (each test checks the message)
        load(path, text, *overrides)
    return str(error.value)


def changed(old: str, new: str) -> str:
    assert old in RECIPE
    return RECIPE.replace(old, new)


def test_values_of_a_recipe_and_its_defaults(path: Path) -> None:
    run = load(path)
    assert (run.num_cycles, run.data.batch_size, run.seed) == (3, 8, 0)
    assert run.algorithm.name == "dmd2"
    assert (run.algorithm.num_steps, run.algorithm.score_sigma.shift) == (4, 2.0)
    assert {role: o.lr for role, o in run.optimizers.items()} == {"student": 1e-4, "fake_score": 2e-4}


def test_output_is_named_after_the_recipe_unless_it_is_given(path: Path) -> None:
    assert load(path).output == "runs/tiny"
    assert load(path, RECIPE + "output: here\n").output == "here"
    assert load(path, RECIPE + "output: here\n", "output=there=too").output == "there=too"


def test_overrides_reach_nested_keys_and_leave_the_others(path: Path) -> None:
    overrides = ["algorithm.score_sigma.low=0.1", "optimizers.student.lr=3e-4", "evaluate.shift=null", "seed=9"]
    run = load(path, RECIPE, *overrides, "optimizers.student.betas=[0.5, 0.9]", "training.threads=1", "seed=10")
    assert run.algorithm.name == "dmd2"
    assert (run.algorithm.score_sigma.low, run.algorithm.score_sigma.shift) == (0.1, 2.0)
    assert (run.optimizers["student"].lr, run.optimizers["fake_score"].lr) == (3e-4, 2e-4)
    assert run.optimizers["student"].betas == (0.5, 0.9)
    assert (run.training.threads, run.seed, run.evaluate.shift) == (1, 10, None)


def test_an_override_equals_the_same_line_in_the_file(path: Path) -> None:
    assert load(path, RECIPE, "algorithm.num_steps=2") == load(path, changed("num_steps: 4", "num_steps: 2"))


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        (changed("num_cycles", "num_cycle"), "num_cycle", "num_cycles"),
        (changed("num_cycles", "num-cycles"), "num-cycles", "num_cycles"),
        (changed("batch_size", "batchsize"), "data.batchsize", "data.batch_size"),
        (changed("num_steps", "num_stepz"), "algorithm.num_stepz", "algorithm.num_steps"),
        (changed("num_steps", "flow_shift"), "algorithm.flow_shift", "algorithm.shift"),
        (changed("    shift", "    shfit"), "algorithm.score_sigma.shfit", "algorithm.score_sigma.shift"),
        (changed("student: {lr", "student: {lrr"), "optimizers.student.lrr", "optimizers.student.lr"),
        (RECIPE + "roles: {lora: {rnk: 4}}\n", "roles.lora.rnk", "roles.lora.rank"),
        (RECIPE + "num_steps: 4\n", "num_steps", "algorithm.num_steps"),
        (RECIPE + "lr: 1e-3\n", "lr", "optimizers.student.lr"),
        (changed("  name: dmd2", "  name: dmd2\n  batch_size: 4"), "algorithm.batch_size", "data.batch_size"),
    ],
)
def test_b15_a_misspelt_or_misplaced_key_is_refused_with_what_was_meant(
    path: Path, text: str, key: str, meant: str
) -> None:
    message = refusal(path, text)
    assert f"unknown key '{key}' (given " in message
    assert f"did you mean '{meant}'?" in message


def test_b15_an_override_of_an_unknown_key_is_refused_like_one_of_the_file(path: Path) -> None:
    message = refusal(path, RECIPE, "algorithm.num_stepz=8")
    assert message == "unknown key 'algorithm.num_stepz' (given 8); did you mean 'algorithm.num_steps'?"


def test_b15_every_fault_of_a_recipe_is_named_at_once(path: Path) -> None:
    message = refusal(path, RECIPE + "sed: 1\nplugin: []\n", "data.batch_size=0")
    assert all(f"'{key}'" in message for key in ("sed", "plugin"))
    assert "data.batch_size is 0" in message


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("optimizers.student.lr='1e-4'", "optimizers.student.lr is '1e-4': input should be a valid number"),
        ("optimizers.student.lr=-1", "optimizers.student.lr is -1: "),
        ("optimizers.student.betas=[0.9, 1.0]", "betas are (0.9, 1.0); each must lie in [0, 1)"),
        ("optimizers.student.betas=[0.9]", "optimizers.student.betas"),
        ("algorithm.num_steps='4'", "algorithm.num_steps is '4': input should be a valid integer"),
        ("algorithm.num_steps=0", "algorithm.num_steps is 0: input should be greater than or equal to 1"),
        ("algorithm.num_steps=2.5", "algorithm.num_steps is 2.5"),
        ("algorithm.num_steps=true", "algorithm.num_steps is True"),
        ("algorithm.num_steps=", "algorithm.num_steps is None"),
        ("algorithm.score_sigma.low=0.99", "low is 0.99 and high is 0.98; low must be below high"),
        ("algorithm.shift=.nan", "algorithm.shift is nan"),
        ("algorithm.guidance=.inf", "algorithm.guidance is inf"),
        ("algorithm.transition=heun", "algorithm.transition is 'heun': input should be 'renoise' or 'euler'"),
        ("seed=-1", "seed is -1"),
        ("seed=9223372036854775808", "seed is 9223372036854775808"),
        ("output=3", "output is 3: input should be a valid string"),
        ("model=glyph", "model is 'glyph': it must be a group of keys"),
        ("plugins=a.py:f", "plugins is 'a.py:f'"),
    ],
)
def test_b15_a_value_out_of_range_or_of_another_type_is_refused(path: Path, override: str, complaint: str) -> None:
    assert complaint in refusal(path, RECIPE, override)


def test_b15_a_number_written_as_text_is_refused_in_the_file_too(path: Path) -> None:
    assert "optimizers.student.lr is '1e-4'" in refusal(path, changed("lr: 1e-4", 'lr: "1e-4"'))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (RECIPE + "num_cycles: 4\n", "duplicate key num_cycles"),
        (changed("  num_steps: 4", "  num_steps: 4\n  num_steps: 5"), "duplicate key num_steps"),
        (changed("  num_steps: 4", "\tnum_steps: 4"), "tab character"),
        (RECIPE + "---\nseed: 1\n", "single document"),
        (RECIPE + "output: [\n", "is not plain YAML"),
        (RECIPE + "output: ${\n", "is not plain YAML"),
        ("", "must be a mapping of settings"),
        ("- 1\n", "must be a mapping of settings, got [1]"),
    ],
)
def test_b15_a_file_that_is_not_plain_yaml_is_refused(path: Path, text: str, complaint: str) -> None:
    message = refusal(path, text)
    assert complaint in message
    assert str(path) in message


def test_a_file_that_is_not_text_or_not_there_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no recipe .*tiny\.yaml"):
        load_recipe(path)
    path.write_bytes(b"seed: \xff\xfe\n")
    with pytest.raises(ValueError, match="is not plain YAML"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("algorithm.num_steps", "override 'algorithm.num_steps' is not of the form key=value"),
        ("=3", "override '=3' is not of the form key=value"),
        ("output=[", "override 'output=[': the value is not YAML"),
        ("num_cycles.a=3", "override 'num_cycles.a=3': num_cycles is a value, not a group of keys"),
    ],
)
def test_b15_an_override_that_cannot_be_read_is_refused(path: Path, override: str, complaint: str) -> None:
    assert complaint in refusal(path, RECIPE, override)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (changed("name: dmd2", "name: dmd3"), "algorithm.name is 'dmd3'; known are awm, best_of_group, dmd2, dpo,"),
        (changed("  name: dmd2\n", ""), "algorithm.name is None; known are awm, best_of_group, dmd2, dpo,"),
        ("seed: 1\n", "algorithm is missing"),
        ("algorithm: dmd2\n", "algorithm is 'dmd2': it must be a group of keys"),
        (changed("fake_score:", "critic:"), "optimizers.critic: dmd2 trains no role 'critic'; it trains student, fake"),
        (
            changed("  fake_score: {lr: 2e-4}\n", ""),
            "optimizers.fake_score is missing: dmd2 trains student, fake_score",
        ),
        ("algorithm: {name: flow_matching}\noptimizers: {fake_score: {}}\n", "trains no role 'fake_score'"),
        ("algorithm: {name: flow_matching, fake_updates: 5}\noptimizers: {student: {}}\n", "algorithm.fake_updates"),
    ],
)
def test_b15_an_unknown_algorithm_or_role_is_refused(path: Path, text: str, complaint: str) -> None:
    assert complaint in refusal(path, text)


def test_b15_interpolations_are_refused_and_not_resolved(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGMAZERO_TEST", "resolved")
    text = "${oc.env:SIGMAZERO_TEST}"
    for message in (refusal(path, RECIPE + f"output: {text}\n"), refusal(path, RECIPE, f"output={text}")):
        assert text in message
        assert "no interpolation" in message
    assert "seed is '${num_cycles}'" in refusal(path, RECIPE, "seed=${num_cycles}")


@pytest.mark.parametrize("tag", ["apply:os.system [{call}]", "apply:subprocess.Popen [[{call}]]", "name:os.system"])
def test_b50_python_tags_are_refused_without_effect(path: Path, tmp_path: Path, tag: str) -> None:
    witness = tmp_path / "witness"
    value = f"!!python/object/{tag}".replace("{call}", f"touch {witness}").replace("object/name", "name")
    assert "is not plain YAML" in refusal(path, RECIPE + f"output: {value}\n")
    assert "the value is not YAML" in refusal(path, RECIPE, f"output={value}")
    assert not witness.exists()


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        (
            "algorithm.gan_weight=.1",
            "gan_weight is 0.1, but the adversarial term is not built yet; set gan_weight to 0",
        ),
        ("algorithm.regression_weight=1", "regression_weight is 1.0, but the regression on pairs is not built yet"),
        ("algorithm.student_input=data", "student_input is 'data', which is not built yet; set 'simulate'"),
        ("algorithm.student_input=mixed", "student_input is 'mixed', which is not built yet; set 'simulate'"),
    ],
)
def test_options_that_are_not_built_are_refused_by_name(path: Path, override: str, complaint: str) -> None:
    assert complaint in refusal(path, RECIPE, override)


@pytest.mark.parametrize(
    "override",
    [
        "output=elsewhere",
        "overwrite=true",
        "training.log_every=1",
        "training.checkpoint_every=1",
        "training.keep_checkpoints=9",
        "training.tensorboard=false",
        "training.threads=3",
        "training.rollout_rows=7",
        "training.shard_ranks=2",
        "training.reshard=false",
        "optimizers.student.lr=0.5",
        "optimizers.student.warmup_steps=1",
    ],
)
def test_identity_ignores_where_a_run_is_written_how_it_is_watched_and_its_rates(path: Path, override: str) -> None:
    plain, other = load(path), load(path, RECIPE, override)
    assert plain != other
    assert plain.identity() == other.identity()


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "num_cycles=4",
        "data.batch_size=9",
        "algorithm.num_steps=2",
        "algorithm.score_sigma.low=0.1",
        "optimizers.student.micro_batch=4",
        "optimizers.student.decay=cosine",
        "optimizers.student.clip=0.5",
        "roles.storage=lora",
        "model.path=random",
    ],
)
def test_identity_knows_what_changes_the_numbers(path: Path, override: str) -> None:
    assert load(path).identity() != load(path, RECIPE, override).identity()


def test_a_resolved_run_can_be_read_back(path: Path) -> None:
    run = load(path)
    values: dict[str, Any] = run.model_dump(mode="json")
    assert parse(values) == run


@pytest.mark.parametrize("recipe", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_recipe_is_valid(recipe: Path) -> None:
    assert load_recipe(recipe).output == f"runs/{recipe.stem}"


def test_reading_a_recipe_imports_no_torch(path: Path) -> None:
    path.write_text(RECIPE)
    code = f"import sys; from sigmazero.config import load_recipe; load_recipe({str(path)!r})"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("value", ["!!binary aGVsbG8=", "!!python/object/apply:pathlib.PosixPath [a]"])
def test_b50_values_that_are_not_plain_yaml_are_refused(path: Path, value: str) -> None:
    assert "output" in refusal(path, RECIPE + f"output: {value}\n")
    assert "output" in refusal(path, RECIPE, f"output={value}")


@pytest.mark.parametrize("value", ["${", "${seed}", "???"])
def test_b15_interpolation_is_refused_in_an_override(path: Path, value: str) -> None:
    assert "output" in refusal(path, RECIPE, f"output={value}")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (["model.width=64"], "model.width and model.num_layers are of a random network"),
        (["roles.lora.rank=4"], "storage is 'copy', so it would do nothing"),
        (["plugins=[mine.py:plan]"], "plugins lists 'mine.py:plan', but no setting names it"),
        (
            ["algorithm.exit_step=shared", "algorithm.step_strategy=a.py:b", "plugins=[a.py:b]"],
            "draws the exits itself",
        ),
        (
            ["algorithm.exit_step=all", "algorithm.step_strategy=a.py:b", "plugins=[a.py:b]"],
            "exit_step is 'all', but step_strategy 'a.py:b' draws the exits itself",
        ),
        (["algorithm.exit_step=all", "algorithm.num_steps=1"], "num_steps 1 has one exit; set 'per_sample'"),
        (["output=' '"], "name a folder"),
        (["algorithm.shift=1e308"], "algorithm.shift is 1e+308"),
        (["data.batch_size=1000000000000"], "data.batch_size is 1000000000000"),
        (["num_cycles=100000000"], "num_cycles is 100000000"),
    ],
)
def test_b15_a_setting_that_would_do_nothing_or_cannot_be_is_refused(
    path: Path, changes: list[str], complaint: str
) -> None:
    assert complaint in refusal(path, RECIPE, *changes)


def test_b15_settings_of_another_algorithm_are_named_as_such(path: Path) -> None:
    message = refusal(path, RECIPE, "algorithm={name: flow_matching, fake_updates: 3}")
    assert "key 'algorithm.fake_updates' belongs to dmd2, and algorithm.name is 'flow_matching'" in message


def test_b15_flow_matching_refuses_prompts_and_a_shift_that_it_would_not_use(path: Path) -> None:
    text = "algorithm: {name: flow_matching}\noptimizers: {student: {lr: 0.1}}\n"
    assert "flow_matching learns from captioned pictures" in refusal(path, text, "data.prompts=mine.txt")
    assert "set algorithm.shift" in refusal(path, text, "evaluate.shift=2.0")


DMD2 = {"algorithm": {"name": "dmd2"}, "optimizers": {"student": {}, "fake_score": {}}}
REWARDED = {"algorithm": {"name": "flow_grpo"}, "optimizers": {"policy": {}}}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rewards": {}}, "rewards: flow_grpo needs at least one reward with a weight that is not 0"),
        ({"rewards": {"ocr": {"kind": "ocr", "weight": 0.0}}}, "rewards: flow_grpo needs at least one reward"),
        ({"rewards": {"ocr": {"kind": "ocrr"}}}, "rewards.ocr.kind is 'ocrr'; known are aesthetic, clip, colour"),
        ({"rewards": {"ocr": {"kind": "ocr", "wieght": 1.0}}}, "did you mean 'rewards.ocr.weight'?"),
        ({"rewards": {"ocr": {"kind": "ocr", "weight": "abc"}}}, "rewards.ocr.weight is 'abc'"),
        ({"rewards": {"a b": {"kind": "ocr"}}}, "rewards.a b: a reward's name is letters, digits and underscores"),
        ({"rewards": {"failed": {"kind": "ocr"}}}, "not 'failed'"),
        (
            {"rewards": {"ocr": {"kind": "ocr"}, "c": {"kind": "colour", "weight": 0.0, "normalize": "batch"}}},
            "normalize does nothing with weight 0",
        ),
        (
            {"rewards": {"r": {"kind": "remote", "url": "http://x", "time_limit": 5.0, "try_limit": 50.0}}},
            "try_limit is 50.0, more than time_limit, 5.0",
        ),
        ({"data": {"batch_size": 30}}, "data.batch_size is 30 and rollout.group_size 8"),
        ({"rollout": {"group_size": 1}}, "a group of one has no advantage"),
        ({"rollout": {"replay": "x", "max_refills": 1}}, "rollout.max_refills does nothing with rollout.replay"),
        ({"rollout": {"replay": "x", "dump_every": 1}}, "rollout.dump_every does nothing with rollout.replay"),
        ({"algorithm": {"name": "flow_grpo", "updates": 99}}, "algorithm.updates is 99, and a rollout has 32 rows"),
        ({"algorithm": {"name": "dpo", "updates": 5}}, "algorithm.updates is 5, and a rollout has 4 rows for dpo"),
        ({"algorithm": {"name": "flow_grpo", "kl_form": "flow_grpo"}}, "does nothing with kl_weight 0.0"),
        ({**DMD2}, "rewards.ocr.weight is 1.0, but dmd2 learns from no reward: set it to 0"),
        ({**DMD2, "rewards": {}, "rollout": {}}, "rollout is set, but dmd2 learns from no reward"),
    ],
)
def test_b15_rewards_and_rollouts_that_cannot_be_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse({"rewards": {"ocr": {"kind": "ocr"}}, **REWARDED, **changes})
    assert complaint in str(caught.value)
