"""Speed and memory of one GPU: SmolLM2-1.7B and Llama-3.2-1B in bf16 at sequence 4096, compile off and on.

    python benchmarks/gpu.py [--write]
    python benchmarks/gpu.py --device cpu --presets debug --seq-len 128 --steps 4     does the script itself run?

Tokens/s and MFU are medians of the logged steps of real runs, through the same loop as `shardwright train`. The
measured peak of memory stands beside the sum that the formulas give: fp32 weights, gradients and AdamW's two moments,
4 bytes a parameter each; the bf16 copy that products are made with, 2 bytes; and activations.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

from shardwright.config import parse
from shardwright.data.prepare import prepare
from shardwright.model.presets import resolve
from shardwright.model.spec import ModelSpec
from shardwright.training.loop import run
from shardwright.training.ranks import Place
from shardwright.units import GiB

PRESETS = ["smollm2-1.7b", "llama-3.2-1b"]


def activation_bytes(spec: ModelSpec, tokens: int) -> int:
    """What a decoder without recomputation keeps for its backward pass, in bf16, flash attention, no dropout.

    A layer keeps, for each token, with h = d_model, a heads and k kv heads of width c, f = d_ffn (2 bytes an element):
    the residual stream before both norms 2h, both normalised inputs 2h, q and o each ac, k and v each kc, gate, up,
    silu(gate) and their product 4f; and 4 bytes a head of softmax statistics. The head keeps its input 2h and logits
    of V in bf16, and in fp32 with their gradient. After Korthikanti et al. (arXiv 2205.05198), section 4.1, with SwiGLU
    and grouped heads put in; the norms' statistics and the embedding's token ids are left out.
    """
    h, f, v = spec.d_model, spec.d_ffn, spec.vocab_size
    heads = 2 * spec.n_heads * spec.head_dim + 2 * spec.n_kv_heads * spec.head_dim
    layer = 2 * (4 * h + heads + 4 * f) + 4 * spec.n_heads
    return tokens * (spec.n_layers * layer + 2 * 2 * h + v * (2 + 4 + 4))


def state_bytes(spec: ModelSpec) -> int:
    """fp32 weights, gradients and two moments, and the bf16 copy: 18 bytes a parameter."""
    return 18 * spec.n_parameters


def measure(preset: str, compiled: bool, data: Path, options: argparse.Namespace) -> dict[str, float | None]:
    """One run of a preset in this process; medians over the steps after the warm-up."""
    with tempfile.TemporaryDirectory() as out:
        table: dict[str, Any] = {
            "out": out,
            "steps": options.warmup + options.steps,
            "device": options.device,
            "model": {"preset": preset},
            "data": {"path": str(data)},
            "batch": {
                "seq_len": options.seq_len,
                "global_batch": options.micro_batch,
                "micro_batch": options.micro_batch,
            },
            "precision": {"compute": "bf16", "compile": compiled},
            "metrics": {"every": 1},
            "evaluation": {"samples": 0},
        }
        run(parse(table), Place(), quiet=True)
        lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][options.warmup :]
    mfu = [record["mfu"] for record in records]
    return {
        "tokens_per_s": statistics.median(record["tokens_per_s"] for record in records),
        "mfu": None if None in mfu else statistics.median(mfu),
        "peak_bytes": records[-1]["memory_bytes"],
    }


def write_tokens(folder: Path, seq_len: int) -> Path:
    """A data folder with enough tokens for every run, of a vocabulary that every preset has."""
    (folder / "text").mkdir()
    words = [f"{i * 7919 % 10007:04d}" for i in range(5000)]
    for i in range(8):
        (folder / "text" / f"{i}.txt").write_text(" ".join(words[i:] * (1 + seq_len // 512)))
    prepare(folder / "text", folder / "tokens", vocab_size=400)
    return folder / "tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="counted steps")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="put the result into benchmarks/results")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        preset, compiled, data = options.child
        print(json.dumps(measure(preset, compiled == "on", Path(data), options)))
        sys.stdout.flush()
        os._exit(0)
    table = _table(options)
    print(table)
    if options.write:
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        path = Path(__file__).parent / "results" / f"gpu-{date.today()}.md"
        command = f"`python benchmarks/gpu.py {' '.join(sys.argv[1:])}`"
        path.write_text(f"# One {name}, {date.today()}, torch {torch.__version__}\n\n{command}\n\n{table}\n")


def _table(options: argparse.Namespace) -> str:
    lines = [
        "| model | compile | tokens/s | MFU | peak GiB | formulas GiB (state + activations) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        data = write_tokens(Path(folder), options.seq_len)
        for preset in options.presets:
            spec = resolve(preset)
            state = state_bytes(spec)
            activations = activation_bytes(spec, options.micro_batch * options.seq_len)
            for compiled in ("off", "on"):
                # A process of its own: the allocator's peak and the compiler's caches start empty.
                found = subprocess.run(
                    [sys.executable, __file__, *sys.argv[1:], "--child", preset, compiled, str(data)],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                result = json.loads(found.stdout.splitlines()[-1])
                mfu = "n/a" if result["mfu"] is None else f"{result['mfu']:.1%}"
                lines.append(
                    f"| {preset} | {compiled} | {result['tokens_per_s']:.0f} | {mfu} | "
                    f"{result['peak_bytes'] / GiB:.2f} | {(state + activations) / GiB:.2f} "
                    f"({state / GiB:.2f} + {activations / GiB:.2f}) |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
