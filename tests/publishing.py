"""One save as a block, for tests that write a checkpoint, and damage to what was saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accel_trainer.checkpoint.disk import explain_full_disk
from accel_trainer.checkpoint.publication import Publication, StagedDirectory
from accel_trainer.runtime.process import ProcessContext

ALONE = ProcessContext(0, 0, 1, 1, torch.device("cpu"), None)


@contextmanager
def publish_directory(target: Path, process: ProcessContext, **options: Any) -> Iterator[StagedDirectory]:
    """Yield a directory beside `target` to write into; it becomes `target` once every rank has left the block."""
    publication = Publication(target, process, **options)
    with publication as staged, explain_full_disk(staged.path, options.get("need_bytes")):
        yield staged
    publication.commit()


def publish(target: Path, word: str) -> None:
    """Save a word as x.json."""
    with publish_directory(target, ALONE) as staged:
        staged.write_json("x.json", word)


def flip(path: Path) -> None:
    """Change a bit of the last byte of a file, which is none of a header."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
