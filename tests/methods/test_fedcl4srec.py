"""FedCL4SRec: only the blocks are averaged, one domain is CL4SRec bit for bit, FedProx's term."""

import importlib.resources

import numpy as np
import pytest
import torch
import yaml

from crossfed.methods import cl4srec, fedcl4srec
from crossfed.methods.fedcl4srec import METHOD, SHARING, Config
from crossfed.methods.parts.averaging import COUNT
from crossfed.methods.parts.next_item import n_targets, user_vectors
from crossfed.platform.config.settings import build
from crossfed.platform.errors import LeakError
from crossfed.platform.federation.payloads import Gate
from crossfed.platform.method import Context, Direction, Interactions, Phase, Scope, generators
from crossfed.platform.report.recording import run_recorded

NAMES = ("books", "films", "games")
SMALL = {
    "dim": 8, "heads": 2, "inner": 12, "length": 6, "batch_size": 8, "dropout": 0.2,
    "local_epochs": 1,
}  # fmt: skip


def shop(n_users: int, n_items: int) -> Interactions:
    """Users with 8 items each, in time order."""
    rng = np.random.default_rng(n_users)
    items = np.concatenate([rng.permutation(n_items)[:8] for _ in range(n_users)])
    users = np.repeat(np.arange(n_users), 8)
    return Interactions.build(n_users, n_items, users, items, np.arange(len(items)))


DATA = {"books": shop(40, 30), "films": shop(50, 25), "games": shop(30, 35)}


def context(node: str, names: tuple[str, ...] = NAMES, round: int = 1) -> Context:
    rng, torch_rng = generators(0, "train", round, node)
    torch.manual_seed(round)
    peers = tuple(name for name in names if name != node)
    data = DATA.get(node)
    return Context(node, "train", round, peers, rng, torch_rng, torch.device("cpu"), data)


class Federation:
    """Domains and a server after the opening phases; `round()` runs one round."""

    def __init__(self, names: tuple[str, ...] = NAMES, **sets) -> None:
        self.names = names
        self.config = Config.model_validate({**SMALL, **sets})
        at = {name: context(name, names, 0) for name in ("server", *names)}
        self.states = {name: METHOD.init_domain(self.config, at[name]) for name in names}
        self.first = {name: self.parameters(name) for name in names}
        self.states["server"] = METHOD.init_server(self.config, at["server"])
        (self.stage,) = METHOD.stages(self.config)
        self.run(self.stage.open, 0)

    def run(self, phases: tuple[Phase, ...], number: int):
        mail, messages = {}, []
        for phase in phases:
            for name in ["server"] if phase.at == "server" else self.names:
                ctx = context(name, self.names, number)
                out = phase.step(self.states[name], mail.pop(name, {}), ctx)
                for receiver, payload in out.send.items():
                    mail.setdefault(receiver, {})[name] = payload
                    messages.append((name, receiver, payload, out.metrics))
        return messages

    def round(self, number: int = 1):
        return self.run(self.stage.each, number)

    def net(self, name: str):
        return self.states[name].net

    def parameters(self, name: str) -> dict[str, torch.Tensor]:
        return {key: p.detach().clone() for key, p in self.net(name).named_parameters()}


def uploads(messages):
    return {s: (payload, told) for s, r, payload, told in messages if r == "server"}


@pytest.mark.parametrize("local_epochs", [1, 2])
def test_one_domain_is_cl4srec_bit_for_bit(local_epochs):
    """Three rounds alone: the same losses, parameters and scores."""
    run = Federation(("books",), local_epochs=local_epochs)
    alone = cl4srec.METHOD
    config = {key: run.config.model_dump()[key] for key in type(run.config).model_fields
              if key in alone.Config.model_fields and key not in ("patience",)}  # fmt: skip
    other = alone.init_domain(alone.Config.model_validate(config), context("books", ("books",), 0))
    (phase,) = alone.stages(other.config)[0].each
    for r in (1, 2, 3):
        told = uploads(run.round(r))["books"][1]
        ctx = context("books", ("books",), r)
        epochs = [phase.step(other, {}, ctx).metrics for _ in range(local_epochs)]
        assert told == {key: sum(e[key] for e in epochs) / local_epochs for key in epochs[0]}
    federated = run.net("books").named_parameters()
    for (name, a), b in zip(federated, other.net.parameters(), strict=True):
        assert torch.equal(a, b), name
    everyone = np.arange(40)
    scores = METHOD.score(run.states["books"], everyone)
    assert torch.equal(scores, alone.score(other, everyone))


