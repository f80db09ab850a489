"""A machine's accelerator devices, its TPUs, and its network interface to the other machines of a job."""

from __future__ import annotations

import array
import glob
import importlib.util
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from accel_trainer.config import LaunchConfig, Resolved
from accel_trainer.errors import ConfigError

# Each vendor's runtime reads one of them; the others are without effect.
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES")
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg", "/dev/dri/renderD*", "/dev/accel*", "/dev/davinci[0-9]*")
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_SIOCGIFCONF = 0x8912  # Linux: the IPv4 addresses of all interfaces, as `struct ifreq`s
_REQUEST_BYTES = 24 + 2 * struct.calcsize("P")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_VENDOR = "0x1ae0"
# v4, v5p, v5e, v6e, v7: as torch-tpu 0.2 lists them. Network and disks of Google's machines have the same vendor.
_CHIPS = ("0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
_VARIABLES = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY", "TORCH_TPU_XPROF_SESSION_ID")


def count_devices(use_cpu: bool, gpu_ids: str) -> int:
    """Return the accelerator devices of this machine that a job may use."""
    if use_cpu:
        return 0
    if gpu_ids != "all":
        return len(gpu_ids.split(","))
    if num_tpus := count_tpus():
        return num_tpus
    if not device_files():
        return 0  # also spares the import of torch
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def device_files() -> list[str]:
    """Return the files that drivers of accelerators have made on this machine. torch is not imported for that."""
    return sorted(path for pattern in _DEVICE_FILES for path in glob.glob(pattern))


def check_meeting(launch: LaunchConfig) -> None:
    """Refuse several machines that could not meet, or not restart together."""
    if launch.num_machines == 1:
        return
    if launch.main_process_ip is None:
        raise ConfigError(
            f"num_machines is {launch.num_machines} and main_process_ip is not set; give the address of machine 0"
        )
    if launch.max_restarts and launch.rdzv_backend == "static":
        raise ConfigError(
            f"max_restarts is {launch.max_restarts} on {launch.num_machines} machines with the static rendezvous, "
            "where no machine learns that another restarts its workers; set rdzv_backend to c10d"
        )


def check_gpu_ids(resolved: Resolved, environ: Mapping[str, str]) -> None:
    """Refuse GPUs that this machine does not have: processes that see none would train on the CPU."""
    ids = resolved.config.launch.gpu_ids
    if resolved.config.use_cpu or ids == "all":
        return
    if not device_files():
        raise ConfigError(
            f"{resolved.describe('launch.gpu_ids')}, and this machine has no GPU; pass --cpu to train on the CPU, or "
            "leave gpu_ids out"
        )
    if any(name in environ for name in (*VISIBLE_DEVICES, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")):
        return  # only the visible devices can be counted
    count = count_devices(False, "all")
    if max(map(int, ids.split(","))) >= count:
        raise ConfigError(
            f"{resolved.describe('launch.gpu_ids')}, and this machine has {count} GPU(s), numbered from 0; name some "
            "of those"
        )


# --- TPUs -------------------------------------------------------------------------------------------------------------
#
# All ranks need the same list of addresses and the same topology. torch-tpu 0.2 leaves them to whoever starts the
# ranks, and has a function that finds them: torch.tpu.distributed.set_tpu_launch_env.


def count_tpus() -> int:
    """Return the number of TPUs on the PCI bus; a ConfigError where torch-tpu is missing. Imports nothing."""
    count = 0
    with suppress(OSError):  # no such bus here
        count = sum(_is_chip(device) for device in _PCI_DEVICES.iterdir())
    if count and importlib.util.find_spec("torch_tpu") is None:
        raise ConfigError(
            f"this machine has {count} TPU device(s), and torch-tpu is not installed: install it (pip install "
            "torch-tpu; torch_xla ends at torch 2.9 and is not used), or pass --cpu to run on the CPU"
        )
    return count


def _is_chip(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
    except OSError:
        return False
    return vendor == _VENDOR and kind in _CHIPS


def describe_tpu_variables(num_machines: int, num_local: int) -> str:
    """Return a line on the variables that `set_tpu_variables` will set."""
    return (
        f"variables: {', '.join(_VARIABLES)}, unless they are set, as torch.tpu.distributed.set_tpu_launch_env("
        f"nnodes={num_machines}, nproc_per_node={num_local}) finds them"
    )


def set_tpu_variables(num_machines: int, num_local: int) -> None:
    """Have torch-tpu set a job's variables that are not set, where TPUs are the accelerator. No chip is claimed."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "tpu":
        return
    distributed = importlib.import_module("torch.tpu.distributed")
    try:
        distributed.set_tpu_launch_env(nnodes=num_machines, nproc_per_node=num_local)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"torch-tpu cannot start {num_local} process(es) on each of {num_machines} machine(s): {error}. Start one "
            "process for each chip (--num_processes), on several machines with TPU_WORKER_HOSTNAMES"
        ) from error


# --- the network ------------------------------------------------------------------------------------------------------


def find_interface(address: str | None) -> str | None:
    """Return the interface towards `address`, or for None of this machine alone; None where it cannot be told.

    gloo would take the interface that the machine's own name resolves to: on many systems 127.0.1.1, where no other
    machine can reach it. Nothing is sent.
    """
    if address is None:
        return _LOOPBACK if _LOOPBACK in dict(socket.if_nameindex()).values() else None
    with suppress(OSError):
        own = local_address(address)
        return next((name for name, found in _addresses() if found == own), None)
    return None


def local_address(address: str) -> str | None:
    """Return this machine's own address towards another one; None where it cannot be told. Nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield (interface, address) for every address of this machine."""
    if sys.platform != "linux":
        return
    import fcntl

    room = array.array("B", bytes(_REQUEST_BYTES * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        length, _ = struct.unpack(
            "iP", fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(room), room.buffer_info()[0]))
        )
    for start in range(0, length, _REQUEST_BYTES):
        entry = room[start : start + _REQUEST_BYTES].tobytes()
        yield entry[:16].partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(entry[20:24])
    path = Path("/proc/net/if_inet6")
    for line in path.read_text().splitlines() if path.exists() else []:
        number, *_, name = line.split()
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
