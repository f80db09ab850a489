"""Fully sharded data parallel with torch's `fully_shard` (FSDP2), on GPUs with nccl and on CPUs with gloo."""

from __future__ import annotations

import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import fields, replace
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from accel_trainer import logging
from accel_trainer.checkpoint.format.placement import local_tensor
from accel_trainer.checkpoint.weights.writing import USERS_CLASS
from accel_trainer.config import CompileConfig, FSDPConfig, Resolved, WrapPolicy
from accel_trainer.config.parallel import AxisSizes, axis_sizes
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.precision import AutocastForward, PrecisionPolicy, apply_autocast, apply_float8
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.torch_private import (
    flatten_mesh,
    group_timeout,
    set_group_timeout,
    tree_leaves,
    unflatten_mesh,
)
from accel_trainer.strategies.api import BaseStrategy, Capabilities, TrainJob, WrapPolicyFunction
from accel_trainer.strategies.compile import apply_compile, repeated_blocks
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
from accel_trainer.strategies.parallel.sequence_parallel import find_language_model, shard_sequences
from accel_trainer.strategies.parallel.tensor_parallel import (
    Plan,
    check_loss,
    plan_experts,
    plan_layers,
    shard_layers,
    shard_loss,
)
from accel_trainer.strategies.quantized import keep_scales, refuse_8bit_shards
from accel_trainer.strategies.single import NativeUnit, check_optimizers, place, with_optimizers
from accel_trainer.tree import leaves

__all__ = [
    "CheckpointedForward",
    "FSDP2Strategy",
    "OuterUnits",
    "apply_activation_checkpointing",
    "choose_regions",
    "drop_tied_blocks",
    "find_blocks",
    "find_ignored_modules",
    "find_outer_units",
    "init_mesh",
    "warn_of_one_unit",
]

logger = logging.get_logger(__name__)


_MIN_OUTER_NUMEL = 10_000_000
"""Parameters from which an embedding or a head is a unit: 20 MB in bf16. Less is not worth a collective of its own."""


class OuterUnits(NamedTuple):
    """The units of a language model before and behind its layers."""

    embedding: nn.Embedding | None = None
    head: nn.Linear | None = None
    body: nn.Module | None = None
    """The module that holds all layers, and whose output the head, or a loss that fuses it, takes."""


class _Selection(NamedTuple):
    """The modules and parameters of a model that sharding treats in their own way."""

    layers: Sequence[nn.Module] = ()
    """Units of sharding below the root, but the outer ones."""
    outer: OuterUnits = OuterUnits()
    ignored: Sequence[nn.Module] = ()
    unsharded: frozenset[nn.Parameter] = frozenset()
    plan: Plan = MappingProxyType({})
    """Of tensor parallelism."""
    experts: Plan = MappingProxyType({})
    """Of expert parallelism; units of sharding, too."""
    language_model: nn.Module | None = None
    """The module whose sequences are shared out over ranks."""


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


def choose_regions(model: nn.Module, config: CompileConfig, layers: Sequence[nn.Module]) -> CompileConfig:
    """Return the options of torch.compile: block by block, unless the configuration says otherwise."""
    if config.regional is None:
        config = replace(config, regional=True)
    if config.backend != "no" and layers and not (config.regional and repeated_blocks(model)):
        logger.warning(
            "%s is compiled as a whole, and FSDP2 gathers its units by hooks: the graph breaks at each of the %d. "
            "compile.regional=true compiles the members of a ModuleList one by one",
            type(model).__name__,
            len(layers),
        )
    return config


def _reshard_after_inference(module: nn.Module, args: Any, output: Any) -> None:
    """Give memory back after a forward without backward: FSDP2 leaves parameters gathered, waiting for one.

    Those of the root and of the head always, a block's with `reshard_after_forward=False`.
    """
    if not torch.is_grad_enabled():
        module.reshard()  # type: ignore[operator]


