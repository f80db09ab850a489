"""Jobs on the machines of a hostfile, started by DeepSpeed's own runner once all it could find wrong is checked."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_trainer.config import Resolved, SourceKind, field_specs
from accel_trainer.config.deepspeed_block import LAUNCH_FIELDS
from accel_trainer.config.dialects.environment import LAUNCH_VARIABLE
from accel_trainer.errors import ConfigError, MissingExtraError, did_you_mean
from accel_trainer.runtime.launchers import DEFAULT_PORT

# Programs on the PATH that each way to start the machines needs.
_PROGRAMS = {
    "pdsh": ("pdsh", "ssh"),
    "openmpi": ("ompi_info", "mpirun"),
    "mvapich": ("mpiname", "mpirun"),
    "mpich": ("mpirun",),
    "slurm": ("sinfo", "srun"),
    "nossh": (),
}
_STANDARD = "standard"
# The runner itself refuses filters with an MPI, after it has started.
_WITHOUT_FILTERS = ("openmpi", "mvapich", "mpich")
# Options that only torch's agent, which runs beside its workers, can honour.
_OF_THE_AGENT = tuple(
    f"launch.{name}" for name in ("max_restarts", "on_rank_loss", "log_dir", "tee", "enable_cpu_affinity")
)
# By itself the runner of DeepSpeed 0.19 passes on MLFLOW*, PYTHON*, MV2* and UCX*, and NCCL* with GPUs
# (EXPORT_ENVS of launcher/runner.py, export_envs() of its accelerators).
_PASSED_ON = re.compile(
    r"(ACCEL_TRAINER|ACCELERATE|FSDP|DS|HF|TRANSFORMERS|TOKENIZERS|TORCH|NCCL|GLOO|OMP|CUDA|WANDB|MLFLOW)_"
)
# The runner puts anything else in quotes, which only a shell takes off again; its MPIs use none.
_PLAIN_VALUE = re.compile(r"[\w@%+=:,./-]*")


@dataclass(frozen=True, slots=True)
class HostJob:
    """The machines of a job and how they are started."""

    launcher: str
    hostfile: Path
    hosts: Mapping[str, tuple[int, ...]]
    """Slots to use by name of the machine, in the order of the hostfile."""
    include: str
    exclude: str
    num_per_host: int | None
    """Fewer processes than slots on each machine; None uses every slot."""
    machine_rank: int
    main_address: str | None
    main_port: int

    @property
    def num_processes(self) -> int:
        """Processes of the job, over all machines."""
        return sum(self.num_per_host or len(slots) for slots in self.hosts.values())

    @property
    def num_local_processes(self) -> int:
        """Processes of the machine that has most of them."""
        return max(self.num_per_host or len(slots) for slots in self.hosts.values())

    @property
    def is_here(self) -> bool:
        """Whether the job is on this machine alone."""
        host, *others = self.hosts
        return not others and host in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())


def agent_options(resolved: Resolved) -> list[str]:
    """Return the options in force, by dotted path, that only torch's agent can honour."""
    return [path for path in _OF_THE_AGENT if resolved.value(path) != field_specs()[path].default]


def hostfile_of(resolved: Resolved) -> str:
    """Return the path of the hostfile that a job is configured with, or nothing."""
    return os.path.expanduser(str(resolved.config.deepspeed.get("deepspeed_hostfile") or ""))


