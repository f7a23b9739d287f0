"""SASRec's network against one user at a time, its losses by hand and against torch, its training
against a plain loop.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from crossfed.methods.parts import next_item
from crossfed.methods.parts.next_item import (
    Learner,
    NextItem,
    NextItemConfig,
    bce,
    gbce_power,
    n_targets,
    relevance,
    softmax,
    train_epoch,
    user_vectors,
)
from crossfed.methods.parts.sampling import draw_negatives
from crossfed.methods.parts.sequences import batches, windows
from crossfed.platform import checkpoint
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import Context, Interactions, generators

CPU = torch.device("cpu")


def shop(sizes: list[int], n_items: int = 12, seed: int = 0) -> Interactions:
    """A user per size, whose items are drawn without repetition, in time order."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(len(sizes)), sizes)
    items = np.concatenate([rng.permutation(n_items)[:size] for size in sizes]).astype(np.int64)
    return Interactions.build(len(sizes), n_items, users, items, np.arange(len(users)))


def context(data: Interactions, round: int = 1, seed: int = 0) -> Context:
    rng, torch_rng = generators(seed, "train", round, "shop")
    torch.manual_seed(round)
    return Context("shop", "train", round, (), rng, torch_rng, CPU, data)


def small(**changes) -> NextItemConfig:
    return NextItemConfig.model_validate(
        {"dim": 6, "heads": 2, "inner": 10, "length": 5, "dropout": 0.0, "batch_size": 3, **changes}
    )


def fresh(config: NextItemConfig, n_items: int = 12, seed: int = 0) -> NextItem:
    net = NextItem(n_items, config, torch.Generator().manual_seed(seed)).double()
    for parameter in net.parameters():  # large enough that every part matters
        torch.nn.init.normal_(
            parameter, std=0.5, generator=torch.Generator().manual_seed(parameter.numel())
        )
    return net


def slow_states(net: NextItem, history: list[int]) -> torch.Tensor:
    """F after the last of some items: one user, no padding, one head at a time, in the paper's
    order.
    """
    config, n = net.config, len(history)
    first = config.length - n if config.positions == "end" else 0
    places = (
        [config.length - 1 - (first + t) for t in range(n)]
        if config.positions == "end"
        else list(range(n))
    )
    x = torch.stack(
        [net.items[i] * (math.sqrt(config.dim) if config.norm == "pre" else 1) for i in history]
    )
    x = x + torch.stack([net.positions[p] for p in places])
    if config.norm == "post":
        x = F.layer_norm(x, (config.dim,), net.norm.weight, net.norm.bias, 1e-8)

    def attention(layer, z):
        heads, width = [], config.dim // config.heads
        for h in range(config.heads):
            q, k, v = (
                part(z)[:, h * width : (h + 1) * width]
                for part in (layer.query, layer.key, layer.value)
            )
            rows = []
            for t in range(n):
                weight = torch.softmax(
                    torch.stack([q[t] @ k[s] for s in range(t + 1)]) / math.sqrt(width), 0
                )
                rows.append(sum(w * v[s] for s, w in enumerate(weight)))
            heads.append(torch.stack(rows))
        return layer.out(torch.cat(heads, 1))

    def feed(layer, z):
        act = F.relu if config.activation == "relu" else F.gelu
        return layer.outer(act(layer.inner(z)))

    for block in net.blocks:
        for around, g in (
            (block.around_attention, lambda z, block=block: attention(block.attention, z)),
            (block.around_feed, lambda z, block=block: feed(block.feed, z)),
        ):
            norm = lambda z, n=around.norm: F.layer_norm(z, (config.dim,), n.weight, n.bias, 1e-8)  # noqa: E731
            x = x + g(norm(x)) if config.norm == "pre" else norm(x + g(x))
    if config.norm == "pre":
        x = F.layer_norm(x, (config.dim,), net.norm.weight, net.norm.bias, 1e-8)
    return x


