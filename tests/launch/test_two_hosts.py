"""Jobs on two machines: two network namespaces, joined by one wire, whose names resolve to nothing useful.

All jobs run at the same time, from one process that has torch imported: most of what they take is waiting.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from accel_trainer.launch import rendezvous
from accel_trainer.launch.machine import find_interface
from tests.launches import launch, run_command
from tests.ranks import preload, run_ranks
from tests.warm import ALONE, COLD

preload("accel_trainer.launch.job", "accel_trainer.launch.torchrun", "tests.launches")

GATHER = """
import torch
import torch.distributed as dist
dist.init_process_group('gloo')
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
print('rank', dist.get_rank(), 'of', dist.get_world_size(), 'sum', total.item(), flush=True)
dist.destroy_process_group()  # without it, torch itself ends one process in some with SIGABRT
"""
SLEEP = """
import os, sys, time
from pathlib import Path
rank = os.environ['RANK']
started = Path(__file__).with_name('new' + rank)
started.write_text(str(os.getpid()))
started.rename(started.with_name('started' + rank))
if sys.argv[1:] == [rank]:
    sys.exit(9)
time.sleep(100)
"""
RESTART = """
import os, sys, time
from pathlib import Path
rank = os.environ['RANK']
runs = Path(__file__).with_name('runs' + rank)
with runs.open('a') as file:
    file.write('again ')
again = len(runs.read_text().split())
if (rank, again) == ('1', 1):
    sys.exit(3)
time.sleep(60 if again == 1 else 0)
print('rank', rank, 'of', os.environ['WORLD_SIZE'], 'in run', again, flush=True)
"""
COME_AND_GO = """
import os, time
from pathlib import Path
rank, world, attempt = (os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'ACCEL_TRAINER_ATTEMPT'))
number, job = attempt.split(':')
print('rank', rank, 'of', world, 'again', number, 'job', job, flush=True)
Path(__file__).with_name('alone' if world == '1' else 'started' + rank).write_text('')
if number != '2':
    time.sleep(100)
"""
TRAIN = """
import os, time
from pathlib import Path
import torch
from transformers import TrainerCallback
from accel_trainer import Trainer, TrainingArguments

folder = Path(__file__).parent

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1).double()

    def forward(self, x, labels=None):
        logits = self.layer(x).squeeze(-1)
        return {'loss': torch.nn.functional.mse_loss(logits, labels), 'logits': logits}

