"""Jobs of `launch --print slurm` under a real slurmctld and two slurmd on the loopback, of `make test-slurm`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_trainer.launch.cli import main
from accel_trainer.runtime.launchers import get_free_port

SLURM = Path(__file__).resolve().parents[2] / ".compat" / "slurm" / "usr"
LOOP = Path(__file__).with_name("slurm_loop.py")
# Authentication by nobody, on one machine; jobs that are queued again wait as long as credentials are valid.
CONFIGURATION = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
NodeName=node[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
pytestmark = [
    pytest.mark.skipif(not SLURM.exists(), reason="SLURM is not unpacked"),
    pytest.mark.multirank,
    pytest.mark.slow,
    pytest.mark.timeout(280),
]


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two nodes on the loopback, and SLURM's commands on the PATH."""
    folder = tmp_path_factory.mktemp("slurm")
    plugins = next(SLURM.glob("lib/*/slurm-wlm"))
    port = get_free_port()
    user = os.environ.get("USER") or subprocess.check_output(["id", "-un"], text=True).strip()
    values = {"host": os.uname().nodename.partition(".")[0], "ports": range(port, port + 3), "user": user}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**values, folder=folder, plugins=plugins))
    for name in ("state", "node1", "node2"):
        (folder / name).mkdir()
    patch = pytest.MonkeyPatch()
    patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    patch.setenv("LD_LIBRARY_PATH", f"{plugins}:{plugins.parent}")
    patch.setenv("PATH", os.pathsep.join([str(SLURM / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]))
    patch.setenv("MASTER_ADDR", "127.0.0.1")  # the nodes' names are no hosts
    patch.setenv("HF_HOME", str(folder))
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    daemons = [[str(SLURM / "sbin/slurmctld-wlm"), "-D", "-c"]]
    step = str(SLURM / "sbin/slurmstepd-wlm")
    daemons += [[str(SLURM / "sbin/slurmd-wlm"), "-D", "-N", name, "-d", step] for name in ("node1", "node2")]
    with (folder / "log").open("w") as log:
        started = [subprocess.Popen(words, stdout=log, stderr=log) for words in daemons]
        for _ in range(300):
            if "2 idle" in run("sinfo", "--noheader", "--format=%D %t"):
                break
            time.sleep(0.1)
        else:
            pytest.fail((folder / "log").read_text())
        yield
        run("scancel", "--full", "--user", user)
        for _ in range(100):
            if not run("squeue", "--noheader"):
                break
            time.sleep(0.1)
        for each in started:
            each.terminate()
            each.wait(20)
    patch.undo()


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout + done.stderr


def wait_for(file: Path, pattern: str, seconds: float = 120) -> str:
    """Return what a file of a job says once it says that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        text = "".join(each.read_text() for each in file.parent.glob(file.name))
        if re.search(pattern, text, re.DOTALL):
            return text
        time.sleep(0.2)
    pytest.fail(f"{pattern!r} is not in:\n{text}\n{run('squeue')}\n{run('scontrol', 'show', 'job')}")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(LOOP, tmp_path / "loop.py")
    return tmp_path


def submit(*words: str) -> None:
    options = ["--cpu", "--num_cpu_threads_per_process", "1", *words]
    assert main(["launch", "--submit", "slurm", *options]) == 0


def wait_for_job(number: str, pattern: str) -> str:
    """Return what SLURM says of a job once it says that."""
    while not re.search(pattern, found := run("scontrol", "show", "job", number)):
        time.sleep(0.2)
    return found


def test_a_job_saves_before_its_time_is_over_and_goes_on_when_it_is_queued_again(folder: Path) -> None:
    words = ["--resources", "time=60", "--preemption_grace_seconds", "20"]
    submit(*words, "--num_machines", "2", "--num_processes", "2", "loop.py", str(folder))
    log = folder / "loop-*.log"
    wait_for(log, "update 0 on 2 ranks")
    number = next(folder.glob(log.name)).stem.rpartition("-")[2]
    minutes = int(wait_for_job(number, "RunTime=").partition("RunTime=00:")[2][:2])
    # SLURM counts minutes, and sends the signal 80 s before, or where fewer are left, at once.
    assert run("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes + 2}") == ""
    wait_for(log, "saved after update")
    wait_for_job(number, "Restarts=1")
    assert run("scontrol", "update", f"JobId={number}", "TimeLimit=60") == ""
    text = wait_for(log, r"on 2 ranks.*saved after update.*on 2 ranks.*saved after update")
    (first, saved), (again, last) = re.findall(r"update (\d+) on 2 ranks.*?saved after update (\d+)", text, re.DOTALL)
    assert int(first) == 0
    assert int(again) == int(saved) + 1 == int(last)
    wait_for_job(number, "JobState=COMPLETED")


def test_the_jobs_of_an_array_run_beside_each_other(folder: Path) -> None:
    words = ["--resources", "array=0,3", "--num_processes", "2"]
    submit(*words, "loop.py", str(folder), "--short")
    for number in (0, 3):
        wait_for(folder / f"loop-*_{number}.log", "update 0 on 2 ranks.*saved after update 0")
        assert (folder / str(number) / "COMMITTED").exists()


@pytest.mark.parametrize("command", ["accel-trainer launch --num_processes 2", "python"], ids=["launcher", "ranks"])
def test_steps_in_an_allocation_are_the_job(folder: Path, command: str) -> None:
    step = ["srun", "--ntasks-per-node", "1", *command.split(), "loop.py", str(folder), "--short"]
    text = run("salloc", "--nodes", "2", *step)
    assert "update 0 on 2 ranks" in text, text


def test_a_heterogeneous_job_is_refused_by_name(folder: Path) -> None:
    options = "".join(f"#SBATCH {words}\n" for words in ("--output=het.log", "hetjob", "--nodes=1"))
    (folder / "het.sh").write_text(f"#!/bin/bash\n{options}srun accel-trainer launch --cpu loop.py\n")
    assert "Submitted" in run("sbatch", "het.sh")
    text = wait_for(folder / "het.log", "srun: error")
    assert "SLURM_HET_SIZE is 2: this is a step of a heterogeneous job" in text
