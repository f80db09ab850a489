"""Checkpoints in a store that speaks S3: moto's server on the loopback, a real client, and faults between them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto")

import boto3
import requests
from moto.server import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

from accel_trainer.checkpoint import object_store
from accel_trainer.checkpoint.object_store import OWNER_NAME, ObjectStore
from accel_trainer.errors import CheckpointLockedError, CorruptCheckpointError
from tests.checkpoint.test_object_store import trained


class Faulty:
    """A server whose answers are worse on request: 503s, connections that close, a body that is cut."""

    def __init__(self) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.unavailable, self.lost = 0, 0
        self.requests: list[tuple[str, str]] = []
        self.cut: str | None = None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        if self.unavailable and environ["REQUEST_METHOD"] in ("PUT", "GET"):
            self.unavailable -= 1
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
        body = b"".join(self.app(environ, start_response))
        if self.cut is not None and environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].endswith(self.cut):
            self.cut = None
            return [bytes(len(body))]
        return [body]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    faulty = Faulty()
    running = make_server("127.0.0.1", 0, faulty, threaded=True)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{running.server_port}"
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url, "FSSPEC_S3_ENDPOINT_URL": url, "NO_PROXY": "127.0.0.1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    requests.post(f"{url}/moto-api/reset", timeout=10)
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
    monkeypatch.setattr(object_store, "GIVE_UP_SECONDS", 20.0)
    S3FileSystem.clear_instance_cache()
    yield faulty
    S3FileSystem.clear_instance_cache()
    running.shutdown()
    thread.join()
    running.server_close()


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
    client.put_object(**place, Body=bytes(body))
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors is not as it was saved"):
        store.fetch("checkpoint-3", tmp_path / "other")


def test_of_two_runs_that_begin_at_once_the_store_takes_one(tmp_path: Path, server: Faulty) -> None:
    first, second = (ObjectStore("s3://bucket/run", "checkpoint-", job=job) for job in ("first", "second"))
    first.claim()
    assert first._files.exists(f"bucket/run/{OWNER_NAME}")
    with pytest.raises(CheckpointLockedError, match="is the store of another run"):
        second.claim()
