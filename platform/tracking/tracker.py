"""Experiment tracking: one MLflow run per federated run, and a spool on disk for the time the store
is away.

The tracker is a small client of its own over `mlflow.MlflowClient`; no fluent API, no autologging,
no global state. Every action is one *entry*: it is appended to `<run>/tracking-spool.jsonl` and
applied at once when the store answers; otherwise it waits there, and all that waits is applied in
order at the next round, at the end, or by `replay`. Entries carry their own time stamps, and MLflow
ignores an identical metric, so that applying one twice (after a kill between the store's commit and
ours) changes nothing. Nothing that happens to the store breaks a run, unless `require` asks for
that at the start.

No interactions pass through here: metrics are scalars, data sets are names, fingerprints and
counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from crossfed.platform.errors import CrossfedError
from crossfed.platform.tracking.spool import REFUSED, STATE, Spool, State, now
from crossfed.platform.tracking.store import TAG_LIMIT, RefusedError, Store, bounded, probe, words
from crossfed.platform.uris import sqlite_path, sqlite_uri

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
from crossfed.platform.config.settings import TrackingSettings
from crossfed.platform.uris import redact

_NAME_LIMIT = 250
_PARAM_LIMIT = 6000
_SYSTEM_AFTER = 60.0
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_LOG = logging.getLogger("crossfed.tracking")

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, slots=True)
class DatasetInput:
    """What is told about one data set: no interactions.

    Args:
        name: the domain's name.
        digest: fingerprint of the prepared data; MLflow keeps its first 36 characters.
        source: where it came from, in words or as an address.
        profile: counts (users, items, interactions …).
    """

    name: str
    digest: str
    source: str
    profile: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """What `replay` did: entries applied, left waiting, refused by the store; their run; why it
    stopped.
    """

    applied: int
    left: int
    refused: int
    run_id: str | None
    uri: str
    problem: str | None


def safe_name(name: str) -> str:
    """A metric, parameter or tag name that MLflow accepts; an accepted name is returned unchanged.

    `@` becomes `_at_`, other refused characters become `_`, path-like parts (`//`, `..`, a leading
    `/`) go, and a name beyond 250 characters ends in a hash of the whole.
    """
    clean = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
    clean = "/".join(part for part in clean.split("/") if part not in ("", ".", ".."))
    if not clean.strip():
        clean = "unnamed"
    if len(clean) > _NAME_LIMIT:
        clean = f"{clean[: _NAME_LIMIT - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return clean


def model_name(name: str) -> str:
    """A name that MLflow accepts for a logged model; an accepted one is returned unchanged."""
    return re.sub(r"[/:.%\"']", "_", name)


def resolve_uri(settings: TrackingSettings, out: Path) -> str:
    """The store's URI: the settings', else MLFLOW_TRACKING_URI, else `sqlite:///<out>/mlflow.db`.

    Args:
        out: the folder that holds the run directories.

    Raises:
        CrossfedError: for a file store or anything else that is neither a server nor a database.
    """
    where = "tracking.uri"
    uri = settings.uri
    if uri is None and (uri := os.environ.get("MLFLOW_TRACKING_URI") or None):
        where = "the environment variable MLFLOW_TRACKING_URI"
    if uri is None:
        return sqlite_uri(out / "mlflow.db")
    scheme = urlsplit(uri).scheme.split("+")[0]
    if scheme in ("http", "https") and urlsplit(uri).netloc:
        return uri.rstrip("/")
    if scheme == "sqlite":
        path = sqlite_path(uri)
        if path is None:
            raise CrossfedError(f"{where} is '{uri}': name a file, e.g. sqlite:///runs/mlflow.db")
        return sqlite_uri(path)
    if scheme in _DATABASES:
        return uri
    raise CrossfedError(
        f"{where} is '{redact(uri)}', which is no store that MLflow still supports: give a "
        f"database such as "
        "sqlite:///runs/mlflow.db, or the address of a server such as http://localhost:5000"
    )


class Tracker:
    """Records one federated run; make it with `Tracker.start`.

    Attributes:
        run_id: the MLflow run, None until a store has answered (or when tracking is off).
        status: where the record is, in words.
        url: the run's page when a server holds it and answers, else None.
    """

    def __init__(
        self,
        settings: TrackingSettings,
        run_dir: Path,
        uri: str,
        warn: Callable[[str], None] | None,
    ) -> None:
        self._settings = settings
        self._dir = run_dir
        self._uri = uri
        self._warn = warn or _LOG.warning
        self._state = State()
        self._store = Store(uri, run_dir.parent)
        self._spool = Spool(run_dir)
        self._problem: str | None = None
        self._warned = False
        self._refused = 0
        self._dropped = 0
        self._retry_at = 0.0
        self._ended = False
        self._began = time.monotonic()

    @classmethod
    def start(
        cls,
        settings: TrackingSettings,
        run_dir: Path,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        datasets: Sequence[DatasetInput],
        resume_run_id: str | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> Tracker:
        """Open the run in the store, or continue `resume_run_id`; without a store that answers,
        spool.

        Args:
            run_dir: the run's directory; its parent holds the default store.
            params: only what was searched or asked for, and the configuration's hash.
            warn: where warnings go; the `crossfed.tracking` logger by default.

        Raises:
            CrossfedError: for an unusable URI, or with `require` when the store is out of reach.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        if not settings.enabled:
            return cls(settings, run_dir, "", warn)
        uri = resolve_uri(settings, run_dir.parent)
        tracker = cls(settings, run_dir, uri, warn)
        old = State.read(run_dir)
        waiting = old is not None and old.run_id is None and tracker._spool.waiting
        if old is not None and (resume_run_id is not None or waiting):
            tracker._state = old
        else:
            tracker._spool.set_aside()
        state = tracker._state
        state.uri, state.run_id = redact(uri), resume_run_id or state.run_id
        tracker._save_state()
        tracker._submit(
            {
                "op": "open",
                "key": state.key,
                "run_id": state.run_id,
                "time": now(),
                "run_name": run_name,
                "experiment": settings.experiment,
                "parent": settings.parent_run_id,
                "params": {safe_name(k): str(v)[:_PARAM_LIMIT] for k, v in params.items()},
                "tags": {safe_name(k): str(v)[:TAG_LIMIT] for k, v in tags.items()},
                "datasets": [asdict(d) for d in datasets],
            },
            strict=settings.require,
        )
        return tracker

    @property
    def run_id(self) -> str | None:
        return self._state.run_id

    @property
    def url(self) -> str | None:
        if not self._uri.startswith("http") or self._problem or self._state.run_id is None:
            return None
        return f"{redact(self._uri)}/#/experiments/{self._state.experiment_id}/runs/{self._state.run_id}"  # noqa: E501

    @property
    def status(self) -> str:
        if not self._settings.enabled:
            return "off"
        place = redact(self._uri)
        if self._problem:
            text = (
                f"{place} is out of reach ({self._problem}); {self._spool.count()} entries "
                f"wait in {self._spool.path}"
            )
        else:
            text = f"recorded in {place}"
        if self._refused:
            text += f"; {self._refused} entries were refused, see {self._dir / REFUSED}"
        if self._dropped:
            text += f"; {self._dropped} values were not finite and left out"
        return text

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record a round's metrics (see `metric_names`) in one request.

        NaN and infinite values are left out and counted: MLflow stores an infinity as ±1.8e308,
        which ruins its charts. Of a step that was recorded before (a run continued, or gone back to
        its last committed round) nothing is recorded again.
        """
        if not self._settings.enabled:
            return
        if self._settings.system_metrics and time.monotonic() - self._began >= _SYSTEM_AFTER:
            metrics = {**metrics, **_system_metrics(self._dir)}
        values: dict[str, float] = {}
        for name, value in metrics.items():
            key, number = safe_name(name), float(value)
            if not math.isfinite(number):
                self._dropped += 1
                continue
            values[key] = number
        values = {
            key: value
            for key, value in values.items()
            if step > self._state.last.get(key, step - 1)
        }
        if not values:
            return
        self._submit({"op": "metrics", "metrics": values, "step": step, "time": now()})
        self._state.last.update(dict.fromkeys(values, step))
        self._save_state()

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Record a file, or everything in a directory, under `folder`."""
        if self._settings.enabled:
            self._submit({"op": "artifact", "path": self._relative(path), "folder": folder})

    def describe(self, text: str) -> None:
        """Set the text that the run's page shows as its description, in Markdown."""
        if self._settings.enabled:
            self._submit({"op": "tags", "tags": {"mlflow.note.content": text[:TAG_LIMIT]}})

    def figure(self, figure: Figure, name: str) -> None:
        """Save a figure as `<run>/figures/<name>.png` and record it; saved with tracking off,
        too.
        """
        path = self._dir / "figures" / f"{name}.png"
        try:
            path.parent.mkdir(exist_ok=True)
            figure.savefig(path)
        except OSError as error:
            self._warn(f"the figure {path} cannot be written: {error.strerror or error}")
            return
        self.artifact(path, "figures")

    def model(
        self,
        save: Callable[[Path, str, Path], None],
        run_dir: Path,
        domain: str,
        step: int = 0,
        register: str | None = None,
        name: str | None = None,
    ) -> None:
        """Record one domain's trained model as an MLflow model.

        Args:
            save: writes the model of a run's domain to a folder
                (`crossfed.platform.serving.save.save`).
            register: the registered model of which it becomes a new version. name: the model's own;
                its domain by default.
        """
        if not self._settings.enabled:
            return
        folder = self._dir / f"mlflow-model-{domain}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with bounded():
                save(run_dir, domain, folder)
        except Exception as error:  # the run's own model is in its directory already
            self._warn(f"tracking: the model of {domain} cannot be recorded ({words(error)})")
            return
        entry = {
            "op": "model",
            "path": self._relative(folder),
            "step": step,
            "name": model_name(name or domain),
        }
        self._submit(entry | ({"register": register} if register else {}))

    def finish(self, status: Status, reason: str | None = None, outcome: str | None = None) -> None:
        """Close the run with its end and the reason; the last attempt to empty the spool. Later
        calls do nothing.

        Args:
            status: one of MLflow's. outcome: the tag beside it, where MLflow's word is not precise
                enough ("pruned").
        """
        if not self._settings.enabled or self._ended:
            return
        self._ended = True
        self._retry_at = 0.0
        outcome = outcome or status.lower()
        self._submit(
            {"op": "finish", "status": status, "reason": reason, "outcome": outcome, "time": now()}
        )
        self._save_state()
        if self._problem:
            self._warn(
                f"tracking: {self._spool.count()} entries wait in {self._spool.path}; "
                f"replay them when {redact(self._uri)} answers again"
            )

    def _relative(self, path: Path) -> str:
        path = path.resolve()
        root = self._dir.resolve()
        return str(path.relative_to(root) if path.is_relative_to(root) else path)

    def _save_state(self) -> None:
        # a full disk: the record in the store matters more than this memory of it
        with contextlib.suppress(OSError):
            self._state.write(self._dir)

    def _submit(self, entry: dict[str, Any], strict: bool = False) -> None:
        """Apply an entry after those that wait, or let it wait."""
        try:
            self._spool.append(entry)
        except OSError as error:
            self._note_away(f"the spool cannot be written: {error.strerror or error}")
        began = time.monotonic()
        if began < self._retry_at:
            return
        done = _drain(self._spool, self._store, self._state, self._dir)
        self._refused += done.refused
        if done.problem is None:
            self._problem = None
            self._warned = False
            return
        if strict:
            self._spool.set_aside()
            raise CrossfedError(
                f"the tracking store {redact(self._uri)} is out of reach ({done.problem}): "
                f"start it, give another "
                "tracking.uri, or set tracking.require to false to spool to disk"
            )
        # A store that does not answer may take at most a tenth of the run's time.
        self._retry_at = time.monotonic() + 10 * (time.monotonic() - began)
        self._note_away(done.problem)

    def _note_away(self, problem: str) -> None:
        self._problem = problem
        if not self._warned:
            self._warned = True
            self._warn(
                f"tracking: {redact(self._uri)} is out of reach ({problem}); the run goes on "
                f"and records to "
                f"{self._spool.path}"
            )


