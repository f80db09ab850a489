"""Structures of tensors within one process: move, measure, concatenate, apply. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_trainer.errors import ConfigError
from accel_trainer.tree import leaves, map_leaves, rebuild_mapping

__all__ = ["concatenate", "find_batch_size", "is_tensor", "pad_to", "recursively_apply", "send_to_device"]


def is_tensor(node: Any) -> bool:
    """Return whether a node of a structure is a tensor."""
    return isinstance(node, Tensor)


def send_to_device(
    data: Any,
    device: torch.device | str,
    non_blocking: bool = False,
    skip_keys: str | Iterable[str] | None = None,
) -> Any:
    """Move every tensor, and everything else that has a `.to(device)`, to a device.

    Args:
        skip_keys: keys of mappings, at any depth, whose values stay where they are.
    """
    skipped = frozenset((skip_keys,) if isinstance(skip_keys, str) else skip_keys or ())

    def move(leaf: Any) -> Any:
        if skipped and isinstance(leaf, Mapping):
            moved = {key: value if key in skipped else send(value) for key, value in leaf.items()}
            return rebuild_mapping(leaf, moved)
        if not hasattr(leaf, "to"):
            return leaf
        try:
            return leaf.to(device, non_blocking=non_blocking)
        except TypeError:  # a class of the user's own whose `to` knows no non_blocking
            return leaf.to(device)

    def send(node: Any) -> Any:
        return map_leaves(
            move, node, is_leaf=lambda inner: hasattr(inner, "to") or bool(skipped and isinstance(inner, Mapping))
        )

    return send(data)


def find_batch_size(data: Any) -> int | None:
    """Return the first dimension of the first tensor that has one, or None."""
    for leaf in leaves(data, is_leaf=is_tensor):
        if is_tensor(leaf) and leaf.ndim > 0:
            return leaf.shape[0]
    return None


def concatenate(parts: Sequence[Any], dim: int = 0, *, pad_index: float | None = None) -> Any:
    """Concatenate structures of the same nesting, leaf by leaf: tensors along `dim`, lists of other values end to end.

    Args:
        pad_index: fill dimensions in which the parts differ, other than `dim`, with this value up to the largest size:
            for outputs gathered over several steps.

    Raises:
        ConfigError: there is nothing to concatenate.
    """
    if not parts:
        raise ConfigError("concatenate got no parts; give at least one")
    columns = [list(leaves(part, is_leaf=_is_column)) for part in parts]
    joined = iter([_concatenate_leaves(column, dim, pad_index) for column in zip(*columns, strict=True)])
    return map_leaves(lambda _: next(joined), parts[0], is_leaf=_is_column)


def recursively_apply(
    function: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor),
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to the leaves that `test_type` accepts; others stay, or are an error.

    Raises:
        ConfigError: with `error_on_other_type`, a leaf is not of the tested type.
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return function(leaf, *args, **kwargs)
        if error_on_other_type:
            raise ConfigError(f"cannot apply {getattr(function, '__name__', function)} to a {type(leaf).__name__}")
        return leaf

    return map_leaves(apply, data, is_leaf=test_type)


def pad_to(tensor: Tensor, shape: Sequence[int], value: float) -> Tensor:
    """Return a tensor of a larger shape that begins with `tensor` and has `value` elsewhere; itself if it fits."""
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    padded = tensor.new_full(tuple(shape), value)
    padded[tuple(map(slice, tensor.shape))] = tensor
    return padded


def _is_column(node: Any) -> bool:
    """A tensor, or a list that holds no tensor and no nesting: one value for each sample."""
    return isinstance(node, Tensor) or (
        type(node) is list and not any(isinstance(item, (Tensor, list, tuple, dict)) for item in node)
    )


def _concatenate_leaves(column: Sequence[Any], dim: int, pad_index: float | None) -> Any:
    head = column[0]
    if isinstance(head, Tensor):
        tensors = [part[None] if part.ndim == 0 else part for part in column]
        return torch.cat(tensors if pad_index is None else _fill(tensors, dim, pad_index), dim=dim)
    if isinstance(head, list):
        return [item for part in column for item in part]
    return list(column)


def _fill(tensors: list[Tensor], dim: int, pad_index: float) -> list[Tensor]:
    """Bring all dimensions but one to their largest size over the tensors."""
    largest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    filled = []
    for tensor in tensors:
        largest[dim] = tensor.shape[dim]
        filled.append(pad_to(tensor, largest, pad_index))
    return filled
