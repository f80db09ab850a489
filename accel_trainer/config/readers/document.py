"""A parsed configuration before anyone interprets it: a tree of values that remember their line, and its sources.

A source is a path, a packaged name, JSON text, or a mapping.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from accel_trainer.errors import ConfigError, did_you_mean

ConfigSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"

MAX_BYTES = 1_000_000
"""Size that a configuration file may have."""

_PACKAGED_FOLDER = Path(__file__).resolve().parents[2] / "fsdp_configs"
_SUFFIXES = (".yaml", ".yml", ".json")

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
    """Read a Python mapping as a document without lines.

    Raises:
        ConfigError: a key is not a string, or the mapping is nested deeper than `MAX_DEPTH` (it may contain itself).
    """
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


class FileProblemsError(ConfigError):
    """A configuration file that cannot be used; `problems` has one line for each thing that is wrong."""

    def __init__(self, problems: list[str], name: str) -> None:
        super().__init__(problem_report(problems, name))
        self.problems = tuple(problems)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return (FileProblemsError, (list(self.problems), self.name))


def problem_report(problems: list[str], name: str) -> str:
    """Return the message of an error about one problem or several."""
    if len(problems) == 1:
        return problems[0]
    return "\n  - ".join([f"{len(problems)} problems in {name}:", *problems])


def packaged_names() -> tuple[str, ...]:
    """Return the names of the ready-made configurations, sorted."""
    return tuple(sorted(path.stem for path in _PACKAGED_FOLDER.iterdir() if path.suffix in _SUFFIXES))


def load_document(source: ConfigSource) -> Document:
    """Find and parse a configuration, any source that `read_file` takes.

    Raises:
        FileProblemsError: it is missing, unreadable, or not valid YAML or JSON.
    """
    name = "the config dict"
    try:
        if isinstance(source, Mapping):
            return document_from_mapping(source, name)
        from accel_trainer.config.readers import yaml_reader  # 10 ms, which only a run with text or a file pays

        if isinstance(source, str) and source.lstrip().startswith("{"):
            name = "the JSON text"
            return yaml_reader.read_json(source, name)
        name, path = _locate(source)
        text = _read_text(path)
        suffix = path.suffix.lower()
        is_json = suffix == ".json" or (suffix not in _SUFFIXES and text.lstrip().startswith("{"))
        read = yaml_reader.read_json if is_json else yaml_reader.read_yaml
        return dataclasses.replace(read(text, name), path=path)
    except ConfigError as error:
        raise FileProblemsError([str(error)], name) from None


def _locate(source: str | os.PathLike[str]) -> tuple[str, Path]:
    """Return the display name and the absolute path of a configuration; an existing file wins over a packaged name."""
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise ConfigError(
            f"a configuration is {source!r}, of type {type(source).__name__}; "
            "expected a path, a packaged name, JSON text or a mapping"
        )
    name = os.fspath(source)
    if "\n" in name:
        raise ConfigError(
            f"a configuration is text of several lines that starts with {name.splitlines()[0]!r}; "
            "expected a path, a packaged name, or the text of a JSON object: write YAML text to a file"
        )
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if _is_file(path):
        return name, path
    if Path(name).name == name and not path.suffix:
        for suffix in _SUFFIXES:
            packaged = _PACKAGED_FOLDER / f"{name}{suffix}"
            if packaged.is_file():
                return f"fsdp_configs/{packaged.name}", packaged
    if path.is_dir():
        raise ConfigError(f"config file {name!r} is a directory: {path}; give the file in it")
    raise ConfigError(_missing(name, path))


def _missing(name: str, path: Path) -> str:
    names = packaged_names()
    if Path(name).name == name and not path.suffix:
        hint = did_you_mean(name, names)
        return (
            f"config file {name!r} not found: there is no file {path} and no packaged configuration of that name"
            f"{hint or '.'} Packaged: {', '.join(names)}"
        )
    where = ""
    siblings: list[str] = []
    try:
        siblings = [item.name for item in path.parent.iterdir()]
    except FileNotFoundError:
        where = f"; the directory {path.parent} does not exist either"
    except OSError:
        pass  # the names would only have been a help
    return f"config file {name!r} not found: there is no file {path}{where}{did_you_mean(path.name, siblings)}"


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise ConfigError(_unreadable(path, error)) from None


def _unreadable(path: Path, error: OSError) -> str:
    return f"config file {path} cannot be read: {os.strerror(error.errno or errno.EIO)}"


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                f"config file {path} has {size} bytes; expected at most {MAX_BYTES}. Is it a configuration?"
            )
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(_unreadable(path, error)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config file {path} is not UTF-8 text: byte {error.start} does not decode; save it as UTF-8"
        ) from None
