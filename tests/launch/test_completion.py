"""Scripts by which shells complete: run in the shells that are here."""

from __future__ import annotations

import shutil
import subprocess

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
    ],
)
def test_bash_completes_commands_and_options(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    typed = ["accel-trainer", *words.split()]
    script += f"COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; _accel_trainer; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert (done.stdout.strip(), done.stderr) == (expected, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_knows_every_command_and_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    dashes = "-l " if shell == "fish" else "--"
    assert all(f"{dashes}{flag.name}" in script for flag in launch_flags().values())
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")
