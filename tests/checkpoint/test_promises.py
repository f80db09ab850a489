"""What a checkpoint promises to those who load it: contents verified (R2), the newest good one taken (R3), never the
last good one removed (R4), and names that stay inside (R15)."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from accel_trainer.checkpoint.manifest import BLOCK_BYTES, MANIFEST_NAME, MARKER_NAME, Manifest, check_name
from accel_trainer.checkpoint.reader import open_checkpoint
from accel_trainer.checkpoint.store import retire
from accel_trainer.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from tests.checkpoint.crash_job import SavedRun, save_repeatedly
from tests.fault_injection import fault_env
from tests.publishing import ALONE, flip, publish, publish_directory
from tests.ranks import run_ranks


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": flip, "cut": cut, "delete": Path.unlink}
MESSAGES = {
    "flip": "{name} was changed after the save: its xxh3-128 is {found}, and {written} was written",
    "cut": r"{name} has \d+ bytes, and \d+ were written",
    "delete": "{name} is missing; the checkpoint is incomplete",
}


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[SavedRun]:
    """Three checkpoints, numbered 0 to 2, each full of its number."""
    run = SavedRun(tmp_path, total_limit=None)
    for step in range(3):
        run.fill(step)
        run.accelerator.save_state()
    yield run
    assert run.accelerator.process.world_size == 1


def checkpoint(directory: Path, step: int) -> Path:
    return directory / "checkpoints" / f"checkpoint_{step}"


# --- R2 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES)
def test_r2_any_damage_to_any_file_is_found_before_anything_changes(tmp_path: Path, saved: SavedRun, damage: str):
    good = checkpoint(tmp_path, 2)
    names = sorted(Manifest.read(good).files)
    assert len(names) >= 6
    saved.fill(7)
    for name in names:
        copy = tmp_path / f"{damage}-{name}"
        shutil.copytree(good, copy)
        DAMAGES[damage](copy / name)
        message = MESSAGES[damage].format(name=name, found=checksum(copy / name), written=checksum(good / name))
        with pytest.raises((CorruptCheckpointError, CheckpointNotFoundError), match=message):
            saved.accelerator.load_state(copy)
        assert saved.step_held() == 7
        # An explicitly named one is an error, and stays where it is.
        assert copy.is_dir()


def checksum(path: Path) -> str:
    return xxhash.xxh3_128(path.read_bytes()).hexdigest() if path.exists() else ""


def test_r2_a_changed_manifest_marker_or_an_added_file_is_found(tmp_path: Path, saved: SavedRun):
    good = checkpoint(tmp_path, 2)
    edited = shutil.copytree(good, tmp_path / "edited")
    text = (edited / MANIFEST_NAME).read_text()
    (edited / MANIFEST_NAME).write_text(text.replace('"world_size": 1', '"world_size": 2'))
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json was changed after the checkpoint was committed"):
        saved.accelerator.load_state(edited)
    unmarked = shutil.copytree(good, tmp_path / "unmarked")
    (unmarked / MARKER_NAME).unlink()
    with pytest.raises(CheckpointNotFoundError, match="COMMITTED is missing, so its save never ended"):
        saved.accelerator.load_state(unmarked)
    added = shutil.copytree(good, tmp_path / "added")
    (added / "notes.txt").write_text("mine")
    with pytest.raises(CorruptCheckpointError, match=r"holds 'notes\.txt', which its manifest does not name"):
        saved.accelerator.load_state(added)
    saved.fill(7)
    saved.accelerator.load_state(added, verify="off")
    assert saved.step_held() == 2


def test_r2_less_verification_has_to_be_asked_for(tmp_path: Path, saved: SavedRun):
    path = checkpoint(tmp_path, 2)
    name = next(name for name in Manifest.read(path).files if name.endswith(".safetensors"))
    flip(path / name)
    stored = open_checkpoint(path, ALONE, verify="size")
    assert stored.file(name) == path / name
    with pytest.raises(CorruptCheckpointError, match="was changed after the save"):
        open_checkpoint(path, ALONE).file(name)
    cut(path / name)
    with pytest.raises(CorruptCheckpointError, match="bytes, and"):
        open_checkpoint(path, ALONE, verify="size").file(name)
    assert open_checkpoint(path, ALONE, verify="off").file(name)
    with pytest.raises(ConfigError, match="verify='fast'; expected 'full'"):
        saved.accelerator.load_state(path, verify="fast")


def test_r2_a_large_file_is_hashed_in_blocks_and_the_bad_one_is_named(tmp_path: Path):
    values = torch.arange(BLOCK_BYTES // 4 + 1000, dtype=torch.float32)
    with publish_directory(tmp_path / "s", ALONE) as staged:
        staged.write_tensors("big.safetensors", {"values": values})
    entry = Manifest.read(tmp_path / "s").files["big.safetensors"]
    content = (tmp_path / "s" / "big.safetensors").read_bytes()
    blocks = [xxhash.xxh3_128(content[begin : begin + BLOCK_BYTES]) for begin in (0, BLOCK_BYTES)]
    assert entry.num_bytes == len(content)
    assert entry.blocks == tuple(block.hexdigest() for block in blocks)
    assert entry.checksum == xxhash.xxh3_128(b"".join(block.digest() for block in blocks)).hexdigest()
    stored = open_checkpoint(tmp_path / "s", ALONE).tensors("big.safetensors")
    assert torch.equal(stored["values"], values)
    assert torch.equal(stored.slice("values", slice(5, 9)), values[5:9])
    with open(tmp_path / "s" / "big.safetensors", "r+b") as file:
        file.seek(BLOCK_BYTES + 8)
        file.write(b"!")
    with pytest.raises(CorruptCheckpointError, match=r"\(first in the 64 MiB at byte 67,108,864\)"):
        open_checkpoint(tmp_path / "s", ALONE).file("big.safetensors")


# --- R3 --------------------------------------------------------------------------------------------------------------


def test_r3_the_newest_good_one_is_taken_and_bad_ones_are_kept(
    tmp_path: Path, saved: SavedRun, caplog: pytest.LogCaptureFixture
):
    flip(checkpoint(tmp_path, 2) / sorted(Manifest.read(checkpoint(tmp_path, 2)).files)[0])
    (checkpoint(tmp_path, 1) / MARKER_NAME).unlink()
    with caplog.at_level(logging.INFO, "accel_trainer"):
        saved.accelerator.load_state()
    assert saved.step_held() == 0
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "checkpoint_2 is not a good checkpoint and is passed over; it is kept as _bad-checkpoint_2-" in warnings[0]
    assert "was changed after the save: its xxh3-128 is" in warnings[0]
    assert "checkpoint_1 is incomplete: COMMITTED is missing" in warnings[1]
    bad = sorted(path.name[:17] for path in (tmp_path / "checkpoints").glob("_bad-*"))
    assert bad == ["_bad-checkpoint_1", "_bad-checkpoint_2"]
    # R18: one line that says from where, and why not from a newer one.
    (line,) = [record.message for record in caplog.records if record.message.startswith("resumed from")]
    assert "checkpoint_0; contents verified; random streams" in line
    assert "passed over checkpoint_2: " in line
    assert "; passed over checkpoint_1: " in line
    assert saved.accelerator.save_state().name == "checkpoint_1"


def test_r3_none_good_is_an_error_and_not_a_fresh_start(tmp_path: Path, saved: SavedRun):
    for step in range(3):
        (checkpoint(tmp_path, step) / MARKER_NAME).unlink()
    for _ in range(2):  # the second time, only what was kept is there
        with pytest.raises(CorruptCheckpointError, match=r"none of the checkpoints in .* is good; .*_bad-checkpoint_0"):
            saved.accelerator.load_state()


def test_r3_who_only_reads_renames_nothing_in_the_directory_of_a_live_run(tmp_path: Path, saved: SavedRun):
    flip(checkpoint(tmp_path, 2) / sorted(Manifest.read(checkpoint(tmp_path, 2)).files)[0])
    # This process holds the lock of the directory; the one that loads is another run, an evaluation say.
    assert run_ranks(load_on_two, 1, tmp_path, None) == ["1"]
    assert checkpoint(tmp_path, 2).is_dir()
    assert not list(tmp_path.rglob("_bad-*"))


def load_on_two(directory: Path, blind: int | None) -> str:
    """Load from a relative path, which leads elsewhere on one rank: a node that does not see the disk."""
    if int(os.environ["RANK"]) == blind:
        (directory / "elsewhere").mkdir()
    os.chdir(directory / "elsewhere" if int(os.environ["RANK"]) == blind else directory)
    run = SavedRun(Path(), total_limit=None)
    try:
        run.accelerator.load_state()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return str(run.step_held())


def test_r3_all_ranks_take_rank_0s_decision_or_all_raise(tmp_path: Path):
    run_ranks(save_repeatedly, 2, tmp_path, 1)
    run = SavedRun(tmp_path, total_limit=None)
    run.fill(5)
    run.accelerator.save_state()
    told = run_ranks(load_on_two, 2, tmp_path, 1)
    assert told[1].startswith("CheckpointNotFoundError: no checkpoint in ")
    assert told[0].startswith("RemoteRankError: rank 1 failed in load of")
    assert checkpoint(tmp_path, 1).is_dir()
    flip(checkpoint(tmp_path, 1) / sorted(Manifest.read(checkpoint(tmp_path, 1)).files)[-1])
    assert run_ranks(load_on_two, 2, tmp_path, None) == ["0", "0"]


# --- R4 --------------------------------------------------------------------------------------------------------------


def test_r4_numbers_decide_what_goes_and_only_complete_checkpoints_go(tmp_path: Path):
    for name in ("checkpoint_10000", "checkpoint_9900", "checkpoint_9800", "checkpoint_10100", "checkpoint_20000"):
        publish(tmp_path / name, name)
    (tmp_path / "checkpoint_20000" / MARKER_NAME).unlink()
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "checkpoint_1" / "mine.txt").write_text("not a checkpoint")
    removed = retire(tmp_path, 2, protected=[tmp_path / "checkpoint_9800"])
    assert [path.name for path in removed] == ["checkpoint_9900", "checkpoint_10000"]
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"checkpoint_1", "checkpoint_9800", "checkpoint_10100", "checkpoint_20000"}
    assert retire(tmp_path, 0) == [tmp_path / "checkpoint_9800"]
    assert (tmp_path / "checkpoint_10100" / MARKER_NAME).is_file()


def test_r4_what_cannot_be_removed_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    publish(tmp_path / "checkpoint_1", "x")
    publish(tmp_path / "checkpoint_2", "x")

    def refuse(*args: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    retire(tmp_path, 1)
    assert "could not be removed (read-only); remove it by hand" in caplog.text
    assert not (tmp_path / "checkpoint_1").exists()


# --- R15: names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "a\\b", "./a", "a\0b"])
def test_r15_names_that_leave_the_directory_are_refused(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match="is not a file name inside a checkpoint"):
        check_name(name)
    with pytest.raises(ConfigError, match="is not a file name"), publish_directory(tmp_path / "s", ALONE) as staged:
        staged.write_json(name, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_stores_own_names_are_refused():
    for name in (MANIFEST_NAME, MARKER_NAME):
        with pytest.raises(ConfigError, match="is written by the store itself"):
            check_name(name)


def forge(directory: Path, change: Callable[[dict], None]) -> Path:
    """A checkpoint whose manifest was written by somebody else, marker included."""
    path = directory / "forged"
    publish(path, "x")
    data = json.loads((path / MANIFEST_NAME).read_text())
    change(data)
    text = json.dumps(data).encode()
    (path / MANIFEST_NAME).write_bytes(text)
    (path / MARKER_NAME).write_bytes(Manifest.digest(text))
    return path


OUTSIDE = {"../secret": {"bytes": 2, "checksum": "0"}}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda data: data["files"].update(OUTSIDE),
            CorruptCheckpointError,
            r"'\.\./secret' is not a file name inside a checkpoint",
        ),
        (
            lambda data: data.update(checksum="crc9"),
            IncompatibleCheckpointError,
            "of the kind 'crc9' and this version knows 'xxh3-128'",
        ),
    ],
    ids=["r15 a file outside", "r20 an unknown checksum"],
)
def test_a_forged_manifest_is_refused(tmp_path: Path, change: Callable[[dict], None], error: type, message: str):
    (tmp_path / "secret").write_text("{}")
    path = forge(tmp_path, change)
    with pytest.raises(error, match=message):
        open_checkpoint(path, ALONE)


def test_r15_a_link_out_of_the_checkpoint_is_refused(tmp_path: Path):
    publish(tmp_path / "s", "x")
    (tmp_path / "s" / "x.json").rename(tmp_path / "elsewhere.json")
    (tmp_path / "s" / "x.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CorruptCheckpointError, match=r"x\.json is a link to .*elsewhere\.json, out of its checkpoint"):
        open_checkpoint(tmp_path / "s", ALONE, verify="off").json("x.json")
    with (
        pytest.raises(ConfigError, match="was to be part of a checkpoint; expected a file or a folder"),
        publish_directory(tmp_path / "t", ALONE) as staged,
    ):
        (staged / "link").symlink_to(tmp_path / "elsewhere.json")


@pytest.mark.parametrize(("umask", "modes"), [(0o077, {0o700, 0o600}), (0o002, {0o775, 0o664}), (0, {0o777, 0o666})])
def test_r15_modes_follow_the_umask_and_what_everybody_may_write_to_is_warned_of(
    tmp_path: Path, umask: int, modes: set[int], caplog: pytest.LogCaptureFixture
):
    before = os.umask(umask)
    try:
        with publish_directory(tmp_path / "s", ALONE) as staged:
            staged.write_json("x.json", 1)
            (staged / "engine").mkdir()
            staged.write_tensors("engine/x.safetensors", {"x": torch.ones(1)})
    finally:
        os.umask(before)
    paths = [tmp_path / "s", *(tmp_path / "s").rglob("*")]
    assert {path.stat().st_mode & 0o7777 for path in paths} == modes
    open_checkpoint(tmp_path / "s", ALONE)
    warning = f"every user of this machine can write to {tmp_path / 's'} (mode 777), and checksums tell damage"
    assert (warning in caplog.text) == (umask == 0)


def test_r15_duplicate_keys_and_absurd_tensors_are_refused(tmp_path: Path):
    publish(tmp_path / "s", "x")
    text = (tmp_path / "s" / MANIFEST_NAME).read_bytes().replace(b'"step": null', b'"step": null, "step": 3')
    (tmp_path / "s" / MANIFEST_NAME).write_bytes(text)
    (tmp_path / "s" / MARKER_NAME).write_bytes(Manifest.digest(text))
    with pytest.raises(CorruptCheckpointError, match="key 'step' stands twice"):
        open_checkpoint(tmp_path / "s", ALONE)
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
    with publish_directory(tmp_path / "t", ALONE) as staged:
        (staged / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptCheckpointError, match=r"x\.safetensors is not a safetensors file"):
        open_checkpoint(tmp_path / "t", ALONE).tensors("x.safetensors")


def test_r20_a_newer_format_is_refused_whatever_else_it_says(tmp_path: Path):
    path = forge(tmp_path, lambda data: data.update(format_version=99, files="elsewhere"))
    (path / MARKER_NAME).write_bytes(b"written in another way")
    with pytest.raises(IncompatibleCheckpointError, match="has format version 99 and this version reads 3;"):
        open_checkpoint(path, ALONE)


def test_r2_a_bit_that_flips_right_after_the_write_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    # The checksum is of what was given to be written: reading the file back would certify the damage.
    env = fault_env("flip@save.after_shard:rank=1:step=1")
    run_ranks(save_repeatedly, 2, tmp_path, 2, env=env)
    run = SavedRun(tmp_path, total_limit=None)
    with pytest.raises(CorruptCheckpointError, match=r"none of the checkpoints in .* is good"):
        run.accelerator.load_state()
    assert "was changed after the save: its xxh3-128 is" in caplog.text
