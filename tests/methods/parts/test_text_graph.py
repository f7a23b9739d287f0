"""Item graphs: blocked neighbours against the full matrix, the normalised graph against a dense
one, the measures by hand.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from crossfed.methods.parts import text_graph
from crossfed.methods.parts.text_graph import (
    aligned_projection,
    cosine_edges,
    cosine_graph,
    effective_rank,
    neighbour_overlap,
    row_product,
    top_cosine,
)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(57, 6, generator=torch.Generator().manual_seed(0))


def dense_cosine(x: torch.Tensor) -> np.ndarray:
    a = x.numpy().astype(np.float64)
    out = np.empty((len(a), len(a)))
    for i in range(len(a)):
        for j in range(len(a)):
            out[i, j] = a[i] @ a[j] / (np.sqrt(a[i] @ a[i]) * np.sqrt(a[j] @ a[j]))
    return out


@pytest.mark.parametrize("block", [1, 57 * 10, 1 << 24])
def test_top_cosine_is_the_sorted_full_matrix(
    x: torch.Tensor, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_graph, "BLOCK_ELEMENTS", block)
    index, value = top_cosine(x, 4)
    full = dense_cosine(x)
    np.fill_diagonal(full, -np.inf)
    order = np.argsort(-full, axis=1)[:, :4]
    np.testing.assert_array_equal(index.numpy(), order)
    np.testing.assert_allclose(value.numpy(), np.take_along_axis(full, order, 1), atol=1e-6)


def test_a_row_is_never_its_own_neighbour_even_among_duplicates() -> None:
    index, value = top_cosine(torch.ones(5, 3), 4)
    assert not (index == torch.arange(5)[:, None]).any()
    torch.testing.assert_close(value, torch.ones(5, 4))


def test_few_rows_have_few_neighbours() -> None:
    assert top_cosine(torch.randn(3, 2), 10)[0].shape == (3, 2)
    assert top_cosine(torch.randn(1, 2), 10)[0].shape == (1, 0)
    assert cosine_graph(torch.randn(1, 2), 10).to_dense().tolist() == [[0.0]]


def test_at_least_one_neighbour_is_asked_for(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="at least one neighbour"):
        top_cosine(x, 0)


def test_edges_by_hand() -> None:
    """cos(a, b) = 0.6, cos(a, c) = -1, cos(b, c) = -0.6: the best of c is b, at weight max(-0.6, 0)
    = 0.
    """
    edges, weights = cosine_edges(torch.tensor([[1.0, 0.0], [3.0, 4.0], [-2.0, 0.0]]), 1)
    assert edges.tolist() == [[0, 1, 2], [1, 0, 1]]
    torch.testing.assert_close(weights, torch.tensor([0.6, 0.6, 0.0]))


def test_the_graph_is_symmetrically_normalised(x: torch.Tensor) -> None:
    """S̃ = D^-½ S D^-½ with S_ij = max over both directions of the kept, non-negative cosines."""
    full = dense_cosine(x)
    np.fill_diagonal(full, -np.inf)
    s = np.zeros_like(full)
    for i in range(len(full)):
        for j in np.argsort(-full[i])[:3]:
            s[i, j] = s[j, i] = max(full[i, j], 0.0)
    degree = s.sum(1)
    expected = s / np.sqrt(degree[:, None] * degree[None, :])
    np.testing.assert_allclose(cosine_graph(x, 3).to_dense().numpy(), expected, atol=1e-6)


def test_row_product_is_some_rows_of_the_product(x: torch.Tensor) -> None:
    graph = cosine_graph(x, 3)
    rows = torch.tensor([5, 0, 56, 5])
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    some, full = row_product(graph, a, rows), (graph.to_dense() @ b)[rows]
    torch.testing.assert_close(some, full)
    (some * weight).sum().backward()
    (full * weight).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_row_product_of_a_row_without_edges_is_zero() -> None:
    graph = torch.tensor([[0.0, 2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).to_sparse_csr()
    out = row_product(graph, torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([2, 0, 2]))
    assert out.tolist() == [[0.0], [20.0], [0.0]]


def test_overlap_by_hand() -> None:
    """Row 0 keeps one of two, row 1 both (in another order), row 2 none: (1/2 + 1 + 0) / 3."""
    a, b = torch.tensor([[1, 2], [0, 2], [0, 1]]), torch.tensor([[1, 3], [2, 0], [4, 5]])
    assert neighbour_overlap(a, b) == pytest.approx(0.5)
    assert neighbour_overlap(a, a) == 1
    assert (
        neighbour_overlap(
            torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0, dtype=torch.int64)
        )
        == 1
    )


def test_overlap_needs_tables_of_one_shape() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        neighbour_overlap(
            torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)
        )


def test_effective_rank_by_hand() -> None:
    """Four corners of a square in two dimensions: two equal singular values, so 2; on one line: 1;
    shifts do not matter.
    """
    square = torch.tensor([[1.0, 1, 0], [1, -1, 0], [-1, 1, 0], [-1, -1, 0]])
    assert effective_rank(square) == pytest.approx(2)
    assert effective_rank(square + 7) == pytest.approx(2)
    assert effective_rank(square[:, :1] * torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(
        1, abs=1e-4
    )


def test_effective_rank_of_unequal_singular_values() -> None:
    """Singular values 2 and 1: shares 2/3 and 1/3, entropy ln 3 − ⅔ ln 2, so the rank is 3 /
    2^⅔.
    """
    a, b = 2**0.5, 0.5**0.5
    x = torch.tensor([[a, 0.0], [-a, 0.0], [0.0, b], [0.0, -b]])
    assert effective_rank(x) == pytest.approx(3 / 2 ** (2 / 3), rel=1e-6)


def test_aligned_projection_keeps_the_variance_of_pca() -> None:
    x = torch.randn(200, 10, generator=torch.Generator().manual_seed(2)) * torch.linspace(
        3, 0.1, 10
    )
    reference = torch.linalg.qr(torch.randn(10, 3, generator=torch.Generator().manual_seed(3))).Q
    weight = aligned_projection(x + 5, reference)
    torch.testing.assert_close(weight.T @ weight, torch.eye(3), atol=1e-5, rtol=0)
    kept = ((x @ weight).var(0, correction=0)).sum()
    torch.testing.assert_close(
        kept, torch.linalg.eigvalsh(torch.cov(x.T, correction=0))[-3:].sum(), rtol=1e-4, atol=0
    )


def test_aligned_projection_is_the_nearest_to_the_reference() -> None:
    """The distance of V(Q·R) to the reference is larger for any other rotation R."""
    rng = torch.Generator().manual_seed(4)
    x, reference = (
        torch.randn(100, 8, generator=rng),
        torch.linalg.qr(torch.randn(8, 3, generator=rng)).Q,
    )
    weight = aligned_projection(x, reference)
    for _ in range(20):
        other = weight @ torch.linalg.qr(torch.randn(3, 3, generator=rng)).Q
        assert (weight - reference).norm() < (other - reference).norm()
