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


OF_TORCHRUN = LaunchInfo("torchrun", 5, 1, 8, 4, "node0", 29400)
PORT = 12000 + 40123 % 20000
OF_SLURM = LaunchInfo("SLURM", 5, 1, 8, 4, "gpu003", PORT)
SEVERAL = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3,1", "SLURM_STEP_NUM_TASKS": "12", "SLURM_LOCALID": "0"}
OPEN_MPI_ALONE = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
FOUND: dict[str, tuple[dict[str, str], LaunchInfo | None]] = {
    "no launcher is no job": ({}, None),
    "an address alone is no job": ({"PATH": "/bin", "MASTER_ADDR": "x", "LOCAL_RANK": "0"}, None),
    "torchrun": (TORCHRUN, OF_TORCHRUN),
    "rank and world size alone are one node": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        LaunchInfo("torchrun", 1, 1, 2, 2, "127.0.0.1", None),
    ),
    "torchrun inside SLURM": (SLURM | TORCHRUN, OF_TORCHRUN),
    "torchrun inside Open MPI": (OPEN_MPI | TORCHRUN, OF_TORCHRUN),
    "torchrun inside PMI": (PMI | TORCHRUN, OF_TORCHRUN),
    "SLURM": (SLURM, OF_SLURM),
    "a second step of SLURM meets elsewhere": (
        SLURM | {"SLURM_STEP_ID": "1"},
        LaunchInfo("SLURM", 5, 1, 8, 4, "gpu003", PORT + 1009),
    ),
    "SLURM takes a main address that the user set": (
        SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"},
        LaunchInfo("SLURM", 5, 1, 8, 4, "10.0.0.1", 1234),
    ),
    **{
        f"SLURM's node {node} of several holds {tasks}": (
            SEVERAL | {"SLURM_NODEID": str(node)},
            LaunchInfo("SLURM", 5, 0, 12, tasks, "gpu003", PORT),
        )
        for node, tasks in enumerate((4, 4, 3, 1))
    },
    "SLURM with a PMI plug-in is SLURM": (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}, OF_SLURM),
    # What an interactive shell (srun --pty bash) and a batch script outside of srun look like.
    "a single SLURM task is no job": (
        SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        None,
    ),
    "a batch script is no job": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),
    "Open MPI": (OPEN_MPI, LaunchInfo("MPI", 3, 1, 4, 2, "node0", 29500)),
    "Open MPI on one node needs no address": (
        without(OPEN_MPI, "MASTER_ADDR") | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        LaunchInfo("MPI", 3, 1, 4, 4, "127.0.0.1", 29500),
    ),
    "an MPI of one process gets no address on which two jobs would meet": (
        OPEN_MPI_ALONE,
        LaunchInfo("MPI", 0, 0, 1, 1, None, 29500),
    ),
    "PMI": (PMI, LaunchInfo("MPI", 1, 1, 2, 2, "127.0.0.1", 29500)),
    # Two ranks on two nodes would each look for the other on their own node, and hang.
    "PMI that does not name its node gets no loopback address": (
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        LaunchInfo("MPI", 1, 1, 2, 2, None, 29500),
    ),
}


@pytest.mark.parametrize(("environ", "expected"), FOUND.values(), ids=FOUND)
def test_a_launcher_is_known_by_its_variables(environ: dict[str, str], expected: LaunchInfo | None):
    assert find_launch_info(environ) == expected


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
        (SLURM | {"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE is 2: this is a step of a heterogeneous job"),
    ],
)
def test_incomplete_and_contradictory_variables_are_refused(environ: dict[str, str], message: str):
    with pytest.raises(ProcessGroupError, match=message):
        find_launch_info(environ)
