"""TIGER+FedAvg and TIGER+FedProx: one average of the whole generator, held back by μ."""

import importlib.resources

import numpy as np
import pytest
import torch
import yaml

from crossfed.methods import tiger_fedavg
from crossfed.methods.parts.averaging import COUNT
from crossfed.methods.parts.generative import Generator, schedule
from crossfed.methods.parts.next_item import n_targets
from crossfed.methods.tiger_fedavg import METHOD, SHARING, Config
from crossfed.platform.errors import LeakError
from crossfed.platform.federation.payloads import Gate
from crossfed.platform.method import Context, Direction, Interactions, Phase, Scope, generators

NAMES = ("books", "films")
SIZES = {"books": (24, 14), "films": (15, 12)}
SMALL = {
    "levels": 2,
    "codebook": 4,
    "dim": 8,
    "heads": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "inner": 8,
    "decoder_inner": 8,
    "length": 6,
    "batch_size": 32,
    "dropout": 0.0,
    "local_epochs": 1,
    "rounds": 4,
    "warmup": 0,
    "lr": 0.01,
}


def shop(n_users: int, n_items: int) -> Interactions:
    """Users with 7 items each, in time order."""
    rng = np.random.default_rng(n_users)
    items = np.concatenate([rng.permutation(n_items)[:7] for _ in range(n_users)])
    return Interactions.build(
        n_users, n_items, np.repeat(np.arange(n_users), 7), items, np.arange(len(items))
    )


def context(
    node: str, data: Interactions | None, stage: str = "federated", round: int = 1
) -> Context:
    rng, torch_rng = generators(0, stage, round, node)
    torch.manual_seed(round)
    sids = np.stack(np.unravel_index(np.arange(16), (4, 4)), axis=1)
    artifacts = {} if data is None else {"sids": sids[: data.n_items]}
    peers = tuple(name for name in NAMES if name != node)
    return Context(node, stage, round, peers, rng, torch_rng, torch.device("cpu"), data, artifacts)


class Federation:
    """Two domains and a server after the opening phases; `round()` runs one round and returns its
    messages.
    """

    def __init__(self, **sets: float) -> None:
        self.config = Config.model_validate({**SMALL, **sets})
        self.data = {name: shop(*SIZES[name]) for name in NAMES}
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
                out = phase.step(
                    self.states[name],
                    mail.pop(name, {}),
                    context(name, self.data.get(name), round=number),
                )
                for receiver, payload in out.send.items():
                    mail.setdefault(receiver, {})[name] = payload
                    messages.append((name, receiver, payload, out.metrics))
        return messages

    def round(self, number: int = 1):
        return self.run(self.stage.each, number)

    def net(self, name: str) -> Generator:
        return self.states[name].net


def test_eq_1_the_average_weighs_domains_by_their_training_instances():
    """Eq. (1): p_k = n_k / n; Σ_k p_k w_k of every parameter is what both domains hold after a
    round, to the last bit.
    """
    run = Federation()
    up = {s: p for s, r, p, _ in run.round() if r == "server"}
    n = {name: n_targets(run.data[name]) for name in NAMES}
    assert n == {"books": 144, "films": 90}
    assert {name: payload[COUNT].tolist() for name, payload in up.items()} == {
        name: [n[name]] for name in NAMES
    }
    held = [SHARING.upload(run.net(name)) for name in NAMES]
    for key in held[0]:
        expected = sum(n[name] / 234 * up[name][key].astype(np.float64) for name in NAMES)
        np.testing.assert_allclose(held[0][key], expected, rtol=1e-6, atol=1e-9)
        assert np.array_equal(held[0][key], held[1][key])
    assert not np.array_equal(up["books"]["tokens"], up["films"]["tokens"])


def test_every_parameter_is_shared():
    run = Federation()
    assert set(SHARING.parameters(run.net("books"))) == {
        name for name, _ in run.net("books").named_parameters()
    }
    first = [SHARING.upload(run.net(name)) for name in NAMES]
    assert all(np.array_equal(first[0][key], first[1][key]) for key in first[0])


