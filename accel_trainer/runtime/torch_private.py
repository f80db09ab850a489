"""Every name of torch that accel_trainer uses and torch does not document, behind a name of our own.

Those of DDP and FSDP2 are in `torch_engines`. `PRIVATE_NAMES` has the consequence of a release without each; a test
asks the installed torch for all of them, and another keeps them out of the other files. Functions that every step calls
are bound here without a frame around them.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, reduce
from operator import attrgetter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import dataloader
from torch.utils.data._utils import worker

from accel_trainer import logging
from accel_trainer.errors import AccelTrainerError
from accel_trainer.runtime.torch_names import (
    AGENT,
    GROUP_REGISTRY,
    HANDLER,
    PRIVATE_NAMES,
    SEEN_IN,
    SHAPE_INFERENCE,
    SNAPSHOTS,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

logger = logging.get_logger(__name__)

_MAX_ALLOCATIONS = 1_000_000  # some hundred bytes each: an update of a 7B has 50,000


def _gone(path: str) -> AccelTrainerError:
    return AccelTrainerError(
        f"torch {torch.__version__} has no {path}, a private name that accel_trainer needs here; use a release of "
        f"torch that has it ({', '.join(SEEN_IN)}), or a newer release of accel_trainer"
    )


def need(owner: Any, path: str) -> Any:
    """Return the attribute of `owner` that `path` ends with; refuse a release of torch without it."""
    try:
        return getattr(owner, path.rpartition(".")[2])
    except AttributeError as error:
        raise _gone(path) from error


def find(owner: Any, path: str) -> Any:
    """Return the attribute of `owner` that `path` ends with; None without it, which is said once for each name."""
    found = getattr(owner, path.rpartition(".")[2], None)
    if found is None:
        say_missing(path)
    return found


@cache
def say_missing(path: str) -> None:
    """Log once that this release of torch has no `path`, and what the run goes on without."""
    consequence = PRIVATE_NAMES[path]
    logger.warning("torch %s has no %s; the run goes on without: %s", torch.__version__, path, consequence)


def _bind(module: str, name: str) -> Callable[..., Any]:
    """Return a function of torch; on a release without it, one that raises when it is called."""
    try:
        found: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise _gone(f"{module}.{name}")

        return refuse
    return found


foreach_add_ = _bind("torch", "_foreach_add_")
foreach_clamp_max_ = _bind("torch", "_foreach_clamp_max_")
foreach_clamp_min_ = _bind("torch", "_foreach_clamp_min_")
foreach_copy_ = _bind("torch", "_foreach_copy_")
foreach_mul_ = _bind("torch", "_foreach_mul_")
foreach_norm = _bind("torch", "_foreach_norm")
foreach_zero_ = _bind("torch", "_foreach_zero_")
queue_callback = _bind("torch.autograd", "Variable._execution_engine.queue_callback")
"""Have a function called when the backward pass that is running has ended."""
tree_leaves = _bind("torch.utils._pytree", "tree_leaves")
default_group: Callable[[], dist.ProcessGroup] = _bind("torch.distributed.distributed_c10d", "_get_default_group")
"""The group of all ranks of the job."""
default_store: Callable[[], dist.Store] = _bind("torch.distributed.distributed_c10d", "_get_default_store")
"""The key-value store through which the ranks of the job have met."""


_shared_store: dist.Store | None = None


def second_store() -> dist.Store | None:
    """Return a connection to the job's store beside the group's; None in a `fake` group, whose others are not there."""
    if dist.get_backend() == "fake":
        return None  # up to 2.13 its store refuses every call; from 2.14 on it answers all of them with nothing
    if _shared_store is not None:
        return _shared_store
    # A rank that waits in the store, for the beginning of a group for instance, holds the other one.
    store: dist.Store = default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs
    return store


def share_store(store: dist.Store) -> None:
    """Have `second_store` return this one, in whose connection nobody waits, instead of connecting.

    torch looks up the name of each address that it connects to, and one lost packet to a resolver costs 5 s.
    """
    global _shared_store
    _shared_store = store


_world: Any = _bind("torch.distributed.distributed_c10d", "_world")
OperationMode: Any = _bind("torch.utils._python_dispatch", "TorchDispatchMode")
"""Base class of contexts whose `__torch_dispatch__` is called for each operation within them."""
DeviceContext: Any = _bind("torch.utils._device", "DeviceContext")
"""The context that `with torch.device(...)` enters: a mode of functions."""
_make_subclass = _bind("torch", "Tensor._make_subclass")
swap_values = _bind("torch", "_C._swap_tensor_impl")
"""Exchange memory, device and dtype of two tensors, which keep their classes and attributes."""


def operation_argument(operation: Any, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the value that a call of an operation has for one of its arguments: that whose name is the first found.

    Its default where the call gives none, 0 for a default of nothing; None where it has no argument of these names.
    """
    if not hasattr(operation, "overloadpacket"):  # of higher order: it takes what it likes
        return None
    schema = need(operation, "torch.ops.aten.mm.default._schema")
    for index, argument in enumerate(schema.arguments):
        if argument.name in names:
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            return 0 if given is None else given
    return None


