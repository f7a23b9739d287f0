"""`crossfed run` and `crossfed tune` as jobs of a cluster, through Ray's job server on the head.

A job goes on when the machine that submitted it sleeps or is gone, and is found again by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import logging
import os
import secrets
import shlex
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from crossfed.platform.cluster import connect
from crossfed.platform.errors import CrossfedError
from crossfed.platform.registry import nearest

ADDRESS = "http://127.0.0.1:8265"
"""Where `ray dashboard cluster.yaml` brings the head's job server."""
JOINING = ("run", "tune", "tune-all", "doctor")
"""Commands that take a cluster's address, and write runs: they need --out."""
READING = ("evaluate", "compare", "audit", "report", "analyse")
"""Commands that read runs: each names at least one, by a path that every machine sees."""
COMMANDS = (*JOINING, *READING)
"""What can be submitted."""
TOP = (
    "data",
    "runs",
    "shared",
    "build",
    "dist",
    "mlruns",
    "mlartifacts",
    "wandb",
    "outputs",
    "env",
)
"""Not uploaded from the top of the working directory."""
ANYWHERE = (
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    ".env",
    "node_modules",
    "__pycache__",
    ".*_cache",
    ".cache",
    ".tox",
    ".nox",
    ".types",
    ".hypothesis",
    "*.egg-info",
    "*.pyc",
    "*.db",
    "*.ckpt",
    ".ipynb_checkpoints",
    ".DS_Store",
    "auth_token",
    ".netrc",
    ".ssh",
    ".aws",
)
"""Not uploaded from anywhere in it: version control, environments, caches, what holds secrets."""
LIMIT_MB = 50
"""Ray takes uploads of some 100 MB at most, and keeps them in the head's memory."""

_PATIENCE = (5.0, 60.0)
"""Seconds to connect, and between two bytes."""
_PAUSE = 2.0
"""Seconds between two attempts to follow."""
_LOST = 600.0
"""Seconds without an answer after which following gives up; the job goes on."""


# -- what is run -----------------------------------------------------------------------------------


def entrypoint(arguments: Sequence[str]) -> str:
    """The shell command of a job: the given `crossfed` command, on the cluster that the job is part
    of.

    Args:
        arguments: of `crossfed`, e.g. `["run", "fedcrf", "--data", "/mnt/shared/data/x", "--out",
            "/mnt/shared/runs"]`.

    Raises:
        CrossfedError: it is no command that makes sense as a job, or it would write into the job's
            temporary folder.
    """
    words = list(arguments[1:] if arguments[:1] == ["crossfed"] else arguments)
    if not words:
        raise CrossfedError(
            "Say what to run: crossfed submit -- run fedcrf --data /mnt/shared/data/… --out "
            "/mnt/shared/runs"
        )
    if words[0] not in COMMANDS:
        raise CrossfedError(f"{words[0]!r} cannot be submitted{nearest(words[0], COMMANDS)}")
    for option in ("--out", "--data", "--to", "--out-file"):
        value = _value(words, option)
        if value is not None and not value.startswith("/") and "://" not in value:
            raise CrossfedError(
                f"{option} {value} is relative to a temporary folder in a job; give a path or "
                f"URI that every machine of the "
                f"cluster sees, such as /mnt/shared/{value}."
            )
    if words[0] in READING:
        _absolute(words)
        return shlex.join(["crossfed", *words])
    if _value(words, "--out") is None:
        raise CrossfedError(
            "--out is missing: a job's working directory is temporary; give a path or URI that "
            "every machine of the cluster "
            "sees, such as --out /mnt/shared/runs."
        )
    if _value(words, "--address") is None and _joins(words):
        words += ["--address", "auto"]
    return shlex.join(["crossfed", *words])


def _absolute(words: Sequence[str]) -> None:
    """Refuse a command that reads runs by paths that mean nothing in a job's temporary folder.

    Its runs are given by path or URI, or by name together with --out.
    """
    given = [word for word in words[1:] if not word.startswith("-")]
    seen = [word for word in given if word.startswith(("/", "mlflow:")) or "://" in word]
    if not seen:
        raise CrossfedError(
            f"{words[0]} names no run that a job would find: its working directory is "
            f"temporary; give runs by a path that "
            "every machine of the cluster sees, such as /mnt/shared/runs/NAME, or names with "
            "--out /mnt/shared/runs."
        )
    if (
        words[0] in ("report", "analyse")
        and _value(words, "--to") is None
        and _value(words, "--out") is None
    ):
        raise CrossfedError(
            f"--to is missing: {words[0]} writes into the job's working directory otherwise, "
            f"which is temporary; give a folder "
            "that every machine of the cluster sees, such as --to /mnt/shared/reports."
        )


def _value(words: Sequence[str], option: str) -> str | None:
    """The value of an option, the last one where it is given twice."""
    found = None
    for index, word in enumerate(words):
        if word == option:
            found = words[index + 1] if index + 1 < len(words) else ""
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def _joins(words: Sequence[str]) -> bool:
    """Whether the command takes an address: what goes on with a run or study has it from its
    files.
    """
    if words[0] == "run" and _value(words, "--resume") is not None:
        return False
    return not (words[0] == "tune" and words[1:2] and words[1] in ("resume", "extend", "show"))


