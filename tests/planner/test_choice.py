"""Proves that a layout in a line, in an array and in a run file is the same layout, and that bad lines are refused."""

import numpy as np
import pytest

from shardwright.config import parse
from shardwright.cost.formats import TRAINED
from shardwright.cost.hardware import cluster
from shardwright.cost.job import COLUMNS, Candidates, Job
from shardwright.layout.layout import Layout
from shardwright.model.presets import PRESETS, resolve
from shardwright.planner.choice import Choice, choice_at, read
from shardwright.planner.run_file import run_file
from shardwright.planner.space import groups
from shardwright.system.errors import InputError, LayoutError

MIXED = PRESETS["debug-moe"]


def test_a_layout_is_written_in_a_line_and_read_back():
    text = "tp=8,pp=4,dp_shard=2,zero=1,micro_batch=1"
    choice = read(text)
    assert choice == Choice(Layout(tp=8, pp=4, dp_shard=2, zero=1, sequence_parallel=True), 1)
    assert str(choice) == text


@pytest.mark.parametrize("spec", [MIXED, PRESETS["debug"]])
def test_every_layout_of_a_space_survives_being_written(spec):
    asked = Job(model=spec, cluster=cluster("h100:8"), global_batch=8, seq_len=64)
    choices = [choice_at(group, at) for group in groups(asked) for at in range(0, len(group), 5)]
    assert len(choices) > 300
    for choice in choices:
        assert read(str(choice)) == choice
        alone = choice.candidates
        assert choice_at(alone, 0) == choice


def test_what_is_left_out_is_as_in_a_run_file():
    assert read("dp_shard=4").layout.zero == 3
    assert read("dp_replicate=4").layout.zero == 0
    assert read("tp=2").layout.sequence_parallel
    assert not read("tp=2,sequence_parallel=false").layout.sequence_parallel
    assert read("").layout == Layout()
    assert read("pp=2,stage_layers=3+5").layout.stage_layers == (3, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tpp=8", ["tpp=8", "did you mean 'tp'?"]),
        ("tp", ["'tp'", "key=value"]),
        ("tp=two", ["tp=two", "a whole number"]),
        ("tp=2,tp=4", ["tp=4", "given twice"]),
        ("tp=2,sequence_parallel=yes", ["sequence_parallel=yes", "true or false"]),
        ("micro_batch=0", ["micro_batch=0", "1 or more"]),
        ("pp=2,stage_layers=3;5", ["stage_layers=3;5", "20+21+20"]),
        ("tp=0,zero=7,cq=1,ep=x", ["layout.tp=0", "layout.zero=7", "cq=1", "ep=x"]),
        ("dp_shard=2,zero=0", ["zero=0", "dp_replicate=2"]),
    ],
)
def test_a_bad_line_is_refused_with_all_its_problems(text: str, said: list[str]):
    with pytest.raises(LayoutError) as refused:
        read(text)
    for part in said:
        assert part in str(refused.value)
    assert len(refused.value.problems) == (4 if text.count(",") == 3 else 1)


def test_columns_are_the_arrays_of_candidates():
    arrays = {
        name for name, value in vars(Candidates.from_layout(Layout(), 1)).items() if isinstance(value, np.ndarray)
    }
    assert set(COLUMNS) == arrays


def written(asked: Job, name: str, choice: Choice, budget_tokens: float | None = None):
    import tomllib

    return parse(tomllib.loads(run_file(asked, name, choice, "shardwright plan", budget_tokens)))


def test_every_layout_of_a_space_is_written_as_a_run_file_that_says_the_same():
    asked = Job(model=MIXED, cluster=cluster("h100:8"), global_batch=8, seq_len=64)
    for choice in [choice_at(group, at) for group in groups(asked) for at in range(0, len(group), 40)]:
        config = written(asked, "debug-moe", choice)
        assert config.layout.layout() == choice.layout
        assert config.batch.micro_batch == choice.micro_batch
        assert (config.batch.global_batch, config.batch.seq_len) == (8, 64)
        assert config.precision.compute == "bf16"


def test_a_written_run_is_as_long_as_its_budget_and_says_what_to_fill_in():
    asked = Job(model=resolve("llama-3.1-8b"), cluster=cluster("h100:8"), global_batch=128, seq_len=8192)
    choice = Choice(Layout(dp_shard=8, zero=3), 1)
    assert written(asked, "llama-3.1-8b", choice, 15e9).steps == round(15e9 / (128 * 8192))
    lines = run_file(asked, "llama-3.1-8b", choice, "shardwright plan --model x").splitlines()
    assert lines[0] == "# Written by `shardwright plan --model x`."
    assert sorted(line.split(" = ")[0] for line in lines if "fill in:" in line) == ["out", "path", "steps"]


def test_a_sequence_beyond_the_models_range_is_written_with_the_range_that_train_needs():
    asked = Job(model=PRESETS["debug"], cluster=cluster("h100:8"), global_batch=8, seq_len=1024)
    assert written(asked, "debug", Choice(Layout(dp_shard=8, zero=3), 1)).model.spec().max_seq_len == 1024


def test_a_precision_that_train_does_not_have_is_not_written():
    asked = Job(model=PRESETS["debug"], cluster=cluster("b200:8"), global_batch=8, seq_len=128, precision="mxfp8")
    with pytest.raises(InputError, match="fp32 or tf32 or bf16 or fp16 or fp8"):
        run_file(asked, "debug", Choice(Layout(dp_shard=8, zero=3), 1), "shardwright plan")


@pytest.mark.parametrize("precision", TRAINED)
def test_a_precision_is_written_with_the_keys_that_plan_for_it(precision: str):
    model = resolve("llama-3.2-1b")
    asked = Job(model=model, cluster=cluster("h100:8"), global_batch=8, seq_len=128, precision=precision)
    section = written(asked, "llama-3.2-1b", Choice(Layout(dp_shard=8, zero=3), 1)).precision
    assert section.planned == precision
    assert {key: getattr(section, key) for key in TRAINED[precision]} == TRAINED[precision]
