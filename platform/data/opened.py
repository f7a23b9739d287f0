"""The bytes of a published file, as blocks of whole lines: decompressed, and in an encoding whose
line break is one byte.

What a file is shows in its first bytes: gzip, bzip2, xz, zstd and lz4 are undone, UTF-16 and UTF-32
become UTF-8, and what cannot be read here (archives, databases, pickles, web pages in place of a
download …) is refused by its name.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from crossfed.platform.errors import CrossfedError

HEAD = 1 << 18
"""Bytes that are looked at to recognise a file."""

BLOCK = 1 << 25
"""Bytes that are read at a time."""

_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}

_FOREIGN = {
    b"7z\xbc\xaf\x27\x1c": "is a 7-Zip archive; unpack it first",
    b"Rar!": "is a RAR archive; unpack it first",
    b"ARROW1": "is an Arrow (Feather) file; write it as Parquet",
    b"FEA1": "is a Feather file; write it as Parquet",
    b"\x89HDF": "is an HDF5 file; write its table as Parquet or CSV",
    b"SQLite format 3": "is an SQLite database; write its table as Parquet or CSV",
    b"%PDF": "is a PDF document; give the data themselves",
    b"\xd0\xcf\x11\xe0": "is an Excel workbook of the old kind; save it as .xlsx or CSV",
    b"\x93NUMPY": "is a NumPy array; write it as Parquet or CSV with a header",
    b"version https://git-lfs": "is a pointer of Git LFS, not the file; fetch it with `git lfs "
    "pull`",
}
_PICKLES = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
_PAGES = (b"<!doctype html", b"<html")
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def line_based(encoding: str) -> bool:
    """Whether a line break is one byte in an encoding; raises LookupError where there is no such
    encoding.
    """
    return "\n".encode(encoding) == b"\n"


class Opened:
    """A file whose bytes are understood.

    Attributes:
        head: the first bytes, decompressed and recoded, without a mark of UTF-8; whole lines where
            the file has more.
        encoding: of `head` and of the blocks.

    Args:
        encoding: as stated by the user; None takes UTF-8, and UTF-16 or UTF-32 where the bytes say
            so.

    Raises:
        CrossfedError: the file is of a kind that is not read.
    """

    def __init__(self, path: Path, encoding: str | None) -> None:
        self.path = path
        with path.open("rb") as file:
            magic = file.read(16)
        self._compression = next((c for m, c in _COMPRESSIONS.items() if magic.startswith(m)), None)
        with self._file() as file:
            raw = _read(file, HEAD)
        _refuse_foreign(path, raw, self._compression is not None)
        self._coded = encoding or _wide(raw) or "utf-8"
        self.encoding = self._coded if line_based(self._coded) else "utf-8"
        self._bare_returns = b"\r" in raw and b"\n" not in raw and self._coded == self.encoding
        self.head = next(self.blocks(HEAD), b"")

    def _file(self) -> BinaryIO:
        match self._compression:
            case "gzip":
                return cast(BinaryIO, gzip.open(self.path, "rb"))
            case "bz2":
                return cast(BinaryIO, bz2.open(self.path, "rb"))
            case "xz":
                return cast(BinaryIO, lzma.open(self.path, "rb"))
            case None:
                return self.path.open("rb")
        return cast(BinaryIO, pa.input_stream(str(self.path), compression=self._compression))

    def _pieces(self, size: int) -> Iterator[bytes]:
        """The file's bytes, recoded where they have to be."""
        recode = (
            None if self._coded == self.encoding else codecs.getincrementaldecoder(self._coded)()
        )
        with self._file() as file:
            first = True
            while piece := _read(file, size):
                if recode is not None:
                    piece = recode.decode(piece).replace("\ufeff", "").encode()
                if first:
                    piece, first = piece.removeprefix(codecs.BOM_UTF8), False
                yield piece.replace(b"\r", b"\n") if self._bare_returns else piece
            if recode is not None:
                recode.decode(b"", final=True)

    def blocks(self, size: int = BLOCK) -> Iterator[bytes]:
        """Blocks of about `size` bytes, each of whole lines; only the last may lack its line
        break.
        """
        left: list[bytes] = []
        for piece in self._pieces(size):
            end = piece.rfind(b"\n") + 1
            if end:
                yield b"".join((*left, piece[:end])) if left else piece[:end]
                left = [piece[end:]] if end < len(piece) else []
            else:
                left.append(piece)
        if left:
            yield b"".join(left)

    def lines(self) -> Iterator[bytes]:
        """The file's lines with their line breaks."""
        for block in self.blocks(HEAD):
            start = 0
            while (end := block.find(b"\n", start) + 1) > 0:
                yield block[start:end]
                start = end
            if start < len(block):
                yield block[start:]


def _read(file: BinaryIO, size: int) -> bytes:
    """As many bytes as asked for, unless the file ends: a decompressor may give fewer at a time."""
    pieces, left = [], size
    while left and (piece := file.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _refuse_foreign(path: Path, head: bytes, compressed: bool) -> None:
    for magic, words in _FOREIGN.items():
        if head.startswith(magic):
            raise CrossfedError(f"{path} {words}.")
    if head.startswith(_PICKLES):
        raise CrossfedError(
            f"{path} is a Python pickle, which is not loaded because it may run any code; "
            f"write it as Parquet or CSV."
        )
    if compressed and head.startswith(tuple(_COMPRESSIONS)):
        raise CrossfedError(f"{path} is compressed twice; decompress it once.")
    if head[257:262] == b"ustar":
        raise CrossfedError(f"{path} is a tar archive; unpack it first.")
    if head.lstrip()[:15].lower().startswith(_PAGES):
        raise CrossfedError(f"{path} is a web page, not data; download the file itself.")
    if compressed and head.startswith((b"PAR1", b"PK\x03\x04")):
        raise CrossfedError(f"{path} is a compressed Parquet or Excel file; decompress it first.")


def _wide(head: bytes) -> str | None:
    """UTF-16 or UTF-32 by its mark, or UTF-16 by zeros in every second byte."""
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return name
    half = len(head) // 2
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if half and not even and odd > 0.4 * half:
        return "utf-16-le"
    if half and not odd and even > 0.4 * half:
        return "utf-16-be"
    return None


def encoding_hint(line: bytes) -> str:
    """What encoding a line that is not UTF-8 may have, as advice: the bytes 0x80 to 0x9f are no
    letters in Latin-1.
    """
    if b"\0" in line:
        return "the line holds zero bytes: the file is damaged, or binary"
    if any(0x80 <= byte <= 0x9F for byte in line):
        return (
            "set `encoding` of this source, e.g. cp1252 (Western Windows), cp1251 "
            "(Cyrillic), gb18030 or shift_jis"
        )
    return "set `encoding` of this source, e.g. latin-1"


__all__ = ["BLOCK", "HEAD", "Opened", "encoding_hint", "line_based"]
