"""A file's bytes: decompressed, recoded, in blocks of whole lines; what is no data is refused."""

from __future__ import annotations

import bz2
import gzip
import lzma

import pyarrow as pa
import pytest

from crossfed.platform.data.opened import Opened, encoding_hint, line_based
from crossfed.platform.errors import CrossfedError

TEXT = "user,item\n" + "".join(f"ü{k},i{k}\n" for k in range(500)) + "last,line"


def opened(tmp_path, content: bytes, encoding: str | None = None) -> Opened:
    (tmp_path / "f").write_bytes(content)
    return Opened(tmp_path / "f", encoding)


@pytest.mark.parametrize("size", [7, 100, 1 << 20])
@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        TEXT.encode("utf-8-sig"),
        gzip.compress(TEXT.encode()),
        bz2.compress(TEXT.encode()),
        lzma.compress(TEXT.encode()),
        pa.compress(TEXT.encode(), codec="zstd", asbytes=True),
        TEXT.encode("utf-16"),
        "user".encode("utf-16-le") + TEXT.removeprefix("user").encode("utf-16-le"),
        TEXT.encode("utf-32"),
        gzip.compress(TEXT.encode("utf-16")),
        TEXT.replace("\n", "\r").encode(),
    ],
    ids=[
        "plain",
        "mark",
        "gzip",
        "bz2",
        "xz",
        "zstd",
        "utf16",
        "utf16-le",
        "utf32",
        "gzip16",
        "returns",
    ],
)
def test_blocks_are_whole_lines_of_the_same_text(tmp_path, content, size):
    file = opened(tmp_path, content)
    blocks = list(file.blocks(size))
    assert b"".join(blocks).decode(file.encoding) == TEXT
    assert all(block.endswith(b"\n") for block in blocks[:-1]) and blocks[-1].endswith(b"line")
    assert b"".join(file.lines()) == b"".join(blocks) and len(list(file.lines())) == 502
    assert file.head.startswith(b"user,item\n") and file.encoding == "utf-8"


def test_an_encoding_that_is_said_is_kept_where_its_line_break_is_one_byte(tmp_path):
    file = opened(tmp_path, "é\n".encode("latin-1"), "latin-1")
    assert (file.encoding, b"".join(file.blocks())) == ("latin-1", b"\xe9\n")
    wide = opened(tmp_path, "é\n".encode("utf-16-be"), "utf-16-be")
    assert (wide.encoding, b"".join(wide.blocks())) == ("utf-8", "é\n".encode())
    assert line_based("cp1252") and not line_based("utf-16")
    with pytest.raises(LookupError):
        line_based("utf9")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"Rar!...", "is a RAR archive; unpack it first"),
        (b"\x89HDF....", "is an HDF5 file"),
        (b"\x80\x04\x95abc", "is a Python pickle, which is not loaded because it may run any code"),
        (b" \n<!DOCTYPE html>", "is a web page, not data; download the file itself"),
        (b"\0" * 257 + b"ustar", "is a tar archive"),
        (gzip.compress(b"\0" * 257 + b"ustar"), "is a tar archive"),
        (gzip.compress(gzip.compress(b"a")), "is compressed twice; decompress it once"),
        (gzip.compress(b"PAR1..."), "is a compressed Parquet or Excel file"),
    ],
)
def test_what_is_no_data_is_refused_by_its_name(tmp_path, content, words):
    with pytest.raises(CrossfedError, match=rf"/f {words}"):
        opened(tmp_path, content)


def test_an_empty_file_has_an_empty_head(tmp_path):
    file = opened(tmp_path, b"")
    assert file.head == b"" and list(file.blocks()) == [] and list(file.lines()) == []


def test_the_hint_looks_at_the_bytes():
    assert "zero bytes" in encoding_hint(b"a\0\xe9")
    assert "cp1252" in encoding_hint(b"\x93quoted\x94")
    assert encoding_hint(b"caf\xe9").endswith("e.g. latin-1")
