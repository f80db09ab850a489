"""Hugging Face's spellings of FSDP options: a flat `fsdp_config`, accelerate's `fsdp_config:`, `FSDP_*` variables.

All three name the same options, with or without a `fsdp_` prefix and with the values of FSDP1 or FSDP2. Runs use
FSDP2: keys of FSDP1 are accepted, mapped where FSDP2 has the option, and named in one note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accel_trainer.config.document import Document, Entry, Key, Node
from accel_trainer.config.layer import Layer
from accel_trainer.config.schema import FSDPConfig, thaw
from accel_trainer.config.validation import show
from accel_trainer.errors import ConfigError, did_you_mean

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
_PREFETCHES = {"BACKWARD_PRE": True, "1": True, "BACKWARD_POST": True, "2": True, "NO_PREFETCH": False, "3": False}

DIRECT = {
    "offload_params": "fsdp.offload_params",
    "cpu_offload": "fsdp.offload_params",
    "transformer_layer_cls_to_wrap": "fsdp.wrap_classes",
    "transformer_cls_to_wrap": "fsdp.wrap_classes",
    "transformer_cls_names_to_wrap": "fsdp.wrap_classes",
    "activation_checkpointing": "fsdp.activation_checkpointing",
    "activation_checkpointing_offload": "activation_offload",
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
_WRITTEN = (
    "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "offload_params", "activation_checkpointing",
    "cpu_ram_efficient_loading", "state_dict_type", "ignored_modules",
)  # fmt: skip
"""Keys that files for FSDP2 have, each in the spelling of accelerate."""
WITHOUT_EFFECT = ("use_orig_params", "sync_module_states", "limit_all_gathers")
"""Keys of FSDP1 that FSDP2 has no choice of."""
_NOT_OFFERED = {
    "mixed_precision_policy": "set mixed_precision at the top level",
    **dict.fromkeys(
        ("state_dict_config", "optim_state_dict_config"),
        "checkpoints are always written from CPU memory; remove the key",
    ),
    "param_init_fn": "a function cannot be named in a file; remove the key",
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_settings"), "there is no XLA strategy; remove the xla keys"),
    "xla_fsdp_grad_ckpt": "there is no XLA strategy; use activation_checkpointing",
}
KNOWN_KEYS = ("version", *_SHARDING, *DIRECT, *NAMED, *WITHOUT_EFFECT, *_NOT_OFFERED)
"""Every key, without prefix."""


def _bare(name: str) -> str:
    lowered = name.lower()
    return lowered.removeprefix("fsdp_") if lowered.removeprefix("fsdp_") in KNOWN_KEYS else lowered


def is_known_key(name: str) -> bool:
    """Return whether a key, with or without `fsdp_`, names an FSDP option."""
    return _bare(name) in KNOWN_KEYS


def is_neutral(value: Any) -> bool:
    """Return whether a value asks for nothing: null, false, 'no', empty, or a container of such values only."""
    if isinstance(value, Mapping):
        return all(is_neutral(item) for item in value.values())
    if isinstance(value, list | tuple):
        return not value
    if isinstance(value, str):
        return value.strip().lower() in ("", "no", "false", "none", "null")
    return value is None or value is False


def own_name_hint(name: str) -> str:
    """Return a hint for a Hugging Face key that stands in our own `fsdp` section, or an empty string."""
    named = {key: path for key, (path, _) in NAMED.items()}
    path = (DIRECT | named | dict.fromkeys(_SHARDING, "fsdp.reshard_after_forward")).get(_bare(name))
    if path is None:
        return ""
    name = path.removeprefix("fsdp.")
    return f"; here it is called {name!r}{', outside of the section' * (name == path)}"


def translate_file(document: Document, content: Mapping[Key, Node], layer: Layer) -> None:
    """Put a flat `fsdp_config` into the layer; the file by itself selects FSDP."""
    translate_entries(entries_of(document, content, layer), layer, source_name=document.name, default_version=2)
    if "strategy" not in layer.settings:
        layer.put("strategy", Entry("strategy", "fsdp2", document.where(document.root.line), document.name))


def entries_of(document: Document, content: Mapping[Key, Node], layer: Layer, section: str = "") -> list[Entry]:
    """Return the FSDP entries of a mapping; unknown keys become problems of the layer."""
    unknown = [key for key in content if not is_known_key(key.name)]
    for key in unknown:
        prefix = "fsdp_" if key.name.lower().startswith("fsdp_") else ""
        hint = did_you_mean(key.name, [f"{prefix}{known}" for known in KNOWN_KEYS])
        layer.problems.append(document.unknown_key_problem(key, hint, section))
    return [document.entry(key, node, section) for key, node in content.items() if key not in unknown]


def translate_entries(entries: Iterable[Entry], layer: Layer, *, source_name: str, default_version: int) -> None:
    """Put FSDP options with known keys into the layer, by `default_version` where none is said: 1 is accelerate's."""
    by_key = _by_key(entries, layer)
    for key, entry in by_key.items():
        if key in _NOT_OFFERED:
            if not is_neutral(entry.value):
                layer.refuse(entry, _NOT_OFFERED[key])
        elif key in NAMED:
            _put_named(key, entry, layer)
        elif key in DIRECT and not (key == "min_num_params" and _is_unbounded(by_key)):
            layer.put(DIRECT[key], entry)
    version = _version(by_key.get("version"), layer, default_version)
    for key in _SHARDING:
        if key in by_key:
            _put_sharding(key, by_key[key], layer)
    _put_note(by_key, layer, source_name, version)


