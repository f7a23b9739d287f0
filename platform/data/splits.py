"""Train, validation and test splits of a domain's interactions, each with a leakage check.

| rule | train / validation / test |
|---|---|
| `ratio-80-10-10` | per user at random: 80 / 10 / 10 % |
| `ratio-80-10-10-time` | per user in time order: first 80, next 10, last 10 % |
| `leave-one-out` | per user: the last is test, the one before validation; fewer than three all stay in train |
| `temporal-cut` | one clock for all: up to the 80 % quantile of time, up to the 90 % quantile, after it |

Equal times: interactions of one user at the same time are taken in the order in which they are
given, which for prepared data is the order that the recipe's tie rule fixed. `temporal-cut` never
parts equal times.

Shares of a user with n interactions follow RecBole (`AbstractDataset._calcu_split_ids`): validation
and test get ⌊0.1·n⌋, train the rest; then, test first, a share with 0 < 0.1·n < 1 takes one
interaction from train as long as train has more than one.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from crossfed.platform.errors import CrossfedError

TRAIN, VALIDATION, TEST = 0, 1, 2

Int64s = npt.NDArray[np.int64]
Int8s = npt.NDArray[np.int8]

_TIME_ORDERED = frozenset({"ratio-80-10-10-time", "leave-one-out"})
_NAMES = ("train", "validation", "test")


def ratio_counts(n: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Train, validation and test counts of users with `n` interactions each, int64 [n_users] all
    three.
    """
    share = 0.1 * n
    validation = np.floor(share).astype(np.int64)
    test = validation.copy()
    train = n - validation - test
    for part in (test, validation):
        takes = (share > 0) & (share < 1) & (train > 1)
        part += takes
        train -= takes
    return train, validation, test


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014), elementwise; arithmetic is modulo
    2⁶⁴.
    """
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _draw(users: Int64s, items: Int64s, seed: int) -> npt.NDArray[np.uint64]:
    """A random key per interaction that depends on (seed, user, item) alone: other users cannot
    shift a user's draw.
    """
    start = _mix(np.array([seed % (1 << 64)], np.uint64))
    return _mix(_mix(start ^ users.astype(np.uint64)) ^ items.astype(np.uint64))


def share_of(users: Int64s, items: Int64s, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """A random share of interactions, drawn apart from the split; a smaller share is a part of a
    larger one.

    Args:
        users, items: int [n]. share: above 0, at most 1; at least one interaction is kept.

    Returns:
        bool [n]: whether it is kept.
    """
    kept = np.zeros(len(users), np.bool_)
    kept[
        np.argsort(_draw(users, items, ~seed), kind="stable")[: max(1, round(share * len(users)))]
    ] = True
    return kept


def _by_rank(
    order: Int64s, users: Int64s, n_users: int, train: Int64s, validation: Int64s
) -> Int8s:
    """Labels by the place of a row among its user's rows; `order` lists the rows user by user."""
    counts = np.bincount(users, minlength=n_users)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    sorted_users = users[order]
    rank = np.arange(len(users)) - starts[sorted_users]
    label = (rank >= train[sorted_users]).astype(np.int8) + (
        rank >= (train + validation)[sorted_users]
    )
    split = np.empty(len(users), np.int8)
    split[order] = label
    return split


def _ratio(users: Int64s, items: Int64s, times: Int64s, n_users: int, seed: int) -> Int8s:
    train, validation, _ = ratio_counts(np.bincount(users, minlength=n_users))
    return _by_rank(
        np.lexsort((items, _draw(users, items, seed), users)), users, n_users, train, validation
    )


def _ratio_time(users: Int64s, items: Int64s, times: Int64s, n_users: int, seed: int) -> Int8s:
    train, validation, _ = ratio_counts(np.bincount(users, minlength=n_users))
    return _by_rank(np.lexsort((times, users)), users, n_users, train, validation)


def _leave_one_out(users: Int64s, items: Int64s, times: Int64s, n_users: int, seed: int) -> Int8s:
    counts = np.bincount(users, minlength=n_users)
    enough = counts >= 3
    train = np.where(enough, counts - 2, counts)
    return _by_rank(np.lexsort((times, users)), users, n_users, train, enough.astype(np.int64))


def _cuts(times: Int64s) -> tuple[int, int]:
    """The 80 % and 90 % quantiles of time, both times that occur (the lowest with so many
    interactions up to it).
    """
    first, second = np.quantile(times, [0.8, 0.9], method="inverted_cdf")
    return int(first), int(second)


def _temporal_cut(users: Int64s, items: Int64s, times: Int64s, n_users: int, seed: int) -> Int8s:
    first, second = _cuts(times)
    return (times > first).astype(np.int8) + (times > second).astype(np.int8)


SPLITS: dict[str, Callable[[Int64s, Int64s, Int64s, int, int], Int8s]] = {
    "ratio-80-10-10": _ratio,
    "ratio-80-10-10-time": _ratio_time,
    "leave-one-out": _leave_one_out,
    "temporal-cut": _temporal_cut,
}
"""The rules by name; use `assign`, which also checks the result."""


