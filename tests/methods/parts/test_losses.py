"""Losses against formulas written out, torch's own distributions, and limits that must hold."""

import math

import pytest
import torch
import torch.nn.functional as F

from crossfed.methods.parts.losses import bernoulli_kl, bpr, finite, info_nce, l2_ego
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import Context, generators


def test_bpr_by_hand():
    """Differences 2 and -1: -½ (ln σ(2) + ln σ(-1))."""
    expected = -0.5 * (math.log(1 / (1 + math.exp(-2))) + math.log(1 / (1 + math.exp(1))))
    assert bpr(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0])).item() == pytest.approx(expected)


def test_bpr_of_equal_scores_is_ln_2_and_it_stays_finite():
    assert bpr(torch.zeros(3), torch.zeros(3)).item() == pytest.approx(math.log(2))
    assert bpr(torch.tensor([-1e4]), torch.tensor([1e4])).item() == pytest.approx(2e4)


def test_l2_ego_by_hand():
    """Rows [1, 2], [3, 0] and [0, 1], [1, 1]: squares 1+4+9 and 1+1+1, sum 17; ½ · 17 / 2 pairs."""
    a, b = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert l2_ego(a, b).item() == pytest.approx(17 / 4)


def test_l2_ego_divides_by_the_pairs_and_not_by_the_width():
    """Three rows of width 2, all ones: ½ · 6 / 3."""
    assert l2_ego(torch.ones(3, 2)).item() == pytest.approx(1.0)


def slow_info_nce(a, b, temperature, keep_positive):
    total = 0.0
    for i in range(len(a)):
        sims = [F.cosine_similarity(a[i], b[j], dim=0) / temperature for j in range(len(b))]
        denominator = sum(math.exp(s) for j, s in enumerate(sims) if keep_positive or j != i)
        total += -math.log(math.exp(sims[i]) / denominator)
    return total / len(a)


@pytest.mark.parametrize("keep_positive", [True, False])
@pytest.mark.parametrize("temperature", [0.2, 0.5])
def test_info_nce_against_loops(keep_positive, temperature):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(7, 5, generator=generator), 3 * torch.randn(7, 5, generator=generator)
    expected = slow_info_nce(a, b, temperature, keep_positive)
    assert info_nce(a, b, temperature, keep_positive).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("keep_positive", "candidates"), [(True, 6), (False, 5)])
def test_info_nce_of_indistinguishable_rows(keep_positive, candidates):
    """All similarities equal: the positive is one of so many candidates, whatever the
    temperature.
    """
    same = torch.ones(6, 4)
    assert info_nce(same, same, 0.1, keep_positive).item() == pytest.approx(
        math.log(candidates), rel=1e-5
    )


def test_info_nce_does_not_depend_on_length_but_on_direction():
    a, b = torch.randn(5, 4), torch.randn(5, 4)
    torch.testing.assert_close(info_nce(7 * a, b, 0.3), info_nce(a, 0.1 * b, 0.3))
    assert abs(info_nce(a, b, 0.3).item() - info_nce(b, a, 0.3).item()) > 1e-4


def test_info_nce_of_two_rows_without_the_positive():
    """Unit vectors at right angles, τ = ½: the own similarity is 2 and the other's 0, so that the
    loss is 0 - 2.
    """
    rows = torch.eye(2)
    assert info_nce(rows, rows, 0.5, keep_positive=False).item() == pytest.approx(-2.0)


def test_info_nce_without_the_positive_needs_two_rows():
    with pytest.raises(ValueError, match="at least two rows"):
        info_nce(torch.ones(1, 2), torch.ones(1, 2), 0.5, keep_positive=False)


def test_info_nce_without_the_positive_has_finite_gradients():
    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    info_nce(a, b, 0.05, keep_positive=False).backward()
    assert torch.isfinite(a.grad).all()


def test_bernoulli_kl_by_hand():
    """p = 1/2, q = 3/4 (logit ln 3): ½ ln(½ / ¾) + ½ ln(½ / ¼)."""
    actual = bernoulli_kl(torch.tensor([0.0]), torch.tensor([math.log(3)]))
    assert actual.item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2), rel=1e-6)


def test_bernoulli_kl_against_torch():
    p, q = torch.randn(50), torch.randn(50)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Bernoulli(logits=p), torch.distributions.Bernoulli(logits=q)
    )
    torch.testing.assert_close(bernoulli_kl(p, q), expected, rtol=1e-4, atol=1e-6)


def test_bernoulli_kl_limits():
    """Zero where both agree; for certain p and opposite q it is |q|; gradients stay finite
    there.
    """
    extremes = torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4])
    assert torch.equal(bernoulli_kl(extremes, extremes), torch.zeros(5))
    p = torch.tensor([1e4, -1e4, 1e4], requires_grad=True)
    q = torch.tensor([-1e4, 1e4, 0.0], requires_grad=True)
    kl = bernoulli_kl(p, q)
    torch.testing.assert_close(kl, torch.tensor([1e4, 1e4, math.log(2)]))
    kl.sum().backward()
    assert torch.isfinite(p.grad).all()
    torch.testing.assert_close(q.grad, torch.tensor([-1.0, 1.0, -0.5]))  # σ(q) - σ(p)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_names_the_domain_the_round_and_the_loss(value):
    context = Context(
        "books", "train", 3, (), *generators(0, "train", 3, "books"), torch.device("cpu")
    )
    means = {"loss_bpr": 0.5, "loss_l2": 0.0}
    assert finite(means, context) is means
    with pytest.raises(CrossfedError, match=r"books: .* in train, round 3: loss_l2 is not finite"):
        finite(means | {"loss_l2": value}, context)
