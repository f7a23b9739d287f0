"""InfoNCE over two views against loops; CL4SRec's network and learner against SASRec's."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from crossfed.methods.parts import contrast
from crossfed.methods.parts.augmentation import two_views
from crossfed.methods.parts.contrast import (
    MaskedNextItem,
    ViewsConfig,
    ViewsLearner,
    at_end,
    last_outputs,
    two_view_nce,
)
from crossfed.methods.parts.next_item import Learner, NextItem, NextItemConfig
from crossfed.methods.parts.sequences import batches, padded, windows
from crossfed.platform.method import Context, Interactions, generators

SIZES = {"dim": 8, "heads": 2, "inner": 12, "length": 6, "batch_size": 8}


def shop(n_users: int = 30, n_items: int = 15) -> Interactions:
    rng = np.random.default_rng(0)
    items = np.concatenate([rng.permutation(n_items)[:8] for _ in range(n_users)])
    users = np.repeat(np.arange(n_users), 8)
    return Interactions.build(n_users, n_items, users, items, np.arange(len(items)))


def context(data: Interactions, round: int = 1, seed: int = 0) -> Context:
    rng, torch_rng = generators(seed, "train", round, "shop")
    torch.manual_seed(round)
    return Context("shop", "train", round, (), rng, torch_rng, torch.device("cpu"), data)


# --- Eq. (2) ---


def slow_nce(a, b, tau, cosine):
    rows = [*a, *b]
    if cosine:
        rows = [row / row.norm() for row in rows]
    total = 0.0
    for i, row in enumerate(rows):
        partner = (i + len(a)) % len(rows)
        every = [math.exp(row @ other / tau) for j, other in enumerate(rows) if j != i]
        total -= math.log(math.exp(row @ rows[partner] / tau) / sum(every))
    return total / len(rows)


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_eq_2_against_loops(tau, cosine):
    """Eq. (2): positive the other view, candidates all 2n - 1 others, the mean over 2n rows."""
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    expected = slow_nce(a, b, tau, cosine)
    assert two_view_nce(a, b, tau, cosine).item() == pytest.approx(expected, rel=1e-9)


def test_eq_2_by_hand():
    """a = (1), (0); b = (2), (0): rows 1, 0, 2, 0 and partners 3, 4, 1, 2.

    Row 1 has products 0, 2, 0, row 2 and row 4 zeros, row 3 has 2, 0, 0.
    """
    loss = two_view_nce(torch.tensor([[1.0], [0]]), torch.tensor([[2.0], [0]]), 1.0)
    peak = -math.log(math.exp(2) / (math.exp(2) + 2))
    assert loss.item() == pytest.approx((2 * peak + 2 * math.log(3)) / 4, rel=1e-6)


def test_eq_2_limits():
    """Rows that cannot be told apart: ln(2n - 1). One sequence: 0. Views may change places."""
    same = torch.ones(6, 3)
    assert two_view_nce(same, same, 0.3).item() == pytest.approx(math.log(11), rel=1e-6)
    assert two_view_nce(same[:1], -same[:1], 1.0).item() == 0
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(two_view_nce(a, b, 0.7), two_view_nce(b, a, 0.7))
    torch.testing.assert_close(two_view_nce(a, b, 0.7, True), two_view_nce(5 * a, b, 0.7, True))
    assert abs(two_view_nce(a, b, 0.7) - two_view_nce(5 * a, b, 0.7)) > 1e-3


def test_eq_2_has_finite_gradients():
    a = torch.randn(4, 3, requires_grad=True)
    two_view_nce(a, a * 2, 0.05).backward()
    assert torch.isfinite(a.grad).all() and (a.grad != 0).any()


# --- Network ---


def network(kind, **sets):
    config = ViewsConfig.model_validate({**SIZES, "dropout": 0.0, **sets})
    return kind(15, config, torch.Generator().manual_seed(3))


def test_the_masks_vector_is_drawn_after_all_others():
    net, plain = network(MaskedNextItem), network(NextItem)
    names = [{name for name, _ in each.named_parameters()} for each in (net, plain)]
    assert names[0] - names[1] == {"mask"}
    assert all(torch.equal(p, net.get_parameter(name)) for name, p in plain.named_parameters())
    assert net.mask.std() > 0


def test_the_mask_is_input_number_n_items():
    net, plain = network(MaskedNextItem), network(NextItem)
    items, count = torch.tensor([[3, 15, 7], [14, 0, 0]]), torch.tensor([3, 1])
    rows = net.rows(items)
    assert torch.equal(rows[0, 1], net.mask)
    assert torch.equal(rows[0, [0, 2]], net.items[[3, 7]])
    assert torch.equal(rows[1, 0], net.items[14])
    visible = torch.tensor([[3, 4, 7], [14, 0, 0]])
    assert torch.equal(net(visible, count), plain(visible, count))
    assert not torch.equal(net(items, count), plain(visible, count))


@pytest.mark.parametrize("groups", [1, 2, 9])
@pytest.mark.parametrize("positions", ["start", "end"])
def test_last_outputs_are_those_of_each_sequence_alone(positions, groups):
    net = network(MaskedNextItem, positions=positions)
    items, count = np.array([[3, 15, 7], [14, 0, 0], [2, 5, 0]]), np.array([3, 1, 2])
    together = last_outputs(net, items, count, groups)
    for row, n in enumerate(count):
        alone = net(torch.from_numpy(items[row : row + 1, :n]), torch.tensor([n]))[0, -1]
        torch.testing.assert_close(together[row], alone)
    outputs = net(torch.from_numpy(items), torch.from_numpy(count))
    torch.testing.assert_close(at_end(outputs, torch.from_numpy(count)), together)


# --- Learning ---


def learner(kind, data, **sets):
    config = ViewsConfig if kind is ViewsLearner else NextItemConfig
    return kind(config.model_validate({**SIZES, **sets}), context(data, 0))


def test_without_weight_it_is_sasrec_bit_for_bit():
    """λ = 0: the same losses, parameters and scores as SASRec's learner, dropout included."""
    data = shop()
    one, plain = learner(ViewsLearner, data, lambda_=0.0), learner(Learner, data)
    for r in (1, 2, 3):
        assert one.train(context(data, r)) == plain.train(context(data, r))
    for name, parameter in plain.net.named_parameters():
        assert torch.equal(parameter, one.net.get_parameter(name))
    assert torch.equal(one.score(np.arange(30)), plain.score(np.arange(30)))


