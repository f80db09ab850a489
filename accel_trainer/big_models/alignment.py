"""Hooks that bring a module's inputs to its device, and its weights for the time of each forward."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

from accel_trainer.big_models.module_hooks import ModelHook, add_hook_to_module, hooks_of
from accel_trainer.big_models.module_tensors import (
    Device,
    TiedTensors,
    find_registry,
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
    with_data,
)
from accel_trainer.checkpoint.weights.offloaded import OffloadedWeightsLoader, PrefixedDataset
from accel_trainer.runtime.process import with_index
from accel_trainer.runtime.tensor_trees import find_device, send_to_device

Keys = str | Iterable[str] | None

_PLAIN = frozenset((bool, int, float, str))

# More than the next module: behind a small one, such as a norm, the next matrix would come too late.
_WINDOW_BYTES = 64 * 2**20
"""How much of the mapped files the system is asked for in advance: page cache, no memory of this process."""

_MADV_WILLNEED = 3


def _lies_on(data: Any, device: torch.device) -> bool:
    """Whether nothing of a structure has to be moved; false where that takes more than a look to know."""
    # To move nothing through send_to_device, which builds structures anew, was a part of what offloading adds to small
    # layers: with the other short ways here, 1.65 times the plain model's time is 1.41.
    if isinstance(data, Tensor):
        return data.device == device
    kind = type(data)
    if kind is dict:
        data = data.values()
    elif kind is not tuple and kind is not list:
        return data is None or kind in _PLAIN
    for item in data:  # noqa: SIM110 - a generator costs more, and each forward asks for each module
        if not _lies_on(item, device):
            return False
    return True


class _Slot(NamedTuple):
    """The place of an offloaded tensor in its module."""

    name: str
    registry: dict[str, Any]
    leaf: str
    placeholder: Tensor
    """Without memory: it stands there while the module does not compute."""


class AlignDevicesHook(ModelHook):
    """Brings inputs and weights of a module to one device for its forward; offloaded weights leave it afterwards."""

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: Keys = None,
        tied_params_map: TiedTensors | None = None,
        *,
        read_ahead: ReadAhead | None = None,
        excluded: Iterable[str] = (),
    ) -> None:
        """Describe the hook; nothing moves before it is added to a module.

        Args:
            execution_device: where the module computes; None leaves inputs and weights where they are.
            offload: the weights, with `offload_buffers` also buffers of the state dict, have memory in forward only.
            io_same_device: outputs go back to the device of the first input tensor.
            weights_map: values of offloaded weights by name; None is a copy of the present ones in host memory.
            place_submodules: the tensors of the modules inside, too, but for the `excluded` ones.
            skip_keys: keyword arguments, and keys of outputs, that stay on their device.
            tied_params_map: as of `set_module_tensor_to_device`.
            read_ahead: shared by the hooks of a model.
        """
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._slots: list[_Slot] = []
        self._borrowed: list[tuple[dict[Any, Tensor], Any]] = []
        self._pages: tuple[Device | None, list[Tensor] | None] | None = None
        self._read_ahead = read_ahead
        self._excluded = tuple(f"{name}." for name in excluded)

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's tensors to the device, or out of it."""
        if self.execution_device is not None and torch.device(self.execution_device).type == "meta":
            self.tied_params_map = None  # addresses on meta are all zero
        if self.offload:
            self._take_out(module)
            rest = (
                get_non_persistent_buffers(module, self.place_submodules, fqns=True)
                if self.offload_buffers
                else [name for name, _ in module.named_buffers(recurse=self.place_submodules)]
            )
        else:
            rest = [name for name, _ in named_module_tensors(module, recurse=self.place_submodules)]
        if self.execution_device is not None:
            for name in rest:
                registry, leaf = find_registry(module, name)
                if registry[leaf] is not None and not name.startswith(self._excluded):
                    set_module_tensor_to_device(
                        module, name, self.execution_device, tied_params_map=self.tied_params_map, clear_cache=False
                    )
        return module

    def _take_out(self, module: nn.Module) -> None:
        # A tied tensor by each of its names: one that is left out would be a tensor of no values.
        named = partial(named_module_tensors, module, recurse=self.place_submodules, remove_duplicate=False)
        self.original_devices = {name: tensor.device for name, tensor in named()}
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in named(self.offload_buffers)}
        self._slots, self._pages = [], None
        placeholders = WeakIdKeyDictionary() if self._read_ahead is None else self._read_ahead.placeholders
        for name in [name for name, _ in named(self.offload_buffers, remove_non_persistent=True)]:
            registry, leaf = find_registry(module, name)
            tensor = registry[leaf]
            if not tensor.is_meta and tensor not in placeholders:
                placeholders[tensor] = with_data(tensor, tensor.detach().to("meta"))
            registry[leaf] = placeholder = tensor if tensor.is_meta else placeholders[tensor]
            self._slots.append(_Slot(name, registry, leaf, placeholder))
        if self._read_ahead is not None:
            self._read_ahead.add(self)

    def stored(self) -> list[Tensor]:
        """Return the offloaded weights as they are stored, in the order of the module's tensors."""
        assert self.weights_map is not None
        return [self.weights_map[slot.name] for slot in self._slots]

    def pages(self) -> list[Tensor] | None:
        """Return the mapped weights that the module computes with as they are stored; None if it needs copies."""
        # Found once for a device: each forward asks twice, and small layers took 0.71 of accelerate's time, not 0.64.
        if self._pages is None or self._pages[0] != self.execution_device:
            self._pages = self.execution_device, self._find_pages()
        return self._pages[1]

    def _find_pages(self) -> list[Tensor] | None:
        if self.execution_device is not None and torch.device(self.execution_device).type != "cpu":
            return None
        pairs = zip(self._slots, self.stored(), strict=True)
        if any(value.device.type != "cpu" or value.dtype != slot.placeholder.dtype for slot, value in pairs):
            return None
        if not isinstance(self.weights_map, PrefixedDataset):
            return []
        weights, prefix = self.weights_map.dataset, self.weights_map.prefix
        if not isinstance(weights, OffloadedWeightsLoader) or not weights.index:
            return []
        return weights.pages([f"{prefix}{slot.name}" for slot in self._slots])

    def read(self, device: Device | None) -> list[Tensor]:
        """Return the offloaded weights on a device, in the module's dtypes and the order of its tensors."""
        target = None if device is None else with_index(device)
        tied = self.tied_params_map
        found = []
        for slot, value in zip(self._slots, self.stored(), strict=True):
            shared = tied.get(value.data_ptr()) if tied else None
            if shared is not None and device in shared:
                found.append(shared[device].detach())
                continue
            dtype = slot.placeholder.dtype
            if value.dtype != dtype or target is not None and value.device != target:
                value = value.to(target, dtype, non_blocking=True)
            if shared is not None:
                shared[device] = value
                self._borrowed.append((shared, device))
            found.append(value)
        return found

    def put_in(self, device: Device | None = None) -> None:
        """Give the module its weights, on `device` instead of the execution device where that is given."""
        if self._read_ahead is not None and device is None and not self.tied_params_map:
            values = self._read_ahead.take(self)
        else:
            values = self.read(self.execution_device if device is None else device)
        for slot, value in zip(self._slots, values, strict=True):
            slot.registry[slot.leaf] = with_data(slot.placeholder, value)

    def take_out(self) -> None:
        """Take the weights out of the module again: their memory is free once nobody else holds them."""
        for slot in self._slots:
            slot.registry[slot.leaf] = slot.placeholder
        while self._borrowed:
            shared, device = self._borrowed.pop()
            shared.pop(device, None)

    def outlines(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each offloaded tensor from the module on, its placeholder, and it as it is stored."""
        for slot, stored in zip(self._slots, self.stored() if self._slots else (), strict=True):
            yield slot.name, slot.placeholder, stored

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring in the weights, and move the inputs."""
        # torch's wrapper costs a microsecond without compilation, too, in two calls of each module.
        return self._enter_outside_of_graphs(args, kwargs) if is_compiling() else self._enter(args, kwargs)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            self.put_in()
        if self.execution_device is None:
            return args, kwargs
        device = with_index(self.execution_device)
        if _lies_on(args, device) and _lies_on(kwargs, device):
            return args, kwargs
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    _enter_outside_of_graphs = torch.compiler.disable(_enter)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Take the weights out, and move the output."""
        return self._leave_outside_of_graphs(output) if is_compiling() else self._leave(output)

    def _leave(self, output: Any) -> Any:
        if self.offload:
            self.take_out()
        device = self.input_device if self.io_same_device else None
        if device is not None and not _lies_on(output, device):
            output = send_to_device(output, device, skip_keys=self.skip_keys)
        return output

    _leave_outside_of_graphs = torch.compiler.disable(_leave)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Give the module its weights back, on the devices where they were; those that had no memory get none."""
        if self.offload:
            self.take_out()
            offloaded = {slot.name for slot in self._slots}
            for name, device in self.original_devices.items():
                # Buffers that have stayed may have changed since: statistics of a batch norm.
                value = self.weights_map[name] if self.weights_map is not None and name in offloaded else None
                if device.type != "meta":
                    set_module_tensor_to_device(module, name, device, value=value, clear_cache=False)
        return module


def offload_hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """Return the hooks of a module that bring in its offloaded weights."""
    return [hook for hook in hooks_of(module) if isinstance(hook, AlignDevicesHook) and hook.offload]


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a module's own weights have memory during its forward only."""
    return bool(offload_hooks(module))


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Have a module's own tensors on a device, by default its hook's, offloaded ones brought in, in this block."""
    hooks = offload_hooks(module)
    moved = {} if hooks or execution_device is None else dict(module.named_parameters(recurse=False))
    devices = {name: parameter.device for name, parameter in moved.items()}
    target: Any = execution_device
    try:
        for hook in hooks:
            hook.put_in(hook.execution_device if target is None else target)
        for name in devices:
            set_module_tensor_to_device(module, name, target, clear_cache=False)
        yield
    finally:
        for hook in hooks:
            hook.take_out()
        for name, device in devices.items():
            set_module_tensor_to_device(module, name, device, clear_cache=False)


def _walk(
    module: nn.Module, name: str, whole: Iterable[str] | None, excluded: Iterable[str] = ()
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules in a module, itself first; of the classes in `whole`, with True and without those inside."""
    classes = set(whole or ())
    seen: set[nn.Module] = set()
    waiting = [(name, module)]
    while waiting:
        path, found = waiting.pop()
        if found in seen or path in excluded:
            continue
        seen.add(found)
        is_whole = type(found).__name__ in classes
        yield path, found, is_whole
        if not is_whole:
            children = [(f"{path}.{child}" if path else child, inner) for child, inner in found.named_children()]
            waiting.extend(reversed(children))


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: Keys = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: TiedTensors | None = None,
    *,
    excluded: Iterable[str] = (),
) -> None:
    """Let each module in a module that has tensors and no hook bring its inputs to a device; no `excluded` one."""
    for _, inner, _ in list(_walk(module, "", preload_module_classes, excluded)):
        if not hooks_of(inner) and next(named_module_tensors(inner, recurse=True), None) is not None:
            hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
            add_hook_to_module(inner, hook)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: TiedTensors | None = None,
    *,
    read_ahead: ReadAhead | None = None,
    excluded: Iterable[str] = (),
) -> None:
    """Add an `AlignDevicesHook` to each module that has tensors of its own, this one and those inside.

    Args:
        weights_map: values of offloaded weights by their names from `module_name`, the module's own, on.
        preload_module_classes: names of classes whose modules get all weights at the beginning of their forward, for
            they use those of modules inside without calling them.
        read_ahead: of the model, where several calls add the hooks of one.
        excluded: names of modules that are left out, with all inside.
    """
    if offload and read_ahead is None:
        read_ahead = ReadAhead()
    whole = preload_module_classes if offload else None
    for name, inner, is_whole in list(_walk(module, module_name, whole, excluded)):
        if not is_whole and next(named_module_tensors(inner), None) is None:
            continue
        prefix = f"{name}." if name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=is_whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
            read_ahead=read_ahead,
        )
        add_hook_to_module(inner, hook, append=True)


