"""Writer of records and of the phases of steps to an OpenTelemetry collector, by OTLP over HTTP.

Metrics are gauges named `shardwright.KIND.KEY` after a record of metrics.jsonl. Each step is a trace: the span `step`,
and below it a span for each phase. An evaluation or a checkpoint is a trace of one span.
"""

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from shardwright.config import RunConfig
from shardwright.runs.folder import PHASES
from shardwright.runs.records import Record
from shardwright.system.errors import ShardwrightError
from shardwright.system.version import PACKAGE_VERSION
from shardwright.training.writers.writer import MetricsWriter, StepSpan, WriterKind, values_of

TIMEOUT_S = 5.0
"""Time limit of a request with its repetitions."""
SPANS_SENT = 512
"""Maximum number of spans in one request, as in OpenTelemetry's own batches."""
_EXPORTERS = "opentelemetry.exporter.otlp"


class OpenTelemetry(MetricsWriter):
    """Sends each record as gauges, and each phase of a step as a span. A request that the collector does not accept
    raises ShardwrightError with the reason."""

    def __init__(self, endpoint: str, config: RunConfig) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        resource = Resource.create(
            {
                "service.name": "shardwright",
                "service.version": PACKAGE_VERSION,
                "service.instance.id": config.out,
                "shardwright.ranks": config.layout.layout().world_size,
            }
        )
        base = endpoint.rstrip("/")
        self._metric_exporter = OTLPMetricExporter(endpoint=f"{base}/v1/metrics", timeout=TIMEOUT_S)
        self._span_exporter = OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=TIMEOUT_S)
        self._reader, self._ended = InMemoryMetricReader(), InMemorySpanExporter()
        self._meters = MeterProvider([self._reader], resource, shutdown_on_exit=False)
        self._meter = self._meters.get_meter("shardwright", PACKAGE_VERSION)
        self._gauges: dict[str, Any] = {}
        tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self._ended))
        self._tracer = tracers.get_tracer("shardwright", PACKAGE_VERSION)
        self._within: Any = trace.set_span_in_context
        self._reasons = _FirstMessage()
        logger = logging.getLogger(_EXPORTERS)
        logger.addHandler(self._reasons)
        logger.propagate = False  # a failure is reported once, by the run

    def write(self, record: Record) -> None:
        for key, several in values_of(record):
            gauge = self._gauge(f"shardwright.{record['kind']}.{key}")
            for name, value in several.items():
                gauge.set(value, {} if name is None else {"of": name})
        if (data := self._reader.get_metrics_data()) is not None:
            self._send(self._metric_exporter, data)

    def trace(self, spans: Sequence[StepSpan]) -> None:
        for _, of_step in groupby(spans, lambda span: span.step):
            phases = list(of_step)
            inside = [span for span in phases if span.phase in PHASES]
            if inside:
                root = self._begin("step", inside[0])
                for span in inside:
                    self._record(span, self._within(root))
                root.end(_ns(inside[-1].end_s))
            for span in phases:
                if span.phase not in PHASES:
                    self._record(span, None)
        ended = self._ended.get_finished_spans()
        self._ended.clear()
        for first in range(0, len(ended), SPANS_SENT):
            self._send(self._span_exporter, ended[first : first + SPANS_SENT])

    def close(self) -> None:
        for exporter in (self._metric_exporter, self._span_exporter):
            exporter.shutdown()
        self._meters.shutdown()

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(name)
        return self._gauges[name]

    def _begin(self, name: str, span: StepSpan, context: Any = None) -> Any:
        attributes = {"step": span.step, "rank": span.rank}
        return self._tracer.start_span(name, context, attributes=attributes, start_time=_ns(span.start_s))

    def _record(self, span: StepSpan, context: Any) -> None:
        self._begin(span.phase, span, context).end(_ns(span.end_s))

    def _send(self, exporter: Any, content: Any) -> None:
        self._reasons.text = ""
        if exporter.export(content).name != "SUCCESS":
            raise ShardwrightError(self._reasons.text or "no reason given")


class _FirstMessage(logging.Handler):
    """Keeps the first message of a request's exporter, which returns only whether it failed."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


OPENTELEMETRY_WRITER = WriterKind(
    "OpenTelemetry",
    key="otlp_endpoint",
    package="opentelemetry.exporter.otlp.proto.http",
    install="opentelemetry-exporter-otlp-proto-http",
    make=lambda config, first_step: OpenTelemetry(str(config.metrics.otlp_endpoint), config),
    remote=True,
    traces=True,
)