class Pace(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if 'ACCEL_TRAINER_ATTEMPT' in os.environ:
            time.sleep(0.2)
        if os.environ['WORLD_SIZE'] == '2' and state.global_step > 30:
            (folder / ('started' + os.environ['RANK'])).touch()

rows = torch.randn(40, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
data = [{'x': row[:4], 'labels': row[4]} for row in rows]
args = TrainingArguments(
    str(folder / 'out'), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=60, save_steps=1,
    save_total_limit=2, report_to=[], use_cpu=True, learning_rate=0.05, disable_tqdm=True, logging_strategy='no',
)
trainer = Trainer(Model(), args, train_dataset=data, callbacks=[Pace()])
trainer.train()
if trainer.is_world_process_zero():
    torch.save(trainer.model.state_dict(), folder / 'end.pt')
    print('ended on', os.environ['WORLD_SIZE'], flush=True)
"""

A_MACHINE = {**ALONE, "NCCL_SOCKET_IFNAME": None, COLD: "1"}
"""Environment of a launcher on a machine."""
COMING_AND_GOING = (
    "--rdzv_backend c10d --num_machines 1:2 --num_processes 1:2 --max_restarts 1 --rdzv_conf last_call_timeout=1"
)

# For a user 10 and 12; a test would do nothing in them but wait.
NOTICE_SECONDS, LOST_SECONDS = 1, 6


@dataclass(frozen=True)
class Job:
    """What is started on the machines, when, and what is done to it."""

    script: str
    words: str = ""
    address: str = "10.231.7.1"
    delays: tuple[float | str | None, float | str | None] = (0.0, 0.0)
    """Seconds until each machine's launcher is started, or the file that it waits for; None: never."""
    killed: int | None = None
    """The machine whose launcher is killed once both workers run."""
    failing: str = ""
    """The rank that fails."""


JOBS = {
    "machine 0 is late": Job(GATHER, delays=(NOTICE_SECONDS + 1.0, 0.0)),
    "by IPv6": Job(GATHER, address="fd31::1", delays=(0.0, 2.0)),
    "machine 1 does not come": Job(SLEEP, "--rdzv_conf timeout=2", delays=(0.0, None)),
    "machine 0 does not come": Job(SLEEP, "--rdzv_conf timeout=2", delays=(None, 0.0)),
    "worker 0 fails": Job(SLEEP, failing="0"),
    "worker 1 fails": Job(SLEEP, failing="1"),
    "launcher 0 is killed": Job(SLEEP, killed=0),
    "launcher 1 is killed": Job(SLEEP, killed=1),
    "launcher 0 of c10d is killed": Job(SLEEP, "--rdzv_backend c10d", killed=0),
    "launcher 1 of c10d is killed": Job(SLEEP, "--rdzv_backend c10d", killed=1),
    "a machine comes and goes": Job(COME_AND_GO, COMING_AND_GOING, delays=(0.0, "alone"), killed=1),
    "workers are started again": Job(RESTART, "--rdzv_backend c10d --max_restarts 1"),
}


@dataclass(frozen=True)
class End:
    """How a launcher ended. `seconds` are those since it was killed, or a worker failed."""

    code: int
    text: str
    seconds: float = 0.0


def run_ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[str]]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("two machines are network namespaces, which take root and iproute2")
    names = [f"at{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            run_ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode()}")
    try:
        run_ip("link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire1", "netns", names[1])
        for index, name in enumerate(names):
            run_ip("-n", name, "addr", "add", f"10.231.7.{index + 1}/24", "dev", f"wire{index}")
            run_ip("-n", name, "-6", "addr", "add", f"fd31::{index + 1}/64", "dev", f"wire{index}", "nodad")
            for device in ("lo", f"wire{index}"):
                run_ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            run_ip("netns", "del", name)


class Running:
    """The launchers of one job, as children of this process."""

    def __init__(self, folder: Path, job: Job, port: int, machines: list[str]) -> None:
        folder.mkdir()
        (folder / "train.py").write_text(job.script)
        self.folder, self.job = folder, job
        self.ends: dict[int, tuple[int, float]] = {}
        self.begun_at: float | None = None
        words = ["launch", "--cpu", "--num_machines", "2", "--num_processes", "2", *shlex.split(job.words)]
        words += ["--main_process_ip", job.address, "--main_process_port", str(port)]
        words += [str(folder / "train.py"), *job.failing]
        self.pids = {
            number: self.start(number, delay, words, machines[number])
            for number, delay in enumerate(job.delays)
            if delay is not None
        }

    def start(self, number: int, delay: float | str, words: list[str], machine: str) -> int:
        return os.fork() or self.run(number, delay, words, machine)

    def run(self, number: int, delay: float | str, words: list[str], machine: str) -> NoReturn:
        code = 70
        try:
            while isinstance(delay, str) and not (self.folder / delay).exists():
                time.sleep(0.05)
            time.sleep(0.0 if isinstance(delay, str) else delay)
            if self.job.script is GATHER:  # which imports torch
                del os.environ[COLD]
            with open(f"/run/netns/{machine}") as namespace:
                assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, ctypes.get_errno()
            words = [words[0], "--machine_rank", str(number), *words[1:]]
            code = run_command(words, str(self.folder / f"output{number}"))
        finally:
            os._exit(code)

    def look(self) -> bool:
        """Kill what is to be killed now, and see who has ended; return whether somebody still runs."""
        if self.begun_at is None and all((self.folder / f"started{rank}").exists() for rank in range(2)):
            self.begun_at = time.monotonic()
            if self.job.killed is not None:
                os.kill(self.pids[self.job.killed], signal.SIGKILL)
        for number, pid in self.pids.items():
            if number not in self.ends:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.ends[number] = os.waitstatus_to_exitcode(status), time.monotonic()
        return len(self.ends) < len(self.pids)

    def kill(self) -> None:
        """End what still runs."""
        for number in self.pids.keys() - self.ends.keys():
            os.kill(self.pids[number], signal.SIGKILL)
            self.ends[number] = os.waitstatus_to_exitcode(os.waitpid(self.pids[number], 0)[1]), time.monotonic()

    def results(self) -> dict[int, End]:
        return {
            number: End(code, (self.folder / f"output{number}").read_text(), ended_at - (self.begun_at or ended_at))
            for number, (code, ended_at) in self.ends.items()
        }


def run_jobs(folder: str, machines: list[str], jobs: Mapping[str, Job] = JOBS) -> dict[str, dict[int, End]]:
    deadline = time.monotonic() + 90
    rendezvous._NOTICE_SECONDS, rendezvous._LOST_SECONDS = NOTICE_SECONDS, LOST_SECONDS
    running = {
        name: Running(Path(folder, str(index)), job, 29_600 + index, machines)
        for index, (name, job) in enumerate(jobs.items())
    }
    try:
        while sum(job.look() for job in running.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        for job in running.values():
            job.kill()
    return {name: job.results() for name, job in running.items()}


@pytest.fixture(scope="module")
def ends(machines: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, End]]:
    """How the launchers of each job have ended, by machine."""
    folder = tmp_path_factory.mktemp("jobs")
    env = {**A_MACHINE, "HF_HOME": str(folder)}
    [results] = run_ranks(run_jobs, 1, str(folder), machines, env=env, timeout=110)
    return dict(results)


@pytest.mark.parametrize("name", ["machine 0 is late", "by IPv6"])
def test_two_machines_meet_by_the_address_of_the_first(name: str, ends: dict[str, dict[int, End]]) -> None:
    for rank, end in ends[name].items():
        assert end.code == 0, end.text
        assert f"rank {rank} of 2 sum 1\n" in end.text


def test_a_machine_says_for_whom_it_waits(ends: dict[str, dict[int, End]]) -> None:
    waited = f"machine 1 has waited {NOTICE_SECONDS} s for machine 0 at 10.231.7.1:29600"
    assert f"{waited}; start it there, or correct --main_process_ip" in ends["machine 0 is late"][1].text


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (1, "machine 1 of 2 did not come to 10.231.7.1 port 29602 within 2 s; start the job there"),
        (0, "machine 0 was not reached at 10.231.7.1 port 29603 within 2 s"),
    ],
)
def test_a_machine_that_does_not_come_is_named(missing: int, message: str, ends: dict[str, dict[int, End]]) -> None:
    end = ends[f"machine {missing} does not come"][1 - missing]
    assert end.code
    assert message in end.text


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_named_on_the_other_machine(failing: int, ends: dict[str, dict[int, End]]) -> None:
    job = ends[f"worker {failing} fails"]
    other = job[1 - failing]
    assert (job[failing].code, other.code) == (9, 9)
    assert f"on machine {failing} rank {failing} (pid " in other.text
    assert "failed with exit code 9; this ended the job" in other.text
    assert other.seconds < 15


