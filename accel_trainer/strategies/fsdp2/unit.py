"""A model that FSDP2 has sharded: its unit, its gradients within a window, and its own saving and loading methods."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.shards import local_box, local_tensor, wrap_local_like
from accel_trainer.errors import ConfigError, RankLostError
from accel_trainer.precision import convert_to_fp32
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_order import SharedOrder
from accel_trainer.runtime.torch_engines import has_gathered, regroup_units, watch_units, why_not_regrouped
from accel_trainer.runtime.torch_private import foreach_copy_, queue_callback
from accel_trainer.runtime.whereabouts import section
from accel_trainer.strategies.api import CheckpointIO, HeldGradients
from accel_trainer.strategies.gradients import LossScale, num_shards
from accel_trainer.strategies.optimizers import check_kind, parameters_of
from accel_trainer.strategies.own_methods import gather_in_save_pretrained, refuse_merges
from accel_trainer.strategies.parallel.meshes import init_mesh
from accel_trainer.strategies.parameter_state.torch_io import TensorShards, TorchCheckpointIO
from accel_trainer.strategies.single import BackwardGuard, KeptBuffers, NativeUnit

_MAX_CHUNK_NUMEL = 2**26
"""Elements of a rank's shards that are updated together: their updates are in memory at once, 256 MB in fp32.

