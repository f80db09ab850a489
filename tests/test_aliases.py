from __future__ import annotations

import importlib
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