def _by_key(entries: Iterable[Entry], layer: Layer) -> dict[str, Entry]:
    """Return the entries that are set, by key; two spellings of one key may not contradict each other."""
    by_key: dict[str, Entry] = {}
    for entry in entries:
        if entry.value is None or entry.value == "":
            continue
        previous = by_key.get(_bare(entry.name))
        if previous is not None and previous.value != entry.value:
            layer.problems.append(
                f"{entry.subject} contradicts {previous.subject}: they give {show(entry.value)} and "
                f"{show(previous.value)}; keep one of the two"
            )
        by_key[_bare(entry.name)] = entry
    return by_key


def _is_unbounded(by_key: Mapping[str, Entry]) -> bool:
    """Return whether `min_num_params` is transformers' 0 for "no bound", which only wrapping by size needs."""
    policy = by_key.get("auto_wrap_policy")
    by_size = policy is not None and _POLICIES.get(str(policy.value).upper()) == "size"
    return str(by_key["min_num_params"].value) == "0" and not by_size


def _put_named(key: str, entry: Entry, layer: Layer) -> None:
    path, values = NAMED[key]
    word = str(entry.value).strip().upper()
    if word in values:
        layer.put(path, entry, values[word])
    elif word in ("LOCAL_STATE_DICT", "2") and key == "state_dict_type":
        layer.problems.append(
            f"{entry.subject} is {show(entry.value)}, which FSDP2 does not have; use SHARDED_STATE_DICT"
        )
    elif isinstance(entry.value, bool) and key == "backward_prefetch":
        layer.put(path, entry)
    else:
        names = [name for name in values if "_" in name]
        layer.wrong(entry, f"one of {', '.join(names)}", did_you_mean(word, names))


def _version(entry: Entry | None, layer: Layer, default: int) -> int:
    if entry is None:
        return default
    if str(entry.value).strip() in ("1", "2"):
        layer.fsdp1 = entry.subject if str(entry.value).strip() == "1" else ""
        return int(entry.value)
    layer.wrong(entry, "2 (FSDP2), or 1 to have a file for FSDP1 mapped")
    return default


def strategy_name(value: Any) -> str | None:
    """Return FSDP1's name of a sharding strategy given as name or number, or None."""
    word = str(value).strip().upper().removeprefix("SHARDINGSTRATEGY.").lstrip("_")
    if word.isdigit() and 1 <= int(word) <= len(SHARDING_STRATEGIES) and not isinstance(value, bool):
        return SHARDING_STRATEGIES[int(word) - 1]
    return word if word in SHARDING_STRATEGIES else None


