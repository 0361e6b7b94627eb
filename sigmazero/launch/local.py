"""Builds a run in this process and sees it through: training, checkpoints, metrics, evaluation, report."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sigmazero.algorithms import ALGORITHMS
from sigmazero.algorithms.base import Algorithm
from sigmazero.config import REWARDED, LoraConfig, RunConfig
from sigmazero.data import GlyphCaptions, PictureFolder, PromptFile, PromptStream, open_prompts
from sigmazero.engines.base import Engine
from sigmazero.engines.local import LocalEngine
from sigmazero.evaluate import scores_table
from sigmazero.export import base_folder
from sigmazero.launch.judge import Judge
from sigmazero.launch.ranks import together
from sigmazero.metrics import MetricsLog
from sigmazero.models import FAMILIES
from sigmazero.models.adapters import check_start, read_adapter
from sigmazero.models.base import FlowModel
from sigmazero.models.conditions import ConditionsFolder, KnownPrompts, encoder_fingerprint
from sigmazero.models.folder import has_encoders
from sigmazero.models.roles import Roles, check_targets
from sigmazero.progress import CycleProgress
from sigmazero.records import Prompt
from sigmazero.report import write_report
from sigmazero.rewards import REWARDS
from sigmazero.rewards.scorer import Scorer
from sigmazero.training import checkpoint, dump, profiling
from sigmazero.training.folder import RunFolder, check_config
from sigmazero.training.parallel import ALONE, Ranks, SharedEngine
from sigmazero.training.rollout import Collector
from sigmazero.training.trainer import Trainer


@dataclass
class Built:
    """The parts of a run, wired together. Used as a context: leaving it ends the threads of its rewards."""

    config: RunConfig
    algorithm: Algorithm
    roles: Roles
    engine: Engine
    prompts: PromptStream
    scorer: Scorer | None  # None without rewards
    trainer: Trainer
    inputs: dict[str, str]  # hashes of what the settings name, by setting

    @property
    def evaluation_prompts(self) -> list[Prompt]:
        """The prompts of the run's file or pictures; none for endless captions, which have a test split."""
        return self.prompts.all() if isinstance(self.prompts, (PromptFile, PictureFolder)) else []

    def __enter__(self) -> Built:
        return self

    def __exit__(self, *_: object) -> None:
        if self.scorer is not None:
            self.scorer.close()


def use_threads(threads: int) -> None:
    """Threads of one process; 0 is one a core, shared among the ranks of this machine."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // here))


def load_model(config: RunConfig, *, encoders: bool = True) -> FlowModel:
    """The base network of a recipe; without its text encoders where all conditions are there already.

    Raises:
        ValueError: ``model.path`` is no weight file or folder of the family, or it has no pictures of that size.
    """
    model, data = config.model, config.data
    if model.path == "random":
        family: Any = importlib.import_module(FAMILIES[model.family])
        return family.create(model.width, model.num_layers, config.seed)
    own: dict[str, Any] = {} if encoders else {"encoders": False}
    if model.embedded_guidance is not None:
        own["embedded_guidance"] = model.embedded_guidance
    return load_family(model.family, model.path, height=data.height, width=data.width, dtype=model.dtype, **own)


def load_family(
    name: str, path: str, *, height: int | None = None, width: int | None = None, dtype: str = "float32", **own: Any
) -> FlowModel:
    """The base network in a file, a folder or a repository of the hub; only glyph has files, of one size and precision.

    Raises:
        ValueError: as ``load_model``.
    """
    family: Any = importlib.import_module(FAMILIES[name])
    if name == "glyph":
        return family.load(family.SHIPPED.get(path, path))
    known: Any = KnownPrompts(family.load(path, height=height, width=width, dtype=getattr(torch, dtype), **own))
    return known


def load_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm of a recipe.

    Raises:
        ValueError: a setting of it names what is not there.
    """
    return importlib.import_module(ALGORITHMS[config.algorithm.name]).build(config)


