"""Signal, noise and sketches of gradients against brute force, simulation and theory."""

import itertools
import math

import numpy as np
import pytest
import torch

from rllm_lightning.lab.replay import CountSketch, signal_and_noise, with_errors


def exact(gradients_ENK):
    """The numbers and errors of gradients that are known exactly."""
    sums = gradients_ENK.sum(axis=1)
    return with_errors(sums @ sums.T, (gradients_ENK**2).sum(axis=2), gradients_ENK)


def test_the_signal_is_the_mean_over_all_ways_to_halve_the_prompts():
    gradients_NK = np.random.default_rng(0).normal(size=(6, 3)) + 0.5
    halves = []
    for half in itertools.combinations(range(6), 3):
        other = [u for u in range(6) if u not in half]
        halves.append(gradients_NK[list(half)].mean(axis=0) @ gradients_NK[other].mean(axis=0))
    found, _ = exact(gradients_NK[None])
    assert found.signal[0] == pytest.approx(np.mean(halves), rel=1e-12)


def test_norm_variance_ratio_and_scale_are_as_defined():
    # prompts (2, 0), (0, 2), (1, 1): mean (1, 1); squared distances 2, 2, 0 over N - 1 = 2
    found, _ = exact(np.array([[[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]]]))
    assert found.norm[0] == pytest.approx(math.sqrt(2))
    assert found.variance[0] == pytest.approx(2)
    assert found.signal[0] == pytest.approx(2 - 2 / 3)  # |mean|² minus variance / N; pairs: (0 + 2 + 2) / 3
    assert found.noise_scale[0] == pytest.approx(2 / (4 / 3))
    assert found.signal_to_noise[0] == pytest.approx(math.sqrt((4 / 3) / (2 / 3)))


def test_a_factor_changes_no_ratio_and_no_cosine():
    one = np.random.default_rng(1).normal(size=(8, 4)) + 0.7
    found, errors = exact(np.stack([one, 3 * one]))
    for name in ("cosine", "signal_cosine"):
        assert getattr(found, name) == pytest.approx(np.ones((2, 2)), abs=1e-12)
        assert getattr(errors, name) == pytest.approx(np.zeros((2, 2)), abs=1e-6)
    assert found.norm[1] == pytest.approx(3 * found.norm[0])
    assert found.noise_scale[1] == pytest.approx(found.noise_scale[0])
    assert errors.noise_scale[1] == pytest.approx(errors.noise_scale[0])


def test_standard_errors_are_the_scatter_that_they_claim_to_be():
    """400 batches of 60 prompts of two correlated estimators: the mean stated error against the scatter of the numbers."""
    rng = np.random.default_rng(2)
    names = ("norm", "variance", "signal", "signal_to_noise", "cosine")
    means = np.array([[[0.8] * 5], [[0.8, 0.8, 0.8, 0, 0]]])  # of different directions: where cosines are all but 1, errors are too large
    values, stated = {name: [] for name in names}, {name: [] for name in names}
    for _ in range(400):
        shared, own = rng.normal(size=(1, 60, 5)), rng.normal(size=(2, 60, 5))
        found, errors = exact(means + shared + 0.7 * own)
        for name in names:
            pick = (0, 1) if name == "cosine" else (0,)
            values[name].append(getattr(found, name)[pick])
            stated[name].append(getattr(errors, name)[pick])
    for name in names:
        assert np.mean(stated[name]) == pytest.approx(np.std(values[name]), rel=0.15), name
    # E|G|² = 5 · .8²; the variance of an entry is 1 + .49
    assert np.mean(values["signal"]) == pytest.approx(3.2, abs=4 * np.std(values["signal"]) / 20)
    assert np.mean(values["variance"]) == pytest.approx(5 * 1.49, abs=4 * np.std(values["variance"]) / 20)


def test_the_cosine_of_the_signals_leaves_shared_noise_out():
    """Two estimators with orthogonal expectations and the same noise: their trained gradients look alike, their signals do not."""
    rng = np.random.default_rng(3)
    means = np.zeros((2, 1, 20))
    means[0, 0, 0] = means[1, 0, 1] = 1.0
    cosines = np.array(
        [(found.cosine[0, 1], found.signal_cosine[0, 1]) for found, _ in (exact(means + rng.normal(size=(20, 20))) for _ in range(300))]
    )
    # the mean of 20 prompts has noise of squared length 20 / 20 beside a signal of 1: half of each gradient is common
    assert np.nanmean(cosines[:, 0]) == pytest.approx(0.5, abs=0.05)
    assert np.nanmedian(cosines[:, 1]) == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("num", [1, 2])
