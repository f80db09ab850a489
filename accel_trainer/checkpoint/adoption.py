"""Weights that were saved anew in a checkpoint - in other shards, in one file, in another dtype - become its own."""

from __future__ import annotations

import dataclasses
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from accel_trainer.checkpoint.disk import fsync_path, read_json, write_durably
from accel_trainer.checkpoint.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    WEIGHT_FILES,
    FileEntry,
    Manifest,
    TensorEntry,
    check_files,
    hash_file,
    list_files,
    read_layout,
    refuse_extra_files,
)
from accel_trainer.checkpoint.safetensors_file import dtype_of
from accel_trainer.checkpoint.store import LOCK_NAME, DirectoryLock, publish_name, remove_tree, sweep
from accel_trainer.checkpoint.weights.into_model import describe_names
from accel_trainer.checkpoint.weights.weight_files import WeightFiles
from accel_trainer.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from accel_trainer.runtime.cores import usable_cores

_DESCRIPTIONS = ("config.json", "generation_config.json")
"""What `save_pretrained` writes beside weights."""


def adopt_weights(path: Path, *, takes_values: bool = False) -> list[str]:
    """Make the weights that lie in a checkpoint its own, and return the names of the files that are others now.

    The manifest and its marker are replaced with the directory, in one step, under the lock of the run. Everything but
    the weights is compared with its checksum first. A checkpoint that a resume has renamed to `_bad-...` gets its name
    back.

    Args:
        takes_values: also take a file whose names, dtypes and shapes are those that were saved, and whose bytes are
            not: damage looks like that, too.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or its save never ended.
        CheckpointLockedError: a run is saving beside it.
        CorruptCheckpointError: a file is not complete, or was changed and is none of the weights.
        IncompatibleCheckpointError: names or shapes are not those that the run had.
    """
    path = path.absolute()
    lock = DirectoryLock.take(path.parent / LOCK_NAME)
    try:
        sweep(path.parent, path.name)
        source = _find(path)
        before = Manifest.read(source)
        after = _with_weights(source, before, takes_values)
        changed = sorted(
            name for name in before.files.keys() | after.files.keys() if before.files.get(name) != after.files.get(name)
        )
        if changed or source != path:
            _publish(source, path, after)
        return changed
    finally:
        lock.release()


def _find(path: Path) -> Path:
    """Return the directory of a checkpoint, which may have been passed over."""
    if path.is_dir():
        return path
    passed_over = sorted(path.parent.glob(f"_bad-{path.name}-*"))
    if len(passed_over) == 1:
        return passed_over[0]
    hint = f"; name one of {', '.join(each.name for each in passed_over)}" if passed_over else ""
    raise CheckpointNotFoundError(f"{path} is no directory; give the checkpoint whose weights were saved anew{hint}")


def _with_weights(source: Path, before: Manifest, takes_values: bool) -> Manifest:
    """Return the manifest of a checkpoint with the weights that lie in it by now."""
    saved: dict[str, TensorEntry] = {}
    for file in filter(WEIGHT_FILES.fullmatch, before.tensors):
        saved |= before.tensors[file]
    if not saved:
        raise IncompatibleCheckpointError(
            f"{source} lists no weights under the names that save_pretrained gives them, with which those in it could "
            "be compared; adopt weights in a checkpoint-N of a Trainer"
        )
    weights = WeightFiles(source)
    _refuse_others(source, weights)
    _check_fit(source, saved, weights, before.metadata.get("tied", {}))
    names = {*weights.file_names(), weights.path.name, *_read_descriptions(source, before)}
    kept = {file: before.files[file] for file in before.files if not _may_change(file)}
    check_files(source, before, kept, "full", usable_cores())
    files = {file: hash_file(source / file, usable_cores()) for file in sorted(names)}
    tensors = {file: read_layout(source / file) for file in weights.file_names()}
    for file, entries in tensors.items():
        if not takes_values:
            _refuse_damage(source / file, before, files[file], entries)
    others = {file: dict(before.tensors[file]) for file in before.tensors.keys() & kept.keys()}
    after = dataclasses.replace(before, files=kept | files, tensors=tensors | others)
    refuse_extra_files(source, after)
    return after


