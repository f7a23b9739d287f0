"""One MLflow store, over `mlflow.MlflowClient`: every kind of entry applied, so that applying it
twice changes nothing.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from crossfed.platform.errors import CrossfedError
from crossfed.platform.tracking.spool import SPOOL, State
from crossfed.platform.uris import file_uri, home, sqlite_path, sqlite_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG_LIMIT = 8000
_KEY_TAG = "mlflow.crossfed.runKey"
"""Hidden by MLflow's pages, as all tags of its own prefix are. Earlier versions said
`crossfed.run_key`.
"""
_LOG = logging.getLogger("crossfed.tracking")


class RefusedError(Exception):
    """The store answered, and this entry can never be applied."""


class Store:
    """One MLflow store; raises `RefusedError` for an entry that it will never take, anything else
    while it is away.
    """

    def __init__(self, uri: str, out: Path) -> None:
        self.uri = uri
        self.ready = False
        self._out = out

    def apply(self, entry: dict[str, Any], state: State, run_dir: Path) -> None:
        with bounded(patient=entry["op"] in ("artifact", "model")):
            if not self.ready:
                probe(self.uri)
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException

            client = MlflowClient(tracking_uri=self.uri)
            self.ready = True
            if entry["op"] == "open":
                self._open(client, entry, state)
                # a full disk is no reason to call the store away
                with contextlib.suppress(OSError):
                    state.write(run_dir)
                return
            if state.run_id is None:
                raise CrossfedError(
                    f"the entry that opens the run is missing from {run_dir / SPOOL}"
                )
            try:
                getattr(self, f"_{entry['op']}")(client, state.run_id, entry, state, run_dir)
            except MlflowException as error:
                if error.error_code in _FINAL:
                    raise RefusedError(words(error)) from error
                raise

    def _open(self, client: MlflowClient, entry: dict[str, Any], state: State) -> None:
        from mlflow.entities import Dataset, InputTag, Param, RunTag
        from mlflow.entities import DatasetInput as MlflowInput

        state.experiment_id = self._experiment(client, entry["experiment"])
        run = _find_run(client, state, entry)
        fresh = run is None
        if run is None:
            tags = {
                "mlflow.user": _user(),
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
            folder = None if self.uri.startswith("http") else file_uri(self._out / "mlartifacts")
            try:
                # the kind decides which pages the UI offers: runs and models, not traces and
                # prompts
                kind = {"mlflow.experimentKind": "custom_model_development"}
                return str(client.create_experiment(name, artifact_location=folder, tags=kind))
            except MlflowException:  # another process was faster
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise CrossfedError(
                f"the experiment '{name}' was deleted there: restore it or set another "
                f"tracking.experiment"
            )
        return str(found.experiment_id)

    def _metrics(
        self, client: MlflowClient, run_id: str, entry: dict[str, Any], state: State, run_dir: Path
    ) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(k, v, entry["time"], entry["step"]) for k, v in entry["metrics"].items()]
        for first in range(0, len(metrics), 1000):
            client.log_batch(run_id, metrics=metrics[first : first + 1000])

    def _tags(
        self, client: MlflowClient, run_id: str, entry: dict[str, Any], state: State, run_dir: Path
    ) -> None:
        for key, value in entry["tags"].items():
            client.set_tag(run_id, key, value)

    def _artifact(
        self, client: MlflowClient, run_id: str, entry: dict[str, Any], state: State, run_dir: Path
    ) -> None:
        path = run_dir / entry["path"]
        if path.is_dir():
            client.log_artifacts(run_id, str(path), entry["folder"])
        elif path.is_file():
            client.log_artifact(run_id, str(path), entry["folder"])
        else:
            raise RefusedError(f"{path} is absent")

    def _model(
        self, client: MlflowClient, run_id: str, entry: dict[str, Any], state: State, run_dir: Path
    ) -> None:
        from mlflow.entities import LoggedModelOutput
        from mlflow.models import Model

        folder = run_dir / entry["path"]
        if not folder.is_dir():
            raise RefusedError(f"{folder} is absent")
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
        if entry["model_id"] not in [
            output.model_id for output in (outputs.model_outputs if outputs else ())
        ]:
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
        # a database's registry would look for the model under the global tracking URI, a server
        # refuses local paths
        source = f"models:/{model_id}"
        if not self.uri.startswith("http"):
            source = client.get_logged_model(model_id).artifact_location
        if not any(
            version.source == source for version in client.search_model_versions(f"name = '{name}'")
        ):
            client.create_model_version(name, source, run_id, model_id=model_id)

    def _finish(
        self, client: MlflowClient, run_id: str, entry: dict[str, Any], state: State, run_dir: Path
    ) -> None:
        if entry["reason"]:
            client.set_tag(run_id, "crossfed.reason", entry["reason"][:TAG_LIMIT])
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
"""MLflow's answers that no repetition changes. Refused credentials are not among them: they can be
mended.
"""


def _find_run(client: MlflowClient, state: State, entry: dict[str, Any]) -> Any:
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
        _LOG.warning(
            "tracking: the MLflow run %s is not there any more; a new one is opened", state.run_id
        )
        return None
    for tag in (_KEY_TAG, "crossfed.run_key"):
        if found := client.search_runs(
            [str(state.experiment_id)], f"tags.`{tag}` = '{entry['key']}'", max_results=1
        ):
            return found[0]
    return None


def _user() -> str:
    """Who runs this; in a container whose uid has no passwd entry, the uid."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the former before Python 3.13
        return str(os.getuid())


@contextlib.contextmanager
def bounded(patient: bool = False) -> Iterator[None]:
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
    if home() is None:  # MLflow asks for one when it is imported
        wanted["HOME"] = tempfile.gettempdir()
    before = {name: os.environ.get(name) for name in wanted}
    loggers = {
        name: logging.getLogger(name) for name in ("mlflow", "alembic", "urllib3.connectionpool")
    }
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


def probe(uri: str) -> None:
    """Ask in a few seconds whether a store is there (MLflow's own attempts take minutes); raises
    what went wrong.
    """
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        import requests

        # any answer will do: a proxy may know no /health
        requests.get(f"{uri}/health", timeout=(3, 5))
    elif parts.scheme.startswith("sqlite"):
        from filelock import FileLock

        path = sqlite_path(uri)
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        # MLflow creates its tables in several steps: one process at a time, also across containers
        # that share no /tmp.
        with FileLock(path.with_name(path.name + ".lock"), timeout=60):
            from mlflow import MlflowClient

            if not path.exists():
                # made under another name: MLflow can never complete tables that an interrupt left
                # half made
                part = path.with_name(path.name + ".part")
                part.unlink(missing_ok=True)
                MlflowClient(tracking_uri=sqlite_uri(part)).get_experiment("0")
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


def words(error: BaseException) -> str:
    """An exception as a short clause."""
    name = type(error).__name__
    # MLflow's client makes its own exception of a timeout
    if "Timeout" in name or "timed out" in str(error):
        return "no answer in time"
    if (
        "ConnectionError" in name
        or isinstance(error, ConnectionRefusedError)
        or "Connection refused" in str(error)
    ):
        return "connection refused"
    text = " ".join(
        str(getattr(error, "orig", None) or getattr(error, "message", None) or error).split()
    )
    return text[:200] or name
