"""Adafactor of transformers on shards: statistics of rows and columns, and norms, over all shards of a parameter.

Its own step mixes unsharded statistics with sharded gradients, which torch refuses.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from accel_trainer.checkpoint.format.placement import local_tensor
from accel_trainer.errors import ConfigError

__all__ = ["update_by_shards"]

_HALF = (torch.float16, torch.bfloat16)
_MAX_CHUNK_NUMEL = 2**26
"""Elements of a rank's shards that are updated together: their updates are in memory at once, 256 MB in fp32."""

_prepared: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def update_by_shards(optimizer: Optimizer) -> None:
    """Have Adafactor of transformers update each rank's shards as it would the full parameters.

    Other optimizers stay as they are. Its `step` is collective from now on.

    The update stands in a hook before the step, which finds no gradients then and passes on: schedulers may have
    wrapped the method already.
    """
    step = inspect.unwrap(type(optimizer).step)
    is_adafactor = (step.__module__, step.__qualname__) == ("transformers.optimization", "Adafactor.step")
    if is_adafactor and optimizer not in _prepared:
        _prepared.add(optimizer)
        hooks = _StepHooks()
        optimizer.register_step_pre_hook(hooks.before)
        optimizer.register_step_post_hook(hooks.after)


class _StepHooks:
    def __init__(self) -> None:
        self._gradients: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Update the sharded parameters, and hide their gradients from the step itself."""
        if len(args) > 1 or kwargs:  # the first is the optimizer
            raise ConfigError(
                "step(closure) of Adafactor was called on sharded parameters, whose update comes before the closure "
                "would run; call backward() and then step()"
            )
        for group in optimizer.param_groups:
            sharded = [p for p in group["params"] if isinstance(p, DTensor) and p.grad is not None]
            for chunk in _chunks(sharded):
                _update([_Update(optimizer, group, parameter) for parameter in chunk])
            self._gradients += [(p, p.grad) for p in sharded if p.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show the gradients again."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()


def _chunks(parameters: Iterable[DTensor]) -> Iterator[list[DTensor]]:
    """Yield parameters in chunks that are the same on all ranks."""
    chunk: list[DTensor] = []
    numel = 0
    for parameter in parameters:
        numel += parameter.numel() // parameter.device_mesh.size()
        if chunk and numel > _MAX_CHUNK_NUMEL:
            yield chunk
            chunk, numel = [], 0
        chunk.append(parameter)
    if chunk:
        yield chunk


def _update(updates: Sequence[_Update]) -> None:
    """Update parameters together, in three all-reduces for all of them."""
    _reduce(entry for update in updates for entry in update.begin())
    _reduce(entry for update in updates for entry in update.average())
    _reduce(entry for update in updates for entry in update.normalize())
    for update in updates:
        update.apply()


_Sum = tuple[Tensor, tuple[Any, tuple[int, ...]]]
"""A sum over this rank's shard, and the axes of which mesh share out what it is the sum of."""


def _reduce(sums: Iterable[_Sum]) -> None:
    """Add up over ranks, in place."""
    by_axes: dict[Any, list[Tensor]] = {}
    for tensor, (mesh, axes) in sums:
        if axes:
            by_axes.setdefault((mesh, axes, tensor.device), []).append(tensor)
    for (mesh, axes, _), tensors in by_axes.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        for axis in axes:
            dist.all_reduce(flat, group=mesh.get_group(axis))
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))


