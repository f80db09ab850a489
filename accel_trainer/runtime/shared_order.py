"""That all ranks gather and reduce the same parts of a model: a rank on which another part follows asks the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

from accel_trainer.errors import DesyncError
from accel_trainer.runtime.own_watch import current_watch
from accel_trainer.runtime.rank_watch import RankWatch

_SEVERAL = ""
"""Of a place that more than one part has followed: the ranks compare each time."""
_MAX_FIRST_COMPARED = 8
"""Ranks up to which a first occurrence is compared, too: each comparison asks the store once for each."""
_MAX_PLACES = 100_000
_WAY_OUT = (
    "All ranks have to use the same ones in a step: run each part of the model on every rank, multiplied by 0 where "
    "its result is not wanted, or use strategy 'ddp' with find_unused_parameters"
)


class SharedOrder:
    """The parts of a model in the order in which this rank gathers and reduces them, which is that of all ranks.

    A rank that uses other parameters for its rows than the others would be in a collective of its own: gloo ends the
    process of one whose sizes differ, others wait for each other or read wrong memory. Nothing is exchanged for what
    followed at this place before; where something else does, the ranks compare it before they begin a collective.
    """

    def __init__(self, model: str) -> None:
        """Begin with nothing known; `model` is its name in messages."""
        self.is_on = True
        """Whether the present forward is one of training."""
        self._model = model
        self._followers: dict[tuple[int, str], str] = {}
        """The step at each place, told by its number and the steps before."""
        self._place = (0, "")

    def begin(self, *hooked: Any) -> None:
        """Begin anew: at a forward, and behind a backward. Takes the arguments of a forward pre-hook."""
        self.is_on = torch.is_grad_enabled()
        self._place = (0, "")

    def forget(self) -> None:
        """Know nothing again: ranks may have noted different steps by the time at which one was lost."""
        self._followers.clear()
        self.begin()

    def note_gather(self, unit: str) -> None:
        """Note the gather of a part by its name, "" for the outermost one; see `note`."""
        self.note(f"the gather of {_named(unit)}")

    def note_reduction(self, missing: Sequence[str], unit: str | None = None) -> None:
        """Note the reduction of the gradients of a part, or of all; `missing` have none here. See `note`."""
        left_out = f", with none for {', '.join(map(repr, missing))}" if missing else ""
        self.note(f"the reduction of gradients{'' if unit is None else f' of {_named(unit)}'}{left_out}")

    def note(self, part: str) -> None:
        """Note the next step of this rank with a part of the model; compare it with the others where it is new.

        Raises:
            DesyncError: on every rank that asks: they go on with unlike parts.
        """
        if self._followers.get(self._place) != part:
            self._compare(part)
        self._place = (self._place[0] + 1, part)

    def _compare(self, part: str) -> None:
        if len(self._followers) >= _MAX_PLACES:  # of a model that does something else each time
            return
        is_first = self._place not in self._followers
        self._followers[self._place] = part if is_first else _SEVERAL
        watch = current_watch()
        if watch is not None and not (is_first and watch.world_size > _MAX_FIRST_COMPARED):
            self._ask(watch, part)

    def _ask(self, watch: RankWatch, part: str) -> None:
        doing = f"{part} ({self._model})"
        try:
            if watch.all_equal(crc32(part.encode()), doing, are_in_step=True):
                return
        except DesyncError as error:
            raise DesyncError(f"ranks use unlike parameters: {error}. {_WAY_OUT}") from None
        # As the records of calls are: a rank may be in that comparison.
        said = [json.loads(text)[1] for text in watch.exchange(json.dumps((0, [doing])), doing)]
        ranks = "; ".join(f"rank {rank}: {words[-1]}" for rank, words in enumerate(said[:8]) if words)
        raise DesyncError(f"ranks use unlike parameters: {ranks}. Nothing was sent. {_WAY_OUT}")


def _named(unit: str) -> str:
    return repr(unit) if unit else "the outermost unit"
