"""Finding and parsing one configuration: a path, a packaged name, JSON text, or a mapping."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from accel_trainer.config.document import Document, document_from_mapping
from accel_trainer.errors import ConfigError, did_you_mean

ConfigSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"

MAX_BYTES = 1_000_000
"""Size that a configuration file may have."""

_PACKAGED_FOLDER = Path(__file__).resolve().parents[1] / "fsdp_configs"
_SUFFIXES = (".yaml", ".yml", ".json")


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
    """Find and parse a configuration, any source that `read_file` takes; FileProblemsError where it cannot be read."""
    name = "the config dict"
    try:
        if isinstance(source, Mapping):
            return document_from_mapping(source, name)
        from accel_trainer.config import yaml_reader  # 10 ms, which only a run with text or a file pays

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


def whole_document(source: ConfigSource) -> Document:
    """Return a document in which nothing is wrong, a key given twice for one; else a FileProblemsError."""
    document = load_document(source)
    if document.problems:
        raise FileProblemsError(list(document.problems), document.name)
    return document


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
