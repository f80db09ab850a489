"""Nested structures: dicts, lists, tuples, namedtuples, dataclasses and mapping classes such as BatchEncoding.

No torch here: the caller defines the leaves.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

__all__ = ["honor_type", "is_namedtuple", "leaves", "map_leaves", "merge_dicts", "rebuild_mapping", "recursive_getattr"]

T = TypeVar("T")


def is_namedtuple(data: Any) -> bool:
    """Whether `data` is an instance of a `collections.namedtuple` or `typing.NamedTuple` class."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: T, generator: Iterator[Any]) -> T:
    """Build a list, tuple or namedtuple of `obj`'s class from `generator`."""
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)  # type: ignore[call-arg]


def map_leaves(function: Callable[[Any], Any], data: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return a structure of the same classes with `function` applied to each leaf.

    Args:
        is_leaf: called on every node before it is entered; true stops the descent there. Anything that is not a
            container is a leaf too.
    """
    if is_leaf is not None and is_leaf(data):
        return function(data)
    if isinstance(data, (list, tuple)):
        return honor_type(data, (map_leaves(function, item, is_leaf=is_leaf) for item in data))
    if isinstance(data, Mapping):
        mapped = {key: map_leaves(function, value, is_leaf=is_leaf) for key, value in data.items()}
        return rebuild_mapping(data, mapped)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        # A copy, and not dataclasses.replace(): that makes fields without `init` anew, and calls __post_init__ again.
        copied: Any = copy.copy(data)
        for name, value in _fields(data):
            object.__setattr__(copied, name, map_leaves(function, value, is_leaf=is_leaf))  # also where it is frozen
        return copied
    return function(data)


def _fields(data: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass that are set, those without `init`, too."""
    return [(field.name, getattr(data, field.name)) for field in dataclasses.fields(data) if hasattr(data, field.name)]


def rebuild_mapping(original: Any, mapped: dict[Any, Any]) -> Any:
    """Return a mapping of `original`'s class: model outputs and BatchEncoding take a dict; others become one."""
    if type(original) is dict:
        return mapped
    try:
        return type(original)(mapped)
    except TypeError:
        return mapped


def leaves(data: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yield the leaves of `data` in the order in which `map_leaves` visits them. Nothing is rebuilt."""
    if is_leaf is not None and is_leaf(data):
        yield data
        return
    if isinstance(data, (list, tuple)):
        nodes: Iterable[Any] = data
    elif isinstance(data, Mapping):
        nodes = data.values()
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        nodes = [value for _, value in _fields(data)]
    else:
        yield data
        return
    for node in nodes:
        yield from leaves(node, is_leaf=is_leaf)


def merge_dicts(source: dict[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Write a nested dict's values over those of another one, in place, and return it."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute at a dotted path."""
    return functools.reduce(getattr, attr.split("."), obj)
