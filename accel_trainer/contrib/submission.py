"""Jobs for schedulers: a command line as a file for SLURM, Kubernetes (Kubeflow Trainer, JobSet) or SkyPilot."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from string import Template
from textwrap import indent
from typing import Any

import yaml

from accel_trainer.config import Resolved, SourceKind
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.launch.flags import Options
from accel_trainer.launch.hosts import hostfile_of
from accel_trainer.launch.job import check_job, find_command, resolve_options
from accel_trainer.runtime.launchers import DEFAULT_PORT
from accel_trainer.tracking import is_secret

_TEMPLATES = {
    "slurm": "slurm.sbatch",
    "kubernetes": "trainjob.yaml",
    "jobset": "jobset.yaml",
    "skypilot": "skypilot.yaml",
}
_SUBMITTERS = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "create", "-f", "-")}
_SUBMITTERS["jobset"] = _SUBMITTERS["kubernetes"]
_OF_THE_SCHEDULER = ("launch.machine_rank", "launch.main_process_ip", "launch.main_process_port")
_OF_THE_SCRIPT = ("nodes", "ntasks-per-node", "requeue", "signal")
"""Options of sbatch that decide how the job runs."""
_SAVE_SECONDS = 120.0
"""Seconds that ranks have without `preemption.grace_seconds`."""


@dataclass(frozen=True)
class _Job:
    """The templates of each scheduler's file."""

    kind: str
    name: str
    resolved: Resolved
    command: tuple[str, ...]
    num_machines: int
    num_local_processes: int
    resources: dict[str, str]
    """Further requests to the scheduler, by its own names."""
    image: str | None
    secrets: list[str]
    volumes: dict[str, str]
    """Source by the folder that it is mounted at."""

    @property
    def save_seconds(self) -> int:
        """Time that the ranks have from a signal to their end."""
        return math.ceil(self.resolved.config.preemption.grace_seconds or _SAVE_SECONDS)

    @property
    def num_cpus(self) -> int | None:
        """CPUs of a machine, where threads were given."""
        threads = self.resolved.config.launch.num_cpu_threads_per_process
        return None if threads is None else threads * self.num_local_processes


def run_scheduled(options: Options) -> int:
    """Print a job for a scheduler, or hand it over, without a look for devices and files of other machines."""
    kind = _kind(options)
    if kind in ("slurm", "skypilot") or not options.rest:  # the script may be in the image of a container only
        find_command(options, os.environ)
    resolved, _ = resolve_options(options, os.environ, None)
    text = job_text(options, resolved)
    check_job(resolved, None, options)
    if options.submit is None or options.dry_run:
        print(text, end="")
        return 0
    if kind not in _SUBMITTERS:
        raise ConfigError(f"--submit {kind} is not offered; --print {kind} > job.yaml, and `sky jobs launch job.yaml`")
    command = _SUBMITTERS[kind]
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"--submit runs {command[0]}, which is not on the PATH of this machine; use --print, and hand what is "
            "printed to the scheduler yourself"
        )
    return subprocess.run(command, input=text, text=True).returncode


def _kind(options: Options) -> str:
    kinds = {kind for kind in (options.print, options.submit) if kind is not None}
    if len(kinds) > 1:
        raise ConfigError(f"--print {options.print} and --submit {options.submit} are two schedulers; give one of them")
    kind = kinds.pop()
    if kind not in _TEMPLATES:
        hint = did_you_mean(kind, _TEMPLATES) or ""
        raise ConfigError(f"--print and --submit take one of {', '.join(_TEMPLATES)}, and got {kind!r}{hint}")
    return kind


def job_text(options: Options, resolved: Resolved) -> str:
    """Return the job of a command line, without its options for schedulers, as the scheduler's own file."""
    kind = _kind(options)
    launch = resolved.config.launch
    decided = [path for path in _OF_THE_SCHEDULER if path in options.flags]
    if decided:
        raise ConfigError(
            f"{', '.join(map(resolved.describe, decided))}: the scheduler tells each machine; leave it out with a job "
            f"for {kind}"
        )
    if launch.num_processes is None:
        raise ConfigError(
            f"a job for {kind} wants a number of processes, since it runs on other machines than this one; set "
            "--num_processes, over all machines"
        )
    if hostfile_of(resolved):
        raise ConfigError(
            f"deepspeed_hostfile is set ({resolved.source('deepspeed').where}), and {kind} chooses the machines; leave "
            "it out"
        )
    if kind != "slurm":
        _refuse_own_settings(options, resolved, kind)
    _refuse_secrets(options.rest, kind)
    job = _Job(
        kind=kind,
        name=_name(options.rest[0]),
        resolved=resolved,
        command=("accel-trainer", "launch", *options.words, *options.rest),
        num_machines=launch.num_machines,
        num_local_processes=launch.num_processes // launch.num_machines,
        resources=_resources(options.resources or ""),
        image=options.image,
        secrets=[name for name in (options.secret or "").split(",") if name],
        volumes=_volumes(options.volume or ""),
    )
    values = {"name": job.name, "num_machines": job.num_machines, "num_local_processes": job.num_local_processes}
    build = {"slurm": _slurm, "skypilot": _skypilot}.get(kind, _kubernetes)
    return _fill(_TEMPLATES[kind], values | build(job, options)).rstrip() + "\n"


