"""Libraries that import accelerate find every name of theirs here, at the same path."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from tests.migration.imported_names import LIBRARIES, is_attribute, is_importable, lacking, record
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator", "transformers")


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_every_name_of_a_library_is_here(library: str):
    assert lacking(library) == []
    assert [path for path in LIBRARIES[library]["imported"] if not is_importable(path)] == []


def missing_after_import(paths: list[str]) -> list[str]:
    """Import the package alone, as a new interpreter that has torch already, and return those that are not there."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "accel_trainer"]:
        del sys.modules[name]
    return [path for path in paths if not is_attribute(path)]


def test_modules_are_there_after_the_package_alone_is_imported():
    used = sorted({path for names in LIBRARIES.values() for path in names["used"]})
    assert "accelerate.hooks.CpuOffload" in used
    assert run_ranks(missing_after_import, 1, used) == [[]]


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_the_recorded_names_are_those_of_the_installed_library(library: str):
    try:
        installed = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    if installed != LIBRARIES[library]["version"]:
        pytest.skip(f"{library} {installed} is installed, and {LIBRARIES[library]['version']} is recorded")
    assert record(library) == LIBRARIES[library], f"python -m tests.migration.imported_names {library}"
