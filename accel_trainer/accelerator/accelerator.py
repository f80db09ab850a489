"""The Accelerator: its options, and how it joins a job and frees it. Holds no engine's code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from accel_trainer import logging
from accel_trainer.accelerator.accelerated_optimizer import ReplicaCheck
from accel_trainer.accelerator.checkpointing import SAVED_STATES, AcceleratorCheckpointing, RegisteredState
from accel_trainer.accelerator.gathering import AcceleratorGathering
from accel_trainer.accelerator.lost_ranks import LostRanks
from accel_trainer.accelerator.options import AcceleratorOptions, build_strategy, keep_global_batch, resolve_options
from accel_trainer.accelerator.prepared import Prepared, extract_model_from_parallel
from accel_trainer.accelerator.preparing import AcceleratorPreparing
from accel_trainer.accelerator.settings import PassStart
from accel_trainer.accelerator.shared_state import (
    AcceleratorState,
    DistributedType,
    Forwarded,
    GradientState,
    stated_waits,
)
from accel_trainer.accelerator.stepping import AcceleratorStepping
from accel_trainer.accelerator.trackers import AcceleratorTracking, TrackerChoice, Trackers
from accel_trainer.checkpoint.checkpointer import Checkpointer
from accel_trainer.config import MixedPrecision, Resolved, SchedulerSteps, SourceKind
from accel_trainer.config.parallel import axis_sizes
from accel_trainer.config.schema import ParallelConfig
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.deepspeed_plugin import DeepSpeedPlugin, DeepSpeedPlugins
from accel_trainer.plugins.fsdp_plugin import FSDPDescription, FullyShardedDataParallelPlugin
from accel_trainer.plugins.kwargs import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel_trainer.plugins.parallelism import ParallelismConfig
from accel_trainer.precision import build_precision
from accel_trainer.runtime.memory import register_memory_owner
from accel_trainer.runtime.nonfinite import NonFiniteGuard
from accel_trainer.runtime.own_watch import current_watch, sample_phases
from accel_trainer.runtime.process import current_process, init_process, read_environment
from accel_trainer.runtime.rng import check_rng_types, share_streams
from accel_trainer.runtime.slow_ranks import SlowRanks
from accel_trainer.strategies.gradients import LossScale
from accel_trainer.strategies.local_replicas import OuterOptimizer
from accel_trainer.techniques.meters import StepMeters
from accel_trainer.unsupported import explain_options

logger = logging.get_logger(__name__)


class Accelerator(
    AcceleratorPreparing,
    AcceleratorStepping,
    AcceleratorGathering,
    AcceleratorCheckpointing,
    AcceleratorTracking,
):
    """Runs a plain PyTorch loop on one process or many, with the strategy of the configuration.

    Made first, on every rank; it joins the job that a launcher started. Two share nothing but the process group.
    """

    @explain_options
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: Literal["no", "bf16", "fp16", "fp8"] | MixedPrecision | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: None = None,
        megatron_lm_plugin: None = None,
        rng_types: Sequence[str] | None = None,
        log_with: TrackerChoice | Sequence[TrackerChoice] | None = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        strategy: str | None = None,
        compat: Literal["none", "accelerate"] | None = None,
        config: str | Path | Mapping[str, Any] | Resolved | None = None,
    ) -> None:
        """Resolve the options, join the job, and choose the strategy. Collective.

        Every option: an argument given here wins over a launcher's flag, over the environment, over a file, over the
        default. `torch_tp_plugin` and `megatron_lm_plugin` are not offered; None is taken, at their place.

        Args:
            device_placement: whether models and batches are moved to this rank's device.
            gradient_accumulation_steps: micro-batches per update.
            cpu: run on the CPU although an accelerator is there.
            deepspeed_plugins: by name; the first is in use.
            rng_types: streams of random numbers that are set to rank 0's whenever a pass over a prepared loader begins:
                "torch" (the CPU's) or a kind of device, "cuda" for instance. The order of samples needs none of them.
            log_with: trackers for `init_trackers` to open: names ("tensorboard", "wandb", "mlflow", "trackio"), "all"
                for those that are installed, or objects of one's own.
            strategy: "auto", "single", "ddp", "fsdp2" or another registered name.
            compat: "accelerate" restores its behaviour where ours gives other numbers; see docs/migration.md.
            config: a configuration file (YAML or JSON), the name of a packaged one, a dict, or a resolved one.

        Raises:
            ConfigError: an option is wrong, or cannot be honoured on this device or number of processes.
            ProcessGroupError: the job cannot be joined.
        """
        self._options = AcceleratorOptions.build(
            {
                "data.split_batches": split_batches,
                "mixed_precision": mixed_precision,
                "accumulation.num_steps": gradient_accumulation_steps,
                "use_cpu": cpu,
                "compile.backend": dynamo_backend,
                "strategy": strategy,
                "compat": compat,
            },
            dataloader_config=dataloader_config,
            fsdp_plugin=fsdp_plugin,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            dynamo_plugin=dynamo_plugin,
            parallelism_config=parallelism_config,
            kwargs_handlers=kwargs_handlers or (),
        )
        self._join_job(DeepSpeedPlugins.of(deepspeed_plugin, deepspeed_plugins), config)
        self.reconfigure(keep_global_batch(self.resolved, self.process.world_size))
        self.precision = build_precision(
            self.config.mixed_precision,
            self.process.device,
            origin=self.resolved.describe("mixed_precision"),
            output_dtype=self.config.output_dtype,
            autocast=self._options.autocast,
            float8=self._options.float8_recipe(self.config),
        )
        scaler_options = self._options.scaler_options
        is_scaled, kind = self.precision.loss_scaling, self.process.device.type
        self._loss_scale = LossScale(torch.amp.GradScaler(kind, **scaler_options)) if is_scaled else None
        self.device_placement = device_placement
        self.dataloader_config = DataLoaderConfiguration(**dataclasses.asdict(self.config.data))
        self._check_scheduler_steps(step_scheduler_with_optimizer)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.project_configuration = project_config or ProjectConfiguration()
        self.project_configuration.set_directories(project_dir)
        self._trackers = Trackers(log_with, self.project_configuration, self.process)
        asked = self.config.parallel
        found = self._axis_sizes  # of which one may take the ranks that are left
        if parallelism_config is not None:
            parallelism_config.take_sizes(found)
        elif asked != ParallelConfig():
            asked = dataclasses.replace(asked, dp_replicate_size=found.dp_replicate, dp_shard_size=found.dp_shard)
            parallelism_config = ParallelismConfig.of(asked)
        self.state = AcceleratorState(
            process=self.process,
            readers=self.readers,
            mixed_precision=str(self.config.mixed_precision),
            engine_plugins=self._engine_plugins,
            take_plugin=self._use_plugin,
            parallelism_config=parallelism_config,
            dynamo_plugin=TorchDynamoPlugin.of(self.config.compile, self._options.compile_options),
            debug=self.config.debug,
        )
        accumulation = self.config.accumulation
        self.gradient_state = GradientState(
            self._options.plugin_kwargs, accumulation.num_steps, accumulation.sync_with_dataloader
        )
        self._pass_start = PassStart(
            self.process, self.readers, self.gradient_state, check_rng_types(rng_types or (), self.process.device)
        )
        self._prepared = Prepared()
        self._take_facts()
        self._checkpointer = Checkpointer(
            self.process,
            SAVED_STATES,
            store=self.config.checkpoint_uri,
            upload_mib_per_second=self.config.checkpoint_mib_per_second,
        )
        saves = self._checkpointer.metrics
        self.meters = (
            StepMeters(self.process, self.config.peak_flops, lambda: saves.stalled_seconds)
            if self.config.meters
            else None
        )
        looks_out = (current_watch() is not None or self.process.is_alone) and self.config.slow_rank_updates > 0
        self.slow_ranks = SlowRanks(sample_phases, self.config.slow_rank_updates) if looks_out else None
        self._registered = RegisteredState()
        self._last_grad_norm = torch.tensor(float("nan"))
        # find_executable_batch_size frees the models of every Accelerator before it tries a smaller batch.
        register_memory_owner(self)
        self.lost_ranks = self._prepared.lost_ranks = LostRanks.of(self)
        for note in self.resolved.notes:
            logger.info(note)

    def _take_facts(self) -> None:
        """Follow the facts of the strategy in force."""
        facts = self.strategy.capabilities
        self.state.take_facts(
            DistributedType.of(facts.distributed_type, self.process.device),
            FSDPDescription.of(self.resolved, facts, self.precision),
        )
        self.nonfinite_guard = self._prepared.guard = NonFiniteGuard.of(
            self.config, self.process, is_late=facts.builds_engine, is_sharded=facts.shards_parameters
        )
        self._take_rollbacks()
        has_replicas = not (facts.shards_parameters or facts.builds_engine)
        self._prepared.replica_check = ReplicaCheck.of(self.process, has_replicas=has_replicas)
        # Warnings, so that they are seen: users who asked for FSDP usually expect several GPUs.
        if facts.shards_parameters and self.num_processes == 1:
            logger.warning("%s on one process: nothing is sharded", self.resolved.describe("strategy"))
        elif facts.shards_parameters and self.process.device.type == "cpu":
            logger.warning("no accelerator is used: the model is sharded over %d CPU processes", self.num_processes)

    def _check_scheduler_steps(self, step_scheduler_with_optimizer: bool) -> None:
        asks_for_steps = self.resolved.source("scheduler_steps").kind is not SourceKind.COMPAT
        is_counted = asks_for_steps and self.config.scheduler_steps is SchedulerSteps.PER_PROCESS
        if is_counted and not step_scheduler_with_optimizer:
            raise ConfigError(
                f"{self.resolved.describe('scheduler_steps')} lets a schedule step once for each process in an update, "
                "and step_scheduler_with_optimizer=False whenever the loop steps it; leave one of them out"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        """Return itself: a copied object that holds an Accelerator takes part in the same job."""
        return self

    def _join_job(self, plugins: DeepSpeedPlugins, config: str | Path | Mapping[str, Any] | Resolved | None) -> None:
        """Resolve the configuration with each of the plugins, join the job, and start its strategy. Collective."""
        environ = read_environment()

        def resolve_with(plugin: DeepSpeedPlugin | None) -> Resolved:
            return resolve_options(self._options.with_plugin(plugin), environ, config)

        self.resolved = resolve_with(plugins.first)
        self.process = init_process(
            environ,
            use_cpu=self.resolved.config.use_cpu,
            backend=self._options.backend,
            **stated_waits(self.resolved),
        )
        self.strategy = build_strategy(self.resolved, self.process)
        self._options.check(self.resolved, self.strategy.capabilities)
        plugins.resolve(self.resolved, self.strategy.capabilities, resolve_with)
        self._engine_plugins = plugins
        self._use_plugin(next(iter(plugins.plugins), None))
        self.process = current_process()  # the strategy may have given a process alone a group
        self._axis_sizes = axis_sizes(
            self.config, self.resolved.describe, self.process.world_size, self.process.num_nodes
        )
        self.readers = self.strategy.readers(self.resolved, self.process)
        share_streams(self.process, self.readers)

    def _use_plugin(self, name: str | None) -> None:
        """Start the strategy as a plugin says, or as the configuration does, and prepare models by that from now on."""
        resolved = self.resolved if name is None else self._engine_plugins.resolved[name]
        started = self.strategy.start(resolved, self.process)
        self.resolved = self._engine_plugins.use(name, started, self.strategy)
        self.config = self.resolved.config

    def reconfigure(self, resolved: Resolved) -> None:
        """Prepare models by another configuration of the same strategy and precision: an engine's own, known late."""
        self.resolved, self.config = resolved, resolved.config

    def is_prepared(self, model: nn.Module) -> bool:
        """Whether this Accelerator has prepared a model, and not let go of it since."""
        return self._prepared.find(model) is not None

    distributed_type = Forwarded[DistributedType]("state.distributed_type")
    """Kind of distributed setup; FSDP stays FSDP on the CPU."""

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether fp16 overflow skipped the last step of any optimizer."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    def whole_models(self) -> AbstractContextManager[None]:
        """Context in which a rank alone builds models of transformers unsharded, under ZeRO-3 too. Not collective."""
        return self.strategy.building(in_pieces=False)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own model, without `keep_fp32_wrapper` also without mixed precision."""
        found = self._prepared.find(model)
        return extract_model_from_parallel(
            model if found is None else found.unit.module, keep_fp32_wrapper, keep_torch_compile
        )

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Release everything prepared; return a None for each object. Collective: an engine is taken off its model."""
        self._prepared.clear()
        # Those of DiLoCo hold copies of the weights, and the next model's registers under the same name.
        self._registered.objects = {
            name: each for name, each in self._registered.objects.items() if not isinstance(each, OuterOptimizer)
        }
        if self.meters is not None:
            self.meters.reset()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        return tuple(None for _ in objects)

    clear = free_memory
