"""FedSASRec: one average for all, private items, FedProx's term on the shared parameters only."""

import importlib.resources
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from crossfed.methods import fedsasrec
from crossfed.methods.fedsasrec import METHOD, SHARING, Config
from crossfed.methods.parts.averaging import COUNT
from crossfed.methods.parts.next_item import NextItem, n_targets, user_vectors
from crossfed.platform.errors import LeakError
from crossfed.platform.federation.payloads import Gate
from crossfed.platform.method import Context, Direction, Interactions, Phase, Scope, generators

NAMES = ("books", "films", "games")
SMALL = {"dim": 8, "heads": 2, "inner": 12, "length": 6, "batch_size": 8, "dropout": 0.0}


def shop(n_users: int, n_items: int) -> Interactions:
    """Users with 8 items each, in time order."""
    rng = np.random.default_rng(n_users)
    items = np.concatenate([rng.permutation(n_items)[:8] for _ in range(n_users)])
    return Interactions.build(
        n_users, n_items, np.repeat(np.arange(n_users), 8), items, np.arange(len(items))
    )


def context(
    node: str, data: Interactions | None, stage: str = "federated", round: int = 1
) -> Context:
    rng, torch_rng = generators(0, stage, round, node)
    torch.manual_seed(round)
    peers = tuple(name for name in NAMES if name != node)
    return Context(node, stage, round, peers, rng, torch_rng, torch.device("cpu"), data)


class Federation:
    """Three domains and a server after the opening phases; `round()` runs one round and returns its
    messages.
    """

    def __init__(self, **sets: float) -> None:
        self.config = Config.model_validate({**SMALL, **sets})
        self.data = {"books": shop(40, 30), "films": shop(50, 25), "games": shop(30, 35)}
        self.states = {
            "server": METHOD.init_server(self.config, context("server", None, "init", 0))
        }
        for name in NAMES:
            self.states[name] = METHOD.init_domain(
                self.config, context(name, self.data[name], "init", 0)
            )
        (self.stage,) = METHOD.stages(self.config)
        self.run(self.stage.open, 0)

    def run(self, phases: tuple[Phase, ...], number: int):
        mail, messages = {}, []
        for phase in phases:
            for name in ["server"] if phase.at == "server" else NAMES:
                ctx = context(name, self.data.get(name), round=number)
                out = phase.step(self.states[name], mail.pop(name, {}), ctx)
                for receiver, payload in out.send.items():
                    mail.setdefault(receiver, {})[name] = payload
                    messages.append((name, receiver, payload, out.metrics))
        return messages

    def round(self, number: int = 1):
        return self.run(self.stage.each, number)

    def net(self, name: str) -> NextItem:
        return self.states[name].net


def test_all_start_from_the_servers_parameters_and_from_items_of_their_own():
    run = Federation()
    first = SHARING.upload(run.net("books"))
    for name in NAMES[1:]:
        own = SHARING.upload(run.net(name))
        assert all(np.array_equal(own[key], first[key]) for key in first)
    assert not torch.equal(run.net("books").items[:25], run.net("films").items)


def test_eq_1_the_average_weighs_domains_by_their_training_positions():
    """Eq. (1): p_k = n_k / n, and Σ_k p_k w_k is what every domain holds after the round, bit for
    bit the same.
    """
    run = Federation()
    up = {sender: payload for sender, receiver, payload, _ in run.round() if receiver == "server"}
    n = {name: n_targets(run.data[name]) for name in NAMES}
    assert {name: payload[COUNT].tolist() for name, payload in up.items()} == {
        name: [n[name]] for name in NAMES
    }
    for key in SHARING.parameters(run.net("books")):
        expected = sum(
            n[name] / sum(n.values()) * up[name][key].astype(np.float64) for name in NAMES
        )
        held = [SHARING.upload(run.net(name))[key] for name in NAMES]
        np.testing.assert_allclose(held[0], expected, rtol=1e-6, atol=1e-9)
        assert np.array_equal(held[0], held[1]) and np.array_equal(held[0], held[2])
    assert not np.array_equal(
        up["books"]["blocks.0.feed.inner.weight"], up["films"]["blocks.0.feed.inner.weight"]
    )


def test_eq_2_is_added_to_every_batch_of_the_shared_parameters(monkeypatch):
    """Eq. (2): the term told is the mean of (μ/2)‖w - w^t‖² over batches, w^t the parameters at the
    round's start.
    """
    run = Federation(mu=3.0, lr=0.01)
    seen: dict[int, list] = {}
    real = fedsasrec.proximal

    def look(parameters, reference, mu):
        assert mu == 3.0
        seen.setdefault(id(parameters), []).append([p.detach().clone() for p in parameters])
        return real(parameters, reference, mu)

    monkeypatch.setattr(fedsasrec, "proximal", look)
    start = [p.detach().clone() for p in SHARING.parameters(run.net("books")).values()]
    told = {sender: metrics for sender, receiver, _, metrics in run.round() if receiver == "server"}
    assert len(seen) == 3
    # of books, which runs first: 40 windows of 7 in batches of 8, two a window
    batches = next(iter(seen.values()))
    terms = [
        3.0 / 2 * sum(((w - w0) ** 2).sum() for w, w0 in zip(batch, start, strict=True)).item()
        for batch in batches
    ]
    assert terms[0] == 0 and all(term > 0 for term in terms[1:])
    assert min(terms[1:]) < told["books"]["penalty"] < max(terms)


