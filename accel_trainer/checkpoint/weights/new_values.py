"""Values for what no file has: new heads and computed buffers of a model without memory, the same on every rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer.checkpoint.format.boxes import Box
from accel_trainer.checkpoint.format.placement import local_box, local_tensor, materialize
from accel_trainer.runtime.torch_private import RESET_METHODS, copy_module

__all__ = ["initialize_tensors"]

Initializer = Callable[[nn.Module], Any]


def initialize_tensors(
    model: nn.Module, names: Iterable[str], seed: int, device_of: Callable[[str], torch.device | None]
) -> list[str]:
    """Initialise meta parameters and buffers as their own modules do, and return the names for which none knows how.

    A transformers model's `_init_weights` is asked, or the module's `reset_parameters`. Each module is initialised
    whole, on the CPU, from a seed of its own; then each rank takes its part: the layout changes no value.

    Args:
        seed: the same on every rank.
        device_of: where a tensor's memory is taken; None leaves it to the tensor's layout.
    """
    by_owner: dict[str, list[str]] = {}
    for name in names:
        by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    unknown = []
    for owner, own_names in by_owner.items():
        initialize = _initializer_of(model, owner)
        scratch = _scratch_of(model.get_submodule(owner))
        if initialize is not None:
            digest = hashlib.sha256(f"{seed} {owner}".encode()).digest()
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:7], "big"))
                initialize(scratch)
        tensors: dict[str, Tensor] = {
            **dict(scratch.named_parameters(recurse=False, remove_duplicate=False)),
            **dict(scratch.named_buffers(recurse=False, remove_duplicate=False)),
        }
        for name in own_names:
            value = tensors[name.rpartition(".")[2]]
            if initialize is None or _is_unset(value):
                unknown.append(name)
            else:
                _take_part(_tensor_of(model, name), value, device_of(name))
    return unknown


def _tensor_of(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(owner), leaf)
    return tensor


def _take_part(tensor: Tensor, value: Tensor, device: torch.device | None) -> None:
    materialize(tensor, device)
    local_tensor(tensor).copy_(value[local_box(tensor).within(Box.full(tensor.shape))])


def _initializer_of(model: nn.Module, owner: str) -> Initializer | None:
    """Return what initialises the module `owner`: the nearest transformers model's way, or the module's own."""
    path = owner.split(".") if owner else []
    for length in range(len(path), -1, -1):
        ancestor = model.get_submodule(".".join(path[:length]))
        if callable(getattr(ancestor, "_init_weights", None)):
            found: Initializer = ancestor._init_weights  # type: ignore[assignment]
            return found
    module = model.get_submodule(owner)
    for method in RESET_METHODS:
        if callable(getattr(module, method, None)):
            return lambda scratch: getattr(scratch, method)()
    return None


def _scratch_of(module: nn.Module) -> nn.Module:
    """Return a module like `module`, with CPU tensors of its own that hold a mark instead of values.

    Its children have tensors without memory: some modules initialise those of their children too, where values may have
    been loaded.
    """
    return _copy_of(module, _unset)


def _copy_of(module: nn.Module, build: Callable[[Tensor], Tensor]) -> nn.Module:
    from torch.distributed.fsdp import FSDPModule

    # FSDP2 adds its class in front, whose __new__ would run the user's __init__.
    own_class = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
    return copy_module(
        module,
        own_class,
        lambda parameter: nn.Parameter(build(parameter), requires_grad=False),
        build,
        lambda child: _copy_of(child, lambda tensor: torch.empty_like(tensor, device="meta")),
    )


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _unset(tensor: Tensor) -> Tensor:
    return torch.full(tensor.shape, _mark(tensor.dtype), dtype=tensor.dtype)


def _is_unset(value: Tensor) -> bool:
    """Whether some of it was not initialised. Of booleans one cannot tell: they count as not."""
    if value.dtype == torch.bool:
        return True
    marked = value.isnan() if value.is_floating_point() or value.is_complex() else value == _mark(value.dtype)
    return bool(marked.any())
