"""Ranking: against a slow version that sorts whole rows by the stated rule, and properties that
must hold.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.candidates import Candidates
from crossfed.platform.evaluation.metrics import per_user_metrics
from crossfed.platform.evaluation.ranking import Ranking, rank


def csr(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([[0], mask.sum(axis=1).cumsum()]), np.nonzero(mask)[1]


def run(
    scores: np.ndarray, seen: np.ndarray, truth: np.ndarray, ks, users=None, **options
) -> Ranking:
    """Rank with whole matrices: scores [n_users, n_items], seen and truth bool of the same
    shape.
    """
    table = torch.as_tensor(scores)
    users = np.arange(len(scores)) if users is None else users
    return rank(
        lambda batch: table[torch.from_numpy(batch)],
        users,
        *csr(seen),
        *csr(truth),
        scores.shape[1],
        ks,
        **options,
    )


def slow(scores, seen, truth, ks, candidates=None) -> tuple[dict, dict]:
    """Sort every row by (score descending, held out last, item ascending); per-user metrics and
    coverage.
    """
    users = [user for user in range(len(scores)) if truth[user].any()]
    depth = max(ks)
    hits, lists = np.zeros((len(users), depth), bool), []
    for row, user in enumerate(users):
        allowed = [item for item in range(scores.shape[1]) if not seen[user, item]]
        if candidates is not None:
            allowed = [
                item for item in allowed if item in candidates.items[user] or truth[user, item]
            ]
        allowed.sort(key=lambda item: (-scores[user, item], truth[user, item], item))
        lists.append(allowed[:depth])
        hits[row, : len(allowed[:depth])] = truth[user, allowed[:depth]]
    n_truth = truth[users].sum(axis=1)
    coverage = {
        f"coverage_at_{k}": len({item for items in lists for item in items[:k]}) / scores.shape[1]
        for k in ks
    }
    return per_user_metrics(hits, n_truth, ks), coverage


def assert_equal_to_slow(ranking: Ranking, scores, seen, truth, ks, candidates=None) -> None:
    per_user, coverage = slow(scores, seen, truth, ks, candidates)
    assert ranking.per_user.keys() == per_user.keys()
    for name, values in per_user.items():
        assert ranking.per_user[name] == pytest.approx(values, abs=1e-12), name
        assert ranking.macro[name] == pytest.approx(values.mean())
    assert {name: ranking.macro[name] for name in coverage} == pytest.approx(coverage)


def random_case(rng: np.random.Generator, n_users: int, n_items: int, values: int | None = None):
    """Scores (drawn from so many distinct values, or all different), seen and truth, disjoint."""
    kind = rng.random((n_users, n_items))
    seen, truth = kind < 0.3, kind > rng.uniform(0.7, 0.99)
    truth[0, 0], seen[0, 0] = True, False
    if values is None:
        scores = rng.permuted(np.arange(n_items) + np.zeros((n_users, 1)), axis=1)
    else:
        scores = rng.integers(0, values, (n_users, n_items)).astype(float)
    return scores, seen, truth


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
@pytest.mark.parametrize("values", [None, 1, 2, 7, 40])
def test_equal_to_sorting_whole_rows(values, dtype):
    scores, seen, truth = random_case(np.random.default_rng(values or 0), 50, 60, values)
    for ks in ([1], [5, 20], [59], [60, 3]):
        assert_equal_to_slow(run(scores.astype(dtype), seen, truth, ks), scores, seen, truth, ks)


cases = st.builds(
    lambda seed, n_users, n_items, values: random_case(
        np.random.default_rng(seed), n_users, n_items, values
    ),
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(2, 15),
    st.one_of(st.none(), st.integers(1, 6)),
)


@settings(deadline=None, max_examples=60)
@given(case=cases, k=st.integers(1, 20), block=st.integers(1, 60))
def test_no_block_size_and_no_cut_off_changes_the_result(case, k, block):
    """Cut-offs beyond the catalogue included: the list is then filled up with misses."""
    assert_equal_to_slow(run(*case, [k], block_entries=block), *case, [k])


@settings(deadline=None, max_examples=40)
@given(case=cases, seed=st.integers(0, 1000))
def test_permuting_users_permutes_values(case, seed):
    order = np.random.default_rng(seed).permutation(len(case[0]))
    straight, permuted = run(*case, [3]), run(*case, [3], users=order)
    place = {user: row for row, user in enumerate(straight.users)}
    rows = [place[user] for user in permuted.users]
    for name, values in straight.per_user.items():
        assert (values[rows] == permuted.per_user[name]).all()
    assert permuted.macro == pytest.approx(straight.macro)


@settings(deadline=None, max_examples=40)
@given(case=cases, extra=st.integers(1, 5), best=st.booleans())
def test_masked_items_change_nothing(case, extra, best):
    """Seen items appended to the catalogue, at the highest or the lowest score, leave every user's
    values as they were.
    """
    scores, seen, truth = case
    more = ((0, 0), (0, extra))
    wider = run(
        np.pad(scores, more, constant_values=np.inf if best else -np.inf),
        np.pad(seen, more, constant_values=True),
        np.pad(truth, more),
        [4],
    )
    for name, values in run(scores, seen, truth, [4]).per_user.items():
        assert (wider.per_user[name] == values).all(), name


@settings(deadline=None, max_examples=40)
@given(case=cases, user=st.integers(0, 11))
def test_raising_a_held_out_item_never_hurts(case, user):
    scores, seen, truth = case
    user %= len(scores)
    if not truth[user].any():
        truth[user], seen[user] = [True] + [False] * (scores.shape[1] - 1), False
    better = scores.copy()
    better[user, np.flatnonzero(truth[user])[0]] += 3
    before, after = run(scores, seen, truth, [1, 3]), run(better, seen, truth, [1, 3])
    assert all(
        (after.per_user[name] >= values - 1e-12).all() for name, values in before.per_user.items()
    )


@pytest.mark.parametrize("place", [0, 4, 9])
def test_a_constant_scorer_puts_the_truth_last(place):
    """Ten items, two of them seen, one held out: its rank is 8 of 8, wherever it stands in the
    catalogue.
    """
    truth, seen = np.zeros((1, 10), bool), np.zeros((1, 10), bool)
    truth[0, place] = True
    seen[0, [1, 2]] = True
    ranking = run(np.ones((1, 10), np.float32), seen, truth, [7, 8])
    assert ranking.macro["hit_rate_at_7"] == 0
    assert ranking.macro["mrr_at_8"] == pytest.approx(1 / 8)


def test_a_tie_counts_against_the_truth():
    """Item 0 is held out and shares its score with 1 and 2; 3 scores less: rank 3."""
    ranking = run(
        np.array([[5.0, 5.0, 5.0, 1.0]]),
        np.zeros((1, 4), bool),
        np.eye(1, 4, dtype=bool),
        [1, 2, 3],
    )
    assert [ranking.macro[f"hit_rate_at_{k}"] for k in (1, 2, 3)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("scores", "dtype"), [([1.0, 1.0 + 1e-12], np.float64), ([2**24, 2**24 + 1], np.int64)]
)
def test_scores_that_single_precision_takes_for_equal_are_told_apart(scores, dtype):
    """The held-out item 1 is ahead by less than float32 can hold; as a tie it would come second."""
    seen, truth = np.zeros((1, 2), bool), np.array([[False, True]])
    assert run(np.array([scores], dtype), seen, truth, [1]).macro["recall_at_1"] == 1


def test_an_expanded_scorer_is_left_alone():
    """A scorer may hand out a view of its own memory, which masking must not write to."""
    popularity = torch.arange(6.0)
    seen, truth = np.zeros((3, 6), bool), np.zeros((3, 6), bool)
    seen[:, 5], truth[:, 4] = True, True
    ranking = rank(
        lambda users: popularity.expand(len(users), 6),
        np.arange(3),
        *csr(seen),
        *csr(truth),
        6,
        [1],
    )
    assert ranking.macro["recall_at_1"] == 1
    assert popularity.tolist() == [0, 1, 2, 3, 4, 5]


def test_minus_infinity_on_an_unseen_item_is_still_better_than_masked():
    """Items 0 and 1 seen; 2 free and 3 held out, both at -inf: ranks 1 and 2, and nothing else is
    recommended.
    """
    seen, truth = np.array([[True, True, False, False]]), np.array([[False, False, False, True]])
    ranking = run(np.array([[9.0, 8.0, -np.inf, -np.inf]]), seen, truth, [1, 2, 4])
    assert [ranking.macro[f"hit_rate_at_{k}"] for k in (1, 2)] == [0, 1]
    assert ranking.macro["coverage_at_4"] == 0.5


def test_users_without_truth_are_left_out():
    truth = np.zeros((3, 5), bool)
    truth[1, 2] = True
    ranking = run(np.arange(15.0).reshape(3, 5), np.zeros((3, 5), bool), truth, [5])
    assert (
        ranking.users.tolist() == [1] and ranking.n_users == 1 and ranking.n_truth.tolist() == [1]
    )
    assert ranking.macro["mrr_at_5"] == pytest.approx(1 / 3)
    assert ranking.candidates == "full:5"


def test_scoring_runs_without_gradients():
    weight = torch.ones(4, requires_grad=True)
    enabled = []

    def score(users):
        enabled.append(torch.is_grad_enabled())
        return weight * torch.arange(4.0).expand(len(users), 4)

    rank(score, np.arange(1), *csr(np.zeros((1, 4), bool)), *csr(np.eye(1, 4, dtype=bool)), 4, [2])
    assert enabled == [False]


def test_candidates_equal_sorting_them():
    rng = np.random.default_rng(5)
    for values in (None, 1, 3):
        scores, seen, truth = random_case(rng, 30, 80, values)
        known = seen | truth
        items = np.stack(
            [np.sort(rng.choice(np.flatnonzero(~row), 9, replace=False)) for row in known]
        )
        candidates = Candidates(np.arange(30), items.astype(np.int32), 80)
        for block in (80, 1000, None):
            ranking = run(
                scores, seen, truth, [1, 5, 15], candidates=candidates, block_entries=block
            )
            assert_equal_to_slow(ranking, scores, seen, truth, [1, 5, 15], candidates)
            assert ranking.candidates == candidates.id


def test_candidates_of_other_users_are_refused():
    candidates = Candidates(np.array([0, 2]), np.zeros((2, 1), np.int32), 4)
    truth = np.eye(2, 4, dtype=bool)
    with pytest.raises(CrossfedError, match="other users or items"):
        run(np.zeros((2, 4)), np.zeros((2, 4), bool), truth, [1], candidates=candidates)


@pytest.mark.parametrize("clash", ["seen", "truth"])
def test_candidates_of_other_data_are_refused(clash):
    """A candidate that the user has seen, or that is held out, was drawn from other
    interactions.
    """
    seen, truth = np.array([[True, False, False, False]]), np.array([[False, True, False, False]])
    candidates = Candidates(
        np.array([0]), np.array([[0 if clash == "seen" else 1, 2]], np.int32), 4
    )
    with pytest.raises(CrossfedError, match="other data"):
        run(np.zeros((1, 4)), seen, truth, [1], candidates=candidates)


@pytest.mark.parametrize("masked", [False, True])
def test_nan_scores_name_user_and_item(masked):
    scores, seen, truth = random_case(np.random.default_rng(0), 6, 8)
    truth[4, 0], seen[4, 0] = True, False
    scores[4, 3], seen[4, 3], truth[4, 3] = np.nan, masked, False
    with pytest.raises(CrossfedError, match="NaN for user row 4, item 3"):
        run(scores, seen, truth, [3], block_entries=16)


@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (3,)])
def test_a_wrong_shape_is_told(shape):
    with pytest.raises(CrossfedError, match=r"must be \(3, 4\)"):
        rank(
            lambda _: torch.zeros(shape),
            np.arange(3),
            *csr(np.zeros((3, 4), bool)),
            *csr(np.ones((3, 4), bool)),
            4,
            [2],
        )


def test_an_item_both_seen_and_held_out_is_a_leak():
    seen, truth = np.zeros((3, 5), bool), np.eye(3, 5, dtype=bool)
    seen[2, 2] = True
    with pytest.raises(CrossfedError, match="item 2 of user row 2"):
        run(np.zeros((3, 5)), seen, truth, [2])


def test_nobody_to_rank_is_an_error():
    with pytest.raises(CrossfedError, match="held-out"):
        run(np.zeros((2, 3)), np.zeros((2, 3), bool), np.zeros((2, 3), bool), [1])


@pytest.mark.parametrize("ks", [[], [0], [-1, 5]])
def test_cut_offs_must_be_positive(ks):
    with pytest.raises(CrossfedError, match="cut-offs"):
        run(np.zeros((1, 3)), np.zeros((1, 3), bool), np.eye(1, 3, dtype=bool), ks)


def test_mrr_without_a_cut_off_is_the_place_of_the_first_hit_in_the_whole_order() -> None:
    """Against a sort of all unseen items by (score falling, free before held out), with many ties,
    in two block sizes.
    """
    rng = np.random.default_rng(0)
    n_users, n_items = 30, 40
    scores = rng.integers(0, 6, (n_users, n_items)).astype(np.float32)
    scores[3] = -np.inf
    items = [rng.permutation(n_items) for _ in range(n_users)]
    seen, truth = [row[:5] for row in items], [row[5 : 5 + rng.integers(1, 4)] for row in items]
    pointers = [
        np.concatenate([[0], np.cumsum([len(row) for row in rows])]) for rows in (seen, truth)
    ]
    flat = [np.concatenate(rows) for rows in (seen, truth)]
    expected = []
    for user in range(n_users):
        left = [i for i in range(n_items) if i not in seen[user]]
        order = sorted(left, key=lambda i, user=user: (-scores[user, i], i in truth[user]))
        expected.append(1 / (1 + min(order.index(i) for i in truth[user])))
    for block in (None, n_items * 4):
        found = rank(
            lambda users: torch.from_numpy(scores[users]),
            np.arange(n_users),
            pointers[0],
            flat[0],
            pointers[1],
            flat[1],
            n_items,
            [5],
            block_entries=block,
            whole=True,
        )
        np.testing.assert_allclose(found.per_user["mrr"], expected)
        assert found.macro["mrr"] == pytest.approx(np.mean(expected))
