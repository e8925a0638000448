"""Proves that code of a user's own that ends the process never ends a run as if all its steps had been taken."""

from itertools import product
from pathlib import Path

import pytest

from tests.marks import rest_prove
from tests.training.runs import records, train, write_run_file

LEAVING = {"SystemExit(0)": "raise SystemExit(0)", "os._exit(0)": "os._exit(0)", "interrupt": "raise KeyboardInterrupt"}

PLACES = {
    "import": "{leave}",
    "hook": """
class Leaves(Hook):
    def {method}(self, *args):
        {leave}

register(HookKind("leaves", lambda run: Leaves()))
""",
    "making a hook": """
def make(run):
    {leave}

register(HookKind("leaves", make))
""",
    "thread of a hook": """
class Leaves(Hook):
    def on_log(self, taken, numbers):
        def work():
            {leave}
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

register(HookKind("leaves", lambda run: Leaves()))
""",
    "writer": """
def leave(*args, **options):
    {leave}

fake = types.ModuleType("wandb")
fake.__spec__ = ModuleSpec("wandb", None)
fake.init = lambda **options: types.SimpleNamespace(log=leave, finish=lambda: None)
sys.modules["wandb"] = fake
""",
}
HEAD = """
import os, sys, threading, types
from importlib.machinery import ModuleSpec
from shardwright.training.hooks import Hook, HookKind, register

"""
GOES_ON = {("writer", "SystemExit(0)"), ("thread of a hook", "SystemExit(0)"), ("thread of a hook", "interrupt")}
"""Where the error ends a writer or a thread, and not the run."""

METHODS = ("on_start", "takes_step", "on_log", "close")
CASES = [
    *((place, "", leaving, ranks) for place, leaving, ranks in product(PLACES, LEAVING, (1, 2)) if place != "hook"),
    *(("hook", method, leaving, 1) for method, leaving in product(METHODS, LEAVING)),
    *(("hook", "on_log", leaving, 2) for leaving in LEAVING),
]
PLAIN = (("hook", "on_log", "os._exit(0)", 1), ("writer", "", "SystemExit(0)", 1))


@pytest.mark.parametrize(("place", "method", "leaving", "ranks"), rest_prove(CASES, *PLAIN))
def test_code_of_a_user_that_leaves_does_not_end_a_run_with_code_0(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, method: str, leaving: str, ranks: int
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    run_file = write_run_file(tmp_path, tokens)
    leaves = PLACES[place].format(leave=LEAVING[leaving], method=method)
    (tmp_path / "leaves.py").write_text(HEAD + leaves)
    settings = [f"extensions={[str(tmp_path / 'leaves.py')]!r}", f"layout.dp_shard={ranks}", "steps=3"]
    settings += ["metrics.wandb_project='x'"] * (place == "writer")
    goes_on = (place, leaving) in GOES_ON
    code = 3
    if goes_on:
        code = 0
    elif place == "import" and leaving == "SystemExit(0)":
        code = 2
    elif leaving == "interrupt" and (ranks == 1 or place == "import"):  # a rank of several has failed
        code = 130
    run = train(run_file, *(word for each in settings for word in ("--set", each)), expect=code)
    assert "Traceback" not in run.stdout
    if goes_on:
        assert [record["step"] for record in records(run_file)] == [1, 2, 3]
    elif leaving != "interrupt":
        assert (
            "leaves.py" if ranks == 1 or place == "import" or leaving != "os._exit(0)" else "left with code 0"
        ) in run.stderr
