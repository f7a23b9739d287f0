"""The residual quantisers: Eq. (2) and Eq. (4) by hand and against plain loops, K-means and
training on made-up vectors.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from crossfed.platform.tokeniser.quantiser import (
    ResidualKMeans,
    ResidualVAE,
    Training,
    colliding_pairs,
    collision,
    entropy_gap,
    kmeans,
    next_residual,
    principal_axes,
    pull,
    quantise,
    revive,
    shuffle_groups,
    soft_codes,
    tokeniser_loss,
)

CODES, LEVELS, DIM, WIDTH = 8, 3, 4, 12
TRAINING = {"batch_size": 64, "lr": 2e-3, "beta": 0.25, "entropy": 0.5, "collision": 50.0}


@pytest.fixture(scope="module")
def vectors() -> torch.Tensor:
    """400 vectors around 30 middles, which have middles of their own; ten of them occur twice."""
    rng = np.random.default_rng(0)
    middles = np.repeat(rng.normal(0, 3, (6, WIDTH)), 5, axis=0) + rng.normal(0, 1, (30, WIDTH))
    x = middles[rng.integers(0, 30, 390)] + rng.normal(0, 0.3, (390, WIDTH)) + 5
    return torch.from_numpy(np.concatenate([x, x[:10]]).astype(np.float32))


def vae(x: torch.Tensor, seed: int = 0, hidden: int = 16) -> ResidualVAE:
    model = ResidualVAE(x.shape[1], DIM, LEVELS, CODES, hidden, torch.Generator().manual_seed(seed))
    model.fit(x, seed)
    return model


# -- Eq. (2) ---------------------------------------------------------------------------------------


def test_eq_2_by_hand() -> None:
    """Eq. (2), two levels on the line: 7 is nearest to 10, leaves -3; of {-4, 0, 1} that is nearest
    to -4, leaves 1.

    2 is nearest to 0, leaves 2, nearest to 1, leaves 1. 5.5 is nearest to 10 (4.5 against 5.5),
    leaves -4.5, takes -4.
    """
    books = torch.tensor([[[0.0], [10.0], [99.0]], [[-4.0], [0.0], [1.0]]])
    codes, residuals, distances = quantise(torch.tensor([[7.0], [2.0], [5.5]]), books)
    assert codes.tolist() == [[1, 0], [0, 2], [1, 0]]
    assert [r.flatten().tolist() for r in residuals] == [[7, 2, 5.5], [-3, 2, -4.5], [1, 1, -0.5]]
    assert distances[0].tolist() == [[49, 9, 92**2], [4, 64, 97**2], [5.5**2, 4.5**2, 93.5**2]]


def test_eq_2_against_a_loop() -> None:
    """Eq. (2) for every row, level and codeword by itself; what the codes add up to plus the last
    residual is the vector.
    """
    g = torch.Generator().manual_seed(1)
    latent, books = torch.randn(50, DIM, generator=g), torch.randn(LEVELS, CODES, DIM, generator=g)
    codes, residuals, _ = quantise(latent, books)
    for row, chosen in zip(latent, codes, strict=True):
        left = row
        for book, code in zip(books, chosen, strict=True):
            assert int(code) == min(range(CODES), key=lambda j: float((left - book[j]).norm()))
            left = left - book[code]
    rebuilt = torch.stack([book[column] for book, column in zip(books, codes.T, strict=True)]).sum(
        0
    )
    torch.testing.assert_close(rebuilt + residuals[-1], latent)


# -- Eq. (4) ---------------------------------------------------------------------------------------


def test_eq_4_by_hand() -> None:
    """Eq. (4): 1 + 0.5 · 2 + 3 · 4 + 10 · 5, and 7 for the codewords."""
    terms = {"recon": 1.0, "commit": 2.0, "codebook": 7.0, "entropy": 4.0, "collision": 5.0}
    loss = tokeniser_loss(
        {key: torch.tensor(value) for key, value in terms.items()}, 0.5, 3.0, 10.0
    )
    assert float(loss) == 1 + 1 + 12 + 50 + 7


def test_pull_by_hand() -> None:
    """Level 1: rows differ by (3, 4) and 0, mean 25/2; level 2: by (0, 1) and (1, 0), mean 1; the
    sum over width 3 is 4.5.
    """
    a = [torch.tensor([[3.0, 4.0], [1.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])]
    b = [torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.zeros(2, 2)]
    assert float(pull(a, b, 3)) == pytest.approx(4.5)


def test_soft_codes_by_hand() -> None:
    """Nearest distances 1 and 3, so T = 2: row one is softmax(-1/2, -5/2)."""
    soft = soft_codes(torch.tensor([[1.0, 5.0], [7.0, 3.0]]))
    assert float(soft[0, 1] / soft[0, 0]) == pytest.approx(math.exp(-2))
    assert float(soft[1, 0] / soft[1, 1]) == pytest.approx(math.exp(-2))
    assert soft.sum(1).tolist() == pytest.approx([1, 1])
    again = soft_codes(1000 * torch.tensor([[1.0, 5.0], [7.0, 3.0]]))
    torch.testing.assert_close(again, soft)


def test_the_temperature_of_soft_codes_is_a_constant_to_the_gradient() -> None:
    """d softmax(-d / T)_k / d d_j = -p_k (1[j = k] - p_j) / T with T held at 2.

    Distances that shrink together change T and the softmax not at all, so that with a gradient
    through T the sum over j of d_j times the gradient would be zero.
    """
    distances = torch.tensor([[1.0, 5.0], [7.0, 3.0]], requires_grad=True)
    soft = soft_codes(distances)
    soft[0, 0].backward()
    p = soft[0].detach()
    expected = torch.stack([-p[0] * (1 - p[0]) / 2, p[0] * p[1] / 2])
    torch.testing.assert_close(distances.grad, torch.stack([expected, torch.zeros(2)]))


def test_entropy_gap_is_zero_for_even_use_and_ln_c_for_one_code() -> None:
    even, one = torch.eye(4).repeat(3, 1), torch.eye(4)[[2] * 12]
    assert float(entropy_gap([even])) == pytest.approx(0, abs=1e-6)
    assert float(entropy_gap([one])) == pytest.approx(math.log(4))
    assert float(entropy_gap([even, one])) == pytest.approx(math.log(4) / 2)
    """Half of the rows on one code, half on another: ln 4 - ln 2."""
    assert float(entropy_gap([torch.eye(4)[[0, 1]]])) == pytest.approx(math.log(2))


def test_colliding_pairs_are_different_vectors_with_one_semantic_id() -> None:
    """Rows 0, 3, 4 share codes; 1 and 2 share codes but are one vector; 5 is alone."""
    codes = torch.tensor([[1, 2], [0, 0], [0, 0], [1, 2], [1, 2], [2, 1]])
    x = torch.tensor([[0.0], [1.0], [1.0], [3.0], [4.0], [5.0]])
    first, second = colliding_pairs(codes, x)
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [(0, 3), (3, 4)]


def test_collision_by_hand() -> None:
    """One colliding pair of three rows. Level 1: both (1, 0), cosine 1. Level 2: (1, 0) and (0.6,
    0.8), cosine 0.6: 0.6 / 3.
    """
    codes, x = torch.tensor([[0, 0], [0, 0], [1, 1]]), torch.arange(3.0).unsqueeze(1)
    soft = [torch.tensor([[1.0, 0], [1, 0], [0, 1]]), torch.tensor([[1.0, 0], [0.6, 0.8], [0, 1]])]
    assert float(collision(soft, codes, x)) == pytest.approx(0.2)
    assert float(collision(soft, codes, torch.zeros(3, 1))) == 0
    assert float(collision(soft, torch.arange(6).view(3, 2), x)) == 0


def test_the_terms_of_a_batch_against_a_loop(vectors: torch.Tensor) -> None:
    """Every term of Eq. (4) from its definition, row by row, for a model that has left its
    start.
    """
    model = vae(vectors)
    Training(model, vectors, epochs=4, seed=0, **TRAINING).epoch()
    x = vectors[:37]
    terms = {name: value.detach() for name, value in model(x).items()}
    recon = commit = 0.0
    with torch.no_grad():
        for row in (x - model.mean) / model.scale:
            latent = left = model.encode(row.unsqueeze(0))
            for book in model.codebooks:
                nearest = book[(left - book).norm(dim=1).argmin()]
                commit += float((left - nearest).square().sum()) / WIDTH / 37
                left = left - nearest
            recon += float((model.decode(latent - left) - row).square().mean()) / 37
    assert float(terms["recon"]) == pytest.approx(recon, rel=1e-4)
    assert float(terms["commit"]) == pytest.approx(commit, rel=1e-4)
    assert float(terms["codebook"]) == pytest.approx(commit, rel=1e-4)
    codes, _, distances = quantise(model.latent(x), model.codebooks)
    soft = [soft_codes(d) for d in distances]
    torch.testing.assert_close(terms["entropy"], entropy_gap(soft))
    torch.testing.assert_close(terms["collision"], collision(soft, codes, x))


def test_where_the_gradients_go(vectors: torch.Tensor) -> None:
    """Commitment moves the encoder only, the codebook loss the codewords only, reconstruction the
    encoder past the rounding.
    """
    x = vectors[:60]

    def moved(*terms: str) -> set[str]:
        model = vae(vectors)
        found = model(x)
        torch.stack([found[term] for term in terms]).sum().backward()
        return {
            name for name, p in model.named_parameters()
            if p.grad is not None and bool(p.grad.abs().sum() > 1e-12)
        }  # fmt: skip

    assert "codebooks" not in moved("commit")
    assert {"into", "down_to.weight"} <= moved("commit")
    assert moved("codebook") == {"codebooks"}
    assert {"into", "out", "down_to.weight", "up_to.weight"} <= moved("recon")
    assert "codebooks" not in moved("recon")
    assert {"codebooks", "into"} <= moved("entropy")


# -- starting values -------------------------------------------------------------------------------


def test_principal_axes_are_scikit_learns(vectors: torch.Tensor) -> None:
    centred = vectors - vectors.mean(0)
    axes = principal_axes(centred, 3)
    peer = PCA(3).fit(centred.numpy()).components_
    np.testing.assert_allclose(np.abs(axes.T.numpy()), np.abs(peer), atol=1e-4)


def test_kmeans_with_few_rows_repeats_a_centre() -> None:
    x = np.array([[0.0, 0], [0, 0], [4, 4], [4, 4], [9, 9]])
    centres = kmeans(x, 5, 0)
    assert centres.shape == (5, 2)
    assert {tuple(row) for row in centres.round(6)} == {(0, 0), (4, 4), (9, 9)}


def test_residual_kmeans_explains_more_with_every_level(vectors: torch.Tensor) -> None:
    """And its errors are what its definition says: PCA to 4, then K-means of what is left, three
    times.
    """
    model = ResidualKMeans(WIDTH, DIM, LEVELS, CODES)
    model.fit(vectors, 0)
    errors = model.errors(vectors)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.5
    x = vectors.numpy().astype(np.float64)
    pca = PCA(DIM).fit(x)
    left = pca.transform(x)
    lost = ((x - pca.inverse_transform(left)) ** 2).sum()
    spread = ((x - x.mean(0)) ** 2).sum()
    for level in range(LEVELS):
        centres = kmeans(left, CODES, level)
        left = left - centres[((left[:, None] - centres[None]) ** 2).sum(-1).argmin(1)]
        assert errors[level] == pytest.approx((lost + (left**2).sum()) / spread, rel=0.05)


def test_the_networks_start_as_residual_kmeans(vectors: torch.Tensor) -> None:
    plain = ResidualKMeans(WIDTH, DIM, LEVELS, CODES)
    plain.fit(vectors, 0)
    model = vae(vectors)
    assert torch.equal(model.codes(vectors), plain.codes(vectors))
    assert model.errors(vectors) == pytest.approx(plain.errors(vectors))


def test_more_columns_than_there_are_is_all_of_them(vectors: torch.Tensor) -> None:
    model = ResidualKMeans(WIDTH, 99, 1, CODES)
    model.fit(vectors, 0)
    latent = model.latent(vectors)
    torch.testing.assert_close(model.decode(latent), model.standardise(vectors), atol=1e-4, rtol=0)


# -- training --------------------------------------------------------------------------------------


def test_training_lowers_error_and_collisions(vectors: torch.Tensor) -> None:
    model = vae(vectors)
    before, started = (
        model.errors(vectors)[-1],
        len(colliding_pairs(model.codes(vectors), vectors)[0]),
    )
    training = Training(model, vectors, epochs=30, seed=0, **TRAINING)
    first = training.epoch()
    for _ in range(29):
        last = training.epoch()
    assert last["recon"] < first["recon"]
    assert model.errors(vectors)[-1] < 0.9 * before
    assert len(colliding_pairs(model.codes(vectors), vectors)[0]) < 0.95 * started


def test_each_regulariser_does_its_work(vectors: torch.Tensor) -> None:
    """Without a weight the same training leaves more collisions, or codes less evenly used."""

    def trained(**weights: float) -> ResidualVAE:
        model = vae(vectors)
        training = Training(
            model,
            vectors,
            epochs=12,
            seed=0,
            **(TRAINING | {"entropy": 0.0, "collision": 0.0} | weights),
        )
        for _ in range(12):
            training.epoch()
        return model

    def pairs(model: ResidualVAE) -> int:
        return len(colliding_pairs(model.codes(vectors), vectors)[0])

    def gap(model: ResidualVAE) -> float:
        distances = quantise(model.latent(vectors), model.codebooks)[2]
        return float(entropy_gap([soft_codes(d) for d in distances]).detach())

    plain = trained()
    assert pairs(trained(collision=50.0)) < pairs(plain)
    assert gap(trained(entropy=5.0)) < gap(plain)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(vectors: torch.Tensor) -> None:
    def trained(seed: int) -> torch.Tensor:
        model = vae(vectors, seed)
        training = Training(model, vectors, epochs=3, seed=seed, **TRAINING)
        for _ in range(3):
            training.epoch()
        return model.codebooks.detach()

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


def test_continuing_equals_going_through(vectors: torch.Tensor) -> None:
    straight = Training(vae(vectors), vectors, epochs=4, seed=0, **TRAINING)
    rows = [straight.epoch() for _ in range(4)]
    first = Training(vae(vectors), vectors, epochs=4, seed=0, **TRAINING)
    assert [first.epoch(), first.epoch()] == rows[:2]
    second = Training(vae(vectors, seed=9), vectors, epochs=4, seed=0, **TRAINING)
    second.load_state_dict(first.state_dict())
    assert [second.epoch(), second.epoch()] == rows[2:]
    assert torch.equal(second.model.codebooks, straight.model.codebooks)


def test_the_learning_rate_falls_along_a_cosine(vectors: torch.Tensor) -> None:
    """lr · ½(1 + cos(π e / E)): 1, ½ (1 + ½√2 …) of lr in four epochs."""
    training = Training(vae(vectors), vectors, epochs=4, seed=0, **TRAINING)
    seen = []
    for _ in range(4):
        training.epoch()
        seen.append(training.optimiser.param_groups[0]["lr"])
    assert seen == pytest.approx(
        [2e-3 * f for f in (1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2)]
    )


def test_the_parts_of_two_workers_are_a_whole_batch(vectors: torch.Tensor) -> None:
    """Every vector is in exactly one worker's part, and each epoch's order differs."""
    seen: list[list[torch.Tensor]] = []
    for rank in range(2):
        parts: list[torch.Tensor] = []

        class Spy(torch.nn.Module):
            def __init__(self, inner: torch.nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                parts.append(x)  # noqa: B023
                return self.inner(x)

        training = Training(
            vae(vectors), vectors, epochs=1, seed=0, wrap=Spy, rank=rank, workers=2, **TRAINING
        )
        training.epoch()
        seen.append(parts)
    both = torch.cat([part for parts in zip(*seen, strict=True) for part in parts])
    assert sorted(both.tolist()) == sorted(vectors.tolist())
    assert max(len(part) for parts in seen for part in parts) <= 35


def test_groups_stay_together_in_a_random_order() -> None:
    codes = torch.tensor([[0, 1], [2, 2], [0, 1], [1, 1], [2, 2], [0, 1]])
    orders = {
        tuple(shuffle_groups(codes, torch.Generator().manual_seed(seed)).tolist())
        for seed in range(40)
    }
    assert orders == {
        (0, 2, 5, 1, 4, 3), (0, 2, 5, 3, 1, 4), (1, 4, 0, 2, 5, 3),
        (1, 4, 3, 0, 2, 5), (3, 0, 2, 5, 1, 4), (3, 1, 4, 0, 2, 5),
    }  # fmt: skip


def test_unused_codewords_are_moved_to_where_vectors_are(vectors: torch.Tensor) -> None:
    """Three codewords far away are dead; moved, each lies on a residual of its level and is used,
    and the error falls.
    """
    model = vae(vectors)
    with torch.no_grad():
        model.codebooks[1, :3] = 1e4
    before = model.errors(vectors)
    assert revive(model, vectors, torch.Generator().manual_seed(0)) == 3
    left = next_residual(model.latent(vectors), model.codebooks[0])[1]
    for word in model.codebooks[1, :3]:
        assert float((left - word).square().sum(1).min()) < 1e-10
    assert set(range(3)) <= set(model.codes(vectors)[:, 1].tolist())
    assert model.errors(vectors)[1] < before[1]
    assert revive(model, vectors, torch.Generator().manual_seed(0)) == 0


def test_more_codewords_than_residuals_are_left_alone() -> None:
    """Four vectors, eight codes: level one takes each vector, so nothing is left to move the other
    codewords to.
    """
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    model = vae(x)
    assert model.errors(x)[0] < 1e-6
    kept = model.codebooks[0].clone()
    assert len(set(map(tuple, model.codes(x).tolist()))) == 4
    assert torch.equal(model.codebooks[0], kept)


def test_rows_of_one_value_do_not_divide_by_zero() -> None:
    model = vae(torch.ones(20, WIDTH))
    assert torch.isfinite(model.codebooks).all()
    assert model.errors(torch.ones(20, WIDTH)) == [0, 0, 0]
