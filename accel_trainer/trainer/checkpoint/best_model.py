"""The best checkpoint at the end of a run: the same on all ranks, and verified before others make room for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel_trainer import logging
from accel_trainer.checkpoint.commit.retention import retire
from accel_trainer.errors import CheckpointNotFoundError, CorruptCheckpointError
from accel_trainer.runtime.shared_errors import gather_or_raise
from accel_trainer.trainer.checkpoint.resuming import PREFIX
from accel_trainer.trainer.running_trainer import CheckpointingTrainer

__all__ = ["keeping_best", "verify_best"]

logger = logging.get_logger(__name__)

_WEIGHTS = re.compile(r"(model|pytorch_model|trained_weights)[^/]*|([^/]+/)?adapter_model[^/]*|pytorch_model_fsdp_0/.*")


@contextmanager
def keeping_best(trainer: CheckpointingTrainer) -> Iterator[None]:
    """Name rank 0's best checkpoint on all ranks and, with `save_total_limit=1`, keep it alone; the block ends a run.

    Collective. Upstream does so without verification: it would remove the last good checkpoint beside a best one that
    is corrupt, and also directories that are no complete checkpoint of this Trainer.
    """
    args, state = trainer.args, trainer.state
    # Each rank has looked for its directory by itself, and loading it is collective.
    best = gather_or_raise(trainer.accelerator.process, "end of training", None, state.best_model_checkpoint)[0]
    state.best_model_checkpoint = best
    if args.load_best_model_at_end and best is None:
        logger.warning(
            "load_best_model_at_end=True, and there is no checkpoint of the best model (its update was %s): the model "
            "is that of the last update",
            state.best_global_step,
        )
    limit = args.save_total_limit
    if limit == 1 and best is not None:
        _retire_others(trainer, Path(best))
    args.save_total_limit = None if limit == 1 else limit
    try:
        yield
    finally:
        args.save_total_limit = limit


def _retire_others(trainer: CheckpointingTrainer, best: Path) -> None:
    flaw: str | None = None
    try:
        stored = trainer.run_checkpoints.checkpointer.open_named(best)
        flaw = None if stored is None else stored.find_flaw_together()
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        flaw = str(error)
    if flaw is not None:
        logger.warning("the best checkpoint is not good, and the others stay. %s", flaw)
    elif trainer.args.should_save:
        retire(best.parent, 1, [best], prefix=PREFIX)


def verify_best(trainer: CheckpointingTrainer, best: Path) -> None:
    """Verify the weights of the best checkpoint before they are loaded. Collective; one without manifest passes.

    Raises:
        CorruptCheckpointError, CheckpointNotFoundError: they were changed after the save.
        ProcessGroupError: another rank cannot read them.
    """
    try:
        stored = trainer.run_checkpoints.checkpointer.open_named(best, trainer.args.verify)
        if stored is not None:
            stored.verify_together(name for name in stored.manifest.files if _WEIGHTS.fullmatch(name))
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        raise type(error)(
            f"{error}. It holds the best model, which load_best_model_at_end=True would load now; the model has the "
            "weights of the last update, which save_model() writes"
        ) from error
