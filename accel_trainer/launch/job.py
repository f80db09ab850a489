"""`accel-trainer launch` and `accel-trainer test`: from a command line to a job, and its start.

Everything that can be wrong is reported here, before the first process starts.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from accel_trainer.config import LaunchConfig, Resolved, RunConfig, Source, SourceKind, read_file, resolve
from accel_trainer.config.dialects.environment import LAUNCH_VARIABLE, PRECISION_VARIABLE, without_launch
from accel_trainer.config.parallel import axis_sizes
from accel_trainer.config.validation import UNUSED_UNDER, show_plain
from accel_trainer.errors import MISSING_TORCHAO, ConfigError
from accel_trainer.launch.cli import load_command
from accel_trainer.launch.config_file import find_default_config
from accel_trainer.launch.flags import OF_JOBS, Options, parse_options, print_help
from accel_trainer.launch.hosts import HostJob, agent_options, plan_hosts, run_on_hosts
from accel_trainer.launch.machine import (
    VISIBLE_DEVICES,
    check_gpu_ids,
    check_meeting,
    count_devices,
    count_tpus,
    describe_tpu_variables,
    find_interface,
)
from accel_trainer.launch.outer_job import OuterJob, find_outer_job, refuse_nesting
from accel_trainer.registry import load_strategy
from accel_trainer.runtime.cores import usable_cores
from accel_trainer.tracking import mask_secrets, redact

# Left by an outer launcher or a job template; the workers get their own, a single process gets none.
_RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
# The strategies that a process without a group can run; the capabilities of any other cost an import of torch.
_WITHOUT_GROUP = ("auto", "single")
UNBOUND = ("ddp", "fsdp2")
"""Strategies for any number of processes that check no configuration: to ask them costs an import of torch, too."""
_CHECKS = "accel_trainer.contrib.self_check"
STAND_IN = str(Path(__file__).resolve().parents[1] / "stand_in")
"""The folder in which Python finds this package as `accelerate`, with the metadata of the release it stands for."""


@dataclass(frozen=True, slots=True)
class Job:
    """The processes that this machine starts, with the configuration they were planned from."""

    resolved: Resolved
    command: tuple[str, ...]
    environment: Mapping[str, str]
    num_local_processes: int
    needs_group: bool
    """False: the command replaces this process. True: torch's elastic agent starts the workers."""
    hosts: HostJob | None = None
    """Machines of a hostfile, whose workers DeepSpeed's runner starts instead."""
    outer: OuterJob | None = None
    """The job of a scheduler that this one is a share of."""


def run_launch(words: Sequence[str]) -> int:
    """Run `accel-trainer launch` and return the exit code of the job."""
    command = "accel-trainer launch"
    description = "Run a script on one or several processes. Options of the script stand behind the script."
    if print_help(words, command, "[options] script.py [options of the script]", description):
        return 0
    options = _read_and_print_notes(words, command)
    if options.print or options.submit:
        code: int = load_command("contrib.submission:run_scheduled")(options)
        return code
    if given := [f"--{name}" for name in OF_JOBS if getattr(options, name) is not None]:
        raise ConfigError(f"{', '.join(given)}: for a job that a scheduler starts; add --print or --submit")
    return _run_or_print(plan_job(options, os.environ), options)


def _run_or_print(job: Job, options: Options) -> int:
    if not options.dry_run:
        return run_job(job)
    _print_job(job)
    return 0


def run_test(words: Sequence[str]) -> int:
    """Launch the checks as configured, on two processes without devices; return 0 or the code of the first failure."""
    command = "accel-trainer test"
    description = "Start a small job as configured, and check processes, collectives, loaders and training."
    if print_help(words, command, "[options as for launch]", description):
        return 0
    options = _read_and_print_notes(words, command)
    if options.rest or options.module or options.no_python:
        raise ConfigError(f"{command} has a script of its own and takes none; to start yours: accel-trainer launch")
    if given := [f"--{name}" for name in ("print", "submit", *OF_JOBS) if getattr(options, name)]:
        raise ConfigError(f"{', '.join(given)}: {command} starts its job here; to have a scheduler start yours: launch")
    config = resolve_options(options, os.environ, find_outer_job(os.environ))[0].config
    is_open = config.launch.num_processes is None and config.strategy != "single"
    if is_open and not count_devices(config.use_cpu, config.launch.gpu_ids):
        options.flags["launch.num_processes"] = 2 * config.launch.num_machines
    options.module, options.rest = True, (_CHECKS,)
    return _run_or_print(plan_job(options, os.environ), options)


def read_options(words: Sequence[str], command: str, environ: Mapping[str, str]) -> Options:
    """Return a command line, taken apart, with the configuration file used by default, which a note names."""
    options = parse_options(words, command)
    if options.config_file is None:
        path, note = find_default_config(environ)
        if path is not None:
            options.config_file, options.notes = str(path), (*options.notes, note)
    return options


