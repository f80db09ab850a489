"""`accel-trainer launch` in a process that has torch imported already, which saves each launch two seconds."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from accel_trainer.launch.cli import main
from tests.ranks import run_ranks
from tests.warm import fork_programs


def run_command(words: list[str], output: str) -> int:
    """Run a command line in this process, with all that it and its children write in a file; return its exit code."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    tempfile.tempdir = None  # the one of TMPDIR in this environment
    fork_programs()
    return main(words)


def launch(folder: Path, *words: str, timeout: float = 60, **env: str) -> tuple[int, str]:
    """Return the exit code of `accel-trainer launch WORDS` and what it and its workers wrote."""
    output = folder / "output.txt"
    output.unlink(missing_ok=True)
    environ = {"HF_HOME": str(folder), "TORCHELASTIC_USE_AGENT_STORE": None, "OMP_NUM_THREADS": None, **env}
    [code] = run_ranks(run_command, 1, ["launch", *words], str(output), env=environ, timeout=timeout)
    return code, output.read_text()


def read_samples(folder: Path, pattern: str) -> dict[int, list[int]]:
    """Return the samples of each update, in order of their numbers, as workers have written them down.

    Args:
        pattern: of files with a line for each micro-batch: the update, and the numbers of its samples.
    """
    samples: dict[int, list[int]] = {}
    for file in folder.glob(pattern):
        for line in file.read_text().splitlines():
            step, *numbers = map(int, line.split())
            samples.setdefault(step, []).extend(numbers)
    return {step: sorted(numbers) for step, numbers in samples.items()}
