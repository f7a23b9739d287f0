"""Runs of four methods, for everything that compares."""

from __future__ import annotations

import pytest

from analysed import per_user
from crossfed.platform.report.finished import Finished, load_runs
from made_runs import make_run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Finished]:
    out = tmp_path_factory.mktemp("runs")
    paths = []
    for method, seeds in {
        "lightgcn": (0, 1, 2),
        "sasrec": (0, 1, 2),
        "fedcrf": (0, 1, 2),
        "p2p_iagr": (1,),
    }.items():
        for seed in seeds:
            values = {domain: per_user(method, seed, domain) for domain in ("books", "toys")}
            paths.append(make_run(out / f"{method}-{seed}", method, seed, values))
    return load_runs(paths)
