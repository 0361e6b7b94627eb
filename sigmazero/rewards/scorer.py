"""Runs the rewards of a recipe beside the rollout: calls in threads, each with a time limit, failures counted.

A failure (an exception, no answer in time, a wrong number of answers) costs the samples of its call, an answer that is
no finite number costs its own, and nothing else. A thread cannot be killed: one whose call hangs is left behind and
another takes its place, and what it still says is not heard.
"""

from __future__ import annotations

import copy
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigmazero.config import RewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards.base import Reward, as_layout

MAX_WARNINGS = 10  # failures of a run that are shown as they happen; all are counted
LARGEST = 1e30  # of a score: beyond it means and deviations would overflow
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
    given_up: bool = False
    outcome: Outcome = field(default_factory=lambda: ({}, []))
    _end: threading.Lock = field(default_factory=threading.Lock)  # a call is done or given up, never both

    def run(self, reward: Reward) -> bool:
        """Makes the call; whether it was not given up meanwhile."""
        self.began = time.monotonic()
        self.started.set()
        try:
            # The reward's own: what it changes, no other reward and no later draw of the prompt sees.
            pictures = as_layout(self.pictures, reward.layout, reward.size)
            metadata = [copy.deepcopy(dict(p.metadata)) for p in self.prompts]
            self.outcome = _numbers(reward(pictures, [p.text for p in self.prompts], metadata), len(self.prompts))
        except BaseException as error:  # a scorer that calls sys.exit must not take its thread along unheard
            self.outcome = {}, [_line(error)]
        with self._end:
            self.done.set()
            return not self.given_up

    def wait(self, limit: float) -> bool:
        """Waits ``limit`` seconds from its start, then gives it up; whether it is done."""
        self.started.wait()
        self.done.wait(max(0.0, self.began + limit - time.monotonic()))
        with self._end:
            self.given_up = not self.done.is_set()
            return not self.given_up


class _Workers:
    """The threads of one reward, which take its calls in order."""

    def __init__(self, reward: Reward, config: RewardConfig) -> None:
        self.reward, self.config = reward, config
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._pending: list[_Call] = []
        self._parts: dict[str, None] = {}  # that it ever returned, in order
        self._started = self._closed = False

    def submit(self, pictures: Tensor, prompts: Sequence[Prompt]) -> None:
        assert not self._closed
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
        self._parts |= dict.fromkeys(part for values, _ in outcomes for part in values)
        parts = list(self._parts or (self.config.weight if isinstance(self.config.weight, dict) else [""]))
        values, failures = {part: list[float]() for part in parts}, list[str]()
        for call, (own, failed) in zip(calls, outcomes, strict=True):
            failures += failed + [f"it returned no {part!r}" for part in parts if own and part not in own]
            for part in parts:
                values[part] += own.get(part, [math.nan] * len(call.prompts))
        return values, failures

    def _wait(self, call: _Call) -> Outcome:
        """The outcome of a call. Its time runs from its start: those before it have ended or were given up."""
        if call.wait(self.config.time_limit):
            return call.outcome
        self._start()
        return {}, [f"no answer within {self.config.time_limit:g} s"]

    def _start(self) -> None:
        threading.Thread(target=self._serve, name="reward", daemon=True).start()

    def _serve(self) -> None:
        """Takes calls until one is given up, when another thread takes this one's place."""
        while (call := self._calls.get()) is not None and not self._closed:
            if not call.run(self.reward):
                return

    def close(self) -> None:
        """Ends the threads; calls that wait are not made any more."""
        self._closed = True
        for _ in range(self.config.workers if self._started else 0):
            self._calls.put(None)


class Scorer:
    """All rewards of a recipe. ``submit`` returns at once; ``gather`` waits for what was submitted."""

    def __init__(self, rewards: Mapping[str, Reward], settings: Mapping[str, RewardConfig]) -> None:
        self.rewards = dict(rewards)
        self._settings = dict(settings)
        self._workers = {name: _Workers(reward, settings[name]) for name, reward in rewards.items()}
        self._warned: set[str] = set()

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

        The total of them is ``total``'s, so that it can be taken over a whole cycle. Failures of rewards that are only
        watched come last.
        """
        values: dict[str, Tensor] = {}
        failures, watched = list[str](), list[str]()
        for name, workers in self._workers.items():
            parts, failed = workers.gather()
            values |= {
                f"{name}/{part}" if part else name: torch.tensor(v, dtype=torch.float64) for part, v in parts.items()
            }
            where = failures if self._settings[name].optimised else watched
            where += [f"rewards.{name}: {failure}" for failure in failed]
        self._warn(failures + watched)
        return values, failures + watched

    def _warn(self, failures: Sequence[str]) -> None:
        """Shows each kind of failure once: a reward that fails must not do so unseen."""
        for failure in dict.fromkeys(failures):
            if failure not in self._warned and len(self._warned) < MAX_WARNINGS:
                self._warned.add(failure)
                print(f"warning: {failure}; its samples have no score", file=sys.stderr)

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
        """Ends the threads. Nothing can be submitted any more."""
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
    for part, weight in given.items():
        if weight and part not in parts:
            returned = f"it returns {', '.join(parts)}" if parts else "it returns one number a sample"
            raise ValueError(f"rewards.{name}.weight names {part!r}, but {returned}")
    return {f"{name}/{part}": weight for part, weight in given.items()}


def _normalised(values: Tensor) -> Tensor:
    """Zero mean and unit deviation over the samples that have a value; equal values stay equal."""
    own = values[torch.isfinite(values)]
    return values if len(own) == 0 else (values - own.mean()) / (own.std(correction=0) + EPSILON)


def _numbers(answer: Any, count: int) -> Outcome:
    """What a reward returned as ``count`` numbers by part, nan where a sample has none; a part that is no list of as
    many is left out."""
    found: dict[str, list[float]] = {}
    failures: list[str] = []
    for part, values in answer.items() if isinstance(answer, Mapping) else [("", answer)]:
        own = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else values
        if not isinstance(own, (list, tuple)) or len(own) != count or not isinstance(part, str):
            returned = _short({part: values} if part else values)
            failures.append(f"it must return {count} numbers, one a picture, and returned {returned}")
            continue
        numbers = [_number(value) for value in own]
        failures += [_failure(v) for v, number in zip(own, numbers, strict=True) if math.isnan(number)]
        if part or not all(map(math.isnan, numbers)):  # one that failed throughout does not say what its parts are
            found[part] = numbers
    return found, failures if found or failures else ["it returned no scores"]


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if abs(number) <= LARGEST else math.nan  # nan is not


def _failure(value: Any) -> str:
    return _line(value) if isinstance(value, Exception) else f"{_short(value)} is no finite number"


def _line(error: BaseException) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).split())[:400]


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
