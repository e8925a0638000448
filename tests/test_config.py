"""Proves that a run file is read strictly: unknown keys name the nearest one, all problems come at once, what is
resolved reads back the same."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config import load, parse, resolved_toml
from shardwright.config.reference import keys
from shardwright.layout.keys import CP_METHODS
from shardwright.model.modules import FAMILIES
from shardwright.model.presets import resolve
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.optimizers import OPTIMIZERS
from shardwright.schedule.registry import names as schedules
from shardwright.system.errors import ConfigError
from shardwright.system.synonyms import SYNONYMS

SMALLEST = """
out = "runs/x"
steps = 10
[data]
path = "data"
[batch]
seq_len = 64
global_batch = 8
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def refused(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(written(folder, text), overrides)
    assert error.value.exit_code == 2
    return error.value.problems


def test_the_smallest_run_file_gives_a_whole_configuration(tmp_path: Path):
    config = load(written(tmp_path, SMALLEST))
    assert config.spec().n_layers > 0
    assert config.layout.layout().world_size == 1
    assert config.accumulation == 8


def test_an_override_changes_a_key_and_is_typed_as_in_the_file(tmp_path: Path):
    config = load(written(tmp_path, SMALLEST), ["layout.dp_shard=4", "out=elsewhere", "optimizer.lr=1e-4"])
    assert config.layout.layout().dp_shard == 4
    assert config.out == "elsewhere"
    assert config.optimizer.lr == 1e-4


def test_zero_is_3_where_something_is_sharded_and_nothing_else_is_asked_for(tmp_path: Path):
    assert load(written(tmp_path, SMALLEST)).layout.layout().zero == 0
    assert load(written(tmp_path, SMALLEST), ["layout.dp_shard=2"]).layout.layout().zero == 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("layout.dp_shards=2", "layout.dp_shards: there is no such key; did you mean 'dp_shard'?"),
        ("optimiser.lr=1", "optimiser: there is no such key; did you mean 'optimizer'?"),
        ("model.presett=debug", "model.presett: there is no such key; did you mean 'preset'?"),
        ("layout.tp=3", "layout.tp=3 does not divide 4 query heads (model.n_heads) (4 = 3*1 + 1); valid: 1, 2, 4"),
        ("layout.recompute=partly", "not one of the choices; valid: auto, full, none, selective"),
        ("layout.recompute=atuo", "did you mean 'auto'?"),
        ("layout.pp_schedule=gpipe", "not one of the choices; did you mean 'afab'?"),
        ("layout.tensor_parallel=2", "layout.tensor_parallel: there is no such key; did you mean 'tp'?"),
        ("context_parallel=2", "context_parallel: there is no such key; did you mean 'layout.cp'?"),
        ("layout.dp=2", "did you mean 'dp_replicate' or 'dp_shard'?"),
        ("ddp=true", "did you mean 'layout.zero=0 with layout.dp_replicate'?"),
        ("layout.fsdp=true", "did you mean 'layout.zero=3 with layout.dp_shard'?"),
        ("hsdp=true", "'layout.zero=3 with layout.dp_replicate and layout.dp_shard above 1'"),
        (
            "gradient_accumulation_steps=4",
            "did you mean 'batch.global_batch = micro_batch x data ranks x accumulation'?",
        ),
        ("betas=[0.9,0.95]", "did you mean 'optimizer.beta1' or 'optimizer.beta2'?"),
        ("parallelism.tensor_parallel_degree=2", "did you mean 'layout'?; tensor_parallel_degree is layout.tp here"),
        ("activation_checkpointing=true", "did you mean 'layout.recompute'?"),
        ("lr=1", "did you mean 'optimizer.lr'?"),
        ("learning_rate=1", "did you mean 'optimizer.lr'?"),
        ("optimizer.learning_rate=1", "there is no such key for 'adamw'; did you mean 'lr'?"),
        ("weight decay=1", "did you mean 'optimizer.weight_decay'?"),
        ("max_steps=1", "did you mean 'steps'?"),
        ("per_device_batch_size=1", "did you mean 'batch.micro_batch'?"),
        ("dtype=bf16", "did you mean 'precision.compute'?"),
        ("precision.dtype=bf16", "did you mean 'compute'?"),
        ("precision.bf16=true", "did you mean 'compute'?"),
        ("precision.compute=bfloat16", "did you mean 'bf16'?"),
        ("output_dir=x", "did you mean 'out'?"),
        ("layout.micro_batch=2", "layout.micro_batch: there is no such key; did you mean 'batch.micro_batch'?"),
        ("every=2", "did you mean 'checkpoint.every' or 'metrics.every' or 'evaluation.every' or 'average.every'?"),
        ("steps=0", "steps=0: input should be greater than or equal to 1"),
        ("steps=ten", "steps='ten': input should be a valid integer"),
        ("batch.global_batch=8.5", "batch.global_batch=8.5: input should be a valid integer"),
        ("precision.compute=int8", "precision.compute='int8': input should be 'fp32', 'bf16', 'fp16' or 'fp64'"),
        ("precision.compute=fp8", "did you mean 'precision.fp8'?"),
        ("precision.fp8_skip_layers=1", "go with precision.fp8, which is 'none'"),
        ("layout=4", "layout=4: this is a section, written [layout]"),
        ("layout.stage_layers=4", "layout.stage_layers=4: a list is needed; write stage_layers = [4]"),
        ("layout.recompute_modules=norms", "'norms': a list is needed; write recompute_modules = ['norms']"),
        ("layout.zero=5", "layout.zero=5: not one of the choices; valid: 0, 1, 2, 3"),
        ("model.preset=lama-3.1-8b", "llama-3.1-8b"),
        ("model.n_kv_heads=3", "n_kv_heads=3 does not divide n_heads"),
        ("batch.global_batch=9", "nearest: 8 or 10"),
        ("batch.seq_len=1000000", "batch.seq_len=1000000 is longer than model.max_seq_len"),
        ("schedule.warmup_steps=1", "schedule is called lr_schedule now; rename it"),
        ("layout.schedule=zb-v", "layout.schedule is called layout.pp_schedule now; rename it"),
        ("lr_schedule.warmup_steps=11", "is more than the steps=10 of the run"),
        ("lr_schedule.decay_steps=2", "lr_schedule.decay_steps=2 is for lr_schedule.shape='wsd'"),
        ("steps", "--set steps: write key=value"),
        ("out=s3://bucket/run", "out='s3://bucket/run' is a URL; it is a folder of this machine"),
        ("=3", "--set =3: the key is ''; write key=value"),
        ("layout.=3", "--set layout.=3: the key is 'layout.'; write key=value"),
        ("layout..tp=3", "--set layout..tp=3: the key is 'layout..tp'; write key=value"),
        ("steps=2,layout.tp=2", "one key is set at a time; give each a --set of its own"),
        ("layout.dp_shard=-1", "there is no -1 for the ranks that are left"),
        ("layout.ep=2", "layout.ep=2 does not divide dp_shard x cp x tp = 1 x 1 x 1 = 1; valid: 1"),
    ],
)
def test_a_key_or_value_that_is_not_valid_is_answered_with_the_way_out(tmp_path: Path, override: str, said: str):
    text = SMALLEST if override != "batch.global_batch=9" else SMALLEST.replace("seq_len", "micro_batch = 2\nseq_len")
    assert any(said in problem for problem in refused(tmp_path, text, override))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["layout.dp_shard=3", "layout.zero=1", "layout.ep=3", "batch.global_batch=3"],
            "layout.ep=3 does not divide 8 experts (model.moe.n_experts) (8 = 3*2 + 2); valid: 1, 2, 4, 8",
        ),
        (
            ["layout.dp_shard=2", "layout.zero=1", "layout.ep=4"],
            "layout.ep=4 does not divide dp_shard x cp x tp = 2 x 1 x 1 = 2; valid: 1, 2",
        ),
        (
            ["model.preset=debug", "layout.dp_shard=2", "layout.zero=1", "layout.ep=2"],
            "layout.ep=2 shards experts, and the model has none; valid: 1",
        ),
        (
            ["layout.tp=2", "layout.sequence_parallel=false", "layout.ep=2"],
            "layout.tp=2 with model.moe needs layout.sequence_parallel=true: ranks of tp with the same tokens would "
            "each send all of them to the experts",
        ),
        (
            ["layout.tp=3", "layout.sequence_parallel=true", "layout.ep=3", "batch.seq_len=63"],
            "layout.tp=3 does not divide 4 query heads (model.n_heads) (4 = 3*1 + 1); valid: 1, 2, 4",
        ),
    ],
)
def test_a_layout_that_cannot_deal_out_the_experts_is_refused_in_a_line(
    tmp_path: Path, overrides: list[str], said: str
):
    problems = refused(tmp_path, SMALLEST, "model.preset=debug-moe", *overrides)
    assert [said in problem for problem in problems].count(True) == 1, problems
    assert not any("\n" in problem for problem in problems)


