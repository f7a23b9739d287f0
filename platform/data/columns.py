"""Columns as they are collected from a file: ids, texts, numbers and times, each with its one rule
of normalising.

| column | rule |
|---|---|
| id | a whole number has no `.0`; binary is UTF-8; blanks around it go; a column whose every value ends in `.0` loses it |
| text | the same without the last |
| number | float64, NaN where there is none |
| time | whole seconds and nanoseconds, exactly as the source has them |
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

UNITS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
"""Units of time → how many make a second."""

NUMERIC = (*UNITS, "days", "order")
"""What a number in a column of times may be."""

ABSENT = frozenset({"", "nan", "nat", "none", "null", "na", "n/a", "<na>", "\\n", "-"})
"""What stands for no time, lower case; and what is no id, if a column has it."""

_PENDING = 16
"""Arrays whose distinct values are found together."""

_FAR_FUTURE = 10**11  # the year 5138 in seconds; any time beyond it is in milliseconds or finer
_NANOSECONDS = 10**9
_DAY = 86400
POINT_ZERO = re.compile(r"[+-]?\d+\.0+")
_FRACTION = re.compile(r"(.*\d:\d\d:\d\d)[.,](\d+)(.*)")


def stable_order(values: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """`np.argsort(values, kind="stable")` of integers, int64 [n].

    Where value and place fit one number, numpy's vectorised sort does it in a fraction of the time.
    """
    n = len(values)
    if not n:
        return np.zeros(0, np.int64)
    low = int(values.min())
    if (int(values.max()) - low + 1) * n >= 2**62:
        return np.argsort(values, kind="stable")
    keys = (values.astype(np.int64) - low) * n
    keys += np.arange(n)
    keys.sort()
    keys %= n
    return keys


@dataclass(frozen=True)
class Texts:
    """A text column: `values[codes[row]]`, and code -1 where a row has none.

    Attributes:
        codes: int32 [n_rows]. values: the distinct non-empty texts in the order of their first row.
    """

    codes: npt.NDArray[np.int32]
    values: list[str]


def plain_text(value: object) -> str:
    """A single value as text: "" for none, whole numbers without `.0`, binary decoded, blanks
    around it removed.

    Raises:
        ValueError: binary that is not UTF-8, or a floating-point number that stands for several
            whole ones. TypeError: a list or a record.
    """
    if isinstance(value, str):
        return value.strip()
    if value is None or value is pa.NA or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            return bytes(value).decode().strip()
        except UnicodeDecodeError:
            raise ValueError("is binary and not UTF-8") from None
    if isinstance(value, (float, np.floating)) and abs(float(value)) >= 2**53:
        raise ValueError(f"({value!r}) is a floating-point number too large to be exact")
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return str(int(value))
    if isinstance(value, (list, tuple, dict, set, np.ndarray)):
        raise TypeError("a list or a record where a single value is expected")
    return str(value).strip()


def plain_ids(values: Sequence[object]) -> list[str]:
    """A column's ids as text. Where every one is a number that ends in `.0`, as pandas writes whole
    numbers of a column with gaps, the ending goes: no two ids become one by that."""
    texts = [plain_text(value) for value in values]
    filled = [text for text in texts if text]
    if filled and all(map(POINT_ZERO.fullmatch, filled)):
        return [text.partition(".")[0] for text in texts]
    return texts


class TextColumn:
    """Collects one column as codes; the distinct values are normalised once, at the end.

    Args:
        normal: distinct values → texts, one each. each_point_zero: whether a value loses its `.0`
            by itself.
    """

    def __init__(
        self,
        normal: Callable[[Sequence[object]], list[str]] = lambda values: list(
            map(plain_text, values)
        ),
        each_point_zero: bool = False,
    ) -> None:
        self._normal, self._strip = normal, each_point_zero
        self._numbers: dict[Any, int] = {}
        self._codes: list[npt.NDArray[np.int32]] = []
        self._pending: list[pa.DictionaryArray] = []

    def extend(self, values: Iterable[Any] | pa.Array) -> None:
        """Add rows; raises TypeError where one holds a list or a record."""
        if isinstance(values, pa.DictionaryArray):
            if self._pending and self._pending[0].type != values.type:
                self._settle()
            self._pending.append(values)
            if len(self._pending) == _PENDING:
                self._settle()
            return
        self._settle()
        numbers = self._numbers
        if isinstance(values, pa.Array):
            values = values.to_pylist()
        self._codes.append(
            np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int32)
        )

    def _settle(self) -> None:
        """Give the values of pending arrays their codes: Arrow finds the distinct ones faster than
        a dictionary does.
        """
        if not self._pending:
            return
        numbers, unified = self._numbers, pa.chunked_array(self._pending).unify_dictionaries()
        known = unified.chunk(0).dictionary.to_pylist()
        code = np.array([numbers.setdefault(value, len(numbers)) for value in known], np.int32)
        if unified.null_count:
            code = np.append(code, np.int32(numbers.setdefault(None, len(numbers))))
        for chunk in unified.chunks:
            self._codes.append(code[chunk.indices.fill_null(len(known)).to_numpy()])
        self._pending = []

    def finish(self) -> Texts:
        """All rows; raises ValueError where a value is binary and not UTF-8."""
        self._settle()
        texts = self._normal(list(self._numbers))
        if self._strip:
            texts = [t.removesuffix(".0") if t.removesuffix(".0").isdigit() else t for t in texts]
        values: dict[str, int] = {"": -1}
        codes = np.array([values.setdefault(text, len(values) - 1) for text in texts], np.int32)
        del values[""]
        rows = np.concatenate(self._codes) if self._codes else np.zeros(0, np.int32)
        return Texts(codes[rows] if len(codes) else rows, list(values))


class NumberColumn:
    """Collects one column of numbers; a missing one is NaN."""

    def __init__(self) -> None:
        self._values: list[npt.NDArray[np.float64]] = []

    def extend(self, values: Sequence[Any] | pa.Array) -> None:
        """Add rows; raises `Wrong` at the first that is no number."""
        if isinstance(values, pa.Array):
            numeric = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
            values = (
                pc.cast(values, pa.float64()).to_numpy(zero_copy_only=False)
                if numeric
                else values.to_pylist()
            )
        try:
            self._values.append(np.array(values, np.float64))
        except (TypeError, ValueError):
            self._values.append(
                np.array([self._one(row, value) for row, value in enumerate(values)], np.float64)
            )

    @staticmethod
    def _one(row: int, value: Any) -> float:
        if value is None or (isinstance(value, str) and not value.strip()):
            return float("nan")
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise Wrong(row, value) from None

    def finish(self) -> npt.NDArray[np.float64]:
        """float64 [n_rows]."""
        return np.concatenate(self._values) if self._values else np.zeros(0)


class Wrong(ValueError):
    """A value that does not belong where it stands.

    Attributes:
        row: its place among the rows just given. value: the value. hint: what may be wrong, or "".
    """

    def __init__(self, row: int, value: object, hint: str = "") -> None:
        super().__init__(hint)
        self.row, self.value, self.hint = row, value, hint


@dataclass(frozen=True)
class Times:
    """Times of all rows, exactly.

    Attributes:
        whole: int64 [n_rows], seconds since 1970, or an order. nanoseconds: int32 [n_rows] beside
            them, from 0 to 999,999,999; None where all are 0. missing: bool [n_rows]; None where no
            row lacks a time.
    """

    whole: npt.NDArray[np.int64]
    nanoseconds: npt.NDArray[np.int32] | None = None
    missing: npt.NDArray[np.bool_] | None = None

    def order(self, rows: npt.NDArray[np.int64], *ties: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The rows in time order; equal times by `ties` (the first counts most), then as given."""
        if self.nanoseconds is None and not ties:
            return rows[stable_order(self.whole[rows])]
        finer = () if self.nanoseconds is None else (self.nanoseconds[rows],)
        return rows[np.lexsort((*reversed(ties), *finer, self.whole[rows]))]


