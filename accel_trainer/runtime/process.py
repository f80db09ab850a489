"""This process: its rank, its device, and the process group it belongs to.

With `launch/`, the only reader of the environment. It is written here for libraries that can be told in no other way:
`hidden_variable` hides one, `fix_cublas_workspace` and `form_group` set one.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from accel_trainer import logging
from accel_trainer.config import HangConfig
from accel_trainer.config.dialects.environment import ATTEMPT_VARIABLE, RETURNS_VARIABLE
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.runtime.cores import cores_of_rank
from accel_trainer.runtime.launchers import DEFAULT_PORT, LaunchInfo, bracket_ipv6, find_launch_info
from accel_trainer.runtime.own_watch import (
    Hook,
    add_hook,
    current_watch,
    leave_watch,
    start_watch,
    stop_watch,
    unwatched,
)
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.rank_loss import Survivors, close_connections, join_alike_group, noting_connections
from accel_trainer.runtime.torch_private import (
    clear_dtensor_caches,
    default_group,
    forget_default_groups,
    group_timeout,
    groups_set_aside,
    joined_groups,
    set_group_timeout,
)

# The context that init_process returned last, for functions that users call without naming a process.
_current: ProcessContext | None = None
# That of a job of several processes that this one has left, until it joins another.
_left: ProcessContext | None = None
_DEFAULT_TIMEOUT_SECONDS = 1800.0  # torch's default for gloo; for nccl that is 10 minutes
_LAST_TURN_SECONDS = 0.02
_survivors: Survivors | None = None
_watch_options: dict[str, Any] = {}
"""Of the watch of this rank, also while it has none: alone, or before it joins in the place of a lost rank."""
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""The groups of contexts of some of the job's ranks."""
_CPU_WAYS = "--cpu to the launcher, Accelerator(cpu=True), TrainingArguments(use_cpu=True)"


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """Rank, device and backend of this process. Picklable; holds no group and no mesh."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str | None
    """The backend that carries tensors of the device, e.g. "nccl"; None when the job is one process without a group."""
    ranks: tuple[int, ...] | None = None
    """The job's ranks of which this is number `rank`, where it is a context of some of them; None: of all."""
    is_alone: bool = False
    """Whether this process was started in the place of a lost one, and has not joined the others: until then it counts
    on ranks that have what it has itself, and is the main process of nothing."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of `ranks`; None where those are all."""
        return None if self.ranks is None else _groups[self.ranks]

    def among(self, group: dist.ProcessGroup) -> ProcessContext:
        """Return this process among the ranks of a group, which collectives are then over."""
        ranks = tuple(dist.get_process_group_ranks(group))
        _groups[ranks] = group
        return replace(self, rank=ranks.index(self.rank), world_size=len(ranks), ranks=ranks)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.rank == 0 and not self.is_alone

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0 and not self.is_alone

    @property
    def is_distributed(self) -> bool:
        """Whether the job has more than one rank."""
        return self.world_size > 1

    @property
    def num_nodes(self) -> int | None:
        """Number of nodes; None where they have unequally many ranks."""
        nodes, remainder = divmod(self.world_size, self.local_world_size)
        return None if remainder else nodes


def read_environment() -> dict[str, str]:
    """Return a copy of this process's environment, for `config.resolve` and `init_process`."""
    return dict(os.environ)


