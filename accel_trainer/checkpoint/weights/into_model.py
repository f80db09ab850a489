"""Models built without memory, on the meta device; weights from files into any model, and values for missing ones.

A model may be plain, sharded or on the meta device: each rank reads its own shards, tensor by tensor.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from accel_trainer import logging
from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.manifest import MANIFEST_NAME, Manifest, check_files
from accel_trainer.checkpoint.shards import local_box, local_tensor, materialize
from accel_trainer.checkpoint.weights.offloaded import Index, offload_weight, outlines_of, save_offload_index
from accel_trainer.checkpoint.weights.weight_files import BroadcastFiles, WeightFiles
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError, OffloadedModelError
from accel_trainer.runtime.cores import usable_cores
from accel_trainer.runtime.model_wrappers import uncompiled_name, unwrap_module
from accel_trainer.runtime.process import find_process, with_index
from accel_trainer.runtime.torch_private import RESET_METHODS, copy_module, parameter_like

# The hook of the innermost context of this thread, which alone moves parameters.
_innermost: ContextVar[RemovableHandle | None] = ContextVar("init_on_device", default=None)

_INITIALIZERS = {name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")} | {
    "random_",
    "bernoulli_",
    "exponential_",
}


class _SkipMetaInitialization(TorchFunctionMode):
    """Skips the initialisation of tensors without memory."""

    # torch runs the decompositions of the random functions on the meta device, in Python: 70% of the time in which a
    # llama of 12 layers is built.

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named: Mapping[str, Any] = kwargs or {}
        if func.__name__ in _INITIALIZERS:
            target = args[0] if args else named.get("tensor")
            if isinstance(target, Tensor) and target.is_meta:
                return target
        return func(*args, **named)


@contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Build modules whose parameters take no memory: their shapes and dtypes are there, on the meta device.

        with init_empty_weights():
            model = MyModel(config)
        load_checkpoint_in_model(model, "weights")

    Args:
        include_buffers: buffers too. Those that are computed when the model is built (rotary frequencies, positions)
            have no values then; those of transformers are computed again when weights are loaded.
    """
    with init_on_device(torch.device("meta"), include_buffers), _SkipMetaInitialization():
        yield


@contextmanager
def init_on_device(device: int | str | torch.device, include_buffers: bool = False) -> Iterator[None]:
    """Build modules with parameters, and with `include_buffers` all new tensors, on `device`, in this thread."""
    device = with_index(device)
    if include_buffers:
        with device:
            yield
        return

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or isinstance(parameter, nn.UninitializedParameter) or _innermost.get() is not hook:
            return None
        # One that is on the device already stays the same object: modules may share it.
        if parameter.device == device:
            return None
        return parameter_like(parameter, parameter.detach().to(device))

    hook = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # may return a parameter
    outer = _innermost.set(hook)
    try:
        yield
    finally:
        _innermost.reset(outer)
        hook.remove()


logger = logging.get_logger(__name__)

DISK: Literal["disk"] = "disk"
"""The place of tensors that stay in files while the model computes with them."""

Device = int | str | torch.device
DeviceMap = Mapping[str, Device]
Weights = WeightFiles | BroadcastFiles