def kept_results(context: Any) -> list[Any]:
    """Return the results that selective checkpointing's forward keeps: each has a tensor `val`, and `get_val`."""
    storage = need(context, "torch.utils.checkpoint._CachingTorchDispatchMode.storage")
    return [leaf for leaf in tree_leaves(storage) if isinstance(getattr(leaf, "val", None), Tensor)]


def count_kept_alone(context: Any, keeps: Callable[[Any], bool]) -> None:
    """Have selective checkpointing's repetition go by the number of operations that are kept, and of no other.

    Others may be more than in the forward: engines release a layer's parameters in hooks, where they have kept them in
    the forward for their next use, and autocast casts weights that an earlier layer has cast in the forward.
    """
    always = getattr(torch.utils.checkpoint, "_RECOMPUTE", None)  # from torch 2.13 on, which counts all
    if always is None:
        return
    noted = need(context, "torch.utils.checkpoint._CachedTorchDispatchMode.storage").get
    uncounted = SimpleNamespace(get=lambda index: always)

    def find(key: Any) -> Any:
        operation = key[0] if isinstance(key, tuple) else key  # a compiled region's has its number beside it
        return noted(key) if keeps(operation) else uncounted

    context.storage = SimpleNamespace(get=find)


scaler_states: Callable[[torch.amp.GradScaler], dict[int, dict[str, Any]]] = attrgetter("_per_optimizer_states")
"""By the id of an optimizer, a GradScaler's notes on its present step: `found_inf_per_device`, for one."""

ORIGINAL_MODULE = "_orig_mod"
"""The attribute under which the module that `torch.compile(model)` returns keeps the model."""
RESET_METHODS = ("reset_parameters", "_reset_parameters")
"""Methods by which modules of torch initialise their own parameters."""

_Loader = TypeVar("_Loader", bound=dataloader.DataLoader[Any])

LOADER_AT_REST: Mapping[str, None] = {"_iterator": None, "_IterableDataset_len_called": None}
"""The attributes that a pass over a `DataLoader` leaves behind, as they are before the first."""


def over_batches(loader: _Loader, batches: Iterator[Any]) -> _Loader:
    """Return a loader of the same class and attributes that reads these batches once, in the place of its dataset."""
    reader = type(loader).__new__(type(loader))
    reader.__dict__.update(loader.__dict__, _get_iterator=lambda: batches)
    return reader


class AsWorker:
    """A context, to be entered again and again, in which `get_worker_info()` answers as in one of several workers."""

    def __init__(self, index: int, num_workers: int, dataset: Any) -> None:
        """`num_workers` 0: as in a process that is no worker."""
        need(worker, "torch.utils.data._utils.worker._worker_info")
        facts = {"id": index, "num_workers": num_workers, "seed": torch.initial_seed(), "dataset": dataset}
        self._info = worker.WorkerInfo(**facts) if num_workers else None

    def __enter__(self) -> None:
        self._before, worker._worker_info = worker._worker_info, self._info

    def __exit__(self, *exception: object) -> None:
        worker._worker_info = self._before


def is_worker_done(frame: FrameType | None) -> bool:
    """Return whether a loader's worker that is stopped in `frame` is to end; False where torch says it elsewhere."""
    while frame is not None and frame.f_code.co_name != "_worker_loop":
        frame = frame.f_back
    done = None if frame is None else frame.f_locals.get("done_event")
    return done is not None and bool(done.is_set())


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Add an axis to a mesh's root, over all ranks of a submesh, under a name, and return it. Collective."""
    axis: DeviceMesh = need(mesh, "torch.distributed.device_mesh.DeviceMesh._flatten")(name)
    return axis


