"""What the command line tells: where options came from, what this machine is; and the file it writes for a start."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from accel_trainer.config import MixedPrecision, RunConfig, read_file, to_file_dict
from accel_trainer.errors import ConfigError
from accel_trainer.launch.flags import Options
from accel_trainer.launch.job import default_config_path, resolve_options
from accel_trainer.tracking import mask_secrets

__all__ = ["describe_environment", "explain", "write_default_config"]

_PACKAGES = ("torch", "numpy", "transformers", "datasets", "evaluate", "safetensors", "huggingface_hub", "deepspeed")
_REPORTED_PREFIXES = (
    "ACCEL_TRAINER_",
    "ACCELERATE_",
    "FSDP_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "CUDA_VISIBLE_DEVICES",
    "MASTER_",
)


def explain(options: Options, environ: Mapping[str, str]) -> str:
    """Return a table of every option, its value and where it came from, and the remarks of the files that were read.

    Raises:
        ConfigError: a source is wrong; the same error that `launch` would report.
    """
    resolved, _ = resolve_options(options, environ)
    rows = [
        ("option", "value", "from"),
        *((path, _text(value), source.where) for path, value, source in resolved.explain() if path != "deepspeed"),
        *((path, _text(_masked(path, value)), source.where) for path, value, source in resolved.explain_block()),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{path:<{widths[0]}}  {value:<{widths[1]}}  {where}" for path, value, where in rows]
    return "\n".join([*lines, *(f"note: {note}" for note in (*options.notes, *resolved.notes))])


def _masked(path: str, value: Any) -> Any:
    """Hide a key of a service, such as `deepspeed.comet.api_key`."""
    name = path.rpartition(".")[2]
    return mask_secrets({name: value})[name]


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, str) and not isinstance(value, StrEnum) and not value:
        return "''"
    return str(dict(value)) if isinstance(value, Mapping) else str(value)


def write_default_config(
    file: str | None, mixed_precision: str, environ: Mapping[str, str], deepspeed: Mapping[str, Any] | None = None
) -> str:
    """Write a small configuration file to start from, and return a line that says where.

    Args:
        deepspeed: `zero_stage` and offload devices of a DeepSpeed job; empty for other jobs.

    Raises:
        ConfigError: an offload has no stage that can do it; the file exists (it is left as it is), has another suffix
            than .yaml or .yml, or cannot be written.
    """
    path = Path(file).expanduser() if file else default_config_path(environ)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path} would be written as YAML; give it the suffix .yaml")
    config = RunConfig(mixed_precision=MixedPrecision(mixed_precision))
    precision = to_file_dict(config, full=True)["mixed_precision"]
    strategy = "deepspeed" if deepspeed else "auto"
    text = _START_OF_FILE.format(precision=precision, strategy=strategy) + _block_text(deepspeed or {})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as target:
            target.write(text)
    except OSError as error:
        if path.exists():
            raise ConfigError(
                f"{path} exists and was left as it is; remove it first, or name another file with --config_file"
            ) from None
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; name another file with --config_file"
        ) from error
    return f"configuration written to {path}"


_START_OF_FILE = """\
# Every option with its value and source: accel-trainer explain. What each one does: accel-trainer launch --help.
strategy: {strategy}  # auto, single, ddp, fsdp2, deepspeed
mixed_precision: '{precision}'  # 'no', bf16, fp16
use_cpu: false
accumulation:
  num_steps: 1
launch:
  num_processes: null  # one for each device; on the CPU: one
  num_machines: 1
"""


def _block_text(deepspeed: Mapping[str, Any]) -> str:
    needed = {"offload_optimizer_device": 1, "offload_param_device": 3}
    for name, stage in needed.items():
        if deepspeed.get(name, "none") != "none" and deepspeed.get("zero_stage", 0) < stage:
            raise ConfigError(
                f"--{name} is {deepspeed[name]} and --zero_stage {deepspeed.get('zero_stage', 'is not set')}; it needs "
                f"--zero_stage {'1, 2 or 3' if stage == 1 else stage}"
            )
    return (
        "".join(["deepspeed:\n", *(f"  {name}: {value}\n" for name, value in deepspeed.items())]) if deepspeed else ""
    )


def describe_environment(file: str | None, environ: Mapping[str, str]) -> str:
    """Return versions, devices, variables and the configuration file, as a block to paste into a bug report."""
    lines = [f"- {name}: {value}" for name, value in _facts()]
    variables = {name: value for name, value in sorted(environ.items()) if name.startswith(_REPORTED_PREFIXES)}
    lines += [f"- {name}: {value}" for name, value in mask_secrets(variables).items()]
    lines.append(_config_lines(file, environ))
    return "\n".join(["Copy this into the bug report:", "", *lines])


def _facts() -> Iterator[tuple[str, str]]:
    yield "accel_trainer", _version("accel-trainer")
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield "CPU cores", str(os.cpu_count())
    for package in _PACKAGES:
        yield package, _version(package)
    yield "accelerate (not used)", _version("accelerate")
    yield from _device_facts()


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


def _config_lines(file: str | None, environ: Mapping[str, str]) -> str:
    path = Path(file) if file else default_config_path(environ)
    if not file and not path.is_file():
        return f"- configuration: none ({path} does not exist)"
    try:
        content = mask_secrets(read_file(str(path)).content)
    except ConfigError as error:
        return f"- configuration: {error}"
    return "\n".join([f"- configuration: {path}", *(f"    {key}: {value}" for key, value in content.items())])
