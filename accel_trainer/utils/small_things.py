"""Functions of a few lines that scripts import from accelerate.utils, and that nothing here needs."""

from __future__ import annotations

import functools
import socket
from typing import Any

__all__ = [
    "convert_bytes",
    "get_free_port",
    "get_pretty_name",
    "is_port_in_use",
    "merge_dicts",
    "recursive_getattr",
]


def convert_bytes(size: float) -> str:
    """Return a number of bytes in words, in the largest unit (of 1024) that leaves a number of 1 or more."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or that of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


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


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a process of this machine listens on a TCP port; 29500, torchrun's, when None."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """Return a TCP port of this machine on which nobody listens now; another process may take it before you do."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
