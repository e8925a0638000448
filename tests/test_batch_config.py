"""Proves that stages of the batch that cannot be trained are refused with the rule and the way out, before a run."""

from pathlib import Path

import pytest

from shardwright.config import RunConfig, load
from shardwright.config.settle import fullest_stage_config, job_of, settled
from shardwright.dry_run.run import _changed, _changes
from shardwright.layout.layout import Layout
from shardwright.planner.space import CandidateRows, _group
from shardwright.system.errors import ConfigError, LayoutError
from shardwright.training.run import for_less_memory

RUN_FILE = """
out = "run"
steps = 20
data = { path = "tokens" }
model = { max_seq_len = 128 }
layout = { dp_shard = 2 }
batch = { seq_len = 64, global_batch = 8, micro_batch = 2, stages = [STAGES] }
"""


def config_of(tmp_path: Path, *stages: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.replace("STAGES", ", ".join(f"{{ {stage} }}" for stage in stages)))
    return load(path, overrides)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (["global_batch = 4"], "batch.stages.0: from_step and from_tokens are missing; give one of them"),
        (["from_step = 1, from_tokens = 9.0, global_batch = 4"], "from_step and from_tokens are both given"),
        (["from_step = 4"], "batch.stages.0 changes nothing; give one or more of global_batch, micro_batch, seq_len"),
        (
            ["from_step = 4, global_batch = 16", "from_tokens = 1e3, global_batch = 8"],
            "batch.stages.1.from_tokens=1,000 is not after the stage before, which starts at step 4 (2,048 tokens)",
        ),
        (["from_step = 20, global_batch = 16"], "from_step=20 is not reached: the run has steps=20 (10,240 tokens)"),
        (["from_step = 4, global_batch = 18"], "batch.stages.0: batch.global_batch=18 is not a multiple of"),
        (["from_step = 4, seq_len = 256"], "batch.stages.0: batch.seq_len=256 is longer than model.max_seq_len=128"),
        (
            ["from_step = 4, seq_len = 96"],
            "batch.seq_len=64 does not divide the longest of the run, 96, whose sequences it cuts; nearest: 48, 96",
        ),
        (
            ["from_step = 4, seq_len = 128", "from_step = 5, seq_len = 32, global_batch = 6, micro_batch = 1"],
            "batch.stages.1.global_batch=6 sequences of 32 tokens are no multiple of the longest sequences, of 128",
        ),
        (
            ["from_step = 4, seq_length = 32"],
            "batch.stages.0.seq_length: there is no such key; did you mean 'seq_len'?",
        ),
    ],
)
def test_a_stage_that_cannot_be_trained_is_answered_with_the_way_out(tmp_path: Path, stages: list[str], said: str):
    with pytest.raises(ConfigError) as error:
        config_of(tmp_path, *stages)
    (problem,) = error.value.problems
    assert said in problem


def test_documents_are_not_cut_for_a_stage_of_shorter_sequences(tmp_path: Path):
    with pytest.raises(ConfigError, match="a document's sequence is not cut again; set "):
        config_of(tmp_path, "from_step = 4, seq_len = 32", overrides=("data.sequences=documents",))


def test_the_stage_that_needs_most_memory_has_the_longest_micro_batch_and_of_equal_ones_is_the_last(tmp_path: Path):
    stages = "from_step = 4, seq_len = 128", "from_step = 6, global_batch = 16", "from_step = 8, seq_len = 32"
    batch = fullest_stage_config(config_of(tmp_path, *stages)).batch
    assert (batch.seq_len, batch.global_batch, batch.micro_batch, batch.stages) == (128, 16, 2, [])


def test_a_micro_batch_is_lowered_by_the_keys_that_set_it(tmp_path: Path):
    config = config_of(tmp_path, "from_step = 4, micro_batch = 4", "from_step = 8, global_batch = 16")
    assert config.batch.lowered("micro_batch", 3) == {"batch.stages.0.micro_batch": 3}
    assert config.batch.lowered("micro_batch", 1) == {"batch.micro_batch": 1, "batch.stages.0.micro_batch": 1}
    said = for_less_memory(config)
    assert said.startswith("batch.stages.0.micro_batch below 4, a larger layout.dp_shard")
    assert "layout.loss_chunk_tokens, " in said
    proposed = list(_changes(config))
    assert {"batch.stages.0.micro_batch": 2} in proposed
    lowered = _changed(config, {"batch.stages.0.micro_batch": 2, "layout.recompute": "full"})
    assert [stage.micro_batch for stage in lowered.batch.schedule.stages] == [2, 2, 2]
    assert config_of(tmp_path, "from_step = 4, micro_batch = 4", overrides=("batch.stages.0.micro_batch=2",)) == (
        config_of(tmp_path, "from_step = 4, micro_batch = 2")
    )
    with pytest.raises(ConfigError, match=r"there is no 1; numbers of the list: 0 to 0"):
        config_of(tmp_path, "from_step = 4, micro_batch = 4", overrides=("batch.stages.1.micro_batch=2",))


def test_no_remedy_chunks_the_loss_of_pairs(tmp_path: Path):
    pairs = ("preference.kind=dpo", "data.attention=document", "data.positions=document")
    config = config_of(tmp_path, "from_step = 4, global_batch = 16", overrides=pairs)
    assert "loss_chunk_tokens" not in for_less_memory(config)
    for changes in _changes(config):
        assert "layout.loss_chunk_tokens" not in changes
    with pytest.raises(LayoutError) as error:
        settled(config_of(tmp_path, "from_step = 4, micro_batch = 4", overrides=(*pairs, "layout.recompute=auto")), 1e6)
    assert "loss_chunk_tokens" not in str(error.value)
    job = job_of(fullest_stage_config(config))
    assert job.pairs
    for shared in (Layout(loss_chunk_tokens=16), Layout()):
        rows = CandidateRows.from_degrees(job, 1, "zigzag", on_host=False)
        assert _group(job, shared, rows)[1].any() == (not shared.loss_chunk_tokens)
