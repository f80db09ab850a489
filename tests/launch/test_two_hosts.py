"""Jobs on two machines: two network namespaces, joined by one wire, whose names resolve to nothing useful."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_trainer.launch.network import find_interface

SCRIPT = """
import torch
from accel_trainer import Accelerator
accelerator = Accelerator()
total = int(accelerator.gather(torch.tensor([accelerator.process_index])).sum())
print('rank', accelerator.process_index, 'of', accelerator.num_processes, 'sum', total, flush=True)
"""


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


def start(
    machines: list[str], rank: int, script: Path, *words: str, address: str, last: str = ""
) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", machines[rank], sys.executable, "-m", "accel_trainer", "launch", "--cpu"]
    command += [
        "--num_machines",
        "2",
        "--machine_rank",
        str(rank),
        "--main_process_ip",
        address,
        *words,
        str(script),
        last,
    ]
    environ = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    environ["HF_HOME"] = str(script.parent)
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("order", "address", "delay"), [((0, 1), "10.231.7.1", 0.0), ((1, 0), "10.231.7.1", 3.0), ((0, 1), "fd31::1", 0.0)]
)
def test_two_machines_meet_by_the_address_of_the_first(
    machines: list[str], tmp_path: Path, order: tuple[int, int], address: str, delay: float
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    started = {}
    for rank in order:
        started[rank] = start(machines, rank, script, "--num_processes", "2", address=address)
        time.sleep(delay if rank == order[0] else 0)
    outputs = {rank: process.communicate(timeout=120) for rank, process in started.items()}
    assert [started[rank].returncode for rank in (0, 1)] == [0, 0], outputs
    assert [outputs[rank][0] for rank in (0, 1)] == ["rank 0 of 2 sum 1\n", "rank 1 of 2 sum 1\n"]


def ends(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    _, errors = process.communicate(timeout=seconds)
    return process.returncode, errors


def test_a_machine_says_for_whom_it_waits(machines: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    first = start(machines, 1, script, "--num_processes", "2", address="10.231.7.1")
    time.sleep(14.0)
    second = start(machines, 0, script, "--num_processes", "2", address="10.231.7.1")
    code, errors = ends(first, 120)
    assert (code, ends(second, 60)[0]) == (0, 0), errors
    assert (
        "machine 1 has waited 10 s for machine 0 at 10.231.7.1:29500; start it there, or correct --main_process_ip"
        in errors
    )


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, "machine 1 of 2 did not come to 10.231.7.1 port 29500 within 2 s; start the job there"),
        (1, "machine 0 was not reached at 10.231.7.1 port 29500 within 2 s"),
    ],
)
def test_a_machine_that_does_not_come_is_named(machines: list[str], tmp_path: Path, rank: int, message: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ("--num_processes", "2", "--rdzv_conf", "timeout=2")
    code, errors = ends(start(machines, rank, script, *words, address="10.231.7.1"), 60)
    assert code
    assert message in errors


SLEEPING = """
import os, sys, time
from pathlib import Path
rank = os.environ['RANK']
Path(__file__).with_name('started' + rank).write_text(str(os.getpid()))
if sys.argv[1] == rank:
    sys.exit(9)
time.sleep(100)
"""


def start_both(machines: list[str], tmp_path: Path, failing: str) -> list[subprocess.Popen[str]]:
    script = tmp_path / "train.py"
    script.write_text(SLEEPING)
    words = ("--num_processes", "2", "--monitor_interval", "0.1")
    started = [start(machines, rank, script, *words, address="10.231.7.1", last=failing) for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"started{rank}").exists() for rank in range(2)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return started


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_named_on_the_other_machine(machines: list[str], tmp_path: Path, failing: int) -> None:
    started = start_both(machines, tmp_path, str(failing))
    code, errors = ends(started[1 - failing], 15)
    assert code == 9
    assert f"on machine {failing} rank {failing} (pid " in errors
    assert "failed with exit code 9; this ended the job" in errors
    assert ends(started[failing], 15)[0] == 9


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_launcher_is_named_on_the_other_machine(machines: list[str], tmp_path: Path, killed: int) -> None:
    started = start_both(machines, tmp_path, "none")
    started[killed].kill()
    # The launcher leaves its worker behind, which holds the pipes.
    killed_at = time.monotonic()
    code, errors = ends(started[1 - killed], 25)
    took = time.monotonic() - killed_at
    os.kill(int((tmp_path / f"started{killed}").read_text()), signal.SIGKILL)
    started[killed].communicate(timeout=10)
    assert code == 1
    assert f"on machine {killed} the launcher has ended without a word or cannot be reached" in errors
    assert took < 15


def test_the_interface_is_the_one_that_reaches_the_main_machine(machines: list[str]) -> None:
    code = (
        "from accel_trainer.launch.network import find_interface\n"
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
