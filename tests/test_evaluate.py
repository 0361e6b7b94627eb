"""Distances against closed forms; the reader's promise; scores that depend on pictures and nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sigmazero import seeds
from sigmazero.algorithms.base import Arm
from sigmazero.config import EvaluateConfig
from sigmazero.engines.local import LocalEngine
from sigmazero.evaluate import METRICS, Evaluator, Metric, frechet_distance, scores_table
from sigmazero.launch.local import build
from sigmazero.models import glyph
from sigmazero.models.roles import Roles
from sigmazero.pictures import quantized
from sigmazero.reader import load_reader
from tests.conftest import MakeRun


def evaluator(num_captions: int = 60, **changes: int) -> Evaluator:
    settings = {"num_captions": num_captions, "samples_per_caption": 2, "num_reference": 512, "bootstrap": 100}
    return Evaluator(EvaluateConfig.model_validate({**settings, **changes}), load_reader())


def noisy(pictures: Tensor, strength: float, seed: int = 0) -> Tensor:
    """Pictures that are read only partly; noise drawn by numpy, a picture at a time."""
    noise = seeds.normal(seed, "train_noise", range(len(pictures)), pictures.shape[1:])
    return (pictures + strength * noise).clamp(0, 1)


def features(count: int, mean: np.ndarray, root: np.ndarray, seed: int) -> Tensor:
    """Features whose sample mean is ``mean`` and whose sample covariance is ``root @ root.T``, exactly."""
    x = np.random.default_rng(seed).standard_normal((count, len(mean)))
    x -= x.mean(0)
    x = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x.T, ddof=1).reshape(len(mean), -1))).T
    return torch.from_numpy(x @ root.T + mean)


@pytest.mark.parametrize(
    ("means", "deviations", "expected"),
    [
        ((0.0, 3.0), ([1.0, 1.0], [1.0, 1.0]), 18.0),  # apart by (3, 3), alike otherwise
        ((0.0, 0.0), ([1.0, 2.0], [4.0, 2.5]), 9.25),  # (1-4)^2 + (2-2.5)^2
        ((1.0, -1.0), ([0.5, 2.0], [0.5, 0.0]), 12.0),  # one deviation is 0
    ],
)
def test_frechet_distance_of_gaussians_with_diagonal_covariance(
    means: tuple[float, float], deviations: tuple[list[float], list[float]], expected: float
) -> None:
    """``|m - n|^2 + sum (s - r)^2``."""
    a, b = (
        features(50 + i, np.full(2, mean), np.diag(deviation), i)
        for i, (mean, deviation) in enumerate(zip(means, deviations, strict=True))
    )
    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-9)


def test_frechet_distance_of_covariances_that_do_not_commute() -> None:
    """Against ``tr (A B)^1/2`` from the eigenvalues of the product, which is not symmetric."""
    draw = np.random.default_rng(0)
    for dim in (2, 5, 8):
        m, n, p, q = (draw.normal(size=shape) for shape in (dim, dim, (dim, dim), (dim, dim)))
        cov_p, cov_q = p @ p.T, q @ q.T
        assert abs(cov_p @ cov_q - cov_q @ cov_p).max() > 0.1
        cross = np.sqrt(np.linalg.eigvals(cov_p @ cov_q).real.clip(0)).sum()
        expected = ((m - n) ** 2).sum() + np.trace(cov_p) + np.trace(cov_q) - 2 * cross
        a, b = features(100, m, p, 1), features(70, n, q, 2)
        assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
        assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-9)


def test_frechet_distance_of_rotated_gaussians_in_closed_form() -> None:
    """Covariances diag(a, b) and its turn by angle t: ``2 (a + b) - 2 sqrt(tr(AB) + 2 det)``."""
    a, b, t = 4.0, 1.0, 0.7
    turn = np.array([[math.cos(t), -math.sin(t)], [math.sin(t), math.cos(t)]])
    root = np.diag([math.sqrt(a), math.sqrt(b)])
    trace = np.trace(np.diag([a, b]) @ turn @ np.diag([a, b]) @ turn.T)
    found = frechet_distance(features(40, np.zeros(2), root, 0), features(40, np.zeros(2), turn @ root, 1))
    assert found == pytest.approx(2 * (a + b) - 2 * math.sqrt(trace + 2 * a * b), abs=1e-9)


def test_frechet_distance_to_itself_is_zero_and_to_a_move_is_its_square() -> None:
    """Also with fewer rows than dimensions, where covariances are singular."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 64)) * 3)
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-4)
    assert frechet_distance(x, x[torch.randperm(40, generator=torch.Generator().manual_seed(0))]) == pytest.approx(
        0, abs=1e-4
    )
    assert frechet_distance(x, x + 0.5) == pytest.approx(64 * 0.25, abs=1e-4)


