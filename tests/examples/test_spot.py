"""examples/spot.py: killed, without its disk, on the next machine."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shutil
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.ranks import RankFailure, preload, run_ranks
from tests.stand_in import ALONE

preload("accel_trainer.trainer", "transformers.models.llama.modeling_llama")

SCRIPT = Path(__file__).parents[2] / "examples" / "spot.py"


def run(directory: str, store: str) -> str:
    """Run the script in a process that has torch imported already; return what it printed last."""
    Path(f"{store}.pid").write_text(str(os.getpid()))
    sys.argv = [str(SCRIPT), "--output_dir", directory, "--checkpoint_uri", f"file://{store}", "--max_steps", "60"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue().splitlines()[-1]


def test_the_next_machine_ends_with_the_loss_of_a_run_that_was_never_killed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:

        def start(directory: str, store: str) -> Future[list[str]]:
            paths = str(tmp_path / directory), str(tmp_path / store)
            return pool.submit(run_ranks, run, 1, *paths, env={**ALONE, "CUDA_VISIBLE_DEVICES": ""}, timeout=100)

        whole, killed = start("whole", "other"), start("disk", "store")
        marker = tmp_path / "store" / "checkpoint-10" / "COMMITTED"
        while not marker.exists() and not killed.done():
            time.sleep(0.02)
        with contextlib.suppress(RankFailure, ProcessLookupError):
            os.kill(int((tmp_path / "store.pid").read_text()), signal.SIGKILL)
            killed.result()
        assert list((tmp_path / "store").glob("checkpoint-*/COMMITTED"))
        shutil.rmtree(tmp_path / "disk", ignore_errors=True)
        [found] = start("disk", "store").result()
        assert found.startswith("finished after update 60")
        assert [found] == whole.result()
