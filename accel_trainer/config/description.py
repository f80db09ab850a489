"""The configuration tree as others read it: a line for each option, a JSON schema, and YAML with comments."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from accel_trainer.config import schema
from accel_trainer.config.files import ALIASES
from accel_trainer.config.schema import LOW_ENDS, FieldSpec, RunConfig, field_specs, section_names, thaw

SCHEMA_FILE = Path(__file__).with_name("config.schema.json")
"""The packaged copy of `json_schema`, for editors."""
_MORE_FORMS = {"activation_checkpointing": ("object", "boolean")}  # {every: 2}, {ops: [...]}, and an unquoted off
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"}


@functools.cache
def documentation() -> Mapping[str, str]:
    """Return the line that stands under each field of the schema, by dotted path; empty without the source."""
    try:
        tree = ast.parse(inspect.getsource(schema))
    except OSError:
        return {}
    config = RunConfig()
    sections = {type(getattr(config, name)).__name__: f"{name}." for name in section_names()} | {"RunConfig": ""}
    return {
        f"{sections[node.name]}{item.target.id}": str(ast.literal_eval(following.value))
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in sections
        for item, following in itertools.pairwise(node.body)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(following, ast.Expr)
    }


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of our own configuration files, in YAML or JSON."""
    properties: dict[str, Any] = {
        name: {"type": "object", "additionalProperties": False, "properties": {}, "description": documentation()[name]}
        for name in section_names()
    }
    for path, spec in field_specs().items():
        section, _, name = path.rpartition(".")
        place = properties[section]["properties"] if section else properties
        place[name] = _property(spec)
        if path in LOW_ENDS:
            given = place[name]["type"]
            place[name]["type"] = [*([given] if isinstance(given, str) else given), "string"]
            place[name]["pattern"] = r"^\d+:\d+$"
    properties |= {name: _property(field_specs()[path]) for name, path in ALIASES.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of accel_trainer",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _property(spec: FieldSpec) -> dict[str, Any]:
    result: dict[str, Any] = {"description": documentation().get(spec.path, "")}
    kinds = typing.get_args(spec.annotation) if isinstance(spec.annotation, types.UnionType) else (spec.annotation,)
    words: list[str] = [*_MORE_FORMS.get(spec.path, ())]
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            result["enum"] = [str(member) for member in kind]
        elif kind is type(None):
            words.append("null")
        elif kind in _KINDS:
            words.append(_KINDS[kind])
        elif typing.get_origin(kind) is tuple:
            words += ["array", "string"]
            result["items"] = {"type": "string"}
        else:
            words += ["object", "string"]  # a block, or the name of a file
    if words:
        result["type"] = words[0] if len(words) == 1 else words
    if not isinstance(spec.default, Mapping):
        result["default"] = thaw(spec.default)
    return result


def commented_yaml(content: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Return a file of ours as YAML with the schema's line and comments; `comments` are on keys without a schema."""
    from accel_trainer.config.yaml_reader import dump_yaml  # a launch asks this module for texts alone

    head = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
    texts = {**documentation(), **(comments or {})}
    return head + "".join(f"{line}\n" for line in _commented(dump_yaml(content).splitlines(), texts))


def _commented(lines: list[str], texts: Mapping[str, str]) -> Iterator[str]:
    section = ""
    for line in lines:
        match = re.match(r"( *)(\w+):", line)
        indent = len(match[1]) if match else -1
        if match and indent == 0:
            section = match[2]
        name = match[2] if match else ""
        path = name if indent == 0 else f"{section}.{name}" if indent == 2 else ""
        text = texts.get(ALIASES.get(path, path), "")
        yield f"{line}  # {text}" if text and _is_whole(line) else line


def _is_whole(line: str) -> bool:
    """Return whether a line holds its value to the end: one with line breaks goes on in the next."""
    import yaml

    try:
        return isinstance(yaml.safe_load(line), dict)
    except yaml.YAMLError:
        return False
