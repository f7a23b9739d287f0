"""Transformer parts against loops over positions and heads, and cases solved by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from crossfed.methods.parts import transformer
from crossfed.methods.parts.transformer import (
    Attention,
    Block,
    Dropout,
    FeedForward,
    Residual,
    attend,
    dropout,
    initialise,
)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


def slow_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen) -> torch.Tensor:
    """One query at a time; seen(t, s) tells whether query t sees key s."""
    rows = []
    for t in range(len(q)):
        keys = [s for s in range(len(k)) if seen(t, s)]
        weight = [torch.exp((q[t] @ k[s]) / math.sqrt(q.shape[1])) for s in keys]
        rows.append(sum(w / sum(weight) * v[s] for w, s in zip(weight, keys, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_attend_is_the_weighted_mean_of_seen_values(rate, monkeypatch):
    """Both paths, the fused one and the one that drops weights, which here drops none."""
    monkeypatch.setattr(transformer, "dropout", lambda x, *_: x)
    q, k, v = drawn(5, 4), drawn(6, 4), drawn(6, 3)
    mask = torch.tensor([[(t + s) % 3 != 0 for s in range(6)] for t in range(5)])
    for kwargs, seen in (
        ({}, lambda t, s: True),
        ({"mask": mask}, lambda t, s: bool(mask[t, s])),
    ):
        torch.testing.assert_close(
            attend(q, k, v, rate=rate, **kwargs), slow_attention(q, k, v, seen)
        )
    q = k[:, :]
    actual = attend(q, k, v, causal=True, rate=rate)
    torch.testing.assert_close(actual, slow_attention(q, k, v, lambda t, s: s <= t))


def test_attend_by_hand():
    """d = 4, one query (2, 0, 0, 0), keys with first entries 0 and ln 3: weights 1/4 and 3/4 of
    values 0 and 8: 6.
    """
    q = torch.tensor([[2.0, 0, 0, 0]])
    k = torch.tensor([[0.0, 5, 5, 5], [math.log(3), 1, 2, 3]])
    torch.testing.assert_close(attend(q, k, torch.tensor([[0.0], [8.0]])), torch.tensor([[6.0]]))


def test_attention_splits_into_heads_of_consecutive_columns():
    """Two heads of width 3: head h uses columns 3h … 3h + 2 of the projections; the joined heads
    are projected once.
    """
    layer = Attention(6, 2, 0.0).double()
    x, memory = drawn(2, 4, 6), drawn(2, 5, 6)
    actual = layer(x, memory)
    for b in range(2):
        heads = []
        for h in range(2):
            part = slice(3 * h, 3 * h + 3)
            q, k, v = (
                layer.query(x[b])[:, part],
                layer.key(memory[b])[:, part],
                layer.value(memory[b])[:, part],
            )
            heads.append(slow_attention(q, k, v, lambda t, s: True))
        torch.testing.assert_close(actual[b], layer.out(torch.cat(heads, 1)))


def test_attention_drops_weights_only_while_training():
    layer = Attention(4, 1, 0.5)
    x = torch.randn(2, 6, 4)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_attention_refuses_heads_that_do_not_divide_the_width():
    with pytest.raises(ValueError, match="dim 6 is not a multiple of heads 4"):
        Attention(6, 4, 0.0)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_feed_forward(activation):
    layer = FeedForward(3, 5, activation).double()
    x = drawn(2, 4, 3)
    hidden = x @ layer.inner.weight.T + layer.inner.bias
    hidden = (
        hidden.clamp(min=0)
        if activation == "relu"
        else hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    )
    torch.testing.assert_close(layer(x), hidden @ layer.outer.weight.T + layer.outer.bias)


def slow_norm(x: torch.Tensor, norm: torch.nn.LayerNorm) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return (
        norm.weight * centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-8)
        + norm.bias
    )


def test_residual_normalises_before_or_after():
    x = drawn(2, 3, 4)
    for placement in ("pre", "post"):
        step = Residual(4, 0.0, placement).double()
        torch.nn.init.normal_(step.norm.weight)
        torch.nn.init.normal_(step.norm.bias)
        expected = (
            x + slow_norm(x, step.norm) ** 2
            if placement == "pre"
            else slow_norm(x + x**2, step.norm)
        )
        torch.testing.assert_close(step(x, torch.square), expected)


def test_a_block_is_its_steps_in_order():
    block = Block(4, 2, 6, 0.0, "post", "gelu", cross=True).double()
    x, memory = drawn(2, 3, 4), drawn(2, 5, 4)
    mask = torch.tensor([[True, True, False, True, False]])
    y = slow_norm(x + block.attention(x, causal=True), block.around_attention.norm)
    y = slow_norm(y + block.cross(y, memory, mask=mask), block.around_cross.norm)
    y = slow_norm(y + block.feed(y), block.around_feed.norm)
    torch.testing.assert_close(block(x, causal=True, memory=memory, memory_mask=mask), y)


def test_with_causal_attention_nothing_later_is_seen():
    block = Block(4, 2, 8, 0.0, "pre", "relu")
    x = torch.randn(1, 6, 4)
    other = x.clone()
    other[0, 4, 0] += 1  # one coordinate: a shift of all would vanish in the layer norm
    before, after = block(x, causal=True), block(other, causal=True)
    assert torch.equal(before[0, :4], after[0, :4])
    assert not torch.equal(before[0, 4], after[0, 4]) and not torch.equal(before[0, 5], after[0, 5])


def test_dropout_keeps_the_mean_and_the_rate():
    torch.manual_seed(0)
    x = torch.ones(400_001)
    for rate in (0.1, 0.5, 0.85):
        y = dropout(x, rate, True)
        kept = y != 0
        assert kept.float().mean().item() == pytest.approx(1 - rate, abs=4e-3)
        assert y[kept].unique().tolist() == pytest.approx([1 / (1 - rate)], rel=1e-4)
    # four entries share a draw, and are independent
    pairs = (dropout(x, 0.5, True) != 0)[:400_000].view(-1, 4)
    for i in range(4):
        for j in range(i):
            assert (pairs[:, i] & pairs[:, j]).float().mean().item() == pytest.approx(
                0.25, abs=8e-3
            )


def test_dropout_passes_gradients_where_it_passes_values():
    x = torch.randn(7, 5, requires_grad=True)
    y = dropout(x, 0.4, True)
    y.sum().backward()
    kept = y != 0
    assert 0 < kept.sum() < 35
    torch.testing.assert_close(y, x * kept / 0.6, rtol=1e-4, atol=0)
    torch.testing.assert_close(x.grad, kept / 0.6, rtol=1e-4, atol=0)


def test_dropout_follows_torchs_generator_and_rests_in_evaluation():
    x, layer = torch.randn(9, 3), Dropout(0.3)
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first) and not torch.equal(first, second)
    assert dropout(x, 0.0, True) is x
    assert layer.eval()(x) is x


def test_initialise():
    block = Block(32, 2, 200, 0.0, "pre", "relu")
    initialise(block, 0.02, torch.Generator().manual_seed(3))
    assert block.feed.inner.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.feed.inner.bias.abs().max() == 0 and block.attention.query.bias.abs().max() == 0
    assert (block.around_feed.norm.weight == 1).all()
    again = Block(32, 2, 200, 0.0, "pre", "relu")
    initialise(again, 0.02, torch.Generator().manual_seed(3))
    assert all(
        torch.equal(a, b) for a, b in zip(block.parameters(), again.parameters(), strict=True)
    )


def test_the_fused_path_is_torchs_own(monkeypatch):
    """Without dropout the fused kernel runs; with it on the CPU it does not, since torch's dropout
    is the slow part.
    """
    calls = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    layer = Attention(4, 1, 0.5)
    layer(torch.randn(1, 3, 4))
    assert not calls
    layer.eval()(torch.randn(1, 3, 4))
    assert calls