def close(
    settings: TrackingSettings, run_dir: Path, status: Status, reason: str, outcome: str
) -> None:
    """Record the end of a run whose own process could not: it was killed. A run that was never
    recorded stays so.
    """
    state = State.read(run_dir) if settings.enabled else None
    if state is not None:
        tracker = Tracker(settings, run_dir, resolve_uri(settings, run_dir.parent), None)
        tracker._state = state
        tracker.finish(status, reason, outcome)


@contextlib.contextmanager
def reading(uri: str) -> Iterator[MlflowClient]:
    """A client to look into a store with, quietly.

    Raises:
        CrossfedError: the store is away, or refuses what it is asked.
    """
    if uri.startswith("sqlite") and not (path := sqlite_path(uri) or Path()).is_file():
        raise CrossfedError(
            f"There is no tracking database {path}; name the store with "
            f"--tracking-uri, or its folder."
        )
    with bounded(patient=True):
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            probe(uri)
            yield MlflowClient(tracking_uri=uri)
        except (MlflowException, OSError) as error:
            raise CrossfedError(
                f"The tracking store {redact(uri)} gives no answer: {words(error)}"
            ) from error


def add_artifact(run_dir: Path, path: Path, folder: str | None = None) -> str:
    """Record one more file with a run or study that was recorded before; says where, or why not.

    Args:
        run_dir: the directory of the run or study. path: the file. folder: where among the
            artifacts.
    """
    try:
        state = State.read(run_dir)
        if state is None or state.run_id is None:
            return f"{run_dir.name} is not recorded in MLflow"
        uri = resolve_uri(
            TrackingSettings(uri=None if "***@" in state.uri else state.uri), run_dir.parent
        )
        with reading(uri) as client:
            client.log_artifact(state.run_id, str(path), folder)
    except CrossfedError as error:
        return f"not recorded in MLflow: {error}"
    return f"recorded with {run_dir.name} in {redact(uri)}"


