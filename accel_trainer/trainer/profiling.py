"""Traces of some updates of a Trainer, one for each rank that was asked for: `TrainingArguments(profile="10:13")`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from accel_trainer import logging
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.kwargs import ProfileKwargs
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.torch_private import recording_allocations

if TYPE_CHECKING:
    from accel_trainer.trainer.arguments.training_arguments import TrainingArguments

logger = logging.get_logger(__name__)

FOLDER = "profile"


def read_updates(text: str) -> range:
    """Return the updates of "start:stop", of which the last is `stop - 1`, as of a slice.

    Raises:
        ConfigError: it is something else.
    """
    start, _, stop = text.partition(":")
    if start.strip().isdecimal() and stop.strip().isdecimal() and 1 <= int(start) < int(stop):
        return range(int(start), int(stop))
    raise ConfigError(
        f"profile={text!r} is no range of updates: give START:STOP, such as '10:13' for the updates 10, 11 and 12, the "
        "first of a run being 1"
    )


def _is_asked_for(ranks: str, process: ProcessContext) -> bool:
    if ranks.strip() == "all":
        return True
    numbers = [each.strip() for each in ranks.split(",")]
    wrong = [each for each in numbers if not each.isdecimal() or int(each) >= process.world_size]
    if wrong:
        raise ConfigError(
            f"profile_ranks={ranks!r} names {wrong[0]!r}, and this job has the ranks 0 to {process.world_size - 1}; "
            "give numbers with commas between them, or 'all'"
        )
    return str(process.rank) in numbers


class UpdateProfile(TrainerCallback):
    """The trace of this rank, from the end of the update before the first one, whose data is in it."""

    def __init__(self, args: TrainingArguments, process: ProcessContext) -> None:
        """Check the arguments.

        Raises:
            ConfigError: `profile` is no range of updates, or `profile_ranks` names a rank that there is not.
        """
        self._updates = read_updates(args.profile or "")
        self._folder = Path(args.output_dir) / FOLDER
        self._process = process
        self._is_recorded = _is_asked_for(args.profile_ranks, process)
        self._recording = ExitStack()
        self._is_open = False

    def _begin_if_due(self, done: int) -> None:
        if not self._is_recorded or self._is_open or done + 1 != self._updates.start:
            return
        device, rank = self._process.device, self._process.rank
        self._folder.mkdir(parents=True, exist_ok=True)
        self._is_open = True
        self._recording.enter_context(recording_allocations(self._folder / f"memory_{rank}.pickle", device))
        profile = ProfileKwargs(record_shapes=True, output_trace_dir=self._folder)
        self._recording.enter_context(profile.build(rank))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the first update."""
        self._begin_if_due(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with the last update, or begin with the next one."""
        if self._is_open and state.global_step >= self._updates.stop - 1:
            self.close()
        self._begin_if_due(state.global_step)

    def close(self) -> None:
        """Write the record: after the last update, and where training ends before it, or fails."""
        if self._is_open:
            self._is_open = False
            self._is_recorded = False  # a run that goes back to a checkpoint comes by again
            self._recording.close()
            logger.info(
                "the trace of updates %d to %d is %s; open it in ui.perfetto.dev", self._updates.start,
                self._updates.stop - 1, os.fspath(self._folder / f"profile_{self._process.rank}.json"),
                main_process_only=False,
            )  # fmt: skip
