"""Tables of results across methods and seeds, in Markdown, LaTeX and CSV.

Every table states its protocol, candidate sets and data, and only results that agree on all of them, the seed of the split
included, go into one table: numbers from other splits, candidates or data are not comparable.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from crossfed.platform.evaluation.metrics import metric_name
from crossfed.platform.seam import CrossfedError

Result = Mapping[str, Any]
"""A run's `result.json`."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One metric of one method in one domain.

    Attributes:
        mean: over seeds.
        std: sample standard deviation over seeds (n - 1); None for a single seed.
        best: whether no other method in the table has a higher mean; all metrics here are better when higher.
    """

    mean: float
    std: float | None
    best: bool

    def text(self, digits: int, plus_minus: str) -> str:
        """Mean and deviation, rounded for printing."""
        mean = f"{self.mean:.{digits}f}"
        return mean if self.std is None else f"{mean} {plus_minus} {self.std:.{digits}f}"


@dataclass(frozen=True, slots=True)
class Table:
    """Methods by (domain, metric).

    Attributes:
        columns: (domain, metric), in order.
        cells: method -> one cell per column.
        seeds: method -> the seeds behind its cells, ascending.
        split: "validation" or "test".
        protocol: the protocol's identifier, with the seed of its split where results tell one.
        candidates: what the truth was ranked among, per domain.
        data_fingerprint: of the data set.
    """

    columns: tuple[tuple[str, str], ...]
    cells: dict[str, tuple[Cell, ...]]
    seeds: dict[str, tuple[int, ...]]
    split: Literal["validation", "test"]
    protocol: str
    candidates: dict[str, str]
    data_fingerprint: str

    @property
    def caption(self) -> str:
        """What the numbers are, in one sentence."""
        among = ", ".join(f"{domain} {name}" for domain, name in self.candidates.items())
        return (
            f"{self.split.capitalize()} metrics, mean ± standard deviation over seeds; protocol {self.protocol}; "
            f"candidates {among}; data {self.data_fingerprint}."
        )

    def markdown(self, digits: int = 4) -> str:
        """A GitHub table with the best value of each column in bold, its caption below."""
        head = ["method", "seeds", *(f"{_plain(domain)} {metric}" for domain, metric in self.columns)]
        lines = [head, ["---", *("---:" for _ in head[1:])]]
        for method, cells in self.cells.items():
            texts = [cell.text(digits, "±") for cell in cells]
            bold = [f"**{text}**" if cell.best else text for cell, text in zip(cells, texts, strict=True)]
            lines.append([_plain(method), str(len(self.seeds[method])), *bold])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{_plain(self.caption)}\n"

    def latex(self, digits: int = 4) -> str:
        """A table environment for the booktabs package, best values in bold, the caption inside."""
        domains: dict[str, int] = {}
        for domain, _ in self.columns:
            domains[domain] = domains.get(domain, 0) + 1
        groups = [rf"\multicolumn{{{span}}}{{c}}{{{_latex(domain)}}}" for domain, span in domains.items()]
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(self.caption)}}}",
            rf"\begin{{tabular}}{{lr{'c' * len(self.columns)}}}",
            r"\toprule",
            rf" &  & {' & '.join(groups)} \\",
            rf"method & seeds & {' & '.join(_latex(metric) for _, metric in self.columns)} \\",
            r"\midrule",
        ]
        for method, cells in self.cells.items():
            texts = [cell.text(digits, r"$\pm$") for cell in cells]
            bold = [rf"\textbf{{{text}}}" if cell.best else text for cell, text in zip(cells, texts, strict=True)]
            lines.append(rf"{_latex(method)} & {len(self.seeds[method])} & {' & '.join(bold)} \\")
        lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """One line per method, domain and metric, unrounded, each with its protocol, candidates and data."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(
            ["method", "domain", "split", "metric", "mean", "std", "best", "seeds", "protocol", "candidates", "data"]
        )
        for method, cells in self.cells.items():
            seeds = " ".join(map(str, self.seeds[method]))
            for (domain, metric), cell in zip(self.columns, cells, strict=True):
                std = "" if cell.std is None else cell.std
                stated = [self.protocol, self.candidates[domain], self.data_fingerprint]
                writer.writerow([method, domain, self.split, metric, cell.mean, std, int(cell.best), seeds, *stated])
        return buffer.getvalue()


