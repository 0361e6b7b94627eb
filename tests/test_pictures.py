"""Folders of captioned pictures: order, crop and every complaint; velocity regression of a real family on one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sigmazero.config import RunConfig, parse
from sigmazero.data import PictureFolder, open_prompts
from sigmazero.launch.local import Built, build, train
from sigmazero.launch.tiny import write_tiny
from sigmazero.training import checkpoint
from sigmazero.training.folder import read_description

COLOURS = ("red", "lime", "blue", "black", "white", "yellow", "cyan")
CAPTIONS = [f"a {colour} wall" for colour in COLOURS]


def picture(path: Path, size: tuple[int, int] = (40, 30), colour: Any = "red", mode: str = "RGB") -> Path:
    """A file of one colour; ``size`` is (width, height), as Pillow has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def listed(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "captions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def walls(folder: Path, count: int = 7) -> Path:
    """Pictures of unlike sizes, each of the colour that its caption names, some in a sub-folder."""
    files = [f"{'more/' if i % 2 else ''}{i}.png" for i in range(count)]
    for i, file in enumerate(files):
        picture(folder / file, (40 + 9 * i, 64 - 5 * i), COLOURS[i])
    return listed(folder, [{"file": f, "prompt": c} for f, c in zip(files, CAPTIONS[:count], strict=True)])


def fitted(folder: Path, height: int = 32, width: int = 48, seed: int = 0) -> PictureFolder:
    pictures = PictureFolder(folder, seed)
    pictures.fit(height, width)
    return pictures


def shown(folder: Path, height: int, width: int) -> Tensor:
    """The one picture of a folder."""
    return fitted(folder, height, width).pictures([0])[0][0]


def test_b12_pictures_and_captions_are_functions_of_the_sample_index(tmp_path: Path) -> None:
    """In batches, backwards, one alone, by a second reader: the same; every pass in an order of its own."""
    folder = walls(tmp_path)
    stream = fitted(folder)
    straight, prompts = stream.pictures(range(21))
    for samples in ([*range(20, -1, -1)], [9, 2, 9], [13], range(6, 9)):
        for reader in (stream, fitted(folder)):
            again, same = reader.pictures(samples)
            assert torch.equal(again, straight[list(samples)])
            assert same == [prompts[s] for s in samples] == reader.prompts(samples)
    passes = [[prompt.text for prompt in prompts[i : i + 7]] for i in (0, 7, 14)]
    assert all(sorted(order) == sorted(CAPTIONS) for order in passes)
    assert len({tuple(order) for order in passes}) == 3
    assert fitted(folder, seed=1).prompts(range(21)) != prompts


def test_b53_pictures_of_any_size_are_one_batch_and_stay_with_their_captions(tmp_path: Path) -> None:
    """Three batches of three of seven pictures; one picture in a batch of four."""
    stream = fitted(walls(tmp_path / "seven"))
    for start in (0, 3, 6):
        pictures, prompts = stream.pictures(range(start, start + 3))
        assert (pictures.shape, pictures.dtype) == ((3, 3, 32, 48), torch.float32)
        for shown, prompt in zip(pictures, prompts, strict=True):
            colour = Image.new("RGB", (1, 1), prompt.text.split()[1]).getpixel((0, 0))
            assert torch.equal(shown, (torch.tensor(colour) / 255)[:, None, None].expand_as(shown))
    pictures, prompts = fitted(walls(tmp_path / "one", 1)).pictures(range(4))
    assert torch.equal(pictures, pictures[:1].expand_as(pictures))
    assert [prompt.text for prompt in prompts] == ["a red wall"] * 4


def test_the_middle_of_a_picture_is_kept_and_resized(tmp_path: Path) -> None:
    """Of 64x32 pixels the middle 32 columns, of 32x64 the middle rows; of the model's size every pixel as it is."""
    noise = np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    for name, pixels in (("wide", noise), ("high", noise.transpose(1, 0, 2))):
        (tmp_path / name).mkdir()
        Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / name / "a.png")
        (tmp_path / name / "a.txt").write_text("noise\n")
    wide, high = (torch.from_numpy(noise.transpose(axes).copy()).float() / 255 for axes in ((2, 0, 1), (2, 1, 0)))
    assert torch.equal(shown(tmp_path / "wide", 32, 32), wide[:, :, 16:48])
    assert torch.equal(shown(tmp_path / "high", 32, 32), high[:, 16:48])
    assert torch.equal(shown(tmp_path / "wide", 32, 64), wide)


