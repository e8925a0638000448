"""Proves that `generate`, `score` and `eval` do what their options say, from a run that was trained to its text and
perplexity, and that what cannot be used is told at once."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.config import load
from shardwright.data.prepare import prepare
from shardwright.generation.source import open_source
from shardwright.system.console import visible
from shardwright.training.exporting import export
from shardwright.training.sources import Sources
from shardwright.training.start import start
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated

RUN_FILE = """
out = "{folder}/run"
steps = 3
device = "cpu"
model = {{ n_layers = 2, d_model = 16, n_heads = 2, n_kv_heads = 1, head_dim = 8, d_ffn = 24, vocab_size = 300, \
max_seq_len = 32 }}
data = {{ path = "{folder}/tokens" }}
batch = {{ seq_len = 16, global_batch = 4 }}
evaluation = {{ samples = 8 }}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run in `run` and its data in `tokens`."""
    folder = tmp_path_factory.mktemp("generate")
    texts = folder / "texts"
    texts.mkdir()
    for number, module in enumerate((__file__, json.__file__, pytest.__file__, typer.__file__)):
        (texts / f"{number}.txt").write_text(Path(module).read_text())
    prepare(texts, folder / "tokens", vocab_size=300, validation=0.5, glob="*.txt")
    (folder / "run.toml").write_text(RUN_FILE.format(folder=folder))
    start(load(folder / "run.toml"), quiet=True)
    return folder


def run(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == code, result.output + result.stderr
    return result.stdout if code == 0 else result.stderr


def generated(folder: Path, *arguments: Any) -> Any:
    return json.loads(run("generate", folder / "run", "--max-tokens", 9, "--json", *arguments))


def test_prompts_of_a_file_are_continued(folder: Path):
    (folder / "prompts.jsonl").write_text('{"prompt": "import json"}\n\n{"prompt": "def "}\n')
    (folder / "prompts.lines").write_text("import json\ndef \n")
    of_file = generated(folder, "--prompts", folder / "prompts.jsonl")["completions"]
    assert [each["prompt"] for each in of_file] == ["import json", "def "]
    assert generated(folder, "--prompts", folder / "prompts.lines")["completions"] == of_file
    assert generated(folder, "--prompt", "import json")["completions"] == of_file[:1]
    assert generated(folder, "--prompt", "import json", "--seed", 1)["completions"] != of_file[:1]
    one_by_one = generated(folder, "--prompts", folder / "prompts.jsonl", "--batch-size", 1)
    assert one_by_one["completions"] == of_file
    assert all(each["n_tokens"] == 9 and each["ended"] == "max_tokens" for each in of_file)
    text = run("generate", folder / "run", "--prompts", folder / "prompts.jsonl", "--max-tokens", 9)
    assert text.startswith("--- prompt 1 of 2\nimport json" + visible(of_file[0]["text"]))


def test_weights_that_are_not_finite_are_refused_in_one_sentence(folder: Path, tmp_path: Path):
    export(folder / "run", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    for value, dtype in ((math.nan, "fp32"), (1e6, "fp16")):
        tensors[name][0, 3] = value
        save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
        out = tmp_path / f"out-{dtype}"
        said = run("export", tmp_path / "hf", "--out", out, "--dtype", dtype, code=2)
        assert f"1 of 384 values of {name} are NaN or infinite in float{dtype[2:]}; take an earlier checkpoint" in said
        assert said.count("error:") == 1
        assert not out.exists()
        assert "are NaN or infinite" in run("export", tmp_path / "hf", "--out", out, "--dtype", dtype, "--allow-nan")
    tensors[name][0, 3] = -math.inf
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert "--data is missing" in run("eval", tmp_path / "hf", code=2)
    data = ("--data", folder / "tokens", "--seq-len", 16)
    for verb, *options in (("generate", "--prompt", "x"), ("eval", *data), ("generate", "--prompt=x", "--layout=tp=2")):
        said = run(verb, tmp_path / "hf", *options, code=2)
        assert "values of layers.1.ffn.down.weight are NaN or infinite, so all that the model computes" in said
        assert said.count("error:") == 1


def test_a_tokenizer_whose_rules_fail_on_a_prompt_is_refused_in_one_sentence(folder: Path, tmp_path: Path):
    export(folder / "run", tmp_path / "hf")
    file = tmp_path / "hf" / "tokenizer.json"
    rules = json.loads(file.read_text())
    rule = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}  # exponential time
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    file.write_text(json.dumps(rules | {"normalizer": rule}))
    for chat in ((), ("--chat",)):
        said = run("generate", tmp_path / "hf", "--prompt", "a" * 28 + "!", "--max-tokens", 1, *chat, code=2)
        assert said.startswith("error: the rules of the tokenizer fail on a text")
        assert len(said.splitlines()) == 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    file.unlink()
    file.symlink_to(tmp_path / "tokenizer.json")
    said = run("generate", tmp_path / "hf", "--prompt", "a", code=2)
    assert said.startswith(f"error: {tmp_path / 'hf'}: 'tokenizer.json' is a link out of this folder")


def test_weights_without_a_tokenizer_are_noted_next_to_data(folder: Path, tmp_path: Path):
    export(folder / "run", tmp_path / "hf")
    data = ("--data", folder / "tokens", "--seq-len", 16)
    assert "note:" not in run("eval", tmp_path / "hf", *data)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert f"note: {tmp_path / 'hf'} has no tokenizer.json, so nothing shows" in run("eval", tmp_path / "hf", *data)
    key = "init.weights"
    config = load(folder / "run.toml", [f"{key}={tmp_path / 'hf'}", f"out={tmp_path / 'run'}"])
    assert any(key in remark and "has no tokenizer.json" in remark for remark in Sources(config).remarks)


def test_a_text_ends_with_an_answer_too_where_conversations_were_trained_on(folder: Path, tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(folder / "tokens" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_end|>"])
    begin = ("<|im_end|>", tokenizer.token_to_id("<|im_end|>"))
    tokenizer.post_processor = TemplateProcessing(single="<|im_end|> $A", special_tokens=[begin])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|im_end|>", "eos_token": "<|im_end|>"}')
    (tmp_path / "turns.jinja").write_text(template)
    talk = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]}
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps(talk)}\n" * 9)
    given = {"tokenizer": tmp_path / "tokenizer.json", "validation": 0}
    prepare(folder / "texts", tmp_path / "texts", **given)
    prepare(
        tmp_path / "talks.jsonl", tmp_path / "talks", format="chat", chat_template=tmp_path / "turns.jinja", **given
    )
    mixed = f"""data = {{ sources = [
        {{ path = "{tmp_path}/texts", weight = 1 }}, {{ path = "{tmp_path}/talks", weight = 1 }}] }}"""
    text = RUN_FILE.format(folder=tmp_path).replace(f'data = {{ path = "{tmp_path}/tokens" }}', mixed)
    text = text.replace("vocab_size = 300", "vocab_size = 301").replace("samples = 8", "samples = 0")
    (tmp_path / "run.toml").write_text(text)
    start(load(tmp_path / "run.toml"), quiet=True)
    ends = [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>")]
    assert open_source(tmp_path / "run").text().ends == frozenset(ends)
    (remark,) = export(tmp_path / "run", tmp_path / "hf").remarks
    for model in ("run", "hf"):
        given = ("--chat", "--prompt", "2 + 2?", "--temperature", 0, "--max-tokens", 9, "--json")
        [answer] = json.loads(run("generate", tmp_path / model, *given))["completions"]
        assert answer["n_prompt_tokens"] == len(tokenizer.encode("2 + 2?<|im_end|>\n", add_special_tokens=False)) + 1
    assert "has no chat template" in run("generate", folder / "run", "--chat", "--prompt", "2 + 2?", code=2)
    assert "in transformers the tokenizer adds <|im_end|> to a text, and the run's data had none" in remark
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == ends
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == template
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert open_source(tmp_path / "hf").text().ends == frozenset(ends)


def test_a_draft_or_an_export_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path):
    export(folder / "run", tmp_path / "hf")
    assert generated(folder, "--prompt", "x", "--greedy", "--draft", tmp_path / "hf")["accepted"] > 0
    table = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    ids = table["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(table))
    said = run("generate", folder / "run", "--prompt", "x", "--draft", tmp_path / "hf", code=2)
    assert "2 tokens, such as 'a', have another id" in said
    said = run("export", folder / "run", "--out", tmp_path / "x", "--tokenizer", tmp_path / "hf", code=2)
    assert "is not the tokenizer of" in said
    assert not (tmp_path / "x").exists()


def test_a_sequence_ends_at_max_seq_len(folder: Path):
    (found,) = generated(folder, "--prompt", "a", "--max-tokens", 100, "--greedy")["completions"]
    assert (found["n_tokens"], found["ended"]) == (31, "max_seq_len")


@prove
@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "dp_replicate=2", "cp=2"])
def test_a_checkpoint_is_loaded_on_another_layout(folder: Path, layout: str):
    arguments = ("--prompt", "import json", "--prompt", "x")
    assert (
        generated(folder, *arguments, "--layout", layout)["completions"] == generated(folder, *arguments)["completions"]
    )
    evaluated = ("eval", folder / "run", "--data", folder / "tokens", "--seq-len", 16, "--json")
    one, several = (json.loads(run(*evaluated, *more)) for more in ((), ("--layout", layout)))
    assert several["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_a_draft_proposes_tokens(folder: Path):
    alone = generated(folder, "--prompt", "import json", "--greedy")
    drafted = generated(folder, "--prompt", "import json", "--greedy", "--draft", folder / "run")
    assert drafted["completions"] == alone["completions"]
    assert drafted["accepted"] == drafted["proposed"] > 0


def test_perplexity_is_that_of_the_last_evaluation_of_the_run(folder: Path):
    """The run evaluates the same 8 sequences of 16 tokens after its last step."""
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [record for record in records if record["kind"] == "evaluation"][-1]
    arguments = ("--data", folder / "tokens", "--seq-len", 16, "--samples", 8, "--json")
    found = json.loads(run("eval", folder / "run", *arguments))
    assert found["loss"] == pytest.approx(logged["loss"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(logged["loss"]), rel=1e-6)
    assert found["n_tokens"] == 8 * 16


def test_data_of_another_tokenizer_or_that_is_not_there_is_told(folder: Path, tmp_path: Path):
    prepare(folder / "texts", tmp_path / "other", vocab_size=280, validation=0.5, glob="*.txt")
    told = " ".join(run("eval", folder / "run", "--data", tmp_path / "other", code=2).split())
    assert "was not prepared with the tokenizer of the model" in told
    told = " ".join(run("eval", folder / "run", "--seq-len", 0, "--split", "test", "--layout", "tp=x", code=2).split())
    for words in ("--seq-len 0: a number", "--split test: not one of", "tp=x: a whole number"):
        assert words in told
    told = run("eval", folder / "run", "--data", tmp_path, "--seq-len", 33, "--layout", "tp=3", code=2)
    assert "layout.tp=3 does not divide" in told
    assert "--seq-len 33 is longer than max_seq_len=32" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), ["nothing to continue; give --prompt TEXT or --prompts FILE"]),
        (("--prompt", ""), ["prompt 1 is empty; give it at least one character"]),
        (("--prompt", "word " * 40), ["tokens, and max_seq_len=32 of the model leaves no room"]),
        (
            ("--prompt", "a", "--temperature", -0.5, "--top-p", 1.5, "--top-k", -1, "--max-tokens", 0),
            [
                "--temperature -0.5: 0 (the most probable token) or more",
                "--top-p 1.5: a prob",
                "--top-k -1: 0 (all",
                "--max-tokens 0: a number",
            ],
        ),
        (("--prompt", "a", "--temperature", -1), ["--temperature -1: 0 (the most probable token) or more"]),
        (("--prompt", "a", "--greedy", "--top-k", 3), ["--greedy draws nothing, so --top-k would mean nothing"]),
        (
            ("--prompt", "a", "--layout", "tpp=2,recompute=full,pp=x"),
            ["no such key of the layout; did you mean 'tp'?", "recompute=full: means nothing here", "pp=x: a whole"],
        ),
        (("--prompt", "a", "--layout", "dp_replicate=4096"), ["4096 ranks, and this machine can run"]),
        (("--prompts", "nowhere.txt"), ["--prompts nowhere.txt: there is no such file"]),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_used_is_told(folder: Path, arguments: Any, said: list[str]):
    told = " ".join(run("generate", folder / "run", *arguments, code=2).split())
    for words in said:
        assert words in told


def test_a_bad_line_of_prompts_is_told_with_its_number(folder: Path):
    path = folder / "bad.jsonl"
    path.write_text('{"prompt": "a"}\nnot json\n{"text": "b"}\n')
    told = " ".join(run("generate", folder / "run", "--prompts", path, code=2).split())
    assert "line 2: not JSON" in told
    assert 'line 3: not an object with a text "prompt"' in told
    path.write_text("\n")
    assert "the file is empty" in run("generate", folder / "run", "--prompts", path, code=2)


def test_scores_of_generated_tokens_are_their_log_probabilities(folder: Path):
    (folder / "two.jsonl").write_text('{"prompt": "import json"}\n{"prompt": "def "}\n')
    made = generated(folder, "--prompts", folder / "two.jsonl", "--logprobs")["completions"]
    lines = [{key: each[key] for key in ("prompt_tokens", "tokens")} for each in made]
    (folder / "made.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for layout in ((), ("--layout", "pp=2")):
        scores = json.loads(run("score", folder / "run", folder / "made.jsonl", "--json", *layout))
        for one, other in zip(scores["texts"], made, strict=True):
            values = [token["log_prob"] for token in one["tokens"]]
            n_prompt = len(other["prompt_tokens"])
            assert values[:n_prompt] == [None] * n_prompt
            assert values[n_prompt:] == pytest.approx(other["log_probs"], abs=2e-5)
            assert one["log_prob"] == pytest.approx(sum(other["log_probs"]), abs=2e-5)
            assert one["n_tokens"] == 9
    assert "tokens" not in generated(folder, "--prompt", "a")["completions"][0]


def test_scores_are_those_of_transformers_with_the_exported_weights(folder: Path, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    export(folder / "run", tmp_path / "hf")
    lines = [{"text": "import json, sys"}, {"prompt": "def f(", "completion": "x):"}]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    for source in (folder / "run", tmp_path / "hf"):
        for text in json.loads(run("score", source, tmp_path / "texts.jsonl", "--json"))["texts"]:
            ids = torch.tensor([[token["id"] for token in text["tokens"]]])
            with torch.no_grad():
                log_p_TV = model(ids).logits[0, :-1].log_softmax(-1)
            theirs = log_p_TV.gather(1, ids[0, 1:, None])[:, 0].tolist()
            for token, value in zip(text["tokens"][1:], theirs, strict=True):
                assert token["log_prob"] is None or token["log_prob"] == pytest.approx(value, abs=2e-5)
            assert text["n_tokens"] == sum(token["log_prob"] is not None for token in text["tokens"])
    assert "".join(token["text"] for token in text["tokens"] if token["log_prob"] is not None) == "x):"
    table = run("score", folder / "run", tmp_path / "texts.jsonl")
    assert "per token" in table
    assert "x):" in table


def test_texts_that_cannot_be_scored_are_told_with_their_line(folder: Path, tmp_path: Path):
    path = tmp_path / "texts.jsonl"
    lines = [{"prompt": "a"}, {"text": ""}, {"text": "word " * 99}, {"prompt_tokens": [1], "tokens": ["a"]},
             {"tokens": [1, 300]}, {"messages": [{"role": "user", "content": "a"}]}, 3]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = run("score", folder / "run", path, "--layout", "tp=3", code=2)
    problems = ("no field completion", "none to score", "33 at most", "'tokens' is not a list",
                "token id 300, outside of", "no chat template", "not an object")  # fmt: skip
    for number, words in enumerate(problems):
        assert f"{path}, line {number + 1}: " in told
        assert words in told
    assert "tp=3" in told
    assert told.count("error:") >= 8
    assert "there is no such file" in run("score", folder / "run", tmp_path / "nowhere", code=2)
    assert "add --json" in run("generate", folder / "run", "--prompt", "a", "--logprobs", code=2)


def test_a_folder_without_a_model_or_a_tokenizer_is_told(folder: Path, tmp_path: Path):
    assert "holds no weights" in run("generate", folder, "--prompt", "a", code=2)
    (folder / "tokens").rename(tmp_path / "tokens")
    try:
        told = " ".join(run("generate", folder / "run", "--prompt", "a", code=2).split())
    finally:
        (tmp_path / "tokens").rename(folder / "tokens")
    assert "a run uses the tokenizer of its data: prepare" in told


def compared(folder: Path, layout: str = "", code: int = 0, *options: str) -> dict[str, Any]:
    lines = [{"text": "import json, sys"}, {"prompt": "def f(", "completion": "x): return"}, {"text": "class A:"}]
    path = folder / "compared.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["score", str(folder / "run"), str(path), "--check", "--json", "--layout", layout, *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("layout", rest_prove(["", "dp_replicate=2", "tp=2", "pp=2", "cp=2"], "", "tp=2"), ids=str)
def test_training_score_and_generation_agree_within_the_stated_bound(folder: Path, layout: str):
    found = compared(folder, layout)
    assert found["holds"]
    assert [each["path"] for each in found["paths"]] == ["score", "generate"]
    assert all(each["largest"] <= found["bound"] < 1e-4 for each in found["paths"])
    assert found["n_tokens"] > 20


@pytest.mark.parametrize("layout", rest_prove(["", "dp_replicate=2", "tp=2", "pp=2"], ""), ids=str)
def test_training_score_and_generation_have_equal_bits_in_the_batch_invariant_mode(folder: Path, layout: str):
    found = compared(folder, layout, 0, "--batch-invariant", "--batch-size", "2")
    assert found["bound"] == 0
    assert all(each["n_equal"] == found["n_tokens"] > 20 for each in found["paths"])


def test_generated_log_probabilities_are_scored_with_equal_bits_in_the_batch_invariant_mode(
    folder: Path, tmp_path: Path
):
    prompts = [option for text in ("import os", "a", "class A:") for option in ("--prompt", text)]
    options = ["--batch-invariant", "--json", "--batch-size", "2"]
    made = json.loads(run("generate", folder / "run", *prompts, "--max-tokens", "6", "--logprobs", *options))
    made = made["completions"]
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made))
    scores = json.loads(run("score", folder / "run", tmp_path / "made.jsonl", *options))["texts"]
    for score, each in zip(scores, made, strict=True):
        n = len(each["prompt_tokens"])
        assert [token["log_prob"] for token in score["tokens"]][n:] == each["log_probs"]
    output = run("score", folder / "run", tmp_path / "made.jsonl", *options, "--layout", "cp=2", code=2)
    assert "batch invariance with layout.cp=2" in output


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        ("score:decoded", "sequence.tokens[-n]", "sequence.tokens[-1]"),
        (
            "cache:LayerCache.attend",
            "x[batch.rows, :, : batch.longest]",
            "x[batch.rows, :, : batch.longest].roll(1, 2)",
        ),
        ("agreement:trainer_log_probs", "tokens[-n:]", "tokens[-n - 1 : -1]"),
        (
            "agreement:trainer_log_probs",
            "values_T[counted_T].tolist()",
            "[*values_T[counted_T].tolist()[:-1], float('nan')]",
        ),
        (
            "score:decoded",
            "values[sequence.prompt].append(value)",
            "values[sequence.prompt].append(value if values[sequence.prompt] else -math.inf)",
        ),
    ],
    ids=["the last token each time", "keys of another position", "the token before", "no number", "infinite"],
)
def test_log_probabilities_that_differ_are_seen(folder: Path, function: str, before: str, after: str):
    with mutated(Mutation(f"shardwright.generation.{function}", before, after)):
        found = compared(folder, code=1)
    assert not found["holds"]


@pytest.fixture(scope="module")
def experts(folder: Path) -> Path:
    """A folder with a run of a model with experts in `run`, and generated completions with their experts."""
    moe = "max_seq_len = 32, moe = { n_experts = 4, top_k = 2, d_ffn = 16, first_dense = 1 } }"
    text = RUN_FILE.format(folder=folder).replace("max_seq_len = 32 }", moe).replace("/run", "/experts/run")
    (folder / "experts.toml").write_text(text.replace("steps = 3", "steps = 1"))
    start(load(folder / "experts.toml"), quiet=True)
    record(folder / "experts", "made")
    return folder / "experts"


def record(experts: Path, name: str, *options: str) -> None:
    """Write completions, and their experts."""
    prompts = [option for text in ("import os", "a", "class A:") for option in ("--prompt", text)]
    file = experts / f"{name}.safetensors"
    output = run("generate", experts / "run", *prompts, "--max-tokens", 6, "--logprobs", "--json", "--record-experts",
                 file, "--batch-size", 2, *options)  # fmt: skip
    completions = json.loads(output)["completions"]
    (experts / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in completions))


def scored_with(experts: Path, *options: Any) -> list[float]:
    scores = json.loads(run("score", experts / "run", experts / "made.jsonl", "--json", *options))["texts"]
    return [token["log_prob"] for text in scores for token in text["tokens"] if token["log_prob"] is not None]


@pytest.mark.parametrize("layout", rest_prove(["", "tp=2", "pp=2", "dp_shard=2,ep=2", "cp=2"], ""))
def test_recorded_experts_are_replayed_by_score(experts: Path, layout: str):
    made = [json.loads(line) for line in (experts / "made.jsonl").read_text().splitlines()]
    recorded = load_file(experts / "made.safetensors")
    assert {name: tuple(each.shape) for name, each in recorded.items()} == {
        str(number): (len(each["prompt_tokens"]) + len(each["tokens"]) - 1, 1, 2) for number, each in enumerate(made, 1)
    }
    right = [value for each in made for value in each["log_probs"]]
    new = experts / f"again{layout}.safetensors"
    options = ["--layout", layout, "--batch-size", 2]
    found = scored_with(experts, "--replay-experts", experts / "made.safetensors", "--record-experts", new, *options)
    assert found == pytest.approx(right, abs=1e-4)
    assert all(torch.equal(each, recorded[name]) for name, each in load_file(new).items())
    scored_with(experts, "--record-experts", new, *options)
    assert all(
        torch.equal(each.sort(-1).values, recorded[name].sort(-1).values) for name, each in load_file(new).items()
    )
    others = {name: (each + 1) % 4 for name, each in recorded.items()}
    save_file(others, experts / "others.safetensors")
    found = scored_with(experts, "--replay-experts", experts / "others.safetensors", "--record-experts", new, *options)
    assert max(abs(a - b) for a, b in zip(found, right, strict=True)) > 1e-4
    assert all(torch.equal(each, others[name]) for name, each in load_file(new).items())
    if layout:
        record(experts, f"made{layout}", "--layout", layout)
        assert (experts / f"made{layout}.safetensors").read_bytes() == (experts / "made.safetensors").read_bytes()


def test_experts_that_cannot_be_recorded_or_replayed_are_told(folder: Path, experts: Path):
    made, file = experts / "made.jsonl", experts / "bad.safetensors"
    replay = ("score", experts / "run", made, "--replay-experts", file)
    assert "No such file" in run(*replay, code=2)
    file.write_bytes(b"\0\0")
    assert "not a whole safetensors file" in run(*replay, code=2)
    recorded = load_file(experts / "made.safetensors")
    save_file({"1": recorded["1"][1:], "2": recorded["2"] + 3}, file)
    told = " ".join(run(*replay, code=2).split())
    assert "record 1: choices of shape" in told
    assert "record 2: a choice of expert" in told
    assert "record 3: not in the file, which has 1, 2" in told
    assert "the model has no experts" in run("score", folder / "run", made, "--record-experts", file, code=2)
    prompt = ("generate", experts / "run", "--prompt", "a", "--record-experts")
    assert "valid: a file named *.safetensors" in run(*prompt, experts / "x.json", code=2)
    assert "leave out the one or the other" in run(*prompt, file, "--draft", experts / "run", code=2)
