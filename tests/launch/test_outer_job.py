"""A launcher that a scheduler has started joins the scheduler's job, as a machine of it or as one of its ranks."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from accel_trainer.errors import ConfigError
from accel_trainer.launch.job import Job, plan_job, read_options
from tests import warm
from tests.cells import beyond
from tests.ranks import free_port, preload

preload("accel_trainer.accelerator")

# What each scheduler sets in the second of two places.
PYTORCH_JOB_V1 = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
PYTORCH_JOB_ELASTIC = {
    "PET_NNODES": "2:2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_ID": "job",
    "PET_MAX_RESTARTS": "3", "PET_NPROC_PER_NODE": "2",
}  # fmt: skip
PYTORCH_JOB_OF_RANKS = PYTORCH_JOB_V1 | {  # training-operator 1.8 with an nprocPerNode: WORLD_SIZE counts ranks
    "WORLD_SIZE": "4", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456",
}  # fmt: skip
TRAIN_JOB_V2 = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}  # fmt: skip
SRUN_ONE_PER_NODE = {
    "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_ID": "41",
}  # fmt: skip
SRUN_TWO_PER_NODE = SRUN_ONE_PER_NODE | {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
OPEN_MPI_ONE_PER_NODE = OPEN_MPI | {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "node0",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MPICH_ONE_PER_NODE = MPICH | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "node0"}
RAY_TRAIN = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0",
    "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "41000",
}  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(
        "import os\n"
        "from accel_trainer import Accelerator\n"
        "accelerator = Accelerator()\n"
        "place = accelerator.process_index, accelerator.num_processes\n"
        "here = os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE']\n"
        "print('rank %d of %d, here %s of %s' % (*place, *here), flush=True)\n"
        "accelerator.wait_for_everyone()\n"
    )
    return str(path)


def plan(tmp_path: Path, words: list[str], environ: dict[str, str]) -> Job:
    variables = {"HF_HOME": str(tmp_path), **environ}
    return plan_job(read_options(words, "accel-trainer launch", variables), variables)


@pytest.mark.parametrize(
    ("environ", "address", "num_local"),
    [
        pytest.param(PYTORCH_JOB_V1, ("job-master-0", 23456), 1, id="PyTorchJob"),
        pytest.param(PYTORCH_JOB_OF_RANKS, ("job-master-0", 23456), 2, id="PyTorchJob of ranks"),
        pytest.param(TRAIN_JOB_V2, ("job-node-0-0.job", 29400), 2, id="TrainJob"),
        pytest.param(SRUN_ONE_PER_NODE, ("gpu07", 12041), 1, id="srun"),
        pytest.param(OPEN_MPI_ONE_PER_NODE, ("node0", None), 1, id="Open MPI"),
        pytest.param(MPICH_ONE_PER_NODE, ("node0", None), 1, id="MPICH"),
    ],
)
def test_the_only_launcher_of_a_machine_starts_that_machines_ranks(
    tmp_path: Path, script: str, environ: dict[str, str], address: tuple[str, int | None], num_local: int
) -> None:
    job = plan(tmp_path, ["--cpu", script], environ)
    launch = job.resolved.config.launch
    assert (launch.num_machines, launch.machine_rank) == (2, 1)
    assert (launch.main_process_ip, launch.main_process_port) == address
    assert (job.needs_group, job.num_local_processes) == (True, num_local)
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} & job.environment.keys()
    assert job.outer is not None
    assert job.outer.describe().startswith(f"this is machine 1 of 2, machine 0 is at {address[0]} (by ")


def test_an_elastic_job_of_a_fixed_size_meets_as_it_says(tmp_path: Path, script: str) -> None:
    launch = plan(tmp_path, ["--cpu", script], PYTORCH_JOB_ELASTIC).resolved.config.launch
    assert (launch.num_machines, launch.num_processes, launch.max_restarts) == (2, 4, 3)
    assert (launch.rdzv_backend, launch.rdzv_conf) == ("c10d", "rdzv_id=job")
    assert (launch.main_process_ip, launch.main_process_port) == ("job-worker-0", 23456)


def test_one_machine_starts_as_many_processes_as_its_variables_say(tmp_path: Path, script: str) -> None:
    job = plan(tmp_path, ["--cpu", script], {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"})
    assert (job.num_local_processes, job.needs_group) == (2, True)


@pytest.mark.parametrize(
    ("environ", "world_size"),
    [
        pytest.param(SRUN_TWO_PER_NODE, 4, id="srun"),
        pytest.param(OPEN_MPI, 2, id="Open MPI"),
        pytest.param(MPICH, 2, id="MPICH"),
        pytest.param(RAY_TRAIN, 2, id="Ray Train"),
    ],
)
def test_a_launcher_in_place_of_a_rank_runs_the_script_as_that_rank(
    tmp_path: Path, script: str, environ: dict[str, str], world_size: int
) -> None:
    job = plan(tmp_path, ["--cpu", script, "--lr", "1"], environ)
    assert not job.needs_group
    assert job.command == (sys.executable, "-u", script, "--lr", "1")
    assert environ.items() <= job.environment.items()
    assert job.outer is not None
    assert job.outer.describe().startswith(f"this is rank {world_size - 1} of {world_size} (by ")


def test_an_address_of_the_command_line_is_that_of_a_rank(tmp_path: Path, script: str) -> None:
    (tmp_path / "port.yaml").write_text("launch: {main_process_port: 29600}\n")
    words = ["--cpu", "--config_file", str(tmp_path / "port.yaml"), script]
    assert plan(tmp_path, words, OPEN_MPI).environment["MASTER_PORT"] == "29600"
    assert plan(tmp_path, words, OPEN_MPI_ONE_PER_NODE).resolved.config.launch.main_process_port == 29600
    assert plan(tmp_path, words, RAY_TRAIN).environment["MASTER_PORT"] == "41000"
    flags = ["--main_process_ip", "10.0.0.9", "--main_process_port", "29777", *words]
    environment = plan(tmp_path, flags, RAY_TRAIN).environment
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.9", "29777")


@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"SLURM_JOB_ID": "3", "SLURM_NNODES": "2"}])
def test_a_launcher_that_nobody_has_placed_stands_alone(tmp_path: Path, script: str, environ: dict[str, str]) -> None:
    assert plan(tmp_path, ["--cpu", script], environ).outer is None


def test_a_flag_and_a_file_may_say_the_same(tmp_path: Path, script: str) -> None:
    (tmp_path / "two.yaml").write_text("launch: {num_machines: 2, machine_rank: 0, main_process_ip: 10.0.0.1}\n")
    words = ["--cpu", "--config_file", str(tmp_path / "two.yaml"), "--num_processes", "4", "--machine_rank", "1"]
    launch = plan(tmp_path, [*words, script], TRAIN_JOB_V2).resolved.config.launch
    assert (launch.machine_rank, launch.main_process_ip) == (1, "job-node-0-0.job")
    words += ["--main_process_ip", "10.0.0.2"]
    assert plan(tmp_path, [*words, script], TRAIN_JOB_V2).resolved.config.launch.main_process_ip == "10.0.0.2"


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (
            ["--num_processes", "2"], TRAIN_JOB_V2,
            r"num_processes is 2 \(from --num_processes\), and the job that started this launcher has 4 \(from "
            "PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK",
        ),
        (["--num_machines", "3"], PYTORCH_JOB_V1, "num_machines is 3 .*has 2 .from RANK, WORLD_SIZE.; leave"),
        (["--num_machines", "2", "--machine_rank", "0"], PYTORCH_JOB_V1, "machine_rank is 0 .from --machine_r.*has 1"),
        (["--config_file", "one.yaml"], SRUN_ONE_PER_NODE, "num_machines is 1 .from .*one.yaml:1.*has 2 .from SLURM"),
        (["--num_processes", "1"], OPEN_MPI, "num_processes is 1 .*has 2 .from OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD"),
        (["--num_machines", "1"], PYTORCH_JOB_ELASTIC, "num_machines is 1 .*has 2 .from PET_NNODES, PET_NPROC"),
        (["--num_machines", "4"], PYTORCH_JOB_OF_RANKS, "num_machines is 4 .*has 2 .from PET_NNODES, PET_NPROC"),
        (["--num_processes", "2"], SRUN_TWO_PER_NODE, "num_processes is 2 .*has 4 .from SLURM_PROCID, SLURM_STEP_NUM"),
        (["--num_processes", "4"], MPICH, "num_processes is 4 .*has 2 .from PMI_RANK, PMI_SIZE"),
        (["--machine_rank", "0"], MPICH_ONE_PER_NODE, "machine_rank is 0 .*has 1 .from PMI_RANK, PMI_SIZE"),
        (["--num_processes", "8"], RAY_TRAIN, "num_processes is 8 .*has 2 .from RANK, WORLD_SIZE"),
        (["--tee", "3"], RAY_TRAIN, r"launch.tee=3 .*: the scheduler starts each rank here \(by RANK, WORLD_SIZE\)"),
        (["--on_rank_loss", "continue"], RAY_TRAIN, r"on_rank_loss=continue .*: the scheduler starts each rank here"),
        ([], {"PET_NNODES": "1:4"}, "PET_NNODES is '1:4', a job whose number of machines may change"),
        ([], {"PET_NNODES": "two"}, "PET_NNODES is 'two'; expected a whole number"),
        ([], {"TORCHELASTIC_RUN_ID": "x", **RAY_TRAIN}, "already rank 1 of 2 of another launcher"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused(
    tmp_path: Path,
    script: str,
    words: list[str],
    environ: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.yaml").write_text("launch: {num_machines: 1}\n")
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, ["--cpu", *words, script], environ)


def test_a_hostfile_inside_a_scheduler_is_refused(tmp_path: Path, script: str) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    words = ["--cpu", "--use_deepspeed", "--zero_stage", "2", "--deepspeed_hostfile", str(tmp_path / "hosts"),
             "--deepspeed_multinode_launcher", "nossh"]  # fmt: skip
    with pytest.raises(ConfigError, match="whose machines are started from one of them, and a scheduler"):
        plan(tmp_path, [*words, script], PYTORCH_JOB_V1)


@pytest.mark.parametrize("kind", ["machines", beyond("TrainJob"), "ranks"])
def test_two_launchers_of_one_job_make_one_group(tmp_path: Path, script: str, kind: str) -> None:
    port = str(free_port())

    def start(rank: int) -> Any:
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if kind == "ranks":
            own |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        elif kind == "TrainJob":
            own = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
            own |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        command = [sys.executable, "-m", "accel_trainer", "launch", "--cpu", script]
        environ = {**os.environ, "HF_HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo", **own}
        return warm.run(command, env=environ, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(start, range(2)))
    assert [each.returncode for each in ended] == [0, 0], ended
    here = ["0 of 2", "1 of 2"] if kind == "ranks" else ["0 of 1"] * 2
    assert [each.stdout.strip() for each in ended] == [f"rank {rank} of 2, here {here[rank]}" for rank in range(2)]
    word = "rank" if kind == "ranks" else "machine"
    assert f"accel-trainer launch: this is {word} 1 of 2" in ended[1].stderr
