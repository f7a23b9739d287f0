"""Where finished runs come from: run directories, the final runs of a study, what a filter finds in
an MLflow store.

All three give the same thing, a directory with `result.json` and what lies beside it. Runs found in
MLflow are copied from its artifacts, so that a comparison needs no access to the machine that ran
them.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from crossfed.platform import uris
from crossfed.platform.checkpoint import read_json
from crossfed.platform.config.settings import RunConfig, TrackingSettings
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.runs import find_run
from crossfed.platform.layout import CONFIG, RESULT, RUN_ID
from crossfed.platform.registry import find_method
from crossfed.platform.tracking import tracker
from crossfed.platform.yaml_text import load_yaml

Split = Literal["validation", "test"]

QUERY = "mlflow:"
"""A source that begins so is a filter in MLflow's search syntax, e.g. "mlflow:tags.data =
'beauty-office'".
"""
STUDY = "study.yaml"
FINAL = "final-seed-*[0-9]"
"""The folders of a study's final runs; those of a former winner are named
`final-seed-N-of-trial-M`.
"""

_COPIED = ("result.json", "config.yaml", "history.jsonl", "ledger.parquet", "per_user")
_NEEDED = (
    "run_id",
    "method",
    "seed",
    "data",
    "data_fingerprint",
    "protocol",
    "candidates",
    "config",
    "domains",
)

# What of a run's configuration does not tell one row of a table from another: what stands in the
# result itself, seeds, and how
# a run is executed, recorded and measured.
_APART = frozenset(
    {
        "method",
        "config",
        "preset",
        "data",
        "domains",
        "synthetic",
        "seed",
        "out",
        "tracking",
        "resources",
    }
)
_EXECUTION = frozenset(
    {
        "backend",
        "checkpoint_every",
        "evaluation.protocol",
        "evaluation.split_seed",
        "evaluation.ks",
        "evaluation.metrics",
        "evaluation.audit",
        "privacy.noise_seed",
        "privacy.delta",
        "evaluated.run",
    }
)


_TOLD = {"control": "none", "evaluation.train_share": 1.0}
"""Settings that a row's name tells wherever they are not these."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished run.

    Attributes:
        path: its directory, or the copy of its artifacts.
        result: what `result.json` holds.
        settings: all that tells it from other runs but the seed: the method's values, and dotted
            keys of the run such as `text.encoder`. Values that came later than the run have their
            defaults.
        label: its row in a table: the method and whatever settings differ among the runs of this
            method.
        origin: where it was found, for messages.
        study: the study that it is a final run of; empty for others.
    """

    path: Path
    result: dict[str, Any]
    settings: dict[str, Any]
    label: str
    origin: str
    study: str = ""

    @property
    def pooled(self) -> bool:
        """Whether it saw the domains' interactions together, which no federation may."""
        return bool(self.result.get("scope") == "pooled")


@contextlib.contextmanager
def gather(names: Sequence[str], out: Path, uri: str | None = None) -> Iterator[list[Finished]]:
    """Finished runs by name, each once, in the order given.

    Args:
        names: a run's directory or its id below `out`, a study's folder or its name below `out`
            (its final runs), a folder of run directories (those that have finished), or `mlflow:`
            and a filter.
        uri: the store that filters are searched in; by default the one beside the runs in `out`.

    Raises:
        CrossfedError: a name means nothing, a run or study has not finished, a result is damaged,
            or two runs are the same configuration with the same seed.
    """
    with tempfile.TemporaryDirectory(prefix="crossfed-runs-") as copies:
        found: list[tuple[Path, str, str]] = []  # directory, origin, study
        for name in names:
            if name.startswith(QUERY):
                found += search(name.removeprefix(QUERY), out, uri, Path(copies))
            elif (study := study_folder(name, out)) is not None:
                found += [
                    (path, f"{study.name}/{path.name}", study.name) for path in final_runs(study)
                ]
            elif folder := runs_in(name, out):
                found += [(path, path.name, "") for path in folder]
            else:
                path = find_run(name, out)
                found.append((path, path.name, ""))
        yield load(found)


_SAME = ("method", "config_hash", "seed", "data_fingerprint", "protocol")
"""What two runs agree in that are the same run made twice."""


def runs_in(name: str, out: Path) -> list[Path]:
    """The finished runs in a folder of runs given by path or by its name below `out`; none where it
    is no such folder.

    Of runs of one configuration with one seed on the same data it is the latest.

    Raises:
        CrossfedError: it holds runs, but none that has finished.
    """
    for folder in (Path(name), out / name):
        if folder.is_dir() and not (folder / CONFIG).is_file():
            runs = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
            finished = [path for path in runs if (path / RESULT).is_file()]
            if runs and not finished:
                raise CrossfedError(f"None of the {len(runs)} runs in {folder} has finished.")
            latest: dict[tuple[Any, ...], Path] = {}
            for path in sorted(finished, key=lambda path: (path / RESULT).stat().st_mtime):
                result = read_result(path / RESULT)
                latest[tuple(result.get(key) for key in _SAME)] = path
            if runs:
                return sorted(latest.values())
    return []


