"""A scoring server for one domain's model: MLflow's own, with every request read exactly.

MLflow's server changes some requests before a model sees them: `instances` whose rows say different
things lose which row said what, ids made of digits become numbers in text/csv, and keys that it
does not know are dropped. Here a request becomes rows first, as it was sent; everything else
(answers, errors, `/ping`, `/version`) is MLflow's.
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from crossfed.platform.errors import CrossfedError
from crossfed.platform.serving import save
from crossfed.platform.serving.model import DomainModel
from crossfed.platform.tracking.store import bounded

FORMATS = ("dataframe_records", "dataframe_split", "instances", "inputs")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def serve(run_dir: Path, domain: str, host: str, port: int) -> None:
    """Serve one domain's model of a finished run until interrupted.

    Raises:
        CrossfedError: the run has no such model, or its files are damaged.
    """
    import uvicorn

    uvicorn.run(application(run_dir, domain), host=host, port=port, log_level="warning")


def application(run_dir: Path, domain: str) -> App:
    """The server as an ASGI application. No tracking store is asked or made.

    Raises:
        CrossfedError: as `serve`.
    """
    DomainModel(run_dir, domain)
    import mlflow.pyfunc
    from mlflow.pyfunc import scoring_server

    with bounded(), tempfile.TemporaryDirectory(prefix="crossfed-serve-") as folder:
        save.save(run_dir, domain, Path(folder) / "model")
        model = mlflow.pyfunc.load_model(str(Path(folder) / "model"))
    return exactly(scoring_server.init(model))


def exactly(app: App) -> App:
    """Hand every request to `/invocations` on as `dataframe_split`, or answer 400 with a reason."""

    async def wrapped(scope: Message, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope.get("path") != "/invocations"
            or scope.get("method") != "POST"
        ):
            await app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        content = dict(headers).get(b"content-type", b"").decode("latin-1")
        try:
            rewritten = normalise(body, content)
        except CrossfedError as error:
            await _refuse(send, str(error))
            return
        if rewritten is not None:
            body = rewritten
            headers = [pair for pair in headers if pair[0] != b"content-type"]
            headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", str(len(body)).encode()))
        done = False

        async def again() -> Message:
            nonlocal done
            if done:
                return await receive()
            done = True
            return {"type": "http.request", "body": body, "more_body": False}

        await app({**scope, "headers": headers}, again, send)

    return wrapped


async def _refuse(send: Send, reason: str) -> None:
    """Answer as MLflow does."""
    told = json.dumps({"error_code": "INVALID_PARAMETER_VALUE", "message": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(told)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": told})


def normalise(body: bytes, content_type: str) -> bytes | None:
    """A request as JSON in the format `dataframe_split`; None for what is left to MLflow (other
    content types and charsets).

    Raises:
        CrossfedError: what is wrong with it.
    """
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    if any(parameter != "charset=utf-8" for parameter in parameters):
        return None
    if kind == "text/csv":
        return _split(_from_csv(body), {})
    if kind != "application/json":
        return None
    try:
        sent = json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CrossfedError(f"the request is not JSON: {error}") from error
    given = [name for name in FORMATS if name in sent] if isinstance(sent, dict) else []
    if len(given) != 1:
        raise CrossfedError(
            f"give a JSON object with exactly one of {', '.join(FORMATS)}; there "
            f"{'is' if len(given) < 2 else 'are'} "
            f"{', '.join(given) or 'none'}"
        )
    if unknown := [name for name in sent if name not in (*given, "params")]:
        raise CrossfedError(
            f"the request has no {unknown[0]!r}; beside {given[0]} there may be params"
        )
    params = {} if sent.get("params") is None else sent["params"]
    if not isinstance(params, dict):
        raise CrossfedError('params must be an object such as {"k": 5}')
    if unknown := [name for name in params if name not in ("k", "exclude")]:
        raise CrossfedError(f"params has no {unknown[0]!r}; it may hold k and exclude")
    return _split(_rows(given[0], sent[given[0]]), params)


def _rows(name: str, data: Any) -> list[dict[str, Any]]:
    """Requests from the data of one of MLflow's formats."""
    from crossfed.platform.serving.pyfunc import requests_of

    if name == "dataframe_split":
        if not isinstance(data, dict) or not {"columns", "data"} <= set(data) <= {
            "columns",
            "data",
            "index",
        }:
            raise CrossfedError("dataframe_split must hold columns and data")
        columns, rows = data["columns"], data["data"]
        if not isinstance(columns, list) or not isinstance(rows, list):
            raise CrossfedError("columns and data of dataframe_split must be lists")
        _once(columns)
        for place, row in enumerate(rows, 1):
            if not isinstance(row, list) or len(row) != len(columns):
                raise CrossfedError(
                    f"row {place} of dataframe_split must be a list of {len(columns)} values"
                )
        return [dict(zip(map(str, columns), row, strict=True)) for row in rows]
    if name == "dataframe_records" and not (
        isinstance(data, list) and all(isinstance(row, dict) for row in data)
    ):
        raise CrossfedError(
            'dataframe_records must be a list of objects such as {"user": "A2X3", "k": 10}'
        )
    return requests_of(data)


def _from_csv(body: bytes) -> list[dict[str, Any]]:
    """Requests from text/csv with a header: cells are text, `k` a number; an empty cell is
    absent.
    """
    try:
        reader = csv.reader(io.StringIO(body.decode("utf-8-sig"), newline=""), strict=True)
        lines = [line for line in reader if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise CrossfedError(f"the request is not CSV in UTF-8: {error}") from error
    if not lines:
        raise CrossfedError(
            "the request is empty; text/csv begins with a line of names such as user,k"
        )
    names, rows = lines[0], []
    _once(names)
    for place, line in enumerate(lines[1:], 1):
        if len(line) != len(names):
            raise CrossfedError(
                f"row {place} has {len(line)} cells, but there are {len(names)} names"
            )
        row: dict[str, Any] = {name: cell or None for name, cell in zip(names, line, strict=True)}
        if row.get("k") is not None:
            try:
                row["k"] = float(row["k"])
            except ValueError as error:
                raise CrossfedError(
                    f"row {place}: k is {row['k']!r}; it must be a whole number"
                ) from error
        rows.append(row)
    return rows


def _once(names: list[Any]) -> None:
    if double := [name for place, name in enumerate(names) if name in names[:place]]:
        raise CrossfedError(f"there are two columns {double[0]!r}")


def _split(rows: list[dict[str, Any]], params: dict[str, Any]) -> bytes:
    columns = list(dict.fromkeys(name for row in rows for name in row)) or ["user"]
    data = [[row.get(name) for name in columns] for row in rows]
    return json.dumps(
        {"dataframe_split": {"columns": columns, "data": data}, "params": params}
    ).encode()
