"""The DeepSpeed block of a configuration, in every spelling: DeepSpeed's own sections, accelerate's fields, or both.

A configuration keeps the block as it was written, merged over the levels of precedence; `read_block` makes it one
DeepSpeed configuration.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from accel_trainer.config.config_source import FileProblemsError, load_document, packaged_names, whole_document
from accel_trainer.config.deepspeed_keys import KNOWN_KEYS, join
from accel_trainer.config.document import Document, Entry, Key, Node
from accel_trainer.config.layer import Layer, Setting, Source, SourceKind
from accel_trainer.config.schema import FrozenDict, MixedPrecision, get_key, set_key, thaw
from accel_trainer.config.validation import show
from accel_trainer.errors import ConfigError

BlockSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"

CONFIG_FILE = "deepspeed_config_file"
ZERO3_INIT = "zero3_init_flag"
KEY_PREFIX = "deepspeed."
"""Beginning of the path of a single key of the block: `deepspeed.zero_optimization.stage`."""

FIELDS: Mapping[str, str] = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    ZERO3_INIT: ZERO3_INIT,
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "deepspeed_moe_layer_cls_names": "zero_optimization.leaf_module.classes",
}
"""Accelerate's fields and the key of DeepSpeed's that each stands for; `zero3_init_flag` is not DeepSpeed's own."""

LAUNCH_FIELDS = (
    "deepspeed_hostfile",
    "deepspeed_inclusion_filter",
    "deepspeed_exclusion_filter",
    "deepspeed_multinode_launcher",
)
"""Accelerate's fields that only starting processes needs."""

SHARED_KEYS = ("gradient_accumulation_steps", "gradient_clipping")
"""Keys that accelerate's fields and DeepSpeed's own have in common."""

ACCELERATE_FIELDS = (CONFIG_FILE, *FIELDS, *LAUNCH_FIELDS, *SHARED_KEYS)
"""Every key of accelerate's `deepspeed_config` block."""

_NESTED_IN = ("deepspeed_config", "deepspeed")
"""The keys that hold the block in the configuration file of a run: accelerate's, and our own."""
_OF_RUNS = (*_NESTED_IN, "strategy", "mixed_precision", "accumulation", "gradient_accumulation_steps", "launch")
"""Keys of a run's file that its block is read with, or that only starting processes needs."""
_SWITCH = ("true or false", {"true": True, "false": False})
_DEVICE = ("one of 'none', 'cpu', 'nvme'", {"none": "none", "cpu": "cpu", "nvme": "nvme"})
_CHOICES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "zero_stage": ("0, 1, 2 or 3", {"0": 0, "1": 1, "2": 2, "3": 3}),
    "offload_optimizer_device": _DEVICE,
    "offload_param_device": _DEVICE,
    ZERO3_INIT: _SWITCH,
    "zero3_save_16bit_model": _SWITCH,
}
"""Fields with few values: the values in words, and each by its spelling."""
_MAX_FILES = 4
_DEFAULT_STAGE = 2
"""As accelerate has it, where fields give no stage."""


@dataclass(frozen=True, slots=True)
class EngineBlock:
    """A block that was read: one DeepSpeed configuration."""

    data: dict[str, Any]
    """A DeepSpeed configuration, "auto" included; `zero3_init_flag` stands in it where it was given."""
    origins: dict[str, str] = field(default_factory=dict)
    """Line of a file, by dotted path of the value."""
    launch: dict[str, Any] = field(default_factory=dict)
    """The fields that starting processes needs."""
    notes: list[str] = field(default_factory=list)
    """Remarks on files that say more than a block does."""


