"""The keys of a source: what they mean, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from crossfed.platform.data.source import TIMES, Source


@pytest.mark.parametrize(
    "wrong",
    [
        {"time": "hours"},
        {"quoting": "single"},
        {"encoding": "none"},
        {"layout": "x"},
        {"colums": {}},
    ],
)
def test_impossible_sources(wrong):
    with pytest.raises(ValidationError):
        Source(path="f", **wrong)


def test_a_key_that_is_not_known_is_refused_and_a_source_cannot_be_changed():
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Source(path="f", seperator=";")
    with pytest.raises(ValidationError, match="frozen"):
        Source(path="f").path = "g"


@pytest.mark.parametrize(
    ("word", "character"),
    [("tab", "\t"), ("\\t", "\t"), ("bar", "|"), ("blank", " "), ("::", "::")],
)
def test_separators_may_be_said_in_words(word, character):
    assert Source(path="f", separator=word).separator == character


@pytest.mark.parametrize("separator", ["", '"', "a\nb"])
def test_what_cannot_part_fields(separator):
    with pytest.raises(ValidationError, match="separator"):
        Source(path="f", separator=separator)


@pytest.mark.parametrize("time", [*TIMES, "%d.%m.%Y"])
def test_units_of_time_and_formats_of_dates(time):
    assert Source(path="f", time=time).time == time


def test_what_is_wrong_is_said_in_words():
    with pytest.raises(ValidationError, match=r"'hours' is neither one of seconds, .* %Y-%m-%d"):
        Source(path="f", time="hours")
    with pytest.raises(ValidationError, match=r"'utf9' is no encoding; take e\.g\. utf-8"):
        Source(path="f", encoding="utf9")
    with pytest.raises(ValidationError, match=r"columns\.user"):
        Source(path="f", columns={"user": 0})
