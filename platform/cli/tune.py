"""The commands that search. What searches is found by name at run time, as methods are: the
platform does not import it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from crossfed.platform.cli import complete
from crossfed.platform.endings import terminable
from crossfed.platform.errors import CrossfedError

if TYPE_CHECKING:
    from crossfed.platform.config.settings import RunConfig
    from crossfed.platform.console import Progress


class Sampler(StrEnum):
    """Optuna's samplers."""

    tpe = "tpe"
    random = "random"
    grid = "grid"
    cmaes = "cmaes"
    nsgaii = "nsgaii"
    nsgaiii = "nsgaiii"
    gp = "gp"


class Pruner(StrEnum):
    """Rules that stop trials by their rounds."""

    asha = "asha"
    median = "median"
    none = "none"


class _StartByDefault(TyperGroup):
    """`crossfed tune METHOD …` stands for `crossfed tune start METHOD …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *self.get_help_option_names(ctx)}:
            args = ["start", *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The commands, and what starting a study takes."""
        super().format_help(ctx, formatter)
        start = self.commands["start"]
        start.format_help(start.context_class(start, info_name="start", parent=ctx), formatter)


tune_app = typer.Typer(
    cls=_StartByDefault,
    no_args_is_help=True,
    help="Search a method's hyperparameters over whole federated runs: crossfed tune METHOD "
    "[OPTIONS] starts a study.",
)

Data = Annotated[
    Path | None, typer.Option(help="Prepared data directory; without it, embedded synthetic shops.")
]
Domains = Annotated[str | None, typer.Option(help="Comma-separated subset of the data's domains.")]
Trials = Annotated[int, typer.Option(help="Trials in all; the first has the paper's setting.")]
Concurrent = Annotated[
    int | None, typer.Option(help="Trials at once; by default as many as fit the cluster.")
]
Objectives = Annotated[
    list[str] | None,
    typer.Option(
        "--objective",
        help="mean (default), worst or domain:NAME of the selecting validation metric; "
        "epsilon, bytes. Repeatable.",
    ),
]
MaxRounds = Annotated[
    int | None, typer.Option(help="Rounds of a trial at most; the winner is run again in full.")
]
Budget = Annotated[
    str | None, typer.Option("--time-budget", help="End the search after so long: 90s, 30m, 2h.")
]
Seeds = Annotated[
    int, typer.Option(help="Seeds of the winner's final runs, which read the test split; 0: none.")
]
SamplerOption = Annotated[Sampler, typer.Option(help="Optuna's sampler.")]
PrunerOption = Annotated[
    Pruner | None,
    typer.Option(
        help="Rule that stops trials by their rounds.  \\[default: asha; none with several "
        "objectives]",
        show_default=False,
    ),
]
Grace = Annotated[
    int | None,
    typer.Option(help="Rounds before which nothing is stopped; by default past stage one."),
]
Reduction = Annotated[
    int | None,
    typer.Option(
        help="asha: one trial in so many goes on at each rung.  \\[default: 2]", show_default=False
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--search",
        help="Change the space: K=[10,20], 'lr={low: 1e-4, high: 1e-2, log: true}', alpha=null.",
    ),
]
Space = Annotated[
    Path | None,
    typer.Option(help="Change the space by a YAML file in the form of a search: block."),
]
Retries = Annotated[int, typer.Option(help="How often a trial whose process dies is run again.")]
Storage = Annotated[
    str | None, typer.Option(help="Optuna storage URL; by default SQLite in the study's folder.")
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="One of the method's presets, for the first trial.", autocompletion=complete.preset
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value for all trials, as in `crossfed run`. Repeatable."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Seed of the trials' runs and of the sampler.  \\[default: 0]", show_default=False
    ),
]
NewOut = Annotated[
    Path | None,
    typer.Option(
        help="Folder of run directories; the study gets one in it.  \\[default: runs]",
        show_default=False,
    ),
]
OutOption = Annotated[Path, typer.Option(help="Folder of run directories, with the study's in it.")]
Address = Annotated[
    str | None, typer.Option(help="A running Ray cluster to join; without it a local one starts.")
]
Uri = Annotated[
    str | None,
    typer.Option(help="MLflow server or sqlite:/// URI; by default a database beside the runs."),
]
Require = Annotated[
    bool, typer.Option("--require-tracking", help="Fail when the MLflow server cannot be reached.")
]
Name = Annotated[str, typer.Argument(help="A study's name or folder.", autocompletion=complete.run)]