# --- Network ---


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", ["start", "end"])
def test_padded_windows_give_what_each_user_gives_alone(norm, positions):
    net = fresh(
        small(norm=norm, positions=positions, activation="relu" if norm == "pre" else "gelu")
    )
    histories = [[3, 1, 4, 1, 5], [9], [2, 6, 7]]
    count = torch.tensor([len(h) for h in histories])
    inputs = torch.tensor([h + [0] * (5 - len(h)) for h in histories])
    states = net(inputs, count)
    for row, history in enumerate(histories):
        torch.testing.assert_close(states[row, : len(history)], slow_states(net, history))


def test_eq_1_by_hand():
    """Eq. (1), dim = 4 so √dim = 2: items 10, 20, 30 and positions 1, 2, 3 counted from either end;
    the norm decides on √dim.
    """
    for norm, scale in (("pre", 2), ("post", 1)):
        # of a window of two, and of its padding
        for positions, places in (("start", [1, 2, 3]), ("end", [2, 1, 3])):
            net = NextItem(
                3, small(dim=4, norm=norm, positions=positions, length=3), torch.Generator()
            )
            with torch.no_grad():
                net.items.copy_(torch.tensor([10.0, 20, 30])[:, None].expand(3, 4))
                net.positions.copy_(torch.tensor([1.0, 2, 3])[:, None].expand(3, 4))
            x = net.embed(torch.tensor([[1, 2, 0]]), torch.tensor([2]))[0, :2, 0].tolist()
            assert x == [20 * scale + places[0], 30 * scale + places[1]]


def test_eq_9_by_hand():
    """Eq. (9): states (1, 2) and (0, -1) against items (3, 4), (5, 0), (-1, 1)."""
    r = relevance(torch.tensor([[1.0, 2], [0, -1]]), torch.tensor([[3.0, 4], [5, 0], [-1, 1]]))
    assert r.tolist() == [[11, 5, 1], [-4, 0, -1]]


