"""`accel-trainer ckpt`: look at checkpoints, verify them, remove old ones. Imports no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from accel_trainer.checkpoint.commit.lock import LOCK_NAME, DirectoryLock
from accel_trainer.checkpoint.commit.rename import sweep
from accel_trainer.checkpoint.commit.retention import is_complete, numbered_checkpoints, retire
from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from accel_trainer.checkpoint.format.verification import check_files, find_extra
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError
from accel_trainer.launch.weights import add_export_options, add_format_option, run_export

__all__ = ["run_ckpt"]

_PREFIXES = ("checkpoint_", "checkpoint-")
"""Of `save_state` and of the Trainer."""


def run_ckpt(words: Sequence[str]) -> int:
    """Run `accel-trainer ckpt` and return its exit code: 1 when a checkpoint is not good."""
    parser = argparse.ArgumentParser("accel-trainer ckpt", description="Checkpoints on disk.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="print the checkpoints of a directory", allow_abbrev=False)
    verifying = commands.add_parser("verify", help="compare files with their checksums", allow_abbrev=False)
    verifying.add_argument("--size", action="store_true", help="compare lengths only")
    pruning = commands.add_parser("prune", help="remove all but the newest complete ones", allow_abbrev=False)
    pruning.add_argument("--keep", type=int, required=True, metavar="N", help="how many stay, at least 1")
    for command in (listing, verifying, pruning):
        command.add_argument("directory", type=Path, help="of checkpoints, or one checkpoint")
    exporting = commands.add_parser(
        "export", help="write a checkpoint's weights, or all of it, for others", allow_abbrev=False
    )
    add_export_options(exporting)
    add_format_option(exporting)
    arguments = parser.parse_args(words)
    if arguments.command == "export":
        return run_export(arguments)
    if not arguments.directory.is_dir():
        raise CheckpointNotFoundError(f"{arguments.directory.absolute()} is no directory; give one with checkpoints")
    if arguments.command == "list":
        return _list(arguments.directory)
    if arguments.command == "verify":
        return _verify(arguments.directory, "size" if arguments.size else "full")
    if arguments.keep < 1:
        parser.error(f"--keep {arguments.keep} would leave no checkpoint; keep 1 or more")
    return _prune(arguments.directory, arguments.keep)


def _find(directory: Path) -> list[Path]:
    """Return the checkpoint that `directory` is, or those in it: numbered ones by number, then others by name.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    if (directory / MANIFEST_NAME).is_file():
        return [directory]
    numbered = [path for prefix in _PREFIXES for _, path in numbered_checkpoints(directory, prefix)]
    others = [path for path in sorted(directory.iterdir()) if (path / MANIFEST_NAME).is_file() and path not in numbered]
    if not numbered and not others:
        raise CheckpointNotFoundError(f"no checkpoint in {directory.absolute()}; give a directory that has some")
    return numbered + others


def _flaw(path: Path, mode: str) -> str | None:
    """Return why a checkpoint is not good, or None."""
    try:
        manifest = Manifest.read(path)
        find_extra(path, manifest)
        check_files(path, manifest, manifest.files, mode, os.cpu_count() or 1)
    except (AccelTrainerError, OSError) as error:
        return str(error)
    return None


def _list(directory: Path) -> int:
    for path in _find(directory):
        flaw = _flaw(path, "size")
        if flaw is not None:
            print(f"{path.name}  not good: {flaw}")
            continue
        manifest = Manifest.read(path)
        versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
        ranks = f"{manifest.world_size} process{'es' if manifest.world_size > 1 else ''}"
        size = f"{manifest.num_bytes / 2**20:,.1f} MiB in {len(manifest.files)} files"
        print(f"{path.name}  complete, {size}, {ranks}, {versions}")
    return 0


def _verify(directory: Path, mode: str) -> int:
    flaws = {path: _flaw(path, mode) for path in _find(directory)}
    for path, flaw in flaws.items():
        has_checksums = flaw is not None or Manifest.read(path).has_checksums
        print(f"{path.name}  {'good' if has_checksums else 'complete (it has no checksums)'}" if flaw is None else flaw)
    return 1 if any(flaw is not None for flaw in flaws.values()) else 0


def _newest_and_best(directory: Path, prefix: str) -> list[Path]:
    """Return the newest complete checkpoint, and the one that its Trainer called the best."""
    complete = (path for _, path in reversed(numbered_checkpoints(directory, prefix)) if is_complete(path))
    newest = next(complete, None)
    if newest is None:
        return []
    best = Manifest.read(newest).metadata.get("trainer", {}).get("best_step")
    return [newest] if best is None else [newest, directory / f"{prefix}{best}"]


def _prune(directory: Path, keep: int) -> int:
    lock = DirectoryLock.take(directory / LOCK_NAME)
    try:
        sweep(directory)
        removed = [
            path
            for prefix in _PREFIXES
            for path in retire(directory, keep, _newest_and_best(directory, prefix), prefix=prefix)
        ]
    finally:
        lock.release()
    for path in removed:
        print(f"removed {path.name}")
    print(f"{len(removed)} removed, the newest {keep} complete kept")
    return 0