class Place(StrEnum):
    """Where the nodes of a trial run."""

    ray = "ray"
    inprocess = "inprocess"


class Shown(StrEnum):
    """How progress is shown: a line per trial, or nothing."""

    plain = "plain"
    quiet = "quiet"


Backend = Annotated[
    Place | None,
    typer.Option(
        help="Nodes of a trial as Ray actors, or all in the trial's process.  \\[default: ray]",
        show_default=False,
    ),
]
View = Annotated[Shown, typer.Option(help="How progress is shown.")]


def _search() -> Any:
    return importlib.import_module("crossfed.tuning.search")


def _study() -> Any:
    return importlib.import_module("crossfed.tuning.study")


def _view(shown: Shown) -> Progress:
    from crossfed.platform.console import make_progress

    return make_progress("plain" if shown is Shown.plain else "quiet")


def _seconds(text: str | None) -> float | None:
    """90, 90s, 30m, 2h -> seconds."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None or not float(found[1]):
        raise CrossfedError(f"--time-budget {text!r} is no length of time; write 90s, 30m or 2h.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _base(
    method: str,
    preset: str | None,
    sets: list[str] | None,
    data: Path | None,
    domains: str | None,
    seed: int | None,
    out: Path | None,
    backend: Place | None,
    address: str | None,
    uri: str | None,
    require: bool,
) -> RunConfig:
    from crossfed.platform.config.settings import build

    return build(
        method,
        preset=preset,
        sets=sets or [],
        values={
            "data": data,
            "domains": tuple(name.strip() for name in domains.split(","))
            if domains is not None
            else None,
            "seed": seed,
            "out": out,
            "backend": backend.value if backend else None,
            "resources.address": address,
            "tracking.uri": uri,
            "tracking.require": require or None,
        },
    )


def _console() -> Console:
    """Wide where nobody looks: rich's 80 columns would drop some of a table's."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _told(found: Any, quiet: bool = False) -> None:
    report = importlib.import_module("crossfed.tuning.report.tables")
    if not quiet:
        _console().print(report.show(found.study.optuna))
        for line in _finals(found.summary):
            typer.echo(line)
    typer.echo(f"{found.study.folder / 'study.json'}")


def _finals(summary: dict[str, Any]) -> list[str]:
    """The winner's final runs, a line per domain."""
    lines, many = [], len(summary["seeds"])
    for name, splits in summary["finals"].items():
        parts = [
            f"{split} {row['mean']:.4f}" + ("" if row["sd"] is None else f" ± {row['sd']:.4f}")
            for split, row in splits.items()
        ]
        lines.append(
            f"final      {name}: {summary['metric']}: {', '.join(parts)}  ({many} "
            f"seed{'s' * (many > 1)}, "
            f"{summary['protocol']}, {summary['candidates'][name]})"
        )
    return lines


def _run(call: Any, hint: Callable[[], str]) -> Any:
    """What `call` gives; Ctrl-C and SIGTERM end it with a hint at how to go on."""
    ending = terminable(hint)
    try:
        with ending:
            return call()
    except KeyboardInterrupt:
        ending.tell()
        raise typer.Exit(130) from None


def _kept(folder: Path) -> str:
    """How to go on with a study that was interrupted."""
    known = (folder / _study().STUDY).is_file()
    return (
        f"What was committed stays: crossfed tune resume {folder}"
        if known
        else "The study had not begun."
    )


