"""Maps of items and prototypes, read back from what is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from analysed import both, records, texts
from crossfed.platform import checkpoint
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report import maps
from crossfed.platform.report.finished import Finished, load_runs
from made_runs import make_run


@pytest.fixture
def mapped(tmp_path: Path) -> Finished:
    """Two clusters of items in each domain, of 100 items, exported and last committed; their
    centres at the server.
    """
    rng = np.random.default_rng(0)
    centres = np.array([[40.0] + [0.0] * 7, [-40.0] + [0.0] * 7], np.float32)
    run = make_run(tmp_path / "f", "fedcrf", 0, both(0.3))
    (run / "model").mkdir()
    old, new = (run / "checkpoints" / f"commit-00000{number}" for number in (1, 2))
    new.mkdir(parents=True)
    old.mkdir()
    for name in ("books", "toys"):
        items = np.concatenate([c + rng.normal(size=(50, 8)) for c in centres]).astype(np.float32)
        save_file(
            {"items": items, "users": np.zeros((60, 8), np.float32)},
            run / "model" / f"{name}.safetensors",
        )
        checkpoint.save(
            new / name,
            {"model": {"t": items[:, :3].copy(), "w": np.eye(8, dtype=np.float32)}, "step": 3},
        )
    checkpoint.save(new / "server", {"centres": centres})
    return load_runs([run])[0]


def test_item_map_keeps_clusters_apart_and_centres_with_theirs(mapped: Finished) -> None:
    found = maps.item_map(mapped, centres="centres", per_domain=40)
    together, books, _ = found.figure.axes
    items_a, items_b, stars = (np.asarray(c.get_offsets()) for c in together.collections)
    assert (len(items_a), len(items_b), len(stars)) == (40, 40, 2) and len(books.collections) == 2
    points = np.concatenate([items_a, items_b])
    nearest = np.linalg.norm(points[:, None] - stars[None], axis=2).argmin(axis=1)
    drawn = [
        int(r["row"])
        for r in records(found)
        if r["map"] == "all domains" and r["domain"] != "centre"
    ]
    assert len(set(zip(nearest.tolist(), (np.array(drawn) < 50).tolist(), strict=True))) == 2
    assert "books (40 of 100 items)" in texts(found.figure) and "2 centres" in texts(found.figure)


def test_item_map_of_several_vectors(mapped: Finished) -> None:
    """Before and after: a row each; centres only where their width is that of the vectors."""
    found = maps.item_map(mapped, ("model.t", "items"), "centres", per_domain=20)
    assert [axis.get_title() for axis in found.figure.axes] == [
        "model.t: all domains",
        "model.t: books",
        "model.t: toys",
        "items: all domains",
        "items: books",
        "items: toys",
    ]
    assert [len(axis.collections) for axis in found.figure.axes] == [2, 1, 1, 3, 2, 2]
    assert found.grid.rows[0] == ("model.t", "3", "100 items", "100 items")


def test_what_no_map_can_show_is_told(mapped: Finished) -> None:
    with pytest.raises(
        CrossfedError,
        match=r"no item vectors 'users' in all domains; it has "
        r"model.t, items, text",
    ):
        maps.item_map(mapped, ("users",))
    with pytest.raises(CrossfedError, match="no centres 'middle'; it has centres"):
        maps.item_map(mapped, centres="middle")
    with pytest.raises(CrossfedError, match="by tsne or umap, not 'pca'"):
        maps.item_map(mapped, layout="pca")


def test_prototypes(mapped: Finished) -> None:
    """Three prototypes, two of which are opposite: |cos| of 1, 0 and 0."""
    with pytest.raises(CrossfedError, match="f exported no prototypes"):
        maps.prototypes(mapped)
    table = np.array([[2.0, 0.0], [-1.0, 0.0], [0.0, 3.0]], np.float32)
    for name in ("books", "toys"):
        save_file({"user_prototypes": table}, mapped.path / "model" / f"{name}.safetensors")
    [found] = maps.prototypes(mapped)
    assert (found.name, found.grid.rows[0]) == (
        "user_prototypes",
        ("books", "3", "2", "0.333", "1.000"),
    )
    by = {(r["domain"], r["prototype"], r["other"]): float(r["cosine"]) for r in records(found)}
    assert by["toys", "0", "1"] == -1 and by["toys", "0", "2"] == 0 and len(by) == 18