class LoadReport(NamedTuple):
    """Names that did not match, as `nn.Module.load_state_dict` reports them, and tensors left without values."""

    missing_keys: list[str]
    """Of the model, and not in the files. A tied tensor is in them when one of its names is."""
    unexpected_keys: list[str]
    """In the files, and not of the model."""
    left_on_meta: list[str]
    """Parameters and buffers of the model that have no values yet, those that no state dict names included."""


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Iterable[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    init_missing: bool = False,
    verify: bool = False,
    offload_index: Index | None = None,
) -> LoadReport:
    """Load weights into a model, tensor by tensor, each rank reading its own shards only. Every rank calls it.

    Works for a model on the meta device, whose tensors get their memory here, and for one that `prepare()` has
    sharded, whose shards stay where they are: both together load a model that no process could hold. Parameters and
    buffers stay the objects they were, tied ones tied, so that an optimizer keeps them.
    Buffers on the meta device that no file has (rotary frequencies, positions) are computed as the model computes them.
    Ranks do not communicate, but for the two options that say so. `offload_state_dict` and `full_state_dict` change
    nothing: one tensor is in memory at a time anyway, and files hold full tensors.

    Args:
        checkpoint: a directory with `model.safetensors` or `pytorch_model.bin`, one file or shards with an index; an
            index; or one file.
        device_map: which device each module's tensors go to, by the start of their names; `{"": device}` is all of
            them. None leaves them where they are; those on the meta device go to the CPU, or the devices of their mesh.
            On `"disk"` they stay in the files, and `dispatch_model(model, device_map, offload_dir=offload_folder)` lets
            the model compute with them.
        offload_folder: gets the index of what stays on disk, and copies of what is in no safetensors file.
        dtype: of floating-point tensors from now on; None keeps that of the model.
        offload_buffers: buffers of modules on disk stay there, too.
        keep_in_fp32_modules: names of modules, at any depth, that a `dtype` of float16 leaves in float32.
        strict: raise when names differ; otherwise they are logged as a warning, and returned.
        init_missing: initialise meta parameters that the files lack as their modules do, equal on all ranks (rank 0
            says from which seed: collective in a distributed job).
        broadcast_from_rank0: only rank 0 sees the files; it sends one tensor at a time. Collective.
        verify: compare the files with the checksums of a manifest beside them, before anything changes.
        offload_index: gets the index of what stays on disk, in place of `offload_folder`.

    Raises:
        CheckpointNotFoundError: there are no weights.
        IncompatibleCheckpointError: shapes differ, or names with `strict`; nothing was loaded then.
        CorruptCheckpointError: a file differs from what was written.
        OffloadedModelError: the model has hooks that bring in other weights.
        ConfigError: `device_map` does not say where a tensor goes, or nothing says where the disk is; `dtype` is not
            that of a sharded model; or an option of bitsandbytes is given.
    """
    if offload_8bit_bnb:
        raise ConfigError("offload_8bit_bnb=True is not offered; load the model with transformers' own quantization")
    index: Index = {} if offload_index is None else offload_index
    if offload_folder is None and offload_index is None:
        _refuse_disk(device_map)
    model = unwrap_module(model)
    _refuse_offloaded(model)
    weights = _open(Path(checkpoint), broadcast_from_rank0)
    if verify:
        _verify(weights)
    own = require_tensors(model, model.state_dict(keep_vars=True))
    groups = names_by_tensor(own)
    # Names and shapes of all before the first is filled: a model that does not fit is left as it was.
    sources, missing, unexpected = _match(own, groups.values(), weights)
    if strict:
        _refuse_differences(weights, model, missing, unexpected)
    devices = _choose_devices(model, groups.values(), device_map, offload_buffers)
    dtypes = _choose_dtypes(own, [*sources, *missing], dtype, keep_in_fp32_modules)
    on_disk: set[str] = set()
    for name, stored in _in_file_order(sources, weights):
        names, device = groups[id(own[name])], devices[name]
        if device == DISK:
            index[name] = _leave_on_disk(own[name], weights, stored, dtypes[name], name, offload_folder)
            _release(model, names, own[name], dtypes[name])
            on_disk.update(names)
        else:
            _fill(own[name], weights, stored, device, dtypes[name])
    initialized = _fill_missing(model, missing, init_missing, device_map)
    _convert(own, missing, dtypes)
    report = LoadReport(missing, unexpected, [name for name in initialized if name not in on_disk])
    _warn(weights, model, report)
    if offload_index is None and offload_folder is not None:
        _write_index(index, Path(offload_folder))
    return report


def _refuse_offloaded(model: nn.Module) -> None:
    if next(outlines_of(model), None) is not None:
        raise OffloadedModelError(
            f"{type(model).__name__} is offloaded: its hooks would bring in the weights that it was dispatched with, "
            "and not those of the checkpoint; take them off with remove_hook_from_submodules(model), and load then"
        )


def require_tensors(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return a model's state dict, which has to hold tensors only."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{name} of {type(model).__name__} is a {type(value).__name__}, and a model's state holds "
                "tensors; return one from get_extra_state(): torch.frombuffer(bytearray(data), dtype=torch.uint8)"
            )
    return state


def _convert(own: Mapping[str, Tensor], names: Iterable[str], dtypes: Mapping[str, torch.dtype]) -> None:
    """Give tensors that no file has the dtype of the others."""
    for name in names:
        if not own[name].is_meta and own[name].dtype != dtypes[name]:
            own[name].data = own[name].data.to(dtypes[name])


