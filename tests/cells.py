"""Cells of matrices: `make test` runs a sample that has each value of each axis, and `make test-cells` the others.

A matrix is a product of layouts, kinds of models, numbers of workers and the like, over which one behaviour is
asserted. `sample` and `crossed` choose by a rule; where one value matters more, a test marks those beyond by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

_Parameters = type(pytest.param())


def beyond(cell: Any) -> Any:
    """Return a cell as parameters of a test, marked as one that `make test` leaves out."""
    cell = _parameters(cell)
    return pytest.param(*cell.values, id=cell.id, marks=[*cell.marks, pytest.mark.cell])


def sample(cells: Iterable[Any]) -> list[Any]:
    """Return cells as parameters of a test; marked are those beyond the sample, without a value that is new in them."""
    met: set[tuple[int, str]] = set()
    found = []
    for cell in map(_parameters, cells):
        values = set(enumerate(map(repr, cell.values)))
        found.append(beyond(cell) if values <= met else cell)
        met |= values
    return found


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """Return the product of axes; in the sample is the diagonal, as long as the longest axis: shorter ones repeat.

    A value that is a tuple is one of several parameters; one may have marks, as those of `strategy_configs.marked`.
    """
    values = [list(map(_parameters, axis)) for axis in axes]
    diagonal = {tuple(index % len(axis) for axis in values) for index in range(max(map(len, values)))}
    cells = []
    for place in itertools.product(*(range(len(axis)) for axis in values)):
        parts = [axis[at] for axis, at in zip(values, place, strict=True)]
        marks = [mark for part in parts for mark in part.marks]
        cell = pytest.param(*(value for part in parts for value in part.values), marks=marks)
        cells.append(cell if place in diagonal else beyond(cell))
    return cells


def is_beyond(cell: Any) -> bool:
    """Return whether `make test` leaves a cell out."""
    return any(mark.name == "cell" for mark in cell.marks)


def selected(request: pytest.FixtureRequest, name: str) -> list[tuple[Any, ...]]:
    """Return the parameters, in order of their names, with which a test of the module is to run: for what it shares."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = [item.callspec.params for item in items if item.module is request.module and item.originalname == name]
    return [tuple(value for _, value in sorted(params.items())) for params in chosen]


def _parameters(cell: Any) -> Any:
    if isinstance(cell, _Parameters):
        return cell
    return pytest.param(*cell) if type(cell) is tuple else pytest.param(cell)
