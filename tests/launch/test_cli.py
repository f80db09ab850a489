"""The command line around `launch`: help, the reports, the file it writes, and how errors are shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_trainer import __version__
from accel_trainer.config import resolve
from accel_trainer.launch.cli import main

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "launch, test, config, check, convert, convert-config, to-fsdp2, ckpt, merge-weights, report, estimate, "
    "estimate-memory, data, explain, completion, env"
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert ", ".join(shown) == COMMANDS


REPLICAS_OF_ONE = ["launch", "--cpu", "--fsdp_sharding_strategy", "HYBRID_SHARD", "--use_fsdp", __file__]
IN_A_ROW = [["--help"], ["launch", "--help"], ["explain", "--help"], REPLICAS_OF_ONE]
RUN_IN_A_ROW = """
import contextlib, io, json, sys
from accel_trainer.__main__ import main
ended = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        code = main(words)
    ended.append([code, printed.getvalue(), [*sys.modules]])
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def in_a_row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    """Run commands in a new interpreter; return of each the code, what it prints, and what is imported by then."""
    command = [sys.executable, "-c", RUN_IN_A_ROW, json.dumps(IN_A_ROW)]
    environ = {**os.environ, "HF_HOME": str(tmp_path_factory.mktemp("home"))}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=30, check=True)
    return {" ".join(words[:2]): ended for words, ended in zip(IN_A_ROW, json.loads(done.stdout), strict=True)}


def test_help_imports_next_to_nothing(in_a_row: dict[str, Any]) -> None:
    _, _, imported = in_a_row["--help"]
    assert "accel_trainer.launch.cli" in imported
    assert not {*imported} & {"torch", "transformers", "numpy", "yaml", "argparse", "accel_trainer.config"}


@pytest.mark.parametrize("command", ["launch", "explain"])
def test_commands_show_their_flags_without_importing_torch(command: str, in_a_row: dict[str, Any]) -> None:
    _, printed, imported = in_a_row[f"{command} --help"]
    assert f"usage: accel-trainer {command}" in printed
    assert "--mixed_precision {no,bf16,fp16,fp8}" in printed
    assert "torch" not in imported


def test_replicas_of_one_process_under_fsdp_are_refused_without_importing_torch(in_a_row: dict[str, Any]) -> None:
    code, printed, imported = in_a_row["launch --cpu"]
    assert code == 2
    assert "this job has one process; start more, or shard in full" in printed
    assert "torch" not in imported


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"accel-trainer {__version__}\n"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["lauch"], "accel-trainer: unknown command 'lauch'; did you mean 'launch'?"),
        (["xyz"], f"accel-trainer: unknown command 'xyz'; expected one of {COMMANDS}\n"),
        (
            ["tpu-config", "--tpu_name", "a"],
            "accel-trainer: tpu-config is a command of accelerate that is not offered: it",
        ),
        (["launch", "--cpu", "no_such.py"], "accel-trainer launch: script 'no_such.py' does not exist"),
        (
            ["config", "default", "--config_file", "a.json"],
            "accel-trainer config: a.json would be written as YAML; give it",
        ),
        (
            ["config", "default", "--config_file", "file/a.yaml"],
            "accel-trainer config: file/a.yaml cannot be written: ",
        ),
    ],
)
def test_an_error_is_a_line_and_the_code_2(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(error)
    assert (captured.err.count("\n"), captured.out) == (1, "")


def test_explain_tells_where_every_value_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config_path = tmp_path / "run.yaml"
    config_path.write_text("mixed_precision: bf16\nlaunch:\n  num_processes: 2\n")
    monkeypatch.setenv("ACCEL_TRAINER_DEBUG", "true")
    words = (
        "--cpu --use_fsdp --fsdp_wrap_classes A,B --fsdp-reshard-after-forward=false --fsdp_auto_wrap_policy NO_WRAP"
    )
    assert main(["explain", "--config_file", str(config_path), *words.split(), "ignored.py", "--x"]) == 0
    rows = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert rows >= {
        f"mixed_precision bf16 {config_path}:1",
        f"launch.num_processes 2 {config_path}:3",
        "use_cpu true --cpu",
        "debug true ACCEL_TRAINER_DEBUG",
        "strategy fsdp2 --use_fsdp",
        "fsdp.wrap_classes [A, B] --fsdp_wrap_classes",
        "fsdp.wrap_policy none --fsdp_auto_wrap_policy",
        "fsdp.reshard_after_forward false --fsdp_reshard_after_forward",
        "launch.main_process_ip null default",
    }


def test_explain_shows_the_remarks_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_path = tmp_path / "old.yaml"
    config_path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n")
    assert main(["explain", "--config_file", str(config_path), "--cpu", "--num_processes", "2"]) == 0
    assert "\nnote: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--use_fsdp", "--cpu", "--fsdp_replicate_per_node"],
            ".*a replica on each node, and this job has one process",
        ),
        (["--fsdp_wrap_classes", "A"], "--fsdp_wrap_classes: without effect with strategy=auto"),
        (["--strategy", "single", "--num_processes", "2"], "strategy=single .* is one process, and 2 were asked for"),
    ],
)
def test_explain_refuses_what_launch_refuses(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = []
    for command in ("explain", "launch"):
        assert main([command, *words, __file__]) == 2
        errors.append(capsys.readouterr().err.removeprefix(f"accel-trainer {command}: "))
    assert errors[0] == errors[1]
    assert re.match(message, errors[0])


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m accel_trainer explain | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.startswith("option")
    assert done.stderr == ""


def test_config_default_writes_yaml_that_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "default", "--mixed_precision", "bf16"]) == 0
    path = tmp_path / "hf" / "accel_trainer" / "default_config.yaml"
    assert capsys.readouterr().out == f"configuration written to {path}\n"
    assert not path.read_text().lstrip().startswith("{")
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
    assert resolve(file=path).config.mixed_precision == "bf16"
    assert main(["explain"]) == 0
    assert f"{path}:3" in capsys.readouterr().out


