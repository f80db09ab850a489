"""A checkpoint's directory in which others have put links, FIFOs, bombs and rubbish: nothing outside of it is touched,
nothing waits, nothing expands without bound, and a good checkpoint beside a bad one is found."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import socket
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

from accel_trainer.checkpoint.interop.dcp import DcpDirectory
from accel_trainer.checkpoint.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from accel_trainer.checkpoint.publication import Publication
from accel_trainer.checkpoint.reader import open_checkpoint
from accel_trainer.checkpoint.store import LOCK_NAME, DirectoryLock, lock_of, retire
from accel_trainer.checkpoint.torch_files import load_torch_file
from accel_trainer.checkpoint.weights.weight_files import WeightFiles, save_weights
from accel_trainer.errors import ConfigError, CorruptCheckpointError
from accel_trainer.launch.checkpoints import run_ckpt
from tests.checkpoint.crash_job import SavedRun
from tests.checkpoint.mutations import KINDS, replaced, trial
from tests.checkpoint.small_run import SmallRun
from tests.publishing import ALONE, publish_directory

FIXTURES = Path(__file__).parent / "fixtures"
PRECIOUS = "alias ll='ls -l'\n"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of the user's, outside of any run."""
    path = tmp_path / "bashrc"
    path.write_text(PRECIOUS)
    return path


def publish(target: Path) -> Path:
    with publish_directory(target, ALONE) as staged:
        staged.write_tensors("x.safetensors", {"x": torch.ones(3)})
        staged.write_json("x.json", [1])
    return target


# --- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_save_does_not_write_through_a_lock_that_is_a_link(
    tmp_path: Path, precious: Path, link: Callable[[Path, Path], None]
):
    run = SavedRun(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    link(precious, tmp_path / "run" / "checkpoints" / LOCK_NAME)
    kind = "a symbolic link" if link is os.symlink else r"one of \d names of a file"
    with pytest.raises(
        ConfigError, match=rf"_lock is {kind}; accel_trainer keeps a file of its own there .* Remove it"
    ):
        run.accelerator.save_state()
    link(precious, lock_of(tmp_path / "best"))
    with pytest.raises(ConfigError, match=rf"\.best\.lock is {kind}"):
        run.accelerator.save_state(tmp_path / "best")
    assert precious.read_text() == PRECIOUS


def test_a_load_that_passes_over_a_bad_one_does_not_write_through_a_lock_that_is_a_link(tmp_path: Path, precious: Path):
    run = SavedRun(tmp_path, total_limit=None)
    for step in range(2):
        run.fill(step)
        run.accelerator.save_state()
    run.accelerator.end_training()
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_1" / MARKER_NAME).unlink()
    (folder / LOCK_NAME).symlink_to(precious)
    resumed = SavedRun(tmp_path, total_limit=None)
    resumed.accelerator.load_state()
    assert resumed.step_held() == 0
    assert precious.read_text() == PRECIOUS


def test_retention_and_prune_leave_what_a_link_leads_to_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    archived = publish(tmp_path / "archive" / "kept")
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoint_0").symlink_to(archived)
    for number in (1, 2, 3):
        publish(run / f"checkpoint_{number}")
    assert retire(run, 2) == [run / "checkpoint_1"]
    assert run_ckpt(["prune", "--keep", "1", str(run)]) == 0
    assert "removed checkpoint_2\n1 removed" in capsys.readouterr().out
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint_0", "checkpoint_3"]
    open_checkpoint(archived, ALONE).check(["x.json"])
    assert (archived / MARKER_NAME).is_file()


def test_a_runs_checkpoint_takes_the_name_of_a_link_and_leaves_what_it_leads_to_alone(tmp_path: Path):
    """As a Trainer that runs again in a directory where an earlier checkpoint-10 was moved to an archive."""
    archived = publish(tmp_path / "archive")
    (tmp_path / "run").mkdir()
    target = tmp_path / "run" / "checkpoint-10"
    for leads_to in (archived, tmp_path / "gone"):
        target.unlink(missing_ok=True)
        target.symlink_to(leads_to)
        publication = Publication(target, ALONE, owns_name=True, is_locked=True)
        with publication as staged:
            staged.write_json("new.json", 2)
        publication.commit()
        assert not target.is_symlink()
        assert open_checkpoint(target, ALONE).json("new.json") == 2
        shutil.rmtree(target)
    assert open_checkpoint(archived, ALONE).json("x.json") == [1]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == []


def test_weights_are_not_written_through_a_link(tmp_path: Path, precious: Path):
    (tmp_path / "model").mkdir()
    for name in ("model.safetensors", ".model.safetensors.incomplete"):
        (tmp_path / "model" / name).symlink_to(precious)
    save_weights({"x": torch.ones(2)}, tmp_path / "model")
    assert precious.read_text() == PRECIOUS
    assert torch.equal(WeightFiles(tmp_path / "model")["x"], torch.ones(2))


def test_a_shard_that_is_a_link_is_read_within_its_directory_and_in_the_hubs_store_only(tmp_path: Path):
    snapshot = tmp_path / "models--me--tiny" / "snapshots" / "0a1b"
    blobs = tmp_path / "models--me--tiny" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    weights = {"a": torch.zeros(2), "b": torch.ones(2)}
    for name, tensor in weights.items():
        save_file({name: tensor}, blobs / f"sha-{name}")
        (snapshot / f"{name}.safetensors").symlink_to(f"../../blobs/sha-{name}")
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in weights}}))
    assert torch.equal(WeightFiles(snapshot)["b"], torch.ones(2))
    shutil.move(blobs / "sha-b", tmp_path / "secret")
    for leads_to in (tmp_path / "secret", Path("../../../secret")):
        (snapshot / "b.safetensors").unlink()
        (snapshot / "b.safetensors").symlink_to(leads_to)
        with pytest.raises(
            CorruptCheckpointError, match=r"b\.safetensors is a link to .*secret, out of its checkpoint"
        ):
            WeightFiles(snapshot)
    # Nor by way of the store.
    (blobs / "sha-b").symlink_to(tmp_path / "secret")
    (snapshot / "b.safetensors").unlink()
    (snapshot / "b.safetensors").symlink_to("../../blobs/sha-b")
    with pytest.raises(CorruptCheckpointError, match="out of its checkpoint"):
        WeightFiles(snapshot)


