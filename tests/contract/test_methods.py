"""What every method must have and keep: three files, a docstring in the house's order, tested
equations, exact state.
"""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.federation.controls import CONTROLS, PEERS
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.node import InProcess
from crossfed.platform.federation.rounds import check_method
from crossfed.platform.federation.runs import load_scorer, stored_config
from crossfed.platform.federation.transfer import local_variant
from crossfed.platform.method import Direction, MethodConfig, Scope, stage_keys
from crossfed.platform.registry import find_method, method_file, method_names
from crossfed.platform.report.recording import run_recorded
from crossfed.tuning.space import space

ROOT = Path(__file__).resolve().parents[2]
METHODS = method_names()
GENERATOR = (
    "levels=2",
    "codebook=4",
    "dim=8",
    "heads=2",
    "encoder_layers=1",
    "decoder_layers=1",
    "inner=8",
    "decoder_inner=8",
    "batch_size=128",
    "tokeniser.kind=residual-kmeans",
    "tokeniser.dim=8",
)
SMALL: dict[str, tuple[str, ...]] = {
    "cl4srec": ("dim=8", "inner=8", "epochs=3", "batch_size=16"),
    "duorec": ("dim=8", "inner=8", "epochs=3", "batch_size=16"),
    "fedcl4srec": ("dim=8", "inner=8", "rounds=3", "local_epochs=2", "mu=0.01", "batch_size=16"),
    "fedcrf": ("K=4", "dim=8", "rounds=2", "epochs=2", "batch_size=64"),
    "fedtext": ("dim=8", "rounds=3", "batch_size=64", "lr=0.05"),
    "fedsasrec": ("dim=8", "inner=8", "rounds=3", "batch_size=16"),
    "gru4rec": ("dim=8", "hidden=8", "epochs=3", "batch_size=16"),
    "lightgcn": ("dim=8", "epochs=3", "batch_size=64"),
    "neumf": ("factors=4", "mlp_dim=4", "widths=[8,4]", "batch_size=64", "epochs=3"),
    "ngcf": ("dim=8", "layers=2", "epochs=3", "batch_size=64"),
    "xsimgcl": ("dim=8", "epochs=3", "batch_size=64"),
    "sasrec": ("dim=8", "inner=8", "epochs=3", "batch_size=16"),
    "itemknn": ("neighbours=5",),
    "knntext": ("text_neighbours=3",),
    "ease": ("l2=5", "text=1"),
    "fedcgr": (
        *GENERATOR,
        "rounds=2",
        "local_epochs=1",
        "cf_dim=8",
        "cf_epochs=2",
        "dense_inner=8",
    ),
    "tiger": (*GENERATOR, "epochs=3"),
    "tiger_fedavg": (*GENERATOR, "rounds=3", "local_epochs=1", "mu=0.01"),
    "p2p_iagr": ("K=4", "dim=8", "rounds=3", "batch_size=64", "top_k=3", "privacy.noise_seed=0"),
}
"""Sizes at which a method runs in a second; the only place in the tests that lists methods."""


def small(name: str, shops: Path, out: Path, *sets: str, backend: str = "inprocess") -> RunConfig:
    return build(
        name,
        sets=[*SMALL.get(name, ()), "text.encoder=hashing:32", "privacy.noise_seed=0", *sets],
        values={
            "data": shops,
            "out": out,
            "backend": backend,
            "tracking.enabled": False,
            "tracking.artifacts": False,
        },
    )


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("domains", "bytes", "candidates")}


def test_there_are_methods() -> None:
    assert {"fedcrf", "lightgcn"} <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_three_files(name: str) -> None:
    for file in (
        f"methods/{name}.py",
        f"methods/configs/{name}.yaml",
        f"tests/methods/test_{name}.py",
    ):
        assert (ROOT / file).is_file(), f"{name} lacks {file}"
    stray = {path.stem for path in (ROOT / "methods/configs").glob("*.yaml")} - set(METHODS)
    assert not stray, f"configurations without a method: {stray}"