Without a bound it would be another copy of all shards.
"""

_prepared: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class FSDP2Unit(NativeUnit):
    """A module whose parameters, gradients and optimizer state are sharded over the ranks."""

    def __init__(
        self,
        module: FSDPModule,
        originals: Sequence[tuple[str, weakref.ref[nn.Parameter]]],
        loss_scale: LossScale | None = None,
        order: SharedOrder | None = None,
    ) -> None:
        """Take a sharded model, and the parameters that sharding has replaced, as long as somebody holds them.

        `order`: of its units, where all ranks have the same ones.
        """
        super().__init__(module, module, loss_scale)  # type: ignore[arg-type]
        self._root = module
        self._guard = BackwardGuard(self.module, "FSDP2")
        self._originals = originals
        self._unsharded = UnshardedGradients([p for p in self.module.parameters() if not isinstance(p, DTensor)])
        self.module.register_forward_pre_hook(self._unsharded.watch)
        self._order = order
        mesh = _common_mesh(self.module.parameters())
        self._replicated = mesh if mesh is not None and "replicate" in (mesh.mesh_dim_names or ()) else None
        """The mesh of replicas and their shards; None without replicas."""
        self.needs_vote = self._replicated is not None
        self.replica_size = 1 if self._replicated is None else self._replicated.size() // self._replicated.size(0)
        self._buffers, self._is_aside = KeptBuffers(self.module), False
        if self.needs_vote:
            own = weakref.ref(self)  # else the model would hold its unit
            self.module.register_forward_pre_hook(lambda *_: _end_aside(own()), prepend=True)
        if order is not None:
            _note_units(self.module, order)

    @section("backward")
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate gradients of `loss`. Collective where they are exchanged.

        Raises:
            ConfigError: an earlier backward has failed; FSDP2 keeps what it was about, and gradients would be wrong.
        """
        with self._guard:
            super().backward(loss, **kwargs)
        if self._order is not None:
            if self._unsharded.sync:
                self._order.note("the end of a backward")
            self._order.begin()

    def own_groups(self) -> list[dist.ProcessGroup]:
        """Return those of the axes of replicas and of shards."""
        return [] if self._replicated is None else list(self._replicated.get_all_groups())

    def why_irreplaceable(self) -> str:
        """Return why the other replicas cannot go on without one that has lost a rank: there are none, for one."""
        mesh = self._replicated
        if mesh is None:
            return super().why_irreplaceable()
        if mesh.mesh_dim_names != ("replicate", "shard") or any(map(_is_in_parts, self.module.parameters())):
            return f"its mesh has other axes than those of replicas and shards: {', '.join(mesh.mesh_dim_names or ())}"
        if len(self.optimizers) > 1:
            return "its model has several optimizers, and a rank may be lost between their steps"
        if self._scale is not None:
            return "the ranks of a replica exchange overflows of fp16 in each step"
        return why_not_regrouped(self._root)

    def begin_update(self) -> None:
        """Keep the buffers that a forward changes."""
        self._buffers.keep()
        self._is_aside = False

    def step_aside(self) -> None:
        """Let the next forward end at once: ranks of a replica that have given the micro-batch up gather nothing."""
        self._is_aside = True

    def drop_update(self) -> None:
        """Drop the gradients of shards, and put the buffers back."""
        self._is_aside = False
        self.zero_grad()
        self._buffers.put_back()

    def rejoin(self) -> None:
        """Let the replicas that are left exchange in groups of their own; nothing but gradients of shards is kept."""
        assert self._replicated is not None
        shape = dist.get_world_size() // self.replica_size, self.replica_size
        regroup_units(self._sharded_modules(), init_mesh(self._replicated.device_type, shape))
        self._guard.forget()
        self._unsharded.forget()
        if self._order is not None:
            self._order.forget()

    def has_any(self, leaves: Set[int]) -> bool:
        """Return whether a backward adds gradients to parameters, or to what the forward has gathered for them."""
        return super().has_any(leaves) or has_gathered(self._sharded_modules(), leaves)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Reduce and scatter gradients in the next backward, or keep them unsharded on this rank."""
        self._unsharded.sync = enabled
        self._root.set_requires_gradient_sync(enabled)

    @contextmanager
    def sync_in_backward(self) -> Iterator[None]:
        """Reduce gradients in the backward of this block; FSDP2 asks when it gets there."""
        before = self._unsharded.sync
        self.set_gradient_sync(True)
        try:
            yield
        finally:
            self.set_gradient_sync(before)

    def held_gradients(self) -> HeldGradients | None:
        """Return the mean over ranks of the gradients of an open window, sharded as the parameters are. Collective.

        Within a window FSDP2 keeps them unsharded on every rank, in the parameters that it gathers for a forward. One
        gradient more than the window holds is unsharded at a time.

        Returns:
            None under mixed precision: FSDP2 keeps them elsewhere.
        """
        sharded = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        boxes = {name: Box.full(p.shape) for name, p in sharded.items()}
        local = _unsharded_gradients(sharded)
        for prefix, module in self.module.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            # One unit at a time, on every rank in the same order: gathering is collective.
            module.unshard()
            own = _gathered_parameters(module, prefix, sharded)
            boxes |= {name: local_box(p) for name, p in own.items()}
            local |= {name: local_tensor(p.grad) for name, p in own.items() if p.grad is not None}
            module.reshard()
            if any(p.dtype != sharded[name].dtype for name, p in own.items()):
                return None
        return HeldGradients(_average_over_ranks(sharded, local, boxes), is_mean=True)

    def _gradient_bytes(self) -> int:
        """Size of this rank's shards of the mean over ranks."""
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        return TensorShards(trained, range(dist.get_world_size())).num_bytes

    def known_parameters(self) -> dict[int, nn.Parameter]:
        """Return the sharded parameters by their id, and by that of the parameter that each has replaced."""
        sharded = dict(self.module.named_parameters(remove_duplicate=False))
        replaced = {id(p): sharded[name] for name, reference in self._originals if (p := reference()) is not None}
        return replaced | super().known_parameters()

    def bind_optimizer(self, optimizer: Optimizer) -> None:
        """Take the optimizer; one built before sharding, and new, is pointed to the sharded parameters by name."""
        parameters = list(self.module.parameters())
        check_optimizer_can_shard(
            optimizer,
            in_parts=any(map(_is_in_parts, parameters)),
            num_shards=max(map(num_shards, parameters), default=1),
        )
        # fully_shard has replaced every Parameter object. An optimizer that was built before goes on updating the
        # unsharded ones, which no forward reads, without any error: it is pointed to the shards by name.
        known = self.known_parameters()
        if any(known.get(id(p), p) is not p for p in parameters_of(optimizer)):
            check_optimizer_is_new(optimizer, known)
        super().bind_optimizer(optimizer)
        for group in optimizer.param_groups:
            group["params"] = [known.get(id(p), p) for p in group["params"]]
        update_by_shards(optimizer)

    def update_in_backward(self) -> None:
        """Have optimizers update the shards in the backward; unsharded ones are averaged at its end, and wait."""
        why = "its exchanges would come between those of the backward; leave optimizer_in_backward out"
        for optimizer in self.optimizers:
            check_kind(optimizer, {"accel_trainer.Muon": why, "transformers.Adafactor": why}, "fsdp2")
        self._update_in_backward([p for p in self.module.parameters() if isinstance(p, DTensor)])

    def checkpoint_io(self) -> CheckpointIO:
        """Return the reader and writer of this unit's state."""
        self._reshard()
        return super().checkpoint_io()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context in which the shards are those of the averages; nothing stays gathered of the others."""
        self._reshard()
        with super().averaged_weights():
            try:
                yield
            finally:
                self._reshard()

    def _reshard(self) -> None:
        # A forward without its backward leaves parameters gathered, under other objects than the optimizer's.
        for unit in self._sharded_modules():
            unit.reshard()

    def _sharded_modules(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]


def _end_aside(unit: FSDP2Unit | None) -> None:
    if unit is not None and unit._is_aside:
        unit._is_aside = False
        raise RankLostError("this micro-batch is given up, as others have that had begun it: a rank was lost")


def _note_units(module: nn.Module, order: SharedOrder) -> None:
    """Note each unit as this rank gathers it for a forward of training, and as it reduces its gradients."""

    def gather(unit: str) -> None:
        if torch.is_grad_enabled():
            order.note_gather(unit)

    def reduce(unit: str, missing: Sequence[str]) -> None:
        order.note_reduction(missing, unit)

    units = ((name, each) for name, each in module.named_modules() if isinstance(each, FSDPModule))
    watch_units(units, gather, reduce)
    module.register_forward_pre_hook(order.begin, prepend=True)


_NEEDS_FULL = (
    "its update needs full matrices, and each rank has shards of them; use Adafactor of transformers (optim="
    "'adafactor'), or strategy 'ddp'"
)
_UNSUPPORTED = {
    "bitsandbytes": "its kernels take no shards; use torchao's AdamW8bit (optim='adamw_torch_8bit'), or strategy 'ddp'",
    "apollo_torch": _NEEDS_FULL,
    "galore_torch.Adafactor": _NEEDS_FULL,
    "torch.Adafactor": "it mixes shards with norms of them; use that of transformers (optim='adafactor')",
    "torch.LBFGS": "its directions come of products over all parameters, and a rank would take those of its shards; "
    "use another optimizer, or strategy 'ddp'",
    "torch.Rprop": "it indexes by masks, which shards cannot; use another optimizer, or strategy 'ddp'",
}
_UNSUPPORTED_IN_PARTS = {
    "transformers.Adafactor": "its statistics of rows and columns would be those of the shards of tensor parallelism, "
    "or of each rank's experts; use AdamW, or set tp_size and ep_size to 1"
}
_UNSUPPORTED_ON_CPU = {
    "torchao.AdamW4bit": "its update is compiled, which fails for shards on the CPU; use AdamW8bit, or strategy 'ddp'"
}


def check_optimizer_can_shard(optimizer: Optimizer, *, in_parts: bool, num_shards: int) -> None:
    """Refuse a kind of optimizer that cannot update shards, or those of ranks that compute `in_parts`."""
    unsupported = _UNSUPPORTED | _UNSUPPORTED_IN_PARTS if in_parts else _UNSUPPORTED
    if all(parameter.device.type == "cpu" for parameter in parameters_of(optimizer)):
        unsupported = unsupported | _UNSUPPORTED_ON_CPU
    # Some ranks would have no row: torch 2.13 cannot add its update to the shards ("placement changes").
    if few := [p.shape for p in parameters_of(optimizer) if p.ndim == 2 and p.shape[0] < num_shards]:
        reason = (
            f"a matrix of shape {tuple(few[0])} has fewer rows than the {num_shards} ranks that share it; leave it to "
            "AdamW, or use strategy 'ddp'"
        )
        unsupported = unsupported | {"torch.Muon": reason}
    check_kind(optimizer, unsupported, "fsdp2")


def check_optimizer_is_new(optimizer: Optimizer, known: Mapping[int, nn.Parameter]) -> None:
    """Refuse an optimizer whose state belongs to `known` parameters, which sharding replaces."""
    held = sum(id(parameter) in known for parameter in optimizer.state)
    if held:
        raise ConfigError(
            f"{type(optimizer).__name__} already holds state for {held} parameter(s) and was "
            "built before prepare(); its state belongs to unsharded tensors. Call prepare() before step() and "
            "load_state_dict(), or build the optimizer after the model is prepared and prepare it then"
        )


# --- gradients ------------------------------------------------------------------------------------------------------


class UnshardedGradients:
    """Averages the gradients of unsharded parameters over all ranks at the end of each backward that exchanges them.

    Every rank's backward must reach some of the parameters, or none.
    """

    # By hooks of the parameters, and not in FSDP2Unit.backward: the loss may go backward through another model's unit.

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.sync = True
        """Whether the next backward exchanges gradients."""
        self._parameters = parameters
        self._watched: set[int] = set()
        self._is_queued = False

    def watch(self, module: nn.Module, args: Any) -> None:
        """Hook the parameters that take a gradient now: one may be unfrozen late. A forward pre-hook."""
        if len(self._watched) == len(self._parameters):
            return
        for parameter in self._parameters:
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def forget(self) -> None:
        """Go on behind a backward that has failed."""
        self._is_queued = False

    def _on_gradient(self, parameter: Tensor) -> None:
        if self.sync and not self._is_queued:
            self._is_queued = True
            # In one place and in one order: gradients may become ready in another order on another rank.
            queue_callback(self._average)

    def _average(self) -> None:
        self._is_queued = False
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self._parameters:
            if parameter.grad is not None:
                by_kind.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
        for gradients in by_kind.values():
            # One collective for a kind: each alone may be smaller than a message is worth.
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            flat.div_(dist.get_world_size())
            slices = flat.split([gradient.numel() for gradient in gradients])
            foreach_copy_(gradients, [s.view_as(g) for s, g in zip(slices, gradients, strict=True)])


def _average(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Average a tensor over the ranks that read different data, in place, and return it. Collective.

    Args:
        mesh: of the parameter, or of any. What its ranks compute in parts is their own: a gradient of a rank's experts
            is the mean over those who sent it tokens.
    """
    num_readers = 1
    for group in _groups_of_readers(mesh):
        dist.all_reduce(tensor, group=group)
        num_readers *= dist.get_world_size(group)
    return tensor.div_(num_readers)


