"""Which process this is: what launchers say, what a device can serve, and the group that is joined."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.runtime import process as process_module
from accel_trainer.runtime.process import (
    LaunchInfo,
    find_launch_info,
    first_slurm_host,
    init_process,
    read_environment,
    select_device,
)
from tests.ranks import RankFailure, preload, run_ranks

preload("accel_trainer.accelerator")

ROOT = Path(__file__).resolve().parents[2]

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "40123",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# --- what a launcher says ------------------------------------------------------------------------------------------


def test_no_launcher_is_no_job():
    assert find_launch_info({}) is None
    assert find_launch_info({"PATH": "/bin", "MASTER_ADDR": "x", "LOCAL_RANK": "0"}) is None


def test_torchrun():
    assert find_launch_info(TORCHRUN) == LaunchInfo("torchrun", 5, 1, 8, 4, "node0", 29400)


def test_rank_and_world_size_alone_are_one_node():
    info = find_launch_info({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    assert info == LaunchInfo("torchrun", 1, 1, 2, 2, "127.0.0.1", None)


def test_torchrun_inside_slurm_or_mpi_is_torchrun():
    for outer in (SLURM, OPEN_MPI, PMI):
        info = find_launch_info(outer | TORCHRUN)
        assert info is not None
        assert (info.launcher, info.rank, info.world_size) == ("torchrun", 5, 8)


def test_slurm():
    assert find_launch_info(SLURM) == LaunchInfo("SLURM", 5, 1, 8, 4, "gpu003", 12000 + 40123 % 20000)


def test_slurm_takes_a_main_address_that_the_user_set():
    info = find_launch_info(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert info is not None
    assert (info.main_address, info.main_port) == ("10.0.0.1", 1234)


@pytest.mark.parametrize(("node", "tasks"), [("0", 4), ("1", 4), ("2", 3), ("3", 1)])
def test_slurm_nodes_may_hold_different_numbers_of_tasks(node: str, tasks: int):
    several = {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3,1", "SLURM_STEP_NUM_TASKS": "12", "SLURM_NODEID": node}
    info = find_launch_info(SLURM | several | {"SLURM_LOCALID": "0"})
    assert info is not None
    assert info.local_world_size == tasks


def test_slurm_with_pmi_plugin_is_slurm():
    info = find_launch_info(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"})
    assert info is not None
    assert info.launcher == "SLURM"


def test_a_single_slurm_task_is_no_job():
    # What an interactive shell (srun --pty bash) and a batch script outside of srun look like.
    assert find_launch_info(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert find_launch_info({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) is None


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("login1", "login1"),
        ("a,b", "a"),
        ("gpu[003-007,012],login1", "gpu003"),
        ("gpu[3,5]", "gpu3"),
        ("rack1-gpu[08-09]", "rack1-gpu08"),
        ("node-[1-2].cluster", "node-1.cluster"),
        ("r[1-2]n[3-4]", "r1n3"),
    ],
)
def test_first_host_of_a_slurm_node_list(node_list: str, host: str):
    assert first_slurm_host(node_list) == host


def test_an_unreadable_slurm_node_list_is_refused():
    with pytest.raises(ProcessGroupError, match=r"node list 'gpu\[1-2' cannot be read; set MASTER_ADDR"):
        first_slurm_host("gpu[1-2")


def test_open_mpi():
    assert find_launch_info(OPEN_MPI) == LaunchInfo("MPI", 3, 1, 4, 2, "node0", 29500)


def test_open_mpi_on_one_node_needs_no_address():
    info = find_launch_info(without(OPEN_MPI, "MASTER_ADDR") | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert info is not None
    assert info.main_address == "127.0.0.1"


def test_pmi():
    assert find_launch_info(PMI) == LaunchInfo("MPI", 1, 1, 2, 2, "127.0.0.1", 29500)


def test_pmi_that_does_not_name_its_node_gets_no_loopback_address():
    # Two ranks on two nodes would each look for the other on their own node, and hang.
    info = find_launch_info({"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert info is not None
    assert info.main_address is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set although another variable of the launcher is"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK is not set although"),
        ({"WORLD_SIZE": "2"}, "RANK is not set although"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set although"),
        (TORCHRUN | {"RANK": "first"}, "RANK='first' is not an integer"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE='two' is not an integer"),
        (TORCHRUN | {"MASTER_PORT": "tcp"}, "MASTER_PORT='tcp' is not an integer"),
        (TORCHRUN | {"RANK": "8"}, "torchrun says rank 8 of 8; ranks go from 0"),
        (TORCHRUN | {"RANK": "-1"}, "torchrun says rank -1 of 8"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "rank 5 of 0"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "torchrun says local rank 4 of 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "9 processes on this node and 8 in the whole job"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not set although"),
        (SLURM | {"SLURM_PROCID": "8"}, "SLURM says rank 8 of 8"),
        (SLURM | {"MASTER_PORT": "x"}, "MASTER_PORT='x' is not an integer"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK is not set although"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "x"}, "OMPI_COMM_WORLD_LOCAL_SIZE='x' is not an integer"),
        (OPEN_MPI | {"MASTER_PORT": ""}, "MASTER_PORT='' is not an integer"),
    ],
)
def test_incomplete_and_contradictory_variables_are_refused(environ: dict[str, str], message: str):
    with pytest.raises(ProcessGroupError, match=message):
        find_launch_info(environ)


# --- which device --------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretend to be on a machine with `count` accelerators of a kind. No test machine has any."""

    def pretend(kind: str, count: int = 1) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return pretend


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_each_local_rank_gets_its_device(machine: Any, kind: str):
    machine(kind, 4)
    assert [select_device(rank, 4, use_cpu=False) for rank in range(4)] == [torch.device(kind, i) for i in range(4)]