def load_rewards(config: RunConfig) -> Scorer | None:
    """The rewards of a recipe; None where it has none.

    Raises:
        ValueError: names the reward that cannot be made, and why.
    """
    rewards: dict[str, Any] = {}
    for name, settings in config.rewards.items():
        try:
            rewards[name] = importlib.import_module(REWARDS[settings.kind]).build(settings, config.plugins)
        except ValueError as error:
            raise ValueError(f"rewards.{name}: {str(error).removeprefix('rewards: ')}") from None
    return Scorer(rewards, config.rewards) if rewards else None


def encode_all(model: KnownPrompts, prompts: PromptStream, cache: ConditionsFolder | None) -> None:
    """Encodes a whole prompt file or every caption of a folder, and frees the encoders."""
    texts = texts_of(prompts)
    with CycleProgress("encoding prompts", 0, len({"", *texts})) as progress:
        model.prepare(texts, progress.update, cache)


def texts_of(prompts: PromptStream) -> list[str]:
    """Of a prompt file or a folder of pictures; none of endless captions."""
    return [prompt.text for prompt in prompts.all()] if isinstance(prompts, (PromptFile, PictureFolder)) else []


def _conditions_cache(config: RunConfig, texts: Sequence[str]) -> tuple[ConditionsFolder | None, bool]:
    """The folder of conditions of this pipeline's text encoders, and whether it leaves them something to do.

    Raises:
        ValueError: a text is not in it, and the pipeline has no text encoder; the text is named.
    """
    path, model = config.data.conditions_cache, config.model
    if not path:
        return None, True
    if not has_encoders(model.path):
        cache = ConditionsFolder.supplied(path, model.family, model.dtype)
        lacking = cache.lacking(texts)
        if lacking:
            raise ValueError(
                f"data.conditions_cache: {path} lacks {lacking[0]!r} ({len(lacking)} of {len({'', *texts})} texts), "
                f"and {model.path} has no text encoder; encode them where there is one"
            )
        return cache, False
    source: Any = importlib.import_module(FAMILIES[model.family]).__file__
    cache = ConditionsFolder(path, encoder_fingerprint(base_folder(model.path), Path(source), model.dtype))
    return cache, bool(cache.lacking(texts))


def _check_prompts(prompts: PromptStream, model: FlowModel, scorer: Scorer | None) -> None:
    """Finds a prompt that the family cannot read, or a reward cannot score, before training."""

    def check(prompt: Prompt) -> None:
        if not isinstance(model, KnownPrompts):  # text encoders read anything
            model.encode([prompt.text])
        if scorer is not None:
            scorer.check(prompt)

    if isinstance(prompts, PromptFile):
        prompts.check(check)
    elif scorer is not None:
        scorer.check(prompts.prompts([0])[0])