def test_initial_weights_come_from_the_generator():
    one, two, other = (
        NextItem(50, NextItemConfig(), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.items, other.items)
    assert one.items.std().item() == pytest.approx(0.02, rel=0.1)


# --- Losses ---


def test_eq_11_by_hand():
    """Eq. (11): one position, state 1; target with r = ln 3, negatives with r = 0 and -ln 3.

    σ(ln 3) = 3/4, 1 - σ(0) = 1/2, 1 - σ(-ln 3) = 3/4: the loss is -ln(3/4 · 1/2 · 3/4). With β =
    1/2 the first factor is √(3/4).
    """
    items = torch.tensor([[0.0], [math.log(3)], [-math.log(3)]])
    args = torch.tensor([[1.0]]), items, torch.tensor([1]), torch.tensor([[0, 2]])
    assert bce(*args).item() == pytest.approx(-math.log(3 / 4 * 1 / 2 * 3 / 4), rel=1e-6)
    assert bce(*args, 0.5).item() == pytest.approx(
        -math.log(math.sqrt(3 / 4) * 1 / 2 * 3 / 4), rel=1e-6
    )


def test_eq_11_is_a_mean_over_positions():
    states, items = torch.randn(4, 3), torch.randn(9, 3)
    positive, negative = torch.tensor([1, 2, 3, 4]), torch.tensor([[5, 6], [7, 8], [0, 0], [5, 5]])
    each = [
        -torch.sigmoid(states[n] @ items[positive[n]]).log()
        - sum((1 - torch.sigmoid(states[n] @ items[j])).log() for j in negative[n])
        for n in range(4)
    ]
    torch.testing.assert_close(bce(states, items, positive, negative), sum(each) / 4)


def test_the_power_of_gbce():
    """k = 10 of 101 items: α = 1/10; t = 0 gives 1, t = 1 gives α, t = 0.75 gives 0.1 · (0.75 · -9
    + 10) = 0.325.
    """
    assert gbce_power(10, 101, 0.0) == pytest.approx(1)
    assert gbce_power(10, 101, 1.0) == pytest.approx(0.1)
    assert gbce_power(10, 101, 0.75) == pytest.approx(0.325)
    assert gbce_power(500, 101, 1.0) == 1  # more negatives than items


@pytest.mark.parametrize("entries", [1, 40, 10**6])
def test_softmax_is_torchs_cross_entropy_with_its_gradients(entries):
    rng = torch.Generator().manual_seed(0)
    states, items = (torch.randn(n, 3, generator=rng, dtype=torch.float64) * 3 for n in (7, 11))
    states, items = states.requires_grad_(), items.requires_grad_()
    target = torch.tensor([0, 3, 3, 10, 5, 1, 0])
    expected = F.cross_entropy(states @ items.T, target)
    loss = softmax(states, items, target, entries)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(2.5 * expected, [states, items])
    for actual, gradient in zip(
        torch.autograd.grad(2.5 * loss, [states, items]), wanted, strict=True
    ):
        torch.testing.assert_close(actual, gradient)


def test_softmax_survives_large_scores():
    states = torch.tensor([[300.0]], requires_grad=True)
    loss = softmax(states, torch.tensor([[1.0], [-1.0]]), torch.tensor([1]))
    assert loss.item() == 600
    loss.backward()
    assert states.grad.tolist() == [[2.0]]


# --- Training ---


@pytest.mark.parametrize("loss", ["softmax", "bce"])
@pytest.mark.parametrize("cut", ["all", "last", "prefixes"])
def test_an_epoch_is_plain_adam_on_one_user_at_a_time(loss, cut):
    """The same windows, batches and negatives, but unpadded, with torch's losses and the unfused
    Adam.
    """
    data = shop([9, 2, 4, 1, 3, 7])
    config = small(
        loss=loss, cut=cut, negatives=2, calibration=0.5 if cut == "all" else 0.0, length=4, lr=0.01
    )
    net, plain = fresh(config), fresh(config)
    adam = torch.optim.Adam(plain.parameters(), lr=0.01, foreach=False, fused=False)
    rng = context(data).rng
    pieces = windows(data, 4, cut, rng)
    negatives = (
        draw_negatives(data, np.repeat(data.users, 2), rng).reshape(-1, 2)
        if loss == "bce"
        else None
    )
    total, seen = 0.0, 0
    for rows in batches(pieces.count, 3, rng):
        parts = []
        for w in rows:
            start, count = int(pieces.start[w]), int(pieces.count[w])
            states = slow_states(plain, data.items[start : start + count].tolist())
            for t in range(count) if cut != "prefixes" else [count - 1]:
                at, r = start + t + 1, plain.items @ states[t]
                if loss == "softmax":
                    parts.append(-torch.log_softmax(r, 0)[data.items[at]])
                else:
                    β = gbce_power(2, 12, config.calibration)
                    parts.append(
                        -β * torch.sigmoid(r[data.items[at]]).log()
                        - (1 - torch.sigmoid(r[negatives[at]])).log().sum()
                    )
        mean = sum(parts) / len(parts)
        adam.zero_grad()
        mean.backward()
        adam.step()
        total, seen = total + mean.item() * len(parts), seen + len(parts)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)
    metrics = train_epoch(net, optimizer, data, context(data))
    assert metrics["loss"] == pytest.approx(total / seen, rel=1e-6)
    assert seen == (n_targets(data) if cut != "last" else 4 + 1 + 3 + 2 + 4)
    for (name, a), b in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=name)


