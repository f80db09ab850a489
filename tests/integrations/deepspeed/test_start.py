"""Starting DeepSpeed: what has to be there, and what is said where it is not."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

pytest.importorskip("deepspeed")

from accel_trainer.errors import ConfigError
from accel_trainer.integrations.deepspeed import runtime
from accel_trainer.integrations.deepspeed.runtime import watch_locks
from tests import warm
from tests.loops import take_update
from tests.ranks import RankFailure, preload, run_ranks
from tests.zero import accelerator

preload("accel_trainer.accelerator", "deepspeed")

ROOT = Path(__file__).resolve().parents[3]


def start_alone() -> Any:
    return accelerator(2)


@pytest.mark.parametrize(
    ("tools", "message"),
    [((), r"no C\+\+ compiler 'c\+\+' on the PATH; install one"), (("c++",), r"no 'ninja' on the PATH; run `pip inst")],
)
def test_missing_build_tools_are_named_before_anything_is_built(tools: tuple[str, ...], message: str, tmp_path: Path):
    for tool in tools:
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    with pytest.raises(RankFailure, match=message):
        run_ranks(start_alone, 1, env={"PATH": str(tmp_path), "CXX": None})


def test_a_missing_libaio_is_named_where_tensors_go_to_disk(monkeypatch: pytest.MonkeyPatch):
    from accel_trainer.runtime.process import ProcessContext

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(runtime.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(runtime.ctypes.util, "find_library", lambda name: None)
    process = ProcessContext(0, 0, 1, 1, torch.device("cpu"), "gloo")
    disk = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/disk"}}}

    runtime.check_can_start(process, {"zero_optimization": {"stage": 3}})
    with pytest.raises(ConfigError, match=r"to NVMe through libaio, which is not on this machine.*or offload to 'cpu'"):
        runtime.check_can_start(process, disk)


class Wide(torch.nn.Module):
    """Large enough that its parameters go to the disk: a MiB and more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Linear(600, 900)
        self.head = torch.nn.Linear(900, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.stem(x))).square().mean()


def on_disk(folder: str) -> Any:
    """Train with parameters and optimizer state on disk, save, and load into another engine."""
    from tests.zero import whole

    disk = {"device": "nvme", "nvme_path": folder}
    zero = {"stage": 3, "offload_optimizer": disk, "offload_param": {**disk, "buffer_size": 1_000_000}}

    def prepare() -> Any:
        made, model = accelerator(3, config={"zero_optimization": zero}), Wide()
        return made, *made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def update(made: Any, model: Any, optimizer: Any, step: int) -> None:
        take_update(model(torch.full((2, 600), 1.0 + step)), optimizer, made)

    first = prepare()
    for step in range(2):
        update(*first, step)
    first[0].save_state(f"{folder}/state")
    update(*first, 2)
    trained = whole(*first[:2])
    first[0].free_memory()
    again = prepare()
    again[0].load_state(f"{folder}/state")
    update(*again, 2)
    return trained, whole(*again[:2])


@pytest.mark.skipif(
    not Path(os.environ.get("TORCH_EXTENSIONS_DIR", "/nowhere"), "async_io", "async_io.so").is_file(),
    reason="DeepSpeed's async_io is not compiled, which takes nine minutes of a processor. With libaio-dev, "
    "AsyncIOBuilder().load() of deepspeed.ops.op_builder does it, in the TORCH_EXTENSIONS_DIR of tests/conftest.py",
)
def test_parameters_and_optimizer_on_disk_train_and_resume_as_plain_pytorch_does(tmp_path: Path):
    trained, resumed = run_ranks(on_disk, 1, str(tmp_path), timeout=200)[0]
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        take_update(model(torch.full((2, 600), 1.0 + step)), optimizer)
    torch.testing.assert_close(trained, [p.detach() for p in model.parameters()], atol=1e-6, rtol=1e-5)
    assert all(torch.equal(left, right) for left, right in zip(trained, resumed, strict=True))


def join_with_another_device() -> Any:
    from accel_trainer.integrations.deepspeed.runtime import import_deepspeed, join_engine_group
    from accel_trainer.runtime.process import ProcessContext

    join_engine_group(import_deepspeed(), ProcessContext(0, 0, 1, 1, torch.device("xpu", 0), "gloo"))


def test_an_accelerator_of_the_engine_that_is_not_the_jobs_is_refused():
    message = "this job runs on xpu, and DeepSpeed has chosen 'cpu' .see DS_ACCELERATOR.*take DS_ACCELERATOR out"
    with pytest.raises(RankFailure, match=message):
        run_ranks(join_with_another_device, 1, env={"DS_ACCELERATOR": "cpu"})


def start_without_the_package() -> None:
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "deepspeed" else find(name, *rest)
    accelerator(1)