def _by_block(value: Any, other: Any) -> dict[str, Any]:
    """Return a value for each block: its own, or else the one of all for the blocks that another argument names."""
    return dict(value) if isinstance(value, Mapping) else dict.fromkeys(other, value)


def _inside(name: str, names: Iterable[str]) -> list[str]:
    """Return those of some names of modules that are inside of another module."""
    prefix = f"{name}." if name else ""
    return [each for each in names if each != name and each.startswith(prefix)]


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Add the hooks with which blocks of a model compute on their devices; options are by a block's name, or one."""
    offloading = partial(
        attach_align_device_hook,
        offload=True,
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        tied_params_map=tied_params_map,
    )
    aligning = partial(AlignDevicesHook, skip_keys=skip_keys, tied_params_map=tied_params_map)
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            offloading(module, execution_device, module_name=module_name)
        else:
            add_hook_to_module(module, aligning(execution_device, io_same_device=True, place_submodules=True))
        return
    devices = _by_block(execution_device, offload)
    offloads = _by_block(offload, devices)
    read_ahead = ReadAhead()
    for name, inner in list(module.named_modules(prefix=module_name)):
        if name not in devices or name not in offloads:
            if name == "":
                add_hook_to_module(inner, aligning(devices.get(""), io_same_device=True))
            continue
        device, elsewhere = devices[name], _inside(name, devices)
        inside = [block.removeprefix(f"{name}.") for block in elsewhere]
        whole = None
        if offloads[name]:
            whole = preload_module_classes
            offloading(
                inner, device, module_name=name, preload_module_classes=whole, read_ahead=read_ahead, excluded=elsewhere
            )
        if not (offloads[name] and hooks_of(inner)):
            hook = aligning(
                device,
                offload_buffers=offload_buffers,
                io_same_device=name == "",
                place_submodules=not offloads[name],
                excluded=inside,
            )
            add_hook_to_module(inner, hook)
        attach_execution_device_hook(inner, device, skip_keys, whole, tied_params_map, excluded=inside)


