"""Proves that every formula shown comes to the number shown, that no number comes from nowhere, and that the numbers
are those of the prediction."""

import json
from collections import Counter
from dataclasses import replace
from math import ceil, log2

import numpy as np
import pytest

from shardwright.cost.expert_load import UnevenLoad
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.cost.ledger import NOTATION, LedgerEntry, identifier
from shardwright.cost.stack import STACKS
from shardwright.model.presets import PRESETS, resolve
from shardwright.planner.choice import PricedLayout, read
from shardwright.planner.explain import explain, lines
from tests.marks import rest_prove

MODULE = " with an MTP module"
LAYOUTS = [
    ("llama-3.1-70b", "h100:64", 8192, "tp=8,pp=4,dp_shard=2,zero=1,micro_batch=1"),
    ("llama-3.1-70b", "h100:64", 8192, "tp=8,pp=4,pp_schedule=interleaved-1f1b,virtual_stages=2,dp_shard=2,zero=3"),
    ("llama-3.1-8b", "h100:8", 8192, "dp_shard=8,zero=3,recompute=full,micro_batch=2"),
    ("llama-3.2-1b", "h100:8", 8192, "dp_shard=8,zero=3,loss_chunk_tokens=3000,micro_batch=4"),
    ("llama-3.1-8b", "h100:8", 8192, "tp=2,pp=4,pp_schedule=zb-h1,loss_chunk_tokens=4096"),
    ("llama-3.1-8b", "a100:16", 8192, "tp=2,cp=2,dp_replicate=2,dp_shard=2,zero=2"),
    ("llama-3.1-8b", "h100:16", 8192, "cp=2,cp_method=ulysses,dp_replicate=8,zero=0"),
    ("llama-3.1-8b", "h100:16", 8192, "cp=4,cp_method=allgather,tp=2,dp_shard=2,zero=1"),
    ("llama-3.1-8b", "h100:16", 65536, "cp=8,cp_method=ring,dp_shard=2,zero=3"),
    ("deepseek-v3", "h100:256", 4096, "pp=16,pp_schedule=dualpipe,dp_shard=16,ep=16,zero=1"),
    ("deepseek-v3", "h100:256", 4096, "pp=8,pp_schedule=zb-v,dp_shard=32,ep=32,zero=3,zero_pp_gather=microbatch"),
    ("gpt-175b", "a100:96", 2048, "tp=8,pp=12,recompute=full"),
    ("gpt-175b", "a100:96", 2048, "tp=8,pp=12,sequence_parallel=false"),
    ("qwen3-30b-a3b", "h100:16", 4096, "tp=2,dp_shard=8,ep=16,zero=1,recompute=full"),
    ("qwen3-30b-a3b", "h100:16", 4096, "tp=2,dp_shard=8,ep=16,zero=1,recompute=selective"),
    ("qwen3-30b-a3b", "h100:16", 4096, "tp=2,dp_shard=8,ep=16,zero=1,place_experts_every=100"),
    ("llama-3.1-70b", "h100:64", 8192, "tp=8,pp=4,dp_shard=2,zero=1,recompute=selective,recompute_layers=3"),
    (
        "deepseek-v3",
        "h100:256",
        4096,
        "pp=8,dp_shard=32,ep=32,zero=1,recompute=selective,recompute_modules=mla_up+experts",
    ),
    ("debug", "h100:8", 128, "pp=2,dp_shard=4,zero=2"),
    ("gemma2-2b", "tpu-v5e:4", 8192, "cp=2,dp_shard=2,zero=3,micro_batch=2"),
    ("llama-4-scout", "h100:32", 20480, "cp=2,dp_shard=16,ep=16,zero=3"),
    ("llama-3.1-8b", "h100:8", 8192, "dp_shard=8,zero=3,recompute=selective,recompute_modules=rope"),
    ("llama-3.1-70b", "h100:64@50Gb", 4096, "tp=4,pp=4,pp_schedule=zb-h1,dp_shard=4,zero=2"),
    ("deepseek-v3" + MODULE, "h100:256", 4096, "pp=16,dp_shard=16,ep=16,zero=1,recompute=full"),
]
CASES = [(*each, "shardwright", "bf16") for each in LAYOUTS]
ALIKE_NAMES = ["qwen1.5-moe-a2.7b", "qwen3-next-80b-a3b"]  # with parameters shared.gate and shared_gate
CASES += [(*LAYOUTS[0], stack, "bf16") for stack in STACKS if stack != "shardwright"]
CASES += [(*LAYOUTS[9], "megatron", "fp16"), (*LAYOUTS[0], "megatron-core", "fp8"), (*LAYOUTS[2], "fsdp", "fp32")]
UNITS = {"B", "s", "FLOP", "FLOP/s", "B/s", "1/s", "tokens", "ranks", "layers", ""}


