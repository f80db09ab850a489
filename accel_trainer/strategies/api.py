"""The contract of engines: strategies that prepare a model with its optimizers, and the units that train it.

The facade and the Trainer drive these classes and nothing else; they never ask which engine runs. The calls of one
optimizer step, on every rank and in this order:

    unit.set_gradient_sync(False); loss = unit.model(...); unit.backward(loss)      # all but the last micro-batch
    unit.set_gradient_sync(True);  loss = unit.model(...); unit.backward(loss)      # the last one
    unit.clip_grad_norm(max_norm)                                                  # optional
    outcome = unit.step()

A unit may have several optimizers, and an optimizer several units, where `Capabilities.joint_optimizers` says so; the
facade refuses both before `prepare` where it does not. With several optimizers, `step(optimizer=...)` is called for
each of them. An optimizer of several units is bound to each, and stepped through the first of them, once, when the
windows of all have ended. Its state is saved with the units: each saves that of its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.shards import local_tensor
from accel_trainer.config import Resolved, RunConfig
from accel_trainer.errors import ConfigError
from accel_trainer.precision import PrecisionPolicy
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.strategies.comm_hooks import CommHook
from accel_trainer.strategies.gradients import LossScale, has_any
from accel_trainer.strategies.local_replicas import LocalReplicas
from accel_trainer.strategies.parameter_state.base_io import CheckpointIO
from accel_trainer.techniques.backward_updates import BackwardUpdates
from accel_trainer.techniques.ema import AveragedWeights

__all__ = [
    "Capabilities", "CheckpointIO", "HeldGradients", "Layout", "StepOutcome", "Strategy", "TrainJob", "TrainUnit",
    "WrapPolicyFunction",
]  # fmt: skip

WrapPolicyFunction = Callable[[nn.Module], bool]
"""Called with every submodule; true makes it a unit of sharding."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts about a strategy, asked by validation; a branch on one of them is not a branch on an engine."""

    max_world_size: int | None = None
    """More processes than this would each train alone; None means no bound."""
    shards_parameters: bool = False
    """Whether a rank holds only its shard of each parameter; a forward is then collective, in evaluation too."""
    replicates_state: bool = False
    """Whether each of several ranks holds all weights and all of the optimizers' state, so that one can save them."""
    settable_accumulation: bool = True
    """Whether windows may change their size after a model has been prepared."""
    joint_optimizers: bool = True
    """Whether a model may have several optimizers, and an optimizer the parameters of several models."""
    describes_optimizers: bool = False
    """Whether its own configuration may describe the optimizer and its schedule, which it builds then."""
    builds_engine: bool = False
    """Whether `prepare` builds an engine around model, optimizer and batch size together.

    Then an optimizer cannot come later, another attempt in the same process finds the memory taken, and there may be
    files in the engine's own format, which `CheckpointIO.load_engine_files` reads.
    """
    distributed_type: str = "NO"
    """The member of DistributedType that users compare with; `MULTI` stands for MULTI_CPU, MULTI_GPU, ... by device."""


@dataclass(frozen=True, slots=True)
class TrainJob:
    """A model and its optimizers to be prepared, with the options given for them."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    """Those that hold parameters of the model; other models' too, maybe. Empty: evaluation only, or bound later."""
    resolved: Resolved
    device_placement: bool = True
    """False leaves the model where the user put it."""
    is_offloaded: bool = False
    """Weights on the meta device have their values elsewhere; hooks of the model bring them in for each forward."""
    evaluation_only: bool = False
    """No gradients will be asked for; a strategy may leave out their exchange."""
    wrap_policy: WrapPolicyFunction | None = None
    """A callable given in Python; it wins over the configuration's policy."""
    loss_scale: LossScale | None = None
    """Of fp16; shared by every unit of an Accelerator, since one loss may reach several models."""
    ddp_options: Mapping[str, Any] = field(default_factory=dict)
    """Extra keyword arguments for DistributedDataParallel, given in Python."""
    comm_hook: CommHook | None = None
    """Compresses the gradients that replicas send to each other; None sends them as they are."""
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the compiler's backend, given in Python."""
    schedule: Mapping[str, Any] | None = None
    """Numbers for a schedule that the strategy's own configuration describes; None where none stands for it."""
    micro_batch_size: int | None = None
    """Rows of one batch on one rank, where a data loader was prepared with the model."""

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self.resolved.config


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of an optimizer step."""

    applied: bool
    """False when the update was skipped because fp16 gradients overflowed."""
    grad_norm: Tensor | None = None
    """Global gradient norm before clipping, where the engine computed one in its step."""


@dataclass(frozen=True)
class HeldGradients:
    """Gradients of an accumulation window that is still open, by parameter name."""

    by_name: Mapping[str, Tensor]
    is_mean: bool
    """Whether they are the mean over all ranks, sharded as the parameters; else each rank's own, not exchanged yet."""


