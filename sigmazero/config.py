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
    """Which network. Of ``glyph``, ``path`` is a weight file, ``random`` (untrained), or one of the family's own:
    ``shipped`` (the teacher) and ``half_trained`` (where online RL starts). Of the others it is a diffusers folder."""

    family: Literal["glyph", "sd3", "flux2", "qwen_image"] = "glyph"
    path: str = "shipped"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the frozen base; trained weights are fp32 in any case
    width: int | None = Field(default=None, ge=32, le=1024, multiple_of=32)  # of a random network; a file has its own
    num_layers: int | None = Field(default=None, ge=1, le=64)  # likewise
    activation_checkpointing: bool = False
    attention: str = "native"  # one of diffusers' attention backends; not of glyph
    guidance_norm: Literal["family", "none", "layer_norm", "scalar"] = "family"
    embedded_guidance: float | None = Field(default=None, ge=0, le=1000)  # what FLUX.2-dev's network reads; null: 4


class LoraConfig(_Settings):
    """Adapters over one frozen base. ``targets`` empty: the family's default."""

    rank: int = Field(default=32, ge=1, le=4096)
    alpha: float = Field(default=32, gt=0)
    targets: tuple[str, ...] = ()
    init: str = ""  # an adapter to go on from, its folder or file; empty: they change nothing at first


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
    """``prompts``: a .txt, .jsonl, .csv or .parquet file. Of glyph also ``glyphs``, its default: endless captions of
    the train split. Of other families also ``shipped``, their default, and ``shipped_text``: a few to try out."""

    prompts: str = "glyphs"
    pictures: str | None = None  # a folder of captioned pictures, for flow_matching of any family but glyph
    conditions_cache: str = ""  # a folder that encoded prompts are kept in; empty: none
    batch_size: int = Field(default=32, ge=1, le=65536)  # samples a cycle
    height: int | None = Field(default=None, ge=16, le=8192)  # of pictures, in pixels; null: the model's default
    width: int | None = Field(default=None, ge=16, le=8192)


class RolloutConfig(_Settings):
    """What online RL makes of a cycle's samples before it trains on them."""

    group_size: int = Field(default=8, ge=1, le=65536)  # samples of one prompt
    max_refills: int = Field(default=0, ge=0, le=1000)  # times that dead groups are replaced; 0: they stay
    dump_every: int = Field(default=0, ge=0)  # cycles between rollouts that are kept in the run folder; 0: none
    replay: str = ""  # a folder of dumped rollouts to train on instead of sampling
    max_failed: float = Field(default=0.2, ge=0, le=1)  # share of samples without a score beyond which the run stops


_HOW_CALLED = (
    "weight", "normalize", "batch_size", "time_limit", "workers", "retries", "try_limit", "token_variable",
)  # fmt: skip


class _Reward(_Settings):
    """``weight`` 0 watches a reward without optimising it; a reward of several named parts takes a weight for each."""

    weight: float | dict[str, float] = 1.0
    normalize: Literal["none", "batch"] = "none"  # batch: to zero mean and unit deviation over the cycle, before weight
    batch_size: int = Field(default=32, ge=1, le=65536)  # pictures a call
    time_limit: float = Field(default=60.0, gt=0, le=86_400)  # seconds a call
    workers: int = Field(default=1, ge=1, le=64)  # calls at once

    @model_validator(mode="after")
    def _acts(self) -> _Reward:
        if self.normalize != "none" and not self.optimised:
            raise ValueError("normalize does nothing with weight 0, which only watches; leave it out")
        return self

    def meaning(self) -> dict[str, Any]:
        """The settings that decide what a picture scores, and not what is made of it."""
        return self.model_dump(mode="json", exclude=set(_HOW_CALLED))

    @property
    def optimised(self) -> bool:
        weights = self.weight.values() if isinstance(self.weight, dict) else [self.weight]
        return any(weights)


