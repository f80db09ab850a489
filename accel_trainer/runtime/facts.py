"""Facts that are the same on all ranks of a training, compared beside its collectives."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence

import torch.distributed as dist

_KEPT = 4


def find_difference(everyone: Sequence[Mapping[str, str]]) -> str:
    """Return the first fact in which two ranks differ, in words; empty where all agree.

    Args:
        everyone: values of facts by name, of each rank. A fact that a rank does not have is nobody's to compare.
    """
    for name in {name: None for facts in everyone for name in facts}:
        known = [(rank, facts[name]) for rank, facts in enumerate(everyone) if name in facts]
        first_rank, first = known[0]
        for rank, value in known:
            if value != first:
                return f"{name} is {first} on rank {first_rank}, and {value} on rank {rank}"
    return ""


class FactBoard:
    """Facts that the loops of all ranks post now and then, and that threads of theirs compare: no loop waits.

    Attributes:
        difference: what rank 0 has found, in words; empty where there is none.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int) -> None:
        self.difference = ""
        self._store = store
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._posted: deque[tuple[int, Mapping[str, str]]] = deque(maxlen=_KEPT)
        self._open: deque[int] = deque(maxlen=_KEPT)
        """Updates whose facts are not known of all ranks yet; of rank 0."""

    def post(self, update: int, facts: Mapping[str, str]) -> None:
        """Give the facts of this rank after an update, which all ranks post. From the loop; returns at once."""
        # No lock: append() and popleft() of a deque are atomic, and the loop waits for no thread.
        self._posted.append((update, facts))

    def pass_on(self) -> bool:
        """Write posted facts down; return whether rank 0, here, has found a difference. From the thread."""
        while self._posted:
            update, facts = self._posted.popleft()
            self._store.set(f"{self._name}/{update}/{self._rank}", json.dumps(facts))
            if self._rank == 0:
                self._open.append(update)
        for update in list(self._open):
            keys = [f"{self._name}/{update}/{rank}" for rank in range(self._world_size)]
            if self._store.check(keys):
                self._open.remove(update)
                difference = find_difference([json.loads(text) for text in self._store.multi_get(keys)])
                # By rank 0, which alone reads them: the store would grow with the run.
                for key in keys:
                    self._store.delete_key(key)
                if difference:
                    self._store.set(f"{self._name}/difference", f"after update {update} {difference}")
                    return True
        return False

    def look(self) -> None:
        """Read rank 0's result. From the thread."""
        key = f"{self._name}/difference"
        if self._store.check([key]):
            self.difference = self._store.get(key).decode()
