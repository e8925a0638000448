"""Proves that lm-eval gets of our models what the plain forward pass computes, and what its own class for transformers
computes from the exported folder. Skipped where lm-eval is not installed (pip install 'shardwright[lm-eval]')."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from shardwright.errors import InputError
from shardwright.generation.source import open_source

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from shardwright.data.tokenizer import train_bpe
from shardwright.lm_eval import ShardwrightLM
from tests.hugging_face.models import COMMON

PAIRS = [
    ("def main(", "self):"),
    ("import os\nimport ", "sys"),
    ("", "return None"),
    ("class A:\n" * 20, "    pass"),
]
TEXTS = ["import os\n", "def f(x):\n    return x\n" * 12]


@dataclass
class Instance:
    """What lm-eval asks for, as far as a model reads it."""

    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer of its vocabulary."""
    path = tmp_path_factory.mktemp("lm-eval") / "hf"
    made = train_bpe([*TEXTS, *(part for pair in PAIRS for part in pair)], 300)
    torch.manual_seed(5)
    config = LlamaConfig(**COMMON | {"vocab_size": made.vocab_size, "initializer_range": 0.2})
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_bytes(made.json_bytes)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": made.separator, "bos_token": made.separator}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {"eos_token_id": made.separator_id, "bos_token_id": made.separator_id}
    for name in ("config.json", "generation_config.json"):
        table = json.loads((path / name).read_text()) if (path / name).is_file() else {}
        (path / name).write_text(json.dumps(table | ids))
    return path


def asked(*requests: tuple[Any, ...]) -> list[Instance]:
    return [Instance(each) for each in requests]


def plain(folder: Path, ids: list[int], n: int) -> tuple[float, bool]:
    """The full forward pass over all but the last token, alone."""
    model = open_source(folder).whole(torch.device("cpu"))
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0, -n:]
    targets = torch.tensor(ids[-n:])
    value = logits.double().log_softmax(-1).gather(1, targets[:, None]).sum()
    return float(value), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=str)
def test_log_likelihoods_are_those_of_the_plain_forward_pass(folder: Path, layout: dict[str, int]):
    model = ShardwrightLM(str(folder), batch_size=3, **layout)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = model.loglikelihood(asked(*PAIRS), disable_tqdm=True)
    for (context, continuation), (value, greedy) in zip(PAIRS, found, strict=True):
        kept = context.rstrip()
        before = tokenizer.encode(kept).ids if kept else [model.prefix_token_id]
        ids = tokenizer.encode(context + continuation).ids if kept else [*before, *tokenizer.encode(continuation).ids]
        n = len(ids) - len(before)
        expected, most_probable = plain(folder, ids[-(model.max_length + 1) :], n)
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == most_probable


def test_numbers_and_texts_are_those_of_lm_evals_own_class_for_transformers(folder: Path):
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    ours = ShardwrightLM(str(folder), batch_size=2)
    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=2, dtype="float32")
    pairs, texts = asked(*PAIRS), asked(*((text,) for text in TEXTS))
    of_pairs = [model.loglikelihood(pairs, disable_tqdm=True) for model in (ours, theirs)]
    assert [value for value, _ in of_pairs[0]] == pytest.approx([value for value, _ in of_pairs[1]], abs=1e-4)
    assert [greedy for _, greedy in of_pairs[0]] == [greedy for _, greedy in of_pairs[1]]
    of_texts = [model.loglikelihood_rolling(texts, disable_tqdm=True) for model in (ours, theirs)]
    assert of_texts[0] == pytest.approx(of_texts[1], abs=1e-4)
    free = theirs.generate_until(asked(("import os", {"until": [], "max_gen_toks": 12})), disable_tqdm=True)[0]
    for until in ([], [free[4:6]]):
        wanted = asked(
            *((context, {"until": until, "max_gen_toks": 12}) for context in ("import os", "def f(x", "class"))
        )
        said = ours.generate_until(wanted, disable_tqdm=True)
        assert said == theirs.generate_until(wanted, disable_tqdm=True)
        assert any(said)


def test_what_cannot_be_used_is_told_at_once(folder: Path):
    with pytest.raises(InputError) as caught:
        ShardwrightLM(str(folder), batch_size="many", max_length=10**6, pretrained="gpt2", tp=3)
    for said in ("--batch_size many", "max_length=1000000", "--model_args pretrained=gpt2: there is no such key"):
        assert said in str(caught.value)
    with pytest.raises(InputError, match="the tokenizer joins the continuation to the last token"):
        ShardwrightLM(str(folder)).loglikelihood(asked(("def mai", "n"), ("def main(", "self")), disable_tqdm=True)
    with pytest.raises(InputError, match="no path; give --model_args path=FOLDER"):
        ShardwrightLM()
    with pytest.raises(InputError, match="a task asks for generation with num_beams"):
        ShardwrightLM(str(folder)).generate_until(asked(("import", {"num_beams": 4, "max_gen_toks": 2})))
