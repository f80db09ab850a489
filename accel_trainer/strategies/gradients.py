"""Gradients, plain and sharded ones mixed: norms, clipping, and fp16's loss scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from math import prod
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from accel_trainer.checkpoint.shards import local_tensor
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.torch_private import (
    check_scaler,
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_mul_,
    foreach_norm,
    scaler_states,
    scales_itself,
)
from accel_trainer.strategies.optimizers import parameters_of

_NUM_SAMPLES = 4
_SMALL = 1 << 14
"""Elements of a parameter whose gradient is summed in microseconds."""
Groups = tuple[dist.ProcessGroup, ...]
"""Of ranks that hold the other shards of a tensor, one of each axis that shards it."""


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters that have one; a tied parameter counts once."""
    distinct = {id(parameter): parameter for parameter in parameters}
    return [parameter.grad for parameter in distinct.values() if parameter.grad is not None]


def keep_gradients(parameters: Iterable[Tensor]) -> None:
    """Give gradients memory of their own where a backward, a CUDA graph's, is to write the next ones where they lie."""
    for parameter in parameters:
        if parameter.grad is not None and not hasattr(parameter.grad, "is_kept"):
            parameter.grad = parameter.grad.clone()
            parameter.grad.is_kept = True  # type: ignore[attr-defined]  # others are added to it in place


@torch.no_grad()  # to_local() records nothing then, which takes most of its time
def _shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shards; a plain tensor is its own."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def leaves_of(loss: Tensor) -> set[int]:
    """Return the ids of the tensors that a backward of `loss` adds gradients to."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return found


def has_any(module: nn.Module, leaves: Set[int]) -> bool:
    """Return whether a module has parameters among those that `leaves_of` has found."""
    return any(id(parameter) in leaves for parameter in module.parameters())


def total_norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients as one vector: scalar, fp32 or their dtype. Collective where sharded."""
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        return _sharded_norm(gradients, norm_type)
    return torch.nn.utils.get_total_norm(gradients, norm_type)


@torch.no_grad()
def _sharded_norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Norm over gradients of which some are sharded, each over axes of its own. Collective over each of these axes."""
    # Not DTensor's own, which reduces each parameter by itself where their axes differ, and compares meshes rank by
    # rank: with 37 parameters on 4,096 ranks, a sixth of an update of a small model. The order of the steps is its
    # order - one norm for each parameter, reduced as a vector, then made one - and so are the digits.
    if norm_type <= 0:
        raise ConfigError(f"norm_type={norm_type}: norms of sharded gradients have a positive order; use 2.0 or inf")
    shards: dict[Groups, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups, shard = _shard_of(gradient)
        shards[groups].append(shard)
    # In one dtype on all ranks, whatever they hold. The squares of 16-bit norms would be rounded to three digits.
    dtype = reduce(torch.promote_types, {gradient.dtype for gradient in gradients}, torch.float32)
    nothing = torch.zeros((), dtype=dtype, device=next(iter(shards.values()))[0].device)
    norms = {groups: _norms(held, norm_type, nothing) for groups, held in shards.items()}
    while sharded := next((groups for groups in norms if groups), None):
        norms = _reduce_over(sharded[-1], norms, norm_type)
    return torch.linalg.vector_norm(norms[()], norm_type)


def _reduce_over(group: dist.ProcessGroup, norms: dict[Groups, Tensor], norm_type: float) -> dict[Groups, Tensor]:
    """Return norms over the shards of a group's ranks, by the groups that are left. Collective over the group."""
    within = [groups for groups in norms if group in groups]
    values = torch.cat([norms[groups] for groups in within])
    if norm_type == float("inf"):
        values = _maximum(values, group)
    else:
        values = values**norm_type
        dist.all_reduce(values, group=group)
        values = values ** (1.0 / norm_type)
    left = {groups: norm for groups, norm in norms.items() if group not in groups}
    for groups, reduced in zip(within, values.split([len(norms[groups]) for groups in within]), strict=True):
        rest = tuple(other for other in groups if other is not group)
        left[rest] = torch.cat([left[rest], reduced]) if rest in left else reduced
    return left


def _maximum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the maximum over ranks, NaN where a rank has NaN. Collective."""
    # gloo's own keeps or drops a NaN by the number of the rank that has it. The flag travels in the same collective.
    is_nan = values.isnan()
    both = torch.stack([values.masked_fill(is_nan, 0.0), is_nan.to(values.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0].masked_fill(both[1] > 0, float("nan"))


def _shard_of(gradient: Tensor) -> tuple[Groups, Tensor]:
    """Return the groups of ranks that hold the other shards of a gradient, and this rank's own shard."""
    if not isinstance(gradient, DTensor):
        return (), gradient
    if any(placement.is_partial() for placement in gradient.placements):
        whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        gradient = gradient.redistribute(placements=whole)
    mesh = gradient.device_mesh
    axes = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(axis) for axis in axes), gradient.to_local()


