"""A DeepSpeed engine behind the contract of `strategies.api.TrainUnit`."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_trainer import logging
from accel_trainer.checkpoint.boxes import Box
from accel_trainer.errors import ConfigError
from accel_trainer.integrations.deepspeed.checkpoint_io import DeepSpeedCheckpointIO
from accel_trainer.integrations.deepspeed.partitions import Partitions, flat_partitions
from accel_trainer.integrations.deepspeed.runtime import forget_module
from accel_trainer.runtime.collective_checks import note_call
from accel_trainer.runtime.model_wrappers import uncompiled_name, unsharded_shape
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_order import SharedOrder
from accel_trainer.runtime.torch_private import foreach_add_, foreach_zero_, version_of
from accel_trainer.runtime.whereabouts import section
from accel_trainer.strategies.api import CheckpointIO, Layout, StepOutcome, TrainUnit
from accel_trainer.strategies.optimizers import check_frozen
from accel_trainer.strategies.single import BackwardGuard, NativeUnit

logger = logging.get_logger(__name__)

_TAKEN_APART = re.compile(r"size of tensor a \(0\)|expected shape compatible with \[0\]")
"""Of torch's errors, where a parameter has no elements that had some in the forward."""
_units: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DeepSpeedUnit]] = weakref.WeakKeyDictionary()
"""Units by the module that their engine is around. An engine lives as long as its module, whose hooks hold it."""


def release_earlier(module: nn.Module) -> None:
    """Release the unit that a module was prepared into before: two engines would act on it. Every rank calls it."""
    held = _units.get(module)
    unit = None if held is None else held()
    if unit is None or unit.is_released:
        return
    if unit.optimizers:
        logger.warning(
            "%s is prepared again while DeepSpeed's engine of an earlier prepare() is around it: that engine is taken "
            "off, and the state of its %s goes with it; call free_memory() of the Accelerator that is no longer used, "
            "and save the state before if it matters",
            type(module).__name__, type(unit.optimizers[0]).__name__,
        )  # fmt: skip
    unit.release()


def _came_late(optimizer: Optimizer, module: nn.Module) -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__} was prepared after its model {type(module).__name__}, and DeepSpeed builds its "
        "engine around model and optimizer; pass both to one prepare() call"
    )


class Backwards:
    """Backwards that units have begun: one may go through the models of others, a frozen judge for one."""

    def __init__(self) -> None:
        self._num_running = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of a unit's backward."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def is_none_running(self) -> bool:
        """Return whether a backward that is under way was begun by no unit."""
        return not self._num_running


BACKWARDS = Backwards()


@contextmanager
def _naming_shards(module: nn.Module) -> Iterator[None]:
    """Context of a backward whose error, where it is about shards of ZeRO-3, names its cause."""
    try:
        yield
    except RuntimeError as error:
        if not _TAKEN_APART.search(str(error)):
            raise
        raise ConfigError(
            f"this backward met parameters that ZeRO-3 has taken apart again: {type(module).__name__} is full within "
            "its forward and one backward of it. Add losses of one forward and call backward() once; for a penalty on "
            "weights (p.square().sum()), use the optimizer's weight_decay, or stage 2"
        ) from error


def _note_gradients(module: nn.Module, used: set[int]) -> Iterator[RemovableHandle]:
    """Yield hooks that put the ids of trained parameters, as their gradients come, into `used`."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(lambda p: used.add(id(p)))


class EvaluationUnit(NativeUnit):
    """A model for evaluation at a stage of ZeRO that does not shard parameters; there is no engine."""

    @section("backward")
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Refuse: no gradients would be exchanged."""
        raise ConfigError(
            f"backward() was called for {type(self.module).__name__}, which was prepared without an optimizer, so that "
            "it can only be evaluated; pass model and optimizer to one prepare() call"
        )

    def bind_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse: the engine is built around its optimizer."""
        raise _came_late(optimizer, self.module)


def _loss_scale(zero: Any) -> Any:
    """Return the scale of the engine's gradients; its optimizer for bf16 with fp32 sums has none."""
    return getattr(zero, "loss_scale", 1.0)


