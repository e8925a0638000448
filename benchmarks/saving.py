"""What checkpoints cost a run: how long it stands still for them, synchronous and beside training, and how long
loading one takes.

    python benchmarks/saving.py --folder /tmp/saving --saves 5

Runs `shardwright train` with 2 local ranks, ZeRO-3, a model of 16 M parameters (196 MB a checkpoint), which saves every
other step: with checkpoint.async_mode = "disabled", and with "async". Printed are medians of the records of kind
`checkpoint` in `metrics.jsonl`, without the last one of a run, which training does not go on beside, and of the seconds
of a step with and without a checkpoint that is written beside it. Then 2 ranks load the last checkpoint, which the
kernel has in memory, so often.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from chaos_runs import write_tokens
from shardwright.config import load as load_run_file
from shardwright.training.build import build_model, build_trainer
from shardwright.training.checkpoint.state import load
from shardwright.verification.ranks import run_ranks

EVERY = 2
RUN_FILE = """
out = "{out}"
steps = {steps}
device = "cpu"
model = {{ n_layers = 5, d_model = 512, n_heads = 8, n_kv_heads = 8, head_dim = 64, d_ffn = 1408, vocab_size = 300, \
max_seq_len = 128 }}
data = {{ path = "{tokens}" }}
batch = {{ seq_len = 128, global_batch = 4 }}
layout = {{ dp_shard = 2, zero = 3 }}
checkpoint = {{ every = {every}, async_mode = "{mode}" }}
metrics = {{ every = 1 }}
evaluation = {{ samples = 0 }}
"""
Numbers = dict[str, float]


def trained(folder: Path, tokens: Path, mode: str, saves: int) -> Numbers:
    """Medians of a run."""
    run_file = folder / f"{mode}.toml"
    steps = EVERY * (saves + 1)
    run_file.write_text(
        RUN_FILE.format(out=folder / mode, steps=steps, tokens=tokens, every=EVERY, mode=mode), encoding="utf-8"
    )
    subprocess.run([sys.executable, "-m", "shardwright", "train", str(run_file)], check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (folder / mode / "metrics.jsonl").read_text().splitlines()]
    saved = [record for record in records if record["kind"] == "checkpoint"][:-1]
    step_s = {record["step"]: record["step_s"] for record in records if record["kind"] == "train"}
    return {
        "saves": len(saved),
        "bytes": saved[0]["n_bytes"],
        "blocked": statistics.median(each["blocked_s"] for each in saved),
        "largest blocked": max(each["blocked_s"] for each in saved),
        "took": statistics.median(each["took_s"] for each in saved),
        "step after a checkpoint": statistics.median(step_s[each["step"] + 1] for each in saved),
        "other step": statistics.median(s for step, s in step_s.items() if step > EVERY and step % EVERY == 0),
    }


def load_seconds(run_file: Path, checkpoint: Path, times: int) -> list[float]:
    """To be run on every rank."""
    config = load_run_file(run_file)
    device = torch.device("cpu")
    trainer = build_trainer(config, build_model(config, device, compiled=False), device, compiled=False)
    found = []
    for _ in range(times):
        dist.barrier()
        began_s = time.monotonic()
        load(checkpoint, trainer, None)
        found.append(time.monotonic() - began_s)
    return found


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder on the disk that is to be measured")
    parser.add_argument("--saves", type=int, default=5)
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    tokens = write_tokens(given.folder)
    found = {mode: trained(given.folder, tokens, mode, given.saves) for mode in ("disabled", "async")}
    for mode, numbers in found.items():
        saves, n_bytes = numbers.pop("saves"), numbers.pop("bytes")
        seconds = ", ".join(f"{name} {value:.4f} s" for name, value in numbers.items())
        print(f"{mode}: {saves:.0f} of {n_bytes / 1e6:.0f} MB; {seconds}")
    share = found["async"]["blocked"] / found["disabled"]["blocked"]
    print(f"an asynchronous checkpoint holds steps up for {share:.1%} of a synchronous one")
    last = given.folder / "disabled" / "checkpoints" / f"step-{EVERY * (given.saves + 1):08d}"
    import saving  # ranks find its function by this name, and not as one of the main script

    loaded = run_ranks(saving.load_seconds, 2, given.folder / "disabled.toml", last, given.saves, timeout_s=600.0)
    print(f"loading: median {statistics.median(map(max, zip(*loaded, strict=True))):.4f} s")


if __name__ == "__main__":
    main()