class OcrRewardConfig(_Reward):
    """The wanted text as PP-OCR reads it (extra ``ocr``)."""

    kind: Literal["ocr"]
    score: Literal["edit", "exact", "log_likelihood"] = "edit"


class JpegRewardConfig(_Reward):
    """Size of the picture as JPEG, in kB: negative for ``compressible``."""

    kind: Literal["jpeg"]
    goal: Literal["compressible", "incompressible"] = "compressible"
    quality: int = Field(default=95, ge=1, le=100)


class ColourRewardConfig(_Reward):
    """Whether the colours that the prompt names are in the picture."""

    kind: Literal["colour"]


class ClipRewardConfig(_Reward):
    """CLIP score or PickScore: ``path`` is a local folder of a CLIP model, or its hub id."""

    kind: Literal["clip", "pickscore"]
    path: str = Field(min_length=1)


class AestheticRewardConfig(_Reward):
    """A head over CLIP picture features: ``path`` as for ``clip``, ``head`` a safetensors file of its linear layers."""

    kind: Literal["aesthetic"]
    path: str = Field(min_length=1)
    head: str = Field(min_length=1)


class RemoteRewardConfig(_Reward):
    """A scorer behind HTTP; ``token_variable`` names the environment variable that holds its bearer token."""

    kind: Literal["remote"]
    url: str = Field(pattern=r"^https?://[^\s]+$")
    time_limit: float = Field(default=120.0, gt=0, le=86_400)  # seconds a call, with all its tries and waits
    retries: int = Field(default=3, ge=0, le=100)
    try_limit: float = Field(default=15.0, gt=0, le=86_400)  # seconds a try

    @model_validator(mode="after")
    def _tries(self) -> RemoteRewardConfig:
        if self.try_limit > self.time_limit:
            raise ValueError(
                f"try_limit is {self.try_limit}, more than time_limit, {self.time_limit}, which ends the call"
            )
        return self

    token_variable: str = ""


class FunctionRewardConfig(_Reward):
    """A function of your own that is also listed under plugins, and the form of the pictures it gets."""

    kind: Literal["function"]
    function: str = Field(min_length=1)
    layout: Literal["chw_float", "hwc_uint8", "pil"] = "chw_float"
    size: tuple[Annotated[int, Field(ge=1, le=8192)], Annotated[int, Field(ge=1, le=8192)]] | None = (
        None  # height, width
    )


RewardConfig = Annotated[
    Union[
        OcrRewardConfig, JpegRewardConfig, ColourRewardConfig, ClipRewardConfig, AestheticRewardConfig,
        RemoteRewardConfig, FunctionRewardConfig,
    ],
    Field(discriminator="kind"),
]  # fmt: skip


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
    teacher_shift: Shift | None = None  # of that grid; null: shift
    student_input: Literal["simulate", "data", "mixed"] = "simulate"
    transition: Literal["renoise", "euler"] = "renoise"
    step_strategy: str = "stop_at_random_step"
    exit_step: Literal["per_sample", "shared", "all"] = "per_sample"  # all: every step of one rollout is a row
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
        if self.exit_step != "per_sample" and self.step_strategy != "stop_at_random_step":
            raise ValueError(
                f"exit_step is {self.exit_step!r}, but step_strategy {self.step_strategy!r} draws the exits itself"
            )
        if self.exit_step == "all" and self.num_steps == 1:
            raise ValueError("exit_step is 'all', but a rollout of num_steps 1 has one exit; set 'per_sample'")
        for name, what in (("gan_weight", "the adversarial term"), ("regression_weight", "the regression on pairs")):
            if getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but {what} is not built yet; set {name} to 0")
        return self


class AdvantageConfig(_Settings):
    """``(r - mean of the group) / (std + 1e-4)``, clamped to +-``clamp`` (math §4). ``std`` none: Dr.GRPO."""

    std: Literal["group", "batch", "none"] = "group"
    clamp: float = Field(default=5.0, gt=0)


