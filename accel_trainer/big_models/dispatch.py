"""Models larger than a device: blocks spread over accelerators, host and disk, brought in to compute, and read back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer import logging
from accel_trainer.big_models.alignment import (
    AlignDevicesHook,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    has_offloaded_params,
)
from accel_trainer.big_models.device_map import check_device_map, get_balanced_memory, infer_auto_device_map
from accel_trainer.big_models.module_hooks import (
    CpuOffload,
    UserCpuOffloadHook,
    add_hook_to_module,
    hooks_of,
    watch_moves,
)
from accel_trainer.big_models.module_tensors import (
    Device,
    TiedTensors,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
    set_module_tensor_to_device,
)
from accel_trainer.checkpoint.safetensors_file import LazyTensor, SafetensorsFile
from accel_trainer.checkpoint.torch_files import load_torch_file
from accel_trainer.checkpoint.weights.into_model import (
    describe_names,
    load_checkpoint_in_model,
    place_of,
    require_tensors,
)
from accel_trainer.checkpoint.weights.offloaded import (
    OFFLOAD_INDEX_NAME,
    OffloadedWeightsLoader,
    load_offloaded_weight,
    offload_state_dict,
    outlines_of,
    read_offload_index,
)
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError, OffloadedModelError
from accel_trainer.runtime.process import with_index

logger = logging.get_logger(__name__)

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")

Keys = str | Iterable[str] | None
Classes = Iterable[str] | None
Folder = str | os.PathLike[str]
Index = Mapping[str, Mapping[str, Any]]


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Classes = None,
) -> nn.Module:
    """Keep a model's weights in host memory, bring those of each layer in for its forward, and return the model.

    Args:
        execution_device: where it computes; None is the device of its first parameter.
        state_dict: the weights; None is those of the model.
        preload_module_classes: names of classes whose modules use the weights of modules inside without calling them.

    Raises:
        ConfigError: a weight has no values, or the model is offloaded already.
    """
    if state_dict is None:
        state_dict = get_state_dict_offloaded_model(model)
    weights = OffloadedWeightsLoader(state_dict, aliases=_aliases(model, state_dict))
    return _offload(model, weights, execution_device, offload_buffers, preload_module_classes)


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model of a pipeline in host memory until its forward; return it with the `CpuOffload` hook."""
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def disk_offload(
    model: nn.Module,
    offload_dir: Folder,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Classes = None,
) -> nn.Module:
    """Keep a model's weights in files, map those of each layer for its forward, and return the model.

    Weights that have memory are written to `offload_dir`, also over files of their names; those on the meta device are
    taken from there. The other arguments are as of `cpu_offload`.

    Raises:
        IncompatibleCheckpointError: a weight has no values, neither in the model nor in the folder.
        DiskFullError: there is no room.
    """
    index = _write_missing(model, require_tensors(model, model.state_dict(keep_vars=True)), offload_dir)
    weights = OffloadedWeightsLoader(save_folder=offload_dir, index=index, aliases=_aliases(model, index))
    return _offload(model, weights, execution_device, offload_buffers, preload_module_classes)


def _offload(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    execution_device: Device | None,
    offload_buffers: bool,
    preload_module_classes: Classes,
) -> nn.Module:
    if is_offloaded(model):
        raise OffloadedModelError(
            f"{type(model).__name__} is offloaded already; take its hooks off with remove_hook_from_submodules(model)"
        )
    if execution_device is None:
        execution_device = next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=execution_device,
        offload=True,
        offload_buffers=offload_buffers,
        weights_map=weights,
        preload_module_classes=preload_module_classes,
    )
    watch_moves(model, _check_move)
    return model


