"""Two studies on one cluster that loses a machine; `two_studies.py` by itself shows what it
does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_studies.py")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", [(), ("--replaced",)], ids=["to spare", "replaced"])
def test_two_studies_finish_when_their_cluster_loses_a_machine(how: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *how], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