def test_the_reader_reads_what_it_promises() -> None:
    """At least 99 % of held-out real pictures; next to none of another caption's."""
    judge = evaluator(240, samples_per_caption=4, num_reference=256, bootstrap=20)
    real = judge.real()
    assert judge.score(real)["read_accuracy"].mean >= 0.99
    assert judge.score(real.roll(4, 0))["read_accuracy"].mean <= 0.03
    assert judge.score(quantized(real).float() / 255)["read_accuracy"].mean >= 0.99


def test_real_pictures_are_the_floor_and_worse_ones_score_worse() -> None:
    judge = evaluator()
    real = judge.score(judge.real())
    worse = judge.score(noisy(judge.real(), 0.3))
    assert worse["read_accuracy"].mean < real["read_accuracy"].mean - 0.1
    assert worse["fd_feat"].mean > 2 * real["fd_feat"].mean
    assert (
        judge.score(judge.real().mean((2, 3), keepdim=True).expand(-1, 3, 16, 16))["fd_feat"].mean
        > worse["fd_feat"].mean
    )


def test_diversity_by_hand_and_zero_for_copies() -> None:
    judge, reader = evaluator(20, samples_per_caption=3), load_reader()
    pictures = judge.real()
    vectors = reader.features(pictures).double().numpy().reshape(20, 3, -1)
    pairs = [np.linalg.norm(g[i] - g[j]) for g in vectors for i, j in ((0, 1), (0, 2), (1, 2))]
    assert judge.score(pictures)["diversity"].mean == pytest.approx(np.mean(pairs), rel=1e-6)
    copies = pictures[::3].repeat_interleave(3, 0)
    assert judge.score(copies)["diversity"].mean == pytest.approx(0, abs=1e-3)


def test_scores_are_a_function_of_the_pictures() -> None:
    """Not of what was scored before, by which judge, or in which order the pictures of a caption come."""
    judge = evaluator(24)
    pictures = noisy(judge.real(), 0.25)
    first = judge.score(pictures)
    assert tuple(first) == METRICS
    judge.score(judge.real())
    assert judge.score(pictures) == first
    assert evaluator(24).score(pictures) == first
    swapped = pictures.reshape(24, 2, 3, 16, 16).flip(1).reshape(48, 3, 16, 16)
    for name, metric in judge.score(swapped).items():
        assert metric.as_dict() == pytest.approx(first[name].as_dict(), rel=1e-4)
    assert evaluator(24, seed=1).captions != judge.captions


def test_intervals_contain_the_estimate_and_shrink_with_more_captions() -> None:
    """Ten times the captions: the width falls by about sqrt(10)."""
    few, many = evaluator(24), evaluator(240)
    scores = {name: judge.score(noisy(judge.real(), 0.3)) for name, judge in (("few", few), ("many", many))}
    for metrics in scores.values():
        for metric in metrics.values():
            assert metric.low <= metric.mean <= metric.high
            assert metric.low < metric.high
    for name in METRICS:
        few_wide, many_wide = (scores[s][name].high - scores[s][name].low for s in ("few", "many"))
        assert 1.5 < few_wide / many_wide < 8, name


def test_the_interval_of_a_share_is_that_of_its_captions() -> None:
    """Captions read wholly or not at all, half of 100: the standard error is .05, so the interval is +- .098."""
    judge = evaluator(100, bootstrap=400)
    pictures = judge.real().reshape(100, 2, 3, 16, 16)
    pictures[::2] = 0.5
    share = judge.score(pictures.flatten(0, 1))["read_accuracy"]
    assert share.mean == pytest.approx(0.5, abs=0.02)
    assert share.high - share.low == pytest.approx(0.196, abs=0.05)


