"""The commands for clusters: files that start one, a look at a running one, jobs on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crossfed.platform.seam import CrossfedError

cluster_app = typer.Typer(help="Files that start a cluster of machines: templates, and a check.", no_args_is_help=True)


@cluster_app.command("template")
def print_template(
    name: Annotated[str, typer.Argument(help="aws, gcp, local (machines of your own) or kuberay (a RayJob).")],
) -> None:
    """Print a commented cluster file to edit: crossfed cluster template aws > cluster.yaml."""
    from crossfed.platform.cluster_file import template

    typer.echo(template(name), nl=False)


@cluster_app.command("check")
def check_file(file: Annotated[Path, typer.Argument(help="A file for `ray up`, or a RayJob or RayCluster.")]) -> None:
    """Say what is wrong with a cluster file, by line and key; asks no cloud. Exit code 2 where something is."""
    from crossfed.platform.cluster_file import check

    found = check(file)
    for problem in found:
        line = f", line {problem.line}" if problem.line else ""
        key = f", {problem.key}" if problem.key else ""
        typer.echo(f"{problem.severity}: {file}{line}{key}: {problem.text}")
    if any(problem.severity == "error" for problem in found):
        raise typer.Exit(2)
    typer.echo(f"{file}: no errors")


def doctor(
    address: Annotated[
        str | None, typer.Option(help="The cluster to look at (auto on its head); without it, this machine.")
    ] = None,
    out: Annotated[str, typer.Option(help="Folder (or URI) that runs are written to.")] = "runs",
    tracking_uri: Annotated[str | None, typer.Option(help="MLflow server or sqlite:/// URI, as for a run.")] = None,
    require_tracking: Annotated[
        bool, typer.Option("--require-tracking", help="A run refuses to start without its MLflow server.")
    ] = False,
    encoder: Annotated[str, typer.Option(help="Text encoder that runs will use.")] = "minilm",
    patience: Annotated[float, typer.Option(min=1, help="Seconds for each look at a machine.")] = 45.0,
) -> None:
    """Look at every machine of a cluster: versions, GPUs, storage, MLflow, encoder, clocks, disk and memory.

    Exit code 0 where a run can start, 2 where not.
    """
    from crossfed.platform import doctor as judging
    from crossfed.platform.ray_doctor import examine

    try:
        found = judging.judge(*examine(address, out, tracking_uri, encoder, require_tracking, patience))
    except CrossfedError as error:
        mend = "see `ray status` on the head; start a cluster with `ray up` (crossfed cluster template)"
        found = [judging.Finding("error", "cluster", address or "this machine", str(error), mend)]
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(judging.table(found))
    worst = sum(finding.severity == "error" for finding in found)
    typer.echo("A run can start." if not worst else f"No run can start: {worst} error{'s' * (worst > 1)}.")
    if worst:
        raise typer.Exit(2)