def test_a_large_mu_holds_shared_parameters_back_and_not_the_items():
    def moved(mu: float) -> tuple[float, float]:
        run = Federation(mu=mu, lr=0.01, local_epochs=3)
        net = run.net("books")
        before = (
            [p.detach().clone() for p in SHARING.parameters(net).values()],
            net.items.detach().clone(),
        )
        (up,) = [
            p for sender, receiver, p, _ in run.round() if (sender, receiver) == ("books", "server")
        ]
        shared = sum(
            np.square(up[key] - p.numpy()).sum()
            for key, p in zip(SHARING.parameters(net), before[0], strict=True)
        )
        return float(shared), float((net.items.detach() - before[1]).square().sum())

    free, held = moved(0), moved(1000)
    assert held[0] < 0.05 * free[0]
    assert held[1] > 0.5 * free[1]


def test_without_mu_it_is_fedavg():
    run = Federation()
    told = [metrics for _, receiver, _, metrics in run.round() if receiver == "server"]
    assert all(set(metrics) == {"loss"} for metrics in told)


def test_local_epochs_are_epochs():
    """Three local epochs are three passes: the same shared parameters as three calls of the local
    training.
    """
    run, other = Federation(local_epochs=3), Federation(local_epochs=1)
    up = {sender: payload for sender, receiver, payload, _ in run.round() if receiver == "server"}
    ctx = context("books", other.data["books"])
    for _ in range(3):
        other.states["books"].train(ctx)
    own = SHARING.upload(other.net("books"))
    assert all(np.array_equal(own[key], up["books"][key]) for key in own)


def test_what_crosses_grows_neither_with_items_nor_with_users():
    run = Federation()
    messages = run.round()
    assert {tuple(sorted(p)) for s, r, p, _ in messages if r == "server"} == {
        tuple(sorted([*SHARING.parameters(run.net("books")), COUNT]))
    }
    every = {name for name, _ in run.net("books").named_parameters()}
    assert every - set(SHARING.parameters(run.net("books"))) == {"items"}
    sizes = {s: sum(v.nbytes for v in p.values()) for s, r, p, _ in messages if r == "server"}
    assert len(set(sizes.values())) == 1


def test_item_embeddings_in_an_upload_are_refused():
    run = Federation()
    gate = Gate(METHOD, Config(), "books", {"server": 0, "books": 30, "films": 25}, 40)
    (stage,) = METHOD.stages(Config())
    upload = {**SHARING.upload(run.net("books")), COUNT: np.array([1])}
    assert gate.check(stage, 1, {"server": upload})
    with pytest.raises(
        LeakError, match="books → server: payload key 'items' is not declared for direction up"
    ):
        gate.check(
            stage, 1, {"server": {**upload, "items": run.net("books").items.detach().numpy()}}
        )


def test_the_servers_first_parameters_come_from_its_seed():
    def first(seed: int):
        ctx = replace(context("server", None), torch_rng=torch.Generator().manual_seed(seed))
        return METHOD.init_server(Config(), ctx).shared

    one, two, other = first(1), first(1), first(2)
    assert all(np.array_equal(one[key], two[key]) for key in one)
    assert not np.array_equal(one["positions"], other["positions"])


def test_it_is_federated_in_one_stage():
    (stage,) = METHOD.stages(Config(rounds=7, patience=3))
    assert METHOD.scope == Scope.FEDERATED
    assert (stage.rounds, stage.patience, stage.keep_best) == (7, 3, True)
    assert stage.edges == {Direction.UP, Direction.DOWN}


def test_a_domain_scores_with_the_average():
    """After a round the scores are those of the averaged network, not of the one that was
    trained.
    """
    run = Federation()
    state = run.states["books"]
    users = np.arange(5)
    before = METHOD.score(state, users)
    run.round()
    after = METHOD.score(state, users)
    vectors = user_vectors(state.net, run.data["books"])
    torch.testing.assert_close(after, vectors[users] @ state.net.items.T)
    assert not torch.equal(before, after)
    assert np.array_equal(
        SHARING.upload(state.net)["positions"], run.states["server"].shared["positions"]
    )


def test_the_shipped_file_states_the_defaults_and_valid_presets():
    text = (
        importlib.resources.files("crossfed.methods.configs").joinpath("fedsasrec.yaml").read_text()
    )
    shipped = yaml.safe_load(text)
    assert Config.model_validate(shipped["config"]) == Config()
    for preset in shipped["presets"].values():
        Config.model_validate({**shipped["config"], **preset})
