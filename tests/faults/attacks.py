"""What `fuzz.py` attacks: for every reader, how a malformed input of it is made and read."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import toys
from crossfed.platform import checkpoint
from crossfed.platform.checkpoint import MANIFEST, Checkpoints
from crossfed.platform.config.settings import build
from crossfed.platform.data.artifacts import ArtifactStore
from crossfed.platform.data.prepare import load_spec, prepare, shipped
from crossfed.platform.data.readers import Source, read_items, read_table
from crossfed.platform.data.store import PreparedData
from crossfed.platform.federation.node import InProcess, Plan
from crossfed.platform.federation.payloads import Entry, Gate, check_metrics, check_told
from crossfed.platform.federation.rounds import Round, Rounds, check_method
from crossfed.platform.federation.runs import privacy_account, stored_config
from crossfed.platform.method import SERVER, Direction, Field, Stage
from crossfed.platform.report.recording import run_recorded
from faults.mutator import VALUES, Mutator

Attack = Callable[[Mutator, Path], None]
"""Makes one malformed input in an empty folder and has it read; whether it may be refused is the
reader's business.
"""


def configurations(seeds: Path) -> Attack:
    """Run files, `--set` values, and what a method says of itself."""
    sets = [
        "K=10",
        "lr=0.01",
        "evaluation.ks=[10,20]",
        "resources.threads=2",
        "seed=1",
        "tracking.tags={a: b}",
        "domains=[a, b]",
    ]
    written = build("fedcrf", sets=sets).to_yaml()

    def attack(rng: Mutator, folder: Path) -> None:
        if rng.random() < 0.5:
            file = folder / "run.yaml"
            file.write_bytes(rng.data(written.encode()))
            config = build(str(file))
        else:
            chosen = [rng.choice(sets)]
            text = rng.data(rng.choice(sets).encode()).decode("utf-8", "replace")
            values = {
                rng.choice(("seed", "data", "domains", "out", "privacy.budget")): rng.choice(VALUES)
            }
            config = build(
                "fedcrf", sets=[*chosen, text], values=values if rng.random() < 0.3 else None
            )
        config.hash()
        check_method(config.resolved, config.method_config())

    return attack


def specs(seeds: Path) -> Attack:
    """Specs of data sets."""
    good = shipped()["beauty-office"].read_bytes()

    def attack(rng: Mutator, folder: Path) -> None:
        (folder / "spec.yaml").write_bytes(rng.data(good))
        load_spec(folder / "spec.yaml")

    return attack


def _sources() -> dict[str, tuple[bytes, dict[str, Any]]]:
    """Small files of every layout that can be read, and how."""
    reviews = "".join(
        json.dumps(
            {
                "reviewerID": f"U{n % 7}",
                "asin": f"B00000000{n % 5}",
                "overall": 5.0,
                "unixReviewTime": 1000 + n,
            }
        )
        + "\n"
        for n in range(40)
    ).encode()
    newer = b"user_id,parent_asin,rating,timestamp\n" + b"".join(
        b"u%d,B00000000%d,4.0,16%011d\n" % (n % 7, n % 5, n) for n in range(40)
    )
    ratings = b"".join(b"U%d,B00000000%d,5.0,%d\n" % (n % 7, n % 5, 1000 + n) for n in range(40))
    retail = (
        b"InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country\n"
        + b"".join(
            b"5363%02d,8512%d,T-LIGHT,6,12/1/2010 8:%02d,2.55,1785%d,UK\n" % (n, n % 5, n, n % 7)
            for n in range(40)
        )
    )
    recbole = b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + b"".join(
        b"%d\t%d\t3\t88%07d\n" % (n % 7, n % 5, n) for n in range(40)
    )
    columns = {"user": "who", "item": "what", "rating": "stars", "time": "when"}
    table = b"who,what,stars,when\n" + b"".join(
        b"u%d,i%d,1,%d\n" % (n % 7, n % 5, n) for n in range(40)
    )
    lines = b"".join(
        json.dumps({"who": f"u{n % 7}", "what": n % 5, "stars": 1, "when": n}).encode() + b"\n"
        for n in range(40)
    )
    return {
        "reviews": (reviews, {}),
        "reviews.gz": (gzip.compress(reviews), {}),
        "newer.csv": (newer, {}),
        "ratings.csv": (ratings, {}),
        "retail.csv": (retail, {}),
        "atomic.inter": (recbole, {}),
        "table.csv": (table, {"columns": columns}),
        "table.jsonl": (lines, {"columns": columns}),
        "table.parquet": (_parquet(), {"columns": columns}),
        "table.xlsx": (_xlsx(), {"columns": columns}),
    }


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = io.BytesIO()
    rows = {
        "who": ["u1", "u2"] * 20,
        "what": ["i1", "i2"] * 20,
        "stars": [1.0] * 40,
        "when": list(range(40)),
    }
    pq.write_table(pa.table(rows), target)
    return target.getvalue()


def _xlsx() -> bytes:
    from openpyxl import Workbook

    book = Workbook()
    book.active.append(["who", "what", "stars", "when"])
    for n in range(20):
        book.active.append([f"u{n % 7}", f"i{n % 5}", 1, n])
    target = io.BytesIO()
    book.save(target)
    return target.getvalue()


META = (
    b"{'asin': 'B000000001', 'title': 'one', 'categories': [['a', 'b']], 'brand': 'x'}\n" * 5,
    b'{"asin": "B000000001", "title": "one", "category": ["a"], "description": ["d"]}\n' * 5,
    b'{"parent_asin": "B000000001", "title": "one", "store": "x", "categories": []}\n' * 5,
    b"item_id:token\ttitle:token_seq\n1\tone\n2\t\"two\tand\"\n",
)  # fmt: skip


def sources(seeds: Path) -> Attack:
    """Files of interactions and of items, of every layout."""
    files = _sources()

    def attack(rng: Mutator, folder: Path) -> None:
        if rng.random() < 0.25:
            (folder / "items").write_bytes(rng.data(rng.choice(META)))
            read_items(
                folder / "items",
                Source(path="items"),
                ["title", "brand", "categories"],
                {"B000000001", "1"},
            )
            return
        name, (raw, how) = rng.choice(list(files.items()))
        (folder / name).write_bytes(rng.data(raw))
        read_table(
            folder / name,
            Source(path=name, **how),
            ["user", "item"],
            [] if name == "retail.csv" else ["rating"],
        )

    return attack


def preparations(seeds: Path) -> Attack:
    """Whole preparations, from a damaged file to the prepared directory."""
    files = _sources()
    spec = (
        "name: x\nrecipe: {user_core: 1, item_core: 1}\ndomains:\n  a: {interactions: "
        "{path: %s%s}}\n"
    )

    def attack(rng: Mutator, folder: Path) -> None:
        name, (raw, how) = rng.choice(list(files.items()))
        (folder / name).write_bytes(rng.data(raw) if rng.random() < 0.8 else raw)
        told = ", columns: " + json.dumps(how["columns"]).replace('"', "") if how else ""
        text = spec % (name, told)
        (folder / "spec.yaml").write_bytes(
            text.encode() if rng.random() < 0.7 else rng.data(text.encode())
        )
        data = prepare(folder / "spec.yaml", folder / "out")
        data.verify()

    return attack


def prepared(seeds: Path) -> Attack:
    """Prepared directories: damaged files, edited manifests."""
    from conftest import write_shops

    good = write_shops(seeds / "shops")

    def attack(rng: Mutator, folder: Path) -> None:
        path = Path(shutil.copytree(good, folder / "data"))
        if rng.random() < 0.6:
            rng.json_file(path / "manifest.json") if rng.random() < 0.7 else rng.file(
                path / "manifest.json"
            )
        else:
            rng.file(rng.choice(sorted(path.rglob("*.parquet"))))
        data = PreparedData.open(path)
        if rng.random() < 0.5:
            data.verify()
        for name in data.domains:
            data.sizes(name)
            data.interactions(name)
            data.item_texts(name)
            data.user_ids(name)

    return attack


class _Stop(Exception):
    """In place of a crash."""


def _run(seeds: Path, method: str) -> Path:
    """An interrupted run with two commits."""
    from conftest import write_shops

    data, started = seeds / "shops", list[Path]()
    if not data.exists():
        write_shops(data)
    values = {
        "data": data,
        "out": seeds / "runs",
        "backend": "inprocess",
        "tracking.enabled": False,
    }

    def stop(row: Round) -> None:
        if row.step == 4:
            raise _Stop

    sets = ["rounds=5", "privacy.noise_seed=0", "privacy.delta=0"]
    with contextlib.suppress(_Stop):
        run_recorded(
            build(f"toys:{method}", sets=sets, values=values), on_round=stop, started=started.append
        )
    return started[0]


def _sign(commit: Path) -> None:
    """Give a commit's files the hashes that they have now, as who forges a checkpoint would."""
    told = json.loads((commit / MANIFEST).read_text())
    told["files"] = {
        name: checkpoint.digest(commit / name)
        for name in told["files"]
        if (commit / name).is_file()
    }
    (commit / MANIFEST).write_text(json.dumps(told))


