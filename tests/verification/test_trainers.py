"""Proves that a correct trainer of PyTorch's own systems is equal to one process, that each known silent bug is
reported with its tensor and axis, and that a trainer that cannot be compared is refused in one sentence."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from shardwright.cli.main import app
from shardwright.config import load
from shardwright.system.errors import InputError
from shardwright.verification.trainers.adapter import Options, World, invalid_degrees, trainer_class
from shardwright.verification.trainers.case import config_of, trainer_case
from shardwright.verification.trainers.parity import TrainerJob, factorisations
from shardwright.verification.trainers.pieces import expert_problem
from tests.marks import prove, rest_prove

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"


def verify(trainer: Path, *arguments: object) -> Result:
    command = ["verify", "--trainer", str(trainer), *map(str, arguments)]
    return CliRunner().invoke(app, command, env={"COLUMNS": "160"})


def changed(folder: Path, example: str, *changes: tuple[str, str]) -> Path:
    """Write an example with changes to its source."""
    source = (EXAMPLES / example).read_text()
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    path = folder / "trainer.py"
    path.write_text(source)
    return path


GREEN = [
    ("ddp.py", "dp=2"),
    ("fsdp2.py", "replicate=2", "shard=2"),
    ("tensor_parallel.py", "tp=2"),
    ("pipeline.py", "pp=2", "dp=2"),
]


@pytest.mark.parametrize("given", rest_prove([(each,) for each in GREEN], (GREEN[0],)), ids=lambda given: given[0])
def test_an_example_is_equal_to_one_process(given: tuple[str, ...]):
    example, *axes = given
    n_ranks = 2 ** len(axes)
    result = verify(EXAMPLES / example, "--world", n_ranks, *(word for axis in axes for word in ("--set", axis)))
    assert result.exit_code == 0, result.output
    assert "the same bits on all ranks that hold them" in result.output


@prove
def test_an_example_is_equal_in_float32_too():
    result = verify(EXAMPLES / "ddp.py", "--world", 2, "--dtype", "float32", "--steps", 1)
    assert result.exit_code == 0, result.output


@prove
def test_the_training_step_of_shardwright_is_equal_through_the_same_door():
    result = verify(Path("shardwright"), "--world", 4, "--steps", 1, "--set", "tp=2", "--set", "layout.zero=2")
    assert result.exit_code == 0, result.output
    assert "dp_replicate 2, tp 2, layout.zero 2 against one process" in result.output


MEAN = (
    "loss_sum(self.model(tokens), targets) / batch.n_targets",
    "torch.nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten()) "
    "/ len(batch.micro_batches) / self.world.size",
)


@prove
def test_a_result_that_is_no_number_is_not_equal_and_not_called_random(tmp_path: Path):
    nan = "{name: p.grad * float('nan') for name, p"
    bad = changed(tmp_path, "ddp.py", ("{name: p.grad for name, p", nan))
    result = verify(bad, "--world", 2, "--steps", 1)
    assert result.exit_code == 1, result.output
    assert "is NaN or infinite" in result.output


@pytest.mark.parametrize("value", ["abc", 1.5, -2, True, None])
def test_a_number_of_experts_that_is_no_whole_number_is_refused(value: Any):
    with pytest.raises(InputError, match=f"experts={value}: valid: a whole number of 0 or more"):
        expert_problem(1, {"experts": value})


def test_ep_of_an_adapter_needs_experts_that_it_divides():
    assert expert_problem(2, {"experts": 4}) is expert_problem(1, {}) is None
    assert expert_problem(2, {}) == "ep=2 needs --set experts=N, a multiple of 2"
    assert expert_problem(2, {"experts": 3}) == "ep=2 does not divide experts=3; --set experts=4"


@pytest.mark.parametrize(("option", "said"), [
    ("--compile", "--compile is for layouts of a run file"),
    ("--no-evaluate", "--no-evaluate is for layouts of a run file"),
    ("--full", "--full: there is no run file to take the sizes from"),
])  # fmt: skip
def test_an_option_without_effect_is_refused(option: str, said: str):
    result = verify(EXAMPLES / "ddp.py", "--world", 2, option)
    assert result.exit_code == 2
    assert said in result.output


BUGS: list[tuple[str, tuple[str, str], str, list[str]]] = [
    ("ddp.py", MEAN, "dp=2", ["gradient of ", "it is equal without accumulation and without ragged masks"]),
    (
        "ddp.py",
        ("loss * self.world.size", "loss * self.world.size**2"),
        "dp=2",
        [
            "in step 1 (unclipped) is 2 times the reference's, as every other gradient is",
            "dp 2 (2 ranks)",
            "it is equal without dp=2",
        ],
    ),
    (
        "ddp.py",
        ("if last else", "if n == 1 else"),
        "dp=2",
        ["not the same bits on ranks 0 | 1", "it is equal without dp=2 and without accumulation"],
    ),
    (
        "fsdp2.py",
        ("fully_shard(module, mesh=mesh)", 'fully_shard(module, mesh=mesh["shard"])'),
        "replicate=2",
        ["gradient of ", "not the same bits on ranks 0 | 1", "it is equal without replicate=2"],
    ),
    (
        "fsdp2.py",
        ("module.set_gradient_divide_factor(1.0)", "pass"),
        "shard=2",
        ["is 0.5 times the reference's"],
    ),
    (
        "tensor_parallel.py",
        ("self.data_rank, self.data_ranks = 0, 1", "self.data_rank, self.data_ranks = world.rank, world.size"),
        "tp=2",
        ["loss in step 1", "gradient of ", "it is equal without tp=2"],
    ),
    (
        "pipeline.py",
        (", scale_grads=False", ""),
        "pp=2",
        ["is 0.25 times the reference's, as every other gradient is", "it is equal without accumulation"],
    ),
    (
        "pipeline.py",
        ("            dist.all_reduce(p.grad, group=self.dp)", "            pass"),
        "dp=2",
        ["gradient embedding.weight, unclipped, step 1: not the same bits", "it is equal without dp=2"],
    ),
    (
        "pipeline.py",
        ("        dist.all_reduce(squares, group=self.pp)\n", ""),
        "pp=2",
        ["gradient of ", "(clipped)", "it is equal without pp=2 and without clipping"],
    ),
]


@prove
@pytest.mark.parametrize(("example", "bug", "axis", "words"), BUGS)
def test_a_silent_bug_is_reported_with_its_tensor_and_axis(
    tmp_path: Path, example: str, bug: tuple[str, str], axis: str, words: list[str]
):
    result = verify(changed(tmp_path, example, bug), "--world", 2, "--steps", 1, "--set", axis, "--json")
    assert result.exit_code == 1, result.output
    culprit = json.loads(result.stdout)["culprit"]
    assert [each for each in words if each not in culprit] == [], culprit


@prove
def test_of_two_bugs_the_one_that_changes_gradients_is_named(tmp_path: Path):
    bugs = [("loss * self.world.size", "loss * self.world.size**2"), ("batch.clip_norm)", "batch.clip_norm / 2)")]
    bad, reference = changed(tmp_path, "ddp.py", *bugs), EXAMPLES / "ddp.py"
    for ranks, words in ((2, "it is equal without dp=2"), (1, "(clipped)")):
        result = verify(bad, "--world", ranks, "--steps", 1, "--reference", reference, "--json")
        assert result.exit_code == 1, result.output
        assert words in json.loads(result.stdout)["culprit"]


TOO_SLOW = (
    "    def step(self, batch):\n",
    "    def step(self, batch):\n        import time; time.sleep(60 * self.world.rank)\n",
)
REFUSED: list[tuple[Any, int, str]] = [
    (("import torch\n", "import flash_attn\nimport torch\n"), 2, "line 5: flash_attn cannot be imported"),
    (("class Trainer:", "class Train:"), 2, "a class named Trainer is needed; it has "),
    (("def gradients(", "def grads("), 2, "class Trainer has no method gradients"),
    (("Decoder(spec)", "Decoder(spec).cuda()"), 2, "line 15: the trainer needs an accelerator"),
    (
        ("return dict(self.model.module", "return dict(self.model"),
        2,
        "parameters(): module.head.weight is no name of the reference",
    ),
    (
        ("{name: p.grad for", "{name: p.grad if self.world.rank else None for"),
        2,
        "gradients() has None for embedding.weight on rank 0 and a tensor on rank 1",
    ),
    (
        ("total = torch.zeros(())", "total = torch.tensor(float(__import__('time').time_ns() % 1000003))"),
        2,
        "is not deterministic: two runs of it (one rank) differ by",
    ),
    (("Decoder(spec)", "Decoder(spec).float()"), 2, "parameters are torch.float32, and torch.float64 is compared"),
    (("self.model.module.load_state_dict(weights)", "pass"), 2, "load() of the reference did not set layers.0."),
    (("self.optimizer.zero_grad()", "1 / (1 - self.world.rank)"), 3, "rank 1 failed: ZeroDivisionError"),
    (TOO_SLOW, 3, "ranks 0, 1 were not done within 20 s"),
]


@pytest.mark.parametrize(
    ("change", "code", "words"), rest_prove(REFUSED, REFUSED[0], REFUSED[5]), ids=lambda value: str(value)[:40]
)
def test_a_trainer_that_cannot_be_compared_is_refused(tmp_path: Path, change: Any, code: int, words: str):
    trainer = changed(tmp_path, "ddp.py", change)
    reference = ["--reference", EXAMPLES / "ddp.py"] if "named" in words or "no name" in words else []
    result = verify(trainer, "--world", 2, "--steps", 1, *reference, *(["--timeout", 20] if change == TOO_SLOW else []))
    text = " ".join(result.stderr.split())
    assert result.exit_code == code, result.output
    assert words in text
    assert ("Traceback" in text) == ("ZeroDivision" in words)
    if change == TOO_SLOW:
        assert "--- rank 1 ---" in text
        assert "trainer.py" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world", 4, "--set", "dp=3"], "dp=3 does not divide 4 ranks; valid: 1, 2, 4"),
        (["--world", 4, "--set", "dp=2"], "dp=2 are 2 ranks, and there are 4; leave an axis out, or take 2 ranks"),
        (["--matrix", 2, "--world", 2], "--matrix 2 is the number of ranks of each layout; leave out --world 2"),
        (["--set-b", "layout.tp=2"], "--set-b is for layouts of a run file; leave it out with --trainer"),
        (["--model", "llama-3.1-8b"], "--model is for layouts of a run file; leave it out with --trainer"),
        (
            ["--seq-len", 8, "--cluster", "h100:8"],
            "--seq-len is for layouts of a run file; leave it out with --trainer",
        ),
        (["--dtype", "bfloat16"], "--dtype bfloat16: a trainer is compared in its own matmuls; valid: float64"),
        (["--set", "model.n_layer=3"], "n_layers"),
        (["--world", 1, "--steps", 1, "--set", "ddp=2"], "ddp=2: the trainer reads no such axis or option; valid: dp"),
    ],
)
def test_an_option_that_does_not_fit_a_trainer_is_named(arguments: list[object], words: str):
    result = verify(EXAMPLES / "ddp.py", *arguments)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())


def test_layouts_that_the_trainer_refuses_are_returned_with_the_reason():
    settings, left_out = TrainerJob("torch", 4, ["model.n_kv_heads=2"]).settings(every=True)
    assert [str(layout) for layout, _ in left_out] == ["tp 4"]
    assert "do not divide n_kv_heads=2" in left_out[0][1]
    assert len(settings) == 9


def test_each_way_to_distribute_ranks_over_axes_is_a_layout():
    assert [*factorisations(4, 2)] == [(4, 1), (2, 2), (1, 4)]
    assert {*factorisations(6, 3)} == {each for each in product((1, 2, 3, 6), repeat=3) if prod(each) == 6}


@prove
def test_a_matrix_shows_the_axis_of_a_trainer_that_is_wrong(tmp_path: Path):
    bad = changed(tmp_path, "fsdp2.py", ("fully_shard(module, mesh=mesh)", 'fully_shard(module, mesh=mesh["shard"])'))
    result = verify(bad, "--matrix", 2, "--steps", 1, "--json")
    assert result.exit_code == 1, result.output
    layouts = json.loads(result.stdout)["layouts"]
    assert [(each["layout"], each["equal"]) for each in layouts] == [("replicate 2", False), ("shard 2", True)]


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_the_model_of_a_run_file_is_cut_to_sizes_that_the_axes_partition_like_the_true_ones(n_ranks: int):
    config = load(Path("examples/llama-3.1-8b.toml"))
    true, small = config.spec(), trainer_case(config, n_ranks, ()).spec
    for size in ("n_layers", "n_heads", "n_kv_heads", "d_ffn", "vocab_size", "max_seq_len"):
        for degree in range(1, n_ranks + 1):
            assert (getattr(small, size) % degree == 0) == (getattr(true, size) % degree == 0), (size, degree)
    assert small.n_parameters < 1_000_000  # of 8 billion


def test_the_keys_of_the_batch_that_are_set_are_not_reduced():
    keys = {"seq_len": 40, "global_batch": 12, "micro_batch": 3}
    config = load(Path("examples/debug.toml"), [f"batch.{key}={value}" for key, value in keys.items()])
    for key, value in keys.items():
        assert getattr(trainer_case(config, 2, {f"batch.{key}"}), key) == value
    reduced = trainer_case(config, 2, ())
    assert (reduced.seq_len, reduced.global_batch, reduced.micro_batch) != (40, 12, 3)


TORCH: list[tuple[str, ...]] = [("tp=2",), ("fsdp=2",), ("pp=2", "schedule=ZBVZeroBubble", "model.n_layers=4")]


@pytest.mark.parametrize("given", rest_prove([(each,) for each in TORCH]), ids=lambda given: given[0])
def test_an_axis_of_pytorch_is_equal_to_one_process(given: tuple[str, ...]):
    sets = (word for key in given for word in ("--set", key))
    result = verify(Path("torch"), "--world", 2, "--steps", 1, *sets)
    assert result.exit_code == 0, result.output


TORCH_BUGS = [
    (("pp=2", "scale_grads=true"), "is 0.25 times the reference's", "without pp=2 and without scale_grads=True"),
    (("fsdp=2", "divide=true"), "is 0.5 times the reference's", "without fsdp=2"),
]


@prove
@pytest.mark.parametrize(("given", "factor", "needed"), TORCH_BUGS, ids=lambda value: str(value)[:30])
def test_a_default_of_pytorch_that_divides_gradients_again_is_named(given: tuple[str, ...], factor: str, needed: str):
    sets = (word for key in given for word in ("--set", key))
    result = verify(Path("torch"), "--world", 2, "--steps", 1, *sets, "--json")
    assert result.exit_code == 1, result.output
    culprit = json.loads(result.stdout)["culprit"]
    assert factor in culprit
    assert needed in culprit


def test_a_matrix_leaves_out_degrees_that_the_trainer_refuses():
    spec = trainer_case(config_of(None, 4, ["model.n_kv_heads=2"])[0], 4).spec
    axes = ("dp", "fsdp", "tp", "pp")
    degrees = [dict(zip(axes, product, strict=True)) for product in factorisations(4, 4)]
    reasons = invalid_degrees("torch", spec, degrees, {})
    refused = [each for each, reason in zip(degrees, reasons, strict=True) if reason]
    assert refused == [{"dp": 1, "fsdp": 1, "tp": 4, "pp": 1}]
    assert "4 parts do not divide n_kv_heads=2; --set model.n_kv_heads=4" in reasons
    assert invalid_degrees("shardwright", spec, degrees[:1], {}) == [""]


@prove
def test_a_matrix_runs_the_other_layouts_when_one_is_refused(tmp_path: Path):
    refuses = "        if world.axes['pp'] == 2:\n            raise InputError('no pipeline today')\n"
    bad = changed(
        tmp_path,
        "pipeline.py",
        ("        mesh = world.mesh()\n", f"{refuses}        mesh = world.mesh()\n"),
        ("import torch\n", "import torch\nfrom shardwright.system.errors import InputError\n"),
    )
    result = verify(bad, "--matrix", 2, "--steps", 1, "--json")
    assert result.exit_code == 3, result.output
    layouts = json.loads(result.stdout)["layouts"]
    assert [(each["layout"], each["equal"]) for each in layouts] == [("dp 2", True), ("pp 2", False)]
    assert "no pipeline today" in result.stdout


@prove
def test_accelerate_is_equal_to_one_process():
    pytest.importorskip("accelerate")
    result = verify(Path("accelerate"), "--matrix", 2, "--steps", 1)
    assert result.exit_code == 0, result.output


@prove
def test_torchtitan_is_equal_to_one_process():
    pytest.importorskip("torchtitan")
    result = verify(Path("torchtitan"), "--world", 2, "--steps", 1, "--set", "tp=2")
    assert result.exit_code == 0, result.output


def break_accelerate(folder: Path) -> None:
    (folder / "accelerate").mkdir()
    (folder / "accelerate/__init__.py").write_text("raise ValueError('ACCELERATOR=cpuu: valid: cpu')\n")


def test_an_adapter_whose_package_raises_at_its_import_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    break_accelerate(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    monkeypatch.delitem(sys.modules, "shardwright.verification.trainers.accelerate", raising=False)
    with pytest.raises(InputError, match=r"--trainer accelerate: .*\(ValueError: ACCELERATOR=cpuu: valid: cpu\); set"):
        trainer_class("accelerate")


@prove
def test_the_server_lives_on_if_the_import_of_an_adapter_raises(tmp_path: Path):
    break_accelerate(tmp_path)
    command = [sys.executable, "-m", "shardwright", "verify", "--trainer", "accelerate", "--world", "2"]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "ACCELERATOR=cpuu" in result.stderr
    assert "Traceback" not in result.stderr


@prove
def test_an_argument_that_a_release_of_transformers_has_not_is_refused(monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("shardwright.verification.trainers.transformers")
    monkeypatch.setattr(transformers, "TrainingArguments", Old)
    options = Options({"average_tokens_across_devices": False})
    with pytest.raises(InputError, match=r"average_tokens_across_devices: transformers \d.* has no such argument"):
        transformers._options(World(0, 1, {"dp": 1}, options, torch.float64))


@dataclass
class Old:
    """TrainingArguments of a release without the argument."""

    output_dir: str


@pytest.mark.parametrize(("name", "package"), [
    ("accelerate", "accelerate"),
    ("megatron", "megatron-core"),
    ("torchtitan", "torchtitan"),
])  # fmt: skip
def test_an_adapter_whose_package_is_missing_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"shardwright.verification.trainers.{name}", raising=False)
    with pytest.raises(InputError, match=rf"--trainer {name}: .*; install it: pip install {package}$"):
        trainer_class(name)
