"""A stored checkpoint, read: its manifest first, then files whose contents were compared with it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from accel_trainer.checkpoint.format.boxes import balance_bytes
from accel_trainer.checkpoint.format.manifest import Manifest
from accel_trainer.checkpoint.format.regular_files import read_json
from accel_trainer.checkpoint.format.safetensors_file import SafetensorsFile
from accel_trainer.checkpoint.format.verification import check_files, refuse_extra_files, warn_of_writers
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from accel_trainer.runtime.cores import cores_of_rank
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise, raise_together

__all__ = ["StoredCheckpoint", "Verify", "check_verify", "open_checkpoint"]

Verify = Literal["full", "size", "off"]
"""The comparison of a file with the manifest before it is used: of contents, of the length, or none."""


def check_verify(verify: str) -> Verify:
    """Return `verify`.

    Raises:
        ConfigError: it is not "full", "size" or "off".
    """
    if verify not in get_args(Verify):
        raise ConfigError(f"verify={verify!r}; expected 'full' (contents), 'size' (lengths) or 'off'")
    return verify  # type: ignore[return-value]


class StoredCheckpoint:
    """A complete checkpoint. Files are verified when they are first asked for, or all at once by `verify_together`."""

    def __init__(self, path: Path, process: ProcessContext, verify: Verify = "full") -> None:
        """Read the manifest.

        Raises:
            CheckpointNotFoundError: there is no manifest, or the save was never completed.
            CorruptCheckpointError: the manifest was changed, or there are files that it does not name.
            IncompatibleCheckpointError: a newer version wrote it.
        """
        self.path = path
        self.verify = verify
        self.manifest = Manifest.read(path)
        self.process = process
        self._verified: set[str] = set()
        if verify != "off":
            refuse_extra_files(path, self.manifest)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.files if self.manifest.has_checksums else (self.path / str(name)).is_file()

    def file(self, name: str) -> Path:
        """Return the path of a file once its contents were verified.

        Raises:
            CheckpointNotFoundError: the checkpoint has no such file, or it is gone.
            CorruptCheckpointError: it was changed.
        """
        if name not in self:
            raise CheckpointNotFoundError(f"{(self.path / name).absolute()} is missing; the checkpoint is incomplete")
        self.check([name])
        return self.path / name

    def check(self, names: Iterable[str]) -> None:
        """Verify files, in parallel, that have not been verified yet; see `file` for the errors."""
        waiting = [name for name in dict.fromkeys(names) if name not in self._verified]
        # This rank's share of the node's cores; more than 16 readers do not speed up one disk.
        num_threads = min(16, cores_of_rank(self.process.local_world_size))
        check_files(self.path, self.manifest, waiting, self.verify, num_threads)
        self._verified.update(waiting)

    def verify_together(self, names: Iterable[str] | None = None) -> None:
        """Verify the files that the ranks will read: each once per node, balanced over its ranks. Collective.

        Args:
            names: files that this rank will read; None means all.

        Raises:
            CorruptCheckpointError: a rank found a file to be bad; all ranks raise.
            CheckpointNotFoundError, ProcessGroupError: a file is missing, or another rank cannot read one.
        """
        flaw = self.find_flaw_together(names)
        if flaw is not None:
            raise CorruptCheckpointError(flaw)

    def find_flaw_together(self, names: Iterable[str] | None = None) -> str | None:
        """As `verify_together`, and return the first flaw, the same on all ranks; None when all is well."""
        section = f"verification of {self.path}"
        wanted = [name for name in (self.manifest.files if names is None else names) if name in self.manifest.files]
        if self.verify == "off":  # whoever re-sharded the weights has replaced some: their readers look for themselves
            wanted = [name for name in wanted if (self.path / name).exists()]
        asked = gather_or_raise(self.process, section, None, wanted)
        flaw, error = None, None
        try:
            self.check(self._share(asked))
        except CorruptCheckpointError as found:
            flaw = str(found)
        except Exception as raised:
            error = raised
        flaws = gather_or_raise(self.process, section, error, flaw)
        self._verified.update(wanted)
        return next((flaw for flaw in flaws if flaw is not None), None)

    def _share(self, asked: list[list[str]]) -> list[str]:
        """Return the files that this rank verifies of those that the ranks of its node will read."""
        process = self.process
        first = process.rank - process.local_rank
        node = range(first, min(first + process.local_world_size, process.world_size))
        together = sorted({name for rank in node for name in asked[rank]})
        # A byte more, so that many small files spread too.
        takers = balance_bytes([self.manifest.files[name].num_bytes + 1 for name in together], len(node))
        return [name for name, taker in zip(together, takers, strict=True) if node[taker] == process.rank]

    def tensors(self, name: str) -> SafetensorsFile:
        """Return the tensors of a safetensors file by name, each read when it is asked for."""
        return SafetensorsFile(self.file(name))

    def json(self, name: str) -> Any:
        """Return the data that `write_json` was given."""
        return read_json(self.file(name), self.path)


def open_checkpoint(path: str | Path, process: ProcessContext, verify: str = "full") -> StoredCheckpoint:
    """Open a checkpoint on every rank. Collective: all of them can read its manifest, or all raise.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError: see `StoredCheckpoint`.
        ProcessGroupError: another rank cannot read it.
        ConfigError: `verify` is unknown.
    """
    checked = check_verify(verify)
    with raise_together(process, f"load of {path}"):
        stored = StoredCheckpoint(Path(path), process, checked)
        warn_of_writers(stored.path)
    return stored
