"""`accel-trainer config` in a terminal: keys that a person presses, in a pseudo-terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_trainer.config import resolve
from accel_trainer.contrib.questionnaire import Interview, Question, ask_configuration
from accel_trainer.launch.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOWN, UP, ENTER, ESCAPE, INTERRUPT, ERASE = "\x1b[B", "\x1b[A", "\r", "\x1b", "\x03", "\x15"
CURSOR_QUESTION, CURSOR_ANSWER = b"\x1b[6n", b"\x1b[1;1R"

Steps = Sequence[tuple[str, str]]
"""A text that is waited for, and the keys that are pressed then."""

CPU: Steps = [("may be a GPU", UP + ENTER), ("How many machines", ENTER)]
LAST: Steps = [("Compile the model", ENTER), ("Set CPU threads", ENTER)]
END: Steps = [("Mixed precision", DOWN + ENTER), ("Micro-batches", ENTER), *LAST]
# What is asked after what is test_config_file.py's, line by line; here are the ways to answer.
JOBS: dict[str, Steps] = {
    "chosen": [*CPU, ("laid out", DOWN * 4 + ENTER), *END],
    "typed": [
        *CPU,
        ("laid out", DOWN + ENTER),
        ("How many processes", "two"),
        ("'two' does not fit: expected a whole number", ERASE + "3" + ENTER),
        ("Mixed precision", ESCAPE),  # back
        ("How many processes, over all machines? [3]", "2" + ENTER),
        *END,
    ],
    "both": [
        *CPU,
        ("laid out", DOWN * 2 + ENTER),
        ("How many processes", ENTER),
        ("Free gathered", ENTER),
        ("at once", ENTER),
        ("Class names", "BertLayer" + ENTER),
        ("again in the", ENTER),
        ("in CPU memory", ENTER),
        ("Read a checkpoint", ENTER),
        ("Optimizer state in", DOWN + ENTER),
        *END,
    ],
    "stopped": [*CPU, ("laid out", INTERRUPT)],
}
WRITTEN: dict[str, dict[str, Any]] = {
    "chosen": {"strategy": "single", "use_cpu": True, "mixed_precision": "bf16"},
    "typed": {"strategy": "ddp", "launch.num_processes": 2},
    "both": {"strategy": "fsdp2", "fsdp.wrap_classes": ["BertLayer"], "fsdp.state_dict_type": "sharded"},
}


class Terminal:
    """A pseudo-terminal with a command in it."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True, cwd=ROOT
        )
        os.close(slave)
        self.seen = b""

    def read(self) -> bool:
        """Read what has been written, and answer where the cursor is; return whether the end is not reached."""
        ready, _, _ = select.select([self.master], [], [], 0.2)
        try:
            data = os.read(self.master, 1 << 16) if ready else b""
        except OSError:  # the command has ended
            return False
        if CURSOR_QUESTION in data:
            os.write(self.master, CURSOR_ANSWER)
        self.seen += data
        return True

    def wait_for(self, text: str, begin: int, deadline: float) -> int:
        """Return the place behind a text, of which colours and cursor movements are no part."""
        while (position := self.text().find(text, begin)) < 0:
            assert self.read(), f"{text!r} did not come: {self.text()[begin:]!r}"
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.text()[begin:]!r}"
        return position + len(text)

    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", self.seen.decode(errors="replace"))


def drive(folder: Path, steps: Steps) -> tuple[int, str]:
    """Press keys in `accel-trainer config`; return its exit code and what it has shown."""
    environ = {**os.environ, "TERM": "xterm", "HF_HOME": str(folder)}
    command = [sys.executable, "-m", "accel_trainer", "config", "--config_file", str(folder / "run.yaml")]
    terminal = Terminal(command, environ)
    deadline = time.monotonic() + 60
    try:
        position = 0
        for text, keys in steps:
            position = terminal.wait_for(text, position, deadline)
            os.write(terminal.master, keys.encode())
        while terminal.read():
            assert time.monotonic() < deadline, terminal.text()
        return terminal.process.wait(10), terminal.text()
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, str]]:
    """Every job by name: its folder, the exit code of `config`, and what was shown."""
    folders = {name: tmp_path_factory.mktemp("job") for name in JOBS}
    with ThreadPoolExecutor(4) as pool:
        runs = dict(zip(JOBS, pool.map(drive, folders.values(), JOBS.values()), strict=True))
    return {name: (folders[name], *run) for name, run in runs.items()}


@pytest.mark.parametrize("name", WRITTEN)
def test_keys_make_a_file_that_launches(
    name: str, driven: dict[str, tuple[Path, int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, code, shown = driven[name]
    assert code == 0, shown
    content = yaml.safe_load((folder / "run.yaml").read_text())
    for path, value in WRITTEN[name].items():
        section, _, key = path.rpartition(".")
        assert (content[section] if section else content)[key] == value
    script = folder / "train.py"
    script.touch()
    for command in ("launch", "explain"):
        words = ["--dry-run"] if command == "launch" else []
        assert main([command, *words, "--config_file", str(folder / "run.yaml"), str(script)]) == 0
    assert "command: " in capsys.readouterr().out


def test_ctrl_c_leaves_no_file(driven: dict[str, tuple[Path, int, str]]) -> None:
    folder, code, shown = driven["stopped"]
    assert (code, list(folder.iterdir())) == (130, [])
    assert shown.endswith("accel-trainer config: stopped by ctrl-C\n")
    assert "Traceback" not in shown


def test_a_dumb_terminal_is_asked_line_by_line(tmp_path: Path) -> None:
    environ = {**os.environ, "TERM": "dumb", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "accel_trainer", "config", "--config_file", str(tmp_path / "run.yaml")]
    terminal = Terminal(command, environ)
    try:
        terminal.wait_for("may be a GPU? [no]: ", 0, time.monotonic() + 30)
        pressed_at = 0.0
        while terminal.read():
            # ctrl-C of a terminal that controls it; Python loses one that comes just before it begins to read.
            if time.monotonic() - pressed_at > 3.0:
                pressed_at = time.monotonic()
                terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(10) == 130
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
    assert terminal.text().endswith("accel-trainer config: stopped by ctrl-C\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("answers", "offers"),
    [
        ({"strategy": "deepspeed", "launch.num_processes": "2"}, False),
        ({"strategy": "fsdp2", "launch.num_processes": "4", "parallel.tp_size": "2"}, False),
        ({"strategy": "fsdp2", "launch.num_processes": "4"}, True),
    ],
)
def test_fp8_is_offered_where_layers_compute_in_it(answers: dict[str, str], offers: bool) -> None:
    asked = {}

    def read(question: Question) -> str:
        asked[question.key] = question
        return answers.get(question.key) or question.default or next(iter(question.choices or {}), "none")

    content = Interview(read).run(ask_configuration)

    assert ("fp8" in (asked["mixed_precision"].choices or {})) is offers
    assert resolve(file=content).config.strategy == answers["strategy"]