def test_eq_2_is_added_to_every_batch(monkeypatch):
    """Eq. (2): (μ/2)‖w - w^t‖² over all parameters, w^t the average that the round starts from; 0
    in the first batch.
    """
    run = Federation(mu=3.0)
    start = [p.detach().clone() for p in run.net("books").parameters()]
    seen = []
    real = tiger_fedavg.proximal

    def look(parameters, reference, mu):
        far = sum(
            float((w.detach() - w0).square().sum()) for w, w0 in zip(parameters, start, strict=True)
        )
        term = real(parameters, reference, mu)
        seen.append((3.0 / 2 * far, float(term.detach())))
        return term

    monkeypatch.setattr(tiger_fedavg, "proximal", look)
    out = tiger_fedavg.train(run.states["books"], {}, context("books", run.data["books"]))
    assert len(seen) == 5, "144 instances in batches of 32"
    assert seen[0][1] == 0 and all(told > 0 for _, told in seen[1:])
    assert [told for _, told in seen] == pytest.approx([expected for expected, _ in seen], rel=1e-5)
    assert 0 < out.metrics["penalty"] < max(told for _, told in seen)


def test_mu_holds_the_parameters_back_and_zero_is_fedavg():
    def moved(mu: float) -> float:
        run = Federation(mu=mu, local_epochs=3, clip=1e9)
        before = SHARING.upload(run.net("books"))
        (told,) = [(p, m) for s, r, p, m in run.round() if (s, r) == ("books", "server")]
        assert ("penalty" in told[1]) == (mu > 0)
        return sum(float(np.square(told[0][key] - before[key]).sum()) for key in before)

    assert moved(1000) < 0.1 * moved(0)


def test_the_loss_falls_over_rounds_and_the_rate_follows_the_round():
    run = Federation(local_epochs=2, rounds=6, warmup=2, smoothing=0.0)
    losses, rates = [], []
    for number in range(1, 7):
        losses.append(next(m["loss_sid"] for s, _, _, m in run.round(number) if s == "books"))
        rates.append(run.states["films"].adam.param_groups[0]["lr"])
    assert losses[-1] < losses[0]
    assert rates[:2] == pytest.approx([0.005, 0.01]) and rates[5] < rates[2] < 0.01


def test_local_epochs_are_epochs():
    """Three local epochs are three passes: the same parameters as three calls of the local
    training.
    """
    run, other = Federation(local_epochs=3), Federation()
    up = {s: p for s, r, p, _ in run.round() if r == "server"}
    ctx = context("books", other.data["books"])
    for _ in range(3):
        other.states["books"].train(ctx, scale=schedule(1, other.config.rounds, 0))
    own = SHARING.upload(other.net("books"))
    assert all(np.array_equal(own[key], up["books"][key]) for key in own)


def test_what_is_not_a_parameter_is_refused():
    run = Federation()
    gate = Gate(METHOD, run.config, "books", {"server": 0, "books": 14, "films": 12}, 24)
    upload = {**SHARING.upload(run.net("books")), COUNT: np.array([1])}
    assert gate.check(run.stage, 1, {"server": upload})
    with pytest.raises(
        LeakError, match="books → server: payload key 'sids' is not declared for direction up"
    ):
        gate.check(run.stage, 1, {"server": {**upload, "sids": run.states["books"].sids.numpy()}})


def test_at_the_papers_sizes_17_4_megabytes_go_up():
    count = sum(
        p.numel() for p in SHARING.parameters(Generator(Config(), torch.Generator())).values()
    )
    assert round(4 * count / 1e6, 1) == 17.4


def test_it_is_federated_in_one_stage():
    (stage,) = METHOD.stages(Config(rounds=7, patience=3))
    assert METHOD.scope == Scope.FEDERATED and METHOD.artifacts == ("sids",)
    assert (stage.rounds, stage.patience, stage.keep_best) == (7, 3, True)
    assert stage.edges == {Direction.UP, Direction.DOWN}


def test_the_shipped_file_states_the_defaults_and_valid_presets():
    text = (
        importlib.resources.files("crossfed.methods.configs")
        .joinpath("tiger_fedavg.yaml")
        .read_text()
    )
    shipped = yaml.safe_load(text)
    assert Config.model_validate(shipped["config"]) == Config()
    for preset in shipped["presets"].values():
        Config.model_validate({**shipped["config"], **preset})
