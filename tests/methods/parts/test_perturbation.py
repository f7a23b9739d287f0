"""Clipping bounds, and the noise against the distribution it claims to have, by statistical
tests.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from crossfed.methods.parts.perturbation import add_laplace, clip_l1, laplace_scale, signal_to_noise

finite = st.floats(-1e6, 1e6, width=32)


def exact_l1(row: np.ndarray) -> float:
    return math.fsum(abs(float(value)) for value in row)


@settings(max_examples=200, deadline=None)
@given(arrays(np.float32, (3, 17), elements=finite), st.floats(1e-3, 1e3))
def test_a_clipped_norm_is_never_above_the_bound(x, bound):
    """Summed exactly, not only to within rounding; and what lay inside is left as it was."""
    clipped = clip_l1(x, bound)
    for before, after in zip(x, clipped, strict=True):
        assert exact_l1(after) <= bound
        if exact_l1(before) < bound * (1 - 1e-9):
            assert np.array_equal(before.astype(np.float64), after)
        else:
            assert exact_l1(after) == pytest.approx(bound, rel=1e-6)


def test_clipping_by_hand():
    """C = 1: [3, -1] has norm 4 and is divided by 4; [0.5, 0.25] and zero stay."""
    clipped = clip_l1(np.array([[3.0, -1.0], [0.5, 0.25], [0.0, 0.0]]), 1.0)
    np.testing.assert_allclose(clipped, [[0.75, -0.25], [0.5, 0.25], [0.0, 0.0]], rtol=1e-11)


def test_a_clipping_bound_is_positive():
    with pytest.raises(ValueError, match="positive"):
        clip_l1(np.ones((1, 2)), 0.0)


@pytest.mark.parametrize(("bound", "epsilon"), [(1.0, 2.0), (1.0, 0.1), (0.5, 5.0)])
def test_the_noise_is_laplace_of_scale_2c_over_epsilon(bound, epsilon):
    """Kolmogorov–Smirnov, variance 2b², and no correlation between neighbouring coordinates; b =
    2C/ε.
    """
    scale = laplace_scale(2 * bound, epsilon)
    assert scale == 2 * bound / epsilon
    rng = np.random.default_rng(7)
    x = clip_l1(rng.normal(size=(2_000, 64)), bound)
    noise = add_laplace(x, scale, rng).astype(np.float64) - x
    assert stats.kstest(noise.ravel(), stats.laplace(scale=scale).cdf).pvalue > 0.01
    assert noise.var() == pytest.approx(2 * scale**2, rel=0.03)
    assert abs(np.corrcoef(noise[:, 0], noise[:, 1])[0, 1]) < 0.08
    # a test that notices: neither half the scale nor Gaussian noise of the same variance passes
    assert stats.kstest(noise.ravel(), stats.laplace(scale=scale / 2).cdf).pvalue < 1e-6
    assert stats.kstest(noise.ravel(), stats.norm(scale=2**0.5 * scale).cdf).pvalue < 1e-6


def test_the_likelihood_ratio_of_neighbours_is_bounded_by_epsilon():
    """For any two clipped vectors and any output, |log p(o | x) − log p(o | y)| ≤ ε: the definition, on densities."""  # noqa: E501
    bound, epsilon = 1.0, 2.0
    rng = np.random.default_rng(0)
    x, y = clip_l1(rng.normal(size=(2, 500, 16)).reshape(-1, 16), bound).reshape(2, 500, 16)
    y[0] = -x[0]  # as far apart as two clipped vectors can be
    density = stats.laplace(scale=laplace_scale(2 * bound, epsilon))
    outputs = np.concatenate([x, y, density.rvs((500, 16), random_state=1)])
    for output in outputs[::10]:
        ratio = (density.logpdf(output - x) - density.logpdf(output - y)).sum(1)
        assert (np.abs(ratio) <= epsilon + 1e-9).all()
    assert (density.logpdf(0 * x[0]) - density.logpdf(x[0] - y[0])).sum() == pytest.approx(
        epsilon, rel=1e-6
    )


def test_noise_is_float32_and_drawn_from_the_generator():
    x = np.zeros((2, 3))
    a, b = (add_laplace(x, 1.0, np.random.default_rng(5)) for _ in range(2))
    assert a.dtype == np.float32 and a.shape == (2, 3)
    assert np.array_equal(a, b)
    assert not np.array_equal(a, add_laplace(x, 1.0, np.random.default_rng(6)))


def test_signal_to_noise_by_hand():
    """Power 1 + 4 = 5 over 4 coordinates of 2 · 0.5² = 0.5 each: 5 / 2."""
    assert signal_to_noise(np.array([[1.0, 0.0], [2.0, 0.0]]), 0.5) == 2.5