def _name(script: str) -> str:
    """Return a job's name: letters, digits and `-`, short enough for the names of its pods to fit 63 characters."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower())[:48].strip("-")
    return name if name[:1].isalpha() else f"train-{name}".rstrip("-")


def _fill(template: str, values: dict[str, Any]) -> str:
    return Template(Path(__file__).with_name(template).read_text(encoding="utf-8")).substitute(values)


def _resources(text: str) -> dict[str, str]:
    """Return `name=value,name=value` by name; a comma that no name follows is the value's, as in `array=0-3,7`."""
    pairs = [pair.partition("=") for pair in re.split(r",(?=[\w./-]+=)", text) if pair]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ConfigError(f"--resources has {wrong[0]!r}; expected NAME=VALUE, such as memory=64Gi,cpu=8")
    return {name: value for name, _, value in pairs}


def _volumes(text: str) -> dict[str, str]:
    volumes: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        source, _, folder = pair.rpartition(":")
        if not source or not folder.startswith("/"):
            raise ConfigError(f"--volume has {pair!r}; expected SOURCE:/FOLDER, such as a claim's name, runs:/runs")
        if folder in volumes:
            raise ConfigError(f"--volume mounts {volumes[folder]!r} and {source!r} at {folder}; name two folders")
        volumes[folder] = source
    return volumes


def _refuse_own_settings(options: Options, resolved: Resolved, kind: str) -> None:
    """Refuse settings of this machine, which the job would be checked with and not run with."""
    if options.config_file is not None and not any(re.match("--config[-_]file", word) for word in options.words):
        raise ConfigError(
            f"{options.config_file} would be used here, and is on no machine of a job for {kind}; name a file that is "
            "there, or a packaged one, with --config_file"
        )
    paths = [path for path, _, source in resolved.explain() if source.kind is SourceKind.ENVIRONMENT]
    if paths:
        raise ConfigError(
            f"{', '.join(map(resolved.describe, paths))}: variables of this machine reach no machine of a job for "
            f"{kind}; give flags, or a file"
        )


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
            f"{', '.join(named)}: the value would stand in the file for {kind}, and in what the scheduler keeps of "
            "the job; leave the option out, and give the script its secrets by variables of the environment, such as "
            "HF_TOKEN (under Kubernetes and SkyPilot by --secret)"
        )


def _slurm(job: _Job, options: Options) -> dict[str, Any]:
    unused = {"image": job.image, "secret": job.secrets, "volume": job.volumes}
    if given := [f"--{name}" for name, value in unused.items() if value]:
        raise ConfigError(
            f"{', '.join(given)}: a job for slurm runs on its nodes, with the environment that sbatch is called in; "
            "leave it out"
        )
    if taken := [name for name in job.resources if name in _OF_THE_SCRIPT]:
        raise ConfigError(
            f"--resources has {', '.join(taken)}, which the job itself decides (by --num_machines, and to save before "
            "its time is over); leave it out"
        )
    lines = [] if job.resolved.config.use_cpu else [f"#SBATCH --gpus-per-node={job.num_local_processes}"]
    if job.num_cpus is None:
        # A task would get one core; the step of an exclusive job that binds nothing has all of the machine.
        lines.append("#SBATCH --exclusive")
        binding = "--cpu-bind=none"
    else:
        lines.append(f"#SBATCH --cpus-per-task={job.num_cpus}")
        binding = f"--cpus-per-task={job.num_cpus}"  # srun does not take over sbatch's
    lines += [
        f'#SBATCH --{name}="{value}"' if re.search(r"\s", value) else f"#SBATCH --{name}={value}"
        for name, value in job.resources.items()
    ]
    return {
        "resources": "\n".join(lines),
        "log": "%x-%A_%a.log" if "array" in job.resources else "%x-%j.log",
        "signal_seconds": job.save_seconds + 60,
        "binding": binding,
        "command": shlex.join(job.command),
    }


