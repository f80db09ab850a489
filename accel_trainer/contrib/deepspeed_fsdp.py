"""Configurations of DeepSpeed as ones for FSDP2 and back, other spellings of one, and FSDP1's as FSDP2's.

These are `accel-trainer convert` and `to-fsdp2`; as `accel_trainer.commands.to_fsdp2` it is where programs look for
the second one as functions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_trainer import logging
from accel_trainer.config import Dialect, read_file, resolve, to_file_dict
from accel_trainer.config.deepspeed_block import leaves, read_block
from accel_trainer.config.dialects.fsdp import WITHOUT_EFFECT, fsdp_keys, strategy_name
from accel_trainer.config.schema import (
    FrozenDict,
    FSDPConfig,
    RunConfig,
    StateDictType,
    field_specs,
    get_key,
    get_value,
)
from accel_trainer.config.validation import show
from accel_trainer.config.yaml_reader import dump_yaml
from accel_trainer.errors import ConfigError
from accel_trainer.launch.cli import add_option, as_subcommand, command_parser
from accel_trainer.launch.config_file import ClusterConfig, write_config

logger = logging.get_logger(__name__)

_SUFFIXES = (".json", ".yaml", ".yml")

_STAGE = "zero_optimization.stage"
_DEVICES = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
_TAKEN = (_STAGE, *_DEVICES, "bf16.enabled", "fp16.enabled", "gradient_accumulation_steps")
_UNNEEDED = (
    # FSDP2 does these anyway, or its loader knows them by itself.
    "zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients", "zero_optimization.reduce_scatter",
    "zero_optimization.allgather_partitions", "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.leaf_module.classes", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory",
)  # fmt: skip
_INSTEAD = {
    "optimizer": "build the optimizer in the script",
    "scheduler": "build the scheduler in the script",
    "gradient_clipping": "call accelerator.clip_grad_norm_ before the step, or set max_grad_norm of TrainingArguments",
    "train_micro_batch_size_per_gpu": "it is the batch size of the data loader",
    "train_batch_size": "it follows from the loader's batch size, accumulation and the number of processes",
    "zero3_init_flag": "models are built whole, and then sharded",
}
_SHARDED = "fsdp2"
_STRATEGIES = (_SHARDED, "ddp")
_OPTION_INSTEAD = {
    "fsdp.activation_checkpointing": ": call model.gradient_checkpointing_enable()",
    **dict.fromkeys(
        ("fsdp.wrap_policy", "fsdp.wrap_classes", "fsdp.min_num_params"), ": DeepSpeed needs no groups of layers"
    ),
    **dict.fromkeys(
        ("fsdp.replicate_size", "fsdp.replicate_per_node"),
        "; zero_optimization.zero_hpz_partition_size is the nearest",
    ),
}


_TARGETS = {
    "ours": "a file of ours, for the same engine",
    "accelerate": "a file that `accelerate launch` reads, for the same engine",
    "fsdp2": "a file of ours for FSDP2 (for DDP from ZeRO stage 0)",
    "fsdp_config": "fsdp_config of transformers, for FSDP2",
    "deepspeed": "a configuration of DeepSpeed's own",
}


def run_convert(words: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    arguments = convert_parser().parse_args(words)
    resolved = resolve(file=arguments.source)
    kind = arguments.to or (_SHARDED if resolved.config.strategy == "deepspeed" else "deepspeed")
    content, lost = _convert(resolved.config, kind)
    if arguments.target is None:
        print(_text(content, ".json" if kind in ("deepspeed", "fsdp_config") else ".yaml"), end="")
    else:
        path = Path(arguments.target)
        if path.suffix not in _SUFFIXES:
            raise ConfigError(f"{path} has the suffix {path.suffix!r}; expected one of {', '.join(_SUFFIXES)}")
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no {path.parent}; name another file")
        write_config(path, _text(content, path.suffix), is_new=True)
        print(f"{arguments.source} -> {arguments.target}")
    for line in (*resolved.notes, *lost):
        print(f"- {line}", file=sys.stderr if arguments.target is None else sys.stdout)
    return 0


def convert_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer convert`."""
    parser = command_parser(
        "convert",
        "Write a configuration of any spelling that is read (ours, accelerate's of any version, fsdp_config, "
        "DeepSpeed's) in another one, or for another engine. What changes and what is lost is listed.",
    )
    parser.add_argument("source", metavar="IN", help="a file, or a packaged name such as zero3 or full_shard")
    parser.add_argument("target", metavar="OUT", nargs="?", help="file to write, .json or .yaml; else it is printed")
    targets = "; ".join(f"{name}: {text}" for name, text in _TARGETS.items())
    text = f"{targets}; default: fsdp2 for a DeepSpeed configuration, deepspeed for others"
    parser.add_argument("--to", choices=tuple(_TARGETS), help=text)
    return parser


