"""`crossfed.run` and `crossfed.tune` do what the command line does."""

from __future__ import annotations

from pathlib import Path

import pytest

import crossfed
from crossfed.launch import configure
from crossfed.platform.config.settings import build

QUICK = {"dim": 8, "epochs": 2, "batch_size": 64}
QUIET = {"tracking.enabled": False}


def test_keywords_make_the_same_configuration_as_options(shops: Path, tmp_path: Path) -> None:
    by_name = configure(
        "lightgcn",
        data=shops,
        seed=3,
        out=tmp_path,
        config={"dim": 8},
        settings={"evaluation.every": 2},
    )
    by_option = build(
        "lightgcn",
        sets=["dim=8", "evaluation.every=2"],
        values={"data": shops, "seed": 3, "out": str(tmp_path)},
    )
    assert by_name == by_option and by_name.hash() == by_option.hash()


def test_a_run_comes_back_with_test_metrics(shops: Path, tmp_path: Path) -> None:
    run = crossfed.run(
        "lightgcn",
        data=shops,
        out=tmp_path,
        backend="inprocess",
        progress="quiet",
        settings=QUIET,
        **QUICK,
    )
    assert set(run.metrics["split"]) == {"validation", "test"}
    assert set(run.metrics["domain"]) == {"books", "films", "games"}


def test_without_test_the_test_split_stays_unread(shops: Path, tmp_path: Path) -> None:
    run = crossfed.run(
        "lightgcn",
        data=shops,
        out=tmp_path,
        backend="inprocess",
        progress="quiet",
        settings=QUIET,
        test=False,
        **QUICK,
    )
    assert set(run.metrics["split"]) == {"validation"} and not (run.path / "per_user").exists()


def test_quiet_prints_the_result_only(
    shops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crossfed.run(
        "lightgcn",
        data=shops,
        out=tmp_path,
        backend="inprocess",
        progress="quiet",
        settings=QUIET,
        **QUICK,
    )
    shown = capsys.readouterr().out
    assert "train 1/2" not in shown and "stage" not in shown


def test_a_mistake_is_one_sentence(shops: Path) -> None:
    with pytest.raises(crossfed.CrossfedError, match=r"unknown key 'dimm'.*dim"):
        crossfed.run("lightgcn", data=shops, dimm=8)
    with pytest.raises(crossfed.CrossfedError, match="no preset"):
        crossfed.run("lightgcn", data=shops, preset="nonsense")
    with pytest.raises(crossfed.CrossfedError, match="pruner"):
        crossfed.tune("lightgcn", data=shops, pruner="nonsense")


@pytest.mark.usefixtures("ray_cluster")
def test_a_study_comes_back_with_its_trials_and_runs(shops: Path, tmp_path: Path) -> None:
    study = crossfed.tune(
        "lightgcn",
        data=shops,
        out=tmp_path,
        study="small",
        trials=2,
        search={"lr": [0.001, 0.01], "layers": None, "l2": None, "batch_size": None},
        backend="inprocess",
        pruner="none",
        progress="quiet",
        settings=QUIET,
        **QUICK | {"lr": 0.001},
    )
    assert list(study.trials["state"]) == ["complete", "complete"]
    assert set(study.trials["lr"]) <= {0.001, 0.01} and set(study.best) == {"lr"}
    assert [run.finished for run in study.runs] == [True]
    assert crossfed.load("small", out=tmp_path).name == "small"
