"""Structures of tensors within one process: move, measure, concatenate, split, apply. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_trainer.errors import ConfigError, UnsupportedTypeError
from accel_trainer.tree import honor_type, leaves, map_leaves, rebuild_mapping


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
        non_blocking: do not wait for the copies; those to the host are waited for all the same.
        skip_keys: keys of mappings, at any depth, whose values stay where they are.
    """
    # Whoever reads a copy on the host would find memory that is still being written: the CPU waits for no stream.
    non_blocking = non_blocking and torch.device(device).type != "cpu"
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
    return next((leaf.shape[0] for leaf in leaves(data, is_leaf=is_tensor) if is_tensor(leaf) and leaf.ndim), None)


def concatenate(data: Sequence[Any], dim: int = 0, *, pad_index: float | None = None) -> Any:
    """Concatenate structures of the same nesting, leaf by leaf: tensors along `dim`, lists of other values end to end.

    Args:
        pad_index: fill dimensions in which the parts differ, other than `dim`, with this value up to the largest size:
            for outputs gathered over several steps.

    Raises:
        ConfigError: there is nothing to concatenate, or dicts of unlike keys.
    """
    if not data:
        raise ConfigError("concatenate got no parts; give at least one")
    first, join = data[0], partial(concatenate, dim=dim, pad_index=pad_index)
    if isinstance(first, Mapping):
        return _concatenate_mappings(data, join)
    if isinstance(first, (list, tuple)) and not _is_column(first):
        return honor_type(first, map(join, zip(*data, strict=True)))
    columns = [list(leaves(part, is_leaf=_is_column)) for part in data]
    joined = iter([_concatenate_leaves(column, dim, pad_index) for column in zip(*columns, strict=True)])
    return map_leaves(lambda _: next(joined), data[0], is_leaf=_is_column)


def _concatenate_mappings(data: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    for part in data:
        if part.keys() != data[0].keys():
            found, expected = (sorted(map(str, each)) for each in (part, data[0]))
            raise ConfigError(f"concatenate got parts with the keys {expected} and {found}; give all the same")
    return rebuild_mapping(data[0], {key: join([part[key] for part in data]) for key in data[0]})


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor),
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to leaves of `test_type`; others stay, or raise an UnsupportedTypeError if asked to."""

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise UnsupportedTypeError(
                f"cannot apply {getattr(func, '__name__', func)} to a {type(leaf).__name__}; pass nested "
                f"lists, tuples and dicts of what {getattr(test_type, '__name__', test_type)} accepts, or "
                "error_on_other_type=False to leave other values as they are"
            )
        return leaf

    return map_leaves(apply, data, is_leaf=test_type)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return a structure with a slice along dim 0 of each tensor, as views; the other arguments are not used."""
    # They are those of a loader's `slice_fn_for_dispatch`.
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
    """Return a structure whose tensors of `batch_size` along `dim` repeat their last row up to a multiple."""
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


# --- a list of work in one contiguous shard for each process: prompts to generate from, files to convert --------------


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
