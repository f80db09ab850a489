"""`accel-trainer completion`: the script by which a shell completes commands and their options; shtab writes it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import shtab

from accel_trainer.launch.cli import COMMANDS, command_parser, load_command

_PATHS = {"DIR", "FILE", "IN", "MODEL", "OUT", "RUN", "directory", "training_script", "training_script_args"}
"""Arguments, by name or by the word for their value, that are files or folders."""


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
