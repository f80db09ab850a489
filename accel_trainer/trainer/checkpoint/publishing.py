"""One save of a Trainer's checkpoint: all that it holds, then its name, then what leads to it or makes room for it."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from accel_trainer.checkpoint.checkpointer import SaveJob
from accel_trainer.checkpoint.commit.retry import save_persistently
from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.errors import AccelTrainerError
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.trainer.checkpoint.resuming import PREFIX, TRAINER_STATE_NAME
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
    """Write the checkpoint of the current step; it appears under its name when every rank has written its files.

    Collective. Its contents, and the order of everything, are those of upstream's `_save_checkpoint`.

    Raises:
        SaveSkippedError: the disk failed, and `on_save_error="warn"`.
    """
    args, state, run = trainer.args, trainer.state, trainer.run_checkpoints
    if trainer.hp_search_backend is None and trial is None:
        trainer.store_flos()
    run_dir = Path(trainer._get_output_dir(trial=trial))
    target = run_dir / f"{PREFIX}{state.global_step}"
    limit = args.save_total_limit

    def survivors() -> list[Path]:
        best = state.best_model_checkpoint
        return [target, run_dir / Path(best).name] if best else [target]

    job = SaveJob(
        section=f"save of {target}",
        directory=run_dir,
        name=None,
        number=state.global_step,
        write=partial(_write, trainer, target),
        need_bytes=_need_bytes(trainer),
        policy=args.save_policy,
        each_node=args.save_on_each_node,
        # Of an earlier run in this folder, or with files that callbacks put there: upstream writes over it.
        replaces=True,
        keep=limit if limit is not None and limit > 0 else None,
        protected=survivors,
    )
    best, is_saved = state.best_model_checkpoint, False
    try:
        is_saved = run.checkpointer.save(job) is not None
    finally:
        if not is_saved:
            state.best_model_checkpoint = best
    if not is_saved:
        raise SaveSkippedError(f"{target} was not written")
    run.note_saved(run_dir, state.global_step)
    if args.push_to_hub:
        push = partial(_push, trainer, target)
        save_persistently(push, trainer.accelerator.process, args.save_policy, f"push of {target}")


def _push(trainer: CheckpointingTrainer, target: Path) -> None:
    """Have a committed checkpoint uploaded, in the background; the main process copies it first. Collective."""
    with raise_together(trainer.accelerator.process, f"push of {target}"):
        # The directory is uploaded with all its files, and the lock is not for others.
        trainer.run_checkpoints.checkpointer.release_directory()
        trainer._push_from_checkpoint(str(target))


def _write(trainer: CheckpointingTrainer, target: Path, staged: StagedDirectory) -> None:
    """Write the files of the checkpoint `target`. Collective."""
    args, process = trainer.args, trainer.accelerator.process
    directory = os.fspath(staged)
    with trainer.run_checkpoints.staging(staged):
        with raise_together(process, f"save of {target}"):  # the optimizer's state is gathered next
            trainer.save_model(directory, _internal_call=True)
        _name_best(trainer, target)
        if not args.save_only_model:
            trainer._save_optimizer_and_scheduler(directory)
            trainer._save_scaler(directory)
            trainer._save_rng_state(directory)
        if args.should_save:
            _save_state(trainer, os.path.join(directory, TRAINER_STATE_NAME))
        staged.metadata |= {"trainer": _describe_progress(trainer), "reserved_names": RESERVED_NAMES}
        staged.metadata["tied"] = _tied_names(trainer.model)


def _need_bytes(trainer: CheckpointingTrainer) -> int:
    """About how many bytes this rank needs: for its state, or for full weights, twice where it gathers them."""
    weights = 0
    if trainer.args.should_save:
        held = {id(value): value for value in trainer.model.state_dict(keep_vars=True).values()}
        weights = sum(value.numel() * value.element_size() for value in held.values() if isinstance(value, Tensor))
    state = 0 if trainer.args.save_only_model else trainer.accelerator.unit_of(trainer.model).local_bytes()
    return max(weights * (2 if trainer.is_sharded else 1), state)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names that tied parameters have beside their first one: files of weights hold one of them."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: kept for name, parameter in named if (kept := first.setdefault(id(parameter), name)) != name}


def _name_best(trainer: CheckpointingTrainer, target: Path) -> None:
    """Name the best checkpoint in the state, if it is there: this one is about to be."""
    state = trainer.state
    strategies = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
    if trainer.args.save_strategy in strategies and state.best_global_step:
        best = target.with_name(f"{PREFIX}{state.best_global_step}")
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


def _describe_progress(trainer: CheckpointingTrainer) -> dict[str, Any]:
    """Return the progress of a run, as plain JSON, for the manifest of the checkpoint that it writes."""
    position = trainer.run_checkpoints.position(trainer.callback_handler.train_dataloader)
    if position is not None:
        try:
            json.dumps(position)
        except TypeError:  # the dataset's own state: it is read again up to the sample instead
            position["dataset_state"] = None
    return {
        "global_step": trainer.state.global_step,
        "best_step": trainer.state.best_global_step,
        "update_batch": trainer.get_total_train_batch_size(trainer.args),
        "has_training_state": not trainer.args.save_only_model,
        "position": position,
    }
