"""YAML of NeMo and Megatron-Bridge, and MLPerf's config_*.sh."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cost.job import Candidates
from shardwright.model.presets import PRESETS
from shardwright.planner.choice import Choice
from shardwright.readers.foreign_run import ForeignRun, Request, read_configuration
from shardwright.readers.nemo import yaml_settings
from shardwright.readers.table import NO_EFFECT, READ, Setting
from shardwright.system.errors import InputError

NEMO = """\
# Values: Llama 3 8B of NeMo's launcher, with context parallelism of 2.
name: megatron_llama3_8b
trainer: {devices: 8, num_nodes: 16, precision: bf16, max_steps: 300000}
exp_manager:
  explicit_log_dir: null
model:
  mcore_gpt: true
  micro_batch_size: 1
  global_batch_size: 512
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 2
  context_parallel_size: 2
  encoder_seq_length: 8192
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  hidden_dropout: 0.0
  attention_dropout: 0.0
  normalization: rmsnorm
  bias: false
  activation: fast-swiglu
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  rotary_base: 500000.0
  sequence_parallel: true
  activations_checkpoint_granularity: null
  fp8: false
  fp8_hybrid: true
  layernorm_epsilon: 1e-5
  tokenizer: {library: huggingface, type: meta-llama/Meta-Llama-3-8B}
  optim: {name: mcore_distributed_optim, overlap_grad_sync: true, lr: 0.0003}
  data: {seq_length: "${model.encoder_seq_length}", num_workers: 2}
"""
BRIDGE = """\
model:
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 5
  context_parallel_size: 2
  sequence_parallel: true
  seq_length: 8192
