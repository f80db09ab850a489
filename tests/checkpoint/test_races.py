"""What happens when two processes come to one directory at the same moment."""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.checkpoint import checkpointer, store
from accel_trainer.checkpoint.checkpointer import Checkpointer
from accel_trainer.checkpoint.manifest import MARKER_NAME
from accel_trainer.checkpoint.publication import Publication
from accel_trainer.checkpoint.reader import CheckpointKind
from accel_trainer.checkpoint.store import LOCK_NAME, DirectoryLock, recover_target, sweep
from accel_trainer.errors import CheckpointLockedError, ProcessGroupError
from accel_trainer.runtime.process import ProcessContext, init_process, read_environment
from tests.publishing import ALONE, publish, publish_directory
from tests.ranks import run_ranks, start_fork_server


def read_named(path: Path, process: ProcessContext) -> str:
    selected = Checkpointer(process, CheckpointKind()).select_named(path, "full", lambda manifest: manifest.files)
    assert selected.stored is not None
    word: str = selected.stored.json("x.json")
    return word


def load_while_rank_0_brings_it_back(directory: Path) -> list[str]:
    """Load what can be brought back, and what cannot."""
    process = init_process(read_environment(), use_cpu=True)
    recover = checkpointer.recover_target

    def slowly(target: Path) -> None:
        time.sleep(0.5)
        if target.name == "locked":
            raise PermissionError(errno.EACCES, "not yours", str(target))
        recover(target)

    checkpointer.recover_target = slowly
    told = []
    for name in ("free", "locked"):
        try:
            told.append(read_named(directory / name, process))
        except (OSError, ProcessGroupError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_all_ranks_wait_for_a_checkpoint_that_was_moved_aside_or_cannot_be_brought_back(tmp_path: Path):
    for name in ("free", "locked"):
        publish(tmp_path / name, "old")
        os.rename(tmp_path / name, tmp_path / f"_old-{name}-01234567")
    (free, locked), (other_free, other_locked) = run_ranks(load_while_rank_0_brings_it_back, 2, tmp_path)
    assert free == other_free == "old"
    assert locked.startswith("PermissionError")
    assert other_locked.startswith("RemoteRankError: rank 0 failed in load of")
    assert "not yours" in other_locked


def test_another_machine_may_bring_it_back_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    publish(tmp_path / "s", "old")
    os.rename(tmp_path / "s", tmp_path / "_old-s-01234567")
    rename = os.rename

    def lose(source: Path, target: Path) -> None:
        rename(source, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", lose)
    recover_target(tmp_path / "s")
    assert (tmp_path / "s" / MARKER_NAME).is_file()


def test_a_save_through_a_link_replaces_what_it_leads_to(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "latest").symlink_to(tmp_path / "there")
    for word in ("old", "new"):
        publish(tmp_path / "here" / "latest", word)
        assert read_named(tmp_path / "there", ALONE) == word
    assert [path.name for path in tmp_path.rglob("*") if path.name.startswith(".")] == []
    assert (tmp_path / "here" / "latest").is_symlink()
    assert caplog.text == ""


def save_until_told(target: Path, pipe: Connection) -> None:
    with publish_directory(target, ALONE) as staged:
        staged.write_json("x.json", 1)
        pipe.send("under way")
        pipe.recv()
        staged.write_json("y.json", 2)


def test_a_sweep_of_a_directory_leaves_a_save_to_a_name_of_its_own_alone(tmp_path: Path):
    (tmp_path / "_tmp-dead-01234567").mkdir()
    pipe, other_end = Pipe()
    saver = start_fork_server().Process(target=save_until_told, args=(tmp_path / "checkpoint_5", other_end))
    saver.start()
    assert pipe.recv() == "under way"
    held = DirectoryLock.take(tmp_path / LOCK_NAME)
    sweep(tmp_path)
    held.release()
    pipe.send("go on")
    saver.join(60)
    assert saver.exitcode == 0
    assert (tmp_path / "checkpoint_5" / MARKER_NAME).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_5"]


def test_a_sweep_leaves_a_save_of_its_own_process_alone(tmp_path: Path):
    publication = Publication(tmp_path / "best", ALONE)
    with publication as staged:
        staged.write_json("x.json", 1)
        sweep(tmp_path)
    publication.commit()
    assert (tmp_path / "best" / MARKER_NAME).is_file()


@pytest.mark.parametrize("total_limit", [None, 1])
def test_a_second_accelerator_leaves_the_background_save_of_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, total_limit: int | None
):
    is_swept = threading.Event()
    commit = Publication.commit

    def late(publication: Publication, *arguments: Any, **options: Any) -> Path:
        if threading.current_thread() is not threading.main_thread():
            is_swept.wait(60)
        return commit(publication, *arguments, **options)

    monkeypatch.setattr(Publication, "commit", late)
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=total_limit)
    first, second = (Accelerator(cpu=True, project_config=copy.copy(project)) for _ in range(2))
    for accelerator in (first, second):
        accelerator.prepare(nn.Linear(2, 2))
    first.save_state(async_=True)
    try:
        assert second.save_state().name == "checkpoint_1"
    finally:
        is_swept.set()
    first.wait_for_checkpoint()

    def complete() -> list[int]:
        return sorted(int(path.parent.name.partition("_")[2]) for path in tmp_path.rglob(MARKER_NAME))

    # Its commit came last, and its number is the lower one: that is the one that goes.
    assert complete() == ([1] if total_limit else [0, 1])
    assert first.save_state().name == "checkpoint_2"
    assert complete() == ([2] if total_limit else [0, 1, 2])
    assert caplog.text == ""


HOLDING = """
import fcntl, json, os, socket, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
owner = {"host": socket.gethostname(), "pid": 2**22 + 1, "since": "today", **json.loads(sys.argv[2])}
os.write(descriptor, json.dumps(owner).encode())
print("under way", flush=True)
sys.stdin.readline()
"""


def test_a_process_of_another_container_on_this_machine_is_no_dead_one(tmp_path: Path):
    """Containers on the host's network have its name, and numbers of processes that mean nothing outside."""
    path = tmp_path / LOCK_NAME
    for where, is_refused in (({"space": "pid:[1]"}, True), ({"space": store._space()}, False)):
        command = [sys.executable, "-c", HOLDING, str(path), json.dumps(where)]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holder.stdout.readline() == "under way\n"
        if is_refused:
            with pytest.raises(CheckpointLockedError, match=f"process {2**22 + 1} on"):
                DirectoryLock.take(path)
        else:
            DirectoryLock.take(path).release()
        holder.communicate("\n", timeout=60)


def test_what_is_left_of_a_retired_checkpoint_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for number in range(2):
        publish(tmp_path / f"checkpoint_{number}", str(number))

    def refuse(path: Path, *, dir_fd: int | None = None) -> None:
        raise PermissionError(errno.EACCES, "not yours", str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    assert store.retire(tmp_path, 1) == [tmp_path / "checkpoint_0"]
    assert "could not be removed" in caplog.text
    assert "not yours" in caplog.text
