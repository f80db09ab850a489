"""Strategies by name: built in, registered, declared by installed packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_trainer import registry
from accel_trainer.errors import ConfigError, MissingExtraError
from accel_trainer.registry import load_strategy, register_strategy, strategy_names

PACKAGE = '''
class Replicas:
    """A strategy of a third party."""

    name = "replicas"


class Broken:
    def __init__(self):
        raise AttributeError("no engine")


class Engine:
    def __init__(self):
        from accel_trainer.errors import MissingExtraError

        raise MissingExtraError("install accel-trainer[engine]")


class Needs:
    def __init__(self, engine):
        pass
'''


NEAREST = {"fsdp": "fsdp2", "dpp": "ddp", "singel": "single", "FSDP2": "fsdp2"}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._STRATEGIES, "targets", dict(registry._STRATEGIES.targets))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "third_party_strategies.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("third_party_strategies", None)


def declare(folder: Path, entries: str, name: str = "third-party") -> None:
    """Install a distribution that declares strategies."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[accel_trainer.strategies]\n{entries}\n")
    importlib.invalidate_caches()


def test_built_in_strategies_load():
    assert {"single", "ddp", "fsdp2"} <= set(strategy_names())
    assert [load_strategy(name).name for name in ("single", "ddp", "fsdp2")] == ["single", "ddp", "fsdp2"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [*((wrong, f"; did you mean '{near}'\\?") for wrong, near in NEAREST.items()), ("horovod", r"\.")],
)
def test_an_unknown_strategy_gets_the_nearest_name_and_all_of_them(name: str, hint: str):
    known = "auto, ddp, deepspeed, fsdp2, single"
    with pytest.raises(ConfigError, match=rf"^unknown strategy '{name}'{hint} Known strategies: {known};.*entry-point"):
        load_strategy(name)


def test_a_registered_strategy_loads(package: Path):
    register_strategy("replicas", "third_party_strategies:Replicas")
    assert "third_party_strategies" not in sys.modules  # imported at first use, not before
    assert load_strategy("replicas").name == "replicas"
    assert "replicas" in strategy_names()


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        *((taken, "a.b:C", f"'{taken}' is already registered as .*; choose another") for taken in ("ddp", "auto")),
        *(("mine", wrong, "is not of the form 'package.module:C") for wrong in ("a.b.C", "a:b:C", "", "a.b:", ":C")),
    ],
)
def test_a_name_that_is_taken_or_a_target_that_is_no_class_is_refused(name: str, target: str, message: str):
    with pytest.raises(ConfigError, match=message):
        register_strategy(name, target)


def test_a_strategy_of_an_installed_package_loads_and_replaces_none_of_ours(package: Path):
    declare(package, "replicas = third_party_strategies:Replicas\nddp = third_party_strategies:Replicas")
    assert "replicas" in strategy_names()
    assert [load_strategy(name).name for name in ("replicas", "ddp")] == ["replicas", "ddp"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module_here:Strategy", "No module named 'no_such_module_here'"),
        ("third_party_strategies:Missing", "has no attribute 'Missing'"),
        ("third_party_strategies", "is not of the form 'package.module:ClassName'"),
        ("third_party_strategies:Broken", "no engine"),
        ("third_party_strategies:Needs", "missing 1 required positional argument"),
    ],
)
def test_a_target_that_does_not_load_is_named(package: Path, target: str, reason: str):
    declare(package, f"broken = {target}")
    with pytest.raises(ConfigError, match=rf"strategy ('broken' points to|target) '{target}'.*{reason}"):
        load_strategy("broken")


def test_an_engine_that_is_not_installed_says_so_itself(package: Path):
    register_strategy("engine", "third_party_strategies:Engine")
    with pytest.raises(MissingExtraError, match=r"^install accel-trainer\[engine\]"):
        load_strategy("engine")
