"""One process: the user's module as it is. Also the base of the units that keep plain torch optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer.errors import ConfigError
from accel_trainer.precision import PrecisionPolicy, apply_autocast
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.strategies import gradients
from accel_trainer.strategies.api import Capabilities, CheckpointIO, StepOutcome, TrainJob
from accel_trainer.strategies.compile import apply_compile
from accel_trainer.strategies.torch_state import TorchCheckpointIO

__all__ = ["NativeUnit", "SingleStrategy", "check_optimizer_covers", "place", "require_values"]


def require_values(model: nn.Module) -> None:
    """Refuse a model on the meta device.

    Raises:
        ConfigError: there are no values to place or to shard.
    """
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        meta = [name for name, tensor in named if tensor.is_meta]
        if meta:
            raise ConfigError(
                f"{len(meta)} {kind}(s) of {type(model).__name__} are on the meta device (first: {meta[0]!r}) and hold "
                "no values; load the model's weights (from_pretrained, load_state_dict(assign=True)) before prepare()"
            )


def place(model: nn.Module, job: TrainJob, process: ProcessContext) -> None:
    """Move the model to this rank's device, tied weights staying tied; nothing moves when it is there already."""
    require_values(model)
    if job.device_placement:
        model.to(process.device)


def check_optimizer_covers(optimizer: Optimizer, module: nn.Module, extra: Iterable[int] = ()) -> None:
    """Refuse an optimizer with parameters that are not the module's.

    Args:
        extra: ids of further tensors that stand for parameters of the module.

    Raises:
        ConfigError: some of its parameters belong to something else.
    """
    own = {*extra, *(id(parameter) for parameter in module.parameters())}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        raise ConfigError(
            f"{foreign} of {total} parameters of the optimizer do not belong to {type(module).__name__}; "
            "build the optimizer from that model's parameters, and pass both to one prepare() call"
        )


class NativeUnit:
    """A module and its torch optimizer in one process."""

    def __init__(self, model: nn.Module, module: nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
        self.model = model
        self.module = module
        self.optimizer: Optimizer | None = None
        self.scaler = scaler
        self._unscaled = False
        if scaler is not None:
            _SHARING_A_SCALE.setdefault(scaler, WeakSet()).add(self)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Nothing to exchange."""

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate gradients of `loss`, scaled where fp16 asks for it."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**kwargs)

    def unscale_gradients(self) -> None:
        """Take the fp16 loss scale out of the gradients, once per step."""
        if self.scaler is not None and self.optimizer is not None and not self._unscaled:
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the accumulated gradients by `factor`."""
        gradients.scale_gradients(self.module.parameters(), factor)

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Bound the global gradient norm; return it as it was before. See `gradients.clip_grad_norm`."""
        self.unscale_gradients()
        return gradients.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element."""
        self.unscale_gradients()
        gradients.clip_grad_value(parameters, clip_value)

    def step(self, closure: Callable[[], Any] | None = None) -> StepOutcome:
        """Update the parameters; skipped, and reported so, when fp16 gradients overflowed."""
        if self.optimizer is None:
            raise ConfigError(f"{type(self.module).__name__} was prepared without an optimizer; pass one to prepare()")
        if self.scaler is None:
            if closure is None:
                self.optimizer.step()
            else:
                self.optimizer.step(closure)
            return _APPLIED
        if closure is not None:
            raise ConfigError(
                f"{type(self.optimizer).__name__}.step(closure) cannot be combined with fp16, whose losses are scaled: "
                "the closure's gradients would be used as they are; use bf16, or an optimizer that needs no closure"
            )
        self.scaler.step(self.optimizer)
        overflows = self.scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        applied = not any(overflow.item() for overflow in overflows.values())
        self._update_scale()
        return StepOutcome(applied=applied)

    def _update_scale(self) -> None:
        """Let the scale follow what this unit's gradients were like; the other units' gradients follow the scale."""
        assert self.scaler is not None
        others = [unit for unit in _SHARING_A_SCALE[self.scaler] if unit is not self and unit.optimizer is not None]
        # update() forgets which optimizers are unscaled already, and would count their overflows twice.
        states = self.scaler._per_optimizer_states
        kept = {id(unit.optimizer): states.pop(id(unit.optimizer)) for unit in others if unit._unscaled}
        before = self.scaler.get_scale()
        self.scaler.update()
        self.scaler._per_optimizer_states.update(kept)
        self._unscaled = False
        if (factor := self.scaler.get_scale() / before) != 1.0:
            for unit in others:
                if not unit._unscaled:
                    unit.scale_gradients(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the optimizer's parameters."""
        if self.optimizer is not None:
            if self.scaler is not None and self._unscaled:
                self._update_scale()  # they are dropped instead of a step
            self.optimizer.zero_grad(set_to_none)

    def bind_optimizer(self, optimizer: Optimizer) -> None:
        """Take the optimizer of this module.

        Raises:
            ConfigError: it holds parameters that are not this module's, or there is another one.
        """
        check_optimizer_covers(optimizer, self.module)
        self._check_is_only(optimizer)
        self.optimizer = optimizer

    def _check_is_only(self, optimizer: Optimizer) -> None:
        if self.optimizer is not None and self.optimizer is not optimizer:
            raise ConfigError(
                f"{type(self.module).__name__} has an optimizer already ({type(self.optimizer).__name__}); give it "
                "one optimizer with a parameter group for each part that needs other options"
            )

    def checkpoint_io(self) -> CheckpointIO:
        """Return the reader and writer of this unit's state."""
        return TorchCheckpointIO(self.module, self.optimizer)


_APPLIED = StepOutcome(applied=True)

_SHARING_A_SCALE: WeakKeyDictionary[torch.amp.GradScaler, WeakSet[NativeUnit]] = WeakKeyDictionary()
"""The units that each loss scale serves: one loss may reach several models, and has one scale."""


class SingleStrategy:
    """One process with the whole model."""

    name: ClassVar[str] = "single"
    capabilities: ClassVar[Capabilities] = Capabilities(max_world_size=1)

    def prepare(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> NativeUnit:
        """Place the model and put autocast on it; the returned unit's model is the user's own object."""
        place(job.model, job, process)
        apply_autocast(job.model, precision)
        apply_compile(job.model, job.config.compile, job.compile_options)
        unit = NativeUnit(job.model, job.model, job.scaler)
        if job.optimizer is not None:
            unit.bind_optimizer(job.optimizer)
        return unit