def refuse_without_order(
    times: str, domain: str, rule: str, method: str | None, order: str
) -> None:
    """Refuse data without an order where one is needed.

    Args:
        times: `PreparedData.times` of the domain. rule: a key of `SPLITS`.
        method: the name of a method that reads users' interactions in order; None for one that does
            not.
        order: `evaluation.order`; "file" takes the order of the source file.

    Raises:
        CrossfedError: there is none. A cut in time cannot be made of the file's order, which is
            kept within users only.
    """
    if times != "none":
        return
    if rule == "temporal-cut":
        raise CrossfedError(
            f"Domain {domain} was prepared with `time: none`, and {rule} cuts by time; take "
            f"the protocol ratio-80-10-10."
        )
    if order == "file" or (rule not in _TIME_ORDERED and method is None):
        return
    needs = f"the method {method} reads" if method is not None else f"the split {rule} needs"
    raise CrossfedError(
        f"Domain {domain} was prepared with `time: none`, but {needs} users' interactions in "
        f"their order; take "
        f"{'a method and a protocol that need' if method is not None else 'a protocol that needs'} "
        f"none (ratio-80-10-10), or set "
        "evaluation.order=file if the order of the file is meant."
    )


def assign(
    users: npt.ArrayLike,
    items: npt.ArrayLike,
    times: npt.ArrayLike,
    n_users: int,
    rule: str,
    seed: int = 0,
) -> Int8s:
    """Split a domain's interactions and check the result for leakage.

    Args:
        users, items, times: int [n], one row per interaction, in any order; no (user, item) pair
            twice.
        n_users: how many users the domain has.
        rule: a key of `SPLITS`.
        seed: draws the random rule; the others do not depend on it.

    Returns:
        int8 [n]: 0 train, 1 validation, 2 test. With `temporal-cut` a user may have nothing in
            train.

    Raises:
        CrossfedError: an unknown rule, a repeated pair, or nothing left for validation or test.
    """
    if rule not in SPLITS:
        raise CrossfedError(f"Unknown split {rule!r}; choose one of {', '.join(SPLITS)}.")
    users, items, times = (np.asarray(column, np.int64) for column in (users, items, times))
    if not len(users):
        raise CrossfedError(f"The split {rule} was given no interactions.")
    split = SPLITS[rule](users, items, times, n_users, seed)
    check_leakage(users, items, times, split, rule)
    for part in (VALIDATION, TEST):
        if not (split == part).any():
            why = (
                "all times are nearly equal"
                if rule == "temporal-cut"
                else ("every user has too few interactions")
            )
            raise CrossfedError(
                f"The split {rule} leaves no {_NAMES[part]} interactions because {why}."
            )
    return split


def check_leakage(
    users: npt.ArrayLike,
    items: npt.ArrayLike,
    times: npt.ArrayLike,
    split: npt.ArrayLike,
    rule: str,
) -> None:
    """Refuse a split in which training knows something about validation or test, or validation
    about test.

    Args:
        users, items, times: int [n]. split: [n] of 0, 1, 2. rule: a key of `SPLITS`.

    Raises:
        CrossfedError: a label other than 0, 1, 2; a (user, item) pair twice; for the rules by a
            user's time, an interaction later than one of the same user in a later part; for
            leave-one-out, more than one held-out interaction per part and user; for temporal-cut,
            any interaction not earlier than all of the later parts.
    """
    users, items, times = (np.asarray(column, np.int64) for column in (users, items, times))
    split = np.asarray(split)
    if len(split) != len(users) or not np.isin(split, (TRAIN, VALIDATION, TEST)).all():
        raise CrossfedError(
            f"The split {rule} must give each of {len(users)} interactions a label 0, 1 or 2."
        )
    order = np.lexsort((items, users))
    again = np.flatnonzero((np.diff(users[order]) == 0) & (np.diff(items[order]) == 0))
    if len(again):
        row = order[again[0]]
        raise CrossfedError(
            f"User {users[row]} has item {items[row]} more than once ({len(again)} repeats in "
            f"all), so that a split "
            "could show in training what it tests; prepare the data with duplicates first or "
            "last over [user, item]."
        )
    if rule in _TIME_ORDERED:
        # Sorted by user, then part, then time: in time order within every user, times never fall.
        order = np.lexsort((times, split, users))
        same_user = np.diff(users[order]) == 0
        if (bad := np.flatnonzero(same_user & (np.diff(times[order]) < 0))).size:
            a, b = order[bad[0]], order[bad[0] + 1]
            raise CrossfedError(
                f"The split {rule} is out of time order: user {users[a]} has a "
                f"{_NAMES[split[a]]} interaction at "
                f"{times[a]}, later than a {_NAMES[split[b]]} interaction at {times[b]}."
            )
    if rule == "leave-one-out":
        for part in (VALIDATION, TEST):
            if (counts := np.bincount(users[split == part])).size and counts.max() > 1:
                raise CrossfedError(
                    f"The split {rule} holds out {counts.max()} {_NAMES[part]} interactions of "
                    f"user {counts.argmax()}."
                )
    if rule == "temporal-cut":
        for part in (TRAIN, VALIDATION):
            earlier, later = times[split <= part], times[split > part]
            if earlier.size and later.size and earlier.max() >= later.min():
                raise CrossfedError(
                    f"The split {rule} is out of time order: the {_NAMES[part]} part reaches "
                    f"to {earlier.max()}, "
                    f"the part after it begins at {later.min()}."
                )
