"""Prepared data on disk: one directory per data set, Parquet per domain, a manifest that says how
it was made.

    DIR/manifest.json
    DIR/<domain>/interactions.parquet   user int32, item int32, time int64; sorted by user, then time, then source order
    DIR/<domain>/items.parquet          item int32, id string, text string ("" where an item has none)
    DIR/<domain>/users.parquet          user int32, id string

Users and items are row numbers `0 … n-1` of their domain. The same input gives the same bytes under
the same pyarrow version; `fingerprint` is taken over the columns' values, so that it also stays the
same over pyarrow versions.

Equal times: two interactions of one user at the same time keep the order in which they were given
to the writer.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from crossfed.platform.data.columns import stable_order
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import SERVER

FORMAT = "crossfed-prepared-data"
VERSION = 1
MANIFEST = "manifest.json"
ROW_GROUP = 1 << 20
"""Rows per Parquet row group; fixed, so that the bytes do not depend on how the rows were handed
over.
"""

_TABLES = {
    "interactions": pa.schema([("user", pa.int32()), ("item", pa.int32()), ("time", pa.int64())]),
    "items": pa.schema([("item", pa.int32()), ("id", pa.string()), ("text", pa.string())]),
    "users": pa.schema([("user", pa.int32()), ("id", pa.string())]),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

Int64s = npt.NDArray[np.int64]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def valid_domain_name(name: str) -> bool:
    """Whether a domain may have this name: letters, digits, `_`, `-` and `.`, and not the
    server's.
    """
    return bool(_NAME.fullmatch(name)) and name != SERVER


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a failed write of prepared data into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise CrossfedError(
            f"Cannot write prepared data to {path}: {reason}; give a place that is writable "
            f"and has room."
        ) from error


@contextmanager
def _reading(path: Path, advice: str) -> Iterator[None]:
    """Turn a failed read of a file into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise CrossfedError(f"Cannot read {path}: {reason}; {advice}.") from error


class _Column:
    """Hash of a column's values, independent of how the rows were cut into chunks."""

    def __init__(self) -> None:
        self._data, self._lengths = hashlib.sha256(), hashlib.sha256()

    def update(self, values: pa.Array) -> None:
        if pa.types.is_string(values.type):
            self._lengths.update(
                pc.binary_length(values).to_numpy(zero_copy_only=False).astype("<i4").tobytes()
            )
            self._data.update("".join(values.to_pylist()).encode())
        else:
            self._data.update(np.ascontiguousarray(values.to_numpy()).tobytes())

    def digest(self) -> bytes:
        return self._data.digest() + self._lengths.digest()


