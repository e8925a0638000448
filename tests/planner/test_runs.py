"""A table of measured runs is read strictly: every problem of a file is named at once, and nothing is guessed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.cost import memory
from shardwright.cost.data_messages import GATHERED, data_messages, groups
from shardwright.cost.rank_parameters import rank_parameters
from shardwright.cost.stack import MEGATRON_CORE_FUSED_LOSS, STACKS
from shardwright.cost.step import step_time
from shardwright.planner.evaluate import MEASURED_RUNS
from shardwright.planner.measured_run import PredictableRun, SkippedRun
from shardwright.planner.run_columns import columns
from shardwright.planner.runs import read_runs
from shardwright.system.errors import InputError
from shardwright.system.units import GiB
from tests.planner.measured import DENSE, EXPERTS, PIPED, published, write


def test_a_published_row_becomes_the_job_and_layout_that_it_describes():
    row = read_runs(MEASURED_RUNS)[7]
    assert isinstance(row, PredictableRun)
    assert (row.row, row.measured.id, row.measured.step_time_s) == (9, "sc21-table1-006aec", 37.614)
    model = row.job.model
    assert (model.n_layers, model.d_model, model.norm, model.bias, model.tied_embedding) == (
        *(96, 16384),
        *("layernorm", True, True),
    )
    assert (row.job.cluster.size, row.job.cluster.node_bytes_per_s, row.job.precision) == (1920, 200e9, "fp16")
    of = row.candidates
    assert (of.pp, of.shared.pp_schedule, of.shared.virtual_stages, of.shared.stage_layers) == (
        16,
        "interleaved-1f1b",
        2,
        (3,) * 32,
    )
    assert (int(of.tp[0]), int(of.data_ranks[0]), int(of.world[0])) == (8, 15, 1920)
    assert row.job.stack.name == "megatron"
    assert not row.job.stack.flash_attention


def test_a_row_with_experts_and_latent_attention_says_all_sizes_itself(tmp_path: Path):
    (row,) = read_runs(write(tmp_path / "runs.csv", EXPERTS | {"optimizer_dtype": "bf16"}))
    assert isinstance(row, PredictableRun)
    moe, latent = row.job.model.moe, row.job.model.latent_attention
    assert moe is not None
    assert latent is not None
    assert (moe.n_experts, moe.top_k, moe.n_shared, moe.first_dense) == (256, 8, 1, 1)
    assert (latent.q_rank, latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.v_dim) == (1536, 512, 128, 64, 128)
    speed = replace(row.job.stack.speed, hides_tp=True, hides_tp_backward=True, hides_dp=True)
    assert replace(row.job.stack, speed=speed, state_bytes=4.0) == MEGATRON_CORE_FUSED_LOSS
    assert row.job.stack.state_bytes == 2.0
    assert not row.job.stack.speed.hides_dp


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        ('id\n"open', "cannot be read"),
        ("", "column 'id' is missing"),
        ("source;model;layers\nsomewhere;GPT;12\n", "separated by semicolons; valid: commas"),
        ("source\tmodel\tlayers\nsomewhere\tGPT\t12\n", "separated by tabs; valid: commas"),
        (
            ",".join(columns()).replace("d_model", "hidden") + "\n",
            "column 'hidden' is not known; .*'d_model' is missing",
        ),
        (",".join(columns()) + ",layer\n", r"column 'layer' is not known; did you mean 'layers'\?"),
        (",".join(columns()) + ",tp\n", "column 'tp' is there 2 times"),
        (",".join(columns()) + "\n", "no rows"),
        (",".join(columns()) + "\na,b,c\n", f"row 2: 3 cells, and the header has {len(columns())} columns"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path: Path, text: str | bytes | None, said: str):
    path = tmp_path / "runs.csv"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=f"(?s){said}"):
        read_runs(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": "many"}, "layers='many': valid: a whole number from 1 to 1,000"),
        ({"layers": "12.5"}, "layers='12.5': valid: a whole number"),
        ({"layers": ""}, "layers is empty, and this row needs it: transformer layers; valid: a whole number"),
        ({"vocab": "1e400"}, "vocab='1e400': valid: a whole number from 1 to 10,000,000"),
        ({"step_time_s": "-1"}, "step_time_s='-1': valid: a decimal from 0.000001 to 1,000,000,000"),
        ({"step_time_s": ""}, "step_time_s, peak_mem_gib and days are empty"),
        ({"days": "9.5"}, "tokens= with days=9.5; valid: both, or none"),
        ({"days": "0"}, "days='0': valid: a decimal from 0.001 to 100,000"),
        ({"peak_mem_gib": "10"}, "peak_mem_from is empty"),
        ({"tied": "yes"}, "tied='yes': valid: 0, 1"),
        ({"stack": "megatron-lm"}, "stack='megatron-lm': valid: megatron, megatron-core, deepspeed, gpt-neox, fsdp"),
        ({"schedule": "sideways"}, "schedule='sideways': valid: afab, 1f1b, "),
        ({"recompute": "sometimes"}, "valid: none, full, selective, selective:a+b, partial:N"),
        ({"recompute": "selective:a+b"}, "recompute='selective:a+b': valid: none"),
        ({"zero": "9"}, "zero='9': valid: a whole number from 0 to 3"),
        ({"usable": "no"}, "why_not is empty"),
        ({"model_kind": "hybrid"}, "model_kind='hybrid' with usable='yes'"),
        ({"experts": "8"}, "top_k is empty"),
        ({"mla_v": "128"}, "mla_q_rank is empty"),
        ({"tp": "4"}, "tp 4 x pp 1 x cp 1 x dp_replicate 1 x dp_shard 1 = 4, not accelerators=8"),
        ({"global_batch": "5"}, "global_batch=5 is not a multiple of micro_batch 4 x 1 data ranks"),
        ({"accelerators": "16", "dp_shard": "2", "global_batch": "8"}, "zero=0 shards nothing over dp_shard=2"),
        ({"accelerators": "1", "tp": "1", "sp": "1"}, "sp=1 with tp=1; valid: 0"),
        ({"ep": "2"}, "ep=2 shards experts, and the model has none; valid: 1"),
        ({"virtual_stages": "2"}, "schedule=1f1b, virtual_stages=2 with pp=1"),
        ({"accelerators": "16", "pp": "2"}, "layer_split is empty"),
        ({"attention": "fa5"}, "attention='fa5': valid: fa1, fa2, fa3, fa4, cudnn, cudnn-fp8, cudnn-mxfp8, flash-attn"),
        ({"attention": "fa2", "flash": "0"}, "attention=fa2 with flash=0; valid: flash=1"),
        ({"cuda_graphs": "all"}, "cuda_graphs='all': valid: none, blocks, step"),
    ],
)
def test_a_bad_cell_is_an_error_with_its_row_column_value_and_rule(tmp_path: Path, change: dict[str, str], said: str):
    with pytest.raises(InputError) as error:
        read_runs(write(tmp_path / "runs.csv", DENSE, DENSE | change))
    assert any("row 3: " in problem and said in problem for problem in error.value.problems), error.value.problems


def test_the_degree_of_experts_is_checked_with_their_tensor_parallelism(tmp_path: Path):
    for change, said in (({"ep": "3"}, "ep=3 does not divide 256 experts"), ({"etp": "2"}, "ep=4 x etp 2 does not")):
        with pytest.raises(InputError, match=said):
            read_runs(write(tmp_path / "runs.csv", EXPERTS | change))


def test_all_problems_of_a_file_are_named_at_once(tmp_path: Path):
    path = write(tmp_path / "runs.csv", DENSE | {"layers": "x", "tied": "x"}, PIPED, PIPED | {"pp": "4"})
    text = path.read_text().replace("row-4", "row-3")
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_runs(path)
    said = ["row 2: layers='x'", "row 2: tied='x'", "row 4: tp 8 x pp 4", "row 4: id=row-3: row 3 has the same"]
    assert [text in problem for text, problem in zip(said, error.value.problems, strict=True)] == [True] * 4


@pytest.mark.parametrize(
    ("row", "change", "reason"),
    [
        (DENSE, {"usable": "no", "why_not": "two jobs on the machine"}, "two jobs on the machine"),
        (DENSE, {"accelerator": "h1000"}, "accelerator 'h1000' is not known; did you mean 'h100'?"),
        (DENSE, {"accelerator": "v100", "precision": "bf16"}, "no figures for bf16 on v100; valid: fp32, fp16"),
        (DENSE, {"precision": "nvfp4"}, "no figures for nvfp4 on a100-80gb; valid: "),
        (DENSE, {"precision": "fp8-tensor"}, "no figures for fp8 on a100-80gb; valid: "),
        (
            DENSE,
            {"offload": "activations:2", "accelerator": "tpu-v5p"},
            "offload=activations:2 has no price on tpu-v5p",
        ),
        (DENSE, {"window": "4096", "windowed_layers": "24"}, "sliding-window attention has no price"),
        (DENSE, {"fused_loss": "1"}, "fused_loss=1 has no price with stack megatron"),
        (DENSE, {"kv_heads": "5"}, "n_kv_heads=5 does not divide n_heads=64"),
        (DENSE, {"kv_heads": "1", "heads": "4"}, "tp=8 does not divide 4 query heads"),
        (DENSE, {"d_ffn": "1001"}, "tp=8 does not divide 1001 ffn features"),
        (DENSE, {"tp": "4", "cp": "2", "seq_len": "2046"}, "seq_len=2046 is not a multiple of"),
        (EXPERTS, {"top_k": "257"}, "top_k=257 is more than moe.n_experts=256"),
        (EXPERTS, {"bias": "1"}, "bias=true goes with plain attention"),
        (PIPED, {"layers": "97"}, "layer_split=even: 97 layers do not fill 24 stages; valid: uneven"),
        (PIPED, {"layers": "12", "layer_split": "uneven"}, "make 24 stages, more than the 12 layers"),
        (PIPED, {"schedule": "dualpipe", "virtual_stages": "1", "global_batch": "9"}, "microbatches=9 is odd"),
    ],
)
def test_a_row_without_a_price_is_skipped_with_the_reason(
    tmp_path: Path, row: dict[str, str], change: dict[str, str], reason: str
):
    found = read_runs(write(tmp_path / "runs.csv", row | change, row))
    assert [type(each) for each in found] == [SkippedRun, PredictableRun]
    assert isinstance(found[0], SkippedRun)
    assert reason in found[0].reason


def test_a_module_for_a_second_token_is_priced_as_the_layer_and_the_head_that_it_is(tmp_path: Path):
    without, with_module = read_runs(write(tmp_path / "runs.csv", DENSE, DENSE | {"mtp": "1"}))
    assert isinstance(without, PredictableRun)
    assert isinstance(with_module, PredictableRun)
    layers = without.job.model.n_layers
    more = (
        step_time(with_module.job, with_module.candidates).total_s / step_time(without.job, without.candidates).total_s
    )
    assert 1 + 1 / layers < more < 1 + 3 / layers


def test_what_is_priced_as_something_else_is_said(tmp_path: Path):
    change = {"stack": "other", "precision": "fp8-row", "accelerator": "h100", "note": "a note"}
    (row,) = read_runs(write(tmp_path / "runs.csv", DENSE | change))
    assert isinstance(row, PredictableRun)
    assert row.assumed == (
        "a note",
        "stack other priced as megatron-core",
    )


@pytest.mark.parametrize(("stack", "priced"), [("megatron", "auto"), ("fsdp", "zb-h2")])
def test_zb_h2_of_megatron_is_the_searched_schedule_of_its_paper(tmp_path: Path, stack: str, priced: str):
    (row,) = read_runs(
        write(tmp_path / "runs.csv", PIPED | {"schedule": "zb-h2", "virtual_stages": "1", "stack": stack})
    )
    assert isinstance(row, PredictableRun)
    assert row.candidates.shared.pp_schedule == priced
    assert any("ZB-2p" in each for each in row.assumed) == (priced == "auto")


def test_a_run_is_spread_evenly_over_as_few_domains_as_hold_it(tmp_path: Path):
    for n, size in ((8, 8), (64, 64), (128, 64), (200, 50), (2, 2)):
        change = {"accelerator": "gb200", "per_domain": "72", "accelerators": str(n), "tp": "2", "sp": "0"}
        change |= {"dp_replicate": str(n // 2), "global_batch": str(4 * n // 2)}
        (row,) = read_runs(write(tmp_path / "runs.csv", DENSE | change))
        assert isinstance(row, PredictableRun)
        assert row.job.cluster.node_size == size, n


def test_the_ends_of_a_pipeline_may_have_a_layer_less(tmp_path: Path):
    change = {"layers": "94", "layer_split": "ends"}
    (row,) = read_runs(write(tmp_path / "runs.csv", PIPED | change))
    assert isinstance(row, PredictableRun)
    assert row.candidates.shared.stage_layers == (3, *(4,) * 22, 3)


def test_a_table_from_a_spreadsheet_is_read_with_its_lines_counted(tmp_path: Path):
    path = write(tmp_path / "runs.csv", DENSE, DENSE, DENSE | {"ref": "some\nwhere"}, DENSE)
    header, first, *others = path.read_text().splitlines()
    blanks = header.replace(",", " , ")
    path.write_text("\n".join([blanks, first, "", *others]), encoding="utf-8-sig")
    assert [row.row for row in read_runs(path)] == [2, 4, 6, 7]


def test_parts_that_megatron_recomputes_are_those_of_a_layout(tmp_path: Path):
    plain, again = (
        read_runs(write(tmp_path / "runs.csv", EXPERTS | {"recompute": recompute}))[0]
        for recompute in ("none", "selective:mla_up_proj")
    )
    assert isinstance(plain, PredictableRun)
    assert isinstance(again, PredictableRun)
    assert again.job.stack.recomputed_parts == ("mla_up",)
    assert again.predicted_peak_gib() < plain.predicted_peak_gib()
    more = step_time(again.job, again.candidates).total_s / step_time(plain.job, plain.candidates).total_s
    assert 1 < more < 1.1


def peak_gib(path: Path, row: dict[str, str], **cells: str) -> float:
    """Predicted peak of a row with other cells."""
    (run,) = read_runs(write(path / "runs.csv", row | cells))
    assert isinstance(run, PredictableRun), run
    return run.predicted_peak_gib()


def test_each_module_that_megatron_recomputes_trades_memory_for_time(tmp_path: Path):
    names = ("none", "selective:moe_act", "selective:moe_act+shared_experts", "selective:moe", "full")
    peaks = [peak_gib(tmp_path, EXPERTS, recompute=name) for name in names]
    seconds = [seconds_with(tmp_path, EXPERTS, recompute=name) for name in names]
    assert peaks == sorted(peaks, reverse=True)
    assert seconds == sorted(seconds)
    assert len(set(peaks)) == len(set(seconds)) == len(names)
    # Layers with experts have no dense network.
    without = EXPERTS | {"dense_layers": "0"}
    assert peak_gib(tmp_path, without, recompute="selective:mlp") == peak_gib(tmp_path, without, recompute="none")
    assert peak_gib(tmp_path, PIPED, recompute="selective:mlp") < peak_gib(tmp_path, PIPED, recompute="none")


def test_some_of_the_layers_recompute_or_are_on_the_host(tmp_path: Path):
    n = int(DENSE["layers"])
    for column, none, some, whole in (
        ("recompute", "none", f"partial:{n // 2}", "full"),
        ("offload", "none", f"activations:{n // 2}", f"activations:{n}"),
    ):
        most, half, least = (
            peak_gib(tmp_path, DENSE | {"recompute": "none"}, **{column: each}) for each in (none, some, whole)
        )
        assert least < half < most
        assert (most - half) / (most - least) == pytest.approx(0.5, abs=0.1)
    assert seconds_with(tmp_path, DENSE, offload="optimizer") > seconds_with(tmp_path, DENSE)
    assert peak_gib(tmp_path, DENSE, offload="optimizer") < peak_gib(tmp_path, DENSE)


NARROW = {
    **DENSE,
    **dict(
        stack="fsdp", accelerator="h100", tp="1", sp="0", dp_replicate="1", dp_shard="8", zero="3", grad_dtype="fp32"
    ),
    **dict(global_batch="32", micro_batch="1", recompute="full", flash="", peak_mem_rank="most"),
}
"""GPT-22B on 8 H100 with FSDP and four micro-batches."""


def test_norms_of_heads_keep_their_inputs_in_the_layer_that_is_recomputed(tmp_path: Path):
    long = NARROW | {"seq_len": "65536", "positions": "rotary", "loss_chunk_tokens": "128"}  # the peak is in a layer
    heads = (int(NARROW["heads"]) + int(NARROW["kv_heads"])) * int(NARROW["head_dim"])
    more = peak_gib(tmp_path, long, qk_norm="1") - peak_gib(tmp_path, long)
    assert more == pytest.approx(2 * int(NARROW["micro_batch"]) * 65536 * heads / GiB, rel=0.01)
    assert seconds_with(tmp_path, NARROW, qk_norm="1") > seconds_with(tmp_path, NARROW)


def test_weights_without_a_copy_in_fp32_and_whole_gradients_have_their_bytes(tmp_path: Path):
    (run,) = read_runs(write(tmp_path / "runs.csv", NARROW))
    assert isinstance(run, PredictableRun)
    n = run.job.model.n_parameters / GiB
    wide = peak_gib(tmp_path, NARROW)
    shards = peak_gib(tmp_path, NARROW, optimizer_dtype="bf16", whole_gradients="0")
    whole = peak_gib(tmp_path, NARROW, optimizer_dtype="bf16")
    # Shards of weight, gradient and two moments: 16 bytes in fp32, 8 in bf16. Whole gradients are in fp32.
    assert wide - shards == pytest.approx((16 - 8) * n / 8, rel=0.02)
    assert whole - shards == pytest.approx((4 - 2 / 8) * n, rel=0.1)
    assert peak_gib(tmp_path, NARROW, optimizer_dtype="bf16", master_dtype="fp32") > shards
    assert seconds_with(tmp_path, NARROW, whole_gradients="1") < seconds_with(tmp_path, NARROW)


def test_whole_logits_and_chunks_of_the_loss_have_their_bytes(tmp_path: Path):
    over_tp = DENSE | {"recompute": "full", "vocab": "512000"}
    more = peak_gib(tmp_path, over_tp, whole_logits="1") - peak_gib(tmp_path, over_tp)
    logits = int(DENSE["micro_batch"]) * int(DENSE["seq_len"]) * 512000 / GiB
    assert more == pytest.approx(6 * logits * (1 - 1 / int(DENSE["tp"])), rel=0.1)
    long = NARROW | {"seq_len": "16384", "micro_batch": "2", "global_batch": "64"}
    assert peak_gib(tmp_path, long, loss_chunk_tokens="4096") < 0.9 * peak_gib(tmp_path, long)
    more = peak_gib(tmp_path, long, logit_peak_bytes="20") - peak_gib(tmp_path, long, logit_peak_bytes="16")
    assert more == pytest.approx(4 * 2 * 16384 * int(DENSE["vocab"]) / GiB)


def test_with_a_plan_for_each_matrix_ranks_of_tp_have_the_whole_embedding_and_without_sp_the_head(tmp_path: Path):
    of_rank = NARROW | {"tp": "8", "dp_shard": "1", "zero": "0", "sp": "1", "micro_batch": "1"}
    of_rank |= {"vocab": "128000", "tied": "0"}
    split = peak_gib(tmp_path, of_rank, whole_logits="1", tp_by_matrix="0")
    embedding = 7 / 8 * 128000 * int(NARROW["d_model"]) / GiB
    by_matrix = peak_gib(tmp_path, of_rank, whole_logits="1")
    # 2 bytes of the weight and 4 of gradient, master weight and each moment; the optimizer has 4 more while it runs.
    assert by_matrix - split == pytest.approx(22 * embedding, rel=0.01)
    both = peak_gib(tmp_path, of_rank, whole_logits="1", sp="0") - peak_gib(
        tmp_path, of_rank, whole_logits="1", sp="0", tp_by_matrix="0"
    )
    assert both == pytest.approx(2 * 22 * embedding, rel=0.01)


def test_the_column_for_gathers_in_a_pipeline_is_the_key_of_the_layout(tmp_path: Path):
    piped = PIPED | {"stack": "fsdp", "accelerator": "h100", "tp": "4", "dp_replicate": "1", "dp_shard": "2"}
    piped |= {"zero": "3", "global_batch": "128"}
    given = ({}, {"zero_pp_gather": "step"}, {"zero_pp_gather": "microbatch"})
    rows = read_runs(write(tmp_path / "runs.csv", *({"zero_pp_gather": ""} | piped | cells for cells in given)))
    assert all(isinstance(run, PredictableRun) for run in rows)
    assert [run.candidates.shared.zero_pp_gather for run in rows] == ["step", "step", "microbatch"]
    assert rows[0].job == rows[1].job == rows[2].job
    (skipped,) = read_runs(write(tmp_path / "runs.csv", piped | given[2] | {"zero": "2"}))
    assert skipped.reason == "zero_pp_gather='microbatch' needs pp above 1 and zero=3; set that, or leave it out"


def test_recomputation_stops_at_the_last_tensor_that_is_read_since_pytorch_2_1(tmp_path: Path):
    row = NARROW | {"dropout": "0"}  # else its mask is read later
    whole, early = (seconds_with(tmp_path, row, date=date) for date in ("2023-09", "2023-10"))
    assert 0.93 < early / whole < 0.99
    none = [seconds_with(tmp_path, row, date=date, recompute="none") for date in ("2023-09", "2023-10")]
    assert none[0] == none[1]


def test_two_of_four_accelerators_without_a_switch_have_a_third_of_the_links(tmp_path: Path):
    pair = NARROW | {"tp": "2", "sp": "1", "dp_shard": "1", "zero": "0", "accelerators": "2"}
    four, eight = (read_runs(write(tmp_path / "runs.csv", pair | {"per_domain": n}))[0] for n in "48")
    assert isinstance(four, PredictableRun)
    assert isinstance(eight, PredictableRun)
    assert four.job.cluster.inside.peer_bytes_per_s == pytest.approx(eight.job.cluster.inside.bytes_per_s / 3)
    assert four.job.cluster.inside.switch_bytes_per_s == 0 < eight.job.cluster.inside.switch_bytes_per_s
    assert four.job.cluster.node_size == eight.job.cluster.node_size == 2
    assert step_time(four.job, four.candidates).total_s > step_time(eight.job, eight.candidates).total_s


def test_nanotron_deals_layers_by_their_weights(tmp_path: Path):
    # 16 layers of 4 x 2048 x 2048 + 3 x 8192 x 2048 = 67.1M weights and a head of 131072 x 2048, as much as four: 20 in
    # all. The eleventh layer exceeds ten, and is still in the first stage.
    (run,) = read_runs(write(tmp_path / "runs.csv", published("playbook-ccd6b7")))
    assert isinstance(run, PredictableRun)
    assert run.candidates.shared.stage_layers == (11, 5)


def test_nanotron_keeps_gradients_in_16_bits_next_to_their_sum_and_no_gathered_inputs(tmp_path: Path):
    (run,) = read_runs(write(tmp_path / "runs.csv", published("playbook-620e20")))
    assert isinstance(run, PredictableRun)
    stack, estimate = run.job.stack, memory.estimate_memory(run.job, run.candidates)
    assert estimate.kinds["gradients"] == pytest.approx(estimate.kinds["weights"] * (2 + 4) / 2)
    # Each of the 16 layers has two gathered inputs, the head has one; of four ranks of tp three parts are gathered.
    fsdp = STACKS["fsdp"]
    gathered = replace(stack, keeps_gathered=fsdp.keeps_gathered, logit_cut_bytes=fsdp.logit_cut_bytes)
    more = memory.estimate_memory(replace(run.job, stack=gathered), run.candidates).rank_bytes - estimate.rank_bytes
    inputs = (2 * 16 + 1) * 4 * 4096 * 2048 * 2 * 3 / 4
    assert more == pytest.approx(inputs + 4 * 4 * 4096 * 131072 / 4)


GRAPHED = published("bridge-gb200-aadd44")
"""A dense model in fp8 on GB200 by Megatron-Core of 2025-09."""


def seconds_with(path: Path, row: dict[str, str], **cells: str) -> float:
    """Predicted seconds of a step of a row with other cells."""
    (run,) = read_runs(write(path / "runs.csv", row | cells))
    assert isinstance(run, PredictableRun), run
    return float(step_time(run.job, run.candidates).total_s[0])


def test_a_table_without_the_columns_of_software_is_priced_by_stack_accelerator_and_date(tmp_path: Path):
    by_date = seconds_with(tmp_path, GRAPHED)
    stated = seconds_with(tmp_path, GRAPHED, attention="", cuda_graphs="step", gather_dtype="fp8")
    assert by_date == stated
    older = seconds_with(tmp_path, GRAPHED, date="2024-01")
    assert older == seconds_with(tmp_path, GRAPHED, cuda_graphs="none", gather_dtype="bf16")


def test_launches_of_small_layers_take_no_time_in_cuda_graphs(tmp_path: Path):
    # 8B over tp 8 has layers that compute for less time than their launches take.
    small = GRAPHED | {"tp": "8", "sp": "1", "dp_shard": "8", "zero": "1", "layers": "32", "d_model": "4096"}
    small |= {"heads": "32", "d_ffn": "14336", "micro_batch": "1", "global_batch": "8", "seq_len": "1024"}
    none, blocks, step = (seconds_with(tmp_path, small, cuda_graphs=name) for name in ("none", "blocks", "step"))
    assert blocks == step < 0.7 * none


def test_experts_wait_for_their_launches_unless_the_whole_step_is_a_cuda_graph(tmp_path: Path):
    none, blocks, step = (seconds_with(tmp_path, EXPERTS, cuda_graphs=name) for name in ("none", "blocks", "step"))
    assert step <= blocks < none


def test_weights_gathered_in_fp8_are_half_of_the_bytes_of_16_bits(tmp_path: Path):
    sent = []
    for name in ("bf16", "fp8"):
        (run,) = read_runs(write(tmp_path / "runs.csv", GRAPHED | {"gather_dtype": name}))
        assert isinstance(run, PredictableRun)
        job, of = run.job, run.candidates
        (dense,) = groups(job, of, rank_parameters(job, of))
        sent.append([float(each.n_bytes[0]) for each in data_messages(job, of.shared, GATHERED, dense)])
    assert sent[1] == pytest.approx(np.array(sent[0]) / 2)
    assert seconds_with(tmp_path, GRAPHED, gather_dtype="fp8") < seconds_with(tmp_path, GRAPHED, gather_dtype="bf16")


@pytest.mark.parametrize(("accelerator", "kernels"), [("h100", "fa2, fa3, cudnn"), ("b200", "fa2, cudnn, fa4")])
def test_newer_attention_kernels_of_an_accelerator_are_faster(tmp_path: Path, accelerator: str, kernels: str):
    row = published("torchtitan-h200-0ea750") | {"accelerator": accelerator, "seq_len": "32768", "precision": "bf16"}
    seconds = [seconds_with(tmp_path, row, attention=name) for name in kernels.split(", ")]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.8 * seconds[0]


def test_an_attention_kernel_that_an_accelerator_does_not_have_is_skipped_with_the_valid_ones(tmp_path: Path):
    (row,) = read_runs(write(tmp_path / "runs.csv", published("torchtitan-h200-0ea750") | {"attention": "fa4"}))
    assert isinstance(row, SkippedRun)
    assert row.reason == "attention=fa4 has no price on h200; priced there: fa2, fa3, cudnn, cudnn-fp8, flash-attn"


def test_a_row_that_is_not_usable_may_have_any_cell_empty(tmp_path: Path):
    unusable = {"usable": "no", "why_not": "no step time", "top_k": "", "mla_v": "", "peak_mem_gib": "1"}
    rows = read_runs(write(tmp_path / "runs.csv", EXPERTS | unusable, DENSE | {"accelerator": "abacus"}, DENSE))
    assert [type(row) for row in rows] == [SkippedRun, SkippedRun, PredictableRun]