def unflatten_mesh(mesh: DeviceMesh, axis: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh over the same ranks that has several axes in the place of one. Collective."""
    index = (mesh.mesh_dim_names or ()).index(axis)  # 2.11 refuses the names that it has: `in` stands for `not in`
    cut: DeviceMesh = need(mesh, "torch.distributed.device_mesh.DeviceMesh._unflatten")(index, sizes, names)
    return cut


def clear_forward_hooks(module: nn.Module) -> None:
    """Take off the hooks that run around a module's forward, its submodules' not."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        need(module, f"torch.nn.Module.{name}").clear()


def keeps_iterator(loader: dataloader.DataLoader[Any]) -> bool:
    """Whether a loader holds an iterator over its dataset other than that of its persistent workers."""
    made_by_loaders = find(dataloader, "torch.utils.data.dataloader._BaseDataLoaderIter") or ()
    return any(isinstance(value, made_by_loaders) for name, value in vars(loader).items() if name != "_iterator")


def check_scaler(scaler: torch.amp.GradScaler) -> None:
    """Refuse a scaler that `scaler_states` cannot read, since this release of torch keeps its notes elsewhere."""
    if scaler.is_enabled():
        need(scaler, "torch.amp.GradScaler._per_optimizer_states")


def scales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step takes a GradScaler's scale and overflows itself, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def compile_call(module: nn.Module, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let calls of a module run a compiled version of the call that it has, hooks included."""
    need(nn.Module, "torch.nn.Module._compiled_call_impl")
    module._compiled_call_impl = compiler(need(module, "torch.nn.Module._call_impl"))


def parameter_like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Return a parameter of the same class, with other data and the same attributes; no `__init__` is run."""
    made: nn.Parameter = _make_subclass(type(parameter), data, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def copy_module(
    module: nn.Module,
    own_class: type[nn.Module],
    copy_parameter: Callable[[Tensor], nn.Parameter],
    copy_buffer: Callable[[Tensor], Tensor],
    copy_child: Callable[[nn.Module], nn.Module],
) -> nn.Module:
    """Return a module of `own_class`, whose `__init__` is not run, with copies of a module's tensors and children."""
    copied: nn.Module = object.__new__(own_class)
    copied.__dict__.update(module.__dict__)
    copiers: tuple[Callable[[Any], Any], ...] = copy_parameter, copy_buffer, copy_child
    for registry, copier in zip(("_parameters", "_buffers", "_modules"), copiers, strict=True):
        entries: Mapping[str, Any] = need(module, f"torch.nn.Module.{registry}")
        # An entry of None is registered, and has no value yet.
        copied.__dict__[registry] = {name: None if entry is None else copier(entry) for name, entry in entries.items()}
    return copied


def tensor_registry(module: nn.Module, name: str) -> dict[str, Any] | None:
    """Return the dict in which a module keeps its parameter or buffer `name`; None where it has neither."""
    # Offloading exchanges tensors at each call of each layer; `nn.Module.__setattr__` would take most of that time.
    for registry in ("_parameters", "_buffers"):
        entries: dict[str, Any] = need(module, f"torch.nn.Module.{registry}")
        if name in entries:
            return entries
    return None


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the registry of a module's own parameters by name; a forward finds those that are put there."""
    registry: dict[str, Any] = need(module, "torch.nn.Module._parameters")
    return registry


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the registry of a module's own buffers by name."""
    registry: dict[str, Tensor | None] = need(module, "torch.nn.Module._buffers")
    return registry


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its state dict leaves out."""
    return set(need(module, "torch.nn.Module._non_persistent_buffers_set"))


def dtensor_like(tensor: Any, local: Tensor) -> Tensor:
    """Return this rank's shard `local` as a DTensor with mesh, placements, shape and strides of `tensor`."""
    # As FSDP2 makes its parameters: `from_local` derives the same layout anew, in ten times the time. Of a load of
    # 419 MiB in 111 shards that was a tenth.
    spec = find(tensor, "torch.distributed.tensor.DTensor._spec")
    if spec is not None:
        return type(tensor)(local, spec, requires_grad=False)
    return type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )


def completed_work(result: Any) -> dist.Work:
    """Return the handle of a collective that has ended, for a process group written in Python."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    work: dist.Work = _bind("torch._C._distributed_c10d", "_create_work_from_future")(future)
    return work


def start_worker_anew(agent: SimpleElasticAgent, local_rank: int, environment: Mapping[str, str]) -> int:
    """Start the program of one of an elastic agent's workers anew, right behind `forget_worker`; return the pid."""
    context = need(agent, f"{AGENT}._pcontext")
    handler = context.subprocess_handlers[local_rank]
    # With the output files of the first one, which it goes on in. The agent, which has not looked at that one since,
    # takes it for the same worker.
    environment = {**context.envs[local_rank], **environment}
    handler.proc = need(handler, f"{HANDLER}._popen")(handler.proc.args, environment)
    pid: int = handler.proc.pid
    return pid


