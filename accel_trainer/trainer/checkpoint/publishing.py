"""One save of a Trainer's checkpoint: all that it holds, then its name, then what leads to it or makes room for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from accel_trainer.checkpoint.commit.disk import explain_full_disk
from accel_trainer.checkpoint.commit.publication import Publication
from accel_trainer.checkpoint.commit.retention import retire
from accel_trainer.checkpoint.commit.retry import save_persistently
from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.errors import AccelTrainerError
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.trainer.checkpoint.resuming import PREFIX, describe_progress
from accel_trainer.trainer.checkpoint.upstream_files import TRAINER_STATE_NAME
from accel_trainer.trainer.running_trainer import CheckpointingTrainer

__all__ = ["SaveSkippedError", "save_checkpoint"]

RESERVED_NAMES = [
    "model*.safetensors*", "pytorch_model*", "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "global_step*",
    "latest", TRAINER_STATE_NAME,
]  # fmt: skip
"""Names under which a resume looks for something. Callbacks may put other files into a checkpoint that is complete."""


class SaveSkippedError(AccelTrainerError):
    """A checkpoint could not be written, and the run goes on without it."""


def save_checkpoint(trainer: CheckpointingTrainer, trial: Any) -> None:
    """Write the checkpoint of the current step; it appears under its name when every rank has written its part.

    Collective. What it holds, and the order of everything, are those of upstream's `_save_checkpoint`.

    Raises:
        SaveSkippedError: the disk failed, and `on_save_error="warn"`.
    """
    begin = time.perf_counter()
    args, state = trainer.args, trainer.state
    if trainer.hp_search_backend is None and trial is None:
        trainer.store_flos()
    run_dir = Path(trainer._get_output_dir(trial=trial))
    target = run_dir / f"{PREFIX}{state.global_step}"
    publish = partial(_publish, trainer, run_dir, target)
    publication = save_persistently(publish, trainer.accelerator.process, args.save_policy, f"save of {target}")
    if publication is None:
        raise SaveSkippedError(f"{target} was not written")
    duration = time.perf_counter() - begin
    if args.should_save and args.save_total_limit is not None and args.save_total_limit > 0:
        best = [run_dir / Path(state.best_model_checkpoint).name] if state.best_model_checkpoint else []
        retire(run_dir, args.save_total_limit, [target, *best], step=state.global_step, prefix=PREFIX)
    num_bytes = publication.num_bytes if publication.commits else None
    trainer._figures.add_save(duration, time.perf_counter() - begin, num_bytes)
    trainer._note_saved(run_dir)
    if args.push_to_hub:
        push = partial(_push, trainer, target)
        save_persistently(push, trainer.accelerator.process, args.save_policy, f"push of {target}")


def _push(trainer: CheckpointingTrainer, target: Path) -> None:
    """Have a committed checkpoint uploaded, in the background; the main process copies it first. Collective."""
    with raise_together(trainer.accelerator.process, f"push of {target}"):
        trainer._disown()  # what is uploaded is the whole directory, and the lock is not for others
        trainer._push_from_checkpoint(str(target))


def _publish(trainer: CheckpointingTrainer, run_dir: Path, target: Path) -> Publication:
    """Write and commit the checkpoint `target`. Collective."""
    args, state, process = trainer.args, trainer.state, trainer.accelerator.process
    with raise_together(process, f"save to {run_dir}"):
        if args.should_save:
            trainer._own(run_dir)
    # Of an earlier run in this folder, or with what callbacks put there: upstream writes over it.
    publication = Publication(
        target,
        process,
        step=state.global_step,
        each_node=args.save_on_each_node,
        need_bytes=max(_weight_bytes(trainer), 0 if args.save_only_model else trainer.accelerator._state_bytes()),
        owns_name=True,
        is_locked=True,
    )
    best = state.best_model_checkpoint
    try:
        with publication as staged, explain_full_disk(staged.path), _staging(trainer, staged):
            directory = os.fspath(staged)
            with raise_together(process, f"save of {target}"):  # the optimizer's state is gathered next
                trainer.save_model(directory, _internal_call=True)
            _note_best(trainer, run_dir, target)
            if not args.save_only_model:
                trainer._save_optimizer_and_scheduler(directory)
                trainer._save_scaler(directory)
                trainer._save_rng_state(directory)
            if args.should_save:
                _save_state(trainer, os.path.join(directory, TRAINER_STATE_NAME))
            staged.metadata |= {"trainer": describe_progress(trainer), "reserved_names": RESERVED_NAMES}
            staged.metadata["tied"] = _tied_names(trainer.model)
        publication.commit()
    except BaseException:
        state.best_model_checkpoint = best
        raise
    return publication


def _weight_bytes(trainer: CheckpointingTrainer) -> int:
    """About how many bytes this rank needs for the weights, twice what it gathers while it writes; or none."""
    if not trainer.args.should_save:
        return 0
    held = {id(value): value for value in trainer.model.state_dict(keep_vars=True).values()}
    num_bytes = sum(value.numel() * value.element_size() for value in held.values() if isinstance(value, Tensor))
    return num_bytes * (2 if trainer.is_sharded else 1)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names that tied parameters have beside their first one: files of weights hold one of them."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: kept for name, parameter in named if (kept := first.setdefault(id(parameter), name)) != name}


@contextmanager
def _staging(trainer: CheckpointingTrainer, staged: StagedDirectory) -> Iterator[None]:
    """Have files that this module writes hashed on their way; others are read once for that."""
    trainer._staged = staged
    try:
        yield
    finally:
        trainer._staged = None


def _note_best(trainer: CheckpointingTrainer, run_dir: Path, target: Path) -> None:
    """Name the best checkpoint in the state, if it is there: this one is about to be."""
    state = trainer.state
    strategies = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
    if trainer.args.save_strategy in strategies and state.best_global_step:
        best = run_dir / f"{PREFIX}{state.best_global_step}"
        if best == target or best.is_dir():
            state.best_model_checkpoint = str(best)


def _save_state(trainer: CheckpointingTrainer, path: str) -> None:
    state = trainer.state
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name, content = type(callback).__name__, callback.state()
            if isinstance(state.stateful_callbacks[name], list):
                state.stateful_callbacks[name].append(content)
            else:
                state.stateful_callbacks[name] = content
    state.save_to_json(path)
