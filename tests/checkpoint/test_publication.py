"""A directory appears whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer.checkpoint.publication import Publication
from accel_trainer.checkpoint.reader import open_checkpoint
from accel_trainer.errors import ProcessGroupError
from accel_trainer.runtime.process import init_process, read_environment
from tests.publishing import ALONE, publish_directory
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


def publish_and_fail(target: Path) -> None:
    with publish_directory(target, ALONE) as staged:
        (staged / "file").write_text("new")
        raise OSError("disk")


def test_a_directory_has_its_name_once_the_block_has_ended_well(tmp_path: Path):
    target = tmp_path / "a" / "state"
    for name in ("first", "second"):
        with publish_directory(target, ALONE) as staged:
            (staged / name).write_text(name)
            assert not (target / name).exists()
            assert staged.path.parent == target.parent
    with pytest.raises(OSError, match="disk"):
        publish_and_fail(target)
    assert sorted(path.name for path in target.iterdir()) == ["COMMITTED", "manifest.json", "second"]
    assert (target / "second").read_text() == "second"
    assert list(target.parent.iterdir()) == [target]


def publish_with_a_failing_rank(target: Path) -> tuple[str, list[int]]:
    """Rank 1 fails; return what this rank was told, and use the group afterwards.

    Before that, all is well: return whose tables of files this rank heard of, too.
    """
    process = init_process(read_environment(), use_cpu=True)
    publication = Publication(target / "good", process)
    heard: list[int] = []
    gather = publication._gather_tables

    def note(*arguments: Any) -> Any:
        tables = gather(*arguments)
        heard.extend(tables)
        return tables

    publication._gather_tables = note
    with publication as staged:
        staged.write_json(f"part-{process.rank}.json", process.rank)
    publication.commit()
    try:
        with publish_directory(target / "bad", process) as staged:
            (staged / f"part-{process.rank}").write_text("x")
            if process.rank == 1:
                raise OSError("no space left")
    except (OSError, ProcessGroupError) as error:
        told = str(error)
    counted = torch.ones(1)
    torch.distributed.all_reduce(counted)
    assert counted.item() == process.world_size
    return told, heard


def test_one_ranks_failure_is_raised_on_every_rank_and_publishes_nothing(tmp_path: Path):
    told, heard = zip(*run_ranks(publish_with_a_failing_rank, 3, tmp_path), strict=True)
    assert told[1] == "no space left"
    assert told[0] == told[2].replace("(2)", "(0)")
    assert "rank 1 failed in save of" in told[0]
    assert "OSError: no space left" in told[0]
    # What each rank has written is of use to the one that commits, and is sent to no other.
    assert heard == ([0, 1, 2], [], [])
    assert list(tmp_path.iterdir()) == [tmp_path / "good"]
    assert sorted(open_checkpoint(tmp_path / "good", ALONE).manifest.files) == [
        f"part-{rank}.json" for rank in range(3)
    ]
