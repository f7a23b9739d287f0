"""Malformed inputs by the thousand: whatever is read refuses with a `CrossfedError`, or takes what
is usable. Nothing hangs.

    python tests/faults/fuzz.py --inputs 12000 --seed 0
    python tests/faults/fuzz.py --only checkpoints:17 --seed 0        one input again, with its traceback

Inputs are good ones, mutated: bits, bytes, lengths, tokens that parsers trip over, values of other
types and sizes. Every input comes from (seed, target, number) alone.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "support")
)  # the tests' own modules, when this file is run as a script

from crossfed.platform.errors import CrossfedError
from faults.attacks import TARGETS
from faults.mutator import Mutator

HANG = 20.0
"""Seconds of computing after which an input counts as a hang."""


@dataclass
class Tally:
    """What came of one target's inputs."""

    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    failures: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _hang() -> Iterator[None]:
    """Raise TimeoutError in what computes for too long; time that others compute on this machine
    does not count.
    """

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"still computing after {HANG:g} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, HANG)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(inputs: int, seed: int, folder: Path, only: str | None = None) -> dict[str, Tally]:
    """Attack every target with its share of the inputs.

    Args:
        folder: an empty one. only: a target's name, or `name:number` for one of its inputs.
    """
    total, found = sum(share for _, share in TARGETS.values()), dict[str, Tally]()
    for name, (make, share) in TARGETS.items():
        if only and only.split(":")[0] != name:
            continue
        seeds, tally = folder / f"{name}-seeds", found.setdefault(name, Tally())
        seeds.mkdir()
        attack = make(seeds)
        numbers: Sequence[int] = (
            range(max(1, inputs * share // total)) if not only else range(inputs)
        )
        for number in [int(only.split(":")[1])] if only and ":" in only else numbers:
            place = folder / "input"
            place.mkdir()
            began = time.process_time()
            try:
                with _hang(), warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore")
                    attack(Mutator(f"{seed}/{name}/{number}"), place)
                tally.accepted += 1
            except CrossfedError as error:
                tally.refused += 1
                if "\n" in str(error).strip() or not str(error):
                    tally.failures.append(
                        f"{name}:{number}: not one sentence: {str(error)[:300]!r}"
                    )
            except BaseException as error:  # whatever it is, it is what this looks for
                if isinstance(error, KeyboardInterrupt):
                    raise
                tally.failures.append(
                    f"{name}:{number}: {''.join(traceback.format_exception(error)[-4:])}"
                )
            finally:
                tally.slowest = max(tally.slowest, time.process_time() - began)
                shutil.rmtree(place, ignore_errors=True)
    return found


def report(found: dict[str, Tally]) -> str:
    """The outcome as a table."""
    lines = [
        "| read | inputs | accepted | refused in a sentence | anything else | slowest, CPU s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, tally in found.items():
        inputs = tally.accepted + tally.refused + len(tally.failures)
        lines.append(
            f"| {name} | {inputs} | {tally.accepted} | {tally.refused} | {len(tally.failures)} "
            f"| {tally.slowest:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a target, or target:number")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        found = run(told.inputs, told.seed, Path(folder), told.only)
    for tally in found.values():
        for failure in tally.failures[:20]:
            print(failure)
    print(report(found))
    return 1 if any(tally.failures for tally in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
