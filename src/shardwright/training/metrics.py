"""Writers of a run's records: JSON lines, TensorBoard, W&B, Prometheus, and a line of text for the screen."""

import importlib.util
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from shardwright.config import RunConfig
from shardwright.run_folder import METRICS, TENSORBOARD, Record, whole_lines
from shardwright.system.errors import NO_ROOM, InputError, ShardwrightError, without_secrets
from shardwright.system.files import parse_json, write_whole
from shardwright.system.units import MiB, format_bytes, format_count, format_seconds


class MetricsWriter(Protocol):
    """Writes the records of a run to one destination."""

    def write(self, record: Record) -> None:
        """Write one record: `step`, `kind` (run, train or evaluation) and its values; None means unknown."""

    def rewind(self, step: int) -> None:
        """Discard records after `step` steps where possible, because the run takes those steps again."""

    def close(self) -> None:
        """Flush and close. No record follows."""


class JsonLines:
    """OUT/metrics.jsonl. A resumed run drops the lines of steps that it takes again. Lines that a full disk rejects
    are written together with the next line that fits."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        self._unwritten = b""
        self._file = self._from(resumed_step)

    def _from(self, step: int) -> FileIO:
        try:
            keep = [line for line in whole_lines(self.path) if _stays(parse_json(line), step)]
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{self.path} is damaged ({error}); mend or remove it, and resume again") from None
        if step == 0:  # a run from step 0 also evaluates before its first step
            keep = []
        write_whole(self.path, "".join(line + "\n" for line in keep).encode())
        return self.path.open("ab", buffering=0)

    def rewind(self, step: int) -> None:
        self.close()
        self._file = self._from(step)

    def write(self, record: Record) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            raise ShardwrightError(
                f"{self.path} was deleted while the run goes on, perhaps with its folder; the run ends, since nobody "
                f"could read what it would write there"
            )
        self._unwritten += without_secrets(json.dumps(record)).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise

    def _write(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        with self._file:
            self._write()


class TensorBoard:
    """Events in OUT/tensorboard. After a full disk, the next record that fits starts a new file."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder, self._begin = folder, lambda: SummaryWriter(str(folder))
        self._writer: SummaryWriter | None = self._begin()

    def write(self, record: Record) -> None:
        if self._writer is None and shutil.disk_usage(self._folder).free < MiB:
            return
        with self._leaving_full_disk():
            self._writer = self._writer or self._begin()
            for key, value in _numbers(record).items():
                self._writer.add_scalar(f"{record['kind']}/{key}", value, record["step"])

    @contextmanager
    def _leaving_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # an error of the writer thread, which has then ended
            self._writer = None
            if error.errno not in NO_ROOM:
                raise

    def rewind(self, step: int) -> None:
        """Do nothing: TensorBoard shows a later value of a step instead of an earlier one."""

    def close(self) -> None:
        if self._writer is not None:
            with self._leaving_full_disk():
                self._writer.close()


class WeightsAndBiases:
    """A W&B run in the configured project."""

    def __init__(self, project: str, config: RunConfig) -> None:
        import wandb

        try:
            self._run = wandb.init(project=project, dir=config.out, config=config.model_dump())
        except Exception as error:  # wandb raises many types; all concern its setup
            raise InputError(f"metrics.wandb_project={project!r}: W&B does not start: {error}") from None

    def write(self, record: Record) -> None:
        if numbers := _numbers(record):
            self._run.log({f"{record['kind']}/{key}": value for key, value in numbers.items()}, step=record["step"])

    def rewind(self, step: int) -> None:
        """Do nothing: W&B rejects values of earlier steps, so values of repeated steps are missing there."""

    def close(self) -> None:
        self._run.finish()


LOOPBACK = "127.0.0.1"
"""Address on which numbers are served, for access from this machine only."""


class Prometheus:
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
        if record["kind"] == "run":
            return
        for key, value in record.items():
            if key == "tokens_by_expert":  # a table, and a gauge has one label
                continue
            if isinstance(value, dict | list | tuple):
                several = value if isinstance(value, dict) else dict(enumerate(value))
                gauge = self._gauge(record["kind"], key, ("of",))
                gauge.clear()  # labels of the previous record
                for name, each in several.items():
                    gauge.labels(str(name)).set(each)
            elif isinstance(value, int | float):
                self._gauge(record["kind"], key).set(value)

    def _gauge(self, kind: str, key: str, labels: tuple[str, ...] = ()) -> Any:
        from prometheus_client import Gauge

        name = f"shardwright_{kind}_{key}"
        if name not in self._gauges:
            told = f"{key} of the newest {kind} record of metrics.jsonl"
            self._gauges[name] = Gauge(name, told, labels, registry=self._registry)
        return self._gauges[name]

    def rewind(self, step: int) -> None:
        """Do nothing: the next record replaces the last one."""

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