def _convert(config: RunConfig, kind: str) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a file, and a line for everything that is not the same in it."""
    lost: list[str] = []
    if kind == "deepspeed":
        return to_deepspeed(config)
    if kind in (_SHARDED, "fsdp_config") and config.strategy == "deepspeed":
        config, lost = to_fsdp(config)
    if kind == _SHARDED and config.strategy not in _STRATEGIES or kind == "fsdp_config" and config.strategy != _SHARDED:
        raise ConfigError(
            f"strategy={config.strategy} shards nothing; convert a configuration for FSDP or DeepSpeed, or use "
            "`--to ours` or `--to accelerate`"
        )
    if kind == "fsdp_config":
        content = fsdp_keys(config.fsdp)
    elif kind == "accelerate":
        content = ClusterConfig.from_config(config).to_dict()
    else:
        content = to_file_dict(config)
    return content, [*lost, *_differences(config, content)]


def _differences(config: RunConfig, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each option that the content, read again, does not give as it was."""
    again = resolve(file=content).config
    for path in field_specs():
        before, after = get_value(config, path), get_value(again, path)
        if path == "deepspeed":
            known = dict(leaves(read_block(after).data))
            rest = ((key, value) for key, value in leaves(read_block(before).data) if known.get(key) != value)
            yield from (f"deepspeed.{key}={show(value)} cannot be said there" for key, value in rest)
        elif before != after:
            yield f"{path}={show(before)} cannot be said there, where it is {show(after)}"


def _text(content: dict[str, object], suffix: str) -> str:
    return json.dumps(content, indent=2) + "\n" if suffix == ".json" else dump_yaml(content)


def to_fsdp(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return a DeepSpeed run as one that shards with FSDP2, and a line for everything that is not the same.

    Stage 3 becomes FSDP2, stages 1 and 2 FSDP2 that keeps gathered parameters until the backward, stage 0 DDP.

    Raises:
        ConfigError: the strategy is not deepspeed, or its block or its stage is wrong.
    """
    if config.strategy != "deepspeed":
        raise ConfigError(f"strategy={config.strategy} is not 'deepspeed'; there is nothing to convert to FSDP2")
    block = read_block(config.deepspeed)
    written = get_key(block.data, _STAGE, 0)
    stage = next((number for number in range(4) if written in (number, str(number))), None)  # as DeepSpeed reads it
    if stage is None:
        raise ConfigError(f"{_STAGE} is {show(written)}; expected 0, 1, 2 or 3")
    devices = {get_key(block.data, path, "none") for path in _DEVICES}
    fsdp = FSDPConfig(reshard_after_forward=stage == 3, offload_params=bool(devices & {"cpu", "nvme"}))
    lost = list(_approximations(stage, block.data))
    missing = {**_without_counterpart(block.data), **dict.fromkeys(block.launch, "start the script on each machine")}
    lost += [f"{name} has no counterpart: {reason}" for name, reason in missing.items()]
    options: dict[str, Any] = (
        {"strategy": _SHARDED, "fsdp": fsdp} if stage else {"strategy": "ddp", "fsdp": FSDPConfig()}
    )
    return dataclasses.replace(config, **options, deepspeed=FrozenDict()), lost


def _approximations(stage: int, data: Mapping[str, Any]) -> Iterator[str]:
    if stage == 1:
        yield f"{_STAGE} is 1: FSDP2 shards the gradients too, as stage 2 does"
    on_disk = [path for path in _DEVICES if get_key(data, path) == "nvme"]
    for path in on_disk:
        yield f"{path} is 'nvme': fsdp.offload_params keeps it in CPU memory, there is no offload to disks"
    if not on_disk and get_key(data, _DEVICES[0]) == "cpu" and get_key(data, _DEVICES[1], "none") == "none":
        yield f"{_DEVICES[0]} is 'cpu': fsdp.offload_params keeps the parameters in CPU memory too"


def _without_counterpart(data: Mapping[str, Any]) -> dict[str, str]:
    missing = {}
    for path, value in leaves(data):
        # A value that asks for nothing, or is left to the run, is not lost.
        if path not in (*_TAKEN, *_UNNEEDED) and value not in (None, False, 0, "auto", "none", {}):
            top = path.partition(".")[0]
            name = top if top in _INSTEAD else path
            missing[name] = _INSTEAD.get(name, f"{show(value)} is left out")
    return missing


def to_deepspeed(config: RunConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the DeepSpeed configuration of a run, and a line for everything that is not the same.

    FSDP2 becomes stage 3, or stage 2 where it keeps gathered parameters until the backward; DDP becomes stage 0. The
    block of a DeepSpeed run is returned in full, with the file that it names.

    Raises:
        ConfigError: the strategy is none of the three.
    """
    if config.strategy == "deepspeed":
        return _engine_file(config), list(_lost_options(config, 0))
    if config.strategy not in _STRATEGIES:
        raise ConfigError(
            f"strategy={config.strategy} has no counterpart in DeepSpeed; convert a configuration whose strategy is "
            f"{' or '.join(_STRATEGIES)}"
        )
    zero = {"stage": 0} if config.strategy != _SHARDED else _zero_optimization(config.fsdp)
    data: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": config.accumulation.num_steps if config.accumulation.num_steps > 1 else "auto",
        "gradient_clipping": "auto",
        "zero_optimization": zero,
    }
    for kind in ("bf16", "fp16"):
        data[kind] = {"enabled": True if config.mixed_precision == kind else "auto"}
    return data, list(_lost_options(config, zero["stage"]))


