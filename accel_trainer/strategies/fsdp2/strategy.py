"""Fully sharded data parallel with torch's `fully_shard` (FSDP2), on GPUs with nccl and on CPUs with gloo."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence, Set
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from accel_trainer import logging
from accel_trainer.checkpoint.weights.writing import USERS_CLASS
from accel_trainer.config import FSDPConfig
from accel_trainer.errors import ConfigError
from accel_trainer.precision import PrecisionPolicy, apply_autocast
from accel_trainer.runtime.mesh import build_mesh_shape, init_mesh
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.torch_private import tree_leaves
from accel_trainer.strategies.api import BaseStrategy, Capabilities, TrainJob
from accel_trainer.strategies.compile import apply_compile
from accel_trainer.strategies.fsdp2.initial_values import (
    awaited_tensors,
    broadcast_differing,
    compare_values,
    fill_sharded_model,
    move_unsharded,
)
from accel_trainer.strategies.fsdp2.unit import (
    FSDP2Unit,
    check_optimizer_can_shard,
    check_optimizer_is_new,
    exchange_full_state,
    refuse_copies,
)
from accel_trainer.strategies.fsdp2.wrapping import (
    apply_activation_checkpointing,
    drop_tied_blocks,
    find_blocks,
    find_ignored_modules,
    warn_of_one_unit,
)
from accel_trainer.strategies.quantized import refuse_8bit_shards
from accel_trainer.strategies.single import NativeUnit, check_optimizers, place, with_optimizers
from accel_trainer.tree import leaves

__all__ = ["FSDP2Strategy"]

logger = logging.get_logger(__name__)


class _Selection(NamedTuple):
    """The modules and parameters of a model that sharding treats in their own way."""

    layers: Sequence[nn.Module] = ()
    """Units of sharding below the root."""
    ignored: Sequence[nn.Module] = ()
    unsharded: frozenset[nn.Parameter] = frozenset()


def _upcast_trainable(model: nn.Module) -> None:
    """Keep master weights in fp32 under mixed precision, and log how many were not."""
    lower = [p for p in model.parameters() if p.requires_grad and p.is_floating_point() and p.dtype != torch.float32]
    if lower:
        logger.info(
            "mixed precision keeps fp32 master weights: %d trainable parameter(s) of %s are upcast from %s",
            len(lower),
            type(model).__name__,
            lower[0].dtype,
        )
        for parameter in lower:
            parameter.data = parameter.data.to(torch.float32)


def _tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the groups of names that share one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def _check_tied(model: nn.Module, groups: list[tuple[str, ...]]) -> None:
    named = dict(model.named_parameters(remove_duplicate=False))
    for names in groups:
        if len({id(named[name]) for name in names}) != 1:
            raise ConfigError(
                f"sharding would untie {', '.join(names)} of {type(model).__name__}, and each would get part "
                "of the gradient; put their modules into one unit with fsdp.wrap_classes, or set "
                "fsdp.wrap_policy to 'none'"
            )


def _require_autocast(precision: PrecisionPolicy) -> None:
    if precision.compute is not None and not precision.autocast_enabled:
        raise ConfigError(
            "AutocastKwargs(enabled=False) was given, and FSDP2 has no autocast to switch off: it gathers parameters "
            f"in {precision.compute}; use mixed_precision='no', or switch autocast off where the loss is computed with "
            "accelerator.autocast(AutocastKwargs(enabled=False))"
        )


def _mixed_precision_policy(precision: PrecisionPolicy, *, root: bool) -> MixedPrecisionPolicy:
    # Only the root's outputs are cast: casting each block's would run every residual stream in fp32.
    return MixedPrecisionPolicy(
        param_dtype=precision.compute, reduce_dtype=precision.reduce, output_dtype=precision.output if root else None
    )


def _reshard_after_inference(module: nn.Module, args: Any, output: Any) -> None:
    """Give memory back after a forward without backward: FSDP2 leaves parameters gathered, waiting for one.

    The root's always, a block's with `reshard_after_forward=False`.
    """
    if not torch.is_grad_enabled():
        module.reshard()  # type: ignore[operator]


def _check_output_is_seen(module: nn.Module, args: Any, output: Any) -> None:
    """Refuse an output in which FSDP2 finds no tensor: it would never learn of the backward, and average nothing."""
    if not torch.is_grad_enabled():
        return
    known = {id(leaf) for leaf in tree_leaves(output)}
    for leaf in leaves(output, is_leaf=lambda node: isinstance(node, Tensor)):
        if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in known:
            raise ConfigError(
                f"the forward of {type(module).__name__} returns a {type(output).__name__}, in which FSDP2 finds no "
                "tensors, so that their gradients would not be averaged; return a tensor, dict, tuple, dataclass or "
                "ModelOutput, or register the class with torch.utils._pytree.register_pytree_node"
            )


class FSDP2Strategy(BaseStrategy):
    """Shards parameters, gradients and optimizer state."""

    name: ClassVar[str] = "fsdp2"
    capabilities: ClassVar[Capabilities] = Capabilities(
        min_world_size=2, shards_parameters=True, distributed_type="FSDP"
    )

    def __init__(self) -> None:
        # Weak: models keep their mesh, and groups have to close with the last of them.
        self._meshes: weakref.WeakValueDictionary[tuple[int, ...], DeviceMesh] = weakref.WeakValueDictionary()

    def check(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> None:
        """Refuse options that do not fit the model or each other, and optimizers that cannot follow."""
        _check(job, precision, process)

    def prepare(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> NativeUnit:
        """Shard the model in place. Collective: meshes are created, and rank 0's values count where ranks differ.

        The model keeps its class, below FSDPModule, its names and its tied weights; on meta, it waits for values.
        """
        selection = _check(job, precision, process)
        model, config = job.model, job.config.fsdp
        if isinstance(model, FSDPModule):
            _warn_of_unused_options(job, precision)
            return with_optimizers(FSDP2Unit(model, (), job.loss_scale), job)
        if next(model.parameters(), None) is None:  # a loss, say: nothing to shard
            place(model, job, process)
            return with_optimizers(NativeUnit(model, model, job.loss_scale), job)
        if job.wrap_policy is None:
            warn_of_one_unit(model, selection.layers, job.resolved)
        blocks = drop_tied_blocks(model, selection.layers)
        tied = _tied_names(model)
        # Weak: an optimizer that is bound later keeps alive the parameters it holds, and no others are needed.
        originals = [(name, weakref.ref(p)) for name, p in model.named_parameters() if p not in selection.unsharded]
        if precision.compute is not None:
            _upcast_trainable(model)
        values = compare_values(model, process, may_await=config.cpu_ram_efficient_loading)
        broadcast_differing(model, values, process.device)
        awaited = awaited_tensors(model, values, process)
        _prepare_unsharded(selection, precision, process.device)
        if config.activation_checkpointing:
            apply_activation_checkpointing(selection.layers)
        apply_compile(model, job.config.compile, job.compile_options)
        root = self._shard(job, blocks, selection.unsharded, precision, process)
        shard_device = torch.device("cpu") if config.offload_params else process.device
        fill_sharded_model(model, values, awaited, process.device, shard_device)
        _check_tied(model, tied)
        exchange_full_state(model, process)
        refuse_copies(model)
        return with_optimizers(FSDP2Unit(root, originals, job.loss_scale), job)

    def _shard(
        self,
        job: TrainJob,
        blocks: Sequence[nn.Module],
        unsharded: Set[nn.Parameter],
        precision: PrecisionPolicy,
        process: ProcessContext,
    ) -> FSDPModule:
        """Make units of sharding of the blocks and the model, with their hooks. Collective for a new mesh."""
        model, config = job.model, job.config.fsdp
        options: dict[str, Any] = {"mesh": self._mesh(process, job), "ignored_params": set(unsharded) or None}
        if config.offload_params:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=process.device.type == "cuda")
        # Before the optimizer is bound: fully_shard replaces every Parameter object, and an optimizer built earlier
        # would keep updating the unsharded tensors without any error.
        for block in reversed(blocks):
            policy = _mixed_precision_policy(precision, root=False)
            fully_shard(block, reshard_after_forward=config.reshard_after_forward, mp_policy=policy, **options)
        setattr(model, USERS_CLASS, type(model))
        root = fully_shard(model, mp_policy=_mixed_precision_policy(precision, root=True), **options)
        _set_prefetch(model, blocks, config)
        for unit in [model] if config.reshard_after_forward else [model, *blocks]:
            unit.register_forward_hook(_reshard_after_inference)
        model.register_forward_hook(_check_output_is_seen)
        model._is_fsdp_managed_module = True  # type: ignore[assignment]  # read by transformers' generate()
        return root

    def _mesh(self, process: ProcessContext, job: TrainJob) -> DeviceMesh:
        """Return the mesh of all models of this shape: one optimizer may hold the parameters of several. Collective."""
        shape = build_mesh_shape(process.world_size, _count_replicas(job.config.fsdp, process))
        known = self._meshes.get(shape)
        return known or self._meshes.setdefault(shape, init_mesh(process, shape))


def _check(job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> _Selection:
    selection = _Selection()
    for optimizer in job.optimizers:
        check_optimizer_can_shard(optimizer)
    if not isinstance(job.model, FSDPModule):
        selection = _select_modules(job, precision, process)
        for optimizer in job.optimizers:
            check_optimizer_is_new(optimizer, {id(p): p for p in job.model.parameters()})
    check_optimizers(job)
    return selection


def _select_modules(job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> _Selection:
    """Select the model's units of sharding, and its unsharded modules and parameters. Changes nothing."""
    model = job.model
    _require_autocast(precision)
    if next(model.parameters(), None) is None:
        return _Selection()
    layers = find_blocks(model, job.resolved, job.wrap_policy)
    ignored = find_ignored_modules(model, job.resolved)
    # fully_shard cuts along rows, and a scalar has none.
    unsharded = {p for p in model.parameters() if p.ndim == 0}
    unsharded.update(p for module in ignored for p in module.parameters())
    _check_combination(job, layers, unsharded)
    refuse_8bit_shards(model)
    if precision.compute is None:  # else they are upcast
        _check_trained_dtypes(model, drop_tied_blocks(model, layers), unsharded)
    build_mesh_shape(process.world_size, _count_replicas(job.config.fsdp, process))
    return _Selection(layers, ignored, frozenset(unsharded))


