"""Jobs on two machines: two network namespaces, joined by one wire, whose names resolve to nothing useful."""

from __future__ import annotations

import os
import shutil
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


def start(machines: list[str], rank: int, script: Path, *words: str, address: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", machines[rank], sys.executable, "-m", "accel_trainer", "launch", "--cpu"]
    command += ["--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", address, *words, str(script)]
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
