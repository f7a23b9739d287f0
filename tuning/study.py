"""A study's books: what was asked, reported and came of it, in an Optuna study and a directory that
outlive the process.

Everything is in Optuna's storage as soon as it is known, so that a study killed at any moment goes
on from there: a trial that was running keeps its number and its values, and its federation
continues from its last committed round.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel, Field, PositiveInt, ValidationError, field_validator

from crossfed.platform.config.settings import RunConfig, Settings, first_error
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import stage_keys
from crossfed.platform.registry import method_name
from crossfed.platform.uris import redact, sqlite_path, sqlite_uri
from crossfed.platform.yaml_text import load_yaml
from crossfed.tuning.space import Choice, Parameter, grid, read, sample, space, with_first

STUDY = "study.yaml"
DATABASE = "optuna.db"
SUMMARY = "study.json"
QUALITY = ("mean", "worst")
COSTS = ("epsilon", "bytes")
REPEATS = "repeats"
"""Trial attribute: the number of the earlier trial whose setting, and so whose values, this one
has.
"""
ATTEMPTS = 20
"""How often the sampler is asked for a setting that was not tried; in the second half of them at
random.
"""
MULTI = ("tpe", "random", "grid", "nsgaii", "nsgaiii", "gp")

# a line per trial is printed by the command itself
optuna.logging.set_verbosity(optuna.logging.WARNING)


class Search(Settings):
    """How a study searches; the `search:` block of its `study.yaml`."""

    name: str = Field(description="the study's name and folder")
    trials: PositiveInt = Field(20, description="trials in all, the paper's setting included")
    concurrent: PositiveInt | None = Field(
        None, description="trials at once; none takes as many as fit"
    )
    objectives: tuple[str, ...] = Field(
        ("mean",),
        min_length=1,
        description="mean, worst or domain:NAME of the selecting validation metric; epsilon, bytes",
    )
    sampler: Literal["tpe", "random", "grid", "cmaes", "nsgaii", "nsgaiii", "gp"] = Field(
        "tpe", description="Optuna's sampler"
    )
    startup: PositiveInt | None = Field(
        None,
        description="random trials before tpe or gp model anything; none takes a third "
        "of them, 10 at most",
    )
    pruner: Literal["asha", "median", "none"] = Field(
        "asha", description="rule that stops trials by their rounds"
    )
    grace: PositiveInt | None = Field(
        None,
        description="rounds that no trial is stopped before; none covers the first of "
        "several stages",
    )
    reduction: int = Field(2, ge=2, description="asha: one in so many goes on at each rung")
    max_rounds: PositiveInt | None = Field(
        None, description="rounds of a trial at most; winners run in full"
    )
    time_budget: float | None = Field(
        None, gt=0, description="seconds of the search, without the final runs"
    )
    seeds: int = Field(1, ge=0, description="seeds of the winner's final runs; 0 leaves them out")
    retries: int = Field(1, ge=0, description="how often a trial whose process dies is run again")
    seed: int = Field(0, ge=0, description="seed of the sampler")
    storage: str | None = Field(
        None, description="Optuna storage URL; none keeps a SQLite file in the study's folder"
    )
    changes: dict[str, Any] = Field(
        default_factory=dict, description="changes to the space the method declares"
    )

    @field_validator("name")
    @classmethod
    def _folder(cls, value: str) -> str:
        if not re.fullmatch(r"\w[\w.-]{0,99}", value) or len(value.encode()) > 200:
            raise ValueError(
                "a name is up to 100 letters, digits, _, - and ., and begins with a letter or digit"
            )
        return value

    @field_validator("objectives")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in (*QUALITY, *COSTS) and not name.removeprefix("domain:").strip():
                raise ValueError(f"{name!r} names no domain")
            if name not in (*QUALITY, *COSTS) and not name.startswith("domain:"):
                raise ValueError(f"{name!r} is none of mean, worst, domain:NAME, epsilon, bytes")
        if len(set(value)) < len(value):
            raise ValueError("an objective occurs twice")
        if value[0] in COSTS:
            raise ValueError(
                f"the first objective must be a quality (mean, worst, domain:NAME), not {value[0]}"
            )
        return value

    def model_post_init(self, _: Any) -> None:
        if len(self.objectives) > 1 and self.sampler not in MULTI:
            raise ValueError(
                f"the sampler {self.sampler} takes one objective; use {', '.join(MULTI)}"
            )
        if len(self.objectives) > 1 and self.pruner != "none":
            raise ValueError(
                f"{self.pruner} stops trials by quality alone and would cut the front's cheap "
                f"end; use pruner none"
            )
        if self.grace is not None and self.pruner == "none":
            raise ValueError("a grace period needs a pruner: none stops nothing")
        if self.reduction != 2 and self.pruner != "asha":
            raise ValueError(f"reduction belongs to the pruner asha, not to {self.pruner}")


def checked_search(**given: Any) -> Search:
    """How a study searches, from options by name; those that are None keep their defaults.

    Raises:
        CrossfedError: what is wrong with them, named as the command line's option.
    """
    try:
        return Search(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ").rstrip(".")
        if not first["loc"]:
            raise CrossfedError(f"{message[0].upper()}{message[1:]}.") from None
        key = str(first["loc"][0])
        option = "--" + {"name": "study", "objectives": "objective"}.get(key, key).replace("_", "-")
        value = ", ".join(first["input"]) if isinstance(first["input"], tuple) else first["input"]
        raise CrossfedError(
            f"{option} {value!r} is not possible: {message[0].lower()}{message[1:]}."
        ) from None


@dataclass(frozen=True, slots=True)
class Task:
    """One trial to run: its number, the searched values, and whether it goes on from an earlier
    process.
    """

    number: int
    values: dict[str, Any]
    again: bool


def quality(objective: str, domains: Mapping[str, float]) -> float:
    """A quality objective from each domain's selecting validation metric: macro mean, worst domain
    or a named one.
    """
    if objective == "mean":
        return sum(domains.values()) / len(domains)
    if objective == "worst":
        return min(domains.values())
    return domains[objective.removeprefix("domain:")]


def total_rounds(config: RunConfig) -> int:
    """Rounds of a run at most, over all stages."""
    return sum(stage.rounds for stage in config.resolved.stages(config.method_config()))


def trial_rounds(search: Search, config: RunConfig) -> int:
    """Rounds of a trial at most."""
    return min(filter(None, (total_rounds(config), search.max_rounds)))


def grace_rounds(search: Search, config: RunConfig) -> int:
    """Rounds that no trial is stopped before: past the first stage where there are several, as its
    values do not compare.
    """
    if search.grace is not None:
        return search.grace
    rounds = [
        stage.rounds for stage in config.resolved.stages(config.method_config()) if stage.rounds
    ]
    if len(rounds) > 1:
        return rounds[0] + 1
    return max(1, -(-trial_rounds(search, config) // search.reduction**3))


def unreached(
    search: Search, config: RunConfig, parameters: Mapping[str, Parameter]
) -> tuple[str, ...]:
    """Names of the stages that no trial gets to: they have no rounds, or `max_rounds` ends trials
    before them.

    Looked at are the first trial and those that differ from it in one searched key.
    """
    ends = [{name: end} for name, parameter in parameters.items() for end in parameter.ends()]
    named: dict[str, bool] = {}
    for values in ({}, *ends):
        try:
            checked = config.resolved.Config.model_validate({**config.config, **values})
        except ValidationError:  # keys that must fit each other may do so in a trial
            continue
        before, measured = 0, False
        for stage in config.resolved.stages(checked):
            # a trial ends at its cap once something has been measured
            over = search.max_rounds is not None and before >= search.max_rounds and measured
            named[stage.name] = named.get(stage.name, False) or (stage.rounds > 0 and not over)
            before, measured = (
                before + stage.rounds,
                measured or (stage.evaluate and stage.rounds > 0),
            )
    return tuple(name for name, reached in named.items() if not reached)


def idle(
    stages: Collection[str], config: RunConfig, parameters: Mapping[str, Parameter]
) -> tuple[str, ...]:
    """The searched keys that only these stages read."""
    belongs = stage_keys(config.resolved.Config)
    return tuple(name for name in parameters if belongs.get(name) in stages)


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys whose values differ between two nested mappings, with both values."""
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", old, new