def build(config: RunConfig, ranks: Ranks = ALONE, encode: Callable[..., None] = encode_all) -> Built:
    """Everything of a run but its folder. Plugins are loaded first, and named.

    Args:
        ranks: the processes that share the run's work.
        encode: has a family encode what it will be asked for.
    Raises:
        ValueError: a setting does not fit the model, the machine or a file that it names.
    """
    use_threads(config.training.threads)
    device = find_device(config.training.device)
    algorithm = load_algorithm(config)
    prompts = open_prompts(config.data, config.seed)
    scorer = load_rewards(config)
    start = read_adapter(config.roles.lora.init) if config.roles.lora and config.roles.lora.init else None
    cache, encoders = _conditions_cache(config, texts_of(prompts))
    model = load_model(config, encoders=encoders)
    model.net.to(device)
    if isinstance(model, KnownPrompts):
        masters = {torch.float32} if config.roles.storage == "copy" else set()
        model.use_attention(config.model.attention, [getattr(torch, config.model.dtype), *masters])
        model.check_guidance("algorithm.guidance", getattr(config.algorithm, "guidance", 1.0))
        if config.roles.storage == "lora":  # a mistake here is told before minutes of encoding
            lora = config.roles.lora or LoraConfig()
            targets = lora.targets or model.lora_targets
            check_targets(model.net, targets, lora.rank)
            if start is not None:
                check_start(start, lora, model.net, targets)
        (encode if encoders else encode_all)(model, prompts, cache)
    rewarded = scorer if config.algorithm.name in REWARDED else None  # else it only scores the evaluation
    _check_prompts(prompts, model, rewarded)
    if ranks.sharded:
        model.net.to("cpu")  # copies are made there; each block goes to its device as it is spread
    roles = Roles(
        model, algorithm.roles, {a.target: a.source for a in algorithm.averages},
        lora=(config.roles.lora or LoraConfig()) if config.roles.storage == "lora" else None,
        guidance_norm=config.model.guidance_norm, seed=config.seed,
        activation_checkpointing=config.model.activation_checkpointing, shard=ranks.shard,
    )  # fmt: skip
    engine: Engine = LocalEngine(roles, max_batch=config.training.rollout_rows, device=device)
    if ranks.count > 1:
        engine = SharedEngine(engine, ranks)
    pictures = _fit(prompts, model) if isinstance(prompts, PictureFolder) else GlyphCaptions("train", config.seed)
    collector = Collector(config, algorithm, model, engine, prompts, rewarded, ranks, device)
    collector.check_replay()
    trainer = Trainer(config, algorithm, roles, engine, collector, pictures, device, ranks)
    inputs = {"model.path": roles.base_fingerprint}
    if isinstance(prompts, PromptFile):
        inputs["data.prompts"] = prompts.fingerprint
    if isinstance(prompts, PictureFolder):
        inputs["data.pictures"] = prompts.fingerprint
    if start is not None:
        inputs["roles.lora.init"] = start.fingerprint
    if config.rollout is not None and config.rollout.replay:
        inputs["rollout.replay"] = dump.fingerprint(dump.find(config.rollout.replay))
    return Built(config, algorithm, roles, engine, prompts, scorer, trainer, inputs)


def _fit(pictures: PictureFolder, model: FlowModel) -> PictureFolder:
    """Pictures of the model's size, which is data.height by data.width or its own default."""
    about = model.metadata()
    pictures.fit(int(about["height"]), int(about["width"]))
    return pictures