@pytest.mark.parametrize(("killed", "name"), [(0, ""), (1, ""), (0, " of c10d"), (1, " of c10d")])
def test_a_killed_launcher_is_named_on_the_other_machine(
    killed: int, name: str, ends: dict[str, dict[int, End]]
) -> None:
    job = ends[f"launcher {killed}{name} is killed"]
    other = job[1 - killed]
    assert (job[killed].code, other.code) == (-signal.SIGKILL, 1)
    machine = killed if not name else r"\d"  # under c10d machines number themselves
    assert re.search(f"on machine {machine} the launcher has ended without a word or cannot be reached", other.text)
    assert other.seconds < LOST_SECONDS + 3  # a beat, the other's next look, and the end of its worker


def test_workers_of_both_machines_are_started_again(ends: dict[str, dict[int, End]]) -> None:
    job = ends["workers are started again"]
    assert [end.code for end in job.values()] == [0, 0], job
    lines = [line for end in job.values() for line in end.text.splitlines()]
    # Under c10d machines number themselves.
    assert sorted(line for line in lines if " in run " in line) == ["rank 0 of 2 in run 2", "rank 1 of 2 in run 2"]


def test_a_job_goes_on_with_a_machine_that_comes_and_without_one_that_goes(ends: dict[str, dict[int, End]]) -> None:
    job = ends["a machine comes and goes"]
    assert (job[0].code, job[1].code) == (0, -signal.SIGKILL), job
    assert "a machine has come: the workers save, and are started again with its own\n" in job[0].text
    assert "on machine 1 the launcher has ended without a word" in job[0].text
    assert "; the workers are started again on those that are left\n" in job[0].text
    names = {line.partition(" job ")[2] for line in job[0].text.splitlines() if line.startswith("rank ")}
    assert len(names) == 1, job[0].text
    [name] = names
    lines = [f"rank 0 of {world} again {again} job {name}" for again, world in enumerate((1, 2, 1))]
    assert [line for line in job[0].text.splitlines() if line.startswith("rank ")] == lines
    assert f"rank 1 of 2 again 1 job {name}\n" in job[1].text


@pytest.mark.cell
def test_a_trainer_ends_with_the_weights_of_a_run_whose_machines_stay(machines: list[str], tmp_path: Path) -> None:
    job = {"train": Job(TRAIN, COMING_AND_GOING, delays=(0.0, 8.0), killed=1)}
    env = {**A_MACHINE, "HF_HOME": str(tmp_path)}
    [results] = run_ranks(run_jobs, 1, str(tmp_path), machines, job, env=env, timeout=110)
    here = results["train"][0]
    assert here.code == 0, here.text
    for text in ("a machine has come", "started again, 1 time(s)", "started again, 2 time(s)", "\nended on 1\n"):
        assert text in here.text
    assert "1 of 2 processes are left: an update has 8 samples as before = 2 x 4 x 1" in here.text
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "train.py").write_text(TRAIN)
    code, output = launch(tmp_path, "--cpu", "--num_processes", "2", str(tmp_path / "whole" / "train.py"))
    assert code == 0, output
    assert "\nended on 2\n" in output
    found, expected = (torch.load(tmp_path / name / "end.pt") for name in ("0", "whole"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_the_interface_is_the_one_that_reaches_the_main_machine(machines: list[str]) -> None:
    code = (
        "from accel_trainer.launch.machine import find_interface\n"
        "print(*map(find_interface, ['10.231.7.1', 'fd31::1', '8.8.8.8']))"
    )
    for index, name in enumerate(machines):
        done = subprocess.run(
            ["ip", "netns", "exec", name, sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == f"wire{index} wire{index} None\n", done.stderr


def test_a_job_on_this_machine_alone_meets_on_its_loopback() -> None:
    assert find_interface(None) == find_interface("127.0.0.1") == ("lo0" if sys.platform == "darwin" else "lo")
    assert find_interface("no.such.host.invalid") is None
