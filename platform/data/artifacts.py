"""Artifacts: arrays computed once and shared by runs, trials and actors, kept under the hash of
what made them.

    ROOT/text/ab/ab12….npy    the array
    ROOT/text/ab/ab12….json   what it is, and the array file's size and SHA-256

ROOT is `$CROSSFED_CACHE`, or else `~/.cache/crossfed`. An array is written beside its place and
then moved there, its description after it; a file that does not agree with its description is
computed again. Of several processes that want the same array, one computes it and the others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from crossfed.platform.data.text import (
    DEFAULT_ENCODER,
    MissingText,
    Progress,
    embed,
    make_encoder,
    missing_rows,
)
from crossfed.platform.errors import CrossfedError
from crossfed.platform.uris import home

Array = npt.NDArray[Any]

FORMAT = 1
"""Goes into every key: raise it when the same inputs come to give other values."""


def default_root() -> Path:
    """`$CROSSFED_CACHE`, or else `~/.cache/crossfed`."""
    given = os.environ.get("CROSSFED_CACHE")
    if given:
        return Path(given).expanduser()
    folder = home()
    # without a home, as for a container's uid that has none: one per user in the folder for
    # temporary files
    return (
        folder / ".cache" / "crossfed"
        if folder
        else Path(tempfile.gettempdir()) / f"crossfed-{os.getuid()}"
    )


def text_key(encoder_id: str, texts: Sequence[str], missing: MissingText) -> str:
    """SHA-256, in hex, over everything that text vectors depend on."""
    header = {"format": FORMAT, "encoder": encoder_id, "missing": missing, "texts": len(texts)}
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


class ArtifactStore:
    """Arrays on disk, addressed by what made them.

    Args:
        root: where they lie; made when first needed. None is `default_root()`.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root if root is not None else default_root()).absolute()

    def ensure_text(
        self,
        texts: Sequence[str],
        encoder_spec: str = DEFAULT_ENCODER,
        missing: MissingText = "zero",
        domain: str = "items",
        progress: Progress | None = None,
        device: str = "cpu",
    ) -> tuple[Path, Array, bool]:
        """A domain's text vectors; loads the encoder's model only where they are not there yet.

        Args:
            texts: [n_items] cleaned texts, "" for an item without text.
            encoder_spec, device: as in `crossfed.platform.data.text.make_encoder`.
            missing: what an item without text gets.
            domain: the domain's name, for messages.
            progress: told (texts done, texts in all) while encoding.

        Returns:
            the file, its contents as a read-only memory map float32 [n_items, width], and whether
            it was there already.

        Raises:
            CrossfedError: as `embed` and `ensure` do.
        """
        absent = missing_rows(texts, missing, domain)
        encoder = make_encoder(encoder_spec, device)
        path, vectors, hit = self.ensure(
            "text",
            text_key(encoder.id, texts, missing),
            lambda: embed(texts, encoder, missing, domain, progress),
            {
                "encoder": encoder.id,
                "missing": missing,
                "without_text": len(absent),
                "items": len(texts),
            },
        )
        if not np.isfinite(vectors).all():
            raise CrossfedError(
                f"The text vectors of {domain} in {path} hold NaN or infinity; delete that file."
            )
        return path, vectors, hit

    def ensure(
        self, kind: str, key: str, compute: Callable[[], Array], about: Mapping[str, Any]
    ) -> tuple[Path, Array, bool]:
        """The array of a key, computed where it is not there yet.

        Args:
            kind: a folder for this sort of artifact. key: hash over everything that the array
                depends on.
            compute: makes the array. about: what it is, as JSON values; kept beside it.

        Returns:
            the file, its contents as a read-only memory map, and whether it was there already.

        Raises:
            CrossfedError: the disk is full or cannot be written.
        """
        path = self.root / kind / key[:2] / f"{key}.npy"
        if (found := _open(path)) is not None:
            return path, found, True
        with contextlib.ExitStack() as stack:
            with self._writing():
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(path.with_suffix(".lock")))
            if (found := _open(path)) is not None:  # another process was faster
                return path, found, True
            array = np.ascontiguousarray(compute())
            with self._writing():
                self._write(path, array, about)
            stored = _open(path)
        if stored is None:
            raise CrossfedError(
                f"{path} does not read back as it was written; check the disk, or set "
                f"CROSSFED_CACHE to another folder."
            )
        return path, stored, False

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CrossfedError(
                f"Cannot write the artifact cache {self.root}: {error.strerror or error}; make "
                f"room there, "
                "or set CROSSFED_CACHE to a folder that can be written."
            ) from error

    def _write(self, path: Path, array: Array, about: Mapping[str, Any]) -> None:
        def save(file: IO[bytes]) -> None:
            np.save(file, array, allow_pickle=False)

        size, digest = _replace(path, save)
        described = {
            "about": dict(about),
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "bytes": size,
            "sha256": digest,
        }
        text = json.dumps(described, indent=2, ensure_ascii=False) + "\n"
        _replace(path.with_suffix(".json"), lambda file: file.write(text.encode()))


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> tuple[int, str]:
    """Write a file beside `path` and move it there whole; returns its size and SHA-256."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        temporary.chmod(0o644)  # mkstemp's 0600 would lock other users of a shared cache out
        size = temporary.stat().st_size
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return size, digest


def _open(path: Path) -> Array | None:
    """The array in read-only memory, or None where it is absent or does not agree with its
    description.
    """
    try:
        described = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != described["bytes"]:
                return None
            if hashlib.file_digest(file, "sha256").hexdigest() != described["sha256"]:
                return None
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError):
        return None
