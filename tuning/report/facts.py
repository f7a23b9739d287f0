"""What a study holds, read once: trials by what truly happened to them, the best, the Pareto front,
the importance.

Everything is read from an `optuna.Study` and the attributes that the search leaves in it.

Study: `method`, `data`, `protocol`, `metric` (the validation metric, e.g. "recall_at_20"),
`objectives` (names in the order of the study's directions: the metric, which is its mean over
domains, "worst", "domain:NAME", "epsilon", "bytes"). Trial: `status`, `rounds`, `max_rounds`,
`seconds`, `cpu_seconds`, `gpu_seconds`, `run_id`, `reason`, `domains` (domain -> the metric at the
selected round), `paper` (the paper's setting), `bytes_up`, `epsilon`.

Optuna's own state says little: a trial that the scheduler stopped is COMPLETE there, with the value
it had reached. What happened is in `status`. Only *finished* trials, which no scheduler stopped,
can be best or lie on the Pareto front; *pruned* trials are kept apart from them.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import optuna

from crossfed.platform.console import number, size
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report.tables import pretty

Status = Literal["finished", "pruned", "failed", "killed", "running", "waiting", "unknown"]
STATUSES: tuple[Status, ...] = (
    "finished",
    "pruned",
    "failed",
    "killed",
    "running",
    "waiting",
    "unknown",
)
"""What a trial can have come to, in the order of the tables."""

ENOUGH_FOR_IMPORTANCE = 8
"""Below so many scored trials, no importance is given. Random studies of four parameters, two of
which mattered: with 8 trials the first named was one of the two in 19 of 20 studies; that the first
two were both right took about 32 trials (14 of 20)."""

_EVALUATOR: dict[str, Any] = {
    "target_quantile": 0.25,
    "region_quantile": 1.0,
    "evaluate_on_local": True,
}
"""PED-ANOVA's arguments, pinned: what lifts a trial into the best quarter. It looks at ranks, so
that the lower values of pruned trials do not distort it, and it takes parameters that only some
trials have."""


@dataclass(frozen=True, slots=True)
class TrialFacts:
    """One trial, as the search recorded it.

    Attributes:
        values: one per objective; None where the trial came to no value.
        params: Config key -> value; a conditional key is missing where it was not asked for.
        rounds, max_rounds: rounds run (as far as reported, for one that did not get to an end), and
            the most a full run takes.
        seconds, cpu_seconds, gpu_seconds: wall time, and processor time over all nodes; None where
            not recorded.
    """

    number: int
    status: Status
    values: tuple[float, ...] | None
    params: Mapping[str, Any]
    distributions: Mapping[str, optuna.distributions.BaseDistribution]
    domains: Mapping[str, float]
    rounds: int
    max_rounds: int | None
    seconds: float | None
    cpu_seconds: float | None
    gpu_seconds: float | None
    bytes_up: int | None
    epsilon: float | None
    run_id: str
    reason: str
    paper: bool

    def value(self, index: int) -> float:
        """The value of one objective; only for a trial that came to one."""
        assert self.values is not None
        return self.values[index]

    @classmethod
    def of(cls, trial: optuna.trial.FrozenTrial) -> Self:
        """From a trial and its user attributes."""
        told = trial.user_attrs
        unfinished: dict[Any, Status] = {
            optuna.trial.TrialState.RUNNING: "running",
            optuna.trial.TrialState.WAITING: "waiting",
            optuna.trial.TrialState.FAIL: "failed",
        }
        status = told.get("status", unfinished.get(trial.state, "unknown"))
        values = trial.values
        scored = (
            status in ("finished", "pruned")
            and values is not None
            and not any(math.isnan(v) for v in values)
        )
        return cls(
            number=trial.number,
            status=status,
            values=tuple(values) if scored and values is not None else None,
            params=trial.params,
            distributions=trial.distributions,
            domains={
                domain: value
                for domain, value in told.get("domains", {}).items()
                if value is not None
            },
            rounds=told.get("rounds") or trial.last_step or 0,
            max_rounds=told.get("max_rounds"),
            seconds=told.get("seconds"),
            cpu_seconds=told.get("cpu_seconds"),
            gpu_seconds=told.get("gpu_seconds"),
            bytes_up=told.get("bytes_up"),
            epsilon=told.get("epsilon"),
            run_id=told.get("run_id") or "",
            reason=told.get("reason") or "",
            paper=bool(told.get("paper", False)),
        )


@dataclass(frozen=True, slots=True)
class StudyFacts:
    """A study, read once.

    Attributes:
        objectives: their names; signs: +1 where an objective is maximised, -1 where it is
            minimised.
        trials: by number.
    """

    name: str
    method: str
    data: str
    protocol: str
    metric: str
    objectives: tuple[str, ...]
    signs: tuple[int, ...]
    trials: tuple[TrialFacts, ...]

    @classmethod
    def of(cls, study: optuna.Study) -> Self:
        """Read a study.

        Raises:
            CrossfedError: the study has not the attributes that `crossfed tune` sets.
        """
        told = study.user_attrs
        if missing := [
            key for key in ("method", "data", "protocol", "metric", "objectives") if key not in told
        ]:
            raise CrossfedError(
                f"study {study.study_name} does not come from crossfed tune: it has no user "
                f"attribute {missing[0]!r}."
            )
        maximise = optuna.study.StudyDirection.MAXIMIZE
        with _quiet():
            trials = study.get_trials(deepcopy=False)
        return cls(
            name=study.study_name,
            method=told["method"],
            data=told["data"],
            protocol=told["protocol"],
            metric=told["metric"],
            objectives=tuple(told["objectives"]),
            signs=tuple(1 if direction == maximise else -1 for direction in study.directions),
            trials=tuple(
                TrialFacts.of(trial) for trial in trials if "repeats" not in trial.user_attrs
            ),
        )

    def of_status(self, *statuses: Status) -> tuple[TrialFacts, ...]:
        """Trials of these statuses, by number."""
        return tuple(trial for trial in self.trials if trial.status in statuses)

    def scored(self, *statuses: Status) -> tuple[TrialFacts, ...]:
        """Trials of these statuses that came to a value."""
        return tuple(trial for trial in self.of_status(*statuses) if trial.values is not None)

    @property
    def params(self) -> tuple[str, ...]:
        """Every parameter that any trial has, in order of appearance."""
        return tuple(dict.fromkeys(name for trial in self.trials for name in trial.params))

    @property
    def domains(self) -> tuple[str, ...]:
        """Every domain that any trial was measured in."""
        return tuple(dict.fromkeys(name for trial in self.trials for name in trial.domains))

    @property
    def paper(self) -> TrialFacts | None:
        """The trial of the paper's setting; a finished one before others, should there be
        several.
        """
        found = [trial for trial in self.trials if trial.paper]
        return min(
            found, key=lambda trial: (STATUSES.index(trial.status), trial.number), default=None
        )

    @property
    def counts(self) -> str:
        """How many trials, and what they came to."""
        told = [(status, len(self.of_status(status))) for status in STATUSES]
        parts = ", ".join(f"{count} {status}" for status, count in told if count)
        return f"{many(len(self.trials), 'trial')}{': ' if parts else ''}{parts}"

    @property
    def spared(self) -> str:
        """How far pruned trials got: at most what a full run would have taken beyond that was
        spared.
        """
        stopped = [trial for trial in self.of_status("pruned") if trial.max_rounds]
        if not stopped:
            return "no trial was stopped early"
        ran, full = sum(t.rounds for t in stopped), sum(t.max_rounds or 0 for t in stopped)
        return f"pruned trials ran {ran} of at most {full} rounds"

    def best(self, index: int = 0) -> TrialFacts | None:
        """The finished trial that is best in one objective; the earliest of equals."""
        return max(
            self.scored("finished"), key=lambda t: self.signs[index] * t.value(index), default=None
        )

    def front(self) -> tuple[TrialFacts, ...]:
        """Finished trials that no other finished trial dominates, ordered by the first
        objective.
        """
        finished = self.scored("finished")
        chosen = (
            {trial.number for trial in _refit(self, finished).best_trials} if finished else set()
        )
        found = [trial for place, trial in enumerate(finished) if place in chosen]
        return tuple(sorted(found, key=lambda trial: trial.values or ()))

    def label(self, objective: str) -> str:
        """An objective as figures name it."""
        named = {
            self.metric: f"{pretty(self.metric)}, mean of domains"
            if len(self.domains) > 1
            else pretty(self.metric),
            "worst": f"{pretty(self.metric)}, worst domain",
            "epsilon": "privacy budget ε",
            "bytes": "bytes sent up",
        }
        if objective.startswith("domain:"):
            return f"{pretty(self.metric)}, {objective.removeprefix('domain:')}"
        return named.get(objective, pretty(objective))


def value_text(objective: str, value: float) -> str:
    """An objective's value with its unit."""
    return size(value) if objective == "bytes" and math.isfinite(value) else number(value)


