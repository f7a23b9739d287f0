"""Maps of vectors that a run left: items in the plane (t-SNE, or UMAP where it is installed),
similarities of prototypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from safetensors.numpy import load_file
from threadpoolctl import threadpool_limits

from crossfed.platform import checkpoint
from crossfed.platform.data.artifacts import ArtifactStore
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.run import resolve_data
from crossfed.platform.federation.runs import stored_config
from crossfed.platform.method import SERVER, Array
from crossfed.platform.report.analyses import Analysis, about
from crossfed.platform.report.figures import MARKERS, About, below, cosines, panels, styles
from crossfed.platform.report.figures import prototypes as prototype_figure
from crossfed.platform.report.finished import Finished
from crossfed.platform.report.tables import Column, Grid

LAYOUTS = ("tsne", "umap")
TEXT = "text"
"""The name of the item texts' vectors, as they come from the encoder."""
_FEW = 4  # vectors that a map needs at least


def item_map(
    run: Finished,
    names: Sequence[str] = ("items",),
    centres: str | None = None,
    layout: str = "tsne",
    per_domain: int = 500,
    seed: int = 0,
) -> Analysis:
    """Maps of a run's item vectors (as in FedCRF, Figure 5): a row per name, the domains together
    and each alone.

    Args:
        run: with its model and checkpoints beside it.
        names: what to map, e.g. before and after adaptation: tensors that the run exported
            ("items"), "text", or arrays of the domains' last committed state by dotted name
            ("model.t_pre").
        centres: an array [K, d] of the server's or the first domain's state by dotted name, drawn
            where the width fits.
        per_domain: at most so many items of each domain are drawn, by `seed`.

    Raises:
        CrossfedError: the run has no such vectors, their widths differ between domains, or the
            layout is not installed.
    """
    if layout not in LAYOUTS:
        raise CrossfedError(f"A map is laid out by {' or '.join(LAYOUTS)}, not {layout!r}.")
    domains, shelves = list(run.result["domains"]), _shelves(run)
    vectors = {name: _vectors(run, shelves, name, domains) for name in names}
    middle = None if centres is None else _centres(run, shelves, centres, domains)
    parts = [("all domains", domains)] + (
        [(domain, [domain]) for domain in domains] if len(domains) > 1 else []
    )
    title = f"Item vectors of {run.label} ({'t-SNE' if layout == 'tsne' else 'UMAP'})"
    told = about([run], "every panel laid out by itself")
    figure, axes = panels(
        len(names) * len(parts), title, told, height=4.6, columns=len(parts), each=3.9
    )
    style, records, drawn_centres = styles(domains), [], False
    for row, name in enumerate(names):
        rng = np.random.default_rng(seed)
        chosen = {
            d: np.sort(rng.permutation(len(v))[:per_domain]) for d, v in vectors[name].items()
        }
        for column, (part, own) in enumerate(parts):
            axis = axes[row * len(parts) + column]
            pieces = [np.asarray(vectors[name][d][chosen[d]], np.float32) for d in own]
            fits = middle is not None and middle.shape[1] == pieces[0].shape[1]
            if middle is not None and fits:
                pieces.append(middle.astype(np.float32))
            places = np.split(
                _places(np.concatenate(pieces), layout, seed),
                np.cumsum([len(p) for p in pieces])[:-1],
            )
            for domain, spots in zip(own, places, strict=False):
                (x, y), (colour, marker) = spots.T, style[domain]
                axis.scatter(x, y, s=8, alpha=0.6, color=colour, marker=marker, linewidths=0)
                records += _records(name, part, domain, chosen[domain], spots)
            if fits:
                drawn_centres = True
                x, y = places[-1].T
                axis.scatter(
                    x,
                    y,
                    s=110,
                    marker="*",
                    color="black",
                    edgecolors="white",
                    linewidths=0.8,
                    zorder=5,
                )
                records += _records(name, part, "centre", np.arange(len(places[-1])), places[-1])
            axis.spines[:].set_visible(False)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(f"{name}: {part}" if len(names) > 1 else part, fontsize=12)
    handles = [
        Line2D([], [], ls="", marker=MARKERS[i], color=style[d][0],
               label=f"{d} ({min(per_domain, len(vectors[names[0]][d])):,} of "
                     f"{len(vectors[names[0]][d]):,} items)")
        for i, d in enumerate(domains)
    ]  # fmt: skip
    if drawn_centres and middle is not None:
        handles.append(
            Line2D([], [], ls="", marker="*", color="black", ms=10, label=f"{len(middle)} centres")
        )
    below(figure, handles)
    return Analysis(
        "item-map",
        figure,
        Grid(
            title=title,
            columns=(
                Column("vectors", right=False),
                Column("width"),
                *(Column(d) for d in domains),
            ),
            rows=tuple(
                (
                    n,
                    str(next(iter(v.values())).shape[1]),
                    *(f"{len(v[d]):,} items" for d in domains),
                )
                for n, v in vectors.items()
            ),
            caption=told + ".",
            records=tuple(records),
        ),
    )


def prototypes(run: Finished) -> list[Analysis]:
    """Cosine similarities and principal components of every set of prototypes that a run exported
    (as in P2P-IAGR, Figure 6).

    Raises:
        CrossfedError: it exported none.
    """
    found: dict[str, dict[str, Array]] = {}
    for domain in run.result["domains"]:
        exported = run.path / "model" / f"{domain}.safetensors"
        for key, table in (load_file(exported) if exported.is_file() else {}).items():
            if key.endswith("_prototypes") and table.ndim == 2:
                found.setdefault(key, {})[domain] = table
    if not found:
        raise CrossfedError(
            f"{run.origin} exported no prototypes. Models lie in the run's own directory only."
        )
    return [_similarities(run, key, tables) for key, tables in found.items()]