def _read_and_print_notes(words: Sequence[str], command: str) -> Options:
    options = read_options(words, command, os.environ)
    for note in options.notes:
        print(f"{command}: {note}", file=sys.stderr)
    return options


def resolve_options(options: Options, environ: Mapping[str, str], outer: OuterJob | None) -> tuple[Resolved, str]:
    """Return the configuration, and the text of ACCEL_TRAINER_LAUNCH with which the workers come to the same one."""
    file = options.config_file
    if file is not None and os.path.isfile(file):
        file = os.path.abspath(file)
    content = None if file is None else read_file(file)
    resolved = resolve(
        flags=options.flags,
        flags_spelled=options.spelled,
        environ=without_launch(environ),
        file=content,
        surroundings=None if outer is None else outer.layer(),
    )
    if outer is not None:
        outer.check(resolved, content)
    return resolved, json.dumps({"config_file": file, "flags": options.flags, "spelled": options.spelled})


def plan_job(options: Options, environ: Mapping[str, str]) -> Job:
    """Return the job that a command line asks for, checked."""
    environ = without_launch(environ)
    command = find_command(options, environ)
    refuse_nesting(environ)
    outer = find_outer_job(environ)
    resolved, launch_text = resolve_options(options, environ, outer)
    hosts, num_processes = check_job(resolved, outer, options)
    is_rank = outer is not None and outer.rank is not None
    launch = resolved.config.launch
    needs_group = not is_rank and _needs_group(resolved, num_processes)
    if needs_group and hosts is None:
        check_meeting(launch)
    if (needs_group or is_rank) and command[0] == sys.executable:
        command = (command[0], "-u", *command[1:])
    num_local = num_processes // launch.num_machines if hosts is None else hosts.num_local_processes
    interface = _interface(launch, hosts) if needs_group else None
    environment = worker_environment(environ, resolved, launch_text, num_local, interface)
    if options.as_accelerate:
        environment = with_stand_in(environment)
    if is_rank:
        environment |= _rank_variables(environ, resolved)
    return Job(resolved, command, environment, num_local, needs_group, hosts, outer)


def _rank_variables(environ: Mapping[str, str], resolved: Resolved) -> dict[str, str]:
    """Return what a scheduler says of its rank: above a file, and below flags."""
    variables = {name: environ[name] for name in _RANK_VARIABLES if name in environ}
    for name, path in (("MASTER_ADDR", "launch.main_process_ip"), ("MASTER_PORT", "launch.main_process_port")):
        kind = resolved.source(path).kind
        if kind is SourceKind.CLI or (kind is SourceKind.FILE and name not in environ):
            variables[name] = str(resolved.value(path))
    return variables


def _interface(launch: LaunchConfig, hosts: HostJob | None) -> str | None:
    """Return the network interface by which the processes reach each other; None leaves it to their library."""
    if hosts is not None:
        return find_interface(None) if hosts.is_here else None
    return find_interface(None if launch.num_machines == 1 else launch.main_process_ip)


def _needs_group(resolved: Resolved, num_processes: int) -> bool:
    """Whether torch's agent has to start the processes: several, one with a group, or one that it watches."""
    config = resolved.config
    is_alone = num_processes == 1 and config.launch.num_machines == 1 and config.strategy in _WITHOUT_GROUP
    return not is_alone or bool(agent_options(resolved))


def check_job(resolved: Resolved, outer: OuterJob | None, options: Options) -> tuple[HostJob | None, int]:
    """Return the machines of a hostfile, if there is one, and the number of processes over all machines."""
    for section in ("fsdp", "deepspeed"):
        given = [path for path in options.flags if path.partition(".")[0] == section]
        if given and resolved.config.strategy in UNUSED_UNDER[section]:
            names = ", ".join(resolved.source(path).where for path in given)
            raise ConfigError(
                f"{names}: without effect with {resolved.describe('strategy')}; add --use_{section}, or remove them"
            )
    hosts = plan_hosts(resolved)
    if outer is not None:
        outer.check_starter(resolved, hosts)
    num_processes = _num_processes(resolved) if hosts is None else hosts.num_processes
    if resolved.config.mixed_precision == "fp8" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"{resolved.describe('mixed_precision')}: {MISSING_TORCHAO}")
    _check_strategy(resolved, num_processes)
    _check_restarts(resolved)
    return hosts, num_processes


def option_rows(resolved: Resolved) -> list[tuple[str, str, Source]]:
    """Return (dotted path, value, source) of every option for a person; keys of services are masked."""
    rows = []
    for path, value, source in [row for row in resolved.explain() if row[0] != "deepspeed"] + resolved.explain_block():
        name = path.rpartition(".")[2]
        value = mask_secrets({name: value})[name]
        rows.append((path, str(value) if isinstance(value, list | dict) else show_plain(value) or "''", source))
    return rows


