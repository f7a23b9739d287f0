"""Figures over rounds: bytes, time, memory and weights, read back from what is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysed import RECALL, both, records, texts
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report import rounds as courses
from crossfed.platform.report.finished import load_runs
from made_runs import make_run


def row(
    stage: str,
    step: int,
    recall: float | None,
    up: int,
    seconds: float = 1.0,
    best: float | None = None,
    **told: float,
) -> dict[str, Any]:
    """A round after which `recall` was measured in both domains; `best` is that of its stage where
    it is not this one.
    """
    best = recall if best is None else best
    metrics = {f"val/{d}/{RECALL}": recall for d in ("books", "toys")} if recall is not None else {}
    return {
        "stage": stage,
        "round": step,
        "rounds": 9,
        "step": step,
        "metrics": metrics | told,
        "best": best,
        "domains": {} if best is None else dict.fromkeys(("books", "toys"), best),
        "bytes_up": up,
        "bytes_down": up,
        "seconds": seconds,
    }


def test_upload_counts_bytes_up_to_a_target(tmp_path: Path) -> None:
    """The mean of domains decides; what a stage sends before its first evaluation counts; what
    would be selected is shown, which begins anew with a stage; a target counts as reached where no
    later stage falls below it."""
    rounds = [
        row("a", 1, None, 500),
        row("a", 2, 0.1, 500),
        row("a", 3, 0.3, 500),
        row("b", 4, 0.2, 0),
        row("b", 5, 0.4, 100),
        row("b", 6, 0.25, 0, best=0.4),
    ]
    run = make_run(tmp_path / "f", "fedcrf", 0, both(0.3), history=rounds)
    local = make_run(tmp_path / "l", "lightgcn", 0, both(0.3), history=[row("train", 1, 0.35, 0)])
    found = courses.upload(load_runs([run, local]), RECALL, target=0.25)
    shown = [
        (int(r["bytes_up"]), float(r["best"])) for r in records(found) if r["method"] == "fedcrf"
    ]
    assert shown == [(1000, 0.1), (1500, 0.3), (1500, 0.2), (1600, 0.4), (1600, 0.4)]
    assert [cells[1:] for cells in found.grid.rows] == [
        ("1", "0.4000", "1.6 kB", "1.6 kB"),
        ("1", "0.3500", "0 B", "0 B"),
    ]
    assert "lightgcn (sends nothing)" in texts(found.figure)
    assert found.figure.axes[0].get_xlim()[0] == 0
    missed = courses.upload(load_runs([run, local]), RECALL, target=0.36)
    assert [cells[4] for cells in missed.grid.rows] == ["1.6 kB", "0 of 1 seeds get there"]
    default = courses.upload(load_runs([run, local]), RECALL)
    assert default.grid.columns[4].name == f"bytes to {0.99 * 0.35:.4f}"
    with pytest.raises(CrossfedError, match="f evaluated no validation ndcg_at_20"):
        courses.upload(load_runs([run]), "ndcg_at_20")
    with pytest.raises(CrossfedError, match="n holds no record of its rounds"):
        courses.upload(load_runs([make_run(tmp_path / "n", "lightgcn", 0, both(0.3))]), RECALL)


def test_upload_shows_the_selected_state_in_other_metrics_too(tmp_path: Path) -> None:
    """Recall selects, each domain its own round (books 2, toys 1); nDCG is that of those rounds,
    not its own best.
    """
    ndcg = "ndcg_at_20"

    def measured(
        step: int, books: tuple[float, float], toys: tuple[float, float], held: tuple[float, float]
    ) -> Any:
        told = {f"val/{name}/{key}": value for name, pair in (("books", books), ("toys", toys))
                for key, value in zip((RECALL, ndcg), pair, strict=True)}  # fmt: skip
        domains = {"books": held[0], "toys": held[1]}
        return row("train", step, None, 0) | {
            "metrics": told,
            "best": sum(held) / 2,
            "domains": domains,
        }

    rounds = [
        measured(1, (0.1, 0.9), (0.3, 0.5), (0.1, 0.3)),
        measured(2, (0.2, 0.7), (0.2, 0.8), (0.2, 0.3)),
        measured(3, (0.3, 0.6), (0.3, 0.9), (0.3, 0.3)),  # toys ties: its earlier round stays
    ]
    run = load_runs([make_run(tmp_path / "l", "lightgcn", 0, both(0.3), history=rounds)])[0]
    assert courses._course(run, ndcg)[1] == pytest.approx(
        [(0.9 + 0.5) / 2, (0.7 + 0.5) / 2, (0.6 + 0.5) / 2]
    )
    assert courses._course(run, RECALL)[1] == pytest.approx([0.2, 0.25, 0.3])


def test_upload_of_a_stage_that_keeps_no_best_shows_its_last_state(tmp_path: Path) -> None:
    run_dir = make_run(
        tmp_path / "l",
        "lightgcn",
        0,
        both(0.3),
        history=[row("t", 1, 0.3, 0), row("t", 2, 0.2, 0, best=0.3)],
    )
    result = json.loads((run_dir / "result.json").read_text())
    for told in result["domains"].values():
        told["selected"] = {"rounds": 2}
    (run_dir / "result.json").write_text(json.dumps(result))
    assert courses._course(load_runs([run_dir])[0], RECALL)[1] == [0.3, 0.2]


def test_time_per_round_and_epoch(tmp_path: Path) -> None:
    """FedCGR's stage without exchange has an epoch a round, its federated one `local_epochs`."""
    rounds = [
        row("cf", 1, None, 0, 3.0),
        *(row("federate", s, 0.3, 9, t) for s, t in ((2, 8.0), (3, 10.0), (4, 30.0))),
    ]
    run = make_run(tmp_path / "f", "fedcgr", 0, both(0.3), sets=("local_epochs=2",), history=rounds)
    found = courses.time(load_runs([run]))
    assert [
        (r["stage"], r["epochs_per_round"], float(r["seconds_per_epoch"])) for r in records(found)
    ] == [("cf", "1", 3.0), ("federate", "2", 5.0)]
    federated = records(found)[1]
    assert (float(federated["seconds_per_round"]), float(federated["upper_quartile"])) == (
        10.0,
        20.0,
    )
    assert (federated["threads"], federated["devices"], federated["rounds"]) == ("1", "cpu", "3.0")
    assert (float(federated["bytes_up_per_round"]), federated["peak_memory"]) == (9.0, "")
    assert "local epoch" in texts(found.figure)
    local = make_run(
        tmp_path / "l", "lightgcn", 0, both(0.3), history=[row("train", 1, 0.3, 0, 2.0)]
    )
    # a round is an epoch: one bar
    assert len(courses.time(load_runs([local])).figure.axes[0].patches) == 1