def _refuse_differences(weights: Weights, model: nn.Module, missing: list[str], unexpected: list[str]) -> None:
    if missing or unexpected:
        raise IncompatibleCheckpointError(
            f"{weights.path} {_describe(missing, unexpected, model)}; load with strict=False to accept"
        )


def _warn(weights: Weights, model: nn.Module, report: LoadReport) -> None:
    if any(report):
        logger.warning(
            "%s %s", weights.path, _describe(report.missing_keys, report.unexpected_keys, model, report.left_on_meta)
        )


def _write_index(index: Index, folder: Path) -> None:
    if index:
        folder.mkdir(parents=True, exist_ok=True)
        save_offload_index(index, folder)


def _in_file_order(sources: Mapping[str, str], weights: Weights) -> list[tuple[str, str]]:
    position = {name: index for index, name in enumerate(weights)}
    return sorted(sources.items(), key=lambda pair: position[pair[1]])


def _refuse_disk(device_map: DeviceMap | None) -> None:
    if isinstance(device_map, Mapping) and DISK in device_map.values():
        raise ConfigError(
            "device_map sends modules to 'disk', and nothing says where dispatch_model() will find them; give "
            "offload_folder, or call load_checkpoint_and_dispatch()"
        )


def _verify(weights: Weights) -> None:
    """Compare the files with the checksums of the manifest beside them."""
    directory = weights.path.parent
    if not isinstance(weights, WeightFiles) or not (directory / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"verify=True: there is no {MANIFEST_NAME} with checksums beside {weights.path}; expected a checkpoint "
            "that accel_trainer wrote, read by every rank. Load without verify"
        )
    manifest, names = Manifest.read(directory), weights.file_names()
    unknown = [name for name in names if name not in manifest.files]
    if unknown:
        raise ConfigError(
            f"verify=True: the manifest in {directory} has no {describe_names(unknown)}; load without verify"
        )
    check_files(directory, manifest, names, "full", usable_cores())


def _release(model: nn.Module, names: Iterable[str], tensor: Tensor, dtype: torch.dtype) -> None:
    """Put a tensor without memory in the place of one, under all its names."""
    # Another object: one that a graph of autograd still refers to cannot change its memory in place.
    emptied = torch.empty_like(tensor, dtype=dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        emptied = nn.Parameter(emptied, requires_grad=tensor.requires_grad)
    emptied.__dict__.update(tensor.__dict__)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, emptied)


