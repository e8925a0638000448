"""Scripts and arguments of Megatron-LM."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cli.main import app
from shardwright.model.presets import PRESETS
from shardwright.readers.foreign_run import ForeignRun, Request, read_configuration
from shardwright.readers.shell import Shell
from shardwright.readers.table import NO_COUNTERPART
from shardwright.system.errors import InputError
from tests.readers import scripts


def read(text: str, folder: Path, name: str = "train.sh", **request: object) -> ForeignRun:
    path = folder / name
    path.write_text(text)
    return read_configuration([path], Request(**request))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "world", "n_parameters", "layout"),
    [
        (scripts.GPT_175B, None, PRESETS["gpt3-175b"].n_parameters, "tp=8,pp=16,dp_replicate=8,zero=0"),
        (scripts.MIXTRAL, None, PRESETS["mixtral-8x7b"].n_parameters, "pp=4,ep=8,dp_shard=16,zero=1"),
        (scripts.LLAMA_8B, None, PRESETS["llama-3.1-8b"].n_parameters, "tp=2,dp_shard=4,zero=1"),
        (scripts.DEEPSEEK_V3, 1024, PRESETS["deepseek-v3"].n_parameters, "pp=16,ep=64,dp_shard=64,zero=1"),
    ],
)
def test_published_scripts_have_their_model_and_layout(
    text: str, world: int | None, n_parameters: int, layout: str, tmp_path: Path
) -> None:
    run = read(text, tmp_path, world_size=world)
    assert run.described.model.n_parameters == n_parameters
    assert str(run.choice).startswith(layout)


def test_every_option_of_a_script_is_recorded_with_its_line(tmp_path: Path) -> None:
    run = read(scripts.GPT_175B, tmp_path)
    places = {record.option: (record.value, record.where.rpartition(":")[2], record.key) for record in run.records}
    assert len(places) == 18
    assert places["--nproc_per_node"] == ("8", "3", "cluster")
    assert places["--num-layers"] == ("96", "11", "model.n_layers")
    assert places["--global-batch-size"] == ("1536", "20", "batch.global_batch")
    assert places["--tensor-model-parallel-size"] == ("8", "23", "layout.tp")
    assert "vocab_size 50257: the default tokenizer, GPT2BPETokenizer" in run.assumed


def test_recomputation_of_some_layers_and_conditions_are_read(tmp_path: Path) -> None:
    layout = read(scripts.LLAMA_8B, tmp_path).described.layout
    assert (layout.recompute, layout.recompute_layers, layout.sequence_parallel) == ("full", 4, True)
    layout = read(scripts.DEEPSEEK_V3, tmp_path, world_size=1024).described.layout
    assert layout.stage_layers == (3, *(4,) * 14, 2)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("--num-layers 96", "", "train.sh: --num-layers is missing"),
        ("--hidden-size 12288", "--hidden-size $2", "train.sh:12: --hidden-size: its value is unknown: $2 is not set"),
        ("--hidden-size 12288", "--hidden-size $(cat x)", "train.sh:12: $(cat x) would have to be executed"),
        ("--fp16", "--fp16 --bf16", "--fp16: contradicts bf16"),
        ("--num-layers 96", "--num-layers many", "train.sh:11: --num-layers: 'many' is not a number"),
        ("--num-layers 96", "--num-layers 97", "97 cannot be partitioned equally into 16 stages"),
        (
            "--num-layers 96",
            "--num-layers 96 --num-layers-per-virtual-pipeline-stage 4",
            "96 layers are not a multiple of pp=16 x 4 layers = 64",
        ),
        ("--tensor-model-parallel-size 8", "--tensor-model-paralel-size 8", "mean --tensor-model-parallel-size?"),
        ("--seq-length 2048", "--seq-length 2048 --expert-model-parallel-size 2", "needs --num-experts"),
        ("NUM_NODES=128", "NUM_NODES=100", "= 128 ranks does not divide the 800 ranks"),
        ("NUM_NODES=128", "for NUM_NODES in 1 2; do\necho\ndone", "the variable of a for loop"),
        ('TRAIN=" ', "TRAIN=\" '", "has no price"),
        ("torchrun", "if torchrun", "truncated"),
        ("--num-layers 96", "--num-layers 1000000000", "valid: at most 16384"),
        ("--num-layers 96", "--num-layers nan", "'nan' is not a whole number"),
        ("--micro-batch-size 1", "--micro-batch-size -1", "--micro-batch-size: -1 is negative; valid: 0 or more"),
        ("NUM_NODES=128", "X=xxxxxxxxxx\n" + 'X="$X$X$X$X"\n' * 9, "X has more than 200,000 characters"),
        ("--attention-backend auto", "--attention-backend best", "'best' is not known; "),
        ("torchrun ${LAUNCH[@]}", 'torchrun "${LAUNCH[@]}', "without its end; the file is truncated"),
    ],
)
def test_a_script_that_cannot_be_planned_is_refused_with_its_line(
    before: str, after: str, problem: str, tmp_path: Path
) -> None:
    if problem == "has no price":
        before, after = "--fp16", "--fp16 --context-parallel-size 2 --cp-comm-type a2a+p2p"
    assert before in scripts.GPT_175B
    with pytest.raises(InputError) as error:
        read(scripts.GPT_175B.replace(before, after, 1), tmp_path)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --fsdp-double-buffer",
        "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads --use-distributed-optimizer",
        "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
    ],
)
def test_an_alternative_without_fsdp_removes_every_option_of_it(tmp_path: Path, options: str) -> None:
    text = scripts.LLAMA_8B.replace(" --use-distributed-optimizer", "").replace("--bf16", f"--bf16 {options}")
    run = read(text, tmp_path)
    other = replace(run.choice, layout=run.choice.layout.changed(zero=1))
    before, after = (run.system.write(run.described, each) for each in (run.choice, other))
    of_fsdp = {each.removeprefix("--").replace("-", "_") for each in options.split() if each.startswith("--")}
    of_fsdp -= {"use_distributed_optimizer"}
    assert {name for name in of_fsdp if before[name] is not None} == of_fsdp
    assert all(after[name] is None for name in of_fsdp)
    assert before["use_distributed_optimizer"] == ("--use-distributed-optimizer" in options or None)
    assert after["use_distributed_optimizer"]


def test_relative_positions_are_refused_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train\.sh:[0-9]+: --position-embedding-type relative: a bias of scores"):
        read(scripts.LLAMA_8B.replace("--position-embedding-type rope", "--position-embedding-type relative"), tmp_path)


DEFAULTS = """\
SET=5
NONE=""
A=${SET:-1} B=${UNSET:-2} C=${UNSET-3} D=${SET:+4} E=${UNSET:+5} F=${NONE:-6} G=${NONE-7}
: ${H:=8}
SET=${SET:-9}
if [ "${I:-1}" = 1 ]; then J=${J:-10}; fi
run="--a $A --b $B --c $C --d $D --e=$E --f $F --g=$G --h $H --set $SET --j $J --k $(nproc) --l 12"
sh -c "$run"
"""


def test_defaults_of_variables_are_as_in_bash_and_one_unknown_part_of_a_text_leaves_the_others_known(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.sh").write_text(DEFAULTS)
    shell = Shell()
    shell.run(tmp_path / "x.sh")
    words = {word.text: word for word in shell.commands[-1][-1].parts()}
    by_bash = subprocess.run(
        ["bash", "-c", f"{DEFAULTS.rpartition('sh -c')[0]}echo $run"], capture_output=True, text=True
    )
    expected = re.sub(r"--k \d+", "--k", by_bash.stdout).split()
    assert [word.text for word in shell.commands[-1][-1].parts() if word.text] == expected
    assert words["12"].unknown is None
    assert [each.unknown for each in shell.commands[-1][-1].parts() if each.unknown] == [
        f"{tmp_path / 'x.sh'}:7: $(nproc) would have to be executed"
    ]


def test_an_unknown_option_is_named_and_not_dropped(tmp_path: Path) -> None:
    run = read(scripts.MIXTRAL.replace("--bf16", "--bf16 --hyper-drive 7"), tmp_path)
    record = next(record for record in run.records if record.option == "--hyper-drive")
    assert (record.fate, record.value) == (NO_COUNTERPART, "7")


def test_a_truncated_script_never_raises_anything_but_an_input_error(tmp_path: Path) -> None:
    for text in (scripts.GPT_175B, scripts.MIXTRAL, scripts.LLAMA_8B):
        for end in range(0, len(text), 7):
            try:
                read(text[:end], tmp_path)
            except InputError:
                continue


def test_plan_prints_alternatives_as_options_and_writes_a_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "train.sh", tmp_path / "run.toml"
    script.write_text(scripts.LLAMA_8B)
    arguments = ["plan", "--from", str(script), "--cluster", "h100:8", "--write", str(out), "--json"]
    assert _exit_code(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["system"] == "Megatron-LM"
    assert document["layout"]["tp"] == 2
    assert document["alternatives"][0]["step_s"] < document["step_s"]
    assert {"option": "--recompute-granularity", "from": "full", "to": None} in document["alternatives"][0]["changes"]
    from shardwright.config import load

    assert load(str(out)).layout.layout().settings()["recompute_layers"] == 4


def test_a_mistake_at_the_command_line_is_one_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(scripts.LLAMA_8B)
    for arguments, problem in (
        (["--from", str(tmp_path / "none.sh")], "No such file"),
        (["--from", str(script), "--fix", "tp=2"], "leave out --fix"),
        (["--from", str(script), "--cluster", "h100:12/4"], "global_batch=128 is not a multiple"),
        (["--from", str(tmp_path / "train.docx")], "files named *.docx are not read"),
    ):
        assert _exit_code(["plan", *arguments]) == 2
        assert problem in capsys.readouterr().err


def _exit_code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        app(arguments)
    return int(end.value.code or 0)


def megatron_batches(start: int, increment: int, samples: int, last: int) -> list[tuple[int, int]]:
    """The first sample and the batch of each stage, as Megatron's calculator computes them before each step."""
    per_increment = samples / ((last - start) // increment)
    consumed, found = 0, list[tuple[int, int]]()
    while not found or found[-1][1] != last:
        batch = last if consumed > samples else start + int(consumed / per_increment) * increment
        if not found or found[-1][1] != batch:
            found.append((consumed, batch))
        consumed += batch
    return found


@pytest.mark.parametrize(("start", "increment", "samples"), [(512, 256, 1000000), (8, 8, 4000)])
def test_a_batch_that_ramps_up_is_read_as_stages(tmp_path: Path, start: int, increment: int, samples: int) -> None:
    ramp = f"--global-batch-size 1536 --rampup-batch-size {start} {increment} {samples}"
    run = read(scripts.GPT_175B.replace("--global-batch-size 1536", ramp), tmp_path)
    stages = [(stage.from_tokens // 2048, stage.global_batch) for stage in run.described.stages]
    assert stages == megatron_batches(start, increment, samples, 1536)
    assert {record.key for record in run.records if "rampup" in record.option} == {"batch.stages"}
    assert run.described.global_batch == 1536
    assert not read(
        scripts.GPT_175B.replace("--global-batch-size 1536", ramp), tmp_path, global_batch=64
    ).described.stages


@pytest.mark.parametrize(
    ("ramp", "problem"),
    [
        ("512 300 1000", "the batch grows from 512 by 300, and not to the global batch of 1536"),
        ("512 256", "three whole numbers are needed: start, increment and samples"),
        ("4 4 1000", "a step of 4 sequences is no multiple of micro-batch x data ranks, 8; "),
    ],
)
def test_a_ramp_that_megatron_refuses_is_refused(tmp_path: Path, ramp: str, problem: str) -> None:
    text = scripts.GPT_175B.replace("--fp16", f"--rampup-batch-size {ramp} --fp16")
    with pytest.raises(InputError) as error:
        read(text, tmp_path)
    assert problem in str(error.value)