def missing_extras(config: RunConfig) -> list[str]:
    """Return a problem for each missing package that [metrics] needs, with the command that installs it."""
    metrics = config.metrics
    wanted = {
        "tensorboard": metrics.tensorboard,
        "wandb": bool(metrics.wandb_project),
        "prometheus_client": metrics.prometheus_port is not None,
    }
    return [
        f"[metrics] asks for {name}, which is not installed: pip install {name}"
        for name, asked in wanted.items()
        if asked and importlib.util.find_spec(name) is None
    ]


def _stays(record: Record, resumed_step: int) -> bool:
    """Return whether a run that resumes after `resumed_step` steps keeps a record. It takes later steps again."""
    return bool(record["step"] < resumed_step + (record["kind"] != "run"))


def _numbers(record: Record) -> Record:
    """Return the numbers of a record by name; empty for a `run` record."""
    if record["kind"] == "run":
        return {}
    flat = {
        name: value
        for key, values in record.items()
        for name, value in (
            [(f"{key}/{k}", v) for k, v in values.items()] if isinstance(values, dict) else [(key, values)]
        )
    }
    return {k: v for k, v in flat.items() if k != "step" and isinstance(v, int | float)}


def open_writers(config: RunConfig, resumed_step: int) -> list[MetricsWriter]:
    """Return the writers to files and services that a run file requests."""
    out = Path(config.out)
    writers: list[MetricsWriter] = [JsonLines(out / METRICS, resumed_step)]
    if config.metrics.tensorboard:
        writers.append(TensorBoard(out / TENSORBOARD))
    if config.metrics.wandb_project:
        writers.append(WeightsAndBiases(config.metrics.wandb_project, config))
    if config.metrics.prometheus_port is not None:
        writers.append(Prometheus(config.metrics.prometheus_port))
    return writers


def line(record: Record, steps: int) -> str:
    """Format a record as one line of text."""
    ahead = [f"mtp {record['mtp_loss']:.4f}"] if "mtp_loss" in record else []
    if "margin" in record:
        ahead += [f"margin {record['margin']:.4f}", f"accuracy {record['accuracy']:.1%}"]
    if record["kind"] == "evaluation":
        sources = [f"{name} {loss:.4f}" for name, loss in (record.get("sources") or {}).items()]
        told = f"step {record['step']:>5}/{steps} | validation loss {record['loss']:.4f}"
        average = [f"of the average {record['average_loss']:.4f}"] if "average_loss" in record else []
        return " | ".join((told, *average, *ahead, *([", ".join(sources)] if sources else [])))
    mfu = "n/a" if record["mfu"] is None else f"{record['mfu']:.1%}"
    load = (f"load {record['load_max_over_mean']:.2f}",) if "load_max_over_mean" in record else ()
    epochs = [f"{name} {done:.3g}" for name, done in (record.get("epochs") or {}).items()]
    scale = [f"loss scale {record['loss_scale']:g}"] if "loss_scale" in record else []
    slowest = []
    if "slowest_rank" in record:
        slowest = [f"rank {record['slowest_rank']} costs {format_seconds(max(record['slowest_costs_s'], 0.0))}"]
    return " | ".join(
        (
            f"step {record['step']:>5}/{steps}",
            f"loss {record['loss']:.4f}",
            *ahead,
            *load,
            *([f"epochs {', '.join(epochs)}"] if epochs else []),
            f"grad_norm {record['grad_norm']:.3g}",
            f"lr {record['lr']:.2e}",
            *scale,
            f"{format_count(record['tokens_per_s'])} tok/s, {format_count(record['tokens_per_s_per_device'])}/device",
            f"{record['tflops_per_s_per_device']:.3g} TFLOP/s, MFU {mfu}",
            format_bytes(record["memory_bytes"]),
            f"data {format_seconds(record['data_s'])}, fwd+bwd {format_seconds(record['forward_backward_s'])}, "
            f"opt {format_seconds(record['optimizer_s'])}",
            *slowest,
        )
    )
