"""Every setting of a run, checked before any model is built. Imports no torch.

A recipe is a YAML file; dotted overrides (``algorithm.num_steps=4``) change it. Unknown keys, wrong types and
contradictions are errors that name the key, the value and what to set.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Shift = Annotated[float, Field(ge=0.001, le=1000)]  # of a sigma grid


class ModelConfig(_Settings):
    """Which network: ``path`` is a weight file, ``shipped`` (the family's own) or ``random`` (untrained)."""

    family: Literal["glyph"] = "glyph"
    path: str = "shipped"
    width: int | None = Field(default=None, ge=32, le=1024, multiple_of=32)  # of a random network; a file has its own
    num_layers: int | None = Field(default=None, ge=1, le=64)  # likewise
    activation_checkpointing: bool = False
    guidance_norm: Literal["family", "none", "layer_norm", "scalar"] = "family"


class LoraConfig(_Settings):
    """Adapters over one frozen base. ``targets`` empty: the family's default."""

    rank: int = Field(default=32, ge=1, le=4096)
    alpha: float = Field(default=32, gt=0)
    targets: tuple[str, ...] = ()


class RolesConfig(_Settings):
    """How the trained roles are stored: each a full copy, or an adapter over the base."""

    storage: Literal["copy", "lora"] = "copy"
    lora: LoraConfig | None = None  # only with storage lora; null: its defaults

    @model_validator(mode="after")
    def _only_with_lora(self) -> RolesConfig:
        if self.storage != "lora" and self.lora is not None:
            raise ValueError(
                f"lora is set but storage is {self.storage!r}, so it would do nothing; set storage to lora"
            )
        return self


class DataConfig(_Settings):
    """``prompts``: ``glyphs`` (endless captions of the train split) or a text file with one prompt a line."""

    prompts: str = "glyphs"
    batch_size: int = Field(default=32, ge=1, le=65536)  # samples a cycle


class SigmaConfig(_Settings):
    """A distribution of sigma: uniform draws, shifted once, clamped to [low, high] (math §6)."""

    distribution: Literal["discrete", "uniform"] = "discrete"
    shift: Shift = 3.0
    low: float = Field(default=0.02, ge=0, le=1)
    high: float = Field(default=0.98, ge=0, le=1)

    @model_validator(mode="after")
    def _ordered(self) -> SigmaConfig:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}; low must be below high")
        return self


class FlowMatchingConfig(_Settings):
    """Velocity regression on captioned pictures."""

    name: Literal["flow_matching"]
    num_steps: int = Field(default=25, ge=1, le=1000)  # of evaluation
    shift: Shift = 3.0  # of evaluation
    guidance: float = Field(default=1.0, ge=0, le=1000)  # of evaluation
    logit_mean: float = 0.0  # train sigma = sigmoid(mean + std * z)
    logit_std: float = Field(default=1.0, gt=0)
    caption_dropout: float = Field(default=0.1, ge=0, lt=1)
    ema_decay: float = Field(default=0.999, ge=0, lt=1)


class DMD2Config(_Settings):
    """Distribution matching distillation (arXiv 2405.14867)."""

    name: Literal["dmd2"]
    num_steps: int = Field(default=2, ge=1, le=1000)  # of the student
    shift: Shift = 3.0  # of the student's grid and of the teacher's
    guidance: float = Field(default=2.0, ge=0, le=1000)  # of the teacher
    teacher_steps: int = Field(default=25, ge=1, le=1000)  # of the teacher in evaluation
    student_input: Literal["simulate", "data", "mixed"] = "simulate"
    transition: Literal["renoise", "euler"] = "renoise"
    step_strategy: str = "stop_at_random_step"
    exit_step: Literal["per_sample", "shared"] = "per_sample"
    fake_updates: int = Field(default=5, ge=1)  # K: fake-score updates a student update
    score_sigma: SigmaConfig = SigmaConfig()
    fake_sigma: SigmaConfig = SigmaConfig(low=0.0, high=1.0)
    normalizer: bool = True
    ema_decay: float = Field(default=0.98, ge=0, lt=1)
    gan_weight: float = Field(default=0.0, ge=0)
    regression_weight: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _built(self) -> DMD2Config:
        if self.student_input != "simulate":
            raise ValueError(f"student_input is {self.student_input!r}, which is not built yet; set 'simulate'")
        if self.exit_step == "shared" and self.step_strategy != "stop_at_random_step":
            raise ValueError(f"exit_step is 'shared', but step_strategy {self.step_strategy!r} draws the exits itself")
        for name, what in (("gan_weight", "the adversarial term"), ("regression_weight", "the regression on pairs")):
            if getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but {what} is not built yet; set {name} to 0")
        return self


