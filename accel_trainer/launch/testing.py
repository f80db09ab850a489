"""`accel-trainer test`: a small job that shows whether this machine and its configuration can train."""

from __future__ import annotations

import os
from collections.abc import Sequence

from accel_trainer.errors import ConfigError
from accel_trainer.launch.flags import options_parser, parse_options
from accel_trainer.launch.job import count_devices, plan_job, resolve_options, run_job

__all__ = ["run_test"]

_COMMAND = "accel-trainer test"
_SCRIPT = "accel_trainer.launch.self_check"


def run_test(words: Sequence[str]) -> int:
    """Launch the checks with the options of `launch`; return 0 where all hold, else the code of the first that failed.

    As many processes as are configured; else one for each device, and two where there is none.

    Raises:
        ConfigError: a script was given, or the job as configured cannot run.
    """
    if words and words[0] in ("-h", "--help"):
        description = "Start a small job as configured, and check processes, collectives, loaders and training."
        options_parser(f"{_COMMAND} [options as for launch]", description).print_help()
        return 0
    options = parse_options(words, _COMMAND)
    if options.rest or options.is_module or options.no_python:
        raise ConfigError(f"{_COMMAND} has a script of its own and takes none; to start yours: accel-trainer launch")
    config = resolve_options(options, os.environ)[0].config
    is_open = config.launch.num_processes is None and config.strategy != "single"
    if is_open and not count_devices(config.use_cpu, config.launch.gpu_ids):
        options.flags["launch.num_processes"] = 2 * config.launch.num_machines
    options.is_module, options.rest = True, (_SCRIPT,)
    return run_job(plan_job(options, os.environ, [*words, _SCRIPT]))
