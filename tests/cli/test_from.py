"""`dryrun --from` and `verify --from` read configurations of other systems as `plan --from` does."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.cli.plan_from import load_run, read_run, run_file_text
from shardwright.cli.plan_options import FromOptions
from shardwright.cli.verify import VerifyOptions, _configs
from shardwright.config import parse
from shardwright.cost.hardware import cluster
from shardwright.model.presets import PRESETS
from shardwright.readers.foreign_run import Request, read_configuration
from shardwright.system.errors import InputError
from tests.cost.test_measured import MINE
from tests.readers import scripts
from tests.readers.scripts import MIXTRAL
from tests.readers.test_files import ACCELERATE, ARGUMENTS, DEEPSPEED, LLAMA_405B, LLAMA_PYTHON

SMALL = """\
torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 \\
  --ffn-hidden-size 128 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --vocab-size 256 --bf16 --swiglu \\
  --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 \\
  --attention-dropout 0
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "160"})


@pytest.mark.parametrize(
    ("texts", "function", "given", "layout"),
    [
        ({"mixtral.sh": MIXTRAL}, "", {"cluster": "h100:64"}, {"pp": 4, "ep": 8}),
        (
            {"llama.toml": LLAMA_405B},
            "",
            {"cluster": "h100:128", "seq_len": 4096},
            {"tp": 8, "dp_shard": 16, "zero": 3},
        ),
        ({"llama3.py": LLAMA_PYTHON}, ":llama3_70b", {"cluster": "h100:64"}, {"tp": 8, "dp_shard": 8}),
        (
            {"ds.json": json.dumps(DEEPSPEED), "arguments.json": json.dumps(ARGUMENTS)},
            "",
            {"cluster": "h100:16", "model": "llama-3.1-8b"},
            {"dp_shard": 16, "zero": 3},
        ),
        (
            {"a.yaml": ACCELERATE, "b.json": json.dumps(ARGUMENTS)},
            "",
            {"model": "llama-3.1-8b"},
            {"dp_replicate": 2, "dp_shard": 8, "zero": 3},
        ),
    ],
)
def test_a_configuration_of_each_kind_becomes_a_run_file_with_its_layout(
    tmp_path: Path, texts: dict[str, str], function: str, given: dict[str, Any], layout: dict[str, int]
) -> None:
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    files = [Path(f"{tmp_path / name}{function}") for name in texts]
    config = load_run(FromOptions(from_=files, **given), None, ["optimizer.lr=0.5"], ())
    read = config.layout.layout()
    assert {key: getattr(read, key) for key in layout} == layout
    assert config.optimizer.lr == 0.5
    assert config.batch.seq_len == given.get("seq_len", config.batch.seq_len)
    if "model" in given:
        assert config.spec() == PRESETS["llama-3.1-8b"]


def test_a_second_layout_of_a_configuration_is_announced_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a.sh").write_text(SMALL)
    options = VerifyOptions(
        from_=[tmp_path / "a.sh"], cluster="h100:4", overrides_b=["layout.tp=1", "layout.dp_shard=2"]
    )
    assert [each.layout.layout().tp for each in _configs(options)] == [2, 1]
    assert capsys.readouterr().err.count("plan --from shows the settings that were read") == 1


def test_contradicting_and_missing_options_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(SMALL)
    with pytest.raises(InputError, match=r"run.toml and --from .*a.sh are both configurations; leave one out"):
        load_run(FromOptions(from_=[file]), Path("run.toml"), [], ())
    with pytest.raises(InputError, match="--model and --seq-len describe a configuration of --from; for a run file"):
        load_run(FromOptions(model="llama-3.1-8b", seq_len=8, cluster="h100"), Path("run.toml"), [], ("cluster",))
    with pytest.raises(typer.BadParameter, match="name a run file"):
        load_run(FromOptions(), None, [], ())
    file.write_text(SMALL.replace("--seq-length 32", "--seq-lenght 32"))
    with pytest.raises(InputError, match=r"a.sh:2: --seq-lenght: not an option of Megatron-LM; did you mean"):
        load_run(FromOptions(from_=[file]), None, [], ())


def test_measured_rates_of_a_hardware_file_price_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    (tmp_path / "a.sh").write_text(SMALL.replace("--bf16", ""))
    given = FromOptions(from_=[tmp_path / "a.sh"], cluster="mine:4", hardware=tmp_path / "mine.toml")
    run, cluster, assumed = read_run(given.from_ or [], given.plan_options())
    assert any("as fast as measured on" in each for each in assumed)
    rates = cluster.accelerator.rates
    assert rates is not None
    assert run.job(cluster).calibration.ramp_k == rates.ramp_k


@pytest.mark.prove
def test_dryrun_and_verify_run_the_layout_of_a_script_of_megatron(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(SMALL)
    dry = invoke("dryrun", "--from", file, "--cluster", "h100:4", "--no-remedies", "--json")
    assert dry.exit_code == 0, dry.output
    assert "tp=2,pp=2" in dry.output
    equal = invoke("verify", "--from", file, "--cluster", "h100:4", "--steps", "1", "--json")
    assert equal.exit_code == 0, equal.output
    assert json.loads(equal.stdout)["equal"] is True


def test_a_run_file_has_the_stages_of_a_ramp(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    ramp = "--global-batch-size 1536 --rampup-batch-size 512 512 1000000"
    script.write_text(scripts.GPT_175B.replace("--global-batch-size 1536", ramp).replace("--fp16", "--bf16"))
    run = read_configuration([script], Request())
    for tokens, n_stages in ((None, 3), (1.5e9, 2)):
        text = run_file_text(run, run.job(cluster("a100-80gb:1024")), "plan", tokens)
        schedule = parse(tomllib.loads(text)).batch.schedule
        expected = [(stage.from_tokens, stage.global_batch) for stage in run.described.stages[:n_stages]]
        assert [(stage.tokens_before, stage.global_batch) for stage in schedule.stages] == expected
