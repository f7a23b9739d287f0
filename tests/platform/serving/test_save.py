"""What is saved of a real run: a model a domain, without pickles and user ids, in no time."""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd
from mlflow import MlflowClient

from crossfed.platform.serving import save
from served import DOMAINS


def test_every_domain_has_a_model_of_its_own_and_a_registered_version(
    uris: dict[str, str], store: MlflowClient
) -> None:
    assert set(uris) == set(DOMAINS)
    versions = {version.name: version for version in store.search_model_versions()}
    assert set(versions) == {f"lightgcn-shops-{domain}" for domain in DOMAINS}
    for domain in DOMAINS:
        version = versions[f"lightgcn-shops-{domain}"]
        assert (str(version.version), version.source) == ("1", uris[domain])


def test_a_model_holds_one_domain_and_neither_pickle_nor_user_ids(uris: dict[str, str]) -> None:
    root = Path(uris["books"].removeprefix("file://"))
    files = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert {f for f in files if f.startswith("artifacts/")} == {
        "artifacts/config.yaml",
        "artifacts/model/books.safetensors",
        "artifacts/model/books.users.parquet",
        "artifacts/model/books.items.parquet",
    }
    assert {Path(f).suffix for f in files} <= {
        ".safetensors",
        ".parquet",
        ".yaml",
        ".json",
        ".txt",
        ".py",
        "",
    }
    requirements = (root / "requirements.txt").read_text().split()
    assert [r.partition("==")[0] for r in requirements] == ["crossfed", "mlflow", "torch"]
    assert not any("+" in r for r in requirements)
    for file in files:
        told = (root / file).read_bytes()
        assert b"books-u" not in told and b"films-i" not in told, file
    users = pd.read_parquet(root / "artifacts/model/books.users.parquet")
    assert list(users.columns) == ["digest", "row"] and len(users) == 40


def test_writing_takes_no_time(run_dir: Path, tmp_path: Path) -> None:
    began = time.process_time()
    save.save(run_dir, "books", tmp_path / "model")
    assert time.process_time() - began < 2
