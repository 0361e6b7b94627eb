"""What can be sampled: a run, an export, a base model. Which of them a folder is, its content says."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from sigmazero.algorithms.base import Algorithm, Arm
from sigmazero.config import LoraConfig, RunConfig
from sigmazero.export import CONTRACT, LORA_FILE
from sigmazero.launch.local import find_device, load_algorithm, load_family, load_model, use_threads
from sigmazero.models import PIPELINES
from sigmazero.models.base import FlowModel
from sigmazero.models.conditions import KnownPrompts
from sigmazero.models.folder import PipelineFolder, read_index
from sigmazero.models.glyph import SHIPPED
from sigmazero.models.roles import Roles
from sigmazero.schedule import check_sigmas, sigma_grid
from sigmazero.tensors import read_tensors
from sigmazero.training import checkpoint
from sigmazero.training.checkpoint import Checkpoint
from sigmazero.training.folder import RunFolder, read_config, read_description

GLYPH_FILE = "glyph.safetensors"  # of a glyph export
DEFAULT_PROMPTS = ("the number 42 in red on yellow, serif font", "the number 07 in blue", "the number 93")


@dataclass(frozen=True)
class Wish:
    """What is asked for, by the option of ``sigmazero sample``; None: as the source has it."""

    role: str | None = None  # of a run
    steps: int | None = None
    shift: float | None = None
    sigmas: tuple[float, ...] | None = None  # without the last, 0
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    dtype: str | None = None
    base: str | None = None  # the pipeline that an export of adapters or weights belongs to


@dataclass(frozen=True)
class Source:
    """Weights, and how they are sampled.

    ``sigmas`` fp32 ``[N+1]``; ``about`` says where the weights are from, as plain JSON values; ``departures`` are
    sentences on what is asked for and is not what a trained role was trained or exported for.
    """

    roles: Roles
    arm: Arm
    sigmas: Tensor
    prompts: tuple[str, ...]
    about: Mapping[str, Any]
    departures: tuple[str, ...] = ()


class Contract(BaseModel):
    """What ``sampler.json`` of an export says, as far as sampling needs it."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)

    form: Literal["pipeline", "lora", "weights"]
    family: Literal["glyph", "sd3", "flux2", "qwen_image"]
    run: str
    cycle: int
    role: str
    sigmas: list[float] = Field(min_length=2)
    shift: float
    kind: str
    eta: float
    guidance: float
    base: str | None = None
    base_dtype: Literal["float32", "bfloat16"]
    base_fingerprint: str
    embedded_guidance: float | None = None  # of FLUX.2-dev
    call: dict[str, Any] = Field(default_factory=dict)

    @property
    def arm(self) -> Arm:
        return Arm("export", self.role, len(self.sigmas) - 1, self.shift, self.kind, self.eta, self.guidance)

    @property
    def grid(self) -> Tensor:
        return torch.tensor(self.sigmas, dtype=torch.float32)


def open_source(path: str, prompts: Sequence[str], wish: Wish) -> Source:
    """Opens a run folder, an export, a base model's folder, hub id or glyph file, and encodes the prompts.

    Args:
        prompts: at least one, but for the family glyph, which has some by default.
    Raises:
        ValueError: it is none of these, lacks a part, or an option does not fit it.
    """
    folder = Path(path)
    if wish.sigmas is not None and (wish.steps is not None or wish.shift is not None):
        raise ValueError("--sigmas is the whole grid, so --steps and --shift would do nothing; leave them out")
    if wish.dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"--dtype is {wish.dtype!r}; it is float32 or bfloat16")
    if read_description(folder) is not None:
        return _open_run(folder, prompts, wish)
    if (folder / CONTRACT).is_file():
        return _in_words(path, _open_export, prompts, wish)
    is_hub_id = not folder.parent.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", path)  # else a name is mistyped
    if folder.is_file() or path in SHIPPED or (folder / "model_index.json").is_file() or is_hub_id:
        return _in_words(path, _open_base, prompts, wish)
    raise ValueError(
        f"{path} is not a run folder (it has no run.json), nor an export ({CONTRACT}), nor a base model "
        "(model_index.json, a glyph weight file, or a hub id OWNER/NAME)"
    )