class _Table:
    """One Parquet file written in row groups of a fixed size, with its content hash kept along the
    way.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.schema, self.rows = path, _TABLES[kind], 0
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._columns = [_Column() for _ in self.schema]
        # Everything that shapes the bytes is said here, so that no default of a later pyarrow
        # changes them silently.
        self._writer = pq.ParquetWriter(
            path,
            self.schema,
            version="2.6",
            compression="zstd",
            compression_level=3,
            use_dictionary=False,
            data_page_version="1.0",
            write_statistics=True,
            store_schema=False,
        )

    def append(self, *columns: Any) -> None:
        table = pa.table(
            [pa.array(c, type=f.type) for c, f in zip(columns, self.schema, strict=True)],
            schema=self.schema,
        )
        for column, values in zip(self._columns, table.columns, strict=True):
            for chunk in values.chunks:
                column.update(chunk)
        self.rows += len(table)
        self._pending.append(table)
        self._pending_rows += len(table)
        if self._pending_rows >= ROW_GROUP:
            self._flush(whole_groups_only=True)

    def _flush(self, whole_groups_only: bool) -> None:
        table = (
            pa.concat_tables(self._pending, promote_options="none")
            if self._pending
            else self.schema.empty_table()
        )
        start = 0
        while len(table) - start >= ROW_GROUP or (not whole_groups_only and start < len(table)):
            self._writer.write_table(
                table.slice(start, ROW_GROUP).combine_chunks(), row_group_size=ROW_GROUP
            )
            start = min(start + ROW_GROUP, len(table))
        self._pending, self._pending_rows = [table.slice(start)], len(table) - start

    def finish(self) -> dict[str, Any]:
        """Write what is left and describe the file for the manifest."""
        self._flush(whole_groups_only=False)
        self._writer.close()
        content = hashlib.sha256(b"".join(c.digest() for c in self._columns)).hexdigest()
        return {
            "bytes": self.path.stat().st_size,
            "rows": self.rows,
            "sha256": file_sha256(self.path),
            "content": content,
        }

    def abandon(self) -> None:
        self._writer.close()


class DomainWriter:
    """One domain written piece by piece in bounded memory. Made by `Writer.open_domain`."""

    def __init__(self, name: str, folder: Path, counts: Mapping[str, Any]) -> None:
        self.name, self.counts = name, dict(counts)
        self._tables = {kind: _Table(folder / f"{kind}.parquet", kind) for kind in _TABLES}
        self._last_user = -1
        self._highest = {"user": -1, "item": -1}
        self._without_text = 0

    def append_interactions(
        self, users: npt.ArrayLike, items: npt.ArrayLike, times: npt.ArrayLike
    ) -> None:
        """Add whole users: every user in this batch is higher than every user in the batches
        before.

        Args:
            users, items, times: [n] integers; rows may be in any order, and are sorted here by user
                and time with ties in the order given.

        Raises:
            CrossfedError: a user that already had a batch, or a negative row number.
        """
        users, items, times = (np.asarray(column, np.int64) for column in (users, items, times))
        if not len(users) == len(items) == len(times):
            raise ValueError(f"domain {self.name}: users, items and times have different lengths")
        if not len(users):
            return
        if users.min() <= self._last_user:
            raise CrossfedError(
                f"Domain {self.name}: interactions of user {users.min()} come after those of "
                f"user {self._last_user}; "
                "hand over batches of whole users in ascending order."
            )
        if items.min() < 0:
            raise CrossfedError(f"Domain {self.name}: item number {items.min()} is negative.")
        # stable sorts: ties keep the given order
        order = stable_order(users) if (np.diff(times) >= 0).all() else np.lexsort((times, users))
        self._last_user = int(users.max())
        self._highest = {
            "user": self._last_user,
            "item": max(self._highest["item"], int(items.max())),
        }
        self._tables["interactions"].append(
            users[order].astype(np.int32),
            items[order].astype(np.int32),
            np.ascontiguousarray(times[order]),
        )

    def append_items(self, ids: Sequence[str], texts: Sequence[str]) -> None:
        """Add the next items, numbered on from those before; `texts` has "" where an item has
        none.
        """
        table = self._tables["items"]
        self._without_text += sum(not text for text in texts)
        table.append(np.arange(table.rows, table.rows + len(ids), dtype=np.int32), ids, texts)

    def append_users(self, ids: Sequence[str]) -> None:
        """Add the next users, numbered on from those before."""
        table = self._tables["users"]
        table.append(np.arange(table.rows, table.rows + len(ids), dtype=np.int32), ids)

    def finish(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Close the files; returns the domain's counts and its files, both for the manifest."""
        n_users, n_items = self._tables["users"].rows, self._tables["items"].rows
        n = self._tables["interactions"].rows
        if not n:
            raise CrossfedError(
                f"Domain {self.name} has no interactions left; loosen its filters or its k-core."
            )
        for kind, size in (("user", n_users), ("item", n_items)):
            if self._highest[kind] >= size:
                raise CrossfedError(
                    f"Domain {self.name}: {kind} number {self._highest[kind]} occurs but only "
                    f"{size} {kind}s "
                    "were given."
                )
        files = {
            f"{self.name}/{kind}.parquet": table.finish() for kind, table in self._tables.items()
        }
        described: dict[str, Any] = {
            "users": n_users,
            "items": n_items,
            "interactions": n,
            "average_length": round(n / n_users, 6),
            "density": round(n / (n_users * n_items), 12),
            "items_without_text": self._without_text,
        }
        if self.counts:
            described["preparation"] = self.counts
        return described, files

    def abandon(self) -> None:
        for table in self._tables.values():
            table.abandon()


