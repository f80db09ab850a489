"""Accumulation windows: micro-batches, divisors and tokens of losses, the unit whose gradients they hold, state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_trainer import logging
from accel_trainer.checkpoint.boxes import Box
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.strategies.api import TrainUnit

logger = logging.get_logger(__name__)


@dataclass(slots=True)
class AccumulationWindow:
    """The micro-batches of one optimizer step, whose gradient is their mean, counted as they come.

    The divisor must be known at the first backward: `num_steps`, or the batches left of a loader that knows its length.
    Gradients of a window that ends earlier (a stream that runs dry) are multiplied by `correction` before their use.
    """

    num_steps: int
    """Micro-batches of a full window."""
    sync_with_dataloader: bool = True
    """Whether the last batch of a loader ends the window."""
    sync_each_batch: bool = False
    """Whether gradients are exchanged on every micro-batch: more communication, less memory when sharded."""
    divides_by_num_steps: bool = False
    """Whether a window that ends early is divided like a full one, as accelerate does: its gradients are smaller."""
    held: int = 0
    """Micro-batches in the window so far, the current one included."""
    divisor: int = 1
    """Each loss of this window is divided by it."""
    is_last: bool = True
    """Whether the current micro-batch ends the window: the optimizer steps on it."""

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ConfigError(f"gradient_accumulation_steps={self.num_steps} must be 1 or more")

    def advance(self, remaining: int | None, ends_data: bool) -> None:
        """Begin a micro-batch; `remaining` batches of the loader include it, None when their number is not known."""
        self.held = 1 if self.is_last else self.held + 1
        if self.num_steps == 1:
            self.divisor, self.is_last = 1, True
            return
        if self.held == 1:
            bounded = self.sync_with_dataloader and remaining is not None and not self.divides_by_num_steps
            self.divisor = min(self.num_steps, remaining) if bounded and remaining else self.num_steps
        self.is_last = self.held >= self.num_steps or (self.sync_with_dataloader and ends_data)

    @property
    def is_open(self) -> bool:
        """Whether the window holds micro-batches and waits for more."""
        return self.held > 0 and not self.is_last

    @property
    def exchanges_gradients(self) -> bool:
        """Whether the backward of the current micro-batch exchanges gradients over the ranks."""
        return self.is_last or self.sync_each_batch

    @property
    def correction(self) -> float:
        """Factor that makes the window's gradients the mean over the micro-batches that it held."""
        is_short = self.is_last and self.held and not self.divides_by_num_steps
        return self.divisor / self.held if is_short else 1.0