def load_runs(paths: Sequence[Path]) -> list[Finished]:
    """Finished runs by directory.

    Raises:
        CrossfedError: as `gather`.
    """
    return load([(path, path.name, "") for path in paths])


def load(found: Sequence[tuple[Path, str, str]]) -> list[Finished]:
    """Read runs, each once, and name their rows.

    Args:
        found: directory, name for messages, and study (or nothing) of every run.

    Raises:
        CrossfedError: as `gather`.
    """
    if unfinished := [str(path) for path, _, _ in found if not (path / RESULT).is_file()]:
        raise CrossfedError(
            f"{', '.join(unfinished)} {'has' if len(unfinished) == 1 else 'have'} not "
            f"finished: there is no {RESULT}; "
            f"crossfed run --resume {unfinished[0]} goes on with it."
        )
    once: dict[str, tuple[Path, str, str]] = {}
    for path, origin, study in found:
        once.setdefault(_identity(path), (path, origin, study))
    kept = list(once.values())
    results = {path: read_result(path / RESULT) for path, _, _ in kept}
    settings = {path: settings_of(path, results[path]) for path, _, _ in kept}
    labels = _labels([(results[path], settings[path], study) for path, _, study in kept])
    runs = [
        Finished(path, results[path], settings[path], label, origin, study)
        for (path, origin, study), label in zip(kept, labels, strict=True)
    ]
    seen: dict[tuple[str, int], Finished] = {}
    for run in runs:
        other = seen.setdefault((run.label, run.result["seed"]), run)
        if other is not run:
            raise CrossfedError(
                f"{other.origin} and {run.origin} are both {run.label} with seed "
                f"{run.result['seed']}, the same configuration; "
                "name one of them."
            )
    return runs


def _identity(path: Path) -> str:
    """The same for a run's directory and for the copy of its artifacts."""
    known = path / RUN_ID
    return known.read_text(encoding="utf-8").strip() if known.is_file() else str(path.resolve())


def relabelled(runs: Sequence[Finished], key: str) -> list[Finished]:
    """The same runs, one setting disregarded in their rows' names: runs along which that setting
    varies share a row.
    """
    told = [{name: value for name, value in run.settings.items() if name != key} for run in runs]
    labels = _labels([(run.result, settings, "") for run, settings in zip(runs, told, strict=True)])
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def read_result(path: Path) -> dict[str, Any]:
    """A run's `result.json`.

    Raises:
        CrossfedError: it is damaged, or not what a run writes.
    """
    result = read_json(path)
    if not isinstance(result, dict):
        raise CrossfedError(f"{path} is damaged: it holds no JSON object; restore it or run again.")
    if missing := [key for key in _NEEDED if key not in result]:
        raise CrossfedError(f"{path} is damaged: it lacks {missing[0]!r}; restore it or run again.")
    return result


def settings_of(path: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """All that tells a run from others but its seed, see `Finished`."""
    told = dict(result["config"])
    # a method that is not installed here: what the run wrote must do
    with contextlib.suppress(CrossfedError):
        fields = find_method(result.get("method_from", result["method"])).Config.model_fields
        told = {
            name: field.default for name, field in fields.items() if not field.is_required()
        } | told
    file = path / "config.yaml"
    try:
        stored = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise CrossfedError(
            f"{file} is missing or damaged ({error}); restore it or run again."
        ) from error
    run = _flat(
        RunConfig(method=result.get("method_from", result["method"])).model_dump(mode="json")
    ) | _flat(stored)
    return told | {key: value for key, value in run.items() if key not in _EXECUTION}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys -> values."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if not prefix and key in _APART:
            continue
        found |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return found


def _labels(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any], str]]) -> list[str]:
    """The method of each run, what tells it from the other runs of that method (its study, else the
    settings), and always what makes its numbers mean something else."""
    labels = []
    for result, settings, study in runs:
        same = [(other, its) for told, other, its in runs if told["method"] == result["method"]]
        differing = [
            key
            for key, value in settings.items()
            if any(other.get(key) != value for other, _ in same)
        ]
        told = ", ".join(f"{key}={settings[key]}" for key in differing)
        if study and sum(its == study for _, its in same) == sum(
            other == settings for other, _ in same
        ):
            told = f"study {study}" if differing else ""
        shown = [] if told.startswith("study ") else differing
        apart = {key: settings.get(key, usual) for key, usual in _TOLD.items() if key not in shown}
        told = ", ".join(
            [
                *filter(None, [told]),
                *(f"{key}={value}" for key, value in apart.items() if value != _TOLD[key]),
            ]
        )
        label = f"{result['method']} ({told})" if told else str(result["method"])
        labels.append(f"{label} (not private)" if result.get("scope") == "pooled" else label)
    return labels


