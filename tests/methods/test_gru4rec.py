"""GRU4Rec: the recurrence, losses, batches and optimizer against plain versions, in both forms."""

import importlib.resources
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from crossfed.methods import gru4rec
from crossfed.methods.gru4rec import (
    METHOD,
    Adagrad,
    Config,
    Recurrent,
    Sampler,
    State,
    bpr_max,
    correction,
    sampled_softmax,
    scores,
    session_parallel,
)
from crossfed.methods.parts.sequences import batches, windows
from crossfed.platform import checkpoint
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import Context, Interactions, Scope, generators

LIBRARY = {
    "dim": 6, "hidden": 8, "length": 6, "batch_size": 8,
    "dropout_embed": 0.0, "dropout_hidden": 0.0,
}  # fmt: skip
OFFICIAL = {**LIBRARY, "form": "official", "dim": 8, "samples": 5, "lr": 0.05}


def shop(sizes: list[int], n_items: int = 15, seed: int = 0) -> Interactions:
    """A user per size, items without repetition; users begin in the reverse of their order."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(len(sizes)), sizes)
    items = np.concatenate([rng.permutation(n_items)[:size] for size in sizes]).astype(np.int64)
    times = np.arange(len(users)) - 1000 * users
    return Interactions.build(len(sizes), n_items, users, items, times)


@pytest.fixture
def data() -> Interactions:
    return shop([8] * 20)


def context(data: Interactions, stage: str = "train", round: int = 1, seed: int = 0) -> Context:
    rng, torch_rng = generators(seed, stage, round, "shop")
    torch.manual_seed(round)
    return Context("shop", stage, round, (), rng, torch_rng, torch.device("cpu"), data)


def fresh(data: Interactions, form: str = "library", **sets) -> State:
    sizes = LIBRARY if form == "library" else OFFICIAL
    return METHOD.init_domain(Config.model_validate({**sizes, **sets}), context(data, "init", 0))


def train(state: State, data: Interactions, rounds: range) -> list[Mapping[str, float]]:
    (stage,) = METHOD.stages(state.config)
    (phase,) = stage.each
    return [phase.step(state, {}, context(data, "train", r)).metrics for r in rounds]


def slow_hidden(net: Recurrent, history: list[int]) -> torch.Tensor:
    """h after some items, gate by gate: one user, one step at a time. [hidden]"""
    width = net.config.hidden
    inputs = [net.items[i] for i in history]
    for layer in net.layers:
        w_r, w_z, w_n = layer.weight_ih_l0.split(width)
        u_r, u_z, u_n = layer.weight_hh_l0.split(width)
        zero = torch.zeros(3 * width)
        b_r, b_z, b_n = (layer.bias_ih_l0 if layer.bias else zero).split(width)
        c_r, c_z, c_n = (layer.bias_hh_l0 if layer.bias else zero).split(width)
        h, outputs = torch.zeros(width), []
        for x in inputs:
            z = torch.sigmoid(w_z @ x + b_z + u_z @ h + c_z)
            r = torch.sigmoid(w_r @ x + b_r + u_r @ h + c_r)
            n = torch.tanh(w_n @ x + b_n + r * (u_n @ h + c_n))
            h = (1 - z) * n + z * h
            outputs.append(h)
        inputs = outputs
    return inputs[-1]


def loud(state: State) -> State:
    """Parameters large enough that every part matters, biases included."""
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in state.net.parameters():
            parameter.normal_(std=0.5, generator=rng)
    return state


# --- Network: Eq. (1) to Eq. (5) ---


@pytest.mark.parametrize("form", ["library", "official"])
@pytest.mark.parametrize("layers", [1, 2])
def test_eq_1_to_4_and_5_gate_by_gate(data, form, layers):
    """Eq. (1), Eq. (2), Eq. (3), Eq. (4) along each history, and Eq. (5) for every item."""
    state = loud(fresh(data, form, layers=layers))
    net, users = state.net, np.array([3, 0, 19])
    expected = []
    for user in users:
        mine = data.items[data.indptr[user] : data.indptr[user + 1]].tolist()
        h = slow_hidden(net, mine if form == "official" else mine[-6:])
        out = h if net.out is None else net.out.weight @ h + net.out.bias
        bias = torch.zeros(15) if net.bias is None else net.bias[:, 0]
        expected.append(torch.stack([net.items[i] @ out + bias[i] for i in range(15)]))
    actual = METHOD.score(state, users)
    torch.testing.assert_close(actual, torch.stack(expected).detach(), rtol=1e-4, atol=1e-5)
    assert not actual.requires_grad


@pytest.mark.parametrize("layers", [1, 2])
def test_eq_1_a_step_is_one_item_of_the_sequence(data, layers):
    """Carried on from step to step, the hidden state is that of the whole history."""
    net = loud(fresh(data, "official", layers=layers)).net.eval()
    h = torch.zeros(layers, 1, 8)
    for t in range(8):
        h = net.step(net.items[data.items[t]][None], h)
        whole = net(torch.from_numpy(data.items[None, : t + 1]), torch.tensor([t + 1]))
        torch.testing.assert_close(h[-1], whole[:, -1])


def test_eq_5_by_hand():
    """Eq. (5): states (1, 2), (0, -1); items (3, 4), (5, 0), (-1, 1); biases 10, 20, 30."""
    states, items = torch.tensor([[1.0, 2], [0, -1]]), torch.tensor([[3.0, 4], [5, 0], [-1, 1]])
    assert scores(states, items, None).tolist() == [[11, 5, 1], [-4, 0, -1]]
    bias = torch.tensor([[10.0], [20], [30]])
    assert scores(states, items, bias).tolist() == [[21, 25, 31], [6, 20, 29]]


def test_the_two_forms_have_their_parts(data):
    library, official = fresh(data).net, fresh(data, "official").net
    assert not library.layers[0].bias and official.layers[0].bias
    assert library.bias is None and library.out is not None
    assert official.bias is not None and official.out is None
    assert library.items.shape == (15, 6) and official.items.shape == (15, 8)


def test_dropout_is_where_it_is_said_to_be(data):
    """In training alone; of what goes in, and of what comes out and is carried on."""
    ones = torch.ones(1, 400, dtype=torch.int64)
    for where in ("dropout_embed", "dropout_hidden"):
        net = loud(fresh(data, "official", **{where: 0.5})).net
        net.train()
        share = 0.5 if where == "dropout_hidden" else 0.0
        h = net.step(net.items[ones[0]], torch.zeros(1, 400, 8))
        assert (h == 0).float().mean().item() == pytest.approx(share, abs=0.05)
        assert len(torch.unique(h[0], dim=0)) > 100
        sequence = net(ones, torch.tensor([400]))
        assert (sequence == 0).float().mean().item() == pytest.approx(share, abs=0.05)
        net.eval()
        assert torch.equal(net(ones, torch.tensor([400])), net(ones, torch.tensor([400])))


def test_initial_weights_come_from_the_generator_and_are_of_the_right_size():
    """Official: each gate uniform within ±√(6 / (rows + columns)), biases 0."""
    config = Config(form="official", dim=64, hidden=64)
    seeds = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    one, two, other = (Recurrent(500, config, rng) for rng in seeds)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.items, other.items)
    layer = one.layers[0]
    for matrix in (one.items, *layer.weight_ih_l0.chunk(3), *layer.weight_hh_l0.chunk(3)):
        bound = math.sqrt(6 / sum(matrix.shape))
        assert 0.98 * bound < matrix.abs().max().item() <= bound
    assert not one.bias.any() and not layer.bias_ih_l0.any() and not layer.bias_hh_l0.any()
    library = Recurrent(500, Config(), torch.Generator().manual_seed(1))
    assert library.items.std().item() == pytest.approx(math.sqrt(2 / 564), rel=0.03)
    assert library.items.abs().max().item() > math.sqrt(6 / 564)  # normal, as in RecBole


# --- Losses: Eq. (6) to Eq. (8) ---


def test_eq_6_is_cross_entropy_with_the_diagonal_as_targets():
    """Eq. (6): summed over rows; all columns but a row's own are its negatives."""
    r = torch.randn(3, 7, dtype=torch.float64)
    expected = sum(-math.log(r[i, i].exp() / r[i].exp().sum()) for i in range(3))
    assert sampled_softmax(r).item() == pytest.approx(expected, rel=1e-9)


