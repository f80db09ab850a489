"""The part of the Accelerator that lays out models, and wraps what steps them and what feeds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer
from accel_trainer.accelerator.accelerated_scheduler import AcceleratedScheduler
from accel_trainer.accelerator.accumulation import AccumulationWindow, PreparedUnit
from accel_trainer.accelerator.pairing import pair
from accel_trainer.accelerator.placeholders import (
    NO_HINTS,
    JobHints,
    is_optimizer,
    real_optimizer,
    schedules_of,
    stand_ins,
)
from accel_trainer.accelerator.settings import AcceleratorSettings
from accel_trainer.data.loader import PreparedDataLoader, prepare_data_loader
from accel_trainer.data.loader import skip_first_batches as skip_loader_batches
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.deepspeed_plugin import DummyScheduler
from accel_trainer.runtime import collectives
from accel_trainer.runtime.fault_injection import hook_forward_faults
from accel_trainer.runtime.rng import seed_own_streams, synchronize_rng
from accel_trainer.strategies.api import TrainJob

__all__ = ["AcceleratorPreparing"]


class AcceleratorPreparing(AcceleratorSettings):
    """Preparing of models, optimizers, schedules and data loaders."""

    _data_seed: int | None = None

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Lay out models, optimizers, schedulers and loaders for this job; return them in the order they came.

        A model may have several optimizers, and an optimizer the parameters of several models; they find each other
        by the parameters. Collective: every rank calls it with the same objects. Other objects come back as they are,
        prepared ones too.

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
        places = {id(item): place for item, place in zip(objects, placements, strict=True)}
        loaders = [item for item in objects if isinstance(item, DataLoader)]
        described = stand_ins(objects, self.strategy)
        optimizers = {id(item): self._own(described.get(id(item), item)) for item in objects if is_optimizer(item)}
        schedules = schedules_of(objects)
        hints = JobHints(
            rows=self._micro_batch_size(loaders),
            schedules={id(optimizers.get(id(s.optimizer), s.optimizer)): s.numbers for s in schedules},
        )
        results: dict[int, Any] = {}
        # What is wrong with a loader is found before a model is laid out.
        share_outs = {id(item): self._share_out(item, places[id(item)]) for item in loaders}
        models = [item for item in objects if isinstance(item, nn.Module)]
        results |= self._lay_out(models, list(optimizers.values()), places, hints=hints)
        results |= {key: self._prepared.add_optimizer(optimizer) for key, optimizer in optimizers.items()}
        results |= {id(schedule): self._prepare_described(schedule, results) for schedule in schedules}
        results |= {key: self._prepared.add_data_loader(loader) for key, loader in share_outs.items()}
        results |= {id(item): self.prepare_scheduler(item) for item in objects if isinstance(item, LRScheduler)}
        prepared = tuple(results.get(id(item), item) for item in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Lay out one model. Collective. An optimizer prepared afterwards is bound to it.

        Args:
            evaluation_mode: no gradients are needed, so a strategy may leave out what exchanges them.
        """
        place = self.device_placement if device_placement is None else device_placement
        return self._lay_out([model], [], {id(model): place}, evaluation_mode)[id(model)]

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap an optimizer whose models are prepared.

        Raises:
            ConfigError: it has parameters of no prepared model, or of another optimizer.
        """
        optimizer = self._own(optimizer)
        self._lay_out([], [optimizer], {})
        return self._prepared.add_optimizer(optimizer)

    def _own(self, optimizer: Optimizer) -> Optimizer:
        """Return what another Accelerator, or this one before `free_memory`, has wrapped: its windows are not ours."""
        is_foreign = isinstance(optimizer, AcceleratedOptimizer) and optimizer not in self._prepared.optimizers
        return optimizer.optimizer if is_foreign else optimizer  # type: ignore[attr-defined]

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Wrap a scheduler so that it steps once per step of its optimizer."""
        if isinstance(scheduler, AcceleratedScheduler):
            if scheduler in self._prepared.schedulers:
                return scheduler
            scheduler = scheduler.scheduler
        return self._prepared.add_scheduler(AcceleratedScheduler(scheduler, (), self.step_scheduler_with_optimizer))

    def _prepare_described(self, schedule: DummyScheduler, results: Mapping[int, Any]) -> AcceleratedScheduler:
        """Return the schedule that a stand-in stands for: the engine's, or one that its callable builds."""
        wrapped = results.get(id(schedule.optimizer)) or self._prepared.add_optimizer(schedule.optimizer)
        if schedule.lr_scheduler_callable is not None:
            real = schedule.lr_scheduler_callable(real_optimizer(wrapped.optimizer))
        else:
            real = self._prepared.get(wrapped).unit.take_scheduler()
        return self._prepared.add_scheduler(AcceleratedScheduler(real, [wrapped], self.step_scheduler_with_optimizer))

    def prepare_data_loader(self, data_loader: DataLoader, device_placement: bool | None = None) -> PreparedDataLoader:
        """Return a loader that yields this rank's share, on this rank's device. Collective for the first loader."""
        return self._prepared.add_data_loader(
            self._share_out(data_loader, self.device_placement if device_placement is None else device_placement)
        )

    def _share_out(self, data_loader: DataLoader, place: bool) -> PreparedDataLoader:
        return prepare_data_loader(
            data_loader,
            process=self.process,
            config=self.config.data,
            device=self.process.device if place else None,
            seed=self._agreed_data_seed(),
            on_begin=self._begin_pass,
            on_end=self.gradient_state.end,
        )

    def _begin_pass(self, loader: PreparedDataLoader) -> None:
        """A pass over a loader begins; collective with `rng_types`."""
        seed_own_streams(self.process)
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

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether `model` was loaded with a device map that spreads it over several devices."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(len({str(device) for device in spread.values()}) > 1 for spread in maps if spread)

    def _check_device_map(self, model: nn.Module, is_placed: bool) -> None:
        """Refuse to train on one device, or in replicas, what was spread over several."""
        if self.verify_device_map(model) and (is_placed or self.process.is_distributed):
            raise ConfigError(
                f"{type(model).__name__} was loaded with a device_map that spreads it over several devices, and every "
                f"process has one device, here {self.process.device}; load it without device_map, and shard it with "
                "strategy 'fsdp2' where it does not fit"
            )

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int = 0) -> PreparedDataLoader:
        """Return a loader over the same data that begins after `num_batches` batches of this rank."""
        return skip_loader_batches(dataloader, num_batches)

    def _lay_out(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        places: dict[int, bool],
        evaluation_mode: bool = False,
        hints: JobHints = NO_HINTS,
    ) -> dict[int, nn.Module]:
        """Lay out what is not yet, once all of it has been checked; return what to call, by the id of each model."""
        found = {id(model): self._prepared.find(model) for model in models}
        new = {id(m): m for m in models if _needs_layout(found[id(m)], evaluation_mode)}
        replaced = [known for key, known in found.items() if key in new and known is not None]
        staying = [known for known in self._prepared.units if known not in replaced]
        unbound = {
            id(o): o for o in optimizers if not isinstance(o, AcceleratedOptimizer) and not self._prepared.units_of(o)
        }
        pairing = pair(list(new.values()), list(unbound.values()), staying, self.strategy.capabilities)
        jobs = {
            key: self._job(model, pairing.by_model[key], places[key], evaluation_mode, hints)
            for key, model in new.items()
        }
        for job in jobs.values():
            self._check_device_map(job.model, job.device_placement)
            self.strategy.check(job, self.precision, self.process)
        # Before anything is laid out: a unit may find only now that it cannot take the optimizer.
        for known, optimizer in pairing.later:
            known.unit.bind_optimizer(optimizer)
        self._prepared.drop(replaced)
        called = {id(model): _called(model, found[id(model)]) for model in models}
        for key, job in jobs.items():
            called[key] = self._lay_out_one(job)
        return called

    def _micro_batch_size(self, loaders: Sequence[DataLoader]) -> int | None:
        """Return the rows that one rank takes at a time, the fewest of several loaders; None where nothing tells."""
        sizes = [loader.batch_size for loader in loaders if loader.batch_size is not None]
        ranks = self.process.world_size if self.config.data.split_batches else 1
        return max(1, min(sizes) // ranks) if sizes else None

    def _job(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        place: bool,
        evaluation_mode: bool,
        hints: JobHints,
    ) -> TrainJob:
        return TrainJob(
            model=model,
            optimizers=optimizers,
            resolved=self._engine_plugins.edited(self.resolved),
            device_placement=place,
            evaluation_only=evaluation_mode,
            wrap_policy=self._options.wrap_policy,
            loss_scale=self._loss_scale,
            ddp_options=self._options.ddp_options,
            comm_hook=self._options.comm_hook,
            compile_options=self._options.compile_options,
            schedule=next((hints.schedules[id(own)] for own in optimizers if id(own) in hints.schedules), None),
            micro_batch_size=hints.rows,
        )

    def _lay_out_one(self, job: TrainJob) -> nn.Module:
        unit = self.strategy.prepare(job, self.precision, self.process)
        accumulation = self.config.accumulation
        window = AccumulationWindow(
            num_steps=accumulation.num_steps,
            sync_with_dataloader=accumulation.sync_with_dataloader,
            sync_each_batch=accumulation.sync_each_batch,
        )
        # A sharded unit serves training as well as evaluation; replicas without gradient exchange do not.
        evaluation_only = job.evaluation_only and not self.strategy.capabilities.shards_parameters
        self._prepared.units.append(PreparedUnit(unit, window, evaluation_only))
        hook_forward_faults(unit.model)
        seed_own_streams(self.process)
        return unit.model


def _needs_layout(found: PreparedUnit | None, evaluation_mode: bool) -> bool:
    return found is None or (found.evaluation_only and not evaluation_mode)


def _called(model: nn.Module, found: PreparedUnit | None) -> nn.Module:
    """Return what to call in a model's place: its wrapper, or what was made of that."""
    return found.unit.model if found is not None and model is found.unit.module else model
