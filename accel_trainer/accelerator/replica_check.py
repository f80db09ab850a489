"""Ranks of one training have made as many updates, with one learning rate, and hold the same replicas of weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accel_trainer.accelerator.accumulation import PreparedUnit
from accel_trainer.errors import DesyncError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.progress import PROGRESS, find_difference
from accel_trainer.runtime.rank_watch import current_watch
from accel_trainer.runtime.shared_errors import gather_or_raise

UPDATES_PER_CHECK = 64


class _SteppingOptimizer(Protocol):
    """An AcceleratedOptimizer, as far as it is asked here; it calls this file itself."""

    optimizer: Optimizer
    prepared: tuple[PreparedUnit, ...]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        ...

    @property
    def samples(self) -> dict[Tensor, str]:
        """A few of the parameters, with their names in the models."""
        ...


class ReplicaCheck:
    """The comparison of an Accelerator's ranks: at saves, and every 64 updates without a wait for anybody."""

    def __init__(self, process: ProcessContext, *, has_replicas: bool) -> None:
        """Nothing is compared yet.

        Args:
            has_replicas: every rank holds all weights, and steps them by itself.
        """
        self._process = process
        self._has_replicas = has_replicas
        self._pending: tuple[int, dict[str, str], list[str], Tensor] | None = None

    @classmethod
    def of(cls, process: ProcessContext, *, has_replicas: bool) -> ReplicaCheck | None:
        """Return the comparison of a job's ranks; None for one process, whose steps it would cost something."""
        return cls(process, has_replicas=has_replicas) if process.is_distributed else None

    def compare(self, optimizers: Iterable[_SteppingOptimizer], loss_scale: float | None, section: str) -> None:
        """Raise unless all ranks have the same. Collective; waits for the device.

        Raises:
            DesyncError: on every rank; two ranks and their values are named.
        """
        facts = {"the number of updates": str(PROGRESS.updates)}
        if loss_scale is not None:
            facts["the loss scale"] = f"{loss_scale:g}"
        for number, optimizer in enumerate(optimizers, 1):
            facts |= _rates(optimizer, number)
            names, sums = self._weights(optimizer)
            facts |= _as_facts(names, sums)
        if difference := find_difference(gather_or_raise(self._process, section, None, facts)):
            _raise(f"{section}: {difference}. Nothing of it was saved")

    def note_update(self, optimizer: _SteppingOptimizer) -> None:
        """Post this rank's facts before every 64th update; those of an accelerator at the next time.

        Raises:
            DesyncError: ranks have differed.
        """
        watch = current_watch()
        if watch is None:
            return
        if watch.facts.difference:
            _raise(watch.facts.difference)
        facts, (names, sums) = _rates(optimizer), self._weights(optimizer)
        if sums is not None and sums.device.type != "cpu":
            before, self._pending = self._pending, (PROGRESS.updates, facts, names, sums)
            if before is None:
                return
            # Computed long ago: the device is not waited for.
            update, facts, names, sums = before
        else:
            update = PROGRESS.updates
        watch.facts.post(update, {**facts, **_as_facts(names, sums)})

    def _weights(self, optimizer: _SteppingOptimizer) -> tuple[list[str], Tensor | None]:
        """Return names and sums of a few weights that all ranks hold, fp64; None without any."""
        units = [prepared.unit for prepared in optimizer.prepared]
        if not self._has_replicas or any(unit.local_replicas and unit.local_replicas.is_apart for unit in units):
            return [], None
        samples = {name: value for value, name in optimizer.samples.items() if name and not isinstance(value, DTensor)}
        if not samples:
            return [], None
        sums = [value.detach().sum(dtype=torch.float64) for value in samples.values()]
        return list(samples), torch.stack([each.to(sums[0].device) for each in sums])


def _rates(optimizer: _SteppingOptimizer, number: int = 1) -> dict[str, str]:
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    # None where an optimizer finds its own, as Adafactor does; one on a device would be waited for.
    known = [float(r) for r in rates if isinstance(r, int | float) or isinstance(r, Tensor) and r.device.type == "cpu"]
    name = f"the learning rate of optimizer {number} ({type(optimizer.optimizer).__name__})"
    return {name: ", ".join(f"{rate:g}" for rate in known)}


def _as_facts(names: Sequence[str], sums: Tensor | None) -> dict[str, str]:
    if sums is None:
        return {}
    # Other devices may round otherwise.
    kind = _device_name(sums.device)
    return {f"the sum of {name} ({kind})": repr(value) for name, value in zip(names, sums.tolist(), strict=True)}


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    read = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if read is None else str(read(device))


def _raise(text: str) -> NoReturn:
    raise DesyncError(
        f"the ranks are out of step: {text}. Every rank makes each update, with the same learning rate, of the same "
        "weights: look for a step under a condition that not all ranks meet, and for a collective that one leaves out "
        "(debug=True finds it). Resume from an earlier checkpoint"
    )
