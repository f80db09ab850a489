"""A Trainer's Accelerator, and the model it prepares: for training, with optimizer and schedule, or for evaluation.

Arguments that cannot be honoured are refused here, before anything is built, and those that are set later taken over.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import re
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from transformers import enable_full_determinism, set_seed
from transformers.trainer_pt_utils import get_model_param_count
from transformers.trainer_utils import has_length

from accel_trainer import logging
from accel_trainer.accelerator.accelerated_optimizer import check_in_backward, updates_in_backward
from accel_trainer.accelerator.accelerator import Accelerator
from accel_trainer.accelerator.shared_state import AcceleratorState, PartialState, is_initialized, share_accelerator
from accel_trainer.checkpoint.weights.into_model import init_empty_weights, load_checkpoint_in_model
from accel_trainer.checkpoint.weights.weight_files import INDEX_NAME, WEIGHTS_NAME, WeightFiles
from accel_trainer.config import NonFiniteAction, Resolved, SchedulerSteps
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.deepspeed_plugin import DummyOptim, DummyScheduler
from accel_trainer.runtime.model_wrappers import find_sharded_at_load
from accel_trainer.strategies.api import TrainUnit
from accel_trainer.strategies.broadcast_values import broadcast_buffers
from accel_trainer.strategies.optimizers import parameters_of
from accel_trainer.techniques.muon import Muon, muon_groups
from accel_trainer.trainer.arguments.deepspeed_arguments import complete_engine_config
from accel_trainer.trainer.arguments.fsdp_arguments import (
    check_recomputation,
    loads_after_sharding,
    recomputes_activations,
)
from accel_trainer.trainer.arguments.training_arguments import TAKEN_FIELDS, TrainingArguments, setting
from accel_trainer.trainer.loss import build_smoother
from accel_trainer.trainer.loss_spikes import check_loss_spikes

if TYPE_CHECKING:
    from accel_trainer import Trainer

logger = logging.get_logger(__name__)

_FIXED = sorted(TAKEN_FIELDS - {"data_seed"})
_OF_OPTIMIZER = (
    "optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "optim_target_modules",
)  # fmt: skip

_IN_BACKWARD = re.compile(r"lomo|_layerwise$")
_IN_BACKWARD_OF: WeakKeyDictionary[nn.Module, weakref.ref[Any]] = WeakKeyDictionary()
"""Models whose parameters an optimizer updates by hooks, which stay as long as the model, with that optimizer."""
_UNSAVED = {
    re.compile(r"apollo|galore"): "projector objects",
    re.compile(r"adalomo"): "attributes of its own",
    re.compile(r"grokadamw"): "its parameter groups, by the identity of the parameters",
}
_UNSAVED_SHARDS = {re.compile(r"[48]bit|ademamix"): "blocks or rows that are not those of the parameters"}


def check_arguments(args: Any) -> None:
    """Refuse arguments that have resolved no configuration of ours; have ours take what was assigned since."""
    if isinstance(args, TrainingArguments):
        args.take_assigned()
        return
    kind = type(args)
    way_out = "build that one, its fields are the same"
    if kind is not transformers.TrainingArguments and isinstance(args, transformers.TrainingArguments):
        way_out = (
            f"build the arguments with a dataclass of both, class Arguments({kind.__name__}, "
            "accel_trainer.TrainingArguments), and pass them as args"
        )
    raise ConfigError(
        f"args is a {kind.__module__}.{kind.__name__}, and this Trainer runs on the configuration that "
        f"accel_trainer.TrainingArguments resolves; {way_out}"
    )


def check_dataset(dataset: Any, name: str) -> None:
    """Raise ConfigError for a dataset, or one of a dict of datasets, that has no samples."""
    if isinstance(dataset, dict):
        for key, item in dataset.items():
            check_dataset(item, f"{name}[{key!r}]")
    elif dataset is not None and has_length(dataset) and len(dataset) == 0:
        raise ConfigError(
            f"{name} is empty (a {type(dataset).__name__} with 0 samples); check its path, split and filters"
        )


def build_accelerator(args: TrainingArguments, model: Any) -> Accelerator:
    """Return the Accelerator of a Trainer. Collective.

    Raises:
        ConfigError: the arguments contradict each other, or cannot be honoured on this job.
    """
    _take_num_steps(args)
    uses_state = args.accelerator_config.use_configured_state and is_initialized()
    configured = AcceleratorState().distributed_type if uses_state else None
    resolved = _resolve_for_model(args, model)
    if (sharded := find_sharded_at_load(model)) is not None:
        from accel_trainer.strategies.fsdp2.presharded import check_alone  # FSDP2, which others do without

        check_alone(sharded, resolved)  # before the job is joined
    accelerator = Accelerator(config=complete_engine_config(args, resolved, model))
    if sharded is not None:
        accelerator.take_sharded([model])
    _check_options(args, accelerator)
    _check_restarts(args, accelerator)
    _check_optimizer_name(args, accelerator)
    if accelerator.nonfinite_guard is not None:
        accelerator.nonfinite_guard.roll_back = None  # to a checkpoint of the Trainer's own
    accelerator.gradient_state.plugin_kwargs.update(args.accelerator_config.gradient_accumulation_kwargs or {})
    plain = PartialState(process=accelerator.process).distributed_type
    if configured not in (None, plain, accelerator.distributed_type):
        raise ConfigError(
            f"use_configured_state=True takes the state of an Accelerator that runs {configured.name}, and the "
            f"arguments ask for strategy {accelerator.strategy.name!r}; give the arguments the options of that "
            "Accelerator's strategy as well, or leave use_configured_state out"
        )
    share_accelerator(accelerator.state)
    return accelerator


def _check_options(args: TrainingArguments, accelerator: Accelerator) -> None:
    """Refuse options that a Trainer cannot honour, alone or together."""
    config, describe, facts = accelerator.config, accelerator.resolved.describe, accelerator.strategy.capabilities
    if config.scheduler_steps is SchedulerSteps.PER_PROCESS:
        raise ConfigError(
            f"{describe('scheduler_steps')} is for loops whose schedules are sized in the batches of one process, and "
            "the Trainer sizes its own in updates; leave it out"
        )
    if accelerator.nonfinite_guard and config.on_nonfinite is NonFiniteAction.ROLLBACK and args.save_only_model:
        raise ConfigError(
            f"{describe('on_nonfinite')} goes back to checkpoints, and save_only_model=True leaves out their optimizer "
            "and schedule; leave one of the two out"
        )
    check_recomputation(args, accelerator.resolved)
    check_loss_spikes(args, accelerator)
    if config.optimizer_in_backward and (args.max_grad_norm > 0 or args.gradient_accumulation_steps > 1):
        raise ConfigError(
            f"{describe('optimizer_in_backward')} updates each parameter before the gradients of others are there, and "
            f"max_grad_norm={args.max_grad_norm}, gradient_accumulation_steps={args.gradient_accumulation_steps} would "
            "need all of them; set max_grad_norm=0 and gradient_accumulation_steps=1"
        )
    if args.neftune_noise_alpha and config.parallel.sequence_size > 1:
        raise ConfigError(
            f"neftune_noise_alpha={args.neftune_noise_alpha} is sized by the length of a sequence, of which each rank "
            f"has a slice ({describe('parallel.cp_size')}, {describe('parallel.sp_size')}): leave one of the two out"
        )
    if args.auto_find_batch_size and facts.builds_engine:
        raise ConfigError(
            f"auto_find_batch_size is set with strategy {accelerator.strategy.name!r}, whose engine is built for one "
            "batch size and keeps hold of the memory of an attempt that failed; set per_device_train_batch_size"
        )


def _check_restarts(args: TrainingArguments, accelerator: Accelerator) -> None:
    """Refuse options by which an update has other samples on fewer processes, where some may be lost."""
    config, describe = accelerator.config, accelerator.resolved.describe
    for name in ("auto_find_batch_size", "dataloader_drop_last"):
        if config.launch.min_processes is not None and getattr(args, name):
            raise ConfigError(
                f"{describe('launch.min_processes')} keeps the samples of each update when processes are lost, and "
                f"with {name}=True they depend on how many there are; leave one of the two out"
            )


def _check_optimizer_name(args: TrainingArguments, accelerator: Accelerator) -> None:
    """Refuse an optimizer that updates too early for the arguments, or whose state is saved and cannot be resumed."""
    name = str(getattr(args.optim, "value", args.optim))
    facts = accelerator.strategy.capabilities
    shards = facts.shards_parameters
    if _IN_BACKWARD.search(name):
        steps, norm = args.gradient_accumulation_steps, args.max_grad_norm
        default = TrainingArguments.__dataclass_fields__["max_grad_norm"].default
        waits = {
            f"all micro-batches have given theirs (gradient_accumulation_steps={steps})": steps > 1,
            f"their norm is known (max_grad_norm={norm:g}; 0 clips nothing)": norm not in (0, default),
            "an attempt is known to fit (auto_find_batch_size)": bool(args.auto_find_batch_size),
        }
        check_in_backward(f"optim={name!r}", accelerator.config, accelerator.process, facts, waits)
        if norm:
            logger.warning(
                "optim=%r updates each parameter in the backward: gradients are not clipped to max_grad_norm=%g, the "
                "default, and no grad_norm is logged; set max_grad_norm=0 to say so",
                name, norm,
            )  # fmt: skip
    if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no" or args.save_only_model:
        return
    for pattern, place in {**_UNSAVED, **(_UNSAVED_SHARDS if shards else {})}.items():
        if pattern.search(name):
            raise ConfigError(
                f"optim={name!r} keeps its state in {place}, which a checkpoint{' of shards' * shards} cannot bring "
                "back: a resumed run would not be the interrupted one; set save_only_model=True or save_strategy='no', "
                "or use an optimizer of torch"
            )


def _take_num_steps(args: TrainingArguments) -> None:
    """Take `num_steps` of `gradient_accumulation_kwargs` as the accumulation steps of the arguments."""
    given = args.accelerator_config.gradient_accumulation_kwargs or {}
    if "num_steps" not in given:
        return
    if args.gradient_accumulation_steps > 1 and args.gradient_accumulation_steps != given["num_steps"]:
        raise ConfigError(
            "The `AcceleratorConfig`'s `num_steps` is set but `gradient_accumulation_steps` is greater than 1 in the "
            f"passed `TrainingArguments` ({given['num_steps']} and {args.gradient_accumulation_steps}); keep one"
        )
    args.gradient_accumulation_steps = given["num_steps"]


def _recomputes(model: Any, args: TrainingArguments) -> bool:
    """Whether activations are computed again in the backward."""
    new_name = "is_activation_checkpointing"  # older releases have the other one, which the newest deprecates
    by_model = getattr(model, new_name if hasattr(type(model), new_name) else "is_gradient_checkpointing", False)
    return recomputes_activations(args) or bool(by_model)


def _resolve_for_model(args: TrainingArguments, model: Any) -> Resolved:
    """Return the configuration of the Trainer's Accelerator.

    The Trainer makes the windows and divides the loss itself, so the Accelerator accumulates nothing. DDP looks for
    unused parameters unless the user decides: a pooler or a second head without gradient would stop it. Its loaders
    are made as `dataloader_pin_memory` says.
    """
    resolved, config = args.resolved, args.resolved.config
    changes: dict[str, Any] = {"accumulation": dataclasses.replace(config.accumulation, num_steps=1)}
    if not resolved.is_set("data.pin_memory"):
        changes["data"] = dataclasses.replace(config.data, pin_memory=False)
    if not resolved.is_set("ddp.find_unused_parameters") and not config.ddp.static_graph:
        changes["ddp"] = dataclasses.replace(config.ddp, find_unused_parameters=not _recomputes(model, args))
    return dataclasses.replace(resolved, config=dataclasses.replace(config, **changes))


def create_optimizer(trainer: Trainer, max_steps: int) -> Any:
    """Return the Trainer's optimizer, made by whichever of its methods the subclass overrides.

    A `create_optimizer_and_scheduler` of the subclass makes the schedule, too: transformers documents it as the method
    to override, and has no call of it (5.17 to 5.23).

    Raises:
        ConfigError: the method has made none.
    """
    _check_hooks(trainer)
    name = "create_optimizer_and_scheduler"
    if _overrides(trainer, name):
        if trainer.lr_scheduler is trainer._schedule_of_both:
            trainer.lr_scheduler = None  # of an earlier train()
        trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
        trainer._schedule_of_both = trainer.lr_scheduler
    else:
        given = trainer.optimizer_cls_and_kwargs
        if given is None and trainer.args.optim == "muon":
            given = Muon, _muon_arguments(trainer)
        with setting(trainer, optimizer_cls_and_kwargs=given):
            # Without the model, which overrides need not take: upstream gives it to FSDP1 only.
            trainer.create_optimizer()
        name = "create_optimizer"
    if (
        find_sharded_at_load(trainer.model) is not None
        and trainer.args.optim != "muon"
        and not _overrides(trainer, "create_optimizer")
    ):
        _join_groups(trainer, trainer.optimizer)
    if trainer.optimizer is None:
        raise ConfigError(
            f"{name}() of {type(trainer).__name__} left self.optimizer at None; set it to the optimizer to train with"
        )
    if updates_in_backward(trainer.optimizer):
        _IN_BACKWARD_OF[trainer.model] = weakref.ref(trainer.optimizer)
    return trainer.optimizer


def _check_hooks(trainer: Trainer) -> None:
    """Refuse a second optimizer for a model whose gradients the hooks of an earlier one take."""
    earlier = _IN_BACKWARD_OF.get(trainer.model)
    if earlier is not None and earlier() is not trainer.optimizer:
        raise ConfigError(
            f"an optimizer made earlier updates the parameters of this {type(trainer.model).__name__} in the backward, "
            "by hooks that stay on them and would leave another one no gradients; build the model anew, or give the "
            "Trainer a model_init"
        )


def _muon_arguments(trainer: Trainer) -> dict[str, Any]:
    """Return the arguments of `Muon`: its groups, each in two, with and without weight decay as upstream's are."""
    args, kinds = trainer.args, {"momentum": float, "ns_steps": int}
    decaying = set(trainer.get_decay_parameter_names(trainer.model))
    decays = {id(parameter): name in decaying for name, parameter in trainer.model.named_parameters()}
    options: dict[str, Any] = {}
    for item in (args.optim_args or "").replace(" ", "").split(","):
        name, _, value = item.partition("=")
        try:
            options |= {name: kinds[name](value)} if item else {}
        except (KeyError, ValueError):
            raise ConfigError(
                f"optim_args={args.optim_args!r} has {item!r} for optim='muon'; expected momentum=0.95,ns_steps=5"
            ) from None
    groups = [
        {**group, "params": own, "weight_decay": args.weight_decay * is_decaying}
        for group in muon_groups(trainer.model)
        for is_decaying in (True, False)
        if (own := [parameter for parameter in group["params"] if decays[id(parameter)] is is_decaying])
    ]
    betas = args.adam_beta1, args.adam_beta2
    return {"params": groups, "lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, **options}


def _join_groups(trainer: Trainer, optimizer: Any) -> None:
    """Make the two groups of upstream's optimizer again that it splits by meshes (5.23, trainer.py:1287).

    A checkpoint has the same groups then whatever the layout; the unit updates each mesh's parameters by themselves.
    """
    if len(getattr(optimizer, "param_groups", ())) <= 2:
        return
    decaying = set(trainer.get_decay_parameter_names(trainer.model))
    parts: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            parts[name not in decaying][id(parameter)] = parameter
    groups = []
    for part in parts:
        split = [group for group in optimizer.param_groups if part.keys() >= set(map(id, group["params"]))]
        groups += [{**split[0], "params": list(part.values())}] if split else []
    if sum(len(group["params"]) for group in groups) == len(parameters_of(optimizer)):
        optimizer.param_groups[:] = groups


def _warn_of_unused(trainer: Trainer, builds_optimizer: bool, builds_scheduler: bool) -> None:
    """Warn of methods of a subclass that are not called, because an engine's configuration takes their place."""
    optimizer_methods = ("create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs")
    for key, is_built, names in (
        ("optimizer", builds_optimizer, optimizer_methods),
        ("scheduler", builds_scheduler, ("create_scheduler",)),
    ):
        unused = [name for name in names if is_built and _overrides(trainer, name)]
        if unused:
            logger.warning(
                "%s() of %s is not called: the engine's configuration describes the %s; take `%s` out of it to train "
                "with what the method makes",
                unused[0], type(trainer).__name__, key, key,
            )  # fmt: skip


def _overrides(trainer: Trainer, name: str) -> bool:
    """Return whether a method of the Trainer is another one than that of transformers."""
    return getattr(type(trainer), name) is not getattr(transformers.Trainer, name)


_EMPTY: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()
"""Models without values that are to be sharded, and the directories of their weights."""


def load_model(model: Any, args: TrainingArguments) -> nn.Module | None:
    """Return `model`, or the model saved under a path or a hub name, of the class that its configuration names.

    One that will be sharded with `fsdp.cpu_ram_efficient_loading`, from a directory of safetensors, has no values yet:
    `fill_empty` loads them once it is sharded.

    Raises:
        ConfigError: it is neither a module nor a path, or its configuration names no class.
    """
    if model is None or isinstance(model, nn.Module):
        return model
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module, or the path or name of a saved model. "
            "Pass a function that builds the model as model_init"
        )
    config = transformers.AutoConfig.from_pretrained(model)
    names = getattr(config, "architectures", None) or []
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise ConfigError(
            f"the configuration of {str(model)!r} names {names or 'no architecture'}, which transformers cannot build; "
            "load the model with the class you want, and pass it"
        )
    empty = None
    if loads_after_sharding(args.resolved):
        empty = _build_empty(model_class, config, Path(model))
    loaded: nn.Module = model_class.from_pretrained(model) if empty is None else empty
    return loaded


