"""DeepSpeed's ZeRO as a strategy: one engine for each model with its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_trainer.checkpoint.weights.adapters import adapter_folders
from accel_trainer.config import MixedPrecision, OutputDtype, Resolved, RunConfig
from accel_trainer.errors import ConfigError
from accel_trainer.integrations.deepspeed.config import EngineConfig, Fact, Facts, hidden_size_of, resolve_engine_config
from accel_trainer.integrations.deepspeed.runtime import (
    check_can_start,
    planned_engine,
    require_deepspeed,
    start_engine,
    watch_locks,
)
from accel_trainer.integrations.deepspeed.unit import BACKWARDS, DeepSpeedUnit, EvaluationUnit, release_earlier
from accel_trainer.precision import PrecisionPolicy, apply_autocast, cast_floating
from accel_trainer.runtime.availability import is_transformers_available
from accel_trainer.runtime.model_wrappers import is_compiled_module, uncompiled_name
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.strategies.api import Capabilities, Strategy, TrainJob
from accel_trainer.strategies.broadcast_values import broadcast_module_states, share_buffers_in_evaluation
from accel_trainer.strategies.compile import apply_compile
from accel_trainer.strategies.layers import select_layers
from accel_trainer.strategies.optimizers import OptimizerPlaceholder, check_kind
from accel_trainer.strategies.own_methods import (
    gather_in_save_pretrained,
    refuse_copies,
    refuse_merges,
    refuse_second_backward,
)
from accel_trainer.strategies.single import (
    NativeUnit,
    check_optimizers,
    make_contiguous,
    place,
    refuse_lazy,
    refuse_shared_memory,
    refuse_sparse_gradients,
    require_values,
)
from accel_trainer.techniques.activations import treat_activations
from accel_trainer.techniques.ema import build_averages

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NEVER_PRINT = 2**31
"""Steps between two progress lines of the engine: the loop's own reporting is the user's."""

_NEEDS_SHAPES = (
    "the engine hands it flat pieces of all parameters of a group, and its update depends on the shape or the place of "
    "each parameter; use AdamW, or shard with FSDP (fsdp=True, strategy 'fsdp2')"
)
_UNSUPPORTED = {
    "accel_trainer.Muon": _NEEDS_SHAPES,
    "apollo_torch": _NEEDS_SHAPES,
    "galore_torch": _NEEDS_SHAPES,
    "grokadamw": _NEEDS_SHAPES,
    "optimi.StableAdamW": _NEEDS_SHAPES,
    "torch.Adafactor": _NEEDS_SHAPES,
    "torch.Muon": _NEEDS_SHAPES,
    "transformers.Adafactor": _NEEDS_SHAPES,
    "schedulefree": "it switches between two sets of weights, and the engine has copies of its own of one of them; use "
    "AdamW, or shard with FSDP (fsdp=True, strategy 'fsdp2')",
    "torch.Adagrad": "it makes its state as it is built, for parameters that the engine then replaces; use another "
    "optimizer, or shard with FSDP (fsdp=True, strategy 'fsdp2')",
}


@dataclass(eq=False)
class _PiecewiseBuilding:
    """transformers' switch for `deepspeed.zero.Init`, with which no rank holds a full model while one is built."""

    config: dict[str, Any]
    is_enabled: bool = True

    def is_zero3(self) -> bool:
        """Whether parameters are to be partitioned as they are made; transformers asks for each model."""
        return self.is_enabled

    @contextmanager
    def switched(self, in_pieces: bool) -> Iterator[None]:
        """Partition parameters as they are made in this block, or not."""
        before, self.is_enabled = self.is_enabled, in_pieces
        try:
            yield
        finally:
            self.is_enabled = before


_latest: weakref.ref[_PiecewiseBuilding] | None = None
"""Of the process: transformers has one switch for all."""


def _build_in_pieces(config: EngineConfig) -> _PiecewiseBuilding | None:
    """Have `from_pretrained` and `from_config` partition parameters as they are made, or no longer.

    Returns the switch, which transformers holds weakly; None when it is not asked for, or transformers is missing.
    """
    global _latest
    before = None if _latest is None else _latest()
    if before is not None:
        before.is_enabled = False
    if not config.builds_in_pieces or not is_transformers_available():
        return None
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, set_hf_deepspeed_config

    if is_deepspeed_zero3_enabled():  # by the Trainer's arguments, which say the same and more
        return None
    building = _PiecewiseBuilding(config.data)
    _latest = weakref.ref(building)
    set_hf_deepspeed_config(building)
    return building


