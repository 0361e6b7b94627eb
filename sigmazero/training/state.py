"""What evolves during a run besides the roles' weights: optimizers and counters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sigmazero.config import OptimizerConfig
from sigmazero.tensors import whole


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The learning rate of optimizer step ``step`` of ``num_steps``: a pure function, so that there is none to save.

    Linear warm-up to ``lr``, then ``constant``, or ``linear`` or ``cosine`` down to 0 after the last step.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    if config.decay == "linear":
        return config.lr * (1 - done)
    if config.decay == "cosine":
        return config.lr * (1 + math.cos(math.pi * done)) / 2
    return config.lr


_IDLE = "idle"  # in place of moments: some networks have weights that nothing they return depends on
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # in one order on all ranks, as whatever is gathered must be


class RoleOptimizer:
    """AdamW of one role, with clipping and the schedule of its config."""

    def __init__(self, role: str, parameters: dict[str, Tensor], config: OptimizerConfig, num_steps: int) -> None:
        if not any(p.requires_grad for p in parameters.values()):
            raise ValueError(f"role {role!r} has no trainable parameter")
        if config.warmup_steps >= max(num_steps, 1):
            raise ValueError(
                f"optimizers.{role}.warmup_steps is {config.warmup_steps}, but the run has only {num_steps} steps of "
                "this role: the learning rate would never be reached"
            )
        self.role, self.parameters, self.config, self.num_steps, self.steps = role, parameters, config, num_steps, 0
        self._adam = torch.optim.AdamW(
            list(parameters.values()), lr=config.lr, betas=config.betas, eps=config.eps,
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def gradient_norm(self) -> Tensor:
        """The norm over all gradients of the role, before clipping."""
        return whole(torch.nn.utils.get_total_norm(self.gradients()))

    def step(self, norm: float) -> float:
        """Clips gradients of that norm to ``config.clip``, steps, and returns the learning rate that was used."""
        rate = learning_rate(self.config, self.steps, self.num_steps)
        for group in self._adam.param_groups:
            group["lr"] = rate
        if norm + 1e-6 > self.config.clip:  # below that torch would multiply by 1
            trainable = [p for p in self.parameters.values() if p.requires_grad]
            torch.nn.utils.clip_grads_with_norm_(trainable, self.config.clip, torch.tensor(norm), foreach=True)
        self._adam.step()
        self.steps += 1
        return rate

    def clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """The moments by ``parameter name/moment``, for a checkpoint; that there are none, where there never were."""
        idle = {_IDLE: torch.zeros(0)} if self.steps else {}
        return {
            f"{name}/{key}": value
            for name, p in self.parameters.items()
            for key, value in (self._adam.state.get(p) or idle).items()
        }

    def room(self, names: Iterable[str], steps: int) -> dict[str, Tensor]:
        """Tensors that the moments of those names can be read into, sharded as their parameters are.

        Args:
            steps: the count of steps behind them; without one there are none.
        Raises:
            ValueError: a moment is missing or there is one of an unknown parameter.
        """
        moments: dict[str, set[str]] = {}
        for key in names:
            name, _, moment = key.rpartition("/")
            moments.setdefault(name, set()).add(moment)
        wanted = set(self.parameters) if steps else set()
        wrong = {name for name, kinds in moments.items() if kinds not in ({_IDLE}, set(_MOMENTS))}
        if wrong or set(moments) != wanted:
            wrong |= set(moments) ^ wanted
            raise ValueError(f"optimizer of {self.role}: moments do not match: {sorted(wrong)[:4]}")
        return {
            f"{name}/{moment}": _room(self.parameters[name], moment)
            for name, kinds in moments.items() for moment in sorted(kinds)
        }  # fmt: skip

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Goes on with what ``room`` made and a checkpoint filled."""
        for name, parameter in self.parameters.items():
            moments = {moment: state[key] for moment in _MOMENTS if (key := f"{name}/{moment}") in state}
            if moments:
                self._adam.state[parameter] = moments
        self.steps = steps


def _room(parameter: Tensor, moment: str) -> Tensor:
    """Zeros as torch has that moment: the fused form counts steps on the device."""
    if moment == _IDLE:
        return torch.zeros(0)
    return torch.zeros((), device=parameter.device) if moment == "step" else torch.zeros_like(parameter)


@dataclass
class Counters:
    """Numbers that a checkpoint keeps."""

    cycle: int = 0  # cycles done
    samples: int = 0  # samples drawn, those of replaced groups included: the index of the next one
    skipped: dict[str, int] = field(default_factory=dict)  # phase -> updates skipped for non-finite values, in all
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)
