"""What a command or a process imports before it does its work: nothing that takes long and is not
needed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import toys
from crossfed.platform import registry
from crossfed.platform.config.settings import build
from crossfed.platform.federation.node import Nodes, Plan
from crossfed.platform.report.recording import run_recorded

REPORTS = frozenset({"mlflow", "matplotlib", "pandas", "scipy.stats", "torch_geometric", "jinja2"})
HEAVY = REPORTS | {"torch", "ray", "optuna", "sklearn", "transformers"}
METHODS = registry.method_names()


def imported(code: str, tmp_path: Path) -> set[str]:
    """Names of the modules that a process has imported after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules, file=sys.stderr)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.splitlines()[-1].split())


def commanded(arguments: str, tmp_path: Path, environment: str = "") -> set[str]:
    """The same after a command line that ends by itself."""
    return imported(
        f"import os, sys\nsys.argv = ['crossfed', *{arguments!r}.split()]\n{environment}\n"
        "from crossfed.platform.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass",
        tmp_path,
    )


@pytest.mark.parametrize("arguments", ["--help", "--version", "run --help", "tune start --help"])
def test_help_imports_nothing_heavy(arguments: str, tmp_path: Path) -> None:
    assert not commanded(arguments, tmp_path) & (HEAVY | {"pyarrow", "scipy"})


@pytest.mark.parametrize(
    "arguments",
    [
        "run lightgcn --set nonsense=1",
        "run fedcrf --set K=0",
        "run fedcgr --set resources.threads=many",
        "run tiger --preset nonsense",
        "run nonsense",
        "run p2p_iagr --data .",
        "tune start sasrec --set nonsense=1",
    ],
)
def test_a_configuration_is_refused_before_anything_heavy_is_imported(
    arguments: str, tmp_path: Path
) -> None:
    assert not commanded(arguments, tmp_path) & HEAVY


@pytest.mark.parametrize(
    "module",
    [
        "platform.federation.run",
        "platform.federation.actors",
        "platform.federation.final",
        *(f"methods.{m}" for m in METHODS),
    ],
)
def test_a_run_and_its_methods_import_nothing_of_reports(module: str, tmp_path: Path) -> None:
    assert not imported(f"import crossfed.{module}", tmp_path) & (REPORTS | {"sklearn"})


def test_an_actor_imports_nothing_of_reports(
    shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    """A whole run with its test; the modules are read in the actors at the end of it."""
    from crossfed.platform.federation.final import test_once

    seen: dict[str, set[str]] = {}

    def look(plan: Plan, nodes: Nodes) -> dict:
        measured = test_once(plan, nodes)
        seen.update(nodes.each("apply", dict.fromkeys(plan.nodes, (toys.modules,))))
        return measured

    values = {
        "data": shops,
        "out": tmp_path,
        "tracking.enabled": False,
        "resources.cpus_server": 0.1,
    }
    values["resources.cpus_per_domain"] = 0.1
    config = build("p2p_iagr", sets=["rounds=1", "dim=4", "K=2"], values=values)
    run_recorded(config, finish=look)
    assert seen
    for name, modules in seen.items():
        assert "torch" in modules, "the actor's own modules are meant"
        # pyarrow imports pandas by itself with the first array that it makes or gives away
        assert not sorted(modules & (REPORTS - {"pandas"})), name


@pytest.mark.parametrize("name", METHODS)
def test_the_config_made_without_torch_is_the_methods_own(name: str, tmp_path: Path) -> None:
    """Made in a fresh process, without torch; here the method is imported. Keys, bounds, defaults
    agree.
    """
    code = (
        "import json, sys\nfrom crossfed.platform.registry import config_class\n"
        f"made = config_class({name!r})\nassert 'torch' not in sys.modules\n"
        "print(json.dumps([made.model_json_schema(), made().model_dump(mode='json')], "
        "sort_keys=True))\n"
        f"from crossfed.platform.registry import find_method\nfound = "
        f"find_method({name!r}).Config\n"
        "print(json.dumps([found.model_json_schema(), found().model_dump(mode='json')], "
        "sort_keys=True))\n"
        f"assert config_class({name!r}) is found is not made\n"
        "assert sorted(map(str, made.__pydantic_decorators__.model_validators)) == "
        "sorted(map(str, found.__pydantic_decorators__.model_validators))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made, own = done.stdout.splitlines()
    assert made == own


def test_validators_of_a_config_made_without_torch_refuse_as_well(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "crossfed.platform.cli.main", "run", "tiger", "--set", "dim=7"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "dim=7 is not a multiple of heads" in done.stderr
