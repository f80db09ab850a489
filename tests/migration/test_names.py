"""Every public name of accelerate 1.15 is the same here, or has a reason; and the page of names is what the code is."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.migration.names import (
    DIFFERENCES,
    MIGRATION,
    PAGE,
    RECORDED,
    all_compared,
    described,
    gaps,
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
    assert MIGRATION.read_text() == with_tables(MIGRATION.read_text(), COMPARED), "write it anew: make names"
