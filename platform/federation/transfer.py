"""What is transfer worth? A method beside itself alone, its local variant and itself under
controls, over the same seeds.

Transfer is joint less solo: the same method with the same configuration, rounds and seeds, once as
a federation and once with every domain a federation of one. The local variant may have another
architecture, and says what the method is worth.

The local variant is declared with the method, in the block `local:` of its YAML file:

    local:
      method: tiger                             # the method itself where left out
      config: {patience: 10}                    # fixed values
      same: [dim, heads]                        # the run's own values of these keys
      product: {epochs: [rounds, local_epochs]} # the product of the run's own values of these keys

All runs are ordinary runs beside the given one: what has finished is taken as it is, what was
interrupted is continued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from crossfed.platform.checkpoint import read_json
from crossfed.platform.config.settings import Privacy, RunConfig, build, first_error
from crossfed.platform.console import Progress
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.controls import CONTROLS, PEERS, SOLO
from crossfed.platform.federation.run import Finish, RunResult, run_federation
from crossfed.platform.federation.runs import finished, stored_config
from crossfed.platform.layout import RESULT
from crossfed.platform.registry import find_method, method_file, nearest

LOCAL, HONEST = "local", "honest"
ARMS = (LOCAL, SOLO, HONEST, *CONTROLS, PEERS[0])
"""What is run, in the order of a table; the last only where a server mixes what domains send."""


class LocalVariant(BaseModel):
    """The block `local:` of a method's YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    same: tuple[str, ...] = ()
    product: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    def values(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The variant's own values, given those of the run; a product with a none in it is none."""
        products = {
            key: None
            if any(own[name] is None for name in names)
            else math.prod(own[name] for name in names)
            for key, names in self.product.items()
        }
        return {**{key: own[key] for key in self.same}, **products, **self.config}


def local_variant(
    config: RunConfig, method: str | None = None, sets: Sequence[str] = ()
) -> RunConfig:
    """The run that trains every domain alone, to set a federated run against: same data, protocol,
    seed and threads.

    Args:
        config: the federated run.
        method: a method in place of the declared one. sets: `key=value` of its own keys, only with
            `method`.

    Raises:
        CrossfedError: nothing is declared and no method is given, or the values do not fit the
            method.
    """
    if method is None:
        block = method_file(config.method).get("local")
        if block is None:
            raise CrossfedError(
                f"{config.method} declares no local variant (`local:` in its YAML file); name "
                f"one with --local METHOD."
            )
        where = f"local: of {config.method}"
        try:
            declared = LocalVariant.model_validate(block)
            chosen = declared.method or config.method
            values = declared.values(config.config)
        except ValidationError as error:
            raise first_error(error, where, LocalVariant) from None
        except KeyError as error:
            raise CrossfedError(f"{where}: {config.method} has no key {error.args[0]!r}.") from None
    else:
        where, chosen, values = f"--local {method}", method, {}
    found = find_method(chosen)
    if foreign := [
        text for text in sets if text.partition("=")[0] not in found.Config.model_fields
    ]:
        raise CrossfedError(
            f"{where}: unknown key in "
            f"{foreign[0]!r}{nearest(foreign[0], found.Config.model_fields)}"
        )
    base = build(
        chosen, values={"config": config.config} if chosen == config.method else {}, sets=sets
    ).config
    try:
        checked = found.Config.model_validate({**base, **values})
    except ValidationError as error:
        raise first_error(error, where, found.Config) from None
    return config.model_copy(
        update={
            "method": chosen,
            "preset": None,
            "config": checked.model_dump(mode="json"),
            "control": "none",
            "privacy": config.privacy if chosen == config.method else Privacy(),
        }
    )


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the runs that are compared.

    Attributes:
        name: one of `ARMS`. seed: of the run.
        path: its directory. problem: why it has no result, in a sentence; None for a finished run.
    """

    name: str
    seed: int
    path: Path
    problem: str | None = None


def arms(config: RunConfig, local: RunConfig) -> dict[str, RunConfig]:
    """The configuration of every arm, with the seed of `config`."""
    found = {LOCAL: local, HONEST: config}
    mixes = config.resolved.init_server is not None  # otherwise peers-noise is noise
    for name in (SOLO, *CONTROLS, *(PEERS[:1] if mixes else ())):
        found[name] = config.model_copy(update={"control": name})
    return {name: found[name] for name in ARMS if name in found}


def run_arms(
    run_dir: Path,
    seeds: int,
    finish: Finish,
    local: RunConfig | None = None,
    view: Callable[[], Progress] | None = None,
    say: Callable[[str], None] = lambda line: None,
    backend: Literal["ray", "inprocess"] | None = None,
    launch: Callable[..., RunResult] = run_federation,
) -> list[Arm]:
    """All arms over the seeds: that of the given run and those after it. New runs lie beside the
    given one.

    Seed after seed, so that an interrupt leaves whole comparisons behind; the same call continues.
    A controlled run may end with an error, since noise can make a method diverge: that is told in
    place of its result, and the others go on.

    Args:
        run_dir: the honest run, finished, with test metrics.
        seeds: how many. finish: reads the test split of every new run.
        local: the local variant; by default the declared one.
        view: makes the progress view of a new run. say: told what happens, in lines.
        backend: of new runs; by default that of the given run.
        launch: starts a run, as `run_federation` does.

    Raises:
        CrossfedError: the given run cannot be compared, or a run without a control failed.
    """
    config = stored_config(run_dir)
    if config.control != "none":
        raise CrossfedError(
            f"{run_dir} ran under the control {config.control}; name the honest run."
        )
    if config.evaluated is not None:
        raise CrossfedError(f"{run_dir} measures {config.evaluated.run} again; name that run.")
    if not finished(run_dir):
        raise CrossfedError(
            f"{run_dir} has no test metrics: it has not finished, or it is a trial of a search; "
            f"crossfed run --resume {run_dir} goes on with an interrupted run."
        )
    wanted = {
        name: _audited(one, False)
        for name, one in arms(config, local or local_variant(config)).items()
    }
    tracking = {
        "parent_run_id": None,
        "params": None,
        "tags": {**config.tracking.tags, "audit": run_dir.name},
    }
    place = {
        "out": run_dir.parent,
        "backend": backend or config.backend,
        "tracking": config.tracking.model_copy(update=tracking),
    }
    data = read_json(run_dir / "data.json")
    done: list[Arm] = []
    for seed in range(config.seed, config.seed + seeds):
        for name, base in wanted.items():
            number = f"{len(done) + 1} of {seeds * len(wanted)}: {name}, seed {seed}"
            one = base.model_copy(update={"seed": seed, **place})
            if name == HONEST and seed == config.seed:
                done.append(Arm(name, seed, run_dir))
                say(f"{number}: {run_dir}")
                continue
            done.append(_run(name, one, data, finish, view, say, number, launch))
    return done


def _run(
    name: str,
    config: RunConfig,
    data: Mapping[str, Any],
    finish: Finish,
    view: Callable[[], Progress] | None,
    say: Callable[[str], None],
    number: str,
    launch: Callable[..., RunResult],
) -> Arm:
    """One arm with one seed: found, continued or run."""
    there = _like(config, data)
    if done := [path for path in there if finished(path)]:
        say(f"{number}: {done[0]}, which is there already")
        return Arm(name, config.seed, done[0])
    open_ = [path for path in there if not (path / RESULT).is_file()]
    resume = open_[-1] if open_ else None
    say(f"{number}: {f'going on with {resume}' if resume else 'running'}")
    started: list[Path] = []
    try:
        launch(
            stored_config(resume) if resume else config,
            resume=resume,
            view=view() if view else None,
            finish=finish,
            started=started.append,
        )
    except CrossfedError as error:
        if name in (LOCAL, HONEST) or not started:
            raise
        say(f"{number}: it has no result: {error}")
        return Arm(name, config.seed, started[0], str(error))
    return Arm(name, config.seed, started[0])


def _audited(config: RunConfig, wanted: bool) -> RunConfig:
    """The same run with or without the attack at its end, which changes no metric."""
    return config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"audit": wanted})}
    )


def _like(config: RunConfig, data: Mapping[str, Any]) -> list[Path]:
    """Runs of this configuration and seed on this data, the oldest first."""
    hashes = {_audited(config, wanted).hash() for wanted in (True, False)}
    same = {"seed": config.seed} | {key: data[key] for key in ("fingerprint", "domains")}
    found = []
    for file in sorted(config.out.glob("*/data.json"), key=lambda file: file.stat().st_mtime):
        try:
            before = read_json(file)
        except CrossfedError:  # a run that was killed while it began
            continue
        if before.get("config_hash") in hashes and all(
            before.get(key) == value for key, value in same.items()
        ):
            found.append(file.parent)
    return found
