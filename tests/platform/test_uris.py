"""Paths in URIs: what a folder is called changes no place; and users without a passwd entry."""

from __future__ import annotations

import getpass
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossfed.platform import uris
from crossfed.platform.cluster import connect
from crossfed.platform.config.settings import TrackingSettings, build
from crossfed.platform.data import artifacts
from crossfed.platform.report.recording import run_recorded
from crossfed.platform.tracking import store as mlflow_store
from crossfed.platform.tracking.tracker import reading, resolve_uri

ODD = ["50%", "what?", "no#1", "a b", "100%25", "ü;&="]


@pytest.mark.parametrize("name", ODD)
def test_a_path_comes_back_from_its_uri(name: str, tmp_path: Path) -> None:
    path = tmp_path / name / "x.db"
    assert uris.sqlite_path(uris.sqlite_uri(path)) == path
    assert uris.sqlite_path(f"{uris.sqlite_uri(path)}?timeout=3") == path
    assert uris.file_uri(path).startswith("file:///") and "?" not in uris.file_uri(path)


def test_an_ordinary_path_is_written_as_it_is() -> None:
    """So that stores named before keep their URI."""
    assert uris.sqlite_uri(Path("/runs/a b/mlflow.db")) == "sqlite:////runs/a b/mlflow.db"


def test_a_database_in_memory_has_no_file() -> None:
    assert uris.sqlite_path("sqlite:///:memory:") is None and uris.sqlite_path("sqlite://") is None


@pytest.mark.parametrize("name", ["50%", "what?", "no#1 b"])
def test_a_run_in_a_folder_of_an_odd_name_is_recorded_in_it(
    name: str, shops: Path, tmp_path: Path
) -> None:
    out = tmp_path / name
    values = {"data": shops, "out": out, "backend": "inprocess"}
    done = run_recorded(build("toys:AVERAGE", sets=["rounds=1"], values=values))
    with sqlite3.connect(out / "mlflow.db") as database:
        assert database.execute("select count(*) from runs").fetchone() == (1,)
    with reading(resolve_uri(TrackingSettings(), out)) as client:
        run_id = (done.run_dir / "mlflow_run_id").read_text().strip()
        assert [row.path for row in client.list_artifacts(run_id, "figures")]
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(out)
    ] == []


@pytest.mark.parametrize("name", ["50%", "what?"])
def test_a_study_in_a_folder_of_an_odd_name_goes_on(name: str, tmp_path: Path) -> None:
    from crossfed.tuning.study import Search, Study

    base = build("toys:AVERAGE", values={"out": tmp_path / name, "tracking.enabled": False})
    made = Study.create(Search(name="s", trials=2, changes={"dim": [2, 4]}), base, "shops", "f1")
    assert (tmp_path / name / "s" / "optuna.db").is_file()
    assert len(Study.open(made.folder).trials()) == 1


def test_the_ui_opens_the_database_of_an_odd_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crossfed.platform.cli import main

    out = tmp_path / "what?"
    out.mkdir()
    (out / "mlflow.db").touch()
    asked: list[Any] = []
    monkeypatch.setattr(main.os, "execv", lambda *given: asked.append(given[1]))
    main.ui(out)
    store, root = (
        asked[0][asked[0].index(key) + 1]
        for key in ("--backend-store-uri", "--default-artifact-root")
    )
    assert uris.sqlite_path(store) == out / "mlflow.db" and root == (out / "mlartifacts").as_uri()


@pytest.mark.parametrize(
    "error", [KeyError("getpwuid(): uid not found: 4711"), OSError("No username set")]
)
def test_a_uid_without_a_name_is_its_number(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.setattr(mlflow_store.os, "getuid", lambda: 4711)
    assert mlflow_store._user() == "4711"


def test_without_a_home_the_cache_lies_with_temporary_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def homeless(_: Any = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(uris, "Path", SimpleNamespace(home=homeless))
    monkeypatch.delenv("CROSSFED_CACHE", raising=False)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert artifacts.default_root().name.startswith("crossfed-")
    assert connect.token_source() is None
    monkeypatch.setattr(mlflow_store, "home", uris.home)
    before = mlflow_store.os.environ.get("HOME")
    with mlflow_store.bounded():
        assert mlflow_store.os.environ["HOME"] == artifacts.tempfile.gettempdir()
    assert mlflow_store.os.environ.get("HOME") == before
