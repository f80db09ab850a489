"""Options as objects, under the names that users of similar libraries pass to `Accelerator`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import profiler

from accel_trainer.checkpoint.background import SaveErrorAction, SavePolicy
from accel_trainer.config import CompileConfig, field_specs
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.strategies.comm_hooks import CommHook, DDPCommunicationHookType


class OptionObject:
    """Holds options; a dataclass inherits it and says where they go."""

    def given(self) -> dict[str, Any]:
        """Return the options that were set, the ones set to a default value included; None means not set."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Return all options by their names, as copies."""
        return {f.name: copy.deepcopy(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options that differ from the class's defaults, as copies."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}

    section: ClassVar[str] = ""
    """Of the configuration that has the options under the same names, if one has."""

    def explicit(self) -> dict[str, Any]:
        """Return the options that were set and that the configuration has, by dotted path: it knows their origin."""
        paths = {f"{self.section}.{name}": value for name, value in self.given().items()}
        return {path: value for path, value in paths.items() if path in field_specs()}

    def objects(self) -> dict[str, Any]:
        """Return those that no configuration file can hold, by the name of a field of AcceleratorOptions."""
        return {}


class KwargsHandler(OptionObject):
    """Base of the option objects that `Accelerator(kwargs_handlers=[...])` takes, at most one of each class."""


@dataclass
class AutocastKwargs(KwargsHandler):
    """How mixed precision casts, in the prepared models and in `accelerator.autocast()`."""

    enabled: bool | None = None
    """False computes in the parameters' own dtype."""
    cache_enabled: bool | None = None
    """Whether weights that were cast are kept until autocast is left."""
    output_dtype: str | None = None
    """Dtype of the outputs of prepared models: "fp32", "kept" as computed (half the memory of large logits), or "auto":
    fp32 unless they come with a loss to be trained. "auto" is the default."""

    def autocast_options(self) -> dict[str, bool]:
        """Return `enabled` and `cache_enabled` where they were set."""
        return {name: value for name, value in self.given().items() if name != "output_dtype"}

    def explicit(self) -> dict[str, Any]:
        """Return the dtype of the outputs, by its path."""
        return {} if self.output_dtype is None else {"output_dtype": self.output_dtype}

    def objects(self) -> dict[str, Any]:
        """Return the options of autocast."""
        return {"autocast": self.autocast_options()}


@dataclass
class AORecipeKwargs(KwargsHandler):
    """How torchao computes in fp8, with `mixed_precision="fp8"`; None leaves an option as configured."""

    section: ClassVar[str] = "fp8"
    config: Any = None
    """torchao's Float8LinearConfig, which then says everything; None is made of the options."""
    module_filter_func: Callable[[Any, str], bool] | None = None
    """Takes a module and its name, and returns whether it computes in fp8. None leaves out the first and the last
    linear layer, and those whose sizes are no multiples of 16."""
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        if self.config is not None and self.explicit():
            beside = ", ".join(path.removeprefix("fp8.") for path in self.explicit())
            raise ConfigError(
                f"AORecipeKwargs was given config and {beside}, which the config says, too; pass one of them"
            )


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of torch's DistributedDataParallel; None leaves an option as configured."""

    section: ClassVar[str] = "ddp"
    dim: int | None = None
    broadcast_buffers: bool | None = None
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool | None = None
    check_reduction: bool | None = None
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    """How gradients are sent: as they are, cast to "fp16" or "bf16", or approximated by "power_sgd"."""
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    """Dtype of the approximation that `power_sgd` sends in place of gradients: "fp16" or "bf16"."""
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    """Arguments of torch's PowerSGDState, `matrix_approximation_rank` for instance."""

    def __post_init__(self) -> None:
        self.hook()

    def given(self) -> dict[str, Any]:
        """Return the options of DistributedDataParallel that were set; the hook is not among them."""
        return {name: value for name, value in super().given().items() if not name.startswith("comm_")}

    def hook(self) -> CommHook | None:
        """Return the communication hook that was asked for; None where gradients are sent as they are."""
        hook = CommHook(self.comm_hook, self.comm_wrapper, self.comm_state_option)
        return hook if hook.changes_gradients else None

    def objects(self) -> dict[str, Any]:
        """Return the communication hook, and the options that the configuration has not."""
        known = [path.rpartition(".")[2] for path in self.explicit()]
        rest = {name: value for name, value in self.given().items() if name not in known}
        return {"comm_hook": self.hook(), "ddp_options": rest}


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of torch's GradScaler, used with fp16."""

    init_scale: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    growth_interval: int | None = None
    enabled: bool | None = None

    def objects(self) -> dict[str, Any]:
        """Return the options of the loss scaler."""
        return {"scaler_options": self.given()}


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of `torch.distributed.init_process_group`."""

    backend: str | None = None
    timeout: Any = None
    """A datetime.timedelta; it reaches every group of the job, on the CPU too."""

    def explicit(self) -> dict[str, Any]:
        """Return the timeout, by its path."""
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise ConfigError(
                f"InitProcessGroupKwargs(timeout={self.timeout!r}) is a {type(self.timeout).__name__}; pass a "
                "datetime.timedelta, timedelta(seconds=...) for instance"
            )
        return {} if self.timeout is None else {"timeout_seconds": self.timeout.total_seconds()}

    def objects(self) -> dict[str, Any]:
        """Return the backend."""
        return {"backend": self.backend}


@dataclass
class ProfileKwargs(KwargsHandler):
    """Contents of the traces of `accelerator.profile()`, under the names of torch.profiler."""

    activities: Iterable[str] | None = None
    """"cpu", "cuda", "xpu", ...; None records those of the machine."""
    schedule_option: dict[str, int] | None = None
    """Arguments of torch.profiler.schedule: wait, warmup, active, repeat, skip_first; then call `profiler.step()`."""
    on_trace_ready: Callable[[profiler.profile], None] | None = None
    """Called with the profiler whenever a trace is complete."""
    record_shapes: bool | None = None
    profile_memory: bool | None = None
    with_stack: bool | None = None
    with_flops: bool | None = None
    with_modules: bool | None = None
    output_trace_dir: str | Path | None = None
    """Where each rank writes `profile_{rank}.json`, and the n-th trace after it, of another cycle of a schedule or of
    another block, `profile_{rank}_{n}.json`."""

    _num_traces = 0  # not annotated: it is no option

    def objects(self) -> dict[str, Any]:
        """Return itself, for `accelerator.profile()`."""
        return {"profile": self}

    def build(self, rank: int) -> profiler.profile:
        """Return the profiler of a rank; a ConfigError for an activity or schedule that torch does not know."""
        options = self.given()
        folder = options.pop("output_trace_dir", None)
        if "activities" in options:
            options["activities"] = [_activity(name) for name in options["activities"]]
        if "schedule_option" in options:
            options["schedule"] = _schedule(options.pop("schedule_option"))
        if folder is not None:
            options["on_trace_ready"] = partial(self._write, Path(folder), rank)
        return profiler.profile(**options)

    def _write(self, folder: Path, rank: int, trace: profiler.profile) -> None:
        """Write a complete trace to a file of its own, then call the user's callback."""
        folder.mkdir(parents=True, exist_ok=True)
        number, self._num_traces = self._num_traces, self._num_traces + 1
        trace.export_chrome_trace(str(folder / f"profile_{rank}{f'_{number}' if number else ''}.json"))
        if self.on_trace_ready is not None:
            self.on_trace_ready(trace)


def _activity(name: str) -> profiler.ProfilerActivity:
    known = {member.lower(): value for member, value in profiler.ProfilerActivity.__members__.items()}
    if name.lower() not in known:
        raise ConfigError(
            f"ProfileKwargs(activities): unknown activity {name!r}{did_you_mean(name, known)}; known: "
            f"{', '.join(sorted(known))}"
        )
    return known[name.lower()]


def _schedule(options: dict[str, int]) -> Callable[[int], profiler.ProfilerAction]:
    try:
        return profiler.schedule(**options)
    except (TypeError, AssertionError) as error:
        raise ConfigError(
            f"ProfileKwargs(schedule_option={options}): torch.profiler.schedule does not take it ({error}); give wait, "
            "warmup and active, and repeat or skip_first where needed"
        ) from error


@dataclass
class TorchDynamoPlugin(OptionObject):
    """How prepared models are compiled. None leaves an option as configured."""

    backend: str | None = None
    """A backend of torch.compile, "inductor" for instance; "no" does not compile."""
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    """Options of the backend, instead of a mode."""
    disable: bool = False
    """True does not compile, whatever the other fields are."""
    use_regional_compilation: bool | None = None
    """Compile each repeated block once instead of the full model."""

    @classmethod
    def of(cls, config: CompileConfig, options: Mapping[str, Any] | None = None) -> TorchDynamoPlugin:
        """Return the options in force, whatever set them; the backend in capitals, as a `DynamoBackend` is."""
        return cls(
            backend=config.backend.upper(),
            mode=config.mode,
            fullgraph=config.fullgraph,
            dynamic=config.dynamic,
            options=dict(options or {}) or None,
            use_regional_compilation=config.regional,
        )

    def __post_init__(self) -> None:
        if self.options and self.mode not in (None, "default"):
            raise ConfigError(
                f"TorchDynamoPlugin(mode={self.mode!r}, options={self.options}): torch.compile takes one of them; a "
                "mode is a set of options, see torch._inductor.list_mode_options()"
            )

    def explicit(self) -> dict[str, Any]:
        """Return the options that were set, by dotted path."""
        if self.disable:
            return {"compile.backend": "no"}
        names = {"use_regional_compilation": "regional"}
        left_out = ("options", "disable")
        return {f"compile.{names.get(n, n)}": value for n, value in self.given().items() if n not in left_out}

    def objects(self) -> dict[str, Any]:
        """Return the options of the backend."""
        return {"compile_options": {} if self.disable else dict(self.options or {})}


@dataclass
class DataLoaderConfiguration(OptionObject):
    """How prepared loaders shard their data over the ranks. Field by field: `config.DataConfig`."""

    section: ClassVar[str] = "data"
    split_batches: bool | None = None
    dispatch_batches: bool | None = None
    even_batches: bool | None = None
    use_seedable_sampler: bool | None = None
    data_seed: int | None = None
    non_blocking: bool | None = None
    use_stateful_dataloader: bool | None = None
    prefetch_to_device: bool | None = None
    pin_memory: bool | None = None


@dataclass
class GradientAccumulationPlugin(OptionObject):
    """How many micro-batches make an update, and when gradients are exchanged. None leaves an option as configured."""

    section: ClassVar[str] = "accumulation"
    num_steps: int | None = None
    adjust_scheduler: bool | None = None
    """Taken for scripts that set it; a schedule always steps once per update, so False is refused."""
    sync_with_dataloader: bool | None = None
    """Whether the last batch of a loader ends a window."""
    sync_each_batch: bool | None = None
    """Exchange gradients on every micro-batch: more communication, less memory when sharded."""

    def __post_init__(self) -> None:
        if self.adjust_scheduler is False:
            raise ConfigError(
                "GradientAccumulationPlugin(adjust_scheduler=False): a prepared scheduler steps once per update; pass "
                "Accelerator(step_scheduler_with_optimizer=False) and step it when you like"
            )

    def objects(self) -> dict[str, Any]:
        """Return the options that `GradientState.plugin_kwargs` shows."""
        shown = {"num_steps": self.num_steps, "sync_each_batch": self.sync_each_batch or None}
        return {"plugin_kwargs": {name: value for name, value in shown.items() if value is not None}}


@dataclass
class ProjectConfiguration:
    """Where states are saved, and how many are kept."""

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    """Save to `project_dir/checkpoints/checkpoint_N` when `save_state` is called without a directory."""
    total_limit: int | None = None
    """Automatically named checkpoints to keep; None keeps all."""
    iteration: int = 0
    """Number of the next automatically named checkpoint."""
    save_on_each_node: bool = False
    on_save_error: SaveErrorAction = "raise"
    """Reaction of `save_state` to a disk that is full or fails: "raise", "warn" (the run goes on without the save) or
    "pause" (it tries again every minute)."""
    max_pause_s: float = 3600.0
    """With "pause": the error is raised after so many seconds."""
    max_wait_s: float | None = None
    """How long `save_state` waits for the background save before it, until that is an error or, with "warn", the save
    is skipped; None waits until it has ended."""

    @property
    def save_policy(self) -> SavePolicy:
        """How saves that fail or take long are dealt with."""
        return SavePolicy(on_save_error=self.on_save_error, max_pause_s=self.max_pause_s, max_wait_s=self.max_wait_s)

    def __post_init__(self) -> None:
        _ = self.save_policy  # refuses unknown words
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigError(f"ProjectConfiguration(total_limit={self.total_limit}): keep 1 or more, or None for all")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None) -> None:
        """Set `project_dir`, and `logging_dir` where none was given. A ConfigError beside another project_dir."""
        folders = self.project_dir, self.logging_dir, project_dir
        self.project_dir, self.logging_dir, project_dir = map(_below_home, folders)
        if None not in (self.project_dir, project_dir) and Path(self.project_dir) != Path(project_dir):  # type: ignore[arg-type]
            raise ConfigError(
                f"project_dir={str(project_dir)!r} was given, and ProjectConfiguration(project_dir="
                f"{str(self.project_dir)!r}) beside it; pass one of them"
            )
        self.project_dir = project_dir if project_dir is not None else self.project_dir
        self.logging_dir = self.logging_dir if self.logging_dir is not None else self.project_dir


def _below_home(folder: str | Path | None) -> str | Path | None:
    """Return a folder with the home directory in the place of "~"."""
    return Path(folder).expanduser() if folder is not None and str(folder).startswith("~") else folder
