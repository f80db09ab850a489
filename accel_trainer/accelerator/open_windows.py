"""Accumulation windows that a save finds half full: their gradients, so that another run can fill them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from accel_trainer import logging
from accel_trainer.accelerator.accumulation import PreparedUnit
from accel_trainer.accelerator.token_mean import TokenWindow
from accel_trainer.checkpoint.format.boxes import Box
from accel_trainer.errors import IncompatibleCheckpointError
from accel_trainer.runtime.process import ProcessContext

__all__ = ["OpenWindows"]

logger = logging.get_logger(__name__)

Stored = Tensor | Callable[[Box], Tensor]
"""A gradient in a file: a rank's own, unsharded, or the boxes of one of which every rank has written its shard."""


class OpenWindows:
    """The accumulation windows of the prepared models, for `save_state` and `load_state`."""

    def __init__(self, prepared: Sequence[PreparedUnit], process: ProcessContext, *, is_sharded: bool) -> None:
        self._prepared = prepared
        self._process = process
        self._is_sharded = is_sharded

    def state_dict(self) -> dict[str, Any] | None:
        """Return this rank's gradients of the windows that are open; None where all are closed.

        Collective where parameters are sharded.
        """
        if not any(prepared.window.is_open for prepared in self._prepared):
            return None
        return {"units": [_save(prepared) for prepared in self._prepared]}

    def plan_load(self, read: Callable[[int], Mapping[str, Any]] | None, num_ranks: int) -> Callable[[], None]:
        """Check that saved windows fit, and return a function that opens them; one that closes all without a reader.

        Ranks do not communicate.

        Args:
            read: returns the saved state of a rank.
            num_ranks: how many ranks there were.

        Raises:
            IncompatibleCheckpointError: windows have another size in this run, and none of its micro-batches ends
                where the state was saved.
        """
        if read is not None:
            for prepared, saved in zip(self._prepared, read(0)["units"], strict=True):
                if saved is not None:
                    _check_size(prepared, saved)
        return partial(self._load, read, num_ranks)

    def _load(self, read: Callable[[int], Mapping[str, Any]] | None, num_ranks: int) -> None:
        # Ranks that hold gradients of their own go on with them bit by bit; shards belong to the mean of all ranks.
        is_own = num_ranks == self._process.world_size and not self._is_sharded
        units = [None] * len(self._prepared) if read is None else read(0)["units"]
        for index, (prepared, saved) in enumerate(zip(self._prepared, units, strict=True)):
            if read is None or saved is None:
                _close(prepared)
                continue
            ranks = [self._process.rank] if is_own and not saved["is_mean"] else range(num_ranks)
            states = [read(rank)["units"][index] for rank in ranks]
            _open(prepared, states)
            if saved["tokens"] is not None:
                prepared.tokens = prepared.tokens or TokenWindow(self._process)
                prepared.tokens.load_state_dicts([state["tokens"] for state in states], is_own=len(ranks) < num_ranks)


def _save(prepared: PreparedUnit) -> dict[str, Any] | None:
    window = prepared.window
    if not window.is_open:
        return None
    held = prepared.unit.held_gradients()
    if held is None:
        logger.warning(
            "the state is saved after %d of %d micro-batches of an update, and the engine of %s keeps their gradients "
            "to itself: a run that goes on from it begins an update with its first batch. Save where sync_gradients is "
            "true",
            window.held, window.num_steps, type(prepared.unit.module).__name__,
        )  # fmt: skip
        return None
    return {
        "held": window.held,
        "divisor": window.divisor,
        "num_steps": window.num_steps,
        "is_mean": held.is_mean,
        "gradients": held.by_name,
        "tokens": None if prepared.tokens is None else prepared.tokens.state_dict(),
    }


def _check_size(prepared: PreparedUnit, saved: Mapping[str, Any]) -> None:
    if saved["held"] * prepared.window.num_steps % saved["num_steps"]:
        raise IncompatibleCheckpointError(
            f"the state was saved after {saved['held']} of {saved['num_steps']} micro-batches of an update, and this "
            f"run takes {prepared.window.num_steps} for one: none of them ends there. Use "
            f"gradient_accumulation_steps={saved['num_steps']}, or save where sync_gradients is true"
        )


def _open(prepared: PreparedUnit, states: Sequence[Mapping[str, Any]]) -> None:
    """Fill a window with the mean over the ranks that saved, as the all_reduce at its end would have made it."""
    window, saved = prepared.window, states[0]
    ratio = window.num_steps / saved["num_steps"]
    window.held = round(saved["held"] * ratio)
    window.divisor = max(1, round(saved["divisor"] * ratio))
    window.is_last = False
    prepared.took_backward, prepared.corrected = True, False
    # Losses are divided by the divisor, those that are weighed by tokens are not.
    factor = saved["divisor"] * ratio / window.divisor if saved["tokens"] is None else 1.0
    # A mean is that of all ranks: each has saved the place of its shard, and the state of one of them is enough.
    states = states[:1] if saved["is_mean"] else states
    held: dict[str, list[Stored]] = {}
    for state in states:
        for name, gradient in state["gradients"].items():
            held.setdefault(name, []).append(gradient)
    weight = factor / len(states)
    prepared.unit.put_gradients({name: partial(_sum, stored, weight) for name, stored in held.items()})


def _sum(stored: Sequence[Stored], weight: float, box: Box) -> Tensor:
    """Return the weighed sum of the gradients in a box."""
    total: Tensor | None = None
    for each in stored:
        values = each[box.within(Box.full(each.shape))] if isinstance(each, Tensor) else each(box)
        values = values if weight == 1.0 else values * weight
        total = values if total is None else total + values
    assert total is not None
    return total


def _close(prepared: PreparedUnit) -> None:
    """Drop the gradients of this run's window: they belong to another state."""
    if prepared.window.is_open:
        prepared.window.is_last = True
        prepared.unit.zero_grad()
        prepared.drop_tokens()
