"""Every format of a request gives the same answer or the same reason, from both servers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from mlflow.exceptions import MlflowException
from typer.testing import CliRunner

from crossfed.platform.cli.main import app
from crossfed.platform.errors import CrossfedError
from crossfed.platform.serving import server as serving
from served import expected


def sent(kind: str, body: Any) -> tuple[bytes, str]:
    """A request in one of MLflow's formats."""
    if kind == "csv":
        return body.encode(), "text/csv"
    return json.dumps(body if kind == "json" else {kind: body}).encode(), "application/json"


def through_mlflow(model: Any, body: bytes, content_type: str) -> tuple[int, Any]:
    """What `mlflow models serve` answers, without the wire: its own parsing and the loaded
    model.
    """
    from mlflow.pyfunc import scoring_server

    try:
        answer = scoring_server.invocations(
            body, content_type, model, model.metadata.get_input_schema()
        )
    except MlflowException as error:
        return error.get_http_status_code(), error.message
    return answer.status, json.loads(answer.response)["predictions"]


def through_crossfed(model: Any, body: bytes, content_type: str) -> tuple[int, Any]:
    """What `crossfed serve` answers, without the wire."""
    try:
        body = serving.normalise(body, content_type) or body
    except CrossfedError as error:
        return 400, str(error)
    return through_mlflow(model, body, "application/json")


SERVERS = pytest.mark.parametrize("ask", [through_mlflow, through_crossfed])


def answers(run_dir: Path, *asked: tuple[int, int, tuple[int, ...]]) -> list[dict[str, Any]]:
    return [
        {"user": f"films-u{u}", "items": expected(run_dir, "films", u, k, out)}
        for u, k, out in asked
    ]


ONE_AND_TWO = ((1, 3, ()), (2, 10, ()))
"""User 1 asks for three items; user 2 does not say how many."""


