"""Proves that MLflow gets the keys and every number of a run, in one MLflow run also after a resume. The client is
MLflow's own, and writes to its store of files."""

from pathlib import Path
from typing import Any

import pytest

from shardwright.runs.records import EvaluationRecord, TrainRecord, read_events
from shardwright.training.run_log import RunLog
from tests.marks import prove
from tests.training.metric_records import RECORD, config

STEP = TrainRecord(**{key: value for key, value in RECORD.items() if key != "kind"})


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    return MlflowClient((tmp_path / "store").as_uri())


@prove
def test_mlflow_gets_each_number_and_a_resumed_run_goes_on_in_its_run(tmp_path: Path, client: Any):
    settings = config(tmp_path / "out", mlflow_uri=(tmp_path / "store").as_uri(), mlflow_experiment="mine")
    (tmp_path / "out").mkdir()
    for first_step in (0, 3, 0):
        log = RunLog(settings, 0, True, first_step)
        log.write(STEP if first_step == 0 else TrainRecord(**{**vars_of(STEP), "step": 4, "loss": float("nan")}))
        log.write(EvaluationRecord(first_step + 1, 3.5, sources={"web: a?": 3.25}))
        log.close()
    assert not (tmp_path / "out" / "events.jsonl").exists(), read_events(tmp_path / "out")
    anew, first = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
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
def test_an_mlflow_server_that_is_away_is_reported_once_and_the_run_ends(tmp_path: Path, client: Any):
    log = RunLog(config(tmp_path, mlflow_uri="http://me:secret@127.0.0.1:9"), 0, True, 0)
    for _ in range(3):
        log.write(STEP)
    log.close()
    [event] = read_events(tmp_path)
    assert event.text.startswith("metrics.mlflow_uri: MLflow ")
    assert "secret" not in event.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
