"""The checkpoint that a run resumes from: the newest good one, the same for all ranks, verified before any change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accel_trainer.checkpoint.commit.rename import recover_target
from accel_trainer.checkpoint.commit.retention import PREFIX, numbered_checkpoints, quarantine
from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from accel_trainer.checkpoint.format.verification import check_files, find_extra
from accel_trainer.checkpoint.reader import StoredCheckpoint, Verify, open_checkpoint
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError, CorruptCheckpointError
from accel_trainer.runtime.fault_injection import fault_point
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise, raise_together

__all__ = ["CheckpointKind", "FilesToRead", "Selection", "open_named", "select_named", "select_newest"]

FilesToRead = Callable[[Manifest], Iterable[str]]
"""Names of the files that this rank will read."""

_VERIFIED = {"full": "contents verified", "size": "lengths verified", "off": "not verified"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointKind:
    """The checkpoints that a product numbers, and those of other libraries, without a manifest, that it reads."""

    prefix: str = PREFIX
    """Before the number in a name."""
    is_foreign: Callable[[Path], bool] = lambda path: False
    """Whether a directory without a manifest is one of another library."""
    check_foreign: Callable[[Path], None] = lambda path: None
    """Raises CheckpointNotFoundError or CorruptCheckpointError where the save of such a one never ended."""


@dataclass
class Selection:
    """The checkpoint to load, and how it was found."""

    path: Path
    stored: StoredCheckpoint | None
    """None for a checkpoint of another library, which has no manifest."""
    passed_over: list[str] = field(default_factory=list)
    """Newer ones that are not good, each with the reason."""
    is_named: bool = False
    """Whether the user has named it, so that newer ones were not looked for."""
    seconds: dict[str, float] = field(default_factory=lambda: {"select": 0.0, "verify": 0.0})
    """Of the two phases."""

    @property
    def verified(self) -> str:
        """How far contents were compared with checksums."""
        if self.stored is None:
            return "not written by accel_trainer, contents not verified"
        return _VERIFIED[self.stored.verify]

    def describe(self, begin: str, facts: Sequence[str]) -> str:
        """Return a line for the log: the checkpoint, what a resume from it restores, and why no newer one was taken.

        Args:
            begin: "resumed".
            facts: `verified` among them.
        """
        named = ", as named" if self.is_named else ""
        passed_over = (f"passed over {line}" for line in self.passed_over)
        return "; ".join([f"{begin} from {self.path}{named}", *facts, *passed_over])


def open_named(path: Path, process: ProcessContext, verify: Verify, kind: CheckpointKind) -> StoredCheckpoint | None:
    """Open a checkpoint that the user has named; None for one of another library. Collective.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError: see StoredCheckpoint.
        ProcessGroupError: another rank cannot read it.
    """
    # The other ranks look for it only once it is back.
    with raise_together(process, f"load of {path}"):
        if process.is_local_main:
            recover_target(path)
    return _open(path, process, verify, kind)


def _open(path: Path, process: ProcessContext, verify: Verify, kind: CheckpointKind) -> StoredCheckpoint | None:
    seen = gather_or_raise(process, f"load of {path}", None, (_has_manifest(path), kind.is_foreign(path)))
    is_ours = any(has_manifest for has_manifest, _ in seen)
    return None if seen[0][1] and not is_ours else open_checkpoint(path, process, verify)


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST_NAME).exists() or (path / MARKER_NAME).exists()


def select_named(
    path: Path, process: ProcessContext, verify: Verify, files: FilesToRead, kind: CheckpointKind
) -> Selection:
    """Open and verify the checkpoint that the user has named. Collective; a bad one is an error, whatever is beside it.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError: see StoredCheckpoint.
        ProcessGroupError: another rank cannot read it.
    """
    begin = time.perf_counter()
    selection = Selection(path, open_named(path, process, verify, kind), is_named=True)
    flaw = _verify(selection, files, begin)
    if flaw is not None:
        raise CorruptCheckpointError(flaw)
    return selection


def select_newest(
    directory: Path,
    process: ProcessContext,
    verify: Verify,
    files: FilesToRead,
    kind: CheckpointKind,
    missing: AccelTrainerError,
) -> Selection:
    """Open and verify the newest good one of a run's numbered checkpoints. Collective: rank 0 decides for all.

    An incomplete or corrupt one is renamed to `_bad-...`, with a warning that says why, and the next older one is
    taken. One that rank 0 can read and another rank cannot is an error.

    Args:
        missing: raised where there has never been one.

    Raises:
        CorruptCheckpointError: there are some, and none of them is good.
        IncompatibleCheckpointError: the newest was written by a newer version.
        ProcessGroupError: another rank failed.
    """
    passed_over: list[str] = []
    seconds: dict[str, float] = {"select": 0.0, "verify": 0.0}
    while True:
        begin = time.perf_counter()
        fault_point("load.select")
        choice, error = None, None
        if process.is_main:
            try:
                choice = _choose(directory, verify, kind, passed_over, missing)
            except (AccelTrainerError, OSError) as raised:
                error = raised
        section = f"selection of a checkpoint in {directory}"
        path, passed_over = gather_or_raise(process, section, error, (choice, passed_over))[0]
        selection = Selection(path, _open(path, process, verify, kind), passed_over, seconds=seconds)
        flaw = _verify(selection, files, begin)
        if flaw is None:
            return selection
        if process.is_main:
            _pass_over(path, flaw, passed_over)


def _verify(selection: Selection, files: FilesToRead, begin: float) -> str | None:
    """Verify what the ranks will read; return what is corrupt, and add to the selection's seconds. Collective."""
    selected = time.perf_counter()
    selection.seconds["select"] += selected - begin
    stored = selection.stored
    if stored is None:
        return None
    fault_point("load.verify", stored.manifest.step)
    flaw = stored.find_flaw_together(files(stored.manifest))
    selection.seconds["verify"] += time.perf_counter() - selected
    return flaw


def _choose(
    directory: Path, verify: Verify, kind: CheckpointKind, passed_over: list[str], missing: AccelTrainerError
) -> Path:
    """Return the newest checkpoint that is complete as far as names and lengths tell; rank 0 calls it."""
    seen = {line.partition(":")[0] for line in passed_over}
    for _, path in reversed(numbered_checkpoints(directory, kind.prefix)):
        if path.name in seen:
            continue
        try:
            _check_outline(path, verify, kind)
            return path
        except (CheckpointNotFoundError, CorruptCheckpointError) as flaw:
            _pass_over(path, str(flaw), passed_over)
    bad = sorted(path.name for path in directory.glob(f"_bad-{kind.prefix}*")) if directory.is_dir() else []
    if bad or passed_over:
        raise CorruptCheckpointError(
            f"none of the checkpoints in {directory.absolute()} is good; those that are not are kept: "
            f"{', '.join([*bad, *passed_over][:5])}. Restore one from a copy, or begin anew in another directory"
        )
    raise missing


def _check_outline(path: Path, verify: Verify, kind: CheckpointKind) -> None:
    """Refuse a checkpoint that was not written to its end, or was cut short since.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError: a file is missing, or has another length than it should.
    """
    if not _has_manifest(path) and kind.is_foreign(path):
        kind.check_foreign(path)
        return
    manifest = Manifest.read(path)
    if verify != "off":
        find_extra(path, manifest)
        check_files(path, manifest, manifest.files, "size", 1)


def _pass_over(path: Path, reason: str, passed_over: list[str]) -> None:
    quarantine(path, reason)
    passed_over.append(f"{path.name}: {reason}")
