"""Evaluation of a run in its folder: pictures and scores of every arm, ``scores.json``, the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sigmazero.algorithms.base import Algorithm, Arm
from sigmazero.config import RunConfig
from sigmazero.engines.base import Engine
from sigmazero.evaluate import Evaluator, Metric, PromptEvaluator
from sigmazero.models.roles import Roles
from sigmazero.pictures import grid, quantized, save_png
from sigmazero.progress import CycleProgress
from sigmazero.reader import load_reader
from sigmazero.records import Prompt
from sigmazero.report import write_report
from sigmazero.rewards.scorer import Scorer
from sigmazero.tensors import read_tensors, write_tensors
from sigmazero.training.folder import RunFolder, write_json

NUM_SHOWN = 16  # captions whose pictures the report shows
NUM_REFRESHED = 64  # captions that are scored while the run goes on


class Judge:
    """Scores arms of one run. Arms of frozen roles are sampled once and kept in the folder.

    Args:
        scorer: the run's rewards, where it has any.
        prompts: to evaluate on, for a family whose pictures no reader knows.
        fresh: sample the frozen arms again, whatever the folder keeps.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        roles: Roles,
        engine: Engine,
        folder: RunFolder,
        scorer: Scorer | None = None,
        prompts: Sequence[Prompt] = (),
        fresh: bool = False,
    ) -> None:
        self._config, self._algorithm, self._engine, self._decode = config, algorithm, engine, roles.model.decode
        self._folder, self._scorer, self._fresh = folder, scorer, fresh
        self._evaluator: PromptEvaluator
        if config.model.family == "glyph":
            self._evaluator = Evaluator(config.evaluate, load_reader())
        else:
            self._evaluator = PromptEvaluator(config.evaluate, prompts)
        self._fixed = [arm for arm in algorithm.arms if roles.kinds[arm.role] == "frozen"]
        self._moving = [arm for arm in algorithm.arms if roles.kinds[arm.role] != "frozen"]
        self.scores: dict[str, dict[str, Metric]] = {}

    def score_fixed(self) -> None:
        """Real pictures and the arms that training does not change."""
        captions = [prompt.text for prompt in self._evaluator.prompts[:: self._config.evaluate.samples_per_caption]]
        self._folder.evaluation.mkdir(exist_ok=True)
        write_json(self._folder.evaluation / "captions.json", captions[:NUM_SHOWN])
        if isinstance(self._evaluator, Evaluator):
            real = quantized(self._evaluator.real())
            self._show(self._folder.evaluation / "real.png", real)
            self.scores["real"] = self._evaluator.score_real(real.float() / 255) | self._rewards(real)
        for arm in self._fixed:
            self._score(arm.name, self._kept(arm))

    def refresh(self, cycle: int) -> dict[str, float]:
        """Pictures and quick scores of the averaged student, for the metrics log."""
        arm = self._moving[0]
        count = min(NUM_REFRESHED, self._config.evaluate.num_captions)
        pictures = quantized(self._evaluator.sample(arm, self._engine, self._decode, count))
        self._show(self._folder.evaluation / "history" / f"{cycle:08d}.png", pictures)
        scores = self._evaluator.score(pictures.float() / 255) | self._rewards(pictures)
        return {f"evaluate/{arm.name}/{name}": metric.mean for name, metric in scores.items()}

    def score_moving(self) -> None:
        """The trained arms, at the end."""
        for arm in self._moving:
            self._score(arm.name, self._sample(arm))

    def _sample(self, arm: Arm) -> Tensor:
        with CycleProgress(f"sampling {arm.name}", 0, len(self._evaluator.prompts)) as progress:
            return quantized(self._evaluator.sample(arm, self._engine, self._decode, after=progress.update))

    def _score(self, name: str, pictures: Tensor) -> None:
        self._show(self._folder.evaluation / f"{name}.png", pictures)
        self.scores[name] = self._evaluator.score(pictures.float() / 255) | self._rewards(pictures)

    def _rewards(self, pictures: Tensor) -> dict[str, Metric]:
        """The run's rewards, optimised or only watched, of uint8 pictures of the held-out captions."""
        if self._scorer is None:
            return {}
        values = self._scorer.score(pictures, self._evaluator.prompts[: len(pictures)])
        return {f"reward/{name}": metric for name, metric in self._evaluator.rewards(values).items()}

    def _kept(self, arm: Arm) -> Tensor:
        """The pictures of a frozen arm: from the folder, or sampled and kept there."""
        path = self._folder.evaluation / f"{arm.name}.safetensors"
        if path.is_file() and not self._fresh:
            try:
                kept = read_tensors(path)[0].get("pictures")
            except ValueError:
                kept = None  # damaged: it is only a copy of what can be sampled again
            if kept is not None and kept.dtype == torch.uint8 and len(kept) == len(self._evaluator.prompts):
                return kept
        pictures = self._sample(arm)
        write_tensors(path, {"pictures": pictures})
        return pictures

    def _show(self, path: Path, pictures: Tensor) -> None:
        shown = pictures[:: self._config.evaluate.samples_per_caption][:NUM_SHOWN]
        save_png(grid(shown, len(shown)), path)

    def write(self, cycle: int) -> None:
        """Writes what has been scored so far, and the report."""
        arms = {arm: {name: m.as_dict() for name, m in metrics.items()} for arm, metrics in self.scores.items()}
        settings = {
            "seed": self._config.seed,
            "num_cycles": self._config.num_cycles,
            "algorithm": self._config.algorithm.model_dump(mode="json"),
            "evaluate": self._config.evaluate.model_dump(mode="json"),
            "threads": torch.get_num_threads(),
        }
        write_json(self._folder.path / "scores.json", {"arms": arms, "settings": settings, "cycle": cycle})
        write_report(self._folder.path)
