"""A collector of OpenTelemetry for tests: receives OTLP over HTTP, as its protocol buffers say."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """The spans and gauges that were received, in order, and the attributes of their resource."""

    def __init__(self) -> None:
        self.url = ""
        self.stop: Callable[[], None] = lambda: None
        """Closes the port."""
        self.resource: dict[str, Any] = {}
        self.spans: list[Any] = []
        self.gauges: list[tuple[str, str | None, float]] = []
        """Name, the attribute `of`, value."""

    def receive(self, path: str, body: bytes) -> None:
        """Read one request."""
        if path == "/v1/traces":
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self._keep_resource(of_resource.resource)
                self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
        elif path == "/v1/metrics":
            for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self._keep_resource(of_resource.resource)
                metrics = [metric for scope in of_resource.scope_metrics for metric in scope.metrics]
                self.gauges += [
                    (metric.name, attributes(point).get("of"), point.as_double or float(point.as_int))
                    for metric in metrics
                    for point in metric.gauge.data_points
                ]
        else:
            raise AssertionError(path)

    def _keep_resource(self, resource: Any) -> None:
        self.resource |= attributes(resource)


def attributes(part: Any) -> dict[str, Any]:
    """The attributes of a resource, a span or a point."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in part.attributes}


@contextmanager
def collector(status: int = 200) -> Iterator[Collector]:
    """A collector on a port of its own, which answers every request with a status."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if status == 200:
                kept.receive(self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()

        def stop() -> None:
            server.shutdown()
            thread.join()
            server.server_close()

        kept.stop = stop
        try:
            yield kept
        finally:
            stop()
