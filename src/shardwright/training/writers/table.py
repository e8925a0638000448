"""The table of optional writers, read to check a run file and to open the writers of a run."""

from contextlib import suppress
from pathlib import Path

from shardwright.config import RunConfig
from shardwright.runs.folder import METRICS
from shardwright.training.writers.files import TENSORBOARD_WRITER, JsonLines
from shardwright.training.writers.mlflow import MLFLOW_WRITER
from shardwright.training.writers.opentelemetry import OPENTELEMETRY_WRITER
from shardwright.training.writers.services import PROMETHEUS_WRITER, WANDB_WRITER
from shardwright.training.writers.writer import MetricsWriter, OptionalWriter

WRITERS = (TENSORBOARD_WRITER, WANDB_WRITER, PROMETHEUS_WRITER, MLFLOW_WRITER, OPENTELEMETRY_WRITER)


def missing_extras(config: RunConfig) -> list[str]:
    """Return a problem for each missing package that [metrics] needs, with the command that installs it."""
    missing = (kind.missing() for kind in WRITERS if kind.requested(config))
    return [problem for problem in missing if problem is not None]


def writer_problems(config: RunConfig) -> list[str]:
    """Return the problems of the writers that a run file requests which are found on the machine of rank 0 before the
    run starts."""
    return [problem for kind in WRITERS if kind.requested(config) for problem in kind.problems(config)]


def record_failure(config: RunConfig) -> None:
    """Report to every destination that a run has failed. Rank 0 may have been killed before it could; a destination
    that does not answer is left out."""
    for kind in WRITERS:
        if kind.requested(config):
            with suppress(Exception):  # libraries raise many types, and the run's own error is to be reported
                kind.record_failure(config)


def open_tracers(config: RunConfig, first_step: int) -> list[OptionalWriter]:
    """Return the writers of spans on a rank other than 0, for the steps after `first_step`."""
    if config.metrics.otlp_ranks == "first":
        return []
    return [OptionalWriter(kind, config, first_step) for kind in WRITERS if kind.traces and kind.requested(config)]


def open_writers(config: RunConfig, first_step: int) -> list[MetricsWriter]:
    """Return the writers to files and services that a run file requests, for the records after `first_step` steps."""
    requested = [kind for kind in WRITERS if kind.requested(config)]
    return [
        JsonLines(Path(config.out) / METRICS, first_step),
        *(OptionalWriter(kind, config, first_step) for kind in requested),
    ]
