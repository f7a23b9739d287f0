"""Experiment tracking: one MLflow run per federated run, and a spool on disk for the time the store is away.

The tracker is a small client of its own over `mlflow.MlflowClient`; no fluent API, no autologging, no global state.
Every action is one *entry*: it is appended to `<run>/tracking-spool.jsonl` and applied at once when the store answers;
otherwise it waits there, and all that waits is applied in order at the next round, at the end, or by `replay`. Entries
carry their own time stamps, and MLflow ignores an identical metric, so that applying one twice (after a kill between
the store's commit and ours) changes nothing. Nothing that happens to the store breaks a run, unless `require` asks for
that at the start.

No interactions pass through here: metrics are scalars, data sets are names, fingerprints and counts.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import logging
import math
import os
import re
import shutil
import signal
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, field_validator

from crossfed.platform.seam import CrossfedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient

SPOOL = "tracking-spool.jsonl"
"""Entries that wait for the store, one JSON object a line."""
REFUSED = "tracking-refused.jsonl"
"""Entries that the store answered and refused for good, with its reason."""
RUN_ID = "mlflow_run_id"
STATE = "tracking.json"

_KEY_TAG = "crossfed.run_key"
_NAME_LIMIT = 250
_PARAM_LIMIT = 6000
_TAG_LIMIT = 8000
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_LOG = logging.getLogger("crossfed.tracking")

Status = Literal["FINISHED", "FAILED", "KILLED"]


class TrackingSettings(BaseModel):
    """The `tracking:` block of a run's configuration.

    Args:
        enabled: record the run in MLflow at all.
        uri: `http(s)://…` of an MLflow server, or a database (`sqlite:///PATH`, `postgresql://…`). None takes the
            environment variable MLFLOW_TRACKING_URI, and without it `mlflow.db` in the folder that holds the runs.
        experiment: name of the MLflow experiment.
        require: refuse to start when the store is out of reach, instead of spooling.
        system_metrics: record CPU, memory and free disk of the driving machine once per round.
        parent_run_id: the MLflow run under which this one is shown (a study).
        params: which of the method's values are the run's parameters, e.g. those that a study searches; None means all.
        tags: added to the run's own tags.
        artifacts: record files, figures and models besides metrics; they stay in the run's directory otherwise.
        register_models: make each domain's model a new version of the registered model METHOD-DATA-DOMAIN.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    uri: str | None = None
    experiment: str = "crossfed"
    require: bool = False
    system_metrics: bool = True
    parent_run_id: str | None = None
    params: tuple[str, ...] | None = None
    tags: dict[str, str] = {}
    artifacts: bool = True
    register_models: bool = False

    @field_validator("uri")
    @classmethod
    def _without_password(cls, value: str | None) -> str | None:
        if value is not None and redact(value) != value:
            raise ValueError(
                "a password does not belong in a run's files: set MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, in the environment"
            )
        return value


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
    """What `replay` did: entries applied, left waiting, refused by the store; their run; why it stopped."""

    applied: int
    left: int
    refused: int
    run_id: str | None
    uri: str
    problem: str | None


def safe_name(name: str) -> str:
    """A metric, parameter or tag name that MLflow accepts; an accepted name is returned unchanged.

    `@` becomes `_at_`, other refused characters become `_`, path-like parts (`//`, `..`, a leading `/`) go, and a name
    beyond 250 characters ends in a hash of the whole.
    """
    clean = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
    clean = "/".join(part for part in clean.split("/") if part not in ("", ".", ".."))
    if not clean.strip():
        clean = "unnamed"
    if len(clean) > _NAME_LIMIT:
        clean = f"{clean[: _NAME_LIMIT - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return clean


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
        return f"sqlite:///{(out / 'mlflow.db').resolve()}"
    scheme = urlsplit(uri).scheme.split("+")[0]
    if scheme in ("http", "https") and urlsplit(uri).netloc:
        return uri.rstrip("/")
    if scheme == "sqlite":
        path = _sqlite_path(uri)
        if path is None:
            raise CrossfedError(f"{where} is '{uri}': name a file, e.g. sqlite:///runs/mlflow.db")
        return f"sqlite:///{path.resolve()}"
    if scheme in _DATABASES:
        return uri
    raise CrossfedError(
        f"{where} is '{redact(uri)}', which is no store that MLflow still supports: give a database such as "
        "sqlite:///runs/mlflow.db, or the address of a server such as http://localhost:5000"
    )


