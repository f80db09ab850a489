"""`fsdp` and `fsdp_config` of TrainingArguments: every spelling in, one configuration and one plain dict out."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Container, Iterable, Mapping
from typing import Any

from transformers import TrainingArguments

from accel_trainer import logging
from accel_trainer.config import Dialect, Resolved, SourceKind, WrapPolicy, fsdp_options, read_file, resolve
from accel_trainer.config.files import FileConfig
from accel_trainer.config.schema import set_key, thaw
from accel_trainer.errors import ConfigError

logger = logging.get_logger(__name__)

FSDPConfigSource = str | os.PathLike[str] | Mapping[str, Any] | None

# Keys that upstream keeps in `args.fsdp_config` for its TPU path; its Trainer looks them up whatever the device.
_XLA_SWITCHES = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")

_OTHER_OPTIONS = "accel_trainer"
"""Key of `args.fsdp_config` with what a file says of other things than FSDP, in our own sections."""
_UPSTREAM_WRAP_POLICY = {
    WrapPolicy.TRANSFORMER: "TRANSFORMER_BASED_WRAP",
    WrapPolicy.SIZE: "SIZE_BASED_WRAP",
    WrapPolicy.NONE: "NO_WRAP",
}


def resolve_arguments(
    explicit: Mapping[str, Any],
    *,
    fsdp: bool | str | Iterable[Any] | None,
    fsdp_config: FSDPConfigSource,
    environ: Mapping[str, str],
    argument_names: Mapping[str, str],
) -> Resolved:
    """Resolve the configuration of a run from arguments, `fsdp_config`, the environment and the defaults.

    Args:
        explicit: options given in Python, by dotted path.
        fsdp: true, or options such as `"full_shard auto_wrap"`, which fill in what `fsdp_config` does not say.
        fsdp_config: a YAML or JSON path, JSON text, a packaged name or a dict; read only when `fsdp` is on.
        argument_names: the argument that gives an option, by dotted path, for messages, where `fsdp` does not.
    """
    if fsdp_config and not fsdp:
        logger.warning("fsdp_config is not read because fsdp is not set; pass fsdp=True to shard the model")
    asked = _options_of(fsdp) if fsdp else {}
    file = _read(fsdp_config) if fsdp else None
    if file is not None and _keeps_whole_models(file):
        asked["strategy"] = "ddp"
    said = () if file is None else file.settings.keys() - {"strategy"}
    return resolve(
        explicit={path: value for path, value in asked.items() if path not in said} | dict(explicit),
        environ=environ,
        file=file,
        explicit_name="TrainingArguments",
        explicit_keywords={**argument_names, **dict.fromkeys(asked, "fsdp")},
    )


def _keeps_whole_models(file: FileConfig) -> bool:
    """Whether options of FSDP are NO_SHARD: every rank has the whole model, which is DDP."""
    strategy = file.settings.get("strategy")
    is_of_fsdp = file.dialect is Dialect.FSDP_CONFIG or file.content.get("distributed_type") == "FSDP"
    return is_of_fsdp and strategy is not None and strategy.value == "ddp"


def _options_of(fsdp: bool | str | Iterable[Any]) -> dict[str, Any]:
    if isinstance(fsdp, bool) or (isinstance(fsdp, str) and fsdp.lower() == "true"):
        return {"strategy": "fsdp2"}
    return fsdp_options(fsdp if isinstance(fsdp, str) else [getattr(word, "value", word) for word in fsdp])


def _read(fsdp_config: Any) -> FileConfig | None:
    """Read a configuration in any form, the dict that `fill_fsdp_fields` makes too; None where none is given."""
    if not fsdp_config:
        return None
    if isinstance(fsdp_config, str) and fsdp_config.lstrip().startswith("{"):
        try:
            fsdp_config = json.loads(fsdp_config)
        except json.JSONDecodeError as error:
            raise ConfigError(f"fsdp_config is not valid JSON: {error}; pass a dict, a path, or JSON text") from error
    if not isinstance(fsdp_config, Mapping) or _OTHER_OPTIONS not in fsdp_config:
        return read_file(fsdp_config)
    flat = dict(fsdp_config)
    others = read_file(flat.pop(_OTHER_OPTIONS))
    options = read_file(flat)
    return dataclasses.replace(options, settings={**others.settings, **options.settings})


def loads_after_sharding(resolved: Resolved) -> bool:
    """Whether a model that is given by its path is built without values, and each rank loads those of its shards."""
    config = resolved.config
    return config.strategy == "fsdp2" and config.fsdp.cpu_ram_efficient_loading


def forms_group_later(args: TrainingArguments) -> bool:
    """Whether one process will have a group of its own; upstream refuses FSDP where nothing is distributed."""
    return bool(args.fsdp)


def recomputes_activations(args: TrainingArguments) -> bool:
    """Whether activations are recomputed in the backward; transformers 5.17 has only the older name for it."""
    return bool(getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None))


def check_recomputation(args: TrainingArguments, resolved: Resolved) -> None:
    """Raise ConfigError where both the model's own method and our policy would recompute activations."""
    if recomputes_activations(args) and resolved.config.recomputation != "off":
        path = resolved.config.recomputation_path
        kept = "the one in fsdp_config" if path.startswith("fsdp.") else "the policy"
        raise ConfigError(
            f"activation_checkpointing=True (or gradient_checkpointing=True) is set in the arguments, and "
            f"{resolved.describe(path)}: both would recompute the same layers; keep {kept}"
        )


def fill_fsdp_fields(args: TrainingArguments, resolved: Resolved, *, in_fields: Container[str]) -> None:
    """Put the resolved options where upstream's Trainer looks for them; there is no accelerate plugin to build.

    With them goes what else a file set, but for options that have other fields: arguments that are rebuilt from
    `to_dict()` or by `dataclasses.replace` come out the same.

    Args:
        in_fields: dotted paths of options whose values are in fields of their own.
    """
    if not args.fsdp:
        return
    fsdp = resolved.config.fsdp
    content: dict[str, Any] = {
        "version": 2,
        "reshard_after_forward": fsdp.reshard_after_forward,
        "auto_wrap_policy": _UPSTREAM_WRAP_POLICY[fsdp.wrap_policy],
        "min_num_params": fsdp.min_num_params if fsdp.wrap_policy is WrapPolicy.SIZE else 0,
        "cpu_offload": fsdp.offload_params,
        "activation_checkpointing": fsdp.activation_checkpointing,
        "cpu_ram_efficient_loading": fsdp.cpu_ram_efficient_loading,
        "state_dict_type": f"{fsdp.state_dict_type.name}_STATE_DICT",
        "forward_prefetch": fsdp.forward_prefetch,
        **dict.fromkeys(_XLA_SWITCHES, False),
    }
    if fsdp.replicate_per_node:
        content["reshard_after_forward"] = "HYBRID_SHARD" if fsdp.reshard_after_forward else "HYBRID_SHARD_ZERO2"
    if fsdp.wrap_classes:
        content["transformer_layer_cls_to_wrap"] = list(fsdp.wrap_classes)
    if fsdp.ignored_modules:
        content["ignored_modules"] = list(fsdp.ignored_modules)
    flat = read_file(content).settings
    others: dict[str, Any] = {}
    for path, value, source in resolved.explain():
        if source.kind is SourceKind.FILE and path not in flat and path not in in_fields:
            set_key(others, path, thaw(value))
    if others:
        content[_OTHER_OPTIONS] = others
    args.fsdp_config = content
    # NO_SHARD resolves to plain data parallel, and upstream takes a true `fsdp` for a sharded model.
    args.fsdp = resolved.config.strategy != "ddp"
