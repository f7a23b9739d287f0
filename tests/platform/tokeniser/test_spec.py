"""What a tokeniser depends on: shapes, keys, and what counts in a run's hash."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfed.platform.errors import CrossfedError
from crossfed.platform.tokeniser.spec import Spec
from sid_toy import config


def test_the_shape_comes_from_the_methods_config(shops: Path, tmp_path: Path) -> None:
    spec = Spec.of(config(shops, tmp_path, "levels=2", "codebook=5"))
    assert (spec.levels, spec.codebook) == (2, 5)
    with pytest.raises(
        CrossfedError,
        match=r"must hold the positive whole numbers levels and codebook; it "
        r"has levels=None",
    ):
        Spec.of(config(shops, tmp_path, method="sidtoy:SHAPELESS"))


def test_the_key_depends_on_everything_that_matters_and_nothing_else(
    shops: Path, tmp_path: Path
) -> None:
    def key(*sets: str, texts: tuple[str, ...] = ("a", "b")) -> str:
        return Spec.of(config(shops, tmp_path, *sets)).key(list(texts))

    settings = (
        "levels=2",
        "codebook=9",
        "tokeniser.seed=1",
        "tokeniser.dim=9",
        "tokeniser.hidden=9",
        "tokeniser.epochs=9",
        "tokeniser.batch_size=9",
        "tokeniser.lr=0.1",
        "tokeniser.beta=1.0",
        "tokeniser.entropy=1.0",
        "tokeniser.collision=1.0",
        "tokeniser.workers=2",
        "tokeniser.kind=residual-kmeans",
    )
    keys = {key(), key(texts=("b", "a")), key(texts=("a",)), *(key(one) for one in settings)}
    assert len(keys) == 3 + len(settings)
    assert key("seed=5", "tokeniser.min_perplexity=0.2", "resources.threads=2") == key()
    plain = "tokeniser.kind=residual-kmeans"
    assert key(plain, "tokeniser.epochs=9", "tokeniser.lr=0.1") == key(plain)


def test_only_runs_that_use_semantic_ids_have_their_settings_in_the_hash(
    shops: Path, tmp_path: Path
) -> None:
    def hashes(method: str) -> set[str]:
        return {
            config(shops, tmp_path, *sets, method=method).hash()
            for sets in ((), ("tokeniser.beta=0.3",))
        }

    assert len(hashes("sidtoy:METHOD")) == 2
    assert len(hashes("sidtoy:TEXTLESS")) == 1