# --- reading ahead ----------------------------------------------------------------------------------------------------


class ReadAhead:
    """Knows in which order the modules of a model are called, by their hooks, and reads one call ahead.

    A thread copies weights to an accelerator or into another dtype, one module ahead. Of mapped ones that the host
    computes with as they are, the system is asked for the pages, up to 64 MiB ahead.
    """

    def __init__(self) -> None:
        self.placeholders = WeakIdKeyDictionary()
        """Of tensors on meta, by those whose place they have taken: tied ones stay tied."""
        self._order: list[AlignDevicesHook] = []
        self._next: dict[AlignDevicesHook, AlignDevicesHook] = {}
        self._first: AlignDevicesHook | None = None
        self._last: AlignDevicesHook | None = None
        self._reading: _Reading | None = None
        self._asked: deque[tuple[AlignDevicesHook, int]] = deque()
        self._bytes_asked = 0

    # Of a copy, and out of a pickle: the order as it was given, without what is being read.
    def __getstate__(self) -> dict[str, Any]:
        return {"_order": self._order}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        for module in state["_order"]:
            self.add(module)

    def add(self, module: AlignDevicesHook) -> None:
        """Take a module for the one that is called after those that were added before."""
        if self._order:
            self._next[self._order[-1]] = module
        self._order.append(module)

    def take(self, module: AlignDevicesHook) -> list[Tensor]:
        """Return a module's weights on its device, and begin to read those of the one that came next the last time."""
        if self._last is not None and self._last is not module:
            self._next[self._last] = module
        self._first = self._first or module
        self._last = module
        reading, self._reading = self._reading, None
        values = reading.result() if reading is not None and reading.module is module else None
        if values is None:
            values = module.read(module.execution_device)
        follower = self._follower(module)
        pages = [] if follower is None else follower.pages()
        if follower is not None and pages is None:
            self._reading = _Reading(follower)
        elif pages or self._asked:  # in host memory there is nothing to ask for
            self._ask(module)
        return values

    def _follower(self, module: AlignDevicesHook) -> AlignDevicesHook | None:
        """Return the module that comes next; None at the end, for the next pass may never begin."""
        follower = self._next.get(module)
        return None if follower is self._first else follower

    def _ask(self, module: AlignDevicesHook) -> None:
        """Ask the system for the pages of the modules that follow."""
        if self._asked and self._asked[0][0] is module:
            self._bytes_asked -= self._asked.popleft()[1]
        else:
            self._asked.clear()
            self._bytes_asked = 0
        follower = self._follower(self._asked[-1][0] if self._asked else module)
        while follower is not None and self._bytes_asked < _WINDOW_BYTES and len(self._asked) < len(self._order):
            pages = follower.pages() or []
            for tensor in pages:
                _want_pages(tensor)
            num_bytes = sum(tensor.nbytes for tensor in pages)
            self._asked.append((follower, num_bytes))
            self._bytes_asked += num_bytes
            follower = self._follower(follower)