def redact(uri: str) -> str:
    """The URI without user name and password."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


class Tracker:
    """Records one federated run; make it with `Tracker.start`.

    Attributes:
        run_id: the MLflow run, None until a store has answered (or when tracking is off).
        status: where the record is, in words.
        url: the run's page when a server holds it and answers, else None.
    """

    def __init__(self, settings: TrackingSettings, run_dir: Path, uri: str, warn: Callable[[str], None] | None) -> None:
        self._settings = settings
        self._dir = run_dir
        self._uri = uri
        self._warn = warn or _LOG.warning
        self._state = _State()
        self._store = _Store(uri, run_dir.parent)
        self._spool = _Spool(run_dir)
        self._problem: str | None = None
        self._warned = False
        self._refused = 0
        self._dropped = 0
        self._retry_at = 0.0
        self._ended = False

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
        """Open the run in the store, or continue `resume_run_id`; without a store that answers, spool.

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
        old = _State.read(run_dir)
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
                "time": _now(),
                "run_name": run_name,
                "experiment": settings.experiment,
                "parent": settings.parent_run_id,
                "params": {safe_name(k): str(v)[:_PARAM_LIMIT] for k, v in params.items()},
                "tags": {safe_name(k): str(v)[:_TAG_LIMIT] for k, v in tags.items()},
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
        return f"{redact(self._uri)}/#/experiments/{self._state.experiment_id}/runs/{self._state.run_id}"

    @property
    def status(self) -> str:
        if not self._settings.enabled:
            return "off"
        place = redact(self._uri)
        if self._problem:
            text = (
                f"{place} is out of reach ({self._problem}); {self._spool.count()} entries wait in {self._spool.path}"
            )
        else:
            text = f"recorded in {place}"
        if self._refused:
            text += f"; {self._refused} entries were refused, see {self._dir / REFUSED}"
        if self._dropped:
            text += f"; {self._dropped} values were not finite and left out"
        return text

    def log(self, metrics: Mapping[str, float], step: int, stage: str | None = None) -> None:
        """Record a round's metrics in one request, with the running best of every `val/…` metric as `best/val/…`.

        Bests start anew with every `stage`: what an earlier stage reached is not what the run selects from.

        NaN and infinite values are left out and counted: MLflow stores an infinity as ±1.8e308, which ruins its charts.
        Of a step that was recorded before (a run continued, or gone back to its last committed round) nothing is recorded
        again.
        """
        if not self._settings.enabled:
            return
        if self._settings.system_metrics:
            metrics = {**metrics, **_system_metrics(self._dir)}
        if stage != self._state.stage and stage is not None:
            self._state.stage, self._state.best = stage, {}
        values: dict[str, float] = {}
        for name, value in metrics.items():
            key, number = safe_name(name), float(value)
            if not math.isfinite(number):
                self._dropped += 1
                continue
            values[key] = number
            if key.startswith("val/"):
                best = max(number, self._state.best.get(key, number))
                self._state.best[key] = best
                values[f"best/{key}"] = best
        values = {key: value for key, value in values.items() if step > self._state.last.get(key, step - 1)}
        if not values:
            return
        self._submit({"op": "metrics", "metrics": values, "step": step, "time": _now()})
        self._state.last.update(dict.fromkeys(values, step))
        self._save_state()

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Record a file, or everything in a directory, under `folder`."""
        if self._settings.enabled:
            self._submit({"op": "artifact", "path": self._relative(path), "folder": folder})

    def describe(self, text: str) -> None:
        """Set the text that the run's page shows as its description, in Markdown."""
        if self._settings.enabled:
            self._submit({"op": "tags", "tags": {"mlflow.note.content": text[:_TAG_LIMIT]}})

    def figure(self, figure: Figure, name: str) -> None:
        """Save a figure as `<run>/figures/<name>.png` and record it; saved with tracking off, too."""
        path = self._dir / "figures" / f"{name}.png"
        try:
            path.parent.mkdir(exist_ok=True)
            figure.savefig(path)
        except OSError as error:
            self._warn(f"the figure {path} cannot be written: {error.strerror or error}")
            return
        self.artifact(path, "figures")

    def model(self, run_dir: Path, domain: str, step: int = 0, register: str | None = None) -> None:
        """Record one domain's trained model as an MLflow pyfunc (see `crossfed.platform.served`).

        Args:
            register: the registered model of which it becomes a new version.
        """
        if not self._settings.enabled:
            return
        from crossfed.platform import served

        folder = self._dir / f"mlflow-model-{domain}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with _bounded():
                served.save(run_dir, domain, folder)
        except Exception as error:  # the run's own model is in its directory already
            self._warn(f"tracking: the model of {domain} cannot be recorded ({_words(error)})")
            return
        name, entry = (
            f"recommender-{domain}".replace(".", "_"),
            {"op": "model", "path": self._relative(folder), "step": step},
        )
        self._submit(entry | {"name": name} | ({"register": register} if register else {}))

    def finish(self, status: Status, reason: str | None = None, outcome: str | None = None) -> None:
        """Close the run with its end and the reason; the last attempt to empty the spool. Later calls do nothing.

        Args:
            status: one of MLflow's. outcome: the tag beside it, where MLflow's word is not precise enough ("pruned").
        """
        if not self._settings.enabled or self._ended:
            return
        self._ended = True
        self._retry_at = 0.0
        outcome = outcome or status.lower()
        self._submit({"op": "finish", "status": status, "reason": reason, "outcome": outcome, "time": _now()})
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
        with contextlib.suppress(OSError):  # a full disk: the record in the store matters more than this memory of it
            self._state.write(self._dir)

    def _submit(self, entry: dict[str, Any], strict: bool = False) -> None:
        """Apply an entry after those that wait, or let it wait."""
        try:
            self._spool.append(entry)
        except OSError as error:
            self._note_away(f"the spool cannot be written: {error.strerror or error}")
        now = time.monotonic()
        if now < self._retry_at:
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
                f"the tracking store {redact(self._uri)} is out of reach ({done.problem}): start it, give another "
                "tracking.uri, or set tracking.require to false to spool to disk"
            )
        # A store that does not answer may take at most a tenth of the run's time.
        self._retry_at = time.monotonic() + 10 * (time.monotonic() - now)
        self._note_away(done.problem)

    def _note_away(self, problem: str) -> None:
        self._problem = problem
        if not self._warned:
            self._warned = True
            self._warn(
                f"tracking: {redact(self._uri)} is out of reach ({problem}); the run goes on and records to "
                f"{self._spool.path}"
            )


