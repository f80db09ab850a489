"""Nested Python state as JSON plus tensors, and back. No pickle: reading runs no code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_trainer.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError

OWN_STATE = "own_state"
"""Key of an optimizer's state that belongs to no parameter; it is saved with the optimizer's first group."""

_PLAIN = (str, int, float, bool, type(None))


def encode(value: Any, tensors: dict[str, Tensor], path: str = "state") -> Any:
    """Return `value` as JSON data; its tensors are put into `tensors` under their paths, as they are.

    Holds None, booleans, numbers, strings, lists, tuples, sets of those, dicts with string or number keys, tensors and
    NumPy arrays and scalars.
    """
    if isinstance(value, Tensor):
        return {"$tensor": _put(value.detach(), tensors, path)}
    if isinstance(value, np.ndarray):
        return {"$array": _put(torch.from_numpy(np.ascontiguousarray(value)), tensors, path)}
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, path)
    # JSON has no nan and no infinity; what Python writes for them (NaN) other readers refuse.
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _encode_items(value, tensors, path)
    raise ConfigError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold; return "
        "numbers, strings, lists, dicts and tensors from state_dict()"
    )


def _encode_items(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    # A set in the order of its items, such that equal states make equal files.
    items = value if isinstance(value, (list, tuple)) else sorted(value)
    encoded = [encode(item, tensors, f"{path}.{index}") for index, item in enumerate(items)]
    return encoded if isinstance(value, list) else {"$tuple" if isinstance(value, tuple) else "$set": encoded}


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
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
    """Return the state that `encode` made JSON data and `tensors` of.

    Raises:
        IncompatibleCheckpointError: a tensor that the JSON names is not there.
        CorruptCheckpointError: it is not what `encode` makes.
    """
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
    "$pairs": lambda pairs, tensors: {_decode(key, tensors): _decode(item, tensors) for key, item in pairs},
}
