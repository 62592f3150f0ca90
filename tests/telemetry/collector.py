"""An OTLP/HTTP collector in this process: keeps the spans that it is sent."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Seen(msgspec.Struct, frozen=True):
    trace: str
    span: str
    parent: str
    name: str
    worker: str
    begin_s: float
    end_s: float
    facts: dict[str, object]
    is_error: bool


class Collector:
    def __init__(self) -> None:
        self.spans: list[Seen] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _spans(request: ExportTraceServiceRequest) -> list[Seen]:
    return [
        Seen(
            trace=span.trace_id.hex(),
            span=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            name=span.name,
            worker=_facts(resource.resource.attributes)["service.instance.id"],
            begin_s=span.start_time_unix_nano / 1e9,
            end_s=span.end_time_unix_nano / 1e9,
            facts=_facts(span.attributes),
            is_error=span.status.code == 2,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _facts(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}