def _put_sharding(key: str, entry: Entry, layer: Layer) -> None:
    """Map one of the two keys for sharded parameters; a strategy's name is honoured under either."""
    name = strategy_name(entry.value)
    if key == "reshard_after_forward" and (isinstance(entry.value, bool) or name is None):
        layer.put("fsdp.reshard_after_forward", entry)
    elif name is None:
        hint = did_you_mean(str(entry.value).upper(), SHARDING_STRATEGIES)
        layer.wrong(entry, f"one of {', '.join(SHARDING_STRATEGIES)}, or 1 to 5", hint)
    elif name == "NO_SHARD":
        layer.put("strategy", entry, "ddp")
        layer.notes.append(
            f"{entry.subject} is {show(entry.value)}: every rank keeps the whole model, so strategy 'ddp' is used"
        )
    else:
        for path, value in _sharding_options(name).items():
            layer.put(path, entry, value)


def _sharding_options(name: str) -> dict[str, Any]:
    """Return the options of FSDP2, by dotted path, that one of FSDP1's strategies stands for."""
    return {
        "fsdp.reshard_after_forward": name in ("FULL_SHARD", "HYBRID_SHARD"),
        "fsdp.replicate_per_node": name.startswith("HYBRID"),
    }


def _put_note(by_key: Mapping[str, Entry], layer: Layer, source_name: str, version: int) -> None:
    mapped = [entry.name for key, entry in by_key.items() if key in _MAPPED_FSDP1]
    unused = [entry.name for key, entry in by_key.items() if key in WITHOUT_EFFECT]
    if version == 2 and not mapped and not unused:
        return
    if version == 1:
        reason = "fsdp_version is 1" if "version" in by_key else "no fsdp_version, which means 1"
        parts = [f"{source_name} is written for FSDP1 ({reason}); it runs with FSDP2"]
    else:
        parts = [f"{source_name} holds keys of FSDP1; it runs with FSDP2"]
    if mapped:
        parts.append(f"mapped: {', '.join(mapped)}")
    if unused:
        parts.append(f"without effect: {', '.join(unused)}")
    layer.notes.append("; ".join(parts))


def fsdp_keys(config: FSDPConfig) -> dict[str, Any]:
    """Return the keys of FSDP2, without prefix, for options that are not at their default."""
    keys: dict[str, Any] = {"version": 2, "reshard_after_forward": config.reshard_after_forward}
    for key in _WRITTEN:
        path, words = NAMED.get(key, (DIRECT.get(key, ""), {}))
        name = path.removeprefix("fsdp.")
        value = getattr(config, name)
        if value != getattr(FSDPConfig(), name):
            keys[key] = next((word for word, meant in words.items() if meant == value), thaw(value))
    if "transformer_layer_cls_to_wrap" in keys:
        keys["transformer_layer_cls_to_wrap"] = ",".join(config.wrap_classes)
    return keys


def fsdp_options(options: str | Iterable[str]) -> dict[str, Any]:
    """Return the options of transformers' `fsdp=` (`"full_shard offload auto_wrap"`, or a list) by dotted path.

    Raises:
        ConfigError: a word is not an option.
    """
    words = options.replace(",", " ").split() if isinstance(options, str) else [str(word) for word in options]
    settings: dict[str, Any] = {"strategy": "fsdp2"}
    for word in words:
        name = strategy_name(word)
        if name == "NO_SHARD":
            settings["strategy"] = "ddp"
        elif name is not None and not word.isdigit():
            settings |= _sharding_options(name)
        elif word.lower() == "offload":
            settings["fsdp.offload_params"] = True
        elif word.lower() != "auto_wrap":
            known = [*(strategy.lower() for strategy in SHARDING_STRATEGIES), "offload", "auto_wrap"]
            hint = did_you_mean(word.lower(), known) or "."
            raise ConfigError(f"fsdp option {word!r} is not known{hint} Options: {', '.join(known)}")
    return settings