def _in_words(path: str, read: Any, prompts: Sequence[str], wish: Wish) -> Source:
    """What a family says of settings is said of the options instead."""
    try:
        return read(path, prompts, wish)
    except ValueError as error:
        said = str(error).replace("data.height", "--height").replace("data.width", "--width")
        raise ValueError(said.replace("model.path: ", f"{path}: " if path not in said else "")) from None


# A run


def newest(folder: RunFolder) -> Checkpoint:
    """The newest checkpoint of a run.

    Raises:
        ValueError: there is none that can be read.
    """
    found, refused = checkpoint.load_newest(folder.checkpoints)
    if found is None:
        raise ValueError(f"{folder.path} has no checkpoint that can be read yet" + "".join(f"; {r}" for r in refused))
    return found


def choose_arm(algorithm: Algorithm, role: str | None) -> Arm:
    """The averaged student or policy as evaluation samples it, or the same of another role.

    Raises:
        ValueError: evaluation samples no such role.
    """
    arms = {arm.role: arm for arm in reversed(algorithm.arms)}
    chosen = role or next(arm.role for arm in algorithm.arms if algorithm.roles[arm.role] != "frozen")
    if chosen not in arms:
        raise ValueError(f"role {chosen!r} cannot be sampled; this run has {', '.join(sorted(arms))}")
    return arms[chosen]


def _open_run(path: Path, prompts: Sequence[str], wish: Wish) -> Source:
    """One role of its newest checkpoint over the base; the run's prompts and rewards are not needed."""
    as_trained = read_config(path)
    glyph = as_trained.model.family == "glyph"
    _refuse(wish, "a run has its own", "dtype", "base", *(("height", "width") if glyph else ()))
    config = _resized(as_trained, wish)
    use_threads(config.training.threads)
    algorithm = load_algorithm(config)
    arm, found = choose_arm(algorithm, wish.role), newest(RunFolder(path))
    texts = _texts(config.model.family, prompts)
    model = _placed(load_model(config), config.training.device, texts)
    frozen = algorithm.roles[arm.role] == "frozen"
    if isinstance(model, KnownPrompts):
        masters = {torch.float32} if config.roles.storage == "copy" and not frozen else set()
        model.use_attention(config.model.attention, [getattr(torch, config.model.dtype), *masters])
    adapters = not frozen and config.roles.storage == "lora"
    roles = Roles(
        model, {arm.role: "frozen" if frozen else "average"}, {},
        lora=(config.roles.lora or LoraConfig()).model_copy(update={"init": ""}) if adapters else None,
        guidance_norm=config.model.guidance_norm, seed=config.seed,
    )  # fmt: skip
    before = (read_description(path) or {}).get("inputs", {}).get("model.path")
    if before not in (None, roles.base_fingerprint):
        raise ValueError(f"{path} was trained over another base than model.path, {config.model.path}, is now")
    prefix = f"roles/{arm.role}/"
    stored = found.tensors.whole([name for name in found.tensors if name.startswith(prefix)])
    own = {name.removeprefix(prefix): value for name, value in stored.items()}
    _put(roles, arm.role, {} if frozen else own, found.path)
    about = {"source": path.name, "kind": "run", "cycle": found.numbers["counters"]["cycle"]}
    size = {name: getattr(as_trained.data, name) or "of the model" for name in ("height", "width")}
    return _source(roles, arm, sigma_grid(arm.num_steps, arm.shift), texts, about, wish, bound=not frozen, size=size)


def _resized(config: RunConfig, wish: Wish) -> RunConfig:
    size = {name: getattr(wish, name) for name in ("height", "width") if getattr(wish, name) is not None}
    return config.model_copy(update={"data": config.data.model_copy(update=size)})


# An export


def read_contract(folder: Path) -> Contract:
    """How an export is sampled.

    Raises:
        ValueError: its ``sampler.json`` cannot be read or does not say it.
    """
    path = folder / CONTRACT
    try:
        contract = Contract.model_validate_json(path.read_bytes())
        check_sigmas(contract.grid)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"{path}: sigmas: {error}") from None
    return contract


