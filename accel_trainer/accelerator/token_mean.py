"""Token counts of an accumulation window, to make its gradients those of the mean over all tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext


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
        """Count a loss that its backward follows.

        Raises:
            ConfigError: the window was begun with a loss of other models, divided by another number.
        """
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
        """End the window; return the factor for its gradients: scalar, fp32.

        Collective: one all-reduce of a number.

        Raises:
            ConfigError: other losses took part in the window, too.
        """
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
