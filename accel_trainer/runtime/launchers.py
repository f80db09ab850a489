"""Rank, world size and address as launchers give them: torchrun, SLURM, Open MPI, other MPIs; free ports."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from accel_trainer.errors import ProcessGroupError

DEFAULT_PORT = 29500  # torchrun's
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_INTEL_MPI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """A process's rank and address by its launcher, before anything is initialised."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    main_address: str | None
    main_port: int | None
    has_own_device: bool = False
    """Whether the launcher shows each task its own accelerator, as device 0."""


def bracket_ipv6(address: str) -> str:
    """Return an address as it stands before a port: one of IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a launcher's variable as a number; without it, the default, or an error when there is none."""
    value = environ.get(name, default)
    if value is None:
        raise ProcessGroupError(
            f"{name} is not set although another variable of the launcher is; set it, or start the job with "
            "`accel-trainer launch` or torchrun"
        )
    try:
        return int(value)
    except ValueError:
        raise ProcessGroupError(f"{name}={value!r} is not an integer; check what launched this process") from None


def _from_torchrun(environ: Mapping[str, str]) -> LaunchInfo:
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    single_node = "LOCAL_WORLD_SIZE" not in environ and "LOCAL_RANK" not in environ
    return LaunchInfo(
        launcher="torchrun",
        rank=rank,
        local_rank=rank if single_node else _integer(environ, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", world_size),
        main_address=environ.get("MASTER_ADDR"),
        main_port=_integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
    )


def first_slurm_host(node_list: str) -> str:
    """Return the first host of a SLURM node list such as `gpu[003-007,012],login1`."""
    entry = re.split(r",(?![^\[]*\])", node_list)[0]  # a comma outside of brackets
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", entry)
    if not host or "[" in host or "]" in host:
        raise ProcessGroupError(f"SLURM node list {node_list!r} cannot be read; set MASTER_ADDR to the first node")
    return host


def _slurm_tasks_on_this_node(environ: Mapping[str, str], world_size: int) -> int:
    # `4(x2),3`: 4 tasks on two nodes, 3 on the third.
    layout = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    nodes = [int(tasks) for tasks, repeats in layout for _ in range(int(repeats or 1))]
    node = _integer(environ, "SLURM_NODEID", 0)
    return nodes[node] if node < len(nodes) else world_size


def _from_slurm(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Return srun's answer; None for a step of one task, which stands alone."""
    if (components := _integer(environ, "SLURM_HET_SIZE", 1)) > 1:
        # A plain srun starts the first component alone, and the nodes of the others would idle.
        raise ProcessGroupError(
            f"SLURM_HET_SIZE is {components}: this is a step of a heterogeneous job, whose components have nodes of "
            "their own kind each, and here all nodes of a job run as many ranks; give sbatch one component, or unset "
            "SLURM_HET_SIZE where this step is a job by itself"
        )
    rank, world_size = _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_STEP_NUM_TASKS")
    node_list = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    address = environ.get("MASTER_ADDR") or (first_slurm_host(node_list) if node_list else None)
    # Two jobs on one node must not meet, nor two steps of one: the port follows their numbers, below 32768, where Linux
    # begins to hand out ports by itself.
    number = _integer(environ, "SLURM_JOB_ID", 0) + 1009 * _integer(environ, "SLURM_STEP_ID", 0)
    port = _integer(environ, "MASTER_PORT", 12000 + number % 20000)
    info = LaunchInfo(
        launcher="SLURM",
        rank=rank,
        local_rank=_integer(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=_slurm_tasks_on_this_node(environ, world_size),
        main_address=address,
        main_port=port,
        has_own_device="SLURM_GPUS_PER_TASK" in environ,
    )
    return info if world_size > 1 else None


def _from_mpi(environ: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> LaunchInfo:
    world_size = _integer(environ, size)
    local_world_size = _integer(environ, local_size, world_size)
    address = environ.get("MASTER_ADDR")
    # Only where MPI says that all ranks are here: on two nodes, each would wait for the other on its own loopback.
    if address is None and 1 < world_size == local_world_size and local_size in environ:
        address = "127.0.0.1"
    index = _integer(environ, rank)
    return LaunchInfo(
        launcher="MPI",
        rank=index,
        local_rank=_integer(environ, local_rank, index),
        world_size=world_size,
        local_world_size=local_world_size,
        main_address=address,
        main_port=_integer(environ, "MASTER_PORT", DEFAULT_PORT),
    )


def _check_consistent(info: LaunchInfo) -> None:
    """Refuse numbers that contradict each other: the group would wait for ranks that nobody starts."""
    if not 0 <= info.rank < info.world_size:
        raise ProcessGroupError(
            f"{info.launcher} says rank {info.rank} of {info.world_size}; ranks go from 0 to world size - 1"
        )
    if info.local_world_size > info.world_size:
        raise ProcessGroupError(
            f"{info.launcher} says {info.local_world_size} processes on this node and {info.world_size} in the whole "
            "job; check what launched this process"
        )
    if not 0 <= info.local_rank < info.local_world_size:
        raise ProcessGroupError(
            f"{info.launcher} says local rank {info.local_rank} of {info.local_world_size} on this node; they go "
            "from 0 to the node's number of processes - 1"
        )


def find_launch_info(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Return the launcher's answer: torchrun's variables first, then Open MPI, Intel MPI / MPICH and SLURM (srun).

    None when no launcher started this process.

    Raises:
        ProcessGroupError: the variables of a launcher are incomplete, contradict each other, or are those of a
            heterogeneous job.
    """
    info = None
    if "RANK" in environ or ("WORLD_SIZE" in environ and "LOCAL_RANK" in environ):
        info = _from_torchrun(environ)
    elif "OMPI_COMM_WORLD_SIZE" in environ:
        info = _from_mpi(environ, *_OPEN_MPI)
    # srun can set the variables of PMI, too, for its own tasks.
    elif "PMI_SIZE" in environ and "PMI_RANK" in environ and "SLURM_PROCID" not in environ:
        info = _from_mpi(environ, *_INTEL_MPI)
    elif "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        info = _from_slurm(environ)
    elif environ.get("WORLD_SIZE", "1") != "1":
        # Somebody expects several processes, and this one does not know which it is: not a job of one.
        info = _from_torchrun(environ)
    if info is not None:
        _check_consistent(info)
    return info


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a process of this machine listens on a TCP port; 29500, torchrun's, when None."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", DEFAULT_PORT if port is None else port)) == 0


def get_free_port() -> int:
    """Return a TCP port of this machine on which nobody listens now; another process may take it before you do."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
