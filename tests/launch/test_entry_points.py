"""The commands as functions, at the paths at which programs look for them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_trainer.commands.config import default_config_file, write_basic_config
from accel_trainer.commands.config.config_args import ClusterConfig, load_config_from_file
from accel_trainer.commands.env import env_command, env_command_parser
from accel_trainer.commands.launch import launch_command, launch_command_parser
from accel_trainer.commands.merge import merge_command, merge_command_parser
from accel_trainer.commands.test import test_command as run_checks
from accel_trainer.commands.test import test_command_parser as checks_parser
from accel_trainer.errors import ConfigError
from accel_trainer.launch.cli import main
from accel_trainer.launch.entry_points import _words
from accel_trainer.launch.flags import launch_flags, parse_options
from tests import warm
from tests.ranks import RankFailure, run_ranks

# One write a process: print() makes one of each word, and two processes' words may come in any order.
SCRIPT = "import os, sys; sys.stdout.write(' '.join([os.environ.get('WORLD_SIZE', '1'), *sys.argv[1:]]) + '\\n')"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.mark.parametrize(
    "words",
    [
        "train.py",
        "--num-processes 2 --debug --cpu true --mixed-precision bf16 -m train --debug --num-processes 5",
        "--fsdp-version 2 --use-fsdp --fsdp_sharding_strategy FULL_SHARD --num_machines=3 train.py",
        "--dynamo-backend inductor --cpu false --config_file some.yaml -t 3 --no_python -- train --cpu",
        "--use_deepspeed --zero_stage 3 --zero3_init_flag --gradient_clipping auto train.py",
    ],
)
def test_arguments_are_those_of_the_command_line(words: str) -> None:
    args = launch_command_parser().parse_args(words.split())
    again = parse_options([*_words(args), "--", args.training_script, *args.training_script_args], "launch")
    given = parse_options(words.split(), "launch")
    for options in (again, given):
        # The parser has numbers where the command line has text, which the configuration reads alike.
        options.flags = {path: json.dumps(value, sort_keys=True).strip('"') for path, value in options.flags.items()}
    again.spelled = given.spelled = {}  # the parser knows an alias by the option's own flag
    assert again == given


def test_attributes_are_typed_and_absent_ones_are_false() -> None:
    args = launch_command_parser().parse_args(["--multi-gpu", "--num-processes", "4", "--monitor_interval=0.5", "x.py"])
    assert (args.multi_gpu, args.num_processes, args.monitor_interval) == (True, 4, 0.5)
    assert not args.use_fsdp
    assert not args.debug
    assert {flag.name for flag in launch_flags().values()} <= vars(args).keys()


GIVEN = "--lr $3 a$$b $local_rank"


def launch_as_a_program(words: list[str], output: str) -> None:
    """Launch a script, with what it writes in a file."""
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    warm.fork_programs()
    args = launch_command_parser().parse_args(words)
    args.training_script_args = ["--lr", "$3", "a$$b", "$local_rank"]  # as TRL's command line does
    launch_command(args)


def test_the_checks_are_printed_or_refused_as_a_launch_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "--cpu", "--dry_run"]) == 0
    assert "accel_trainer.contrib.self_check" in capsys.readouterr().out
    for words in (["--submit", "slurm"], ["--print", "slurm"], ["--image", "me/train:1"]):
        assert main(["test", "--cpu", *words]) == 2
        assert f"{words[0]}: accel-trainer test starts its job here" in capsys.readouterr().err
    assert main(["explain", "--cpu", "--num_machines", "2", "--num_processes", "2"]) == 2
    assert "num_machines is 2 and main_process_ip is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"), [([], f"1 {GIVEN}"), (["--num_processes", "2"], f"2 {GIVEN}\n2 {GIVEN}")]
)
def test_a_program_launches_a_script(words: list[str], expected: str, tmp_path: Path) -> None:
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(SCRIPT)
    run_ranks(launch_as_a_program, 1, ["--cpu", *words, str(script)], str(output), env=warm.ALONE)
    assert output.read_text().strip() == expected


def test_a_failing_script_is_an_error_with_its_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    with pytest.raises(RankFailure, match=r"subprocess\.CalledProcessError: .* exit status 3"):
        run_ranks(launch_as_a_program, 1, ["--cpu", str(script)], str(tmp_path / "output"), env=warm.ALONE)


def test_the_default_file_counts_as_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accel_trainer").mkdir()
    (tmp_path / "accel_trainer/default_config.yaml").write_text("strategy: fsdp2\nuse_cpu: true\n")
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "run", lambda words: started.append(words) or subprocess.CompletedProcess(words, 0))
    (script := tmp_path / "train.py").touch()
    launch_command(
        launch_command_parser().parse_args(["--fsdp_cpu_offload", "false", "--num_processes=1", str(script)])
    )
    assert started


def test_a_job_that_cannot_run_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    script = tmp_path / "train.py"
    script.touch()
    (tmp_path / "config.yaml").write_text("distributed_type: NO\nanother_invalid_key: 1\n")
    args = launch_command_parser().parse_args(["--config_file", str(tmp_path / "config.yaml"), str(script)])
    with pytest.raises(ValueError, match="unknown key 'another_invalid_key'"):
        launch_command(args)
    args = launch_command_parser().parse_args(
        ["--cpu", "--num_processes", "1", "--fsdp_reshard_after_forward=HYBRID_SHARD", "--use_fsdp", str(script)]
    )
    with pytest.raises(ConfigError, match="hybrid sharding"):
        launch_command(args)


def test_files_of_accelerate_are_read_as_they_are_and_ours_have_its_words(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\n"
        "use_cpu: true\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
    )
    config = load_config_from_file(path)
    assert isinstance(config, ClusterConfig)
    assert (config.distributed_type, config.num_processes, config.use_cpu) == ("FSDP", 4, True)
    assert config.fsdp_config == {"fsdp_version": 2, "fsdp_offload_params": True}
    for again in (tmp_path / "again.yaml", tmp_path / "again.json"):
        (config.to_yaml_file if again.suffix == ".yaml" else config.to_json_file)(again)
        assert load_config_from_file(again) == config
    assert "tpu_name" not in config.to_dict()
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"strategy": "ddp", "use_cpu": True, "launch": {"num_processes": 3, "gpu_ids": "0,2"}}))
    config = load_config_from_file(str(path))
    assert (config.distributed_type, config.num_processes, config.gpu_ids) == ("MULTI_CPU", 3, "0,2")


def test_mistakes_in_a_file_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: NO\nnum_procesess: 2\n")
    with pytest.raises(ValueError, match=r"'num_procesess' at .*config.yaml:2; did you mean 'num_processes'"):
        load_config_from_file(path)
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load_config_from_file(str(tmp_path / "missing.yaml"))


def test_a_basic_configuration_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_basic_config(mixed_precision="bf16")
    assert path == tmp_path / "hf" / "accel_trainer" / "default_config.yaml"
    assert load_config_from_file(path).mixed_precision == "bf16"
    assert write_basic_config() is False
    assert "exists already and was left as it is" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"mixed_precision='bf17' is unknown; expected one of no, bf16, fp16, fp8"):
        write_basic_config("bf17", tmp_path / "other.yaml")
    assert load_config_from_file(write_basic_config("fp8", tmp_path / "other.yaml")).mixed_precision == "fp8"
    assert Path(default_config_file).suffix == ".yaml"


def test_the_report_is_printed_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    facts = env_command(env_command_parser().parse_args([]))
    assert f"- Python: {facts['Python']}" in capsys.readouterr().out


def test_weights_are_merged_by_arguments(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    (tmp_path / "in").mkdir()
    save_file({"weight": torch.ones(2)}, tmp_path / "in" / "model.safetensors")
    merge_command(merge_command_parser().parse_args([str(tmp_path / "in"), str(tmp_path / "out")]))
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].tolist() == [1, 1]


def test_the_checks_run_by_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(words: list[str]) -> argparse.Namespace:
        started.append(words)
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)  # tests/launch/test_self_check.py runs them
    run_checks(checks_parser().parse_args(["--config_file", "some.yaml"]))
    assert started == [[sys.executable, "-m", "accel_trainer", "test", "--config_file", "some.yaml"]]