def test_use_cpu_wins_over_an_accelerator(machine: Any):
    machine("cuda", 4)
    assert select_device(0, 1, use_cpu=True) == torch.device("cpu")


def test_a_machine_without_accelerator_runs_on_the_cpu(machine: Any):
    machine("cuda", 0)
    assert select_device(3, 4, use_cpu=False) == torch.device("cpu")


def test_more_ranks_than_devices_are_refused(machine: Any):
    machine("cuda", 2)
    with pytest.raises(ConfigError, match=r"local rank 2 has no device: 3 processes .* 2 cuda device.*most 2.*--cpu"):
        select_device(2, 3, use_cpu=False)


def test_mps_serves_one_process(machine: Any):
    machine("mps")
    assert select_device(0, 1, use_cpu=False) == torch.device("mps")
    with pytest.raises(ConfigError, match=r"2 processes were started on this node, and its one mps device .*--cpu"):
        select_device(0, 2, use_cpu=False)


def test_a_rank_without_a_device_fails_before_it_joins(machine: Any):
    machine("cuda", 1)
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError, match="local rank 1 has no device"):
        init_process(environ, timeout_seconds=1)


def test_one_process_on_an_accelerator_uses_it(machine: Any):
    machine("cuda", 2)
    process = init_process({})
    assert (process.device, process.world_size, process.backend) == (torch.device("cuda", 0), 1, None)


# --- the group -----------------------------------------------------------------------------------------------------


def group_timeout(group: Any = None) -> float:
    """Return what the group's backend for the CPU has as its timeout, in seconds."""
    group = group or dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def join_and_describe() -> dict[str, Any]:
    """Join without any flag, twice, through every door; return what this rank sees."""
    from accel_trainer import Accelerator
    from accel_trainer.runtime.mesh import init_mesh
    from accel_trainer.state import PartialState

    environ = dict(os.environ)
    torch.set_num_threads(8)
    os.cpu_count = lambda: 6  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = init_process(read_environment(), timeout_seconds=41)
        second = init_process(read_environment())
        state, accelerator = PartialState(), Accelerator()
        meshes = [init_mesh(first, shape, 43) for shape in ((4,), (2, 2))]
    total = torch.ones(1)
    dist.all_reduce(total)
    return {
        "contexts": {first, second, state.process, accelerator.process},
        "total": total.item(),
        "timeout": group_timeout(),
        "mesh_timeouts": [group_timeout(group) for mesh in meshes for group in mesh.get_all_groups()],
        "threads": torch.get_num_threads(),
        "type": accelerator.distributed_type.value,
        "environ_changes": set(environ.items()) ^ set(os.environ.items()),
    }


def test_ranks_on_a_cpu_machine_are_one_job():
    # Without any flag: two ranks must not each believe that they are alone.
    results = run_ranks(join_and_describe, 4, env={"OMP_NUM_THREADS": None})
    for rank, result in enumerate(results):
        (context,) = result["contexts"]
        assert (context.rank, context.local_rank, context.world_size, context.local_world_size) == (rank, rank, 4, 4)
        assert (context.device, context.backend) == (torch.device("cpu"), "gloo")
        assert (context.is_main, context.is_local_main, context.is_distributed) == (rank == 0, rank == 0, True)
        assert result["total"] == 4.0
        assert result["type"] == "MULTI_CPU"
        assert result["environ_changes"] == set()
        # 6 cores for 4 ranks.
        assert result["threads"] == 1
        assert result["timeout"] == 41
        # The mesh over all ranks uses the job's own group; the others are new.
        assert result["mesh_timeouts"] == [41, 43, 43]


