"""Accumulation windows that a save finds half full: what they hold, so that another run can fill them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from accel_trainer import logging
from accel_trainer.accelerator.accumulation import PreparedUnit
from accel_trainer.accelerator.token_mean import TokenWindow
from accel_trainer.checkpoint.format.boxes import Box
from accel_trainer.checkpoint.shards import StoredTensor
from accel_trainer.errors import IncompatibleCheckpointError
from accel_trainer.runtime.process import ProcessContext

__all__ = ["OpenWindows"]

logger = logging.get_logger(__name__)

Stored = Tensor | StoredTensor
"""A gradient in a file: a rank's own whole one, or one of which every rank has written its part."""


class OpenWindows:
    """The accumulation windows of the prepared models, for `save_state` and `load_state`."""

    def __init__(self, prepared: Sequence[PreparedUnit], process: ProcessContext, *, is_sharded: bool) -> None:
        self._prepared = prepared
        self._process = process
        self._is_sharded = is_sharded

    def state_dict(self) -> dict[str, Any] | None:
        """Return this rank's part of the windows that are open; None where all are closed.

        Collective where parameters are sharded.
        """
        if not any(prepared.window.is_open for prepared in self._prepared):
            return None
        return {"units": [_save(prepared) for prepared in self._prepared]}

    def plan_load(self, read: Callable[[int], Mapping[str, Any]] | None, num_ranks: int) -> Callable[[], None]:
        """Return what opens the windows again; without a reader, what closes them all. Ranks do not communicate.

        Args:
            read: returns what a rank saved.
            num_ranks: how many ranks that were.

        Raises:
            IncompatibleCheckpointError: windows have another size in this run, and none of its micro-batches ends
                where the state was saved.
        """
        if read is None:
            return self._close_all
        first = read(0)["units"]
        for prepared, saved in zip(self._prepared, first, strict=True):
            if saved is not None:
                _check_size(prepared, saved)
        return partial(self._load, read, num_ranks)

    def _close_all(self) -> None:
        for prepared in self._prepared:
            _close(prepared)

    def _load(self, read: Callable[[int], Mapping[str, Any]], num_ranks: int) -> None:
        # Ranks that hold gradients of their own go on with them bit by bit; shards are parts of everybody's mean.
        is_own = num_ranks == self._process.world_size and not self._is_sharded
        for index, (prepared, saved) in enumerate(zip(self._prepared, read(0)["units"], strict=True)):
            if saved is None:
                _close(prepared)
                continue
            ranks = [self._process.rank] if is_own and not saved["is_mean"] else range(num_ranks)
            parts = [read(rank)["units"][index] for rank in ranks]
            _open(prepared, parts)
            if saved["tokens"] is not None:
                prepared.tokens = prepared.tokens or TokenWindow(self._process)
                prepared.tokens.load_state_dicts([part["tokens"] for part in parts], is_own=len(ranks) < num_ranks)


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
            window.held,
            window.num_steps,
            type(prepared.unit.module).__name__,
        )
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


def _open(prepared: PreparedUnit, parts: Sequence[Mapping[str, Any]]) -> None:
    """Fill a window with the mean of what ranks have held, which is what the exchange at its end makes of it."""
    window, saved = prepared.window, parts[0]
    ratio = window.num_steps / saved["num_steps"]
    window.held = round(saved["held"] * ratio)
    window.divisor = max(1, round(saved["divisor"] * ratio))
    window.is_last = False
    prepared.took_backward, prepared.corrected = True, False
    # Losses are divided by the divisor, those that are weighed by tokens are not.
    factor = saved["divisor"] * ratio / window.divisor if saved["tokens"] is None else 1.0
    sharers = 1 if saved["is_mean"] else len(parts)
    held: dict[str, list[Stored]] = {}
    # A mean is everybody's: each rank has saved where its part of it is, and one of them is enough.
    for part in parts[:1] if saved["is_mean"] else parts:
        for name, gradient in part["gradients"].items():
            held.setdefault(name, []).append(gradient)
    weight = factor / sharers
    prepared.unit.put_gradients({name: partial(_sum, stored, weight) for name, stored in held.items()})


def _sum(stored: Sequence[Stored], weight: float, box: Box) -> Tensor:
    """Return the sum of a part of each, weighed."""
    total: Tensor | None = None
    for each in stored:
        part = each[box.within(Box.full(each.shape))] if isinstance(each, Tensor) else each.read(box)
        part = part if weight == 1.0 else part * weight
        total = part if total is None else total + part
    assert total is not None
    return total


def _close(prepared: PreparedUnit) -> None:
    """Forget what this run's window holds: it belongs to another state."""
    if prepared.window.is_open:
        prepared.window.is_last = True
        prepared.unit.zero_grad()
        prepared.drop_tokens()