def test_config_default_without_precision_is_the_default_configuration(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "here.yml"
    assert main(["config", "default", "--config_file", str(path)]) == 0
    assert resolve(file=path).config == resolve().config


def test_config_default_for_deepspeed_holds_the_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zero.yaml"
    words = ["config", "default", "--config_file", str(path)]
    assert main([*words, "--zero-stage", "2", "--offload_param_device", "cpu"]) == 2
    assert "--offload_param_device is cpu and --zero_stage 2; it needs --zero_stage 3" in capsys.readouterr().err
    assert main([*words, "--offload_optimizer_device", "cpu"]) == 2
    assert "--zero_stage is not set; it needs --zero_stage 1, 2 or 3" in capsys.readouterr().err
    assert main([*words, "--zero_stage", "3", "--offload_optimizer_device", "cpu"]) == 0
    config = resolve(file=path).config
    assert config.strategy == "deepspeed"
    assert config.deepspeed == {"zero_stage": 3, "offload_optimizer_device": "cpu"}


def test_config_default_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("debug: true\n")
    assert main(["config", "default", "--config_file", str(path)]) == 2
    assert f"{path} exists and was left as it is" in capsys.readouterr().err
    assert path.read_text() == "debug: true\n"


@pytest.mark.parametrize("words", [[], ["--devices"]])
def test_env_reports_versions_devices_and_the_file(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCEL_TRAINER_DEBUG", "true")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["env", *words]) == 0
    text = capsys.readouterr().out
    for name in (
        f"accel_trainer: {__version__}",
        "Python: 3.",
        "torch: ",
        "transformers: ",
        "accelerator: ",
        "CPU cores: ",
    ):
        assert f"\n- {name}" in text
    assert "- ACCEL_TRAINER_DEBUG: true" in text
    assert "hf_secret" not in text
    assert "- configuration: none (" in text
    config_path = tmp_path / "run.yaml"
    config_path.write_text("mixed_precision: bf16\n")
    assert main(["env", "--config_file", str(config_path)]) == 0
    assert f"- configuration: {config_path}\n    mixed_precision: bf16" in capsys.readouterr().out


def test_keys_of_services_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCEL_TRAINER_DEEPSPEED__COMET__API_KEY", "hush-variable")
    path = tmp_path / "run.yaml"
    path.write_text("strategy: deepspeed\ndeepspeed: {zero_stage: 2, comet: {api_key: hush-file, project: shown}}\n")
    for words in (["env"], ["explain"]):
        assert main([*words, "--config_file", str(path)]) == 0
        text = capsys.readouterr().out
        assert "hush" not in text
        assert "***" in text
        assert "shown" in text


def test_env_reports_a_broken_file_instead_of_failing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_path = tmp_path / "run.yaml"
    config_path.write_text("mixed_precison: bf16\n")
    assert main(["env", "--config_file", str(config_path)]) == 0
    assert "- configuration: unknown key 'mixed_precison'" in capsys.readouterr().out


def test_a_dry_run_says_what_would_be_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    words = ["--cpu", "--num_processes", "2", "--mixed_precision", "bf16", "--num_cpu_threads_per_process", "3"]
    assert main(["launch", "--dry-run", *words, str(script), "--lr", "1 2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"command: {sys.executable} -u {script} --lr '1 2'"
    assert lines[1] == "processes here: 2 (machine 0 of 1)"
    assert "variable: OMP_NUM_THREADS=3" in lines
    assert "option: mixed_precision=bf16 (from --mixed_precision)" in lines
    assert not [line for line in lines if "(from default)" in line]
