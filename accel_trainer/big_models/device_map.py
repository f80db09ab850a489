"""Which device each module of a model goes to, by the bytes of its tensors, before anything has memory."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer import logging
from accel_trainer.big_models.module_tensors import (
    check_tied_parameters_in_config,
    find_tied_parameters,
    named_module_tensors,
)
from accel_trainer.checkpoint.weights.into_model import as_dtype
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.memory import available_host_bytes

logger = logging.get_logger(__name__)

# --- bytes of tensors and modules -------------------------------------------------------------------------------------


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
        raise ConfigError(f"size {size!r} is no number of bytes; write it like '10GB', '500MiB' or '1000000B'")
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
    """Return a module's own parameters, its children and its own buffers; a shared one by each of its names."""
    inside = module.named_modules(remove_duplicate=False)
    found = [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *((name, child) for name, child in inside if name and "." not in name),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]
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


# --- devices of modules -----------------------------------------------------------------------------------------------

Place = int | str
DTypes = Mapping[str, DType]
_HOST = ("mps", "cpu", "disk")
"""Places that have a name, in the order in which they are filled; accelerators have a number, and come before."""


def get_max_memory(max_memory: Mapping[Place, int | str] | None = None) -> dict[Place, int]:
    """Return how many bytes of a model each device may hold, accelerators first.

    Args:
        max_memory: bytes, or text such as `"10GB"`, by number of the accelerator, and for `"mps"`, `"cpu"` and
            `"disk"`. None is what is free now.

    Raises:
        ConfigError: a key is no such device, or a size cannot be read.
    """
    if max_memory is None:
        return _free_memory()
    unknown = [place for place in max_memory if not isinstance(place, int) and place not in _HOST]
    if unknown:
        raise ConfigError(
            f"max_memory has {unknown[0]!r}; expected numbers of accelerators, 'mps', 'cpu' or 'disk' for its keys"
        )
    count = torch.accelerator.device_count()
    numbers = sorted(place for place in max_memory if isinstance(place, int))
    for number in sorted({*numbers} - {*range(count)}):
        logger.warning("max_memory names device %s, and this machine has %s accelerator(s)", number, count)
    ordered: list[Place] = [*numbers, *(place for place in _HOST if place in max_memory)]
    return {place: convert_file_size_to_int(max_memory[place]) for place in ordered}


def _free_memory() -> dict[Place, int]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    free: dict[Place, int] = {}
    shares_host_memory = False
    if accelerator is not None and accelerator.type == "mps":
        return {"mps": available_host_bytes()}
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        for number in range(torch.accelerator.device_count()):
            try:
                free[number] = module.mem_get_info(number)[0]
                properties = module.get_device_properties(number)
            except RuntimeError as error:
                logger.warning("device %s is left out, since it does not answer: %s", number, error)
                continue
            shares_host_memory |= bool(getattr(properties, "is_integrated", False))
    if not shares_host_memory:
        free["cpu"] = available_host_bytes()
    return free


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Place, int | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: DType | None = None,
    special_dtypes: DTypes | None = None,
    low_zero: bool = False,
) -> dict[Place, int]:
    """Return a `max_memory` with which `infer_auto_device_map`, whose arguments these are, fills accelerators alike.

    Args:
        max_memory: bounds, as of `get_max_memory`; a device with 0 takes no part. The last accelerator keeps its own.
        low_zero: leave as much as possible of the first accelerator free.
    """
    bounds = get_max_memory(max_memory)
    used = [place for place, num_bytes in bounds.items() if place not in ("cpu", "disk") and num_bytes > 0]
    if not used:
        return bounds
    if len(used) == 1:
        low_zero = False
        if max_memory is None and isinstance(used[0], int):
            # The rest is for activations, and for layers that are brought in from the host.
            bounds[used[0]] = int(bounds[used[0]] * 0.9)
            logger.info("90%% of device %s is for the model; give max_memory to use more", used[0])
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    share = sizes[""] // (len(used) - low_zero) + _slack(model, sizes, class_names(no_split_module_classes))
    for place in used[int(low_zero) : -1]:
        bounds[place] = min(share, bounds[place])
    if low_zero:
        rest = sizes[""] - sum(bounds[place] for place in used[1:])
        bounds[used[0]] = min(max(0, rest), bounds[used[0]])
    return bounds


