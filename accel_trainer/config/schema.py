"""The configuration tree: plain frozen values, one field for each option, a line of documentation under each field.

Nothing here reads a file or the environment (`resolve.py`) and nothing imports torch. Options are addressed by their
dotted path in the tree: `mixed_precision`, `fsdp.wrap_classes`, `accumulation.num_steps`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn


class MixedPrecision(StrEnum):
    """The number format of forward and backward; parameters and optimizer state stay in fp32."""

    NO = "no"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"


class Fp8Backend(StrEnum):
    """The package that computes in fp8; TransformerEngine and MS-AMP are known, and refused."""

    AO = "ao"
    TE = "te"
    MSAMP = "msamp"


class OutputDtype(StrEnum):
    """The number format of floating-point outputs of the model under mixed precision."""

    AUTO = "auto"
    FP32 = "fp32"
    KEPT = "kept"


class NonFiniteAction(StrEnum):
    """The answer to an update whose gradients are NaN or infinite."""

    RAISE = "raise"
    SKIP_STEP = "skip_step"
    ROLLBACK = "rollback"
    WARN = "warn"


class RankLossAction(StrEnum):
    """The fate of the other ranks when one is killed."""

    RESTART = "restart"
    CONTINUE = "continue"
    REPLACE = "replace"


class ChangedRunAction(StrEnum):
    """The answer to a resume that would change the meaning of a run: the number of samples in an update, above all."""

    AUTO = "auto"
    REFUSE = "refuse"
    WARN = "warn"


class LossImplementation(StrEnum):
    """How a language model makes its loss: of whole logits, or of those of a chunk of tokens at a time."""

    PLAIN = "plain"
    CHUNKED = "chunked"
    LIGER = "liger"


class WrapPolicy(StrEnum):
    """How FSDP groups parameters: one group for each transformer layer, for each module of a size, or one for all."""

    TRANSFORMER = "transformer"
    SIZE = "size"
    NONE = "none"


class StateDictType(StrEnum):
    """How the Trainer stores the optimizer's state of a sharded model: in one file, or as the shards of every rank."""

    FULL = "full"
    SHARDED = "sharded"


class CommStrategy(StrEnum):
    """How keys and values go around between ranks that share a sequence."""

    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"


class LossDivision(StrEnum):
    """The divisor of an update's losses: the micro-batches that it holds, or that of another library."""

    EXACT = "exact"
    ACCELERATE = "accelerate"
    TRANSFORMERS = "transformers"


class Compat(StrEnum):
    """The library whose behaviour is restored where ours gives other numbers."""

    NONE = "none"
    ACCELERATE = "accelerate"
    TRANSFORMERS = "transformers"


class SchedulerSteps(StrEnum):
    """How often a prepared schedule steps for each optimizer step: once, or once for each process."""

    PER_UPDATE = "per_update"
    PER_PROCESS = "per_process"


class FrozenDict(dict[str, Any]):
    """A dict that cannot change, down to its nested values; it can be hashed, pickled and written as JSON."""

    def __init__(self, content: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__({key: _freeze(value) for key, value in dict(content).items()})

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("this mapping is part of a frozen configuration; copy it with dict(...) to change it")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenDict, (dict(self),))


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenDict(value)
    if isinstance(value, list | tuple):
        return tuple(_freeze(item) for item in value)
    return value


