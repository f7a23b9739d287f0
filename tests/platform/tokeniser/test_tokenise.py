"""The shared tokeniser: keys, bits, interruption, what it reports, when it refuses, and where a
method finds it.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossfed.platform.config.settings import RunConfig
from crossfed.platform.console import make_progress
from crossfed.platform.data.store import PreparedData, Writer
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report.recording import run_recorded
from crossfed.platform.tokeniser import tokenise as tokeniser
from crossfed.platform.tokeniser.spec import Spec
from crossfed.platform.tokeniser.tokenise import (
    codebook_use,
    collision_rate,
    describe,
    fits,
    frozen,
    tokenise,
    train_here,
)
from sid_toy import config, files, made

# -- what a tokeniser depends on -------------------------------------------------------------------


def test_names_and_order_of_the_domains_do_not_matter(shops: Path, tmp_path: Path) -> None:
    first = made(config(shops, tmp_path))
    again = made(config(shops, tmp_path, "domains=[games, books, films]"))
    assert len(files("npy")) == 1
    assert list(again) == ["games", "books", "films"]
    for name in first:
        np.testing.assert_array_equal(first[name]["sids"], again[name]["sids"])
    renamed = tmp_path / "renamed"
    data = PreparedData.open(shops)
    with Writer(renamed, {"kind": "test shops"}) as writer:
        for old, new in (("games", "a"), ("books", "b"), ("films", "c")):
            users, items, times = data.interactions(old)
            texts = data.item_texts(old)
            n_users, n_items = data.sizes(old)
            writer.add_domain(
                new,
                users,
                items,
                times,
                [f"u{u}" for u in range(n_users)],
                [f"i{i}" for i in range(n_items)],
                texts,
            )
    other = made(config(renamed, tmp_path))
    assert len(files("npy")) == 1
    np.testing.assert_array_equal(other["a"]["sids"], first["games"]["sids"])
    assert made(config(shops, tmp_path, "domains=[games, books]")).keys() == {"games", "books"}
    assert len(files("npy")) == 2, "another union of items is another tokeniser"


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rqvae", "residual-kmeans"])
def test_every_domain_gets_its_own_items_and_a_second_time_is_a_hit(
    kind: str, shops: Path, tmp_path: Path
) -> None:
    run, printed = config(shops, tmp_path, f"tokeniser.kind={kind}"), io.StringIO()
    with make_progress("plain", printed) as view:
        first, second = made(run, view), made(run, view)
    assert {name: found["sids"].shape for name, found in first.items()} == {
        "books": (30, 3), "films": (25, 3), "games": (35, 3),
    }  # fmt: skip
    for name, found in first.items():
        assert found["sids"].dtype == np.int64
        assert set(found) == {"sids", "sids_shape", "sids_errors"}
        assert found["sids"].min() >= 0 and found["sids"].max() < 8
        assert not found["sids"].flags.writeable
        np.testing.assert_array_equal(found["sids"], second[name]["sids"])
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("tokeniser")]
    assert [line.endswith("(cached)") for line in lines] == [False, False, True]
    assert f"training on 90 item texts: {kind}, 3 × 8 codes" in lines[0]
    assert "items that share an ID: books" in lines[1]


def test_a_new_cache_gives_the_same_bytes(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(shops, tmp_path)
    made(run)
    before = [path.read_bytes() for path in (*files("npy"), *files("safetensors"))]
    monkeypatch.setenv("CROSSFED_CACHE", str(tmp_path / "other"))
    made(run)
    assert [path.read_bytes() for path in (*files("npy"), *files("safetensors"))] == before
    assert not list((tmp_path / ".tokeniser").iterdir()), (
        "the checkpoints of a finished training are removed"
    )


def test_the_frozen_tokeniser_gives_these_ids(shops: Path, tmp_path: Path) -> None:
    run = config(shops, tmp_path)
    found = made(run)
    (path,) = files("safetensors")
    model = frozen(path)
    data = PreparedData.open(shops)
    _, vectors, _ = tokeniser.ArtifactStore().ensure_text(data.item_texts("films"), "hashing:32")
    np.testing.assert_array_equal(
        model.codes(torch.tensor(vectors)).numpy(), found["films"]["sids"]
    )


def test_an_interrupted_training_goes_on_to_the_same_bits(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven epochs, a checkpoint after the third and sixth, stopped during the fifth: two epochs
    are done again.
    """
    monkeypatch.setattr(tokeniser, "EVERY", 3)
    g = torch.Generator().manual_seed(0)
    x, spec = torch.randn(90, 12, generator=g), Spec.of(config(shops, tmp_path))
    straight = train_here(spec, x, tmp_path / "straight", torch.device("cpu"))
    from crossfed.platform.tokeniser.quantiser import Training

    whole, done = Training.epoch, list[int]()

    def counted(self: Training) -> dict[str, float]:
        if self.done == 4 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        done.append(self.done)
        return whole(self)

    stopped: list[bool] = []
    monkeypatch.setattr(Training, "epoch", counted)
    with pytest.raises(KeyboardInterrupt):
        train_here(spec, x, tmp_path / "broken", torch.device("cpu"))
    again = train_here(spec, x, tmp_path / "broken", torch.device("cpu"))
    assert done == [0, 1, 2, 3, 3, 4, 5, 6]
    assert straight.keys() == again.keys()
    assert all(torch.equal(straight[name], again[name]) for name in straight)