class DeepSpeedUnit(TrainUnit):
    """A model in an engine that shards its optimizer state (ZeRO-1), gradients (2) and parameters (3).

    The engine clips and unscales in its step. The bound of the norm and the factor that makes a window's gradients the
    mean over its micro-batches come before it: they are kept here and take effect there. There is nothing to unscale
    before the step, and the gradients of an open window stay in the engine.
    """

    fixes_parameters = True

    def __init__(
        self,
        engine: Any,
        optimizers: Sequence[Optimizer],
        groups: Sequence[Sequence[str]],
        hooks: Sequence[RemovableHandle] = (),
        compared_over: ProcessContext | None = None,
    ) -> None:
        """Take an engine over, with the names in each optimizer group, and the module's hooks to remove with it.

        `compared_over`: ranks that begin each backward and step together (`debug`). A rank that leaves one of the
        engine's collectives out would have gloo end another's process.
        """
        self.model: nn.Module = engine
        self.module: nn.Module = engine.module
        self.optimizers: Sequence[Optimizer] = list(optimizers)
        self._engine = engine
        self._hooks = [*hooks, engine.module_forward_pre_hook, engine.module_forward_post_hook]
        """Of the module, which is bare again when they and the engine's other ones are gone."""
        self._zero = engine.optimizer
        self._groups = groups
        """Names of the parameters of each group of the optimizer; the engine replaces them by flat buffers."""
        named = {uncompiled_name(name): parameter for name, parameter in self.module.named_parameters()}
        self._grouped = [[named[name] for name in names] for names in groups]
        """The parameters themselves: the module may have lost some when the engine goes, to PEFT's merging for one."""
        self._compared_over = compared_over
        self._guard = BackwardGuard(self.module, "DeepSpeed")
        self._trained = frozenset(id(p) for p in self.module.parameters() if p.requires_grad)
        self._arrived: set[int] = set()
        """Those that have got a gradient since the engine has reduced the last ones."""
        self._used: set[int] = set()
        """Those that took part in a backward since the last update."""
        self._hooks += _note_gradients(self.module, self._arrived)
        self._frozen = tuple(p for p in self.module.parameters() if not p.requires_grad)
        self._seen = [(name, p, version_of(p)) for name, p in self.module.named_parameters() if p.requires_grad]
        """Parameters that are trained, and how often each had been changed in place when the engine had its values."""
        self._configured_bound: float = getattr(self._zero, "clip_grad", 0.0)
        self._bound: float | None = None
        self._norm: Tensor | None = None
        """The result of `clip_grad_norm` for this update; the step fills it."""
        self._factor: float | Tensor | None = None
        self._is_exchanged = self._holds_gradients = False
        if self.optimizers and dist.get_world_size() > 1:
            self._note_order(SharedOrder(type(self.module).__name__))
        engine.set_gradient_accumulation_boundary(True)
        engine.prepared_unit = self  # lives as long as the engine
        _units[self.module] = weakref.ref(self)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Set whether the next backward ends an accumulation window. ZeRO-2 and 3 exchange gradients in every one."""
        self._engine.set_gradient_accumulation_boundary(enabled)

    @contextmanager
    def sync_in_backward(self) -> Iterator[None]:
        """Let the backward of this block end an accumulation window; the engine asks when it gets there."""
        before = self._engine.is_gradient_accumulation_boundary()
        self.set_gradient_sync(True)
        try:
            yield
        finally:
            self.set_gradient_sync(before)

    @section("backward")
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate gradients of `loss`, scaled where fp16 asks for it. Collective, also within a window."""
        if unknown := sorted(kwargs.keys() - {"retain_graph"}):
            raise ConfigError(
                f"backward() got {', '.join(unknown)}, which DeepSpeed's engine cannot pass on; it knows retain_graph"
            )
        self._require_optimizer()
        check_frozen(self.module, self._frozen, "the engine has no place for its gradients")
        self._compare("backward")
        earlier = self._keep_exchanged()
        # The facade has divided the loss; the engine is to leave it as it is.
        with self._guard, BACKWARDS.running(), _naming_shards(self.module):
            self._engine.backward(loss, retain_graph=bool(kwargs.get("retain_graph", False)), scale_wrt_gas=False)
        for group, gradients in earlier.items():
            foreach_add_(self._zero.averaged_gradients[group], gradients)
        self._holds_gradients = True
        self._is_exchanged = self._engine.is_gradient_accumulation_boundary()

    def _compare(self, name: str) -> None:
        if self._compared_over is not None:
            note_call(name, self._compared_over, checked=[])

    def _keep_exchanged(self) -> dict[Any, list[Tensor]]:
        """Return gradients that ZeRO-1 and 2 have exchanged for this update already, and would overwrite."""
        if not self._holds_gradients:
            return {}
        # The engine does so in a forward, and there may have been none in between.
        self._zero.clear_backward_seen_flag()
        if not self._is_exchanged or hasattr(self._zero, "fp16_groups"):  # ZeRO-3 adds up by itself
            return {}
        if self._zero.cpu_offload:
            raise ConfigError(
                "a second backward() came after the one that ended the accumulation window, and with offloaded "
                "optimizer state DeepSpeed would lose the first one's gradients; add the losses, or run both in "
                "accumulate() with gradient_accumulation_steps"
            )
        return {group: gradients for group, gradients in self._zero.averaged_gradients.items() if gradients}

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Keep a factor for the accumulated gradients; the step multiplies them by it."""
        self._factor = factor if self._factor is None else self._factor * factor

    def put_gradients(self, gradients: Mapping[str, Callable[[Box], Tensor]]) -> None:
        """Refuse gradients of another run's window: the engine has no way to take them."""
        raise ConfigError(
            "the state was saved within an accumulation window of another strategy, and DeepSpeed's engine cannot take "
            "its gradients; save where sync_gradients is true"
        )

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Bound the global norm for the engine's step; return a scalar that the step fills, NaN until then."""
        if norm_type != 2.0:
            raise ConfigError(f"norm_type is {norm_type}, and DeepSpeed computes norms of type 2 only; use norm_type=2")
        if missing := len(self._trained.difference(id(p) for p in parameters)):
            raise ConfigError(
                f"clip_grad_norm_() was given parameters without {missing} of the {len(self._trained)} that this "
                "engine trains, and DeepSpeed clips all of them together; pass model.parameters()"
            )
        if not getattr(self._zero, "compute_grad_norm", True):
            raise ConfigError(
                "clip_grad_norm_() was called, and zero_optimization.compute_grad_norm is false in the DeepSpeed "
                "configuration; take it out, or do not clip"
            )
        if max_norm != float("inf"):
            self._bound = float(max_norm)
        if self._norm is None:
            self._norm = torch.full((), float("nan"), device=self._engine.device)
        return self._norm

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element, parameter by parameter. Collective."""
        if self._bound is not None:
            raise ConfigError(
                "clip_grad_value_() was called after clip_grad_norm_(), and DeepSpeed applies the norm's bound in its "
                "step, which comes later; clip values first"
            )
        # The gradients that are clamped here carry the scale, by which the step will divide.
        bound = clip_value * _loss_scale(self._zero) / (1.0 if self._factor is None else self._factor)
        self._map_gradients(lambda gradient: gradient.clamp(-bound, bound), parameters)

    def step(self, closure: Callable[[], Any] | None = None, *, optimizer: Optimizer | None = None) -> StepOutcome:
        """Clip and update; skipped, and reported so, when fp16 gradients overflowed. Collective."""
        self._require_optimizer()
        if closure is not None:
            raise ConfigError(
                f"{type(self.optimizers[0]).__name__}.step(closure) cannot be combined with DeepSpeed, whose step "
                "takes the gradients that are there; use an optimizer that needs no closure, or strategy 'ddp'"
            )
        if not self._holds_gradients:
            if any(getattr(self._zero, "averaged_gradients", {}).values()):
                raise ConfigError(
                    f"optimizer.step() was called after a backward of {type(self.module).__name__} that was not begun "
                    "by accelerator.backward(loss), and the engine takes no other's gradients; call it"
                )
            return StepOutcome(applied=True)
        if not self._is_exchanged:
            raise ConfigError(
                "optimizer.step() was called after a backward that exchanged no gradients (no_sync, or "
                "set_gradient_sync(False)); let the last backward before the step exchange them"
            )
        self._compare("optimizer.step")
        self._check_changes()
        self._take_changes()
        with self._step_options(), self._keep_unused():
            self._engine.step()
        self._clear_buffers()
        self._holds_gradients = False
        self._forget_used()
        norm = self._report_norm()
        return StepOutcome(applied=self._engine.was_step_applied(), grad_norm=norm)

    @cached_property
    def _partitions(self) -> Partitions:
        return Partitions(self._zero)

    def _note_order(self, order: SharedOrder) -> None:
        """Note the parameters that this rank gathers in a forward, under ZeRO-3, and whose gradients it reduces."""
        self._hooks.append(self.module.register_forward_pre_hook(order.begin, prepend=True))
        zero, unit = self._zero, weakref.proxy(self)
        if self._has_shards:
            coordinator = zero.parameter_offload.get_param_coordinator()
            # Parameters that are never taken apart are not gathered; experts of one layer are gathered together.
            is_kept = {id(p) for p in self.module.parameters() if getattr(p, "ds_persist", False)}
            named = self.module.named_modules()
            names = {id(m): name for name, m in named if any(id(p) not in is_kept for p in m.parameters())}
            fetch = coordinator.fetch_sub_module

            @torch.compiler.disable
            def fetch_sub_module(module: nn.Module, forward: bool) -> None:
                if forward and order.is_on and id(module) in names:
                    order.note_gather(names[id(module)])
                fetch(module, forward)

            coordinator.fetch_sub_module = fetch_sub_module
        reduce = getattr(zero, "independent_gradient_partition_epilogue", None)
        if reduce is None:  # the engine's optimizer for bf16 with fp32 sums reduces all, with zeros
            return

        def reduce_rest() -> None:
            unit._note_reduction(order)
            reduce()
            order.begin()

        zero.independent_gradient_partition_epilogue = reduce_rest

    def _note_reduction(self, order: SharedOrder) -> None:
        self._used |= self._arrived
        # ZeRO-1 reduces once, at the end of a window.
        has = self._arrived if self._engine.zero_optimization_partition_gradients() else self._used
        # ZeRO-3 gives zeros to parameters of layers that it treats together.
        missing = [n for n, p, _ in self._seen if not (id(p) in has or hasattr(p, "ds_z3_leaf_module"))]
        if self._engine.zero_optimization_partition_gradients() or self._engine.is_gradient_accumulation_boundary():
            order.note_reduction(missing)
        self._arrived.clear()

    def _keep_unused(self) -> AbstractContextManager[None]:
        """Return the context of a step that leaves parameters as they are which took no part in the update."""
        self._used |= self._arrived
        if self._trained <= self._used:
            return nullcontext()
        unused = (p for _, p, _ in self._seen if id(p) not in self._used)
        return self._partitions.keeping(unused)

    def _forget_used(self) -> None:
        self._used.clear()
        self._arrived.clear()

    @property
    def _has_shards(self) -> bool:
        """Whether parameters have values within a forward only: ZeRO-3."""
        return hasattr(self._zero, "fp16_groups")

    def _check_changes(self) -> None:
        """Refuse changes of parameters that the engine cannot follow: frozen ones, and values of shards."""
        for name, parameter, version in self._seen:
            what = ""
            if not parameter.requires_grad:
                what = (
                    "was trained when the model was prepared, and is frozen now: the engine would still update it, by "
                    "its momentum and weight decay. Call free_memory(), and prepare the model again once it is frozen"
                )
            elif self._has_shards and version_of(parameter) != version:
                what = (
                    "was changed in place since the last step, and ZeRO-3 trains shards that such a change does not "
                    "reach; change the weights by deepspeed.utils.safe_set_full_fp32_param(parameter, value) on all "
                    "ranks, or use stage 2 or strategy 'fsdp2'"
                )
            if what:
                raise ConfigError(f"{name!r} of {type(self.module).__name__} {what}")

    def _take_changes(self) -> None:
        """Give the engine's fp32 weights the values that a loop has written into parameters since the last step.

        The engine would overwrite them without a word, and save its own: clamped weights, or those of a
        `load_state_dict`. Values that are written through `parameter.data` leave no trace, and are lost.
        """
        if self._has_shards or all(version_of(parameter) == version for _, parameter, version in self._seen):
            return
        from deepspeed.utils import safe_set_full_fp32_param

        for _, parameter, version in self._seen:
            if version_of(parameter) != version:
                safe_set_full_fp32_param(parameter, parameter.detach())
        self._note_values()

    def _note_values(self) -> None:
        self._seen = [(name, parameter, version_of(parameter)) for name, parameter, _ in self._seen]

    @contextmanager
    def _step_options(self) -> Any:
        """Give the engine the bound and the factor, for one step."""
        zero, scale = self._zero, _loss_scale(self._zero)
        if self._bound is not None:
            zero.clip_grad = self._bound
        factor = 1.0 if self._factor is None else self._factor
        if self._factor is not None and not hasattr(zero, "loss_scale"):
            self._map_gradients(lambda gradient: gradient * factor)
        elif self._factor is not None or scale != 1.0:
            # Pinned: a dynamic scale changes within the engine's step, and these gradients carry the one from before.
            zero.external_loss_scale = scale / factor
            zero.custom_loss_scaler = True
        try:
            yield
        finally:
            zero.clip_grad = self._configured_bound
            zero.custom_loss_scaler = False
            self._bound, self._factor = None, None

    def _map_gradients(self, change: Callable[[Tensor], Tensor], parameters: Iterable[Tensor] | None = None) -> None:
        """Replace each gradient by `change(gradient)`, parameter by parameter. Collective."""
        from deepspeed.utils import safe_get_full_grad, safe_get_local_grad, safe_set_full_grad, safe_set_local_grad

        chosen = self.module.parameters() if parameters is None else parameters
        for parameter in {id(p): p for p in chosen if p.requires_grad}.values():
            if hasattr(parameter, "ds_id"):
                # ZeRO-3: the setter of full gradients fails where the elements do not divide by the ranks.
                safe_set_local_grad(parameter, change(safe_get_local_grad(parameter)))
            elif (gradient := safe_get_full_grad(parameter)) is not None:
                safe_set_full_grad(parameter, change(gradient))

    def _report_norm(self) -> Tensor | None:
        """Return the norm of the last step, and fill the result of `clip_grad_norm` with it."""
        norm = self._engine.get_global_grad_norm()
        if norm is None:
            return None
        found = torch.as_tensor(norm, dtype=torch.float32, device=self._engine.device)
        if self._norm is not None:
            self._norm.copy_(found)
            self._norm = None
        return found

    def zero_grad(self, set_to_none: bool = True, *, optimizer: Optimizer | None = None) -> None:
        """Drop the gradients that were accumulated. After a step there are none: the engine has dropped them."""
        if self._holds_gradients:
            self._drop_gradients()
            self._holds_gradients = False
            self._forget_used()
            self._bound, self._factor = None, None

    def _drop_gradients(self) -> None:
        """Drop gradients as the engine itself does when they overflowed."""
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        for name in ("averaged_gradients", "all_grad_tensors"):
            held = getattr(zero, name, {})
            for key in held:
                held[key] = None
        if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
            zero.reset_cpu_buffers()
        self._clear_buffers()

    def _clear_buffers(self) -> None:
        """Empty the buffers that the engine keeps between updates.

        It writes the gradients of a window into them, and steps with all of them: a parameter that takes no part in a
        window would be updated with its gradient of an earlier one (ZeRO-3, and offloaded optimizer state).
        """
        zero = self._zero
        if (partitions := getattr(zero, "grad_partitions_flat_buffer", None)) is not None:
            partitions.zero_()
        if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
            zero.norm_for_param_grads.clear()
            kept = [flat.grad for flat in flat_partitions(zero) if flat.grad is not None]
            kept += getattr(zero, "accumulated_grads_in_cpu", {}).values()
            if kept:  # partitions that are swapped to disk hold none
                foreach_zero_(kept)

    def take_scheduler(self) -> Any:
        """Return the schedule of the engine's configuration, which the engine steps no longer; None without one."""
        schedule, self._engine.lr_scheduler = self._engine.lr_scheduler, None
        return schedule

    def bind_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse any but the optimizer that the engine is built around."""
        if all(optimizer is not own for own in self.optimizers):
            raise _came_late(optimizer, self.module)

    def _require_optimizer(self) -> None:
        if self.is_released:
            raise ConfigError(
                f"{type(self.module).__name__} was prepared again, or its Accelerator's memory was freed, and this "
                "engine was taken off it; use what the last prepare() has returned"
            )
        if not self.optimizers:
            raise ConfigError(
                f"{type(self.module).__name__} was prepared without an optimizer, so that it can only be evaluated; "
                "pass model and optimizer to one prepare() call"
            )

    def release(self) -> None:
        """Take the engine off, so that model and optimizer can be prepared again: two engines would both act on them.

        The optimizer holds the module's parameters again, without any state; save that before. The parameters of ZeRO-3
        stay partitioned. Every rank calls it; a second call does nothing.
        """
        if self.is_released:
            return
        self.is_released = True
        self._engine.destroy()
        # When it is collected, DeepSpeed 0.19.8 destroys it again: the parameters of ZeRO-1 and 2 would lose the links
        # to their partitions that the next engine has made, and be gathered as zeros.
        self._engine.destroy = lambda: None
        for hook in self._hooks:
            hook.remove()
        for parameter in self.module.parameters():
            vars(parameter).pop("_z3_optimizer", None)
        forget_module(self.module)
        vars(self.module).pop("save_pretrained", None)
        for optimizer in self.optimizers:
            optimizer.state.clear()
            for group, parameters in zip(optimizer.param_groups, self._grouped, strict=True):
                group["params"] = list(parameters)

    def checkpoint_io(self) -> CheckpointIO:
        """Return the reader and writer of this unit's state."""
        self._take_changes()
        return DeepSpeedCheckpointIO(self._engine, self.optimizers, self._groups, self.averages, self._note_values)

    def adopt_averages(self) -> None:
        """Give the model and the engine's own fp32 weights the averages for good. Collective."""
        io, self.averages = self.checkpoint_io(), None
        if averages := io.averaged_model():
            io.load_full_model_state(averages, strict=False)

    def lasting_tensors(self) -> dict[str, list[Tensor]]:
        """Return this rank's parameters, or shards of them, gradients, and the optimizer's state with fp32 weights."""
        parameters = [getattr(each, "ds_tensor", each) for each in self.module.parameters()]
        optimizer: Any = self._engine.basic_optimizer
        # Stage 3 shows the optimizer its own fp32 weights in a step alone, the others all the time.
        weights = getattr(self._zero, "fp32_partitioned_groups_flat", None)
        if weights is None:
            weights = [each for group in optimizer.param_groups for each in group["params"]]
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        gradients = [each.grad for each in weights] + [getattr(self._zero, "grad_partitions_flat_buffer", None)]
        held = [each for each in gradients if each is not None]
        return {"parameters": parameters, "gradients": held, "optimizer_state": [*weights, *states]}

    def local_bytes(self, *, in_window: bool = False) -> int:
        """Return how many bytes this rank writes for the unit; the gradients of a window are not among them."""
        return self.checkpoint_io().local_bytes()

    def layout(self) -> Layout:
        """Return how many parameters the model has, and how many of them ZeRO leaves on this rank."""
        sizes: list[tuple[Any, int]] = [(each, math.prod(unsharded_shape(each))) for each in self.module.parameters()]
        return Layout(
            num_parameters=sum(size for _, size in sizes),
            num_trainable=sum(size for each, size in sizes if id(each) in self._trained),
            num_local=sum(each.partition_numel() if hasattr(each, "ds_tensor") else size for each, size in sizes),
            note=f"ZeRO stage {self._engine.zero_optimization_stage()}",
        )
