"""The search space a method declares: the `search:` block of its YAML file, checked against its Config.

search:
  K: {values: [30, 40, 50, 60, 70]}
  lr: {low: 1.0e-4, high: 1.0e-2, log: true}
  layers: {low: 1, high: 4, int: true}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

import optuna
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from crossfed.platform.config import build, declared_search
from crossfed.platform.seam import CrossfedError


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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
        changes: name -> entry in the form of the YAML block; None removes a declared parameter from the search.

    Raises:
        CrossfedError: an entry is malformed, names no key of the method's Config, or holds a value the Config refuses.
    """
    raw = declared_search(method) | dict(changes or {})
    found: dict[str, Parameter] = {}
    for name, entry in raw.items():
        if entry is None:
            continue
        try:
            found[name] = _ENTRY.validate_python(entry)
        except ValidationError:
            raise CrossfedError(
                f"{method}, search: {name}: {entry!r} is neither {{values: […]}} nor {{low, high, log, int}} with low < high."
            ) from None
        for value in found[name].ends():
            build(method, values={f"config.{name}": value})
    return found


def sample(parameters: Mapping[str, Parameter], trial: optuna.Trial) -> dict[str, Any]:
    """One point of the space: method Config key -> value."""
    return {name: parameter.suggest(trial, name) for name, parameter in parameters.items()}
