"""Builds a run in this process and sees it through: training, checkpoints, metrics, evaluation, report."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sigmazero.algorithms import ALGORITHMS
from sigmazero.algorithms.base import Algorithm
from sigmazero.config import LoraConfig, RunConfig
from sigmazero.data import GlyphCaptions, PictureFolder, PromptFile, PromptStream, open_prompts
from sigmazero.engines.local import LocalEngine
from sigmazero.evaluate import scores_table
from sigmazero.launch.judge import Judge
from sigmazero.metrics import MetricsLog
from sigmazero.models import FAMILIES
from sigmazero.models.base import FlowModel
from sigmazero.models.conditions import KnownPrompts
from sigmazero.models.roles import Roles
from sigmazero.progress import CycleProgress
from sigmazero.records import Prompt
from sigmazero.report import write_report
from sigmazero.rewards import REWARDS
from sigmazero.rewards.scorer import Scorer
from sigmazero.training import checkpoint, dump
from sigmazero.training.folder import RunFolder
from sigmazero.training.rollout import Collector
from sigmazero.training.trainer import Trainer


@dataclass
class Built:
    """The parts of a run, wired together. Used as a context: leaving it ends the threads of its rewards."""

    config: RunConfig
    algorithm: Algorithm
    roles: Roles
    engine: LocalEngine
    prompts: PromptStream
    scorer: Scorer | None  # where the algorithm learns from rewards
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
    """Threads of one process; 0 is one a core."""
    torch.set_num_threads(threads or os.cpu_count() or 1)


def load_model(config: RunConfig) -> FlowModel:
    """The base network of a recipe.

    Raises:
        ValueError: ``model.path`` is no weight file or folder of the family, or it has no pictures of that size.
    """
    family: Any = importlib.import_module(FAMILIES[config.model.family])
    model, data = config.model, config.data
    if model.family != "glyph":
        dtype = getattr(torch, model.dtype)
        known: Any = KnownPrompts(family.load(model.path, height=data.height, width=data.width, dtype=dtype))
        return known
    if model.path == "random":
        return family.create(model.width, model.num_layers, config.seed)
    return family.load(family.SHIPPED.get(model.path, model.path))


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


def _encode(model: KnownPrompts, prompts: PromptStream) -> None:
    """Encodes a whole prompt file or every caption of a folder, and frees the encoders."""
    assert isinstance(prompts, (PromptFile, PictureFolder))
    texts = [prompt.text for prompt in prompts.all()]
    with CycleProgress("encoding prompts", 0, len({"", *texts})) as progress:
        model.prepare(texts, progress.update)


def _check_prompts(prompts: PromptStream, model: FlowModel, scorer: Scorer | None) -> None:
    """Finds a prompt that the family cannot read, or a reward cannot score, before training."""

    def check(prompt: Prompt) -> None:
        model.encode([prompt.text])
        if scorer is not None:
            scorer.check(prompt)

    if isinstance(prompts, PromptFile):
        prompts.check(check)
    elif scorer is not None:
        scorer.check(prompts.prompts([0])[0])


def build(config: RunConfig) -> Built:
    """Everything of a run but its folder. Plugins are loaded first, and named.

    Raises:
        ValueError: a setting does not fit the model, the machine or a file that it names.
    """
    use_threads(config.training.threads)
    device = _device(config.training.device)
    algorithm: Algorithm = importlib.import_module(ALGORITHMS[config.algorithm.name]).build(config)
    prompts = open_prompts(config.data, config.seed)
    scorer = load_rewards(config)
    model = load_model(config)
    model.net.to(device)
    if isinstance(model, KnownPrompts):
        _encode(model, prompts)
    _check_prompts(prompts, model, scorer)
    roles = Roles(
        model, algorithm.roles, {a.target: a.source for a in algorithm.averages},
        lora=(config.roles.lora or LoraConfig()) if config.roles.storage == "lora" else None,
        guidance_norm=config.model.guidance_norm, seed=config.seed,
        activation_checkpointing=config.model.activation_checkpointing,
    )  # fmt: skip
    engine = LocalEngine(roles, max_batch=config.training.rollout_rows, device=device)
    pictures = _fit(prompts, model) if isinstance(prompts, PictureFolder) else GlyphCaptions("train", config.seed)
    collector = Collector(config, algorithm, model, engine, prompts, scorer)
    collector.check_replay()
    trainer = Trainer(config, algorithm, roles, engine, collector, pictures, device)
    inputs = {"model.path": roles.base_fingerprint}
    if isinstance(prompts, PromptFile):
        inputs["data.prompts"] = prompts.fingerprint
    if isinstance(prompts, PictureFolder):
        inputs["data.pictures"] = prompts.fingerprint
    if config.rollout is not None and config.rollout.replay:
        inputs["rollout.replay"] = dump.fingerprint(dump.find(config.rollout.replay))
    return Built(config, algorithm, roles, engine, prompts, scorer, trainer, inputs)


def _fit(pictures: PictureFolder, model: FlowModel) -> PictureFolder:
    """Pictures of the model's size, which is data.height by data.width or its own default."""
    about = model.metadata()
    pictures.fit(int(about["height"]), int(about["width"]))
    return pictures


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("training.device is 'cuda', but torch finds no CUDA device here; set 'auto' or 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def train(config: RunConfig) -> Path:
    """Trains a run to its end, from its newest checkpoint where there is one. Returns the run folder.

    Raises:
        ValueError: the settings or the folder do not allow it; the message says what to set.
    """
    with _folder_for(config) as folder, build(config) as built:
        folder.open(config, built.inputs)
        restore_newest(built, folder)
        judge = Judge(
            config, built.algorithm, built.roles, built.engine, folder, built.scorer, built.evaluation_prompts
        )
        judge.score_fixed()
        judge.write(built.trainer.counters.cycle)
        start = built.trainer.counters.cycle
        if start == 0 and config.evaluate.every:
            judge.refresh(0)  # the first row of the report's pictures over training
        with (
            MetricsLog(folder.path, start, config.training.tensorboard) as log,
            CycleProgress("training", start, config.num_cycles) as progress,
        ):
            built.trainer.run(_watch(built, folder, judge, log, progress))
        judge.score_moving()
        judge.write(config.num_cycles)
        folder.describe(config, built.inputs, finished=True)
        write_report(folder.path)
        print(scores_table(judge.scores))
    return folder.path


@contextlib.contextmanager
def _folder_for(config: RunConfig) -> Generator[RunFolder]:
    """The run's folder, locked; one that holds another run is refused before anything is built."""
    with RunFolder(config.output) as folder:
        folder.check(config)
        yield folder


def restore_newest(built: Built, folder: RunFolder) -> None:
    """Puts the newest checkpoint that verifies into the run, where there is one."""
    found, refused = checkpoint.load_newest(folder.checkpoints)
    for line in refused:
        print(f"warning: {line}; looking for an older one", file=sys.stderr)
    if found is not None:
        built.trainer.restore(found.tensors, found.numbers)


def _watch(
    built: Built, folder: RunFolder, judge: Judge, log: MetricsLog, progress: CycleProgress
) -> Callable[[int, dict[str, float]], None]:
    """What happens after each cycle: metrics, refreshed pictures, checkpoint, progress.

    A row is logged before the checkpoint of the same cycle, so that a resumed run starts its next row where an
    uninterrupted one does.
    """
    settings, trainer, total = built.config.training, built.trainer, built.config.num_cycles

    def due(every: int, cycle: int) -> bool:
        return bool(every) and (cycle % every == 0 or cycle == total)

    def after_cycle(cycle: int, metrics: dict[str, float]) -> None:
        log.add(metrics)
        progress.update(cycle, metrics)
        refreshed = due(built.config.evaluate.every, cycle)
        if refreshed:
            log.add(judge.refresh(cycle))
        if refreshed or due(settings.log_every, cycle) or due(settings.checkpoint_every, cycle):
            log.write(cycle)
        if refreshed:
            write_report(folder.path)
        if due(settings.checkpoint_every, cycle):
            checkpoint.save(folder.checkpoints, cycle, trainer.tensors(), trainer.numbers(), settings.keep_checkpoints)

    return after_cycle
