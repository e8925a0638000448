"""Proves preference training: on every layout the losses, gradients and metrics of one process in plain PyTorch; and
whole runs whose reference is computed before the first step and read when they are resumed."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import shardwright
from shardwright.cli.main import app
from shardwright.config import load
from shardwright.config.sections import PreferenceSection
from shardwright.data.inspect import inspect
from shardwright.data.prepare import prepare
from shardwright.data.samples import DocumentSamples, PairSamples
from shardwright.data.shards import open_split
from shardwright.layout.layout import Layout
from shardwright.parallel.apply import apply
from shardwright.parallel.preference import METRICS, pair_losses
from shardwright.system.errors import ConfigError, InputError
from shardwright.training.exporting import export
from shardwright.training.references import weights_digest
from shardwright.training.start import start
from shardwright.verification import Verifier
from shardwright.verification.case import CaseStage
from tests.distributed import run_ranks
from tests.marks import prove
from tests.mutation import Mutation, mutated
from tests.training.bugs.bug import (
    DUALPIPE,
    FEW_PLACES,
    HYBRID,
    ONE,
    PP,
    SP,
    SP_EP,
    ULYSSES,
    ZB_V,
    ZERO_0,
    ZERO_1,
    ZERO_2,
    ZERO_3,
    ZIGZAG,
    Bug,
)
from tests.training.runs import records
from tests.training.worlds import SPEC

OF_SEQUENCES = replace(FEW_PLACES, aux_scope="sequence")
"""Experts whose balance loss, z-loss and capacity count the tokens of each sequence."""

SETTINGS: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "dpo on one rank": (ONE, "dpo", {}),
    "dpo, ZeRO-0": (ZERO_0, "dpo", {}),
    "ipo, ZeRO-1": (ZERO_1, "ipo", {}),
    "simpo, ZeRO-2": (ZERO_2, "simpo", {}),
    "dpo, ZeRO-3, with dropout": (ZERO_3, "dpo", {"dropout": 0.1}),
    "ipo, hybrid": (HYBRID, "ipo", {}),
    "dpo on token shards": (SP, "dpo", {}),
    "ipo over zigzag": (ZIGZAG, "ipo", {}),
    "simpo over ulysses": (ULYSSES, "simpo", {}),
    "dpo over stages": (PP, "dpo", {}),
    "dpo over stages of both ends": (DUALPIPE, "dpo", {"n_layers": 5, "tied_embedding": True}),
    "ipo, first and last stage on one rank": (ZB_V, "ipo", {"n_layers": 4}),
    "dpo with experts on token shards": (SP_EP, "dpo", {"moe": OF_SEQUENCES}),
    "dpo with experts": (Layout(dp_shard=2, zero=2, ep=2), "dpo", {"moe": OF_SEQUENCES}),
    "simpo with experts over zigzag, token shards and ep": (Layout(cp=2, tp=2, ep=2), "simpo", {"moe": OF_SEQUENCES}),
    "ipo, a batch that changes": (ZERO_2, "ipo", {}),
    "dpo over stages, tp and cp": (Layout(pp=2, tp=2, cp=2, sequence_parallel=True), "dpo", {}),
}
QUICK = {"dpo, ZeRO-0"}


@pytest.mark.parametrize(
    ("layout", "kind", "spec", "changes"),
    [
        pytest.param(*each, "changes" in name, id=name, marks=() if name in QUICK else prove)
        for name, each in SETTINGS.items()
    ],
)
def test_a_layout_computes_what_one_process_does(
    layout: Layout, kind: str, spec: dict[str, Any], changes: bool, verifier: Verifier
):
    nothing = Bug(Mutation("", "", ""), [layout], spec=spec, preference=kind)
    case = nothing.case(layout)
    if changes:
        stages = tuple(CaseStage(n * case.global_batch, case.micro_batch, case.seq_len) for n in (1, 2))
        case = replace(case, stages=stages)
    report = verifier.parity(case, layout)
    assert report.equal, report.worst
    assert {"loss", "gradient", "evaluation"} <= {row.quantity.kind for row in report.rows}


def test_a_pair_without_a_margin_is_not_accurate():
    answers_D = torch.tensor([-3.0, -3.0, -1.0, -2.0, -2.0, -1.0], dtype=torch.float64)
    section = PreferenceSection.model_validate({"kind": "dpo"})
    _, metrics_4P = pair_losses(section, answers_D, torch.zeros(6), torch.ones(6))
    assert metrics_4P[METRICS.index("accuracy")].tolist() == [0, 1, 0]


RUN = """
out = "{out}"
steps = 4
device = "cpu"
model = {{ n_layers = 2, d_model = 16, n_heads = 2, n_kv_heads = 2, head_dim = 8, d_ffn = 24, vocab_size = 300, \
max_seq_len = 64 }}
data = {{ path = "{tokens}", attention = "document", positions = "document" }}
batch = {{ seq_len = 64, global_batch = 4 }}
preference = {{ kind = "dpo", beta = 0.5 }}
optimizer = {{ lr = 0.01 }}
checkpoint = {{ every = 2 }}
metrics = {{ every = 1 }}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With pairs in `tokens`, and a run on one process in `run`."""
    folder = tmp_path_factory.mktemp("preference")
    lines = [
        {"prompt": f"{n} + {n} =", "chosen": f" {2 * n}" + "." * (n % 3), "rejected": f" {n}" + "!" * (n % 5)}
        for n in range(1, 41)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = prepare(folder / "pairs.jsonl", folder / "tokens", vocab_size=300, format="preference", validation=0.2)
    assert manifest.pairs
    assert all(split.documents % 2 == 0 and split.documents for split in manifest.splits.values())
    train(folder, "run")
    return folder


def train(folder: Path, out: str, *changes: str) -> Path:
    path = folder / f"{out}.toml"
    path.write_text(RUN.format(out=folder / out, tokens=folder / "tokens"))
    start(load(path, list(changes)), quiet=True)
    return path


KEYS = ("loss", "margin", "accuracy", "chosen_reward", "rejected_reward", "grad_norm")


def numbers(run_file: Path) -> list[dict[str, Any]]:
    return records(run_file, run_file.stem)


def test_a_run_learns_the_pairs_and_is_the_same_on_two_ranks(folder: Path):
    alone = numbers(folder / "run.toml")
    assert alone[0]["loss"] == pytest.approx(0.693147, abs=1e-5), "before the first step no answer is preferred"
    assert alone[-1]["loss"] < alone[0]["loss"]
    trained = [each for each in alone if each["kind"] == "train"]
    for each in trained:
        assert each["margin"] == pytest.approx(each["chosen_reward"] - each["rejected_reward"], abs=1e-5)
    assert trained[-1]["accuracy"] > 0.7
    others = numbers(train(folder, "pipeline", "layout.pp=2", "batch.micro_batch=2"))
    for one, other in zip(alone, others, strict=True):
        for key in set(KEYS) & one.keys():
            assert other[key] == pytest.approx(one[key], rel=2e-4, abs=2e-5), (one["step"], key)
    kept = [folder / out / "reference.safetensors" for out in ("run", "pipeline")]
    with safe_open(kept[0], "np") as ours, safe_open(kept[1], "np") as other:
        assert ours.metadata() == other.metadata(), "the digest of the weights depends on the layout"
    values, other_values = map(load_file, kept)
    assert values.keys() == {"train/0", "validation/0"} == other_values.keys()
    for name, expected in values.items():
        assert expected.max() < 0
        assert other_values[name] == pytest.approx(expected, abs=1e-4)


@prove
def test_a_resumed_run_reads_the_reference_that_was_computed_before_its_first_step(folder: Path):
    changes = ("steps=2", "lr_schedule.shape=constant")
    train(folder, "whole", "lr_schedule.shape=constant")
    run_file = train(folder, "stopped", *changes)
    resumed = ("lr_schedule.shape=constant", "checkpoint.resume=auto")
    reference = folder / "stopped" / "reference.safetensors"
    content = reference.read_bytes()
    reference.unlink()
    with pytest.raises(InputError, match=r"reference.safetensors is missing: it has .* the checkpoint is of step 2"):
        train(folder, "stopped", *resumed)
    reference.write_bytes(content[:-9])
    with pytest.raises(InputError, match=r"reference.safetensors is damaged"):
        train(folder, "stopped", *resumed)
    with safe_open(folder / "whole" / "reference.safetensors", "np") as file:
        metadata = file.metadata()
    values = load_file(folder / "whole" / "reference.safetensors")
    save_file({"train/0": values["train/0"]}, reference, metadata)
    with pytest.raises(
        InputError, match=r"has 0 log-probabilities for the 26 answers of the validation split: .* set "
    ):
        train(folder, "stopped", *resumed)
    save_file(values, reference, {"fingerprint": "of other data"})
    with pytest.raises(InputError, match=r"reference.safetensors is of other data than is read now"):
        train(folder, "stopped", *resumed)
    reference.write_bytes(content)
    (folder / "tokens").rename(folder / "moved")
    train(folder, "stopped", *resumed, f"data.path={folder / 'moved'}")
    (folder / "moved").rename(folder / "tokens")
    last, expected = numbers(run_file)[-1], numbers(folder / "whole.toml")[-1]
    assert last["loss"] == expected["loss"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("preference.kind=none", "preference.beta=0.1"), "has pairs of answers, and preference.kind='none'"),
        (("batch.seq_len=8",), r"pair \d+ of the train split has \d+ tokens, .* set batch.seq_len=\d+ or more"),
        (("data.attention=sequence", "data.positions=sequence"), "documents of one sequence; set both to 'document'"),
        (("preference.gamma=0.7",), "preference.gamma=0.7 is not used with preference.kind='dpo'"),
        (("layout.loss_chunk_tokens=16",), "set loss_chunk_tokens=0"),
        (("model.mtp_modules=1",), "set model.mtp_modules=0"),
        (
            ("batch.stages=[{from_step=2, seq_len=32}]",),
            "seq_len 32 and 64: a pair is not cut; give every stage the same",
        ),
    ],
    ids=["no kind", "a long pair", "attention", "gamma", "chunks", "mtp", "stages"],
)
def test_what_cannot_be_trained_is_told(folder: Path, changes: tuple[str, ...], words: str):
    with pytest.raises((InputError, ConfigError), match=words):
        train(folder, "refused", *changes)


def test_data_without_pairs_is_told(folder: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("a b c " * 200)
    prepare(tmp_path / "text.txt", tmp_path / "tokens", vocab_size=300, validation=0)
    with pytest.raises(InputError, match=r"needs pairs of answers, and .* has none; prepare records with 'chosen'"):
        train(folder, "refused", f"data.path={tmp_path / 'tokens'}", "evaluation.samples=0")


def evaluated(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.output


def plain_losses(folder: Path) -> list[float]:
    """The margin of each validation pair of the run, by one forward pass for each answer in plain PyTorch."""
    split = open_split(folder / "tokens", "validation")
    model = shardwright.load_run(folder / "run").model()
    reference = load_file(folder / "run" / "reference.safetensors")["validation/0"]
    rewards = []
    for document in range(split.n_documents):
        start, end = split.document_start(document), split.document_start(document + 1)
        tokens = torch.from_numpy(split.tokens(start, end - start).astype("int64"))
        trained = torch.from_numpy(split.trained(start, end - start))[1:]
        with torch.no_grad():
            log_probs = model(tokens[None, :-1])[0].double().log_softmax(-1)
        taken = log_probs.gather(-1, tokens[1:, None])[:, 0]
        rewards.append(float(taken[trained].sum()) - reference[document])
    return [0.5 * (chosen - rejected) for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)]


def test_eval_of_a_run_on_pairs_measures_the_pairs_and_their_tokens_on_request(folder: Path):
    last = [each for each in numbers(folder / "run.toml") if each["kind"] == "evaluation"][-1]
    margins = plain_losses(folder)
    expected = {
        "loss": sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins),
        "margin": sum(margins) / len(margins),
        "accuracy": sum(margin > 0 for margin in margins) / len(margins),
    }
    for layout in ("", "tp=2"):
        found = evaluated(folder / "run", "--json", "--layout", layout, "--micro-batch", 3)
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, abs=2e-5), key
            assert last[key] == pytest.approx(value, abs=2e-5), key
        assert (found["n_pairs"], found["unit"], found["perplexity"]) == (len(margins), "nats a pair", None)
    text = evaluated(folder / "run")
    assert "dpo loss " in text
    assert "--loss tokens measures the next token" in text
    tokens = evaluated(folder / "run", "--loss", "tokens", "--json")
    assert tokens["perplexity"] == pytest.approx(math.exp(tokens["loss"]))
    assert tokens["n_tokens"] > len(margins)


def test_eval_of_a_base_model_on_pairs_measures_the_tokens_of_the_answers(folder: Path):
    base = folder / "base"
    export(folder / "run", base)
    tokens = evaluated(base, "--data", folder / "tokens", "--seq-len", 64, "--json")
    assert tokens["n_pairs"] is None
    assert tokens["loss"] == pytest.approx(evaluated(folder / "run", "--loss", "tokens", "--json")["loss"], rel=1e-6)
    said = " ".join(evaluated(base, "--data", folder / "tokens", "--sequences", "packed", code=2).split())
    assert "--sequences packed: the data are pairs of answers, which are documents of one sequence" in said


def test_eval_of_pairs_refuses_the_layouts_that_training_on_pairs_refuses(folder: Path):
    said = " ".join(evaluated(folder / "run", "--layout", "loss_chunk_tokens=16", code=2).split())
    assert "preference.kind='dpo' with layout.loss_chunk_tokens=16" in said
    assert "set loss_chunk_tokens=0" in said
    evaluated(folder / "run", "--layout", "loss_chunk_tokens=16", "--loss", "tokens")


def test_the_reference_of_another_run_is_refused(folder: Path):
    train(folder, "seed", "seed=5", "steps=1")
    kept = folder / "run" / "reference.safetensors"
    content = kept.read_bytes()
    kept.write_bytes((folder / "seed" / kept.name).read_bytes())
    try:
        words = r"is of the weights [0-9a-f]{16}, and the reference of the run .* has"
        assert re.search(words, " ".join(evaluated(folder / "run", code=2).split()))
        with pytest.raises(InputError, match=words):
            train(folder, "run", "steps=5", "checkpoint.resume=auto")
    finally:
        kept.write_bytes(content)


def test_inspect_shows_whole_pairs_as_samples(folder: Path):
    found = inspect(folder / "tokens", n=1, seq_len=64)
    split = open_split(folder / "tokens", "train")
    samples = PairSamples(split, 64)
    assert found["packing"]["sequences"] == len(samples)
    assert found["documents"][0]["tokens"] == samples.span(0)[1]
    lengths = [length for i in range(len(samples)) for length in samples.documents(i)]
    assert sorted(samples.document_lengths().tolist()) == sorted(lengths)
    assert found["packing"]["attended_tokens"] == pytest.approx(sum(n * n for n in lengths) / sum(lengths))
    whole = DocumentSamples(split, 7)
    lengths = [length for i in range(len(whole)) for length in whole.documents(i)]
    assert sorted(whole.document_lengths().tolist()) == sorted(lengths)


def test_plan_prices_the_pass_of_the_reference(folder: Path):
    options = ("plan", folder / "run.toml", "--cluster", "h100:1", "--json")
    result = CliRunner().invoke(app, [str(each) for each in options])
    assert result.exit_code == 0, result.output
    best = json.loads(result.stdout)["best"][0]
    n_sequences = sum(len(PairSamples(open_split(folder / "tokens", name), 64)) for name in ("train", "validation"))
    assert best["reference_s"] == pytest.approx(best["step_s"] * n_sequences / 4 / 3)


@prove
@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        (
            "training.step:ForwardBackward._n_losses",
            "len(microbatch.pairs.counts_D) // 2",
            "len(microbatch.pairs.counts_D)",
        ),
        ("generation.evaluate:_sums", "None if task.references is None else task.references[name]", "None"),
        (
            "training.sources:values_of_answers",
            "values[answers.start : answers.stop]",
            "values[answers.start : answers.stop][::-1]",
        ),
    ],
    ids=["answers for pairs", "no reference", "the reference of the other answer"],
)
def test_a_wrong_loss_of_validation_pairs_would_be_seen(folder: Path, function: str, before: str, after: str):
    margins = plain_losses(folder)
    with mutated(Mutation(f"shardwright.{function}", before, after)):
        found = CliRunner().invoke(app, ["eval", str(folder / "run"), "--json", "--micro-batch", "1"])
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins)
    assert found.exit_code or abs(json.loads(found.stdout)["loss"] - expected) > 1e-4


@prove
def test_the_digest_of_weights_is_of_their_names_and_values():
    found = set()
    for spec_seed, swapped in ((3, False), (4, False), (3, True)):
        (digest,) = run_ranks(digest_of, 1, Layout(), spec_seed, swapped)
        found.add(digest)
    assert len(found) == 3
    for layout in (Layout(tp=2), Layout(pp=2), Layout(dp_shard=2, zero=3), Layout(dp_replicate=2)):
        assert set(run_ranks(digest_of, 2, layout, 3, False)) <= found
        assert len({*run_ranks(digest_of, 2, layout, 3, False), *run_ranks(digest_of, 1, Layout(), 3, False)}) == 1


def digest_of(layout: Layout, seed: int, swapped: bool) -> str:
    """The digest of a model; `swapped`: with the values of two tensors of one shape exchanged."""
    spec = replace(SPEC, n_layers=2, n_heads=4, n_kv_heads=2)
    model = apply(spec, layout, torch.device("cpu"), seed=seed, param_dtype=torch.float32, compute_dtype=torch.float32)
    if swapped:
        one, other = (model.named_parameters[f"layers.{n}.attention.q.weight"].data for n in (0, 1))
        held = one.clone()
        one.copy_(other)
        other.copy_(held)
    return weights_digest(model)
