"""Data without order: who needs one refuses them in one sentence, all others run."""

from __future__ import annotations

import pytest

from crossfed.methods.parts.item_based import ItemBased
from crossfed.platform.config.settings import build
from crossfed.platform.data.store import PreparedData, Writer
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.run import chosen_domains
from crossfed.platform.registry import find_method, method_names
from crossfed.platform.report.recording import run_recorded


@pytest.fixture(scope="module")
def unordered(tmp_path_factory) -> PreparedData:
    path = tmp_path_factory.mktemp("data") / "unordered"
    with Writer(path, {}) as writer:
        for name in ("a", "b"):
            pairs = [(user, (user + 3 * k) % 25) for user in range(20) for k in range(8)]
            users, items = zip(*pairs, strict=True)
            ids = [f"u{k}" for k in range(20)], [f"{name}{k}" for k in range(25)]
            writer.add_domain(
                name, users, items, [0] * len(pairs), *ids, [""] * 25, {"times": "none"}
            )
    return PreparedData.open(path)


def checked(data: PreparedData, method: str, *sets: str) -> tuple[str, ...]:
    return chosen_domains(build(method, sets=sets, values={"data": data.path}), data)


@pytest.mark.parametrize(
    "method",
    ["sasrec", "fedsasrec", "gru4rec", "duorec", "fedcl4srec", "tiger", "tiger_fedavg", "fedcgr"],
)
def test_methods_that_read_histories_refuse(unordered, method):
    split = "evaluation.protocol=ratio-80-10-10"
    with pytest.raises(
        CrossfedError,
        match=rf"Domain a .*`time: none`, but the method "
        rf"{method} reads .*order=file",
    ):
        checked(unordered, method, split)
    assert checked(unordered, method, split, "evaluation.order=file") == ("a", "b")


def test_which_methods_read_histories():
    """Those that are shown the histories before ranking read their order, but for the item-based
    ones, to which a history is a set."""
    methods = {name: find_method(name) for name in method_names()}
    assert {name for name, m in methods.items() if m.ordered} == {
        n for n, m in methods.items() if m.observe and m.observe is not ItemBased.observe
    }


@pytest.mark.parametrize("protocol", ["leave-one-out", "leave-one-out-99", "ratio-80-10-10-time"])
def test_protocols_by_order_refuse(unordered, protocol):
    said = f"evaluation.protocol={protocol}"
    with pytest.raises(
        CrossfedError,
        match=r"but the split .* needs users' interactions in "
        r"their order",
    ):
        checked(unordered, "lightgcn", said)
    assert checked(unordered, "lightgcn", said, "evaluation.order=file") == ("a", "b")


def test_a_cut_in_time_cannot_be_had_by_order(unordered):
    with pytest.raises(
        CrossfedError, match="and temporal-cut cuts by time; take the protocol ratio-80-10-10"
    ):
        checked(unordered, "lightgcn", "evaluation.protocol=temporal-cut", "evaluation.order=file")


def test_the_rest_runs(unordered, tmp_path):
    config = build(
        "lightgcn",
        sets=["epochs=1", "tracking.enabled=false"],
        values={"data": unordered.path, "out": tmp_path, "backend": "inprocess"},
    )
    assert run_recorded(config).result["protocol"] == "ratio-80-10-10"


def test_the_default_keeps_the_hash():
    assert build("lightgcn", sets=["evaluation.order=time"]).hash() == build("lightgcn").hash()
    assert build("lightgcn", sets=["evaluation.order=file"]).hash() != build("lightgcn").hash()
