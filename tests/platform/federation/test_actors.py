"""How the driver waits for its nodes: who is late, who is silent, whose error is told. Ray and the
clock are stood in for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from crossfed.platform.config.settings import Resources, build
from crossfed.platform.console import make_progress
from crossfed.platform.errors import CrossfedError, LeakError
from crossfed.platform.federation import actors as ray_nodes
from crossfed.platform.federation.node import NodeLost
from crossfed.platform.report.recording import run_recorded


@dataclass(eq=False)
class Answer:
    """A reference whose value is there after so many seconds."""

    after: float
    value: Any = None


@dataclass
class World:
    """Ray's `wait` and `get`, and a clock that only waiting moves."""

    now: float = 0.0
    asked: list[str] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def wait(self, refs: list[Answer], timeout: float) -> tuple[list[Answer], list[Answer]]:
        first = min(ref.after for ref in refs)
        self.now = max(self.now, min(first, self.now + timeout))
        ready = [ref for ref in refs if ref.after <= self.now]
        return ready[:1], [ref for ref in refs if ref not in ready[:1]]

    def get(self, ref: Answer) -> Any:
        assert ref.after <= self.now, "asked for what is not there"
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value


class Actor:
    """Shows a sign of life `delay` seconds after it was asked, or what `value` holds."""

    def __init__(self, world: World, delay: float = 0.0, value: Any = None):
        self.world, self.delay, self.value = world, delay, value
        self.alive = self

    def remote(self) -> Answer:
        self.world.asked.append("alive")
        return Answer(self.world.now + self.delay, self.value)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    for name in ("wait", "get"):
        monkeypatch.setattr(ray_nodes.ray, name, getattr(made, name))
    monkeypatch.setattr(ray_nodes.time, "monotonic", made.monotonic)
    return made


def nodes(actors: dict[str, Actor], seconds: float, heartbeat: float = 0.0) -> ray_nodes.RayNodes:
    made = object.__new__(ray_nodes.RayNodes)
    made.actors, made.heartbeat = actors, heartbeat  # type: ignore[assignment]
    made.deadline(seconds, "round 3 of stage mean")
    return made


def raised(error: Exception) -> RayTaskError:
    return RayTaskError("step", "trace", error)


def test_results_come_by_name_whoever_is_first(world: World) -> None:
    found = nodes({}, 10)._collect({"books": Answer(3, "b"), "films": Answer(1, "f")})
    assert list(found.items()) == [("books", "b"), ("films", "f")]
    assert world.now == 3


def test_the_late_are_named_with_the_seconds_of_the_others(world: World) -> None:
    refs = {"books": Answer(99), "films": Answer(1.25), "games": Answer(99)}
    with pytest.raises(
        NodeLost,
        match=r"^books, games had no answer 10 s after round 3 of stage mean began "
        r".*films 1\.2 s$",
    ):
        nodes({}, 10)._collect(refs)
    assert world.now == 10


def test_the_deadline_counts_from_the_beginning_of_the_round(world: World) -> None:
    """Two calls of 6 s in a round of 10: the second is late after 4 more."""
    placed = nodes({}, 10)
    placed._collect({"books": Answer(6)})
    with pytest.raises(NodeLost, match="books had no answer 10 s after round 3"):
        placed._collect({"books": Answer(12)})
    placed.deadline(10, "round 4")
    assert placed._collect({"books": Answer(19, "b")}) == {"books": "b"}


def test_a_dead_node_is_seen_while_another_is_still_at_work(world: World) -> None:
    refs = {"books": Answer(500), "films": Answer(2, ActorDiedError())}
    with pytest.raises(NodeLost, match="films was lost"):
        nodes({}, 1000)._collect(refs)
    assert world.now == 2


def test_a_process_that_is_silent_is_lost_long_before_the_deadline(world: World) -> None:
    actors = {
        "server": Actor(world),
        "books": Actor(world, delay=1e9),
        "films": Actor(world, delay=3),
    }
    with pytest.raises(NodeLost, match=r"books was lost: its process has not answered for \d+ s"):
        nodes(actors, 10_000, heartbeat=60)._collect({"films": Answer(9000)})
    assert 60 < world.now <= 60 + 2 * 10


def test_a_slow_step_of_a_process_that_answers_is_waited_for(world: World) -> None:
    found = nodes({"books": Actor(world, delay=20)}, 10_000, heartbeat=60)._collect(
        {"books": Answer(9000, "b")}
    )
    assert found == {"books": "b"} and len(world.asked) > 100


def test_a_sign_of_life_that_says_the_actor_is_dead(world: World) -> None:
    actors = {"books": Actor(world, value=ActorDiedError())}
    with pytest.raises(NodeLost, match="books was lost"):
        nodes(actors, 10_000, heartbeat=60)._collect({"books": Answer(9000)})