def test_an_item_without_text_teaches_nothing(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vectors of training are those that are not zero; the items without text still get an ID,
    one for all of them.
    """
    seen: list[int] = []
    train = tokeniser._train

    def spy(config: RunConfig, spec: Spec, x: torch.Tensor, key: str) -> Any:
        seen.append(len(x))
        return train(config, spec, x, key)

    monkeypatch.setattr(tokeniser, "_train", spy)
    x = np.random.default_rng(0).normal(size=(60, 12)).astype(np.float32)
    x[[3, 50]] = 0
    found = tokenise(
        config(shops, tmp_path), {"a": ("ka", x[:40]), "b": ("kb", x[40:])}, make_progress("quiet")
    )
    assert seen == [58]
    assert found["a"]["sids"][3].tolist() == found["b"]["sids"][10].tolist()


def test_several_workers_need_ray(shops: Path, tmp_path: Path) -> None:
    with pytest.raises(CrossfedError, match=r"workers=2 trains with Ray Train.*set it to 1"):
        made(config(shops, tmp_path, "tokeniser.workers=2"))
    assert made(config(shops, tmp_path, "tokeniser.workers=2", "tokeniser.kind=residual-kmeans"))


# -- what it is like -------------------------------------------------------------------------------


def test_codebook_use_by_hand() -> None:
    """Level 1: codes 0, 0, 1, 1: two alike, perplexity 2, two dead. Level 2: 3, 3, 3, 0: ¾ and ¼,
    exp(0.5623) = 1.7548.
    """
    perplexity, dead = codebook_use(np.array([[0, 3], [0, 3], [1, 3], [1, 0]]), 4)
    assert perplexity == pytest.approx([2, 1.7548], abs=1e-4)
    assert dead == [2, 2]


def test_collision_rate_by_hand() -> None:
    """Three items on one ID, two on another, one alone: five of six."""
    sids = np.array([[1, 1], [1, 1], [1, 1], [1, 2], [2, 1], [2, 1]])
    assert collision_rate(sids) == pytest.approx(5 / 6)
    assert collision_rate(sids[2:5]) == 0


def test_a_report_and_its_metrics_agree_with_the_arrays(shops: Path, tmp_path: Path) -> None:
    run = config(shops, tmp_path)
    found = made(run)
    report = describe(run, found)
    union = np.concatenate([found[name]["sids"] for name in found])
    assert report["dead_codes"] == [8 - len(np.unique(column)) for column in union.T]
    assert report["reconstruction_error"] == sorted(report["reconstruction_error"], reverse=True)
    assert 0 < report["reconstruction_error"][-1] < 1
    assert report["collision_rate"]["films"] == collision_rate(found["films"]["sids"])
    about = json.loads(files("json")[0].read_text())["about"]
    assert about["errors"] == report["reconstruction_error"]
    assert about["spec"]["codebook"] == 8 and about["items"] == 90


def test_the_collapse_of_a_level_is_refused_with_advice(shops: Path, tmp_path: Path) -> None:
    healthy = {"kind": "rqvae", "codebook": 100, "perplexity": [90.0, 80.0], "dead_codes": [0, 3]}
    tokeniser._check(healthy, 1000, 0.1, 0.5)
    one_code = healthy | {"perplexity": [90.0, 9.9]}
    with pytest.raises(
        CrossfedError,
        match=r"level 2 has a perplexity of 9\.9 where 100 codes.*raise "
        r"tokeniser\.entropy",
    ):
        tokeniser._check(one_code, 1000, 0.1, 0.5)
    with pytest.raises(CrossfedError, match=r"lower tokeniser\.dim"):
        tokeniser._check(one_code | {"kind": "residual-kmeans"}, 1000, 0.1, 0.5)
    with pytest.raises(CrossfedError, match=r"level 1 uses 49 of the 100 codes.*max_dead=0\.5"):
        tokeniser._check(healthy | {"dead_codes": [51, 0]}, 1000, 0.1, 0.5)
    few = healthy | {"perplexity": [4.0, 1.0], "dead_codes": [80, 99]}
    with pytest.raises(
        CrossfedError,
        match=r"level 2 .* where 20 codes.*only 20 different item texts: lower "
        r"the method's codebook",
    ):
        tokeniser._check(few, 20, 0.1, 0.5)
    """Of 20 vectors, 20 codes can be used; 80 dead ones of 100 are no fault."""
    tokeniser._check(few | {"perplexity": [20.0, 20.0], "dead_codes": [80, 80]}, 20, 0.1, 0.5)


def test_a_collapsed_tokeniser_is_refused_again_without_training(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(shops, tmp_path, "tokeniser.min_perplexity=1.0")
    with pytest.raises(CrossfedError, match="collapsed"):
        made(run)
    monkeypatch.setattr(tokeniser, "_train", lambda *_: pytest.fail("trained again"))
    with pytest.raises(CrossfedError, match="collapsed"):
        made(run)
    assert made(config(shops, tmp_path, "tokeniser.min_perplexity=0.1"))


# -- in a run --------------------------------------------------------------------------------------


def test_a_method_finds_its_ids_and_the_result_tells_of_them(shops: Path, tmp_path: Path) -> None:
    run = config(shops, tmp_path)
    rows: list[Any] = []
    done = run_recorded(run, on_round=rows.append)
    found = made(run)
    for name, items in (("books", 30), ("films", 25), ("games", 35)):
        told = {key: rows[0].metrics[f"train/{name}/{key}"] for key in ("items", "levels", "sum")}
        assert told == {
            "items": items,
            "levels": 3,
            "sum": int((found[name]["sids"] * [1, 10, 100]).sum()),
        }
    stored = json.loads((done.run_dir / "result.json").read_text())
    assert stored["tokeniser"] == describe(run, found)
    assert tokeniser.parameters(run)["tokeniser.epochs"] == 7
    other = config(shops, tmp_path, method="toys:AVERAGE")
    assert tokeniser.parameters(other) == {}
    assert "tokeniser" not in run_recorded(other).result


def test_ids_of_another_shape_are_not_used(shops: Path, tmp_path: Path) -> None:
    """A search makes them once; a trial that wants other levels or another codebook makes its
    own.
    """
    two = config(shops, tmp_path, "levels=2")
    given = made(two)
    assert fits(two, given)
    rows: list[Any] = []
    for sets in (("levels=3",), ("levels=2", "codebook=7")):
        run = config(shops, tmp_path, *sets)
        assert not fits(run, given)
        done = run_recorded(run, artifacts=given, on_round=rows.append)
        wanted = Spec.of(run)
        assert rows[-1].metrics["train/books/levels"] == wanted.levels
        assert done.result["tokeniser"]["codebook"] == wanted.codebook
    assert fits(config(shops, tmp_path, method="toys:AVERAGE"), {})


def test_a_domain_without_text_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with Writer(tmp_path / "data", {"kind": "test shops"}) as writer:
        for name, texts in (("books", [f"book {i}" for i in range(20)]), ("sports", [""] * 20)):
            users, items = np.array(
                [(u, i) for u in range(20) for i in rng.choice(20, 10, replace=False)]
            ).T
            names = [f"u{u}" for u in range(20)], [f"i{i}" for i in range(20)]
            writer.add_domain(name, users, items, np.arange(len(users)), *names, texts)
    with pytest.raises(CrossfedError, match="Domain sports: none of its 20 items has text"):
        made(config(tmp_path / "data", tmp_path))