def _build_empty(model_class: Any, config: Any, directory: Path) -> nn.Module | None:
    """Return the model without values, or None where ranks cannot read their shards of its files."""
    if not any((directory / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME)):
        return None
    with init_empty_weights():
        model: Any = model_class._from_config(config)
    if not set(WeightFiles(directory)) <= set(model.state_dict(keep_vars=True)):
        return None  # from_pretrained renames or fuses what is in the files
    # from_pretrained() reads it beside the weights, and _from_config() does not: generate() would have other defaults.
    if (directory / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    _EMPTY[model] = directory
    empty: nn.Module = model.eval()
    return empty


def fill_empty(model: nn.Module) -> None:
    """Load a model that `load_model` has built without values, once it is sharded. Every rank calls it."""
    directory = _EMPTY.pop(model, None)
    if directory is not None:
        load_checkpoint_in_model(model, directory, init_missing=True)


def _check_known(trainer: Trainer) -> None:
    """Refuse a model that was sharded while it was loaded, and that the Trainer was not built with."""
    if not trainer.is_sharded and (sharded := find_sharded_at_load(trainer.model)) is not None:
        raise ConfigError(
            f"{type(sharded).__name__} was sharded by from_pretrained(distributed_config=...), and came from "
            "model_init or was set later, when the Trainer had been built for data that every rank reads by itself; "
            "load it before, and pass it as model"
        )


class ModelPreparation:
    """The prepared model of one Trainer, and the optimizer state that outlives an engine around it.

    An engine that is a module around the model, with the optimizer in it, is built for one `train()` or `evaluate()`
    and released before the next.
    """

    def __init__(self) -> None:
        self._unit: TrainUnit | None = None
        self._optimizer_state: dict[str, Any] | None = None
        """Of an engine that was released, for the next one to load."""
        self._builds_optimizer = False
        """Whether the engine builds the optimizer, as its configuration describes it."""
        self._cast: tuple[weakref.ref[nn.Module], str] | None = None
        """A model whose weights an evaluation has rounded, and the argument that asked for it."""

    def prepare_for_training(self, trainer: Trainer, max_steps: int) -> nn.Module:
        """Prepare the model, build optimizer and schedule, and return the module to call. Collective.

        Raises:
            ConfigError: an engine's configuration contradicts the arguments, or leaves something open.
        """
        _check_known(trainer)
        if trainer.accelerator.strategy.capabilities.builds_engine:
            return self._build_engine(trainer, max_steps)
        model: nn.Module
        if trainer.is_sharded:
            model = trainer.accelerator.prepare_model(trainer.model)
            self._adopt(trainer, model)
            # Built from the sharded parameters: nothing has to be re-bound, unless the user has given it.
            trainer.optimizer = trainer.accelerator.prepare_optimizer(create_optimizer(trainer, max_steps))
        else:
            # Together, so that the optimizer follows parameters that a move to the device makes anew.
            optimizer = create_optimizer(trainer, max_steps)
            model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, optimizer)
            trainer.model_wrapped = model
        trainer.create_scheduler(num_training_steps=max_steps)
        return model

    def check_not_cast(self, trainer: Trainer) -> None:
        """Raise ConfigError where an evaluation has rounded the weights that are to be trained."""
        if self._cast is not None and self._cast[0]() is trainer.model:
            option = self._cast[1]
            raise ConfigError(
                f"an evaluation with {option}=True has cast the weights to 16 bits, in which train() would go on; "
                f"train first, evaluate with another Trainer, or leave {option} out"
            )

    def prepare_for_evaluation(self, trainer: Trainer) -> tuple[nn.Module, float | None]:
        """Return the module to call, and the seconds it took to prepare it, if it was not yet. Collective."""
        _check_known(trainer)
        args, accelerator = trainer.args, trainer.accelerator
        model = trainer.model
        if (args.fp16_full_eval or args.bf16_full_eval) and not trainer.is_in_train:
            # Before it is prepared: a sharded model owns its placement.
            model = self._to_half(model, args, None if trainer.is_sharded else args.device)
        if model is trainer.model and not accelerator.is_prepared(model):
            start_time = time.time()
            model = accelerator.prepare_model(model, evaluation_mode=True)
            self._adopt(trainer, model)
            return model, round(time.time() - start_time, 4)
        # Statistics of batch norm are of each rank's own last batch: without this, ranks evaluate other models.
        # A sharded model sends them by itself.
        keeps_apart = trainer.is_sharded or accelerator.unit_of(trainer.model).keeps_buffers_apart
        if accelerator.num_processes > 1 and not keeps_apart:
            broadcast_buffers(trainer.model, accelerator.device)
        # An engine, in training too: it computes in its own dtype, and gathers the parameters that it has sharded.
        return (trainer.model_wrapped if trainer.is_sharded else model), None

    def _to_half(self, model: nn.Module, args: Any, device: torch.device | None) -> nn.Module:
        """Return the model in 16 bits, on another device if one is given; take note of what that has rounded."""
        option, dtype = ("fp16_full_eval", torch.float16) if args.fp16_full_eval else ("bf16_full_eval", torch.bfloat16)
        if any(parameter.dtype.itemsize > dtype.itemsize for parameter in model.parameters()):
            self._cast = weakref.ref(model), option
        return model.to(dtype=dtype, device=device)

    def release(self) -> None:
        """Take the engine of an earlier train() or evaluate() off the model; keep its optimizer's state. Collective."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.model is not unit.module and not unit.is_released:
            # Before the release, which lets go of the engine: it alone knows which rank has which part.
            self._optimizer_state = unit.checkpoint_io().full_optimizer_state() if unit.optimizers else None
            unit.release()

    def _adopt(self, trainer: Trainer, model: nn.Module) -> None:
        fill_empty(model)
        self._unit = trainer.accelerator.unit_of(model)
        trainer.model_wrapped = model
        if trainer.accelerator.strategy.capabilities.builds_engine:
            trainer.deepspeed = model

    def _build_engine(self, trainer: Trainer, max_steps: int) -> nn.Module:
        """Build an engine around model and optimizer, and return it; `trainer.model` stays the bare model."""
        self.release()
        args, accelerator = trainer.args, trainer.accelerator
        describes = args.hf_deepspeed_config.get_value
        if self._builds_optimizer:
            trainer.optimizer = None  # the engine built that of the earlier train()
        self._builds_optimizer = trainer.optimizer is None and bool(describes("optimizer"))
        if not self._builds_optimizer:
            optimizer = self._create_optimizer(trainer, max_steps)
        builds_scheduler = trainer.lr_scheduler is None and bool(describes("scheduler"))
        _warn_of_unused(trainer, self._builds_optimizer, builds_scheduler)
        # Only now are the model's sizes and the number of updates known, which the configuration may leave open.
        accelerator.reconfigure(
            complete_engine_config(
                args,
                _resolve_for_model(args, trainer.model),
                trainer.model,
                num_steps=max_steps,
                given_optimizer="dummy" if self._builds_optimizer else "torch",
                given_scheduler="dummy" if builds_scheduler else "torch",
            )
        )
        if self._builds_optimizer:
            optimizer = DummyOptim([parameter for parameter in trainer.model.parameters() if parameter.requires_grad])
        engine: nn.Module
        if builds_scheduler:
            # It steps with the engine: create_scheduler() finds it, and makes none.
            engine, trainer.optimizer, trainer.lr_scheduler = accelerator.prepare(
                trainer.model, optimizer, DummyScheduler(optimizer)
            )
            trainer._created_lr_scheduler = True
        else:
            engine, trainer.optimizer = accelerator.prepare(trainer.model, optimizer)
            trainer.create_scheduler(num_training_steps=max_steps)
        self._adopt(trainer, engine)
        if self._optimizer_state is not None:
            self._restore(trainer, self._optimizer_state)
            self._optimizer_state = None
        return engine

    def _create_optimizer(self, trainer: Trainer, max_steps: int) -> Any:
        optimizer = create_optimizer(trainer, max_steps)
        # Of a model whose every parameter decays, or none. DeepSpeed drops empty groups, and schedules count them: a
        # schedule of the user's does already, and is refused with its group.
        if trainer.lr_scheduler is None:
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _restore(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Load the optimizer's state of an earlier train(); its options, such as the learning rate, begin anew."""
        groups = trainer.optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        trainer.accelerator.unit_of(trainer.model).checkpoint_io().load_full_optimizer_state(state)
        for group, own in zip(groups, options, strict=True):
            group.update(own)


