"""Proves that `shardwright plan rl` and `plan evaluate-rl` find, show and refuse what they should."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli.main import app
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.presets import PRESETS
from shardwright.rl.measured import PUBLISHED
from tests.cli.imports import runs_without

ASKED = {
    "model": "qwen3-0.6b", "cluster": "h100:2", "prompts": 8, "group": 8, "input-len": 128, "output-mean": 300,
    "output-max": 1024,
}  # fmt: skip


def rl(*flags: object, **changed: object) -> Result:
    values = ASKED | {name.replace("_", "-"): value for name, value in changed.items()}
    options = [str(each) for name, value in values.items() for each in (f"--{name}", value)]
    return CliRunner().invoke(app, ["plan", "rl", *options, *map(str, flags)], env={"COLUMNS": "300"})


def test_the_document_and_the_page_hold_the_fastest_step_of_each_split(tmp_path: Path):
    page = tmp_path / "step.html"
    result = rl("--json", "--html", page)
    assert result.exit_code == 0, result.output
    found: Any = json.loads(result.stdout)
    steps = [each["step_s"] for each in found["best"]]
    assert steps == sorted(steps)
    assert {each["generation_accelerators"] for each in found["best"]} == {1, 2}
    assert sum(found["best"][0]["parts_s"].values()) == pytest.approx(steps[0])
    assert all(each["total_s"] < steps[0] for each in found["remedies"])
    for part in ("weight transfer", "scoring", "bound", "What would help", found["best"][0]["training"]):
        assert part in page.read_text(), part


def evaluated(formulas: list[dict[str, Any]], section: str) -> dict[str, Any]:
    """The entries of a section by name, each of whose formulas has its value."""
    found = {}
    for each in (each for each in formulas if each["section"] == section):
        found[each["what"]] = each["value"]
        if each["formula"]:
            value = eval(each["formula"], {"max": max}, dict(each["inputs"]))
            assert value == pytest.approx(each["value"]), each
            assert each["formula"] in each["inputs"] or set(each["inputs"]) <= {
                name.replace(" ", "_") for name in [*found, *WITHIN_ANOTHER]
            }, each
    return found


WITHIN_ANOTHER = ("weight transfer",)
"""Names of other sections."""


def test_each_part_of_an_explained_step_is_its_formula(tmp_path: Path):
    page = tmp_path / "step.html"
    result = rl("--json", "--explain", "--html", page, generate_on=0, updates=2)
    assert result.exit_code == 0, result.output
    document: Any = json.loads(result.stdout)
    best = document["best"][0]
    parts = evaluated(document["formulas"], "Step of GRPO")
    sent = evaluated(document["formulas"], "Weight transfer")
    for name, seconds in best["parts_s"].items():
        assert (parts | sent)[name] == pytest.approx(seconds), name
    assert parts["step of GRPO"] == pytest.approx(best["step_s"])
    [update] = [each["value"] for each in document["formulas"] if (each["section"], each["what"]) == ("Step", "step")]
    assert parts["update"] == pytest.approx(update)
    assert "generation_factor * engine" in page.read_text()
    assert "Time by part" in page.read_text()
    plain = json.loads(rl("--json", generate_on=0, updates=2).stdout)
    assert {name: value for name, value in document.items() if name != "formulas"} == plain


def test_adapters_alone_are_trained_and_sent():
    every, adapters = (
        json.loads(rl("--json", *flags, generate_on=1).stdout)["best"][0] for flags in ((), ("--lora", "rank=16"))
    )
    spec = replace(PRESETS["qwen3-0.6b"], lora=LoraSpec(rank=16))
    assert adapters["transfer"]["broadcast_bytes"] == 2 * spec.n_trained_parameters
    assert adapters["transfer"]["seconds"] < 0.02 * every["transfer"]["seconds"]
    assert adapters["parts_s"]["generation"] == every["parts_s"]["generation"], "the engine has the base weights"
    moving = "moving to and from the host"
    assert adapters["parts_s"][moving] == 0 < every["parts_s"][moving], "the reference is the policy without adapters"
    shown = rl("--lora", "rank=16", generate_on=1).output
    assert "only the adapters are sent, 19.2 MiB in 16 bits" in shown
    for given, sentence in (("rank=0", "rank"), ("rnk=16", "rank"), ("rank=16,targets=qq", "targets")):
        refused = rl("--lora", given)
        assert refused.exit_code == 2, refused.output
        assert sentence in refused.output
        assert "Traceback" not in refused.output


def test_off_policy_generation_and_training_overlap_on_separate_accelerators():
    together = json.loads(rl("--json", generate_on=1).stdout)["best"][0]
    apart = json.loads(rl("--json", generate_on=1, off_policy=1).stdout)["best"][0]
    assert apart["separate"]
    assert apart["hidden"]
    assert apart["step_s"] < together["step_s"]


@pytest.mark.parametrize(
    "changed",
    [
        {"cluster": "h100:1", "output_p95": 800},
        pytest.param({"generate_on": 1, "updates": 2}, marks=pytest.mark.prove),
        pytest.param({"generate_on": 0}, marks=pytest.mark.prove),
        pytest.param({}, marks=pytest.mark.prove),
    ],
)
def test_the_options_of_a_change_plan_the_step_that_is_shown(changed: dict[str, object]):
    remedies = json.loads(rl("--json", **changed).stdout)["remedies"]
    assert remedies
    for each in remedies:
        if each["options"]:
            again = rl("--json", *each["options"].split(), **changed)
            assert again.exit_code == 0, again.output
            assert json.loads(again.stdout)["best"][0]["step_s"] == pytest.approx(each["total_s"]), each


def test_a_model_by_its_sizes_is_as_long_as_prompt_and_answer():
    result = rl("--json", model="n_layers=4,d_model=512,n_heads=8,d_ffn=2048,vocab_size=32000", cluster="h100:1")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"output_mean": 2000}, "--output-mean 2000: not below --output-max 1024; valid: 1 to 1023"),
        (
            {"output_max": 1000000},
            "--input-len 128 + --output-max 1000000 = 1000128 tokens, and qwen3-0.6b is",
        ),
        ({"output_max": 1, "output_mean": 1}, "not below --output-max 1; valid: an --output-max of 2 or more"),
        ({"generate_on": -1}, "--generate-on -1: a number of accelerators is needed; valid: 0 to 1"),
        (
            {"cluster": "h100:1", "generate_on": 0, "off_policy": 1},
            "needs accelerators for both, and the cluster has 1",
        ),
        ({"generate_on": 2}, "--generate-on 2: 0 of 2 accelerators are left to train; valid: 0 to 1"),
        ({"cluster": "h100:1", "off_policy": 1}, "--off-policy 1 needs accelerators for both"),
        ({"off_policy": -1}, "--off-policy -1: valid: 0 to 64"),
        ({"prompts": 40000}, "--prompts 40000 x --group 8 = 320,000 answers: at most 100,000"),
        ({"prompts": 0}, "--prompts 0"),
        ({"precision": "bf61"}, "--precision bf61: not one that is planned for"),
        ({"model": "nothing"}, "model 'nothing' is not known"),
        ({"cluster": "h1000:8"}, "h1000"),
        ({"updates": 7}, "--updates 7 does not divide 64 answers"),
        ({"output_p95": 200}, "--output-p95 200: with a mean of 300"),
        ({"off_policy": 1, "generate_on": 0}, "--generate-on 0 with --off-policy 1"),
        ({"engine": "vlm"}, "--engine vlm: not one that constants are known for"),
        ({"generation_precision": "fp3"}, "--generation-precision fp3: valid here"),
    ],
)
def test_bad_input_is_one_sentence(changed: dict[str, object], sentence: str):
    result = rl(**changed)
    assert result.exit_code == 2, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output


def test_a_model_that_fits_no_split_ends_with_1():
    result = rl(model="llama-3.1-405b")
    assert result.exit_code == 1, result.output
    assert "no split of the accelerators fits" in result.output


def test_published_steps_are_compared(tmp_path: Path):
    rows = [each for each in PUBLISHED.read_text().splitlines(keepends=True) if "llama" in each or "-swe-" in each]
    table = tmp_path / "steps.csv"
    table.write_text("".join([PUBLISHED.read_text().partition("\n")[0] + "\n", *rows]))
    result = CliRunner().invoke(app, ["plan", "evaluate-rl", str(table)])
    assert result.exit_code == 0, result.output
    assert "generation" in result.output
    assert "-nano-30b-a3b-h100-bf16-128-1off): an agent with tools" in result.output
    assert "other versions, not fitted to" in result.output


def test_missing_options_are_named_at_once():
    result = CliRunner().invoke(app, ["plan", "rl"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    for option in ("--model", "--cluster", "--input-len", "--output-mean", "--output-max", "--prompts", "--group"):
        assert f"{option} is missing" in result.output, option


def test_one_answer_is_a_step_and_counted_in_the_singular():
    result = rl(prompts=1, group=1, input_len=1, generate_on=1)
    assert result.exit_code == 0, result.output
    assert "1 answer a step to prompts of 1 token, trained in 1 update" in result.output
    assert "with 1 answer each" in result.output


@pytest.mark.prove
def test_it_needs_no_torch():
    asked = [str(each) for name, value in ASKED.items() for each in (f"--{name}", value)]
    runs_without({"torch"}, ("plan", "rl", *asked, "--generate-on", 0))