@tune_app.command("start")
def start(
    method: Annotated[
        str,
        typer.Argument(
            help="A method, package.module:ATTRIBUTE, or a run's YAML file.",
            autocompletion=complete.method,
        ),
    ],
    data: Data = None,
    domains: Domains = None,
    preset: Preset = None,
    sets: Sets = None,
    trials: Trials = 20,
    study: Annotated[
        str | None, typer.Option(help="The study's name; by default method, data and time.")
    ] = None,
    concurrent: Concurrent = None,
    objectives: Objectives = None,
    max_rounds: MaxRounds = None,
    time_budget: Budget = None,
    seeds: Seeds = 1,
    sampler: SamplerOption = Sampler.tpe,
    pruner: PrunerOption = None,
    grace: Grace = None,
    reduction: Reduction = None,
    changes: Changes = None,
    space: Space = None,
    retries: Retries = 1,
    storage: Storage = None,
    seed: Seed = None,
    out: NewOut = None,
    backend: Backend = None,
    address: Address = None,
    tracking_uri: Uri = None,
    require_tracking: Require = False,
    progress: View = Shown.plain,
) -> None:
    """Start a study: trials by the sampler, stopped by the rule, then the winner in full over the
    seeds.
    """
    base = _base(
        method,
        preset,
        sets,
        data,
        domains,
        seed,
        out,
        backend,
        address,
        tracking_uri,
        require_tracking,
    )
    # after what is wrong has been told: it takes seconds
    from crossfed.platform.federation.final import test_once

    spaces = importlib.import_module("crossfed.tuning.space")
    name = study or _default_name(base)
    search = _study().checked_search(
        name=name,
        trials=trials,
        concurrent=concurrent,
        objectives=tuple(objectives or ("mean",)),
        sampler=sampler.value,
        pruner=pruner.value if pruner else ("none" if len(objectives or ()) > 1 else "asha"),
        grace=grace,
        reduction=reduction,
        max_rounds=max_rounds,
        time_budget=_seconds(time_budget),
        seeds=seeds,
        retries=retries,
        seed=base.seed,
        storage=storage,
        changes=spaces.changes(space, changes or []),
    )
    view = _view(progress)
    found = _run(
        lambda: _search().start(search, base, finish=test_once, view=view),
        lambda: _kept(base.out / name),
    )
    _told(found, progress is Shown.quiet)


def _default_name(base: RunConfig) -> str:
    from crossfed.platform.registry import method_name

    data = base.data.name if base.data else "synthetic"
    method = re.sub(r"[^A-Za-z0-9]+", "_", method_name(base.method))
    return f"{method}-{data}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"


@tune_app.command("resume")
def resume(name: Name, out: OutOption = Path("runs"), progress: View = Shown.plain) -> None:
    """Go on with an interrupted study: its running trials from their last committed round, then the
    rest.
    """
    from crossfed.platform.federation.final import test_once

    _go_on(name, out, progress, finish=test_once)


def _go_on(name: str, out: Path, progress: Shown, **how: Any) -> None:
    folder, view = _study().find_study(name, out), _view(progress)
    study = _study().Study.open(folder)
    _told(
        _run(lambda: _search().go_on(study, view=view, **how), lambda: _kept(folder)),
        progress is Shown.quiet,
    )


@tune_app.command("extend")
def extend(
    name: Name,
    trials: Annotated[int, typer.Option(min=1, help="How many trials more.")],
    out: OutOption = Path("runs"),
    progress: View = Shown.plain,
) -> None:
    """Add trials to a study; the sampler knows all earlier ones."""
    from crossfed.platform.federation.final import test_once

    _go_on(name, out, progress, finish=test_once, more=trials)