def test_all_problems_of_a_file_come_at_once(tmp_path: Path):
    text = SMALLEST.replace("steps = 10", "stepps = 10").replace("seq_len = 64", 'seq_len = "64"')
    problems = refused(tmp_path, text + "[layout]\nzero = 7\n", "optimizer.lrr=1")
    said = "\n".join(problems)
    assert len(problems) == 5
    for part in ("stepps", "steps: missing", "batch.seq_len='64'", "layout.zero=7", "optimizer.lrr"):
        assert part in said


def test_problems_between_sections_come_at_once_too(tmp_path: Path):
    problems = refused(tmp_path, SMALLEST, "model.n_kv_heads=3", "batch.global_batch=7", "layout.dp_replicate=2")
    assert len(problems) == 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["batch.global_batch=7", "layout.tp=3", "layout.dp_replicate=2"],
            ["global_batch=7", "4 query heads", "ffn features"],
        ),
        (["steps=0", "layout.tp=3", "batch.seq_len=63"], ["steps=0", "4 query heads", "ffn features"]),
        (["optimizer.lr=-1", "model.n_kv_heads=3"], ["optimizer.lr=-1", "n_kv_heads=3 does not divide"]),
        (
            ["layout.vpp=2", "layout.tp=3", "batch.global_batch=7", "layout.dp_replicate=2"],
            ["did you mean 'virtual_stages'?", "global_batch=7", "4 query heads", "ffn features"],
        ),
        (["data.pathh=x", "lr_schedule.warmup_steps=11"], ["data.pathh", "warmup_steps=11 is more than the steps=10"]),
        (["lr_schedule.warmup_steps=11", "lr_schedule.decay_steps=2"], ["warmup_steps=11 is more", "is for"]),
    ],
)
def test_no_problem_hides_another(tmp_path: Path, overrides: list[str], said: list[str]):
    problems = refused(tmp_path, SMALLEST, *overrides)
    for part in said:
        assert [part in problem for problem in problems].count(True) == 1, (part, problems)