@contextmanager
def keeping_global_batch(trainer: Trainer) -> Iterator[None]:
    """Context in which updates on fewer processes than the job began with have the samples of the first start.

    A micro-batch is not larger than then: each process has the memory that it had.

    Raises:
        ConfigError: on every rank: the samples cannot be shared out over the processes that are left.
    """
    args, process, ranks = trainer.args, trainer.accelerator.process, trainer.accelerator.readers.world_size
    first = trainer.accelerator.config.launch.num_processes
    if first is None or first == process.world_size or trainer.accelerator.config.data.split_batches:
        yield
        return
    given = args.per_device_train_batch_size, args.gradient_accumulation_steps
    ranks_first = ranks * first // process.world_size
    words = f"{given[0]} x {given[1]} x {ranks_first} (micro-batch x accumulation x ranks) on {first} processes"
    update_batch = math.prod(given) * ranks_first
    share, rest = divmod(update_batch, ranks)
    if rest:
        raise ConfigError(
            f"an update has {update_batch} samples = {words}, and the {process.world_size} that are left cannot share "
            f"them out: {update_batch} / {ranks} is no whole number. Choose a batch size and an accumulation whose "
            "product with num_processes has all numbers of ranks as divisors, or give num_processes another MIN:MAX"
        )
    micro = max(size for size in range(1, given[0] + 1) if share % size == 0)
    logger.warning(
        "%d of %d processes are left: an update has %d samples as before = %d x %d x %d, instead of %s",
        process.world_size, first, update_batch, micro, share // micro, ranks, words,
    )  # fmt: skip
    with (
        setting(trainer, given_batch=given, _train_batch_size=micro),
        setting(args, per_device_train_batch_size=micro, gradient_accumulation_steps=share // micro),
    ):
        yield


class TakenArguments:
    """The arguments that a Trainer has made something of, as they were then; it reads all others when it uses them.

    transformers 5.23 takes these where a Trainer is built, and the optimizer's at the first train(): whatever is set
    later has no effect there, but for the seed and the optimizer of a Trainer with `model_init`.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._values: dict[str, Any] = {}
        self._owns_optimizer = False
        for name in (*_FIXED, "data_seed", "label_smoothing_factor", "neftune_noise_alpha", "seed", "train_batch_size"):
            self._find_change(args, name)

    def begin(self, trainer: Trainer) -> None:
        """Begin a train() with the arguments' present values.

        Raises:
            ConfigError: one was set that the configuration was resolved from, or a batch size is out of range.
        """
        args = trainer.args
        args.check_batch_sizes()
        for name in _FIXED:
            before = self._values[name]
            if self._find_change(args, name):
                raise ConfigError(
                    f"args.{name} was set to {getattr(args, name)!r} after the Trainer had been built with {before!r}, "
                    "which it is prepared for; make new arguments and a new Trainer"
                )
        if self._find_change(args, "train_batch_size"):
            trainer._train_batch_size = args.train_batch_size
        if self._find_change(args, "seed"):
            (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
        if self._find_change(args, "label_smoothing_factor"):
            trainer.label_smoother = build_smoother(
                trainer.model, args.label_smoothing_factor, shifts=trainer._loss_shifts_labels
            )
        if self._find_change(args, "neftune_noise_alpha"):
            trainer.neftune_noise_alpha = args.neftune_noise_alpha
        if self._find_change(args, "data_seed"):
            trainer.accelerator.dataloader_config.data_seed = args.data_seed
        trainer.accelerator.renew_shuffle_seed()

    def renew_optimizer(self, trainer: Trainer, max_steps: int) -> None:
        """Build the optimizer anew if its options were set to others since it was built; its state stays.

        An optimizer that the user has given keeps the options that it has.
        """
        changed = [name for name in _OF_OPTIMIZER if self._find_change(trainer.args, name)]
        before = trainer.optimizer
        if before is None:
            self._owns_optimizer = True  # it is about to be built
        if before is None or not changed or not self._owns_optimizer:
            return
        # Upstream's create_optimizer() makes none where there is one (5.23, trainer.py:1271).
        trainer.optimizer = None
        if trainer.accelerator.strategy.capabilities.builds_engine:
            return  # the next engine takes the state of the last one
        optimizer = create_optimizer(trainer, max_steps)
        if type(optimizer) is type(before):
            optimizer.state.update(before.state)
        logger.info("%s of the arguments changed: the optimizer goes on with them", ", ".join(changed))

    def _find_change(self, args: TrainingArguments, name: str) -> bool:
        """Return whether a value is another one than at the last call; take it."""
        value = getattr(args, name)
        is_changed = name in self._values and self._values[name] != value
        # A copy: a dict or a list that is changed in place would equal itself at the next call.
        self._values[name] = copy.deepcopy(value)
        return is_changed


def count_multiplying(model: Any) -> int:
    """Return the number of a model's parameters but embeddings, also of those that other ranks hold."""
    embeddings = nn.ModuleList(module for module in model.modules() if isinstance(module, nn.Embedding))
    # Under ZeRO-3 a rank holds partitions, which num_parameters() counts as nothing.
    num_elsewhere = _count_elsewhere(model) - _count_elsewhere(embeddings)
    return int(model.num_parameters(exclude_embeddings=True)) + num_elsewhere


def _count_elsewhere(module: nn.Module) -> int:
    """Return the number of elements of a module's parameters that this rank does not hold."""
    num_held = sum(parameter.numel() for parameter in module.parameters())
    return int(get_model_param_count(module)) - num_held
