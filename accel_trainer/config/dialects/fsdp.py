"""Hugging Face's spellings of FSDP options: a flat `fsdp_config`, accelerate's `fsdp_config:`, `FSDP_*` variables.

All three name the same things, with or without a `fsdp_` prefix and with the values of FSDP1 or FSDP2. FSDP2 is what
runs here: keys of FSDP1 are accepted, mapped where FSDP2 has the thing, and named in one note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_trainer.config.layer import Layer
from accel_trainer.config.readers.document import Document, Key, Node
from accel_trainer.config.validation import show
from accel_trainer.errors import ConfigError, did_you_mean

__all__ = [
    "DIRECT",
    "NAMED",
    "SHARDING_STRATEGIES",
    "Entry",
    "fsdp_options",
    "is_known_key",
    "is_neutral",
    "known_keys",
    "own_name_hint",
    "translate_entries",
    "translate_file",
]

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's strategies; their numbers in files and variables count from 1."""

_POLICIES = {
    "TRANSFORMER_BASED_WRAP": "transformer", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none",
    "TRANSFORMER": "transformer", "SIZE": "size", "NONE": "none",
}  # fmt: skip
_STATE_DICTS = {
    "FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded", "FULL": "full", "SHARDED": "sharded",
    "1": "full", "3": "sharded",
}  # fmt: skip
_PREFETCHES = {
    "BACKWARD_PRE": True,
    "1": True,
    "BACKWARD_POST": True,
    "2": True,
    "NO_PREFETCH": False,
    "3": False,
}

DIRECT = {
    "offload_params": "fsdp.offload_params",
    "cpu_offload": "fsdp.offload_params",
    "transformer_layer_cls_to_wrap": "fsdp.wrap_classes",
    "transformer_cls_to_wrap": "fsdp.wrap_classes",
    "transformer_cls_names_to_wrap": "fsdp.wrap_classes",
    "activation_checkpointing": "fsdp.activation_checkpointing",
    "cpu_ram_efficient_loading": "fsdp.cpu_ram_efficient_loading",
    "ignored_modules": "fsdp.ignored_modules",
    "forward_prefetch": "fsdp.forward_prefetch",
    "min_num_params": "fsdp.min_num_params",
}
"""Keys whose values are taken as they are, with the option that each one is here."""
NAMED: dict[str, tuple[str, Mapping[str, str | bool]]] = {
    "auto_wrap_policy": ("fsdp.wrap_policy", _POLICIES),
    "state_dict_type": ("fsdp.state_dict_type", _STATE_DICTS),
    "backward_prefetch": ("fsdp.backward_prefetch", _PREFETCHES),
    "backward_prefetch_policy": ("fsdp.backward_prefetch", _PREFETCHES),
}
_SHARDING = ("sharding_strategy", "reshard_after_forward")
_MAPPED_FSDP1 = ("sharding_strategy", "backward_prefetch", "backward_prefetch_policy", "forward_prefetch")
WITHOUT_EFFECT = ("use_orig_params", "sync_module_states", "limit_all_gathers")
_NOT_OFFERED = {
    "activation_checkpointing_offload": "activations are kept on the device or computed again; remove the key",
    "mixed_precision_policy": "set mixed_precision at the top level",
    "state_dict_config": "checkpoints are always written from CPU memory; remove the key",
    "optim_state_dict_config": "checkpoints are always written from CPU memory; remove the key",
    "param_init_fn": "a function cannot be named in a file; remove the key",
    "xla": "there is no XLA strategy; remove the xla keys",
    "xla_fsdp_v2": "there is no XLA strategy; remove the xla keys",
    "xla_fsdp_settings": "there is no XLA strategy; remove the xla keys",
    "xla_fsdp_grad_ckpt": "there is no XLA strategy; use activation_checkpointing",
}
_KNOWN = ("version", *_SHARDING, *DIRECT, *NAMED, *WITHOUT_EFFECT, *_NOT_OFFERED)


@dataclass(frozen=True, slots=True)
class Entry:
    """One FSDP option as found: `name` is the key as written, `subject` how a message names it."""

    name: str
    value: Any
    where: str
    subject: str
    text: str | None = None

    @property
    def key(self) -> str:
        """The name without case and `fsdp_` prefix."""
        return _bare(self.name)


def _bare(name: str) -> str:
    lowered = name.lower()
    return lowered.removeprefix("fsdp_") if lowered.removeprefix("fsdp_") in _KNOWN else lowered


def known_keys() -> tuple[str, ...]:
    """Return every key, without prefix."""
    return _KNOWN


def is_known_key(name: str) -> bool:
    """Tell whether a key, with or without `fsdp_`, names an FSDP option."""
    return _bare(name) in _KNOWN


