"""Checkpoints in a store that speaks S3: moto's server on the loopback, a real client, and faults between them."""

from __future__ import annotations

import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto")

import boto3
import fsspec
import requests
import torch
from moto.server import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.checkpoint import manifest, object_store
from accel_trainer.checkpoint.object_store import OWNER_NAME, ObjectStore
from accel_trainer.errors import CheckpointLockedError, CheckpointNotFoundError, CorruptCheckpointError
from tests.checkpoint.test_object_store import trained
from tests.publishing import ALONE, publish_directory
from tests.trainer_jobs import on_ranks


class Faulty:
    """A server between which and its clients things go wrong on request."""

    def __init__(self) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.unavailable = 0
        """Requests that are answered by a 503."""
        self.silent, self.go_on = 0, threading.Event()
        """Requests that are taken and not answered, until `go_on`."""
        self.cut: str | None = None
        """End of a path: its next GET has a body of zeros."""
        self.torn: str | None = None
        """End of a path: of its next PUT only half arrives."""
        self.lags = False
        """Listings are those of the beginning."""
        self.forged = 0
        """Parts whose ETag is another one."""
        self.listings: dict[str, Any] = {}
        self.num_listings: Counter[str] = Counter()
        self.requests: list[tuple[str, str]] = []
        self.num_sent: Counter[str] = Counter()
        """Bytes of the objects that were read, by path."""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path, query = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"]
        self.requests.append((method, path))
        if self.silent:
            self.silent -= 1
            self.go_on.wait(60)
        if self.unavailable and method in ("PUT", "GET"):
            self.unavailable -= 1
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
        if self.torn is not None and method == "PUT" and path.endswith(self.torn):
            self.torn = None
            half = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))[: int(environ["CONTENT_LENGTH"]) // 2]
            environ = {
                **{name: value for name, value in environ.items() if "CHECKSUM" not in name and "MD5" not in name},
                "wsgi.input": io.BytesIO(half),
                "CONTENT_LENGTH": str(len(half)),
            }
        answer: list[Any] = []
        body = b"".join(self.app(environ, lambda *args: answer.extend(args)))
        status, headers, *_ = answer
        if "list-type" in query:
            self.num_listings[query] += 1
            self.listings.setdefault(query, (status, headers, body))
            status, headers, body = self.listings[query] if self.lags else (status, headers, body)
        elif method == "GET":
            self.num_sent[path] += len(body)
        if self.cut is not None and method == "GET" and path.endswith(self.cut):
            self.cut, body = None, bytes(len(body))
        if self.forged and "partNumber" in query:
            self.forged -= 1
            headers = [(name, '"0"' if name.lower() == "etag" else value) for name, value in headers]
        start_response(status, headers)
        return [body]

    def serve(self, port: int = 0) -> Callable[[], None]:
        """Begin to serve, and return the call that ends it."""
        running = make_server("127.0.0.1", port, self, threaded=True)
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        self.port = running.server_port

        def stop() -> None:
            running.shutdown()
            thread.join()
            running.server_close()

        self.stop = stop
        return stop


def variables(server: Faulty) -> dict[str, str]:
    url = f"http://127.0.0.1:{server.port}"
    return {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url, "FSSPEC_S3_ENDPOINT_URL": url, "NO_PROXY": "127.0.0.1",
    }  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    faulty = Faulty()
    faulty.serve()
    url = f"http://127.0.0.1:{faulty.port}"
    for name, value in variables(faulty).items():
        monkeypatch.setenv(name, value)
    requests.post(f"{url}/moto-api/reset", timeout=10)
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
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


def saved(directory: Path, num_values: int = 1000) -> Path:
    path = directory / "checkpoint-3"
    with publish_directory(path, ALONE) as staged:
        staged.write_tensors("model.safetensors", {"weight": torch.arange(num_values, dtype=torch.float32)})
        staged.write_json("trainer_state.json", {})
    return path


def test_two_ranks_read_each_byte_once(tmp_path: Path, server: Faulty) -> None:
    uri, options = "s3://bucket/run", {"lr_scheduler_type": "constant", "env": variables(server)}
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
