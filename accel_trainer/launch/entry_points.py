"""The commands as functions of arguments, for programs that start jobs: `accel_trainer.commands`.

`commands.launch`, `commands.config`, `commands.config.config_args`, `commands.config.default`, `commands.env`,
`commands.merge` and `commands.test` are this module under another name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from accel_trainer.config.dialects import fsdp as fsdp_dialect
from accel_trainer.launch.checkpoints import export, merge_weights_parser
from accel_trainer.launch.cli import add_option, as_subcommand, command_parser
from accel_trainer.launch.config_file import (
    BaseConfig,
    ClusterConfig,
    cache_dir,
    default_config_file,
    default_json_config_file,
    default_yaml_config_file,
    load_config_from_file,
    write_basic_config,
)
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


# --- launch -----------------------------------------------------------------------------------------------------------


def launch_command_parser() -> argparse.ArgumentParser:
    """Return a parser of the command line of `accel-trainer launch`.

    Its results have an attribute for each option, None or False where it is not given, and `training_script` with
    `training_script_args`. A program may set them before it calls `launch_command`.
    """
    parser = options_parser(None, "Run a script on one or several processes.")
    parser.add_argument("training_script", help="the script, or with --module a module's name")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="options of the script")
    return parser


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
    """Yield the options of a command line that means `args`, in which a program may have set some itself."""
    for name, value in vars(args).items():
        flag = launch_flags().get(name)
        if flag is not None and flag.takes_no_value:
            if value:
                yield f"--{name}"
        elif value is not None and (flag is not None or fsdp_dialect.is_known_key(name)):
            yield f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def _run(command: str, words: Sequence[str]) -> None:
    # A job of one process takes the place of the process that starts it, and others set variables in it.
    started = [sys.executable, "-m", "accel_trainer", command, *words]
    code = subprocess.run(started).returncode
    if code:
        raise subprocess.CalledProcessError(code, started)


# --- test, env, merge -------------------------------------------------------------------------------------------------


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028  # no test
    """Return a parser of the command line of `accel-trainer test`, of the option `--config_file`."""
    parser = command_parser("test", "Start a small job as configured, and check it.")
    add_option(parser, "config_file", metavar="FILE", help="instead of the default one")
    return as_subcommand(parser, subparsers, "test", test_command)


def test_command(args: argparse.Namespace) -> None:
    """Check processes, collectives, loaders and training as configured.

    Raises:
        CalledProcessError: a check failed; what it says is on stderr.
    """
    _run("test", [] if args.config_file is None else ["--config_file", args.config_file])
    print("Test is a success! You are ready for your distributed training!")


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the command line of `accel-trainer env`."""
    return as_subcommand(env_parser(), subparsers, "env", env_command)


def env_command(args: argparse.Namespace) -> dict[str, str]:
    """Print versions, devices and configuration for a bug report; return versions and devices by their names."""
    run_env([] if args.config_file is None else ["--config_file", args.config_file])
    return dict(environment_facts())


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the command line of `accel-trainer merge-weights`."""
    return as_subcommand(merge_weights_parser(), subparsers, "merge-weights", merge_command)


def merge_command(args: argparse.Namespace) -> None:
    """Write the weights of a checkpoint, sharded or not, as files that `from_pretrained` reads."""
    export(args)
