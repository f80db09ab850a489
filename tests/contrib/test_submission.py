"""`accel-trainer launch --print` and `--submit`: what is printed for each scheduler, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from accel_trainer.launch.cli import main

SCHEMAS = Path(__file__).with_name("kubernetes_schemas.json")
SLURM = ["--print", "slurm"]
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
    text = printed(capsys, "--print", "slurm", *JOB, "train_it.py")
    options = re.findall(r"^#SBATCH --(\S+)$", text, re.MULTILINE)
    assert options == [
        "job-name=train-it",
        "nodes=2",
        "ntasks-per-node=1",
        "output=%x-%j.log",
        "open-mode=append",
        "gpus-per-node=2",
        "exclusive",
        "requeue",
        "signal=USR1@180",
    ]
    assert "srun --kill-on-bad-exit=0 --cpu-bind=none \\\n" in text
    text = printed(capsys, "--print=slurm", *JOB, "--cpu", "--num_cpu_threads_per_process", "3", "train_it.py")
    assert "gpus" not in text
    assert "#SBATCH --cpus-per-task=6\n" in text
    assert "srun --kill-on-bad-exit=0 --cpus-per-task=6 \\\n" in text


def test_a_slurm_script_runs_the_command_and_requeues_a_job_that_has_saved(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*JOB, "--cpu", "train_it.py", "--lr", "1 e", "$HOME;x", "--print"]
    (folder / "job.sbatch").write_text(printed(capsys, "--print", "slurm", *words))
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
    command = (
        printed(capsys, "--print", "slurm", *JOB, "--cpu", "train_it.py")
        .split("accel-trainer launch ")[1]
        .splitlines()[0]
    )
    variables = {"JOB_ID": "17", "PROCID": "1", "LOCALID": "0", "NTASKS": "2", "STEP_NUM_TASKS": "2"}
    variables |= {"STEP_NUM_NODES": "2", "STEP_NODELIST": "node[1-2]", "STEP_TASKS_PER_NODE": "1(x2)"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert "processes here: 2 (machine 1 of 2)" in printed(capsys, "--dry-run", *command.split())


def manifest(capsys: pytest.CaptureFixture[str], kind: str, *words: str) -> dict[str, Any]:
    """Return the objects that are printed by their kind, each of which its published schema allows."""
    schemas = json.loads(SCHEMAS.read_text())
    text = printed(capsys, "--print", kind, "--image", "me/train:1", *words)
    objects = {each["kind"]: each for each in yaml.safe_load_all(text)}
    for name, content in objects.items():
        jsonschema.validate(content, schemas[name])
    return objects


def node_job(objects: dict[str, Any]) -> dict[str, Any]:
    """Return the Job of the machines."""
    spec = objects["JobSet"]["spec"] if "JobSet" in objects else objects["TrainingRuntime"]["spec"]["template"]["spec"]
    [job] = spec["replicatedJobs"]
    assert job["name"] == "node"  # by which Kubeflow finds the ranks' pods and names their addresses
    found: dict[str, Any] = job["template"]["spec"]
    return found


@pytest.mark.parametrize("kind", ["kubernetes", "jobset"])
def test_a_manifest_has_a_pod_for_each_machine(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--resources", "memory=64Gi,rdma/hca=1", "--secret", "store,hub", "--volume", "runs:/runs,data:/data"]
    objects = manifest(capsys, kind, *words, *JOB, "train_it.py", "--lr", '1 "e"', "$(HOME)", "\U0001f600")
    assert list(objects) == (["JobSet"] if kind == "jobset" else ["TrainingRuntime", "TrainJob"])
    assert {each["metadata"]["name"] for each in objects.values()} == {"train-it"}
    job = node_job(objects)
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    given = ["--lr", '1 "e"', "$$(HOME)", "\U0001f600"]
    assert container["command"] == ["accel-trainer", "launch", *JOB, "train_it.py", *given]
    assert container["image"] == "me/train:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2, "memory": "64Gi", "rdma/hca": "1"}
    assert container["envFrom"] == [{"secretRef": {"name": "store"}}, {"secretRef": {"name": "hub"}}]
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/dev/shm", "/runs", "/data"]
    claims = [each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["volumes"]]
    assert claims == [None, "runs", "data"]
    assert [each["name"] for each in pod["volumes"]] == [each["name"] for each in container["volumeMounts"]]
    if kind == "kubernetes":
        spec = objects["TrainJob"]["spec"]
        runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "train-it"}
        assert spec == {"runtimeRef": runtime, "trainer": {"numNodes": 2, "numProcPerNode": 2}}


@pytest.mark.parametrize("kind", ["kubernetes", "jobset"])
def test_a_pod_that_has_saved_is_started_again_and_has_the_time_to_save(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = node_job(manifest(capsys, kind, "--preemption_grace_seconds", "299.5", *JOB, "x.py"))
    actions = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {"values": ["drained"]})["values"]
    }
    assert actions == {85: "Ignore", "drained": "Ignore", 76: "FailJob", 93: "FailJob"}
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # else Kubernetes refuses the policy
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 330
    assert job["backoffLimit"] == 6
    job = node_job(manifest(capsys, kind, *JOB, "x.py"))
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 150


def test_the_variables_of_a_jobset_are_those_that_the_launcher_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [container] = node_job(manifest(capsys, "jobset", *JOB, "--cpu", "train_it.py"))["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "1"))
    text = printed(capsys, "--dry-run", *container["command"][2:])
    assert "processes here: 2 (machine 1 of 2)" in text
    assert "machine 0 is at train-it-node-0-0.train-it" in text


def test_a_manifest_of_one_machine_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num_processes", "4", "--cpu", "--num_cpu_threads_per_process", "2", "in/2nd.py"]
    objects = manifest(capsys, "kubernetes", *words)
    assert objects["TrainJob"]["metadata"]["name"] == "train-2nd"  # a letter first
    job = node_job(objects)
    [container] = job["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {}, "requests": {"cpu": 8}}
    assert job["completions"] == 1


def test_the_schema_refuses_a_field_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    objects = manifest(capsys, "jobset", *JOB, "x.py")
    node_job(objects)["template"]["spec"]["terminationGraceSeconds"] = 1
    with pytest.raises(jsonschema.ValidationError, match="terminationGraceSeconds"):
        jsonschema.validate(objects["JobSet"], json.loads(SCHEMAS.read_text())["JobSet"])


def test_a_task_of_skypilot_has_machines_bucket_secrets_and_recovery(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ["train_it.py", "1\n\n 'e\""]
    words = ["--resources", "accelerators=H100,use_spot=true,infra=aws", "--volume", "s3://bucket:/runs"]
    words += ["--secret", "HF_TOKEN", "--image", "me/x:1"]
    text = printed(capsys, "--print", "skypilot", *words, *JOB, *script)
    task = yaml.safe_load(text)
    assert (task["name"], task["num_nodes"], task["secrets"]) == ("train-it", 2, {"HF_TOKEN": None})
    assert task["file_mounts"] == {"/runs": {"source": "s3://bucket", "mode": "MOUNT_CACHED"}}
    assert task["resources"] == {
        "accelerators": "H100:2",
        "use_spot": True,
        "infra": "aws",
        "image_id": "docker:me/x:1",
        "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [85]},
    }
    environ = write_program(folder, "accel-trainer", 'printf "%s\\0" "$@" > words.txt; exit 85')
    variables = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NUM_NODES": "2"}
    assert subprocess.run(["bash", "-c", task["run"]], env={**environ, **variables}).returncode == 85
    machines = ["--machine_rank", "1", "--main_process_ip", "10.0.0.7", "--main_process_port", "29500"]
    assert (folder / "words.txt").read_text().split("\0") == ["launch", *machines, *JOB, *script, ""]
    task = yaml.safe_load(printed(capsys, "--print", "skypilot", "--cpu", "--num_processes", "2", "train_it.py"))
    assert task["run"] == "exec accel-trainer launch --cpu --num_processes 2 train_it.py\n"
    assert list(task["resources"]) == ["job_recovery"]


def test_what_a_slurm_job_is_asked_for_stands_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--resources", "partition=gpu,time=24:00:00,array=0-3,7%2", "--preemption_grace_seconds", "300"]
    text = printed(capsys, "--print", "slurm", "--dry_run", *words, *JOB, "train_it.py")
    assert "dry_run" not in text
    for line in ("partition=gpu", "time=24:00:00", "array=0-3,7%2", "output=%x-%A_%a.log", "signal=USR1@360"):
        assert f"#SBATCH --{line}\n" in text
    text = printed(capsys, *SLURM, "--resources", "output=/logs/%j.log,comment=a b", *JOB, "train_it.py")
    assert '#SBATCH --comment="a b"\n' in text
    assert text.rindex("--output=/logs/%j.log\n") > text.rindex("--output=%x-%j.log\n")  # sbatch takes the last


def test_a_job_is_handed_to_the_scheduler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = write_program(folder, "sbatch", "cat > submitted.txt; exit 5")
    monkeypatch.setenv("PATH", environ["PATH"])
    assert main(["launch", "--submit", "slurm", *JOB, "train_it.py"]) == 5
    assert (folder / "submitted.txt").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=train-it\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*SLURM, "train_it.py"],
            "a job for slurm wants a number of processes, .*; set --num_processes, over all mach",
        ),
        ([*SLURM, "--submit", "jobset", *JOB, "train_it.py"], "are two schedulers; give one of them"),
        (["--print", "kuberntes", *JOB, "train_it.py"], "take one of slurm, kubernetes, .*'kuberntes'; did you mean"),
        ([*SLURM, *JOB, "--machine_rank", "1", "train_it.py"], "machine_rank=1 .* the scheduler tells each machine"),
        (
            [*SLURM, *JOB, "train_it.py", "--sort_key", "length", "--hub_token", "hf_abc"],
            "accel-trainer launch: --hub_token: the value would stand in the file for slurm, .* such as HF_TOKEN",
        ),
        (
            ["--print", "kubernetes", *JOB, "--image", "i", "train_it.py", "--license_key=0a1b2c3d4e5f"],
            "--license_key: the value would stand in the file for kubernetes",
        ),
        ([*SLURM, *JOB, "missing.py"], "script 'missing.py' does not exist"),
        (["--print", "kubernetes", "--image", "i", *JOB], "no script to launch"),
        (
            ["--print", "kubernetes", "--image", "i", "--volume", "a:/x,b:/x", *JOB, "x.py"],
            "mounts 'a' and 'b' at /x; name two folders",
        ),
        (["--print", "skypilot", "--cpu", "--resources", "infra=@x", *JOB, "train_it.py"], "a value that is no YAML"),
        ([*SLURM, *JOB, "--parallel_tp_size", "5", "train_it.py"], r"parallel.tp_size=5 .* makes 5 process\(es\)"),
        (
            [*SLURM, "--image", "i", "--volume", "a:/a", *JOB, "train_it.py"],
            "--image, --volume: .* slurm runs on its n",
        ),
        ([*SLURM, "--resources", "signal=TERM@9", *JOB, "train_it.py"], "--resources has signal, which the job itself"),
        ([*SLURM, "--resources", "exclusive", *JOB, "train_it.py"], "has 'exclusive'; expected NAME=VALUE"),
        (
            ["--print", "jobset", "--image", "i", "--volume", "runs", *JOB, "x.py"],
            "has 'runs'; expected SOURCE:/FOLDER",
        ),
        (
            ["--print", "jobset", *JOB, "train_it.py"],
            "a job for jobset wants the container's image; give it with --image",
        ),
        (
            ["--image", "i", "--secret", "s", "train_it.py"],
            "--image, --secret: for a job that a scheduler starts; add --",
        ),
        (["--submit", "kubernetes", "--image", "a", *JOB, "x.py"], "runs kubectl, which is not on the PATH"),
        (["--print", "skypilot", *JOB, "train_it.py"], "has no accelerators, and a machine of this job .* has 2 GPU"),
        (
            ["--print", "skypilot", "--resources", "accelerators=H100:8", *JOB, "train_it.py"],
            "has accelerators=H100:8, and a machine of this job for skypilot has 2 GPU",
        ),
        (["--submit", "skypilot", "--cpu", *JOB, "train_it.py"], "--submit skypilot is not offered; .*sky jobs launch"),
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
    words = ["--print", "kubernetes", "--image", "a", *JOB]
    assert main(["launch", *words, "x.py"]) == 2
    assert "default_config.yaml would be used here, and is on no machine of a job for kub" in capsys.readouterr().err
    assert main(["launch", "--print", "skypilot", "--resources", "accelerators=H100", *JOB, "train_it.py"]) == 2
    assert "default_config.yaml would be used here, and is on no machine of a job for sky" in capsys.readouterr().err
    assert main(["launch", *words, "--config-file=full_shard", "x.py"]) == 0


@pytest.mark.usefixtures("folder")
def test_variables_of_this_machine_are_in_no_container(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert main(["launch", "--print", "kubernetes", "--image", "a", *JOB, "x.py"]) == 2
    assert re.search("mixed_precision=bf16 .*: variables of this machine reach no machine", capsys.readouterr().err)
    assert main(["launch", *SLURM, *JOB, "train_it.py"]) == 0  # sbatch takes them along
