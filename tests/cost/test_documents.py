"""Proves that attention within documents is priced by their lengths: FLOPs, seconds and the model FLOPs of MFU."""

import email
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.cost.blocks import blocks
from shardwright.cost.calibration import CALIBRATED
from shardwright.cost.flops import executed_flops, model_flops
from shardwright.cost.layer import layer
from shardwright.data.prepare import prepare
from shardwright.data.samples import packed_lengths
from shardwright.data.shards import open_split
from shardwright.split.documents import attended_tokens
from tests.cost.jobs import candidates, job


def test_flops_of_attention_are_those_of_sequences_of_the_mean_length() -> None:
    long, short = job(seq_len=32768, document_tokens=2048.0), job(seq_len=2048)
    for flops in (model_flops, lambda each: executed_flops(each, candidates(recompute=[0, 2]))):
        np.testing.assert_allclose(flops(long).full, flops(short).full)
        np.testing.assert_allclose(flops(long).causal, flops(short).causal)
    whole = job(seq_len=32768)
    (block,) = blocks(whole.model)
    seconds = [layer(each, candidates(), block).forward["attention"].item() for each in (whole, long)]
    # 64 more keys a query, of the blocks on the diagonal, and a rate that grows with the length.
    faster = (1 + CALIBRATED.flash_length / 2048) / (1 + CALIBRATED.flash_length / 32768)
    assert seconds[1] / seconds[0] == pytest.approx(faster * (2048 / 2 + 64) / (32768 / 2 + 64))


def test_scores_of_packed_documents_are_those_of_the_mean_length() -> None:
    lengths = packed_lengths(np.array([5, 3, 9, 1, 4, 6]), 8)
    assert lengths.tolist() == [5, 3, 8, 1, 1, 4, 2]
    assert attended_tokens(lengths) == (25 + 9 + 64 + 1 + 1 + 16 + 4) / 24
    assert packed_lengths(np.array([5]), 8).tolist() == []


RUN = """
out = "runs/x"
steps = 10
[data]
path = "{path}"
attention = "document"
[batch]
seq_len = 4096
global_batch = 8
[model]
preset = "debug"
max_seq_len = 4096
vocab_size = 512
"""


def test_plan_takes_the_lengths_from_the_data_of_the_run_file(tmp_path: Path) -> None:
    data, run = tmp_path / "tokens", tmp_path / "run.toml"
    run.write_text(RUN.format(path=data))
    options = ["plan", str(run), "--cluster", "h100:2/2", "--json"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert "there is no such data folder" in result.output
    assert "--document-tokens" in result.output
    assert CliRunner().invoke(app, [*options, "--document-tokens", "5000"]).exit_code == 2
    prepare(Path(email.__file__).parent, data, glob="*.py", vocab_size=512, validation=0.2)
    found = json.loads(CliRunner().invoke(app, options).stdout)
    lengths = packed_lengths(open_split(data, "train").document_lengths(), 4096)
    assert found["document_tokens"] == attended_tokens(lengths) < 4096
