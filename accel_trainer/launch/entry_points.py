"""The commands as functions of arguments, for programs that start jobs: `accel_trainer.commands`.

`commands.launch`, `commands.config`, `commands.config.config_args`, `commands.config.default`, `commands.env`,
`commands.merge` and `commands.test` are this module under another name.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Self

from accel_trainer.config import Dialect, read_file, resolve
from accel_trainer.config.dialects import fsdp as fsdp_dialect
from accel_trainer.config.readers.yaml_reader import dump_yaml
from accel_trainer.errors import ConfigError
from accel_trainer.launch.checkpoints import export, merge_weights_parser
from accel_trainer.launch.config_file import run_config
from accel_trainer.launch.default_file import default_config_path, find_default_config
from accel_trainer.launch.flags import launch_flags, options_parser, parse_options
from accel_trainer.launch.job import plan_job
from accel_trainer.launch.reports import env_parser, environment_facts, run_env

__all__ = [
    "BaseConfig",
    "ClusterConfig",
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "env_command",
    "env_command_parser",
    "launch_command",
    "launch_command_parser",
    "load_config_from_file",
    "merge_command",
    "merge_command_parser",
    "test_command",
    "test_command_parser",
    "write_basic_config",
]

__path__: list[str] = []  # the import system looks for `commands.config.config_args` in a package only

default_config_file = str(find_default_config(os.environ)[0] or default_config_path(os.environ))
"""The file that `accel-trainer launch` takes where none is named, as it was found when this was imported."""
default_yaml_config_file = default_json_config_file = default_config_file
cache_dir = os.path.dirname(default_config_file)
"""Where it is."""


# --- launch -----------------------------------------------------------------------------------------------------------


def launch_command_parser() -> argparse.ArgumentParser:
    """Return a parser of the command line of `accel-trainer launch`.

    Its results have an attribute for each option, None or False where it is not given, and `training_script` with
    `training_script_args`. A program may set them before it calls `launch_command`.
    """
    parser = options_parser(None, "Run a script on one or several processes.")
    for name in _fsdp_spellings():
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("training_script", help="the script, or with --module a module's name")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="options of the script")
    return parser


def _fsdp_spellings() -> list[str]:
    """Return accelerate's names of FSDP options that are not ours, too."""
    names = (f"fsdp_{key}" for key in fsdp_dialect.KNOWN_KEYS)
    return [name for name in names if name not in launch_flags()]


def launch_command(args: argparse.Namespace) -> None:
    """Start the job that arguments of `launch_command_parser` ask for, in a process of its own, and wait for it.

    Raises:
        ConfigError: the job cannot run as asked; nothing was started.
        CalledProcessError: the job failed; what it says is on stderr.
    """
    words = [*_words(args), "--", args.training_script, *args.training_script_args]
    plan_job(parse_options(words, "accel-trainer launch"), os.environ, words)
    _run("launch", words)


def _words(args: argparse.Namespace) -> Iterator[str]:
    """Yield the options of a command line with which `args` would be parsed."""
    flags = {flag.name: flag for flag in launch_flags().values()}
    for name in (*flags, *_fsdp_spellings()):
        value = getattr(args, name, None)
        if name in flags and flags[name].takes_no_value:
            if value:
                yield f"--{name}"
        elif value is not None:
            yield f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def _run(command: str, words: Sequence[str]) -> None:
    # A job of one process takes the place of the process that starts it, and others set variables in it.
    started = [sys.executable, "-m", "accel_trainer", command, *words]
    code = subprocess.run(started).returncode
    if code:
        raise subprocess.CalledProcessError(code, started)


# --- test, env, merge -------------------------------------------------------------------------------------------------


def test_command_parser() -> argparse.ArgumentParser:
    """Return a parser of the command line of `accel-trainer test`, of the option `--config_file`."""
    return _config_file_parser("test", "Start a small job as configured, and check it.")


def test_command(args: argparse.Namespace) -> None:
    """Check processes, collectives, loaders and training as configured.

    Raises:
        CalledProcessError: a check failed; what it says is on stderr.
    """
    _run("test", [] if args.config_file is None else ["--config_file", args.config_file])
    print("Test is a success! You are ready for your distributed training!")


def env_command_parser() -> argparse.ArgumentParser:
    """Return a parser of the command line of `accel-trainer env`."""
    return env_parser()


def env_command(args: argparse.Namespace) -> dict[str, str]:
    """Print versions, devices and configuration for a bug report; return versions and devices by their names."""
    run_env([] if args.config_file is None else ["--config_file", args.config_file])
    return dict(environment_facts())


def merge_command_parser() -> argparse.ArgumentParser:
    """Return a parser of the command line of `accel-trainer merge-weights`."""
    return merge_weights_parser()


def merge_command(args: argparse.Namespace) -> None:
    """Write the weights of a checkpoint, sharded or not, as files that `from_pretrained` reads."""
    export(args)


# --- configuration files ----------------------------------------------------------------------------------------------


@dataclass
class BaseConfig:
    """What every configuration file of accelerate has."""

    compute_environment: str
    distributed_type: str
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def to_dict(self) -> dict[str, Any]:
        """Return what is set, as plain values."""
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
        config = resolve(file=read).config
        launch, is_many = config.launch, (config.launch.num_processes or 1) > 1
        plain = "MULTI_CPU" if config.use_cpu else "MULTI_GPU"
        kinds = {"fsdp2": "FSDP", "deepspeed": "DEEPSPEED", "ddp": plain, "auto": plain if is_many else "NO"}
        values: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": kinds.get(config.strategy, "NO"),
            "mixed_precision": str(config.mixed_precision),
            "use_cpu": config.use_cpu,
            "debug": config.debug,
        }
        values |= {each.name: getattr(launch, each.name) for each in fields(cls) if hasattr(launch, each.name)}
        values["num_processes"] = -1 if launch.num_processes is None else launch.num_processes
        if read.dialect is Dialect.ACCELERATE:
            values |= {each.name: read.content[each.name] for each in fields(cls) if each.name in read.content}
        return cls(**values)

    from_yaml_file = from_json_file = from_file


def load_config_from_file(config_file: str | Path | None) -> ClusterConfig:
    """Return the configuration in a file, the default one for None.

    Raises:
        ConfigError: a `ValueError`: the file does not exist, or something in it is wrong.
    """
    return ClusterConfig.from_file(default_config_file if config_file is None else config_file)


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | Literal[False]:
    """Write a configuration file with defaults; return its path, or False where a file is there, which stays.

    Args:
        save_location: a YAML file; None is the default one of this library.

    Raises:
        ConfigError: the precision is unknown, or the file cannot be written.
    """
    path = default_config_path(os.environ) if save_location is None else Path(save_location)
    if path.exists():
        print(f"{path} exists already and was left as it is; remove it, or run `accel-trainer config`")
        return False
    known = ("no", "bf16", "fp16")
    if mixed_precision not in known:
        raise ConfigError(f"mixed_precision={mixed_precision!r} is unknown; expected one of {', '.join(known)}")
    run_config(["default", "--config_file", str(path), "--mixed_precision", mixed_precision])
    return path


def _config_file_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"accel-trainer {command}", description=description, allow_abbrev=False)
    parser.add_argument("--config_file", "--config-file", metavar="FILE", help="instead of the default one")
    return parser
