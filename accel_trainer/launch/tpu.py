"""TPUs of this machine, and the variables that torch-tpu wants before the processes of a job start.

All ranks need the same list of addresses and the same topology; torch-tpu 0.2 leaves them to whoever starts the ranks,
and has a function that finds them: `torch.tpu.distributed.set_tpu_launch_env`.
"""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path

from accel_trainer.errors import ConfigError

__all__ = ["count_tpus", "describe_tpu_variables", "set_tpu_variables"]

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_VENDOR = "0x1ae0"
# v4, v5p, v5e, v6e, v7: as torch-tpu 0.2 lists them. Network and disks of Google's machines have the same vendor.
_CHIPS = ("0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
_VARIABLES = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY", "TORCH_TPU_XPROF_SESSION_ID")


def count_tpus() -> int:
    """Return the number of TPU devices on this machine's PCI bus. Imports nothing.

    Raises:
        ConfigError: there are some, and torch-tpu, without which torch does not find them, is not installed.
    """
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
    """Have torch-tpu set the variables of a job in this process, where TPUs are torch's accelerator.

    Those that are set stay. No device is claimed: each chip is for the process that will run on it.

    Raises:
        ConfigError: torch-tpu finds no such job on these machines.
    """
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
