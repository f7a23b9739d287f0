"""A run's directory at a URI: every commit and the results are copied there, and another machine
goes on from them.

A run works in a local (or shared) folder. With `--out s3://bucket/prefix` that folder is below
`runs`, and this module copies

    URI/RUN/config.yaml, data.json              when the run starts
    URI/RUN/owner.json                          which process writes here
    URI/RUN/releases.jsonl                      before perturbed messages are delivered: what left is never forgotten
    URI/RUN/history.jsonl, ledger.jsonl         with every commit
    URI/RUN/checkpoints/commit-000012/…         its files, and `manifest.json` last: without it there is no commit
    URI/RUN/…                                   all the rest when the run is done, `result.json` last

URIs are those of `pyarrow.fs` (`s3://`, `gs://`, `abfs://`, `hdfs://`, `file://`). Credentials come
from the environment or the provider's own files (AWS_ACCESS_KEY_ID …, `~/.aws`, an instance's
role), never from the URI; an S3-compatible server is named by AWS_ENDPOINT_URL_S3 or
AWS_ENDPOINT_URL, or by `?endpoint_override=host:port&scheme=http`.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
from pyarrow import fs

from crossfed.platform.checkpoint import MANIFEST, Checkpoints
from crossfed.platform.errors import CrossfedError
from crossfed.platform.layout import RUN_ID
from crossfed.platform.uris import checked

OWNER, RESULT, CHECKPOINTS = "owner.json", "result.json", "checkpoints"


@contextlib.contextmanager
def _reaching(uri: str) -> Iterator[None]:
    """Tell what went wrong with a store in one sentence."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CrossfedError(f"{uri} cannot be reached or used: {reason}") from error