def test_the_batches_are_sasrecs():
    """Views are drawn from a generator of their own: the first batch's loss is that of SASRec."""
    data = shop()
    sets = {"batch_size": 1000, "dropout": 0.0}
    one, plain = learner(ViewsLearner, data, **sets), learner(Learner, data, **sets)
    metrics = one.train(context(data))
    assert metrics["loss"] == plain.train(context(data))["loss"] and metrics["contrast"] > 0


def test_an_epoch_is_plain_adam_on_both_losses():
    """The same windows, batches and views, one sequence at a time, with torch's own losses."""
    data = shop()
    sets = {"dropout": 0.0, "lambda_": 0.3, "tau": 0.7, "lr": 0.01, "cut": "all"}
    state = learner(ViewsLearner, data, **sets)
    state.net.double()  # a key's bias has no gradient but rounding, which Adam would enlarge
    plain = learner(ViewsLearner, data, **sets).net.double()
    adam = torch.optim.Adam(plain.parameters(), lr=0.01)
    rng = context(data).rng
    (view_rng,) = rng.spawn(1)
    pieces = windows(data, 6, "all", rng)
    main, extra, seen = 0.0, 0.0, 0
    for rows in batches(pieces.count, 8, rng):
        start, count = pieces.start[rows], pieces.count[rows]
        views, sizes = two_views(
            padded(data.items, start, count), count, ("crop", "mask", "reorder"), (0.6, 0.3, 0.6),
            15, view_rng,
        )  # fmt: skip
        parts = []
        for s, n in zip(start, count, strict=True):
            inputs = torch.from_numpy(data.items[s : s + n][None])
            targets = torch.from_numpy(data.items[s + 1 : s + n + 1])
            logits = plain(inputs, torch.tensor([n]))[0] @ plain.items.T
            parts.append(F.cross_entropy(logits, targets, reduction="none"))
        ends = [
            plain(torch.from_numpy(view[None, :n]), torch.tensor([n]))[0, -1]
            for view, n in zip(views, sizes, strict=True)
        ]
        b = len(rows)
        total = torch.zeros(())
        for i, row in enumerate(ends):
            logits = torch.stack([row @ other / 0.7 for other in ends])
            rest = torch.cat([logits[:i], logits[i + 1 :]]).logsumexp(0)
            total = total + rest - logits[(i + b) % (2 * b)]
        first, second = torch.cat(parts).mean(), 0.3 * total / (2 * b)
        adam.zero_grad()
        (first + second).backward()
        adam.step()
        n = len(torch.cat(parts))
        main, extra, seen = main + first.item() * n, extra + second.item() * n, seen + n
    metrics = state.train(context(data))
    assert metrics["loss"] == pytest.approx(main / seen, rel=1e-5)
    assert metrics["contrast"] == pytest.approx(extra / seen, rel=1e-5)
    for name, parameter in plain.named_parameters():
        actual = state.net.get_parameter(name)
        torch.testing.assert_close(actual, parameter, rtol=1e-5, atol=1e-7, msg=name)