class StepsConfig(_Settings):
    """Which steps of a rollout are stochastic, and so scored and trained.

    ``all`` is every step but the last; ``window`` draws ``count`` neighbouring ones, ``choice`` any ``count`` of
    ``candidates``, ``moving_window`` goes through the range, on by one every ``move_every`` cycles. Windows lie in
    ``range`` (step indices, the end excluded) or ``sigmas`` (lowest and highest sigma that a step may start at).
    """

    strategy: str = "all"
    count: int | None = Field(default=None, ge=1)
    range: tuple[int, int] | None = None
    sigmas: tuple[float, float] | None = None
    candidates: tuple[int, ...] | None = None
    move_every: int | None = Field(default=None, ge=1)
    shared: Literal["sample", "group", "cycle"] | None = None  # who shares a draw; null: the cycle

    @model_validator(mode="after")
    def _fits(self) -> StepsConfig:
        takes = {
            "all": (),
            "window": ("count", "range", "sigmas", "shared"),
            "moving_window": ("count", "range", "sigmas", "move_every"),
            "choice": ("count", "candidates", "shared"),
        }.get(self.strategy, ())
        for name in ("count", "range", "sigmas", "candidates", "move_every", "shared"):
            if getattr(self, name) is not None and name not in takes:
                raise ValueError(f"{name} does nothing with strategy {self.strategy!r}; leave it out")
        for name in {"count", "candidates", "move_every"} & set(takes):
            if getattr(self, name) is None:
                raise ValueError(f"strategy {self.strategy!r} needs {name}")
        if self.range is not None and self.sigmas is not None:
            raise ValueError("range and sigmas both bound the window; give one of them")
        return self


class FlowGRPOConfig(_Settings):
    """Coupled online RL on recorded transitions (arXiv 2505.05470)."""

    name: Literal["flow_grpo"]
    num_steps: int = Field(default=10, ge=1, le=1000)
    shift: Shift = 3.0
    kind: str = "sde"  # sde, cps, dance, or a registered kernel of yours
    eta: float = Field(default=0.7, ge=0)
    guidance: float = Field(default=1.0, ge=0, le=1000)  # of the policy, in rollout, training and evaluation
    steps: StepsConfig = StepsConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    clip: float = Field(default=1e-4, gt=0)
    ratio: Literal["log_prob", "guard"] = "log_prob"  # guard: GRPO-Guard's
    score: Literal["gaussian", "no_constants"] = "gaussian"  # no_constants: -mean (y - mu)^2, as FlowCPS
    updates: int = Field(default=1, ge=1, le=10_000)  # optimizer steps an epoch over the rollout
    epochs: int = Field(default=1, ge=1, le=1000)
    old_log_prob: Literal["trainer", "rollout"] = "trainer"  # whose, where a rollout gives several optimizer steps
    kl_weight: float = Field(default=0.0, ge=0)  # of the KL to the start; 0: no call of the reference in training
    kl_form: Literal["gaussian", "flow_grpo"] = "gaussian"
    kl_every: int = Field(default=10, ge=0)  # cycles between measurements of the KL; 0: never
    ema_decay: float = Field(default=0.9, ge=0, lt=1)
    evaluation_steps: int | None = Field(default=None, ge=1, le=1000)  # null: num_steps

    @model_validator(mode="after")
    def _coupled(self) -> FlowGRPOConfig:
        if self.kind == "ode" or self.eta == 0:
            raise ValueError(
                f"kind is {self.kind!r} and eta {self.eta}: a rollout without noise has no log-probability to train "
                "on; set kind to sde, cps or dance and eta above 0, or use nft"
            )
        if self.kind == "cps" and self.eta > 1:
            raise ValueError(f"eta is {self.eta}; with cps it lies in (0, 1]")
        if self.kl_form != "gaussian" and (self.kl_weight == 0 or self.kind not in ("sde", "dance")):
            raise ValueError(
                f"kl_form {self.kl_form!r} does nothing with kl_weight {self.kl_weight} and kind {self.kind!r}: it "
                "changes the KL that sde and dance are trained on; leave it out"
            )
        if self.ratio == "guard" and self.score != "gaussian":
            raise ValueError("score does nothing with ratio guard, which compares means; leave it out")
        if self.old_log_prob == "rollout" and (self.ratio == "guard" or self.score != "gaussian"):
            raise ValueError(
                "old_log_prob is 'rollout', but rollouts record the normal density and no means; set 'trainer'"
            )
        if self.updates * self.epochs == 1 and self.old_log_prob != "trainer":
            raise ValueError("old_log_prob does nothing with one optimizer step a rollout: the ratio is exactly 1")
        return self


