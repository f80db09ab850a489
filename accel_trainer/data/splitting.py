"""A list of work in one contiguous shard for each process: prompts to generate from, files to convert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_trainer.errors import ConfigError
from accel_trainer.tree import honor_type, map_leaves

__all__ = ["split_evenly"]


def split_evenly(inputs: Any, shards: int, index: int, *, apply_padding: bool = False) -> Any:
    """Return shard `index` of `inputs`, of the same kind; `inputs` stays as it is.

    Shards are contiguous and differ by at most one sample, the first ones being the longer. With fewer samples than
    shards, the last shards are empty.

    Args:
        inputs: a list, tuple, range, tensor, array or `datasets.Dataset`, split along its first dimension; or a mapping
            of such, all of one length, in which each value is split alike.
        apply_padding: repeat the last sample of `inputs` until all shards are as long as the first.

    Raises:
        ConfigError: `inputs` is of another kind, or the values of a mapping differ in length.
    """
    length = _length(inputs)
    share, extra = divmod(length, shards)
    begin = index * share + min(index, extra)
    count = share + (index < extra)
    padding = share + (extra > 0) - count if apply_padding else 0
    return map_leaves(lambda leaf: _take(leaf, begin, begin + count, padding), inputs, is_leaf=_is_sequence)


def _is_sequence(node: Any) -> bool:
    return not isinstance(node, Mapping)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        return _length_of_sequence(inputs)
    lengths = {key: _length(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{key!r} has {length}" for key, length in lengths.items())
        raise ConfigError(f"the values of a mapping to split differ in length: {found}; give each one entry per sample")
    return next(iter(lengths.values()), 0)


def _length_of_sequence(inputs: Any) -> int:
    has_rows = not isinstance(inputs, (Tensor, np.ndarray)) or inputs.ndim > 0
    if has_rows and (isinstance(inputs, (list, tuple, range, Tensor, np.ndarray)) or _is_dataset(inputs)):
        return len(inputs)
    shape = "" if has_rows else " without dimensions"
    raise ConfigError(
        f"cannot split {type(inputs).__name__}{shape} between processes: every one of them would do all of it. Give a "
        "list, tuple, range, tensor, array, datasets.Dataset, or a dict of those"
    )


def _is_dataset(inputs: Any) -> bool:
    """A `datasets.Dataset`, known by its methods: nothing is imported for it."""
    return hasattr(inputs, "select") and hasattr(inputs, "column_names") and hasattr(inputs, "__len__")


def _take(inputs: Any, begin: int, end: int, padding: int) -> Any:
    """Return rows `begin` to `end`, and the last row of all as often as `padding` says."""
    last = len(inputs) - 1
    if _is_dataset(inputs):
        return inputs.select([*range(begin, end), *[last] * padding])
    if isinstance(inputs, (list, tuple)):
        return honor_type(inputs, iter([*inputs[begin:end], *inputs[last:] * padding]))
    if not padding:
        return inputs[begin:end]
    if isinstance(inputs, Tensor):
        return torch.cat([inputs[begin:end], inputs[last:].expand(padding, *inputs.shape[1:])])
    if isinstance(inputs, np.ndarray):
        return np.concatenate([inputs[begin:end], np.repeat(inputs[last:], padding, axis=0)])
    return [*inputs[begin:end], *[inputs[last]] * padding]  # a range cannot repeat
