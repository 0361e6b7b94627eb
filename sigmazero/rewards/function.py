"""A user's own reward: a function by file or dotted name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sigmazero.config import FunctionRewardConfig
from sigmazero.plugins import load_plugin
from sigmazero.records import Prompt
from sigmazero.rewards.base import Layout, Reward, Values


@dataclass
class FunctionReward:
    """``function(pictures, prompts, metadata)``."""

    function: Callable[..., Values]
    layout: Layout
    size: tuple[int, int] | None

    def check(self, prompt: Prompt) -> None:
        """A user's function may score anything."""

    def __call__(self, pictures: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Values:
        """One picture that the function cannot take costs one score: a batch that fails is tried picture by picture."""
        try:
            return self.function(pictures, prompts, metadata)
        except Exception as error:
            if len(prompts) == 1:
                return [error]
            rows = [(pictures[i : i + 1], [prompts[i]], [metadata[i]]) for i in range(len(prompts))]
            return _joined([self(*row) for row in rows], error)


def _joined(answers: Sequence[Any], error: Exception) -> Values:
    """Answers of one picture each as one."""
    parts = dict.fromkeys(part for answer in answers if isinstance(answer, Mapping) for part in answer)
    if not parts:
        return [answer[0] if hasattr(answer, "__len__") and len(answer) == 1 else answer for answer in answers]
    return {part: [a[part][0] if isinstance(a, Mapping) and part in a else error for a in answers] for part in parts}


def build(config: FunctionRewardConfig, plugins: Sequence[str]) -> Reward:
    """The function of a recipe.

    Raises:
        ValueError: as ``load_plugin``.
    """
    return FunctionReward(load_plugin(config.function, plugins), config.layout, config.size)
