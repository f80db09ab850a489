"""Ranks that give up an attempt together: a vote that reaches ranks which hang, and a process group made anew.

A rank that fails alone leaves the others waiting in a collective, where no further collective can reach them. So ranks
vote through the job's key-value store, and the one that failed leaves the group: with gloo its connections close, and
the others' collectives raise at once. Afterwards every rank joins a new group over the same store.
"""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist

from accel_trainer.errors import ProcessGroupError
from accel_trainer.runtime.torch_private import (
    clear_dtensor_caches,
    default_group,
    default_store,
    forget_default_groups,
    group_device_types,
    group_timeout,
)

__all__ = ["Ballot"]


class Ballot:
    """One vote of all ranks of the default process group, and the means to form that group again."""

    def __init__(self, name: str) -> None:
        """Note backend, device and timeout of the group that this process has joined.

        Args:
            name: of the vote; the same on every rank, and used once in a job.
        """
        self.name = name
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._store = default_store()
        group = default_group()
        self._timeout = group_timeout(group)
        self._recipe: dict[str, Any] = {"backend": dist.get_backend_config(), "device_id": group.bound_device_id}
        self._aborts = any(device.type != "cpu" for device in group_device_types(group))
        self._has_left = False

    def _key(self, rank: int) -> str:
        return f"accel_trainer/{self.name}/{rank}"

    def cast(self, vote: str) -> None:
        """Publish this rank's vote. Returns at once."""
        self._store.set(self._key(self.rank), vote)

    def is_cast(self, vote: str) -> bool:
        """Whether a rank has cast that vote by now. Returns at once."""
        keys = [self._key(rank) for rank in range(self.world_size)]
        return any(self._store.check([key]) and self._store.get(key).decode() == vote for key in keys)

    def wait(self) -> list[str]:
        """Return the votes of all ranks, in the order of ranks. Collective, but no collective of the group.

        Raises:
            ProcessGroupError: a rank has not voted within the group's timeout.
        """
        keys = [self._key(rank) for rank in range(self.world_size)]
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise ProcessGroupError(
                f"rank(s) {missing} did not say within {self._timeout.total_seconds():g} s how {self.name} ended; they "
                "hang or are gone. Look into their output, or raise the timeout (InitProcessGroupKwargs)"
            ) from error
        return [self._store.get(key).decode() for key in keys]

    def leave(self) -> None:
        """Leave the group; whoever waits for this rank in a collective of gloo gets an error.

        An object that refers to the group (a DistributedDataParallel model) keeps its connections open: drop it first.
        """
        if self._has_left:
            return
        self._has_left = True
        if self._aborts:
            # nccl's destructor waits for kernels that can no longer end.
            default_group().abort()
        forget_default_groups()
        dist.destroy_process_group()
        clear_dtensor_caches()
        gc.collect()

    def rejoin(self) -> None:
        """Form the group again. Collective; every rank has voted."""
        self.leave()
        dist.init_process_group(
            store=dist.PrefixStore(f"accel_trainer/{self.name}/group", self._store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=self._timeout,
            **self._recipe,
        )