def test_a_rule_that_reads_a_wrong_section_says_nothing(tmp_path: Path):
    assert len(refused(tmp_path, SMALLEST, "batch.micro_batch=x", "batch.global_batch=7", "layout.dp_shard=3")) == 1


def test_a_missing_key_says_what_it_is(tmp_path: Path):
    problems = refused(tmp_path, 'out = "x"\nsteps = 1\n[batch]\nseq_len = 8\nglobal_batch = 1\n')
    assert len(problems) == 1
    assert "data: missing" in problems[0]
    assert "The place of the tokens" in problems[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"out = ", "not valid TOML"), (b"\xff\xfe", "not UTF-8 text (byte 0)")],
)
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes, said: str):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such run file"):
        load(tmp_path / "none.toml")
    (tmp_path / "debug.toml").touch()
    with pytest.raises(ConfigError, match=rf"did you mean {re.escape(str(tmp_path / 'debug.toml'))}\?"):
        load(tmp_path / "debg.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load(tmp_path)


@given(
    st.text(min_size=1).filter(lambda text: "\x7f" not in text and "\x00" not in text),
    st.floats(1e-9, 1.0),
    st.sampled_from([0, 1, 2, 3]),
    st.booleans(),
)
def test_a_resolved_file_reads_back_as_the_same_configuration(out: str, lr: float, zero: int, scaled: bool):
    table = {
        "out": out,
        "steps": 3,
        "data": {"path": out},
        "batch": {"seq_len": 4, "global_batch": 4},
        "optimizer": {"lr": lr},
        "layout": {"dp_shard": 2 if zero else 1, "zero": zero, "sequence_parallel": scaled, "virtual_stages": 1},
    }
    if scaled:
        scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 64}
        table["model"] = {"rope_scaling": scaling}
    config = parse(table)
    assert parse(tomllib.loads(resolved_toml(config))) == config


