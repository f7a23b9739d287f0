"""About how long a run takes, said before its first round where that is long.

A method declares it in the block `pace:` of its YAML file, as measured:

    pace:
      speed: {default: 42, small: 900}  # training interactions a second on one core, by preset
      work: [rounds, local_epochs]      # keys whose product is how often a run goes through them
      sizes: [dim, inner]               # keys that the speed depends on; with others nothing is said
      quick: small                      # the preset to try first
"""  # noqa: E501

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from crossfed.platform.config.settings import RunConfig, build, first_error
from crossfed.platform.console import span
from crossfed.platform.registry import method_file

LONG = 300.0
"""Seconds from which on a run says beforehand how long it takes."""


class Pace(BaseModel):
    """The block `pace:` of a method's YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    speed: dict[str, float]
    work: tuple[str, ...] = Field(min_length=1)
    sizes: tuple[str, ...] = ()
    quick: str | None = None

    def seconds(
        self, config: RunConfig, interactions: int, cores: float, preset: str | None
    ) -> float | None:
        """How long a run takes with a preset's sizes, at most; None where that was not measured.

        Args:
            interactions: of all domains. cores: how many of them are computed for at once.
        """
        measured = preset if preset in self.speed else None
        speed = self.speed.get(measured or "default")
        usual = build(config.method, preset=measured).config
        if speed is None or any(config.config[key] != usual[key] for key in self.sizes):
            return None
        return math.prod(config.config[key] for key in self.work) * interactions / speed / cores


def announcement(config: RunConfig, interactions: int, cores: float) -> str | None:
    """What a run says before its first round: about how long, and which preset is quick; None where
    it is short.

    Args:
        interactions, cores: as of `Pace.seconds`.

    Raises:
        CrossfedError: the method's block cannot be read.
    """
    block = method_file(config.method).get("pace")
    if block is None:
        return None
    try:
        pace = Pace.model_validate(block)
    except ValidationError as error:
        raise first_error(error, f"pace: of {config.method}", Pace) from None
    seconds = pace.seconds(config, interactions, cores, config.preset)
    if seconds is None or seconds < LONG:
        return None
    length = (
        f"about {span(seconds)} on {cores:g} cores like those it was measured on, unless "
        f"it stops early"
    )
    if pace.quick is None or pace.quick == config.preset:
        return length
    other = build(config.method, preset=pace.quick)
    quick = pace.seconds(other, interactions, cores, pace.quick)
    return f"{length}; --preset {pace.quick} is quick" + (f", about {span(quick)}" if quick else "")
