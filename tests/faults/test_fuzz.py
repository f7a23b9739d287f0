"""Malformed inputs: a few hundred by default, the full number on request; see `fuzz.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import fuzz


def _attack(inputs: int, tmp_path: Path) -> None:
    found = fuzz.run(inputs, 0, tmp_path)
    failures = [failure for tally in found.values() for failure in tally.failures]
    assert not failures, "\n".join(failures[:5]) + "\n" + fuzz.report(found)
    assert sum(tally.accepted + tally.refused for tally in found.values()) >= inputs * 0.95
    assert all(tally.refused for name, tally in found.items() if name != "artifacts"), fuzz.report(
        found
    )
    assert all(tally.accepted for tally in found.values()), fuzz.report(found)


def test_malformed_inputs_are_refused_in_a_sentence(tmp_path: Path) -> None:
    _attack(300, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_malformed_inputs_are_refused_in_a_sentence(tmp_path: Path) -> None:
    _attack(11_000, tmp_path)
