"""The commands for clusters: files that start one, a look at a running one, jobs on it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from crossfed.platform.errors import CrossfedError

cluster_app = typer.Typer(
    help="Files that start a cluster of machines: templates, and a check.", no_args_is_help=True
)


@cluster_app.command("template")
def print_template(
    name: Annotated[
        str, typer.Argument(help="aws, gcp, local (machines of your own) or kuberay (a RayJob).")
    ],
) -> None:
    """Print a commented cluster file to edit: crossfed cluster template aws > cluster.yaml."""
    from crossfed.platform.cluster.files import template

    typer.echo(template(name), nl=False)


@cluster_app.command("check")
def check_file(
    file: Annotated[Path, typer.Argument(help="A file for `ray up`, or a RayJob or RayCluster.")],
) -> None:
    """Say what is wrong with a cluster file, by line and key; asks no cloud. Exit code 2 where
    something is.
    """
    from crossfed.platform.cluster.files import check

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
        str | None,
        typer.Option(help="The cluster to look at (auto on its head); without it, this machine."),
    ] = None,
    out: Annotated[str, typer.Option(help="Folder (or URI) that runs are written to.")] = "runs",
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow server or sqlite:/// URI, as for a run.")
    ] = None,
    require_tracking: Annotated[
        bool,
        typer.Option(
            "--require-tracking", help="A run refuses to start without its MLflow server."
        ),
    ] = False,
    encoder: Annotated[str, typer.Option(help="Text encoder that runs will use.")] = "minilm",
    patience: Annotated[
        float, typer.Option(min=1, help="Seconds for each look at a machine.")
    ] = 45.0,
    domains: Annotated[
        int, typer.Option(min=1, help="Domains of the runs to come, whose actors must fit.")
    ] = 3,
) -> None:
    """Look at every machine of a cluster: room for actors, versions, GPUs, storage, MLflow,
    encoder, clocks, disk and memory.

    Exit code 0 where a run can start, 2 where not.
    """
    from crossfed.platform.doctor import judge as judging
    from crossfed.platform.doctor.examine import examine

    try:
        found = judging.judge(
            *examine(address, out, tracking_uri, encoder, require_tracking, patience, domains)
        )
    except CrossfedError as error:
        mend = (
            "see `ray status` on the head; start a cluster with `ray up` (crossfed cluster "
            "template)"
        )
        found = [judging.Finding("error", "cluster", address or "this machine", str(error), mend)]
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(judging.table(found))
    worst = sum(finding.severity == "error" for finding in found)
    typer.echo(
        "A run can start." if not worst else f"No run can start: {worst} error{'s' * (worst > 1)}."
    )
    if worst:
        raise typer.Exit(2)


def submit(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="After --: run, tune, evaluate, report … with their options, as in: -- run "
            "fedcrf --data /mnt/x --out /mnt/runs."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="The job server.  \\[default: RAY_API_SERVER_ADDRESS, else "
            "http://127.0.0.1:8265, as `ray dashboard` opens it]",
            show_default=False,
        ),
    ] = None,
    working_dir: Annotated[
        Path,
        typer.Option(
            help="Folder to bring along: own methods, run files. crossfed itself is the cluster's."
        ),
    ] = Path(),
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave out files and folders by name or path (* allowed), besides data, runs, "
            "caches. Repeatable."
        ),
    ] = None,
    upload: Annotated[
        bool, typer.Option("--upload/--no-upload", help="Bring the folder along, or nothing.")
    ] = True,
    limit_mb: Annotated[float, typer.Option(min=0, help="Refuse to upload more than this.")] = 50,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the job is taken; do not follow its log.")
    ] = False,
    follow: Annotated[
        str | None, typer.Option(help="Follow a job that was submitted before, by its name.")
    ] = None,
    stop: Annotated[
        str | None, typer.Option(help="End a job as Ctrl-C would, by its name.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the cluster's jobs.")] = False,
) -> None:
    """Run a crossfed command on a cluster, as a job that goes on when this machine sleeps. The exit
    code is the job's.
    """
    from crossfed.platform.cluster import jobs as ray_jobs

    if sum(map(bool, (arguments, follow, stop, show))) != 1:
        raise CrossfedError(
            "Give one thing to do: -- COMMAND …, --follow NAME, --stop NAME or --list."
        )
    command = ray_jobs.entrypoint(arguments) if arguments else ""
    server = ray_jobs.server(address)
    if show:
        _jobs_table(ray_jobs.jobs(server))
        return
    if stop:
        typer.echo(f"{stop}: {ray_jobs.stop(server, stop)}")
        return
    name = follow or ""
    if arguments:
        with ray_jobs.upload(
            working_dir if upload else None, exclude or [], limit_mb, typer.echo
        ) as package:
            name = ray_jobs.submit(server, command, package)
        typer.echo(
            f"job {name}: {command}\n  find it again: crossfed submit --follow {name}", nl=True
        )
        if detach:
            return
    try:
        code = ray_jobs.follow(
            server,
            name,
            lambda text: typer.echo(text, nl=False),
            lambda text: typer.echo(text, err=True),
        )
    except KeyboardInterrupt:
        typer.echo(
            f"\nNo longer following; the job goes on. crossfed submit --follow {name}, or "
            f"--stop {name}",
            err=True,
        )
        raise typer.Exit(130) from None
    raise typer.Exit(code)


def _jobs_table(jobs: list[Any]) -> None:
    shown = Table("job", "status", "started", "minutes", "command")
    for job in jobs:
        began = datetime.fromtimestamp((job.start_time or 0) / 1000)
        ended = datetime.fromtimestamp(job.end_time / 1000) if job.end_time else datetime.now()
        minutes = f"{(ended - began).total_seconds() / 60:.1f}"
        shown.add_row(
            str(job.submission_id),
            str(job.status.value),
            f"{began:%Y-%m-%d %H:%M}",
            minutes,
            job.entrypoint,
        )
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(shown)
