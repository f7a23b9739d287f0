"""DuoRec: the same next item by loops, which outputs meet in the contrast, and the declaration.

Eq. (1) is SASRec's and tested in `parts/test_next_item.py`; Eq. (4) is `parts/test_contrast.py`'s.
"""

import importlib.resources
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfed.methods import duorec
from crossfed.methods.duorec import METHOD, Config, DuoRec, SameNext, before, same_next
from crossfed.methods.parts.contrast import last_outputs, two_view_nce
from crossfed.methods.parts.next_item import Learner, NextItemConfig, user_vectors
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


def fresh(data: Interactions, **sets) -> DuoRec:
    return METHOD.init_domain(Config.model_validate({**SMALL, **sets}), context(data, "init", 0))


def train(state: DuoRec, data: Interactions, rounds: range) -> list[Mapping[str, float]]:
    (stage,) = METHOD.stages(state.config)
    (phase,) = stage.each
    return [phase.step(state, {}, context(data, "train", r)).metrics for r in rounds]


# --- Eq. (3) ---


def places(data: Interactions, item: int) -> list[int]:
    """Where an item comes after another one of its user, by a loop."""
    found = []
    for user in range(data.n_users):
        later = range(data.indptr[user] + 1, data.indptr[user + 1])
        found += [at for at in later if data.items[at] == item]
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=7), st.integers(0, 99))
def test_eq_3_is_another_place_with_the_same_item(sizes, seed):
    """Eq. (3): the item is the same, an item comes before it, and it is another place if any is."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(len(sizes)), sizes)
    data = Interactions.build(len(sizes), 4, users, rng.integers(0, 4, len(users)))
    at = np.array([p for item in range(4) for p in places(data, item)], np.int64)
    drawn = same_next(at, SameNext.of(data), data, rng)
    for place, partner in zip(at.tolist(), drawn.tolist(), strict=True):
        others = [p for p in places(data, int(data.items[place])) if p != place]
        assert partner in (others or [place])


def test_eq_3_draws_every_other_place_alike():
    """Four users end with item 3, one begins with it: from each end the other three, alike."""
    items = [0, 3, 1, 3, 2, 3, 4, 3, 3, 0]
    data = Interactions.build(5, 5, np.repeat(np.arange(5), 2), items)
    groups = SameNext.of(data)
    rng = np.random.default_rng(0)
    for place in (1, 3, 5, 7):
        drawn = same_next(np.full(6000, place), groups, data, rng)
        share = np.bincount(drawn, minlength=10) / 6000
        others = [p for p in (1, 3, 5, 7) if p != place]
        assert np.abs(share[others] - 1 / 3).max() < 0.03
        assert share[others].sum() == pytest.approx(1)


def test_before_holds_the_last_items_up_to_a_place():
    """User 0 has 5 6 7 8, user 1 has 9 5: at most two items, never another user's."""
    data = Interactions.build(2, 10, [0, 0, 0, 0, 1, 1], [5, 6, 7, 8, 9, 5])
    items, count = before(np.array([1, 3, 5]), data, 2)
    assert items.tolist() == [[5, 0], [6, 7], [9, 0]] and count.tolist() == [1, 2, 1]


# --- Eq. (2), Eq. (5) ---


def contrasts(data: Interactions, monkeypatch, **sets):
    """The two sides of the only batch's contrast, its windows, and the state before training."""
    state, twin = fresh(data, batch_size=1000, **sets), fresh(data, batch_size=1000, **sets)
    seen = []

    def look(a, b, tau, cosine):
        seen.append((a.detach().clone(), b.detach().clone(), tau, cosine))
        return two_view_nce(a, b, tau, cosine)

    monkeypatch.setattr(duorec, "two_view_nce", look)
    drawn = []
    real = same_next

    def partners(at, *args):
        drawn.append((at, real(at, *args)))
        return drawn[-1][1]

    monkeypatch.setattr(duorec, "same_next", partners)
    (metrics,) = train(state, data, range(1, 2))
    return seen, drawn, twin, metrics


def test_eq_5_contrasts_the_window_with_its_partner(data, monkeypatch):
    """Eq. (5), without dropout: h′ after each window and h″ after the items before its partner."""
    sets = {"dropout": 0.0, "lambda_": 0.4, "tau": 0.6, "cosine": True, "cut": "last", "length": 3}
    [(a, b, tau, cosine)], [(at, partner)], twin, metrics = contrasts(data, monkeypatch, **sets)
    assert (tau, cosine) == (0.6, True)
    assert sorted(at) == (data.indptr[1:] - 1).tolist()
    assert (data.items[at] == data.items[partner]).all() and (at != partner).any()
    with torch.no_grad():
        for place, mine, side in [*zip(at, a, "a" * 20), *zip(partner, b, "b" * 20)]:  # noqa: B905
            begin = max(data.indptr[data.users[place]], place - 3)
            window = data.items[begin:place]
            expected = last_outputs(twin.net, window[None], np.array([len(window)]))[0]
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5, msg=side)
    expected = 0.4 * two_view_nce(a, b, 0.6, True).item()
    assert metrics["contrast"] == pytest.approx(expected, rel=1e-5)