def find_device(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda``; the last is a ValueError where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("training.device is 'cuda', but torch finds no CUDA device here; set 'auto' or 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def train(config: RunConfig) -> Path:
    """Trains a run to its end, from its newest checkpoint where there is one. Returns the run folder.

    Started by torchrun, it is one of the ranks that share the work. SIGTERM saves at the end of the cycle and ends the
    process with code 143.

    Raises:
        ValueError: the settings or the folder do not allow it; the message says what to set.
    """
    with together(config) as ranks:
        return _train(config, ranks)


def _train(config: RunConfig, ranks: Ranks) -> Path:
    profiling.check_ranks(config.profile, ranks.count)
    with _folder_for(config, ranks) as folder, build(config, ranks) as built:
        folder.open(config, built.inputs)
        ranks.any(False)  # nobody reads the folder before the first rank has opened it
        shared = RunFolder(config.output)
        restore_newest(built, shared)
        judge = Judge(
            config, built.algorithm, built.roles, built.engine, folder, built.scorer, built.evaluation_prompts,
            ranks=ranks,
        )  # fmt: skip
        judge.score_fixed()
        start = built.trainer.counters.cycle
        judge.write(start)
        if ranks.is_first:
            write_report(folder.path)
        if start == 0 and config.evaluate.every:
            judge.refresh(0)  # the first row of the report's pictures over training
        with (
            MetricsLog(folder.path, start, config.training.tensorboard) as log,
            CycleProgress("training", start, config.num_cycles) as progress,
            _asked_to_end() as asked,
            checkpoint.Saver(shared.checkpoints, config.training.keep_checkpoints, ranks) as saver,
            profiling.tracing(config.profile, shared.path, ranks, start, built.trainer.device) as traced,
        ):
            built.trainer.run(_watch(built, folder, judge, log, progress, saver, asked, traced))
        judge.score_moving()
        judge.write(config.num_cycles)
        if ranks.is_first:
            write_report(folder.path, finished=True)
        folder.describe(config, built.inputs, finished=True)  # last: a run that is finished does not go on
        if ranks.is_first:
            print(scores_table(judge.scores))
            print(f"finished: report in {folder.path / 'report.html'}, scores in {folder.path / 'scores.json'}")
            if traces := [str(path) for path in profiling.trace_paths(config.profile, folder.path) if path.is_file()]:
                print(f"traces: {', '.join(traces)}; open them in https://ui.perfetto.dev or chrome://tracing")
    return Path(config.output)


@contextlib.contextmanager
def _folder_for(config: RunConfig, ranks: Ranks) -> Generator[RunFolder]:
    """The run's folder, locked; one that holds another run is refused before anything is built.

    What another rank than the first writes, checkpoints apart, goes where nobody looks (B72).
    """
    with tempfile.TemporaryDirectory() as nowhere, RunFolder(config.output if ranks.is_first else nowhere) as folder:
        folder.check(config)
        yield folder


@contextlib.contextmanager
def _asked_to_end() -> Generator[Callable[[], bool]]:
    """Whether SIGTERM has come; it ends nothing meanwhile."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only that one may listen
        yield lambda: False
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGTERM, before)


def restore_newest(built: Built, folder: RunFolder) -> None:
    """Puts the newest checkpoint that verifies into the run, where there is one.

    Raises:
        ValueError: it is of another run, or does not fit this one; or there are some, but none can be read.
    """
    found, refused = checkpoint.load_newest(folder.checkpoints, built.trainer.ranks)
    if refused and found is None:
        raise ValueError(f"{'; '.join(refused)}; there is no other to go on from: set overwrite=true to start over")
    for line in refused:
        print(f"warning: {line}; looking for an older one", file=sys.stderr)
    if found is not None:
        check_config(found.path, found.numbers["config"], built.config)
        built.trainer.restore(found.tensors, found.numbers)


def _watch(
    built: Built,
    folder: RunFolder,
    judge: Judge,
    log: MetricsLog,
    progress: CycleProgress,
    saver: checkpoint.Saver,
    asked: Callable[[], bool],
    traced: Callable[[], object],
) -> Callable[[int, dict[str, float]], None]:
    """What happens after a cycle: trace, metrics, refreshed pictures, checkpoint, progress; the end, where ``asked``.

    A row is logged before the checkpoint of the same cycle, so that a resumed run starts its next row where an
    uninterrupted one does.
    """
    settings, trainer, total, ranks = built.config.training, built.trainer, built.config.num_cycles, built.trainer.ranks

    def due(every: int, cycle: int) -> bool:
        return bool(every) and (cycle % every == 0 or cycle == total)

    def after_cycle(cycle: int, metrics: dict[str, float]) -> None:
        traced()
        saver.check()
        log.add(metrics)
        progress.update(cycle, metrics)
        refreshed = due(built.config.evaluate.every, cycle)
        if refreshed:
            log.add(judge.refresh(cycle))
        end = ranks.any(asked())
        saves = end or due(settings.checkpoint_every, cycle)
        if refreshed or due(settings.log_every, cycle) or saves:
            log.write(cycle)
        if refreshed and ranks.is_first:
            write_report(folder.path)
        if saves:
            saver.save(cycle, trainer.tensors(), trainer.numbers())
        if end:
            saver.wait()
            print(f"stopped by SIGTERM after cycle {cycle}, which is saved; the same command goes on", file=sys.stderr)
            raise SystemExit(128 + signal.SIGTERM)

    return after_cycle
