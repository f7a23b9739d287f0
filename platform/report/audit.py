"""The audit of a run on one page: what left each domain, what an attacker makes of it, what it cost
in privacy.

Everything is read from the run's directory: the ledger of what crossed, the method's declarations,
the attack's numbers in `result.json`, the record of perturbed releases, and `controls.json` where
transfer controls were run beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from crossfed.platform.checkpoint import read_json
from crossfed.platform.config.settings import RunConfig
from crossfed.platform.console import size
from crossfed.platform.federation.controls import MEANING
from crossfed.platform.federation.payloads import declared
from crossfed.platform.federation.privacy import read_lines, summary
from crossfed.platform.federation.runs import privacy_account, stored_config
from crossfed.platform.layout import RESULT
from crossfed.platform.method import Direction, Field
from crossfed.platform.report import figures, transfer
from crossfed.platform.report.page import Page, Section
from crossfed.platform.report.tables import ABSENT, Column, Grid

CONTROLS = "controls.json"
"""The numbers of the transfer controls, in the directory of the run that they belong to."""

EXPLAINED = (
    "The same runs with every array that a node receives replaced: by noise of the array's own "
    "mean and variance, by its own "
    "rows shuffled, or by what the same sender sent first. What is gained all the same does "
    "not come from what crossed."
)

_WAYS = {
    Direction.UP: "to the server",
    Direction.DOWN: "from the server",
    Direction.PEER: "to other domains",
}


def audit(run_dir: Path) -> Page:
    """The audit of a run, also of one that is unfinished or still going on.

    Raises:
        CrossfedError: a file of the run is damaged, or the method is not installed here.
    """
    config = stored_config(run_dir)
    account, ledger = privacy_account(run_dir), read_lines(run_dir / "ledger.jsonl")
    finished = (run_dir / RESULT).is_file()
    result = read_json(run_dir / RESULT) if finished else None
    history = read_lines(run_dir / "history.jsonl")
    drawn = (
        figures.bytes_per_round(history, figures.About.of(result)) if history and result else None
    )
    parts = [
        Section(
            "What left each domain",
            (_told_of_crossing(config, ledger),),
            (crossed(config, ledger, account),) if ledger else (),
            (("bytes", drawn),) if drawn is not None else (),
        ),
        _attack(config, result, run_dir),
        _account(account),
    ]
    if (run_dir / CONTROLS).is_file():
        block = read_json(run_dir / CONTROLS)
        text = (EXPLAINED, *transfer.sentences(block))
        parts.append(Section("Transfer controls", text, (transfer.table(block),)))
    return Page(f"Audit of {run_dir.name}", _about(config, run_dir, finished), tuple(parts))


def _about(config: RunConfig, run_dir: Path, finished: bool) -> tuple[str, ...]:
    data = read_json(run_dir / "data.json")
    kind = "synthetic data" if data["manifest"]["synthetic"] else "data"
    name = config.data.name if config.data else "the embedded shops"
    lines = [
        f"{config.resolved.title} ({config.resolved.paper}); {kind} {name} "
        f"({data['fingerprint'][:12]}): "
        f"{', '.join(data['domains'])}; protocol {config.evaluation.protocol}; seed {config.seed}; "
        f"configuration {config.hash()}."
    ]
    if config.control != "none":
        lines.append(
            f"This run ran under the transfer control {config.control}: the messages below "
            f"were sent, but "
            f"{MEANING[config.control]}."
        )
    if not finished:
        lines.append("This run has not finished: the page tells what has left so far.")
    return tuple(lines)


# -- what crossed ----------------------------------------------------------------------------------


def _told_of_crossing(config: RunConfig, ledger: Sequence[Mapping[str, Any]]) -> str:
    if not ledger:
        return "Nothing: no message has left any domain."
    return (
        "Every array that crossed, counted where it was sent; user ids and interactions have "
        "no declaration in any method, and "
        "what is not declared does not leave. Beside these arrays, nodes report single numbers "
        "to whoever runs the federation "
        "(losses, metrics), which no receiver sees and no privacy account holds."
    )


def crossed(
    config: RunConfig, ledger: Sequence[Mapping[str, Any]], account: Mapping[str, Any]
) -> Grid:
    """What each domain sent and received, by declared key; domains with the same numbers share a
    row.

    Args:
        ledger: rows of the run's `ledger.jsonl`, at least one. account: the run's "privacy" block.
    """
    frame = pd.DataFrame(ledger)
    down = frame["direction"] == Direction.DOWN
    frame["domain"] = frame["receiver"].where(down, frame["sender"])
    fields = config.resolved.fields
    found: dict[tuple[Any, ...], list[str]] = {}
    for (direction, stage), part in frame.groupby(["direction", "stage"], sort=False):
        covering = {
            key: declared(fields, key, Direction(str(direction))) for key in part["key"].unique()
        }
        part = part.assign(
            field=part["key"].map({key: field.key for key, field in covering.items() if field})
        )
        for (name, domain), rows in part.groupby(["field", "domain"], sort=False):
            field = next(
                field for field in fields if field.key == name and field.direction == direction
            )
            record = _record(field, rows) | {
                "left": _perturbed(rows, str(stage), str(direction), account)
            }
            found.setdefault((direction, stage, *record.items()), []).append(str(domain))
    records = [
        {"domains": ", ".join(names), "direction": direction, "stage": stage, **dict(items)}
        for (direction, stage, *items), names in found.items()
    ]
    return Grid(
        title="Arrays that crossed",
        columns=(
            *(
                Column(n, right=False)
                for n in (
                    "domain",
                    "way",
                    "stage",
                    "key",
                    "what it is",
                    "type",
                    "shape",
                    "grows with",
                )
            ),
            Column("messages"),
            Column("bytes"),
            Column("bytes per round"),
            Column("left", right=False),
        ),
        rows=tuple(
            (
                row["domains"],
                _WAYS[Direction(row["direction"])],
                row["stage"],
                row["key"],
                row["meaning"],
                row["dtype"],
                row["shape"],
                row["grows"],
                f"{row['messages']:,}",
                size(row["bytes"]),
                size(row["bytes_per_round"]),
                row["left"],
            )
            for row in records
        ),
        caption=(
            "By domain and declared key, over the whole run; a message to several receivers "
            "counts at each. Bytes are those of "
            "the arrays, per round those of the rounds in which the key was sent. A key that "
            "ends in * stands for all that "
            "begin so."
        ),
        records=tuple(records),
    )


def _record(field: Field, rows: pd.DataFrame) -> dict[str, Any]:
    """One line of the table but its place: what the key is, and what of it crossed."""
    shapes = {(key, tuple(shape)) for key, shape in zip(rows["key"], rows["shape"], strict=True)}
    keys = {key for key, _ in shapes}
    if len(shapes) == 1:
        ((_, one),) = shapes
        shape = " × ".join(f"{n:,}" for n in one) or "a single number"
        if field.shape is not None and any(isinstance(name, str) for name in field.shape):
            shape += f" [{', '.join(map(str, field.shape))}]"
    else:
        shape = f"{len(keys):,} arrays, {sum(math.prod(s) for _, s in shapes):,} values"
    total, rounds = int(rows["bytes"].sum()), rows["round"].nunique()
    return {
        "key": field.key,
        "meaning": field.meaning,
        "dtype": field.dtype,
        "shape": shape,
        "grows": _grows(field),
        "messages": int(rows.groupby("key").size().max()),
        "bytes": total,
        "bytes_per_round": total / rounds,
    }


def _grows(field: Field) -> str:
    """What a declared shape grows with."""
    if field.shape is None:
        return "the size of the model"
    kinds = [
        word for name, word in (("n_users", "users"), ("n_items", "items")) if name in field.shape
    ]
    return " and ".join(kinds) or "nothing"


def _perturbed(rows: pd.DataFrame, stage: str, direction: str, account: Mapping[str, Any]) -> str:
    """Whether the arrays left under noise, and under which."""
    key, sender = rows["key"].iloc[0], rows["sender"].iloc[0]
    if f"{stage}: {key} ({direction})" in account["sent_as_it_is"]:
        return "as it is"
    for line in account["domains"].get(sender, {}).get("releases", ()):
        covers = any(
            key.startswith(name[:-1]) if name.endswith("*") else key == name
            for name in line["keys"]
        )
        if line["stage"] == stage and covers:
            return f"{line['mechanism'].capitalize()} noise of scale {line['scale']:g}"
    return "perturbed"


# -- the attack ------------------------------------------------------------------------------------


def _attack(config: RunConfig, result: Mapping[str, Any] | None, run_dir: Path) -> Section:
    title = "What an attacker infers from uploaded item vectors"
    measured = {
        name: row["audit"]
        for name, row in (result or {"domains": {}})["domains"].items()
        if "audit" in row
    }
    grid = attack(measured)
    if grid is not None:
        return Section(
            title,
            (
                "The similarity-based inference attack of FedCRF (arXiv 2604.17681, Table 6) "
                "on the vectors that each domain "
                "sent last: who intercepts them guesses that the users of an item are those of "
                "the items most similar to it.",
            ),
            (grid,),
        )
    if not any("n_items" in (field.shape or ()) for field in config.resolved.fields):
        return Section(
            title,
            (
                "The method declares nothing with one row per item, so that this attack "
                "has nothing to work on.",
            ),
        )
    if measured:
        return Section(title, ("No array with one row per item has left in this run.",))
    if config.evaluation.audit:
        return Section(title, ("The attack is made when the run ends.",))
    return Section(
        title,
        (
            "Not measured: vectors are kept for the attack only where a run asks for it. The "
            "same run with it: "
            f"`crossfed run {run_dir / 'config.yaml'} --set evaluation.audit=true`.",
        ),
    )


def attack(measured: Mapping[str, Mapping[str, float]]) -> Grid | None:
    """F1 of the attack and its baselines at each Top-K; None where nothing was attacked.

    Args:
        measured: domain -> the "audit" entry of a result: `<key>/f1_at_<k>`, `<key>_random/…`,
            `<key>_popularity/…`.
    """
    records: list[dict[str, Any]] = []
    for domain, values in measured.items():
        scores: dict[str, dict[int, float]] = {}
        for name, f1 in values.items():
            what, _, k = name.rpartition("/f1_at_")
            scores.setdefault(what, {})[int(k)] = f1
        for key in (key for key in scores if f"{key}_random" in scores):
            for guess, suffix in (
                ("similar vectors", ""),
                ("random vectors", "_random"),
                ("popularity", "_popularity"),
            ):
                at = {
                    f"f1_at_{k}": f1 for k, f1 in sorted(scores.get(f"{key}{suffix}", {}).items())
                }
                records.append({"domain": domain, "key": key, "guess": guess, **at})
    if not records:
        return None
    ks = [name for name in records[0] if name.startswith("f1_at_")]
    return Grid(
        title="F1 of the attack",
        columns=(
            *(Column(name, right=False) for name in ("domain", "key", "guessed by")),
            *(Column(f"Top-{name.removeprefix('f1_at_')}", "F1") for name in ks),
        ),
        rows=tuple(
            (
                row["domain"],
                row["key"],
                row["guess"],
                *(f"{row[k]:.4f}" if k in row else ABSENT for k in ks),
            )
            for row in records
        ),
        caption=(
            "Mean over items of F1 between an item's training users and the users of the K "
            "items guessed: the most similar by "
            "the uploaded vectors, by random vectors of their width, or the K most popular "
            "others. Lower gives less away; what "
            "the vectors add to the baselines is what they tell."
        ),
        records=tuple(
            {name: row.get(name) for name in ("domain", "key", "guess", *ks)} for row in records
        ),
    )


# -- the privacy account ---------------------------------------------------------------------------


def _account(block: Mapping[str, Any]) -> Section:
    text = summary(block) or ["no message has left yet"]
    if block["domains"]:
        text += [f"{name}: {how}." for name, how in block["composition"].items()]
    return Section(
        "The privacy account", tuple(_sentence(line) for line in text), tuple(_releases(block))
    )


def _sentence(line: str) -> str:
    return line if line.endswith(".") else f"{line}."


def _releases(block: Mapping[str, Any]) -> Iterator[Grid]:
    """The perturbed releases by sender, if any."""
    records: list[dict[str, Any]] = [
        {
            "sender": name,
            "stage": line["stage"],
            "keys": ", ".join(line["keys"]),
            "noise": f"{line['mechanism']}, scale {line['scale']:g}",
            "sensitivity": f"{line['norm']} {line['sensitivity']:g}",
            "unit": line["unit"],
            "messages": line["messages"],
            "releases": line["released"],
            "epsilon_paper": line["epsilon_paper"],
            "epsilon_whole": line["epsilon_whole"],
        }
        for name, row in block["domains"].items()
        for line in row["releases"]
    ]
    if records:
        yield Grid(
            title="Perturbed releases",
            columns=(
                *(
                    Column(name, right=False)
                    for name in ("sender", "stage", "keys", "noise", "sensitivity", "protects")
                ),
                *(Column(name) for name in ("messages", "releases", "ε, paper", "ε, whole")),
            ),
            rows=tuple(tuple(_number(value) for value in row.values()) for row in records),
            caption=f"What left under noise, and what it adds up to; a total at δ = "
            f"{block['delta']:g} stands above.",
            records=tuple(records),
        )


def _number(value: Any) -> str:
    return (
        f"{value:,}"
        if isinstance(value, int)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