def join_later_with(door: str) -> dict[str, Any]:
    from accel_trainer import Accelerator
    from accel_trainer.plugins import InitProcessGroupKwargs
    from accel_trainer.state import PartialState

    torch.set_num_threads(3)
    if door == "user":
        dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    else:
        PartialState()
    before = group_timeout()
    plain = Accelerator()
    unchanged = group_timeout()
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
    process = Accelerator(kwargs_handlers=[handler]).process
    changed = group_timeout()
    PartialState()
    return {
        "timeouts": [before, unchanged, changed, group_timeout()],
        "seen": (plain.num_processes, process.rank, process.local_rank, process.backend, str(process.device)),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize(
    ("door", "environ", "expected"),
    [
        ("user", {}, [50, 50, 60, 60]),
        ("PartialState", {"ACCELERATE_USE_CPU": "true"}, [1800, 1800, 60, 60]),
        ("PartialState", {"ACCEL_TRAINER_TIMEOUT_SECONDS": "70"}, [70, 70, 60, 70]),
    ],
)
def test_a_timeout_that_was_asked_for_reaches_a_group_that_exists(
    door: str, environ: dict[str, str], expected: list[float]
):
    for rank, result in enumerate(run_ranks(join_later_with, 2, door, env=environ)):
        assert result["timeouts"] == expected
        assert result["seen"] == (2, rank, rank, "gloo", "cpu")
        # OMP_NUM_THREADS is set: the number of threads is the user's.
        assert result["threads"] == 3


def join_as_group_of_one() -> tuple[Any, ...]:
    process = init_process(read_environment(), timeout_seconds=9)
    return process.world_size, process.backend, dist.is_initialized(), process.is_distributed, group_timeout()


def test_world_size_one_with_a_rank_is_a_group_of_one():
    assert run_ranks(join_as_group_of_one, 1) == [(1, "gloo", True, False, 9)]


def test_without_a_launcher_there_is_no_group():
    process = init_process({})
    assert (process.rank, process.world_size, process.backend) == (0, 1, None)
    assert not dist.is_initialized()


def arrive_unless(missing: int) -> Any:
    if int(os.environ["RANK"]) == missing:
        time.sleep(2.2)
        return None
    begin = time.monotonic()
    try:
        init_process(read_environment(), timeout_seconds=1)
    except ProcessGroupError as error:
        return time.monotonic() - begin, str(error), dist.is_initialized()
    raise AssertionError("joined a group that is not complete")


@pytest.mark.parametrize("agent_store", ["True", None])
def test_a_rank_that_never_arrives_is_an_error_after_the_timeout(agent_store: str | None):
    result, _ = run_ranks(arrive_unless, 2, 1, env={"TORCHELASTIC_USE_AGENT_STORE": agent_store})
    seconds, message, initialized = result
    assert 0.9 < seconds < 2.1
    assert "rank 0 of 2 could not join the process group at 127.0.0.1:" in message
    assert "Check that all ranks were started" in message
    assert not initialized


def wait_for_a_rank_that_left() -> float:
    process = init_process(read_environment(), timeout_seconds=1)
    begin = time.monotonic()
    if process.rank == 0:
        with pytest.raises(RuntimeError, match=r"Timed out|timeout"):
            dist.all_reduce(torch.ones(1))
    else:
        time.sleep(1.5)
    return time.monotonic() - begin


def test_a_collective_on_the_cpu_waits_no_longer_than_the_timeout():
    assert run_ranks(wait_for_a_rank_that_left, 2)[0] < 1.4


def test_an_address_that_is_missing_is_named():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    with pytest.raises(ProcessGroupError, match="MPI started rank 1 of 2 and MASTER_ADDR is not set"):
        init_process(environ, timeout_seconds=1)


def wrong_backend() -> None:
    torch.accelerator.is_available = lambda: True  # type: ignore[assignment]
    torch.accelerator.current_accelerator = lambda: torch.device("cuda")  # type: ignore[assignment]
    torch.accelerator.device_count = lambda: 2  # type: ignore[assignment]
    torch.accelerator.set_device_index = lambda index: None  # type: ignore[assignment]
    dist.init_process_group("cpu:gloo")
    init_process(read_environment())


def test_a_users_group_that_cannot_carry_the_device_is_refused():
    with pytest.raises(RankFailure, match=r"backend 'cpu:gloo', which cannot carry cuda tensors; initialise it with"):
        run_ranks(wrong_backend, 2)


SCRIPT = """
import sys, torch
from accel_trainer import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.ones(1))
print(accelerator.process_index, int(total), flush=True)
"""


def test_a_script_that_just_ends_leaves_the_group_without_a_warning(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0 2", "1 2"]
    assert done.stderr == ""


@pytest.mark.parametrize("error", [None, ValueError("boom")])
def test_a_script_that_fails_does_not_wait_for_the_others(error: Exception | None, monkeypatch: pytest.MonkeyPatch):
    left = []
    monkeypatch.setattr(process_module, "destroy_process_group", lambda: left.append(True))
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    process_module._leave_at_exit()
    assert bool(left) == (error is None)


def test_contexts_are_plain_values():
    process = init_process({})
    assert pickle.loads(pickle.dumps(process)) == process
