"""One page about finished runs or a study: results and tests, figures, what was run, settings,
bytes, privacy, versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import yaml

from crossfed.platform.console import size, span
from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.protocols import told_protocol
from crossfed.platform.federation.privacy import read_lines, summary
from crossfed.platform.federation.runs import stored_config
from crossfed.platform.report import analyses, rounds
from crossfed.platform.report.audit import crossed
from crossfed.platform.report.comparison import comparison
from crossfed.platform.report.effects import default_metrics, grouped
from crossfed.platform.report.figures import About, validation_curves
from crossfed.platform.report.finished import Finished, candidates
from crossfed.platform.report.page import Page, Section
from crossfed.platform.report.tables import ABSENT, Column, Grid


def overview(
    runs: Sequence[Finished],
    metrics: Sequence[str] = (),
    against: Sequence[str] = (),
    studies: Sequence[Section] = (),
) -> Page:
    """The page.

    Args:
        runs: as from `sources.gather`.
        metrics, against: as of `comparison`.
        studies: sections about the searches that some of the runs are the end of.

    Raises:
        CrossfedError: the runs do not compare.
    """
    found = comparison(runs, metrics, "test", against)
    metric = default_metrics(runs)[0]
    told = analyses.about(runs, "test")
    forest = analyses.forest(found, "Differences from the best baseline", told)
    result = runs[0].result
    kind = "Synthetic data" if result["data"].get("synthetic") else "Data"
    protocol = (
        f"{kind} `{result['data']['name']}`, fingerprint `{result['data_fingerprint'][:20]}`. "
        f"Protocol `{told_protocol(result)}`, split seed {result.get('split_seed', 'unknown')}; "
        "selected on validation, the test split read once per run."
    )
    made = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")
    return Page(
        title=f"{', '.join(dict.fromkeys(run.result['method'] for run in runs))} on "
        f"{result['data']['name']}",
        about=(
            protocol,
            f"{_many(len(runs), 'finished run')} in {_many(len(grouped(runs)), 'row')}. Page "
            f"made {made}.",
        ),
        sections=(
            Section("Results", (), (found.table, *found.tests), _pictures(differences=forest)),
            _analysed("Users by activity", lambda: analyses.cohorts(runs, metric)),
            *studies,
            _courses(runs, metric),
            Section("What was run", (), (_runs(runs), _domains(runs))),
            Section("Settings", *_settings(runs)),
            _bytes(runs),
            Section("Privacy", *_privacy(runs)),
            Section("Versions", (), (_versions(runs),)),
        ),
    )


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _pictures(**figures: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((name, figure) for name, figure in figures.items() if figure is not None)


def _analysed(title: str, *analysis: Callable[[], analyses.Analysis]) -> Section:
    """A section of analyses; why there is none where a run lacks what one needs."""
    text, grids, pictures = [], [], []
    for make in analysis:
        try:
            found = make()
        except CrossfedError as error:
            text.append(str(error))
            continue
        grids.append(found.grid)
        pictures.append((found.name, found.figure))
    return Section(title, tuple(text), tuple(grids), tuple(pictures))


def _courses(runs: Sequence[Finished], metric: str) -> Section:
    """How the runs went: bytes, time, and the validation curves of one run per row."""
    section = _analysed(
        "The course of the runs", lambda: rounds.upload(runs, metric), lambda: rounds.time(runs)
    )
    curves: list[tuple[str, Any]] = []
    for label, members in grouped(runs).items():
        rows = read_lines(members[0].path / "history.jsonl")
        steps = {(row["stage"], row["round"]): row["step"] for row in rows}
        domains = members[0].result["domains"]
        chosen = {name: _step(steps, row.get("selected")) for name, row in domains.items()}
        selected = {name: step for name, step in chosen.items() if step is not None}
        figure = validation_curves(rows, About.of(members[0].result), selected) if rows else None
        curves += _pictures(**{f"validation curves of {label}": figure})
    return Section(section.title, section.text, section.grids, (*section.pictures, *curves))


def _step(steps: dict[tuple[Any, Any], int], selected: dict[str, Any] | None) -> int | None:
    return steps.get((selected.get("stage"), selected.get("round"))) if selected else None


def _runs(runs: Sequence[Finished]) -> Grid:
    rows = []
    for run in runs:
        result = run.result
        chosen = {
            f"{s['stage']} {s['round']}"
            for r in result["domains"].values()
            if (s := r.get("selected")) and "round" in s
        }
        devices = sorted({place["device"] for place in result.get("placement", {}).values()})
        rows.append(
            (
                run.label, run.origin, str(result["seed"]), ", ".join(sorted(chosen)) or "last",
                span(result["seconds"]["total"]), size(sum(result["bytes"]["up"].values())),
                size(sum(result["bytes"]["down"].values())), f"{result.get('backend', '')} on "
                                                             f"{', '.join(devices) or 'unknown'}",
                str(result.get("restarts", 0)), result.get("config_hash", ABSENT),
            )
        )  # fmt: skip
    return Grid(
        title="Runs",
        columns=(
            Column("row", right=False),
            Column("run", right=False),
            Column("seed"),
            Column("selected round", right=False),
            Column("time"),
            Column("sent up"),
            Column("received"),
            Column("where", right=False),
            Column("restarts"),
            Column("configuration", right=False),
        ),
        rows=tuple(rows),
        caption="Time is wall-clock time of the whole run; bytes are of arrays, all domains "
        "together.",
    )


def _domains(runs: Sequence[Finished]) -> Grid:
    result = runs[0].result
    rows = []
    for name, row in result["domains"].items():
        counts = row.get("counts", {})
        told = [
            f"{counts[key]:,}" if key in counts else ABSENT
            for key in ("users", "items", "interactions")
        ]
        rows.append(
            (name, *told, f"{row.get('test_users', 0):,}", candidates(result, name, "test"))
        )
    return Grid(
        title="Domains",
        columns=(
            Column("domain", right=False),
            *(Column(name) for name in ("users", "items", "interactions", "test users")),
            Column("test candidates", right=False),
        ),
        rows=tuple(rows),
        caption="The same for all runs on this page.",
    )


def _settings(
    runs: Sequence[Finished],
) -> tuple[tuple[str, ...], tuple[Grid, ...], tuple[Any, ...], tuple[tuple[str, str], ...]]:
    """What tells the rows apart, and every setting of each row."""
    rows = {label: members[0].settings for label, members in grouped(runs).items()}
    keys = list(dict.fromkeys(key for settings in rows.values() for key in settings))
    apart = [
        key
        for key in keys
        if len(rows) > 1
        and len({repr(settings.get(key, ABSENT)) for settings in rows.values()}) > 1
        and sum(key in settings for settings in rows.values()) > 1
    ]
    grid = Grid(
        title="Settings that differ",
        columns=(Column("row", right=False), *(Column(key) for key in apart)),
        rows=tuple(
            (label, *(str(settings.get(key, ABSENT)) for key in apart))
            for label, settings in rows.items()
        ),
        caption="Settings that two rows or more have, where they differ.",
    )
    details = tuple(
        (f"All settings of {label}", yaml.safe_dump(dict(settings), sort_keys=False))
        for label, settings in rows.items()
    )
    return (), (grid,) if apart else (), (), details


def _bytes(runs: Sequence[Finished]) -> Section:
    """The ledger of one run per row."""
    text, grids = [], []
    for label, members in grouped(runs).items():
        run = members[0]
        if not sum(run.result["bytes"]["up"].values()):
            text.append(f"{label}: nothing crossed.")
            continue
        if "privacy" not in run.result:
            text.append(
                f"{label}: {size(sum(run.result['bytes']['up'].values()))} left the domains; "
                f"the run kept no account."
            )
            continue
        try:
            grid = crossed(stored_config(run.path), _ledger(run), run.result["privacy"])
        except CrossfedError as error:
            text.append(f"{label}: {error}")
            continue
        title = f"{label}, seed {run.result['seed']}"
        grids.append(Grid(title, grid.columns, grid.rows, grid.caption, grid.records))
    return Section("What crossed", tuple(text), tuple(grids))


def _ledger(run: Finished) -> list[dict[str, Any]]:
    """Every array that crossed, from whichever form of the ledger is there."""
    if rows := read_lines(run.path / "ledger.jsonl"):
        return rows
    file = run.path / "ledger.parquet"
    if not file.is_file():
        raise CrossfedError(f"{run.origin} holds no ledger.")
    records = pd.read_parquet(file).to_dict("records")
    return [
        {str(key): value for key, value in row.items()} | {"shape": [int(n) for n in row["shape"]]}
        for row in records
    ]


def _privacy(runs: Sequence[Finished]) -> tuple[tuple[str, ...], tuple[Grid, ...]]:
    """What perturbed messages cost, by row."""
    rows, scopes = (
        [],
        {
            "local": "nothing leaves any domain",
            "pooled": "not private: saw all interactions together",
        },
    )
    for label, members in grouped(runs).items():
        told: dict[str, list[str]] = {}
        for run in members:
            lines = (
                summary(run.result["privacy"])
                if "privacy" in run.result
                else ["the run kept no account"]
            )
            for line in lines or ["no message is perturbed"]:
                told.setdefault(line, []).append(str(run.result["seed"]))
        scope = scopes.get(members[0].result.get("scope", ""), "only declared arrays cross")
        for number, (line, seeds) in enumerate(told.items()):
            rows.append(
                (label if not number else "", scope if not number else "", ", ".join(seeds), line)
            )
    return (), (
        Grid(
            title="Privacy by row",
            columns=tuple(
                Column(name, right=False) for name in ("row", "scope", "seeds", "account")
            ),
            rows=tuple(rows),
            caption="ε of the whole run, by the accountant of each run; see `crossfed privacy "
            "RUN` and `crossfed audit RUN`.",
        ),
    )


def _versions(runs: Sequence[Finished]) -> Grid:
    told: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        told.setdefault(tuple(run.result.get("versions", {}).items()), []).append(run.origin)
    names = list(dict.fromkeys(name for versions in told for name, _ in versions))
    return Grid(
        title="Software",
        columns=(*(Column(name, right=False) for name in names), Column("runs", right=False)),
        rows=tuple(
            (*(dict(versions).get(name, ABSENT) for name in names), str(len(origins)))
            for versions, origins in told.items()
        ),
        caption="What the runs were made with.",
    )
