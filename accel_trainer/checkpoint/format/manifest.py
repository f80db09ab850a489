"""The manifest of a checkpoint: every file with its size and checksum, every tensor with its box in the full one.

`COMMITTED` beside it, written last, holds the sha256 of `manifest.json`. Needs no torch: the command line reads it.

The format's version goes up by one whenever an earlier reader would misread a checkpoint; that reader refuses it then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from accel_trainer.checkpoint.format.boxes import Box
from accel_trainer.checkpoint.format.checksums import CHECKSUM, CHECKSUMS, FileEntry
from accel_trainer.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "MARKER_NAME",
    "Manifest",
    "TensorEntry",
    "check_name",
    "parse_json",
]

FORMAT_VERSION = 3
"""Version 1 had neither checksums nor a marker, and version 2 had sha256; they are read, and never written."""

MANIFEST_NAME = "manifest.json"
MARKER_NAME = "COMMITTED"
# Parsed JSON takes several times its text: a damaged or forged length must not exhaust the memory.
MAX_MANIFEST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a safetensors file."""

    dtype: str
    """As safetensors names it: "F32", "BF16"."""
    shape: tuple[int, ...]
    """Of the full tensor."""
    offsets: tuple[int, ...] | None = None
    """Where this shard begins in the full tensor; None when the file holds all of it."""
    sizes: tuple[int, ...] | None = None
    """Shape of this shard."""

    @property
    def box(self) -> Box:
        """The box of the full tensor that the file holds."""
        return Box.full(self.shape) if self.offsets is None else Box(self.offsets, self.sizes or ())


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    world_size: int
    step: int | None = None
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, TensorEntry]] = field(default_factory=dict)
    """By file, then by tensor."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The saver's own entries: plain JSON."""
    versions: Mapping[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    checksum: str = CHECKSUM
    """The kind of the files' checksums: a key of `checksums.CHECKSUMS`."""

    @property
    def has_checksums(self) -> bool:
        """Whether the contents can be verified; not in format 1."""
        return self.format_version > 1

    def reserves(self, name: str) -> bool:
        """Whether a file of this name, which the manifest does not list, may not lie in the checkpoint.

        Any, unless the writer said by `metadata["reserved_names"]`, shell patterns, which names its readers look for.
        """
        patterns = self.metadata.get("reserved_names")
        return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, the manifest not counted."""
        return sum(entry.num_bytes for entry in self.files.values())

    def encode(self) -> bytes:
        """Return the text of `manifest.json`."""
        data = {
            "format_version": self.format_version,
            "step": self.step,
            "world_size": self.world_size,
            "versions": dict(self.versions),
            "metadata": dict(self.metadata),
            "checksum": self.checksum,
            "files": {
                name: {
                    "bytes": entry.num_bytes,
                    "checksum": entry.checksum,
                    **({"blocks": list(entry.blocks)} if entry.blocks else {}),
                }
                for name, entry in sorted(self.files.items())
            },
            "tensors": {
                file: {name: _encode_tensor(entry) for name, entry in tensors.items()}
                for file, tensors in sorted(self.tensors.items())
            },
        }
        return (json.dumps(data, indent=1) + "\n").encode()

    @staticmethod
    def digest(text: bytes) -> bytes:
        """Return the content of the marker that commits this text of a manifest."""
        return hashlib.sha256(text).hexdigest().encode() + b"\n"

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a checkpoint and compare it with the marker.

        Raises:
            CheckpointNotFoundError: there is none, or the save was never completed.
            CorruptCheckpointError: it was changed after it was committed, or names files that no checkpoint may name.
            IncompatibleCheckpointError: its format is newer than this version reads.
        """
        path = directory / MANIFEST_NAME
        if not path.is_file():
            raise CheckpointNotFoundError(f"no checkpoint in {directory.absolute()}: {MANIFEST_NAME} is missing")
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CorruptCheckpointError(f"{path.absolute()} has {path.stat().st_size} bytes; it is no manifest")
        text = path.read_bytes()
        digest = hashlib.sha256(text).hexdigest()
        marker = directory / MARKER_NAME
        committed = marker.read_text(errors="replace").strip() if marker.is_file() else None
        if committed not in (None, digest):
            _read_object(text, path)
            raise CorruptCheckpointError(
                f"{path.absolute()} was changed after the checkpoint was committed: its sha256 is {digest}, and "
                f"{MARKER_NAME} has {str(committed)[:80]!r}; load another checkpoint"
            )
        data = _read_object(text, path)
        if committed is None and data.get("format_version") != 1:
            raise CheckpointNotFoundError(
                f"{directory.absolute()} is incomplete: {MARKER_NAME} is missing, so its save never ended; load another"
            )
        try:
            return cls._decode(data)
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise CorruptCheckpointError(
                f"{path.absolute()} is not a manifest ({type(error).__name__}: {error}); load another checkpoint"
            ) from error

    @classmethod
    def _decode(cls, data: dict[str, Any]) -> Manifest:
        if data["format_version"] == 1:
            return cls(
                world_size=int(data["world_size"]),
                metadata={"units": data["units"]},
                versions={"torch": data["torch"]},
                format_version=1,
            )
        for name in (*data["files"], *data["tensors"]):
            check_name(name)
        key = "sha256" if data["format_version"] == 2 else "checksum"
        return cls(
            world_size=int(data["world_size"]),
            step=data["step"],
            files={
                name: FileEntry(int(entry["bytes"]), str(entry[key]), tuple(entry.get("blocks", ())))
                for name, entry in data["files"].items()
            },
            tensors={
                file: {name: _decode_tensor(entry) for name, entry in tensors.items()}
                for file, tensors in data["tensors"].items()
            },
            metadata=dict(data["metadata"]),
            versions=dict(data["versions"]),
            format_version=int(data["format_version"]),
            checksum=data.get("checksum", "sha256"),
        )


def _encode_tensor(entry: TensorEntry) -> dict[str, Any]:
    data: dict[str, Any] = {"dtype": entry.dtype, "shape": list(entry.shape)}
    if entry.offsets is not None:
        data |= {"offsets": list(entry.offsets), "sizes": list(entry.sizes or ())}
    return data


def _decode_tensor(data: dict[str, Any]) -> TensorEntry:
    offsets = tuple(data["offsets"]) if "offsets" in data else None
    return TensorEntry(data["dtype"], tuple(data["shape"]), offsets, tuple(data["sizes"]) if offsets else None)


def _read_object(text: bytes, path: Path) -> dict[str, Any]:
    """Return a manifest's content when its format is one that this version reads."""
    data = parse_json(text, path)
    version = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or version < 1:
        raise CorruptCheckpointError(f"{path.absolute()} has no format version; it is not a manifest of accel_trainer")
    if version > FORMAT_VERSION:
        raise IncompatibleCheckpointError(
            f"{path.absolute()} has format version {version} and this version reads 1 to {FORMAT_VERSION}; install the "
            "version of accel_trainer that wrote it"
        )
    checksum = data.get("checksum")
    if version > 2 and checksum not in tuple(CHECKSUMS):
        raise IncompatibleCheckpointError(
            f"{path.absolute()} has checksums of the kind {checksum!r} and this version knows {', '.join(CHECKSUMS)}; "
            "install the version of accel_trainer that wrote it"
        )
    return data


def check_name(name: str) -> None:
    """Refuse a file name that is not a plain relative path below the checkpoint.

    Raises:
        ConfigError: it is absolute, climbs with `..`, or is the manifest's or the marker's own.
    """
    parts = PurePosixPath(name).parts
    is_plain = parts and not name.startswith("/") and "\\" not in name and "\0" not in name
    if not is_plain or any(part in ("..", ".") for part in name.split("/")) or "/".join(parts) != name:
        raise ConfigError(f"{name!r} is not a file name inside a checkpoint; use a relative path without '..'")
    if name in (MANIFEST_NAME, MARKER_NAME):
        raise ConfigError(f"{name!r} is written by the store itself; choose another name")


def parse_json(text: bytes, path: Path) -> Any:
    """Return the JSON in `text`; a key that stands twice is an error.

    Raises:
        CorruptCheckpointError: it is no JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path.absolute()} is not JSON ({error}); load another checkpoint") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return data
