"""Tables of runs that cannot be used are refused with the reason; others are read as people write them."""

from pathlib import Path

import pytest

from shardwright.cost.hardware import network_of
from shardwright.errors import InputError
from shardwright.plan.evaluate import MEASURED_RUNS
from shardwright.plan.run import Run
from shardwright.plan.run_model import family
from shardwright.plan.run_row import Row
from shardwright.plan.runs import read_runs


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
        ("source;model;layers;hidden\nsomewhere;GPT;12;768\n", "separated by semicolons; valid: commas"),
        ("source\tmodel\tlayers\nsomewhere\tGPT\t12\n", "separated by tabs; valid: commas"),
        ("source_file,test,platform,mem_max_GiB,layers,hidden,heads,seq,mbs,gbs\n", "no rows"),
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


HEADER = "source,model,layers,hidden,heads,seq,gpu,n_gpus,micro_batch,global_batch,step_time_s"
LINE = "somewhere,GPT-small,12,768,12,1024,A100-80GB-SXM,1,1,1,0.5"


def test_a_table_from_a_spreadsheet_is_read_with_its_lines_counted(tmp_path: Path):
    path = tmp_path / "runs.csv"
    blanks = HEADER.replace(",", " , ")
    two_lines = LINE.replace("somewhere", '"some\nwhere"')
    path.write_text(f"{blanks}\n{LINE}\n\n{LINE}\n{two_lines}\n{LINE}\n", encoding="utf-8-sig")
    found = read_runs(path)
    assert [row.row for row in found] == [2, 4, 6, 7]
    assert all(isinstance(row, Run) for row in found)


@pytest.mark.parametrize(
    ("name", "gated", "kind"),
    [
        ("GPT-3 175B", False, "gpt"),
        ("MPT-7b", False, "mpt"),
        ("Llama3.1-70B", True, "llama"),
        ("something", True, "llama"),
        ("something", False, "gpt"),
        ("BERT-large", False, None),
        ("RoBERTa", False, None),
        ("mT5-XL", False, None),
        ("ViT-22B", False, None),
        ("GPT530B", False, "gpt"),
        ("GPT Invitation", False, "gpt"),
        ("MT-NLG 530B", True, "gpt"),
        ("OPT-175B", True, "gpt"),
        ("Llama3-8B optimized", False, "llama"),
        ("Llama-2-70B (Megatron-LM)", False, "llama"),
        ("deepseekv3 cut to 4 layers", True, "llama"),
    ],
)
def test_a_models_habits_are_known_by_its_name(name: str, gated: bool, kind: str | None):
    assert family(name, gated=gated) == kind


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        ({"source": "torchtitan 202412"}, "fsdp-compiled"),
        ({"source": "torchtitan_202506_notes"}, "fsdp-compiled-loss"),
        ({"source": "torchtitan", "ref": "benchmarks/h100_2025-06_x.md"}, "fsdp-compiled-loss"),
        ({"source": "a paper (arXiv 2412.20257)"}, "fsdp-compiled"),
        ({"source": "a paper (arXiv 2410.06511, of 2024-12)", "ref": "h2025"}, "fsdp-compiled"),
    ],
)
def test_the_loss_is_compiled_in_what_was_measured_since_2025(cells: dict[str, str], stack: str):
    row = Row(cells | {"zero_stage": "FSDP2 (ZeRO-3)", "notes": "compile"})
    assert row.stack().name == stack


@pytest.mark.parametrize(
    ("text", "gb_per_s"),
    [
        ("8x200Gb HDR IB per node", 200),
        ("400Gb/s RDMA per GPU", 400),
        ("0Gb/s per GPU", None),
        ("9" * 400 + "Gb/s per GPU", None),
        ("9" * 400 + "x200Gb", None),
        ("9" * 400 + "xHDR", None),
    ],
)
def test_a_network_that_cannot_be_says_nothing(text: str, gb_per_s: float | None):
    found = network_of(text, 8)
    assert found == (None if gb_per_s is None else pytest.approx(gb_per_s * 1e9))