def _open(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system of a URI, and the path in it. A server that does not answer is given up
    within a minute.
    """
    told = urlsplit(uri)
    with _reaching(uri):
        if told.scheme != "s3":
            return fs.FileSystem.from_uri(uri)
        options: dict[str, Any] = dict(parse_qsl(told.query))
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint and "endpoint_override" not in options:
            options |= {
                "scheme": urlsplit(endpoint).scheme,
                "endpoint_override": urlsplit(endpoint).netloc,
            }
        store = fs.S3FileSystem(
            **options,
            connect_timeout=10,
            request_timeout=60,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=4),
            allow_delayed_open=True,  # a small file in one request
        )
        return store, told.netloc + told.path


class Mirror:
    """Copies one run to a URI.

    Args:
        uri: of the run: its name is the last part.
        run_dir: the run's directory here.
        logs: its files that grow, by name.
        warn: told, in a sentence, when commits cannot be copied any more; the next that can is
            whole by itself.

    Raises:
        CrossfedError: the store cannot be written.
    """

    def __init__(self, uri: str, run_dir: Path, logs: Sequence[str], warn: Callable[[str], None]):
        self.uri, self.run_dir, self.logs, self.warn = uri, run_dir, logs, warn
        self.store, self.base = _open(uri)
        self.behind = False
        self.token = secrets.token_hex(8)
        told = {"token": self.token, "host": socket.gethostname(), "pid": os.getpid()}
        with _reaching(uri):
            self._put(json.dumps(told).encode(), OWNER)

    def start(self) -> None:
        """Copy what a run is: its configuration and its data's fingerprint."""
        with _reaching(self.uri):
            self._files("config.yaml", "data.json", *self.logs)

    def record(self, name: str) -> None:
        """Copy one log now.

        Raises:
            CrossfedError: the store does not take it.
        """
        self._mine()
        with _reaching(self.uri):
            self._files(name)

    def commit(self, folder: Path) -> None:
        """Copy a commit, then let it count, then remove older ones than are kept here.

        Raises:
            CrossfedError: another process writes this run now. A store that does not answer is a
                warning.
        """
        self._mine()
        try:
            with _reaching(self.uri):
                self._files(*self.logs)
                self._commit(folder)
            self.behind = False
        except CrossfedError as error:
            if not self.behind:
                self.warn(f"{folder.name} was not copied: {error}; later commits are tried again")
            self.behind = True

    def _commit(self, folder: Path) -> None:
        place = f"{CHECKPOINTS}/{folder.name}"
        self._remove(place)
        for path in sorted(folder.iterdir()):
            if path.name != MANIFEST and path.name[0] != ".":
                self._files(f"{place}/{path.name}")
        self._files(f"{place}/{MANIFEST}")
        kept = {path.name for path in folder.parent.glob("commit-*")}
        for info in self._list(CHECKPOINTS):
            if info.base_name not in kept and info.type == fs.FileType.Directory:
                self._remove(f"{CHECKPOINTS}/{info.base_name}")

    def _remove(self, place: str) -> None:
        """Take a commit away, its manifest first, so that half a commit never looks like a whole
        one.
        """
        with contextlib.suppress(FileNotFoundError):
            self.store.delete_file(f"{self.base}/{place}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self.store.delete_dir(f"{self.base}/{place}")

    def finish(self) -> None:
        """Copy the results.

        Raises:
            CrossfedError: they could not be copied; what to do about it.
        """
        self._mine()
        newest = max(self.run_dir.glob(f"{CHECKPOINTS}/commit-*/{MANIFEST}"), default=None)
        try:
            with _reaching(self.uri):
                if newest is not None:
                    self._commit(newest.parent)
                names = [
                    path.relative_to(self.run_dir).as_posix()
                    for path in sorted(self.run_dir.rglob("*"))
                ]
                shown = [
                    name for name in names if name not in (RESULT, RUN_ID) and not _inner(name)
                ]
                self._files(*shown, RESULT)
        except CrossfedError as error:
            raise CrossfedError(
                f"{self.run_dir} is finished here, but {error} `crossfed run --resume "
                f"{self.run_dir}` copies it."
            ) from error

    def _files(self, *names: str) -> None:
        """Copy files of the run's directory, those that are there."""
        for name in names:
            path = self.run_dir / name
            if path.is_file():
                with path.open("rb") as source, self._stream(name) as target:
                    shutil.copyfileobj(source, target, 1 << 22)

    def _put(self, content: bytes, name: str) -> None:
        with self._stream(name) as target:
            target.write(content)

    def _stream(self, name: str) -> Any:
        path = f"{self.base}/{name}"
        if not isinstance(self.store, fs.S3FileSystem):  # which knows no directories
            self.store.create_dir(posixpath.dirname(path), recursive=True)
        return self.store.open_output_stream(path)

    def _list(self, place: str) -> list[fs.FileInfo]:
        return self.store.get_file_info(
            fs.FileSelector(f"{self.base}/{place}", allow_not_found=True)
        )

    def _mine(self) -> None:
        """Raise CrossfedError where another process has taken the run over. A store that does not
        answer says nothing.
        """
        try:
            with self.store.open_input_stream(f"{self.base}/{OWNER}") as file:
                told = json.loads(file.read())
        except (OSError, ValueError, pa.ArrowException):
            return
        if told.get("token") != self.token:
            raise CrossfedError(
                f"Another process ({told.get('pid')} on {told.get('host')}) goes on with this "
                f"run at {self.uri}; this one ends."
            )


def _inner(name: str) -> bool:
    """Whether a file of a run's directory is not part of what is kept: commits are copied for
    themselves.
    """
    return name.startswith(f"{CHECKPOINTS}/") or any(
        part.startswith(".") for part in name.split("/")
    )


def fetch(uri: str, out: Path, nodes: Callable[[Path], Sequence[str]]) -> Path:
    """Bring a run from a URI into a folder here, with its last complete commit.

    Args:
        uri: of the run.
        out: the folder of run directories; the run's name must be free in it.
        nodes: the run's directory -> the names of its nodes, whose state a commit must hold.

    Raises:
        CrossfedError: there is no such run, the name is taken, or none of the commits is whole.
    """
    uri = checked(uri)
    store, base = _open(uri)
    run_dir = out / posixpath.basename(base)
    if run_dir.exists():
        raise CrossfedError(
            f"{run_dir} is here already: `--resume {run_dir}` goes on with it, another --out "
            f"fetches anew."
        )
    with _reaching(uri):
        found = store.get_file_info(fs.FileSelector(base, recursive=True, allow_not_found=True))
    names = {
        info.path[len(base) + 1 :]: info.path for info in found if info.type == fs.FileType.File
    }
    if "config.yaml" not in names:
        raise CrossfedError(f"There is no run at {uri}: it holds no config.yaml.")
    if strange := [name for name in names if not _plain(name)]:
        raise CrossfedError(
            f"{uri} holds {strange[0]!r}, which leads out of a run's directory; it was not fetched."
        )
    partial = out / f".{run_dir.name}.{secrets.token_hex(4)}"
    commits = sorted(
        {
            name.split("/")[1]
            for name in names
            if name.startswith(f"{CHECKPOINTS}/") and name.endswith(MANIFEST)
        }
    )
    wanted = [name for name in names if not name.startswith(f"{CHECKPOINTS}/") and name != OWNER]
    wanted += [
        name
        for name in names
        if name.split("/")[0] == CHECKPOINTS and name.split("/")[1] in commits
    ]
    try:
        with _reaching(uri):
            for name in wanted:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                with (
                    store.open_input_stream(names[name]) as source,
                    (partial / name).open("wb") as target,
                ):
                    shutil.copyfileobj(source, target, 1 << 22)
        Checkpoints(partial, nodes(partial)).latest()
        partial.rename(run_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return run_dir


def _plain(name: str) -> bool:
    """Whether an object's name is a path inside a directory."""
    return not name.startswith("/") and all(part not in ("", ".", "..") for part in name.split("/"))