def is_neutral(value: Any) -> bool:
    """Tell whether a value asks for nothing: null, false, 'no', empty, or a container of such values only."""
    if isinstance(value, Mapping):
        return all(is_neutral(item) for item in value.values())
    if isinstance(value, list | tuple):
        return not value
    if isinstance(value, str):
        return value.strip().lower() in ("", "no", "false", "none", "null")
    return value is None or value is False


def own_name_hint(name: str) -> str:
    """Return a hint for a Hugging Face key that stands in our own `fsdp` section, or an empty string."""
    key = _bare(name)
    path = DIRECT.get(key) or (NAMED[key][0] if key in NAMED else None)
    if key in _SHARDING:
        path = "fsdp.reshard_after_forward"
    return f"; here it is called {path.removeprefix('fsdp.')!r}" if path else ""


def translate_file(document: Document, content: Mapping[Key, Node], layer: Layer) -> None:
    """Read a flat `fsdp_config`: it asks for FSDP by being there."""
    entries = entries_of(document, content, layer, section=None)
    translate_entries(entries, layer, source_name=document.name, default_version=2)
    if "strategy" not in layer.settings:
        layer.put("strategy", "fsdp2", where=document.where(document.root.line), subject=document.name)


def entries_of(document: Document, content: Mapping[Key, Node], layer: Layer, section: str | None) -> list[Entry]:
    """Return the FSDP entries of a mapping; unknown keys become problems of the layer."""
    entries = []
    inside = f" in {section!r}" if section else ""
    prefix = f"{section}." if section else ""
    for key, node in content.items():
        if is_known_key(key.name):
            subject = f"{prefix}{key.name}{document.at(key.line)}"
            entries.append(Entry(key.name, node.plain(), document.where(key.line), subject, node.text))
        else:
            layer.problems.append(f"unknown key {key.name!r}{inside}{document.at(key.line)}{_nearest(key.name)}")
    return entries


def _nearest(name: str) -> str:
    prefixed = name.lower().startswith("fsdp_")
    return did_you_mean(name, [f"fsdp_{key}" for key in _KNOWN] if prefixed else _KNOWN)


def translate_entries(entries: Iterable[Entry], layer: Layer, *, source_name: str, default_version: int) -> None:
    """Put FSDP options into the layer.

    Args:
        entries: known keys only.
        layer: where settings, problems and notes go.
        source_name: what the note calls the source of the entries.
        default_version: the FSDP version a source means that does not say one; 1 for accelerate, 2 for transformers.
    """
    by_key: dict[str, Entry] = {}
    for entry in entries:
        if entry.value is None or entry.value == "":
            continue
        previous = by_key.get(entry.key)
        if previous is not None and previous.value != entry.value:
            layer.problems.append(
                f"{entry.subject} contradicts {previous.subject}: they give {show(entry.value)} and "
                f"{show(previous.value)}; keep one of the two"
            )
        by_key[entry.key] = entry
    for key, entry in by_key.items():
        if key in _NOT_OFFERED:
            if not is_neutral(entry.value):
                layer.problems.append(
                    f"{entry.subject} is {show(entry.value)}, which is not offered: {_NOT_OFFERED[key]}"
                )
        elif key in NAMED:
            _put_named(entry, layer)
        elif key in DIRECT:
            _put_direct(entry, layer, by_key)
    version = _version(by_key.get("version"), layer, default_version)
    _put_sharding(by_key.get("sharding_strategy"), by_key.get("reshard_after_forward"), layer, version)
    _put_note(by_key, layer, source_name, version)


def _put(entry: Entry, layer: Layer, path: str, value: Any) -> None:
    layer.put(path, value, where=entry.where, subject=entry.subject, text=entry.text)


def _put_direct(entry: Entry, layer: Layer, by_key: Mapping[str, Entry]) -> None:
    policy = by_key.get("auto_wrap_policy")
    by_size = policy is not None and _POLICIES.get(str(policy.value).upper()) == "size"
    # transformers writes 0 for "no bound"; only size-based wrapping needs one.
    if entry.key == "min_num_params" and str(entry.value) == "0" and not by_size:
        return
    _put(entry, layer, DIRECT[entry.key], entry.value)


def _put_named(entry: Entry, layer: Layer) -> None:
    path, values = NAMED[entry.key]
    word = str(entry.value).strip().upper()
    if word in values:
        _put(entry, layer, path, values[word])
    elif word in ("LOCAL_STATE_DICT", "2") and entry.key == "state_dict_type":
        layer.problems.append(
            f"{entry.subject} is {show(entry.value)}, which FSDP2 does not have; use SHARDED_STATE_DICT"
        )
    elif not (isinstance(entry.value, bool) and entry.key == "backward_prefetch"):
        names = [name for name in values if len(name) > 1 and ("_" in name)]
        layer.problems.append(
            f"{entry.subject} is {show(entry.value)}; expected one of {', '.join(names)}{did_you_mean(word, names)}"
        )
    else:
        _put(entry, layer, path, entry.value)


