"""Averaging by hand, the proximal term and its gradient, and what a declaration of shared names
lets through.
"""

import numpy as np
import pytest
import torch
from torch import nn

from crossfed.methods.parts.averaging import (
    COUNT,
    Server,
    Sharing,
    announce,
    average,
    check_same,
    opening,
    proximal,
    rounds,
    volume_weights,
    weighted_average,
)
from crossfed.platform.errors import CrossfedError, LeakError
from crossfed.platform.federation.payloads import Gate
from crossfed.platform.method import (
    Context,
    Direction,
    Interactions,
    Method,
    MethodConfig,
    Out,
    Stage,
    generators,
)

CPU = torch.device("cpu")
SHARING = Sharing({"body.*": "the body", "scale": "a scale"})


class Net(nn.Module):
    """`body` and `scale` are shared, `items` is not."""

    def __init__(self, n_items: int) -> None:
        super().__init__()
        self.items = nn.Parameter(torch.randn(n_items, 2))
        self.body = nn.Linear(2, 3)
        self.scale = nn.Parameter(torch.ones(1))


class State:
    def __init__(self, n_items: int) -> None:
        self.net, self.changes = Net(n_items), 0

    def changed(self) -> None:
        self.changes += 1


def context(node: str, peers: tuple[str, ...], data: Interactions | None = None) -> Context:
    rng, torch_rng = generators(0, "federated", 1, node)
    return Context(node, "federated", 1, peers, rng, torch_rng, CPU, data)


def shop(n_users: int, n_items: int) -> Interactions:
    return Interactions.build(n_users, n_items, np.arange(n_users), np.arange(n_users) % n_items)


# --- Weights and averages ---


def test_weights_by_hand():
    assert volume_weights([30, 10]).tolist() == [0.75, 0.25]
    assert volume_weights([30, 10], [1, 9]).tolist() == [0.25, 0.75]
    assert volume_weights([5]).tolist() == [1.0]
    assert volume_weights([1, 0]).tolist() == [1.0, 0.0]  # one instance is something to average
    assert volume_weights([1, 1], [1e-3, 3e-3]).tolist() == pytest.approx([0.25, 0.75])


def test_equal_affinities_are_fedavg_bit_for_bit():
    counts = np.random.default_rng(0).integers(1, 10**6, 7)
    assert np.array_equal(
        volume_weights(counts), volume_weights(counts, np.exp(np.full(7, 0.3) / np.inf))
    )
    assert volume_weights(counts).sum() == pytest.approx(1, abs=1e-15)


def test_nothing_to_average_is_told():
    with pytest.raises(CrossfedError, match="no domain has a training instance"):
        volume_weights([0, 0])


def test_average_by_hand():
    """0.75 · (1, 3) + 0.25 · (5, -1) = (2, 2); a scalar tensor 0.75 · 4 + 0.25 · 0 = 3."""
    payloads = [
        {"w": np.array([1, 3], np.float32), "s": np.array(4, np.float32)},
        {"w": np.array([5, -1], np.float32), "s": np.array(0, np.float32)},
    ]
    mean = weighted_average(payloads, [0.75, 0.25])
    assert mean["w"].tolist() == [2, 2] and mean["s"].tolist() == 3
    assert mean["w"].dtype == mean["s"].dtype == np.float32


def test_as_many_weights_as_domains_and_references_as_parameters():
    payload = {"w": np.ones(2, np.float32)}
    with pytest.raises(ValueError, match="zip"):
        weighted_average([payload, payload], [1.0])
    with pytest.raises(ValueError, match="zip"):
        proximal([torch.ones(2), torch.ones(1)], [torch.ones(2)], 1.0)


def test_equal_parameters_average_to_themselves_bit_for_bit():
    w = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    for weights in ([1.0], volume_weights([3, 7, 11, 1]), volume_weights([1, 1, 1])):
        assert np.array_equal(weighted_average([{"w": w}] * len(weights), weights)["w"], w)


def test_the_proximal_term_by_hand_and_its_gradient():
    """(μ/2)‖w - w_global‖² with differences 3, -4 and 1, μ = 0.5: 0.25 · (9 + 16 + 1) = 6.5; the
    gradient is μ(w - w_global).
    """
    w = [torch.tensor([4.0, -4.0], requires_grad=True), torch.tensor([[2.0]], requires_grad=True)]
    fixed = [torch.tensor([1.0, 0.0]), torch.tensor([[1.0]])]
    term = proximal(w, fixed, 0.5)
    assert term.item() == 6.5
    term.backward()
    assert w[0].grad.tolist() == [1.5, -2.0] and w[1].grad.tolist() == [[0.5]]


# --- What crosses ---


def test_only_declared_names_are_shared():
    net = Net(7)
    assert list(SHARING.parameters(net)) == ["scale", "body.weight", "body.bias"]
    sent = SHARING.upload(net)
    assert sent.keys() == {"scale", "body.weight", "body.bias"}
    sent["scale"][0] = 9
    assert net.scale.item() == 1  # a copy
    net.body_of_a_new_kind = nn.Linear(2, 2)  # undeclared, so private
    assert SHARING.upload(net).keys() == sent.keys()


def test_a_declared_name_without_a_parameter_is_told():
    with pytest.raises(ValueError, match=r"no parameter has the name: bodies\.\*, scales"):
        Sharing({"bodies.*": "", "scale": "", "scales": ""}).parameters(Net(2))


