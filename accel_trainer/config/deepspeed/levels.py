"""The DeepSpeed block among the levels of precedence, and the options of the run that it speaks about too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_trainer.config.deepspeed.block import (
    CONFIG_FILE,
    FIELDS,
    LAUNCH_FIELDS,
    SHARED_KEYS,
    block_of,
    get_value,
    is_whole,
    located,
    merge_blocks,
    read_block,
    set_value,
)
from accel_trainer.config.deepspeed.keys import KNOWN_KEYS
from accel_trainer.config.layer import Layer, Setting, Source, SourceKind
from accel_trainer.config.readers.config_source import FileProblemsError
from accel_trainer.config.readers.document import Document, Key, Node
from accel_trainer.config.schema import FrozenDict, MixedPrecision
from accel_trainer.config.validation import show
from accel_trainer.errors import ConfigError, did_you_mean

__all__ = ["agree", "block_sources", "check_fields", "merge_settings", "put_block", "put_document_block", "put_key"]

_NAMES = (CONFIG_FILE, *FIELDS, *LAUNCH_FIELDS, *SHARED_KEYS)
_STRENGTH = tuple(SourceKind)


def put_block(
    layer: Layer,
    value: Any,
    *,
    where: str,
    subject: str,
    parts: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> None:
    """Put a block into a layer: a mapping, or text that names a file, a packaged configuration, or holds JSON.

    Args:
        layer: gets the setting, or the problem.
        value: as the source gave it; None means "not set".
        where: the source, for `Source.where`.
        subject: how a message names the block.
        parts: where single keys of a mapping came from.
        folder: what a path in the block is relative to, besides the working directory.
    """
    if isinstance(value, str) and value.strip() or isinstance(value, Path):
        try:
            value = block_of(located(value, folder) if isinstance(value, str) else value)
        except ConfigError as error:
            layer.problems.append(f"{subject}: {error}")
            return
    if isinstance(value, Mapping):
        file = value.get(CONFIG_FILE)
        if isinstance(file, str):
            value = {**value, CONFIG_FILE: located(file, folder)}
    layer.put("deepspeed", value, where=where, subject=subject)
    setting = layer.settings.get("deepspeed")
    if parts and setting is not None:
        sources = {name: Source(layer.kind, place) for name, place in parts.items()}
        layer.settings["deepspeed"] = Setting("deepspeed", setting.value, setting.source, FrozenDict(sources))


def put_document_block(document: Document, key: Key, node: Node, layer: Layer) -> None:
    """Put a block of a file into a layer, with the lines of its keys."""
    content = node.value if isinstance(node.value, dict) else {}
    put_block(
        layer,
        node.plain(),
        where=document.where(key.line),
        subject=f"{key.name}{document.at(key.line)}",
        parts={item.name: document.where(item.line) for item in content},
        folder=document.folder,
    )


def check_fields(document: Document, section: str, content: Mapping[Key, Node], layer: Layer) -> None:
    """Refuse keys of accelerate's block that neither accelerate nor DeepSpeed has."""
    for key in content:
        if key.name not in _NAMES and key.name not in KNOWN_KEYS:
            hint = did_you_mean(key.name, (*_NAMES, *KNOWN_KEYS))
            layer.problems.append(f"unknown key {key.name!r} in {section!r}{document.at(key.line)}{hint}")


def block_sources(setting: Setting) -> dict[str, Source]:
    """Return where each key of a block came from."""
    return {**dict.fromkeys(setting.value, setting.source), **setting.parts}


def merge_settings(below: Setting, above: Setting) -> Setting:
    """Return the block of two levels; see `merge_blocks`.

    Raises:
        ConfigError: the lower one has to be read for that, and it cannot be.
    """
    value = FrozenDict(merge_blocks(below.value, above.value))
    upper = block_sources(above)
    upper |= {FIELDS[name]: source for name, source in upper.items() if name in FIELDS}
    source = above.source
    if not is_whole(above.value):
        source = Source(source.kind, f"{source.where}, {below.source.where}")
    return Setting("deepspeed", value, source, FrozenDict({**_lower_sources(below, value), **upper}))


def _lower_sources(below: Setting, value: Mapping[str, Any]) -> dict[str, Source]:
    """Return where what a lower block says came from, with the lines of its file once that has been read."""
    known = block_sources(below)
    if CONFIG_FILE in below.value and CONFIG_FILE not in value:
        lines = read_block(below.value).origins
        known |= {path: Source(below.source.kind, place) for path, place in lines.items()}
    return {name: source for name, source in known.items() if name in value or "." in name}


def put_key(below: Setting | None, path: str, above: Setting) -> Setting:
    """Return the block of the lower levels with one key of it set, by its dotted path.

    Raises:
        FileProblemsError: the lower block has to be read for that, and it cannot be.
    """
    content = FrozenDict({path: above.value})
    if path in _NAMES:
        single = Setting("deepspeed", content, above.source)
        return single if below is None else merge_settings(below, single)
    block = read_block(below.value if below is not None else {})
    set_value(block.data, path, above.value)
    value = FrozenDict({**block.launch, **block.data})
    if below is None:
        return Setting("deepspeed", value, above.source, FrozenDict({path: above.source}))
    source = Source(above.source.kind, f"{above.source.where}, {below.source.where}")
    return Setting("deepspeed", value, source, FrozenDict({**_lower_sources(below, value), path: above.source}))


def agree(settings: dict[str, Setting], problems: list[str]) -> None:
    """Give accumulation and precision the values that the block fixes, or say what contradicts them.

    The block of a stronger level wins; an option of the same or of a stronger level than the block's has to be the
    same, since DeepSpeed goes by its own configuration.
    """
    setting = settings.get("deepspeed", Setting("deepspeed", FrozenDict(), Source(SourceKind.DEFAULT, "default")))
    places = {name: source.where for name, source in block_sources(setting).items()}
    try:
        block = read_block(setting.value, places=places)
    except FileProblemsError as error:
        problems.extend(error.problems)
        return
    fixed: dict[str, tuple[str, Any]] = {}
    steps = block.data.get("gradient_accumulation_steps")
    if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1:
        fixed["accumulation.num_steps"] = ("gradient_accumulation_steps", steps)
    enabled = [kind for kind in ("bf16", "fp16") if get_value(block.data, f"{kind}.enabled") is True]
    if len(enabled) == 1:
        fixed["mixed_precision"] = (f"{enabled[0]}.enabled", MixedPrecision(enabled[0]))
    for path, (key, value) in fixed.items():
        source = Source(setting.source.kind, block.origins.get(key, setting.source.where))
        known = settings.get(path)
        if known is None or known.value != value and _is_weaker(known.source, known.value, source):
            settings[path] = Setting(path, value, source)
        elif known.value != value:
            problems.append(
                f"{path} is {show(known.value)} (from {known.source.where}), and {key} of the DeepSpeed configuration "
                f"(from {source.where}) makes it {show(value)}: DeepSpeed would go by {show(value)}; give both the "
                'same value, or write "auto" there'
            )


def _is_weaker(source: Source, value: Any, than: Source) -> bool:
    # Its launcher sets this variable whether or not anyone chose a precision.
    is_unasked = source.where == "ACCELERATE_MIXED_PRECISION" and value == "no"
    return is_unasked or _STRENGTH.index(source.kind) < _STRENGTH.index(than.kind)
