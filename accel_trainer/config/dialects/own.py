"""Our own configuration files: the sections of `RunConfig`, under their names."""

from __future__ import annotations

from accel_trainer.config.deepspeed.levels import put_document_block
from accel_trainer.config.dialects import accelerate as accelerate_dialect
from accel_trainer.config.dialects import fsdp as fsdp_dialect
from accel_trainer.config.layer import Layer
from accel_trainer.config.readers.document import Document, Key, Node
from accel_trainer.config.schema import field_specs, section_names
from accel_trainer.errors import did_you_mean

__all__ = ["KNOWN_KEYS", "translate"]

_ALIASES = {"gradient_accumulation_steps": "accumulation.num_steps"}
"""Top-level keys that stand for a nested option."""
KNOWN_KEYS = (*dict.fromkeys(path.partition(".")[0] for path in field_specs()), *_ALIASES)
"""Every top-level key."""


def translate(document: Document, content: dict[Key, Node], layer: Layer, *, is_certain: bool) -> None:
    """Put a file of ours into the layer; without a certain dialect, a hint may name a key of the others."""
    for key, node in content.items():
        if key.name in section_names():
            _translate_section(document, key, node, layer)
        elif key.name == "deepspeed":
            put_document_block(document, key, node, layer)
        elif key.name in field_specs() or key.name in _ALIASES:
            layer.put(_ALIASES.get(key.name, key.name), document.entry(key, node))
        else:
            others = () if is_certain else (*accelerate_dialect.KNOWN_KEYS, *fsdp_dialect.KNOWN_KEYS)
            hint = _section_hint(key.name) or did_you_mean(key.name, (*KNOWN_KEYS, *others))
            layer.problems.append(document.unknown_key_problem(key, hint))


def _section_hint(name: str) -> str:
    """Name the section of a key that was written one level too high."""
    sections = (path.partition(".")[0] for path in field_specs() if path.endswith(f".{name}"))
    return next((f"; it belongs into the section {section!r}" for section in sections), "")


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
        else:
            renamed = fsdp_dialect.own_name_hint(key.name) if section.name == "fsdp" else ""
            hint = renamed or did_you_mean(key.name, names)
            layer.problems.append(document.unknown_key_problem(key, hint, section.name))
