"""What `plan serve` predicts for `shardwright generate` on this machine beside the passes that it runs.

    shardwright measure --out mine.toml
    python benchmarks/generate_local.py mine.toml [--rounds 3] [--prompt 32] [--new 33] [--write]

On a machine that other programs load, both with OMP_NUM_THREADS=1, and `--clock cpu` for the first: CPU-seconds of two
threads say little of passes that one of them starts.

The model is that of the quickstart with random weights, in fp32. For each number of sequences and each tp, prefill is
the generation of one token of each sequence, and a decode pass what each further token takes, in the clock of the
file; tokens are drawn as `generate` draws them. Rounds are interleaved, and the medians over them count. Printed are
all of them and the mean absolute error. `--write` puts the table into benchmarks/results/.
"""

import argparse
import statistics
import sys
from datetime import date
from pathlib import Path

import numpy as np

from shardwright.cli.quickstart import RUN_FILE, VOCAB_SIZE
from shardwright.config import parse
from shardwright.cost.hardware import cluster
from shardwright.measuring.clock import Kind, worst
from shardwright.measuring.generation import passes_of
from shardwright.model.spec import ModelSpec
from shardwright.serving import forms
from shardwright.serving.host import rates_of
from shardwright.serving.setting import Degrees, Serving, Settings
from shardwright.system.files import parse_toml
from shardwright.system.processes import threads_of_a_rank
from shardwright.verification.ranks import run_ranks, start_server

SEQUENCES, DEGREES = (1, 2, 4, 8, 16, 32), (1, 2)


def model() -> ModelSpec:
    """That of the quickstart."""
    text = RUN_FILE.format(out="none", steps=1, vocab_size=VOCAB_SIZE, data="none", warmup=1)
    return parse(parse_toml(text)).model.spec()


def measured(kind: Kind, tp: int, sequences: int, prompt: int, new: int) -> tuple[float, float]:
    """Of the rank that takes longest."""
    ranks = run_ranks(
        passes_of, tp, model(), kind, tp, sequences, prompt, new, timeout_s=900, n_threads=threads_of_a_rank(tp)
    )
    return worst([rank[0] for rank in ranks]), worst([rank[1] for rank in ranks])


def predicted(hardware: Path, tp: int, sequences: int, prompt: int, new: int) -> tuple[float, float]:
    """Seconds of prefill and of a decode pass, by the formulas of `plan serve`."""
    name = next(iter(parse_toml(hardware.read_text())["accelerators"]))
    there = cluster(f"{name}:{tp}/{tp}", hardware)
    assert there.accelerator.rates is not None
    rates = rates_of(there.accelerator.rates)
    serving = Serving(model=model(), cluster=there, rates=rates, precision="fp32", kv_precision="fp32")
    settings = Settings.from_layouts([Degrees(tp)])
    first = forms.prefill_s(serving, settings, sequences, prompt)
    further = forms.decode_s(serving, settings, sequences, forms.middle(prompt, new))
    return float(np.max(first)), float(np.max(further))


def report(hardware: Path, runs: dict[tuple[int, int], list[tuple[float, float]]], prompt: int, new: int) -> str:
    lines = [
        "| tp | sequences | pass | measured ms | predicted ms | error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    errors = []
    for (tp, sequences), found in runs.items():
        for at, what in enumerate(("prefill", "decode")):
            took = statistics.median(each[at] for each in found)
            said = predicted(hardware, tp, sequences, prompt, new)[at]
            errors.append(said / took - 1)
            lines.append(f"| {tp} | {sequences} | {what} | {took * 1e3:.2f} | {said * 1e3:.2f} | {errors[-1]:+.0%} |")
    of = np.abs(errors)
    lines.append(f"\nmean absolute error: {of.mean():.1%}; worst: {of.max():.0%}; {len(of)} passes")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hardware", type=Path, help="what shardwright measure has written")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=33, help="tokens of a continuation")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/results/")
    options = parser.parse_args()
    table = parse_toml(options.hardware.read_text())["measured"]
    start_server()
    runs: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for round_ in range(options.rounds):
        for tp in DEGREES:
            for sequences in SEQUENCES:
                found = measured(table["clock"], tp, sequences, options.prompt, options.new)
                runs.setdefault((tp, sequences), []).append(found)
                print(f"round {round_ + 1}: tp {tp}, {sequences} sequences", file=sys.stderr, flush=True)
    text = report(options.hardware, runs, options.prompt, options.new)
    print(text)
    if options.write:
        path = Path(__file__).parent / "results" / f"generate-local-{date.today()}.md"
        head = (
            f"{table['machine']}, {table['clock']} seconds, prompts of {options.prompt} tokens, continuations of "
            f"{options.new}, medians of {options.rounds} rounds."
        )
        path.write_text(f"# Generation as predicted and as measured, {date.today()}\n\n{head}\n\n{text}\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