def test_sequences_are_unchanged_after_batches_of_views():
    """Public code has written views into the training data."""
    data = shop()
    for array in (data.items, data.users, data.indptr):
        array.flags.writeable = False
    before = data.items.copy()
    learner(ViewsLearner, data).train(context(data))
    assert np.array_equal(data.items, before)


def test_views_change_from_epoch_to_epoch(monkeypatch):
    data = shop()
    state = learner(ViewsLearner, data, batch_size=1000)
    made = []
    real = two_views

    def look(items, count, *args):
        views = real(items, count, *args)
        made.append(views[0])
        return views

    monkeypatch.setattr(contrast, "two_views", look)
    state.train(context(data, 1))
    state.train(context(data, 2))
    assert len(made) == 2 and not np.array_equal(*made)


def test_the_contrast_gathers_the_views_of_a_sequence():
    """After training, views of one history are closer to each other than under λ = 0."""
    data = shop()

    def nce(lambda_: float) -> float:
        state = learner(ViewsLearner, data, lambda_=lambda_, lr=0.01, dropout=0.1)
        for r in range(1, 9):
            state.train(context(data, r))
        state.net.eval()
        start, count = data.indptr[:-1], np.full(30, 6)
        views = two_views(
            padded(data.items, start, count), count, ("crop", "mask", "reorder"), (0.6, 0.3, 0.6),
            15, np.random.default_rng(5),
        )  # fmt: skip
        with torch.no_grad():
            return two_view_nce(*last_outputs(state.net, *views).chunk(2), 1.0).item()

    assert nce(1.0) < nce(0.0) - 1


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"operators": ()}, "at least 1 item"),
        ({"operators": ("crop", "crop")}, "an operator is named twice"),
        ({"operators": ("swap",)}, "Input should be 'crop', 'mask' or 'reorder'"),
        ({"eta": 0.0}, "greater than 0"),
        ({"tau": 0.0}, "greater than 0"),
    ],
)
def test_what_makes_no_views_is_refused(sets, message):
    with pytest.raises(ValueError, match=message):
        ViewsConfig.model_validate(sets)
