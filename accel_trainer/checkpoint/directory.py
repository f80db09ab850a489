"""A checkpoint directory appears under its name only when every rank has written its part."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from accel_trainer.runtime.health import shared_fate
from accel_trainer.runtime.process import ProcessContext

__all__ = ["publish_directory"]


def _fsync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory):
        for name in [*names, "."]:
            descriptor = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _replace(staged: Path, target: Path) -> None:
    """Rename `staged` to `target`, moving an older directory of that name out of the way first."""
    trash = None
    if target.exists():
        trash = target.with_name(f".trash-{target.name}-{uuid.uuid4().hex[:8]}")
        os.rename(target, trash)
    os.rename(staged, target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if trash is not None:
        shutil.rmtree(trash)


@contextmanager
def publish_directory(target: Path, process: ProcessContext) -> Iterator[Path]:
    """Yield a directory beside `target` to write into; rename it to `target` once every rank has left the block.

    Collective: every rank enters it and writes its own files. When one rank raises, every rank raises, nothing appears
    under `target`, and what was there before stays.

    Raises:
        ProcessGroupError: another rank failed.
    """
    names = [f".tmp-{target.name}-{uuid.uuid4().hex[:8]}"]
    if process.is_distributed:
        dist.broadcast_object_list(names, src=0)
    staged = target.parent / names[0]
    try:
        with shared_fate(process, f"save of {target}"):
            # Every rank makes it: on node-local disks each node has its own.
            staged.mkdir(parents=True, exist_ok=True)
        with shared_fate(process, f"save of {target}"):
            yield staged
            if process.is_local_main:
                _fsync_tree(staged)
        with shared_fate(process, f"publication of {target}"):
            if process.is_main:
                _replace(staged, target)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