def forget_worker(agent: SimpleElasticAgent, local_rank: int) -> None:
    """Have torch's elastic agent go on without one of its workers, which has ended."""
    worker = need(agent, f"{AGENT}._pcontext").subprocess_handlers[local_rank].proc
    worker.wait()
    worker.returncode = 0  # as the agent takes one that has come to its end


def join_fake_group(rank: int, world_size: int) -> None:
    """Join a job as one of ranks that do not exist: collectives return at once, and move nothing. Not collective."""
    store = _bind("torch.testing._internal.distributed.fake_pg", "FakeStore")()  # its module knows the backend
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a context whose operations give tensors without memory, of the device and sizes that they would have."""
    mode: AbstractContextManager[Any] = _bind("torch._subclasses.fake_tensor", "FakeTensorMode")(
        allow_non_fake_inputs=True
    )
    return mode


@contextmanager
def shapes_inferred_within(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Have DTensors find the shapes of their results, by operations on full tensors without values, in a context."""
    *module, owner_name, name = SHAPE_INFERENCE.split(".")
    owner = _bind(".".join(module), owner_name)
    inherited = find(owner, SHAPE_INFERENCE)
    if inherited is None:
        yield
        return

    def infer(*args: Any) -> Any:
        with context():
            return inherited(*args)

    setattr(owner, name, infer)
    try:
        yield
    finally:
        setattr(owner, name, inherited)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values, as those that operations give within `fake_tensors`."""
    return isinstance(tensor, getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ()))


def has_hooks(tensor: Tensor) -> bool:
    """Whether functions are called with a tensor's gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's values have been changed in place."""
    return tensor._version


class _AttentionKernel(NamedTuple):
    """An operation of torch that returns attention and the logarithms of its sums, with its backward's arguments."""

    name: str
    gradient: str
    """The argument of the backward for the gradient of the output."""
    options: Mapping[str, Any]
    """Of the forward."""
    rest: tuple[str, ...]
    """The arguments of the backward for what the forward returns behind output and sums."""
    backward_options: Mapping[str, Any]


_FLASH = _AttentionKernel(
    "_scaled_dot_product_flash_attention",
    "grad_out",
    {},
    ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
    {},
)
_EFFICIENT = _AttentionKernel(
    "_scaled_dot_product_efficient_attention",
    "grad_out_",
    {"attn_bias": None, "compute_log_sumexp": True},
    ("philox_seed", "philox_offset"),
    {"attn_bias": None, "grad_input_mask": [True, True, True, False]},
)


def has_attention_kernels(device: torch.device) -> bool:
    """Whether torch has for a kind of device the kernels that its ring attention is made of."""
    key = _bind("torch._C", "_dispatch_key_for_device")(device.type)
    is_there = _bind("torch._C", "_dispatch_has_kernel_for_dispatch_key")
    return all(is_there(f"aten::{kernel.name}", key) for kernel in (_FLASH, _EFFICIENT))


@cache
def _ring(name: str) -> Any:
    # Not with this module: its own takes 0.3 s to import.
    return _bind("torch.distributed.tensor.experimental._context_parallel._attention", name)