class DeepSpeedStrategy(Strategy):
    """Shards optimizer state (ZeRO-1), gradients too (2), parameters too (3), with offload to CPU memory or disk."""

    name: ClassVar[str] = "deepspeed"
    capabilities: ClassVar[Capabilities] = Capabilities(
        shards_parameters=True,
        settable_accumulation=False,
        joint_optimizers=False,
        describes_optimizers=True,
        builds_engine=True,
        distributed_type="DEEPSPEED",
    )

    def __init__(self) -> None:
        require_deepspeed()
        self._building: _PiecewiseBuilding | None = None

    def check_config(self, resolved: Resolved, world_size: int) -> None:
        """Refuse options that the engine's own configuration contradicts; DeepSpeed is not imported for that."""
        _resolve(resolved, world_size, partial=True)

    def start(self, resolved: Resolved, process: ProcessContext) -> Resolved:
        """Bring the engine up before models are built; return the configuration with that of its own. Collective."""
        config = _resolve(resolved, process.world_size, partial=True)
        start_engine(process, config.data)
        self._building = None  # of another configuration: transformers sees that it is gone
        self._building = _build_in_pieces(config)
        return _in_force(resolved, config)

    @contextmanager
    def planning(self, resolved: Resolved, process: ProcessContext) -> Iterator[tuple[Resolved, Collection[str]]]:
        """Build an engine for a plan; an optimizer that its configuration describes is the plan's own one."""
        config = _resolve(resolved, process.world_size, partial=True)
        left_out, precision = {"optimizer", "scheduler"}, resolved.config.mixed_precision
        if config.precision == MixedPrecision.FP16:  # which CPUs do not train in, and whose sizes bf16 has
            left_out, precision = left_out | {"fp16", "bf16"}, MixedPrecision.BF16
        own = {name: value for name, value in config.data.items() if name not in left_out}
        own["zero_optimization"] = {
            # The device has as much memory left of a disk as of the host.
            name: {**value, "device": "cpu"} if isinstance(value, Mapping) and value.get("device") == "nvme" else value
            for name, value in config.value("zero_optimization", {}).items()
        }
        resolved = replace(resolved, config=replace(resolved.config, deepspeed=own, mixed_precision=precision))
        config = _resolve(resolved, process.world_size, partial=True)
        on_host = ["gradients", "optimizer_state"] * _is_offloaded(config, "optimizer")
        on_host += ["parameters"] * _is_offloaded(config, "param")
        with planned_engine():
            yield _in_force(resolved, config), on_host

    def building(self, in_pieces: bool) -> AbstractContextManager[None]:
        """Return the context in which `from_pretrained` and `from_config` build in pieces, or in full."""
        return nullcontext() if self._building is None else self._building.switched(in_pieces)

    def check(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> None:
        """Refuse a job that the engine cannot prepare; DeepSpeed is not imported for that."""
        refuse_lazy(job.model)
        require_values(job.model)
        select_layers(job)
        check_optimizers(job)
        config = _resolve_job(job, process)
        if config.stage == 0:
            raise ConfigError(
                "zero_optimization.stage of the DeepSpeed configuration is 0, or not given: nothing would be sharded; "
                "write stage 1, 2 or 3, or use strategy 'ddp'"
            )
        if config.stage == 3 and job.config.ema_decay is not None:
            raise ConfigError(
                f"{job.resolved.describe('ema_decay')} with stage 3 of ZeRO, whose engine keeps pieces of parameters "
                "that averages cannot take the place of in an evaluation; use stage 2, or strategy 'fsdp2'"
            )
        for optimizer in job.optimizers:
            check_kind(optimizer, _UNSUPPORTED, self.name)
        if job.optimizers or config.stage == 3:
            refuse_shared_memory(job.model, "DeepSpeed")
        if job.optimizers:
            refuse_sparse_gradients(job.model, "DeepSpeed")
        _check_groups(job)
        _check_parameters(job, config)
        _check_leaf_classes(job, config)
        if config.stage == 3:
            _check_compiled(job)
        check_can_start(process, config.data)

    def prepare(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> NativeUnit | DeepSpeedUnit:
        """Build the engine around the job's model and optimizer. Collective.

        The unit's model is the engine; its module is the user's own object, whose parameters keep their identity.
        Without an optimizer, ZeRO-3 shards the model for evaluation, and the other stages replicate it.
        """
        self.check(job, precision, process)
        config = _resolve_job(job, process)
        deepspeed = start_engine(process, config.data)
        if not _needs_engine(job, config):
            return _replicate(job, precision, process)
        release_earlier(job.model)
        make_contiguous(job.model, "DeepSpeed")
        treat_activations(job.model, select_layers(job), job.config, process.device)
        optimizer = job.optimizers[0] if job.optimizers else None
        groups = _group_names(job.model, optimizer)
        placeholder = optimizer if isinstance(optimizer, OptimizerPlaceholder) else None
        if _would_take_another_type(job.model, config, process):
            # So called, it asks its configuration for the type.
            deepspeed.zero.Init(module=job.model, config_dict_or_path=config.data)
        with _scalars_broadcast(job.model), watch_locks():
            engine, *_ = deepspeed.initialize(
                model=job.model,
                optimizer=optimizer if placeholder is None else None,
                model_parameters=None if placeholder is None else placeholder.given,
                config=config.data,
            )
        if placeholder is not None:
            placeholder.adopt(engine.basic_optimizer)
        share_buffers_in_evaluation(engine, job.model, process.device)
        hooks = _cast_around(job.model, config, job.config)
        why = "DeepSpeed's engine takes the gradients away"
        hooks.append(refuse_second_backward(job.model, why, BACKWARDS.is_none_running if config.stage < 3 else None))
        apply_compile(job.model, job.config.compile, job.compile_options)
        compared_over = process if job.config.debug else None
        unit = DeepSpeedUnit(engine, job.optimizers, groups, hooks, compared_over)
        unit.averages = build_averages(job.model, job.config)
        _adapt_own_methods(unit, config, process)
        return unit


def _in_force(resolved: Resolved, config: EngineConfig) -> Resolved:
    """Return the configuration of a run with what the engine's own says."""
    own = resolved.config
    accumulation = replace(own.accumulation, num_steps=config.accumulation_steps)
    precision = MixedPrecision(config.precision)
    return replace(resolved, config=replace(own, accumulation=accumulation, mixed_precision=precision))


def _is_offloaded(config: EngineConfig, name: str) -> bool:
    return config.value(f"zero_optimization.offload_{name}.device") not in (None, "none")


def _needs_engine(job: TrainJob, config: EngineConfig) -> bool:
    """Return whether there is something to shard: not of a loss without parameters, say."""
    return bool(job.optimizers) or (config.stage == 3 and next(job.model.parameters(), None) is not None)


def _adapt_own_methods(unit: DeepSpeedUnit, config: EngineConfig, process: ProcessContext) -> None:
    """Have a model's own methods for saving and for adapters work on the engine's parameters."""
    if config.stage == 3:
        # transformers generates as far as the longest text of a rank, as it does only for models built in pieces.
        unit.module._is_fsdp_managed_module = True  # type: ignore[assignment]
        _forget_unused_conversions(unit.module)
        gather_in_save_pretrained(unit.module, process, unit.checkpoint_io)
        refuse_merges(unit.module)
        refuse_copies(unit.module)
    elif adapter_folders(unit.module):
        gather_in_save_pretrained(unit.module, process, None)


def _replicate(job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> EvaluationUnit:
    """Return a unit that evaluates rank 0's model on each rank, without an engine. Collective."""
    place(job.model, job, process)
    apply_autocast(job.model, precision)
    if process.is_distributed:
        broadcast_module_states(job.model, process.device)
    return EvaluationUnit(job.model, job.model, job.loss_scale)


def _forget_unused_conversions(model: nn.Module) -> None:
    """Forget the renamings that loading has not used, which the model's own `save_pretrained` would undo.

    transformers 5.17 to 5.23 note them all where `from_pretrained` loads in pieces (integrations/deepspeed.py:485), and
    only those it has used elsewhere: the layer norms of BERT would be saved as `gamma` and `beta`, as in old files.
    """
    conversions = vars(model).get("_weight_conversions")
    if conversions:
        model._weight_conversions = [used for used in conversions if used.was_used()]  # type: ignore[assignment]


@contextmanager
def _scalars_broadcast(model: nn.Module) -> Iterator[None]:
    """Send rank 0's parameters of no dimension, such as CLIP's scale of logits, and keep the engine from doing so.

    It would fail: it sends all parameters as bytes, and torch shows a number of no dimension not as bytes.
    """
    numbers: list[Any] = [p for p in model.parameters() if not p.ndim and not hasattr(p, "ds_id")]
    for number in numbers:
        dist.broadcast(number.data, src=0)
        # As parameters have that are not the same on all ranks; it looks for the name only.
        number.ds_optim_param = None
    try:
        yield
    finally:
        for number in numbers:
            del number.ds_optim_param


def _resolve_job(job: TrainJob, process: ProcessContext) -> EngineConfig:
    """Return the engine's configuration for a job, with nothing left open."""
    known: dict[str, Any] = {"given_optimizer": "torch" if job.optimizers else "none"}
    if job.optimizers and isinstance(job.optimizers[0], OptimizerPlaceholder):
        known |= {"given_optimizer": "dummy", "optimizer": _optimizer_facts(job.optimizers[0])}
    if job.schedule is not None:
        known |= {"given_scheduler": "dummy", "scheduler": _facts(job.schedule, "DummyScheduler")}
    known["hidden_size"] = hidden_size_of(getattr(job.model, "config", None))
    return _resolve(job.resolved, process.world_size, job.micro_batch_size, **known)


def _optimizer_facts(placeholder: OptimizerPlaceholder) -> dict[str, Fact]:
    """Return the numbers of a DummyOptim, and those that each of its groups has: the common value matters to none."""
    groups = [group for group in placeholder.given if isinstance(group, Mapping)]
    own = set.intersection(*map(set, groups)) - {"params"} if groups else set()
    in_groups = {name: Fact(groups[0][name], "DummyOptim's groups", is_default=True) for name in own}
    return {**in_groups, **_facts(placeholder.numbers, "DummyOptim")}


def _facts(numbers: Mapping[str, Any], stand_in: str) -> dict[str, Fact]:
    return {name: Fact(value, f"{stand_in}({name}=...)") for name, value in numbers.items()}


def _resolve(
    resolved: Resolved, world_size: int, num_rows: int | None = None, *, partial: bool = False, **known: Any
) -> EngineConfig:
    """Return the engine's configuration, filled with values of the run; `partial` before there is a job."""
    # 1 without a loader: the engine only reports by the size of a batch, and divides nothing by it.
    rows = Fact(1 if num_rows is None else num_rows, "the prepared data loader", is_default=True)
    facts = _facts_of(resolved, world_size, micro_batch_size=rows, **known)
    engine_config = resolve_engine_config(resolved.config.deepspeed, facts=facts, partial=partial)
    engine_config.data.setdefault("steps_per_print", _NEVER_PRINT)
    return engine_config


def _facts_of(resolved: Resolved, world_size: int, **known: Any) -> Facts:
    def fact(name: str, value: Any) -> Fact:
        return Fact(value, resolved.describe(name), is_default=not resolved.is_set(name))

    config = resolved.config
    known.setdefault("accumulation_steps", fact("accumulation.num_steps", config.accumulation.num_steps))
    precision = fact("mixed_precision", str(config.mixed_precision))
    return Facts(world_size=world_size, precision=precision, origins=resolved.block_origins(), **known)


def resolve_arguments(
    resolved: Resolved,
    given: Mapping[str, tuple[Any, bool]],
    process: ProcessContext,
    *,
    model: Any = None,
    num_steps: int | None = None,
    num_warmup_steps: int | None = None,
    **kinds: str,
) -> EngineConfig:
    """Return the engine's configuration with every "auto" that a Trainer's arguments answer.

    Args:
        given: the value of each argument by name, and whether it was left at its default.
        model: for its sizes; None before there is one.
        num_steps: updates of the training. Without it, an "auto" that nothing fills yet is left out.
        kinds: `given_optimizer` and `given_scheduler`, as of `Facts`.

    Raises:
        ConfigError: all that is wrong in the configuration, and all its conflicts with the arguments.
    """

    def fact(name: str) -> Fact:
        value, is_default = given[name]
        return Fact(value, f"TrainingArguments({name}=...)", is_default)

    (beta1, is_default1), (beta2, is_default2) = given["adam_beta1"], given["adam_beta2"]
    betas = Fact([beta1, beta2], "TrainingArguments(adam_beta1=..., adam_beta2=...)", is_default1 and is_default2)
    rate = fact("learning_rate")
    scheduler = {"warmup_max_lr": rate}
    if num_steps is not None:
        scheduler["total_num_steps"] = Fact(num_steps, "the Trainer's number of steps")
        warmup = num_warmup_steps or 0
        scheduler["warmup_num_steps"] = Fact(warmup, "TrainingArguments(warmup_steps=...)", is_default=not warmup)
    facts = _facts_of(
        resolved,
        process.world_size,
        micro_batch_size=fact("per_device_train_batch_size"),
        accumulation_steps=fact("gradient_accumulation_steps"),
        max_grad_norm=fact("max_grad_norm"),
        optimizer={"lr": rate, "betas": betas, "eps": fact("adam_epsilon"), "weight_decay": fact("weight_decay")},
        scheduler=scheduler,
        hidden_size=hidden_size_of(getattr(model, "config", None)),
        **kinds,
    )
    return resolve_engine_config(resolved.config.deepspeed, facts=facts, partial=num_steps is None)


def _check_groups(job: TrainJob) -> None:
    for optimizer in job.optimizers:
        empty = [index for index, group in enumerate(optimizer.param_groups) if not group["params"]]
        if empty:
            raise ConfigError(
                f"group {empty[0]} of {type(optimizer).__name__} has no parameters, and DeepSpeed drops such groups, "
                "so that a scheduler built on it no longer fits; leave the group out. (Parameters of a model that was "
                "built in pieces under ZeRO-3 have one dimension: tell them apart by name, or by len(p.ds_shape).)"
            )


def _would_take_another_type(model: nn.Module, config: EngineConfig, process: ProcessContext) -> bool:
    """Return whether DeepSpeed 0.19.8 would build a model of another type than its configuration says."""
    if config.stage < 3:
        return False
    first = next(model.parameters(), None)
    if first is not None and not (first.is_floating_point() or hasattr(first, "ds_id")):
        return True  # that of the first parameter, on devices that have fp16
    is_on_disk = config.value("zero_optimization.offload_param.device") == "nvme"
    return config.precision not in _DTYPES and process.device.type == "cpu" and is_on_disk  # bf16


def _check_parameters(job: TrainJob, config: EngineConfig) -> None:
    kind = type(job.model).__name__
    for name, parameter in job.model.named_parameters():
        if job.optimizers and (parameter.is_complex() or parameter.dtype == torch.float64):
            raise ConfigError(
                f"{name!r} of {kind} is in {parameter.dtype}, and DeepSpeed trains in fp32, bf16 or fp16: it would be "
                "cast, or lost; convert it (model.float()), or use strategy 'ddp'"
            )
        if config.stage < 3 or hasattr(parameter, "ds_id"):
            continue
        if not parameter.ndim or not parameter.numel():
            what, hint = "no dimension", "give it one (torch.ones(1), not torch.tensor(1.0))"
            if parameter.ndim:
                what, hint = "no elements", "leave it out of the model"
            raise ConfigError(
                f"{name!r} of {kind} is a parameter of {what}, which ZeRO-3 of DeepSpeed cannot lay out; {hint}, or "
                "use stage 2 or strategy 'fsdp2'"
            )


def _check_compiled(job: TrainJob) -> None:
    for name, module in job.model.named_modules():
        if is_compiled_module(module):
            raise ConfigError(
                f"{repr(name) if name else 'the model'} was given in a wrapper of torch.compile(module), and ZeRO-3 of "
                "DeepSpeed fails in one; compile it in place (module.compile()), or set compile.backend"
            )


def _check_leaf_classes(job: TrainJob, config: EngineConfig) -> None:
    wanted = config.leaf_classes if config.stage == 3 and job.optimizers else ()
    kinds = {type(module) for module in job.model.modules()}
    known = {name for kind in kinds for name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")}
    if wanted and known.isdisjoint(wanted):
        raise ConfigError(
            f"{type(job.model).__name__} has no module of class {' or '.join(wanted)}, which "
            "zero_optimization.leaf_module.classes (deepspeed_moe_layer_cls_names, transformer_moe_cls_names) names: "
            "ranks that run different experts would wait for each other; write the class of its layers of experts, or "
            "take the key out"
        )


def _group_names(model: nn.Module, optimizer: Optimizer | None) -> list[list[str]]:
    names = {id(parameter): uncompiled_name(name) for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in (optimizer.param_groups if optimizer else ())]


def _cast_around(model: nn.Module, engine_config: EngineConfig, config: RunConfig) -> list[RemovableHandle]:
    """Cast inputs and outputs of a model of 16-bit weights, as other strategies do; return the hooks."""
    dtype = _DTYPES.get(engine_config.precision)
    if dtype is None:
        return []

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return cast_floating((args, kwargs), dtype, of=(torch.float32,))

    hooks = [model.register_forward_pre_hook(take, with_kwargs=True)]
    if config.output_dtype != OutputDtype.KEPT:
        policy = PrecisionPolicy(output=torch.float32, casts_beside_loss=config.output_dtype == OutputDtype.FP32)
        hooks.append(model.register_forward_hook(lambda module, args, output: policy.cast_outputs(output)))
    return hooks
