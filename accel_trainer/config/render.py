"""A configuration as our own kind of file, so that what was resolved can be written, read back and compared."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from accel_trainer.config.readers.yaml_reader import dump_yaml
from accel_trainer.config.schema import RunConfig, field_specs, get_value

__all__ = ["to_file_dict", "to_yaml"]


def to_file_dict(config: RunConfig, *, full: bool = False) -> dict[str, Any]:
    """Return the configuration as nested dicts of plain values that `read_file` takes.

    Args:
        config: any configuration.
        full: write defaults too; options whose value is None have nothing to write and are left out.
    """
    content: dict[str, Any] = {}
    for path, spec in field_specs().items():
        value = get_value(config, path)
        if value is None or (not full and value == spec.default):
            continue
        section, _, name = path.rpartition(".")
        (content.setdefault(section, {}) if section else content)[name] = _plain(value)
    return content


def to_yaml(config: RunConfig, *, full: bool = False) -> str:
    """Return `to_file_dict` as YAML text; `read_file` gives the same configuration back."""
    return dump_yaml(to_file_dict(config, full=full))


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