@SERVERS
@pytest.mark.parametrize(
    ("kind", "body", "asked"),
    [
        ("dataframe_records", [{"user": "films-u1", "k": 3}, {"user": "films-u2"}], ONE_AND_TWO),
        ("dataframe_records", [{"user": "films-u1", "k": 3}, {"user": "films-u2", "k": None}], ONE_AND_TWO),  # noqa: E501
        ("dataframe_split", {"columns": ["user", "k"], "data": [["films-u1", 3], ["films-u2", None]]}, ONE_AND_TWO),  # noqa: E501
        ("dataframe_split", {"columns": ["k", "user"], "index": [7], "data": [[3, "films-u1"]]}, ((1, 3, ()),)),  # noqa: E501
        ("instances", [{"user": "films-u1", "k": 3}, {"user": "films-u2", "k": None}], ONE_AND_TWO),
        ("instances", [{"user": "films-u1"}], ((1, 10, ()),)),
        ("instances", ["films-u1", "films-u2"], ((1, 10, ()), (2, 10, ()))),
        ("inputs", {"user": ["films-u1"]}, ((1, 10, ()),)),
        ("inputs", {"user": "films-u1", "k": 3}, ((1, 3, ()),)),
        ("inputs", {"user": ["films-u1", "films-u2"], "k": [3, None]}, ONE_AND_TWO),
        ("inputs", {"user": ["films-u1", "films-u2"], "k": 3}, ((1, 3, ()), (2, 3, ()))),
        ("inputs", [{"user": "films-u1", "k": 3}, {"user": "films-u2"}], ONE_AND_TWO),
        ("inputs", ["films-u1", "films-u2"], ((1, 10, ()), (2, 10, ()))),
        ("inputs", "films-u1", ((1, 10, ()),)),
        ("csv", "user,k\nfilms-u1,3\nfilms-u2,\n", ONE_AND_TWO),
        ("csv", "user\nfilms-u1\n", ((1, 10, ()),)),
        ("json", {"inputs": ["films-u1"], "params": {"k": 3}}, ((1, 3, ()),)),
        ("json", {"dataframe_records": [{"user": "films-u1"}, {"user": "films-u2", "k": 2}], "params": {"k": 3}},  # noqa: E501
         ((1, 3, ()), (2, 2, ()))),
        ("json", {"inputs": ["films-u1"], "params": {"k": 3, "exclude": ["films-i0", "films-i1"]}}, ((1, 3, (0, 1)),)),  # noqa: E501
        ("json", {"inputs": ["films-u1"], "params": None}, ((1, 10, ()),)),
        ("dataframe_records", [{"user": "films-u1", "k": 3, "exclude": ["films-i4"]}, {"user": "films-u2", "k": 4}],  # noqa: E501
         ((1, 3, (4,)), (2, 4, ()))),
        ("dataframe_records", [{"user": "films-u1", "exclude": None}], ((1, 10, ()),)),
        ("dataframe_split", {"columns": ["user", "exclude"], "data": [["films-u1", ["films-i4"]], ["films-u2", []]]},  # noqa: E501
         ((1, 10, (4,)), (2, 10, ()))),
        ("instances", [{"user": "films-u1", "exclude": ["films-i4"]}, {"user": "films-u2", "exclude": ["films-i5"]}],  # noqa: E501
         ((1, 10, (4,)), (2, 10, (5,)))),
        ("inputs", [{"user": "films-u1", "exclude": ["films-i4", "films-i5"]}, {"user": "films-u2"}],  # noqa: E501
         ((1, 10, (4, 5)), (2, 10, ()))),
        ("inputs", {"user": "films-u1", "exclude": ["films-i4", "films-i5"]}, ((1, 10, (4, 5)),)),
        ("csv", 'user,exclude\nfilms-u1,"[""films-i4""]"\nfilms-u2,\n', ((1, 10, (4,)), (2, 10, ()))),  # noqa: E501
    ],
)  # fmt: skip
def test_every_format_gives_the_same_answer(
    run_dir: Path, films: Any, ask: Any, kind: str, body: Any, asked: tuple[Any, ...]
) -> None:
    status, rows = ask(films, *sent(kind, body))
    assert status == 200, rows
    assert [{"user": row["user"], "items": row["items"]} for row in rows] == answers(
        run_dir, *asked
    )
    assert all(row["known"] for row in rows)


@pytest.mark.parametrize(
    ("kind", "body", "asked"),
    [
        ("instances", [{"user": "films-u1", "k": 3}, {"user": "films-u2"}], ONE_AND_TWO),
        ("instances", [{"user": "films-u1", "exclude": ["films-i4", "films-i5"]}, {"user": "films-u2", "exclude": []}],  # noqa: E501
         ((1, 10, (4, 5)), (2, 10, ()))),
        ("inputs", {"user": ["films-u1", "films-u2"], "exclude": [["films-i4", "films-i5"], []]},
         ((1, 10, (4, 5)), (2, 10, ()))),
    ],
)  # fmt: skip
def test_rows_that_say_different_things_are_refused_by_mlflow_and_answered_by_crossfed(
    run_dir: Path, films: Any, kind: str, body: Any, asked: tuple[Any, ...]
) -> None:
    """MLflow's server takes such rows apart before the model sees them: a 400, and no wrong
    answer.
    """
    assert through_mlflow(films, *sent(kind, body))[0] == 400
    status, rows = through_crossfed(films, *sent(kind, body))
    assert status == 200, rows
    assert [{"user": row["user"], "items": row["items"]} for row in rows] == answers(
        run_dir, *asked
    )