def _print_job(job: Job) -> None:
    """Print the command, the environment and the options of a job that is not started."""
    launch = job.resolved.config.launch
    lines = [
        f"command: {shlex.join(job.command)}",
        f"processes here: {job.num_local_processes} (machine {launch.machine_rank} of {launch.num_machines})",
    ]
    if job.outer is not None:
        lines.append(job.outer.describe())
    if job.hosts is not None:
        lines.append(f"machines of {job.hosts.hostfile}: {', '.join(job.hosts.hosts)}, by {job.hosts.launcher}")
    for name in sorted({*os.environ, *job.environment}):
        value = job.environment.get(name)
        if value != os.environ.get(name):
            lines.append(f"variable: {name} is removed" if value is None else f"variable: {name}={value}")
    if job.needs_group and not job.resolved.config.use_cpu and count_tpus():
        lines.append(describe_tpu_variables(launch.num_machines, job.num_local_processes))
    lines += [
        f"option: {path}={text} (from {source.where})"
        for path, text, source in option_rows(job.resolved)
        if source.kind is not SourceKind.DEFAULT
    ]
    print(redact("\n".join(lines)))


def run_job(job: Job) -> int:
    """Start the job and return its exit code. One process without a group takes the place of this one: no return."""
    sys.stdout.flush()
    sys.stderr.flush()
    if job.outer is not None:
        print(f"accel-trainer launch: {job.outer.describe()}", file=sys.stderr, flush=True)
    if job.hosts is not None:
        return run_on_hosts(job.hosts, job.command, job.environment)
    check_gpu_ids(job.resolved, os.environ)
    if job.needs_group:
        from accel_trainer.launch.torchrun import AgentJob, run_workers

        launch, use_cpu = job.resolved.config.launch, job.resolved.config.use_cpu
        return run_workers(AgentJob(job.command, job.environment, job.num_local_processes, launch, use_cpu))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program would inherit that
    try:
        os.execvpe(job.command[0], job.command, dict(job.environment))
    except OSError as error:
        raise ConfigError(
            f"{job.command[0]!r} cannot be started: {error.strerror}; check the name and its rights"
        ) from error


