"""The names of a run directory's files: what runs of earlier versions are read by."""

from __future__ import annotations

from pathlib import Path

from crossfed.platform import layout
from crossfed.platform.config.settings import build
from crossfed.platform.federation.run import run_federation


def test_names_on_disk_stay_what_they_are() -> None:
    """Another name here would leave every run that exists unreadable."""
    names = {name: value for name, value in vars(layout).items() if name.isupper()}
    assert names == {
        "CONFIG": "config.yaml",
        "DATA": "data.json",
        "RESULT": "result.json",
        "PLACEMENT": "placement.json",
        "ENDING": ".ending",
        "TRAINED": "trained.json",
        "HISTORY": "history.jsonl",
        "LEDGER": "ledger.jsonl",
        "RUN_ID": "mlflow_run_id",
    }


def test_a_run_leaves_its_files_under_these_names(shops: Path, tmp_path: Path) -> None:
    values = {"data": shops, "out": tmp_path, "backend": "inprocess"}
    run_dir = run_federation(build("toys:AVERAGE", sets=["rounds=1"], values=values)).run_dir
    for name in (layout.CONFIG, layout.DATA, layout.RESULT, layout.PLACEMENT, layout.HISTORY):
        assert (run_dir / name).stat().st_size, name
    assert (run_dir / layout.LEDGER).read_text().count("\n") == 6, "three up, three down"
    assert not (run_dir / layout.ENDING).exists() and not (run_dir / layout.TRAINED).exists()
