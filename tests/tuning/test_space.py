"""The declared search space: read, changed, checked against the Config, sampled by a real Optuna study."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from crossfed.platform.seam import CrossfedError
from crossfed.tuning.space import Choice, Range, sample, space


def test_fedcrf_declares_the_papers_grid() -> None:
    found = space("fedcrf")
    assert found["K"] == Choice(values=(30, 40, 50, 60, 70))  # §4.5
    assert {"K", "alpha", "lambda_kd", "lambda_fa"} <= set(found)


def test_changes_replace_extend_and_remove() -> None:
    found = space("lightgcn", {"lr": {"low": 1e-4, "high": 1e-1, "log": True}, "layers": None, "dim": {"values": [8]}})
    assert found["lr"] == Range(low=1e-4, high=1e-1, log=True)
    assert "layers" not in found and found["dim"] == Choice(values=(8,))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"K": {"value": [1]}}, "neither"),
        ({"K": {"low": 5, "high": 2, "int": True}}, "neither"),
        ({"lr": {"low": 0, "high": 1, "log": True}}, "neither"),
        ({"KK": {"values": [3]}}, "unknown key 'KK'; did you mean K"),
        ({"K": {"values": [50, 0]}}, "K = 0 is not possible"),
    ],
)
def test_a_wrong_entry_is_named(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(CrossfedError, match=words):
        space("fedcrf", entry)


def test_samples_stay_inside_and_repeat_with_the_sampler_seed() -> None:
    found = space(
        "lightgcn", {"lr": {"low": 1e-4, "high": 1e-1, "log": True}, "layers": {"low": 1, "high": 4, "int": True}}
    )

    def draw() -> list[dict[str, Any]]:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
        points = []
        for _ in range(20):
            trial = study.ask()
            points.append(sample(found, trial, {}))
            study.tell(trial, 0.0)
        return points

    points = draw()
    assert points == draw()
    assert all(1e-4 <= point["lr"] <= 1e-1 and point["layers"] in (1, 2, 3, 4) for point in points)
    assert len({point["lr"] for point in points}) == 20
