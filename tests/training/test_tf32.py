"""Proves without a GPU that precision.tf32 decides how a GPU multiplies fp32 tensors, and which peak MFU goes by."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.config import parse
from shardwright.training.numbers import LogNumbers
from shardwright.training.step import Trainer
from tests.mutation import Mutation, mutated
from tests.training.runs import train, write_run_file

STAYING = ExitStack()
"""Holds the bugs of a rank's process until it ends."""


def note_the_setting(folder: Path, before: bool, mutations: tuple[Mutation, ...], rank: int) -> None:
    """Write down the setting of PyTorch in the first step; `before`: what it is when the run begins."""
    STAYING.enter_context(mutated(*mutations))
    torch.backends.cuda.matmul.allow_tf32 = before
    step = Trainer.step

    def note(self, batch, number, rate):
        (folder / "seen").write_text(str(torch.backends.cuda.matmul.allow_tf32))
        return step(self, batch, number, rate)

    Trainer.step = note


def check_setting(folder: Path, tokens: Path, wanted: bool, *mutations: Mutation) -> None:
    run_file = write_run_file(folder, tokens)
    settings = ["layout.dp_shard=1", "steps=1", f"precision.tf32={str(wanted).lower()}"]
    arguments = [each for setting in settings for each in ("--set", setting)]
    train(run_file, *arguments, fault=partial(note_the_setting, folder, not wanted, mutations))
    assert (folder / "seen").read_text() == str(wanted)


@pytest.mark.parametrize("wanted", [True, False])
def test_matmuls_of_fp32_are_in_tf32_where_the_run_file_says_so_and_nowhere_else(wanted: bool, tokens, tmp_path):
    check_setting(tmp_path, tokens, wanted)


def mfu(**precision: Any) -> float:
    """MFU of a step of 2 s on an H100."""
    text = {"out": "x", "steps": 1, "model": {"preset": "debug"}, "data": {"path": "none"}, "precision": precision}
    config = parse(text | {"batch": {"seq_len": 16, "global_batch": 8}})
    phases = {"data": 0.0, "forward_backward": 1.5, "optimizer": 0.5}
    clock: Any = SimpleNamespace(read=lambda: phases)
    nothing: Any = SimpleNamespace()
    sources = SimpleNamespace(attended_tokens=lambda step, seq_len: 16.0, schedule=config.batch.schedule)
    samples: Any = SimpleNamespace(sources=sources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
        found = LogNumbers(config, nothing, samples, torch.device("cuda"), clock, nothing)._speed(1, 1)
    assert found["tokens_per_s"] == 64
    return float(found["mfu"]) / float(found["tflops_per_s_per_device"])


def test_mfu_goes_by_the_peak_of_the_type_that_is_multiplied_in():
    assert mfu() == pytest.approx(1 / 67)
    assert mfu(tf32=True) == pytest.approx(1 / 494.5)
    assert mfu(compute="bf16", tf32=True) == pytest.approx(1 / 989)


SETTING = "torch.backends.cuda.matmul.allow_tf32 = config.precision.tf32"
_INIT = "shardwright.training.run:_run"
BUGS = {
    "a run that asks for TF32 multiplies in fp32": (True, Mutation(_INIT, SETTING, "pass")),
    "every run in fp32 multiplies in TF32": (
        False,
        Mutation(_INIT, SETTING, SETTING.replace("config.precision.tf32", "True")),
    ),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name: str, tokens, tmp_path):
    wanted, bug = BUGS[name]
    with pytest.raises(AssertionError):
        check_setting(tmp_path, tokens, wanted, bug)