# --- FIFOs and rubbish -----------------------------------------------------------------------------------------------


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    theirs = shutil.copytree(FIXTURES / "accelerate_1_15", tmp_path / "theirs")
    for name in ("random_states_0.pkl", "custom_checkpoint_0.pkl", "scheduler.bin", "optimizer.bin"):
        (theirs / name).rename(theirs / "aside")
        os.mkfifo(theirs / name)
        try:
            SmallRun().accelerator.load_state(theirs)
        except (CorruptCheckpointError, FileNotFoundError) as error:
            assert re.search(rf"{name} is (a FIFO, and checkpoints have regular|missing)", str(error))  # noqa: PT017
        else:
            assert "random_states_0.pkl is a FIFO" in caplog.text
            assert name == "random_states_0.pkl"
        (theirs / name).unlink()
        (theirs / "aside").rename(theirs / name)
    own = publish(tmp_path / "own")
    for name in (MARKER_NAME, MANIFEST_NAME, "x.json"):
        (own / name).unlink()
        os.mkfifo(own / name)
        with pytest.raises(CorruptCheckpointError, match=rf"{name} is a FIFO"):
            open_checkpoint(own, ALONE).check(["x.json"])
        shutil.rmtree(own)
        publish(own)
    for kind in (os.mkfifo, os.mkdir):
        kind(tmp_path / LOCK_NAME)
        with pytest.raises(ConfigError, match=r"_lock is a (FIFO|directory); accel_trainer keeps a file of its own"):
            DirectoryLock.take(tmp_path / LOCK_NAME)
        os.unlink(tmp_path / LOCK_NAME) if kind is os.mkfifo else os.rmdir(tmp_path / LOCK_NAME)


