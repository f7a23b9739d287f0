"""Item text: cleaning and joining.

Text as it is published holds HTML entities (escaped once or twice), tags, whole scripts and stray control characters;
an encoder should see none of it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser

import numpy as np

_UNESCAPES = 4
"""How often entities are decoded at most: text escaped more deeply than this has not been seen."""

_UNENDED = 100
"""From how many "<" without ">" on a text is taken for garbage rather than markup."""

_MARKUP = re.compile(r"<[a-zA-Z/!?]")
_DROPPED = re.compile(r"<(script|style)\b.*?(?:</\1\s*>|\Z)", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"<[a-zA-Z/!?][^<>]*>")
# Control characters become spaces; zero-width characters and lone surrogates (which UTF-8 cannot hold) vanish.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u2060\ufeff\ud800-\udfff]")

# Tags inside a word or sentence; every other tag parts words, so that "Soft<br>Warm" becomes two words.
_INLINE = {"a", "abbr", "b", "big", "cite", "code", "del", "em", "font", "i", "ins", "kbd", "mark", "q", "s", "small"}
_INLINE |= {"span", "strike", "strong", "sub", "sup", "tt", "u", "var"}


class _Visible(HTMLParser):
    """Collects what a browser would show as text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._part(tag)

    def handle_endtag(self, tag: str) -> None:
        self._part(tag)

    def _part(self, tag: str) -> None:
        if tag not in _INLINE:
            self.parts.append(" ")

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def unknown_decl(self, data: str) -> None:
        self.parts.append(data.removeprefix("CDATA["))


def _strip_tags(text: str) -> str:
    text = _DROPPED.sub(" ", text)
    if not _MARKUP.search(text):
        return text
    # The parser is quadratic in tags that never end; cut those texts by pattern, which is linear.
    if text.count("<") > text.count(">") + _UNENDED:
        return _TAG.sub(" ", text)
    parser = _Visible()
    try:
        parser.feed(text)
        parser.close()
    except (AssertionError, ValueError):
        # The standard library's parser refuses some malformed declarations ("<![if …"); cut them out by pattern.
        return _TAG.sub(" ", text)
    return "".join(parser.parts)


def clean_text(raw: object) -> str:
    """The readable text of a field: entities decoded, tags, scripts and styles removed, whitespace collapsed.

    Never raises: `None` and NaN are "", numbers are written out.
    """
    if raw is None or (isinstance(raw, float) and raw != raw):
        return ""
    text = raw if isinstance(raw, str) else str(raw)
    for _ in range(_UNESCAPES):
        decoded = html.unescape(text) if "&" in text else text
        if decoded == text:
            break
        text = decoded
    if "<" in text:
        text = _strip_tags(text)
    return " ".join(_INVISIBLE.sub("", _CONTROL.sub(" ", text)).split())


def _flatten(value: object) -> Iterator[object]:
    """The leaves of nested lists in order; mappings give their values."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple, np.ndarray)):
        for part in value:
            yield from _flatten(part)
    else:
        yield value


def join_fields(row: Mapping[str, object], fields: Sequence[str]) -> str:
    """The cleaned fields of one item in the stated order, separated by a space.

    A field may be a string, a number, or nested lists (descriptions of the 2018 files, category paths): lists are
    flattened and a part that occurs twice inside one field is kept once. Absent and empty fields are left out.
    """
    joined: list[str] = []
    for field in fields:
        parts = dict.fromkeys(clean_text(part) for part in _flatten(row.get(field)))
        joined.extend(part for part in parts if part)
    return " ".join(joined)
