"""The plan of a layout: the memory of a rank and the collectives of a step, without the ranks.

A model is prepared by its strategy as in a job, among ranks that do not exist, and takes one step on tensors without
memory. What is planned is what the engine does, and no formula of it: every storage that comes and goes is counted, and
every collective. 4,096 ranks take no longer than 8 but for the engine's own cutting of parameters.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_trainer.big_models.module_tensors import find_tied_parameters, retie_parameters
from accel_trainer.checkpoint.shards import local_tensor
from accel_trainer.config import Resolved
from accel_trainer.config.parallel import AxisSizes, axis_sizes
from accel_trainer.config.schema import MixedPrecision
from accel_trainer.contrib.ledger import (
    Call,
    EveryLayer,
    Ledger,
    copy_beside,
    kernels_of_gpus,
    multiply_packed,
    noting_resizes,
    one_document_in_each_row,
)
from accel_trainer.errors import AccelTrainerError, ConfigError, did_you_mean
from accel_trainer.precision import build_precision, scales_of
from accel_trainer.registry import load_strategy
from accel_trainer.runtime.process import ProcessContext, job_set_aside
from accel_trainer.runtime.torch_private import (
    fake_tensors,
    join_fake_group,
    shapes_inferred_within,
    tree_leaves,
)
from accel_trainer.strategies.api import Strategy, TrainJob, TrainUnit
from accel_trainer.techniques.chunked_loss import apply_chunked_loss, check_chunked_loss

_STATE = ("parameters", "gradients", "optimizer_state", "averages")
"""What fsdp.offload_params keeps in the host's memory."""
PARTS = (*_STATE, "buffers", "unsharded", "exchange", "activations")
"""What memory is for: `averages` are those of `ema_decay`, `unsharded` are the gathered parameters of units, `exchange`
flat buffers that collectives read and write, `activations` what the forward keeps for the backward, temporaries and
gradients not reduced yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step of one rank."""

    batch: int = 1
    """Rows that a rank reads at once, together with the ranks that read the same."""
    sequence: int = 2048
    """Tokens of a row."""
    dtype: torch.dtype | None = torch.float32
    """Of the weights, None for those that they have; mixed precision comes from the configuration."""
    optimizer: str | Callable[[Any], torch.optim.Optimizer] = "AdamW"
    """A class of torch.optim, in any case; or called with the parameters that are trained."""
    inputs: Mapping[str, Tensor] | None = None
    """A micro-batch in place of one that is made: its shapes and dtypes count, its values do not."""
    is_on_gpu: bool = True
    """Whether kernels are those of GPUs: on CPUs autocast leaves more in 16 bits, and optimizers take one by one."""
    compute_loss: Callable[[Any, Any], Any] | None = None
    """Called with the model and the batch; None takes `loss` of what it returns, or the mean of the first tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The speeds that turn bytes and operations into seconds."""

    ranks_per_node: int = 8
    bandwidth: float = 50.0
    """GB/s that a rank sends to other machines."""
    node_bandwidth: float = 300.0
    """GB/s that a rank sends within its machine."""
    teraflops: float = 400.0
    """10^12 operations of matrix products in a second, as a rank sustains them."""


