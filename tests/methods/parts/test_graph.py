"""Adjacencies and propagation against dense matrices, torch-geometric's LGConv, and properties that must hold."""

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import LGConv

from crossfed.methods.parts.graph import bipartite_adjacency, propagate, spmm, symmetric_adjacency


@pytest.fixture
def pairs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.integers(0, 30, 200), rng.integers(0, 20, 200)


def dense_normalised(weights: torch.Tensor) -> torch.Tensor:
    scale = weights.sum(1).pow(-0.5)
    scale[scale.isinf()] = 0
    return scale[:, None] * weights * scale[None, :]


def test_bipartite_by_hand():
    """User 0 has items 0 and 1, user 1 has item 1, user 2 nothing. Degrees: u 2, 1, 0; i 1, 2.

    Entries 1/√(|N_u||N_i|): (u0, i0) 1/√2, (u0, i1) 1/2, (u1, i1) 1/√2.
    """
    adj = bipartite_adjacency(3, 2, np.array([0, 0, 1, 0]), np.array([0, 1, 1, 1]))  # the pair (0, 1) comes twice
    half = 2**-0.5
    r = torch.tensor([[half, 0.5], [0, half], [0, 0]])
    expected = torch.zeros(5, 5)
    expected[:3, 3:], expected[3:, :3] = r, r.T
    torch.testing.assert_close(adj.to_dense(), expected)
    assert adj.layout == torch.sparse_csr
    assert adj.dtype == torch.float32


def test_bipartite_keeps_the_square_roots_of_the_degrees(pairs):
    """Ã D^1/2 1 = D^1/2 1: the eigenvector of eigenvalue 1 of a symmetric normalisation, of this one only."""
    adj = bipartite_adjacency(30, 20, *pairs)
    degree = (adj.to_dense() > 0).sum(1).float().sqrt()
    torch.testing.assert_close(adj @ degree[:, None], degree[:, None])
    assert torch.linalg.eigvalsh(adj.to_dense()).abs().max() <= 1 + 1e-5


@pytest.mark.parametrize(("users", "items"), [([0, 3], [0, 0]), ([0], [-1]), ([0, 1], [0]), ([[0]], [[0]])])
def test_bipartite_refuses_what_does_not_fit(users, items):
    with pytest.raises(ValueError, match=r"numbers must be in|vectors of one length"):
        bipartite_adjacency(3, 2, np.array(users), np.array(items))


def test_symmetric_adjacency_against_dense():
    rng = np.random.default_rng(1)
    rows, cols = rng.integers(0, 12, 40), rng.integers(0, 12, 40)
    weights = torch.from_numpy(rng.random(40, np.float32))
    dense = torch.zeros(13, 13)  # node 12 has no edge
    for row, col, weight in zip(rows, cols, weights, strict=True):
        dense[row, col] = dense[col, row] = max(dense[row, col], weight)
    adj = symmetric_adjacency(13, rows, cols, weights)
    torch.testing.assert_close(adj.to_dense(), dense_normalised(dense))
    torch.testing.assert_close(adj.to_dense(), adj.to_dense().T)


def test_symmetric_adjacency_adds_no_self_loops_and_keeps_given_ones():
    """Edges 0–1 (weight 3) and 1–1 (weight 1): degrees 3 and 4; entries 3/√12 and 1/4."""
    adj = symmetric_adjacency(2, np.array([0, 1]), np.array([1, 1]), torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(adj.to_dense(), torch.tensor([[0, 3 / 12**0.5], [3 / 12**0.5, 0.25]]))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_symmetric_adjacency_refuses_bad_weights(weight):
    with pytest.raises(ValueError, match="finite and non-negative"):
        symmetric_adjacency(2, np.array([0]), np.array([1]), torch.tensor([weight]))


def test_symmetric_adjacency_refuses_bad_indices():
    with pytest.raises(ValueError, match="column numbers must be in 0 … 1"):
        symmetric_adjacency(2, np.array([0]), np.array([2]), torch.tensor([1.0]))


def test_empty_graph_propagates_nothing():
    adj = symmetric_adjacency(3, np.array([], np.int64), np.array([], np.int64), torch.tensor([]))
    torch.testing.assert_close(propagate(adj, torch.ones(3, 2), 1), torch.full((3, 2), 0.5))


def test_spmm_and_its_gradient(pairs):
    adj = bipartite_adjacency(30, 20, *pairs)
    x = torch.randn(50, 4, requires_grad=True)
    grad = torch.randn(50, 4)
    product = spmm(adj, x)
    product.backward(grad)
    torch.testing.assert_close(product, adj.to_dense() @ x)
    torch.testing.assert_close(x.grad, adj.to_dense().T @ grad)


def test_spmm_takes_a_broadcast_gradient(pairs):
    """`sum` hands back a gradient without storage of its own."""
    adj = bipartite_adjacency(30, 20, *pairs)
    x = torch.randn(50, 4, requires_grad=True)
    spmm(adj, x).sum().backward()
    torch.testing.assert_close(x.grad, adj.to_dense().sum(0)[:, None].expand(50, 4))


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_propagate_against_lgconv(pairs, layers):
    """The oracle: torch-geometric's LGConv on an EdgeIndex, its own normalisation, layers averaged; gradients by autograd."""
    users, items = torch.unique(torch.from_numpy(np.stack(pairs)), dim=1)
    both = torch.cat([torch.stack([users, items + 30]), torch.stack([items + 30, users])], 1)
    edges = EdgeIndex(both, sparse_size=(50, 50), is_undirected=True).sort_by("col").values
    x = torch.randn(50, 8, requires_grad=True)
    conv, out, total = LGConv(), x, x
    for _ in range(layers):
        out = conv(out, edges)
        total = total + out
    expected = total / (layers + 1)
    grad = torch.randn(50, 8)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)

    actual = propagate(bipartite_adjacency(30, 20, *pairs), x, layers)
    (actual_grad,) = torch.autograd.grad(actual, x, grad)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual_grad, expected_grad)


def test_propagate_leaves_its_input_alone(pairs):
    adj, x = bipartite_adjacency(30, 20, *pairs), torch.randn(50, 3)
    before = x.clone()
    for layers in (0, 2):
        propagate(adj, x, layers).zero_()
    assert torch.equal(x, before)


def test_propagate_refuses_negative_layers(pairs):
    with pytest.raises(ValueError, match="must not be negative"):
        propagate(bipartite_adjacency(30, 20, *pairs), torch.ones(50, 1), -1)
