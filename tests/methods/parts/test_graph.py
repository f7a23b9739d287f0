"""Adjacencies and propagation against dense matrices, torch-geometric's LGConv, and properties that
must hold.
"""

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import LGConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import coalesce, to_undirected

from crossfed.methods.parts.graph import (
    Pattern,
    bipartite_adjacency,
    bipartite_pattern,
    distinct,
    edge_products,
    normalised_weights,
    propagate,
    rows_adjoint,
    rows_of,
    rows_product,
    spmm,
    symmetric_adjacency,
    weighted_product,
)


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
    # the pair (0, 1) comes twice
    adj = bipartite_adjacency(3, 2, np.array([0, 0, 1, 0]), np.array([0, 1, 1, 1]))
    half = 2**-0.5
    r = torch.tensor([[half, 0.5], [0, half], [0, 0]])
    expected = torch.zeros(5, 5)
    expected[:3, 3:], expected[3:, :3] = r, r.T
    torch.testing.assert_close(adj.to_dense(), expected)
    assert adj.layout == torch.sparse_csr
    assert adj.dtype == torch.float32


def test_bipartite_keeps_the_square_roots_of_the_degrees(pairs):
    """Ã D^1/2 1 = D^1/2 1: the eigenvector of eigenvalue 1 of a symmetric normalisation, of this
    one only.
    """
    adj = bipartite_adjacency(30, 20, *pairs)
    degree = (adj.to_dense() > 0).sum(1).float().sqrt()
    torch.testing.assert_close(adj @ degree[:, None], degree[:, None])
    assert torch.linalg.eigvalsh(adj.to_dense()).abs().max() <= 1 + 1e-5


@pytest.mark.parametrize("edges", [0, 5, 400])
def test_both_adjacencies_are_bit_for_bit_those_of_torch_geometric(edges):
    """The oracle: torch-geometric's coalesce, to_undirected and gcn_norm, which training does not
    import.
    """
    draw = torch.Generator().manual_seed(edges)
    users, items = (torch.randint(0, size, (edges,), generator=draw) for size in (30, 20))
    weights = torch.rand(edges, generator=draw)
    twice = to_undirected(coalesce(torch.stack([users, items + 30]), num_nodes=50), num_nodes=50)
    weighted = to_undirected(torch.stack([users, items]), weights, num_nodes=30, reduce="max")
    for adj, (of, weight), n in (
        (bipartite_adjacency(30, 20, users, items), (twice, torch.ones(twice.shape[1])), 50),
        (symmetric_adjacency(30, users, items, weights), weighted, 30),
    ):
        expected_edges, expected = gcn_norm(of, weight, n, add_self_loops=False)
        assert torch.equal(adj.values(), expected)
        assert torch.equal(adj.col_indices().long(), expected_edges[1])
        assert torch.equal(
            adj.crow_indices().long().diff(), torch.bincount(expected_edges[0], minlength=n)
        )


@pytest.mark.parametrize(
    ("users", "items"), [([0, 3], [0, 0]), ([0], [-1]), ([0, 1], [0]), ([[0]], [[0]])]
)
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
    torch.testing.assert_close(
        adj.to_dense(), torch.tensor([[0, 3 / 12**0.5], [3 / 12**0.5, 0.25]])
    )


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
    """The oracle: torch-geometric's LGConv on an EdgeIndex, its own normalisation, layers averaged;
    gradients by autograd.
    """
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


# --- Learned edge weights ---


