"""Every public name of accelerate 1.15 is the same here, or has a reason; and the page of names is what the code is."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer import Accelerator, PartialState
from tests.migration.names import (
    CALLS,
    DIFFERENCES,
    PAGE,
    RECORDED,
    all_compared,
    described,
    gaps,
    parameters_of,
    reason_of,
    render,
    with_tables,
)

COMPARED = list(all_compared())


def test_every_name_is_the_same_or_has_a_reason():
    assert [f"{each.path}: {each.reason}" for each in COMPARED if each.status == "open"] == []


def test_no_reason_is_left_over():
    used = {each.reason for each in COMPARED if each.status != "same"}
    kinds = [DIFFERENCES[kind] for kind in ("different", "absent")]
    assert [path for reasons in kinds for path, reason in reasons.items() if reason not in used] == []
    known = {f"{module}.{name}".removeprefix(".") for module, names in RECORDED.items() for name in names}
    assert [
        path for paths in (*kinds, DIFFERENCES["lacking"]) for path in paths if path[-1] != "*" and path not in known
    ] == []


def test_what_a_class_lacks_is_listed_and_nothing_else():
    listed = {}
    for module, names in RECORDED.items():
        for name, entry in names.items():
            home = f"{entry.get('from', module)}.{name}"
            if home in DIFFERENCES["lacking"]:
                found = getattr(importlib.import_module(f"accel_trainer.{module}".removesuffix(".")), name)
                listed[home] = gaps(found, described(entry, name))
    assert listed == DIFFERENCES["lacking"]


def prepared_objects(folder: Path) -> dict[str, Any]:
    """Return an object of each recorded class, as a script gets it."""
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(range(4))
    _, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    accelerator.init_trackers("run")
    return {
        "accelerator.Accelerator": accelerator,
        "state.AcceleratorState": accelerator.state,
        "state.PartialState": PartialState(),
        "state.GradientState": accelerator.gradient_state,
        "optimizer.AcceleratedOptimizer": optimizer,
        "scheduler.AcceleratedScheduler": schedule,
        "data_loader.DataLoaderShard": loader,
        "tracking.TensorBoardTracker": accelerator.trackers[0],
    }


def test_objects_have_the_attributes_of_accelerates_or_a_reason(tmp_path: Path):
    pytest.importorskip("tensorboard")
    found = prepared_objects(tmp_path)
    attributes = CALLS["attributes"]
    lacking = {
        f"{kind}.{name}" for kind, names in attributes.items() for name in names if not hasattr(found[kind], name)
    }
    found["accelerator.Accelerator"].end_training()
    assert lacking == set(DIFFERENCES["attributes"])


def callable_at(path: str) -> Any:
    """Return ours at a path of accelerate's; None where it is not here."""
    owner, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"accel_trainer.{owner}".removesuffix(".")), name, None)
    except ModuleNotFoundError:  # a method, and its class stands before it
        return getattr(callable_at(owner), name, None) if "." in owner else None
    except ImportError:  # a name that is refused with its reason
        return None


def test_defaults_are_those_of_accelerate_or_have_a_reason():
    different = set()
    for path, defaults in CALLS["defaults"].items():
        own = {name: each.default for name, each in parameters_of(callable_at(path)).items()}
        for name, default in defaults.items():
            found = own.get(name, default)
            if found != default and [found, default] != [(), []]:
                different.add(f"{path}.{name}")
    assert different == set(DIFFERENCES["defaults"])


def test_positional_arguments_come_in_the_order_of_accelerate():
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    different = []
    for module, names in RECORDED.items():
        for name, entry in names.items():
            own = [
                each.name
                for each in parameters_of(callable_at(f"{module}.{name}")).values()
                if each.kind in by_position
            ]
            order = [each for each in entry.get("parameters") or () if each in own]
            if order != [each for each in own if each in order]:
                different.append(f"{module}.{name}".removeprefix("."))
    assert different == list(DIFFERENCES["order"])


def test_a_behaviour_that_differs_is_shown_by_a_test_of_ours():
    root = Path(__file__).resolve().parents[2]
    for entry in DIFFERENCES["behaviour"]:
        path, _, name = entry.get("ours", "").partition("::")
        assert not name or f"def {name}(" in (root / path).read_text(), entry["ours"]


@pytest.mark.parametrize("name", ["Accelerator", "utils.operations.gather", "state.PartialState", "logging.get_logger"])
def test_names_that_scripts_begin_with_are_there(name: str):
    assert not reason_of("absent", name)
    assert next(each for each in COMPARED if each.path == name).status in ("same", "different")


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == render(COMPARED), "write it anew: make names"
    for page, text in with_tables(COMPARED).items():
        assert page.read_text() == text, "write it anew: make names"