def _leave_on_disk(
    tensor: Tensor, weights: Weights, stored: str, dtype: torch.dtype, name: str, folder: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """Return the entry of a tensor in an index: the file that has it, or a copy in `folder`."""
    if isinstance(tensor, DTensor) or not isinstance(weights, WeightFiles):
        raise ConfigError(
            f"device_map sends {name!r} to 'disk': a sharded model stays on its devices, and so does what rank 0 "
            "broadcasts; give devices only"
        )
    file = weights.file_of(stored)
    if file.suffix == ".safetensors":
        entry = {"safetensors_file": str(file.absolute()), "weight_name": stored}
        return {**entry, "dtype": str(dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if folder is None:
        raise ConfigError(
            f"device_map sends {name!r} to 'disk', and {file} cannot be mapped tensor by tensor; give offload_folder "
            "for a copy, or save the weights as safetensors"
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    copied: Index = {}
    offload_weight(weights[stored].to(dtype), name, folder, copied)
    return copied[name]


def _open(checkpoint: Path, broadcast: bool) -> Weights:
    if not (broadcast and dist.is_initialized() and dist.get_world_size() > 1):
        return WeightFiles(checkpoint)
    process = find_process()
    own = torch.accelerator.current_accelerator(check_available=True) if process is None else process.device
    return BroadcastFiles(checkpoint, with_index(exchange_device(own, dist.get_backend_config())))


def exchange_device(own: torch.device | None, backends: str) -> torch.device:
    """Return the device by whose backend ranks exchange weights: a rank's own where the group serves its kind."""
    return own if own is not None and own.type in backends else torch.device("cpu")


def names_by_tensor(own: Mapping[str, Tensor]) -> dict[int, list[str]]:
    """Return the names of each distinct tensor, by its id."""
    groups: dict[int, list[str]] = {}
    for name, tensor in own.items():
        groups.setdefault(id(tensor), []).append(name)
    return groups


def _match(
    own: Mapping[str, Tensor], groups: Iterable[list[str]], weights: Weights
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the stored name of each distinct tensor, the missing names and the unexpected ones."""
    sources, missing = {}, []
    for names in groups:
        # Files hold a tied tensor once, and not always under the name that comes first in this model.
        stored = next((name for name in (*names, *map(uncompiled_name, names)) if name in weights), None)
        if stored is None:
            missing.append(names[0])
        else:
            sources[names[0]] = stored
    shapes = {name: (weights.shape(stored), tuple(own[name].shape)) for name, stored in sources.items()}
    differ = [f"{name} is {a} in the file and {b} in the model" for name, (a, b) in shapes.items() if a != b]
    if differ:
        more = f" and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise IncompatibleCheckpointError(
            f"{weights.path} does not fit the model: {'; '.join(differ[:5])}{more}. Build the model that was saved"
        )
    known = {*own, *map(uncompiled_name, own)}
    return sources, missing, [name for name in weights if name not in known]


def describe_names(names: list[str]) -> str:
    """Return the first ten of some names, quoted, and how many more there are."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{', '.join(map(repr, names[:10]))}{more}"


def _describe(missing: list[str], unexpected: list[str], model: nn.Module, left: list[str] | None = None) -> str:
    differences = [f"lacks {describe_names(missing)}"] if missing else []
    if unexpected:
        differences.append(f"has {describe_names(unexpected)}, which were not used when it was loaded")
    text = f"does not match {type(model).__name__}: it {' and '.join(differences)}" if differences else "is loaded"
    if not left:
        return text
    return f"{text}; {len(left)} tensor(s) are left on the meta device, without values: {describe_names(left)}"


def _choose_devices(
    model: nn.Module, groups: Iterable[list[str]], device_map: DeviceMap | None, offload_buffers: bool
) -> dict[str, torch.device | Literal["disk"] | None]:
    """Return where each distinct tensor goes, by the first of its names; None for where it is."""
    buffers = set() if offload_buffers else {name for name, _ in model.named_buffers()}
    chosen = {}
    for names in groups:
        devices = [_device(name, device_map, stays_in_memory=name in buffers) for name in names]
        # A tied tensor is in memory if one of its names has to be.
        chosen[names[0]] = next((device for device in devices if device != DISK), DISK)
    return chosen


def _device(
    name: str, device_map: DeviceMap | None, *, stays_in_memory: bool = False
) -> torch.device | Literal["disk"] | None:
    """Return where a tensor goes; None for where it is. On disk, buffers that stay in memory go to the host."""
    if device_map is None:
        return None
    if not isinstance(device_map, Mapping):
        raise ConfigError(f"device_map={device_map!r} is no mapping; expected names and devices, such as {{'': 'cpu'}}")
    value = place_of(name, device_map)
    if value == DISK:
        return torch.device("cpu") if stays_in_memory else DISK
    try:
        return with_index(value)
    except RuntimeError as error:
        raise ConfigError(
            f"device_map has {value!r} for {name!r}; expected a device such as 'cpu' or 'cuda:0'"
        ) from error


def place_of(name: str, device_map: DeviceMap) -> Device:
    """Return the place of a tensor, by the longest name in the map that it is in."""
    fitting = [key for key in device_map if key == "" or name == key or name.startswith(f"{key}.")]
    if not fitting:
        raise ConfigError(f"device_map says nothing about {name!r}; add its module, or an entry '' for all the rest")
    return device_map[max(fitting, key=len)]


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype by its name, `"float16"` or `"torch.float16"`."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={dtype!r} is no dtype of torch; give one, such as torch.bfloat16 or 'bfloat16'")
    return found


def _choose_dtypes(
    own: Mapping[str, Tensor],
    names: Iterable[str],
    dtype: str | torch.dtype | None,
    keep_in_fp32_modules: Iterable[str] | None,
) -> dict[str, torch.dtype]:
    """Return the dtype in which the model has each of some tensors from now on."""
    wanted = None if dtype is None else as_dtype(dtype)
    # For float16 alone, whose range such modules exceed: bfloat16 has that of float32.
    kept = () if wanted != torch.float16 else tuple(keep_in_fp32_modules or ())
    chosen: dict[str, torch.dtype] = {}
    for name in names:
        before = own[name].dtype
        to = torch.float32 if any(f".{module}." in f".{name}." for module in kept) else wanted
        chosen[name] = to if to is not None and before.is_floating_point else before
        if chosen[name] != before and isinstance(own[name], DTensor):
            raise ConfigError(f"dtype={to}: {name!r} is sharded as {before}; change the model's dtype before prepare()")
    return chosen


def _fill(tensor: Tensor, weights: Weights, stored: str, device: torch.device | None, dtype: torch.dtype) -> None:
    """Give one tensor of the model its values; a sharded one stays where its shards are."""
    if tensor.is_meta:
        if device is not None and device.type == "meta":
            return
        materialize(tensor, device, dtype)
    elif not isinstance(tensor, DTensor) and (
        tensor.dtype != dtype or (device is not None and tensor.device != device)
    ):
        tensor.data = torch.empty(tensor.shape, dtype=dtype, device=device or tensor.device)
    weights.fill(stored, local_box(tensor).within(Box.full(tensor.shape)), local_tensor(tensor))


def _fill_missing(model: nn.Module, missing: list[str], init_missing: bool, device_map: DeviceMap | None) -> list[str]:
    """Compute meta buffers that are in no state dict, and new parameters if asked; return those left on meta."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_meta = [name for name, tensor in named.items() if tensor.is_meta]
    stored = model.state_dict(keep_vars=True)
    initialized = {name for name in on_meta if name not in stored}
    seed = torch.initial_seed()
    if init_missing:
        initialized |= set(on_meta) & set(missing)
        # Ranks may be seeded apart; their shards of one tensor have to come from one draw.
        if dist.is_initialized():
            message = [seed]
            dist.broadcast_object_list(message, src=0)
            seed = message[0]
    names = [name for name in on_meta if name in initialized]

    def device_of(name: str) -> torch.device | None:
        device = _device(name, device_map, stays_in_memory=True)  # no file has it: on the host, not on disk
        return None if device == DISK else device

    unknown = initialize_tensors(model, names, seed, device_of)
    return [name for name in on_meta if name in unknown or name not in initialized]


Initializer = Callable[[nn.Module], Any]


def initialize_tensors(
    model: nn.Module, names: Iterable[str], seed: int, device_of: Callable[[str], torch.device | None]
) -> list[str]:
    """Initialise meta parameters and buffers as their own modules do, and return the names for which none knows how.

    By a transformers model's `_init_weights`, or the module's `reset_parameters`, from a `seed` that is the same on
    every rank. `device_of` a tensor is that of its memory; None leaves it to `materialize`.
    """
    # Each module unsharded, on the CPU, from a seed of its own; then each rank takes its shard: the strategy changes no
    # value.
    by_owner: dict[str, list[str]] = {}
    for name in names:
        by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    unknown = []
    for owner, own_names in by_owner.items():
        initialize = _initializer_of(model, owner)
        module = model.get_submodule(owner)
        scratch = _copy_of(module, lambda tensor: torch.full(tensor.shape, _mark(tensor.dtype), dtype=tensor.dtype))
        if initialize is not None:
            # By the name of the module: the draw does not depend on what else is initialised before it.
            digest = hashlib.sha256(f"{seed} {owner}".encode()).digest()
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:7], "big"))
                initialize(scratch)
        tensors: dict[str, Tensor] = {
            **dict(scratch.named_parameters(recurse=False, remove_duplicate=False)),
            **dict(scratch.named_buffers(recurse=False, remove_duplicate=False)),
        }
        for name in own_names:
            leaf = name.rpartition(".")[2]
            if initialize is None or _is_unset(tensors[leaf]):
                unknown.append(name)
            else:
                tensor = getattr(module, leaf)
                materialize(tensor, device_of(name))
                local_tensor(tensor).copy_(tensors[leaf][local_box(tensor).within(Box.full(tensor.shape))])
    return unknown


def _initializer_of(model: nn.Module, owner: str) -> Initializer | None:
    """Return the initializer of the module `owner`: of the nearest transformers model, or the module's own."""
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


def _copy_of(module: nn.Module, build: Callable[[Tensor], Tensor]) -> nn.Module:
    # Children get tensors without memory: some modules initialise those of their children too, where values may have
    # been loaded. FSDP2 adds its class in front, whose __new__ would run the user's __init__.
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


def _is_unset(value: Tensor) -> bool:
    """Whether some of it was not initialised. Booleans have no value for a mark: they count as not initialised."""
    if value.dtype == torch.bool:
        return True
    marked = value.isnan() if value.is_floating_point() or value.is_complex() else value == _mark(value.dtype)
    return bool(marked.any())