class Exchange(NamedTuple):
    """The collectives of one kind over one axis, in a step."""

    kind: str
    axis: str
    """The axes along which the ranks differ that take part."""
    num_ranks: int
    calls: int
    num_bytes: int
    """Of the full tensors, over all calls."""
    seconds: float
    is_awaited: bool
    """Whether the computation waits for it: it carries activations, not parameters or gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPlan:
    """Memory and collectives of one rank; sizes in bytes, times in seconds, of one update."""

    strategy: str
    is_sharded: bool
    """Whether a rank holds its shard of the parameters alone."""
    sizes: Mapping[str, int]
    """Of the axes, and of `ep`, which is a part of dp_shard x sp."""
    num_readers: int
    recomputes: bool
    """Whether layers compute again what they have not kept."""
    checkpointing: str
    """The policy of that: off, full, selective, every:N or ops:KEPT,KEPT."""
    assumes_balance: bool
    """Whether it is a mixture, each of whose experts is assumed to get as many tokens as the others."""
    parameters: int
    gradients: int
    optimizer_state: int
    unsharded: int
    """Gathered units, at the moment with most of them."""
    activations: int
    """At the end of the forward."""
    peak: int
    peak_parts: Mapping[str, int]
    """Of `peak`, by what they are for."""
    exchanges: Sequence[Exchange]
    flops: int
    compute_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    """Of the exchange, that which no computation hides."""
    rows: int
    """Of an update over all ranks."""

    @property
    def seconds_per_row(self) -> float:
        """Time of an update, computation and exposed exchange, for each row of it."""
        return (self.compute_seconds + self.exposed_seconds) / self.rows


@contextmanager
def fake_job(world_size: int, local_world_size: int, rank: int = 0) -> Iterator[ProcessContext]:
    """Be a rank of a job whose other ranks do not exist, until the block is left: collectives move nothing."""
    with job_set_aside():
        join_fake_group(rank, world_size)
        yield ProcessContext(rank, rank % local_world_size, world_size, local_world_size, torch.device("cpu"), "fake")


def plan_layout(
    model: nn.Module, resolved: Resolved, num_processes: int, workload: Workload, cluster: Cluster
) -> LayoutPlan:
    """Return the plan of rank 0 of a job by one of our strategies, whose shards are none smaller than those of others.

    The model, on the meta device, is used up.

    Not collective, and nothing is left of it in a process that has joined a job.

    Raises:
        ConfigError: the configuration does not make such a job, or the model's step depends on values.
    """
    strategy_name = _strategy_of(resolved, num_processes)
    with fake_job(num_processes, min(cluster.ranks_per_node, num_processes)) as process:
        sizes = axis_sizes(resolved.config, resolved.describe, num_processes, process.num_nodes)
        strategy = load_strategy(strategy_name)
        facts = strategy.capabilities
        replicas = 1 if facts.shards_parameters else num_processes
        if replicas > 1:  # each takes the step of one process; what they exchange is in closed form below
            strategy = load_strategy("single")
        offloaded, resolved = _STATE * resolved.config.fsdp.offload_params, _as_planned(resolved)
        with strategy.planning(resolved, process) as (resolved, of_engine):
            strategy.readers(resolved, process)
            step = _take_step(strategy, model, resolved, process, workload)
        # Of a job on the CPU, the device's memory is the host's.
        on_host = (*offloaded, *of_engine) if workload.is_on_gpu else ()
        accumulation, in_buckets = resolved.config.accumulation, None
        if facts.builds_engine:
            measured = _measure_engine(step, on_host)
        else:
            if replicas > 1:
                # Gradients of a micro-batch that exchanges nothing are tensors of their own, beside DDP's buckets.
                always_syncs = accumulation.num_steps == 1 or accumulation.sync_each_batch
                in_buckets = resolved.config.ddp.gradient_as_bucket_view and always_syncs
            measured = _measure(step, in_buckets, on_host)
        calls = step.ledger.calls
        if replicas > 1:
            buckets = max(1, round(measured["gradients"] / 2**20 / resolved.config.ddp.bucket_cap_mb))
            times = buckets * (accumulation.num_steps if accumulation.sync_each_batch else 1)
            calls = [Call("all_reduce", tuple(range(replicas)), measured["gradients"] // buckets, times)]
        # Ranks of one axis pass over the rows of each other's experts.
        flops = step.ledger.flops + step.ledger.flops_of_experts // sizes.tp
        return LayoutPlan(
            strategy=strategy_name,
            is_sharded=facts.shards_parameters,
            sizes={**sizes._asdict(), "ep": resolved.config.parallel.ep_size},
            num_readers=sizes.num_readers,
            recomputes=resolved.config.recomputation != "off",
            checkpointing=resolved.config.recomputation,
            assumes_balance=step.ledger.has_experts,
            flops=flops,
            rows=step.num_rows * sizes.num_readers * accumulation.num_steps,
            **measured,
            **_times(calls, sizes, cluster, flops),
        )


def _take_step(
    strategy: Strategy, model: nn.Module, resolved: Resolved, process: ProcessContext, workload: Workload
) -> _Step:
    """Prepare a model and take an update; return what was counted."""
    options: Any = getattr(model, "config", None)
    if resolved.config.recomputation != "off" and options is not None:
        options.use_cache = False  # as transformers' Trainer has it, and without the warning
    facts, dtype = strategy.capabilities, workload.dtype
    if facts.builds_engine and resolved.config.mixed_precision != MixedPrecision.NO:
        dtype = torch.bfloat16  # an engine has weights of 16 bits, beside its own
    precision = build_precision(_as_on_cpu(resolved.config.mixed_precision), process.device)
    job = TrainJob(model.to(dtype=dtype).train(), [], resolved, device_placement=False)
    check_chunked_loss(job.model, resolved, torch.device("cuda" if workload.is_on_gpu else "cpu"))
    apply_chunked_loss(job.model, resolved)
    is_on_meta = facts.shards_parameters and not facts.builds_engine  # 4,096 shards of a tensor are as many views
    unit = strategy.prepare(job, precision, process) if is_on_meta else None
    with fake_tensors() as mode:
        # Its cache would hold every storage that a tensor is set to.
        mode.cache_enabled = not resolved.config.activation_offload
        _take_memory(model)
        try:
            step = _Step(model, resolved, workload)
            if facts.builds_engine:
                step.run_engine(
                    lambda own: strategy.prepare(dataclasses.replace(job, optimizers=[own]), precision, process)
                )
            else:
                step.run(unit or strategy.prepare(job, precision, process))
        except AccelTrainerError:
            raise
        except Exception as error:  # of any kind: models and optimizers raise their own
            raise ConfigError(
                f"{type(model).__name__} cannot take a step on tensors without values "
                f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}); plans are for models and "
                "optimizers in which no shape and no branch depends on values"
            ) from error
    return step


def num_rows_of(inputs: Mapping[str, Tensor]) -> int:
    """Return the rows of a micro-batch: of its first tensor that has some, since a number for all rows may be there."""
    return next((len(each) for each in inputs.values() if each.ndim), 1)


def with_options(resolved: Resolved, **options: Any) -> Resolved:
    """Return a configuration with other values of fields of `RunConfig`."""
    return dataclasses.replace(resolved, config=dataclasses.replace(resolved.config, **options))


def _as_planned(resolved: Resolved) -> Resolved:
    """Return a configuration with shards on the device, of which those on the host are not counted, and no compiler.

    A compiler has nothing to compile, and memory hardly differs.
    """
    fsdp = dataclasses.replace(resolved.config.fsdp, offload_params=False)
    return with_options(resolved, fsdp=fsdp, compile=dataclasses.replace(resolved.config.compile, backend="no"))


def _as_on_cpu(mixed_precision: str) -> str:
    """Return the precision to plan by: a CPU trains in bf16, whose sizes fp16 has.

    So has fp8 but for what FSDP gathers, which is half of it at best: torchao's layers keep their inputs in bf16.
    """
    return MixedPrecision.BF16 if mixed_precision in (MixedPrecision.FP16, MixedPrecision.FP8) else mixed_precision


def _strategy_of(resolved: Resolved, num_processes: int) -> str:
    name = resolved.config.strategy
    if name == "auto":
        name = "ddp" if num_processes > 1 else "single"
    if resolved.config.optimizer_in_backward:
        raise ConfigError(
            f"{resolved.describe('optimizer_in_backward')} updates parameters one by one while the backward goes on, "
            "which is not planned; plan without it, and take gradients away"
        )
    if resolved.config.local_steps is not None and num_processes > 1:
        raise ConfigError(
            f"{resolved.describe('local_steps')} exchanges weights after so many updates, and an outer optimizer has "
            "a copy of them, which is not planned; plan without it, and take the exchange away"
        )
    return name


def _take_memory(model: nn.Module) -> None:
    """Move a model from the meta device to the one that is planned for; tied weights stay one."""
    tied = find_tied_parameters(model)
    model.to_empty(device="cpu")  # makes a tensor for each module that has one
    retie_parameters(model, tied)
    for module in model.modules():
        for index, (holder, name, scales) in enumerate(scales_of(module)):
            setattr(holder, name, torch.empty_like(scales, device="cpu"))
            module.register_buffer(f"_scales_{index}", getattr(holder, name), persistent=False)  # to be counted
        if hasattr(module, "_scales_0"):
            vars(module)["forward"] = partial(multiply_packed, module)


# --- a step on tensors without memory ---------------------------------------------------------------------------------


class _Step:
    """An update of a prepared model, and the ledger of it."""

    unit: TrainUnit
    lasting: Mapping[str, Sequence[Tensor]]
    """Of an engine, see `TrainUnit.lasting_tensors`."""

    def __init__(self, module: nn.Module, resolved: Resolved, workload: Workload) -> None:
        self.module, self.accumulation = module, resolved.config.accumulation
        self.ledger, self.is_on_gpu = Ledger(), workload.is_on_gpu
        self.batch = _build_batch(module, workload)
        self.num_rows = num_rows_of(self.batch)
        named = workload.optimizer
        self.optimizer = (
            optimizer_builder(_optimizer_class(named), {"lr": 1e-3}, is_on_gpu=workload.is_on_gpu)
            if isinstance(named, str)
            else named
        )
        self.kernels: AbstractContextManager[Any] = kernels_of_gpus() if workload.is_on_gpu else EveryLayer()
        self.compute_loss = workload.compute_loss or _loss_of
        self.end_of_forward = 0
        """The number of events before the first backward."""
        self.first_temporary = 0
        """The number of the first storage of the optimizer's step."""
        self.size_of_temporaries = 1.0
        """Of the optimizer's step, times those that were counted."""
        self.averages: list[Tensor] = []
        self.begin = 0
        """The number of events before the update whose peak counts."""
        self.documents = nullcontext() if "position_ids" in self.batch else one_document_in_each_row()

    def run(self, unit: TrainUnit) -> None:
        """Take the step of a prepared model."""
        self.unit = unit
        optimizer = self._begin()
        unit.bind_optimizer(optimizer)
        with self._counting():
            self._train()
            self._update(optimizer)

    def run_engine(self, prepare: Callable[[Any], TrainUnit]) -> None:
        """Prepare a model by what builds an engine around it with its optimizer, and take two updates.

        The engine's buffers are counted as it makes them, by the end of the first update; the second one is counted.
        """
        # Conversions would swap tensors whose memory is counted; the module has its dtype and its device.
        vars(self.module)["_apply"] = lambda *args, **kwargs: self.module
        ledger, optimizer = self.ledger, self._begin()
        ledger.is_of_engine = True
        with self._counting():
            self.unit = prepare(optimizer)
            for _ in range(2):
                self.begin, self.end_of_forward, first = len(ledger.events), 0, ledger.num_storages
                ledger.flops = ledger.flops_of_experts = 0
                ledger.calls.clear()
                self._train()
                self.reduced = ledger.held_since(first)
                self.size_of_gradients = ledger.size_of(self.reduced)
                self.unit.step()
                self._average(self.module.parameters())
        self.lasting = self.unit.lasting_tensors()
        self.unit.release()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        # An update by `foreach` would count the full tensors of all parameters, whose shapes DTensors ask for.
        ledger, as_planned = self.ledger, shapes_inferred_within(self.ledger.paused)
        with ledger, noting_resizes(ledger), as_planned, self.documents, self.kernels:
            yield

    def _begin(self) -> torch.optim.Optimizer:
        for tensor in (*self.module.parameters(), *self.module.buffers(), *self.batch.values()):
            self.ledger.hold(local_tensor(tensor))
        return self.optimizer([p for p in self.module.parameters() if p.requires_grad])

    def _train(self) -> None:
        """Do an update's forwards and backwards. Micro-batches before the last one are alike; one stands for them."""
        if self.is_on_gpu:
            copy_beside(self.module)
        num_steps, each = self.accumulation.num_steps, self.accumulation.sync_each_batch
        micro_batches = [(1, True)] if num_steps == 1 else [(num_steps - 1, each), (1, True)]
        for self.ledger.weight, syncs in micro_batches:
            self.unit.set_gradient_sync(syncs)
            loss = self.compute_loss(self.unit.model, self.batch)
            self.end_of_forward = self.end_of_forward or len(self.ledger.events)
            self.unit.backward(loss)
            del loss

    def _average(self, parameters: Iterable[Any]) -> None:
        if (averages := self.unit.averages) is not None:
            averages.update()
            found = map(averages.of, parameters)
            self.averages = [local_tensor(average) for average in found if average is not None]

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        trained: list[Any] = [p for p in self.unit.module.parameters() if p.grad is not None]
        self.gradients = [p.grad for p in trained]
        # One of each kind is updated, a dozen instead of 290 in a 7B: each has the state of all that are like it, and
        # torch.optim's updates take one parameter after the other. Those by `foreach` have temporaries of all at once,
        # in proportion.
        first = {_kind_of_parameter(p): p for p in reversed(trained)}
        group = optimizer.param_groups[0]
        group["params"] = list(first.values())
        if group.get("foreach"):
            updated = sum(local_tensor(p).nbytes for p in first.values())
            self.size_of_temporaries = sum(local_tensor(p).nbytes for p in trained) / max(updated, 1)
        self.first_temporary = self.ledger.num_storages
        self.unit.step()
        self._average(trained)
        states = (optimizer.state[first[_kind_of_parameter(p)]] for p in trained)
        self.states = [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _kind_of_parameter(parameter: Any) -> tuple[Any, ...]:
    """Return what a parameter's update depends on, but for its values."""
    placed = (parameter.placements, parameter.device_mesh) if isinstance(parameter, DTensor) else ()
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.grad.dtype, *placed


def optimizer_builder(
    kind: Any, options: Mapping[str, Any], *, is_on_gpu: bool
) -> Callable[[Any], torch.optim.Optimizer]:
    """Return what builds an optimizer of one group, whose step has the temporaries that the class has on the device.

    torch's optimizers update all parameters at once on GPUs unless told otherwise, and fused ones have no temporaries.
    """
    known = inspect.signature(kind).parameters
    # Defaults have what a base class adds: AdamW's are Adam's.
    kept = {name: value for name, value in options.items() if name in known and name not in _KERNELS}
    if "foreach" in known and is_on_gpu and not options.get("fused"):
        kept["foreach"] = options.get("foreach") in (None, True)
    return partial(kind, **kept)


_KERNELS = ("fused", "foreach", "capturable")


def _optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise ConfigError(
            f"there is no optimizer {name!r} in torch.optim{did_you_mean(name.lower(), known) or '.'} Known: "
            f"{', '.join(known)}"
        )
    return known[name.lower()]


def _loss_of(model: nn.Module, batch: Any) -> Tensor:
    # Of its own: nobody may hold the outputs beside the loss during the backward, whose memory is counted.
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    return loss if loss is not None else tree_leaves(outputs)[0].float().mean()


_LABELS_PER_ROW = ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")


def _build_batch(model: nn.Module, workload: Workload) -> dict[str, Tensor]:
    """Return the given batch without values, or one of a model of transformers, with labels where it takes some."""
    if workload.inputs is not None:
        return {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in workload.inputs.items()}
    model = getattr(model, "get_base_model", lambda: model)()  # the forward of PEFT's model names no labels
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if name == "pixel_values":
        size = config.image_size
        shape = (workload.batch, config.num_channels, *((size, size) if isinstance(size, int) else size))
        inputs = torch.zeros(shape, dtype=workload.dtype)
    elif name == "input_ids":
        inputs = torch.zeros((workload.batch, workload.sequence), dtype=torch.long)
    else:
        raise ConfigError(
            f"{type(model).__name__} takes {name or 'inputs that it does not name'}, and batches are made of input_ids "
            "or pixel_values; plan a model of transformers with one of these"
        )
    batch = {str(name): inputs}
    if "labels" in inspect.signature(model.forward).parameters:
        per_row = name == "pixel_values" or type(model).__name__.endswith(_LABELS_PER_ROW)
        batch["labels"] = torch.zeros(inputs.shape[: 1 if per_row else 2], dtype=torch.long)
    return batch


# --- from the ledger to figures ---------------------------------------------------------------------------------------


def _measure(step: _Step, in_buckets: bool | None, on_host: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a plan that are sizes. DDP's gradients are views of its buckets, if any (`in_buckets`)."""
    ledger, module = step.ledger, step.unit.module
    parameters = [local_tensor(p) for p in module.parameters()]
    gradients = [local_tensor(gradient) for gradient in step.gradients]
    states, averages = [local_tensor(state) for state in step.states], step.averages
    kept = {"parameters": parameters, "gradients": gradients, "optimizer_state": states, "averages": averages}
    for part, tensors in ({**kept, "buffers": module.buffers()}).items():
        ledger.parts.update((ledger.hold(tensor), part) for tensor in tensors)
    sizes = {part: sum(tensor.nbytes for tensor in tensors) for part, tensors in kept.items()}
    # From the second update on there is state at all times, and DDP has its buckets from the beginning.
    fixed = {part: sizes[part] for part in ("optimizer_state", "averages")}
    del sizes["averages"]
    if in_buckets is not None:
        fixed["gradients" if in_buckets else "exchange"] = sizes["gradients"]
    return {**sizes, **_replay(step, fixed, on_host)}


def _measure_engine(step: _Step, on_host: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a plan that are sizes, of an engine's update: what it holds at its begin is counted."""
    parts, ledger = step.ledger.parts, step.ledger
    lasting = {**step.lasting, "buffers": [*step.module.buffers()], "averages": step.averages}
    numbers = {part: {ledger.hold(tensor) for tensor in tensors} for part, tensors in lasting.items()}
    for part, held in numbers.items():
        parts.update(dict.fromkeys(held, part))
    gradients = [number for number in step.reduced if number not in parts]
    parts.update(dict.fromkeys(gradients, "gradients"))
    at_begin = Counter[int]()
    for number, num_bytes in ledger.events[: step.begin]:
        at_begin[number] += num_bytes
    for number in +at_begin:
        parts.setdefault(number, "exchange")  # buffers of the engine
    sizes = {part: ledger.size_of(numbers[part]) for part in ("parameters", "optimizer_state")}
    sizes["gradients"] = ledger.size_of(numbers["gradients"]) or step.size_of_gradients
    return {**sizes, **_replay(step, {}, on_host)}


def _replay(step: _Step, fixed: Mapping[str, int], on_host: Sequence[str]) -> dict[str, Any]:
    """Return the sizes of a moment: events come and go again, beside the `fixed` bytes of each part."""
    fixed = {part: 0 if part in on_host else num_bytes for part, num_bytes in fixed.items()}
    fixed |= dict.fromkeys(on_host, 0)
    held = Counter(fixed)
    total = peak = sum(fixed.values())
    peak_parts, unsharded, activations = Counter(fixed), 0, 0
    for index, (number, counted) in enumerate(step.ledger.events, start=1):
        part = step.ledger.parts.get(number, "activations")
        num_bytes = counted if number < step.first_temporary else int(counted * step.size_of_temporaries)
        if part not in fixed or part == "exchange":
            held[part] += num_bytes
            total += num_bytes
        if total > peak and index > step.begin:
            peak, peak_parts = total, held.copy()
        unsharded = max(unsharded, held["unsharded"])
        if index == step.end_of_forward:
            activations = held["activations"]
    parts = {part: peak_parts[part] for part in PARTS}
    return {"unsharded": unsharded, "activations": activations, "peak": peak, "peak_parts": parts}


def _seconds(call: Call, cluster: Cluster) -> float:
    """Return how long a collective takes over a ring, whose links between machines all ranks of one share."""
    num_ranks = len(call.ranks)
    num_nodes = len({rank // cluster.ranks_per_node for rank in call.ranks})
    speed = cluster.node_bandwidth
    if num_nodes > 1:
        speed = cluster.bandwidth * num_ranks / num_nodes
        speed = min(speed, cluster.node_bandwidth) if num_ranks > num_nodes else speed
    shares_sent = 2 if call.kind == "all_reduce" else 1
    return shares_sent * call.num_bytes * (num_ranks - 1) / num_ranks / (speed * 1e9)


def _times(calls: Sequence[Call], sizes: AxisSizes, cluster: Cluster, flops: int) -> dict[str, Any]:
    """Return the fields of a plan that are collectives and times."""
    calls = [call for call in calls if len(call.ranks) > 1]
    exchanges = _exchanges(calls, sizes, cluster)
    compute = flops / (cluster.teraflops * 1e12)
    awaited = sum(each.seconds for each in exchanges if each.is_awaited)
    hidden = sum(each.seconds for each in exchanges if not each.is_awaited)
    others = [call for call in calls if not _is_awaited(call, sizes)]
    # The first units are gathered before there is anything to compute, the last gradients reduced when all is done.
    ends = sum(_seconds(call, cluster) for call in (*others[:1], *others[-1:]))
    return {
        "exchanges": exchanges,
        "compute_seconds": compute,
        "exchange_seconds": awaited + hidden,
        "exposed_seconds": awaited + min(hidden, max(hidden - compute, ends)),
    }


def _exchanges(calls: Iterable[Call], sizes: AxisSizes, cluster: Cluster) -> tuple[Exchange, ...]:
    groups: dict[tuple[str, tuple[int, ...], bool], list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.kind, call.ranks, _is_awaited(call, sizes)].append(call)
    return tuple(
        Exchange(
            kind=kind,
            axis=" x ".join(_axes_of(ranks, sizes)),
            num_ranks=len(ranks),
            calls=sum(call.times for call in same),
            num_bytes=sum(call.times * call.num_bytes for call in same),
            seconds=sum(call.times * _seconds(call, cluster) for call in same),
            is_awaited=is_awaited,
        )
        for (kind, ranks, is_awaited), same in groups.items()
    )


def _is_awaited(call: Call, sizes: AxisSizes) -> bool:
    """Whether the computation waits: for all but parameters, and gradients that are summed over readers."""
    is_of_gradients = call.kind == "all_reduce" and any(axis.startswith("dp_") for axis in _axes_of(call.ranks, sizes))
    return not (call.is_of_unit or is_of_gradients)


def _axes_of(ranks: Sequence[int], sizes: AxisSizes) -> list[str]:
    """Return the axes of the job's mesh along which ranks differ."""
    axes, inner = [], 1
    for axis, size in reversed(sizes._asdict().items()):
        if len({rank // inner % size for rank in ranks}) > 1:
            axes.append(axis)
        inner *= size
    return axes[::-1]