def checkpoints(seeds: Path) -> Attack:
    """Commits: damaged ones, and forged ones whose hashes are right."""
    good = _run(seeds, "AVERAGE")
    config = stored_config(good)
    nodes = InProcess()
    domains = ("books", "films", "games")
    place = seeds / "place"
    place.mkdir()
    (place / "config.yaml").touch()
    nodes.start(Plan(config, config.data or seeds, domains, place, seeds / "cache"), {})

    def attack(rng: Mutator, folder: Path) -> None:
        run_dir = Path(
            shutil.copytree(
                good, folder / "run", ignore=shutil.ignore_patterns("*.parquet", "model", "figures")
            )
        )
        commits = Checkpoints(run_dir, (SERVER, *domains)).committed()
        for commit in commits if rng.random() < 0.5 else commits[-1:]:
            file = rng.choice([path for path in commit.iterdir() if path.name[0] != "."])
            rng.json_file(file) if file.suffix == ".json" and rng.random() < 0.6 else rng.file(file)
            if rng.random() < 0.7 and file.name != MANIFEST:
                _sign(commit)
        if rng.random() < 0.2:
            rng.file(run_dir / rng.choice(("history.jsonl", "ledger.jsonl")))
        rounds = Rounds(
            Plan(config, config.data or seeds, domains, run_dir, seeds / "cache"),
            nodes,
            lambda _: None,
            lambda _: None,
        )
        rounds.restore()

    return attack