def check_comparable(runs: Sequence[Finished], split: Split = "test") -> None:
    """Refuse to put numbers into one table that do not compare.

    Raises:
        CrossfedError: runs differ in data, domains, protocol, seed of the split or candidate sets,
            or one was not measured on the split; names what differs and which runs.
    """
    if not runs:
        raise CrossfedError("No runs to compare.")
    aspects: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        result = run.result
        if missing := [name for name, row in result["domains"].items() if not row.get(split)]:
            raise CrossfedError(
                f"{run.origin} has no {split} metrics for {', '.join(missing)}; runs of a "
                f"search never read the test split: "
                "compare its study, or give --split validation."
            )
        told = {
            "data": f"{result['data']['name']} {result['data_fingerprint'][:12]}",
            "domains": ", ".join(sorted(result["domains"])),
            "protocol": result["protocol"],
            "split seed": str(result.get("split_seed", "unknown")),
        }
        told |= {
            f"candidates of {name}": candidates(result, name, split) for name in result["domains"]
        }
        for aspect, value in told.items():
            aspects.setdefault(aspect, {}).setdefault(value, []).append(run.origin)
    differing = {aspect: values for aspect, values in aspects.items() if len(values) > 1}
    if "domains" in differing:  # a domain that only some runs have is told once
        differing = {
            aspect: values
            for aspect, values in differing.items()
            if not aspect.startswith("candidates")
        }
    if differing:
        told_apart = "; ".join(
            f"{aspect}: {' against '.join(f'{value} ({_some(origins)})' for value, origins in values.items())}"  # noqa: E501
            for aspect, values in differing.items()
        )
        raise CrossfedError(f"These runs do not belong in one table, they differ in {told_apart}.")


def _some(names: Sequence[str]) -> str:
    """A few names, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def candidates(result: Mapping[str, Any], domain: str, split: str) -> str:
    """The candidate set that a domain's metrics of a split were measured on."""
    told = result["candidates"]
    general = told if isinstance(told, str) else told.get(domain)
    return str(result["domains"][domain].get(f"{split}_candidates", general))


# -- studies ---------------------------------------------------------------------------------------


def study_folder(name: str, out: Path) -> Path | None:
    """The folder of a study given by path or by its name below `out`."""
    return next((path for path in (Path(name), out / name) if (path / STUDY).is_file()), None)


def final_runs(study: Path) -> list[Path]:
    """The directories of a study's final runs: its winner in full, one per seed.

    Raises:
        CrossfedError: not all of them were run.
    """
    wanted = load_yaml((study / STUDY).read_text(encoding="utf-8"))["search"]["seeds"]
    found = sorted(path for path in study.glob(FINAL) if "-of-trial-" not in path.name)
    if not wanted:
        raise CrossfedError(
            f"The study {study.name} was made without final runs (--seeds 0), "
            f"which hold test metrics."
        )
    if sum((path / RESULT).is_file() for path in found) < wanted:
        raise CrossfedError(
            f"The study {study.name} has not finished: "
            f"{sum((path / RESULT).is_file() for path in found)} of its {wanted} final "
            f"runs are there; crossfed tune resume {study.name} goes on with it."
        )
    return found


# -- MLflow ----------------------------------------------------------------------------------------


def search(query: str, out: Path, uri: str | None, copies: Path) -> list[tuple[Path, str, str]]:
    """Copy what a filter finds in an MLflow store.

    Args:
        query: in MLflow's search syntax; empty for all runs. Studies themselves are passed over,
            their runs are not.
        copies: the folder to copy into.

    Returns:
        Directory, name and study of every run, newest first.

    Raises:
        CrossfedError: the store is away, the filter is not understood or finds nothing, or a run
            has not finished or left no result there.
    """
    store = tracker.resolve_uri(TrackingSettings(uri=uri), out)
    found = []
    with tracker.reading(store) as client:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = []
        token = None
        while True:
            page = client.search_runs(experiments, query, max_results=1000, page_token=token)
            runs += [
                run
                for run in page
                if "method" in run.data.tags and run.data.tags.get("role") != "study"
            ]
            token = page.token
            if not token:
                break
        if not runs:
            raise CrossfedError(f"No run in {uris.redact(store)} fits the filter {query!r}.")
        if open_ := [
            f"{run.info.run_name} ({run.info.status.lower()})"
            for run in runs
            if run.info.status != "FINISHED"
        ]:
            raise CrossfedError(
                f"{_some(open_)} did not finish; add \"attributes.status = 'FINISHED'\" to the "
                f"filter, or resume what stopped."
            )
        for run in runs:
            folder = copies / run.info.run_id
            folder.mkdir()
            (folder / RUN_ID).write_text(run.info.run_id, encoding="utf-8")
            there = {entry.path for entry in client.list_artifacts(run.info.run_id)}
            if RESULT not in there:
                raise CrossfedError(
                    f"{run.info.run_name} left no {RESULT} in {uris.redact(store)}: it ran "
                    f"with tracking.artifacts=false, or "
                    "what it recorded still waits on its disk (crossfed replay)."
                )
            for name in there.intersection(_COPIED):
                client.download_artifacts(run.info.run_id, name, str(folder))
            tags = run.data.tags
            found.append(
                (folder, run.info.run_name, tags["study"] if tags.get("role") == "final" else "")
            )
    return found