def priced(name: str, hardware: str, seq_len: int, text: str, stack: str = "shardwright", precision: str = "bf16"):
    model = replace(resolve(name.removesuffix(MODULE)), mtp_modules=int(name.endswith(MODULE)))
    job = Job(
        model=model, cluster=cluster(hardware), global_batch=960, seq_len=seq_len, stack=STACKS[stack],
        precision=precision, expert_load=UnevenLoad("cv=0.3", 0.3) if "place_experts" in text else None,
    )  # fmt: skip
    return PricedLayout.from_choice(job, read(text))


def evaluated(entry: LedgerEntry) -> float:
    """The formula with its inputs, by nothing but arithmetic."""
    names = {"max": max, "min": min, "sum": sum, "ceil": ceil, "log2": log2}
    names |= {name: np.array(value) if isinstance(value, tuple) else value for name, value in entry.inputs.items()}
    *steps, last = entry.formula.split("; ")
    for step in steps:
        name, _, expression = step.partition(" = ")
        names[name] = eval(expression, {"__builtins__": {}}, names)
    return float(eval(last, {"__builtins__": {}}, names))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(map(str, case)))
def case(request: pytest.FixtureRequest) -> tuple[PricedLayout, list[LedgerEntry]]:
    of = priced(*request.param)
    return of, explain(of)


def test_every_formula_comes_to_its_number(case: tuple[PricedLayout, list[LedgerEntry]]):
    formulas_come_to_their_numbers(case[1])


@pytest.mark.parametrize("preset", rest_prove(PRESETS, *ALIKE_NAMES))
def test_every_formula_of_every_preset_comes_to_its_number(preset: str):
    formulas_come_to_their_numbers(explain(priced(preset, "h100:8", 2048, "pp=2,dp_shard=4,zero=2,micro_batch=2")))


def formulas_come_to_their_numbers(entries: list[LedgerEntry]):
    for entry in entries:
        assert entry.unit in UNITS, entry
        if entry.formula:
            assert evaluated(entry) == pytest.approx(entry.value, rel=1e-9, abs=1e-12), entry
        else:
            assert entry.source, entry


def test_every_input_is_a_symbol_or_another_line(case: tuple[PricedLayout, list[LedgerEntry]]):
    values: dict[str, list[object]] = {}
    for entry in case[1]:
        values.setdefault(identifier(entry.what), []).append(entry.value)
    for entry in case[1]:
        if entry.source != "model/modules.py":  # whose inputs are the rows of that table
            for name, value in entry.inputs.items():
                there = values.get(name, [])
                assert name in NOTATION or any(value == pytest.approx(each, rel=1e-12) for each in there), (name, entry)


def test_what_adds_up_is_the_prediction(case: tuple[PricedLayout, list[LedgerEntry]]):
    of, entries = case
    value = {entry.what: entry.value for entry in entries}
    rank = of.memory.fullest_rank
    assert value["peak"] == pytest.approx(of.peak_bytes, rel=1e-12)
    memory = {entry.what: entry.value for entry in entries if entry.section.startswith("Memory")}
    kinds = {kind: float(held[0, rank]) for kind, held in of.memory.kinds.items() if held[0, rank]}
    assert {kind: memory[kind] for kind in kinds} == pytest.approx(kinds, rel=1e-12)
    assert value["step"] == pytest.approx(of.step_s, rel=1e-12)
    parts = {kind: seconds for kind, seconds in of.parts_s.items() if seconds}
    told = {
        entry.what: entry.value
        for entry in entries
        if entry.section.startswith(("Pipeline", "Work", "Data", "Step")) and entry.what in parts
    }
    assert told == pytest.approx(parts, rel=1e-9)
    assert value["model"] == of.job.model.n_parameters


def test_a_name_stands_once_in_a_section_and_for_every_number_of_a_layer_there_is_a_line(case):
    counted = Counter((entry.section, entry.what) for entry in case[1])
    assert {each for each, count in counted.items() if count > 1} == set()


def test_only_what_is_simulated_or_a_table_s_has_no_formula():
    without = {entry.what for case in CASES[:9] for entry in explain(priced(*case)) if not entry.formula}
    assert without == {"makespan", "workspace", "layers of the rank"}


def test_all_to_alls_ulysses_recomputation_and_hidden_messages_show_their_numbers():
    shown = {entry.what for case in CASES for entry in explain(priced(*case))}
    assert {
        "tokens of experts, all-to-all",
        "queries, keys and values, all-to-all",
        "recomputation, I",
        "launch, F",
        "gradients of inputs, exposed",
        "weights, all-gather, exposed",
        "messages that no slack takes",
    } <= shown


def test_the_text_has_each_formula_once_for_all_that_it_prices_and_says_what_its_symbols_mean():
    text = list(lines(explain(priced(*LAYOUTS[0]))))
    assert sum(line.startswith("  w = max(M / 256") for line in text) == 2, "of the head and of a layer"
    assert "  tokens of a step = global_batch * s = 960 * 8192 = 7864320 tokens" in text
    assert any(line.startswith("  T_read: of which a matmul keeps") for line in text)
    json.dumps([vars(entry) for entry in explain(priced(*LAYOUTS[0]))])
