"""Crop, mask and reorder against what they keep, by hand and over many draws."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfed.methods.parts.augmentation import crop, mask, reorder, two_views

TOKEN = 999


def batch(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Row r holds 100 r + 1, 100 r + 2, …: an item tells its row and its place."""
    count = np.array(sizes, np.int64)
    place = np.arange(count.max())
    items = np.where(place < count[:, None], 100 * np.arange(len(sizes))[:, None] + place + 1, 0)
    return items, count


def repeated(size: int, times: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    return np.tile(np.arange(1, size + 1), (times, 1)), np.full(times, size)


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=6)
SHARE = st.floats(0.05, 1.0)


@settings(max_examples=80, deadline=None)
@given(SIZES, SHARE, st.integers(0, 9))
def test_eq_3_a_crop_is_a_run_of_the_sequence(sizes, share, seed):
    """Eq. (3): max(1, ⌊η n⌋) items that follow each other, at the row's start, zeros after them."""
    items, count = batch(sizes)
    made, kept = crop(items, count, share, np.random.default_rng(seed))
    assert kept.tolist() == [max(1, int(np.floor(share * n))) for n in sizes]
    for row, (n, size) in enumerate(zip(kept, sizes, strict=True)):
        run = made[row, :n]
        assert (np.diff(run) == 1).all() and run[0] > 100 * row and run[-1] <= 100 * row + size
        assert (made[row, n:] == 0).all()


def test_eq_3_starts_anywhere_alike():
    """Of 5 items 3 are kept: the three possible starts come a third of the time each."""
    made, _ = crop(*repeated(5), 0.6, np.random.default_rng(0))
    shares = np.bincount(made[:, 0], minlength=5)[1:4] / len(made)
    assert shares.sum() == 1 and np.abs(shares - 1 / 3).max() < 0.03


@settings(max_examples=80, deadline=None)
@given(SIZES, st.floats(0.0, 1.0), st.integers(0, 9))
def test_eq_4_a_mask_hides_so_many_and_leaves_the_rest(sizes, share, seed):
    """Eq. (4): ⌊γ n⌋ tokens, all others in their places."""
    items, count = batch(sizes)
    made, kept = mask(items, count, share, TOKEN, np.random.default_rng(seed))
    assert kept.tolist() == sizes
    hidden = made == TOKEN
    assert hidden.sum(1).tolist() == [int(np.floor(share * n)) for n in sizes]
    assert not hidden[items == 0].any() and (made[~hidden] == items[~hidden]).all()


def test_eq_4_hides_every_place_alike():
    made, _ = mask(*repeated(5), 0.4, TOKEN, np.random.default_rng(0))
    assert np.abs((made == TOKEN).mean(0) - 0.4).max() < 0.03


@settings(max_examples=80, deadline=None)
@given(SIZES, st.floats(0.0, 1.0), st.integers(0, 9))
def test_eq_5_reorders_within_one_stretch(sizes, share, seed):
    """Eq. (5): the same items, and what is out of place lies within ⌊β n⌋ places in a row."""
    items, count = batch(sizes)
    made, kept = reorder(items, count, share, np.random.default_rng(seed))
    assert kept.tolist() == sizes
    for row, n in enumerate(sizes):
        assert sorted(made[row, :n]) == sorted(items[row, :n])
        assert (made[row, n:] == 0).all()
        moved = np.flatnonzero(made[row] != items[row])
        assert not len(moved) or moved[-1] - moved[0] < int(np.floor(share * n))


def test_eq_5_every_order_of_every_stretch_comes_alike():
    """Of 4 items 3 are shuffled, from the first or the second: 12 cases, the identity twice."""
    made, _ = reorder(*repeated(4, 12_000), 0.75, np.random.default_rng(0))
    seen = {tuple(row): 0 for row in made.tolist()}
    for row in made.tolist():
        seen[tuple(row)] += 1
    expected: dict[tuple[int, ...], int] = {}
    for p in permutations((1, 2, 3)):
        expected[(*p, 4)] = expected.get((*p, 4), 0) + 1
    for p in permutations((2, 3, 4)):
        expected[(1, *p)] = expected.get((1, *p), 0) + 1
    assert seen.keys() == expected.keys()
    for order, times in expected.items():
        assert seen[order] / 12_000 == pytest.approx(times / 12, abs=0.015)


def test_sequences_stay_as_they_are():
    """No operator writes into what it is given, nor hands it back."""
    items, count = batch([7, 3, 1, 10])
    before = items.copy(), count.copy()
    rng = np.random.default_rng(0)
    for made in (
        crop(items, count, 0.5, rng),
        mask(items, count, 0.5, TOKEN, rng),
        reorder(items, count, 0.8, rng),
        two_views(items, count, ("crop", "mask", "reorder"), (0.5, 0.5, 0.8), TOKEN, rng),
        two_views(items, count, ("mask",), (1.0, 0.0, 0.0), TOKEN, rng),
    ):
        made[0][:] = -1
        made[1][:] = -1
        assert (items == before[0]).all() and (count == before[1]).all()


def test_read_only_sequences_will_do():
    items, count = batch([7, 3])
    items.flags.writeable = count.flags.writeable = False
    rng = np.random.default_rng(0)
    two_views(items, count, ("crop", "mask", "reorder"), (0.5, 0.5, 0.8), TOKEN, rng)


def kind(view: np.ndarray, n: int) -> str:
    if n < 10:
        return "crop"
    return "mask" if (view == TOKEN).any() else "reorder"


def test_the_two_views_are_by_different_operators_drawn_alike():
    """Six ordered pairs, a sixth of the time each."""
    items, count = repeated(10, 6000)
    views, sizes = two_views(
        items, count, ("crop", "mask", "reorder"), (0.6, 0.3, 1.0), TOKEN, np.random.default_rng(0)
    )
    kinds = [kind(view, n) for view, n in zip(views, sizes, strict=True)]
    pairs = list(zip(kinds[:6000], kinds[6000:], strict=True))
    assert {pair for pair in pairs if pair[0] == pair[1]} == set()
    for pair in permutations(("crop", "mask", "reorder"), 2):
        assert pairs.count(pair) / 6000 == pytest.approx(1 / 6, abs=0.02)


def test_views_use_their_own_shares_and_rows():
    """Row n and row b + n are views of sequence n; crop has η, mask γ, reorder β."""
    items, count = batch([10] * 40)
    views, sizes = two_views(
        items, count, ("crop", "mask", "reorder"), (0.6, 0.3, 0.2), TOKEN, np.random.default_rng(1)
    )
    for row, (view, n) in enumerate(zip(views, sizes, strict=True)):
        real = view[:n][view[:n] != TOKEN]
        assert ((real - 1) // 100 == row % 40).all()
        if kind(view, n) == "crop":
            assert n == 6
        elif kind(view, n) == "mask":
            assert (view == TOKEN).sum() == 3
        else:
            moved = np.flatnonzero(view != items[row % 40])
            assert len(moved) in (0, 2)


@pytest.mark.parametrize("only", ["crop", "mask", "reorder"])
def test_a_single_operator_makes_both_views(only):
    items, count = repeated(10, 50)
    shares = (0.6, 0.3, 1.0)
    views, sizes = two_views(items, count, (only,), shares, TOKEN, np.random.default_rng(0))
    assert {kind(view, n) for view, n in zip(views, sizes, strict=True)} == {only}
    assert not (views[:50] == views[50:]).all()
