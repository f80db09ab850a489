"""One process: the user's module as it is. Also the base of the units that keep plain torch optimizers."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer import logging
from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.shards import local_box, local_tensor, wrap_local_like
from accel_trainer.errors import ConfigError
from accel_trainer.precision import PrecisionPolicy, apply_autocast, apply_float8
from accel_trainer.runtime.model_wrappers import move_module
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.torch_private import foreach_copy_, own_buffers
from accel_trainer.runtime.whereabouts import section
from accel_trainer.strategies import gradients
from accel_trainer.strategies.api import (
    Capabilities,
    CheckpointIO,
    HeldGradients,
    StepOutcome,
    Strategy,
    TrainJob,
    TrainUnit,
)
from accel_trainer.strategies.compile import apply_compile, reuses_outputs
from accel_trainer.strategies.gradients import LossScale
from accel_trainer.strategies.layers import select_layers
from accel_trainer.strategies.optimizers import check_disjoint, check_optimizer_belongs
from accel_trainer.strategies.parameter_state.torch_io import TorchCheckpointIO, state_follows_parameters
from accel_trainer.techniques.activations import treat_activations
from accel_trainer.techniques.backward_updates import BackwardUpdates
from accel_trainer.techniques.ema import build_averages, check_averaging

logger = logging.get_logger(__name__)


def require_values(model: nn.Module) -> None:
    """Refuse a model on the meta device: there are no values to place or to shard."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        meta = [name for name, tensor in named if tensor.is_meta]
        if meta:
            raise ConfigError(
                f"{len(meta)} {kind}(s) of {type(model).__name__} are on the meta device (first: {meta[0]!r}) and hold "
                "no values; load the model's weights (from_pretrained, load_state_dict(assign=True)) before prepare()"
            )


def refuse_lazy(model: nn.Module) -> None:
    """Refuse parameters of lazy modules, which have no shape yet: nothing could be exchanged or sharded."""
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise ConfigError(
            f"{len(lazy)} parameter(s) of {type(model).__name__} have no shape before the first forward (first: "
            f"{lazy[0]!r}, of a lazy module), and several processes lay parameters out in prepare(); call the model "
            "once with a batch before it"
        )


def refuse_sparse_gradients(model: nn.Module, engine: str) -> None:
    """Refuse trained embeddings whose gradients are sparse tensors, which `engine` cannot shard."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name or 'the model'} of {type(model).__name__} is an {type(module).__name__} with sparse=True, and "
                f"{engine} cannot shard its sparse gradients; make it with sparse=False, or use strategy 'ddp'"
            )


def place(model: nn.Module, job: TrainJob, process: ProcessContext) -> None:
    """Move the model to this rank's device, tied weights staying tied; nothing moves when it is there already."""
    if job.device_placement:
        move_module(model, process.device)


def prepare_module(module: nn.Module, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> None:
    """Place a module that stays in one piece, have it compute in its precision, and compile it; all in place."""
    # fp8 replaces modules, so before all that takes hold of one; compiling comes last, around the autocast.
    apply_float8(module, precision, compiles=job.config.compile.backend != "no")
    place(module, job, process)
    apply_autocast(module, precision)
    treat_activations(job.model, select_layers(job), job.config, process.device)
    apply_compile(module, job.config.compile, job.compile_options)


def make_contiguous(model: nn.Module, engine: str) -> None:
    """Lay out parameters row by row whose memory is in another order, which `engine` cannot split; it is logged."""
    shuffled = {name: p for name, p in model.named_parameters() if not p.is_contiguous()}
    for parameter in shuffled.values():
        parameter.data = parameter.data.contiguous()
    if shuffled:
        logger.info("%s splits parameters by rows: %s are now contiguous in memory", engine, ", ".join(shuffled))


def refuse_shared_memory(model: nn.Module, engine: str) -> None:
    """Refuse trained parameters that share memory without being one, as views do: `engine` would part them."""
    by_memory: dict[int, list[tuple[Any, Any, str, nn.Parameter]]] = {}
    for name, p in model.named_parameters():
        # Other kinds of tensors, quantized ones and shards for instance, have no memory of their own to ask for.
        if (
            type(p.data) is Tensor
            and p.layout == torch.strided
            and p.numel()
            and (at := p.untyped_storage().data_ptr())
        ):
            end = p.storage_offset() + 1 + sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True))
            by_memory.setdefault(at, []).append((p.storage_offset(), end, name, p))
    for held in by_memory.values():
        held.sort(key=lambda each: each[:2])
        for (_, end, other, theirs), (begin, _, name, own) in itertools.pairwise(held):
            if begin < end and (own.requires_grad or theirs.requires_grad):
                raise ConfigError(
                    f"{name} of {type(model).__name__} is a view of memory that {other} has, too: {engine} would make "
                    "two parameters of them. Tie them by one Parameter object, whose parts or transpose the forward "
                    "takes (nn.functional.linear(x, other.weight.t())), or train with strategy: ddp"
                )


