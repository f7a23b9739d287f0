"""The generator's equations by hand and by slow versions; padding, empty histories, instances,
caches, shared semantic IDs.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from crossfed.methods.parts.generative import (
    GenerativeLearner,
    Generator,
    GeneratorConfig,
    item_embedding,
    log_probabilities,
    queries,
    recommend_exported,
    sample_memories,
    schedule,
    sid_loss,
)
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import Context, Interactions, generators

C, LEVELS, ITEMS, USERS = 4, 3, 15, 20
SMALL = {
    "levels": LEVELS,
    "codebook": C,
    "dim": 8,
    "heads": 2,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "inner": 8,
    "decoder_inner": 8,
    "length": 5,
    "dropout": 0.0,
    "batch_size": 16,
}


def shop(items: np.ndarray) -> Interactions:
    """Histories of equal length in time order, [users, length]."""
    users = np.repeat(np.arange(len(items)), items.shape[1])
    return Interactions.build(len(items), ITEMS, users, items.ravel(), np.arange(items.size))


@pytest.fixture
def data() -> Interactions:
    rng = np.random.default_rng(0)
    return shop(np.stack([rng.permutation(ITEMS)[:8] for _ in range(USERS)]))


@pytest.fixture
def sids() -> np.ndarray:
    """15 items on 14 leaves: item 9 has the semantic ID of item 2."""
    paths = np.random.default_rng(1).permutation(C**LEVELS)[:ITEMS]
    found = np.stack(np.unravel_index(paths, (C,) * LEVELS), axis=1)
    found[9] = found[2]
    return found


def context(data: Interactions, sids: np.ndarray, round: int = 0) -> Context:
    rng, torch_rng = generators(0, "train", round, "shop")
    torch.manual_seed(round)
    return Context(
        "shop", "train", round, (), rng, torch_rng, torch.device("cpu"), data, {"sids": sids}
    )


def learner(
    data: Interactions, sids: np.ndarray, std: float = 1.0, **sets: object
) -> GenerativeLearner:
    """With weights wide enough for the codes' probabilities to differ."""
    config, ctx = GeneratorConfig.model_validate({**SMALL, **sets}), context(data, sids)
    net = Generator(config, ctx.torch_rng)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std, generator=ctx.torch_rng)
    return GenerativeLearner(config, ctx, net)


def test_eq_8_an_item_is_the_sum_of_its_codes_embeddings() -> None:
    """Eq. (8), first term, one code after the other; with fewer codes than levels the sum is
    shorter.
    """
    tokens = torch.randn(LEVELS, C, 5)
    codes = torch.randint(C, (2, 3, LEVELS))
    found = item_embedding(tokens, codes)
    assert found.shape == (2, 3, 5)
    for i, j in itertools.product(range(2), range(3)):
        expected = sum(tokens[level, codes[i, j, level]] for level in range(LEVELS))
        torch.testing.assert_close(found[i, j], expected)
    torch.testing.assert_close(
        item_embedding(tokens, codes[..., :1])[1, 2], tokens[0, codes[1, 2, 0]]
    )


def test_eq_9_the_lead_comes_first_and_positions_count_from_the_last_item(
    data: Interactions, sids: np.ndarray
) -> None:
    """Eq. (8) and Eq. (9) by hand: X = [lead; Σ_l E_l + P_1 + r; Σ_l E_l + P_0 + r; padding] for a
    history of two.
    """
    net = learner(data, sids).net
    codes, residual = torch.from_numpy(sids[[3, 7, 0]])[None], torch.randn(1, 3, 8)
    x, real = net.embed(codes, torch.tensor([2]), residual)
    items = [
        sum(net.tokens[level, sids[item, level]] for level in range(LEVELS)) for item in (3, 7)
    ]
    torch.testing.assert_close(x[0, 0], net.lead[0])
    torch.testing.assert_close(x[0, 1], items[0] + net.positions[1] + residual[0, 0])
    torch.testing.assert_close(x[0, 2], items[1] + net.positions[0] + residual[0, 1])
    assert real.tolist() == [[True, True, True, False]]