def make_sampler(search: Search, number: int) -> optuna.samplers.BaseSampler:
    """The sampler for trial `number`, with every argument pinned that matters.

    It is made anew for each trial, seeded by the study's seed and the number, so that a resumed
    study draws as an uninterrupted one does; what it has learnt is in the storage.
    """
    seed = search.seed * 1_000_003 + number
    startup = search.startup or max(1, min(10, search.trials // 3))
    population = min(50, max(4, search.trials // 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match search.sampler:
            case "tpe":
                return optuna.samplers.TPESampler(
                    n_startup_trials=startup,
                    n_ei_candidates=24,
                    multivariate=True,
                    group=True,  # parameters that only some trials have
                    constant_liar=True,  # trials that run at the same time do not crowd one point
                    seed=seed,
                )
            case "gp":
                return optuna.samplers.GPSampler(
                    n_startup_trials=startup,
                    deterministic_objective=False,
                    warn_independent_sampling=False,
                    seed=seed,
                )
            case "cmaes":
                return optuna.samplers.CmaEsSampler(
                    n_startup_trials=1,
                    warn_independent_sampling=False,
                    consider_pruned_trials=True,
                    seed=seed,
                )
            case "nsgaii":
                return optuna.samplers.NSGAIISampler(
                    population_size=population, crossover_prob=0.9, swapping_prob=0.5, seed=seed
                )
            case "nsgaiii":
                return optuna.samplers.NSGAIIISampler(
                    population_size=population,
                    crossover_prob=0.9,
                    swapping_prob=0.5,
                    dividing_parameter=3,
                    seed=seed,
                )
            case "random" | "grid":  # a grid's points are handed out by the study
                return optuna.samplers.RandomSampler(seed=seed)


def make_pruner(search: Search, grace: int) -> optuna.pruners.BasePruner:
    """The rule that stops trials; it sees the running best validation metric of every round."""
    if search.pruner == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=grace,
            reduction_factor=search.reduction,
            min_early_stopping_rate=0,
            bootstrap_count=0,
        )
    if search.pruner == "median":
        return optuna.pruners.MedianPruner(
            n_startup_trials=4, n_warmup_steps=grace, interval_steps=1, n_min_trials=2
        )
    return optuna.pruners.NopPruner()


class Study:
    """One study: its settings, its directory, its Optuna study.

    Args:
        folder: the study's directory; holds `study.yaml`, the trials' run directories and the
            figures.
        search, base: how it searches, and the run that all trials share.
        declared: the searched parameters.

    Attributes:
        first: the searched keys' values in the first trial: the paper's, unless the base changed
            them.
        repeats: trials of this process that were not run, because an earlier one had the same
            setting; and which.
    """

    def __init__(
        self,
        folder: Path,
        search: Search,
        base: RunConfig,
        declared: Mapping[str, Parameter],
        optuna_study: optuna.Study,
    ):
        self.folder, self.search, self.base, self.optuna = folder, search, base, optuna_study
        self.first = {name: base.config[name] for name in declared}
        self.parameters: dict[str, Parameter] = with_first(declared, self.first)
        self.grace = grace_rounds(search, base)
        self.optuna.pruner = make_pruner(search, self.grace)
        self.max_rounds = trial_rounds(search, base)
        self.active: dict[int, optuna.Trial] = {}
        self.repeats: list[tuple[int, int]] = []

    # -- making and opening ------------------------------------------------------------------------

    @staticmethod
    def check(search: Search, base: RunConfig) -> dict[str, Parameter]:
        """The space of a study that shall be made.

        Raises:
            CrossfedError: nothing is searched, a value of the first trial lies outside its range, a
                grid has a range, or the grace period covers all rounds.
        """
        declared = space(base.method, search.changes, base.config)
        if not declared:
            raise CrossfedError(
                f"{base.method} declares nothing to search; say what to search, e.g. "
                "--search 'lr={low: 1e-4, high: 1e-2, log: true}'."
            )
        parameters = with_first(declared, {name: base.config[name] for name in declared})
        if search.sampler == "grid":
            list(grid(parameters, base.config))
        if search.grace is not None and search.grace >= (most := trial_rounds(search, base)):
            raise CrossfedError(
                f"A grace period of {search.grace} rounds leaves nothing to stop: a trial has "
                f"{most} at most; use a shorter one, "
                "or the pruner none."
            )
        return declared

    @classmethod
    def create(cls, search: Search, base: RunConfig, data: str, fingerprint: str) -> Study:
        """A new study in `<out>/<name>`.

        Args:
            data, fingerprint: name of the data set, and what changes when a value in it does; for
                the record.

        Raises:
            CrossfedError: there is one of that name, its folder or storage cannot be made, or as
                `check`.
        """
        folder = base.out.absolute() / search.name
        if (folder / STUDY).exists():
            raise CrossfedError(
                f"There is a study {search.name} in {base.out} already; crossfed tune resume "
                f"{base.out / search.name} goes on "
                "with it, and --study gives a new one another name."
            )
        declared = cls.check(search, base)
        if search.storage is not None:
            search = search.model_copy(update={"storage": _absolute(search.storage)})
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CrossfedError(
                f"The study's folder {folder} cannot be made: {error.strerror}; choose another "
                f"--out or --study."
            ) from error
        storage = search.storage or sqlite_uri(folder / DATABASE)
        directions: list[Literal["minimize", "maximize"]] = [
            "minimize" if name in COSTS else "maximize" for name in search.objectives
        ]
        try:
            made = optuna.create_study(
                storage=storage, study_name=search.name, directions=directions
            )
        except optuna.exceptions.DuplicatedStudyError:
            raise CrossfedError(
                f"The storage {redact(storage)} holds a study {search.name} already; choose "
                f"another --study."
            ) from None
        except Exception as error:  # SQLAlchemy's, which differ by back end
            raise _unusable(storage, error) from error
        study = cls(folder, search, base, declared, made)
        metric = base.evaluation.select
        told = {
            "method": method_name(base.method),
            "data": data,
            "data_fingerprint": fingerprint,
            "protocol": base.evaluation.protocol,
            "metric": metric,
            "objectives": [metric if name == "mean" else name for name in search.objectives],
            "directions": directions,
            "first": study.first,
        }
        for key, value in told.items():
            made.set_user_attr(key, value)
        fixed = {
            name: study.first[name]
            for name in study.parameters
            if study.parameters[name].active(base.config)
        }
        made.enqueue_trial(fixed, user_attrs={"paper": True})
        study.save()
        return study

    @classmethod
    def open(cls, folder: Path) -> Study:
        """A study made earlier.

        Raises:
            CrossfedError: there is none, or its files cannot be read.
        """
        path = folder / STUDY
        model: type[BaseModel] = Search
        try:
            told = load_yaml(path.read_text(encoding="utf-8"))
            search, model = Search.model_validate(told["search"]), RunConfig
            base = RunConfig.model_validate(told["run"])
            entries = told.get("space")
            model = base.resolved.Config
            config = base.method_config().model_dump(mode="json")
        except FileNotFoundError:
            raise CrossfedError(
                f"There is no study in {folder}; crossfed tune METHOD --study {folder.name} "
                f"starts one."
            ) from None
        except ValidationError as error:
            raise first_error(error, str(path), model) from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
            told = (
                f"it has no {error}"
                if isinstance(error, KeyError)
                else " ".join(str(error).split())
            )
            raise CrossfedError(
                f"{path} cannot be read ({told}); restore it or start another study."
            ) from error
        base = base.model_copy(update={"out": folder.absolute().parent, "config": config})
        if search.storage is None and not (folder / DATABASE).is_file():
            raise CrossfedError(
                f"{folder / DATABASE}, which holds the study's trials, is missing; restore it "
                f"or start another study."
            )
        storage = search.storage or sqlite_uri(folder / DATABASE)
        try:
            kept = optuna.load_study(storage=storage, study_name=search.name)
            kept.get_trials(deepcopy=False)
        except KeyError:
            raise CrossfedError(
                f"The storage {redact(storage)} holds no study {search.name}."
            ) from None
        except Exception as error:  # SQLAlchemy's, which differ by back end
            raise _unusable(storage, error) from error
        # kept since a method's own declaration may change meanwhile; a study from before it was
        # kept has that one
        declared = (
            read(base.method, entries, config)
            if entries
            else space(base.method, search.changes, config)
        )
        return cls(folder.absolute(), search, base, declared, kept)

    def discard(self) -> None:
        """Remove a study in which no trial began; other files in its folder stay."""
        optuna.delete_study(study_name=self.search.name, storage=self.optuna._storage)
        for name in (STUDY, DATABASE, ".lock"):
            if name != DATABASE or self.search.storage is None:
                (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds something else
            self.folder.rmdir()

    def save(self) -> None:
        """Write `study.yaml`."""
        told = {
            "search": self.search.model_dump(mode="json"),
            "space": {
                name: parameter.model_dump(mode="json", exclude_defaults=True)
                for name, parameter in self.parameters.items()
            },
            "run": self.base.model_dump(mode="json"),
        }
        target = self.folder / STUDY
        try:
            beside = target.with_suffix(".new")
            beside.write_text(yaml.safe_dump(told, sort_keys=False), encoding="utf-8")
            beside.replace(target)
        except OSError as error:
            raise CrossfedError(f"{target} cannot be written: {error.strerror}.") from error

    def extend(self, more: int) -> None:
        """Let the study have so many trials more. One that its time budget ended has the budget
        anew for them.
        """
        over = self.seconds_left() <= 0
        asked = self.begun() if over else max(self.search.trials, self.begun())
        if over:
            self.optuna.set_user_attr("seconds", 0.0)
        self.search = self.search.model_copy(update={"trials": asked + more})
        self.save()

    def spend(self, seconds: float) -> None:
        """Count time against the budget."""
        if self.search.time_budget is not None:
            self.optuna.set_user_attr(
                "seconds", self.optuna.user_attrs.get("seconds", 0.0) + seconds
            )

    def seconds_left(self) -> float:
        """What is left of the time budget over all processes that ran the study; infinite without
        one.
        """
        if self.search.time_budget is None:
            return math.inf
        return self.search.time_budget - float(self.optuna.user_attrs.get("seconds", 0.0))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time per study."""
        try:
            file = (self.folder / ".lock").open("w")
        except OSError as error:
            raise CrossfedError(
                f"The study's folder {self.folder} cannot be written: {error.strerror}."
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CrossfedError(
                    f"The study {self.search.name} is being run by another process."
                ) from None
            yield

    # -- asking and telling ------------------------------------------------------------------------

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """The trials, in order; those in `states`, where given."""
        return self.optuna.get_trials(deepcopy=False, states=states or None)

    def asked(self) -> int:
        """How many trials the sampler gave so far, those included that repeat another."""
        return sum(trial.state != TrialState.WAITING for trial in self.trials())

    def begun(self) -> int:
        """How many trials were begun so far, whatever came of them; one that repeats another is
        none.
        """
        return sum(
            trial.state != TrialState.WAITING and REPEATS not in trial.user_attrs
            for trial in self.trials()
        )

    def left(self) -> int:
        """How many trials are still to be run, interrupted ones included."""
        return max(0, self.search.trials - self.begun()) + len(self.trials(TrialState.RUNNING))

    def over(self) -> bool:
        """Whether the study came to its end: no trial was left running, and its summary is
        there.
        """
        return not self.trials(TrialState.RUNNING) and (self.folder / SUMMARY).is_file()

    def next(self) -> Task | None:
        """The next trial: first those that an earlier process left, then new ones; None when all
        were handed out.
        """
        for frozen in self.trials(TrialState.RUNNING):
            if frozen.number not in self.active:
                self.optuna.sampler = make_sampler(self.search, frozen.number)
                return self._task(optuna.Trial(self.optuna, frozen._trial_id), again=True)
        for attempt in range(ATTEMPTS):
            if self.begun() >= self.search.trials or self._exhausted():
                return None
            self.optuna.sampler = make_sampler(self.search, self.asked())
            if attempt >= ATTEMPTS // 2:  # a model that keeps to one point
                self.optuna.sampler = optuna.samplers.RandomSampler(
                    seed=self.search.seed * 1_000_003 + self.asked()
                )
            if (
                self.search.sampler == "grid"
                and self.begun()
                and not self.trials(TrialState.WAITING)
            ):
                point = next(
                    (p for p in grid(self.parameters, self.base.config) if p not in self._known()),
                    None,
                )
                if point is None:
                    return None
                self.optuna.enqueue_trial(point)
            task = self._task(self.optuna.ask(), again=False)
            same = self._same(task)
            if same is None:
                return task
            self._repeat(task.number, same)
        return None

    def _known(self) -> list[dict[str, Any]]:
        """The settings of all trials that were asked for."""
        return [
            values
            for trial in self.trials()
            if (values := trial.user_attrs.get("values", trial.params)) is not None
        ]

    def _deterministic(self) -> bool:
        """Whether a setting comes to the same values each time: the seed is fixed, and noise that
        is drawn has one too.
        """
        releases = self.base.resolved.releases(self.base.method_config())
        return not releases or self.base.privacy.noise_seed is not None

    def _exhausted(self) -> bool:
        """Whether every point of a space of choices was tried."""
        choices = [
            parameter.values
            for parameter in self.parameters.values()
            if isinstance(parameter, Choice)
        ]
        if (
            self.search.sampler == "grid"
            or not self._deterministic()
            or self.trials(TrialState.WAITING)
        ):
            return False
        if len(choices) < len(self.parameters) or math.prod(map(len, choices)) > self.begun():
            # a space of more points than trials; with `when` it has fewer, which the attempts bound
            return False
        known = self._known()
        return all(point in known for point in grid(self.parameters, self.base.config))

    def _same(self, task: Task) -> FrozenTrial | None:
        """An earlier trial that has, or will have, the values of this one."""
        if not self._deterministic():
            return None
        for trial in self.trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING):
            alike = trial.user_attrs.get("values") == task.values
            settled = trial.user_attrs.get("status") in ("finished", "pruned")
            running = trial.state == TrialState.RUNNING
            if alike and trial.number < task.number and (settled or running):
                return trial
        return None

    def _repeat(self, number: int, same: FrozenTrial) -> None:
        """Give a trial the value of an earlier one of the same setting, without running it."""
        trial = self.active[number]
        self.repeats.append((number, same.number))
        trial.set_user_attr(REPEATS, same.number)
        for step, value in same.intermediate_values.items():
            trial.report(value, step)
        self._close(number, "repeated", {"reason": f"the setting of trial {same.number}"})
        if same.state == TrialState.COMPLETE:
            self.optuna.tell(number, same.values)
        else:  # a trial that still runs has no value yet
            self.optuna.tell(
                number,
                state=TrialState.PRUNED if same.state == TrialState.PRUNED else TrialState.FAIL,
            )

    def _task(self, trial: optuna.Trial, again: bool) -> Task:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Optuna would have choices be plain strings and numbers only; YAML gives lists too
            values = sample(self.parameters, trial, self.base.config)
        trial.set_user_attr("values", values)
        trial.set_user_attr("max_rounds", self.max_rounds)
        self.active[trial.number] = trial
        return Task(trial.number, values, again)

    def folder_of(self, number: int) -> Path:
        """The run directory of a trial."""
        return self.folder / f"trial-{number:04d}"

    def report(self, number: int, step: int, value: float | None) -> bool:
        """Note a round's running best; True when the rule stops the trial here. The first trial is
        never stopped: it is what the others are held against."""
        trial = self.active[number]
        if value is None or len(self.search.objectives) > 1:
            return False
        with warnings.catch_warnings():
            # a trial that went back to its last commit reports some rounds again
            warnings.simplefilter("ignore")
            trial.report(value, step)
        # asked for the first trial too: its rungs count for the others
        prune = bool(trial.should_prune())
        return prune and not trial.user_attrs.get("paper", False)

    def finish(self, number: int, facts: Mapping[str, Any]) -> list[float]:
        """A trial ran to its end; returns its value of every objective.

        Raises:
            CrossfedError: an objective has no value that could be compared; nothing is recorded.
        """
        values = []
        for name in self.search.objectives:
            if name in COSTS:
                value = facts.get("bytes_up" if name == "bytes" else name)
            else:
                value = quality(name, facts["domains"]) if facts["domains"] else None
            if value is None or not math.isfinite(value):
                raise CrossfedError(f"the objective {name} came to no number ({value})")
            values.append(float(value))
        self._close(number, "finished", facts)
        self.optuna.tell(number, values)
        return values

    def prune(self, number: int, facts: Mapping[str, Any]) -> None:
        """The rule stopped a trial."""
        self._close(number, "pruned", facts)
        self.optuna.tell(number, state=TrialState.PRUNED)

    def drop(self, number: int, reason: str) -> None:
        """The search ended before the trial did, here or in an earlier process."""
        if number not in self.active:
            self.optuna.sampler = make_sampler(self.search, number)
            self.active[number] = optuna.Trial(self.optuna, self.trials()[number]._trial_id)
        self._close(number, "killed", {"reason": reason})
        self.optuna.tell(
            number, state=TrialState.PRUNED if self._reported(number) else TrialState.FAIL
        )

    def fail(self, number: int, reason: str) -> None:
        """A trial failed for good."""
        self._close(number, "failed", {"reason": reason})
        self.optuna.tell(number, state=TrialState.FAIL)

    def _reported(self, number: int) -> bool:
        return bool(self.trials()[number].intermediate_values)

    def _close(self, number: int, status: str, facts: Mapping[str, Any]) -> None:
        for key, value in {"status": status, **facts}.items():
            self.active[number].set_user_attr(key, value)
        del self.active[number]  # once it is written: where it cannot be, the trial is still open

    # -- reading -----------------------------------------------------------------------------------

    def best(self) -> FrozenTrial | None:
        """The winner: the finished trial with the best first objective; the earliest of equals."""
        done = [
            t for t in self.trials(TrialState.COMPLETE) if t.user_attrs.get("status") == "finished"
        ]
        return max(done, key=lambda trial: (trial.values[0], -trial.number), default=None)

    def config(self, values: Mapping[str, Any], **changes: Any) -> RunConfig:
        """The run of one point of the space."""
        return self.base.model_copy(update={"config": {**self.base.config, **values}, **changes})


def _absolute(storage: str) -> str:
    """A SQLite file by its full path, so that the study is found from wherever it goes on."""
    if not storage.startswith("sqlite:"):
        return storage
    if (path := sqlite_path(storage)) is None:
        raise CrossfedError(f"The storage {storage} names no file; write sqlite:///PATH.")
    return sqlite_uri(path)


def _unusable(storage: str, error: Exception) -> CrossfedError:
    """One line for what a data base says, without the password in its address."""
    told = reason(error).replace(storage, redact(storage))
    return CrossfedError(f"The storage {redact(storage)} cannot be used: {told}.")


def reason(error: Exception) -> str:
    """The first line of what went wrong; Optuna's own sentence about a data base's is left out."""
    return next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__).rstrip(".")


def find_study(name: str, out: Path) -> Path:
    """The folder of a study given by path or by its name below `out`.

    Raises:
        CrossfedError: there is none.
    """
    for path in (Path(name), out / name):
        if (path / STUDY).is_file():
            return path.absolute()
    known = sorted(path.parent.name for path in out.glob(f"*/{STUDY}")) if out.is_dir() else []
    raise CrossfedError(
        f"There is no study {name!r} in {out}; known: {', '.join(known) or 'none'}."
    )
