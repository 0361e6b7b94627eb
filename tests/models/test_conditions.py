"""Conditions on disk: the same bits as without, never another's, and nothing that a kill or a stranger left."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sigmazero.config import RunConfig, parse
from sigmazero.launch.local import build
from sigmazero.launch.tiny import write_tiny
from sigmazero.models import FAMILIES, conditions
from sigmazero.models.conditions import ConditionsFolder, KnownPrompts, encoder_fingerprint
from sigmazero.records import Conditioning

TEXTS = ("a red cat", "the number 42 on a blue wall, two old dogs look at it", "a red cat")
FIELDS = {"text": torch.arange(6.0).reshape(1, 2, 3).bfloat16(), "mask": torch.tensor([[True, False]])}


class Counted:
    """A family that counts the texts that it encodes, and keeps its encoders."""

    def __init__(self, model: Any) -> None:
        self._model, self.encoded = model, list[str]()

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        self.encoded += prompts
        return self._model.encode(prompts)

    def free_encoders(self) -> None:
        pass


class Stub:
    """Says of every text the same ``FIELDS``."""

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        return Conditioning(FIELDS)

    def free_encoders(self) -> None:
        pass


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("conditions")
    for family in ("sd3", "flux2", "qwen_image"):
        write_tiny(family, folder / family)
    return {path.name: path for path in folder.iterdir()}


def prepared(model: Any, cache: ConditionsFolder | None) -> KnownPrompts:
    known = KnownPrompts(model)
    known.prepare(TEXTS, cache=cache)
    return known


def same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == value.dtype and torch.equal(first[name], value) for name, value in second.items()
    )


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("sd3", torch.float32), ("flux2", torch.float32), ("qwen_image", torch.float32), ("qwen_image", torch.bfloat16)],
)
def test_b09_b53_texts_from_disk_have_the_bits_of_the_encoders(
    pipelines: dict[str, Path], tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """Each text and the negative one once, with its own length and mask; the second run calls no encoder."""
    module = importlib.import_module(FAMILIES[family])
    model = Counted(module.load(str(pipelines[family]), height=32, width=32, dtype=dtype))
    cache = ConditionsFolder(tmp_path, "f" * 32)
    plain = prepared(model, None)
    model.encoded.clear()
    first = prepared(model, cache)
    assert sorted(model.encoded) == sorted({"", *TEXTS})
    model.encoded.clear()
    second = prepared(model, cache)
    assert model.encoded == []
    for texts in ([""], [TEXTS[0]], list(TEXTS), [TEXTS[1], ""]):
        assert same_bits(first.encode(texts).fields, plain.encode(texts).fields)
        assert same_bits(second.encode(texts).fields, plain.encode(texts).fields)
    assert not same_bits(second.encode([""]).fields, second.encode([TEXTS[0]]).fields)


def test_a_run_that_finds_its_conditions_runs_no_encoder(
    pipelines: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(cache: str) -> RunConfig:
        data = {"batch_size": 2, "height": 32, "width": 32, "conditions_cache": cache}
        return parse(
            {
                "output": "unused",
                "model": {"family": "sd3", "path": str(pipelines["sd3"])},
                "roles": {"storage": "lora", "lora": {"rank": 2, "alpha": 2.0}},
                "data": data,
                "algorithm": {"name": "dmd2", "num_steps": 2, "teacher_steps": 2},
                "optimizers": {"student": {}, "fake_score": {}},
                "training": {"threads": 1, "device": "cpu"},
            }
        )

    cached = settings(str(tmp_path / "cache"))
    assert cached.identity() == settings("").identity()
    assert cached.data.prompts == "shipped"
    with build(settings("")) as plain:
        expected = plain.trainer.run_cycle()
    with build(cached):
        pass
    monkeypatch.setattr("sigmazero.models.sd3.SD3Model._encode", lambda *_: pytest.fail("an encoder ran"))
    with build(cached) as built:
        found = built.trainer.run_cycle()
    assert {n: v for n, v in found.items() if not n.startswith(("time/", "memory/"))} == {
        n: v for n, v in expected.items() if not n.startswith(("time/", "memory/"))
    }


@pytest.fixture
def kept(tmp_path: Path) -> tuple[ConditionsFolder, Path]:
    """A folder with one condition, and its file."""
    cache = ConditionsFolder(tmp_path / "cache", "aa")
    cache.write("a red cat", Conditioning(FIELDS))
    return cache, tmp_path / "cache" / "aa" / f"{hashlib.sha256(b'a red cat').hexdigest()}.safetensors"


def opened(file: Path) -> ConditionsFolder:
    """The folder of a file, as another run opens it."""
    return ConditionsFolder(file.parents[1], file.parent.name)


def rewrite(file: Path, **said: str) -> None:
    """The same tensors, with other metadata."""
    saved = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])["__metadata__"]
    save_file(load_file(file), file, {**saved, **said})


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b""),
        lambda file: torch.save(FIELDS, file),
        flip,
        lambda file: rewrite(file, text='"another"'),
        lambda file: rewrite(file, encoder="bb"),
        lambda file: save_file(FIELDS, file),
    ],
    ids=["truncated", "empty", "pickle", "one_bit", "of_another_text", "of_another_encoder", "says_nothing"],
)
def test_b49_a_spoilt_or_foreign_file_is_named_and_encoded_again(
    kept: tuple[ConditionsFolder, Path], spoil: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _, file = kept
    spoil(file)
    known = KnownPrompts(Stub())  # pyright: ignore[reportArgumentType]
    known.prepare(["a red cat"], cache=opened(file))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: data.conditions_cache: ")
    assert str(file) in line
    again = opened(file).read("a red cat")
    assert again is not None
    assert same_bits(again.fields, FIELDS)


def test_b49_b50_a_file_of_embeddings_is_no_cache_and_texts_lead_nowhere_else(tmp_path: Path) -> None:
    pickled = tmp_path / "prompt_embeds.pt"
    torch.save(FIELDS, pickled)
    with pytest.raises(ValueError, match=r"data\.conditions_cache: .*prompt_embeds\.pt is a file"):
        ConditionsFolder(pickled, "aa")
    cache = ConditionsFolder(tmp_path / "in" / "cache", "aa")
    texts = ["../../outside", "/etc/passwd", "a\0b", "x" * 5000, "\udcff", ""]
    for text in texts:
        cache.write(text, Conditioning(FIELDS))
        assert ConditionsFolder(tmp_path / "in" / "cache", "aa").read(text) is not None
    assert {path.parent for path in tmp_path.rglob("*.safetensors")} == {tmp_path / "in" / "cache" / "aa"}
    assert len(list((tmp_path / "in" / "cache" / "aa").iterdir())) == len(texts)


def test_b24_a_kill_while_writing_leaves_the_old_file_or_none(
    kept: tuple[ConditionsFolder, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, file = kept
    before = file.read_bytes()

    def cut_off(path: Path, *_: Any) -> None:
        path.write_bytes(before[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(conditions, "write_tensors", cut_off)
    for text in ("a red cat", "another"):
        with pytest.raises(KeyboardInterrupt):
            cache.write(text, Conditioning(FIELDS))
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert file.read_bytes() == before
    assert opened(file).read("another") is None


def test_two_processes_that_write_one_text_at_once_both_leave_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second writes and finishes between the first one's writing and its renaming."""
    first, second, write = ConditionsFolder(tmp_path, "aa"), ConditionsFolder(tmp_path, "aa"), conditions.write_tensors

    def interrupted(path: Path, *rest: Any) -> None:
        monkeypatch.setattr(conditions, "write_tensors", write)
        path.write_bytes(b"half")
        second.write("a red cat", Conditioning(FIELDS))
        write(path, *rest)

    monkeypatch.setattr(conditions, "write_tensors", interrupted)
    first.write("a red cat", Conditioning(FIELDS))
    found = ConditionsFolder(tmp_path, "aa").read("a red cat")
    assert found is not None
    assert same_bits(found.fields, FIELDS)
    assert len(list((tmp_path / "aa").iterdir())) == 1


