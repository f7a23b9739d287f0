"""Malformed inputs from good ones: bits, bytes, lengths, tokens that parsers trip over, values of
other types and sizes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TOKENS = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\x80\x04K*.",
    b"\r",
    b"\n",
    b"\t",
    b'"',
    b"'",
    b",",
    b":",
    b"{",
    b"}",
    b"[",
    b"]",
    b"- ",
    b"&a [*a]",
    b"!!python/object/apply:os.system [id]",
    b"!!binary x",
    b"2020-13-45",
    b"1e999",
    b"-1e999",
    b"NaN",
    b".nan",
    b"Infinity",
    b"null",
    b"true",
    b"-1",
    b"99999999999999999999",
    b"0x7fffffffffffffff",
    b"1_000",
    b"../../etc/passwd",
    b"..",
    b"/",
    b"%s%n",
    b"\xf0\x9f\x92\xa9",
    b"\xed\xa0\x80",
    b"A" * 5000,
    b"[" * 3000,
    b'{"a":' * 2000,
    b"9" * 5000,
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    10**20,
    -(10**20),
    0.0,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    "a",
    "nan",
    "true",
    "../x",
    "server",
    "x" * 5000,
    "\0",
    "\ud800",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
    {"kind": "map"},
    [None] * 50,
)


class Mutator(random.Random):
    """Makes malformed inputs from good ones."""

    def data(self, raw: bytes) -> bytes:
        """Bytes with a few things changed."""
        found = bytearray(raw)
        for _ in range(self.choice((1, 1, 1, 2, 4))):
            at = self.randrange(len(found) + 1)
            end = min(len(found), at + self.choice((1, 1, 4, 64, 4096)))
            match self.randrange(7):
                case 0 if found:
                    found[at % len(found)] ^= 1 << self.randrange(8)
                case 1 if found:
                    found[at % len(found)] = self.randrange(256)
                case 2:
                    del found[at:]
                case 3:
                    del found[at:end]
                case 4:
                    found[at:at] = found[at:end]
                case 5:
                    found[at:end] = self.choice(TOKENS)
                case _:
                    found[at:at] = self.choice(TOKENS)
        return bytes(found)

    def file(self, path: Path) -> None:
        """A file with a few things changed, or gone, or a directory."""
        what = self.randrange(40)
        if what == 0:
            path.unlink()
        elif what == 1:
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(self.data(path.read_bytes()))

    def structure(self, value: Any) -> Any:
        """A nested value with one thing in it changed."""
        if isinstance(value, dict) and value and self.random() < 0.85:
            key = self.choice(list(value))
            match self.randrange(8):
                case 0:
                    return {name: item for name, item in value.items() if name != key}
                case 1:
                    return value | {str(self.choice(VALUES))[:200]: self.choice(VALUES)}
            return value | {key: self.structure(value[key])}
        if isinstance(value, list) and value and self.random() < 0.85:
            at = self.randrange(len(value))
            match self.randrange(8):
                case 0:
                    return value[:at] + value[at + 1 :]
                case 1:
                    return [*value, self.choice(VALUES)]
            return [*value[:at], self.structure(value[at]), *value[at + 1 :]]
        return self.choice(VALUES)

    def json_file(self, path: Path) -> None:
        """A JSON file of another structure."""
        value = json.loads(path.read_text())
        for _ in range(self.choice((1, 1, 2))):
            value = self.structure(value)
        path.write_text(json.dumps(value))