def accelerate_fields(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block as accelerate's `deepspeed_config` has it: the fields, and no sections of DeepSpeed's own."""
    if block.keys() <= set(ACCELERATE_FIELDS):
        return dict(block)
    read = read_block(block)
    fields = {name: get_key(read.data, path) for name, path in FIELDS.items()}
    fields |= {name: read.data.get(name) for name in SHARED_KEYS} | read.launch
    return {name: value for name, value in fields.items() if value is not None}


def block_of(source: BlockSource) -> dict[str, Any]:
    """Return the block of `deepspeed=`: a mapping, JSON, base64 of JSON, a path (not read), or a packaged name."""
    if isinstance(source, Mapping):
        return thaw(source)
    if isinstance(source, str):
        text = source if source.lstrip().startswith("{") else _decoded(source)
        if text is not None:
            return whole_document(text).root.plain()
    return {CONFIG_FILE: str(load_document(source).path)}


def _decoded(text: str) -> str | None:
    """Return the JSON object that base64 text holds; None for a path or a name."""
    if not re.fullmatch(r"[\w+/-]{4,}=*", text) or text in packaged_names() or os.path.exists(text):
        return None
    try:
        decoded = base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True).decode()
        return decoded if isinstance(json.loads(decoded), dict) else None
    except (binascii.Error, ValueError):
        return None


def is_complete(block: Mapping[str, Any]) -> bool:
    """Return whether a block describes DeepSpeed by itself, instead of giving single fields."""
    has_keys = any(name not in ACCELERATE_FIELDS and value is not None for name, value in block.items())
    return has_keys or named_file(block) is not None


def named_file(block: Mapping[str, Any]) -> Any:
    """Return the file that a block names; None where it names none, in any of the ways to write that."""
    file = block.get(CONFIG_FILE)
    return None if file is None or str(file).strip().lower() in ("", "none") else file


def merge_blocks(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return one block of two levels of precedence: single fields win one by one, a complete one replaces the lower."""
    if is_complete(above):
        return {**{name: value for name, value in below.items() if name in LAUNCH_FIELDS}, **above}
    if not is_complete(below) or above.keys() <= set(LAUNCH_FIELDS):
        return {**below, **above}
    lower, upper = read_block(below), read_block({**above, "zero_stage": above.get("zero_stage", _DEFAULT_STAGE)})
    for path, value in leaves(upper.data, known_only=True):
        if path != FIELDS["zero_stage"] or "zero_stage" in above:
            set_key(lower.data, path, value)
    for name in above:
        # Given at this level, "none" takes back an offload of the lower one.
        if name.endswith("_device") and str(above[name]).strip().lower() == "none":
            set_key(lower.data, FIELDS[name], "none")
    return {**lower.launch, **lower.data, **upper.launch}


def read_block(block: Mapping[str, Any], *, origins: Mapping[str, str] | None = None) -> EngineBlock:
    """Return a block as one DeepSpeed configuration; the file that it names is read.

    A field fills keys that the file leaves out or leaves to "auto", and contradicts any other value. Fields alone mean
    stage 2, as in accelerate. `origins` of keys are for messages.
    """
    origins = origins or {}
    reader = _Reader(origins)
    result = reader.read(block)
    for path in list(_paths(result.data, "")):
        named = [name for name in origins if path in (name, FIELDS.get(name)) or path.startswith(f"{name}.")]
        if named:
            nearest = max(named, key=lambda name: len(FIELDS.get(name, name)))
            result.origins.setdefault(path, origins[nearest])
    if reader.problems:
        raise FileProblemsError(reader.problems, "the DeepSpeed block")
    return result


class _Reader:
    def __init__(self, origins: Mapping[str, str]) -> None:
        self.origins = origins
        self.folder: Path | None = None  # of the file that is read; else the working directory
        self.problems: list[str] = []
        self.num_files = 0

    def read(self, block: Mapping[str, Any]) -> EngineBlock:
        """Read a block that may name a file."""
        file = named_file(block)
        result = self.file(file) if file is not None else EngineBlock({})
        for name, value in block.items():
            if name in LAUNCH_FIELDS:
                if value is not None:
                    result.launch[name] = value
            elif name in FIELDS:
                self.field(name, value, result)
            elif name != CONFIG_FILE and not (name in SHARED_KEYS and value is None):
                self.own(name, thaw(value), result)
        if not is_complete(block):
            result.data.setdefault("zero_optimization", {}).setdefault("stage", _DEFAULT_STAGE)
        return result

    def file(self, source: Any) -> EngineBlock:
        """Read a file: a DeepSpeed configuration, or that of a run with a DeepSpeed block in it."""
        self.num_files += 1
        if self.num_files > _MAX_FILES:
            self.problems.append(f"{CONFIG_FILE} {source!r} names a file that names another, {_MAX_FILES} times over")
            return EngineBlock({})
        if isinstance(source, str):
            source = located(source, self.folder)
        try:
            document = load_document(source)
        except FileProblemsError as error:
            self.problems.extend(error.problems)
            return EngineBlock({})
        self.problems.extend(document.problems)
        content = document.root.plain()
        if not isinstance(content, dict):
            self.problems.append(
                f"{document.name} holds {show(content)}; expected the keys of a DeepSpeed configuration"
            )
            return EngineBlock({})
        nested = next((content[key] for key in _NESTED_IN if isinstance(content.get(key), str | Mapping)), None)
        if nested is not None:
            self.folder = document.folder
            result = self.read(nested) if isinstance(nested, Mapping) else self.file(nested)
            self.options(document, result)
            return result
        origins = {path: document.where(line) for path, line in _lines(document.root, "") if line is not None}
        return EngineBlock(content, origins)

    def options(self, document: Document, result: EngineBlock) -> None:
        """Put the precision and the accumulation of a run's file beside its block, and note its other keys."""
        content, lines = document.root.plain(), dict(_lines(document.root, ""))
        precision = content.get("mixed_precision")
        fixed = [("mixed_precision", f"{precision}.enabled", precision in ("bf16", "fp16") or None)]
        for path in ("accumulation.num_steps", "gradient_accumulation_steps"):
            fixed.append((path, "gradient_accumulation_steps", get_key(content, path)))
        for path, key, value in fixed:
            if value is not None:
                where = document.where(lines[path])
                self.put(f"{key}, by {path} at {where},", key, value, result)
                result.origins.setdefault(key, where)
        # accelerate's files have a key for each question of its questionnaire.
        is_own = "distributed_type" not in content
        left_out = [key for key, value in content.items() if key not in _OF_RUNS and (is_own or type(value) is dict)]
        if precision == "fp8":
            left_out.append("mixed_precision")
        if left_out:
            result.notes.append(
                f"{document.name} is named as the DeepSpeed configuration, and not used for {', '.join(left_out)}"
            )

    def field(self, name: str, value: Any, result: EngineBlock) -> None:
        """Put one of accelerate's fields where DeepSpeed has it."""
        if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
            return
        path = FIELDS[name]
        try:
            checked = "auto" if value == "auto" else _field_value(name, value)
        except ValueError as error:
            self.problems.append(f"{name}{self.at(name)} is {show(value)}; expected {error}")
            return
        self.put(name, path, checked, result)

    def own(self, name: str, value: Any, result: EngineBlock) -> None:
        """Put a key of DeepSpeed's own beside those of a file."""
        if isinstance(value, dict) and value:
            for path, leaf in list(leaves(value, name, known_only=True)):
                self.put(path, path, leaf, result)
        else:
            self.put(name, name, value, result)

    def put(self, name: str, path: str, value: Any, result: EngineBlock) -> None:
        known = get_key(result.data, path)
        if known is None or known == "auto":
            set_key(result.data, path, value)
            result.origins.pop(path, None)
        elif value not in (known, "auto", None):
            where = f" ({result.origins[path]})" if path in result.origins else ""
            self.problems.append(
                f"{name}{self.at(name)} is {show(value)}, and {path}{where} is {show(known)}: DeepSpeed would go by "
                f"{show(known)}; keep one of the two"
            )

    def at(self, name: str) -> str:
        """Return the origin of a key of the block in brackets, if it is known."""
        return f" ({self.origins[name]})" if name in self.origins else ""


def located(file: str, folder: Path | None) -> str:
    """Return the path of a file that lies in `folder`; else the name as it is."""
    try:
        beside = (folder or Path()) / os.path.expanduser(file)
        return os.path.abspath(beside) if beside.is_file() else file
    except (OSError, ValueError):  # JSON text, which is no name of a file
        return file


def _field_value(name: str, value: Any) -> Any:
    """Return a field as DeepSpeed wants it; the message of a ValueError completes "expected ..."."""
    word = str(value).strip()
    if name in _CHOICES:
        expected, choices = _CHOICES[name]
        if word.lower() not in choices:
            raise ValueError(expected)
        return choices[word.lower()]
    if name == "deepspeed_moe_layer_cls_names":
        names = word.split(",") if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(item, str) for item in names):
            raise ValueError("names of classes, separated by commas")
        return [item.strip() for item in names if item.strip()]
    if not isinstance(value, str | os.PathLike):
        raise ValueError("a directory")
    return str(os.fspath(value))