def test_of_several_errors_the_first_nodes_is_told(world: World) -> None:
    """films is faster, books is named first: the same sentence every time."""
    refs = {
        "books": Answer(3, raised(LeakError("books leaks"))),
        "films": Answer(1, raised(LeakError("films leaks"))),
        "games": Answer(9000),
    }
    with pytest.raises(LeakError, match="books leaks"):
        nodes({}, 10_000)._collect(refs)
    assert world.now <= 1 + ray_nodes.GRACE, "games is not waited for"


def test_a_lost_message_and_a_full_store_are_told_as_such(world: World) -> None:
    from ray.exceptions import ObjectStoreFullError, OwnerDiedError

    with pytest.raises(NodeLost, match="a message to books was lost"):
        nodes({}, 10)._collect({"books": Answer(1, raised(OwnerDiedError("ab", None, "owner")))})
    with pytest.raises(
        CrossfedError,
        match=r"books could not keep its messages: .*larger "
        r"object store",
    ):
        nodes({}, 10)._collect({"books": Answer(2, raised(ObjectStoreFullError("full")))})


@pytest.mark.parametrize(
    ("restarting", "losses", "tried"), [(True, 3, 4), (False, 3, 1), (True, 1000, 32)]
)
def test_a_start_that_makes_a_loss_good_goes_on_until_ray_has_noticed_it(
    world: World, monkeypatch: pytest.MonkeyPatch, restarting: bool, losses: int, tried: int
) -> None:
    """Ray places actors on a machine that is gone until it misses it; that is the same loss, not
    another one.
    """
    builds: list[bool] = []

    def build(_plan: object, _say: object) -> None:
        builds.append(made.restarting)
        if len(builds) <= losses:
            raise NodeLost("books was lost")

    made = nodes({}, 10)
    made.restarting = restarting
    for name, value in {
        "_build": build,
        "stop": lambda: None,
        "each": lambda call, args: {},
    }.items():
        monkeypatch.setattr(made, name, value)
    monkeypatch.setattr(
        ray_nodes.time, "sleep", lambda seconds: setattr(world, "now", world.now + seconds)
    )
    plan = SimpleNamespace(config=SimpleNamespace(resources=Resources(start_timeout=30)))
    if losses >= tried:
        with pytest.raises(NodeLost):
            made.start(plan, {})  # type: ignore[arg-type]
    else:
        made.start(plan, {})  # type: ignore[arg-type]
    assert len(builds) == tried


# -- starting --------------------------------------------------------------------------------------


def start(
    world: World, actors: dict[str, Actor], refs: dict[str, Answer], limit: float = 120
) -> dict[str, Any]:
    placed = nodes({}, 21_600)
    return placed._collect(refs, ray_nodes._Starting(actors, limit))


def test_a_start_that_shows_life_is_waited_for(world: World) -> None:
    """All import torch for ten minutes, and answer meanwhile: five times the time-out."""
    actors = {"server": Actor(world), "books": Actor(world, delay=30)}
    assert start(world, actors, {"server": Answer(600, 1), "books": Answer(650, 2)}) == {
        "server": 1,
        "books": 2,
    }


def test_processes_that_start_one_after_the_other_are_waited_for(world: World) -> None:
    """The last one first answers after 300 s; until then the others were still at it."""
    actors = {"server": Actor(world), "books": Actor(world), "films": Actor(world, delay=300)}
    refs = {"server": Answer(100, 1), "books": Answer(250, 2), "films": Answer(320, 3)}
    assert start(world, actors, refs) == {"server": 1, "books": 2, "films": 3}


def test_a_start_without_a_sign_of_life_ends_with_advice(world: World) -> None:
    """The server is up, answers, and proves nothing for books; the clock runs from when it came
    up.
    """
    actors = {"server": Actor(world), "books": Actor(world, delay=1e9)}
    with pytest.raises(
        CrossfedError,
        match=r"^books did not start: no sign of life for 1[2-4]\d s "
        r"\(resources\.start_timeout=120\).* busy, wait .*"
        r"--concurrent.* --set resources\.start_timeout=240\.$",
    ):
        start(world, actors, {"server": Answer(50), "books": Answer(1e9)})
    assert 170 <= world.now <= 190


def test_a_run_says_what_it_waits_for_before_its_first_round(
    ray_cluster: None, shops: Path, tmp_path: Path
) -> None:
    view, notes = make_progress("quiet"), []
    view.note = notes.append  # type: ignore[method-assign]
    values = {"data": shops, "out": tmp_path, "tracking.enabled": False}
    run_recorded(build("toys:AVERAGE", sets=["rounds=1"], values=values), view=view)
    told = [line.split("  ")[0] for line in notes]
    assert told[:3] == ["actors", "actors", "begins"], notes
    assert notes[0] == "actors     4 processes start and import torch: server, books, films, games"
    assert notes[1].endswith("each loads its data")
    assert notes[2] == "begins     round 1 of 1 of stage mean; a line follows when it is over"
