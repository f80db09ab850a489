"""Jobs for schedulers: a command line as a script for SLURM's sbatch, or as a PyTorchJob for Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from string import Template

from accel_trainer.config import Resolved
from accel_trainer.errors import ConfigError
from accel_trainer.launch.flags import Options
from accel_trainer.launch.hosts import hostfile_of
from accel_trainer.launch.job import check_job, find_command, resolve_options
from accel_trainer.tracking import is_secret

_TEMPLATES = {"slurm": "slurm.sbatch", "kubernetes": "pytorchjob.yaml"}
_OF_THE_SCHEDULER = ("launch.machine_rank", "launch.main_process_ip", "launch.main_process_port")
_WORKERS = """\
    Worker:
      replicas: {replicas}
      restartPolicy: OnFailure
      template: *pod"""


def run_scheduled(options: Options) -> int:
    """Print a job for a scheduler, or hand it over, without a look for devices and files of other machines."""
    if options.slurm:  # the script may be in the image of a container only
        find_command(options, os.environ)
    resolved, _ = resolve_options(options, os.environ, None)
    text = job_text(options, resolved)
    check_job(resolved, None, options)
    if not options.submit or options.dry_run:
        print(text, end="")
        return 0
    command = ("sbatch",) if options.slurm else ("kubectl", "create", "-f", "-")
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"--submit runs {command[0]}, which is not on the PATH of this machine; leave --submit out, and hand what "
            "is printed to the scheduler yourself"
        )
    return subprocess.run(command, input=text, text=True).returncode


def job_text(options: Options, resolved: Resolved) -> str:
    """Return the job of a command line, without its options for schedulers, as the scheduler's own file."""
    if options.slurm and options.kubernetes:
        raise ConfigError("--slurm and --kubernetes are two schedulers; give one of them")
    kind = "slurm" if options.slurm else "kubernetes"
    launch = resolved.config.launch
    decided = [path for path in _OF_THE_SCHEDULER if path in options.flags]
    if decided:
        raise ConfigError(
            f"{', '.join(map(resolved.describe, decided))}: the scheduler tells each machine; leave it out with "
            f"--{kind}"
        )
    if launch.num_processes is None:
        raise ConfigError(
            f"--{kind} wants a number of processes, since the job runs on other machines than this one; set "
            "--num_processes, over all machines"
        )
    if hostfile_of(resolved):
        raise ConfigError(
            f"deepspeed_hostfile is set ({resolved.source('deepspeed').where}), and with --{kind} the scheduler "
            "chooses the machines; leave it out"
        )
    _refuse_secrets(options.rest, kind)
    num_local = launch.num_processes // launch.num_machines
    name = re.sub(r"[^a-z0-9]+", "-", Path(options.rest[0]).stem.lower()).strip("-") or "train"
    command = ["accel-trainer", "launch", *options.words, *options.rest]
    values = {"name": name, "num_machines": launch.num_machines, "num_local_processes": num_local}
    values |= _slurm(resolved, num_local, command) if kind == "slurm" else _kubernetes(options, resolved, command)
    text = Path(__file__).with_name(_TEMPLATES[kind]).read_text(encoding="utf-8")
    return Template(text).substitute(values).rstrip() + "\n"


def _refuse_secrets(words: Sequence[str], kind: str) -> None:
    """Refuse a script's options that would leave a secret in the scheduler's file and accounts."""
    named = []
    for word, following in pairwise([*words, ""]):
        name, _, value = word.partition("=")
        value = value or following
        # What ends with _key is often a column's name.
        is_drawn = not name.endswith("key") or re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])\S{12,}", value)
        if is_secret(name) and value and not value.startswith("-") and is_drawn:
            named.append(name)
    if named:
        raise ConfigError(
            f"{', '.join(named)}: the value would stand in the file of --{kind}, and in what the scheduler keeps of "
            "the job; leave the option out, and give the script its secrets by variables of the environment, such as "
            "HF_TOKEN (under Kubernetes from a Secret)"
        )


def _slurm(resolved: Resolved, num_local: int, command: Sequence[str]) -> dict[str, str]:
    config = resolved.config
    lines = [] if config.use_cpu else [f"#SBATCH --gpus-per-node={num_local}"]
    threads = config.launch.num_cpu_threads_per_process
    if threads is None:
        # A task would get one core; the step of an exclusive job that binds nothing has all of the machine.
        lines.append("#SBATCH --exclusive")
        binding = "--cpu-bind=none"
    else:
        lines.append(f"#SBATCH --cpus-per-task={threads * num_local}")
        binding = f"--cpus-per-task={threads * num_local}"  # srun does not take over sbatch's
    return {"resources": "\n".join(lines), "binding": binding, "command": shlex.join(command)}


def _kubernetes(options: Options, resolved: Resolved, command: Sequence[str]) -> dict[str, str]:
    if options.image is None:
        raise ConfigError("--kubernetes wants the container's image; give it with --image")
    if options.config_file is not None and not any(re.match("--config[-_]file", word) for word in options.words):
        raise ConfigError(
            f"{options.config_file} would be used here, and is in no container; name a file of the image, or a "
            "packaged one, with --config_file"
        )
    config = resolved.config
    num_local = (config.launch.num_processes or 1) // config.launch.num_machines
    threads = config.launch.num_cpu_threads_per_process
    limits = {} if config.use_cpu else {"nvidia.com/gpu": num_local}
    requests = {} if threads is None else {"cpu": threads * num_local}
    replicas = config.launch.num_machines - 1
    return {
        "image": json.dumps(options.image),
        "command": json.dumps(list(command)),
        "resources": json.dumps({"limits": limits, "requests": requests}),
        "workers": _WORKERS.format(replicas=replicas) if replicas else "",
    }
