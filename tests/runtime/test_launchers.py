"""What launchers say about a process, and what of it is refused."""

from __future__ import annotations

import pytest

from accel_trainer.errors import ProcessGroupError
from accel_trainer.runtime.launchers import LaunchInfo, find_launch_info, first_slurm_host

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


def test_an_mpi_of_one_process_gets_no_address_on_which_two_jobs_would_meet():
    alone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    info = find_launch_info(alone)
    assert info is not None
    assert (info.world_size, info.main_address) == (1, None)


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
