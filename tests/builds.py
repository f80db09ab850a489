"""What tests would wait for, a minute and a half of a core: `python -m tests.builds`, before `make test`.

DeepSpeed's collectives for the CPU and the stand-in for an accelerator are compiled, and mypy reads transformers. Who
calls pytest by hand waits for the first where its tests need them, and in the test for the others.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_COMPILE = """
from accel_trainer.integrations.deepspeed import runtime
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

# A lock that no process here holds is that of one that was killed: tests share the folder with no other machine.
runtime._PATIENCE_SECONDS, runtime._ABANDONED_SECONDS = 2.0, 0.0
with runtime.watch_locks():
    ShareMemCommBuilder().load()
"""


def _are_compiled() -> bool:
    """Return whether they are there, of this torch: asking DeepSpeed takes each worker some seconds of a core."""
    torch, folder = importlib.util.find_spec("torch"), os.environ.get("TORCH_EXTENSIONS_DIR", "")
    library = Path(folder, "deepspeed_shm_comm", "deepspeed_shm_comm.so")
    if torch is None or torch.origin is None or not library.exists() or library.with_name("lock").exists():
        return False
    return library.stat().st_mtime > os.stat(torch.origin).st_mtime


def compile_collectives() -> None:
    """Have DeepSpeed, where it is installed, compile its collectives for the CPU.

    Whose lock that waits for is said at once; pytest ends where nobody holds it, or where they cannot be compiled.
    """
    if importlib.util.find_spec("deepspeed") is None or _are_compiled():
        return
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", _COMPILE]
    said = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr or ():
            said.append(line)
            if "waits for the lock" in line:
                print(line, end="", file=sys.stderr, flush=True)
    if process.returncode:
        pytest.exit(f"DeepSpeed's collectives cannot be compiled: {''.join(said)[-2000:]}", returncode=1)


def _build_all() -> None:
    from tests import stand_in, test_user_types  # with torch and transformers

    with ThreadPoolExecutor() as pool:
        for build in [pool.submit(each) for each in (compile_collectives, test_user_types.read_script, stand_in.build)]:
            build.result()


if __name__ == "__main__":
    _build_all()
