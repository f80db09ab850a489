"""Streams of files - JSON lines, WebDataset archives, addresses of fsspec - go on at their shard and row."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest

from tests.cells import crossed
from tests.data import test_stream_states as states

SIZES = (23, 3, 17, 31, 16)
KINDS = {
    "JSON lines": ("json", "{folder}/{number}.jsonl"),
    "a WebDataset": ("webdataset", "{folder}/{number}.tar"),
    "JSON lines in fsspec's memory": ("json", "memory://shards/{number}.jsonl"),
    "JSON lines over HTTP": ("json", "{url}/{number}.jsonl"),
    "a WebDataset over HTTP": ("webdataset", "{url}/{number}.tar"),
}
requested: list[tuple[str, str]] = []
"""Methods and paths that the server was asked for."""


class Server(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        requested.append((self.command, self.path))


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Write the shards in all places, and serve the folder on the loopback."""
    memory = fsspec.filesystem("memory")
    begin = 0
    for number, size in enumerate(SIZES):
        texts = [json.dumps({"id": index}) for index in range(begin, begin + size)]
        lines = "".join(f"{text}\n" for text in texts)
        (tmp_path / f"{number}.jsonl").write_text(lines)
        memory.pipe(f"/shards/{number}.jsonl", lines.encode())
        with tarfile.open(tmp_path / f"{number}.tar", "w") as archive:
            for index, text in enumerate(texts, begin):
                member = tarfile.TarInfo(f"{index:06}.json")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        begin += size
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield {"folder": str(tmp_path), "url": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()
        thread.join()
    memory.rm("/shards", recursive=True)


def stream_of(kind: str, places: dict[str, str]) -> Any:
    builder, pattern = KINDS[kind]
    files = [pattern.format(number=number, **places) for number in range(len(SIZES))]
    cache = f"{places['folder']}/cache"
    stream = datasets.load_dataset(builder, data_files=files, split="train", streaming=True, cache_dir=cache)
    if builder == "webdataset":
        stream = stream.map(lambda row: row["json"], remove_columns=["json", "__key__", "__url__"])
    return stream.map(states.count_row)


@pytest.mark.parametrize(("kind", "workers"), crossed(KINDS, [0, 2]))
def test_files_of_a_kind_go_on_at_their_shard_and_row(
    kind: str, workers: int, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(states.KINDS, kind, partial(stream_of, kind, places))
    whole = list(states.steps(states.loaders_of(kind, 1, workers), 1))
    assert sorted(index for step in whole for index in step) == list(range(sum(SIZES)))
    for after_steps in (7, len(whole) - 2) if workers else (1, 7, len(whole) - 2):
        head, state = states.stop(states.loaders_of(kind, 1, workers), after_steps)
        loaders = states.loaders_of(kind, 1, workers)
        requested.clear()
        states.num_read.zero_()

        assert [*head, *states.go_on(loaders, state, 1)] == whole
        assert int(states.num_read.sum()) == sum(SIZES) - sum(map(len, head))
        if "HTTP" in kind and not workers:
            read = {int(Path(path).stem) for method, path in requested if method == "GET"}
            over = sum(sum(map(len, head)) >= sum(SIZES[: number + 1]) for number in range(len(SIZES)))
            # `datasets` may go on from the table before, which ends the shard before.
            assert read in (set(range(first, len(SIZES))) for first in (over - 1, over))