def test_eq_7_by_hand():
    """Eq. (7): two targets with counts 4 and 9 give ln 4, ln 9; samples α times theirs; times q."""
    counts = torch.tensor([4.0, 9, 16, 1, 0])
    expected = [math.log(4), math.log(9), 0.5 * math.log(16), 0, 0]
    for strength in (1.0, 0.3):
        actual = correction(counts, 2, 0.5, strength)
        torch.testing.assert_close(actual, strength * torch.tensor(expected))


def slow_bpr_max(r, weight, elu):
    r = [[float(x if not elu or x > 0 else elu * (math.exp(x) - 1)) for x in row] for row in r]
    total = 0.0
    for i, row in enumerate(r):
        mass = sum(math.exp(x) for j, x in enumerate(row) if j != i)
        gain, size = 0.0, 0.0
        for j, x in enumerate(row):
            if j != i:
                share = math.exp(x) / mass
                gain += share / (1 + math.exp(x - row[i]))
                size += share * x**2
        total += -math.log(gain) + weight * size
    return total


@pytest.mark.parametrize("elu", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("weight", [0.0, 1.95])
def test_eq_8_against_loops(weight, elu):
    """Eq. (8), with the target left out of its negatives' softmax."""
    r = 2 * torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert bpr_max(r, weight, elu).item() == pytest.approx(slow_bpr_max(r, weight, elu), rel=1e-9)


def test_eq_8_by_hand():
    """One row, scores 0 for the target and 0, ln 3: s = 1/4, 3/4; σ = 1/2, 1/4; λ = 2."""
    r = torch.tensor([[0.0, 0.0, math.log(3)]])
    expected = -math.log(1 / 8 + 3 / 16) + 2 * 3 / 4 * math.log(3) ** 2
    assert bpr_max(r, 2.0, 0.0).item() == pytest.approx(expected, rel=1e-6)


def test_eq_8_is_finite_for_scores_of_any_size():
    r = torch.tensor([[-500.0, 500, 0], [500, 500, -500]], requires_grad=True)
    loss = bpr_max(r, 0.0, 0.0)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(r.grad).all() and loss > 900


# --- Sampling and batches: Eq. (9), Eq. (10) ---


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_eq_9_draws_in_proportion_to_the_power_of_counts(alpha):
    """Eq. (9): counts 1, 4, 9 and 16 to the power of α; an item never seen, with α > 0, never."""
    items = np.repeat([0, 1, 3, 4], [1, 4, 9, 16])
    sampler = Sampler(items, 5, alpha)
    assert sampler.counts.tolist() == [1, 4, 0, 9, 16]
    drawn = sampler.draw(40_000, np.random.default_rng(0))
    weight = np.array([1, 4, 0, 9, 16], float) ** alpha
    share = np.bincount(drawn, minlength=5) / 40_000
    assert np.abs(share - weight / weight.sum()).max() < 0.01
    assert alpha == 0 or share[2] == 0


def test_eq_10_by_hand():
    """Eq. (10): sizes 3, 2, 4, 1, 2; user 4 began first. Two side by side: 4 and 2, then 1, 0.

    Steps: 4→ and 2→ begin; 4 is over, so 1→ begins beside 2's second; 1 is over, so 0→ begins
    beside 2's last; then 0 is alone.
    """
    data = shop([3, 2, 4, 1, 2])
    steps = [
        [(int(s), int(a), bool(b)) for a, s, b in zip(at, slots, begins, strict=True)]
        for at, slots, begins in session_parallel(data, 2)
    ]
    first = data.indptr
    assert steps == [
        [(0, first[4], True), (1, first[2], True)],
        [(0, first[1], True), (1, first[2] + 1, False)],
        [(0, first[0], True), (1, first[2] + 2, False)],
        [(0, first[0] + 1, False)],
    ]
    assert len(list(session_parallel(data, 2, two=True))) == 3


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 9))
def test_eq_10_every_target_once_and_each_session_in_its_slot(sizes, m, seed):
    data = shop([*sizes, 1], seed=seed)
    trained, owner, last = [], {}, {}
    for at, slots, begins in session_parallel(data, m):
        assert len(at) <= m and len(set(slots.tolist())) == len(slots)
        for place, slot, begin in zip(at.tolist(), slots.tolist(), begins.tolist(), strict=True):
            user = int(data.users[place])
            assert begin == (place == data.indptr[user])
            if not begin:
                assert owner[slot] == user and last[slot] == place - 1
            owner[slot], last[slot] = user, place
            trained.append(place)
    inputs = [p for u in range(data.n_users) for p in range(data.indptr[u], data.indptr[u + 1] - 1)]
    assert sorted(trained) == inputs