def table(
    results: Sequence[Result],
    metrics: Sequence[str],
    split: Literal["validation", "test"] = "test",
    domains: Sequence[str] | None = None,
    label: Callable[[Result], str] | None = None,
) -> Table:
    """Gather results into one table, a row per method, averaged over seeds.

    Args:
        results: run results, each with method, seed, protocol, candidates (one for all domains, or by domain; for a single
            split domains.<name>.<split>_candidates goes before), data_fingerprint and domains.<name>.<split>.<metric>. A
            run whose scope is "pooled" is marked "not private".
        metrics: which metrics, in any spelling `metric_name` accepts.
        split: which part of the data they were measured on.
        domains: which domains; all by default, in the first result's order.
        label: the row a result belongs to; by default its method. Needed to tell variants of one method apart.

    Raises:
        CrossfedError: nothing to show; protocols, candidate sets or data differ; two results of a row share a seed; a
            result lacks a domain or a metric.
    """
    if not results:
        raise CrossfedError("no results to make a table of")
    names = [metric_name(metric) for metric in metrics]
    shown = list(domains) if domains is not None else list(results[0]["domains"])
    protocol = _common("protocol", results, _protocol)
    fingerprint = _common("data fingerprint", results, lambda result: result["data_fingerprint"])
    candidates = {
        domain: _common(f"candidate set of {domain}", results, partial(_candidates, domain=domain, split=split))
        for domain in shown
    }
    rows: dict[str, dict[int, Result]] = {}
    for result in results:
        row = rows.setdefault(_label(result, label), {})
        if result["seed"] in row:
            raise CrossfedError(
                f"two results of {_label(result, label)} have seed {result['seed']}; drop one, or label variants apart"
            )
        row[result["seed"]] = result
    columns = tuple((domain, name) for domain in shown for name in names)
    values = {
        row: [[_value(result, domain, split, name) for result in seeds.values()] for domain, name in columns]
        for row, seeds in rows.items()
    }
    means = {row: [statistics.fmean(column) for column in by_column] for row, by_column in values.items()}
    highest = [max(column) for column in zip(*means.values(), strict=True)]
    cells = {
        row: tuple(
            Cell(mean, statistics.stdev(column) if len(column) > 1 else None, mean == top)
            for mean, column, top in zip(means[row], by_column, highest, strict=True)
        )
        for row, by_column in values.items()
    }
    return Table(
        columns=columns,
        cells=cells,
        seeds={row: tuple(sorted(seeds)) for row, seeds in rows.items()},
        split=split,
        protocol=protocol,
        candidates=candidates,
        data_fingerprint=fingerprint,
    )


def _label(result: Result, label: Callable[[Result], str] | None) -> str:
    name = label(result) if label else str(result["method"])
    return f"{name} (not private)" if result.get("scope") == "pooled" else name


def _common(what: str, results: Sequence[Result], read: Callable[[Result], Any]) -> str:
    """The value all results share, as text."""
    found: dict[str, str] = {}
    for result in results:
        value = read(result)
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        found.setdefault(text, f"{result['method']} seed {result['seed']}")
    if len(found) > 1:
        told = "; ".join(f"{text} ({where})" for text, where in found.items())
        raise CrossfedError(f"the results differ in {what} and do not belong in one table: {told}")
    return next(iter(found))


def _protocol(result: Result) -> str:
    seed = result.get("split_seed")
    return str(result["protocol"]) if seed is None else f"{result['protocol']} (split seed {seed})"


def _domain(result: Result, domain: str) -> Mapping[str, Any]:
    if domain not in result["domains"]:
        raise CrossfedError(f"{_where(result)} has no domain {domain}; it has {', '.join(result['domains'])}")
    return cast(Mapping[str, Any], result["domains"][domain])


def _candidates(result: Result, domain: str, split: str) -> str:
    candidates = _domain(result, domain).get(f"{split}_candidates", result["candidates"])
    return str(candidates if isinstance(candidates, str) else candidates[domain])


def _value(result: Result, domain: str, split: str, metric: str) -> float:
    measured = _domain(result, domain).get(split, {})
    if metric not in measured:
        told = ", ".join(measured) or "none"
        raise CrossfedError(f"{_where(result)} has no {split} {metric} for {domain}; it has {told}")
    return float(measured[metric])


def _where(result: Result) -> str:
    return f"the result of {result['method']} seed {result['seed']}"


def _plain(text: str) -> str:
    """Text that cannot break a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
