"""The command that looks at what a run gave away, and at what its transfer is worth."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossfed.platform.cli import complete
from crossfed.platform.errors import CrossfedError

if TYPE_CHECKING:
    from crossfed.platform.federation.transfer import Arm


class Place(StrEnum):
    """Where new runs run."""

    ray = "ray"
    inprocess = "inprocess"


class Shown(StrEnum):
    """How progress of new runs is shown."""

    auto = "auto"
    live = "live"
    plain = "plain"
    quiet = "quiet"


def audit(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's directory or id; with --controls a finished one.",
            autocompletion=complete.run,
        ),
    ],
    controls: Annotated[
        bool,
        typer.Option(
            "--controls",
            help="Also run it, over seeds, alone (solo), under transfer controls and beside "
            "its local variant: what is transfer "
            "worth?",
        ),
    ] = False,
    seeds: Annotated[
        int, typer.Option(min=1, help="Seeds of --controls: that of the run and those after it.")
    ] = 3,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Test metric of --controls.  \\[default: the one that selects]", show_default=False
        ),
    ] = None,
    local: Annotated[
        str | None,
        typer.Option(
            help="Method of the local variant, in place of the declared one.", show_default=False
        ),
    ] = None,
    local_sets: Annotated[
        list[str] | None,
        typer.Option("--local-set", help="key=value of the method of --local. Repeatable."),
    ] = None,
    backend: Annotated[
        Place | None,
        typer.Option(help="Where new runs run.  \\[default: as the run]", show_default=False),
    ] = None,
    progress: Annotated[
        Shown, typer.Option(help="How the progress of new runs is shown.")
    ] = Shown.auto,
    out: Annotated[Path, typer.Option(help="Folder of run directories.")] = Path("runs"),
) -> None:
    """What left each domain, what an attacker makes of it, what it cost in privacy: one page in the
    run's directory.

    With --controls, the method runs with every domain alone: joint less solo is what is
    transferred. In further runs every array that a node receives is replaced by noise, by its own
    rows shuffled, or by what came first; how much of the gain over the local variant survives says
    what of it came with the messages.
    """
    from crossfed.platform.federation.runs import find_run
    from crossfed.platform.report.audit import CONTROLS as BLOCK
    from crossfed.platform.report.audit import audit as page
    from crossfed.platform.report.page import write
    from crossfed.platform.tracking.tracker import add_artifact

    run_dir = find_run(run, out)
    written = []
    if controls:
        arms = _run_controls(run_dir, seeds, local, local_sets or [], backend, progress)
        written = [run_dir / BLOCK, _tell(run_dir, arms, metric)]
    elif metric or local or local_sets or backend:
        raise CrossfedError("--metric, --local, --local-set and --backend belong to --controls.")
    written += write(page(run_dir), run_dir / "audit")
    told = [add_artifact(run_dir, path) for path in written]
    for path in written:
        typer.echo(path)
    typer.echo(f"tracking   {told[-1]}", err=True)


def _run_controls(
    run_dir: Path,
    seeds: int,
    local: str | None,
    sets: list[str],
    backend: Place | None,
    progress: Shown,
) -> list[Arm]:
    """All runs of --controls; an interrupt says how to go on."""
    from crossfed.platform.console import make_progress
    from crossfed.platform.endings import terminable
    from crossfed.platform.federation.final import test_once
    from crossfed.platform.federation.runs import stored_config
    from crossfed.platform.federation.transfer import local_variant, run_arms
    from crossfed.platform.report.recording import run_recorded

    if sets and local is None:
        raise CrossfedError("--local-set belongs to --local METHOD.")
    variant = local_variant(stored_config(run_dir), local, sets) if local is not None else None
    ending = terminable(lambda: "What has finished stays; the same command goes on where it was.")
    try:
        with ending:
            return run_arms(
                run_dir,
                seeds,
                test_once,
                variant,
                view=lambda: make_progress(progress.value),
                say=lambda line: typer.echo(line, err=True),
                backend=backend.value if backend else None,
                launch=run_recorded,
            )
    except KeyboardInterrupt:
        ending.tell()
        raise typer.Exit(130) from None


def _tell(run_dir: Path, arms: list[Arm], metric: str | None) -> Path:
    """Write controls.json and controls.md, and print the table."""
    from crossfed.platform.checkpoint import write_json, writing
    from crossfed.platform.federation.runs import stored_config
    from crossfed.platform.report.audit import CONTROLS as BLOCK
    from crossfed.platform.report.transfer import measure, sentences, table

    block = measure(arms, metric or stored_config(run_dir).evaluation.select)
    write_json(run_dir / BLOCK, block)
    text = "\n".join([table(block).markdown(), *(f"- {line}" for line in sentences(block))]) + "\n"
    path = run_dir / "controls.md"
    with writing(path):
        path.write_text(text, encoding="utf-8")
    typer.echo(text)
    return path