def _aliases(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """Return the stored name of each tied weight that is stored under another of its names only."""
    known = set(stored)
    found = {}
    for group in find_tied_parameters(model):
        source = next((name for name in group if name in known), None)
        if source is not None:
            found.update({name: source for name in group if name not in known})
    return found


def _write_missing(model: nn.Module, state: Mapping[str, Tensor], folder: Folder) -> Index:
    """Write the weights of `state` that have memory, and return the folder's index, which has to have the others."""
    present = {name: tensor for name, tensor in state.items() if not tensor.is_meta}
    if present:
        offload_state_dict(folder, present)
    index = read_offload_index(folder) if Path(folder, OFFLOAD_INDEX_NAME).is_file() else {}
    _check_index(model, state, index, str(folder))
    return index


def _check_index(model: nn.Module, state: Mapping[str, Tensor], index: Index, place: str) -> None:
    known = {*index, *_aliases(model, index)}
    missing = [name for name, tensor in state.items() if tensor.is_meta and name not in known]
    if missing:
        raise IncompatibleCheckpointError(
            f"{describe_names(missing)} of {type(model).__name__} have no values: they are on the meta device, and "
            f"{place} does not have them; load them with load_checkpoint_and_dispatch(model, checkpoint, device_map)"
        )
    for name, tensor in state.items():
        shape = index.get(name, {}).get("shape")
        if tensor.is_meta and shape is not None and list(shape) != list(tensor.shape):
            raise IncompatibleCheckpointError(
                f"{name} is {tuple(shape)} in {place} and {tuple(tensor.shape)} in the model; "
                "it is the folder of another model: give a new one"
            )


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Index | None = None,
    offload_buffers: bool = False,
    skip_keys: Keys = None,
    preload_module_classes: Classes = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Send each block of a model to its device, add the hooks with which it computes, and return the model.

    Blocks on `"disk"`, and those on `"cpu"` where there is an accelerator in the map, compute on the main device:
    their weights are brought in for the forward of each layer, those of the next one while it computes.

    Args:
        device_map: as `infer_auto_device_map` returns it.
        main_device: where offloaded blocks compute; None is the first accelerator in the map.
        state_dict: the weights of the blocks on the host; None is those of the model.
        offload_dir: where the weights of the blocks on disk are, or are written to.
        offload_index: where they are stored already, by name, as `read_offload_index` returns it.
        skip_keys: keyword arguments, and keys of outputs, that stay on their device.
        force_hooks: add hooks also where all goes to one device.

    Raises:
        ConfigError: the map leaves tensors out, or nobody says where those on disk are.
        IncompatibleCheckpointError: a block on disk has no values.
    """
    check_device_map(model, device_map)
    device_map = _with_modules_offloaded(model, device_map)
    places = list(dict.fromkeys(device_map.values()))
    if len(places) == 1 and places != ["disk"] and not force_hooks:
        lazy_state_dict(model)  # says which weights have no values
        model.to(places[0])
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        _hook_encoder(model)
        return model
    if main_device is None:
        main_device = next((place for place in places if place not in ("cpu", "disk")), "cpu")
    is_on_host = str(main_device) in ("cpu", "mps")
    offloaded = {name: place == "disk" or place == "cpu" and not is_on_host for name, place in device_map.items()}
    tied = find_tied_parameters(model)
    weights = _weights_of(model, device_map, is_on_host, state_dict, offload_dir, offload_index, offload_buffers)
    devices = {name: main_device if place in ("cpu", "disk") else place for name, place in device_map.items()}
    attach_align_device_hook_on_blocks(
        model,
        execution_device={**devices, "": main_device},
        offload=offloaded,
        offload_buffers=offload_buffers,
        weights_map=weights,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=_copies_of(model, tied),
    )
    _place_tensors(model, devices)
    retie_parameters(model, tied)
    _hook_encoder(model)
    watch_moves(model, _check_move)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _with_modules_offloaded(model: nn.Module, device_map: Mapping[str, Device]) -> dict[str, Device]:
    """Return the map with tensors where their modules are, or on the main device: hooks bring in those of modules."""
    tensors = device_map.keys() & model.state_dict().keys()
    placed = {name: place for name, place in device_map.items() if name not in tensors}
    main = next((place for place in device_map.values() if place not in ("cpu", "disk")), "cpu")
    for name in [name for name in device_map if name in tensors]:
        if not any(module == "" or name.startswith(f"{module}.") for module in placed):
            placed[name] = main if device_map[name] in ("cpu", "disk") else device_map[name]
    return placed


def _place_tensors(model: nn.Module, devices: Mapping[str, Device]) -> None:
    """Send the tensors that a map names by themselves to their devices."""
    for name in devices.keys() & model.state_dict().keys():
        set_module_tensor_to_device(model, name, devices[name])


def _hook_encoder(model: nn.Module) -> None:
    """Give an encoder the hook that transformers' generate() looks for, and would else take from accelerate."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "get_encoder"):
        encoder: Any = model.get_encoder()  # type: ignore[operator]
        if not hooks_of(encoder):
            add_hook_to_module(encoder, AlignDevicesHook(io_same_device=True))


def _copies_of(model: nn.Module, tied: Iterable[Sequence[str]]) -> TiedTensors:
    """Return the map of the copies of tied parameters, in which there are none yet."""
    parameters = [model.get_parameter(names[0]) for names in tied]
    return {parameter.data_ptr(): {} for parameter in parameters if not parameter.is_meta}


def _state_on(
    places: Iterable[str], model: nn.Module, device_map: Mapping[str, Device], with_buffers: bool
) -> list[dict[str, Tensor]]:
    """Return the tensors of a model's state dict that go to each of some places."""
    left_out = set() if with_buffers else {name for name, _ in model.named_buffers()}
    state = {name: each for name, each in model.state_dict(keep_vars=True).items() if name not in left_out}
    place_by_name = {name: place_of(name, device_map) for name in state}
    return [{name: each for name, each in state.items() if place_by_name[name] == place} for place in places]


def _weights_of(
    model: nn.Module,
    device_map: Mapping[str, Device],
    is_on_host: bool,
    state_dict: Mapping[str, Tensor] | None,
    folder: Folder | None,
    index: Index | None,
    offload_buffers: bool,
) -> OffloadedWeightsLoader | None:
    """Return the weights of the offloaded blocks; None where there are none."""
    on_host, on_disk = _state_on(("cpu", "disk"), model, device_map, offload_buffers)
    if on_host and not is_on_host and state_dict is None:
        state_dict = {name: tensor.detach().to("cpu") for name, tensor in on_host.items()}
    if on_disk:
        index, kept = _index_of(model, on_disk, folder, index)
        state_dict = {**(state_dict or {}), **kept}
    if state_dict is None and index is None:
        return None
    state_dict, index = state_dict or {}, index or {}
    return OffloadedWeightsLoader(state_dict, folder, index, aliases=_aliases(model, [*state_dict, *index]))


def _index_of(
    model: nn.Module, on_disk: Mapping[str, Tensor], folder: Folder | None, index: Index | None
) -> tuple[Index, dict[str, Tensor]]:
    """Return the index of weights that go to disk, which are written where none is given; and those left in memory."""
    if index is not None:
        _check_index(model, on_disk, index, "offload_index")
        # In memory anyway, for a tied weight of a block on the host: no file has to hold it.
        kept = {name: each.detach() for name, each in on_disk.items() if not each.is_meta and name not in index}
        return index, kept
    if folder is None:
        raise ConfigError(
            f"device_map sends {describe_names(list(on_disk))} to 'disk', and nothing says where that is; "
            "give offload_dir"
        )
    return _write_missing(model, on_disk, folder), {}


def _check_move(model: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise OffloadedModelError(
            f"{type(model).__name__} is offloaded: its weights are on the host or on disk and come to their device for "
            "each forward, so that it cannot be moved or cast; load it again with another device_map, or take the "
            "hooks off with remove_hook_from_submodules(model), which brings back weights that were in memory before"
        )
    logger.warning(
        "%s is spread over devices by its device_map, and is moved now: its hooks still bring inputs to the devices "
        "of the map; take them off with remove_hook_from_submodules(model)",
        type(model).__name__,
    )


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Folder,
    device_map: str | Device | Mapping[str, Device] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: Keys = None,
    preload_module_classes: Classes = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    init_missing: bool = False,
    verify: bool = False,
) -> nn.Module:
    """Load weights, send each block to its device, and return the model ready to run.

    Blocks on `"disk"` compute with the mapped safetensors files of the checkpoint: nothing is written, and of torch's
    own files one copy. Arguments that are not named here are as of `load_checkpoint_in_model` or `dispatch_model`.

    Args:
        device_map: devices by the names of modules; "auto" or "balanced" to fill accelerators alike,
            "balanced_low_0" to leave the first one free, "sequential" to fill one after the other; or one device. None
            loads the weights, and leaves the model where it is.
        max_memory: bounds for the words, as of `infer_auto_device_map`; so is `no_split_module_classes`.
        offload_folder: for copies of weights that go to disk and are in no safetensors file.

    Raises:
        ConfigError: `device_map` is none of these, or leaves tensors out.
        IncompatibleCheckpointError: parameters or buffers would be left without values.
    """
    if device_map is not None and not isinstance(device_map, Mapping):
        device_map = _choose_map(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    if device_map is not None:
        if any(str(place) == "meta" for place in device_map.values()):
            raise ConfigError("device_map has 'meta', where nothing can compute; give devices, 'cpu' or 'disk'")
        check_device_map(model, device_map)
        device_map = _with_modules_offloaded(model, device_map)
        check_tied_parameters_on_same_device(find_tied_parameters(model), device_map)
    index: dict[str, dict[str, Any]] = {}
    report = load_checkpoint_in_model(
        model,
        checkpoint,
        device_map,
        offload_folder,
        dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        broadcast_from_rank0=broadcast_from_rank0,
        init_missing=init_missing,
        verify=verify,
        offload_index=index,
    )
    if report.left_on_meta:
        raise IncompatibleCheckpointError(
            f"{checkpoint} has no values for {describe_names(report.left_on_meta)} of {type(model).__name__}, which "
            "are on the meta device; give init_missing=True to initialise new parameters, and build the model with "
            "init_empty_weights(), which leaves computed buffers their values"
        )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_index=index or None,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def _choose_map(
    model: nn.Module,
    wanted: str | Device,
    max_memory: Mapping[int | str, int | str] | None,
    no_split: str | Iterable[str] | None,
    dtype: str | torch.dtype | None,
    *,
    offload_buffers: bool,
) -> Mapping[str, Device]:
    """Return the device map for a word, or for one device; a ConfigError for others."""
    if wanted in _STRATEGIES:
        bounds = max_memory
        if wanted != "sequential":
            bounds = get_balanced_memory(model, max_memory, no_split, dtype, low_zero=wanted == "balanced_low_0")
        return infer_auto_device_map(model, bounds, no_split, dtype, offload_buffers=offload_buffers)
    try:
        return {"": wanted if wanted == "disk" else torch.device(wanted)}
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device_map={wanted!r} is no device; expected one, such as 'cpu' or 0, names of modules with devices, or "
            f"one of {', '.join(map(repr, _STRATEGIES))}"
        ) from error


def is_offloaded(model: nn.Module) -> bool:
    """Return whether weights of a model come to their device for each forward only."""
    return any(has_offloaded_params(module) for module in model.modules())


def lazy_state_dict(model: nn.Module) -> dict[str, Tensor | LazyTensor]:
    """Return the state dict of a model with its offloaded weights, which are read when they are called for."""
    offloaded: dict[str, Tensor | LazyTensor] = {}
    converted: dict[tuple[int, torch.dtype], LazyTensor] = {}
    for name, placeholder, stored in outlines_of(model):
        found: Tensor | LazyTensor = stored
        if stored.dtype != (dtype := placeholder.dtype):
            later = LazyTensor(dtype, tuple(stored.shape), partial(stored.to, dtype))
            found = converted.setdefault((stored.data_ptr(), dtype), later)  # names of tied weights share one
        offloaded[name] = found
    own = require_tensors(model, model.state_dict())
    state = {name: offloaded.get(name, tensor) for name, tensor in own.items()}
    empty = [name for name, tensor in state.items() if isinstance(tensor, Tensor) and tensor.is_meta]
    if empty:
        raise ConfigError(
            f"{describe_names(empty)} of {type(model).__name__} have no values: they are on the meta device, and not "
            "offloaded; load them with load_checkpoint_and_dispatch()"
        )
    return state


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state dict in host memory, offloaded weights mapped; a ConfigError where some have no values."""
    state = lazy_state_dict(model)
    return {name: (each if isinstance(each, Tensor) else each()).to("cpu") for name, each in state.items()}


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Device = "cpu"
) -> dict[str, Any]:
    """Fill in the entries of `state_dict` that are tensors of one module, found by the name of one; return it."""
    path = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for name, tensor in module.state_dict().items():
            full = f"{path}.{name}" if path else name
            if full in state_dict:
                state_dict[full] = tensor
    return state_dict


def load_offloaded_weights(model: nn.Module, index: Index | None, offload_folder: Folder) -> None:
    """Put the weights of an index, which have a file each in a folder, into a model on the host."""
    for name, entry in (index or {}).items():
        weight = load_offloaded_weight(Path(offload_folder, f"{name}.dat"), entry)
        set_module_tensor_to_device(model, name, "cpu", value=weight)


def load_state_dict(checkpoint_file: Folder, device_map: Mapping[str, Device] | None = None) -> dict[str, Any]:
    """Return the tensors of one file, safetensors or torch's own; those of torch's own are on the host.

    Args:
        device_map: devices by the start of the names; what it does not name, or sends to `"disk"`, is on the host.

    Raises:
        CheckpointNotFoundError: there is no file.
        IncompatibleCheckpointError: it cannot be read, or is not in PyTorch's layout.
    """
    path = Path(checkpoint_file)
    if path.suffix != ".safetensors":
        found: dict[str, Any] = load_torch_file(path)
        return found
    file, places = SafetensorsFile(path), {"": "cpu", **(device_map or {})}
    found = {}
    for name in file:
        place = place_of(name, places)
        found[name] = file[name].to("cpu" if place == "disk" else with_index(place))
    return found
