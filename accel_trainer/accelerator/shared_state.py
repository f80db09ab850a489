"""PartialState, AcceleratorState and GradientState: rank, settings and step under the names that scripts read."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, Generic, TypeVar

import torch

from accel_trainer.config import CompileConfig, HangConfig, Resolved, SourceKind, resolve
from accel_trainer.data.loader import PreparedDataLoader
from accel_trainer.data.plan import BatchRows
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.deepspeed_plugin import DeepSpeedPlugin, DeepSpeedPlugins
from accel_trainer.plugins.kwargs import TorchDynamoPlugin
from accel_trainer.runtime.collectives import barrier
from accel_trainer.runtime.process import (
    ProcessContext,
    destroy_process_group,
    find_left_process,
    forget_process,
    init_process,
    read_environment,
)
from accel_trainer.runtime.tensor_trees import split_evenly

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_STATE_NAMES = ("process", "distributed_type", "mixed_precision", "fsdp_plugin", "is_fsdp2", "parallelism_config")
"""What a state has from its construction on."""


class DistributedType(str, Enum):  # noqa: UP042  # str() must give 'DistributedType.FSDP', as users compare it
    """Kind of distributed setup. A str, so that it compares equal to the names that other libraries use."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"  # noqa: PIE796  # an alias, on purpose
    MEGATRON_LM = "MEGATRON_LM"

    @classmethod
    def of(cls, kind: str, device: torch.device) -> DistributedType:
        """Return the member for a strategy's kind; `MULTI` is completed by the kind of device."""
        if kind != "MULTI":
            return cls(kind)
        if device.type == "tpu":  # torch-tpu's; the field's name for several of them has no MULTI
            return cls.XLA
        suffix = {"cpu": "CPU", "cuda": "GPU"}.get(device.type, device.type.upper())
        return cls(f"MULTI_{suffix}")


class Forwarded(Generic[T]):
    """A read-only property that shows an attribute of an attribute, of the type in brackets."""

    def __init__(self, path: str) -> None:
        self._read: Callable[[Any], Any] = attrgetter(path)

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        return self if instance is None else self._read(instance)  # type: ignore[return-value]

    def __set__(self, instance: Any, value: Any) -> None:
        # Without it, an assignment would put a value of the instance before what everybody else reads.
        raise AttributeError(f"attribute of {type(instance).__name__!r} object has no setter")


class ProcessView:
    """Rank, device and the calls that need no more, for classes with a `process`."""

    process: ProcessContext

    device = Forwarded[torch.device]("process.device")
    """This rank's device."""
    backend = Forwarded[str | None]("process.backend")
    """Backend of the process group; None without one."""
    num_processes = Forwarded[int]("process.world_size")
    """World size."""
    process_index = Forwarded[int]("process.rank")
    """Rank in the job."""
    local_process_index = Forwarded[int]("process.local_rank")
    """Rank on this node."""
    is_main_process = Forwarded[bool]("process.is_main")
    """Whether this is rank 0."""
    is_local_main_process = Forwarded[bool]("process.is_local_main")
    """Whether this is the first rank of its node."""
    use_distributed = Forwarded[bool]("process.is_distributed")
    """Whether there is more than one process."""

    @property
    def _reader(self) -> ProcessContext:
        """This process among those that take different inputs."""
        return self.process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.process.rank == self.process.world_size - 1

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here. Collective; returns at once on one process."""
        barrier(self.process)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this rank's shard of a list, tuple, range, tensor, array, `datasets.Dataset` or a dict of those.

        Shards are contiguous, of the same kind as `inputs`, and hold every sample once, the last ranks' perhaps none;
        with `apply_padding`, the last sample is repeated until all are equally long. Ranks do not communicate.

        Raises:
            ConfigError: `inputs` cannot be split, or the values of a dict differ in length.
        """
        own = self._reader
        yield split_evenly(inputs, own.world_size, own.rank, apply_padding=apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextmanager
    def _goes_first(self, is_first: bool) -> Iterator[None]:
        # The others wait at the first barrier until the block is done; it is reached when the block raises, too.
        if not is_first:
            self.wait_for_everyone()
            yield
            return
        try:
            yield
        finally:
            self.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run a block on rank 0, then on the others. Collective: every rank enters it."""
        return self._goes_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run a block on the first rank of each node, then on the others. Collective: every rank enters it."""
        return self._goes_first(self.is_local_main_process)

    def _only_if(self, is_wanted: Callable[[], bool], function: F) -> F:
        # Asked at each call: where a rank is lost, another may be the main process since.
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_wanted() else None

        return run  # type: ignore[return-value]

    def on_main_process(self, function: F) -> F:
        """Decorate a function so that it runs on rank 0 and returns None elsewhere."""
        return self._only_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: F) -> F:
        """Decorate a function so that it runs on the first rank of each node."""
        return self._only_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: F) -> F:
        """Decorate a function so that it runs on the highest rank."""
        return self._only_if(lambda: self.is_last_process, function)

    def on_process(self, function: F | None = None, process_index: int = 0) -> Any:
        """Decorate a function so that it runs on one rank; a process alone runs it whatever the rank."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only_if(lambda: not self.use_distributed or self.process_index == process_index, function)

    def on_local_process(self, function: F | None = None, local_process_index: int = 0) -> Any:
        """Decorate a function so that it runs on one rank of each node; a process alone runs it in any case."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only_if(
            lambda: not self.use_distributed or self.local_process_index == local_process_index, function
        )