def close(settings: TrackingSettings, run_dir: Path, status: Status, reason: str, outcome: str) -> None:
    """Record the end of a run whose own process could not: it was killed. A run that was never recorded stays so."""
    state = _State.read(run_dir) if settings.enabled else None
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
    if uri.startswith("sqlite") and not (path := _sqlite_path(uri) or Path()).is_file():
        raise CrossfedError(f"There is no tracking database {path}; name the store with --tracking-uri, or its folder.")
    with _bounded(patient=True):
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            _probe(uri)
            yield MlflowClient(tracking_uri=uri)
        except (MlflowException, OSError) as error:
            raise CrossfedError(f"The tracking store {redact(uri)} gives no answer: {_words(error)}") from error


def add_artifact(run_dir: Path, path: Path, folder: str | None = None) -> str:
    """Record one more file with a run or study that was recorded before; says where, or why not.

    Args:
        run_dir: the directory of the run or study. path: the file. folder: where among the artifacts.
    """
    try:
        state = _State.read(run_dir)
        if state is None or state.run_id is None:
            return f"{run_dir.name} is not recorded in MLflow"
        uri = resolve_uri(TrackingSettings(uri=None if "***@" in state.uri else state.uri), run_dir.parent)
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
    state = _State.read(run_dir)
    if state is None:
        raise CrossfedError(f"{run_dir} holds no tracked run: {STATE} is absent")
    if uri is None and "***@" in state.uri:
        raise CrossfedError(f"the store {state.uri} asks for a password, which is not kept in {run_dir}: give the URI")
    target = resolve_uri(TrackingSettings(uri=uri or state.uri), run_dir.parent)
    spool = _Spool(run_dir)
    done = _drain(spool, _Store(target, run_dir.parent), state, run_dir)
    state.uri = redact(target)
    state.write(run_dir)
    return ReplaySummary(done.applied, spool.count(), done.refused, state.run_id, redact(target), done.problem)