def test_a_run_of_one_domain_is_a_run_of_cl4srec_bit_for_bit(shops, tmp_path, monkeypatch):
    """Through the platform, with the same seed: metrics, parameters and Adam's moments.

    The platform refuses a federation of one, so that its check is left out here.
    """
    monkeypatch.setattr(
        "crossfed.platform.federation.run.chosen_domains", lambda config, data: ("books",)
    )
    sets = ("dim=8", "inner=8", "batch_size=16", "dropout=0.3")
    states = {}

    def run(name: str, *sets: str):
        def look(plan, nodes):
            states[name] = METHOD.state_dict(nodes.nodes["books"].state)
            return {}

        values = {"data": shops, "out": tmp_path / name, "backend": "inprocess"}
        off = ("tracking.enabled=false", "tracking.artifacts=false")
        return run_recorded(build(name, sets=[*sets, *off], values=values), finish=look).result

    federated = run("fedcl4srec", *sets, "mu=0.0", "local_epochs=1", "rounds=4")
    alone = run("cl4srec", *sets, "epochs=4", "patience=10")
    assert federated["domains"] == alone["domains"]
    assert sum(federated["bytes"]["up"].values()) > 0
    for kind in ("net", "adam"):
        one, two = ({**flatten(states[name][kind])} for name in ("fedcl4srec", "cl4srec"))
        assert one.keys() == two.keys()
        assert all(np.array_equal(one[key], two[key]) for key in one)


def flatten(tree, path: str = "") -> dict[str, np.ndarray]:
    """The leaves of nested dictionaries and lists by their path."""
    if isinstance(tree, dict | list | tuple):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, leaf in pairs for k, v in flatten(leaf, f"{path}/{key}").items()}
    return {path: np.asarray(tree)}


def test_only_the_attention_blocks_cross():
    """Item and position embeddings, the mask and the outer norm stay; a block crosses whole."""
    run = Federation()
    every = {name for name, _ in run.net("books").named_parameters()}
    shared = set(SHARING.parameters(run.net("books")))
    assert every - shared == {"items", "positions", "mask", "norm.weight", "norm.bias"}
    assert all(name.startswith("blocks.") for name in shared)
    for payload, _ in uploads(run.round()).values():
        assert set(payload) == {*shared, COUNT}


def test_all_start_from_the_first_domains_blocks_and_from_all_else_of_their_own():
    run = Federation()
    first = SHARING.upload(run.net("books"))
    assert all(np.array_equal(first[key], run.first["books"][key].numpy()) for key in first)
    assert not torch.equal(run.first["films"]["blocks.0.feed.inner.weight"],
                           run.first["books"]["blocks.0.feed.inner.weight"])  # fmt: skip
    for name in NAMES:
        own = SHARING.upload(run.net(name))
        assert all(np.array_equal(own[key], first[key]) for key in first)
        for key, value in run.net(name).named_parameters():
            if key not in first:
                assert torch.equal(value, run.first[name][key])
    assert not torch.equal(run.net("books").positions, run.net("films").positions)


def test_eq_2_the_average_weighs_domains_by_their_training_positions():
    """Eq. (2): Σ_k (n_k / n) w_k, float by float, in all domains; the rest is each one's own."""
    run = Federation()
    up = {name: payload for name, (payload, _) in uploads(run.round()).items()}
    n = {name: n_targets(DATA[name]) for name in NAMES}
    counts = {name: payload[COUNT].tolist() for name, payload in up.items()}
    assert counts == {name: [n[name]] for name in NAMES}
    for key in SHARING.parameters(run.net("books")):
        share = {name: n[name] / sum(n.values()) for name in NAMES}
        expected = sum(share[name] * up[name][key].astype(np.float64) for name in NAMES)
        held = [SHARING.upload(run.net(name))[key] for name in NAMES]
        np.testing.assert_allclose(held[0], expected, rtol=1e-6, atol=1e-9)
        assert np.array_equal(held[0], held[1]) and np.array_equal(held[0], held[2])
    key = "blocks.0.feed.inner.weight"
    assert not np.array_equal(up["books"][key], up["films"][key])
    for name in ("mask", "positions", "norm.weight"):
        values = [run.net(domain).get_parameter(name) for domain in NAMES]
        assert not torch.equal(values[0], values[1])


