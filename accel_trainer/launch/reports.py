"""`accel-trainer explain` and `accel-trainer env`: where options came from, and the facts for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from accel_trainer.config import read_file
from accel_trainer.errors import ConfigError
from accel_trainer.launch.cli import add_option, command_parser
from accel_trainer.launch.config_file import default_config_path, find_default_config
from accel_trainer.launch.flags import print_help
from accel_trainer.launch.job import check_job, option_rows, read_options, resolve_options
from accel_trainer.launch.machine import device_files
from accel_trainer.launch.outer_job import find_outer_job, refuse_nesting
from accel_trainer.tracking import mask_secrets, redact

_PACKAGES = ("torch", "numpy", "transformers", "datasets", "evaluate", "safetensors", "huggingface_hub", "deepspeed")
_REPORTED = re.compile(r"(ACCEL_TRAINER|ACCELERATE|FSDP|NCCL|GLOO|OMP|MASTER)_|CUDA_VISIBLE_DEVICES")


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
    check_job(resolved, outer, options, words)
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
    """Yield what a bug report begins with: versions, and devices, by torch or by the files of their drivers."""
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