def _open_export(path: str, prompts: Sequence[str], wish: Wish) -> Source:
    folder, said = Path(path), read_contract(Path(path))
    texts = _texts(said.family, prompts)
    _refuse(wish, "an export is one role", "role")
    if said.family == "glyph":
        _refuse(wish, "a glyph export has its own", "dtype", "base", "height", "width")
        roles = _frozen(_placed(load_family("glyph", str(folder / GLYPH_FILE)), "auto", texts), said.role)
    elif said.form == "lora":
        _refuse(wish, "adapters are sampled over the base as they were trained", "dtype")
        roles = _adapted(folder, said, _base_model(path, said, texts, wish, said.base_dtype))
    elif said.form == "weights":
        model = _base_model(path, said, texts, wish, wish.dtype or "float32")
        _load_weights(folder, model, said, wish)
        roles = _frozen(model, said.role)
    else:
        _refuse(wish, "this export is a whole pipeline", "base")
        model = load_family(said.family, path, **_options(said, wish), dtype=wish.dtype or "float32")
        roles = _frozen(_placed(model, "auto", texts), said.role)
    about = {"source": folder.resolve().name, "kind": "export", "run": said.run, "cycle": said.cycle}
    size = {name: value for name, value in said.call.items() if name in ("height", "width")}
    return _source(roles, said.arm, said.grid, texts, about, wish, bound=True, size=size)


def _base_model(path: str, said: Contract, texts: Sequence[str], wish: Wish, dtype: str) -> FlowModel:
    """The base that an export without the rest of the pipeline belongs to."""
    base = wish.base or said.base
    if base is None:
        raise ValueError(
            f"{path} is no whole pipeline, and its {CONTRACT} does not say which base it belongs to; name the base's "
            "folder or hub id with --base"
        )
    try:
        model = load_family(said.family, base, **_options(said, wish), dtype=dtype)
    except ValueError as error:
        raise ValueError(f"the base of {path}: {error}; name another with --base") from None
    return _placed(model, "auto", texts)


