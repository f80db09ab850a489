"""The commands as functions of arguments, for programs that start jobs: `accel_trainer.commands`.

`commands.launch`, `commands.config`, `commands.config.config_args`, `commands.config.default`, `commands.env`,
`commands.merge` and `commands.test` are this module under another name. Behind them `accel-trainer explain`, `env` and
`completion`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import shtab

from accel_trainer.config import read_file
from accel_trainer.config.dialects import fsdp as fsdp_dialect
from accel_trainer.errors import ConfigError
from accel_trainer.launch.checkpoints import export, merge_weights_parser
from accel_trainer.launch.cli import COMMANDS, add_option, as_subcommand, command_parser, load_command
from accel_trainer.launch.config_file import (
    BaseConfig,
    ClusterConfig,
    cache_dir,
    default_config_file,
    default_config_path,
    default_json_config_file,
    default_yaml_config_file,
    find_default_config,
    load_config_from_file,
    write_basic_config,
)
from accel_trainer.launch.flags import launch_flags, options_parser, print_help
from accel_trainer.launch.job import check_job, option_rows, plan_job, read_options, resolve_options
from accel_trainer.launch.machine import check_meeting, device_files
from accel_trainer.launch.outer_job import find_outer_job, refuse_nesting
from accel_trainer.tracking import mask_secrets, redact

__all__ = [
    "BaseConfig", "ClusterConfig", "cache_dir", "default_config_file", "default_json_config_file",
    "default_yaml_config_file", "env_command", "env_command_parser", "launch_command", "launch_command_parser",
    "load_config_from_file", "merge_command", "merge_command_parser", "test_command", "test_command_parser",
    "write_basic_config",
]  # fmt: skip

_PACKAGES = ("torch", "numpy", "transformers", "datasets", "evaluate", "safetensors", "huggingface_hub", "deepspeed")
_REPORTED = re.compile(r"(ACCEL_TRAINER|ACCELERATE|FSDP|NCCL|GLOO|OMP|MASTER)_|CUDA_VISIBLE_DEVICES")
_PATHS = {"DIR", "FILE", "IN", "MODEL", "OUT", "RUN", "directory", "training_script", "training_script_args"}
"""Arguments, by name or by the word for their value, that are files or folders."""

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
    plan_job(read_options(words, "accel-trainer launch", os.environ), os.environ)
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
    """Check processes, collectives, loaders and training as configured; a CalledProcessError where a check failed."""
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


def run_explain(words: Sequence[str]) -> int:
    """Print a table of every option, its value and where it came from, and the remarks of the files that were read."""
    command = "accel-trainer explain"
    description = "Print every option, its value and where the value came from. A script is ignored."
    if print_help(words, command, "[options as for launch]", description):
        return 0
    options = read_options(words, command, os.environ)
    outer = find_outer_job(os.environ)
    resolved, _ = resolve_options(options, os.environ, outer)
    rows = [("option", "value", "from")]
    rows += [(path, text, source.where) for path, text, source in option_rows(resolved)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{path:<{widths[0]}}  {value:<{widths[1]}}  {where}" for path, value, where in rows]
    print("\n".join([*lines, *(f"note: {note}" for note in (*options.notes, *resolved.notes))]))
    if outer is not None:
        print(f"note: {outer.describe()}")
    refuse_nesting(os.environ)
    hosts, _ = check_job(resolved, outer, options)
    if hosts is None and (outer is None or outer.rank is None):
        check_meeting(resolved.config.launch)
    return 0


def run_env(words: Sequence[str]) -> int:
    """Print versions, devices, variables and the configuration file, as a block to paste into a bug report."""
    arguments = env_parser().parse_args(words)
    lines = [f"- {name}: {value}" for name, value in environment_facts(asks_torch=arguments.devices)]
    variables = {name: value for name, value in sorted(os.environ.items()) if _REPORTED.match(name)}
    lines += [f"- {name}: {value}" for name, value in mask_secrets(variables).items()]
    lines.append(_config_lines(arguments.config_file))
    print("\n".join(["Copy this into the bug report:", "", *lines]))
    return 0


def env_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer env`."""
    parser = command_parser("env", "Print versions, devices and configuration for a bug report.")
    add_option(parser, "config_file", metavar="FILE", help="the file to report instead of the default one")
    parser.add_argument("--devices", action="store_true", help="import torch, and ask it for the devices: some seconds")
    return parser


def environment_facts(*, asks_torch: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the first lines of a bug report: versions, and devices, by torch or by the files of their drivers."""
    yield "accel_trainer", _version("accel-trainer")
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield "CPU cores", str(os.cpu_count())
    for package in _PACKAGES:
        yield package, _version(package)
    yield "accelerate (not used)", _version("accelerate")
    if asks_torch:
        yield from _device_facts()
    else:
        found = ", ".join(device_files())
        yield "accelerator", f"{found} (--devices asks torch)" if found else "none, the CPU is used"


def _device_facts() -> Iterator[tuple[str, str]]:
    try:
        import torch
    except Exception as error:  # a broken installation of torch is what such a report is often about
        yield "torch cannot be imported", f"{type(error).__name__}: {error}"
        return
    yield "torch built for", f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    if not torch.accelerator.is_available():
        yield "accelerator", "none, the CPU is used"
        return
    kind = torch.accelerator.current_accelerator()
    yield "accelerator", f"{torch.accelerator.device_count()} x {kind.type if kind else 'unknown'}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield f"device {index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _config_lines(file: str | None) -> str:
    default, note = find_default_config(os.environ)
    path = Path(file) if file else default
    if path is None:
        return f"- configuration: none ({default_config_path(os.environ)} does not exist)"
    try:
        content = mask_secrets(read_file(str(path)).content)
    except ConfigError as error:
        return f"- configuration: {redact(str(error))}"
    head = f"- configuration: {path}" if file else f"- {note}"
    return "\n".join([head, *(f"    {key}: {value}" for key, value in content.items())])


def run_completion(words: Sequence[str]) -> int:
    """Print the script for a shell, made from the commands and flags of this version."""
    print(shtab.complete(_program_parser(), completion_parser().parse_args(words).shell))
    return 0


def completion_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer completion`."""
    parser = command_parser(
        "completion",
        'Print a completion script. bash, zsh: eval "$(accel-trainer completion bash)"; '
        "fish: accel-trainer completion fish | source",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def _program_parser() -> argparse.ArgumentParser:
    """Return the parsers of all commands as those of one program, which `cli.main` does not need."""
    program = argparse.ArgumentParser("accel-trainer")
    commands = program.add_subparsers()
    for name, command in COMMANDS.items():
        parser = load_command(command.parser)()
        _mark_paths(parser)
        commands.add_parser(name, parents=[parser], help=command.text, add_help=False)
    return program


def _mark_paths(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _mark_paths(child)
        elif _PATHS & {action.metavar, action.dest}:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
