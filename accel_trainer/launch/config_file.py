"""`accel-trainer config`: a configuration file from the answers to a few questions, or with defaults."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Self

from accel_trainer.config import Dialect, read_file, resolve, to_file_dict
from accel_trainer.config.deepspeed_block import accelerate_fields
from accel_trainer.config.description import commented_yaml, json_schema
from accel_trainer.config.dialects.accelerate_file import DYNAMO, PARALLEL_SIZES
from accel_trainer.config.dialects.fsdp import fsdp_keys
from accel_trainer.config.schema import MixedPrecision, RunConfig, get_value
from accel_trainer.config.yaml_reader import dump_yaml
from accel_trainer.errors import ConfigError
from accel_trainer.launch.cli import add_option, command_parser, load_command
from accel_trainer.launch.flags import launch_flags
from accel_trainer.tracking import mask_secrets


def _cache(environ: Mapping[str, str]) -> Path:
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.path.expanduser(environ.get("HF_HOME") or os.path.join(cache, "huggingface")))


def default_config_path(environ: Mapping[str, str]) -> Path:
    """Return the place of our own default file: in the cache of Hugging Face's libraries."""
    return _cache(environ) / "accel_trainer" / "default_config.yaml"


def accelerate_config_path(environ: Mapping[str, str]) -> Path | None:
    """Return the default file of Hugging Face accelerate, where there is one."""
    paths = (_cache(environ) / "accelerate" / f"default_config.{suffix}" for suffix in ("yaml", "yml", "json"))
    return next((path for path in paths if os.path.isfile(path)), None)


