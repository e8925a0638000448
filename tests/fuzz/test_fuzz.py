"""Proves that random settings follow from seed and number, contain every choice, and are shrunk where they fail."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli.main import app
from shardwright.config import parse
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.model.modules import FAMILIES
from shardwright.model.sections import AuxScope, LatentAttentionSpec, MoESpec, RopeScaling, Score
from shardwright.model.spec import Activation, ModelSpec, Norm, Positions
from shardwright.optimizers import OPTIMIZERS
from shardwright.schedule.registry import names
from shardwright.verification import Case, Report, Verifier, case_of
from shardwright.verification.rank import train_rank
from shardwright.verification.trace import RankTrace
from tests.fuzz import tool
from tests.fuzz.settings import NOT_DRAWN, WORLDS, DrawnSetting, draw, problems, run_file
from tests.fuzz.shrink import failure, shrink
from tests.marks import prove
from tests.mutation import Mutation
from tests.training.worlds import NO_SUM_OF_COPIES, train_mutated

pytestmark = pytest.mark.usefixtures("built_in_only")

N = 300
SMALL = 393
"""A seed whose first setting has one layer, on two ranks of dp_replicate."""
SHARDED = 233
"""A seed whose first setting has token shards: tp 2, dp_replicate 2."""


@cache
def drawn() -> list[DrawnSetting]:
    return [draw(1, number) for number in range(N)]


def test_a_setting_follows_from_seed_and_number_alone():
    assert draw(1, 7) == drawn()[7] == draw(1, 7)
    assert draw(2, 7) != draw(1, 7) != draw(1, 8)


def test_every_setting_is_valid_and_a_run_file_that_reads_back_as_the_same():
    for case, layout, _ in drawn():
        assert problems(case, layout) == []
        config = parse(tomllib.loads(run_file(case, layout, "a setting")))
        assert config.layout.layout() == layout
        assert case_of(config, steps=config.steps) == case


def test_every_choice_of_a_layout_is_drawn():
    layouts = [layout for _, layout, _ in drawn()]
    assert {layout.world_size for layout in layouts} == set(WORLDS)
    for name, key in KEYS.items():
        values = {getattr(layout, name) for layout in layouts}
        if name in NOT_DRAWN:
            assert values == {key.default}, name
        elif key.choices is not None:
            assert values == set(key.choices()), name
        else:
            assert len(values) > 1, name
    assert {layout.pp_schedule for layout in layouts if layout.pp > 1} == set(names())
    assert any(len(set(layout.stage_layers or ())) > 1 for layout in layouts), "uneven stages"
    assert any(layout.tp > case.spec.n_kv_heads for case, layout, _ in drawn()), "copied kv heads"
    assert any(layout.ep > 1 and layout.pp > 1 for layout in layouts)


def test_every_choice_of_a_model_is_drawn():
    specs = [case.spec for case, _, _ in drawn()]
    choices = {"family": FAMILIES, "norm": get_args(Norm), "activation": get_args(Activation)}
    for name, values in (choices | {"positions": get_args(Positions)}).items():
        assert {getattr(spec, name) for spec in specs} == set(values), name
    drawn_of(ModelSpec, specs, but={"family", "init_std", "lora", "mup"})
    drawn_of(RopeScaling, [spec.rope_scaling for spec in specs if spec.rope_scaling], but={"low_freq_factor"})
    experts = [spec.moe for spec in specs if spec.moe]
    drawn_of(MoESpec, experts)
    assert {each.score for each in experts} == set(get_args(Score))
    assert {each.aux_scope for each in experts} == set(get_args(AuxScope))
    latent = [spec.latent_attention for spec in specs if spec.latent_attention]
    drawn_of(LatentAttentionSpec, latent)
    assert 0 in {each.q_rank for each in latent}
    assert any(spec.moe and spec.latent_attention for spec in specs)
    heads = [(spec.n_kv_heads, spec.n_heads) for spec in specs]
    assert any(kv == heads > 1 for kv, heads in heads)
    assert any(1 < kv < heads for kv, heads in heads)
    assert any(1 == kv < heads for kv, heads in heads)
    assert any(spec.vocab_size % 2 for spec in specs)


def drawn_of(section: type, values: list, but: set[str] = frozenset()) -> None:
    """Every field has more than one value; both, if it is a bool."""
    for each in fields(section):
        if each.name not in but:
            assert len({getattr(one, each.name) for one in values}) > 1, each.name


def test_every_choice_of_batch_and_optimizer_is_drawn():
    cases = [case for case, _, _ in drawn()]
    for name in ("seq_len", "global_batch", "micro_batch", "seed"):
        assert len({getattr(case, name) for case in cases}) > 2, name
    assert {case.optimizer.name for case in cases} == set(OPTIMIZERS)
    for name in ("lr", "weight_decay", "clip_norm", "state_dtype", "lr_scale", "weight_decay_by_kind"):
        assert len({getattr(case.optimizer, name) for case in cases}) > 1, name
    assert 0 in {case.optimizer.clip_norm for case in cases}
    for kind in OPTIMIZERS.values():
        values = [case.optimizer.options for case in cases if case.optimizer.name == kind.name]
        assert all(len({options[key] for options in values}) > 1 for key in kind.options)


class Pretending(Verifier):
    """Runs no ranks: a setting is not equal where `wrong` is true of it."""

    def __init__(self, wrong: Callable[[Case, Layout], object]) -> None:
        super().__init__()
        self.wrong, self.n = wrong, 0

    def parity(self, case: Case, layout: Layout, against: tuple[Case, Layout] | None = None) -> Report:
        self.n += 1
        return Report(case, layout, "one process", [], 1, ["a copy"] if self.wrong(case, layout) else [])


@pytest.mark.parametrize(
    ("wrong", "left", "kept"),
    [
        (lambda case, layout: layout.tp > 1 and case.spec.qk_norm, "tp 2, sequence_parallel false", {"qk_norm": True}),
        (lambda case, layout: layout.cp_method == "ulysses", "cp 2, cp_method ulysses, zero 0", {}),
        (lambda case, layout: case.spec.moe and case.spec.moe.n_groups > 1, "one rank", {"n_layers": 1}),
        (lambda case, layout: case.spec.latent_attention, "one rank", {"n_kv_heads": 1}),
        (lambda case, layout: layout.ep > 1 and case.spec.dropout, None, {"n_layers": 1}),
        (lambda case, layout: layout.stage_layers and case.spec.tied_embedding, None, {"tied_embedding": True}),
        (lambda case, layout: case.micro_batch > 1 and layout.pp > 1, "pp 2", {"n_layers": 2}),
    ],
)
def test_what_is_left_is_what_the_failure_needs(wrong: Callable, left: str | None, kept: dict):
    for case, layout, _ in [each for each in drawn() if wrong(*each[:2])][:4]:
        with Pretending(wrong) as verifier:
            result = shrink(verifier, verifier.outcome(case, layout))
        assert wrong(result.case, result.layout)
        assert result.layout.world_size <= 2
        assert left in (None, str(result.layout)), result
        assert {name: getattr(result.case.spec, name) for name in kept} == kept
        assert result.case.spec.vocab_size == 11
        assert (result.case.spec.norm, result.case.spec.activation) == ("rmsnorm", "swiglu")
        assert result.case.optimizer.model_dump() == type(result.case.optimizer)().model_dump()
        assert verifier.n < 100


def test_a_crash_is_told_from_another_by_its_error_and_its_function():
    case, layout, _ = drawn()[0]
    report = Report(case, layout, "one process", [], 0)
    crash_text = 'rank {} failed: {}: a\n\n  File "x.py", line {}, in {}\n    y = z\nTypeError: a'
    first = failure(replace(report, crash=crash_text.format(1, "TypeError", 3, "send")))
    assert first == failure(replace(report, crash=crash_text.format(0, "TypeError", 4, "send")))
    assert first != failure(replace(report, crash=crash_text.format(1, "TypeError", 3, "receive")))
    assert first != failure(replace(report, crash=crash_text.format(1, "KeyError", 3, "send")))
    assert failure(replace(report, crash="rank 1 was killed by signal 9")) == failure(
        replace(report, crash="rank 0 was killed by signal 9")
    )
    assert failure(report) == ""
    assert failure(replace(report, differing=["a copy"])) == "not equal"


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)], env={"COLUMNS": "160"})


def fuzz(*arguments: object) -> Result:
    return CliRunner().invoke(tool.app, [*map(str, arguments)], env={"COLUMNS": "160"})


def with_bug(monkeypatch: pytest.MonkeyPatch, *bugs: Mutation) -> None:
    monkeypatch.setattr(Verifier.__init__, "__defaults__", (partial(train_mutated, bugs), 60.0))


def test_settings_of_healthy_code_are_equal_and_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = fuzz(1, "--seed", SMALL, "--steps", 1)
    assert result.exit_code == 0, result.output
    assert "equal: all 1 settings of seed" in result.output
    assert list(tmp_path.iterdir()) == []


@prove
def test_a_bug_is_found_and_its_smallest_run_file_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    taken = tmp_path / f"fuzz-{SHARDED}-0.toml"
    taken.write_text("someone's")
    with_bug(monkeypatch, NO_SUM_OF_COPIES)
    result = fuzz(1, "--seed", SHARDED, "--json")
    assert result.exit_code == 1, result.output
    (setting,) = json.loads(result.stdout)["settings"]
    assert taken.read_text() == "someone's"
    path = tmp_path / setting["file"]
    assert path.name == f"fuzz-{SHARDED}-0-2.toml"
    assert f"shardwright {setting['command'].removeprefix('shardwright ')}" in path.read_text()
    assert setting["smallest"] == "tp 2"
    table = tomllib.loads(path.read_text())
    assert table["model"]["n_layers"] == 1
    assert table["batch"]["global_batch"] == 1
    assert "optimizer" not in table
    again = verify(path.name, "--full", "--json")
    assert again.exit_code == 1, again.output
    assert json.loads(again.stdout)["layout"] == "tp 2"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert verify(path.name, "--full").exit_code == 0, "without the bug it is equal"


def crash(case: Case, layout: Layout, folder: Path) -> RankTrace:
    if layout.data_ranks > 1:
        raise TypeError("ranks of data")
    return train_rank(case, layout, folder)


@prove
def test_a_crash_is_a_row_and_what_is_left_crashes_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tool, "MOST_SHRUNK", 1)
    monkeypatch.setattr(Verifier.__init__, "__defaults__", (crash, 60.0))
    result = fuzz(2, "--seed", SMALL, "--steps", 1, "--dtype", "float32")
    assert result.exit_code == 3, result.output
    assert "failed: 2 of 2 settings" in result.output
    assert f"shardwright verify fuzz-{SMALL}-0.toml --full --dtype float32 --steps 1" in result.output
    assert "setting 0, the smallest found that still fails: dp_replicate 2, zero 0; 1 layers" in result.output
    assert "setting 1, as it was drawn" in result.output
    assert verify(f"fuzz-{SMALL}-0.toml", "--full", "--dtype", "float32", "--steps", 1).exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing argument 'N'"),
        (["0"], "Invalid value for 'N'"),
        (["3", "--seed", "-1"], "Invalid value for '--seed'"),
        (["3", "--dtype", "float63"], "--dtype float63: not one that can be compared; did you mean 'float64'?"),
        (["3", "--matrix", "2"], "No such option: --matrix"),
    ],
)
def test_options_that_the_tool_does_not_take_are_refused(arguments: list[str], said: str):
    result = fuzz(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert said in result.output


def test_the_verb_says_that_it_has_no_such_option_and_names_the_nearest():
    result = verify("run.toml", "--fuzz", 3)
    assert result.exit_code == 2
    assert "error: no such option: --fuzz (Possible options: --full) (shardwright verify --help)" in result.output
