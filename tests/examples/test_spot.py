"""examples/spot.py: killed, without its disk, on the next machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "spot.py"


def start(directory: Path, store: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--output_dir", str(directory), "--checkpoint_uri", f"file://{store}"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([*command, "--max_steps", "60"], env=environ, stdout=subprocess.PIPE, text=True)


def test_the_next_machine_ends_with_the_loss_of_a_run_that_was_never_killed(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", tmp_path / "other")
    killed = start(tmp_path / "disk", tmp_path / "store")
    marker = tmp_path / "store" / "checkpoint-10" / "COMMITTED"
    while not marker.exists() and killed.poll() is None:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert marker.exists() or list((tmp_path / "store").glob("checkpoint-*/COMMITTED"))
    shutil.rmtree(tmp_path / "disk", ignore_errors=True)
    resumed = start(tmp_path / "disk", tmp_path / "store")
    expected, found = (job.communicate(timeout=100)[0].splitlines()[-1] for job in (whole, resumed))
    assert expected.startswith("finished after update 60")
    assert found == expected
