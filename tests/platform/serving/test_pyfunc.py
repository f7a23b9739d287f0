"""The model as MLflow loads it: in a fresh process, for many users, refusing in a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException

from crossfed.platform.serving import model
from served import expected


def test_a_fresh_process_recommends_the_same(
    run_dir: Path, uris: dict[str, str], tmp_path: Path
) -> None:
    code = (
        "import json, mlflow, pandas as pd\n"
        f"model = mlflow.pyfunc.load_model({uris['films']!r})\n"
        "requests = pd.DataFrame({'user': ['films-u49', 'films-u3'], 'k': [5, 2]})\n"
        "print(json.dumps(model.predict(requests).to_dict('list')))\n"
    )
    away = {
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "1",
    }
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
            assert answer.loc[place, "items"] == expected(
                run_dir, "films", int(rows[place]), model.K
            )


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
