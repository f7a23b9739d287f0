"""`crossfed recommend`: what a finished run recommends to a user, in words. To be run where the domain's data is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from crossfed.platform.method import CrossfedError


def recommend(
    run: Annotated[str, typer.Argument(help="A finished run's directory or id.")],
    domain: Annotated[str, typer.Option(help="The domain.")],
    user: Annotated[list[str], typer.Option(help="A user's id as in the source. Repeatable.")],
    k: Annotated[
        int | None,
        typer.Option("--k", "-k", min=1, help="How many items.  [default: 10]", show_default=False),
    ] = None,
    exclude_seen: Annotated[
        bool, typer.Option("--exclude-seen", help="Leave out what the user has interacted with, in any split.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of run directories.")] = Path("runs"),
) -> None:
    """Recommend items of one domain to its users, with their titles; an unknown user gets what ranks high for most."""
    from crossfed.platform.data.store import PreparedData
    from crossfed.platform.federation.run import resolve_data
    from crossfed.platform.federation.runs import find_run, stored_config
    from crossfed.platform.serving.save import DomainModel, K

    run_dir = find_run(run, out)
    model, console = DomainModel(run_dir, domain), Console(highlight=False)
    try:
        data = PreparedData.open(resolve_data(stored_config(run_dir)))
        titles = data.item_texts(domain)
    except CrossfedError as error:
        if exclude_seen:
            raise
        typer.echo(f"No titles: {error}", err=True)
        titles = [""] * len(model.items)
    seen: list[list[int]] = [[] for _ in user]
    if exclude_seen:
        users, items, _ = data.interactions(domain)
        rows = [model.row(name) for name in user]
        seen = [[] if row is None else items[users == row].tolist() for row in rows]
    for answer in model.recommend(user, [k or K] * len(user), seen):
        known = "" if answer.known else ", unknown: what ranks high for most users"
        shown = Table(title=f"{domain}, user {answer.user}{known}", title_justify="left")
        shown.add_column("rank", justify="right")
        shown.add_column("item", no_wrap=True)
        shown.add_column("score", justify="right")
        shown.add_column("title", no_wrap=True, overflow="ellipsis")
        for rank, (item, row, score) in enumerate(zip(answer.items, answer.rows, answer.scores, strict=True), 1):
            shown.add_row(str(rank), item, f"{score:.4g}", titles[row])
        console.print(shown)