def test_eq_2_is_the_window_under_another_dropout_mask(data, monkeypatch):
    """Eq. (2): h and h′ differ with dropout and are the same without it."""
    [(a, b, _, _)], drawn, *_ = contrasts(data, monkeypatch, views="unsupervised", dropout=0.0)
    torch.testing.assert_close(a, b)
    assert not drawn
    [(a, b, _, _)], *_ = contrasts(data, monkeypatch, views="unsupervised", dropout=0.5)
    assert not (a == b).all(1).any()


def test_the_three_kinds_of_views(data, monkeypatch):
    """h, h′ and h″ meet as the setting says; h is what the main loss has seen."""
    outputs = []
    real = duorec.at_end
    monkeypatch.setattr(duorec, "at_end", lambda o, c: outputs.append(real(o, c)) or outputs[-1])
    calls = []
    encode = last_outputs
    monkeypatch.setattr(
        duorec,
        "last_outputs",
        lambda net, i, c, groups=1: calls.append(encode(net, i, c, groups)) or calls[-1],
    )
    for views, main, forwards, partners in (
        ("both", 0, 2, 1),
        ("unsupervised", 1, 1, 0),
        ("supervised", 1, 1, 1),
    ):
        outputs.clear()
        calls.clear()
        [(a, b, _, _)], drawn, *_ = contrasts(data, monkeypatch, views=views, dropout=0.3)
        assert (len(outputs), len(calls), len(drawn)) == (main, forwards, partners), views
        assert torch.equal(a, outputs[0] if main else calls[0])
        assert torch.equal(b, calls[-1])


def test_eq_5_without_weight_is_sasrec_bit_for_bit(data):
    """Eq. (5) with λ = 0: the same losses, parameters and scores as SASRec's learner."""
    one = fresh(data, lambda_=0.0)
    plain = Learner(NextItemConfig.model_validate(SMALL), context(data, "init", 0))
    for r in (1, 2, 3):
        told = train(one, data, range(r, r + 1))[0]
        assert told == plain.train(context(data, "train", r))
    for name, parameter in plain.net.named_parameters():
        assert torch.equal(parameter, one.net.get_parameter(name))


@pytest.mark.parametrize("views", ["both", "unsupervised", "supervised"])
def test_eq_5_trains_on_the_contrast(data, views):
    """Eq. (5): the contrast falls, and lower than where only the main loss is trained."""
    sets = {"dropout": 0.2, "lr": 0.01, "views": views}
    trained = train(fresh(data, lambda_=1.0, **sets), data, range(1, 16))
    hardly = train(fresh(data, lambda_=1e-6, **sets), data, range(1, 16))
    assert trained[-1]["contrast"] < trained[0]["contrast"]
    assert trained[-1]["contrast"] < 1e6 * hardly[-1]["contrast"]


def test_eq_5_trains_on_the_sum(data):
    """Eq. (5) by one step of SGD: that with λ = 1 is that with λ = 0 plus a step on Eq. (4)."""

    def moved(lambda_: float, main: bool) -> torch.Tensor:
        state = fresh(data, lambda_=lambda_, batch_size=1000, dropout=0.0)
        before_training = state.net.items.detach().clone()
        state.adam = torch.optim.SGD(state.net.parameters(), lr=1.0)
        with pytest.MonkeyPatch.context() as patch:
            if not main:
                nothing = lambda states, items, positive: 0 * states.sum()  # noqa: E731
                patch.setattr("crossfed.methods.parts.next_item.softmax", nothing)
            state.train(context(data, "train", 1))
        return state.net.items.detach() - before_training

    both, main, extra = moved(1.0, True), moved(0.0, True), moved(1.0, False)
    assert extra.abs().max() > 1e-6
    torch.testing.assert_close(both, main + extra, rtol=1e-3, atol=1e-6)


def test_sequences_are_unchanged_by_training(data):
    for array in (data.items, data.users, data.indptr):
        array.flags.writeable = False
    before_training = data.items.copy()
    train(fresh(data), data, range(1, 3))
    assert np.array_equal(data.items, before_training)


# --- Declaration ---


def test_score_is_the_inner_product_for_every_item_and_exports_the_same(data):
    state = fresh(data)
    train(state, data, range(1, 3))
    users = np.array([5, 19, 0])
    expected = user_vectors(state.net, data)[users] @ state.net.items.detach().T
    scores = METHOD.score(state, users)
    torch.testing.assert_close(scores, expected)
    assert torch.equal(METHOD.score_exported(METHOD.export(state), users), scores)


def test_it_is_local_and_sends_nothing():
    (stage,) = METHOD.stages(Config(epochs=7, patience=3))
    assert METHOD.scope == Scope.LOCAL
    assert METHOD.fields == () and METHOD.init_server is None and stage.local
    assert (stage.rounds, stage.patience, stage.keep_best) == (7, 3, True)


def test_the_shipped_file_states_the_defaults_and_valid_presets():
    folder = importlib.resources.files("crossfed.methods.configs")
    shipped = yaml.safe_load(folder.joinpath("duorec.yaml").read_text())
    assert Config.model_validate(shipped["config"]) == Config()
    for preset in shipped["presets"].values():
        Config.model_validate({**shipped["config"], **preset})
    for name, space in shipped["search"].items():
        for value in space.get("values", [space.get("low"), space.get("high")]):
            Config.model_validate({**shipped["config"], name: value})