@dataclass(slots=True)
class _State:
    """What the run directory remembers of its MLflow run, so that a resumed run continues it."""

    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    uri: str = ""
    run_id: str | None = None
    experiment_id: str | None = None
    stage: str | None = None
    last: dict[str, int] = field(default_factory=dict)  # metric -> its last recorded step
    best: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path) -> _State | None:
        path = run_dir / STATE
        if not path.is_file():
            return None
        try:
            told = json.loads(path.read_text("utf-8"))
            told.pop("model_id", None)  # of an earlier version
            return cls(**told)
        except (ValueError, TypeError, AttributeError) as error:
            raise CrossfedError(f"{path} is damaged ({error}): delete it to record the run anew") from error

    def write(self, run_dir: Path) -> None:
        _write_atomically(run_dir / STATE, json.dumps(asdict(self), indent=1) + "\n")
        if self.run_id is not None:
            _write_atomically(run_dir / RUN_ID, self.run_id + "\n")


class _Spool:
    """Entries in order, on disk; in memory while the disk refuses them."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / SPOOL
        self._memory: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        from filelock import FileLock

        with FileLock(self.path.with_suffix(".lock"), timeout=5):  # its Timeout is an OSError
            yield

    @property
    def waiting(self) -> bool:
        return self.path.is_file() or bool(self._memory)

    def count(self) -> int:
        return len(self.read())

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry; raises OSError when the disk refuses it, which is then kept in memory."""
        self._memory.append(entry)
        with self.locked():
            torn = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * torn + "".join(json.dumps(e) + "\n" for e in self._memory))
        self._memory.clear()

    def read(self) -> list[dict[str, Any]]:
        """All entries; a last line torn by a kill is left out."""
        entries = []
        if self.path.is_file():
            for line in self.path.read_text("utf-8").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    entries.append(json.loads(line))
        return entries + self._memory

    def keep(self, entries: Sequence[dict[str, Any]]) -> None:
        """Replace what is stored by these entries."""
        if entries:
            _write_atomically(self.path, "".join(json.dumps(e) + "\n" for e in entries))
        else:
            self.path.unlink(missing_ok=True)
        self._memory.clear()

    def set_aside(self) -> None:
        """Move a spool out of the way that belongs to another run."""
        if self.path.is_file():
            self.path.replace(self.path.with_name(f"tracking-spool-{_now()}.jsonl"))


@dataclass(slots=True)
class _Done:
    applied: int = 0
    refused: int = 0
    problem: str | None = None


class _RefusedError(Exception):
    """The store answered, and this entry can never be applied."""


def _drain(spool: _Spool, store: _Store, state: _State, run_dir: Path) -> _Done:
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
                        except _RefusedError as error:
                            done.refused += 1
                            with (run_dir / REFUSED).open("a", encoding="utf-8") as file:
                                file.write(json.dumps({"reason": str(error), "entry": entry}) + "\n")
                        position += 1
            finally:  # also on Ctrl-C: what was applied is not applied again
                spool.keep(entries[position:])
    except Exception as error:  # whatever happens to the store, the run goes on; the reason is told by the caller
        done.problem = _words(error)
        store.ready = False
    return done


