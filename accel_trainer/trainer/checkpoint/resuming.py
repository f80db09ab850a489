"""Where a Trainer resumes: which checkpoint, verified before anything is loaded, and at which sample."""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from accel_trainer import logging
from accel_trainer.checkpoint.commit.rename import recover_target
from accel_trainer.checkpoint.commit.retention import numbered_checkpoints, quarantine
from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from accel_trainer.checkpoint.format.verification import check_files, find_extra
from accel_trainer.checkpoint.reader import StoredCheckpoint, open_checkpoint
from accel_trainer.data.loader import PreparedDataLoader
from accel_trainer.data.plan import mix_seed
from accel_trainer.data.position import Position
from accel_trainer.errors import (
    AccelTrainerError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from accel_trainer.runtime.fault_injection import fault_point
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise, raise_together
from accel_trainer.trainer.checkpoint.run_metrics import RunFigures, UpdateNote
from accel_trainer.trainer.running_trainer import CheckpointingTrainer

__all__ = ["PREFIX", "Resumption", "current_position", "describe_progress", "open_named", "select_checkpoint"]

logger = logging.get_logger(__name__)

PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"
STATE_NAME = "trainer_state.json"
_READ_BY_RANK_0 = re.compile(r"(model|pytorch_model|adapter_model)[^/]*|optimizer\.bin")
"""Of a sharded Trainer's checkpoint; the other ranks are sent their parts."""
_RANDOM_STREAMS = re.compile(r"rng_state(?:_(\d+))?\.pth")


@dataclass
class Resumption:
    """The checkpoint that a run goes on from, and where in the data that is."""

    path: Path
    manifest: Manifest | None
    """None for a checkpoint that accel_trainer did not write."""
    passed_over: list[str] = field(default_factory=list)
    """Newer ones that are not good, each with the reason."""
    epoch: int | None = None
    """The epoch that the run goes on in; None where only the number of updates is known."""
    steps_left: int = 0
    """Micro-batches of that epoch that are left to each rank."""
    is_named: bool = False
    """Whether it was given by its path, so that newer ones were not looked for."""
    noted_update: int | None = None
    """The last update that the run which was stopped has taken note of."""

    def lost_steps(self, step: int) -> int | None:
        """Return how many updates after `step` that run is known to have done; None where nothing tells."""
        passed_over = [int(line.partition(":")[0].removeprefix(PREFIX)) for line in self.passed_over]
        known = [update for update in (self.noted_update, *passed_over) if update is not None]
        return max(0, max(known) - step) if known else None

    @property
    def progress(self) -> Mapping[str, Any]:
        """What `describe_progress` said when the checkpoint was written."""
        progress: Mapping[str, Any] = {} if self.manifest is None else self.manifest.metadata.get("trainer", {})
        return progress

    @property
    def num_writers(self) -> int | None:
        """How many processes wrote it; None where nothing tells."""
        if self.manifest is not None:
            return self.manifest.world_size
        return sum(1 for _ in self.path.glob("rng_state*.pth")) or None

    def is_same_world(self, process: ProcessContext) -> bool:
        """Whether as many processes wrote it as will read it."""
        return self.num_writers in (None, process.world_size)

    def take_position(self, trainer: CheckpointingTrainer, loader: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Have the loader's next pass begin after the samples that were trained; return the lengths of the run.

        With a changed number of samples in an update, the run ends after as many samples as it would have.

        Args:
            values: what upstream's `set_initial_training_values` returns, for a run from the beginning.

        Raises:
            IncompatibleCheckpointError: the data is other, or the loader cannot begin there.
        """
        self.epoch = None
        saved = self.progress.get("position")
        if saved is None or not isinstance(loader, PreparedDataLoader):
            return values
        args, (num_epochs, updates, examples, samples, batch, steps, max_steps) = trainer.args, values
        position = Position.read(saved)
        if position.is_complete:
            position = Position(epoch=position.epoch + 1, seed=position.seed)
        self.epoch, self.steps_left = position.epoch, steps
        if args.ignore_data_skip:
            return values
        try:
            loader.load_state_dict(position.to_dict())
        except IncompatibleCheckpointError as error:
            raise IncompatibleCheckpointError(
                f"{self.path}: {error}. With ignore_data_skip=True training goes on at the beginning of the epoch"
            ) from error
        done = self.progress["global_step"]
        length = _length(loader)
        if length is None:
            self.steps_left = max(steps - position.steps, (max_steps - done) * args.gradient_accumulation_steps)
            return values
        self.steps_left = length
        if self.progress["update_batch"] != batch:
            left = math.ceil(length / args.gradient_accumulation_steps)
            if args.max_steps > 0:
                num_epochs = position.epoch + 1 + math.ceil(max(0, max_steps - done - left) / updates)
            else:
                max_steps = done + max_steps - (position.epoch + 1) * updates + left
            logger.warning(
                "%s was written by a run whose updates had %d samples, and this run's have %d: it goes on at the same "
                "sample and ends after update %d; set batch size and accumulation so that their product with the "
                "number of processes stays, to repeat the interrupted run",
                self.path, self.progress["update_batch"], batch, max_steps,
            )  # fmt: skip
        return num_epochs, updates, examples, samples, batch, steps, max_steps

    def restores_random_streams(self, trainer: CheckpointingTrainer) -> bool:
        """Whether each rank is to go on with its streams as they were saved; seeds new ones where ranks are others.

        Raises:
            CheckpointNotFoundError: the checkpoint should have this rank's streams and has not.
        """
        process, step = trainer.accelerator.process, trainer.state.global_step
        name = f"rng_state_{process.rank}.pth" if process.is_distributed else "rng_state.pth"
        if not self.is_same_world(process):
            set_seed(mix_seed(trainer.args.seed, step, process.rank) % 2**32)
            return False
        if (self.path / name).is_file():
            return True
        if self.manifest is not None and self.progress.get("has_training_state", True):
            raise CheckpointNotFoundError(
                f"{(self.path / name).absolute()} is missing, the random streams of rank {process.rank}; resume from "
                "another checkpoint"
            )
        logger.warning("%s has no %s: random streams do not go on as they were", self.path, name)
        return False

    def check_by_updates(self, trainer: CheckpointingTrainer, place: float) -> None:
        """Warn where a position by the number of updates, in epochs, is not the one that the checkpoint tells."""
        state = trainer.state
        if state.epoch is None or trainer.args.ignore_data_skip:
            return
        told, update = state.epoch, state.num_train_epochs / max(state.max_steps, 1)
        # Batches of another size cut the end of an epoch elsewhere: the same samples can be up to an update apart.
        if abs(told - place) > max(told % 1, place % 1) * update + 1e-6:
            logger.warning(
                "%s was written after %.3f epochs, and its number of updates is %.3f epochs of this run: batch size, "
                "accumulation, number of processes or dataset are others. The data goes on at the latter, and samples "
                "are repeated or left out; resume with as many samples in an update, or with ignore_data_skip=True",
                self.path, told, place,
            )  # fmt: skip

    def describe(self, trainer: CheckpointingTrainer) -> str:
        """Return one line: from where the run goes on, why not from a newer one, what is exact, and what is lost."""
        step, readers = trainer.state.global_step, trainer.accelerator.process.world_size
        parts = [f"resuming at update {step} from {self.path}{', as named' if self.is_named else ''}"]
        verified = "contents verified"
        if self.manifest is None:
            verified = "not written by accel_trainer, contents not verified"
        if self.num_writers is not None:
            verified = f"written by {self.num_writers} process(es), read by {readers}, {verified}"
        parts.append(verified)
        if not self.progress.get("has_training_state", True):
            parts.append("weights only: optimizer, schedule and random streams are new")
        elif self.num_writers == readers:
            parts.append("random streams restored")
        else:
            parts.append(f"random streams new, from seed {trainer.args.seed}, update and rank")
        if trainer.args.ignore_data_skip:
            parts.append("data begins its epoch again")
        else:
            parts.append("data goes on at the next sample" if self.epoch is not None else "data by number of updates")
        if lost := self.lost_steps(step):
            parts.append(f"{lost} update(s) that were done after it are lost, and done again")
        return "; ".join([*parts, *(f"passed over {line}" for line in self.passed_over)])


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def current_position(loader: Any) -> dict[str, Any] | None:
    """Return the state of a training loader; None for one that the Accelerator did not prepare."""
    return loader.state_dict() if isinstance(loader, PreparedDataLoader) else None


def describe_progress(trainer: CheckpointingTrainer) -> dict[str, Any]:
    """Return, as plain JSON, how far a run is: for the manifest of the checkpoint that it writes."""
    args = trainer.args
    position = trainer._position or current_position(trainer.callback_handler.train_dataloader)
    if position is not None:
        try:
            json.dumps(position)
        except TypeError:  # what the dataset says of itself: it is read again up to the sample instead
            position["dataset_state"] = None
    return {
        "global_step": trainer.state.global_step,
        "best_step": trainer.state.best_global_step,
        "update_batch": trainer.get_total_train_batch_size(args),
        "has_training_state": not args.save_only_model,
        "position": position,
    }


# --- choosing and verifying ------------------------------------------------------------------------------------------


def select_checkpoint(
    given: bool | str | os.PathLike[str], trainer: CheckpointingTrainer, figures: RunFigures
) -> Resumption:
    """Return the checkpoint to resume from, its contents verified. Collective: rank 0 decides for all.

    Args:
        given: True is the newest good one in `args.output_dir`: others are renamed to `_bad-...` with a warning. A path
            is taken as it is.
        figures: are told how long it took.

    Raises:
        ConfigError: there is none in the directory.
        CheckpointNotFoundError, CorruptCheckpointError: the named one is not whole; none of several is good.
        IncompatibleCheckpointError: a newer version wrote it.
        ProcessGroupError: another rank cannot read it.
    """
    run_dir = Path(trainer.args.output_dir)
    if given is True:
        resumption = _select_newest(run_dir, trainer, figures)
    else:
        resumption = _select_named(Path(str(given)), trainer, figures)
        resumption.is_named = True
    is_own = resumption.path.absolute().parent == run_dir.absolute()
    note = UpdateNote.read(run_dir) if is_own else None
    resumption.noted_update = gather_or_raise(trainer.accelerator.process, f"load of {resumption.path}", None, note)[0]
    if resumption.manifest is None and resumption.path.is_dir():
        logger.warning(
            "%s was not written by accel_trainer: it has no %s, so that its contents cannot be verified",
            resumption.path, MANIFEST_NAME,
        )  # fmt: skip
    return resumption


def open_named(path: Path, process: ProcessContext) -> StoredCheckpoint | None:
    """Open a checkpoint that was named; None for one without manifest. Collective.

    Raises:
        As `select_checkpoint`.
    """
    with raise_together(process, f"load of {path}"):
        if process.is_local_main:
            recover_target(path)
    is_ours = any(gather_or_raise(process, f"load of {path}", None, _is_ours(path)))
    return open_checkpoint(path, process) if is_ours else None


def _select_named(path: Path, trainer: CheckpointingTrainer, figures: RunFigures) -> Resumption:
    with figures.resuming("select"):
        stored = open_named(path, trainer.accelerator.process)
    if stored is None:
        return Resumption(path, None)
    fault_point("load.verify", stored.manifest.step)
    with figures.resuming("verify"):
        stored.verify_together(_files_to_read(stored.manifest, trainer))
    return Resumption(path, stored.manifest)


def _is_ours(path: Path) -> bool:
    return (path / MANIFEST_NAME).exists() or (path / MARKER_NAME).exists()


def _files_to_read(manifest: Manifest, trainer: CheckpointingTrainer) -> Iterator[str]:
    """Yield the files that this rank reads."""
    process = trainer.accelerator.process
    for name in manifest.files:
        streams = _RANDOM_STREAMS.fullmatch(name)
        if streams is not None:
            if int(streams[1] or 0) == process.rank:
                yield name
        elif process.is_main or not trainer.is_sharded or not _READ_BY_RANK_0.fullmatch(name):
            yield name


def _select_newest(directory: Path, trainer: CheckpointingTrainer, figures: RunFigures) -> Resumption:
    process: ProcessContext = trainer.accelerator.process
    section = f"selection of a checkpoint in {directory}"
    passed_over: list[str] = []
    while True:
        fault_point("load.select")
        with figures.resuming("select"):
            choice, error = None, None
            if process.is_main:
                try:
                    choice = _choose(directory, passed_over)
                except (AccelTrainerError, OSError) as raised:
                    error = raised
            path, passed_over = gather_or_raise(process, section, error, (choice, passed_over))[0]
            if not any(gather_or_raise(process, section, None, _is_ours(path))):
                return Resumption(path, None, passed_over)
            stored: StoredCheckpoint = open_checkpoint(path, process)
        fault_point("load.verify", stored.manifest.step)
        with figures.resuming("verify"):
            flaw = stored.find_flaw_together(_files_to_read(stored.manifest, trainer))
        if flaw is None:
            return Resumption(path, stored.manifest, passed_over)
        if process.is_main:
            _pass_over(path, flaw, passed_over)


def _choose(directory: Path, passed_over: list[str]) -> Path:
    """Return the newest checkpoint that is whole as far as names and lengths tell; rank 0 calls it."""
    seen = {line.partition(":")[0] for line in passed_over}
    for _, path in reversed(numbered_checkpoints(directory, PREFIX)):
        if path.name in seen:
            continue
        try:
            _check_outline(path)
            return path
        except (CheckpointNotFoundError, CorruptCheckpointError) as flaw:
            _pass_over(path, str(flaw), passed_over)
    bad = sorted(path.name for path in directory.glob(f"_bad-{PREFIX}*")) if directory.is_dir() else []
    if bad or passed_over:
        raise CorruptCheckpointError(
            f"none of the checkpoints in {directory.absolute()} is good; those that are not are kept: "
            f"{', '.join([*bad, *passed_over][:5])}. Restore one from a copy, or begin anew in another directory"
        )
    raise ConfigError(
        f"No valid checkpoint found in output directory ({directory}): it has no {PREFIX}N; train without "
        "resume_from_checkpoint first"
    )


def _pass_over(path: Path, reason: str, passed_over: list[str]) -> None:
    quarantine(path, reason)
    passed_over.append(f"{path.name}: {reason}")


def _check_outline(path: Path) -> None:
    """Refuse a checkpoint that was not written to its end, or was cut.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError: what is missing, or has not the length that it should.
    """
    if _is_ours(path):
        manifest = Manifest.read(path)
        find_extra(path, manifest)
        check_files(path, manifest, manifest.files, "size", 1)
        return
    state = path / STATE_NAME
    if not state.is_file():
        raise CheckpointNotFoundError(f"{state.absolute()} is missing, which is written last; its save never ended")
    try:
        json.loads(state.read_bytes())
    except ValueError as error:
        raise CorruptCheckpointError(f"{state.absolute()} is not JSON ({error}); its save never ended") from error
    for file in sorted(path.iterdir()):
        is_torn = file.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(file)
        if is_torn or (file.suffix == ".safetensors" and not _is_safetensors(file)):
            raise CorruptCheckpointError(f"{file.absolute()} ends too early; its save never ended")


def _is_safetensors(file: Path) -> bool:
    try:
        with safe_open(file, "pt"):
            return True
    except SafetensorError:
        return False
