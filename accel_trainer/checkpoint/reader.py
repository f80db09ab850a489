"""A checkpoint on disk that is read: its manifest first, then files whose contents have been compared with it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from accel_trainer.checkpoint.format.manifest import Manifest, parse_json
from accel_trainer.checkpoint.format.safetensors_file import SafetensorsFile
from accel_trainer.checkpoint.format.verification import check_files, find_extra, warn_of_writers
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from accel_trainer.runtime.cores import cores_of_rank
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise, raise_together

__all__ = ["StoredCheckpoint", "Verify", "check_verify", "open_checkpoint"]

Verify = Literal["full", "size", "off"]
"""How much of a file is compared with the manifest before it is used: contents, length, or nothing."""


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
        self._process = process
        self._verified: set[str] = set()
        if verify != "off":
            find_extra(path, self.manifest)

    @property
    def process(self) -> ProcessContext:
        """The rank that reads."""
        return self._process

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.files if self.manifest.has_checksums else (self.path / str(name)).is_file()

    def file(self, name: str) -> Path:
        """Return the path of a file whose contents are what was written.

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
        check_files(self.path, self.manifest, waiting, self.verify, self._num_threads)
        self._verified.update(waiting)

    @property
    def _num_threads(self) -> int:
        """This rank's part of the node's cores."""
        return min(16, cores_of_rank(self._process.local_world_size))

    def verify_together(self, names: Iterable[str] | None = None) -> None:
        """Verify what the ranks are about to read: each file once per node, shared out over its ranks. Collective.

        Args:
            names: files that this rank will read; None means all.

        Raises:
            CorruptCheckpointError: a rank found a file to be bad; all ranks raise.
            CheckpointNotFoundError: a file is missing.
            ProcessGroupError: another rank cannot read a file.
        """
        flaw = self.find_flaw_together(names)
        if flaw is not None:
            raise CorruptCheckpointError(flaw)

    def find_flaw_together(self, names: Iterable[str] | None = None) -> str | None:
        """As `verify_together`, and return what is corrupt, the same on all ranks; None when all is well."""
        section = f"verification of {self.path}"
        wanted = [name for name in (self.manifest.files if names is None else names) if name in self.manifest.files]
        asked = gather_or_raise(self._process, section, None, wanted)
        flaw, error = None, None
        try:
            self.check(self._share(asked))
        except CorruptCheckpointError as found:
            flaw = str(found)
        except Exception as raised:
            error = raised
        flaws = gather_or_raise(self._process, section, error, flaw)
        self._verified.update(wanted)
        return next((flaw for flaw in flaws if flaw is not None), None)

    def _share(self, asked: list[list[str]]) -> list[str]:
        """Return what this rank verifies of what the ranks of its node will read: about as many bytes as the others."""
        files, process = self.manifest.files, self._process
        first = process.rank - process.local_rank
        node = range(first, min(first + process.local_world_size, process.world_size))
        loads = dict.fromkeys(node, 0)
        share = []
        together = {name for rank in node for name in asked[rank]}
        for name in sorted(together, key=lambda name: (-files[name].num_bytes, name)):
            rank = min(loads, key=lambda rank: (loads[rank], rank))
            # A byte more, so that many small files spread too.
            loads[rank] += files[name].num_bytes + 1
            if rank == process.rank:
                share.append(name)
        return share

    def tensors(self, name: str) -> SafetensorsFile:
        """Return the tensors of a safetensors file by name, each read when it is asked for."""
        return SafetensorsFile(self.file(name))

    def json(self, name: str) -> Any:
        """Return what `write_json` was given."""
        path = self.file(name)
        return parse_json(path.read_bytes(), path)


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
