"""Writer of records to an MLflow tracking server."""

import hashlib
import importlib.util
import os
import re
import time
from pathlib import Path
from typing import Any

from shardwright.config import RunConfig
from shardwright.runs.records import Record
from shardwright.system.errors import without_secrets
from shardwright.system.files import real_path
from shardwright.system.owner import problem_of_owner
from shardwright.training.writers.writer import MetricsWriter, WriterKind, numbers_of

FOLDER_TAG = "shardwright.folder"
"""Tag of an MLflow run with a digest of the path of its folder, by which a resumed run finds it."""
MOST_PARAMS = 100
"""Maximum number of parameters in one request (MLflow REST API, `runs/log-batch`)."""
LONGEST_VALUE = 500
"""Maximum number of characters of a parameter's value that every version of MLflow accepts."""
_NOT_IN_NAMES = re.compile(r"[^\w\-./ ]")
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Settings of MLflow's client. Its own, 120 s and 7 tries, would delay the end of a run whose server is away, and what
it prints would be mixed with the document of `train --json`."""


class MLflow(MetricsWriter):
    """A run of an MLflow experiment: the keys of the run file as parameters, the numbers of each record as metrics.

    A resumed run continues the MLflow run of its folder. MLflow keeps every value of a step, so steps that are repeated
    after a rollback have several. The status of the MLflow run is FINISHED after the last step, KILLED if the run was
    asked to stop before it, and FAILED after an error.
    """

    def __init__(self, uri: str, config: RunConfig, first_step: int, failed: bool = False) -> None:
        """`failed`: the run has ended, and its MLflow run is taken only if its status is RUNNING or FAILED."""
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        self._steps, self._status = config.steps, "FAILED"
        self._params: list[Any] = []
        """Parameters that MLflow has not taken yet."""
        self._client = MlflowClient(uri)
        name, folder = config.metrics.mlflow_experiment, real_path(config.out)
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        earlier = self._client.search_runs([number], f"tags.`{FOLDER_TAG}` = '{digest}'", max_results=1)
        if first_step and earlier and (not failed or earlier[0].info.status in ("RUNNING", "FAILED")):
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(number, run_name=folder.name, tags={FOLDER_TAG: digest}).info.run_id
        # Sent by `write`: a constructor that fails after `create_run` would be called again and create another run.
        values = _flat(config.model_dump())
        self._params = [Param(key, without_secrets(str(value))[:LONGEST_VALUE]) for key, value in values]

    def write(self, record: Record) -> None:
        self._send_params()
        now_ms = int(time.time() * 1000)
        values = {f"{record['kind']}/{key}": float(value) for key, value in numbers_of(record).items()}
        metrics = [
            self._metric(_NOT_IN_NAMES.sub("_", key), value, now_ms, record["step"]) for key, value in values.items()
        ]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)

    def end(self, step: int) -> None:
        self._status = "FINISHED" if step >= self._steps else "KILLED"

    def close(self) -> None:
        self._send_params()
        self._client.set_terminated(self._run, self._status)

    def _send_params(self) -> None:
        while self._params:
            self._client.log_batch(self._run, params=self._params[:MOST_PARAMS])
            del self._params[:MOST_PARAMS]


def record_failure(config: RunConfig) -> None:
    """Set the MLflow run of the folder to FAILED if its status is RUNNING or FAILED, otherwise make one.

    If another process owns the folder, the MLflow run is left as it is."""
    if problem_of_owner(Path(config.out)) is None:
        MLflow(str(config.metrics.mlflow_uri), config, first_step=1, failed=True).close()


def store_problems(config: RunConfig) -> list[str]:
    """Return the reason why the installed MLflow cannot open `metrics.mlflow_uri`, if it is a store without a
    server."""
    uri = str(config.metrics.mlflow_uri)
    kind = uri.partition(":")[0]
    if kind == "sqlite" and importlib.util.find_spec("sqlalchemy") is None:
        return [f"metrics.mlflow_uri={uri!r}: MLflow's store in SQLite needs sqlalchemy: pip install mlflow"]
    if kind == "file" and _refuses_folders():
        return [
            f"metrics.mlflow_uri={uri!r}: this version of MLflow opens a folder only with the environment variable "
            f"MLFLOW_ALLOW_FILE_STORE=true; set it, or use sqlite:///FILE (pip install mlflow)"
        ]
    return []


def _refuses_folders() -> bool:
    if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1"):
        return False  # without the import of MLflow, which takes seconds
    try:
        from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE
    except ImportError:  # earlier versions open folders
        return False
    return not MLFLOW_ALLOW_FILE_STORE.get()


def _flat(table: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Return the keys of nested tables that have a value, joined by dots, with their values."""
    return [
        pair
        for key, value in table.items()
        if value is not None
        for pair in (_flat(value, f"{above}{key}.") if isinstance(value, dict) else [(f"{above}{key}", value)])
    ]


MLFLOW_WRITER = WriterKind(
    "MLflow",
    key="mlflow_uri",
    package="mlflow",
    install="mlflow-skinny",
    make=lambda config, first_step: MLflow(str(config.metrics.mlflow_uri), config, first_step),
    problems=store_problems,
    remote=True,
    record_failure=record_failure,
)
