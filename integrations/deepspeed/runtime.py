"""DeepSpeed in this process: its import, its accelerator, its process group, and the tools that its ops need."""

from __future__ import annotations

import contextlib
import ctypes.util
import io
import logging as std_logging
import os
import shutil
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_trainer import logging
from accel_trainer.errors import ConfigError, MissingExtraError
from accel_trainer.runtime.availability import is_deepspeed_available
from accel_trainer.runtime.process import ProcessContext, form_group, hidden_variable, read_environment

if TYPE_CHECKING:
    from torch import nn

logger = logging.get_logger(__name__)

_PATIENCE_SECONDS = 20.0
"""Compiling the collectives for the CPU, the smallest op, takes about as long."""
_ABANDONED_SECONDS = 3600.0
"""The largest op, which writes to NVMe, takes nine minutes of one processor."""


def require_deepspeed() -> None:
    """Refuse to go on where DeepSpeed is not installed; the message names the extra to install."""
    if not is_deepspeed_available():
        raise MissingExtraError(
            "strategy 'deepspeed' needs the package 'deepspeed', which is not installed; run "
            "`pip install 'accel-trainer[deepspeed]' --no-build-isolation`, or use strategy 'fsdp2', which shards alike"
        )


def import_deepspeed() -> Any:
    """Import DeepSpeed, without its own log below WARNING, and return the module."""
    require_deepspeed()
    # Its import looks for an accelerator and warns where there is none; which one is used is set below, by the job.
    disabled = std_logging.root.manager.disable
    std_logging.disable(std_logging.WARNING)
    try:
        import deepspeed
    finally:
        std_logging.disable(disabled)
    deepspeed.utils.logger.setLevel(std_logging.WARNING)
    # Of torch, about how the engine calls it, once for each of its layers of code.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    return deepspeed


def start_engine(process: ProcessContext, engine_config: Mapping[str, Any]) -> Any:
    """Bring DeepSpeed up in the job's group before models are built in pieces; return it. Collective at first."""
    deepspeed = import_deepspeed()
    process = form_group(process)
    check_can_start(process, engine_config)
    join_engine_group(deepspeed, process)
    return deepspeed


def check_can_start(process: ProcessContext, engine_config: Mapping[str, Any]) -> None:
    """Refuse a job that the engine cannot start, before anything collective."""
    environ = read_environment()
    if "LOCAL_RANK" not in environ:
        raise ConfigError(
            "strategy 'deepspeed': the engine reads LOCAL_RANK from the environment, and the launcher of this job has "
            "not set it; set it on each rank (for srun: `export LOCAL_RANK=$SLURM_LOCALID` in what srun starts), or "
            "start the script with torchrun"
        )
    zero = engine_config.get("zero_optimization", {})
    devices = [(zero.get(name) or {}).get("device") for name in ("offload_optimizer", "offload_param")]
    ops = ["its shared-memory collectives for the CPU"] if process.device.type == "cpu" else []
    if "optimizer" in engine_config and "cpu" in devices or "nvme" in devices:
        ops.append("its optimizer for the CPU")
    if ops:
        _check_build_tools(" and ".join(ops), environ.get("CXX", "c++"))
    if "nvme" in devices and ctypes.util.find_library("aio") is None:
        raise ConfigError(
            "strategy 'deepspeed' offloads to NVMe through libaio, which is not on this machine; install it (for "
            "Debian: `apt-get install libaio-dev`), or offload to 'cpu'"
        )


def _check_build_tools(reason: str, compiler: str) -> None:
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"strategy 'deepspeed' compiles {reason} at first use, and there is no C++ compiler {compiler!r} on the "
            "PATH; install one (for Debian: `apt-get install g++`), or name it in CXX"
        )
    if shutil.which("ninja") is None:
        raise ConfigError(
            f"strategy 'deepspeed' compiles {reason} at first use, and there is no 'ninja' on the PATH; run "
            "`pip install ninja`, and start the script with that environment's bin folder on the PATH"
        )


