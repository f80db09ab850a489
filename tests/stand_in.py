"""An accelerator for tests on machines that have none: `stand_in`, whose tensors have devices and live on the host.

It is torch's PrivateUse1 backend, so that `torch.accelerator` finds it and code takes the paths of a GPU. Once it is
installed, it is the accelerator of this process until the end: call `install()` in a rank, not in pytest's own process.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ALONE = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
"""Environment for `run_ranks` of a process that no launcher started."""


def build() -> Path:
    """Return the compiled library, from a cache when this source was compiled for this release of torch before."""
    from torch.utils import cpp_extension  # takes a while, and only who builds needs it

    source = Path(__file__).with_suffix(".cpp")
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]
    command = ["c++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", *includes, str(source), *libraries]
    made_of = source.read_bytes() + " ".join([torch.__version__, *command]).encode()
    digest = hashlib.sha256(made_of).hexdigest()[:16]
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    library = root / f"accel_trainer_stand_in_{digest}.so"
    if not library.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            made = Path(folder, library.name)
            subprocess.run([*command, "-o", str(made)], check=True)
            os.replace(made, library)  # who compiles at the same time makes the same file
    return library


def install(name: str = "stand_in", *, keeps_parameters: bool = True) -> None:
    """Make `stand_in`, with two devices, this process's accelerator.

    Args:
        name: of the kind of device.
        keeps_parameters: `Module.to()` keeps the parameters' objects, as for CUDA; else it makes new ones, as it does
            by itself for devices behind PrivateUse1.
    """
    torch.ops.load_library(build())
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, _Module(f"torch.{name}"))
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.__future__.set_swap_module_params_on_conversion(keeps_parameters)


class _Module(ModuleType):
    """What `torch.cuda` is for CUDA: a random stream of the device's own, and its memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._streams = [torch.Generator().manual_seed(index) for index in range(2)]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def device_count(self) -> int:
        return 2

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 2**30, 2**30

    def get_device_properties(self, device: Any = None) -> Any:
        return None

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def Stream(self, device: Any = None) -> Any:
        """Return a stream, in which copies come late, on the default device or another."""
        return torch.Stream(device=torch.accelerator.current_accelerator() if device is None else device)

    def stream(self, stream: Any) -> Any:
        return stream

    def current_stream(self, device: Any = None) -> Any:
        return torch.accelerator.current_stream(device)

    def get_amp_supported_dtype(self) -> list[Any]:
        return [torch.bfloat16, torch.float16]

    def _stream_of(self, device: Any) -> torch.Generator:
        index = device.index if isinstance(device, torch.device) else device
        return self._streams[self.current_device() if index is None else index]

    def draw(self, device: int | None = None) -> float:
        return torch.rand(1, generator=self._stream_of(device)).item()

    def manual_seed_all(self, seed: int) -> None:
        for stream in self._streams:
            stream.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Any:
        return self._stream_of(device).get_state()

    def set_rng_state(self, state: Any, device: Any = None) -> None:
        self._stream_of(device).set_state(state)
