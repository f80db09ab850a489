"""What is started, decided before anything starts: number of processes, environment, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from accel_trainer.config import resolve
from accel_trainer.errors import ConfigError
from accel_trainer.launch.config_file import default_config_path
from accel_trainer.launch.job import UNBOUND, Job, plan_job, read_options, run_job
from accel_trainer.registry import load_strategy
from accel_trainer.runtime.cores import usable_cores
from accel_trainer.strategies.api import Strategy


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def plan(tmp_path: Path, *words: str, **environ: str) -> Job:
    variables = {"HF_HOME": str(tmp_path), **environ}
    return plan_job(read_options(words, "accel-trainer launch", variables), variables)


@pytest.mark.parametrize(
    ("words", "needs_group", "num_local"),
    [
        pytest.param("", False, 1, id="one process takes the launcher's place"),
        pytest.param("--num_processes 2", True, 2, id="several need a group"),
        pytest.param("--strategy ddp", True, 1, id="DDP on one process is a group of one"),
        # Somebody has to stand by, and the launcher is not replaced.
        *((words, True, 1) for words in ("--max_restarts 1", "--log_dir logs", "--tee 3", "--enable_cpu_affinity")),
        pytest.param(
            "--num_processes 6 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1", True, 3, id="two machines"
        ),
    ],
)
def test_processes_here_and_whether_they_form_a_group(
    tmp_path: Path, script: str, words: str, needs_group: bool, num_local: int
) -> None:
    job = plan(tmp_path, "--cpu", *words.split(), script, "--lr", "1")
    assert (job.needs_group, job.num_local_processes) == (needs_group, num_local)
    # A worker's lines come as they are printed, where the launcher may stand in between.
    assert job.command == (sys.executable, *(["-u"] if needs_group else []), script, "--lr", "1")


def test_modules_and_programs_are_started_as_such(tmp_path: Path) -> None:
    assert plan(tmp_path, "--cpu", "-m", "json.tool", "x").command == (sys.executable, "-m", "json.tool", "x")
    assert plan(tmp_path, "--cpu", "--no_python", "true", "x").command == ("true", "x")


def test_the_file_says_how_many_processes_and_the_flag_wins(tmp_path: Path, script: str) -> None:
    (tmp_path / "two.yaml").write_text("launch: {num_processes: 2}\nuse_cpu: true\n")
    arguments = ["--config_file", str(tmp_path / "two.yaml")]
    assert plan(tmp_path, *arguments, script).num_local_processes == 2
    assert plan(tmp_path, *arguments, "--num_processes", "3", script).num_local_processes == 3


def test_fewer_processes_after_restarts_are_a_range_in_flags_files_and_variables(tmp_path: Path, script: str) -> None:
    (tmp_path / "ours.yaml").write_text("launch: {num_processes: 2:4, max_restarts: 1}\nuse_cpu: true\n")
    (tmp_path / "other.yaml").write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2:4\n")
    spellings: list[tuple[list[str], dict[str, str]]] = [
        (["--cpu", "--num_processes", "2:4"], {}),
        (["--cpu", "--min_processes", "2"], {"ACCEL_TRAINER_LAUNCH__NUM_PROCESSES": "4"}),
        (["--cpu"], {"ACCEL_TRAINER_LAUNCH__NUM_PROCESSES": "2:4"}),
        (["--config_file", str(tmp_path / "ours.yaml")], {}),
        (["--config_file", str(tmp_path / "other.yaml")], {}),
    ]
    for words, environ in spellings:
        job = plan(tmp_path, *words, "--max_restarts", "3", script, **environ)
        launch = job.resolved.config.launch
        assert (launch.min_processes, launch.num_processes, job.num_local_processes) == (2, 4, 4), words


def test_machines_that_come_and_go_are_a_range(tmp_path: Path, script: str) -> None:
    words = (
        "--cpu --num_machines 1:2 --num_processes 2:4 --main_process_ip 10.0.0.1 --rdzv_backend c10d --max_restarts 3"
    )
    job = plan(tmp_path, *words.split(), script)
    launch = job.resolved.config.launch
    assert (launch.min_machines, launch.num_machines, launch.min_processes, launch.num_processes) == (1, 2, 2, 4)
    assert job.num_local_processes == 2
    # The address of the first round's rank 0 is not that of later ones.
    assert job.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--on_rank_loss replace",
            r"on_rank_loss=replace .*max_restarts=0 .*: that is how many processes may be started in the place of",
        ),
        (
            "--on_rank_loss continue --num_machines 2 --main_process_ip 10.0.0.1",
            r"on_rank_loss=continue .*num_machines=2 .*: ranks go on without one that was killed on one machine",
        ),
        ("--num_processes 1:2", r"for workers that are started again, and launch.max_restarts=0 \(default\)"),
        ("--num_processes 3:2", r"min_processes=3 .* does not fit launch.num_processes=2"),
        ("--min_processes 1", r"min_processes=1 .* does not fit launch.num_processes=null"),
        ("--num_processes 1:", "expected a whole number"),
        (
            "--num_processes 1:2 --max_restarts 1 --num_machines 2 --main_process_ip 10.0.0.1 --rdzv_backend c10d",
            "a job goes on with fewer on one machine, or without a machine; .*num_machines MIN:MAX, too",
        ),
        (
            "--num_machines 1:2 --num_processes 2:4 --max_restarts 1 --main_process_ip 10.0.0.1",
            r"min_machines=1 .* with launch.rdzv_backend=static .*; set rdzv_backend to c10d",
        ),
        (
            "--num_machines 1:2 --num_processes 4 --max_restarts 1 --main_process_ip 10.0.0.1 --rdzv_backend c10d",
            r"min_machines=1 .*: say how many processes so few and all machines have: num_processes 2:4",
        ),
        ("--num_machines 3:2 --num_processes 3:2", r"min_machines=3 .* does not fit launch.num_machines=2 .*MIN:MAX"),
        (
            "--num_machines 1:2 --num_processes 2:4 --main_process_ip 10.0.0.1 --rdzv_backend c10d",
            r"for workers that are started again, and launch.max_restarts=0 \(default\)",
        ),
        ("--num_processes 1:2 --max_restarts 1 --use_deepspeed", "batch sizes are for one number of processes"),
        ("--num_processes 1:2 --max_restarts 1 --parallel_tp_size 2", "tp_size"),
    ],
)
def test_fewer_processes_after_restarts_are_refused_where_they_cannot_be(
    tmp_path: Path, script: str, words: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, "--cpu", *words.split(), script)


def test_the_default_file_is_used_where_it_exists(tmp_path: Path, script: str) -> None:
    default_path = tmp_path / "accel_trainer" / "default_config.yaml"
    default_path.parent.mkdir()
    default_path.write_text("use_cpu: true\nlaunch: {num_processes: 4}\n")
    job = plan(tmp_path, script)
    assert job.num_local_processes == 4
    assert json.loads(job.environment["ACCEL_TRAINER_LAUNCH"])["config_file"] == str(default_path)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HOME": "/hf", "XDG_CACHE_HOME": "/cache"}, "/hf/accel_trainer/default_config.yaml"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/huggingface/accel_trainer/default_config.yaml"),
        ({}, os.path.expanduser("~/.cache/huggingface/accel_trainer/default_config.yaml")),
    ],
)
def test_the_default_file_is_in_the_cache_of_hugging_face(environ: dict[str, str], expected: str) -> None:
    assert str(default_config_path(environ)) == expected


def test_the_workers_come_to_the_same_configuration(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("mixed_precision: bf16\nlaunch: {num_processes: 2}\nfsdp: {min_num_params: 5}\n")
    words = shlex.split("--config_file run.yaml --num_processes 4 --cpu --multi_gpu --gradient_accumulation_steps 3")
    job = plan(tmp_path, *words, script, ACCEL_TRAINER_LAUNCH='{"flags": {"mixed_precision": "fp16"}}')
    monkeypatch.chdir("/")
    seen = resolve(environ=job.environment)
    assert seen.config == job.resolved.config
    assert (seen.config.launch.num_processes, seen.config.mixed_precision) == (4, "bf16")
    assert seen.source("launch.num_processes").where == "--num_processes"
    assert seen.source("strategy").where == "--multi_gpu"
    assert seen.source("mixed_precision").where.endswith("run.yaml:1")


@pytest.mark.parametrize(
    ("words", "environ", "seen", "origin"),
    [
        ("--mixed_precision bf16", {}, "bf16", "--mixed_precision"),
        ("--mixed_precision bf16", {"ACCELERATE_MIXED_PRECISION": "fp16"}, "bf16", "--mixed_precision"),
        ("--mixed_precision no", {}, "no", "--mixed_precision"),
        ("--config_file run.yaml", {}, "fp16", "run.yaml:1"),
        ("", {"ACCEL_TRAINER_MIXED_PRECISION": "bf16"}, "bf16", "ACCEL_TRAINER_MIXED_PRECISION"),
        ("", {"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16", "ACCELERATE_MIXED_PRECISION"),
        ("", {}, None, "default"),
    ],
)
def test_scripts_find_the_precision_of_the_launch_in_accelerates_variable(
    tmp_path: Path,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    environ: dict[str, str],
    seen: str,
    origin: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("mixed_precision: fp16\n")
    Path("script.yaml").write_text("mixed_precision: fp8\n")
    environment = plan(tmp_path, "--cpu", *words.split(), script, **environ).environment
    assert environment.get("ACCELERATE_MIXED_PRECISION") == seen
    # The variable is for others: whom we obey, and in which order, is as before.
    assert resolve(environ=environment).source("mixed_precision").where.endswith(origin)
    is_weaker = origin in ("run.yaml:1", "default")
    assert resolve(environ=environment, file="script.yaml").config.mixed_precision == ("fp8" if is_weaker else seen)


def test_the_precision_of_a_launch_is_not_that_of_one_within_it(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("mixed_precision: 'no'\n")
    outer = plan(tmp_path, "--cpu", "--mixed_precision", "bf16", script).environment
    inner = plan(tmp_path, "--cpu", "--config_file", "run.yaml", script, **outer)
    assert inner.resolved.config.mixed_precision == "no"
    assert resolve(environ=inner.environment).config.mixed_precision == "no"
    # What the user has set counts, as ever.
    users = {**outer, "ACCELERATE_MIXED_PRECISION": "fp16"}
    assert (
        plan(tmp_path, "--cpu", "--config_file", "run.yaml", script, **users).resolved.config.mixed_precision == "fp16"
    )


def test_ranks_of_an_outer_job_do_not_reach_the_script(tmp_path: Path, script: str) -> None:
    job = plan(tmp_path, "--cpu", script, RANK="0", WORLD_SIZE="1", MASTER_ADDR="host", OTHER="kept")
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & job.environment.keys()
    assert job.environment["OTHER"] == "kept"


def test_threads_are_shared_unless_somebody_said_how_many(tmp_path: Path, script: str) -> None:
    two = ["--cpu", "--num_processes", "2"]
    cores = usable_cores()
    assert plan(tmp_path, *two, script).environment["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert plan(tmp_path, *two, script, OMP_NUM_THREADS="7").environment["OMP_NUM_THREADS"] == "7"
    job = plan(tmp_path, *two, "--num_cpu_threads_per_process", "3", script, OMP_NUM_THREADS="7")
    assert job.environment["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in plan(tmp_path, "--cpu", script).environment


def test_gpu_ids_choose_the_devices_and_their_number(tmp_path: Path, script: str) -> None:
    job = plan(tmp_path, "--gpu_ids", "0,2", script, CUDA_VISIBLE_DEVICES="5")
    assert (job.num_local_processes, job.environment["CUDA_VISIBLE_DEVICES"]) == (2, "0,2")
    job = plan(tmp_path, "--gpu_ids", "0,2", "--cpu", script, CUDA_VISIBLE_DEVICES="5")
    assert (job.num_local_processes, job.environment["CUDA_VISIBLE_DEVICES"]) == (1, "5")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("accel_trainer.launch.machine._DEVICE_FILES", (str(tmp_path / "nvidia*"),))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
def test_without_a_number_there_is_one_process_for_each_device(tmp_path: Path, script: str) -> None:
    assert plan(tmp_path, script).num_local_processes == 4
    assert plan(tmp_path, "--num_processes", "2", script).num_local_processes == 2
    assert plan(tmp_path, "--cpu", script).num_local_processes == 1
    assert plan(tmp_path, "--strategy", "single", script).num_local_processes == 1
    words = shlex.split("--num_machines 2 --main_process_ip 10.0.0.1")
    assert plan(tmp_path, *words, script).num_local_processes == 4


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("words", "devices"), [([], 4), (["--gpu_ids", "0,1"], 2)])
def test_more_processes_than_devices_are_refused(tmp_path: Path, script: str, words: list[str], devices: int) -> None:
    job = plan(tmp_path, *words, "--num_processes", "5", script)
    with pytest.raises(ConfigError, match=rf"5 processes on this machine, which has {devices} accelerator device\(s\)"):
        run_job(job)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("number", ["1", "2"])
def test_gpus_that_are_not_there_are_refused(
    tmp_path: Path, script: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = plan(tmp_path, "--num_processes", number, "--gpu_ids", "3,4", script)
    with pytest.raises(ConfigError, match=r"gpu_ids=3,4 \(from --gpu_ids\), and this machine has 4 GPU\(s\), numbered"):
        run_job(job)
    monkeypatch.setattr("accel_trainer.launch.machine._DEVICE_FILES", ())
    with pytest.raises(ConfigError, match="and this machine has no GPU; pass --cpu"):
        run_job(job)


def test_fsdp_on_one_process_is_started_with_a_group(tmp_path: Path, script: str) -> None:
    job = plan(tmp_path, "--cpu", "--use_fsdp", script)
    assert (job.num_local_processes, job.needs_group) == (1, True)


def test_a_missing_script_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = re.escape(f"script 'train.py' does not exist (looked from {tmp_path}); check the path")
    with pytest.raises(ConfigError, match=message + "$"):
        plan(tmp_path, "--cpu", "train.py")
    with pytest.raises(ConfigError, match="for a module, add -m"):
        plan(tmp_path, "--cpu", "json.tool")


def test_a_packaged_configuration_is_found_by_name(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full_shard").mkdir()  # of a user's runs
    job = plan(tmp_path, "--config_file", "full_shard", "--cpu", "--num_processes", "2", script)
    assert job.resolved.config.strategy == "fsdp2"
    assert resolve(environ=job.environment).config == job.resolved.config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", r"no script to launch; usage: accel-trainer launch \[options\] script.py"),
        ("--no_python no-such-program", "program 'no-such-program' is not found"),
        ("-m --no_python true", "--module runs a module with python, and --no_python runs without"),
        ("--config_file no_such.yaml SCRIPT", r"no_such\.yaml"),
        ("--num_machines 2 --num_processes 2 SCRIPT", "num_machines is 2 and main_process_ip is not set; give the"),
        (
            "--num_processes 3 --num_machines 2 --main_process_ip 10.0.0.1 SCRIPT",
            "num_processes=3 .*cannot be divided over .*num_machines=2",
        ),
        (
            "--strategy single --num_processes 2 SCRIPT",
            r"strategy=single \(from --strategy\) is one process, and 2 were asked for",
        ),
        ("--strategy fsdp3 --num_processes 2 SCRIPT", "unknown strategy 'fsdp3'; did you mean 'fsdp2'"),
        (
            "--fsdp_offload_params true --fsdp_wrap_classes A SCRIPT",
            r"--fsdp_offload_params, --fsdp_wrap_classes: without effect with strategy=auto .default.; add --use_fsdp",
        ),
        (
            "--mixed_precision fp8 --num_processes 2 SCRIPT",
            "mixed_precision=fp8 .from --mixed_precision.: fp8 needs torchao, which is not installed",
        ),
        (
            "--use_deepspeed --num_processes 2 --zero_stage 2 --offload_param_device cpu SCRIPT",
            "zero_optimization.offload_param.device .--offload_param_device. is 'cpu'; expected 'none', since",
        ),
        (
            "--use_deepspeed --num_processes 2 --zero_stage auto SCRIPT",
            "stage .--zero_stage. is 'auto'; expected 0, 1, 2 or 3",
        ),
        (
            "--use_deepspeed --num_processes 2 --offload_optimizer_device auto SCRIPT",
            "offload_optimizer.device .* is 'auto'; exp",
        ),
    ],
)
def test_what_every_rank_would_refuse_starts_none(tmp_path: Path, script: str, words: str, message: str) -> None:
    if "deepspeed" in words:
        pytest.importorskip("deepspeed")
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, "--cpu", *words.replace("SCRIPT", script).split())


def test_a_module_that_does_not_exist_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "folder" / "train.py").touch()
    for name in ("folder.train", "folder", "json.tool", "sys"):
        assert plan(tmp_path, "--cpu", "-m", name).command[1:] == ("-m", name)
    for name, part in (("no.such", "no"), ("folder.missing", "folder.missing"), ("folder.train.x", "folder.train.x")):
        with pytest.raises(ConfigError, match=f"module '{name}' is not found .there is no '{part}'; looked from"):
            plan(tmp_path, "--cpu", "-m", name)


@pytest.mark.parametrize("strategy", UNBOUND)
def test_what_the_launcher_knows_without_torch_is_what_the_strategies_say(strategy: str) -> None:
    loaded = load_strategy(strategy)
    assert loaded.capabilities.max_world_size is None
    assert type(loaded).check_config is Strategy.check_config  # and has nothing to check
