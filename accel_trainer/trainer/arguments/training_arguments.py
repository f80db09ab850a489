"""TrainingArguments: upstream's fields, resolved through our configuration, with our runtime underneath."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import transformers
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import ParallelMode
from transformers.utils.import_utils import enable_tf32, is_torch_tf32_available

from accel_trainer import logging
from accel_trainer.accelerator.options import SetOption, check_division, check_num_processes, set_options, show_option
from accel_trainer.accelerator.shared_state import (
    AcceleratorState,
    PartialState,
    is_initialized,
    share_process,
    stated_waits,
)
from accel_trainer.big_models.device_map import convert_file_size_to_int
from accel_trainer.checkpoint.background import SavePolicy
from accel_trainer.checkpoint.reader import check_verify
from accel_trainer.config import Compat, LossDivision, LossImplementation, Resolved, Source, SourceKind, field_specs
from accel_trainer.config.description import documentation
from accel_trainer.config.parallel import axis_sizes
from accel_trainer.config.schema import thaw
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.plugins.parallelism import ParallelismConfig
from accel_trainer.runtime.process import find_process, hidden_variable, init_process, read_environment
from accel_trainer.tracking import mask_secrets, redact
from accel_trainer.trainer.arguments.deepspeed_arguments import deepspeed_options, start_engine, unsharded_models
from accel_trainer.trainer.arguments.fsdp_arguments import fill_fsdp_fields, forms_group_later, resolve_arguments

logger = logging.get_logger(__name__)

# Option that an argument sets. One at its default was not given: a file or the environment may decide.
_OPTIONS = {
    "activation_checkpointing_policy": "activation_checkpointing",
    "activation_offload": "activation_offload",
    "checkpoint_mib_per_second": "checkpoint_mib_per_second",
    "checkpoint_uri": "checkpoint_uri",
    "compat": "compat",
    "data_seed": "data.data_seed",
    "dataset_mixture": "dataset_mixture",
    "ddp_broadcast_buffers": "ddp.broadcast_buffers",
    "ddp_bucket_cap_mb": "ddp.bucket_cap_mb",
    "ddp_find_unused_parameters": "ddp.find_unused_parameters",
    "ddp_static_graph": "ddp.static_graph",
    "ddp_timeout": "timeout_seconds",
    "ema_decay": "ema_decay",
    "local_steps": "local_steps",
    "local_steps_after": "local_steps_after",
    "loss_chunk_tokens": "loss_chunk_tokens",
    "loss_division": "accumulation.loss_division",
    "loss_implementation": "loss",
    "max_rollbacks": "max_rollbacks",
    "meters": "meters",
    "on_changed_run": "on_changed_run",
    "on_nonfinite": "on_nonfinite",
    "optimizer_in_backward": "optimizer_in_backward",
    "outer_optimizer_lr": "outer_optimizer.lr",
    "outer_optimizer_momentum": "outer_optimizer.momentum",
    "outer_optimizer_nesterov": "outer_optimizer.nesterov",
    "peak_flops": "peak_flops",
    "preempt_grace_s": "preemption.grace_seconds",
    "preempt_signals": "preemption.signals",
    "save_async": "save_async",
    "slow_rank_updates": "slow_rank_updates",
    "use_cpu": "use_cpu",
}
_TAKEN = {
    "accumulation.micro_batch_size": "per_device_train_batch_size",
    "accumulation.num_steps": "gradient_accumulation_steps",
}
"""Arguments of transformers' that an option gives, by its path, where they have their defaults."""
MIRRORED_FIELDS: frozenset[str] = frozenset(_OPTIONS) | {
    "accelerator_config", "bf16", "deepspeed", "fp16", "fsdp", "fsdp_config", "parallelism_config", "torch_compile",
    "torch_compile_backend", "torch_compile_mode",
}  # fmt: skip
"""Fields whose values, with their sources, are those of the resolved configuration."""
TAKEN_FIELDS = MIRRORED_FIELDS | {"ddp_backend"}
"""Those, and the one that the process group alone is made of."""
_LEFT_OPEN = ("loss_division", "on_changed_run", "on_nonfinite")
"""Options whose default is that of `compat`: None was not given."""
_COMPAT_FIELDS = ("eval_loss_weighting", "logging_nan_inf_filter")
"""Arguments of the Trainer's alone with such a default."""
_DATA_OPTIONS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
"""Of `accelerator_config`."""
_ACCUMULATION_OPTIONS = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
"""Of its `gradient_accumulation_kwargs`."""
_LATE = {
    **{name: _OPTIONS[name] for name in _OPTIONS.keys() - {"compat", "ddp_timeout", "use_cpu"}},
    **{f"accelerator_config.{name}": f"data.{name}" for name in _DATA_OPTIONS},
}
"""Options of fields that may be assigned until a Trainer is built: the arguments make nothing else of them."""
_ARGUMENT_NAMES = {
    **{option: name for name, option in _OPTIONS.items()},
    **{f"data.{name}": f"accelerator_config.{name}" for name in _DATA_OPTIONS},
    "accumulation.sync_each_batch": "accelerator_config.gradient_accumulation_kwargs.sync_each_batch",
    "compile.backend": "torch_compile_backend",
    "compile.mode": "torch_compile_mode",
    **{path: path.replace("parallel.", "parallelism_config.") for path in field_specs() if "parallel." in path},
    "strategy": "deepspeed",  # where `fsdp` does not
}
"""Argument that gives an option, by dotted path, where that depends on nothing else."""