@contextmanager
def hidden_variable(name: str, stand_in: str | None = None) -> Iterator[None]:
    """Hide a variable from a library that would act on it, or show it another value, until the block is left."""
    value = os.environ.pop(name, None)
    if stand_in is not None:
        os.environ[name] = stand_in
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def fix_cublas_workspace() -> None:
    """Give cuBLAS workspaces of fixed sizes, unless the user has said which; nothing without CUDA."""
    # torch refuses deterministic matrix products without the variable, and has no other way to ask for them. 8 buffers
    # of 4 MiB are the one of NVIDIA's two deterministic settings that is not slower.
    # Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    if torch.version.cuda is not None and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def select_device(local_rank: int, local_world_size: int, *, use_cpu: bool) -> torch.device:
    """Return this rank's device: the machine's accelerator (cuda, xpu, mps, ...), or the CPU.

    Raises:
        ConfigError: the node has an accelerator but fewer devices than ranks, or one that cannot be shared by ranks.
    """
    accelerator = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    if accelerator.type == "mps":
        if local_world_size == 1:
            return torch.device("mps")
        raise ConfigError(
            f"{local_world_size} processes were started on this node, and its one mps device serves one process; "
            f"start one process, or run them on the CPU: {_CPU_WAYS}"
        )
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no device: {local_world_size} processes were started on this node, which has "
            f"{count} {accelerator.type} device(s); start at most {count} per node, or run on the CPU: {_CPU_WAYS}"
        )
    return torch.device(accelerator.type, local_rank)


def _select_backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    # Objects and CPU tensors are gathered too (metrics, checkpoints), hence a backend for the CPU beside the device's.
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def _backends(config: str | None = None) -> Mapping[str, str]:
    """Return the backend of each kind of device, of the group that this process has joined unless `config` is given."""
    return dist.BackendConfig(dist.Backend(config or dist.get_backend_config())).get_device_backend_map()


def _bound_device(device: torch.device, backend: str) -> torch.device | None:
    """Return the device that the group is bound to, by which nccl connects at once and meshes split it."""
    # torch splits any group that is bound for each axis of a mesh. One of gloo cannot be split: torch 2.11.0 and 2.13.0
    # end with "cannot pickle 'torch._C._distributed_c10d._Options' object".
    return device if device.type == "cuda" and _backends(backend).get("cuda") == "nccl" else None


_joins = itertools.count()
"""How many groups this process has joined by a launcher's store."""


def _init_process_group(info: LaunchInfo, device: torch.device, backend: str, timeout_seconds: float) -> None:
    address, port = info.main_address, info.main_port if info.main_port is not None else DEFAULT_PORT
    if address is None and info.world_size > 1:
        raise ProcessGroupError(
            f"{info.launcher} started rank {info.rank} of {info.world_size} and MASTER_ADDR is not set; "
            "set MASTER_ADDR to the address of rank 0's node"
        )
    timeout = timedelta(seconds=timeout_seconds)
    try:
        with noting_connections():
            store = _job_store(info, address, port, timeout)
            dist.init_process_group(
                backend,
                init_method=None if store is not None or address is None else _url(address, port),
                store=store,
                rank=info.rank,
                world_size=info.world_size,
                timeout=timeout,
                device_id=_bound_device(device, backend),
            )
            if info.world_size > 1 and _backends(backend).get("cpu") == "gloo":
                # gloo returns on each rank as soon as that one is connected: one that ended at once (a function that
                # prints its rank) would fail another that still connects, "Connection closed by peer".
                dist.all_reduce(torch.zeros((), device="cpu"))
    except (RuntimeError, ValueError, OSError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise ProcessGroupError(
            f"rank {info.rank} of {info.world_size} could not join the process group at {address}:{port} "
            f"(backend {backend}, {info.launcher}): {error}. Check that all ranks were started and can reach it"
        ) from error
    atexit.register(_leave_at_exit)


def _job_store(info: LaunchInfo, address: str | None, port: int, timeout: timedelta) -> dist.Store | None:
    """Return the store by which the ranks meet; None for that which torch finds at the address. Collective."""
    if address is None:
        return dist.HashStore()  # one process meets nobody, and opens no port
    if (store := _loopback_store(info, address, port, timeout)) is not None:
        return store
    # An agent keeps its store, and torch names each group as the first: in a second one a rank would find the address
    # that another had in the first, "Connection refused".
    if (number := next(_joins)) == 0:
        return None
    store, *_ = next(dist.rendezvous(_url(address, port), info.rank, info.world_size, timeout=timeout))
    return dist.PrefixStore(f"group {number}", store)


def _url(address: str, port: int) -> str:
    return f"tcp://{bracket_ipv6(address)}:{port}"


def _loopback_store(info: LaunchInfo, address: str, port: int, timeout: timedelta) -> dist.Store | None:
    """Return the job's store where all ranks reach it by loopback; None elsewhere, or where an agent has it."""
    if "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    try:
        is_loopback = address == "localhost" or ip_address(address).is_loopback
    except ValueError:  # a name
        is_loopback = False
    if not is_loopback:
        return None
    if info.rank:
        return dist.TCPStore(address, port, info.world_size, is_master=False, timeout=timeout)
    # The store that torch makes for itself listens to every network; it takes a socket that listens already.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        info.world_size,
        is_master=True,
        timeout=timeout,
        # Detached: Python would close the socket with its object, and the store has it from here on.
        master_listen_fd=listener.detach(),
    )


