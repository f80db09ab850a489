"""Collectives over tensors and objects: methods of the Accelerator, and functions for code without one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel_trainer.accelerator.lost_ranks import repeated_by_those_left
from accel_trainer.accelerator.settings import AcceleratorSettings
from accel_trainer.accelerator.shared_state import AcceleratorState, PartialState
from accel_trainer.data.metrics import trim_gathered
from accel_trainer.errors import ConfigError
from accel_trainer.runtime import collectives
from accel_trainer.runtime.collectives import ReduceOp
from accel_trainer.runtime.fault_point import fault_point
from accel_trainer.runtime.process import current_process
from accel_trainer.runtime.rng import check_rng_types, synchronize_rng
from accel_trainer.runtime.uneven_gather import gather_unknown_rows


class AcceleratorGathering(AcceleratorSettings):
    """Collectives over the values of a training or evaluation loop."""

    _is_triggered = False

    @repeated_by_those_left
    def wait_for_everyone(self) -> None:
        """Wait until every rank is here. Collective; returns at once on one process."""
        super().wait_for_everyone()

    @repeated_by_those_left
    def gather(self, tensor: Any, *, pad_index: float | None = None, as_samples: bool = False) -> Any:
        """Concatenate the tensors of all ranks along dim 0, in a structure of the same shape. Collective.

        Args:
            pad_index: fill other dimensions than the first with this value, up to the largest size over the ranks.
            as_samples: return a list in the place of each tensor: its rows over all ranks, each in the shape it had.

        Raises:
            ConfigError: both are given, or a leaf is no tensor.
            ProcessGroupError: with `debug`, or where ranks hold unequally many samples of a step, the ranks' shapes do
                not fit together and neither is given.
        """
        rows = self.gradient_state.rows_over(self.readers.world_size)
        loader = self.gradient_state.active_dataloader
        is_uneven = rows is not None and (not rows.is_even or (loader is not None and loader.yields_items))
        if is_uneven and pad_index is None and not as_samples:
            # A value that a rank computed from its batch has as many rows as that batch.
            return gather_unknown_rows(tensor, self.process)
        debug = self.config.debug
        return collectives.gather(tensor, self.process, debug=debug, pad_index=pad_index, as_samples=as_samples)

    @repeated_by_those_left
    def gather_object(self, item: Any) -> Any:
        """Collect any picklable object from all ranks. Collective."""
        return collectives.gather_object(item, self.process)

    @repeated_by_those_left
    def gather_for_metrics(
        self,
        input_data: Any,
        use_gather_object: bool = False,
        *,
        pad_index: float | None = None,
        as_samples: bool = False,
    ) -> Any:
        """Gather values that the ranks computed from their current batch, every sample exactly once. Collective.

        Which rows are padding is known to the prepared loader that is being iterated; outside of a loop everything is
        kept. A value that is repeated for each sample of a full batch, `loss.repeat(batch_size)`, counts once for each
        sample of a short one, too. Tensors of unequal shapes have to be declared by `pad_index` or `as_samples`, as of
        `gather`; it costs an exchange of shapes.

        Args:
            use_gather_object: take lists and mappings of any picklable values, one for each sample.

        Raises:
            ConfigError: arguments that exclude each other, or a tensor without the rows of an uneven step.
            ProcessGroupError: on every rank, the ranks' shapes differ and nothing declares that they may.
        """
        fault_point("eval.gather")
        loader = self.gradient_state.active_dataloader
        if loader is not None and not use_gather_object:
            input_data = loader.one_for_each(input_data, self.readers.rank)
        return trim_gathered(
            input_data,
            loader.rows if loader is not None else None,
            self.readers,
            use_objects=use_gather_object,
            debug=self.config.debug,
            pad_index=pad_index,
            as_samples=as_samples,
            has_items=loader is not None and loader.yields_items,
            full=None if loader is None else loader.full_size,
        )

    @partial(repeated_by_those_left, is_alike=False)
    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad the tensors of all ranks to the largest size along `dim`. Collective."""
        return collectives.pad_across_processes(
            tensor, self.process, dim=dim, pad_index=pad_index, pad_first=pad_first, debug=self.config.debug
        )

    @repeated_by_those_left
    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Return the tensors of one rank on every rank. Collective."""
        return collectives.broadcast(tensor, self.process, from_process, debug=self.config.debug)

    @repeated_by_those_left
    def broadcast_object_list(self, object_list: list[Any], from_process: int = 0) -> list[Any]:
        """Replace the entries of a list by those of one rank, in place, and return the list. Collective."""
        return collectives.broadcast_object_list(object_list, self.process, from_process)

    @repeated_by_those_left
    def reduce(self, tensor: Any, reduction: ReduceOp | str = ReduceOp.SUM, scale: float = 1.0) -> Any:
        """Combine the tensors of all ranks: "sum", "mean", "min", "max", "prod" or "none". Collective."""
        return collectives.reduce(tensor, self.process, reduction=reduction, scale=scale, debug=self.config.debug)

    def set_trigger(self) -> None:
        """Raise this rank's flag; every rank learns of it at its next `check_trigger`. Ranks do not communicate."""
        self._is_triggered = True

    @repeated_by_those_left
    def check_trigger(self) -> bool:
        """Return whether any rank has raised its flag since the last check, and lower all flags. Collective."""
        flag = torch.tensor(int(self._is_triggered), dtype=torch.int32, device=self.process.device)
        self._is_triggered = False
        return bool(collectives.reduce(flag, self.process, reduction=ReduceOp.MAX).item())


