"""Proves that the verbs do from Python what they do from the command line, and that the examples run as they say."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import shardwright
from shardwright.config import load
from shardwright.data.prepare import prepare
from shardwright.system.errors import ConfigError, InputError, LayoutError
from shardwright.verification import Verifier
from tests.marks import prove
from tests.mutation import Mutation
from tests.training.worlds import train_mutated

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_public_name_is_there_and_says_what_it_is():
    for name in shardwright.__all__:
        assert (getattr(shardwright, name).__doc__ or "").strip(), name
    assert set(shardwright.__all__) <= set(dir(shardwright))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = shardwright.trian


def test_a_plan_needs_no_torch_and_names_a_layout():
    code = (
        "import sys, shardwright\n"
        "found = shardwright.plan('debug', 'h100:2/2', global_batch=16, seq_len=128, top=3)\n"
        "assert len(found.best) == 3 and found.best[0].layout.world_size == 2\n"
        "assert found.best[0].step_s <= found.best[1].step_s and found.best[0].micro_batch >= 1\n"
        "assert callable(shardwright.plan)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    with pytest.raises(InputError, match="'h10'"):
        shardwright.plan("debug", "h10:8", global_batch=16, seq_len=128)


def test_a_layout_is_verified():
    report = shardwright.verify(shardwright.Layout(dp_replicate=2), steps=1)
    assert report.equal
    assert "dp_replicate 2, zero 0 against one process: equal; largest relative error" in str(report)
    between = shardwright.verify(shardwright.Layout(tp=2), steps=1, against=shardwright.Layout(cp=2))
    assert between.equal
    assert between.against.startswith("cp 2")
    with pytest.raises(LayoutError, match="tp=3"):
        shardwright.verify(shardwright.Layout(tp=3))


def test_a_run_is_trained_read_and_its_model_restored(tmp_path: Path):
    prepare(Path(__file__).parents[1], tmp_path / "tokens", glob="model/*.py", vocab_size=300, validation=0.1)
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "d_ffn": 24, "vocab_size": 300}
    table = {
        "out": str(tmp_path / "out"),
        "steps": 20,
        "device": "cpu",
        "model": sizes,
        "data": {"path": str(tmp_path / "tokens")},
        "batch": {"seq_len": 16, "global_batch": 16},
        "optimizer": {"lr": 1e-2},
    }
    run = shardwright.train(table, {"layout.dp_shard": 2, "steps": 4, "metrics.every": 1}, quiet=True)
    assert run is not None
    assert [record["step"] for record in run.metrics] == [1, 2, 3, 4]
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    assert run.validation[-1][0] == 4
    assert run.config.layout.dp_shard == 2
    again = shardwright.load_run(run.folder)
    assert again.metrics == run.metrics
    assert again.checkpoints[-1].name == "step-00000004"
    model = again.model()
    assert isinstance(model, shardwright.Transformer)
    assert torch.isfinite(model(torch.zeros(1, 8, dtype=torch.long))).all()
    assert load(run.folder / "run.toml").steps == 4
    with pytest.raises(ConfigError, match="dp_shrad"):
        shardwright.train(table, {"layout.dp_shrad": 2})
    with pytest.raises(InputError, match="no such folder"):
        shardwright.load_run(tmp_path / "absent")


def ran(*command: str) -> str:
    done = subprocess.run([*command], capture_output=True, text=True, timeout=200, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
TORCHRUN += ("--rdzv-endpoint", "localhost:0")


@pytest.mark.prove
def test_the_loop_of_the_example_learns_on_two_ranks():
    said = ran(*TORCHRUN, "examples/own_loop.py").splitlines()
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in said]
    assert len(losses) == 6
    assert losses[-1] < 0.3 < losses[0]


@pytest.mark.prove
def test_the_model_of_the_example_is_equal_to_one_process():
    assert "tp 2 against one process: equal" in ran(sys.executable, "examples/own_model.py")


@prove
def test_the_model_of_the_example_is_trained():
    assert float(ran(*TORCHRUN, "examples/own_model.py", "train").split("loss ")[1]) < 4.5


def test_the_page_shows_the_loop_of_the_example():
    loop = (EXAMPLES / "own_loop.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n{loop}```" in (EXAMPLES.parent / "docs" / "python.md").read_text()


@prove
def test_the_culprit_is_named_where_a_layout_is_not_equal(monkeypatch: pytest.MonkeyPatch):
    bug = Mutation(
        "shardwright.parallel.apply:shard", "group.set_gradient_divide_factor(1.0)",
        "group.set_gradient_divide_factor(0.5)",
    )  # fmt: skip
    monkeypatch.setattr(Verifier.__init__, "__defaults__", (partial(train_mutated, (bug,)), 60.0))
    report = shardwright.verify(shardwright.Layout(dp_shard=2, dp_replicate=2), steps=1)
    assert not report.equal
    assert "dp_shard 2, zero 1 (2 ranks)" in report.culprit
    assert report.culprit in str(report)


@pytest.mark.prove
def test_a_module_of_a_users_own_and_what_is_no_layout_are_named():
    module, layout = torch.nn.Linear(2, 2), shardwright.Layout(tp=2)
    for act in (
        lambda: shardwright.parallelize(module, layout),
        lambda: shardwright.verify(layout, module),
        lambda: shardwright.plan(module, "h100:8", global_batch=8, seq_len=128),
    ):
        with pytest.raises(ConfigError, match=r"model is of type torch\.nn\..*\.Linear; valid: the name"):
            act()
    for act in (
        lambda: shardwright.verify(module),
        lambda: shardwright.parallelize("debug", {"tp": 2}),
        lambda: shardwright.verify(layout, against="tp=2"),
    ):
        with pytest.raises(ConfigError, match=r"layout is of type .*; valid: a Layout, such as"):
            act()


def test_a_layout_of_more_ranks_than_this_machine_holds_is_reduced():
    report = shardwright.verify(shardwright.Layout(dp_shard=64, tp=2), global_batch=64, steps=1)
    assert report.equal
    assert (report.layout.dp_shard, report.layout.tp, report.layout.zero) == (2, 2, 3)