def find_default_config(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return the file that is used by default, and a line that says which one and why; None and "" without any."""
    own, other = default_config_path(environ), accelerate_config_path(environ)
    if os.path.isfile(own):  # False for one that may not be read, where a Path's own raises
        ignored = "" if other is None else f"; that of Hugging Face accelerate, {other}, is not used"
        return own, f"configuration from {own}{ignored}"
    if other is None:
        return None, ""
    return other, (
        f"configuration from {other}, the default of Hugging Face accelerate; `accel-trainer config` makes one of your "
        "own, --config_file names another"
    )


default_config_file = str(find_default_config(os.environ)[0] or default_config_path(os.environ))
"""The file that `accel-trainer launch` takes where none is named, as it was found when this was imported."""
default_yaml_config_file = default_json_config_file = default_config_file
cache_dir = os.path.dirname(default_config_file)
"""Where it is."""

_HEAD = "# Written by accel-trainer config. Every option with its value and source: accel-trainer explain\n"
_DEFAULTS = """\
# Every option with its value and source: accel-trainer explain. What each one does: accel-trainer launch --help.
strategy: {strategy}  # auto, single, ddp, fsdp2, deepspeed
mixed_precision: '{precision}'  # 'no', bf16, fp16, fp8
use_cpu: false
accumulation:
  num_steps: 1
launch:
  num_processes: null  # one for each device; on the CPU: one
  num_machines: 1
"""
_MIN_STAGES = {"offload_optimizer_device": 1, "offload_param_device": 3}
"""ZeRO stage that each offload needs."""


def run_config(words: Sequence[str]) -> int:
    """Run `accel-trainer config` or `config default`, and print where the file is."""
    arguments = config_parser().parse_args(words)
    file = arguments.config_file
    path = Path(file).expanduser() if file else default_config_path(os.environ)
    if arguments.command == "schema":
        print(json.dumps(json_schema(), indent=2))
        return 0
    if arguments.command in ("show", "update"):
        return _show_file(file, is_updated=arguments.command == "update")
    _check_suffix(path)
    if arguments.command is not None:
        write_config(path, _default_text(arguments.mixed_precision, arguments), is_new=True)
        print(f"configuration written to {path}")
        return 0
    text = _text(load_command("contrib.questionnaire:ask_answers")(path))
    write_config(path, text, is_new=False)
    command = "accel-trainer test" + (f" --config_file {file}" if file else "")
    print(f"\n{text}\nconfiguration written to {path}; try it with: {command}")
    return 0


def _check_suffix(path: Path) -> None:
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path} would be written as YAML; give it the suffix .yaml")


def _text(content: Mapping[str, Any]) -> str:
    """Return a file of ours with a comment for each option, and for each field of the DeepSpeed block."""
    block = {f"deepspeed.{flag.key}": flag.help for flag in launch_flags().values() if flag.path == "deepspeed"}
    return _HEAD + commented_yaml(content, block)


def _show_file(file: str | None, *, is_updated: bool) -> int:
    """Print a file as one of ours, which `is_updated` writes in its place, a default of accelerate's beside it."""
    name = file or find_default_config(os.environ)[0]
    if name is None:
        raise ConfigError(f"there is no {default_config_path(os.environ)}; make it with `accel-trainer config`")
    read = read_file(str(name))
    resolved = resolve(file=read)
    content = to_file_dict(resolved.config)
    for note in resolved.notes:
        print(f"- {note}", file=sys.stderr)
    if not is_updated:
        print(f"# {name}\n{_text(mask_secrets(content))}", end="")
        return 0
    path = Path(file).expanduser() if file else default_config_path(os.environ)
    _check_suffix(path)
    # Options that are not used are not written.
    kept = path.with_name(f"{path.name}.bak") if read.notes and path.exists() else None
    if kept is not None and kept.exists():
        raise ConfigError(f"{kept} is in the way of {path} as it is now, which is kept there; remove it first")
    write_config(path, _text(content), is_new=False, kept=kept)
    print(f"configuration written to {path}" + (f"; as it was it is in {kept}" if kept is not None else ""))
    return 0


def config_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer config`."""
    description = "Ask a few questions and write a configuration file; `config default` asks nothing."
    parser = command_parser("config", description)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    texts = {
        "default": "write a file with defaults, where launch finds it",
        "show": "print a file as one of ours, whatever wrote it, with a comment for each option",
        "update": "write a file anew as one of ours, with the options that it has",
        "schema": "print the JSON schema of our files",
    }
    default, *others = (
        commands.add_parser(name, help=text, description=text, allow_abbrev=False) for name, text in texts.items()
    )
    # Suppressed: without the option, the sub-parser would put its default over the value that stood before `default`.
    for command, unset in ((parser, None), *((each, argparse.SUPPRESS) for each in (default, *others))):
        add_option(command, "config_file", metavar="FILE", default=unset, help="the file, instead of the default")
    add_option(default, "mixed_precision", default="no", choices=tuple(MixedPrecision), help="default: no")
    add_option(default, "zero_stage", type=int, choices=(1, 2, 3), help="shard with DeepSpeed: its ZeRO stage")
    for name, content in (("optimizer", "optimizer state"), ("param", "parameters, with stage 3,")):
        text = f"with --zero_stage: where {content} are kept between uses"
        add_option(default, f"offload_{name}_device", choices=("none", "cpu"), help=text)
    return parser


def _default_text(precision: str, arguments: argparse.Namespace) -> str:
    block = {name: value for name in ("zero_stage", *_MIN_STAGES) if (value := getattr(arguments, name)) is not None}
    for name, stage in _MIN_STAGES.items():
        if block.get(name, "none") != "none" and block.get("zero_stage", 0) < stage:
            raise ConfigError(
                f"--{name} is {block[name]} and --zero_stage {block.get('zero_stage', 'is not set')}; it needs "
                f"--zero_stage {'1, 2 or 3' if stage == 1 else stage}"
            )
    text = _DEFAULTS.format(precision=precision, strategy="deepspeed" if block else "auto")
    return text + (dump_yaml({"deepspeed": block}) if block else "")


def write_config(path: Path, text: str, *, is_new: bool, kept: Path | None = None) -> None:
    """Write a file; `is_new` leaves one that is there as it is, otherwise it is replaced in one step, and `kept`."""
    written = path if is_new else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(written, "x" if is_new else "w", encoding="utf-8") as target:
            target.write(text)
        if not is_new and path.exists():
            shutil.copymode(path, written)
            if kept is not None:
                shutil.copy2(path, kept)
        os.replace(written, path)
    except OSError as error:
        if is_new and path.exists():
            raise ConfigError(f"{path} exists and was left as it is; remove it first, or name another file") from None
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file") from error


# --- files with the keys of accelerate, as objects --------------------------------------------------------------------


@dataclass
class BaseConfig:
    """The keys of every configuration file of accelerate."""

    compute_environment: str
    distributed_type: str
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that are set, with plain values."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in values}
        return {name: value for name, value in plain.items() if value not in (None, {})}

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write a YAML file, which `accel-trainer launch` reads."""
        Path(yaml_file).write_text(dump_yaml(self.to_dict()), encoding="utf-8")

    def to_json_file(self, json_file: str | Path) -> None:
        """Write a JSON file, which `accel-trainer launch` reads."""
        Path(json_file).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclass
class ClusterConfig(BaseConfig):
    """The configuration of a launch with accelerate's keys; blocks are mappings, as in the file."""

    num_processes: int = -1
    """Over all machines; -1 is one for each device."""
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: Mapping[str, Any] = field(default_factory=dict)
    deepspeed_config: Mapping[str, Any] = field(default_factory=dict)
    fsdp_config: Mapping[str, Any] = field(default_factory=dict)
    parallelism_config: Mapping[str, Any] = field(default_factory=dict)
    megatron_lm_config: Mapping[str, Any] = field(default_factory=dict)
    mpirun_config: Mapping[str, Any] = field(default_factory=dict)
    downcast_bf16: str | bool = "no"
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: Sequence[str] | None = None
    tpu_vm: Sequence[str] | None = None
    tpu_env: Sequence[str] | None = None
    dynamo_config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_file(cls, file: str | Path) -> Self:
        """Read a file of accelerate's keys, or of our own, whose launch options are translated.

        Raises:
            ConfigError: a key is unknown, or a value asks for what is not offered; with the line.
        """
        read = read_file(str(file))
        values = vars(cls.from_config(resolve(file=read).config))
        if read.dialect is Dialect.ACCELERATE:
            values |= {each.name: read.content[each.name] for each in fields(cls) if each.name in read.content}
        return cls(**values)

    from_yaml_file = from_json_file = from_file

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """Return a configuration under accelerate's keys; options without one are left out."""
        launch = config.launch
        values: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": _distributed_type(config),
            "mixed_precision": str(config.mixed_precision),
            "use_cpu": config.use_cpu,
            "debug": config.debug,
        }
        values |= {each.name: getattr(launch, each.name) for each in fields(cls) if hasattr(launch, each.name)}
        values["num_processes"] = -1 if launch.num_processes is None else launch.num_processes
        if config.compile.backend != "no":
            compiled = {f"dynamo_{key}": get_value(config, path) for key, path in DYNAMO.items()}
            values["dynamo_config"] = {key: value for key, value in compiled.items() if value is not None}
        sizes = {name: getattr(config.parallel, name, None) or 1 for name in PARALLEL_SIZES}
        values["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items() if size > 1}
        return cls(**(values | _engine_section(config)))


def load_config_from_file(config_file: str | Path | None) -> ClusterConfig:
    """Return the configuration in a file, the default one for None; a ConfigError (a ValueError) for bad ones."""
    return ClusterConfig.from_file(default_config_file if config_file is None else config_file)


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | Literal[False]:
    """Write defaults to a YAML file, or None: this library's own; return it, or False where one is there.

    Raises:
        ConfigError: the precision is unknown, or the file cannot be written.
    """
    path = default_config_path(os.environ) if save_location is None else Path(save_location)
    if path.exists():
        print(f"{path} exists already and was left as it is; remove it, or run `accel-trainer config`")
        return False
    if mixed_precision not in tuple(MixedPrecision):
        known = ", ".join(MixedPrecision)
        raise ConfigError(f"mixed_precision={mixed_precision!r} is unknown; expected one of {known}")
    run_config(["default", "--config_file", str(path), "--mixed_precision", mixed_precision])
    return path


def _distributed_type(config: RunConfig) -> str:
    """Return accelerate's word for how the ranks of a configuration work together."""
    plain = "MULTI_CPU" if config.use_cpu else "MULTI_GPU"
    alone = plain if (config.launch.num_processes or 1) > 1 else "NO"
    return {"fsdp2": "FSDP", "deepspeed": "DEEPSPEED", "ddp": plain, "auto": alone}.get(config.strategy, "NO")


def _engine_section(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return accelerate's section for the strategy, by its name; nothing where it has none."""
    if config.strategy == "fsdp2":
        keys = fsdp_keys(replace(config.fsdp, activation_checkpointing=config.recomputation == "full"))
        if config.activation_offload:
            keys["activation_checkpointing_offload"] = True
        return {"fsdp_config": {f"fsdp_{key}": value for key, value in keys.items()}}
    if config.strategy == "deepspeed":
        steps = config.accumulation.num_steps
        accumulation = {"gradient_accumulation_steps": steps} if steps > 1 else {}
        return {"deepspeed_config": accelerate_fields(config.deepspeed) | accumulation}
    return {}
