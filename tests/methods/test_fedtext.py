"""FedText: its equations by hand, what is shared, where it starts, and what a domain alone starts
from.
"""

import numpy as np
import pytest
import torch

from crossfed.methods import fedtext
from crossfed.methods.fedtext import (
    METHOD,
    SHARING,
    Config,
    Net,
    batch_loss,
    draw,
    first_tower,
    floor_similarity,
    introduce,
    item_vectors,
    n_pairs,
    pair_loss,
    scores,
    softmax_loss,
)
from crossfed.methods.parts.averaging import COUNT, average
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import SERVER, Context, Interactions, generators

SMALL = {"dim": 4, "batch_size": 16, "lr": 0.01}


@pytest.fixture
def data() -> Interactions:
    rng = np.random.default_rng(0)
    items = np.concatenate([rng.choice(12, 4, replace=False) for _ in range(20)])
    return Interactions.build(20, 12, np.repeat(np.arange(20), 4), items)


def context(
    data: Interactions | None, node: str = "shop", width: int = 6, peers: tuple[str, ...] = ()
) -> Context:
    rng, torch_rng = generators(0, "federated", 1, node)
    text = (
        {}
        if data is None
        else {"text": np.random.default_rng(1).normal(size=(12, width)).astype(np.float32)}
    )
    return Context(node, "federated", 1, peers, rng, torch_rng, torch.device("cpu"), data, text)


def domain(data: Interactions, **values) -> fedtext.Domain:
    return METHOD.init_domain(Config.model_validate({**SMALL, **values}), context(data))


def test_eq_1_adds_an_offset_to_the_map_of_the_text():
    """Eq. (1) with f(t) = At + b: z = At + b + o."""
    tower = torch.nn.Linear(2, 2)
    with torch.no_grad():
        tower.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        tower.bias.copy_(torch.tensor([0.5, 0.0]))
    found = item_vectors(tower, torch.tensor([[1.0, 1.0]]), torch.tensor([[10.0, 20.0]]))
    assert found.tolist() == [[13.5, 21.0]]


def test_eq_2_is_a_product_and_the_floor_at_its_weight():
    """Eq. (2): p·z = 1·3 + 2·4 = 11 and 1·0 + 2·1 = 2; with κ = 10 and floors .5 and 0: 16 and
    2.
    """
    p, z = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert scores(p, z, None, 10.0).tolist() == [[11, 2]]
    assert scores(p, z, torch.tensor([[0.5, 0.0]]), 10.0).tolist() == [[16, 2]]


def test_eq_3_and_eq_4_by_hand():
    """Eq. (3): mean of ln(1 + e^-(2 - 1)) and ln(1 + e^-(0 - 0)); Eq. (4): ln(e + 1) - 1 for logits
    (1, 0), item 0.
    """
    found = pair_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    assert float(found) == pytest.approx((np.log1p(np.exp(-1)) + np.log(2)) / 2)
    assert float(softmax_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))) == pytest.approx(
        np.log(np.e + 1) - 1
    )


def test_eq_5_averages_the_map_by_interactions(data):
    """Eq. (5): of maps 1 and 4 with 3 and 1 interactions the average is 1.75; nothing but the map
    is sent.
    """
    assert n_pairs(data) == 80
    state = METHOD.init_server(Config(), context(None, SERVER))
    state.shared = {"tower.0.weight": np.zeros((1, 1), np.float32)}
    inbox = {
        name: {"tower.0.weight": np.full((1, 1), value, np.float32), COUNT: np.array([n], np.int64)}
        for name, value, n in (("a", 1, 3), ("b", 4, 1))
    }
    out = average(state, inbox, context(None, SERVER, peers=("a", "b")))
    assert out.send["a"]["tower.0.weight"].item() == out.send["b"]["tower.0.weight"].item() == 1.75
    assert set(SHARING.upload(domain(data).net)) == {"tower.0.weight", "tower.0.bias"}
    assert set(SHARING.upload(domain(data, layers=2).net)) == {
        f"tower.{i}.{w}" for i in (0, 2) for w in ("weight", "bias")
    }