train: {train_iters: 100, micro_batch_size: 1, global_batch_size: 128}
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true}
mixed_precision: bf16_with_fp8_current_scaling_mixed
checkpoint: {save: /checkpoints}
"""
MLPERF = """\
# Values: GPT-3 175B of MLPerf training 3.0 on 512 H100.
export MINIBS=192
export TENSOR_MODEL_PARALLEL=4
export PIPELINE_MODEL_PARALLEL=8
export DGXNNODES=64
export DGXSYSTEM=$(basename $(readlink -f ${BASH_SOURCE[0]}) | sed 's/^config_//')
export WALLTIME=$(( ${NEXP:-1} * 190 ))
source $(dirname ${BASH_SOURCE[0]})/config_common.sh
export MICRO_BATCH_SIZE=1
export NEW_SWITCH=1
"""
COMMON = "export DGXNGPU=8\nexport SEQ_PARALLEL=True\nexport INTERLEAVED_PIPELINE=6\nexport FP8=True\n"


def read(folder: Path, name: str, text: str, **request: object) -> ForeignRun:
    (folder / name).write_text(text)
    return read_configuration([folder / name], Request(**request))


def test_yaml_of_nemo_has_its_model_and_layout(tmp_path: Path) -> None:
    run = read(tmp_path, "llama.yaml", NEMO)
    layout, given = run.described.layout, run.described
    sizes = {"max_seq_len": 8192, "mtp_weight": 0.1, "rope_scaling": None, "init_std": given.model.init_std}
    assert given.model == replace(PRESETS["llama-3.1-8b"], **sizes)
    assert (layout.tp, layout.pp, layout.virtual_stages, layout.cp, layout.dp_shard, layout.zero) == (2, 4, 2, 2, 8, 1)
    assert (given.world_size, given.node_size, given.global_batch, given.precision) == (128, 8, 512, "bf16")
    fates = {record.option: record.fate for record in run.records}
    assert {fates["trainer.max_steps"], fates["model.fp8_hybrid"], fates["mcore_gpt"]} == {NO_EFFECT}
    assert next(each.where for each in run.records if each.option == "num_query_groups").endswith(":20")
    assert read(tmp_path, "fp8.yaml", NEMO.replace("fp8: false", "fp8: true")).described.precision == "fp8"


def test_a_reference_is_relative_to_the_key_at_which_it_stands() -> None:
    values = {"model.size": 8, "model.longest": "${.size}", "model.data.x": "${model.longest}", "model.data.size": 9}
    found = yaml_settings([Setting(name, value, "a.yaml:1") for name, value in values.items()])
    assert next(each.value for each in found if each.option == "model.data.x") == 8


def test_yaml_of_megatron_bridge_is_written_back_in_its_own_keys(tmp_path: Path) -> None:
    run = read(tmp_path, "bridge.yaml", BRIDGE, world_size=64, model=PRESETS["llama-3.1-70b"])
    layout = run.described.layout
    assert (layout.tp, layout.pp, layout.virtual_stages, layout.cp, layout.dp_shard) == (4, 4, 5, 2, 2)
    assert run.described.precision == "fp8"
    changed = replace(layout, pp=1, stage_layers=None, pp_schedule="1f1b", virtual_stages=1, dp_shard=8)
    before, after = (run.system.write(run.described, Choice(each, 2)) for each in (layout, changed))
    assert {run.system.spell(name): after[name] for name in after if after[name] != before[name]} == {
        "model.pipeline_model_parallel_size": 1,
        "model.virtual_pipeline_model_parallel_size": None,
    }
    assert run.system.spell("micro_batch_size") == "train.micro_batch_size"


def test_variables_of_mlperf_have_their_layout_and_samples_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "config_common.sh").write_text(COMMON)
    run = read(tmp_path, "config_DGXH100.sh", MLPERF, model=PRESETS["gpt3-175b"], seq_len=2048)
    layout = run.described.layout
    assert (layout.tp, layout.pp, layout.virtual_stages, layout.dp_shard, layout.zero) == (4, 8, 6, 16, 1)
    assert (run.described.global_batch, run.described.micro_batch, run.described.precision) == (3072, 1, "fp8")
    assert run.accelerator == "h100"
    assert {each.option for each in run.records if each.fate != READ} == {"DGXSYSTEM", "WALLTIME", "NEW_SWITCH"}
    assert any("bf16 and the distributed optimizer" in each for each in run.assumed)
    more = MLPERF + "export CONT=image\nexport CONT_NAME=job\nexport CONTEXT_SHARDS=2\n"
    named = read(tmp_path, "config_cont.sh", more, model=PRESETS["gpt3-175b"], seq_len=2048).records
    fates = {each.option: each.fate for each in named}
    assert fates["CONT"] == fates["CONT_NAME"] == NO_EFFECT != fates["CONTEXT_SHARDS"]
    written = run.system.write(run.described, run.choice)
    assert {run.system.spell(name) for name in written} == {
        *("TENSOR_MODEL_PARALLEL", "PIPELINE_MODEL_PARALLEL", "INTERLEAVED_PIPELINE", "CONTEXT_PARALLEL"),
        *("MICRO_BATCH_SIZE", "SEQ_PARALLEL"),
    }
    for recompute, expected in (("none", True), ("full", False)):  # the variables cannot change recomputation
        assert bool(run.system.able(run.described, Candidates.from_layout(layout, 1, recompute)).all()) is expected


def test_scripts_that_source_each_other_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config_common.sh").write_text("source config_common.sh\n" * 3)
    with pytest.raises(InputError, match=r"config_common\.sh: more than 100 files are sourced"):
        read(tmp_path, "config_DGXH100.sh", MLPERF)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "tensor_model_parallel_size: 2",
            "tensor_model_paralel_size: 2",
            r":10: .*did you mean model.tensor_model_par",
        ),
        ("num_layers: 32", "num_layers: ${oc.env:LAYERS}", r":16: num_layers: its value is unknown: .*evaluated"),
        ("num_layers: 32", "num_layers: ${model.layers}", r":16: num_layers: .* is not in the file"),
        ("hidden_size: 4096", "hidden_size: ${model.hidden_size}", r":17: hidden_size: its value is unknown"),
        ("precision: bf16", "precision: int4", r":3: trainer.precision int4: not known; supported: "),
        ("normalization: rmsnorm", "normalization: batchnorm", r":23: normalization: 'batchnorm' is not known"),
        (
            'seq_length: "${model.encoder_seq_length}"',
            "seq_length: 4096",
            r":36: seq_length 4096: .*:14 says 8192; leave one out",
        ),
        ("  sequence_parallel: true", "  sequence_parallel: [", r"damaged or truncated"),
    ],
)
def test_wrong_yaml_of_nemo_is_refused_with_its_line(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in NEMO
    with pytest.raises(InputError, match=message):
        read(tmp_path, "llama.yaml", NEMO.replace(before, after, 1))


GB300 = """\
# Values: Llama 3.1 405B of MLPerf training 5.1 on 512 GB300 (Datacrunch, config_GB300_128x4x72xtp2pp8cp2_cg_fp4.sh).
export MINIBS=72
export TENSOR_MODEL_PARALLEL=2
export PIPELINE_MODEL_PARALLEL=8
export INTERLEAVED_PIPELINE=8
export CONTEXT_PARALLEL=2
export MICRO_BATCH_SIZE=1
export ASYM_PP_EMBED=True
export ASYM_PP_LOSS=True
export USE_DIST_OPTIMIZER=True
export FP8=True
export DGXNNODES=128
export DGXNGPU=4
"""
XD670 = """\
# Values: Llama 3.1 8B of MLPerf training 5.1 on 64 H200 (HPE, config_XD670_8x8x1xtp1pp1cp2_8b.sh).
export MINIBS=1
export TENSOR_MODEL_PARALLEL=1
export SEQ_PARALLEL=False
export PIPELINE_MODEL_PARALLEL=1
export INTERLEAVED_PIPELINE=null
export CONTEXT_PARALLEL=2 #1
export TP_COMM_OVERLAP=False
export MICRO_BATCH_SIZE=1
export OPT_LR_DECAY_STEPS=$((MAX_STEPS-WARMUP_STEPS))
export DGXNNODES=8
export DGXNGPU=8
"""
FIRST_BRIDGE = """\
# Values: examples/llm/llama3_8b of the first Megatron-Bridge.
model_config: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, context_parallel_size: 1}
train_config: {train_iters: 500000, global_batch_size: 256, micro_batch_size: 4}
ddp_config: {grad_reduce_in_fp32: true}
profiling_config: {use_nsys_profiler: false, profile_ranks: [0, 1]}
"""
QWEN = """\
# Values: examples/recipes/qwen3_moe of Megatron-Bridge.
model:
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  seq_length: 4096
  sequence_parallel: true
  expert_model_parallel_size: 4
  expert_tensor_parallel_size: 1