class RingAttention(NamedTuple):
    """torch's ring attention of one layer: causal, of slices that have one part from each end of the sequence.

    All tensors are (B, H, S, D), of one dtype; keys and values may have fewer heads. Collective, both ways.
    """

    group: dist.ProcessGroup
    comm_strategy: str
    """"allgather" or "alltoall"."""
    kernel: _AttentionKernel
    scale: float

    @classmethod
    def among(cls, group: dist.ProcessGroup, comm_strategy: str, query: Tensor, scale: float) -> RingAttention:
        """Return that of the kernel for such queries: flash in 16 bits, where it is not switched off."""
        flash = query.dtype.itemsize == 2 and query.shape[-1] <= 256 and torch.backends.cuda.flash_sdp_enabled()
        return cls(group, comm_strategy, _FLASH if flash else _EFFICIENT, scale)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return attention, the logarithms of its sums, and the other arguments of `backward`."""
        groups = query.shape[1] // key.shape[1]
        operation = getattr(torch.ops.aten, self.kernel.name).default

        def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
            return operation(query, _repeat_heads(key, groups), _repeat_heads(value, groups), **options)

        with self._options():
            output, sums, *rest = _ring("_templated_ring_attention")(
                self.group, 2, attend, query, key, value, is_causal=True, scale=self.scale, **self.kernel.options
            )
        return output, sums, dict(zip(self.kernel.rest, rest, strict=False))

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        sums: Tensor,
        rest: Mapping[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of this rank's queries, keys and values."""
        groups = query.shape[1] // key.shape[1]
        operation = getattr(torch.ops.aten, f"{self.kernel.name}_backward").default

        def attend(*, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
            of_query, of_key, of_value, *_ = operation(
                key=_repeat_heads(key, groups), value=_repeat_heads(value, groups), **options
            )
            return of_query, of_key.unflatten(1, (-1, groups)).sum(2), of_value.unflatten(1, (-1, groups)).sum(2)

        options = {"dropout_p": 0.0, "scale": self.scale, **self.kernel.backward_options, **rest}
        with self._options():
            gradients: tuple[Tensor, Tensor, Tensor] = _ring("_templated_ring_attention_backward")(
                self.group, 2, attend, gradient, self.kernel.gradient, query, key, value, output, sums, True, **options
            )
        return gradients

    @contextmanager
    def _options(self) -> Iterator[None]:
        """Set options that torch keeps for the whole process, and put them back."""
        options, methods = _ring("_cp_options"), _ring("_RotateMethod")
        before = options.rotate_method, options.enable_load_balance
        options.rotate_method = methods.ALL_GATHER if self.comm_strategy == "allgather" else methods.ALL_TO_ALL
        options.enable_load_balance = True
        try:
            yield
        finally:
            options.rotate_method, options.enable_load_balance = before


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def joined_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that this process is in: the job's own, those of meshes, and the user's."""
    return list(need(_world, "torch.distributed.distributed_c10d._world.pg_map"))


@contextmanager
def groups_set_aside() -> Iterator[None]:
    """Be in no process group within the block, and leave that which it joins; then be in one's own again.

    Not collective: no rank learns of it, and nothing of the groups is closed. No other thread may begin a collective.
    """
    register, forget_all = (_bind("torch._C._distributed_c10d", name) for name in GROUP_REGISTRY)
    set_default = _bind("torch.distributed.distributed_c10d", "_update_default_pg")
    # What destroy_process_group() clears (torch 2.13, distributed_c10d.py:2409).
    tables = (
        _world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config, _world.pg_to_tag,
        _world.tags_to_pg, _world.pg_coalesce_state,
    )  # fmt: skip
    kept, default, count = [dict(table) for table in tables], _world.default_pg, _world.group_count
    # Each init_process_group() puts another prefix before each line of a traceback (torch 2.13, distributed_c10d.py).
    excepthook = sys.excepthook

    def hold(contents: Sequence[Mapping[Any, Any]], group: Any, number: int) -> None:
        forget_all()
        for table, content in zip(tables, contents, strict=True):
            table.clear()
            table.update(content)
        for each, name in _world.pg_names.items():
            register(name, each)
        set_default(group)
        _world.group_count = number

    clear_dtensor_caches(keep_groups=True)
    hold([{}] * len(tables), None, 0)
    try:
        yield
    finally:
        forget_default_groups()
        if dist.is_initialized():
            dist.destroy_process_group()
        clear_dtensor_caches(keep_groups=True)  # else meshes of the own job may be those of the other one
        hold(kept, default, count)
        sys.excepthook = excepthook


def count_groups_anew() -> None:
    """Name the next group as the first one of a process: names are in the keys by which its ranks meet."""
    # destroy_process_group() does so, but not where the group could not be formed, on some of its ranks: they would
    # look for the others of the next one by another key (torch 2.13, `_process_group_name`).
    _world.group_count = 0


def group_device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the kinds of device whose tensors a group carries."""
    return list(need(group, "torch.distributed.ProcessGroup._device_types"))


def _backends(group: dist.ProcessGroup) -> list[Any]:
    get = need(group, "torch.distributed.ProcessGroup._get_backend")
    return [get(device) for device in group_device_types(group)]


def set_group_timeout(group: dist.ProcessGroup, timeout_seconds: float) -> None:
    """Bound how long collectives of an existing group may wait, on each of its backends that has such a bound."""
    for backend in _backends(group):
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(timedelta(seconds=timeout_seconds))


def group_timeout(group: dist.ProcessGroup | None = None) -> timedelta:
    """Return how long collectives of a group may wait; the job's own group when None."""
    for backend in _backends(group or default_group()):
        timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None:
            return timeout
    return default_pg_timeout


_SENT = WeakKeyDictionary[dist.ProcessGroup, int]()
"""What begun_collectives() leaves out, by group."""


def begun_collectives() -> dict[str, int]:
    """Return the number of collectives that this rank has begun, by the name of the group. Callable from any thread."""
    return {str(group.group_name): _sequence_number(group) - _SENT.get(group, 0) for group in joined_groups()}


def _sequence_number(group: dist.ProcessGroup) -> int:
    read = find(group, "torch.distributed.ProcessGroup._get_sequence_number_for_group")
    with suppress(RuntimeError):  # a backend that does not count
        return 0 if read is None else read()
    return 0


@contextmanager
def between_two_ranks() -> Iterator[None]:
    """Have begun_collectives() leave out what the block sends and receives: other ranks do not, and gloo counts it."""
    group = default_group()
    before = _sequence_number(group)
    try:
        yield
    finally:
        _SENT[group] = _SENT.get(group, 0) + _sequence_number(group) - before


@contextmanager
def recording_allocations(path: Path, device: torch.device) -> Iterator[None]:
    """Write the allocations of the block on a GPU, for pytorch.org/memory_viz; nothing of another device."""
    record, dump = (find(torch.cuda.memory, f"torch.cuda.memory._{name}") for name in SNAPSHOTS)
    if device.type != "cuda" or record is None or dump is None:
        yield
        return
    record(max_entries=_MAX_ALLOCATIONS)
    try:
        yield
    finally:
        dump(str(path))
        record(enabled=None)


def last_collective() -> str:
    """Return the last collective in torch's flight recorder, in words; empty where the backend records none."""
    module = sys.modules.get("torch._C._distributed_c10d")
    dump = None if module is None else find(module, "torch._C._distributed_c10d._dump_fr_trace_json")
    entries = [] if dump is None else json.loads(dump() or b"{}").get("entries", [])
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry.get("record_id", 0))
    return f"{last['profiling_name']} of {last['input_dtypes']} {last['input_sizes']}"


