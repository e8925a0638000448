"""Writers of records to Weights & Biases and Prometheus."""

import json
import socket
from typing import Any

from shardwright.config import RunConfig
from shardwright.runs.records import Record
from shardwright.system.errors import InputError, without_secrets
from shardwright.training.writers.writer import MetricsWriter, WriterKind, numbers_of, values_of


class WeightsAndBiases(MetricsWriter):
    """A W&B run in the configured project, which W&B lists as failed after an error. W&B rejects values of earlier
    steps, so values of steps that are repeated after a rollback are missing there."""

    def __init__(self, project: str, config: RunConfig) -> None:
        import wandb

        shown = json.loads(without_secrets(json.dumps(config.model_dump())))
        self._run = wandb.init(project=project, dir=config.out, config=shown)
        self._exit_code = 1

    def write(self, record: Record) -> None:
        if numbers := numbers_of(record):
            self._run.log({f"{record['kind']}/{key}": value for key, value in numbers.items()}, step=record["step"])

    def end(self, step: int) -> None:
        self._exit_code = 0

    def close(self) -> None:
        self._run.finish(exit_code=self._exit_code)


WANDB_WRITER = WriterKind(
    "W&B",
    key="wandb_project",
    package="wandb",
    make=lambda config, first_step: WeightsAndBiases(str(config.metrics.wandb_project), config),
)


LOOPBACK = "127.0.0.1"
"""Address on which numbers are served, for access from this machine only."""


class Prometheus(MetricsWriter):
    """Serves the numbers of the newest record of each kind at http://127.0.0.1:PORT/metrics.

    A gauge is named shardwright_KIND_KEY after a record of metrics.jsonl. If a key has several numbers, each has the
    label `of`: the name of a data source, or the number of a rank or layer.
    """

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = start_http_server(port, LOOPBACK, self._registry)
        except OSError as error:
            raise InputError(_port_problem(port, error)) from None

    def write(self, record: Record) -> None:
        for key, several in values_of(record):
            if list(several) == [None]:
                self._gauge(record["kind"], key).set(several[None])
                continue
            gauge = self._gauge(record["kind"], key, ("of",))
            gauge.clear()  # labels of the previous record
            for name, value in several.items():
                gauge.labels(name).set(value)

    def _gauge(self, kind: str, key: str, labels: tuple[str, ...] = ()) -> Any:
        from prometheus_client import Gauge

        name = f"shardwright_{kind}_{key}"
        if name not in self._gauges:
            description = f"{key} of the newest {kind} record of metrics.jsonl"
            self._gauges[name] = Gauge(name, description, labels, registry=self._registry)
        return self._gauges[name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def port_problems(config: RunConfig) -> list[str]:
    """Return the reason why this machine cannot listen on `metrics.prometheus_port`, if it is set."""
    port = config.metrics.prometheus_port
    if port is None:
        return []
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            return [_port_problem(port, error)]
    return []


def _port_problem(port: int, error: OSError) -> str:
    return (
        f"metrics.prometheus_port={port}: cannot listen on {LOOPBACK}:{port} ({error.strerror}); a port that no other "
        f"program listens on is needed, above 1023 without rights of root; set another one, or leave the key out"
    )


PROMETHEUS_WRITER = WriterKind(
    "Prometheus",
    key="prometheus_port",
    package="prometheus_client",
    make=lambda config, first_step: Prometheus(config.metrics.prometheus_port or 0),
    problems=port_problems,
)