class TimeColumn:
    """Collects times.

    Args:
        unit: one of `NUMERIC`, a date format in UTC, or None: numbers are seconds and anything else
            an ISO date.
        allow_missing: whether a row may have no time.
    """

    def __init__(self, unit: str | None, allow_missing: bool = False) -> None:
        self.unit, self._allow_missing = unit, allow_missing
        self._numeric = unit is None or unit in NUMERIC
        self._step = UNITS.get(unit or "seconds", 1)
        self._whole: list[npt.NDArray[np.int64]] = []
        self._nanoseconds: list[npt.NDArray[np.int32] | int] = []
        self._missing: list[npt.NDArray[np.bool_] | int] = []
        self._dates: dict[Any, tuple[int, int] | None] = {}

    def extend(self, values: Sequence[Any] | pa.Array) -> None:
        """Add rows; raises `Wrong` at the first that is no time."""
        if isinstance(values, pa.Array):
            if self._extend_arrow(values):
                return
            values = values.to_pylist()
        if self._numeric:
            array = (
                np.asarray(values)
                if not any(isinstance(v, (list, dict, tuple)) for v in values[:1])
                else None
            )
            if array is not None and array.ndim == 1:
                if array.dtype.kind == "U":
                    try:
                        array = array.astype(np.int64)
                    except (ValueError, OverflowError):
                        array = array.astype(object)
                if array.dtype.kind == "i" and self._extend_integers(array.astype(np.int64)):
                    return
                if (
                    array.dtype.kind == "f"
                    and np.isfinite(array).all()
                    and self._extend_floats(array)
                ):
                    return
        self._extend_each(values)

    def _extend_arrow(self, values: pa.Array) -> bool:
        kind = values.type
        if values.null_count:
            return False
        if pa.types.is_timestamp(kind):
            step = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
            self._add(*self._parted(values.cast(pa.int64()).to_numpy(), step))
            return True
        if pa.types.is_dictionary(kind):
            known = [self._one_or_none(value) for value in values.dictionary.to_pylist()]
            if None in known:
                return False
            pairs = np.array(known, np.int64).reshape(-1, 2)[values.indices.to_numpy()]
            self._add(pairs[:, 0], pairs[:, 1].astype(np.int32))
            return True
        if not self._numeric:
            return False
        if (
            pa.types.is_decimal(kind)
            and self._step == 1
            and self.unit != "days"
            and kind.scale == 9
        ):
            words = np.frombuffer(values.buffers()[1], "<i8").reshape(-1, 2)[values.offset :][
                : len(values)
            ]
            low, high = words[:, 0], words[:, 1]
            if (high == low >> np.int64(63)).all():
                whole, rest = self._parted(low, _NANOSECONDS)
                if not self._plausible(whole):
                    return False
                self._add(whole, rest)
                return True
            return False
        if pa.types.is_integer(kind):
            return self._extend_integers(values.cast(pa.int64(), safe=False).to_numpy())
        if pa.types.is_floating(kind):
            numbers = values.to_numpy(zero_copy_only=False).astype(np.float64)
            return bool(np.isfinite(numbers).all()) and self._extend_floats(numbers)
        return False

    def _one_or_none(self, value: Any) -> tuple[int, int] | None:
        try:
            return self._parse(value.strip() if isinstance(value, str) else value)
        except (TypeError, ValueError, OverflowError):
            return None  # told with its line when the rows are read one by one

    @staticmethod
    def _parted(
        numbers: npt.NDArray[np.int64], step: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32] | int]:
        if step == 1:
            return numbers, 0
        whole, rest = np.divmod(numbers, step)
        return whole, (rest * (_NANOSECONDS // step)).astype(np.int32)

    def _plausible(self, whole: npt.NDArray[np.int64]) -> bool:
        return (
            self.unit == "order"
            or not len(whole)
            or bool(max(whole.max(), -whole.min()) < _FAR_FUTURE)
        )

    def _extend_integers(self, numbers: npt.NDArray[np.int64]) -> bool:
        if self.unit == "days":
            numbers = (
                numbers * _DAY if len(numbers) and np.abs(numbers).max() < _FAR_FUTURE else numbers
            )
        whole, rest = self._parted(numbers, self._step)
        if not self._plausible(whole):
            return False
        self._add(whole, rest)
        return True

    def _extend_floats(self, numbers: npt.NDArray[np.float64]) -> bool:
        if len(numbers) and np.abs(numbers).max() >= 2.0**62:
            return False
        if self.unit == "days":
            days, rest = np.divmod(numbers, 1.0)
            numbers, base = rest * _DAY, days.astype(np.int64) * _DAY
        else:
            base = np.zeros(len(numbers), np.int64)
        whole, rest = np.divmod(numbers, float(self._step))
        nanoseconds = np.minimum(np.rint(rest / self._step * _NANOSECONDS), _NANOSECONDS - 1)
        seconds = base + whole.astype(np.int64)
        if not self._plausible(seconds):
            return False
        self._add(seconds, nanoseconds.astype(np.int32) if nanoseconds.any() else 0)
        return True

    def _add(
        self,
        whole: npt.NDArray[np.int64],
        nanoseconds: npt.NDArray[np.int32] | int,
        missing: Any = None,
    ) -> None:
        self._whole.append(whole)
        some = isinstance(nanoseconds, np.ndarray) and nanoseconds.any()
        self._nanoseconds.append(nanoseconds if some else len(whole))
        self._missing.append(len(whole) if missing is None else missing)

    def _extend_each(self, values: Sequence[Any]) -> None:
        pairs, missing = np.zeros((len(values), 2), np.int64), np.zeros(len(values), bool)
        for row, value in enumerate(values):
            value = value.strip() if isinstance(value, str) else value
            try:
                known = self._dates.get(value, 0)
                if known == 0:
                    if len(self._dates) > 1 << 16:
                        self._dates.clear()
                    known = self._dates[value] = None if self._absent(value) else self._parse(value)
            except (TypeError, ValueError, OverflowError) as error:
                hint = str(error) if "`time:" in str(error) else ""
                raise Wrong(row, values[row], hint) from error
            if known is None:
                if not self._allow_missing:
                    raise Wrong(
                        row, values[row], "`missing_time: drop` in the recipe leaves such rows out"
                    )
                missing[row] = True
            else:
                pairs[row] = known
        self._add(
            pairs[:, 0].copy(), pairs[:, 1].astype(np.int32), missing if missing.any() else None
        )

    @staticmethod
    def _absent(value: Any) -> bool:
        if isinstance(value, str):
            return value.lower() in ABSENT
        return value is None or value != value  # NaN and NaT

    def _parse(self, value: Any) -> tuple[int, int]:
        """Seconds and nanoseconds of a single value."""
        if self._numeric and not isinstance(value, (date, bool)):
            try:
                number = Decimal(value)
            except (InvalidOperation, TypeError, ValueError):
                if self.unit is not None and not isinstance(value, str):
                    raise ValueError("no time") from None
            else:
                return self._scaled(number)
        if isinstance(value, (bytes, bytearray)):
            value = bytes(value).decode()
        nanoseconds = None
        if isinstance(value, str):
            if self.unit in NUMERIC:
                raise ValueError("no time")
            try:
                value = datetime.strptime(value, self.unit or "%Y-%m-%dT%H:%M:%S")
            except ValueError:
                if fraction := _FRACTION.fullmatch(value):  # the standard library keeps six digits
                    nanoseconds = int(f"{fraction[2]:0<9}"[:9])
                    value = fraction[1] + fraction[3].strip()
                value = datetime.fromisoformat(value)
        elif isinstance(value, date) and not isinstance(value, datetime):
            value = datetime.combine(value, time())
        if not isinstance(value, datetime):
            raise ValueError("no time")
        since = (value if value.tzinfo else value.replace(tzinfo=UTC)) - datetime(
            1970, 1, 1, tzinfo=UTC
        )
        if nanoseconds is None:
            nanoseconds = since.microseconds * 1000 + int(getattr(value, "nanosecond", 0))
        return since.days * _DAY + since.seconds, nanoseconds

    def _scaled(self, number: Decimal) -> tuple[int, int]:
        if not number.is_finite():
            raise ValueError("no time")
        scale = Decimal(_DAY) if self.unit == "days" else Decimal(1) / self._step
        if abs(number * scale) >= (2**63 if self.unit == "order" else _FAR_FUTURE):
            raise ValueError(f"no time in {self.unit or 'seconds'}{self._unit_hint(abs(number))}")
        return divmod(
            int((number * scale * _NANOSECONDS).to_integral_value(ROUND_FLOOR)), _NANOSECONDS
        )

    @staticmethod
    def _unit_hint(number: Decimal) -> str:
        """The unit in which a number would be a date of our time."""
        fitting = [unit for unit, step in UNITS.items() if 10**8 <= number / step < 10**10]
        return (
            f": if the source has {fitting[0]}, set `time: {fitting[0]}`"
            if fitting
            else ": set `time:` to its unit"
        )

    def finish(self) -> Times:
        """Times of all rows."""
        whole = np.concatenate(self._whole) if self._whole else np.zeros(0, np.int64)
        return Times(whole, _joined(self._nanoseconds, np.int32), _joined(self._missing, np.bool_))


def _joined(parts: Sequence[npt.NDArray[Any] | int], dtype: Any) -> Any:
    """The parts in a row, a number standing for so many zeros; None where all are."""
    if all(isinstance(part, int) for part in parts):
        return None
    return np.concatenate(
        [np.zeros(part, dtype) if isinstance(part, int) else part for part in parts]
    )


__all__ = [
    "ABSENT",
    "NUMERIC",
    "POINT_ZERO",
    "UNITS",
    "NumberColumn",
    "TextColumn",
    "Texts",
    "TimeColumn",
    "Times",
    "Wrong",
    "plain_ids",
    "plain_text",
    "stable_order",
]
