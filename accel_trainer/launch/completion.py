"""`accel-trainer completion`: a script by which a shell completes commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from accel_trainer.launch.cli import COMMANDS
from accel_trainer.launch.flags import launch_flags

__all__ = ["run_completion"]

_JOB_COMMANDS = ("launch", "test", "explain")
"""Commands that take the flags of `launch`."""
_OTHERS = {
    "config": ("default", "show", "update", "schema", "--config_file", "--mixed_precision", "--zero_stage"),
    "convert": ("--to",),
    "to-fsdp2": ("--config_file", "--output_file", "--overwrite"),
    "estimate": (
        *("--library_name", "--dtypes", "--trust_remote_code", "--config_file", "--num_processes", "--batch"),
        *("--sequence", "--dtype", "--optimizer", "--compare", "--memory", "--json", "--picture"),
    ),
    "env": ("--config_file", "--devices"),
    "ckpt": ("list", "verify", "prune", "export"),
    "completion": ("bash", "zsh", "fish"),
}
_BASH = """\
_accel_trainer() {{
    local words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _accel_trainer accel-trainer
"""


def run_completion(words: Sequence[str]) -> int:
    """Print the script for a shell, made from the commands and flags of this version."""
    parser = argparse.ArgumentParser(
        "accel-trainer completion",
        description='Print a completion script. bash, zsh: eval "$(accel-trainer completion bash)"; '
        "fish: accel-trainer completion fish | source",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell = parser.parse_args(words).shell
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](), end="")
    return 0


def _options() -> Iterable[tuple[str, str]]:
    """Yield the long flags of `launch` with their help, each once."""
    for name, flag in launch_flags().items():
        if len(name) > 1 and name == flag.name:
            yield f"--{name}", flag.help


def _bash() -> str:
    cases = {"|".join(_JOB_COMMANDS): " ".join(name for name, _ in _options())}
    cases |= {command: " ".join(options) for command, options in _OTHERS.items()}
    lines = "\n".join(f'            {command}) words="{options}" ;;' for command, options in cases.items())
    return _BASH.format(commands=" ".join(COMMANDS), cases=lines)


def _zsh() -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash()}"


def _fish() -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [
        f"complete -c accel-trainer -n __fish_use_subcommand -a {name} -d {quoted(text)}"
        for name, (_, text) in COMMANDS.items()
    ]
    seen = f'"__fish_seen_subcommand_from {" ".join(_JOB_COMMANDS)}"'
    lines += [f"complete -c accel-trainer -n {seen} -l {name[2:]} -d {quoted(text)}" for name, text in _options()]
    lines += [
        f'complete -c accel-trainer -n "__fish_seen_subcommand_from {command}" -a {quoted(" ".join(options))}'
        for command, options in _OTHERS.items()
    ]
    return "".join(f"{line}\n" for line in lines)