def _slack(model: nn.Module, sizes: Mapping[str, int], no_split: Sequence[str]) -> int:
    """Return how much more than its mean share a device gets: layers do not fill one to the brim."""
    blocks: dict[str, int] = {}
    for name, module in model.named_modules():
        if name in sizes and name and type(module).__name__ in no_split:
            blocks.setdefault(type(module).__name__, sizes[name])
    tensors = set(get_module_leaves(sizes))
    layers = get_module_leaves(name for name in sizes if name not in tensors)
    mean = sum(sizes[name] for name in layers) // max(len(layers), 1)
    # A fourth more than the larger of the first block that stays together, of each class, and the mean layer.
    return int(1.25 * max(mean, *blocks.values(), 0))


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def get_module_size_with_ties(
    tied_params: Sequence[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: Sequence[Entry]
) -> tuple[int, list[str], list[Any]]:
    """Return the bytes, names and modules of a module and of those that its tied parameters bring along."""
    names, modules, total = [], [], module_size
    for parameter in tied_params:
        entry = next((entry for entry in modules_to_treat if _is_inside(parameter, entry[0])), None)
        if entry is not None:
            names.append(entry[0])
            modules.append(entry[1])
            total += module_sizes[entry[0]] - module_sizes[parameter]
    return total, names, modules


def _ties_outside(name: str, groups: Iterable[Sequence[str]]) -> list[str]:
    """Return the names outside of a module of parameters that stand inside of it, too."""
    found = []
    for group in groups:
        outside = [parameter for parameter in group if not _is_inside(parameter, name)]
        if len(outside) < len(group):
            found += outside
    return found


def fallback_allocate(
    modules: Sequence[Entry],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Iterable[str] | None = None,
    tied_parameters: Iterable[Sequence[str]] | None = None,
) -> tuple[str | None, Any, list[Entry]]:
    """Return the first module, at any depth, that fits into `size_limit` with its ties: name, module and the rest."""
    rest = list(modules)
    try:
        limit = convert_file_size_to_int(size_limit)
    except ConfigError:
        return None, None, rest
    no_split, groups = class_names(no_split_module_classes), list(tied_parameters or ())
    # Each candidate with the list of entries that it was taken out of: only what stands around it is split up.
    candidates = [(entry, rest) for entry in reversed(rest)]
    while candidates:
        (name, entry), around = candidates.pop()
        others = [other for other in around if other[0] != name]
        ties = _ties_outside(name, groups)
        needed, _, _ = get_module_size_with_ties(ties, module_sizes[name], module_sizes, others)
        if needed <= limit:
            return name, entry, others
        if not is_unit(entry, no_split):
            parts = top_entries(entry, name)
            place = [other[0] for other in around].index(name)
            split = [*around[:place], *parts, *around[place + 1 :]]
            candidates.extend((part, split) for part in reversed(parts))
    return None, None, rest


class _Allocation:
    """One walk over a model: devices are filled in order; the first and the host leave room for the largest layer."""

    def __init__(
        self, model: nn.Module, budget: Mapping[Place, int], sizes: Mapping[str, int], no_split: Sequence[str]
    ) -> None:
        self.budget, self.sizes, self.no_split = budget, sizes, no_split
        self.tied = find_tied_parameters(model)
        self.waiting = top_entries(model)
        self.devices: list[Place] = [*budget, *(() if "disk" in budget else ("disk",))]
        accelerators = [place for place in self.devices if place not in ("cpu", "disk")]
        self.keeping_room = ["mps"] if "mps" in accelerators else [*accelerators[:1], "cpu"]
        self.position = 0
        self.used: dict[Place, int] = dict.fromkeys(self.devices, 0)
        self.found: dict[str, Place] = {}
        self.placed: dict[Place, list[Any]] = {place: [] for place in self.devices}
        self.too_small: dict[Place, int] = {}
        self.uses_fallback = self.says_why = False
        self._measure()

    def _measure(self) -> None:
        modules = [(name, entry) for name, entry in self.waiting if isinstance(entry, nn.Module)]
        self._largest, self._largest_names = get_max_layer_size(modules, self.sizes, self.no_split)

    def _say(self, text: str) -> None:
        if self.says_why:
            print(text)

    def _take_next(self) -> Entry:
        """Return the next entry, which waits no longer: the largest layer is one of those behind it."""
        name, entry = self.waiting.pop(0)
        self._largest_names = [each for each in self._largest_names if not _is_inside(each, name)]
        if not self._largest_names:
            self._measure()
        return name, entry

    def place_next(self) -> None:
        """Give the next entry a device, or split it, or go on to the next device."""
        name, entry = self._take_next()
        place = self.devices[self.position]
        reserved = self._largest if place in self.keeping_room else 0
        size = self.sizes[name]
        needed, names, modules = get_module_size_with_ties(
            _ties_outside(name, self.tied), size, self.sizes, self.waiting
        )
        free = needed if place == "disk" else self.budget[place] - reserved - self.used[place]
        if needed <= free:
            self._say(f"{name}{f' with {names}' if names else ''}: {needed} bytes on {place}, of {free}")
            self._assign(place, needed, dict([(name, entry), *zip(names, modules, strict=True)]))
            return
        self._say(f"{name}: {needed} bytes do not fit into {free} on {place}")
        if names and size <= free and self._split_first(dict(zip(names, modules, strict=True))):
            self.waiting.insert(0, (name, entry))
        elif size >= free and not is_unit(entry, self.no_split):
            self.waiting[:0] = top_entries(entry, name)
            self._measure()
        elif not self._place_another(place, (name, entry), needed):
            if not self.used[place]:
                self.too_small[place] = needed + reserved
            self.used[place] += reserved
            self.position += 1
            self.waiting.insert(0, (name, entry))

    def _assign(self, place: Place, num_bytes: int, entries: Mapping[str, Any]) -> None:
        self.used[place] += num_bytes
        self.found.update(dict.fromkeys(entries, place))
        self.placed[place] += entries.values()
        self.waiting = [waiting for waiting in self.waiting if waiting[0] not in entries]

    def _split_first(self, entries: Mapping[str, Any]) -> bool:
        """Split the first of some entries that can be, so that less of it has to come along with a tied parameter."""
        name = next((name for name, entry in entries.items() if not is_unit(entry, self.no_split)), None)
        if name is not None:
            place = [waiting[0] for waiting in self.waiting].index(name)
            self.waiting[place : place + 1] = top_entries(entries[name], name)
            self._measure()
        return name is not None

    def _place_another(self, place: Place, entry: Entry, needed: int) -> bool:
        """Put the first later entry that fits before this one, where a device would stay empty."""
        if self.used[place] or not self.uses_fallback or place == "disk":
            return False
        free = self.budget[place] - max(self._largest, needed)
        name, module, rest = fallback_allocate(self.waiting, self.sizes, free, self.no_split, self.tied)
        if name is not None:
            self.waiting = [(name, module), entry, *rest]
        return name is not None


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Place, int | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: DType | None = None,
    special_dtypes: DTypes | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Place]:
    """Return a device for each module: accelerators are filled first, in order, then the host, then the disk.

    Modules keep their order, so that activations cross devices as seldom as possible, and names of a tied parameter
    come together. The first accelerator and the host keep room for the largest layer behind them. Only sizes are read:
    the model may be on the meta device. `max_memory` is as of `get_max_memory`.

    Args:
        no_split_module_classes: names of classes whose modules stay on one device: blocks with a residual connection.
        dtype: which floating-point tensors are going to be converted to; `special_dtypes` by name.
        clean_result: name a module once where all that is in it goes to one device.
        offload_buffers: buffers of offloaded modules are offloaded too, and take no room on an accelerator.
        fallback_allocation: where the next module does not fit on an empty device, take a later one that does.
    """
    budget = get_max_memory(max_memory)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    allocation = _Allocation(model, budget, sizes, class_names(no_split_module_classes))
    allocation.uses_fallback, allocation.says_why = fallback_allocation, verbose
    if not allocation.tied and check_tied_parameters_in_config(model):
        logger.warning("the configuration ties weights, and the model's are not: call model.tie_weights() before")
    while allocation.waiting:
        allocation.place_next()
    if not offload_buffers:
        _warn_of_buffers(allocation, dtype, special_dtypes)
    for place, needed in allocation.too_small.items():
        logger.warning(
            f"insufficient memory on {place}: no module was placed there, and the first one needs {needed} bytes, room "
            "for the largest layer included; raise max_memory, or give fallback_allocation=True"
        )
    return clean_device_map(allocation.found) if clean_result else allocation.found