class OldDecayConfig(_Settings):
    """Of the old policy, n optimizer steps in: ``min(slope * max(n - start, 0), cap)`` (math §5)."""

    start: int = Field(default=0, ge=0)
    slope: float = Field(default=0.001, ge=0)
    cap: float = Field(default=0.5, ge=0, lt=1)


class _Decoupled(_Settings):
    """Online RL that needs the sample alone: deterministic rollouts, training at drawn sigmas."""

    num_steps: int = Field(default=10, ge=1, le=1000)
    shift: Shift = 3.0
    timesteps: Literal["stratified", "full"] = "stratified"  # full: those of the rollout's grid
    num_timesteps: int | None = Field(default=None, ge=1, le=1000)  # stratified: how many; null: num_steps
    updates: int = Field(default=1, ge=1, le=10_000)  # optimizer steps a rollout
    kl_every: int = Field(default=10, ge=0)  # cycles between measurements of the KL to the start; 0: never
    ema_decay: float = Field(default=0.9, ge=0, lt=1)
    evaluation_steps: int | None = Field(default=None, ge=1, le=1000)  # null: num_steps

    @model_validator(mode="after")
    def _counted(self) -> _Decoupled:
        if self.timesteps == "full" and self.num_timesteps is not None:
            raise ValueError("num_timesteps does nothing with timesteps full; leave it out")
        return self


class NFTConfig(_Decoupled):
    """DiffusionNFT (arXiv 2509.16117): the engine samples the old policy."""

    name: Literal["nft"]
    advantage: AdvantageConfig = AdvantageConfig()
    beta: float = Field(default=1.0, gt=0)
    advantage_range: float = Field(default=5.0, gt=0)  # c
    kl_weight: float = Field(default=0.0, ge=0)  # k, of the distance to the start; 0: the reference is not called
    old_decay: OldDecayConfig = OldDecayConfig()


class AWMConfig(_Decoupled):
    """Advantage-weighted matching (arXiv 2509.25050): on-policy, the loss of flow matching times the advantage."""

    name: Literal["awm"]
    advantage: AdvantageConfig = AdvantageConfig()


class BestOfGroupConfig(_Decoupled):
    """Flow matching on the best sample of each group."""

    name: Literal["best_of_group"]


class DPOConfig(_Decoupled):
    """Diffusion-DPO (arXiv 2311.12908) on the best and the worst sample of each group, online."""

    name: Literal["dpo"]
    beta: float = Field(default=100.0, gt=0)


AlgorithmConfig = Annotated[
    Union[FlowMatchingConfig, DMD2Config, FlowGRPOConfig, NFTConfig, AWMConfig, BestOfGroupConfig, DPOConfig],
    Field(discriminator="name"),
]


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
    rollout_rows: int = Field(default=128, ge=1, le=65536)  # of one network call without gradient, guidance not counted
    staging: Literal["prefetch", "sync", "whole"] = "prefetch"  # how rows get to the device: docs/memory.md
    log_every: int = Field(default=10, ge=1)  # cycles
    checkpoint_every: int = Field(default=200, ge=1)  # cycles
    keep_checkpoints: int = Field(default=2, ge=1)
    max_nonfinite: int = Field(default=5, ge=1)  # skipped updates in a row before the run stops
    tensorboard: bool = True
    shard_ranks: int | None = Field(default=None, ge=1)  # that one copy of the weights is spread over; null: 1 for
    # glyph, all for the other families
    reshard: bool = True  # drop a block's gathered weights after its forward; false: faster, and more memory


