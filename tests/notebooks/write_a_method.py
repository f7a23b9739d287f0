"""A notebook that writes a method: every domain recommends what is popular in it, then shares how
popular.

marimo edit tests/notebooks/write_a_method.py
"""

import marimo

app = marimo.App()


@app.cell
def _():
    import sys
    import tempfile
    from pathlib import Path

    import crossfed

    return Path, crossfed, sys, tempfile


@app.cell
def _():
    # A method is a module with METHOD in it: actors import it by name, so it lives in a file.
    source = '''
"""Popularity, with the federation's mean count as a prior."""

import numpy as np
import torch

from crossfed.platform.method import SERVER, Direction, Field, Method, MethodConfig, Out, Phase, Stage


class Config(MethodConfig):
    weight: float = 1.0


class State:
    def __init__(self, config, ctx):
        self.config, self.prior = config, 0.0
        data = ctx.data
        self.counts = None if data is None else np.bincount(data.items, minlength=data.n_items)
        self.n_users = 0 if data is None else data.n_users


def upload(state, inbox, ctx):
    return Out({SERVER: {"mean": np.array([state.counts.mean()], np.float32)}})


def average(state, inbox, ctx):
    mean = np.mean([payload["mean"] for payload in inbox.values()], axis=0, dtype=np.float32)
    return Out({domain: {"mean": mean} for domain in ctx.peers})


def adopt(state, inbox, ctx):
    state.prior = float(inbox[SERVER]["mean"][0])
    return Out(metrics={"prior": state.prior})


def export(state):
    scores = torch.tensor(state.counts + state.config.weight * state.prior, dtype=torch.float32)
    return {"users": torch.ones(state.n_users, 1), "items": scores[:, None]}


METHOD = Method(
    name="popularity",
    title="Popularity with a shared prior",
    paper="example",
    Config=Config,
    fields=(
        Field("mean", Direction.UP, (1,), "mean interactions of an item"),
        Field("mean", Direction.DOWN, (1,), "its mean over domains"),
    ),
    stages=lambda config: (
        Stage(
            "share",
            rounds=1,
            each=(Phase(upload), Phase(average, at="server"), Phase(adopt)),
            edges=frozenset({Direction.UP, Direction.DOWN}),
        ),
    ),
    init_domain=State,
    init_server=State,
    score=lambda state, users: export(state)["users"][users] @ export(state)["items"].T,
    state_dict=lambda state: {"prior": state.prior},
    load_state_dict=lambda state, saved: setattr(state, "prior", float(saved["prior"])),
    export=export,
)
'''  # noqa: E501
    return (source,)


@app.cell
def _(Path, source, sys, tempfile):
    folder = Path(tempfile.mkdtemp())
    (folder / "popularity.py").write_text(source)
    sys.path.insert(0, str(folder))
    return (folder,)


@app.cell
def _(crossfed, folder):
    run = crossfed.run(
        "popularity:METHOD",
        out=folder / "runs",
        backend="inprocess",
        progress="quiet",
        settings={"synthetic.users": 120, "synthetic.items": 80, "tracking.enabled": False},
    )
    run.metrics
    return (run,)


@app.cell
def _(run):
    # one number per domain and direction has crossed, and the platform has counted it
    ledger = run.ledger()
    ledger
    return (ledger,)


if __name__ == "__main__":
    app.run()