def _warn_of_unused_options(job: TrainJob, precision: PrecisionPolicy) -> None:
    """Name the options that are without effect on a model that the user has sharded."""
    config, default = job.config.fsdp, FSDPConfig()
    changed = [f.name for f in fields(config) if getattr(config, f.name) != getattr(default, f.name)]
    left_out = [f"fsdp.{name}" for name in changed if name != "state_dict_type"]
    left_out += ["mixed_precision"] if precision.compute is not None else []
    left_out += ["compile.backend"] if job.config.compile.backend != "no" else []
    if left_out:
        logger.warning(
            "%s is sharded already and is taken as it is, without: %s",
            type(job.model).__name__,
            ", ".join(job.resolved.describe(name) for name in left_out),
        )


def _set_prefetch(model: nn.Module, blocks: Sequence[nn.Module], config: FSDPConfig) -> None:
    """Gather the next block during the current one's forward, if asked, and backward, unless declined."""
    if config.forward_prefetch:
        for current, following in itertools.pairwise(blocks):
            current.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    if not config.backward_prefetch:
        # FSDP2 gathers the next unit unless it is given a list, and gathering one that is gathered costs nothing.
        for unit in (model, *blocks):
            unit.set_modules_to_backward_prefetch([unit])  # type: ignore[operator]