def _unsharded_gradients(named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return by name the gradients that this rank has of parameters that are not sharded."""
    return {name: p.grad for name, p in named.items() if p.grad is not None and not isinstance(p, DTensor)}


def _gathered_parameters(unit: FSDPModule, prefix: str, sharded: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that a unit has in place of sharded ones, by the model's names for them."""
    layer: nn.Module = unit  # type: ignore[assignment]  # the mixin does not say that it is one
    return {name: p for name, p in layer.named_parameters(prefix) if p is not sharded.get(name, p)}


def _average_over_ranks(
    sharded: Mapping[str, nn.Parameter], local: Mapping[str, Tensor], boxes: Mapping[str, Box]
) -> dict[str, Tensor]:
    """Average gradients over ranks, those that have been exchanged within the window included. Collective.

    Args:
        local: this rank's gradients of gathered parameters.
        boxes: of the parameters, as this rank has gathered them: a part of each with tensor parallelism.
    """
    names = list(sharded)
    first = next(iter(sharded.values()))
    mesh = _common_mesh(sharded.values())
    # A parameter may have a gradient on one rank only, a mixture's expert for one; the ranks agree on the collectives
    # that follow.
    is_held = torch.tensor([n in local or sharded[n].grad is not None for n in names], dtype=torch.int32)
    is_held = is_held.to(first.device)
    dist.all_reduce(is_held, op=dist.ReduceOp.MAX)
    means: dict[str, Tensor] = {}
    for name, is_wanted in zip(names, is_held.tolist(), strict=True):
        if not is_wanted:
            continue
        parameter, box = sharded[name], boxes[name]
        mean = local[name].clone() if name in local else torch.zeros(box.sizes, dtype=parameter.dtype)
        mean = _average(mean.to(parameter.device), getattr(parameter, "device_mesh", mesh))
        if isinstance(parameter, DTensor):
            shard = mean[local_box(parameter).within(box)].clone()
            if parameter.grad is not None:
                shard += local_tensor(parameter.grad)
            means[name] = wrap_local_like(parameter, shard)
        else:
            everywhere = [] if mesh is None else [Replicate()] * mesh.ndim
            means[name] = mean if mesh is None else DTensor.from_local(mean, mesh, everywhere, run_check=False)
    return means


_PARTS = frozenset(("tp", "ep"))
"""Axes whose ranks compute with parts of a layer that are never gathered."""


def _common_mesh(parameters: Iterable[Tensor]) -> DeviceMesh | None:
    """Return the mesh of all sharded parameters but experts."""
    meshes = (p.device_mesh for p in parameters if isinstance(p, DTensor))
    return next((mesh for mesh in meshes if "ep" not in (mesh.mesh_dim_names or ())), None)


def _groups_of_readers(mesh: DeviceMesh | None) -> list[dist.ProcessGroup | None]:
    """Return groups over all of which a sum is one over the ranks that read different data; None is the job's own."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is None or _PARTS.isdisjoint(names):
        return [None]
    return [mesh.get_group(name) for name in names if name not in _PARTS]


def _is_in_parts(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and not _PARTS.isdisjoint(parameter.device_mesh.mesh_dim_names or ())


# --- the model's own methods ----------------------------------------------------------------------------------------


def exchange_full_state(model: nn.Module, process: ProcessContext) -> None:
    """Let a sharded model save and load full weights by its own methods. Nothing is communicated here."""
    # Scripts written for one process call these: `module.save_pretrained(directory)` would find this rank's shards,
    # and `module.load_state_dict(state)` would be handed tensors that are no shards.
    gather_in_save_pretrained(model, process, partial(TorchCheckpointIO, model))
    refuse_merges(model)
    for module in model.modules():
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            module.register_load_state_dict_pre_hook(_shard_state)


def _shard_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Shard the full tensors meant for `module`'s own parameters; every rank has been given all of them."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:
            box = local_box(parameter).within(Box.full(parameter.shape))
            own = value.detach()[box].to(parameter.device_mesh.device_type)
            state_dict[prefix + name] = wrap_local_like(parameter, own)


# --- Adafactor of transformers on shards ------------------------------------------------------------------------------


def update_by_shards(optimizer: Optimizer) -> None:
    """Have Adafactor of transformers update each rank's shards as it would the full parameters; leave others alone.

    Statistics of rows and columns, and norms, are over all shards of a parameter: its `step` is collective.
    """
    # Its own step mixes unsharded statistics with sharded gradients, which torch refuses. DTensor could run it on
    # sharded statistics, with half a dozen small collectives for each parameter; here there are three for a chunk.
    # In a hook before the step, which finds no gradients then: schedulers may have wrapped the method already.
    step = inspect.unwrap(type(optimizer).step)
    is_adafactor = (step.__module__, step.__qualname__) == ("transformers.optimization", "Adafactor.step")
    if not is_adafactor or optimizer in _prepared:
        return
    _prepared.add(optimizer)
    hidden: list[tuple[Tensor, Tensor]] = []

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1 or kwargs:  # the first is the optimizer
            raise ConfigError(
                "step(closure) of Adafactor was called on sharded parameters, whose update comes before the closure "
                "would run; call backward() and then step()"
            )
        hidden[:] = _step_shards(optimizer)

    def after(*_: Any) -> None:
        for parameter, gradient in hidden:
            parameter.grad = gradient
        hidden.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


@torch.no_grad()
def _step_shards(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Update the sharded parameters, hide their gradients from the step itself, and return both."""
    hidden: list[tuple[Tensor, Tensor]] = []
    for group in optimizer.param_groups:
        sharded = [p for p in group["params"] if isinstance(p, DTensor) and p.grad is not None]
        for chunk in _chunks(sharded):
            _update([_Update(optimizer, group, parameter) for parameter in chunk])
        hidden += [(p, p.grad) for p in sharded if p.grad is not None]
    for parameter, _ in hidden:
        parameter.grad = None
    return hidden


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
        self.value = convert_to_fp32(self.local)
        assert parameter.grad is not None
        self.gradient = convert_to_fp32(local_tensor(parameter.grad))
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
