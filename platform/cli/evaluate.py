"""The command that measures a finished run's model again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crossfed.platform.cli import complete
from crossfed.platform.cli.audit import Place, Shown


def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            help="A finished run's directory, or its id in ./runs.", autocompletion=complete.run
        ),
    ],
    protocol: Annotated[
        str | None,
        typer.Option(
            help="A protocol with the run's split.  \\[default: the run's]", show_default=False
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="key=value; evaluation.ks, evaluation.metrics, or a method's key of "
            "ranking. Repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the new run.  \\[default: beside the run]", show_default=False
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Where the run's data are now, if they moved.")
    ] = None,
    backend: Annotated[
        Place | None,
        typer.Option(help="Where it runs.  \\[default: as the run]", show_default=False),
    ] = None,
    progress: Annotated[Shown, typer.Option(help="How progress is shown.")] = Shown.auto,
) -> None:
    """Measure a finished run's selected model again, under another protocol, cut-offs or metrics;
    nothing is trained.

    The new numbers lie in a run directory of their own, which every command reads like any run.
    """
    from crossfed.platform.console import make_progress
    from crossfed.platform.endings import terminable
    from crossfed.platform.federation.final import test_once
    from crossfed.platform.federation.reevaluate import evaluate as measure
    from crossfed.platform.federation.runs import find_run
    from crossfed.platform.report.recording import Recording

    started: list[Path] = []

    def hint() -> str:
        return (
            f"crossfed run --resume {started[0]} measures again."
            if started
            else "Nothing was left behind."
        )

    ending = terminable(hint)
    try:
        with ending:
            result = measure(
                find_run(run, Path("runs")),
                test_once,
                protocol=protocol,
                sets=sets or [],
                out=out,
                data=data,
                backend=backend.value if backend else None,
                view=make_progress(progress.value),
                started=started.append,
                callbacks=(Recording(),),
            )
    except KeyboardInterrupt:
        ending.tell()
        raise typer.Exit(130) from None
    typer.echo(f"{result.run_dir / 'result.json'}")
