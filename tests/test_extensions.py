"""Proves that a file of a user's own is imported where the user names it or starts a run file that does, that no folder
which is only read has its code run, and that what is wrong in an extension is said."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import OF_TWO_WORDS, VERBS, app
from shardwright.config import load, resolved_toml
from shardwright.layout.layout import Layout
from shardwright.runs.folder import MODEL_FILE
from shardwright.schedule.registry import names
from shardwright.system import extensions
from shardwright.system.errors import ConfigError
from shardwright.verification import Case, Verifier
from tests.cli.test_mutated_input import write_files
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
    config = load(run_file(tmp_path, pp=2, pp_schedule="mine"), started=True)
    assert names()[-1] == "mine"
    assert config.layout.layout() == Layout(pp=2, pp_schedule="mine")
    assert f'extensions = ["{tmp_path}/mine.py"]' in resolved_toml(config), "it means the same in another folder"
    assert load(tmp_path / "run.toml").extensions == config.extensions, "a second time nothing is registered twice"


@pytest.mark.prove
def test_verify_loads_it_in_its_ranks(tmp_path: Path):
    written(tmp_path, SCHEDULE)
    load(run_file(tmp_path, pp=2, pp_schedule="mine"), started=True)
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
        load(run_file(tmp_path, pp=1), started=True)
    assert len(error.value.problems) == 1
    assert f"{tmp_path}/mine.py" in str(error.value)
    assert said in str(error.value)


def strangers(folder: Path) -> Path:
    """A run folder whose run files, also that of its checkpoint, name an extension that leaves a mark."""
    write_files(folder)
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    text = (folder / "run.toml").read_text()
    (folder / "mine.toml").write_text(text)
    for path in ("run.toml", "run/run.toml", "run/checkpoints/step-00000002/run.toml"):
        (folder / path).write_text(f'extensions = ["{folder}/evil.py"]\n{text}')
    shutil.copytree(folder / "run", folder / "weights")
    shutil.copytree(folder / "run", folder / "sweep" / "lr-0.1")
    (folder / "texts.jsonl").write_text('{"text": "a"}\n')
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "target_modules": []}))
    (folder / "adapter/adapter_model.safetensors").write_bytes((folder / "hf/model.safetensors").read_bytes())
    (folder / "weights" / MODEL_FILE).write_text(f'extensions = ["{folder}/evil.py"]\n[model]\npreset = "debug"\n')
    return folder


READING = (
    ("report", "RUN"),
    ("report", "RUN", "RUN"),
    ("watch", "RUN", "--once"),
    ("plan", "RUN/run.toml", "--cluster", "h100:8"),
    ("plan", "diff", "RUN/run.toml", "MINE", "--cluster", "h100:8"),
    ("plan", "serve", "RUN", "--cluster", "h100:8"),
    ("generate", "RUN", "--prompt", "a"),
    ("generate", "MINE", "--prompt", "a", "--draft", "RUN"),
    ("export", "RUN", "--out", "OUT"),
    ("export", "WEIGHTS", "--out", "OUT"),
    ("convert", "RUN", "OUT", "--to", "dcp"),
    ("convert", "WEIGHTS", "OUT", "--to", "hf"),
    ("eval", "RUN", "--data", "TOKENS"),
    ("eval", "WEIGHTS", "--data", "TOKENS"),
    ("score", "RUN", "TEXTS"),
    ("score", "WEIGHTS", "TEXTS", "--check"),
    ("merge", "RUN", "WEIGHTS", "--out", "OUT"),
    ("merge", "RUN", "RUN/checkpoints/step-00000002", "--out", "OUT"),
    ("import", "ADAPTER", "--base", "RUN", "--out", "OUT"),
    ("launch", "RUN/run.toml", "--on", "slurm", "--nodes", "1"),
    ("mup-check", "RUN/run.toml", "--widths", "16,32"),
    ("sweep", "MINE", "--grid", "lr=0.1", "--set", 'model.from="RUN"', "--out", "OUT"),
    ("sweep", "MINE", "--grid", "lr=0.1", "--set", 'init.weights="WEIGHTS"', "--out", "OUT"),
    ("sweep", "MINE", "--grid", "lr=0.1", "--out", "SWEEP"),
    ("sweep", "MINE", "--grid", "lr=0.1", "--out", "SWEEP", "--show"),
    ("explore", "RUN/run.toml", "--static", "OUT"),
    ("verify", "RUN/run.toml"),
    ("dryrun", "RUN/run.toml"),
    ("train", "MINE", "--set", 'model.from="RUN"'),
    ("train", "MINE", "--set", 'model.from="WEIGHTS"'),
    ("train", "MINE", "--set", 'init.weights="RUN"'),
    ("train", "MINE", "--set", 'checkpoint.resume="RUN/checkpoints/step-00000002"'),
    ("train", "MINE", "--resume", "--set", 'out="RUN"'),
)


OTHER_PROBLEMS_FIRST = ("train", "generate", "eval", "score", "sweep", "import")
"""Verbs for which these folders have problems that are found without the run file."""

NOT_READING = {
    "quickstart": "writes its own run",
    "data": "reads text, and tokens, whose folders name no extension",
    "measure": "reads nothing",
    "schedule": "reads schedules, which name no extension",
    "plan calibrate": "reads logs, and configurations of other systems, which are not executed",
    "plan explain-log": "reads logs, and configurations of other systems, which are not executed",
    "plan evaluate-serving": "reads tables",
    "plan evaluate-rl": "reads tables",
    "plan rl": "reads models of transformers, which are not executed, and tables of hardware",
}
"""Verbs that read no run file and no folder of a run."""


def test_every_verb_that_reads_a_run_takes_part():
    tested = {" ".join(words[:2]) if " ".join(words[:2]) in OF_TWO_WORDS else words[0] for words in READING}
    assert tested | set(NOT_READING) == {*VERBS, *OF_TWO_WORDS}
    assert not tested & set(NOT_READING)


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_folder_that_is_only_read_has_no_code_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str]):
    folder = strangers(tmp_path)
    monkeypatch.chdir(folder)
    names = {"RUN": "run", "MINE": "mine.toml", "WEIGHTS": "weights", "OUT": "o", "TOKENS": "tokens"}
    names |= {"TEXTS": "texts.jsonl", "SWEEP": "sweep", "ADAPTER": "adapter"}
    given = [re.sub("|".join(names), lambda match: str(folder / names[match[0]]), word) for word in words]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2, result.output
    assert not (folder / "ran").exists()
    if words[0] not in OTHER_PROBLEMS_FIRST:
        assert f"look at them, and if you trust them, add --extension {folder}/evil.py" in result.output


@pytest.mark.prove
def test_an_extension_that_the_user_has_named_is_trusted_until_it_changes(tmp_path: Path):
    folder = strangers(tmp_path)
    read = ["plan", str(folder / "run.toml"), "--cluster", "h100:8", "--json"]

    def ran(*more: str) -> bool:
        """Whether a process that has imported nothing yet runs the extension."""
        extensions._LOADED.clear()
        CliRunner().invoke(app, [*read, *more])
        mark = folder / "ran"
        is_there = mark.exists()
        mark.unlink(missing_ok=True)
        return is_there

    assert not ran()
    assert ran("--extension", str(folder / "evil.py"))
    assert ran()
    (folder / "evil.py").write_text((folder / "evil.py").read_text() + "# another\n")
    assert not ran()


@pytest.mark.parametrize("name", ["a\\u0000.py", "\\u0000", ""])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str):
    path = run_file(tmp_path)
    path.write_text(path.read_text().replace("mine.py", name))
    for started in (True, False):
        with pytest.raises(ConfigError, match=r"a Python file \(.py\) or a module is needed"):
            load(path, started=started)


def test_a_module_is_found_by_its_name():
    extensions.load(["tests.test_extensions"])
    assert extensions.loaded() == ("tests.test_extensions",)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("SystemExit(0)", "SystemExit: 0"),
        ("GeneratorExit", "GeneratorExit: "),
        ("BaseException('x')", "BaseException: x"),
    ],
)
def test_an_extension_that_exits_is_refused(tmp_path: Path, error: str, said: str):
    (tmp_path / "leaves.py").write_text(f"raise {error}\n")
    with pytest.raises(ConfigError, match=rf"leaves.py: cannot be imported, line 1: {said}"):
        extensions.load([str(tmp_path / "leaves.py")])


def test_an_extension_that_exits_while_a_verb_runs_ends_it_with_an_error(tmp_path: Path):
    (tmp_path / "leaves.py").write_text(
        "import sys\n"
        "from shardwright.schedule.registry import Kind, register\n"
        "register(Kind(name='leaver', builder=lambda ranks, microbatches: sys.exit(0), help='leaves'))\n"
    )
    asked = ["schedule", "--schedule", "leaver", "--pp", "2", "--microbatches", "4", "--extension", "leaves.py"]
    command = [sys.executable, "-m", "shardwright", *asked]
    environment = os.environ | {"XDG_CONFIG_HOME": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert re.fullmatch(r"error: the command was ended by SystemExit\(0\) at \S+leaves.py:3\n", ended.stderr)
