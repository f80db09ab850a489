"""What an import and a `--help` cost, as whole processes, against `import torch` and the peer's command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from timing import Row, interleave, ratio_row


def process(*command: str, environ: dict[str, str] | None = None) -> Callable[[], object]:
    """Return a function that runs a command to its end."""

    def run() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)

    return run


def measure(rounds: int, peer_path: Path | None) -> list[Row]:
    """Compare start-up with `import torch`, which every training script pays, and with the peer's command line."""
    python = sys.executable
    functions = {
        "import torch": process(python, "-c", "import torch"),
        "import": process(python, "-c", "import accel_trainer"),
        "--help": process(python, "-m", "accel_trainer", "--help"),
    }
    if peer_path is not None:
        environ = {**os.environ, "PYTHONPATH": str(peer_path)}
        command = (python, "-m", "accelerate.commands.accelerate_cli", "--help")
        functions["peer --help"] = process(*command, environ=environ)
    seconds = interleave(functions, rounds)
    rows = [
        ratio_row("import accel_trainer", "import torch", seconds["import"], seconds["import torch"], None),
        ratio_row("accel-trainer --help", "import torch", seconds["--help"], seconds["import torch"], None),
    ]
    if peer_path is not None:
        # 0.3 s against the peer's 2.5 s.
        rows.append(
            ratio_row("accel-trainer --help", "accelerate --help", seconds["--help"], seconds["peer --help"], 0.12)
        )
    return rows
