"""The package as it is installed: every folder listed, nothing that shadows the standard library,
rooms that hold.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import crossfed

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("platform", "methods", "tuning")


API = "platform/api"
"""The folder of the package `crossfed` itself."""


def package(folder: Path) -> str:
    """The name under which a folder is imported."""
    parts = folder.relative_to(ROOT).parts
    return ".".join(["crossfed", *(() if "/".join(parts) == API else parts)])


def listed() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]


def test_every_folder_with_code_is_a_listed_package() -> None:
    folders = {
        package(path.parent)
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts
    }
    assert folders == set(listed())


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_namespace_packages(room: str) -> None:
    """`platform/__init__.py` would replace the standard library's module for everything started
    from the root.
    """
    assert not (ROOT / room / "__init__.py").exists()


def test_the_standard_librarys_platform_wins_at_the_root() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import platform; print(platform.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "crossfed" not in done.stdout and not done.stdout.startswith(str(ROOT / "platform"))


def test_the_wheel_holds_every_module_and_data_file(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(tmp_path),
            str(ROOT),
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{package(path.parent).replace('.', '/')}/{path.name}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts
    } | {"crossfed/py.typed"}
    assert expected <= inside, expected - inside
    assert not any(
        name.startswith(("platform/", "methods/", "tuning/", "tests/")) for name in inside
    )
    subprocess.run(
        [sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "site")],
        check=True,
        capture_output=True,
    )
    code = (
        "import crossfed, crossfed.launch, crossfed.platform.errors as e, platform; "
        "print(crossfed.__file__, e.__file__)"
    )
    for folder in (tmp_path, ROOT):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert all(file.startswith(str(tmp_path / "site")) for file in done.stdout.split())


@pytest.mark.parametrize("folder", [ROOT, Path("/")])
def test_the_editable_install_is_whole_from_any_folder(folder: Path) -> None:
    code = (
        "import crossfed, crossfed.launch, crossfed.methods.lightgcn, "
        "crossfed.tuning.space, platform; platform.system()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)


def test_importing_crossfed_loads_nothing_heavy() -> None:
    heavy = ("torch", "ray", "mlflow", "pandas", "scipy", "matplotlib", "optuna", "pydantic")
    code = (
        f"import sys, crossfed; dir(crossfed); print([name for name in {heavy} if name in "
        f"sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert all(getattr(crossfed, name) is not None for name in crossfed.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = crossfed.nonsense


@pytest.mark.parametrize(
    "module",
    [
        "crossfed.platform.cli.main",
        "crossfed.platform.federation.run",
        "crossfed.platform.federation.node",
        "crossfed.platform.config.settings",
    ],
)
def test_importing_the_platform_starts_neither_ray_nor_mlflow(module: str) -> None:
    code = (
        f"import sys, {module}; print([name for name in ('ray', 'mlflow', "
        f"'sentence_transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
