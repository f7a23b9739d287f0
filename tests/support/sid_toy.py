"""A method that needs semantic IDs, as a user would bring it, and a small tokeniser for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.console import Progress, make_progress
from crossfed.platform.data.artifacts import default_root
from crossfed.platform.federation.run import make_artifacts

TOY = """
from dataclasses import replace

import toys
from crossfed.platform.method import Out, Phase, Stage


class Config(toys.Config):
    levels: int = 3
    codebook: int = 8


def look(state, inbox, ctx):
    sids = ctx.artifacts["sids"]
    n, levels = sids.shape
    return Out(metrics={"items": n, "levels": levels, "sum": int((sids * [1, 10, 100][:levels]).sum())})


def stages(c):
    return (Stage("look", 1, (Phase(look),)),)


METHOD = replace(
    toys.AVERAGE, name="sidtoy", Config=Config, artifacts=("sids",), stages=stages, fields=(), init_server=None
)
TEXTLESS = replace(METHOD, artifacts=())
SHAPELESS = replace(METHOD, Config=toys.Config)
"""  # noqa: E501


SMALL = (
    "text.encoder=hashing:32",
    "tokeniser.dim=8",
    "tokeniser.hidden=16",
    "tokeniser.epochs=7",
    "tokeniser.batch_size=32",
)


def config(
    data: Path, out: Path, *sets: str, method: str = "sidtoy:METHOD", backend: str = "inprocess"
) -> RunConfig:
    values = {
        "data": data,
        "out": out,
        "backend": backend,
        "tracking.enabled": False,
        "tracking.artifacts": False,
    }
    return build(method, sets=[*SMALL, *sets], values=values)


def made(run: RunConfig, view: Progress | None = None) -> Mapping[str, Mapping[str, np.ndarray]]:
    return make_artifacts(run, view or make_progress("quiet"))


def files(kind: str) -> list[Path]:
    return sorted((default_root() / "sids").glob(f"*/*.{kind}"))
