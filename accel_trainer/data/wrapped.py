"""What a dataset holds: subsets, concatenations and wrappers of the user's keep the datasets that they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset


def set_dataset_epoch(dataset: Any, epoch: int) -> None:
    """Call `set_epoch` on a dataset and, through any wrapping, on those it holds."""
    for node in with_wrapped(dataset):
        if callable(getattr(node, "set_epoch", None)):
            node.set_epoch(epoch)


def with_wrapped(dataset: Any, at_most: int = 64) -> Iterator[Any]:
    """Yield a dataset and those it holds: `.dataset` of a subset, `.datasets` of a concatenation, or any attribute."""
    seen: dict[int, Any] = {}
    waiting = [dataset]
    while waiting and len(seen) < at_most:
        node = waiting.pop(0)
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        yield node
        inner = getattr(node, "datasets", None)
        waiting += [getattr(node, "dataset", None), *(inner if isinstance(inner, (list, tuple)) else ())]
        for value in getattr(node, "__dict__", {}).values():
            waiting += _datasets_in(value)


def _datasets_in(value: Any) -> list[Any]:
    """Return an attribute's value that is a dataset, or the entries of one that holds datasets."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    # By the first one: lists of samples are long.
    return list(entries) if isinstance(next(iter(entries), None), Dataset) else []
