"""The facade that a training loop drives. Composes the rooms below it, and holds no engine's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_trainer import logging
from accel_trainer.accumulation import AccumulationWindow
from accel_trainer.config import Resolved
from accel_trainer.data.loader import PreparedDataLoader, prepare_data_loader
from accel_trainer.data.loader import skip_first_batches as skip_loader_batches
from accel_trainer.errors import ConfigError
from accel_trainer.exchange import AcceleratorExchange
from accel_trainer.optimizer import AcceleratedOptimizer
from accel_trainer.options import AcceleratorOptions, AcceleratorSettings, build_strategy, resolve_options
from accel_trainer.plugins import ProjectConfiguration, TorchDynamoPlugin
from accel_trainer.precision import build_precision, remove_autocast
from accel_trainer.reporting import AcceleratorReporting, TrackerChoice, choose_trackers
from accel_trainer.runtime import collectives
from accel_trainer.runtime.memory import register_holder
from accel_trainer.runtime.process import ProcessContext, init_process, read_environment
from accel_trainer.runtime.rng import check_rng_types, separate_streams, synchronize_rng
from accel_trainer.saving import AcceleratorSaving
from accel_trainer.scheduler import AcceleratedScheduler
from accel_trainer.state import AcceleratorState, DistributedType, GradientState, ProcessView, stated_timeout
from accel_trainer.stepping import AcceleratorStepping
from accel_trainer.strategies.api import TrainJob
from accel_trainer.tracking import GeneralTracker
from accel_trainer.units import PreparedUnit, find_prepared

__all__ = ["Accelerator"]

logger = logging.get_logger(__name__)


class Accelerator(
    AcceleratorStepping, AcceleratorExchange, AcceleratorSaving, AcceleratorReporting, AcceleratorSettings, ProcessView
):
    """Runs a plain PyTorch loop on one process or many, laid out as the configuration says.

    Make one as early as possible, on every rank; it joins the job that a launcher started. Two Accelerators share
    nothing but the process group.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: Any = None,
        fsdp_plugin: Any = None,
        gradient_accumulation_plugin: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        step_scheduler_with_optimizer: bool = True,
        rng_types: Sequence[str] | None = None,
        log_with: TrackerChoice | Sequence[TrackerChoice] | None = None,
        kwargs_handlers: Sequence[Any] = (),
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        strategy: str | None = None,
        config: str | Path | Mapping[str, Any] | Resolved | None = None,
    ) -> None:
        """Resolve the options, join the job, and choose the strategy. Collective.

        Every option: an argument given here wins over a launcher's flag, over the environment, over a file, over the
        default.

        Args:
            device_placement: whether models and batches are moved to this rank's device.
            mixed_precision: "no", "bf16" or "fp16".
            gradient_accumulation_steps: micro-batches per update.
            cpu: run on the CPU although an accelerator is there.
            project_dir: where states are saved; also a field of `project_config`.
            rng_types: streams of random numbers that are set to rank 0's whenever a pass over a prepared loader begins:
                "torch" (the CPU's) or a kind of device, "cuda" for instance. The order of samples needs none of them.
            log_with: trackers for `init_trackers` to open: names ("tensorboard", "wandb", "mlflow", "trackio"), "all"
                for those that are installed, or objects of one's own.
            strategy: "auto", "single", "ddp", "fsdp2" or another registered name.
            config: a configuration file (YAML or JSON), the name of a packaged one, a dict, or a resolved one.

        Raises:
            ConfigError: an option is wrong, or cannot be honoured on this device or number of processes.
            ProcessGroupError: the job cannot be joined.
        """
        environ = read_environment()
        options = AcceleratorOptions.build(
            split_batches=split_batches,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            dataloader_config=dataloader_config,
            fsdp_plugin=fsdp_plugin,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            kwargs_handlers=kwargs_handlers,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            strategy=strategy,
        )
        self.resolved = resolve_options(options, environ, config)
        self.config = self.resolved.config
        self.process: ProcessContext = init_process(
            environ,
            use_cpu=self.config.use_cpu,
            timeout_seconds=stated_timeout(self.resolved),
            backend=options.backend,
        )
        self._options = options
        self.strategy = build_strategy(self.resolved, self.process)
        self.precision = build_precision(
            self.config.mixed_precision,
            self.process.device,
            origin=self.resolved.describe("mixed_precision"),
            output_dtype=self.config.output_dtype,
            autocast=options.autocast,
        )
        self.scaler = options.build_scaler(self.process.device) if self.precision.loss_scaling else None
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = check_rng_types(rng_types or (), self.process.device)
        self.project_configuration = project_config or ProjectConfiguration()
        self.project_configuration.set_directories(project_dir)
        self.log_with = choose_trackers(log_with, self.logging_dir)
        self.trackers: list[GeneralTracker] = []
        self.state = AcceleratorState(
            process=self.process,
            distributed_type=DistributedType.of(self.strategy.capabilities.distributed_type, self.process.device),
            mixed_precision=str(self.config.mixed_precision),
            fsdp_plugin=options.describe_fsdp(self.resolved) if self.strategy.capabilities.shards_parameters else None,
        )
        self.gradient_state = GradientState(options.plugin_kwargs, self.config.accumulation.num_steps)
        self._prepared: list[PreparedUnit] = []
        self._current: list[PreparedUnit] = []
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[DataLoader] = []
        self._custom_objects: list[Any] = []
        self._last_grad_norm = torch.tensor(float("nan"))
        self._data_seed: int | None = None
        register_holder(self)
        for note in self.resolved.notes:
            logger.info(note)
        if self.strategy.capabilities.shards_parameters and self.process.device.type == "cpu":
            # A warning, so that it is seen: users who asked for FSDP usually expect GPUs.
            logger.warning("no accelerator is used: the model is sharded over %d CPU processes", self.num_processes)

    # --- where this process stands ---------------------------------------------------------------------------------

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of distributed setup; FSDP stays FSDP on the CPU."""
        return self.state.distributed_type

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether fp16 overflow skipped the last step of any optimizer."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    # --- preparing -------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Lay out models, optimizers, schedulers and loaders for this job; return them in the order they came.

        Collective: every rank calls it with the same objects. Other objects come back as they are, prepared ones too.

        Args:
            device_placement: one flag per object; false leaves a model or a loader's batches where they are.

        Raises:
            ConfigError: an object cannot be laid out as configured; nothing has been changed then.
        """
        placements = list(device_placement) if device_placement is not None else [self.device_placement] * len(objects)
        if len(placements) != len(objects):
            raise ConfigError(
                f"device_placement has {len(placements)} flags for {len(objects)} objects; give one for each"
            )
        models = [item for item in objects if isinstance(item, nn.Module) and self._needs_layout(item)]
        optimizers = [
            item for item in objects if isinstance(item, Optimizer) and not isinstance(item, AcceleratedOptimizer)
        ]
        pairs = self._pair(models, optimizers)
        results: dict[int, Any] = {}
        for item, place in zip(objects, placements, strict=True):
            if isinstance(item, nn.Module) and id(item) not in results:
                results[id(item)] = self._prepare_model(item, pairs.get(id(item)), place)
        for item in objects:
            if isinstance(item, Optimizer):
                results[id(item)] = self.prepare_optimizer(item)
        for item, place in zip(objects, placements, strict=True):
            if isinstance(item, DataLoader):
                results[id(item)] = self.prepare_data_loader(item, device_placement=place)
            elif isinstance(item, LRScheduler):
                results[id(item)] = self.prepare_scheduler(item)
        prepared = tuple(results.get(id(item), item) for item in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def _pair(self, models: list[nn.Module], optimizers: list[Optimizer]) -> dict[int, Optimizer]:
        """Find the model of each optimizer by its parameters; those of models prepared earlier are bound later."""
        pairs: dict[int, Optimizer] = {}
        for optimizer in optimizers:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            owners = [model for model in models if any(id(p) in own for p in model.parameters())]
            if len(owners) > 1 or (owners and id(owners[0]) in pairs):
                names = ", ".join(type(model).__name__ for model in owners)
                raise ConfigError(
                    f"{type(optimizer).__name__} and {names} do not pair one to one; give each model one optimizer of "
                    "its own, with a parameter group for each part that needs other options"
                )
            if owners:
                pairs[id(owners[0])] = optimizer
        return pairs

    def _needs_layout(self, model: nn.Module) -> bool:
        found = find_prepared(self._prepared, model)
        return found is None or found.evaluation_only

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Lay out one model. Collective. An optimizer prepared afterwards is bound to it.

        Args:
            evaluation_mode: no gradients are needed, so a strategy may leave out what exchanges them.
        """
        place = self.device_placement if device_placement is None else device_placement
        return self._prepare_model(model, None, place, evaluation_mode)

    def _prepare_model(
        self, model: nn.Module, optimizer: Optimizer | None, place: bool, evaluation_mode: bool = False
    ) -> nn.Module:
        found = find_prepared(self._prepared, model)
        if found is not None and (evaluation_mode or not self._needs_layout(model)):
            return found.unit.model
        if found is not None:
            self._forget(found)
        job = TrainJob(
            model=model,
            optimizer=optimizer,
            resolved=self.resolved,
            device_placement=place,
            evaluation_only=evaluation_mode,
            wrap_policy=self._options.wrap_policy,
            scaler=self.scaler,
            ddp_options=self._options.ddp_options,
            compile_options=self._options.compile_options,
        )
        unit = self.strategy.prepare(job, self.precision, self.process)
        accumulation = self.config.accumulation
        window = AccumulationWindow(
            num_steps=accumulation.num_steps,
            sync_with_dataloader=accumulation.sync_with_dataloader,
            sync_each_batch=accumulation.sync_each_batch,
        )
        # A sharded unit serves training as well as evaluation; replicas without gradient exchange do not.
        evaluation_only = evaluation_mode and not self.strategy.capabilities.shards_parameters
        self._prepared.append(PreparedUnit(unit, window, evaluation_only))
        self._models.append(unit.model)
        separate_streams(self.process)
        return unit.model

    def _forget(self, prepared: PreparedUnit) -> None:
        self._prepared.remove(prepared)
        self._models = [model for model in self._models if model is not prepared.unit.model]

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap an optimizer whose model is prepared.

        Raises:
            ConfigError: no prepared model holds its parameters.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        prepared = find_prepared(self._prepared, optimizer) or self._bind(optimizer)
        wrapped = next((w for w in self._optimizers if w._prepared is prepared), None)
        if wrapped is None:
            wrapped = AcceleratedOptimizer(optimizer, prepared)
            self._optimizers.append(wrapped)
            for scheduler in self._schedulers:
                scheduler.follow(wrapped)
        return wrapped

    def _bind(self, optimizer: Optimizer) -> PreparedUnit:
        problem: ConfigError | None = None
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for prepared in self._prepared:
            has_another = prepared.unit.optimizer is not None
            if not has_another or any(id(p) in own for p in prepared.unit.module.parameters()):
                try:
                    prepared.unit.bind_optimizer(optimizer)
                except ConfigError as error:
                    problem = error
                else:
                    return prepared
        if problem is not None:
            raise problem
        raise ConfigError(
            f"{type(optimizer).__name__} was prepared without its model; pass both to one prepare() call, "
            "or prepare the model first"
        )

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Wrap a scheduler so that it steps once per step of its optimizer."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        inner = scheduler.optimizer
        inner = inner.optimizer if isinstance(inner, AcceleratedOptimizer) else inner
        optimizers = [optimizer for optimizer in self._optimizers if optimizer.optimizer is inner]
        wrapped = AcceleratedScheduler(scheduler, optimizers, self.step_scheduler_with_optimizer)
        self._schedulers.append(wrapped)
        return wrapped

    def prepare_data_loader(self, data_loader: DataLoader, device_placement: bool | None = None) -> PreparedDataLoader:
        """Return a loader that yields this rank's share, on this rank's device. Collective for the first loader."""
        place = self.device_placement if device_placement is None else device_placement
        prepared = prepare_data_loader(
            data_loader,
            process=self.process,
            config=self.config.data,
            device=self.device if place else None,
            seed=self._agreed_data_seed(),
            on_begin=self._begin_pass,
            on_end=self.gradient_state.end,
        )
        if not any(prepared is known for known in self._dataloaders):
            self._dataloaders.append(prepared)
        return prepared

    def _begin_pass(self, loader: PreparedDataLoader) -> None:
        """A pass over a loader begins; collective with `rng_types`."""
        separate_streams(self.process)
        if self.rng_types:
            synchronize_rng(self.rng_types, self.process)
        self.gradient_state.begin(loader)

    def _agreed_data_seed(self) -> int:
        """Return the seed of shuffling: configured, else rank 0's torch seed, so that all ranks draw the same order."""
        if self.config.data.data_seed is not None:
            return self.config.data.data_seed
        if self._data_seed is None:
            self._data_seed = collectives.broadcast_object_list([torch.initial_seed()], self.process)[0]
        return self._data_seed

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int = 0) -> PreparedDataLoader:
        """Return a loader over the same data that begins after `num_batches` batches of this rank."""
        return skip_loader_batches(dataloader, num_batches)

    # --- the way out -----------------------------------------------------------------------------------------------

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own model. A model that was never wrapped comes back as it is.

        Args:
            keep_fp32_wrapper: false also takes off mixed precision.
        """
        found = find_prepared(self._prepared, model)
        wrapped = isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        module: Any = found.unit.module if found is not None else model.module if wrapped else model
        if not keep_torch_compile:
            module = getattr(module, "_orig_mod", module)
        if not keep_fp32_wrapper:
            remove_autocast(module)
        unwrapped: nn.Module = module
        return unwrapped

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Let go of everything prepared; return as many None as objects were given, to assign over them."""
        for held in (
            self._prepared,
            self._current,
            self._models,
            self._optimizers,
            self._schedulers,
            self._dataloaders,
        ):
            held.clear()
        self._current = []
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        return tuple(None for _ in objects)

    def clear(self, *objects: Any) -> tuple[None, ...]:
        """Same as `free_memory`."""
        return self.free_memory(*objects)
