"""The job of a scheduler that has started this launcher: once on each of its machines, or in place of each rank.

A launcher that did not look would start a job of its own there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accel_trainer.config import Resolved
from accel_trainer.config.document import Entry
from accel_trainer.config.files import FileConfig
from accel_trainer.config.layer import Layer, SourceKind
from accel_trainer.errors import ConfigError
from accel_trainer.launch.hosts import HostJob, agent_options
from accel_trainer.runtime.cores import usable_cores
from accel_trainer.runtime.launchers import LaunchInfo, find_launch_info

_NAMES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
}
"""Variables that say which process of a job this is, by the launcher that `find_launch_info` names."""
_COUNTS = ("num_machines", "num_processes")
_OPTIONS = {
    "PET_MASTER_ADDR": "main_process_ip",
    "PET_MASTER_PORT": "main_process_port",
    "PET_RDZV_BACKEND": "rdzv_backend",
    "PET_MAX_RESTARTS": "max_restarts",
}
"""Defaults of torchrun's options (`PET_` and the option's name), by the field of `LaunchConfig`."""


@dataclass(frozen=True, slots=True)
class OuterJob:
    """The machines of a job, and the place that this launcher has among them."""

    variables: tuple[str, ...]
    """Those that describe it."""
    num_machines: int
    machine_rank: int
    num_local_processes: int | None = None
    """Processes that each machine starts; None is one for each device."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of `LaunchConfig`: the address, the port and what else a scheduler knows."""
    rank: LaunchInfo | None = None
    """The rank that this process is itself, where the scheduler starts each of them; nothing is started then."""

    @property
    def num_processes(self) -> int | None:
        """Processes over all machines; None where their number depends on the devices."""
        if self.rank is not None:
            return self.rank.world_size
        return None if self.num_local_processes is None else self.num_local_processes * self.num_machines

    def describe(self) -> str:
        """Return one line on the job and on this launcher's place in it."""
        by = f"by {', '.join(self.variables)}"
        if self.rank is not None:
            return f"this is rank {self.rank.rank} of {self.rank.world_size} ({by}), and runs the script as that rank"
        where = self.options.get("main_process_ip") or "an address that nothing has told"
        return f"this is machine {self.machine_rank} of {self.num_machines}, machine 0 is at {where} ({by})"

    def layer(self) -> Layer:
        """Return the options that it sets, at the level of environment variables."""
        where = ", ".join(self.variables)
        layer = Layer(SourceKind.ENVIRONMENT)
        for name, value in self._fields():
            layer.put(f"launch.{name}", Entry(name, value, where, f"{name} (from {where})"))
        return layer

    def check(self, resolved: Resolved, file: FileConfig | None) -> None:
        """Refuse a configuration that is for another job."""
        for name, value in self._fields():
            path = f"launch.{name}"
            settings = {} if file is None or name not in _COUNTS else file.settings
            found = [(each.value, each.source.where) for each in [settings.get(path)] if each is not None]
            if name in (*_COUNTS, "machine_rank") and resolved.source(path).kind is not SourceKind.DEFAULT:
                found.append((resolved.value(path), resolved.source(path).where))
            for other, where in found:
                if value is not None and other != value:
                    raise ConfigError(
                        f"{name} is {other} (from {where}), and the job that started this launcher has {value} (from "
                        f"{', '.join(self.variables)}); leave the option out, or unset those variables for a job of "
                        "its own"
                    )

    def check_starter(self, resolved: Resolved, hosts: HostJob | None) -> None:
        """Refuse options of the process that starts the ranks, where a scheduler starts them."""
        by = ", ".join(self.variables)
        if hosts is not None:
            raise ConfigError(
                f"deepspeed_hostfile is {str(hosts.hostfile)!r}, whose machines are started from one of them, and a "
                f"scheduler has started this launcher as one of several (by {by}); leave the hostfile out, or unset "
                "those variables"
            )
        unmet = agent_options(resolved) if self.rank is not None else []
        if unmet:
            raise ConfigError(
                f"{', '.join(map(resolved.describe, unmet))}: the scheduler starts each rank here (by {by}), and only "
                "it can do that; leave the option out, or start one task per machine"
            )

    def _fields(self) -> Iterator[tuple[str, Any]]:
        yield "num_machines", self.num_machines
        yield "machine_rank", self.machine_rank
        yield "num_processes", self.num_processes
        yield from self.options.items()


