"""Structures of tensors within one process: move, measure, concatenate, apply. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel_trainer.errors import ConfigError, UnsupportedTypeError
from accel_trainer.tree import leaves, map_leaves, rebuild_mapping

__all__ = [
    "TensorInformation",
    "concatenate",
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "initialize_tensors",
    "is_tensor",
    "is_tensor_information",
    "listify",
    "pad_input_tensors",
    "pad_to",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]


def is_tensor(tensor: Any) -> bool:
    """Return whether a node of a structure is a tensor."""
    return isinstance(tensor, Tensor)


def send_to_device(
    tensor: Any,
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

    return send(tensor)


def find_batch_size(data: Any) -> int | None:
    """Return the first dimension of the first tensor that has one, or None."""
    first = next(iter(data.values()), None) if isinstance(data, dict) else None
    if isinstance(first, Tensor) and first.ndim > 0:  # nearly every batch: no need to walk through it
        return first.shape[0]
    for leaf in leaves(data, is_leaf=is_tensor):
        if is_tensor(leaf) and leaf.ndim > 0:
            return leaf.shape[0]
    return None


def concatenate(data: Sequence[Any], dim: int = 0, *, pad_index: float | None = None) -> Any:
    """Concatenate structures of the same nesting, leaf by leaf: tensors along `dim`, lists of other values end to end.

    Args:
        pad_index: fill dimensions in which the parts differ, other than `dim`, with this value up to the largest size:
            for outputs gathered over several steps.

    Raises:
        ConfigError: there is nothing to concatenate.
    """
    if not data:
        raise ConfigError("concatenate got no parts; give at least one")
    columns = [list(leaves(part, is_leaf=_is_column)) for part in data]
    joined = iter([_concatenate_leaves(column, dim, pad_index) for column in zip(*columns, strict=True)])
    return map_leaves(lambda _: next(joined), data[0], is_leaf=_is_column)


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
        UnsupportedTypeError: with `error_on_other_type`, a leaf is not of the tested type.
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return function(leaf, *args, **kwargs)
        if error_on_other_type:
            raise UnsupportedTypeError(
                f"cannot apply {getattr(function, '__name__', function)} to a {type(leaf).__name__}; pass nested "
                f"lists, tuples and dicts of what {getattr(test_type, '__name__', test_type)} accepts, or "
                "error_on_other_type=False to leave other values as they are"
            )
        return leaf

    return map_leaves(apply, data, is_leaf=test_type)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return a structure with a slice along dim 0 of each tensor, as views.

    Args:
        process_index: not used; the signature is that of a loader's `slice_fn_for_dispatch`.
        num_processes: not used, likewise.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def listify(data: Any) -> Any:
    """Return a structure with nested lists of Python numbers in the place of tensors; bf16 is read as fp32."""

    def to_list(tensor: Tensor) -> Any:
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).tolist()

    return recursively_apply(to_list, data)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor, or None."""
    return next((leaf.device for leaf in leaves(data, is_leaf=is_tensor) if is_tensor(leaf)), None)


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor that stands elsewhere."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether a node of a structure is a TensorInformation."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """Return a structure with a TensorInformation in the place of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return a structure with an uninitialized tensor in the place of each TensorInformation."""

    def build(info: TensorInformation) -> Tensor:
        return torch.empty(*info.shape, dtype=info.dtype)

    return recursively_apply(build, data_structure, test_type=is_tensor_information)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return a structure whose tensors of `batch_size` along `dim` repeat their last row up to a multiple.

    Args:
        num_processes: the number that the padded size is a multiple of.
    """
    missing = -batch_size % num_processes

    def pad(each: Tensor) -> Tensor:
        if not missing or each.shape[dim] != batch_size:
            return each
        last = each.narrow(dim, batch_size - 1, 1)
        return torch.cat([each, *[last] * missing], dim=dim)

    return recursively_apply(pad, tensor)


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