def _similarities(run: Finished, key: str, tables: Mapping[str, Array]) -> Analysis:
    kind, rows, records = key.replace("_", " "), [], []
    for domain, table in tables.items():
        cosine = cosines(table)
        others = np.abs(cosine[~np.eye(len(cosine), dtype=bool)])
        rows.append(
            (
                domain,
                str(len(table)),
                str(table.shape[1]),
                f"{others.mean():.3f}",
                f"{others.max():.3f}",
            )
        )
        records += [
            {"domain": domain, "prototype": i, "other": j, "cosine": float(value)}
            for (i, j), value in np.ndenumerate(cosine)
        ]
    return Analysis(
        key,
        prototype_figure(tables, kind, About.of(run.result)),
        Grid(
            title=kind.capitalize(),
            columns=(
                Column("domain", right=False),
                *(Column(n) for n in ("K", "width", "mean |cos|", "largest |cos|")),
            ),
            rows=tuple(rows),
            caption=f"Cosines of different prototypes. {About.of(run.result).line()}.",
            records=tuple(records),
        ),
    )


def _records(name: str, part: str, what: str, rows: Array, places: Array) -> list[dict[str, Any]]:
    return [
        {
            "vectors": name,
            "map": part,
            "domain": what,
            "row": int(row),
            "x": float(x),
            "y": float(y),
        }
        for row, (x, y) in zip(rows, places, strict=True)
    ]


def _places(vectors: Array, layout: str, seed: int) -> Array:
    """Coordinates [n, 2]."""
    if len(vectors) < _FEW:
        raise CrossfedError(
            f"A map of item vectors needs at least {_FEW} vectors; there are {len(vectors)}."
        )
    if layout == "umap":
        try:
            from umap import UMAP
        except ImportError:
            raise CrossfedError(
                "UMAP is not installed: pip install umap-learn, or take --layout tsne."
            ) from None
        return np.asarray(
            UMAP(n_neighbors=min(15, len(vectors) - 1), random_state=seed).fit_transform(vectors)
        )
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(vectors) - 1) / 3)
    # the same places everywhere; and threads that wait for each other slow small maps down
    with threadpool_limits(1):
        return np.asarray(
            TSNE(init="pca", perplexity=perplexity, random_state=seed).fit_transform(vectors)
        )


def _shelves(run: Finished) -> dict[str, dict[str, Array]]:
    """Node -> dotted name -> array, of the exported model (which goes before) and the last
    committed state.
    """
    latest = checkpoint.Checkpoints(run.path, ()).committed()[-1:]
    found: dict[str, dict[str, Array]] = {}
    for node in (*run.result["domains"], SERVER):
        stored = latest[0] / node if latest else None
        state = (
            _arrays(checkpoint.load(stored))
            if stored and stored.with_name(f"{node}.json").is_file()
            else {}
        )
        exported = run.path / "model" / f"{node}.safetensors"
        found[node] = state | (dict(load_file(exported)) if exported.is_file() else {})
    return found


def _arrays(state: Any, prefix: str = "") -> dict[str, Array]:
    """Every matrix of a nested state, by dotted name."""
    if isinstance(state, Mapping):
        parts = [_arrays(value, f"{prefix}{key}.") for key, value in state.items()]
        return {name: array for part in parts for name, array in part.items()}
    array = np.asarray(state) if hasattr(state, "ndim") else np.zeros(())
    return {prefix[:-1]: array} if array.ndim == 2 else {}


def _vectors(
    run: Finished, shelves: Mapping[str, Mapping[str, Array]], name: str, domains: Sequence[str]
) -> dict[str, Array]:
    if name == TEXT:
        config = stored_config(run.path)
        data, store = PreparedData.open(resolve_data(config)), ArtifactStore()
        return {
            d: store.ensure_text(data.item_texts(d), config.text.encoder, config.text.missing, d)[1]
            for d in domains
        }
    counts = {d: run.result["domains"][d]["counts"]["items"] for d in domains}
    known = [
        n
        for n in shelves[domains[0]]
        if all(n in shelves[d] and len(shelves[d][n]) == counts[d] for d in domains)
    ]
    if name not in known:
        raise CrossfedError(
            f"{run.origin} holds no item vectors {name!r} in all domains; it has "
            f"{', '.join([*known, TEXT])}. "
            "Models and checkpoints lie in the run's own directory only."
        )
    found = {d: shelves[d][name] for d in domains}
    if len({table.shape[1] for table in found.values()}) > 1:
        raise CrossfedError(
            f"The vectors {name!r} of {run.origin} differ in width between domains, which no "
            f"map can show."
        )
    return found


def _centres(
    run: Finished, shelves: Mapping[str, Mapping[str, Array]], name: str, domains: Sequence[str]
) -> Array:
    for node in (SERVER, domains[0]):
        if name in shelves[node]:
            return shelves[node][name]
    known = sorted({n for node in (SERVER, domains[0]) for n in shelves[node]})
    raise CrossfedError(
        f"{run.origin} holds no centres {name!r}; it has {', '.join(known) or 'no matrices'}."
    )
