"""Proves that a mistake in a trainer's file is reported in one sentence, or as results that differ, and never hangs."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardwright.system.errors import InputError
from shardwright.verification.trainers.adapter import Options, axes_of
from tests.marks import prove, rest_prove
from tests.verification.test_trainers import changed, verify

CLASS, INIT = "class Trainer:\n", "        self.world = world\n"
IMPORT, STEP, LOSS = "import torch\n", "    def step(self, batch):\n", "return total.item()"
GRADIENTS = "return {name: p.grad for name, p in self.model.module.named_parameters()}"
PARAMETERS = "return dict(self.model.module.named_parameters())"
NAMED = "for n, p in self.model.module.named_parameters()"
NORM = "    def gradients(self):"


def after(line: str, code: str) -> tuple[str, str]:
    """Return the change that puts a statement of a method after a line."""
    return line, f"{line}        {code}\n"


def norm_change(value: str) -> tuple[str, str]:
    return NORM, f"    def gradient_norm(self):\n        return {value}\n\n{NORM}"


IN_THE_CLASS: list[tuple[tuple[str, str], str]] = [
    ((CLASS, f"{CLASS}    AXES = ()\n"), r"AXES=\(\); a tuple of the names of axes is needed"),
    ((CLASS, f"{CLASS}    AXES = (1, 2)\n"), r"AXES=\(1, 2\); a tuple of the names of axes is needed"),
    ((CLASS, f"{CLASS}    AXES = ('dp', 'dp')\n"), "dp occurs more than once"),
    ((CLASS, "def Trainer(): pass\nclass Other:\n"), "a class named Trainer is needed; it has "),
    ((CLASS, "class Trainer\n"), "line 12"),
    ((IMPORT, f"raise ValueError('no config')\n{IMPORT}"), "no config"),
    ((IMPORT, f"import sys; sys.exit(1)\n{IMPORT}"), "trainer .*SystemExit"),
    ((IMPORT, f"raise ImportError('undefined symbol: _ZN2at')\n{IMPORT}"), "undefined symbol: _ZN2at; the installed"),
    (("self, spec, world", "self, spec"), r"is called as __init__\(self, spec, world\)"),
    (("def load(self, weights)", "def load(self)"), r"is called as load\(self, weights\)"),
    (("def step(self, batch)", "def step(self, tokens, targets)"), "missing a required argument: 'targets'"),
    (("    def step(self", "    step = 3\n\n    def stop(self"), "class Trainer has no method step"),
]
"""Changes to `ddp.py`, each with a pattern of the sentence that refuses the class."""


@pytest.mark.parametrize(("change", "words"), IN_THE_CLASS, ids=lambda value: str(value)[:50])
def test_a_class_that_cannot_be_a_trainer_is_refused_in_one_sentence(
    tmp_path: Path, change: tuple[str, str], words: str
):
    with pytest.raises(InputError, match=words) as refused:
        axes_of(str(changed(tmp_path, "ddp.py", change)))
    assert len(refused.value.problems) == 1


def test_an_option_that_is_missing_is_named_and_one_with_a_default_is_not():
    options: Mapping[str, object] = Options({})
    assert options.get("tp", 1) == 1
    with pytest.raises(InputError, match="the trainer needs the option tp: --set tp=VALUE"):
        options["tp"]


IN_ONE_PROCESS: list[tuple[tuple[str, str], int, str]] = [
    ((LOSS, "return total.repeat(2)"), 2, "step() returned a tensor of shape (2,); a number or a tensor with one"),
    ((LOSS, "return 'low'"), 2, "step() returned str; a number"),
    ((LOSS, "return None"), 2, "step() returned None on every rank"),
    (norm_change("None"), 2, "gradient_norm() returned NoneType; a number"),
    (norm_change("[1.0]"), 2, "gradient_norm() returned list; a number"),
    ((GRADIENTS, "return list(self.model.parameters())"), 2, "gradients() returned list; a dict of global names"),
    ((GRADIENTS, GRADIENTS.replace("p.grad", "p.grad.numpy()")), 2, "is of type ndarray; a whole tensor"),
    ((GRADIENTS, GRADIENTS.replace("p.grad", "p.grad.to_sparse()")), 2, "is of the layout torch.sparse_coo; a dense"),
    ((GRADIENTS, f"return {{n: p.grad {NAMED} if n != 'head.weight'}}"), 2, "gradients(): head.weight is on no rank"),
    ((PARAMETERS, f"return {{n: p.to('meta') {NAMED}}}"), 2, "is on the meta device; a dense tensor with values"),
    ((PARAMETERS, "return None"), 2, "parameters() returned NoneType; a dict of global names"),
    (after(INIT, "self.data_rank, self.data_ranks = 1, 1"), 2, "data_rank=1 of rank 0: valid are 0 to data_ranks - 1"),
    (after(INIT, "self.data_rank, self.data_ranks = 0.5, 1"), 2, "data_rank=0.5 of rank 0: valid are 0"),
    (after(INIT, "dist.init_process_group('gloo')"), 2, "made before the trainer; leave out init_process_group"),
    (after(INIT, "torch.cuda.Stream()"), 2, "the trainer needs an accelerator"),
    (after(INIT, "spec.n_layer"), 2, "spec has no n_layer; did you mean 'n_layers'?"),
    (after(STEP, "batch.token"), 2, "batch has no token; did you mean 'tokens'?"),
    (after(STEP, "return self.step(batch)"), 3, "rank 0 failed: RecursionError"),
    (after(STEP, "import sys; sys.exit(0)"), 3, "was ended by SystemExit(0)"),
    (after(STEP, "import os; os._exit(0)"), 3, "rank 0 left with code 0, but before its work was done"),
    (after(STEP, "import os; os.kill(os.getpid(), 11)"), 3, "rank 0 was killed by signal 11 (SIGSEGV)"),
]
"""Changes to `ddp.py`, each with the exit code and words of the message."""


@pytest.mark.parametrize(
    ("change", "code", "words"), rest_prove(IN_ONE_PROCESS, IN_ONE_PROCESS[0]), ids=lambda value: str(value)[:50]
)
def test_a_trainer_that_fails_in_one_process_is_reported(
    tmp_path: Path, change: tuple[str, str], code: int, words: str
):
    result = verify(changed(tmp_path, "ddp.py", change), "--world", 1, "--steps", 1, "--timeout", 60)
    text = " ".join(result.stderr.split())
    assert result.exit_code == code, result.output
    assert words in text
    assert ("Traceback" in text) == ("RecursionError" in words)


ON_TWO_RANKS: list[tuple[tuple[str, str], int, str]] = [
    ((LOSS, "return total.item() + torch.seed() % 9 * (self.world.size - 1)"), 2, "not deterministic: two runs"),
    ((LOSS, f"{LOSS} * (1 + self.world.rank)"), 1, "not the same bits on ranks 0 | 1"),
    ((PARAMETERS, f"return {{n: p[: len(p) - self.world.rank] {NAMED}}}"), 2, "the whole embedding.weight has shape"),
    ((PARAMETERS, f"return {{n: p.float() if self.world.rank else p {NAMED}}}"), 2, "parameters are torch.float32"),
    ((PARAMETERS, f"return {{n + 'x' * self.world.rank: p {NAMED}}}"), 2, "embedding.weightx is no name of the"),
    (after(STEP, "[tokens.zero_() for tokens, _ in batch.micro_batches]"), 0, ""),
    (after(STEP, "list(torch.utils.data.DataLoader(range(4), num_workers=1))"), 2, "num_workers=0"),
    (after(STEP, "import os; os.chdir('/')"), 0, ""),
    (("        dist.all_reduce(total)\n", "        self.world.rank or dist.all_reduce(total)\n"), 3, "rank"),
]


@prove
@pytest.mark.parametrize(("change", "code", "words"), ON_TWO_RANKS, ids=lambda value: str(value)[:50])
def test_a_mistake_that_two_ranks_show_is_reported(tmp_path: Path, change: tuple[str, str], code: int, words: str):
    result = verify(changed(tmp_path, "ddp.py", change), "--world", 2, "--steps", 1, "--timeout", 60)
    assert result.exit_code == code, result.output
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.stderr


@prove
def test_a_trainer_that_prints_and_forks_leaves_the_report_and_no_process(tmp_path: Path):
    fork = "import os, time; print('step'); os.fork() or time.sleep(3600)"
    trainer = changed(tmp_path, "ddp.py", after(STEP, fork))
    command = [sys.executable, "-m", "shardwright", "verify", "--trainer", str(trainer), "--world", "1", "--steps", "1"]
    # The outputs are pipes, which a process that is left would keep open.
    result = subprocess.run([*command, "--json"], capture_output=True, text=True, env=os.environ, timeout=300)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["equal"]
    assert "step" in result.stderr
