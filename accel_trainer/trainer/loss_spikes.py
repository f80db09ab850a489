"""Updates whose loss is far above those before it: left out, or taken back, before the weights have them."""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING

from accel_trainer import logging
from accel_trainer.data.loader import PreparedDataLoader
from accel_trainer.errors import ConfigError
from accel_trainer.runtime import collectives
from accel_trainer.runtime.nonfinite import NonFiniteGuard

if TYPE_CHECKING:
    from accel_trainer import Trainer
    from accel_trainer.accelerator import Accelerator
    from accel_trainer.trainer.arguments.training_arguments import TrainingArguments

logger = logging.get_logger(__name__)

ACTIONS = ("off", "warn", "skip_batch", "rollback")
_WINDOW, _FEWEST = 100, 20
_PER_DEVIATION = 1.4826
"""Of a normal distribution, its standard deviation in median absolute deviations."""
_LEAST = 1e-3
"""A deviation is taken for this share of the median at least: losses of a run that has converged hardly differ."""
_MOST_IN_A_ROW = 10
_MOST_INDICES = 64


class LossSpikes:
    """The losses of the last 100 updates that the weights have; the same on every rank."""

    def __init__(self, threshold: float) -> None:
        """Take the number of deviations above the median from which on a loss is a spike."""
        self.threshold = threshold
        self.num_in_a_row = 0
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def look(self, loss: float) -> str:
        """Return the fault of an update's loss, over all ranks; empty where there is none.

        Nothing is said of the first 20 updates, nor of a loss that is NaN. Ten spikes in a row are a new level, to
        which the median moves.
        """
        if not isfinite(loss):
            return ""
        if len(self._losses) >= _FEWEST:
            middle = median(self._losses)
            deviation = _PER_DEVIATION * median(abs(value - middle) for value in self._losses)
            distance = (loss - middle) / max(deviation, _LEAST * abs(middle), 1e-12)
            if distance >= self.threshold and self.num_in_a_row < _MOST_IN_A_ROW:
                self.num_in_a_row += 1
                return f"the loss is {loss:.4g}, {distance:.1f} deviations above the median of {middle:.4g}"
            if self.num_in_a_row == _MOST_IN_A_ROW:
                logger.warning("%d losses in a row were spikes: training goes on at a new level", _MOST_IN_A_ROW)
                self._losses.clear()
        self.num_in_a_row = 0
        self._losses.append(loss)
        return ""


def check_loss_spikes(args: TrainingArguments, accelerator: Accelerator) -> None:
    """Refuse answers that come too late for a spike: an update has been made, or ranks see different losses."""
    action, config, facts = args.on_loss_spike, accelerator.config, accelerator.strategy.capabilities
    if action not in ACTIONS:
        raise ConfigError(f"on_loss_spike={action!r} is none of {', '.join(ACTIONS)}")
    if not (isinstance(args.loss_spike_threshold, int | float) and args.loss_spike_threshold > 0):
        raise ConfigError(
            f"loss_spike_threshold={args.loss_spike_threshold!r} is a number of deviations above the median; give one "
            "above 0, such as 6"
        )
    if action == "off":
        return
    acts = action != "warn"
    for is_wrong, reason in (
        (accelerator.nonfinite_guard is None, "fp16, whose loss scale decides about updates; use bf16"),
        (acts and facts.builds_engine, f"strategy {accelerator.strategy.name!r}, whose engine steps alone; use fsdp2"),
        (acts and config.optimizer_in_backward, "optimizer_in_backward, which has updated by then; leave one out"),
        (acts and config.local_steps is not None, "local_steps, whose ranks update by their own losses; use 'warn'"),
        (action == "rollback" and args.save_only_model, "save_only_model=True, which saves no optimizer; leave it out"),
    ):
        if is_wrong:
            raise ConfigError(f"on_loss_spike={action!r} contradicts {reason}")


def answer_spike(trainer: Trainer, guard: NonFiniteGuard, epoch: int, steps: range) -> None:
    """Look at the loss of an update before its step; warn of a spike, and have it left out or taken back. Collective.

    `steps`: those micro-batches of the epoch that make the update.
    """
    spikes, action = trainer.loss_spikes, trainer.args.on_loss_spike
    if spikes is None or guard.loss is None:
        return
    # The mean over ranks of what each adds up is the loss of the update, as it is logged.
    found = spikes.look(float(collectives.reduce(guard.loss, trainer.accelerator.process, "mean")))
    if not found:
        return
    where = "; ".join(_name_samples(trainer, epoch, steps))
    found = f"update {trainer.state.global_step + 1}: {found} ({where})"
    if action == "warn":
        logger.warning("%s; the weights get it (on_loss_spike='warn')", found)
        return
    if action == "skip_batch":
        logger.warning("%s; it is left out", found)
    guard.leave_out(found, rolls_back=action == "rollback")


def _name_samples(trainer: Trainer, epoch: int, steps: range) -> list[str]:
    """Return the samples of an update by rank, in words. Collective."""
    loader, readers = trainer.callback_handler.train_dataloader, trainer.accelerator.readers
    known = [loader.indices_at(epoch, step) for step in steps] if isinstance(loader, PreparedDataLoader) else [None]
    own = None if None in known else [index for batch in known for index in batch or ()]
    ranks = [each["own"] for each in collectives.gather_object({"own": own}, readers)]
    if None in ranks:
        return [f"micro-batches {steps.start} to {steps.stop - 1} of epoch {epoch}"]
    if len(ranks) == 1:
        return [f"samples {_indices(ranks[0])}"]
    return [f"samples of rank {number}: {_indices(each)}" for number, each in enumerate(ranks)]


def _indices(found: list[int]) -> str:
    rest = f" and {len(found) - _MOST_INDICES} more" if len(found) > _MOST_INDICES else ""
    return ", ".join(map(str, found[:_MOST_INDICES])) + rest
