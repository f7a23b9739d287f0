"""SASRec as a method: its state over the seam, its declaration, and numbers on real data.

Eq. (1) to Eq. (11) are tested where they are: `parts/test_transformer.py` and
`parts/test_next_item.py`.
"""

import importlib.resources
from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from crossfed.methods.parts.next_item import Learner, user_vectors
from crossfed.methods.sasrec import METHOD, Config
from crossfed.platform.method import Context, Interactions, Scope, generators

SMALL = {"dim": 8, "heads": 2, "inner": 8, "length": 6, "batch_size": 8}


@pytest.fixture
def data() -> Interactions:
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(20), 8)
    items = np.concatenate([rng.permutation(15)[:8] for _ in range(20)])
    return Interactions.build(20, 15, users, items, np.arange(160))


def context(data: Interactions, stage: str, round: int, seed: int = 0) -> Context:
    rng, torch_rng = generators(seed, stage, round, "shop")
    torch.manual_seed(round)
    return Context("shop", stage, round, (), rng, torch_rng, torch.device("cpu"), data)


def train(state: Learner, data: Interactions, rounds: range) -> list[Mapping[str, float]]:
    (stage,) = METHOD.stages(state.config)
    (phase,) = stage.each
    return [phase.step(state, {}, context(data, "train", r)).metrics for r in rounds]


def test_score_is_eq_9_for_every_item_and_exports_the_same(data):
    """Eq. (9) item by item: r_{i,t} = F_t · M_i."""
    state = METHOD.init_domain(Config.model_validate(SMALL), context(data, "init", 0))
    users = np.array([5, 19, 0])
    states = user_vectors(state.net, data)
    expected = [[(states[u] @ state.net.items[i]).item() for i in range(15)] for u in users]
    scores = METHOD.score(state, users)
    torch.testing.assert_close(scores, torch.tensor(expected))
    assert not scores.requires_grad
    exported = METHOD.export(state)
    assert {name: tuple(value.shape) for name, value in exported.items()} == {
        "users": (20, 8),
        "items": (15, 8),
    }
    assert torch.equal(METHOD.score_exported(exported, users), scores)


def test_it_recommends_from_what_it_is_shown(data):
    """Swapping the last two items of every history changes the scores; showing the former histories
    brings them back.
    """
    state = METHOD.init_domain(Config.model_validate(SMALL), context(data, "init", 0))
    everyone = np.arange(20)
    before = METHOD.score(state, everyone)
    times = data.times.copy()
    times[7::8] -= 2
    METHOD.observe(state, Interactions.build(20, 15, data.users, data.items, times))
    assert not (METHOD.score(state, everyone) == before).any(1).all()
    METHOD.observe(state, data)
    assert torch.equal(METHOD.score(state, everyone), before)


def test_training_lowers_the_loss(data):
    state = METHOD.init_domain(
        Config.model_validate({**SMALL, "dropout": 0.0, "lr": 0.02}), context(data, "init", 0)
    )
    metrics = train(state, data, range(1, 21))
    assert metrics[-1]["loss"] < 0.92 * metrics[0]["loss"]


@pytest.mark.slow
def test_ml_100k_reaches_what_it_should(shared_data):
    """Leave-one-out, full ranking: popularity reaches a validation NDCG@10 of 0.03, ten epochs of
    SASRec three times that.
    """
    from crossfed.platform.data.splits import assign
    from crossfed.platform.evaluation.ranking import rank

    frame = pd.read_csv(shared_data / "movielens_100k" / "ml-100k.inter", sep="\t")
    frame = frame.sort_values("timestamp:float", kind="stable")
    users, items = (
        pd.factorize(frame[name])[0].astype(np.int64) for name in ("user_id:token", "item_id:token")
    )
    times, n_users, n_items = (
        frame["timestamp:float"].to_numpy(np.int64),
        users.max() + 1,
        items.max() + 1,
    )
    split = assign(users, items, times, n_users, "leave-one-out")
    known, held = (
        Interactions.build(
            n_users, n_items, users[split == k], items[split == k], times[split == k]
        )
        for k in (0, 1)
    )

    def measured(score) -> float:
        everyone = np.arange(n_users)
        found = rank(
            score, everyone, known.indptr, known.items, held.indptr, held.items, n_items, [10]
        )
        return found.macro["ndcg_at_10"]

    popular = torch.from_numpy(np.bincount(known.items, minlength=n_items)).float()
    state = METHOD.init_domain(Config(batch_size=32, dropout=0.3), context(known, "init", 0))
    train(state, known, range(1, 11))
    reached = measured(lambda batch: METHOD.score(state, batch))
    assert reached > 0.1
    assert reached > 2.5 * measured(lambda batch: popular.expand(len(batch), -1))


def test_it_is_local_and_sends_nothing():
    (stage,) = METHOD.stages(Config(epochs=7, patience=3))
    assert METHOD.scope == Scope.LOCAL
    assert METHOD.fields == () and METHOD.init_server is None and stage.local
    assert (stage.rounds, stage.patience, stage.keep_best) == (7, 3, True)


def test_the_shipped_file_states_the_defaults_and_valid_presets():
    text = importlib.resources.files("crossfed.methods.configs").joinpath("sasrec.yaml").read_text()
    shipped = yaml.safe_load(text)
    assert Config.model_validate(shipped["config"]) == Config()
    for preset in shipped["presets"].values():
        Config.model_validate({**shipped["config"], **preset})
    for name, space in shipped["search"].items():
        for value in space.get("values", [space.get("low"), space.get("high")]):
            Config.model_validate({**shipped["config"], name: value})