def find_command(options: Options, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the program that every process runs, with its arguments."""
    if not options.rest:
        raise ConfigError(
            "no script to launch; usage: accel-trainer launch [options] script.py [options of the script]"
        )
    script = options.rest[0]
    if options.module and options.no_python:
        raise ConfigError(
            "--module runs a module with python, and --no_python runs without python; give one of the two"
        )
    if options.module:
        _check_module(script, environ)
        return (sys.executable, "-m", *options.rest)
    if options.no_python:
        if shutil.which(script) is None:
            raise ConfigError(
                f"program {script!r} is not found or not executable; with --no_python the script is a program"
            )
        return options.rest
    if not os.path.exists(script):
        hint = "; for a module, add -m" if not script.endswith(".py") else ""
        raise ConfigError(f"script {script!r} does not exist (looked from {os.getcwd()}); check the path{hint}")
    return (sys.executable, *options.rest)


def _check_module(name: str, environ: Mapping[str, str]) -> None:
    """Refuse a module that `python -m` will not find. Its packages are looked up, and not imported."""
    path: Sequence[str] = ["", *environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    for position, _ in enumerate(name.split("."), start=1):
        part = ".".join(name.split(".")[:position])
        spec = PathFinder.find_spec(part, path)
        if spec is None and position == 1 and importlib.util.find_spec(part) is not None:
            return  # built in, or found by an import hook
        if spec is None:
            raise ConfigError(
                f"module {name!r} is not found (there is no {part!r}; looked from {os.getcwd()}); check the name, or "
                "leave out -m for a script"
            )
        path = list(spec.submodule_search_locations or ())


def with_stand_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program in which `import accelerate` gives this package, also in those it starts."""
    others = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", STAND_IN)]
    return {**environ, "PYTHONPATH": os.pathsep.join([STAND_IN, *others])}


def _num_processes(resolved: Resolved) -> int:
    """Return the number of processes over all machines: `num_processes`, else one for each device."""
    config = resolved.config
    if config.strategy == "single" or config.launch.num_processes is not None:
        return config.launch.num_processes or 1
    return config.launch.num_machines * max(1, count_devices(config.use_cpu, config.launch.gpu_ids))


def _check_strategy(resolved: Resolved, num_processes: int) -> None:
    strategy = resolved.config.strategy
    source = resolved.source("launch.num_processes").where
    if not resolved.is_set("launch.num_processes"):
        use_cpu = resolved.config.use_cpu
        count = count_devices(use_cpu, resolved.config.launch.gpu_ids)
        source = f"num_processes is not set, and {'--cpu leaves' if use_cpu else 'this machine has'} {count} device(s)"
    if strategy == "single" and num_processes > 1:
        raise ConfigError(
            f"{resolved.describe('strategy')} is one process, and {num_processes} were asked for ({source}); "
            "set strategy to auto, ddp or fsdp2, or num_processes to 1"
        )
    axis_sizes(resolved.config, resolved.describe, num_processes, resolved.config.launch.num_machines)
    if strategy in (*_WITHOUT_GROUP, *UNBOUND):
        return
    loaded = load_strategy(strategy)
    loaded.check_config(resolved, num_processes)
    most = loaded.capabilities.max_world_size
    if most is not None and num_processes > most:
        raise ConfigError(
            f"{resolved.describe('strategy')} runs at most {most} process(es), and this job has "
            f"{num_processes} ({source}); set num_processes, or another strategy"
        )


def _check_restarts(resolved: Resolved) -> None:
    """Refuse restarts on fewer processes where there are none, or where some job of that size cannot run."""
    launch, describe = resolved.config.launch, resolved.describe
    if launch.min_processes is None:
        return
    fewest = describe("launch.min_processes")
    if launch.max_restarts == 0:
        raise ConfigError(
            f"{fewest} is for workers that are started again, and {describe('launch.max_restarts')} starts none; set "
            "max_restarts, or give num_processes one number"
        )
    if launch.num_machines > 1 and launch.min_machines is None:
        raise ConfigError(
            f"{fewest} with {describe('launch.num_machines')}, each of which starts as many processes as the others: "
            "a job goes on with fewer on one machine, or without a machine; give num_processes one number, or "
            "num_machines MIN:MAX, too"
        )
    if resolved.config.strategy not in (*_WITHOUT_GROUP, *UNBOUND):
        load_strategy(resolved.config.strategy).check_config(resolved, launch.min_processes)


def worker_environment(
    environ: Mapping[str, str], resolved: Resolved, launch_text: str, num_local: int, interface: str | None
) -> dict[str, str]:
    """Return the environment of the started processes: ours, without ranks of others, with the launcher's decisions.

    Args:
        launch_text: the value of ACCEL_TRAINER_LAUNCH.
        num_local: processes of the job on this machine.
        interface: the one through which the ranks of a process group reach each other; None leaves that to torch.
    """
    launch = resolved.config.launch
    variables = {
        name: value
        for name, value in environ.items()
        if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    variables |= _decisions(environ, resolved, launch_text)
    if resolved.config.strategy == "deepspeed" and resolved.config.use_cpu:
        # DeepSpeed takes the accelerator that it finds, whatever the job runs on.
        variables["DS_ACCELERATOR"] = "cpu"
    if launch.gpu_ids != "all" and not resolved.config.use_cpu:
        variables |= dict.fromkeys(VISIBLE_DEVICES, launch.gpu_ids)
    if launch.num_cpu_threads_per_process is not None:
        variables["OMP_NUM_THREADS"] = str(launch.num_cpu_threads_per_process)
    elif num_local > 1:
        # N ranks with a full thread pool each run slower than one.
        variables.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_local)))
    return _interface_variables(launch, interface) | _agent_variables(resolved.config) | variables


def _agent_variables(config: RunConfig) -> dict[str, str]:
    """Return the variables by which torch's agent, and its workers, are told of our options."""
    grace, launch, found = config.preemption.grace_seconds, config.launch, {}
    if grace is not None:
        found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(grace))
    if launch.num_machines > 1 and launch.rdzv_backend == "c10d":
        # torch's agent (2.15, dynamic_rendezvous.py) keeps the address of the first round's rank 0 for all rounds.
        found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return found


def _decisions(environ: Mapping[str, str], resolved: Resolved, launch_text: str) -> dict[str, str]:
    """Return the variables of this package, and the precision for scripts that look for it where accelerate has it."""
    precision = str(resolved.config.mixed_precision)
    if not resolved.is_set("mixed_precision") or environ.get(PRECISION_VARIABLE) == precision:
        return {LAUNCH_VARIABLE: launch_text}
    exported = {PRECISION_VARIABLE: precision}
    return {**exported, LAUNCH_VARIABLE: json.dumps({**json.loads(launch_text), "exported": exported})}


def _interface_variables(launch: LaunchConfig, interface: str | None) -> dict[str, str]:
    if interface is None:
        return {}
    nccl = {"NCCL_SOCKET_IFNAME": f"={interface}"}  # without =, any whose name begins like that
    return {"GLOO_SOCKET_IFNAME": interface, **(nccl if launch.num_machines > 1 else {})}