RUBBISH = [b"[" * 4000, b"{}", b'{"pid": 1, "host": "x"', b"\xff" * 9000, b"notes\n"]


@pytest.mark.parametrize("content", RUBBISH, ids=range(len(RUBBISH)))
def test_a_lock_of_rubbish_stops_no_save_and_is_kept(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture):
    run = SavedRun(tmp_path)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / LOCK_NAME).write_bytes(content)
    run.accelerator.save_state()
    (kept,) = folder.glob("_bad-_lock-*")
    assert kept.read_bytes() == content
    assert "_lock was no lock of accel_trainer: it is kept as _bad-_lock-" in caplog.text
    assert (folder / "checkpoint_0" / MARKER_NAME).is_file()


@pytest.mark.parametrize("content", [b"", b"\0" * 90, b'{"ho', b'{"host": "vm", "pid": 1e400}'])
def test_a_signature_that_a_crash_has_cut_short_is_written_anew(tmp_path: Path, content: bytes):
    path = tmp_path / LOCK_NAME
    path.write_bytes(content)
    held = DirectoryLock.take(path)
    assert json.loads(path.read_bytes())["host"] == socket.gethostname()
    held.release()
    assert list(tmp_path.iterdir()) == []


# --- bombs -----------------------------------------------------------------------------------------------------------


def deflate(source: Path, target: Path) -> None:
    with zipfile.ZipFile(source) as stored, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as deflated:
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))


class Buffer:
    def __reduce__(self) -> Any:
        return bytearray, (2**40,)