def setting(value: Any) -> str:
    """A parameter's value: at most four significant digits."""
    if isinstance(value, float):
        return ("∞" if value > 0 else "-∞") if math.isinf(value) else f"{value:.4g}"
    return str(value)


def many(count: int, word: str) -> str:
    """A count with its word: 1 trial, 2 trials."""
    return f"{count} {word}{'s' * (count != 1)}"


def short(text: str, most: int) -> str:
    """Text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def wrapped(label: str, width: int = 16) -> str:
    """A long name on several lines, broken after underscores and spaces."""
    lines = [""]
    for part in re.split(r"(?<=[_ ])", label):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += short(part, 24)
    return "\n".join(lines)


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna's log lines about studies in memory, and its warnings about few trials and about
    choices that are lists, do not reach the user."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)


def _refit(
    facts: StudyFacts, trials: Sequence[TrialFacts], objective: int | None = None
) -> optuna.Study:
    """A study in memory that holds these trials alone, as complete, numbered by their place; of one
    objective or of all.
    """
    up, down = optuna.study.StudyDirection.MAXIMIZE, optuna.study.StudyDirection.MINIMIZE
    directions = [up if sign > 0 else down for sign in facts.signs]
    chosen = slice(None) if objective is None else slice(objective, objective + 1)
    with _quiet():
        study = optuna.create_study(directions=directions[chosen])
        for trial in trials:
            assert trial.values is not None
            params, distributions = dict(trial.params), dict(trial.distributions)
            for name, kind in trial.distributions.items():
                if isinstance(kind, optuna.distributions.CategoricalDistribution):
                    # by name: PED-ANOVA hashes the choices, which may be lists
                    distributions[name] = optuna.distributions.CategoricalDistribution(
                        [repr(c) for c in kind.choices]
                    )
                    params[name] = repr(params[name])
            study.add_trial(
                optuna.trial.create_trial(
                    params=params, distributions=distributions, values=trial.values[chosen]
                )
            )
    return study


@dataclass(frozen=True, slots=True)
class Importance:
    """How much each parameter mattered for one objective.

    Attributes:
        objective: its name.
        shares: parameter -> share, descending; they add up to one. Empty where `note` says why
            there are none.
        note: what was left out or why nothing could be said; may be empty.
        trials: how many trials it rests on.
    """

    objective: str
    shares: Mapping[str, float]
    note: str
    trials: int


def importance(facts: StudyFacts) -> tuple[Importance, ...]:
    """Importance of the parameters for every objective, by PED-ANOVA (arXiv 2304.10255;
    conditional: 2601.20800).

    Finished trials and pruned ones, with the value they had reached, are compared by rank: what
    lifts a trial into the best quarter. No share is given with fewer than `ENOUGH_FOR_IMPORTANCE`
    trials, or where all values are equal.
    """
    trials = facts.scored("finished", "pruned")
    seen = {
        name: {setting(t.params[name]) for t in trials if name in t.params} for name in facts.params
    }
    varied = [name for name, values in seen.items() if len(values) > 1]
    fixed = [name for name in seen if name not in varied]
    note = f"left out, with one value only: {', '.join(fixed)}" if fixed else ""
    found = []
    for index, objective in enumerate(facts.objectives):
        values = {trial.value(index) for trial in trials}
        why = ""
        if len(trials) < ENOUGH_FOR_IMPORTANCE:
            why = (
                f"too few trials: {len(trials)} came to a value, {ENOUGH_FOR_IMPORTANCE} are needed"
            )
        elif len(values) == 1:
            why = f"all {len(trials)} trials have the same value"
        elif not varied:
            why = "no parameter took more than one value"
        raw: dict[str, float] = {}
        if not why:
            with _quiet():
                raw = optuna.importance.get_param_importances(
                    _refit(facts, trials, index),
                    evaluator=optuna.importance.PedAnovaImportanceEvaluator(**_EVALUATOR),
                    params=varied,
                    normalize=False,  # Optuna makes equal shares of nothing
                )
            if not sum(raw.values()):
                why, raw = "no parameter sets the best quarter apart", {}
        shares = {name: value / sum(raw.values()) for name, value in raw.items()}
        found.append(Importance(objective, shares, why or note, len(trials)))
    return tuple(found)