def test_the_most_memory_is_that_of_the_largest_domain(tmp_path: Path) -> None:
    def peak(**memory: tuple[int, int | None]) -> tuple[str, str]:
        told = {name: {"process": process, "gpu": gpu} for name, (process, gpu) in memory.items()}
        history = [row("train", 1, 0.3, 9, 2.0)]
        run = make_run(
            tmp_path / str(len(list(tmp_path.iterdir()))),
            "fedcgr",
            0,
            both(0.3),
            history=history,
            memory=told,
        )
        found = courses.time(load_runs([run]))
        return records(found)[0]["peak_memory"], found.grid.rows[0][-2]

    assert peak(books=(3000, None), films=(5000, None), server=(9000, None)) == ("5000", "5 kB")
    # on GPUs that is what runs out
    assert peak(books=(3000, 700), films=(5000, 600)) == ("700", "700 B")


def test_weights_round_by_round(tmp_path: Path) -> None:
    def told(step: int, own: float) -> dict[str, float]:
        pairs = {
            ("books", "books"): own,
            ("books", "toys"): 1 - own,
            ("toys", "books"): 0.3,
            ("toys", "toys"): 0.7,
        }
        return {f"train/server/weight_{i}_{j}": value for (i, j), value in pairs.items()} | {
            "train/server/weight_decay": 9.0
        }

    rounds = [
        row("cf", 1, None, 0),
        row("federate", 2, 0.1, 9, **told(2, 0.6)),
        row("federate", 3, 0.2, 9, **told(3, 0.9)),
    ]
    run = make_run(tmp_path / "f", "fedcgr", 0, both(0.3), history=rounds)
    found = courses.weights(load_runs([run])[0])
    by = {(r["round"], r["receiver"], r["sender"]): float(r["weight"]) for r in records(found)}
    assert (
        by["2", "books", "toys"] == pytest.approx(0.4)
        and by["3", "toys", "books"] == 0.3
        and len(by) == 8
    )
    books, toys, last = (axis.images[0].get_array() for axis in found.figure.axes[:3])
    np.testing.assert_allclose(books, [[0.6, 0.9], [0.4, 0.1]])  # senders down, rounds across
    np.testing.assert_allclose(toys, [[0.3, 0.3], [0.7, 0.7]])
    np.testing.assert_allclose(last, [[0.9, 0.1], [0.3, 0.7]])  # receivers down, senders across


def test_weights_that_are_the_same_for_all(tmp_path: Path) -> None:
    told = {"train/server/weight_books": 0.8, "train/server/weight_toys": 0.2}
    run = make_run(
        tmp_path / "f", "fedsasrec", 0, both(0.3), history=[row("federate", 1, 0.1, 9, **told)]
    )
    last = courses.weights(load_runs([run])[0]).figure.axes[2].images[0].get_array()
    np.testing.assert_allclose(last, [[0.8, 0.2], [0.8, 0.2]])
    silent = make_run(tmp_path / "l", "lightgcn", 0, both(0.3), history=[row("train", 1, 0.1, 0)])
    with pytest.raises(CrossfedError, match="l reports no aggregation weights"):
        courses.weights(load_runs([silent])[0])
