"""What an Accelerator was told about saving, and what it holds for it: objects, hooks, the writer, the lock."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_trainer.checkpoint.commit.background import BackgroundSaver
from accel_trainer.checkpoint.commit.lock import LOCK_NAME, DirectoryLock
from accel_trainer.checkpoint.commit.rename import sweep
from accel_trainer.checkpoint.commit.retry import SavePolicy
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext

__all__ = ["CheckpointRegistry", "LoadHook", "SaveHook", "add_hook"]

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
"""Called with the models, their weights, and the directory to write into."""
LoadHook = Callable[[list[nn.Module], str], None]
"""Called with the models and the directory to read from."""


class CheckpointRegistry:
    """All of it, for one Accelerator."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self.background: BackgroundSaver | None = None
        self.lock: DirectoryLock | None = None
        self.release_lock: Callable[[], Any] = lambda: None
        self.metrics: dict[str, float] = {}

    def add(self, name: str | None, item: Any) -> None:
        """Register an object, once; its class names it where the user does not."""
        if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))):
            raise ConfigError(
                f"{type(item).__name__} cannot be registered for checkpointing; give it state_dict() and "
                "load_state_dict()"
            )
        if any(known is item for known in self.objects.values()):
            return
        if name is not None and name in self.objects:
            raise ConfigError(f"an object is registered for checkpointing as {name!r} already; choose another name")
        stem, count = name or type(item).__name__, 0
        while (name or stem) in self.objects:
            count += 1
            name = f"{stem}_{count}"
        self.objects[name or stem] = item

    def start_background(self, process: ProcessContext) -> BackgroundSaver:
        """Return what writes in the background, with its memory free for the next save. Collective the first time."""
        self.background = self.background or BackgroundSaver(process)
        self.background.memory.begin()
        return self.background

    def wait(self) -> None:
        """Wait for a background save; see `AcceleratorCheckpointing.wait_for_checkpoint`."""
        if self.background is not None:
            self.background.wait()

    def wait_for_turn(self, policy: SavePolicy) -> bool:
        """Whether a save may begin: none is in flight any more; see `BackgroundSaver.wait_for_turn`."""
        return self.background is None or self.background.wait_for_turn(policy)

    def close(self) -> None:
        """Wait for a background save, and let other runs save to this one's directory."""
        try:
            self.wait()
        finally:
            self.release_lock()
            self.lock = None

    def own(self, directory: Path, owner: object) -> None:
        """Lock the directory until `close`, or as long as `owner` lives; remove what dead runs left in it."""
        if self.lock is None or self.lock.path.parent != directory.absolute():
            self.release_lock()
            self.lock = DirectoryLock.take(directory / LOCK_NAME)
            self.release_lock = weakref.finalize(owner, self.lock.release)
            if not self.lock.is_shared:  # with another Accelerator of this process, whose save may be under way
                sweep(directory)


def add_hook(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    """Add `hook` to `hooks`; the handle that is returned takes it out again."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
