"""A parsed configuration before anyone interprets it: a tree of values that remember their line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_trainer.errors import ConfigError

MAX_NODES = 10_000
"""Values a file may hold after its aliases are expanded; the longest real configurations have about 200."""

MAX_DEPTH = 32
"""Levels of nesting a file may have."""


@dataclass(frozen=True, slots=True)
class Node:
    """One value: a scalar, a list of nodes, or a dict of nodes by `Key`.

    `text` is the scalar as it stands in the file without quotes around it (None for quoted ones and for containers),
    so that a message can tell `no` from `false`, and a text option can take `0`.
    """

    value: Any
    line: int | None = None
    text: str | None = None

    def plain(self) -> Any:
        """Return the value as Python dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key.name: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a mapping, with its line; two keys of one name are the same key."""

    name: str
    line: int | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class Entry:
    """A value as its source spells it: a key of a file, a variable, a flag or an argument."""

    name: str
    value: Any
    """Plain Python, unchecked; None means "not set"."""
    where: str
    """The place that a person would look for, such as `train.yaml:14`."""
    subject: str
    """The name in messages, such as `num_processes at train.yaml:14`."""
    text: str | None = None
    """The scalar as it stood unquoted in a file."""


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed configuration: `name` stands for it in messages, `problems` are errors that do not stop the reading."""

    name: str
    root: Node
    problems: tuple[str, ...] = ()
    path: Path | None = None
    """The file, absolute; None for a source that is no file."""

    @property
    def folder(self) -> Path | None:
        """Where the file lies; None for a source that is no file."""
        return self.path.parent if self.path is not None else None

    def at(self, line: int | None) -> str:
        """Return ` at NAME:LINE`, or ` in NAME` for a source that has no lines."""
        return f" in {self.name}" if line is None else f" at {self.name}:{line}"

    def where(self, line: int | None) -> str:
        """Return `NAME:LINE`, or `NAME` for a source that has no lines."""
        return self.name if line is None else f"{self.name}:{line}"

    def entry(self, key: Key, node: Node, section: str = "") -> Entry:
        """Return a key of the file, or of one of its sections, with its value."""
        subject = f"{section}.{key.name}" if section else key.name
        return Entry(key.name, node.plain(), self.where(key.line), f"{subject}{self.at(key.line)}", node.text)

    def unknown_key_problem(self, key: Key, hint: str, section: str = "") -> str:
        """Return the message for a key that the file, or one of its sections, does not have."""
        inside = f" in {section!r}" if section else ""
        return f"unknown key {key.name!r}{inside}{self.at(key.line)}{hint}"


def document_from_mapping(content: Mapping[str, Any], name: str) -> Document:
    """Read a Python mapping as a document without lines."""
    return Document(name, _node(content, name, 0))


def _node(value: Any, name: str, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{name} is nested deeper than {MAX_DEPTH} levels; expected a configuration of few levels")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"key {key!r} in {name} is not a string; keys are the names of options")
        return Node({Key(str(key)): _node(item, name, depth + 1) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return Node([_node(item, name, depth + 1) for item in value])
    return Node(value)
