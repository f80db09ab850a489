"""Fully sharded data parallel with torch's `fully_shard` (FSDP2), on GPUs with nccl and on CPUs with gloo."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer

from accel_trainer import logging
from accel_trainer.errors import ConfigError
from accel_trainer.precision import PrecisionPolicy
from accel_trainer.runtime.mesh import build_mesh_shape, init_mesh
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.strategies.api import Capabilities, TrainJob
from accel_trainer.strategies.compile import apply_compile
from accel_trainer.strategies.native import NativeUnit, check_optimizer_covers, require_values
from accel_trainer.strategies.recompute import apply_activation_checkpointing
from accel_trainer.strategies.sync import broadcast_module_states
from accel_trainer.strategies.whole_weights import exchange_whole_weights
from accel_trainer.strategies.wrapping import find_blocks, find_ignored_modules

__all__ = ["FSDP2Strategy", "FSDP2Unit"]

logger = logging.get_logger(__name__)


class FSDP2Unit(NativeUnit):
    """A module whose parameters, gradients and optimizer state are sharded over the ranks."""

    def __init__(
        self,
        module: FSDPModule,
        originals: Mapping[int, tuple[Tensor, str]],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(module, module, scaler)  # type: ignore[arg-type]
        self._root = module
        # Kept alive while they may be asked for: an id is only unique as long as its tensor lives.
        self._originals = originals
        self._local_parameters = [
            p for p in self.module.parameters() if not hasattr(p, "device_mesh") and p.requires_grad
        ]
        self._sync = True

    def set_gradient_sync(self, enabled: bool) -> None:
        """Reduce-scatter gradients in the next backward, or keep them unsharded on this rank."""
        self._sync = enabled
        self._root.set_requires_gradient_sync(enabled)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate gradients; parameters of ignored modules are averaged over the ranks here."""
        super().backward(loss, **kwargs)
        if self._sync and self._local_parameters:
            for parameter in self._local_parameters:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                    parameter.grad.div_(dist.get_world_size())

    def bind_optimizer(self, optimizer: Optimizer) -> None:
        """Take the optimizer; one built before sharding is pointed to the sharded parameters by name.

        Raises:
            ConfigError: it already holds state, which belongs to tensors that are gone, or parameters of another model.
        """
        rebind_optimizer(optimizer, self.module, self._originals)
        check_optimizer_covers(optimizer, self.module)
        self.optimizer = optimizer
        self._originals = {}


def rebind_optimizer(optimizer: Optimizer, module: nn.Module, originals: Mapping[int, tuple[Tensor, str]]) -> None:
    """Replace each parameter of `optimizer` that sharding has replaced by the sharded one of the same name.

    Raises:
        ConfigError: the optimizer already holds state.
    """
    sharded = dict(module.named_parameters(remove_duplicate=False))
    stale = any(id(p) in originals for group in optimizer.param_groups for p in group["params"])
    if stale and optimizer.state:
        raise ConfigError(
            f"{type(optimizer).__name__} already holds state for {len(optimizer.state)} parameter(s) and was "
            "built before prepare(); its state belongs to unsharded tensors. Call prepare() before step() and "
            "load_state_dict()"
        )
    for group in optimizer.param_groups:
        group["params"] = [sharded[originals[id(p)][1]] if id(p) in originals else p for p in group["params"]]


def _upcast_trainable(model: nn.Module) -> None:
    """Keep master weights in fp32 under mixed precision, and say which were not."""
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


def _drop_blocks_with_outside_ties(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
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


def _assert_tied(model: nn.Module, groups: list[tuple[str, ...]]) -> None:
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
    """Give memory back after a forward without backward: FSDP2 leaves the root unsharded, waiting for one."""
    if not torch.is_grad_enabled():
        module.reshard()  # type: ignore[operator]


class FSDP2Strategy:
    """Shards parameters, gradients and optimizer state."""

    name: ClassVar[str] = "fsdp2"
    capabilities: ClassVar[Capabilities] = Capabilities(
        min_world_size=2, shards_parameters=True, distributed_type="FSDP"
    )

    def prepare(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> FSDP2Unit:
        """Shard the model in place. Collective: meshes are created and rank 0's values are broadcast.

        The model keeps its class (torch adds FSDPModule to its bases), its parameter names and its tied weights.
        """
        if isinstance(job.model, FSDPModule):
            return _bind(FSDP2Unit(job.model, {}, job.scaler), job)
        model, config = job.model, job.config.fsdp
        _require_autocast(precision)
        require_values(model)
        blocks = _drop_blocks_with_outside_ties(model, find_blocks(model, job.resolved, job.wrap_policy))
        ignored = {p for module in find_ignored_modules(model, job.resolved) for p in module.parameters()}
        replicas = (
            process.world_size // process.local_world_size if config.replicate_per_node else config.replicate_size
        )
        shape = build_mesh_shape(process.world_size, replicas)
        if job.optimizer is not None:
            check_optimizer_covers(job.optimizer, model)
        tied = _tied_names(model)
        originals = {id(p): (p, name) for name, p in model.named_parameters()}
        if precision.compute is not None:
            _upcast_trainable(model)
        broadcast_module_states(model, process.device)
        if config.activation_checkpointing:
            apply_activation_checkpointing(blocks)
        apply_compile(model, job.config.compile, job.compile_options)
        mesh = init_mesh(process, shape, job.config.timeout_seconds)
        offload = (
            CPUOffloadPolicy(pin_memory=process.device.type == "cuda") if config.offload_params else OffloadPolicy()
        )
        options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload, "ignored_params": ignored or None}
        # Before the optimizer is bound: fully_shard replaces every Parameter object, and an optimizer built earlier
        # would keep updating the unsharded tensors without any error.
        for block in reversed(blocks):
            fully_shard(
                block,
                reshard_after_forward=config.reshard_after_forward,
                mp_policy=_mixed_precision_policy(precision, root=False),
                **options,
            )
        root = fully_shard(model, mp_policy=_mixed_precision_policy(precision, root=True), **options)
        _set_prefetch(blocks, config.forward_prefetch)
        _assert_tied(model, tied)
        exchange_whole_weights(model, process)
        model.register_forward_hook(_reshard_after_inference)
        model._is_fsdp_managed_module = True  # type: ignore[assignment]  # read by transformers' generate()
        return _bind(FSDP2Unit(root, originals, job.scaler), job)


def _bind(unit: FSDP2Unit, job: TrainJob) -> FSDP2Unit:
    if job.optimizer is not None:
        unit.bind_optimizer(job.optimizer)
    return unit


def _set_prefetch(blocks: list[nn.Module], forward: bool) -> None:
    """Gather the next block during the current one's forward. The backward's prefetch is FSDP2's default."""
    if forward:
        for current, following in itertools.pairwise(blocks):
            current.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
