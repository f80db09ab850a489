"""Compare the files of a checkpoint with its manifest. Needs no torch: the command line does it too."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from accel_trainer import logging
from accel_trainer.checkpoint.format.checksums import BLOCK_BYTES, FileEntry, hash_blocks, make_entry, num_blocks
from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from accel_trainer.checkpoint.format.regular_files import check_regular
from accel_trainer.errors import CorruptCheckpointError

__all__ = ["check_checkpoint", "check_files", "list_files", "refuse_extra_files", "warn_of_writers"]

logger = logging.get_logger(__name__)

_IF_CHANGED_ON_PURPOSE = (
    "this one with verify='off' (an argument of load_state() and of TrainingArguments) if you changed it yourself"
)


def list_files(directory: Path) -> list[str]:
    """Return the names of all files below `directory`, the manifest and the marker left out, sorted."""
    names = []
    for folder, _, files in os.walk(directory):
        names += [Path(folder, file).relative_to(directory).as_posix() for file in files]
    return sorted(set(names) - {MANIFEST_NAME, MARKER_NAME})


def refuse_extra_files(directory: Path, manifest: Manifest) -> None:
    """Refuse files that the manifest does not name and that a reader might take; see `Manifest.reserves`.

    Raises:
        CorruptCheckpointError: there is one.
    """
    if manifest.has_checksums:
        extra = [name for name in list_files(directory) if name not in manifest.files and manifest.reserves(name)]
        if extra:
            raise CorruptCheckpointError(
                f"{directory.absolute()} holds {', '.join(map(repr, extra[:5]))}, which its manifest does not name: "
                f"something was added after the save. Move it out of the checkpoint, or {_IF_CHANGED_ON_PURPOSE}"
            )


def warn_of_writers(directory: Path) -> None:
    """Warn of a checkpoint that every user may write to: matching checksums do not prove that it is the saved one.

    Group-writable ones pass: groups are how people share a disk.
    """
    for path in (directory, directory / MANIFEST_NAME):
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH:
            logger.warning(
                "every user of this machine can write to %s (mode %o), and checksums tell damage, not forgery: load it "
                "if you trust them all, and take the right away with `chmod -R o-w`",
                path,
                stat.S_IMODE(mode),
            )
            return


def check_checkpoint(directory: Path, mode: str, num_threads: int = 1) -> Manifest:
    """Compare a checkpoint with its manifest, and return that; see `check_files`.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError: it is not good.
    """
    manifest = Manifest.read(directory)
    refuse_extra_files(directory, manifest)
    check_files(directory, manifest, manifest.files, mode, num_threads)
    return manifest


def check_files(directory: Path, manifest: Manifest, names: Iterable[str], mode: str, num_threads: int) -> None:
    """Compare files with the manifest: their presence inside the checkpoint, their lengths, and their contents.

    Args:
        mode: "full" compares contents, "size" lengths, "off" neither.
        num_threads: blocks of all files are hashed by this many threads.

    Raises:
        CheckpointNotFoundError: a file is missing.
        CorruptCheckpointError: a file was changed, or is a link out of the checkpoint.
    """
    names = [name for name in names if name in manifest.files]
    for name in names:
        _check_place(directory, name, manifest.files[name], mode)
    if mode == "full":
        tasks = [
            (directory / name, index) for name in names for index in range(num_blocks(manifest.files[name].num_bytes))
        ]
        digests = iter(hash_blocks(tasks, num_threads, manifest.checksum))
        for name in names:
            entry = manifest.files[name]
            own = [next(digests) for _ in range(num_blocks(entry.num_bytes))]
            found = make_entry(entry.num_bytes, own, manifest.checksum)
            if found != entry:
                raise CorruptCheckpointError(_describe_change(directory / name, entry, found, manifest.checksum))


def _check_place(directory: Path, name: str, entry: FileEntry, mode: str) -> None:
    path = directory / name
    num_bytes = check_regular(path, directory).st_size
    if mode != "off" and num_bytes != entry.num_bytes:
        raise CorruptCheckpointError(
            f"{path.absolute()} has {num_bytes} bytes, and {entry.num_bytes} were written; it was cut or "
            f"changed after the save. Load another checkpoint, or {_IF_CHANGED_ON_PURPOSE}"
        )


def _describe_change(path: Path, expected: FileEntry, found: FileEntry, checksum: str) -> str:
    where = ""
    if expected.blocks:
        pairs = enumerate(zip(expected.blocks, found.blocks, strict=False))
        changed = [index for index, (a, b) in pairs if a != b]
        where = f" (first in the {BLOCK_BYTES >> 20} MiB at byte {changed[0] * BLOCK_BYTES:,})" if changed else ""
    return (
        f"{path.absolute()} was changed after the save{where}: its {checksum} is {found.checksum}, and "
        f"{expected.checksum} was written. Load another checkpoint, or {_IF_CHANGED_ON_PURPOSE}"
    )
