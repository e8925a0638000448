"""How fast generation decodes beside `transformers` with its cache.

    python benchmarks/generation.py [--rounds 7] [--tokens 160] [--write]

The model of the quickstart (Llama-style, 4.6M parameters, fp32) with random weights, the same in both, one process, one
thread, greedy. A round runs both in turn, in the other order every second time, so that the machine's drift hits both;
what counts is the ratio within a round. Time is CPU-seconds of this process for all tokens but the first, which the
prefill gives. Both have to give the same tokens. `--write` puts the result into benchmarks/results/.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import transformers

from overhead import machine
from shardwright.generation.continuous import Batcher
from shardwright.generation.engine import WholeEngine
from shardwright.generation.sampling import Sampling
from shardwright.generation.source import open_source

PROMPT_TOKENS = 32
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
Generate = Callable[[int], list[list[int]]]
"""Number of new tokens -> those of each sequence."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--tokens", type=int, default=160)
    arguments.add_argument("--write", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        for batch in (1, 4):
            lines.append(compared(Path(folder), theirs, batch, options.rounds, options.tokens))
            print(lines[-1], flush=True)
    if options.write:
        text = [
            f"# Decoding beside transformers, {date.today()}\n",
            f"{machine().removesuffix(' a rank.')}; transformers {transformers.__version__}. New tokens a "
            f"CPU-second of all sequences together, {options.tokens} tokens after a prompt of {PROMPT_TOKENS}, "
            f"medians of {options.rounds} rounds.\n",
            "| sequences | ours | transformers | ours / transformers, median (min to max) |",
            "| --- | --- | --- | --- |",
            *lines,
        ]
        path = Path(__file__).parent / "results" / f"generation-{date.today()}.md"
        path.write_text("\n".join(text) + "\n", encoding="utf-8")


def compared(folder: Path, theirs: torch.nn.Module, batch: int, rounds: int, n_tokens: int) -> str:
    """A row of the table."""
    prompts = torch.randint(SIZES["vocab_size"], (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    sides = {"ours": ours(folder, prompts), "theirs": by_transformers(theirs, prompts)}
    assert sides["ours"](n_tokens) == sides["theirs"](n_tokens), "not the same tokens"
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(rounds):
        for side in list(sides)[:: 1 if number % 2 else -1]:
            seconds = cpu_seconds(sides[side], n_tokens) - cpu_seconds(sides[side], 1)
            rates[side].append(batch * (n_tokens - 1) / seconds)
    ratios = [mine / other for mine, other in zip(*rates.values(), strict=True)]
    medians = " | ".join(f"{statistics.median(found):.0f}" for found in rates.values())
    return f"| {batch} | {medians} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"


def cpu_seconds(generate: Generate, n_tokens: int) -> float:
    began = time.process_time()
    generate(n_tokens)
    return time.process_time() - began


def ours(folder: Path, prompts: torch.Tensor) -> Generate:
    source = open_source(folder)
    engine = WholeEngine(source.whole(torch.device("cpu")), len(prompts), source.spec.max_seq_len)
    batcher = Batcher(engine, Sampling(), source.spec.max_seq_len)
    numbered = dict(enumerate(prompts.tolist()))
    return lambda n_tokens: list(dict(sorted(batcher.complete(numbered, n_tokens).items())).values())


def by_transformers(model: torch.nn.Module, prompts: torch.Tensor) -> Generate:
    def generate(n_tokens: int) -> list[list[int]]:
        out = model.generate(  # type: ignore[operator]
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=n_tokens,
            do_sample=False,
            eos_token_id=None,
            use_cache=True,
        )
        return out[:, prompts.shape[1] :].tolist()

    return generate


if __name__ == "__main__":
    main()
