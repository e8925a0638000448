"""The plan's formulas beside dry runs: peak memory, collectives and messages, and FLOPs of 40 runs up to 16,384 ranks.

    python benchmarks/plan_memory.py [--only NAME ...] [--parts] [--write]

Each pair is a model and a layout. Its fullest rank by the plan is run dry as on a GPU: the training program itself, on
fake tensors. The peak of the live tensors is compared with that of the plan, without the constants that both take for
libraries and the allocator. Calls and bytes are compared for every axis and operation. FLOPs of the plan are the mean
over ranks, so they are compared where all ranks do the same: without a pipeline. `--only` runs some pairs; `--parts`
prints groups of kinds of memory and messages that differ; `--write` writes the table to benchmarks/results. Dry runs
are kept in --results, so that a benchmark that was ended goes on where it was.
"""

import argparse
import datetime
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwright.config import RunConfig, parse
from shardwright.dry_run.planned import PlannedRank, grouped, planned
from shardwright.dry_run.record import LINK, RankRecord, traffic
from shardwright.dry_run.run import DryRunSettings, dry_run, fullest_by_plan
from shardwright.layout.key import written
from shardwright.system.units import GiB
from shardwright.verification.ranks import start_server

HERE = Path(__file__).parent
LLAMA_8B, QWEN_30B = "llama-3.1-8b", "qwen3-30b-a3b"


@dataclass(frozen=True)
class Pair:
    """A model and a layout. `batch`: (seq_len, global_batch, micro_batch); `model`: keys other than the preset's."""

    preset: str
    layout: dict[str, Any]
    batch: tuple[int, int, int]
    model: dict[str, Any]
    compute: str = "bf16"

    @property
    def config(self) -> RunConfig:
        """The run file."""
        seq_len, global_batch, micro_batch = self.batch
        return parse(
            {
                "out": "none",
                "steps": 2,
                "model": {"preset": self.preset, **self.model},
                "data": {"path": "none"},
                "batch": {"seq_len": seq_len, "global_batch": global_batch, "micro_batch": micro_batch},
                "layout": self.layout,
                "precision": {"compute": self.compute},
            }
        )


def pair(preset: str, batch: tuple[int, int, int], compute: str = "bf16", n_layers: int = 0, **layout: Any) -> Pair:
    """A pair; `n_layers`: other than the preset's, for a dry run that is short."""
    return Pair(preset, layout, batch, {"n_layers": n_layers} if n_layers else {}, compute)


