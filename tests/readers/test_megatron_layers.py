"""Options of Megatron-LM that change some layers, and its options in other forms than a command."""

from pathlib import Path
from typing import Any

import pytest

from shardwright.model.presets import PRESETS
from shardwright.model.spec import ModelSpec
from shardwright.readers.foreign_run import ForeignRun, Request, read_configuration
from shardwright.readers.table import NO_COUNTERPART
from shardwright.system.errors import InputError

COMMON = "--micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --bf16 --normalization RMSNorm "
COMMON += "--untie-embeddings-and-output-weights --group-query-attention --hidden-dropout 0 "
GPT_OSS = (
    "--num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 --num-query-groups 8 "
    "--kv-channels 64 --num-experts 32 --moe-router-topk 4 --moe-aux-loss-coeff 0.001 --padded-vocab-size 201088 "
    "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable "
    "--window-size 127,0 --window-attn-skip-freq 2 --enable-gpt-oss --rotary-base 150000"
)
"""Values: gpt-oss-20b.sh of Megatron-LM's examples."""
QWEN3_NEXT = (
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --num-query-groups 2 "
    "--kv-channels 256 --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --swiglu --qk-layernorm "
    "--moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --attention-output-gate --vocab-size 151936 "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --disable-bias-linear "
    "--position-embedding-type rope --rotary-percent 0.25 --rotary-base 10000000"
)
"""Values: config.json of Qwen3-Next-80B-A3B."""
MAVERICK = (
    "--num-layers 48 --hidden-size 5120 --ffn-hidden-size 16384 --num-attention-heads 40 --num-query-groups 8 "
    "--num-experts 128 --moe-router-topk 1 --moe-ffn-hidden-size 8192 --moe-layer-freq ([0,1]*24) --swiglu "
    "--moe-shared-expert-intermediate-size 8192 --disable-bias-linear --position-embedding-type rope "
    "--rotary-base 500000 --no-rope-freq 4 --vocab-size 202048"
)
"""Values: the script of Llama 4 Maverick of Megatron-LM's examples."""


def read(text: str, folder: Path, name: str = "model.args", **request: Any) -> ForeignRun:
    (folder / name).write_text(text)
    return read_configuration([folder / name], Request(world_size=64, **request))


def model(text: str, folder: Path) -> ModelSpec:
    return read(COMMON + text, folder).described.model


@pytest.mark.parametrize(
    ("text", "preset", "keys"),
    [
        (GPT_OSS, "gpt-oss-20b", "window global_interval attention_sinks activation qkv_bias o_bias head_dim"),
        (QWEN3_NEXT, "qwen3-next-80b-a3b", "linear_attention attention_gate rope_fraction qk_norm rope_theta"),
        (MAVERICK, "llama-4-maverick", "nope_interval activation d_ffn"),
    ],
)
def test_layers_of_published_models_are_those_of_their_presets(
    text: str, preset: str, keys: str, tmp_path: Path
) -> None:
    result, expected = model(text, tmp_path), PRESETS[preset]
    assert result.n_parameters == expected.n_parameters
    assert {key: getattr(result, key) for key in keys.split()} == {key: getattr(expected, key) for key in keys.split()}
    assert result.moe is not None
    assert expected.moe is not None
    for key in ("n_experts", "top_k", "interval", "shared_gate", "bias", "shared_width"):
        assert getattr(result.moe, key) == getattr(expected.moe, key), key


DENSE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --vocab-size 512 --swiglu "
    "--disable-bias-linear --position-embedding-type rope "
)