def weighted_graph() -> tuple[Pattern, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Edges out of order over 5 users and 4 items, weights, and the dense symmetric matrix they
    make.
    """
    # user 2 has no edge
    users, items = torch.tensor([3, 0, 0, 4, 1, 3]), torch.tensor([2, 1, 0, 2, 3, 0])
    weights = torch.tensor([0.5, 0.1, 0.9, 0.3, 0.7, 0.2])
    return bipartite_pattern(5, 4, users, items), weights, users, items


def dense_of(weights: torch.Tensor, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    r = torch.zeros(5, 4, dtype=weights.dtype).index_put((users, items), weights)
    top, bottom = torch.zeros(5, 5, dtype=weights.dtype), torch.zeros(4, 4, dtype=weights.dtype)
    return torch.cat([torch.cat([top, r], 1), torch.cat([r.T, bottom], 1)])


def test_a_pattern_places_the_weights():
    pattern, weights, users, items = weighted_graph()
    torch.testing.assert_close(
        pattern.matrix(weights[pattern.edge]).to_dense(), dense_of(weights, users, items)
    )


def test_normalised_weights_against_dense():
    pattern, weights, users, items = weighted_graph()
    dense = dense_of(weights, users, items)
    root = torch.diag((dense.sum(1) + 0.05).rsqrt())
    values = normalised_weights(pattern, weights, floor=0.05)
    torch.testing.assert_close(pattern.matrix(values).to_dense(), root @ dense @ root)


def test_the_gradients_of_learned_weights_are_those_of_dense_autograd():
    """Product and normalisation, to weights and vectors, through two steps."""
    pattern, weights, users, items = weighted_graph()
    x, probe = torch.randn(9, 3), torch.randn(9, 3)
    results = []
    for fast in (True, False):
        w, v = weights.clone().requires_grad_(), x.clone().requires_grad_()
        if fast:
            values = normalised_weights(pattern, w)
            out = weighted_product(pattern, values, weighted_product(pattern, values, v))
        else:
            dense = dense_of(w, users, items)
            root = torch.diag((dense.sum(1) + 1e-3).rsqrt())
            adj = root @ dense @ root
            out = adj @ (adj @ v)
        results.append((out, *torch.autograd.grad((out * probe).sum(), [w, v])))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow)


def test_weights_of_nothing_stay_finite():
    """A node all of whose edges weigh nothing: no division by zero, in the gradient neither."""
    pattern, weights, _, _ = weighted_graph()
    w = torch.zeros_like(weights).requires_grad_()
    values = normalised_weights(pattern, w)
    (grad,) = torch.autograd.grad(values.sum(), [w])
    assert values.abs().max() == 0 and grad.isfinite().all()


def test_edge_products_against_dense():
    pattern, _, users, items = weighted_graph()
    x, probe = torch.randn(9, 3, requires_grad=True), torch.randn(6)
    fast, slow = edge_products(pattern, x), (x[users] * x[items + 5]).sum(1)
    torch.testing.assert_close(fast, slow)
    for a, b in zip(
        *(torch.autograd.grad((out * probe).sum(), [x]) for out in (fast, slow)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_a_pattern_without_edges():
    none = torch.zeros(0, dtype=torch.int64)
    pattern = bipartite_pattern(2, 2, none, none)
    values = normalised_weights(pattern, torch.zeros(0))
    assert torch.equal(weighted_product(pattern, values, torch.ones(4, 3)), torch.zeros(4, 3))
    assert edge_products(pattern, torch.ones(4, 3)).shape == (0,)


@pytest.mark.parametrize("rows", [[], [0], [49], [3, 7, 8, 31, 44], [9, 2, 2], list(range(50))])
def test_some_rows_of_a_product_with_its_gradient(pairs, rows):
    """Against the whole product: no rows, some unordered or twice, all (which go another way)."""
    adj = bipartite_adjacency(30, 20, *pairs)
    chosen = torch.tensor(rows, dtype=torch.int64)
    some = rows_of(adj, chosen)
    assert torch.equal(some.to_dense(), adj.to_dense()[chosen])
    x = torch.randn(50, 4, requires_grad=True)
    actual, expected = rows_product(adj, chosen, x), (adj.to_dense() @ x)[chosen]
    torch.testing.assert_close(actual, expected)
    direction = torch.randn(len(rows), 4)
    (mine,) = torch.autograd.grad(actual, x, direction)
    (other,) = torch.autograd.grad(expected, x, direction)
    torch.testing.assert_close(mine, other)
    expected = adj.to_dense()[:, chosen] @ direction
    torch.testing.assert_close(rows_adjoint(adj, chosen, some, direction), expected)


def test_rows_of_an_isolated_node_are_empty():
    adj = bipartite_adjacency(3, 2, np.array([0]), np.array([1]))
    some = torch.tensor([1, 0, 2])
    torch.testing.assert_close(rows_of(adj, some).to_dense(), adj.to_dense()[[1, 0, 2]])
    assert (rows_product(adj, some, torch.ones(5, 2))[[0, 2]] == 0).all()


@pytest.mark.parametrize("nodes", [[], [4], [7, 0, 7, 3, 3, 9]])
def test_distinct_is_torchs_unique(nodes):
    numbers = torch.tensor(nodes, dtype=torch.int64)
    expected = torch.unique(numbers, return_inverse=True)
    for mine, other in zip(distinct(numbers, 10), expected, strict=True):
        assert torch.equal(mine, other)
