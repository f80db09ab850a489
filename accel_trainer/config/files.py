"""One configuration file, read and checked before it is merged with the other sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_trainer.config.dialects.own import Dialect, read_document
from accel_trainer.config.layer import Setting
from accel_trainer.config.readers.config_source import ConfigSource, FileProblemsError, load_document

__all__ = ["FileConfig", "read_file"]


@dataclass(frozen=True, slots=True)
class FileConfig:
    """A configuration that was read and checked, before it is merged with the other sources.

    Attributes:
        name: what messages call it: the path as given, `JSON text`, `the config dict`.
        path: the file, absolute; None for text and mappings.
        dialect: how it is spelled.
        settings: the options it sets, by dotted path.
        notes: remarks that a run should log once.
        content: what it holds, as plain Python values under the keys as written.
    """

    name: str
    path: Path | None
    dialect: Dialect
    settings: Mapping[str, Setting]
    notes: tuple[str, ...]
    content: Mapping[str, Any]


def read_file(source: ConfigSource) -> FileConfig:
    """Read one configuration and check everything in it.

    Args:
        source: the path of a YAML or JSON file (with or without suffix), the name of a packaged configuration, the
            text of a JSON object, or a mapping.

    Raises:
        FileProblemsError: a `ConfigError` with all problems of the file; also when it is missing or unreadable.
    """
    name, path, document = load_document(source)
    dialect, layer = read_document(document)
    if layer.problems:
        raise FileProblemsError(sorted(layer.problems, key=lambda problem: _line_of(problem, name)), name)
    return FileConfig(name, path, dialect, layer.settings, tuple(layer.notes), document.root.plain())


def _line_of(problem: str, name: str) -> int:
    """Return the first line that a message names, so that problems can be listed in the order of the file."""
    found = re.search(rf"{re.escape(name)}:(\d+)", problem)
    return int(found.group(1)) if found else 0
