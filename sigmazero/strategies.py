"""Step strategies: which steps of a sample's rollout are stochastic, what comes back, where it stops (math §3).

A strategy is a function ``(sample, num_steps, seed) -> StepPlan(sde, ret, stop)``, pure in its arguments. A user's
own is accepted through ``plugins`` (see ``sigmazero/plugins.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from sigmazero import seeds
from sigmazero.records import StepPlan

StepStrategy = Callable[[int, int, int], StepPlan]


def _scored(sde: Sequence[int], num_steps: int) -> StepPlan:
    """A full rollout that returns the sample and the latents on both sides of each stochastic step."""
    return StepPlan(tuple(sde), tuple(sorted({*sde, *(i + 1 for i in sde), num_steps})), None)


def sde_window(num_sde_steps: int, low: int, high: int) -> StepStrategy:
    """A random contiguous window of stochastic steps inside ``[low, high)``, drawn per sample (MixGRPO).

    Raises:
        ValueError: the window does not fit the range; at the call, the range does not fit the schedule.
    """
    if not (low >= 0 and 1 <= num_sde_steps <= high - low):
        raise ValueError(f"sde_window: {num_sde_steps} steps do not fit the range [{low}, {high})")

    def plan(sample: int, num_steps: int, seed: int) -> StepPlan:
        if high > num_steps:
            raise ValueError(f"sde_window: the range [{low}, {high}) exceeds a schedule of {num_steps} steps")
        first = low + seeds.integers(seed, "step_window", high - low - num_sde_steps + 1, [sample])[0]
        return _scored(range(first, first + num_sde_steps), num_steps)

    return plan


def moving_window(num_sde_steps: int, low: int, high: int, samples_per_move: int) -> StepStrategy:
    """A contiguous window that starts at ``low``, moves on by one step every ``samples_per_move`` samples, and stays at
    the end of ``[low, high)`` (the progressive window of MixGRPO, arXiv 2507.21802).

    Raises:
        ValueError: the window does not fit the range, or ``samples_per_move`` is below 1.
    """
    if not (low >= 0 and 1 <= num_sde_steps <= high - low and samples_per_move >= 1):
        raise ValueError(
            f"moving_window: {num_sde_steps} steps do not fit the range [{low}, {high}), moved every {samples_per_move}"
        )

    def plan(sample: int, num_steps: int, seed: int) -> StepPlan:
        first = min(low + sample // samples_per_move, high - num_sde_steps)
        return _scored(range(first, first + num_sde_steps), num_steps)

    return plan


def all_but_last(sample: int, num_steps: int, seed: int) -> StepPlan:
    """Every step but the last is stochastic (Flow-GRPO).

    The last one jumps to sigma 0, where ``sde`` would leave its noise on the sample that is scored; and where a grid
    ends low, its std is so small that this one step would outweigh all others in the ratio.
    """
    return _scored(range(num_steps - 1), num_steps)


def shared_draw(strategy: StepStrategy, samples_per_draw: int) -> StepStrategy:
    """``samples_per_draw`` consecutive samples follow the plan of the first of them."""
    return lambda sample, num_steps, seed: strategy(sample - sample % samples_per_draw, num_steps, seed)


def epoch_global_random_choice(candidates: Sequence[int], num_sde_steps: int, samples_per_epoch: int) -> StepStrategy:
    """One subset of the candidates an epoch, the same for all its samples.

    Raises:
        ValueError: fewer candidates than steps, or one stands twice; at the call, one is outside the schedule.
    """
    pool = tuple(candidates)
    if len(set(pool)) != len(pool) or not 1 <= num_sde_steps <= len(pool) or samples_per_epoch < 1:
        raise ValueError(
            f"epoch_global_random_choice: cannot choose {num_sde_steps} of {pool} for epochs of {samples_per_epoch}"
        )

    def plan(sample: int, num_steps: int, seed: int) -> StepPlan:
        if not all(0 <= i < num_steps for i in pool):
            raise ValueError(f"epoch_global_random_choice: {pool} exceeds a schedule of {num_steps} steps")
        draw = seeds.generator(seed, "step_window", sample // samples_per_epoch, 0, 1)
        return _scored(sorted(int(i) for i in draw.choice(pool, num_sde_steps, replace=False)), num_steps)

    return plan


def ode_and_return_last(sample: int, num_steps: int, seed: int) -> StepPlan:
    """No stochastic step; only the sample comes back (DiffusionNFT, evaluation)."""
    return StepPlan((), (num_steps,), None)


def stop_at_random_step(samples_per_draw: int = 1) -> StepStrategy:
    """Stops at a step drawn uniformly over 0..N-1; its input and its prediction of the sample come back (DMD2).

    There is no stochastic filter: the steps before it are of the request's kind, the last one jumps to sigma 0.
    ``samples_per_draw`` consecutive samples share a draw. Draws come in deals of N, each step once in random order:
    batches of a multiple of N samples have as many of each exit, and others nearly so.

    Raises:
        ValueError: ``samples_per_draw`` is below 1.
    """
    if samples_per_draw < 1:
        raise ValueError(f"stop_at_random_step: samples_per_draw is {samples_per_draw}; it must be at least 1")

    def plan(sample: int, num_steps: int, seed: int) -> StepPlan:
        deal, place = divmod(sample // samples_per_draw, num_steps)
        i = _order(seed, num_steps, deal)[place]
        return StepPlan(None, (i, i + 1), i)

    return plan


@functools.lru_cache(maxsize=4096)
def _order(seed: int, num_steps: int, deal: int) -> tuple[int, ...]:
    """The steps of a schedule in random order."""
    return tuple(seeds.generator(seed, "exit_step", deal).permutation(num_steps).tolist())


def every_exit(sample: int, num_steps: int, seed: int) -> StepPlan:
    """A full rollout that returns every latent, so that each step can be an exit (DMD2)."""
    return StepPlan(None, tuple(range(num_steps + 1)), num_steps - 1)


def checked_plan(plan: object, num_steps: int) -> StepPlan:
    """The plan, if a rollout of ``num_steps`` steps can follow it.

    Raises:
        ValueError: it is not (sde, ret, stop); an index is not an integer, negative, out of the schedule or there
            twice; a named stochastic step does not return its two latents; the sample of a stopped rollout does not
            come back; a stochastic step is at or after the stop.
    """
    if not (isinstance(plan, tuple) and len(plan) == 3):
        raise ValueError(f"a step strategy returns (sde, ret, stop), got {plan!r}")
    sde, ret, stop = plan
    if stop is not None:
        _check_indices("stop", (stop,), num_steps - 1, num_steps)
    last = num_steps if stop is None else stop + 1  # index of the sample
    _check_indices("ret", ret, last, num_steps)
    if not ret:
        raise ValueError(f"step plan {plan!r} returns nothing: ret must name at least one latent index")
    if stop is not None and last not in ret:
        raise ValueError(f"step plan {plan!r}: a rollout stopped at {stop} must return latent {last}, its sample")
    if sde is not None:
        _check_indices("sde", sde, last - 1, num_steps)
        if stop is not None and stop in sde:
            raise ValueError(
                f"step plan {plan!r}: step {stop} is the stop and jumps to sigma 0, it cannot be stochastic"
            )
        missing = sorted({i for s in sde for i in (s, s + 1)} - set(ret))
        if missing:
            raise ValueError(f"step plan {plan!r}: stochastic steps need latents {missing}, which are not in ret")
    return StepPlan(None if sde is None else tuple(sde), tuple(sorted(ret)), stop)


def _check_indices(name: str, values: object, last: int, num_steps: int) -> None:
    if not isinstance(values, (tuple, list, range)):
        raise ValueError(f"step plan: {name} is {values!r}; it must be a tuple of integers")
    if any(isinstance(i, bool) or not isinstance(i, int) for i in values):
        raise ValueError(f"step plan: {name} is {values!r}; every index must be an integer")
    if any(not 0 <= i <= last for i in values):
        raise ValueError(f"step plan: {name} is {values!r}; with {num_steps} steps it must lie in 0..{last}")
    if len(set(values)) != len(values):
        raise ValueError(f"step plan: {name} is {values!r}; an index stands there twice")
