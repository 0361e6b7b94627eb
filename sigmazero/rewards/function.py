"""A user's own reward: a function by file or dotted name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

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
        fresh = copy.deepcopy((pictures, metadata)) if len(prompts) > 1 else None  # it may change what it is given
        try:
            return self.function(pictures, prompts, metadata)
        except Exception as error:
            if fresh is None:
                return [error]
            pictures, metadata = fresh
            rows = [(pictures[i : i + 1], [prompts[i]], [metadata[i]]) for i in range(len(prompts))]
            return _joined([self(*row) for row in rows])


def _joined(answers: Sequence[Any]) -> Values:
    """Answers of one picture each as one; what is missing or no list of one number is an error there."""
    parts = dict.fromkeys(part for answer in answers if isinstance(answer, Mapping) for part in answer)
    if not parts:
        return [_only(answer) for answer in answers]
    return {part: [_only(a.get(part, []) if isinstance(a, Mapping) else a) for a in answers] for part in parts}


def _only(values: Any) -> Any:
    own = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else values
    if isinstance(own, (list, tuple)) and len(own) == 1:
        return own[0]
    return ValueError(f"it must return one number a picture, and returned {values!r}")


def build(config: FunctionRewardConfig, plugins: Sequence[str]) -> Reward:
    """The function of a recipe.

    Raises:
        ValueError: as ``load_plugin``.
    """
    return FunctionReward(load_plugin(config.function, plugins), config.layout, config.size)
