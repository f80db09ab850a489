"""DistributedDataParallel: every rank holds a replica of the model, gradients are averaged."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_trainer.errors import ConfigError
from accel_trainer.precision import PrecisionPolicy
from accel_trainer.runtime.memory import groups_left_behind
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.torch_engines import (
    abandon_exchange,
    exposed_exchange_seconds,
    guard_forward,
    is_exchange_open,
    regroup_replicas,
)
from accel_trainer.runtime.whereabouts import section
from accel_trainer.strategies.api import Capabilities, CheckpointIO, StepOutcome, Strategy, TrainJob
from accel_trainer.strategies.broadcast_values import broadcast_module_states
from accel_trainer.strategies.gradients import has_any, leaves_of
from accel_trainer.strategies.layers import select_layers
from accel_trainer.strategies.local_replicas import LocalReplicas
from accel_trainer.strategies.optimizers import check_frozen
from accel_trainer.strategies.parameter_state.torch_io import TorchCheckpointIO
from accel_trainer.strategies.single import (
    KeptBuffers,
    NativeUnit,
    check_optimizers,
    prepare_module,
    refuse_lazy,
    require_values,
)

_UNLIKE = "DDP would leave its gradients unlike on each rank"


class DDPUnit(NativeUnit):
    """A module replicated over the ranks."""

    def __init__(self, model: nn.Module, module: nn.Module, job: TrainJob, *, is_distributed: bool) -> None:
        """Take a wrapped model, or one whose gradients nobody averages."""
        super().__init__(model, module, job.loss_scale)
        self._replicas = model if isinstance(model, DistributedDataParallel) else None
        self.keeps_buffers_apart = self._replicas is not None and not self._replicas.broadcast_buffers
        # A static graph is learnt in the first backward, which fails where it does not exchange. The mean of gradients
        # that are averaged already is the same, so a window may exchange once more.
        self._must_sync = self._replicas is not None and self._replicas.static_graph
        self._has_exchanged = False
        self._hooks: list[RemovableHandle] = []
        self._buffers = KeptBuffers(module)
        self._updates_locally, self._has_comm_hook = job.config.local_steps is not None, job.comm_hook is not None
        is_apart = self._replicas is None and (job.evaluation_only or not is_distributed)
        self._frozen = () if is_apart else tuple(p for p in module.parameters() if not p.requires_grad)
        """Parameters that DDP averages no gradients of."""
        if self._frozen:
            # Also in the forward: another model's backward may train this one.
            model.frozen_when_prepared = self._frozen  # type: ignore[assignment]
            self._hooks.append(model.register_forward_pre_hook(_check_frozen))
        if self._replicas is not None:
            self.local_replicas = LocalReplicas(self._replicas, self.optimizers, is_asked_for=self._updates_locally)
            _outlive_reducer(self._replicas)
            self._hooks += [self._replicas.register_forward_pre_hook(_note_call), *self._watch_gradients()]

    @section("backward")
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate gradients of `loss`. Collective where they are exchanged.

        Raises:
            ConfigError: a parameter was frozen when the model was prepared, and is trained now; or this is a second
                backward of one forward, or of two.
        """
        check_frozen(self.module, self._frozen, _UNLIKE)
        if self._replicas is not None:
            # DDP exchanges in the first backward alone: the second adds this rank's own gradients to the mean, and
            # replicas drift apart without a word.
            if self._has_exchanged and has_any(self.module, leaves_of(loss)):
                raise ConfigError(
                    f"backward() was called a second time after one forward of {type(self.module).__name__}, and DDP "
                    "exchanges gradients in the first only; add the losses and call backward() once, or use strategy "
                    "'fsdp2'"
                )
            if kwargs.get("retain_graph") and self._replicas.require_backward_grad_sync:
                self._note_exchange(self._replicas)
        try:
            super().backward(loss, **kwargs)
        except Exception:
            # Whoever catches the error may go on with the next batch: DDP would wait for the rest of this one.
            if self._replicas is not None:
                abandon_exchange(self._replicas)
            raise

    def _watch_gradients(self) -> Iterator[RemovableHandle]:
        """Hook a few parameters that are trained; refuse a backward of another forward than the wrapper's.

        DDP exchanges what follows its own forward. Behind a call that goes past it, gradients would stay the rank's
        own, without a word. A few parameters: such a call mostly leaves out the first layers or the last.
        """
        own, name = weakref.ref(self), type(self.module).__name__

        def check(parameter: Tensor) -> None:
            unit = own()
            if unit is None or unit._replicas is None or not unit._replicas.require_backward_grad_sync:
                return
            unit._replicas.has_taken_backward = True  # type: ignore[assignment]
            if not getattr(unit._replicas, "was_called", False):
                raise ConfigError(
                    f"a backward reached parameters of {name}, and the model that prepare() returned was not called "
                    "since the last update: DDP averages no gradients of a call that goes past it (the model's own "
                    "object, unwrap_model(model), or another method than forward). Call the prepared model, whose "
                    "forward may call the other method, or use strategy 'fsdp2'"
                )
            if not unit._replicas.prepares_exchange:
                return  # of a forward within no_sync(): trigger_sync_in_backward() comes later
            given: Any = unit._replicas.given
            seen = id(unit), id(parameter)  # a second Accelerator watches what a first has prepared, beside it
            if seen in given and not unit._replicas.static_graph:
                raise ConfigError(
                    f"a second backward reached parameters of {name} since its last forward, and DDP exchanges "
                    "gradients in the first only: replicas would drift apart; add the losses and call backward() once, "
                    "call backward() behind each forward, or use strategy 'fsdp2'"
                )
            given.add(seen)

        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for place in {0, len(trained) // 2, len(trained) - 1}:
            yield trained[place].register_post_accumulate_grad_hook(check)

    def _note_exchange(self, replicas: DistributedDataParallel) -> None:
        """Remember, until the next forward, that a backward has exchanged gradients and left its graph."""

        def forget(*args: Any) -> None:
            self._has_exchanged = False
            handle.remove()

        if not self._has_exchanged:
            self._has_exchanged = True
            handle = replicas.register_forward_pre_hook(forget)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Exchange gradients in the next backward, or keep them local. The setter that DDP.no_sync() itself uses."""
        super().set_gradient_sync(enabled)
        if self._replicas is not None and self.local_replicas is not None:
            exchanges = enabled and not self.local_replicas.is_apart
            self._replicas.require_backward_grad_sync = exchanges or self._must_sync
            self._must_sync = False

    @contextmanager
    def sync_in_backward(self) -> Iterator[None]:
        """Exchange gradients in the block's backward; a ConfigError where the forward decides, or ranks are apart."""
        replicas = self._replicas
        if replicas is None:
            yield
            return
        if self.local_replicas is not None and self.local_replicas.is_apart:
            raise ConfigError(
                f"gradients of {type(self.module).__name__} cannot be exchanged within a LocalSGD block, where every "
                "rank updates its own replica; leave the block first"
            )
        if replicas.find_unused_parameters or replicas.static_graph:
            option = "find_unused_parameters" if replicas.find_unused_parameters else "static_graph"
            raise ConfigError(
                f"gradients of {type(self.module).__name__} cannot be exchanged in a backward whose forward was told "
                f"otherwise: with {option}=True DDP looks at the outputs of the forward for the parameters that are "
                f"used; set {option} to False, or run the last forward outside of no_sync()"
            )
        before = replicas.require_backward_grad_sync
        replicas.require_backward_grad_sync = True
        _note_call(replicas)
        # As DDP does at the end of a forward that is followed by an exchange: every parameter is waited for.
        replicas.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            replicas.require_backward_grad_sync = before

    def step(self, closure: Callable[[], Any] | None = None, *, optimizer: Optimizer | None = None) -> StepOutcome:
        """Update the parameters; refuse to where replicas are apart, or would be afterwards.

        Raises:
            ConfigError: nobody would make replicas alike again; or parameters took no part in the backward.
        """
        if self.local_replicas is not None:
            self.local_replicas.require_open()
        if self._replicas is not None:
            self._require_exchange(self._replicas)
            if getattr(self._replicas, "has_taken_backward", False):
                self._replicas.was_called = False  # type: ignore[assignment]
        return super().step(closure, optimizer=optimizer)

    def _require_exchange(self, replicas: DistributedDataParallel) -> None:
        # It would be applied to unlike replicas, and the next forward, if there is one, would raise torch's error.
        if not is_exchange_open(replicas):
            return
        named = [(name, p) for name, p in self.module.named_parameters() if p not in self._frozen]
        missing = [name for name, p in named if p.grad is None or not p.requires_grad]
        which = f"{len(missing)} of the {len(named)} trained parameters ({missing[0]!r} for one)" if missing else "some"
        raise ConfigError(
            f"{which} of {type(self.module).__name__} took no part in this backward, and DDP exchanges no gradients "
            "before all have come that were trained when the model was prepared; set ddp.find_unused_parameters "
            "(DistributedDataParallelKwargs, ddp_find_unused_parameters), or freeze what is not used "
            "(requires_grad_(False)) before prepare()"
        )

    def checkpoint_io(self) -> CheckpointIO:
        """Return the reader and writer of this unit's state, of every replica's where they are apart."""
        return TorchCheckpointIO(self.module, self.optimizers, self.local_replicas, self.averages)

    def exposed_communication_seconds(self) -> float | None:
        """Return the mean time for which an exchange of gradients keeps a backward waiting, as DDP samples it."""
        return None if self._replicas is None else exposed_exchange_seconds(self._replicas)

    def why_irreplaceable(self) -> str:
        """Return why ranks are not alike: other exchanges than DDP's, or replicas that are apart."""
        if self._replicas is None:
            return "its model was wrapped by another engine, or is not trained"
        if self._has_comm_hook:
            return "a communication hook exchanges its gradients, over a group of its own"
        if self._replicas.static_graph:
            return "ddp.static_graph has its order of gradients from the first update"
        if len(self.optimizers) > 1:
            return "its model has several optimizers, whose steps are not known to be of one update"
        is_apart = self._updates_locally or (self.local_replicas is not None and self.local_replicas.is_open)
        return "its replicas are updated apart (local_steps, LocalSGD)" if is_apart else ""

    def begin_update(self) -> None:
        """Keep the buffers: a forward moves the statistics of batch norms, and rank 0's are the model's."""
        if self._replicas is not None:
            # As the exchange of the update before has left it, also where it was given up on some ranks in the forward,
            # on others in the backward: they would differ in whether they send buffers.
            self._replicas.require_forward_param_sync = True
        self._buffers.keep()

    def step_aside(self) -> None:
        """Let the next forward and backward exchange nothing, the buffers of rank 0 neither."""
        if self._replicas is not None:
            self._replicas.require_forward_param_sync = self._replicas.require_backward_grad_sync = False

    def drop_update(self) -> None:
        """Drop the gradients, exchange none in this micro-batch, and put the buffers back."""
        if self._replicas is None:
            return
        self.zero_grad()
        self._replicas.require_backward_grad_sync = False
        self._buffers.put_back()

    def rejoin(self) -> None:
        """Exchange gradients over the job's present group; of a model for evaluation there are none."""
        if self._replicas is None:
            return
        self.zero_grad()
        regroup_replicas(self._replicas)
        _outlive_reducer(self._replicas)
        self._has_exchanged = False

    def guard_forward(self, go_on: Callable[[RuntimeError], None]) -> None:
        """Have `go_on` called where rank 0's buffers cannot be had, since a rank is lost; the forward keeps its own."""
        if self._replicas is not None:
            guard_forward(self._replicas, go_on)

    def release(self) -> None:
        """Let the module be wrapped again, after an error within a forward or backward, too."""
        super().release()
        for hook in self._hooks:
            hook.remove()
        if self._replicas is not None:
            abandon_exchange(self._replicas)


def _note_call(replicas: nn.Module, *args: Any) -> None:
    """Remember that a forward prepares an exchange. A forward pre-hook that can be pickled with its wrapper."""
    if torch.is_grad_enabled():
        replicas.was_called, replicas.has_taken_backward = True, False  # type: ignore[assignment]
        replicas.given = set()  # type: ignore[assignment]
        replicas.prepares_exchange = replicas.require_backward_grad_sync


def _check_frozen(model: nn.Module, *args: Any) -> None:
    """Refuse to train what was frozen when the model was prepared. A forward pre-hook, to be pickled as well."""
    if torch.is_grad_enabled():
        module = model.module if isinstance(model, DistributedDataParallel) else model
        check_frozen(module, getattr(model, "frozen_when_prepared", ()), _UNLIKE)


def build_ddp_options(job: TrainJob, process: ProcessContext) -> dict[str, Any]:
    """Return DistributedDataParallel's keyword arguments: the configuration's, overridden by those given in Python."""
    config = job.config.ddp
    names = ("find_unused_parameters", "bucket_cap_mb", "static_graph", "gradient_as_bucket_view")
    options: dict[str, Any] = {name: getattr(config, name) for name in names}
    if not config.broadcast_buffers:
        # torch 2.13 renamed the option and warns about the old name.
        renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
        options["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
    options.update(job.ddp_options)
    if process.device.type != "cpu" and job.device_placement:
        options.update(device_ids=[process.device.index], output_device=process.device.index)
    return options


class DDPStrategy(Strategy):
    """Replicas with averaged gradients, on any device."""

    name: ClassVar[str] = "ddp"
    capabilities: ClassVar[Capabilities] = Capabilities(distributed_type="MULTI", replicates_state=True)

    def check(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> None:
        """Refuse a model without values, optimizers of something else, and a hook that the device cannot run."""
        refuse_lazy(job.model)
        require_values(job.model)
        if job.comm_hook is not None:
            job.comm_hook.check(process.device)
        select_layers(job)
        if job.config.optimizer_in_backward and process.backend is not None:
            raise ConfigError(
                f"{job.resolved.describe('optimizer_in_backward')} with strategy 'ddp', which keeps all "
                "gradients in buffers of its own, so that none would be freed; use strategy 'fsdp2'"
            )
        check_optimizers(job)

    def prepare(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> DDPUnit:
        """Place, autocast and wrap the model, unless nobody averages its gradients. Collective: rank 0's values win."""
        self.check(job, precision, process)
        # A model that the user has wrapped is taken as it is; wrapping it twice would average gradients twice.
        model = job.model
        is_wrapped = isinstance(model, DistributedDataParallel)
        module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        prepare_module(module, job, precision, process)
        trains = any(parameter.requires_grad for parameter in module.parameters()) and not job.evaluation_only
        if trains and not is_wrapped and process.backend is not None:
            model = DistributedDataParallel(module, **build_ddp_options(job, process))
            if job.comm_hook is not None:
                job.comm_hook.register(model)
        elif not is_wrapped and process.is_distributed:
            # What DDP does when it wraps: ranks that built the model from other seeds would evaluate other models.
            broadcast_module_states(module, process.device)
        return DDPUnit(model, module, job, is_distributed=process.is_distributed).with_optimizers(job)


def _outlive_reducer(model: DistributedDataParallel) -> None:
    """Keep the process group of a wrapped model until the model's reducer is gone."""
    # The last to let go of a gloo group waits for its threads, and one of them may be waiting for the interpreter's
    # lock, to drop what the last exchange held. A `ProcessGroup` gives the lock away while it ends; a reducer does not
    # (torch 2.11 to 2.13): a script whose model outlives `end_training()` hung at its end, in 2 of 66 runs on a busy
    # machine. Groups that were kept for earlier models end here, where their reducers are gone.
    groups_left_behind.clear()
    # Not dropped by the callback itself: the garbage collector calls it before it clears anything.
    weakref.finalize(model.reducer, groups_left_behind.append, model.process_group).atexit = False