def _gather_in_generate(model: nn.Module) -> None:
    """Have a sharded model's own `generate`, if it has one, find the root's parameters gathered, as `forward` does.

    It calls modules by themselves: an encoder of transformers reads embeddings that belong to the root.
    """
    if not callable(getattr(model, "generate", None)):
        return
    register_fsdp_forward_method(model, "generate")
    gathering: Any = model.generate

    @wraps(gathering)
    def generate(*args: Any, **kwargs: Any) -> Any:
        output = gathering(*args, **kwargs)
        _reshard_after_inference(model, args, output)
        return output

    model.generate = generate  # type: ignore[assignment]


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
        self._axes: DeviceMesh | None = None
        """All axes, where some ranks read the same data: those that do not meet in `_readers`."""

    def _axis(self, name: str) -> DeviceMesh | None:
        """Return an axis along which ranks compute a batch together; None where it has one rank."""
        axis = None if self._axes is None else self._axes[name]
        return axis if axis is not None and axis.size() > 1 else None

    def readers(self, resolved: Resolved, process: ProcessContext) -> ProcessContext:
        """Return this process among the ranks along the dp axes. Collective: a mesh with other axes is created."""
        sizes = axis_sizes(resolved.config, resolved.describe, process.world_size, process.num_nodes)
        if resolved.config.fsdp.replicate_per_node and process.num_nodes == 1:
            logger.warning(
                "%s: all %d ranks are on one node, which has the only replica: they share all shards, as without it",
                resolved.describe("fsdp.replicate_per_node"),
                process.world_size,
            )
        if sizes.num_readers == process.world_size:
            return process
        self._axes = init_mesh(process, sizes)
        flatten_mesh(self._axes["dp_replicate", "dp_shard"], "dp")
        if sizes.tp > 1:
            flatten_mesh(self._axes["dp_shard", "tp"], "dp_shard_tp")  # norms are then reduced at once
        return process.among(self._axes.get_group("dp"))

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
            if "generate" not in vars(model):  # the user's own, or that of an earlier prepare
                _gather_in_generate(model)
            return with_optimizers(FSDP2Unit(model, (), job.loss_scale), job)
        if next(model.parameters(), None) is None:  # a loss, say: nothing to shard
            place(model, job, process)
            return with_optimizers(NativeUnit(model, model, job.loss_scale), job)
        if job.wrap_policy is None:
            warn_of_one_unit(model, selection.layers, job.resolved)
        tied = _tied_names(model)
        # Weak: an optimizer that is bound later keeps alive the parameters it holds, and no others are needed.
        originals = [(name, weakref.ref(p)) for name, p in model.named_parameters() if p not in selection.unsharded]
        if precision.compute is not None:
            _upcast_trainable(model)
        selection = _apply_float8(job, selection, precision, process)
        values = compare_values(model, process, may_await=config.cpu_ram_efficient_loading)
        broadcast_differing(model, values, process.device)
        awaited = awaited_tensors(model, values, process)
        _prepare_unsharded(selection, precision, process.device)
        if config.activation_checkpointing:
            apply_activation_checkpointing(selection.layers)
        self._shard_layers(job, selection, process)
        if precision.output is not None:
            # Of the whole model alone, and not by FSDP2's policy, which would cast logits that the loss was made of.
            model.forward = AutocastForward(model, replace(precision, compute=None))
        regions = choose_regions(model, job.config.compile, selection.layers)
        apply_compile(model, regions, job.compile_options)
        root = self._shard(job, selection, precision, process)
        shard_device = torch.device("cpu") if config.offload_params else process.device
        fill_sharded_model(model, values, awaited, process.device, shard_device)
        _check_tied(model, tied)
        exchange_full_state(model, process)
        refuse_copies(model)
        return with_optimizers(FSDP2Unit(root, originals, job.loss_scale), job)

    def _shard_layers(self, job: TrainJob, selection: _Selection, process: ProcessContext) -> None:
        """Give each rank its part of layers that are never gathered, and of sequences. Collective for a new mesh."""
        if (axis := self._axis("tp")) is not None:
            shard_layers(job.model, selection.plan, axis, selection.unsharded)
            if job.config.parallel.loss_parallel:
                shard_loss(job.model, axis)
        for where, style in selection.experts.items():
            shard_layers(job.model.get_submodule(where), {"": style}, self._expert_axes(process, job)["ep"], ())
        if (axis := self._axis("sp")) is not None and selection.language_model is not None:
            shard_sequences(selection.language_model, axis)

    def _shard(
        self, job: TrainJob, selection: _Selection, precision: PrecisionPolicy, process: ProcessContext
    ) -> FSDPModule:
        """Make units of sharding of the selection and of the model, with their hooks. Collective for a new mesh."""
        model, config, outer = job.model, job.config.fsdp, selection.outer
        blocks = _units_below_root(model, selection)
        options: dict[str, Any] = {
            "mesh": self._mesh(process, job),
            "ignored_params": set(selection.unsharded) or None,
            "mp_policy": MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce),
        }
        if config.offload_params:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=process.device.type == "cuda")
        experts = {model.get_submodule(where) for where in selection.experts}
        expert_options = options | (self._options_of_experts(process, job, precision) if experts else {})
        # Before the optimizer is bound: fully_shard replaces every Parameter object, and an optimizer built earlier
        # would keep updating the unsharded tensors without any error.
        for block in reversed(blocks):
            # The head's backward comes right behind its forward.
            reshard = config.reshard_after_forward and block is not outer.head
            fully_shard(block, reshard_after_forward=reshard, **(expert_options if block in experts else options))
        setattr(model, USERS_CLASS, type(model))
        root = fully_shard(model, **options)
        keep_scales(model)
        _set_prefetch(model, blocks, config)
        for unit in [model] if config.reshard_after_forward else [model, *blocks]:
            unit.register_forward_hook(_reshard_after_inference)
        _gather_outer_units(model, outer)
        model.register_forward_hook(_check_output_is_seen)
        model._is_fsdp_managed_module = True  # type: ignore[assignment]  # read by transformers' generate()
        _gather_in_generate(model)
        return root

    def _mesh(self, process: ProcessContext, job: TrainJob) -> DeviceMesh:
        """Return the mesh of all models of this shape: one optimizer may hold the parameters of several. Collective."""
        if self._axes is not None and self._axis("tp") is not None:
            is_hybrid = self._axes["dp_replicate"].size() > 1
            return self._axes["dp_replicate", "dp_shard"] if is_hybrid else self._axes["dp_shard"]
        sizes = _sizes_of(job, process)
        # Ranks of one sequence hold different shards: they see different tokens, as readers see different samples.
        shape = (sizes.num_shards,) if sizes.dp_replicate == 1 else (sizes.dp_replicate, sizes.num_shards)
        known = self._meshes.get(shape)
        return known or self._meshes.setdefault(shape, init_mesh(process, shape))

    def _expert_axes(self, process: ProcessContext, job: TrainJob) -> DeviceMesh:
        """Return the mesh in which the axis of shards is cut in two: ranks of the same experts, and of others.

        Collective when it is new.
        """
        sizes, ep_size = _sizes_of(job, process), job.config.parallel.ep_size
        shape = (sizes.dp_replicate, sizes.dp_shard // ep_size, ep_size)
        axes = self._meshes.get(shape)
        if axes is None:
            axes = unflatten_mesh(self._mesh(process, job), "shard", shape[1:], ("ep_shard", "ep"))
            axes = self._meshes.setdefault(shape, _wait_as_long(axes))
        return axes

    def _options_of_experts(self, process: ProcessContext, job: TrainJob, precision: PrecisionPolicy) -> dict[str, Any]:
        """Return the options of units of experts where they differ from others': ranks of other experts have no part.

        Routing weights stay in their dtype, as they do without a unit of their own.
        """
        axes = self._expert_axes(process, job)

        def cut(parameter: nn.Parameter) -> Shard:
            own_number, ranks = local_tensor(parameter).shape[0], axes["ep_shard"].size()
            return Shard(0 if own_number % ranks == 0 or parameter.shape[1] % ranks else 1)

        policy = MixedPrecisionPolicy(precision.compute, precision.reduce, cast_forward_inputs=False)
        mesh = axes["replicate", "ep_shard"] if axes.ndim == 3 else axes["ep_shard"]
        return {"mesh": mesh, "mp_policy": policy, "shard_placement_fn": cut}


def _check(job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> _Selection:
    selection, parallel = _Selection(), job.config.parallel
    for optimizer in job.optimizers:
        check_optimizer_can_shard(optimizer, in_parts=max(parallel.tp_size, parallel.ep_size) > 1)
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
    own_choice = job.wrap_policy is not None or job.config.fsdp.wrap_policy != WrapPolicy.TRANSFORMER
    outer = OuterUnits() if own_choice else find_outer_units(model, layers, unsharded)
    if precision.compute is None:  # else they are upcast
        _check_trained_dtypes(model, _units_below_root(model, _Selection(layers, outer)), unsharded)
    return _with_plans(_Selection(layers, outer, ignored, frozenset(unsharded)), job, process)


def _with_plans(selection: _Selection, job: TrainJob, process: ProcessContext) -> _Selection:
    """Return the selection with the layers that are never gathered, by the model's own plans. Changes nothing."""
    model, ignored, parallel = job.model, selection.ignored, job.config.parallel
    sizes, describe = _sizes_of(job, process), job.resolved.describe
    if sizes.tp > 1:
        selection = selection._replace(plan=plan_layers(model, sizes.tp, ignored, describe("parallel.tp_size")))
    if parallel.loss_parallel:
        check_loss(model, selection.plan, describe("parallel.loss_parallel"))
    if parallel.ep_size > 1:
        experts = plan_experts(model, parallel.ep_size, ignored, describe("parallel.ep_size"))
        selection = selection._replace(experts=experts)
    if sizes.sp > 1:
        language_model = find_language_model(model, sizes.sp, describe("parallel.sp_size"))
        selection = selection._replace(language_model=language_model)
    return selection


def _apply_float8(
    job: TrainJob, selection: _Selection, precision: PrecisionPolicy, process: ProcessContext
) -> _Selection:
    """Let linear layers compute in fp8, and return the selection with those that took the place of others."""
    if precision.float8 is None:
        return selection
    apply_float8(job.model, precision, shards=True)
    return _select_modules(job, precision, process)


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


# --- mesh -------------------------------------------------------------------------------------------------------------


def _sizes_of(job: TrainJob, process: ProcessContext) -> AxisSizes:
    return axis_sizes(job.config, job.resolved.describe, process.world_size, process.num_nodes)


def init_mesh(process: ProcessContext, shape: tuple[int, ...]) -> DeviceMesh:
    """Create a mesh of one, two or all axes, whose collectives wait as long as the job's own.

    Collective: every rank calls it with the same shape.
    """
    names = {1: ("shard",), 2: ("replicate", "shard"), 4: ("dp_replicate", "dp_shard", "sp", "tp")}[len(shape)]
    return _wait_as_long(init_device_mesh(process.device.type, shape, mesh_dim_names=names))


def _wait_as_long(mesh: DeviceMesh) -> DeviceMesh:
    """Give the groups of a new mesh the timeout of the job's own, and return it."""
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        # new_group() inside init_device_mesh falls back to the backend's default of 10 or 30 minutes. An axis over all
        # ranks is the job's own group, which has its timeout.
        if group is not dist.group.WORLD:
            set_group_timeout(group, group_timeout().total_seconds())
    return mesh


# --- blocks -----------------------------------------------------------------------------------------------------------


def _blocks_by_class(model: nn.Module, class_names: Iterable[str], origin: str) -> list[nn.Module]:
    """Return the submodules of the named classes."""
    present = {type(module).__name__ for module in model.modules()}
    for name in class_names:
        if name not in present:
            leaves_last = sorted(present - {type(m).__name__ for m in model.modules() if not any(m.children())})
            raise ConfigError(
                f"{origin}: no module of class {name!r} in {type(model).__name__}{did_you_mean(name, present) or '.'} "
                f"Its module classes: {', '.join(leaves_last)}"
            )
    wanted = set(class_names)
    return [module for module in model.modules() if type(module).__name__ in wanted]


def _declared_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the submodules of the classes in the `_no_split_modules` of the model and its submodules."""
    declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in declared]


def _blocks_by_function(model: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """Return the submodules for which `policy(module)` is true.

    The policies of `torch.distributed.fsdp.wrap` are called as FSDP1 calls them, deepest modules first: whether to go
    into a module, and whether to make a unit of its parameters that are in no unit yet.
    """
    if "recurse" not in inspect.signature(policy).parameters:
        return [module for module in model.modules() if policy(module)]
    chosen: list[nn.Module] = []
    taken: set[int] = set()

    def num_left(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in taken)

    def visit(module: nn.Module) -> None:
        if policy(module=module, recurse=True, nonwrapped_numel=num_left(module)):
            for child in module.children():
                visit(child)
            if module is not model and policy(module=module, recurse=False, nonwrapped_numel=num_left(module)):
                chosen.append(module)
                taken.update(map(id, module.parameters()))

    visit(model)
    return chosen


def find_blocks(model: nn.Module, resolved: Resolved, policy: WrapPolicyFunction | None) -> list[nn.Module]:
    """Return the submodules to shard as units of their own, in the order of `model.modules()`, without the root.

    A callable wins; then the configuration: class names, else the model's own `_no_split_modules`; by size; or none.

    Raises:
        ConfigError: a class name of the configuration matches nothing.
    """
    config = resolved.config.fsdp
    if policy is not None:
        chosen = _blocks_by_function(model, policy)
    elif config.wrap_policy == WrapPolicy.NONE:
        chosen = []
    elif config.wrap_policy == WrapPolicy.SIZE:
        # Enough parameters that are in no deeper unit; every module is gone into.
        chosen = _blocks_by_function(
            model, lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel >= config.min_num_params
        )
    elif config.wrap_classes:
        chosen = _blocks_by_class(model, config.wrap_classes, resolved.describe("fsdp.wrap_classes"))
    else:
        chosen = _declared_blocks(model)
    picked = {id(module) for module in chosen}
    # ModuleList and ModuleDict have no forward, so a unit made of one would never gather its parameters.
    return [
        module
        for module in model.modules()
        if id(module) in picked and module is not model and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]


def drop_tied_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Leave out blocks that share a parameter with a module outside: both users must be gathered by one unit."""
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(id(module))
    kept = []
    for block in blocks:
        inside = {id(module) for module in block.modules()}
        if all(users[id(parameter)] <= inside for parameter in block.parameters()):
            kept.append(block)
        else:
            logger.info(
                "%s shares a parameter with another module and is sharded with its parent", type(block).__name__
            )
    return kept


def find_outer_units(model: nn.Module, layers: Sequence[nn.Module], unsharded: Set[nn.Parameter]) -> OuterUnits:
    """Return the embedding and the head of a language model that save memory as units of their own; often none.

    In the root's unit they are gathered from the first to the last moment of a step, and so are their gradients. They
    stay there where they are tied, small, in a layer, or of a kind that need not be called to be used.
    """
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # no model of transformers, or one without tokens
        return OuterUnits()
    if head is None and not type(model).__module__.startswith("transformers."):
        embedding = None  # a model of somebody else may multiply by its weight
    inner = {id(module) for layer in layers for module in layer.modules()}
    large = [*filter(_is_large_embedding, [embedding]), *filter(_is_large_head, [head])]
    found = drop_tied_blocks(model, [m for m in large if id(m) not in inner and m.weight not in unsharded])
    body = _body(model, head, layers) if head in found else None
    return OuterUnits(embedding if embedding in found else None, head if body else None, body)


def _is_large_embedding(module: Any) -> bool:
    is_plain = type(module) is nn.Embedding and module.max_norm is None  # which changes the weight in a forward
    return is_plain and module.weight.numel() >= _MIN_OUTER_NUMEL


def _is_large_head(module: Any) -> bool:
    # With a bias torch returns a view, on which FSDP2's hooks are lost by an operation in place.
    is_plain = type(module) is nn.Linear and module.bias is None
    return is_plain and module.weight.numel() >= _MIN_OUTER_NUMEL


def _body(model: nn.Module, head: nn.Module, layers: Sequence[nn.Module]) -> nn.Module | None:
    """Return the largest module that holds the last layer and not the head."""
    for module in model.modules():
        inside = set(module.modules())
        if head not in inside and not inside.isdisjoint(layers[-1:]):
            return module
    return None


def _units_below_root(model: nn.Module, selection: _Selection) -> list[nn.Module]:
    """Return all units but the root, in the order of `model.modules()`."""
    outer, experts = selection.outer, [model.get_submodule(where) for where in selection.experts]
    chosen = {id(m) for m in (*drop_tied_blocks(model, selection.layers), outer.embedding, outer.head, *experts)}
    return [module for module in model.modules() if id(module) in chosen]


def _gather_outer_units(model: nn.Module, outer: OuterUnits) -> None:
    """Gather the embedding for its forward only, and the head as soon as there is something to multiply with it."""
    head: Any = outer.head
    if outer.embedding is not None:
        outer.embedding.set_unshard_in_backward(False)  # type: ignore[operator]  # it reads indices there, no weights
    if outer.body is not None:
        # A loss that fuses the head reads its weight and does not call it. One unit of norm and head would be gathered
        # by the norm; torch 2.11 gathers one no second time that was left before its last module.
        outer.body.register_forward_hook(lambda module, args, output: head.unshard())
        model.register_forward_hook(lambda module, args, output: _reshard_after_inference(head, args, output))


def warn_of_one_unit(model: nn.Module, blocks: Sequence[nn.Module], resolved: Resolved) -> None:
    """Warn that the model is one unit, where the configuration left the choice of blocks to the model."""
    config = resolved.config.fsdp
    if not blocks and config.wrap_policy == WrapPolicy.TRANSFORMER and not config.wrap_classes:
        logger.warning(
            "%s declares no _no_split_modules and fsdp.wrap_classes is empty: the whole model is one unit of "
            "sharding. Name its block classes in fsdp.wrap_classes to gather less memory at once",
            type(model).__name__,
        )


def find_ignored_modules(model: nn.Module, resolved: Resolved) -> list[nn.Module]:
    """Return the submodules whose full names match `fsdp.ignored_modules`; refuse an expression that matches none."""
    found = []
    for pattern in resolved.config.fsdp.ignored_modules:
        origin = resolved.describe("fsdp.ignored_modules")
        matches = [module for name, module in model.named_modules() if name and re.fullmatch(pattern, name)]
        if not matches:
            raise ConfigError(f"{origin}: {pattern!r} matches the name of no submodule of {type(model).__name__}")
        found.extend(matches)
    return found


# --- activation checkpointing ----------------------------------------------------------------------------------------


class CheckpointedForward:
    """A module's forward whose activations are recomputed in the backward.

    Random state is preserved, so that dropout draws the same mask twice. Lives in the module's `forward` attribute, as
    `precision.AutocastForward` does, so parameter names carry no prefix and the module pickles. A forward that somebody
    has put on the instance before is the one that runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def _forward(self) -> Callable[..., Any]:
        return self.inner or partial(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward, keeping only its inputs for the backward."""
        if not torch.is_grad_enabled():
            return self._forward()(*args, **kwargs)
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return checkpoint(self._forward(), *args, use_reentrant=False, **kwargs)


def _is_cache(value: Any) -> bool:
    """Whether `value` holds the keys and values of earlier tokens: a block that runs twice would add its own twice."""
    is_cache = callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))
    if is_cache:
        logger.warning_once("activation checkpointing leaves caches of keys and values out of the forward in training")
    return is_cache


def apply_activation_checkpointing(blocks: Sequence[nn.Module]) -> None:
    """Recompute the activations of each block in the backward; a block that already does so is left alone."""
    for block in blocks:
        if not isinstance(block.__dict__.get("forward"), CheckpointedForward):
            block.forward = CheckpointedForward(block)
