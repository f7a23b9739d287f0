"""`crossfed serve`: one domain's model behind MLflow's scoring protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crossfed.platform.errors import CrossfedError


def serve(
    run: Annotated[str, typer.Argument(help="A finished run's directory or id.")],
    domain: Annotated[str, typer.Option(help="The domain.")],
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 5001,
    out: Annotated[Path, typer.Option(help="Folder of run directories.")] = Path("runs"),
) -> None:
    """Answer requests with what one domain's model recommends, as `mlflow models serve` does."""
    import socket

    from crossfed.platform.federation.runs import find_run
    from crossfed.platform.serving.server import serve as serve_model

    run_dir = find_run(run, out)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise CrossfedError(
            f"{host}:{port} cannot be listened on ({error.strerror or error}); choose another "
            f"--port or --host."
        ) from error
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"{domain} of {run_dir.name} on http://{shown}:{port}/invocations (Ctrl-C ends it)")
    typer.echo(
        f"curl http://{shown}:{port}/invocations -H 'Content-Type: application/json' "
        '-d \'{"dataframe_records": [{"user": "ID", "k": 10}]}\''
    )
    try:
        serve_model(run_dir, domain, host, port)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