def stated_waits(resolved: Resolved) -> dict[str, Any]:
    """Return the bounds of waits that are configured, for `init_process`; the others leave a group as it is."""
    config = resolved.config
    options = {"timeout_seconds": ["timeout_seconds"], "hang": [f"hang.{item.name}" for item in fields(HangConfig)]}
    return {
        name: getattr(config, name)
        for name, paths in options.items()
        if any(resolved.source(path).kind is not SourceKind.DEFAULT for path in paths)
    }


def _share_attributes(state: Any) -> None:
    """Have the next instances of its class show the attributes of a state."""
    # In a dict of their own: Python 3.13.0 keeps attributes within the instance, and its garbage collector clears them
    # with that one, though the dict that shows them is another's by then: a rank lost its `process.rank` so.
    state.__dict__ = type(state)._shared_state = dict(vars(state))


class PartialState(ProcessView):
    """This process's rank and device, and the calls that need only those; picklable, its values only.

    Joins the job when it is made, unless a context is given. All of one job share their attributes.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    """The attributes of the state made last; empty where there is none."""

    def __init__(
        self,
        cpu: bool | None = None,
        *,
        process: ProcessContext | None = None,
        distributed_type: DistributedType | None = None,
        timeout_seconds: float | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Collective when a launcher started several processes and none has joined yet.

        Behind `end_training()`, one without arguments joins nothing, and shows the job that was left.

        Args:
            cpu: run on the CPU; when None, `ACCELERATE_USE_CPU` and the launcher's options decide.
            timeout_seconds: bound of a collective, also given as `timeout`; when None, the launcher's options decide.
            backend: of the process group, "gloo" for instance; None chooses one for the device.

        Raises:
            ConfigError: the group that is joined has another backend.
        """
        resolved = None
        if process is None:
            if timeout is not None:
                timeout_seconds = timeout.total_seconds()
            resolved = _resolve("PartialState", {"use_cpu": cpu, "timeout_seconds": timeout_seconds})
            # Not anew where this rank has left the job: it may ask alone, and the others have ended perhaps.
            is_bare = cpu is None and timeout_seconds is None and backend is None
            process = (find_left_process() if is_bare else None) or _join(resolved, backend)
        if type(self) is PartialState and self._shared_state.get("process") == process:
            self.__dict__ = self._shared_state
            return
        self._set_process(process, distributed_type)
        self.debug = resolved is not None and resolved.config.debug
        """Whether collectives that are called as functions compare shapes over the ranks before any data moves."""
        _share_attributes(self)

    def _set_process(self, process: ProcessContext, distributed_type: DistributedType | None) -> None:
        self.process = process
        if distributed_type is None:
            distributed_type = DistributedType.of("MULTI" if process.is_distributed else "NO", process.device)
        self.distributed_type = distributed_type

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name != "__setstate__" and not self.__dict__ and name in {*dir(type(self)), *_STATE_NAMES}:
            raise AttributeError(
                f"`{kind}` object has no attribute `{name}`. This happens if `{kind}._reset_state()` was called and an "
                "`Accelerator` or `PartialState` was not reinitialized"
            )
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        context = self.process
        backend = f"  Backend: {context.backend}" if context.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {context.world_size}\nProcess index: {context.rank}\n"
            f"Local process index: {context.local_rank}\nDevice: {context.device}\n"
        )

    @property
    def default_device(self) -> torch.device:
        """The kind of this process's device."""
        return torch.device(self.process.device.type)

    @property
    def initialized(self) -> bool:
        """Whether the state tells of a job; false after `_reset_state`."""
        return bool(self.__dict__)

    def destroy_process_group(self) -> None:
        """Leave the process group."""
        sys.stdout.flush()
        destroy_process_group()

    @staticmethod
    def _reset_state() -> None:
        """Forget that this process has a state; tests of other libraries begin with it. A process group stays."""
        PartialState._shared_state.clear()
        PartialState._shared_state = {}
        forget_process()