@SERVERS
@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        (kind, body, reason)
        for row, reason in (
            ({"user": None}, "row 1: user is missing or null"),
            ({"k": 3}, "row 1: user is missing or null"),
            ({"user": ["films-u1"]}, 'row 1: user is the list ["films-u1"]; give one user\'s id'),
            ({"user": 7}, "row 1: user is the number 7"),
            ({"user": True}, "row 1: user is true"),
            ({"user": "films-u1", "k": 2.5}, "row 1: k is 2.5; it must be a whole number"),
            ({"user": "films-u1", "k": 0}, "row 1: k is 0; it must be 1 or more"),
            ({"user": "films-u1", "k": -4}, "row 1: k is -4; it must be 1 or more"),
            ({"user": "films-u1", "k": "many"}, 'row 1: k is the text "many"; it must be a '
                                                'whole number'),
            ({"user": "films-u1", "k": True}, "row 1: k is true; it must be a whole number"),
            ({"user": "films-u1", "exclude": "films-i4"}, 'row 1: exclude is the text '
                                                          '"films-i4"; it must be a list'),
            ({"user": "films-u1", "exclude": ["no-such"]}, "exclude names the item 'no-such', "
                                                           "which domain films"),
            ({"user": "films-u1", "n": 3}, "row 1: there is no 'n'; a row may hold user, k, "
                                           "exclude"),
        )
        for kind, body in (
            ("dataframe_records", [row]),
            ("dataframe_split", {"columns": list(row), "data": [list(row.values())]}),
            ("instances", [row]),
            ("inputs", [row]),
        )
    ]
    + [
        ("csv", "user,k\n,3\n", "row 1: user is missing or null"),
        ("csv", "user,k\nfilms-u1,2.5\n", "row 1: k is 2.5; it must be a whole number"),
        ("csv", "user,exclude\nfilms-u1,films-i4\n", "row 1: exclude is the text"),
        ("csv", "user,n\nfilms-u1,4\n", "row 1: there is no 'n'"),
        ("dataframe_records", [{"user": "films-u1"}, {"user": "films-u2", "k": 1.5}], "row 2: k is 1.5"),  # noqa: E501
        ("inputs", {"user": ["films-u1", "films-u2"], "k": [3]}, "there are 2 users, but 1 "
                                                                 "values of k"),
        ("inputs", 7, "the input is the number 7"),
        ("json", {"inputs": ["films-u1"], "params": {"k": 0}}, "k is 0; it must be 1 or more"),
        ("json", {"inputs": ["films-u1"], "params": {"k": 2.5}}, "2.5"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_with_the_reason_in_every_format(
    films: Any, ask: Any, kind: str, body: Any, reason: str
) -> None:
    status, told = ask(films, *sent(kind, body))
    assert status == 400
    assert reason in told


def test_ids_made_of_digits_are_text(films: Any) -> None:
    """`01` and `1` are two users: JSON keeps them apart, MLflow's CSV reader does not and is
    refused.
    """
    for user in ("01", "1", "1.0", "null", "None", "nan"):
        for kind, body in (
            ("dataframe_records", [{"user": user}]),
            ("inputs", {"user": [user]}),
            ("instances", [user]),
        ):
            for ask in (through_mlflow, through_crossfed):
                status, rows = ask(films, *sent(kind, body))
                assert (status, rows[0]["user"]) == (200, user)
        assert through_crossfed(films, *sent("csv", f"user\n{user}\n"))[1][0]["user"] == user
    status, reason = through_mlflow(films, *sent("csv", "user\n01\n"))
    assert status == 400 and "user is the number 1" in reason and "send JSON" in reason


@pytest.mark.parametrize(
    ("body", "content_type", "reason"),
    [
        (b"{", "application/json", "the request is not JSON"),
        (b"[]", "application/json", "exactly one of dataframe_records"),
        (b'{"inputs": "a", "instances": "a"}', "application/json", "exactly one of"),
        (b'{"inputs": ["a"], "k": 3}', "application/json", "the request has no 'k'"),
        (b'{"inputs": ["a"], "params": {"n": 3}}', "application/json", "params has no 'n'"),
        (b'{"inputs": ["a"], "params": [3]}', "application/json", "params must be an object"),
        (b'{"dataframe_split": {"columns": ["user"], "data": [["a", 3]]}}', "application/json", "row 1 of dataframe_split"),  # noqa: E501
        (b'{"dataframe_split": {"columns": ["user", "user"], "data": []}}', "application/json", "two columns 'user'"),  # noqa: E501
        (b'{"dataframe_split": {"data": [["a"]]}}', "application/json", "must hold columns and "
                                                                        "data"),
        (b'{"dataframe_records": {"user": "a"}}', "application/json", "must be a list of objects"),
        (b"", "text/csv", "the request is empty"),
        (b"user,k\na\n", "text/csv", "row 1 has 1 cells, but there are 2 names"),
        (b"user\n\xff\n", "text/csv", "not CSV in UTF-8"),
    ],
)  # fmt: skip
def test_crossfed_serve_says_what_is_wrong_with_a_request(
    body: bytes, content_type: str, reason: str
) -> None:
    with pytest.raises(CrossfedError, match=reason):
        serving.normalise(body, content_type)


def test_other_content_types_are_left_to_mlflow() -> None:
    assert serving.normalise(b"", "application/vnd.apache.parquet") is None
    assert serving.normalise(b"", "application/json; charset=latin-1") is None


@pytest.fixture(params=["mlflow", "crossfed"])
def server(request: Any, uris: dict[str, str], run_dir: Path, tmp_path: Path) -> Iterator[str]:
    """`mlflow models serve` and `crossfed serve` on the model of films, started in an empty
    folder.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = {
        "mlflow": [
            "mlflow",
            "models",
            "serve",
            "-m",
            uris["films"],
            "--env-manager",
            "local",
            "-p",
            port,
        ],
        "crossfed": [
            "crossfed.platform.cli.main",
            "serve",
            str(run_dir),
            "--domain",
            "films",
            "--port",
            port,
        ],
    }[request.param]
    log, folder = (tmp_path / "serve.log").open("w"), tmp_path / "empty"
    folder.mkdir()
    # mlflow starts uvicorn by its name
    env = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    }
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=log,
        stderr=log,
        start_new_session=True,
        env=env,
        cwd=folder,
    )
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
    while time.monotonic() < deadline:
        # another process may have taken the port of one that has ended
        assert process.poll() is None, Path(log.name).read_text()[-2000:]
        try:
            requests.get(f"{address}/ping", timeout=2)
            break
        except requests.ConnectionError:
            time.sleep(0.2)
    yield f"{address}/invocations"
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(60)
    assert not list(folder.iterdir())  # no new database beside whoever starts it


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_answers_every_format_the_same(run_dir: Path, server: str) -> None:
    asked = [
        {"dataframe_records": [{"user": "films-u9", "k": 6}]},
        {"dataframe_split": {"columns": ["user", "k"], "data": [["films-u9", 6]]}},
        {"instances": [{"user": "films-u9", "k": 6}]},
        {"inputs": {"user": ["films-u9"], "k": [6]}},
        {"inputs": ["films-u9"], "params": {"k": 6}},
        "user,k\nfilms-u9,6\n",
    ]
    for body in asked:
        kind = (
            {"data": body, "headers": {"Content-Type": "text/csv"}}
            if isinstance(body, str)
            else {"json": body}
        )
        answer = requests.post(server, timeout=60, **kind)  # type: ignore[arg-type]
        assert answer.status_code == 200, answer.text
        (row,) = answer.json()["predictions"]
        assert row["known"] and row["items"] == expected(run_dir, "films", 9, 6)
    done = CliRunner().invoke(
        app, ["recommend", str(run_dir), "--domain", "films", "--user", "films-u9", "-k", "6"]
    )
    assert [
        line.split("│")[2].strip() for line in done.output.splitlines() if "films-i" in line
    ] == row["items"]
    for bad, reason in (
        ({"dataframe_records": [{"user": "films-u9", "k": 0}]}, "k is 0; it must be 1 or more"),
        (
            {"dataframe_records": [{"user": "films-u9", "exclude": ["no-such"]}]},
            "exclude names the item 'no-such'",
        ),
        ({"dataframe_records": [{"k": 3}]}, "user is missing or null"),
        ({"inputs": {"user": [["films-u9"]]}}, "user is the list"),
    ):
        refused = requests.post(server, json=bad, timeout=60)
        assert refused.status_code == 400 and reason in refused.text, refused.text
