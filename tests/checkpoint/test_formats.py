"""A checkpoint of every format that a release wrote is kept in the repository, and is loaded here (R20)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from accel_trainer.errors import CorruptCheckpointError
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


def test_r20_files_of_format_2_are_compared_with_their_sha256(tmp_path: Path):
    directory = shutil.copytree(FIXTURES / "format_2", tmp_path / "s")
    path = directory / "random_0.json"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(CorruptCheckpointError, match=r"random_0\.json was changed after the save: its sha256 is"):
        SmallRun().accelerator.load_state(directory)


def test_r20_every_format_has_a_fixture():
    from accel_trainer.checkpoint.format.manifest import FORMAT_VERSION

    assert [path.name for path in sorted(FIXTURES.glob("format_*"))] == [
        f"format_{version}" for version in range(1, FORMAT_VERSION + 1)
    ]
