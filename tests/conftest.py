"""Shared fixtures: a small prepared data directory, a cache of its own, real data where it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
# Ray workers are started by the raylet, which inherits this environment: they must find the toy
# methods
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(HERE / "support"), os.environ.get("PYTHONPATH")])
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray's 15 lets actors miss their start beside any other work
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    base = Path(os.environ.get("CROSSFED_TEST_CACHE", tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("CROSSFED_CACHE", str(base))


def write_shops(path: Path) -> Path:
    """Three small domains of different sizes, prepared."""
    from crossfed.platform.data.store import Writer

    with Writer(path, {"kind": "test shops"}) as writer:
        for number, (name, n_users, n_items) in enumerate(
            [("books", 40, 30), ("films", 50, 25), ("games", 30, 35)]
        ):
            rng = np.random.default_rng(number)
            pairs = [(u, i) for u in range(n_users) for i in rng.choice(n_items, 10, replace=False)]
            users, items = np.array(pairs).T
            writer.add_domain(
                name, users, items, rng.integers(0, 10_000, len(users)),
                [f"{name}-u{u}" for u in range(n_users)], [f"{name}-i{i}" for i in range(n_items)],
                [f"{name} product {i} of kind {i % 5}" for i in range(n_items)],
            )  # fmt: skip
    return path


@pytest.fixture(scope="session")
def shops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shops(tmp_path_factory.mktemp("data") / "shops")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray cluster for all tests of this process that need one; runs join it instead of
    starting their own.
    """
    import ray

    from crossfed.platform.cluster.connect import connect
    from crossfed.platform.config.settings import Resources

    connect(Resources())
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets; the test is skipped where it is absent."""
    path = Path(os.environ.get("CROSSFED_SHARED_DATA", HERE.parents[1] / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"real data are not at {path}; set CROSSFED_SHARED_DATA")
    return path
