"""Item-kNN with text: its four equations by hand and against slow versions. Blocks and ties:
`parts/test_item_based.py`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from crossfed.methods import itemknn
from crossfed.methods.knntext import METHOD, Config, co_occurrence, similarity, text_similarity
from crossfed.platform.method import Context, Interactions, Scope, generators

TEXT = np.array([[1, 0], [0.8, 0.6], [0, 1], [-1, 0.1], [0, 0]], np.float32)
"""Item 0 is nearest to 1, 1 to 0 and 2; item 3 is far from 0; item 4 has no text."""


def context(data: Interactions) -> Context:
    rng, torch_rng = generators(0, "fit", 1, "shop")
    return Context("shop", "fit", 1, (), rng, torch_rng, torch.device("cpu"), data, {"text": TEXT})


def trained(config: Config, data: Interactions):
    state = METHOD.init_domain(config, context(data))
    (stage,) = METHOD.stages(config)
    stage.each[0].step(state, {}, context(data))
    return state


@pytest.fixture
def data() -> Interactions:
    """Three users: {0, 3}, {0, 3}, {1}. Items 2 and 4 are nobody's."""
    return Interactions.build(3, 5, np.array([0, 0, 1, 1, 2]), np.array([0, 3, 0, 3, 1]))


def test_eq_1_by_hand(data):
    """Eq. (1): items 0 and 3 share both of their two users, 2/(√2√2 + h)."""
    expected = np.zeros((5, 5))
    expected[0, 3] = expected[3, 0] = 2 / 12
    np.testing.assert_allclose(co_occurrence(data, Config()).toarray(), expected, rtol=1e-6)


def test_eq_2_keeps_the_nearest_by_text():
    """Eq. (2), one neighbour, cosines by hand: 0 → 1 (.8), 1 → 0 (.8), 2 → 1 (.6), 3 → 2
    (.1/√1.01); 4 has none."""
    near = np.zeros((5, 5))
    near[0, 1], near[1, 0], near[2, 1], near[3, 2] = 0.8, 0.8, 0.6, 0.1 / 1.01**0.5
    for text_of, expected in (("history", near), ("candidate", near.T), ("both", near + near.T)):
        found = text_similarity(TEXT, Config(text_neighbours=1, text_of=text_of)).toarray()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_eq_2_is_never_negative():
    """Eq. (2) with all as neighbours: item 3 points away from items 0 and 1 and does not count
    against them."""
    found = text_similarity(TEXT, Config(text_neighbours=4)).toarray()
    assert (found >= 0).all() and found[0, 3] == 0 and found[0, 1] > 0


def test_eq_3_adds_text_at_its_weight(data):
    """Eq. (3): S = C + w T; without weight it is item-kNN."""
    for w in (0.1, 0.5):
        config = Config(text=w, text_neighbours=2)
        expected = (
            co_occurrence(data, config).toarray() + w * text_similarity(TEXT, config).toarray()
        )
        np.testing.assert_allclose(similarity(data, TEXT, config).toarray(), expected, rtol=1e-6)
    plain = itemknn.similarity(data, itemknn.Config(neighbours=3))
    assert (similarity(data, TEXT, Config(text=0, neighbours=3)) != plain).nnz == 0


def test_eq_4_adds_up_over_the_history(data):
    """Eq. (4): user 0 = {0, 3}, one text neighbour, w = .1. 0 speaks for 1 and 3, 3 for 0 and 2."""
    state = trained(Config(text_neighbours=1), data)
    expected = [2 / 12, 0.08, 0.01 / 1.01**0.5, 2 / 12, 0]
    np.testing.assert_allclose(
        METHOD.score(state, np.array([0]))[0], expected, rtol=1e-5, atol=1e-7
    )
    candidate = trained(Config(text_neighbours=1, text_of="candidate"), data)
    np.testing.assert_allclose(
        METHOD.score(candidate, np.array([0]))[0],
        [2 / 12, 0.08, 0, 2 / 12, 0],
        rtol=1e-5,
        atol=1e-7,
    )


def test_what_it_recommends_from_is_a_setting(data):
    later = Interactions.build(3, 5, np.r_[data.users, 2], np.r_[data.items, 0])
    for history, differs in (("train", False), ("known", True)):
        state = trained(Config(history=history), data)
        before = METHOD.score(state, np.array([2]))
        METHOD.observe(state, later)
        assert bool((METHOD.score(state, np.array([2])) != before).any()) == differs


def test_it_is_local_of_one_round_and_draws_nothing():
    (stage,) = METHOD.stages(Config())
    assert (
        METHOD.scope == Scope.LOCAL and METHOD.deterministic and stage.rounds == 1 and stage.local
    )


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_beauty_and_office_reach_what_was_measured(shared_data: Path, tmp_path: Path):
    """ratio-80-10-10, packaged MiniLM, test split: to four digits those of a program of 30 lines
    apart from this."""
    from crossfed.platform.config.settings import build
    from crossfed.platform.data.prepare import prepare
    from crossfed.platform.federation.final import test_once as final_test
    from crossfed.platform.report.recording import run_recorded

    prepare("beauty-office", tmp_path / "data", shared_data)
    values = {
        "data": tmp_path / "data",
        "out": tmp_path,
        "backend": "inprocess",
        "tracking.enabled": False,
    }
    done = run_recorded(build("knntext", values=values), finish=final_test)
    measured = {name: row["test"] for name, row in done.result["domains"].items()}
    for name, recall, ndcg in (("beauty", 0.1499, 0.0765), ("office", 0.1584, 0.0774)):
        assert measured[name]["recall_at_20"] == pytest.approx(recall, abs=6e-5)
        assert measured[name]["ndcg_at_20"] == pytest.approx(ndcg, abs=6e-5)