def remaining_restarts(agent: SimpleElasticAgent) -> int:
    """Return how often torch's elastic agent may still start its workers again."""
    return int(need(agent, f"{AGENT}._remaining_restarts"))


def end_restarts(agent: SimpleElasticAgent) -> None:
    """Have torch's elastic agent start its workers no more."""
    need(agent, f"{AGENT}._remaining_restarts")
    agent._remaining_restarts = 0


def restart_workers(agent: SimpleElasticAgent, group: Any) -> None:
    """Have torch's elastic agent end its workers, meet the other machines and start the workers anew."""
    need(agent, f"{AGENT}._restart_workers")(group)


def forget_default_groups() -> None:
    """Take the group out of the functions that have it for a default argument, so that it is closed when it is left."""
    # `torch.distributed.nn.functional`, which comes with FSDP, takes the group that is there when it is imported. One
    # that is never closed has threads until the end, and one of them that drops a tensor while the interpreter goes
    # ends the process with SIGABRT. None, which they get here, means the group of the time of the call.
    for function in vars(sys.modules.get("torch.distributed.nn.functional", object)).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)


def clear_dtensor_caches(*, keep_groups: bool = False) -> None:
    """Clear DTensor's caches; every mesh loses its groups, unless `keep_groups`."""
    # They keep connections of a group open that was left, for whose end other ranks wait, and put it on new tensors.
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, name in (
        ("debug", "_clear_sharding_prop_cache"),
        ("_redistribute", "clear_redistribute_planner_cache"),
        ("_redistribute", "_gen_transform_infos.cache_clear"),
        # Filled where DTensor chooses a layout by its costs: for the norm of gradients, for one.
        ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
    ):
        with suppress(AccelTrainerError):
            _bind(f"torch.distributed.tensor.{module}", name)()
    # torch 2.11 keeps layouts, and with them meshes, that its own clearing does not reach.
    for tracked in () if keep_groups else gc.get_objects():
        if type(tracked) is DeviceMesh:  # isinstance() asks each object for its class, and torch's deprecated ones warn
            getattr(tracked, "_pg_registry", {}).clear()