def join_engine_group(deepspeed: Any, process: ProcessContext) -> None:
    """Give DeepSpeed the job's device and the process group that exists. Collective for the first call.

    Raises:
        ConfigError: the environment has the engine use another kind of device than the job's, or a lock was left that
            its ops cannot be compiled under.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator

    # It chooses by itself, from an environment variable or the hardware; `use_cpu` is to hold on a machine with GPUs.
    if process.device.type == "cpu" and get_accelerator().device_name() != "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
    kind = get_accelerator().device_name()
    if kind != process.device.type:
        raise ConfigError(
            f"this job runs on {process.device.type}, and DeepSpeed has chosen {kind!r} (see DS_ACCELERATOR in the "
            "environment); take DS_ACCELERATOR out, or run on that device"
        )
    if not deepspeed.comm.is_initialized():
        # Every rank would print; a failure raises.
        with watch_locks(), contextlib.redirect_stdout(io.StringIO()):
            deepspeed.init_distributed(
                dist_backend=get_accelerator().communication_backend_name(), auto_mpi_discovery=False, verbose=False
            )


@contextlib.contextmanager
def planned_engine() -> Iterator[None]:
    """Context in which an engine is built for a plan; what DeepSpeed keeps of this process's job is back after it."""
    import_deepspeed()
    # By their own names: `deepspeed.comm` shows the functions of the first.
    from deepspeed.accelerator import real_accelerator
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import utils
    from deepspeed.utils import groups
    from torch.nn import functional

    stand_ins: list[tuple[Any, str, Any]] = [
        (comm, "cdb", None),
        (groups, "_WORLD_GROUP", None),
        (groups, "mesh_device", None),
        (real_accelerator, "ds_accelerator", real_accelerator.ds_accelerator),  # a plan's is the CPU
        (utils, "get_lst_from_rank0", lambda values: values),  # rank 0 is the one that is planned
        (functional, "linear", functional.linear),  # stage 3 puts its own in the place of it
    ]
    inherited = [(module, name, getattr(module, name)) for module, name, _ in stand_ins]
    try:
        for each in stand_ins:
            setattr(*each)
        with hidden_variable("LOCAL_RANK", stand_in="0"):
            yield
    finally:
        for each in inherited:
            setattr(*each)


def forget_module(module: nn.Module) -> None:
    """Take a module whose engine was destroyed out of the globals of ZeRO-3.

    These are a stack of the modules in their forward, which has each engine's own at its bottom, and a cache of the
    parameters to release after each module, by module and engine; another engine fills it again.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    stack: list[Any] = getattr(parameter_offload, "FWD_MODULE_STACK", [])
    stack[:] = [held for held in stack if held is not module]
    method = getattr(Coordinator, f"_{Coordinator.__name__}__params_to_release", None)
    cells = getattr(method, "__closure__", None) or ()  # the cache is within a function that measures it
    for cached in (method, *(cell.cell_contents for cell in cells)):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


# --- the locks under which torch compiles DeepSpeed's ops ------------------------------------------------------------


@contextlib.contextmanager
def watch_locks() -> Iterator[None]:
    """Run a block that may load ops of DeepSpeed, and speak up where it waits for the lock of one for 20 s.

    A warning on each rank says which lock, how old, which process holds it, and what to delete; the run goes on as soon
    as the lock is gone.

    Raises:
        ConfigError: no process of this machine holds the lock, and it is an hour old.
    """
    from torch.utils import cpp_extension

    # torch makes a file `lock` in the folder of an op, compiles, and removes it. A process that is killed meanwhile
    # leaves it there, and torch makes every later one wait for it for ever, without a word. Not from 2.14 on: there the
    # kernel holds the lock, and lets go of it with the process (pytorch/pytorch#189245).
    baton: Any = getattr(cpp_extension, "FileBaton", None)
    if baton is None:
        yield
        return
    wait, baton.wait = baton.wait, _wait
    try:
        yield
    finally:
        baton.wait = wait


def _wait(baton: Any) -> None:
    lock, since, has_warned = Path(baton.lock_file_path), time.monotonic(), False
    while lock.exists():
        time.sleep(baton.wait_seconds)
        if time.monotonic() - since < _PATIENCE_SECONDS:
            continue
        # The age after the holders: a lock that is released meanwhile has no holder, and is not an abandoned one.
        holders = _find_holders(lock)
        try:
            age_seconds = time.time() - lock.stat().st_mtime
        except OSError:
            return
        if not holders and age_seconds >= _ABANDONED_SECONDS:
            raise ConfigError(_describe(lock, age_seconds, holders))
        if not has_warned:
            has_warned = True
            logger.warning("%s. Waiting for it", _describe(lock, age_seconds, holders), main_process_only=False)


def _find_holders(lock: Path) -> list[str]:
    """Return the processes of this machine that have the lock open, as far as this one may look (on Linux)."""
    holders = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # gone, or another user's
            if any(_is_same_file(link, lock) for link in folder.iterdir()):
                command = (folder.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                holders.append(f"{folder.parent.name} ({command.strip()[:100]})")
    return holders


def _is_same_file(link: Path, lock: Path) -> bool:
    try:
        return os.path.samefile(link, lock)
    except OSError:
        return False


def _describe(lock: Path, age_seconds: float, holders: list[str]) -> str:
    waited = f"DeepSpeed waits for the lock {lock}, which is {age_seconds:.0f} s old"
    if holders:
        return f"{waited}: process {', '.join(holders)} compiles there. If that one hangs, end it and delete the lock"
    return (
        f"{waited} and which no process on {socket.gethostname()} is seen to hold: one that compiled there was killed, "
        "unless another machine or container compiles into the same folder. If none does, delete the folder "
        f"{lock.parent} and start again; it is compiled anew"
    )