PAIRS: dict[str, Pair] = {
    # One axis each.
    "one rank": pair("smollm2-135m", (2048, 8, 2)),
    "one rank, fp32": pair("gpt2", (1024, 8, 2), "fp32"),
    "replicas": pair("llama-3.2-1b", (4096, 16, 1), dp_replicate=4),
    "replicas, fp32": pair("smollm2-135m", (2048, 32, 2), "fp32", dp_replicate=4),
    "zero 1": pair("llama-3.2-1b", (4096, 32, 1), dp_shard=8, zero=1),
    "zero 2": pair("llama-3.2-1b", (4096, 32, 1), dp_shard=8, zero=2),
    "zero 3": pair(LLAMA_8B, (4096, 64, 1), dp_shard=8, zero=3),
    "hybrid": pair(LLAMA_8B, (4096, 512, 1), dp_replicate=16, dp_shard=16, zero=3),
    "tp": pair(LLAMA_8B, (4096, 4, 1), n_layers=8, tp=8, zero=0),
    "tp without token shards": pair(LLAMA_8B, (4096, 4, 1), n_layers=8, tp=4, sequence_parallel=False),
    "tp, GPT": pair("gpt-7.5b", (2048, 16, 2), tp=8, dp_shard=2, zero=1),
    "ring": pair(LLAMA_8B, (32768, 4, 1), n_layers=8, cp=4, cp_method="ring"),
    "zigzag": pair(LLAMA_8B, (131072, 8, 1), cp=16, dp_shard=8, zero=3),
    "all-gather cp": pair(LLAMA_8B, (32768, 4, 1), n_layers=8, cp=4, cp_method="allgather"),
    "ulysses": pair(LLAMA_8B, (32768, 4, 1), n_layers=8, cp=8, cp_method="ulysses"),
    # What is kept, and of what it is freed.
    "recompute selective": pair(LLAMA_8B, (8192, 64, 1), dp_shard=8, recompute="selective"),
    "recompute full": pair(LLAMA_8B, (8192, 64, 2), dp_shard=8, recompute="full"),
    "recompute attention": pair(
        "qwen3-8b", (8192, 32, 1), dp_shard=8, recompute="selective", recompute_modules=("norms", "attention")
    ),
    "chunked loss": pair(LLAMA_8B, (8192, 64, 1), dp_shard=8, loss_chunk_tokens=2048),
    "chunked loss, tp": pair("qwen3-8b", (8192, 64, 1), dp_shard=8, tp=4, loss_chunk_tokens=2048, recompute="full"),
    # Pipelines.
    "1f1b": pair(LLAMA_8B, (4096, 64, 1), pp=4, dp_shard=4, zero=1),
    "1f1b, zero 3 gathered once": pair(LLAMA_8B, (4096, 64, 1), pp=4, dp_shard=4, zero=3),
    "1f1b, zero 3 gathered each": pair(
        LLAMA_8B, (4096, 64, 1), pp=4, dp_shard=4, zero=3, zero_pp_gather="microbatch"
    ),
    "afab": pair("gpt-7.5b", (2048, 32, 1), pp=4, tp=2, pp_schedule="afab", zero=0),
    "interleaved": pair(
        LLAMA_8B, (4096, 32, 1), pp=4, tp=2, dp_shard=2, zero=1, pp_schedule="interleaved-1f1b", virtual_stages=4
    ),
    "interleaved, as many micro-batches as stages": pair(
        LLAMA_8B, (4096, 8, 1), pp=4, tp=2, dp_shard=2, zero=1, pp_schedule="interleaved-1f1b", virtual_stages=4
    ),
    "zb-h1": pair(LLAMA_8B, (4096, 32, 1), pp=4, tp=2, pp_schedule="zb-h1", zero=0),
    "zb-v": pair(LLAMA_8B, (4096, 32, 1), pp=4, dp_shard=2, pp_schedule="zb-v", zero=1),
    "dualpipe": pair(LLAMA_8B, (4096, 32, 1), pp=4, tp=2, pp_schedule="dualpipe", zero=0),
    # Mixtures.
    "mixture": pair("mixtral-8x7b", (4096, 32, 1), n_layers=4, dp_shard=8, ep=8, zero=1),
    "mixture, zero 3": pair("mixtral-8x7b", (4096, 64, 1), dp_shard=32, ep=8, zero=3),
    "mixture and tp": pair(QWEN_30B, (4096, 64, 1), n_layers=12, dp_shard=8, tp=4, ep=8, zero=2),
    "mixture in a pipeline": pair(QWEN_30B, (4096, 64, 1), pp=4, dp_shard=8, ep=8, zero=1),
    "latent attention": pair("deepseek-v3", (4096, 64, 1), n_layers=4, dp_shard=16, tp=4, ep=64, zero=1),
    "DeepSeek-V3 on 2,048": pair(
        "deepseek-v3", (4096, 2048, 1), pp=16, dp_shard=128, ep=64, zero=1, recompute="full"
    ),
    # Large worlds.
    "70B on 256": pair(
        "llama-3.1-70b", (8192, 256, 1), tp=8, pp=4, dp_shard=8, zero=1,
        pp_schedule="interleaved-1f1b", virtual_stages=5,
    ),
    "70B on 512, zero 3": pair("llama-3.1-70b", (8192, 512, 1), tp=8, dp_shard=64, zero=3, recompute="selective"),
    "8B on 16,384": pair(LLAMA_8B, (8192, 16384, 1), dp_shard=16384, zero=3),
    "405B on 16,384": pair(
        "llama-3.1-405b", (8192, 2048, 1), tp=8, pp=16, dp_shard=128, zero=1,
        pp_schedule="interleaved-1f1b", virtual_stages=4,
    ),
    "405B on 16,384, with cp": pair(
        "llama-3.1-405b", (131072, 128, 1), tp=8, pp=16, cp=16, dp_shard=8, zero=1, cp_method="allgather",
        recompute="full",
    ),
}  # fmt: skip
assert len(PAIRS) == 40


