"""Proves that TensorBoard, Weights & Biases and Prometheus get every number, and what is said where they cannot."""

import dataclasses
import errno
import json
import re
import socket
import sys
import types
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwright.runs.records import CheckpointRecord, EvaluationRecord, Record, TrainRecord, read_events
from shardwright.system.errors import ConfigError, InputError
from shardwright.training.run_log import RunLog
from shardwright.training.start import start
from shardwright.training.writers import table
from shardwright.training.writers.table import WRITERS, missing_extras, open_writers
from shardwright.training.writers.writer import MetricsWriter, StepSpan, WriterKind
from tests.marks import prove
from tests.training.metric_records import RECORD, config
from tests.training.runs import records, training, trajectory, write_run_file


def test_tensorboard_gets_every_number(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writers = open_writers(config(tmp_path, tensorboard=True), 0)
    for writer in writers:
        writer.write({"kind": "run", "step": 2, "world_size": 2})
        writer.write(RECORD)
        writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("train/loss")[0].value == 2.5
    assert "train/mfu" not in events.Tags()["scalars"]


@pytest.mark.parametrize(("ends", "exit_code"), [(True, 0), (False, 1)])
def test_wandb_gets_every_number_and_whether_the_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool, exit_code: int
):
    told: list[tuple[object, object]] = []
    run = types.SimpleNamespace(
        log=lambda values, step: told.append((values, step)), finish=lambda exit_code: told.append(("end", exit_code))
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: run if settings["project"] == "mine" else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for writer in open_writers(config(tmp_path, wandb_project="mine"), 0):
        writer.write({"kind": "run", "step": 2, "world_size": 2})
        writer.write(RECORD)
        if ends:
            writer.end(3)
        writer.close()
    values, step = told[0]
    assert step == 3
    assert values["train/loss"] == 2.5  # type: ignore[index]
    assert told[-1] == ("end", exit_code)


@pytest.mark.parametrize(
    ("module", "metrics"),
    [
        ("tensorboard", {"tensorboard": True}),
        ("wandb", {"wandb_project": "x"}),
        ("prometheus_client", {"prometheus_port": 61234}),
        ("mlflow", {"mlflow_uri": "http://127.0.0.1:9"}),
        ("opentelemetry.exporter.otlp.proto.http", {"otlp_endpoint": "http://127.0.0.1:9"}),
    ],
)
def test_an_extra_that_is_not_installed_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, metrics: dict[str, object]
):
    monkeypatch.setitem(sys.modules, module, None)
    assert missing_extras(config(tmp_path)) == []
    [kind] = [kind for kind in WRITERS if kind.package == module]
    assert missing_extras(config(tmp_path, **metrics))[0].endswith(f"pip install {kind.install or module}")
    with pytest.raises(InputError, match=f"{kind.name}, which is not installed"):
        start(config(tmp_path, **metrics))
    assert list(tmp_path.iterdir()) == [], "nothing is written for a run that is refused"


