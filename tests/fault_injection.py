"""Faults on request: a rank is killed, stopped or failed at a named point of a run, a save or a load.

    run_ranks(function, 2, env=fault_env("kill9@save.after_shard:rank=1:step=4"))    in ranks
    with injected("raise@train.forward"): ...                                        in this process

Several are separated by `;`. What a rank of `tests.ranks` finds in its environment, it installs before it runs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from accel_trainer.runtime.fault_point import fault_point, set_fault_hook

VARIABLE = "TESTS_FAULT"
KINDS = ("raise", "kill9", "term", "stop", "exit0", "sleep", "gil", "enospc", "flip")
SAVE_POINTS = tuple(
    f"save.{name}"
    for name in (
        "begin", "tmp_made", "mid_shard", "after_shard", "before_vote", "after_vote", "manifest_written",
        "before_rename", "after_rename", "retention_renamed", "retention_rm",
    )
)  # fmt: skip
# The library has no points of its own before these calls: `_pass_before_calls` puts them there.
CALL_POINTS = ("data.next", "train.forward", "train.backward", "train.opt", "eval.batch")
POINTS = (*CALL_POINTS, "eval.gather", *SAVE_POINTS, "stage", "load.select", "load.verify", "load.apply")
"""Names of points, in the order in which a run passes them."""

_SIGNALS = {"kill9": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


@dataclass
class Fault:
    """What happens at a point; once, where it has a step, and that counts the passes of a point that has none."""

    kind: str
    point: str
    step: int | None = None
    seconds: float = 3600.0
    passes: int = 0

    def trigger(self, step: int | None = None, path: Path | None = None) -> None:
        self.passes += 1
        at = self.passes - 1 if step is None else step
        if self.step is None or self.step == at:
            self.happen(path)

    def happen(self, path: Path | None) -> None:
        if self.kind == "raise":
            raise RuntimeError(f"fault injected at {self.point}")
        if self.kind == "enospc":
            raise OSError(errno.ENOSPC, "No space left on device (injected)", str(path) if path else None)
        if self.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.kind])
        elif self.kind == "exit0":
            os._exit(0)
        elif self.kind == "sleep":
            time.sleep(self.seconds)
        elif self.kind == "gil":
            # PyDLL keeps the interpreter's lock during the call: no other thread of this process runs.
            ctypes.PyDLL(None).usleep(ctypes.c_uint(int(min(self.seconds, 4000) * 1e6)))
        elif path is not None:
            _flip_a_bit(path)


def _flip_a_bit(path: Path) -> None:
    """Change one bit in the last quarter of a file, where the data of a tensor file is."""
    content = bytearray(path.read_bytes())
    content[max(0, len(content) * 3 // 4 - 1)] ^= 1
    with open(path, "r+b") as file:
        file.write(content)


def fault_env(text: str) -> dict[str, str]:
    return {VARIABLE: text}


def install_faults(text: str, rank: int) -> None:
    """Have faults of this rank wait at their points, until the process ends or `remove_faults` is called."""
    faults: dict[str, Fault] = {}
    for fault, at_rank in map(_parse, filter(None, map(str.strip, text.split(";")))):
        if at_rank is None or at_rank == rank:
            assert fault.point not in faults, f"two faults at {fault.point} for rank {rank}"
            faults[fault.point] = fault

    def pass_point(name: str, step: int | None, path: Path | None) -> None:
        if name in faults:
            faults[name].trigger(step, path)

    set_fault_hook(pass_point)
    if not faults.keys().isdisjoint(CALL_POINTS):
        _pass_before_calls()


def _parse(text: str) -> tuple[Fault, int | None]:
    name, *settings = text.split(":")
    kind, _, point = name.partition("@")
    values = {key: float(value) for key, value in (item.split("=") for item in settings)}
    assert kind in KINDS, text
    assert point in POINTS, text
    assert not values.keys() - {"rank", "step", "seconds"}, text
    step, rank = values.get("step"), values.get("rank")
    fault = Fault(kind, point, None if step is None else int(step), values.get("seconds", 3600.0))
    return fault, None if rank is None else int(rank)


_undo: list[Callable[[], None]] = []


def remove_faults() -> None:
    set_fault_hook(None)
    while _undo:
        _undo.pop()()


@contextmanager
def injected(text: str, rank: int = 0) -> Iterator[None]:
    """Have faults wait within the block."""
    install_faults(text, rank)
    try:
        yield
    finally:
        remove_faults()


def _pass_before_calls() -> None:
    """Pass a point before each batch of a prepared loader, and before the calls of an update of a prepared model."""
    from accel_trainer.accelerator.accumulation import PreparedUnit
    from accel_trainer.data.loader import PreparedDataLoader

    read, init = PreparedDataLoader._read, PreparedUnit.__init__

    def read_passing(loader: Any, *args: Any) -> Iterator[Any]:
        items = read(loader, *args)
        fault_point("data.next")
        for item in items:
            yield item
            fault_point("data.next")

    def init_passing(self: Any, unit: Any, *args: Any, **kwargs: Any) -> None:
        init(self, unit, *args, **kwargs)
        unit.backward = _passing_before("train.backward", unit.backward)
        unit.step = _passing_before("train.opt", unit.step)
        # The user's own module within wrappers: a Trainer evaluates it without those. A model may have two units.
        if not hasattr(unit.module, "_passes_fault_points"):
            unit.module._passes_fault_points = True
            unit.module.register_forward_pre_hook(
                lambda module, args: fault_point("train.forward" if module.training else "eval.batch")
            )

    def undo() -> None:
        PreparedDataLoader._read = read  # type: ignore[method-assign]
        PreparedUnit.__init__ = init  # type: ignore[method-assign]

    PreparedDataLoader._read, PreparedUnit.__init__ = read_passing, init_passing  # type: ignore[assignment,method-assign]
    _undo.append(undo)


def _passing_before(point: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        fault_point(point)
        return method(*args, **kwargs)

    return call
