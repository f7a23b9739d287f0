"""Popularity: what is counted, and what the saved model says."""

import numpy as np
import pytest
import torch

from crossfed.methods.pop import METHOD, Config, popularity
from crossfed.platform.method import Context, Interactions, Scope, generators


def context(data: Interactions) -> Context:
    rng, torch_rng = generators(0, "count", 1, "shop")
    return Context("shop", "count", 1, (), rng, torch_rng, torch.device("cpu"), data)


@pytest.fixture
def data() -> Interactions:
    """Item 0 is everybody's and old, item 2 is bought late, item 3 never; user 0 has item 1
    twice."""
    users, items = np.array([0, 1, 2, 0, 0, 1, 2]), np.array([0, 0, 0, 1, 1, 2, 2])
    return Interactions.build(3, 4, users, items, np.array([1, 2, 3, 4, 5, 6, 7]))


def test_eq_1_counts_users_by_item(data):
    """Eq. (1) by hand: three users have item 0, one has item 1 (twice), two have item 2, none has
    item 3."""
    assert popularity(data, 1.0).tolist() == [3, 1, 2, 0]


def test_eq_1_counts_the_latest_only(data):
    """Eq. (1) over the latest ⌈.5·7⌉ = 4: user 0's item 1 (twice), item 2 by users 1 and 2."""
    assert popularity(data, 0.5).tolist() == [0, 1, 2, 0]
    assert popularity(data, 0.01).sum() == 1


def test_every_user_gets_the_same_and_the_saved_model_agrees(data):
    state = METHOD.init_domain(Config(), context(data))
    (stage,) = METHOD.stages(Config())
    assert not METHOD.score(state, np.array([0])).any()
    stage.each[0].step(state, {}, context(data))
    scores = METHOD.score(state, np.array([2, 0]))
    assert scores.tolist() == [[3, 1, 2, 0]] * 2
    assert torch.equal(METHOD.score_exported(METHOD.export(state), np.array([2, 0])), scores)
    fresh = METHOD.init_domain(Config(), context(data))
    METHOD.load_state_dict(fresh, METHOD.state_dict(state))
    assert torch.equal(METHOD.score(fresh, np.array([1])), scores[:1])
    with pytest.raises(ValueError, match="3 items for a domain of 4"):
        METHOD.load_state_dict(fresh, {"counts": torch.zeros(3)})


def test_it_is_local_of_one_round_and_draws_nothing():
    (stage,) = METHOD.stages(Config())
    assert (
        METHOD.scope == Scope.LOCAL and METHOD.deterministic and stage.rounds == 1 and stage.local
    )