AlgorithmConfig = Annotated[Union[FlowMatchingConfig, DMD2Config], Field(discriminator="name")]


class OptimizerConfig(_Settings):
    """AdamW of one role, with its learning-rate schedule in optimizer steps and its micro-batch in rows."""

    lr: float = Field(default=1e-4, ge=0)
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0, le=10**8)
    decay: Literal["constant", "linear", "cosine"] = "constant"  # to 0 at the last step of the run
    clip: float = Field(default=1.0, gt=0)  # of the gradient's norm
    micro_batch: int = Field(default=32, ge=1, le=65536)

    @model_validator(mode="after")
    def _betas(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; each must lie in [0, 1)")
        return self


class TrainingConfig(_Settings):
    """Where and how the loop runs. ``threads`` 0: one a core."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(default=0, ge=0, le=1024)
    log_every: int = Field(default=10, ge=1)  # cycles
    checkpoint_every: int = Field(default=200, ge=1)  # cycles
    keep_checkpoints: int = Field(default=2, ge=1)
    max_nonfinite: int = Field(default=5, ge=1)  # skipped updates in a row before the run stops
    tensorboard: bool = True


class EvaluateConfig(_Settings):
    """Fixed prompts and seeds. ``every`` 0: only at the end."""

    every: int = Field(default=0, ge=0)  # cycles between refreshed pictures and scores of the trained roles
    num_captions: int = Field(default=480, ge=8, le=100_000)  # the 240 held-out combinations twice
    samples_per_caption: int = Field(default=2, ge=2, le=1000)
    num_reference: int = Field(default=3840, ge=256, le=1_000_000)  # real pictures that distances are measured to
    bootstrap: int = Field(default=200, ge=20, le=100_000)
    shift: Shift | None = None  # of the student's grid; null: the trained one
    seed: int = Field(default=0, ge=0, lt=2**63)


class RunConfig(_Settings):
    """A whole run."""

    output: str = ""
    overwrite: bool = False
    seed: int = Field(default=0, ge=0, lt=2**63)
    num_cycles: int = Field(default=1000, ge=1, le=99_999_999)
    plugins: tuple[str, ...] = ()
    model: ModelConfig = ModelConfig()
    roles: RolesConfig = RolesConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig
    optimizers: dict[str, OptimizerConfig] = Field(default_factory=dict)
    training: TrainingConfig = TrainingConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if not self.output.strip() and "output" in self.model_fields_set:
            raise ValueError(f"output is {self.output!r}; name a folder")
        if self.model.path != "random" and (self.model.width or self.model.num_layers):
            raise ValueError(
                f"model.width and model.num_layers are of a random network; model.path is {self.model.path!r}, which "
                "brings its own: leave them out, or set model.path to random"
            )
        if isinstance(self.algorithm, FlowMatchingConfig):
            if self.data.prompts != "glyphs":
                raise ValueError(
                    f"data.prompts is {self.data.prompts!r}, but flow_matching learns from captioned pictures"
                )
            if self.evaluate.shift is not None:
                raise ValueError("evaluate.shift is of dmd2's student; for flow_matching set algorithm.shift")
        named = {self.algorithm.step_strategy} if isinstance(self.algorithm, DMD2Config) else set[str]()
        for plugin in self.plugins:
            if plugin not in named:
                raise ValueError(f"plugins lists {plugin!r}, but no setting names it, so it would do nothing")
        trained = TRAINED_ROLES[self.algorithm.name]
        for role in self.optimizers:
            if role not in trained:
                raise ValueError(
                    f"optimizers.{role}: {self.algorithm.name} trains no role {role!r}; it trains {', '.join(trained)}"
                )
        for role in trained:
            if role not in self.optimizers:
                raise ValueError(f"optimizers.{role} is missing: {self.algorithm.name} trains {', '.join(trained)}")
        return self

    def identity(self) -> dict[str, Any]:
        """What makes two runs the same run: everything but where it is written and how it is watched."""
        values = self.model_dump(mode="json", exclude={"output", "overwrite"})
        for name in ("log_every", "checkpoint_every", "keep_checkpoints", "tensorboard"):
            del values["training"][name]
        return values


# Roles that an optimizer steps, in the order of an algorithm's phases.
TRAINED_ROLES: dict[str, tuple[str, ...]] = {
    "flow_matching": ("student",),
    "dmd2": ("student", "fake_score"),
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a recipe and applies dotted overrides; ``output`` defaults to ``runs/<recipe name>``.

    Raises:
        ValueError: the file is missing or not plain YAML, a key is unknown or stands twice, a value has the wrong type
            or contradicts another. Every message names the key, the value and what to set.
    """
    path = Path(path)
    values = _read_yaml(path)
    for override in overrides:
        _apply(values, override)
    values.setdefault("output", f"runs/{path.stem}")
    return parse(values)


def parse(values: Mapping[str, Any]) -> RunConfig:
    """A validated run from plain values.

    Raises:
        ValueError: as ``load_recipe``.
    """
    _check_plain(values, "")
    try:
        # Through JSON: strict types, but a YAML list may fill a tuple.
        return RunConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ValueError("; ".join(_explain(e, values) for e in error.errors())) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not path.is_file():
        raise ValueError(f"there is no recipe {path}")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"recipe {path} is not plain YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not values:
        raise ValueError(f"recipe {path} must be a mapping of settings, got {values!r}")
    return {str(key): value for key, value in values.items()}


def _apply(values: dict[str, Any], override: str) -> None:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"override {override!r} is not of the form key=value, for example algorithm.num_steps=4")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"override {override!r}: the value is not YAML ({' '.join(str(error).split())})") from None
    assert isinstance(parsed, dict)
    *parents, last = key.strip().split(".")
    at = values
    for depth, parent in enumerate(parents):
        at = at.setdefault(parent, {})
        if not isinstance(at, dict):
            raise ValueError(f"override {override!r}: {'.'.join(parents[: depth + 1])} is a value, not a group of keys")
    at[last] = parsed["value"]


