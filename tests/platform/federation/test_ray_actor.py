"""A node in a process of its own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from crossfed.platform.federation import ray_actor


def test_an_actor_is_made_of_a_module_that_imports_no_torch() -> None:
    """Else its process could not answer before torch is there."""
    import subprocess
    import sys

    script = (
        "import sys, crossfed.platform.federation.ray_actor\n"
        "print([name for name in ('torch', 'mlflow', 'pandas', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_payload_for_several_receivers_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[dict[str, np.ndarray]] = []

    def put(payload: dict[str, np.ndarray]) -> int:
        stored.append(payload)
        return len(stored)

    monkeypatch.setattr("ray.put", put)
    same, other = {"x": np.zeros(3)}, {"x": np.ones(3)}
    assert ray_actor._put({"books": same, "films": same, "games": other}) == {
        "books": 1, "films": 1, "games": 2,
    }  # fmt: skip
    assert len(stored) == 2 and stored[1]["x"].tolist() == [1, 1, 1]


def test_an_inbox_is_fetched_at_once_and_keeps_its_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr("ray.get", lambda refs: asked.append(refs) or [{"x": 10 * r} for r in refs])
    assert ray_actor._fetch({"films": 2, "books": 1}) == {"films": {"x": 20}, "books": {"x": 10}}
    assert asked == [[2, 1]]


def test_an_actor_that_was_cleared_holds_no_node() -> None:
    actor = ray_actor.NodeActor()
    actor.node = SimpleNamespace(double=lambda value: 2 * value)  # type: ignore[assignment]
    assert actor.call("double", 21) == 42
    actor.clear()
    assert not hasattr(actor, "node")
