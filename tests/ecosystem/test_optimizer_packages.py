"""Optimizers of other packages train, resume or are refused as the table of docs/optimizers.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cells import beyond
from tests.trainer.test_optimizer_names import TABLE, compare, compare_resumed

NAMES = sorted(row.name for row in TABLE.values() if row.package and row.is_here and row.one == "yes")

pytestmark = [
    pytest.mark.skipif(not NAMES, reason="no package of optimizers is installed"),
    pytest.mark.timeout(400),
    pytest.mark.multirank,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


# Of bitsandbytes, whose optimizers are one class to us; in the sample are some of 32 and of 8 bits, and a paged one.
ALIKE = [
    name
    for name in NAMES
    if TABLE[name].package == "bitsandbytes"
    and name not in ("adamw_bnb_8bit", "ademamix", "lion_32bit", "paged_adamw_32bit", "rmsprop_bnb_8bit")
]
OTHERS = [name for name in NAMES if name not in ALIKE]
PARTS = [pytest.param(OTHERS, id="sample"), beyond(pytest.param(ALIKE, id="alike"))]


@pytest.mark.parametrize("names", PARTS)
def test_names_of_other_packages_train_as_the_table_says(tmp_path: Path, names: list[str]):
    compare(names, str(tmp_path))


@pytest.mark.parametrize("names", PARTS)
def test_a_resumed_run_is_the_interrupted_run(tmp_path: Path, names: list[str]):
    compare_resumed(names, tmp_path)