def _defaults(arguments: type) -> dict[str, Any]:
    """Return the default of each field, or its factory."""
    return {item.name: (item.default, item.default_factory) for item in fields(arguments)}


def _annotated(cls: type) -> set[str]:
    """Return the names that the class itself annotates, which are those of its own fields."""
    if sys.version_info >= (3, 14):
        import annotationlib  # a class body of 3.14 has a function in their place, which fails where a name comes later

        return set(annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF))
    return set(inspect.get_annotations(cls))


def _argument(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


def _mirrored(name: str) -> Any:
    """Return a field with the default and the help of the option that it sets."""
    option = _OPTIONS[name]
    default = None if name in _LEFT_OPEN else thaw(field_specs()[option].default)
    return _argument(default, documentation().get(option, ""))


def _upstreams(name: str) -> Any:
    """Return a field with upstream's default and help."""
    item = transformers.TrainingArguments.__dataclass_fields__[name]
    return field(default=item.default, metadata=item.metadata)


@contextlib.contextmanager
def setting(target: object, **values: Any) -> Iterator[None]:
    """Context in which attributes, most often of arguments, have other values."""
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@dataclass(repr=False)
class TrainingArguments(transformers.TrainingArguments):
    """Upstream's TrainingArguments with the same fields, running on accel_trainer.

    Differences: `fsdp_config` and `deepspeed` also take YAML, `accelerate config` files and packaged names, and refuse
    unknown keys; `ddp_timeout` holds on every device; `fsdp` and `deepspeed` with `use_cpu` shard on the CPU;
    `activation_checkpointing` also takes what `activation_checkpointing_policy` does.

    Attributes:
        resolved: every option of the run with its origin.
        hf_deepspeed_config: under DeepSpeed, its configuration as transformers looks it up; else None.
    """

    if TYPE_CHECKING:
        # Fields of upstream's that are assigned here; with defaults, or they would be required arguments.
        accelerator_config: Any = None
        activation_checkpointing: Any = None
        deepspeed: Any = None
        fsdp: Any = None
        fsdp_config: Any = None
        optim: str = ""
        parallelism_config: Any = None
        max_grad_norm: float = 1.0
        gradient_accumulation_steps: int = 1
        torch_compile_backend: str | None = None
        torch_compile_mode: str | None = None
    else:
        # Of upstream's types a command line could give neither optim="muon" nor a mapping as JSON text.
        optim: str = _upstreams("optim")
        parallelism_config: dict[str, Any] | str | None = _upstreams("parallelism_config")

    compat: Literal["none", "transformers"] = _mirrored("compat")
    eval_loss_weighting: Literal["token", "batch"] | None = _argument(
        None,
        "How batches are averaged in the evaluation loss: 'token' gives the exact mean over all label tokens, whatever "
        "the batch size; 'batch' weighs each batch by its rows, as upstream on one process. None is 'token', and "
        "'batch' with compat.",
    )
    on_save_error: Literal["raise", "warn", "pause"] = _argument(
        "raise",
        "What to do where a checkpoint cannot be written for the disk's sake: 'raise' ends the run, 'warn' goes on "
        "without that checkpoint, 'pause' tries again every minute, for max_pause_s seconds.",
    )
    save_async: bool = _mirrored("save_async")
    checkpoint_uri: str | None = _mirrored("checkpoint_uri")
    checkpoint_mib_per_second: float | None = _mirrored("checkpoint_mib_per_second")
    max_pause_s: float = _argument(3600.0, "With on_save_error='pause': seconds after which the error is raised.")
    on_loss_spike: Literal["off", "warn", "skip_batch", "rollback"] = _argument(
        "off",
        "What to do with an update whose loss is loss_spike_threshold deviations above the median of those before it: "
        "'warn' names its samples, 'skip_batch' leaves it out, 'rollback' loads the newest checkpoint and goes on with "
        "the data behind it.",
    )
    loss_spike_threshold: float = _argument(
        6.0, "With on_loss_spike: standard deviations above the median of the last 100 updates."
    )
    on_nonfinite: Literal["raise", "skip_step", "rollback", "warn"] | None = _mirrored("on_nonfinite")
    on_changed_run: Literal["auto", "refuse", "warn"] | None = _mirrored("on_changed_run")
    loss_division: Literal["exact", "transformers"] | None = _mirrored("loss_division")
    loss_implementation: Literal["plain", "chunked", "liger"] = _mirrored("loss_implementation")
    loss_chunk_tokens: int | None = _mirrored("loss_chunk_tokens")
    local_steps: int | None = _mirrored("local_steps")
    local_steps_after: int = _mirrored("local_steps_after")
    activation_checkpointing_policy: str = _mirrored("activation_checkpointing_policy")
    activation_offload: bool = _mirrored("activation_offload")
    outer_optimizer_lr: float | None = _mirrored("outer_optimizer_lr")
    outer_optimizer_momentum: float = _mirrored("outer_optimizer_momentum")
    outer_optimizer_nesterov: bool = _mirrored("outer_optimizer_nesterov")
    max_rollbacks: int = _mirrored("max_rollbacks")
    meters: bool = _mirrored("meters")
    peak_flops: float | None = _mirrored("peak_flops")
    slow_rank_updates: int = _mirrored("slow_rank_updates")
    ema_decay: float | None = _mirrored("ema_decay")
    optimizer_in_backward: bool = _mirrored("optimizer_in_backward")
    preempt_signals: str = _argument(
        "SIGTERM,SIGUSR1,SIGINT",
        "Signals at which a run that saves checkpoints saves one and ends with exit code 85, at the next micro-batch, "
        "update or evaluation batch, the same on all ranks; a second one of the same name, 3 s later or more, acts as "
        "ever. '' leaves all signals alone.",
    )
    preempt_grace_s: float | None = _mirrored("preempt_grace_s")
    pad_batches_to_multiple_of: int | None = _argument(
        None,
        "Length that the data collator pads batches to a multiple of. That of the longest row gives every batch one "
        "shape, as TPUs want.",
    )
    dataset_mixture: dict[str, Any] | str | None = field(
        default=None, metadata={"help": documentation().get("dataset_mixture", "")}
    )
    packing: bool = _argument(
        False,
        "Whether to train on rows of max_length tokens, of several documents that see nothing of each other.",
    )
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = _argument(
        "bfd",
        "How documents are packed: 'bfd' (best fit decreasing) cuts off what is longer than a row, 'bfd_split' makes "
        "pieces of it, 'wrapped' fills each row and cuts where it ends.",
    )
    max_length: int | None = _argument(1024, "With packing: tokens of a row. Without, nothing is cut.")
    padding_free: bool = _argument(
        False,
        "Whether to put the documents of a training batch into one row without padding. Flash attention always gets "
        "packed rows this way; other attention computes the square of the row's length.",
    )
    logging_nan_inf_filter: bool | None = _argument(
        None,
        "Whether to log the mean so far in place of a NaN or infinite loss, which hides it: upstream's default, and "
        "that of compat.",
    )
    report_html: bool = _argument(
        False,
        "Whether to write report.html into output_dir at the end of training: curves, the time split and the "
        "configuration, in one page.",
    )
    preflight: Literal["off", "warn", "refuse"] = _argument(
        "off",
        "Whether to plan the peak of each rank before anything is prepared, which takes seconds, and to 'warn' or "
        "'refuse' where its device has less memory.",
    )
    preflight_memory: str | None = _argument(
        None, "With preflight: memory that a rank may take, '80GiB' for one; None is what is free on its device."
    )
    fingerprint_every: int = _argument(
        0,
        "Write sums of the bits of what each module computes, its gradients and its weights to "
        "output_dir/fingerprints.jsonl, in every so many updates, for `accel-trainer report --diff`; 0 writes none.",
    )
    profile: str | None = _argument(
        None,
        "START:STOP: updates of which torch's profiler writes a trace to output_dir/profile, from START to the one "
        "before STOP; on a GPU a snapshot of its memory, too.",
    )
    profile_ranks: str = _argument("0", "With profile: ranks that write one, with commas between them, or 'all'.")
    verify: Literal["full", "size", "off"] = _argument(
        "full",
        "How files of a checkpoint are compared with what was saved, before a resume or before the best model is "
        "loaded: 'full' compares contents, 'size' lengths, 'off' nothing, for a checkpoint that you have changed "
        "yourself.",
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a dataclass in which defaults here would replace those of another library's arguments."""
        super().__init_subclass__(**kwargs)
        usual = _defaults(transformers.TrainingArguments)
        redefined = _annotated(cls)
        for base in cls.__mro__[cls.__mro__.index(TrainingArguments) + 1 :]:
            if base in TrainingArguments.__mro__ or not issubclass(base, transformers.TrainingArguments):
                continue
            changed = {name for name, value in _defaults(base).items() if name in usual and value != usual[name]}
            lost = sorted(changed - redefined) + ["__post_init__"] * ("__post_init__" in vars(base))
            if lost:
                raise ConfigError(
                    f"{cls.__name__} names {base.__name__} after accel_trainer.TrainingArguments, whose "
                    f"{', '.join(lost)} would come before its own; name it first: "
                    f"class {cls.__name__}({base.__name__}, accel_trainer.TrainingArguments)"
                )

    def __post_init__(self) -> None:
        """Resolve the configuration, then let upstream derive and check the rest."""
        self._take_checkpointing_policy()
        untouched = [item.name for item in fields(self) if getattr(self, item.name) == _default(item)]
        self.check_batch_sizes()
        self.accelerator_config, given_options = _read_accelerator_config(self.accelerator_config)
        self._check_words()
        if getattr(self, "parallelism_config", None) is not None:
            self.parallelism_config = ParallelismConfig.of(self.parallelism_config)
        self.save_policy  # noqa: B018  it checks its two arguments
        check_verify(self.verify)
        self._derive_compile_options()
        self._asked = {
            "explicit": self._explicit_options() | given_options,
            "fsdp": copy.copy(self.fsdp),
            "fsdp_config": copy.copy(self.fsdp_config),
        }
        self._resolve()
        self._take_compat()
        self.use_cpu = self.resolved.config.use_cpu
        self.accelerator_config.left_open = {}
        for name in _DATA_OPTIONS:  # so that arguments made of these, by to_dict() for instance, say the same
            value = getattr(self.resolved.config.data, name)
            setattr(self.accelerator_config, name, value)
            if self.resolved.source(f"data.{name}").kind in (SourceKind.DEFAULT, SourceKind.COMPAT):
                self.accelerator_config.left_open[name] = value
        self._take_accumulation()
        start_engine(self, self.resolved)
        # Upstream would export compile options as ACCELERATE_DYNAMO_* variables, and import accelerate for DeepSpeed. A
        # machine without an accelerator runs on its CPU, which has bf16, as if `use_cpu` had been given.
        with (
            hidden_variable("ACCELERATE_USE_DEEPSPEED"),
            setting(self, torch_compile=False, torch_compile_backend=None, torch_compile_mode=None, deepspeed=None),
            setting(self, use_cpu=self.use_cpu or not torch.accelerator.is_available()),
            # A name that transformers does not know yet.
            setting(self, optim="adamw_torch") if self.optim == "muon" else contextlib.nullcontext(),
        ):
            super().__post_init__()
        self.mixed_precision = str(self.resolved.config.mixed_precision)
        self._apply_tf32_default()
        check_num_processes(self.resolved, self.world_size)
        if (process := find_process()) is not None:
            axis_sizes(self.resolved.config, self.resolved.describe, process.world_size, process.num_nodes)
        self._derived = {name: getattr(self, name) for name in untouched}
        self._mirrors = self._copy_mirrored()

    def _resolve(self) -> None:
        resolve = functools.partial(
            resolve_arguments,
            fsdp=self._asked["fsdp"],
            fsdp_config=self._asked["fsdp_config"],
            environ=read_environment(),
            argument_names=_ARGUMENT_NAMES | {"mixed_precision": "fp16" if self.fp16 else "bf16"},
        )
        self.resolved = resolve(self._asked["explicit"])
        if self.accelerator_config.use_configured_state:
            self.resolved = resolve(self._asked["explicit"] | _options_of_state(self.resolved))
        self._check_liger()

    def _copy_mirrored(self) -> dict[str, Any]:
        """Return the values of the fields that the configuration is resolved from, as they are now."""
        values = {name: copy.deepcopy(getattr(self, name, None)) for name in sorted(TAKEN_FIELDS)}
        if is_dataclass(self.accelerator_config):  # else another thing was assigned, which is refused as a whole
            nested = vars(values.pop("accelerator_config"))
            values |= {f"accelerator_config.{name}": value for name, value in nested.items()}
        return values

    def take_assigned(self) -> None:
        """Resolve the configuration anew where fields were assigned since it was; libraries do so before a Trainer.

        Raises:
            ConfigError: one was assigned that more than an option was made of, or a value that the option cannot have.
        """
        self._take_checkpointing_policy()
        before, now = self._mirrors, self._copy_mirrored()
        changed = [name for name, value in now.items() if name not in before or before[name] != value]
        # A new one: a copy of the arguments has the same.
        self._asked = {**self._asked, "explicit": dict(self._asked["explicit"])}
        for name in changed:
            option = _LATE.get(name)
            if option is None:
                raise ConfigError(
                    f"args.{name} was set to {now[name]!r} after TrainingArguments() had been built with "
                    f"{before.get(name)!r}, of which devices, precision or layout were made; give it to "
                    "TrainingArguments(...)"
                )
            self._asked["explicit"].pop(option, None)
            if now[name] is not None:
                self._asked["explicit"][option] = now[name]
        if changed:
            self._resolve()
            self._mirrors = now

    @property
    def given_fields(self) -> frozenset[str]:
        """Names of the fields that were given, or assigned since: not at their defaults, nor derived from others."""
        own = {item.name: _default(item) for item in fields(self)} | getattr(self, "_derived", {})
        return frozenset(name for name, value in own.items() if getattr(self, name) != value)

    @property
    def save_policy(self) -> SavePolicy:
        """Policy for a checkpoint that cannot be written; ConfigError where there is no such policy."""
        return SavePolicy(on_save_error=self.on_save_error, max_pause_s=self.max_pause_s)

    def _check_words(self) -> None:
        if self.eval_loss_weighting not in (None, "token", "batch"):
            raise ConfigError(f"eval_loss_weighting={self.eval_loss_weighting!r} is neither 'token' nor 'batch'")
        if self.preflight not in ("off", "warn", "refuse"):
            raise ConfigError(f"preflight={self.preflight!r} is none of 'off', 'warn' and 'refuse'")
        if self.preflight_memory is not None:
            convert_file_size_to_int(self.preflight_memory)  # refuses what is no size

    def check_batch_sizes(self) -> None:
        """Raise ConfigError for a batch size, or a number of micro-batches, that is no positive integer."""
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{name}={value!r} was given, and it counts samples or steps: use an integer of 1 or more"
                )

    def _check_liger(self) -> None:
        kernels = self.liger_kernel_config or {}
        if isinstance(kernels, str):  # of a command line; upstream reads it later
            kernels = json.loads(kernels)
        fuses_loss = self.use_liger_kernel and kernels.get("fused_linear_cross_entropy", True)
        if fuses_loss and self.resolved.config.loss is not LossImplementation.PLAIN:
            raise ConfigError(
                "use_liger_kernel replaces the model's forward by one that makes its loss itself, and "
                f"{self.resolved.describe('loss')} was given; leave one of them out, or take the other kernels with "
                "liger_kernel_config={'fused_linear_cross_entropy': False}"
            )

    def _take_checkpointing_policy(self) -> None:
        asked: Any = getattr(self, "activation_checkpointing", None)
        if isinstance(asked, str | Mapping):
            self.activation_checkpointing_policy, self.activation_checkpointing = asked, None  # type: ignore[assignment]

    def _derive_compile_options(self) -> None:
        if self.torch_compile_mode is not None or self.torch_compile_backend is not None:
            self.torch_compile = True
        if self.torch_compile and self.torch_compile_backend is None:
            self.torch_compile_backend = "inductor"

    def _take_compat(self) -> None:
        """Fill in the arguments whose default is that of `compat`."""
        check_division(self.resolved, LossDivision.TRANSFORMERS, "a Trainer")
        for name in _LEFT_OPEN:
            setattr(self, name, str(self.resolved.value(_OPTIONS[name])))
        is_as_upstream = self.resolved.config.compat is Compat.TRANSFORMERS
        if self.eval_loss_weighting is None:
            self.eval_loss_weighting = "batch" if is_as_upstream else "token"
        if self.logging_nan_inf_filter is None:
            self.logging_nan_inf_filter = is_as_upstream

    def _take_accumulation(self) -> None:
        """Take micro-batch and accumulation from the file or the environment where arguments have defaults."""
        defaults = {item.name: item.default for item in fields(self)}
        for path, name in _TAKEN.items():
            value = self.resolved.value(path)
            if value is not None and getattr(self, name) == defaults[name] != value:
                logger.info("%s=%d (from %s)", name, value, self.resolved.source(path).where)
                setattr(self, name, value)

    def _apply_tf32_default(self) -> None:
        # As upstream, where the device has it and the user has not decided.
        if self.torch_compile and self.tf32 is None and self.device.type != "cpu" and is_torch_tf32_available():
            enable_tf32(True)

    def _explicit_options(self) -> dict[str, Any]:
        """Return the options that were given in Python, by dotted path."""
        options = deepspeed_options(self)
        if self.parallelism_config is not None:
            options |= self.parallelism_config.explicit()
        for item in fields(self):
            if item.name in _OPTIONS and getattr(self, item.name) != item.default:
                options[_OPTIONS[item.name]] = getattr(self, item.name)
        if self.fp16 or self.bf16:
            options["mixed_precision"] = "fp16" if self.fp16 else "bf16"
        if self.torch_compile:
            options["compile.backend"] = self.torch_compile_backend
            options["compile.mode"] = self.torch_compile_mode or "default"
        return options

    def _process_fsdp_args(self) -> None:
        fill_fsdp_fields(
            self, self.resolved, in_fields={*_TAKEN, "use_cpu", *(f"data.{name}" for name in _DATA_OPTIONS)}
        )

    @functools.cached_property
    def _setup_devices(self) -> torch.device:
        """Join the job and return this process's device. Collective under a launcher."""
        process = init_process(
            read_environment(),
            use_cpu=self.resolved.config.use_cpu,
            backend=self.ddp_backend,
            **stated_waits(self.resolved),
        )
        self.distributed_state = PartialState(process=process)
        share_process(self.distributed_state, keep=self.accelerator_config.use_configured_state)
        # One process drives one device: upstream's DataParallel over all GPUs of one process is not used.
        self._n_gpu = 0 if process.device.type == "cpu" else 1
        return process.device

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self._setup_devices

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether this process belongs to a process group."""
        has_group = self.distributed_state is not None and self.distributed_state.backend is not None
        return ParallelMode.DISTRIBUTED if has_group or forms_group_later(self) else ParallelMode.NOT_PARALLEL

    def whole_models(self) -> contextlib.AbstractContextManager[None]:
        """Context for ranks that build full models alone: under ZeRO-3, all build their shards together otherwise."""
        return unsharded_models()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, tokens hidden, those within them too."""
        content = super().to_dict()
        if isinstance(content.get("accelerator_config"), AcceleratorConfig):
            content["accelerator_config"] = content["accelerator_config"].to_dict()
        return {name: mask_secrets(value) if isinstance(value, dict) else value for name, value in content.items()}

    def __str__(self) -> str:
        return redact(super().__str__())

    __repr__ = __str__


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):
    """Upstream's Seq2SeqTrainingArguments on accel_trainer; see `TrainingArguments`."""