def _count_replicas(config: FSDPConfig, process: ProcessContext) -> int:
    """Return the number of replicas of the sharded model."""
    if not config.replicate_per_node:
        return config.replicate_size
    if process.world_size % process.local_world_size:
        raise ConfigError(
            f"fsdp.replicate_per_node: this node has {process.local_world_size} of the job's {process.world_size} "
            "processes, so that nodes hold different numbers of them; start as many on each, or set fsdp.replicate_size"
        )
    return process.world_size // process.local_world_size


def _prepare_unsharded(selection: _Selection, precision: PrecisionPolicy, device: torch.device) -> None:
    """Move unsharded tensors and set their compute dtype, as fully_shard does for the sharded ones."""
    for module in selection.ignored:
        move_unsharded([*module.parameters(), *module.buffers()], device)
        # Its weights stay in fp32 and are handed activations of 16 bits, which it returns as such.
        apply_autocast(module, replace(precision, output=None))
    move_unsharded(selection.unsharded, device)


def _check_combination(job: TrainJob, layers: Sequence[nn.Module], unsharded: Set[nn.Parameter]) -> None:
    """Refuse options that exclude each other, before anything is changed."""
    config, name = job.config.fsdp, type(job.model).__name__
    if config.activation_checkpointing and not layers:
        raise ConfigError(
            f"{job.resolved.describe('fsdp.activation_checkpointing')}: no module of {name} is a unit of its own whose "
            "activations could be computed again; name its block classes in fsdp.wrap_classes"
        )
    if unsharded and job.loss_scale is not None:
        raise ConfigError(
            f"{job.resolved.describe('fsdp.ignored_modules')}: {len(unsharded)} parameter(s) of {name} stay whole, "
            "ignored ones or scalars, and torch's GradScaler cannot unscale sharded and whole gradients together; use "
            "bf16"
        )


def _check_trained_dtypes(model: nn.Module, blocks: Sequence[nn.Module], unsharded: Set[nn.Parameter]) -> None:
    """Refuse trained parameters of several dtypes in one unit, whose gradients FSDP2 reduces together.

    Frozen ones may have others: a base model in bf16, or quantised, under adapters in fp32.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken: set[int] = set()
    for unit in (*reversed(blocks), model):  # deepest first
        own = [p for p in unit.parameters() if id(p) not in taken and p not in unsharded]
        taken.update(map(id, own))
        first: dict[torch.dtype, str] = {}
        for parameter in own:
            if parameter.requires_grad:
                first.setdefault(parameter.dtype, names[id(parameter)])
        if len(first) > 1:
            found = " and ".join(f"{name!r} in {dtype}" for dtype, name in first.items())
            raise ConfigError(
                f"{type(model).__name__} trains {found}, and FSDP2 reduces the gradients of the {type(unit).__name__} "
                "that both are in together, in one dtype; give all that is trained one dtype "
                "(parameter.data = parameter.data.float()), or use mixed_precision='bf16', which keeps it in fp32"
            )
