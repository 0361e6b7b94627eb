"""Every draw is a pure function of its ids, and distinct ids give distinct draws (math §7)."""

import itertools

import numpy as np
import pytest
import torch

from sigmazero import seeds


def by_hand(seed: int, stream: int, sample: int = 0, cycle: int = 0, step: int = 0) -> np.random.Generator:
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, step, cycle, sample], dtype=np.uint64)))


def test_draws_equal_numpy_philox_by_hand() -> None:
    noise = seeds.normal(7, "step_noise", [5, 2], (3, 4), cycles=[6, 1], steps=[8, 9])
    expected = [by_hand(7, 1, 5, 6, 8), by_hand(7, 1, 2, 1, 9)]
    for row, draw in zip(noise, expected, strict=True):
        np.testing.assert_array_equal(row.numpy(), draw.standard_normal((3, 4), dtype=np.float32))
    assert seeds.integers(7, "exit_step", 1000, [5], 6, 8) == [by_hand(7, 2, 5, 6, 8).integers(1000)]


def test_stream_numbers_are_the_format_of_a_run() -> None:
    order = "initial_noise step_noise exit_step score_sigma score_noise fake_sigma fake_noise train_timestep"
    order += " train_noise caption_dropout data_order pictures weight_init step_window bootstrap row_order held_out"
    order += " captions"
    assert list(seeds.STREAMS)[: len(order.split())] == order.split()
    assert list(seeds.STREAMS.values()) == list(range(len(seeds.STREAMS)))


def test_b01_noise_does_not_depend_on_the_batch() -> None:
    together = seeds.normal(3, "step_noise", [4, 0, 9, 1], (5,), cycles=2, steps=[0, 1, 1, 3])
    alone = [seeds.normal(3, "step_noise", [s], (5,), 2, i) for s, i in zip([4, 0, 9, 1], [0, 1, 1, 3], strict=True)]
    assert torch.equal(together, torch.cat(alone))
    backwards = seeds.normal(3, "step_noise", [1, 9, 0, 4], (5,), cycles=2, steps=[3, 1, 1, 0])
    assert torch.equal(together, backwards.flip(0))


def test_draws_ignore_the_global_generators() -> None:
    first = seeds.normal(0, "initial_noise", [1], (8,))
    torch.randn(3)
    assert torch.equal(first, seeds.normal(0, "initial_noise", [1], (8,)))


def test_distinct_ids_give_distinct_draws() -> None:
    ids = list(itertools.product((0, 1, 2**32, 2**63 - 1), seeds.STREAMS, (0, 1, 2**31), (0, 1, 7), (0, 1, 7)))
    draws = {int(seeds.generator(*row).integers(2**63)) for row in ids}
    assert len(draws) == len(ids)


def test_b36_48_prompts_of_16_samples_get_768_noises() -> None:
    noise = seeds.normal(0, "initial_noise", range(48 * 16), (3, 4, 4)).flatten(1)
    assert len(np.unique(noise.numpy(), axis=0)) == 768
    correlation = torch.corrcoef(noise) - torch.eye(768)
    assert correlation.abs().max() < 7 / 48**0.5


def test_a_long_draw_does_not_reach_its_neighbour() -> None:
    neighbours = [seeds.generator(0, "step_noise", sample=1, step=i).integers(2**63, size=20_000) for i in (0, 1, 2)]
    assert len(np.unique(np.concatenate(neighbours))) == 60_000


def test_normal_noise_is_standard_normal() -> None:
    noise = seeds.normal(1, "initial_noise", range(100), (2000,)).double()
    n = noise.numel()
    assert abs(noise.mean()) < 4 / n**0.5
    assert abs(noise.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((noise**4).mean() - 3) < 4 * (96 / n) ** 0.5


def test_uniform_and_integers_are_uniform() -> None:
    u = seeds.uniform(1, "score_sigma", range(4000)).sort().values
    assert u[0] >= 0
    assert u[-1] < 1
    assert (u - torch.linspace(0, 1, 4000)).abs().max() < 1.95 / 4000**0.5  # Kolmogorov-Smirnov at 0.1 %
    counts = np.bincount(seeds.integers(1, "exit_step", 5, range(4000)), minlength=5)
    assert ((counts - 800) ** 2 / 800).sum() < 18.5  # chi-square, 4 degrees of freedom, at 0.1 %


@pytest.mark.parametrize("ids", [(-1, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_negative_ids_are_refused(ids: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"must not be negative: .*-1"):
        seeds.generator(0, "step_noise", *ids)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_outside_its_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=str(seed)):
        seeds.normal(seed, "step_noise", [0], (1,))


def test_an_unknown_stream_is_refused() -> None:
    with pytest.raises(KeyError, match="step_nose"):
        seeds.generator(0, "step_nose")


def test_ids_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        seeds.normal(0, "step_noise", [0, 1], (1,), cycles=[0])


def initial_weight(seed: int, index: int = 0) -> torch.Tensor:
    with seeds.weight_init(seed, index):
        return torch.nn.Linear(6, 6).weight.detach()


def test_weight_init_is_a_function_of_seed_and_index() -> None:
    first = initial_weight(3)
    torch.randn(5)
    assert torch.equal(first, initial_weight(3))
    assert not torch.equal(first, initial_weight(4))
    assert not torch.equal(first, initial_weight(3, 1))


def draw_and_fail() -> None:
    with seeds.weight_init(0):
        torch.randn(2)
        raise RuntimeError("inside")


def test_weight_init_puts_the_global_generator_back() -> None:
    torch.random.manual_seed(11)
    expected = torch.randn(4)
    torch.random.manual_seed(11)
    initial_weight(0)
    with pytest.raises(RuntimeError, match="inside"):
        draw_and_fail()
    assert torch.equal(torch.randn(4), expected)


def test_uniform_draws_keep_all_their_bits() -> None:
    key, counter = np.array([7, 3], dtype=np.uint64), np.array([0, 8, 6, 5], dtype=np.uint64)
    expected = np.random.Generator(np.random.Philox(key=key, counter=counter)).random()
    assert seeds.uniform(7, "score_sigma", [5], 6, 8).item() == expected
