"""DeepSpeed's ZeRO as a strategy: one engine for each model with its optimizer."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from accel_trainer.errors import ConfigError
from accel_trainer.integrations.deepspeed_config import EngineConfig, Fact, Facts, hidden_size_of, resolve_engine_config
from accel_trainer.integrations.deepspeed_runtime import (
    check_can_start,
    import_deepspeed,
    join_engine_group,
    require_deepspeed,
)
from accel_trainer.integrations.deepspeed_unit import DeepSpeedUnit
from accel_trainer.precision import PrecisionPolicy, apply_autocast
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.strategies.api import Capabilities, TrainJob
from accel_trainer.strategies.native import NativeUnit, check_optimizers, place, require_values
from accel_trainer.strategies.sync import broadcast_module_states

__all__ = ["DeepSpeedStrategy"]

_NEVER_PRINT = 2**31
"""Steps between two progress lines of the engine: the loop's own reporting is the user's."""


class DeepSpeedStrategy:
    """Shards optimizer state (ZeRO-1), gradients too (2), parameters too (3), with offload to CPU memory or disk."""

    name: ClassVar[str] = "deepspeed"
    capabilities: ClassVar[Capabilities] = Capabilities(
        deferred_sync=False, shards_parameters=True, joint_optimizers=False, distributed_type="DEEPSPEED"
    )

    def __init__(self) -> None:
        require_deepspeed()

    def check(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> None:
        """Refuse what the engine cannot lay out; nothing of DeepSpeed is imported for that."""
        require_values(job.model)
        check_optimizers(job)
        config = _resolve(job, process)
        if config.stage == 0:
            raise ConfigError(
                "zero_optimization.stage of the DeepSpeed configuration is 0, or not given: nothing would be sharded; "
                "write stage 1, 2 or 3, or use strategy 'ddp'"
            )
        check_can_start(process, config.data)

    def prepare(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> DeepSpeedUnit | NativeUnit:
        """Build the engine around the job's model and optimizer. Collective.

        The unit's model is the engine; its module is the user's own object, whose parameters keep their identity.
        Without an optimizer, ZeRO-3 shards the model for evaluation, and the other stages leave it whole.
        """
        self.check(job, precision, process)
        config = _resolve(job, process)
        deepspeed = import_deepspeed()
        join_engine_group(deepspeed, process)
        if not job.optimizers and config.stage < 3:
            return _whole_unit(job, precision, process)
        optimizer = job.optimizers[0] if job.optimizers else None
        groups = _group_names(job.model, optimizer)
        engine, *_ = deepspeed.initialize(model=job.model, optimizer=optimizer, config=config.data)
        return DeepSpeedUnit(engine, job.optimizers, groups)


def _resolve(job: TrainJob, process: ProcessContext) -> EngineConfig:
    """Return the engine's configuration, complete, with what the job knows."""
    resolved, config = job.resolved, job.config
    facts = Facts(
        world_size=process.world_size,
        micro_batch_size=Fact(1, "nobody", is_default=True),
        accumulation_steps=Fact(
            config.accumulation.num_steps,
            resolved.describe("accumulation.num_steps"),
            is_default=config.accumulation.num_steps == 1,
        ),
        precision=Fact(
            str(config.mixed_precision), resolved.describe("mixed_precision"), is_default=config.mixed_precision == "no"
        ),
        hidden_size=hidden_size_of(getattr(job.model, "config", None)),
        given_optimizer="torch" if job.optimizers else "none",
    )
    engine_config = resolve_engine_config(config.deepspeed, facts=facts)
    engine_config.data.setdefault("steps_per_print", _NEVER_PRINT)
    return engine_config


def _group_names(model: nn.Module, optimizer: Optimizer | None) -> list[list[str]]:
    """Return the names of the parameters of each group; the engine leaves out groups without any."""
    if optimizer is None:
        return []
    names = {id(parameter): name.replace("_orig_mod.", "") for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups if group["params"]]


def _whole_unit(job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> NativeUnit:
    """Lay out a model that nobody trains, at a stage that keeps parameters whole. Collective."""
    place(job.model, job, process)
    apply_autocast(job.model, precision)
    if process.is_distributed:
        broadcast_module_states(job.model, process.device)
    return NativeUnit(job.model, job.model, job.scaler)