def _version(entry: Entry | None, layer: Layer, default: int) -> int:
    if entry is None:
        return default
    if str(entry.value).strip() in ("1", "2"):
        return int(entry.value)
    layer.problems.append(
        f"{entry.subject} is {show(entry.value)}; expected 2 (FSDP2), or 1 to have a file for FSDP1 mapped"
    )
    return default


def _strategy_name(value: Any) -> str | None:
    """Return FSDP1's name of a sharding strategy given as name or number, or None."""
    word = str(value).strip().upper().removeprefix("SHARDINGSTRATEGY.").lstrip("_")
    if word.isdigit() and 1 <= int(word) <= len(SHARDING_STRATEGIES) and not isinstance(value, bool):
        return SHARDING_STRATEGIES[int(word) - 1]
    return word if word in SHARDING_STRATEGIES else None


def _put_sharding(strategy: Entry | None, reshard: Entry | None, layer: Layer, version: int) -> None:
    """Map the two ways to say how parameters are sharded; a strategy's name under either key is honoured."""
    if strategy is not None:
        _put_strategy(strategy, layer)
    if reshard is None:
        return
    if not isinstance(reshard.value, bool) and _strategy_name(reshard.value) is not None:
        _put_strategy(reshard, layer)
    else:
        _put(reshard, layer, "fsdp.reshard_after_forward", reshard.value)


def _put_strategy(entry: Entry, layer: Layer) -> None:
    name = _strategy_name(entry.value)
    if name is None:
        word = str(entry.value).upper()
        layer.problems.append(
            f"{entry.subject} is {show(entry.value)}; expected one of {', '.join(SHARDING_STRATEGIES)}, or 1 to 5"
            f"{did_you_mean(word, SHARDING_STRATEGIES)}"
        )
    elif name == "NO_SHARD":
        _put(entry, layer, "strategy", "ddp")
        layer.notes.append(
            f"{entry.subject} is {show(entry.value)}: every rank keeps the whole model, so strategy 'ddp' is used"
        )
    else:
        _put(entry, layer, "fsdp.reshard_after_forward", name in ("FULL_SHARD", "HYBRID_SHARD"))
        if name.startswith("HYBRID"):
            _put(entry, layer, "fsdp.replicate_per_node", True)


def _put_note(by_key: Mapping[str, Entry], layer: Layer, source_name: str, version: int) -> None:
    mapped = [entry.name for key, entry in by_key.items() if key in _MAPPED_FSDP1]
    unused = [entry.name for key, entry in by_key.items() if key in WITHOUT_EFFECT]
    if version == 2 and not mapped and not unused:
        return
    if version == 1:
        said = "fsdp_version is 1" if "version" in by_key else "no fsdp_version, which means 1"
        parts = [f"{source_name} is written for FSDP1 ({said}); it runs with FSDP2"]
    else:
        parts = [f"{source_name} holds keys of FSDP1; it runs with FSDP2"]
    if mapped:
        parts.append(f"mapped: {', '.join(mapped)}")
    if unused:
        parts.append(f"without effect: {', '.join(unused)}")
    layer.notes.append("; ".join(parts))


def fsdp_options(options: str | Iterable[str]) -> dict[str, Any]:
    """Return what the `fsdp=` argument of Hugging Face's TrainingArguments says, by dotted path.

    Args:
        options: `"full_shard offload auto_wrap"`, or a list of such words.

    Raises:
        ConfigError: a word is not an option.
    """
    words = options.replace(",", " ").split() if isinstance(options, str) else [str(word) for word in options]
    settings: dict[str, Any] = {"strategy": "fsdp2"}
    for word in words:
        name = _strategy_name(word)
        if name == "NO_SHARD":
            settings["strategy"] = "ddp"
        elif name is not None and not word.isdigit():
            settings["fsdp.reshard_after_forward"] = name in ("FULL_SHARD", "HYBRID_SHARD")
            if name.startswith("HYBRID"):
                settings["fsdp.replicate_per_node"] = True
        elif word.lower() == "offload":
            settings["fsdp.offload_params"] = True
        elif word.lower() != "auto_wrap":
            known = [*(strategy.lower() for strategy in SHARDING_STRATEGIES), "offload", "auto_wrap"]
            hint = did_you_mean(word.lower(), known) or "."
            raise ConfigError(f"fsdp option {word!r} is not known{hint} Options: {', '.join(known)}")
    return settings
