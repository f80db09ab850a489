"""Checkpoints in a store that speaks S3: moto's server on the loopback, a real client, and faults between them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto")

import boto3
import fsspec
import torch
from s3fs import S3FileSystem
from transformers import TrainerCallback

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.checkpoint import manifest, object_store
from accel_trainer.checkpoint.object_store import GIVE_UP_SECONDS, OWNER_NAME, ObjectStore
from accel_trainer.errors import CheckpointLockedError, CheckpointNotFoundError, CorruptCheckpointError
from tests.checkpoint.test_object_store import trained
from tests.publishing import ALONE, publish_directory
from tests.stores.faulty_server import Faulty, variables
from tests.trainer_jobs import build_trainer, on_ranks


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    faulty = Faulty()
    faulty.serve()
    for name, value in variables(faulty).items():
        monkeypatch.setenv(name, value)
    faulty.make_bucket()
    monkeypatch.setattr(object_store, "GIVE_UP_SECONDS", 20.0)
    S3FileSystem.clear_instance_cache()
    yield faulty
    S3FileSystem.clear_instance_cache()
    faulty.go_on.set()
    faulty.stop()


def test_a_run_goes_on_from_a_bucket_on_an_empty_disk(tmp_path: Path, server: Faulty, caplog) -> None:
    uri, options = "s3://bucket/run", {"lr_scheduler_type": "constant", "save_total_limit": 2}
    whole = trained(tmp_path / "whole", **options)
    server.unavailable = 6
    trained(tmp_path / "lost", uri, max_steps=7, save_async=True, **options)
    assert server.unavailable == 0
    found = trained(tmp_path / "new", uri, "latest", **options)
    assert found["losses"] == whole["losses"]
    store = ObjectStore(uri, "checkpoint-")
    assert len(store.names()) == 2
    for name in store.names():
        store.verify(name)
    for path in (tmp_path / "new").rglob("*"):
        assert not path.is_file() or b"a-secret" not in path.read_bytes(), path
    assert "a-secret" not in caplog.text


def test_the_marker_is_sent_last_and_read_first(tmp_path: Path, server: Faulty) -> None:
    trained(tmp_path / "run", "s3://bucket/run", max_steps=3)
    sent = [path for method, path in server.requests if method == "PUT" and "/checkpoint-3/" in path]
    assert [path.rpartition("/")[2] for path in sent[-2:]] == ["manifest.json", "COMMITTED"]


def test_an_upload_asks_twice_for_each_file_and_little_else(tmp_path: Path, server: Faulty) -> None:
    path, store = saved(tmp_path), ObjectStore("s3://bucket/run", "checkpoint-")
    store.put(path)
    server.requests.clear()
    store.put(path)
    names = [name for _, name in server.requests if "/checkpoint-3/" in name]
    assert len(names) == 2 * 4  # it is sent, and its length is asked for
    assert len(server.requests) <= len(names) + 6  # the owner, the marker of before, the folder


def test_a_body_that_is_not_what_was_sent_is_refused(tmp_path: Path, server: Faulty) -> None:
    trained(tmp_path / "run", "s3://bucket/run", max_steps=3)
    store = ObjectStore("s3://bucket/run", "checkpoint-")
    server.cut = "model.safetensors"  # on the way: the client's own checksums, or ours, have it sent again
    store.fetch("checkpoint-3", tmp_path / "disk")
    assert server.cut is None
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    place = {"Bucket": "bucket", "Key": "run/checkpoint-3/model.safetensors"}
    body = bytearray(client.get_object(**place)["Body"].read())
    body[-1] ^= 1
    for damaged in (bytes(body), b""):  # of an empty file a store refuses every range
        client.put_object(**place, Body=damaged)
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors is not as it was saved"):
            store.fetch("checkpoint-3", tmp_path / "other")


def test_of_two_runs_that_begin_at_once_the_store_takes_one(tmp_path: Path, server: Faulty) -> None:
    first, second = (ObjectStore("s3://bucket/run", "checkpoint-", job=job) for job in ("first", "second"))
    first.claim()
    assert first._files.exists(f"bucket/run/{OWNER_NAME}")
    with pytest.raises(CheckpointLockedError, match="is the store of another run"):
        second.claim()


def saved(directory: Path, num_values: int = 1000) -> Path:
    path = directory / "checkpoint-3"
    with publish_directory(path, ALONE) as staged:
        staged.write_tensors("model.safetensors", {"weight": torch.arange(num_values, dtype=torch.float32)})
        staged.write_json("trainer_state.json", {})
    return path


def test_two_ranks_read_each_byte_once(tmp_path: Path, server: Faulty) -> None:
    uri, options = "s3://bucket/run", {"lr_scheduler_type": "constant", "samples": 64, "env": variables(server)}
    whole = on_ranks("ddp", trained, tmp_path / "whole", **options)[0]
    on_ranks("ddp", trained, tmp_path / "lost", uri, max_steps=6, **options)
    num_bytes = ObjectStore(uri, "checkpoint-").manifest("checkpoint-6").num_bytes
    server.num_sent.clear()
    server.requests.clear()
    found = on_ranks("ddp", trained, tmp_path / "new", uri, "latest", **options)[0]
    assert found["losses"] == whole["losses"]
    sent = sum(count for path, count in server.num_sent.items() if "/checkpoint-6/" in path)
    manifests = sum(count for path, count in server.num_sent.items() if path.endswith(("manifest.json", "COMMITTED")))
    assert num_bytes <= sent - manifests <= 1.05 * num_bytes


def test_the_store_is_listed_once_where_nothing_is_on_the_disk(tmp_path: Path, server: Faulty) -> None:
    ObjectStore("s3://bucket/run", "checkpoint_").put(saved(tmp_path).rename(tmp_path / "checkpoint_3"))
    server.num_listings.clear()
    options = ProjectConfiguration(project_dir=str(tmp_path / "new"), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=options, config={"checkpoint_uri": "s3://bucket/run"})
    with pytest.raises(CheckpointNotFoundError, match=r"training\.json is missing"):
        accelerator.load_state(missing_ok=True)
    assert (tmp_path / "new" / "checkpoints" / "checkpoint_3").is_dir()
    assert sorted(server.num_listings.values()) == [1, 1]  # of the run, and of the checkpoint


def test_a_file_of_several_blocks_is_read_by_ranges(tmp_path: Path, server: Faulty, monkeypatch) -> None:
    for module in (manifest, object_store):
        monkeypatch.setattr(module, "BLOCK_BYTES", 2**20)
    path = saved(tmp_path, 10**6)
    store = ObjectStore("s3://bucket/run", "checkpoint-")
    store.put(path)
    server.requests.clear()
    server.cut = "model.safetensors"
    fetched = store.fetch("checkpoint-3", tmp_path / "disk")
    assert (fetched / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    assert [place.rpartition("/")[2] for _, place in server.requests].count("model.safetensors") == 4 + 1
    store.verify("checkpoint-3")


def test_a_connection_that_nobody_answers_is_given_up_and_tried_again(tmp_path, server: Faulty, monkeypatch) -> None:
    times = {"connect_timeout": 0.5, "read_timeout": 0.5, "retries": {"max_attempts": 1}}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": times})
    store = ObjectStore("s3://bucket/run", "checkpoint-")
    server.silent = 5
    store.put(saved(tmp_path))
    assert server.silent == 0
    server.silent = 5
    store.fetch("checkpoint-3", tmp_path / "disk")


def test_a_server_that_is_gone_for_a_while_is_waited_for(tmp_path: Path, server: Faulty) -> None:
    store = ObjectStore("s3://bucket/run", "checkpoint-")
    path, waits = saved(tmp_path), 2.0
    for call in (lambda: store.put(path), lambda: store.fetch("checkpoint-3", tmp_path / "disk")):
        server.stop()
        back = threading.Timer(waits, server.serve, [server.port])
        begin = time.monotonic()
        back.start()
        call()
        back.join()
        assert time.monotonic() - begin > waits
    store.verify("checkpoint-3")


class Outage(TrainerCallback):
    """Takes a server away once a checkpoint is being sent, for a time in which eight updates are done."""

    def __init__(self, server: Faulty, seconds: float) -> None:
        self.server, self.seconds, self.back = server, seconds, threading.Event()
        self.updates_meanwhile: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.server.stop()
            threading.Timer(self.seconds, self._return).start()

    def _return(self) -> None:
        self.server.serve(self.server.port)
        self.back.set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 4 and not self.back.is_set():
            self.updates_meanwhile.append(state.global_step)
            self.back.wait(self.seconds / 8)


@pytest.mark.parametrize("seconds", [2.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_a_run_goes_on_while_the_server_is_gone(tmp_path: Path, server: Faulty, caplog, monkeypatch, seconds) -> None:
    monkeypatch.setattr(object_store, "GIVE_UP_SECONDS", GIVE_UP_SECONDS)
    trainer = build_trainer(
        tmp_path / "run", checkpoint_uri="s3://bucket/run", model="gpt2", samples=64, save_strategy="steps",
        save_steps=4, save_total_limit=2, save_async=True,
    )  # fmt: skip
    outage = Outage(server, seconds)
    trainer.add_callback(outage)
    begin = time.monotonic()
    trainer.train()
    assert time.monotonic() - begin > seconds
    assert trainer.state.global_step == 16
    assert len(outage.updates_meanwhile) >= 6
    assert seconds < 20 or "s3://bucket/run does not answer" in caplog.text  # the client tries again by itself
    store = ObjectStore("s3://bucket/run", "checkpoint-")
    assert store.newest() == "checkpoint-16"
    for name in store.names():
        store.verify(name)


def test_a_torn_upload_is_sent_again(tmp_path: Path, server: Faulty) -> None:
    store = ObjectStore("s3://bucket/run", "checkpoint-")
    server.torn = "model.safetensors"
    store.put(saved(tmp_path))
    assert server.torn is None
    store.verify("checkpoint-3")


@pytest.mark.parametrize("pace", [None, 1000.0])
def test_a_part_with_a_wrong_etag_is_sent_again(tmp_path: Path, server: Faulty, monkeypatch, pace) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 * 2**20)
    store = ObjectStore("s3://bucket/run", "checkpoint-", mib_per_second=pace)
    server.forged = 1
    store.put(saved(tmp_path, 3 * 2**20))
    assert server.forged == 0
    store.verify("checkpoint-3")


def test_a_listing_that_lags_hides_no_upload_that_has_ended(tmp_path: Path, server: Faulty) -> None:
    store = ObjectStore("s3://bucket/run", "checkpoint-")
    path = saved(tmp_path)
    store.put(path)
    assert store.names() == ["checkpoint-3"]
    server.lags = True
    store.put(path.rename(tmp_path / "checkpoint-6"))
    assert store.newest() == "checkpoint-6"
    assert store.retire(1) == ["checkpoint-3"]
    store.fetch("checkpoint-6", tmp_path / "disk")