def thaw(value: Any) -> Any:
    """Return a value of a configuration as new dicts, lists and plain scalars, as a file can hold them."""
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    return [thaw(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """How data loaders are split over the ranks."""

    split_batches: bool = False
    """A loader's batch size is the global one, cut into one slice for each rank; else it is the size on each rank."""
    dispatch_batches: bool | None = None
    """Rank 0 reads the data and sends it to the others; None lets every rank read its own shard."""
    even_batches: bool = False
    """Fill the last round of batches with samples from the beginning; otherwise each sample counts once."""
    use_seedable_sampler: bool = True
    """Shuffle by seed and epoch, so that the order is the same for any number of ranks and after a resume."""
    data_seed: int | None = None
    """Seed of the shuffle; None takes the seed that `set_seed` put into torch."""
    non_blocking: bool = False
    """Copy batches to the device without waiting; of use with pinned memory."""
    prefetch_to_device: bool = True
    """On an accelerator: pin batches, and copy the next one in a stream of its own while the current one computes."""
    pin_memory: bool = True
    """Pin them whatever the loader says; false leaves it to `DataLoader(pin_memory=...)`."""
    use_stateful_dataloader: bool = False
    """Let loaders go on by themselves where `load_state` finds them; else `skip_first_batches` is waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulationConfig:
    """How many micro-batches make one update."""

    num_steps: int = 1
    """Micro-batches for each optimizer step, at least 1."""
    micro_batch_size: int | None = None
    """Rows of each rank in a micro-batch: a Trainer's per_device_train_batch_size, where that is not given."""
    sync_with_dataloader: bool = True
    """Close the accumulation window at the end of the loader, even when it is not full."""
    sync_each_batch: bool = False
    """Reduce gradients after every micro-batch: more traffic, less memory in sharded strategies."""
    keep_global_batch: bool = False
    """With fewer processes than launch.num_processes: as many samples in an update, of more micro-batches."""
    loss_division: LossDivision = LossDivision.EXACT
    """exact: an update's mean; accelerate: each loss by num_steps, also in a short window; transformers: its rules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Config:
    """Linear layers in fp8, with mixed_precision fp8; everything else computes in bf16."""

    backend: Fp8Backend = Fp8Backend.AO
    """ao, the package torchao; te (TransformerEngine) and msamp (MS-AMP) are known, and refused."""
    enable_fsdp_float8_all_gather: bool = True
    """Under fsdp2 the weights of these layers are gathered in fp8: half of bf16's traffic."""
    pad_inner_dim: bool = True
    """Fill up the inner dimension of a matrix product to a multiple of 16, which the hardware asks for."""
    emulate: bool = False
    """Round to fp8 and multiply in fp32: on any device, slower than without fp8; for tests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """Options of torch.compile."""

    backend: str = "no"
    """`no` does not compile; else a backend of torch.compile such as `inductor`, `eager`, `aot_eager`."""
    mode: str = "default"
    """default, reduce-overhead, max-autotune, or max-autotune-no-cudagraphs."""
    fullgraph: bool = False
    """Make a graph break an error."""
    dynamic: bool | None = None
    """Compile for changing shapes: true always, false never, None as torch.compile finds out."""
    regional: bool | None = None
    """Compile each repeated block once instead of the whole model: starts much faster. None does so under fsdp2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DDPConfig:
    """Options of DistributedDataParallel."""

    find_unused_parameters: bool = False
    """Look in every forward for parameters that get no gradient; needed when the model skips some of them."""
    broadcast_buffers: bool = True
    """Send the buffers of rank 0 to the others before every forward."""
    bucket_cap_mb: int = 25
    """Gradients are reduced in buckets of this many MiB."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    gradient_as_bucket_view: bool = True
    """Keep gradients inside the buckets: saves memory of the size of all gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterOptimizerConfig:
    """The optimizer that makes new weights of those of all replicas, with `local_steps`: SGD, as DiLoCo's."""

    lr: float | None = None
    """Rate of its updates, 0.7 for DiLoCo; None has none: the weights become the mean of the replicas'."""
    momentum: float = 0.9
    """Its momentum, from 0 on and below 1."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPConfig:
    """Options of fully sharded data parallel (FSDP2, `fully_shard`)."""

    reshard_after_forward: bool = True
    """Free gathered parameters after the forward (ZeRO-3); false keeps them until the backward (ZeRO-2)."""
    wrap_policy: WrapPolicy = WrapPolicy.TRANSFORMER
    """The modules of one communication group: transformer layers, modules of `min_num_params`, or the whole model."""
    wrap_classes: tuple[str, ...] = ()
    """Class names of the layers to wrap; empty takes the model's own `_no_split_modules`."""
    min_num_params: int = 100_000_000
    """With wrap_policy size: a module with at least this many parameters is wrapped."""
    offload_params: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory between uses."""
    activation_checkpointing: bool = False
    """The same as activation_checkpointing full, as files for accelerate spell it."""
    cpu_ram_efficient_loading: bool = False
    """Values may come from rank 0 alone, or from files of which each rank reads its shard; see docs/fsdp.md."""
    state_dict_type: StateDictType = StateDictType.FULL
    """The Trainer stores the optimizer's state in one file (full), or as the shards of each rank (sharded)."""
    ignored_modules: tuple[str, ...] = ()
    """Regular expressions; a module whose whole name matches one of them is not sharded."""
    backward_prefetch: bool = True
    """Gather the next group's parameters while the backward of this one runs."""
    forward_prefetch: bool = False
    """Gather the next group's parameters while the forward of this one runs."""
    replicate_size: int = 1
    """Hybrid sharding: number of replicas of the model; ranks / replicate_size ranks share one replica's shards."""
    replicate_per_node: bool = False
    """Hybrid sharding with one replica on each node, whatever the number of nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Ranks along each axis of the mesh; the product of the sizes is the number of processes."""

    dp_replicate_size: int | None = None
    """Replicas of the model, each for other data; None: every rank under ddp, and what `fsdp` says under fsdp2."""
    dp_shard_size: int | None = None
    """Ranks that share the shards of a replica, each for other data; None takes the ranks that no size names."""
    tp_size: int = 1
    """Ranks that share the matrices of a layer and read the same data: tensor parallelism."""
    ep_size: int = 1
    """Of the ranks that share shards, those that share a mixture's experts, too: expert parallelism."""
    cp_size: int = 1
    """Ranks that share the tokens of each sequence and pass keys around: context parallelism."""
    cp_comm_strategy: CommStrategy = CommStrategy.ALLGATHER
    """How keys and values pass: all at once (allgather), or from rank to rank (alltoall), of causal SDPA on CUDA."""
    sp_size: int = 1
    """Ranks that share the tokens of each sequence and exchange them for heads: sequence parallelism, Ulysses."""
    loss_parallel: bool = False
    """The ranks of a `tp_size` make the loss of a vocabulary of which each has a part; training gathers no logits."""
    tp_plan: tuple[str, ...] = ()
    """Styles of modules, as NAME=STYLE with `*` for a number, beside those of the model's own plan for a `tp_size`."""

    @property
    def sequence_size(self) -> int:
        """Ranks that share the tokens of each sequence, in either way."""
        return self.cp_size * self.sp_size

    @property
    def sequence_axis(self) -> str:
        """The axis of these ranks."""
        return "cp" if self.cp_size > 1 else "sp"

    @property
    def comm_strategy(self) -> CommStrategy | None:
        """How keys and values pass; None where tokens are exchanged for heads."""
        return self.cp_comm_strategy if self.cp_size > 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class HangConfig:
    """How long ranks wait for one that does not move, by where it is, until the job ends with exit code 75."""

    step_seconds: float = 60.0
    """In forward, backward, the optimizer, or stopped; ten median updates, where those are more. A warning at half."""
    startup_seconds: float = 600.0
    """The same before the first update has been done: models are compiled then."""
    user_seconds: float = 1800.0
    """In the script's own code: its loop, callbacks, data sets."""
    evaluation_seconds: float = 1800.0
    """In an evaluation."""
    save_seconds: float = 1800.0
    """In a save or a load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionConfig:
    """How a run ends that is asked to: by a scheduler that takes its machine, or by Ctrl-C."""

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT")
    """Signals at which a run saves and ends with exit code 85, where all ranks can next; empty for none."""
    grace_seconds: float | None = None
    """Seconds from the signal to the end of the machine: a save that will not fit is left out. None always saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """How processes are started; read by the launcher, and compared with the running job."""

    num_processes: int | None = None
    """Processes over all machines; None takes what is there. MIN:MAX sets min_processes, too."""
    min_processes: int | None = None
    """Fewest processes that a job whose workers are started again goes on with; None: as many as before."""
    num_machines: int = 1
    """Machines of the job. MIN:MAX sets min_machines, too."""
    min_machines: int | None = None
    """Fewest machines that a job begins or goes on with, others come and go (rdzv_backend c10d); None: all of them."""
    machine_rank: int = 0
    """Number of this machine, from 0."""
    main_process_ip: str | None = None
    """Address of machine 0; None is this machine."""
    main_process_port: int | None = None
    """Port on machine 0; None picks a free one on one machine, 29500 on several."""
    rdzv_backend: str = "static"
    """Rendezvous of torch's elastic agent: static, c10d, ..."""
    rdzv_conf: str = ""
    """Further rendezvous settings, `key=value,key=value`."""
    same_network: bool = True
    """Taken from files and without effect: machines find each other by the address of machine 0."""
    gpu_ids: str = "all"
    """`all`, or the numbers of the GPUs to use: `0,2`."""
    enable_cpu_affinity: bool = False
    """Bind each process to the CPU cores near its GPU; on the CPU, to cores of its own."""
    num_cpu_threads_per_process: int | None = None
    """Threads of one process (OMP_NUM_THREADS); None shares the cores among the processes."""
    max_restarts: int = 0
    """How often the elastic agent starts the workers again after a failure."""
    on_rank_loss: RankLossAction = RankLossAction.RESTART
    """When a rank is killed: restart ends all, continue has others go on (ddp, hsdp), replace also starts new ones."""
    monitor_interval_seconds: float = 0.1
    """How often the elastic agent looks at its workers, in seconds."""
    tee: str = "0"
    """Worker output that is also shown on the console, in the notation of torchrun's --tee."""
    log_dir: str | None = None
    """Folder for the workers' logs; None keeps no logs."""
    role: str = "default"
    """Name of the workers in the elastic agent's messages."""
    main_training_function: str = "main"
    """Taken from files and without effect: scripts are run, not functions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that can be set about a run."""

    compat: Compat = Compat.NONE
    """accelerate, for loops, or transformers, for the Trainer: its defaults where they give other numbers."""
    strategy: str = "auto"
    """auto, single, ddp, fsdp2, or any registered name; auto is ddp on several ranks and single on one."""
    mixed_precision: MixedPrecision = MixedPrecision.NO
    """no, bf16, fp16, or fp8: linear layers in fp8 on devices that have it, everything else in bf16."""
    output_dtype: OutputDtype = OutputDtype.AUTO
    """fp32 casts the model's outputs under mixed precision, kept casts none; auto, none beside a loss to be trained."""
    use_cpu: bool = False
    """Run on the CPU even when the machine has an accelerator."""
    debug: bool = False
    """Check before each collective that all ranks call it with the same shapes."""
    meters: bool = False
    """Log tokens and samples a second, model FLOPs, their share of the peak (MFU) and peak memory, as perf/..."""
    peak_flops: float | None = None
    """Operations a second of one device, for the MFU of meters; None takes dense bf16's of the vendor's data sheet."""
    slow_rank_updates: int = 20
    """Warn of a rank that others have waited for in so many updates, with the phase; 0 does not look for one."""
    scheduler_steps: SchedulerSteps = SchedulerSteps.PER_UPDATE
    """per_process steps a prepared schedule once for each rank in an update, as scripts for accelerate size theirs."""
    timeout_seconds: float = 1800.0
    """How long a rank waits for the others in a collective, in seconds."""
    save_async: bool = False
    """Copy what a checkpoint holds to host memory, go on, and write it on a thread: a Trainer's saves, `save_state`."""
    checkpoint_uri: str | None = None
    """Address of an object store, `s3://bucket/run`, to which each committed checkpoint is copied; None for none."""
    checkpoint_mib_per_second: float | None = None
    """Most that copies to `checkpoint_uri` take of the network, in MiB a second; None sets no bound."""
    on_nonfinite: NonFiniteAction = NonFiniteAction.RAISE
    """NaN in an update: raise ends the run (code 76), skip_step leaves it out, rollback loads the last save."""
    max_rollbacks: int = 3
    """How often in a row on_nonfinite rollback goes back to the same checkpoint before it raises."""
    ema_decay: float | None = None
    """Keep averages of the weights, `decay * average + (1 - decay) * weight` after each update; None keeps none."""
    optimizer_in_backward: bool = False
    """Update each parameter as soon as its gradient is there, and free that: gradients never take memory together."""
    on_changed_run: ChangedRunAction = ChangedRunAction.AUTO
    """A resume with other samples in an update: refuse or warn; auto refuses it in a Trainer on as many ranks."""
    loss: LossImplementation = LossImplementation.PLAIN
    """A language model's loss: chunked never makes whole logits in training; liger is Liger's kernel, on GPUs."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits are there at a time, with loss chunked, which it implies; None: by the vocabulary."""
    local_steps: int | None = None
    """Under ddp: each rank updates its own replica, and weights are exchanged every so many updates (local SGD)."""
    local_steps_after: int = 0
    """Updates with exchanged gradients that come before the first of `local_steps`: post-local SGD."""
    activation_checkpointing: str = "off"
    """What layers compute again in the backward: off, full, selective, every:N (full for each Nth), ops:KEPT,KEPT."""
    activation_offload: bool = False
    """Send what layers keep for the backward to host memory, and bring it back when it is needed."""
    dataset_mixture: Mapping[str, Any] = field(default_factory=FrozenDict)
    """Training data of several data sets by weights: a mapping, or the name of a file that is one or has one."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data loaders."""
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    """Gradient accumulation."""
    fp8: Fp8Config = field(default_factory=Fp8Config)
    """Linear layers in fp8."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """torch.compile."""
    ddp: DDPConfig = field(default_factory=DDPConfig)
    """DistributedDataParallel."""
    outer_optimizer: OuterOptimizerConfig = field(default_factory=OuterOptimizerConfig)
    """The optimizer at the exchanges of `local_steps`."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Fully sharded data parallel."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Sizes of the axes of the mesh."""
    hang: HangConfig = field(default_factory=HangConfig)
    """Ending where a rank hangs."""
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)
    """Ending at a signal."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """Starting processes."""
    deepspeed: Mapping[str, Any] = field(default_factory=FrozenDict)
    """DeepSpeed: its own sections, fields such as `zero_stage`, or the name of a file or a packaged configuration."""

    def __post_init__(self) -> None:
        # A caller's dict would make the tree mutable, and a mappingproxy could not be pickled.
        for name in ("dataset_mixture", "deepspeed"):
            object.__setattr__(self, name, FrozenDict(getattr(self, name)))

    @property
    def recomputation(self) -> str:
        """The policy of activation checkpointing in force, whichever of its two options asks for it."""
        asked_for_shards = self.strategy == "fsdp2" and self.fsdp.activation_checkpointing
        return "full" if asked_for_shards and self.activation_checkpointing == "off" else self.activation_checkpointing

    @property
    def recomputation_path(self) -> str:
        """The option that asks for it, by dotted path."""
        return f"{'fsdp.' if self.activation_checkpointing == 'off' else ''}activation_checkpointing"


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One option of the tree: its dotted path, its resolved type annotation and its default."""

    path: str
    annotation: Any
    default: Any


def _walk(section: Any, prefix: str) -> Iterator[FieldSpec]:
    hints = typing.get_type_hints(type(section))
    for item in dataclasses.fields(section):
        default = getattr(section, item.name)
        if dataclasses.is_dataclass(default):
            yield from _walk(default, f"{prefix}{item.name}.")
        else:
            yield FieldSpec(f"{prefix}{item.name}", hints[item.name], default)


_AS_BEFORE: Mapping[str, Any] = {
    "data.even_batches": True,
    "on_nonfinite": NonFiniteAction.WARN,
    "on_changed_run": ChangedRunAction.WARN,
}
COMPAT_DEFAULTS: Mapping[Compat, Mapping[str, Any]] = {
    Compat.NONE: {},
    Compat.ACCELERATE: {
        "scheduler_steps": SchedulerSteps.PER_PROCESS,
        "accumulation.loss_division": LossDivision.ACCELERATE,
        **_AS_BEFORE,
    },
    Compat.TRANSFORMERS: {"accumulation.loss_division": LossDivision.TRANSFORMERS, **_AS_BEFORE},
}
"""Defaults of options, by dotted path, that `compat` puts in the place of ours."""

LOW_ENDS = {"launch.num_processes": "launch.min_processes", "launch.num_machines": "launch.min_machines"}
"""Options that take MIN:MAX, with those that MIN is for."""


@functools.cache
def field_specs() -> Mapping[str, FieldSpec]:
    """Return every option of `RunConfig` by dotted path, in the order of the tree."""
    return {spec.path: spec for spec in _walk(RunConfig(), "")}


@functools.cache
def section_names() -> tuple[str, ...]:
    """Return the names of the nested sections: data, accumulation, fp8, compile, ddp, fsdp, parallel, launch, ..."""
    return tuple(dict.fromkeys(path.partition(".")[0] for path in field_specs() if "." in path))


def get_value(config: RunConfig, path: str) -> Any:
    """Return the value at a dotted path such as `fsdp.wrap_policy`."""
    return functools.reduce(getattr, path.split("."), config)


def get_key(content: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path of nested mappings; `default` where there is none, or null."""
    value: Any = content
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return default if value is None else value


def set_key(content: dict[str, Any], path: str, value: Any) -> None:
    """Put a value at a dotted path of nested dicts; sections that are missing are made."""
    *sections, name = path.split(".")
    for section in sections:
        inner = content.get(section)
        content[section] = inner if isinstance(inner, dict) else {}
        content = content[section]
    content[name] = value