class TokenWindow:
    """The tokens that the losses of one accumulation window were summed over.

    Their number is known when the window ends, after most of its backwards. Until then, losses are divided by a
    provisional divisor that is the same on every rank: a power of two near the last window's number, so that dividing
    rounds nothing. At the end the gradients are multiplied by divisor / number. Both are tensors: nothing waits for
    the device.
    """

    def __init__(self, process: ProcessContext) -> None:
        self._process = process
        self._divisor: Tensor | None = None
        """Of the open window, or of the next one; None before the first."""
        self._pending: Tensor | None = None
        """Tokens of a loss that waits for its backward."""
        self._count: Tensor | None = None
        """Tokens, on this rank, of the losses whose gradients the window holds."""
        self._num_losses = 0
        self._num_others = 0

    @property
    def is_weighed(self) -> bool:
        """Whether the next backward gets a loss that `add` was called for."""
        return self._pending is not None

    @property
    def is_open(self) -> bool:
        """Whether the window holds gradients of such losses."""
        return self._count is not None

    def provisional_divisor(self, num_tokens: Tensor, num_steps: int) -> Tensor:
        """Return the divisor of the window's losses: scalar, fp32. Collective for the very first window."""
        if self._divisor is None:
            self._divisor = _power_of_two(self._over_ranks(num_tokens) * num_steps)
        return self._divisor

    def add(self, num_tokens: Tensor, divisor: Tensor) -> None:
        """Count a loss that its backward follows."""
        if self.is_open and divisor is not self._divisor:
            raise ConfigError(
                "global_token_mean() was called for other models than before in this accumulation window; models that "
                "share a loss have to share the window: pass all of them to accumulate() each time"
            )
        self._divisor = divisor
        self._pending = num_tokens if self._pending is None else self._pending + num_tokens

    def take_backward(self) -> None:
        """Note a backward: the gradients of the loss that waited for it are in the window now."""
        if self._pending is None:
            self._num_others += 1
            return
        self._num_losses += 1
        self._count = self._pending if self._count is None else self._count + self._pending
        self._pending = None

    def drop(self) -> None:
        """Forget the window's counts: its gradients are dropped."""
        self._count = None
        self._num_losses = self._num_others = 0

    def begin(self) -> None:
        """Begin a window; one that nobody used is forgotten."""
        self._pending = None
        self.drop()

    def close(self) -> Tensor:
        """End the window; return the factor for its gradients: scalar, fp32. Collective: one all-reduce of a number."""
        assert self._count is not None
        assert self._divisor is not None
        if self._num_others:
            raise ConfigError(
                f"{self._num_losses} of {self._num_losses + self._num_others} losses of this accumulation window came "
                "from global_token_mean(); their gradients are divided by the number of tokens, the others are not: "
                "pass all of them through it, summed over tokens"
            )
        total = self._over_ranks(self._count).clamp(min=1)
        factor = self._divisor / total
        self._divisor = _power_of_two(total)
        self.drop()
        return factor

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of an open window on this rank."""
        return {
            "stand_in": self._divisor,
            "count": self._count,
            "losses": self._num_losses,
            "others": self._num_others,
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], *, is_own: bool) -> None:
        """Take the window of this rank, or those of all ranks of another job, whose tokens rank 0 counts."""
        first = states[0]
        self._divisor, self._pending = first["stand_in"], None
        self._num_losses, self._num_others = first["losses"], first["others"]
        counts = [state["count"] for state in states if state["count"] is not None]
        self._count = sum(counts[1:], counts[0]) if counts else None
        if self._count is not None and not is_own and not self._process.is_main:
            self._count = torch.zeros_like(self._count)

    def _over_ranks(self, num_tokens: Tensor) -> Tensor:
        total = num_tokens.clone()
        if self._process.is_distributed:
            dist.all_reduce(total, group=self._process.group)
        return total


def _power_of_two(number: Tensor) -> Tensor:
    return torch.exp2(torch.floor(torch.log2(number.clamp(min=1).to(torch.float32))))


@dataclass(slots=True, eq=False)
class PreparedUnit:
    """A unit of the strategy, in its accumulation window."""

    unit: TrainUnit
    window: AccumulationWindow
    evaluation_only: bool = False
    """Whether the unit was prepared without an exchange of gradients."""
    took_backward: bool = False
    """Whether the current micro-batch has had its backward."""
    tokens: TokenWindow | None = None
    """Tokens that the window's losses were summed over; None before a loss has been weighed by tokens."""
    corrected: bool = True
    """Whether the gradients are the mean over the window's micro-batches, and nothing is left to scale.

    A field that is set where a window changes, and no property: every update asks for it.
    """

    @property
    def may_drop_gradients(self) -> bool:
        """Whether zeroing gradients now loses none that the window still needs."""
        # Loops zero before the forward or after the step: of a window's first micro-batch, or of its last.
        window = self.window
        if window.num_steps == 1 or window.held == 0:
            return True
        return window.is_last if self.took_backward else window.held == 1

    def take_backward(self, in_window: bool) -> None:
        """Note a backward of the current micro-batch."""
        self.took_backward |= in_window
        if self.tokens is not None:
            self.tokens.take_backward()
            self.corrected &= not self.tokens.is_open

    def drop_tokens(self) -> None:
        """Forget the tokens of gradients that one of the optimizers is about to drop."""
        if self.tokens is not None:
            if self.tokens.is_open and len(self.unit.optimizers) > 1:
                self.finish_window()  # the others may still step with theirs
            self.tokens.drop()

    def abandon(self) -> None:
        """Drop the micro-batches of the window, and let the next micro-batch begin another."""
        self.window.held, self.window.is_last = 0, False
        self.took_backward, self.corrected = False, True
        if self.tokens is not None:
            self.tokens.begin()

    def finish_window(self) -> None:
        """Scale the gradients, once, to the mean over the window's micro-batches. Collective if weighed by tokens."""
        if self.tokens is not None and self.tokens.is_open:
            self.unit.scale_gradients(self.tokens.close())
            self.corrected = True
        elif not self.corrected:
            factor = self.window.correction
            if factor != 1.0:
                self.unit.scale_gradients(factor)
                self.corrected = True


