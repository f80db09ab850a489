"""The spellings a configuration may have.

Our own sections, a whole accelerate file, a flat `fsdp_config`, or a DeepSpeed configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from accel_trainer.config.deepspeed.keys import KNOWN_KEYS
from accel_trainer.config.deepspeed.levels import put_block, put_document_block
from accel_trainer.config.dialects import accelerate as accelerate_dialect
from accel_trainer.config.dialects import fsdp as fsdp_dialect
from accel_trainer.config.layer import Layer, SourceKind
from accel_trainer.config.readers.document import Document, Key, Node
from accel_trainer.config.schema import field_specs, section_names
from accel_trainer.config.validation import show
from accel_trainer.errors import did_you_mean

__all__ = ["Dialect", "detect_dialect", "read_document"]


class Dialect(StrEnum):
    """How a configuration is spelled."""

    OWN = "accel_trainer"
    ACCELERATE = "accelerate"
    FSDP_CONFIG = "fsdp_config"
    DEEPSPEED = "deepspeed"


OWN_ALIASES = {"gradient_accumulation_steps": "accumulation.num_steps"}
"""Top-level keys of our own files that stand for a nested option."""


def _own_keys() -> tuple[str, ...]:
    return (*dict.fromkeys(path.partition(".")[0] for path in field_specs()), *OWN_ALIASES)


def detect_dialect(keys: Iterable[str]) -> tuple[Dialect, str | None]:
    """Return the dialect of a file with these top-level keys, and the key that decided it (None: nothing did)."""
    names = list(keys)
    shared = {"mixed_precision", "use_cpu", "debug", "gradient_accumulation_steps"}
    own_keys = set(_own_keys()) - shared
    foreign_keys = accelerate_dialect.known_keys() - shared
    # DeepSpeed has sections of the same names as some keys of the others.
    engine_keys = KNOWN_KEYS.keys() - set(fsdp_dialect.known_keys()) - own_keys - foreign_keys - shared
    for dialect, known in (
        (Dialect.ACCELERATE, accelerate_dialect.MARKER_KEYS),
        (Dialect.OWN, own_keys - KNOWN_KEYS.keys()),
        (Dialect.DEEPSPEED, engine_keys),
        (Dialect.OWN, own_keys),
        (Dialect.ACCELERATE, foreign_keys),
    ):
        deciding = next((name for name in names if name in known), None)
        if deciding is not None:
            return dialect, deciding
    deciding = next((name for name in names if fsdp_dialect.is_known_key(name) or name.startswith("fsdp_")), None)
    return (Dialect.FSDP_CONFIG, deciding) if deciding is not None else (Dialect.OWN, None)


def read_document(document: Document) -> tuple[Dialect, Layer]:
    """Translate a document into settings; everything wrong with it is in the layer's problems."""
    content = document.root.value
    layer = Layer(SourceKind.FILE)
    layer.problems.extend(document.problems)
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds {show(document.root.plain())}"
        layer.problems.append(f"{document.name} {found}; expected a mapping of options")
        return Dialect.OWN, layer
    dialect, deciding = detect_dialect(key.name for key in content)
    if dialect is Dialect.ACCELERATE:
        layer.lenient = True
        accelerate_dialect.translate(document, content, layer)
    elif dialect is Dialect.DEEPSPEED:
        where = document.where(document.root.line)
        put_block(layer, document.path or document.root.plain(), where=where, subject=document.name)
        layer.put("strategy", "deepspeed", where=where, subject=document.name)
    elif dialect is Dialect.FSDP_CONFIG:
        layer.lenient = True
        fsdp_dialect.translate_file(document, content, layer)
    else:
        _translate_own(document, content, layer, decided=deciding is not None)
    return dialect, layer


def _translate_own(document: Document, content: dict[Key, Node], layer: Layer, *, decided: bool) -> None:
    specs = field_specs()
    for key, node in content.items():
        if key.name in section_names():
            _translate_section(document, key, node, layer)
        elif key.name == "deepspeed":
            put_document_block(document, key, node, layer)
        elif key.name in specs or key.name in OWN_ALIASES:
            value = node.plain() if isinstance(node.value, dict | list) else node.value
            layer.put(
                OWN_ALIASES.get(key.name, key.name),
                value,
                where=document.where(key.line),
                subject=f"{key.name}{document.at(key.line)}",
                text=node.text,
            )
        else:
            known = (
                _own_keys() if decided else (*_own_keys(), *accelerate_dialect.known_keys(), *fsdp_dialect.known_keys())
            )
            layer.problems.append(f"unknown key {key.name!r}{document.at(key.line)}{_nested_hint(key.name, known)}")


def _nested_hint(name: str, known: Iterable[str]) -> str:
    """Name the section of a key that was written one level too high, else the nearest key."""
    paths = [path for path in field_specs() if path.endswith(f".{name}")]
    if paths:
        return f"; it belongs into the section {paths[0].partition('.')[0]!r}"
    return did_you_mean(name, known)


def _translate_section(document: Document, section: Key, node: Node, layer: Layer) -> None:
    prefix = f"{section.name}."
    names = [path.removeprefix(prefix) for path in field_specs() if path.startswith(prefix)]
    if node.value is None:
        return
    if not isinstance(node.value, dict):
        layer.problems.append(
            f"{section.name}{document.at(section.line)} is {show(node.plain())}; expected a section with the keys "
            f"{', '.join(names)}"
        )
        return
    for key, item in node.value.items():
        if key.name not in names:
            hint = did_you_mean(key.name, names)
            if section.name == "fsdp":
                hint = fsdp_dialect.own_name_hint(key.name) or hint
            layer.problems.append(f"unknown key {key.name!r} in {section.name!r}{document.at(key.line)}{hint}")
            continue
        layer.put(
            prefix + key.name,
            item.plain(),
            where=document.where(key.line),
            subject=f"{prefix}{key.name}{document.at(key.line)}",
            text=item.text,
        )