class _Update:
    """The update of one parameter's shard. Method of Shazeer and Stern, arXiv 1804.04235, with transformers' options.

    State has transformers' names; statistics are sharded as the parameter is where they keep its dimension.
    """

    def __init__(self, optimizer: Any, group: dict[str, Any], parameter: DTensor) -> None:
        self.optimizer, self.group, self.parameter = optimizer, group, parameter
        self.state: dict[str, Any] = optimizer.state[parameter]
        self.local = local_tensor(parameter)
        self.value = self.local.float() if self.local.dtype in _HALF else self.local
        assert parameter.grad is not None
        gradient = local_tensor(parameter.grad)
        self.gradient = gradient.float() if gradient.dtype in _HALF else gradient
        self.is_factored = parameter.ndim >= 2
        self.state["step"] = self.state.get("step", 0) + 1
        self.decay = 1.0 - math.pow(self.state["step"], group["decay_rate"])

    def _axes(self, *dims: int) -> tuple[Any, tuple[int, ...]]:
        """Return the mesh, and its axes that shard one of the dims; all that shard without any named."""
        ndim = self.parameter.ndim
        wanted = {dim % ndim for dim in dims or range(ndim)}
        sharding = [p.dim % ndim if isinstance(p, Shard) else None for p in self.parameter.placements]
        return self.parameter.device_mesh, tuple(axis for axis, dim in enumerate(sharding) if dim in wanted)

    def _statistic(self, key: str, without: int | None = None) -> Tensor:
        """Return this rank's shard of a tensor in the state, which has the parameter's dims but one; 0 at first."""
        parameter, ndim = self.parameter, self.parameter.ndim
        dims = [dim for dim in range(ndim) if without is None or dim != without % ndim]
        placements: list[Placement] = []
        for placement in parameter.placements:
            is_kept = isinstance(placement, Shard) and placement.dim % ndim in dims
            placements.append(Shard(dims.index(placement.dim % ndim)) if is_kept else Replicate())  # type: ignore[attr-defined]
        held, mesh = self.state.get(key), parameter.device_mesh
        if held is None:
            shape = torch.Size([parameter.shape[dim] for dim in dims])
            local = self.gradient.new_zeros([self.local.shape[dim] for dim in dims])
            stride = torch.empty(shape, device="meta").stride()
            held = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        elif not isinstance(held, DTensor):  # loaded in full
            held = distribute_tensor(held.to(self.local.device), mesh, placements, src_data_rank=None)
        held = held.redistribute(mesh, placements).to(self.gradient.dtype)
        self.state[key] = held
        return local_tensor(held)

    def begin(self) -> list[_Sum]:
        """Return the sums of squares, of which the statistics are made."""
        squares = self.gradient.square() + self.group["eps"][0]
        self.squared_value = self.value.square().sum()
        if not self.is_factored:
            self.mean_square = self._statistic("exp_avg_sq")
            self.mean_square.mul_(self.decay).add_(squares, alpha=1.0 - self.decay)
            return [(self.squared_value, self._axes())]
        shape = self.parameter.shape
        self.by_row, self.by_column = squares.sum(-1) / shape[-1], squares.sum(-2) / shape[-2]
        return [
            (self.squared_value, self._axes()),
            (self.by_row, self._axes(-1)),
            (self.by_column, self._axes(-2)),
        ]

    def average(self) -> list[_Sum]:
        """Move the statistics on; return the means of the rows'."""
        if not self.is_factored:
            return []
        self.row = self._statistic("exp_avg_sq_row", without=-1)
        self.column = self._statistic("exp_avg_sq_col", without=-2)
        self.row.mul_(self.decay).add_(self.by_row, alpha=1.0 - self.decay)
        self.column.mul_(self.decay).add_(self.by_column, alpha=1.0 - self.decay)
        self.mean_row = self.row.sum(-1, keepdim=True) / self.parameter.shape[-2]
        return [(self.mean_row, self._axes(-2))]

    def normalize(self) -> list[_Sum]:
        """Divide the gradient by its root mean square; return the squared norm of the result."""
        if self.is_factored:
            rows = (self.row / self.mean_row).rsqrt_().unsqueeze(-1)
            self.update = torch.mul(rows, self.column.rsqrt().unsqueeze(-2)).mul_(self.gradient)
        else:
            self.update = self.mean_square.rsqrt().mul_(self.gradient)
        self.squared_update = self.update.square().sum()
        return [(self.squared_update, self._axes())]

    def apply(self) -> None:
        """Change this rank's shard."""
        group, size = self.group, self.parameter.numel()
        self.state["RMS"] = (self.squared_value / size).sqrt()
        rate = self.optimizer._get_lr(group, self.state)
        rms = (self.squared_update / size).sqrt()
        self.update.div_((rms / group["clip_threshold"]).clamp_(min=1.0)).mul_(rate)
        if group["beta1"] is not None:
            mean = self._statistic("exp_avg")
            self.update = mean.mul_(group["beta1"]).add_(self.update, alpha=1.0 - group["beta1"])
        if group["weight_decay"]:
            self.value.add_(self.value, alpha=-group["weight_decay"] * rate)
        self.value.sub_(self.update)
        if self.value is not self.local:
            self.local.copy_(self.value)
