"""The model of a real run: what a fresh process, a server and the command line recommend is what the run would."""

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

import mlflow
import numpy as np
import pandas as pd
import pytest
import requests
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from typer.testing import CliRunner

from crossfed.platform.cli.main import app
from crossfed.platform.config.settings import build
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation import export
from crossfed.platform.federation.run import run_federation
from crossfed.platform.federation.runs import load_scorer
from crossfed.platform.serving import save
from crossfed.platform.serving.save import DomainModel

DOMAINS = ("books", "films", "games")


@pytest.fixture(scope="module")
def run_dir(shops: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    values = {"data": shops, "out": out, "backend": "inprocess", "tracking.register_models": True}
    return run_federation(build("lightgcn", sets=["epochs=2"], values=values)).run_dir


@pytest.fixture(scope="module")
def store(run_dir: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent}/mlflow.db")


@pytest.fixture(scope="module")
def uris(run_dir: Path, store: MlflowClient) -> dict[str, str]:
    """Where each domain's logged model is, as the tracker left it in the store."""
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    found = {}
    for output in store.get_run(run_id).outputs.model_outputs:
        model = store.get_logged_model(output.model_id)
        assert (model.status, model.source_run_id) == ("READY", run_id)
        found[model.name.removeprefix("recommender-")] = model.artifact_location
    return found


@pytest.fixture(scope="module")
def films(uris: dict[str, str]) -> Any:
    return mlflow.pyfunc.load_model(uris["films"])


def expected(run_dir: Path, domain: str, user: int, k: int, exclude: tuple[int, ...] = ()) -> list[str]:
    """The slow way: sort all pairs (score, row number)."""
    scores = load_scorer(run_dir, domain)(np.array([user]))[0].tolist()
    ranked = sorted((-s, i) for i, s in enumerate(scores) if i not in exclude)
    return [f"{domain}-i{i}" for _, i in ranked[:k]]


def test_every_domain_has_a_model_of_its_own_and_a_registered_version(
    uris: dict[str, str], store: MlflowClient
) -> None:
    assert set(uris) == set(DOMAINS)
    versions = {version.name: version for version in store.search_model_versions()}
    assert set(versions) == {f"lightgcn-shops-{domain}" for domain in DOMAINS}
    for domain in DOMAINS:
        version = versions[f"lightgcn-shops-{domain}"]
        assert (str(version.version), version.source) == ("1", uris[domain])


def test_a_fresh_process_recommends_the_same(run_dir: Path, uris: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import json, mlflow, pandas as pd\n"
        f"model = mlflow.pyfunc.load_model({uris['films']!r})\n"
        "requests = pd.DataFrame({'user': ['films-u49', 'films-u3'], 'k': [5, 2]})\n"
        "print(json.dumps(model.predict(requests).to_dict('list')))\n"
    )
    away = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, **away},
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["user"] == ["films-u49", "films-u3"] and answer["known"] == [True, True]
    assert answer["items"] == [expected(run_dir, "films", u, k) for u, k in ((49, 5), (3, 2))]
    assert [len(s) for s in answer["scores"]] == [5, 2]
    assert answer["scores"][0] == sorted(answer["scores"][0], reverse=True)


def test_many_users_keep_their_order(run_dir: Path, films: Any) -> None:
    rows = np.random.default_rng(0).integers(0, 60, 700)  # 50 and above are unknown
    answer = films.predict(pd.DataFrame({"user": [f"films-u{row}" for row in rows]}))
    assert answer["known"].tolist() == (rows < 50).tolist()
    fallback = [*{tuple(items) for items in answer.loc[~answer["known"], "items"]}]
    assert len(fallback) == 1
    for place in (0, 255, 256, 699):
        if rows[place] < 50:
            assert answer.loc[place, "items"] == expected(run_dir, "films", int(rows[place]), save.K)


def test_an_unknown_user_gets_what_ranks_high_for_most(run_dir: Path, films: Any) -> None:
    """Mean reciprocal rank over all 50 known users, the slow way."""
    worth = dict.fromkeys((f"films-i{i}" for i in range(25)), 0.0)
    for user in range(50):
        for rank, item in enumerate(expected(run_dir, "films", user, 25), 1):
            worth[item] += 1 / rank / 50
    answer = films.predict(pd.DataFrame({"user": ["somebody"], "k": [25]})).iloc[0]
    assert not answer["known"]
    assert answer["items"] == sorted(worth, key=lambda item: -worth[item])
    np.testing.assert_allclose(answer["scores"], [worth[item] for item in answer["items"]], rtol=1e-5)


