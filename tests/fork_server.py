"""What the fork server of the ranks does before it imports anything else.

It looks for no garbage from here on: what it imports stays, and each rank begins anew. And it imports nothing that
starts CUDA where there is a card: a process that is forked from one that has started it cannot use it.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

gc.disable()

_SERVER = os.getpid()
# `torch.cuda.is_available()` starts CUDA's driver unless it asks NVML.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
_STARTS_CUDA = ("bitsandbytes", "torchao")
"""Where they are installed, transformers imports them: its Trainer PEFT, PEFT the first; its models the second."""


class Refusal(MetaPathFinder, Loader):
    """Refuses such an import in the server. Who only looks whether there is the package finds it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _STARTS_CUDA or os.getpid() != _SERVER or not _has_card():
            return None
        if (spec := PathFinder.find_spec(name, path, target)) is not None:
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        raise ImportError(f"{spec.name} starts CUDA: each rank imports it itself, and what needs it")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing gets here."""


def _has_card() -> bool:
    import torch

    return torch.cuda.device_count() > 0  # by NVML, which starts nothing


sys.meta_path.insert(0, Refusal())
