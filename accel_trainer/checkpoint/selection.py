"""The checkpoint that a run resumes from, and the search for it among those of a directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accel_trainer.checkpoint.commit.retention import PREFIX, numbered_checkpoints, quarantine
from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from accel_trainer.checkpoint.format.verification import check_files, refuse_extra_files
from accel_trainer.checkpoint.reader import StoredCheckpoint, Verify
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError, CorruptCheckpointError

__all__ = ["CheckpointKind", "Selection", "choose_newest", "has_manifest", "pass_over"]

_VERIFIED = {"full": "contents verified", "size": "lengths verified", "off": "not verified"}


def _is_of_nobody_else(path: Path) -> bool:
    return False


def _check_nothing(path: Path) -> None:
    """Find nothing wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointKind:
    """The checkpoints that a product numbers, and those of other libraries, without a manifest, that it reads."""

    prefix: str = PREFIX
    """Before the number in a name."""
    reads_without_manifest: Callable[[Path], bool] = _is_of_nobody_else
    """Whether a directory without a manifest is one of another library."""
    check_without_manifest: Callable[[Path], None] = _check_nothing
    """Raises CheckpointNotFoundError or CorruptCheckpointError where the save of such a one never ended."""


@dataclass(frozen=True)
class Selection:
    """The checkpoint to load."""

    path: Path
    stored: StoredCheckpoint | None
    """None for a checkpoint of another library, which has no manifest."""
    passed_over: list[str] = field(default_factory=list)
    """Newer ones that are not good, each with the reason."""
    is_named: bool = False
    """Whether the user has named it, so that newer ones were not looked for."""

    @property
    def verified(self) -> str:
        """How far contents were compared with checksums."""
        if self.stored is None:
            return "not written by accel_trainer, contents not verified"
        return _VERIFIED[self.stored.verify]

    def describe(self, begin: str, facts: Sequence[str]) -> str:
        """Return a line for the log, which `begin` opens: the checkpoint, facts, and why no newer one was taken."""
        named = ", as named" if self.is_named else ""
        passed_over = (f"passed over {line}" for line in self.passed_over)
        return "; ".join([f"{begin} from {self.path}{named}", *facts, *passed_over])


def has_manifest(path: Path) -> bool:
    """Whether accel_trainer wrote a checkpoint, be it incomplete."""
    return (path / MANIFEST_NAME).exists() or (path / MARKER_NAME).exists()


def choose_newest(
    directory: Path, verify: Verify, kind: CheckpointKind, passed_over: list[str], missing: AccelTrainerError
) -> Path:
    """Return the newest checkpoint that is complete as far as names and lengths tell; rank 0 calls it.

    Args:
        passed_over: those to leave out, each with the reason; those that are found to be bad are added.
        missing: raised where there has never been one.

    Raises:
        CorruptCheckpointError: there are some, and none of them is good.
    """
    seen = {line.partition(":")[0] for line in passed_over}
    for _, path in reversed(numbered_checkpoints(directory, kind.prefix)):
        if path.name in seen:
            continue
        try:
            _check_outline(path, verify, kind)
            return path
        except (CheckpointNotFoundError, CorruptCheckpointError) as flaw:
            pass_over(path, str(flaw), passed_over)
    bad = sorted(path.name for path in directory.glob(f"_bad-{kind.prefix}*")) if directory.is_dir() else []
    if bad or passed_over:
        raise CorruptCheckpointError(
            f"none of the checkpoints in {directory.absolute()} is good; those that are not are kept: "
            f"{', '.join([*bad, *passed_over][:5])}. Restore one from a copy, or begin anew in another directory"
        )
    raise missing


def _check_outline(path: Path, verify: Verify, kind: CheckpointKind) -> None:
    """Refuse a checkpoint that was not written to its end, or was cut short since."""
    if not has_manifest(path) and kind.reads_without_manifest(path):
        kind.check_without_manifest(path)
        return
    manifest = Manifest.read(path)
    if verify != "off":
        refuse_extra_files(path, manifest)
        check_files(path, manifest, manifest.files, "size", 1)


def pass_over(path: Path, reason: str, passed_over: list[str]) -> None:
    """Rename a bad checkpoint to `_bad-...`, and note the reason."""
    quarantine(path, reason)
    passed_over.append(f"{path.name}: {reason}")
