"""YAML: a key that stands twice is an error wherever YAML is read."""

from __future__ import annotations

import pytest
import yaml

from crossfed.platform.config.settings import build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.yaml_text import load_yaml


@pytest.mark.parametrize(
    "text", ["a: 1\na: 2\n", "x: {a: 1, b: 2, a: 1}", "- a: 1\n  a: 1\n", "1: a\n1: b\n"]
)
def test_a_key_twice_is_an_error(text):
    with pytest.raises(yaml.YAMLError, match="stands twice"):
        load_yaml(text)


def test_merged_keys_may_stand_again():
    text = (
        "base: &base {a: 1, b: 2}\nmore: &more {<<: *base, b: 3}\nlast: {<<: [*more, "
        "*base], a: 4}\n"
    )
    assert load_yaml(text) == yaml.safe_load(text)
    assert load_yaml("") is None


def test_a_run_file(tmp_path):
    (tmp_path / "run.yaml").write_text("method: lightgcn\nseed: 1\nseed: 2\n")
    with pytest.raises(
        CrossfedError,
        match=r"run\.yaml, line 3: not valid YAML: the key "
        r"'seed' stands twice",
    ):
        build(str(tmp_path / "run.yaml"))
    with pytest.raises(CrossfedError, match="stands twice"):
        build("lightgcn", sets=["evaluation.ks={a: 1, a: 2}"])
