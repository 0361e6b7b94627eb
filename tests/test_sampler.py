"""Rollouts over toy velocities: what a row records depends on nothing but its own request (math §2, §3)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sigmazero import seeds, transition
from sigmazero.records import Conditioning, Prompt, RolloutRequest, StepPlan, Trajectory
from sigmazero.sampler import Velocity, rollout
from sigmazero.schedule import column, diffusers_sd3_grid, sigma_grid

SHAPE = (3, 4, 4)
D = 48
KINDS = ("ode", "sde", "dance", "cps")
DTYPES = (torch.float32, torch.bfloat16)
WEIGHT = torch.from_numpy(np.random.default_rng(0).standard_normal((D, D), dtype=np.float32)) / 10
GRID = sigma_grid(4, 3.0)
ALL = StepPlan(None, (0, 1, 2, 3, 4), None)


def linear(x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
    flat = x.flatten(1) @ WEIGHT.to(x.dtype) * column(1 + sigma, x.flatten(1)).to(x.dtype)
    return (flat + condition["push"].to(x.dtype)).reshape(x.shape)


class Spy:
    """The linear velocity, with what each call was given and gave."""

    def __init__(self) -> None:
        self.x: list[Tensor] = []
        self.sigma: list[Tensor] = []
        self.v: list[Tensor] = []

    def __call__(self, x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        v = linear(x, sigma, condition)
        self.x.append(x)
        self.sigma.append(sigma)
        self.v.append(v)
        return v


def request(sample: int, plan: StepPlan = ALL, kind: str = "sde", eta: float = 0.7, **other: Any) -> RolloutRequest:
    first = RolloutRequest(sample, 2, Prompt(sample, ""), "student", GRID, kind, eta, 1.0, 5, plan)
    return replace(first, **other)


def condition_of(requests: Sequence[RolloutRequest]) -> Conditioning:
    return Conditioning({"push": torch.stack([torch.sin(torch.arange(D) + 7.0 * r.sample) for r in requests]) / 2})


def run(requests: Sequence[RolloutRequest], velocity: Velocity = linear, **options: Any) -> list[Trajectory]:
    return rollout(velocity, requests, condition_of(requests), SHAPE, **options)


def times(factor: Tensor) -> Velocity:
    return lambda x, sigma, condition: factor * x


def stopped(i: int) -> StepPlan:
    return StepPlan(None, (i, i + 1), i)


def assert_same(a: Trajectory, b: Trajectory) -> None:
    """Bit for bit, where nan equals nan."""
    torch.testing.assert_close(a.latents, b.latents, rtol=0, atol=0)
    torch.testing.assert_close(a.log_prob, b.log_prob, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_b01_a_row_does_not_depend_on_its_batch(kind: str, dtype: torch.dtype) -> None:
    requests = [request(s, kind=kind) for s in range(6)]
    whole = run(requests, dtype=dtype)
    alone = [run([r], dtype=dtype)[0] for r in requests]
    pairs = [t for k in (0, 2, 4) for t in run(requests[k : k + 2], dtype=dtype)]
    backwards = run(requests[::-1], dtype=dtype)[::-1]
    large = run([*requests, *(request(s, kind=kind) for s in range(6, 20))], dtype=dtype)[:6]
    for row, others in enumerate(zip(alone, pairs, backwards, large, strict=True)):
        for other in others:
            assert_same(whole[row], other)
    assert len({tuple(t.latent(0).flatten().tolist()) for t in whole}) == 6


@pytest.mark.parametrize("other", [{"seed": 6}, {"cycle": 3}, {"sample": 1}])
def test_b36_seed_cycle_and_sample_each_change_the_noise(other: dict[str, int]) -> None:
    first, second = run([request(0), replace(request(0), **other)], times(torch.tensor(0.0)))
    assert not torch.equal(first.latent(0), second.latent(0))
    kept = 1 - 0.7**2 / 2  # of latent 0 in the first step's mean, where v is 0
    step_noise = [(t.latent(1) - kept * t.latent(0)) / 0.7 for t in (first, second)]
    assert (step_noise[0] - step_noise[1]).abs().mean() > 0.5


def test_b36_equal_requests_of_one_batch_get_equal_results() -> None:
    a0, a1, b0 = run([request(0), request(1), request(0)])
    assert_same(a0, b0)
    assert not torch.equal(a0.latent(4), a1.latent(4))


def by_numpy(r: RolloutRequest) -> list[np.ndarray]:
    """The latents of a full ``sde`` rollout, from the formulas of math §3 in float64."""

    def noise(stream: int, step: int) -> np.ndarray:
        counter = np.array([0, step, r.cycle, r.sample], dtype=np.uint64)
        draw = np.random.Generator(np.random.Philox(key=np.array([r.seed, stream], dtype=np.uint64), counter=counter))
        return draw.standard_normal(SHAPE, dtype=np.float32).astype(np.float64).ravel()

    s = r.sigmas.double().tolist()
    push = condition_of([r])["push"][0].double().numpy()
    x = [s[0] * noise(0, 0)]
    for i in range(len(s) - 1):
        v = x[i] @ WEIGHT.double().numpy() * (1 + s[i]) + push
        dt = s[i + 1] - s[i]
        level = r.eta * np.sqrt(s[i] / (1 - (s[1] if s[i] == 1 else s[i])))
        mean = x[i] + (level**2 / (2 * s[i]) * (x[i] + (1 - s[i]) * v) + v) * dt
        x.append(mean + level * np.sqrt(-dt) * noise(1, i))
    return x


def test_a_rollout_equals_a_plain_second_implementation() -> None:
    r = request(3)
    (got,) = run([r])
    np.testing.assert_allclose(got.latents.flatten(1).numpy(), by_numpy(r), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_latent_is_the_first_sigma_times_noise(dtype: torch.dtype) -> None:
    (got,) = run([request(9, sigmas=torch.tensor([0.8, 0.5, 0.2, 0.1, 0]))], dtype=dtype)
    assert torch.equal(
        got.latent(0), (torch.tensor(0.8) * seeds.normal(5, "initial_noise", [9], SHAPE, 2))[0].to(dtype)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("i", range(4))
def test_b22_b76_a_rollout_stopped_at_i_makes_i_plus_one_calls(i: int, kind: str) -> None:
    spy = Spy()
    (got,) = run([request(0, stopped(i), kind)], spy)
    assert [s[0].item() for s in spy.sigma] == GRID[: i + 1].tolist()
    assert got.latent_indices == (i, i + 1)
    assert got.sigmas.tolist() == [*GRID[: i + 1].tolist(), 0]
    assert got.log_prob.isfinite().tolist() == [kind != "ode"] * i + [False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("i", range(4))
def test_the_last_latent_of_a_stopped_rollout_is_the_predicted_sample(i: int, kind: str, dtype: torch.dtype) -> None:
    spy = Spy()
    (got,) = run([request(0, stopped(i), kind)], spy, dtype=dtype)
    v = spy.v[i][0]
    assert v.dtype == dtype
    assert torch.equal(got.latent(i), spy.x[i][0])
    assert torch.equal(got.latent(i + 1), (got.latent(i).float() - GRID[i] * v.float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_prefix_is_that_of_the_full_rollout_also_where_rows_have_left(kind: str, dtype: torch.dtype) -> None:
    stops = [0, 3, None, 1, 2, None, 0, 1, 0, 3]
    plans = [ALL if stop is None else StepPlan(None, tuple(range(stop + 2)), stop) for stop in stops]
    part = run([request(s, plan, kind) for s, plan in enumerate(plans)], dtype=dtype)
    full = run([request(s, ALL, kind) for s in range(len(stops))], dtype=dtype)
    for stop, left, stayed in zip(stops, part, full, strict=True):
        if stop is None:
            assert_same(left, stayed)
            continue
        assert torch.equal(left.latents[: stop + 1], stayed.latents[: stop + 1])
        torch.testing.assert_close(left.log_prob[:stop], stayed.log_prob[:stop], rtol=0, atol=0, equal_nan=True)


def test_a_stop_at_the_last_step_changes_a_noisy_last_step_alone() -> None:
    for kind in KINDS:
        (full,), (last,) = run([request(0, ALL, kind)]), run([request(0, ALL._replace(stop=3), kind)])
        assert torch.equal(full.latents[:4], last.latents[:4])
        assert torch.equal(full.latent(4), last.latent(4)) == (kind in ("ode", "cps"))


def test_a_full_rollout_follows_the_plan_to_its_last_step() -> None:
    (got,) = run([request(0)])
    assert got.log_prob.isfinite().all()
    assert got.sigmas.tolist() == GRID.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_b76_a_rollout_ends_with_the_last_latent_that_somebody_asked_for(kind: str) -> None:
    """Bit for bit as far as a whole one; the first noise alone costs no call."""
    wholes = run([request(i, kind=kind) for i in range(5)])
    spy = Spy()
    asked = run([request(i, StepPlan(None, (i,), None), kind=kind) for i in range(5)], spy)
    assert len(spy.x) == 4
    for i, (short, whole) in enumerate(zip(asked, wholes, strict=True)):
        assert torch.equal(short.latent(i), whole.latent(i))
        assert torch.equal(short.sigmas, GRID[: i + 1])
        torch.testing.assert_close(short.log_prob, whole.log_prob[:i], rtol=0, atol=0, equal_nan=True)
    spy = Spy()
    assert [t.latent_indices for t in run([request(0, StepPlan(None, (0,), None), kind=kind)], spy)] == [(0,)]
    assert not spy.x


def test_a_batch_of_mixed_stops_costs_at_most_one_call_a_step() -> None:
    spy = Spy()
    stops = [0] * 3 + [1] * 4 + [2] * 5
    results = run([request(s, stopped(i)) for s, i in enumerate(stops)], spy)
    assert [len(x) for x in spy.x] == [16, 16, 8]
    assert torch.equal(spy.x[2][:5], torch.stack([t.latent(2) for t in results[7:]]))
    assert torch.equal(spy.x[2][5:], spy.x[2][:1].expand(3, *SHAPE))
    assert [t.request.sample for t in results] == list(range(12))


@pytest.mark.parametrize(
    "other", [{"policy": "teacher"}, {"sigmas": sigma_grid(8)}, {"kind": "cps"}, {"eta": 0.6}, {"guidance": 2.0}]
)
def test_b36_requests_that_cannot_share_a_batch_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot share a batch"):
        run([request(0, StepPlan(None, (4,), None)), request(1, StepPlan(None, (4,), None), **other)])


@pytest.mark.parametrize("sigmas", [GRID.bfloat16(), torch.tensor([1, 0.5, 0.5, 0.2, 0]), GRID[:4]])
def test_b06_b63_a_request_without_a_schedule_is_refused(sigmas: Tensor) -> None:
    with pytest.raises(ValueError, match="a schedule"):
        run([request(0, StepPlan(None, (1,), None), sigmas=sigmas)])


@pytest.mark.parametrize("kind", ["sde", "dance", "cps"])
@pytest.mark.parametrize("eta", [-0.1, float("nan")])
def test_an_eta_out_of_range_is_refused(kind: str, eta: float) -> None:
    with pytest.raises(ValueError, match="eta is"):
        run([request(0, kind=kind, eta=eta)])


def test_a_plan_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop is \(4,\)"):
        run([request(0), request(1, StepPlan(None, (4,), 4))])


def test_b06_sigmas_travel_verbatim() -> None:
    u = torch.linspace(1, 0.001, 10, dtype=torch.float64)
    sigmas = torch.cat([(3 * u / (1 + 2 * u)).float(), torch.zeros(1)])
    assert not torch.equal(sigmas * 1000 / 1000, sigmas)
    spy = Spy()
    (got,) = run([request(0, StepPlan((), (10,), None), sigmas=sigmas)], spy)
    assert [s[0].item() for s in spy.sigma] == sigmas[:10].tolist()
    assert torch.equal(got.sigmas, sigmas)


def test_b06_each_row_follows_its_own_schedule() -> None:
    other = torch.tensor([1.0, 0.6, 0.4, 0.1, 0])
    spy = Spy()
    first, second = run([request(0), request(1, sigmas=other)], spy)
    assert [s[:2].tolist() for s in spy.sigma] == [
        [a, b] for a, b in zip(GRID[:4].tolist(), other[:4].tolist(), strict=True)
    ]
    assert (first.sigmas.tolist(), second.sigmas.tolist()) == (GRID.tolist(), other.tolist())
    assert_same(second, run([request(1, sigmas=other)])[0])


def test_b63_close_sigmas_are_each_visited_once() -> None:
    sigmas = torch.tensor([0.9989, 0.9988, 0.9987, 0.5, 0])
    spy = Spy()
    run([request(0, sigmas=sigmas)], spy)
    assert [s[0].item() for s in spy.sigma] == sigmas[:4].tolist()


def test_b03_a_bf16_rollout_tells_the_network_fp32_sigmas() -> None:
    sigmas = torch.tensor([0.9983897, 0.9782609, 0.6818182, 0.75 / 2, 0])
    spy = Spy()
    run([request(0, sigmas=sigmas)], spy, dtype=torch.bfloat16)
    assert {s.dtype for s in spy.sigma} == {torch.float32}
    assert [s[0].item() for s in spy.sigma] == sigmas[:4].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["sde", "dance", "cps"])
def test_a_log_prob_is_that_of_the_stored_latents(kind: str, dtype: torch.dtype) -> None:
    spy = Spy()
    results = run([request(s, kind=kind) for s in range(3)], spy, dtype=dtype)
    for row, got in enumerate(results):
        for i in range(4):
            now, after, guard = (GRID[k : k + 1] for k in (i, i + 1, 1))
            mean, std = transition.moments(
                kind, 0.7, got.latents[i : i + 1], spy.v[i][row : row + 1], now, after, guard
            )
            again = transition.log_prob(got.latents[i + 1 : i + 2], mean, std)
            torch.testing.assert_close(got.log_prob[i : i + 1], again, rtol=0, atol=0, equal_nan=True)


def test_b35_each_sample_has_its_own_window() -> None:
    sigmas = sigma_grid(10, 3.0)
    windows = [(1, 2), (7, 8)]
    plans = [StepPlan(w, (w[0], w[1], w[1] + 1, 10), None) for w in windows]
    results = run([request(s, plan, sigmas=sigmas) for s, plan in enumerate(plans)])
    plain = run([request(s, StepPlan((), tuple(range(11)), None), sigmas=sigmas) for s in range(2)])
    for window, got, ode in zip(windows, results, plain, strict=True):
        assert got.log_prob.isfinite().nonzero().flatten().tolist() == list(window)
        assert torch.equal(got.latent(window[0]), ode.latent(window[0]))
        assert not torch.equal(got.latent(window[0] + 1), ode.latent(window[0] + 1))


def test_b35_latents_are_found_by_index_whatever_the_order_of_the_plan() -> None:
    (full,) = run([request(0)])
    (part,) = run([request(0, StepPlan(None, (3, 1), None))])
    assert part.latent_indices == (1, 3)
    assert torch.equal(part.latent(3), full.latent(3))
    assert torch.equal(part.latent(1), full.latent(1))
    with pytest.raises(ValueError, match="latent 2 of sample 0 did not come back"):
        part.latent(2)


@pytest.mark.parametrize("eta", [0.0, 0.7])
def test_no_stochastic_step_is_euler_whatever_the_kind(eta: float) -> None:
    none = ALL._replace(sde=())
    (ode,) = run([request(0, ALL, "ode", eta)])
    for kind in KINDS:
        assert_same(run([request(0, none, kind, eta)])[0], ode)
    assert ode.log_prob.isnan().all()


def test_gradients_flow_through_every_step_where_autograd_is_on() -> None:
    factor = torch.tensor(0.5, requires_grad=True)
    (got,) = run([request(0, StepPlan((), (0, 2), None), sigmas=torch.tensor([1, 0.75, 0]))], times(factor))
    (slope,) = torch.autograd.grad(got.latent(2).sum(), factor)
    steps = -0.25 * (1 - 0.75 * 0.5) - 0.75 * (1 - 0.25 * 0.5)  # d/df of (1 - f/4) (1 - 3f/4)
    torch.testing.assert_close(slope, steps * got.latent(0).sum())


def test_no_gradient_is_kept_where_autograd_is_off() -> None:
    factor = torch.tensor(0.5, requires_grad=True)
    with torch.no_grad():
        (got,) = run([request(0)], times(factor))
    assert not got.latents.requires_grad
    assert not got.log_prob.requires_grad


def exact(data_variance: float) -> Velocity:
    """The velocity of N(0, data_variance) as data."""

    def velocity(x: Tensor, sigma: Tensor, condition: Conditioning) -> Tensor:
        noised = (1 - sigma) ** 2 * data_variance + sigma**2
        return column((sigma - (1 - sigma) * data_variance) / noised, x) * x

    return velocity


@pytest.mark.parametrize(
    ("kind", "velocity", "std"),
    [
        ("sde", exact(0.0), 0.0618),
        ("cps", exact(0.0), 0.0),
        ("ode", exact(0.0), 0.0),
        ("cps", exact(1.0), 0.5**0.5),
    ],
)
def test_noise_left_after_ten_steps(kind: str, velocity: Callable[..., Tensor], std: float) -> None:
    r = request(0, StepPlan(None, (10,), None), kind, sigmas=diffusers_sd3_grid(10))
    (got,) = rollout(velocity, [r], condition_of([r]), (1, 400, 400))
    assert got.latents.std().item() == pytest.approx(std, rel=0.01, abs=1e-6)


def test_a_trajectory_names_its_request_and_version() -> None:
    requests = [request(s) for s in (4, 2)]
    assert [(t.request, t.version) for t in run(requests, version=17)] == [(r, 17) for r in requests]
