"""A notebook that reads runs: metrics, rounds, what crossed, recommendations, a comparison.

marimo edit tests/notebooks/read_a_run.py
"""

import marimo

app = marimo.App()


@app.cell
def _():
    import marimo as mo

    import crossfed

    return crossfed, mo


@app.cell
def _(crossfed):
    # small synthetic shops; give data=… for your own
    common = {
        "backend": "inprocess",
        "progress": "quiet",
        "settings": {
            "synthetic.users": 120,
            "synthetic.items": 80,
            "text.encoder": "hashing:64",
            "tracking.enabled": False,
        },
    }
    alone = crossfed.run("lightgcn", epochs=3, **common)
    together = crossfed.run("fedcrf", K=5, rounds=2, epochs=3, **common)
    return alone, together


@app.cell
def _(mo, together):
    mo.md(f"## {together.id}: {together.protocol}")
    return


@app.cell
def _(together):
    together.metrics.pivot_table(index=["domain", "split"], columns="metric", values="value")
    return


@app.cell
def _(together):
    # round by round
    together.history[["stage", "round", "bytes_up", "val/mean/recall_at_20"]]
    return


@app.cell
def _(together):
    # what crossed, by key and direction
    crossed = together.ledger().groupby(["direction", "key"])["bytes"].agg(["count", "sum"])
    crossed
    return (crossed,)


@app.cell
def _(together):
    together.recommend(together.metrics["domain"].iloc[0], ["a user nobody knows"], k=5)
    return


@app.cell
def _(alone, crossfed, together):
    compared = crossfed.compare([alone, together])
    compared
    return (compared,)


if __name__ == "__main__":
    app.run()
