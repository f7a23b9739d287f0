"""The commands that look at finished runs: tables, figures, pages. Nothing here trains or reads
interactions.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from crossfed.platform.cli import complete
from crossfed.platform.errors import CrossfedError

if TYPE_CHECKING:
    from crossfed.platform.report.analyses import Analysis
    from crossfed.platform.report.finished import Finished
    from crossfed.platform.report.page import Section
    from crossfed.platform.report.tables import Grid

RUNS = Path("runs")
Out = Annotated[Path, typer.Option(help="Folder of run directories.", show_default=True)]
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN|STUDY|QUERY...",
        autocompletion=complete.run,
        help="Finished runs (directories, or ids below --out), folders of runs (all finished "
        "ones in them), studies "
        "(their final runs), or mlflow:FILTER.",
    ),
]
Uri = Annotated[
    str | None,
    typer.Option(help="The MLflow store for mlflow:FILTER; by default the one beside the runs."),
]


class Split(StrEnum):
    """Which held-out part."""

    validation = "validation"
    test = "test"


class Format(StrEnum):
    """Forms of a table."""

    md = "md"
    latex = "latex"
    csv = "csv"
    html = "html"


_ENDINGS = {".md": Format.md, ".tex": Format.latex, ".csv": Format.csv, ".html": Format.html}


def compare(
    runs: Sources,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Metrics of the table. Repeatable.  \\[default: the one that selects, "
            "and NDCG beside it]"
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Rows (or methods) that count as baselines. Repeatable.  \\[default: methods "
            "that exchange nothing]"
        ),
    ] = None,
    split: Annotated[
        Split, typer.Option(help="Which split; only the test split is tested.")
    ] = Split.test,
    floors: Annotated[
        bool,
        typer.Option(
            help="Rows of popularity and, with sampled candidates, of chance below the table."
        ),
    ] = True,
    format: Annotated[
        Format | None,
        typer.Option(
            help="Form of the table.  \\[default: by the ending of --out-file: .md, .tex, .csv, "
            ".html; a table in a "
            "terminal, else md]",
            show_default=False,
        ),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option(help="Write to a file instead of the terminal.")
    ] = None,
    out: Out = RUNS,
    tracking_uri: Uri = None,
) -> None:
    """Put finished runs into one table: mean ± deviation over seeds, the best and the second, what
    differences are worth.
    """
    from crossfed.platform.report.comparison import comparison
    from crossfed.platform.report.finished import gather

    form = format or (_ENDINGS.get(out_file.suffix.lower(), Format.md) if out_file else Format.md)
    with gather(runs, out, tracking_uri) as finished:
        made = comparison(finished, metric or (), split.value, against or (), floors=floors)
    grids = [made.table, *made.tests]
    if format is None and out_file is None and _in_terminal(*grids):
        return
    if form is Format.csv:
        text = made.table.csv()
    elif form is Format.latex:
        text = "\n".join(grid.latex() for grid in grids)
    elif form is Format.html:
        from crossfed.platform.report.page import Page, Section

        text = Page("Comparison", (), (Section("Results", (), tuple(grids)),)).html()
    else:
        text = "\n".join(grid.markdown() for grid in grids)
    _give(text, out_file)


def _in_terminal(*grids: Grid) -> bool:
    """Print tables for people if somebody is looking; whether somebody is."""
    console = Console(highlight=False)
    if console.is_terminal:
        for grid in grids:
            console.print(grid.terminal(console.width))
    return console.is_terminal


def _give(text: str, file: Path | None) -> None:
    if file is None:
        typer.echo(text.rstrip("\n"))
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CrossfedError(
            f"{file} cannot be written: {error.strerror}; choose another --out-file."
        ) from error
    typer.echo(f"{file}")


def report(
    runs: Sources,
    metric: Annotated[
        list[str] | None, typer.Option(help="Metrics of the table. Repeatable.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="Rows that count as baselines. Repeatable.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            help="The file to write.  \\[default: report.html in the study's folder, or in "
            "analyses below --out]",
            show_default=False,
        ),
    ] = None,
    out: Out = RUNS,
    tracking_uri: Uri = None,
) -> None:
    """Write one self-contained HTML page about finished runs or a study; a study's MLflow run gets
    it as an artifact.
    """
    from crossfed.platform.checkpoint import writing
    from crossfed.platform.report.finished import gather, study_folder
    from crossfed.platform.report.overview import overview
    from crossfed.platform.tracking.tracker import add_artifact

    studies = [folder for name in runs if (folder := study_folder(name, out)) is not None]
    file = to or (studies[0] if studies else out / "analyses") / "report.html"
    with gather(runs, out, tracking_uri) as finished:
        text = overview(
            finished, metric or (), against or (), [_searched(folder) for folder in studies]
        ).html()
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    typer.echo(f"{file}")
    for folder in studies:
        typer.echo(f"tracking   {add_artifact(folder, file)}")


def _searched(folder: Path) -> Section:
    """How a study came to its winner."""
    from crossfed.platform.report.page import Section

    text, grids = importlib.import_module("crossfed.tuning.report.tables").told(_study(folder))
    pictures = sorted(
        path for path in (folder / "figures").glob("*.png") if not path.stem.startswith("slice_")
    )
    return Section(
        f"Search {folder.name}",
        tuple(text),
        tuple(grids),
        tuple((path.stem, path) for path in pictures),
    )


def _study(folder: Path) -> Any:
    """A study's Optuna study. The room that searches is found by name: the platform does not import
    it.
    """
    return importlib.import_module("crossfed.tuning.study").Study.open(folder).optuna


def figures(
    run: Annotated[
        str, typer.Argument(help="A finished run's directory or id.", autocompletion=complete.run)
    ],
    out: Out = RUNS,
) -> None:
    """Draw a run's figures again into its folder: curves, losses, diagnostics, bytes, cohorts,
    weights, prototypes.
    """
    from crossfed.platform.federation.privacy import read_lines
    from crossfed.platform.federation.runs import find_run
    from crossfed.platform.layout import RESULT
    from crossfed.platform.report import figures
    from crossfed.platform.report.automatic import run_analyses
    from crossfed.platform.report.finished import read_result

    run_dir = find_run(run, out)
    if not (run_dir / RESULT).is_file():
        raise CrossfedError(
            f"{run_dir} has not finished; crossfed run --resume {run_dir} goes on with it."
        )
    result = read_result(run_dir / RESULT)
    drawn = figures.run_figures(read_lines(run_dir / "history.jsonl"), result)
    drawn |= figures.model_figures(run_dir / "model", list(result["domains"]), result)
    drawn |= run_analyses(run_dir)
    for name, figure in drawn.items():
        typer.echo(figures.save(figure, run_dir / "figures" / f"{name}.png"))


# -- analyses --------------------------------------------------------------------------------------

analyse_app = typer.Typer(
    no_args_is_help=True,
    help="The papers' figures and tables, for finished runs of any method: each writes a PNG "
    "and the numbers behind it as CSV.",
)
Metric = Annotated[
    str | None,
    typer.Option(
        help="The metric.  \\[default: the one that the runs select by]", show_default=False
    ),
]
To = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the figure.  \\[default: analyses, in --out]", show_default=False
    ),
]


def _metric(finished: list[Finished], metric: str | None, split: Split = Split.test) -> str:
    from crossfed.platform.evaluation.metrics import metric_name
    from crossfed.platform.report.effects import default_metrics

    return metric_name(metric) if metric else default_metrics(finished, split.value)[0]


def _draw(found: Analysis, to: Path | None, out: Path) -> None:
    if not _in_terminal(found.grid):
        typer.echo(found.grid.markdown())
    for path in found.save(to or out / "analyses"):
        typer.echo(f"{path}")


@analyse_app.command()
def ablation(
    runs: Sources,
    key: Annotated[
        str,
        typer.Option(help="The setting that switches parts off; its default is the whole method."),
    ] = "ablation",
    metric: Annotated[list[str] | None, typer.Option(help="Metrics. Repeatable.")] = None,
    to: To = None,
    out: Out = RUNS,
    tracking_uri: Uri = None,
) -> None:
    """One method with parts switched off against the whole: the table, and every difference with
    its interval.
    """
    from crossfed.platform.report import analyses
    from crossfed.platform.report.finished import gather

    with gather(runs, out, tracking_uri) as finished:
        found = analyses.ablation(finished, key, metric or ())
        _draw(found, to, out)


@analyse_app.command()
def cohorts(
    runs: Sources,
    metric: Metric = None,
    bounds: Annotated[
        str,
        typer.Option(help="Largest number of training interactions of every cohort but the last."),
    ] = "7,15",
    to: To = None,
    out: Out = RUNS,
    tracking_uri: Uri = None,
) -> None:
    """A metric for cold, warm and active users, with 95 % intervals over users."""
    from crossfed.platform.report import analyses
    from crossfed.platform.report.finished import gather

    try:
        ends = tuple(int(part) for part in bounds.split(","))
    except ValueError:
        raise CrossfedError(
            f"--bounds {bounds!r} is no list of whole numbers; write 7,15."
        ) from None
    with gather(runs, out, tracking_uri) as finished:
        _draw(analyses.cohorts(finished, _metric(finished, metric), ends), to, out)


@analyse_app.command()
def sensitivity(
    runs: Sources,
    key: Annotated[
        str, typer.Option(help="The setting: a method's value, or a dotted key of the run.")
    ],
    metric: Metric = None,
    split: Annotated[Split, typer.Option(help="Which split.")] = Split.test,
    to: To = None,
    out: Out = RUNS,
    tracking_uri: Uri = None,
) -> None:
    """A metric against one setting: for runs that differ in it, or for the trials of one study (on
    validation).
    """
    from crossfed.platform.report import sensitivity as settings
    from crossfed.platform.report.finished import gather, study_folder

    if len(runs) == 1 and (folder := study_folder(runs[0], out)) is not None:
        _draw(_searched_setting(folder, key), to, out)
        return
    with gather(runs, out, tracking_uri) as finished:
        _draw(
            settings.sensitivity(finished, key, _metric(finished, metric, split), split.value),
            to,
            out,
        )


def _searched_setting(folder: Path, key: str) -> Analysis:
    """The metric that a study searched on against one of the settings it searched."""
    from crossfed.platform.report.analyses import Analysis, file_name

    study = _study(folder)
    figure = importlib.import_module("crossfed.tuning.report.figures").sensitivity(study, key)
    if figure is None:
        raise CrossfedError(
            f"The finished trials of {folder.name} have not at least two values of {key}."
        )
    grid = importlib.import_module("crossfed.tuning.report.tables").trials_table(study).grid()
    return Analysis(f"{file_name(folder.name)}-{file_name(key)}", figure, grid)


@analyse_app.command()
def sparsity(
    runs: Sources,
    metric: Metric = None,
    to: To = None,
    out: Out = RUNS,
    tracking_uri: Uri = None,
) -> None:
    """A metric against the share of the training interactions that domains trained on
    (`evaluation.train_share`).
    """
    from crossfed.platform.report import sensitivity as settings
    from crossfed.platform.report.finished import gather

    with gather(runs, out, tracking_uri) as finished:
        named = "share of training interactions used"
        chosen = _metric(finished, metric)
        found = settings.sensitivity(finished, "evaluation.train_share", chosen, "test", named)
        _draw(replace(found, name=f"sparsity-{chosen}"), to, out)


@analyse_app.command()
def utility(
    runs: Sources,
    metric: Metric = None,
    counting: Annotated[
        str, typer.Option(help="How ε is counted: paper, whole or tight.")
    ] = "whole",
    to: To = None,
    out: Out = RUNS,
    tracking_uri: Uri = None,
) -> None:
    """A metric against the privacy budget ε that the runs spent."""
    from crossfed.platform.report import sensitivity as settings
    from crossfed.platform.report.finished import gather

    with gather(runs, out, tracking_uri) as finished:
        _draw(settings.utility(finished, _metric(finished, metric), counting), to, out)


@analyse_app.command()
def upload(
    runs: Sources,
    metric: Metric = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Value of the metric to reach.  \\[default: 99 % of the weakest row's best]",
            show_default=False,
        ),
    ] = None,
    to: To = None,
    out: Out = RUNS,
    tracking_uri: Uri = None,
) -> None:
    """The best validation metric so far against all bytes uploaded, and the bytes to a target."""
    from crossfed.platform.report import rounds
    from crossfed.platform.report.finished import gather

    with gather(runs, out, tracking_uri) as finished:
        _draw(rounds.upload(finished, _metric(finished, metric, Split.validation), target), to, out)


@analyse_app.command()
def time(
    runs: Sources,
    to: To = None,
    out: Out = RUNS,
    tracking_uri: Uri = None,
) -> None:
    """Seconds per round and per local epoch, bytes per round, and the most memory of a domain."""
    from crossfed.platform.report import rounds
    from crossfed.platform.report.finished import gather

    with gather(runs, out, tracking_uri) as finished:
        _draw(rounds.time(finished), to, out)


@analyse_app.command()
def weights(
    run: Annotated[
        str,
        typer.Argument(help="A finished run whose server averages.", autocompletion=complete.run),
    ],
    to: To = None,
    out: Out = RUNS,
    tracking_uri: Uri = None,
) -> None:
    """The weights that the server averaged with, round by round."""
    from crossfed.platform.report import rounds
    from crossfed.platform.report.finished import gather

    with gather([run], out, tracking_uri) as finished:
        _draw(rounds.weights(finished[0]), to, out)


@analyse_app.command()
def prototypes(
    run: Annotated[
        str, typer.Argument(help="A finished run's directory or id.", autocompletion=complete.run)
    ],
    to: To = None,
    out: Out = RUNS,
) -> None:
    """Cosine heat maps and principal components of the prototypes that a run exported."""
    from crossfed.platform.report import maps
    from crossfed.platform.report.finished import gather

    with gather([run], out) as finished:
        for found in maps.prototypes(finished[0]):
            _draw(found, to, out)


@analyse_app.command("item-map")
def item_map(
    run: Annotated[
        str, typer.Argument(help="A finished run's directory or id.", autocompletion=complete.run)
    ],
    vectors: Annotated[
        list[str] | None,
        typer.Option(
            help="What to map: an exported tensor, text (encoded where the cache has it not), "
            "or an array of the domains' state "
            "such as model.t_pre. Repeatable.  \\[default: items]",
            show_default=False,
        ),
    ] = None,
    centres: Annotated[
        str | None, typer.Option(help="Centres to draw with them, e.g. centres or model.centres.")
    ] = None,
    layout: Annotated[str, typer.Option(help="tsne, or umap where it is installed.")] = "tsne",
    per_domain: Annotated[
        int, typer.Option(min=2, help="Items drawn of each domain at most.")
    ] = 500,
    to: To = None,
    out: Out = RUNS,
) -> None:
    """Maps of item vectors, of all domains together and of each alone, with cluster centres."""
    from crossfed.platform.report import maps
    from crossfed.platform.report.finished import gather

    with gather([run], out) as finished:
        _draw(
            maps.item_map(finished[0], vectors or ("items",), centres, layout, per_domain), to, out
        )
