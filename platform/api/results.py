"""Runs, studies and comparisons as Python objects whose tables are pandas data frames."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from crossfed.platform.checkpoint import read_json
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.runs import find_run, stored_config
from crossfed.platform.layout import CONFIG, RESULT

if TYPE_CHECKING:
    import optuna

    from crossfed.platform.config.settings import RunConfig
    from crossfed.platform.report.comparison import Compared

_SPLITS = ("validation", "test")


class Run:
    """A run, by its directory.

    Args:
        path: the run's directory; of an unfinished run only `config` and `history` can be read.

    Raises:
        CrossfedError: the directory holds no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        if not (self.path / CONFIG).is_file():
            raise CrossfedError(f"{self.path} holds no run: there is no {CONFIG}.")

    def __repr__(self) -> str:
        state = "" if self.finished else ", not finished"
        return f"<Run {self.id}: {self.config.method}, seed {self.config.seed}{state}>"

    def _repr_html_(self) -> str:
        about = html.escape(repr(self).strip("<>"))
        if not self.finished:
            return f"<p>{about}</p>"
        table = self.metrics.pivot_table(
            index=["domain", "split"], columns="metric", values="value", sort=False
        )
        return (
            f"<p>{about}; "
            f"{html.escape(self.protocol)}</p>{table.to_html(float_format='{:.4f}'.format)}"
        )

    @property
    def id(self) -> str:
        """The name of its directory."""
        return self.path.name

    @cached_property
    def config(self) -> RunConfig:
        """The effective configuration, as `config.yaml` holds it."""
        return stored_config(self.path)

    @property
    def finished(self) -> bool:
        """Whether it has a result."""
        return (self.path / RESULT).is_file()

    @cached_property
    def result(self) -> dict[str, Any]:
        """What `result.json` holds.

        Raises:
            CrossfedError: the run has not finished, or the file is damaged.
        """
        if not self.finished:
            raise CrossfedError(
                f"{self.path} has not finished; crossfed run --resume {self.path} goes on with it."
            )
        return read_json(self.path / RESULT)

    @property
    def protocol(self) -> str:
        """Split and candidate set, by id."""
        return str(self.result["protocol"])

    @property
    def metrics(self) -> pd.DataFrame:
        """The selected state's metrics, a row each: domain, split (validation or test), metric,
        value.
        """
        rows = [
            (domain, split, metric, value)
            for domain, row in self.result["domains"].items()
            for split in _SPLITS
            for metric, value in row.get(split, {}).items()
        ]
        return pd.DataFrame(rows, columns=["domain", "split", "metric", "value"])

    @property
    def history(self) -> pd.DataFrame:
        """The committed rounds, one row each: stage, round, step, seconds, bytes, then a column per
        metric.
        """
        from crossfed.platform.federation.privacy import read_lines
        from crossfed.platform.layout import HISTORY

        path = self.path / HISTORY
        rows = read_lines(path) if path.is_file() else []
        return pd.DataFrame([_flat(row) for row in rows])

    def per_user(self, domain: str | None = None) -> pd.DataFrame:
        """Test values of every user.

        Args:
            domain: one domain; all by default.

        Returns:
            domain, user (an opaque row number), n_train, n_truth (held-out items), then a column
            per metric.

        Raises:
            CrossfedError: there is no such domain, or the run did not read the test split.
        """
        names = [domain] if domain is not None else list(self.result["domains"])
        tables = []
        for name in names:
            file = self.path / "per_user" / f"{name}.test.parquet"
            if not file.is_file():
                raise CrossfedError(
                    f"{self.path} holds no per-user test values of domain {name!r}."
                )
            table = pd.read_parquet(file)
            table.insert(0, "domain", name)
            tables.append(table)
        return pd.concat(tables, ignore_index=True)

    def ledger(self) -> pd.DataFrame:
        """Every array that crossed: stage, round, sender, receiver, direction, key, shape, dtype,
        bytes.
        """
        file = self.path / "ledger.parquet"
        if not file.is_file():
            raise CrossfedError(f"{self.path} holds no ledger.parquet: the run has not finished.")
        return pd.read_parquet(file)

    def recommend(self, domain: str, users: Sequence[str] | str, k: int = 10) -> pd.DataFrame:
        """What the model of one domain recommends.

        Args:
            domain: the domain.
            users: ids as in the source; an unknown user gets what ranks high for most.
            k: how many items for each.

        Returns:
            user, known, rank (from 1), item, score.

        Raises:
            CrossfedError: the run has not finished, has no such domain, or k is below 1.
        """
        from crossfed.platform.serving.model import DomainModel

        asked = [users] if isinstance(users, str) else [str(user) for user in users]
        answers = DomainModel(self.path, domain).recommend(asked, [k] * len(asked))
        rows = [
            (answer.user, answer.known, rank, item, score)
            for answer in answers
            for rank, (item, score) in enumerate(zip(answer.items, answer.scores, strict=True), 1)
        ]
        return pd.DataFrame(rows, columns=["user", "known", "rank", "item", "score"])


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the history with its metrics as columns of their own."""
    return {
        **{key: value for key, value in row.items() if key != "metrics"},
        **row.get("metrics", {}),
    }


class Study:
    """A search, by its folder.

    Args:
        path: the study's folder.

    Raises:
        CrossfedError: the folder holds no study, or its files cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        from crossfed.tuning.study import Study as Kept

        self.path = Path(path).absolute()
        self._kept = Kept.open(self.path)

    def __repr__(self) -> str:
        return f"<Study {self.name}: {self._kept.base.method}, {len(self.trials)} trials>"

    def _repr_html_(self) -> str:
        about = html.escape(repr(self).strip("<>"))
        return f"<p>{about}</p>{self.trials.to_html(index=False, float_format='{:.4f}'.format)}"

    @property
    def name(self) -> str:
        """The study's name."""
        return self._kept.search.name

    @property
    def optuna(self) -> optuna.Study:
        """The Optuna study behind it, for Optuna's own analyses and plots."""
        return self._kept.optuna

    @property
    def trials(self) -> pd.DataFrame:
        """One row per trial: number, state, a column per objective, the searched settings."""
        names = list(self.optuna.user_attrs.get("objectives", self._kept.search.objectives))
        rows = []
        for trial in self.optuna.get_trials(deepcopy=False):
            values = list(trial.values or [None] * len(names))
            told = {"number": trial.number, "state": trial.state.name.lower()}
            rows.append(told | dict(zip(names, values, strict=False)) | dict(trial.params))
        return pd.DataFrame(rows)

    @property
    def best(self) -> dict[str, Any]:
        """The winner's settings; empty where no trial has finished."""
        found = self._kept.best()
        return {} if found is None else dict(found.params)

    @property
    def runs(self) -> list[Run]:
        """The winner's final runs, one per seed.

        Raises:
            CrossfedError: the study has none.
        """
        from crossfed.platform.report.finished import final_runs

        return [Run(path) for path in final_runs(self.path)]


