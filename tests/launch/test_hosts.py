"""Machines of a hostfile: which slots run, with what command, and real runs over the runner of DeepSpeed."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_trainer.config import resolve
from accel_trainer.errors import ConfigError, MissingExtraError
from accel_trainer.launch.flags import parse_options
from accel_trainer.launch.hosts import HostJob, plan_hosts, run_on_hosts
from tests import warm
from tests.ranks import free_port, preload, run_ranks

preload("deepspeed")

LAUNCH = json.dumps({"config_file": None, "flags": {"deepspeed": {"zero_stage": 2}}})
PROGRAMS = ("pdsh", "ssh", "ompi_info", "mpirun", "mpiname", "sinfo", "srun")

SCRIPT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "DS_ACCELERATOR",
         "ACCEL_TRAINER_LAUNCH", "HF_HOME", "FROM_FILE")
facts = {"argv": sys.argv[1:]} | {name: os.environ.get(name) for name in names}
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"facts{os.environ['RANK']}.json"), "w") as target:
    json.dump(facts, target)
sys.exit(int(os.environ["RANK"]) and 7)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on the PATH with programs that do nothing; a test writes what it needs over them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in PROGRAMS:
        put_program(folder, name, "exit 0")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def put_program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def plan(tmp_path: Path, hosts: str | None, **options: Any) -> HostJob | None:
    block = {f"deepspeed_{key}": value for key, value in options.pop("block", {}).items()}
    if hosts is not None:
        path = tmp_path / "hostfile"
        path.write_text(hosts)
        block["deepspeed_hostfile"] = str(path)
    launch = {f"launch.{key}": value for key, value in options.items()}
    return plan_hosts(resolve(flags={"strategy": "deepspeed", "deepspeed": block or {"zero_stage": 1}, **launch}))


@pytest.mark.usefixtures("programs")
def test_without_a_hostfile_torch_starts_the_processes(tmp_path: Path) -> None:
    assert plan(tmp_path, None) is None
    assert plan(tmp_path, None, block={"multinode_launcher": "standard"}, num_machines=2) is None
    assert plan(tmp_path, None, block={"multinode_launcher": "pdsh"}) is None


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("options", "expected", "counts"),
    [
        ({}, {"a": (0, 1), "b": (0, 1, 2, 3)}, (6, 4)),
        ({"block": {"inclusion_filter": "b:1,3"}}, {"b": (1, 3)}, (2, 2)),
        ({"block": {"inclusion_filter": "b@a:0"}}, {"a": (0,), "b": (0, 1, 2, 3)}, (5, 4)),
        ({"block": {"exclusion_filter": "a@b:0"}}, {"b": (1, 2, 3)}, (3, 3)),
        ({"num_processes": 2, "num_machines": 2}, {"a": (0, 1), "b": (0, 1, 2, 3)}, (2, 1)),
    ],
)
def test_filters_choose_machines_and_slots_over_which_processes_are_shared_out(
    tmp_path: Path, options: dict[str, Any], expected: dict[str, Any], counts: tuple[int, int]
) -> None:
    job = plan(tmp_path, "# two machines\na slots=2\n\nb  slots=4  # the large one\n", **options)
    assert job is not None
    assert list(job.hosts.items()) == list(expected.items())
    assert (job.num_processes, job.num_local_processes) == counts


BOTH_FILTERS = {"exclusion_filter": "a", "inclusion_filter": "a"}
MPI_AND_FILTER = {"multinode_launcher": "openmpi", "inclusion_filter": "a"}


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("hosts", "options", "message"),
    [
        (None, {"block": {"inclusion_filter": "a"}}, "there is no hostfile that it could filter"),
        (None, {"block": {"multinode_launcher": "pdsh"}, "num_machines": 2}, "for 2 machines, and nothing names them"),
        ("a slots=1", {"block": {"multinode_launcher": "standard"}}, "reads no hostfile; leave one of the two out"),
        ("a slots=1", {"block": {"multinode_launcher": "pdhs"}}, "is 'pdhs' .*did you mean 'pdsh'"),
        ("a slots=two", {}, r"hostfile:1 is 'a slots=two'; expected `name slots=N`"),
        ("a slots=1\na slots=2", {}, "hostfile:2 names a machine again"),
        ("# none\n", {}, "names no machine; write a line `name slots=N`"),
        ("a slots=2", {"block": {"inclusion_filter": "b"}}, "names 'b', which the hostfile does not have"),
        ("a slots=2", {"block": {"inclusion_filter": "a:2"}}, "'a:2', which .* a has the slots 0 to 1"),
        ("a slots=2", {"block": {"exclusion_filter": "a:x"}}, "names 'a:x', which the hostfile does not have"),
        ("a slots=2", {"block": {"exclusion_filter": "a"}}, "leaves no slot of the hostfile"),
        ("a slots=2", {"block": BOTH_FILTERS}, "inclusion_filter is 'a' and .* give one of them"),
        ("a slots=2", {"block": MPI_AND_FILTER}, "'openmpi' takes every machine of its hostfile"),
        ("a slots=2\nb slots=2", {"num_machines": 3}, r"num_machines=3 .* with its filter has 2: a, b"),
        ("a slots=2", {"log_dir": "x", "max_restarts": 1}, "max_restarts=1 .*, launch.log_dir=x .*runner.* does not"),
        ("a slots=2", {"on_rank_loss": "continue"}, "on_rank_loss=continue .*runner, which starts.* does not do that"),
        ("a slots=2\nb slots=2", {"num_processes": 3}, r"num_processes=3 .* has 4 slots on 2 machine"),
    ],
)
def test_what_cannot_be_started_is_refused(
    tmp_path: Path, hosts: str | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, hosts, **options)


def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no_such' cannot be read: No such file"):
        plan(tmp_path, None, block={"hostfile": str(tmp_path / "no_such")})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary' cannot be read: it is no text; it holds a line"):
        plan(tmp_path, None, block={"hostfile": str(tmp_path / "binary")})


@pytest.mark.parametrize(
    ("launcher", "missing"), [("pdsh", "pdsh"), ("openmpi", "ompi_info"), ("slurm", "sinfo and srun")]
)
def test_a_launcher_that_is_not_installed_is_named(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, missing: str
) -> None:
    for name in missing.split(" and "):
        (programs / name).unlink()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(ConfigError, match=f"'{launcher}' needs {missing}, which is not on the PATH"):
        plan(tmp_path, "a slots=1\nb slots=1", block={"multinode_launcher": launcher})


@pytest.mark.usefixtures("programs")
def test_without_deepspeed_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'accel-trainer\[deepspeed\]'"):
        plan(tmp_path, "a slots=1")


def run_from_fork(folder: Path, job: HostJob, command: list[str], environ: dict[str, str]) -> int:
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    warm.fork_programs()
    return run_on_hosts(job, command, environ)


def run(job: HostJob | None, folder: Path, words: list[str], **environ: str) -> tuple[int, dict[int, dict[str, Any]]]:
    """Run SCRIPT on the machines of a job; return the exit code and what each rank saw."""
    assert job is not None
    script = folder / "script.py"
    script.write_text(SCRIPT)
    variables = {**os.environ, "DS_ACCELERATOR": "cpu", "ACCEL_TRAINER_LAUNCH": LAUNCH, "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-u", str(script), *words]
    [code] = run_ranks(run_from_fork, 1, folder, job, command, variables | environ, env=warm.ALONE, timeout=100)
    return code, {int(path.stem[5:]): json.loads(path.read_text()) for path in folder.glob("facts*.json")}


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_the_runner_starts_the_slots_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.chdir(tmp_path)
    job = plan(tmp_path, "localhost slots=3\n", block={"exclusion_filter": "localhost:1"})
    words = ["--lr", "1 e", "$HOME;x"]

    code, facts = run(job, tmp_path, words)

    assert code == 7
    assert sorted(facts) == [0, 1]
    for rank, seen in facts.items():
        assert seen["argv"] == words
        assert (seen["LOCAL_RANK"], seen["WORLD_SIZE"], seen["MASTER_ADDR"]) == (str(rank), "2", "127.0.0.1")
        assert (seen["DS_ACCELERATOR"], seen["OMP_NUM_THREADS"]) == ("cpu", "3")


def hang_up(folder: Path, job: HostJob, environ: dict[str, str]) -> int:
    """Run a script whose ranks close the launcher's terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    (script := folder / "hangs_up.py").write_text(
        f"import os, signal, time\nos.kill({os.getpid()}, signal.SIGHUP)\ntime.sleep(60)\n"
    )
    return run_from_fork(folder, job, [sys.executable, "-u", str(script)], environ)


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_a_terminal_that_closes_ends_the_workers_of_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.chdir(tmp_path)
    job = plan(tmp_path, "localhost slots=2\n")
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "ACCEL_TRAINER_LAUNCH": LAUNCH}
    assert run_ranks(hang_up, 1, tmp_path, job, environ, env=warm.ALONE, timeout=50) == [128 + signal.SIGTERM]


