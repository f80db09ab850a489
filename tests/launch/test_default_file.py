"""The configuration file that is used by default: whatever is taken is named, accelerate's own included."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from accel_trainer.config import resolve
from accel_trainer.launch.cli import main

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: true
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def accelerates(home: Path) -> Path:
    path = home / "accelerate" / "default_config.yaml"
    path.parent.mkdir()
    path.write_text(ACCELERATE)
    return path


@pytest.fixture
def own(home: Path) -> Path:
    return home / "accel_trainer" / "default_config.yaml"


@pytest.mark.parametrize("command", ["explain", "env"])
def test_the_file_that_is_used_is_named_and_ours_goes_before_accelerates(
    accelerates: Path, own: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 0
    printed = capsys.readouterr().out
    assert f"configuration from {accelerates}, the default of Hugging Face accelerate; `accel-" in printed
    assert ("mixed_precision: bf16" if command == "env" else f"{accelerates}:3") in printed
    own.parent.mkdir()
    own.write_text("mixed_precision: 'no'\nuse_cpu: true\n")
    assert main([command]) == 0
    printed = capsys.readouterr().out
    assert f"configuration from {own}; that of Hugging Face accelerate, {accelerates}, is not used" in printed
    assert "bf16" not in printed
    assert main(["explain", "--config_file", "ddp"]) == 0
    assert "configuration from" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["launch", "test"])
def test_the_line_stands_before_an_error_in_that_file(
    accelerates: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerates.write_text(ACCELERATE + "mixed_precison: fp16\n")
    assert main([command, *([__file__] if command == "launch" else [])]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"accel-trainer {command}: configuration from {accelerates}, the default of")
    assert "unknown key 'mixed_precison'" in lines[1]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_config_takes_accelerates_values_over(
    own: Path, accelerates: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if suffix == "json":
        accelerates.unlink()
        accelerates.with_suffix(".json").write_text(json.dumps(yaml.safe_load(ACCELERATE)))
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main(["config"]) == 0
    before, after = resolve(file=str(next(accelerates.parent.iterdir()))), resolve(file=str(own))
    assert after.config == before.config
    assert "Hugging Face accelerate is configured in" in capsys.readouterr().out


@pytest.mark.parametrize("is_broken", [False, True], ids=["after a no", "where the file is broken, which is said"])
def test_everything_is_asked(
    is_broken: bool,
    own: Path,
    accelerates: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    accelerates.write_text(ACCELERATE.replace("bf16", "fp9") if is_broken else ACCELERATE)
    monkeypatch.setattr(sys, "stdin", io.StringIO(("yes" if is_broken else "no\nyes") + "\n" * 9))
    assert main(["config"]) == 0
    config = resolve(file=str(own)).config
    assert (config.use_cpu, config.mixed_precision) == (True, "no")
    assert (f"{accelerates}, cannot be taken over: mixed_precision" in capsys.readouterr().out) == is_broken
