"""The process's plain HTTP port: Prometheus metrics, and probes for who cannot ask over gRPC.

`/metrics` as Prometheus wants it; `/alive` 200 as long as the process answers; `/ready` 200 while
health says SERVING, else 503. Kubernetes' gRPC probes speak no TLS: with TLS these two serve.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A line for every scrape says nothing."""


def serve_http(
    host: str, port: int, registry: CollectorRegistry, is_ready: Callable[[], bool]
) -> WSGIServer:
    """A server on a thread of its own; `shutdown` and `server_close` end it. Raises OSError."""
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path not in ("/alive", "/ready"):
            content: Iterable[bytes] = metrics(environ, start_response)
            return content
        good = path == "/alive" or is_ready()
        status = "200 OK" if good else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain")])
        return [b"yes\n" if good else b"no\n"]

    kind = _Server6 if ":" in host else _Server
    server = make_server(host.strip("[]"), port, answer, kind, handler_class=_Quiet)
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return server