def _share_cores(environ: Mapping[str, str], device: torch.device, local_world_size: int) -> None:
    # N ranks with a full thread pool each run slower than one rank does.
    if device.type == "cpu" and local_world_size > 1 and "OMP_NUM_THREADS" not in environ:
        # Never more than now: the user may have asked for fewer.
        torch.set_num_threads(min(cores_of_rank(local_world_size), torch.get_num_threads()))


def _device_of(info: LaunchInfo, *, use_cpu: bool) -> torch.device:
    """Return the device of a rank that a launcher started; see `select_device`."""
    if info.has_own_device and torch.accelerator.device_count() == 1:
        return select_device(0, 1, use_cpu=use_cpu)
    return select_device(info.local_rank, info.local_world_size, use_cpu=use_cpu)


def _device_alone(*, use_cpu: bool) -> torch.device:
    """Return the device of a process that no launcher started: torch's current one, which the user may have set."""
    device = select_device(0, 1, use_cpu=use_cpu)
    # One that nobody has started is not asked, which would start it: a notebook could fork no workers then.
    if device.index is None or not torch.get_device_module(device).is_initialized():
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def with_index(device: int | str | torch.device) -> torch.device:
    """Return a device with its index: of `cuda`, this rank's own."""
    found = device if isinstance(device, torch.device) else torch.device(device)
    if found.type == "cpu":  # offloaded models ask in each forward of each module
        return found
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if found.index is not None or accelerator is None or found.type != accelerator.type or found.type == "mps":
        return found
    # torch's current device is this rank's once it has joined its job. Before that it is the first of the node, on
    # which all ranks would meet.
    if _current is None and (info := find_launch_info(os.environ)) is not None:
        return _device_of(info, use_cpu=False)
    return torch.device(found.type, torch.accelerator.current_device_index())


def _use_device(info: LaunchInfo | None, *, use_cpu: bool) -> torch.device:
    """Select this rank's device and make it torch's current one: FSDP2 and nccl look there."""
    device = _device_alone(use_cpu=use_cpu) if info is None else _device_of(info, use_cpu=use_cpu)
    if info is not None:
        use_device(device)
    return device


def use_device(device: torch.device) -> None:
    """Make a device torch's current one in the calling thread: each begins with the first of the node."""
    # A thread that leaves a stream of another device goes back to the one that it began with, on which CUDA then makes
    # a context: every rank had one on the first device of the node.
    if device.index is not None:  # the CPU has none, nor has mps
        torch.accelerator.set_device_index(device.index)