def _may_change(name: str) -> bool:
    """Whether a file is one that `save_pretrained` writes."""
    return name in _DESCRIPTIONS or WEIGHT_FILES.fullmatch(name) is not None


def _read_descriptions(source: Path, before: Manifest) -> list[str]:
    """Return which descriptions of the model a checkpoint has; refuse those that are no JSON."""
    found = [name for name in _DESCRIPTIONS if name in before.files]
    for name in found:
        read_json(source / name, source)
    return found


def _refuse_damage(path: Path, before: Manifest, found: FileEntry, layout: Mapping[str, TensorEntry]) -> None:
    """Refuse a file whose names, dtypes and shapes are those that were saved, and whose bytes are not."""
    saved = before.files.get(path.name)
    if saved in (None, found) or saved.num_bytes != found.num_bytes or before.tensors.get(path.name) != layout:
        return
    raise CorruptCheckpointError(
        f"{path} has the names, dtypes and shapes that were saved, and other bytes, as a damaged file has; if you have "
        "changed the values yourself, adopt it with --values"
    )


def _refuse_others(source: Path, weights: WeightFiles) -> None:
    """Refuse weights that are no safetensors, and others beside them."""
    if weights.path.suffix == ".bin" or ".bin." in weights.path.name:
        raise IncompatibleCheckpointError(
            f"{weights.path} holds weights as pickles; save them as safetensors, and adopt those"
        )
    read = {*weights.file_names(), weights.path.name}
    others = [name for name in list_files(source) if WEIGHT_FILES.fullmatch(name) and name not in read]
    if others:
        raise IncompatibleCheckpointError(
            f"{source} holds {describe_names(others)} beside {weights.path.name}, which says nothing of them; remove "
            "the files that are not the weights, and adopt again"
        )


def _check_fit(source: Path, saved: Mapping[str, TensorEntry], weights: WeightFiles, tied: Mapping[str, str]) -> None:
    """Refuse weights of other names or shapes than those that were saved, or numbers of another kind."""
    # A tied parameter is stored under one of its names.
    expected = {tied.get(name, name): entry for name, entry in saved.items()}
    found = {tied.get(name, name): name for name in weights}
    flaws = [f"without {describe_names(lacking)}"] if (lacking := sorted(expected.keys() - found.keys())) else []
    flaws += [f"with {describe_names(more)}"] if (more := sorted(found.keys() - expected.keys())) else []
    for key in sorted(expected.keys() & found.keys()):
        entry, shape, dtype = expected[key], weights.shape(found[key]), weights.dtype(found[key])
        if shape != entry.shape or dtype.is_floating_point != dtype_of(entry.dtype).is_floating_point:
            flaws.append(f"with {key!r} as {dtype} {shape} in the place of {entry.dtype} {entry.shape}")
    if flaws:
        raise IncompatibleCheckpointError(
            f"the weights in {source} are {'; '.join(flaws[:3])}, and do not fit the optimizer's state and the rest of "
            "the checkpoint. Put those of the same model there, or begin a new run from these: give their directory "
            "as the model"
        )


def _publish(source: Path, path: Path, manifest: Manifest) -> None:
    """Give a directory with the same files and another manifest the name `path`, in one step."""
    # Two files cannot be replaced in one step, a directory can: a kill leaves the checkpoint as it was.
    staged = path.with_name(f"_tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        for name in list_files(source):
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            _link(source / name, staged / name)
        text = manifest.encode()
        write_durably(staged / MANIFEST_NAME, text)
        write_durably(staged / MARKER_NAME, Manifest.digest(text))
        for folder, _, _ in os.walk(staged):
            fsync_path(Path(folder))
        leftover = publish_name(staged, path)
    except BaseException:
        remove_tree(staged)
        raise
    for older in (leftover, source if source != path else None):
        if older is not None:
            remove_tree(older)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, and bring it to the disk: whoever saved it anew may not have."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a filesystem without hard links
        shutil.copy2(source, target, follow_symlinks=False)
    fsync_path(target)
