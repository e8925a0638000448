"""Proves that steps of GRPO are priced as published ones were measured, and that their parts follow their formulas."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from shardwright.cost.hardware import cluster
from shardwright.cost.step import estimate
from shardwright.layout.layout import Layout
from shardwright.planner.runs import read_table
from shardwright.rl.answers import AnswerLengths, packed
from shardwright.rl.measured import FITTED, PUBLISHED, STEPS, PredictedStep, evaluate
from shardwright.rl.search import split_text, splits
from shardwright.rl.step import (
    ANSWERS,
    GENERATION,
    MOVING,
    OTHER,
    RATES,
    SCORING,
    TRAINING,
    WEIGHTS,
    GenerationPool,
    RLStep,
    RLTask,
    generation_pool,
    training_pool,
)
from shardwright.rl.transfer import weight_transfer
from shardwright.serving import forms
from shardwright.serving.engines import engine_of
from shardwright.serving.rates import fitted
from shardwright.serving.search import ServingLayout
from shardwright.serving.setting import Degrees, PassBatch, Serving, Settings
from shardwright.serving.work import period_s
from shardwright.system.errors import InputError
from tests.cost.jobs import job


@pytest.fixture(scope="module")
def rows() -> list[PredictedStep]:
    return list(evaluate().rows)


@pytest.mark.prove
def test_published_steps_that_no_constant_was_fitted_to_are_predicted_within_20_percent(rows: list[PredictedStep]):
    skipped = [row for _, row in read_table(PUBLISHED, STEPS) if row.why_not]
    unseen = [each for each in rows if each.row.version != FITTED]
    assert len(unseen) + sum(each.version != FITTED for each in skipped) == 42
    assert len(unseen) == 40
    assert fmean(abs(each.error) for each in unseen) < 0.20
    assert fmean(each.error for each in unseen) == pytest.approx(0, abs=0.06)


@pytest.mark.prove
def test_a_step_off_policy_takes_the_longer_of_both_sides_and_on_policy_all_parts(rows: list[PredictedStep]):
    for each in rows:
        parts = each.step.parts_s
        generating, training = parts[GENERATION] + parts[ANSWERS], parts[SCORING] + parts[TRAINING] + parts[MOVING]
        both = max(generating, training) if each.row.off_policy_steps else generating + training
        assert each.step.total_s == pytest.approx(both + parts[WEIGHTS] + parts[OTHER])


@pytest.mark.prove
def test_a_rank_that_trains_receives_every_weight_that_it_does_not_have(rows: list[PredictedStep]):
    for each in rows:
        step, sent = each.step, each.step.transfer
        whole = 2 * step.task.job.model.n_parameters
        received = sent.between_nodes_bytes + sent.inside_bytes
        # The fullest rank has the most weights already; a rank with fewer receives more.
        assert whole - step.training.weight_bytes <= received * 1.001 <= whole * 1.002
        assert sent.broadcast_bytes == (whole if step.separate else 0)
        if step.training.estimate.job.cluster.nodes == 1:
            assert sent.between_nodes_bytes == 0


def test_lengths_have_the_mean_the_tail_and_the_maximum_that_were_given():
    answers = AnswerLengths.with_tail(1000, 2500, 4096)
    lengths = sorted(answers.lengths(2000))
    assert fmean(lengths) == pytest.approx(1000, rel=0.01)
    assert lengths[1900] == pytest.approx(2500, rel=0.02)
    assert max(lengths) <= 4096
    assert sum(each == 4096 for each in lengths) / 2000 == pytest.approx(answers.cut_share, abs=0.002)
    with pytest.raises(InputError, match="valid: 1000 to"):
        AnswerLengths.with_tail(1000, 900, 4096)


def test_packing_needs_few_more_sequences_than_tokens_fill_and_exceeds_none():
    lengths = AnswerLengths(1000, 4096).lengths(512)
    assert sum(lengths) / 4096 <= packed(lengths, 4096) <= 1.1 * sum(lengths) / 4096 + 1
    assert packed([3000] * 10, 4096) == 10
    assert packed([2048] * 10, 4096) == 5


LLAMA = "h100,bf16,16,0,4096,1060,2048,512,1,1,1,1,1,2,1562,97.7,,0.6,,,,full"
DEEPSEEK = "h100,bf16,256,0,1536,745,512,512,32,1,1,1,16,16,11,154,,0.6,,3,2,full"
REFUSED = (
    (LLAMA, "h100,bf16,16,0", "h100,bf16,-16,0", "accelerators='-16': valid: a whole number"),
    (LLAMA, ",full", ",half", "recompute='half': valid: none, full"),
    (LLAMA, "2048,512", "2048,500", "answers_per_update=500 does not divide answers=2048"),
    (LLAMA, ",512,1,1,", ",512,64,1,", "generation_tp x generation_pp = 64 does not divide 16 accelerators"),
    (LLAMA, ",512,1,1,", ",512,3,1,", "generation_tp x generation_pp = 3 does not divide 16 accelerators"),
    (
        LLAMA,
        "16,0,4096,1060,2048,512,1,1,",
        "24,0,4096,1060,2048,512,24,1,",
        "cannot be partitioned into 24 equal parts",
    ),
    (
        LLAMA,
        "1,1,1,1,1,2",
        "1,1,1,1,7,2",
        "ep=7 does not divide the 8 accelerators of a stage; valid: 1, 2, 4, 8; ep=7 shards experts",
    ),
    (DEEPSEEK, ",1,16,16,", ",1,1,48,", "tp x cp x pp = 48 does not divide 256 accelerators that train"),
    (LLAMA, ",0.6,,,,", ",0.6,,10,10,", "first_layers and last_layers with pp=2; valid: pp of 3 or more"),
    (LLAMA, ",0.6,,,,", ",0.6,,,10,", "first_layers= with last_layers=10; valid: both, or none"),
    (LLAMA, "2,1562,97.7,,0.6,,,,", "4,1562,97.7,,0.6,,40,10,", "leave -18 of 32 layers, and pp=4 has 2 stages"),
    (LLAMA, "2,1562,97.7,,0.6,,,,", "4,1562,97.7,,0.6,,4,3,", "leave 25 of 32 layers, and pp=4 has 2 stages"),
    (LLAMA, "h100,bf16,16,0", "h100,bf16,16,1", "off_policy_steps=1 without generation_accelerators"),
    (LLAMA, "h100,bf16", "a100-80gb,fp8", "precision=fp8 on a100-80gb; valid there: bf16"),
    (LLAMA, "h100,bf16", "h1000,bf16", "h1000"),
    (LLAMA, "1060", "", "mean_output_len is empty, and this row needs it"),
    (LLAMA, ",0.6,", ",,", "generation_memory_share is empty, and this row needs it"),
    (LLAMA, ",0.6,", ",0.1,", "the cache has no room for the longest answer"),
    (LLAMA, "2,1562,97.7", "2,,97.7", "tokens_per_s_per_accelerator is empty, and this row needs it"),
    (LLAMA, ",97.7,", ",,", "step_time_s is empty, and this row needs it"),
)


@pytest.mark.parametrize(("row", "old", "new", "rule"), REFUSED)
def test_a_row_is_refused_with_the_cell_and_its_rule(tmp_path: Path, row: str, old: str, new: str, rule: str):
    text = PUBLISHED.read_text()
    assert row in text
    assert old in row
    with pytest.raises(InputError) as error:
        evaluate(_written(tmp_path, text.replace(row, row.replace(old, new, 1), 1)))
    assert rule in "; ".join(each.partition(": ")[2] for each in error.value.problems), error.value.problems


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("packing,why_not", "packed,why_not", "column 'packed' is not known"),
        ("2025-12-01", "2025-13-01", "date='2025-13-01': valid: YYYY-MM-DD"),
        (",llama-3.1-8b,", ",lama-3.1-8b,", "model 'lama-3.1-8b' is not known"),
    ],
)
def test_a_table_is_refused_with_the_cell_and_its_rule(tmp_path: Path, old: str, new: str, rule: str):
    with pytest.raises(InputError) as error:
        evaluate(_written(tmp_path, PUBLISHED.read_text().replace(old, new, 1)))
    assert rule in "; ".join(error.value.problems), error.value.problems


def _written(folder: Path, text: str) -> Path:
    table = folder / "steps.csv"
    table.write_text(text)
    return table


def test_a_trainer_in_fp32_sends_as_many_bytes_as_one_in_16_bits():
    narrow, wide = (
        weight_transfer(
            cluster("h100:8"),
            estimate(job(on="h100:8", precision=precision, global_batch=8), Layout(dp_shard=8, zero=3), 1),
            n_bytes * 1e9, 16e9, separate=False, link_share=0.8,
        )
        for precision, n_bytes in (("bf16", 2), ("fp32", 4))
    )  # fmt: skip
    assert vars(wide) == vars(narrow)
    assert wide.inside_bytes > 0


def test_a_cut_tail_is_the_same_distribution_below_the_cut():
    whole = AnswerLengths.with_tail(1000, 2500, 8192)
    cut = whole.without_tail(2000)
    assert cut is not None
    assert (cut.maximum, cut.spread) == (2501, pytest.approx(whole.spread, rel=0.02))
    assert cut.percentile(0.5) == pytest.approx(whole.percentile(0.5), rel=0.02)
    assert AnswerLengths(1000, 2000).without_tail(2000) is None


@pytest.mark.prove
def test_the_constants_are_those_that_the_fit_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import fit_rl

    fit_rl.main()
    assert capsys.readouterr().out.splitlines()[0] == str(vars(RATES))


def task(on: str = "h100:2", model: str = "llama-3.2-1b", **changes: Any) -> RLTask:
    """A step of 128 answers of 300 tokens on average."""
    training, engine = job(model, on, seq_len=1024, global_batch=1), engine_of("vllm")
    assert engine is not None
    rates = fitted()[0].rates(engine.name, training.cluster.accelerator.die)
    serving = Serving(model=training.model, cluster=training.cluster, rates=rates)
    values = {"prompt_len": 100, "answers": AnswerLengths(300, 924), "n_answers": 128} | changes
    return RLTask(job=training, serving=serving, engine=engine, **values)


def test_answers_of_equal_length_take_the_passes_of_closed_forms_and_a_longer_tail_takes_longer():
    def pool(**answers: Any) -> GenerationPool:
        found = generation_pool(task(n_answers=64, answers=AnswerLengths(**answers)), ServingLayout(Degrees(1), 2), 0.9)
        assert found is not None
        return found

    equal = pool(mean=600, maximum=924, spread=1e-6)
    decoding = PassBatch(requests=32.0, context=forms.middle(100, 600), logits=32.0)
    counted_s = 600 * float(period_s(task().serving, Settings.from_layouts([Degrees(1)]), decoding)[0])
    assert equal.seconds / RATES.generation == pytest.approx(counted_s, rel=0.05)
    assert equal.tail_s == pytest.approx(0, abs=0.02 * equal.seconds)
    short, longer = (pool(mean=300, maximum=924, spread=spread).seconds for spread in (0.1, 0.8))
    assert longer > 1.5 * short


def test_weights_cross_each_link_as_counted():
    given = task("h100:16", "llama-3.1-8b")
    whole = 2.0 * given.job.model.n_parameters
    halves = estimate(given.training_job(16, 8), Layout(pp=2, dp_shard=8, zero=1), 1)
    sent = weight_transfer(given.cluster, halves, whole / 2, whole, separate=False, link_share=0.5)
    assert (sent.between_nodes_bytes, sent.inside_bytes, sent.broadcast_bytes) == (whole / 2, 0.0, 0.0)
    assert sent.seconds == pytest.approx(whole / 2 / (0.5 * given.cluster.across.bytes_per_s))
    sharded = estimate(given.training_job(16, 16), Layout(dp_shard=16, zero=3), 1)
    sent = weight_transfer(given.cluster, sharded, whole / 16, whole, separate=True, link_share=0.5)
    assert (sent.between_nodes_bytes, sent.inside_bytes) == (whole / 2, pytest.approx(whole * 7 / 16))
    assert sent.broadcast_bytes == whole
    assert sent.seconds == pytest.approx(whole / (0.5 * given.cluster.across.bytes_per_s))


def test_parts_add_up_on_policy_and_the_shorter_side_is_hidden_off_policy():
    given = task("h100:4")
    pool = generation_pool(given, ServingLayout(Degrees(1), 2), 0.9)
    assert pool is not None
    training = training_pool(given, "", estimate(given.training_job(2, 2), Layout(dp_shard=2, zero=1), 1))
    step = RLStep(given, pool, training, separate=True)
    parts = step.parts_s
    assert step.total_s == pytest.approx(sum(parts.values()))
    sides = parts[GENERATION] + parts[ANSWERS], parts[SCORING] + parts[TRAINING] + parts[MOVING]
    behind = replace(step, task=replace(given, off_policy_steps=1))
    assert behind.total_s == pytest.approx(max(sides) + parts[WEIGHTS] + parts[OTHER])
    alone = replace(step, task=replace(given, reference=False)).parts_s
    assert alone[SCORING] == pytest.approx(parts[SCORING] / 2)
    assert alone[MOVING] == 0 < parts[MOVING]


def test_an_engine_without_room_for_the_longest_answer_is_no_choice():
    assert generation_pool(task(model="llama-3.1-8b"), ServingLayout(Degrees(1), 2), 0.2) is None


@pytest.mark.parametrize(
    ("on", "numbers"), [("h100:1", [0]), ("h100:3", [0, 1, 2]), ("h100:64", [0, *range(8, 64, 8)])]
)
def test_splits_are_at_most_8_in_whole_nodes(on: str, numbers: list[int]):
    assert splits(task(on)) == numbers
    assert splits(task(on, off_policy_steps=1)) == numbers[1:]
    assert split_text(numbers[-1], 1) == (
        f"{numbers[-1]} generate, 1 train" if numbers[-1] else "1 accelerator generates and trains"
    )
