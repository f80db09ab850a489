"""Optimizers of other packages train, resume or are refused as the table of docs/optimizers.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.test_optimizer_names import TABLE, compare, compare_resumed

NAMES = sorted(row.name for row in TABLE.values() if row.package and row.is_here and row.one == "yes")

pytestmark = [
    pytest.mark.skipif(not NAMES, reason="no package of optimizers is installed"),
    pytest.mark.timeout(400),
    pytest.mark.multirank,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_names_of_other_packages_train_as_the_table_says(tmp_path: Path):
    for begin in range(0, len(NAMES), 8):
        compare(NAMES[begin : begin + 8], str(tmp_path))


def test_a_resumed_run_is_the_interrupted_run(tmp_path: Path):
    compare_resumed(NAMES, tmp_path)