def test_extras_are_not_imported_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("torch.utils.tensorboard.writer", *(kind.package for kind in WRITERS)):
        monkeypatch.setitem(sys.modules, module, None)
    for writer in open_writers(config(tmp_path), 0):
        writer.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def scraped(port: int) -> dict[str, float]:
    """What Prometheus would read: name and labels -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(shardwright_\S+) (\S+)$", text, re.MULTILINE)}


def test_prometheus_gets_every_number_of_the_newest_record(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    writers = open_writers(config(tmp_path, prometheus_port=port), 0)
    newest = {**RECORD, "step": 4, "epochs": {"web": 0.5}, "own_s_by_rank": (0.25, 0.5), "loss": float("nan")}
    evaluated = {"kind": "evaluation", "step": 4, "loss": 3.5, "time": "now"}
    for writer in writers:
        for record in ({"kind": "run", "step": 0, "layout": "x"}, {**RECORD, "own_s_by_rank": (1, 2, 3)}):
            writer.write(record)
        writer.write(newest)
        writer.write(evaluated)
    found = scraped(port)
    expected = {f"shardwright_train_{key}": value for key, value in newest.items() if isinstance(value, int | float)}
    expected |= {f"shardwright_evaluation_{key}": evaluated[key] for key in ("step", "loss")}
    expected |= {
        'shardwright_train_epochs{of="web"}': 0.5,
        'shardwright_train_own_s_by_rank{of="0"}': 0.25,
        'shardwright_train_own_s_by_rank{of="1"}': 0.5,
    }
    assert found == pytest.approx(expected, nan_ok=True)
    for writer in writers:
        writer.close()
    with pytest.raises(OSError):
        scraped(port)


def test_a_port_that_is_taken_is_told_before_the_run_starts(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError, match=f"metrics.prometheus_port={port}: cannot listen on 127.0.0.1:{port} .*set"
        ):
            start(config(tmp_path, prometheus_port=port))
        assert list(tmp_path.iterdir()) == []
        problem = open_writers(config(tmp_path, prometheus_port=port), 0)[1].take_problem()
        assert "set another one" in problem
        assert "the run continues" in problem
    for wrong in (0, 65536, -1):
        with pytest.raises(InputError, match="prometheus_port"):
            config(tmp_path, prometheus_port=wrong)


class Failing(MetricsWriter):
    """Fails in one of its methods, `at`."""

    def __init__(self, at: str, error: BaseException) -> None:
        self.at, self.error = at, error
        self._fail("make")

    def _fail(self, here: str) -> None:
        if here == self.at:
            raise self.error

    def write(self, record: Record) -> None:
        self._fail("write")

    def trace(self, spans: Sequence[StepSpan]) -> None:
        self._fail("trace")

    def rewind(self, step: int) -> None:
        self._fail("rewind")

    def close(self) -> None:
        self._fail("close")


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("at", ["make", "write", "trace", "rewind", "close"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), RuntimeError("no http://me:secret@host here"), SystemExit(0)]
)
def test_a_failing_writer_does_not_end_a_run_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at, error, remote
):
    kind = WriterKind("Failing", "tensorboard", "json", lambda config, step: Failing(at, error), remote=remote)
    monkeypatch.setattr(table, "WRITERS", (dataclasses.replace(kind, traces=True),))
    log = RunLog(config(tmp_path, tensorboard=True), 0, False, 0)
    for step in (1, 2):
        record = TrainRecord(**{key: value for key, value in RECORD.items() if key != "kind"} | {"step": step})
        log.write(record)
        log.trace([StepSpan(step, "data", 0.0, 1.0)])
        log.rewind(1)
    log.close()
    [event] = read_events(tmp_path)
    assert event.kind == "metrics"
    assert event.text.startswith("metrics.tensorboard: Failing failed (")
    shown = capsys.readouterr().out
    assert shown.count("Failing failed (") == 1
    assert "secret" not in shown + event.text
    assert [json.loads(each)["step"] for each in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1]


def test_a_url_that_no_server_has_is_refused_before_the_run(tmp_path: Path):
    for key in ("mlflow_uri", "otlp_endpoint"):
        for wrong in ("localhost:4318", "htp://host", "http://", "http://host:99999", "", "//host"):
            with pytest.raises(ConfigError, match=rf"metrics.{key}='{wrong}' is not the URL of a server; valid: http"):
                config(tmp_path, **{key: wrong})
        config(tmp_path, **{key: "https://user:password@host:1/path"})
    with pytest.raises(ConfigError, match=r"otlp_endpoint='http://\*\*\*@host:0'"):
        config(tmp_path, otlp_endpoint="http://me:secret@host:0")
    with pytest.raises(ConfigError, match=r"mlflow_experiment='x' without metrics\.mlflow_uri"):
        config(tmp_path, mlflow_experiment="x")


@prove
def test_a_run_is_scraped_while_it_trains(tokens: Path, tmp_path: Path):
    pytest.importorskip("prometheus_client")
    run_file, port = write_run_file(tmp_path, tokens), free_port()
    arguments = (f"metrics.prometheus_port={port}", "steps=5000", "checkpoint.every=0")
    with training(run_file, *(part for each in arguments for part in ("--set", each))) as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 3)
        found = scraped(port)
    logged = {record["step"]: record for record in records(run_file)}[found["shardwright_train_step"]]
    for key in ("loss", "grad_norm", "lr", "tokens_per_s", "memory_bytes", "slowest_costs_s"):
        assert found[f"shardwright_train_{key}"] == logged[key]
    assert {name for name in found if "own_s_by_rank" in name} == {
        f'shardwright_train_own_s_by_rank{{of="{rank}"}}' for rank in (0, 1)
    }


def test_the_dashboard_asks_for_numbers_that_there_are():
    kinds = {"train": TrainRecord, "evaluation": EvaluationRecord, "checkpoint": CheckpointRecord}
    path = Path(__file__).parents[2] / "examples" / "grafana-dashboard.json"
    asked = [target["expr"] for panel in json.loads(path.read_text())["panels"] for target in panel["targets"]]
    assert len(asked) > 10
    for name in asked:
        kind, _, key = name.removeprefix("shardwright_").partition("_")
        assert key in {each.name for each in dataclasses.fields(kinds[kind])}, name
