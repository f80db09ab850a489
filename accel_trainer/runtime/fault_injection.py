"""Faults on request, for tests: a rank is killed, stopped or failed at a named point of a run, a save or a load.

    ACCEL_TRAINER_TEST_MODE=1 ACCEL_TRAINER_FAULT="kill9@save.after_shard:rank=1:step=4"

Several are separated by `;`. Without the test mode the variable is not looked at. A point that nothing waits at costs
one look-up in an empty dictionary.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_trainer.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

__all__ = ["KINDS", "POINTS", "fault_point", "hook_faults", "install_faults", "with_fault_point"]

FAULT_VARIABLE = "ACCEL_TRAINER_FAULT"
TEST_MODE_VARIABLE = "ACCEL_TRAINER_TEST_MODE"

KINDS = ("raise", "kill9", "term", "stop", "exit0", "sleep", "gil", "enospc", "flip")

_SAVE_POINTS = (
    "begin",
    "tmp_made",
    "mid_shard",
    "after_shard",
    "before_vote",
    "after_vote",
    "manifest_written",
    "before_rename",
    "after_rename",
    "retention_renamed",
    "retention_rm",
)
POINTS = (
    "data.next",
    "train.forward",
    "train.backward",
    "train.opt",
    "eval.batch",
    "eval.gather",
    *(f"save.{name}" for name in _SAVE_POINTS),
    "stage",
    "load.select",
    "load.verify",
    "load.apply",
)
"""Names of points, in the order in which a run passes them."""


@dataclass
class _Fault:
    kind: str
    point: str
    step: int | None = None
    seconds: float = 3600.0
    passes: int = 0

    def trigger(self, step: int | None, path: Path | None) -> None:
        self.passes += 1
        at = self.passes - 1 if step is None else step
        if self.step is None or self.step == at:
            self._happen(path)

    def _happen(self, path: Path | None) -> None:
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


_SIGNALS = {"kill9": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
_faults: dict[str, _Fault] = {}
_installed = ("", -1)
_HOOKED = "_accel_trainer_forward_faults"


def fault_point(point: str, step: int | None = None, path: Path | None = None) -> None:
    """Trigger the fault that waits at a point, if there is one.

    Args:
        step: number of the checkpoint; a point without one counts its passes from 0.
        path: the file that was just written, for the kind `flip`.
    """
    fault = _faults.get(point)
    if fault is not None:
        fault.trigger(step, path)


def with_fault_point(point: str, items: Iterable[Any]) -> Iterable[Any]:
    """Return `items`; where a fault waits at `point`, pass it before each of them."""
    return _pass_before(point, iter(items)) if point in _faults else items


def _pass_before(point: str, items: Iterator[Any]) -> Iterator[Any]:
    fault_point(point)
    for item in items:
        yield item
        fault_point(point)


def hook_faults(unit: Any) -> None:
    """Pass `train.backward` and `train.opt` before each of these calls of a prepared unit, and the points of a forward.

    Those are `train.forward`, or `eval.batch` in evaluation mode. The hooks are there only where a fault waits for
    them: a training step has none otherwise.

    Args:
        unit: with the methods `backward` and `step`, and the user's own `module` within wrappers: a Trainer evaluates
            it without those, and an engine does not take over its mode.
    """
    for point, name in _CALL_POINTS.items():
        if point in _faults:
            setattr(unit, name, _passing_before(point, getattr(unit, name)))
    module: nn.Module = unit.module
    if not hasattr(module, _HOOKED) and not _faults.keys().isdisjoint(_FORWARD_POINTS.values()):
        setattr(module, _HOOKED, True)
        module.register_forward_pre_hook(lambda module, args: fault_point(_FORWARD_POINTS[module.training]))


def _passing_before(point: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        fault_point(point)
        return method(*args, **kwargs)

    return call


_CALL_POINTS = {"train.backward": "backward", "train.opt": "step"}
_FORWARD_POINTS = {True: "train.forward", False: "eval.batch"}


def install_faults(environ: Mapping[str, str], rank: int) -> None:
    """Take over the faults that the environment asks of this rank; none without the test mode.

    Raises:
        ConfigError: a fault is not of the form `kind@point:rank=R:step=S:seconds=T`, or one of two at a point.
    """
    global _installed
    text = environ.get(FAULT_VARIABLE, "") if environ.get(TEST_MODE_VARIABLE) == "1" else ""
    if (text, rank) == _installed:
        return
    wanted: dict[str, _Fault] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(";"))):
        fault, at_rank = _parse(entry)
        if at_rank is not None and at_rank != rank:
            continue
        if fault.point in wanted:
            raise ConfigError(f"{FAULT_VARIABLE} holds two faults at {fault.point} for rank {rank}; give one")
        wanted[fault.point] = fault
    _faults.clear()
    _faults.update(wanted)
    _installed = (text, rank)


def _parse(text: str) -> tuple[_Fault, int | None]:
    name, *settings = text.split(":")
    kind, _, point = name.partition("@")
    values: dict[str, float] = {}
    try:
        values = {key: float(value) for key, value in (item.split("=") for item in settings)}
    except ValueError:
        kind = ""
    if kind not in KINDS or point not in POINTS or values.keys() - {"rank", "step", "seconds"}:
        hint = did_you_mean(point, POINTS) if point not in POINTS else ""
        raise ConfigError(
            f"{FAULT_VARIABLE} holds {text!r}; expected kind@point:rank=R:step=S:seconds=T with a kind of "
            f"{', '.join(KINDS)} and a point of accel_trainer.runtime.fault_injection.POINTS{hint}"
        )
    step, rank = values.get("step"), values.get("rank")
    fault = _Fault(kind, point, None if step is None else int(step), values.get("seconds", 3600.0))
    return fault, None if rank is None else int(rank)


def _flip_a_bit(path: Path) -> None:
    """Change one bit in the last quarter of a file, where the data of a tensor file is."""
    with open(path, "r+b") as file:
        position = max(0, os.fstat(file.fileno()).st_size * 3 // 4 - 1)
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))