def test_eq_21_a_query_is_the_start_or_the_sum_of_codes_plus_its_level() -> None:
    """Eq. (21): q_1 = e_sos + level 1, q_3 = E_1(c_1) + E_2(c_2) + level 3."""
    tokens, start, levels = torch.randn(LEVELS, C, 5), torch.randn(1, 5), torch.randn(LEVELS, 5)
    first = queries(tokens, start, levels, torch.zeros(2, 3, 0, dtype=torch.int64))
    torch.testing.assert_close(first, (start + levels[0]).expand(2, 3, 5))
    third = queries(tokens, start, levels, torch.tensor([[[1, 3]]]))
    torch.testing.assert_close(third[0, 0], tokens[0, 1] + tokens[1, 3] + levels[2])


def test_eq_22_is_a_softmax_of_the_levels_head() -> None:
    """Eq. (22): exp(w_c · q + b_c) / Σ over all codes."""
    head, q = torch.nn.Linear(5, C), torch.randn(5)
    mass = [float(((head.weight[c] * q).sum() + head.bias[c]).exp().detach()) for c in range(C)]
    found = log_probabilities(q[None], head).exp()[0]
    torch.testing.assert_close(found, torch.tensor([m / sum(mass) for m in mass]))


def test_every_level_has_its_own_head_and_query(data: Interactions, sids: np.ndarray) -> None:
    """Teacher forcing and stepwise decoding agree at every level."""
    state = learner(data, sids)
    memory = state.encode(data, np.array([0, 8]), np.array([4, 2]))
    codes = state.sids[[6, 11]]
    for level, told in enumerate(state.net.target_codes(memory, codes)):
        step = state.net.next_codes(memory, codes[:, None, :level])
        torch.testing.assert_close(told, step[:, 0])
    assert not torch.allclose(state.net.heads[0].weight, state.net.heads[1].weight)


def test_eq_23_is_the_mean_smoothed_cross_entropy() -> None:
    """Eq. (23): without smoothing -1/L Σ_l log p of the target; with it torch's own, level by
    level.
    """
    logits = [torch.randn(6, C) for _ in range(LEVELS)]
    codes = torch.randint(C, (6, LEVELS))
    log_p = [some.log_softmax(1) for some in logits]
    plain = -np.mean(
        [float(log_p[level][i, codes[i, level]]) for level in range(LEVELS) for i in range(6)]
    )
    assert float(sid_loss(log_p, codes, 0.0)) == pytest.approx(plain, rel=1e-6)
    smooth = torch.stack(
        [
            F.cross_entropy(some, codes[:, level], label_smoothing=0.1)
            for level, some in enumerate(logits)
        ]
    )
    torch.testing.assert_close(sid_loss(log_p, codes, 0.1), smooth.mean())


def test_eq_3_all_semantic_ids_share_the_probability_of_one(
    data: Interactions, sids: np.ndarray
) -> None:
    """Eq. (3): Σ over all C^L paths of Π_l p(c_l | c before) is 1, and an item's score is the
    logarithm of its product.
    """
    state = learner(data, sids, beam=None)
    memory = state.encode(data, data.indptr[[4]] + 3, np.array([5]))
    product = {}
    for path in itertools.product(range(C), repeat=LEVELS):
        p = 1.0
        for level, code in enumerate(path):
            prefix = torch.tensor(path[:level], dtype=torch.int64).view(1, 1, level)
            p *= float(state.net.next_codes(memory, prefix)[0, 0, code].exp().detach())
        product[path] = p
    assert sum(product.values()) == pytest.approx(1, abs=1e-5)
    scores = state.score(np.array([4]))[0]
    expected = [product[tuple(path)] for path in sids.tolist()]
    np.testing.assert_allclose(scores.exp().numpy(), expected, rtol=1e-4)
    assert scores.std() > 0.5


def test_items_that_share_a_semantic_id_come_by_training_popularity(sids: np.ndarray) -> None:
    """Items 2 and 9 share one: the more frequent comes first, and by less than any other
    difference.
    """
    for often, seldom in ((2, 9), (9, 2)):
        items = np.array([[often, 1, 3], [often, 4, 5], [seldom, 6, 7]])
        scores = learner(shop(items), sids, beam=None).score(np.array([0, 2]))
        assert (scores[:, often] > scores[:, seldom]).all()
        torch.testing.assert_close(scores[:, often], scores[:, seldom], rtol=1e-9, atol=0)