def test_sequence_parallel_is_on_with_tp_unless_it_is_set():
    def sequence_parallel(**layout: object) -> bool:
        table = {"out": "x", "steps": 1, "data": {"path": "x"}, "batch": {"seq_len": 4, "global_batch": 4}}
        return parse(table | {"layout": layout}).layout.layout().sequence_parallel

    assert [sequence_parallel(), sequence_parallel(tp=2), sequence_parallel(tp=2, sequence_parallel=False)] == [
        False,
        True,
        False,
    ]


def test_a_type_that_is_not_supported_is_no_misspelling_of_another(tmp_path: Path):
    problems = refused(tmp_path, SMALLEST, "precision.compute=fp4")
    assert len(problems) == 1
    assert (
        "precision.compute='fp4': input should be 'fp32', 'bf16', 'fp16' or 'fp64'; fp4 is not supported" in problems[0]
    )
    assert "did you mean" not in problems[0]


def test_another_name_of_the_field_stands_for_a_key_or_a_value_that_there_is():
    values = {*schedules(), *CP_METHODS, *OPTIMIZERS, "wsd", "fp16", "float16", "float32", "float64", "bfloat16"}
    values |= {"fp32", "bf16", "fp64", "validation", "evaluation"}
    paths = {key.path for key in keys()}
    valid = values | paths | {path.partition(".")[0] for path in paths}
    for name, meant in SYNONYMS.items():
        for each in meant:
            for part in re.split(" with | and ", each.removesuffix(" above 1")):
                assert part.partition("=")[0].strip() in valid, (name, part)


def test_every_key_is_documented():
    listed = list(keys())
    assert all(key.description for key in listed)
    assert {key.path for key in listed} >= {"layout.zero", "optimizer.lr", "model.n_layers", "model.moe.top_k", "steps"}


def test_a_table_of_the_model_changes_that_of_the_preset_or_is_given_whole():
    def spec(preset: str, **model: object) -> ModelSpec:
        table = {"out": "x", "steps": 1, "data": {"path": "x"}, "batch": {"seq_len": 4, "global_batch": 4}}
        config = parse(table | {"model": {"preset": preset, **model}})
        assert parse(tomllib.loads(resolved_toml(config))).model == config.model
        return config.spec()

    moe = resolve("mixtral-8x7b").moe
    assert moe is not None
    assert spec("mixtral-8x7b", moe={"top_k": 4}).moe == dataclasses.replace(moe, top_k=4)
    whole = {"n_experts": 4, "top_k": 2, "d_ffn": 32}
    assert spec("debug", moe=whole).moe == MoESpec(n_experts=4, top_k=2, d_ffn=32)
    assert spec("debug").moe is None


def test_the_examples_are_valid():
    for path in Path("examples").glob("*.toml"):
        load(path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.clip_norm=inf", "optimizer.clip_norm=inf: input should be a finite number"),
        ("out=", "out='': string should have at least 1 character"),
        ("offload_path=", "offload_path='': string should have at least 1 character"),
        ("lr_schedule.shape=wsd", "lr_schedule.decay_steps=0 with lr_schedule.shape='wsd' never falls"),
        ("model.rope_scaling={factor = 8.0}", "model.rope_scaling.low_freq_factor: missing"),
        ("model.moe.top_k=2", "model.moe.n_experts: missing, and model.preset='debug' has no moe to take it from"),
        ("model.moe.top_q=2", "model.moe.top_q: there is no such key; did you mean 'top_k'?"),
        ("model.moe={n_experts = 4, top_k = 8, d_ffn = 16}", "model.moe.top_k=8 is more than moe.n_experts=4"),
        ("model.latent_attention.kv_rank=wide", "model.latent_attention.kv_rank='wide'"),
    ],
)
def test_a_value_that_would_fail_later_or_do_nothing_is_refused_now(tmp_path: Path, override: str, said: str):
    assert any(said in problem for problem in refused(tmp_path, SMALLEST, override))


