"""Proves that steps of GRPO are priced as published ones were measured, and that their parts follow their formulas."""

from pathlib import Path
from statistics import fmean

import pytest

from shardwright.planner.runs import read_table
from shardwright.rl.answers import AnswerLengths, packed
from shardwright.rl.measured import FITTED, PUBLISHED, STEPS, PredictedStep, evaluate
from shardwright.rl.step import ANSWERS, GENERATION, MOVING, OTHER, SCORING, TRAINING, WEIGHTS
from shardwright.system.errors import InputError


@pytest.fixture(scope="module")
def rows() -> list[PredictedStep]:
    return list(evaluate().rows)


def test_published_steps_that_no_constant_was_fitted_to_are_predicted_within_20_percent(rows: list[PredictedStep]):
    skipped = [row for _, row in read_table(PUBLISHED, STEPS) if row.why_not]
    unseen = [each for each in rows if each.row.version != FITTED]
    assert len(unseen) + sum(each.version != FITTED for each in skipped) == 42
    assert len(unseen) == 40
    assert fmean(abs(each.error) for each in unseen) < 0.20
    assert fmean(each.error for each in unseen) == pytest.approx(0, abs=0.06)


def test_a_step_off_policy_takes_the_longer_of_both_sides_and_on_policy_all_parts(rows: list[PredictedStep]):
    for each in rows:
        parts = each.step.parts_s
        generating, training = parts[GENERATION] + parts[ANSWERS], parts[SCORING] + parts[TRAINING] + parts[MOVING]
        both = max(generating, training) if each.row.off_policy_steps else generating + training
        assert each.step.total_s == pytest.approx(both + parts[WEIGHTS] + parts[OTHER])


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


def test_a_table_is_refused_with_the_cell_and_its_rule(tmp_path: Path):
    text = PUBLISHED.read_text()
    for old, new, rule in (
        ("h100,bf16,16,0,4096,1060", "h100,bf16,-16,0,4096,1060", "accelerators='-16': valid: a whole number"),
        (",full,1,", ",half,1,", "recompute='half': valid: none, full"),
        ("2048,512,1,1,1,1,1,2", "2048,500,1,1,1,1,1,2", "answers_per_update=500 does not divide answers=2048"),
        ("packing,why_not", "packed,why_not", "column 'packed' is not known"),
    ):
        table = tmp_path / "steps.csv"
        table.write_text(text.replace(old, new, 1))
        with pytest.raises(InputError) as error:
            evaluate(table)
        assert rule in "; ".join(error.value.problems), error.value.problems
