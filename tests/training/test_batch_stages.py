"""Proves that a run whose batch and sequences change at some steps trains on the same tokens at the same rates on any
layout, resumed within a stage and at its first step; that its validation loss stays comparable; and that its average
of the weights is the average of what its checkpoints hold.

Runs are those of `shardwright train` (runs.py). The reference of the average is computed from the weights in the
checkpoints of every step.
"""

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwright.config import load
from shardwright.runs.folder import CHECKPOINTS, checkpoint_name
from shardwright.runs.folder import RUN_FILE as KEPT
from shardwright.system.errors import CheckpointError, ConfigError
from shardwright.training.exporting import export
from shardwright.training.start import start
from shardwright.training.weights import AveragedWeights, open_weights
from tests.marks import prove
from tests.training.runs import records, train

RUN_FILE = """
out = "{out}"
steps = 9
seed = 3
device = "cpu"
model = {{ n_layers = 2, d_model = 16, n_heads = 2, n_kv_heads = 1, head_dim = 8, d_ffn = 24, vocab_size = 300, \
max_seq_len = 16, dropout = 0.1 }}
data = {{ path = "{tokens}" }}
layout = {{ dp_shard = 2, zero = 2 }}
precision = {{ compute = "fp64" }}
lr_schedule = {{ by = "tokens", warmup_steps = 2 }}
checkpoint = {{ every = 1, keep_last = 99 }}
metrics = {{ every = 1 }}
evaluation = {{ samples = 6, every = 3 }}
average = {{ kind = "ema", decay = 0.6, every = 2 }}

[batch]
seq_len = 8
global_batch = 8
micro_batch = 2

[[batch.stages]]
from_step = 3
global_batch = 16

[[batch.stages]]
from_tokens = 500.0
seq_len = 16
global_batch = 4
micro_batch = 1
"""


@pytest.fixture(scope="module")
def whole(ragged_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a run of two ranks that nothing interrupted."""
    path = tmp_path_factory.mktemp("whole") / "run.toml"
    path.write_text(RUN_FILE.format(out=path.parent / "out", tokens=ragged_tokens))
    train(path)
    return path


def numbers(run_file: Path, kind: str) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in records(run_file) if record["kind"] == kind}


def test_steps_have_the_tokens_of_their_stages_and_rates_by_tokens(whole: Path):
    taken = numbers(whole, "train")
    assert [taken[step]["target_tokens"] for step in range(1, 10)] == [64] * 3 + [128] * 3 + [64] * 3
    done = [0, 64, 128, 192, 320, 448, 576, 640, 704]  # tokens before each step; 500 are reached within the sixth
    shares = [(tokens - done[2]) / (done[8] - done[2]) for tokens in done[2:]]
    rates = [taken[step]["lr"] / taken[3]["lr"] for step in range(3, 10)]
    cosine = [0.1 + 0.45 * (1 + float(torch.cos(torch.tensor(torch.pi * share)))) for share in shares]
    assert rates == pytest.approx(cosine, rel=1e-6)


def resumed_from(whole: Path, folder: Path, step: int, layout: str) -> Path:
    """The run file of a run that continues on `layout` from a checkpoint of the whole run."""
    path = folder / "run.toml"
    path.write_text(whole.read_text().replace(str(whole.parent / "out"), str(folder / "out")))
    checkpoint = whole.parent / "out" / CHECKPOINTS / checkpoint_name(step)
    train(path, "--set", f"layout={layout}", "--set", f"checkpoint.resume={checkpoint}")
    return path


@pytest.mark.parametrize(
    ("layout", "step"),
    [
        pytest.param("{ pp = 2 }", 4, id="pp, within a stage and over the next boundary"),
        pytest.param("{ }", 3, id="one rank, at a boundary", marks=prove),
        pytest.param("{ tp = 2 }", 8, id="tp, within the last stage", marks=prove),
    ],
)
def test_a_run_resumed_on_another_layout_goes_on_as_if_nothing_had_happened(
    whole: Path, tmp_path: Path, layout: str, step: int
):
    resumed = resumed_from(whole, tmp_path, step, layout)
    expected = numbers(whole, "train")
    for number, record in numbers(resumed, "train").items():
        for name in ("loss", "grad_norm", "lr", "target_tokens"):
            assert record[name] == pytest.approx(expected[number][name], rel=1e-9), (number, name)
    evaluated, before = numbers(resumed, "evaluation"), numbers(whole, "evaluation")
    assert evaluated.keys() == {number for number in before if number > step}
    for number, record in evaluated.items():
        for name in ("loss", "average_loss"):
            assert record[name] == pytest.approx(before[number][name], rel=1e-9), (number, name)
    last = [path.parent / "out" / CHECKPOINTS / checkpoint_name(9) for path in (resumed, whole)]
    for name in open_weights(last[0]).shapes:
        ours, theirs = (averages(folder)[name] for folder in last)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("change", "said"), [("every=3", "average.every=2"), ("kind='none'", "average.kind='ema'")])
def test_a_run_with_another_average_is_refused(whole: Path, tmp_path: Path, change: str, said: str):
    path = tmp_path / "run.toml"
    path.write_text(whole.read_text().replace(str(whole.parent / "out"), str(tmp_path / "out")))
    checkpoint = whole.parent / "out" / CHECKPOINTS / checkpoint_name(4)
    changes = [f"checkpoint.resume={checkpoint}", f"average.{change}"]
    if "none" in change:
        changes += ["average.decay=0.999"]
    with pytest.raises(
        CheckpointError, match=f"its average of the weights has .*{said}.*, and the average of this run"
    ):
        start(load(path, changes), quiet=True)


def averages(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of the average in a checkpoint of one process or of several."""
    weights = AveragedWeights(open_weights(checkpoint))
    return {name: weights.read(name, [0] * len(shape), shape) for name, shape in weights.shapes.items()}


def test_the_average_is_of_the_weights_of_the_steps_and_is_exported(whole: Path, tmp_path: Path):
    checkpoints = whole.parent / "out" / CHECKPOINTS
    steps = [open_weights(checkpoints / checkpoint_name(step)) for step in (2, 4, 6, 8)]
    found = averages(checkpoints / checkpoint_name(9))
    for name, shape in steps[0].shapes.items():
        first, *others = (weights.read(name, [0] * len(shape), shape) for weights in steps)
        for values in others:
            first = 0.6 * first + 0.4 * values
        torch.testing.assert_close(found[name], first, rtol=1e-12, atol=1e-15)
    export(whole.parent / "out", tmp_path / "hf", average=True)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(written["model.norm.weight"], found["norm.weight"])
    last = numbers(whole, "evaluation")[9]
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"| validation loss | {last['average_loss']:.4f} nats a token |" in card
    assert "training loss" not in card


def test_the_run_file_of_an_average_is_no_link_out_of_its_checkpoint(whole: Path, tmp_path: Path):
    checkpoint = copytree(whole.parent / "out" / CHECKPOINTS / checkpoint_name(9), tmp_path / "checkpoint")
    weights = open_weights(checkpoint)
    (checkpoint / KEPT).rename(tmp_path / "other")
    (checkpoint / KEPT).symlink_to("../other")
    with pytest.raises(ConfigError, match="link out of this folder"):
        AveragedWeights(weights)


def test_validation_is_on_the_same_sequences_in_every_stage_with_the_weights_and_with_their_average(whole: Path):
    evaluated = numbers(whole, "evaluation")
    assert list(evaluated) == [0, 3, 6, 9]
    assert "average_loss" not in evaluated[0]
    assert all(evaluated[step]["average_loss"] != evaluated[step]["loss"] for step in (3, 6, 9))
