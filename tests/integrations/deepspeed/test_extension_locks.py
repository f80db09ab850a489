"""A lock that a killed compiler left: which one, how old, whose, and what to delete; and no wait without an end."""

from __future__ import annotations

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
from torch.utils.file_baton import FileBaton

pytest.importorskip("deepspeed")

from accel_trainer.errors import ConfigError
from accel_trainer.integrations.deepspeed import runtime
from accel_trainer.integrations.deepspeed.runtime import watch_locks
from tests.ranks import RankFailure, preload, run_ranks
from tests.zero import accelerator

preload("accel_trainer.accelerator", "deepspeed")


def plant(folder: Path, age_seconds: float) -> Path:
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (time.time() - age_seconds,) * 2)
    return lock


def start(patience_seconds: float) -> Any:
    runtime._PATIENCE_SECONDS = patience_seconds
    return accelerator(2).num_processes


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


def test_a_young_lock_of_nobody_is_named_once_and_waited_for(
    tmp_path: Path, short_patience: None, caplog: pytest.LogCaptureFixture
):
    lock = plant(tmp_path, age_seconds=30)
    remover = remove_after_a_word(lock, caplog)
    with watch_locks():
        FileBaton(str(lock)).wait()
    remover.join()
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(lock) in line
    assert re.search(r"is 30 s old.*delete the folder", line)


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
            FileBaton(str(lock)).wait()
        remover.join()
        holder.communicate("\n")
    assert f"process {holder.pid} ({sys.executable}" in caplog.text


def test_nothing_is_said_where_nothing_is_locked(short_patience: None, caplog: pytest.LogCaptureFixture):
    with watch_locks():
        time.sleep(0.3)
    assert not caplog.records


def test_an_old_lock_of_nobody_is_an_error_that_says_what_to_delete(tmp_path: Path, short_patience: None):
    lock = plant(tmp_path, age_seconds=7200)
    with (
        pytest.raises(ConfigError, match=rf"delete the folder {re.escape(str(tmp_path))} and start again"),
        watch_locks(),
    ):
        FileBaton(str(lock)).wait()