def check_optimizers(job: TrainJob) -> None:
    """Refuse optimizers that are not the model's, or share parameters of it."""
    known = {id(parameter): parameter for parameter in job.model.parameters()}
    for optimizer in job.optimizers:
        check_optimizer_belongs(optimizer, job.model, known)
        check_averaging(job.resolved, optimizer)
    check_disjoint(job.optimizers, known)


class BackwardGuard:
    """Context of each backward of an engine that cannot go on behind one that has failed, on any rank."""

    def __init__(self, model: nn.Module, engine: str) -> None:
        self._name, self._engine = type(model).__name__, engine
        self._failed = ""

    def __enter__(self) -> None:
        if self._failed:
            raise ConfigError(
                f"an earlier backward of {self._name} has ended with {self._failed}, and {self._engine} cannot go on "
                "behind one: its gradients would be mixed with the next ones. End the run and go on from a checkpoint; "
                "to leave a batch out, check its values before backward()"
            )

    def forget(self) -> None:
        """Go on behind a backward that has failed: nothing is left of it."""
        self._failed = ""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._failed = f"{type(error).__name__}: {error}"


class KeptBuffers:
    """The buffers of a module as they were at the beginning of an update."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: list[tuple[dict[str, Tensor | None], str]] | None = None
        """Of the buffers, where a forward may put other tensors."""
        self._before: list[Tensor | None] = []
        """The tensors in those places at the beginning of the update."""
        self._sources: list[Tensor] = []
        self._values: list[Tensor] = []
        """Their copies. What is copied needs no gradient: `torch.no_grad()` was half of the time of copying it."""

    def keep(self) -> None:
        """Keep the present ones."""
        # A walk through the modules and a clone of each of ResNet-50's 159 buffers were 0.37 ms, this is 0.11 ms.
        if self._places is None:
            registries = map(own_buffers, self._module.modules())
            self._places = [(registry, name) for registry in registries for name in registry]
        present = [buffers.get(name) for buffers, name in self._places]
        if self._values and all(map(operator.is_, self._before, present)):
            foreach_copy_(self._values, self._sources)
        else:
            self._before = present
            self._sources = [each.detach() if each.requires_grad else each for each in present if each is not None]
            self._values = [each.clone() for each in self._sources]

    def put_back(self) -> None:
        """Let the module have those that were kept."""
        for (buffers, name), buffer in zip(self._places or (), self._before, strict=True):
            buffers[name] = buffer
        if self._values:
            foreach_copy_(self._sources, self._values)


class NativeUnit(TrainUnit):
    """A module and its torch optimizers in one process."""

    def __init__(self, model: nn.Module, module: nn.Module, loss_scale: LossScale | None = None) -> None:
        self.model = model
        self.module = module
        self.optimizers: list[Optimizer] = []
        self._goes_on = False
        """Whether gradients stay with their parameters behind the next backward, until another one."""
        self._scale = loss_scale
        if loss_scale is not None:
            loss_scale.serve(self)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Note whether the window ends with the next backward."""
        self._goes_on = not enabled

    @section("backward")
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate gradients of `loss`, scaled where fp16 asks for it."""
        (loss if self._scale is None else self._scale.scale(loss)).backward(**kwargs)
        if self._goes_on and reuses_outputs(self._resolved.config.compile):
            gradients.keep_gradients(self.module.parameters())

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Take the fp16 loss scale out of the gradients, once per step."""
        if self._scale is not None:
            for each in self.optimizers if optimizer is None else (optimizer,):
                self._scale.unscale(each)

    def update_in_backward(self) -> None:
        """Have the optimizers that are bound now update parameters in the backward."""
        self._update_in_backward(list(self.module.parameters()))

    def _update_in_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        self.backward_updates = self.backward_updates or BackwardUpdates(gradients.choose_samples(parameters))
        for optimizer in self.optimizers:
            self.backward_updates.watch(optimizer, parameters)

    def _require_gradients(self, doing: str) -> None:
        if self.backward_updates is not None:
            raise ConfigError(
                f"{doing} needs the gradients of all parameters, and with optimizer_in_backward the backward has used "
                "and freed them; leave one of the two out (of a Trainer, set max_grad_norm=0)"
            )

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the accumulated gradients by `factor`."""
        self._require_gradients("a window that is weighed after its backward (global_token_mean, accumulation)")
        gradients.scale_gradients(self.module.parameters(), factor)

    def held_gradients(self) -> HeldGradients | None:
        """Return this rank's own gradients of an open window, which have not been exchanged yet."""
        named = self.module.named_parameters()
        return HeldGradients({name: p.grad.detach() for name, p in named if p.grad is not None}, is_mean=False)

    def put_gradients(self, gradients: Mapping[str, Callable[[Box], Tensor]]) -> None:
        """Go on with the gradients of an open window; each rank reads its shards. Ranks do not communicate."""
        for name, parameter in self.module.named_parameters():
            if name not in gradients:
                parameter.grad = None
                continue
            own = torch.empty_like(local_tensor(parameter))
            parameter.grad = wrap_local_like(parameter, own.copy_(gradients[name](local_box(parameter))))

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Bound the global gradient norm; return it as it was before. See `gradients.clip_grad_norm`."""
        self._require_gradients("clip_grad_norm_()")
        return gradients.clip_grad_norm(self._unscaled(parameters), max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element."""
        self._require_gradients("clip_grad_value_()")
        gradients.clip_grad_value(self._unscaled(parameters), clip_value)

    def _unscaled(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """Return the parameters, whose gradients are unscaled now; other units' may be among them."""
        # Before any clipping: a bound that is compared with scaled gradients would clip them all.
        if self._scale is None:
            return parameters
        given = list(parameters)
        self._scale.unscale_holders(given)
        return given

    def _only_optimizer(self) -> Optimizer:
        if not self.optimizers:
            raise ConfigError(f"{type(self.module).__name__} was prepared without an optimizer; pass one to prepare()")
        if len(self.optimizers) > 1:
            names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise ConfigError(f"{type(self.module).__name__} has several optimizers ({names}); name the one that steps")
        return self.optimizers[0]

    def step(self, closure: Callable[[], Any] | None = None, *, optimizer: Optimizer | None = None) -> StepOutcome:
        """Update the parameters; skipped, and reported so, when fp16 gradients overflowed."""
        stepping = optimizer or self._only_optimizer()
        if self._scale is None:
            if closure is None:
                stepping.step()
            else:
                stepping.step(closure)
            return StepOutcome(applied=True)
        if closure is not None:
            raise ConfigError(
                f"{type(stepping).__name__}.step(closure) cannot be combined with fp16, whose losses are scaled: "
                "the closure's gradients would be used as they are; use bf16, or an optimizer that needs no closure"
            )
        return StepOutcome(applied=self._scale.step(stepping))

    def zero_grad(self, set_to_none: bool = True, *, optimizer: Optimizer | None = None) -> None:
        """Drop the gradients of an optimizer's parameters."""
        for each in self.optimizers if optimizer is None else (optimizer,):
            # First: a batch that is skipped after clipping would leave its overflow in the scale of the next one.
            if self._scale is not None:
                self._scale.drop(each)
            each.zero_grad(set_to_none)

    def bind_optimizer(self, optimizer: Optimizer) -> None:
        """Take an optimizer that holds parameters of this module; state that it has comes to where they are."""
        if optimizer in self.optimizers:
            return
        known = self.known_parameters()
        check_optimizer_belongs(optimizer, self.module, known)
        check_disjoint([*self.optimizers, optimizer], known)
        if self.averages is not None:
            check_averaging(self._resolved, optimizer)
        # An optimizer that has stepped before prepare() holds its moments where the parameters were then.
        state_follows_parameters(optimizer, self.module.parameters())
        self.optimizers.append(optimizer)

    def with_optimizers(self, job: TrainJob) -> Self:
        """Take the job's optimizers and options, and return the unit."""
        self._resolved = job.resolved
        self.averages = build_averages(self.module, job.config)
        for optimizer in job.optimizers:
            self.bind_optimizer(optimizer)
        return self

    def release(self) -> None:
        """Leave updates to the optimizers again."""
        if self.backward_updates is not None:
            self.backward_updates.remove()

    def checkpoint_io(self) -> CheckpointIO:
        """Return the reader and writer of this unit's state."""
        return TorchCheckpointIO(self.module, self.optimizers, averages=self.averages)

    def local_bytes(self, *, in_window: bool = False) -> int:
        """Return about how many bytes this rank writes for the unit."""
        return self.checkpoint_io().local_bytes() + (self._gradient_bytes() if in_window else 0)

    def _gradient_bytes(self) -> int:
        """Size of this rank's own gradients, which have not been exchanged yet."""
        return sum(gradient.nbytes for gradient in gradients.gradients_of(self.module.parameters()))


class SingleStrategy(Strategy):
    """One process with the full model."""

    name: ClassVar[str] = "single"
    capabilities: ClassVar[Capabilities] = Capabilities(max_world_size=1)

    def check(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> None:
        """Refuse a model without values, and optimizers of something else."""
        if not job.is_offloaded:
            require_values(job.model)
        select_layers(job)
        check_optimizers(job)

    def prepare(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> NativeUnit:
        """Place the model and put autocast on it; the returned unit's model is the user's own object."""
        self.check(job, precision, process)
        prepare_module(job.model, job, precision, process)
        return NativeUnit(job.model, job.model, job.loss_scale).with_optimizers(job)