@pytest.mark.parametrize("role", ["student_ema", "teacher"])
def test_the_engines_batch_size_changes_no_picture(dmd2: MakeRun, role: str) -> None:
    """16 requests in batches of 128, 7 and 1; with guidance and with renoising."""
    built = build(dmd2())
    judge = evaluator(8, num_reference=256)
    arm = next(a for a in built.algorithm.arms if a.role == role)
    whole, *others = (
        judge.sample(arm, LocalEngine(built.roles, max_batch=size), built.roles.model.decode) for size in (128, 7, 1)
    )
    assert whole.shape == (16, 3, 16, 16)
    assert all(torch.equal(whole, other) for other in others)
    assert len({tuple(p.flatten().tolist()) for p in whole}) == 16
    part = judge.sample(arm, built.engine, built.roles.model.decode, num_captions=3)
    assert torch.equal(part, whole[:6])


def test_arms_share_captions_and_noise(dmd2: MakeRun) -> None:
    """Before training student and its average are the same weights: the same pictures."""
    built = build(dmd2())
    judge = evaluator(8, num_reference=256)
    arms = {a.name: judge.sample(a, built.engine, built.roles.model.decode) for a in built.algorithm.arms}
    assert torch.equal(arms["student@3"], arms["student_raw@3"])
    assert not torch.equal(arms["student@3"], arms["teacher@3"])


def test_drift_of_brightened_pictures_is_the_shift() -> None:
    """Brighter than the reference in every channel: .1 more moves 3 of 7 numbers by .1; and the whole by hand."""
    judge = evaluator(30)
    dull = 0.2 * judge.real() + 0.7
    drift = [judge.score(dull + shift)["drift"].mean for shift in (0.0, 0.1)]
    assert drift[1] - drift[0] == pytest.approx(3 / 7 * 0.1, abs=1e-6)
    flat = (dull + 0.1).double().numpy().reshape(60, 3, 256)
    look = np.concatenate([
        flat.mean(2).mean(0), flat.std(2, ddof=1).mean(0), [(flat.max(1) - flat.min(1)).mean()],
    ])  # fmt: skip
    reference = judge._reference_look.numpy().mean(0)
    assert (look[:3] > reference[:3]).all()
    assert drift[1] == pytest.approx(np.abs(look - reference).mean(), abs=1e-6)


def test_the_table_names_every_arm_and_number() -> None:
    metric = Metric(0.5, 0.25, 0.75)
    lines = scores_table({"real": dict.fromkeys(METRICS, metric), "student@2": dict.fromkeys(METRICS, metric)})
    header, *rows = lines.splitlines()
    assert header.split() == list(METRICS)
    assert [row.split()[0] for row in rows] == ["real", "student@2"]
    assert all(row.count("0.500 [0.250, 0.750]") == 4 for row in rows)


def test_the_floor_is_the_mean_over_fresh_real_pictures() -> None:
    """By hand: the distance of each draw of real pictures to the reference; draws differ."""
    judge = evaluator(24, samples_per_caption=2, num_reference=256, bootstrap=20)
    scores = judge.score_real(judge.real())
    distances = [judge.score(judge.real(draw))["fd_feat"].mean for draw in range(8)]
    assert len(set(distances)) == 8
    floor = scores["fd_feat"]
    assert (floor.mean, floor.low, floor.high) == pytest.approx((sum(distances) / 8, min(distances), max(distances)))
    assert scores["read_accuracy"] == judge.score(judge.real())["read_accuracy"]


def test_b40_a_diverged_student_is_named_and_not_scored_as_black_pictures(weights: Path) -> None:
    with torch.no_grad():
        roles = Roles(glyph.load(weights), {"student": "train"}, {})
        next(iter(roles.parameters("student").values())).fill_(float("nan"))
    judge = evaluator(8, samples_per_caption=2, num_reference=256, bootstrap=20)
    with pytest.raises(ValueError, match="student samples non-finite pictures"):
        judge.sample(Arm("student@1", "student", 1, 1.0), LocalEngine(roles), roles.model.decode)
