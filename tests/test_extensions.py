"""Proves that a file of a user's own is imported where a run file names it, and that what is wrong in it is said."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright import extensions
from shardwright.cli.main import app
from shardwright.config import load, resolved_toml
from shardwright.errors import ConfigError
from shardwright.layout import Layout
from shardwright.schedule.registry import names
from shardwright.verification import Case, Verifier
from tests.training.worlds import SPEC

SCHEDULE = '''
from shardwright.schedule.actions import Action, make
from shardwright.schedule.registry import Kind, register


def backwards(n_ranks, n_microbatches):
    """afab, whose backward passes take the last microbatch first."""
    order = range(n_microbatches)
    return make(
        n_ranks,
        n_microbatches,
        ([Action(r, "F", i) for i in order] + [Action(r, "B", i) for i in reversed(order)] for r in range(n_ranks)),
    )


register(Kind(name="{name}", builder=backwards, help="afab, last microbatch first"))
'''


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch):
    """What a test registers is gone after it."""
    from shardwright.schedule import registry

    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    monkeypatch.setattr(extensions, "_LOADED", [])


def written(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.py"
    path.write_text(text.replace("{name}", name))
    return path


def run_file(folder: Path, **layout: object) -> Path:
    lines = "\n".join(f"{key} = {value!r}" for key, value in layout.items())
    path = folder / "run.toml"
    path.write_text(
        'out = "out"\nsteps = 1\nextensions = ["mine.py"]\n[data]\npath = "d"\n'
        f"[batch]\nseq_len = 16\nglobal_batch = 8\n[layout]\n{lines}\n"
    )
    return path


def test_a_schedule_of_a_run_files_extension_is_a_choice_of_the_layout(tmp_path: Path):
    written(tmp_path, SCHEDULE)
    config = load(run_file(tmp_path, pp=2, pp_schedule="mine"))
    assert names()[-1] == "mine"
    assert config.layout.layout() == Layout(pp=2, pp_schedule="mine")
    assert f'extensions = ["{tmp_path}/mine.py"]' in resolved_toml(config), "it means the same in another folder"
    assert load(tmp_path / "run.toml").extensions == config.extensions, "a second time nothing is registered twice"


@pytest.mark.prove
def test_verify_loads_it_in_its_ranks(tmp_path: Path):
    written(tmp_path, SCHEDULE)
    load(run_file(tmp_path, pp=2, pp_schedule="mine"))
    case = Case(SPEC, seq_len=16, global_batch=4, steps=1)
    with Verifier() as verifier:
        assert verifier.parity(case, Layout(pp=2, pp_schedule="mine")).equal


def test_the_planner_prices_it_and_the_schedule_verb_draws_it(tmp_path: Path):
    path = written(tmp_path, SCHEDULE)
    drawn = CliRunner().invoke(
        app, ["schedule", "--extension", str(path), "--schedule", "mine", "--pp", "2", "--microbatches", "4", "--json"]
    )
    assert drawn.exit_code == 0, drawn.output
    assert '"schedule": "mine"' in drawn.output
    job = ["--model", "debug", "--cluster", "h100:2/2", "--global-batch", "8", "--seq-len", "64", "--precision", "bf16"]
    line = ["--explain", "pp=2,pp_schedule=mine", "--json", "--extension", str(path)]
    priced = CliRunner().invoke(app, ["plan", *job, *line])
    assert priced.exit_code == 0, priced.output
    assert "pp_schedule=mine" in priced.output


def test_a_row_that_promises_what_its_builder_does_not_do_is_refused(tmp_path: Path):
    extensions.load([str(written(tmp_path, SCHEDULE.replace('"B", i)', '"I", i)')))])
    from shardwright.schedule.build import build

    with pytest.raises(ValueError, match=r"schedule 'mine', of 2 ranks and 4 microbatches: stage 0: I without W"):
        build("mine", 4, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("import nothing_of_this_name", "cannot be imported, line 1: ModuleNotFoundError"),
        ("x = 1\nif x", "cannot be imported: SyntaxError"),
        (SCHEDULE.replace("{name}", "1f1b"), "schedule '1f1b' is registered already"),
    ],
)
def test_what_is_wrong_with_it_is_one_line(tmp_path: Path, text: str | None, said: str):
    if text is not None:
        written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load(run_file(tmp_path, pp=1))
    assert len(error.value.problems) == 1
    assert f"{tmp_path}/mine.py" in str(error.value)
    assert said in str(error.value)


def test_a_module_is_found_by_its_name():
    extensions.load(["tests.test_extensions"])
    assert extensions.loaded() == ("tests.test_extensions",)


def test_an_extension_that_exits_is_refused(tmp_path: Path):
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(ConfigError, match=r"leaves.py: cannot be imported, line 1: SystemExit: 0"):
        extensions.load([str(tmp_path / "leaves.py")])