def _warn_of_buffers(allocation: _Allocation, dtype: DType | None, special_dtypes: DTypes | None) -> None:
    """Warn where the buffers of offloaded modules, which stay on an accelerator, fit on none."""
    offloaded = [each for place in ("cpu", "disk") for each in allocation.placed.get(place, ())]
    modules = [entry for entry in offloaded if isinstance(entry, nn.Module)]
    num_bytes = sum(compute_module_total_buffer_size(module, dtype, special_dtypes) for module in modules)
    accelerators = [place for place in allocation.budget if place not in ("cpu", "disk")]
    fits = any(allocation.budget[place] >= num_bytes + allocation.used[place] for place in accelerators)
    if num_bytes and accelerators and not fits:
        warnings.warn(
            f"the buffers of the offloaded modules take {num_bytes} bytes, which are left on none of the accelerators "
            f"{accelerators}; give offload_buffers=True to offload them too",
            stacklevel=3,
        )


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Name a module, inside of `module_name`, once where all in it goes to one device; in place, and returned."""
    inside = {name: place for name, place in device_map.items() if not module_name or _is_inside(name, module_name)}
    if len(inside) > 1 and len(set(inside.values())) == 1:
        kept = {name: place for name, place in device_map.items() if name not in inside}
        device_map.clear()
        device_map.update({**kept, module_name: next(iter(inside.values()))})
        return device_map
    depth = len(module_name.split(".")) + 1 if module_name else 1
    for child in dict.fromkeys(".".join(name.split(".")[:depth]) for name in inside if name != module_name):
        clean_device_map(device_map, child)
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Refuse (ConfigError) a device map that leaves tensors of the model out; unknown names are a warning."""
    stored = model.state_dict(keep_vars=True)
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in device_map if name not in modules and name not in stored]
    if unknown:
        warnings.warn(f"device_map keys do not match any submodules of the model: {unknown}", stacklevel=2)
    if "" not in device_map:
        left = [name for name in stored if not any(_is_inside(name, module) for module in device_map)]
        if left:
            raise ConfigError(
                f"device_map says nothing about {', '.join(map(repr, left[:10]))}{', ...' if len(left) > 10 else ''}; "
                "add their modules, or an entry '' for all the rest"
            )
