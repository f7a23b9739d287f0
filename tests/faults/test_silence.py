"""Nodes that live and say nothing, on a real Ray: nothing waits for ever, and the numbers are those
of a calm run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.runs import stored_config
from crossfed.platform.report.recording import run_recorded


def config(shops: Path, out: Path, marker: Path, *sets: str, backend: str = "ray") -> RunConfig:
    values = {
        "data": shops,
        "out": out,
        "backend": backend,
        "tracking.enabled": False,
        "tracking.artifacts": False,
    }
    return build(
        "toy_faults:SILENT_ONCE", sets=["rounds=3", f"marker={marker}", *sets], values=values
    )


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("domains", "bytes")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "limit"),
    [("stop", "resources.heartbeat_timeout=4"), ("sleep", "resources.round_timeout=20")],
)
def test_a_silent_node_is_left_behind(
    fault: str, limit: str, shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    never, marker = tmp_path / "never", tmp_path / "silent"
    never.touch()
    calm = run_recorded(config(shops, tmp_path / "calm", never, backend="inprocess"))
    began = time.monotonic()
    hit = run_recorded(config(shops, tmp_path / "hit", marker, f"fault={fault}", limit))
    assert marker.exists() and hit.result["restarts"] == 1
    assert numbers(hit.result) == numbers(calm.result)
    assert time.monotonic() - began < 240


@pytest.mark.slow
def test_on_failure_fail_ends_the_run_with_who_was_late(
    shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    started: list[Path] = []
    sets = ("fault=sleep", "resources.round_timeout=20", "resources.on_failure=fail")
    words = (
        r"^books had no answer 20 s after round 2 of stage mean began .*films .* "
        r"s.*\(resources.on_failure=fail\)"
    )
    with pytest.raises(CrossfedError, match=words):
        run_recorded(config(shops, tmp_path, tmp_path / "silent", *sets), started=started.append)
    again = run_recorded(stored_config(started[0]), resume=started[0])
    assert again.result["domains"]
