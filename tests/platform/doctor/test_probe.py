"""What one machine says of itself when it is looked at, and in which time."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from crossfed.platform.doctor import probe
from crossfed.platform.doctor.judge import can_start, judge
from doctored import WANTED, machine


def ask(tmp_path: Path, **other: Any) -> dict[str, Any]:
    marker = tmp_path / "runs" / ".doctor"
    marker.mkdir(parents=True)
    (marker / "driver").write_text("word")
    return {
        "node": "n1",
        "patience": 60,
        "out": str(tmp_path / "runs"),
        "marker": str(marker),
        "word": "word",
        "tracking": None,
        "encoder": "hashing",
        "temp": str(tmp_path),
    } | other


def test_a_look_at_this_machine(tmp_path: Path) -> None:
    import torch

    report = probe.look(ask(tmp_path))
    json.dumps(report)
    assert not [
        name for name, told in report.items() if isinstance(told, dict) and "problem" in told
    ], report
    assert (
        report["python"] == sys.version.split()[0]
        and report["packages"]["torch"] == torch.__version__
    )
    assert len(report["source"]["hash"]) == 12 and report["storage"] == {
        "writable": True,
        "same": True,
    }
    assert (tmp_path / "runs/.doctor/n1").read_text() == "word"
    assert 0 < report["memory"]["free"] < report["memory"]["total"]
    assert report["began"] <= report["ended"] <= time.time()
    driver = machine("this process", driver=True) | report
    assert can_start(
        judge([driver, {**driver, "name": "it", "driver": False, "skew": 0.0}], WANTED)
    )


def test_storage_that_is_another_or_cannot_be_written(tmp_path: Path) -> None:
    asked = ask(tmp_path)
    assert probe._storage(asked | {"word": "other"}) == {"writable": False, "same": False}
    assert probe._storage(asked | {"marker": str(tmp_path / "elsewhere")}) == {
        "writable": None,
        "same": False,
    }
    blocked = tmp_path / "runs/.doctor/n2"
    blocked.mkdir()  # a folder where the file would be
    found = probe.within(5, {"storage": lambda: probe._storage(asked | {"node": "n2"})})
    assert "directory" in found["storage"]["problem"].lower()


def test_a_look_that_hangs_is_told_in_time() -> None:
    release = threading.Event()
    began = time.monotonic()
    found = probe.within(
        0.3, {"slow": lambda: release.wait(30), "after": lambda: 1}, {"fast": lambda: 2}
    )
    release.set()
    assert time.monotonic() - began < 5
    assert found == {
        "slow": {"problem": "no answer within 0.3 s"},
        "after": {"problem": "no answer within 0.3 s"},
        "fast": 2,
    }


@pytest.mark.parametrize("status", [200, 401])
def test_an_mlflow_server_that_answers_and_one_that_is_gone(status: int) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Not into the test's output."""

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}"
        assert probe._mlflow(uri) == {"reached": True}
        server.shutdown()
    assert probe._mlflow(uri) == {"reached": False, "problem": "Connection refused"}
    assert probe._mlflow(None) == {"reached": None}
