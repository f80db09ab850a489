"""Scripts by which shells complete: run in the shells that are here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from accel_trainer.launch.cli import COMMANDS, main
from accel_trainer.launch.flags import launch_flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("lau", "launch"),
        ("launch --num_pro", "--num_processes"),
        ("explain --zero_st", "--zero_stage"),
        ("config sch", "schema"),
        ("env --dev", "--devices"),
        ("ckpt pru", "prune"),
        ("report x", ""),
        ("launch --num_processes 2 tra", "train.py"),
    ],
)
def test_bash_completes_commands_options_and_the_names_of_files(
    words: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    typed = ["accel-trainer", *words.split()]
    script += f"\nCOMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}"
    script += "; compopt() { :; }; _shtab_accel_trainer; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, cwd=tmp_path)
    assert (done.stdout.strip(), done.stderr) == (expected, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_knows_every_command_and_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in script] == []
    dashes = "-l " if shell == "fish" else "--"
    assert [flag.name for flag in launch_flags().values() if f"{dashes}{flag.name}" not in script] == []
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")
