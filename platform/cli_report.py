"""The commands that look at finished runs: tables, figures, pages. Nothing here trains or reads interactions."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from crossfed.platform.seam import CrossfedError

RUNS = Path("runs")
Out = Annotated[Path, typer.Option(help="Folder of run directories.", show_default=True)]
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN|STUDY|QUERY...",
        help="Finished runs (directories, or ids below --out), studies (their final runs), or mlflow:FILTER.",
    ),
]
Uri = Annotated[
    str | None, typer.Option(help="The MLflow store for mlflow:FILTER; by default the one beside the runs.")
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


_ENDINGS = {".md": Format.md, ".tex": Format.latex, ".csv": Format.csv}


def compare(
    runs: Sources,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Metrics of the table. Repeatable.  [default: the one that selects, and NDCG beside it]"),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Rows (or methods) that count as baselines. Repeatable.  [default: methods that exchange nothing]"
        ),
    ] = None,
    split: Annotated[Split, typer.Option(help="Which split; only the test split is tested.")] = Split.test,
    format: Annotated[
        Format | None,
        typer.Option(
            help="Form of the table.  [default: by the ending of --out-file: .md, .tex, .csv; else md]",
            show_default=False,
        ),
    ] = None,
    out_file: Annotated[Path | None, typer.Option(help="Write to a file instead of the terminal.")] = None,
    out: Out = RUNS,
    tracking_uri: Uri = None,
) -> None:
    """Put finished runs into one table: mean ± deviation over seeds, the best and the second, what differences are worth."""
    from crossfed.platform.report.compare import comparison
    from crossfed.platform.report.sources import gather

    form = format or (_ENDINGS.get(out_file.suffix.lower(), Format.md) if out_file else Format.md)
    with gather(runs, out, tracking_uri) as finished:
        made = comparison(finished, metric or (), split.value, against or ())
    grids = [made.table] + ([made.tests] if made.tests else [])
    if form is Format.csv:
        text = made.table.csv()
    elif form is Format.latex:
        text = "\n".join(grid.latex() for grid in grids)
    else:
        text = "\n".join(grid.markdown() for grid in grids)
    _give(text, out_file)


def _give(text: str, file: Path | None) -> None:
    if file is None:
        typer.echo(text.rstrip("\n"))
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CrossfedError(f"{file} cannot be written: {error.strerror}; choose another --out-file.") from error
    typer.echo(f"{file}")


def figures(
    run: Annotated[str, typer.Argument(help="A finished run's directory or id.")],
    item_map: Annotated[
        bool, typer.Option("--item-map", help="Also a t-SNE map of the item vectors that the run exported.")
    ] = False,
    out: Out = RUNS,
) -> None:
    """Draw a run's figures again into its folder: curves, losses, bytes, prototypes, a map of its items."""
    from crossfed.platform.privacy import read_lines
    from crossfed.platform.report import figures
    from crossfed.platform.report.sources import read_result
    from crossfed.platform.run import RESULT, find_run

    run_dir = find_run(run, out)
    if not (run_dir / RESULT).is_file():
        raise CrossfedError(f"{run_dir} has not finished; crossfed run --resume {run_dir} goes on with it.")
    result = read_result(run_dir / RESULT)
    drawn = figures.run_figures(read_lines(run_dir / "history.jsonl"), result)
    drawn |= figures.model_figures(run_dir / "model", list(result["domains"]), result)
    if item_map:
        drawn["item_map"] = figures.exported_items(run_dir / "model", list(result["domains"]), result)
    for name, figure in drawn.items():
        typer.echo(figures.save(figure, run_dir / "figures" / f"{name}.png"))
