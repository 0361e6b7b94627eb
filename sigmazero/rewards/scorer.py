"""Runs the rewards of a recipe beside the rollout: calls in threads, each with a time limit, failures counted.

A failure (an exception, no answer in time, a wrong number of answers, an answer that is no finite number) costs the
samples of its call and nothing else. A thread cannot be killed: one whose call hangs is left behind and another takes
its place, and what it still says is not heard.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigmazero.config import RewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards.base import Reward, as_layout

EPSILON = 1e-4  # added to the deviation where a reward is normalised


Outcome = tuple[Mapping[str, "list[float]"], "list[str]"]  # values by part of the reward, and what failed


@dataclass
class _Call:
    """One call of a reward on a part of the samples."""

    pictures: Tensor
    prompts: Sequence[Prompt]
    started: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    began: float = 0.0
    abandoned: bool = False
    outcome: Outcome = field(default_factory=lambda: ({}, []))

    def run(self, reward: Reward) -> None:
        self.began = time.monotonic()
        self.started.set()
        try:
            pictures = as_layout(self.pictures, reward.layout, reward.size)
            answer = reward(pictures, [p.text for p in self.prompts], [p.metadata for p in self.prompts])
            self.outcome = _numbers(answer, len(self.prompts))
        except BaseException as error:  # a scorer that calls sys.exit must not take its thread along unheard
            self.outcome = {}, [_line(error)]
        self.done.set()


class _Workers:
    """The threads of one reward, which take its calls in order."""

    def __init__(self, reward: Reward, config: RewardConfig) -> None:
        self.reward, self.config = reward, config
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._pending: list[_Call] = []
        self._started = False

    def submit(self, pictures: Tensor, prompts: Sequence[Prompt]) -> None:
        if not self._started:
            self._started = True
            for _ in range(self.config.workers):
                self._start()
        for start in range(0, len(prompts), self.config.batch_size):
            stop = start + self.config.batch_size
            call = _Call(pictures[start:stop], prompts[start:stop])
            self._pending.append(call)
            self._calls.put(call)

    def gather(self) -> Outcome:
        """Values of everything submitted since the last time, nan where there is none, and what failed."""
        calls, self._pending = self._pending, []
        outcomes = [self._wait(call) for call in calls]
        parts = dict.fromkeys(part for values, _ in outcomes for part in values)
        if isinstance(self.config.weight, dict):
            parts |= dict.fromkeys(self.config.weight)
        counts = [len(call.prompts) for call in calls]
        values = {
            part: [v for n, (own, _) in zip(counts, outcomes, strict=True) for v in own.get(part, [math.nan] * n)]
            for part in parts or {"": None}
        }
        return values, [failure for _, failures in outcomes for failure in failures]

    def _wait(self, call: _Call) -> Outcome:
        """The outcome of a call. Its time runs from its start: those before it have ended or were given up."""
        call.started.wait()
        limit = self.config.time_limit
        if call.done.wait(max(0.0, call.began + limit - time.monotonic())):
            return call.outcome
        call.abandoned = True
        self._start()
        return {}, [f"no answer within {limit:g} s"]

    def _start(self) -> None:
        threading.Thread(target=self._serve, name="reward", daemon=True).start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run(self.reward)
            if call.abandoned:
                return  # another thread has taken this one's place

    def close(self) -> None:
        if self._started:
            for _ in range(self.config.workers):
                self._calls.put(None)


class Scorer:
    """All rewards of a recipe. ``submit`` returns at once; ``gather`` waits for what was submitted."""

    def __init__(self, rewards: Mapping[str, Reward], settings: Mapping[str, RewardConfig]) -> None:
        self.rewards = dict(rewards)
        self._settings = dict(settings)
        self._workers = {name: _Workers(reward, settings[name]) for name, reward in rewards.items()}

    def check(self, prompt: Prompt) -> None:
        """Whether every reward can score samples of a prompt.

        Raises:
            ValueError: names the reward and what the prompt lacks.
        """
        for name, reward in self.rewards.items():
            try:
                reward.check(prompt)
            except ValueError as error:
                raise ValueError(f"rewards.{name}: {error}") from None

    def submit(self, pictures: Tensor, prompts: Sequence[Prompt]) -> None:
        """uint8 pictures ``[b, 3, H, W]`` on the host, with their prompts."""
        for workers in self._workers.values():
            workers.submit(pictures, prompts)

    def gather(self) -> tuple[dict[str, Tensor], list[str]]:
        """Values fp64 ``[b]`` by reward (``ocr``, ``mine/part``), nan where there is none; a line for each failure.

        The total of them is ``total``'s, so that it can be taken over a whole cycle.
        """
        values: dict[str, Tensor] = {}
        failures: list[str] = []
        for name, workers in self._workers.items():
            parts, failed = workers.gather()
            values |= {
                f"{name}/{part}" if part else name: torch.tensor(v, dtype=torch.float64) for part, v in parts.items()
            }
            failures += [f"rewards.{name}: {failure}" for failure in failed]
        return values, failures

    def score(self, pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Submits and gathers, for evaluation."""
        self.submit(pictures, prompts)
        return self.gather()[0]

    def total(self, values: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum that is optimised: fp64 ``[b]``, nan where a reward of weight has no value.

        Raises:
            ValueError: the weights do not fit the parts that a reward returned.
        """
        out = torch.zeros_like(next(iter(values.values())))
        for name, config in self._settings.items():
            for part, weight in _weights(name, config, values).items():
                if weight:
                    out = out + weight * (_normalised(values[part]) if config.normalize == "batch" else values[part])
        return out

    def close(self) -> None:
        """Ends the threads; what is submitted later is not scored."""
        for workers in self._workers.values():
            workers.close()


def _weights(name: str, config: RewardConfig, values: Mapping[str, Tensor]) -> dict[str, float]:
    """The weight of each part of a reward, by the name of its values."""
    parts = [key.removeprefix(f"{name}/") for key in values if key.startswith(f"{name}/")]
    given = config.weight
    if not isinstance(given, dict):
        if parts and given:
            example = f"rewards.{name}.weight={{{parts[0]}: 1.0}}"
            raise ValueError(f"rewards.{name}.weight is {given}, but it returns {', '.join(parts)}: set {example}")
        return {} if parts else {name: given}
    known = [part for part in parts if bool(torch.isfinite(values[f"{name}/{part}"]).any())]
    for part in given:
        if known and part not in known:
            raise ValueError(f"rewards.{name}.weight names {part!r}, but it returns {', '.join(known)}")
    return {f"{name}/{part}": weight for part, weight in given.items()}


def _normalised(values: Tensor) -> Tensor:
    """Zero mean and unit deviation over the samples that have a value; equal values stay equal."""
    own = values[torch.isfinite(values)]
    return values if len(own) == 0 else (values - own.mean()) / (own.std(correction=0) + EPSILON)


def _numbers(answer: Any, count: int) -> Outcome:
    """What a reward returned as ``count`` numbers by part, nan where a sample has none."""
    parts = answer if isinstance(answer, Mapping) else {"": answer}
    found: dict[str, list[float]] = {}
    failures: list[str] = []
    if not parts:
        raise ValueError("it returned no scores")
    for part, values in parts.items():
        own = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else values
        if not isinstance(own, (list, tuple)) or len(own) != count or not isinstance(part, str):
            raise ValueError(f"it must return {count} numbers, one a picture, and returned {_short(values)}")
        found[part] = [_number(value) for value in own]
        failures += [_failure(v) for v, number in zip(own, found[part], strict=True) if math.isnan(number)]
    return found, failures


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)) or not math.isfinite(value):
        return math.nan
    return float(value)


def _failure(value: Any) -> str:
    return _line(value) if isinstance(value, Exception) else f"{_short(value)} is no finite number"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