def records(seeds: Path) -> Attack:
    """The privacy account of a run, from its own files."""
    good = _run(seeds, "WHISPER")

    def attack(rng: Mutator, folder: Path) -> None:
        run_dir = Path(
            shutil.copytree(
                good, folder / "run", ignore=shutil.ignore_patterns("*.parquet", "model", "figures")
            )
        )
        file = run_dir / rng.choice(
            (
                "releases.jsonl",
                "releases.jsonl",
                "ledger.jsonl",
                "config.yaml",
                "checkpoints/commit-000003/progress.json",
            )
        )
        if file.suffix == ".jsonl" and rng.random() < 0.5:
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            at = rng.randrange(len(lines))
            lines[at] = rng.structure(lines[at])
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            rng.file(file)
        privacy_account(run_dir)

    return attack


def artifacts(seeds: Path) -> Attack:
    """Kept arrays: a damaged one is made again."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    ArtifactStore(seeds / "kept").ensure("text", "ab" * 32, lambda: array, {"what": "a test"})

    def attack(rng: Mutator, folder: Path) -> None:
        shutil.copytree(seeds / "kept", folder / "kept")
        file = rng.choice(
            [path for path in (folder / "kept").rglob("*.*") if path.suffix in (".npy", ".json")]
        )
        rng.json_file(file) if file.suffix == ".json" and rng.random() < 0.5 else file.write_bytes(
            rng.data(file.read_bytes())
        )
        found = ArtifactStore(folder / "kept").ensure(
            "text", "ab" * 32, lambda: array, {"what": "a test"}
        )[1]
        if not np.array_equal(found, array):
            raise AssertionError("a damaged array was used")

    return attack


def payloads(seeds: Path) -> Attack:
    """Messages: what a node sends, receives, and says that it has sent."""
    fields = (
        Field("x", Direction.UP, ("dim",), "x"),
        Field("rows", Direction.UP, ("n_users", 2), "rows"),
        Field("part/*", Direction.UP, None, "parameters"),
        Field("labels", Direction.DOWN, ("n_items",), "l", "int64", "K"),
        Field("x", Direction.PEER, (3,), "x"),
        Field("z", Direction.UP, (2,), "z", "complex64"),
    )
    method = toys._method("fuzzed", lambda c: (), fields)
    nodes = {SERVER: 0, "books": 30, "films": 25}
    edges = [
        frozenset(chosen)
        for chosen in ((), (Direction.UP,), (Direction.UP, Direction.DOWN), tuple(Direction))
    ]
    dtypes = (
        "f4",
        "f8",
        "f2",
        "i8",
        "u8",
        "i4",
        "?",
        "O",
        "S7",
        "U3",
        "c8",
        "M8[s]",
        ">f4",
        "V8",
        [("a", "f4")],
    )
    shapes = ((), (0,), (1,), (2,), (3,), (3, 1), (30,), (40, 2), (2, 2, 2), (0, 0), (1,) * 20)
    keys = (
        "x",
        "rows",
        "part/a",
        "part/../x",
        "labels",
        "z",
        "../x",
        "",
        "x\0",
        "x" * 300,
        7,
        None,
        b"x",
        ("x",),
        float("nan"),
    )

    def array(rng: Mutator) -> Any:
        if rng.random() < 0.15:
            return rng.choice(
                (
                    None,
                    3,
                    "x",
                    b"\x80\x04K*.",
                    [1.0] * 3,
                    {"a": 1},
                    np.float32(1),
                    memoryview(b"abc"),
                    object(),
                )
            )
        if rng.random() < 0.1:
            return np.broadcast_to(
                np.float32(0), rng.choice(((2**31,), (2**20, 2**20), (2**40,), (3,)))
            )
        made = np.zeros(rng.choice(shapes), rng.choice(dtypes))
        if made.size and made.dtype.kind in "fciu":
            made.flat[rng.randrange(made.size)] = (
                rng.choice((0, 1, 200))
                if made.dtype.kind in "iu"
                else rng.choice((np.nan, np.inf, 1))
            )
        return made[::-1] if made.ndim and rng.random() < 0.2 else made

    def payload(rng: Mutator) -> Any:
        if rng.random() < 0.1:
            return rng.choice((None, b"\x80\x04K*.", [], "x", 7, {}, np.zeros(3)))
        return {rng.choice(keys): array(rng) for _ in range(rng.choice((0, 1, 1, 2, 5)))}

    def close(rng: Mutator, way: Direction) -> dict[Any, Any]:
        """A right message with one thing in it changed, or none."""
        good: dict[Any, Any] = {
            Direction.UP: {
                "x": np.zeros(3, "f4"),
                "rows": np.zeros((40, 2), "f4"),
                "part/a": np.zeros(5, "f4"),
            },
            Direction.DOWN: {"labels": np.array([0, 1] * 15)},
            Direction.PEER: {"x": np.ones(3, "f4")},
        }[way]
        key = rng.choice(list(good))
        match rng.randrange(5):
            case 0:
                good[key] = array(rng)
            case 1:
                good[rng.choice(keys)] = good.pop(key)
            case 2:
                good[key] = good[key].astype(rng.choice(dtypes[:7]))
            case 3:
                good[key].flat[0] = -1 if way == Direction.DOWN else np.nan
        return good

    def attack(rng: Mutator, folder: Path) -> None:
        if rng.random() < 0.4:
            way = rng.choice(list(Direction))
            sender, receiver = {
                Direction.UP: ("books", SERVER),
                Direction.DOWN: (SERVER, "books"),
            }.get(way, ("books", "films"))
            stage, told = Stage("s", 1, (), edges=edges[-1]), close(rng, way)
            rows = Gate(
                method, toys.Config(), sender, nodes, None if sender == SERVER else 40
            ).check(stage, 1, {receiver: told})
            check_told(stage, sender, nodes, [receiver], rows)
            Gate(
                method, toys.Config(), receiver, nodes, None if receiver == SERVER else 50
            ).receive(stage, {sender: told})
            return
        node = rng.choice(list(nodes))
        limit = rng.choice((None, None, 1, 2**40))
        gate = Gate(method, toys.Config(), node, nodes, None if node == SERVER else 40, limit)
        stage = Stage("s", 1, (), edges=rng.choice(edges))
        names = (*nodes, "evil", "../books", "", None, 7)
        messages: Any = {rng.choice(names): payload(rng) for _ in range(rng.choice((1, 1, 2)))}
        if rng.random() < 0.05:
            messages = rng.choice(VALUES)
        match rng.randrange(4):
            case 0:
                rows = gate.check(stage, 1, messages)
                check_told(stage, node, nodes, messages, rows)
            case 1:
                gate.receive(stage, messages)
            case 2:
                row = Entry(
                    *(
                        rng.choice((good, rng.choice(VALUES)))
                        for good in ("s", 1, node, SERVER, "up", "x", (3,), "float32", 12)
                    )
                )
                check_told(stage, node, nodes, rng.choice(([SERVER], [], list(names))), [row])
            case _:
                check_metrics(
                    node,
                    {
                        rng.choice(keys): rng.choice((*VALUES, array(rng)))
                        for _ in range(rng.choice((1, 3)))
                    },
                )

    return attack


TARGETS: dict[str, tuple[Callable[[Path], Attack], int]] = {
    "configurations": (configurations, 3),
    "specs": (specs, 1),
    "sources": (sources, 4),
    "preparations": (preparations, 1),
    "prepared": (prepared, 2),
    "checkpoints": (checkpoints, 3),
    "records": (records, 1),
    "artifacts": (artifacts, 1),
    "payloads": (payloads, 4),
}
"""What is attacked, and its share of the inputs."""
