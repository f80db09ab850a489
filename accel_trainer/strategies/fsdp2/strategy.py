"""Fully sharded data parallel with torch's `fully_shard` (FSDP2), on GPUs with nccl and on CPUs with gloo."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from accel_trainer import logging
from accel_trainer.checkpoint.shards import local_tensor
from accel_trainer.checkpoint.weights.into_model import names_by_tensor
from accel_trainer.checkpoint.weights.weight_files import USERS_CLASS
from accel_trainer.config import CompileConfig, FSDPConfig, LossImplementation, Resolved
from accel_trainer.errors import ConfigError
from accel_trainer.precision import AutocastForward, PrecisionPolicy, apply_autocast, apply_float8, keep_scales
from accel_trainer.runtime.process import ProcessContext, form_group
from accel_trainer.runtime.shared_order import SharedOrder
from accel_trainer.runtime.torch_private import has_hooks
from accel_trainer.runtime.transport import backend_takes_cpu
from accel_trainer.strategies.api import Capabilities, Strategy, TrainJob
from accel_trainer.strategies.broadcast_values import (
    awaited_tensors,
    broadcast_differing,
    compare_values,
    fill_sharded_model,
    move_unsharded,
    share_buffers_in_evaluation,
)
from accel_trainer.strategies.compile import apply_compile, repeated_blocks
from accel_trainer.strategies.fsdp2.unit import (
    FSDP2Unit,
    check_optimizer_can_shard,
    check_optimizer_is_new,
    exchange_full_state,
)
from accel_trainer.strategies.fsdp2.wrapping import (
    OuterUnits,
    Selection,
    attention_device,
    check_output_is_seen,
    gather_in_generate,
    reshard_after_inference,
    select_modules,
    units_below_root,
    warn_of_one_unit,
)
from accel_trainer.strategies.own_methods import refuse_copies, refuse_second_backward
from accel_trainer.strategies.parallel.meshes import Meshes, sizes_of
from accel_trainer.strategies.parallel.sequence_parallel import shard_sequences
from accel_trainer.strategies.parallel.tensor_parallel import draw_apart, shard_layers, shard_loss
from accel_trainer.strategies.single import (
    NativeUnit,
    check_optimizers,
    make_contiguous,
    place,
    refuse_lazy,
    refuse_shared_memory,
    refuse_sparse_gradients,
)
from accel_trainer.techniques.activations import treat_activations

logger = logging.get_logger(__name__)


def _upcast_trainable(model: nn.Module) -> None:
    """Keep master weights in fp32 under mixed precision, and log how many were not."""
    lower = [p for p in model.parameters() if p.requires_grad and p.is_floating_point() and p.dtype != torch.float32]
    if lower:
        what = "mixed precision keeps fp32 master weights: %d trainable parameter(s) of %s are upcast from %s"
        logger.info(what, len(lower), type(model).__name__, lower[0].dtype)
        for parameter in lower:
            parameter.data = parameter.data.to(torch.float32)


def _own_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes that a user has given parameters; other classes have attributes of the class's making."""
    given = {name: vars(p) for name, p in model.named_parameters() if type(p) is nn.Parameter}
    return {name: {key: own[key] for key in own if not key.startswith("_")} for name, own in given.items()}


def _give_attributes(model: nn.Module, attributes: dict[str, dict[str, Any]]) -> None:
    for name, parameter in model.named_parameters():
        vars(parameter).update(attributes.get(name, {}))


def _check_tied(model: nn.Module, groups: Iterable[list[str]]) -> None:
    named = dict(model.named_parameters(remove_duplicate=False))
    for names in groups:
        if len({id(named[name]) for name in names}) != 1:
            raise ConfigError(
                f"sharding would untie {', '.join(names)} of {type(model).__name__}, and each would get part "
                "of the gradient; put their modules into one unit with fsdp.wrap_classes, or set "
                "fsdp.wrap_policy to 'none'"
            )


def choose_regions(model: nn.Module, config: CompileConfig, layers: Sequence[nn.Module]) -> CompileConfig:
    """Return the options of torch.compile: block by block, unless the configuration says otherwise."""
    if config.regional is None:
        config = replace(config, regional=True)
    if config.backend != "no" and layers and not (config.regional and repeated_blocks(model)):
        logger.warning(
            "%s is compiled as a whole, and FSDP2 gathers its units by hooks: the graph breaks at each of the %d. "
            "compile.regional=true compiles the members of a ModuleList one by one",
            type(model).__name__, len(layers),
        )  # fmt: skip
    return config


