"""The commands that look at finished runs, from the command line: what they print, write and
refuse.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from crossfed.platform.checkpoint import read_json
from crossfed.platform.cli.main import app
from crossfed.platform.errors import CrossfedError
from made_runs import make_run, users


def call(*args: Any) -> str:
    """What a command prints; what it refuses is raised, as `main` tells it."""
    done = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Three methods: LightGCN over two seeds, FedCRF over two, and FedCRF without its contrastive
    loss.
    """
    asked = [
        ("l0", "lightgcn", 0, ()),
        ("l1", "lightgcn", 1, ()),
        ("f0", "fedcrf", 0, ()),
        ("f1", "fedcrf", 1, ()),
    ]
    for name, method, seed, sets in (*asked, ("cl", "fedcrf", 0, ("ablation=cl",))):
        values = {"books": {"recall_at_20": users(seed, 0.3), "ndcg_at_20": users(seed + 5, 0.2)}}
        rows = [
            {
                "stage": "train",
                "round": 1,
                "step": 1,
                "bytes_up": 9,
                "bytes_down": 9,
                "seconds": 2.0,
                "metrics": {"val/books/recall_at_20": 0.3},
                "best": 0.3,
                "domains": {"books": 0.3},
            }
        ]
        make_run(tmp_path / name, method, seed, values, sets=sets, history=rows)
    return tmp_path


def test_forms_of_a_comparison(out: Path) -> None:
    runs = ["l0", "l1", "f0", "f1", "--out", out]
    told = call("compare", *runs)
    assert (
        told.startswith("| method | seeds | books Recall@20 | books NDCG@20 |\n")
        and "95 % interval" in told
    )
    for name, words in (
        ("t.tex", r"\toprule"),
        ("t.csv", "method,private"),
        ("t.html", "<!doctype html>"),
        ("t.md", "| method"),
    ):
        assert call("compare", *runs, "--out-file", out / "new" / name).strip() == str(
            out / "new" / name
        )
        assert words in (out / "new" / name).read_text(encoding="utf-8")
    # metrics, over users, over seeds
    assert call("compare", *runs, "--format", "latex").count(r"\begin{tabular}") == 3
    assert "| fedcrf | lightgcn |" in call("compare", *runs, "--metric", "recall@20")
    assert "| lightgcn | fedcrf |" in call("compare", *runs, "--against", "fedcrf")
    assert "over users" not in call("compare", *runs, "--split", "validation")
    (out / "file").touch()
    with pytest.raises(CrossfedError, match=r"cannot be written: .*; choose another --out-file"):
        call("compare", *runs, "--out-file", out / "file" / "t.md")


def test_every_analysis_prints_its_table_and_writes_picture_and_numbers(out: Path) -> None:
    both = ["l0", "f0", "f1", "--out", out]
    half = read_json(out / "l0/result.json")["domains"]
    make_run(
        out / "half",
        "lightgcn",
        0,
        {name: {"recall_at_20": np.full(row["test_users"], 0.1)} for name, row in half.items()},
        sets=("evaluation.train_share=0.5",),
    )
    for name, args, words in (
        ("cohorts", ["cohorts", *both, "--bounds", "20"], "| lightgcn | books |"),
        ("upload", ["upload", *both], "bytes to"),
        ("time", ["time", *both], "epochs in it"),
        ("ablation", ["ablation", "f0", "f1", "cl", "--out", out], "fedcrf, ablation=cl"),
        (
            "sparsity-recall",
            ["sparsity", "f0", "l0", "half", "--out", out],
            "| lightgcn | 0.5 | 1 | 0.1000 |",
        ),
        (
            "ablation",
            ["sensitivity", "f0", "cl", "--key", "ablation", "--split", "validation", "--out", out],
            "| none |",
        ),
    ):
        told = call("analyse", *args, "--to", out / "a")
        files = [Path(line) for line in told.splitlines() if line.endswith((".png", ".csv"))]
        assert words in told and len(files) == 2 and all(file.is_file() for file in files)
        assert files[0].name.startswith(name) and files[0].read_bytes().startswith(b"\x89PNG")
    assert str(out / "analyses" / "time.png") in call("analyse", "time", *both)


def test_what_an_analysis_cannot_show_is_told(out: Path) -> None:
    runs = ["l0", "f0", "--out", out]
    for args, words in (
        (["cohorts", *runs, "--bounds", "7;15"], "no list of whole numbers"),
        (["cohorts", *runs, "--bounds", "15,7"], "must ascend"),
        (["sparsity", *runs], "what evaluation.train_share does: it is the same in all of them"),
        (["utility", *runs], "None of these runs perturbs"),
        (["weights", "f0", "--out", out], "reports no aggregation weights"),
        (["prototypes", "f0", "--out", out], "exported no prototypes"),
        (["item-map", "f0", "--out", out], "holds no item vectors 'items'"),
        (["cohorts", "nothing", "--out", out], "There is no run 'nothing'"),
    ):
        with pytest.raises(CrossfedError, match=words):
            call("analyse", *args)


def test_help_lists_every_analysis() -> None:
    told = call("analyse", "--help")
    names = (
        "ablation",
        "cohorts",
        "sensitivity",
        "sparsity",
        "utility",
        "upload",
        "time",
        "weights",
        "prototypes",
        "item-map",
    )
    assert all(re.search(rf"\b{name}\b", told) for name in names)
