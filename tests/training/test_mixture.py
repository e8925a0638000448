"""Proves that a run over several sources sees exactly the samples of its mixture, across a stage, a resume on another
layout and a stage that was added later; and that one whose past is changed is refused.

Runs are those of `shardwright train` (runs.py). The source of a sample and its number there are read from the tokens
that a rank trains on, not from what our order says.
"""

import functools
import json
import os
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from shardwright.data import prepare as module
from shardwright.data.order import Permutation
from shardwright.data.prepare import prepare
from shardwright.data.shards import open_split
from tests.training.runs import records, train

SEQ_LEN, GLOBAL_BATCH, SEED = 16, 4, 3
RUN_FILE = """
out = "{out}"
steps = 12
seed = 3
device = "cpu"
model = {{ n_layers = 1, d_model = 16, n_heads = 2, n_kv_heads = 2, head_dim = 8, d_ffn = 24, vocab_size = 300, \
max_seq_len = 16, dropout = 0.1 }}
batch = {{ seq_len = 16, global_batch = 4 }}
layout = {{ dp_shard = 2 }}
lr_schedule = {{ shape = "constant" }}
checkpoint = {{ every = 3, keep_last = 9 }}
metrics = {{ every = 1 }}
evaluation = {{ samples = 3, every = 6 }}

[data]

[[data.sources]]
path = "{folder}/prose"
weight = 3

[[data.sources]]
path = "{folder}/code"
weight = 1
"""
LATER = "[[data.sources]]\npath = '{folder}/few'\n[[data.stages]]\nfrom_step = 6\nweights = {{ code = 1, few = 1 }}\n"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three folders of tokens of one tokenizer, of other text and sizes; `few` has less than 20 samples."""
    folder = tmp_path_factory.mktemp("sources")
    code = Path(module.__file__).read_text()
    texts = {
        "code": [code[at : at + 2000] for at in range(0, 12000, 2000)],
        "prose": [f"Chapter {i}. " + "It was a dark night, and nobody came. " * (20 + i) for i in range(8)],
        "few": ["x = 1\n" * 30, "y = 2\n" * 30],
    }
    for name, documents in texts.items():
        (folder / f"{name}-text").mkdir()
        for number, text in enumerate(documents):
            (folder / f"{name}-text" / f"{number}.txt").write_text(text)
        tokenizer = None if name == "code" else folder / "code" / "tokenizer.json"
        prepare(folder / f"{name}-text", folder / name, vocab_size=300, validation=0.3, tokenizer=tokenizer)
    return folder


@pytest.fixture
def run_file(sources: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.format(out=tmp_path / "out", folder=sources))
    return path


def records_tokens(folder: Path, rank: int) -> None:
    """Every rank writes down the step, the running index and the tokens of each sample that it trains on."""
    from shardwright.training.step import Trainer

    step = Trainer.step
    file = (folder / f"tokens-{os.getpid()}-{rank}").open("w")

    def record(self, batch, number, rate):
        tokens = batch.tokens_ABT.flatten(0, 1).tolist()
        for i, row in zip(batch.sample_ids_AB.flatten().tolist(), tokens, strict=True):
            file.write(json.dumps([number, i, row]) + "\n")
        file.flush()
        return step(self, batch, number, rate)

    Trainer.step = record


def trained_on(run_file: Path) -> list[tuple[int, list[int]]]:
    """(step from 0, tokens) of each sample of a run, by running index; each index once."""
    lines = [json.loads(line) for path in run_file.parent.glob("tokens-*") for line in path.read_text().splitlines()]
    assert sorted(i for _, i, _ in lines) == list(range(len(lines)))
    return [(step, tokens) for step, _, tokens in sorted(lines, key=lambda line: line[1])]


def expected(sources: Path, names: list[str], stages: list[tuple[int, list[int]]], steps: int) -> list[list[int]]:
    """The tokens of the samples of a run, written anew: a sample goes to the source that is furthest behind of those
    that could not wait, by exact fractions; its source takes the next of its own permutation."""
    splits = [open_split(sources / name, "train") for name in names]
    sizes = [(split.n_tokens - 1) // SEQ_LEN for split in splits]
    ends = [*(step for step, _ in stages[1:]), steps]
    taken, found = [0] * len(names), []
    for (begin, weights), end in zip(stages, ends, strict=True):
        period, counts = sum(weights), [0] * len(names)
        slack = 1 - Fraction(1, 2 * sum(weight > 0 for weight in weights) - 2)
        for n in range(1, (end - begin) * GLOBAL_BATCH + 1):
            lag = {k: Fraction(w * n, period) - counts[k] for k, w in enumerate(weights) if w}
            able = {k: (slack - late) * period // weights[k] for k, late in lag.items() if late >= 1 - slack}
            k = min(able, key=lambda each: (able[each], each))
            epoch, place = divmod(taken[k], sizes[k])
            key = (SEED, epoch, k) if k else (SEED, epoch)
            sample = int(Permutation(sizes[k], key)(np.array(place)))
            found.append(splits[k].tokens(sample * SEQ_LEN, SEQ_LEN).tolist())
            taken[k], counts[k] = taken[k] + 1, counts[k] + 1
    return found


def settings(*given: str) -> list[str]:
    return [argument for setting in given for argument in ("--set", setting)]


def test_a_run_of_two_sources_a_resume_on_another_layout_and_a_new_stage_sees_exactly_those_samples(
    run_file: Path, sources: Path
):
    recorder = functools.partial(records_tokens, run_file.parent)
    first = train(run_file, *settings("steps=6"), fault=recorder)
    assert "source  prose: 75%; " in first.stdout
    run_file.write_text(run_file.read_text() + LATER.format(folder=sources))
    resumed = train(run_file, *settings("layout.dp_shard=1", "layout.zero=0", "steps=12"), "--resume", fault=recorder)
    assert "source  few: 0%, then 50% after step 6; " in resumed.stdout
    seen = trained_on(run_file)
    names = ["prose", "code", "few"]
    whole = expected(sources, names, [(0, [3, 1, 0]), (6, [0, 1, 1])], steps=12)
    assert [step for step, _ in seen] == [step for step in range(12) for _ in range(GLOBAL_BATCH)]
    assert [tokens for _, tokens in seen] == whole

    told = [record for record in records(run_file) if record["kind"] == "train"]
    sizes = {name: (open_split(sources / name, "train").n_tokens - 1) // SEQ_LEN for name in names}
    assert told[-1]["epochs"] == pytest.approx(
        {"prose": 18 / sizes["prose"], "code": 18 / sizes["code"], "few": 12 / sizes["few"]}
    )
    evaluated = [record for record in records(run_file) if record["kind"] == "evaluation"]
    assert [record["step"] for record in evaluated] == [0, 6, 12]
    for record, weights in zip(evaluated, ((3, 1, 0), (3, 1, 0), (0, 1, 1)), strict=True):
        losses = [record["sources"].get(name, 0.0) for name in names]
        assert record["loss"] == pytest.approx(np.dot(weights, losses) / sum(weights), rel=1e-12)
    assert list(evaluated[0]["sources"]) == ["prose", "code"]
    assert list(evaluated[-1]["sources"]) == names


@pytest.mark.prove
def test_a_resume_within_a_stage_goes_on_as_a_run_that_never_stopped(run_file: Path, sources: Path):
    run_file.write_text(run_file.read_text() + LATER.format(folder=sources))
    recorder = functools.partial(records_tokens, run_file.parent)
    train(run_file, *settings("steps=9"), fault=recorder)
    train(run_file, *settings("layout.dp_shard=4"), "--resume", fault=recorder)
    whole = expected(sources, ["prose", "code", "few"], [(0, [3, 1, 0]), (6, [0, 1, 1])], steps=12)
    assert [tokens for _, tokens in trained_on(run_file)] == whole


@pytest.mark.prove
def test_data_is_added_to_a_run_that_began_with_one_folder(run_file: Path, sources: Path):
    text = run_file.read_text()
    alone = text.partition("[data]")[0]
    run_file.write_text(f'{alone}[data]\npath = "{sources}/prose"\n')
    recorder = functools.partial(records_tokens, run_file.parent)
    train(run_file, *settings("steps=3"), fault=recorder)
    assert "epochs" not in records(run_file)[1]
    stage = "[[data.stages]]\nfrom_step = 3\nweights = { prose = 1, code = 1 }\n"
    added = f'[[data.sources]]\npath = "{sources}/prose"\nweight = 1\n[[data.sources]]\npath = "{sources}/code"\n'
    run_file.write_text(f"{alone}[data]\n{added}{stage}")
    train(run_file, *settings("steps=6"), "--resume", fault=recorder)
    whole = expected_alone(sources, 3) + expected(sources, ["prose", "code"], [(0, [1, 1])], steps=3)
    seen = [tokens for _, tokens in trained_on(run_file)]
    assert seen[:12] == whole[:12]
    prose = [tokens for tokens in seen if tokens in expected_alone(sources, 6)]
    assert prose == expected_alone(sources, 6)[:18], "the first source goes on with its next samples"


def expected_alone(sources: Path, steps: int) -> list[list[int]]:
    split = open_split(sources / "prose", "train")
    permutation = Permutation((split.n_tokens - 1) // SEQ_LEN, (SEED, 0))
    return [split.tokens(int(i) * SEQ_LEN, SEQ_LEN).tolist() for i in permutation(np.arange(steps * GLOBAL_BATCH))]


@pytest.mark.prove
def test_a_run_whose_past_is_changed_is_refused_with_the_reason(run_file: Path, sources: Path):
    text = run_file.read_text()
    train(run_file, *settings("steps=6", "evaluation.samples=0"))
    prose, code = f'path = "{sources}/prose"\nweight = 3', f'path = "{sources}/code"\nweight = 1'
    early = "[[data.stages]]\nfrom_step = 4\nweights = { code = 1 }\n"
    swapped = text.replace(prose, "?").replace(code, prose).replace("?", code)
    for changed, said in {
        text.replace(
            "weight = 3", "weight = 2"
        ): "it was trained with prose 3 : code 1 from step 0 on, and this run file "
        "has prose 2 : code 1; steps that were taken keep their weights; give the stages of these steps as they were, "
        "and other weights in a stage with from_step >= 6",
        text + early: "this run file has a stage from step 4 on, and the 6 steps that are done were trained without it",
        swapped: "source 1 was 'prose' with tokens of fingerprint",
    }.items():
        assert changed != text
        run_file.write_text(changed)
        refused = train(run_file, "--resume", *settings("evaluation.samples=0"), expect=2)
        assert said in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr
    run_file.write_text(text.replace("weight = 3", "weight = 0.75").replace("weight = 1\n", "weight = 0.25\n"))
    train(run_file, "--resume", *settings("evaluation.samples=0", "steps=7"))


def test_sources_that_cannot_be_mixed_are_refused_all_at_once(run_file: Path, sources: Path, tmp_path: Path):
    prepare(sources / "few-text", tmp_path / "other", vocab_size=260, validation=0.3)
    prepare(
        sources / "few-text",
        tmp_path / "ended",
        tokenizer=end_named(sources / "code" / "tokenizer.json", tmp_path / "two.json"),
        separator="</s>",
        validation=0.3,
    )
    more = [sources / "missing", tmp_path / "other", tmp_path / "ended"]
    again = "".join(f'[[data.sources]]\npath = "{path}"\nweight = 1\n' for path in more)
    twice = f'[[data.sources]]\npath = "{sources}/code"\nname = "code again"\nweight = 1\n'
    run_file.write_text(run_file.read_text() + again + twice)
    refused = train(run_file, expect=2)
    counts = Counter({said: refused.stderr.count(said) for said in SAID})
    assert counts == Counter(dict.fromkeys(SAID, 1)), refused.stderr


SAID = (
    "source 'missing':",
    "source 'other' and source 'prose' differ in the tokenizer (",
    "source 'ended' and source 'prose' differ in the tokenizer (",
    "the vocabulary (260, not 300)",
    "the separator (</s>, not <|endoftext|>)",
    "sources 'code' and 'code again' hold the same tokens",
)


def end_named(tokenizer: Path, path: Path) -> Path:
    """A copy of a tokenizer with another special token."""
    from tokenizers import Tokenizer

    copy = Tokenizer.from_file(str(tokenizer))
    copy.add_special_tokens(["</s>"])
    copy.save(str(path))
    return path