def test_eq_1_is_added_to_every_batch_of_the_shared_parameters(monkeypatch):
    """Eq. (1): (μ/2)‖w - w̄‖², squared, w̄ the blocks at the round's start, beside the contrast."""
    run = Federation(mu=3.0, lr=0.01)
    seen: dict[int, list] = {}
    real = fedcl4srec.proximal

    def look(parameters, reference, mu):
        assert mu == 3.0
        seen.setdefault(id(parameters), []).append([p.detach().clone() for p in parameters])
        return real(parameters, reference, mu)

    monkeypatch.setattr(fedcl4srec, "proximal", look)
    start = [p.detach().clone() for p in SHARING.parameters(run.net("books")).values()]
    told = uploads(run.round())["books"][1]
    batches = next(iter(seen.values()))
    squares = [[(w - w0).square().sum() for w, w0 in zip(b, start, strict=True)] for b in batches]
    terms = [3 / 2 * sum(parts).item() for parts in squares]
    assert terms[0] == 0 and all(term > 0 for term in terms[1:])
    assert min(terms[1:]) < told["penalty"] < max(terms)
    assert set(told) == {"loss", "contrast", "penalty"}


def test_eq_1_a_large_mu_holds_the_blocks_back_and_not_the_items():
    """Eq. (1): with a large μ the blocks hardly move, the items as ever."""

    def moved(mu: float) -> tuple[float, float]:
        run = Federation(mu=mu, lr=0.01, local_epochs=3)
        net = run.net("books")
        blocks = {k: p.detach().clone() for k, p in SHARING.parameters(net).items()}
        items = net.items.detach().clone()
        up = uploads(run.round())["books"][0]
        shared = sum(np.square(up[key] - p.numpy()).sum() for key, p in blocks.items())
        return float(shared), float((net.items.detach() - items).square().sum())

    free, held = moved(0), moved(1000)
    assert held[0] < 0.05 * free[0]
    assert held[1] > 0.5 * free[1]


def test_without_mu_there_is_no_penalty():
    told = [told for _, told in uploads(Federation().round()).values()]
    assert all(set(metrics) == {"loss", "contrast"} for metrics in told)


def test_what_crosses_grows_neither_with_items_nor_with_users():
    sent = [payload for payload, _ in uploads(Federation().round()).values()]
    assert len({sum(v.nbytes for v in payload.values()) for payload in sent}) == 1


@pytest.mark.parametrize("private", ["items", "positions", "mask", "norm.weight"])
def test_what_is_private_is_refused_in_an_upload(private):
    run = Federation()
    gate = Gate(METHOD, Config(), "books", {"server": 0, "books": 30, "films": 25}, 40)
    (stage,) = METHOD.stages(Config())
    upload = {**SHARING.upload(run.net("books")), COUNT: np.array([1])}
    assert gate.check(stage, 1, {"server": upload})
    value = run.net("books").get_parameter(private).detach().numpy()
    with pytest.raises(LeakError, match=f"'{private}' is not declared for direction up"):
        gate.check(stage, 1, {"server": {**upload, private: value}})


def test_a_domain_scores_with_the_average():
    """After a round the scores are those of the averaged network, not of the one trained."""
    run = Federation()
    state, users = run.states["books"], np.arange(5)
    before = METHOD.score(state, users)
    run.round()
    after = METHOD.score(state, users)
    vectors = user_vectors(state.net, DATA["books"])
    torch.testing.assert_close(after, vectors[users] @ state.net.items.T)
    assert not torch.equal(before, after)
    key = "blocks.0.attention.query.weight"
    assert np.array_equal(SHARING.upload(state.net)[key], run.states["server"].shared[key])


def test_it_is_federated_in_one_stage():
    (stage,) = METHOD.stages(Config(rounds=7, patience=3))
    assert METHOD.scope == Scope.FEDERATED
    assert (stage.rounds, stage.patience, stage.keep_best) == (7, 3, True)
    assert stage.edges == {Direction.UP, Direction.DOWN}


def test_the_shipped_file_states_the_defaults_and_valid_presets():
    folder = importlib.resources.files("crossfed.methods.configs")
    shipped = yaml.safe_load(folder.joinpath("fedcl4srec.yaml").read_text())
    assert Config.model_validate(shipped["config"]) == Config()
    for preset in shipped["presets"].values():
        Config.model_validate({**shipped["config"], **preset})
    for name, space in shipped["search"].items():
        for value in space.get("values", [space.get("low"), space.get("high")]):
            Config.model_validate({**shipped["config"], name: value})