class _Store:
    """One MLflow store; raises `_RefusedError` for an entry that it will never take, anything else while it is away."""

    def __init__(self, uri: str, out: Path) -> None:
        self.uri = uri
        self.ready = False
        self._out = out

    def apply(self, entry: dict[str, Any], state: _State, run_dir: Path) -> None:
        with _bounded(patient=entry["op"] in ("artifact", "model")):
            if not self.ready:
                _probe(self.uri)
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException

            client = MlflowClient(tracking_uri=self.uri)
            self.ready = True
            if entry["op"] == "open":
                self._open(client, entry, state)
                with contextlib.suppress(OSError):  # a full disk is no reason to call the store away
                    state.write(run_dir)
                return
            if state.run_id is None:
                raise CrossfedError(f"the entry that opens the run is missing from {run_dir / SPOOL}")
            try:
                getattr(self, f"_{entry['op']}")(client, state.run_id, entry, state, run_dir)
            except MlflowException as error:
                if error.error_code in _FINAL:
                    raise _RefusedError(_words(error)) from error
                raise

    def _open(self, client: MlflowClient, entry: dict[str, Any], state: _State) -> None:
        from mlflow.entities import Dataset, InputTag, Param, RunTag
        from mlflow.entities import DatasetInput as MlflowInput

        state.experiment_id = self._experiment(client, entry["experiment"])
        run = _find_run(client, state, entry)
        fresh = run is None
        if run is None:
            tags = {
                "mlflow.user": getpass.getuser(),
                "mlflow.source.name": "crossfed",
                "mlflow.source.type": "LOCAL",
                **entry["tags"],
                _KEY_TAG: entry["key"],
            }
            if entry["parent"]:
                tags["mlflow.parentRunId"] = entry["parent"]
            run = client.create_run(state.experiment_id, entry["time"], tags, entry["run_name"])
        state.run_id, state.experiment_id = run.info.run_id, run.info.experiment_id
        if not fresh:
            client.update_run(state.run_id, status="RUNNING")
            client.log_batch(state.run_id, tags=[RunTag(k, v) for k, v in entry["tags"].items()])
        params = [Param(k, v) for k, v in entry["params"].items() if k not in run.data.params]
        for first in range(0, len(params), 100):
            client.log_batch(state.run_id, params=params[first : first + 100])
        inputs = [
            MlflowInput(
                Dataset(
                    name=d["name"][:500],
                    digest=d["digest"][:36],
                    source_type="local",
                    source=json.dumps({"uri": d["source"]}),
                    profile=json.dumps(d["profile"]),
                ),
                [InputTag("mlflow.data.context", "training")],
            )
            for d in entry["datasets"]
        ]
        if inputs:
            client.log_inputs(state.run_id, datasets=inputs)

    def _experiment(self, client: MlflowClient, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(name)
        if found is None:
            folder = None if self.uri.startswith("http") else (self._out / "mlartifacts").resolve().as_uri()
            try:
                # the kind decides which pages the UI offers: runs and models, not traces and prompts
                kind = {"mlflow.experimentKind": "custom_model_development"}
                return str(client.create_experiment(name, artifact_location=folder, tags=kind))
            except MlflowException:  # another process was faster
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise CrossfedError(
                f"the experiment '{name}' was deleted there: restore it or set another tracking.experiment"
            )
        return str(found.experiment_id)

    def _metrics(self, client: MlflowClient, run_id: str, entry: dict[str, Any], state: _State, run_dir: Path) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(k, v, entry["time"], entry["step"]) for k, v in entry["metrics"].items()]
        for first in range(0, len(metrics), 1000):
            client.log_batch(run_id, metrics=metrics[first : first + 1000])

    def _tags(self, client: MlflowClient, run_id: str, entry: dict[str, Any], state: _State, run_dir: Path) -> None:
        for key, value in entry["tags"].items():
            client.set_tag(run_id, key, value)

    def _artifact(self, client: MlflowClient, run_id: str, entry: dict[str, Any], state: _State, run_dir: Path) -> None:
        path = run_dir / entry["path"]
        if path.is_dir():
            client.log_artifacts(run_id, str(path), entry["folder"])
        elif path.is_file():
            client.log_artifact(run_id, str(path), entry["folder"])
        else:
            raise _RefusedError(f"{path} is absent")

    def _model(self, client: MlflowClient, run_id: str, entry: dict[str, Any], state: _State, run_dir: Path) -> None:
        from mlflow.entities import LoggedModelOutput
        from mlflow.models import Model

        folder = run_dir / entry["path"]
        if not folder.is_dir():
            raise _RefusedError(f"{folder} is absent")
        if "model_id" not in entry:  # kept with the entry when the rest has to wait
            created = client.create_logged_model(
                str(state.experiment_id), entry["name"], run_id, model_type="recommender"
            )
            entry["model_id"] = created.model_id
        description = Model.load(str(folder / "MLmodel"))
        description.model_id, description.run_id = entry["model_id"], run_id
        description.save(str(folder / "MLmodel"))
        client.log_model_artifacts(entry["model_id"], str(folder))
        client.finalize_logged_model(entry["model_id"], "READY")
        outputs = client.get_run(run_id).outputs
        if entry["model_id"] not in [output.model_id for output in (outputs.model_outputs if outputs else ())]:
            client.log_outputs(run_id, [LoggedModelOutput(entry["model_id"], entry["step"])])
        if entry.get("register"):
            self._register(client, entry["register"], run_id, entry["model_id"])
        shutil.rmtree(folder)

    def _register(self, client: MlflowClient, name: str, run_id: str, model_id: str) -> None:
        """Make a logged model a version of a registered model, once."""
        from mlflow.exceptions import MlflowException

        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # a database's registry would look for the model under the global tracking URI, a server refuses local paths
        source = f"models:/{model_id}"
        if not self.uri.startswith("http"):
            source = client.get_logged_model(model_id).artifact_location
        if not any(version.source == source for version in client.search_model_versions(f"name = '{name}'")):
            client.create_model_version(name, source, run_id, model_id=model_id)

    def _finish(self, client: MlflowClient, run_id: str, entry: dict[str, Any], state: _State, run_dir: Path) -> None:
        if entry["reason"]:
            client.set_tag(run_id, "crossfed.reason", entry["reason"][:_TAG_LIMIT])
        client.set_tag(run_id, "outcome", entry.get("outcome") or entry["status"].lower())
        client.set_terminated(run_id, entry["status"], entry["time"])


