"""Fixed captions, seeds and noise: how well each arm reads, how far it is from real pictures, how much it varies.

Every arm samples the same captions from the same noise. The metrics of the glyph set are those of the shipped reader
(``reader.py``); of other families there are rewards, ``diversity`` of pixels, and ``drift`` from the base's pictures:

- ``read_accuracy``: share of pictures in which everything that the caption names (number, ink, paper) is read.
- ``fd_feat``: Frechet distance of reader features to those of fresh real pictures. Real pictures give the floor: the
  mean over several draws of them, with the lowest and highest draw as its interval.
- ``diversity``: mean distance in reader features between pictures of one caption.
- ``drift``: mean absolute difference to real pictures of channel means, channel deviations and saturation, in [0, 1].

Intervals are 95 % bootstraps over captions; those of ``fd_feat`` and ``drift`` are centred, because resampling raises a
distance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sigmazero import glyphs, seeds
from sigmazero.algorithms.base import Arm
from sigmazero.config import EvaluateConfig
from sigmazero.data import glyph_prompt
from sigmazero.engines.base import Engine, generate_in_parts
from sigmazero.reader import Reader, agrees
from sigmazero.records import Prompt, RolloutRequest, Trajectory
from sigmazero.schedule import sigma_grid
from sigmazero.strategies import ode_and_return_last

FLOOR_DRAWS = 8
METRICS = ("read_accuracy", "fd_feat", "diversity", "drift")
_CYCLE = 2**40  # the cycle id of evaluation's draws: no training cycle reaches it
_FIRST_PICTURE = 2**40  # likewise for the pictures that are drawn for it

Decode = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Metric:
    """An estimate with its 95 % interval."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


class PromptEvaluator:
    """Fixed prompts of a run, several samples each, and the scores of pictures of them that need nothing real."""

    def __init__(self, config: EvaluateConfig, prompts: Sequence[Prompt]) -> None:
        """``prompts``: one a caption; ``config.num_captions`` of them are used."""
        self.config, each = config, config.samples_per_caption
        self.prompts = [prompt for prompt in prompts[: config.num_captions] for _ in range(each)]

    def sample(
        self,
        arm: Arm,
        engine: Engine,
        decode: Decode,
        num_captions: int | None = None,
        after: Callable[[int], None] = lambda done: None,
    ) -> Tensor:
        """An arm's pictures of the first ``num_captions`` prompts (all by default): fp32 ``[n, 3, H, W]`` in [0, 1].

        ``after`` is called with the count of pictures so far.
        """
        count = len(self.prompts) if num_captions is None else num_captions * self.config.samples_per_caption
        sigmas, plan = sigma_grid(arm.num_steps, arm.shift), ode_and_return_last(0, arm.num_steps, 0)
        plan = plan._replace(sde=None)  # every step is of the arm's kind
        requests = [
            RolloutRequest(
                i, _CYCLE, prompt, arm.role, sigmas, arm.kind, arm.eta, arm.guidance, self.config.seed, plan,
            )
            for i, prompt in enumerate(self.prompts[:count])
        ]  # fmt: skip
        return decode(finite_samples(generate_in_parts(engine, requests, after))).cpu()

    @property
    def fingerprint(self) -> str:
        """A hash of the prompts and the seed: what arms of two runs must share to be compared."""
        said = json.dumps([self.config.seed, [[prompt.text, dict(prompt.metadata)] for prompt in self.prompts]])
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def score(self, pictures: Tensor, base: Tensor | None = None) -> dict[str, Metric]:
        """Of pictures ``[n, 3, H, W]`` in [0, 1], in the order of the prompts.

        ``diversity``: root mean square difference of pixels, in [0, 1], between pictures of one prompt. ``drift``: mean
        absolute difference of channel means, channel deviations and saturation, each a mean over pictures, to those of
        ``base``, pictures of the same prompts and noise; left out without them.
        """
        rows = pictures.flatten(1).double().unflatten(0, (-1, self.config.samples_per_caption))
        spread = torch.stack([torch.pdist(row).mean() for row in rows]) / rows.shape[-1] ** 0.5
        picks = [self._resample(len(rows), i) for i in range(self.config.bootstrap)]
        found = {"diversity": _metric(spread.mean().item(), [spread[pick].mean().item() for pick in picks])}
        if base is not None:
            moved = (_look(pictures) - _look(base)).unflatten(0, (len(rows), -1)).mean(1)
            draws = [moved[pick].mean(0).abs().mean().item() for pick in picks]
            found["drift"] = _distance(moved.mean(0).abs().mean().item(), draws)
        return found

    def rewards(self, values: Mapping[str, Tensor]) -> dict[str, Metric]:
        """Means of rewards over pictures of the captions, in the captions' order; nan: no value, left out."""
        each = self.config.samples_per_caption
        found: dict[str, Metric] = {}
        for name, value in values.items():
            rows = value.reshape(-1, each)
            picks = [rows[self._resample(len(rows), i)] for i in range(self.config.bootstrap)]
            means = [draw.nanmean().item() for draw in picks if not bool(draw.isnan().all())]
            if means and not bool(rows.isnan().all()):
                found[name] = _metric(rows.nanmean().item(), means)
        return found

    def _resample(self, num: int, i: int) -> Tensor:
        return torch.from_numpy(seeds.generator(self.config.seed, "bootstrap", i).integers(num, size=num))