class FSDP2Strategy(Strategy):
    """Shards parameters, gradients and optimizer state."""

    name: ClassVar[str] = "fsdp2"
    capabilities: ClassVar[Capabilities] = Capabilities(shards_parameters=True, distributed_type="FSDP")

    def __init__(self) -> None:
        self._meshes = Meshes()

    def start(self, resolved: Resolved, process: ProcessContext) -> Resolved:
        """Have a process group, on which meshes are. On one process a mesh of one runs all that several would."""
        form_group(process)
        return resolved

    def readers(self, resolved: Resolved, process: ProcessContext) -> ProcessContext:
        """Return this process among the ranks along the dp axes. Collective: a mesh with other axes is created."""
        if resolved.config.fsdp.replicate_per_node and process.num_nodes == 1:
            logger.warning(
                "%s is hybrid sharding with a replica on each node, and all %d ranks are on one: they share the shards "
                "of one replica, as without it. Replicas within a node are fsdp.replicate_size",
                resolved.describe("fsdp.replicate_per_node"),
                process.world_size,
            )
        return self._meshes.readers(resolved, process)

    def check(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> None:
        """Refuse options that do not fit the model or each other, and optimizers that cannot follow."""
        _check(job, precision, process)

    def prepare(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> NativeUnit:
        """Shard the model in place. Collective: meshes are created, and rank 0's values count where ranks differ.

        The model keeps its class, below FSDPModule, its names and its tied weights; on meta, it waits for values.
        """
        selection = _check(job, precision, process)
        model, config = job.model, job.config.fsdp
        # Sharded by the user, or by an earlier prepare(): torch refuses a second fully_shard of a module.
        if isinstance(model, FSDPModule):
            _warn_of_unused_options(job, precision)
            if "generate" not in vars(model):  # the user's own, or that of an earlier prepare
                gather_in_generate(model)
            return FSDP2Unit(model, (), job.loss_scale).with_optimizers(job)
        if next(model.parameters(), None) is None:  # a loss, say: nothing to shard
            place(model, job, process)
            return NativeUnit(model, model, job.loss_scale).with_optimizers(job)
        if job.wrap_policy is None:
            warn_of_one_unit(model, selection.layers, job.resolved)
        # fully_shard takes memory that is in the order of rows only; it would refuse in the middle of the model.
        make_contiguous(model, "FSDP2")
        names_by_parameter = names_by_tensor(dict(model.named_parameters(remove_duplicate=False)))
        # Weak: an optimizer that is bound later keeps alive the parameters it holds, and no others are needed.
        originals = [(name, weakref.ref(p)) for name, p in model.named_parameters() if p not in selection.unsharded]
        # By which a loop may choose the groups of an optimizer that it builds afterwards.
        attributes = _own_attributes(model)
        # Before the comparison of values: all that follows sees the parameters in the dtype that they are trained in.
        if precision.compute is not None:
            _upcast_trainable(model)
        if precision.float8 is not None:
            # torchao replaces modules: the units that were selected may hold layers that are no longer in the model.
            apply_float8(model, precision, compiles=job.config.compile.backend != "no", shards=True)
            selection = select_modules(job, precision, process)
        # Collectives from here on. Before sharding: each rank would cut its shards out of a model of its own.
        values = compare_values(model, process, may_await=config.cpu_ram_efficient_loading)
        broadcast_differing(model, values, process.device)
        awaited = awaited_tensors(model, values, process)
        _prepare_unsharded(selection, precision, process.device)
        # Each of the next three puts a forward of its own on modules, around the one that is there: what is recomputed
        # in the backward is the innermost.
        treat_activations(job.model, selection.treated, job.config, process.device)
        self._shard_layers(job, selection, process)
        if precision.output is not None:
            # Of the whole model alone, and not by FSDP2's policy, which would cast logits that the loss was made of.
            model.forward = AutocastForward(model, replace(precision, compute=None))
        # Block by block: a graph of the whole model breaks at every unit, whose hooks gather it.
        regions = choose_regions(model, job.config.compile, selection.layers)
        apply_compile(model, regions, job.compile_options)
        root = self._shard(job, selection, precision, process)
        shard_device = torch.device("cpu") if config.offload_params else process.device
        fill_sharded_model(model, values, awaited, process.device, shard_device)
        # Looked at afterwards: which modules share a unit is only known once torch has made them.
        _check_tied(model, names_by_parameter.values())
        _give_attributes(model, attributes)
        exchange_full_state(model, process)
        share_buffers_in_evaluation(model, model, process.device)
        refuse_copies(model)
        return FSDP2Unit(root, originals, job.loss_scale, _shared_order(job, process)).with_optimizers(job)

    def _shard_layers(self, job: TrainJob, selection: Selection, process: ProcessContext) -> None:
        """Give each rank its part of layers that are never gathered, and of sequences. Collective for a new mesh."""
        if (axis := self._meshes.axis("tp")) is not None:
            shard_layers(job.model, selection.plan, axis, selection.unsharded)
            draw_apart(job.model, selection.plan, axis)
            # A chunked loss leaves the vocabulary sharded anyway.
            if job.config.parallel.loss_parallel and job.config.loss is LossImplementation.PLAIN:
                shard_loss(job.model, axis)
        # A rank's experts are parameters of its own first; FSDP2 then shards them over the ranks with the same ones.
        for where, style in selection.experts.items():
            shard_layers(job.model.get_submodule(where), {"": style}, self._meshes.experts(process, job)["ep"], ())
        parallel = job.config.parallel
        if (axis := self._meshes.axis(parallel.sequence_axis)) is not None and selection.language_model is not None:
            shard_sequences(selection.language_model, axis, parallel.comm_strategy, attention_device(process))

    def _shard(
        self, job: TrainJob, selection: Selection, precision: PrecisionPolicy, process: ProcessContext
    ) -> FSDPModule:
        """Make units of sharding of the selection and of the model, with their hooks. Collective for a new mesh."""
        model, config, outer = job.model, job.config.fsdp, selection.outer
        blocks = units_below_root(model, selection)
        options: dict[str, Any] = {
            "mesh": self._meshes.shards(process, job),
            "ignored_params": set(selection.unsharded) or None,
            "mp_policy": MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce),
        }
        if config.offload_params:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=process.device.type == "cuda")
        experts = {model.get_submodule(where) for where in selection.experts}
        own = _options_of_experts(self._meshes.experts(process, job), precision) if experts else {}
        # Before the optimizer is bound: fully_shard replaces every Parameter object, and an optimizer built earlier
        # would keep updating the unsharded tensors without any error.
        for block in reversed(blocks):
            # The head's backward comes right behind its forward.
            reshard = config.reshard_after_forward and block is not outer.head
            fully_shard(block, reshard_after_forward=reshard, **(options | own if block in experts else options))
        # fully_shard puts a class of its own before the user's, which a model that saves itself is to have again.
        setattr(model, USERS_CLASS, type(model))
        root = fully_shard(model, **options)
        keep_scales(model)
        _set_prefetch(model, blocks, config)
        for unit in [model] if config.reshard_after_forward else [model, *blocks]:
            unit.register_forward_hook(reshard_after_inference)
        _gather_outer_units(model, outer)
        model.register_forward_hook(check_output_is_seen)
        refuse_second_backward(model, "FSDP2 gives the gathered weights back")
        # transformers' generate() reads it, and goes on while any rank has tokens to make: a forward is collective.
        model._is_fsdp_managed_module = True  # type: ignore[assignment]
        gather_in_generate(model)
        return root