class ProfileConfig(_Settings):
    """Traces of torch's profiler in the run folder's ``profile/``; cycles and ranks count from 0. docs/profiling.md"""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1)
    start: int = Field(default=3, ge=0)  # first cycle of the trace
    cycles: int = Field(default=1, ge=1, le=1000)  # a trace of many is more than a viewer opens
    warmup: int = Field(default=1, ge=0)  # cycles before it in which the profiler runs and keeps nothing
    memory: bool = False  # each allocation too

    @model_validator(mode="after")
    def _traces(self) -> ProfileConfig:
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"ranks is {list(self.ranks)}, which names one twice; name each once")
        if self.warmup > self.start:
            raise ValueError(
                f"warmup is {self.warmup}, but only {self.start} cycles come before start; lower it, or raise start"
            )
        return self


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
    rollout: RolloutConfig | None = None  # online RL only; null: its defaults
    rewards: dict[str, RewardConfig] = Field(default_factory=dict)
    algorithm: AlgorithmConfig
    optimizers: dict[str, OptimizerConfig] = Field(default_factory=dict)
    training: TrainingConfig = TrainingConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    profile: ProfileConfig | None = None  # null: no trace

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if not self.output.strip() and "output" in self.model_fields_set:
            raise ValueError(f"output is {self.output!r}; name a folder")
        if self.profile is not None and self.profile.start + self.profile.cycles > self.num_cycles:
            raise ValueError(
                f"profile.start is {self.profile.start} and profile.cycles {self.profile.cycles}, but num_cycles is "
                f"{self.num_cycles}: the run would end before the trace does; lower profile.start"
            )
        self._check_pictures()
        self._check_family()
        if self.model.path != "random" and (self.model.width or self.model.num_layers):
            raise ValueError(
                f"model.width and model.num_layers are of a random network; model.path is {self.model.path!r}, which "
                "brings its own: leave them out, or set model.path to random"
            )
        if isinstance(self.algorithm, FlowMatchingConfig):
            if self.data.prompts != "glyphs":
                raise ValueError(
                    f"data.prompts is {self.data.prompts!r}, but flow_matching learns from captioned pictures; leave "
                    "it out"
                )
            if self.evaluate.shift is not None:
                raise ValueError("evaluate.shift is of dmd2's student; for flow_matching set algorithm.shift")
        self._check_rewarded()
        named = self._named_plugins()
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

    def _check_family(self) -> None:
        """What only one kind of family has."""
        family, glyph = self.model.family, self.model.family == "glyph"
        if glyph and (
            self.data.height or self.data.width or self.data.conditions_cache or self.model.dtype != "float32"
        ):
            raise ValueError(
                "data.height, data.width, data.conditions_cache and model.dtype do nothing with model.family glyph; "
                "leave them out"
            )
        if glyph and self.model.attention != "native":
            raise ValueError(
                f"model.attention is {self.model.attention!r}, but the family glyph has its own attention alone; leave "
                "it out"
            )
        if family != "flux2" and self.model.embedded_guidance is not None:
            raise ValueError(
                f"model.embedded_guidance is {self.model.embedded_guidance:g}, but no network of the family {family} "
                "reads one, only FLUX.2-dev's; leave it out"
            )
        if not glyph and self.model.path in ("shipped", "half_trained", "random"):
            raise ValueError(
                f"model.path is {self.model.path!r}, which the family {family!r} does not have; give a diffusers folder"
            )
        prompts = self.data.prompts
        if not glyph and self.data.pictures is None and prompts == "glyphs":
            raise ValueError(
                f"data.prompts is 'glyphs', captions of the family glyph; for {family} name a prompt file or 'shipped'"
            )
        if glyph and prompts in ("shipped", "shipped_text"):
            raise ValueError(f"data.prompts is {prompts!r}, but glyph reads captions of its own only; leave it out")

    def _check_pictures(self) -> None:
        """A folder of pictures is given where one is learnt from; those of glyph are drawn."""
        family, name, pictures = self.model.family, self.algorithm.name, self.data.pictures
        needed = name == "flow_matching" and family != "glyph"
        if needed and pictures is None:
            raise ValueError(
                f"data.pictures is missing: {name} of {family} learns from captioned pictures; name their folder"
            )
        if not needed and pictures is not None:
            raise ValueError(
                f"data.pictures does nothing with {name} of {family}; only flow_matching of another family than glyph "
                "learns from a folder of pictures: leave it out"
            )

    def _named_plugins(self) -> set[str]:
        """Settings that may name a function of the user."""
        named = {r.function for r in self.rewards.values() if isinstance(r, FunctionRewardConfig)}
        if isinstance(self.algorithm, DMD2Config):
            named.add(self.algorithm.step_strategy)
        if isinstance(self.algorithm, FlowGRPOConfig):
            named |= {self.algorithm.kind, self.algorithm.steps.strategy}
        return named

    def _check_rewarded(self) -> None:
        """Rewards are given where they are used, and groups fit the batch."""
        name, rollout = self.algorithm.name, self.rollout or RolloutConfig()
        for reward in self.rewards:
            if not reward.isidentifier() or reward == "failed":
                raise ValueError(f"rewards.{reward}: a reward's name is letters, digits and underscores, not 'failed'")
        if name not in REWARDED:
            if self.rollout is not None:
                raise ValueError(f"rollout is set, but {name} learns from no reward, so it would do nothing")
            for reward, settings in self.rewards.items():
                if settings.optimised:
                    raise ValueError(
                        f"rewards.{reward}.weight is {settings.weight}, but {name} learns from no reward: set it to 0, "
                        "and the reward scores the evaluation"
                    )
            return
        if self.evaluate.shift is not None:
            raise ValueError(f"evaluate.shift is of dmd2's student; for {name} set algorithm.shift")
        if not any(reward.optimised for reward in self.rewards.values()):
            raise ValueError(
                f"rewards: {name} needs at least one reward with a weight that is not 0, for example "
                "rewards.ocr.kind=ocr"
            )
        if self.data.batch_size % rollout.group_size:
            raise ValueError(
                f"data.batch_size is {self.data.batch_size} and rollout.group_size {rollout.group_size}: a cycle holds "
                "whole groups; set batch_size to a multiple"
            )
        if rollout.group_size == 1:
            raise ValueError("rollout.group_size is 1: a group of one has no advantage; set at least 2")
        for setting in ("max_refills", "dump_every"):
            if rollout.replay and getattr(rollout, setting):
                raise ValueError(f"rollout.{setting} does nothing with rollout.replay, which samples nothing")
        needs_means = getattr(self.algorithm, "ratio", "") == "guard"
        if rollout.replay and (needs_means or getattr(self.algorithm, "score", "gaussian") != "gaussian"):
            raise ValueError(
                "rollout.replay: a rollout records the normal density and no means; set algorithm.ratio to log_prob "
                "and algorithm.score to gaussian"
            )
        updates, rows = getattr(self.algorithm, "updates", 1), self.data.batch_size
        if isinstance(self.algorithm, (BestOfGroupConfig, DPOConfig)):
            rows //= rollout.group_size  # it trains on one row a group
        if updates > rows:
            raise ValueError(
                f"algorithm.updates is {updates}, and a rollout has {rows} rows for {name}: an update would have none"
            )

    def identity(self) -> dict[str, Any]:
        """What makes two runs the same run: everything but where it is written, how it is watched, what share of the
        work is done at a time and where, and its learning rates, which may be changed on the way."""
        values = self.model_dump(mode="json", exclude={"output", "overwrite", "profile"})
        for name in (
            *("log_every", "checkpoint_every", "keep_checkpoints", "tensorboard"),
            *("threads", "rollout_rows", "shard_ranks", "reshard"),
        ):
            del values["training"][name]
        for optimizer in values["optimizers"].values():
            del optimizer["lr"], optimizer["warmup_steps"]
        del values["data"]["conditions_cache"]
        if values["rollout"] is not None:
            del values["rollout"]["dump_every"]
        return values