def leaves(content: Mapping[str, Any], section: str = "", *, known_only: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of nested mappings; with `known_only`, only sections of DeepSpeed are entered."""
    for name, value in content.items():
        path = join(section, name)
        is_section = isinstance(value, Mapping) and bool(value)
        if is_section and (not known_only or isinstance(get_key(KNOWN_KEYS, path), Mapping)):
            yield from leaves(value, path, known_only=known_only)
        else:
            yield path, value


def _paths(content: Mapping[str, Any], section: str) -> Iterator[str]:
    for name, value in content.items():
        yield join(section, name)
        if isinstance(value, Mapping):
            yield from _paths(value, join(section, name))


def _lines(node: Node, section: str) -> Iterator[tuple[str, int | None]]:
    if isinstance(node.value, dict):
        for key, item in node.value.items():
            yield join(section, key.name), key.line
            yield from _lines(item, join(section, key.name))


def put_block(
    layer: Layer, entry: Entry, *, origins: Mapping[str, str] | None = None, folder: Path | None = None
) -> None:
    """Put a block into a layer: a mapping, or text: a file (also in `folder`), a packaged name, or JSON."""
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
    origins = {path: document.where(line) for path, line in _lines(node, "")}
    put_block(layer, document.entry(key, node), origins=origins, folder=document.folder)


def block_sources(setting: Setting) -> dict[str, Source]:
    """Return the source of each key of a block."""
    return {**dict.fromkeys(setting.value, setting.source), **setting.key_sources}


def _merge_settings(below: Setting, above: Setting) -> Setting:
    value = FrozenDict(merge_blocks(below.value, above.value))
    upper = block_sources(above)
    upper |= {FIELDS[name]: source for name, source in upper.items() if name in FIELDS}
    if is_complete(above.value):
        kept = {name: source for name, source in block_sources(below).items() if name in LAUNCH_FIELDS}
        return Setting(value, above.source, FrozenDict({**kept, **upper}))
    source = Source(above.source.kind, f"{above.source.where}, {below.source.where}")
    return Setting(value, source, FrozenDict({**_lower_sources(below, value), **upper}))


def _lower_sources(below: Setting, value: Mapping[str, Any]) -> dict[str, Source]:
    """Return the sources of the keys of a lower block, with the lines of its file once that has been read."""
    known = block_sources(below)
    if CONFIG_FILE in below.value and CONFIG_FILE not in value:
        lines, kind = read_block(below.value).origins, known[CONFIG_FILE].kind
        known |= {path: Source(kind, line) for path, line in lines.items()}
    return {name: source for name, source in known.items() if name in value or "." in name}


def merge_levels(settings: dict[str, Setting], layers: Iterable[Layer], problems: list[str]) -> None:
    """Put the block of all levels, weakest first, and the options that it fixes into `settings`; keys beat blocks."""
    block: Setting | None = None
    for layer in layers:
        above = layer.settings.get("deepspeed")
        layer.notes += _notes_on(above)
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


def _notes_on(setting: Setting | None) -> list[str]:
    """Return the remarks on the file that a block names, before it is merged, which names none then."""
    file = None if setting is None else named_file(setting.value)
    return [] if file is None else _Reader({}).file(file).notes


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
    lower = {name: at for name, at in _lower_sources(below, value).items() if not name.startswith(f"{path}.")}
    return Setting(value, source, FrozenDict({**lower, path: above.source}))


def _fix_options(settings: dict[str, Setting], block: Setting, problems: list[str]) -> None:
    """Give accumulation and precision the block's values; those of weaker levels are replaced, others the same."""
    sources = block_sources(block)
    try:
        content = read_block(block.value, origins={name: at.where for name, at in sources.items()})
    except FileProblemsError as error:
        problems.extend(error.problems)
        return
    for path, key, value in _fixed_options(content.data):
        # Of the level that gave the key: another one may have given the rest of the block.
        named = next(
            (sources[name] for name in (key, key.partition(".")[0], CONFIG_FILE) if name in sources), block.source
        )
        source = Source(named.kind, content.origins.get(key, named.where))
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
