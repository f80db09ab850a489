"""A 1.1 GiB checkpoint to an object store and back, on two ranks, beside s3fs alone: moto's server on the loopback.

Run by run.py through the launcher. moto is no fast server: for each range it reads the whole object from its buffer,
for both sides alike; what it takes itself is most of every time.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import Row, interleave, ratio_row
from two_ranks import print_measured

from accel_trainer import Accelerator
from accel_trainer.checkpoint.checkpointer import Checkpointer
from accel_trainer.checkpoint.object_store import ObjectStore
from accel_trainer.checkpoint.publication import Publication
from accel_trainer.checkpoint.reader import CheckpointKind

_SERVER = """
import os, sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
class Quiet(WSGIRequestHandler):
    def log(self, *args): pass
app, sent = DomainDispatcherApplication(create_backend_app), [0]
def counting(environ, start_response):
    if environ["PATH_INFO"] == "/sent":
        start_response("200 OK", [])
        return [str(sent[0]).encode()]
    body = b"".join(app(environ, start_response))
    sent[0] += len(body) * (environ["REQUEST_METHOD"] == "GET" and "run/checkpoint-" in environ["PATH_INFO"])
    return [body]
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # with who began it
server = make_server("127.0.0.1", 0, counting, threaded=True, request_handler=Quiet)
print(server.server_port, flush=True)
server.serve_forever()
"""
_SIZES_MIB = (419, 362, 362)
"""Of model.safetensors and two shards of an optimizer's state."""


def _begin_server() -> tuple[subprocess.Popen[str], int]:
    environ = os.environ | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**30)}
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    assert server.stdout is not None
    return server, int(server.stdout.readline())


def _save(directory: Path, accelerator: Accelerator) -> Path:
    publication = Publication(directory / "checkpoint-1", accelerator.process)
    with publication as staged:
        if accelerator.is_main_process:
            for index, size in enumerate(_SIZES_MIB):
                staged.write_tensors(f"{index}.safetensors", {"values": torch.randn(size * 2**18)})
    return publication.commit()


def _on_main(accelerator: Accelerator, call: Callable[[], Any]) -> None:
    if accelerator.is_main_process:
        call()
    dist.barrier()


def _bytes_sent(url: str) -> int:
    import requests

    return int(requests.get(f"{url}/sent", timeout=60).text)


def rows(rounds: int) -> list[Row]:
    """Compare uploads, and fetches to the disk; count what the server has sent. Collective."""
    import boto3
    from s3fs import S3FileSystem

    accelerator = Accelerator(cpu=True)
    server, port = _begin_server() if accelerator.is_main_process else (None, 0)
    box: list[Any] = [port, tempfile.mkdtemp(prefix="bench-", dir=Path.cwd()) if accelerator.is_main_process else ""]
    dist.broadcast_object_list(box, src=0)
    url, directory = f"http://127.0.0.1:{box[0]}", Path(box[1])
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url, "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    bare = S3FileSystem()
    try:
        checkpoint = _save(directory, accelerator)
        _on_main(accelerator, lambda: boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket"))
        store = ObjectStore("s3://bucket/run", "checkpoint-")
        num_bytes = sum(path.stat().st_size for path in checkpoint.iterdir())

        def fetch() -> None:
            checkpointer = Checkpointer(accelerator.process, CheckpointKind(prefix="checkpoint-"))
            checkpointer.fetch("s3://bucket/run/checkpoint-1", directory / "ours")
            checkpointer.close()

        def clean() -> None:
            gc.collect()
            _on_main(
                accelerator, lambda: [shutil.rmtree(directory / each, ignore_errors=True) for each in ("ours", "bare")]
            )

        upload = interleave(
            {
                "ours": lambda: _on_main(accelerator, lambda: store.put(checkpoint)),
                "bare": lambda: _on_main(
                    accelerator, lambda: bare.put(str(checkpoint), "bucket/bare/checkpoint-1", recursive=True)
                ),
            },
            rounds,
        )
        _on_main(accelerator, lambda: bare.rm("bucket/bare", recursive=True))
        before = _bytes_sent(url)
        fetch()
        dist.barrier()
        sent = float(_bytes_sent(url) - before)
        clean()
        loading = interleave(
            {
                "ours": fetch,
                "bare": lambda: _on_main(
                    accelerator,
                    lambda: bare.get("bucket/run/checkpoint-1", str(directory / "bare"), recursive=True),
                ),
            },
            rounds,
            between=clean,
        )
    finally:
        dist.barrier()
        if server is not None:
            server.terminate()
            server.wait()
            shutil.rmtree(directory, ignore_errors=True)
    return [
        ratio_row("upload of 1.1 GiB to a store", "s3fs.put", upload["ours"], upload["bare"], 1 / 0.85),
        ratio_row("fetch of 1.1 GiB by 2 ranks", "s3fs.get", loading["ours"], loading["bare"], 1.3),
        ratio_row("bytes that the 2 ranks read", "those of the checkpoint", [sent], [float(num_bytes)], 1.05),
    ]


if __name__ == "__main__":
    print_measured(rows)
    dist.destroy_process_group()
