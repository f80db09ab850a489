"""Objects that an Accelerator has prepared: which of them belong together, and how the user's own lead to them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer, ReplicaCheck, is_layerwise
from accel_trainer.accelerator.accelerated_scheduler import AcceleratedScheduler
from accel_trainer.accelerator.accumulation import PreparedUnit
from accel_trainer.accelerator.lost_ranks import LostRanks
from accel_trainer.data.loader import PreparedDataLoader
from accel_trainer.errors import ConfigError
from accel_trainer.precision import remove_autocast
from accel_trainer.runtime.model_wrappers import is_compiled_module, unwrap_module
from accel_trainer.runtime.nonfinite import NonFiniteGuard
from accel_trainer.runtime.torch_private import ORIGINAL_MODULE
from accel_trainer.strategies.api import Capabilities
from accel_trainer.strategies.optimizers import check_disjoint, parameters_of


class Prepared:
    """Units of an Accelerator with the optimizers that step them, their schedulers, and the loaders, each once."""

    def __init__(self) -> None:
        self.guard: NonFiniteGuard | None = None
        """Of the optimizers' steps."""
        self.replica_check: ReplicaCheck | None = None
        self.lost_ranks: LostRanks | None = None
        self.units: list[PreparedUnit] = []
        self.current: list[PreparedUnit] = []
        """Units of the micro-batch whose `accumulate()` is entered; empty outside of one."""
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.dataloaders: list[PreparedDataLoader] = []
        self._freed_wrappers: list[weakref.ref[nn.Module]] = []

    @property
    def models(self) -> list[nn.Module]:
        """Models that the user calls, one of each unit."""
        return [prepared.unit.model for prepared in self.units]

    def find(self, item: Any) -> PreparedUnit | None:
        """Return the unit of a model or optimizer: of the wrapped object, compiled or not, or of the user's own."""
        for prepared in self.units:
            unit = prepared.unit
            if unit.is_released:  # by another Accelerator, which has prepared the model since
                continue
            if item is unit.model or item is unit.module:
                return prepared
            for optimizer in unit.optimizers:
                if item is optimizer:
                    return prepared
        compiled = getattr(item, ORIGINAL_MODULE, None)
        return next((prepared for prepared in self.units if prepared.unit.model is compiled), None)

    def get(self, item: Any) -> PreparedUnit:
        """Return the unit of a model or optimizer; a ConfigError for one that this Accelerator has not prepared."""
        found = self.find(item.optimizer if isinstance(item, AcceleratedOptimizer) else item)
        if found is None:
            raise ConfigError(
                f"{type(item).__name__} was not prepared by this Accelerator; pass it to prepare() and use its result"
            )
        return found

    def units_of(self, optimizer: Optimizer) -> list[PreparedUnit]:
        """Return the units that an optimizer is bound to; one that holds parameters of several models has several."""
        return [known for known in self.units if any(own is optimizer for own in known.unit.optimizers)]

    def pair(
        self,
        models: Sequence[nn.Module],
        optimizers: Iterable[Optimizer],
        replaced: Sequence[PreparedUnit],
        capabilities: Capabilities,
        *,
        is_distributed: bool,
    ) -> tuple[dict[int, list[Optimizer]], list[tuple[PreparedUnit, Optimizer]]]:
        """Return unbound optimizers by the id of one of `models`, and those of models that are prepared already.

        Models of `replaced` units are among `models`. On one process, an optimizer may join its full model later.
        """
        alone = {id(o): o for o in self.alone}
        bare = {id(o): o for o in optimizers if _is_bare(o)} | alone
        unbound = [optimizer for optimizer in bare.values() if not self.units_of(optimizer)]
        staying = [prepared for prepared in self.units if prepared not in replaced]
        takes_all = not (is_distributed or capabilities.shards_parameters or models or staying)
        return _pair(models, unbound, staying, capabilities, {*map(id, unbound)} if takes_all else {*alone})

    def freed_wrappers(self, optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> list[nn.Module]:
        """Return wrappers of released models that are stepped by optimizers which come without a model.

        transformers' Trainer keeps DDP's wrapper when it frees the memory of a training, and trains again in it.
        """
        of_models = {id(p) for model in models for p in model.parameters()}
        left = {id(p) for each in optimizers if not self.units_of(each) for p in parameters_of(each)} - of_models
        freed = [model for wrapper in self._freed_wrappers if (model := wrapper()) is not None]
        return [each for each in freed if self.find(each) is None and any(id(p) in left for p in each.parameters())]

    def refuse_shared(self, models: Iterable[nn.Module], replaced: Sequence[PreparedUnit]) -> None:
        """Refuse a trained parameter of two models: each would exchange its gradient, or shard it, by itself."""
        staying = (known for known in self.units if not (known in replaced or known.evaluation_only))
        taken: dict[int, nn.Module] = {}
        for module in [*(known.unit.module for known in staying if not known.unit.is_released), *models]:
            own = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
            if shared := [key for key in own if key in taken]:
                raise ConfigError(
                    f"{type(module).__name__} shares {len(shared)} trained parameter(s) with "
                    f"{type(taken[shared[0]]).__name__}, which is prepared, too ({own[shared[0]]!r} for one), and each "
                    "would exchange gradients of them by itself; make both parts of one module, whose forward calls "
                    "either, and prepare that one"
                )
            taken |= dict.fromkeys(own, module)

    @property
    def alone(self) -> list[Optimizer]:
        """The user's own of wrapped optimizers whose model has not been prepared."""
        return [wrapped.optimizer for wrapped in self.optimizers if not wrapped.prepared]

    def join(self, *, in_backward: bool) -> None:
        """Let wrapped optimizers that were alone step with the units prepared since; all `in_backward`, if asked."""
        for wrapped in self.optimizers:
            if not wrapped.prepared:
                wrapped.prepared = tuple(self.units_of(wrapped.optimizer))
        for prepared in self.units:
            if in_backward and prepared.unit.optimizers:
                prepared.unit.update_in_backward()
        if self.lost_ranks is not None:
            self.lost_ranks.take_models()

    def drop(self, units: list[PreparedUnit]) -> None:
        """Take out units whose models are to be prepared anew."""
        self.units[:] = [known for known in self.units if known not in units]

    def add_optimizer(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        """Return the wrapper of an optimizer that is bound to units, one for every call."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        for known in self.optimizers:
            if known.optimizer is optimizer:
                return known
        wrapped = AcceleratedOptimizer(optimizer, self.units_of(optimizer), self.guard, self.replica_check)
        wrapped.lost_ranks = self.lost_ranks
        self.optimizers.append(wrapped)
        for scheduler in self.schedulers:
            scheduler.follow(wrapped)
        return wrapped

    def add_scheduler(self, scheduler: AcceleratedScheduler) -> AcceleratedScheduler:
        """Add a wrapped scheduler, and return it."""
        for optimizer in self.optimizers:
            scheduler.follow(optimizer)
        self.schedulers.append(scheduler)
        return scheduler

    def add_data_loader(self, loader: PreparedDataLoader) -> PreparedDataLoader:
        """Add a loader that is not there yet, and return it."""
        if not any(loader is known for known in self.dataloaders):
            self.dataloaders.append(loader)
        return loader

    def clear(self) -> None:
        """Let go of everything. Every rank calls it: an engine is taken off its model together."""
        freed = [weakref.ref(each.unit.model) for each in self.units if each.unit.model is not each.unit.module]
        self._freed_wrappers = [*(each for each in self._freed_wrappers if each() is not None), *freed]
        for prepared in self.units:
            prepared.unit.release()
        for held in (self.units, self.optimizers, self.schedulers, self.dataloaders):
            held.clear()
        # A new list: the one in use may be `units` itself, whose micro-batch is entered and left later.
        self.current = []


def _is_bare(optimizer: Optimizer) -> bool:
    """Whether an optimizer is the user's own, and holds parameters of a model."""
    return not (isinstance(optimizer, AcceleratedOptimizer) or is_layerwise(optimizer))


@dataclass(slots=True, eq=False)
class _Holder:
    """A model, prepared or about to be, with its parameters by the id of every tensor that stands for one."""

    model: nn.Module
    known: dict[int, nn.Parameter]
    prepared: PreparedUnit | None = None
    optimizers: list[Optimizer] = field(default_factory=list)


def _pair(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    prepared: Sequence[PreparedUnit],
    capabilities: Capabilities,
    may_be_alone: Collection[int],
) -> tuple[dict[int, list[Optimizer]], list[tuple[PreparedUnit, Optimizer]]]:
    if not optimizers:
        return {id(model): [] for model in models}, []
    new = [_Holder(model, {id(p): p for p in model.parameters()}) for model in models]
    old = [_Holder(each.unit.module, each.unit.known_parameters(), each, [*each.unit.optimizers]) for each in prepared]
    to_bind: list[tuple[PreparedUnit, Optimizer]] = []
    for optimizer in optimizers:
        for holder in _holders_of(optimizer, new + old, id(optimizer) in may_be_alone):
            holder.optimizers.append(optimizer)
            if holder.prepared is not None:
                _require_training(holder.prepared, optimizer)
                to_bind.append((holder.prepared, optimizer))
    for holder in new + old:
        check_disjoint(holder.optimizers, holder.known)
    if not capabilities.joint_optimizers:
        _require_pairs(new + old)
    return {id(holder.model): holder.optimizers for holder in new}, to_bind


def _require_training(prepared: PreparedUnit, optimizer: Optimizer) -> None:
    if prepared.evaluation_only:
        raise ConfigError(
            f"{type(optimizer).__name__} holds parameters of {type(prepared.unit.module).__name__}, which was prepared "
            "for evaluation; pass both to one prepare() call to train it"
        )


def _holders_of(optimizer: Optimizer, holders: list[_Holder], may_be_alone: bool) -> list[_Holder]:
    """Return the models of an optimizer's parameters, in the order of `holders`."""
    name, parameters = type(optimizer).__name__, parameters_of(optimizer)
    if not parameters and len(holders) == 1:
        return holders
    owners = [next((holder for holder in holders if id(each) in holder.known), None) for each in parameters]
    found, others = [holder for holder in holders if holder in owners], owners.count(None)
    if not found:
        if may_be_alone:
            return []
        raise ConfigError(
            f"{name} was prepared without its model: it steps {len(parameters)} parameters (of shapes "
            f"{_describe_shapes(parameters)}), which are of no prepared model; pass both to one prepare() call, or "
            "prepare the model first"
        )
    if others:
        known = ", ".join(type(holder.model).__name__ for holder in holders)
        raise ConfigError(
            f"{others} of {len(parameters)} parameters of {name} belong to no prepared model ({known} are); pass the "
            "model that they are of to the same prepare() call, or build the optimizer without them"
        )
    return found


def _describe_shapes(parameters: Sequence[Tensor]) -> str:
    shapes = [str(tuple(parameter.shape)) for parameter in parameters[:3]]
    return ", ".join([*shapes, "..."] if len(parameters) > 3 else shapes)


def _require_pairs(holders: list[_Holder]) -> None:
    taken: dict[Optimizer, _Holder] = {}
    for holder in holders:
        model = type(holder.model).__name__
        names = ", ".join(type(optimizer).__name__ for optimizer in holder.optimizers)
        if len(holder.optimizers) > 1:
            raise ConfigError(
                f"{model} has several optimizers ({names}), and this strategy's engine takes one for each model; use "
                "one optimizer with a parameter group for each part, or strategy 'ddp' or 'fsdp2'"
            )
        for optimizer in holder.optimizers:
            if optimizer in taken:
                raise ConfigError(
                    f"{names} holds parameters of {type(taken[optimizer].model).__name__} and {model}, and this "
                    "strategy's engine takes one optimizer for each model; build one for each, or use strategy 'ddp' "
                    "or 'fsdp2'"
                )
            taken[optimizer] = holder


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's own model from whatever was put around it; a model that was never wrapped comes back as it is.

    Args:
        keep_fp32_wrapper: False also takes mixed precision off, and restores the model's own forward.
        keep_torch_compile: keep the outermost wrapper of `torch.compile`, around the extracted model.
        recursive: also unwrap the modules inside of the model, in place.
    """
    extracted = unwrap_module(model)
    if recursive:
        for module in list(extracted.modules()):
            for name, child in list(module.named_children()):
                setattr(module, name, unwrap_module(child))
    if not keep_fp32_wrapper:
        remove_autocast(extracted)
        # A forward that its user replaced, and kept under the name that accelerate gives it.
        original = extracted.__dict__.pop("_original_forward", None)
        if getattr(original, "__func__", None) is type(extracted).forward:
            extracted.__dict__.pop("forward", None)
        elif original is not None:
            extracted.forward = original
    if keep_torch_compile and is_compiled_module(model):
        setattr(model, ORIGINAL_MODULE, extracted)
        return model
    return extracted