def test_the_fingerprint_follows_all_that_a_condition_comes_from(pipelines: dict[str, Path], tmp_path: Path) -> None:
    folder, source = tmp_path / "sd3", tmp_path / "family.py"
    shutil.copytree(pipelines["sd3"], folder)
    source.write_text("T5_LENGTH = 256\n")
    first = encoder_fingerprint(folder, source, "float32")
    (folder / "transformer" / "config.json").write_text("{}")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert encoder_fingerprint(folder, source, "float32") == first
    found = {first, encoder_fingerprint(folder, source, "bfloat16")}
    for name in ("text_encoder/model.safetensors", "text_encoder_3/model.safetensors", "text_encoder_2/config.json"):
        flip(folder / name)
        found.add(encoder_fingerprint(folder, source, "float32"))
    (folder / "tokenizer_3" / "added.json").write_text("{}")
    found.add(encoder_fingerprint(folder, source, "float32"))
    source.write_text("T5_LENGTH = 255\n")
    found.add(encoder_fingerprint(folder, source, "float32"))
    assert len(found) == 7


def supplied(
    pipelines: dict[str, Path], tmp_path: Path, family: str, texts: Sequence[str], **data: Any
) -> tuple[RunConfig, RunConfig]:
    """A run with encoders, and one whose model folder has none; both with one folder of conditions."""
    bare, prompts = tmp_path / "bare", tmp_path / "prompts.txt"
    shutil.copytree(pipelines[family], bare, ignore=shutil.ignore_patterns("text_encoder*", "tokenizer*"))
    prompts.write_text("\n".join(texts))
    common = {"prompts": str(prompts), "batch_size": 2, "height": 32, "width": 32}
    first, second = (
        parse(
            {
                "output": "unused",
                "model": {"family": family, "path": str(path)},
                "roles": {"storage": "lora", "lora": {"rank": 2, "alpha": 2.0}},
                "data": {**common, "conditions_cache": str(tmp_path / "cache"), **data},
                "algorithm": {"name": "dmd2", "num_steps": 2, "teacher_steps": 2, "guidance": 2.0},
                "optimizers": {"student": {}, "fake_score": {}},
                "training": {"threads": 1, "device": "cpu"},
            }
        )
        for path in (pipelines[family], bare)
    )
    return first, second