def plan_hosts(resolved: Resolved) -> HostJob | None:
    """Return the job on the machines of a hostfile; None when there is none, and torch's agent starts the processes."""
    if resolved.config.strategy != "deepspeed":
        return None
    launch = resolved.config.launch
    _, include, exclude, launcher = (str(resolved.config.deepspeed.get(key) or "") for key in LAUNCH_FIELDS)
    hostfile = hostfile_of(resolved)
    launcher, known = launcher.lower(), (_STANDARD, *_PROGRAMS)
    if launcher and launcher not in known:
        raise ConfigError(
            f"deepspeed_multinode_launcher is {launcher!r} ({resolved.source('deepspeed').where})"
            f"{did_you_mean(launcher, known) or '.'} Known: {', '.join(known)}"
        )
    if not hostfile:
        _check_without_hostfile(resolved, launcher, is_filtered=bool(include or exclude))
        return None
    _check_runner(resolved, launcher, hostfile)
    launcher = launcher or "pdsh"
    hosts = _filter(_read_hostfile(Path(hostfile)), include, exclude)
    num_per_host = _check_number(resolved, launcher, hosts, is_filtered=bool(include or exclude))
    job = HostJob(
        launcher, Path(hostfile), hosts, include, exclude, num_per_host, launch.machine_rank,
        launch.main_process_ip, launch.main_process_port or DEFAULT_PORT,
    )  # fmt: skip
    _check_programs(job)
    return job


def _check_without_hostfile(resolved: Resolved, launcher: str, *, is_filtered: bool) -> None:
    where, num_machines = resolved.source("deepspeed").where, resolved.config.launch.num_machines
    if is_filtered:
        raise ConfigError(
            f"a filter of machines is set ({where}), and there is no hostfile that it could filter; set "
            "deepspeed_hostfile, or choose devices with gpu_ids"
        )
    if num_machines > 1 and launcher not in ("", _STANDARD):
        raise ConfigError(
            f"deepspeed_multinode_launcher is {launcher!r} ({where}) for {num_machines} machines, and "
            "nothing names them; set deepspeed_hostfile, or launch on each machine with 'standard'"
        )


def _check_runner(resolved: Resolved, launcher: str, hostfile: str) -> None:
    """Refuse a hostfile with options that DeepSpeed's runner, which reads it, does not have."""
    if launcher == _STANDARD:
        raise ConfigError(
            f"deepspeed_hostfile is {hostfile!r} and deepspeed_multinode_launcher is 'standard' "
            f"({resolved.source('deepspeed').where}), which is started by hand on each machine and reads no hostfile; "
            "leave one of the two out"
        )
    if unmet := agent_options(resolved):
        raise ConfigError(
            f"{', '.join(map(resolved.describe, unmet))}: DeepSpeed's runner, which starts the machines of a hostfile, "
            "does not do that; leave it out, or start `accel-trainer launch` by hand on each machine"
        )


def _read_hostfile(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"deepspeed_hostfile {str(path.absolute())!r} cannot be read: {reason}; it holds a line `name slots=N` for "
            "each machine"
        ) from error
    hosts: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(lines, start=1):
        if content := line.partition("#")[0].strip():
            match = re.fullmatch(r"(\S+)\s+slots=(0*[1-9]\d*)", content)
            if match is None or match[1] in hosts:
                found = f"is {content!r}" if match is None else "names a machine again"
                raise ConfigError(f"{path}:{number} {found}; expected `name slots=N`, each machine once")
            hosts[match[1]] = tuple(range(int(match[2])))
    if not hosts:
        raise ConfigError(f"deepspeed_hostfile {str(path)!r} names no machine; write a line `name slots=N` for each")
    return hosts


def _filter(hosts: Mapping[str, tuple[int, ...]], include: str, exclude: str) -> dict[str, tuple[int, ...]]:
    """Return the slots that a filter such as `host1@host2:0,2` leaves."""
    if include and exclude:
        raise ConfigError(
            f"deepspeed_inclusion_filter is {include!r} and deepspeed_exclusion_filter is {exclude!r}; give one of them"
        )
    text = include or exclude
    if not text:
        return dict(hosts)
    named = {part.partition(":")[0]: _named_slots(hosts, part, text) for part in filter(None, text.split("@"))}
    kept = {
        name: tuple(slot for slot in slots if (slot in named.get(name, ())) == bool(include))
        for name, slots in hosts.items()
    }
    if not any(kept.values()):
        raise ConfigError(f"deepspeed_exclusion_filter {exclude!r} leaves no slot of the hostfile; name fewer of them")
    return {name: slots for name, slots in kept.items() if slots}