class Writer:
    """Writes prepared data; a context manager.

    Everything goes to a temporary sibling directory, which gets its final name only when the block
    ends well.

    Args:
        path: the directory to make; it must not exist (or be empty).
        recipe: how the data were made, as JSON values; kept in the manifest.
        synthetic: whether the data were generated; kept in the manifest and shown with every
            number.

    Raises:
        CrossfedError: the directory exists and is not empty, or cannot be written.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any], synthetic: bool = False) -> None:
        self.path, self.recipe, self.synthetic = Path(path), dict(recipe), synthetic
        self._sources: list[dict[str, Any]] = []
        self._domains: dict[str, dict[str, Any]] = {}
        self._files: dict[str, dict[str, Any]] = {}
        self._open: DomainWriter | None = None
        self._temporary: Path | None = None

    def __enter__(self) -> Self:
        if self.path.is_file() or (self.path.is_dir() and any(self.path.iterdir())):
            raise CrossfedError(
                f"{self.path} exists already and is not empty; give another "
                f"--out or delete it first."
            )
        with _writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._temporary = Path(
                tempfile.mkdtemp(prefix=f".{self.path.name}-", dir=self.path.parent)
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._temporary is not None
        try:
            with _writing(self.path):
                if error is None:
                    self._finish()
                elif isinstance(error, OSError):
                    raise error
        finally:
            if self._open is not None:
                with suppress(OSError):  # on a full disk; the file is removed anyway
                    self._open.abandon()
            shutil.rmtree(self._temporary, ignore_errors=True)

    def add_source(self, name: str, path: Path, sha256: str | None = None) -> None:
        """Record a source file: its name as in the spec, size and SHA-256 (computed where not
        given).
        """
        with _reading(path, "check the source"):
            self._sources.append(
                {"name": name, "bytes": path.stat().st_size, "sha256": sha256 or file_sha256(path)}
            )

    def open_domain(self, name: str, counts: Mapping[str, Any] | None = None) -> DomainWriter:
        """Begin the next domain, to be filled in batches. The domain before it is finished first.

        Args:
            name: letters, digits, `_`, `-` and `.`; not "server".
            counts: what the preparation counted (broken lines, duplicates …), for the manifest.
        """
        assert self._temporary is not None, "use Writer in a with block"
        if not valid_domain_name(name):
            raise CrossfedError(
                f"Domain name {name!r} is not usable; take letters, digits, '_', '-' and '.', "
                f"and not '{SERVER}'."
            )
        self._finish_domain()
        if name in self._domains:
            raise CrossfedError(f"Domain {name} occurs twice; give every domain its own name.")
        with _writing(self.path):
            (self._temporary / name).mkdir()
            self._open = DomainWriter(name, self._temporary / name, counts or {})
        return self._open

    def add_domain(
        self,
        name: str,
        users: npt.ArrayLike,
        items: npt.ArrayLike,
        times: npt.ArrayLike,
        user_ids: Sequence[str],
        item_ids: Sequence[str],
        item_texts: Sequence[str],
        counts: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a whole domain.

        Args:
            users, items, times: [n_interactions] row numbers and seconds; any order, ties stay in
                the given order.
            user_ids: [n_users]. item_ids, item_texts: [n_items]; "" for an item without text.
            counts: as in `open_domain`.
        """
        domain = self.open_domain(name, counts)
        domain.append_interactions(users, items, times)
        domain.append_users(user_ids)
        domain.append_items(item_ids, item_texts)
        self._finish_domain()

    def _finish_domain(self) -> None:
        if self._open is not None:
            self._domains[self._open.name], files = self._open.finish()
            self._files |= files
            self._open = None

    def _finish(self) -> None:
        assert self._temporary is not None
        with _writing(self.path):
            self._finish_domain()
            if not self._domains:
                raise CrossfedError(f"No domain was written to {self.path}.")
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "synthetic": self.synthetic,
                "recipe": self.recipe,
                "sources": self._sources,
                "domains": self._domains,
                "overlap": self._overlap(),
                "files": self._files,
            }
            text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            (self._temporary / MANIFEST).write_text(text, encoding="utf-8")
            self._temporary.chmod(0o755)  # mkdtemp's 0700 would lock other users of a cluster out
            self._temporary.rename(self.path)

    def _overlap(self) -> list[dict[str, Any]]:
        """Users with the same id in every pair of domains, and in all of them where there are more
        than two.

        `users` counts those in each of the domains, `of` those in any of them.
        """
        assert self._temporary is not None
        ids = {
            d: pq.read_table(self._temporary / d / "users.parquet", columns=["id"])[
                "id"
            ].combine_chunks()
            for d in self._domains
        }
        groups = list(itertools.combinations(ids, 2)) + ([tuple(ids)] if len(ids) > 2 else [])
        overlap = []
        for group in groups:
            shared = ids[group[0]]
            for domain in group[1:]:
                shared = shared.filter(pc.is_in(shared, value_set=ids[domain]))
            of = pc.count_distinct(pa.concat_arrays([ids[domain] for domain in group])).as_py()
            overlap.append({"domains": list(group), "users": len(shared), "of": of})
        return overlap