@pytest.mark.parametrize("family", ["sd3", "flux2", "qwen_image"])
def test_a_model_folder_without_encoders_trains_on_supplied_conditions(
    pipelines: dict[str, Path], tmp_path: Path, family: str
) -> None:
    first, second = supplied(pipelines, tmp_path, family, TEXTS)
    logs = []
    for config in (first, second):
        with build(config) as built:
            logs.append(built.trainer.run_cycle())
    numbers = [{n: v for n, v in log.items() if not n.startswith(("time/", "memory/"))} for log in logs]
    assert numbers[0] == numbers[1]


def test_prompts_that_were_not_supplied_are_refused_by_name(pipelines: dict[str, Path], tmp_path: Path) -> None:
    first, second = supplied(pipelines, tmp_path, "sd3", TEXTS)
    with pytest.raises(ValueError, match=r"has conditions of 0 text encoders of sd3 in float32"):
        build(second)
    with build(first):
        pass
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / f"{hashlib.sha256(TEXTS[1].encode()).hexdigest()}.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"lacks 'the number 42 .* \(1 of 3 texts\), and .*bare has no text encoder"):
        build(second)
    with pytest.raises(ValueError, match=r"model\.path: .* lacks text_encoder"):
        build(supplied(pipelines, tmp_path / "none", "sd3", TEXTS, conditions_cache="")[1])
    (tmp_path / "cache" / "sd3-float32-other").mkdir()
    with pytest.raises(ValueError, match="has conditions of 2 text encoders"):
        build(second)


def test_b15_a_cache_of_a_family_without_encoders_is_refused() -> None:
    run = {"algorithm": {"name": "dmd2"}, "optimizers": {"student": {}, "fake_score": {}}}
    with pytest.raises(
        ValueError, match=r"data\.conditions_cache and model\.dtype do nothing with model\.family glyph"
    ):
        parse({**run, "data": {"conditions_cache": "cache"}})