def _named_slots(hosts: Mapping[str, tuple[int, ...]], part: str, text: str) -> tuple[int, ...]:
    """Return the slots of one machine in the filter `text`: the numbers behind its `:`, else all."""
    name, _, numbers = part.partition(":")
    words = numbers.split(",") if numbers else []
    slots = tuple(int(word) if word.isdecimal() else -1 for word in words)
    if name in hosts and set(slots) <= set(hosts[name]):
        return slots or hosts[name]
    nearest = f"; {name} has the slots 0 to {len(hosts[name]) - 1}" if name in hosts else did_you_mean(name, hosts)
    raise ConfigError(
        f"the filter {text!r} names {part!r}, which the hostfile does not have{nearest} Its machines: "
        f"{', '.join(hosts)}"
    )


def _check_number(
    resolved: Resolved, launcher: str, hosts: Mapping[str, tuple[int, ...]], *, is_filtered: bool
) -> int | None:
    """Compare the hostfile with `num_machines` and `num_processes`; return the processes of each machine, if fewer."""
    launch = resolved.config.launch
    if is_filtered and launcher in _WITHOUT_FILTERS:
        raise ConfigError(
            f"the launcher {launcher!r} takes every machine of its hostfile, and a filter is set "
            f"({resolved.source('deepspeed').where}); write a hostfile of the machines you want, or use pdsh or slurm"
        )
    if resolved.source("launch.num_machines").kind is not SourceKind.DEFAULT and launch.num_machines != len(hosts):
        raise ConfigError(
            f"{resolved.describe('launch.num_machines')}, and the hostfile with its filter has {len(hosts)}: "
            f"{', '.join(hosts)}; correct one of the two"
        )
    total = sum(map(len, hosts.values()))
    wanted = launch.num_processes
    if wanted is None or wanted == total:
        return None
    share, rest = divmod(wanted, len(hosts))
    can_limit = not is_filtered and launcher not in _WITHOUT_FILTERS and not rest
    if can_limit and share <= min(map(len, hosts.values())):
        return share
    raise ConfigError(
        f"{resolved.describe('launch.num_processes')}, and the hostfile with its filter has {total} slots on "
        f"{len(hosts)} machine(s); write the slots that you want into the hostfile, or leave num_processes out"
    )


def _check_programs(job: HostJob) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingExtraError(
            "machines of a hostfile are started by DeepSpeed's runner, and DeepSpeed is not installed; run "
            "`pip install 'accel-trainer[deepspeed]'`"
        )
    # A job on this machine alone is started without them.
    missing = [] if job.is_here else [name for name in _PROGRAMS[job.launcher] if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"deepspeed_multinode_launcher {job.launcher!r} needs {' and '.join(missing)}, which is not on the PATH of "
            "this machine; install it, choose another launcher, or start `accel-trainer launch` by hand on each "
            "machine with deepspeed_multinode_launcher: standard"
        )


def run_on_hosts(job: HostJob, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `command` on every slot of the job's machines, with the variables that they need; return the exit code."""
    with _environment_file(job, environ) as path:
        runner = subprocess.Popen(_runner_command(job, command), env={**environ, "DS_ENV_FILE": path}, process_group=0)

        def pass_on(number: int, frame: object) -> None:
            # With pdsh the runner ends the workers on its machines; otherwise it dies and leaves them running.
            if number == signal.SIGHUP:  # of which the runner knows nothing
                number = signal.SIGTERM
            with contextlib.suppress(ProcessLookupError):
                (os.kill if _is_by_shell(job) else os.killpg)(runner.pid, number)

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, pass_on) for number in numbers}
        try:
            code = runner.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _runner_command(job: HostJob, command: Sequence[str]) -> list[str]:
    words = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(job.hostfile.absolute())]
    words += ["--log_level", "warning", "--no_local_rank", "--master_port", str(job.main_port)]
    if job.launcher == "nossh":
        words += ["--no_ssh", "--node_rank", str(job.machine_rank)]
    else:
        words += ["--launcher", job.launcher]
    for option, value in (("--include", job.include), ("--exclude", job.exclude), ("--num_gpus", job.num_per_host)):
        if value:
            words += [option, str(value)]
    kind, script, *rest = _script_words(job, command)
    rest = [_for_shell(word) for word in rest] if _is_by_shell(job) else rest
    return [*words, *_address_options(job), *filter(None, [kind]), script, *rest]


