"""Configuration files: read in any of their spellings and checked, and written in our own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from accel_trainer.config.config_source import ConfigSource, FileProblemsError, load_document
from accel_trainer.config.deepspeed_block import put_block, put_document_block
from accel_trainer.config.deepspeed_keys import KNOWN_KEYS
from accel_trainer.config.dialects import accelerate_file, fsdp
from accel_trainer.config.document import Document, Entry, Key, Node
from accel_trainer.config.layer import Layer, Setting, SourceKind
from accel_trainer.config.parallel import NOT_OFFERED
from accel_trainer.config.schema import COMPAT_DEFAULTS, RunConfig, field_specs, get_value, section_names, set_key, thaw
from accel_trainer.config.validation import BOOLEAN_WORDS, show
from accel_trainer.errors import did_you_mean


class Dialect(StrEnum):
    """The spelling of a configuration: our sections, accelerate's file, a flat `fsdp_config`, or DeepSpeed's own."""

    OWN = "accel_trainer"
    ACCELERATE = "accelerate"
    FSDP_CONFIG = "fsdp_config"
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True, slots=True)
class FileConfig:
    """A configuration that was read and checked, before it is merged with the other sources."""

    path: Path | None
    """The file, absolute; None for text and mappings."""
    dialect: Dialect
    settings: Mapping[str, Setting]
    """By dotted path of the option."""
    notes: tuple[str, ...]
    """Remarks that a run should log once."""
    content: Mapping[str, Any]
    """Plain Python values under the keys as written."""
    fsdp1: str = ""
    """As of a `Layer`."""


def read_file(source: ConfigSource) -> FileConfig:
    """Read one configuration and check everything in it.

    Args:
        source: the path of a YAML or JSON file (with or without suffix), the name of a packaged configuration, the
            text of a JSON object, or a mapping.

    Raises:
        FileProblemsError: a `ConfigError` with all problems of the file; also when it is missing or unreadable.
    """
    document = load_document(source)
    dialect, layer = _translate(document)
    if layer.problems:
        line = re.compile(rf"{re.escape(document.name)}:(\d+)")
        # In the order of the file: by the first line that each one names.
        problems = sorted(layer.problems, key=lambda text: int(found[1]) if (found := line.search(text)) else 0)
        raise FileProblemsError(problems, document.name)
    return FileConfig(document.path, dialect, layer.settings, tuple(layer.notes), document.root.plain(), layer.fsdp1)


def _translate(document: Document) -> tuple[Dialect, Layer]:
    content = document.root.value
    layer = Layer(SourceKind.FILE)
    layer.problems.extend(document.problems)
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds {show(document.root.plain())}"
        layer.problems.append(f"{document.name} {found}; expected a mapping of options")
        return Dialect.OWN, layer
    dialect, is_certain = _detect(content)
    # Both write numbers and booleans as text, too.
    layer.lenient = dialect in (Dialect.ACCELERATE, Dialect.FSDP_CONFIG)
    if dialect is Dialect.ACCELERATE:
        accelerate_file.translate(document, content, layer)
    elif dialect is Dialect.FSDP_CONFIG:
        fsdp.translate_file(document, content, layer)
    elif dialect is Dialect.DEEPSPEED:
        value = document.path or document.root.plain()
        entry = Entry(document.name, value, document.where(document.root.line), document.name)
        put_block(layer, entry)
        layer.put("strategy", entry, "deepspeed")
    else:
        _translate_own(document, content, layer, is_certain=is_certain)
    return dialect, layer


def _detect(content: Mapping[Key, Node]) -> tuple[Dialect, bool]:
    """Return the dialect of a file with these top-level keys, and whether any of them decided it."""
    names = {key.name for key in content}
    shared = {"mixed_precision", "use_cpu", "debug", "gradient_accumulation_steps", "dataset_mixture"}
    # A policy is ours; true or false is a key of fsdp_config, and "off" is both.
    words = {key.name: str(node.value).strip().lower() for key, node in content.items()}
    policy = words.get("activation_checkpointing")
    shared |= {"activation_checkpointing"} if policy in BOOLEAN_WORDS else set()
    own_keys = set(_OWN_KEYS) - shared
    accelerate_keys = accelerate_file.KNOWN_KEYS - shared
    # DeepSpeed has sections of the same names as some keys of the others.
    deepspeed_keys = KNOWN_KEYS.keys() - set(fsdp.KNOWN_KEYS) - own_keys - accelerate_keys - shared
    fsdp_keys = {name for name in names if fsdp.is_known_key(name) or name.startswith("fsdp_")}
    fsdp_keys -= {"activation_checkpointing"} if policy in ("off", "false") else set()
    for dialect, known in (
        (Dialect.ACCELERATE, accelerate_file.MARKER_KEYS),
        (Dialect.OWN, own_keys - KNOWN_KEYS.keys()),
        (Dialect.DEEPSPEED, deepspeed_keys),
        (Dialect.OWN, own_keys),
        (Dialect.ACCELERATE, accelerate_keys),
        (Dialect.FSDP_CONFIG, fsdp_keys),
    ):
        if names & known:
            return dialect, True
    return Dialect.OWN, False


def to_file_dict(config: RunConfig, *, full: bool = False) -> dict[str, Any]:
    """Return the configuration as nested dicts of plain values that `read_file` takes; `full` is with defaults."""
    content: dict[str, Any] = {}
    for path, spec in field_specs().items():
        value, default = get_value(config, path), COMPAT_DEFAULTS[config.compat].get(path, spec.default)
        if value is not None and (full or value != default):
            set_key(content, path, thaw(value))
    return content


def to_yaml(config: RunConfig, *, full: bool = False) -> str:
    """Return `to_file_dict` as YAML text; `read_file` gives the same configuration back."""
    from accel_trainer.config.yaml_reader import dump_yaml

    return dump_yaml(to_file_dict(config, full=full))


ALIASES = {"gradient_accumulation_steps": "accumulation.num_steps"}
"""Top-level keys that stand for a nested option."""
_OWN_KEYS = (*dict.fromkeys(path.partition(".")[0] for path in field_specs()), *ALIASES)
"""Every top-level key."""


def _translate_own(document: Document, content: dict[Key, Node], layer: Layer, *, is_certain: bool) -> None:
    """Put a file of ours into the layer; without a certain dialect, a hint may name a key of the others."""
    for key, node in content.items():
        if key.name in section_names():
            _translate_section(document, key, node, layer)
        elif key.name == "deepspeed":
            put_document_block(document, key, node, layer)
        elif key.name in field_specs() or key.name in ALIASES:
            layer.put(ALIASES.get(key.name, key.name), document.entry(key, node))
        else:
            others = () if is_certain else (*accelerate_file.KNOWN_KEYS, *fsdp.KNOWN_KEYS)
            sections = (path.partition(".")[0] for path in field_specs() if path.endswith(f".{key.name}"))
            one_level_off = next((f"; it belongs into the section {section!r}" for section in sections), "")
            hint = one_level_off or did_you_mean(key.name, (*_OWN_KEYS, *others))
            layer.problems.append(document.unknown_key_problem(key, hint))


def _translate_section(document: Document, section: Key, node: Node, layer: Layer) -> None:
    if node.value is None:
        return
    prefix = f"{section.name}."
    names = [path.removeprefix(prefix) for path in field_specs() if path.startswith(prefix)]
    if not isinstance(node.value, dict):
        layer.wrong(document.entry(section, node), f"a section with the keys {', '.join(names)}")
        return
    for key, item in node.value.items():
        if key.name in names:
            layer.put(prefix + key.name, document.entry(key, item, section.name))
        elif section.name == "parallel" and key.name in NOT_OFFERED:
            if item.value != 1:
                layer.refuse(document.entry(key, item, section.name), NOT_OFFERED[key.name])
        else:
            renamed = fsdp.own_name_hint(key.name) if section.name == "fsdp" else ""
            hint = renamed or did_you_mean(key.name, names)
            layer.problems.append(document.unknown_key_problem(key, hint, section.name))