def test_loading_is_the_reverse_of_uploading_and_leaves_the_rest():
    one, two = Net(3), Net(3)
    items = two.items.detach().clone()
    SHARING.load(two, SHARING.upload(one))
    assert torch.equal(one.body.weight, two.body.weight) and torch.equal(one.scale, two.scale)
    assert torch.equal(two.items, items)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"items": np.zeros((3, 2), np.float32)},
            "server sent 'items', which is not a shared parameter",
        ),
        ({"scale": None}, "server sent no 'scale', which all share"),
        (
            {"scale": np.zeros(2, np.float32)},
            r"server sent 'scale' with shape \(2,\), but here "
            r"it is \(1,\)",
        ),
    ],
)
def test_loading_refuses_anything_but_the_shared_parameters(change, told):
    net = Net(3)
    payload = {
        key: value for key, value in {**SHARING.upload(net), **change}.items() if value is not None
    }
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(CrossfedError, match=told):
        SHARING.load(net, payload)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


class Config(MethodConfig):
    pass


def gate(node: str) -> Gate:
    method = Method(
        "toy",
        "",
        "",
        Config,
        lambda c: (),
        lambda c, x: None,
        lambda s, u: u,
        lambda s: {},
        lambda s, d: None,
        lambda s: {},
        fields=SHARING.fields,
    )
    return Gate(method, Config(), node, {"server": 0, "a": 7, "b": 5}, 99)


STAR = Stage("federated", 1, (), edges=frozenset({Direction.UP, Direction.DOWN}))


def test_the_platform_lets_the_upload_through_and_refuses_a_private_tensor():
    net = Net(7)
    upload = {**SHARING.upload(net), COUNT: np.array([3])}
    rows = gate("a").check(STAR, 1, {"server": upload})
    assert {row.key for row in rows} == {"scale", "body.weight", "body.bias", "n"}
    assert sum(row.bytes for row in rows) == 4 * (1 + 6 + 3) + 8
    with pytest.raises(LeakError, match="'items' is not declared for direction up"):
        gate("a").check(STAR, 1, {"server": {**upload, "items": net.items.detach().numpy()}})
    down = {key: value for key, value in upload.items() if key != COUNT}
    assert len(gate("server").check(STAR, 1, {"a": down, "b": down})) == 6
    with pytest.raises(LeakError, match="'n' is not declared for direction down"):
        gate("server").check(STAR, 1, {"a": upload})


def test_check_same_names_the_domain():
    with pytest.raises(CrossfedError, match="beauty sent no 'w'"):
        check_same("beauty", {}, {"w": (2,)})


# --- Steps ---


def test_a_federation_by_hand():
    """Domain a adds 1 to the scale and has 3 users, b adds 5 and has 1: from 1, a round gives 1 +
    (3 · 1 + 1 · 5) / 4 = 3.

    The second round starts from 3 and adds 2 again. Both domains hold the average in the end,
    beside their own items.
    """
    names, data = ("a", "b"), {"a": shop(3, 4), "b": shop(1, 2)}
    states = {"a": State(4), "b": State(2)}
    items = {name: state.net.items.detach().clone() for name, state in states.items()}
    server = Server(SHARING.upload(Net(1)))

    def train(state, inbox, ctx):
        with torch.no_grad():
            state.net.scale += {"a": 1, "b": 5}[ctx.node]
        return Out(metrics={"loss": 0.5})

    def run(phases):
        inbox, metrics = {"server": {}, "a": {}, "b": {}}, {}
        for phase in phases:
            outs = (
                {"server": phase.step(server, inbox["server"], context("server", names))}
                if phase.at == "server"
                else {
                    name: phase.step(states[name], inbox[name], context(name, (), data[name]))
                    for name in names
                }
            )
            inbox = {"server": {}, "a": {}, "b": {}}
            for sender, out in outs.items():
                gate(sender).check(STAR, 1, out.send)
                metrics[sender] = dict(out.metrics) or metrics.get(sender, {})
                for receiver, payload in out.send.items():
                    inbox[receiver][sender] = payload
        return metrics

    run(opening(SHARING))
    assert all(state.net.scale.item() == 1 and state.changes == 1 for state in states.values())
    assert torch.equal(states["a"].net.body.weight, states["b"].net.body.weight)
    metrics = run(rounds(SHARING, train, lambda mine: mine.n_users))
    assert [state.net.scale.item() for state in states.values()] == [3, 3]
    assert metrics["server"] == {"weight_a": 0.75, "weight_b": 0.25} and metrics["a"] == {
        "loss": 0.5
    }
    run(rounds(SHARING, train, lambda mine: mine.n_users))
    assert [state.net.scale.item() for state in states.values()] == [5, 5]
    assert all(torch.equal(states[name].net.items, items[name]) for name in names)
    assert all(state.changes == 3 for state in states.values())

    other = Server({})
    other.load_state_dict(server.state_dict())
    assert {key: value.tolist() for key, value in other.shared.items()} == {
        key: value.tolist() for key, value in server.shared.items()
    }
    assert announce(other, {}, context("server", names)).send["b"]["scale"].tolist() == [5]


def test_the_server_refuses_an_upload_that_lacks_a_parameter():
    server = Server(SHARING.upload(Net(1)))
    payload = {**SHARING.upload(Net(2)), COUNT: np.array([1])}
    short = {key: value for key, value in payload.items() if key != "body.bias"}
    with pytest.raises(CrossfedError, match=r"b sent no 'body\.bias'"):
        average(server, {"a": payload, "b": short}, context("server", ("a", "b")))
