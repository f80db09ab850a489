"""A server of S3 on the loopback, moto's, between which and its clients things go wrong on request."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import boto3
import requests
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


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
        self.dropped = 0
        """Requests whose connection ends before they are taken, after they had their effect, or within the answer."""
        self.is_gone = False
        self.listings: dict[str, Any] = {}
        self.num_listings: Counter[str] = Counter()
        self.requests: list[tuple[str, str]] = []
        self.num_sent: Counter[str] = Counter()
        """Bytes of the objects that were read, by path."""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path, query = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"]
        self.requests.append((method, path))
        self.dropped, is_dropped = max(self.dropped - 1, 0), self.dropped > 0
        if self.is_gone or is_dropped and self.dropped % 3 == 0:
            _drop(environ)
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
        if self.is_gone or is_dropped and self.dropped % 3 == 1:
            _drop(environ)
        start_response(status, headers)
        return _halved(body, environ) if is_dropped else [body]

    def make_bucket(self) -> None:
        """Forget all objects, and make a bucket."""
        url = f"http://127.0.0.1:{self.port}"
        requests.post(f"{url}/moto-api/reset", timeout=10)
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")

    def serve(self, port: int = 0) -> Callable[[], None]:
        """Begin to serve, and return the call that ends it."""
        self.is_gone = False
        running = make_server("127.0.0.1", port, self, threaded=True)
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        self.port = running.server_port

        def stop() -> None:
            self.is_gone = True  # to requests that are under way, too
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


def _halved(body: bytes, environ: dict[str, Any]) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    _drop(environ)


def _drop(environ: dict[str, Any]) -> NoReturn:
    # The error alone would leave the connection open, and the client waits a minute for an answer.
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError
