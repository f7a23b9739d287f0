"""NeuMF's equations by hand and against plain torch, its halves, pre-training, blocked scoring, and
its state.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from crossfed.methods import neumf
from crossfed.methods.neumf import METHOD, Config
from crossfed.methods.parts.sampling import pointwise_epoch
from crossfed.platform import checkpoint
from crossfed.platform.config.settings import build
from crossfed.platform.method import Context, Interactions, Scope, Stage, generators
from crossfed.platform.report.recording import run_recorded

N_USERS, N_ITEMS = 12, 9
SMALL = Config(factors=3, mlp_dim=4, widths=(5, 2), std=0.5, batch_size=16)


@pytest.fixture
def data() -> Interactions:
    """The last user and the last item have no interaction."""
    rng = np.random.default_rng(2)
    pairs = np.unique(rng.integers(0, [N_USERS - 1, N_ITEMS - 1], (45, 2)), axis=0)
    return Interactions.build(N_USERS, N_ITEMS, pairs[:, 0], pairs[:, 1])


def context(data: Interactions, stage: str, round: int, seed: int = 0) -> Context:
    rng, torch_rng = generators(seed, stage, round, "shop")
    torch.manual_seed(1000 * seed + round)
    return Context("shop", stage, round, (), rng, torch_rng, torch.device("cpu"), data)


def fresh(data: Interactions, config: Config, seed: int = 0) -> neumf.State:
    return METHOD.init_domain(config, context(data, "init", 0, seed))


def train(
    state: neumf.State,
    data: Interactions,
    rounds: range,
    stage: Stage | None = None,
) -> list[Mapping[str, float]]:
    """Rounds of a stage, the last by default; with its opening phase before the first."""
    stage = stage or METHOD.stages(state.config)[-1]
    for phase in stage.open if rounds.start == 1 else ():
        phase.step(state, {}, context(data, stage.name, 0))
    return [stage.each[0].step(state, {}, context(data, stage.name, r)).metrics for r in rounds]


def changed(config: Config, **values: object) -> Config:
    return Config.model_validate({**config.model_dump(), **values})


def slow_logits(state: neumf.State, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Eq. (12) before σ, pair by pair and with whole vectors: h^T [φ^GMF; φ^MLP]."""
    rows = []
    for u, i in zip(users.tolist(), items.tolist(), strict=True):
        phi_gmf = state.tables["gmf_users"][u] * state.tables["gmf_items"][i]
        z = torch.cat([state.tables["mlp_users"][u], state.tables["mlp_items"][i]])
        for weight, bias in state.layers:
            z = (weight.T @ z + bias).clamp(min=0)
        rows.append(torch.cat([state.out["gmf"], state.out["mlp"]]) @ torch.cat([phi_gmf, z]))
    return torch.stack(rows)


# --- Equations ---


def test_eq_8_and_eq_9_by_hand():
    """Eq. (8): [1, 2] ⊙ [3, 4] = [3, 8]; Eq. (9) with h = [10, 1]: 38; h = [1, 1] is the inner
    product 11.
    """
    p, q = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    assert neumf.gmf(p, q).tolist() == [[3, 8]]
    assert neumf.gmf_logit(p, q, torch.tensor([10.0, 1.0])).tolist() == [38]
    assert neumf.gmf_logit(p, q, torch.ones(2)).tolist() == [11]


def test_eq_10_by_hand():
    """Eq. (10): z = [p; q] = [1, 2], first z·[[1, -1], [1, 0]] + [0, 0.5] = [3, -0.5], then ReLU.

    The second layer has [3, 0]·[2, 9] - 1 = 5.
    """
    layers = [
        (torch.tensor([[1.0, -1.0], [1.0, 0.0]]), torch.tensor([0.0, 0.5])),
        (torch.tensor([[2.0], [9.0]]), torch.tensor([-1.0])),
    ]
    assert neumf.mlp(torch.tensor([[1.0]]), torch.tensor([[2.0]]), layers).tolist() == [[5]]


def test_eq_7_by_hand():
    """Eq. (7): logits 2 and -1 with y = 1, 0.5 with y = 0: -(ln σ(2) + ln σ(-1) + ln(1 - σ(0.5))) /
    3.
    """
    actual = neumf.cross_entropy(torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 1.0, 0.0]))
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    expected = -(math.log(sigma(2)) + math.log(sigma(-1)) + math.log(1 - sigma(0.5))) / 3
    assert actual.item() == pytest.approx(expected, rel=1e-6)


def test_eq_12_pair_by_pair(data):
    """Eq. (12): both halves from tables of their own, joined by one output vector; with every
    gradient.
    """
    state = fresh(data, SMALL)
    users, items = torch.tensor([0, 4, 11, 4]), torch.tensor([8, 0, 3, 1])
    actual, expected = neumf.logits(state, users, items), slow_logits(state, users, items)
    torch.testing.assert_close(actual, expected)
    mine = torch.autograd.grad(actual.square().sum(), state.everything())
    for gradient, other in zip(
        mine,
        torch.autograd.grad(expected.square().sum(), state.everything()),
        strict=True,
    ):
        torch.testing.assert_close(gradient, other)


def test_eq_13_by_hand():
    """Eq. (13), α = 0.25: [0.25·4; 0.75·8]."""
    a, b = neumf.joined(torch.tensor([4.0]), torch.tensor([8.0]), 0.25)
    assert (a.tolist(), b.tolist()) == ([1], [6])


# --- Reductions ---


def test_with_h_mlp_zero_it_is_gmf_and_with_h_gmf_one_it_is_matrix_factorisation(data):
    state = fresh(data, SMALL)
    with torch.no_grad():
        state.out["mlp"].zero_()
        state.out["gmf"].fill_(1)
    users = np.array([3, 0])
    expected = state.tables["gmf_users"][users] @ state.tables["gmf_items"].T
    torch.testing.assert_close(METHOD.score(state, users), expected.detach())


# --- Learning ---