def job_name(command: str) -> str:
    """A name that says what the job is, new each time."""
    words = [word for word in shlex.split(command)[1:] if not word.startswith("-")][:2]
    stem = "-".join(
        "".join(char if char.isalnum() else "_" for char in PurePosixPath(word).name)
        for word in words
    )
    return f"{stem[:40]}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


# -- what is uploaded ------------------------------------------------------------------------------


def files(folder: Path, exclude: Sequence[str] = ()) -> list[Path]:
    """The files of a working directory that a job gets, in order.

    Args:
        exclude: further patterns, of a file's or folder's name, or of its path from the folder.

    Raises:
        CrossfedError: there is no such folder.
    """
    if not folder.is_dir():
        raise CrossfedError(f"There is no working directory {folder}.")
    patterns = [*ANYWHERE, *exclude]

    def unwanted(path: Path) -> bool:
        inside = path.relative_to(folder)
        if len(inside.parts) == 1 and path.name in TOP:
            return True
        return any(
            fnmatch.fnmatch(path.name, one) or fnmatch.fnmatch(inside.as_posix(), one.rstrip("/"))
            for one in patterns
        )

    found = []
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not unwanted(Path(above, name)) and not Path(above, name).is_symlink()
        )
        found += [
            path
            for name in sorted(names)
            if (path := Path(above, name)).is_file() and not unwanted(path)
        ]
    return found


def pack(
    folder: Path, target: Path, exclude: Sequence[str] = (), limit_mb: float = LIMIT_MB
) -> tuple[int, int]:
    """Write what a job gets into a zip file; the same files give the same bytes, which the cluster
    takes once.

    Returns:
        How many files, and the size of the zip in bytes.

    Raises:
        CrossfedError: it is above the limit; the largest entries are named.
    """
    found = files(folder, exclude)
    sizes = {path: path.stat().st_size for path in found}
    if sum(sizes.values()) <= 20 * limit_mb * 1e6:  # else it is not even packed
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
            for path in found:
                about = zipfile.ZipInfo(path.relative_to(folder).as_posix(), (1980, 1, 1, 0, 0, 0))
                about.external_attr = (path.stat().st_mode & 0o777) << 16
                about.compress_type = zipfile.ZIP_DEFLATED
                packed.writestr(about, path.read_bytes())
        size = target.stat().st_size
    else:
        size = sum(sizes.values())
    if size > limit_mb * 1e6:
        top: dict[str, int] = {}
        for path, bytes_ in sizes.items():
            first = path.relative_to(folder).parts[0]
            top[first] = top.get(first, 0) + bytes_
        largest = sorted(top.items(), key=lambda row: -row[1])[:3]
        raise CrossfedError(
            f"The working directory {folder} is {size / 1e6:,.0f} MB to upload, above "
            f"{limit_mb:g} MB: "
            + ", ".join(f"{name} {bytes_ / 1e6:,.1f} MB" for name, bytes_ in largest)
            + "; leave some out with --exclude, choose a smaller --working-dir, or "
            "--no-upload: the job's machines have crossfed."
        )
    return len(found), size


# -- the job server --------------------------------------------------------------------------------


class _Client(JobSubmissionClient):
    """Ray's client, every request with a time limit, at the address that was given and no other."""

    def __init__(self, address: str) -> None:
        logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(
            logging.WARNING
        )  # what it uploads is told already
        # Ray lets these override an address that is given
        kept = {
            name: os.environ.pop(name)
            for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
            if name in os.environ
        }
        try:
            super().__init__(address)
        finally:
            os.environ.update(kept)

    def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
        return super()._do_request(method, endpoint, **{"timeout": _PATIENCE, **more})


def server(address: str | None) -> JobSubmissionClient:
    """The job server at an address, by default RAY_API_SERVER_ADDRESS, else where `ray dashboard`
    brings it.

    Raises:
        CrossfedError: nothing answers there, it is no job server, or it refuses our token.
    """
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or ADDRESS
    if "://" not in address and ":" in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")):
        raise CrossfedError(
            f"--address {address} is no job server; it is reached by http, as in {ADDRESS} "
            f"after `ray dashboard`."
        )
    told = f"No job server answers at {address}"
    try:
        connect.authenticate()
        return _Client(address)
    except AuthenticationError as error:
        raise CrossfedError(f"{told}: {connect.refused()}.") from error
    except (requests.Timeout, OSError) as error:  # requests' own errors are OSErrors too
        if isinstance(error, requests.HTTPError | requests.JSONDecodeError):
            raise CrossfedError(f"{told}: what listens there is not Ray's dashboard.") from error
        if "RAY_AUTH_TOKEN_PATH" in str(error):
            raise CrossfedError(f"{told}: {error}.") from error
        refused = "refused" in str(error) or str(error).startswith("Failed to connect")
        reason = "connection refused" if refused else "no answer in time"
        raise CrossfedError(
            f"{told}: {reason}; run `ray dashboard cluster.yaml` in another terminal; the head "
            f"needs crossfed[cluster]."
        ) from error
    except (ValueError, KeyError, RuntimeError) as error:
        raise CrossfedError(f"{told}: what listens there is not Ray's dashboard.") from error