def _address_options(job: HostJob) -> list[str]:
    words, address = [], job.main_address
    if job.is_here:
        address = address or "127.0.0.1"
        words.append("--no_ssh_check")
    elif len(job.hosts) == 1 and job.launcher != "nossh":
        # Else the runner starts the processes of a single machine on this one, whatever its name is.
        words.append("--force_multi")
    if address is None and job.launcher != "pdsh":
        address = next(iter(job.hosts))
    return words if address is None else [*words, "--master_addr", address]


def _script_words(job: HostJob, command: Sequence[str]) -> list[str]:
    """Return the option for the kind of program (empty for a script), the program and its arguments."""
    kind, rest = "", list(command)
    if command[0] != sys.executable:
        kind = "--no_python"
    else:
        rest = rest[2:] if command[1] == "-u" else rest[1:]  # the runner has a -u of its own
        if rest[0] == "-m":
            kind, rest = "--module", rest[1:]
    if kind and job.launcher == "slurm" and not job.is_here:
        raise ConfigError(
            f"{kind} is not passed on by DeepSpeed's runner under SLURM, which runs scripts only; name the script "
            "itself, or start the job with srun"
        )
    return [kind, *rest]


def _is_by_shell(job: HostJob) -> bool:
    return job.launcher == "pdsh" and not job.is_here


def _for_shell(word: str) -> str:
    """Quote an argument for the shells that pdsh starts. One with a space is quoted by the runner, but not well."""
    if " " not in word:
        return shlex.quote(word)
    return re.sub(r"([\\$`])", r"\\\1", word)


@contextlib.contextmanager
def _environment_file(job: HostJob, environ: Mapping[str, str]) -> Iterator[str]:
    """Write the variables for the other machines to a file, behind those of the user's files that the runner reads."""
    own = environ.get("DS_ENV_FILE", ".deepspeed_env")
    folders = dict.fromkeys((os.path.expanduser("~"), "."))
    paths = [path for folder in folders if (path := Path(folder, own)).is_file()]
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if "=" in line]
    variables = _passed_variables(job, environ)
    skipped = [name for name, value in variables.items() if not _PLAIN_VALUE.fullmatch(value)]
    if skipped:
        print(
            f"accel-trainer launch: {', '.join(skipped)}: not passed on to the machines, the runner cannot quote such "
            "values; set them in the script or on the machines",
            file=sys.stderr,
        )
    lines += [f"{name}={value}" for name, value in variables.items() if name not in skipped]
    with tempfile.NamedTemporaryFile("w", prefix="accel_trainer_", suffix=".env", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        yield file.name


def _passed_variables(job: HostJob, environ: Mapping[str, str]) -> dict[str, str]:
    variables = {}
    if job.launcher != "slurm":  # srun hands on all variables, and separates those of --export by commas
        variables = {name: value for name, value in environ.items() if _PASSED_ON.match(name)}
        variables.pop("DS_ENV_FILE", None)
        # JSON is full of quotes, and goes through a shell with pdsh and through none with MPI.
        variables[LAUNCH_VARIABLE] = base64.urlsafe_b64encode(environ[LAUNCH_VARIABLE].encode()).decode()
    if job.launcher in ("openmpi", "mvapich", "slurm"):
        variables |= {"MASTER_ADDR": job.main_address or next(iter(job.hosts)), "MASTER_PORT": str(job.main_port)}
    return variables