def _shared_order(job: TrainJob, process: ProcessContext) -> SharedOrder | None:
    """Return the order of a model's units, where all ranks have the same ones."""
    # A rank's own experts may get no tokens, and no gradients.
    if not process.is_distributed or job.config.parallel.ep_size > 1:
        return None
    return SharedOrder(getattr(job.model, USERS_CLASS).__name__)


def _options_of_experts(axes: DeviceMesh, precision: PrecisionPolicy) -> dict[str, Any]:
    """Return the options of units of experts where they differ from others': ranks of other experts have no part.

    Routing weights stay in their dtype, as they do without a unit of their own.
    """

    def cut(parameter: nn.Parameter) -> Shard:
        own_number, ranks = local_tensor(parameter).shape[0], axes["ep_shard"].size()
        return Shard(0 if own_number % ranks == 0 or parameter.shape[1] % ranks else 1)

    policy = MixedPrecisionPolicy(precision.compute, precision.reduce, cast_forward_inputs=False)
    mesh = axes["replicate", "ep_shard"] if axes.ndim == 3 else axes["ep_shard"]
    return {"mesh": mesh, "mp_policy": policy, "shard_placement_fn": cut}


def _check(job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> Selection:
    selection, parallel = Selection(), job.config.parallel
    if job.config.fsdp.offload_params and process.device.type != "cpu" and not backend_takes_cpu():
        joined = dist.get_backend_config()
        raise ConfigError(
            f"{job.resolved.describe('fsdp.offload_params')} keeps shards and gradients on the CPU, where their norm "
            f"and whole tensors are made, and the process group was initialised with backend {joined!r}, which carries "
            f"no tensors of the CPU; initialise it with 'cpu:gloo,{joined}'"
        )
    for optimizer in job.optimizers:
        in_parts = max(parallel.tp_size, parallel.ep_size) > 1
        check_optimizer_can_shard(optimizer, in_parts=in_parts, num_shards=sizes_of(job, process).num_shards)
    if not isinstance(job.model, FSDPModule):
        refuse_lazy(job.model)
        selection = select_modules(job, precision, process)
        refuse_shared_memory(job.model, "FSDP2")
        refuse_sparse_gradients(job.model, "FSDP2")
        _refuse_hooks(job.model, selection.unsharded)
        for optimizer in job.optimizers:
            check_optimizer_is_new(optimizer, {id(p): p for p in job.model.parameters()})
    check_optimizers(job)
    return selection


def _refuse_hooks(model: nn.Module, unsharded: Collection[nn.Parameter]) -> None:
    """Refuse functions that a parameter calls with its gradient: the shards that replace it would call none."""
    for name, parameter in model.named_parameters():
        if has_hooks(parameter) and parameter.requires_grad and parameter not in unsharded:
            raise ConfigError(
                f"{name!r} of {type(model).__name__} has hooks for its gradient (register_hook, "
                "register_post_accumulate_grad_hook), and FSDP2 puts a shard in its place, which would call none of "
                "them; change the gradient between backward() and step(), where parameter.grad is the mean over all "
                "ranks, or train with strategy: ddp"
            )


def _warn_of_unused_options(job: TrainJob, precision: PrecisionPolicy) -> None:
    """Name the options that are without effect on a model that the user has sharded."""
    config, default = job.config.fsdp, FSDPConfig()
    changed = [f.name for f in fields(config) if getattr(config, f.name) != getattr(default, f.name)]
    left_out = [f"fsdp.{name}" for name in changed if name != "state_dict_type"]
    left_out += ["mixed_precision"] if precision.compute is not None else []
    left_out += ["compile.backend"] if job.config.compile.backend != "no" else []
    left_out += ["activation_checkpointing"] if job.config.activation_checkpointing != "off" else []
    left_out += ["activation_offload"] if job.config.activation_offload else []
    if left_out:
        described = ", ".join(map(job.resolved.describe, left_out))
        logger.warning("%s is sharded already and is taken as it is, without: %s", type(job.model).__name__, described)


def _set_prefetch(model: nn.Module, blocks: Sequence[nn.Module], config: FSDPConfig) -> None:
    """Gather the next block during the current one's forward, if asked, and backward, unless declined."""
    if config.forward_prefetch:
        for current, following in itertools.pairwise(blocks):
            current.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    if not config.backward_prefetch:
        # FSDP2 gathers the next unit unless it is given a list, and gathering one that is gathered costs nothing.
        for unit in (model, *blocks):
            unit.set_modules_to_backward_prefetch([unit])  # type: ignore[operator]


def _prepare_unsharded(selection: Selection, precision: PrecisionPolicy, device: torch.device) -> None:
    """Move unsharded tensors and set their compute dtype, as fully_shard does for the sharded ones."""
    for module in selection.ignored:
        move_unsharded([*module.parameters(), *module.buffers()], device)
        # Its weights stay in fp32 and are handed activations of 16 bits, which it returns as such.
        apply_autocast(module, replace(precision, output=None))
    move_unsharded(selection.unsharded, device)


def _gather_outer_units(model: nn.Module, outer: OuterUnits) -> None:
    """Gather the embedding for its forward only, and the head as soon as there is something to multiply with it."""
    head: Any = outer.head
    if outer.embedding is not None:
        outer.embedding.set_unshard_in_backward(False)  # type: ignore[operator]  # it reads indices there, no weights
    if outer.body is not None:
        # A loss that fuses the head reads its weight and does not call it. One unit of norm and head would be gathered
        # by the norm; torch 2.11 gathers one no second time that was left before its last module.
        outer.body.register_forward_hook(lambda module, args, output: head.unshard())
        model.register_forward_hook(lambda module, args, output: reshard_after_inference(head, args, output))
