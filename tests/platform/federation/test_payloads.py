"""The gate that every message passes, the copies that are delivered, and random numbers that belong
to one place each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import toys
from crossfed.platform.config.settings import build
from crossfed.platform.errors import CrossfedError, LeakError
from crossfed.platform.federation.node import InProcess, Plan
from crossfed.platform.federation.payloads import (
    Entry,
    Gate,
    check_declarations,
    check_metrics,
    check_told,
    freeze,
)
from crossfed.platform.method import SERVER, Direction, Field, Stage

STAGE = Stage("s", 1, (), edges=toys.STAR)


def gate(field: Field, node: str = SERVER) -> Gate:
    method = replace(toys.AVERAGE, fields=(field,))
    return Gate(
        method,
        toys.Config(),
        node,
        {SERVER: 0, "books": 30, "films": 25},
        None if node == SERVER else 40,
    )


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


FORGED = {
    "shape": (
        {"x": np.zeros((40, 3), np.float32)},
        r"'x' has shape \(40, 3\), declared "
        r"\('dim',\) = \(3,\)",
    ),
    "type": ({"x": np.zeros(3)}, "'x' has dtype float64, declared float32"),
    "object": ({"x": np.array([{}, 1, "a"], dtype=object)}, "'x' has dtype object"),
    "byte order": ({"x": np.zeros(3, ">f4")}, "'x' has dtype >f4"),
    "NaN": ({"x": np.array([0, np.nan, 0], np.float32)}, "'x' holds NaN or Inf"),
    "infinite": ({"x": np.array([0, -np.inf, 0], np.float32)}, "'x' holds NaN or Inf"),
    "undeclared": ({"users": np.zeros(3, np.float32)}, "'users' is not declared for direction up"),
    "list": ({"x": [0.0, 0.0, 0.0]}, "'x' is a list, not a NumPy array"),
    "path": ({"../../x": np.zeros(3, np.float32)}, r"'\.\./\.\./x' is no name"),
    "number": ({7: np.zeros(3, np.float32)}, "'7' is no name"),
    "pickled": (b"\x80\x04K*.", "a bytes is no payload"),
    "huge": ({"x": np.broadcast_to(np.float32(0), (2**31, 2**20))}, "'x' has shape"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_receiver_does_not_take_the_senders_word(kind: str) -> None:
    """What a sender's own check should have refused is refused before the receiver's step sees
    it.
    """
    payload, words = FORGED[kind]
    server = gate(Field("x", Direction.UP, ("dim",), "x"))
    with pytest.raises(LeakError, match=rf"^books → server: .*{words}.*it was not read"):
        server.receive(STAGE, {"films": {"x": np.zeros(3, np.float32)}, "books": payload})
    assert server.receive(STAGE, {"books": {"x": np.zeros(3, np.float32)}}) is None


def test_a_node_checks_its_inbox_before_its_step(shops: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    config = build("toys:AVERAGE", values={"data": shops, "out": tmp_path, "backend": "inprocess"})
    nodes = InProcess()
    nodes.start(Plan(config, shops, ("books", "films"), tmp_path, tmp_path / "cache"), {})
    good, bad = np.ones(3, np.float32), np.full(3, np.nan, np.float32)
    with pytest.raises(LeakError, match="films → server: payload key 'x' holds NaN"):
        nodes.run_phase(0, "each", 1, 1, {SERVER: {"books": {"x": good}, "films": {"x": bad}}})
    with pytest.raises(LeakError, match="books tried to send to films"):
        nodes.run_phase(0, "each", 2, 1, {"films": {"books": {"x": good}}})
    with pytest.raises(LeakError, match="evil tried to send to 'server'"):
        nodes.run_phase(0, "each", 1, 1, {SERVER: {"evil": {"x": good}}})
    nodes.stop()


def test_a_message_without_a_declared_shape_has_a_limit() -> None:
    """The array takes four bytes of memory and claims 4 GiB: it is refused by its size, before its
    values are looked at.
    """
    huge = np.broadcast_to(np.float32(0), (2**30,))
    shared = gate(Field("w", Direction.UP, None, "parameters"), "books")
    words = (
        r"books → server: the message holds 4,294,967,296 bytes \(most of them in payload "
        r"key 'w'\), more than the"
    )
    with pytest.raises(LeakError, match=words + " 1,073,741,824 "):
        shared.check(STAGE, 1, {SERVER: {"w": huge}})
    small = Gate(shared.method, toys.Config(), "books", shared.nodes, 40, max_bytes=12)
    assert small.check(STAGE, 1, {SERVER: {"w": np.zeros(3, np.float32)}})[0].bytes == 12
    with pytest.raises(LeakError, match=r"holds 16 bytes .* more than the 12 that it may have"):
        small.check(STAGE, 1, {SERVER: {"w": np.zeros(4, np.float32)}})


def test_a_wildcard_key_is_a_name_and_its_messages_have_a_limit() -> None:
    shared = gate(Field("part/*", Direction.UP, (2,), "parameters"), "books")
    assert (
        len(shared.check(STAGE, 1, {SERVER: {"part/layers.0.weight": np.zeros(2, np.float32)}}))
        == 1
    )
    for key in ("part/../../secret", "part/a b", "part/\n", "part/" + "x" * 200):
        with pytest.raises(LeakError, match="is no name; it was not sent"):
            shared.check(STAGE, 1, {SERVER: {key: np.zeros(2, np.float32)}})


def test_rows_of_users_are_known_to_the_sender_only() -> None:
    """A receiver cannot know how many users a sender has; it takes that axis as it is, and no
    other.
    """
    field = Field("rows", Direction.UP, ("n_users", "dim"), "rows of users")
    sender, server = gate(field, "books"), gate(field)
    right, wrong = np.zeros((40, 3), np.float32), np.zeros((41, 3), np.float32)
    assert (
        sender.check(STAGE, 1, {SERVER: {"rows": right}})
        and server.receive(STAGE, {"books": {"rows": right}}) is None
    )
    with pytest.raises(LeakError, match=r"has shape \(41, 3\)"):
        sender.check(STAGE, 1, {SERVER: {"rows": wrong}})
    with pytest.raises(LeakError, match=r"has shape \(40, 2\)"):
        server.receive(STAGE, {"books": {"rows": right[:, :2]}})


def test_a_node_that_tells_other_than_it_hands_over() -> None:
    row = Entry("s", 1, "books", SERVER, "up", "x", (3,), "float32", 12)
    nodes = (SERVER, "books", "films")
    check_told(STAGE, "books", nodes, [SERVER], [row])
    for receivers, rows in (
        (["films"], []),  # outside the edges
        (["../films"], []),
        (["books"], []),
        ([], [row]),  # a row without its message
        ([SERVER], [replace(row, sender="films")]),
        ([SERVER], [replace(row, bytes=-12)]),
        ([SERVER], [replace(row, shape=(-3,), bytes=-12)]),
        ([SERVER], [replace(row, shape=(300,))]),
    ):
        with pytest.raises(LeakError, match=r"^books "):
            check_told(STAGE, "books", nodes, receivers, rows)


def test_metrics_are_a_few_named_numbers() -> None:
    assert check_metrics("books", {"loss_rec": np.float32(0.5), "n": torch.tensor(2)}) == {
        "loss_rec": 0.5,
        "n": 2.0,
    }
    for metrics in ({"user 7": 1.0}, {"loss": np.zeros(40)}, {"loss": "low"}, {"loss": 10**400}, [1.0], {7: 1.0},  # noqa: E501
                    {f"u{number}": 1.0 for number in range(257)}):  # fmt: skip
        with pytest.raises(LeakError, match=r"^books: (the metrics|metric )"):
            check_metrics("books", metrics)  # type: ignore[arg-type]


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
