"""One file of a data set and how it is read: the keys of a source in a spec."""

from __future__ import annotations

import codecs
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from crossfed.platform.data.columns import NUMERIC
from crossfed.platform.data.delimited import BLANKS

Layout = Literal[
    "amazon-reviews",
    "amazon-reviews-2023",
    "amazon-ratings",
    "amazon-ratings-2018",
    "amazon-meta-2014",
    "amazon-meta-2018",
    "amazon-meta-2023",
    "online-retail",
    "recbole",
    "sequence",
    "table",
]

TIMES = (*NUMERIC, "row", "none")
_SEPARATORS = {"\\t": "\t", "tab": "\t", "blank": " ", "comma": ",", "semicolon": ";", "bar": "|"}


def _encoding(name: str) -> str:
    try:
        codecs.lookup(name)
    except LookupError:
        raise ValueError(
            f"{name!r} is no encoding; take e.g. utf-8, latin-1, cp1252 or utf-16"
        ) from None
    return name


def _time_format(name: str) -> str:
    if name not in TIMES and "%" not in name:
        raise ValueError(
            f"{name!r} is neither one of {', '.join(TIMES)} nor a date format "
            f"such as %Y-%m-%d %H:%M:%S"
        )
    return name


def _separator(text: str) -> str:
    text = _SEPARATORS.get(text, text)
    if "\n" in text or "\r" in text or '"' in text:
        raise ValueError(f"{text!r} cannot part fields")
    return text


class Source(BaseModel):
    """One file and how to read it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        description="relative to the spec's directory, or to the directory of sources"
    )
    layout: Layout | None = Field(
        None, description="what the file is; not given: recognised by its content"
    )
    columns: dict[str, str | Annotated[int, Field(ge=1)]] = Field(
        {},
        description="part: column name, or its number from 1 in a delimited file without a "
        "header. Parts are user, item, "
        "time, rating, quantity, order (the order number that marks a cancellation), items (a "
        "list of items in time "
        "order) and text fields; what is not given comes from the layout",
    )
    time: Annotated[str, AfterValidator(_time_format)] | None = Field(
        None,
        description="seconds (since 1970), milliseconds, microseconds, nanoseconds, days, "
        "order (a running number), row (the "
        "place in the file is the time), none (the data have no order), or a date format in "
        "UTC; not given: the layout's, and "
        "for a table numbers are seconds and anything else an ISO date",
    )
    encoding: Annotated[str, AfterValidator(_encoding)] | None = Field(
        None,
        description="not given: UTF-8, UTF-16 or UTF-32 where the bytes say so, and for Online "
        "Retail latin-1 where the file is "
        "not UTF-8",
    )
    separator: Annotated[str, Field(min_length=1), AfterValidator(_separator)] | None = Field(
        None,
        description=f"of fields, one character or more (`::`); tab, or {BLANKS} for runs of "
        f"spaces and tabs. Not given: "
        "recognised",
    )
    quoting: Literal["csv", "none"] | None = Field(
        None,
        description="csv: quotation marks hold fields together; none: they are characters like "
        "others. Not given: recognised by "
        "the first lines",
    )
    max_lines: Annotated[int, Field(ge=1)] = Field(
        50,
        description="lines that one quoted field may span; one that spans more is read "
        "line by line",
    )
    max_broken: Annotated[float, Field(ge=0, le=1)] = Field(
        0.01, description="the share of lines that may be broken before the file is refused"
    )
    published: str | None = Field(None, description="where the file is published; for people")


__all__ = ["TIMES", "Layout", "Source"]
