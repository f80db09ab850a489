"""Methods of the Accelerator that shard or wrap models, and wrap their optimizers, schedules and data loaders."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_trainer import logging
from accel_trainer.accelerator.accelerated_optimizer import (
    AcceleratedOptimizer,
    check_in_backward,
    is_layerwise,
    updates_in_backward,
)
from accel_trainer.accelerator.accelerated_scheduler import AcceleratedScheduler, DeepSpeedSchedulerWrapper
from accel_trainer.accelerator.accumulation import AccumulationWindow, PreparedUnit
from accel_trainer.accelerator.settings import AcceleratorSettings
from accel_trainer.big_models.dispatch import is_offloaded
from accel_trainer.config import LossDivision, SchedulerSteps
from accel_trainer.data.loader import PreparedDataLoader, prepare_data_loader
from accel_trainer.data.loader import skip_first_batches as skip_loader_batches
from accel_trainer.data.packing import check_prepared
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.deepspeed_plugin import DummyOptim, DummyScheduler
from accel_trainer.precision import keep_gradients
from accel_trainer.runtime import collectives
from accel_trainer.runtime.model_wrappers import find_sharded_at_load, flattens_parameters
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.rng import seed_own_streams, share_streams
from accel_trainer.strategies.api import TrainJob
from accel_trainer.strategies.optimizers import OptimizerPlaceholder, check_kind, parameters_of
from accel_trainer.techniques.chunked_loss import apply_chunked_loss, check_chunked_loss

logger = logging.get_logger(__name__)

T = TypeVar("T")

_UNKNOWN_PARAMETERS = {
    "torchao.CPUOffloadOptimizer": "it steps copies of the parameters, by hooks and a state_dict() of its own, so that "
    "no checkpoint would know them; keep shards and states in host memory with strategy 'fsdp2' and "
    "fsdp.offload_params, or with DeepSpeed's offload_optimizer"
}


@dataclass(frozen=True, slots=True)
class _Request:
    """How the models of one call are to be prepared; models and optimizers are named by their id."""

    placements: Mapping[int, bool] = field(default_factory=dict)
    """Whether a model is moved to the device."""
    evaluation_only: bool = False
    micro_batch_size: int | None = None
    """Rows of one batch on one rank; None where no loader is prepared with the models."""
    schedules: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Numbers for the schedule of an engine's configuration, of the optimizer that is scheduled."""


def _of_kind(objects: Iterable[Any], kind: type[T]) -> list[T]:
    return [item for item in objects if isinstance(item, kind)]