@pytest.mark.parametrize("name", METHODS)
def test_the_docstring_follows_the_house(name: str) -> None:
    doc = importlib.import_module(f"crossfed.methods.{name}").__doc__ or ""
    headings = ["Paper", "Notation", "What crosses", "Departures", "Not stated in the paper"]
    places = [re.search(rf"^{heading}$", doc, re.MULTILINE) for heading in headings]
    assert all(places), [h for h, place in zip(headings, places, strict=True) if not place]
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts)


@pytest.mark.parametrize("name", METHODS)
def test_every_cited_equation_occurs_in_the_methods_test(name: str) -> None:
    cite = re.compile(r"Eq\. \((\d+)\)")
    source = (ROOT / f"methods/{name}.py").read_text()
    functions = [
        number
        for first in re.findall(r'"""(Eq\. [^\n]*)', source)
        for number in cite.findall(first)
    ]
    tested = set(cite.findall((ROOT / f"tests/methods/test_{name}.py").read_text()))
    assert functions, "no function cites the equation it is"
    assert set(functions) <= tested, (
        f"cited but not tested: {sorted(set(functions) - tested, key=int)}"
    )


@pytest.mark.parametrize("name", METHODS)
def test_its_yaml_builds_with_every_preset_and_its_space_is_valid(name: str) -> None:
    shipped = method_file(name)
    assert set(shipped) <= {"config", "presets", "search", "local", "pace"}
    for preset in [None, *shipped.get("presets", {})]:
        config = build(name, preset=preset)
        check_method(config.resolved, config.method_config())
    assert space(name)


@pytest.mark.parametrize("name", METHODS)
def test_its_declarations_are_told(name: str) -> None:
    method = find_method(name)
    assert method.name == name and method.title and method.paper
    assert issubclass(method.Config, MethodConfig)
    assert all(info.description for info in method.Config.model_fields.values())
    assert all(field.meaning for field in method.fields)
    assert (method.scope == Scope.LOCAL) == (not method.fields)
    edges = {edge for stage in method.stages(method.Config()) for edge in stage.edges}
    assert edges == {Direction(field.direction) for field in method.fields}


@pytest.mark.parametrize("name", METHODS)
def test_only_users_shapes_are_declared_as_such(name: str) -> None:
    """None of the methods sends anything that grows with its users."""
    assert not any("n_users" in (field.shape or ()) for field in find_method(name).fields)


@pytest.mark.parametrize("name", METHODS)
def test_resumed_equals_uninterrupted(name: str, shops: Path, tmp_path: Path) -> None:
    straight = run_recorded(small(name, shops, tmp_path / "straight"))

    class Stop(Exception):
        pass

    rounds = len((straight.run_dir / "history.jsonl").read_text().splitlines())
    for after in sorted({1, min(3, rounds)}):
        broken: list[Path] = []

        def stop(row: Any, after: int = after) -> None:
            if row.step == after:
                raise Stop

        with pytest.raises(Stop):
            run_recorded(
                small(name, shops, tmp_path / "broken"), on_round=stop, started=broken.append
            )
        resumed = run_recorded(stored_config(broken[0]), resume=broken[0])
        assert numbers(resumed.result) == numbers(straight.result)


def _ways(name: str) -> frozenset[frozenset[Direction]]:
    """The kinds of exchange a method has: the edges of each of its stages."""
    method = find_method(name)
    return frozenset(stage.edges for stage in method.stages(method.Config()))


# starting actors is what takes long: by default one method of each kind of exchange, the others on
# request
ON_RAY = [
    pytest.param(name, marks=pytest.mark.slow)
    if find_method(name).scope == Scope.LOCAL
    or any(_ways(name) <= _ways(other) for other in METHODS[:number])
    else name
    for number, name in enumerate(METHODS)
]


