"""Splits: counts by RecBole's rule, order by time, draws that other users do not shift, leaks
refused.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfed.platform.data.splits import SPLITS, assign, check_leakage, ratio_counts, share_of
from crossfed.platform.errors import CrossfedError


def recbole_counts(n: int, ratios: tuple[float, ...] = (0.8, 0.1, 0.1)) -> list[int]:
    """RecBole 1.2's `_calcu_split_ids`, followed line by line."""
    counts = [int(ratio * n) for ratio in ratios]
    counts[0] = n - sum(counts[1:])
    for i in range(1, len(ratios)):
        if counts[0] <= 1:
            break
        if 0 < ratios[-i] * n < 1:
            counts[-i] += 1
            counts[0] -= 1
    return counts


def domain(seed: int = 0, n_users: int = 40, n_items: int = 60, low: int = 1, high: int = 35):
    """Random interactions without repeated pairs, in shuffled order, with many equal times."""
    rng = np.random.default_rng(seed)
    rows = [
        (u, i) for u in range(n_users) for i in rng.permutation(n_items)[: rng.integers(low, high)]
    ]
    users, items = np.array(rows, np.int64)[rng.permutation(len(rows))].T
    return users, items, rng.integers(0, 12, len(users)), n_users


def test_ratio_counts_are_recboles():
    n = np.arange(1, 400)
    assert np.column_stack(ratio_counts(n)).tolist() == [recbole_counts(int(i)) for i in n]


def test_ratio_counts_by_hand():
    """n=1: train keeps it. n=2: test takes one, then train has one left. n=9: both take one. n=10:
    one each by floor. n=25: floor(2.5)=2 each, 21 left."""
    assert [c.tolist() for c in ratio_counts(np.array([1, 2, 9, 10, 25]))] == [
        [1, 1, 7, 8, 21],
        [0, 0, 1, 1, 2],
        [0, 1, 1, 1, 2],
    ]


@pytest.mark.parametrize("rule", ["ratio-80-10-10", "ratio-80-10-10-time"])
def test_every_user_gets_those_counts(rule):
    users, items, times, n_users = domain()
    split = assign(users, items, times, n_users, rule)
    for user in range(n_users):
        of_user = split[users == user]
        assert np.bincount(of_user, minlength=3).tolist() == recbole_counts(len(of_user))


def test_random_draw_is_by_seed_and_not_shifted_by_other_users():
    users, items, times, n_users = domain()
    split = assign(users, items, times, n_users, "ratio-80-10-10", seed=3)
    assert (split == assign(users, items, times, n_users, "ratio-80-10-10", seed=3)).all()
    assert (split != assign(users, items, times, n_users, "ratio-80-10-10", seed=4)).any()
    keep = users % 3 != 0  # a third of the users leaves, the rows come in another order
    order = np.random.default_rng(1).permutation(np.flatnonzero(keep))
    again = assign(users[order], items[order], times[order], n_users, "ratio-80-10-10", seed=3)
    assert (again == split[order]).all()


def test_random_draw_is_even():
    """Each of 20 items is in test with probability 2/20; over 4000 users the share's standard error
    is 0.0047.
    """
    users, items = np.repeat(np.arange(4000), 20), np.tile(np.arange(20), 4000)
    split = assign(users, items, np.zeros(80000), 4000, "ratio-80-10-10", seed=5)
    shares = np.bincount(items[split == 2], minlength=20) / 4000
    assert np.abs(shares - 0.1).max() < 4 * 0.0047


def slow(users, items, times, rule):
    """Per user: sort by (time, given order), then cut."""
    split = np.zeros(len(users), int)
    for user in set(users.tolist()):
        rows = sorted(np.flatnonzero(users == user), key=lambda row: (times[row], row))
        if rule == "leave-one-out":
            validation, test = (1, 1) if len(rows) >= 3 else (0, 0)
        else:
            _, validation, test = recbole_counts(len(rows))
        n = len(rows)
        split[rows[n - validation - test : n - test]] = 1
        split[rows[n - test :]] = 2
    return split


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["ratio-80-10-10-time", "leave-one-out"]))
def test_time_rules_equal_a_slow_version(seed, rule):
    users, items, times, n_users = domain(seed, n_users=15, n_items=30, high=20)
    assert (
        assign(users, items, times, n_users, rule).tolist()
        == slow(users, items, times, rule).tolist()
    )


def test_leave_one_out_ties_follow_the_given_order():
    """User 0's three interactions are at one time: the last given is the test. User 1 has two: all
    train.
    """
    users, items, times = [0, 0, 0, 1, 1], [7, 3, 5, 7, 3], [4, 4, 4, 1, 2]
    assert assign(users, items, times, 2, "leave-one-out").tolist() == [0, 1, 2, 0, 0]


