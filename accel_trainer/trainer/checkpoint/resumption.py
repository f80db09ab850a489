"""The checkpoint that a run goes on from: its contents, and its place in the data and in the random streams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerControl, TrainerState, set_seed

from accel_trainer import logging
from accel_trainer.checkpoint.changed_run import (
    RECORD_KEY,
    UpdateBatch,
    UpdateBatchChange,
    describe_changes,
    how_to_go_on,
)
from accel_trainer.checkpoint.disk import as_corrupt
from accel_trainer.checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_trainer.checkpoint.reader import Selection
from accel_trainer.checkpoint.torch_files import load_torch_file
from accel_trainer.config import ChangedRunAction
from accel_trainer.data.index_source import length_of
from accel_trainer.data.loader import PreparedDataLoader
from accel_trainer.data.plan import mix_seed
from accel_trainer.data.position import Position
from accel_trainer.data.sampler import find_generator
from accel_trainer.errors import CheckpointNotFoundError, IncompatibleCheckpointError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import set_rng_state
from accel_trainer.trainer.arguments.training_arguments import TrainingArguments, list_options
from accel_trainer.trainer.checkpoint.upstream_files import PREFIX, pass_streams_name

if TYPE_CHECKING:
    from accel_trainer import Trainer

logger = logging.get_logger(__name__)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from, each once."""
    samplers = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    found = [find_generator(node) for node in (loader, *samplers)]
    return list({id(generator): generator for generator in found if generator is not None}.values())


