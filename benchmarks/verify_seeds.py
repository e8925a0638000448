"""How near to its bounds `verify` comes on correct code, in types with rounding: models x seeds, one line of JSON each.

    python benchmarks/verify_seeds.py --dtype float32 --seeds 20-29 > seeds.jsonl

A line has the model, the layout, the seed, whether all was equal, and for each quantity the largest error divided by
its bound. What is not equal is a false alarm: the exit status is then 1.
"""

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from shardwright.config import load
from shardwright.layout.layout import Layout
from shardwright.verification import Verifier
from shardwright.verification.case import case_of
from shardwright.verification.cut_case import cut

EXAMPLES = Path(__file__).parents[1] / "examples"
QWEN = [
    "model.preset=qwen3-30b-a3b",
    "batch.seq_len=192",
    "batch.global_batch=48",
    "batch.micro_batch=2",
    "optimizer.lr=3e-3",
]
CASES = (
    ("moe.toml", QWEN, Layout(tp=2, ep=2)),
    ("moe.toml", [], Layout(tp=2, ep=2)),
    ("moe.toml", ["model.preset=deepseek-v3"], Layout(dp_shard=2, zero=3, ep=2)),
    ("debug.toml", [], Layout(tp=2)),
    ("debug.toml", [], Layout(cp=2, zero=2)),
    ("debug.toml", ["model.preset=llama-3.1-8b"], Layout(pp=2)),
    ("debug.toml", ["model.preset=gpt2"], Layout(dp_shard=2, zero=2)),
)


def main() -> int:
    """Verify every case with every seed; 1 if any was not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--seeds", default="0-9", metavar="FIRST-LAST", help="both included [default: %(default)s]")
    given = parser.parse_args()
    first, last = map(int, given.seeds.split("-"))
    alarms = 0
    for seed in range(first, last + 1):
        for file, changes, layout in CASES:
            config = load(EXAMPLES / file, [*changes, "layout.dp_shard=1", "layout.ep=1"])
            case = cut(replace(case_of(config, dtype=given.dtype), seed=seed), [layout])
            with Verifier() as verifier:
                report = verifier.parity(case, layout)
            nearest: dict[str, float] = defaultdict(float)
            for row in report.rows:
                nearest[row.quantity.kind] = max(nearest[row.quantity.kind], round(row.excess, 3))
            alarms += not report.equal
            model = next((change for change in changes if change.startswith("model.preset")), file)
            line = {"model": model, "layout": str(layout), "seed": seed, "equal": report.equal, "error/bound": nearest}
            print(json.dumps(line), flush=True)
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
