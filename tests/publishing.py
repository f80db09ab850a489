"""One save as a block, for tests that write a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel_trainer.checkpoint.disk import explain_full_disk
from accel_trainer.checkpoint.publication import Publication, StagedDirectory
from accel_trainer.runtime.process import ProcessContext


@contextmanager
def publish_directory(
    target: Path,
    process: ProcessContext,
    *,
    step: int | None = None,
    each_node: bool = False,
    need_bytes: int = 0,
    owns_name: bool = False,
) -> Iterator[StagedDirectory]:
    """Yield a directory beside `target` to write into; it becomes `target` once every rank has left the block.

    Collective: every rank enters it and writes its own files. When one rank raises, every rank raises, nothing appears
    under `target`, and what was there before stays. For the arguments see `Publication`.

    Raises:
        ProcessGroupError: another rank failed.
        ConfigError: `target` is a file, or holds something else than a checkpoint.
        CheckpointLockedError: another run is saving to it.
        DiskFullError: there is no room.
    """
    publication = Publication(
        target, process, step=step, each_node=each_node, need_bytes=need_bytes, owns_name=owns_name
    )
    with publication as staged, explain_full_disk(staged.path, need_bytes or None):
        yield staged
    publication.commit()