def _options_of_state(resolved: Resolved) -> dict[str, Any]:
    """Return device and precision of the configured state by dotted path; a ConfigError without one, or another."""
    process = find_process()
    if process is None:
        if dist.is_available() and dist.is_initialized():
            return {}  # the user's own group is a configuration, too
        raise ConfigError(
            "accelerator_config has use_configured_state=True, which requires a pre-configured `AcceleratorState` or "
            "`PartialState`, and this process has none; make a PartialState() or an Accelerator() before "
            "TrainingArguments, or leave use_configured_state out"
        )
    options: dict[str, Any] = {}
    found: dict[str, Any] = {}
    if is_initialized():
        found["mixed_precision"] = AcceleratorState().mixed_precision
    if torch.accelerator.is_available():
        found["use_cpu"] = process.device.type == "cpu"
    for path, value in found.items():
        if not resolved.is_set(path):
            options[path] = value
        elif resolved.value(path) != value:
            raise ConfigError(
                f"use_configured_state=True takes the state that this process has, which was made with {path}={value}, "
                f"and {resolved.describe(path)} asks for another; give both the same, or leave use_configured_state out"
            )
    return options


class _OwnConfig(AcceleratorConfig):
    """An `accelerator_config` with the options that nobody gave, and their values.

    These are in no field: `dataclasses.replace` hands on the object, and `to_dict()` the fields alone.
    """

    __slots__ = ("left_open",)
    left_open: dict[str, Any]


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _read_accelerator_config(given: Any) -> tuple[_OwnConfig, dict[str, Any]]:
    """Return `accelerator_config` (dict, JSON, file or instance) as upstream's class, and the options it gives."""
    if isinstance(given, type):
        raise NotImplementedError(
            "Tried passing in a callable to `accelerator_config`, but this is not supported. "
            "Please pass in a fully constructed `AcceleratorConfig` object instead."
        )
    if isinstance(given, AcceleratorConfig):
        values: Mapping[str, Any] = {item.name: getattr(given, item.name) for item in fields(given)}
        # An instance of the user's own at upstream's default gives nothing.
        usual = getattr(given, "left_open", vars(AcceleratorConfig()))
        names = [name for name, value in values.items() if name not in usual or value != usual[name]]
    else:
        values = _read_mapping(given or {})
        names = list(values)
    config = _OwnConfig(**values)
    options = {f"data.{name}": getattr(config, name) for name in _DATA_OPTIONS if name in names}
    if (sync := _read_accumulation(config.gradient_accumulation_kwargs or {}).get("sync_each_batch")) is not None:
        options["accumulation.sync_each_batch"] = sync
    return config, options