# Functions for code without an Accelerator. They run over the job that this process is in.


def _checks() -> bool:
    """Whether the states of this process have their collectives compare shapes before any data moves."""
    return any(kind._shared_state.get("debug", False) for kind in (PartialState, AcceleratorState))


def gather(tensor: Any) -> Any:
    """Concatenate the tensors of all ranks along dim 0, in a structure of the same shape. Collective."""
    return collectives.gather(tensor, current_process(), debug=_checks())


def gather_object(object: Any) -> list[Any]:
    """Collect any picklable object from all ranks; lists are joined, others become one entry each. Collective."""
    return collectives.gather_object(object, current_process())


def reduce(tensor: Any, reduction: ReduceOp | str = ReduceOp.MEAN, scale: float = 1.0) -> Any:
    """Combine all ranks' tensors by "mean", "sum", "min", "max", "prod" or "none" (of None: "mean"). Collective."""
    return collectives.reduce(tensor, current_process(), reduction=reduction, scale=scale, debug=_checks())


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return the tensors of one rank on every rank. Collective."""
    return collectives.broadcast(tensor, current_process(), from_process, debug=_checks())


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the entries of a list by those of one rank, in place, and return the list. Collective."""
    return collectives.broadcast_object_list(object_list, current_process(), from_process)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad the tensors of all ranks to the largest size along `dim`. Collective."""
    return collectives.pad_across_processes(
        tensor, current_process(), dim=dim, pad_index=pad_index, pad_first=pad_first, debug=_checks()
    )


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """Return one rank's tensor on every rank's device; a ConfigError where none or several give one. Collective."""
    process = current_process()
    given = collectives.gather_object([tensor is not None], process)
    if sum(given) != 1:
        raise ConfigError(
            f"copy_tensor_to_devices got a tensor on {sum(given)} of {len(given)} ranks; give it on one, None elsewhere"
        )
    source = given.index(True)
    info = collectives.broadcast_object(None if tensor is None else (tensor.shape, tensor.dtype), process, source)
    if tensor is None:
        tensor = torch.empty(info[0], dtype=info[1])
    return collectives.broadcast(tensor.to(process.device), process, source)


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Set a stream of random numbers to rank 0's; a ConfigError where this device has none such. Collective."""
    process = current_process()
    if generator is None and rng_type is None:
        raise ConfigError("synchronize_rng_state got neither rng_type nor generator; give one of them")
    if generator is None:
        synchronize_rng_states([rng_type or ""])
    elif process.is_distributed:
        generator.set_state(collectives.broadcast_object(generator.get_state(), process))


def synchronize_rng_states(rng_types: Sequence[str], generator: torch.Generator | None = None) -> None:
    """Set random streams of this process to those of rank 0: "torch" (the CPU's), a kind of device, or "generator".

    Collective. The last one is the stream of `generator`; nothing is done for it without one.

    Raises:
        ConfigError: a stream is none that the ranks have.
    """
    process = current_process()
    names = check_rng_types(rng_types, process.device)
    if process.is_distributed:
        synchronize_rng(names, process)
    if generator is not None and "generator" in [str(getattr(name, "value", name)) for name in rng_types]:
        synchronize_rng_state(generator=generator)


def wait_for_everyone() -> None:
    """Wait until every rank is here. Collective; returns at once on one process."""
    collectives.barrier(current_process())


def GatheredParameters(  # the name that users of DeepSpeed know
    params: Iterable[Tensor] | Tensor, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> AbstractContextManager[Any]:
    """Return the context in which parameters that ZeRO-3 has partitioned are full; an empty one for all others.

    Collective for partitioned parameters. Arguments as of `deepspeed.zero.GatheredParameters`.

    Raises:
        ConfigError: parameters are FSDP2's, which `parameter.full_tensor()` gathers.
    """
    given = [params] if isinstance(params, Tensor) else list(params)
    if enabled and any(hasattr(parameter, "full_tensor") for parameter in given):
        raise ConfigError(
            "GatheredParameters() was given parameters that FSDP2 has sharded, and puts together those of DeepSpeed; "
            "use parameter.full_tensor(), or accelerator.get_state_dict(model)"
        )
    if not enabled or not any(hasattr(parameter, "ds_id") for parameter in given):
        return nullcontext()
    # The library that has partitioned them is imported: no engine is imported here.
    context: AbstractContextManager[Any] = sys.modules["deepspeed"].zero.GatheredParameters(
        given, modifier_rank=modifier_rank, fwd_module=fwd_module
    )
    return context