def test_temporal_cut_by_hand():
    """Times 1…10: 8 of 10 are at or before 8, 9 of 10 at or before 9."""
    n = np.arange(10)
    assert assign(n, n, n + 1, 10, "temporal-cut").tolist() == [0] * 8 + [1, 2]


def test_temporal_cut_keeps_equal_times_together():
    users, items, times, n_users = domain(3)
    split = assign(users, items, times, n_users, "temporal-cut")
    assert all(len(set(split[times == t])) == 1 for t in set(times))
    assert (
        times[split == 0].max()
        < times[split == 1].min()
        <= times[split == 1].max()
        < times[split == 2].min()
    )


@pytest.mark.parametrize("rule", SPLITS)
def test_own_splits_pass_the_leakage_check(rule):
    users, items, times, n_users = domain(7)
    split = assign(users, items, times, n_users, rule)
    check_leakage(users, items, times, split, rule)
    assert split.dtype == np.int8


@pytest.mark.parametrize("rule", SPLITS)
def test_a_pair_in_two_splits_is_refused(rule):
    users, items, times, n_users = domain(7)
    train, test = np.flatnonzero(users == 1)[:2]
    items[test] = items[train]
    with pytest.raises(CrossfedError, match=r"User 1 has item \d+ more than once"):
        assign(users, items, times, n_users, rule)


@pytest.mark.parametrize("rule", ["ratio-80-10-10-time", "leave-one-out", "temporal-cut"])
def test_a_swap_against_time_is_refused(rule):
    users, items, times = np.repeat([0, 1], 10), np.arange(20), np.arange(20)
    split = assign(users, items, times, 2, rule)
    swapped = split.copy()
    first, last = (10, 19)  # user 1's first and last
    swapped[[first, last]] = split[[last, first]]
    with pytest.raises(CrossfedError, match="out of time order"):
        check_leakage(users, items, times, swapped, rule)


@pytest.mark.parametrize(("times", "part"), [([1, 2, 2, 3], "train"), ([1, 1, 2, 2], "validation")])
def test_a_temporal_cut_may_not_part_equal_times(times, part):
    """Rows 0 and 1 are train, row 2 is validation, row 3 is test; one time stands on both sides of
    a cut.
    """
    with pytest.raises(CrossfedError, match=f"out of time order: the {part} part reaches to 2"):
        check_leakage([0, 1, 2, 3], [0, 1, 2, 3], times, [0, 0, 1, 2], "temporal-cut")


def test_two_held_out_interactions_are_refused():
    users, items, times = np.zeros(5, int), np.arange(5), np.arange(5)
    with pytest.raises(CrossfedError, match="holds out 2 test interactions of user 0"):
        check_leakage(users, items, times, [0, 0, 1, 2, 2], "leave-one-out")


def test_labels_are_checked():
    with pytest.raises(CrossfedError, match="label 0, 1 or 2"):
        check_leakage([0, 0], [0, 1], [0, 0], [0, 3], "ratio-80-10-10")


@pytest.mark.parametrize(
    ("rows", "rule", "words"),
    [
        (
            ([0, 0], [0, 1], [0, 1]),
            "thirds",
            "Unknown split 'thirds'; choose one of ratio-80-10-10",
        ),
        (([], [], []), "leave-one-out", "no interactions"),
        (
            ([0, 0], [0, 1], [0, 1]),
            "leave-one-out",
            "no validation interactions because every user has too few",
        ),
        (
            ([0, 1, 2], [0, 1, 2], [5, 5, 5]),
            "temporal-cut",
            "no validation interactions because all times",
        ),
    ],
)
def test_impossible_splits(rows, rule, words):
    with pytest.raises(CrossfedError, match=words):
        assign(*rows, 3, rule)


def test_shares_are_nested_and_drawn_apart_from_the_split():
    rng = np.random.default_rng(3)
    users, items = np.unique(rng.integers(0, [200, 300], (20_000, 2)), axis=0).T
    kept = {share: share_of(users, items, share, 7) for share in (0.2, 0.6, 1.0)}
    assert [mask.sum() for mask in kept.values()] == [round(share * len(users)) for share in kept]
    assert (kept[0.2] <= kept[0.6]).all() and kept[1.0].all()
    order = rng.permutation(len(users))
    assert np.array_equal(share_of(users[order], items[order], 0.2, 7), kept[0.2][order])
    assert not np.array_equal(share_of(users, items, 0.2, 8), kept[0.2])
    assert share_of(users[:3], items[:3], 0.01, 7).sum() == 1
    parts = assign(users, items, np.zeros(len(users)), 200, "ratio-80-10-10", 7)
    for part in range(3):  # of every part of the split alike
        assert kept[0.2][parts == part].mean() == pytest.approx(0.2, abs=0.03)