@dataclass(frozen=True)
class Comparison:
    """Finished runs side by side; see `compare`."""

    _made: Compared

    def __repr__(self) -> str:
        return self.markdown()

    def _repr_html_(self) -> str:
        from crossfed.platform.report.page import fragment

        return fragment((self._made.table, *self._made.tests))

    @property
    def table(self) -> pd.DataFrame:
        """The numbers behind the table, unrounded."""
        return pd.DataFrame([dict(row) for row in self._made.table.records])

    @property
    def tests(self) -> pd.DataFrame:
        """The tests of the differences, over users and over seeds."""
        return pd.DataFrame([dict(row) for grid in self._made.tests for row in grid.records])

    def markdown(self) -> str:
        """The table and its tests as Markdown."""
        return "\n".join(grid.markdown() for grid in (self._made.table, *self._made.tests))

    def latex(self) -> str:
        """The table and its tests as LaTeX (booktabs)."""
        return "\n".join(grid.latex() for grid in (self._made.table, *self._made.tests))


def compare(
    runs: Sequence[Run | Study | str | Path],
    *,
    metrics: Sequence[str] = (),
    against: Sequence[str] = (),
    domains: Sequence[str] | None = None,
    split: str = "test",
    out: str | Path = "runs",
    tracking_uri: str | None = None,
) -> Comparison:
    """Put finished runs into one table, as `crossfed compare` does.

    Args:
        runs: runs, studies (their final runs), directories, ids below `out`, or `mlflow:FILTER`.
        metrics: the metrics of the table; by default the one that selects, and NDCG beside it.
        against: rows or methods that count as baselines; by default methods that exchange nothing.
        domains: which, all by default.
        split: `test` or `validation`; only the test split is tested.
        out: the folder that ids are looked up in.
        tracking_uri: the MLflow store that filters are searched in.

    Raises:
        CrossfedError: the runs do not compare, or lack something that is asked for.
    """
    from crossfed.platform.report.comparison import comparison
    from crossfed.platform.report.finished import gather

    if split not in _SPLITS:
        raise CrossfedError(f"split = {split!r} is not possible: it is test or validation.")
    names = [str(one.path) if isinstance(one, Run | Study) else str(one) for one in _each(runs)]
    with gather(names, Path(out), tracking_uri) as found:
        made = comparison(found, metrics, split, against, domains)  # type: ignore[arg-type]
    return Comparison(made)


def _each(
    runs: Sequence[Run | Study | str | Path] | Run | Study | str | Path,
) -> Iterator[Run | Study | str | Path]:
    """The runs, also where one is given alone."""
    if isinstance(runs, Run | Study | str | Path):
        yield runs
    else:
        yield from runs


def load(name: str | Path, *, out: str | Path = "runs") -> Run | Study:
    """A run or a study that is there already.

    Args:
        name: its directory, or its name below `out`.
        out: the folder of run directories.

    Raises:
        CrossfedError: there is neither.
    """
    from crossfed.platform.report.finished import study_folder

    folder = study_folder(str(name), Path(out))
    return Study(folder) if folder is not None else Run(find_run(str(name), Path(out)))