def _check_plain(value: Any, key: str) -> None:
    """Refuses what YAML tags and interpolation can smuggle in: only plain values are settings (B50)."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_plain(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_plain(inner, key)
    elif not (value is None or type(value) in (str, int, float, bool)):
        raise ValueError(f"{key} is {value!r}: only plain text, numbers, lists and groups are settings")
    elif isinstance(value, str) and ("${" in value or value == "???"):
        raise ValueError(f"{key} is {value!r}: there is no interpolation here; write the value itself")


def _explain(error: Any, values: Mapping[str, Any]) -> str:
    """One error of pydantic in one line: the dotted key, the value, what is wrong, what to set."""
    names = get_args(get_args(AlgorithmConfig)[0])
    tags = {get_args(c.model_fields["name"].annotation)[0] for c in names}
    at = [str(part) for part in error["loc"]]
    if at[:1] == ["algorithm"] and len(at) > 1 and at[1] in tags:
        del at[1]  # the name of the union's member
    key = ".".join(at)
    kind, given = error["type"], error.get("input")
    if kind == "extra_forbidden":
        chosen = values["algorithm"].get("name") if at[0] == "algorithm" else None
        owners = [get_args(c.model_fields["name"].annotation)[0] for c in names if at[1:] and at[1] in c.model_fields]
        if chosen and owners and chosen not in owners:
            return f"key {key!r} belongs to {', '.join(owners)}, and algorithm.name is {chosen!r}; leave it out"
        near = _nearest(key, list(_keys(RunConfig, values)))
        return f"unknown key {key!r} (given {given!r})" + (f"; did you mean {near!r}?" if near else "")
    if kind == "missing":
        return f"{key} is missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return f"algorithm.name is {(given or {}).get('name')!r}; known are {', '.join(sorted(tags))}"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{key}: {message}" if key and not message.startswith(key) else message
    if kind == "model_type" or message.startswith("Input should be an object"):
        message = "it must be a group of keys"
    return f"{key} is {given!r}: {message[0].lower()}{message[1:]}"


def _keys(model: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every dotted key that is valid for these values."""
    for name, info in model.model_fields.items():
        yield prefix + name
        inner: Any = next((t for t in get_args(info.annotation) if _is_settings(t)), info.annotation)
        here = values.get(name)
        here = here if isinstance(here, Mapping) else {}
        if name == "algorithm":
            chosen = [
                c
                for c in get_args(info.annotation)
                if get_args(c.model_fields["name"].annotation)[0] == here.get("name")
            ]
            inner = chosen[0] if chosen else None
        if name == "optimizers":
            algorithm = values.get("algorithm")
            chosen_name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
            for role in TRAINED_ROLES.get(str(chosen_name), ()):
                yield f"{prefix}{name}.{role}"
                yield from _keys(OptimizerConfig, {}, f"{prefix}{name}.{role}.")
        elif _is_settings(inner):
            yield from _keys(inner, here, f"{prefix}{name}.")


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """The valid key that a misspelt or misplaced one most likely meant."""
    same_end = [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1].replace("-", "_")]
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.6)
    if same_end:
        return max(same_end, key=lambda k: difflib.SequenceMatcher(None, k, key).ratio())
    if near:
        return near[0]
    ends = {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
    close = difflib.get_close_matches(key.rsplit(".", 1)[-1].replace("-", "_"), list(ends), n=1, cutoff=0.6)
    return ends[close[0]] if close else None
