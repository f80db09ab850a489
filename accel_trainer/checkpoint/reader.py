"""A stored checkpoint, read: chosen among those of a directory, its manifest first, then files compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from accel_trainer.checkpoint.boxes import balance_bytes
from accel_trainer.checkpoint.disk import read_json
from accel_trainer.checkpoint.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    Manifest,
    check_checkpoint,
    check_files,
    refuse_extra_files,
    warn_of_writers,
)
from accel_trainer.checkpoint.safetensors_file import SafetensorsFile
from accel_trainer.checkpoint.store import PREFIX, numbered_checkpoints, pass_over
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from accel_trainer.runtime.cores import cores_of_rank
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_calls, gather_or_raise

Verify = Literal["full", "size", "off"]
"""The comparison of a file with the manifest before it is used: of contents, of the length, or none."""


def check_verify(verify: str) -> Verify:
    """Return `verify`."""
    if verify not in get_args(Verify):
        raise ConfigError(f"verify={verify!r}; expected 'full' (contents), 'size' (lengths) or 'off'")
    return verify  # type: ignore[return-value]


class StoredCheckpoint:
    """A complete checkpoint. Files are verified when they are first asked for, or all at once by `verify_together`.

    Raises:
        CheckpointNotFoundError: there is no manifest, or the save was never completed.
        CorruptCheckpointError: the manifest was changed, or there are files that it does not name.
        IncompatibleCheckpointError: a newer version wrote it.
    """

    def __init__(self, path: Path, process: ProcessContext, verify: Verify = "full") -> None:
        self.path = path
        self.verify = verify
        self.manifest = Manifest.read(path)
        self.process = process
        self._verified: set[str] = set()
        if verify != "off":
            refuse_extra_files(path, self.manifest)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.files

    def file(self, name: str) -> Path:
        """Return the path of a file once its contents were verified."""
        if name not in self:
            raise CheckpointNotFoundError(f"{(self.path / name).absolute()} is missing; the checkpoint is incomplete")
        self.check([name])
        return self.path / name

    def check(self, names: Iterable[str]) -> None:
        """Verify files, in parallel, that have not been verified yet; see `check_files` for the errors."""
        waiting = [name for name in dict.fromkeys(names) if name not in self._verified]
        # This rank's share of the node's cores; more than 16 readers do not speed up one disk.
        num_threads = min(16, cores_of_rank(self.process.local_world_size))
        check_files(self.path, self.manifest, waiting, self.verify, num_threads)
        self._verified.update(waiting)

    def verify_together(self, names: Iterable[str] | None = None) -> None:
        """Verify all files, or those that the ranks will read, each once per node. Collective; all raise alike."""
        flaw = self.find_flaw_together(names)
        if flaw is not None:
            raise CorruptCheckpointError(flaw)

    def find_flaw_together(self, names: Iterable[str] | None = None) -> str | None:
        """As `verify_together`, and return the first flaw, the same on all ranks; None when all is well."""
        section = f"verification of {self.path}"
        wanted = [name for name in (self.manifest.files if names is None else names) if name in self.manifest.files]
        if self.verify == "off":  # whoever re-sharded the weights has replaced some: their readers look for themselves
            wanted = [name for name in wanted if (self.path / name).exists()]
        # A rank knows only what it will read itself; with the others' lists, each file is hashed once per node.
        asked = gather_or_raise(self.process, section, None, wanted)

        def find_flaw() -> str | None:
            try:
                self.check(self._share(asked))
            except CorruptCheckpointError as found:
                return str(found)
            return None

        # A flaw is voted on, an error of the system is raised: a disk that does not answer is no reason to quarantine.
        flaws = gather_calls(self.process, section, find_flaw)
        # Also those that another rank of the node has compared: it reads the same disk.
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
    """Open a checkpoint on every rank; see `StoredCheckpoint`. Collective: all can read its manifest, or all raise."""
    checked, opened = check_verify(verify), list[StoredCheckpoint]()

    def open_here() -> str | None:
        stored = StoredCheckpoint(Path(path), process, checked)
        warn_of_writers(stored.path)
        opened.append(stored)
        return stored.manifest.node_save

    saves = {save: rank for rank, save in enumerate(gather_calls(process, f"load of {path}", open_here)) if save}
    if len(saves) > 1:
        raise CorruptCheckpointError(
            f"the disks of the nodes hold parts of {len(saves)} saves as {path}, seen by ranks "
            f"{', '.join(map(str, sorted(saves.values())))}: one of them is of another run. Bring the disks of one run "
            "together, or remove it on all nodes, and an older one is taken"
        )
    return opened[0]


# No lambdas: an Accelerator that holds a kind of checkpoints is pickled by name.
def _never(path: Path) -> bool:
    return False


def _accept(path: Path) -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointKind:
    """The checkpoints that a product numbers, and those of other libraries, without a manifest, that it reads."""

    prefix: str = PREFIX
    """Before the number in a name."""
    reads_without_manifest: Callable[[Path], bool] = _never
    """Whether a directory without a manifest is one of another library."""
    check_without_manifest: Callable[[Path], None] = _accept
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
        return {"full": "contents verified", "size": "lengths verified", "off": "not verified"}[self.stored.verify]

    def describe(self, begin: str, facts: Sequence[str]) -> str:
        """Return a line for the log that begins with `begin`: the checkpoint, facts, and why no newer one was taken."""
        named = ", as named" if self.is_named else ""
        passed_over = (f"passed over {line}" for line in self.passed_over)
        return "; ".join([f"{begin} from {self.path}{named}", *facts, *passed_over])


def has_manifest(path: Path) -> bool:
    """Whether accel_trainer wrote a checkpoint, be it incomplete."""
    return (path / MANIFEST_NAME).exists() or (path / MARKER_NAME).exists()


def choose_newest(
    directory: Path, verify: Verify, kind: CheckpointKind, passed_over: list[str], missing: AccelTrainerError
) -> Path:
    """Return the newest checkpoint complete by names and lengths; bad ones join `passed_over`. On rank 0."""
    seen = {line.partition(":")[0] for line in passed_over}
    for _, path in reversed(numbered_checkpoints(directory, kind.prefix)):
        if path.name in seen:
            continue
        try:
            if not has_manifest(path) and kind.reads_without_manifest(path):
                kind.check_without_manifest(path)
            elif verify == "off":
                Manifest.read(path)
            else:
                # Lengths alone, by rank 0: the ranks share out the contents later, in find_flaw_together().
                check_checkpoint(path, "size")
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