_FINAL = frozenset(
    {
        "INVALID_PARAMETER_VALUE",
        "BAD_REQUEST",
        "RESOURCE_DOES_NOT_EXIST",
        "RESOURCE_ALREADY_EXISTS",
    }
)
"""MLflow's answers that no repetition changes. Refused credentials are not among them: they can be mended."""


def _find_run(client: MlflowClient, state: _State, entry: dict[str, Any]) -> Any:
    """The run to continue: by its id, or by its key when it was created just before a kill."""
    from mlflow.exceptions import MlflowException

    if state.run_id is not None:
        try:
            run = client.get_run(state.run_id)
            if run.info.lifecycle_stage == "active":
                return run
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        _LOG.warning("tracking: the MLflow run %s is not there any more; a new one is opened", state.run_id)
        return None
    found = client.search_runs([str(state.experiment_id)], f"tags.`{_KEY_TAG}` = '{entry['key']}'", max_results=1)
    return found[0] if found else None


@contextlib.contextmanager
def _bounded(patient: bool = False) -> Iterator[None]:
    """MLflow with short waits and nothing on stderr, for the time of one call."""
    wanted = {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "120" if patient else "10",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOG_UV_FILES": "false",
        "GIT_PYTHON_REFRESH": "quiet",
    }
    before = {name: os.environ.get(name) for name in wanted}
    loggers = {name: logging.getLogger(name) for name in ("mlflow", "alembic", "urllib3.connectionpool")}
    import mlflow  # noqa: F401  # before the levels are set: it configures its own logger when imported

    levels = {name: logger.level for name, logger in loggers.items()}
    os.environ.update(wanted)
    for logger in loggers.values():
        logger.setLevel(logging.CRITICAL)  # what fails is raised as well, and told in our own words
    try:
        yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of one call: SQLAlchemy leaves a torn transaction otherwise. A second one ends it."""
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


def _probe(uri: str) -> None:
    """Ask in a few seconds whether a store is there (MLflow's own attempts take minutes); raises what went wrong."""
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        import requests

        requests.get(f"{uri}/health", timeout=(3, 5))  # any answer will do: a proxy may know no /health
    elif parts.scheme.startswith("sqlite"):
        from filelock import FileLock

        path = _sqlite_path(uri)
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        # MLflow creates its tables in several steps: one process at a time, also across containers that share no /tmp.
        with FileLock(path.with_name(path.name + ".lock"), timeout=60):
            from mlflow import MlflowClient

            if not path.exists():
                # made under another name: MLflow can never complete tables that an interrupt left half made
                part = path.with_name(path.name + ".part")
                part.unlink(missing_ok=True)
                MlflowClient(tracking_uri=f"sqlite:///{part}").get_experiment("0")
                part.replace(path)
            with contextlib.closing(sqlite3.connect(path, timeout=3)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.rollback()
            MlflowClient(tracking_uri=uri).get_experiment("0")
    else:
        import socket

        if parts.hostname:
            default = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}[parts.scheme.split("+")[0]]
            socket.create_connection((parts.hostname, parts.port or default), timeout=3).close()


def _sqlite_path(uri: str) -> Path | None:
    """The file of a `sqlite:///` URI; None for an in-memory database."""
    text = uri.partition(":///")[2].partition("?")[0]
    return Path(unquote(text)) if text and text != ":memory:" else None


def _words(error: BaseException) -> str:
    """An exception as a short clause."""
    name = type(error).__name__
    if "Timeout" in name or "timed out" in str(error):  # MLflow's client makes its own exception of a timeout
        return "no answer in time"
    if "ConnectionError" in name or isinstance(error, ConnectionRefusedError) or "Connection refused" in str(error):
        return "connection refused"
    text = " ".join(str(getattr(error, "orig", None) or getattr(error, "message", None) or error).split())
    return text[:200] or name


def _now() -> int:
    return time.time_ns() // 1_000_000


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    part.replace(path)


def _system_metrics(run_dir: Path) -> dict[str, float]:
    """CPU, memory and disk of the driving machine, under MLflow's own names, which its UI shows on a tab of their own.

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