def _norms(shards: list[Tensor], norm_type: float, nothing: Tensor) -> Tensor:
    """Return the norm of each shard: a vector with the device and dtype of `nothing`, which is 0."""
    # torch refuses the maximum of nothing, and a rank's shard of a parameter with fewer rows than ranks is empty.
    held = [shard for shard in shards if shard.numel()]
    norms = iter(foreach_norm(held, norm_type, nothing.dtype) if held else ())
    return torch.stack([next(norms).to(nothing.device) if shard.numel() else nothing for shard in shards])


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; return the norm before that.

    Collective over the axes of sharded parameters. `max_norm=inf` only computes. As torch's own: the factor is
    `max_norm / (norm + 1e-6)`, at most 1, applied without waiting for the device.

    Returns:
        Scalar: fp32 or the gradients' dtype.
    """
    gradients = gradients_of(parameters)
    if not gradients:
        return torch.tensor(0.0)
    norm = total_norm(gradients, float(norm_type))  # torch takes "inf", too
    if max_norm != float("inf"):
        # Multiplied by 1 where nothing is to be clipped: a branch on the norm would wait for the device.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        _multiply(gradients, factor)
    return norm


def choose_samples(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return a few small parameters, from the first to the last, the same on all ranks."""
    # A NaN that comes up in a backward is in the gradients of what lies before it, and one in the loss in all: samples
    # from both ends meet both. Evenly sharded ones alone, so that no rank has an empty shard and sees nothing.
    held = (p for p in parameters if p.requires_grad and p.numel())
    even = [p for p in held if local_tensor(p).numel() * num_shards(p) == p.numel()]
    small = [p for p in even if p.numel() <= _SMALL] or sorted(even, key=torch.numel)[:1]
    last = len(small) - 1
    places = {last * index // (_NUM_SAMPLES - 1) for index in range(_NUM_SAMPLES)} if small else ()
    return [small[place] for place in sorted(places)]


def num_shards(tensor: Tensor) -> int:
    """Return over how many ranks the elements of a tensor are distributed."""
    if not isinstance(tensor, DTensor):
        return 1
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for size, placement in axes if not placement.is_replicate())


def sample_sum(samples: Iterable[Tensor]) -> Tensor | None:
    """Return the sum of this rank's gradients of some parameters, NaN or infinite if one is; None without any."""
    shards = _shards(sample.grad for sample in samples if sample.grad is not None)
    sums = [(torch.view_as_real(shard) if shard.is_complex() else shard).sum() for shard in shards]
    return sum((each.to(sums[0].device) for each in sums[1:]), sums[0]) if sums else None


def clip_grad_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every gradient element to [-clip_value, clip_value]. Local to each rank: a shard is clamped where it is."""
    gradients = _shards(gradients_of(parameters))
    if gradients:
        foreach_clamp_min_(gradients, -clip_value)
        foreach_clamp_max_(gradients, clip_value)


def scale_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply all gradients by `factor`: a number, or a scalar on any device."""
    _multiply(gradients_of(parameters), factor)


