"""A collector of OpenTelemetry traces on loopback."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from waiting import eventually

__all__ = ["Collector"]


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)


class Collector:
    """Receives OTLP over HTTP, as an OpenTelemetry collector does.

    Args:
        port: 0 chooses a free one.
    """

    def __init__(self, port: int = 0) -> None:
        self.spans: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces"
        self.raw.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {item.key: _plain(item.value) for item in group.resource.attributes}
            for span in (span for scope in group.scope_spans for span in scope.spans):
                attributes = {item.key: _plain(item.value) for item in span.attributes}
                self.spans.append(
                    {
                        "name": span.name,
                        "id": span.span_id,
                        "parent": span.parent_span_id,
                        "trace": span.trace_id,
                        "kind": span.kind,
                        "links": [(link.trace_id, link.span_id) for link in span.links],
                        "begin": span.start_time_unix_nano,
                        "end": span.end_time_unix_nano,
                        "failed": span.status.code == 2,
                        "role": resource["nekro.role"],
                        "service": resource["service.name"],
                        **attributes,
                    }
                )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    async def named(self, name: str, count: int = 1, **attributes: Any) -> list[dict[str, Any]]:
        """Spans with a name and attributes (``nekro.…``, without the prefix), once there are enough."""
        wanted = {f"nekro.{key}": value for key, value in attributes.items()}.items()

        def enough() -> list[dict[str, Any]]:
            found = [span for span in self.spans if span["name"] == name and wanted <= span_items(span)]
            return found if len(found) >= count else []

        def span_items(span: dict[str, Any]) -> set[tuple[str, Any]]:
            return {(key, value) for key, value in span.items() if not isinstance(value, list)}

        def seen() -> str:
            return f"{count} spans {name} {attributes}; there are {[span['name'] for span in self.spans]}"

        found: list[dict[str, Any]] = await eventually(enough, what=seen)
        return found

    def of_trace(self, trace: bytes) -> list[dict[str, Any]]:
        """All spans of a trace so far."""
        return [span for span in self.spans if span["trace"] == trace]

    def path(self, span: dict[str, Any]) -> list[str]:
        """Names from the root of a span's trace to the span."""
        by_id = {other["id"]: other for other in self.spans}
        parent = by_id.get(span["parent"])
        return [*(self.path(parent) if parent else []), span["name"]]