NOT_PRICED = ("begin", "optimizer")
"""Actions whose collectives are not compared, nor any of integers: numbers once a step (target tokens, norm of the
gradients), and what routers count, which the plan does not price."""
SCORES_AGAIN = 1 / 5
"""Share of the FLOPs of the backward pass of a flash kernel in which it computes the scores once more: one of five
matmuls. The plan counts those of the model's FLOPs alone."""


@dataclass(frozen=True)
class Dry:
    """What is compared of the dry run of a rank: bytes at the peak by groups of kinds, (calls, bytes) by axis and
    operation, and FLOPs; `seconds`: what it took."""

    rank: int
    groups: dict[str, int]
    moment: str
    sent: dict[str, list[int]]
    flops: float
    seconds: float

    @staticmethod
    def from_record(record: RankRecord, seconds: float = 0.0) -> "Dry":
        """Of a record, without the numbers of a few bytes and the scores that are computed again."""
        priced = [
            each for each in record.messages if each.action not in NOT_PRICED and not each.dtype.startswith("int")
        ]
        large = traffic(priced, record.repeats)
        large |= {key: sums for key, sums in record.sent.items() if key[0] == LINK}
        again = sum(n for op, n in record.flops.items() if "attention" in op and "backward" in op)
        return Dry(
            record.rank,
            grouped(record),
            f"{record.peak.action} {record.peak.module} {record.peak.op}",
            {f"{axis} {op}": [*sums] for (axis, op), sums in large.items() if op != "receive" and axis != "one rank"},
            sum(record.flops.values()) - SCORES_AGAIN * again,
            seconds,
        )


def dry_of(each: Pair) -> Dry:
    """Run the fullest rank of a pair dry."""
    began, config = time.perf_counter(), each.config
    record = dry_run(config, DryRunSettings(1e15), fullest_by_plan(config), remedies=False).fullest
    return Dry.from_record(record, time.perf_counter() - began)


@dataclass(frozen=True)
class Compared:
    """The plan beside the dry run of a rank; numbers as (plan, dry run). FLOPs are None where ranks differ."""

    plan: PlannedRank
    dry: Dry
    ranks: int
    flops: tuple[float, float] | None

    @staticmethod
    def from_run(config: RunConfig, dry: Dry) -> "Compared":
        """Of a run file and the dry run of one of its ranks."""
        layout, plan = config.layout.layout(), planned(config, dry.rank)
        assert not isinstance(plan, str), plan
        return Compared(plan, dry, layout.world_size, (plan.flops, dry.flops) if layout.pp == 1 else None)

    @property
    def peak(self) -> tuple[float, int]:
        """Bytes at the peak."""
        return self.plan.peak_bytes, sum(self.dry.groups.values())

    @property
    def difference(self) -> float:
        """Of the plan's peak from that of the dry run, relative to the latter."""
        return self.peak[0] / self.peak[1] - 1

    @property
    def sent(self) -> dict[str, tuple[list[int], list[int]]]:
        """Calls and bytes by axis and operation."""
        plan = {" ".join(key): [*sums] for key, sums in self.plan.sent.items() if sums.calls}
        return {key: (plan.get(key, [0, 0]), self.dry.sent.get(key, [0, 0])) for key in plan | self.dry.sent}

    @property
    def unequal(self) -> list[str]:
        """Axes and operations whose calls or bytes differ."""
        return [key for key, (plan, dry) in self.sent.items() if plan != dry]

    @property
    def parts(self) -> Iterator[str]:
        """Groups of kinds of memory, and messages that differ."""
        yield f"  at the peak: {self.plan.moment}; {self.dry.moment}"
        for name, n_bytes in self.plan.groups.items():
            off = (n_bytes - self.dry.groups[name]) / self.peak[1]
            yield f"  {name:<24} {n_bytes / GiB:8.3f} {self.dry.groups[name] / GiB:8.3f} GiB {off:+.2%}"
        yield from (f"  {key}: {self.sent[key][0]}, {self.sent[key][1]}" for key in self.unequal)


