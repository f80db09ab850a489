"""The command `accel-trainer`. Each command imports what it needs when it runs: `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from accel_trainer.errors import AccelTrainerError, did_you_mean

__all__ = ["main"]

_LAUNCH_USAGE = "accel-trainer launch [options] script.py [options of the script]"
_EXPLAIN_USAGE = "accel-trainer explain [options as for launch]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 for a wrong use, else that of the command or of the job."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        from accel_trainer import __version__

        print(f"accel-trainer {__version__}")
        return 0
    if name not in _COMMANDS:
        hint = did_you_mean(name, _COMMANDS) or f"; expected one of {', '.join(_COMMANDS)}"
        print(f"accel-trainer: unknown command {name!r}{hint}", file=sys.stderr)
        return 2
    try:
        return _COMMANDS[name][0](words[1:])
    except AccelTrainerError as error:
        print(f"accel-trainer {name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `accel-trainer explain | head`: whoever read has seen enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: accel-trainer COMMAND [options]",
            "",
            *lines,
            "",
            "`accel-trainer COMMAND --help` says more; `accel-trainer --version` prints the version.",
        ]
    )


def _wants_help(words: Sequence[str]) -> bool:
    return bool(words) and words[0] in ("-h", "--help")


def _launch(words: Sequence[str]) -> int:
    from accel_trainer.launch.flags import options_parser, parse_options
    from accel_trainer.launch.job import plan_job, run_job

    description = "Run a script on one or several processes. Options of the script stand behind the script."
    if _wants_help(words):
        options_parser(_LAUNCH_USAGE, description).print_help()
        return 0
    options = parse_options(words, "accel-trainer launch")
    for note in options.notes:
        print(f"accel-trainer launch: {note}", file=sys.stderr)
    return run_job(plan_job(options, os.environ, words))


def _explain(words: Sequence[str]) -> int:
    from accel_trainer.launch.flags import options_parser, parse_options
    from accel_trainer.launch.reports import explain

    if _wants_help(words):
        description = "Print every option, its value and where the value came from. A script is ignored."
        options_parser(_EXPLAIN_USAGE, description).print_help()
        return 0
    print(explain(parse_options(words, "accel-trainer explain"), os.environ))
    return 0


def _env(words: Sequence[str]) -> int:
    import argparse

    from accel_trainer.launch.reports import describe_environment

    parser = argparse.ArgumentParser(
        "accel-trainer env",
        description="Print versions, devices and configuration for a bug report.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config_file", "--config-file", metavar="FILE", help="the file to report instead of the default one"
    )
    print(describe_environment(parser.parse_args(words).config_file, os.environ))
    return 0


_BLOCK_OPTIONS = ("zero_stage", "offload_optimizer_device", "offload_param_device")


def _config(words: Sequence[str]) -> int:
    import argparse

    from accel_trainer.launch.reports import write_default_config

    parser = argparse.ArgumentParser(
        "accel-trainer config",
        description="Ask a few questions and write a configuration file; `config default` asks nothing.",
        allow_abbrev=False,
    )
    parser.add_argument("--config_file", "--config-file", metavar="FILE", help="where to write instead")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    default = commands.add_parser(
        "default", help="write a file with defaults, where launch finds it", allow_abbrev=False
    )
    # Suppressed: without the option, the sub-parser would put its default over what stood before `default`.
    default.add_argument(
        "--config_file", "--config-file", metavar="FILE", default=argparse.SUPPRESS, help="where to write instead"
    )
    default.add_argument(
        "--mixed_precision", "--mixed-precision", default="no", choices=("no", "bf16", "fp16"), help="default: no"
    )
    default.add_argument(
        "--zero_stage", "--zero-stage", type=int, choices=(1, 2, 3), help="shard with DeepSpeed: its ZeRO stage"
    )
    for name, what in (("optimizer", "optimizer state"), ("param", "parameters, with stage 3,")):
        default.add_argument(
            f"--offload_{name}_device",
            f"--offload-{name}-device",
            choices=("none", "cpu"),
            help=f"with --zero_stage: where {what} are kept between uses",
        )
    arguments = parser.parse_args(words)
    if arguments.command is None:
        from accel_trainer.launch.questionnaire import run_questionnaire

        print(run_questionnaire(arguments.config_file, os.environ))
        return 0
    block = {name: value for name in _BLOCK_OPTIONS if (value := getattr(arguments, name)) is not None}
    print(write_default_config(arguments.config_file, arguments.mixed_precision, os.environ, block))
    return 0


def _test(words: Sequence[str]) -> int:
    from accel_trainer.launch.testing import run_test

    return run_test(words)


def _convert_config(words: Sequence[str]) -> int:
    from accel_trainer.launch.convert import convert_config

    return convert_config(words)


def _ckpt(words: Sequence[str]) -> int:
    from accel_trainer.launch.checkpoints import run_ckpt

    return run_ckpt(words)


def _merge_weights(words: Sequence[str]) -> int:
    from accel_trainer.launch.weights import run_merge_weights

    return run_merge_weights(words)


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "launch": (_launch, "run a script on one or several processes"),
    "test": (_test, "check processes, collectives, loaders and training as configured"),
    "config": (_config, "make a configuration file from a few answers (config default: without)"),
    "convert-config": (_convert_config, "turn a DeepSpeed configuration into one for FSDP2, or back"),
    "ckpt": (_ckpt, "list, verify, prune and export checkpoints"),
    "merge-weights": (_merge_weights, "write sharded weights as files that from_pretrained reads"),
    "explain": (_explain, "print every option, its value and where it came from"),
    "env": (_env, "print versions, devices and configuration for a bug report"),
}