def test_a_user_who_has_every_item_is_not_trained_with_negatives():
    data = shop([12, 3])
    config = small(loss="bce")
    drawn = []
    real = next_item.bce

    def look(states, items, positive, negative, power):
        drawn.extend(zip(positive.tolist(), negative[:, 0].tolist(), strict=True))
        return real(states, items, positive, negative, power)

    net = fresh(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(next_item, "bce", look)
        train_epoch(net, torch.optim.Adam(net.parameters()), data, context(data))
    assert sorted(p for p, _ in drawn) == sorted(data.items[13:])
    assert all(n not in data.items[12:] for _, n in drawn)


def test_the_penalty_is_added_and_told():
    data = shop([5, 4, 3])
    net = fresh(small())
    adam = torch.optim.SGD(net.parameters(), lr=0.0)
    metrics = train_epoch(net, adam, data, context(data), lambda: 2.5 + 0 * net.positions.sum())
    assert metrics["penalty"] == pytest.approx(2.5)
    assert metrics["loss"] == pytest.approx(train_epoch(net, adam, data, context(data))["loss"])
    moved = fresh(small())
    train_epoch(
        moved,
        torch.optim.SGD(moved.parameters(), lr=1.0),
        data,
        context(data),
        lambda: moved.positions[4].sum(),
    )
    other = fresh(small())
    train_epoch(other, torch.optim.SGD(other.parameters(), lr=1.0), data, context(data))
    assert not torch.allclose(moved.positions[4], other.positions[4])


def test_divergence_is_told():
    data = shop([5, 4])
    net = fresh(small())
    with torch.no_grad():
        net.items.fill_(float("nan"))
    with pytest.raises(CrossfedError, match="training has diverged in train, round 1: loss"):
        train_epoch(net, torch.optim.Adam(net.parameters()), data, context(data))


@pytest.mark.parametrize("loss", ["softmax", "bce"])
def test_it_learns_what_follows_what(loss):
    """Items come in a circle: after training, the next one on the circle ranks first among the
    items not yet seen.
    """
    rng = np.random.default_rng(0)
    begin, n = rng.integers(0, 20, 60), 20
    users = np.repeat(np.arange(60), 6)
    items = ((begin[:, None] + np.arange(6)) % n).ravel()
    data = Interactions.build(60, n, users, items, np.arange(len(users)))
    config = NextItemConfig(
        dim=16, heads=1, inner=16, dropout=0.1, loss=loss, lr=0.01, batch_size=16
    )
    learner = Learner(config, context(data))
    for epoch in range(1, 21):
        learner.train(context(data, epoch))
    scores = learner.score(np.arange(60))
    scores[users, items] = -torch.inf
    best = scores.argmax(1).numpy()
    assert (best == (begin + 6) % n).mean() > 0.95


# --- Recommending ---


def test_user_vectors_are_the_last_states_of_the_last_items():
    data = shop([8, 0, 3])
    net = fresh(small()).train()
    vectors = user_vectors(net, data)
    for user, size in ((0, 5), (2, 3)):
        mine = data.items[data.indptr[user + 1] - size : data.indptr[user + 1]].tolist()
        torch.testing.assert_close(vectors[user], slow_states(net, mine)[-1])
    assert (vectors[1] == 0).all()
    assert net.training


def test_user_vectors_do_not_drop_anything():
    data = shop([8, 2, 3])
    net = NextItem(12, small(dropout=0.5), torch.Generator().manual_seed(0)).train()
    assert torch.equal(user_vectors(net, data), user_vectors(net, data))


def test_a_learner_recommends_from_what_it_was_last_shown():
    data = shop([4, 6, 3])
    longer = Interactions.build(
        3, 12, np.append(data.users, 1), np.append(data.items, 11), np.append(data.times, 99)
    )
    learner = Learner(small(), context(data))
    everyone = np.arange(3)
    before = learner.score(everyone)
    learner.observe(longer)
    after = learner.score(everyone)
    torch.testing.assert_close(
        after, relevance(user_vectors(learner.net, longer), learner.net.items)
    )
    assert not torch.equal(before[1], after[1])
    torch.testing.assert_close(before[[0, 2]], after[[0, 2]])
    exported = learner.export()
    torch.testing.assert_close(exported["users"] @ exported["items"].T, after)
    learner.train(context(data))
    assert not torch.equal(learner.score(everyone), after)


def test_continuing_from_a_checkpoint_equals_a_straight_run_bit_for_bit(tmp_path: Path):
    data = shop([4, 6, 3, 5])
    config = small(dropout=0.3)
    straight, first, second = (Learner(config, context(data, 0, seed)) for seed in (0, 0, 9))
    expected = [straight.train(context(data, r)) for r in (1, 2, 3, 4)]
    for r in (1, 2):
        first.train(context(data, r))
    checkpoint.save(tmp_path / "shop", first.state_dict())
    second.score(np.arange(4))  # what loading must forget
    second.load_state_dict(checkpoint.load(tmp_path / "shop"))
    assert torch.equal(second.score(np.arange(4)), first.score(np.arange(4)))
    assert [second.train(context(data, r)) for r in (3, 4)] == expected[2:]
    assert torch.equal(second.score(np.arange(4)), straight.score(np.arange(4)))


def test_n_targets_counts_every_item_but_the_first():
    assert n_targets(shop([4, 1, 0, 3])) == 5
