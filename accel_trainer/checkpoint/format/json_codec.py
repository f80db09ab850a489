"""Nested Python state as JSON plus tensors, and back. No pickle: reading runs no code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_trainer.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError

__all__ = ["OWN_STATE", "decode", "encode"]

OWN_STATE = "own_state"
"""With the first group of an optimizer's state: what that holds under names, and not of a parameter."""

_PLAIN = (str, int, float, bool, type(None))


def encode(value: Any, tensors: dict[str, Tensor], path: str = "state") -> Any:
    """Return `value` as JSON data; its tensors are put into `tensors` under their paths, as they are.

    Holds None, booleans, numbers, strings, lists, tuples, sets of those, dicts with string or number keys, tensors and
    NumPy arrays and scalars.

    Raises:
        ConfigError: something else is in it; the message names where.
    """
    if isinstance(value, Tensor):
        return {"$tensor": _put(value.detach(), tensors, path)}
    if isinstance(value, np.ndarray):
        return {"$array": _put(torch.from_numpy(np.ascontiguousarray(value)), tensors, path)}
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, path)
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [encode(item, tensors, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, (tuple, set, frozenset)):
        items = value if isinstance(value, tuple) else sorted(value)
        tag = "$tuple" if isinstance(value, tuple) else "$set"
        return {tag: [encode(item, tensors, f"{path}.{index}") for index, item in enumerate(items)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, tensors, f"{path}.{key}") for key, item in value.items()}
        pairs = [[encode(key, tensors, path), encode(item, tensors, f"{path}.{key}")] for key, item in value.items()]
        return {"$pairs": pairs}
    raise ConfigError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold; return "
        "numbers, strings, lists, dicts and tensors from state_dict()"
    )


def _put(tensor: Tensor, tensors: dict[str, Tensor], path: str) -> str:
    """Keep a tensor under its path. Keys with dots can make two paths one: the second gets a number."""
    name, number = path, 1
    while name in tensors:
        number += 1
        name = f"{path}#{number}"
    tensors[name] = tensor
    return name


def decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `encode` was given.

    Raises:
        IncompatibleCheckpointError: a tensor that the JSON names is not there.
        CorruptCheckpointError: it is not what `encode` makes.
    """
    try:
        return _decode(data, tensors)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, IncompatibleCheckpointError):
            raise
        raise CorruptCheckpointError(f"the JSON of a state holds what no state has: {error}") from error


def _decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(data, list):
        return [_decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        (tag, content), *_ = data.items()
        if tag in ("$tensor", "$array"):
            if content not in tensors:
                raise IncompatibleCheckpointError(f"tensor {content!r} is named in the JSON and missing in its file")
            return tensors[content] if tag == "$tensor" else tensors[content].numpy()
        if tag == "$float":
            return float(content)
        if tag == "$tuple":
            return tuple(_decode(item, tensors) for item in content)
        if tag == "$set":
            return {_decode(item, tensors) for item in content}
        if tag == "$pairs":
            return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
    return {key: _decode(item, tensors) for key, item in data.items()}
