"""No file that a run leaves, and nothing it prints, holds a token or a password."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfed.platform.cli.main import app

TOKEN, PASSWORD, USER = "6e" * 32, "pass-4711-word", "user-0815-name"


def holding(folder: Path, *words: str) -> list[str]:
    """Files below a folder, databases and archives included, in whose bytes or name one of the
    words occurs.
    """
    return [
        f"{path.relative_to(folder)}: {word}"
        for path in folder.rglob("*")
        for word in words
        if word in path.name or (path.is_file() and word.encode() in path.read_bytes())
    ]


@pytest.mark.parametrize(
    "store",
    [
        f"http://{USER}:{PASSWORD}@127.0.0.1:1",  # out of reach: everything is spooled
        pytest.param(None, marks=pytest.mark.slow),  # the database beside the runs
    ],
)
def test_what_a_run_leaves_holds_no_secrets(
    store: str | None, shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    if store:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    else:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("CROSSFED_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "runs"
    words = [
        "run",
        "toys:AVERAGE",
        "--backend",
        "inprocess",
        "--data",
        str(shops),
        "--out",
        str(out),
        "--set",
        "rounds=2",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    (result,) = out.glob("*/result.json")
    kept = [path for path in out.rglob("*") if path.is_file()]
    assert len(kept) > 10 and (
        (out / "mlflow.db").exists() if store is None else any("spool" in p.name for p in kept)
    )
    assert holding(tmp_path, TOKEN, PASSWORD, USER) == []
    assert not any(secret in done.output for secret in (TOKEN, PASSWORD, USER))
    # the search itself finds what is there
    (result.parent / "note.txt").write_text(f"x{TOKEN}y")
    assert len(holding(tmp_path, TOKEN)) == 1


def test_a_password_in_a_runs_own_settings_is_refused(shops: Path, tmp_path: Path) -> None:
    words = [
        "run",
        "toys:AVERAGE",
        "--data",
        str(shops),
        "--out",
        str(tmp_path),
        "--tracking-uri",
        f"http://u:{PASSWORD}@h:5000",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code and "a password does not belong in a run's files" in str(done.exception)
    assert PASSWORD not in str(done.exception) + done.output and not list(tmp_path.iterdir())
