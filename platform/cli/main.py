"""The command line. A user's mistake is one sentence and exit code 2; a finished run prints the
path of its result.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from crossfed.platform.cli import complete, report
from crossfed.platform.cli.audit import audit
from crossfed.platform.cli.cluster import cluster_app, doctor, submit
from crossfed.platform.cli.evaluate import evaluate
from crossfed.platform.cli.recommend import recommend
from crossfed.platform.cli.serve import serve
from crossfed.platform.cli.tune import tune_all, tune_app
from crossfed.platform.endings import own_process, terminable
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import Release, Scope

if TYPE_CHECKING:
    from crossfed.platform.data.store import PreparedData
    from crossfed.tuning.space import Parameter

RUNNING, DATA, RESULTS, PLACES = (
    "Run and search",
    "Data and methods",
    "Results",
    "Machines and tracking",
)
PANELS = {
    RUNNING: ("run", "tune", "tune-all"),
    DATA: ("methods", "data"),
    RESULTS: (
        "compare",
        "report",
        "analyse",
        "figures",
        "recommend",
        "serve",
        "evaluate",
        "audit",
        "privacy",
    ),
    PLACES: ("ui", "replay", "doctor", "cluster", "submit"),
}
"""The commands as `--help` shows them."""
_PANEL = {name: panel for panel, names in PANELS.items() for name in names}


class _InPanels(TyperGroup):
    """Commands in the order of `PANELS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = list(_PANEL)
        return sorted(
            super().list_commands(ctx),
            key=lambda name: order.index(name) if name in order else len(order),
        )

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.rich_help_panel = _PANEL.get(cmd_name)  # type: ignore[attr-defined]
        return command


app = typer.Typer(
    name="crossfed",
    cls=_InPanels,
    help="Federated cross-domain recommendation: train over domains that keep their "
    "interactions to themselves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Prepare, generate and describe data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(tune_app, name="tune")
app.add_typer(cluster_app, name="cluster")
app.command()(doctor)
app.command()(submit)
app.add_typer(report.analyse_app, name="analyse")
app.command("tune-all")(tune_all)
app.command("audit")(audit)
app.command("evaluate")(evaluate)
app.command("compare")(report.compare)
app.command("report")(report.report)
app.command("figures")(report.figures)
app.command("recommend")(recommend)
app.command("serve")(serve)

Out = Annotated[Path, typer.Option(help="Folder of run directories.", show_default=True)]
RUNS = Path("runs")


class Backend(StrEnum):
    """Where the nodes run."""

    ray = "ray"
    inprocess = "inprocess"


class View(StrEnum):
    """How progress is shown."""

    auto = "auto"
    live = "live"
    plain = "plain"
    quiet = "quiet"


class Size(StrEnum):
    """Sizes of synthetic data."""

    small = "small"
    medium = "medium"
    large = "large"


class ControlOption(StrEnum):
    """What the nodes receive in place of what they were sent."""

    none = "none"
    noise = "noise"
    shuffle = "shuffle"
    stale = "stale"
    solo = "solo"
    peers_noise = "peers-noise"
    peers_shuffle = "peers-shuffle"
    peers_stale = "peers-stale"


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"crossfed {importlib.metadata.version('crossfed')}")
        raise typer.Exit


@app.command()
def run(
    method: Annotated[
        str | None,
        typer.Argument(
            help="A method (see `crossfed methods`), package.module:ATTRIBUTE, or a run's YAML "
            "file.",
            autocompletion=complete.method,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared data directory; without it, embedded synthetic shops."),
    ] = None,
    domains: Annotated[
        str | None, typer.Option(help="Comma-separated subset of the data's domains.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="One of the method's presets.", autocompletion=complete.preset),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="key=value; a method's key or a dotted key of the run. Repeatable."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the run.  \\[default: 0]", show_default=False)
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder of run directories, or a URI (s3://bucket/prefix …) to which runs in "
            "./runs are copied commit by "
            "commit.  \\[default: runs]",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="An interrupted run's directory, id or URI, to continue; --data where its "
            "data moved.",
            autocompletion=complete.run,
        ),
    ] = None,
    backend: Annotated[
        Backend | None,
        typer.Option(help="Ray actors, or one process.  \\[default: ray]", show_default=False),
    ] = None,
    control: Annotated[
        ControlOption | None,
        typer.Option(
            help="Replace what is received, or (solo) let every domain be alone: what is "
            "transfer worth?",
            show_default=False,
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="A running Ray cluster to join; without it a local one starts."),
    ] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            help="MLflow server or sqlite:/// URI; by default a database beside the runs."
        ),
    ] = None,
    require_tracking: Annotated[
        bool,
        typer.Option("--require-tracking", help="Fail when the MLflow server cannot be reached."),
    ] = False,
    progress: Annotated[View, typer.Option(help="How progress is shown.")] = View.auto,
) -> None:
    """Run one federation from start to result."""
    from crossfed.platform.config.settings import build
    from crossfed.platform.console import make_progress
    from crossfed.platform.data.store import PreparedData
    from crossfed.platform.uris import is_uri

    started: list[Path] = []
    view = make_progress(progress.value)
    if resume is not None:
        if method or domains or preset or sets or seed is not None or backend or control or address:
            raise CrossfedError(
                "--resume continues a run as it was configured; give no method, domains, seed, "
                "--set or back end with it."
            )
        from crossfed.platform.federation.runs import fetch_run, find_run, stored_config

        folder = Path(out or RUNS)
        run_dir = fetch_run(resume, folder) if is_uri(resume) else find_run(resume, folder)
        config = stored_config(run_dir, data)
    else:
        if method is None:
            raise CrossfedError(
                "Name a method (see `crossfed methods`), a run's YAML file, or --resume RUN."
            )
        run_dir = None
        config = build(
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
                "control": control.value if control else None,
                "resources.address": address,
                "tracking.uri": tracking_uri,
                "tracking.require": require_tracking or None,
            },
        )
        if config.data is not None:
            PreparedData.open(config.data)  # what is no data is refused before torch is imported
    from crossfed.platform.federation.final import test_once
    from crossfed.platform.report.recording import run_recorded

    def hint() -> str:
        where = started[0] if started else None
        return f"What was committed stays: crossfed run --resume {where}" if where else ""

    ending = terminable(hint)
    try:
        with ending:
            result = run_recorded(
                config, resume=run_dir, view=view, finish=test_once, started=started.append
            )
    except KeyboardInterrupt:
        ending.tell()
        raise typer.Exit(130) from None
    typer.echo(f"{result.run_dir / 'result.json'}")


@app.command()
def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show one method with its configuration.", autocompletion=complete.method
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="With a method: also the keys of the run that --set takes."),
    ] = False,
) -> None:
    """List the methods, and what each sends."""
    from crossfed.platform.config.settings import run_keys
    from crossfed.platform.registry import find_method, method_file, method_names
    from crossfed.tuning.space import space

    console = Console()
    for found in [name] if name else method_names():
        method = find_method(found)
        console.print(
            f"[bold]{method.name}[/]  {method.title}  [dim]({method.paper})[/]", highlight=False
        )
        if method.scope == Scope.LOCAL or not method.fields:
            console.print("  sends nothing: every domain trains alone")
        for field in method.fields:
            shape = (
                "any shape, the same at every domain"
                if field.shape is None
                else "[" + ", ".join(map(str, field.shape)) + "]"
            )
            console.print(
                f"  {field.direction:<5} {field.key}: {field.dtype} {shape}: {field.meaning}",
                markup=False,
                highlight=False,
            )
        shipped = method_file(found)
        for release in method.releases(method.Config.model_validate(shipped.get("config", {}))):
            console.print(f"  noise {_released(release)}", markup=False, highlight=False)
        if presets := shipped.get("presets"):
            console.print(f"  presets: {', '.join(presets)}", highlight=False)
        if name is None:
            continue
        table = Table("key", "default", "meaning", box=None, padding=(0, 2, 0, 2))
        defaults = shipped.get("config", {})
        for key, info in method.Config.model_fields.items():
            table.add_row(key, str(defaults.get(key, info.default)), info.description or "")
        if everything:
            for key, info in run_keys().items():
                default = info.get_default(call_default_factory=True)
                table.add_row(
                    key, "none" if default is None else str(default), info.description or ""
                )
        console.print(table)
        if local := shipped.get("local"):
            console.print(
                f"  local variant: {local.get('method', name)}", markup=False, highlight=False
            )
        if searched := space(found):
            console.print(
                "  searched: "
                + "; ".join(f"{key} {_range(entry)}" for key, entry in searched.items()),
                markup=False,
                highlight=False,
            )


def _released(release: Release) -> str:
    """One declared release, in words."""
    return (
        f"{', '.join(release.keys)} in {release.stage}: {release.mechanism}, scale "
        f"{release.scale:g}, "
        f"{release.norm} sensitivity {release.sensitivity:g} of {release.unit}, "
        f"{release.count} releases a message"
        + ("" if release.mechanism == "gaussian" else f" of ε = {release.epsilon:g}")
        + f"; the paper counts ε = {release.per_round_epsilon:g} for all of it"
    )


def _range(entry: Parameter) -> str:
    """What is searched of one key, in words."""
    from crossfed.tuning.space import Range

    ends = [str(end) for end in entry.ends()]
    if isinstance(entry, Range):
        return " … ".join(ends) + (" log" if entry.log else "")
    return "{" + ", ".join(ends) + "}"


@data_app.command()
def prepare(
    spec: Annotated[
        str,
        typer.Argument(
            help="A spec file, or the name of one that ships (see `crossfed data specs`)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    sources: Annotated[
        Path | None,
        typer.Option(help="Folder of the source files; by default the spec file's own."),
    ] = None,
) -> None:
    """Turn source files into a prepared data directory: Parquet per domain and a manifest."""
    from crossfed.platform.data.prepare import prepare as prepare_data

    _stats_table(prepare_data(spec, out, sources=sources, report=typer.echo))


@data_app.command()
def specs(
    name: Annotated[str | None, typer.Argument(help="Print one spec, to copy and change.")] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="Every key that a spec may hold, with its meaning.")
    ] = False,
) -> None:
    """List the specs that ship, with the public files they need and where those are published."""
    from crossfed.platform.data.prepare import keys as spec_keys
    from crossfed.platform.data.prepare import load_spec, shipped
    from crossfed.platform.registry import nearest

    if keys:
        for place, rows in spec_keys().items():
            shown = Table(
                "key",
                "default",
                "meaning",
                title=place,
                title_justify="left",
                box=None,
                padding=(0, 2, 0, 0),
            )
            shown.columns[0].no_wrap = True
            for row in rows:
                shown.add_row(*(escape(cell) for cell in row))
            Console(highlight=False).print(shown)
        return
    paths = shipped()
    if name is not None:
        if name not in paths:
            raise CrossfedError(f"There is no shipped spec {name!r}{nearest(name, paths)}")
        typer.echo(paths[name].read_text(encoding="utf-8"), nl=False)
        return
    console = Console(highlight=False)
    for key in paths:
        spec = load_spec(key)
        console.print(f"[bold]{key}[/]  {spec.description}")
        sources = [source for domain in spec.domains.values() for source in domain.sources]
        for path, published in {source.path: source.published for source in sources}.items():
            console.print(f"  {path}  [dim]{published or ''}[/]")


@data_app.command()
def stats(directory: Annotated[Path, typer.Argument(help="A prepared data directory.")]) -> None:
    """Users, items, interactions, average length, density and overlap of a prepared data
    directory.
    """
    from crossfed.platform.data.store import PreparedData

    _stats_table(PreparedData.open(directory))


def _stats_table(prepared: PreparedData) -> None:
    from crossfed.platform.data.stats import overlaps, table

    console = Console(highlight=False)
    shown = Table(
        title=f"{prepared.path.name}{' (synthetic)' if prepared.synthetic else ''}",
        title_justify="left",
    )
    for column in ("domain", "users", "items", "interactions", "length", "density", "without text"):
        shown.add_column(column, justify="left" if column == "domain" else "right")
    for row in table(prepared):
        shown.add_row(
            row.domain, f"{row.users:,}", f"{row.items:,}", f"{row.interactions:,}",
            f"{row.average_length:.2f}", f"{row.density:.4%}", f"{row.items_without_text:,}",
        )  # fmt: skip
    console.print(shown)
    for shared in overlaps(prepared):
        console.print(
            f"users in {' and '.join(shared.domains)}: {shared.users:,} "
            f"({shared.ratio:.1%} of all in them)"
        )


@data_app.command()
def synth(
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    size: Annotated[
        Size, typer.Option(help="Sizes to start from; large is that of Amazon Books and Movies.")
    ] = Size.small,
    domains: Annotated[int | None, typer.Option(min=1, help="Number of domains.")] = None,
    users: Annotated[int | None, typer.Option(min=20, help="Users per domain.")] = None,
    items: Annotated[int | None, typer.Option(min=20, help="Items per domain.")] = None,
    interactions_per_user: Annotated[
        float | None, typer.Option(min=5, help="Mean interactions per user.")
    ] = None,
    overlap: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of users found in every domain.")
    ] = None,
    shared: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share of tastes common to all domains; at 0 nothing transfers."
        ),
    ] = None,
    smallest: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Users of the last domain, as a share of the others'."),
    ] = None,
    taste_in_text: Annotated[
        bool, typer.Option(help="Whether an item's text tells its taste.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generator.")] = 0,
) -> None:
    """Generate synthetic shops whose users' interests are shared across domains."""
    from crossfed.platform.data.synthetic import PRESETS, generate

    given = {
        "domains": domains,
        "users": users,
        "items": items,
        "interactions_per_user": interactions_per_user,
        "overlap": overlap,
        "shared": shared,
        "smallest": smallest,
        "taste_in_text": taste_in_text,
    }
    chosen = {
        **PRESETS[size.value],
        **{key: value for key, value in given.items() if value is not None},
    }
    _stats_table(generate(out, **chosen, seed=seed))


@app.command()
def ui(
    out: Out = RUNS,
    uri: Annotated[
        str | None, typer.Option(help="The store to show; by default the database beside the runs.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port on the loopback interface.")
    ] = 5000,
) -> None:
    """Open the MLflow UI on the runs' store, on the loopback interface only."""
    from crossfed.platform.config.settings import TrackingSettings
    from crossfed.platform.tracking import abandoned
    from crossfed.platform.tracking import ui as mlflow_ui
    from crossfed.platform.tracking.tracker import resolve_uri
    from crossfed.platform.uris import sqlite_path

    store = resolve_uri(TrackingSettings(uri=uri), out)
    if store.startswith("http"):
        raise CrossfedError(
            f"{store} is an MLflow server with a UI of its own; open it in a browser."
        )
    database = sqlite_path(store) if store.startswith("sqlite") else None
    if database is not None and not database.exists():
        raise CrossfedError(
            f"There is no tracking database {database}; start a run first, or name the folder "
            f"with --out."
        )
    if left := abandoned.close(out, store):
        typer.echo(abandoned.sentence(left, out))
    address = f"http://127.0.0.1:{port}"
    pages = mlflow_ui.links(store, address)
    for name, link in pages.items():
        typer.echo(f"{name}: {link}")
    typer.echo(f"MLflow UI on {address}, in some seconds (Ctrl-C ends it)")
    mlflow_ui.serve(
        store, ((database.parent if database is not None else out) / "mlartifacts").absolute(), port
    )


@app.command()
def privacy(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's directory or id, finished or not.", autocompletion=complete.run
        ),
    ],
    out: Out = RUNS,
) -> None:
    """What a run's perturbed messages cost: every release with its parameters, and the totals by
    domain.
    """
    from crossfed.platform.federation.privacy import summary
    from crossfed.platform.federation.runs import find_run, privacy_account

    block, console = privacy_account(find_run(run, out)), Console(highlight=False)
    shown = Table(title="perturbed releases by sender", title_justify="left")
    for column in (
        "sender",
        "stage",
        "keys",
        "noise",
        "sensitivity",
        "ε per release",
        "messages",
        "releases",
    ):
        shown.add_column(
            column, justify="left" if column in ("sender", "stage", "keys", "noise") else "right"
        )
    for column in ("ε, paper", "ε, whole"):
        shown.add_column(column, justify="right")
    for name, row in block["domains"].items():
        for line in row["releases"]:
            shown.add_row(
                name,
                line["stage"],
                "\n".join(line["keys"]),
                f"{line['mechanism']} {line['scale']:g}",
                f"{line['norm']} {line['sensitivity']:g}",
                "–" if line["epsilon"] is None else f"{line['epsilon']:g}",
                str(line["messages"]),
                f"{line['messages']} × {line['count']}",
                f"{line['epsilon_paper']:g}",
                f"{line['epsilon_whole']:g}",
            )
    if block["domains"]:
        console.print(shown)
    for text in summary(block) or ["no message has left yet"]:
        console.print(text, markup=False, soft_wrap=True)


@app.command()
def replay(
    run: Annotated[
        str, typer.Argument(help="A run's directory or id.", autocompletion=complete.run)
    ],
    out: Out = RUNS,
    uri: Annotated[
        str | None, typer.Option(help="Where to; by default where the run wanted to be tracked.")
    ] = None,
) -> None:
    """Send what a run could not tell its MLflow server while that was away."""
    from crossfed.platform.federation.runs import find_run
    from crossfed.platform.tracking.tracker import replay as replay_run

    done = replay_run(find_run(run, out), uri)
    typer.echo(f"{done.applied} entries sent, {done.left} left, {done.refused} refused.")
    if done.left:
        raise CrossfedError(f"The store did not take everything: {done.problem}")


def main() -> None:
    """Run the command line of this process.

    Raises:
        SystemExit: with 2 after a mistake, 130 after an interrupt.
    """
    try:
        app()
    except CrossfedError as error:
        Console(stderr=True, highlight=False).print("[bold red]Error:[/] ", end="")
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


def entry() -> None:
    """The `crossfed` program: `main`, and after an interrupt an end without the interpreter's own.

    Ray's threads can crash an interpreter that ends in the middle of Ray's start; all is told and
    saved by then.
    """
    own_process()
    try:
        main()
    except SystemExit as ended:
        if ended.code != 130:
            raise
        atexit._run_exitfuncs()  # Ray's among them, which ends what it had started
        with contextlib.suppress(OSError):  # nobody may be reading any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(130)


if __name__ == "__main__":
    entry()