def _check_joined_group(device: torch.device, backend: str | None) -> None:
    """Refuse a group, which cannot be changed any more, whose backend does not serve the device or is not `backend`."""
    joined = dist.get_backend_config()
    if device.type not in joined:
        raise ConfigError(
            f"the process group was initialised with backend {joined!r}, which cannot carry {device.type} tensors; "
            f"initialise it with {_select_backend(device)!r}"
            + (f", or run on the CPU: {_CPU_WAYS}" if device.type != "cpu" else ", or do not ask for the CPU")
        )
    if backend is None:
        return
    if _backends(backend).get(device.type) != _backends(joined)[device.type]:
        raise ConfigError(
            f"backend={backend!r} was asked for, and this process has joined a group with backend {joined!r}; ask for "
            "it where the group is made, in the first Accelerator() or PartialState() of the process"
        )


def init_process(
    environ: Mapping[str, str],
    *,
    use_cpu: bool = False,
    timeout_seconds: float | None = None,
    hang: HangConfig | None = None,
    backend: str | None = None,
) -> ProcessContext:
    """Join the job that a launcher started, or stand alone when none did.

    Collective when a launcher started more than one process: every rank calls it. A later call returns the same
    context and joins nothing twice; a group that the user has initialised is used as it is.

    Args:
        timeout_seconds: how long a collective may wait, on any backend, the CPU's included. None is half an hour for a
            group that is made here, and leaves one that exists as it is.
        hang: how long ranks wait for one that does not move; None is the defaults, or leaves them as they are.
        backend: for `torch.distributed`, e.g. "nccl"; None chooses one for the device, and takes that of a group that
            exists.

    Raises:
        ProcessGroupError: the launcher's variables are incomplete, or the group cannot be formed.
        ConfigError: the device cannot serve this rank, the group that it is in has another backend, or a variable that
            is read here has a value that it cannot have.
    """
    global _current, _left
    _left = None
    if level := environ.get(logging.LEVEL_VARIABLE, "").strip():
        logging.set_level(level)
    info = find_launch_info(environ)
    is_joined = dist.is_available() and dist.is_initialized()
    if is_joined:
        rank, size = dist.get_rank(), dist.get_world_size()
        info = replace(info or LaunchInfo("user", rank, rank, size, size, None, None), rank=rank, world_size=size)
    device = _use_device(info, use_cpu=use_cpu)
    if info is None:
        logging.set_rank(0)
        _current = ProcessContext(0, 0, 1, 1, device, None)
        return _current
    if RETURNS_VARIABLE in environ and (_survivors is None or _survivors.is_alone):
        return _stand_in(info, device, timeout_seconds, hang)
    _join_group(environ, info, device, timeout_seconds, backend, is_joined=is_joined)
    logging.set_rank(info.rank, info.world_size, _wait_for_ranks)
    _leave_interrupts_to_launcher(environ)
    carrier = _backends()[device.type]
    # The job's store goes with rank 0, unless the launcher hosts it.
    hosts_store = info.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    runs_ahead = device.type != "cpu" and carrier != "gloo"
    start_watch(info.rank, info.world_size, hang, hosts_store=hosts_store, runs_ahead=runs_ahead)
    found = ProcessContext(info.rank, info.local_rank, info.world_size, info.local_world_size, device, carrier)
    _current = _same_object(found)
    return _current


def _join_group(
    environ: Mapping[str, str],
    info: LaunchInfo,
    device: torch.device,
    timeout_seconds: float | None,
    backend: str | None,
    *,
    is_joined: bool,
) -> None:
    """Join the job's process group, or take the one that the user has joined."""
    if is_joined:
        _check_joined_group(device, backend)
        if timeout_seconds is not None:
            set_group_timeout(default_group(), timeout_seconds)
    else:
        _share_cores(environ, device, info.local_world_size)
        seconds = _DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        _init_process_group(info, device, backend or _select_backend(device), seconds)


