"""A directory appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accel_trainer.checkpoint.directory import publish_directory
from accel_trainer.errors import ProcessGroupError
from accel_trainer.runtime.process import ProcessContext, init_process, read_environment
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")

ALONE = ProcessContext(0, 0, 1, 1, torch.device("cpu"), None)


def test_nothing_is_seen_under_the_name_before_the_block_ends(tmp_path: Path):
    target = tmp_path / "a" / "state"
    with publish_directory(target, ALONE) as staged:
        (staged / "file").write_text("x")
        assert not target.exists()
        assert staged.path.parent == target.parent
    assert (target / "file").read_text() == "x"
    assert list(target.parent.iterdir()) == [target]


def publish_and_fail(target: Path) -> None:
    with publish_directory(target, ALONE) as staged:
        (staged / "file").write_text("new")
        raise OSError("disk")


def test_a_failure_leaves_the_older_directory_as_it_was(tmp_path: Path):
    target = tmp_path / "state"
    with publish_directory(target, ALONE) as staged:
        (staged / "file").write_text("old")
    with pytest.raises(OSError, match="disk"):
        publish_and_fail(target)
    assert (target / "file").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_second_save_replaces_the_first(tmp_path: Path):
    target = tmp_path / "state"
    for name in ("first", "second"):
        with publish_directory(target, ALONE) as staged:
            (staged / name).write_text("x")
    assert sorted(path.name for path in target.iterdir()) == ["COMMITTED", "manifest.json", "second"]
    assert list(tmp_path.iterdir()) == [target]


def publish_with_a_failing_rank(target: str) -> str:
    """Rank 1 fails; return what this rank was told, and use the group afterwards."""
    process = init_process(read_environment(), use_cpu=True)
    try:
        with publish_directory(Path(target), process) as staged:
            (staged / f"part-{process.rank}").write_text("x")
            if process.rank == 1:
                raise OSError("no space left")
    except (OSError, ProcessGroupError) as error:
        told = str(error)
    counted = torch.ones(1)
    torch.distributed.all_reduce(counted)
    assert counted.item() == process.world_size
    return told


def test_one_ranks_failure_is_raised_on_every_rank_and_publishes_nothing(tmp_path: Path):
    told = run_ranks(publish_with_a_failing_rank, 3, str(tmp_path / "state"))
    assert told[1] == "no space left"
    assert told[0] == told[2].replace("(2)", "(0)")
    assert "rank 1 failed in save of" in told[0]
    assert "OSError: no space left" in told[0]
    assert list(tmp_path.iterdir()) == []