def _kubernetes(job: _Job, options: Options) -> dict[str, Any]:
    if job.image is None:
        raise ConfigError(f"a job for {job.kind} wants the container's image; give it with --image")
    labels, variables = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}, []
    if job.kind == "jobset":  # what Kubeflow's operator tells each machine
        labels, variables = {"app": job.name}, _machine_variables(job)
    mounts, volumes = _claims(job)
    node_job = _fill(
        "node_job.yaml",
        {
            "num_machines": job.num_machines,
            "backoff_limit": 3 * job.num_machines,
            "grace_seconds": job.save_seconds + 30,
            "save_seconds": job.save_seconds,
            "labels": json.dumps(labels),
            "image": json.dumps(job.image),
            # $(NAME) is a variable, $$ a $. No escapes: those of JSON for emojis are two, which YAML does not take.
            "command": json.dumps([word.replace("$", "$$") for word in job.command], ensure_ascii=False),
            "variables": json.dumps(variables),
            "secrets": json.dumps([{"secretRef": {"name": name}} for name in job.secrets]),
            "resources": json.dumps(_container_resources(job)),
            "mounts": mounts,
            "volumes": volumes,
        },
    )
    return {"node_job": indent(node_job.rstrip(), " " * (2 if job.kind == "jobset" else 6))}


def _container_resources(job: _Job) -> dict[str, Any]:
    gpus = {} if job.resolved.config.use_cpu else {"nvidia.com/gpu": job.num_local_processes}
    return {"limits": gpus | job.resources, "requests": {} if job.num_cpus is None else {"cpu": job.num_cpus}}


def _claims(job: _Job) -> tuple[str, str]:
    """Return the lines of a container's mounts, and of its pod's volumes."""
    mounts, volumes = "", ""
    for index, (folder, claim) in enumerate(job.volumes.items()):
        mounts += f"\n{' ' * 18}- {{name: volume-{index}, mountPath: {folder}}}"
        volumes += f"\n{' ' * 14}- name: volume-{index}\n{' ' * 16}persistentVolumeClaim: {{claimName: {claim}}}"
    return mounts, volumes


def _machine_variables(job: _Job) -> list[dict[str, Any]]:
    """Return torchrun's variables for a pod of a JobSet, which the launcher reads."""
    rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    values = {
        "PET_NNODES": str(job.num_machines),
        "PET_NPROC_PER_NODE": str(job.num_local_processes),
        "PET_MASTER_ADDR": f"{job.name}-node-0-0.{job.name}",
        "PET_MASTER_PORT": str(DEFAULT_PORT),
    }
    return [{"name": name, "value": value} for name, value in values.items()] + [
        {"name": "PET_NODE_RANK", "valueFrom": rank}
    ]


def _skypilot(job: _Job, options: Options) -> dict[str, Any]:
    try:
        resources: dict[str, Any] = {name: yaml.safe_load(value) for name, value in job.resources.items()}
    except yaml.YAMLError as error:
        raise ConfigError(f"--resources has a value that is no YAML: {error}; put it in quotes of its own") from None
    if not job.resolved.config.use_cpu:
        name, _, count = job.resources.get("accelerators", "").partition(":")
        if not name or count not in ("", str(job.num_local_processes)):
            found = f"has accelerators={name}:{count}" if name else "has no accelerators"
            raise ConfigError(
                f"--resources {found}, and a machine of this job for skypilot has {job.num_local_processes} GPU(s); "
                f"give their name: --resources accelerators=H100"
            )
        resources["accelerators"] = f"{name}:{job.num_local_processes}"
    if job.num_cpus is not None:
        resources.setdefault("cpus", f"{job.num_cpus}+")
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    resources["job_recovery"] = {"max_restarts_on_errors": 3, "recover_on_exit_codes": [85]}
    machines = ""
    if job.num_machines > 1:
        machines = (
            '--machine_rank "$SKYPILOT_NODE_RANK" --main_process_ip "$(echo "$SKYPILOT_NODE_IPS" | head -n1)" '
            f"--main_process_port {DEFAULT_PORT} "
        )
    words = shlex.join(job.command[2:])
    # Writes of other modes lack the rename that commits a checkpoint.
    mounts = {folder: {"source": source, "mode": "MOUNT_CACHED"} for folder, source in job.volumes.items()}
    return {
        "resources": json.dumps(resources),
        "volumes": json.dumps(mounts),
        "secrets": json.dumps(dict.fromkeys(job.secrets)),
        "command": indent(f"exec accel-trainer launch {machines}{words}", "  "),
    }
