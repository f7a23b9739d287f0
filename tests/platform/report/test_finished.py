"""Where runs come from, what their rows are called, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossfed.platform.config.settings import TrackingSettings
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report.finished import check_comparable, gather, load_runs, relabelled
from crossfed.platform.tracking.tracker import Tracker
from made_runs import make_run, users


def values(mean: float = 0.3, seed: int = 0) -> dict[str, Any]:
    return {
        name: {"recall_at_20": users(seed, mean), "ndcg_at_20": users(seed, mean / 2)}
        for name in ("books", "toys")
    }


def names(out: Path, *wanted: str, uri: str | None = None) -> list[tuple[str, int]]:
    with gather(wanted, out, uri) as runs:
        return [(run.label, run.result["seed"]) for run in runs]


def test_rows_are_methods_and_the_settings_that_differ(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / "a", "lightgcn", 1, values()),
        make_run(tmp_path / "b", "fedcrf", 1, values(), sets=("K=30",)),
        make_run(tmp_path / "c", "fedcrf", 1, values(), sets=("K=40", "text.encoder=hashing:64")),
        make_run(
            tmp_path / "d",
            "fedcrf",
            2,
            values(),
            sets=("K=30", "resources.threads=2", "evaluation.audit=true"),
        ),
    ]
    b, c = "fedcrf (K=30, text.encoder=minilm)", "fedcrf (K=40, text.encoder=hashing:64)"
    assert [run.label for run in load_runs(paths)] == ["lightgcn", b, c, b]
    assert [run.label for run in load_runs(paths[:2])] == ["lightgcn", "fedcrf"]


def test_a_row_tells_what_makes_its_numbers_mean_something_else(tmp_path: Path) -> None:
    """A share of the data, and a control, also where all rows of a method have it, or all rows at
    all.
    """
    paths = [
        make_run(tmp_path / "a", "lightgcn", 1, values(), sets=("evaluation.train_share=0.4",)),
        make_run(
            tmp_path / "b", "lightgcn", 2, values(), sets=("evaluation.train_share=0.4", "layers=4")
        ),
        make_run(tmp_path / "c", "fedcrf", 1, values(), sets=("control=noise",)),
    ]
    labels = [
        "lightgcn (layers=2, evaluation.train_share=0.4)",
        "lightgcn (layers=4, evaluation.train_share=0.4)",
    ]
    assert [run.label for run in load_runs(paths)] == [*labels, "fedcrf (control=noise)"]
    assert [run.label for run in load_runs(paths[:1])] == ["lightgcn (evaluation.train_share=0.4)"]
    assert [run.label for run in relabelled(load_runs(paths[:1]), "evaluation.train_share")] == [
        "lightgcn"
    ]


def test_a_setting_that_came_later_has_its_default(tmp_path: Path) -> None:
    """A run written before a key existed is the same configuration as one written after it, with
    the default.
    """
    old, new = (make_run(tmp_path / str(seed), "fedcrf", seed, values()) for seed in (1, 2))
    result = json.loads((old / "result.json").read_text())
    del result["config"]["warm_start"]
    (old / "result.json").write_text(json.dumps(result))
    text = (old / "config.yaml").read_text().replace("  missing: zero\n", "")
    (old / "config.yaml").write_text(text)
    assert {run.label for run in load_runs([old, new])} == {"fedcrf"}


def test_a_run_named_twice_counts_once(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "lightgcn", 1, values())
    assert names(tmp_path, "a", str(tmp_path / "a")) == [("lightgcn", 1)]


def test_the_same_configuration_and_seed_twice_is_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, "lightgcn", 1, values())
    with pytest.raises(
        CrossfedError, match="a and b are both lightgcn with seed 1, the same configuration"
    ):
        names(tmp_path, "a", "b")


def test_pooled_training_is_marked_not_private(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "lightgcn", 1, values())
    make_run(tmp_path / "b", "lightgcn", 1, values(), sets=("layers=3",), scope="pooled")
    assert [label for label, _ in names(tmp_path, "a", "b")] == [
        "lightgcn (layers=2)",
        "lightgcn (layers=3) (not private)",
    ]


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, "lightgcn", 1, values())
    (tmp_path / "b" / "result.json").unlink()
    with pytest.raises(
        CrossfedError,
        match=r"b has not finished: there is no result\.json; "
        r"crossfed run --resume",
    ):
        names(tmp_path, "a", "b")
    with pytest.raises(CrossfedError, match="There is no run 'nothing'"):
        names(tmp_path, "a", "nothing")


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"method": "lightgcn"}'])
def test_a_damaged_result_is_one_sentence(tmp_path: Path, text: str) -> None:
    make_run(tmp_path / "a", "lightgcn", 1, values())
    (tmp_path / "a" / "result.json").write_text(text)
    with pytest.raises(CrossfedError, match=r"result.json is (missing or )?damaged") as error:
        names(tmp_path, "a")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "what", "both"),
    [
        ({"split_seed": 7}, "split seed", ("42 (a)", "7 (b)")),
        ({"protocol": "leave-one-out"}, "protocol", ("ratio-80-10-10 (a)", "leave-one-out (b)")),
        ({"data_fingerprint": "cd34" * 16}, "data", ("ab12ab12ab12 (a)", "cd34cd34cd34 (b)")),
        (
            {"candidates": {"books": "full:100", "toys": "sampled-99:5d"}},
            "candidates of toys",
            ("full:100 (a)", "sampled-99:5d (b)"),
        ),
    ],
)
def test_what_is_not_comparable_is_not_mixed(
    tmp_path: Path, changes: dict[str, Any], what: str, both: tuple[str, str]
) -> None:
    runs = load_runs(
        [
            make_run(tmp_path / "a", "lightgcn", 1, values()),
            make_run(tmp_path / "b", "fedcrf", 1, values(), **changes),
        ]
    )
    with pytest.raises(CrossfedError) as error:
        check_comparable(runs)
    told = str(error.value)
    assert f"differ in {what}: " in told and all(value in told for value in both)


def test_other_domains_are_not_mixed(tmp_path: Path) -> None:
    fewer = {"books": values()["books"]}
    runs = load_runs(
        [
            make_run(tmp_path / "a", "lightgcn", 1, values()),
            make_run(tmp_path / "b", "fedcrf", 1, fewer),
        ]
    )
    with pytest.raises(
        CrossfedError,
        match=r"differ in domains: books, toys \(a\) against "
        r"books \(b\)\.$",
    ):
        check_comparable(runs)


def test_candidates_are_those_of_the_split(tmp_path: Path) -> None:
    """Validation and test users have candidates of their own; those of the other split do not
    matter.
    """
    one, two = (
        make_run(tmp_path / "a", "lightgcn", 1, values()),
        make_run(tmp_path / "b", "fedcrf", 1, values()),
    )
    result = json.loads((two / "result.json").read_text())
    result["domains"]["toys"]["validation_candidates"] = "sampled-99:5d"
    (two / "result.json").write_text(json.dumps(result))
    runs = load_runs([one, two])
    check_comparable(runs, "test")
    with pytest.raises(CrossfedError, match="differ in candidates of toys"):
        check_comparable(runs, "validation")


def test_a_run_that_never_read_the_test_split_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "lightgcn", 1, values())
    result = json.loads((run / "result.json").read_text())
    del result["domains"]["toys"]["test"]
    (run / "result.json").write_text(json.dumps(result))
    check_comparable(load_runs([run]), "validation")
    with pytest.raises(CrossfedError, match="a has no test metrics for toys"):
        check_comparable(load_runs([run]))


# -- studies ---------------------------------------------------------------------------------------


def study(folder: Path, seeds: int, method: str = "fedcrf", **sets: Any) -> Path:
    from crossfed.tuning.scheduler import final_name

    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text(f"search: {{name: {folder.name}, seeds: {seeds}}}\n")
    for seed in range(seeds):
        make_run(
            folder / final_name(seed),
            method,
            seed,
            values(),
            sets=tuple(f"{k}={v}" for k, v in sets.items()),
        )
    make_run(folder / "trial-0000", method, 0, values())
    make_run(folder / f"{final_name(0)}-of-trial-1", method, 0, values())
    return folder


def test_a_study_stands_for_its_final_runs(tmp_path: Path) -> None:
    study(tmp_path / "care", 2, K=30)
    assert names(tmp_path, "care") == [("fedcrf", 0), ("fedcrf", 1)]
    study(tmp_path / "beauty", 1, K=40, alpha=0.3)
    assert set(names(tmp_path, "care", "beauty")) == {
        ("fedcrf (study care)", 0), ("fedcrf (study care)", 1), ("fedcrf (study beauty)", 0)
    }  # fmt: skip


def test_an_unfinished_study_is_refused(tmp_path: Path) -> None:
    folder = study(tmp_path / "care", 2)
    (folder / "final-seed-1" / "result.json").unlink()
    with pytest.raises(
        CrossfedError,
        match="care has not finished: 1 of its 2 final runs are there; crossfed tune resume",
    ):
        names(tmp_path, "care")


# -- MLflow ----------------------------------------------------------------------------------------


def track(run: Path, artifacts: bool = True, status: str | None = "FINISHED", **tags: str) -> None:
    """Record a made run as `run_recorded` does."""
    result = json.loads((run / "result.json").read_text())
    settings = TrackingSettings(system_metrics=False)
    tracker = Tracker.start(settings, run, run.name, {}, {"method": result["method"], **tags}, [])
    for file in ("config.yaml", "result.json", "history.jsonl") if artifacts else ():
        tracker.artifact(run / file)
    tracker.artifact(run / "per_user", "per_user")
    if status:
        tracker.finish(status)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tracked")
    track(make_run(out / "a", "lightgcn", 1, values(0.2)), data="shops")
    track(make_run(out / "b", "fedcrf", 1, values(0.3)), data="shops", study="care", role="final")
    track(make_run(out / "c", "fedcrf", 2, values(0.3)), data="shops", study="care", role="final")
    track(
        make_run(out / "parent", "fedcrf", 2, values(0.3)), data="shops", study="care", role="study"
    )
    track(make_run(out / "bare", "sasrec", 1, values(0.2)), artifacts=False, data="bare")
    track(make_run(out / "open", "sasrec", 2, values(0.2)), status=None, data="open")
    return out


def test_a_filter_finds_runs_and_copies_what_a_comparison_needs(
    tracked: Path, tmp_path: Path
) -> None:
    uri = f"sqlite:///{tracked / 'mlflow.db'}"
    with gather(["mlflow:tags.data = 'shops'"], tmp_path, uri) as runs:
        assert {(run.label, run.result["seed"], run.study) for run in runs} == {
            ("lightgcn", 1, ""), ("fedcrf", 1, "care"), ("fedcrf", 2, "care")
        }  # fmt: skip
        assert all((run.path / "per_user" / "books.test.parquet").is_file() for run in runs)
        assert all(tracked not in run.path.parents for run in runs)
        copies = [run.path for run in runs]
    assert not any(path.exists() for path in copies)


def test_a_directory_and_its_record_are_one_run(tracked: Path) -> None:
    assert len(names(tracked, "b", "mlflow:tags.data = 'shops' and tags.method = 'fedcrf'")) == 2


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("tags.data = 'open'", r"open \(running\) did not finish"),
        ("tags.data = 'bare'", "bare left no result.json"),
        ("tags.data = 'nothing'", "No run in sqlite.* fits the filter"),
        ("tags.data == 'x", "gives no answer: "),
    ],
)
def test_what_a_filter_cannot_give_is_told(tracked: Path, query: str, told: str) -> None:
    with pytest.raises(CrossfedError, match=told):
        names(tracked, f"mlflow:{query}")


def test_a_store_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CrossfedError, match="There is no tracking database"):
        names(tmp_path, "mlflow:")
    assert not list(tmp_path.iterdir())