@pytest.mark.parametrize(
    ("options", "windows", "rotated", "linear"),
    [
        ("--window-size (15,0)", [16] * 4, [True] * 4, [False] * 4),
        ("--window-size 15,0 --window-attn-skip-freq [1,0,0,1]", [16, 0, 0, 16], [True] * 4, [False] * 4),
        ("--window-size 15,0 --window-attn-skip-freq ([1]*3+[0]*1)", [16, 16, 16, 0], [True] * 4, [False] * 4),
        ("--no-rope-freq [0,1,0,1]", [0] * 4, [True, False, True, False], [False] * 4),
        (
            "--experimental-attention-variant gdn --linear-attention-freq ([1,0]*2)",
            *([0] * 4, [True] * 4, [True, False, True, False]),
        ),
    ],
)
def test_a_pattern_of_layers_is_a_number_or_a_list(
    options: str, windows: list[int], rotated: list[bool], linear: list[bool], tmp_path: Path
) -> None:
    spec = model(DENSE + options, tmp_path)
    layers = range(4)
    assert [spec.layer_window(layer) for layer in layers] == windows
    assert [spec.rotates(layer) for layer in layers] == rotated
    assert [spec.is_linear(layer) for layer in layers] == linear


def test_experts_in_some_layers_alone_and_a_shared_expert_of_another_width_are_read(tmp_path: Path) -> None:
    spec = model(
        DENSE + "--num-experts 4 --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 64 "
        "--moe-layer-freq [0,1,1,0]",
        tmp_path,
    )
    assert spec.moe is not None
    assert [spec.moe.in_layer(layer) for layer in range(4)] == [False, True, True, False]
    assert spec.moe.shared_width == 64


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--hybrid-layer-pattern M-M*", "--hybrid-layer-pattern M-M*: layers of Mamba have no price"),
        ("--hybrid-override-pattern MEM*", "layers of Mamba have no price"),
        ("--is-hybrid-model", "--is-hybrid-model: layers of Mamba have no price"),
        ("--window-size all", "--window-size all: not the tokens before and after, such as 127,0"),
        ("--window-size 15,0 --window-attn-skip-freq [1,0]", "a list of 0 and 1 for 4 layers"),
        ("--window-size 15,0 --window-attn-skip-freq 0", "not a number of 1 or more"),
        ("--no-rope-freq [2,0,0,0]", "a list of 0 and 1 for 4 layers"),
        ("--no-rope-freq __import__('os')", "not a number of 1 or more"),
        ("--no-rope-freq [0]*9**9**9", "not a number of 1 or more"),
        (
            "--experimental-attention-variant gdn --linear-attention-freq [1,0,0,1]",
            "only every n-th layer may have full attention",
        ),
        ("--num-experts 4 --moe-layer-freq [0,0,0,0]", "no layer has experts"),
    ],
)
def test_layers_without_a_price_are_refused_with_the_line(options: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        model(DENSE + options, tmp_path)
    assert any(problem in each and "model.args:1" in each for each in refused.value.problems), refused.value.problems


def test_another_variant_of_attention_is_named(tmp_path: Path) -> None:
    run = read(COMMON + DENSE + "--experimental-attention-variant dsa", tmp_path)
    (record,) = [each for each in run.records if each.option == "--experimental-attention-variant"]
    assert (record.fate, record.note) == (NO_COUNTERPART, "dsa has no counterpart: priced as full attention")


AS_YAML = """\
ENV_VARS:
  NCCL_ALGO: Ring
shared: &shared
  --num-layers: 8
  --hidden-size: 64
  --num-attention-heads: 4
  --vocab-size: 512
MODEL_ARGS:
  <<: *shared
  --num-layers: 4
  --swiglu: true
  --disable-bias-linear: false
  --micro-batch-size: 2
  --global-batch-size: 256
  --seq-length: 1024
  --bf16: true
  --tensor-model-parallel-size: 4
"""


def test_arguments_in_yaml_are_those_of_a_command(tmp_path: Path) -> None:
    run = read(AS_YAML, tmp_path, "model_config.yaml")
    described = run.described
    assert (run.system.name, described.model.n_layers, described.model.bias) == ("Megatron-LM", 4, True)
    assert (described.layout.tp, described.layout.dp_replicate, described.global_batch) == (4, 16, 256)
    assert any("ENV_VARS, shared: not options" in note for note in run.skipped)
    assert {each.option: each.where.rpartition(":")[2] for each in run.records}["--hidden-size"] == "5"


MERGED = """\
base: &base {--num-layers: 4, --hidden-size: 64, --vocab-size: 512}
middle: &middle {<<: *base, --hidden-size: 128, --num-attention-heads: 4}
other: &other {--num-attention-heads: 8, --seq-length: 1024}
MODEL_ARGS:
  <<: [*middle, *other]
  --micro-batch-size: 1
  --global-batch-size: 64
  --bf16: true
"""


def test_mappings_that_yaml_merges_have_its_order_of_precedence(tmp_path: Path) -> None:
    spec = read(MERGED, tmp_path, "merged.yaml").described.model
    assert (spec.n_layers, spec.d_model, spec.n_heads, spec.vocab_size) == (4, 128, 4, 512)
    with pytest.raises(InputError, match="more than 20 deep"):
        read("MODEL_ARGS: &a\n  <<: *a\n  --num-layers: 4\n", tmp_path, "endless.yaml")


VARIABLES = """\
MODEL_ARGS="--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --seq-length 1024 --bf16"
TRAIN_ARGS="--micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel --save /tmp"
NAME="--swiglu"
"""


def test_variables_of_a_script_without_a_command_are_taken_and_named(tmp_path: Path) -> None:
    run = read(VARIABLES, tmp_path, "model.sh", global_batch=64)
    assert (run.described.model.n_layers, run.described.layout.tp) == (4, 2)
    assert run.skipped[-1] == "no command starts a training: the options of MODEL_ARGS, TRAIN_ARGS are taken"
    with pytest.raises(InputError, match="no command with options of Megatron-LM is found"):
        read('NAME="--swiglu"\necho $NAME\n', tmp_path, "other.sh")


def test_a_command_with_few_options_is_the_training_if_most_are_the_systems(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read("torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4\n", tmp_path, "few.sh")
    assert "few.sh: --seq-length is missing (batch.seq_len), and Megatron-LM has no default" in str(error.value)
    for command in (
        "pip install --quiet --upgrade x",
        "accelerate launch --config c.yaml train.py --fp16 --lr_x 1",
        "torchrun --nproc_per_node 8 train.py",
        "grep -- --num-layers x",
        "A=\n$A\ntorchrun --nproc_per_node 8 t.py",
    ):
        with pytest.raises(InputError, match="no command with options of Megatron-LM is found; supported"):
            read(f"{command}\n", tmp_path, "other.sh")
    with pytest.raises(InputError, match=r"other\.sh:1: sources model\.sh, which is not next to the script"):
        read("source ./model.sh\ntorchrun pretrain_gpt.py --bf16 ${ARGS[@]}\n", tmp_path, "other.sh")


NEMO = """\
name: megatron_{kind}
trainer: {{num_nodes: 8, devices: 8, precision: bf16}}
model:
  micro_batch_size: 1
  global_batch_size: 64
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  encoder_seq_length: 1024
  vocab_size: 512
  {more}
"""


@pytest.mark.parametrize("kind", ["mamba", "griffin", "retro", "gpt_hyena", "t5_lm_adaptation", "bert", "bart", "ul2"])
def test_a_model_of_nemo_that_is_no_decoder_only_transformer_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"model.yaml:1: name megatron_{kind}: a model of the kind .* has no price"):
        read(NEMO.format(kind=kind, more=""), tmp_path, "model.yaml")


@pytest.mark.parametrize(
    ("more", "activation"),
    [
        ("activation: fast-geglu\n  openai_gelu: true", "geglu_tanh"),
        ("activation: geglu", "geglu_tanh"),
        ("openai_gelu: true", "gelu_tanh"),
        ("gated_linear_unit: true", "swiglu"),
        ("gated_linear_unit: true\n  activation: geglu", "geglu_tanh"),
        ("activation: squared-relu", "relu2"),
        ("activation: gelu", "gelu"),
    ],
)
def test_function_and_gate_of_a_network_are_told_apart(more: str, activation: str, tmp_path: Path) -> None:
    spec = read(NEMO.format(kind="gpt5b", more=more), tmp_path, "model.yaml").described.model
    assert spec.activation == activation
