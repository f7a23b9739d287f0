"""The page about runs or a study: everything is on it, nothing is fetched, and nothing that a name
holds breaks it.
"""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from typer.testing import CliRunner

from crossfed.platform.cli.main import app
from crossfed.platform.config.settings import TrackingSettings, build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report.finished import load_runs
from crossfed.platform.report.overview import overview
from crossfed.platform.tracking.tracker import Tracker, add_artifact, reading
from crossfed.tuning.scheduler import final_name
from made_runs import make_run, users

VOID = {"meta", "img"}
ROWS = [
    {
        "stage": "train",
        "round": step,
        "rounds": 2,
        "step": step,
        "bytes_up": 0,
        "bytes_down": 0,
        "seconds": 1.0,
        "metrics": {f"val/{d}/recall_at_20": 0.1 * step for d in ("books", "toys")},
        "best": 0.1 * step,
        "domains": dict.fromkeys(("books", "toys"), 0.1 * step),
    }
    for step in (1, 2)
]
SENT = {
    "stage": "pretrain",
    "round": 1,
    "sender": "books",
    "receiver": "server",
    "direction": "up",
    "key": "item_vectors",
}


class Checked(HTMLParser):
    """Every tag is closed in its order; what a browser would fetch; the texts of headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag not in ("script", "link", "iframe")
        self.fetched += [
            value for name, value in attrs if name in ("src", "href", "srcset", "data")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3", "summary"):
            self.headings.append(data)


def values(mean: float, seed: int = 0) -> dict[str, Any]:
    return {
        name: {"recall_at_20": users(seed, mean), "ndcg_at_20": users(seed, mean / 2)}
        for name in ("books", "toys")
    }


def made(out: Path) -> list[Path]:
    paths = [make_run(out / f"l{s}", "lightgcn", s, values(0.2, s), history=ROWS) for s in (0, 1)]
    up = {"up": {"books": 2560, "toys": 0}, "down": {"books": 0, "toys": 0}}
    plain = {
        "note": "",
        "unit": "",
        "domains": {},
        "stopped_by_budget": {},
        "sent_as_it_is": ["pretrain: item_vectors (up)"],
    }
    for seed in (0, 1):
        path = make_run(
            out / f"f{seed}",
            "fedcrf",
            seed,
            values(0.3, seed + 5),
            history=ROWS,
            bytes=up,
            privacy=plain,
        )
        row = SENT | {"shape": [10, 64], "dtype": "float32", "bytes": 2560, "copy": 0}
        (path / "ledger.jsonl").write_text(json.dumps(row) + "\n")
        paths.append(path)
    return paths


def test_the_page_holds_all_and_fetches_nothing(tmp_path: Path) -> None:
    page = overview(load_runs(made(tmp_path)))
    text = page.html()
    found = Checked(text)
    assert {
        "Results",
        "Test metrics",
        "Differences over users",
        "Differences over seeds",
        "Users by activity",
        "What was run",
        "Runs",
        "Domains",
        "Settings",
        "All settings of fedcrf",
        "What crossed",
        "fedcrf, seed 0",
        "Privacy",
        "Software",
    } <= set(found.headings)
    # differences, cohorts, upload, time, and the curves of each row
    assert len(found.fetched) == 6 and all(
        source.startswith("data:image/png;base64,") for source in found.fetched
    )
    assert all(
        base64.b64decode(source.partition(",")[2]).startswith(b"\x89PNG")
        for source in found.fetched
    )
    told = re.sub(r"<[^>]+>", " ", text)
    for part in (
        "ratio-80-10-10",
        "split seed 42",
        "ab12ab12ab12ab12ab12",
        "full:100",
        "lightgcn: nothing crossed.",
        "2.56 kB",
    ):
        assert part in told, part
    assert (
        "normalised text vectors" in told
        and "nothing leaves any domain" in told
        and "contrast: printed" in told
    )
    assert page.markdown().startswith("# lightgcn, fedcrf on shops")


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "a",
        "lightgcn",
        0,
        {"<b>books & co": {"recall_at_20": users(0, 0.3)}},
        history=ROWS,
    )
    text = overview(load_runs([run])).html()
    Checked(text)
    assert "<b>books" not in text and "&lt;b&gt;books &amp; co" in text


def test_what_old_runs_lack_is_told_in_its_place(tmp_path: Path) -> None:
    """Runs without an account, without a record of their rounds and without per-user values still
    have a page.
    """
    up = {"up": {"books": 9, "toys": 0}, "down": {"books": 0, "toys": 0}}
    run = make_run(tmp_path / "a", "fedcrf", 0, values(0.3), bytes=up, privacy=None)
    for file in (run / "per_user").iterdir():
        file.unlink()
    text = overview(load_runs([run])).html()
    for part in (
        "holds no record of its rounds",
        "holds no per-user test values",
        "9 B left the domains",
        "kept no account",
    ):
        assert part in text, part
    assert "perturbed" not in text


def test_runs_that_do_not_compare_have_no_page(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", "lightgcn", 0, values(0.3)),
        make_run(tmp_path / "b", "fedcrf", 0, values(0.3), split_seed=1),
    ]
    with pytest.raises(CrossfedError, match="differ in split seed"):
        overview(load_runs(runs))


def searched(folder: Path) -> Path:
    """A study of two trials, its final run, its figures, and its own MLflow run, as `crossfed tune`
    leaves them.
    """
    folder.mkdir(parents=True)
    base = build("fedcrf", values={"out": folder.parent})
    run = base.model_dump(mode="json")
    (folder / "study.yaml").write_text(
        yaml.safe_dump({"search": {"name": folder.name, "seeds": 1}, "run": run})
    )
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'optuna.db'}", study_name=folder.name, directions=["maximize"]
    )
    told = {
        "method": "fedcrf",
        "data": "shops",
        "protocol": "ratio-80-10-10",
        "metric": "recall_at_20",
        "objectives": ["recall_at_20"],
    }
    for key, value in told.items():
        study.set_user_attr(key, value)
    kind = optuna.distributions.IntDistribution(10, 100)
    for k, value in ((50, 0.2), (70, 0.3)):
        attrs = {"status": "finished", "rounds": 3, "max_rounds": 3, "domains": {"books": value}}
        study.add_trial(
            optuna.trial.create_trial(
                params={"K": k}, distributions={"K": kind}, values=[value], user_attrs=attrs
            )
        )
    make_run(folder / final_name(0), "fedcrf", 0, values(0.3), history=ROWS)
    (folder / "figures").mkdir()
    for name in ("importance", "slice_K"):
        (folder / "figures" / f"{name}.png").write_bytes(b"\x89PNG " + name.encode())
    Tracker.start(
        TrackingSettings(), folder, folder.name, {}, {"role": "study", "study": folder.name}, []
    ).finish("FINISHED")
    return folder


def test_a_study_gets_its_page_and_mlflow_too(tmp_path: Path) -> None:
    study = searched(tmp_path / "care")
    done = CliRunner().invoke(
        app, ["report", "care", "--out", str(tmp_path)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    page = study / "report.html"
    assert str(page) in done.output and "recorded with care in sqlite" in done.output
    found = Checked(page.read_text(encoding="utf-8"))
    assert {"Search care", "Trials", "Importance"} <= set(found.headings)
    assert "Best recall_at_20: 0.3000, trial 1" in page.read_text(encoding="utf-8")
    pictures = [base64.b64decode(source.partition(",")[2]) for source in found.fetched]
    assert b"\x89PNG importance" in pictures and b"\x89PNG slice_K" not in pictures
    with reading(f"sqlite:///{tmp_path / 'mlflow.db'}") as client:
        run_id = (study / "mlflow_run_id").read_text().strip()
        assert "report.html" in [entry.path for entry in client.list_artifacts(run_id)]
        assert client.get_run(run_id).info.status == "FINISHED"


def test_what_is_not_recorded_is_told(tmp_path: Path) -> None:
    assert add_artifact(tmp_path, tmp_path / "p.html") == (
        f"{tmp_path.name} is not recorded in MLflow"
    )
    uri = f"sqlite:///{tmp_path / 'gone' / 'mlflow.db'}"
    (tmp_path / "tracking.json").write_text(json.dumps({"uri": uri, "run_id": "1"}))
    assert add_artifact(tmp_path, tmp_path / "p.html").startswith(
        "not recorded in MLflow: There is no tracking database"
    )