def lines(found: dict[str, Compared]) -> list[str]:
    """The table, and the numbers that it is about."""
    told = ["| model and layout | ranks | plan GiB | dry run GiB | difference | messages | FLOPs |"]
    told += ["| --- |" + " ---: |" * 4 + " --- | ---: |"]
    for name, each in found.items():
        plan, dry = (n_bytes / GiB for n_bytes in each.peak)
        flops = "" if each.flops is None else f"{each.flops[0] / each.flops[1] - 1:+.2%}"
        told.append(
            f"| {PAIRS[name].preset}: {name} | {each.ranks:,} | {plan:.2f} | {dry:.2f} | {each.difference:+.2%} | "
            f"{', '.join(each.unequal) or 'equal'} | {flops} |"
        )
    off = [abs(each.difference) for each in found.values()]
    worst = max(found, key=lambda name: abs(found[name].difference))
    equal = sum(not each.unequal for each in found.values())
    return [
        *told,
        "",
        f"Peak memory of {len(off)} pairs: mean absolute difference {sum(off) / len(off):.2%}, largest {max(off):.2%} "
        f"({worst}). Calls and bytes of every axis and operation are equal in {equal} of {len(found)}.",
        "FLOPs of the plan have the full square of attention, also where kernels of cp leave out masked blocks, and no "
        "padding of value heads.",
    ]


def report(found: dict[str, Compared]) -> str:
    """The page that `--write` writes."""
    layouts = []
    for name in found:
        each = PAIRS[name]
        changed = f", {each.model['n_layers']} layers" if each.model else ""
        seq_len, global_batch, micro_batch = each.batch
        layout = ", ".join(f"{key} {written(value)}" for key, value in each.layout.items()) or "one rank"
        layouts.append(
            f"- {name}: {each.preset}{changed}, {each.compute}, {global_batch:,} sequences of {seq_len:,} tokens, "
            f"micro-batches of {micro_batch}; {layout}"
        )
    seconds = sum(each.dry.seconds for each in found.values())
    title = f"# The plan beside dry runs, {datetime.date.today()}"
    how = f"`python benchmarks/plan_memory.py`, torch {torch.__version__}; {seconds:,.0f} seconds of dry runs."
    return "\n".join([title, "", how, "", *lines(found), "", *layouts]) + "\n"


def kept_or_run(name: str, folder: Path) -> Dry:
    """The dry run of a pair, from the folder if it is there as the pair is now."""
    path, each = folder / f"{name.replace(' ', '-')}.json", PAIRS[name]
    asked = json.loads(json.dumps(asdict(each)))
    if path.is_file():
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["pair"] == asked:
            return Dry(**told["dry"])
    found = dry_of(each)
    path.write_text(json.dumps({"pair": asked, "dry": asdict(found)}), encoding="utf-8")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(PAIRS), choices=list(PAIRS), metavar="NAME")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("runs/plan-memory"))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    start_server()
    given.results.mkdir(parents=True, exist_ok=True)
    found: dict[str, Compared] = {}
    for name in given.only:
        found[name] = each = Compared.from_run(PAIRS[name].config, kept_or_run(name, given.results))
        print(f"{name}: {each.difference:+.2%}, {each.dry.seconds:.0f} s", flush=True)
        if given.parts:
            print(*each.parts, sep="\n", flush=True)
    print("", *lines(found), sep="\n")
    if given.write:
        (HERE / "results" / f"plan-memory-{datetime.date.today()}.md").write_text(report(found), encoding="utf-8")


if __name__ == "__main__":
    main()
