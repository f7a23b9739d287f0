"""The search space a method declares: the `search:` block of its YAML file, checked against its
Config.

search:
  K: {values: [30, 40, 50, 60, 70]}
  lr: {low: 1.0e-4, high: 1.0e-2, log: true}
  layers: {low: 1, high: 4, int: true}
  alpha: {values: [0.1, 0.2], when: {ablation: [none, fed]}}   # searched in trials with one of these values only
"""  # noqa: E501

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import optuna
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from crossfed.platform.config.settings import build, declared_search, first_error, parse_value
from crossfed.platform.errors import CrossfedError
from crossfed.platform.registry import find_method, nearest
from crossfed.platform.yaml_text import load_yaml


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    when: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = {}

    def active(self, values: Mapping[str, Any]) -> bool:
        """Whether this parameter is searched, given the values of the others in a trial."""
        return all(values.get(name) in allowed for name, allowed in self.when.items())


class Choice(_Entry):
    """One of a list of values, in no order."""

    values: Annotated[tuple[Any, ...], Field(min_length=1)]

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """Ask the trial for a value."""
        return trial.suggest_categorical(name, self.values)

    def ends(self) -> tuple[Any, ...]:
        """Every value."""
        return self.values


class Range(_Entry):
    """A closed interval of real numbers, or of whole numbers; on a log scale where so declared."""

    low: float
    high: float
    log: bool = False
    int: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError("low must lie below high, and above 0 on a log scale")
        if self.int and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError("with int, low and high must be whole numbers")
        return self

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """Ask the trial for a value."""
        if self.int:
            return trial.suggest_int(name, round(self.low), round(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def ends(self) -> tuple[Any, ...]:
        """Both ends."""
        return tuple(round(end) if self.int else end for end in (self.low, self.high))


Parameter = Choice | Range


def space(
    method: str, changes: Mapping[str, Any] | None = None, base: Mapping[str, Any] | None = None
) -> dict[str, Parameter]:
    """The parameters to search for a method: its own declaration, changed or extended by `changes`.

    Args:
        method: a method's name.
        changes: name -> entry in the form of the YAML block; a list stands for its values; None
            removes a declared parameter from the search.
        base: the method's values where nothing is searched; by default those it ships with.

    Returns:
        name -> parameter; one that others depend on (`when`) comes before them.

    Raises:
        CrossfedError: an entry is malformed, names no key of the method's Config, holds a value the
            Config refuses, removes what is not searched, or depends on itself or on what never
            holds.
    """
    declared, changes = declared_search(method), dict(changes or {})
    if unknown := [
        name for name, entry in changes.items() if entry is None and name not in declared
    ]:
        raise CrossfedError(
            f"{method}, search: {unknown[0]} is not searched and cannot be taken "
            f"out{nearest(unknown[0], declared)}"
        )
    found = {name: entry for name, entry in (declared | changes).items() if entry is not None}
    return read(method, found, build(method).config if base is None else base)


def read(method: str, raw: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Parameter]:
    """The parameters that a whole `search:` block declares, checked against the method's Config.

    Args, returns and raises: as `space`.
    """
    config = find_method(method).Config
    entries = {name: _entry(method, name, entry) for name, entry in raw.items()}
    alone = len(entries) == 1

    def kept(name: str, value: Any) -> Any:
        """The value as the Config keeps it."""
        try:
            checked = config.model_validate({**base, name: value})
        except ValidationError as error:
            # keys that must fit each other may do so in a trial
            if not error.errors()[0]["loc"] and not alone:
                return value
            raise first_error(error, f"{method}, search", config) from None
        return checked.model_dump(mode="json")[name]

    found: dict[str, Parameter] = {}
    for name, entry in entries.items():
        ends = [kept(name, value) for value in entry.ends()]
        when = {
            other: tuple(kept(other, value) for value in allowed)
            for other, allowed in entry.when.items()
        }
        if isinstance(entry, Choice):
            values = tuple(value for place, value in enumerate(ends) if value not in ends[:place])
            found[name] = entry.model_copy(update={"values": values, "when": when})
            continue
        if not all(isinstance(end, float | int) and not isinstance(end, bool) for end in ends):
            raise CrossfedError(
                f"{method}, search: {name} takes no numbers; give its values, e.g. {name}=[…]."
            )
        if not entry.int and isinstance(ends[0], int):
            raise CrossfedError(
                f"{method}, search: {name} takes whole numbers only; add int: true to its "
                f"range, or give values."
            )
        found[name] = entry.model_copy(update={"when": when})
    for name, entry in found.items():
        for other, allowed in entry.when.items():
            searched = found.get(other)
            possible = (base[other],) if searched is None else (*searched.ends(), base[other])
            if not isinstance(searched, Range) and not any(value in allowed for value in possible):
                raise CrossfedError(
                    f"{method}, search: {name} would never be searched: {other} is never "
                    f"{' or '.join(map(str, allowed))}, "
                    f"only {', '.join(map(str, dict.fromkeys(possible)))}."
                )
    return _ordered(method, found)


def _entry(method: str, name: str, raw: Any) -> Parameter:
    """One entry of the block."""
    where = f"{method}, search: {name}"
    raw = {"values": list(raw)} if isinstance(raw, list | tuple) else raw
    if not isinstance(raw, Mapping) or not raw.keys() & {"values", "low", "high"}:
        raise CrossfedError(
            f"{where}: {raw!r} is neither {{values: […]}} nor {{low: …, high: …, log: …, int: …}}."
        )
    kind: type[Choice | Range] = Choice if "values" in raw else Range
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise first_error(error, where, kind) from None


def _ordered(method: str, found: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Parameters after those that their `when` names."""
    done: dict[str, Parameter] = {}
    left = dict(found)
    while left:
        ready = [name for name, parameter in left.items() if not set(parameter.when) & set(left)]
        if not ready:
            raise CrossfedError(
                f"{method}, search: {', '.join(left)} depend on each other in their `when`."
            )
        done |= {name: left.pop(name) for name in ready}
    return done


def changes(file: Path | None, entries: list[str]) -> dict[str, Any]:
    """Changes to a declared space, from a YAML file in the form of the `search:` block and from
    `name=entry` strings.

    Raises:
        CrossfedError: the file or a string cannot be read.
    """
    found: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = load_yaml(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise CrossfedError(
                f"The space file {file} cannot be read: {' '.join(str(error).split())}."
            ) from None
        loaded = loaded.get("search", loaded) if isinstance(loaded, dict) else loaded
        if not isinstance(loaded, dict):
            raise CrossfedError(
                f"The space file {file} must map names to {{values: […]}} or "
                f"{{low, high, log, int}}."
            )
        found |= {str(name): entry for name, entry in loaded.items()}
    named: set[str] = set()
    for entry in entries:
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not value or not name:
            raise CrossfedError(
                f"--search {entry!r} must read name=[values], name={{low: …, "
                f"high: …}} or name=null."
            )
        if name in named:
            raise CrossfedError(
                f"--search names {name} twice; give it once, e.g. --search '{name}=[…]'."
            )
        named.add(name)
        found[name] = _numbers(parse_value(value, "--search"))
    return found


def _numbers(value: Any) -> Any:
    """The same with words such as 1e-3, which YAML 1.1 takes for text, read as numbers."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return parse_value(value) if isinstance(value, str) else value


def with_first(
    parameters: Mapping[str, Parameter], first: Mapping[str, Any]
) -> dict[str, Parameter]:
    """The space with the first trial's values (the paper's, or those given by `--set`) among its
    choices.

    Raises:
        CrossfedError: such a value lies outside a range.
    """
    found: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        value = first[name]
        if isinstance(parameter, Choice) and value not in parameter.values:
            parameter = parameter.model_copy(update={"values": (*parameter.values, value)})
        if isinstance(parameter, Range) and (
            value is None or not parameter.low <= value <= parameter.high
        ):
            told = "null" if value is None else value
            raise CrossfedError(
                f"search: {name}={told}, the value of the first trial, lies outside "
                f"{parameter.low:g} to {parameter.high:g}; "
                f"widen the range, e.g. --search '{name}={{low: …, high: …}}', or --set {name}=…"
            )
        found[name] = parameter
    return found


def sample(
    parameters: Mapping[str, Parameter], trial: optuna.Trial, base: Mapping[str, Any]
) -> dict[str, Any]:
    """One point of the space: method Config key -> value, without the parameters that are not
    active there.

    Args:
        base: the method's values where nothing is searched.
    """
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.active({**base, **found}):
            found[name] = parameter.suggest(trial, name)
    return found


def grid(parameters: Mapping[str, Parameter], base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every point of a space of choices, each once.

    Raises:
        CrossfedError: a parameter is a range.
    """
    for name, parameter in parameters.items():
        if isinstance(parameter, Range):
            raise CrossfedError(
                f"search: a grid needs values, but {name} is the range {parameter.low:g} to "
                f"{parameter.high:g}; "
                f"give --search '{name}=[…]' or another sampler."
            )
    seen: list[dict[str, Any]] = []
    for point in itertools.product(*(parameter.ends() for parameter in parameters.values())):
        values: dict[str, Any] = {}
        for (name, parameter), value in zip(parameters.items(), point, strict=True):
            if parameter.active({**base, **values}):
                values[name] = value
        if values not in seen:
            seen.append(values)
            yield values
