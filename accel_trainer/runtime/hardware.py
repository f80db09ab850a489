"""Facts about the devices and cores of this machine, found without starting a device."""

from __future__ import annotations

import functools
import logging
import os
import platform
import subprocess
from dataclasses import dataclass

import torch
from packaging.version import parse

from accel_trainer.errors import MissingExtraError
from accel_trainer.logging import get_logger
from accel_trainer.runtime import availability
from accel_trainer.runtime.variables import get_int_from_env, parse_flag_from_env

__all__ = [
    "CPUInformation",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "check_os_kernel",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_driver_version",
    "get_gpu_info",
    "override_numa_affinity",
    "set_numa_affinity",
]

logger = get_logger(__name__)

_PLUGIN_DEVICES = ("mlu", "sdaa", "musa", "npu", "hpu", "xpu", "neuron")
# NVIDIA's driver refuses peer-to-peer transfers between cards of this series before this version, and NCCL hangs.
_NO_PEER_TRANSFERS = "RTX 40"
_PEER_TRANSFERS_SINCE = "550.40.07"
# Kernels before it hang in a torch DataLoader's workers (https://github.com/huggingface/accelerate/issues/1929).
_OLDEST_KERNEL = "5.5.0"
_FP8_CAPABILITY = (8, 9)  # Ada Lovelace: the first with fp8 tensor cores


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of this machine's devices and the `DistributedType` of several; ("cuda", "MULTI_GPU") for none.

    Nothing is started on a device, so that a fork afterwards is safe.
    """
    for kind in _PLUGIN_DEVICES:
        if getattr(availability, f"is_{kind}_available")():
            return kind, f"MULTI_{kind.upper()}"
    return "cuda", "MULTI_GPU"


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of NVIDIA's GPUs, and their number. CUDA is not started.

    Raises:
        OSError: nvidia-smi is not there.
        subprocess.CalledProcessError: it failed.
    """
    names = [line.split(",")[1].strip() for line in _ask_nvidia("count,name")]
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver, that of the first GPU. CUDA is not started; see `get_gpu_info`."""
    return _ask_nvidia("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return whether the GPUs of this machine may send to each other directly; True where that cannot be known."""
    try:
        names, count = get_gpu_info()
        if count < 2 or not any(_NO_PEER_TRANSFERS in name for name in names):
            return True
        return parse(get_driver_version()) >= parse(_PEER_TRANSFERS_SINCE)
    except (OSError, subprocess.CalledProcessError):
        return True


@functools.lru_cache
def check_cuda_fp8_capability() -> bool:
    """Return whether the first GPU has fp8 tensor cores. Starts CUDA where nvidia-smi does not answer."""
    try:
        capability = tuple(map(int, _ask_nvidia("compute_capability")[0].split(".")))
    except (OSError, subprocess.CalledProcessError):
        if not torch.cuda.is_available():
            return False
        capability = torch.cuda.get_device_capability()
    return capability >= _FP8_CAPABILITY


def _ask_nvidia(fields: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).strip().splitlines()


def check_os_kernel() -> None:
    """Warn on a Linux whose kernel lets the workers of a DataLoader hang."""
    system = platform.uname()
    release = system.release.split("-")[0]
    if system.system == "Linux" and parse(release) < parse(_OLDEST_KERNEL):
        logger.warning(
            f"Linux {release} may hang in the workers of a DataLoader; upgrade the kernel to {_OLDEST_KERNEL} or later"
        )


@dataclass
class CPUInformation:
    """This process's place in a job, as MPI or torchrun says it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return this process's place in a job from the variables of torchrun, PMI, Open MPI or MVAPICH."""
    mpi = ("OMPI_COMM_WORLD", "MV2_COMM_WORLD")
    return CPUInformation(
        rank=get_int_from_env(["RANK", "PMI_RANK", *(f"{name}_RANK" for name in mpi)], 0),
        world_size=get_int_from_env(["WORLD_SIZE", "PMI_SIZE", *(f"{name}_SIZE" for name in mpi)], 1),
        local_rank=get_int_from_env(["LOCAL_RANK", "MPI_LOCALRANKID", *(f"{name}_LOCAL_RANK" for name in mpi)], 0),
        local_world_size=get_int_from_env(
            ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", *(f"{name}_LOCAL_SIZE" for name in mpi)], 1
        ),
    )


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores next to one of NVIDIA's GPUs; nothing on a machine without one.

    Args:
        local_process_index: index of the GPU, in the driver's order.
        verbose: log the cores; when None, `ACCELERATE_DEBUG_MODE` decides.

    Raises:
        MissingExtraError: nvidia-ml-py is not installed.
    """
    if not torch.cuda.is_available():
        return
    if not availability.is_pynvml_available():
        raise MissingExtraError("cores near a GPU are found through nvidia-ml-py: pip install nvidia-ml-py")
    import pynvml  # type: ignore[import-not-found]

    pynvml.nvmlInit()
    words = pynvml.nvmlDeviceGetCpuAffinity(
        pynvml.nvmlDeviceGetHandleByIndex(local_process_index), -(-(os.cpu_count() or 1) // 64)
    )
    cores = {64 * index + bit for index, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    os.sched_setaffinity(0, cores)
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        logger.log(logging.INFO, f"local rank {local_process_index} runs on cores {sorted(cores)}")


@functools.lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process as `override_numa_affinity` does, once: later calls do nothing."""
    override_numa_affinity(local_process_index, verbose)
