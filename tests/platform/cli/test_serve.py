"""The command that serves a model: what it says before it listens, and why it does not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfed.platform.cli.main import app
from crossfed.platform.errors import CrossfedError
from made_runs import make_run, users


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "one", "lightgcn", 0, {"books": {"recall_at_20": users(0, 0.3)}})


def test_a_port_that_is_taken_is_one_sentence(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = ["serve", str(run_dir), "--domain", "books", "--port", port]
        with pytest.raises(
            CrossfedError, match=rf"127\.0\.0\.1:{port} cannot be listened on \(.*another --port"
        ):
            CliRunner().invoke(app, command, catch_exceptions=False)


def test_it_says_where_and_how_to_ask_and_an_interrupt_ends_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[object, ...]] = []

    def interrupted(*args: object) -> None:
        served.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr("crossfed.platform.serving.server.serve", interrupted)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["serve", "one", "--domain", "books", "--port", str(port)]
    done = CliRunner().invoke(app, [*command, "--out", str(run_dir.parent)])
    assert done.exit_code == 130 and served == [(run_dir, "books", "127.0.0.1", port)]
    assert f"books of one on http://127.0.0.1:{port}/invocations (Ctrl-C ends it)" in done.output
    assert f"curl http://127.0.0.1:{port}/invocations" in done.output


def test_a_domain_without_a_model_is_one_sentence(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    with pytest.raises(CrossfedError, match="holds no model of domain 'books'; it has: none yet"):
        CliRunner().invoke(
            app,
            ["serve", str(run_dir), "--domain", "books", "--port", port],
            catch_exceptions=False,
        )