class AcceleratorPreparing(AcceleratorSettings):
    """Preparing of models, optimizers, schedules and data loaders."""

    _data_seed: int | None = None

    def preflight(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batch: Mapping[str, Any],
        *,
        mode: Literal["refuse", "warn"] = "refuse",
        memory: str | int | None = None,
        compute_loss: Callable[[Any, Any], Any] | None = None,
    ) -> Any:
        """Return the peak of an update on this rank by purpose, planned by its strategy on tensors without memory.

        Before `prepare()`, with what is going to be prepared; nothing of it changes. Not collective: each rank plans by
        itself, and compares with the memory of its own device, to which 5 % are added for what a plan may miss.

        Args:
            model: on any device, the meta device too.
            batch: a micro-batch of this rank, the largest that comes; shapes and dtypes of its tensors count.
            mode: whether a run that will not fit, or that nobody can plan, is an error or a warning.
            memory: of a rank, "80GiB" or a number of bytes; None is what is free on its device.
            compute_loss: called with the model and the batch; None is `model(**batch)`, and `loss` of what it returns.

        Returns:
            The contrib.planner.LayoutPlan: `peak`, `peak_parts` and others, in bytes; None where there is none, with
            "warn".

        Raises:
            ConfigError: with "refuse": the rank needs more memory than it has, or the run cannot be planned. The
                message has the two cheapest changes with which it fits, with their peaks and times.
        """
        # By name: contrib imports the core, and the core nothing of contrib.
        if mode not in ("refuse", "warn"):
            raise ConfigError(f"preflight(mode={mode!r}) is neither 'refuse' nor 'warn'")
        planning = importlib.import_module("accel_trainer.contrib.preflight")
        return planning.preflight_loop(self, model, optimizer, batch, mode, memory, compute_loss)

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders for this job; return them in the order they came.

        Models and optimizers, several of either, find each other by the parameters. Collective: every rank calls it
        with the same objects. Other objects come back as they are, prepared ones too.

        Args:
            device_placement: one flag per object; false leaves a model or a loader's batches where they are.

        Raises:
            ConfigError: an object cannot be prepared as configured; nothing has been changed then. Or a model does not
                tell the documents apart that a loader beside it packs: `check_packing`.
        """
        placements = self._placements(objects, device_placement)
        self.take_sharded(_of_kind(objects, nn.Module))
        placeholders = self._build_placeholders(objects)
        given = [*_of_kind(objects, Optimizer), *_of_kind(objects, DummyOptim)]
        optimizers = {id(item): self._unwrap(placeholders.get(id(item), item)) for item in given}
        dummies = _of_kind(objects, DummyScheduler)
        # Before a model is prepared: an error in a loader leaves everything as it was.
        loaders = {id(item): self._build_loader(item, placements[id(item)]) for item in _of_kind(objects, DataLoader)}
        request = _Request(
            placements,
            micro_batch_size=self._micro_batch_size(_of_kind(objects, DataLoader)),
            schedules={id(optimizers.get(id(each.optimizer), each.optimizer)): each.numbers for each in dummies},
        )
        results: dict[int, Any] = {}
        results |= self._prepare_models(_of_kind(objects, nn.Module), list(optimizers.values()), request)
        results |= {key: self._prepared.add_optimizer(optimizer) for key, optimizer in optimizers.items()}
        results |= {id(dummy): self._build_scheduler(dummy, results) for dummy in dummies}
        results |= {key: self._prepared.add_data_loader(loader) for key, loader in loaders.items()}
        results |= {id(item): self.prepare_scheduler(item) for item in _of_kind(objects, LRScheduler)}
        check_prepared([results[id(model)] for model in _of_kind(objects, nn.Module)], loaders.values(), self.device)
        prepared = tuple(results.get(id(item), item) for item in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def take_sharded(self, models: Sequence[nn.Module]) -> None:
        """Prepare models by the layout of one that was sharded while it was loaded, from now on. Collective then.

        Raises:
            ConfigError: the configuration shards models, too; or a loader was prepared whose batches would be others.
        """
        if not any(find_sharded_at_load(model) for model in models):
            return
        from accel_trainer.strategies.fsdp2.presharded import choose_strategy  # FSDP2, which others do without

        strategy = choose_strategy(models, self.resolved, self.strategy)
        if strategy is None:
            return
        if strategy.sizes.num_readers != self.readers.world_size and self._prepared.dataloaders:
            raise ConfigError(
                f"a data loader was prepared for {self.readers.world_size} ranks that read different data, and after "
                f"it a model that was loaded with {strategy.layout}: {strategy.sizes.num_readers} of them do; prepare "
                "the model first, or both in one call of prepare()"
            )
        self.readers = self._pass_start.readers = self.state.readers = strategy.readers(self.resolved, self.process)
        share_streams(self.process, self.readers)
        self.strategy, self._axis_sizes = strategy, strategy.sizes
        self._take_facts()

    def _placements(self, objects: Sequence[Any], device_placement: Sequence[bool] | None) -> dict[int, bool]:
        flags = list(device_placement) if device_placement is not None else [self.device_placement] * len(objects)
        if len(flags) != len(objects):
            raise ConfigError(f"device_placement has {len(flags)} flags for {len(objects)} objects; give one for each")
        return {id(item): flag for item, flag in zip(objects, flags, strict=True)}

    def _micro_batch_size(self, loaders: Sequence[DataLoader]) -> int | None:
        """Return the rows that one rank takes at a time, of several loaders as the plugin says; None without any."""
        plugin = self._engine_plugins.current
        choose = min if plugin is None or plugin.is_train_batch_min else max
        sizes = [loader.batch_size for loader in loaders if loader.batch_size is not None]
        ranks = self.readers.world_size if self._data_config.split_batches else 1
        return max(1, choose(sizes) // ranks) if sizes else None

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; its optimizer may follow. `evaluation_mode` exchanges no gradients. Collective."""
        self.take_sharded([model])
        place = self.device_placement if device_placement is None else device_placement
        return self._prepare_models([model], [], _Request({id(model): place}, evaluation_mode))[id(model)]

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap an optimizer whose models are prepared; on one process also one that has none, or has them later.

        Raises:
            ConfigError: it has parameters of no prepared model, or of another optimizer.
        """
        optimizer = self._unwrap(optimizer)
        self._prepare_models([], [optimizer], _Request())
        return self._prepared.add_optimizer(optimizer)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Wrap a scheduler so that it steps once per step of its optimizer, or as `scheduler_steps` says."""
        if isinstance(scheduler, AcceleratedScheduler):
            if scheduler in self._prepared.schedulers:
                return scheduler
            scheduler = scheduler.scheduler
        # Of split batches a script sees all there are; accelerate does not count processes then, either.
        is_counted = self.config.scheduler_steps is SchedulerSteps.PER_PROCESS and not self._data_config.split_batches
        steps = self.process.world_size if is_counted and self.step_scheduler_with_optimizer else 1
        return self._prepared.add_scheduler(
            AcceleratedScheduler(scheduler, (), self.step_scheduler_with_optimizer, steps)
        )

    def _unwrap(self, optimizer: Any) -> Any:
        """Return the bare optimizer of another Accelerator's wrapper, or of one before `free_memory`."""
        is_stale = isinstance(optimizer, AcceleratedOptimizer) and optimizer not in self._prepared.optimizers
        bare = optimizer.optimizer if is_stale else optimizer
        check_kind(bare, _UNKNOWN_PARAMETERS, self.strategy.name)
        if updates_in_backward(bare):
            check_in_backward(type(bare).__name__, self.config, self.process, self.strategy.capabilities)
            if is_layerwise(bare) and self.config.ema_decay is not None:
                raise ConfigError(
                    f"{self.resolved.describe('ema_decay')} with {type(bare).__name__}, which updates parameter by "
                    "parameter in the backward, so that no update ends for averages to follow; leave one of the two out"
                )
            self.has_lomo_optimizer |= not is_layerwise(bare)
        return bare

    def _build_placeholders(self, objects: Iterable[Any]) -> dict[int, OptimizerPlaceholder]:
        """Return, by the id of each DummyOptim, the optimizer that takes its place."""
        dummies = [item for item in objects if isinstance(item, DummyOptim | DummyScheduler)]
        if dummies and not self.strategy.capabilities.describes_optimizers:
            raise ConfigError(
                f"{type(dummies[0]).__name__} stands for what a DeepSpeed configuration describes, and this run uses "
                f"strategy {self.strategy.name!r}; pass a torch optimizer and scheduler, or use strategy 'deepspeed'"
            )
        optimizers = _of_kind(dummies, DummyOptim)
        return {id(item): OptimizerPlaceholder(item.param_groups, item.params, item.numbers) for item in optimizers}

    def _build_scheduler(self, dummy: DummyScheduler, results: Mapping[int, Any]) -> AcceleratedScheduler:
        """Return the schedule of the engine's configuration, or the one that the dummy's callable builds."""
        wrapped = results.get(id(dummy.optimizer)) or self._prepared.add_optimizer(dummy.optimizer)
        kind = AcceleratedScheduler
        if dummy.lr_scheduler_callable is None:
            scheduler, kind = self._prepared.get(wrapped).unit.take_scheduler(), DeepSpeedSchedulerWrapper
        else:
            inner = wrapped.optimizer
            real = inner.real if isinstance(inner, OptimizerPlaceholder) else None
            scheduler = dummy.lr_scheduler_callable(real or inner)
        return self._prepared.add_scheduler(kind(scheduler, [wrapped], self.step_scheduler_with_optimizer))

    def prepare_data_loader(
        self,
        data_loader: DataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedDataLoader:
        """Return a loader of this rank's shard, on its device. Collective for the first loader."""
        if slice_fn_for_dispatch is not None:
            logger.warning_once("slice_fn_for_dispatch is not called: batches are collated for their rank, never cut")
        return self._prepared.add_data_loader(
            self._build_loader(data_loader, self.device_placement if device_placement is None else device_placement)
        )

    def _build_loader(self, data_loader: DataLoader, place: bool) -> PreparedDataLoader:
        loader = prepare_data_loader(
            data_loader,
            process=self.readers,
            job=self.process,
            config=self._data_config,
            device=self.process.device if place else None,
            seed=self._shuffle_seed(),
            on_begin=self._pass_start.begin,
            on_end=self.gradient_state.end,
        )
        loader.gradient_state = self.gradient_state
        loader.admit = None if self.lost_ranks is None else self.lost_ranks.admit
        loader.watch = None if self.meters is None else self.meters.watch
        return loader

    def renew_shuffle_seed(self) -> None:
        """Let the next loader that is prepared take the present seed; without it, all take that of the first one."""
        self._data_seed = None

    def _shuffle_seed(self) -> int:
        """Return the seed of shuffling: configured, else rank 0's torch seed, so that all ranks draw the same order."""
        if self._data_config.data_seed is not None:
            return self._data_config.data_seed
        if self._data_seed is None:
            self._data_seed = collectives.broadcast_object_list([torch.initial_seed()], self.process)[0]
        return self._data_seed

    def deepspeed_ulysses_dl_adapter(self, dl: PreparedDataLoader, model: nn.Module) -> PreparedDataLoader:
        """Return the loader as it is: a model's own forward shares its sequences out over ranks."""
        return dl

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether `model` was loaded with a device map that spreads it over several devices."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(len({str(device) for device in spread.values()}) > 1 for spread in maps if spread)

    def _check_as_given(self, job: TrainJob) -> None:
        """Refuse a model that FSDP1 wraps, that is spread over devices, or that cannot be trained where it is."""
        model, own, name = job.model, self.process.device, type(job.model).__name__
        if flattens_parameters(model):
            raise ConfigError(
                f"{name} is wrapped by torch.distributed.fsdp.FullyShardedDataParallel (FSDP1), which "
                "FSDP2 has replaced and whose flat parameters would be wrapped once more here; give prepare() the bare "
                "model, and shard it with strategy 'fsdp2' (FullyShardedDataParallelPlugin takes FSDP1's options)"
            )
        if self.process.is_distributed and (job.is_offloaded or self.verify_device_map(model)):
            how = "with weights that stay in host memory or on disk" if job.is_offloaded else "with a device_map"
            raise ConfigError(
                f"{name} was loaded {how} that spreads it over several devices, and every process has one "
                f"device, here {own}; load it without device_map, and shard it with strategy 'fsdp2' where it does not "
                "fit"
            )
        if job.is_offloaded and any(each.is_meta for optimizer in job.optimizers for each in parameters_of(optimizer)):
            raise ConfigError(
                f"weights of {name} stay in host memory or on disk and are read for each forward, and its optimizer "
                "would update copies; load the model without offloading, and shard it with strategy 'fsdp2' where it "
                "does not fit"
            )
        if any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)):
            self._check_quantized(model)

    def _check_quantized(self, model: nn.Module) -> None:
        name, own = type(model).__name__, self.process.device
        devices = _mapped_devices(model, own)
        if "disk" in devices or ("cpu" in devices and own.type != "cpu"):
            raise ConfigError(
                f"{name} was loaded in 8-bit or 4-bit precision with CPU or disk offload, where its layers cannot be "
                f"trained; load it with device_map={{'': {own.index or 0}}}"
            )
        if len(devices) == 1 and devices != {str(own)}:
            raise ConfigError(
                f"{name} was loaded in 8-bit or 4-bit precision on {devices.pop()}, and this process trains on {own}; "
                "load it with device_map={'': accelerator.local_process_index}"
            )

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int = 0) -> PreparedDataLoader:
        """Return a loader over the same data that begins after `num_batches` batches of this rank."""
        return skip_loader_batches(dataloader, num_batches)

    def _check_rollbacks(self, optimizers: Sequence[Optimizer]) -> None:
        naming, guard = self.project_configuration.automatic_checkpoint_naming, self.nonfinite_guard
        if optimizers and guard and guard.roll_back and not naming:
            raise ConfigError(
                f"{self.resolved.describe('on_nonfinite')} goes back to the newest save_state() of the run, which "
                "needs a name of its own; give Accelerator(project_dir=...) with "
                "ProjectConfiguration(automatic_checkpoint_naming=True), or set on_nonfinite to skip_step"
            )

    def _prepare_models(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], request: _Request
    ) -> dict[int, nn.Module]:
        """Prepare models that are not yet, once all of them are checked; return the models to call, by id."""
        self._check_rollbacks(optimizers)
        models = [*models, *self._prepared.freed_wrappers(optimizers, models)]
        found = {id(model): self._prepared.find(model) for model in models}
        new = {id(m): m for m in models if _needs_preparing(found[id(m)], request)}
        replaced = [unit for key, unit in found.items() if key in new and unit is not None]
        by_model, to_bind = self._prepared.pair(
            list(new.values()),
            optimizers,
            replaced,
            self.strategy.capabilities,
            is_distributed=self.process.is_distributed,
        )
        jobs = {key: self._build_job(model, by_model[key], request) for key, model in new.items()}
        self._check_jobs(jobs.values(), replaced)
        # Before a model is prepared: a unit may find only now that it cannot take the optimizer.
        for prepared, optimizer in to_bind:
            prepared.unit.bind_optimizer(optimizer)
        self._prepared.drop(replaced)
        if new:
            PROGRESS.begin()
        called = {id(model): _wrapper_of(model, found[id(model)]) for model in models}
        called |= {key: self._prepare_job(job) for key, job in jobs.items()}
        self._prepared.join(in_backward=self.config.optimizer_in_backward)
        return called

    def _check_jobs(self, jobs: Collection[TrainJob], replaced: Sequence[PreparedUnit]) -> None:
        if self.process.is_distributed or self.strategy.capabilities.shards_parameters:
            self._prepared.refuse_shared((job.model for job in jobs if not job.evaluation_only), replaced)
        for job in jobs:
            self._check_as_given(job)
            if not job.evaluation_only:
                check_chunked_loss(job.model, job.resolved, self.process.device)
            self.strategy.check(job, self.precision, self.process)

    def _build_job(self, model: nn.Module, optimizers: list[Optimizer], request: _Request) -> TrainJob:
        is_placed, offloaded = request.placements.get(id(model), self.device_placement), is_offloaded(model)
        return TrainJob(
            model=model,
            optimizers=optimizers,
            resolved=self._engine_plugins.edited(self.resolved),
            device_placement=is_placed and not offloaded and not self.verify_device_map(model),
            is_offloaded=offloaded,
            evaluation_only=request.evaluation_only,
            wrap_policy=self._options.wrap_policy,
            loss_scale=self._loss_scale,
            ddp_options=self._options.ddp_options,
            comm_hook=self._options.comm_hook,
            compile_options=self._options.compile_options,
            schedule=next((request.schedules[id(own)] for own in optimizers if id(own) in request.schedules), None),
            micro_batch_size=request.micro_batch_size,
        )

    def _prepare_job(self, job: TrainJob) -> nn.Module:
        """Have the strategy prepare a model; return the model to call. Collective."""
        if self.meters is not None and not job.evaluation_only:
            self.meters.take_model(job.model)
        keep_gradients(job.model, self.process.device)
        if not job.evaluation_only:
            apply_chunked_loss(job.model, job.resolved)
        unit = self.strategy.prepare(job, self.precision, self.process)
        if self.config.ema_decay is not None and unit.averages is None and job.optimizers:
            raise ConfigError(
                f"{self.resolved.describe('ema_decay')}: strategy {self.strategy.name!r} keeps no averages of weights; "
                "use strategy 'ddp' or 'fsdp2', or leave ema_decay out"
            )
        accumulation = self.config.accumulation
        window = AccumulationWindow(
            num_steps=accumulation.num_steps,
            sync_with_dataloader=accumulation.sync_with_dataloader,
            sync_each_batch=accumulation.sync_each_batch,
            divides_by_num_steps=accumulation.loss_division is LossDivision.ACCELERATE,
        )
        # A sharded unit serves training as well as evaluation; replicas without gradient exchange do not.
        evaluation_only = job.evaluation_only and not self.strategy.capabilities.shards_parameters
        self._prepared.units.append(PreparedUnit(unit, window, evaluation_only))
        unit.model._is_accelerate_prepared = True  # type: ignore[assignment]  # scripts ask for it
        # From here on: all ranks build a model from one seed, and drop out different activations afterwards.
        seed_own_streams(self.readers)
        return unit.model


def _mapped_devices(model: nn.Module, own: torch.device) -> set[str]:
    """Return the devices of a model's device map; a number is one of the kind of `own`."""
    spread = getattr(model, "hf_device_map", None) or {}
    named = (f"{own.type}:{device}" if isinstance(device, int) else str(device) for device in spread.values())
    return {f"{name}:0" if name == own.type and own.index is not None else name for name in named}


def _needs_preparing(found: PreparedUnit | None, request: _Request) -> bool:
    return found is None or (found.evaluation_only and not request.evaluation_only)


def _wrapper_of(model: nn.Module, found: PreparedUnit | None) -> nn.Module:
    """Return the wrapper of the user's own model; a wrapper, compiled or not, is returned as it is."""
    return found.unit.model if found is not None and model is found.unit.module else model