def _adapted(folder: Path, said: Contract, model: FlowModel) -> Roles:
    """A role that is adapters over its base, as in training."""
    path = folder / "peft" / "adapter_config.json"
    try:
        settings = json.loads(path.read_text())
        lora = LoraConfig(rank=settings["r"], alpha=settings["lora_alpha"], targets=tuple(settings["target_modules"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not say rank, alpha and layers: {' '.join(str(error).split())}") from None
    roles = Roles(model, {said.role: "average"}, {}, lora=lora)
    if roles.base_fingerprint != said.base_fingerprint:
        raise ValueError(f"{folder} was trained over another base than this one; name its own with --base")
    tensors = read_tensors(folder / LORA_FILE)[0]
    _put(roles, said.role, {n.removeprefix("transformer."): v for n, v in tensors.items()}, folder / LORA_FILE)
    return roles


def _load_weights(folder: Path, model: FlowModel, said: Contract, wish: Wish) -> None:
    dtype = next(model.net.parameters()).dtype
    given = PipelineFolder(str(folder), {}, frozenset()).weights("transformer", type(model.net), torch_dtype=dtype)
    try:
        model.net.load_state_dict(given.state_dict())
    except RuntimeError:
        raise ValueError(
            f"the transformer of {folder} does not fit the base {wish.base or said.base}; name its own with --base"
        ) from None


# A base model


def _open_base(path: str, prompts: Sequence[str], wish: Wish) -> Source:
    """As its family samples it: Euler, with the family's own shift unless another is asked for."""
    _refuse(wish, "a base model has one network", "role", "base")
    if (wish.steps is None and wish.sigmas is None) or wish.guidance is None:
        what = (
            "is a base model"
            if path in SHIPPED or Path(path).exists()
            else "is not here, so it is taken for the hub id of a base"
        )
        raise ValueError(f"{path} {what}, which does not say how it is sampled: give --steps and --guidance")
    family, guidance, own = "glyph", wish.guidance, {}
    if not (Path(path).is_file() or path in SHIPPED):
        kind = str(read_index(path).get("_class_name"))
        if kind not in PIPELINES:
            raise ValueError(f"{path} is a {kind}, and what is sampled here is a {', '.join(PIPELINES)}")
        family = PIPELINES[kind]
        if kind == "Flux2Pipeline":  # FLUX.2-dev, whose network reads its guidance
            guidance, own = 1.0, {"embedded_guidance": wish.guidance}
    texts, options = _texts(family, prompts), {"height": wish.height, "width": wish.width, **own}
    if family == "glyph":
        _refuse(wish, "a glyph file has its own", "dtype", "height", "width")
    model = _placed(load_family(family, path, **options, dtype=wish.dtype or "float32"), "auto", texts)
    num_steps = wish.steps or len(wish.sigmas or ())
    shift = model.default_shift(num_steps) if wish.shift is None else wish.shift
    arm = Arm("base", "base", num_steps, shift, guidance=guidance)
    about = {"source": Path(path).name, "kind": "base", **own}
    wish = dataclasses.replace(wish, guidance=guidance)
    return _source(_frozen(model, "base"), arm, sigma_grid(num_steps, shift), texts, about, wish, bound=False)


# What they share


def _refuse(wish: Wish, why: str, *names: str) -> None:
    """An option that would do nothing is an error."""
    for name in names:
        if getattr(wish, name) is not None:
            raise ValueError(f"--{name} does nothing here: {why}; leave it out")


def _texts(family: str, prompts: Sequence[str]) -> tuple[str, ...]:
    if not prompts and family != "glyph":
        raise ValueError("there is no prompt: say what the picture should show with --prompt, or --prompts FILE")
    return tuple(prompts) or DEFAULT_PROMPTS


def _options(said: Contract, wish: Wish) -> dict[str, Any]:
    """How an export's network is loaded: its size, and what it embeds."""
    own = {} if said.embedded_guidance is None else {"embedded_guidance": said.embedded_guidance}
    return {**own, **{name: getattr(wish, name) or said.call.get(name) for name in ("height", "width")}}


def _placed(model: FlowModel, device: str, texts: Sequence[str]) -> FlowModel:
    """On its device, the texts encoded and the encoders freed."""
    model.net.to(find_device(device))
    if isinstance(model, KnownPrompts):
        model.prepare(texts)
    return model


def _frozen(model: FlowModel, role: str) -> Roles:
    return Roles(model, {role: "frozen"}, {})


@torch.no_grad()
def _put(roles: Roles, role: str, tensors: Mapping[str, Tensor], where: Path) -> None:
    own = roles.parameters(role)
    wrong = sorted(set(own) ^ set(tensors)) or [n for n in own if own[n].shape != tensors[n].shape]
    if wrong:
        raise ValueError(f"{where} does not fit the network of {role}: {', '.join(wrong[:4])}")
    for name, value in own.items():
        value.copy_(tensors[name])


def _source(
    roles: Roles,
    arm: Arm,
    sigmas: Tensor,
    texts: tuple[str, ...],
    about: Mapping[str, Any],
    wish: Wish,
    *,
    bound: bool,
    size: Mapping[str, Any] = MappingProxyType({}),
) -> Source:
    """A source with what is asked for put in. ``bound``: it was trained for its own grid, guidance and size."""
    wanted = {"num_steps": wish.steps, "shift": wish.shift, "guidance": wish.guidance}
    asked = dataclasses.replace(arm, **{name: value for name, value in wanted.items() if value is not None})
    if isinstance(roles.model, KnownPrompts):
        roles.model.check_guidance("--guidance", asked.guidance)
    grid = sigmas
    if wish.sigmas is not None:
        asked = dataclasses.replace(asked, num_steps=len(wish.sigmas), shift=math.nan)
        grid = torch.tensor([*wish.sigmas, 0.0], dtype=torch.float32)
        try:
            check_sigmas(grid)
        except ValueError as error:
            raise ValueError(f"--sigmas: {error}") from None
    elif (asked.num_steps, asked.shift) != (arm.num_steps, arm.shift):
        grid = sigma_grid(asked.num_steps, asked.shift)
    changed = {
        "the sigmas": (_numbers(sigmas), _numbers(grid)),
        "guidance": (arm.guidance, asked.guidance),
        **{name: (value, getattr(wish, name) or value) for name, value in size.items()},
    }
    departures = [
        f"{what} {before}, and is asked for {now}" for what, (before, now) in changed.items() if before != now
    ]
    return Source(roles, asked, grid, texts, about, tuple(departures) if bound else ())


def _numbers(sigmas: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in sigmas.tolist())