def _stand_in(
    info: LaunchInfo, device: torch.device, timeout_seconds: float | None, hang: HangConfig | None
) -> ProcessContext:
    """Join, in the place of a lost rank, a group whose other ranks have what this one has, until the real one can be.

    Whatever is prepared meanwhile is prepared for as many ranks as the launcher has started.
    """
    global _current, _watch_options
    size = info.world_size
    number, _, replica_size = map(int, os.environ[RETURNS_VARIABLE].split("/"))
    rank = number % replica_size  # in a replica of shards: each of its ranks has others
    if not dist.is_initialized():
        _share_cores(os.environ, device, info.local_world_size)
        join_alike_group(rank, size, timeout_seconds or _DEFAULT_TIMEOUT_SECONDS)
        atexit.register(_leave_at_exit)
    if hang is not None or not _watch_options:
        _watch_options = {"hang": hang, "hosts_store": False, "runs_ahead": False}
    # The last one: it says nothing that rank 0 would.
    logging.set_rank(size - 1, size)
    found = ProcessContext(rank, rank, size, info.local_world_size, device, _backends()[device.type], is_alone=True)
    _current = _same_object(found)
    return _current


def _same_object(found: ProcessContext) -> ProcessContext:
    """Return the present context where it is equal: one object for all that ask, which `rejoin` changes."""
    return _current if _current is not None and _current == found else found


def find_survivors(process: ProcessContext) -> Survivors | None:
    """Return the ranks of this job that may go on when some are lost; None where no launcher hosts their store."""
    global _survivors
    if _survivors is not None:
        return _survivors
    info = find_launch_info(os.environ)
    if info is None or info.main_address is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    timeout = group_timeout()
    store = dist.TCPStore(info.main_address, info.main_port or DEFAULT_PORT, is_master=False, timeout=timeout)
    numbers = os.environ.get(RETURNS_VARIABLE, f"{process.rank}/{process.world_size}").split("/")
    _survivors = Survivors(store, *map(int, numbers))
    atexit.register(_survivors.close)
    return _survivors


def rejoin(process: ProcessContext, survivors: Survivors) -> None:
    """Go on in the group of the members. Collective over them; changes `process` for all that hold it.

    Raises:
        RankLostError: they cannot connect.
    """
    global _watch_options
    watch = current_watch()
    timeout = group_timeout()
    if watch is not None:  # a rank that is left alone has none, and one again when another joins it
        _watch_options = watch.options
    leave_watch()
    forget_default_groups()
    if len(joined_groups()) > 1:
        clear_dtensor_caches(keep_groups=True)  # units have new meshes: to look for the old ones would be 0.1 s
    rank, size = survivors.form_group(timeout.total_seconds())
    set_group_timeout(default_group(), timeout.total_seconds())
    # The one object that loaders, units, checkpoints and states were given: they count anew with their next step.
    counts = {"rank": rank, "local_rank": rank, "world_size": size, "local_world_size": size}
    for name, value in {**counts, "backend": _backends()[process.device.type], "is_alone": False}.items():
        object.__setattr__(process, name, value)
    logging.set_rank(rank, size, _wait_for_ranks)
    if _watch_options:
        updates = PROGRESS.updates
        start_watch(rank, size, **_watch_options)
        PROGRESS.updates = updates  # which another watch begins to count anew


def form_group(process: ProcessContext) -> ProcessContext:
    """Return this process with a process group: one that has none makes one for itself alone.

    For engines whose meshes and collectives need one. It is left as any other, at the end of the script at the latest.
    """
    global _current
    if process.backend is None:
        info = LaunchInfo("accel_trainer", 0, 0, 1, 1, None, None)
        _init_process_group(info, process.device, _select_backend(process.device), _DEFAULT_TIMEOUT_SECONDS)
        # DeepSpeed 0.19.8 reads it in four places (runtime/engine.py:1966, for one), wherever the group comes from.
        os.environ.setdefault("LOCAL_RANK", "0")
        _current = process = replace(process, backend=_backends()[process.device.type])
    return process


