"""What every test of a study's report is held to."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import optuna
import pytest


@pytest.fixture(autouse=True)
def _strict(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing may reach the user: no warning, no log line of Optuna's."""
    log = logging.getLogger("optuna")
    log.addHandler(caplog.handler)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    log.removeHandler(caplog.handler)
    assert not caplog.get_records("call")