# --- Optimizer: Eq. (11) ---


@pytest.mark.parametrize("momentum", [0.0, 0.4])
def test_eq_11_by_hand_and_for_rows_alone(momentum):
    """Eq. (11), coordinate by coordinate; with sparse gradients only in the rows they have."""
    dense, table = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4, 2))
    optimizer = Adagrad(iter([dense, table]), lr=0.1, momentum=momentum)
    square, velocity = np.zeros((4, 2)), np.zeros((4, 2))
    w, d, dg, dv = np.ones((4, 2)), np.ones(2), np.zeros(2), np.zeros(2)
    for rows in ([1, 3, 1], [1], [0, 3]):
        optimizer.zero_grad()
        used = torch.tensor(rows)
        factor = torch.arange(1.0, len(rows) + 1)[:, None]
        ((F.embedding(used, table, sparse=True) * factor).sum() + (dense**2).sum()).backward()
        optimizer.step()
        for row in set(rows):
            g = sum(k + 1 for k, other in enumerate(rows) if other == row)
            square[row] += g**2
            velocity[row] = momentum * velocity[row] - 0.1 * g / np.sqrt(square[row] + 1e-6)
            w[row] += velocity[row]
        g = 2 * d
        dg += g**2
        dv = momentum * dv - 0.1 * g / np.sqrt(dg + 1e-6)
        d += dv
    np.testing.assert_allclose(table.detach(), w, rtol=1e-5)
    np.testing.assert_allclose(dense.detach(), d, rtol=1e-5)