class Evaluator(PromptEvaluator):
    """The held-out captions of the glyph set, their real pictures, and what the reader says of any others of them."""

    def __init__(self, config: EvaluateConfig, reader: Reader) -> None:
        indices = range(config.num_captions + config.num_reference)
        drawn = [caption for caption, _ in glyphs.captions_of(indices, "test", config.seed)]
        super().__init__(config, [glyph_prompt(i, caption) for i, caption in enumerate(drawn[: config.num_captions])])
        self._reader = reader
        self.captions = [caption for caption in drawn[: config.num_captions] for _ in range(config.samples_per_caption)]
        first = _FIRST_PICTURE + len(self.captions)
        reference = drawn[config.num_captions :]
        pictures = glyphs.pictures_of(reference, range(first, first + len(reference)), config.seed)
        self._reference = self._features(pictures)
        self._reference_look = _look(pictures)

    def real(self, draw: int = 0) -> Tensor:
        """Real pictures of the captions, what they leave open drawn freely: fp32 ``[n, 3, 16, 16]`` in [0, 1]."""
        first = (draw + 1) * _FIRST_PICTURE
        return glyphs.pictures_of(self.captions, range(first, first + len(self.captions)), self.config.seed)

    def score_real(self, pictures: Tensor) -> dict[str, Metric]:
        """The metrics of ``real()``, its ``fd_feat`` over ``FLOOR_DRAWS`` draws."""
        others = [self._features(self.real(draw)) for draw in range(1, FLOOR_DRAWS)]
        distances = [frechet_distance(f, self._reference) for f in (self._features(pictures), *others)]
        floor = Metric(float(np.mean(distances)), min(distances), max(distances))
        return {**self.score(pictures), "fd_feat": floor}

    def score(self, pictures: Tensor, base: Tensor | None = None) -> dict[str, Metric]:
        """The metrics of pictures of the captions, in the captions' order. Their drift is from real ones."""
        each, num = self.config.samples_per_caption, len(pictures) // self.config.samples_per_caption
        features = self._features(pictures)
        read = self._reader.read(features)
        right = torch.tensor([agrees(r, c) for r, c in zip(read, self.captions, strict=False)]).double()
        groups = features.reshape(num, each, -1)
        spread = torch.stack([torch.pdist(group).mean() for group in groups.double()])
        look = _look(pictures)
        picks = [self._resample(num, i) for i in range(self.config.bootstrap)]
        rows = [torch.arange(num * each).reshape(num, each)[pick].flatten() for pick in picks]
        return {
            "read_accuracy": _metric(right.mean().item(), [right[row].mean().item() for row in rows]),
            "fd_feat": _distance(
                frechet_distance(features, self._reference),
                [frechet_distance(features[row], self._reference) for row in rows],
            ),
            "diversity": _metric(spread.mean().item(), [spread[pick].mean().item() for pick in picks]),
            "drift": _distance(self._drift(look), [self._drift(look[row]) for row in rows]),
        }

    def _drift(self, look: Tensor) -> float:
        return (look.mean(0) - self._reference_look.mean(0)).abs().mean().item()

    @torch.no_grad()
    def _features(self, pictures: Tensor) -> Tensor:
        return torch.cat([self._reader.features(part) for part in pictures.split(512)])


def finite_samples(trajectories: Sequence[Trajectory]) -> Tensor:
    """The last latents of trajectories, stacked.

    Raises:
        ValueError: one is not finite: nan would be saved and scored as a black picture.
    """
    samples = torch.stack([t.latents[-1] for t in trajectories])
    if not bool(torch.isfinite(samples).all()):
        role = trajectories[0].request.policy
        raise ValueError(f"{role} samples non-finite pictures: its weights have diverged; lower its learning rate")
    return samples


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """``|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a^1/2 C_b C_a^1/2)^1/2)`` of features ``[n, d]``, in fp64."""
    a, b = a.double(), b.double()
    cov_a, cov_b = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(cov_a)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp_min(0).sqrt().sum()
    return ((a.mean(0) - b.mean(0)) ** 2).sum().item() + (cov_a.trace() + cov_b.trace() - 2 * cross).item()


def scores_table(scores: Mapping[str, Mapping[str, Metric]]) -> str:
    """Arms down, metrics across, each with its interval, as text."""
    found = dict.fromkeys(name for metrics in scores.values() for name in metrics)
    names = [*(name for name in METRICS if name in found), *(name for name in found if name not in METRICS)]
    lines = [f"{'':14}" + "".join(f"{name:>30}" for name in names)]
    for arm, metrics in scores.items():
        own = [metrics.get(name) for name in names]
        cells = [f"{m.mean:.3f} [{m.low:.3f}, {m.high:.3f}]" if m else "" for m in own]
        lines.append(f"{arm:14}" + "".join(f"{cell:>30}" for cell in cells))
    return "\n".join(lines)


def _look(pictures: Tensor) -> Tensor:
    """Channel means, channel deviations and saturation of each picture: ``[n, 7]``."""
    flat = pictures.flatten(2)
    saturation = (flat.amax(1) - flat.amin(1)).mean(1, keepdim=True)
    return torch.cat([flat.mean(2), flat.std(2), saturation], 1).double()


def _distance(value: float, draws: Sequence[float]) -> Metric:
    """The interval of something that resampling raises: the draws are moved to have the estimate as their mean."""
    centre = float(np.mean(draws))
    return _metric(value, [max(0.0, value + draw - centre) for draw in draws])


def _metric(value: float, draws: Sequence[float]) -> Metric:
    low, high = np.quantile(draws, (0.025, 0.975)).tolist()
    return Metric(value, low, high)
