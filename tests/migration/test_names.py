"""Every public name of accelerate 1.15 is the same here, or has a reason; and the page of names is what the code is."""

from __future__ import annotations

import pytest

from tests.migration.names import DIFFERENCES, PAGE, RECORDED, all_compared, reason_of, render

COMPARED = list(all_compared())


def test_every_name_is_the_same_or_has_a_reason():
    assert [f"{each.path}: {each.reason}" for each in COMPARED if each.status == "open"] == []


def test_no_reason_is_left_over():
    used = {each.reason for each in COMPARED if each.status != "same"}
    stale = [path for kind in DIFFERENCES for path in DIFFERENCES[kind] if DIFFERENCES[kind][path] not in used]
    assert stale == []
    known = {f"{module}.{name}".removeprefix(".") for module, names in RECORDED.items() for name in names}
    assert [
        path for paths in DIFFERENCES.values() for path in paths if not path.endswith("*") and path not in known
    ] == []


@pytest.mark.parametrize("name", ["Accelerator", "utils.operations.gather", "state.PartialState", "logging.get_logger"])
def test_names_that_scripts_begin_with_are_there(name: str):
    assert not reason_of("absent", name)
    assert next(each for each in COMPARED if each.path == name).status in ("same", "different")


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == render(COMPARED), "write it anew: make names"
