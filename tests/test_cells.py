"""Samples of matrices have each value, and the other cells are run by who asks for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.cells import crossed, is_beyond, sample

LETTERS, NUMBERS, PAIRS = "abc", range(5), [(1, 2), pytest.param(3, 4, marks=pytest.mark.slow)]


def test_a_sample_of_a_product_is_its_diagonal_and_has_each_value_of_each_axis() -> None:
    cells = crossed(LETTERS, NUMBERS, PAIRS)
    assert len({cell.values for cell in cells}) == len(cells) == 3 * 5 * 2
    chosen = [cell for cell in cells if not is_beyond(cell)]
    assert len(chosen) == 5
    letters, numbers, *pairs = zip(*(cell.values for cell in chosen), strict=True)
    assert (set(letters), set(numbers), set(zip(*pairs, strict=True))) == (set(LETTERS), set(NUMBERS), {(1, 2), (3, 4)})
    assert all([mark.name for mark in cell.marks] == ["slow"] * (cell.values[-1] == 4) for cell in chosen)


def test_a_cell_is_in_the_sample_that_is_the_first_with_one_of_its_values() -> None:
    skipped = pytest.mark.skipif(True, reason="why")
    cells = sample([("a", 1), ("a", 2), ("b", 1), pytest.param("b", 2, id="last", marks=skipped)])
    assert [is_beyond(cell) for cell in cells] == [False, False, False, True]
    assert (cells[-1].id, [mark.name for mark in cells[-1].marks]) == ("last", ["skipif", "cell"])


class Item(SimpleNamespace):
    def get_closest_marker(self, name: str) -> Any:
        return name in self.marks or None


@pytest.mark.parametrize(
    ("marker", "argument", "kept"),
    [("", "tests", "ab"), ("not slow", "tests", "ab"), ("cell", "tests", "abc"), ("", "tests/test_c.py::test", "abc")],
)
def test_cells_beyond_are_left_out_unless_a_marker_or_a_name_asks(marker: str, argument: str, kept: str) -> None:
    items: list[Any] = [Item(nodeid=name, marks=["cell"] * (name == "c")) for name in "abc"]
    left_out: list[Any] = []
    config: Any = SimpleNamespace(
        option=SimpleNamespace(markexpr=marker),
        args=[argument],
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    conftest.pytest_collection_modifyitems(config, items)
    assert ("".join(item.nodeid for item in items), len(left_out)) == (kept, 3 - len(kept))


def test_workers_get_the_longest_files_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "times.md").write_text("| `tests/b.py` | 7.5 | 1 |\n| `tests/c.py` | 30 | 9 |\n")
    monkeypatch.setattr(conftest, "TIMES", tmp_path / "times.md")
    items: list[Any] = [Item(nodeid=f"tests/{name}.py::test", marks=[]) for name in "abc"]
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr="cell"), args=[], workerinput={})
    conftest.pytest_collection_modifyitems(config, items)
    assert [item.nodeid[6] for item in items] == ["c", "b", "a"]
