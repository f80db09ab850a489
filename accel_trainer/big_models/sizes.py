"""Bytes that the tensors of a model take, by the name of each module, also of one without memory."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer.big_models.module_tensors import named_module_tensors
from accel_trainer.checkpoint.weights.into_model import as_dtype
from accel_trainer.errors import ConfigError


class CustomDtype(Enum):
    """Dtypes that torch does not have, by which sizes of models are counted."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


_CUSTOM_BYTES = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}

DType = str | torch.dtype | CustomDtype

Entry = tuple[str, Any]
"""A name, and the module or the tensor that stands there."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B\s*", re.IGNORECASE)


def convert_file_size_to_int(size: float | str) -> int:
    """Return a size such as `"10GB"`, `"1.5GiB"` or `500` in bytes; a ConfigError for others.

    A lower-case b after a decimal unit counts bits (`"8Mb"` is a million bytes); binary units count bytes in any case.
    """
    if isinstance(size, (int, float)):  # transformers gives a share of the free memory
        return int(size)
    found = _SIZE.fullmatch(size)
    if found is None or found[3] and not found[2]:
        raise ConfigError(f"size {size!r} is no number of bytes; write it like '10GB', '500MiB' or 1000000")
    number, prefix, is_binary = found.groups()
    unit = (1024 if is_binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    counts_bits = size.rstrip().endswith("b") and not is_binary
    return int(float(number) * unit) // (8 if counts_bits else 1)


def convert_bytes(size: float) -> str:
    """Return a number of bytes in words, in the largest unit (of 1024) that leaves a number of 1 or more."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def dtype_byte_size(dtype: DType) -> float:
    """Return the bytes of one value: of `torch.bool` the eighth that it needs, though torch stores a byte."""
    return 1 / 8 if dtype == torch.bool else _width(dtype)


def _width(dtype: DType) -> float:
    """Return the bytes of one value as it is stored; those of a `CustomDtype` are packed."""
    return _CUSTOM_BYTES[dtype] if isinstance(dtype, CustomDtype) else as_dtype(dtype).itemsize


def compute_module_sizes(
    model: nn.Module,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of each tensor and of each module, the model itself under `""`. A tied tensor counts once.

    Floating-point tensors of larger types count as `dtype`, those in `special_dtypes` as the one under their name.
    """
    target = math.inf if dtype is None else _width(dtype)
    special = {name: _width(each) for name, each in (special_dtypes or {}).items()}
    tensors: Iterable[tuple[str, Tensor]] = (
        model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    )
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in tensors:
        width: float = tensor.element_size()
        if name in special:
            width = special[name]
        elif tensor.is_floating_point() or tensor.is_complex():
            width = min(width, target)
        path = name.split(".")
        for length in range(len(path) + 1):
            sizes[".".join(path[:length])] += math.ceil(tensor.numel() * width)
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
) -> int:
    """Return the bytes of all buffers. Arguments as of `compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def class_names(names: str | Iterable[str] | None) -> list[str]:
    """Return names of classes as a list; one name is a list of one."""
    return [names] if isinstance(names, str) else list(names or ())


def top_entries(module: nn.Module, prefix: str = "") -> list[Entry]:
    """Return a module's own parameters, its children and its own buffers, by name."""
    found = [*module.named_parameters(recurse=False), *module.named_children(), *module.named_buffers(recurse=False)]
    return [(f"{prefix}.{name}" if prefix else name, entry) for name, entry in found]


def is_unit(entry: Any, no_split: Sequence[str]) -> bool:
    """Whether an entry stays on one device: a tensor, a module without children, or of a class in `no_split`."""
    if not isinstance(entry, nn.Module) or type(entry).__name__ in no_split:
        return True
    return next(entry.children(), None) is None


def get_max_layer_size(
    modules: Sequence[Entry], module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str]
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layers in `modules`, and the names of all that have this size; see `is_unit`."""
    largest, names = 0, []
    waiting = list(reversed(modules))
    while waiting:
        name, entry = waiting.pop()
        if not is_unit(entry, no_split_module_classes):
            waiting.extend((f"{name}.{child}", inner) for child, inner in reversed(list(entry.named_children())))
        elif module_sizes[name] > largest:
            largest, names = module_sizes[name], [name]
        elif module_sizes[name] == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a model, and its largest layers as `get_max_layer_size` does."""
    sizes = compute_module_sizes(model)
    no_split = class_names(getattr(model, "_no_split_modules", None))
    return sizes[""], get_max_layer_size(top_entries(model), sizes, no_split)


def get_module_leaves(module_sizes: Iterable[str]) -> list[str]:
    """Return the names that are no parent of another name."""
    names = list(module_sizes)
    parents = {name.rpartition(".")[0] for name in names}
    return [name for name in names if name and name not in parents]
