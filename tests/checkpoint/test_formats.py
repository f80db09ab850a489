"""A checkpoint of every format that a release wrote is kept in the repository, and is loaded here (R20)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_trainer.checkpoint.manifest import FORMAT_VERSION
from tests.checkpoint.small_run import SmallRun

FIXTURES = Path(__file__).with_name("fixtures")
LOSSES_AFTER = [0.24672871828079224, 0.03299650922417641]
"""Of the epoch that follows the saved one, from the run that saved."""


@pytest.mark.parametrize("directory", sorted(FIXTURES.glob("format_*")), ids=lambda path: path.name)
def test_r20_checkpoints_of_every_format_are_loaded(directory: Path):
    run = SmallRun(seed=1)
    run.accelerator.load_state(directory)
    assert run.counter.count == 2
    assert run.train() == pytest.approx(LOSSES_AFTER, abs=1e-6)
    assert run.counter.count == 4


def test_r20_every_format_has_a_fixture():
    assert [path.name for path in sorted(FIXTURES.glob("format_*"))] == [
        f"format_{version}" for version in range(3, FORMAT_VERSION + 1)
    ]
