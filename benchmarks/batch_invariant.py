"""The cost of the batch-invariant mode: the ratio of CPU-seconds with and without it, interleaved in one run.

.venv/bin/python benchmarks/batch_invariant.py --rounds 3
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from shardwright.generation.continuous import Batcher
from shardwright.generation.engine import WholeEngine
from shardwright.generation.sampling import Sampling
from shardwright.model.batch_invariant import batch_invariant
from shardwright.model.init import initialise
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer

SPEC = ModelSpec(
    n_layers=2, d_model=512, n_heads=8, n_kv_heads=4, head_dim=64, d_ffn=1536, vocab_size=4096, max_seq_len=512
)


def measure(model: Transformer, n_rounds: int) -> None:
    tokens_BT = torch.randint(SPEC.vocab_size, (2, 512), generator=torch.Generator().manual_seed(0))

    def forward(mode: bool) -> None:
        with torch.no_grad(), batch_invariant(mode):
            model(tokens_BT)

    def train(mode: bool) -> None:
        with batch_invariant(mode):
            model(tokens_BT).sum().backward()
        model.zero_grad()

    def generate(n_sequences: int) -> Callable[[bool], None]:
        prompts = {i: tokens_BT[i % 2, i : i + 64].tolist() for i in range(n_sequences)}

        def run(mode: bool) -> None:
            other = Transformer(SPEC).to(model.embedding.weight.dtype)
            other.load_state_dict(model.state_dict())
            engine = WholeEngine(other, n_sequences, 128, batch_invariant=mode)
            Batcher(engine, Sampling(), 128).complete(prompts, 8)

        return run

    cases = {
        "forward pass, 2 x 512 tokens": forward,
        "forward and backward pass": train,
        "prefill of 64 and 8 new tokens, 1 sequence": generate(1),
        "prefill of 64 and 8 new tokens, 8 sequences": generate(8),
    }
    for name, run in cases.items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(n_rounds + 1):
            for mode in (False, True):
                began = time.process_time()
                run(mode)
                seconds[mode].append(time.process_time() - began)
        plain, invariant = (statistics.median(seconds[mode][1:]) for mode in (False, True))
        print(f"{name}: {plain:.3f} s, {invariant:.3f} s, ratio {invariant / plain:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Transformer(SPEC).to(getattr(torch, options.dtype))
    initialise(model, SPEC, 0)
    measure(model, options.rounds)


if __name__ == "__main__":
    main()