class PreparedData:
    """A prepared data directory, read domain by domain. Made by `PreparedData.open`.

    Attributes:
        path: the directory. manifest: the parsed manifest. domains: the domains' names in their
            stated order.
        fingerprint: SHA-256 over the domains' names and all files' contents; changes when any value
            changes.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.domains: tuple[str, ...] = tuple(manifest["domains"])
        parts = [
            FORMAT,
            str(VERSION),
            *(f"{name} {file['content']}" for name, file in manifest["files"].items()),
        ]
        self.fingerprint: str = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @classmethod
    def open(cls, path: Path) -> PreparedData:
        """Open a directory made by `Writer`; checks the manifest, its version and every file's
        presence and size.

        Raises:
            CrossfedError: not a prepared data directory, one from another version, or one that is
                not complete.
        """
        path = Path(path)
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except NotADirectoryError:
            if path.suffix.lower() in (".yaml", ".yml"):
                raise CrossfedError(
                    f"{path} is a spec, which must be prepared first: crossfed data prepare "
                    f"{path} --out DIR, and then "
                    "--data DIR."
                ) from None
            raise CrossfedError(
                f"{path} is a file; give the directory that `crossfed data prepare` made."
            ) from None
        except FileNotFoundError:
            what = (
                "is not a prepared data directory (no manifest.json)"
                if path.is_dir()
                else "does not exist"
            )
            raise CrossfedError(f"{path} {what}; make one with `crossfed data prepare`.") from None
        except (OSError, ValueError) as error:
            raise CrossfedError(
                f"{path / MANIFEST} cannot be read ({error}); prepare the data again."
            ) from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise CrossfedError(
                f"{path / MANIFEST} is not the manifest of prepared data; make one with "
                f"`crossfed data prepare`."
            )
        if manifest.get("version") != VERSION:
            raise CrossfedError(
                f"{path} was prepared in format version {manifest.get('version')}, "
                f"this crossfed reads version {VERSION}; prepare the data again."
            )
        if (
            missing := {"domains", "files", "recipe", "sources", "overlap", "synthetic"}
            - manifest.keys()
        ):
            raise CrossfedError(
                f"{path / MANIFEST} lacks {', '.join(sorted(missing))}; prepare the data again."
            )
        try:
            rows = {
                name: {
                    kind: manifest["files"][f"{name}/{kind}.parquet"]["rows"] for kind in _TABLES
                }
                for name in manifest["domains"]
            }
            agree = rows == {
                name: {k: told[k] for k in _TABLES} for name, told in manifest["domains"].items()
            }
            agree &= manifest["files"].keys() == {
                f"{name}/{kind}.parquet" for name in rows for kind in _TABLES
            }
            agree &= all(
                isinstance(told[key], str)
                for told in manifest["files"].values()
                for key in ("sha256", "content")
            )
        except (AttributeError, KeyError, TypeError):
            agree = False
        if not agree:
            raise CrossfedError(
                f"{path / MANIFEST} disagrees with itself on domains and files; prepare the "
                f"data again."
            )
        for name in rows:
            if not valid_domain_name(name):
                raise CrossfedError(
                    f"{path / MANIFEST} names a domain {name!r}; take letters, digits, '_', "
                    f"'-' and '.', and not '{SERVER}'."
                )
        for name, expected in manifest["files"].items():
            file = path / name
            if not file.is_file():
                raise CrossfedError(f"{file} is missing; prepare the data again.")
            if file.stat().st_size != expected["bytes"]:
                raise CrossfedError(
                    f"{file} has {file.stat().st_size} bytes where the manifest says "
                    f"{expected['bytes']}; "
                    "prepare the data again."
                )
        return cls(path, manifest)

    def verify(self) -> None:
        """Compare the SHA-256 of every file with the manifest; raises CrossfedError at the first
        difference.
        """
        for name, expected in self.manifest["files"].items():
            with _reading(self.path / name, "prepare the data again"):
                actual = file_sha256(self.path / name)
            if actual != expected["sha256"]:
                raise CrossfedError(
                    f"{self.path / name} differs from what was prepared; prepare the data again."
                )

    @property
    def synthetic(self) -> bool:
        """Whether the data were generated rather than observed."""
        return bool(self.manifest["synthetic"])

    def times(self, domain: str) -> str:
        """What a domain's times are: "seconds" since 1970, an "order", or "none": its rows are in
        no order of time.
        """
        kind = self._described(domain).get("preparation", {}).get("times", "seconds")
        return str(kind)

    def sizes(self, domain: str) -> tuple[int, int]:
        """(n_users, n_items) of a domain."""
        described = self._described(domain)
        return described["users"], described["items"]

    def interactions(self, domain: str) -> tuple[Int64s, Int64s, Int64s]:
        """Users, items and times, each int64 [n_interactions], sorted by user, time and source
        order.
        """
        table = self._read(domain, "interactions")
        users, items, times = (
            table[name].to_numpy().astype(np.int64) for name in ("user", "item", "time")
        )
        for numbers, size, kind in zip(
            (users, items), self.sizes(domain), ("user", "item"), strict=True
        ):
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < size:
                raise CrossfedError(
                    f"{self.path / domain}: {kind} numbers lie outside 0 … {size - 1}; prepare "
                    f"the data again."
                )
        return users, items, times

    def item_texts(self, domain: str) -> list[str]:
        """Cleaned text of every item [n_items]; "" where it has none."""
        return self._read(domain, "items", "text")["text"].to_pylist()

    def item_ids(self, domain: str) -> list[str]:
        """The source's id of every item [n_items]."""
        return self._read(domain, "items", "id")["id"].to_pylist()

    def user_ids(self, domain: str) -> list[str]:
        """The source's id of every user [n_users]; for the domain's own use."""
        return self._read(domain, "users", "id")["id"].to_pylist()

    def _described(self, domain: str) -> dict[str, Any]:
        if domain not in self.manifest["domains"]:
            raise CrossfedError(
                f"{self.path} has no domain {domain!r}; it has {', '.join(self.domains)}."
            )
        return self.manifest["domains"][domain]

    def _read(self, domain: str, kind: str, *columns: str) -> pa.Table:
        self._described(domain)
        file = self.path / domain / f"{kind}.parquet"
        try:
            schema = pq.read_schema(file)
            if schema.names != _TABLES[kind].names or schema.types != _TABLES[kind].types:
                raise CrossfedError(
                    f"{file} has other columns than prepared data; prepare the data again."
                )
            rows, expected = (
                pq.read_metadata(file).num_rows,
                self.manifest["files"][f"{domain}/{kind}.parquet"]["rows"],
            )
            if rows != expected:
                raise CrossfedError(
                    f"{file} has {rows} rows where the manifest says {expected}; prepare the "
                    f"data again."
                )
            return pq.read_table(file, columns=list(columns) or None, memory_map=False)
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise CrossfedError(
                f"{file} cannot be read ({reason}); prepare the data again."
            ) from error