@dataclass
class Resumption:
    """The checkpoint that a run goes on from, and its place in the data."""

    selection: Selection
    noted_update: int | None
    """The last update that the run which was stopped has taken note of."""
    epoch: int | None = None
    """The epoch that the run goes on in; None where only the number of updates is known."""
    steps_left: int = 0
    """Micro-batches of that epoch that are left to each rank."""
    _has_pending: bool = True
    """Whether the evaluation that was due is still to be done."""

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self.selection.path

    @property
    def manifest(self) -> Manifest | None:
        """Its manifest; None for a checkpoint that accel_trainer did not write."""
        stored = self.selection.stored
        return None if stored is None else stored.manifest

    def lost_steps(self, step: int) -> int | None:
        """Return the number of updates after `step` that are known to have been done; None where nothing tells."""
        passed_over = [int(line.partition(":")[0].removeprefix(PREFIX)) for line in self.selection.passed_over]
        known = [update for update in (self.noted_update, *passed_over) if update is not None]
        return max(0, max(known) - step) if known else None

    @property
    def progress(self) -> Mapping[str, Any]:
        """The run's progress when the checkpoint was written, as its save put it into the manifest."""
        progress: Mapping[str, Any] = {} if self.manifest is None else self.manifest.metadata.get("trainer", {})
        return progress

    @property
    def num_writers(self) -> int | None:
        """The number of processes that wrote it; None where nothing tells."""
        if self.manifest is not None:
            return self.manifest.world_size
        return sum(1 for _ in self.path.glob("rng_state*.pth")) or None

    @property
    def order_batch(self) -> tuple[int, int] | None:
        """Micro-batch and accumulation with which the order of the samples was made; None where nothing tells."""
        if (saved := self.progress.get("order_batch")) is None:
            return None
        with as_corrupt(self.path / MANIFEST_NAME):
            size, num_steps = map(int, saved)
        return size, num_steps

    @property
    def saved_options(self) -> dict[str, str]:
        """The options of the run that wrote it, in words, by name; none where nothing tells."""
        record = {} if self.manifest is None else self.manifest.metadata.get(RECORD_KEY, {})
        return {name: value for name, value, *_ in record.get("options", ())}

    def warn_of_changes(self, trainer: Trainer) -> None:
        """Warn of options and versions that are others than those of the run that saved the checkpoint."""
        if self.manifest is None:
            return
        with as_corrupt(self.path / MANIFEST_NAME):
            changes = describe_changes(
                self.path,
                self.manifest,
                self.saved_options,
                {option.name: option.value for option in list_options(trainer.args)},
                without_effect=self._replaced_seeds(trainer),
            )
        if changes is not None:
            logger.warning("%s", changes)

    def check_run(self, args: TrainingArguments, now: UpdateBatch, *, is_searched: bool) -> None:
        """Refuse to go on as a run that means something else, where `on_changed_run` has it so. Not collective.

        Args:
            now: the samples of an update in this run.
            is_searched: a search has set them, and not the user.
        """
        change = self._find_change(args, now)
        if change is not None:
            change.check(args.resolved, auto_refuses=not change.has_other_ranks and not is_searched)
        if args.resolved.config.on_changed_run is ChangedRunAction.REFUSE and args.ignore_data_skip:
            self._check_seed(args)

    def _check_seed(self, args: TrainingArguments) -> None:
        """Refuse an epoch in another order than the checkpoint's."""
        before, now = self._data_seeds(args)
        if before not in (None, now):
            raise IncompatibleCheckpointError(
                f"{how_to_go_on(args.resolved)}\n{self.path} is of a run whose order of samples has seed "
                f"{before}, and with ignore_data_skip=True this one begins an epoch in the order of seed {now}. Set "
                f"data_seed={before}; or leave ignore_data_skip out, and the checkpoint's order goes on"
            )

    def _data_seeds(self, args: TrainingArguments) -> tuple[str | None, str]:
        """Return the seeds of the order of the samples, the checkpoint's and this run's."""
        with as_corrupt(self.path / MANIFEST_NAME):
            saved = self.saved_options
            before = saved.get("seed") if saved.get("data.data_seed") == "null" else saved.get("data.data_seed")
        data_seed = args.resolved.config.data.data_seed
        return before, str(args.seed if data_seed is None else data_seed)

    def _compare_plan(self, args: TrainingArguments, *, packs: bool) -> None:
        """Refuse packed rows, or a mixture, made otherwise than the checkpoint's: its place is one in those."""
        names = ["packing_strategy", "max_length"] if packs else []
        names += ["dataset_mixture"] if args.resolved.config.dataset_mixture else []
        if not names:
            return
        options = {option.name: option.value for option in list_options(args)}
        with as_corrupt(self.path / MANIFEST_NAME):
            values = {name: (self.saved_options.get(name), options[name]) for name in names}
        for name, (before, now) in {**values, "data_seed": self._data_seeds(args)}.items():
            if before not in (None, now):
                raise IncompatibleCheckpointError(
                    f"{self.path} was written with {name}={before}, this run has {now}, and its training data is made "
                    f"by that: which samples are next is not known. Resume with {name}={before}, or set "
                    "ignore_data_skip=True in TrainingArguments to begin an epoch of this run's"
                )

    def _find_change(self, args: TrainingArguments, now: UpdateBatch) -> UpdateBatchChange | None:
        """Return how the number of samples in an update differs from that of the run which wrote the checkpoint."""
        progress = self.progress
        if "update_batch" not in progress:
            return None
        with as_corrupt(self.path / MANIFEST_NAME):
            before = UpdateBatch(
                progress["update_batch"],
                progress.get("readers", self.num_writers),
                progress.get("micro_batch"),
                progress.get("accumulation_steps"),
            )
            name = "per_device_train_batch_size" + " / ranks" * args.resolved.config.data.split_batches
            return UpdateBatchChange.find(self.path, before, now, micro_batch_name=name)

    def warn_of_batch(self, args: TrainingArguments, now: UpdateBatch, max_steps: int) -> None:
        """Warn where updates have other samples than those of the run that wrote it; to be called once placed."""
        change = self._find_change(args, now)
        if change is None:
            return
        place = "goes on at the same sample and " if self.epoch is not None and not args.ignore_data_skip else ""
        logger.warning(
            "%s: it %sends after update %d; set %s for updates of as many samples",
            change.found, place, max_steps, change.settings,
        )  # fmt: skip

    def take_position(
        self, args: TrainingArguments, loader: Any, values: tuple[Any, ...], *, packs: bool
    ) -> tuple[Any, ...]:
        """Have the loader's next pass begin after the samples that were trained; return the lengths of the run.

        With a changed number of samples in an update, the run ends after as many samples as it would have.

        Args:
            values: those of upstream's `set_initial_training_values`, for a run from the beginning.
            packs: the Trainer makes rows of its training set.
        """
        self.epoch = None
        saved = self.progress.get("position")
        if saved is None or not isinstance(loader, PreparedDataLoader):
            return values
        steps, max_steps = values[5:]
        with as_corrupt(self.path / MANIFEST_NAME):
            position = Position.read(saved)
        self._compare_lengths(position, loader, is_ignored=args.ignore_data_skip)
        if position.is_complete:
            position = Position(
                epoch=position.epoch + 1,
                seed=position.seed,
                workers=position.workers,
                generator=position.generator,
            )
        self.epoch, self.steps_left = position.epoch, steps
        if args.ignore_data_skip:
            return values
        if position.samples:
            self._compare_plan(args, packs=packs)
        try:
            loader.load_state_dict(position.to_dict())
        except IncompatibleCheckpointError as error:
            raise IncompatibleCheckpointError(
                f"{self.path}: {error}. With ignore_data_skip=True training goes on at the beginning of the epoch"
            ) from error
        try:
            self.steps_left = len(loader)
        except TypeError:  # a stream
            left = (max_steps - self.progress["global_step"]) * args.gradient_accumulation_steps
            self.steps_left = max(steps - position.steps, left)
            return values
        return self._keep_samples(args, position.epoch, values)

    def _compare_lengths(self, position: Position, loader: PreparedDataLoader, *, is_ignored: bool) -> None:
        """Refuse a training dataset of another length, between epochs too: the rest would be that of another run."""
        saved, length = position.dataset_length, length_of(loader.dataset)
        if None in (saved, length) or saved == length:
            return
        found = (
            f"{self.path} was written in a run over a training dataset of {saved} samples, after {position.samples} of "
            f"epoch {position.epoch}, and this run's has {length}"
        )
        if not is_ignored:
            raise IncompatibleCheckpointError(
                f"{found}: which samples are next is not known. Resume with the dataset of {saved}, or set "
                "ignore_data_skip=True in TrainingArguments to begin an epoch of this one"
            )
        logger.warning("%s: training begins an epoch of it (ignore_data_skip=True)", found)

    def _keep_samples(self, args: TrainingArguments, epoch: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the lengths of a run that ends after the samples, not the updates, that it would have ended after."""
        num_epochs, updates, examples, samples, batch, steps, max_steps = values
        if self.progress["update_batch"] == batch:
            return values
        done, left = self.progress["global_step"], math.ceil(self.steps_left / args.gradient_accumulation_steps)
        if args.max_steps > 0:
            num_epochs = epoch + 1 + math.ceil(max(0, max_steps - done - left) / updates)
        else:
            max_steps = done + max_steps - (epoch + 1) * updates + left
        return num_epochs, updates, examples, samples, batch, steps, max_steps

    def takes_pending(self, control: TrainerControl) -> bool:
        """Set the flags of an evaluation that a signal has cut, and of a save after it; return, once, if it has."""
        pending, self._has_pending = self.progress.get("pending") if self._has_pending else None, False
        if pending is None:
            return False
        control.should_evaluate, control.should_save = True, bool(pending["save"])
        return True

    def _replaced_seeds(self, trainer: Trainer) -> set[str]:
        """Return the options of seeds in whose place the run, once it has a place, goes on with the checkpoint's."""
        if self.epoch is None or trainer.args.ignore_data_skip:
            return set()
        has_streams = self._has_same_ranks(trainer) and self.progress.get("has_training_state", True)
        return {"data.data_seed", "seed"} if has_streams else {"data.data_seed"}

    def _has_same_ranks(self, trainer: Trainer) -> bool:
        """Whether as many ranks wrote the checkpoint, and as many of them read different data."""
        num_ranks = trainer.accelerator.num_processes
        num_readers = self.progress.get("readers", num_ranks)
        return self.num_writers in (None, num_ranks) and num_readers == trainer.accelerator.readers.world_size

    def restores_random_streams(self, trainer: Trainer) -> bool:
        """Whether each rank is to go on with its streams as they were saved; seeds new ones where ranks are others."""
        process = trainer.accelerator.process
        name = f"rng_state_{process.rank}.pth" if process.is_distributed else "rng_state.pth"
        if not self._has_same_ranks(trainer):
            # numpy takes no larger seed. The update is in it, or a run that resumes twice would draw the same twice.
            set_seed(mix_seed(trainer.args.seed, trainer.state.global_step, trainer.accelerator.readers.rank) % 2**32)
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

    def restore_pass_streams(self, process: ProcessContext, loader: Any, *, is_within_pass: bool) -> None:
        """Load the streams of the order of the pass under way, or else of the one after it, if there is a file."""
        path = self.path / pass_streams_name(process.rank)
        if isinstance(loader, PreparedDataLoader) or not path.is_file():
            return
        saved = load_torch_file(path)
        if is_within_pass:
            set_rng_state(saved["streams"])
        states = saved["generators" if is_within_pass else "generators_since"]
        for generator, state in zip(generators_of(loader), states, strict=False):
            generator.set_state(state)

    def check_by_updates(self, state: TrainerState, place: float) -> None:
        """Warn where a position by the number of updates, in epochs, is not the one that the checkpoint has."""
        if state.epoch is None:
            return
        saved, update = state.epoch, state.num_train_epochs / max(state.max_steps, 1)
        # Batches of another size cut the end of an epoch elsewhere: the same samples can be up to an update apart.
        if abs(saved - place) > max(saved % 1, place % 1) * update + 1e-6:
            logger.warning(
                "%s was written after %.3f epochs, and its number of updates is %.3f epochs of this run: batch size, "
                "accumulation, number of processes or dataset are others. The data goes on at the latter, and samples "
                "are repeated or left out; resume with as many samples in an update, or with ignore_data_skip=True",
                self.path, saved, place,
            )  # fmt: skip

    def describe(self, args: TrainingArguments, step: int, num_readers: int) -> str:
        """Return a line for the log: where the run goes on, how exactly, its loss, and why no newer one is taken."""
        facts = [self.selection.verified]
        if self.num_writers is not None:
            facts = [f"written by {self.num_writers} process(es), read by {num_readers}, {self.selection.verified}"]
        if not self.progress.get("has_training_state", True):
            facts.append("weights only: optimizer, schedule and random streams are new")
        elif self.num_writers == num_readers:
            facts.append("random streams restored")
        else:
            facts.append(f"random streams new, from seed {args.seed}, update and rank")
        if args.ignore_data_skip:
            facts.append("data begins its epoch again")
        else:
            facts.append("data goes on at the next sample" if self.epoch is not None else "data by number of updates")
        if lost := self.lost_steps(step):
            facts.append(f"{lost} update(s) that were done after it are lost, and done again")
        return self.selection.describe(f"resuming at update {step}", facts)
