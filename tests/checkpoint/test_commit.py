"""A directory appears whole or not at all: the order of a commit (R1), one writer at a time (R19)."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_trainer.checkpoint import manifest, store
from accel_trainer.checkpoint.checkpointer import Checkpointer
from accel_trainer.checkpoint.manifest import MARKER_NAME, Manifest
from accel_trainer.checkpoint.publication import Publication
from accel_trainer.checkpoint.reader import CheckpointKind, open_checkpoint
from accel_trainer.checkpoint.store import STALE_SECONDS, DirectoryLock
from accel_trainer.errors import CheckpointLockedError, ConfigError, ProcessGroupError
from accel_trainer.runtime.process import init_process, read_environment
from tests.cells import crossed
from tests.checkpoint.crash_job import SavedRun, acknowledged, save_repeatedly
from tests.fault_injection import fault_env
from tests.publishing import ALONE, publish, publish_directory
from tests.ranks import run_ranks

# --- R1 --------------------------------------------------------------------------------------------------------------


def test_r1_everything_is_on_the_disk_before_the_name_and_the_name_before_the_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        calls.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("-")[0])
        fsync(descriptor)

    def record_rename(source: str, target: str) -> None:
        calls.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    (tmp_path / "run").mkdir()
    with publish_directory(tmp_path / "run" / "s", ALONE) as staged:
        staged.write_tensors("a.safetensors", {"x": torch.ones(3)})
        staged.write_json("b.json", 1)
        Path(staged, "by-path").write_text("2")
        staged.adopt("by-path")
    calls.append("acknowledged")
    assert calls == [
        "fsync a.safetensors",
        "fsync b.json",
        "fsync by",
        "fsync _tmp",
        "fsync _tmp",
        "fsync manifest.json",
        "fsync COMMITTED",
        "fsync _tmp",
        "rename to s",
        "fsync run",
        "acknowledged",
    ]


def publish_zeros(target: Path, num_files: int) -> None:
    with publish_directory(target, ALONE) as staged:
        for index in range(num_files):
            staged.write_tensors(f"{index}.safetensors", {"x": torch.zeros(2**20, dtype=torch.uint8)})


def test_r1_an_error_of_the_disk_while_a_file_is_still_written_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flushed: list[int] = []

    def fail_at_last(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_size)
        if len(flushed) == 2:
            raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(manifest, "_FLUSH_BYTES", 2**20)
    monkeypatch.setattr(os, "fdatasync", fail_at_last)
    with pytest.raises(OSError, match="bad sector"):
        publish_zeros(tmp_path / "s", num_files=3)
    assert [size >> 20 for size in flushed] == [1, 1]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_written_after_the_scripts_end_is_flushed_by_its_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # Python 3.12

    flushed: list[int] = []
    monkeypatch.setattr(manifest, "_FLUSH_BYTES", 2**20)
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    publish_zeros(tmp_path / "s", num_files=2)
    assert len(flushed) == 2
    assert open_checkpoint(tmp_path / "s", ALONE).tensors("1.safetensors")["x"].sum() == 0


def test_a_file_system_that_cannot_sync_directories_is_no_obstacle_and_one_that_fails_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fsync, reason = os.fsync, errno.EINVAL

    def refuse_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(reason, "no")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    publish(tmp_path / "s", "x")
    assert open_checkpoint(tmp_path / "s", ALONE).json("x.json") == "x"
    reason = errno.EIO
    with pytest.raises(OSError, match="no"):
        publish(tmp_path / "t", "x")
    assert not (tmp_path / "t").exists()


def test_r1_an_older_directory_is_there_until_the_new_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "s"
    publish(target, "old")
    seen = []
    exchange = store._exchange

    def look(one: Path, other: Path) -> bool:
        seen.append(open_checkpoint(target, ALONE).json("x.json"))
        done = exchange(one, other)
        seen.append(open_checkpoint(target, ALONE).json("x.json"))
        return done

    monkeypatch.setattr(store, "_exchange", look)
    publish(target, "new")
    assert seen == ["old", "new"]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_r1_where_names_cannot_be_swapped_the_old_one_is_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    target = tmp_path / "checkpoints" / "s"
    publish(target, "old")
    monkeypatch.setattr(store, "_exchange", lambda one, other: False)
    publish(target, "new")
    assert open_checkpoint(target, ALONE).json("x.json") == "new"
    assert [path.name for path in target.parent.iterdir()] == ["s"]
    # Killed between the two renames: the old one has a hidden name, and the new one is still a temporary directory.
    target.rename(target.with_name("_old-s-01234567"))
    (target.parent / "_tmp-s-01234567").mkdir()
    selected = Checkpointer(ALONE, CheckpointKind()).select_named(target, "full", lambda manifest: manifest.files)
    assert selected.stored.json("x.json") == "new"
    assert "was moved aside by a save that never ended; it is back" in caplog.text
    target.rename(target.with_name("_old-s-01234567"))
    publish(target, "newer")
    assert open_checkpoint(target, ALONE).json("x.json") == "newer"
    assert [path.name for path in target.parent.iterdir()] == ["s"]


def test_a_save_replaces_nothing_but_checkpoints(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"is no checkpoint of accel_trainer and holds 'thesis\.tex', which a save"):
        publish(tmp_path / "mine", "x")
    publish(tmp_path / "s", "x")
    (tmp_path / "s" / "notes.txt").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"holds 'notes\.txt', which its manifest does not name.*A save would remove it"
    ):
        publish(tmp_path / "s", "y")
    (tmp_path / "s" / "COMMITTED").unlink()
    with pytest.raises(ConfigError, match=r"holds 'notes\.txt', which its manifest does not name"):
        publish(tmp_path / "s", "y")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "manifest.json").write_text('{"audio": ["a.wav"]}')
    with pytest.raises(ConfigError, match=r"manifest\.json .*: it is no manifest.*A save would remove it"):
        publish(tmp_path / "corpus", "x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file; save to a directory"):
        publish(tmp_path / "file", "x")
    (tmp_path / "empty").mkdir()
    publish(tmp_path / "empty", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "empty", "file", "mine", "s"]
    assert (tmp_path / "s" / "notes.txt").read_text() == "mine"


def test_files_that_others_write_by_path_are_part_of_the_checkpoint(tmp_path: Path):
    with publish_directory(tmp_path / "s", ALONE, step=3) as staged:
        (staged / "engine" / "deep").mkdir(parents=True)
        (staged / "engine" / "deep" / "part.pt").write_bytes(b"engine")
        staged.adopt("engine")
        with staged.open("state.pt") as file:
            torch.save({"x": torch.ones(2)}, file)
        (Path(staged) / "upstream.txt").write_text("written by path")
        staged.metadata["by"] = "test"
    stored = open_checkpoint(tmp_path / "s", ALONE)
    assert sorted(stored.manifest.files) == ["engine/deep/part.pt", "state.pt", "upstream.txt"]
    assert (stored.manifest.step, stored.manifest.metadata) == (3, {"by": "test"})
    assert torch.equal(torch.load(stored.file("state.pt"))["x"], torch.ones(2))
    (tmp_path / "s" / "engine" / "deep" / "part.pt").write_bytes(b"enginf")
    with pytest.raises(ValueError, match=r"part\.pt was changed after the save"):
        stored.file("engine/deep/part.pt")


def write_the_same_name(directory: Path) -> str:
    process = SavedRun(directory).accelerator.process
    try:
        with publish_directory(directory / "s", process) as staged:
            if process.rank == 0:
                staged.write_json("x.json", 1)
            dist.barrier()
            if process.rank == 1:
                staged.adopt("x.json")
    except (ConfigError, ProcessGroupError) as error:
        return str(error)
    return ""


def test_two_ranks_that_write_one_file_are_told(tmp_path: Path):
    told = run_ranks(write_the_same_name, 2, tmp_path)
    assert "rank 1 and a lower one both wrote 'x.json'; give each rank its own names" in told[0]
    assert not (tmp_path / "s").exists()


def save_on_nodes(directory: Path) -> list[str]:
    """Each rank is a node of its own: the same path leads to another disk."""
    node = directory / f"node{os.environ['RANK']}"
    node.mkdir()
    os.chdir(node)
    run = SavedRun(Path())
    run.accelerator.project_configuration.save_on_each_node = True
    for step in (3, 4):
        run.fill(step)
        run.accelerator.save_state()
    run.fill(9)
    run.accelerator.load_state()
    assert run.step_held() == 4
    assert [path.name for path in Path("checkpoints").iterdir() if path.name != "_lock"] == ["checkpoint_1"]
    return sorted(Manifest.read(Path("checkpoints", "checkpoint_1")).files)


def test_nodes_with_disks_of_their_own_each_commit_their_part(tmp_path: Path):
    def environment(rank: int) -> dict[str, str]:
        return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}

    held = run_ranks(save_on_nodes, 2, tmp_path, env=environment)
    assert "random_0.json" in held[0]
    assert "random_0.json" not in held[1]
    assert "random_1.json" in held[1]
    assert all("training.json" in names for names in held)


# --- R19 -------------------------------------------------------------------------------------------------------------


def second_run(directory: Path) -> tuple[int, str]:
    """Load and save; return what was loaded, and what came of the save."""
    run = SavedRun(directory)
    run.accelerator.load_state()
    try:
        run.accelerator.save_state()
    except CheckpointLockedError as error:
        return run.count, str(error)
    return run.count, "saved"


def test_r19_a_second_run_is_refused_by_the_name_of_the_first(tmp_path: Path):
    first = SavedRun(tmp_path)
    first.accelerator.save_state()
    [(loaded, told)] = run_ranks(second_run, 1, tmp_path)
    assert loaded == -1, "reading is not writing"
    assert f"is written to by another run (process {os.getpid()} on {socket.gethostname()}, since " in told
    assert "give this run a directory of its own, or end the other one first" in told
    first.accelerator.end_training()
    assert run_ranks(second_run, 1, tmp_path) == [(-1, "saved")]


def test_r19_a_lock_of_a_dead_run_is_taken_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "_lock"
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1, "since": "yesterday"}))
    taken = DirectoryLock.take(path)
    assert f"taking over {path} from process {2**22 + 1} on" in caplog.text
    assert json.loads(path.read_text())["pid"] == os.getpid()
    taken.release()
    assert not path.exists()


def test_r19_another_machines_lock_holds_as_long_as_it_shows_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(store, "HEARTBEAT_SECONDS", 0.6)
    monkeypatch.setattr(store, "STALE_SECONDS", 2.0)
    path = tmp_path / "_lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "today"}))
    is_over = threading.Event()

    def show_life() -> None:
        while not is_over.wait(0.1):
            os.utime(path)

    alive = threading.Thread(target=show_life)
    alive.start()
    with pytest.raises(CheckpointLockedError, match=r"process 1 on elsewhere, since today.*or end the other one first"):
        DirectoryLock.take(path)
    is_over.set()
    alive.join()
    assert "waiting up to 2 s for a sign of life of process 1 on elsewhere" in caplog.text
    begin = time.monotonic()
    taken = DirectoryLock.take(path)
    assert time.monotonic() - begin > 1.0
    assert "taking over" in caplog.text
    taken.release()


def test_r19_a_run_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "_beating", None)
    monkeypatch.setattr(store, "HEARTBEAT_SECONDS", 0.05)
    taken = DirectoryLock.take(tmp_path / "_lock")
    long_ago = time.time() - STALE_SECONDS - 1
    os.utime(taken.path, (long_ago, long_ago))
    deadline = time.monotonic() + 60
    while time.time() - taken.path.stat().st_mtime > 60:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    taken.release()


@pytest.mark.parametrize(
    ("lives", "host", "has_flock"),
    crossed([True, False], [("elsewhere", True), ("elsewhere", False), (socket.gethostname(), False)]),
)
def test_a_clock_that_is_minutes_behind_makes_no_dead_run_of_a_live_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, has_flock: bool, lives: bool
):
    monkeypatch.setattr(store, "HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr(store, "SILENCE_SECONDS", 1.2)
    if not has_flock:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    path = tmp_path / "_lock"
    path.write_text(json.dumps({"host": host, "pid": 1, "since": "today"}))
    behind = time.time() - 2 * STALE_SECONDS
    os.utime(path, (behind, behind))
    is_over = threading.Event()

    def beat() -> None:
        while lives and not is_over.wait(0.3):
            seconds = time.time() - 2 * STALE_SECONDS
            os.utime(path, (seconds, seconds))

    other = threading.Thread(target=beat)
    other.start()
    try:
        if lives:
            with pytest.raises(CheckpointLockedError, match=f"process 1 on {host}"):
                DirectoryLock.take(path)
        else:
            begin = time.monotonic()
            DirectoryLock.take(path).release()
            assert time.monotonic() - begin > 1.0
    finally:
        is_over.set()
        other.join()


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOTSUP, "no locks here")


@pytest.mark.parametrize("pid", [2**22 + 1, os.getppid()], ids=["dead", "of another process by now"])
def test_without_system_locks_a_dead_run_of_this_machine_does_not_lock_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int
):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    if pid == os.getppid():
        monkeypatch.setattr(store, "HEARTBEAT_SECONDS", 0.3)
        monkeypatch.setattr(store, "STALE_SECONDS", 1.0)
    path = tmp_path / "_lock"
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": pid, "since": "today"}))
    begin = time.monotonic()
    DirectoryLock.take(path).release()
    assert time.monotonic() - begin < 30  # at once, or after a second
    assert not path.exists()


def test_r19_a_lock_is_given_back_as_often_as_it_was_taken(tmp_path: Path):
    one = DirectoryLock.take(tmp_path / "_lock")
    assert DirectoryLock.take(tmp_path / "_lock") is one
    one.release()
    assert (tmp_path / "_lock").exists()
    one.release()
    one.release()
    assert not (tmp_path / "_lock").exists()
    assert one.path not in store._held


def test_a_slow_disk_only_takes_longer(tmp_path: Path):
    env = fault_env("sleep@save.mid_shard:rank=1:step=1:seconds=0.2")
    run_ranks(save_repeatedly, 2, tmp_path, 3, env=env)
    assert acknowledged(tmp_path) == 2
    assert (tmp_path / "checkpoints" / "checkpoint_2" / MARKER_NAME).is_file()


def test_logging_stays_quiet_about_a_plain_save(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "accel_trainer"):
        SavedRun(tmp_path).accelerator.save_state()
    rooms = ("accel_trainer.accelerator", "accel_trainer.checkpoint")
    (line,) = [record.message for record in caplog.records if record.name.startswith(rooms)]
    assert line.startswith(f"saved {tmp_path / 'checkpoints' / 'checkpoint_0'}: ")


def publish_and_raise(target: Path, error: BaseException) -> None:
    with publish_directory(target, ALONE) as staged:
        (staged / "file").write_text("new")
        raise error


def test_a_directory_has_its_name_once_the_block_has_ended_well(tmp_path: Path):
    target = tmp_path / "a" / "state"
    for name in ("first", "second"):
        with publish_directory(target, ALONE) as staged:
            (staged / name).write_text(name)
            assert not (target / name).exists()
            assert staged.path.parent == target.parent
    for error in (OSError("disk"), KeyboardInterrupt("Ctrl-C")):
        with pytest.raises(type(error), match=str(error)):
            publish_and_raise(target, error)
        assert sorted(path.name for path in target.iterdir()) == ["COMMITTED", "manifest.json", "second"]
        assert (target / "second").read_text() == "second"
        assert list(target.parent.iterdir()) == [target], "neither a part of the save nor its lock"


def publish_with_a_failing_rank(target: Path) -> tuple[str, list[int]]:
    """Rank 1 fails; return what this rank was told, and use the group afterwards.

    Before that, all is well: return whose tables of files this rank heard of, too.
    """
    process = init_process(read_environment(), use_cpu=True)
    publication = Publication(target / "good", process)
    heard: list[int] = []
    gather = publication._gather_tables

    def note(*arguments: Any) -> Any:
        tables = gather(*arguments)
        heard.extend(tables)
        return tables

    publication._gather_tables = note
    with publication as staged:
        staged.write_json(f"part-{process.rank}.json", process.rank)
    publication.commit()
    try:
        with publish_directory(target / "bad", process) as staged:
            (staged / f"part-{process.rank}").write_text("x")
            if process.rank == 1:
                raise OSError("no space left")
    except (OSError, ProcessGroupError) as error:
        told = str(error)
    counted = torch.ones(1)
    torch.distributed.all_reduce(counted)
    assert counted.item() == process.world_size
    return told, heard


def test_one_ranks_failure_is_raised_on_every_rank_and_publishes_nothing(tmp_path: Path):
    told, heard = zip(*run_ranks(publish_with_a_failing_rank, 3, tmp_path), strict=True)
    assert told[1] == "no space left"
    assert told[0] == told[2].replace("(2)", "(0)")
    assert "rank 1 failed in save of" in told[0]
    assert "OSError: no space left" in told[0]
    # What each rank has written is of use to the one that commits, and is sent to no other.
    assert heard == ([0, 1, 2], [], [])
    assert list(tmp_path.iterdir()) == [tmp_path / "good"]
    assert sorted(open_checkpoint(tmp_path / "good", ALONE).manifest.files) == [
        f"part-{rank}.json" for rank in range(3)
    ]