def test_resizing_averages_in_both_directions(tmp_path: Path) -> None:
    """Halves of 128x64 pixels stay halves; a fine checkerboard becomes its mean, so nothing is sampled by point."""
    halves = np.zeros((64, 128, 3), np.uint8)
    halves[:, 64:] = 255
    board = np.indices((64, 64)).sum(0) % 2 * np.uint8(255)
    for name, image in (("halves", Image.fromarray(halves)), ("board", Image.fromarray(board.astype(np.uint8)))):
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "a.png")
        (tmp_path / name / "a.txt").write_text("a test card")
    left, right = shown(tmp_path / "halves", 16, 32).chunk(2, dim=2)
    assert float(left[..., :12].max()) == 0.0
    assert float(right[..., 4:].min()) == 1.0
    assert float((shown(tmp_path / "board", 16, 16) - 0.5).abs().max()) < 0.1


def test_pictures_are_upright_and_on_white(tmp_path: Path) -> None:
    """A photograph taken sideways (EXIF), and a transparent picture whose hidden colour is black."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    sideways = Image.new("RGB", (32, 16), "black")
    sideways.paste("white", (0, 0, 16, 16))
    for name in ("turned", "clear"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("a wall")
    sideways.save(tmp_path / "turned" / "a.png", exif=exif)
    picture(tmp_path / "clear" / "a.png", (32, 32), (0, 0, 0, 0), "RGBA")
    top, bottom = shown(tmp_path / "turned", 32, 16).chunk(2, dim=1)
    assert float(top.min()) == 1.0
    assert float(bottom.max()) == 0.0
    assert float(shown(tmp_path / "clear", 16, 16).min()) == 1.0


def test_a_text_beside_each_picture_is_its_caption(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.PNG", "sub/c.webp"):
        picture(tmp_path / name).with_suffix(".txt").write_text(f" picture {name}\n")
    (tmp_path / "notes.md").write_text("not a picture")
    assert [p.text for p in PictureFolder(tmp_path, 0).all()] == [
        "picture a.PNG",
        "picture b.jpg",
        "picture sub/c.webp",
    ]


def test_a_picture_may_have_several_captions(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    rows = [{"file": "./a.png", "prompt": "a wall"}, {"file": "a.png", "prompt": "a red wall"}]
    assert [p.text for p in PictureFolder(listed(tmp_path, rows), 0).all()] == ["a wall", "a red wall"]


def test_the_fingerprint_is_of_pictures_and_captions(tmp_path: Path) -> None:
    before = PictureFolder(walls(tmp_path), 0).fingerprint
    assert PictureFolder(tmp_path, 1).fingerprint == before
    listing = tmp_path / "captions.jsonl"
    text = listing.read_text()
    listing.write_text(text.replace("a red wall", "a dark red wall"))
    assert PictureFolder(tmp_path, 0).fingerprint != before
    listing.write_text(text)
    picture(tmp_path / "0.png", (40, 64), "maroon")
    assert PictureFolder(tmp_path, 0).fingerprint != before


def nothing(folder: Path) -> None:
    folder.mkdir()


def no_text(folder: Path) -> None:
    picture(folder / "a.png")


def blank_text(folder: Path) -> None:
    picture(folder / "a.png").with_suffix(".txt").write_text(" \n")


def latin_text(folder: Path) -> None:
    picture(folder / "a.png").with_suffix(".txt").write_bytes(b"caf\xe9")


def no_picture(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.png").write_text("hello")
    (folder / "a.txt").write_text("a wall")


def cut_short(folder: Path) -> None:
    path = picture(folder / "a.jpg", (200, 200))
    path.with_suffix(".txt").write_text("a wall")
    path.write_bytes(path.read_bytes()[:-200])


def too_deep(folder: Path) -> None:
    picture(folder / "a.png", colour=40_000, mode="I;16").with_suffix(".txt").write_text("a wall")


def unlisted(folder: Path) -> None:
    picture(walls(folder) / "new.png")


def row(**values: Any) -> Callable[[Path], None]:
    """A second line of ``captions.jsonl``."""

    def make(folder: Path) -> None:
        picture(folder / "a.png")
        listed(folder, [{"file": "a.png", "prompt": "a wall"}, values])

    return make


def linked(name: str) -> Callable[[Path], None]:
    """One file is a link to something outside of the folder."""

    def make(folder: Path) -> None:
        outside = folder.parent / f"outside_{name}"
        for base in (folder, folder.parent):
            picture(base / "a.png").with_suffix(".txt").write_text("a wall")
        listed(folder, [{"file": "a.png", "prompt": "a wall"}])
        if name == "a.txt":
            (folder / "captions.jsonl").unlink()
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return make


FOREIGN = "which is no picture in the folder; give its path in there"
SECOND = "/captions.jsonl, line 2: "


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda folder: None, "data.pictures: there is no folder FOLDER"),
        (nothing, "data.pictures: FOLDER holds no picture"),
        (no_text, "data.pictures: FOLDER/a.png has no caption; write one into FOLDER/a.txt"),
        (blank_text, "data.pictures: FOLDER/a.txt, line 1: prompt is ' \\n'"),
        (latin_text, "data.pictures: FOLDER/a.txt, line 1: this is not UTF-8 text"),
        (no_picture, "data.pictures: FOLDER/a.png cannot be read as a picture: cannot identify image file"),
        (cut_short, "data.pictures: FOLDER/a.jpg cannot be read as a picture: "),
        (too_deep, "data.pictures: FOLDER/a.png cannot be read as a picture: it is grey with more than 8 bits"),
        (unlisted, "data.pictures: FOLDER/new.png has no caption; give it a line in FOLDER/captions.jsonl"),
        (row(file="b.png", prompt="x"), f"FOLDER{SECOND}file is 'b.png', {FOREIGN}"),
        (row(prompt="x"), f"FOLDER{SECOND}file is None, {FOREIGN}"),
        (row(file=7, prompt="x"), f"FOLDER{SECOND}file is 7, {FOREIGN}"),
        (row(file="a.png"), f"FOLDER{SECOND}there is no 'prompt'"),
        (row(file="a.png", prompt=" "), f"FOLDER{SECOND}prompt is ' '"),
        (row(file="a.png", prompt="x", weight=2), f"FOLDER{SECOND}the key 'weight' would do nothing"),
        (row(file="../out.png", prompt="x"), f"FOLDER{SECOND}file is '../out.png', {FOREIGN}"),
        (row(file="/etc/passwd", prompt="x"), f"FOLDER{SECOND}file is '/etc/passwd', {FOREIGN}"),
        (row(file="a\0.png", prompt="x"), f"FOLDER{SECOND}file is 'a\\x00.png', {FOREIGN}"),
        *((linked(n), f"FOLDER/{n} is a link to a file outside") for n in ("a.png", "a.txt", "captions.jsonl")),
    ],
)
def test_b15_what_is_wrong_is_one_line_that_names_the_file(
    tmp_path: Path, make: Callable[[Path], None], complaint: str
) -> None:
    folder = tmp_path / "pictures"
    make(folder)
    picture(tmp_path / "out.png")  # it is there, so that only where it lies is wrong with it
    with pytest.raises(ValueError, match=r"data.pictures") as error:
        PictureFolder(folder, 0)
    assert complaint.replace("FOLDER", str(folder)) in str(error.value)
    assert "\n" not in str(error.value)


def test_b15_a_picture_that_is_gone_later_is_named(tmp_path: Path) -> None:
    stream = fitted(walls(tmp_path, 1))
    (tmp_path / "0.png").unlink()
    with pytest.raises(ValueError, match=r"data.pictures: .*0\.png cannot be read as a picture"):
        stream.pictures([0])


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run of two cycles of three samples, adapters over a tiny SD3."""
    folder = tmp_path_factory.mktemp("sft")
    write_tiny("sd3", folder / "sd3")
    return {
        "output": str(folder / "run"),
        "num_cycles": 2,
        "model": {"family": "sd3", "path": str(folder / "sd3")},
        "roles": {"storage": "lora", "lora": {"rank": 4, "alpha": 8.0}},
        "data": {"pictures": str(walls(folder / "pictures", 4)), "batch_size": 3, "height": 32, "width": 48},
        "algorithm": {"name": "flow_matching", "num_steps": 2, "caption_dropout": 0.5},
        "optimizers": {"student": {"lr": 1e-3, "micro_batch": 2}},
        "training": {"threads": 1, "device": "cpu", "log_every": 1, "checkpoint_every": 1, "tensorboard": False},
        "evaluate": {"num_captions": 8, "samples_per_caption": 2, "bootstrap": 20},
    }


