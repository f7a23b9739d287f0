"""Nodes in this process, for tests of what they mask and measure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from crossfed.platform.config.settings import build
from crossfed.platform.federation.node import InProcess, Plan
from placed_nodes import NAMES


@pytest.fixture
def placed(shops: Path, tmp_path: Path) -> Iterator[tuple[Plan, InProcess]]:
    """The three domains of `shops`, each with 8 training, 1 validation and 1 test item per user."""
    values = {
        "data": shops,
        "out": tmp_path,
        "backend": "inprocess",
        "tracking.enabled": False,
        "tracking.artifacts": False,
    }
    plan = Plan(build("toys:AVERAGE", values=values), shops, NAMES, tmp_path, tmp_path / "cache")
    (tmp_path / "config.yaml").touch()
    nodes = InProcess()
    nodes.start(plan, {})
    yield plan, nodes
    nodes.stop()
