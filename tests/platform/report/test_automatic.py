"""The analyses that every run draws for itself: those with something to show, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.test_methods import small
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.report.automatic import run_analyses
from crossfed.platform.report.recording import run_recorded


@pytest.mark.parametrize(
    ("method", "drawn"), [("fedcgr", {"cohorts", "upload", "weights"}), ("lightgcn", {"cohorts"})]
)
def test_a_run_draws_what_it_has_something_to_show_in(
    method: str, drawn: set[str], shops: Path, tmp_path: Path
) -> None:
    done = run_recorded(small(method, shops, tmp_path), finish=final_test)
    assert run_analyses(done.run_dir).keys() == drawn


def test_without_the_test_split_there_are_no_cohorts(shops: Path, tmp_path: Path) -> None:
    done = run_recorded(small("lightgcn", shops, tmp_path))
    assert run_analyses(done.run_dir) == {}
