"""Configurations of torchtitan, DeepSpeed, Accelerate and the Hugging Face Trainer."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cost.hardware import cluster
from shardwright.model.presets import PRESETS
from shardwright.readers.foreign_run import ForeignRun, Request, alternatives, read_configuration
from shardwright.readers.systems import sources_of
from shardwright.readers.table import READ, Setting, Values, normalised
from shardwright.system.errors import InputError
from tests.readers import scripts

LLAMA_405B = """\
# Values: torchtitan's llama3_405b.toml, a preset for 128 H100.
[model]
name = "llama3"
flavor = "405B"
converters = "float8"
[optimizer]
lr = 8e-5
[training]
batch_size = 2
seq_len = 8192
compile = true
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = 'full'
[checkpoint]
interval = 500
"""
LLAMA_PYTHON = '''\
"""Values: torchtitan's config_registry.py of llama3."""
from torchtitan.config import ParallelismConfig, TrainingConfig

def llama3_70b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("70B"),
        training=TrainingConfig(local_batch_size=8, seq_len=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=8),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
    )

def llama3_70b_pipeline() -> Trainer.Config:
    config = llama3_70b()
    config.parallelism.pipeline_parallel_degree = 4
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    return config
'''
IN_TOKENS = '''\
"""Values: torchtitan's config_registry.py of llama3 and qwen3, of August 2026."""
from torchtitan.models.qwen3 import model_registry

LENGTH = 4 * 1024

def base(flavor, tp=1) -> Trainer.Config:
    compile_config = CompileConfig(enable=True, enable_async_tensor_parallel=True)
    model_spec = model_registry(flavor, converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"])])
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        model_spec=model_spec,
        optimizer=default_adamw(lr=8e-5),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * LENGTH, max_context_length=LENGTH),
        parallelism=ParallelismConfig(tensor_parallel_degree=tp),
        activation_checkpoint=FullAC.Config(),
        compile=compile_config,
    )

def qwen3_14b_pipeline() -> Trainer.Config:
    config = base("14B", tp=4)
    assert config.model_spec is not None
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.num_pp_microbatches = 8
    fused(config)
    return config

def without_recomputation() -> Trainer.Config:
    config = base("1.7B")
    config.model_spec = replace(config.model_spec, pipelining_fn=pipeline_llm)
    config.activation_checkpoint = None
    return config

def endless() -> Trainer.Config:
    return endless()

def conditional() -> Trainer.Config:
    if LENGTH > 1:
        return base("1.7B")
    return base("4B")