def _leave_interrupts_to_launcher(environ: Mapping[str, str]) -> None:
    # A traceback of ctrl-C in each rank would hide our launcher's own line.
    if "ACCEL_TRAINER_LAUNCH" not in environ:
        return

    def make(previous: Hook) -> Hook:
        def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not issubclass(kind, KeyboardInterrupt):
                previous(kind, error, trace)

        return report

    add_hook("no interrupts", make)


def find_process() -> ProcessContext | None:
    """Return the context of `init_process`; None before it was called, and once the group was left."""
    return _current


def find_left_process() -> ProcessContext | None:
    """Return the context that this process had in the job that it has left; None where it had none or is in another."""
    return None if dist.is_available() and dist.is_initialized() else _left


def forget_process() -> None:
    """Be as before `init_process`, but for a process group, which stays. Not collective."""
    global _current, _left
    _current = _left = None


def current_process() -> ProcessContext:
    """Return this process's context, alone without a launcher; a ProcessGroupError before it joins its job."""
    if _current is not None:
        return _current
    info = find_launch_info(os.environ)
    if info is not None:
        raise ProcessGroupError(
            f"{info.launcher} started this process as rank {info.rank} of {info.world_size}, and it has not joined the "
            "others yet; make an Accelerator() or a PartialState() first"
        )
    return ProcessContext(0, 0, 1, 1, _device_alone(use_cpu=False), None)


def find_attempt(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how often the workers of this job were started again, and a name of their launcher's life or theirs."""
    number, _, name = environ.get(ATTEMPT_VARIABLE, "").partition(":")
    if number.isdecimal() and name:
        return int(number), name
    text = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # torch's agent, which starts all of its workers again when one has failed. Without a launcher the parent may be a
    # shell, whose next process is another job. Pids come again: with the time at which it began it is that of one life.
    pid = os.getpid() if find_launch_info(environ) is None else os.getppid()
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            begun = file.read().rpartition(")")[2].split()[19]  # in ticks since the machine's start
    except (OSError, IndexError):  # not Linux: pids alone tell
        begun = ""
    name = f"{socket.gethostname()}:{pid}:{begun}"  # not to be told: checkpoints hold it
    return int(text) if text.isdecimal() else 0, hashlib.sha256(name.encode()).hexdigest()[:16]


def find_rank() -> int:
    """Return this process's rank, before it joins its job, too; 0 without a launcher."""
    if _current is not None:
        return _current.rank
    info = find_launch_info(os.environ)
    return 0 if info is None else info.rank


def _wait_for_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()


def _leave_at_exit() -> None:
    """Leave the group of a script that just ends; torch warns about those that do not."""
    # Not after an error: leaving may wait for collectives that the other ranks never join, and the launcher learns of
    # the error only when this process is gone.
    if getattr(sys, "last_value", None) is None:
        destroy_process_group()
    else:
        close_connections()  # which ends what this process has begun with the others, now and not a moment later
    # A model that still lives, or a group that is not left, keeps gloo's threads. One of them that is about to drop a
    # tensor waits for the interpreter, and would end the process with SIGABRT if that were gone: let it have its turn.
    time.sleep(_LAST_TURN_SECONDS)


@contextmanager
def job_set_aside() -> Iterator[None]:
    """Be in no job within the block, which may join another one and leaves it, and then in one's own again."""
    global _current
    current, groups = _current, dict(_groups)
    _current = None
    _groups.clear()
    try:
        with unwatched(), groups_set_aside():
            yield
    finally:
        _current = current
        _groups.clear()
        _groups.update(groups)


def destroy_process_group() -> None:
    """Leave the process group, if there is one. Collective where the backend says so; safe to call twice."""
    global _current, _left, _survivors
    if _current is not None and _current.is_distributed:
        _left = _current
    _current = None
    if _survivors is not None:
        _survivors.close()
    _survivors = None
    # First: it says through the store that this rank leaves, and rank 0 may take the store along.
    stop_watch()
    if dist.is_available() and dist.is_initialized():
        forget_default_groups()
        _groups.clear()
        dist.destroy_process_group()
