"""Tables of runs that cannot be used are refused with the reason; others are read as people write them."""

from pathlib import Path

import pytest

from shardloom.errors import InputError
from shardloom.plan.evaluate import MEASURED_RUNS
from shardloom.plan.run import Run
from shardloom.plan.run_model import family
from shardloom.plan.runs import read_runs


def test_a_published_row_becomes_the_job_and_layout_that_it_describes():
    row = read_runs(MEASURED_RUNS)[7]
    assert isinstance(row, Run)
    assert (row.name, row.measured_step_s) == ("GPT-310.1B", 37.614)
    assert (row.job.model.n_layers, row.job.model.d_model, row.job.global_batch) == (96, 16384, 2160)
    assert (row.job.cluster.size, row.job.cluster.node_bytes_per_s) == (1920, 200e9)
    of = row.candidates
    assert (of.pp, of.schedule, of.virtual_stages, of.stage_layers) == (16, "interleaved-1f1b", 2, (3,) * 32)
    assert (int(of.tp[0]), int(of.data_ranks[0]), int(of.world[0])) == (8, 15, 1920)
    assert row.job.stack.name == "megatron"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("", "columns missing"),
        ("source,model,layer,hidden\n", r"layers \(did you mean 'layer'\?\)"),
        ("source,model,layers,hidden,heads,seq,gpu,n_gpus,micro_batch,global_batch\n", "nothing to compare with"),
        ("source,model,layers,hidden,heads,seq,gpu,n_gpus,micro_batch,global_batch,step_time_s\n", "no rows"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path: Path, text: str | bytes | None, said: str):
    path = tmp_path / "runs.csv"
    if isinstance(text, bytes):
        path.write_bytes(text)
    elif text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_runs(path)


@pytest.mark.parametrize(
    ("name", "gated", "kind"),
    [
        ("GPT-3 175B", False, "gpt"),
        ("MPT-7b", False, "mpt"),
        ("Llama3.1-70B", True, "llama"),
        ("something", True, "llama"),
        ("something", False, "gpt"),
        ("BERT-large", False, None),
    ],
)
def test_a_models_habits_are_known_by_its_name(name: str, gated: bool, kind: str | None):
    assert family(name, gated=gated) == kind