def submit(client: JobSubmissionClient, command: str, package: Path | None) -> str:
    """Hand a command to the job server; the job's name.

    Args:
        package: a zip file that becomes the job's working directory.
    """
    runtime: dict[str, Any] = {"env_vars": {"PYTHONUNBUFFERED": "1"}}  # logs as they are written
    if package is not None:
        runtime["working_dir"] = str(package)
    try:
        return client.submit_job(
            entrypoint=command, submission_id=job_name(command), runtime_env=runtime
        )
    except (RuntimeError, OSError) as error:
        raise CrossfedError(f"The job was not taken: {_first_line(error)}.") from error


@contextlib.contextmanager
def upload(
    folder: Path | None, exclude: Sequence[str], limit_mb: float, told: Callable[[str], None]
) -> Iterator[Path | None]:
    """The working directory packed into a file for as long as that is needed, after saying how
    large it is; None without one.
    """
    if folder is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "working_dir.zip"
        count, size = pack(folder, package, exclude, limit_mb)
        told(f"uploading {folder}: {count:,} files, {size / 1e6:.1f} MB")
        yield package


def jobs(client: JobSubmissionClient) -> list[Any]:
    """The cluster's jobs, the newest first."""
    found = [job for job in client.list_jobs() if job.submission_id]
    return sorted(found, key=lambda job: -(job.start_time or 0))


def _info(client: JobSubmissionClient, name: str) -> Any:
    """What the server knows of a job.

    Raises:
        CrossfedError: it has none of this name.
    """
    try:
        return client.get_job_info(name)
    except RuntimeError as error:
        if "404" not in str(error):
            raise
        known = [str(job.submission_id) for job in jobs(client)]
        raise CrossfedError(f"The cluster has no job {name!r}{nearest(name, known)}") from error


def follow(
    client: JobSubmissionClient,
    name: str,
    write: Callable[[str], None],
    warn: Callable[[str], None],
) -> int:
    """Write a job's log from its beginning until it ends; the job's exit code.

    A connection that breaks (a laptop that slept, a tunnel that fell) is made again, and the log
    goes on where it was.

    Raises:
        CrossfedError: there is no such job, or the server has not answered for ten minutes; the job
            goes on.
    """
    log, heard, told = _Log(write), time.monotonic(), False
    while True:
        try:
            job = _info(client, name)
            heard, told = time.monotonic(), False
            asyncio.run(log.read(client, name))
            if JobStatus(job.status).is_terminal():
                return exit_code(job)
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            silent = time.monotonic() - heard
            if silent > _LOST:
                raise CrossfedError(
                    f"The job server has not answered for {silent / 60:.0f} minutes "
                    f"({_first_line(error)}); the job goes on: "
                    f"crossfed submit --follow {name}"
                ) from error
            if not told:
                warn(f"the connection broke ({_first_line(error)}); trying again")
                told = True
        time.sleep(_PAUSE)


class _Log:
    """A job's log, each part written once, however often it is read from the beginning."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.shown = 0
        """Characters written."""

    async def read(self, client: JobSubmissionClient, name: str) -> None:
        """Write what is new, until the job ends or the connection breaks.

        Ray's own reader has no heartbeat: it would wait for ever for a server that is gone without
        a word.
        """
        at = 0
        url = f"{client._address}/api/jobs/{name}/logs/tail"
        async with (
            aiohttp.ClientSession(headers=client._headers) as session,
            session.ws_connect(url, heartbeat=20.0) as stream,
        ):
            async for message in stream:
                if message.type != aiohttp.WSMsgType.TEXT:
                    continue
                if new := message.data[max(0, self.shown - at) :]:
                    self.write(new)
                at += len(message.data)
                self.shown = max(self.shown, at)
            # which ends the loop without an error
            if stream.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE:
                raise ConnectionResetError("the log was cut off")


def exit_code(job: Any) -> int:
    """What the job's command ended with; 130 for one that was stopped, 1 where it is not known."""
    if job.status == JobStatus.STOPPED:
        return 130
    if job.driver_exit_code is not None:
        return int(job.driver_exit_code)
    return 0 if job.status == JobStatus.SUCCEEDED else 1


def stop(client: JobSubmissionClient, name: str, patience: float = 120.0) -> str:
    """End a job as SIGTERM does, and wait until it has ended; its status.

    Raises:
        CrossfedError: there is no such job.
    """
    _info(client, name)
    client.stop_job(name)
    end = time.monotonic() + patience
    while (
        not JobStatus((job := _info(client, name)).status).is_terminal() and time.monotonic() < end
    ):
        time.sleep(1)
    return str(job.status)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
