"""Proves what `shardwright plan` takes, models, accelerators and batches, and that bad input is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.config import load
from tests.cli.plans import REAL, SMALL, TINY, document, plan

GOAL = (*SMALL, "--budget-tokens", 1e9)
HARDWARE = """
[accelerators.mine]
memory_gib = 40
memory_gb_per_s = 2000
memory_share = 0.9
multiprocessors = 100
tflops = { bf16 = 400 }
matmul_share = { bf16 = 0.7 }
node_size = 4
network = "infiniband"
gbit_per_s = 100

[accelerators.mine.inside]
bus_gb_per_s = 200
start_us = 5
latency_us = 2
half_mib = 1
"""


def test_an_accelerator_of_ones_own_is_planned_for(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(HARDWARE)
    found = document("--model", "debug", "--cluster", "mine:4", *SMALL[4:], "--hardware", path)
    assert (found["accelerator"], found["node_size"]) == ("mine", 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "lama-3.1-8b", *REAL[2:]], ["lama-3.1-8b", "did you mean 'llama-3.1-8b'?"]),
        ([*SMALL[:2], "--cluster", "h10:8", *SMALL[4:]], ["'h10'", "did you mean"]),
        ([*SMALL[:2], "--cluster", "h100", *SMALL[4:]], ["'h100'", "NAME:COUNT"]),
        ([*SMALL[:2], "--cluster", "h100:12", *SMALL[4:]], ["h100:12", "nodes of 8", "8", "16"]),
        (
            [*SMALL[:2], "--cluster", "h100:40", "--global-batch", 3, "--seq-len", 128],
            ["--global-batch 3", "nearest: 5"],
        ),
        ([*SMALL[:4], *SMALL[6:]], ["--global-batch is missing"]),
        ([*SMALL[:4], "--global-batch", 16], ["--seq-len is missing"]),
        ([*SMALL[2:]], ["--model is missing"]),
        ([*SMALL[:2], *SMALL[4:]], ["--cluster is missing"]),
        ([*SMALL[:4], "--global-batch", 0, "--seq-len", 128], ["--global-batch 0", "1 or more"]),
        ([*SMALL, "--precision", "bf17"], ["--precision bf17", "did you mean"]),
        ([*SMALL, "--top", 0], ["--top 0", "1 or more"]),
        ([*SMALL, "--memory-margin", 1], ["--memory-margin 1", "below 1"]),
        ([*SMALL, "--budget-tokens", 0], ["--budget-tokens 0", "above 0"]),
        ([*SMALL, "--expert-load", "cv=0.3"], ["--expert-load cv=0.3: the model has no experts; leave it out"]),
        ([*SMALL, "--price", 2], ["--price goes with --budget-tokens N"]),
        ([*GOAL, "--price", "-1"], ["--price -1: a price above 0 is needed, such as 2.5"]),
        ([*GOAL, "--price", "h200=x"], ["--price h200=x: a price above 0"]),
        ([*GOAL, "--price", "h201=2"], ["--price h201=2: accelerator 'h201' is not known", "did you mean"]),
        ([*GOAL, "--price", "2", "--price", "3"], ["--price 3: the price of all accelerators is given twice"]),
        ([*GOAL, "--operations", "detect=3"], ["'detect' is not a key", "detect_min"]),
        ([*GOAL, "--operations", "save=asink"], ["save='asink': did you mean 'async'?"]),
        ([*GOAL, "--operations", "save=local"], ["save=local: h100:8 has a single node", "valid: sync, async"]),
        ([*GOAL, "--operations", "save_every=1.5"], ["save_every='1.5': valid: a whole number from 1 to"]),
        ([*GOAL, "--operations", "failures=0"], ["failures='0': valid: a number from 1e-06 to 1,000"]),
        (
            [*GOAL, "--operations", "failures=1000,restart_min=9999"],
            ["--operations: h100:8 is interrupted every 3 h", "valid: smaller failures, detect_min or restart_min"],
        ),
        ([*SMALL, "--write", "no/such/run.toml"], ["no folder no/such", "make it first"]),
        ([*SMALL, "--write", "run.txt"], ["--write run.txt", "*.toml"]),
        ([*SMALL, "--overwrite"], ["--overwrite goes with --write"]),
        ([*SMALL, "--html", "no/such/plan.html"], ["no folder no/such", "make it first"]),
        (
            [*SMALL, "--cluster", "b200:8", "--precision", "mxfp8", "--write", "run.toml"],
            ["mxfp8", "fp32 or tf32 or bf16 or fp16 or fp8"],
        ),
        ([*SMALL, "--explain", "tp=2", "--html", "a.html"], ["--html", "--explain", "leave one out"]),
        ([*SMALL, "--explain", "cp=4,cp_method=usp,ulysses_degree=2,dp_shard=2"], ["cp_method=usp", "no price"]),
        ([*SMALL, "--explain", "tpp=8"], ["tpp=8", "did you mean 'tp'?"]),
        ([*SMALL, "--explain", "tp=2"], ["= 2 ranks", "h100:8 has 8 accelerators"]),
        ([*SMALL, "--explain", "tp=4,dp_shard=2,micro_batch=3"], ["global_batch=16", "nearest"]),
        ([*SMALL, "--fix", "tp=3"], ["--fix tp=3: no layout", "tp: 1, 2, 4"]),
        ([*SMALL, "--fix", "tp=2", "--explain", "tp=2"], ["--fix", "--explain", "leave one out"]),
        (["debug", "--cluster", "h100:8"], ["debug: no such run file; a preset is named with --model debug"]),
        (["absent.toml", "--cluster", "h100:8"], ["absent.toml", "no such run file"]),
        (["evaluat", "--cluster", "h100:8"], ["evaluat", "no such run file", "evaluate"]),
        (["evaluate", "absent.csv"], ["absent.csv"]),
        ([*SMALL, "--hardware", "absent.toml"], ["absent.toml"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:60],
)
def test_bad_input_is_refused_in_a_line(arguments: list[object], said: list[str]):
    result = plan(*arguments, columns=500)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.output.startswith("error: ")
    for part in said:
        assert part in result.output
    assert len(result.output.splitlines()) == 1, result.output


def test_every_problem_is_told_at_once():
    result = plan("--precision", "x", "--cluster", "nope:8", columns=400)
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 5, result.output
    result = plan("--model", "nope", "--top", 0, "--memory-margin", 2, "--explain", "tpp=2", columns=400)
    for part in ("nope", "--cluster is missing", "--top 0", "--memory-margin 2", "tpp=2"):
        assert part in result.output
    result = plan(*SMALL, "--explain", "tp=3,pp=9,micro_batch=5", columns=400)
    assert len(result.output.splitlines()) >= 3, result.output


def test_a_model_is_read_from_a_config_of_transformers(tmp_path: Path):
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    written = tmp_path / "run.toml"
    options = ("--global-batch", 8, "--seq-len", 4096, "--explain", "dp_shard=8", "--write", written)
    told = plan("--model", path, "--cluster", "h100:8", *options)
    assert told.exit_code == 0, told.output
    assert f'from = "{tmp_path}"' in written.read_text()
    layer = 2048 * (2 * 2048 + 2 * 512 + 3 * 8192) + 2 * 2048
    assert load(written).model.spec().n_parameters == 128256 * 2048 + 16 * layer + 2048


def test_a_model_is_given_by_a_few_sizes_and_written_with_them(tmp_path: Path):
    sizes, written = "n_layers=24,d_model=2048,n_heads=16,d_ffn=5632,vocab_size=32000", tmp_path / "run.toml"
    options = ("--global-batch", 8, "--seq-len", 4096, "--explain", "dp_shard=8", "--write", written)
    told = plan("--model", sizes, "--cluster", "h100:8", *options)
    assert told.exit_code == 0, told.output
    spec = load(written).model.spec()
    assert (spec.n_layers, spec.head_dim, spec.n_kv_heads, spec.max_seq_len) == (24, 128, 16, 4096)
    layer = 2048 * (4 * 2048 + 3 * 5632) + 2 * 2048
    assert spec.n_parameters == 2 * 32000 * 2048 + 24 * layer + 2048


def test_a_published_config_in_fp8_is_planned_and_its_sizes_are_written(tmp_path: Path):
    config = tmp_path / "config.json"
    sizes = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 512,
        "max_position_embeddings": 256, "hidden_act": "silu", "rms_norm_eps": 1e-3,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    config.write_text(json.dumps(sizes))
    asked = ("--model", config, "--cluster", "h100:2", "--global-batch", 8, "--seq-len", 128)
    told = document(*asked, "--write", tmp_path / "run.toml")
    assert load(tmp_path / "run.toml").model.spec().n_parameters == told["parameters"]
    served = [
        "plan",
        "serve",
        "--model",
        config,
        "--cluster",
        "h100:1",
        "--input-len",
        64,
        "--output-len",
        64,
        "--json",
    ]
    assert CliRunner().invoke(app, list(map(str, served))).exit_code == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--model", "nothere.json"), "--model nothere.json: no such file or folder"),
        (("--model", "./nowhere"), "--model ./nowhere: no such file or folder"),
        (("--model", "./" + "x" * 300), "no such file or folder"),
        (("--model", "n_layers=2,x" + "x" * 300), "vocab_size is missing"),
        (("--link", "warp"), "--link warp: name an accelerator that has the link"),
        (("--network", "warp"), "--network warp: network 'warp' is not known"),
    ],
)
def test_what_is_missing_is_named_by_its_option(given: tuple[str, str], said: str):
    result = plan(*TINY, *given)
    assert result.exit_code == 2
    assert said in result.output
