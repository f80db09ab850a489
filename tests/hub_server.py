"""A small hub on loopback: the endpoints that huggingface_hub calls to create a repository and commit to it."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Commit:
    """One commit as it came: its message, the contents of its files, its branch, and the token that was sent."""

    summary: str
    files: dict[str, bytes]
    revision: str
    token: str


@dataclass
class Hub:
    """What the server has been told."""

    endpoint: str = ""
    repositories: list[str] = field(default_factory=list)
    private: list[bool] = field(default_factory=list)
    """Of the repositories."""
    commits: list[Commit] = field(default_factory=list)
    refuses: bool = False
    """Whether it answers commits with 403."""
    unknown: list[str] = field(default_factory=list)

    def environment(self, home: str) -> dict[str, str]:
        """Return the variables with which a process talks to this hub; huggingface_hub reads them at import."""
        return {
            "HF_ENDPOINT": self.endpoint, "HF_TOKEN": "hf_test", "HF_HOME": home, "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        self._body()
        path = self.path.split("?")[0]
        if path == "/api/whoami-v2":
            return self._answer({"name": "user", "type": "user", "orgs": [], "auth": {"type": "access_token"}})
        name = path.removeprefix("/api/models/")
        if name != path and "/".join(name.split("/")[:2]) in self.hub.repositories:
            return self._answer({"id": name, "sha": "0" * 40, "siblings": [], "private": False, "tags": []})
        self.hub.unknown.append(f"GET {path}")
        return self._answer({"error": "not found"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, body = self.path.split("?")[0], self._body()
        if path == "/api/repos/create":
            name = f"user/{json.loads(body)['name']}"
            self.hub.repositories.append(name)
            asked = json.loads(body)
            self.hub.private.append(asked.get("visibility") == "private" or bool(asked.get("private")))
            return self._answer({"url": f"{self.hub.endpoint}/{name}", "id": name, "name": name})
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return self._answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        if "/commit/" in path and self.hub.refuses:
            return self._answer({"error": "the quota is used up"}, 403)
        if "/commit/" in path:
            name, _, revision = path.removeprefix("/api/models/").partition("/commit/")
            return self._commit(name, revision, [json.loads(line) for line in body.decode().splitlines() if line])
        self.hub.unknown.append(f"POST {path}")
        return self._answer({"error": "not found"}, 404)

    def _commit(self, name: str, revision: str, lines: list[dict[str, Any]]) -> None:
        summary = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.commits.append(Commit(summary, files, revision, token))
        oid = f"{len(self.hub.commits):040x}"
        self._answer({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.endpoint}/{name}/commit/{oid}"})


@contextlib.contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve a hub while the block runs."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
