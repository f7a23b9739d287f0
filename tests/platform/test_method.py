"""What a method sees: settings that refuse what they cannot mean, interactions in order, and random
numbers that depend on their place alone.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import Field, ValidationError

from crossfed.platform.method import (
    RANKING,
    Context,
    Interactions,
    MethodConfig,
    Release,
    Stage,
    generators,
    inner_product,
    noise_generator,
    ranking_keys,
    stream,
)


class Config(MethodConfig):
    K: int = 3
    tau: float = 0.5
    flag: bool = False
    top: int = Field(5, json_schema_extra=RANKING)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"k": 3}, "Extra inputs are not permitted"),
        ({"K": True}, "true or false where a number or a word is wanted"),
        ({"K": 2**31}, "whole numbers go up to 2147483647"),
        ({"tau": float("nan")}, "finite number"),
        ({"tau": float("inf")}, "finite number"),
    ],
)
def test_settings_refuse_what_they_cannot_mean(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Config(**values)


def test_settings_are_frozen_their_defaults_checked_and_ranking_keys_marked() -> None:
    config = Config(flag=True)
    with pytest.raises(ValidationError, match="frozen"):
        config.K = 4

    class Wrong(MethodConfig):
        K: int = Field(0, ge=1)

    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Wrong()
    assert ranking_keys(Config) == ("top",)


def test_interactions_are_sorted_by_user_then_time_and_ties_stay() -> None:
    """User 1 saw item 7 first, then 9 and 8 at one time in the order given; user 2 saw nothing."""
    held = Interactions.build(4, 10, [1, 3, 1, 1, 0], [9, 1, 8, 7, 2], [5, 0, 5, 1, 3])
    assert held.indptr.tolist() == [0, 1, 4, 4, 5]
    assert held.items.tolist() == [2, 7, 9, 8, 1] and held.times.tolist() == [3, 1, 5, 5, 0]
    assert held.users.tolist() == [0, 1, 1, 1, 3] and held.users.dtype == np.int64


def test_a_server_has_no_interactions_of_its_own() -> None:
    rng, torch_rng = generators(0, "init")
    server = Context("server", "init", 0, (), rng, torch_rng, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="node server holds no interactions"):
        server.own  # noqa: B018
    held = Interactions.build(1, 1, [0], [0])
    assert replace(server, data=held).own is held


def test_a_place_in_a_run_draws_the_same_in_every_process_and_like_no_other() -> None:
    places = [
        (0, "train", 1, "a"),
        (0, "train", 1, "b"),
        (0, "train", 2, "a"),
        (1, "train", 1, "a"),
    ]
    drawn = {place: tuple(stream(*place).generate_state(4).tolist()) for place in places}
    assert len(set(drawn.values())) == len(places)
    script = (
        "from crossfed.platform.method import stream\n"
        "print(stream(0, 'train', 1, 'a').generate_state(4).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == str(list(drawn[places[0]]))
    for one, other in zip(generators(*places[0]), generators(*places[0]), strict=True):
        draw = torch.rand if isinstance(one, torch.Generator) else None
        pair = (
            [draw(4, generator=one).tolist(), draw(4, generator=other).tolist()]
            if draw
            else [one.random(4).tolist(), other.random(4).tolist()]
        )
        assert pair[0] == pair[1]


def test_noise_cannot_be_drawn_again_unless_a_seed_says_so() -> None:
    assert noise_generator().random() != noise_generator().random()
    assert noise_generator(3, "a", 1).random() == noise_generator(3, "a", 1).random()
    assert noise_generator(3, "a", 1).random() != noise_generator(3, "a", 2).random()
    rng, _ = generators(3, "a", 1)
    assert noise_generator(3, "a", 1).random() != rng.random(), "noise has a stream of its own"


def test_the_loss_of_one_release() -> None:
    laplace = Release(
        "train", ("x",), "laplace", "a user", sensitivity=3.0, scale=1.5, per_round_epsilon=2
    )
    assert (laplace.epsilon, laplace.norm) == (2.0, "L1")
    gaussian = replace(laplace, mechanism="gaussian")
    assert gaussian.epsilon == float("inf") and gaussian.norm == "L2", "no δ = 0 for a Gaussian"


def test_a_stage_without_edges_is_local() -> None:
    assert Stage("train", 3, ()).local
    assert not Stage("train", 3, (), edges=frozenset({"up"})).local  # type: ignore[arg-type]


def test_scores_are_inner_products_of_the_users_asked_for() -> None:
    exported = {
        "users": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "items": torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
    }
    assert inner_product(exported, np.array([1, 0])).tolist() == [[3.0, 4.0, 7.0], [1.0, 2.0, 3.0]]