def test_excluded_items_are_left_out(run_dir: Path, films: Any) -> None:
    first = expected(run_dir, "films", 2, 2)
    requests_ = pd.DataFrame({"user": ["films-u2"] * 2, "k": [4, 100], "exclude": [first, []]})
    answer = films.predict(requests_)
    assert answer.loc[0, "items"] == expected(run_dir, "films", 2, 6)[2:]
    assert sorted(answer.loc[1, "items"]) == sorted(f"films-i{i}" for i in range(25))  # every item once, none twice


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"user": ["films-u0"], "k": [0]}, "k is 0; it must be 1 or more"),
        (
            {"user": ["films-u0"], "exclude": [["books-i1"]]},
            "exclude names the item 'books-i1', which domain films does",
        ),
        ({"k": [3]}, "user"),
    ],
)
def test_a_bad_request_is_one_sentence(films: Any, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(MlflowException, match=message):
        films.predict(pd.DataFrame(request_))


def test_a_model_holds_one_domain_and_neither_pickle_nor_user_ids(uris: dict[str, str]) -> None:
    root = Path(uris["books"].removeprefix("file://"))
    files = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert {f for f in files if f.startswith("artifacts/")} == {
        "artifacts/config.yaml",
        "artifacts/model/books.safetensors",
        "artifacts/model/books.users.parquet",
        "artifacts/model/books.items.parquet",
    }
    assert {Path(f).suffix for f in files} <= {".safetensors", ".parquet", ".yaml", ".json", ".txt", ".py", ""}
    requirements = (root / "requirements.txt").read_text().split()
    assert [r.partition("==")[0] for r in requirements] == ["crossfed", "mlflow", "torch"]
    assert not any("+" in r for r in requirements)
    for file in files:
        told = (root / file).read_bytes()
        assert b"books-u" not in told and b"films-i" not in told, file
    users = pd.read_parquet(root / "artifacts/model/books.users.parquet")
    assert list(users.columns) == ["digest", "row"] and len(users) == 40


def test_digests_tell_users_apart_and_differ_from_run_to_run(tmp_path: Path) -> None:
    users = [f"u{number}" for number in range(3000)] + ["ü", "", "u" * 5000]
    told = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        export.write_index(tmp_path / name, "shop", users, ["i0"])
        told.append(set(pd.read_parquet(tmp_path / name / "shop.users.parquet")["digest"]))
    assert len(told[0]) == len(users) and not told[0] & told[1]


def test_the_command_prints_titles_and_leaves_out_what_was_seen(run_dir: Path, shops: Path) -> None:
    common = ["recommend", str(run_dir), "--domain", "games", "--user", "games-u7", "-k", "35"]
    done = CliRunner().invoke(app, common, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    rows = [line.split("│") for line in done.output.splitlines() if "games-i" in line]
    assert [row[2].strip() for row in rows] == expected(run_dir, "games", 7, 35)
    number = int(rows[0][2].strip().removeprefix("games-i"))
    assert rows[0][4].strip() == f"games product {number} of kind {number % 5}"
    unseen = CliRunner().invoke(app, [*common, "--exclude-seen"], env={"COLUMNS": "200"})
    users, items, _ = PreparedData.open(shops).interactions("games")
    shown = {line.split("│")[2].strip() for line in unseen.output.splitlines() if "games-i" in line}
    assert shown == {f"games-i{i}" for i in range(35)} - {f"games-i{i}" for i in items[users == 7]}


def test_the_command_names_what_is_wrong(run_dir: Path, tmp_path: Path) -> None:
    for args, message in (
        ([str(run_dir), "--domain", "toys", "--user", "x"], "no model of domain 'toys'; it has: books, films, games"),
        ([str(tmp_path), "--domain", "books", "--user", "x"], str(tmp_path)),
    ):
        failed = CliRunner().invoke(app, ["recommend", *args])
        assert isinstance(failed.exception, CrossfedError) and message in str(failed.exception)


def test_a_model_without_its_index_says_so(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for file in ("config.yaml", "model/books.safetensors"):
        (tmp_path / file).write_bytes((run_dir / file).read_bytes())
    with pytest.raises(CrossfedError, match="does not say who and what its model of books is about"):
        DomainModel(tmp_path, "books")


def test_writing_takes_no_time(run_dir: Path, tmp_path: Path) -> None:
    began = time.process_time()
    save.save(run_dir, "books", tmp_path / "model")
    assert time.process_time() - began < 2


@pytest.fixture
def server(uris: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """`mlflow models serve` on the model of films."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", uris["films"], "--env-manager", "local"]
    log = (tmp_path / "serve.log").open("w")
    # mlflow starts uvicorn by its name
    env = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    process = subprocess.Popen([*command, "-p", str(port)], stdout=log, stderr=log, start_new_session=True, env=env)
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            requests.get(f"{address}/ping", timeout=2)
            break
        except requests.ConnectionError:
            time.sleep(0.2)
    yield f"{address}/invocations"
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(20)


@pytest.mark.slow
def test_mlflow_serves_what_the_command_recommends(run_dir: Path, server: str) -> None:
    answer = requests.post(server, json={"dataframe_records": [{"user": "films-u9", "k": 6}]}, timeout=30)
    assert answer.status_code == 200, answer.text
    (row,) = answer.json()["predictions"]
    assert row["known"] and row["items"] == expected(run_dir, "films", 9, 6)
    done = CliRunner().invoke(app, ["recommend", str(run_dir), "--domain", "films", "--user", "films-u9", "-k", "6"])
    assert [line.split("│")[2].strip() for line in done.output.splitlines() if "films-i" in line] == row["items"]
    for bad, reason in (
        ({"dataframe_records": [{"user": "films-u9", "k": 0}]}, "k is 0; it must be 1 or more"),
        ({"dataframe_records": [{"user": "films-u9", "exclude": ["no-such"]}]}, "exclude names the item 'no-such'"),
        ({"dataframe_records": [{"k": 3}]}, "user"),
    ):
        refused = requests.post(server, json=bad, timeout=30)
        assert refused.status_code == 400 and reason in refused.text, refused.text
