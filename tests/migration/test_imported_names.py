"""Libraries that import accelerate find every name of theirs here, at the same path."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from tests.migration.imported_names import LIBRARIES, is_importable, lacking, record


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_every_name_of_a_library_is_here(library: str):
    assert lacking(library) == []
    assert [path for path in LIBRARIES[library]["imported"] if not is_importable(path)] == []


def test_modules_are_there_after_the_package_alone_is_imported():
    used = sorted({path for names in LIBRARIES.values() for path in names["used"]})
    assert "accelerate.hooks.CpuOffload" in used
    lines = [f"accel_trainer.{path.partition('.')[2]}" for path in used]
    subprocess.run([sys.executable, "-c", "\n".join(["import accel_trainer", *lines])], check=True)


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_the_recorded_names_are_those_of_the_installed_library(library: str):
    try:
        installed = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    if installed != LIBRARIES[library]["version"]:
        pytest.skip(f"{library} {installed} is installed, and {LIBRARIES[library]['version']} is recorded")
    assert record(library) == LIBRARIES[library], f"python -m tests.migration.imported_names {library}"
