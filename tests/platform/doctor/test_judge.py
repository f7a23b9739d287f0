"""The doctor: planted faults are found, named with their machine and a mend; a sound cluster
passes; nothing waits for ever.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from crossfed.platform.doctor.judge import GIB, Finding, Wanted, can_start, judge, table
from doctored import WANTED, machine


def sound() -> list[dict[str, Any]]:
    return [
        machine("this process", driver=True),
        machine("head", head=True),
        machine("one", 1),
        machine("two", 1),
    ]


def test_a_sound_cluster_passes() -> None:
    found = judge(sound(), WANTED)
    assert can_start(found) and {finding.severity for finding in found} == {"ok"}
    assert [finding.subject for finding in found] == [
        "versions",
        "gpus",
        "storage",
        "mlflow",
        "encoder",
        "authentication",
        "clock",
        "disk",
        "memory",
        "actors",
        "runs",
        "placement",
    ]
    assert found[0].text == "Python 3.11.14, crossfed 0.1.0, ray 2.60.0, torch 2.13.0"
    assert found[1].text == "2, seen by Ray and by torch" and not any(
        finding.mend for finding in found
    )


def put(*path: Any, to: Any) -> Callable[[list], None]:
    def plant(rows: list) -> None:
        target: Any = rows
        for part in path[:-1]:
            target = target[part]
        target[path[-1]] = to

    return plant


def drop(*path: Any) -> Callable[[list], None]:
    def plant(rows: list) -> None:
        target: Any = rows
        for part in path[:-1]:
            target = target[part]
        del target[path[-1]]

    return plant


LONE = {"name": "two", "driver": False, "silent": "nothing within 60 s"}
FAULTS = {
    # what is planted (row 0 is the driver, 1 the head, 2 and 3 the GPU machines): severity,
    # subject, where, words
    "another torch": (
        put(3, "packages", "torch", to="2.11.0"),
        "error",
        "torch",
        "two",
        "torch 2.11.0, but 2.13.0 on this process",
    ),
    "another optuna": (
        put(2, "packages", "optuna", to="5.1.0"),
        "warning",
        "optuna",
        "one",
        "optuna 5.1.0, but 5.0.0",
    ),
    "torch not installed": (
        drop(2, "packages", "torch"),
        "error",
        "torch",
        "one",
        "torch is missing",
    ),
    "another Python": (
        put(2, "python", to="3.11.9"),
        "error",
        "python",
        "one",
        "Python 3.11.9, but 3.11.14 on this process",
    ),
    "an old crossfed": (
        put(2, "packages", "crossfed", to="0.0.9"),
        "error",
        "crossfed",
        "one",
        "crossfed 0.0.9, but 0.1.0",
    ),
    "an old checkout": (
        put(2, "source", "hash", to="old"),
        "error",
        "crossfed",
        "one",
        "files differ .* though the version",
    ),
    "no crossfed": (
        drop(3, "packages", "crossfed"),
        "error",
        "crossfed",
        "two",
        "crossfed is missing",
    ),
    "crossfed broken": (
        put(3, "source", to={"problem": "No module named 'pydantic'"}),
        "error",
        "crossfed",
        "two",
        "cannot be imported: No module",
    ),
    "a GPU that torch does not see": (
        put(3, "cuda", "devices", to=[]),
        "error",
        "gpus",
        "two",
        "Ray counts 1 GPUs, torch sees 0: its torch is built for CUDA 12.8",
    ),
    "a CPU build on a GPU machine": (
        put(3, "cuda", to={"build": None, "devices": []}),
        "error",
        "gpus",
        "two",
        "torch is a build without CUDA",
    ),
    "a GPU that Ray does not count": (
        put(1, "cuda", "devices", to=["L4"]),
        "warning",
        "gpus",
        "head",
        "torch sees 1 GPUs, Ray counts 0",
    ),
    "another CUDA": (
        put(3, "cuda", "build", to="12.6"),
        "warning",
        "gpus",
        "one, two",
        "built for CUDA 12.6 and 12.8",
    ),
    "torch broken": (
        put(2, "cuda", to={"problem": "libcudnn.so.9: cannot open"}),
        "error",
        "gpus|cuda",
        "one",
        "libcudnn",
    ),
    "unwritable storage": (
        put(2, "storage", to={"problem": "Permission denied"}),
        "error",
        "storage",
        "one",
        "Permission denied",
    ),
    "storage not there for the driver": (
        put(0, "storage", to={"problem": "Read-only file system"}),
        "error",
        "storage",
        "this process",
        "Read-only",
    ),
    "storage not shared": (
        put(3, "storage", to={"writable": None, "same": False}),
        "error",
        "storage",
        "two",
        "/mnt/shared/runs is not the same there",
    ),
    "storage that hangs": (
        put(3, "storage", to={"problem": "no answer within 45 s"}),
        "error",
        "storage",
        "two",
        "no answer",
    ),
    "no MLflow": (
        lambda rows: [
            row.update(mlflow={"reached": False, "problem": "Connection refused"}) for row in rows
        ],
        "warning",
        "mlflow",
        "this process, head, one, two",
        "5000 does not answer: Connection refused",
    ),
    "MLflow out of reach for a worker": (
        put(2, "mlflow", to={"reached": False, "problem": "timed out"}),
        "warning",
        "mlflow",
        "one",
        "answers the driver, but not there: timed out",
    ),
    "no encoder": (
        put(0, "encoder", to={"problem": "bge is not in the local cache"}),
        "error",
        "encoder",
        "this process",
        "minilm is not at hand offline",
    ),
    "no encoder on the head": (
        put(1, "encoder", to={"problem": "none"}),
        "warning",
        "encoder",
        "head",
        "not at hand",
    ),
    "no authentication": (
        lambda rows: [row["auth"].update(mode="disabled") for row in rows],
        "warning",
        "authentication",
        "head, one, two",
        "without token authentication",
    ),
    "a clock ahead": (
        put(2, "skew", to=8.0),
        "warning",
        "clock",
        "one",
        "8 s ahead of the driver's",
    ),
    "a clock far behind": (
        put(2, "skew", to=-3600.0),
        "error",
        "clock",
        "one",
        "3600 s behind the driver's",
    ),
    "a full disk": (
        put(2, "disk", "places", "Ray's temporary files", "free", to=4 * GIB),
        "error",
        "disk",
        "one",
        r"4.0 GiB \(3%\) free for Ray's temporary files in /tmp/ray",
    ),
    "a disk that fills": (
        put(2, "disk", "places", "Ray's temporary files", "free", to=9 * GIB),
        "warning",
        "disk",
        "one",
        "9.0 GiB",
    ),
    "no memory": (
        put(3, "memory", "free", to=1 * GIB),
        "error",
        "memory",
        "two",
        "1.0 of 32.0 GiB are free",
    ),
    "little memory": (
        put(3, "memory", "free", to=2 * GIB),
        "warning",
        "memory",
        "two",
        "2.0 of 32.0",
    ),
    "a machine that does not answer": (
        put(3, to=LONE),
        "error",
        "answer",
        "two",
        "does not answer: nothing within 60 s",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    """Exactly one finding, of this severity, at this machine, with a mend; all other subjects stay
    well.
    """
    plant, severity, subject, where, words = FAULTS[fault]
    rows = copy.deepcopy(sound())
    plant(rows)
    found = [finding for finding in judge(rows, WANTED) if finding.severity != "ok"]
    assert len(found) == 1, found
    assert (found[0].severity, found[0].where) == (severity, where)
    assert re.fullmatch(subject, found[0].subject) and re.search(words, found[0].text), found
    assert len(found[0].mend) > 10
    assert can_start(found) == (severity == "warning")


def test_what_depends_on_what_is_wanted() -> None:
    away = [{**row, "mlflow": {"reached": False, "problem": "refused"}} for row in sound()]
    required = Wanted(WANTED.out, WANTED.tracking, "minilm", require_tracking=True, set_aside=True)
    assert can_start(judge(away, WANTED)) and not can_start(judge(away, required))
    file = Wanted(WANTED.out, "sqlite:////x/mlflow.db", "minilm", set_aside=True)
    assert any("SQLite file" in finding.text for finding in judge(sound(), file))
    assert not any("SQLite file" in finding.text for finding in judge(sound()[:2], file))
    nowhere = Wanted(WANTED.out, WANTED.tracking, "minilm", set_aside=False)
    (placed,) = [finding for finding in judge(sound(), nowhere) if finding.severity != "ok"]
    assert placed.subject == "placement" and placed.where == "one, two"


def test_builds_of_one_torch_are_no_difference() -> None:
    rows = sound()
    rows[0]["packages"]["torch"] = rows[1]["packages"]["torch"] = "2.13.0+cpu"
    assert can_start(judge(rows, WANTED)) and judge(rows, WANTED)[0].subject == "versions"


def test_an_open_cluster_on_this_machine_alone_is_no_matter() -> None:
    rows = [machine("this process", driver=True), machine("head", head=True)]
    for row in rows:
        row["auth"]["mode"] = "disabled"
    assert {finding.severity for finding in judge(rows, WANTED)} == {"ok"}


def test_when_nobody_answers() -> None:
    found = judge([{"name": "a", "driver": False, "silent": "gone"}], WANTED)
    assert [finding.subject for finding in found] == ["answer"] and not can_start(found)


def test_the_table_shows_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=200).print(
        table(
            [
                Finding("error", "disk", "one", "[full]", "free some"),
                Finding("ok", "gpus", "all", "2"),
            ]
        )
    )
    shown = capsys.readouterr().out
    for word in ("error", "disk", "one", "[full]", "free some", "gpus"):
        assert word in shown


# -- looking ---------------------------------------------------------------------------------------


def test_actors_that_fit_no_machine_keep_a_run_from_starting() -> None:
    """The words are those of the preflight, which is asked for the same shares."""
    found = judge(sound(), replace(WANTED, shortage="No machine has room for domain 3"))
    assert not can_start(found)
    assert (found[0].subject, found[0].text) == ("actors", "No machine has room for domain 3")
