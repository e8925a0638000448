"""Proves that lm-eval gets of our models what the plain forward pass computes and, where lm-eval and accelerate are
installed, what its own class for transformers computes; elsewhere lm_eval_interface.py stands in for lm-eval."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from shardwright.generation.source import open_source
from shardwright.system.errors import InputError

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from shardwright.data.tokenizer import train_bpe
from tests.generation import lm_eval_interface as interface
from tests.hugging_face.models import COMMON
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated

ShardwrightLM = interface.model_class()

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


@pytest.mark.parametrize("layout", rest_prove([{}, {"tp": 2}], {}), ids=str)
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


def test_a_long_text_is_scored_in_windows_that_predict_each_token_once(folder: Path):
    model = ShardwrightLM(str(folder), batch_size=2, max_length=7)
    found = model.loglikelihood_rolling(asked(*((text,) for text in TEXTS)), disable_tqdm=True)
    for text, value in zip(TEXTS, found, strict=True):
        ids = [model.prefix_token_id, *Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids]
        expected = 0.0
        for start in range(1, len(ids), 7):
            end = min(start + 7, len(ids))
            # All targets but those of the last window, which has more to read, follow the one token before them.
            expected += plain(folder, ids[max(0, end - 8) : end], end - start)[0]
        assert value == pytest.approx(expected, abs=1e-4)


def test_a_context_is_continued_by_its_most_probable_tokens_until_a_stop_text(folder: Path):
    model = ShardwrightLM(str(folder), batch_size=2, max_length=14)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = open_source(folder).whole(torch.device("cpu"))

    def greedy(context: str, n: int, until: list[str]) -> str:
        ids = tokenizer.encode(context).ids[-(14 - n) :]
        made: list[int] = []
        for _ in range(n):
            with torch.no_grad():
                made.append(int(whole(torch.tensor([ids + made]))[0, -1].argmax()))
        text = tokenizer.decode(made)
        return min((text.partition(stop)[0] for stop in until), key=len, default=text)

    contexts = ["import os", "def f(x", "class A:\n" * 9]
    long = [greedy(context, 6, []) for context in contexts]
    stops = [long[0][2:4], long[1][-1]]
    wanted = [
        (context, {"until": until, "max_gen_toks": n}) for context in contexts for until, n in (([], 6), (stops, 4))
    ]
    found = model.generate_until(asked(*wanted), disable_tqdm=True)
    assert found == [greedy(context, each["max_gen_toks"], each["until"]) for context, each in wanted]
    assert len(set(found)) > 3


@prove
def test_what_stands_in_for_lm_eval_does_what_lm_eval_does(folder: Path):
    pytest.importorskip("lm_eval")
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for n_tokens in range(20):
        for length, context in ((1, 1), (4, 1), (4, 3), (4, 4), (30, 2)):
            given = [*range(10, 10 + n_tokens)], 1, length, context
            windows = [*interface.get_rolling_token_windows(*given)]
            assert windows == [*get_rolling_token_windows(*given)]
            assert [*map(interface.make_disjoint_window, windows)] == [*map(make_disjoint_window, windows)]
    for kwargs in ({}, {"until": "a"}, {"until": ["a"], "temperature": 0.5}, {"do_sample": True, "temperature": 2}):
        for more in ({}, {"max_gen_toks": 7, "top_p": 0.5}):
            assert interface.normalize_gen_kwargs(kwargs | more, 9) == normalize_gen_kwargs(kwargs | more, 9)

    class Encoded(interface.TemplateLM):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.tok_encode, self.prefix_token_id = model.tok_encode, model.prefix_token_id
            self._loglikelihood_tokens = model._loglikelihood_tokens

    model = ShardwrightLM(str(folder))
    assert Encoded(model).loglikelihood(asked(*PAIRS)) == model.loglikelihood(asked(*PAIRS), disable_tqdm=True)


def test_numbers_and_texts_are_those_of_lm_evals_own_class_for_transformers(folder: Path):
    pytest.importorskip("lm_eval")
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


OURS = "shardwright.lm_eval:ShardwrightLM"
BUGS = {
    "lm-eval: a continuation is scored without the first token that fits before it": (
        test_a_long_text_is_scored_in_windows_that_predict_each_token_once,
        Mutation(
            f"{OURS}._loglikelihood_tokens",
            "(context + continuation)[-(self.max_length + 1) :]",
            "(context + continuation)[-self.max_length :]",
        ),
    ),
    "lm-eval: a long text has the log-likelihood of its last part": (
        test_a_long_text_is_scored_in_windows_that_predict_each_token_once,
        Mutation(f"{OURS}.loglikelihood_rolling", "totals[number] += value", "totals[number] = value"),
    ),
    "lm-eval: a context is cut to what fits without the new tokens": (
        test_a_context_is_continued_by_its_most_probable_tokens_until_a_stop_text,
        Mutation(f"{OURS}._generate", "self.max_length - n_tokens", "self.max_length - 1"),
    ),
    "lm-eval: the stop texts of a task are not used": (
        test_a_context_is_continued_by_its_most_probable_tokens_until_a_stop_text,
        Mutation(f"{OURS}._generate", "settings.get('until', [])", "[]"),
    ),
    "lm-eval: all contexts are continued as the first one wants": (
        test_a_context_is_continued_by_its_most_probable_tokens_until_a_stop_text,
        Mutation(f"{OURS}.generate_until", "repr(request.args[1])", "''"),
    ),
}


@prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name: str, folder: Path):
    check, bug = BUGS[name]
    with mutated(bug), pytest.raises(AssertionError):
        check(folder)
