"""Which checkpoint a run resumes from: the newest good one, the same for all ranks, verified before a change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from accel_trainer.checkpoint.commit.rename import recover_target
from accel_trainer.checkpoint.commit.retention import numbered_checkpoints, quarantine
from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from accel_trainer.checkpoint.format.verification import check_files, find_extra
from accel_trainer.checkpoint.reader import StoredCheckpoint, Verify, open_checkpoint
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError, CorruptCheckpointError
from accel_trainer.runtime.fault_injection import fault_point
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise, raise_together

__all__ = ["Selection", "select_named", "select_newest"]

FilesToRead = Callable[[Manifest], Iterable[str]]
"""Names of the files that this rank will read."""


@dataclass
class Selection:
    """The checkpoint to load, and how it was found."""

    stored: StoredCheckpoint
    passed_over: list[str] = field(default_factory=list)
    """Newer ones that are not good, each with the reason."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Under `resume/select_s` and `resume/verify_s`."""


def select_named(path: Path, process: ProcessContext, verify: Verify, files: FilesToRead) -> Selection:
    """Open and verify the checkpoint that the user has named. Collective; a bad one is an error, whatever is beside it.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError: see StoredCheckpoint.
        ProcessGroupError: another rank cannot read it.
    """
    begin = time.perf_counter()
    # The other ranks look for it only once it is back.
    with raise_together(process, f"load of {path}"):
        if process.is_local_main:
            recover_target(path)
    stored = open_checkpoint(path, process, verify)
    selected = time.perf_counter()
    fault_point("load.verify", stored.manifest.step)
    stored.verify_together(files(stored.manifest))
    seconds = {"resume/select_s": selected - begin, "resume/verify_s": time.perf_counter() - selected}
    return Selection(stored, seconds=seconds)


def select_newest(directory: Path, process: ProcessContext, verify: Verify, files: FilesToRead) -> Selection:
    """Open and verify the newest good `checkpoint_N` in `directory`. Collective: rank 0 decides for all.

    An incomplete or corrupt one is renamed to `_bad-...`, with a warning that says why, and the next older one is
    taken. One that rank 0 can read and another rank cannot is an error.

    Raises:
        CheckpointNotFoundError: there has never been one.
        CorruptCheckpointError: there are some, and none of them is good.
        IncompatibleCheckpointError: the newest was written by a newer version.
        ProcessGroupError: another rank failed.
    """
    section = f"selection of a checkpoint in {directory}"
    passed_over: list[str] = []
    seconds = {"resume/select_s": 0.0, "resume/verify_s": 0.0}
    while True:
        begin = time.perf_counter()
        fault_point("load.select")
        choice, error = None, None
        if process.is_main:
            try:
                choice = _choose(directory, verify, passed_over)
            except (AccelTrainerError, OSError) as raised:
                error = raised
        path, passed_over = gather_or_raise(process, section, error, (choice, passed_over))[0]
        stored = open_checkpoint(path, process, verify)
        selected = time.perf_counter()
        fault_point("load.verify", stored.manifest.step)
        flaw = stored.find_flaw_together(files(stored.manifest))
        seconds["resume/select_s"] += selected - begin
        seconds["resume/verify_s"] += time.perf_counter() - selected
        if flaw is None:
            return Selection(stored, passed_over, seconds)
        if process.is_main:
            _pass_over(path, flaw, passed_over)


def _choose(directory: Path, verify: Verify, passed_over: list[str]) -> Path:
    """Return the newest checkpoint that is complete as far as names and lengths tell; rank 0 calls it."""
    seen = {line.partition(":")[0] for line in passed_over}
    for _, path in reversed(numbered_checkpoints(directory)):
        if path.name in seen:
            continue
        if not (path / MANIFEST_NAME).is_file() and any(path.glob("random_states_*.pkl")):
            return path  # of Hugging Face accelerate, with names like ours; the reader says what it makes of it
        try:
            manifest = Manifest.read(path)
            if verify != "off":
                find_extra(path, manifest)
                check_files(path, manifest, manifest.files, "size", 1)
            return path
        except (CheckpointNotFoundError, CorruptCheckpointError) as flaw:
            _pass_over(path, str(flaw), passed_over)
    bad = sorted(path.name for path in directory.glob("_bad-checkpoint_*")) if directory.is_dir() else []
    if bad or passed_over:
        raise CorruptCheckpointError(
            f"none of the checkpoints in {directory.absolute()} is good; those that are not are kept: "
            f"{', '.join([*bad, *passed_over][:5])}. Restore one from a copy, or begin anew in another directory"
        )
    raise CheckpointNotFoundError(f"no checkpoint_N in {directory.absolute()}; save one with save_state() first")


def _pass_over(path: Path, reason: str, passed_over: list[str]) -> None:
    quarantine(path, reason)
    passed_over.append(f"{path.name}: {reason}")
