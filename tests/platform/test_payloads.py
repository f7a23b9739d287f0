"""The gate that every message passes, the copies that are delivered, and random numbers that belong to one place each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import toys
from crossfed.platform.config import build
from crossfed.platform.nodes import InProcess, Plan
from crossfed.platform.payloads import Gate, check_declarations, freeze
from crossfed.platform.seam import SERVER, CrossfedError, Direction, Field, LeakError, Stage

STAGE = Stage("s", 1, (), edges=toys.STAR)


def gate(field: Field, node: str = SERVER) -> Gate:
    method = replace(toys.AVERAGE, fields=(field,))
    return Gate(method, toys.Config(), node, {SERVER: 0, "books": 30, "films": 25}, None if node == SERVER else 40)


def test_values_below_zero_are_refused() -> None:
    labels = gate(Field("labels", Direction.DOWN, (2,), "labels", dtype="int64", high="K"))
    with pytest.raises(LeakError, match="outside 0 … 1"):
        labels.check(STAGE, 1, {"books": {"labels": np.array([0, -1])}})


def test_a_key_declared_for_the_other_direction_is_refused() -> None:
    down = gate(Field("x", Direction.DOWN, ("dim",), "x"), "books")
    with pytest.raises(LeakError, match="not declared for direction up"):
        down.check(STAGE, 1, {SERVER: {"x": np.zeros(3, np.float32)}})


def test_an_axis_as_long_as_the_users_is_allowed_where_the_configuration_names_it() -> None:
    shared = gate(Field("w", Direction.UP, None, "parameters"), "books")
    with pytest.raises(LeakError, match="as long as the domain has users"):
        shared.check(STAGE, 1, {SERVER: {"w": np.zeros((40, 2), np.float32)}})
    named = Gate(shared.method, toys.Config(dim=40), "books", shared.nodes, 40)
    assert len(named.check(STAGE, 1, {SERVER: {"w": np.zeros((40, 2), np.float32)}})) == 1


def test_the_server_cannot_declare_rows_of_users() -> None:
    method = replace(toys.AVERAGE, fields=(Field("x", Direction.DOWN, ("n_users",), "x"),))
    with pytest.raises(CrossfedError, match="the server cannot know"):
        check_declarations(method, toys.Config())


def test_what_is_delivered_is_a_copy() -> None:
    sent = np.zeros(3)
    got = freeze({"x": sent})["x"]
    sent += 1
    assert got.tolist() == [0, 0, 0] and not got.flags.writeable


def test_every_place_has_its_own_random_numbers(shops: Path, tmp_path: Path) -> None:
    """Stage, round, part, phase and node each change all three generators that a step may use."""
    (tmp_path / "config.yaml").touch()
    config = build("toys:AVERAGE", values={"data": shops, "out": tmp_path, "backend": "inprocess"})
    nodes, drawn = InProcess(), []
    nodes.start(Plan(config, shops, ("books", "films"), tmp_path, tmp_path / "cache"), {})
    for place in (
        ("a", 1, "each", 0),
        ("b", 1, "each", 0),
        ("a", 2, "each", 0),
        ("a", 1, "open", 0),
        ("a", 1, "each", 1),
    ):
        for node in nodes.nodes.values():
            ctx = node._context(*place)
            own = torch.rand(1, generator=ctx.torch_rng, dtype=torch.float64)
            drawn += [ctx.rng.random(), float(own), float(torch.rand(1, dtype=torch.float64))]
    nodes.stop()
    assert len(set(drawn)) == len(drawn) == 45