# What pdsh does on the second machine, with a process of this one: -w HOSTS, the command, %n the number of the host.
PDSH = """
while [ "$1" != -w ]; do shift; done
echo "$2" > hosts; shift 2
exec env -i PATH="$PATH" HOME="$HOME" sh -c "$(printf '%s ' "${@//%n/1}")"
"""


@pytest.mark.slow
@pytest.mark.multirank
def test_pdsh_gets_every_machine_what_the_workers_need(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    put_program(programs, "pdsh", PDSH)
    put_program(programs, "ssh", "echo 127.0.0.1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", "/hf")
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=yes\n")
    port = free_port()
    job = plan(tmp_path, "host-a slots=1\nhost-b slots=1\n", main_process_port=port)
    words = ["--lr", "1 e", "$HOME;x", 'a "b" $HOME']

    code, facts = run(job, tmp_path, words, HF_TOKEN="a b")

    assert (code, (tmp_path / "hosts").read_text()) == (7, "host-a,host-b\n")
    [(rank, seen)] = facts.items()
    assert seen["argv"] == words
    assert (rank, seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == (1, "0", "2")
    assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("127.0.0.1", str(port))
    assert (seen["DS_ACCELERATOR"], seen["OMP_NUM_THREADS"]) == ("cpu", "3")
    assert (seen["HF_HOME"], seen["FROM_FILE"]) == ("/hf", "yes")
    assert json.loads(base64.urlsafe_b64decode(seen["ACCEL_TRAINER_LAUNCH"]))["flags"]
    in_worker = {"ACCEL_TRAINER_LAUNCH": seen["ACCEL_TRAINER_LAUNCH"]}
    assert resolve(environ=in_worker).config.deepspeed == {"zero_stage": 2}


@pytest.mark.slow
def test_one_machine_with_another_name_is_not_taken_for_this_one(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    put_program(programs, "pdsh", 'echo "pdsh $*"; exit 3')
    put_program(programs, "ssh", "echo 127.0.0.1")
    monkeypatch.chdir(tmp_path)
    job = plan(tmp_path, "far-away slots=2\n")

    code, facts = run(job, tmp_path, [], HF_TOKEN="a b")

    assert (code, facts) == (3, {})
    assert "-w far-away" in (tmp_path / "output").read_text()
    assert "HF_TOKEN: not passed on to the machines" in (tmp_path / "errors").read_text()


def test_the_flags_of_the_command_line_reach_the_block() -> None:
    words = shlex.split("--use_deepspeed --deepspeed_hostfile h --zero_stage 3 --zero3_init_flag --gradient_clipping=1")
    flags = parse_options(words, "accel-trainer launch").flags
    file = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "offload_param_device": "cpu"}}

    resolved = resolve(flags=flags, file=file)

    assert resolved.config.deepspeed == {
        "zero_stage": 3,
        "offload_param_device": "cpu",
        "deepspeed_hostfile": "h",
        "zero3_init_flag": True,
        "gradient_clipping": 1.0,
    }
    assert resolved.source("deepspeed").where.startswith("--deepspeed_hostfile, --zero_stage, ")
