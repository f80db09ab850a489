"""`accel-trainer launch --slurm` and `--kubernetes`: what is printed, what it does, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_trainer.launch.cli import main

JOB = ["--num_machines", "2", "--num_processes", "4", "--use_fsdp"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_it.py").touch()
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words]) == 0
    return capsys.readouterr().out


def write_program(folder: Path, name: str, text: str) -> dict[str, str]:
    """Put a program on the PATH of the returned environment."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return {**os.environ, "PATH": f"{path.parent}:{os.environ['PATH']}"}


def test_a_slurm_script_asks_for_the_machines_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--slurm", *JOB, "--submit=false", "train_it.py")
    options = re.findall(r"^#SBATCH --(\S+)$", text, re.MULTILINE)
    assert options == [
        "job-name=train-it",
        "nodes=2",
        "ntasks-per-node=1",
        "gpus-per-node=2",
        "exclusive",
        "output=%x-%j.log",
        "open-mode=append",
        "requeue",
        "signal=USR1@180",
    ]
    assert "srun --kill-on-bad-exit=1 --cpu-bind=none \\\n" in text
    text = printed(capsys, "--slurm", *JOB, "--cpu", "--num_cpu_threads_per_process", "3", "train_it.py")
    assert "gpus" not in text
    assert "#SBATCH --cpus-per-task=6\n" in text
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=6 \\\n" in text


def test_a_slurm_script_runs_the_command_and_requeues_a_job_that_has_saved(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*JOB, "--cpu", "train_it.py", "--lr", "1 e", "$HOME;x", "--slurm"]
    (folder / "job.sbatch").write_text(printed(capsys, "--slurm", *words))
    subprocess.run(["bash", "-n", "job.sbatch"], check=True)
    environ = write_program(folder, "srun", 'printf "%s\\n" "$@" > srun.txt; exit $CODE')
    environ = write_program(folder, "scontrol", 'echo "$@" >> requeued.txt')
    for code in (0, 85, 3):
        done = subprocess.run(["bash", "job.sbatch"], env={**environ, "CODE": str(code), "SLURM_JOB_ID": "17"})
        assert done.returncode == code
    # The options behind the script are the script's.
    assert (folder / "srun.txt").read_text().splitlines()[2:] == ["accel-trainer", "launch", *words]
    assert (folder / "requeued.txt").read_text() == "requeue 17\n"


def test_the_command_of_a_slurm_script_joins_the_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = printed(capsys, "--slurm", *JOB, "--cpu", "train_it.py").split("accel-trainer launch ")[1].splitlines()[0]
    variables = {"JOB_ID": "17", "PROCID": "1", "LOCALID": "0", "NTASKS": "2", "STEP_NUM_TASKS": "2"}
    variables |= {"STEP_NUM_NODES": "2", "STEP_NODELIST": "node[1-2]", "STEP_TASKS_PER_NODE": "1(x2)"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert "processes here: 2 (machine 1 of 2)" in printed(capsys, "--dry-run", *command.split())


def manifest(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(printed(capsys, "--kubernetes", "--image", "me/train:1", *words))
    return content


def test_a_manifest_has_a_pod_for_each_machine(capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(capsys, *JOB, "train_it.py", "--lr", '1 "e"')
    assert (job["apiVersion"], job["kind"], job["metadata"]) == ("kubeflow.org/v1", "PyTorchJob", {"name": "train-it"})
    assert job["spec"]["nprocPerNode"] == "2"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    [container] = replicas["Master"]["template"]["spec"]["containers"]
    assert container["command"] == ["accel-trainer", "launch", *JOB, "train_it.py", "--lr", '1 "e"']
    assert container["image"] == "me/train:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}


def test_a_manifest_of_one_machine_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(capsys, "--num_processes", "4", "--cpu", "--num_cpu_threads_per_process", "2", "in/image.py")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master"]
    [container] = replicas["Master"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {}, "requests": {"cpu": 8}}


def test_a_job_is_handed_to_the_scheduler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = write_program(folder, "sbatch", "cat > submitted.txt; exit 5")
    monkeypatch.setenv("PATH", environ["PATH"])
    assert main(["launch", "--slurm", "--submit", *JOB, "train_it.py"]) == 5
    assert (folder / "submitted.txt").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=train-it\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slurm", "train_it.py"], "--slurm wants a number of processes, .*; set --num_processes, over all machines"),
        (["--slurm", "--kubernetes", *JOB, "train_it.py"], "are two schedulers; give one of them"),
        (["--slurm", *JOB, "--machine_rank", "1", "train_it.py"], "machine_rank=1 .* the scheduler tells each machine"),
        (
            ["--slurm", *JOB, "train_it.py", "--sort_key", "length", "--hub_token", "hf_abc"],
            "accel-trainer launch: --hub_token: the value would stand in the file of --slurm, .* such as HF_TOKEN",
        ),
        (
            ["--kubernetes", *JOB, "--image", "i", "train_it.py", "--license_key=0a1b2c3d4e5f"],
            "--license_key: the value would stand in the file of --kubernetes",
        ),
        (["--slurm", *JOB, "missing.py"], "script 'missing.py' does not exist"),
        (["--slurm", *JOB, "--parallel_tp_size", "5", "train_it.py"], r"parallel.tp_size=5 .* makes 5 process\(es\)"),
        (["--kubernetes", *JOB, "train_it.py"], "--kubernetes wants the container's image; give it with --image"),
        (["--submit", "train_it.py"], "are for a job of --slurm or --kubernetes; add one of them"),
        (["--kubernetes", "--submit", "--image", "a", *JOB, "x.py"], "runs kubectl, which is not on the PATH"),
    ],
)
def test_a_job_that_cannot_be_written_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", *words]) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err)
    assert captured.out == ""


def test_the_default_file_of_this_machine_is_in_no_container(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "default", "--config_file", str(folder / "hf/accel_trainer/default_config.yaml")]) == 0
    words = ["--kubernetes", "--image", "a", *JOB]
    assert main(["launch", *words, "x.py"]) == 2
    assert "default_config.yaml would be used here, and is in no container" in capsys.readouterr().err
    assert main(["launch", *words, "--config-file=full_shard", "x.py"]) == 0
