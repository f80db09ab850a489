"""The facade that a training loop drives. Composes the rooms below it, and holds no engine's code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_trainer import logging
from accel_trainer.accumulation import AccumulationWindow
from accel_trainer.config import Resolved
from accel_trainer.data.loader import PreparedDataLoader, prepare_data_loader
from accel_trainer.data.loader import skip_first_batches as skip_loader_batches
from accel_trainer.data.metrics import trim_gathered
from accel_trainer.errors import ConfigError
from accel_trainer.optimizer import AcceleratedOptimizer
from accel_trainer.options import AcceleratorOptions, build_strategy, resolve_options
from accel_trainer.plugins import ProjectConfiguration
from accel_trainer.precision import build_precision, remove_autocast
from accel_trainer.runtime import collectives
from accel_trainer.runtime.process import ProcessContext, init_process, read_environment
from accel_trainer.saving import AcceleratorSaving
from accel_trainer.scheduler import AcceleratedScheduler
from accel_trainer.state import AcceleratorState, DistributedType, GradientState, ProcessView
from accel_trainer.strategies.api import TrainJob, TrainUnit

__all__ = ["Accelerator", "PreparedUnit"]

logger = logging.get_logger(__name__)


@dataclass(slots=True, eq=False)
class PreparedUnit:
    """A unit with the accumulation window that it is in."""

    unit: TrainUnit
    window: AccumulationWindow
    evaluation_only: bool = False
    """Whether the unit was laid out without what exchanges gradients."""
    corrected: bool = False
    """Whether this window's gradients have been brought to the mean over what it held."""

    def finish_window(self) -> None:
        """Correct the gradients of a window that ended earlier than planned; once, before they are used."""
        factor = self.window.correction
        if factor != 1.0 and not self.corrected:
            self.unit.scale_gradients(factor)
            self.corrected = True


class _Accumulate:
    """Context of one micro-batch. A class, not a generator: it is entered on every step."""

    __slots__ = ("_accelerator", "_outer", "_prepared")

    def __init__(self, accelerator: Accelerator, prepared: list[PreparedUnit]) -> None:
        self._accelerator = accelerator
        self._prepared = prepared
        self._outer: list[PreparedUnit] = []

    def __enter__(self) -> None:
        accelerator = self._accelerator
        loader = accelerator.gradient_state.active_dataloader
        ends_data = loader is not None and loader.end_of_dataloader
        remaining = None if loader is None else loader.remaining
        for prepared in self._prepared:
            window = prepared.window
            window.advance(remaining, ends_data)
            prepared.corrected = False
            if window.num_steps > 1:
                prepared.unit.set_gradient_sync(window.exchanges_gradients)
        self._outer, accelerator._current = accelerator._current, self._prepared
        accelerator.gradient_state.sync_gradients = self._prepared[0].window.is_last

    def __exit__(self, *exception: object) -> None:
        self._accelerator._current = self._outer