def _multiply(gradients: list[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients by a number, or by a scalar, which is copied to each device that has some of them."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            return _multiply(_shards(gradients), factor)
        by_device[gradient.device].append(gradient)
    for device, group in by_device.items():
        foreach_mul_(group, factor.to(device) if isinstance(factor, Tensor) else factor)


# --- fp16's loss scale ------------------------------------------------------------------------------------------------


class _BlockingReads(TorchFunctionMode):
    """Context in which copies to the host are complete when they are returned."""

    # A GradScaler asks for copies of the scale and of overflows that do not block, and computes with them at once
    # (torch 2.11 to 2.13). Where gradients are on the host, the scale has not arrived yet, and an overflow that is
    # found there is overwritten by the 0 that comes late. Shards that are offloaded are on the host.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and kwargs.get("non_blocking"):
            target = kwargs.get("device", args[1] if len(args) > 1 else None)
            if isinstance(target, str | torch.device) and torch.device(target).type == "cpu":
                kwargs = {**kwargs, "non_blocking": False}
        return func(*args, **kwargs)


def _reading(optimizer: Optimizer) -> AbstractContextManager[Any]:
    """Return the context in which a GradScaler deals with an optimizer's gradients."""
    is_on_host = any(parameter.device.type == "cpu" for parameter in parameters_of(optimizer))
    return _BlockingReads() if is_on_host else nullcontext()


class _Unit(Protocol):  # the contract imports this module
    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those that the unit has now."""


class LossScale:
    """A GradScaler with the state of the optimizers that share it.

    A window's gradients are unscaled once for each optimizer. The scale is updated when all optimizers of the units
    that one of them belongs to have stepped; at the latest when the next loss is scaled. Gradients of other optimizers
    that still carry the old scale are multiplied to carry the new one.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        check_scaler(scaler)
        self.scaler = scaler
        # A list: unscaling shards is collective, so every rank has to go through them in one order.
        self._references: list[ref[_Unit]] = []
        self._unscaled: set[Optimizer] = set()
        self._done: set[Optimizer] = set()
        """Stepped, or their gradients dropped, since the scale was updated; unscaled all of them."""

    def serve(self, unit: _Unit) -> None:
        """Scale the losses of a unit, too, as long as it lives."""
        self._references.append(ref(unit))

    @property
    def _units(self) -> list[_Unit]:
        return [unit for reference in self._references if (unit := reference()) is not None]

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss, scaled."""
        self.flush()
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Take the scale out of the gradients of an optimizer, once per step."""
        if optimizer not in self._unscaled:
            with _reading(optimizer):
                self.scaler.unscale_(optimizer)
            self._unscaled.add(optimizer)

    def unscale_holders(self, parameters: Iterable[Tensor]) -> None:
        """Unscale the gradients of every optimizer that holds one of the parameters."""
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in self._optimizers():
            if any(id(parameter) in wanted for parameter in parameters_of(optimizer)):
                self.unscale(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer unless its gradients overflowed; return whether it stepped. Waits once for the device."""
        if not self.scaler.is_enabled():
            optimizer.step()
            return True
        state = scaler_states(self.scaler)[id(optimizer)]
        if scales_itself(optimizer) or state["stage"] is OptState.STEPPED:
            # The kernel leaves the parameters as they are after an overflow; a second step is refused.
            with _reading(optimizer):
                self.scaler.step(optimizer)
            applied = not _has_overflow(state)
        else:
            # As scaler.step does, but that it asks the device, and does not say what the answer was.
            self.unscale(optimizer)
            applied = not _has_overflow(state)
            if applied:
                optimizer.step()
            state["stage"] = OptState.STEPPED
        self._unscaled.add(optimizer)
        self._finish(optimizer)
        return applied

    def drop(self, optimizer: Optimizer) -> None:
        """Note that the gradients of an optimizer are dropped: instead of a step, or after it."""
        if optimizer in self._unscaled and optimizer not in self._done:
            self._finish(optimizer)

    def flush(self) -> None:
        """Update the scale for the optimizers that have stepped, without waiting for those that have not."""
        if self._done:
            self._update()

    def _optimizers(self) -> list[Optimizer]:
        return list(dict.fromkeys(optimizer for unit in self._units for optimizer in unit.optimizers))

    def _finish(self, optimizer: Optimizer) -> None:
        self._done.add(optimizer)
        siblings = {
            other for unit in self._units if not self._done.isdisjoint(unit.optimizers) for other in unit.optimizers
        }
        if siblings <= self._done:
            self._update()

    def _update(self) -> None:
        """Update the scale after overflows or their absence, and rescale the other optimizers' gradients."""
        others = [optimizer for optimizer in self._optimizers() if optimizer not in self._done]
        # update() forgets which optimizers are unscaled already, and would count their overflows twice.
        states = scaler_states(self.scaler)
        kept = {id(optimizer): states.pop(id(optimizer)) for optimizer in others if optimizer in self._unscaled}
        before = self.scaler.get_scale() if others else 1.0  # reading it waits for the device
        self.scaler.update()
        states = scaler_states(self.scaler)
        states.update(kept)
        self._unscaled -= self._done
        self._done = set()
        if others and (factor := self.scaler.get_scale() / before) != 1.0:
            for optimizer in others:
                if optimizer not in self._unscaled:
                    scale_gradients(parameters_of(optimizer), factor)


def _has_overflow(state: Mapping[str, Any]) -> bool:
    """Ask the device whether a step's gradients overflowed, on whichever of the devices they are on."""
    found = list(state["found_inf_per_device"].values())
    return bool(sum(each.to(found[0].device, non_blocking=not found[0].is_cpu) for each in found))