def replay(run_dir: Path, uri: str | None = None) -> ReplaySummary:
    """Apply what a run could not record while its store was away.

    Args:
        run_dir: the run's directory.
        uri: the store; by default the one that the run was started with.

    Raises:
        CrossfedError: if the directory holds no tracked run, or the URI is unusable.
    """
    state = State.read(run_dir)
    if state is None:
        raise CrossfedError(f"{run_dir} holds no tracked run: {STATE} is absent")
    if uri is None and "***@" in state.uri:
        raise CrossfedError(
            f"the store {state.uri} asks for a password, which is not kept in "
            f"{run_dir}: give the URI"
        )
    target = resolve_uri(TrackingSettings(uri=uri or state.uri), run_dir.parent)
    spool = Spool(run_dir)
    done = _drain(spool, Store(target, run_dir.parent), state, run_dir)
    state.uri = redact(target)
    state.write(run_dir)
    return ReplaySummary(
        done.applied, spool.count(), done.refused, state.run_id, redact(target), done.problem
    )


@dataclass(slots=True)
class _Done:
    applied: int = 0
    refused: int = 0
    problem: str | None = None


def _drain(spool: Spool, store: Store, state: State, run_dir: Path) -> _Done:
    """Apply the waiting entries in order, up to the first one for which the store is away."""
    done = _Done()
    try:
        with spool.locked():
            entries = spool.read()
            position = 0
            try:
                for entry in entries:
                    with _undisturbed():
                        try:
                            store.apply(entry, state, run_dir)
                            done.applied += 1
                        except RefusedError as error:
                            done.refused += 1
                            with (run_dir / REFUSED).open("a", encoding="utf-8") as file:
                                file.write(
                                    json.dumps({"reason": str(error), "entry": entry}) + "\n"
                                )
                        position += 1
            finally:  # also on Ctrl-C: what was applied is not applied again
                spool.keep(entries[position:])
    # whatever happens to the store, the run goes on; the reason is told by the caller
    except Exception as error:
        done.problem = words(error)
        store.ready = False
    return done


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of one call: SQLAlchemy leaves a torn transaction
    otherwise. A second one ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if waiting:
            before[number](number, frame)
        waiting.append((number, frame))

    # what is not a Python function (ignored, or the end of the process) stays as it is
    kinds: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    before = {kind: handler for kind in kinds if callable(handler := signal.getsignal(kind))}
    for kind in before:
        signal.signal(kind, wait)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    if waiting:
        before[waiting[0][0]](*waiting[0])


def _system_metrics(run_dir: Path) -> dict[str, float]:
    """CPU, memory and disk of the driving machine, under MLflow's own names, which its UI shows on
    a tab of their own.

    Memory of processes counts this process and all that it started: with a local Ray, every actor.
    """
    import psutil

    family = [psutil.Process()]
    family += family[0].children(recursive=True)
    resident = 0
    for process in family:
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            resident += process.memory_info().rss
    return {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_percentage": psutil.virtual_memory().percent,
        "system/process_memory_megabytes": resident / 1e6,
        "system/disk_available_megabytes": psutil.disk_usage(str(run_dir)).free / 1e6,
    }
