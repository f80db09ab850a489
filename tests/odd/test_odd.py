"""Cells of the table of odd models and loops, those of each refusal among them; `make test-odd` runs all."""

from __future__ import annotations

import pytest

from tests.cells import beyond
from tests.odd import THINGS
from tests.odd.cells import check
from tests.odd.loop import COLUMNS
from tests.strategy_configs import marked

FEW = (
    "slices", "scalar", "all_double", "sparse", "lazy", "parameter_hooks", "attributes", "wrapped_block", "own_output",
    "backwards_of_one", "own_backward", "adversarial", "clamped", "added_group", "shared_trunk", "copied_after",
    "branch_found", "unused_decayed", "other_method", "frozen_later", "unfrozen", "caught_backward",
)  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("column", [*marked("ddp", "fsdp2", "zero3"), *map(beyond, marked("zero2"))])
def test_odd_things_are_as_in_a_plain_loop_or_refused_by_name(column: str) -> None:
    found = dict(check(FEW, column))
    assert {name: cell.words for name, cell in found.items() if cell.outcome not in ("equal", "refused")} == {}
    assert found.keys() == set(FEW)


def test_all_words_of_the_table_are_of_a_column() -> None:
    for odd in THINGS.values():
        said = {words for column in COLUMNS for words in (odd.refusal(column), odd.gap(column))}
        assert {*odd.refused.values(), *odd.left.values()} <= said, odd.title
