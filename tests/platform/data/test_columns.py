"""Columns: times exactly, in every unit and kind; ids and texts by one rule each."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfed.platform.data.columns import (
    NumberColumn,
    TextColumn,
    TimeColumn,
    Wrong,
    plain_ids,
    plain_text,
)


def times(values, unit=None, **more) -> list[tuple[int, int]]:
    column = TimeColumn(unit, **more)
    column.extend(values)
    read = column.finish()
    fine = np.zeros(len(read.whole)) if read.nanoseconds is None else read.nanoseconds
    return [(int(a), int(b)) for a, b in zip(read.whole, fine, strict=True)]


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        ("1600000000.600", None, (1_600_000_000, 600_000_000)),
        (1600000000.5, None, (1_600_000_000, 500_000_000)),
        (Decimal("1600000000.123456789"), None, (1_600_000_000, 123_456_789)),
        ("1600000000123", "milliseconds", (1_600_000_000, 123_000_000)),
        (1600000000123456, "microseconds", (1_600_000_000, 123_456_000)),
        ("1600000000123456789", "nanoseconds", (1_600_000_000, 123_456_789)),
        (1600000000123.5, "milliseconds", (1_600_000_000, 123_500_000)),
        ("1.6e9", None, (1_600_000_000, 0)),
        (-1, "milliseconds", (-1, 999_000_000)),
        ("2.5", "days", (216_000, 0)),
        (2.5, "days", (216_000, 0)),
        ("7.25", "order", (7, 250_000_000)),
        ("2020-09-13T12:26:40.123456789Z", None, (1_600_000_000, 123_456_789)),
        ("2020-09-13 12:26:40,5", None, (1_600_000_000, 500_000_000)),
        ("2020-09-13 14:26:40.5+02:00", None, (1_600_000_000, 500_000_000)),
        (datetime(2020, 9, 13, 12, 26, 40, 7, UTC), None, (1_600_000_000, 7_000)),
        (pd.Timestamp(1_600_000_000_123_456_789), None, (1_600_000_000, 123_456_789)),
        (date(1970, 1, 2), None, (86_400, 0)),
    ],
)
def test_times_are_exact(value, unit, expected):
    assert times([value], unit) == [expected]
    assert times([value, value], unit) == [expected] * 2


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_arrow_timestamps_of_every_unit(unit):
    step = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    raw = 1_600_000_000 * step + step // 2
    assert times(pa.array([raw], pa.timestamp(unit))) == [
        (1_600_000_000, 10**9 // step * (step // 2))
    ]


@given(st.integers(-(10**18), 10**18))
def test_a_decimal_column_is_divided_exactly(nanoseconds):
    value = Decimal(nanoseconds).scaleb(-9)
    assert times(pa.array([value], pa.decimal128(28, 9))) == [divmod(nanoseconds, 10**9)]


@given(st.lists(st.integers(0, 4 * 10**18), min_size=2, max_size=20))
def test_order_follows_the_full_value(raw):
    column = TimeColumn("nanoseconds")
    column.extend(raw)
    order = column.finish().order(np.arange(len(raw)))
    assert order.tolist() == sorted(range(len(raw)), key=raw.__getitem__)


@pytest.mark.parametrize(
    ("value", "unit", "hint"),
    [
        (1600000000123, None, "time: milliseconds"),
        ("1600000000123456", "seconds", "time: microseconds"),
        (1600000000123456, "milliseconds", "time: microseconds"),
        (1600000000123456789, "milliseconds", "time: nanoseconds"),
        (1600000000123456789.0, "microseconds", "time: nanoseconds"),
        (1600000000, "days", "time: seconds"),
    ],
)
def test_a_time_in_another_unit_is_told_with_the_right_one(value, unit, hint):
    with pytest.raises(Wrong, match=hint):
        times([value], unit)


@pytest.mark.parametrize("value", [None, "", " ", "NaN", "null", "\\N", float("nan"), pd.NaT])
def test_missing_times(value):
    with pytest.raises(Wrong, match="missing_time: drop") as told:
        times([5, value])
    assert told.value.row == 1
    column = TimeColumn(None, allow_missing=True)
    column.extend([5, value])
    column.extend([6])
    assert column.finish().missing.tolist() == [False, True, False]


@pytest.mark.parametrize("value", ["soon", True, [1], "2020-13-01"])
def test_what_is_no_time_is_wrong_also_where_times_may_be_missing(value):
    with pytest.raises(Wrong):
        times([value], allow_missing=True)


def test_dictionaries_of_dates():
    values = pa.array(["2020-01-02", "2020-01-01", "2020-01-02"]).dictionary_encode()
    assert times(values, "%Y-%m-%d") == [(1577923200, 0), (1577836800, 0), (1577923200, 0)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            [0, 1.0, "2", b"u3", Decimal("4.00"), np.float64(5), "  x "],
            ["0", "1", "2", "u3", "4", "5", "x"],
        ),
        (["0.0", "1.0", ""], ["0", "1", ""]),
        (["0.0", "1.0", "1.5"], ["0.0", "1.0", "1.5"]),
        (["1", "1.0"], ["1", "1.0"]),  # two ids stay two
        (["007", "7"], ["007", "7"]),
        ([None, float("nan")], ["", ""]),
    ],
)
def test_ids(values, expected):
    assert plain_ids(values) == expected


def test_binary_is_utf8_or_refused():
    assert plain_text("é".encode()) == "é"
    column = TextColumn()
    column.extend([b"a", b"\xe9"])
    with pytest.raises(ValueError, match="binary and not UTF-8"):
        column.finish()


def test_texts_of_several_kinds_are_one_column():
    column = TextColumn(plain_ids)
    column.extend(pa.array(["b", None, "a", "b"]).dictionary_encode())
    column.extend(["a", "c", None, 3.0])
    column.extend(pa.array([3, 4]).dictionary_encode())
    read = column.finish()
    assert [read.values[c] if c >= 0 else None for c in read.codes] == [
        "b",
        None,
        "a",
        "b",
        "a",
        "c",
        None,
        "3",
        "3",
        "4",
    ]


def test_numbers():
    column = NumberColumn()
    column.extend(pa.array([1, None, 3]))
    column.extend(["4.5", "", None])
    assert np.array_equal(column.finish(), [1, np.nan, 3, 4.5, np.nan, np.nan], equal_nan=True)
    with pytest.raises(Wrong) as told:
        column.extend(["1", "x"])
    assert (told.value.row, told.value.value) == (1, "x")