def _read_accumulation(accumulation: Any) -> Mapping[str, Any]:
    """Return `gradient_accumulation_kwargs`, whose names are known ones."""
    if not isinstance(accumulation, Mapping):
        raise ConfigError(
            f"accelerator_config has gradient_accumulation_kwargs={accumulation!r}; give a mapping with some of "
            f"{', '.join(_ACCUMULATION_OPTIONS)}"
        )
    for name in accumulation:
        if name not in _ACCUMULATION_OPTIONS:
            raise ConfigError(
                f"accelerator_config.gradient_accumulation_kwargs has the unknown key {name!r}"
                f"{did_you_mean(name, _ACCUMULATION_OPTIONS)} Keys: {', '.join(_ACCUMULATION_OPTIONS)}"
            )
    return accumulation


def _read_mapping(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        text = str(given) if str(given).lstrip().startswith("{") else Path(given).read_text(encoding="utf-8")
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"accelerator_config is not valid JSON: {error}; pass a dict, a path, or JSON text"
            ) from error
    known = [item.name for item in fields(AcceleratorConfig)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"accelerator_config holds the unknown key {name!r}{did_you_mean(name, known)} Keys: {', '.join(known)}"
            )
    return given


def list_options(args: TrainingArguments) -> list[SetOption]:
    """Return every option of the configuration and every argument; tokens and keys are masked."""
    argument, default = Source(SourceKind.PYTHON, "argument"), Source(SourceKind.DEFAULT, "default")
    compat_fields = _COMPAT_FIELDS if args.resolved.config.compat is Compat.TRANSFORMERS else ()
    options = [
        option._replace(source=argument) if option.source.kind is SourceKind.PYTHON else option
        for option in set_options(args.resolved)
    ]
    content, given = args.to_dict(), args.given_fields
    for item in fields(args):
        if item.name in MIRRORED_FIELDS or item.name not in content or item.name.startswith("_"):
            continue
        is_set = item.name in given
        source = argument if is_set else default
        if not is_set and item.name in compat_fields:
            source, is_set = Source(SourceKind.COMPAT, f"compat={Compat.TRANSFORMERS}"), True
        options.append(SetOption(item.name, show_option(item.name, content[item.name]), source, is_set))
    return options