class Accelerator(ProcessView, AcceleratorSaving):
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
        kwargs_handlers: Sequence[Any] = (),
        dynamo_backend: str | None = None,
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
            strategy=strategy,
        )
        self.resolved = resolve_options(options, environ, config)
        self.config = self.resolved.config
        self.process: ProcessContext = init_process(
            environ,
            use_cpu=self.config.use_cpu,
            timeout_seconds=self.config.timeout_seconds,
            backend=options.backend,
        )
        self._options = options
        self.strategy = build_strategy(self.resolved, self.process)
        self.precision = build_precision(
            self.config.mixed_precision, self.process.device, origin=self.resolved.describe("mixed_precision")
        )
        self.scaler = options.build_scaler(self.process.device) if self.precision.loss_scaling else None
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        self.state = AcceleratorState(
            process=self.process,
            distributed_type=DistributedType.of(self.strategy.capabilities.distributed_type, self.process.device),
            mixed_precision=str(self.config.mixed_precision),
            fsdp_plugin=options.describe_fsdp(self.resolved) if self.strategy.capabilities.shards_parameters else None,
        )
        self.gradient_state = GradientState(options.plugin_kwargs)
        self._prepared: list[PreparedUnit] = []
        self._current: list[PreparedUnit] = []
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[DataLoader] = []
        self._custom_objects: list[Any] = []
        self._last_grad_norm = torch.tensor(float("nan"))
        self._data_seed: int | None = None
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
    def mixed_precision(self) -> str:
        """The precision in force: "no", "bf16" or "fp16"."""
        return str(self.config.mixed_precision)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is split over the ranks instead of multiplied."""
        return self.config.data.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all ranks."""
        return self.config.data.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether every rank gets batches of the same size, padded at the end of the data."""
        return self.config.data.even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling follows seed and epoch."""
        return self.config.data.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self.config.data.non_blocking

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self.config.accumulation.num_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its accumulation window: gradients are complete, the optimizer steps."""
        return self.gradient_state.sync_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether fp16 overflow skipped the last step of any optimizer."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def project_dir(self) -> str | Path | None:
        """Where states are saved."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """Where logs go."""
        return self.project_configuration.logging_dir

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
        found = self._find(model)
        return found is None or found.evaluation_only

    def _find(self, item: Any) -> PreparedUnit | None:
        for prepared in self._prepared:
            unit = prepared.unit
            if item is unit.model or item is unit.module or (unit.optimizer is not None and item is unit.optimizer):
                return prepared
        return None

    def unit_of(self, item: nn.Module | Optimizer) -> TrainUnit:
        """Return the unit that a model or optimizer belongs to; the wrapped object and the user's own both do.

        Raises:
            ConfigError: it was not prepared by this Accelerator.
        """
        return self._prepared_of(item).unit

    def _prepared_of(self, item: Any) -> PreparedUnit:
        if isinstance(item, AcceleratedOptimizer):
            return item._prepared
        found = self._find(item)
        if found is None:
            raise ConfigError(
                f"{type(item).__name__} was not prepared by this Accelerator; pass it to prepare() and use its result"
            )
        return found

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
        found = self._find(model)
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
        prepared = self._find(optimizer) or self._bind(optimizer)
        wrapped = next((w for w in self._optimizers if w._prepared is prepared), None)
        if wrapped is None:
            wrapped = AcceleratedOptimizer(optimizer, prepared)
            self._optimizers.append(wrapped)
        return wrapped

    def _bind(self, optimizer: Optimizer) -> PreparedUnit:
        problem: ConfigError | None = None
        for prepared in self._prepared:
            if prepared.unit.optimizer is None:
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
            on_begin=self.gradient_state.begin,
            on_end=self.gradient_state.end,
        )
        if not any(prepared is known for known in self._dataloaders):
            self._dataloaders.append(prepared)
        return prepared

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

    # --- a training step -------------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Context of one micro-batch: gradients are exchanged, and the optimizer steps, on the last of a window.

        A window is `gradient_accumulation_steps` micro-batches, or what the loader still has. Without a model, all
        prepared models are meant.
        """
        prepared = [self._prepared_of(model) for model in models] if models else self._prepared
        if not prepared:
            raise ConfigError("accumulate() was called before a model was prepared; pass the model to prepare() first")
        return _Accumulate(self, prepared)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep the gradients of the backwards in this block on this rank."""
        unit = self.unit_of(model)
        unit.set_gradient_sync(False)
        try:
            yield
        finally:
            unit.set_gradient_sync(True)

    def set_gradient_sync(self, model: nn.Module, enabled: bool) -> None:
        """Say whether the next backward of `model` exchanges gradients and its optimizer may step.

        For windows made by hand; `accumulate()` does it by itself.
        """
        prepared = self._prepared_of(model)
        prepared.window.is_last = enabled
        prepared.unit.set_gradient_sync(enabled)
        self.gradient_state.sync_gradients = enabled

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of `loss`; in `accumulate()` those of a window are the mean over what it holds.

        Collective on the last micro-batch of a window. Outside of `accumulate()` the loss is taken as it is.
        """
        if self._current:
            prepared = self._current[0]
            divisor = prepared.window.divisor
            prepared.unit.backward(loss if divisor == 1 else loss / divisor, **kwargs)
        elif self._prepared:
            self._prepared[0].unit.backward(loss, **kwargs)
        else:
            raise ConfigError("backward() was called before a model was prepared; pass the model to prepare() first")

    def autocast(self) -> AbstractContextManager[Any]:
        """Context for computations outside of the model, a loss for instance, in the configured precision."""
        if self.precision.compute is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision.compute)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Bound the global gradient norm of `parameters`; return the norm before clipping.

        Acts on the last micro-batch of an accumulation window; before it, gradients are incomplete, nothing is clipped
        and the norm of the last update is returned (NaN before the first). Collective.

        Returns:
            Scalar, on the gradients' device.

        Raises:
            ConfigError: the parameters were taken before prepare() sharded them.
        """
        if not self.sync_gradients:
            return self._last_grad_norm
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = self._unit_for(given).clip_grad_norm(given, max_norm, norm_type)
        if norm is not None:
            self._last_grad_norm = norm
        return self._last_grad_norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp the gradients of `parameters` to [-clip_value, clip_value] on the last micro-batch of a window."""
        if self.sync_gradients:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._unit_for(given).clip_grad_value(given, clip_value)

    def _unit_for(self, parameters: list[Tensor]) -> TrainUnit:
        """Return the unit to clip with, and finish the windows of every unit that holds one of the parameters."""
        if not self._prepared:
            raise ConfigError("gradients were clipped before a model was prepared; pass the model to prepare() first")
        if len(self._prepared) == 1 and not self.strategy.capabilities.shards_parameters:
            touched = self._prepared
        else:
            wanted = {id(p) for p in parameters}
            touched = [p for p in self._prepared if any(id(own) in wanted for own in p.unit.module.parameters())]
            if not touched:
                raise ConfigError(
                    f"none of the {len(parameters)} parameters belongs to a prepared model; sharding replaces "
                    "parameters, so take model.parameters() from the model that prepare() returned"
                )
        for prepared in touched:
            prepared.finish_window()
            prepared.unit.unscale_gradients()
        return touched[0].unit

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Take the fp16 loss scale out of the gradients, once per step; nothing in other precisions."""
        units = [self.unit_of(optimizer)] if optimizer is not None else [prepared.unit for prepared in self._prepared]
        for unit in units:
            unit.unscale_gradients()

    # --- collectives -----------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all ranks along dim 0, in a structure of the same shape. Collective."""
        return collectives.gather(tensor, self.process, debug=self.config.debug)

    def gather_object(self, item: Any) -> Any:
        """Collect any picklable object from all ranks. Collective."""
        return collectives.gather_object(item, self.process)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Collect what all ranks computed for their current batch, every sample exactly once. Collective.

        Which rows are padding is known to the prepared loader that is being iterated; outside of a loop everything is
        kept.
        """
        loader = self.gradient_state.active_dataloader
        rows = loader.rows if loader is not None else None
        return trim_gathered(input_data, rows, self.process, use_objects=use_gather_object, debug=self.config.debug)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad the tensors of all ranks to the largest size along `dim`. Collective."""
        return collectives.pad_across_processes(tensor, self.process, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine the tensors of all ranks: "sum", "mean", "min", "max", "prod" or "none". Collective."""
        return collectives.reduce(tensor, self.process, reduction=reduction, scale=scale, debug=self.config.debug)

    # --- the way out -----------------------------------------------------------------------------------------------

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own model. A model that was never wrapped comes back as it is.

        Args:
            keep_fp32_wrapper: false also takes off mixed precision.
        """
        found = self._find(model)
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

    def end_training(self) -> None:
        """Wait for every rank, and leave the process group. Collective; the last call of a script."""
        self.wait_for_everyone()
        self.state.destroy_process_group()