def test_padding_and_neighbours_in_a_batch_do_not_matter(
    data: Interactions, sids: np.ndarray
) -> None:
    state = learner(data, sids)
    together = state.encode(data, np.array([0, 8, 16]), np.array([1, 5, 3]))
    for row, (start, count) in enumerate([(0, 1), (8, 5), (16, 3)]):
        alone = state.encode(data, np.array([start]), np.array([count]))
        torch.testing.assert_close(together.states[row, : count + 1], alone.states[0])
        torch.testing.assert_close(together.pooled()[row], alone.pooled()[0])
        prefix = torch.tensor([[[1]]])
        step = state.net.next_codes(together, prefix.expand(3, -1, -1))
        torch.testing.assert_close(step[row], state.net.next_codes(alone, prefix)[0])


def test_pooling_leaves_the_lead_and_padding_out(data: Interactions, sids: np.ndarray) -> None:
    memory = learner(data, sids).encode(data, np.array([0, 8]), np.array([2, 4]))
    torch.testing.assert_close(memory.pooled()[0], (memory.states[0, 1] + memory.states[0, 2]) / 2)
    torch.testing.assert_close(memory.pooled()[1], memory.states[1, 1:5].mean(0))


def test_a_user_without_history_gets_finite_scores(sids: np.ndarray) -> None:
    data = Interactions.build(3, ITEMS, np.array([1, 1, 1]), np.array([4, 2, 7]))
    for beam in (None, 50):
        state = learner(data, sids, beam=beam)
        scores = state.score(np.array([0, 1, 2]))
        assert scores.isfinite().all()
        assert torch.equal(scores[0], scores[2]) and not torch.equal(scores[0], scores[1])
    nobody = Interactions.build(2, ITEMS, np.array([], np.int64), np.array([], np.int64))
    state.observe(nobody)
    assert state.score(np.array([1])).isfinite().all()
    assert sample_memories(state, nobody, 4, np.random.default_rng(0)) is None


def test_a_wide_beam_scores_like_all_items_and_a_narrow_one_the_best(
    data: Interactions, sids: np.ndarray
) -> None:
    everyone = np.arange(USERS)
    exact = learner(data, sids, beam=None).score(everyone)
    torch.testing.assert_close(learner(data, sids, beam=50).score(everyone), exact)
    narrow = learner(data, sids, beam=6).score(everyone)
    found = narrow > -torch.inf
    assert ((found.sum(1) >= 6) & (found.sum(1) <= 7)).all(), (
        "six leaves, one of which holds two items"
    )
    torch.testing.assert_close(narrow[found], exact[found])


def test_scores_come_in_the_order_asked_and_are_kept_until_something_changes(
    data: Interactions, sids: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = learner(data, sids)
    whole = state.score(np.arange(USERS))
    again = learner(data, sids)
    some = again.score(np.array([7, 0, 7, 19]))
    torch.testing.assert_close(some, whole[[7, 0, 7, 19]])
    asked: list[np.ndarray] = []
    search = again._search
    monkeypatch.setattr(again, "_search", lambda users: asked.append(users) or search(users))
    again.score(np.array([19, 3]))
    assert [users.tolist() for users in asked] == [[3]]
    swapped = data.items.copy()
    swapped[[6, 7]] = swapped[[7, 6]]
    again.observe(Interactions.build(USERS, ITEMS, data.users, swapped, data.times))
    other = again.score(np.arange(USERS))
    assert not torch.allclose(other[0], whole[0])
    torch.testing.assert_close(other[1:], whole[1:])


def test_what_is_exported_scores_the_same_and_holds_no_history(
    data: Interactions, sids: np.ndarray
) -> None:
    for beam, width in ((None, 14), (4, 4)):
        state, users = learner(data, sids, beam=beam), np.array([5, 0])
        exported = state.export()
        assert {name: tuple(value.shape) for name, value in exported.items()} == {
            "leaves": (USERS, width), "scores": (USERS, width), "leaf": (ITEMS,), "place": (ITEMS,)
        }  # fmt: skip
        torch.testing.assert_close(recommend_exported(exported, users), state.score(users))


def test_every_item_but_the_first_is_a_target_once_with_what_came_before_it(
    data: Interactions, sids: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = learner(data, sids)
    seen: list[tuple[int, tuple[int, ...]]] = []
    encode, losses = state.encode, state.losses
    last: list[list[tuple[int, ...]]] = []

    def look(some: Interactions, start: np.ndarray, count: np.ndarray) -> object:
        last.append(
            [tuple(some.items[s : s + n].tolist()) for s, n in zip(start, count, strict=True)]
        )
        return encode(some, start, count)

    def note(memory: object, target: torch.Tensor) -> object:
        seen.extend(zip(target.tolist(), last[-1], strict=True))
        return losses(memory, target)  # type: ignore[arg-type]

    monkeypatch.setattr(state, "encode", look)
    monkeypatch.setattr(state, "losses", note)
    state.train(context(data, sids), epochs=2)
    rows = data.items.reshape(USERS, 8).tolist()
    expected = [(row[at], tuple(row[max(0, at - 5) : at])) for row in rows for at in range(1, 8)]
    assert sorted(seen) == sorted(expected * 2)


def test_it_learns_what_follows_what(sids: np.ndarray) -> None:
    """Item i is always followed by i + 1 modulo 8; with weights as they start, 40 epochs are enough
    to know it.
    """
    data = shop((np.arange(24)[:, None] + np.arange(6)) % 8)
    config, ctx = (
        GeneratorConfig.model_validate({**SMALL, "dim": 16, "lr": 0.02, "smoothing": 0.0}),
        context(data, sids),
    )
    state = GenerativeLearner(config, ctx, Generator(config, ctx.torch_rng))
    first, *_, last = [state.train(context(data, sids, r))["loss_sid"] for r in range(1, 31)]
    assert last < 0.1 * first
    best = state.score(np.arange(24)).argmax(1)
    assert (best.numpy() == (np.arange(24) + 6) % 8).mean() > 0.9


def test_rate_clip_and_penalty_are_used(data: Interactions, sids: np.ndarray) -> None:
    """Without rate nothing moves; a penalty is one more term, told as its mean; a tiny clip leaves
    Adam's steps alone but not plain gradients."""
    state = learner(data, sids)
    before = [p.detach().clone() for p in state.net.parameters()]
    told = state.train(context(data, sids), scale=0.0, penalty=lambda: torch.tensor(3.0))
    assert told["penalty"] == pytest.approx(3.0)
    assert all(torch.equal(p, q) for p, q in zip(state.net.parameters(), before, strict=True))
    for clip in (0.01, 1e9):
        some = learner(data, sids, clip=clip)
        some.train(context(data, sids), scale=0.0)
        norm = torch.stack([p.grad.norm() for p in some.net.parameters()]).norm()
        assert (float(norm) <= 0.0101) == (clip == 0.01)


def test_a_diverged_training_is_told(data: Interactions, sids: np.ndarray) -> None:
    state = learner(data, sids)
    with pytest.raises(
        CrossfedError, match="shop: training has diverged in train, round 3: penalty is not finite"
    ):
        state.train(context(data, sids, 3), penalty=lambda: torch.tensor(torch.inf))


def test_the_learning_rate_rises_and_falls() -> None:
    """5 of 40 rounds up; the first round after them is still at the top half, the last one above
    zero, and none rises.
    """
    rates = [schedule(round, 40, 5) for round in range(1, 41)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[22] == pytest.approx(0.5, abs=1e-9), (
        "half way down: round 23 is 18 of 36 steps after round 5"
    )
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
    assert 0 < rates[-1] < 0.01
    assert schedule(1, 1, 0) == pytest.approx(0.5)


def test_a_sample_of_memories_is_drawn_without_replacement(
    data: Interactions, sids: np.ndarray
) -> None:
    state = learner(data, sids)
    state.net.train()
    few = sample_memories(state, data, 6, np.random.default_rng(0))
    every = sample_memories(state, data, 999, np.random.default_rng(0))
    assert few is not None and every is not None
    assert (len(few.states), len(every.states)) == (6, USERS)
    assert len(every.pooled().unique(dim=0)) == USERS
    assert not few.states.requires_grad and state.net.training


def test_the_initial_deviation_of_embeddings_is_a_setting_and_touches_nothing_else() -> None:
    """Not in the paper; beside a layer norm of length √dim it decides how much an item's codes
    weigh at the start.
    """
    config = GeneratorConfig.model_validate(SMALL | {"dim": 64, "heads": 2, "codebook": 64})

    def made(std: float) -> dict[str, torch.Tensor]:
        net = Generator(
            config.model_copy(update={"embedding_std": std}), torch.Generator().manual_seed(0)
        )
        return {name: value.detach() for name, value in net.named_parameters()}

    small, large = made(0.02), made(1.0)
    assert float(small["tokens"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(large["tokens"].std()) == pytest.approx(1.0, rel=0.05)
    scaled = {name for name in small if not torch.equal(small[name], large[name])}
    assert scaled == {"tokens", "positions", "lead", "start", "level_embeddings"}
    for name in scaled:
        torch.testing.assert_close(large[name], small[name] * 50)