'''
DEEPSPEED = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
"""The file of the DeepSpeed page of transformers' documentation, for ZeRO-3."""
ZERO = json.dumps({"zero_optimization": DEEPSPEED["zero_optimization"]})[1:-1]
ARGUMENTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "bf16": True, "max_seq_length": 4096}
ACCELERATE = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: HYBRID_SHARD
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


def read(folder: Path, texts: dict[str, str], function: str = "", world: int | None = 16) -> ForeignRun:
    for name, text in texts.items():
        (folder / name).write_text(text)
    paths = [Path(f"{folder / name}{function}") for name in texts]
    model = None if "py" in paths[0].suffix or "toml" in paths[0].suffix else PRESETS["llama-3.1-8b"]
    return read_configuration(paths, Request(world_size=world, model=model))


def test_torchtitan_toml_has_its_layout_precision_and_lines(tmp_path: Path) -> None:
    run = read(tmp_path, {"llama3_405b.toml": LLAMA_405B}, world=128)
    assert str(run.choice) == "tp=8,dp_shard=16,zero=3,recompute=full,micro_batch=2"
    assert (run.described.precision, run.described.stack.name, run.described.global_batch) == (
        *("fp8", "fsdp-compiled-loss"),
        32,
    )
    assert run.described.model == PRESETS["llama-3.1-405b"]
    places = {record.option: record.where.rpartition(":")[2] for record in run.records}
    assert places["parallelism.tensor_parallel_degree"] == "14"
    assert len(places) == 12


@pytest.mark.parametrize(
    ("resharding", "zero", "gather"),
    [(None, 3, "step"), ("default", 3, "step"), ("always", 3, "microbatch"), ("never", 2, "step")],
)
def test_resharding_in_a_pipeline_is_priced_as_torchtitan_runs_it(
    tmp_path: Path, resharding: str | None, zero: int, gather: str
) -> None:
    pipeline = "[parallelism]\npipeline_parallel_degree = 2\n"
    pipeline += f'fsdp_reshard_after_forward = "{resharding}"\n' if resharding else ""
    run = read(tmp_path, {"llama3_405b.toml": LLAMA_405B.replace("[parallelism]\n", pipeline)}, world=128)
    assert (run.described.layout.zero, run.described.layout.zero_pp_gather) == (zero, gather)
    stated = run.system.write(run.described, run.choice)["parallelism.fsdp_reshard_after_forward"]
    assert (stated or "default") == (resharding or "default")


def test_torchtitan_python_is_read_without_executing_it(tmp_path: Path) -> None:
    run = read(tmp_path, {"llama3.py": LLAMA_PYTHON}, ":llama3_70b_pipeline", world=128)
    layout = run.described.layout
    assert (layout.tp, layout.pp, layout.dp_shard, layout.pp_schedule) == (8, 4, 4, "interleaved-1f1b")
    with pytest.raises(InputError, match="several configurations; name one"):
        read(tmp_path, {"llama3.py": LLAMA_PYTHON})


def test_a_batch_in_tokens_of_torchtitan_is_read_through_functions_variables_and_arithmetic(tmp_path: Path) -> None:
    run = read(tmp_path, {"file.py": IN_TOKENS}, ":qwen3_14b_pipeline", world=64)
    assert str(run.choice) == "tp=4,pp=2,dp_shard=8,zero=3,recompute=full,micro_batch=2"
    described = run.described
    assert described.model == PRESETS["qwen3-14b"]
    assert (described.seq_len, described.global_batch, described.precision) == (4096, 8 * 8 * 2, "fp8")
    assert described.stack.speed.hides_tp
    assert any("fused(config) is not evaluated" in note for note in run.skipped)
    where = {record.option: record.where.rpartition(":")[2] for record in run.records}
    assert (where["compile.enable"], where["parallelism.num_pp_microbatches"]) == ("7", "23")
    stated = run.system.write(described, run.choice)
    assert {name: stated[name] for name in stated if "tokens" in name or name == "activation_checkpoint"} == {
        "training.num_tokens_per_microbatch_per_dp_rank": 8192,
        "training.num_tokens_per_train_step": 128 * 4096,
        "activation_checkpoint": "FullAC",
    }
    assert stated["parallelism.num_pp_microbatches"] == 8


def test_a_copy_of_a_call_and_a_section_without_value_are_read(tmp_path: Path) -> None:
    run = read(tmp_path, {"file.py": IN_TOKENS}, ":without_recomputation", world=8)
    assert (run.described.model, run.described.layout.recompute) == (PRESETS["qwen3-1.7b"], "none")


DOUBLED = (
    "parallelism = C(x=1)\n"
    + "    config.parallelism = replace(config.parallelism, l=config.parallelism, r=config.parallelism)\n" * 18
)


def test_several_values_and_targets_of_an_assignment_are_read(tmp_path: Path) -> None:
    text = IN_TOKENS.replace(
        "config.activation_checkpoint = None",
        "x = config.training.max_context_length, config.parallelism.tensor_parallel_degree = 8192, 2",
    )
    text = text.replace("2 * LENGTH", "4 * LENGTH")
    described = read(tmp_path, {"file.py": text}, ":without_recomputation", world=8).described
    assert (described.seq_len, described.micro_batch, described.layout.tp) == (8192, 2, 2)


@pytest.mark.parametrize("module", ["config_registry", "registries.qwen3.config_registry", "qwen3"])
def test_the_module_of_a_registry_names_the_model(tmp_path: Path, module: str) -> None:
    text = IN_TOKENS.replace("torchtitan.models.qwen3", module)
    described = read(tmp_path, {"qwen3.py": text}, ":without_recomputation", world=8).described
    assert described.model == PRESETS["qwen3-1.7b"]


@pytest.mark.parametrize(
    ("function", "change", "said"),
    [
        (":endless", ("", ""), "file.py:33: functions that call each other without end"),
        (":conditional", ("", ""), "file.py:37: a statement `if` would have to be executed"),
        (
            ":without_recomputation",
            ("2 * LENGTH", "5000"),
            "5,000 tokens are not a multiple of max_context_length 4,096",
        ),
        (":without_recomputation", ("Float8Linear", "NVFP4Linear"), "a step in nvfp4 has no price"),
        (":without_recomputation", ('"1.7B"', '"9B"'), "the sizes of qwen3 9B are not known here"),
        (":without_recomputation", ("models.qwen3 ", "models.kimi "), "the sizes of kimi 1.7B are not known here"),
        (":without_recomputation", ("4 * 1024", "9 ** 9 ** 9"), "max_context_length: its value is unknown"),
        (":without_recomputation", ("4 * 1024", "1" + " * 9" * 90), "max_context_length: its value is unknown"),
        (":without_recomputation", ("4 * 1024", "(" * 5000 + ")" * 5000), "file.py"),
        (":endless", ("return endless()", "config[0].training = base('4B')"), "config[0].training = ..."),
        (":without_recomputation", ("LENGTH = 4", "if 1:\n    LENGTH = 4"), "LENGTH, which line 4 may set would have"),
        (":without_recomputation", ("activation_checkpoint = None", DOUBLED), "more than 20,000 values"),
        (
            ":without_recomputation",
            ("LENGTH = 4", "X = [1]\n" + "X = [*X, *X]\n" * 60 + "LENGTH = 4"),
            "file.py:19: more than 20,000 values in a list",
        ),
        (":without_recomputation", ("4 * 1024", "-" * 9000 + "1"), "file.py"),
    ],
)
def test_python_that_would_have_to_be_executed_is_refused(
    tmp_path: Path, function: str, change: tuple[str, str], said: str
) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        read(tmp_path, {"file.py": IN_TOKENS.replace(*change)}, function, world=8)


def test_values_of_auto_come_from_the_training_arguments_in_any_order(tmp_path: Path) -> None:
    texts = {"ds.json": json.dumps(DEEPSPEED), "arguments.json": json.dumps(ARGUMENTS)}
    for order in (texts, dict(reversed(texts.items()))):
        run = read(tmp_path, order)
        assert str(run.choice) == "dp_shard=16,zero=3,micro_batch=2"
        assert (run.described.global_batch, run.described.precision) == (256, "bf16")


def test_hybrid_sharding_of_accelerate_has_a_replica_for_each_machine(tmp_path: Path) -> None:
    # Its own arguments may have a key of a program that is not read.
    run = read(tmp_path, {"a.yaml": ACCELERATE, "b.json": json.dumps(ARGUMENTS | {"base_model": "a/b"})}, world=None)
    assert str(run.choice) == "dp_replicate=2,dp_shard=8,zero=3,micro_batch=2"


@pytest.mark.parametrize(
    ("accelerate", "arguments"),
    [
        ({"fsdp_activation_checkpointing": True}, {}),
        ({}, {"gradient_checkpointing": True}),
        ({"fsdp_activation_checkpointing": True}, {"gradient_checkpointing": True}),
        ({}, {}),
    ],
)
def test_recomputation_is_changed_by_the_options_that_the_files_state(
    tmp_path: Path, accelerate: dict[str, bool], arguments: dict[str, bool]
) -> None:
    text = ACCELERATE.replace("fsdp_config:\n", "fsdp_config:\n" + "".join(f"  {key}: true\n" for key in accelerate))
    run = read(tmp_path, {"a.yaml": text, "b.json": json.dumps(ARGUMENTS | arguments)}, world=None)
    layout = run.choice.layout
    other = replace(run.choice, layout=layout.changed(recompute="none" if layout.recomputes else "full"))
    changed = {name for name, value in run.system.write(run.described, other).items() if "checkpointing" in name}
    stated = {*(f"fsdp_config.{key}" for key in accelerate), *arguments}
    assert changed == (stated or {"gradient_checkpointing"})


def test_alternatives_stay_within_the_abilities_of_the_system_and_keep_its_offload(tmp_path: Path) -> None:
    deepspeed = DEEPSPEED | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    run = read(tmp_path, {"ds.json": json.dumps(deepspeed), "arguments.json": json.dumps(ARGUMENTS)})
    found = alternatives(run, run.job(cluster("h100:16")), 0.1, 3)
    assert found
    for each in found:
        layout = each.priced.layout
        assert layout.tp == layout.pp == layout.cp == 1
        assert layout.recompute in ("none", "full")
        assert layout.offload_optimizer == "cpu"
        assert {option for option, _, _ in each.changes} <= {
            *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_checkpointing"),
            "zero_optimization.stage",
        }


@pytest.mark.parametrize(
    ("name", "before", "after", "problem"),
    [
        (
            "x.toml",
            'flavor = "405B"',
            'flavor = "9B"',
            "x.toml:4: model.flavor 9B: the sizes of llama3 9B are not",
        ),
        ("x.toml", "seq_len = 8192", "seq_len = 8192.5", "x.toml:10: training.seq_len: 8192.5 is not a whole number"),
        (
            "x.toml",
            "tensor_parallel_degree = 8",
            "tensor_parallel_degre = 8",
            "did you mean parallelism.tensor",
        ),
        ("x.toml", "data_parallel_shard_degree = -1", "data_parallel_shard_degree = 3", "24 ranks, and the job has 16"),
        ("x.toml", "mode = 'full'", "mode = 'full", "x.toml: "),
        ("x.yaml", "HYBRID_SHARD", "HALF_SHARD", "x.yaml:4: fsdp_config.fsdp_sharding_strategy HALF_SHARD: valid: "),
        ("x.yaml", "mixed_precision: bf16", "mixed_precision: [bf16", "x.yaml:6: "),
        (
            "x.yaml",
            "mixed_precision: bf16",
            "base_model: a/b",
            "x.yaml:5: base_model is a key of axolotl, which is not",
        ),
        ("x.yaml", "mixed_precision: bf16", "model_type: llama\nbase_model: a/b", "x.yaml:6: base_model is a key"),
        ("x.yaml", "mixed_precision: bf16", "model: {_component_: a}", "x.yaml:5: _component_ is a key of torchtune"),
        ("x.yaml", "FSDP", "MEGATRON_LM", "x.yaml:1: distributed_type MEGATRON_LM: give Megatron-LM's own arguments"),
        ("x.yaml", "mixed_precision: bf16", "? [a, b]\n: 1", "x.yaml:5: a key is a list; valid: a word or a number"),
        ("x.yaml", "mixed_precision: bf16", "{a: 1}: 2", "x.yaml:5: a key is a mapping; valid: a word or a number"),
        ("x.yaml", "fsdp_config:\n", "fsdp_config:\n  []: 2\n", "x.yaml:3: a key is a list; valid: a word"),
        ("x.yaml", "mixed_precision: bf16", "<<: [{a: 1}, {{}: 2}]", "x.yaml:5: a key is a mapping; valid: a word"),
        ("x.json", '"stage": 3', '"stage": 4', "zero_optimization.stage 4: valid: 0, 1, 2, 3"),
        ("x.json", '"stage": 3', '"stage": 3, "stag', "x.json:1: "),
        ("x.json", '"stage": 3', '"stage": "three"', "'three' is not a number"),
        ("x.json", '"stage": 3', '"stage": true', "x.json:1: zero_optimization.stage: its value is missing"),
        ("x.json", '"stage": 3', '"stage": 3, "stage": 2', "x.json:1: stage is stated twice; line 1 has it too"),
        (
            "x.json",
            ZERO,
            '"zero_optimization": 3',
            "x.json:1: zero_optimization 3: it is a section; valid: keys such as",
        ),
        ("x.toml", LLAMA_405B, "[tool.poetry]\nname = 'x'\n", "x.toml: it has no option of torchtitan; supported: "),
        ("x.json", '"stage"', '"stage"', "x.json:1: train_micro_batch_size_per_gpu 'auto' is taken from"),
    ],
)
def test_a_file_that_cannot_be_planned_is_refused_with_its_line(
    name: str, before: str, after: str, problem: str, tmp_path: Path
) -> None:
    text = {"toml": LLAMA_405B, "yaml": ACCELERATE, "json": json.dumps(DEEPSPEED)}[name.rpartition(".")[2]]
    assert before in text
    with pytest.raises(InputError) as error:
        read(tmp_path, {name: text.replace(before, after, 1)})
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.sh", scripts.MIXTRAL),
        ("x.toml", LLAMA_405B.replace("'full'", "'selective'")),
        ("x.yaml", ACCELERATE),
        ("x.json", json.dumps(DEEPSPEED | ARGUMENTS)),
    ],
)
def test_no_value_of_any_option_raises_anything_but_an_input_error(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    system, sources, _ = sources_of([tmp_path / name])
    stated = {normalised(setting.option): setting for source in sources for setting in source.settings}
    for option in [row.name for row in system.options.values() if row.fate == READ]:
        for wrong in (0, "", [], 10**12):
            settings = stated | {option: Setting(option, wrong, f"{name}:1")}
            given = None if name == "x.sh" else PRESETS["llama-3.1-8b"]
            with suppress(InputError):
                system.describe(Values(system.name, system.options, settings, name, 128, given, spell=system.spell))


def test_files_that_contradict_each_other_are_refused_with_both_lines(tmp_path: Path) -> None:
    texts = {"a.json": json.dumps(DEEPSPEED | {"train_batch_size": 64}), "b.json": json.dumps(ARGUMENTS)}
    with pytest.raises(InputError, match="train_batch_size 64: is not micro-batch 2 x accumulation 8 x 16"):
        read(tmp_path, texts)
