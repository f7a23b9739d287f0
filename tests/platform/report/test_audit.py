"""The audit on one page: what the ledger adds up to, the attack beside its baselines, the account,
both forms of the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossfed.platform.checkpoint import read_json
from crossfed.platform.config.settings import build
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.report.audit import attack, audit, crossed
from crossfed.platform.report.page import Page
from crossfed.platform.report.recording import run_recorded

PLAIN: dict[str, Any] = {"domains": {}, "sent_as_it_is": []}


def entry(
    stage: str,
    round: int,
    sender: str,
    receiver: str,
    key: str,
    shape: tuple[int, ...],
    dtype: str = "float32",
) -> dict:
    way = "up" if receiver == "server" else "down" if sender == "server" else "peer"
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    place = {
        "stage": stage,
        "round": round,
        "sender": sender,
        "receiver": receiver,
        "direction": way,
    }
    return {**place, "key": key, "shape": list(shape), "dtype": dtype, "bytes": size, "copy": 0}


def run(method: str, data: Path, out: Path, *sets: str, **options: Any) -> Path:
    values = {"data": data, "out": out, "backend": "inprocess", "tracking.enabled": False}
    config = build(method, sets=["tracking.artifacts=false", *sets], values=values)
    return run_recorded(config, finish=final_test, **options).run_dir


# -- what crossed ----------------------------------------------------------------------------------


def test_the_ledger_adds_up_by_domain_and_key() -> None:
    """FedCRF, two rounds: books has 10 items of 4 numbers, films 5. Centres are the same for both
    and share a row.
    """
    config = build("fedcrf", sets=["dim=4", "K=3"])
    ledger = []
    for round in (1, 2):
        for name, items in (("books", 10), ("films", 5)):
            ledger.append(entry("pretrain", round, name, "server", "item_vectors", (items, 4)))
            ledger.append(entry("pretrain", round, "server", name, "centres", (3, 4)))
            ledger.append(entry("pretrain", round, "server", name, "labels", (items,), "int64"))
    plain = ["pretrain: item_vectors (up)", "pretrain: centres (down)", "pretrain: labels (down)"]
    found = {
        (r["domains"], r["key"]): r
        for r in crossed(config, ledger, {**PLAIN, "sent_as_it_is": plain}).records
    }
    assert set(found) == {
        ("books", "item_vectors"),
        ("films", "item_vectors"),
        ("books, films", "centres"),
        ("books", "labels"),
        ("films", "labels"),
    }
    books, both = found["books", "item_vectors"], found["books, films", "centres"]
    assert (books["messages"], books["bytes"], books["bytes_per_round"]) == (
        2,
        2 * 10 * 4 * 4,
        10 * 4 * 4,
    )
    assert (both["messages"], both["bytes"], both["bytes_per_round"]) == (
        2,
        2 * 3 * 4 * 4,
        3 * 4 * 4,
    )
    assert (books["grows"], both["grows"], found["films", "labels"]["grows"]) == (
        "items",
        "nothing",
        "items",
    )
    assert (
        books["shape"] == "10 × 4 [n_items, dim]"
        and books["left"] == "as it is"
        and books["direction"] == "up"
    )
    assert found["films", "labels"]["bytes"] == 2 * 5 * 8


def test_a_model_is_one_row_whatever_the_number_of_its_arrays() -> None:
    config = build("fedsasrec")
    ledger = [
        entry("federated", round, "books", "server", key, shape)
        for round in (1, 2, 3)
        for key, shape in (
            ("blocks.0.a", (4, 4)),
            ("blocks.1.a", (4, 4)),
            ("blocks.0.b", (4,)),
            ("n", (1,)),
        )
    ]
    found = {row["key"]: row for row in crossed(config, ledger, PLAIN).records}
    assert set(found) == {"blocks.*", "n"}
    assert (
        found["blocks.*"]["shape"] == "3 arrays, 36 values"
        and found["blocks.*"]["grows"] == "the size of the model"
    )
    assert found["blocks.*"]["messages"] == 3 and found["blocks.*"]["bytes"] == 3 * 36 * 4
    assert found["blocks.*"]["bytes_per_round"] == 36 * 4
    assert found["n"]["shape"] == "1" and found["n"]["grows"] == "nothing"


def test_what_is_opened_and_what_is_sent_each_round() -> None:
    """What went before the first round (round 0) counts as a round of its own."""
    config = build("fedsasrec")
    ledger = [
        entry("federated", round, "server", "books", "positions", (2, 4)) for round in (0, 1, 2)
    ]
    (row,) = crossed(config, ledger, PLAIN).records
    assert (row["messages"], row["bytes"], row["bytes_per_round"], row["domains"]) == (
        3,
        96,
        32,
        "books",
    )


# -- the attack ------------------------------------------------------------------------------------


def test_the_attack_stands_beside_its_baselines() -> None:
    measured = {
        f"v{what}/f1_at_{k}": base / k
        for what, base in (("", 0.5), ("_random", 0.1))
        for k in (1, 5)
    }
    grid = attack(
        {"books": measured | {"v_popularity/f1_at_1": 0.25, "v_popularity/f1_at_5": 0.05}}
    )
    assert grid is not None and [column.name for column in grid.columns[3:]] == ["Top-1", "Top-5"]
    assert grid.rows == (
        ("books", "v", "similar vectors", "0.5000", "0.1000"),
        ("books", "v", "random vectors", "0.1000", "0.0200"),
        ("books", "v", "popularity", "0.2500", "0.0500"),
    )
    older = attack({"books": measured})
    assert older is not None and older.rows[2] == ("books", "v", "popularity", "–", "–")
    assert attack({"books": {}}) is None and attack({}) is None


# -- pages of runs ---------------------------------------------------------------------------------


def texts(page: Page, title: str) -> str:
    (section,) = [section for section in page.sections if section.title == title]
    return " ".join(section.text)


ATTACK, ACCOUNT = "What an attacker infers from uploaded item vectors", "The privacy account"


def test_a_run_under_noise(shops: Path, tmp_path: Path) -> None:
    """Gossip of 3 domains in 4 rounds: 2 receivers each, 3 numbers of 4 bytes; 2 releases of ε = 2
    in a message.
    """
    page = audit(run("toys:WHISPER", shops, tmp_path, "rounds=4", "count=2"))
    (crossing,) = page.sections[0].grids
    assert crossing.rows[0][:2] == ("books, films, games", "to other domains")
    assert crossing.rows[0][8:] == ("8", "96 B", "24 B", "Laplace noise of scale 0.5")
    (releases,) = page.sections[2].grids
    assert releases.rows[0][0] == "books" and releases.rows[0][-4:] == ("4", "8", "8", "16")
    assert "books, films, games: ε = 8 as the paper counts, 16 whole" in texts(page, ACCOUNT)
    assert "declares nothing with one row per item" in texts(page, ATTACK)


def test_a_run_with_and_without_the_attack(shops: Path, tmp_path: Path) -> None:
    small = ("K=4", "dim=8", "rounds=1", "epochs=0", "batch_size=64", "text.encoder=hashing:32")
    silent = run("fedcrf", shops, tmp_path, *small)
    page = audit(silent)
    assert f"`crossfed run {silent / 'config.yaml'} --set evaluation.audit=true`" in texts(
        page, ATTACK
    )
    assert "no release is perturbed: what crosses is sent as it is." in texts(page, ACCOUNT)
    attacked = run("fedcrf", shops, tmp_path, *small, "evaluation.audit=true")
    (grid,) = audit(attacked).sections[1].grids
    f1 = read_json(attacked / "result.json")["domains"]["films"]["audit"][
        "item_vectors_popularity/f1_at_3"
    ]
    assert (
        grid.rows[5] == ("films", "item_vectors", "popularity", *grid.rows[5][3:])
        and grid.rows[5][4] == f"{f1:.4f}"
    )
    never = run("fedcrf", shops, tmp_path, *small, "evaluation.audit=true", "ablation=fed")
    assert "No array with one row per item has left" in texts(audit(never), ATTACK)


def test_a_run_that_exchanges_nothing(shops: Path, tmp_path: Path) -> None:
    page = audit(run("toy_controls:ALONE", shops, tmp_path))
    assert page.sections[0].grids == () and page.sections[0].text[0].startswith(
        "Nothing: no message has left"
    )
    assert texts(page, ACCOUNT) == "nothing crosses."


def test_an_unfinished_run_and_a_controlled_one_say_so(shops: Path, tmp_path: Path) -> None:
    def stop(row: Any) -> None:
        raise KeyboardInterrupt

    started: list[Path] = []
    with pytest.raises(KeyboardInterrupt):
        run("toys:GOSSIP", shops, tmp_path, "control=noise", on_round=stop, started=started.append)
    about = " ".join(audit(started[0]).about)
    assert "under the transfer control noise" in about and "This run has not finished" in about
    assert audit(started[0]).sections[0].grids[0].rows[0][8] == "2"
