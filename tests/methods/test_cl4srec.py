"""CL4SRec as a method: both losses over the seam, its declaration, scores and what it exports.

Eq. (1) is SASRec's and tested in `parts/test_next_item.py`; Eq. (2) in `parts/test_contrast.py`,
and Eq. (3), Eq. (4) and Eq. (5) in `parts/test_augmentation.py`.
"""

import importlib.resources
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import yaml

from crossfed.methods.cl4srec import METHOD, Config
from crossfed.methods.parts import contrast
from crossfed.methods.parts.contrast import ViewsLearner
from crossfed.methods.parts.next_item import user_vectors
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


def fresh(data: Interactions, **sets) -> ViewsLearner:
    return METHOD.init_domain(Config.model_validate({**SMALL, **sets}), context(data, "init", 0))


def train(state: ViewsLearner, data: Interactions, rounds: range) -> list[Mapping[str, float]]:
    (stage,) = METHOD.stages(state.config)
    (phase,) = stage.each
    return [phase.step(state, {}, context(data, "train", r)).metrics for r in rounds]


def test_eq_6_adds_the_contrast_with_its_weight(data):
    """Eq. (6): before any step the contrast told is λ times the one with λ = 1, beside one loss."""
    sets = {"batch_size": 1000, "dropout": 0.0}
    states = [fresh(data, lambda_=weight, **sets) for weight in (1.0, 0.5)]
    one, half = (train(state, data, range(1, 2))[0] for state in states)
    assert one["loss"] == half["loss"]
    assert half["contrast"] == pytest.approx(0.5 * one["contrast"], rel=1e-5)


def test_eq_6_trains_on_the_sum(data):
    """Eq. (6) by one step of SGD: the step with λ = 1 is that with λ = 0 plus a step on Eq. (2)."""

    def moved(lambda_: float, main: float) -> torch.Tensor:
        state = fresh(data, lambda_=lambda_, batch_size=1000, dropout=0.0)
        before = state.net.items.detach().clone()
        state.adam = torch.optim.SGD(state.net.parameters(), lr=1.0)
        with pytest.MonkeyPatch.context() as patch:
            if not main:
                nothing = lambda states, items, positive: 0 * states.sum()  # noqa: E731
                patch.setattr("crossfed.methods.parts.next_item.softmax", nothing)
            state.train(context(data, "train", 1))
        return state.net.items.detach() - before

    both, main, extra = moved(1.0, 1), moved(0.0, 1), moved(1.0, 0)
    assert extra.abs().max() > 1e-6
    torch.testing.assert_close(both, main + extra, rtol=1e-3, atol=1e-6)


def test_what_the_config_says_reaches_the_views(data, monkeypatch):
    """η, γ, β, the operators and τ as configured, the token after the last item."""
    seen = []
    real_views, real_nce = contrast.two_views, contrast.two_view_nce

    def views(items, count, operators, shares, token, rng):
        seen.append((operators, shares, token))
        return real_views(items, count, operators, shares, token, rng)

    def nce(a, b, tau, cosine):
        seen.append((tau, cosine))
        return real_nce(a, b, tau, cosine)

    monkeypatch.setattr(contrast, "two_views", views)
    monkeypatch.setattr(contrast, "two_view_nce", nce)
    sets = {"eta": 0.5, "gamma": 0.2, "beta": 0.7, "tau": 0.4, "cosine": True}
    train(fresh(data, operators=("mask", "crop"), batch_size=1000, **sets), data, range(1, 2))
    assert seen == [(("mask", "crop"), (0.5, 0.2, 0.7), 15), (0.4, True)]


def test_score_is_the_inner_product_for_every_item_and_exports_the_same(data):
    """No score for the mask: 15 items, each F_t · M_i, live and exported."""
    state = fresh(data)
    train(state, data, range(1, 3))
    users = np.array([5, 19, 0])
    states = user_vectors(state.net, data)
    expected = [[(states[u] @ state.net.items[i]).item() for i in range(15)] for u in users]
    scores = METHOD.score(state, users)
    torch.testing.assert_close(scores, torch.tensor(expected))
    assert not scores.requires_grad
    exported = METHOD.export(state)
    sizes = {name: tuple(value.shape) for name, value in exported.items()}
    assert sizes == {"users": (20, 8), "items": (15, 8)}
    assert torch.equal(METHOD.score_exported(exported, users), scores)


def test_training_lowers_both_losses(data):
    metrics = train(fresh(data, dropout=0.1, lr=0.01), data, range(1, 21))
    assert metrics[-1]["loss"] < 0.97 * metrics[0]["loss"]
    assert metrics[-1]["contrast"] < 0.95 * metrics[0]["contrast"]


def test_it_is_local_and_sends_nothing():
    (stage,) = METHOD.stages(Config(epochs=7, patience=3))
    assert METHOD.scope == Scope.LOCAL
    assert METHOD.fields == () and METHOD.init_server is None and stage.local
    assert (stage.rounds, stage.patience, stage.keep_best) == (7, 3, True)


def test_the_shipped_file_states_the_defaults_and_valid_presets():
    folder = importlib.resources.files("crossfed.methods.configs")
    shipped = yaml.safe_load(folder.joinpath("cl4srec.yaml").read_text())
    assert Config.model_validate(shipped["config"]) == Config()
    for preset in shipped["presets"].values():
        Config.model_validate({**shipped["config"], **preset})
    for name, space in shipped["search"].items():
        for value in space.get("values", [space.get("low"), space.get("high")]):
            Config.model_validate({**shipped["config"], name: value})
