"""Proves that a schedule, an optimizer and a family of models registered from outside the package are planned, drawn,
verified and trained. The three files beside this one import public modules alone; docs/extending.md shows them."""

import ast
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.config import spec_of_folder
from shardwright.data.prepare import prepare
from shardwright.hugging_face.architecture import ARCHITECTURES
from shardwright.model.modules import FAMILIES
from shardwright.model.transformer import Transformer
from shardwright.optimizers import OPTIMIZERS
from shardwright.schedule import registry as schedules
from shardwright.system import extensions
from shardwright.training.weights import fill, open_weights
from tests.arcee_model import arcee_model
from tests.marks import prove, rest_prove

HERE = Path(__file__).parent
FILES = [HERE / f"{name}.py" for name in ("eager_1f1b", "signum", "parallel_block")]
HOOKS = [HERE / f"{name}.py" for name in ("tokens_seen", "skip_large_norms")]
"""Run by tests/training/test_hooks.py."""
ARCEE = HERE / "arcee.py"
RUN = HERE / "run.toml"
NAMED = tuple(word for file in FILES for word in ("--extension", file))
"""What a verb that only reads the run file is given, the first time."""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """The folder of a run, and the options that put it there, on data made here."""
    folder = tmp_path_factory.mktemp("extended")
    (folder / "text").mkdir()
    for name in "abc":
        (folder / "text" / f"{name}.txt").write_text(f"the {name} of all things is not known. " * 400)
    prepare(folder / "text", folder / "tokens", vocab_size=300, validation=0.3)
    return folder / "out", ("--set", f"out={folder / 'out'}", "--set", f"data.path={folder / 'tokens'}")


def shardwright(*arguments: object, exit_code: int = 0) -> str:
    """Return the output of a command. The registries are afterwards as they were before, and what was computed with
    the extensions is forgotten."""
    registries: list[dict[str, Any]] = [FAMILIES, OPTIMIZERS, ARCHITECTURES, schedules._KINDS]
    before = [dict(registry) for registry in registries]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extensions, "_LOADED", [])
        result = CliRunner().invoke(app, [*map(str, arguments)])
    for registry, contents in zip(registries, before, strict=True):
        registry.clear()
        registry.update(contents)
    for name, module in sorted(sys.modules.items()):
        if name.startswith("shardwright.") and not name.startswith("shardwright.system."):
            for cached in [value for value in vars(module).values() if hasattr(value, "cache_clear")]:
                cached.cache_clear()
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.mark.parametrize("file", [*FILES, *HOOKS, ARCEE, RUN], ids=lambda file: file.name)
def test_the_page_shows_the_file(file: Path):
    page = HERE.parents[1] / "docs" / "extending.md"
    language = {".py": "python"}.get(file.suffix, "toml")
    assert f"```{language}\n{file.read_text()}```" in page.read_text()


@pytest.mark.parametrize("file", [*FILES, *HOOKS, ARCEE], ids=lambda file: file.stem)
def test_an_extension_is_short_and_imports_public_modules_alone(file: Path):
    text = file.read_text()
    assert len(text.splitlines()) < 100
    imported = [node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in imported if any(part.startswith("_") for part in name.split("."))]


def test_a_schedule_of_ones_own_is_built_checked_and_drawn(tmp_path: Path):
    picture = tmp_path / "eager.svg"
    said = shardwright(
        "schedule", "--extension", FILES[0], "--schedule", "eager-1f1b", "--pp", 4, "--microbatches", 8,
        "--draw", picture,
    )  # fmt: skip
    assert "eager-1f1b" in said
    assert picture.read_text().startswith("<")


def test_an_architecture_of_ones_own_comes_in_and_goes_out(tmp_path: Path):
    from safetensors.torch import load_file

    model = arcee_model()
    model.save_pretrained(tmp_path / "hf")
    said = shardwright("import", tmp_path / "hf", "--out", tmp_path / "weights", exit_code=2)
    assert "model_type='arcee' is not supported" in said
    asked = ("import", tmp_path / "hf", "--out", tmp_path / "weights", "--extension", ARCEE)
    assert "ArceeForCausalLM, 18.6K parameters" in shardwright(*asked)
    shardwright(
        "export", tmp_path / "weights", "--out", tmp_path / "out", "--extension", ARCEE, "--architecture", "arcee"
    )
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens_BT = torch.arange(24).view(1, -1) % 96
    ours = Transformer(spec_of_folder(tmp_path / "weights"))
    fill(ours.named_parameters(), ours.spec, open_weights(tmp_path / "weights"))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens_BT), model(tokens_BT).logits, rtol=1e-5, atol=1e-5)


def test_a_plan_searches_the_schedule_and_prices_the_family_and_the_optimizer():
    asked = ("plan", RUN, *NAMED, "--cluster", "h100:2/2", "--explain")
    said = shardwright(*asked, "pp=2,pp_schedule=eager-1f1b")
    assert "input_norm_weight + input_norm_bias + attention_q_weight" in said, "the parameters are those of the rows"
    assert re.search(r"optimizer = n_bytes .* = 4 \* \(", said), "one fp32 state for each parameter"
    assert "1F1B with about twice as many forward passes" in said


@prove
def test_a_plan_searches_the_schedule_and_writes_a_run_file_that_verify_accepts(tmp_path: Path):
    written = tmp_path / "planned.toml"
    shardwright("plan", RUN, *NAMED, "--cluster", "cpu:2/2", "--write", written)
    table = tomllib.loads(written.read_text())
    assert table["extensions"] == [str(file) for file in FILES]
    assert (table["model"]["family"], table["optimizer"]["name"]) == ("parallel-block", "signum")
    found = shardwright("plan", RUN, *NAMED, "--cluster", "h100:2/2", "--json", "--top", 200)
    assert "eager-1f1b" in found


@pytest.mark.parametrize(
    "layout",
    rest_prove(
        [
            "layout.tp=2 layout.sequence_parallel=false",
            "layout.tp=2 layout.pp=1 layout.pp_schedule=1f1b layout.cp=2",
            "layout.dp_shard=2 layout.zero=3",
        ],
    ),
)
def test_every_axis_with_all_three_is_equal_to_one_process(layout: str):
    options = [word for setting in layout.split() for word in ("--set", setting)]
    assert "equal: " in shardwright("verify", RUN, *NAMED, *options)


@prove
def test_they_are_trained_and_resumed(where: tuple[Path, tuple[str, ...]]):
    out, options = where
    shardwright("train", RUN, *options)
    first = losses(out)
    assert first[-1] < first[0] - 0.5
    shardwright("train", RUN, *options, "--set", "steps=12", "--resume")
    assert len(losses(out)) == 12, "it goes on from step 8"


def losses(out: Path) -> list[float]:
    """Of every step so far."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.prove
def test_what_a_family_does_not_have_is_refused_in_its_own_words():
    said = shardwright("verify", RUN, *NAMED, "--set", "model.norm=rmsnorm", exit_code=2)
    assert "norm='rmsnorm' with family='parallel-block'; valid: 'layernorm'" in said