Stored = Tensor | Callable[[Box], Tensor]
"""A gradient in a file: a rank's own, unsharded, or the boxes of one of which every rank has written its shard."""


class OpenWindows:
    """The accumulation windows of the prepared models, for `save_state` and `load_state`."""

    def __init__(
        self, prepared: Sequence[PreparedUnit], process: ProcessContext, readers: ProcessContext, *, is_sharded: bool
    ) -> None:
        self._prepared = prepared
        self._process = process
        self._readers = readers
        self._is_sharded = is_sharded

    def state_dict(self) -> dict[str, Any] | None:
        """Return this rank's gradients of open windows; None if all are closed. Collective where they are sharded."""
        if not any(prepared.window.is_open for prepared in self._prepared):
            return None
        return {"units": [_save(prepared) for prepared in self._prepared], "reader": self._readers.rank}

    def plan_load(self, read: Callable[[int], Mapping[str, Any]] | None, num_ranks: int) -> Callable[[], None]:
        """Return a function that opens saved windows, once they fit, or closes all without `read`. Not collective."""
        if read is None:
            return partial(self._load, read, num_ranks)
        for prepared, saved in zip(self._prepared, read(0)["units"], strict=True):
            num_steps = prepared.window.num_steps
            if saved is not None and saved["held"] * num_steps % saved["num_steps"]:
                raise IncompatibleCheckpointError(
                    f"the state was saved after {saved['held']} of {saved['num_steps']} micro-batches of an update, "
                    f"and this run takes {num_steps} for one: none of them ends there. Use "
                    f"gradient_accumulation_steps={saved['num_steps']}, or save where sync_gradients is true"
                )
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
            _open(prepared, [read(rank)["units"][index] for rank in ranks])
            if saved["tokens"] is not None:
                # Ranks that read the same have counted the same tokens.
                counted = {read(rank).get("reader", rank): read(rank)["units"][index]["tokens"] for rank in ranks}
                prepared.tokens = prepared.tokens or TokenWindow(self._readers)
                prepared.tokens.load_state_dicts(list(counted.values()), is_own=len(ranks) < num_ranks)


def _save(prepared: PreparedUnit) -> dict[str, Any] | None:
    window = prepared.window
    if not window.is_open:
        return None
    held = prepared.unit.held_gradients()
    if held is None:
        logger.warning(
            f"the state is saved after {window.held} of {window.num_steps} micro-batches of an update, and the engine "
            f"of {type(prepared.unit.module).__name__} keeps their gradients to itself: a run that goes on from it "
            "begins an update with its first batch. Save where sync_gradients is true"
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
    values = (each[box.within(Box.full(each.shape))] if isinstance(each, Tensor) else each(box) for each in stored)
    first, *rest = (value if weight == 1.0 else value * weight for value in values)
    return sum(rest, first)


def finish_windows(units: Iterable[PreparedUnit]) -> None:
    """Complete the gradients of units, of each once in a window. Collective."""
    for prepared in units:
        if not prepared.corrected:
            prepared.finish_window()


def _close(prepared: PreparedUnit) -> None:
    """Drop the gradients of this run's window: they belong to another state."""
    if prepared.window.is_open:
        prepared.window.is_last = True
        prepared.unit.zero_grad()
        prepared.drop_tokens()
