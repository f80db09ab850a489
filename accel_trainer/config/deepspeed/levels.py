"""The DeepSpeed block among the levels of precedence, and the options of the run that it fixes, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accel_trainer.config.deepspeed.block import (
    ACCELERATE_FIELDS,
    CONFIG_FILE,
    FIELDS,
    block_of,
    is_complete,
    located,
    merge_blocks,
    read_block,
)
from accel_trainer.config.layer import Layer, Setting, Source, SourceKind
from accel_trainer.config.readers.config_source import FileProblemsError
from accel_trainer.config.readers.document import Document, Entry, Key, Node
from accel_trainer.config.schema import FrozenDict, MixedPrecision, get_key, set_key
from accel_trainer.config.validation import show
from accel_trainer.errors import ConfigError

KEY_PREFIX = "deepspeed."
"""Beginning of the path of a single key of the block: `deepspeed.zero_optimization.stage`."""


def put_block(
    layer: Layer, entry: Entry, *, origins: Mapping[str, str] | None = None, folder: Path | None = None
) -> None:
    """Put a block into a layer: a mapping, or text that names a file, a packaged configuration, or holds JSON.

    `origins` are those of single keys; paths may be relative to `folder`, besides the working directory.
    """
    value = entry.value
    if isinstance(value, str) and value.strip() or isinstance(value, Path):
        try:
            value = block_of(located(value, folder) if isinstance(value, str) else value)
        except ConfigError as error:
            layer.problems.append(f"{entry.subject}: {error}")
            return
    if isinstance(value, Mapping) and isinstance(file := value.get(CONFIG_FILE), str):
        value = {**value, CONFIG_FILE: located(file, folder)}
    layer.put("deepspeed", entry, value)
    setting = layer.settings.get("deepspeed")
    if origins and setting is not None:
        sources = {name: Source(layer.kind, origin) for name, origin in origins.items()}
        layer.settings["deepspeed"] = Setting(setting.value, setting.source, FrozenDict(sources))


def put_document_block(document: Document, key: Key, node: Node, layer: Layer) -> None:
    """Put a block of a file into a layer, with the lines of its keys."""
    content = node.value if isinstance(node.value, dict) else {}
    origins = {item.name: document.where(item.line) for item in content}
    put_block(layer, document.entry(key, node), origins=origins, folder=document.folder)


def block_sources(setting: Setting) -> dict[str, Source]:
    """Return the source of each key of a block."""
    return {**dict.fromkeys(setting.value, setting.source), **setting.key_sources}


def _merge_settings(below: Setting, above: Setting) -> Setting:
    """Return the block of two levels, which raises as `merge_blocks` does."""
    value = FrozenDict(merge_blocks(below.value, above.value))
    upper = block_sources(above)
    upper |= {FIELDS[name]: source for name, source in upper.items() if name in FIELDS}
    source = above.source
    if not is_complete(above.value):
        source = Source(source.kind, f"{source.where}, {below.source.where}")
    return Setting(value, source, FrozenDict({**_lower_sources(below, value), **upper}))


def _lower_sources(below: Setting, value: Mapping[str, Any]) -> dict[str, Source]:
    """Return the sources of the keys of a lower block, with the lines of its file once that has been read."""
    known = block_sources(below)
    if CONFIG_FILE in below.value and CONFIG_FILE not in value:
        lines = read_block(below.value).origins
        known |= {path: Source(below.source.kind, line) for path, line in lines.items()}
    return {name: source for name, source in known.items() if name in value or "." in name}


def merge_levels(settings: dict[str, Setting], layers: Iterable[Layer], problems: list[str]) -> None:
    """Put the block of all levels, weakest first, and the options that it fixes into `settings`.

    Within a level, single keys (`deepspeed.zero_optimization.stage`) win over the block as a mapping.
    """
    block: Setting | None = None
    for layer in layers:
        above = layer.settings.get("deepspeed")
        try:
            block = _merge_settings(block, above) if block is not None and above is not None else above or block
            for path, setting in layer.settings.items():
                if path.startswith(KEY_PREFIX):
                    block = _put_key(block, path.removeprefix(KEY_PREFIX), setting)
        except FileProblemsError as error:
            problems.extend(error.problems)
    if block is not None:
        settings["deepspeed"] = block
    if "strategy" in settings and settings["strategy"].value == "deepspeed":
        default = Setting(FrozenDict(), Source(SourceKind.DEFAULT, "default"))
        _fix_options(settings, block or default, problems)


def _put_key(below: Setting | None, path: str, above: Setting) -> Setting:
    """Return the block of the lower levels with one key of it set; FileProblemsError where they cannot be read."""
    if path in ACCELERATE_FIELDS:
        single = Setting(FrozenDict({path: above.value}), above.source)
        return single if below is None else _merge_settings(below, single)
    block = read_block(below.value if below is not None else {})
    set_key(block.data, path, above.value)
    value = FrozenDict({**block.launch, **block.data})
    if below is None:
        return Setting(value, above.source, FrozenDict({path: above.source}))
    source = Source(above.source.kind, f"{above.source.where}, {below.source.where}")
    return Setting(value, source, FrozenDict({**_lower_sources(below, value), path: above.source}))


def _fix_options(settings: dict[str, Setting], block: Setting, problems: list[str]) -> None:
    """Give accumulation and precision the values that the block fixes, since DeepSpeed goes by its own configuration.

    An option of a weaker level is replaced; any other has to be the same.
    """
    try:
        content = read_block(block.value, origins={name: at.where for name, at in block_sources(block).items()})
    except FileProblemsError as error:
        problems.extend(error.problems)
        return
    for path, key, value in _fixed_options(content.data):
        source = Source(block.source.kind, content.origins.get(key, block.source.where))
        known = settings.get(path)
        if known is None or known.value != value and _is_weaker(known, source):
            settings[path] = Setting(value, source)
        elif known.value != value:
            problems.append(
                f"{path} is {show(known.value)} (from {known.source.where}), and {key} of the DeepSpeed configuration "
                f"(from {source.where}) makes it {show(value)}: DeepSpeed would go by {show(value)}; give both the "
                'same value, or write "auto" there'
            )


def _fixed_options(data: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (option, key of the block, value) of the options that a DeepSpeed configuration fixes, too."""
    steps = data.get("gradient_accumulation_steps")
    if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1:
        yield "accumulation.num_steps", "gradient_accumulation_steps", steps
    enabled = [kind for kind in ("bf16", "fp16") if get_key(data, f"{kind}.enabled") is True]
    if len(enabled) == 1:
        yield "mixed_precision", f"{enabled[0]}.enabled", MixedPrecision(enabled[0])


def _is_weaker(known: Setting, source: Source) -> bool:
    # accelerate's launcher always sets this variable, to "no" without a choice (1.15, utils/launch.py).
    is_unasked = known.source.where == "ACCELERATE_MIXED_PRECISION" and known.value == "no"
    strengths = list(SourceKind)
    return is_unasked or strengths.index(known.source.kind) < strengths.index(source.kind)