@tune_app.command("show")
def show(name: Name, out: OutOption = Path("runs")) -> None:
    """Show a study: trials, best, importance of the settings, Pareto front, the winner's final
    runs.
    """
    from crossfed.platform.checkpoint import read_json
    from crossfed.platform.tracking import abandoned

    study = _study().Study.open(_study().find_study(name, out))
    if not abandoned.in_use(study.folder) and not study.over():
        abandoned.close(study.folder.parent, study.base.tracking.uri, study.folder)
        typer.echo(
            f"interrupted: nobody works on this study; crossfed tune resume "
            f"{study.folder} goes on with it"
        )
    _console().print(importlib.import_module("crossfed.tuning.report.tables").show(study.optuna))
    summary = study.folder / "study.json"
    if summary.is_file():
        try:
            lines = _finals(read_json(summary))
        except (CrossfedError, KeyError, TypeError, AttributeError):
            raise CrossfedError(
                f"{summary} is damaged; crossfed tune resume {study.folder} writes it again."
            ) from None
        for line in lines:
            typer.echo(line)


@tune_app.command("dashboard")
def dashboard(
    name: Name,
    out: OutOption = Path("runs"),
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port on the loopback interface.")
    ] = 8080,
) -> None:
    """Open Optuna's dashboard on a study, also while it runs: live plots, on the loopback interface
    only.
    """
    try:
        from optuna_dashboard import run_server
    except ImportError:
        raise CrossfedError(
            "optuna-dashboard is not installed: pip install 'crossfed[dashboard]'."
        ) from None
    study = _study().Study.open(_study().find_study(name, out))
    typer.echo(f"Optuna dashboard on http://127.0.0.1:{port} (Ctrl-C ends it)")
    run_server(study.optuna._storage, host="127.0.0.1", port=port)


def tune_all(
    methods: Annotated[str, typer.Argument(help="Comma-separated methods.")],
    data: Data = None,
    domains: Domains = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="key=value of the run (not of a method) for all methods. Repeatable."
        ),
    ] = None,
    trials: Trials = 20,
    study: Annotated[
        str | None, typer.Option(help="Name that the studies share; by default data and time.")
    ] = None,
    concurrent: Concurrent = None,
    max_rounds: MaxRounds = None,
    time_budget: Budget = None,
    seeds: Seeds = 3,
    sampler: SamplerOption = Sampler.tpe,
    pruner: PrunerOption = None,
    reduction: Reduction = None,
    retries: Retries = 1,
    seed: Seed = None,
    out: NewOut = None,
    backend: Backend = None,
    address: Address = None,
    tracking_uri: Uri = None,
    require_tracking: Require = False,
    progress: View = Shown.plain,
) -> None:
    """Tune several methods alike: the same trials and rule for each, winners in full over the
    seeds, and what each cost.
    """
    from crossfed.platform.federation.final import test_once

    names = [name.strip() for name in methods.split(",") if name.strip()]
    if len(set(names)) < len(names) or not names:
        raise CrossfedError(f"Name each method once; got {methods!r}.")
    if seeds < 1:
        raise CrossfedError("tune-all compares test metrics: --seeds must be at least 1.")
    shared = (
        study
        or f"all-{data.name if data else 'synthetic'}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
    )
    asked = {}
    for method in names:
        base = _base(
            method,
            None,
            sets,
            data,
            domains,
            seed,
            out,
            backend,
            address,
            tracking_uri,
            require_tracking,
        )
        search = _study().checked_search(
            name=f"{shared}-{re.sub(r'[^A-Za-z0-9]+', '_', method)}",
            trials=trials,
            concurrent=concurrent,
            sampler=sampler.value,
            pruner=pruner.value if pruner else "asha",
            reduction=reduction,
            max_rounds=max_rounds,
            time_budget=_seconds(time_budget),
            seeds=seeds,
            retries=retries,
            seed=base.seed,
        )
        asked[method] = (search, base)
    view, folder = _view(progress), base.out / shared
    table = _run(
        lambda: _search().tune_all(asked, folder, finish=test_once, view=view),
        lambda: f"What was committed stays: the same command with --study {shared} goes on.",
    )
    _console().print(table)
    typer.echo(f"{folder / 'budget.md'}")
