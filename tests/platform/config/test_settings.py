"""One configuration, many sources: precedence, round trip, and one sentence for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from crossfed.platform.config.settings import RunConfig, build, parse_value
from crossfed.platform.errors import CrossfedError
from crossfed.platform.registry import method_file


def test_precedence_is_file_preset_run_file_set(tmp_path: Path) -> None:
    preset = method_file("fedcrf")["presets"]["care-beauty"]
    assert preset["K"] == 70  # the paper's, §4.5
    assert build("fedcrf").config["K"] != 70
    assert build("fedcrf", preset="care-beauty").config["K"] == 70
    file = tmp_path / "run.yaml"
    file.write_text("method: fedcrf\npreset: care-beauty\nconfig: {K: 40}\nseed: 5\n")
    assert (build(str(file)).config["K"], build(str(file)).seed) == (40, 5)
    assert build(str(file)).config["lambda_kd"] == preset["lambda_kd"]
    assert build(str(file), sets=["K=30"], values={"seed": 6}).config["K"] == 30
    assert build(str(file), values={"seed": 6}).seed == 6


def test_what_is_written_back_is_the_whole_run_and_reads_as_itself(tmp_path: Path) -> None:
    config = build(
        "fedcrf",
        sets=["K=33", "evaluation.ks=[5, 20]", "resources.threads=2", "text.encoder=hashing:64"],
    )
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert build(str(file)) == config
    written = yaml.safe_load(file.read_text())
    assert set(written["config"]) == set(config.resolved.Config.model_fields)
    assert set(written) == set(RunConfig.model_fields)


def test_the_hash_covers_what_changes_numbers_and_nothing_else() -> None:
    base = build("fedcrf").hash()
    for same in (
        "seed=3",
        "out=/elsewhere",
        "backend=inprocess",
        "tracking.enabled=false",
        "checkpoint_every=7",
    ):
        assert build("fedcrf", sets=[same]).hash() == base, same
    for other in (
        "K=31",
        "evaluation.split_seed=1",
        "text.encoder=hashing",
        "evaluation.protocol=leave-one-out",
    ):
        assert build("fedcrf", sets=[other]).hash() != base, other


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("3", 3),
        ("true", True),
        ("[5, 10]", [5, 10]),
        ("null", None),
        ("inf", float("inf")),
        ("word", "word"),
    ],
)
def test_values_of_set(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["K=0"], r"K = 0 is not possible: input should be greater than or equal to 1"),
        (["K=many"], r"K = 'many' is not possible: input should be a valid integer"),
        (
            ["kk=3"],
            r"unknown key 'kk'; did you mean K\? Near it: (\w[\w.]*, ){3}\w[\w.]*; `crossfed "
            r"methods fedcrf --all` shows all\.$",
        ),
        (["K"], r"must read key=value"),
        (
            ["resources.gpus=1"],
            r"unknown key 'resources.gpus'; did you mean "
            r"resources.gpus_per_domain\?",
        ),
        (["evaluation.protocol=leave-two-out"], r"leave-two-out.*leave-one-out"),
        (["evaluation.select=recall@7"], r"recall_at_7 is not measured"),
        (["evaluation.metrics=[recal]"], r"recal"),
        (["seed=-1"], r"seed = -1 is not possible"),
        (
            ["backend=spark"],
            r"backend = 'spark' is not possible: input should be 'ray' or "
            r"'inprocess'",
        ),
        (["checkpoint_every=0"], r"checkpoint_every = 0"),
        (["lr=inf"], r"lr = inf is not possible: input should be a finite number"),
        (
            ["resources.start_timeout=.inf"],
            r"resources.start_timeout = inf is not possible: "
            r"input should be a finite",
        ),
        (
            ["resources.threads=100000"],
            r"resources.threads = 100000 is not possible: input "
            r"should be less than",
        ),
        (["data="], r"'data=' must read key=value; the value null stands for none"),
    ],
)
def test_a_mistake_is_one_sentence(sets: list[str], words: str) -> None:
    with pytest.raises(CrossfedError, match=words) as caught:
        build("fedcrf", sets=sets)
    assert "\n" not in str(caught.value)


def test_select_accepts_the_at_sign() -> None:
    assert build("lightgcn", sets=["evaluation.select=ndcg@10"]).evaluation.select == "ndcg_at_10"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("method: fedcrf\nbackedn: ray\n", "unknown key 'backedn'; did you mean backend"),
        ("method: fedcrf\nresources: {cpus: 1}\n", "unknown key 'resources.cpus'"),
        ("method: fedcrf\nconfig: {KK: 1}\n", "fedcrf configuration: unknown key 'KK'"),
        ("seed: 1\n", "method is missing"),
        ("method: fedcrf\nseed: [\n", "line 3: not valid YAML"),
        ("- a\n", "must hold a mapping"),
        ("method: nope\n", "There is no method 'nope'"),
        ("method: fedcrf\npreset: nope\n", "no preset 'nope'"),
        ("method: fedcrf\npreset: [nope]\n", "no preset \\['nope'\\]"),
        ("method: fedcrf\nconfig: [K]\n", "config = \\['K'\\] is not possible"),
        ("method: fedcrf\0", r"not valid YAML: unacceptable character .* position 14\.$"),
    ],
)
def test_a_wrong_run_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(CrossfedError, match=words):
        build(str(file))


def test_setting_a_key_inside_a_plain_value_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("method: fedcrf\nevaluation: 3\n")
    with pytest.raises(
        CrossfedError,
        match=r"evaluation = 3 is not possible: it holds keys "
        r"such as evaluation\.every",
    ):
        build(str(file), sets=["evaluation.every=2"])


@pytest.mark.parametrize("name", [":METHOD", ".relative:METHOD", "./file.py:METHOD"])
def test_what_is_no_module_is_not_imported(name: str) -> None:
    with pytest.raises(CrossfedError, match=r"is not a module as in package\.module:METHOD"):
        build(name)


def test_a_missing_run_file_is_named() -> None:
    with pytest.raises(CrossfedError, match=r"There is no run file nowhere\.yaml"):
        build("nowhere.yaml")


def test_a_password_in_the_tracking_uri_is_refused_without_being_repeated() -> None:
    with pytest.raises(CrossfedError, match="MLFLOW_TRACKING_URI") as caught:
        build("lightgcn", sets=["tracking.uri=https://me:secret@mlflow.example"])
    assert "secret" not in str(caught.value)


def test_metric_names_are_read_in_any_spelling() -> None:
    config = build(
        "lightgcn", sets=["evaluation.metrics=[Recall, NDCG]", "evaluation.select=NDCG@10"]
    )
    assert config.evaluation.metrics == ("recall", "ndcg")


def test_a_preset_that_changes_nothing_changes_no_hash() -> None:
    assert build("fedcrf", preset="kitchen-food").hash() == build("fedcrf").hash()
    assert build("fedcrf", preset="care-beauty").hash() != build("fedcrf").hash()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("K=true", "K = True is not possible: it is true or false where a number"),
        ("seed=false", "seed = False is not possible: it is true or false"),
        ("evaluation.ks=[10, true]", "it is true or false"),
        (
            "K=100000000000000000000",
            "K = 100000000000000000000 is not possible: whole numbers go up to 2147483647",
        ),
        ("seed=100000000000000000000", "whole numbers go up to 9223372036854775807"),
    ],
)
def test_numbers_are_numbers_of_a_size_that_can_be_used(text: str, words: str) -> None:
    with pytest.raises(CrossfedError, match=words):
        build("fedcrf", sets=[text])


def test_true_and_false_stay_where_they_are_meant() -> None:
    assert (
        build("fedcrf", sets=["tracking.enabled=false", "evaluation.audit=true"]).evaluation.audit
        is True
    )


def test_resources_that_do_nothing_in_one_process_are_known() -> None:
    assert build("fedcrf").resources.without_ray() == []
    sets = [
        "resources.gpu_memory_fraction=0.5",
        "resources.placement=SPREAD",
        "resources.threads=2",
        "resources.device=cpu",
    ]
    assert build("fedcrf", sets=sets).resources.without_ray() == [
        "gpu_memory_fraction",
        "placement",
    ]