def _zero_optimization(fsdp: FSDPConfig) -> dict[str, Any]:
    """Return the section of ZeRO that shards as FSDP2 does."""
    stage = 3 if fsdp.reshard_after_forward else 2
    zero: dict[str, Any] = {"stage": stage}
    if fsdp.offload_params:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    if stage == 3 and fsdp.state_dict_type is StateDictType.FULL:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return zero


def _engine_file(config: RunConfig) -> dict[str, Any]:
    """Return the block of a DeepSpeed run as a file of DeepSpeed's own."""
    data = {key: value for key, value in read_block(config.deepspeed).data.items() if key != "zero3_init_flag"}
    if config.accumulation.num_steps > 1:
        data["gradient_accumulation_steps"] = config.accumulation.num_steps
    if config.mixed_precision in ("bf16", "fp16"):
        data[config.mixed_precision] = {**data.get(config.mixed_precision, {}), "enabled": True}
    return data


def _lost_options(config: RunConfig, stage: int) -> Iterator[str]:
    taken = {"strategy", "mixed_precision", "accumulation.num_steps", "deepspeed"}
    if stage:
        taken |= {"fsdp.reshard_after_forward", "fsdp.offload_params", "fsdp.state_dict_type"}
    if stage == 2 and config.fsdp.offload_params:
        yield "fsdp.offload_params at stage 2 offloads optimizer state only; the parameters stay on the device"
    if config.mixed_precision == "fp8":
        yield "mixed_precision=fp8 has no counterpart"
    for path, spec in field_specs().items():
        value = get_value(config, path)
        if path in taken or value == spec.default:
            continue
        section = path.partition(".")[0]
        if section in ("fsdp", "ddp", "compile"):
            yield f"{path}={show(value)} has no counterpart{_OPTION_INSTEAD.get(path, '')}"
        else:
            yield f"{path}={show(value)} is no option of DeepSpeed; set it where the run's other options are"


# --- a file of accelerate for FSDP1, as one for FSDP2 -----------------------------------------------------------------

