from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer.aliases import ALIASES


@pytest.mark.parametrize(("alias", "path"), ALIASES.items())
def test_an_alias_is_the_module_that_it_names(alias: str, path: str):
    assert importlib.import_module(f"accel_trainer.{alias}") is importlib.import_module(f"accel_trainer.{path}")


def test_no_alias_hides_a_module():
    root = Path(__file__).resolve().parents[1]
    folders = {name: root / "accel_trainer" / name.replace(".", "/") for name in ALIASES}
    assert [name for name, path in folders.items() if path.with_suffix(".py").exists() or path.is_dir()] == []


def test_submodules_of_utils_are_attributes_without_an_import_of_their_own():
    names = [name.partition(".")[2] for name in ALIASES if name.startswith("utils.")]
    code = f"import accel_trainer\nfor name in {names}: assert getattr(accel_trainer.utils, name).gather, name"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