# Roles that an optimizer steps, in the order of an algorithm's phases.
TRAINED_ROLES: dict[str, tuple[str, ...]] = {
    "flow_matching": ("student",),
    "dmd2": ("student", "fake_score"),
    "flow_grpo": ("policy",),
    "nft": ("policy",),
    "awm": ("policy",),
    "best_of_group": ("policy",),
    "dpo": ("policy",),
}
REWARDED = ("flow_grpo", "nft", "awm", "best_of_group", "dpo")  # learn from rewards; others are only scored by them


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


def changed(config: RunConfig, overrides: Sequence[str], groups: Sequence[str]) -> RunConfig:
    """A run with dotted overrides of some groups of settings.

    Raises:
        ValueError: an override is of another group, or as ``load_recipe``.
    """
    values = config.model_dump(mode="json", exclude_unset=True)
    for override in overrides:
        if override.partition("=")[0].strip().split(".")[0] not in groups:
            raise ValueError(f"override {override!r}: only settings of {', '.join(groups)} can be changed here")
        _apply(values, override)
    return parse(values) if overrides else config


def parse(values: Mapping[str, Any]) -> RunConfig:
    """A validated run from plain values.

    Raises:
        ValueError: as ``load_recipe``.
    """
    _check_plain(values, "")
    try:
        # Through JSON: strict types, but a YAML list may fill a tuple.
        return RunConfig.model_validate_json(json.dumps(_with_prompts(values)))
    except ValidationError as error:
        raise ValueError("; ".join(_explain(e, values) for e in error.errors())) from None


