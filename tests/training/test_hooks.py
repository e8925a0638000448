"""Proves that a user's own hooks take part in a run, and that the parts of a run are complete when they are made."""

import ast
from collections.abc import Iterator
from pathlib import Path

import shardwright
from tests.training.runs import checkpoints, checksums, events, lines, records, train, write_run_file

EXTEND = Path(__file__).parents[1] / "extend"


def test_a_users_hooks_add_a_metric_and_skip_steps_on_every_rank(run_file: Path):
    text = (EXTEND / "skip_large_norms.py").read_text()
    eager = run_file.parent / "skip_all_after_two.py"
    eager.write_text(text.replace("LEAST, TIMES = 10, 3.0", "LEAST, TIMES = 2, 0.0"))
    extensions = [str(EXTEND / "tokens_seen.py"), str(eager)]
    settings = (f"extensions={extensions!r}", "steps=4", "checkpoint.every=1", "checkpoint.keep_last=4")
    run = train(run_file, *(word for setting in settings for word in ("--set", setting)))
    assert [record["tokens_seen"] for record in records(run_file)] == [64, 128, 192, 256]
    first, second, third, fourth = (checksums(run_file, step) for step in (1, 2, 3, 4))
    assert first != second == third == fourth
    assert [event.step for event in events(run_file) if event.kind == "skip"] == [3, 4]
    assert "step 3 skipped: its gradient norm is " in run.stdout


STOPS = """
import os, signal
import torch.distributed as dist
from shardwright.training.hooks import Hook, HookKind, register

class Stops(Hook):
    def on_log(self, taken, numbers):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

register(HookKind("stops", lambda run: Stops()))
"""


def test_a_run_that_a_rank_is_asked_to_stop_saves_without_finishing_the_evaluation_and_a_resume_repeats_it(
    ragged_tokens: Path, tmp_path: Path
):
    run_file = write_run_file(tmp_path, ragged_tokens)
    (run_file.parent / "stops.py").write_text(STOPS)
    settings = (f"extensions={[str(run_file.parent / 'stops.py')]!r}", "evaluation.every=1", "evaluation.samples=16")
    run = train(run_file, *(word for setting in settings for word in ("--set", setting)), expect=75)
    assert "evaluation after step 1 not finished: the run was asked to stop" in run.stdout
    assert checkpoints(run_file) == ["step-00000001"]
    assert [line["step"] for line in lines(run_file) if line["kind"] == "evaluation"] == [0]
    train(run_file, "--resume", *(word for setting in settings[1:] for word in ("--set", setting)), "--set", "steps=2")
    assert [line["step"] for line in lines(run_file) if line["kind"] == "evaluation"] == [0, 1, 2]


PARTS = {
    "trainer": ("training/step.py:Trainer", "training/forward_backward.py:ForwardBackward"),
    "model": ("parallel/model.py:ParallelModel",),
    "runner": ("parallel/pipeline/runner.py:Pipeline", "parallel/microbatch_runner.py:SequentialRunner"),
    "messages": ("parallel/pipeline/messages.py:PipelineMessages",),
    "engine": ("parallel/data.py:Sharded",),
    "optimizer": ("training/offload/on_host.py:OptimizerOnHost", "training/offload/on_disk.py:OptimizerOnDisk"),
    "link": ("training/offload/on_host.py:HostLink",),
    "on_host": ("training/on_shards.py:OptimizerOnShards",),
    "store": ("training/checkpoint/store.py:CheckpointStore", "parallel/offload.py:ActivationsOnHost"),
    "spikes": ("training/resilience/spikes.py:SpikeGuard",),
    "scaler": ("training/loss_scale.py:LossScaler",),
    "clock": ("training/clock.py:PhaseClock",),
    "samples": ("training/sources.py:RunSamples",),
    "log": ("training/run_log.py:RunLog",),
    "observers": ("parallel/observer.py:Observers",),
    "monitor": ("training/resilience/monitor.py:Monitor",),
    "timeline": ("training/clock.py:StepTimeline", "training/clock.py:TimelineFile"),
    "loop": ("training/loop.py:TrainLoop",),
    "saving": ("training/saving.py:SaveCheckpoints",),
}
"""The name that code gives an object -> its classes."""
OF_OTHERS = "verification/trainers/torchtitan.py"
"""Its trainer is torchtitan's."""


def stored_attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The last name of each object of which an attribute is set, and the attribute, also by `setattr` with a text."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(owner, attribute, ast.Store()):
                pass
            case ast.Call(ast.Name("setattr"), [owner, ast.Constant(attribute), _]):
                pass
            case _:
                continue
        yield owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", ""), attribute


def attributes_of(root: Path, part: str) -> set[str]:
    """The attributes that the classes of a file set on `self`, and their methods."""
    file, _, name = part.partition(":")
    classes = {node.name: node for node in ast.parse((root / file).read_text()).body if isinstance(node, ast.ClassDef)}
    assert name in classes
    methods = {node.name for made in classes.values() for node in made.body if isinstance(node, ast.FunctionDef)}
    stored = (each for made in classes.values() for each in stored_attributes(made))
    return methods | {attribute for owner, attribute in stored if owner == "self"}


def test_no_file_sets_an_attribute_of_a_part_of_a_run_from_outside():
    root = Path(shardwright.__file__).parent
    attributes = {
        name: {attribute for part in parts for attribute in attributes_of(root, part)} for name, parts in PARTS.items()
    }
    assert {"optimizer", "spikes", "update", "_microbatches"} <= attributes["trainer"]
    assert {"step", "_update", "link"} <= attributes["optimizer"]
    by_text = ast.parse("run.trainer._x = f; setattr(run.trainer, '_y', f); setattr(loop, 'step', 3)")
    assert sorted(stored_attributes(by_text)) == [("loop", "step"), ("trainer", "_x"), ("trainer", "_y")]
    outside = [
        f"{path.relative_to(root)}: {owner}.{attribute}"
        for path in sorted(root.rglob("*.py"))
        for owner, attribute in stored_attributes(ast.parse(path.read_text()))
        if attribute in attributes.get(owner, ()) and path != root / OF_OTHERS
    ]
    assert outside == []
