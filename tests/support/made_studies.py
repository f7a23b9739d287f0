"""Studies made of given trials, without running any, and what is read back from their figures."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from matplotlib.figure import Figure
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial
from rich.console import Console

TAU = CategoricalDistribution((0.1, 1.0, math.inf))


K = CategoricalDistribution((30, 50, 70))


LR = FloatDistribution(1e-4, 1e-1, log=True)


DEPTH = IntDistribution(1, 4)


def new_study(
    objectives: Sequence[str] = ("recall_at_20",),
    directions: Sequence[Any] = ("maximize",),
    storage: str | None = None,
    name: str = "first",
) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(study_name=name, directions=directions, storage=storage)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    told = {
        "method": "fedcgr",
        "data": "synthetic shops",
        "protocol": "ratio-80-10-10",
        "metric": "recall_at_20",
    }
    for key, value in {
        **told,
        "objectives": list(objectives),
        "directions": list(directions),
    }.items():
        study.set_user_attr(key, value)
    return study


def add(
    study: optuna.Study,
    status: str,
    values: float | Sequence[float] | None = None,
    params: Mapping[str, Any] | None = None,
    distributions: Mapping[str, Any] | None = None,
    **attributes: Any,
) -> None:
    """A trial as the search leaves it. A pruned one is COMPLETE in Optuna, as Ray's OptunaSearch
    tells it.
    """
    told = {"finished": {"rounds": 10}, "pruned": {"rounds": 3}}.get(status, {})
    user = {"status": status, "max_rounds": 10, **told, "seconds": 2.0, **attributes}
    vector = [float(values)] if isinstance(values, int | float) else values
    study.add_trial(
        create_trial(
            state=TrialState.FAIL if vector is None else TrialState.COMPLETE,
            values=vector,
            params=dict(params or {}),
            distributions=dict(distributions or {}),
            user_attrs=user,
        )
    )


def small() -> optuna.Study:
    """Finished 0.10 (paper), 0.30, 0.20; pruned with 0.90 and 0.05; one failed, one killed."""
    study = new_study()
    space = {"tau_a": TAU, "K": K}
    rows: list[tuple[str, float | None, float, int, dict[str, float]]] = [
        ("finished", 0.10, 1.0, 50, {"A": 0.08, "B": 0.12}),
        ("pruned", 0.90, 0.1, 30, {"A": 0.95, "B": 0.85}),
        ("finished", 0.30, math.inf, 50, {"A": 0.2, "B": 0.4}),
        ("failed", None, 0.1, 70, {}),
        ("pruned", 0.05, 0.1, 30, {"A": 0.05, "B": 0.05}),
        ("finished", 0.20, 1.0, 70, {"A": 0.1, "B": 0.3}),
        ("killed", None, 1.0, 30, {}),
    ]
    for number, (status, value, tau, k, domains) in enumerate(rows):
        told: dict[str, Any] = {
            "domains": domains,
            "run_id": f"run-{number}",
            "cpu_seconds": 4.0,
            "bytes_up": 100 * number,
        }
        if status == "failed":
            told |= {"reason": "loss | is NaN", "rounds": 4}
        add(study, status, value, {"tau_a": tau, "K": k}, space, paper=number == 0, **told)
    return study


def two(rows: Sequence[tuple[str, float, float]]) -> optuna.Study:
    """Quality up, ε down."""
    study = new_study(("recall_at_20", "epsilon"), ("maximize", "minimize"))
    for status, quality, epsilon in rows:
        add(study, status, (quality, epsilon), {"K": 50}, {"K": K}, epsilon=epsilon)
    return study


FRONT = [
    ("finished", 0.1, 1.0),
    ("finished", 0.3, 4.0),
    ("finished", 0.2, 4.0),
    ("pruned", 0.9, 0.5),
    ("finished", 0.4, 8.0),
]


def texts(figure: Figure) -> str:
    return "\n".join(
        t.get_text() for t in figure.findobj(lambda o: hasattr(o, "get_text")) if t.get_text()
    )


def printed(renderable: Any, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def random_study(
    trials: int, objective: Any, space: Mapping[str, Any], seed: int = 0, pruned: bool = False
) -> optuna.Study:
    study = new_study()
    rng = np.random.default_rng(seed)
    for number in range(trials):
        params: dict[str, Any] = {}
        for name, kind in space.items():
            if isinstance(kind, CategoricalDistribution):
                params[name] = kind.choices[rng.integers(len(kind.choices))]
            elif isinstance(kind, IntDistribution):
                params[name] = int(rng.integers(kind.low, kind.high + 1))
            else:
                params[name] = float(kind.low * (kind.high / kind.low) ** rng.random())
        add(
            study,
            "pruned" if pruned and number % 2 else "finished",
            objective(params),
            params,
            space,
        )
    return study