def _with_prompts(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings, with shipped prompts where a family without captions of its own has no prompts and no pictures."""
    model, data = values.get("model", {}), values.get("data", {})
    if not isinstance(model, Mapping) or not isinstance(data, Mapping) or model.get("family", "glyph") == "glyph":
        return values
    has_texts = "prompts" in data or data.get("pictures") is not None
    return values if has_texts else {**values, "data": {**data, "prompts": "shipped"}}


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
    if at[:1] == ["rewards"] and len(at) > 2 and at[2] in _REWARDS:
        del at[2]
    if at[-1:] in (["float"], ["dict[str,float]"]):
        del at[-1]  # of a weight, which may be either
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
    if kind in ("union_tag_invalid", "union_tag_not_found") and at[0] == "rewards":
        given_kind = given.get("kind") if isinstance(given, Mapping) else given
        return f"{key}.kind is {given_kind!r}; known are {', '.join(sorted(_REWARDS))}"
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
        elif name == "rewards":
            for reward, settings in here.items():
                kind = settings.get("kind") if isinstance(settings, Mapping) else None
                yield from _keys(_REWARDS.get(str(kind), _Reward), {}, f"{prefix}{name}.{reward}.")
        elif _is_settings(inner):
            yield from _keys(inner, here, f"{prefix}{name}.")


# Reward settings by the kinds that name them.
_REWARDS: dict[str, type[_Reward]] = {
    kind: c for c in get_args(get_args(RewardConfig)[0]) for kind in get_args(c.model_fields["kind"].annotation)
}


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
