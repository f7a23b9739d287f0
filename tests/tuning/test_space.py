"""The declared search space: read, changed, checked against the Config, sampled by a real Optuna
study.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from crossfed.platform.config.settings import build, declared_search
from crossfed.platform.errors import CrossfedError
from crossfed.tuning.space import Choice, Range, changes, sample, space, with_first


def test_fedcrf_declares_the_papers_grid() -> None:
    found = space("fedcrf")
    assert found["K"] == Choice(values=(30, 40, 50, 60, 70))  # §4.5
    assert {"K", "alpha", "lambda_kd", "lambda_fa"} <= set(found)


def test_changes_replace_extend_and_remove() -> None:
    found = space(
        "lightgcn",
        {"lr": {"low": 1e-4, "high": 1e-1, "log": True}, "layers": None, "dim": {"values": [8]}},
    )
    assert found["lr"] == Range(low=1e-4, high=1e-1, log=True)
    assert "layers" not in found and found["dim"] == Choice(values=(8,))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"K": {"value": [1]}}, "K: {'value': .* is neither"),
        ({"K": 5}, "K: 5 is neither"),
        ({"K": {"low": 5, "high": 2, "int": True}}, "K: .*low must lie below high"),
        ({"lr": {"low": 0, "high": 1, "log": True}}, "lr: .*above 0 on a log scale"),
        ({"lr": {"low": float("nan"), "high": 1}}, "lr: .*low must lie below high"),
        ({"lr": {"low": 0.001, "high": float("inf")}}, "lr = inf is not possible"),
        ({"lr": {"low": 0.1}}, "lr: high is missing"),
        ({"K": {"low": 30, "high": 70, "int": True, "step": 10}}, "K: unknown key 'step'"),
        ({"K": {"low": 30, "high": 70.5, "int": True}}, "K: .*must be whole numbers"),
        ({"K": {"low": 30, "high": 70}}, "K takes whole numbers only; add int: true"),
        ({"ablation": {"low": 0, "high": 1}}, "ablation = 0.0 is not possible"),
        ({"KK": {"values": [3]}}, "unknown key 'KK'; did you mean K"),
        ({"KK": None}, "KK is not searched and cannot be taken out; did you mean K"),
        ({"K": {"values": [50, 0]}}, "K = 0 is not possible"),
        ({"lr": {"values": [0.1], "when": {"KK": [1]}}}, "unknown key 'KK'"),
        ({"lr": {"values": [0.1], "when": {"K": 30}}}, "lr: when.K = 30 is not possible"),
        (
            {"lr": {"values": [0.1], "when": {"dim": [9]}}},
            "lr would never be searched: dim is never 9, only 64",
        ),
        (
            {"lr": {"values": [0.1], "when": {"K": [31, 32]}}},
            "lr would never be searched: K is never 31 or 32, only 30",
        ),
    ],
)
def test_a_wrong_entry_is_named(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(CrossfedError, match=words):
        space("fedcrf", entry)


def test_values_are_those_the_config_keeps() -> None:
    changes = {"K": ["40", 50.0, 50], "lr": {"values": [1], "when": {"K": ["40"]}}}
    found = space("fedcrf", changes)
    assert found["K"] == Choice(values=(40, 50))
    assert found["lr"] == Choice(values=(1.0,), when={"K": (40,)})


def test_values_are_checked_beside_those_of_the_run() -> None:
    """A width that the heads do not divide: refused where the heads are fixed, left to the trials
    where they are searched too.
    """
    declared = dict.fromkeys(declared_search("tiger"))
    base = build("tiger", sets=["dim=60", "heads=3"]).config
    assert space("tiger", declared | {"heads": [3, 5]}, base)["heads"] == Choice(values=(3, 5))
    with pytest.raises(CrossfedError, match="heads"):
        space("tiger", declared | {"heads": [3, 7]}, base)
    assert space("tiger", declared | {"heads": [3, 7], "dim": [60, 63]}, base)["heads"] == Choice(
        values=(3, 7)
    )


def test_changes_are_read_from_words_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("search:\n  lr: [1e-3, 0.01]\n  K: null\n")
    assert changes(file, [" lr = {low: 1e-4, high: 1e-2}"]) == {
        "lr": {"low": 1e-4, "high": 1e-2},
        "K": None,
    }
    for entries, words in [
        (["lr"], "must read"), (["lr="], "must read"), (["=[1]"], "must read"), (["lr=["], r"^--search: '\[' is not a value"),  # noqa: E501
        (["lr=[1]", "lr=[2]"], "names lr twice"),
    ]:  # fmt: skip
        with pytest.raises(CrossfedError, match=words) as caught:
            changes(None, entries)
        assert "\n" not in str(caught.value)
    for text, words in [
        ("", "must map names"),
        ("- 1", "must map names"),
        ("a: [", "cannot be read"),
    ]:
        file.write_text(text)
        with pytest.raises(CrossfedError, match=words):
            changes(file, [])


@pytest.mark.parametrize("value", [None, 7])
def test_a_first_value_outside_a_range_is_told(value: int | None) -> None:
    with pytest.raises(
        CrossfedError,
        match=f"patience={'null' if value is None else 7}, the value of the first trial",
    ):
        with_first({"patience": Range(low=1, high=5, int=True)}, {"patience": value})


def test_samples_stay_inside_and_repeat_with_the_sampler_seed() -> None:
    found = space(
        "lightgcn",
        {
            "lr": {"low": 1e-4, "high": 1e-1, "log": True},
            "layers": {"low": 1, "high": 4, "int": True},
        },
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