class _Reading:
    """Weights that a thread is reading."""

    def __init__(self, module: AlignDevicesHook) -> None:
        self.module = module
        self._device = module.execution_device
        self._values: list[Tensor] | None = None
        self._error: BaseException | None = None
        self._stream = _current_stream(self._device)
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._stream is not None:
                # Kernels on this stream come after the copies: nobody has to wait for them on the host.
                torch.accelerator.set_stream(self._stream)
            self._values = self.module.read(self._device)
        except BaseException as error:  # raised where the weights are needed
            self._error = error

    def result(self) -> list[Tensor] | None:
        """Return the weights; None if the module computes elsewhere by now."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._device != self.module.execution_device:
            return None
        present = _current_stream(self._device)
        if present is not None and self._stream is not None and present != self._stream:
            present.wait_stream(self._stream)
        return self._values


def _current_stream(device: Device | None) -> torch.Stream | None:
    if device is None or (target := with_index(device)).type in ("cpu", "meta", "mps"):
        return None
    return torch.accelerator.current_stream(target)


@lru_cache(1)
def _madvise() -> Any:
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


def _want_pages(tensor: Tensor) -> None:
    """Ask the system to read the pages of a mapped tensor; of one in memory, it has nothing to do."""
    madvise = _madvise()
    if madvise is not None and tensor.device.type == "cpu" and tensor.nbytes:
        begin = tensor.data_ptr()
        begin -= begin % 4096
        madvise(begin, tensor.data_ptr() + tensor.nbytes - begin, _MADV_WILLNEED)
