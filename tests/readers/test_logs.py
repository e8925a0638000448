"""Training logs: they are read, narrow the prediction of their cluster, and are explained."""

import json
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from benchmarks.one_log import MEGATRON_CORE, cluster_errors, reduction
from typer.testing import CliRunner, Result

from shardwright.cli.main import app
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.model.presets import PRESETS
from shardwright.readers.logs import read_log, step_times
from shardwright.system.errors import InputError
from tests.marks import prove

JOB = Job(model=PRESETS["llama-3.1-8b"], cluster=cluster("h100:8"), seq_len=8192, global_batch=16)
"""131,072 tokens a step: at 2 s, 8,192 tokens/s on each of 8 accelerators, and 8 samples/s."""
MLLOG = ':::MLLOG {{"namespace": "", "time_ms": 17, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": '
TRAINER = "Hugging Face Trainer", "DeepSpeed, Accelerate and Hugging Face Trainer"
LINES = {
    ("Megatron-LM", "Megatron-LM"): (
        " [2026-01-02 10:00:00] iteration {0:8}/     100 | consumed samples: 16 | elapsed time per iteration (ms): "
        "{1:.1f} | throughput per GPU (TFLOP/s/GPU): 400.1 | global batch size:    16 | lm loss: 2.1E+00 |",
        2000.0,
    ),
    ("torchtitan", "torchtitan"): (
        "\x1b[32m[titan] 2026-01-02 10:00:00,1 - root - INFO - \x1b[31mstep: {0:2}  loss: 7.1  tps: {1:,.0f}  mfu: 30%",
        8192.0,
    ),
    ("DeepSpeed", "DeepSpeed, Accelerate and Hugging Face Trainer"): (
        "[INFO] [timer.py:260:stop] epoch=0/micro_step={0}/global_step={0}, RunningAvgSamplesPerSec=8.1, "
        "CurrSamplesPerSec={1}, MemAllocated=1.0GB",
        8.0,
    ),
    TRAINER: (
        "  3%|3         | {0}/100 [00:20<03:00,  {1}s/it]",
        2.0,
    ),
    ("MLPerf", "Megatron-LM"): (MLLOG + '{{"throughput": {1}}}, "metadata": {{"step": {0}}}}}', 8.0),
    ("MLPerf", "torchtitan"): (MLLOG + '{{"train_step_time": {1}}}, "metadata": {{"step": {0}}}}}', 2.0),
}
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
"""


@pytest.mark.parametrize(("kind", "end"), [*((kind, "\n") for kind in LINES), (TRAINER, "\r")])
def test_each_kind_of_log_gives_its_step_times(tmp_path: Path, kind: tuple[str, str], end: str):
    line, value = LINES[kind]
    path = tmp_path / "log.txt"
    path.write_text("starting\n" + end.join(line.format(step, value) for step in range(1, 21)) + "\n")
    log = read_log(path, kind[1])
    assert log.kind == kind[0]
    assert [each.step for each in log.steps] == list(range(1, 21))
    assert step_times(log, JOB).median_s == pytest.approx(2.0)


def test_warm_up_is_left_out_and_a_line_that_is_cut_off_is_named(tmp_path: Path):
    line, value = LINES["Megatron-LM", "Megatron-LM"]
    text = "\n".join(line.format(step, value * (9 if step < 3 else 1)) for step in range(1, 21))
    path = tmp_path / "log.txt"
    path.write_text(f"{text}\n iteration 21/ 100 | elapsed time per iteration (ms): ")
    log = read_log(path, "Megatron-LM")
    assert step_times(log, JOB).warm == 2
    assert [remark.partition(" ")[0] for remark in log.remarks] == [f"{path}:21:"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.log", "loss 3\n", "no step times in 1 lines; supported: logs of Megatron-LM"),
        ("a.log", "", "no step times in 0 lines"),
        ("a.csv", "step,seconds\n1,2\n2;3\n", "a.csv:3: '2;3'"),
        ("a.csv", "step,seconds\n", "no line has a step with its time"),
        ("a.csv", "1,-2\n2,nan\n3,inf\n", "a.csv:1: step 1 has no valid time"),
        ("a.log", LINES["Megatron-LM", "Megatron-LM"][0].format(1, 2.0), "a.log:1: this is a log of Megatron-LM, and"),
        ("a.log", " iteration 1 | elapsed time per iteration (ms): \n", "a.log:1: this is a log of Megatron-LM"),
        ("a.jsonl", '{"kind": "train"\n', "a.jsonl"),
    ],
)
def test_a_log_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, name: str, text: str, expected: str):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_log(path, "torchtitan")
    assert expected in "\n".join(error.value.problems)


VALUES = ("nan", "inf", "info", "-1", "0", "1e999", "1e-320", "9" * 400, "[" * 5000, "null", '"a"', "{}", "")


@pytest.mark.parametrize("kind", LINES)
def test_no_text_in_the_place_of_a_number_raises_anything_but_an_input_error(tmp_path: Path, kind: tuple[str, str]):
    line, _ = LINES[kind]
    line = line.replace("{0:8}", "{0}").replace("{0:2}", "{0}").replace("{1:.1f}", "{1}").replace("{1:,.0f}", "{1}")
    path = tmp_path / "log.txt"
    for pair in [*((value, "2") for value in VALUES), *(("2", value) for value in VALUES)]:
        path.write_text(line.format(*pair) + "\n")
        with suppress(InputError):
            assert step_times(read_log(path, kind[1]), JOB).median_s > 0


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "160"})


def logged(folder: Path, seconds: list[float]) -> tuple[Path, Path]:
    config, log = folder / "run.toml", folder / "log.csv"
    config.write_text(TITAN)
    log.write_text("".join(f"{step},{each}\n" for step, each in enumerate(seconds, 1)))
    return config, log


def test_a_log_narrows_the_prediction_of_its_cluster_and_software(tmp_path: Path):
    config, log = logged(tmp_path, [0.0])
    before = json.loads(invoke("--from", config, "--cluster", "h100:64", "--json").stdout)
    log.write_text("".join(f"{step},{before['step_s'] * 1.12}\n" for step in range(50)))
    written = tmp_path / "ours.toml"
    result = invoke("calibrate", log, "--from", config, "--cluster", "h100:64", "--write", written)
    assert result.exit_code == 0, result.output
    own = ("--hardware", written, "--cluster", "ours:64")
    after = json.loads(invoke("--from", config, *own, "--json").stdout)
    assert 1.06 < after["step_s"] / before["step_s"] <= 1.13
    widths = [each["interval_s"][1] / each["interval_s"][0] for each in (before, after)]
    assert widths[1] < widths[0] ** 0.8
    same = invoke("calibrate", log, "--from", config, *own, "--write", written, "--overwrite")
    assert (same.exit_code, "is calibrated by log.csv" in same.output) == (2, True)
    log = log.rename(tmp_path / "second.csv")
    again = invoke("calibrate", log, "--from", config, *own, "--write", written, "--overwrite", "--json")
    assert abs(json.loads(again.stdout)["after"]["step_s"] / before["step_s"] - 1.12) < 0.06
    other = invoke("--model", "llama-3.1-8b", "--seq-len", 8192, "--global-batch", 64, "--explain", "dp_shard=64", *own)
    assert "not calibrated: the logs in the hardware file are of fsdp" in other.output


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        ([9.0, 1.0, 1.0, 1.0, 1.0], "4 step times after the warm-up; 5 or more are needed"),
        ([1.0, 3.0, 0.5, 2.0, 4.0] * 20, "the step times vary by"),
        ([99.0] * 50, "times the predicted one, and the constants of clusters do not differ enough"),
    ],
)
def test_an_uninformative_log_changes_nothing_and_says_so(tmp_path: Path, seconds: list[float], why: str):
    config, log = logged(tmp_path, seconds)
    written = tmp_path / "ours.toml"
    result = invoke("calibrate", log, "--from", config, "--cluster", "h100:64", "--write", written)
    assert result.exit_code == 1
    assert why in result.output
    assert not written.exists()
    found = json.loads(invoke("calibrate", log, "--from", config, "--cluster", "h100:64", "--json").stdout)
    assert found["before"] == found["after"]


@prove
def test_one_row_of_a_cluster_reduces_the_error_of_its_other_rows_to_less_than_half_of_what_it_was():
    """9.6 % was the error without a log when a reduction by a third was asked for; it is 6.7 % now."""
    errors = cluster_errors(MEGATRON_CORE)
    assert len(errors) >= 10
    assert fmean(each.after for each in errors) <= 0.046
    assert reduction(errors) >= 0.3


def explain(log: Path, config: Path) -> dict[str, Any]:
    result = invoke("explain-log", log, "--from", config, "--cluster", "h100:64", "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_slow_steps_are_grouped_by_their_pattern(tmp_path: Path):
    seconds = [9.0, 3.0, *[1.0] * 98]
    for step in (30, 50, 70, 90):
        seconds[step - 1] = 4.0
    seconds[60] = 2.5
    config, log = logged(tmp_path, seconds)
    groups = {each["kind"]: each for each in explain(log, config)["slow_steps"]}
    assert groups["warm-up"]["steps"] == [1, 2]
    assert (groups["periodic"]["steps"], groups["periodic"]["period"]) == ([30, 50, 70, 90], 20)
    assert groups["isolated"]["steps"] == [61]
    assert groups["periodic"]["per_step_s"] == pytest.approx(4 * 3.0 / 100)


@pytest.mark.parametrize(
    ("times", "cause", "verdict"),
    [
        ([1.0] * 40, None, "inside the 80 % interval"),
        ([1.15] * 40, "matmuls", "slower than its end"),
        ([4.0] * 40, "not in the configuration or the model", "slower than its end"),
        ([0.87] * 40, "matmuls", "faster than its start"),
        ([1.0, 1.0, 1.0, 3.0] * 10, "checkpoints, evaluations or other periodic work", "inside the 80 % interval"),
        ([1.0 + step / 200 for step in range(40)], "steps become slower", "80 % interval"),
        ([2.0] * 3, "not determined", "slower than its end"),
    ],
)
def test_the_first_cause_of_a_gap_is_the_one_that_was_put_in(
    tmp_path: Path, times: list[float], cause: str | None, verdict: str
):
    config, log = logged(tmp_path, [1.0])
    predicted = explain(log, config)["predicted_s"]
    config, log = logged(tmp_path, [each * predicted for each in times])
    found = explain(log, config)
    assert verdict in found["verdict"]
    assert (found["causes"][0]["name"] if found["causes"] else None) == cause
    assert len(found["causes"]) <= 3
    assert found["mfu"]["full"]["measured"] == pytest.approx(
        found["mfu"]["full"]["predicted"] * predicted / found["measured_s"], rel=1e-6
    )


def test_the_wait_for_data_in_metrics_is_a_cause(tmp_path: Path):
    config, _ = logged(tmp_path, [1.0])
    record = {"kind": "train", "loss": 2.0, "grad_norm": 1.0, "lr": 1e-4, "target_tokens": 1, "tokens_per_s": 1.0}
    record |= {"tokens_per_s_per_device": 1.0, "tflops_per_s_per_device": 1.0, "mfu": None, "memory_bytes": 1}
    record |= {"step_s": 8.0, "data_s": 6.0, "forward_backward_s": 1.9, "optimizer_s": 0.1}
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record | {"step": step}) + "\n" for step in range(1, 21)))
    assert "data" in [each["name"] for each in explain(metrics, config)["causes"]]


def test_explain_log_takes_one_log_of_this_configuration(tmp_path: Path):
    config, log = logged(tmp_path, [1.0] * 10)
    two = invoke("explain-log", log, log, "--from", config, "--cluster", "h100:64")
    assert two.exit_code == 2
    assert "takes one log" in two.output
    none = invoke("explain-log", log, "--cluster", "h100:64")
    assert none.exit_code == 2
    assert "--from is missing" in none.output


def test_a_log_with_a_line_without_end_is_refused_and_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match="a line is longer than"):
        read_log(path, "Megatron-LM")
