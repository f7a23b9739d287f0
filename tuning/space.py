"""The search space a method declares: the `search:` block of its YAML file, checked against its Config.

search:
  K: {values: [30, 40, 50, 60, 70]}
  lr: {low: 1.0e-4, high: 1.0e-2, log: true}
  layers: {low: 1, high: 4, int: true}
  alpha: {values: [0.1, 0.2], when: {ablation: [none, fed]}}   # searched in trials with one of these values only
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import optuna
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from crossfed.platform.config import build, declared_search, parse_value
from crossfed.platform.seam import CrossfedError


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
_ENTRY: TypeAdapter[Choice | Range] = TypeAdapter(Choice | Range)


def space(method: str, changes: Mapping[str, Any] | None = None) -> dict[str, Parameter]:
    """The parameters to search for a method: its own declaration, changed or extended by `changes`.

    Args:
        method: a method's name.
        changes: name -> entry in the form of the YAML block; a list stands for its values; None removes a declared
            parameter from the search.

    Returns:
        name -> parameter; one that others depend on (`when`) comes before them.

    Raises:
        CrossfedError: an entry is malformed, names no key of the method's Config, holds a value the Config refuses, or
            depends on itself.
    """
    raw = declared_search(method) | dict(changes or {})
    found: dict[str, Parameter] = {}
    for name, entry in raw.items():
        if entry is None:
            continue
        try:
            found[name] = _ENTRY.validate_python({"values": entry} if isinstance(entry, list | tuple) else entry)
        except ValidationError:
            raise CrossfedError(
                f"{method}, search: {name}: {entry!r} is neither {{values: […]}} nor {{low, high, log, int}} with low < high."
            ) from None
        for value in found[name].ends():
            build(method, values={f"config.{name}": value})
        for other, allowed in found[name].when.items():
            for value in allowed:
                build(method, values={f"config.{other}": value})
    return _ordered(method, found)


def _ordered(method: str, found: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Parameters after those that their `when` names."""
    done: dict[str, Parameter] = {}
    left = dict(found)
    while left:
        ready = [name for name, parameter in left.items() if not set(parameter.when) & set(left)]
        if not ready:
            raise CrossfedError(f"{method}, search: {', '.join(left)} depend on each other in their `when`.")
        done |= {name: left.pop(name) for name in ready}
    return done


def changes(file: Path | None, entries: list[str]) -> dict[str, Any]:
    """Changes to a declared space, from a YAML file in the form of the `search:` block and from `name=entry` strings.

    Raises:
        CrossfedError: the file or a string cannot be read.
    """
    found: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise CrossfedError(f"The space file {file} cannot be read: {' '.join(str(error).split())}.") from None
        loaded = loaded.get("search", loaded) if isinstance(loaded, dict) else loaded
        if not isinstance(loaded, dict):
            raise CrossfedError(f"The space file {file} must map names to {{values: […]}} or {{low, high, log, int}}.")
        found |= loaded
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not value:
            raise CrossfedError(f"--search {entry!r} must read name=[values], name={{low: …, high: …}} or name=null.")
        found[name.strip()] = _numbers(parse_value(value))
    return found


def _numbers(value: Any) -> Any:
    """The same with words such as 1e-3, which YAML 1.1 takes for text, read as numbers."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return parse_value(value) if isinstance(value, str) else value


def with_first(parameters: Mapping[str, Parameter], first: Mapping[str, Any]) -> dict[str, Parameter]:
    """The space with the first trial's values (the paper's, or those given by `--set`) among its choices.

    Raises:
        CrossfedError: such a value lies outside a range.
    """
    found: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        value = first[name]
        if isinstance(parameter, Choice) and value not in parameter.values:
            parameter = parameter.model_copy(update={"values": (*parameter.values, value)})
        if isinstance(parameter, Range) and not parameter.low <= value <= parameter.high:
            raise CrossfedError(
                f"search: {name}={value!r}, the value of the first trial, lies outside {parameter.low:g} to {parameter.high:g}; "
                f"widen the range, e.g. --search '{name}={{low: …, high: …}}', or --set {name}=…"
            )
        found[name] = parameter
    return found


def sample(parameters: Mapping[str, Parameter], trial: optuna.Trial, base: Mapping[str, Any]) -> dict[str, Any]:
    """One point of the space: method Config key -> value, without the parameters that are not active there.

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
                f"search: a grid needs values, but {name} is the range {parameter.low:g} to {parameter.high:g}; "
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
