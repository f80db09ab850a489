"""State and settings of an Accelerator that several groups of its methods read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accel_trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer
from accel_trainer.accelerator.accelerated_scheduler import AcceleratedScheduler
from accel_trainer.accelerator.lost_ranks import LostRanks
from accel_trainer.accelerator.options import AcceleratorOptions
from accel_trainer.accelerator.prepared import Prepared
from accel_trainer.accelerator.shared_state import AcceleratorState, Forwarded, GradientState, ProcessView
from accel_trainer.checkpoint.checkpointer import Checkpointer
from accel_trainer.config import Resolved, RunConfig
from accel_trainer.config.parallel import AxisSizes
from accel_trainer.config.schema import DataConfig
from accel_trainer.data.loader import PreparedDataLoader
from accel_trainer.plugins.deepspeed_plugin import DeepSpeedPlugins
from accel_trainer.plugins.kwargs import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from accel_trainer.precision import PrecisionPolicy
from accel_trainer.runtime.nonfinite import NonFiniteGuard
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import check_rng_types, seed_own_streams, synchronize_rng
from accel_trainer.runtime.slow_ranks import SlowRanks
from accel_trainer.strategies.api import Strategy
from accel_trainer.strategies.gradients import LossScale
from accel_trainer.techniques.meters import StepMeters

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class PassStart:
    """The beginning of each pass over a prepared loader, which would make a cycle if it held its Accelerator."""

    process: ProcessContext
    readers: ProcessContext
    gradient_state: GradientState
    rng_types: tuple[str, ...]
    has_loaded_state: bool = False
    """Whether a state was loaded, which may be within an epoch."""

    def begin(self, loader: PreparedDataLoader) -> None:
        """Begin a pass over a loader. Collective with `rng_types`."""
        seed_own_streams(self.readers)
        # A run that goes on within an epoch has its streams from the state; they were set to rank 0's when it began.
        if self.rng_types and not (self.has_loaded_state and loader.begins_within_epoch):
            synchronize_rng(self.rng_types, self.process)
        self.gradient_state.begin(loader)


class _Handler(Forwarded[T | None]):
    """The handler of a class among `kwargs_handlers`; None without one."""

    def __init__(self, kind: type[T]) -> None:
        self._read = lambda accelerator: accelerator._options.handlers.get(kind)


class AcceleratorSettings(ProcessView):
    """Attributes that `Accelerator.__init__` sets, and the configuration in force as properties; base of its mixins."""

    resolved: Resolved
    config: RunConfig
    strategy: Strategy
    readers: ProcessContext
    """This process among the ranks that read different data: all of them, but where ranks compute a batch together."""
    precision: PrecisionPolicy
    _loss_scale: LossScale | None
    """Of fp16; one for all units, since one loss may reach several models."""
    device_placement: bool
    step_scheduler_with_optimizer: bool
    has_lomo_optimizer: bool = False
    """Whether an optimizer was prepared that updates the parameters in the backward; see `lomo_backward`."""
    dataloader_config: DataLoaderConfiguration
    """Options of the loaders that are prepared from now on, the configured ones at first; TRL sets some of them."""
    project_configuration: ProjectConfiguration
    state: AcceleratorState
    gradient_state: GradientState
    _axis_sizes: AxisSizes
    nonfinite_guard: NonFiniteGuard | None
    """The look at the gradients of each update; None under fp16, whose loss scale leaves such updates out."""
    lost_ranks: LostRanks | None = None
    """The updates of a job that goes on without ranks that it loses; None for another."""
    meters: StepMeters | None
    """Counts of what is trained, which `perf` reads; None unless `meters` is set."""
    slow_ranks: SlowRanks | None
    """The look-out for a rank that the others wait for; None on one process, or with `slow_rank_updates` of 0."""
    _options: AcceleratorOptions
    _engine_plugins: DeepSpeedPlugins
    _pass_start: PassStart
    _prepared: Prepared
    _checkpointer: Checkpointer
    _take_facts: Callable[[], None]
    """Follows the facts of the strategy in force."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The scaler of fp16 losses; None in other precisions. One that is set is used by models prepared later."""
        return None if self._loss_scale is None else self._loss_scale.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._loss_scale = None if scaler is None else LossScale(scaler)
        if scaler is not None and scaler.is_enabled():
            # As under fp16: the scale leaves such updates out.
            self.nonfinite_guard = self._prepared.guard = None

    @property
    def _reader(self) -> ProcessContext:
        return self.readers

    @property
    def rng_types(self) -> tuple[str, ...]:
        """Streams of random numbers that are set to rank 0's when a pass over a prepared loader begins."""
        return self._pass_start.rng_types

    @rng_types.setter
    def rng_types(self, rng_types: Sequence[str]) -> None:
        self._pass_start.rng_types = check_rng_types(rng_types, self.process.device)

    @property
    def _data_config(self) -> DataConfig:
        return DataConfig(**vars(self.dataloader_config))

    # transformers and TRL read these four, as accelerate has them.
    _models = Forwarded[list[nn.Module]]("_prepared.models")
    _optimizers = Forwarded[list[AcceleratedOptimizer]]("_prepared.optimizers")
    _schedulers = Forwarded[list[AcceleratedScheduler]]("_prepared.schedulers")
    _dataloaders = Forwarded[list[PreparedDataLoader]]("_prepared.dataloaders")

    is_fsdp2 = Forwarded[bool]("state.is_fsdp2")
    """Whether models are sharded by FSDP2."""
    data_parallel_rank = Forwarded[int]("readers.rank")
    """This rank among those that read different data."""
    deepspeed_plugin = Forwarded[Any]("state.deepspeed_plugin")
    """The DeepSpeed plugin in use; None under other strategies."""
    parallelism_config = Forwarded[Any]("state.parallelism_config")
    """The sizes of the mesh's axes; None where none was asked for. Libraries read it."""
    project_dir = Forwarded[str | Path | None]("project_configuration.project_dir")
    """Where states are saved."""
    logging_dir = Forwarded[str | Path | None]("project_configuration.logging_dir")
    """Where logs go."""
    split_batches = Forwarded[bool]("_data_config.split_batches")
    """Whether a loader's batch is split over the ranks instead of multiplied."""
    dispatch_batches = Forwarded[bool | None]("_data_config.dispatch_batches")
    """Whether rank 0 reads for all ranks."""
    use_seedable_sampler = Forwarded[bool]("_data_config.use_seedable_sampler")
    """Whether shuffling follows seed and epoch."""
    use_stateful_dataloader = Forwarded[bool]("_data_config.use_stateful_dataloader")
    """Whether loaders go on by themselves where `load_state` finds them."""
    non_blocking = Forwarded[bool]("_data_config.non_blocking")
    """Whether batches are copied to the device without waiting."""
    pipeline_parallel_rank = 0
    """There is no pipeline parallelism."""
    is_composable_parallelism_enabled = is_fsdp2
    """FSDP2 goes together with other axes of a mesh."""

    @property
    def should_save_model(self) -> bool:
        """Whether this rank writes the files of a model: rank 0, or each node's first with `save_on_each_node`."""
        each_node = self.project_configuration.save_on_each_node
        return self.process.is_local_main if each_node else self.process.is_main

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank among those that share the shards of one model; 0 where nothing is sharded."""
        return self.readers.rank % self._axis_sizes.dp_shard if self.strategy.capabilities.shards_parameters else 0

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank among those that share the matrices of a layer; 0 without tensor parallelism."""
        return self.process.rank % self._axis_sizes.tp

    @property
    def context_parallel_rank(self) -> int:
        """This rank among those that share the tokens of a sequence; 0 without context parallelism."""
        return self.process.rank // (self._axis_sizes.tp * self._axis_sizes.sp) % self._axis_sizes.cp

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh of the `parallelism_config`; None without one. Collective when it is asked for first."""
        config = self.parallelism_config
        return None if config is None else config.get_device_mesh(self.process.device.type)

    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> AbstractContextManager[None]:
        """Context that leaves everything, `buffers` too, as it is: a prepared model shares out whole sequences."""
        return nullcontext()

    @property
    def multi_device(self) -> bool:
        """Whether every process has a replica of the model on a device of its own; a CPU is one, too."""
        return self.state.use_distributed and self.state.distributed_type.value.startswith("MULTI_")

    @property
    def fp8_backend(self) -> str:
        """The package that computes in fp8: "AO", or "NO"."""
        return "AO" if self.fp8_enabled else "NO"

    @property
    def fp8_enabled(self) -> bool:
        """Whether linear layers compute in fp8."""
        return self.precision.float8 is not None

    @property
    def has_fp8_handler(self) -> bool:
        """Whether a recipe of fp8 is among the handlers."""
        return self.ao_recipe_handler is not None

    # Always so: recipes of other packages than torchao are refused where they are given.
    fp8_recipe_handler = te_recipe_handler = msamp_recipe_handler = None
    delayed_fp8_autocast = False

    ao_recipe_handler = _Handler(AORecipeKwargs)
    autocast_handler = _Handler(AutocastKwargs)
    ddp_handler = _Handler(DistributedDataParallelKwargs)
    init_handler = _Handler(InitProcessGroupKwargs)
    profile_handler = _Handler(ProfileKwargs)
    scaler_handler = _Handler(GradScalerKwargs)

    @property
    def native_amp(self) -> bool:
        """Whether models compute in bf16, fp16 or fp8."""
        return self.mixed_precision != "no"

    @property
    def mixed_precision(self) -> str:
        """The precision in force: "no", "bf16", "fp16" or "fp8"."""
        return str(self.config.mixed_precision)

    @property
    def even_batches(self) -> bool:
        """Whether every rank gets equally many rows, padded at the end of the data; settable for later loaders."""
        return bool(self.dataloader_config.even_batches)

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches
