"""The commands for clusters: files that start one, a look at a running one, jobs on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