_LEFT_OUT = {
    **dict.fromkeys(WITHOUT_EFFECT, "FSDP2 leaves no choice"),
    **dict.fromkeys(
        ("backward_prefetch", "backward_prefetch_policy", "forward_prefetch"),
        "files for accelerate's FSDP2 have no such key, ours have 'fsdp'",
    ),
}
_UNSHARDED = "every rank keeps the whole model: write distributed_type: MULTI_GPU, and take fsdp_config out"
_REPLICATED = (
    "the number of replicas stands elsewhere: write fsdp_reshard_after_forward: {}, and a parallelism_config with "
    "parallelism_config_dp_replicate_size, the number of machines, and parallelism_config_dp_shard_size"
)
_IN_OTHER_KEYS = {
    "NO_SHARD": _UNSHARDED,
    "HYBRID_SHARD": _REPLICATED.format("true"),
    "HYBRID_SHARD_ZERO2": _REPLICATED.format("false"),
}


class MissingFileError(ConfigError, FileNotFoundError):
    """A configuration file is not where it was looked for."""


class TakenFileError(ConfigError, FileExistsError):
    """A file that would be written is there already."""


def run_to_fsdp2(words: Sequence[str]) -> int:
    """Run `accel-trainer to-fsdp2` and return its exit code; errors as of `to_fsdp2_command`."""
    to_fsdp2_command(to_fsdp2_command_parser().parse_args(words))
    return 0


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer to-fsdp2`; with `subparsers`, as their command `to-fsdp2`."""
    parser = command_parser(
        "to-fsdp2",
        "Rewrite a file of accelerate for FSDP1 as one for FSDP2, for accelerate's own use: accel-trainer reads both, "
        "and runs both with FSDP2.",
    )
    add_option(parser, "config_file", required=True, metavar="IN", help="the file to rewrite")
    add_option(parser, "output_file", metavar="OUT", help="file to write, .json or .yaml; default: IN")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT where it is there already")
    return as_subcommand(parser, subparsers, "to-fsdp2", to_fsdp2_command)


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Write the file that parsed arguments ask for, and print its name.

    Raises:
        ConfigError: the file is missing, wrong or not accelerate's, has no keys of FSDP2, or would replace another.
    """
    source, target = Path(args.config_file), Path(args.output_file or args.config_file)
    if not source.exists():
        raise MissingFileError(f"{source} does not exist; give a file of `accelerate config`")
    if not args.overwrite and target.exists():
        raise TakenFileError(f"{target} exists, and is left as it is; give another --output_file, or --overwrite")
    content = convert_config_to_fsdp2(load_config(source))
    write_config(target, _text(content, target.suffix), is_new=not args.overwrite)
    print(f"{source} -> {target}")


def load_config(config_file: str | Path) -> dict[str, Any]:
    """Return the keys and values of a file of accelerate; a ConfigError names its problems."""
    read = read_file(str(config_file))
    if read.dialect is not Dialect.ACCELERATE:
        raise ConfigError(
            f"{config_file} is a file of {read.dialect.value}, and not of accelerate; for those of DeepSpeed there is "
            "`accel-trainer convert`"
        )
    return dict(read.content)


def convert_config_to_fsdp2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file of accelerate with its `fsdp_config` in keys of FSDP2; keys left out are logged.

    One that is for FSDP2 already, and one without FSDP, are returned as they are.

    Raises:
        ConfigError: the sharding strategy is unknown, or stands in other keys for FSDP2.
    """
    block = config.get("fsdp_config") or {}
    if not block or str(block.get("fsdp_version", 1)) == "2":
        logger.warning("nothing to convert: the file is %s", "for FSDP2 already" if block else "without FSDP")
        return dict(config)
    converted: dict[str, Any] = {}
    for key, value in block.items():
        name = key.removeprefix("fsdp_")
        if name in _LEFT_OUT:
            logger.warning("%s=%s is left out: %s", key, show(value), _LEFT_OUT[name])
        elif name in ("sharding_strategy", "reshard_after_forward"):
            converted["fsdp_reshard_after_forward"] = _reshards(key, value)
        else:
            converted[key] = value
    return {**config, "fsdp_config": {**converted, "fsdp_version": 2}}


def _reshards(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    name = strategy_name(value)
    if name is None or name in _IN_OTHER_KEYS:
        raise ConfigError(
            f"{key} is {show(value)}: {_IN_OTHER_KEYS.get(str(name), 'expected FULL_SHARD or SHARD_GRAD_OP')}"
        )
    return name == "FULL_SHARD"
