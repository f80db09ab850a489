"""The command `accel-trainer`: a table of its commands, whose modules are imported when they run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_trainer.errors import AccelTrainerError, did_you_mean

if TYPE_CHECKING:
    import argparse


class Command(NamedTuple):
    """One command; names of functions are `MODULE:FUNCTION` below `accel_trainer`."""

    run: str
    """Takes the words behind the command's name, and returns the exit code; a mistake is an AccelTrainerError."""
    parser: str
    """Returns the parser of those words."""
    text: str


# Names of modules, not imports: `accel-trainer --help` takes 0.1 s, and an import of torch alone takes seconds.
COMMANDS = {
    "launch": Command(
        "launch.job:run_launch", "launch.entry_points:launch_command_parser", "run a script on one or several processes"
    ),
    "test": Command(
        "launch.job:run_test",
        "launch.flags:options_parser",
        "check processes, collectives, loaders and training as configured",
    ),
    "config": Command(
        "launch.config_file:run_config",
        "launch.config_file:config_parser",
        "make a configuration file from a few answers (config default: without)",
    ),
    "check": Command(
        "contrib.check.command:run_check",
        "contrib.check.command:check_parser",
        "say what of a script or a configuration for accelerate or transformers works, and what changes",
    ),
    "convert": Command(
        "contrib.deepspeed_fsdp:run_convert",
        "contrib.deepspeed_fsdp:convert_parser",
        "write a configuration in another spelling, or for another engine",
    ),
    "convert-config": Command(
        "contrib.deepspeed_fsdp:run_convert", "contrib.deepspeed_fsdp:convert_parser", "the same, by its earlier name"
    ),
    "to-fsdp2": Command(
        "contrib.deepspeed_fsdp:run_to_fsdp2",
        "contrib.deepspeed_fsdp:to_fsdp2_command_parser",
        "rewrite a file of accelerate for FSDP1 as one of accelerate for FSDP2",
    ),
    "ckpt": Command(
        "launch.checkpoints:run_ckpt",
        "launch.checkpoints:ckpt_parser",
        "list, verify, prune, adopt and export checkpoints",
    ),
    "merge-weights": Command(
        "launch.checkpoints:run_merge_weights",
        "launch.checkpoints:merge_weights_parser",
        "write sharded weights as files that from_pretrained reads",
    ),
    "report": Command(
        "contrib.run_report.page:run_report",
        "contrib.run_report.page:report_parser",
        "write a page of a run's curves, figures and options, or compare runs",
    ),
    "estimate": Command(
        "contrib.estimate:run_estimate",
        "contrib.estimate:estimate_command_parser",
        "print the memory that a model takes, for each dtype",
    ),
    "estimate-memory": Command(
        "contrib.estimate:run_estimate",
        "contrib.estimate:estimate_command_parser",
        "the same, by accelerate's name",
    ),
    "data": Command(
        "contrib.preview:run_data", "contrib.preview:data_parser", "print the first batches of a run, as text and mask"
    ),
    "explain": Command(
        "launch.entry_points:run_explain",
        "launch.flags:options_parser",
        "print every option, its value and where it came from",
    ),
    "completion": Command(
        "launch.entry_points:run_completion",
        "launch.entry_points:completion_parser",
        "print a script by which bash, zsh or fish complete a command",
    ),
    "env": Command(
        "launch.entry_points:run_env",
        "launch.entry_points:env_parser",
        "print versions, devices and configuration for a bug report",
    ),
}

_REFUSED = {
    "tpu-config": "tpu-config is a command of accelerate that is not offered: it starts commands on pods of TPUs by "
    "Google's own tool, which is there; or run `accel-trainer launch` on each machine, or let a scheduler do it"
}
"""Commands of accelerate that are not offered, and what to do instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 for a wrong use, else that of the command or of the job."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        table = "\n".join(f"  {name:<{width}}  {text}" for name, (_, _, text) in COMMANDS.items())
        print(f"usage: accel-trainer COMMAND [options]\n\n{table}\n")
        print("`accel-trainer COMMAND --help` says more; `accel-trainer --version` prints the version.")
        return 0
    if name in ("-V", "--version"):
        from accel_trainer import __version__

        print(f"accel-trainer {__version__}")
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}"
        problem = _REFUSED.get(name) or f"unknown command {name!r}{hint}"
        print(f"accel-trainer: {problem}", file=sys.stderr)
        return 2
    try:
        code: int = load_command(COMMANDS[name].run)(words[1:])
        return code
    except AccelTrainerError as error:
        from accel_trainer.tracking import redact

        print(f"accel-trainer {name}: {redact(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\naccel-trainer {name}: stopped by ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `accel-trainer explain | head`: the reader has seen enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def load_command(path: str) -> Callable[..., Any]:
    """Return the function of `MODULE:FUNCTION` below `accel_trainer`: `contrib` is found by it, and never imported."""
    module, _, function = path.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(f"accel_trainer.{module}"), function)
    return loaded


def command_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of the words behind a command's name, in which no option may be cut short."""
    import argparse  # the overview of all commands is printed without it

    return argparse.ArgumentParser(f"accel-trainer {name}", description=description, allow_abbrev=False)


def add_option(parser: argparse._ActionsContainer, name: str, *others: str, **options: Any) -> None:
    """Add `--name` to a parser or a group of one, with `-` as well as `_` between its words, and other spellings."""
    parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", *others)), **options)


def as_subcommand(
    parser: argparse.ArgumentParser, subparsers: Any, name: str, run: Callable[[argparse.Namespace], Any]
) -> argparse.ArgumentParser:
    """Return the parser of a command; with `subparsers`, as their command `name` whose results have `run` as `func`."""
    if subparsers is None:
        return parser
    command: argparse.ArgumentParser = subparsers.add_parser(
        name, parents=[parser], description=parser.description, add_help=False, allow_abbrev=False
    )
    command.set_defaults(func=run)
    return command
