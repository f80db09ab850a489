"""The full training state in a directory: safetensors and JSON, keyed by parameter names. No pickle.

unit_I.json, unit_I.*          model I and its optimizers' state, as `CheckpointIO` writes them
unit_I.averages.RRRRR.*        rank R's shards of the averages of model I's weights, with `ema_decay`
training.safetensors/.json     schedulers, loaders' positions, scaler, registered objects
random_R.safetensors/.json     random streams of rank R
window_R.safetensors/.json     gradients of an accumulation window, on rank R, where the save came in the middle of one
window.RRRRR.safetensors       rank R's shards of those that are sharded
manifest.json, COMMITTED       number of ranks, versions, and the checksum of every file
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from accel_trainer.checkpoint.disk import as_corrupt
from accel_trainer.checkpoint.manifest import Manifest
from accel_trainer.checkpoint.publication import StagedDirectory
from accel_trainer.checkpoint.reader import StoredCheckpoint
from accel_trainer.checkpoint.shards import StoredShards, write_shards
from accel_trainer.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError
from accel_trainer.runtime.fault_point import fault_point
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import get_rng_state, reseed_from_saved, set_rng_state
from accel_trainer.runtime.shared_errors import raise_together

OWN_STATE = "own_state"
"""Key of an optimizer's state that belongs to no parameter; it is saved with the optimizer's first group."""

MAIN_PROCESS_OF = "main_process_of"
"""Key of a manifest's metadata, where rank 0 has saved without the others: the number of ranks."""


def encode(value: Any, tensors: dict[str, Tensor], path: str = "state") -> Any:
    """Return `value`, nested Python state, as JSON data; its tensors are put into `tensors` under their paths.

    Holds None, booleans, numbers, strings, lists, tuples, sets of those, dicts and Counters with string or number keys,
    tensors and NumPy arrays and scalars.
    """
    if isinstance(value, Tensor | np.ndarray):
        return _encode_array(value, tensors, path)
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, path)
    # JSON has no nan and no infinity; what Python writes for them (NaN) other readers refuse.
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _encode_items(value, tensors, path)
    raise _refusal(value, path)


def _encode_array(value: Tensor | np.ndarray[Any, Any], tensors: dict[str, Tensor], path: str) -> dict[str, str]:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise _refusal(value, path, f" of {value.layout}")
        return {"$tensor": _put(value.detach(), tensors, path)}
    if value.dtype.kind not in "biufc":
        raise _refusal(value, path, f" of {value.dtype}")
    return {"$array": _put(torch.from_numpy(np.asarray(value, order="C")), tensors, path)}


def _refusal(value: Any, path: str, what: str = "") -> ConfigError:
    return ConfigError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}{what}, which a checkpoint cannot hold; "
        "return numbers, strings, lists, dicts and tensors from state_dict()"
    )


def _encode_items(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    # A set in the order of its items, such that equal states make equal files.
    items = value if isinstance(value, (list, tuple)) else sorted(value, key=lambda item: (type(item).__name__, item))
    encoded = [encode(item, tensors, f"{path}.{index}") for index, item in enumerate(items)]
    return encoded if isinstance(value, list) else {"$tuple" if isinstance(value, tuple) else "$set": encoded}


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
    if isinstance(value, Counter):  # the milestones of a MultiStepLR, which asks for its elements()
        return {"$counter": _encode_mapping(dict(value), tensors, path)}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, tensors, f"{path}.{key}") for key, item in value.items()}
    pairs = [[encode(key, tensors, path), encode(item, tensors, f"{path}.{key}")] for key, item in value.items()]
    # JSON has string keys alone; optimizers number their parameters, and 1 and "1" are two keys.
    return {"$pairs": pairs}


def _put(tensor: Tensor, tensors: dict[str, Tensor], path: str) -> str:
    """Keep a tensor under its path. Keys with dots can make two paths one: the second gets a number."""
    name, number = path, 1
    while name in tensors:
        number += 1
        name = f"{path}#{number}"
    tensors[name] = tensor
    return name


def decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `encode` made JSON data and `tensors` of; refuse other data."""
    try:
        return _decode(data, tensors)
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
        if isinstance(error, IncompatibleCheckpointError):
            raise
        raise CorruptCheckpointError(f"the JSON of a state holds what no state has: {error}") from error


def _decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(data, list):
        return [_decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((tag, content),) = data.items()
        if tag in _DECODERS:
            return _DECODERS[tag](content, tensors)
    return {key: _decode(item, tensors) for key, item in data.items()}


def _find(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise IncompatibleCheckpointError(f"tensor {name!r} is named in the JSON and missing in its file")
    return tensors[name]


_DECODERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$tensor": _find,
    "$array": lambda name, tensors: _find(name, tensors).numpy(),
    "$float": lambda text, _: float(text),
    "$tuple": lambda items, tensors: tuple(_decode(item, tensors) for item in items),
    "$set": lambda items, tensors: {_decode(item, tensors) for item in items},
    "$counter": lambda counts, tensors: Counter(_decode(counts, tensors)),
    "$pairs": lambda pairs, tensors: {_decode(key, tensors): _decode(item, tensors) for key, item in pairs},
}


@dataclass
class TrainState:
    """Everything that a training run is made of."""

    units: Sequence[Any]
    """`strategies.api.CheckpointIO` of every unit."""
    optimizers: Sequence[Sequence[int]]
    """Numbers of each unit's optimizers, in the order in which all were prepared."""
    has_weights: Sequence[bool]
    """False for a unit whose weights a hook of the user saves or loads; its optimizer stays with us."""
    schedulers: Sequence[Any]
    """Stateful, with `check_state(state)` that refuses one that cannot be loaded, before anything changes."""
    loaders: Sequence[Stateful]
    objects: Mapping[str, Stateful]
    """Registered objects by name."""
    scaler: torch.amp.GradScaler | None
    readers: ProcessContext
    """This process among the ranks that read different data: others share their random streams with one of them."""
    windows: Any
    """The accumulation windows, which may be open: `accelerator.accumulation.OpenWindows`."""
    keeps_place: bool = False
    """Loaders, accumulation windows and random streams stay where they are when a state is loaded."""