def _resolve(name: str, given: dict[str, Any]) -> Resolved:
    """Return the options of a state that is made on its own; those that are None come from launcher and variables."""
    explicit = {path: value for path, value in given.items() if value is not None}
    return resolve(explicit=explicit, environ=read_environment(), explicit_name=name)


def _join(resolved: Resolved, backend: str | None = None) -> ProcessContext:
    return init_process(read_environment(), use_cpu=resolved.config.use_cpu, backend=backend, **stated_waits(resolved))


_living: weakref.WeakSet[AcceleratorState] = weakref.WeakSet()


def forget_states() -> None:
    """Let a process that is a copy of another have no state yet."""
    AcceleratorState._shared_state = {}
    GradientState._shared_state = {}
    PartialState._reset_state()


def has_accelerator() -> bool:
    """Return whether an Accelerator lives in this process; a state outlives it."""
    return bool(_living)


def is_initialized() -> bool:
    """Return whether an `AcceleratorState` exists, of an Accelerator or on its own."""
    return bool(AcceleratorState._shared_state)


class AcceleratorState(PartialState):
    """A PartialState with the settings of an Accelerator. One per Accelerator; nothing is shared.

    `AcceleratorState()` shows the one of the Accelerator made last in this process, also when that is gone. Where there
    is none it makes a state of its own, from its arguments, the launcher's options and the variables.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool | None = None,
        *,
        process: ProcessContext | None = None,
        readers: ProcessContext | None = None,
        engine_plugins: DeepSpeedPlugins | None = None,
        take_plugin: Callable[[str], None] | None = None,
        fsdp_plugin: Any = None,
        parallelism_config: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        debug: bool = False,
    ) -> None:
        """Show the state made last, or make one, of `process` where the Accelerator gives it.

        Raises:
            ConfigError: the state made last has another precision or device than is asked for.
        """
        if process is None and self._shared_state:
            self.__dict__ = self._shared_state
            self._require(mixed_precision, cpu)
            return
        if process is not None:
            _living.add(self)
        else:
            resolved = _resolve("AcceleratorState", {"mixed_precision": mixed_precision, "use_cpu": cpu})
            process, mixed_precision = _join(resolved), str(resolved.config.mixed_precision)
            debug = resolved.config.debug
        self._set_process(process, None)
        self.readers = readers or process
        self.debug = debug
        self.mixed_precision = mixed_precision or "no"
        self.take_facts(self.distributed_type, fsdp_plugin)
        self._engine_plugins = engine_plugins or DeepSpeedPlugins()
        # A state outlives its Accelerator, which holds models.
        self._take_plugin: Callable[[], Any] | None = take_plugin and weakref.WeakMethod(take_plugin)
        self.parallelism_config = parallelism_config
        self.dynamo_plugin = dynamo_plugin or TorchDynamoPlugin.of(CompileConfig())
        """How prepared models are compiled, with the backend in capitals, as a `DynamoBackend` is."""
        _share_attributes(self)

    @property
    def _reader(self) -> ProcessContext:
        return self.readers

    def take_facts(self, distributed_type: DistributedType, fsdp_plugin: Any) -> None:
        """Show the facts of the strategy in force, of which an Accelerator tells."""
        self.distributed_type = distributed_type
        self.fsdp_plugin = fsdp_plugin
        self.is_fsdp2 = distributed_type == DistributedType.FSDP  # FSDP1 is not offered

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"

    def _require(self, mixed_precision: str | None, cpu: bool | None) -> None:
        if mixed_precision is not None and mixed_precision != self.mixed_precision:
            raise ConfigError(
                f"AcceleratorState already initialized with mixed_precision={self.mixed_precision!r}, and "
                f"{mixed_precision!r} is asked for; pass it to the Accelerator, or where the state is made first"
            )
        if cpu and self.device.type != "cpu":
            raise ConfigError(
                f"AcceleratorState already initialized on {self.device}, and cpu=True is asked for; pass it to the "
                "Accelerator, or where the state is made first"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_take_plugin": None}  # a method of the Accelerator, which does not come along

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the state made last: its attributes are gone, also for those who hold it."""
        AcceleratorState._shared_state.clear()
        AcceleratorState._shared_state = {}
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def saves_shards(self) -> bool:
        """Whether a Trainer's checkpoints have the optimizer's state in shards, of a strategy that has any."""
        return self.fsdp_plugin is not None and self.fsdp_plugin.saves_shards

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed plugin in use; None under other strategies."""
        return self._engine_plugins.current

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedPlugin] | None:
        """All DeepSpeed plugins, by name; None under other strategies."""
        return self._engine_plugins.plugins or None

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return a DeepSpeed plugin by its name; a ConfigError where there is none."""
        return self._engine_plugins.require(name)

    def select_deepspeed_plugin(self, name: str) -> None:
        """Build and prepare models with another of the plugins from now on; see `get_deepspeed_plugin`."""
        self._engine_plugins.require(name)
        take_plugin = self._take_plugin and self._take_plugin()
        if take_plugin is None:
            raise ConfigError(
                f"select_deepspeed_plugin({name!r}) was called on the state of an Accelerator that is gone; keep the "
                "Accelerator that has the plugins"
            )
        take_plugin(name)