@pytest.mark.parametrize("start", ["random", "knntext"])
@pytest.mark.parametrize("loss", ["bpr", "softmax"])
def test_a_batchs_loss_is_that_of_eq_2_for_its_pairs(data, loss, start):
    """From all scores of Eq. (2), pair by pair; and the regularisation written out."""
    state = domain(data, loss=loss, start=start, l2=0.3, l2_offsets=0.7)
    with torch.no_grad():
        state.net.offsets.normal_()
        state.net.users.normal_()
    users, items, others = (torch.tensor(rows) for rows in ([0, 7, 19], [1, 5, 2], [3, 0, 11]))
    s = state.score(np.arange(20))
    if loss == "bpr":
        expected = torch.nn.functional.softplus(s[users, others] - s[users, items]).mean()
        touched = [items, others]
    else:
        expected = -torch.log_softmax(s[users], 1)[torch.arange(3), items].mean()
        touched = [items]
    expected = expected + 0.3 * state.net.users[users].square().sum() / 6
    expected = expected + 0.7 * sum(state.net.offsets[rows].square().sum() for rows in touched) / 6
    torch.testing.assert_close(
        batch_loss(state, users, items, others), expected.detach(), check_dtype=False
    )


def test_it_begins_at_the_floor(data):
    """With p at nought the order is that of item-kNN with text, which the exported model keeps."""
    state = domain(data, start="knntext")
    with torch.no_grad():
        state.net.users.zero_()
    x = np.zeros((20, 12), np.float32)
    x[data.users, data.items] = 1
    expected = (
        10 * x @ floor_similarity(data, context(data).artifacts["text"], state.config).toarray()
    )
    users = np.array([3, 0])
    np.testing.assert_allclose(METHOD.score(state, users), expected[users], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        METHOD.score_exported(METHOD.export(state), users), METHOD.score(state, users)
    )
    assert set(METHOD.export(state)) == {"items", "scores", "n_items"}
    assert set(METHOD.export(domain(data))) == {"users", "items"}


def test_training_lowers_the_loss_and_leaves_offsets_where_they_are_dear(data):
    for values in ({}, {"loss": "softmax"}, {"layers": 2}):
        state = domain(data, **values)
        told = [fedtext.train(state, {}, context(data)).metrics["loss"] for _ in range(30)]
        assert told[-1] < 0.95 * told[0]
    dear, cheap = domain(data, l2_offsets=10.0), domain(data, l2_offsets=0.0)
    for state in (dear, cheap):
        for _ in range(20):
            fedtext.train(state, {}, context(data))
    assert float(dear.net.offsets.detach().norm()) < 0.5 * float(cheap.net.offsets.detach().norm())


def test_the_server_draws_what_all_start_from(data):
    """From its own generator, whatever the domains showed it: the same for two domains as for one
    alone.
    """
    shown = introduce(domain(data), {}, context(data)).send[SERVER]
    drawn = []
    for peers in (("a", "b"), ("b",)):
        state = METHOD.init_server(Config(), context(None, SERVER))
        out = draw(state, dict.fromkeys(peers, shown), context(None, SERVER, peers=peers))
        assert set(out.send) == set(peers)
        drawn.append(out.send["b"])
        assert all((state.shared[name] == value).all() for name, value in drawn[-1].items())
    assert all((drawn[0][name] == drawn[1][name]).all() for name in shown)
    assert not (drawn[0]["tower.0.weight"] == shown["tower.0.weight"]).any()
    assert not drawn[0]["tower.0.bias"].any()
    bound = np.sqrt(6 / (6 + 4))  # Xavier
    assert np.abs(drawn[0]["tower.0.weight"]).max() <= bound
    assert first_tower({"x": (500, 500)}, torch.Generator().manual_seed(0))[
        "x"
    ].std() == pytest.approx(np.sqrt(2 / 1000), rel=0.01)


def test_texts_of_different_width_are_told(data):
    shown = {
        name: introduce(
            METHOD.init_domain(Config(dim=4), context(data, width=width)), {}, context(data)
        ).send[SERVER]
        for name, width in (("a", 6), ("b", 7))
    }
    with pytest.raises(
        CrossfedError,
        match=r"b sent 'tower.0.weight' with shape \(4, 7\), but "
        r"here it is \(4, 6\)",
    ):
        draw(
            METHOD.init_server(Config(), context(None)),
            shown,
            context(None, SERVER, peers=("a", "b")),
        )


def test_a_network_has_private_parts_of_the_domains_size():
    net = Net(5, 7, 6, Config(dim=4), torch.Generator().manual_seed(0))
    assert net.users.shape == (5, 4) and net.offsets.shape == (7, 4) and not net.offsets.any()