# --- Training ---


@pytest.mark.parametrize("cut", ["all", "last", "prefixes"])
@pytest.mark.parametrize("loss", ["softmax", "bce"])
def test_the_library_forms_epoch_is_plain_adam_on_one_user_at_a_time(cut, loss):
    """The same windows and batches, unpadded, gate by gate."""
    data = shop([9, 2, 4, 1, 3, 7])
    state, twin = (loud(fresh(data, cut=cut, length=4, batch_size=3, loss=loss)) for _ in range(2))
    net = twin.net
    adam = torch.optim.Adam(net.parameters(), lr=state.config.lr)
    rng = context(data).rng
    pieces = windows(data, 4, cut, rng)
    negatives = None
    if loss == "bce":
        negatives = gru4rec_negatives(data, rng)
    total, seen = 0.0, 0
    for rows in batches(pieces.count, 3, rng):
        parts = []
        for piece in rows:
            start, count = int(pieces.start[piece]), int(pieces.count[piece])
            for t in range(count) if cut != "prefixes" else [count - 1]:
                h = slow_hidden(net, data.items[start : start + t + 1].tolist())
                r = net.items @ (net.out.weight @ h + net.out.bias)
                target = start + t + 1
                if loss == "softmax":
                    parts.append(-torch.log_softmax(r, 0)[data.items[target]])
                else:
                    seen_item, other = data.items[target], negatives[target]
                    parts.append(F.softplus(-r[seen_item]) + F.softplus(r[other]))
        mean = torch.stack(parts).mean()
        adam.zero_grad()
        mean.backward()
        adam.step()
        total, seen = total + mean.item() * len(parts), seen + len(parts)
    assert train(state, data, range(1, 2))[0]["loss"] == pytest.approx(total / seen, rel=1e-4)
    for (name, a), b in zip(state.net.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def gru4rec_negatives(data, rng):
    from crossfed.methods.parts.sampling import draw_negatives

    return draw_negatives(data, data.users, rng)


@pytest.mark.parametrize(
    ("loss", "sets"),
    [
        ("softmax", {"logq": 0.0}),
        ("softmax", {"logq": 0.7}),
        ("bpr-max", {"bpreg": 1.5, "elu": 0.5}),
        ("softmax", {"samples": 0, "momentum": 0.3}),
    ],
)
def test_the_official_forms_epoch_is_plain_one_step_training(loss, sets):
    """Sessions side by side in a dictionary, one step each, hidden states cut off, Adagrad."""
    data = shop([8, 2, 4, 1, 3, 5])
    config = {"loss": loss, "batch_size": 3, "momentum": 0.4, "alpha": 0.6, **sets}
    state, twin = (loud(fresh(data, "official", **config)) for _ in range(2))
    net, c = twin.net, twin.config
    optimizer = Adagrad(net.parameters(), c.lr, c.momentum)
    rng = context(data).rng
    sampler = Sampler(data.items, 15, 0.6)
    carried: dict[int, torch.Tensor] = {}
    total, seen = 0.0, 0
    for at, slots, begins in session_parallel(data, 3, c.samples == 0):
        negatives = sampler.draw(c.samples, rng) if c.samples else []
        others = [*data.items[at + 1], *negatives]
        used = torch.tensor([*data.items[at], *others])
        vectors = F.embedding(used, net.items, sparse=True)
        bias = F.embedding(torch.tensor(others), net.bias, sparse=True)[:, 0]
        rows = []
        for row, (slot, begin) in enumerate(zip(slots, begins, strict=True)):
            h = torch.zeros(1, 1, 8) if begin else carried[slot]
            h = net.layers[0](vectors[row][None, None], h)[1]
            carried[slot] = h.detach()
            rows.append(torch.stack([v @ h[0, 0] for v in vectors[len(at) :]]) + bias)
        r = torch.stack(rows)
        if loss == "bpr-max":
            summed = bpr_max(r, c.bpreg, c.elu)
        else:
            counts = torch.tensor([float(sampler.counts[i]) for i in others])
            powers = torch.tensor([1.0] * len(at) + [0.6] * len(negatives))
            summed = sampled_softmax(r - c.logq * powers * counts.log())
        optimizer.zero_grad()
        (summed / 3).backward()
        optimizer.step()
        total, seen = total + summed.item(), seen + len(at)
    assert train(state, data, range(1, 2))[0]["loss"] == pytest.approx(total / seen, rel=1e-4)
    for (name, a), b in zip(state.net.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_the_official_items_move_as_one_table(monkeypatch):
    """Without momentum dense and sparse gradients agree, in items and biases as well."""
    data = shop([5, 2, 4, 1, 3, 7])
    config = {"batch_size": 3, "momentum": 0.0, "alpha": 0.6, "loss": "bpr-max"}
    sparse, dense = (loud(fresh(data, "official", **config)) for _ in range(2))
    train(sparse, data, range(1, 2))
    real = F.embedding
    monkeypatch.setattr(gru4rec.F, "embedding", lambda rows, table, sparse=False: real(rows, table))
    train(dense, data, range(1, 2))
    for (name, a), b in zip(sparse.net.named_parameters(), dense.net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_no_gradient_goes_back_beyond_one_step(data):
    """The first session's first item is an input once: later losses do not reach it through h."""
    state = fresh(data, "official", batch_size=20, samples=0)
    seen = []
    real = state.net.step

    def look(embedded, carried):
        seen.append(carried.requires_grad)
        return real(embedded, carried)

    state.net.step = look
    train(state, data, range(1, 2))
    assert len(seen) == 7 and not any(seen)


@pytest.mark.parametrize(
    ("form", "loss", "lr"),
    [
        ("library", "softmax", 0.01), ("library", "bce", 0.01), ("official", "softmax", 0.1),
        ("official", "bpr-max", 0.1),
    ],
)  # fmt: skip
def test_it_learns_what_follows_what(form, loss, lr):
    """Items come in a circle: after training the next one ranks first among those not yet seen."""
    rng = np.random.default_rng(0)
    begin, n = rng.integers(0, 20, 60), 20
    users = np.repeat(np.arange(60), 6)
    items = ((begin[:, None] + np.arange(6)) % n).ravel()
    data = Interactions.build(60, n, users, items, np.arange(len(users)))
    sets = {"hidden": 16, "dim": 16, "loss": loss, "lr": lr, "batch_size": 16, "samples": 20}
    state = fresh(data, form, **sets)
    train(state, data, range(1, 26))
    r = METHOD.score(state, np.arange(60))
    r[users, items] = -torch.inf
    assert (r.argmax(1).numpy() == (begin + 6) % n).mean() > 0.9


@pytest.mark.parametrize("form", ["library", "official"])
def test_divergence_is_told(data, form):
    state = fresh(data, form)
    with torch.no_grad():
        state.net.items.fill_(float("nan"))
    with pytest.raises(CrossfedError, match="training has diverged in train, round 1: loss"):
        train(state, data, range(1, 2))


@pytest.mark.parametrize("form", ["library", "official"])
def test_a_domain_without_pairs_trains_nothing(form):
    data = shop([1, 0, 1])
    state = fresh(data, form)
    assert train(state, data, range(1, 2)) == [{"loss": 0.0}]
    assert METHOD.score(state, np.arange(3)).shape == (3, 15)


# --- Recommending, saving ---


@pytest.mark.parametrize("form", ["library", "official"])
def test_it_recommends_from_what_it_is_shown_and_exports_the_same(data, form):
    state = loud(fresh(data, form))
    everyone = np.arange(20)
    before = METHOD.score(state, everyone)
    longer = Interactions.build(
        20, 15, np.append(data.users, 1), np.append(data.items, 3), np.append(data.times, 10**6)
    )
    METHOD.observe(state, longer)
    after = METHOD.score(state, everyone)
    assert not torch.equal(before[1], after[1])
    torch.testing.assert_close(before[2:], after[2:])
    exported = METHOD.export(state)
    torch.testing.assert_close(METHOD.score_exported(exported, everyone), after)
    METHOD.observe(state, data)
    assert torch.equal(METHOD.score(state, everyone), before)
    train(state, data, range(1, 2))
    assert not torch.equal(METHOD.score(state, everyone), before)


@pytest.mark.parametrize(("form", "looks"), [("library", False), ("official", True)])
def test_how_much_of_a_history_is_looked_at(form, looks):
    """Histories of 12 items that differ in the first: seen in the official form alone."""
    one = shop([12])
    other = Interactions.build(1, 15, one.users, np.append(14, one.items[1:]), one.times)
    assert one.items[0] != 14
    state = loud(fresh(one, form))
    before = METHOD.score(state, np.array([0]))
    METHOD.observe(state, other)
    assert torch.equal(METHOD.score(state, np.array([0])), before) != looks


@pytest.mark.parametrize("form", ["library", "official"])
def test_a_user_without_history_has_the_biases(form):
    data = shop([5, 0, 4])
    state = loud(fresh(data, form))
    r = METHOD.score(state, np.array([1]))[0]
    expected = torch.zeros(15) if form == "library" else state.net.bias[:, 0].detach()
    torch.testing.assert_close(r, expected)


@pytest.mark.parametrize("form", ["library", "official"])
def test_continuing_from_a_checkpoint_equals_a_straight_run_bit_for_bit(tmp_path: Path, data, form):
    sets = {"dropout_embed": 0.3, "dropout_hidden": 0.1, "momentum": 0.4}
    straight, first, second = (fresh(data, form, **sets) for _ in range(3))
    expected = train(straight, data, range(1, 5))
    train(first, data, range(1, 3))
    checkpoint.save(tmp_path / "shop", METHOD.state_dict(first))
    METHOD.score(second, np.arange(20))  # what loading must forget
    METHOD.load_state_dict(second, checkpoint.load(tmp_path / "shop"))
    assert torch.equal(METHOD.score(second, np.arange(20)), METHOD.score(first, np.arange(20)))
    assert train(second, data, range(3, 5)) == expected[2:]
    assert torch.equal(METHOD.score(second, np.arange(20)), METHOD.score(straight, np.arange(20)))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"loss": "bpr-max"}, "loss=bpr-max needs form=official"),
        ({"form": "official", "dim": 8, "hidden": 8, "loss": "bce"}, "loss=bce needs form=library"),
        ({"form": "official"}, r"set dim and hidden to the same width \(they are 64 and 128\)"),
        (
            {"form": "official", "dim": 8, "hidden": 8, "samples": 0, "batch_size": 1},
            "without samples a batch needs two sessions",
        ),
    ],
)
def test_what_does_not_fit_the_form_is_refused(sets, message):
    with pytest.raises(ValueError, match=message):
        Config.model_validate(sets)


def test_it_is_local_and_sends_nothing():
    (stage,) = METHOD.stages(Config(epochs=7, patience=3))
    assert METHOD.scope == Scope.LOCAL
    assert METHOD.fields == () and METHOD.init_server is None and stage.local
    assert (stage.rounds, stage.patience, stage.keep_best) == (7, 3, True)


def test_the_shipped_file_states_the_defaults_and_valid_presets():
    folder = importlib.resources.files("crossfed.methods.configs")
    shipped = yaml.safe_load(folder.joinpath("gru4rec.yaml").read_text())
    assert Config.model_validate(shipped["config"]) == Config()
    for preset in shipped["presets"].values():
        Config.model_validate({**shipped["config"], **preset})
    for name, space in shipped["search"].items():
        for value in space.get("values", [space.get("low"), space.get("high")]):
            Config.model_validate({**shipped["config"], name: value})