train: {train_iters: 100000, global_batch_size: 256, micro_batch_size: 2}
scheduler: {min_lr: 0.00003, lr_warmup_iters: 1000}
mixed_precision: {dtype: bf16}
"""


@pytest.mark.parametrize(
    ("name", "text", "model", "ranks", "expected", "batch"),
    [
        ("config_GB300.sh", GB300, "llama-3.1-405b", 512, (2, 8, 8, 2, 1, 16, 1), 1152),
        ("config_XD670.sh", XD670, "llama-3.1-8b", 64, (1, 1, 1, 2, 1, 32, 1), 32),
        ("first.yaml", FIRST_BRIDGE, "llama-3.1-8b", 32, (2, 2, 1, 1, 1, 8, 1), 256),
        ("qwen.yaml", QWEN, "qwen3-30b-a3b", 32, (4, 2, 1, 1, 4, 4, 1), 256),
    ],
)
def test_published_files_have_their_layout_and_every_option_is_read_or_named(
    tmp_path: Path, name: str, text: str, model: str, ranks: int, expected: tuple[int, ...], batch: int
) -> None:
    length = None if "seq_length" in text else 8192
    run = read(tmp_path, name, text, model=PRESETS[model], seq_len=length, world_size=ranks)
    layout, given = run.described.layout, run.described
    degrees = (layout.tp, layout.pp, layout.virtual_stages, layout.cp, layout.ep, layout.dp_shard, layout.zero)
    assert degrees == expected
    assert (given.global_batch, given.precision) == (batch, "fp8" if "FP8" in text else "bf16")
    assert len(run.records) >= text.count("export ")
