from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import accel_trainer

pytestmark = pytest.mark.beside_accelerate

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("accel_trainer", "integrations", "fsdp_configs", "examples")
FOUNDATIONS = ("errors", "logging", "registry", "tree", "tracking")
OPTIONAL = ("deepspeed", "ray", "torch_xla")

# Imports the core, trains and evaluates by the Trainer and in a native loop where two libraries are not installed, then
# imports everything with them. Prints what the core brought in, what the evaluation gave, which of the two were loaded
# for that, which of our modules asked for accelerate, what could not be imported, and whether some other library
# (transformers, when accelerate is installed) asked for it.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
from importlib.machinery import PathFinder

asked = []

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "accelerate":
            frame = sys._getframe(1)
            while frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("importlib", "_frozen_importlib"):
                frame = frame.f_back
            asked.append(frame.f_globals.get("__name__", "?") if frame else "?")
        return None

sys.meta_path.insert(0, Recorder())
import accel_trainer.accelerator
core = sorted({name.partition(".")[0] for name in sys.modules})

find = PathFinder.find_spec
hidden = ("datasets", "evaluate")
PathFinder.find_spec = lambda name, path=None, target=None: None if name in hidden else find(name, path, target)

import torch
from accel_trainer import Accelerator
from tests.trainer_jobs import build_trainer

trainer = build_trainer(sys.argv[1], max_steps=1)
trainer.train()
evaluated = sorted(trainer.evaluate())
accelerator = Accelerator(cpu=True)
model, loader = accelerator.prepare(trainer.model, torch.utils.data.DataLoader(trainer.train_dataset, batch_size=4))
accelerator.backward(model(**next(iter(loader))).loss)
loaded = [name for name in hidden if name in sys.modules]

PathFinder.find_spec = find
failed = {}
names = [module.name for module in pkgutil.walk_packages(accel_trainer.__path__, "accel_trainer.")]
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = [error.name, str(error)]
present = "accelerate" in sys.modules
print(json.dumps({"asked": asked, "core": core, "evaluated": evaluated, "failed": failed, "loaded": loaded,
                  "names": names, "present": present}))
"""


def modules_of(package: str) -> list[str]:
    folder = ROOT / "accel_trainer" / package
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(folder.rglob("*.py"))]
    return [name.removesuffix(".__init__") for name in names]


def loaded_after(*modules: str) -> set[str]:
    """Import the modules in a fresh interpreter and return the top-level names in sys.modules."""
    code = "".join(f"import {module}\n" for module in modules)
    code += "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", code]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.split())


def imports_of_accelerate(source: str) -> list[int]:
    """Return the lines on which a source text imports accelerate, by statement or by name at run time."""
    lines: list[int] = []
    if "accelerate" not in source:
        return lines
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec", "reload", "require"):
                names = [str(node.args[0].value)]
        if any(name.partition(".")[0] == "accelerate" for name in names):
            lines.append(node.lineno)
    return lines


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict:
    command = [sys.executable, "-c", IMPORT_ALL, str(tmp_path_factory.mktemp("trained"))]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


LIGHT = {
    "the package": ["accel_trainer"],
    "foundations and config": [*(f"accel_trainer.{name}" for name in FOUNDATIONS), *modules_of("config")],
    "the command line": ["accel_trainer.launch.cli"],
}


@pytest.mark.parametrize("modules", LIGHT.values(), ids=LIGHT)
def test_what_scripts_import_first_loads_no_heavy_library(modules: list[str]):
    assert loaded_after(*modules) & {"torch", "numpy", "transformers", "datasets", "accelerate"} == set()


@pytest.mark.parametrize("name", [name for name in accel_trainer.__all__ if name != "__version__"])
def test_every_public_name_is_found_at_first_use(name: str):
    value = getattr(accel_trainer, name)
    assert value is getattr(importlib.import_module(accel_trainer._EXPORTS[name]), name)


COLLECTIONS = """
import gc, sys
import accel_trainer

found = []
sys.path.insert(0, sys.argv[1])
gc.collect()  # the next one is far
gc.callbacks.append(lambda phase, info: found.append(phase))
accel_trainer._load("many_lists")
gc.callbacks.clear()
print(found, gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects(generation=2)) > 50_000)
gc.freeze()
frozen = gc.get_freeze_count()
accel_trainer._load("more_lists")
print(gc.isenabled(), gc.get_freeze_count() > frozen / 2)  # some of them are gone
gc.disable()
accel_trainer._load("json")
print(gc.isenabled())
"""


def test_nothing_is_collected_while_a_name_is_loaded_and_collections_go_on_as_before(tmp_path: Path):
    for name in ("many_lists", "more_lists"):
        (tmp_path / f"{name}.py").write_text("lists = [[] for _ in range(50_000)]\n")
    command = [sys.executable, "-c", COLLECTIONS, str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.stdout.splitlines() == ["[] True 0 True", "True True", "False"], finished.stderr


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'accel_trainer' has no attribute 'Acelerator'"):
        accel_trainer.Acelerator  # noqa: B018


def test_dir_lists_the_public_names_before_they_are_loaded():
    assert set(accel_trainer.__all__) <= set(dir(accel_trainer))


def test_the_core_loads_no_transformers(imported: dict):
    assert "torch" in imported["core"]
    assert "transformers" not in imported["core"]


def test_training_needs_neither_datasets_nor_evaluate(imported: dict):
    assert "eval_loss" in imported["evaluated"]
    assert imported["loaded"] == []


def test_every_module_can_be_imported(imported: dict):
    broken = {name: text for name, (missing, text) in imported["failed"].items() if missing not in OPTIONAL}
    assert broken == {}
    assert {"accel_trainer.integrations", "accel_trainer.fsdp_configs"} <= set(imported["names"])


def test_accelerate_comes_in_only_when_another_library_asks_for_it(imported: dict):
    assert [name for name in imported["asked"] if name.partition(".")[0] == "accel_trainer"] == []
    assert not imported["present"] or any(name.startswith("transformers") for name in imported["asked"])


def test_no_source_of_ours_imports_accelerate():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in imports_of_accelerate(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("import accelerate", 1),
        ("import os, accelerate.utils as u", 1),
        ("def f():\n    from accelerate.state import PartialState", 1),
        ("import importlib\nimportlib.import_module('accelerate.utils')", 1),
        ("__import__('accelerate')", 1),
        ("import accel_trainer", 0),
        ("from .accelerate import x", 0),
        ("print('accelerate')", 0),
    ],
)
def test_the_scan_sees_every_way_of_importing_accelerate_and_no_other(source: str, number: int):
    assert len(imports_of_accelerate(source)) == number