def refuse_nesting(environ: Mapping[str, str]) -> None:
    """Raise a ConfigError in a rank of another launcher, which would start a job of its own on every rank."""
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"this is already rank {environ.get('RANK')} of {environ['WORLD_SIZE']} of another launcher, and would "
            "start a job of its own on every rank; give the script itself to the outer launcher, or leave that one out"
        )


def find_outer_job(environ: Mapping[str, str]) -> OuterJob | None:
    """Return the job that the variables of a scheduler describe; None when this launcher stands alone.

    Known are torchrun's own `PET_` variables (Kubeflow's PyTorchJob and TrainJob), RANK and WORLD_SIZE of machines
    (PyTorchJob) or of ranks (Ray Train), tasks of an srun step, and processes of an MPI.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return None  # torchrun's rank: refused, unless it is the only one
    if "PET_NNODES" in environ or "PET_NODE_RANK" in environ:
        return _from_torchrun_options(environ)
    info = find_launch_info(environ)
    if info is None or info.world_size == 1:
        return None
    variables = tuple(name for name in _NAMES[info.launcher] if name in environ)
    if _is_machine(info, environ):
        # A port that no variable of MPI says is below what a file says.
        port = info.main_port if info.launcher != "MPI" or "MASTER_PORT" in environ else None
        options = {"main_process_ip": info.main_address, "main_process_port": port}
        return OuterJob(variables, info.world_size, info.rank, options=options)
    num_machines = max(1, info.world_size // info.local_world_size)
    return OuterJob(variables, num_machines, info.rank // info.local_world_size, rank=info)


def _is_machine(info: LaunchInfo, environ: Mapping[str, str]) -> bool:
    """Return whether a process is the only one of its machine, which then starts the ranks there itself."""
    if info.launcher == "torchrun":
        return "LOCAL_RANK" not in environ
    if info.launcher == "SLURM":
        return environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == str(info.world_size)
    return info.local_world_size == 1


def _from_torchrun_options(environ: Mapping[str, str]) -> OuterJob:
    low, _, high = environ.get("PET_NNODES", "1").partition(":")
    if high and high != low:
        raise ConfigError(
            f"PET_NNODES is {environ['PET_NNODES']!r}, a job whose number of machines may change, which is not "
            "offered; give it one number (minReplicas and maxReplicas of an elasticPolicy alike)"
        )
    # The rank of a machine is open under c10d, where the machines number themselves.
    rank = environ.get("PET_NODE_RANK") or environ.get("RANK") or "0"
    return OuterJob(
        variables=tuple(name for name in environ if name in ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE")),
        num_machines=_number(environ, "PET_NNODES", low),
        machine_rank=_number(environ, "PET_NODE_RANK", rank),
        num_local_processes=_processes_per_machine(environ),
        options=_rendezvous_options(environ),
    )


def _processes_per_machine(environ: Mapping[str, str]) -> int | None:
    """Return the number of processes that torchrun would start; None for one on each device."""
    text = environ.get("PET_NPROC_PER_NODE", "auto")
    if text in ("auto", "gpu", "xpu"):
        return None
    return usable_cores() if text == "cpu" else _number(environ, "PET_NPROC_PER_NODE", text)


def _rendezvous_options(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of torchrun's variables on the rendezvous and on restarts, by our flags."""
    options: dict[str, Any] = {field: environ[name] for name, field in _OPTIONS.items() if environ.get(name)}
    if endpoint := environ.get("PET_RDZV_ENDPOINT"):
        address, _, port = endpoint.rpartition(":")
        options |= {"main_process_ip": address or port} | ({"main_process_port": port} if address else {})
    for name in ("main_process_port", "max_restarts"):
        if name in options:
            options[name] = _number(environ, name, options[name])
    if run_id := environ.get("PET_RDZV_ID"):
        options["rdzv_conf"] = f"rdzv_id={run_id}"
    return options


def _number(environ: Mapping[str, str], name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name} is {environ.get(name, text)!r}; expected a whole number, as torchrun does")
    return int(text)
