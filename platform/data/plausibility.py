"""What looks odd about data that can be read: told, never changed."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime

import numpy as np

from crossfed.platform.data.columns import ABSENT
from crossfed.platform.data.readers import Table, Texts
from crossfed.platform.data.store import PreparedData

_FIRST = 86400
"""Seconds; a time on the first day of 1970 is hardly ever one."""

_DENSE = 0.8
"""From which share of the numbers between the lowest and the highest on ids are taken for numbers
of a data set's own.
"""


def ids(texts: Mapping[str, Texts]) -> list[str]:
    """Users and items whose id is a word for none, and texts that are."""
    notes = []
    for name, column in texts.items():
        counts = np.bincount(column.codes[column.codes >= 0], minlength=len(column.values))
        words = {
            v: int(counts[k])
            for k, v in enumerate(column.values)
            if v.lower() in ABSENT and v != "-"
        }
        if words:
            told = ", ".join(f"{value!r} ({n:,} rows)" for value, n in words.items())
            notes.append(
                f"{name} is {told}, which looks like none; name it in `keep` (lacks) "
                f"to leave such rows out"
            )
    for name in ("user", "item"):
        odd = [
            value for value in texts[name].values if not (value.isascii() and value.isprintable())
        ]
        if control := [value for value in odd if not value.isprintable()]:
            notes.append(
                f"{len(control):,} ids of {name} hold control characters, e.g. {control[0]!r}"
            )
        if again := len(odd) - len({unicodedata.normalize("NFC", value) for value in odd}):
            notes.append(
                f"{again:,} ids of {name} look like another one but are other characters "
                f"(Unicode NFC and NFD)"
            )
    return notes


def dates(table: Table, now: datetime | None = None) -> list[str]:
    """Times before 1970-01-02 or after the end of next year."""
    if table.time_kind != "seconds":
        return []
    times = (
        table.times.whole
        if table.times.missing is None
        else table.times.whole[~table.times.missing]
    )
    last = datetime((now or datetime.now(UTC)).year + 2, 1, 1, tzinfo=UTC).timestamp()
    odd = times[(times < _FIRST) | (times >= last)]
    if not len(odd):
        return []
    example = np.datetime64(int(odd[0]), "s")
    return [
        f"{len(odd):,} of {len(times):,} times are before 1970-01-02 or after next year, e.g. "
        f"{example}; check `time`"
    ]


def shared_numbers(data: PreparedData) -> list[str]:
    """Domains whose users all are numbered without gaps: what they share may be numbers, not
    people.
    """
    numbered = [domain for domain in data.domains if _numbers(data.user_ids(domain))]
    return [
        f"the users of {one} and of {other} are both numbered without gaps, so that the "
        f"{overlap['users']:,} shared ones may be "
        "shared numbers, not people; check that both files mean the same users"
        for one, other in itertools.combinations(numbered, 2)
        for overlap in data.manifest["overlap"]
        if overlap["domains"] == [one, other] and overlap["users"]
    ]


def _numbers(ids: list[str]) -> bool:
    if not all(one.isascii() and one.isdigit() and len(one) < 16 for one in ids):
        return False
    numbers = np.array(ids, np.int64)
    return len(numbers) > 1 and len(numbers) > _DENSE * (numbers.max() - numbers.min() + 1)


__all__ = ["dates", "ids", "shared_numbers"]