@dataclass(slots=True, eq=False)
class _OpenPass:
    """A pass over a prepared loader that has begun and has not ended, with the micro-batches trained meanwhile."""

    loader: PreparedDataLoader
    num_taken: int = 0
    """Batches that it had given when the last micro-batch began."""
    num_in_step: int = 0
    """Micro-batches for which it has given one batch each; -1 once it has given another number for one."""
    is_aside: bool = False
    """Whether a micro-batch was another loader's, until this one gives its next batch."""

    @property
    def has_moved(self) -> bool:
        """Whether it has given a batch since the last micro-batch began."""
        return self.loader.num_given != self.num_taken

    def take(self) -> None:
        """Count a micro-batch."""
        num_given = self.loader.num_given
        is_one = self.num_in_step >= 0 and num_given == self.num_taken + 1
        self.num_taken, self.num_in_step = num_given, self.num_in_step + 1 if is_one else -1


class GradientState:
    """The step that an Accelerator is in: whether gradients are exchanged, and the position of its loaders.

    `GradientState()` shows the one of the Accelerator made last in this process, also when that is gone; in a process
    without any, a state of its own that exchanges with each micro-batch.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    initialized = True
    """A state of its own is made where there is none."""
    adjust_scheduler = True
    """A schedule steps once per update, whatever the number of micro-batches."""
    is_xla_gradients_synced = False

    def __init__(
        self, plugin_kwargs: dict[str, Any] | None = None, num_steps: int = 1, sync_with_dataloader: bool = True
    ) -> None:
        if plugin_kwargs is None and self._shared_state:
            self.__dict__ = self._shared_state
            return
        _share_attributes(self)
        self.plugin_kwargs = plugin_kwargs or {}
        """Options that the user set of the accumulation plugin, by its field names."""
        self.num_steps = num_steps
        """Micro-batches of a full accumulation window."""
        self.sync_with_dataloader = sync_with_dataloader
        """Whether the last batch of a loader ends a window."""
        self.sync_gradients = True
        self.own_rows: BatchRows | None = None
        """Rows of every rank in the micro-batch that a Trainer trains, whose loader is ahead of it; None elsewhere."""
        self._passes: list[_OpenPass] = []

    @staticmethod
    def _reset_state() -> None:
        """Let the next `GradientState()` be a new one. That of an Accelerator goes on: its loop reads it."""
        GradientState._shared_state = {}

    @property
    def loaders(self) -> list[PreparedDataLoader]:
        """Prepared loaders that are being iterated, the active one last: the innermost, or that of a micro-batch."""
        if any(each.is_aside for each in self._passes):
            resumed = [each for each in self._passes if each.is_aside and each.has_moved]
            for each in resumed:
                each.is_aside = False
                self._passes.remove(each)
            self._passes += resumed
        return [each.loader for each in self._passes]

    @property
    def dataloader_references(self) -> list[PreparedDataLoader | None]:
        """None and the loaders that are being iterated, the active one last."""
        return [None, *self.loaders]

    @property
    def active_dataloader(self) -> PreparedDataLoader | None:
        """The last of `loaders`; None outside of loops."""
        # Each update asks. Of several, some may have been left.
        return self._passes[0].loader if len(self._passes) == 1 else next(reversed(self.loaders), None)

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(self._passes)

    @property
    def rows(self) -> BatchRows | None:
        """Rows of every rank in the active loader's current step; None outside of loops."""
        if self.own_rows is not None:
            return self.own_rows
        loader = self.active_dataloader
        return None if loader is None else loader.rows

    def rows_over(self, num_ranks: int) -> BatchRows | None:
        """Return the rows of the current step where the active loader is sharded over `num_ranks`, else None."""
        rows = self.rows
        return rows if rows is not None and len(rows.rows) == num_ranks else None

    def loss_weight(self, process: ProcessContext) -> float:
        """Return the factor of this rank's mean loss that makes the mean over ranks the mean over all samples."""
        rows = self.rows_over(process.world_size)
        return 1.0 if rows is None else rows.weight(process.rank)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader's current batch is its last."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Valid rows of the active loader's last global batch when it holds padding; -1 when it holds none."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    def begin_micro_batch(self) -> list[PreparedDataLoader]:
        """Note that a micro-batch begins, and return the loaders whose end is that of its window.

        That is the innermost one, and one around it that has given one batch for each micro-batch: a loop within it
        would have taken several, so a pass within it may have been left by `break`, which ends it only where nobody
        holds its iterator. One that has given nothing since the last micro-batch has been left, and is active no more.
        """
        if len(self._passes) < 2:
            for each in self._passes:
                each.take()
            return [each.loader for each in self._passes]
        loaders = self.loaders[-1:]
        innermost, has_moved = self._passes[-1], self._passes[-1].has_moved
        for each in self._passes:
            each.take()
        outer = next((each for each in self._passes if each.num_in_step > 1), innermost)
        if outer is innermost or innermost.num_in_step > 1:
            return loaders
        if has_moved:
            return [outer.loader, *loaders]
        self._passes.remove(outer)
        self._passes.append(outer)
        innermost.is_aside, outer.is_aside = True, False
        return [outer.loader]

    def begin(self, loader: PreparedDataLoader) -> None:
        """A loader's iteration begins."""
        self._passes.append(_OpenPass(loader))

    def end(self, loader: PreparedDataLoader) -> None:
        """A loader's iteration ends, by exhaustion or because its loop was left."""
        for position in range(len(self._passes) - 1, -1, -1):
            if self._passes[position].loader is loader:  # the innermost pass: a loader may be iterated within itself
                del self._passes[position]
                return

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients


# --- states of accelerate, where it is imported -----------------------------------------------------------------------

# accelerate is a dependency of TRL and sentence-transformers. Their Trainers call functions of it that look up rank,
# device and engine in its global states (`get_logger`, `gather_object`, `broadcast_object_list`, `set_seed`,
# `PartialState().main_process_first()`), and its own TrainingArguments and Accelerator, which would make those states,
# are not in use. It is not imported here.


def share_process(state: PartialState, *, keep: bool = False) -> None:
    """Have an imported accelerate's `PartialState()` show this process; states of another device go unless `keep`."""
    module = _imported_states()
    if module is None:
        return
    shown, described = module.PartialState._shared_state, _describe_process(module, state)
    is_same = shown and all(shown.get(name) == described[name] for name in ("device", "process_index", "num_processes"))
    if is_same or (shown and keep):
        return
    # It has a copy of what PartialState shows: of a device and a rank that are no more.
    module.AcceleratorState._shared_state.clear()
    shown.clear()
    shown.update(described)


def share_accelerator(state: AcceleratorState) -> None:
    """Have `accelerate.AcceleratorState()` show the settings of an Accelerator, and of the process it runs in."""
    module = _imported_states()
    if module is None:
        return
    process = _describe_process(module, state)
    settings = {
        "_mixed_precision": state.mixed_precision,
        "deepspeed_plugins": state.deepspeed_plugin,
        "fsdp_plugin": state.fsdp_plugin,
        "parallelism_config": state.parallelism_config,
        **dict.fromkeys(("device_mesh", "dynamo_plugin", "torch_tp_plugin")),
    }
    # Into the dictionaries that all instances share: a constructor would choose device and process group itself.
    for shown, content in ((module.PartialState, process), (module.AcceleratorState, process | settings)):
        shown._shared_state.clear()
        shown._shared_state.update(content)


def _imported_states() -> Any:
    """Return accelerate's module of states; None where it is not imported, or where its name stands for ours."""
    module = sys.modules.get("accelerate.state")
    # Where `accelerate` means this package, what is written would take the place of our own attributes.
    return None if getattr(module, "PartialState", PartialState) is PartialState else module


def _describe_process(module: Any, state: PartialState) -> dict[str, Any]:
    return {
        "_cpu": state.device.type == "cpu",
        "backend": state.backend,
        "debug": False,
        "device": state.device,
        "distributed_type": module.DistributedType(state.distributed_type.value),
        "fork_launched": False,
        "local_process_index": state.local_process_index,
        "num_processes": state.num_processes,
        "process_index": state.process_index,
    }