def tensors(built: Built) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in built.trainer.tensors().items()}


def base(built: Built) -> dict[str, Tensor]:
    return {n: v.clone() for n, v in built.roles.model.net.state_dict().items() if ".lora_" not in n}


def test_b11_b12_velocity_regression_moves_only_the_student_and_resumes_to_the_bit(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    config = parse(settings)
    with build(config) as straight:
        trainer, begun, frozen = straight.trainer, tensors(straight), base(straight)
        trainer.run_cycle()
        checkpoint.save(tmp_path, 1, trainer.tensors(), trainer.numbers(), 1)
        log, ended = trainer.run_cycle(), tensors(straight)
        assert all(torch.equal(value, frozen[name]) for name, value in base(straight).items())
    moved = {name.split("/")[1] for name in begun if not torch.equal(ended[name], begun[name])}
    assert moved == {"student", "student_ema"}
    assert np.isfinite(log["train/student_loss"])
    found, _ = checkpoint.load_newest(tmp_path)
    assert found is not None
    with build(config) as resumed:
        resumed.trainer.restore(found.tensors, found.numbers)
        assert resumed.trainer.run_cycle()["train/student_loss"] == log["train/student_loss"]
        assert all(torch.equal(value, ended[name]) for name, value in tensors(resumed).items())


def test_a_whole_run_is_evaluated_on_the_captions_and_records_the_pictures(settings: dict[str, Any]) -> None:
    config = parse(settings)
    folder = train(config)
    stream = open_prompts(config.data, config.seed)
    assert isinstance(stream, PictureFolder)
    assert json.loads((folder / "evaluation" / "captions.json").read_text()) == CAPTIONS[:4]
    assert list(json.loads((folder / "scores.json").read_text())["arms"]) == ["student@2"]
    described = read_description(folder)
    assert described is not None
    assert described["inputs"]["data.pictures"] == stream.fingerprint


@pytest.mark.parametrize("storage", ["lora", "copy"])
@pytest.mark.parametrize("family", ["flux2", "qwen_image"])
def test_the_other_families_train_on_pictures(
    settings: dict[str, Any], tmp_path: Path, family: str, storage: str
) -> None:
    write_tiny(family, tmp_path / family)
    changed = copy.deepcopy(settings)
    changed["model"] = {"family": family, "path": str(tmp_path / family)}
    if storage == "copy":
        changed["roles"] = {}
    with build(parse(changed)) as built:
        assert np.isfinite(built.trainer.run_cycle()["train/student_loss"])


def test_full_copies_train_too_and_pictures_have_the_models_size_by_default(settings: dict[str, Any]) -> None:
    changed = copy.deepcopy(settings)
    changed["roles"], changed["data"] = {}, {"pictures": settings["data"]["pictures"], "batch_size": 3}
    with build(parse(changed)) as built:
        assert built.trainer.pictures.pictures(range(2))[0].shape == (2, 3, 64, 64)  # of the tiny SD3
        assert np.isfinite(built.trainer.run_cycle()["train/student_loss"])


def parsed(settings: dict[str, Any], **groups: dict[str, Any] | None) -> RunConfig:
    """Settings with whole groups replaced; None leaves one out."""
    changed = {**settings, **groups}
    return parse({name: value for name, value in changed.items() if value is not None})


def test_b15_pictures_are_refused_where_they_do_nothing_and_asked_for_where_they_are_needed(
    settings: dict[str, Any],
) -> None:
    data = settings["data"]
    dmd2: dict[str, Any] = {"algorithm": {"name": "dmd2"}, "optimizers": {"student": {}, "fake_score": {}}}
    with pytest.raises(ValueError, match=r"data.pictures does nothing with dmd2 of sd3"):
        parsed(settings, **dmd2)
    with pytest.raises(ValueError, match=r"data.pictures does nothing with flow_matching of glyph"):
        parsed(settings, model=None, data={"pictures": data["pictures"]})
    with pytest.raises(ValueError, match=r"data.pictures is missing: flow_matching of sd3"):
        parsed(settings, data={"batch_size": 3})
    with pytest.raises(ValueError, match=r"data.prompts is 'mine.txt', but flow_matching learns from captioned"):
        parsed(settings, data={**data, "prompts": "mine.txt"})