def test_too_few_prompts_have_no_errors(num):
    found, errors = exact(np.ones((2, num, 3)))
    assert found.norm == pytest.approx([math.sqrt(3)] * 2)
    assert found.cosine == pytest.approx(np.ones((2, 2)))
    assert np.isnan(errors.norm).all()
    assert np.isnan(errors.cosine).all()
    assert np.isnan(found.signal).all() == (num == 1)


def test_gradients_of_zero_have_no_cosine_and_no_scale():
    found, errors = exact(np.stack([np.zeros((4, 3)), np.ones((4, 3))]))
    assert found.norm[0] == 0
    assert math.isnan(found.cosine[0, 1])
    assert math.isnan(found.noise_scale[0])
    assert math.isnan(errors.cosine[0, 1])
    assert found.noise_scale[1] == pytest.approx(0, abs=1e-12)  # prompts that agree have no noise


def test_noise_without_signal_has_a_scale_beyond_measure():
    found = signal_and_noise(np.array([[1.0]]), np.array([[2.0]]), 2)  # (1 - 2) / 2 < 0
    assert found.signal[0] == -0.5
    assert (found.signal_to_noise[0], found.noise_scale[0]) == (0, math.inf)


# ------------------------------------------------------------------------------------------------------------------ sketches


def test_a_short_gradient_is_kept_as_it_is():
    sketch = CountSketch([2, 3], 5)
    assert sketch.is_exact
    assert sketch.relative_error == 0
    assert sketch([torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0, 5.0]])]).tolist() == [1, 2, 3, 4, 5]
    assert sketch([torch.tensor([1.0, 2.0]), None]).tolist() == [1, 2, 0, 0, 0]


def test_sketched_products_are_right_on_average_and_err_as_stated():
    """600 draws of 100 sums for 3,000 entries: products within the standard error of the mean, scatter at the stated √(2/k) for a
    vector with itself, and at √((1 + c²)/k) of the norms for two of cosine c."""
    rng = np.random.default_rng(4)
    x = torch.from_numpy(rng.normal(size=3000))
    y = 0.5 * x + torch.from_numpy(rng.normal(size=3000))
    products = {"xx": [], "xy": []}
    for seed in range(600):
        sketch = CountSketch([1000, 2000], 100, seed)
        sx, sy = sketch([x[:1000], x[1000:]]), sketch([y[:1000], y[1000:]])
        products["xx"].append(float(sx @ sx))
        products["xy"].append(float(sx @ sy))
    norms = {"xx": float(x @ x), "xy": float(x.norm() * y.norm())}
    cosine = float(x @ y) / norms["xy"]
    for name, truth, error in (("xx", float(x @ x), sketch.relative_error), ("xy", float(x @ y), math.sqrt((1 + cosine**2) / 100))):
        scatter = np.std(products[name]) / norms[name]
        assert scatter == pytest.approx(error, rel=0.1), name
        assert np.mean(products[name]) == pytest.approx(truth, abs=4 * np.std(products[name]) / math.sqrt(600)), name
    assert sketch.relative_error == pytest.approx(math.sqrt(2 / 100))


def test_sketches_of_a_sum_are_sums_of_sketches_and_a_seed_draws_the_same():
    x, y = torch.randn(500, generator=torch.Generator().manual_seed(0)), torch.ones(500)
    sketch = CountSketch([500], 64, seed=7)
    assert torch.allclose(sketch([x + y]), sketch([x]) + sketch([y]), atol=1e-5)
    assert torch.equal(CountSketch([500], 64, seed=7)([x]), sketch([x]))
    assert not torch.equal(CountSketch([500], 64, seed=8)([x]), sketch([x]))


def test_errors_from_sketches_are_close_to_the_exact_ones():
    """Gradients vary in few directions (here 30 of 4,000); with as many as a sketch has sums the errors would come out too large."""
    rng = np.random.default_rng(5)
    gradients = (rng.normal(size=(2, 40, 30)) + 0.5) @ rng.normal(size=(30, 4000)) / 30
    gradients[1] = 0.6 * gradients[0] + 0.8 * gradients[1]
    sketch = CountSketch([4000], 2000)
    sketches = np.array([[sketch([torch.from_numpy(g)]).numpy() for g in of_estimator] for of_estimator in gradients])
    sums = gradients.sum(axis=1)
    found, errors = with_errors(sums @ sums.T, (gradients**2).sum(axis=2), sketches)
    truth, true_errors = exact(gradients)
    for name in ("norm", "variance", "signal", "signal_to_noise", "noise_scale", "cosine"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-9), name  # no sketch in them
    assert errors.variance == pytest.approx(true_errors.variance, rel=0.2)
    assert errors.cosine[0, 1] == pytest.approx(true_errors.cosine[0, 1], rel=0.2)
    assert found.signal_cosine[0, 1] == pytest.approx(truth.signal_cosine[0, 1], abs=0.05)
