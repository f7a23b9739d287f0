"""Models logged before version 0.2 name this module, and MLflow imports it by that name."""

from __future__ import annotations

import importlib

from crossfed.platform.serving.pyfunc import Recommender


def test_an_old_models_loader_is_todays() -> None:
    assert importlib.import_module("crossfed.platform.pyfunc").Recommender is Recommender
