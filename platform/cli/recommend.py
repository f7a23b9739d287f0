"""`crossfed recommend`: what a finished run recommends to a user, in words. To be run where the
domain's data is.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossfed.platform.cli import complete
from crossfed.platform.errors import CrossfedError

ROOM = 16
"""Places that a title needs to stand beside its item; with less it stands below."""


def recommend(
    run: Annotated[
        str, typer.Argument(help="A finished run's directory or id.", autocompletion=complete.run)
    ],
    domain: Annotated[str, typer.Option(help="The domain.")],
    user: Annotated[list[str], typer.Option(help="A user's id as in the source. Repeatable.")],
    k: Annotated[
        int | None,
        typer.Option(
            "--k", "-k", min=1, help="How many items.  \\[default: 10]", show_default=False
        ),
    ] = None,
    exclude_seen: Annotated[
        bool,
        typer.Option(
            "--exclude-seen", help="Leave out what the user has interacted with, in any split."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of run directories.")] = Path("runs"),
) -> None:
    """Recommend items of one domain to its users, with their titles; an unknown user gets what
    ranks high for most.
    """
    from crossfed.platform.data.store import PreparedData
    from crossfed.platform.federation.run import resolve_data
    from crossfed.platform.federation.runs import find_run, stored_config
    from crossfed.platform.serving.model import DomainModel, K

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
        scores = [f"{score:.4g}" for score in answer.scores]
        # what the frame, rank and score leave; a title has a column of its own where it has some
        # room in it
        room = console.width - 10 - longest(["rank"]) - longest(["score", *scores])
        beside = room - 3 - longest(answer.items)
        shown.add_column("rank", justify="right", no_wrap=True)
        shown.add_column("item" if beside >= ROOM else "item, title", overflow="fold")
        shown.add_column("score", justify="right", no_wrap=True)
        if beside >= ROOM:
            shown.add_column("title", no_wrap=True)
        for rank, (item, row, score) in enumerate(
            zip(answer.items, answer.rows, scores, strict=True), 1
        ):
            title = Text(titles[row], "" if beside >= ROOM else "dim")
            title.truncate(beside if beside >= ROOM else room, overflow="ellipsis")
            if beside >= ROOM:
                shown.add_row(str(rank), Text(item), score, title)
            else:
                shown.add_row(str(rank), Text.assemble(item, "\n", title), score)
        console.print(shown)


def longest(texts: Iterable[str]) -> int:
    """Places of a terminal that the longest text takes."""
    return max(map(cell_len, texts), default=0)