@dataclass(frozen=True)
class Layout:
    """The parameters of a prepared model, and how they lie over the ranks, for people to read."""

    num_parameters: int
    num_trainable: int
    num_local: int
    """Of all of them, those that this rank holds."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Ranks along each axis of the mesh, where there is one."""
    note: str = ""
    """More about it: the engine's stage, for one."""


@runtime_checkable
class TrainUnit(Protocol):
    """A prepared model with its optimizers; the only thing the facade drives.

    A class that inherits from this one has its defaults: those of an engine that replaces no parameters, makes no
    schedule, and has nothing to unscale, to synchronize, or to release.
    """

    model: nn.Module
    """The module for the user to call; possibly a wrapper such as DistributedDataParallel."""
    module: nn.Module
    """The user's own module, with the user's class and parameter names."""
    optimizers: Sequence[Optimizer]
    """The user's own, in the order in which they were bound."""
    local_replicas: LocalReplicas | None = None
    """For updates of each rank's replica by itself; None where ranks hold no replicas, or exchange nothing."""
    averages: AveragedWeights | None = None
    """Moving averages of the weights, where `ema_decay` asks for them."""
    backward_updates: BackwardUpdates | None = None
    """Updates of parameters in the backward, where `optimizer_in_backward` asks for them."""
    fixes_parameters: bool = False
    """Whether the parameters that are trained are those that it was built with."""
    keeps_buffers_apart: bool = False
    """Whether the ranks are to keep buffers of their own, as was asked for; else rank 0's are the model's."""
    is_released: bool = False
    """Whether `release` has removed what the unit needs: the model is as if it had never been prepared."""

    replica_size: int = 1
    """Ranks, one after the other, that hold a replica between them."""
    needs_vote: bool = False
    """Whether parts of the gradients are averaged by ranks of their own: where one is lost, some may have come."""

    def known_parameters(self) -> dict[int, nn.Parameter]:
        """Return the module's parameters by the id of every tensor that stands for one, replaced ones included."""
        return {id(parameter): parameter for parameter in self.module.parameters()}

    def has_any(self, leaves: Set[int]) -> bool:
        """Return whether a backward adds gradients to the module's parameters; `leaves_of` its loss has found where."""
        return has_any(self.module, leaves)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Set whether the next backward exchanges gradients. Called before the forward of a micro-batch."""
        return

    def sync_in_backward(self) -> AbstractContextManager[None]:
        """Return a context whose backward exchanges gradients although its forward was called without sync.

        After it, the last `set_gradient_sync` is in force again.

        Raises:
            ConfigError: the engine decides in the forward.
        """
        return nullcontext()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate gradients of `loss`, divided already. Collective when gradients are exchanged."""

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the accumulated gradients, by a scalar on any device, to make them the mean over their window."""

    def held_gradients(self) -> HeldGradients | None:
        """Return an open window's gradients for a save; None where the engine keeps them. Collective if sharded."""
        return None

    def put_gradients(self, gradients: Mapping[str, Callable[[Box], Tensor]]) -> None:
        """Go on with gradients, boxes of which are read by parameter name; their mean over ranks is the window's."""

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Bound the global norm of the gradients and return it as it was before.

        Returns:
            Scalar, or None where the engine clips inside its step; `step` then applies the bound and returns the norm.
        """

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""

    def step(self, closure: Callable[[], Any] | None = None, *, optimizer: Optimizer | None = None) -> StepOutcome:
        """Update the parameters of an optimizer, by default of the only one. Collective where its engine communicates.

        Raises:
            ConfigError: the unit has no optimizer, or several and none is named.
        """

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Take the fp16 loss scale out of the gradients of an optimizer, None for all, once per step."""
        return

    def zero_grad(self, set_to_none: bool = True, *, optimizer: Optimizer | None = None) -> None:
        """Drop the gradients of an optimizer's parameters; None for all of the unit's optimizers."""

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averages of its weights, where there are any."""
        return nullcontext() if self.averages is None else self.averages.in_model()

    def adopt_averages(self) -> None:
        """Give the model the averages for good, and keep none any more. Every rank calls it."""
        if self.averages is not None:
            self.averages.copy_to_model()
        self.averages = None

    def update_in_backward(self) -> None:
        """Have the optimizers that are bound now update parameters in the backward, and free the gradients.

        Raises:
            ConfigError: the engine, or an optimizer, cannot.
        """
        raise ConfigError(
            f"optimizer_in_backward: {type(self.module).__name__} is in an engine that exchanges gradients, or holds "
            "them, in a way of its own, so that none would be freed; use strategy 'fsdp2', or one process"
        )

    def take_scheduler(self) -> Any:
        """Return the schedule of the engine's own configuration, which the engine steps no longer; None without one."""
        return None

    def bind_optimizer(self, optimizer: Optimizer) -> None:
        """Take an optimizer built before or after `prepare`; one built before is re-bound by parameter name.

        Parameters that are not this module's are left as they are: they belong to another unit.

        Raises:
            ConfigError: none of its parameters is this module's, or another optimizer has one of them.
        """

    def checkpoint_io(self) -> CheckpointIO:
        """Return the reader and writer of this unit's state: the model's, and that of the optimizers for it."""

    def lasting_tensors(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors that stay between updates, as "parameters", "gradients" and "optimizer_state".

        Only an engine that builds flat buffers of its own is asked.
        """
        return {"parameters": [], "gradients": [], "optimizer_state": []}

    def local_bytes(self, *, in_window: bool = False) -> int:
        """Return about how many bytes this rank writes to save the unit, with gradients `in_window`. Not collective."""
        return 0

    def layout(self) -> Layout:
        """Return how many parameters the model has, and how many of them are on this rank. Not collective."""
        parameters = list(self.module.parameters())
        meshes = dict.fromkeys(mesh for each in parameters if (mesh := getattr(each, "device_mesh", None)) is not None)
        axes: dict[str, int] = {}
        for mesh in meshes:
            axes |= zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
        return Layout(
            num_parameters=sum(each.numel() for each in parameters),
            num_trainable=sum(each.numel() for each in parameters if each.requires_grad),
            num_local=sum(local_tensor(each).numel() for each in parameters),
            mesh=axes,
        )

    def exposed_communication_seconds(self) -> float | None:
        """Return the mean measured time that a backward waits for its exchange on this rank; None without any."""
        return None

    def own_groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups beside the job's that `rejoin` makes anew."""
        return []

    def why_irreplaceable(self) -> str:
        """Return why the other ranks cannot go on where one is lost; empty where they can. Not collective."""
        return "its shards of the model, or of the optimizer's state, are lost with the rank"

    def guard_forward(self, go_on: Callable[[RuntimeError], None]) -> None:
        """Have `go_on` called with the error of a collective in which a forward loses a rank. Not collective."""
        return

    def begin_update(self) -> None:
        """Keep the buffers that a forward changes, for `rejoin`."""
        return

    def step_aside(self) -> None:
        """Let the next forward exchange nothing, and its backward neither: a micro-batch that is given up."""
        return

    def rejoin(self) -> None:
        """Exchange gradients over the ranks of the present group. Every one of them calls it.

        Only where `why_irreplaceable` finds nothing.
        """
        return

    def drop_update(self) -> None:
        """Drop the gradients of an update that is not complete, and put the buffers back of its beginning."""
        return

    def release(self) -> None:
        """Remove hooks and wrappers of the engine, so that model and optimizers can be prepared again.

        Every rank calls it, once or more often; the unit is not used afterwards. It is released, too, where another
        Accelerator prepares its model and only one engine can be around that.
        """
        return


class Strategy(Protocol):
    """A way to shard or replicate a module over the ranks.

    A class that inherits from this one has its defaults: those of an engine that needs nothing done before models are
    built, and whose ranks all read data of their own.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def check_config(self, resolved: Resolved, world_size: int) -> None:
        """Refuse a configuration that contradicts itself. The launcher asks, before it starts any rank.

        Values that only a script or its data know may be missing. By default nothing is refused.

        Raises:
            ConfigError: an option, whatever the script does.
        """
        return

    def start(self, resolved: Resolved, process: ProcessContext) -> Resolved:
        """Bring the engine up before models are built. Collective: called once on every rank that has joined.

        Returns:
            The configuration in force: an engine's own one overrides ours where it states more.

        Raises:
            ConfigError: the two contradict each other, or the engine cannot run here.
        """
        return resolved

    @contextmanager
    def planning(self, resolved: Resolved, process: ProcessContext) -> Iterator[tuple[Resolved, Collection[str]]]:
        """Context in which a strategy prepares, and trains, a model without memory among ranks that do not exist.

        Yields:
            The configuration in force, as `start` returns it, and what is in host memory: some of "parameters",
            "gradients" and "optimizer_state".
        """
        yield resolved, ()

    def readers(self, resolved: Resolved, process: ProcessContext) -> ProcessContext:
        """Return this process among the ranks that read different data. Collective: called once on every rank.

        Data, random streams, weights of losses, counts of tokens and gathered metrics are counted over these. All other
        ranks compute one of them together with this one, and read the same as it.

        Raises:
            ConfigError: the sizes of the mesh do not make this job.
        """
        return process

    def building(self, in_pieces: bool) -> AbstractContextManager[None]:
        """Return the context in which models are built in pieces or in full. Not collective: one rank may enter it."""
        return nullcontext()

    def check(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> None:
        """Refuse a job that cannot be prepared as asked. Not collective; changes nothing.

        The facade checks every job of one call before it prepares the first.

        Raises:
            ConfigError: an option, the model or an optimizer; on every rank alike.
        """

    def prepare(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> TrainUnit:
        """Shard or replicate the job's model and bind its optimizers. Collective: every rank has the same job.

        Raises:
            ConfigError: `check` refuses the job; before any collective.
        """