def _write(staged: StagedDirectory, name: str, value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    data = encode(value, tensors)
    staged.write_tensors(f"{name}.safetensors", tensors)
    staged.write_json(f"{name}.json", data)


def _read(stored: StoredCheckpoint, name: str, more: Mapping[str, Any] | None = None) -> Any:
    return decode(stored.json(f"{name}.json"), {**stored.tensors(f"{name}.safetensors"), **(more or {})})


def save_train_state(staged: StagedDirectory, state: TrainState, process: ProcessContext) -> None:
    """Write `state` into `staged`. Collective: every rank calls it, and a rank's error is raised on all."""
    # A vote after each write: the next step may gather, as engines and registered objects do.
    for index, unit in enumerate(state.units):
        with raise_together(process, "save of the state"):
            unit.save(staged, f"unit_{index}", weights=state.has_weights[index])
            unit.save_averages(staged, f"unit_{index}.averages")
    with raise_together(process, "save of the state"):
        # Before anything is written: it may gather, and a rank whose disk is full would not take part.
        window = state.windows.state_dict()
        # Of each rank: masks of dropout differ between ranks, and a resume has to draw the same ones.
        _write(staged, f"random_{process.rank}", get_rng_state())
        if window is not None:
            held: dict[str, Tensor] = {}
            staged.write_json(f"window_{process.rank}.json", encode(window, held))
            staged.write_tensors(f"window_{process.rank}.safetensors", _write_sharded(staged, "window", held, process))
    tensors: dict[str, Tensor] = {}
    outline = encode(_training(state), tensors)
    # Copies of a sharded model, averaged weights say, are written like the model; for the rest one rank's word counts.
    unsharded = _write_sharded(staged, "training", tensors, process)
    # Read by every rank, hence on every node's disk.
    if staged.commits:
        staged.write_tensors("training.safetensors", unsharded)
        staged.write_json("training.json", outline)
        staged.metadata["units"] = len(state.units)
        staged.metadata["readers"] = state.readers.world_size


def _write_sharded(
    staged: StagedDirectory, prefix: str, tensors: Mapping[str, Tensor], process: ProcessContext
) -> dict[str, Tensor]:
    """Write this rank's shards of DTensors, and return the other tensors."""
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    write_shards(staged, prefix, sharded, process.rank)
    return {name: tensor for name, tensor in tensors.items() if name not in sharded}


def _training(state: TrainState) -> dict[str, Any]:
    return {
        "schedulers": [scheduler.state_dict() for scheduler in state.schedulers],
        "loaders": [loader.state_dict() for loader in state.loaders],
        "objects": {name: item.state_dict() for name, item in state.objects.items()},
        "scaler": state.scaler.state_dict() if state.scaler is not None else None,
    }


def _read_training(stored: StoredCheckpoint, state: TrainState) -> dict[str, Any]:
    """Return the states beside the units'. Tensors that are sharded in this run are read so, each rank its shard."""
    shards = StoredShards(stored, "training")
    now: dict[str, Tensor] = {}
    if len(shards):
        encode(_training(state), now)
    sharded: dict[str, Tensor] = {}
    for name in shards:
        shape, own = shards.shape(name), now.get(name)
        if isinstance(own, DTensor) and tuple(own.shape) == shape:
            sharded[name] = torch.empty_like(own, dtype=shards.dtype(name), requires_grad=False)
        else:
            sharded[name] = torch.empty(shape, dtype=shards.dtype(name))
        shards.read(name, sharded[name])
    training: dict[str, Any] = _read(stored, "training", sharded)
    return training


def files_to_read(manifest: Manifest, state: TrainState, process: ProcessContext) -> Iterator[str]:
    """Yield the names of the files that this rank reads in `load_train_state`."""
    own = ("training.", "window_", "window.", f"random_{_stream_of(manifest, state, process)}.")
    yield from (name for name in manifest.files if name.startswith(own))
    for index, unit in enumerate(state.units):
        yield from unit.files(manifest, f"unit_{index}")


def _check_fits(stored: StoredCheckpoint, training: dict[str, Any], state: TrainState) -> None:
    place, num_units = stored.path.absolute(), stored.manifest.metadata["units"]
    if num_units != len(state.units):
        raise IncompatibleCheckpointError(
            f"{place} holds {num_units} model(s) and this Accelerator has {len(state.units)}; prepare the same models "
            "in the same order before load_state()"
        )
    for kind, own in (("schedulers", state.schedulers), ("loaders", state.loaders)):
        if len(training[kind]) != len(own):
            raise IncompatibleCheckpointError(
                f"{place} holds {len(training[kind])} {kind} and this Accelerator has {len(own)}; "
                "prepare and register the same things in the same order before load_state()"
            )
    for scheduler, stepped in zip(state.schedulers, training["schedulers"], strict=True):
        scheduler.check_state(stepped)
    saved = training["objects"]
    missing, unexpected = sorted(state.objects.keys() - saved.keys()), sorted(saved.keys() - state.objects.keys())
    if missing or unexpected:
        differences = [f"registered and not in it: {', '.join(map(repr, missing))}"] if missing else []
        differences += [f"in it and not registered: {', '.join(map(repr, unexpected))}"] if unexpected else []
        raise IncompatibleCheckpointError(
            f"{place} was saved with other registered objects; {'; '.join(differences)}. Register the same ones under "
            "the same names with register_for_checkpointing() before load_state()"
        )


def _stateful(training: dict[str, Any], state: TrainState) -> list[tuple[Stateful, Any]]:
    """Return schedulers, loaders, registered objects and the loss scale, each with its stored state."""
    pairs: list[tuple[Stateful, Any]] = [
        *zip(state.schedulers, training["schedulers"], strict=True),
        *(() if state.keeps_place else zip(state.loaders, training["loaders"], strict=True)),
        *((state.objects[name], saved) for name, saved in training["objects"].items()),
    ]
    if state.scaler is not None and training["scaler"] is not None:
        pairs.append((state.scaler, training["scaler"]))
    return pairs


def load_train_state(stored: StoredCheckpoint, state: TrainState, process: ProcessContext) -> str:
    """Load a state that `save_train_state` wrote. Collective: every rank calls it, and reads the small files.

    Returns:
        A report of the random streams, for the user to read.

    Raises:
        IncompatibleCheckpointError: it was saved from other objects; nothing was changed.
    """
    manifest = stored.manifest
    with raise_together(process, f"load of {stored.path}"):
        training = _read_training(stored, state)
        with as_corrupt(stored.path / "training.json"):
            _check_fits(stored, training, state)
            stateful = _stateful(training, state)
        same_world = _is_same_world(manifest, state, process)
        random_state = _read_streams(stored, state, process)
        open_windows = _plan_windows(stored, state)
    # Everything is checked before the first object changes.
    loads = [
        load
        for index, unit in enumerate(state.units)
        for load in (
            unit.plan_load(stored, f"unit_{index}", weights=state.has_weights[index]),
            unit.plan_averages(stored, f"unit_{index}.averages"),
        )
    ]
    # All plans first: the second model that does not fit must leave the first one as it was.
    for load in loads:
        load()
    with raise_together(process, f"load of {stored.path}"):
        fault_point("load.apply", manifest.step)
        for item, saved in stateful:
            item.load_state_dict(saved)
        if state.keeps_place:
            return "data and random streams go on"
        # After the optimizers: the gradients of a window belong to parameters that the units have just filled.
        open_windows()
        # Last: loading draws numbers (a new state of an optimizer, initial values), and nothing after this does.
        if random_state is not None:
            with as_corrupt(stored.path / f"random_{_stream_of(manifest, state, process)}.json", RuntimeError):
                set_rng_state(random_state) if same_world else reseed_from_saved(random_state, state.readers.rank)
    if same_world:
        return "random streams restored"
    origin = "of this run" if random_state is None else "new, from those saved and the rank"
    ranks = manifest.metadata.get(MAIN_PROCESS_OF)
    who = f"{manifest.world_size} process(es)" if ranks is None else f"the main process alone, of {ranks},"
    return f"saved by {who} and loaded by {process.world_size}: random streams {origin}"


def _plan_windows(stored: StoredCheckpoint, state: TrainState) -> Callable[[], None]:
    """Check stored accumulation windows, and return a function that opens them again."""
    shards = StoredShards(stored, "window")
    held = {name: partial(shards.read_box, name) for name in shards}
    is_open = "window_0.json" in stored
    read = (lambda rank: _read(stored, f"window_{rank}", held)) if is_open else None
    with as_corrupt(stored.path / "window_0.json"):
        planned: Callable[[], None] = state.windows.plan_load(read, stored.manifest.world_size)
    return planned


def _read_streams(stored: StoredCheckpoint, state: TrainState, process: ProcessContext) -> dict[str, Any] | None:
    """Return this rank's random streams; rank 0's where another number of ranks saved them, if this disk has those."""
    name = f"random_{_stream_of(stored.manifest, state, process)}"
    if not _is_same_world(stored.manifest, state, process) and f"{name}.json" not in stored:
        return None
    streams: dict[str, Any] = _read(stored, name)
    return streams


def _is_same_world(manifest: Manifest, state: TrainState, process: ProcessContext) -> bool:
    """Whether as many ranks saved, and as many of them read different data."""
    num_readers = manifest.metadata.get("readers", manifest.world_size)
    return (manifest.world_size, num_readers) == (process.world_size, state.readers.world_size)


def _stream_of(manifest: Manifest, state: TrainState, process: ProcessContext) -> int:
    return process.rank if _is_same_world(manifest, state, process) else 0


def read_on_main(process: ProcessContext, section: str, read: Callable[[], Any]) -> Any:
    """Call `read` on rank 0, and return its result there, None elsewhere; its error is raised on all ranks."""
    with raise_together(process, section):
        return read() if process.is_main else None