def test_torch_files_expand_to_no_more_than_their_size(tmp_path: Path):
    torch.save({"x": torch.zeros(2**22)}, tmp_path / "stored.pt")
    deflate(tmp_path / "stored.pt", tmp_path / "bomb.pt")
    size = (tmp_path / "bomb.pt").stat().st_size
    with pytest.raises(
        CorruptCheckpointError,
        match=rf"is compressed: its {size:,} bytes are 16,7\d\d,\d\d\d in memory, and no more than",
    ):
        load_torch_file(tmp_path / "bomb.pt")
    assert size < 2**16
    torch.save({"x": Buffer()}, tmp_path / "buffer.pt")
    torch.save({"x": Buffer()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("buffer.pt", "old.pt"):
        with pytest.raises(CorruptCheckpointError, match="holds a bytearray, which can ask for memory without bound"):
            load_torch_file(tmp_path / name)
    assert load_torch_file(tmp_path / "stored.pt", is_mapped=True)["x"].numel() == 2**22


def nested(levels: int) -> list[Any]:
    bomb: list[Any] = []
    for _ in range(levels):
        bomb = [bomb, bomb]
    return bomb


@pytest.mark.parametrize("place", ["transforms", "name", "path", "sizes", "planned"])
def test_metadata_of_lists_in_lists_are_neither_printed_nor_walked_through(tmp_path: Path, place: str):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"x": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    bomb: Any = nested(60)
    info = next(iter(metadata.storage_data.values()))
    if place == "transforms":
        info.transform_descriptors = bomb
    elif place == "path":
        info.relative_path = bomb
    elif place == "name":
        next(iter(metadata.storage_data)).__dict__["fqn"] = bomb
    elif place == "sizes":
        metadata.state_dict_metadata["model.x"].__dict__["size"] = bomb
    else:
        metadata.planner_data = {"model.x": bomb}
    buffer = io.BytesIO()
    pickle._Pickler(buffer).dump(metadata)  # that of C hashes what it may not
    path.write_bytes(buffer.getvalue())
    begin = time.monotonic()
    with pytest.raises(
        ValueError, match=r"is compressed; save it|is not the metadata of a checkpoint \(TypeError\)"
    ) as caught:
        DcpDirectory(tmp_path / "dcp")
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - begin < 5


def test_a_manifest_of_a_million_keys_is_refused_before_it_is_parsed(tmp_path: Path):
    path = publish(tmp_path / "s")
    keys = ",".join(f'"{number}":0' for number in range(1_000_000))
    text = f'{{"format_version": 3, "metadata": {{{keys}}}}}'.encode()
    (path / MANIFEST_NAME).write_bytes(text)
    (path / MARKER_NAME).write_bytes(Manifest.digest(text))
    tracemalloc.start()
    try:
        with pytest.raises(
            CorruptCheckpointError, match=r"has about 1,000,004 pairs, lists and objects, and at most 200,\d+"
        ):
            open_checkpoint(path, ALONE)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    finally:
        tracemalloc.stop()


def test_a_key_that_stands_twice_among_many_is_found_at_once(tmp_path: Path):
    path = publish(tmp_path / "s")
    keys = ",".join(f'"{number}":0' for number in range(100_000))
    (path / MANIFEST_NAME).write_text(f'{{"a":{{{keys},"99999":0}}}}')
    begin = time.monotonic()
    with pytest.raises(CorruptCheckpointError, match="key '99999' stands twice"):
        open_checkpoint(path, ALONE)
    assert time.monotonic() - begin < 10


# --- damage that no checksum tells -----------------------------------------------------------------------------------


def replace_manifest(path: Path, text: bytes) -> None:
    (path / MANIFEST_NAME).write_bytes(text)
    (path / MARKER_NAME).write_bytes(Manifest.digest(text))


def forge(path: Path, name: str, content: Any) -> None:
    """Have a file of a checkpoint hold other JSON, checksum and all."""
    with publish_directory(path.with_name("forged"), ALONE) as staged:
        staged.write_json(name, content)
    data = json.loads((path / MANIFEST_NAME).read_text())
    data["files"] |= json.loads((path.with_name("forged") / MANIFEST_NAME).read_text())["files"]
    os.replace(path.with_name("forged") / name, path / name)
    shutil.rmtree(path.with_name("forged"))
    replace_manifest(path, json.dumps(data).encode())


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(900):
        value = [value]
    return value


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: replace_manifest(path, b'{"format_version": 1, "world_size": 1, "torch": "2"}'),
        lambda path: replace_manifest(path, (path / MANIFEST_NAME).read_bytes().replace(b'"units"', b'"other"')),
        lambda path: replace_manifest(path, b'{"format_version": 3, "checksum": "xxh3-128", "world_size": 1e999}'),
        lambda path: replace_manifest(path, b"[" * 200_000),
        lambda path: forge(path, "training.json", {"schedulers": 3}),
        lambda path: forge(path, "training.json", deep()),
        lambda path: forge(path, "unit_0.json", {}),
        lambda path: forge(path, "unit_0.json", {"engine": "torch", "tied": {}, "optimizer": {"param_groups": 3}}),
        lambda path: forge(path, "random_0.json", {"python": [1, 2, 3]}),
    ],
    ids=["version", "units", "infinite", "brackets", "schedulers", "deep", "outline", "groups", "streams"],
)
def test_a_checkpoint_that_makes_a_reader_stumble_is_corrupt_and_the_one_before_it_is_taken(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
):
    run = SavedRun(tmp_path, total_limit=None)
    for step in range(2):
        run.fill(step)
        run.accelerator.save_state()
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    damage(newest)
    run.fill(7)
    run.accelerator.load_state()
    assert run.step_held() == 0
    assert "checkpoint_1 is not a good checkpoint and is passed over; it is kept as _bad-checkpoint_1" in caplog.text
    assert not newest.exists()


# --- whatever it is --------------------------------------------------------------------------------------------------

FUZZED = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutated")


@pytest.mark.parametrize("kind", KINDS)
@FUZZED
@given(seed=st.integers(0, 2**32))
def test_whatever_is_changed_it_loads_equal_is_refused_or_falls_back(folder: Path, kind: str, seed: int):
    trial(kind, seed, folder)


@pytest.mark.parametrize("kind", KINDS)
@settings(FUZZED, max_examples=20)
@given(index=st.integers(0, 100), content=st.binary(max_size=300))
def test_any_bytes_in_place_of_a_file_load_equal_are_refused_or_fall_back(
    folder: Path, kind: str, index: int, content: bytes
):
    replaced(kind, index, content, folder)