@pytest.mark.parametrize("negatives", [1, 4])
def test_an_epoch_is_plain_adam_on_the_slow_equations(data, negatives):
    """Two epochs: the same instances pair by pair, Eq. (7) written with σ, autograd, and the
    unfused Adam.
    """
    config = changed(SMALL, negatives=negatives, lr=0.02)
    state, other = fresh(data, config), fresh(data, config)
    adam = torch.optim.Adam(other.everything(), lr=0.02, foreach=False, fused=False)
    losses = []
    for epoch in (1, 2):
        total, count = 0.0, 0
        for u, i, y in pointwise_epoch(data, 16, negatives, context(data, "train", epoch).rng):
            p = torch.sigmoid(slow_logits(other, u, i))
            loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
            total, count = total + loss.item() * len(u), count + len(u)
        assert count == len(data.users) * (1 + negatives)
        losses.append(total / count)
    metrics = train(state, data, range(1, 3))
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-4)
    for mine, theirs in zip(state.everything(), other.everything(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_it_learns_two_tastes():
    """Two groups of users that buy from two halves of the shelf: unseen items of one's own half
    come to score higher.
    """
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(40), 6)
    items = np.concatenate([rng.permutation(12)[:6] + 12 * (user % 2) for user in range(40)])
    data = Interactions.build(40, 24, users, items)
    state = fresh(data, Config(lr=0.02, batch_size=64, std=0.1))
    metrics = train(state, data, range(1, 16))
    scores = METHOD.score(state, np.arange(40)).numpy().copy()
    own = (np.arange(24)[None, :] // 12) == (np.arange(40)[:, None] % 2)
    scores[users, items] = np.nan
    own_half = np.nanmean(np.where(own, scores, np.nan), axis=1)
    other_half = np.nanmean(np.where(own, np.nan, scores), axis=1)
    assert (own_half > other_half + 0.5).all()
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]


def test_dropout_is_on_while_training_only(data):
    state = fresh(data, changed(SMALL, dropout=0.5))
    users, items = torch.arange(9), torch.arange(9)
    assert not torch.equal(neumf.logits(state, users, items), neumf.logits(state, users, items))
    assert torch.equal(METHOD.score(state, users.numpy()), METHOD.score(state, users.numpy()))
    torch.testing.assert_close(
        METHOD.score(state, users.numpy()).diagonal(),
        slow_logits(state, users, items).detach(),
    )


def test_weight_decay_shrinks_what_is_not_trained_on(data):
    """The last user has no instance: only decay moves its rows."""
    still, shrunk = (fresh(data, changed(SMALL, weight_decay=decay)) for decay in (0.0, 0.1))
    before = still.tables["mlp_users"][-1].detach().clone()
    train(still, data, range(1, 3))
    train(shrunk, data, range(1, 3))
    assert torch.equal(still.tables["mlp_users"][-1], before)
    assert shrunk.tables["mlp_users"][-1].norm() < before.norm()


# --- Pre-training ---


def test_each_half_is_trained_alone_and_the_other_rests(data):
    state = fresh(data, changed(SMALL, pretrain=2))
    gmf, mlp, _ = METHOD.stages(state.config)
    start = [value.detach().clone() for value in state.everything()]
    train(state, data, range(1, 3), gmf)
    after_gmf = [value.detach().clone() for value in state.everything()]
    moved = [not torch.equal(a, b) for a, b in zip(start, after_gmf, strict=True)]
    assert moved == [True, True, False, False, True, False, False, False, False, False]
    users = np.array([3, 0])
    p, q = (state.tables[f"gmf_{side}"].detach() for side in ("users", "items"))
    torch.testing.assert_close(
        METHOD.score(state, users),
        (p[users] * state.out["gmf"].detach()) @ q.T,
    )
    train(state, data, range(1, 3), mlp)
    moved = [not torch.equal(a, b) for a, b in zip(after_gmf, state.everything(), strict=True)]
    assert moved == [False, False, True, True, False, True, True, True, True, True]
    whole = slow_logits(state, torch.full((N_ITEMS,), 3), torch.arange(N_ITEMS)).detach()
    by_gmf = (p[3] * state.out["gmf"].detach()) @ q.T
    torch.testing.assert_close(METHOD.score(state, np.array([3]))[0], whole - by_gmf)


def test_join_puts_both_halves_together_and_goes_on_with_sgd(data):
    """Right after it h is [α h^GMF; (1 - α) h^MLP]; one step of plain SGD moves by lr times the
    gradient.
    """
    config = changed(SMALL, pretrain=1, alpha=0.25, lr=0.05, batch_size=1000)
    state = fresh(data, config)
    gmf, mlp, joint = METHOD.stages(config)
    train(state, data, range(1, 2), gmf)
    train(state, data, range(1, 2), mlp)
    h_gmf, h_mlp = state.out["gmf"].detach().clone(), state.out["mlp"].detach().clone()
    joint.open[0].step(state, {}, context(data, "train", 0))
    torch.testing.assert_close(state.out["gmf"], 0.25 * h_gmf)
    torch.testing.assert_close(state.out["mlp"], 0.75 * h_mlp)
    ((u, i, y),) = pointwise_epoch(data, 1000, 4, context(data, "train", 1).rng)
    loss = neumf.cross_entropy(slow_logits(state, u, i), y)
    expected = [
        v - 0.05 * g
        for v, g in zip(
            state.everything(),
            torch.autograd.grad(loss, state.everything()),
            strict=True,
        )
    ]
    train(state, data, range(1, 2), Stage("train", 1, joint.each))
    for value, wanted in zip(state.everything(), expected, strict=True):
        torch.testing.assert_close(value, wanted)


def test_without_pretraining_there_is_one_stage():
    (stage,) = METHOD.stages(Config(epochs=7, patience=3))
    assert (stage.name, stage.rounds, stage.patience, stage.open) == ("train", 7, 3, ())
    assert [s.rounds for s in METHOD.stages(Config(epochs=7, pretrain=2))] == [2, 2, 7]


def test_a_pretrained_run_resumes_in_every_stage_as_if_uninterrupted(shops, tmp_path: Path):
    config = build(
        "neumf",
        sets=["factors=4", "mlp_dim=4", "widths=[8,4]", "pretrain=2", "epochs=2", "std=0.1"],
        values={
            "data": shops, "out": tmp_path, "backend": "inprocess",
            "tracking.enabled": False, "tracking.artifacts": False,
        },
    )  # fmt: skip
    straight = run_recorded(config)

    class Stop(Exception):
        pass

    for after in (1, 3, 5):
        broken: list[Path] = []

        def stop(row: object, after: int = after) -> None:
            if row.step == after:
                raise Stop

        with pytest.raises(Stop):
            run_recorded(config, on_round=stop, started=broken.append)
        resumed = run_recorded(config, resume=broken[0])
        assert resumed.result["domains"] == straight.result["domains"]


# --- Recommendation ---


@pytest.mark.parametrize("entries", [1, 100, 2**20])
def test_scoring_in_blocks_is_eq_12_for_every_item_and_exports_the_same(data, entries):
    state = fresh(data, changed(SMALL, widths=[5, 3, 2]))
    users = np.array([5, 11, 0, 5])
    scores = METHOD.score(state, users)
    assert not scores.requires_grad
    pairs = (
        torch.from_numpy(users).repeat_interleave(N_ITEMS),
        torch.arange(N_ITEMS).repeat(len(users)),
    )
    torch.testing.assert_close(scores, slow_logits(state, *pairs).detach().view(-1, N_ITEMS))
    exported = METHOD.export(state)
    assert torch.equal(METHOD.score_exported(exported, users), scores)
    torch.testing.assert_close(neumf.score_exported(exported, users, entries), scores)


def test_no_layer_of_a_block_is_larger_than_allowed(data, monkeypatch):
    state = fresh(data, changed(SMALL, widths=[5, 3, 2]))
    sizes = []
    real = torch.addmm
    monkeypatch.setattr(
        torch,
        "addmm",
        lambda *args: sizes.append(real(*args).numel()) or real(*args),
    )
    neumf.score_exported(METHOD.export(state), np.zeros(50, np.int64), 4 * N_ITEMS * 5)
    assert len(sizes) == 1 + 2 * 13
    assert max(sizes) <= 4 * N_ITEMS * 5


# --- State ---


def test_continuing_from_a_checkpoint_equals_a_straight_run_bit_for_bit(data, tmp_path: Path):
    config = changed(SMALL, dropout=0.2)
    straight, first, second = fresh(data, config), fresh(data, config), fresh(data, config, seed=9)
    expected = train(straight, data, range(1, 5))
    train(first, data, range(1, 3))
    checkpoint.save(tmp_path / "shop", METHOD.state_dict(first))
    METHOD.load_state_dict(second, checkpoint.load(tmp_path / "shop"))
    assert torch.equal(
        METHOD.score(second, np.arange(N_USERS)),
        METHOD.score(first, np.arange(N_USERS)),
    )
    assert train(second, data, range(3, 5)) == expected[2:]
    for mine, other in zip(second.everything(), straight.everything(), strict=True):
        assert torch.equal(mine, other)
        for key, value in straight.optimizer.state[other].items():
            assert torch.equal(second.optimizer.state[mine][key], value), key


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_state_saved_in_any_stage_loads_into_a_fresh_one(data, stage, tmp_path: Path):
    config = changed(SMALL, pretrain=2)
    state, other = fresh(data, config), fresh(data, config, seed=5)
    for each in METHOD.stages(config)[: stage + 1]:
        train(state, data, range(1, 3), each)
    checkpoint.save(tmp_path / "shop", METHOD.state_dict(state))
    METHOD.load_state_dict(other, checkpoint.load(tmp_path / "shop"))
    assert other.halves == state.halves and type(other.optimizer) is type(state.optimizer)
    current = METHOD.stages(config)[stage]
    assert train(other, data, range(3, 5), current) == train(state, data, range(3, 5), current)
    for mine, wanted in zip(other.everything(), state.everything(), strict=True):
        assert torch.equal(mine, wanted)


def test_a_saved_state_does_not_move_with_training(data):
    state = fresh(data, SMALL)
    train(state, data, range(1, 2))
    saved = METHOD.state_dict(state)
    scores = METHOD.score(state, np.arange(N_USERS))
    train(state, data, range(2, 4))
    METHOD.load_state_dict(state, saved)
    assert torch.equal(METHOD.score(state, np.arange(N_USERS)), scores)


def test_initial_values(data):
    """Tables N(0, std²), all different; kernels Glorot uniform; h Glorot as one layer of both
    halves; biases 0.
    """
    big = Interactions.build(500, 300, data.users, data.items)
    state = fresh(big, Config(std=0.03))
    for name, table in state.tables.items():
        assert table.std().item() == pytest.approx(0.03, rel=0.1), name
    assert not torch.equal(state.tables["mlp_users"][:300], state.tables["mlp_items"])
    assert [tuple(weight.shape) for weight, _ in state.layers] == [(64, 32), (32, 16), (16, 8)]
    for weight, bias in state.layers:
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.9 * bound < weight.abs().max() <= bound
        assert (bias == 0).all()
    assert torch.cat([state.out["gmf"], state.out["mlp"]]).abs().max() <= (6 / 17) ** 0.5
    again, another = fresh(big, Config(std=0.03)), fresh(big, Config(std=0.03), seed=1)
    for mine, same in zip(state.everything(), again.everything(), strict=True):
        assert torch.equal(mine, same)
    assert not torch.equal(state.tables["gmf_users"], another.tables["gmf_users"])


# --- Declaration ---


def test_it_is_local_and_sends_nothing():
    assert METHOD.scope == Scope.LOCAL
    assert (METHOD.fields, METHOD.init_server) == ((), None)
    assert all(stage.local and stage.keep_best for stage in METHOD.stages(Config(pretrain=2)))


def test_presets_hold_the_papers_sizes():
    """Section 4.1: eight factors, 32 → 16 → 8; and P2P-IAGR's protocol."""
    assert (Config().factors, Config().widths, Config().negatives, Config().batch_size) == (
        8,
        (32, 16, 8),
        4,
        256,
    )
    assert build("neumf", preset="pretrained").config["pretrain"] == 20
    p2p = build("neumf", preset="p2p-iagr").config
    assert (p2p["factors"], p2p["batch_size"], p2p["weight_decay"]) == (64, 1024, 0.001)
