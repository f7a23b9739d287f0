"""The model artifact of a real run: what a fresh process loads recommends what the run would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow import MlflowClient

from crossfed.platform import served
from crossfed.platform.config import build
from crossfed.platform.run import load_scorer, run_federation
from crossfed.platform.seam import CrossfedError


@pytest.fixture(scope="module")
def run_dir(shops: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    values = {"data": shops, "out": out, "backend": "inprocess"}
    return run_federation(build("lightgcn", sets=["epochs=2"], values=values)).run_dir


@pytest.fixture(scope="module")
def uri(run_dir: Path) -> str:
    """The logged model's address, as the tracker left it in the store."""
    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent}/mlflow.db")
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    [output] = client.get_run(run_id).outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert model.status == "READY"
    assert model.source_run_id == run_id
    return model.artifact_location


@pytest.fixture(scope="module")
def model(uri: str) -> Any:
    return mlflow.pyfunc.load_model(uri)


def expected(run_dir: Path, domain: str, user: int, k: int, exclude: tuple[int, ...] = ()) -> list[int]:
    """The slow way: sort all pairs (score, row number)."""
    scores = load_scorer(run_dir, domain)(np.array([user]))[0].tolist()
    ranked = sorted((-s, i) for i, s in enumerate(scores) if i not in exclude)
    return [i for _, i in ranked[:k]]


def test_a_fresh_process_recommends_the_same(run_dir: Path, uri: str, tmp_path: Path) -> None:
    code = (
        "import json, mlflow, pandas as pd\n"
        f"model = mlflow.pyfunc.load_model({uri!r})\n"
        "requests = pd.DataFrame({'domain': ['films', 'books', 'films'], 'user': [49, 0, 3], 'k': [5, 3, 2]})\n"
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
    assert answer["domain"] == ["films", "books", "films"]
    assert answer["user"] == [49, 0, 3]
    assert answer["items"] == [
        expected(run_dir, d, u, k) for d, u, k in (("films", 49, 5), ("books", 0, 3), ("films", 3, 2))
    ]
    assert [len(s) for s in answer["scores"]] == [5, 3, 2]
    assert answer["scores"][0] == sorted(answer["scores"][0], reverse=True)


def test_many_users_of_several_domains_keep_their_order(run_dir: Path, model: Any) -> None:
    rng = np.random.default_rng(0)
    requests = pd.DataFrame(
        {"domain": rng.choice(["books", "films", "games"], 700), "user": rng.integers(0, 30, 700)}
    )  # fmt: skip
    answer = model.predict(requests)
    assert answer[["domain", "user"]].equals(requests)
    for row in (0, 255, 256, 699):
        domain, user = requests.loc[row]
        assert answer.loc[row, "items"] == expected(run_dir, domain, int(user), served.K)


def test_excluded_items_are_left_out(run_dir: Path, model: Any) -> None:
    first = expected(run_dir, "games", 2, 4)
    requests = pd.DataFrame({"domain": ["games"] * 2, "user": [2, 2], "k": [4, 100], "exclude": [first[:2], []]})
    answer = model.predict(requests)
    assert answer.loc[0, "items"] == expected(run_dir, "games", 2, 4, tuple(first[:2]))
    assert sorted(answer.loc[1, "items"]) == list(range(35))  # every item once, none twice


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"domain": ["toys"], "user": [0]}, "no model of domain 'toys'; it has: books, films, games"),
        ({"domain": ["books"], "user": [40]}, "user 40 is not a row number of domain books"),
        ({"domain": ["books"], "user": [-1]}, "user -1 is not a row number of domain books"),
        ({"domain": ["books"], "user": [0], "k": [0]}, "k is 0 in a request for domain books"),
        ({"domain": ["books"], "user": [0], "exclude": [[30]]}, "exclude names an item outside domain books"),
    ],
)
def test_a_bad_request_is_one_sentence(model: Any, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(CrossfedError, match=message):
        model.predict(pd.DataFrame(request_))


def test_the_artifact_holds_no_pickle_and_no_interactions(run_dir: Path, uri: str, shops: Path) -> None:
    root = Path(uri.removeprefix("file://"))
    files = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert {f for f in files if f.startswith("artifacts/")} == {
        "artifacts/config.yaml",
        *(f"artifacts/model/{d}.safetensors" for d in ("books", "films", "games")),
    }
    assert {Path(f).suffix for f in files} <= {".safetensors", ".yaml", ".json", ".txt", ".py", ""}
    requirements = (root / "requirements.txt").read_text().split()
    assert [r.partition("==")[0] for r in requirements] == ["crossfed", "mlflow", "torch"]
    assert not any("+" in r for r in requirements)


def test_writing_takes_no_time(run_dir: Path, tmp_path: Path) -> None:
    began = time.process_time()
    served.save(run_dir, ["books"], tmp_path / "model")
    assert time.process_time() - began < 2