def test_without_deepspeed_the_extra_is_named():
    with pytest.raises(RankFailure, match=r"'deepspeed' needs the package 'deepspeed'.*'accel-trainer\[deepspeed\]'"):
        run_ranks(start_without_the_package, 1)


SCRIPT = """
import torch
from accel_trainer import Accelerator, DeepSpeedPlugin

accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False))
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
print("trained at stage", model.zero_optimization_stage(), "on", accelerator.num_processes, flush=True)
"""


@pytest.mark.slow
def test_one_process_is_launched_for_a_script_that_chooses_the_engine(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["launch", "--cpu", "--num_processes", "1", "--use_deepspeed", str(script)]
    command = [sys.executable, "-m", "accel_trainer", *words]
    done = warm.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["trained at stage 3 on 1"]), done.stderr


# --- the lock that a killed compiler left: which one, how old, whose, and what to delete -----------------------------

is_left_behind = pytest.mark.skipif(
    not hasattr(cpp_extension, "FileBaton"), reason="a lock of the kernel's, which goes with its process: torch 2.14"
)


def plant(folder: Path, age_seconds: float) -> Path:
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (time.time() - age_seconds,) * 2)
    return lock


def start(patience_seconds: float) -> Any:
    runtime._PATIENCE_SECONDS = patience_seconds
    return accelerator(2).num_processes


@is_left_behind
def test_a_run_ends_that_would_wait_for_ever(tmp_path: Path):
    built = Path(os.environ["TORCH_EXTENSIONS_DIR"], "deepspeed_shm_comm")
    folder = tmp_path / built.name
    shutil.copytree(built, folder, ignore=shutil.ignore_patterns("*.o", "lock"))
    lock = plant(folder, age_seconds=7200)

    message = rf"waits for the lock {re.escape(str(lock))}, which is 72\d\d s old and which no process on .* delete"
    with pytest.raises(RankFailure, match=message) as caught:
        run_ranks(start, 2, 0.2, env={"TORCH_EXTENSIONS_DIR": str(tmp_path)}, timeout=50)
    assert sorted(caught.value.failures) == [0, 1]


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_PATIENCE_SECONDS", 0.1)


def remove_after_a_word(lock: Path, caplog: pytest.LogCaptureFixture) -> threading.Thread:
    def remove() -> None:
        deadline = time.monotonic() + 30
        while "Waiting for it" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # for a second warning, if there is one
        lock.unlink()

    thread = threading.Thread(target=remove)
    thread.start()
    return thread


@is_left_behind
def test_a_young_lock_of_nobody_is_named_once_and_waited_for(
    tmp_path: Path, short_patience: None, caplog: pytest.LogCaptureFixture
):
    lock = plant(tmp_path, age_seconds=30)
    remover = remove_after_a_word(lock, caplog)
    with watch_locks():
        cpp_extension.FileBaton(str(lock)).wait()
    remover.join()
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(lock) in line
    assert re.search(r"is 3\d s old.*delete the folder", line)


@is_left_behind
def test_the_process_that_compiles_is_named_and_waited_for_at_any_age(
    tmp_path: Path, short_patience: None, caplog: pytest.LogCaptureFixture
):
    lock = plant(tmp_path, age_seconds=7200)
    script = f"file = open({str(lock)!r}); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        remover = remove_after_a_word(lock, caplog)
        with watch_locks():
            cpp_extension.FileBaton(str(lock)).wait()
        remover.join()
        holder.communicate("\n")
    assert f"process {holder.pid} ({sys.executable}" in caplog.text


def test_a_process_that_ends_while_holders_are_looked_for_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def vanish(function: Any) -> Any:
        def listed(path: Any = ".") -> Any:
            if str(path) == f"/proc/{os.getppid()}/fd":
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return function(path)

        return listed

    monkeypatch.setattr(os, "scandir", vanish(os.scandir))
    monkeypatch.setattr(os, "listdir", vanish(os.listdir))
    with (tmp_path / "lock").open("w"):
        (holder,) = runtime._find_holders(tmp_path / "lock")
    assert holder.startswith(f"{os.getpid()} (")


def test_nothing_is_said_where_nothing_is_locked(short_patience: None, caplog: pytest.LogCaptureFixture):
    with watch_locks():
        time.sleep(0.3)
    assert not caplog.records


@is_left_behind
def test_an_old_lock_of_nobody_is_an_error_that_says_what_to_delete(tmp_path: Path, short_patience: None):
    lock = plant(tmp_path, age_seconds=7200)
    with (
        pytest.raises(ConfigError, match=rf"delete the folder {re.escape(str(tmp_path))} and start again"),
        watch_locks(),
    ):
        cpp_extension.FileBaton(str(lock)).wait()
