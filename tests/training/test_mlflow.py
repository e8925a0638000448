"""Proves that MLflow gets the keys and every number of a run, in one MLflow run also after a resume or a failure, with
the status of the run's end. The client is MLflow's own, and writes to its stores of files and of SQLite."""

import functools
import importlib.util
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from shardwright.runs.records import EvaluationRecord, TrainRecord, read_events
from shardwright.system.errors import InputError
from shardwright.training.run_log import RunLog
from shardwright.training.start import start
from tests.marks import prove
from tests.training.metric_records import RECORD, config
from tests.training.runs import training, write_run_file

ENVIRONMENT = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
STEP = TrainRecord(**{key: value for key, value in RECORD.items() if key != "kind"})


HAS_SQLALCHEMY = importlib.util.find_spec("sqlalchemy") is not None
SQLITE = pytest.param("sqlite", marks=pytest.mark.skipif(not HAS_SQLALCHEMY, reason="mlflow-skinny lacks sqlalchemy"))


@pytest.fixture
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of MLflow of the kind that docs/train.md names, opened as that page describes."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    if getattr(request, "param", "file") == "sqlite":
        return f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "store").as_uri()


@pytest.fixture
def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri)


def runs_of(client: Any, experiment: str = "shardwright") -> list[Any]:
    """The MLflow runs of an experiment, the newest first."""
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


@prove
@pytest.mark.parametrize("uri", ["file", SQLITE], indirect=True)
def test_mlflow_gets_each_number_and_a_resumed_run_goes_on_in_its_run(tmp_path: Path, uri: str, client: Any):
    settings = config(tmp_path / "out", mlflow_uri=uri, mlflow_experiment="mine")
    (tmp_path / "out").mkdir()
    for first_step in (0, 3, 0):
        log = RunLog(settings, 0, True, first_step)
        log.write(STEP if first_step == 0 else TrainRecord(**{**vars_of(STEP), "step": 4, "loss": float("nan")}))
        log.write(EvaluationRecord(first_step + 1, 3.5, sources={"web: a?": 3.25}))
        log.end(9)
        log.close()
    assert not (tmp_path / "out" / "events.jsonl").exists(), read_events(tmp_path / "out")
    anew, first = runs_of(client, "mine")
    assert first.info.run_name == "out"
    assert {first.info.status, anew.info.status} == {"FINISHED"}
    assert first.data.params["batch.seq_len"] == "4"
    assert first.data.params["metrics.mlflow_experiment"] == "mine"
    losses = [(each.step, each.value) for each in client.get_metric_history(first.info.run_id, "train/loss")]
    assert losses[0] == (3, 2.5)
    assert losses[1][0] == 4
    assert losses[1][1] != losses[1][1]
    for key, value in RECORD.items():
        if isinstance(value, int | float) and key != "step":
            assert client.get_metric_history(first.info.run_id, f"train/{key}")[0].value == value
    assert anew.data.metrics["evaluation/sources/web_ a_"] == 3.25
    assert [each.step for each in client.get_metric_history(anew.info.run_id, "train/loss")] == [3]


def vars_of(record: TrainRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


@prove
def test_a_failure_to_send_parameters_makes_no_second_run(
    tmp_path: Path, uri: str, client: Any, monkeypatch: pytest.MonkeyPatch
):
    send, failures, sent = type(client).log_batch, [OSError("away"), OSError("away again")], threading.Event()

    def log_batch(self: Any, *arguments: Any, **keys: Any) -> None:
        if failures:
            raise failures.pop()
        send(self, *arguments, **keys)
        if "metrics" in keys:
            sent.set()

    monkeypatch.setattr(type(client), "log_batch", log_batch)
    log = RunLog(config(tmp_path, mlflow_uri=uri), 0, True, 0)
    for _ in range(3):
        log.write(STEP)
    assert sent.wait(60)
    log.close()
    [run] = runs_of(client)
    assert run.data.params["batch.seq_len"] == "4"
    assert [each.step for each in client.get_metric_history(run.info.run_id, "train/loss")] == [3]


@prove
def test_mlflow_shows_whether_a_run_finished_failed_or_was_stopped(tokens: Path, tmp_path: Path, uri: str, client: Any):
    run_file = write_run_file(tmp_path, tokens)

    keys = (f"metrics.mlflow_uri={uri}", "checkpoint.every=0", "steps=2")
    settings = [word for key in keys for word in ("--set", key)]
    with training(run_file, *settings, environment=ENVIRONMENT) as run:
        assert run.wait(300) == 0, run.stderr
    assert runs_of(client)[0].info.status == "FINISHED"
    for n_steps, status in ((None, "FAILED"), (4, "KILLED"), (9, "FINISHED")):
        log = RunLog(config(tmp_path / status, mlflow_uri=uri), 0, True, 0)
        (tmp_path / status).mkdir(exist_ok=True)
        log.write(STEP)
        if n_steps is not None:
            log.end(n_steps)
        log.close()
        assert runs_of(client)[0].info.status == status


def killed(of_rank: int, rank: int) -> None:
    if rank == of_rank:
        os.kill(os.getpid(), signal.SIGKILL)


@prove
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_whose_rank_is_killed_at_its_start_has_failed_in_mlflow(
    tokens: Path, tmp_path: Path, uri: str, client: Any, rank: int
):
    run_file = write_run_file(tmp_path, tokens)
    with training(
        run_file, "--set", f"metrics.mlflow_uri={uri}", fault=functools.partial(killed, rank), environment=ENVIRONMENT
    ) as failed:
        assert failed.wait(300) == 3, failed.stderr
    [run] = runs_of(client)
    assert run.info.status == "FAILED"
    assert run.data.params["batch.seq_len"] == "16"


@prove
def test_a_store_that_mlflow_refuses_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(
        InputError, match=r"only with the environment variable MLFLOW_ALLOW_FILE_STORE=true; set it, or"
    ):
        start(config(tmp_path / "out", mlflow_uri="file:///data/mlruns"))
    monkeypatch.setattr(importlib.util, "find_spec", without("sqlalchemy"))
    with pytest.raises(InputError, match=r"MLflow's store in SQLite needs sqlalchemy: pip install mlflow"):
        start(config(tmp_path / "out", mlflow_uri="sqlite:////data/mlflow.db"))
    assert list(tmp_path.iterdir()) == []


def without(package: str) -> Any:
    find_spec = importlib.util.find_spec
    return lambda name, *more: None if name == package else find_spec(name, *more)


@prove
def test_an_mlflow_server_that_is_away_is_reported_once_and_the_run_ends(tmp_path: Path, client: Any):
    log = RunLog(config(tmp_path, mlflow_uri="http://me:secret@127.0.0.1:9"), 0, True, 0)
    for _ in range(3):
        log.write(STEP)
    log.close()
    [event] = read_events(tmp_path)
    assert event.text.startswith("metrics.mlflow_uri: MLflow ")
    assert "secret" not in event.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