@pytest.mark.parametrize("name", ON_RAY)
def test_in_process_equals_ray(name: str, shops: Path, tmp_path: Path, ray_cluster: None) -> None:
    runs = [run_recorded(small(name, shops, tmp_path / b, backend=b)) for b in ("inprocess", "ray")]
    assert numbers(runs[0].result) == numbers(runs[1].result)


@pytest.mark.parametrize("name", METHODS)
def test_the_exported_model_scores_like_the_live_one(
    name: str, shops: Path, tmp_path: Path
) -> None:
    live: dict[str, torch.Tensor] = {}
    users = np.array([0, 5, 29])

    def look(plan: Any, nodes: InProcess) -> dict[str, Any]:
        for domain, node in nodes.nodes.items():
            if node.data is not None:
                live[domain] = node.method.score(node.state, users).detach().clone()
        return {}

    done = run_recorded(small(name, shops, tmp_path), finish=look)
    assert set(live) == {"books", "films", "games"}
    for domain, scores in live.items():
        served = load_scorer(done.run_dir, domain)(users)
        assert served.shape == (3, {"books": 30, "films": 25, "games": 35}[domain])
        torch.testing.assert_close(served, scores, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_tenth_of_the_training_data_will_do(name: str, shops: Path, tmp_path: Path) -> None:
    """Most users and items have nothing left to train on; they are measured all the same."""
    few = run_recorded(
        small(name, shops, tmp_path, "evaluation.train_share=0.1"), finish=final_test
    )
    assert {name: row["test_users"] for name, row in few.result["domains"].items()} == {
        "books": 40,
        "films": 50,
        "games": 30,
    }
    for domain in few.result["domains"].values():
        assert all(
            math.isfinite(value)
            for value in (*domain["validation"].values(), *domain["test"].values())
        )


@pytest.mark.parametrize("name", METHODS)
def test_seeds_matter(name: str, shops: Path, tmp_path: Path) -> None:
    one, two = (run_recorded(small(name, shops, tmp_path, f"seed={seed}")) for seed in (1, 2))
    same = (
        one.result["domains"]["books"]["validation"] == two.result["domains"]["books"]["validation"]
    )
    assert same == find_method(name).deterministic


FEDERATED = [name for name in METHODS if find_method(name).scope == Scope.FEDERATED]


@pytest.mark.parametrize("name", FEDERATED)
def test_its_local_variant_is_declared_and_exchanges_nothing(
    name: str, shops: Path, tmp_path: Path
) -> None:
    """With every preset, and at other sizes, which the variant takes over."""
    for config in [
        small(name, shops, tmp_path),
        *(build(name, preset=p) for p in method_file(name).get("presets", {})),
    ]:
        variant = local_variant(config)
        assert variant.resolved.scope == Scope.LOCAL
        assert all(
            variant.config[key] == config.config[key]
            for key in ("dim", "layers")
            if key in variant.config
        )
        check_method(variant.resolved, variant.method_config())


@pytest.mark.parametrize("name", FEDERATED)
@pytest.mark.parametrize(
    "control",
    ["noise", "solo", *(pytest.param(c, marks=pytest.mark.slow) for c in (*CONTROLS[1:], *PEERS))],
)
def test_it_runs_under_every_transfer_control(
    name: str, control: str, shops: Path, tmp_path: Path
) -> None:
    """What arrives means nothing, and it makes of it what it can, to the end; what it sends is
    still declared and finite.
    """
    done = run_recorded(small(name, shops, tmp_path, f"control={control}"))
    assert done.result["control"] == control
    peers_only = all(field.direction == Direction.PEER for field in find_method(name).fields)
    assert (sum(done.result["bytes"]["up"].values()) > 0) != (control == "solo" and peers_only)


@pytest.mark.parametrize("name", method_names())
def test_a_setting_of_one_stage_names_a_stage_that_there_is(name: str) -> None:
    method = find_method(name)
    stages = {stage.name for stage in method.stages(build(name).method_config())}
    assert set(stage_keys(method.Config).values()) <= stages
