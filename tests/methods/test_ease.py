"""EASE: its equations against numpy in float64 and what must hold at the optimum, its refusal, its
seam."""

import numpy as np
import pytest
import torch

from crossfed.methods.ease import METHOD, Config, check_memory, gram, needed_gb, weights
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import Context, Interactions, Scope, generators


@pytest.fixture
def data() -> Interactions:
    rng = np.random.default_rng(0)
    items = np.concatenate([rng.choice(12, 4, replace=False) for _ in range(50)])
    return Interactions.build(50, 12, np.repeat(np.arange(50), 4), items)


@pytest.fixture
def text() -> np.ndarray:
    found = np.random.default_rng(1).normal(size=(12, 5)).astype(np.float32)
    found[3] = 0
    return found


def dense(data: Interactions) -> np.ndarray:
    x = np.zeros((data.n_users, data.n_items))
    x[data.users, data.items] = 1
    return x


def context(data: Interactions, text: np.ndarray) -> Context:
    rng, torch_rng = generators(0, "fit", 1, "shop")
    return Context("shop", "fit", 1, (), rng, torch_rng, torch.device("cpu"), data, {"text": text})


def test_eq_4_is_the_gram_matrix_of_interactions_and_text(data, text):
    """Eq. (4) from the stacked matrix [X; √α Vᵀ], V of rows of length 1, the item without text at
    0."""
    x = dense(data)
    v = text / np.maximum(np.linalg.norm(text, axis=1, keepdims=True), 1e-12)
    for alpha in (0.0, 7.0):
        stacked = np.vstack([x, np.sqrt(alpha) * v.T])
        np.testing.assert_allclose(
            gram(data, text, Config(text=alpha)), stacked.T @ stacked, rtol=1e-5, atol=1e-5
        )


def test_eq_3_is_the_inverse_divided_by_its_diagonal(data, text):
    """Eq. (3) in float64 by numpy."""
    g = gram(data, text, Config())
    p = np.linalg.inv(g.double().numpy() + 3.0 * np.eye(12))
    expected = -p / np.diag(p)[None, :]
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(weights(g, 3.0), expected, rtol=1e-4, atol=1e-6)


def test_eq_2_has_no_better_solution_near_by(data, text):
    """Eq. (2): the gradient of ‖X − XB‖² + λ‖B‖² off the diagonal is nought at B of Eq. (3)."""
    x, l2 = dense(data), 5.0
    b = weights(gram(data, text, Config()), l2).double().numpy()
    gradient = -2 * x.T @ (x - x @ b) + 2 * l2 * b
    off = ~np.eye(12, dtype=bool)
    assert np.abs(gradient[off]).max() < 1e-3 < np.abs(gradient[~off]).min()
    assert not np.diag(b).any()


def test_eq_1_scores_a_history_by_the_weights(data, text):
    """Eq. (1): x_u B."""
    config = Config(l2=5.0, text=2.0)
    state = METHOD.init_domain(config, context(data, text))
    (stage,) = METHOD.stages(config)
    stage.each[0].step(state, {}, context(data, text))
    b = weights(gram(data, text, config), 5.0).numpy()
    users = np.array([49, 0])
    np.testing.assert_allclose(
        METHOD.score(state, users), dense(data)[users] @ b, rtol=1e-4, atol=1e-6
    )


def test_beyond_its_memory_it_refuses_in_words(data, text):
    assert needed_gb(370_000) == pytest.approx(3 * 4 * 370_000**2 / 1e9)
    check_memory("shop", 25_000, 8.0)
    with pytest.raises(
        CrossfedError,
        match=r"Domain shop: EASE over 370,000 items holds 3 dense .* 1,642\.8 "
        r"GB.* allows 8;",
    ):
        check_memory("shop", 370_000, 8.0)
    with pytest.raises(CrossfedError, match="over 12 items"):
        METHOD.init_domain(Config(memory_gb=1e-9), context(data, text))


def test_it_is_local_of_one_round_and_draws_nothing():
    (stage,) = METHOD.stages(Config())
    assert (
        METHOD.scope == Scope.LOCAL and METHOD.deterministic and stage.rounds == 1 and stage.local
    )
