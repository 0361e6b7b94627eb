"""Evaluation of a run in its folder: pictures and scores of every arm, ``scores.json``."""

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
from sigmazero.rewards.scorer import Scorer
from sigmazero.tensors import read_tensors, write_tensors
from sigmazero.training.folder import RunFolder, write_json
from sigmazero.training.parallel import ALONE, Ranks

NUM_SHOWN = 16  # captions whose pictures the report shows
NUM_REFRESHED = 64  # captions that are scored while the run goes on


class Judge:
    """Scores arms of one run. Arms of frozen roles are sampled once and kept in the folder.

    Args:
        scorer: the run's rewards, where it has any.
        prompts: to evaluate on, for a family whose pictures no reader knows.
        fresh: sample the frozen arms again, whatever the folder keeps.
        ranks: that sample together; only the first scores and writes.
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
        ranks: Ranks = ALONE,
    ) -> None:
        self._config, self._algorithm, self._engine, self._decode = config, algorithm, engine, roles.decode
        self._folder, self._scorer, self._fresh, self._ranks = folder, scorer, fresh, ranks
        self._evaluator: PromptEvaluator
        if config.model.family == "glyph":
            self._evaluator = Evaluator(config.evaluate, load_reader())
        else:
            self._evaluator = PromptEvaluator(config.evaluate, prompts)
        if scorer is not None:
            for prompt in self._evaluator.prompts[:: config.evaluate.samples_per_caption]:
                scorer.check(prompt)
        self._fixed = [arm for arm in algorithm.arms if roles.kinds[arm.role] == "frozen"]
        self._moving = [arm for arm in algorithm.arms if roles.kinds[arm.role] != "frozen"]
        self._base: Tensor | None = None  # pictures of the first frozen arm, which the others are held against
        self.scores: dict[str, dict[str, Metric]] = {}

    def score_fixed(self) -> None:
        """Real pictures and the arms that training does not change."""
        captions = [prompt.text for prompt in self._evaluator.prompts[:: self._config.evaluate.samples_per_caption]]
        self._folder.evaluation.mkdir(exist_ok=True)
        write_json(self._folder.evaluation / "captions.json", captions[:NUM_SHOWN])
        if isinstance(self._evaluator, Evaluator) and self._ranks.is_first:
            real = quantized(self._evaluator.real())
            self._show(self._folder.evaluation / "real.png", real)
            self.scores["real"] = self._evaluator.score_real(real.float() / 255) | self._rewards(real)
        for arm in self._fixed:
            pictures = self._kept(arm)
            self._score(arm.name, pictures)
            if self._base is None:
                self._base = pictures

    def refresh(self, cycle: int) -> dict[str, float]:
        """Pictures and quick scores of the averaged student, for the metrics log."""
        arm = self._moving[0]
        count = min(NUM_REFRESHED, self._config.evaluate.num_captions)
        pictures = quantized(self._evaluator.sample(arm, self._engine, self._decode, count))
        if not self._ranks.is_first:
            return {}
        self._show(self._folder.evaluation / "history" / f"{cycle:08d}.png", pictures)
        scores = self._scored(pictures)
        return {f"evaluate/{arm.name}/{name}": metric.mean for name, metric in scores.items()}

    def score_moving(self) -> None:
        """The trained arms, at the end."""
        for arm in self._moving:
            self._score(arm.name, self._sample(arm))

    def _sample(self, arm: Arm) -> Tensor:
        with CycleProgress(f"sampling {arm.name}", 0, len(self._evaluator.prompts)) as progress:
            return quantized(self._evaluator.sample(arm, self._engine, self._decode, after=progress.update))

    def _score(self, name: str, pictures: Tensor) -> None:
        if self._ranks.is_first:
            self._show(self._folder.evaluation / f"{name}.png", pictures)
            self.scores[name] = self._scored(pictures)

    def _scored(self, pictures: Tensor) -> dict[str, Metric]:
        base = None if self._base is None else self._base[: len(pictures)].float() / 255
        return self._evaluator.score(pictures.float() / 255, base) | self._rewards(pictures)

    def _rewards(self, pictures: Tensor) -> dict[str, Metric]:
        """The run's rewards, optimised or only watched, of uint8 pictures of the held-out captions."""
        if self._scorer is None:
            return {}
        values = self._scorer.score(pictures, self._evaluator.prompts[: len(pictures)])
        return {f"reward/{name}": metric for name, metric in self._evaluator.rewards(values).items()}

    def _kept(self, arm: Arm) -> Tensor:
        """The pictures of a frozen arm: from the folder, or sampled by all ranks and kept there."""
        found = self._found(arm)
        if self._ranks.gather_json(found is not None)[0]:
            return torch.empty(0) if found is None else found  # another rank than the first has no use for them
        pictures = self._sample(arm)
        write_tensors(self._path(arm), {"pictures": pictures}, self._made(arm))
        return pictures

    def _path(self, arm: Arm) -> Path:
        return self._folder.evaluation / f"{arm.name}.safetensors"

    def _made(self, arm: Arm) -> dict[str, str]:
        return {"evaluation": f"{self._evaluator.fingerprint} {arm}"}

    def _found(self, arm: Arm) -> Tensor | None:
        if self._fresh or not self._path(arm).is_file():
            return None
        try:
            tensors, metadata = read_tensors(self._path(arm))
        except ValueError:
            return None  # damaged: it is only a copy of what can be sampled again
        return tensors.get("pictures") if metadata == self._made(arm) else None

    def _show(self, path: Path, pictures: Tensor) -> None:
        shown = pictures[:: self._config.evaluate.samples_per_caption][:NUM_SHOWN]
        save_png(grid(shown, len(shown)), path)

    def write(self, cycle: int) -> None:
        """Writes what has been scored so far."""
        if not self._ranks.is_first:
            return
        arms = {arm: {name: m.as_dict() for name, m in metrics.items()} for arm, metrics in self.scores.items()}
        settings = {
            "seed": self._config.seed,
            "num_cycles": self._config.num_cycles,
            "algorithm": self._config.algorithm.model_dump(mode="json"),
            "evaluate": self._config.evaluate.model_dump(mode="json"),
            "prompts": self._evaluator.fingerprint,
            "rewards": {name: reward.meaning() for name, reward in self._config.rewards.items()},
            "threads": torch.get_num_threads(),
        }
        write_json(self._folder.path / "scores.json", {"arms": arms, "settings": settings, "cycle": cycle})