def test_a_run_file_inside_a_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(written(tmp_path, SMALLEST) / "x")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optimizer.name=adanw", "optimizer.name='adanw' is not known; did you mean 'adamw'?"),
        ("optimizer.beta3=0.9", "optimizer.beta3: there is no such key for 'adamw'; did you mean 'beta2'?"),
        ("optimizer.beta1=1.0", "optimizer.beta1=1 is not from 0 to below 1"),
        ("optimizer.eps=big", "optimizer.eps='big': a number is needed"),
        ("optimizer.momentum=0.9", "no such key for 'adamw'; it is one of 'sgd' and 'muon'"),
        ("optimizer.adamw_lr_scale=0.5", "is called [optimizer.lr_scale] embedding, head, norm, bias, router now"),
        (
            "optimizer.lr_scale.embeding=0.5",
            "optimizer.lr_scale.embeding: there is no such key; did you mean 'embedding'",
        ),
        ("optimizer.weight_decay_by_kind.norm=-1", "optimizer.weight_decay_by_kind.norm=-1"),
    ],
)
def test_what_an_optimizer_does_not_have_is_refused(tmp_path: Path, override: str, problem: str):
    assert any(problem in line for line in refused(tmp_path, SMALLEST, override))


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ('name = "adam"\nlearning_rate = 1e-3', "there is no such key for any optimizer; did you mean 'lr'"),
        ('name = "sgd"\nnesterov = 1', "optimizer.nesterov=1: true or false is needed"),
        ('name = "sgd"\nnesterov = true\nmomentum = 0.0', "and optimizer.momentum=0; raise it above 0"),
        ('state_dtype = "bf16"\nbeta2 = 0.999', "valid: beta2 below 0.9961, or state_dtype='parameters'"),
        ('name = "adafactor"\nstate_dtype = "bf16"', "there is nothing to save; leave it out"),
        ('name = "adamw-8bit"\nstate_dtype = "bf16"', "its states have 8 bits already; leave it out"),
        ('name = "adamw-8bit"\nblock_size = 100.5', "optimizer.block_size=100.5: a whole number is needed"),
        ('name = "sgd"\nbetas = [0.9, 0.9]', "no such key for 'sgd'; it is 'beta1' and 'beta2' here, of 'adamw' and"),
        ("betas = [0.9, 0.9]", "no such key for 'adamw'; did you mean 'beta1' or 'beta2'?"),
        ("block_size = 128", "optimizer.block_size: there is no such key for 'adamw'; it is one of 'adamw-8bit'"),
    ],
)
def test_options_of_an_optimizer_that_contradict_each_other_are_refused(tmp_path: Path, section: str, problem: str):
    assert any(problem in line for line in refused(tmp_path, f"{SMALLEST}\n[optimizer]\n{section}\n"))


def test_rates_by_kind_are_resolved_with_the_rest(tmp_path: Path):
    config = load(written(tmp_path, SMALLEST), ["optimizer.lr_scale.embedding=0.5", "optimizer.state_dtype=bf16"])
    text = resolved_toml(config)
    assert "lr_scale = { embedding = 0.5 }" in text
    assert "weight_decay_by_kind" not in text
    assert load(written(tmp_path, text)).optimizer == config.optimizer


def test_the_options_of_an_optimizer_are_resolved_with_the_rest(tmp_path: Path):
    config = load(written(tmp_path, SMALLEST), ["optimizer.beta2=0.99"])
    assert config.optimizer.options == {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    text = resolved_toml(config)
    assert "beta1 = 0.9" in text
    assert load(written(tmp_path, text)).optimizer == config.optimizer


def test_attention_within_documents_is_refused_where_there_are_none(tmp_path: Path):
    text = SMALLEST.replace('path = "data"', 'path = "data"\nattention = "document"\npositions = "document"')
    config = load(written(tmp_path, text))
    assert (config.data.attention, config.data.positions) == ("document", "document")
    (problem,) = refused(tmp_path, text, "data.sequences=documents")
    assert "data.attention='document' goes with data.sequences='packed'" in problem
    (problem,) = refused(tmp_path, text, "data.attention=sequence")
    assert "data.positions='document' goes with data.attention='document'" in problem


def test_a_family_whose_blocks_take_no_documents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    family = dataclasses.replace(FAMILIES["decoder"], name="other", documents=False)
    monkeypatch.setitem(FAMILIES, "other", family)
    text = SMALLEST.replace('path = "data"', 'path = "data"\nattention = "document"')
    (problem,) = refused(tmp_path, text, "model.family=other")
    assert "model.family='other': its blocks take no documents" in problem
    assert "a family of 'decoder'" in problem
    experts = ("model.moe.n_experts=4", "model.moe.top_k=2", "model.moe.d_ffn=16")
    padded = ("model.family=other", "data.attention=sequence", "data.sequences=documents")
    (problem,) = refused(tmp_path, text, *padded, *experts)
    assert "experts would compute padding; valid: data.sequences='packed', or a family of 'decoder'" in problem
